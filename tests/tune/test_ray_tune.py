"""Test the decisions around Ray, without a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from tests.train import tiny_runs
from voxlane.cli.main import main
from voxlane.tune.capacity import TrialCapacity
from voxlane.tune.ray_tune import Training, _add_cache, _LedgerASHA, explain_death
from voxlane.tune.space import TuneConfig
from voxlane.tune.trials import Trial


@pytest.mark.parametrize(
    ("error", "state", "phrase"),
    [
        (OutOfMemoryError("Task was killed due to the node running low on memory."), "infeasible", "ran out of memory"),
        (ActorDiedError(), "lost", "died"),
        (None, "lost", "went away"),
    ],
)
def test_death_of_a_process(error: Exception | None, state: str, phrase: str) -> None:
    explained, reason = explain_death(error)
    assert explained == state
    assert phrase in reason


@pytest.mark.parametrize(
    ("data", "cache", "configured", "folder"),
    [
        ("gs://bkt/data", "auto", None, "voxlane-cache-"),
        ("file:///data", "auto", None, None),
        ("file:///data", "/disk/cache", None, "/disk/cache"),
        ("gs://bkt/data", None, None, None),
        ("gs://bkt/data", "auto", "/mine", "/mine"),
    ],
)
def test_trials_of_a_machine_share_a_cache(
    data: str, cache: str | None, configured: str | None, folder: str | None
) -> None:
    training = Training(data, None, TrialCapacity(1, 1, 1, 0, True), cache)
    loader = _add_cache({"loader": {"in_flight": 4, "disk_cache": configured}}, training)["loader"]
    assert loader["in_flight"] == 4
    if folder == "voxlane-cache-":
        assert os.path.basename(loader["disk_cache"]) == f"voxlane-cache-{os.getuid()}"
    else:
        assert loader["disk_cache"] == folder


class RayTrial:
    """The part of Ray's trial that a scheduler uses."""

    def __init__(self, number: int) -> None:
        self.config = {"number": number}


def make_asha(earlier: list[Trial]) -> _LedgerASHA:
    return _LedgerASHA(TuneConfig(grace_epochs=1, reduction=2), 4, earlier)


def rungs(scheduler: _LedgerASHA) -> dict[int, dict[int, float]]:
    return {int(rung): recorded for rung, recorded in scheduler._brackets[0]._rungs}


def test_asha_is_restored_after_a_kill() -> None:
    live, trials = make_asha([]), []
    for number in range(4):
        curve = [(epoch, 0.1 * number + 0.01 * epoch) for epoch in range(1, 5)]
        trials.append(Trial(str(number), number, {}, "done", curve=curve))
        live.on_trial_add(None, RayTrial(number))
        for epoch, dice in curve:
            live.on_trial_result(None, RayTrial(number), {"epoch": epoch, "dice": dice})
    restored = make_asha(trials)
    assert rungs(restored) == rungs(live)
    assert rungs(restored)[2][3] == pytest.approx(0.32)
    # A trial that starts again was compared at this rung before, and is not compared a second time.
    restored.on_trial_add(None, RayTrial(3))
    assert restored.on_trial_result(None, RayTrial(3), {"epoch": 2, "dice": 0.0}) == "CONTINUE"
    restored.on_trial_add(None, RayTrial(4))
    assert restored.on_trial_result(None, RayTrial(4), {"epoch": 2, "dice": 0.0}) == "STOP"


def test_trial_that_validates_rarely_is_compared_once_per_rung() -> None:
    scheduler = make_asha([Trial("0", 0, {}, "running", curve=[(3, 0.5)])])
    scheduler.on_trial_result(None, RayTrial(0), {"epoch": 3, "dice": 0.5})
    assert rungs(scheduler) == {4: {}, 2: {0: 0.5}, 1: {}}, "not at the rung below with a later score"


def test_command_line_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tiny_runs.prepare_balls(tmp_path)
    file = tmp_path / "space.yaml"
    file.write_text("optimizer: {lr: {uniform: [0.1, 1]}}")
    for number, (arguments, phrase) in enumerate(
        [
            ([str(file), data, "optimizer.lr={loguniform: [0, 1]}"], "optimizer.lr: loguniform from 0"),
            ([str(tmp_path / "none.yaml"), data], "cannot read the config file"),
            ([str(file), data, "--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
            ([str(file), str(tmp_path)], str(tmp_path)),
            ([str(file), data, "--resume"], "no search found"),
            ([str(file), data, "--trials", "0"], "tune.trials"),
        ]
    ):
        assert main(["tune", *arguments, "--run", str(tmp_path / f"out{number}")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("voxlane: ")
        assert phrase in line
