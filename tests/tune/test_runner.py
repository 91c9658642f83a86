"""Test searches on a real Ray: early stops, grids, folds, failures, and resuming after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tune import fake_work
from tests.tune.spaces import space
from voxlane.errors import ClusterError, ConfigError, TuneError
from voxlane.train import config as configs
from voxlane.tune.runner import load_search, tune
from voxlane.tune.trials import Search, Trial

pytestmark = pytest.mark.timeout(900)  # a trial starts several processes, each of which takes long on a busy machine

ROOT = Path(__file__).parents[2]
QUICK = {"scheduler": "asha", "grace_epochs": 1, "reduction": 2, "search": "random"}


def read_history(trial: Trial, fold: str = "") -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(Path(trial.run[7:], fold, "history.json").read_text())
    return entries


def states(search: Search) -> list[str]:
    return [trial.state for trial in search.trials]


@pytest.mark.cluster
def test_asha_stops_bad_trials_and_the_best_config_can_be_trained(
    ray_2_cpus: None, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    search = tune(space({**QUICK, "trials": 8}, base_features={"choice": [2, 4]}), data, str(out), command=["voxlane"])
    assert set(states(search)) == {"done", "stopped"}
    assert len(search.trials) == 8
    for trial in search.trials:
        entries = read_history(trial)
        assert [(e["epoch"] + 1, e["mean_dice"]) for e in entries] == trial.curve, "stopped at the requested epoch"
        assert trial.epochs == len(entries) == (4 if trial.state == "done" else len(trial.curve))
        assert (Path(trial.run[7:]) / "checkpoints" / "last.ckpt").exists()
    best = search.best
    assert best is not None
    assert best.dice == max(dice for trial in search.trials for _, dice in trial.curve)
    assert load_search(str(out)) == search
    config = configs.build_config(yaml.safe_load((out / "best.yaml").read_text()))
    assert config.optimizer.lr == best.params["optimizer.lr"]
    assert config.base_features == best.params["base_features"]
    best_record = json.loads((out / "best.json").read_text())
    assert best_record["params"] == best.params
    assert all(Path(uri[7:]).exists() for uri in best_record["checkpoints"])
    assert "<html" in (out / "report.html").read_text()
    assert any((out / "tensorboard").rglob("*tfevents*"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 trials, 2 at once with 1 CPU each"
    assert sum(line.startswith("trial 000") for line in lines) == 8
    with pytest.raises(TuneError, match=r"a search already exists.*--resume"):
        tune(space(QUICK), data, str(out))


@pytest.mark.cluster
def test_worker_processes_are_reused_and_asha_counts_epochs(ray_2_cpus: None, data: str, tmp_path: Path) -> None:
    values = space({**QUICK, "trials": 12, "max_concurrent": 1})
    search = tune(values, data, str(tmp_path / "out"), progress=False, work=fake_work.Scored(tmp_path))
    pids = [line for file in tmp_path.glob("*.pid") for line in file.read_text().split()]
    assert len(pids) == 12
    assert len(set(pids)) == 1
    # Trials run one after another; each is compared at epochs 1, 2 and 4 with the median of all that came as far.
    scores: dict[int, list[float]] = {1: [], 2: [], 4: []}
    for trial in search.trials:
        score = trial.params["optimizer.lr"]
        expected = 4
        for rung, before in scores.items():
            below = bool(before) and score < _median(before)
            before.append(score)
            if below:
                expected = rung
                break
        assert trial.epochs == expected, trial
        assert trial.state == ("done" if expected == 4 else "stopped")


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@pytest.mark.cluster
def test_grid_tries_every_combination(ray_2_cpus: None, data: str, tmp_path: Path) -> None:
    fields = {"optimizer": {"name": {"grid": ["sgd", "adamw"]}, "lr": 0.01}, "base_features": {"grid": [2, 4]}}
    search = tune(space({"scheduler": "none"}, epochs=1, **fields), data, str(tmp_path / "out"), progress=False)
    assert states(search) == ["done"] * 4
    combinations = {(trial.params["optimizer.name"], trial.params["base_features"]) for trial in search.trials}
    assert combinations == {(name, features) for name in ("sgd", "adamw") for features in (2, 4)}


@pytest.mark.cluster
def test_folds_advance_together(ray_2_cpus: None, data: str, tmp_path: Path) -> None:
    search = tune(space({**QUICK, "trials": 4, "folds": [0, 1]}), data, str(tmp_path / "out"), progress=False)
    assert set(states(search)) == {"done", "stopped"}
    for trial in search.trials:
        a, b = read_history(trial, "fold_0"), read_history(trial, "fold_1")
        assert len(a) == len(b) == trial.epochs
        means = [
            (x["epoch"] + 1, pytest.approx((x["mean_dice"] + y["mean_dice"]) / 2)) for x, y in zip(a, b, strict=True)
        ]
        assert trial.curve == means
    best_record = json.loads((tmp_path / "out" / "best.json").read_text())
    assert [Path(uri).parts[-3] for uri in best_record["checkpoints"]] == ["fold_0", "fold_1"]


@pytest.mark.cluster
def test_failed_trials_are_recorded_and_others_continue(ray_2_cpus: None, data: str, tmp_path: Path) -> None:
    settings = {"search": "random", "scheduler": "none", "trials": 5}
    search = tune(space(settings), data, str(tmp_path / "out"), progress=False, work=fake_work.Failing(tmp_path))
    assert states(search) == ["failed", "infeasible", "done", "done", "done"]
    assert search.trials[0].reason == "ZeroDivisionError: division by zero"
    assert search.trials[1].reason == "the GPU ran out of memory with batch=2"
    assert (tmp_path / "killed").exists()
    assert search.trials[2].curve[0] == (1, 0.1), "epochs reported before the kill count"
    assert search.trials[2].epochs == 4


@pytest.mark.cluster
def test_too_large_network_is_infeasible(ray_2_cpus: None, data: str, tmp_path: Path) -> None:
    values = space({"max_concurrent": 1}, epochs=1, optimizer={}, base_features={"grid": [2, 3_000_000]})
    search = tune(values, data, str(tmp_path / "out"), progress=False)
    assert states(search) == ["done", "infeasible"]
    assert "ran out of memory" in search.trials[1].reason


@pytest.mark.cluster
def test_search_ends_if_all_trials_fail_for_one_reason(ray_2_cpus: None, data: str, tmp_path: Path) -> None:
    values = space({"search": "random", "trials": 50, "max_concurrent": 1})
    with pytest.raises(TuneError, match=r"none of 3 trials has a Dice: OSError: .*No space left on device"):
        tune(values, data, str(tmp_path / "out"), progress=False, work=fake_work.fill_disk)
    assert states(load_search(str(tmp_path / "out"))) == ["failed"] * 3
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize(
    ("settings", "fields", "error", "message"),
    [
        ({"cpus_per_trial": 99}, {}, ClusterError, "a trial needs 99 CPU, but the cluster has 2 CPU"),
        ({"workers_per_trial": 2}, {"batch": 3}, ConfigError, "batch"),
        ({"folds": [0, 7]}, {}, ConfigError, "fold: expected 0 to 1, got 7"),
        ({}, {"patch": {"choice": [[16, 16, 16], [5, 5, 5]]}}, ConfigError, r"patch=\[5, 5, 5\]"),
    ],
)
def test_impossible_searches_fail_before_the_first_trial(
    ray_2_cpus: None, data: str, tmp_path: Path, settings: Any, fields: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tune(space(settings, **fields), data, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists(), "so that the corrected command can start it"


def test_resumed_search_keeps_its_space(ray_2_cpus: None, data: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    settings = {**QUICK, "trials": 1}
    work = fake_work.Scored(tmp_path)
    tune(space(settings), data, out, progress=False, work=work)
    with pytest.raises(ConfigError, match=r"tune\.reduction cannot change when a search is resumed"):
        tune(space({**settings, "reduction": 4}), data, out, resume=True)
    with pytest.raises(ConfigError, match="epochs cannot change when a search is resumed"):
        tune(space(settings, epochs=5), data, out, resume=True)
    more = tune(space({**settings, "trials": 3}), data, out, resume=True, progress=False, work=work)
    assert len(more.trials) == 3
    assert tune(space({**settings, "trials": 3}), data, out, resume=True, progress=False, work=work) == more
    with pytest.raises(TuneError, match="no search found"):
        tune(space(settings), data, str(tmp_path / "other"), resume=True)


# -- killed driver ---------------------------------------------------------------------------------------------------


def _command(data: str, out: Path, file: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "voxlane.cli.main", "tune", str(file), data, "--run", str(out), *options]


def _trials_so_far(out: Path) -> list[Trial]:
    return load_search(str(out)).trials if (out / "tune.json").exists() else []


@pytest.mark.cluster
def test_search_of_a_killed_driver_resumes(data: str, tmp_path: Path) -> None:
    out, file, epochs = tmp_path / "out", tmp_path / "space.yaml", 60  # long enough to be killed on a busy machine
    values = space({"trials": 2, "search": "random", "scheduler": "none", "max_concurrent": 1}, epochs=epochs)
    file.write_text(yaml.safe_dump(values))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    running = subprocess.Popen(_command(data, out, file), env=environment, start_new_session=True)
    deadline = time.monotonic() + 600
    while not (trials := _trials_so_far(out)) or trials[0].epochs < 3:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    killed = load_search(str(out))
    assert killed.trials[0].state == "running"
    before = read_history(killed.trials[0])
    resumed = subprocess.run(
        _command(data, out, file, "--resume"), env=environment, capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr == ""
    search = load_search(str(out))
    assert states(search) == ["done", "done"]
    after = read_history(search.trials[0])
    assert [entry["epoch"] for entry in after] == list(range(epochs))
    assert after[: len(before) - 1] == before[:-1], "epochs with a checkpoint are not trained again"
    assert [epoch for epoch, _ in search.trials[0].curve] == list(range(1, epochs + 1))
    assert "2 trials (2 done)" in resumed.stdout
    assert f"best: trial {search.best.id}" in resumed.stdout  # type: ignore[union-attr]
