"""`dataflux_pytorch.dataflux_mapstyle_dataset`, based on `voxlane.MapDataset`."""

from voxlane.compat.dataflux.config import Config
from voxlane.compat.dataflux.dataset import DatafluxDataset
from voxlane.dataset import MapDataset

__all__ = ["Config", "DataFluxMapStyleDataset"]


class DataFluxMapStyleDataset(DatafluxDataset, MapDataset):
    """Dataflux's map-style dataset; `project_name` is accepted and ignored."""
