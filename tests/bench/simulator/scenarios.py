"""Make small scenarios for the simulator's tests."""

from __future__ import annotations

from typing import Any

from voxlane.bench.simulator.model import Latency, Loader, Round, Scenario, SimulatedCluster, StorageNetwork, Work


def scenario(**changes: Any) -> Scenario:
    """Return a scenario of one sequential stream: 1 s latency, 10 bytes at 10 per second, no step; with `changes`."""
    fields: dict[str, Any] = {
        "cluster": SimulatedCluster(nodes=1),
        "network": StorageNetwork(latency=Latency(median_s=1.0), stream_bytes_per_s=10.0),
        "loader": Loader(batch=1, prefetch=2),
        "work": Work.of(Round(1, 10.0)),
        "pieces": 4,
        "step_time_s": 0.0,
    }
    return Scenario(**{**fields, **changes})
