"""What a training asks of a cluster and a bucket, what binds, and what to change: sums first, then a simulation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from voxlane.bench.scale.model import Cluster, Loader, Network, Scenario, Work
from voxlane.bench.scale.prices import Prices
from voxlane.bench.scale.simulate import simulate
from voxlane.errors import ConfigError

_PIECES = 12_000
"""Samples simulated for a plan, about: as many nodes as that is enough for."""
_STEPS = 24
_MARGIN = 1.5
"""In-flight samples beyond what waiting for a mean sample takes: some take longer, and all hand over in order."""
_CORE_A_PROCESS = 0.7
"""What a loader process does before its threads wait for one another."""
_ROOM = 0.8
"""How full something shared may be planned to be."""
_STALL = 0.02
"""A stall, beside that for the first batch, which is not worth another attempt."""
LINK, BANDWIDTH, REQUESTS, CORES = "link of a node", "bucket's bandwidth", "bucket's requests", "cores of a node"
MONTH_S = 30 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A training and where it is to run."""

    cluster: Cluster
    network: Network
    work: Work
    """Of one sample."""
    mode: str
    batch: int
    """A rank and step."""
    step_time_s: float
    samples: int
    """An epoch, over all ranks."""
    epochs: int
    dataset_bytes: float
    connections: int = 64
    """A process."""
    seed: int = 0


@dataclass(frozen=True)
class Use:
    """Something that has a limit."""

    what: str
    needed: float
    limit: float
    unit: str

    @property
    def share(self) -> float:
        """Of the limit, what is needed; above 1 it is too little."""
        return self.needed / self.limit


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings for a wish, and what they come to."""

    wish: Wish
    uses: tuple[Use, ...]
    workers: int
    in_flight: int
    """Samples a process."""
    prefetch: int
    sample_s: float
    """From sending a sample's first request to having it, where nothing is full."""
    stall_share: float | None
    """After the first batch."""
    samples_per_s: float
    gbps: float
    requests_per_s: float
    first_batch_s: float
    cache_bytes: float
    """A node; 0: none is needed, or none would help."""
    cached_stall_share: float | None
    cached_gbps: float
    cached_requests_per_s: float
    binds: str
    advice: tuple[str, ...]

    def quantities(self, prices: Prices) -> list[dict[str, Any]]:
        """Requests, bytes and what they cost: an epoch, the training, and a month of training without pause."""
        wish = self.wish
        rows = []
        for span, samples in (
            ("epoch", float(wish.samples)),
            (f"{wish.epochs} epochs", float(wish.samples) * wish.epochs),
            ("30 days", self.samples_per_s * MONTH_S),
        ):
            requests, size = samples * wish.work.requests, samples * wish.work.bytes
            rows.append(
                {
                    "span": span,
                    "hours": samples / self.samples_per_s / 3600,
                    "samples": samples,
                    "requests": requests,
                    "bytes": size,
                    "requests_usd": prices.requests_usd(requests),
                    "egress_usd": prices.egress_usd(size),
                }
            )
        return rows

    def to_json(self, prices: Prices) -> dict[str, Any]:
        """As plain data."""
        return {
            "settings": {"workers": self.workers, "in_flight": self.in_flight, "prefetch": self.prefetch},
            "uses": [{**asdict(use), "share": use.share} for use in self.uses if math.isfinite(use.limit)],
            "sample_s": self.sample_s,
            "stall_share": self.stall_share,
            "samples_per_s": self.samples_per_s,
            "gbps": self.gbps,
            "requests_per_s": self.requests_per_s,
            "first_batch_s": self.first_batch_s,
            "cache_bytes": self.cache_bytes,
            "cached_stall_share": self.cached_stall_share,
            "cached_gbps": self.cached_gbps,
            "cached_requests_per_s": self.cached_requests_per_s,
            "binds": self.binds,
            "advice": list(self.advice),
            "quantities": self.quantities(prices),
            "prices": asdict(prices),
        }


