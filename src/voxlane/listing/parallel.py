"""Parallel listing by work stealing over the key space, in one process.

The listed keys are cut into ranges `(low, high]`, one a worker thread. A worker with nothing to do takes the upper
part of somebody's remaining range, cut where `split.midpoint` guesses the middle of its keys. Ranges always
partition the key space, so every key is seen once, and joined in order they are sorted, whatever the guesses were:
a bad guess only costs a request that finds nothing.

All this holds for servers that list in byte order, as S3 and GCS do. Some compatible servers list folder by folder;
a page out of order, or a cut whose two sides do not join, gives them away, and the listing starts again sequentially.
"""

from __future__ import annotations

import string
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from voxlane.listing import split

Pages = Callable[[str | None], Iterator[Any]]
"""From a key to start after (None: the start) to Arrow batches with a `key` column, in order."""

_PAGES_BEFORE_STEALING = 2
_MIN_PAGES_TO_SPLIT = 1.5
"""A range is cut when it is thought to have this many pages left; the thought is corrected with every page."""
_SLOW_START = 4
"""At most this many ranges are open for each page seen after the first ones, so that a small bucket costs what a
sequential listing costs, and a larger one few extra requests."""


class OutOfOrder(Exception):
    """The server does not list in byte order: ranges cannot be trusted."""


class _Range:
    """Keys in `(low, high]` still being listed by one worker; `high` None is the end of the prefix."""

    def __init__(self, low: str | None, high: str | None) -> None:
        self.low = low
        self.high = high
        self.cursor: str | None = None
        """Last key seen; None before the first page."""
        self.first = ""
        """First key seen."""
        self.beyond = ""
        """The key above `high` that ended the range."""
        self.pages = 0
        self.batches: list[Any] = []
        self.splittable = True
        """False while a cut is known to be useless, until the next page."""


class ParallelLister:
    """One listing of the keys that start with `prefix`; `run()` once."""

    def __init__(self, pages: Pages, prefix: str, *, workers: int, on_keys: Callable[[int], None]) -> None:
        self._pages = pages
        self._prefix = prefix
        self._workers = workers
        self._on_keys = on_keys
        self._lock = threading.Condition()
        self._ranges: list[_Range] = []  # every one ever opened, by low
        self._active: dict[_Range, threading.Thread] = {}
        self._pages_seen = 0
        self._page_keys = 0
        self._alphabet: list[str] = []
        self._failure: BaseException | None = None

    def run(self) -> list[Any]:
        """The listing as Arrow batches in key order."""
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
        self._check_cuts()
        return [batch for r in self._ranges for batch in r.batches]

    def _check_cuts(self) -> None:
        """Where servers might disagree on which side of a cut a key lies, this one must show the same key first to
        the range above the cut as it showed last to the range below."""
        for r, above in pairwise(self._ranges):
            if r.beyond and r.high and split.disputed(r.beyond, r.high) and r.beyond != above.first:
                raise OutOfOrder(f"{r.beyond!r} ended a range that ends at {r.high!r}, but does not start the next")

    def _open(self, r: _Range, *, at: int) -> None:
        """Start listing a range on a thread of its own. The lock is held."""
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
        """Take what is in range from `page`; whether the range is finished."""
        keys = page.column("key")
        count = page.num_rows
        first, last = keys[0].as_py(), keys[count - 1].as_py()
        floor = r.cursor if r.cursor is not None else r.low
        if (floor is not None and first <= floor) or (count > 1 and not _ascending(keys)):
            raise OutOfOrder(f"{first!r} after {floor!r}")
        kept, ended = page, False
        if r.high is not None and last > r.high:
            inside = _count_up_to(keys, r.high)
            r.beyond = keys[inside].as_py()
            kept, ended = page.slice(0, inside), True
        if self._prefix and not (first.startswith(self._prefix) and last.startswith(self._prefix)):
            mask = pc.starts_with(kept.column("key"), self._prefix)
            kept, ended = kept.filter(mask), ended or (last > self._prefix and not last.startswith(self._prefix))
        self._learn(keys)
        self._pages_seen += 1
        self._page_keys = max(self._page_keys, count)
        r.cursor = last
        r.first = r.first or first
        r.pages += 1
        r.splittable = count == self._page_keys  # a short page is the last one
        if kept.num_rows:
            r.batches.append(kept)
            self._on_keys(kept.num_rows)
        return ended

    def _learn(self, keys: Any) -> None:
        """Grow the alphabet by the characters of the page's first, middle and last keys."""
        sample = [keys[i].as_py()[len(self._prefix) :] for i in range(0, len(keys), max(1, len(keys) // 50))]
        seen = set("".join(sample)) - set(self._alphabet)
        if seen:
            if seen & set(string.digits):
                seen |= set(string.digits)
            self._alphabet = sorted(seen | set(self._alphabet))

    def _steal(self) -> None:
        """Cut remaining ranges in two until as many are open as may be now."""
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
        """A guess from how much of the key space the pages seen so far have covered."""
        assert r.cursor is not None
        if r.high is None:
            return float("inf")
        return r.pages * split.share_left(r.first, r.cursor, r.high, self._alphabet)


def _ascending(keys: Any) -> bool:
    return bool(pc.all(pc.less(keys.slice(0, len(keys) - 1), keys.slice(1))).as_py())


def _count_up_to(keys: Any, high: str) -> int:
    """How many of the ascending `keys` are at most `high`."""
    return int(pc.sum(pc.less_equal(keys, high)).as_py() or 0)


def as_batch(page: Any) -> Any:
    """An engine's page with our columns, not yet of our types."""
    batch = pa.record_batch(page)
    columns = [batch.column(name) for name in ("path", "size", "e_tag", "version")]
    return pa.RecordBatch.from_arrays(columns, names=["key", "size", "etag", "version"])
