"""Test simulated epochs: closed forms, conservation, and equality of fast and plain algorithms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.bench.simulator.reference import PlainSharing
from tests.bench.simulator.scenarios import scenario
from voxlane.bench.simulator import epoch
from voxlane.bench.simulator.epoch import SimulatedEpoch, Simulation
from voxlane.bench.simulator.model import Latency, Loader, Round, Scenario, SimulatedCluster, StorageNetwork, Work
from voxlane.bench.simulator.simulate import simulate
from voxlane.errors import ConfigError


def run(scenario_to_run: Scenario, hit_share: float = 0.0) -> SimulatedEpoch:
    return Simulation(scenario_to_run, np.random.default_rng(scenario_to_run.seed), hit_share).run()


def test_one_stream_takes_latency_and_bytes_and_processor_time() -> None:
    result = run(scenario(work=Work.of(Round(1, 10.0), Round(1, 5.0), cpu_s=0.25)))
    assert result.seconds == pytest.approx(4 * (1 + 1 + 1 + 0.5 + 0.25))
    assert result.first_batch_s == pytest.approx(3.75)


def test_work_that_overlaps_requests_costs_only_its_excess() -> None:
    assert run(scenario(work=Work.of(Round(1, 10.0), receive_cpu_s=0.5))).seconds == pytest.approx(4 * 2.0)
    assert run(scenario(work=Work.of(Round(1, 10.0), receive_cpu_s=3.0))).seconds == pytest.approx(4 * 3.0)


def test_requests_of_a_round_go_together_and_the_largest_is_waited_for() -> None:
    work = Work.of(Round(2, 20.0, beside=(Round(1, 30.0),)))
    result = run(scenario(work=work))
    assert result.seconds == pytest.approx(4 * (1 + 3))
    assert (result.requests, result.bytes) == (12, pytest.approx(200))


def test_few_connections_take_turns() -> None:
    result = run(scenario(work=Work.of(Round(4, 40.0)), loader=Loader(batch=1, connections=2), pieces=1))
    assert result.seconds == pytest.approx(2 * (1 + 1))


def test_rate_follows_littles_law() -> None:
    """Little's law: a stream of n samples in flight that take 2 s each gives n / 2 a second, until the step binds."""
    for in_flight, rate in ((1, 0.5), (4, 2.0), (8, 4.0), (16, 5.0)):
        loader = Loader(batch=1, prefetch=0, in_flight=in_flight, ahead=True)
        row = simulate(scenario(loader=loader, pieces=400, step_time_s=0.2))[0]
        assert row["steady"]["samples_per_s"] == pytest.approx(rate, rel=0.02)


def test_rank_without_prefetch_reads_while_it_steps_only_if_the_lane_reads_ahead() -> None:
    for ahead, seconds in ((False, 4 * (2 + 2)), (True, 2 + 4 * 2)):
        result = run(scenario(loader=Loader(batch=1, prefetch=0, ahead=ahead), step_time_s=2.0))
        assert result.seconds == pytest.approx(seconds)


def test_full_link_delivers_its_bandwidth() -> None:
    network = StorageNetwork(stream_bytes_per_s=10.0, link_bytes_per_s=20.0)
    result = run(scenario(network=network, loader=Loader(batch=8, in_flight=8), pieces=80))
    assert result.seconds == pytest.approx(800 / 20)
    assert result.max_bytes_per_s == pytest.approx(20)


def test_nodes_share_the_bucket() -> None:
    network = StorageNetwork(stream_bytes_per_s=10.0, bucket_bytes_per_s=25.0)
    result = run(scenario(network=network, cluster=SimulatedCluster(nodes=5), pieces=50))
    assert result.seconds == pytest.approx(500 / 25)


def test_cores_are_shared() -> None:
    work = Work.of(Round(0, 0.0), cpu_s=1.0)
    result = run(
        scenario(work=work, cluster=SimulatedCluster(nodes=1, cores=2), loader=Loader(batch=8, in_flight=8), pieces=40)
    )
    assert result.seconds == pytest.approx(40 / 2)
    assert result.cpu_s == pytest.approx(40)


def test_throttling_bucket_accepts_its_rate_and_all_requests_arrive() -> None:
    network = StorageNetwork(bucket_requests_per_s=10.0)
    result = run(
        scenario(network=network, work=Work.of(Round(5, 50.0)), loader=Loader(batch=4, in_flight=4), pieces=40)
    )
    assert result.requests - result.refused == 200
    assert result.refused > 0
    assert result.seconds >= (200 - 10) / 10
    assert result.bytes == pytest.approx(40 * 50)


