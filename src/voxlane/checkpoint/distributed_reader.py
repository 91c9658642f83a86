"""A `torch.distributed.checkpoint` storage reader: only the bytes that a rank needs, in concurrent ranged reads, each
checked; and what many ranks need, read by one of them."""

from __future__ import annotations

import io
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from voxlane import uri as uris
from voxlane.checkpoint import distributed_metadata as commits
from voxlane.checkpoint.collective import Ranks, sub_group
from voxlane.checkpoint.distributed_metadata import Files
from voxlane.checkpoint.plain import load_file
from voxlane.checkpoint.source import Source
from voxlane.checkpoint.wanted import Wanted, read_wanted, submit_wanted
from voxlane.errors import CheckpointError, IncompleteError, NotFoundError
from voxlane.store import ObjectInfo, Store, StoreConfig

_HELD_BYTES = 128 << 20
"""Read before it can be put into place; two such batches at most."""
_BUCKET_BYTES = 16 << 20
"""Small tensors are sent to the other ranks together, about this much at a time."""
_ATTEMPTS = 3
"""Of a load that finds files gone."""
_Bytes = npt.NDArray[np.uint8]


class DistributedReader(commits.AtUri, StorageReader):
    """Reads a distributed checkpoint from a folder in a bucket, written by any number of ranks.

        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=DistributedReader("gs://bucket/run/step-100"))

    What several ranks ask for (replicated parameters, the same shard in every replica) is read by one of them, the
    work being spread evenly, and sent to the others. For that every rank of `process_group` must take part (as
    `dcp.load` requires anyway; give both the same group); `read_once=False` lets each rank read by itself.

    Checkpoints of torch's own writers can be read, but have no checksums. Objects other than tensors are read only if
    that cannot run code, unless `weights_only=False`.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
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

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, from another URI if one is given."""
        if checkpoint_id is not None:
            parsed = uris.parse(uris.from_path(checkpoint_id))
            self._folder = parsed.key.rstrip("/") + "/" if parsed.key else ""
            self._store = Store(str(parsed), self._config)
        elif self._opened:
            self._opened = False  # what `open` read is for the load that begins now
            return
        self._opened = False
        self._metadata: Metadata | None = None
        self._files: Files | None = None
        self._ranks: Ranks | None = None

    def read_metadata(self, *args: Any) -> Metadata:
        """The checkpoint's metadata, read by one rank for all."""
        if self._metadata is not None:
            return self._metadata
        self._ranks = Ranks.of(self._group) if self._read_once else None
        if self._ranks is None:
            self._metadata, self._files = self._read_commit()
        else:
            self._ranks.gather(self.checkpoint_id)
            self._metadata, self._files = self._ranks.once(self._read_commit)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called on every rank before a load."""
        if metadata.storage_data is None:
            raise CheckpointError("the metadata does not say where the items are", uri=self.checkpoint_id)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: choose one reader for what several ranks want."""
        if self._ranks is not None and len(plans) > 1:
            shared = _share(plans, self._item_bytes)
            for plan in plans:
                plan.storage_data = shared
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items, and take part in sending what is shared."""
        shared: list[_Shared] = plan.storage_data or []
        rank = self._ranks.rank if self._ranks is not None else 0
        theirs = {s.key for s in shared if s.owner != rank and rank in s.ranks}
        loading = _Loading(self, planner)
        failure: BaseException | None = None
        try:
            loading.read([item for item in plan.items if _key(item) not in theirs])
        except BaseException as error:
            failure = error
            if not shared:
                raise
        if shared:
            assert self._ranks is not None
            self._ranks.agree(failure)  # before anybody waits for bytes that will not come
            loading.exchange(self._ranks, shared, {_key(item): item for item in plan.items})
        loading.finish()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # -- beyond torch's protocol -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the metadata now, for the next `dcp.load`: its errors are plain ones, while torch logs what it meets in
        a load and raises something else. Collective."""
        self._metadata = None
        self.read_metadata()
        self._opened = True

    def attachment(self, name: str) -> bytes | None:
        """A file that was published with the checkpoint (`DistributedWriter(attachments=...)`), or None. Collective
        when ranks read together."""
        ranks = Ranks.of(self._group) if self._read_once else None
        return ranks.once(lambda: self._read_attachment(name)) if ranks else self._read_attachment(name)

    def _read_attachment(self, name: str) -> bytes | None:
        _, files = self._read_commit()
        if files is None or name not in files.attachments:
            return None
        self._files = files
        path = files.attachments[name]
        source = self.source(path)
        data = np.empty(source.info.size, np.uint8)
        read_wanted(source, [Wanted(0, data)])
        return data.tobytes()

    def source(self, path: str) -> Source:
        """A file of the checkpoint, with its checksums where they are known."""
        if self._files is None:
            try:
                return Source(self._store, self._store.head(self._folder + path))
            except NotFoundError as error:
                raise self._gone(path) from error
        if path not in self._files.sums:
            raise self._gone(path)
        sums = self._files.sums[path]
        # No look at the object first: names are never used twice, and the checksums tell if it is another one.
        return Source(self._store, ObjectInfo(self._folder + path, sums.size, None, None), [sums])

    def _gone(self, path: str) -> IncompleteError:
        return IncompleteError(
            "a file of the checkpoint is gone",
            uri=self._store.uri(self._folder + path),
            fix="Load an earlier checkpoint (voxlane checkpoint ls)",
        )

    def _read_commit(self) -> tuple[Metadata, Files | None]:
        return commits.read(self._store, self._folder)

    def _item_bytes(self, item: ReadItem) -> int:
        assert self._metadata is not None
        entry = self._metadata.state_dict_metadata.get(item.storage_index.fqn)
        if isinstance(entry, TensorStorageMetadata):
            return item.lengths.numel() * entry.properties.dtype.itemsize
        return int(self._metadata.storage_data[item.storage_index].length)


