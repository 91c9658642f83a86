"""`dataflux_pytorch.dataflux_iterable_dataset`, based on `voxlane.IterableDataset`."""

from __future__ import annotations

import math
import os
from typing import Any

from torch.utils import data

from voxlane.compat.dataflux import dataflux_core
from voxlane.compat.dataflux.clients import CREATE, DELETE
from voxlane.compat.dataflux.config import MODIFIED_RETRY
from voxlane.compat.dataflux.config import Config as MapStyleConfig
from voxlane.compat.dataflux.datasets import DatafluxDataset, data_format_default
from voxlane.dataset import IterableDataset
from voxlane.dataset.order import Positions

__all__ = ["CREATE", "DELETE", "FORK", "MODIFIED_RETRY", "Config", "DataFluxIterableDataset", "data_format_default"]

FORK = "fork"


class IterableConfig(MapStyleConfig):
    """Dataflux's settings of an iterable dataset: those of the map-style one, in another positional order."""

    def __init__(
        self,
        sort_listing_results: bool = False,
        max_composite_object_size: int = 100_000_000,
        num_processes: int | None = os.cpu_count(),
        prefix: str | None = None,
        max_listing_retries: int = 3,
        disable_compose: bool | None = None,
        list_retry_config: Any = MODIFIED_RETRY,
        download_retry_config: Any = MODIFIED_RETRY,
    ) -> None:
        super().__init__(
            sort_listing_results,
            max_composite_object_size,
            num_processes,
            prefix,
            max_listing_retries,
            disable_compose=disable_compose,
            list_retry_config=list_retry_config,
            download_retry_config=download_retry_config,
        )


Config = IterableConfig


class DataFluxIterableDataset(DatafluxDataset, IterableDataset):
    """Dataflux's iterable-style dataset.

    As there, DataLoader workers share the objects, ranks do not: give each rank its part of `objects`. It has no
    length, because a subclass may yield any number of samples for an object.
    """

    _always_checks_permissions = True
    _order = {"rank": 0, "world_size": 1}  # noqa: RUF012 - constant

    def __len__(self) -> int:
        """Raise TypeError, so that Lightning does not stop after as many samples as there are objects."""
        raise TypeError(f"object of type {type(self).__name__!r} has no len(); use len(dataset.objects)")

    def __bool__(self) -> bool:
        return True

    @staticmethod
    def _new_lister(**arguments: Any) -> Any:
        return dataflux_core.fast_list.ListingController(**arguments)

    @staticmethod
    def _new_params(max_composite_object_size: int) -> Any:
        return dataflux_core.download.DataFluxDownloadOptimizationParams(max_composite_object_size)

    def process_indices(self) -> Positions:
        """Return this worker's share: consecutive samples, unless `voxlane.DataLoader` divides them by batches."""
        worker = data.get_worker_info()
        if worker is None or self.yield_skipped:
            return super().process_indices()
        indices = self.rank_indices()
        per_worker = math.ceil(len(indices) / worker.num_workers)
        return indices[worker.id * per_worker : (worker.id + 1) * per_worker]
