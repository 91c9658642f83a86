"""A `torch.distributed.checkpoint` storage writer that publishes a checkpoint whole or not at all.

Every save writes files of new names; `.metadata`, written last and conditionally, says which of them are the
checkpoint. Until then whatever was at the URI before is untouched, also when a checkpoint is overwritten.
"""

from __future__ import annotations

import io
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from voxlane import uri as uris
from voxlane.checkpoint import distributed_metadata as commits
from voxlane.checkpoint.distributed_metadata import DATA_SUFFIX, METADATA, Files, StoredFile
from voxlane.checkpoint.writer import SummedWriter
from voxlane.errors import (
    AlreadyExistsError,
    ChangedError,
    CheckpointError,
    ConfigError,
    NotFoundError,
    StoreError,
    UnsupportedError,
    VoxlaneError,
)
from voxlane.store import ObjectInfo, Store, StoreConfig

_FILE_RESULT = "voxlane: a file"
_PAYLOAD_BYTES = 4096
"""Tensors from this size on are read back as plain bytes, smaller ones as the small files they are."""


class DistributedWriter(commits.AtUri, StorageWriter):
    """Writes a distributed checkpoint to a folder in a bucket.

        dcp.save({"model": model.state_dict()}, storage_writer=DistributedWriter("gs://bucket/run/step-100"))

    Each rank streams its tensors into `files_per_rank` objects at once, about 96 MiB of memory each. The
    coordinator publishes `.metadata` last, once every item of every rank is accounted for and every file was found in
    the bucket as it was written; and only if nobody else published there meanwhile. When anything fails, on any
    rank, nothing is published and a checkpoint that was there before stays as it was.

    torch's own readers can load the result.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        config: StoreConfig | None = None,
        *,
        overwrite: bool = True,
        files_per_rank: int = 2,
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        """`overwrite`: replace a checkpoint that is there already, else refuse. `attachments`: small files, by name,
        published with the checkpoint (`DistributedReader.attachment` reads them); the coordinator's count."""
        if files_per_rank < 1:
            raise ConfigError(f"files_per_rank={files_per_rank}", fix="Give 1 or more")
        self._config = config
        self._overwrite = overwrite
        self._files_per_rank = files_per_rank
        self._attachments = dict(attachments or {})
        self.reset(uri)

    # -- torch's protocol, in the order of its calls -----------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, at another URI if one is given."""
        if checkpoint_id is not None:
            parsed = uris.parse(uris.from_path(checkpoint_id))
            if not parsed.key:
                raise ConfigError("a checkpoint needs a folder in the bucket", uri=str(parsed), fix="Add a name")
            self._folder = parsed.key.rstrip("/") + "/"
            self._store = Store(str(parsed), self._config)
        self._save_id = uuid.uuid4().hex[:12]
        self._rank = 0
        self._before: ObjectInfo | None = None
        self._world_size = 1

    def storage_meta(self) -> StorageMeta:
        """What torch records of the storage."""
        return commits.new_storage_meta(self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called on every rank before a save."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False lets every rank publish by itself, so that half a checkpoint can look whole",
                uri=self.checkpoint_id,
                fix="Leave it at True",
            )
        self._rank = kwargs.get("rank") or 0
        # Each rank's files have names of their own, so that no save ever writes over a file of another.
        self._save_id = uuid.uuid4().hex[:12]
        if is_coordinator:
            self._before = self._published()
            if self._before is not None and not self._overwrite:
                raise AlreadyExistsError(
                    "there is a checkpoint already", uri=self.checkpoint_id, fix="Choose another URI, or overwrite=True"
                )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to add; plans that torch cached, and sends empty, are as good as others."""
        self._world_size = len(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store this rank's items; the future holds their places, and fails if anything did."""
        shares = _split(plan.items, self._files_per_rank)
        uploads = [_Upload(self, f"__{self._rank}_{i}.{self._save_id}{DATA_SUFFIX}") for i in range(len(shares))]
        planning = threading.Lock()  # planners need not be safe to use from two threads
        threads = [
            threading.Thread(target=upload.run, args=(share, planner, planning, uploads), name="voxlane-save")
            for upload, share in zip(uploads, shares, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failures = [upload.failure for upload in uploads if upload.failure is not None]
        if failures:
            # A file that was finished before the other failed belongs to no checkpoint.
            self._discard([upload.path for upload in uploads if upload.failure is None])
            raise next((f for f in failures if not isinstance(f, _Stopped)), failures[0])
        results: Future[list[WriteResult]] = Future()
        results.set_result([result for upload in uploads for result in upload.results])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: check that all is stored, then publish."""
        places: dict[MetadataIndex, _StorageInfo] = {}
        stored: dict[str, StoredFile] = {}
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, StoredFile):
                stored[result.storage_data.path] = result.storage_data
            else:
                places[result.index] = result.storage_data
        try:
            self._check_complete(metadata, places, stored)
            attached = {name: self._attach(name, data) for name, data in self._attachments.items()}
            stored |= {file.path: file for file in attached.values()}
            self._check_stored(list(stored.values()))
            for entry in metadata.state_dict_metadata.values():
                if isinstance(entry, TensorStorageMetadata):
                    # A copy for an async save is pinned; who loads it, on a device perhaps, must not be asked for that.
                    entry.properties.pin_memory = False
            metadata.version = CURRENT_DCP_VERSION
            metadata.storage_data = places
            metadata.storage_meta = self.storage_meta()
            files = Files(
                {path: file.sums for path, file in stored.items()},
                {name: file.path for name, file in attached.items()},
                self._world_size,
            )
            replaced = self._replaced_files()
        except BaseException:
            self._discard(list(stored))
            raise
        try:
            self._publish(commits.encode(metadata, files))
        except _LostRace:
            self._discard(list(stored))
            raise
        # After any other failure the files stay: the request may have come through and only its answer be lost.
        self._discard(replaced)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _published(self) -> ObjectInfo | None:
        try:
            return self._store.head(self._folder + METADATA)
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise
            return None

    def _check_complete(
        self, metadata: Metadata, places: Mapping[MetadataIndex, _StorageInfo], stored: Mapping[str, StoredFile]
    ) -> None:
        missing = sorted(index.fqn for index in commits.expected_items(metadata) - places.keys())
        if missing:
            raise CheckpointError(
                f"{len(missing)} items were not stored by any rank, {missing[0]!r} first; nothing was published",
                uri=self.checkpoint_id,
                fix="Save again",
            )
        for index, place in places.items():
            file = stored.get(place.relative_path)
            if file is None or place.offset + place.length > file.sums.size:
                raise CheckpointError(
                    f"{index.fqn!r} lies outside the files that were stored; nothing was published",
                    uri=self.checkpoint_id,
                    fix="Save again",
                )

    def _check_stored(self, files: Sequence[StoredFile]) -> None:
        """Look every file up in the bucket, all at once."""
        looks = [self._store.submit(self._store.head, self._folder + file.path) for file in files]
        for file, look in zip(files, looks, strict=True):
            found = look.result()
            etags = {(etag or "").strip('"') for etag in (found.etag, file.info.etag)}
            if found.size != file.sums.size or (len(etags) > 1 and "" not in etags):
                raise CheckpointError(
                    f"the bucket has {found.size:,} bytes where {file.sums.size:,} were written; nothing was published",
                    uri=self._store.uri(self._folder + file.path),
                    fix="Save again",
                )

    def _attach(self, name: str, data: bytes) -> StoredFile:
        path = commits.attachment_path(name, self._save_id)
        with SummedWriter(self._store, self._folder + path, len(data)) as file:
            file.write(data)
            return StoredFile(path, file.commit(), file.sums())

    def _replaced_files(self) -> list[str]:
        """The files of the checkpoint that is about to be replaced."""
        if self._before is None:
            return []
        try:
            return list(commits.file_sizes(*commits.read(self._store, self._folder)))
        except CheckpointError:
            return []  # what was there cannot be read; gc finds its files

    def _publish(self, data: bytes) -> None:
        key = self._folder + METADATA
        try:
            if self._before is None:
                self._store.put(key, data, if_absent=True)
            else:
                self._store.put(key, data, if_etag=self._before.etag)
        except UnsupportedError:
            # Folders, and a few servers, cannot replace conditionally: look, then replace in one step.
            if self._published() != self._before:
                raise self._lost_race() from None
            self._store.put(key, data)
        except (AlreadyExistsError, ChangedError):
            raise self._lost_race() from None

    def _lost_race(self) -> CheckpointError:
        return _LostRace(
            "another process published a checkpoint here meanwhile; that one stands, this one was not published",
            uri=self.checkpoint_id,
            fix="Save to another URI",
        )

    def _discard(self, paths: Sequence[str]) -> None:
        """Delete files that belong to no checkpoint; what cannot be deleted is left to gc."""
        for path in paths:
            try:
                self._store.delete_one(self._folder + path)
            except StoreError:
                continue


class _LostRace(CheckpointError):
    """Another process published first."""


class _Stopped(CheckpointError):
    """Another file of this rank failed."""


class _Upload:
    """One file of a rank, on a thread of its own."""

    def __init__(self, writer: DistributedWriter, path: str) -> None:
        self.path = path
        self.failure: BaseException | None = None
        self.results: list[WriteResult] = []
        self._store, self._folder = writer._store, writer._folder
        self._stopped = False

    def run(
        self, items: Sequence[WriteItem], planner: SavePlanner, planning: threading.Lock, siblings: Sequence[_Upload]
    ) -> None:
        try:
            self._run(items, planner, planning)
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: write_data raises it, nothing is published
            self.failure = error
            for sibling in siblings:
                sibling._stopped = True

    def _run(self, items: Sequence[WriteItem], planner: SavePlanner, planning: threading.Lock) -> None:
        size_hint = sum(_item_bytes(item) for item in items)
        with SummedWriter(self._store, self._folder + self.path, size_hint) as file:
            results = []
            for item in items:
                if self._stopped:
                    raise _Stopped("another file of this rank failed")
                try:
                    with planning:
                        data = planner.resolve_data(item)
                    results.append(self._write_item(file, item, data))
                except VoxlaneError:
                    raise
                except Exception as error:
                    if file.failed:
                        raise  # torch.save says nothing of use; the file tells what was wrong
                    raise CheckpointError(
                        f"{item.index.fqn!r} cannot be saved ({type(error).__name__}: {error}); nothing was published",
                        uri=self._store.uri(self._folder).rstrip("/"),
                    ) from error
            info = file.commit()
            stored = StoredFile(self.path, info, file.sums())
        self.results = [*results, WriteResult(MetadataIndex(f"{_FILE_RESULT} {self.path}"), info.size, stored)]

    def _write_item(self, file: SummedWriter, item: WriteItem, data: torch.Tensor | io.BytesIO) -> WriteResult:
        start = file.tell()
        payload: int | None = None
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            file.write(data.getbuffer())
        else:
            assert isinstance(data, torch.Tensor)
            payload = _write_tensor(file, data)
        length = file.tell() - start
        place = commits.with_payload(_StorageInfo(self.path, start, length), payload)
        return WriteResult(item.index, length, place)


def _write_tensor(file: SummedWriter, data: torch.Tensor) -> int | None:
    """Append the tensor as `torch.save` does; returns how far in its plain bytes begin."""
    tensor = data.detach().resolve_conj().resolve_neg().cpu()  # what is seen, not what lies in memory
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)  # only the projection, not what it is a view of
    spy = _PayloadSpy(file, tensor.nbytes)
    torch.save(tensor, spy)  # type: ignore[arg-type]
    return spy.payload_offset


class _PayloadSpy:
    """Passes writes on and notes where the tensor's bytes went by: `torch.save` writes them in one call."""

    def __init__(self, file: SummedWriter, payload_bytes: int) -> None:
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
    """At most `num_shares` lists of about the same number of bytes, none empty, each in the order of `items`."""
    loads = [0] * num_shares
    homes: dict[int, int] = {}
    for position in sorted(range(len(items)), key=lambda i: -_item_bytes(items[i])):
        home = loads.index(min(loads))
        homes[position] = home
        loads[home] += _item_bytes(items[position]) + 1
    shares = [[item for i, item in enumerate(items) if homes[i] == share] for share in range(num_shares)]
    return [share for share in shares if share]


def save_sharded(
    state: Mapping[str, Any],
    uri: str | os.PathLike[str],
    config: StoreConfig | None = None,
    *,
    process_group: Any = None,
    **options: Any,
) -> None:
    """Save a (sharded) state dict at a URI, by all ranks together. `options` are those of `DistributedWriter`."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from voxlane.checkpoint.collective import quiet, unwrapped

    writer = DistributedWriter(uri, config, **options)
    with quiet(), unwrapped(writer.checkpoint_id):
        save(dict(state), storage_writer=writer, process_group=process_group)
