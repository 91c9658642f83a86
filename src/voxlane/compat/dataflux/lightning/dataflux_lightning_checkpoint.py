"""`dataflux_pytorch.lightning.dataflux_lightning_checkpoint`, based on `BucketCheckpointIO`."""

from __future__ import annotations

from typing import Any

from voxlane.checkpoint.lightning import AsyncBucketCheckpointIO, BucketCheckpointIO
from voxlane.compat.dataflux.config import client_config

__all__ = ["DatafluxLightningAsyncCheckpoint", "DatafluxLightningCheckpoint"]


class _DatafluxArguments:
    """Dataflux's constructor; `project_name` and `disable_multipart` are accepted and ignored."""

    def __init__(
        self, project_name: str | None = None, storage_client: Any = None, disable_multipart: bool = False
    ) -> None:
        self.project_name = project_name
        super().__init__(client_config(storage_client))  # type: ignore[call-arg]  # voxlane's CheckpointIO


class DatafluxLightningCheckpoint(_DatafluxArguments, BucketCheckpointIO):
    """Dataflux's CheckpointIO."""


class DatafluxLightningAsyncCheckpoint(_DatafluxArguments, AsyncBucketCheckpointIO):
    """Dataflux's asynchronous CheckpointIO; its saves are checked."""
