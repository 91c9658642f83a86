"""Tests of SIGTERM in the middle of an epoch: the run saves the step it is at and resumes from there."""

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
from tests.train.test_workers import make_config, max_difference, orders
from voxlane.errors import RunError
from voxlane.train import recorder
from voxlane.train.fit import train

STEPS = 6


@pytest.fixture(scope="module")
def straight(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    train(data, str(run), make_config(data, steps_per_epoch=STEPS, epochs=2), progress=False)
    return run


def send_sigterm_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to this process while it records a step."""
    record = recorder.Recorder.on_train_batch_end

    def record_and_signal(self: Any, trainer: Any, *rest: Any) -> None:
        record(self, trainer, *rest)
        if trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(recorder.Recorder, "on_train_batch_end", record_and_signal)


@pytest.mark.parametrize("step", [2, 8, 6])
def test_stopped_run_resumes_exactly(
    data: str, straight: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        send_sigterm_at(step, patch)
        with pytest.raises(RunError, match=r"stopped by SIGTERM\. --resume continues from the last checkpoint"):
            train(data, str(run), make_config(data, steps_per_epoch=STEPS, epochs=2), progress=False)
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == step
    report = train(data, str(run), {}, resume=True, progress=False)
    assert same(weights(straight), weights(run))
    assert orders(run) == orders(straight)
    assert report["steps"] == 2 * STEPS
    for entry, expected in zip(*(json.loads((r / "history.json").read_text()) for r in (run, straight)), strict=True):
        assert entry["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert entry["mean_dice"] == expected["mean_dice"]


@pytest.mark.parametrize("signalled_rank", [0, 1])
def test_two_ranks_stop_after_the_same_step_and_one_resumes(
    data: str, straight: Path, tmp_path: Path, signalled_rank: int
) -> None:
    run, config = tmp_path / "run", tmp_path / "config.json"
    values = make_config(data, steps_per_epoch=STEPS, epochs=2)
    config.write_text(json.dumps(values))
    arguments = ["train", data, "--run", str(run), "--config", str(config), "--no-progress"]
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, sys\n"
        "from voxlane.cli.main import main\n"
        "from voxlane.train.recorder import Recorder\n"
        "record = Recorder.on_train_batch_end\n"
        "def record_and_signal(self, trainer, *rest):\n"
        "    record(self, trainer, *rest)\n"
        f"    if trainer.global_step == 8 and trainer.global_rank == {signalled_rank}:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "Recorder.on_train_batch_end = record_and_signal\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    launch = [
        sys.executable,
        "-m",
        "voxlane.cluster.torchrun",
        "--standalone",
        "--nproc-per-node=2",
        "--",
        str(script),
        *arguments,
    ]
    marker = tmp_path / "stopped"
    env = {**os.environ, "VOXLANE_STOPPED": str(marker)}
    ended = subprocess.run(launch, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert "stopped by SIGTERM" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == 143
    assert marker.exists()
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 9
    train(data, str(run), {"devices": 1}, resume=True, progress=False)
    assert max_difference(straight, run) < 1e-5
    assert orders(run) == orders(straight)
