"""Prefetching: work that is started ahead of time and returned in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import islice
from typing import TypeVar

_T = TypeVar("_T")
_FIRST_WINDOW_BYTES, _FIRST_WINDOW_SAMPLES = 16 << 20, 16
"""Limits of the first window of a stream."""
_GAIN = 1.1
"""Factor by which a window of twice the size must be faster to be kept."""
_PATIENCE = 8
"""Rounds between a failed trial and the next one."""


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


class WindowTuner:
    """Limits of a stream's window, in bytes and in samples, that grow only if that pays.

    Where latency is the limit, twice the window is nearly twice as fast. Where the processor or the network is, it
    costs memory and page faults, and the first batch waits for samples that are needed later. So the window starts
    small and is doubled on trial: the larger window is kept if the stream became faster by `_GAIN`. A trial that fails
    is repeated after `_PATIENCE` rounds, because the latency of a bucket changes.
    """

    def __init__(self, *, max_bytes: int, max_samples: int, now_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_samples = max_samples
        self._scale = 1
        self._on_trial = False
        self._rounds_until_trial = 0
        self._rate = 0.0
        """Samples per second of the last round with the window that was kept."""
        self._taken = self._taken_bytes = 0
        self._round_start_s = now_s

    @property
    def bytes(self) -> int:
        """Maximum number of bytes in the window."""
        return min(self._max_bytes, self._scale * _FIRST_WINDOW_BYTES)

    @property
    def samples(self) -> int:
        """Maximum number of samples in the window."""
        return min(self._max_samples, self._scale * _FIRST_WINDOW_SAMPLES)

    def count_taken(self, size_bytes: int, now_s: float) -> None:
        """Count one sample that was taken from the window. A round ends after as many as the window may hold."""
        self._taken += 1
        self._taken_bytes += size_bytes
        if self._taken < self.samples and self._taken_bytes < self.bytes:
            return
        rate = self._taken / max(now_s - self._round_start_s, 1e-9)
        self._taken = self._taken_bytes = 0
        self._round_start_s = now_s
        if self._on_trial and rate < _GAIN * self._rate:
            self._scale //= 2
            self._rounds_until_trial = _PATIENCE
        else:
            self._rate = rate
        self._on_trial = self._rounds_until_trial == 0 and not self._is_full()
        self._rounds_until_trial = max(0, self._rounds_until_trial - 1)
        if self._on_trial:
            self._scale *= 2

    def _is_full(self) -> bool:
        return self.bytes == self._max_bytes or self.samples == self._max_samples
