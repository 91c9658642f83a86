"""Objects on their way: many reads in flight, from cache, bucket or composed download, as plain `bytes`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.dataset.cache import DiskCache
from voxlane.dataset.compose import Composer, plan_groups
from voxlane.errors import ChangedError, NotFoundError
from voxlane.listing import Entry
from voxlane.store import Store
from voxlane.store.ranges import Span, split

_IN_PLACE_BYTES = 256 * 1024
"""Objects from this size on are filled in place; below it the copy is cheaper than the bookkeeping."""
_BULK_BYTES = 1 << 20
"""Objects from this size on share `max_parts` requests in flight: they are limited by bytes, not by waiting."""


class Pending:
    """One object on its way. `result()` waits and returns its bytes, once; `cancel()` drops what has not started."""

    def __init__(self, futures: Sequence[Future[Any]], body: bytes | None = None) -> None:
        self._futures = futures
        self._body = body

    def result(self) -> bytes:
        """The object's bytes; raises what went wrong."""
        for future in self._futures:
            last = future.result()
        return self._body if self._body is not None else bytes(last)

    def cancel(self) -> None:
        """Do not start what has not started yet."""
        for future in self._futures:
            future.cancel()


class Reader:
    """Reads entries of one bucket."""

    def __init__(self, store: Store, cache: DiskCache | None = None, composer: Composer | None = None) -> None:
        self._store = store
        self._cache = cache
        self._composer = composer
        if cache is not None:
            cache.open()

    def group_sizes(self, sizes: Sequence[int]) -> list[int]:
        """How many consecutive objects of these sizes to submit together: one, or as many as are composed."""
        if self._composer is None:
            return [1] * len(sizes)
        return [len(g) for g in plan_groups(sizes, self._composer.max_bytes)]

    def submit(self, entries: Sequence[Entry]) -> list[Pending]:
        """Start reading all entries; results come in the same order."""
        pending: list[Pending | None] = [self._from_cache(e) for e in entries]
        missing = [i for i, p in enumerate(pending) if p is None]
        if self._composer is None:
            for i in missing:
                pending[i] = self._plain(entries[i])
        else:
            groups = plan_groups([entries[i].size for i in missing], self._composer.max_bytes)
            for group in groups:
                rows = [missing[g] for g in group]
                if len(rows) == 1:
                    pending[rows[0]] = self._plain(entries[rows[0]])
                    continue
                futures = self._composer.submit([entries[i] for i in rows])
                for i, future in zip(rows, futures, strict=True):
                    if self._cache is not None:
                        future.add_done_callback(partial(self._keep_composed, entries[i]))
                    pending[i] = Pending([future])
        return [p for p in pending if p is not None]

    def _from_cache(self, entry: Entry) -> Pending | None:
        if self._cache is None or entry.etag is None:
            return None
        body = self._cache.get(self._store.uri(entry.key), entry.etag, entry.size)
        return None if body is None else Pending([], body)

    def _plain(self, entry: Entry) -> Pending:
        if entry.size < min(_IN_PLACE_BYTES, self._store.config.part_bytes):
            return Pending([self._store.submit(self._whole, entry)])
        submit = self._store.submit_part if entry.size >= _BULK_BYTES else self._store.submit
        spans = split(entry.size, self._store.config.part_bytes)
        body, target = _writable_bytes(entry.size)  # each part below holds `body`, which owns the target's memory
        remaining = _Countdown(len(spans))
        return Pending([submit(self._part, entry, s, body, target, remaining) for s in spans], body)

    def _whole(self, entry: Entry) -> bytes:
        try:
            body = bytes(self._store.get(entry.key, etag=entry.etag))
        except NotFoundError as error:
            if entry.size or type(error) is not NotFoundError:
                raise
            raise NotFoundError(
                "no such object",
                uri=self._store.uri(entry.key),
                fix="It was deleted after it was listed, or is the marker of an empty folder, which cannot be read: "
                "leave it out with match=",
            ) from None
        self._check_size(entry, len(body))
        self._keep(entry, body)
        return body

    def _part(
        self, entry: Entry, span: Span, body: bytes, target: npt.NDArray[np.uint8], remaining: _Countdown
    ) -> None:
        self._store.get_into(entry.key, span.start, target[span.start : span.stop], etag=entry.etag)
        if remaining.last():
            self._keep(entry, body)

    def _check_size(self, entry: Entry, size: int) -> None:
        if size != entry.size:
            raise ChangedError(
                f"the object changed after it was listed (listed with {entry.size} bytes, now {size})",
                uri=self._store.uri(entry.key),
                fix="List the bucket again, or restore the object",
            )

    def _keep_composed(self, entry: Entry, future: Future[memoryview]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._keep(entry, future.result())

    def _keep(self, entry: Entry, body: bytes | memoryview) -> None:
        if self._cache is not None and entry.etag is not None:
            self._cache.put(self._store.uri(entry.key), entry.etag, body)


class _Countdown:
    """Tells the last of `count` threads that it is the last. list.pop is atomic."""

    def __init__(self, count: int) -> None:
        self._left = list(range(count))

    def last(self) -> bool:
        return self._left.pop() == 0


def _writable_bytes(size: int) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """A new bytes object and a writable view of its memory.

    Filling a bytes object before anybody else sees it is what PyBytes_FromStringAndSize(NULL, n) is for. The other
    way, a bytearray copied to bytes at the end, holds a 150 MB object twice and costs a third of its download.
    """
    make = ctypes.pythonapi.PyBytes_FromStringAndSize
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
    body: bytes = make(None, size)
    memory = (ctypes.c_uint8 * size).from_address(id(body) + bytes.__basicsize__ - 1)
    return body, np.ctypeslib.as_array(memory)
