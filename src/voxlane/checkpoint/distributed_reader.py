"""A `torch.distributed.checkpoint` storage reader.

Each rank reads only the bytes it needs, in concurrent ranged reads, and verifies them. Bytes that several ranks need
are read by one of them.
"""

from __future__ import annotations

import io
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from voxlane.checkpoint import distributed_metadata as commits
from voxlane.checkpoint.collective import (
    RankGroup,
    ignore_single_process_warnings,
    make_sub_group,
    run_once,
    unwrap_rank_errors,
)
from voxlane.checkpoint.distributed_metadata import CheckpointFiles
from voxlane.checkpoint.plain import load_file
from voxlane.checkpoint.verified_reader import ReadTarget, VerifiedObject, view_bytes
from voxlane.errors import CheckpointError, IncompleteError, NotFoundError
from voxlane.store import ObjectInfo, StoreConfig
from voxlane.uri import StrPath

_BATCH_BYTES = 128 << 20
"""Bytes that are buffered before they are copied into tensors; at most two such batches at a time."""
_SEND_BYTES = 16 << 20
"""Small tensors are sent to the other ranks together, about this many bytes at a time."""
_ATTEMPTS = 3
"""How often a load is attempted if files turn out to be gone."""
_Bytes = npt.NDArray[np.uint8]


class DistributedReader(commits.CheckpointLocation, StorageReader):
    """Reads a distributed checkpoint that any number of ranks wrote to a folder in a bucket.

        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=DistributedReader("gs://bucket/run/step-100"))

    Items that several ranks need (replicated parameters, the same shard in every replica) are read by one of them and
    sent to the others, with the work spread evenly. Every rank of `process_group` must take part, as `dcp.load`
    requires anyway; pass both the same group. `read_once=False` lets each rank read by itself.

    Checkpoints of torch's own writers can be read, but have no checksums. Objects other than tensors are read only if
    that cannot run code, unless `weights_only=False`.
    """

    def __init__(
        self,
        uri: StrPath,
        config: StoreConfig | None = None,
        *,
        process_group: Any = None,
        read_once: bool = True,
        weights_only: bool = True,
    ) -> None:
        self._config = config
        self._group = process_group
        self._read_once = read_once
        self._weights_only = weights_only
        self._opened = False
        self.reset(uri)

    # -- torch's protocol, in the order of its calls -----------------------------------------------------------------

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Prepare for a new load, from `checkpoint_id` if it is given."""
        if checkpoint_id is not None:
            self._set_location(checkpoint_id)
        elif self._opened:
            self._opened = False  # `open` has read the metadata for the load that begins now
            return
        self._opened = False
        self._metadata: Metadata | None = None
        self._files: CheckpointFiles | None = None
        self._ranks: RankGroup | None = None

    def read_metadata(self, *args: Any) -> Metadata:
        """Return the checkpoint's metadata, which one rank reads for all."""
        if self._metadata is not None:
            return self._metadata
        self._ranks = RankGroup.current(self._group) if self._read_once else None
        if self._ranks is not None:
            self._ranks.wait_for_all(self.checkpoint_id)
        self._metadata, self._files = run_once(self._ranks, self._read_commit)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the metadata; torch calls this on every rank before a load."""
        if metadata.storage_data is None:
            raise CheckpointError("the metadata has no locations of items", uri=self.checkpoint_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Choose on the coordinator one reader for each item that several ranks need."""
        if self._ranks is not None and len(plans) > 1:
            shared = _assign_readers(plans, self._item_bytes)
            for plan in plans:
                plan.storage_data = shared
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items, and exchange shared items with the other ranks."""
        shared: list[_SharedItem] = plan.storage_data or []
        rank = self._ranks.rank if self._ranks is not None else 0
        received = {entry.key for entry in shared if entry.owner != rank and rank in entry.ranks}
        loading = _Load(self, planner)
        failure: BaseException | None = None
        try:
            loading.read([item for item in plan.items if _item_key(item) not in received])
        except BaseException as error:
            failure = error
            if not shared:
                raise
        if shared:
            assert self._ranks is not None
            self._ranks.raise_if_any_failed(failure)  # before any rank waits for bytes that will not come
            loading.exchange(self._ranks, shared, {_item_key(item): item for item in plan.items})
        for item in plan.items:  # now that all ranks have what they need
            if item.type == LoadItemType.BYTE_IO:
                loading.load_bytes(item)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # -- beyond torch's protocol -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the metadata now, for the next `dcp.load`, and raise its errors unchanged; torch would log and wrap
        them. Collective."""
        self._metadata = None
        self.read_metadata()
        self._opened = True

    def attachment(self, name: str) -> bytes | None:
        """Return a file that was published with the checkpoint (`DistributedWriter(attachments=...)`), or None.
        Collective if ranks read together."""
        ranks = RankGroup.current(self._group) if self._read_once else None
        return run_once(ranks, lambda: self._read_attachment(name))

    def _read_attachment(self, name: str) -> bytes | None:
        _, files = self._read_commit()
        if files is None or name not in files.attachments:
            return None
        self._files = files
        source = self.source(files.attachments[name])
        return source.read_bytes(0, source.info.size)

    def source(self, path: str) -> VerifiedObject:
        """Open a file of the checkpoint, with its checksums if they are known."""
        if self._files is None:
            try:
                return VerifiedObject(self._store, self._store.head(self._folder + path))
            except NotFoundError as error:
                raise self._missing_file_error(path) from error
        if path not in self._files.checksums:
            raise self._missing_file_error(path)
        checksums = self._files.checksums[path]
        # No HEAD request is needed: names are never reused, and the checksums detect a different object.
        return VerifiedObject(self._store, ObjectInfo(self._folder + path, checksums.size, None, None), [checksums])

    def _missing_file_error(self, path: str) -> IncompleteError:
        return IncompleteError(
            "a file of the checkpoint is gone",
            uri=self._store.uri(self._folder + path),
            fix="Load an earlier checkpoint (voxlane checkpoint ls)",
        )

    def _read_commit(self) -> tuple[Metadata, CheckpointFiles | None]:
        return commits.read(self._store, self._folder)

    def _item_bytes(self, item: ReadItem) -> int:
        assert self._metadata is not None
        entry = self._metadata.state_dict_metadata.get(item.storage_index.fqn)
        if isinstance(entry, TensorStorageMetadata):
            return item.lengths.numel() * entry.properties.dtype.itemsize
        return int(self._metadata.storage_data[item.storage_index].length)


