"""What is decided around Ray, without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from tests.train import made
from voxlane.cli.main import main
from voxlane.tune.config import TuneConfig
from voxlane.tune.on_ray import Training, _cached, _Halving, death
from voxlane.tune.room import Room
from voxlane.tune.trials import Trial


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (OutOfMemoryError("Task was killed due to the node running low on memory."), "infeasible", "ran out of memory"),
        (ActorDiedError(), "lost", "died"),
        (None, "lost", "went away"),
    ],
)
def test_how_a_process_ended(error: Exception | None, state: str, words: str) -> None:
    found, why = death(error)
    assert found == state
    assert words in why


@pytest.mark.parametrize(
    ("data", "cache", "said", "folder"),
    [
        ("gs://bkt/data", "auto", None, "voxlane-cache-"),
        ("file:///data", "auto", None, None),
        ("file:///data", "/disk/cache", None, "/disk/cache"),
        ("gs://bkt/data", None, None, None),
        ("gs://bkt/data", "auto", "/mine", "/mine"),
    ],
)
def test_trials_of_a_machine_share_a_cache(data: str, cache: str | None, said: str | None, folder: str | None) -> None:
    training = Training(data, None, Room(1, 1, 1, 0, True), cache)
    found = _cached({"loader": {"in_flight": 4, "disk_cache": said}}, training)["loader"]
    assert found["in_flight"] == 4
    if folder == "voxlane-cache-":
        assert os.path.basename(found["disk_cache"]) == f"voxlane-cache-{os.getuid()}"
    else:
        assert found["disk_cache"] == folder


class Begun:
    """Ray's trial, as far as a scheduler looks at it."""

    def __init__(self, number: int) -> None:
        self.config = {"number": number}


def halving(before: list[Trial]) -> _Halving:
    return _Halving(TuneConfig(grace_epochs=1, reduction=2), 4, before)


def rungs(scheduler: _Halving) -> dict[int, dict[int, float]]:
    return {int(rung): recorded for rung, recorded in scheduler._brackets[0]._rungs}


def test_asha_knows_after_a_kill_what_it_knew_before() -> None:
    live, before = halving([]), []
    for number in range(4):
        curve = [(epoch, 0.1 * number + 0.01 * epoch) for epoch in range(1, 5)]
        before.append(Trial(str(number), number, {}, "done", curve=curve))
        live.on_trial_add(None, Begun(number))
        for epoch, dice in curve:
            live.on_trial_result(None, Begun(number), {"epoch": epoch, "dice": dice})
    again = halving(before)
    assert rungs(again) == rungs(live)
    assert rungs(again)[2][3] == pytest.approx(0.32)
    # One that is begun again was compared at this rung before, and is not once more.
    again.on_trial_add(None, Begun(3))
    assert again.on_trial_result(None, Begun(3), {"epoch": 2, "dice": 0.0}) == "CONTINUE"
    again.on_trial_add(None, Begun(4))
    assert again.on_trial_result(None, Begun(4), {"epoch": 2, "dice": 0.0}) == "STOP"


def test_a_trial_that_validates_seldom_is_compared_once_a_rung() -> None:
    scheduler = halving([Trial("0", 0, {}, "running", curve=[(3, 0.5)])])
    scheduler.on_trial_result(None, Begun(0), {"epoch": 3, "dice": 0.5})
    assert rungs(scheduler) == {4: {}, 2: {0: 0.5}, 1: {}}, "not at the rung below with a later score"


def test_mistakes_on_the_command_line_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = made.prepared(tmp_path)
    file = tmp_path / "space.yaml"
    file.write_text("optimizer: {lr: {uniform: [0.1, 1]}}")
    for number, (arguments, words) in enumerate(
        [
            ([str(file), data, "optimizer.lr={loguniform: [0, 1]}"], "optimizer.lr: loguniform from 0"),
            ([str(tmp_path / "none.yaml"), data], "cannot read the config file"),
            ([str(file), data, "--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
            ([str(file), str(tmp_path)], str(tmp_path)),
            ([str(file), data, "--resume"], "no search is here"),
            ([str(file), data, "--trials", "0"], "tune.trials"),
        ]
    ):
        assert main(["tune", *arguments, "--run", str(tmp_path / f"out{number}")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("voxlane: ")
        assert words in line
