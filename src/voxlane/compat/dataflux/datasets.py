"""What Dataflux's two datasets share: its constructor, and the attributes that its users read and change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from voxlane.compat.dataflux.clients import check_compose_permissions
from voxlane.compat.dataflux.config import Config
from voxlane.compat.dataflux.samples import DatafluxSamples, DatafluxSource, ListedObject
from voxlane.store.listing import Manifest


def data_format_default(data: bytes) -> bytes:
    """Return the object's bytes as they are."""
    return data


class DatafluxDataset:
    """Dataflux's constructor and attributes; a mixin that precedes one of voxlane's datasets in the bases of a class.

    `project_name` is stored and has no other effect. The bucket is listed when the samples are first needed, not in
    the constructor.
    """

    samples: Any
    """The `DatafluxSamples` of this dataset."""

    def __init__(
        self,
        project_name: str | None,
        bucket_name: str,
        config: Config | None = None,
        data_format_fn: Callable[[bytes], Any] = data_format_default,
        storage_client: Any = None,
    ) -> None:
        self.project_name, self.bucket_name = project_name, bucket_name
        self.config = config or Config()
        decode = None if data_format_fn is data_format_default else data_format_fn
        source = DatafluxSource(project_name, bucket_name, self.config, storage_client, decode, type(self)._new_lister)
        super().__init__(DatafluxSamples(source), **self._order)  # type: ignore[call-arg]  # voxlane's dataset
        if self.config.max_composite_object_size and (storage_client is not None or self._always_checks_permissions):
            check_compose_permissions(storage_client, bucket_name)
        self.dataflux_download_optimization_params = self._new_params(self.config.max_composite_object_size)
        if type(self)._list_GCS_blobs_with_retry is not DatafluxDataset._list_GCS_blobs_with_retry:
            self.objects = self._list_GCS_blobs_with_retry()  # a subclass chooses the samples

    _always_checks_permissions = False
    """Whether the permissions of composed download are checked also if no client was passed."""
    _order: dict[str, Any] = {}  # noqa: RUF012 - constant
    """Arguments of voxlane's dataset."""

    @staticmethod
    def _new_lister(**arguments: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def _new_params(max_composite_object_size: int) -> Any:
        raise NotImplementedError

    @property
    def objects(self) -> list[ListedObject]:
        """Name and size in bytes of the object of each sample, in order. Assign another list, or change it in place,
        to choose the samples."""
        objects: list[ListedObject] = self.samples.objects
        return objects

    @objects.setter
    def objects(self, objects: list[ListedObject]) -> None:
        self.samples.objects = objects

    @property
    def manifest(self) -> Manifest:
        """The samples' objects."""
        manifest: Manifest = self.samples.manifest
        return manifest

    @property
    def storage_client(self) -> Any:
        """The client that was passed, or None. In a spawned worker it is another one with the same endpoint and
        credentials."""
        return self.samples.source.client

    @storage_client.setter
    def storage_client(self, storage_client: Any) -> None:
        self.samples.source.client = storage_client

    @property
    def data_format_fn(self) -> Callable[[bytes], Any]:
        """The function from an object's bytes to the sample."""
        return self.samples.source.decode or data_format_default

    @data_format_fn.setter
    def data_format_fn(self, data_format_fn: Callable[[bytes], Any]) -> None:
        self.samples.source.decode = data_format_fn

    def _list_GCS_blobs_with_retry(self) -> list[ListedObject]:  # noqa: N802 - Dataflux's name
        """List the bucket anew. A subclass may override this to choose the samples."""
        listed: list[ListedObject] = self.samples.source.list_tuples()
        return listed
