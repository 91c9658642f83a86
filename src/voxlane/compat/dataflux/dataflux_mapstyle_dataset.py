"""`dataflux_pytorch.dataflux_mapstyle_dataset`, over `voxlane.MapDataset`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from voxlane.compat.dataflux.config import Config
from voxlane.compat.dataflux.dataset import Objects, samples
from voxlane.dataset import MapDataset

__all__ = ["Config", "DataFluxMapStyleDataset"]


class DataFluxMapStyleDataset(Objects, MapDataset):
    """Dataflux's map-style dataset; `project_name` is taken and not needed."""

    def __init__(
        self,
        project_name: str | None,
        bucket_name: str,
        config: Config | None = None,
        data_format_fn: Callable[[bytes], Any] | None = None,
        storage_client: Any = None,
    ) -> None:
        self.project_name, self.bucket_name = project_name, bucket_name
        super().__init__(samples(bucket_name, config or Config(), data_format_fn, storage_client))
