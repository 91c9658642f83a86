"""One simulated epoch, event by event.

A piece of work (a sample, mostly) goes through its rounds of requests, with some processor time beside them, and then
takes the rest of its processor time; its lane hands it over in order; the rank takes full batches in order, and steps.
What is shared (links, bucket, cores) is in `sharing`; everything else that takes time is an entry of one heap.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from voxlane.bench.scale.model import Round, Scenario
from voxlane.bench.scale.sharing import Sharing
from voxlane.bench.scale.windows import Windows

_DRAWN_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What an epoch took."""

    seconds: float
    """From the start to the end of the last step."""
    samples: int
    steps: int
    """Most of any rank."""
    bytes: float
    requests: int
    """Sent to the bucket, refused ones included."""
    refused: int
    cached_requests: int
    """That a cache made needless."""
    cpu_s: float
    wait_s: float
    """For a rank's own batches; mean over ranks."""
    others_s: float
    """For other ranks' batches; mean over ranks."""
    first_batch_s: float
    """When the last rank had its first batch."""
    busy_share: float
    """Of the time, that ranks spent in steps; mean over ranks."""
    middle_s: tuple[float, float]
    """When ranks began steps `steps // 4` and `3 * steps // 4`; mean over ranks. In between, neither the start nor the
    end is seen."""
    max_bytes_per_s: float
    """Over the window, wherever it begins."""
    max_bytes_per_s_at_worst: float
    """Over windows that follow one another and begin at the worst moment."""
    max_requests_per_s: float
    """Over the window, refused ones included."""
    saved_requests: float
    """That the bucket would have taken at once in the end; infinite where it has no limit."""
    events: int
    """Simulated."""


class _Lane:
    """A process that prepares batches."""

    __slots__ = ("count", "done", "free", "handed", "node", "queue", "rank", "started", "taken", "waited_for")

    def __init__(self, rank: _Rank, count: int, connections: int) -> None:
        self.rank = rank
        self.node = rank.node
        self.count = count
        """Pieces of work of the epoch."""
        self.started = 0
        self.handed = 0
        """Pieces that are done and were handed over, in order."""
        self.done: set[int] = set()
        """Pieces that are done and wait for an earlier one."""
        self.taken = 0
        """Batches that the rank took."""
        self.waited_for = False
        self.free = connections
        self.queue: deque[tuple[_Piece, int, float]] = deque()
        """(piece, requests, bytes of each) that wait for a connection."""


class _Rank:
    __slots__ = ("asked_s", "ended_s", "first_s", "lanes", "middle_s", "node", "others_s", "step", "steps", "wait_s")

    def __init__(self, node: int, steps: int) -> None:
        self.node = node
        self.steps = steps
        self.lanes: list[_Lane] = []
        self.step = 0
        """The step that is waited for or goes on."""
        self.asked_s = 0.0
        self.wait_s = 0.0
        self.others_s = 0.0
        self.first_s = math.inf
        self.middle_s = [0.0, 0.0]
        self.ended_s = 0.0


class _Piece:
    """A piece of work on its way."""

    __slots__ = ("lane", "left", "parts", "place", "round", "rounds")

    def __init__(self, lane: _Lane, place: int, rounds: tuple[Round, ...]) -> None:
        self.lane = lane
        self.place = place
        self.rounds = rounds
        self.round = 0
        self.left = 0
        """Requests of the round that are not answered yet."""
        self.parts = 1
        """What must end before it is done: its rounds with what follows them, and the work beside them."""


