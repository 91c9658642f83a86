"""`dataflux_pytorch.dataflux_mapstyle_dataset`, based on `voxlane.MapDataset`."""

from __future__ import annotations

from typing import Any

from voxlane.compat.dataflux import dataflux_core
from voxlane.compat.dataflux.clients import CREATE, DELETE
from voxlane.compat.dataflux.config import MODIFIED_RETRY, Config
from voxlane.compat.dataflux.datasets import DatafluxDataset, data_format_default
from voxlane.dataset import MapDataset

__all__ = ["CREATE", "DELETE", "FORK", "MODIFIED_RETRY", "Config", "DataFluxMapStyleDataset", "data_format_default"]

FORK = "fork"


class DataFluxMapStyleDataset(DatafluxDataset, MapDataset):
    """Dataflux's map-style dataset."""

    @staticmethod
    def _new_lister(**arguments: Any) -> Any:
        return dataflux_core.fast_list.ListingController(**arguments)

    @staticmethod
    def _new_params(max_composite_object_size: int) -> Any:
        return dataflux_core.download.DataFluxDownloadOptimizationParams(max_composite_object_size)
