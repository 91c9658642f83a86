"""Regions of stored volumes, reading only the chunks they touch.

`Volumes` is what the readers of all cases of a dataset share: the bucket, the shard indexes, the caches, the time
counters. `VolumeReader` is one case: small, so that a dataset may have a hundred thousand of them. `start` sends the
requests for a region and returns at once; `Pending.result` waits, decodes and returns the array. So what a patch costs
in latency is hidden by starting it some patches ahead.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from voxlane.dataset.cache import DiskCache
from voxlane.errors import ChangedError, ConfigError, NotFoundError, PreparedError, RangeError
from voxlane.store import Store
from voxlane.store.ranges import Span, coalesce
from voxlane.volume.array import MAX_GAP_BYTES, MISSING, ArrayMeta, Piece, Shape, object_name, plan_region, read_index
from voxlane.volume.codec import ChunkCodec, checksum

_V = TypeVar("_V")
MIB = 1 << 20
_AGAIN = "Run `voxlane prepare` again"


@dataclass(frozen=True)
class Timing:
    """What reading has cost since the start, over all readers that share it."""

    wait_s: float = 0.0
    """Seconds that callers of `result` spent waiting for the bucket."""
    decode_s: float = 0.0
    """Seconds that they spent decoding."""
    requests: int = 0
    """Requests for data and indexes; what caches gave is not in it, nor in `bytes_read`."""
    bytes_read: int = 0
    regions: int = 0
    """Regions read: image and label of a patch are two."""
    chunks: int = 0
    """Chunks decoded."""
    memory_hits: int = 0
    """Chunks that came from memory."""
    disk_hits: int = 0
    """Chunks that came from the disk cache."""


def _cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Copy(Protocol):
    """A copy of the bucket's objects that is nearer; see `volume.staged`."""

    def read(self, key: str, etag: str | None, start: int, stop: int) -> bytes | None:
        """Bytes `[start, stop)` of that version of an object; None: not here."""


