"""What is simulated: samples, a loader, a network with a bucket behind it, nodes. Plain data, checked when built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from voxlane.errors import ConfigError

P99 = 2.3263478740408408
"""The 99th percentile of a standard normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Latency:
    """From sending a request to the first byte of its answer, in seconds."""

    median_s: float = 0.0
    p99_s: float = 0.0
    """Of a lognormal distribution with that median; 0, or the median: every request takes the median."""
    jitter_s: float = 0.0
    """Up to this many seconds more, uniformly: how the emulator does it."""

    def __post_init__(self) -> None:
        if not (0 <= self.median_s <= 600 and 0 <= self.jitter_s <= 600):
            raise ConfigError(f"a latency of {self.median_s} + {self.jitter_s} s", fix="Give seconds from 0 to 600")
        if self.p99_s and not self.median_s <= self.p99_s <= 600:
            raise ConfigError(
                f"a 99th percentile of {self.p99_s} s for a median latency of {self.median_s} s",
                fix="Give the median or more",
            )

    def draw_longest(self, generator: np.random.Generator, count: int, of: int) -> npt.NDArray[np.float64]:
        """`count` times the longest of `of` latencies."""
        longest = np.full(count, float(self.median_s))
        if self.p99_s > self.median_s > 0:
            spread = math.log(self.p99_s / self.median_s) / P99
            longest *= np.exp(spread * generator.standard_normal((count, of)).max(axis=1))
        if self.jitter_s:
            longest += self.jitter_s * generator.random((count, of)).max(axis=1)
        return longest

    def mean_longest_s(self, of: int) -> float:
        """The longest of `of` latencies, the mean over many draws."""
        return float(self.draw_longest(np.random.default_rng(0), 4096, of).mean())

    def mean_s(self) -> float:
        """Of one request."""
        spread = math.log(self.p99_s / self.median_s) / P99 if self.p99_s > self.median_s > 0 else 0.0
        return self.median_s * math.exp(spread**2 / 2) + self.jitter_s / 2


