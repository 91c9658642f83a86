"""Training and preparing as commands: signals, killed parents, second writers and superseded ones."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_processes import is_running, list_descendants, wait_for
from tests.train.tiny_runs import CONFIG, PLAN, case_ids, prepare_balls, write_cases
from voxlane.errors import LeaseError
from voxlane.store import Store, lease
from voxlane.store.lease import Lease
from voxlane.train import recorder
from voxlane.train.fit import train
from voxlane.train.run import Run
from voxlane.volume.prepare import PrepareConfig, prepare

ENDLESS = {**CONFIG, "fold": 0, "epochs": 5000}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepare_balls(tmp_path_factory.mktemp("supervision"))


def start_training(data: str, folder: Path, *words: str, name: str = "run") -> subprocess.Popen[str]:
    config = folder / "config.json"
    config.write_text(json.dumps(ENDLESS))
    return start("train", data, "--run", str(folder / name), "--config", str(config), "--auto-resume", *words)


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "voxlane", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def count_epochs(run: Path) -> int:
    return len(json.loads((run / "history.json").read_text())) if (run / "history.json").exists() else 0


def wait_while_running(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.parametrize("to_group", [False, True], ids=["parent", "all processes"])
@pytest.mark.parametrize("words", [("devices=2",), ("loader.workers=2",)])
def test_sigterm_saves_and_ends_with_143(data: str, tmp_path: Path, words: tuple[str, ...], to_group: bool) -> None:
    process, run = start_training(data, tmp_path, *words), tmp_path / "run"
    wait_while_running(process, lambda: count_epochs(run) >= 1)
    children = list_descendants(process.pid)
    (os.killpg if to_group else os.kill)(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 143, errors
    assert "stopped by SIGTERM" in errors
    assert "--resume continues from the last checkpoint" in errors
    assert "Traceback" not in errors
    assert (run / "checkpoints/last.ckpt").exists()
    assert not (run / lease.LEASE).exists()
    wait_for(lambda: not any(map(is_running, children)))


def test_ranks_end_with_a_parent_that_is_killed_while_they_start(data: str, tmp_path: Path) -> None:
    process = start_training(data, tmp_path, "devices=2")
    wait_while_running(process, lambda: len(_list_spawned(process.pid)) == 2)
    children = list_descendants(process.pid)
    end(process)
    wait_for(lambda: not any(map(is_running, children)))


def _list_spawned(pid: int) -> list[int]:
    return [p for p in list_descendants(pid) if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_prepare_leaves_no_processes(tmp_path: Path, number: signal.Signals) -> None:
    scans = write_cases(tmp_path / "scans", case_ids(40))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"plan": PLAN, "folds": 2, "workers": 2}))
    words = ("prepare", str(scans), str(tmp_path / "prepared"), "--config", str(config))
    process = start(*words)
    wait_while_running(process, lambda: any((tmp_path / "prepared/work/check").glob("*")))
    children = list_descendants(process.pid)
    assert len(children) >= 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)  # they hold its stderr
    wait_for(lambda: not any(map(is_running, children)))
    assert process.returncode == (143 if number == signal.SIGTERM else -number), errors
    assert "Traceback" not in errors
    again = start(*words)
    _, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors


def test_second_writer_is_refused_and_names_the_first(data: str, tmp_path: Path) -> None:
    first = start_training(data, tmp_path)
    wait_while_running(first, lambda: count_epochs(tmp_path / "run") >= 1)
    second = start_training(data, tmp_path)
    _, errors = second.communicate(timeout=300)
    assert second.returncode == 1
    assert re.search(rf"run: another process writes this run: host \S+, pid {first.pid}, since 2", errors), errors
    assert "Traceback" not in errors
    assert first.poll() is None
    end(first)
    third = start_training(data, tmp_path, f"epochs={count_epochs(tmp_path / 'run') + 1}")
    _, errors = third.communicate(timeout=300)
    assert third.returncode == 0, errors


def test_superseded_trainer_stops_before_it_writes(data: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_training(data, tmp_path)
    wait_while_running(process, lambda: count_epochs(run) >= 1)
    os.kill(process.pid, signal.SIGSTOP)
    token = json.loads((run / lease.LEASE).read_text())["token"]
    with Lease(Store(str(run)), str(run)[1:] + "/", "run", token=token) as taken:
        epochs = count_epochs(run)
        time.sleep(lease._FRESH_S)  # its last renewal is older than it trusts
        os.kill(process.pid, signal.SIGCONT)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1, errors
        assert "this process no longer writes the run" in errors
        assert f"pid {os.getpid()}" in errors
        assert "Traceback" not in errors
        assert count_epochs(run) <= epochs + 1  # it may have been paused in the middle of a request
        taken.check()


def test_superseded_process_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_FRESH_S", -1.0)
    run = Run(str(tmp_path / "run"))
    first = run.open_lease()
    first.acquire()
    writer = replace(run, lease=first)
    writer.write_json("history.json", [1])
    with run.open_lease(first.token):
        with pytest.raises(LeaseError, match="took it over"):
            writer.write_json("history.json", [1, 2])
        assert run.read_json("history.json") == [1]
    first.release()


def test_failed_first_batch_does_not_block_the_name(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the first batch is bad")

    run, config = tmp_path / "run", {**CONFIG, "fold": 0}
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the first batch is bad"):
        patch.setattr(recorder.Recorder, "on_train_batch_end", fail)
        train(data, str(run), config, progress=False)
    assert (run / "run.json").exists()
    train(data, str(run), config, progress=False)
    assert (run / "done.json").exists()


def test_second_prepare_is_refused(tmp_path: Path) -> None:
    scans = write_cases(tmp_path / "scans", case_ids())
    with (
        Lease(Store(str(tmp_path)), str(tmp_path / "prepared")[1:] + "/", "dataset"),
        pytest.raises(
            LeaseError, match=rf"prepared: another process writes this dataset: host .*, pid {os.getpid()}, since"
        ),
    ):
        prepare(str(scans), str(tmp_path / "prepared"), PrepareConfig(folds=2, workers=1, plan=PLAN), progress=False)