class Volumes:
    """What readers of one bucket share. Cheap to build and to pickle: caches and counters stay behind, and a forked
    child starts with empty ones. Safe to use from many threads.

    Memory is at most `memory_bytes` of compressed chunks and `index_bytes` of shard indexes and small whole objects,
    in each process, and what is in flight.
    """

    def __init__(
        self,
        store: Store,
        *,
        memory_bytes: int = 256 * MIB,
        disk: DiskCache | None = None,
        index_bytes: int = 128 * MIB,
        max_gap_bytes: int = MAX_GAP_BYTES,
        whole_bytes: int = 256 * 1024,
        staged: Copy | None = None,
    ) -> None:
        """`max_gap_bytes`: chunks closer than this in the object share a request. `whole_bytes`: objects up to this
        size are read whole, in one request instead of an index first and then chunks. `memory_bytes` 0: no cache."""
        self.store = store
        self._settings: dict[str, Any] = {
            "memory_bytes": memory_bytes,
            "disk": disk,
            "index_bytes": index_bytes,
            "max_gap_bytes": max_gap_bytes,
            "whole_bytes": whole_bytes,
            "staged": staged,
        }
        if min(memory_bytes, index_bytes, max_gap_bytes, whole_bytes) < 0:
            raise ConfigError("Volumes: a size in bytes is below zero")
        self.disk = disk
        self.staged = staged
        self.max_gap_bytes = max_gap_bytes
        self.whole_bytes = whole_bytes
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._timing = Timing()
        self._chunks: _Recent[memoryview] = _Recent(self._settings["memory_bytes"])
        self._shards: _Recent[_Shard] = _Recent(self._settings["index_bytes"])
        self._opening: dict[tuple[str, str | None], Future[_Shard]] = {}
        self._codecs: dict[str, ChunkCodec] = {}
        self.decoding = threading.Semaphore(_cores())
        """Held by threads that decode, where many do: more of them than cores only take time from each other."""

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Volumes.__init__(self, state["store"], **state["settings"])

    def open(self, key_prefix: str, metadata: Mapping[str, Any] | None = None) -> VolumeReader:
        """A reader of one case; no request is made."""
        return VolumeReader(self.store, key_prefix, metadata=metadata, shared=self)

    @property
    def timing(self) -> Timing:
        """What reading has cost so far in this process."""
        self._enter_process()
        with self._lock:
            return self._timing

    # -- for readers -----------------------------------------------------------------------------------------------

    def _enter_process(self) -> None:
        """A forked child must not wait for its parent's threads or locks."""
        if self._pid != os.getpid():
            self._reset()

    def _count(self, **more: float) -> None:
        with self._lock:
            self._timing = replace(self._timing, **{k: getattr(self._timing, k) + v for k, v in more.items()})

    def _codec(self, meta: ArrayMeta) -> ChunkCodec:
        key = repr((meta.codecs, meta.dtype))
        if key not in self._codecs:
            self._codecs[key] = ChunkCodec(meta.codecs, meta.dtype)
        return self._codecs[key]

    def _fetch(self, stored: _Object, span: Span, parts: Sequence[Span]) -> memoryview:
        """Bytes of an object; what `parts` name is kept on disk. Runs on the store's threads."""
        if self.staged is not None:
            near = self.staged.read(stored.key, stored.etag, span.start, span.stop)
            if near is not None:
                self._count(disk_hits=max(1, len(parts)))
                return memoryview(near)
        uri = self.store.uri(stored.key)
        try:
            body = memoryview(self.store.get(stored.key, span.start, span.stop, etag=stored.etag))
        except ChangedError:
            raise PreparedError("the object changed after the dataset was prepared", uri=uri, fix=_AGAIN) from None
        except RangeError:
            raise PreparedError("the object is shorter than it was written", uri=uri, fix=_AGAIN) from None
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise
            raise PreparedError("an object of the prepared dataset is gone", uri=uri, fix=_AGAIN) from None
        if len(body) != span.size:
            raise PreparedError("the object is shorter than it was written", uri=uri, fix=_AGAIN)
        self._count(requests=1, bytes_read=len(body))
        for part in parts:
            self._keep_on_disk(stored, part, body[part.start - span.start : part.stop - span.start])
        return body

    def _keep_on_disk(self, stored: _Object, span: Span, body: memoryview) -> None:
        if self.disk is not None and stored.etag:
            self.disk.put(self._disk_name(stored, span), stored.etag, body)

    def _from_disk(self, stored: _Object, span: Span) -> memoryview | None:
        if self.disk is None or not stored.etag:
            return None
        body = self.disk.get(self._disk_name(stored, span), stored.etag, span.size)
        return None if body is None else memoryview(body)

    def _disk_name(self, stored: _Object, span: Span) -> str:
        return f"{self.store.uri(stored.key)}#{span.start}-{span.stop}"

    def _shard(self, meta: ArrayMeta, stored: _Object) -> Future[_Shard]:
        """The object's index, or the whole object where it is small; asked for once however many want it."""
        key = (stored.key, stored.etag)
        with self._lock:
            if (known := self._shards.get(key)) is not None:
                done: Future[_Shard] = Future()
                done.set_result(known)
                return done
            if key not in self._opening:
                self._opening[key] = self.store.submit(self._open_shard, meta, stored)
            return self._opening[key]

    def _open_shard(self, meta: ArrayMeta, stored: _Object) -> _Shard:
        key = (stored.key, stored.etag)
        try:
            whole = not meta.shard or stored.size <= self.whole_bytes
            first = stored.size - meta.index_bytes if meta.index_at == "end" and not whole else 0
            span = Span(first, stored.size if whole else first + meta.index_bytes)
            body = self._from_disk(stored, span)
            if body is None:
                body = self._fetch(stored, span, [span])
            shard = _Shard.parse(meta, stored, body, whole, self.store.uri(stored.key))
        except BaseException:
            with self._lock:
                del self._opening[key]  # whoever wants it next asks again
            raise
        with self._lock:
            self._shards.put(key, shard, shard.nbytes)
            del self._opening[key]
        return shard

    def _cached(self, stored: _Object, span: Span) -> memoryview | None:
        with self._lock:
            return self._chunks.get((stored.key, stored.etag, span.start))

    def _keep(self, stored: _Object, span: Span, body: memoryview) -> None:
        # A copy, because a slice would keep the whole response it lies in.
        copy = memoryview(bytes(body)) if span.size <= self._chunks.max_bytes else body
        with self._lock:
            self._chunks.put((stored.key, stored.etag, span.start), copy, span.size)