@dataclass(frozen=True)
class Round:
    """Requests that are sent together, `bytes` in all; the next round begins when the last of them is answered."""

    requests: float
    """May be a mean: each time the whole number below or above it."""
    bytes: float
    beside: tuple[Round, ...] = ()
    """Requests of other sizes that are sent at the same time."""

    def __post_init__(self) -> None:
        if any(each.beside for each in self.beside):
            raise ConfigError("requests beside requests that are beside others", fix="Put all of them beside the first")
        if not (0 <= self.requests <= 1e6 and 0 <= self.bytes <= 1e15):
            raise ConfigError(f"a round of {self.requests} requests for {self.bytes} bytes", fix="Give both above zero")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a sample asks of bucket and processor."""

    kinds: tuple[tuple[float, tuple[Round, ...]], ...]
    """(share of samples, their rounds); the shares add up to 1."""
    cpu_s: float = 0.0
    """Processor seconds after the last byte: decoding, cropping, copying."""
    receive_cpu_s: float = 0.0
    """Processor seconds while bytes arrive: the client's own work."""
    samples: int = 1
    """How many samples this is. A loader that fetches a batch as a whole has work that is a batch."""

    def __post_init__(self) -> None:
        if not self.kinds or abs(sum(share for share, _ in self.kinds) - 1) > 1e-6:
            raise ConfigError("the shares of the kinds of samples do not add up to 1")
        if not (0 <= self.cpu_s <= 1e4 and 0 <= self.receive_cpu_s <= 1e4):
            raise ConfigError(f"{self.cpu_s} processor seconds a sample", fix="Give 0 or more")
        if self.samples < 1:
            raise ConfigError(f"{self.samples} samples in one piece of work", fix="Give 1 or more")

    @property
    def _parts(self) -> list[tuple[float, Round]]:
        return [(share, part) for share, rounds in self.kinds for r in rounds for part in (r, *r.beside)]

    @classmethod
    def of(cls, *rounds: Round, cpu_s: float = 0.0, receive_cpu_s: float = 0.0, samples: int = 1) -> Work:
        """Samples that are all alike."""
        return cls(kinds=((1.0, rounds),), cpu_s=cpu_s, receive_cpu_s=receive_cpu_s, samples=samples)

    @property
    def requests(self) -> float:
        """Mean requests of a sample."""
        return sum(share * part.requests for share, part in self._parts) / self.samples

    @property
    def all_cpu_s(self) -> float:
        """Processor seconds of a sample, whenever they are."""
        return (self.cpu_s + self.receive_cpu_s) / self.samples

    @property
    def bytes(self) -> float:
        """Mean bytes of a sample."""
        return sum(share * part.bytes for share, part in self._parts) / self.samples

    @property
    def rounds(self) -> float:
        """Mean number of rounds of one piece of work."""
        return sum(share * len(rounds) for share, rounds in self.kinds)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """How a rank comes by its batches: in lanes, which are worker processes, or the rank itself.

    Lane i of n prepares every n-th batch. A lane has at most `in_flight` pieces of work begun and not handed over, and
    hands them over in order. The rank takes batches in order, from one lane after the other.
    """

    batch: int = 1
    """Pieces of work (samples, unless the work is a batch) a step and rank."""
    workers: int = 0
    """Worker processes of a rank; 0: the rank's own process is its one lane."""
    prefetch: int = 2
    """Batches a lane makes up before they are taken. 0: it makes up one when the rank asks for it, as torch's
    DataLoader does without workers."""
    in_flight: int = 1
    """Pieces of work of a lane that are being read or decoded, or wait for their turn."""
    ahead: bool = False
    """Whether a lane reads on beyond the batches that it was asked for, as a stream does, or begins a batch when that
    is due and the one before it is done, as a map-style dataset does."""
    connections: int = 64
    """Requests of a lane at a time."""

    def __post_init__(self) -> None:
        for name, least in {"batch": 1, "workers": 0, "prefetch": 0, "in_flight": 1, "connections": 1}.items():
            value = getattr(self, name)
            if not least <= value <= 1_000_000:
                raise ConfigError(f"--{name.replace('_', '-')} {value}", fix=f"Give {least} or more")
        if self.workers and not self.prefetch:
            raise ConfigError("workers without prefetch", fix="Give 1 batch or more that a worker prepares")

    @property
    def lanes(self) -> int:
        """Of a rank."""
        return max(1, self.workers)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Between nodes and bucket. Bytes and requests a second; infinite: no limit."""

    latency: Latency = field(default_factory=Latency)
    stream_bytes_per_s: float = math.inf
    """Most that one connection gets."""
    link_bytes_per_s: float = math.inf
    """Most that a node gets."""
    bucket_bytes_per_s: float = math.inf
    """Most that the bucket gives to all."""
    bucket_requests_per_s: float = math.inf
    """Most requests that the bucket takes, after at most one second's worth at once. What comes beyond is refused,
    which takes as long as a first byte, and sent again after a pause that doubles each time."""
    first_pause_s: float = 0.1
    """Before a refused request is sent again the first time; pauses are drawn between half and the whole of this."""
    longest_pause_s: float = 15.0

    def __post_init__(self) -> None:
        for name in ("stream_bytes_per_s", "link_bytes_per_s", "bucket_bytes_per_s", "bucket_requests_per_s"):
            if not getattr(self, name) > 0:
                what = name.removesuffix("_per_s").replace("_", " ")
                raise ConfigError(f"{what}: {getattr(self, name)} a second", fix="Give more than 0")
        if not 0 < self.first_pause_s <= self.longest_pause_s:
            raise ConfigError(f"a pause of {self.first_pause_s} s before a retry", fix="Give more than 0")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes."""

    nodes: int
    ranks: int = 1
    """A node."""
    cores: float = math.inf
    """A node."""
    cache_bytes: float = 0.0
    """A node; what was read stays until this is full, then what was used longest ago goes."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks"):
            if not 1 <= getattr(self, name) <= 10_000_000:
                raise ConfigError(f"--{name} {getattr(self, name)}", fix="Give 1 or more")
        if not self.cores > 0:
            raise ConfigError(f"--cores {self.cores}", fix="Give more than 0")
        if not self.cache_bytes >= 0:
            raise ConfigError(f"a cache of {self.cache_bytes} bytes", fix="Give 0 or more")

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training run whose step is a pause."""

    cluster: Cluster
    network: Network
    loader: Loader
    work: Work
    pieces: int
    """Pieces of work (samples, unless the work is a batch) of an epoch, over all ranks; see `uneven`."""
    step_time_s: float
    sync: bool = True
    """Whether ranks wait for one another at each step."""
    dataset_bytes: float = 0.0
    """Of all that an epoch may read; a node's cache holds its share of it. 0: caches do not count."""
    epochs: int = 1
    seed: int = 0
    coalesce: bool = True
    """Requests of a round that get a connection together travel together, and wait for the slowest of them. Otherwise
    each goes its own way, which takes as many times longer to simulate as a round has requests."""
    window_s: float = 60.0
    """The highest egress and request rate are means over this long."""
    mode: Literal["whole-object", "patches"] = "whole-object"

    def __post_init__(self) -> None:
        if self.pieces < 1 or self.epochs < 1:
            raise ConfigError(f"{self.epochs} epochs of {self.pieces} samples", fix="Give 1 or more of both")
        if not 0 <= self.step_time_s <= 36_000:
            raise ConfigError(f"--step-time {self.step_time_s}", fix="Give seconds from 0 to 36000")
        if self.pieces < self.cluster.world:
            what = "samples" if self.work.samples == 1 else "batches"
            raise ConfigError(
                f"{self.cluster.world} ranks share {self.pieces} {what} an epoch: some would have none",
                fix="Give fewer nodes or ranks, or more samples or steps",
            )
        if not self.window_s > 0:
            raise ConfigError(f"--window {self.window_s}", fix="Give seconds above 0")

    def pieces_of(self, rank: int) -> int:
        """Pieces of work of a rank: they take turns, so the first ones may have one more."""
        world = self.cluster.world
        return self.pieces // world + (rank < self.pieces % world)

    def thinned(self, nodes: int) -> Scenario:
        """The same with so many of its nodes, and their share of the samples and of what the bucket gives. Nodes are
        alike, so those that are left behave as all of them do; only the longest of their waits is drawn from fewer."""
        if nodes >= self.cluster.nodes:
            return self
        share = nodes / self.cluster.nodes
        return replace(
            self,
            cluster=replace(self.cluster, nodes=nodes),
            pieces=max(round(self.pieces * share), nodes * self.cluster.ranks),
            network=replace(
                self.network,
                bucket_bytes_per_s=self.network.bucket_bytes_per_s * share,
                bucket_requests_per_s=self.network.bucket_requests_per_s * share,
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data; None where there is no limit."""
        plain: dict[str, Any] = _finite(asdict(self))
        return plain


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
