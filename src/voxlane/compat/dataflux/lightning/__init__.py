"""`dataflux_pytorch.lightning`, based on `voxlane.checkpoint.lightning` and voxlane's distributed checkpoints."""

from voxlane.compat.dataflux.lightning.dataflux_lightning_checkpoint import (
    DatafluxFSDPStrategy,
    DatafluxLightningAsyncCheckpoint,
    DatafluxLightningCheckpoint,
)
from voxlane.compat.dataflux.lightning.gcs_filesystem import GCSDistributedReader, GCSDistributedWriter

__all__ = [
    "DatafluxFSDPStrategy",
    "DatafluxLightningAsyncCheckpoint",
    "DatafluxLightningCheckpoint",
    "GCSDistributedReader",
    "GCSDistributedWriter",
]