class _Loading:
    """One call of `read_data`."""

    def __init__(self, reader: DistributedReader, planner: LoadPlanner) -> None:
        assert reader._metadata is not None
        self._reader = reader
        self._planner = planner
        self._metadata = reader._metadata
        self._after: list[Callable[[], None]] = []
        """What to do at the end, when all ranks have what they need."""
        self._raw: dict[Any, bytes] = {}
        """Stored bytes of items that are not tensors, by key."""

    def read(self, items: Sequence[ReadItem]) -> None:
        """Fetch `items` from the bucket into their places.

        Bytes that cannot go straight there (of tensors on a device, or not contiguous) are held in between. So items
        are taken in batches, of which the next is on its way while one is put into place.
        """
        batches: deque[tuple[list[ThreadFuture[None]], list[Callable[[], None]]]] = deque()
        rest = deque(sorted(items, key=self._place))
        try:
            while rest or batches:
                if rest and len(batches) < 2:
                    batches.append(self._begin(rest))
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
            raise self._reader._gone(error.uri.removeprefix(self._reader._store.uri(self._reader._folder))) from None
        finally:
            for futures, _ in batches:
                for future in futures:
                    future.cancel()

    def _place(self, item: ReadItem) -> tuple[str, int]:
        info: _StorageInfo = self._metadata.storage_data[item.storage_index]
        return info.relative_path, info.offset

    def _begin(self, rest: deque[ReadItem]) -> tuple[list[ThreadFuture[None]], list[Callable[[], None]]]:
        """Start reading the next batch; returns its reads, and what to do once they are done."""
        self._steps: list[Callable[[], None]] = []
        by_file: dict[str, list[Wanted]] = defaultdict(list)
        self._held_bytes = 0
        while rest and self._held_bytes < _HELD_BYTES:
            item = rest.popleft()
            info: _StorageInfo = self._metadata.storage_data[item.storage_index]
            by_file[info.relative_path].append(self._wanted(item, info))
        futures = [
            future for path, wanted in by_file.items() for future in submit_wanted(self._reader.source(path), wanted)
        ]
        return futures, self._steps

    def _hold(self, nbytes: int) -> _Bytes:
        self._held_bytes += nbytes
        return np.empty(nbytes, np.uint8)

    def exchange(self, ranks: Ranks, shared: Sequence[_Shared], items: dict[Any, ReadItem]) -> None:
        """Send what this rank read for others, and receive what others read for it. Collective."""
        groups: dict[tuple[int, ...], list[_Shared]] = defaultdict(list)
        for entry in shared:
            groups[entry.ranks].append(entry)
        for members, entries in groups.items():
            if ranks.rank not in members:
                continue
            group = sub_group(ranks, members)
            for owner in dict.fromkeys(entry.owner for entry in entries):
                owned = [entry for entry in entries if entry.owner == owner]
                for bucket in _buckets(owned):
                    self._send(group, members.index(owner), ranks.rank == owner, bucket, items)

    def finish(self) -> None:
        """Give the planner what is not a tensor."""
        for step in self._after:
            step()

    def _send(
        self, group: Any, source: int, is_owner: bool, bucket: Sequence[_Shared], items: dict[Any, ReadItem]
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
                self._receive(entry, items[entry.key], piece)

    def _stored_bytes(self, entry: _Shared, item: ReadItem) -> torch.Tensor:
        if not entry.is_tensor:
            return torch.frombuffer(bytearray(self._raw[entry.key]), dtype=torch.uint8)
        target = self._planner.resolve_tensor(item).detach().cpu().contiguous()
        return _flat_bytes(target.to(self._dtype(item)))

    def _receive(self, entry: _Shared, item: ReadItem, piece: torch.Tensor) -> None:
        if not entry.is_tensor:
            data = piece.numpy().tobytes()
            self._after.append(lambda: self._load_bytes(item, data))
            return
        tensor = piece.clone().view(self._dtype(item)).reshape(item.lengths)
        self._put(item, tensor)

    def _dtype(self, item: ReadItem) -> torch.dtype:
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    # -- from a read item to a range and back ------------------------------------------------------------------------

    def _wanted(self, item: ReadItem, info: _StorageInfo) -> Wanted:
        payload = commits.payload_offset(info)
        if item.type == LoadItemType.BYTE_IO or payload is None or not item.lengths.numel():
            return self._whole_item(item, info)
        sizes = self._chunk_sizes(item)
        dtype = self._dtype(item)
        low, high = _rows(item.storage_offsets, item.lengths, sizes)
        start = info.offset + payload + low * dtype.itemsize
        nbytes = (high - low) * dtype.itemsize
        target = self._planner.resolve_tensor(item).detach()
        view = _plain_view(target)
        if view is not None and target.dtype == dtype and high - low == item.lengths.numel():
            self._steps.append(lambda: self._planner.commit_tensor(item, target))
            return Wanted(start, view)
        held = self._hold(nbytes)
        self._steps.append(lambda: self._put_rows(item, held, low, sizes, dtype))
        return Wanted(start, held)

    def _whole_item(self, item: ReadItem, info: _StorageInfo) -> Wanted:
        held = self._hold(info.length)

        def use() -> None:
            if item.type == LoadItemType.BYTE_IO:
                data = held.tobytes()
                self._raw[_key(item)] = data
                self._after.append(lambda: self._load_bytes(item, data))
                return
            uri = self._reader._store.uri(self._reader._folder + info.relative_path)
            tensor = load_file(io.BytesIO(held.data), uri, "cpu", weights_only=True)
            self._put(item, narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))

        self._steps.append(use)
        return Wanted(info.offset, held)

    def _put_rows(self, item: ReadItem, held: _Bytes, low: int, sizes: torch.Size, dtype: torch.dtype) -> None:
        """`held` is a run of the stored chunk's elements that begins at element `low`: cut the wanted box out of it."""
        strides = torch.empty(sizes, device="meta").stride()
        flat = torch.from_numpy(held).view(dtype)
        first = sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True))
        self._put(item, flat.as_strided(tuple(item.lengths), strides, first - low))

    def _put(self, item: ReadItem, tensor: torch.Tensor) -> None:
        target = self._planner.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            raise CheckpointError(
                f"{item.storage_index.fqn!r} is {tuple(tensor.size())} there and {tuple(target.size())} here",
                uri=self._reader.checkpoint_id,
            )
        target.copy_(tensor)
        self._planner.commit_tensor(item, target)

    def _load_bytes(self, item: ReadItem, data: bytes) -> None:
        if self._reader._weights_only:
            # The planner unpickles without asking: see first that it is harmless.
            load_file(io.BytesIO(data), f"{self._reader.checkpoint_id} [{item.storage_index.fqn}]", "cpu", True)
        self._planner.load_bytes(item, io.BytesIO(data))

    def _chunk_sizes(self, item: ReadItem) -> torch.Size:
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        hint = item.storage_index.index
        if hint is not None and hint < len(entry.chunks) and entry.chunks[hint].offsets == item.storage_index.offset:
            return entry.chunks[hint].sizes
        return next(chunk.sizes for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)


