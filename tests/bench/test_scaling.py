"""Test `voxlane bench scaling`: its plan, a simulated step, and whole benchmarks as a user runs them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train import tiny_runs
from voxlane.bench.ranks import compute_cpu_share
from voxlane.bench.scaling import report as scaling_report
from voxlane.bench.scaling import simulated_step
from voxlane.bench.scaling.measure import PointTimes, SearchTimes, build_config, combine_ranks, from_history
from voxlane.bench.scaling.rank import RankTimes, check_weights
from voxlane.bench.scaling.settings import ScalingPoint, ScalingSettings, parse_counts, plan_measurements
from voxlane.errors import ConfigError, CorruptError
from voxlane.model.networks import build as build_network
from voxlane.volume.plan import Network

SETTING = ScalingSettings(worker_counts="1,2,4", steps=10, warmup=1, repeat=2, launcher="local", trial_time_s=1.0)
NETWORK = Network(features=(4, 8), strides=((1, 1, 1), (2, 2, 2)), kernels=((3, 3, 3), (3, 3, 3)), convs=1)


def changed(**fields: Any) -> ScalingSettings:
    return dataclasses.replace(SETTING, **fields)


# -- what is measured ------------------------------------------------------------------------------------------------


def test_points_are_interleaved_and_shared_points_are_measured_once() -> None:
    result = list(plan_measurements(SETTING))
    weak = [ScalingPoint(1, 2, 10), ScalingPoint(2, 2, 10), ScalingPoint(4, 2, 10)]
    strong = [ScalingPoint(1, 8, 10), ScalingPoint(2, 4, 10)]  # and 4 workers x 2 patches, which is weak's too
    assert [point for repetition, point in result if repetition == 0] == [*weak, *strong]
    assert [point for repetition, point in result if repetition == 1] == [*weak[1:], *strong, weak[0]]
    assert list(plan_measurements(changed(worker_counts=None, trials=1, launcher="ray"))) == []


def test_step_time_grows_with_its_patches() -> None:
    assert SETTING.step_s(2) == pytest.approx(0.2)
    assert SETTING.step_s(8) == pytest.approx(0.8)


def test_numbers() -> None:
    assert parse_counts("4, 1,2,2", "--workers") == (1, 2, 4)
    for text in ("", "0", "1,", "two", "-1"):
        with pytest.raises(ConfigError, match="--workers"):
            parse_counts(text, "--workers")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps: "),
        ({"warmup": 0}, "warmup: "),
        ({"step_time_s": 0.0}, "step_time_s: "),
        ({"trial_time_s": -1.0}, "trial_time_s: "),
        ({"trials": -1}, "trials: "),
        ({"total_batch": 6}, "--global-batch 6 cannot be divided evenly among 4 workers"),
        ({"target_dice": 0.8}, "Add --real"),
        ({"target_dice": 1.2, "real": True}, "target_dice: "),
        ({"address": "auto"}, "--address names a Ray cluster"),
        ({"trials": 2}, "--trials needs a Ray cluster"),
        ({"address": "auto", "launcher": "ray"}, "Give DATA"),
        ({"address": "auto", "launcher": "ray", "data": "gs://b/d", "real": True}, "Give --run URI"),
    ],
)
def test_conflicting_settings_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(**fields)
    assert message in str(caught.value)


def test_configs_that_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match="batch: the benchmark sets it"):
        build_config(changed(overrides=("batch=2",)))
    with pytest.raises(ConfigError, match="epochs=2 or more"):
        build_config(changed(real=True, overrides=("epochs=1",)))
    with pytest.raises(ConfigError, match="Give a fold"):
        build_config(changed(real=True, target_dice=0.5, overrides=("fold=null",)))
    assert build_config(SETTING).preset == "small"


def test_cpu_share_that_fits_all_workers() -> None:
    assert compute_cpu_share([2.0], 1) == 1.0
    assert compute_cpu_share([2.0], 8) == 0.25
    assert compute_cpu_share([2.0], 3) == 0.66
    assert compute_cpu_share([1.0, 1.0, 1.0], 4) == 0.5  # not 0.75: no worker lies on two machines


# -- the simulated accelerator ---------------------------------------------------------------------------------------


def test_gradients_come_last_layer_first_and_the_last_of_them_with_the_end_of_the_step() -> None:
    shares = simulated_step.compute_ready_shares([1.0, 2.0, 1.0])
    assert shares == pytest.approx([1.0, 1 / 3 + 2 / 3 * 3 / 4, 1 / 3 + 2 / 3 / 4])


def test_multiplications_are_those_of_the_convolutions() -> None:
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ConvTranspose3d(4, 3, 2, 2), nn.Conv3d(3, 1, 1))
    costs = simulated_step.count_multiplications(network, 2, (8, 8, 8))
    assert costs == {"0": 8**3 * 4 * 2 * 27, "1": 16**3 * 3 * 4, "2": 16**3 * 3}


def test_every_parameter_has_its_place_in_the_step() -> None:
    with torch.device("meta"):
        network = build_network(NETWORK, 1, 3)
    costs = simulated_step.count_multiplications(network, 1, (16, 16, 16))
    parameter_names = {
        f"{name}.{inner}" for name in costs for inner, _ in network.get_submodule(name).named_parameters()
    }
    assert parameter_names == {name for name, _ in network.named_parameters()}
    assert min(costs.values()) > 0


def test_step_takes_the_set_time_and_gives_the_set_gradients() -> None:
    with torch.device("meta"):
        costs = simulated_step.count_multiplications(build_network(NETWORK, 1, 3), 1, (16, 16, 16))
    network = simulated_step.SimulatedNetwork(build_network(NETWORK, 1, 3), costs, step_s=0.3)
    network.set_gradient(2.5)
    start = time.perf_counter()
    loss = network(torch.rand(2, 1, 16, 16, 16))
    launched = time.perf_counter() - start
    arrived: list[float] = []
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: arrived.append(time.perf_counter() - start))
    loss.backward()
    assert arrived[-1] >= 0.3
    assert launched < arrived[0]
    assert 0.1 <= arrived[0] < arrived[-1]  # the forward pass has a third; then one after the other
    assert network.late_s() >= 0
    assert all(torch.equal(p.grad, torch.full_like(p, 2.5)) for p in network.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in network.parameters())


def test_wrong_weights_after_averaging_are_detected() -> None:
    before = [torch.zeros(3), torch.ones(2)]
    moved = 10 * simulated_step.LEARNING_RATE * 2.5  # 4 ranks: the mean of 1, 2, 3, 4
    check_weights(before, [nn.Parameter(old - moved) for old in before], 10, rank=0, world_size=4)
    alone = [nn.Parameter(old - 10 * simulated_step.LEARNING_RATE) for old in before]  # only rank 0's own
    with pytest.raises(CorruptError, match="rank 0"):
        check_weights(before, alone, 10, rank=0, world_size=4)


# -- what it comes to ------------------------------------------------------------------------------------------------


def rank_times(**fields: Any) -> RankTimes:
    base: dict[str, Any] = {
        "entered": 105.0,
        "setup_s": 1.0,
        "first_s": 2.0,
        "steps_s": [0.2, 0.2, 0.4],
        "waited_s": 0.1,
        "exposed_s": 0.2,
        "cpu_s": 0.3,
        "positions": [],
    }
    return RankTimes(**(base | fields))


def test_slowest_rank_determines_the_result() -> None:
    ranks = [rank_times(), rank_times(entered=107.0, steps_s=[0.2, 0.3, 0.5], setup_s=1.5, waited_s=0.3)]
    fields = combine_ranks(ScalingPoint(2, 4, 3), ranks, launched_at=100.0)
    result = PointTimes(workers=2, batch=4, repetition=0, total_s=25.0, load_1m=0.5, **fields)
    assert result.launch_s == pytest.approx(7.0)
    assert result.setup_s == 1.5
    assert result.steady_s == pytest.approx(1.0)
    assert result.patches == 24
    assert result.patches_per_s == pytest.approx(24.0)
    assert result.wait_s == pytest.approx(0.2)
    assert result.cpu_s == pytest.approx(0.6)


def measured(workers: int, batch: int, repetition: int, seconds: float, **fields: Any) -> PointTimes:
    base: dict[str, Any] = {
        "launch_s": 5.0,
        "setup_s": 1.0,
        "first_s": 1.0,
        "steady_s": seconds,
        "patches": 10 * workers * batch,
        "total_s": 20.0,
        "wait_s": seconds / 10,
        "load_1m": 0.0,
    }
    return PointTimes(workers=workers, batch=batch, repetition=repetition, **(base | fields))


def test_efficiency_is_speed_up_over_workers_within_each_repetition() -> None:
    setting = changed(worker_counts="1,2", total_batch=4)
    result = [
        *(measured(1, 2, 0, 2.0), measured(2, 2, 0, 2.5), measured(1, 4, 0, 4.0)),
        # The second time all was half as fast: that is the machine, not the scaling.
        *(measured(1, 2, 1, 4.0), measured(2, 2, 1, 5.0), measured(1, 4, 1, 8.0)),
    ]
    weak = scaling_report.summarize_workers(setting, "weak", result)
    assert [row["workers"] for row in weak] == [1, 2]
    assert weak[0]["efficiency"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert weak[1]["speed_up"]["median"] == pytest.approx(1.6)
    assert weak[1]["efficiency"] == pytest.approx({"median": 0.8, "min": 0.8, "max": 0.8})
    assert weak[1]["patches_per_s"] == pytest.approx({"median": 12.0, "min": 8.0, "max": 16.0})
    assert weak[1]["start_s"]["median"] == 6.0
    strong = scaling_report.summarize_workers(setting, "strong", result)
    assert [row["batch"] for row in strong] == [4, 2]
    assert strong[1]["efficiency"]["median"] == pytest.approx(0.8)


def test_time_to_a_dice_counts_only_where_every_repetition_came_there() -> None:
    setting = changed(worker_counts="1,2", mode="weak", real=True, target_dice=0.7)
    curve = [(10.0, 0.5), (20.0, 0.72), (30.0, 0.71)]
    result = [measured(1, 2, r, 2.0, dice=curve) for r in range(2)]
    result += [measured(2, 2, 0, 2.0, dice=curve), measured(2, 2, 1, 2.0, dice=curve[:1])]
    single_row, double_row = scaling_report.summarize_workers(setting, "weak", result)
    assert single_row["to_dice_s"] == {"median": 20.0, "min": 20.0, "max": 20.0}
    assert (double_row["to_dice_s"], double_row["reached"]) == (None, 1)
    assert single_row["best_dice"] == 0.72


def test_first_epoch_and_validation_of_a_run_are_left_out() -> None:
    entry = {"patches": 100, "wait_share": 0.5, "mean_dice": None}
    history = [
        {**entry, "patches_per_s": 5.0, "seconds": 30.0},
        {**entry, "patches_per_s": 10.0, "seconds": 45.0, "mean_dice": 0.4},
        {**entry, "patches_per_s": 20.0, "seconds": 50.0},
    ]
    fields = from_history(history, launch_s=4.0, inside_s=57.0)
    result = PointTimes(workers=2, batch=5, repetition=0, total_s=62.0, load_1m=0.0, **fields)
    assert (result.first_s, result.steady_s, result.patches) == (20.0, 15.0, 200)
    assert (result.setup_s, result.wait_s) == (7.0, 7.5)
    assert result.dice == [(45.0, 0.4)]
    assert result.seconds_to(0.4) == 45.0
    assert result.seconds_to(0.5) is None


def test_efficiency_of_a_search_is_relative_to_single_trials() -> None:
    result = SearchTimes(
        concurrent=2,
        trials=8,
        repetition=0,
        trial_s=10.0,
        makespan_s=50.0,
        first_s=1.0,
        total_s=60.0,
        busy_s=95.0,
    )
    assert result.efficiency == pytest.approx(0.8)  # 80 s of trials over 2 x 50 s, though they say they were busy 95 s
    assert result.overhead_s == pytest.approx(2.5)
    (row,) = scaling_report.summarize_searches([result])
    assert (row["ideal_s"], row["makespan_s"]["median"]) == (40.0, 50.0)


# -- as a user runs it -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_runs.prepare_balls(tmp_path_factory.mktemp("data"))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "voxlane.cli.main", "bench", "scaling", *arguments]
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **quiet}, timeout=400, cwd=folder)


QUICK = ("--step-time", "0.05", "--steps", "4", "--warmup", "1", "--repeat", "1")


@pytest.mark.cluster
def test_weak_and_strong_on_local_ranks(tmp_path: Path, data: str) -> None:
    pytest.importorskip("matplotlib")
    done = run(tmp_path, data, "--workers", "1,2", "--launcher", "local", *QUICK, "patch=[16,16,16]")
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:3] for line in done.stdout.splitlines()[3:]]
    assert rows == [["weak", "1", "2"], ["weak", "2", "2"], ["strong", "1", "4"], ["strong", "2", "2"]]
    result = json.loads((tmp_path / "scaling-bench.json").read_text())
    assert [(m["workers"], m["batch"]) for m in result["measured"]] == [(1, 2), (2, 2), (1, 4)]
    for measured_point in result["measured"]:
        assert len(measured_point["steps_s"]) == 4
        assert min(measured_point["steps_s"]) >= 0.05 * measured_point["batch"] / 2
        assert measured_point["steady_s"] >= sum(measured_point["steps_s"]) - 1e-6
        assert (
            measured_point["total_s"]
            > measured_point["launch_s"]
            + measured_point["setup_s"]
            + measured_point["first_s"]
            + measured_point["steady_s"]
        )
    assert result["facts"]["patch"] == [16, 16, 16]
    assert result["hardware"]["cores"] == os.cpu_count()
    assert (tmp_path / "scaling-bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.cluster
def test_real_training_with_its_time_to_dice(tmp_path: Path, data: str) -> None:
    fields = ("epochs=2", "steps_per_epoch=2", "validation.every_epochs=1", "validation.max_cases=1")
    runs_folder = tmp_path / "runs"
    done = run(
        *(tmp_path, data, "--real", "--workers", "1", "--mode", "weak", "--launcher", "local", "--repeat", "1"),
        *("--target-dice", "1e-9", "--run", str(runs_folder), "--no-plot", *fields),
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "scaling-bench.json").read_text())["measured"]
    history = json.loads((runs_folder / "1-workers-2-patches-0" / "history.json").read_text())
    assert result["patches"] == history[1]["patches"] == 4
    assert result["dice"] == [[entry["seconds"], entry["mean_dice"]] for entry in history]
    assert "s to Dice 1e-09" in done.stdout


@pytest.mark.cluster
def test_workers_and_trials_on_ray(tmp_path: Path, data: str) -> None:
    done = run(
        *(tmp_path, data, "--workers", "2", "--mode", "weak", *QUICK, "--no-plot"),
        *("--trials", "2", "--concurrent", "2", "--trial-time", "0.5"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "scaling-bench.json").read_text())
    (point,) = result["measured"]
    assert (point["workers"], len(point["steps_s"])) == (2, 4)
    (searched,) = result["searches"]
    assert searched["makespan_s"] >= 0.5
    assert searched["busy_s"] >= 1.0
    assert 0 < result["trials"][0]["efficiency"]["median"] <= 1


def test_user_mistakes_give_one_line(tmp_path: Path) -> None:
    for arguments, message in (
        (["--workers", "0"], "--workers 0"),
        (["a", "b"], "unexpected argument 'b'"),
        (["--out", "nowhere/r.json"], "cannot write the result file"),
        (["--workers", "1", "no_such=1"], "no such field"),
        ([str(tmp_path), "--workers", "1", "--launcher", "local"], "there is no prepared dataset at this URI"),
    ):
        done = run(tmp_path, *arguments, "--no-plot")
        assert done.returncode == (2 if message.startswith("unexpected") else 1), done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
