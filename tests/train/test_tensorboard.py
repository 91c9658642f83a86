"""Tests of TensorBoard over runs in buckets, through its HTTP API."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard import program

from tests.conftest import Bucket
from tests.tune import fake_search
from voxlane.cli.main import main
from voxlane.errors import ConfigError
from voxlane.train import tensorboard
from voxlane.train.recorder import EventWriter
from voxlane.train.run import Run
from voxlane.train.tensorboard import EventMirror, launch, local_name
from voxlane.tune.report import write_events

Put = Callable[[Bucket, dict[str, bytes]], None]


@pytest.mark.parametrize(
    ("root", "key", "name"),
    [
        ("runs/a/", "runs/a/tensorboard/e.tfevents", "a/e.tfevents"),
        ("runs/", "runs/a/tensorboard/e.tfevents", "runs/a/e.tfevents"),
        ("", "a/tensorboard/e.tfevents", "run/a/e.tfevents"),
        ("s/", "s/tensorboard/t1/e.tfevents", "s/t1/e.tfevents"),
        ("s/", "s/trials/t1/fold_0/tensorboard/e.tfevents", "s/trials/t1/fold_0/e.tfevents"),
        ("runs/a/tensorboard/", "runs/a/tensorboard/e.tfevents", "a/e.tfevents"),
    ],
)
def test_runs_keep_their_names(root: str, key: str, name: str) -> None:
    assert local_name(root, key) == name


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def open_mirror(tmp_path: Path) -> Any:
    """A function that mirrors a URI in a bucket."""
    mirrors: list[EventMirror] = []

    def start(bucket: Bucket, name: str) -> EventMirror:
        mirrors.append(EventMirror(f"{bucket.uri}/{name}" if name else bucket.uri, bucket.config, tmp_path / "copy"))
        return mirrors[-1]

    yield start
    for mirror in mirrors:
        mirror.close()


def test_only_new_parts_of_event_files_are_copied(shared_bucket: Bucket, put: Put, open_mirror: Any) -> None:
    bucket = shared_bucket
    first, more = os.urandom(5000), os.urandom(3000)
    name = "run/tensorboard/events.out.tfevents.1"
    put(bucket, {"run/run.json": b"{}", "run/checkpoints/last.ckpt": b"x" * 9000, name: first})
    mirror = open_mirror(bucket, "run")

    def sync() -> int:
        """Sync, and return the number of bytes that were downloaded."""
        before = mirror._store.counters.read().bytes_read
        assert mirror.sync().has_run
        return mirror._store.counters.read().bytes_read - before

    assert sync() == 5000
    assert read_files(mirror.folder) == {"run/events.out.tfevents.1": first}
    assert sync() == 0
    put(bucket, {name: first + more, "run/tensorboard/events.out.tfevents.2": b"second"})
    assert sync() == 3006 + 2 * tensorboard._COMPARED_BYTES
    assert read_files(mirror.folder) == {
        "run/events.out.tfevents.1": first + more,
        "run/events.out.tfevents.2": b"second",
    }


def test_replaced_file_is_removed_and_copied_again(gcs: Bucket, put: Put, open_mirror: Any) -> None:
    name = "run/tensorboard/events.out.tfevents.search"
    put(gcs, {name: b"first" * 100})
    mirror = open_mirror(gcs, "run")
    mirror.sync()
    for body in (b"other" * 200, b"other" * 199 + b"OTHER", b"small"):
        put(gcs, {name: body})
        mirror.sync()
        assert read_files(mirror.folder) == {}
        mirror.sync()
        assert read_files(mirror.folder) == {"run/events.out.tfevents.search": body}
    gcs.store.delete(gcs.key(name))
    mirror.sync()
    assert read_files(mirror.folder) == {}


def test_searches_and_folders_of_runs_are_found(gcs: Bucket, put: Put, open_mirror: Any) -> None:
    event = "events.out.tfevents.1"
    put(
        gcs,
        {
            "runs/search/space.json": b"{}",
            f"runs/search/tensorboard/t0/{event}": b"0",
            f"runs/search/trials/t0/fold_1/tensorboard/{event}": b"1",
            "runs/search/trials/t0/fold_1/run.json": b"{}",
            f"runs/search/trials/t0/fold_1/deeper/tensorboard/{event}": b"no",  # not an event file of the run
            f"runs/b/tensorboard/{event}": b"2",
            f"runs/b/evaluation/val/{event}": b"no",
            "data/prepared.json": b"{}",
        },
    )
    mirror = open_mirror(gcs, "")
    assert mirror.sync().has_run
    assert read_files(mirror.folder) == {
        f"run/runs/b/{event}": b"2",
        f"run/runs/search/t0/{event}": b"0",
        f"run/runs/search/trials/t0/fold_1/{event}": b"1",
    }
    assert not open_mirror(gcs, "data").sync().has_run
    assert open_mirror(gcs, "runs/search/trials").sync().has_run


def test_too_many_folders_are_rejected(
    gcs: Bucket, put: Put, open_mirror: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "_MAX_FOLDERS", 10)
    put(gcs, {f"data/case_{i}/x": b"" for i in range(12)})
    with pytest.raises(ConfigError, match=r"more than 10 folders\. Give a run"):
        open_mirror(gcs, "data").sync()


def test_next_free_port_is_used(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        url, bound_port = launch(tmp_path, port, 10.0, title="test")
    assert bound_port > port
    assert url == f"http://127.0.0.1:{bound_port}/"


def test_port_that_is_taken_while_tensorboard_starts_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = program.TensorBoard.launch
    refused = []

    def refuse_first(board: Any) -> str:
        if not refused:
            refused.append(board.flags.port)
            sys.exit(1)  # as werkzeug does
        return str(start(board))

    monkeypatch.setattr(program.TensorBoard, "launch", refuse_first)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    _, bound_port = launch(tmp_path, port, 10.0, title="test")
    assert refused == [port]
    assert bound_port > port


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gs://bkt/none"], "gs://bkt/none: no run exists here. Give the URI of a run, a search or a folder of runs"),
        (["gs://none/run"], "gs://none: no such bucket"),
        (["gs://bkt/run", "--port", "70000"], "--port: expected a value less than or equal to 65535, got 70000"),
        (["gs://bkt/run", "--every", "0"], "--every: expected a value greater than or equal to 1, got 0"),
    ],
)
def test_mistakes_are_reported(
    arguments: list[str], message: str, gcs: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tensorboard", *arguments, "--no-open", "--endpoint", str(gcs.config.endpoint)]) == 1
    assert capsys.readouterr().err.startswith(f"voxlane: {message}")


def write_run(bucket: Bucket, name: str) -> None:
    """Write the curves and pictures of a run as training does."""
    events = EventWriter(Run(f"{bucket.uri}/{name}", bucket.config))
    entry = {"lr": 0.1, "mean_dice": 0.5, "patches_per_s": 1.0, "wait_share": 0.0, "memory_bytes": 1}
    for epoch in range(3):
        events.add_scalars({**entry, "step": epoch, "loss": 1.0 - epoch / 4, "dice": {"kidney": 0.5}})
    events.writer.add_image("validation/case_0", np.zeros((8, 24, 3), np.uint8), 2, dataformats="HWC")
    events.close()


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_growing_run_is_served_until_a_signal_ends_it(gcs: Bucket, tmp_path: Path, number: int) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        arguments = ["gs://bkt/run", "--wait", "--no-open", "--every", "1", "--port", str(port)]
        process = subprocess.Popen(
            [sys.executable, "-m", "voxlane", "tensorboard", *arguments, "--endpoint", str(gcs.config.endpoint)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert process.stdout is not None
        line = process.stdout.readline()
    assert line, process.communicate()
    assert line.startswith("TensorBoard of gs://bkt/run: http://127.0.0.1:")
    url = line.split(": ")[1].strip()
    assert get_json(f"{url}data/runs") == []
    write_run(gcs, "run")
    write_events(fake_search.search(2), Run(f"{gcs.uri}/run", gcs.config))
    wait_until(lambda: "run" in get_json(f"{url}data/runs") and len(get_json(f"{url}data/runs")) == 3)
    scalars = get_json(f"{url}data/plugin/scalars/tags")["run"]
    assert {"loss", "lr", "mean_dice", "dice/kidney"} <= set(scalars)
    losses = get_json(f"{url}data/plugin/scalars/scalars?run=run&tag=loss")
    assert [value for _, _, value in losses] == [1.0, 0.75, 0.5]
    assert "validation/case_0" in get_json(f"{url}data/plugin/images/tags")["run"]
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0
    assert out == ""
    assert err.splitlines()[:2] == [
        f"voxlane: port {port} is in use; using {url.rstrip('/').rpartition(':')[2]}",
        "voxlane: no events yet; checking every 1 s",
    ]
    assert list(tmp_path.iterdir()) == []
