"""What is simulated: samples, a loader, a network with a bucket, and nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from voxlane.bench.field_types import Count, CountOrZero, Limit, NotNegative, Positive, Seconds
from voxlane.errors import ConfigError
from voxlane.settings import record

P99 = 2.3263478740408408
"""The 99th percentile of a standard normal distribution."""


@record
class Latency:
    """Seconds from sending a request to the first byte of its response."""

    median_s: Seconds = 0.0
    p99_s: Seconds = 0.0
    """99th percentile of a lognormal distribution with that median; 0, or the median: every request takes the
    median."""
    jitter_s: Seconds = 0.0
    """Upper limit of a uniform additional delay, as in the emulator."""

    def __post_init__(self) -> None:
        if 0 < self.p99_s < self.median_s:
            raise ConfigError(
                f"a 99th percentile of {self.p99_s} s for a median latency of {self.median_s} s",
                fix="Give the median or more",
            )

    @property
    def _spread(self) -> float:
        """Standard deviation of the logarithm of a latency."""
        return math.log(self.p99_s / self.median_s) / P99 if self.p99_s > self.median_s > 0 else 0.0

    def draw_longest(self, generator: np.random.Generator, count: int, of: int) -> npt.NDArray[np.float64]:
        """Draw the longest of `of` latencies, `count` times."""
        longest = np.full(count, float(self.median_s))
        if self._spread:
            longest *= np.exp(self._spread * generator.standard_normal((count, of)).max(axis=1))
        if self.jitter_s:
            longest += self.jitter_s * generator.random((count, of)).max(axis=1)
        return longest

    def mean_longest_s(self, of: int) -> float:
        """Return the mean over many draws of the longest of `of` latencies."""
        return float(self.draw_longest(np.random.default_rng(0), 4096, of).mean())

    def mean_s(self) -> float:
        """Return the mean latency of a request."""
        return self.median_s * math.exp(self._spread**2 / 2) + self.jitter_s / 2


@dataclass(frozen=True)
class Round:
    """Requests that are sent together for `bytes` in all; the next round begins when all are answered."""

    requests: float
    """Number of requests; a fraction is rounded up or down at random, with this mean."""
    bytes: float
    beside: tuple[Round, ...] = ()
    """Requests of other sizes that are sent at the same time."""

    def __post_init__(self) -> None:
        if any(part.beside for part in self.beside):
            raise ConfigError("concurrent requests are nested", fix="Put all of them beside the first")
        if not (0 <= self.requests <= 1e6 and 0 <= self.bytes <= 1e15):
            raise ConfigError(f"a round of {self.requests} requests for {self.bytes} bytes", fix="Give both above zero")


@record
class Work:
    """Requests and processor time of a sample."""

    kinds: tuple[tuple[float, tuple[Round, ...]], ...]
    """(fraction of samples, their rounds); the fractions add up to 1."""
    cpu_s: Seconds = 0.0
    """Processor seconds after the last byte: decoding, cropping, copying."""
    receive_cpu_s: Seconds = 0.0
    """Processor seconds while bytes arrive: the client's own work."""
    samples: Count = 1
    """Number of samples in a piece of work; more than 1 for a loader that fetches a batch at once."""

    def __post_init__(self) -> None:
        if not self.kinds or abs(sum(share for share, _ in self.kinds) - 1) > 1e-6:
            raise ConfigError("the shares of the kinds of samples do not add up to 1")

    @property
    def _parts(self) -> list[tuple[float, Round]]:
        return [(share, part) for share, rounds in self.kinds for r in rounds for part in (r, *r.beside)]

    @classmethod
    def of(cls, *rounds: Round, cpu_s: float = 0.0, receive_cpu_s: float = 0.0, samples: int = 1) -> Work:
        """Return the work of samples that are all alike."""
        return cls(kinds=((1.0, rounds),), cpu_s=cpu_s, receive_cpu_s=receive_cpu_s, samples=samples)

    @property
    def requests(self) -> float:
        """Mean number of requests per sample."""
        return sum(share * part.requests for share, part in self._parts) / self.samples

    @property
    def all_cpu_s(self) -> float:
        """Processor seconds per sample, during and after its transfer."""
        return (self.cpu_s + self.receive_cpu_s) / self.samples

    @property
    def bytes(self) -> float:
        """Mean bytes per sample."""
        return sum(share * part.bytes for share, part in self._parts) / self.samples

    @property
    def rounds(self) -> float:
        """Mean number of rounds per piece of work."""
        return sum(share * len(rounds) for share, rounds in self.kinds)


