"""A scenario's epochs, one after the other, with what caches keep from one to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from voxlane.bench.scale.epoch import Epoch, Simulation
from voxlane.bench.scale.model import Scenario

_FEW_STEPS = 8


@dataclass(frozen=True)
class Outcome:
    """The epochs of a scenario, for all its nodes."""

    scenario: Scenario
    epochs: tuple[Epoch, ...]
    simulated_nodes: int
    hit_shares: tuple[float, ...]
    """Of each epoch, the share of requests that caches were to answer."""

    def rows(self) -> list[dict[str, Any]]:
        """One an epoch, in the units of the tables: Gbps, shares."""
        return [self._row(number, epoch) for number, epoch in enumerate(self.epochs)]

    def _row(self, number: int, epoch: Epoch) -> dict[str, Any]:
        scenario = self.scenario
        scale = scenario.cluster.nodes / self.simulated_nodes
        asked = epoch.requests - epoch.refused + epoch.cached_requests
        seconds = epoch.seconds
        return {
            "mode": scenario.mode,
            "nodes": scenario.cluster.nodes,
            "epoch": number + 1,
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
            # Of the time, that no step ran; with a step that takes no time there is none to speak of.
            "stall_share": max(0.0, 1 - epoch.busy_share) if scenario.step_time_s else None,
            "first_batch_s": epoch.first_batch_s,
            "steady": self._steady(epoch),
            "bytes": epoch.bytes * scale,
            "requests": epoch.requests * scale,
            "refused": epoch.refused * scale,
            "hit_share": epoch.cached_requests / asked if asked else 0.0,
            "cpu_s": epoch.cpu_s * scale,
            "simulated": {"nodes": self.simulated_nodes, "events": epoch.events},
        }

    def _steady(self, epoch: Epoch) -> dict[str, Any] | None:
        """Of the middle half of the steps; None where there are so few that lanes have hardly more than what they begin
        with."""
        steps, seconds = 3 * epoch.steps // 4 - epoch.steps // 4, epoch.middle_s[1] - epoch.middle_s[0]
        scenario = self.scenario
        if epoch.steps < max(_FEW_STEPS, 2 * scenario.loader.lanes) or seconds <= 0:
            return None
        rate = epoch.samples / epoch.steps * steps / seconds * scenario.cluster.nodes / self.simulated_nodes
        return {
            "samples_per_s": rate,
            "gbps": rate * epoch.bytes / epoch.samples * 8e-9,
            "requests_per_s": rate * epoch.requests / epoch.samples,
            "stall_share": max(0.0, 1 - steps * scenario.step_time_s / seconds) if scenario.step_time_s else None,
        }


def simulate(scenario: Scenario, *, nodes: int | None = None, warm: bool = False) -> Outcome:
    """All epochs. `nodes`: simulate only so many (`Scenario.thinned`). `warm`: caches begin as full as they get."""
    thin = scenario if nodes is None else scenario.thinned(nodes)
    generator = np.random.default_rng(scenario.seed)
    capacity = min(thin.cluster.cache_bytes, thin.dataset_bytes)
    held = capacity if warm else 0.0
    saved_requests = math.inf
    epochs, hits = [], []
    for _ in range(scenario.epochs):
        # Which node gets which sample is drawn anew each epoch: a cache helps by the share of the data that it holds.
        hits.append(held / thin.dataset_bytes if thin.dataset_bytes else 0.0)
        epochs.append(Simulation(thin, generator, hits[-1], saved_requests).run())
        saved_requests = epochs[-1].saved_requests  # one epoch begins as the other ends
        held = min(capacity, held + epochs[-1].bytes / thin.cluster.nodes)
    return Outcome(scenario, tuple(epochs), thin.cluster.nodes, tuple(hits))
