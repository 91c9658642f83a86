"""Plan the loading of a training on a cluster and a bucket: its needs, its bottleneck and what to change, by sums and
a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from voxlane.bench.simulator.model import Prices, Scenario
from voxlane.bench.simulator.simulate import simulate
from voxlane.errors import ConfigError

_PIECES = 12_000
"""Approximate number of samples to simulate, which limits the number of nodes."""
_STEPS = 24
_MARGIN = 1.5
"""Factor for samples in flight beyond the mean duration of a sample: some take longer, and delivery is in order."""
_CORES_PER_PROCESS = 0.7
"""Cores that a loader process uses before its threads wait for one another."""
_CAPACITY_LIMIT = 0.8
"""Fraction of a shared resource that a plan may use."""
_STALL = 0.02
"""Stall, besides the first batch, that is not worth another attempt."""
LINK, BANDWIDTH, REQUESTS, CORES = "link of a node", "bucket's bandwidth", "bucket's requests", "cores of a node"
MONTH_S = 30 * 86_400.0


def make_plan(scenario: Scenario, samples: int, prices: Prices) -> dict[str, Any]:
    """Choose settings for a training with `samples` samples per epoch and simulate them, with more samples in flight as
    long as that helps. Return the row of the result file. The scenario's workers, samples in flight and cache do not
    matter."""
    sample_s = lone_sample_s(scenario)
    workers, in_flight = first_guess(scenario, sample_s)
    row = _simulate(scenario, workers, in_flight)
    uses = uses_of(scenario, needed_samples_per_s(scenario) if scenario.step_time_s else row["samples_per_s"])
    fullest = max(uses, key=lambda use: float(use["share"]))
    for _ in range(4):
        if fullest["share"] > 1 or (row["stall_share"] or 0.0) <= _STALL:
            break
        following = _simulate(scenario, workers, 2 * in_flight)
        if following["stall_share"] > row["stall_share"] - _STALL / 2:
            break
        in_flight, row = 2 * in_flight, following
    cache_bytes = cache_for(scenario, uses)
    cached = _simulate(scenario, workers, in_flight, cache_bytes=cache_bytes) if cache_bytes else row
    binds = find_bottleneck(scenario, fullest, row["stall_share"] or 0.0)
    return {
        "settings": {"workers": workers, "in_flight": in_flight, "prefetch": 2},
        "uses": [use for use in uses if math.isfinite(use["limit"])],
        "sample_s": sample_s,
        **{name: row[name] for name in ("stall_share", "samples_per_s", "gbps", "requests_per_s", "first_batch_s")},
        "cache_bytes": cache_bytes,
        **{f"cached_{name}": cached[name] for name in ("stall_share", "gbps", "requests_per_s")},
        "binds": binds,
        "advice": give_advice(scenario, binds, uses, fullest, cache_bytes),
        "quantities": list_quantities(scenario, samples, row["samples_per_s"], prices),
        "prices": asdict(prices),
    }


def list_quantities(scenario: Scenario, samples: int, samples_per_s: float, prices: Prices) -> list[dict[str, Any]]:
    """Return requests, bytes and prices of an epoch, of the training, and of a month of continuous training."""
    periods = {
        "epoch": float(samples),
        f"{scenario.epochs} epochs": float(samples) * scenario.epochs,
        "30 days": samples_per_s * MONTH_S,
    }
    return [
        {
            "span": period,
            "hours": count / samples_per_s / 3600,
            "samples": count,
            "requests": count * scenario.work.requests,
            "bytes": count * scenario.work.bytes,
            **prices.of(count * scenario.work.requests, count * scenario.work.bytes),
        }
        for period, count in periods.items()
    ]


def needed_samples_per_s(scenario: Scenario) -> float:
    """Return the rate at which no step waits; infinite for steps that take no time."""
    return scenario.cluster.world * scenario.loader.batch / scenario.step_time_s if scenario.step_time_s else math.inf


def uses_of(scenario: Scenario, rate: float) -> list[dict[str, Any]]:
    """Return the use of each limited resource at `rate` samples per second. `share` is the fraction of the limit that
    is needed; above 1 the limit is too low."""
    work, network, node_rate = scenario.work, scenario.network, rate / scenario.cluster.nodes
    uses = (
        (LINK, node_rate * work.bytes * 8e-9, network.link_bytes_per_s * 8e-9, "Gbps"),
        (BANDWIDTH, rate * work.bytes * 8e-9, network.bucket_bytes_per_s * 8e-9, "Gbps"),
        (REQUESTS, rate * work.requests, network.bucket_requests_per_s, "requests/s"),
        (CORES, node_rate * work.all_cpu_s, scenario.cluster.cores, "cores"),
    )
    return [
        {"what": resource, "needed": needed, "limit": limit, "unit": unit, "share": needed / limit}
        for resource, needed, limit, unit in uses
    ]


def lone_sample_s(scenario: Scenario) -> float:
    """Return the seconds from the first request of a sample until it is decoded, without contention."""
    work, network, total = scenario.work, scenario.network, 0.0
    for share, rounds in work.kinds:
        for round_ in rounds:
            sent = [part for part in (round_, *round_.beside) if part.requests]
            if sent:
                requests = math.ceil(sum(part.requests for part in sent))
                turns = math.ceil(requests / scenario.loader.connections)
                transfer_s = max(part.bytes / part.requests for part in sent) / network.stream_bytes_per_s
                waiting_s = network.latency.mean_longest_s(min(requests, scenario.loader.connections))
                total += share * turns * (waiting_s + transfer_s)
    return total / work.samples + work.cpu_s


def first_guess(scenario: Scenario, sample_s: float) -> tuple[int, int]:
    """Return the workers per rank, by processor time and connections, and the samples in flight in each, by their
    duration."""
    cluster, loader, work = scenario.cluster, scenario.loader, scenario.work
    rate = needed_samples_per_s(scenario) / cluster.world
    most = max(int(cluster.cores // cluster.ranks), 1) if math.isfinite(cluster.cores) else 64
    if not math.isfinite(rate):  # as fast as possible: one process per core
        rate = _CORES_PER_PROCESS * most / max(work.all_cpu_s, 1e-4)
    waiting_s = sample_s - work.cpu_s
    processes = max(
        rate * work.all_cpu_s / _CORES_PER_PROCESS,
        rate * work.requests * waiting_s / max(work.rounds, 1.0) / loader.connections,
    )
    workers = 0 if processes <= _CORES_PER_PROCESS else min(math.ceil(processes), most)
    in_flight = math.ceil(_MARGIN * rate * sample_s / max(workers, 1)) + (1 if workers else loader.batch)
    return workers, min(max(in_flight, min(loader.batch, 2)), 4096)


def cache_for(scenario: Scenario, uses: Sequence[dict[str, Any]]) -> float:
    """Return the bytes of a node's cache that keep network and bucket within their limits; 0: not needed."""
    worst: float = max(use["share"] for use in uses if use["what"] != CORES)
    if not scenario.step_time_s or worst <= _CAPACITY_LIMIT:
        return 0.0
    return (1 - _CAPACITY_LIMIT / worst) * scenario.dataset_bytes