class VolumeReader:
    """One case below `key_prefix`. Opens nothing before the first read, and with `metadata`, which `write_case`
    returned, asks the bucket for nothing but voxels and the shard's index."""

    def __init__(
        self,
        store: Store,
        key_prefix: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        shared: Volumes | None = None,
    ) -> None:
        self.key_prefix = key_prefix.rstrip("/")
        self.shared = shared or Volumes(store)
        self._metadata = metadata
        self._arrays: dict[str, ArrayMeta] = {}
        self._objects: dict[str, _Object] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.key_prefix, "metadata": self._metadata, "shared": self.shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shared: Volumes = state["shared"]
        VolumeReader.__init__(self, shared.store, state["prefix"], metadata=state["metadata"], shared=shared)

    def __repr__(self) -> str:
        return f"VolumeReader({self.shared.store.uri(self.key_prefix)!r})"

    @property
    def timing(self) -> Timing:
        """What reading has cost so far, with all readers that share the same `Volumes`."""
        return self.shared.timing

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What `write_case` returned; read from the bucket when it was not given."""
        if self._metadata is None:
            self._metadata = read_metadata(self.shared.store, self.key_prefix)
        return self._metadata

    def meta(self, array: str) -> ArrayMeta:
        """Shape, type and form of one of the arrays: image, label, foreground."""
        if array not in self._arrays:
            if array not in self.metadata or array == "objects":
                there = ", ".join(sorted(set(self.metadata) - {"objects"}))
                uri = self.shared.store.uri(self.key_prefix)
                raise PreparedError(f"the case has no {array!r}; it has {there}", uri=uri)
            self._arrays[array] = ArrayMeta.from_metadata(self.metadata[array])
        return self._arrays[array]

    def shape(self, array: str = "image") -> Shape:
        """Shape of one of the arrays."""
        return self.meta(array).shape

    def start(self, array: str, start: Sequence[int] | None = None, stop: Sequence[int] | None = None) -> Pending:
        """Begin to read `[start, stop)`; everything when both are left out. Axes that are left out at the front (the
        channels) are read whole: (z, y, x) will do for an image. Returns before the bytes are there."""
        meta = self.meta(array)
        first = _complete(start if start is not None else (), [0] * len(meta.shape))
        last = _complete(stop if stop is not None else (), list(meta.shape))
        self.shared._enter_process()
        pending = Pending(self.shared, meta, [b - a for a, b in zip(first, last, strict=True)])
        for place, pieces in plan_region(meta, first, last).items():
            pending._add(self._object(array, place), pieces)
        return pending

    def read(
        self, array: str, start: Sequence[int] | None = None, stop: Sequence[int] | None = None
    ) -> npt.NDArray[Any]:
        """The voxels `[start, stop)`; see `start`."""
        return self.start(array, start, stop).result()

    def start_padded(self, array: str, start: Sequence[int], stop: Sequence[int], fill: float) -> Pending:
        """As `start`, of a region that may lie partly or wholly outside the array; there it holds `fill`."""
        meta = self.meta(array)
        lead = len(meta.shape) - len(start)
        shape = meta.shape[lead:]
        low = [min(max(a, 0), n) for a, n in zip(start, shape, strict=True)]
        high = [max(a, min(b, n)) for a, b, n in zip(low, stop, shape, strict=True)]
        pending = self.start(array, low, high)
        outer = (*meta.shape[:lead], *(b - a for a, b in zip(start, stop, strict=True)))
        if tuple(pending.shape) != outer:
            inside = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            pending._frame = (outer, (*[slice(None)] * lead, *inside), fill)
        return pending

    def read_padded(self, array: str, start: Sequence[int], stop: Sequence[int], fill: float) -> npt.NDArray[Any]:
        """The voxels `[start, stop)`, with `fill` outside the array."""
        return self.start_padded(array, start, stop, fill).result()

    def _object(self, array: str, place: Shape) -> _Object | None:
        """The object at a place, None where nothing was written: all of it is the fill value."""
        if not self._objects:
            self._objects = {
                name: _Object(f"{self.key_prefix}/{name}", int(size), etag)
                for name, size, etag in self.metadata["objects"]
            }
        return self._objects.get(f"{array}/{object_name(place)}")


class Pending:
    """A region on its way. `result` may be called once, from any thread."""

    def __init__(self, shared: Volumes, meta: ArrayMeta, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self._shared = shared
        self._meta = meta
        self._frame: tuple[Shape, tuple[slice, ...], float] | None = None
        self._fills: list[Piece] = []
        self._asked: list[Future[list[_Arrival]]] = []

    def wait(self) -> None:
        """Until all bytes are here, or their failure, which `result` raises."""
        began = time.perf_counter()
        for asked in self._asked:
            if asked.exception() is None:
                for arrival in asked.result():
                    arrival.body.exception()
        self._shared._count(wait_s=time.perf_counter() - began)

    def result(self) -> npt.NDArray[Any]:
        """Wait for the bytes, decode them on this thread, and return the array, which is the caller's own."""
        shared, meta = self._shared, self._meta
        out = np.empty(self.shape, meta.dtype)
        values = out
        if self._frame is not None:
            outer, inside, fill = self._frame
            values = np.full(outer, fill, meta.dtype)
            out = values[inside]
        for piece in self._fills:
            out[piece.target] = meta.fill
        codec = shared._codec(meta)
        scratch = codec.empty(meta.chunk)
        wait_s = decode_s = 0.0
        chunks = 0
        mark = time.perf_counter()
        for asked in self._asked:
            arrivals = asked.result()
            for arrival in arrivals:
                body = arrival.body.result()
                now = time.perf_counter()
                wait_s += now - mark
                for place, piece in arrival.pieces:
                    self._decode(codec, scratch, body, place, piece, arrival, out)
                chunks += len(arrival.pieces)
                mark = time.perf_counter()
                decode_s += mark - now
        shared._count(wait_s=wait_s, decode_s=decode_s, regions=1, chunks=chunks)
        return values

    def _decode(
        self,
        codec: ChunkCodec,
        scratch: npt.NDArray[Any],
        body: memoryview,
        place: Span | None,
        piece: Piece,
        arrival: _Arrival,
        out: npt.NDArray[Any],
    ) -> None:
        if place is None:
            out[piece.target] = self._meta.fill
            return
        stored = body[place.start - arrival.first : place.stop - arrival.first]
        try:
            codec.decode(stored, scratch)
        except ValueError as error:
            raise PreparedError(
                f"chunk {piece.number} (bytes {place.start} to {place.stop}) is damaged: {error}",
                uri=self._shared.store.uri(arrival.stored.key),
                fix="Prepare the case again",
            ) from None
        out[piece.target] = scratch[piece.source]
        if arrival.keep:
            self._shared._keep(arrival.stored, place, stored)

    def _add(self, stored: _Object | None, pieces: list[Piece]) -> None:
        """Ask for the pieces of one object: its index first, and as soon as that is there its chunks. No thread waits
        in between."""
        if stored is None:
            self._fills += pieces
            return
        asked: Future[list[_Arrival]] = Future()
        self._asked.append(asked)

        def ask(opened: Future[_Shard]) -> None:
            try:
                asked.set_result(self._request(stored, opened.result(), pieces))
            except BaseException as error:  # noqa: BLE001 - a thread's boundary: `result` raises it
                asked.set_exception(error)

        self._shared._shard(self._meta, stored).add_done_callback(ask)

    def _request(self, stored: _Object, shard: _Shard, pieces: list[Piece]) -> list[_Arrival]:
        """Send the requests for chunks that no cache has."""
        shared = self._shared
        places = shard.places(pieces)
        if shard.body is not None:
            return [_Arrival(stored, _done(shard.body), 0, list(zip(places, pieces, strict=True)), keep=False)]
        holes: list[tuple[Span | None, Piece]] = []
        arrivals = [_Arrival(stored, _done(memoryview(b"")), 0, holes, keep=False)]
        wanted: list[tuple[Span, Piece]] = []
        memory_hits = disk_hits = 0
        for place, piece in zip(places, pieces, strict=True):
            if place is None:
                holes.append((None, piece))
            elif (body := shared._cached(stored, place)) is not None:
                memory_hits += 1
                arrivals.append(_Arrival(stored, _done(body), place.start, [(place, piece)], keep=False))
            elif (body := shared._from_disk(stored, place)) is not None:
                disk_hits += 1
                arrivals.append(_Arrival(stored, _done(body), place.start, [(place, piece)], keep=True))
            else:
                wanted.append((place, piece))
        shared._count(memory_hits=memory_hits, disk_hits=disk_hits)
        plan = coalesce([place for place, _ in wanted], max_gap_bytes=shared.max_gap_bytes)
        groups: list[list[tuple[Span | None, Piece]]] = [[] for _ in plan.groups]
        for (group, _), (place, piece) in zip(plan.places, wanted, strict=True):
            groups[group].append((place, piece))
        for span, members in zip(plan.groups, groups, strict=True):
            parts = [place for place, _ in members if place is not None] if shared.disk is not None else []
            future = shared.store.submit(shared._fetch, stored, span, parts)
            arrivals.append(_Arrival(stored, future, span.start, members, keep=True))
        return arrivals


