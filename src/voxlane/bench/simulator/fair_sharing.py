"""Max-min fair sharing: streams of nodes through links to one bucket, or jobs on the cores of nodes.

A stream gets the smallest of its own limit, its equal share of its node's link, and the bucket's water level: the rate
at which all streams together use the bucket fully. So all streams of a node run at the same rate, and so do those of
all nodes with the same number of streams. One clock per number of streams, which advances by the amount that a stream
moved, therefore serves every node: a stream of `size` that joins a node ends when the node's reading of its clock has
grown by `size`. A stream that joins or ends moves one node to another clock and affects no other stream.

Clocks of many streams run at a speed of their own, because the links of their nodes are full; those of few streams run
at the water level. When the level crosses the limit of a clock, that clock changes sides. So a change costs the
logarithm of the number of streams. `tests/bench/simulator/reference.py` does the same stream by stream, and a test
compares the two.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any

_TOGETHER_S = 1e-9
"""Seconds within which streams end together; far above rounding errors of times."""
_UNLIMITED = 1e18
"""Rate in place of infinity, so that clocks stay finite: a terabyte takes a microsecond."""


@dataclass(slots=True, eq=False)
class _Clock:
    """Amount that a stream has moved on nodes with the same number of streams."""

    limit: float
    """Speed that the links allow."""
    mark: float
    """A time while it runs at its limit, a level's reading while it runs with the level."""
    reading: float = 0.0
    """Amount that had been moved at `mark`."""
    streams: int = 0
    """Number of streams on all its nodes."""
    ends: list[tuple[float, int, int]] = field(default_factory=list)
    """A heap of (its reading when a stream of a node ends, node, the node's version)."""
    next: float = math.inf
    """Reading at which the next stream ends."""
    stamp: int = 0


