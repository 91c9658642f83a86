"""TensorBoard over runs in buckets, asked as a browser asks it."""

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

from tests.conftest import Bucket
from tests.tune import made_search
from voxlane.cli.main import main
from voxlane.errors import ConfigError
from voxlane.train import board
from voxlane.train.board import Mirror, free_port, local_name
from voxlane.train.recorder import Board
from voxlane.train.run import Run
from voxlane.tune import board as search_board

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
def test_runs_have_the_names_of_the_bucket(root: str, key: str, name: str) -> None:
    assert local_name(root, key) == name


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def mirrored(tmp_path: Path) -> Any:
    """A mirror of a URI in a bucket."""
    made: list[Mirror] = []

    def start(bucket: Bucket, name: str) -> Mirror:
        made.append(Mirror(f"{bucket.uri}/{name}" if name else bucket.uri, bucket.config, tmp_path / "copy"))
        return made[-1]

    yield start
    for mirror in made:
        mirror.close()


def test_only_event_files_come_and_only_what_is_new(shared_bucket: Bucket, put: Put, mirrored: Any) -> None:
    bucket = shared_bucket
    first, more = os.urandom(5000), os.urandom(3000)
    name = "run/tensorboard/events.out.tfevents.1"
    put(bucket, {"run/run.json": b"{}", "run/checkpoints/last.ckpt": b"x" * 9000, name: first})
    mirror = mirrored(bucket, "run")
    synced = mirror.sync()
    assert (synced.found.run, synced.files, synced.moved_bytes) == (True, 1, 5000)
    assert files(mirror.folder) == {"run/events.out.tfevents.1": first}
    assert mirror.sync().files == 0
    put(bucket, {name: first + more, "run/tensorboard/events.out.tfevents.2": b"second"})
    synced = mirror.sync()
    assert (synced.files, synced.moved_bytes) == (2, 3006)
    assert files(mirror.folder) == {"run/events.out.tfevents.1": first + more, "run/events.out.tfevents.2": b"second"}


def test_a_file_with_other_content_goes_and_comes_again(gcs: Bucket, put: Put, mirrored: Any) -> None:
    name = "run/tensorboard/events.out.tfevents.search"
    put(gcs, {name: b"first" * 100})
    mirror = mirrored(gcs, "run")
    mirror.sync()
    for body in (b"other" * 200, b"other" * 199 + b"OTHER", b"small"):
        put(gcs, {name: body})
        mirror.sync()
        assert files(mirror.folder) == {}
        mirror.sync()
        assert files(mirror.folder) == {"run/events.out.tfevents.search": body}
    gcs.store.delete(gcs.key(name))
    mirror.sync()
    assert files(mirror.folder) == {}


def test_a_search_a_folder_of_runs_and_other_things(gcs: Bucket, put: Put, mirrored: Any) -> None:
    event = "events.out.tfevents.1"
    put(
        gcs,
        {
            "runs/search/space.json": b"{}",
            f"runs/search/tensorboard/t0/{event}": b"0",
            f"runs/search/trials/t0/fold_1/tensorboard/{event}": b"1",
            "runs/search/trials/t0/fold_1/run.json": b"{}",
            f"runs/search/trials/t0/fold_1/deeper/tensorboard/{event}": b"no",  # nothing of a run's own
            f"runs/b/tensorboard/{event}": b"2",
            f"runs/b/evaluation/val/{event}": b"no",
            "data/prepared.json": b"{}",
        },
    )
    mirror = mirrored(gcs, "")
    assert mirror.sync().found.run
    assert files(mirror.folder) == {
        f"run/runs/b/{event}": b"2",
        f"run/runs/search/t0/{event}": b"0",
        f"run/runs/search/trials/t0/fold_1/{event}": b"1",
    }
    assert not mirrored(gcs, "data").sync().found.run
    assert mirrored(gcs, "runs/search/trials").sync().found.run


def test_too_many_folders_are_no_folder_of_runs(
    gcs: Bucket, put: Put, mirrored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "_MOST_FOLDERS", 10)
    put(gcs, {f"data/case_{i}/x": b"" for i in range(12)})
    with pytest.raises(ConfigError, match=r"more than 10 folders are here\. Name a run"):
        mirrored(gcs, "data").sync()


def test_the_next_free_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) > port
    assert free_port(0) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gs://bkt/none"], "gs://bkt/none: no run is here. Give the URI of a run, a search or a folder of runs"),
        (["gs://none/run"], "gs://none: no such bucket"),
        (["gs://bkt/run", "--port", "70000"], "--port 70000. Give 0 to 65535"),
        (["gs://bkt/run", "--every", "0"], "--every 0. Give seconds"),
    ],
)
def test_what_cannot_be_shown_is_said(
    words: list[str], said: str, gcs: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tensorboard", *words, "--no-open", "--endpoint", str(gcs.config.endpoint)]) == 1
    assert capsys.readouterr().err.startswith(f"voxlane: {said}")


def write_run(bucket: Bucket, name: str) -> None:
    """A run's curves and pictures, by what training writes them with."""
    made = Board(Run(f"{bucket.uri}/{name}", bucket.config))
    entry = {"lr": 0.1, "mean_dice": 0.5, "patches_per_s": 1.0, "wait_share": 0.0, "memory_bytes": 1}
    for epoch in range(3):
        made.scalars({**entry, "step": epoch, "loss": 1.0 - epoch / 4, "dice": {"kidney": 0.5}})
    made.picture("validation/case_0", np.zeros((8, 24, 3), np.uint8), 2)
    made.close()


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_run_is_shown_as_it_comes_until_told_to_end(gcs: Bucket, tmp_path: Path, number: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["gs://bkt/run", "--wait", "--no-open", "--every", "1", "--port", str(port)]
        process = subprocess.Popen(
            [sys.executable, "-m", "voxlane", "tensorboard", *words, "--endpoint", str(gcs.config.endpoint)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert process.stdout is not None
        said = process.stdout.readline()
    assert said.startswith("TensorBoard of gs://bkt/run: http://127.0.0.1:")
    url = said.split(": ")[1].strip()
    assert ask(f"{url}data/runs") == []
    write_run(gcs, "run")
    search_board.write(made_search.search(2), Run(f"{gcs.uri}/run", gcs.config))
    wait_until(lambda: "run" in ask(f"{url}data/runs") and len(ask(f"{url}data/runs")) == 3)
    scalars = ask(f"{url}data/plugin/scalars/tags")["run"]
    assert {"loss", "lr", "mean_dice", "dice/kidney"} <= set(scalars)
    losses = ask(f"{url}data/plugin/scalars/scalars?run=run&tag=loss")
    assert [value for _, _, value in losses] == [1.0, 0.75, 0.5]
    assert "validation/case_0" in ask(f"{url}data/plugin/images/tags")["run"]
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == ""
    assert err.splitlines()[:2] == [
        f"voxlane: port {port} is taken; {url.rstrip('/').rpartition(':')[2]} is used",
        "voxlane: no events yet; looked for every 1 s",
    ]
    assert list(tmp_path.iterdir()) == []