class _Load:
    """The state of one call of `read_data`."""

    def __init__(self, reader: DistributedReader, planner: LoadPlanner) -> None:
        assert reader._metadata is not None
        self._reader = reader
        self._planner = planner
        self._metadata = reader._metadata
        self._raw: dict[Any, bytes] = {}
        """Stored bytes of items that are not tensors, by item key."""

    def read(self, items: Sequence[ReadItem]) -> None:
        """Read `items` from the bucket into their tensors.

        Bytes that cannot be read straight into a tensor (because it is on a device, or not contiguous) are buffered.
        So items are read in batches, and the next batch is read while one is copied into tensors.
        """
        batches: deque[tuple[list[ThreadFuture[None]], list[Callable[[], None]]]] = deque()
        rest = deque(sorted(items, key=self._file_position))
        try:
            while rest or batches:
                if rest and len(batches) < 2:
                    batches.append(self._start_batch(rest))
                    continue
                futures, steps = batches[0]
                for future in futures:
                    future.result()
                batches.popleft()
                for step in steps:
                    step()
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise
            path = error.uri.removeprefix(self._reader._store.uri(self._reader._folder))
            raise self._reader._missing_file_error(path) from None
        finally:
            for futures, _ in batches:
                for future in futures:
                    future.cancel()

    def _file_position(self, item: ReadItem) -> tuple[str, int]:
        info: _StorageInfo = self._metadata.storage_data[item.storage_index]
        return info.relative_path, info.offset

    def _start_batch(self, rest: deque[ReadItem]) -> tuple[list[ThreadFuture[None]], list[Callable[[], None]]]:
        """Start to read the next batch; return its reads, and the steps that follow once they are done."""
        self._steps: list[Callable[[], None]] = []
        by_file: dict[str, list[ReadTarget]] = defaultdict(list)
        self._buffered_bytes = 0
        while rest and self._buffered_bytes < _BATCH_BYTES:
            item = rest.popleft()
            info: _StorageInfo = self._metadata.storage_data[item.storage_index]
            by_file[info.relative_path].append(self._plan_read(item, info))
        reads = [self._reader.source(path).submit_reads(targets) for path, targets in by_file.items()]
        return list(chain.from_iterable(reads)), self._steps

    def _new_buffer(self, nbytes: int) -> _Bytes:
        self._buffered_bytes += nbytes
        return np.empty(nbytes, np.uint8)

    def exchange(self, ranks: RankGroup, shared: Sequence[_SharedItem], items: dict[Any, ReadItem]) -> None:
        """Send the items that this rank read for others, and receive those that others read for it. Collective."""
        groups: dict[tuple[int, ...], list[_SharedItem]] = defaultdict(list)
        for entry in shared:
            groups[entry.ranks].append(entry)
        for members, entries in groups.items():
            if ranks.rank not in members:
                continue
            group = make_sub_group(ranks, members)
            for owner in dict.fromkeys(entry.owner for entry in entries):
                owned = [entry for entry in entries if entry.owner == owner]
                for bucket in _group_for_sending(owned):
                    self._send(group, members.index(owner), ranks.rank == owner, bucket, items)

    def _send(
        self, group: Any, source: int, is_owner: bool, bucket: Sequence[_SharedItem], items: dict[Any, ReadItem]
    ) -> None:
        sizes = [entry.size for entry in bucket]
        if len(bucket) == 1 and bucket[0].is_tensor:
            target = self._planner.resolve_tensor(items[bucket[0].key]).detach()
            view = _plain_view(target)
            if view is not None and target.dtype == self._dtype(items[bucket[0].key]):
                dist.broadcast(torch.from_numpy(view), group=group, group_src=source)
                if not is_owner:
                    self._planner.commit_tensor(items[bucket[0].key], target)
                return
        packed = torch.empty(sum(sizes), dtype=torch.uint8)
        pieces = torch.split(packed, sizes)
        if is_owner:
            for entry, piece in zip(bucket, pieces, strict=True):
                piece.copy_(self._stored_bytes(entry, items[entry.key]))
        dist.broadcast(packed, group=group, group_src=source)
        if not is_owner:
            for entry, piece in zip(bucket, pieces, strict=True):
                if entry.is_tensor:
                    item = items[entry.key]
                    self._copy_to_target(item, piece.clone().view(self._dtype(item)).reshape(item.lengths))
                else:
                    self._raw[entry.key] = piece.numpy().tobytes()

    def _stored_bytes(self, entry: _SharedItem, item: ReadItem) -> torch.Tensor:
        if not entry.is_tensor:
            return torch.frombuffer(bytearray(self._raw[entry.key]), dtype=torch.uint8)
        target = self._planner.resolve_tensor(item).detach().cpu().contiguous()
        return torch.from_numpy(view_bytes(target.to(self._dtype(item))))

    def _entry(self, item: ReadItem) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _dtype(self, item: ReadItem) -> torch.dtype:
        return self._entry(item).properties.dtype

    # -- from a read item to a byte range and back -------------------------------------------------------------------

    def _plan_read(self, item: ReadItem, info: _StorageInfo) -> ReadTarget:
        payload: int | None = getattr(info, commits.PAYLOAD_OFFSET, None)
        if item.type == LoadItemType.BYTE_IO or payload is None or not item.lengths.numel():
            return self._plan_complete_read(item, info)
        dtype = self._dtype(item)
        # The item is a box of a stored chunk. Read the elements from the first to the last one of the box.
        strides = torch.empty(self._chunk_sizes(item), device="meta").stride()
        first = sum(offset * stride for offset, stride in zip(item.storage_offsets, strides, strict=True))
        count = 1 + sum((length - 1) * stride for length, stride in zip(item.lengths, strides, strict=True))
        start = info.offset + payload + first * dtype.itemsize
        target = self._planner.resolve_tensor(item).detach()
        view = _plain_view(target)
        if view is not None and target.dtype == dtype and count == item.lengths.numel():
            self._steps.append(lambda: self._planner.commit_tensor(item, target))
            return ReadTarget(start, view)
        buffer = self._new_buffer(count * dtype.itemsize)
        box = torch.from_numpy(buffer).view(dtype).as_strided(item.lengths, strides)
        self._steps.append(lambda: self._copy_to_target(item, box))
        return ReadTarget(start, buffer)

    def _plan_complete_read(self, item: ReadItem, info: _StorageInfo) -> ReadTarget:
        buffer = self._new_buffer(info.length)

        def use() -> None:
            if item.type == LoadItemType.BYTE_IO:
                self._raw[_item_key(item)] = buffer.tobytes()
                return
            uri = self._reader._store.uri(self._reader._folder + info.relative_path)
            tensor = load_file(io.BytesIO(buffer.data), uri, "cpu", weights_only=True)
            self._copy_to_target(item, narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))

        self._steps.append(use)
        return ReadTarget(info.offset, buffer)

    def _copy_to_target(self, item: ReadItem, tensor: torch.Tensor) -> None:
        target = self._planner.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            raise CheckpointError(
                f"{item.storage_index.fqn!r} has shape {tuple(tensor.size())} in the checkpoint and "
                f"{tuple(target.size())} in the state dict",
                uri=self._reader.checkpoint_id,
            )
        target.copy_(tensor)
        self._planner.commit_tensor(item, target)

    def load_bytes(self, item: ReadItem) -> None:
        """Pass an item that is not a tensor to the planner."""
        data = self._raw[_item_key(item)]
        if self._reader._weights_only:
            # The planner unpickles anything, so check first that it is harmless.
            load_file(io.BytesIO(data), f"{self._reader.checkpoint_id} [{item.storage_index.fqn}]", "cpu", True)
        self._planner.load_bytes(item, io.BytesIO(data))

    def _chunk_sizes(self, item: ReadItem) -> torch.Size:
        chunks, offset, hint = self._entry(item).chunks, item.storage_index.offset, item.storage_index.index
        if hint is not None and hint < len(chunks) and chunks[hint].offsets == offset:
            return chunks[hint].sizes
        return next(chunk.sizes for chunk in chunks if chunk.offsets == offset)


