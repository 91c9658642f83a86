"""A `torch.distributed.checkpoint` storage writer that publishes a checkpoint completely or not at all.

Every save writes files with new names. `.metadata`, written last and conditionally, lists the files of the checkpoint.
Until then an earlier checkpoint at the same URI stays untouched, also if it is being overwritten.
"""

from __future__ import annotations

import contextlib
import io
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from voxlane.checkpoint import distributed_metadata as commits
from voxlane.checkpoint.collective import ignore_single_process_warnings, unwrap_rank_errors
from voxlane.checkpoint.distributed_metadata import DATA_SUFFIX, METADATA, PAYLOAD_OFFSET, CheckpointFiles, StoredFile
from voxlane.checkpoint.writer import ChecksummedWriter
from voxlane.errors import (
    AlreadyExistsError,
    ChangedError,
    CheckpointError,
    ConfigError,
    StoreError,
    UnsupportedError,
    VoxlaneError,
)
from voxlane.store import ObjectInfo, StoreConfig
from voxlane.uri import StrPath

_FILE_RESULT = "voxlane: a file"
_PAYLOAD_BYTES = 4096
"""Tensors of at least this size are read back as plain bytes, smaller ones with `torch.load`."""


class DistributedWriter(commits.CheckpointLocation, StorageWriter):
    """Writes a distributed checkpoint to a folder in a bucket.

        dcp.save({"model": model.state_dict()}, storage_writer=DistributedWriter("gs://bucket/run/step-100"))

    Each rank streams its tensors into `files_per_rank` objects at once, using about 96 MiB of memory for each. The
    coordinator publishes `.metadata` last: after it has accounted for every item of every rank and found every file in
    the bucket as it was written, and only if no other process has published there meanwhile. If anything fails on any
    rank, nothing is published and an earlier checkpoint stays as it was.

    torch's own readers can load the result.
    """

    def __init__(
        self,
        uri: StrPath,
        config: StoreConfig | None = None,
        *,
        overwrite: bool = True,
        files_per_rank: int = 2,
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        """`overwrite`: replace an existing checkpoint; without it, raise AlreadyExistsError. `attachments`: small files
        by name that are published with the checkpoint and read by `DistributedReader.attachment`; only those of the
        coordinator are stored."""
        if files_per_rank < 1:
            raise ConfigError(f"files_per_rank must be at least 1, got {files_per_rank}")
        self._config = config
        self._overwrite = overwrite
        self._files_per_rank = files_per_rank
        self._attachments = dict(attachments or {})
        self.reset(uri)

    # -- torch's protocol, in the order of its calls -----------------------------------------------------------------

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Prepare for a new save, at `checkpoint_id` if it is given."""
        if checkpoint_id is not None:
            self._set_location(checkpoint_id)
            self._check_folder()
        self._save_id = uuid.uuid4().hex[:12]
        self._rank = 0
        self._before: ObjectInfo | None = None
        self._world_size = 1

    def storage_meta(self) -> StorageMeta:
        """Return torch's record of the storage."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare a save; torch calls this on every rank."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False lets every rank publish by itself, so half a checkpoint could look complete",
                uri=self.checkpoint_id,
                fix="Leave it at True",
            )
        self._rank = kwargs.get("rank") or 0
        # The files of each rank and save have unique names, so no save ever overwrites a file of another.
        self._save_id = uuid.uuid4().hex[:12]
        if is_coordinator:
            self._before = self._store.find(self._folder + METADATA)
            if self._before is not None and not self._overwrite:
                raise AlreadyExistsError(
                    "a checkpoint exists already",
                    uri=self.checkpoint_id,
                    fix="Choose another URI, or pass overwrite=True",
                )

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged; empty plans, which torch sends for cached ones, are fine."""
        self._world_size = len(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store this rank's items and return a future with their locations; raise if any item failed."""
        shares = _split(plan.items, self._files_per_rank)
        planning = threading.Lock()  # planners need not be thread-safe
        stop = threading.Event()
        with ThreadPoolExecutor(self._files_per_rank, thread_name_prefix="voxlane-save") as pool:
            uploads = {}
            for i, share in enumerate(shares):
                path = f"__{self._rank}_{i}.{self._save_id}{DATA_SUFFIX}"
                uploads[path] = pool.submit(self._upload_file, path, share, planner, planning, stop)
        failures = [failure for upload in uploads.values() if (failure := upload.exception()) is not None]
        if failures:
            # Files that were finished before another failed belong to no checkpoint.
            self._discard([path for path, upload in uploads.items() if upload.exception() is None])
            raise next((f for f in failures if not isinstance(f, _StoppedError)), failures[0])
        results: Future[list[WriteResult]] = Future()
        results.set_result([result for upload in uploads.values() for result in upload.result()])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check on the coordinator that everything is stored, then publish."""
        locations: dict[MetadataIndex, _StorageInfo] = {}
        stored: dict[str, StoredFile] = {}
        for result in (result for rank_results in results for result in rank_results):
            if isinstance(result.storage_data, StoredFile):
                stored[result.storage_data.path] = result.storage_data
            else:
                locations[result.index] = result.storage_data
        try:
            self._check_complete(metadata, locations, stored)
            attached = {name: self._attach(name, data) for name, data in self._attachments.items()}
            stored |= {file.path: file for file in attached.values()}
            self._check_stored(list(stored.values()))
            for entry in metadata.state_dict_metadata.values():
                if isinstance(entry, TensorStorageMetadata):
                    # The copy for an async save is pinned; loading, perhaps on a device, must not require that.
                    entry.properties.pin_memory = False
            metadata.version = CURRENT_DCP_VERSION
            metadata.storage_data = locations
            metadata.storage_meta = self.storage_meta()
            files = CheckpointFiles(
                {path: file.checksums for path, file in stored.items()},
                {name: file.path for name, file in attached.items()},
                self._world_size,
            )
            replaced = self._list_replaced_files()
        except BaseException:
            self._discard(list(stored))
            raise
        try:
            self._publish(commits.encode(metadata, files))
        except _LostRaceError:
            self._discard(list(stored))
            raise
        # After any other failure the files stay: the request may have succeeded and only its response been lost.
        self._discard(replaced)

    def _check_folder(self) -> None:
        if not self._folder:
            raise ConfigError(
                "a checkpoint needs a folder in the bucket", uri=self._store.root, fix="Add a folder name to the URI"
            )

    # -- steps -------------------------------------------------------------------------------------------------------

    def _upload_file(
        self,
        path: str,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        planning: threading.Lock,
        stop: threading.Event,
    ) -> list[WriteResult]:
        """Store some items of this rank in one file, unless another file of the rank fails."""
        try:
            with ChecksummedWriter(self._store, self._folder + path, sum(map(_item_bytes, items))) as file:
                results = []
                for item in items:
                    if stop.is_set():
                        raise _StoppedError("another file of this rank failed")
                    results.append(self._write_item(file, path, item, planner, planning))
                info = file.commit()
                stored = StoredFile(path, info, file.checksums())
        except BaseException:
            stop.set()
            raise
        return [*results, WriteResult(MetadataIndex(f"{_FILE_RESULT} {path}"), info.size, stored)]

    def _write_item(
        self, file: ChecksummedWriter, path: str, item: WriteItem, planner: SavePlanner, planning: threading.Lock
    ) -> WriteResult:
        try:
            with planning:
                data = planner.resolve_data(item)
            start = file.tell()
            payload_offset = _write_data(file, data)
        except VoxlaneError:
            raise
        except Exception as error:
            if file.failed:
                raise  # torch.save's own error is useless; leaving the `with` block raises the file's
            problem = f"{item.index.fqn!r} cannot be saved ({type(error).__name__}: {error})"
            raise self._unpublished(problem, fix="") from error
        location = _StorageInfo(path, start, file.tell() - start)
        if payload_offset is not None:
            setattr(location, PAYLOAD_OFFSET, payload_offset)
        return WriteResult(item.index, location.length, location)

    def _check_complete(
        self, metadata: Metadata, locations: Mapping[MetadataIndex, _StorageInfo], stored: Mapping[str, StoredFile]
    ) -> None:
        missing = sorted(index.fqn for index in commits.expected_items(metadata) - locations.keys())
        if missing:
            raise self._unpublished(f"{len(missing)} items were not stored by any rank, the first is {missing[0]!r}")
        for index, location in locations.items():
            file = stored.get(location.relative_path)
            if file is None or location.offset + location.length > file.checksums.size:
                raise self._unpublished(f"{index.fqn!r} lies outside the stored files")

    def _check_stored(self, files: Sequence[StoredFile]) -> None:
        """Check that every file is in the bucket as it was written, with concurrent requests."""
        heads = [self._store.submit(self._store.head, self._folder + file.path) for file in files]
        for file, head in zip(files, heads, strict=True):
            info = head.result()
            etags = {(etag or "").strip('"') for etag in (info.etag, file.info.etag)}
            if info.size != file.checksums.size or (len(etags) > 1 and "" not in etags):
                problem = f"the bucket has {info.size:,} bytes, {file.checksums.size:,} were written"
                raise self._unpublished(problem, uri=self._store.uri(self._folder + file.path))

    def _unpublished(self, problem: str, uri: str = "", fix: str = "Save again") -> CheckpointError:
        return CheckpointError(f"{problem}; nothing was published", uri=uri or self.checkpoint_id, fix=fix)

    def _attach(self, name: str, data: bytes) -> StoredFile:
        path = commits.attachment_path(name, self._save_id)
        with ChecksummedWriter(self._store, self._folder + path, len(data)) as file:
            file.write(data)
            return StoredFile(path, file.commit(), file.checksums())

    def _list_replaced_files(self) -> list[str]:
        """Return the files of the checkpoint that is about to be replaced."""
        if self._before is None:
            return []
        try:
            return list(commits.file_sizes(*commits.read(self._store, self._folder)))
        except CheckpointError:
            return []  # the old checkpoint cannot be read; gc finds its files

    def _publish(self, data: bytes) -> None:
        key, before = self._folder + METADATA, self._before
        try:
            self._store.put(key, data, if_absent=before is None, if_etag=before.etag if before else None)
            return
        except UnsupportedError:
            # Folders and a few servers cannot replace conditionally: compare, then replace in one step.
            if self._store.find(key) == before:
                self._store.put(key, data)
                return
        except (AlreadyExistsError, ChangedError):
            pass
        raise _LostRaceError(
            "another process published a checkpoint here meanwhile; this one was not published",
            uri=self.checkpoint_id,
            fix="Save to another URI",
        )

    def _discard(self, paths: Sequence[str]) -> None:
        """Delete files that belong to no checkpoint; files that cannot be deleted are left to gc."""
        for path in paths:
            with contextlib.suppress(StoreError):
                self._store.delete_one(self._folder + path)


class _LostRaceError(CheckpointError):
    """Raised when another process published first."""


class _StoppedError(CheckpointError):
    """Raised when another file of this rank failed."""


def _write_data(file: ChecksummedWriter, data: torch.Tensor | io.BytesIO) -> int | None:
    """Append bytes, or a tensor with `torch.save`; return the offset of the tensor's plain bytes, if it is recorded."""
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return None
    tensor = data.detach().resolve_conj().resolve_neg().cpu()  # values as seen, with lazy views applied
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)  # only this view, not its whole base tensor
    spy = _PayloadSpy(file, tensor.nbytes)
    torch.save(tensor, spy)  # type: ignore[arg-type]
    return spy.payload_offset