def read_metadata(store: Store, key_prefix: str) -> dict[str, Any]:
    """What `write_case` returned, from the bucket: one small read and one listing."""
    prefix = key_prefix.rstrip("/")
    uri = store.uri(f"{prefix}/zarr.json")
    try:
        group = json.loads(bytes(store.get(f"{prefix}/zarr.json")))
        documents = group["consolidated_metadata"]["metadata"]
    except NotFoundError as error:
        if type(error) is not NotFoundError:
            raise
        raise PreparedError("no prepared case is here, or it was not finished", uri=uri, fix=_AGAIN) from None
    except (ValueError, KeyError, TypeError):
        raise PreparedError("this is not the zarr.json of a prepared case", uri=uri, fix=_AGAIN) from None
    metas = {name: ArrayMeta.from_zarr(document, uri) for name, document in documents.items()}
    objects = []
    for page in store.list_pages(f"{prefix}/"):
        columns = (page.column(name).to_pylist() for name in ("path", "size", "e_tag"))
        objects += [[key[len(prefix) + 1 :], size, etag] for key, size, etag in zip(*columns, strict=True)]
    kept = sorted(o for o in objects if not o[0].endswith("zarr.json"))
    return {**{name: meta.to_metadata() for name, meta in metas.items()}, "objects": kept}