class Simulation:
    """An epoch of a scenario; `run` may be called once. `hit_share`: the share of requests that caches answer.
    `saved_requests`: those that the bucket would take at once; default: a second's worth."""

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
        self._network = Sharing(
            cluster.nodes,
            stream_rate=network.stream_bytes_per_s,
            node_rate=network.link_bytes_per_s,
            total_rate=network.bucket_bytes_per_s,
        )
        self._cores = Sharing(cluster.nodes, stream_rate=1.0, node_rate=cluster.cores)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._count = 0
        self._latencies: dict[int, list[float]] = {}
        self._uniform: list[float] = []
        self._shares = np.cumsum([share for share, _ in scenario.work.kinds]).tolist()
        self._tokens = min(network.bucket_requests_per_s, saved_requests)
        self._tokens_s = 0.0
        self._bytes_over_time = Windows(scenario.window_s)
        self._requests_over_time = Windows(scenario.window_s)
        self._bytes = 0.0
        self._requests = self._refused = self._cached = 0
        self._cpu_s = 0.0
        self._ranks = [self._rank(number) for number in range(cluster.world)]
        self._at_step: dict[int, list[_Rank]] = {}
        """Ranks that have the batch of a step and wait for the others."""
        steps = [rank.steps for rank in self._ranks]
        self._taking_part = [sum(s > step for s in steps) for step in range(max(steps))] if scenario.sync else []

    def _rank(self, number: int) -> _Rank:
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

    def run(self) -> Epoch:
        """Until the last step has ended."""
        events, network, cores = self._events, self._network, self._cores
        for rank in self._ranks:
            for lane in rank.lanes:
                self._begin(lane)
        for rank in self._ranks:
            self._ask(rank)
        while True:
            now = min(events[0][0] if events else math.inf, network.next_end(), cores.next_end())
            if now == math.inf:
                break
            self._now = now
            self._count += 1
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
        return self._outcome()

    def _at(self, when_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (when_s, self._scheduled, call, arguments))

    def _move_network(self) -> None:
        network = self._network
        self._bytes_over_time.spread(network.now, self._now, network.rate)
        network.move(self._now)

    # -- lanes -------------------------------------------------------------------------------------------------------

    def _wanted(self, lane: _Lane) -> int:
        """Batches that the lane is to have made up, since the start."""
        prefetch = self._loader.prefetch
        return lane.taken + (prefetch or int(lane.waited_for))

    def _begin(self, lane: _Lane) -> None:
        """Begin as many pieces as the lane may."""
        loader = self._loader
        stop = min(lane.count, lane.handed + loader.in_flight)
        if not loader.ahead:
            batch = lane.handed // loader.batch
            stop = min(stop, (batch + 1) * loader.batch) if batch < self._wanted(lane) else lane.handed
        while lane.started < stop:
            piece = _Piece(lane, lane.started, self._draw_rounds())
            lane.started += 1
            if self._work.receive_cpu_s:
                piece.parts += 1
                self._compute(piece, self._work.receive_cpu_s)
            self._next_round(piece)

    def _hand_over(self, lane: _Lane) -> None:
        """Hand over what is done and due, in order, and begin what may begin then."""
        stop = min(lane.count, self._wanted(lane) * self._loader.batch)
        handed = lane.handed
        while lane.handed < stop and lane.handed in lane.done:
            lane.done.remove(lane.handed)
            lane.handed += 1
        if lane.handed != handed or not self._loader.ahead:
            self._begin(lane)

    def _finish(self, piece: _Piece) -> None:
        """A part of a piece has ended."""
        piece.parts -= 1
        if piece.parts:
            return
        lane = piece.lane
        lane.done.add(piece.place)
        self._hand_over(lane)
        if lane.waited_for:
            self._take(lane.rank)

    # -- ranks -------------------------------------------------------------------------------------------------------

    def _ask(self, rank: _Rank) -> None:
        """A rank wants its next batch, if it has one."""
        if rank.step >= rank.steps:
            rank.ended_s = self._now
            return
        rank.asked_s = self._now
        lane = rank.lanes[rank.step % len(rank.lanes)]
        lane.waited_for = True
        if not self._loader.prefetch:
            self._begin(lane)
            self._hand_over(lane)
        self._take(rank)

    def _take(self, rank: _Rank) -> None:
        """Take the batch that is waited for, if it is there."""
        lane = rank.lanes[rank.step % len(rank.lanes)]
        if not lane.waited_for or lane.handed < min((lane.taken + 1) * self._loader.batch, lane.count):
            return
        lane.waited_for = False
        lane.taken += 1
        rank.wait_s += self._now - rank.asked_s
        rank.first_s = min(rank.first_s, self._now)
        for place, step in enumerate((rank.steps // 4, 3 * rank.steps // 4)):
            if rank.step == step:
                rank.middle_s[place] = self._now
        self._hand_over(lane)
        if not self._scenario.sync:
            self._at(self._now + self._scenario.step_time_s, self._stepped, [rank])
            return
        rank.asked_s = self._now
        there = self._at_step.setdefault(rank.step, [])
        there.append(rank)
        if len(there) == self._taking_part[rank.step]:
            del self._at_step[rank.step]
            for each in there:
                each.others_s += self._now - each.asked_s
            self._at(self._now + self._scenario.step_time_s, self._stepped, there)

    def _stepped(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            rank.step += 1
        for rank in ranks:
            self._ask(rank)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _draw_rounds(self) -> tuple[Round, ...]:
        kinds = self._work.kinds
        if len(kinds) == 1:
            return kinds[0][1]
        drawn = self._draw()
        for limit, (_, rounds) in zip(self._shares, kinds, strict=True):
            if drawn < limit:
                return rounds
        return kinds[-1][1]

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
        self._cpu_s += cpu_s
        self._cores.move(self._now)
        self._cores.add(piece.lane.node, cpu_s, piece)

    def _queue(self, piece: _Piece, part: Round) -> None:
        """Put what no cache has into the lane's queue for connections."""
        requests = int(part.requests)
        if requests != part.requests and self._draw() < part.requests - requests:
            requests += 1
        missed = requests
        if self._hit_share and requests:
            missed = int(self._generator.binomial(requests, 1 - self._hit_share))
            self._cached += requests - missed
        if missed:
            piece.left += missed
            piece.lane.queue.append((piece, missed, part.bytes / part.requests))

    def _connect(self, lane: _Lane) -> None:
        """Send what waits for connections, as far as there are free ones."""
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
        self._requests += requests
        self._requests_over_time.add(self._now, requests)
        if refused := requests - admitted:
            self._refused += refused
            network = self._scenario.network
            pause_s = min(network.first_pause_s * 2.0**refusals, network.longest_pause_s) * (1 - self._draw() / 2)
            wait_s = self._latency(refused)
            self._at(self._now + wait_s + pause_s, self._send, lane, piece, refused, size, refusals + 1)
        if admitted:
            self._bytes += admitted * size
            wait_s = self._latency(admitted)
            if wait_s:
                self._at(self._now + wait_s, self._receive, lane, piece, admitted, size)
            else:
                self._receive(lane, piece, admitted, size)

    def _admit(self, requests: int) -> int:
        """How many of some requests the bucket takes now."""
        rate = self._scenario.network.bucket_requests_per_s
        if rate == math.inf:
            return requests
        self._tokens = min(max(rate, 1.0), self._tokens + rate * (self._now - self._tokens_s))
        self._tokens_s = self._now
        admitted = min(requests, int(self._tokens + 1e-9))
        self._tokens -= admitted
        return admitted

    def _receive(self, lane: _Lane, piece: _Piece, requests: int, size: float) -> None:
        """The first byte is there."""
        if not size:
            self._answered(lane, piece, requests)
            return
        self._move_network()
        self._network.add(lane.node, size, (lane, piece, requests), requests)

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
        """The longest of so many."""
        latency = self._scenario.network.latency
        if latency.p99_s <= latency.median_s and not latency.jitter_s:
            return latency.median_s
        drawn = self._latencies.get(requests)
        if not drawn:
            count = max(_DRAWN_AT_ONCE // requests, 16)
            drawn = self._latencies[requests] = latency.draw_longest(self._generator, count, requests).tolist()
        return drawn.pop()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _outcome(self) -> Epoch:
        ranks, seconds = self._ranks, self._now
        return Epoch(
            seconds=seconds,
            samples=self._scenario.pieces * self._work.samples,
            steps=max(rank.steps for rank in ranks),
            bytes=self._bytes,
            requests=self._requests,
            refused=self._refused,
            cached_requests=self._cached,
            cpu_s=self._cpu_s,
            wait_s=sum(rank.wait_s for rank in ranks) / len(ranks),
            others_s=sum(rank.others_s for rank in ranks) / len(ranks),
            first_batch_s=max(rank.first_s for rank in ranks),
            busy_share=sum(r.steps * self._scenario.step_time_s / r.ended_s for r in ranks if r.ended_s) / len(ranks),
            middle_s=(
                sum(rank.middle_s[0] for rank in ranks) / len(ranks),
                sum(rank.middle_s[1] for rank in ranks) / len(ranks),
            ),
            max_bytes_per_s=self._bytes_over_time.highest(seconds),
            max_bytes_per_s_at_worst=self._bytes_over_time.highest_at_worst(seconds),
            max_requests_per_s=self._requests_over_time.highest(seconds),
            saved_requests=self._tokens,
            events=self._count,
        )
