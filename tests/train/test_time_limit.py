"""Tests of max_minutes: where a run stops, what it leaves, its learning rate, and how it continues."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.train import tiny_runs
from tests.train.test_fit import same, weights
from voxlane.cli.main import main
from voxlane.errors import RunError, StoppedError
from voxlane.train.config import OptimizerConfig
from voxlane.train.fit import train
from voxlane.train.recorder import Recorder
from voxlane.train.run import Run
from voxlane.train.run_setup import is_done
from voxlane.train.segmenter import Segmenter, learning_rate_factor
from voxlane.train.time_limit import used_share

STEPS = 20
CONFIG = {**tiny_runs.CONFIG, "epochs": 4, "steps_per_epoch": 5, "validation": {"every_epochs": 4, "max_cases": 1}}
SECONDS = 1 / 60
"""A minute's share, because `clock` counts a step as a second."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_runs.prepare_balls(tmp_path_factory.mktemp("limit"))


@pytest.fixture(scope="module")
def straight(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a limit."""
    run = tmp_path_factory.mktemp("straight") / "run"
    train(data, str(run), CONFIG, progress=False)
    return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step take one second, and everything else no time."""
    monkeypatch.setattr(Recorder, "elapsed_s", property(lambda self: self._previous_s + self._steps))


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rate of every step."""
    step_rates: list[float] = []
    original = Segmenter.training_step

    def step(self: Any, *arguments: Any) -> Any:
        step_rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return original(self, *arguments)

    monkeypatch.setattr(Segmenter, "training_step", step)
    return step_rates


def history(run: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((run / "history.json").read_text())
    return entries


def saved_step(run: Path) -> int:
    return int(torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"])


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("steps", [7, 10])
def test_run_stops_at_the_step_and_ends_as_any_other(data: str, tmp_path: Path, steps: int, rates: list[float]) -> None:
    run = tmp_path / "run"
    train(data, str(run), {**CONFIG, "max_minutes": steps * SECONDS}, progress=False)
    assert saved_step(run) == steps
    entries = history(run)
    assert [entry["step"] for entry in entries] == [5, steps]
    assert entries[0]["mean_dice"] is None
    assert entries[1]["mean_dice"] is not None, "the end is validated"
    assert entries[1].get("cut") == (2 if steps == 7 else None)
    assert (run / "checkpoints/best.ckpt").exists()
    done = json.loads((run / "done.json").read_text())
    assert (done["steps"], done["planned_steps"]) == (steps, STEPS)
    assert len(rates) == steps
    assert rates[0] == pytest.approx(0.01)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.2 * rates[0], "the schedule ends with the time"


def test_validation_that_reaches_the_limit_is_the_last(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elapsed_s(self: Any) -> float:
        return float(self._steps + 100 * sum(entry["dice"] is not None for entry in self.history))

    monkeypatch.setattr(Recorder, "elapsed_s", property(elapsed_s))
    run = tmp_path / "run"
    validation = {"every_epochs": 2, "max_cases": 1}
    train(data, str(run), {**CONFIG, "validation": validation, "max_minutes": 50 * SECONDS}, progress=False)
    assert [(entry["step"], entry.get("cut")) for entry in history(run)] == [(5, None), (10, None)]
    assert saved_step(run) == 10
    assert json.loads((run / "done.json").read_text())["steps"] == 10


@pytest.mark.usefixtures("clock")
def test_run_with_enough_time_is_the_run_without_a_limit(data: str, straight: Path, tmp_path: Path) -> None:
    train(data, str(tmp_path / "run"), {**CONFIG, "max_minutes": (STEPS + 1) * SECONDS}, progress=False)
    assert same(weights(straight), weights(tmp_path / "run"))
    assert "max_minutes" not in json.loads((tmp_path / "run/done.json").read_text())


@pytest.mark.usefixtures("clock")
def test_run_that_was_cut_continues_in_its_epoch(data: str, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    limit = {"max_minutes": 7 * SECONDS}
    train(data, str(run), {**CONFIG, **limit}, progress=False)
    before = (run / "run.json").read_bytes()
    for changes in ({}, limit, {"max_minutes": 6 * SECONDS}, {"epochs": 9}):
        assert is_done(Run(str(run)), changes)
        with pytest.raises(
            RunError, match=r"ended the run after 7 of 20 steps\. Give a larger limit with max_minutes=N"
        ):
            train(data, str(run), changes, resume=True, progress=False)
    assert (run / "run.json").read_bytes() == before
    assert not is_done(Run(str(run)), {"max_minutes": None})
    train(data, str(run), {"max_minutes": 12 * SECONDS}, resume=True, progress=False)
    assert [entry["step"] for entry in history(run)] == [5, 10, 12]
    train(data, str(run), {"max_minutes": None}, resume=True, progress=False)
    assert Run(str(run)).is_done
    for entry, expected in zip(history(run), history(straight), strict=True):
        assert {**entry, "cut": None}.keys() == {**expected, "cut": None}.keys()
        for name in ("epoch", "step", "patches", "order"):
            assert entry[name] == expected[name]
    rates = [[entry["lr"] for entry in history(path)] for path in (run, straight)]
    assert rates[0][:2] < rates[1][:2], "the limits annealed it"
    assert rates[0][2:] == rates[1][2:]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("limit_s", [15, STEPS + 1])
def test_stopped_run_with_a_limit_resumes_exactly(
    data: str, tmp_path: Path, limit_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CONFIG, "max_minutes": limit_s * SECONDS}
    train(data, str(tmp_path / "whole"), config, progress=False)
    record = Recorder.on_train_batch_end

    def record_and_signal(self: Any, trainer: Any, *rest: Any) -> None:
        record(self, trainer, *rest)
        if trainer.global_step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(Recorder, "on_train_batch_end", record_and_signal)
        train(data, str(tmp_path / "stopped"), config, progress=False)
    assert saved_step(tmp_path / "stopped") == 8
    train(data, str(tmp_path / "stopped"), {}, resume=True, progress=False)
    assert saved_step(tmp_path / "stopped") == min(limit_s, STEPS)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


def test_two_ranks_stop_after_the_same_step(data: str, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(data, str(run), {**CONFIG, "devices": 2, "max_minutes": 1e-6}, progress=False)
    step = saved_step(run)
    assert step <= 2
    assert history(run)[-1]["mean_dice"] is not None
    assert [entry["ranks"] for entry in history(run)] == [2]
    train(data, str(run), {"devices": 1, "max_minutes": None}, resume=True, progress=False)
    assert [entry["order"] for entry in history(run)] == [entry["order"] for entry in history(straight)]


def test_terminal_says_how_far_the_run_came(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, config = str(tmp_path / "run"), tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = ["train", data, "--run", run, "--config", str(config), "--auto-resume"]
    assert main([*words, "max_minutes=0.000001"]) == 0
    printed = capsys.readouterr().out
    assert "epoch 1 of 4, cut after 1 step: loss" in printed
    expected = "max_minutes=1e-06 ended the run after 1 of 20 steps; continue with --resume and a larger max_minutes=N"
    assert expected in printed
    assert main([*words, "max_minutes=0.000001"]) == 0
    assert "done before" in capsys.readouterr().out
    assert main([*words, "max_minutes=null"]) == 0
    assert "ended the run" not in capsys.readouterr().out


@given(st.floats(0, 3), st.floats(0.1, 10))
def test_used_share_reaches_one_at_the_limit(elapsed: float, limit: float) -> None:
    share = used_share(elapsed * limit, limit)
    assert 0 <= share <= 1
    assert (share == 0) == (elapsed <= 0.05) or elapsed == pytest.approx(0.05)
    assert share == 1 or elapsed < 1 + 1e-9


@given(
    st.integers(0, 200),
    st.floats(0, 1),
    st.sampled_from(["poly", "cosine"]),
    st.integers(0, 20),
)
def test_learning_rate_follows_whichever_ends_first(step: int, share: float, schedule: Any, warmup: int) -> None:
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup)
    alone = learning_rate_factor(step, 100, config)
    limited = learning_rate_factor(step, 100, config, share)
    assert 0 <= limited <= alone <= 1
    assert learning_rate_factor(step, 100, config, 0.0) == alone
    assert learning_rate_factor(step, 100, config, 1.0) == 0
