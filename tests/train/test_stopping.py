"""Told to stop in the middle of an epoch, a run saves the step it is at and goes on from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_fit import same, weights
from tests.train.test_workers import data as data
from tests.train.test_workers import difference, orders
from tests.train.test_workers import said as said
from voxlane.errors import RunError
from voxlane.train import recorder
from voxlane.train.fit import train

STEPS = 6


@pytest.fixture(scope="module")
def straight(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    train(data, str(run), said(data, steps_per_epoch=STEPS, epochs=2), progress=False)
    return run


def stopped_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM comes while a step is counted."""
    count = recorder.Recorder.on_train_batch_end

    def counted(self: Any, trainer: Any, *rest: Any) -> None:
        count(self, trainer, *rest)
        if trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(recorder.Recorder, "on_train_batch_end", counted)


@pytest.mark.parametrize("step", [2, 8, 6])
def test_it_is_the_run_that_was_not_stopped(
    data: str, straight: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stopped_after(step, patch)
        with pytest.raises(RunError, match=r"stopped by SIGTERM\. --resume goes on from the last checkpoint"):
            train(data, str(run), said(data, steps_per_epoch=STEPS, epochs=2), progress=False)
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == step
    report = train(data, str(run), {}, resume=True, progress=False)
    assert same(weights(straight), weights(run))
    assert orders(run) == orders(straight)
    assert report["steps"] == 2 * STEPS
    for ours, theirs in zip(*(json.loads((r / "history.json").read_text()) for r in (run, straight)), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["mean_dice"] == theirs["mean_dice"]


@pytest.mark.parametrize("told", [0, 1])
def test_two_ranks_stop_after_the_same_step_and_one_goes_on(
    data: str, straight: Path, tmp_path: Path, told: int
) -> None:
    run, config = tmp_path / "run", tmp_path / "config.json"
    values = said(data, steps_per_epoch=STEPS, epochs=2)
    config.write_text(json.dumps(values))
    words = ["train", data, "--run", str(run), "--config", str(config), "--no-progress"]
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, sys\n"
        "from voxlane.cli.main import main\n"
        "from voxlane.train.recorder import Recorder\n"
        "count = Recorder.on_train_batch_end\n"
        "def counted(self, trainer, *rest):\n"
        "    count(self, trainer, *rest)\n"
        f"    if trainer.global_step == 8 and trainer.global_rank == {told}:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "Recorder.on_train_batch_end = counted\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--",
        str(script),
        *words,
    ]
    mark = tmp_path / "stopped"
    env = {**os.environ, "VOXLANE_STOPPED": str(mark)}
    ended = subprocess.run(launch, capture_output=True, text=True, timeout=180, check=False, env=env)
    assert "stopped by SIGTERM" in ended.stderr, ended.stderr
    assert mark.exists()
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 9
    train(data, str(run), {"devices": 1}, resume=True, progress=False)
    assert difference(straight, run) < 1e-5
    assert orders(run) == orders(straight)
