"""Parallel listing by work stealing over the key space, in one process.

The key space is split into ranges `(low, high]`, each listed by one worker thread. An idle worker takes the upper part
of another worker's remaining range, split where `split.midpoint` estimates the middle of its keys. The ranges always
partition the key space, so every key is listed once, and joined in order they are sorted whatever the estimates were. A
bad estimate only costs a request that returns nothing.

This works for servers that list in byte order, as S3 and GCS do. Some compatible servers list folder by folder. A page
out of order, or two adjacent ranges that do not join, reveals them, and the listing starts again sequentially.
"""

from __future__ import annotations

import string
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from voxlane.store.listing import split

Pages = Callable[[str | None], Iterator[Any]]
"""Function from a key to start after (None for the start) to Arrow batches with a `key` column, in order."""

_PAGES_BEFORE_STEALING = 2
_MIN_PAGES_TO_SPLIT = 1.5
"""A range is split if it is estimated to have this many pages left; every page corrects the estimate."""
_SLOW_START = 4
"""Maximum number of open ranges for each page after the first ones, so that a small bucket costs as many requests as a
sequential listing, and a larger one few extra requests."""


class OutOfOrderError(Exception):
    """Raised when the server does not list in byte order, so that ranges cannot be trusted."""


@dataclass(eq=False)
class _Range:
    """Keys in `(low, high]` that one worker lists; `high` None is the end of the prefix."""

    low: str | None
    high: str | None
    cursor: str | None = None
    """Last listed key; None before the first page."""
    first: str = ""
    """First listed key."""
    beyond: str = ""
    """Key above `high` that ended the range."""
    pages: int = 0
    batches: list[Any] = field(default_factory=list)
    splittable: bool = True
    """Whether a split may be useful; False until the next page after a split failed."""


class ParallelLister:
    """One listing of the keys that start with `prefix`; call `run()` once."""

    def __init__(self, pages: Pages, prefix: str, *, workers: int, on_keys: Callable[[int], object]) -> None:
        self._pages = pages
        self._prefix = prefix
        self._workers = workers
        self._on_keys = on_keys
        self._lock = threading.Condition()
        self._ranges: list[_Range] = []  # all ranges ever opened, ordered by `low`
        self._active: dict[_Range, threading.Thread] = {}
        self._pages_seen = 0
        self._page_keys = 0
        self._alphabet: list[str] = []
        self._failure: BaseException | None = None

    def run(self) -> list[Any]:
        """Return the listing as Arrow batches in key order."""
        with self._lock:
            self._open(_Range(split.just_before(self._prefix), None), at=0)
            try:
                while self._active:
                    self._lock.wait()
            except BaseException as interrupt:
                self._failure = interrupt  # the workers stop at their next page
                raise
        if self._failure is not None:
            raise self._failure
        self._check_splits()
        return [batch for r in self._ranges for batch in r.batches]

    def _check_splits(self) -> None:
        """Check that adjacent ranges join where servers may disagree on the order of keys: the key that ended the lower
        range must be the first key of the upper one."""
        for r, above in pairwise(self._ranges):
            if r.beyond and r.high and split.disputed(r.beyond, r.high) and r.beyond != above.first:
                raise OutOfOrderError(f"{r.beyond!r} ended the range up to {r.high!r}, but does not start the next")

    def _open(self, r: _Range, *, at: int) -> None:
        """Start to list a range on its own thread. The caller holds the lock."""
        self._ranges.insert(at, r)
        thread = threading.Thread(target=self._work, args=(r,), name="voxlane-list", daemon=True)
        self._active[r] = thread
        thread.start()

    def _work(self, r: _Range) -> None:
        try:
            for page in self._pages(r.low):
                with self._lock:
                    if self._failure is not None or self._accept(r, page):
                        break
                    self._steal()
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: run() raises it
            with self._lock:
                self._failure = self._failure or error
        finally:
            with self._lock:
                del self._active[r]
                if self._failure is None:
                    self._steal()
                self._lock.notify_all()

    def _accept(self, r: _Range, page: Any) -> bool:
        """Store the keys of `page` that are in the range; return whether the range is finished."""
        keys = page.column("key")
        count = page.num_rows
        first, last = keys[0].as_py(), keys[count - 1].as_py()
        floor = r.cursor if r.cursor is not None else r.low
        if (floor is not None and first <= floor) or not is_ascending(keys):
            raise OutOfOrderError(f"{first!r} after {floor!r}")
        batch, ended = page, False
        if r.high is not None and last > r.high:
            inside = bisect_right(keys, r.high, key=lambda key: key.as_py())
            r.beyond = keys[inside].as_py()
            batch, ended = page.slice(0, inside), True
        if self._prefix and not (first.startswith(self._prefix) and last.startswith(self._prefix)):
            mask = pc.starts_with(batch.column("key"), self._prefix)
            batch, ended = batch.filter(mask), ended or (last > self._prefix and not last.startswith(self._prefix))
        self._extend_alphabet(keys)
        self._pages_seen += 1
        self._page_keys = max(self._page_keys, count)
        r.cursor = last
        r.first = r.first or first
        r.pages += 1
        r.splittable = count == self._page_keys  # a short page is the last one
        if batch.num_rows:
            r.batches.append(batch)
            self._on_keys(batch.num_rows)
        return ended

    def _extend_alphabet(self, keys: Any) -> None:
        """Add the characters of about fifty keys of the page to the alphabet."""
        sample = keys[:: max(1, len(keys) // 50)].to_pylist()
        new = set("".join(key[len(self._prefix) :] for key in sample)) - set(self._alphabet)
        if new:
            if new & set(string.digits):
                new |= set(string.digits)
            self._alphabet = sorted(new | set(self._alphabet))

    def _steal(self) -> None:
        """Split remaining ranges in two until as many are open as allowed now."""
        allowed = min(self._workers, _SLOW_START * (self._pages_seen - _PAGES_BEFORE_STEALING))
        while len(self._active) < allowed:
            victims = [r for r in self._active if r.cursor is not None and r.splittable]
            if not victims:
                return
            victim = max(victims, key=self._pages_left)
            assert victim.cursor is not None
            if self._pages_left(victim) < _MIN_PAGES_TO_SPLIT:
                return
            cut = split.midpoint(victim.cursor, victim.high, self._prefix, self._alphabet)
            if cut is None:
                victim.splittable = False  # until its next page
                continue
            thief = _Range(cut, victim.high)
            victim.high = cut
            self._open(thief, at=self._ranges.index(victim) + 1)

    def _pages_left(self, r: _Range) -> float:
        """Estimate the remaining pages from the part of the key space that the listed pages cover."""
        assert r.cursor is not None
        if r.high is None:
            return float("inf")
        return r.pages * split.share_left(r.first, r.cursor, r.high, self._alphabet)


def is_ascending(keys: Any) -> bool:
    """Return whether each key of an Arrow array is above the one before it."""
    return len(keys) < 2 or bool(pc.all(pc.less(keys.slice(0, len(keys) - 1), keys.slice(1))).as_py())


def convert_page(page: Any) -> Any:
    """Return a page of the engine with the manifest's column names; the types are still the engine's."""
    batch = pa.record_batch(page)
    columns = [batch.column(name) for name in ("path", "size", "e_tag", "version")]
    return pa.RecordBatch.from_arrays(columns, names=["key", "size", "etag", "version"])
