"""What all matching requests share under one :class:`~voxlane.testing.Faults`: a link, and a rate of requests."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds of a clock that never goes back."""

# A piece that was written late (timers of the event loop tick in milliseconds) is caught up with, so that the cap is
# met on average; longer delays than this, such as a machine that was busy, are lost as a real link's idle time is.
_CATCH_UP_S = 0.02


class Link:
    """A link of so many bytes per second, shared equally by those that send at the moment.

    Each sender asks for its pieces one by one and they are served in the order they are asked for, so senders take
    turns. One that is slower for another reason leaves its turns to the rest.
    """

    __slots__ = ("_bytes_per_s", "_clock", "_free_s", "_senders")

    def __init__(self, bytes_per_s: float, clock: Clock = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_s = 0.0
        self._senders = 0

    def join(self) -> None:
        """A sender begins. Time in which nobody sent is lost."""
        if not self._senders:
            self._free_s = max(self._free_s, self._clock())
        self._senders += 1

    def leave(self) -> None:
        """A sender has ended."""
        self._senders -= 1

    def turn(self, size: int) -> float:
        """Take the link for ``size`` bytes, after all that took it before; returns the seconds until they are
        through, zero or less when they should be already."""
        now_s = self._clock()
        self._free_s = max(self._free_s, now_s - _CATCH_UP_S) + size / self._bytes_per_s
        return self._free_s - now_s


class Quota:
    """So many requests per second; what is not used is kept for one second, and at least one request."""

    __slots__ = ("_clock", "_left", "_most", "_rate", "_then_s")

    def __init__(self, requests_per_s: float, clock: Clock = time.monotonic) -> None:
        self._rate = requests_per_s
        self._clock = clock
        self._most = max(1.0, requests_per_s)
        self._left = self._most
        self._then_s = clock()

    def take(self) -> bool:
        """Whether one more request is within the rate now; if so it is counted."""
        now_s = self._clock()
        self._left = min(self._most, self._left + (now_s - self._then_s) * self._rate)
        self._then_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
