"""Read one epoch from a bucket with each contender, as its documentation shows: the work of a measured process.

Every contender yields samples as uint8 tensors to a DataLoader, which stacks them into batches, with the same number of
workers and the same batch size. Libraries are imported where they are used, so that a contender's process holds none of
the others, and before workers start, so that imports are not measured. Creating clients is measured, because each
worker needs its own.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from isolated_runs import Sample, Stopwatch
from servers import ACCESS_KEY, REGION, SECRET_KEY

ReadOne = Callable[[str], bytes]
"""Reads the object of a key."""
ReadBatch = Callable[[Sequence[str]], Iterable[bytes]]
"""Reads the objects of several keys, in order."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch to measure."""

    contender: str
    style: str
    """Style of the dataset: map or iterable."""
    endpoint: str
    bucket: str
    prefix: str
    """Prefix of the objects, with a slash at the end; `key_name` gives their names."""
    count: int
    size_bytes: int
    batch_size: int
    num_workers: int
    options: dict[str, Any]
    """Options of our datasets: `store` (fields of StoreConfig) and `dataset` (arguments of the dataset)."""

    @property
    def keys(self) -> list[str]:
        """Return all keys, in order."""
        return [self.prefix + key_name(i) for i in range(self.count)]


def key_name(index: int) -> str:
    """Return the name of object `index` below its prefix."""
    return f"img-{index:08d}.bin"


def run_epoch(**arguments: Any) -> Sample:
    """Read one epoch; return the times, memory and CPU time of this client."""
    epoch = Epoch(**arguments)
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    os.environ.update(
        STORAGE_EMULATOR_HOST=epoch.endpoint,
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_DEFAULT_REGION=REGION,
        AWS_REGION=REGION,
        GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",  # otherwise gcsfs waits a minute for a service that emulators lack
        GOOGLE_CLOUD_PROJECT="benchmark",
    )
    if epoch.contender in ("boto3", "s3fs"):
        # Our S3 extra installs awscrt, with which botocore computes CRC32 at half the speed of zlib.
        sys.modules["awscrt"] = None  # type: ignore[assignment]
    dataset = CONTENDERS[epoch.contender](epoch)
    if epoch.contender.startswith("voxlane"):
        from voxlane import DataLoader as OurLoader

        loader: Any = OurLoader(dataset, epoch.batch_size, num_workers=epoch.num_workers)
    else:
        loader = DataLoader(dataset, epoch.batch_size, num_workers=epoch.num_workers)
    rss_bytes = psutil.Process().memory_info().rss
    read_bytes = samples = 0
    first_batch_s = 0.0
    watch = Stopwatch()
    for batch in loader:
        first_batch_s = first_batch_s or watch.elapsed_s()
        samples += len(batch)
        read_bytes += batch.numel()
    total_s = watch.elapsed_s()
    expected = epoch.count * epoch.size_bytes
    if (samples, read_bytes) != (epoch.count, expected):
        raise AssertionError(f"{samples} samples, {read_bytes} bytes; expected {epoch.count} and {expected}")
    return {
        "total_s": total_s,
        "first_batch_s": first_batch_s,
        "client_cpu_s": watch.cpu_s(),
        "rss_before_bytes": rss_bytes,
        "samples": samples,
        "bytes": read_bytes,
    }


def to_tensor(body: bytes) -> torch.Tensor:
    """Decode an object without a copy; all contenders use this."""
    return torch.frombuffer(body, dtype=torch.uint8)


# -- ours --------------------------------------------------------------------------------------------------------------


def voxlane(epoch: Epoch, **store_options: Any) -> Any:
    """Use our datasets with their defaults."""
    import voxlane

    kind = voxlane.MapDataset if epoch.style == "map" else voxlane.IterableDataset
    scheme = "s3" if epoch.bucket.startswith("s3") else "gs"
    config = voxlane.StoreConfig(endpoint=epoch.endpoint, **epoch.options.get("store", {}), **store_options)
    arguments = epoch.options.get("dataset", {})
    dataset = kind(f"{scheme}://{epoch.bucket}/{epoch.prefix}", decode=to_tensor, config=config, **arguments)
    len(dataset)  # lists now, because listing has its own benchmark
    return dataset


# -- a client that is called once per sample --------------------------------------------------------------------------


class PerSample(Dataset[torch.Tensor]):
    """Reads one object per sample. Each worker calls `open_client` on first use."""

    def __init__(self, keys: Sequence[str], open_client: Callable[[], ReadOne]) -> None:
        self._keys = keys
        self._open_client = open_client
        self._read: ReadOne | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> torch.Tensor:
        self._read = self._read or self._open_client()
        return to_tensor(self._read(self._keys[index]))


class PerSampleStream(IterableDataset[torch.Tensor]):
    """Reads one object per sample as a stream; each of n workers takes every n-th key."""

    def __init__(self, keys: Sequence[str], open_client: Callable[[], ReadOne]) -> None:
        self._keys = keys
        self._open_client = open_client

    def __iter__(self) -> Iterator[torch.Tensor]:
        read = self._open_client()
        for key in worker_share(self._keys):
            yield to_tensor(read(key))