# -- pure planning ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shared:
    """Something that several ranks want, and who reads it."""

    key: Any
    owner: int
    ranks: tuple[int, ...]
    size: int
    """Bytes as they are sent."""
    is_tensor: bool


def _key(item: ReadItem) -> Any:
    return (item.storage_index, item.storage_offsets, item.lengths)


def _share(plans: Sequence[LoadPlan], size_of: Callable[[ReadItem], int]) -> list[_Shared]:
    """Everything that more than one plan wants, each with one reader, so that all read about as much."""
    wanting: dict[Any, list[int]] = defaultdict(list)
    examples: dict[Any, ReadItem] = {}
    loads = [0] * len(plans)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = _key(item)
            wanting[key].append(rank)
            examples.setdefault(key, item)
    sizes = {key: size_of(item) for key, item in examples.items()}
    # A rank that wants the same bytes in two places reads them itself: too rare to send twice.
    common = {key for key, ranks in wanting.items() if len(ranks) > 1 and len(set(ranks)) == len(ranks)}
    for key in wanting.keys() - common:
        for rank in set(wanting[key]):
            loads[rank] += sizes[key]
    shared = []
    for key in sorted(common, key=lambda k: (-sizes[k], examples[k].storage_index.fqn, k[1], k[2])):
        owner = min(wanting[key], key=lambda rank: loads[rank])
        loads[owner] += sizes[key]
        is_tensor = examples[key].type == LoadItemType.TENSOR
        shared.append(_Shared(key, owner, tuple(wanting[key]), sizes[key], is_tensor))
    return shared