def test_steps_hide_the_loader_but_for_the_first_batch() -> None:
    row = simulate(scenario(step_time_s=4.0, pieces=10))[0]
    assert row["seconds"] == pytest.approx(2 + 10 * 4)
    assert row["stall_share"] == pytest.approx(2 / 42)
    assert row["steady"]["stall_share"] == pytest.approx(0, abs=1e-9)


def test_steps_that_take_no_time_have_no_stall() -> None:
    assert simulate(scenario())[0]["stall_share"] is None


def test_ranks_that_wait_for_one_another_take_at_least_as_long() -> None:
    latency = Latency(median_s=1.0, p99_s=6.0)
    some = scenario(
        cluster=SimulatedCluster(nodes=8),
        network=StorageNetwork(latency=latency),
        loader=Loader(prefetch=0),
        pieces=160,
        step_time_s=1.0,
    )
    assert run(some).seconds > run(replace(some, sync=False)).seconds
    same = replace(some, network=StorageNetwork(latency=Latency(median_s=1.0)))
    assert run(same).seconds == pytest.approx(run(replace(same, sync=False)).seconds)


def test_uneven_shares_end() -> None:
    result = run(
        scenario(cluster=SimulatedCluster(nodes=3), loader=Loader(batch=2, workers=2), pieces=19, step_time_s=1.0)
    )
    assert (result.requests, result.steps) == (19, 4)


def test_same_seed_gives_the_same_run() -> None:
    some = scenario(network=StorageNetwork(latency=Latency(median_s=1, p99_s=3), stream_bytes_per_s=10.0), pieces=30)
    assert run(some) == run(some)
    assert run(some).seconds != run(replace(some, seed=1)).seconds


def test_latency_has_the_median_and_the_percentile_that_were_asked_for() -> None:
    drawn = Latency(median_s=0.03, p99_s=0.15).draw_longest(np.random.default_rng(0), 200_000, 1)
    assert np.median(drawn) == pytest.approx(0.03, rel=0.02)
    assert np.quantile(drawn, 0.99) == pytest.approx(0.15, rel=0.05)
    assert drawn.mean() == pytest.approx(Latency(median_s=0.03, p99_s=0.15).mean_s(), rel=0.02)


def test_cache_hit_rate_equals_its_share_of_the_data() -> None:
    some = scenario(cluster=SimulatedCluster(nodes=4, cache_bytes=500.0), pieces=400, dataset_bytes=4000.0, epochs=3)
    rows = simulate(some)
    # Each node reads a quarter of the data in the first epoch, of which its cache keeps half: an eighth of all.
    assert [row["hit_share"] for row in rows] == pytest.approx([0.0, 0.125, 0.125], abs=0.05)
    assert rows[1]["bytes"] == pytest.approx(10 * 400 * (1 - rows[1]["hit_share"]))
    all_of_it = replace(some, cluster=SimulatedCluster(nodes=4, cache_bytes=4000.0))
    assert simulate(all_of_it, warm=True)[0]["requests"] == 0


rounds = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=2)


@st.composite
def scenarios(draw: Any) -> Scenario:
    workers = draw(st.integers(0, 2))
    limit = st.one_of(st.floats(2, 40), st.just(math.inf))
    return scenario(
        cluster=SimulatedCluster(
            nodes=draw(st.integers(1, 3)), ranks=draw(st.integers(1, 2)), cores=draw(st.floats(0.5, 4))
        ),
        network=StorageNetwork(
            latency=Latency(median_s=draw(st.sampled_from([0.0, 0.1, 1.0]))),
            stream_bytes_per_s=draw(st.floats(1, 20)),
            link_bytes_per_s=draw(limit),
            bucket_bytes_per_s=draw(limit),
        ),
        loader=Loader(
            batch=draw(st.integers(1, 3)),
            workers=workers,
            prefetch=draw(st.integers(1 if workers else 0, 2)),
            in_flight=draw(st.integers(1, 4)),
            ahead=draw(st.booleans()),
            connections=draw(st.integers(1, 6)),
        ),
        work=Work.of(*[Round(k, float(size)) for k, size in draw(rounds)], cpu_s=draw(st.sampled_from([0.0, 0.5]))),
        pieces=draw(st.integers(6, 14)),
        step_time_s=draw(st.sampled_from([0.0, 0.7])),
        sync=draw(st.booleans()),
    )


