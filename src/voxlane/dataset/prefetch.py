"""Prefetching: work that is started ahead of time and returned in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import islice
from typing import TypeVar

_T = TypeVar("_T")


def ordered_prefetch(
    pool: Executor, work: Callable[[int], _T], positions: Sequence[int], in_flight: int, *, batch: int | None = None
) -> Iterator[_T]:
    """Yield `work(position)` for each position, in order, with `in_flight` of them running or waiting; with `batch`,
    with as many as `window_after` returns. Closing the generator cancels those that have not started."""
    left = iter(positions)
    pending: deque[Future[_T]] = deque()

    def start_more(taken: int) -> None:
        window = in_flight if batch is None else window_after(taken, batch=batch, most=in_flight)
        pending.extend(pool.submit(work, position) for position in islice(left, max(0, window - len(pending))))

    try:
        start_more(0)
        for taken in range(1, len(positions) + 1):
            result = pending.popleft().result()
            start_more(taken)
            yield result
    finally:
        for future in pending:
            future.cancel()


def window_after(taken: int, *, batch: int, most: int) -> int:
    """Return how many items should be running or waiting after `taken` were taken: one batch until the first batch is
    complete, then four more for every item taken, up to `most`.

    Items that are decoded in one process share its interpreter and cores: of sixteen patches that start together the
    first is ready only when nearly all are.
    """
    return min(most, max(2, batch) + 4 * max(0, taken - batch))
