"""Reading of regions of stored volumes, fetching only the chunks that they touch.

`VolumeCache` holds what the readers of all cases of a dataset share: the bucket, shard indexes, caches and counters.
`VolumeReader` reads one case and is small, so a dataset may have a hundred thousand of them. `start` sends the requests
for a region and returns immediately; `PendingRead.result` waits, decodes and returns the array. So latency is hidden by
starting a patch several patches ahead.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from voxlane.dataset.cache import DiskCache
from voxlane.errors import ChangedError, ConfigError, NotFoundError, PreparedError, RangeError
from voxlane.store import Store
from voxlane.store.content import checksum_content
from voxlane.store.native import entering_process
from voxlane.store.ranges import Span, coalesce
from voxlane.store.retry import MAX_READS
from voxlane.volume import zarr_array
from voxlane.volume.codec import ChunkCodec, checksum
from voxlane.volume.dataset_index import OBJECT_LISTS, StoredObject, read_objects
from voxlane.volume.prepared_dataset import COPY_AGAIN
from voxlane.volume.staged_dataset import StagedReader
from voxlane.volume.zarr_array import MAX_GAP_BYTES, ArrayMeta, ChunkPart, Shape

_V = TypeVar("_V")
MIB = 1 << 20
_MISSING = int(zarr_array.MISSING)
_READ_PROBLEMS: dict[type[Exception], tuple[str, str]] = {
    ChangedError: (
        "the object was changed or copied after an earlier version of voxlane, which stored no checksums, prepared it",
        "Use the dataset where it was prepared, or run voxlane prepare again",
    ),
    RangeError: ("the object is shorter than when it was prepared", COPY_AGAIN),
    NotFoundError: ("an object of the prepared dataset is missing", COPY_AGAIN),
}
"""Problem and fix by the error of a request; only objects of format 1 are requested in one version."""


@dataclass(frozen=True)
class ReadTiming:
    """Time and requests spent on reading since the start, over all readers that share a cache."""

    wait_s: float = 0.0
    """Seconds that callers of `result` spent waiting for the bucket."""
    decode_s: float = 0.0
    """Seconds that callers of `result` spent decoding."""
    requests: int = 0
    """Requests for data and indexes, without those that a cache answered."""
    bytes_read: int = 0
    regions: int = 0
    """Regions read; image and label of a patch are two."""
    memory_hits: int = 0
    """Chunks read from the memory cache."""
    disk_hits: int = 0
    """Chunks read from the disk cache."""


@dataclass(eq=False)
class VolumeCache:
    """State shared by the readers of one bucket: connections, caches and counters.

    Cheap to build and to pickle; caches and counters are not pickled, and a forked child starts with empty ones.
    Thread-safe. Memory per process is at most `memory_bytes` of compressed chunks, `index_bytes` of shard indexes and
    small objects, and the data in flight.
    """

    store: Store
    _: KW_ONLY
    memory_bytes: int = 256 * MIB
    """Memory for compressed chunks; 0 disables this cache."""
    disk: DiskCache | None = None
    index_bytes: int = 128 * MIB
    max_gap_bytes: int = MAX_GAP_BYTES
    """Largest gap in an object between two chunks that are read in one request."""
    whole_bytes: int = 256 * 1024
    """Objects up to this size are read whole, in one request instead of first the index and then chunks."""
    staged: StagedReader | None = None

    def __post_init__(self) -> None:
        if min(self.memory_bytes, self.index_bytes, self.max_gap_bytes, self.whole_bytes) < 0:
            raise ConfigError("Volumes: a size in bytes is below zero")
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._timing = ReadTiming()
        self._chunks: _LruCache[memoryview] = _LruCache(self.memory_bytes)
        self._shards: _LruCache[_Shard] = _LruCache(self.index_bytes)
        self._opening: dict[StoredObject, Future[_Shard]] = {}
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.decoding = threading.Semaphore(cores)
        """Limits the number of decoding threads to that of cores; more would only slow each other down."""
        self._pid = os.getpid()  # last: other threads may use the state from now on

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(VolumeCache, **{setting.name: getattr(self, setting.name) for setting in fields(self)}), ()

    def open(self, key_prefix: str, metadata: Mapping[str, Any]) -> VolumeReader:
        """Return a reader of the case below `key_prefix`, given the result of `write_case`; sends no request."""
        return VolumeReader(self, key_prefix.rstrip("/"), metadata)

    @property
    def timing(self) -> ReadTiming:
        """Time and requests spent on reading so far in this process."""
        self._enter_process()
        with self._lock:
            return self._timing

    # -- for readers -----------------------------------------------------------------------------------------------

    def _enter_process(self) -> None:
        """Reset the state in a forked child, once, which must not wait for its parent's threads or locks."""
        if self._pid != os.getpid():
            with entering_process:
                if self._pid != os.getpid():
                    self._reset()

    def _count(self, **more: float) -> None:
        with self._lock:
            self._timing = replace(self._timing, **{k: getattr(self._timing, k) + v for k, v in more.items()})

    def _fetch(self, stored: StoredObject, span: Span, parts: Sequence[Span], *, is_again: bool = False) -> memoryview:
        """Fetch bytes of an object and store each of `parts` in the disk cache. Runs on the store's threads.
        `is_again`: the bytes were damaged, so they come from the bucket."""
        if is_again:
            self.store.counters.add("get", requests=0, retries=1)
        elif self.staged is not None:
            body_copy = self.staged.read(stored.key, stored.version, span.start, span.stop)
            if body_copy is not None:
                self._count(disk_hits=max(1, len(parts)))
                return memoryview(body_copy)
        try:
            body = memoryview(self.store.get(stored.key, span.start, span.stop, etag=stored.required_etag))
            if len(body) != span.size:
                raise RangeError("the object is too short")
        except (ChangedError, RangeError, NotFoundError) as error:
            if type(error) not in _READ_PROBLEMS:  # such as a missing bucket
                raise
            problem, fix = _READ_PROBLEMS[type(error)]
            raise PreparedError(problem, uri=self.store.uri(stored.key), fix=fix) from None
        self._count(requests=1, bytes_read=len(body))
        for part in parts:
            if self.disk is not None and stored.version:
                part_body = body[part.start - span.start : part.stop - span.start]
                self.disk.put(self._disk_name(stored, part), stored.version, part_body)
        return body

    def _read_from_disk(self, stored: StoredObject, span: Span) -> memoryview | None:
        if self.disk is None or not stored.version:
            return None
        body = self.disk.get(self._disk_name(stored, span), stored.version, span.size)
        return None if body is None else memoryview(body)

    def _disk_name(self, stored: StoredObject, span: Span) -> str:
        return f"{self.store.uri(stored.key)}#{span.start}-{span.stop}"

    def _open_shard_once(self, meta: ArrayMeta, stored: StoredObject) -> Future[_Shard]:
        """Return the object's index, or all of it if it is small; concurrent callers share one request."""
        with self._lock:
            if (shard := self._shards.get(stored)) is not None:
                return _completed(shard)
            if stored not in self._opening:
                self._opening[stored] = self.store.submit(self._open_shard, meta, stored)
            return self._opening[stored]

    def _open_shard(self, meta: ArrayMeta, stored: StoredObject) -> _Shard:
        try:
            is_whole = not meta.shard or stored.size <= self.whole_bytes
            first = stored.size - meta.index_bytes if meta.index_at == "end" and not is_whole else 0
            span = Span(first, stored.size if is_whole else first + meta.index_bytes)
            body = self._read_from_disk(stored, span)
            if body is None:
                body = self._fetch(stored, span, [span])
            for num_reads in range(1, MAX_READS + 1):
                try:
                    shard = _Shard.parse(meta, stored, body, is_whole, self.store.uri(stored.key))
                    break
                except PreparedError as error:
                    if num_reads == MAX_READS:
                        raise _still_damaged(error) from None
                    body = self._fetch(stored, span, [span], is_again=True)
            self._shards.put(stored, shard, shard.nbytes)
            return shard
        finally:
            with self._lock:
                del self._opening[stored]  # after a failure the next caller tries again


