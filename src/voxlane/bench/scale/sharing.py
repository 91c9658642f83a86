"""Who gets how much of what is shared: streams of nodes through links into one bucket, or jobs on nodes' cores.

Shares are max-min fair. A stream gets the least of its own limit, its equal share of its node's link, and the bucket's
water level: the rate at which all streams together fill the bucket. So the streams of a node all run alike, and so do
those of all nodes with equally many streams. One clock for each number of streams, which advances by what a stream
moved, therefore serves every node: a stream of `size` that joins a node ends when the node's reading of its clock has
grown by `size`. A stream that joins or ends moves one node to another clock, and no other stream is touched.

Clocks of many streams run at a speed of their own, since their nodes' links are full; those of few streams all run at
the water level. When the level crosses the limit of a clock, that clock changes sides. So a change costs the logarithm
of what there is. `tests/bench/scale/reference.py` does the same stream by stream, and a test holds them equal.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

_TOGETHER_S = 1e-9
"""Streams that end within so many seconds of each other end together; far above what rounding does to times."""
_UNLIMITED = 1e18
"""Stands for an infinite rate, so that clocks stay numbers: a terabyte takes a microsecond."""


class _Clock:
    """What a stream moved on nodes with so many streams."""

    __slots__ = ("ends", "limit", "mark", "next", "reading", "stamp", "streams")

    def __init__(self, limit: float, now: float) -> None:
        self.limit = limit
        """Its speed as far as links go."""
        self.reading = 0.0
        """At `mark`: a time while it runs at its limit, a level's reading while it runs with the level."""
        self.mark = now
        self.streams = 0
        """Of all its nodes."""
        self.ends: list[tuple[float, int, int]] = []
        """A heap of (its reading when a stream of a node ends, node, the node's version)."""
        self.next = math.inf
        """Its reading at the next end."""
        self.stamp = 0


class Sharing:
    """Streams on nodes. Amounts are bytes or seconds of work; rates are amounts a second, infinite for no limit.

    Time only moves by `move` and `advance`; `next_end` says how far it may move before a stream ends.
    """

    def __init__(self, nodes: int, *, stream_rate: float, node_rate: float, total_rate: float = math.inf) -> None:
        self._stream_rate = min(stream_rate, _UNLIMITED)
        self._node_rate = node_rate
        self._total_rate = total_rate
        self.now = 0.0
        self._streams = [0] * nodes
        self._read = [0.0] * nodes
        """What a stream that was there from the start would have moved on this node, when it last changed clocks."""
        self._since = [0.0] * nodes
        """Its clock's reading then."""
        self._version = [0] * nodes
        self._ends: list[list[tuple[float, int, int, Any]]] = [[] for _ in range(nodes)]
        """Of each node, a heap of (node's reading at the end, tie-breaker, streams, what ended)."""
        self._added = 0
        self._clocks = [_Clock(0.0, 0.0)]
        """By number of streams. Those before `_edge` run with the level, the others at their limits."""
        self._edge = 1
        self._level = 0.0
        """Speed of the clocks that run with the level."""
        self._moved = 0.0
        """What a stream at the level has moved since the start."""
        self._level_streams = 0
        self._limit_rate = 0.0
        """Of all streams that run at their limits."""
        self._by_time: list[tuple[float, int, int]] = []
        """(time of the next end, clock, its stamp) of clocks at their limits."""
        self._by_level: list[tuple[float, int, int]] = []
        """(`_moved` at the next end, clock, its stamp) of clocks that run with the level."""
        self._stale = False
        self._soonest = math.inf

    @property
    def rate(self) -> float:
        """Of all streams together, now."""
        if self._stale:
            self._settle()
        return self._limit_rate + self._level * self._level_streams

    def add(self, node: int, size: float, what: Any, streams: int = 1) -> None:
        """`streams` streams of `size` each join a node; when they have ended, `advance` returns `what`."""
        self._added += 1
        reading = self._node_reading(node)
        heapq.heappush(self._ends[node], (reading + size, self._added, streams, what))
        self._move(node, reading, self._streams[node] + streams)

    def next_end(self) -> float:
        """When the next stream ends, if none joins before; infinite when there is none."""
        if self._stale:
            self._settle()
        return self._soonest

    def move(self, now: float) -> None:
        """Let time pass until `now`, which is at most `next_end`; what ends then is left to `advance`."""
        if self._stale:
            self._settle()
        self._moved += self._level * (now - self.now)
        self.now = now

    def advance(self, now: float) -> list[Any]:
        """As `move`; returns what has ended by then."""
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
        """Take streams whose end is reached off the nodes of a clock, at least one."""
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
                _, _, streams, what = heapq.heappop(ends)
                gone += streams
                ended.append(what)
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
        """Put a node on the clock of its new number of streams."""
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

    def _schedule(self, count: int, *, anew: bool = False) -> None:
        """Note when a clock's next stream ends; `anew`: also when that is where it was."""
        clock = self._clocks[count]
        ends = clock.ends
        while ends and ends[0][2] != self._version[ends[0][1]]:
            heapq.heappop(ends)
        following = ends[0][0] if ends else math.inf
        if following == clock.next and not anew:
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
        """Find the water level, which clocks run with it, and the next end."""
        self._stale = False
        if not self._level_streams and self._limit_rate <= 0:
            self._limit_rate = 0.0  # what rounding left
        clocks = self._clocks
        while True:
            level = math.inf
            if self._level_streams:
                level = (self._total_rate - self._limit_rate) / self._level_streams
            elif self._limit_rate > self._total_rate * (1 + 1e-12):
                level = 0.0  # some of those at their limits must come down
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
        """A clock runs with the level from now on, or at its limit; `_edge` is past it already."""
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
        self._schedule(count, anew=True)

    def _find_soonest(self) -> None:
        for heap in (self._by_time, self._by_level):
            while heap and heap[0][2] != self._clocks[heap[0][1]].stamp:
                heapq.heappop(heap)
        self._soonest = self._by_time[0][0] if self._by_time else math.inf
        if self._by_level:
            self._soonest = min(self._soonest, self.now + (self._by_level[0][0] - self._moved) / self._level)
        self._soonest = max(self._soonest, self.now)
