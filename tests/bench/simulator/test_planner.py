"""Test plans: the scarce resource is the one that limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from voxlane.bench.simulator import planner
from voxlane.bench.simulator.model import (
    Latency,
    Loader,
    Prices,
    Round,
    Scenario,
    SimulatedCluster,
    StorageNetwork,
    Work,
)
from voxlane.errors import ConfigError

EASY = Scenario(
    cluster=SimulatedCluster(nodes=4, ranks=2, cores=16),
    network=StorageNetwork(latency=Latency(median_s=0.03, p99_s=0.1), stream_bytes_per_s=100e6, link_bytes_per_s=4e9),
    work=Work.of(Round(2, 0.0), Round(10, 2e6), cpu_s=0.03),
    mode="patches",
    loader=Loader(batch=2),
    step_time_s=0.2,
    pieces=1000,
    epochs=10,
    dataset_bytes=1e12,
)
"""A training that needs 80 samples per second: 1.3 Gbps and 960 requests per second in total, 0.6 cores per node."""


def make_plan(scenario: Scenario) -> dict[str, Any]:
    return planner.make_plan(scenario, scenario.pieces, Prices())


def test_loader_that_keeps_up() -> None:
    plan = make_plan(EASY)
    assert (plan["binds"], plan["cache_bytes"]) == ("step", 0.0)
    assert plan["samples_per_s"] == pytest.approx(80, rel=0.02)
    assert plan["stall_share"] == pytest.approx(0, abs=0.02)
    assert plan["advice"] == ["the loader keeps up: nothing to change"]


@pytest.mark.parametrize(
    ("scarce", "binds"),
    [
        ({"network": replace(EASY.network, link_bytes_per_s=20e6)}, planner.LINK),
        ({"network": replace(EASY.network, bucket_bytes_per_s=80e6)}, planner.BANDWIDTH),
        ({"network": replace(EASY.network, bucket_requests_per_s=480.0)}, planner.REQUESTS),
        ({"cluster": SimulatedCluster(nodes=4, ranks=2, cores=0.3)}, planner.CORES),
    ],
)
def test_halving_the_bottleneck_halves_the_rate(scarce: dict[str, object], binds: str) -> None:
    plan = make_plan(replace(EASY, **scarce))
    assert plan["binds"] == binds
    assert plan["samples_per_s"] == pytest.approx(40, rel=0.1)
    assert plan["stall_share"] == pytest.approx(0.5, abs=0.06)
    if binds == planner.CORES:
        assert plan["cache_bytes"] == 0
    else:
        assert plan["cache_bytes"] == pytest.approx((1 - 0.8 / 2) * 1e12)
        assert plan["cached_stall_share"] == pytest.approx(0, abs=0.02)


def test_waiting_is_hidden_by_more_in_flight() -> None:
    far = replace(EASY, network=replace(EASY.network, latency=Latency(median_s=0.5, p99_s=1.0)))
    plan, near = make_plan(far), make_plan(EASY)
    assert plan["stall_share"] == pytest.approx(0, abs=0.03)
    many, few = plan["settings"], near["settings"]
    assert many["in_flight"] * max(many["workers"], 1) > 4 * few["in_flight"] * max(few["workers"], 1)


def test_no_step_time_has_no_stall() -> None:
    plan = make_plan(replace(EASY, step_time_s=0.0))
    assert (plan["stall_share"], plan["binds"]) == (None, "loader")
    assert plan["samples_per_s"] > 80


def test_costs() -> None:
    epoch, training, month = make_plan(EASY)["quantities"]
    assert epoch["requests"] == pytest.approx(12_000)
    assert epoch["requests_usd"] == pytest.approx(0.0048)
    assert epoch["egress_usd"] == pytest.approx(2 * 0.02)
    assert training["bytes"] == pytest.approx(10 * epoch["bytes"])
    assert month["hours"] == pytest.approx(720)
    with pytest.raises(ConfigError):
        Prices(usd_per_gb=-1)
