"""Share bandwidth max-min fairly, stream by stream: a slow and simple reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class Stream:
    node: int
    left: float
    item: Any
    rate: float = 0.0


class PlainSharing:
    """Behaves as `voxlane.bench.simulator.fair_sharing.FairSharing`."""

    def __init__(self, nodes: int, *, stream_rate: float, node_rate: float, total_rate: float = math.inf) -> None:
        self.limits = stream_rate, node_rate, total_rate
        self.now = 0.0
        self.streams: list[Stream] = []

    @property
    def rate(self) -> float:
        self.share_out()
        return sum(s.rate for s in self.streams)

    def add(self, node: int, size: float, item: Any, streams: int = 1) -> None:
        self.streams += [Stream(node, size, item if i == 0 else None) for i in range(streams)]

    def share_out(self) -> None:
        """Raise all rates equally until a resource is full, fix those that it limits, and continue."""
        stream_rate, node_rate, total_rate = self.limits
        rising = list(self.streams)
        for stream in self.streams:
            stream.rate = 0.0
        while rising:
            spare = [stream_rate - s.rate for s in rising]
            for node in {s.node for s in rising}:
                used = sum(s.rate for s in self.streams if s.node == node)
                spare.append((node_rate - used) / sum(s.node == node for s in rising))
            spare.append((total_rate - sum(s.rate for s in self.streams)) / len(rising))
            more = max(min(spare), 0.0)
            for stream in rising:
                stream.rate += more
            whole = sum(s.rate for s in self.streams) >= total_rate * (1 - 1e-12)
            full = {n for n in {s.node for s in rising} if self.used(n) >= node_rate * (1 - 1e-12)}
            rising = [s for s in rising if not whole and s.node not in full and s.rate < stream_rate * (1 - 1e-12)]

    def used(self, node: int) -> float:
        return sum(s.rate for s in self.streams if s.node == node)

    def next_end(self) -> float:
        self.share_out()
        return self.now + min((s.left / s.rate for s in self.streams), default=math.inf)

    def move(self, now: float) -> None:
        self.share_out()
        for stream in self.streams:
            stream.left -= stream.rate * (now - self.now)
        self.now = now

    def advance(self, now: float) -> list[Any]:
        self.move(now)
        ended = [s for s in self.streams if s.left <= s.rate * 1e-9]
        self.streams = [s for s in self.streams if s.left > s.rate * 1e-9]
        return [s.item for s in ended if s.item is not None]