@record
class Loader:
    """How a rank gets its batches: from lanes, which are worker processes or the rank itself.

    Lane i of n prepares every n-th batch. A lane has at most `in_flight` pieces of work begun and not delivered, and
    delivers them in order. The rank takes batches in order, from one lane after the other.
    """

    batch: Count = 1
    """Pieces of work (samples, unless the work is a batch) per step and rank."""
    workers: CountOrZero = 0
    """Worker processes per rank; 0: the rank's own process is its only lane."""
    prefetch: CountOrZero = 2
    """Batches that a lane prepares in advance. 0: it prepares one when the rank requests it, as torch's DataLoader does
    without workers."""
    in_flight: Count = 1
    """Pieces of work per lane that are being read or decoded, or wait for delivery."""
    ahead: bool = False
    """Whether a lane reads beyond the requested batches, as a stream does, or begins a batch when it is due and the one
    before it is done, as a map-style dataset does."""
    connections: Count = 64
    """Largest number of concurrent requests per lane."""

    def __post_init__(self) -> None:
        if self.workers and not self.prefetch:
            raise ConfigError("workers without prefetch", fix="Give 1 batch or more that a worker prepares")

    @property
    def lanes(self) -> int:
        """Number of lanes per rank."""
        return max(1, self.workers)


@record
class StorageNetwork:
    """The network between nodes and bucket, in bytes and requests per second; infinite: no limit."""

    latency: Latency = Latency()
    stream_bytes_per_s: Limit = math.inf
    """Limit of a connection."""
    link_bytes_per_s: Limit = math.inf
    """Limit of a node."""
    bucket_bytes_per_s: Limit = math.inf
    """Limit of the bucket for all nodes."""
    bucket_requests_per_s: Limit = math.inf
    """Limit of the bucket for requests, after a burst of at most one second's worth. Requests beyond it are refused,
    which takes as long as a first byte, and sent again after a pause that doubles each time."""
    first_pause_s: Limit = 0.1
    """Longest pause before a refused request is sent again the first time; pauses are drawn from half of this on."""
    longest_pause_s: Limit = 15.0


@record
class SimulatedCluster:
    """The nodes of a cluster."""

    nodes: Count
    ranks: Count = 1
    """Ranks per node."""
    cores: Limit = math.inf
    """Cores per node."""
    cache_bytes: NotNegative = 0.0
    """Cache per node; when it is full, the least recently used objects are removed."""

    @property
    def world(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks


@record
class Scenario:
    """A training run whose steps are pauses."""

    cluster: SimulatedCluster
    network: StorageNetwork
    loader: Loader
    work: Work
    pieces: Positive
    """Pieces of work (samples, unless the work is a batch) per epoch, over all ranks."""
    step_time_s: Seconds
    sync: bool = True
    """Whether ranks wait for one another at each step."""
    dataset_bytes: NotNegative = 0.0
    """Bytes of the dataset, of which a node's cache holds a fraction. 0: caches do not count."""
    epochs: Positive = 1
    seed: int = 0
    coalesce: bool = True
    """Whether requests of a round that get connections together are simulated together and wait for the slowest. If
    not, the simulation takes as many times longer as a round has requests."""
    window_s: Limit = 60.0
    """Seconds over which the highest egress and request rates are averaged."""
    mode: Literal["whole-object", "patches"] = "whole-object"

    def __post_init__(self) -> None:
        if self.pieces < self.cluster.world:
            unit = "samples" if self.work.samples == 1 else "batches"
            raise ConfigError(
                f"{self.cluster.world} ranks share {self.pieces} {unit} per epoch: some would have none",
                fix="Give fewer nodes or ranks, or more samples or steps",
            )

    def pieces_of(self, rank: int) -> int:
        """Return the pieces of work of a rank; the first ranks may have one more."""
        world = self.cluster.world
        return self.pieces // world + (rank < self.pieces % world)

    def reduced_to(self, nodes: int) -> Scenario:
        """Return the scenario with only `nodes` nodes and their share of the samples and of the bucket. All nodes are
        alike, so these behave as all of them do; only the longest of their waits is drawn from fewer."""
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


@record
class Prices:
    """Prices in US dollars; the defaults are close to the list prices of the three large clouds."""

    usd_per_10k_requests: NotNegative = 0.004
    """Price of 10,000 reads: class B on Google, GET on Amazon."""
    usd_per_gb: NotNegative = 0.02
    """Price of a GB (1e9 bytes) that leaves for another region of the continent. It is free within the bucket's region,
    and 0.08 to 0.12 to the internet."""

    def of(self, requests: float, size: float) -> dict[str, float]:
        """Return the prices of reads and of `size` bytes that leave the region."""
        return {
            "requests_usd": requests / 10_000 * self.usd_per_10k_requests,
            "egress_usd": size / 1e9 * self.usd_per_gb,
        }
