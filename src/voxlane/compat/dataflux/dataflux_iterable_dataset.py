"""`dataflux_pytorch.dataflux_iterable_dataset`, based on `voxlane.IterableDataset`."""

from voxlane.compat.dataflux.config import Config
from voxlane.compat.dataflux.dataflux_mapstyle_dataset import DatafluxDataset
from voxlane.dataset import IterableDataset

__all__ = ["Config", "DataFluxIterableDataset"]


class DataFluxIterableDataset(DatafluxDataset, IterableDataset):
    """Dataflux's iterable-style dataset; `project_name` is accepted and ignored."""