# -- pure planning ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SharedItem:
    """An item that several ranks need, and the rank that reads it."""

    key: Any
    owner: int
    """Rank that reads the item and sends it to the others."""
    ranks: tuple[int, ...]
    size: int
    """Number of bytes that are sent."""
    is_tensor: bool


def _item_key(item: ReadItem) -> Any:
    return (item.storage_index, item.storage_offsets, item.lengths)


def _assign_readers(plans: Sequence[LoadPlan], size_of: Callable[[ReadItem], int]) -> list[_SharedItem]:
    """Return every item that more than one plan needs, each with one reader, so that all ranks read similar amounts."""
    needed_by: dict[Any, list[int]] = defaultdict(list)
    examples: dict[Any, ReadItem] = {}
    loads = [0] * len(plans)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = _item_key(item)
            needed_by[key].append(rank)
            examples.setdefault(key, item)
    sizes = {key: size_of(item) for key, item in examples.items()}
    # A rank that needs the same bytes in two places reads them itself: too rare to send twice.
    common = {key for key, ranks in needed_by.items() if len(ranks) > 1 and len(set(ranks)) == len(ranks)}
    for key in needed_by.keys() - common:
        for rank in set(needed_by[key]):
            loads[rank] += sizes[key]
    shared = []
    for key in sorted(common, key=lambda k: (-sizes[k], examples[k].storage_index.fqn, k[1], k[2])):
        owner = min(needed_by[key], key=lambda rank: loads[rank])
        loads[owner] += sizes[key]
        is_tensor = examples[key].type == LoadItemType.TENSOR
        shared.append(_SharedItem(key, owner, tuple(needed_by[key]), sizes[key], is_tensor))
    return shared


