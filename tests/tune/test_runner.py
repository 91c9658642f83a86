"""Searches on a real Ray: early stops, grids, folds, ranks, trouble, and going on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train import made
from tests.tune import works
from tests.tune.spaces import space
from voxlane.errors import ClusterError, ConfigError, TuneError
from voxlane.launch.cluster import cluster
from voxlane.train import config as configs
from voxlane.tune.runner import load, tune
from voxlane.tune.trials import Search, Trial

ROOT = Path(__file__).parents[2]
QUICK = {"scheduler": "asha", "grace_epochs": 1, "reduction": 2, "search": "random"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made.prepared(tmp_path_factory.mktemp("tune"))


@pytest.fixture(scope="module")
def on_ray() -> Iterator[None]:
    """A Ray of two CPUs, for all tests here; its workers find the tests."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), before or ""])
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with cluster(cpus=2):
        yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def history(trial: Trial, fold: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(trial.run[7:], fold, "history.json").read_text())
    return found


def states(search: Search) -> list[str]:
    return [trial.state for trial in search.trials]


@pytest.mark.cluster
def test_asha_stops_what_falls_behind_and_the_best_can_be_trained(
    on_ray: None, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    search = tune(space({**QUICK, "trials": 8}, base_features={"choice": [2, 4]}), data, str(out), command=["voxlane"])
    assert set(states(search)) == {"done", "stopped"}
    assert len(search.trials) == 8
    for trial in search.trials:
        entries = history(trial)
        assert [(e["epoch"] + 1, e["mean_dice"]) for e in entries] == trial.curve, "stopped where it was told to"
        assert trial.epochs == len(entries) == (4 if trial.state == "done" else len(trial.curve))
        assert (Path(trial.run[7:]) / "checkpoints" / "last.ckpt").exists()
    best = search.best
    assert best is not None
    assert best.dice == max(dice for trial in search.trials for _, dice in trial.curve)
    assert load(str(out)) == search
    config = configs.build(yaml.safe_load((out / "best.yaml").read_text()))
    assert config.optimizer.lr == best.params["optimizer.lr"]
    assert config.base_features == best.params["base_features"]
    told = json.loads((out / "best.json").read_text())
    assert told["params"] == best.params
    assert all(Path(uri[7:]).exists() for uri in told["checkpoints"])
    assert "<html" in (out / "report.html").read_text()
    assert any((out / "tensorboard").rglob("*tfevents*"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 trials, 2 at once with 1 CPU each"
    assert sum(line.startswith("trial 000") for line in lines) == 8
    with pytest.raises(TuneError, match=r"a search is here already.*--resume"):
        tune(space(QUICK), data, str(out))


@pytest.mark.cluster
def test_workers_are_used_again_and_asha_counts_by_epoch(on_ray: None, data: str, tmp_path: Path) -> None:
    values = space({**QUICK, "trials": 12, "max_concurrent": 1})
    search = tune(values, data, str(tmp_path / "out"), progress=False, work=works.Scored(tmp_path))
    pids = [line for file in tmp_path.glob("*.pid") for line in file.read_text().split()]
    assert len(pids) == 12
    assert len(set(pids)) == 1
    # One after another: each is compared at epochs 1, 2 and 4 with all that came so far, by their median.
    seen: dict[int, list[float]] = {1: [], 2: [], 4: []}
    for trial in search.trials:
        score = trial.params["optimizer.lr"]
        expected = 4
        for rung, before in seen.items():
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
def test_a_grid_tries_every_combination(on_ray: None, data: str, tmp_path: Path) -> None:
    fields = {"optimizer": {"name": {"grid": ["sgd", "adamw"]}, "lr": 0.01}, "base_features": {"grid": [2, 4]}}
    search = tune(space({"scheduler": "none"}, epochs=1, **fields), data, str(tmp_path / "out"), progress=False)
    assert states(search) == ["done"] * 4
    tried = {(trial.params["optimizer.name"], trial.params["base_features"]) for trial in search.trials}
    assert tried == {(name, features) for name in ("sgd", "adamw") for features in (2, 4)}


@pytest.mark.cluster
def test_folds_advance_together(on_ray: None, data: str, tmp_path: Path) -> None:
    search = tune(space({**QUICK, "trials": 4, "folds": [0, 1]}), data, str(tmp_path / "out"), progress=False)
    assert set(states(search)) == {"done", "stopped"}
    for trial in search.trials:
        a, b = history(trial, "fold_0"), history(trial, "fold_1")
        assert len(a) == len(b) == trial.epochs
        means = [
            (x["epoch"] + 1, pytest.approx((x["mean_dice"] + y["mean_dice"]) / 2)) for x, y in zip(a, b, strict=True)
        ]
        assert trial.curve == means
    told = json.loads((tmp_path / "out" / "best.json").read_text())
    assert [Path(uri).parts[-3] for uri in told["checkpoints"]] == ["fold_0", "fold_1"]


@pytest.mark.cluster
def test_trials_of_two_workers(on_ray: None, data: str, tmp_path: Path) -> None:
    said = {**QUICK, "trials": 2, "workers_per_trial": 2, "max_concurrent": 1}
    search = tune(space(said, epochs=2), data, str(tmp_path / "out"), progress=False)
    for trial in search.trials:
        assert trial.state in ("done", "stopped"), trial.why
        entries = history(trial)
        assert [entry["ranks"] for entry in entries] == [2] * trial.epochs
        assert [(e["epoch"] + 1, e["mean_dice"]) for e in entries] == trial.curve


@pytest.mark.cluster
def test_trouble_of_one_trial_is_recorded_and_the_others_go_on(on_ray: None, data: str, tmp_path: Path) -> None:
    said = {"search": "random", "scheduler": "none", "trials": 5}
    search = tune(space(said), data, str(tmp_path / "out"), progress=False, work=works.Troubled(tmp_path))
    assert states(search) == ["failed", "infeasible", "done", "done", "done"]
    assert search.trials[0].why == "ZeroDivisionError: division by zero"
    assert search.trials[1].why == "the GPU ran out of memory with batch=2"
    assert (tmp_path / "killed").exists()
    assert search.trials[2].curve[0] == (1, 0.1), "what was reported before the kill counts"
    assert search.trials[2].epochs == 4


@pytest.mark.cluster
def test_a_network_too_big_for_the_machine_is_infeasible(on_ray: None, data: str, tmp_path: Path) -> None:
    values = space({"max_concurrent": 1}, epochs=1, optimizer={}, base_features={"grid": [2, 3_000_000]})
    search = tune(values, data, str(tmp_path / "out"), progress=False)
    assert states(search) == ["done", "infeasible"]
    assert "ran out of memory" in search.trials[1].why


@pytest.mark.cluster
def test_a_search_whose_trials_all_fail_alike_ends(on_ray: None, data: str, tmp_path: Path) -> None:
    values = space({"search": "random", "trials": 50, "max_concurrent": 1})
    with pytest.raises(TuneError, match=r"none of 3 trials has a Dice: OSError: .*No space left on device"):
        tune(values, data, str(tmp_path / "out"), progress=False, work=works.full_disk)
    assert states(load(str(tmp_path / "out"))) == ["failed"] * 3
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize(
    ("tune_said", "more", "error", "message"),
    [
        ({"cpus_per_trial": 99}, {}, ClusterError, "a trial wants 99 CPU, the cluster has 2 CPU"),
        ({"workers_per_trial": 2}, {"batch": 3}, ConfigError, "batch"),
        ({"folds": [0, 7]}, {}, ConfigError, "fold: 7 of a dataset with folds 0 to 1"),
        ({}, {"patch": {"choice": [[16, 16, 16], [5, 5, 5]]}}, ConfigError, r"patch=\[5, 5, 5\]"),
    ],
)
def test_what_no_trial_could_do_is_said_before_the_first(
    on_ray: None, data: str, tmp_path: Path, tune_said: Any, more: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tune(space(tune_said, **more), data, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists(), "so that the same command, mended, begins it"


def test_a_resumed_search_keeps_its_space(on_ray: None, data: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    said = {**QUICK, "trials": 1}
    work = works.Scored(tmp_path)
    tune(space(said), data, out, progress=False, work=work)
    with pytest.raises(ConfigError, match=r"tune\.reduction: a search that is resumed keeps it"):
        tune(space({**said, "reduction": 4}), data, out, resume=True)
    with pytest.raises(ConfigError, match="epochs: a search that is resumed keeps it"):
        tune(space(said, epochs=5), data, out, resume=True)
    more = tune(space({**said, "trials": 3}), data, out, resume=True, progress=False, work=work)
    assert len(more.trials) == 3
    assert tune(space({**said, "trials": 3}), data, out, resume=True, progress=False, work=work) == more
    with pytest.raises(TuneError, match="no search is here"):
        tune(space(said), data, str(tmp_path / "other"), resume=True)


# -- a killed driver ---------------------------------------------------------------------------------------------------


def _command(data: str, out: Path, file: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "voxlane.cli.main", "tune", str(file), data, "--run", str(out), *more]


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_killed_driver_goes_on_where_its_trials_were(data: str, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "space.yaml"
    values = space({"trials": 2, "search": "random", "scheduler": "none", "max_concurrent": 1}, epochs=12)
    file.write_text(yaml.safe_dump(values))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    running = subprocess.Popen(_command(data, out, file), env=environment, start_new_session=True)
    deadline = time.monotonic() + 150
    while not (out / "tune.json").exists() or not load(str(out)).trials or load(str(out)).trials[0].epochs < 3:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    killed = load(str(out))
    assert killed.trials[0].state == "running"
    before = history(killed.trials[0])
    done = subprocess.run(
        _command(data, out, file, "--resume"), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    search = load(str(out))
    assert states(search) == ["done", "done"]
    after = history(search.trials[0])
    assert [entry["epoch"] for entry in after] == list(range(12))
    assert after[: len(before) - 1] == before[:-1], "what had its checkpoint is not done again"
    assert [epoch for epoch, _ in search.trials[0].curve] == list(range(1, 13))
    assert "2 trials (2 done)" in done.stdout
    assert f"best: trial {search.best.id}" in done.stdout  # type: ignore[union-attr]
