"""Concurrent reads of objects from cache, bucket or composed download, as plain `bytes`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.dataset.cache import DiskCache
from voxlane.dataset.compose import Composer, plan_groups
from voxlane.store import Store
from voxlane.store.direct import PartChecksum, check_parts, new_writable_bytes
from voxlane.store.listing import Entry
from voxlane.store.ranges import Span, split
from voxlane.store.service_checksums import ServiceChecksum

_BULK_BYTES = 1 << 20
"""Objects of at least this size share `max_parts` requests in flight: bandwidth limits them, not latency."""


class PendingObject:
    """An object that is being read. `result()` waits for its bytes; `cancel()` drops requests that have not started."""

    def __init__(self, futures: Sequence[Future[Any]], body: bytes | None = None) -> None:
        self._futures = futures
        self._body = body

    def result(self) -> bytes:
        """Return the object's bytes, or raise the error of its read."""
        for future in self._futures:
            last = future.result()
        return self._body if self._body is not None else bytes(last)

    def cancel(self) -> None:
        """Cancel requests that have not started."""
        for future in self._futures:
            future.cancel()


class _Parts:
    """The parts of an object that is being read."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.countdown = list(range(len(spans)))
        """One item for each part that is missing."""
        self.checksums: list[PartChecksum | None] = []
        self.whole_checksum: Future[ServiceChecksum | None] | None = None
        """The object's checksum, if the parts do not come with it."""


class ObjectReader:
    """Reads entries of one bucket."""

    def __init__(self, store: Store, cache: DiskCache | None = None, composer: Composer | None = None) -> None:
        self._store = store
        self._cache = cache
        self._composer = composer
        if cache is not None:
            cache.open()

    def group_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return how many consecutive objects of these sizes to submit together: one, or as many as are composed."""
        if self._composer is None:
            return [1] * len(sizes)
        return [len(g) for g in plan_groups(sizes, self._composer.max_bytes)]

    def submit(self, entries: Sequence[Entry]) -> list[PendingObject]:
        """Start to read all entries; the results are in the same order."""
        pending: list[PendingObject | None] = [self._from_cache(e) for e in entries]
        missing = [i for i, p in enumerate(pending) if p is None]
        max_bytes = self._composer.max_bytes if self._composer is not None else 0  # 0: each object by itself
        for group in plan_groups([entries[i].size for i in missing], max_bytes):
            rows = [missing[g] for g in group]
            if self._composer is None or len(rows) == 1:
                pending[rows[0]] = self._submit_plain(entries[rows[0]])
                continue
            futures = self._composer.submit([entries[i] for i in rows])
            for i, future in zip(rows, futures, strict=True):
                if self._cache is not None:
                    future.add_done_callback(partial(self._cache_composed, entries[i]))
                pending[i] = PendingObject([future])
        return [p for p in pending if p is not None]

    def _from_cache(self, entry: Entry) -> PendingObject | None:
        if self._cache is None or entry.etag is None:
            return None
        body = self._cache.get(self._store.uri(entry.key), entry.etag, entry.size)
        return None if body is None else PendingObject([], body)

    def _submit_plain(self, entry: Entry) -> PendingObject:
        is_bulk = entry.size >= _BULK_BYTES
        if not is_bulk and entry.size <= self._store.config.part_bytes and self._cache is None:
            return PendingObject([self._store.submit_whole(entry.key, size=entry.size, etag=entry.etag)])
        submit = self._store.submit_part if is_bulk else self._store.submit
        # For smaller objects, and for one request of the engine, reading into given memory would take longer.
        if entry.size <= self._store.config.part_bytes and not (is_bulk and self._store.receives_directly):
            return PendingObject([submit(self._read_whole, entry)])
        spans = split(entry.size, self._store.config.part_bytes)
        body, target = new_writable_bytes(entry.size)  # each part refers to `body`, which owns the target's memory
        parts = _Parts(spans)
        if len(spans) > 1 and self._store.scheme == "s3":
            # Submitted before the parts, so that the last part never waits for a call that has not started.
            parts.whole_checksum = submit(self._store.find_checksum, entry.key, etag=entry.etag)
        return PendingObject([submit(self._read_part, entry, s, body, target, parts) for s in spans], body)

    def _read_whole(self, entry: Entry) -> bytes:
        body = self._store.get_bytes(entry.key, etag=entry.etag, size=entry.size)
        self._cache_object(entry, body)
        return body

    def _read_part(self, entry: Entry, span: Span, body: bytes, target: npt.NDArray[np.uint8], parts: _Parts) -> None:
        is_whole = len(parts.spans) == 1
        piece = target[span.start : span.stop]
        parts.checksums.append(self._store.get_into(entry.key, span.start, piece, etag=entry.etag, is_whole=is_whole))
        if parts.countdown.pop() == 0:  # this is the last part; list.pop is atomic
            if len(parts.spans) > 1:
                self._check_parts(entry, target, parts)
            self._cache_object(entry, body)

    def _check_parts(self, entry: Entry, target: npt.NDArray[np.uint8], parts: _Parts) -> None:
        """Compare an object that was read in parts with the service's checksum; read all of it again if they differ."""
        uri, checksums = self._store.uri(entry.key), parts.checksums
        whole = None if parts.whole_checksum is None else parts.whole_checksum.result()

        def attempt() -> None:
            nonlocal checksums
            if not checksums:
                self._store.counters.add("get", requests=0, retries=len(parts.spans))
                pieces = [(span.start, target[span.start : span.stop]) for span in parts.spans]
                checksums = [self._store.get_into(entry.key, start, piece, etag=entry.etag) for start, piece in pieces]
            stated = [checksum for checksum in checksums if checksum is not None]
            checksums = []  # after a failure they are read again
            check_parts(stated if len(stated) == len(parts.spans) else (), whole, target, uri)

        self._store.call_again("get", uri, attempt)

    def _cache_composed(self, entry: Entry, future: Future[memoryview]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._cache_object(entry, future.result())

    def _cache_object(self, entry: Entry, body: bytes | memoryview) -> None:
        if self._cache is not None and entry.etag is not None:
            self._cache.put(self._store.uri(entry.key), entry.etag, body)