def find_bottleneck(scenario: Scenario, fullest: dict[str, Any], stall: float) -> str:
    """Return what keeps steps waiting: a resource, latency, or the step itself if they do not wait."""
    if not scenario.step_time_s:
        return "loader"
    if fullest["share"] > 1 or (stall > _STALL and fullest["share"] > _CAPACITY_LIMIT):
        return str(fullest["what"])
    return "latency" if stall > _STALL else "step"


def give_advice(
    scenario: Scenario, binds: str, uses: Sequence[dict[str, Any]], fullest: dict[str, Any], cache_bytes: float
) -> list[str]:
    """Return what to change, a sentence each."""
    cache = f"use a cache of {cache_bytes / 1e9:,.0f} GB per node, or stage the data on the nodes' disks"
    whole = scenario.mode == "whole-object"
    smaller = ["read patches instead of whole objects: a fraction of the bytes"] if whole else []
    sentences: list[str] = []
    if binds == "step":
        sentences.append("the loader keeps up: nothing to change")
    elif binds == "loader":
        sentences.append("without a step time this is the top speed and its use of resources: give --step-time")
    elif binds == "latency":
        sentences.append(
            "no limit is reached, but latency is too long: raise --in-flight, or use a bucket that is nearer"
        )
    elif binds == CORES:
        sentences.append(
            f"decoding needs {fullest['needed']:.1f} cores per node: use more cores, or fewer ranks per node"
        )
    else:
        sentences += [f"the {binds} would have to be {fullest['share']:.1f} times higher", *smaller, cache]
        if not whole and binds == REQUESTS:
            sentences.append("use larger chunks, or a larger --max-gap, to trade requests for bytes")
    near = [use for use in uses if use["share"] > _CAPACITY_LIMIT and use["what"] != binds]
    return sentences + [f"next limit: the {use['what']}, {use['share']:.0%} used" for use in near]


def _simulate(scenario: Scenario, workers: int, in_flight: int, *, cache_bytes: float = 0.0) -> dict[str, Any]:
    """Simulate the steady state of a plan on a few nodes with their share of the bucket. Workers deliver in waves of
    one batch each, so there are enough steps for several waves."""
    steps = max(_STEPS, 4 * workers)
    batch, cluster = scenario.loader.batch, scenario.cluster
    planned = replace(
        scenario,
        cluster=replace(cluster, cache_bytes=cache_bytes),
        loader=replace(
            scenario.loader,
            workers=workers,
            prefetch=2 if workers else 0,
            in_flight=in_flight if workers else max(in_flight, batch),
            ahead=True,
        ),
        pieces=steps * batch * cluster.world,
        sync=True,
        epochs=1,
        window_s=max(scenario.step_time_s, 1.0),
    )
    row = simulate(planned, nodes=max(1, _PIECES // (steps * batch * cluster.ranks)), warm=bool(cache_bytes))[0]
    if row["steady"] is None:
        raise ConfigError(
            "neither steps nor samples take any time, so there is nothing to plan", fix="Give --step-time"
        )
    return {**row["steady"], "first_batch_s": row["first_batch_s"]}
