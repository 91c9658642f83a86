"""Work that is begun before its turn and given out in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import islice
from typing import TypeVar

_T = TypeVar("_T")


def in_order(
    pool: Executor, work: Callable[[int], _T], positions: Sequence[int], in_flight: int, *, batch: int | None = None
) -> Iterator[_T]:
    """`work(position)` for each, in order, `in_flight` of them under way or waiting; with `batch`, as many of these as
    `window_after` says. Closing the generator drops those that have not begun."""
    left = iter(positions)
    under_way: deque[Future[_T]] = deque()

    def begin(taken: int) -> None:
        window = in_flight if batch is None else window_after(taken, batch=batch, most=in_flight)
        under_way.extend(pool.submit(work, position) for position in islice(left, max(0, window - len(under_way))))

    try:
        begin(0)
        for taken in range(1, len(positions) + 1):
            done = under_way.popleft().result()
            begin(taken)
            yield done
    finally:
        for future in under_way:
            future.cancel()


def window_after(taken: int, *, batch: int, most: int) -> int:
    """How many to have under way once `taken` have been taken: a batch's worth until the first one is complete, then
    four more for every one taken, up to `most`.

    What decodes in one process shares its interpreter and its cores: of sixteen patches that begin together the first
    is ready when nearly all are.
    """
    return min(most, max(2, batch) + 4 * max(0, taken - batch))
