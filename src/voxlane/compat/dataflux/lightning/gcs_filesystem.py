"""`dataflux_pytorch.lightning.gcs_filesystem`, based on voxlane's distributed writer and reader."""

from __future__ import annotations

from typing import Any

from voxlane.checkpoint import DistributedReader, DistributedWriter
from voxlane.compat.dataflux.config import client_config
from voxlane.uri import StrPath

__all__ = ["GCSDistributedReader", "GCSDistributedWriter"]


class GCSDistributedWriter(DistributedWriter):
    """Dataflux's StorageWriter. Of the options of torch's FileSystemWriter, `overwrite` and `thread_count` (files a
    rank writes at once) count; those that tune local files do not."""

    def __init__(
        self,
        path: StrPath,
        project_name: str | None = None,
        storage_client: Any = None,
        debug: bool = False,
        *,
        overwrite: bool = True,
        thread_count: int = 2,
        single_file_per_rank: bool = True,
        sync_files: bool = False,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
    ) -> None:
        super().__init__(path, client_config(storage_client), overwrite=overwrite, files_per_rank=max(1, thread_count))


class GCSDistributedReader(DistributedReader):
    """Dataflux's StorageReader."""

    def __init__(
        self, path: StrPath, project_name: str | None = None, storage_client: Any = None, debug: bool = False
    ) -> None:
        super().__init__(path, client_config(storage_client))
