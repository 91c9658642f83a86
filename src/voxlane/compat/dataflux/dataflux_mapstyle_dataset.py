"""`dataflux_pytorch.dataflux_mapstyle_dataset`, based on `voxlane.MapDataset`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from voxlane.compat.dataflux.config import Config, store_config
from voxlane.dataset import MapDataset
from voxlane.dataset.samples import Samples, SampleSource

__all__ = ["Config", "DataFluxMapStyleDataset"]


class DatafluxDataset:
    """Dataflux's constructor and `objects`; a mixin that precedes one of voxlane's datasets in the bases of a class."""

    samples: Samples

    def __init__(
        self,
        project_name: str | None,
        bucket_name: str,
        config: Config | None = None,
        data_format_fn: Callable[[bytes], Any] | None = None,
        storage_client: Any = None,
    ) -> None:
        self.project_name, self.bucket_name = project_name, bucket_name
        config = config or Config()
        source = SampleSource(
            f"gs://{bucket_name}/{config.prefix or ''}",
            decode=data_format_fn,
            config=store_config(config, storage_client),
            compose="auto" if config.max_composite_object_size else "off",
            compose_max_bytes=config.max_composite_object_size,
        )
        super().__init__(Samples(source))  # type: ignore[call-arg]  # the constructor of voxlane's dataset

    @cached_property
    def objects(self) -> list[tuple[str, int]]:
        """Name and size in bytes of every object, in order."""
        manifest = self.samples.sources[""].manifest
        return list(zip(manifest.keys(), manifest.sizes.tolist(), strict=True))


class DataFluxMapStyleDataset(DatafluxDataset, MapDataset):
    """Dataflux's map-style dataset; `project_name` is accepted and ignored."""
