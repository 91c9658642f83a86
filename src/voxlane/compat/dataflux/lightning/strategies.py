"""The FSDP strategies of Dataflux's multi-node demo and benchmark, based on `voxlane.checkpoint.lightning`."""

from __future__ import annotations

from typing import Any

from voxlane.checkpoint.lightning import BucketFSDPStrategy
from voxlane.compat.dataflux.lightning.dataflux_lightning_checkpoint import DatafluxLightningCheckpoint
from voxlane.compat.dataflux.lightning.path_utils import parse_gcs_path

__all__ = ["DatafluxFSDPStrategy", "FSSpecFSDPStrategy", "LoadFromBootDiskFSDP"]


class FSSpecFSDPStrategy(BucketFSDPStrategy):
    """An FSDP strategy whose checkpoints are stored with the credentials of the environment, sharded by default."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"state_dict_type": "sharded", **kwargs})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save at a URI, by all ranks together."""
        if storage_options is not None:
            raise TypeError("storage_options are not supported by FSDP strategies")
        super().save_checkpoint(checkpoint, filepath)


class LoadFromBootDiskFSDP(FSSpecFSDPStrategy):
    """The benchmark's strategy that saves to a bucket and loads a copy from a local folder."""

    def __init__(self, project_name: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.project_name = project_name
        self.checkpoint_io = DatafluxLightningCheckpoint(project_name)


class DatafluxFSDPStrategy(FSSpecFSDPStrategy):
    """Dataflux's FSDP strategy: its checkpoints are at paths that begin with gs:// or gcs://, sharded by default. With
    `use_async` they are written in the background, and errors are raised by the next save or at the end."""

    def __init__(
        self, project_name: str | None = None, storage_client: Any = None, use_async: bool = False, **kwargs: Any
    ) -> None:
        checkpoint_io = DatafluxLightningCheckpoint(project_name, storage_client)
        checkpoint_io.require_google_client()
        super().__init__(store_config=checkpoint_io.store_config, async_save=use_async, **kwargs)
        self.use_async = use_async
        self.project_name = project_name
        self.checkpoint_io = self._client_holder = checkpoint_io

    @property
    def storage_client(self) -> Any:
        """The client that was passed; otherwise one with the credentials of the environment."""
        return self._client_holder.storage_client

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save at a path in GCS, by all ranks together."""
        parse_gcs_path(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load from a path in GCS on all ranks together."""
        parse_gcs_path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)
