"""Simulate the epochs of a scenario one after the other; caches keep their content from one to the next."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from voxlane.bench.simulator.epoch import SimulatedEpoch, Simulation
from voxlane.bench.simulator.model import Scenario

_FEW_STEPS = 8


def simulate(scenario: Scenario, *, nodes: int | None = None, warm: bool = False) -> list[dict[str, Any]]:
    """Simulate all epochs and return a row for each, in the units of the tables. Simulate only `nodes` nodes if given
    (`Scenario.reduced_to`); `warm` starts with full caches."""
    reduced = scenario if nodes is None else scenario.reduced_to(nodes)
    generator = np.random.default_rng(scenario.seed)
    capacity = min(reduced.cluster.cache_bytes, reduced.dataset_bytes)
    cached_bytes = capacity if warm else 0.0
    saved_requests = math.inf
    rows = []
    for number in range(1, scenario.epochs + 1):
        # Samples are assigned to nodes anew each epoch: a cache answers by the fraction of the data that it holds.
        hit_share = cached_bytes / reduced.dataset_bytes if reduced.dataset_bytes else 0.0
        epoch = Simulation(reduced, generator, hit_share, saved_requests).run()
        saved_requests = epoch.saved_requests  # an epoch begins as the previous one ends
        cached_bytes = min(capacity, cached_bytes + epoch.bytes / reduced.cluster.nodes)
        rows.append(_make_row(scenario, reduced.cluster.nodes, number, epoch))
    return rows


def _make_row(scenario: Scenario, simulated_nodes: int, number: int, epoch: SimulatedEpoch) -> dict[str, Any]:
    """Return the figures of an epoch on all nodes of the scenario."""
    scale = scenario.cluster.nodes / simulated_nodes
    requested = epoch.requests - epoch.refused + epoch.cached_requests
    seconds = epoch.seconds
    return {
        "mode": scenario.mode,
        "nodes": scenario.cluster.nodes,
        "epoch": number,
        "seconds": seconds,
        "steps": epoch.steps,
        "step_s": seconds / epoch.steps,
        "samples": round(epoch.samples * scale),
        "samples_per_s": epoch.samples * scale / seconds if seconds else None,
        "mean_gbps": epoch.bytes * scale * 8e-9 / seconds if seconds else None,
        "max_gbps": epoch.max_bytes_per_s * scale * 8e-9,
        "max_gbps_at_worst": epoch.max_bytes_per_s_at_worst * scale * 8e-9,
        "mean_requests_per_s": epoch.requests * scale / seconds if seconds else None,
        "max_requests_per_s": epoch.max_requests_per_s * scale,
        # Fraction of the time in which no step ran; undefined for steps that take no time.
        "stall_share": max(0.0, 1 - epoch.busy_share) if scenario.step_time_s else None,
        "first_batch_s": epoch.first_batch_s,
        "steady": _steady_rates(scenario, simulated_nodes, epoch),
        "bytes": epoch.bytes * scale,
        "requests": epoch.requests * scale,
        "refused": epoch.refused * scale,
        "hit_share": epoch.cached_requests / requested if requested else 0.0,
        "cpu_s": epoch.cpu_s * scale,
        "simulated": {"nodes": simulated_nodes, "events": epoch.events},
    }


def _steady_rates(scenario: Scenario, simulated_nodes: int, epoch: SimulatedEpoch) -> dict[str, Any] | None:
    """Return the rates of the middle half of the steps; None if there are hardly more steps than lanes fill at the
    start."""
    steps, seconds = 3 * epoch.steps // 4 - epoch.steps // 4, epoch.middle_s
    if epoch.steps < max(_FEW_STEPS, 2 * scenario.loader.lanes) or seconds <= 0:
        return None
    rate = epoch.samples / epoch.steps * steps / seconds * scenario.cluster.nodes / simulated_nodes
    return {
        "samples_per_s": rate,
        "gbps": rate * epoch.bytes / epoch.samples * 8e-9,
        "requests_per_s": rate * epoch.requests / epoch.samples,
        "stall_share": max(0.0, 1 - steps * scenario.step_time_s / seconds) if scenario.step_time_s else None,
    }
