"""Plans: what binds is what was made scarce."""

from __future__ import annotations

from dataclasses import replace

import pytest

from voxlane.bench.scale import plan
from voxlane.bench.scale.model import Cluster, Latency, Network, Round, Work
from voxlane.bench.scale.plan import Wish
from voxlane.bench.scale.prices import Prices
from voxlane.errors import ConfigError

EASY = Wish(
    cluster=Cluster(nodes=4, ranks=2, cores=16),
    network=Network(latency=Latency(median_s=0.03, p99_s=0.1), stream_bytes_per_s=100e6, link_bytes_per_s=4e9),
    work=Work.of(Round(2, 0.0), Round(10, 2e6), cpu_s=0.03),
    mode="patches",
    batch=2,
    step_time_s=0.2,
    samples=1000,
    epochs=10,
    dataset_bytes=1e12,
)
"""80 samples a second: 1.3 Gbps and 960 requests a second over all, 0.6 cores a node."""


def test_a_loader_that_keeps_up() -> None:
    made = plan.make(EASY)
    assert (made.binds, made.cache_bytes) == ("step", 0.0)
    assert made.samples_per_s == pytest.approx(80, rel=0.02)
    assert made.stall_share == pytest.approx(0, abs=0.02)
    assert made.advice == ("the loader keeps up: nothing to change",)


@pytest.mark.parametrize(
    ("scarce", "binds"),
    [
        ({"network": replace(EASY.network, link_bytes_per_s=20e6)}, plan.LINK),
        ({"network": replace(EASY.network, bucket_bytes_per_s=80e6)}, plan.BANDWIDTH),
        ({"network": replace(EASY.network, bucket_requests_per_s=480.0)}, plan.REQUESTS),
        ({"cluster": Cluster(nodes=4, ranks=2, cores=0.3)}, plan.CORES),
    ],
)
def test_what_is_too_little_by_half_binds_and_halves_the_rate(scarce: dict[str, object], binds: str) -> None:
    made = plan.make(replace(EASY, **scarce))
    assert made.binds == binds
    assert made.samples_per_s == pytest.approx(40, rel=0.1)
    assert made.stall_share == pytest.approx(0.5, abs=0.06)
    if binds == plan.CORES:
        assert made.cache_bytes == 0
    else:
        assert made.cache_bytes == pytest.approx((1 - 0.8 / 2) * 1e12)
        assert made.cached_stall_share == pytest.approx(0, abs=0.02)


def test_waiting_is_hidden_by_more_in_flight() -> None:
    far = replace(EASY, network=replace(EASY.network, latency=Latency(median_s=0.5, p99_s=1.0)))
    made, near = plan.make(far), plan.make(EASY)
    assert made.stall_share == pytest.approx(0, abs=0.03)
    assert made.in_flight * max(made.workers, 1) > 4 * near.in_flight * max(near.workers, 1)


def test_no_step_time_has_no_stall() -> None:
    made = plan.make(replace(EASY, step_time_s=0.0))
    assert (made.stall_share, made.binds) == (None, "loader")
    assert made.samples_per_s > 80


def test_costs() -> None:
    epoch, training, month = plan.make(EASY).quantities(Prices(usd_per_10k_requests=0.004, usd_per_gb=0.02))
    assert epoch["requests"] == pytest.approx(12_000)
    assert epoch["requests_usd"] == pytest.approx(0.0048)
    assert epoch["egress_usd"] == pytest.approx(2 * 0.02)
    assert training["bytes"] == pytest.approx(10 * epoch["bytes"])
    assert month["hours"] == pytest.approx(720)
    with pytest.raises(ConfigError):
        Prices(usd_per_gb=-1)
