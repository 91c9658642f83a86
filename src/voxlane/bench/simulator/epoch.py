"""One simulated epoch, event by event.

A piece of work (usually a sample) goes through its rounds of requests, with some processor time alongside, and then
takes the rest of its processor time. Its lane delivers pieces in order; the rank takes full batches in order, and
steps. Shared resources (links, bucket, cores) are in `fair_sharing`; everything else that takes time is an entry of one
heap.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from voxlane.bench.simulator.fair_sharing import FairSharing
from voxlane.bench.simulator.model import Round, Scenario

_DRAWN_AT_ONCE = 4096
_BINS_PER_WINDOW = 60
"""Windows begin at multiples of a bin."""


@dataclass
class SimulatedEpoch:
    """Times, traffic and rates of a simulated epoch."""

    samples: int
    steps: int
    """Largest number of steps of a rank."""
    seconds: float = 0.0
    """Seconds from the start to the end of the last step."""
    bytes: float = 0.0
    requests: int = 0
    """Requests sent to the bucket, including refused ones."""
    refused: int = 0
    cached_requests: int = 0
    """Requests that a cache answered."""
    cpu_s: float = 0.0
    first_batch_s: float = 0.0
    """Time at which the last rank had its first batch."""
    busy_share: float = 0.0
    """Fraction of the epoch spent in steps, averaged over ranks."""
    middle_s: float = 0.0
    """Seconds from the start of step `steps // 4` to the start of step `3 * steps // 4`, averaged over ranks. Neither
    the start nor the end of the epoch affects it."""
    max_bytes_per_s: float = 0.0
    """Highest rate over a window that may begin at any time."""
    max_bytes_per_s_at_worst: float = 0.0
    """Highest rate over consecutive windows that begin at the worst moment."""
    max_requests_per_s: float = 0.0
    """Highest rate over a window, including refused requests."""
    saved_requests: float = math.inf
    """Requests that the bucket would have accepted at once at the end; infinite if it has no limit."""
    events: int = 0
    """Number of simulated events."""


@dataclass(slots=True, eq=False)
class _Rank:
    node: int
    steps: int
    lanes: list[_Lane] = field(default_factory=list)
    step: int = 0
    """Current step, whose batch is awaited or which runs."""
    first_s: float = math.inf
    middle_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Times at which steps `steps // 4` and `3 * steps // 4` began."""
    ended_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Lane:
    """A process that prepares batches."""

    rank: _Rank
    count: int
    """Pieces of work in the epoch."""
    free: int
    """Connections that are not in use."""
    started: int = 0
    delivered: int = 0
    """Pieces that were delivered, in order."""
    done: set[int] = field(default_factory=set)
    """Pieces that are done and wait for an earlier one."""
    taken_batches: int = 0
    """Batches that the rank has taken."""
    is_awaited: bool = False
    queue: deque[tuple[_Piece, int, float]] = field(default_factory=deque)
    """(piece, requests, bytes per request) that wait for a connection."""


@dataclass(slots=True, eq=False)
class _Piece:
    """A piece of work in progress."""

    lane: _Lane
    index: int
    rounds: tuple[Round, ...]
    round: int = 0
    left: int = 0
    """Unanswered requests of the round."""
    parts: int = 1
    """Number of parts that must end before it is done: its rounds with their processing, and concurrent work."""