def worker_share(keys: Sequence[str]) -> Sequence[str]:
    """Return the keys that this DataLoader worker reads."""
    worker = get_worker_info()
    return keys if worker is None else keys[worker.id :: worker.num_workers]


def per_sample(epoch: Epoch, open_client: Callable[[], ReadOne]) -> Any:
    """Return the dataset in the epoch's style."""
    return (PerSample if epoch.style == "map" else PerSampleStream)(epoch.keys, open_client)


def boto3(epoch: Epoch) -> Any:
    """Call `get_object` for each sample."""
    import boto3

    def open_client() -> ReadOne:
        client = boto3.client("s3", endpoint_url=epoch.endpoint, region_name=REGION)
        return lambda key: client.get_object(Bucket=epoch.bucket, Key=key)["Body"].read()

    return per_sample(epoch, open_client)


def google_cloud_storage(epoch: Epoch) -> Any:
    """Call `download_as_bytes` for each sample."""
    from google.cloud import storage

    def open_client() -> ReadOne:
        bucket = storage.Client().bucket(epoch.bucket)
        return lambda key: bucket.blob(key).download_as_bytes()

    return per_sample(epoch, open_client)


# -- fsspec, at its best: the concurrent `cat` of a whole batch --------------------------------------------------------


class PerBatch(Dataset[torch.Tensor]):
    """Reads the objects of a batch together. Each worker calls `open_client` on first use."""

    def __init__(self, keys: Sequence[str], open_client: Callable[[], ReadBatch]) -> None:
        self._keys = keys
        self._open_client = open_client
        self._read: ReadBatch | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        self._read = self._read or self._open_client()
        return [to_tensor(body) for body in self._read([self._keys[i] for i in indices])]


class PerBatchStream(IterableDataset[torch.Tensor]):
    """Reads the objects of a batch together, as a stream."""

    def __init__(self, keys: Sequence[str], open_client: Callable[[], ReadBatch], batch_size: int) -> None:
        self._keys = keys
        self._open_client = open_client
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        read = self._open_client()
        keys = worker_share(self._keys)
        for start in range(0, len(keys), self._batch_size):
            yield from map(to_tensor, read(keys[start : start + self._batch_size]))


def fsspec(epoch: Epoch, protocol: str) -> Any:
    """Call `cat` for a batch of keys, which fsspec fetches concurrently."""
    import fsspec

    fsspec.get_filesystem_class(protocol)  # imports the library before workers start

    def open_client() -> ReadBatch:
        if protocol == "s3":
            client_options = {"endpoint_url": epoch.endpoint, "region_name": REGION}
            system = fsspec.filesystem("s3", client_kwargs=client_options, skip_instance_cache=True)
        else:
            system = fsspec.filesystem("gcs", endpoint_url=epoch.endpoint, token="anon", skip_instance_cache=True)

        def read(keys: Sequence[str]) -> Iterable[bytes]:
            paths = [f"{epoch.bucket}/{key}" for key in keys]
            bodies = system.cat(paths)
            return [bodies] if isinstance(bodies, bytes) else [bodies[path] for path in paths]

        return read

    if epoch.style == "map":
        return PerBatch(epoch.keys, open_client)
    return PerBatchStream(epoch.keys, open_client, epoch.batch_size)


# -- the other connectors ----------------------------------------------------------------------------------------------


def s3torchconnector(epoch: Epoch) -> Any:
    """Use AWS's connector with the keys, so that it does not list within the measured time."""
    from s3torchconnector import S3ClientConfig, S3IterableDataset, S3MapDataset

    arguments: dict[str, Any] = {
        "region": REGION,
        "endpoint": epoch.endpoint,
        "transform": lambda reader: to_tensor(reader.read()),
        "s3client_config": S3ClientConfig(force_path_style=True),
    }
    uris = [f"s3://{epoch.bucket}/{key}" for key in epoch.keys]
    if epoch.style == "map":
        return S3MapDataset.from_objects(uris, **arguments)
    return S3IterableDataset.from_objects(uris, enable_sharding=True, **arguments)


def dataflux(epoch: Epoch) -> Any:
    """Use Google's connector with its defaults (composed download on); its constructor lists."""
    from dataflux_pytorch import dataflux_iterable_dataset, dataflux_mapstyle_dataset

    if epoch.style == "map":
        config = dataflux_mapstyle_dataset.Config(prefix=epoch.prefix)
        kind = dataflux_mapstyle_dataset.DataFluxMapStyleDataset
    else:
        config = dataflux_iterable_dataset.Config(prefix=epoch.prefix)
        kind = dataflux_iterable_dataset.DataFluxIterableDataset
    return kind("benchmark", epoch.bucket, config, data_format_fn=to_tensor)


CONTENDERS: dict[str, Callable[[Epoch], Any]] = {
    "voxlane": voxlane,
    "voxlane, unverified": lambda epoch: voxlane(epoch, verify="off"),
    "boto3": boto3,
    "s3torchconnector": s3torchconnector,
    "s3fs": lambda epoch: fsspec(epoch, "s3"),
    "google-cloud-storage": google_cloud_storage,
    "dataflux": dataflux,
    "gcsfs": lambda epoch: fsspec(epoch, "gcs"),
}