def _still_damaged(error: PreparedError) -> PreparedError:
    """Return the error for bytes that were read again in vain."""
    return PreparedError(f"{error.message} (the same after {MAX_READS} reads)", uri=error.uri, fix=error.fix)


class VolumeReader:
    """Reads one case on demand. It requests nothing but voxels and shard indexes from the bucket."""

    def __init__(self, shared: VolumeCache, key_prefix: str, metadata: Mapping[str, Any]) -> None:
        """`metadata`: the result of `write_case`."""
        self.shared = shared
        self.key_prefix = key_prefix
        self._metadata = metadata
        self._arrays: dict[str, ArrayMeta] = {}
        self._objects: dict[str, StoredObject] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return VolumeReader, (self.shared, self.key_prefix, self._metadata)

    def meta(self, array: str) -> ArrayMeta:
        """Return shape, type and encoding of an array: image, label or foreground."""
        if array not in self._arrays:
            if array not in self._metadata or array in OBJECT_LISTS:
                names = ", ".join(sorted(set(self._metadata) - {*OBJECT_LISTS}))
                uri = self.shared.store.uri(self.key_prefix)
                raise PreparedError(f"the case has no array {array!r}, only {names}", uri=uri)
            self._arrays[array] = ArrayMeta.from_metadata(self._metadata[array])
        return self._arrays[array]

    def start(
        self, array: str, start: Sequence[int] = (), stop: Sequence[int] = (), *, fill: float | None = None
    ) -> PendingRead:
        """Start reading `[start, stop)`, by default the whole array, and return before the bytes arrive. Bounds may
        omit leading axes, which are then read completely: (z, y, x) is sufficient for an image. With `fill`, the region
        may be partly or completely outside the array, where the result holds `fill`."""
        meta = self.meta(array)
        low = first = _fill_in_bounds(start, [0] * len(meta.shape))
        high = last = _fill_in_bounds(stop, list(meta.shape))
        if fill is not None:
            low = [min(max(a, 0), n) for a, n in zip(first, meta.shape, strict=True)]
            high = [max(a, min(b, n)) for a, b, n in zip(low, last, meta.shape, strict=True)]
        self.shared._enter_process()
        shape = tuple(b - a for a, b in zip(first, last, strict=True))
        inside = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, first, strict=True))
        pending = PendingRead(self.shared, meta, shape, inside, None if (low, high) == (first, last) else fill)
        for position, chunk_parts in zarr_array.plan_region(meta, low, high).items():
            pending._request_object(self._object(array, position), chunk_parts)
        return pending

    def read(self, array: str, *bounds: Sequence[int], fill: float | None = None) -> npt.NDArray[Any]:
        """Read the voxels `[start, stop)`; the arguments are those of `start`."""
        return self.start(array, *bounds, fill=fill).result()

    def _object(self, array: str, position: Shape) -> StoredObject | None:
        """Return the object at a position, or None if it was not written because it holds only the fill value."""
        if not self._objects:
            self._objects = {stored.key: stored for stored in read_objects(self._metadata, self.key_prefix)}
        return self._objects.get(f"{self.key_prefix}/{array}/{zarr_array.object_name(position)}")