def make(wish: Wish) -> Plan:
    """Choose settings and simulate them; more samples in flight until they no longer help."""
    sample_s = lone_sample_s(wish)
    workers, in_flight = first_guess(wish, sample_s)
    row = _simulated(wish, workers, in_flight)
    uses = uses_of(wish, needed_samples_per_s(wish) if wish.step_time_s else row["samples_per_s"])
    fullest = max(uses, key=lambda use: use.share)
    for _ in range(4):
        if fullest.share > 1 or (row["stall_share"] or 0.0) <= _STALL:
            break
        following = _simulated(wish, workers, 2 * in_flight)
        if following["stall_share"] > row["stall_share"] - _STALL / 2:
            break
        in_flight, row = 2 * in_flight, following
    cache_bytes = cache_for(wish, uses)
    cached = _simulated(wish, workers, in_flight, cache_bytes=cache_bytes) if cache_bytes else row
    binds = binding(wish, uses, row["stall_share"] or 0.0)
    return Plan(
        wish=wish,
        uses=uses,
        workers=workers,
        in_flight=in_flight,
        prefetch=2,
        sample_s=sample_s,
        stall_share=row["stall_share"],
        samples_per_s=row["samples_per_s"],
        gbps=row["gbps"],
        requests_per_s=row["requests_per_s"],
        first_batch_s=row["first_batch_s"],
        cache_bytes=cache_bytes,
        cached_stall_share=cached["stall_share"],
        cached_gbps=cached["gbps"],
        cached_requests_per_s=cached["requests_per_s"],
        binds=binds,
        advice=advice(wish, binds, uses, cache_bytes),
    )


def needed_samples_per_s(wish: Wish) -> float:
    """So that no step waits; infinite for steps that take no time."""
    return wish.cluster.world * wish.batch / wish.step_time_s if wish.step_time_s else math.inf


def uses_of(wish: Wish, rate: float) -> tuple[Use, ...]:
    """What so many samples a second need, of all that has a limit."""
    work, network, a_node = wish.work, wish.network, rate / wish.cluster.nodes
    return (
        Use(LINK, a_node * work.bytes * 8e-9, network.link_bytes_per_s * 8e-9, "Gbps"),
        Use(BANDWIDTH, rate * work.bytes * 8e-9, network.bucket_bytes_per_s * 8e-9, "Gbps"),
        Use(REQUESTS, rate * work.requests, network.bucket_requests_per_s, "requests/s"),
        Use(CORES, a_node * work.all_cpu_s, wish.cluster.cores, "cores"),
    )


def lone_sample_s(wish: Wish) -> float:
    """From a sample's first request to its being decoded, where nothing is shared."""
    work, network, total = wish.work, wish.network, 0.0
    for share, rounds in work.kinds:
        for each in rounds:
            sent = [part for part in (each, *each.beside) if part.requests]
            if sent:
                requests = math.ceil(sum(part.requests for part in sent))
                turns = math.ceil(requests / wish.connections)
                moving_s = max(part.bytes / part.requests for part in sent) / network.stream_bytes_per_s
                waiting_s = network.latency.mean_longest_s(min(requests, wish.connections))
                total += share * turns * (waiting_s + moving_s)
    return total / work.samples + work.cpu_s