def _buckets(entries: Sequence[_Shared]) -> list[list[_Shared]]:
    """Large entries alone, small ones together."""
    buckets: list[list[_Shared]] = []
    room = 0
    for entry in entries:
        if entry.size > room or not buckets:
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(entry)
        room -= entry.size
    return buckets


def _rows(offsets: torch.Size, lengths: torch.Size, sizes: torch.Size) -> tuple[int, int]:
    """The smallest run `[low, high)` of a contiguous tensor's elements that holds a box of it."""
    low = high = 0
    stride = 1
    for offset, length, size in reversed(list(zip(offsets, lengths, sizes, strict=True))):
        low += offset * stride
        high += (offset + length - 1) * stride
        stride *= size
    return low, high + 1


def _plain_view(tensor: torch.Tensor) -> _Bytes | None:
    """The tensor's own memory as bytes, if it is plain, contiguous CPU memory."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return _flat_bytes(tensor).numpy()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def load_sharded(
    state: dict[str, Any],
    uri: str | os.PathLike[str],
    config: StoreConfig | None = None,
    *,
    process_group: Any = None,
    **options: Any,
) -> None:
    """Load a checkpoint into `state`, in place, by all ranks together. `options` are those of `DistributedReader`."""
    from torch.distributed.checkpoint.state_dict_loader import load

    from voxlane.checkpoint.collective import quiet, unwrapped

    reader = DistributedReader(uri, config, process_group=process_group, **options)
    for attempt in range(_ATTEMPTS):
        reader.open()
        try:
            with quiet(), unwrapped(reader.checkpoint_id):
                load(state, storage_reader=reader, process_group=process_group)
            return
        except IncompleteError:
            # Replaced while it was read: the new one is there, and all ranks come here. Else files are really gone.
            if attempt == _ATTEMPTS - 1:
                raise