@dataclass(eq=False)
class PendingRead:
    """A region being read. `result` may be called once, from any thread."""

    shared: VolumeCache
    meta: ArrayMeta
    shape: Shape
    inside: tuple[slice, ...]
    """Slices of the region that are in the array."""
    fill: float | None
    """Value of the rest of the region; None if there is no rest."""
    _fills: list[ChunkPart] = field(default_factory=list)
    _requests: list[Future[list[_Response]]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all bytes have arrived or failed; `result` raises the failure."""
        began = time.perf_counter()
        for future in self._requests:
            if future.exception() is None:
                for response in future.result():
                    response.body.exception()
        self.shared._count(wait_s=time.perf_counter() - began)

    def result(self) -> npt.NDArray[Any]:
        """Wait for the bytes, decode them on this thread, and return a new array."""
        shared, meta = self.shared, self.meta
        empty = self.fill is None
        values = np.empty(self.shape, meta.dtype) if empty else np.full(self.shape, self.fill, meta.dtype)
        out = values[self.inside]
        codec = ChunkCodec(meta.codecs, meta.dtype)
        scratch = codec.empty(meta.chunk)
        wait_s = decode_s = 0.0
        mark = time.perf_counter()
        for future in self._requests:
            for response in future.result():
                body = response.body.result()
                now = time.perf_counter()
                wait_s += now - mark
                for chunk_span, chunk_part in response.chunk_parts:
                    stored = body[chunk_span.start - response.first : chunk_span.stop - response.first]
                    try:
                        codec.decode(stored, scratch)
                    except ValueError:
                        stored = self._decode_again(codec, response.stored, chunk_span, chunk_part, scratch)
                    out[chunk_part.target] = scratch[chunk_part.source]
                    if response.cacheable and chunk_span.size <= shared.memory_bytes:
                        # A copy, because a slice would keep the whole response in memory.
                        copy = memoryview(bytes(stored))
                        shared._chunks.put((response.stored, chunk_span.start), copy, chunk_span.size)
                mark = time.perf_counter()
                decode_s += mark - now
        for chunk_part in self._fills:  # complete once every request is answered
            out[chunk_part.target] = meta.fill
        shared._count(wait_s=wait_s, decode_s=decode_s, regions=1)
        return values

    def _decode_again(
        self, codec: ChunkCodec, stored: StoredObject, span: Span, chunk_part: ChunkPart, scratch: npt.NDArray[Any]
    ) -> memoryview:
        """Read a damaged chunk from the bucket until it can be decoded; return its bytes. Something on the way, or a
        cache, may have changed them."""
        shared = self.shared
        shared._shards.drop(stored)  # it may hold the damaged bytes
        shared._open_shard_once(self.meta, stored).result()  # raises the error of an object that was replaced
        for num_reads in range(2, MAX_READS + 1):
            body = shared._fetch(stored, span, [span], is_again=True)
            try:
                codec.decode(body, scratch)
                return body
            except ValueError as error:
                if num_reads == MAX_READS:
                    problem = f"chunk {chunk_part.number} (bytes {span.start} to {span.stop}) is damaged: {error}"
                    uri = shared.store.uri(stored.key)
                    raise _still_damaged(PreparedError(problem, uri=uri, fix="Prepare the case again")) from None
        raise AssertionError("unreachable")

    def _request_object(self, stored: StoredObject | None, chunk_parts: list[ChunkPart]) -> None:
        """Request the parts of one object: its index first, then its chunks. No thread waits in between."""
        if stored is None:
            self._fills += chunk_parts
            return
        future: Future[list[_Response]] = Future()
        self._requests.append(future)

        def ask(opened: Future[_Shard]) -> None:
            try:
                future.set_result(self._request_chunks(stored, opened.result(), chunk_parts))
            except BaseException as error:  # noqa: BLE001 - a thread boundary: `result` raises the error
                future.set_exception(error)

        self.shared._open_shard_once(self.meta, stored).add_done_callback(ask)

    def _request_chunks(self, stored: StoredObject, shard: _Shard, chunk_parts: list[ChunkPart]) -> list[_Response]:
        """Send requests for the chunks that no cache has."""
        shared = self.shared
        stored_parts: list[tuple[Span, ChunkPart]] = []
        for chunk_part in chunk_parts:
            if (chunk_span := shard.find_chunk(chunk_part.number)) is None:
                self._fills.append(chunk_part)
            else:
                stored_parts.append((chunk_span, chunk_part))
        if shard.body is not None:
            return [_Response(stored, _completed(shard.body), 0, stored_parts, cacheable=False)]
        responses: list[_Response] = []
        uncached: list[tuple[Span, ChunkPart]] = []
        hits = {"memory_hits": 0, "disk_hits": 0}
        for chunk_span, chunk_part in stored_parts:
            in_memory = shared._chunks.get((stored, chunk_span.start))
            body = shared._read_from_disk(stored, chunk_span) if in_memory is None else in_memory
            if body is None:
                uncached.append((chunk_span, chunk_part))
                continue
            hits["disk_hits" if in_memory is None else "memory_hits"] += 1
            part = [(chunk_span, chunk_part)]
            responses.append(_Response(stored, _completed(body), chunk_span.start, part, cacheable=in_memory is None))
        shared._count(**hits)
        plan = coalesce([chunk_span for chunk_span, _ in uncached], max_gap_bytes=shared.max_gap_bytes)
        groups: list[list[tuple[Span, ChunkPart]]] = [[] for _ in plan.groups]
        for (group, _), member in zip(plan.places, uncached, strict=True):
            groups[group].append(member)
        for span, members in zip(plan.groups, groups, strict=True):
            parts = [] if shared.disk is None else [chunk_span for chunk_span, _ in members]
            future = shared.store.submit(shared._fetch, stored, span, parts)
            responses.append(_Response(stored, future, span.start, members, cacheable=True))
        return responses


# -- private types -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Response:
    """Requested bytes of an object, and the chunks in them."""

    stored: StoredObject
    body: Future[memoryview]
    first: int
    """Offset of the body's first byte in the object."""
    chunk_parts: list[tuple[Span, ChunkPart]]
    cacheable: bool
    """Whether its chunks are put into the memory cache."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """Index of an object, and its content if it was read whole."""

    index: memoryview
    """First byte and size of each chunk, one after another. Not an array: while the store's threads were active,
    indexing by numpy took 5 ms per call in a profile, probably because it had to wait for the GIL."""
    body: memoryview | None

    @property
    def nbytes(self) -> int:
        """Memory that this takes."""
        return self.index.nbytes + (0 if self.body is None else self.body.nbytes)

    @classmethod
    def parse(cls, meta: ArrayMeta, stored: StoredObject, body: memoryview, is_whole: bool, uri: str) -> _Shard:
        """Parse the whole object or only its index; raise PreparedError if it is damaged or of another content."""
        replaced = PreparedError(
            "the object is not the one that was prepared: its checksum is another", uri=uri, fix=COPY_AGAIN
        )
        if is_whole and stored.checksum not in (None, checksum_content(body)):
            raise replaced
        index = np.array([[0, stored.size]], "<u8")
        if meta.shard:
            raw = body
            if is_whole:
                raw = body[-meta.index_bytes :] if meta.index_at == "end" else body[: meta.index_bytes]
            index_checksum = checksum(raw[: -zarr_array.INDEX_SUM_BYTES])
            index = zarr_array.parse_index(meta, raw, stored.size, index_checksum, uri)
            if stored.index_checksum not in (None, index_checksum):
                raise replaced
        return cls(index.data.cast("B").cast("Q"), body if is_whole else None)

    def find_chunk(self, number: int) -> Span | None:
        """Return the position of a chunk in the object, or None if it is not stored."""
        first, size = self.index[2 * number], self.index[2 * number + 1]
        return None if first == _MISSING else Span(first, first + size)


class _LruCache(Generic[_V]):
    """A bounded mapping that drops the least recently used items. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self._items: OrderedDict[Any, tuple[_V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> _V | None:
        with self._lock:
            if key not in self._items:
                return None
            self._items.move_to_end(key)
            return self._items[key][0]

    def put(self, key: Any, value: _V, size: int) -> None:
        if size > self.max_bytes:
            return
        with self._lock:
            self.used_bytes += size - self._items.pop(key, (value, 0))[1]
            self._items[key] = (value, size)
            while self.used_bytes > self.max_bytes:
                self.used_bytes -= self._items.popitem(last=False)[1][1]

    def drop(self, key: Any) -> None:
        with self._lock:
            self.used_bytes -= self._items.pop(key, (None, 0))[1]


def _completed(value: _V) -> Future[_V]:
    future: Future[_V] = Future()
    future.set_result(value)
    return future


def _fill_in_bounds(bounds: Sequence[int], array_bounds: list[int]) -> list[int]:
    """Return bounds for all axes: `bounds` for the last axes, preceded by those of the whole array."""
    if len(bounds) > len(array_bounds):
        raise ConfigError(f"expected at most {len(array_bounds)} axes, got {tuple(bounds)}")
    return [*array_bounds[: len(array_bounds) - len(bounds)], *(int(v) for v in bounds)]