def _group_for_sending(entries: Sequence[_SharedItem]) -> list[list[_SharedItem]]:
    """Group small entries so that they are sent together; large ones are alone."""
    groups: list[list[_SharedItem]] = []
    left_bytes = 0
    for entry in entries:
        if entry.size > left_bytes or not groups:
            groups.append([])
            left_bytes = _SEND_BYTES
        groups[-1].append(entry)
        left_bytes -= entry.size
    return groups


def _plain_view(tensor: torch.Tensor) -> _Bytes | None:
    """Return the tensor's own memory as bytes if it is plain, contiguous CPU memory, else None."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return view_bytes(tensor)


def load_sharded(
    state: dict[str, Any], uri: StrPath, config: StoreConfig | None = None, *, process_group: Any = None, **options: Any
) -> None:
    """Load a checkpoint into `state`, in place, on all ranks together. `options` are those of `DistributedReader`."""
    reader = DistributedReader(uri, config, process_group=process_group, **options)
    for attempt in range(_ATTEMPTS):
        reader.open()
        try:
            with ignore_single_process_warnings(), unwrap_rank_errors(reader.checkpoint_id):
                load(state, storage_reader=reader, process_group=process_group)
            return
        except IncompleteError:
            # It may have been replaced while it was read; then the new one can be read, and all ranks try again.
            if attempt == _ATTEMPTS - 1:
                raise
