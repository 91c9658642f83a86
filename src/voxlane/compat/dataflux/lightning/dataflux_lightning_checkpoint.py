"""`dataflux_pytorch.lightning.dataflux_lightning_checkpoint`, based on `voxlane.checkpoint.lightning`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from voxlane.checkpoint import Checkpoint
from voxlane.checkpoint.lightning import AsyncBucketCheckpointIO, BucketCheckpointIO
from voxlane.checkpoint.plain import load_file
from voxlane.compat.dataflux.clients import ClientHolder
from voxlane.compat.dataflux.dataflux_checkpoint import open_reader, open_writer
from voxlane.compat.dataflux.lightning.path_utils import parse_gcs_path

__all__ = ["DatafluxLightningAsyncCheckpoint", "DatafluxLightningCheckpoint"]


class DatafluxLightningCheckpoint(ClientHolder, BucketCheckpointIO):
    """Dataflux's CheckpointIO. Paths begin with gs:// or gcs://. Each rank loads by itself, so that any of them may.
    `disable_multipart` is stored and has no effect: voxlane chooses the kind of upload by the size."""

    def __init__(self, project_name: str | None, storage_client: Any = None, disable_multipart: bool = False) -> None:
        ClientHolder.__init__(self, project_name, storage_client)
        BucketCheckpointIO.__init__(self, self.store_config, read_once=False)
        self.disable_multipart = disable_multipart

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; `storage_options` are ignored, as by Dataflux."""
        bucket_name, key = parse_gcs_path(path)
        if self.has_foreign_client:
            with open_writer(self.blob(bucket_name, key)) as file:
                torch.save(checkpoint, file)  # type: ignore[arg-type]
        else:
            Checkpoint(f"gs://{bucket_name}", self.store_config).save(checkpoint, key)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint with `torch.load`; it may run code only with `weights_only=False`."""
        bucket_name, key = parse_gcs_path(path)
        with open_reader(self.blob(bucket_name, key)) as file:
            uri = f"gs://{bucket_name}/{key}"
            state: dict[str, Any] = load_file(file, uri, map_location, weights_only is not False)
        return state

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint; it is no error if there is none."""
        bucket_name, key = parse_gcs_path(path)
        if self.has_foreign_client:
            self.blob(bucket_name, key).delete()
        else:
            super().remove_checkpoint(f"gs://{bucket_name}/{key}")


class DatafluxLightningAsyncCheckpoint(AsyncBucketCheckpointIO):
    """Dataflux's asynchronous CheckpointIO. Errors of a save are raised by the next call, or at the end."""

    def __init__(self, project_name: str | None, storage_client: Any = None, disable_multipart: bool = False) -> None:
        inner = DatafluxLightningCheckpoint(project_name, storage_client, disable_multipart)
        super(AsyncBucketCheckpointIO, self).__init__(inner)
