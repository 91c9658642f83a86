"""`dataflux_pytorch.dataflux_checkpoint`, based on `voxlane.Checkpoint`."""

from __future__ import annotations

from typing import Any

from voxlane.checkpoint import Checkpoint
from voxlane.compat.dataflux.config import client_config

__all__ = ["DatafluxCheckpoint"]


class DatafluxCheckpoint(Checkpoint):
    """Dataflux's checkpoint; `project_name` is accepted and ignored."""

    def __init__(self, project_name: str | None, bucket_name: str, storage_client: Any = None) -> None:
        self.project_name, self.bucket_name = project_name, bucket_name
        super().__init__(f"gs://{bucket_name}", client_config(storage_client))
