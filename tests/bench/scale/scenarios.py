"""Small scenarios."""

from __future__ import annotations

from typing import Any

from voxlane.bench.scale.model import Cluster, Latency, Loader, Network, Round, Scenario, Work


def scenario(**changes: Any) -> Scenario:
    """One node with one sequential stream: 1 s of latency and 10 bytes at 10 a second, no step; but for `changes`."""
    fields: dict[str, Any] = {
        "cluster": Cluster(nodes=1),
        "network": Network(latency=Latency(median_s=1.0), stream_bytes_per_s=10.0),
        "loader": Loader(batch=1, prefetch=2),
        "work": Work.of(Round(1, 10.0)),
        "pieces": 4,
        "step_time_s": 0.0,
    }
    return Scenario(**{**fields, **changes})