# -- parts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Object:
    """A stored object as it was written."""

    key: str
    size: int
    etag: str | None


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Bytes of an object on their way, and the chunks in them."""

    stored: _Object
    body: Future[memoryview]
    first: int
    """The body's first byte in the object."""
    pieces: list[tuple[Span | None, Piece]]
    keep: bool
    """Whether its chunks go into the memory cache."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """What is known of an object: its index, and its bytes where it was read whole."""

    index: npt.NDArray[np.uint64]
    body: memoryview | None

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.index.nbytes + (0 if self.body is None else self.body.nbytes)

    @classmethod
    def parse(cls, meta: ArrayMeta, stored: _Object, body: memoryview, whole: bool, uri: str) -> _Shard:
        """From the object's bytes, or its index's alone."""
        if not meta.shard:
            return cls(np.array([[0, stored.size]], "<u8"), body)
        raw = body if not whole else body[-meta.index_bytes :] if meta.index_at == "end" else body[: meta.index_bytes]
        return cls(read_index(meta, raw, stored.size, checksum(raw[:-4]), uri), body if whole else None)

    def places(self, pieces: Sequence[Piece]) -> list[Span | None]:
        """Where the pieces' chunks lie in the object; None for those that are not stored."""
        # Plain lookups: indexing by numpy took 5 ms a call in a profile with the store's threads at work, probably
        # waiting to get the interpreter's lock back.
        cells, missing = self.index.data.cast("B").cast("Q"), int(MISSING)
        found: list[Span | None] = []
        for piece in pieces:
            first = cells[2 * piece.number]
            found.append(None if first == missing else Span(first, first + cells[2 * piece.number + 1]))
        return found


class _Recent(Generic[_V]):
    """A bounded mapping that forgets what was used longest ago. Its owner locks."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._items: OrderedDict[Any, tuple[_V, int]] = OrderedDict()

    def get(self, key: Any) -> _V | None:
        found = self._items.get(key)
        if found is None:
            return None
        self._items.move_to_end(key)
        return found[0]

    def put(self, key: Any, value: _V, size: int) -> None:
        if size > self.max_bytes:
            return
        if (old := self._items.pop(key, None)) is not None:
            self.used_bytes -= old[1]
        self._items[key] = (value, size)
        self.used_bytes += size
        while self.used_bytes > self.max_bytes:
            _, (_, freed) = self._items.popitem(last=False)
            self.used_bytes -= freed


def _done(body: memoryview) -> Future[memoryview]:
    future: Future[memoryview] = Future()
    future.set_result(body)
    return future


def _complete(given: Sequence[int], whole: list[int]) -> list[int]:
    """The given bounds of the last axes, with those of the whole array before them."""
    if len(given) > len(whole):
        raise ConfigError(f"{tuple(given)} has more axes than the array, which has {len(whole)}")
    return [*whole[: len(whole) - len(given)], *(int(v) for v in given)]