class _PayloadSpy:
    """Forwards writes and records the offset of the tensor's bytes, which `torch.save` writes in one call."""

    def __init__(self, file: ChecksummedWriter, payload_bytes: int) -> None:
        self._file = file
        self._start = file.tell()
        self._payload_bytes = payload_bytes if payload_bytes >= _PAYLOAD_BYTES else -1
        self.payload_offset: int | None = None

    def write(self, data: Any) -> int:
        if len(data) == self._payload_bytes:
            self.payload_offset = self._file.tell() - self._start
        return self._file.write(data)

    def flush(self) -> None:
        pass


def _item_bytes(item: WriteItem) -> int:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return item.bytes_io_data.nbytes if item.bytes_io_data is not None else 1024
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _split(items: Sequence[WriteItem], num_shares: int) -> list[list[WriteItem]]:
    """Split `items` into at most `num_shares` lists of similar size in bytes, none empty, each in original order."""
    loads = [0] * num_shares
    assigned: dict[int, int] = {}
    for position in sorted(range(len(items)), key=lambda i: -_item_bytes(items[i])):
        share = loads.index(min(loads))
        assigned[position] = share
        loads[share] += _item_bytes(items[position]) + 1
    shares = [[item for i, item in enumerate(items) if assigned[i] == share] for share in range(num_shares)]
    return [share for share in shares if share]


def save_sharded(
    state: Mapping[str, Any],
    uri: StrPath,
    config: StoreConfig | None = None,
    *,
    process_group: Any = None,
    **options: Any,
) -> None:
    """Save a (sharded) state dict at a URI, on all ranks together. `options` are those of `DistributedWriter`."""
    writer = DistributedWriter(uri, config, **options)
    with ignore_single_process_warnings(), unwrap_rank_errors(writer.checkpoint_id):
        save(dict(state), storage_writer=writer, process_group=process_group)
