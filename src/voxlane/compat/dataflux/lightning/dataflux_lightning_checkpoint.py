"""`dataflux_pytorch.lightning.dataflux_lightning_checkpoint`, based on `voxlane.checkpoint.lightning`."""

from __future__ import annotations

from typing import Any

from voxlane.checkpoint.lightning import AsyncBucketCheckpointIO, BucketCheckpointIO, BucketFSDPStrategy
from voxlane.compat.dataflux.config import client_config

__all__ = ["DatafluxFSDPStrategy", "DatafluxLightningAsyncCheckpoint", "DatafluxLightningCheckpoint"]


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


class DatafluxFSDPStrategy(BucketFSDPStrategy):
    """The FSDP strategy of Dataflux's multi-node demo, with its checkpoints in a bucket. `path`, `project_name` and
    `model` are accepted and ignored: the trainer names each checkpoint. Sharded by default, as there."""

    def __init__(
        self,
        path: str | None = None,
        project_name: str | None = None,
        storage_client: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("state_dict_type", "sharded")
        super().__init__(store_config=client_config(storage_client), **kwargs)