class FairSharing:
    """Streams on nodes. Amounts are bytes or seconds of work; rates are amounts per second, infinite for no limit.

    Time only advances by `move` and `advance`; `next_end` says how far it may advance before a stream ends.
    """

    def __init__(self, nodes: int, *, stream_rate: float, node_rate: float, total_rate: float = math.inf) -> None:
        self._stream_rate = min(stream_rate, _UNLIMITED)
        self._node_rate = node_rate
        self._total_rate = total_rate
        self.now = 0.0
        self._streams = [0] * nodes
        self._read = [0.0] * nodes
        """Amount that a stream present since the start would have moved on each node when it last changed clocks."""
        self._since = [0.0] * nodes
        """Reading of each node's clock at that time."""
        self._version = [0] * nodes
        self._ends: list[list[tuple[float, int, int, Any]]] = [[] for _ in range(nodes)]
        """A heap for each node of (node's reading at the end, tie-breaker, streams, item)."""
        self._added = 0
        self._clocks = [_Clock(0.0, 0.0)]
        """Clocks by number of streams. Those before `_edge` run with the level, the others at their limits."""
        self._edge = 1
        self._level = 0.0
        """Speed of the clocks that run with the level."""
        self._moved = 0.0
        """Amount that a stream at the level has moved since the start."""
        self._level_streams = 0
        self._limit_rate = 0.0
        """Rate of all streams that run at their limits."""
        self._by_time: list[tuple[float, int, int]] = []
        """(time of the next end, clock, its stamp) of clocks at their limits."""
        self._by_level: list[tuple[float, int, int]] = []
        """(`_moved` at the next end, clock, its stamp) of clocks that run with the level."""
        self._stale = False
        self._soonest = math.inf

    @property
    def rate(self) -> float:
        """Current rate of all streams together."""
        if self._stale:
            self._settle()
        return self._limit_rate + self._level * self._level_streams

    def add(self, node: int, size: float, item: Any, streams: int = 1) -> None:
        """Add `streams` streams of `size` each to a node; when they have ended, `advance` returns `item`."""
        self._added += 1
        reading = self._node_reading(node)
        heapq.heappush(self._ends[node], (reading + size, self._added, streams, item))
        self._move(node, reading, self._streams[node] + streams)

    def next_end(self) -> float:
        """Return the time at which the next stream ends, if none joins before; infinite without streams."""
        if self._stale:
            self._settle()
        return self._soonest

    def move(self, now: float) -> None:
        """Advance time to `now`, which is at most `next_end`; `advance` handles what ends then."""
        if self._stale:
            self._settle()
        self._moved += self._level * (now - self.now)
        self.now = now

    def advance(self, now: float) -> list[Any]:
        """Advance time to `now` and return the items that have ended by then."""
        self.move(now)
        ended: list[Any] = []
        if now < self._soonest:
            return ended
        for heap, limit in (
            (self._by_time, now + _TOGETHER_S),
            (self._by_level, self._moved + self._level * _TOGETHER_S),
        ):
            while heap and heap[0][0] <= limit:
                _, count, stamp = heapq.heappop(heap)
                if stamp == self._clocks[count].stamp:
                    ended += self._end(count)
        self._stale = True
        return ended

    def _end(self, count: int) -> list[Any]:
        """Remove the streams that have ended, at least one, from the nodes of a clock, and return their items."""
        clock = self._clocks[count]
        slack = (self._level if count < self._edge else clock.limit) * _TOGETHER_S
        limit = max(self._reading(count) + slack, clock.next)
        ended: list[Any] = []
        due = []
        while clock.ends and clock.ends[0][0] <= limit:
            _, node, version = heapq.heappop(clock.ends)
            if version == self._version[node]:
                due.append(node)
        for node in due:
            ends, reading = self._ends[node], self._node_reading(node)
            until, gone = max(reading + slack, ends[0][0]), 0
            while ends and ends[0][0] <= until:
                _, _, streams, item = heapq.heappop(ends)
                gone += streams
                ended.append(item)
            self._move(node, reading, count - gone)
        return ended

    def _reading(self, count: int) -> float:
        clock = self._clocks[count]
        if count < self._edge:
            return clock.reading + self._moved - clock.mark
        return clock.reading + clock.limit * (self.now - clock.mark)

    def _node_reading(self, node: int) -> float:
        count = self._streams[node]
        return self._read[node] + self._reading(count) - self._since[node] if count else 0.0

    def _move(self, node: int, reading: float, count: int) -> None:
        """Move a node to the clock of its new number of streams."""
        before = self._streams[node]
        self._version[node] += 1
        self._streams[node] = count
        if before:
            self._count(before, -before)
            self._schedule(before)
        if not count:
            return
        while count >= len(self._clocks):
            limit = min(self._stream_rate, self._node_rate / len(self._clocks))
            self._clocks.append(_Clock(limit, self.now))
        self._count(count, count)
        self._read[node] = reading
        self._since[node] = since = self._reading(count)
        heapq.heappush(self._clocks[count].ends, (since + self._ends[node][0][0] - reading, node, self._version[node]))
        self._schedule(count)

    def _count(self, count: int, streams: int) -> None:
        clock = self._clocks[count]
        clock.streams += streams
        if count < self._edge:
            self._level_streams += streams
        else:
            self._limit_rate += streams * clock.limit
        self._stale = True

    def _schedule(self, count: int, *, force: bool = False) -> None:
        """Note when the next stream of a clock ends; with `force`, even if that has not changed."""
        clock = self._clocks[count]
        ends = clock.ends
        while ends and ends[0][2] != self._version[ends[0][1]]:
            heapq.heappop(ends)
        following = ends[0][0] if ends else math.inf
        if following == clock.next and not force:
            return
        clock.next = following
        clock.stamp += 1
        if not ends:
            return
        left = following - self._reading(count)
        if count < self._edge:
            heapq.heappush(self._by_level, (self._moved + left, count, clock.stamp))
        else:
            heapq.heappush(self._by_time, (self.now + left / clock.limit, count, clock.stamp))

    def _settle(self) -> None:
        """Find the water level, the clocks that run with it, and the next end."""
        self._stale = False
        if not self._level_streams and self._limit_rate <= 0:
            self._limit_rate = 0.0  # rounding errors
        clocks = self._clocks
        while True:
            level = math.inf
            if self._level_streams:
                level = (self._total_rate - self._limit_rate) / self._level_streams
            elif self._limit_rate > self._total_rate * (1 + 1e-12):
                level = 0.0  # some of those at their limits must slow down
            if self._edge > 1 and level >= clocks[self._edge - 1].limit:
                self._edge -= 1
                self._change_sides(self._edge, to_level=False)
            elif self._edge < len(clocks) and level < clocks[self._edge].limit * (1 - 1e-12):
                self._edge += 1
                self._change_sides(self._edge - 1, to_level=True)
            else:
                break
        self._level = level if self._level_streams else 0.0
        self._find_soonest()

    def _change_sides(self, count: int, *, to_level: bool) -> None:
        """Let a clock run with the level from now on, or at its limit; `_edge` is already past it."""
        clock = self._clocks[count]
        if to_level:
            clock.reading += clock.limit * (self.now - clock.mark)
            clock.mark = self._moved
        else:
            clock.reading += self._moved - clock.mark
            clock.mark = self.now
        sign = 1 if to_level else -1
        self._level_streams += sign * clock.streams
        self._limit_rate -= sign * clock.streams * clock.limit
        self._schedule(count, force=True)

    def _find_soonest(self) -> None:
        for heap in (self._by_time, self._by_level):
            while heap and heap[0][2] != self._clocks[heap[0][1]].stamp:
                heapq.heappop(heap)
        self._soonest = self._by_time[0][0] if self._by_time else math.inf
        if self._by_level:
            self._soonest = min(self._soonest, self.now + (self._by_level[0][0] - self._moved) / self._level)
        self._soonest = max(self._soonest, self.now)