@settings(max_examples=25, deadline=None)
@given(scenarios())
def test_every_byte_is_read_once(some: Scenario) -> None:
    result = run(some)
    assert result.bytes == pytest.approx(some.pieces * some.work.bytes)
    assert result.requests == some.pieces * some.work.requests
    assert result.cpu_s == pytest.approx(some.pieces * some.work.cpu_s)
    assert result.seconds >= result.steps * some.step_time_s - 1e-9


def depends_on_a_tie(some: Scenario) -> bool:
    """Return whether tiny changes of the rates change the epoch: two things then happen at the same time, their order
    matters, and rounding decides it."""

    def run_scaled(change: float) -> float:
        network, cluster = some.network, some.cluster
        network = replace(
            network,
            stream_bytes_per_s=network.stream_bytes_per_s * (1 + change),
            link_bytes_per_s=network.link_bytes_per_s * (1 + 2 * change),
            bucket_bytes_per_s=network.bucket_bytes_per_s * (1 + 3 * change),
        )
        cluster = replace(cluster, cores=cluster.cores * (1 - change))
        return run(replace(some, network=network, cluster=cluster)).seconds

    return run_scaled(1e-7) != pytest.approx(run_scaled(-1e-7), rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(scenarios())
def test_clocks_give_the_epoch_that_plain_sharing_gives(some: Scenario) -> None:
    assume(not depends_on_a_tie(some))
    fast = run(some)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epoch, "FairSharing", PlainSharing)
        plain = run(some)
    assert fast.seconds == pytest.approx(plain.seconds, rel=1e-6)
    assert fast.busy_share == pytest.approx(plain.busy_share, rel=1e-6, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(scenarios())
def test_requests_that_travel_together_are_those_that_travel_alone_where_latency_is_constant(some: Scenario) -> None:
    assume(not depends_on_a_tie(some))
    together, alone = run(some), run(replace(some, coalesce=False))
    assert together.seconds == pytest.approx(alone.seconds, rel=1e-6)


def test_requests_that_travel_together_wait_a_little_longer_where_latency_varies() -> None:
    some = scenario(
        network=StorageNetwork(latency=Latency(median_s=0.03, p99_s=0.15), stream_bytes_per_s=100e6),
        work=Work.of(Round(20, 2e6)),
        loader=Loader(batch=4, in_flight=8, ahead=True, prefetch=0, connections=64),
        pieces=800,
    )
    ratio = run(some).seconds / run(replace(some, coalesce=False)).seconds
    assert 1.0 <= ratio < 1.35


@pytest.mark.parametrize("p99_s", [0.0, 0.2])
def test_some_of_many_nodes_behave_as_all(p99_s: float) -> None:
    """Results are equal without random draws and close with them, because fewer ranks wait for a batch."""
    whole = scenario(
        cluster=SimulatedCluster(nodes=48, cores=1),
        network=StorageNetwork(
            latency=Latency(median_s=0.05, p99_s=p99_s),
            stream_bytes_per_s=10.0,
            link_bytes_per_s=15.0,
            bucket_bytes_per_s=400.0,
        ),
        loader=Loader(batch=2, workers=2, in_flight=2, ahead=True),
        work=Work.of(Round(2, 1.0), cpu_s=0.05),
        pieces=48 * 2 * 30,
        step_time_s=0.1,
    )
    all_rows, some_rows = simulate(whole)[0], simulate(whole, nodes=12)[0]
    tolerance = 0.03 if p99_s else 1e-6
    for name in ("seconds", "samples", "samples_per_s", "mean_gbps", "max_gbps", "requests", "cpu_s"):
        assert some_rows[name] == pytest.approx(all_rows[name], rel=tolerance), name


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SimulatedCluster(nodes=0),
        lambda: SimulatedCluster(nodes=1, cores=0),
        lambda: SimulatedCluster(nodes=1, cores=math.nan),
        lambda: SimulatedCluster(nodes=1, cache_bytes=-1),
        lambda: Latency(median_s=-1),
        lambda: Latency(median_s=0.1, p99_s=0.01),
        lambda: StorageNetwork(link_bytes_per_s=0),
        lambda: StorageNetwork(bucket_requests_per_s=math.nan),
        lambda: Loader(batch=0),
        lambda: Loader(workers=1, prefetch=0),
        lambda: Round(-1, 0),
        lambda: Work.of(Round(1, 1.0), cpu_s=-1.0),
        lambda: Work(kinds=((0.5, ()),)),
        lambda: scenario(step_time_s=-1.0),
        lambda: scenario(step_time_s=math.nan),
        lambda: scenario(pieces=0),
        lambda: scenario(cluster=SimulatedCluster(nodes=5)),
        lambda: scenario(window_s=0),
    ],
)
def test_invalid_settings_are_reported(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        wrong()
