"""`dataflux_pytorch.lightning`, based on `voxlane.checkpoint.lightning` and voxlane's distributed checkpoints."""

from voxlane.compat.dataflux.lightning.dataflux_lightning_checkpoint import (
    DatafluxLightningAsyncCheckpoint,
    DatafluxLightningCheckpoint,
)
from voxlane.compat.dataflux.lightning.gcs_filesystem import GCSDistributedReader, GCSDistributedWriter, GCSFileSystem
from voxlane.compat.dataflux.lightning.strategies import DatafluxFSDPStrategy, FSSpecFSDPStrategy

__all__ = [
    "DatafluxFSDPStrategy",
    "DatafluxLightningAsyncCheckpoint",
    "DatafluxLightningCheckpoint",
    "FSSpecFSDPStrategy",
    "GCSDistributedReader",
    "GCSDistributedWriter",
    "GCSFileSystem",
]
