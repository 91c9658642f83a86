"""`dataflux_pytorch.lightning.dataflux_lightning_checkpoint`, over `BucketCheckpointIO`."""

from __future__ import annotations

from typing import Any

from voxlane.checkpoint.lightning import AsyncBucketCheckpointIO, BucketCheckpointIO
from voxlane.compat.dataflux.config import Config, store_config

__all__ = ["DatafluxLightningAsyncCheckpoint", "DatafluxLightningCheckpoint"]


class DatafluxLightningCheckpoint(BucketCheckpointIO):
    """Dataflux's CheckpointIO; `project_name` and `disable_multipart` are taken and not needed."""

    def __init__(
        self, project_name: str | None = None, storage_client: Any = None, disable_multipart: bool = False
    ) -> None:
        self.project_name = project_name
        super().__init__(store_config(Config(), storage_client) if storage_client is not None else None)


class DatafluxLightningAsyncCheckpoint(AsyncBucketCheckpointIO):
    """Dataflux's asynchronous CheckpointIO; its saves are checked."""

    def __init__(
        self, project_name: str | None = None, storage_client: Any = None, disable_multipart: bool = False
    ) -> None:
        self.project_name = project_name
        super().__init__(store_config(Config(), storage_client) if storage_client is not None else None)