class Simulation:
    """An epoch of a scenario; `run` may be called once. `hit_share` is the fraction of requests that caches answer;
    `saved_requests` are those that the bucket accepts at once (default: as many as in a second)."""

    def __init__(
        self,
        scenario: Scenario,
        generator: np.random.Generator,
        hit_share: float = 0.0,
        saved_requests: float = math.inf,
    ) -> None:
        self._scenario = scenario
        self._loader = scenario.loader
        self._work = scenario.work
        self._generator = generator
        self._hit_share = hit_share
        cluster, network = scenario.cluster, scenario.network
        self._network = FairSharing(
            cluster.nodes,
            stream_rate=network.stream_bytes_per_s,
            node_rate=network.link_bytes_per_s,
            total_rate=network.bucket_bytes_per_s,
        )
        self._cores = FairSharing(cluster.nodes, stream_rate=1.0, node_rate=cluster.cores)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._latencies: dict[int, list[float]] = {}
        self._uniform: list[float] = []
        self._shares = np.cumsum([share for share, _ in scenario.work.kinds]).tolist()
        self._tokens = min(network.bucket_requests_per_s, saved_requests)
        self._tokens_s = 0.0
        self._bytes_over_time = Windows(scenario.window_s)
        self._requests_over_time = Windows(scenario.window_s)
        self._ranks = [self._make_rank(number) for number in range(cluster.world)]
        self._at_step: dict[int, list[_Rank]] = {}
        """Ranks that have their batch of a step and wait for the others."""
        steps = [rank.steps for rank in self._ranks]
        self._epoch = SimulatedEpoch(samples=scenario.pieces * scenario.work.samples, steps=max(steps))
        self._taking_part = [sum(s > step for s in steps) for step in range(max(steps))] if scenario.sync else []

    def _make_rank(self, number: int) -> _Rank:
        scenario, loader = self._scenario, self._loader
        pieces = scenario.pieces_of(number)
        steps = -(-pieces // loader.batch)
        rank = _Rank(number // scenario.cluster.ranks, steps)
        for lane in range(loader.lanes):
            batches = max(0, -(-(steps - lane) // loader.lanes))
            count = batches * loader.batch
            if batches and lane + (batches - 1) * loader.lanes == steps - 1:
                count -= steps * loader.batch - pieces  # the rank's last batch may be short
            rank.lanes.append(_Lane(rank, count, loader.connections))
        return rank

    # -- time --------------------------------------------------------------------------------------------------------

    def run(self) -> SimulatedEpoch:
        """Simulate until the last step has ended."""
        events, network, cores = self._events, self._network, self._cores
        for rank in self._ranks:
            for lane in rank.lanes:
                self._begin(lane)
        for rank in self._ranks:
            self._request_batch(rank)
        while True:
            now = min(events[0][0] if events else math.inf, network.next_end(), cores.next_end())
            if now == math.inf:
                break
            self._now = now
            self._epoch.events += 1
            if network.next_end() <= now:
                self._move_network()
                for lane, piece, requests in network.advance(now):
                    self._answered(lane, piece, requests)
            if cores.next_end() <= now:
                for piece in cores.advance(now):
                    self._finish(piece)
            while events and events[0][0] <= now:
                _, _, call, arguments = heapq.heappop(events)
                call(*arguments)
        return self._summarize()

    def _schedule(self, when_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (when_s, self._scheduled, call, arguments))

    def _move_network(self) -> None:
        network = self._network
        self._bytes_over_time.add_rate(network.now, self._now, network.rate)
        network.move(self._now)

    # -- lanes -------------------------------------------------------------------------------------------------------

    def _requested_batches(self, lane: _Lane) -> int:
        """Return the number of batches that the lane should have prepared since the start."""
        prefetch = self._loader.prefetch
        return lane.taken_batches + (prefetch or int(lane.is_awaited))

    def _begin(self, lane: _Lane) -> None:
        """Begin as many pieces as the lane is allowed to."""
        loader = self._loader
        stop = min(lane.count, lane.delivered + loader.in_flight)
        if not loader.ahead:
            batch = lane.delivered // loader.batch
            stop = min(stop, (batch + 1) * loader.batch) if batch < self._requested_batches(lane) else lane.delivered
        while lane.started < stop:
            piece = _Piece(lane, lane.started, self._draw_rounds())
            lane.started += 1
            if self._work.receive_cpu_s:
                piece.parts += 1
                self._compute(piece, self._work.receive_cpu_s)
            self._next_round(piece)

    def _deliver(self, lane: _Lane) -> None:
        """Deliver what is done and due, in order, and begin what may begin then."""
        stop = min(lane.count, self._requested_batches(lane) * self._loader.batch)
        delivered = lane.delivered
        while lane.delivered < stop and lane.delivered in lane.done:
            lane.done.remove(lane.delivered)
            lane.delivered += 1
        if lane.delivered != delivered or not self._loader.ahead:
            self._begin(lane)

    def _finish(self, piece: _Piece) -> None:
        """Handle the end of a part of a piece."""
        piece.parts -= 1
        if piece.parts:
            return
        lane = piece.lane
        lane.done.add(piece.index)
        self._deliver(lane)
        if lane.is_awaited:
            self._take(lane.rank)

    # -- ranks -------------------------------------------------------------------------------------------------------

    def _request_batch(self, rank: _Rank) -> None:
        """Let a rank request its next batch, if it has one."""
        if rank.step >= rank.steps:
            rank.ended_s = self._now
            return
        lane = rank.lanes[rank.step % len(rank.lanes)]
        lane.is_awaited = True
        if not self._loader.prefetch:
            self._begin(lane)
            self._deliver(lane)
        self._take(rank)

    def _take(self, rank: _Rank) -> None:
        """Take the awaited batch, if it is complete."""
        lane = rank.lanes[rank.step % len(rank.lanes)]
        if not lane.is_awaited or lane.delivered < min((lane.taken_batches + 1) * self._loader.batch, lane.count):
            return
        lane.is_awaited = False
        lane.taken_batches += 1
        rank.first_s = min(rank.first_s, self._now)
        for index, step in enumerate((rank.steps // 4, 3 * rank.steps // 4)):
            if rank.step == step:
                rank.middle_s[index] = self._now
        self._deliver(lane)
        if not self._scenario.sync:
            self._schedule(self._now + self._scenario.step_time_s, self._end_step, [rank])
            return
        waiting = self._at_step.setdefault(rank.step, [])
        waiting.append(rank)
        if len(waiting) == self._taking_part[rank.step]:
            del self._at_step[rank.step]
            self._schedule(self._now + self._scenario.step_time_s, self._end_step, waiting)

    def _end_step(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            rank.step += 1
        for rank in ranks:
            self._request_batch(rank)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _draw_rounds(self) -> tuple[Round, ...]:
        kinds = self._work.kinds
        if len(kinds) == 1:
            return kinds[0][1]
        index = bisect.bisect_right(self._shares, self._draw())
        return kinds[min(index, len(kinds) - 1)][1]

    def _next_round(self, piece: _Piece) -> None:
        """Queue the requests of the next round, or compute if there is none."""
        while piece.round < len(piece.rounds):
            planned = piece.rounds[piece.round]
            piece.round += 1
            for part in (planned, *planned.beside):
                self._queue(piece, part)
            if piece.left:
                self._connect(piece.lane)
                return
        if self._work.cpu_s:
            self._compute(piece, self._work.cpu_s)
        else:
            self._finish(piece)

    def _compute(self, piece: _Piece, cpu_s: float) -> None:
        self._epoch.cpu_s += cpu_s
        self._cores.move(self._now)
        self._cores.add(piece.lane.rank.node, cpu_s, piece)

    def _queue(self, piece: _Piece, part: Round) -> None:
        """Queue the requests that no cache answers for a connection of the lane."""
        requests = int(part.requests)
        if requests != part.requests and self._draw() < part.requests - requests:
            requests += 1
        missed = requests
        if self._hit_share and requests:
            missed = int(self._generator.binomial(requests, 1 - self._hit_share))
            self._epoch.cached_requests += requests - missed
        if missed:
            piece.left += missed
            piece.lane.queue.append((piece, missed, part.bytes / part.requests))

    def _connect(self, lane: _Lane) -> None:
        """Send queued requests as long as there are free connections."""
        queue = lane.queue
        while queue and lane.free:
            piece, requests, size = queue[0]
            now = min(requests, lane.free)
            if now == requests:
                queue.popleft()
            else:
                queue[0] = (piece, requests - now, size)
            lane.free -= now
            if self._scenario.coalesce:
                self._send(lane, piece, now, size, 0)
            else:
                for _ in range(now):
                    self._send(lane, piece, 1, size, 0)

    def _send(self, lane: _Lane, piece: _Piece, requests: int, size: float, refusals: int) -> None:
        admitted = self._admit(requests)
        self._epoch.requests += requests
        self._requests_over_time.add(self._now, requests)
        if refused := requests - admitted:
            self._epoch.refused += refused
            network = self._scenario.network
            pause_s = min(network.first_pause_s * 2.0**refusals, network.longest_pause_s) * (1 - self._draw() / 2)
            wait_s = self._latency(refused)
            self._schedule(self._now + wait_s + pause_s, self._send, lane, piece, refused, size, refusals + 1)
        if admitted:
            self._epoch.bytes += admitted * size
            wait_s = self._latency(admitted)
            if wait_s:
                self._schedule(self._now + wait_s, self._receive, lane, piece, admitted, size)
            else:
                self._receive(lane, piece, admitted, size)

    def _admit(self, requests: int) -> int:
        """Return how many of the requests the bucket accepts now."""
        rate = self._scenario.network.bucket_requests_per_s
        if rate == math.inf:
            return requests
        self._tokens = min(max(rate, 1.0), self._tokens + rate * (self._now - self._tokens_s))
        self._tokens_s = self._now
        admitted = min(requests, int(self._tokens + 1e-9))
        self._tokens -= admitted
        return admitted

    def _receive(self, lane: _Lane, piece: _Piece, requests: int, size: float) -> None:
        """Handle the arrival of the first byte."""
        if not size:
            self._answered(lane, piece, requests)
            return
        self._move_network()
        self._network.add(lane.rank.node, size, (lane, piece, requests), requests)

    def _answered(self, lane: _Lane, piece: _Piece, requests: int) -> None:
        lane.free += requests
        piece.left -= requests
        if not piece.left:
            self._next_round(piece)
        self._connect(lane)

    # -- chance ------------------------------------------------------------------------------------------------------

    def _draw(self) -> float:
        if not self._uniform:
            self._uniform = self._generator.random(_DRAWN_AT_ONCE).tolist()
        return self._uniform.pop()

    def _latency(self, requests: int) -> float:
        """Draw the longest latency of `requests` requests."""
        latency = self._scenario.network.latency
        if latency.p99_s <= latency.median_s and not latency.jitter_s:
            return latency.median_s
        drawn = self._latencies.get(requests)
        if not drawn:
            count = max(_DRAWN_AT_ONCE // requests, 16)
            drawn = self._latencies[requests] = latency.draw_longest(self._generator, count, requests).tolist()
        return drawn.pop()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _summarize(self) -> SimulatedEpoch:
        ranks, epoch, step_time_s = self._ranks, self._epoch, self._scenario.step_time_s
        epoch.seconds = self._now
        epoch.first_batch_s = max(rank.first_s for rank in ranks)
        epoch.busy_share = sum(rank.steps * step_time_s / rank.ended_s for rank in ranks if rank.ended_s) / len(ranks)
        first_s, last_s = (sum(rank.middle_s[index] for rank in ranks) / len(ranks) for index in (0, 1))
        epoch.middle_s = last_s - first_s
        epoch.max_bytes_per_s = self._bytes_over_time.highest(self._now)
        epoch.max_bytes_per_s_at_worst = self._bytes_over_time.highest_at_worst(self._now)
        epoch.max_requests_per_s = self._requests_over_time.highest(self._now)
        epoch.saved_requests = self._tokens
        return epoch


class Windows:
    """Amounts over time, and their highest rate over a window of `window_s` seconds, as a monitoring system reports
    it."""

    def __init__(self, window_s: float) -> None:
        self._bin_s = window_s / _BINS_PER_WINDOW
        self._amounts: list[float] = []

    def add(self, when_s: float, amount: float) -> None:
        """Add an amount at one point in time."""
        index = int(when_s / self._bin_s)
        self._extend(index)
        self._amounts[index] += amount

    def add_rate(self, start_s: float, stop_s: float, rate: float) -> None:
        """Add `rate` per second from `start_s` to `stop_s`."""
        if stop_s <= start_s or not rate:
            return
        index, last = int(start_s / self._bin_s), int(stop_s / self._bin_s)
        self._extend(last)
        while index < last:
            edge = (index + 1) * self._bin_s
            self._amounts[index] += rate * (edge - start_s)
            start_s, index = edge, index + 1
        self._amounts[last] += rate * (stop_s - start_s)

    def highest(self, end_s: float) -> float:
        """Return the highest mean rate over a window within `[0, end_s)`, or over all of it if that is shorter."""
        total = float(sum(self._amounts))
        if end_s <= self._bin_s * _BINS_PER_WINDOW or len(self._amounts) <= _BINS_PER_WINDOW:
            return total / end_s if end_s else 0.0
        cumulative = np.concatenate([[0.0], np.cumsum(self._amounts)])
        return float(
            (cumulative[_BINS_PER_WINDOW:] - cumulative[:-_BINS_PER_WINDOW]).max() / (self._bin_s * _BINS_PER_WINDOW)
        )

    def highest_at_worst(self, end_s: float) -> float:
        """Return the same over consecutive windows that begin at the worst moment. A chart of full minutes shows a
        short peak as a value between this and `highest`."""
        if end_s <= self._bin_s * _BINS_PER_WINDOW or not self._amounts:
            return self.highest(end_s)
        amounts = np.array(self._amounts)
        worst = np.inf
        for start in range(_BINS_PER_WINDOW):
            padded = np.concatenate([np.zeros(start), amounts, np.zeros(-(start + len(amounts)) % _BINS_PER_WINDOW)])
            worst = min(worst, float(padded.reshape(-1, _BINS_PER_WINDOW).sum(axis=1).max()))
        return worst / (self._bin_s * _BINS_PER_WINDOW)

    def _extend(self, index: int) -> None:
        if index >= len(self._amounts):
            self._amounts += [0.0] * (index + 1 - len(self._amounts))
