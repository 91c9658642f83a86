"""`dataflux_pytorch.lightning.gcs_filesystem`, based on voxlane's distributed writer and reader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from voxlane.checkpoint import DistributedReader, DistributedWriter
from voxlane.checkpoint.filesystem import BucketFileSystem
from voxlane.compat.dataflux.clients import ClientHolder
from voxlane.compat.dataflux.dataflux_checkpoint import DatafluxCheckpointBuffer, open_reader, open_writer
from voxlane.compat.dataflux.lightning.path_utils import parse_gcs_path
from voxlane.errors import ConfigError, NotFoundError
from voxlane.uri import StrPath

__all__ = ["DatafluxCheckpointBuffer", "GCSDistributedReader", "GCSDistributedWriter", "GCSFileSystem"]


class GCSFileSystem(ClientHolder):
    """Dataflux's file system for distributed checkpoints. Paths begin with gs:// or gcs://, also as `pathlib.Path`."""

    def __init__(self, project_name: str | None, debug: bool | None = False, storage_client: Any = None) -> None:
        super().__init__(project_name, storage_client)
        self.debug = debug

    @contextmanager
    def create_stream(self, path: StrPath, mode: str) -> Iterator[Any]:
        """Open an object for reading ("rb") or writing ("wb"). It is published at the end of the block, unless there
        was an exception."""
        blob = self._blob(path)
        if mode not in ("rb", "wb"):
            raise ValueError(
                "Invalid mode argument, create_stream only supports rb (read mode) & wb (write mode)"
            )  # Dataflux's words
        if self.debug:
            rank = dist.get_rank() if dist.is_initialized() else 0
            kind = "Write" if mode == "wb" else "Read"
            print(f"Creating Stream, {kind} Mode: Rank: {rank} Bucket: {blob.bucket.name} path: {blob.name}")
        with open_writer(blob) if mode == "wb" else open_reader(blob) as stream:
            yield stream

    def concat_path(self, path: StrPath, suffix: str) -> Path:
        """Return the path of `suffix` below `path`."""
        return Path(path) / suffix

    def init_path(self, path: StrPath) -> Path:
        """Return a path as `pathlib.Path`."""
        return path if isinstance(path, Path) else Path(path)

    def rename(self, path: StrPath, new_path: StrPath) -> None:
        """Rename an object within its bucket."""
        blob, new_blob = self._blob(path), self._blob(new_path)
        if blob.bucket.name != new_blob.bucket.name:
            raise ConfigError(
                f"cannot rename from bucket {blob.bucket.name} to bucket {new_blob.bucket.name}",
                fix="Keep the bucket, or copy the object and delete it",
            )
        if self.has_foreign_client:
            blob.bucket.rename_blob(blob, new_blob.name)
        else:
            self._files.mv(_uri(blob), _uri(new_blob))

    def mkdir(self, path: StrPath) -> None:
        """Do nothing: buckets have no folders."""

    def exists(self, path: StrPath) -> bool:
        """Return whether there is an object at `path`."""
        blob = self._blob(path)
        return bool(blob.exists() if self.has_foreign_client else self._files.isfile(_uri(blob)))

    def rm_file(self, path: StrPath) -> None:
        """Delete an object; raise NotFoundError if there is none."""
        blob = self._blob(path)
        if self.has_foreign_client:
            blob.delete()
        elif not self._files.isfile(_uri(blob)):
            raise NotFoundError("no such object", uri=_uri(blob), fix="Check its spelling")
        else:
            self._files.rm_file(_uri(blob))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return True for a `pathlib.Path` and for a path in GCS; raise ConfigError for any other one."""
        if not isinstance(checkpoint_id, Path):
            parse_gcs_path(str(checkpoint_id))
        return True

    def _blob(self, path: Any) -> Any:
        return self.blob(*parse_gcs_path(path))

    @property
    def _files(self) -> BucketFileSystem:
        return BucketFileSystem(self.store_config)


def _uri(blob: Any) -> str:
    return f"gs://{blob.bucket.name}/{blob.name}"


class _GcsLocation:
    """The part that Dataflux's writer and reader share: `path`, and `fs`, the file system of other files."""

    checkpoint_id: str
    fs: GCSFileSystem
    _folder: str

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return Path(self.checkpoint_id)

    def _set_location(self, checkpoint_id: Any) -> None:
        self.fs.require_google_client()
        bucket_name, key = parse_gcs_path(checkpoint_id)
        super()._set_location(f"gs://{bucket_name}/{key}")  # type: ignore[misc]  # voxlane's CheckpointLocation

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether the checkpoint can be stored there; see `GCSFileSystem`."""
        return GCSFileSystem.validate_checkpoint_id(checkpoint_id)


class GCSDistributedWriter(_GcsLocation, DistributedWriter):
    """Dataflux's StorageWriter. Of the options of torch's FileSystemWriter, `overwrite` and `thread_count` (files a
    rank writes at once) count; those that tune local files do not."""

    sync_files = False

    def __init__(
        self,
        path: StrPath,
        project_name: str | None = None,
        storage_client: Any = None,
        debug: bool | None = False,
        *,
        overwrite: bool = True,
        thread_count: int = 2,
        single_file_per_rank: bool = True,
        sync_files: bool = False,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
    ) -> None:
        self.fs = GCSFileSystem(project_name, debug, storage_client)
        super().__init__(path, self.fs.store_config, overwrite=overwrite, files_per_rank=max(1, thread_count))

    def _check_folder(self) -> None:
        """Accept the bucket itself, as Dataflux does."""


class GCSDistributedReader(_GcsLocation, DistributedReader):
    """Dataflux's StorageReader. Each rank reads by itself, so that any of them may."""

    def __init__(
        self, path: StrPath, project_name: str | None = None, storage_client: Any = None, debug: bool | None = False
    ) -> None:
        self.fs = GCSFileSystem(project_name, debug, storage_client)
        super().__init__(path, self.fs.store_config, read_once=False)