def first_guess(wish: Wish, sample_s: float) -> tuple[int, int]:
    """Workers of a rank, by processor time and connections; and samples in flight in each, by how long one takes."""
    rate = needed_samples_per_s(wish) / wish.cluster.world
    most = max(int(wish.cluster.cores // wish.cluster.ranks), 1) if math.isfinite(wish.cluster.cores) else 64
    if not math.isfinite(rate):  # as fast as it goes: a process a core
        rate = _CORE_A_PROCESS * most / max(wish.work.all_cpu_s, 1e-4)
    waiting_s = sample_s - wish.work.cpu_s
    processes = max(
        rate * wish.work.all_cpu_s / _CORE_A_PROCESS,
        rate * wish.work.requests * waiting_s / max(wish.work.rounds, 1.0) / wish.connections,
    )
    workers = 0 if processes <= _CORE_A_PROCESS else min(math.ceil(processes), most)
    lanes = max(workers, 1)
    in_flight = math.ceil(_MARGIN * rate * sample_s / lanes) + (wish.batch if not workers else 1)
    return workers, min(max(in_flight, min(wish.batch, 2)), 4096)


def cache_for(wish: Wish, uses: tuple[Use, ...]) -> float:
    """Bytes of a node's cache with which nothing between node and bucket is too full; 0: not needed."""
    worst = max(use.share for use in uses if use.what != CORES)
    if not wish.step_time_s or worst <= _ROOM:
        return 0.0
    return (1 - _ROOM / worst) * wish.dataset_bytes


def binding(wish: Wish, uses: tuple[Use, ...], stall: float) -> str:
    """What keeps steps waiting: one of the uses, latency, or the step itself where they do not."""
    fullest = max(uses, key=lambda use: use.share)
    if not wish.step_time_s:
        return "loader"
    if fullest.share > 1 or (stall > _STALL and fullest.share > _ROOM):
        return fullest.what
    return "latency" if stall > _STALL else "step"


def advice(wish: Wish, binds: str, uses: tuple[Use, ...], cache_bytes: float) -> tuple[str, ...]:
    """What to change, a sentence each."""
    fullest = max(uses, key=lambda use: use.share)
    holds = (
        f"a cache of {cache_bytes / 1e9:,.0f} GB a node, or the data staged on the nodes' disks, takes the rest off it"
    )
    whole = wish.mode == "whole-object"
    smaller = ["patches instead of whole objects read a fraction of the bytes"] if whole else []
    said: list[str] = []
    if binds == "step":
        said.append("the loader keeps up: nothing to change")
    elif binds == "loader":
        said.append("without a step time this is as fast as it goes, and what that uses: give --step-time")
    elif binds == "latency":
        said.append("nothing is full, requests are waited for: more in flight, or a bucket that is nearer")
    elif binds == CORES:
        said.append(f"{fullest.needed:.1f} cores of decoding a node: more cores a node, or fewer ranks on it")
    else:
        said += [f"the {binds} would have to be {fullest.share:.1f} times what it is", *smaller, holds]
        if not whole and binds == REQUESTS:
            said.append("larger chunks, or joining ranges across larger gaps, trade requests for bytes")
    near = [use for use in uses if use.share > _ROOM and use.what != binds]
    said += [f"next: the {use.what}, {use.share:.0%} of what there is" for use in near]
    return tuple(said)


def _simulated(wish: Wish, workers: int, in_flight: int, *, cache_bytes: float = 0.0) -> dict[str, Any]:
    """The plan once it runs, on a few nodes with their share of the bucket. Workers deliver in waves of one batch each,
    so there are steps enough for some of those."""
    steps = max(_STEPS, 4 * workers)
    scenario = Scenario(
        cluster=replace(wish.cluster, cache_bytes=cache_bytes),
        network=wish.network,
        loader=Loader(
            batch=wish.batch,
            workers=workers,
            prefetch=2 if workers else 0,
            in_flight=in_flight if workers else max(in_flight, wish.batch),
            ahead=True,
            connections=wish.connections,
        ),
        work=wish.work,
        pieces=steps * wish.batch * wish.cluster.world,
        step_time_s=wish.step_time_s,
        dataset_bytes=wish.dataset_bytes,
        seed=wish.seed,
        window_s=max(wish.step_time_s, 1.0),
    )
    nodes = max(1, _PIECES // (steps * wish.batch * wish.cluster.ranks))
    row = simulate(scenario, nodes=nodes, warm=bool(cache_bytes)).rows()[0]
    if row["steady"] is None:
        raise ConfigError(
            "neither steps nor samples take any time, so there is nothing to plan", fix="Give --step-time"
        )
    return {**row["steady"], "first_batch_s": row["first_batch_s"]}
