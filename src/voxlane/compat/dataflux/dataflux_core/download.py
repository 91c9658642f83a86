"""`dataflux_core.download`, based on voxlane's datasets.

The functions read objects directly and concurrently, whatever `max_composite_object_size` and the numbers of threads or
processes are. Only `compose` joins objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from voxlane.compat.dataflux.clients import add_user_agent, is_foreign_client, new_client, open_store
from voxlane.compat.dataflux.config import Config, make_retry, translate_retry
from voxlane.compat.dataflux.samples import DatafluxSamples, DatafluxSource, ListedObject
from voxlane.dataset.compose import MAX_SOURCES
from voxlane.dataset.samples import READ_AHEAD_BYTES, read_ahead
from voxlane.errors import ChangedError, ConfigError
from voxlane.store.gcs_json import GcsJson

MODIFIED_RETRY = make_retry(300.0, 1.2, 45.0)
MAX_NUM_OBJECTS_TO_COMPOSE = MAX_SOURCES
COMPOSED_PREFIX = "dataflux-composed-objects/"


class DataFluxDownloadOptimizationParams:
    """Dataflux's maximum size of a joined object in bytes."""

    def __init__(self, max_composite_object_size: int) -> None:
        self.max_composite_object_size = max_composite_object_size


def download_single(
    storage_client: Any, bucket_name: str, object_name: str, retry_config: Any = MODIFIED_RETRY
) -> bytes:
    """Return the bytes of one object."""
    if is_foreign_client(storage_client):
        body: bytes = storage_client.bucket(bucket_name).blob(object_name).download_as_bytes(retry=retry_config)
        return body
    return bytes(open_store(storage_client, bucket_name, translate_retry(retry_config)).get(object_name))


def dataflux_download_lazy(
    project_name: str | None,
    bucket_name: str,
    objects: Sequence[ListedObject],
    storage_client: Any = None,
    dataflux_download_optimization_params: DataFluxDownloadOptimizationParams | None = None,
    threading_enabled: bool = False,
    retry_config: Any = MODIFIED_RETRY,
) -> Iterator[bytes]:
    """Yield the bytes of each object in order, reading ahead."""
    add_user_agent(storage_client)
    config = Config(list_retry_config=retry_config, download_retry_config=retry_config)
    source = DatafluxSource(project_name, bucket_name, config, storage_client)
    if not source.has_foreign_client:
        source.store = open_store(storage_client, bucket_name, translate_retry(retry_config))
    samples = DatafluxSamples(source, list(objects))
    for sample in read_ahead(samples, range(len(samples)), READ_AHEAD_BYTES):
        yield sample.result()


def dataflux_download(
    project_name: str | None,
    bucket_name: str,
    objects: Sequence[ListedObject],
    storage_client: Any = None,
    dataflux_download_optimization_params: DataFluxDownloadOptimizationParams | None = None,
    threading_enabled: bool = False,
    retry_config: Any = MODIFIED_RETRY,
) -> list[bytes]:
    """Return the bytes of each object, in order."""
    return list(dataflux_download_lazy(project_name, bucket_name, objects, storage_client, retry_config=retry_config))


def dataflux_download_threaded(
    project_name: str | None,
    bucket_name: str,
    objects: Sequence[ListedObject],
    storage_client: Any = None,
    dataflux_download_optimization_params: DataFluxDownloadOptimizationParams | None = None,
    threads: int = 1,
    retry_config: Any = MODIFIED_RETRY,
) -> list[bytes]:
    """Return the bytes of each object, in order. The number of threads is voxlane's."""
    return dataflux_download(project_name, bucket_name, objects, storage_client, retry_config=retry_config)


def dataflux_download_parallel(
    project_name: str | None,
    bucket_name: str,
    objects: Sequence[ListedObject],
    storage_client: Any = None,
    dataflux_download_optimization_params: DataFluxDownloadOptimizationParams | None = None,
    parallelization: int = 1,
    retry_config: Any = MODIFIED_RETRY,
) -> list[bytes]:
    """Return the bytes of each object, in order. Threads read them instead of processes."""
    return dataflux_download(project_name, bucket_name, objects, storage_client, retry_config=retry_config)


def compose(
    project_name: str | None,
    bucket_name: str,
    destination_blob_name: str,
    objects: Sequence[ListedObject],
    storage_client: Any = None,
    retry_config: Any = MODIFIED_RETRY,
) -> Any:
    """Join up to 32 objects into a new one on the server and return its Blob."""
    if len(objects) > MAX_NUM_OBJECTS_TO_COMPOSE:
        raise ConfigError(
            f"GCS joins at most {MAX_NUM_OBJECTS_TO_COMPOSE} objects in one request, got {len(objects)}",
            uri=f"gs://{bucket_name}/{destination_blob_name}",
        )
    client = storage_client or new_client(project_name)
    add_user_agent(client)
    bucket = client.bucket(bucket_name)
    blob = bucket.blob(destination_blob_name)
    if is_foreign_client(client):
        blob.compose([bucket.blob(name) for name, _ in objects], retry=retry_config)
    else:
        store = open_store(client, bucket_name, translate_retry(retry_config))
        GcsJson(store).compose(destination_blob_name, [(name, None) for name, _ in objects])
    return blob


def decompose(
    project_name: str | None,
    bucket_name: str,
    composite_object_name: str,
    objects: Sequence[ListedObject],
    storage_client: Any = None,
    retry_config: Any = MODIFIED_RETRY,
) -> list[bytes]:
    """Return the bytes of each of the objects that `compose` joined. Raises ChangedError if their sizes do not add up
    to that of the joined object."""
    add_user_agent(storage_client)
    body = download_single(storage_client, bucket_name, composite_object_name, retry_config)
    offsets = list(accumulate((size for _, size in objects), initial=0))
    if offsets[-1] != len(body):
        raise ChangedError(
            f"the joined object has {len(body):,} bytes, its parts have {offsets[-1]:,}",
            uri=f"gs://{bucket_name}/{composite_object_name}",
            fix="A part changed after it was listed: list them again",
        )
    return [body[start:stop] for start, stop in pairwise(offsets)]
