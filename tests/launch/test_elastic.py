"""Training on Ray: the same run as on one process, whatever is killed on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import NODE, assert_same_run, attempts, history
from voxlane.errors import ClusterError, ConfigError, VoxlaneError
from voxlane.launch.cluster import cluster
from voxlane.launch.elastic import train_on_ray

Data = tuple[str, dict[str, Any]]


def until(what: Callable[[], Any], seconds: float = 110.0) -> Any:
    """Wait until `what` is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Do `act` in a thread; what it raises is raised at the end of the block."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: it is raised below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.cluster
def test_three_nodes_train_what_one_process_trains(
    ray_nodes: Any, ray_data: Data, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, said = ray_data
    run = tmp_path / "run"
    report = train_on_ray(data, str(run), said, workers=3, nodes=3, address=ray_nodes.address)
    assert report["patches"] == 4 * 12 * 6
    assert_same_run(run, straight)
    (attempt,) = attempts(run)
    assert attempt["why"] == "done"
    assert len({rank["node"] for rank in attempt["ranks"]}) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch {n} of 4" for n in (1, 2, 3, 4)]
    with pytest.raises(VoxlaneError, match="a run is here already"):
        train_on_ray(data, str(run), said, workers=2, address=ray_nodes.address)


@pytest.mark.cluster
def test_a_killed_worker_costs_no_more_than_its_epoch(
    ray_nodes: Any, ray_data: Data, straight: Path, tmp_path: Path
) -> None:
    data, said = ray_data
    run, said_lines = tmp_path / "run", []

    def kill() -> None:
        until(lambda: len(history(run)) >= 1)
        os.kill(attempts(run)[0]["ranks"][1]["pid"], signal.SIGKILL)

    with meanwhile(kill):
        train_on_ray(data, str(run), said, workers=2, address=ray_nodes.address, progress=False, say=said_lines.append)
    assert_same_run(run, straight)
    assert [attempt["why"] for attempt in attempts(run)] == ["rank 1 was lost: its process was killed", "done"]
    assert said_lines == ["rank 1 was lost: its process was killed; going on from the last checkpoint"]


@pytest.mark.cluster
def test_a_lost_node_means_fewer_workers_until_it_is_back(
    ray_nodes: Any, ray_data: Data, straight: Path, tmp_path: Path
) -> None:
    """Three workers that fill a node each; two of them remain, then there are three again."""
    data, said = ray_data
    run = tmp_path / "run"
    program = (
        "from voxlane.launch.elastic import Patience, train_on_ray\n"
        f"train_on_ray({data!r}, {str(run)!r}, {said!r}, workers=3, cpus_per_worker=2, address={ray_nodes.address!r}, "
        "progress=False, patience=Patience(for_all_s=5, for_least_s=60))\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    until(lambda: len(history(run)) >= 1)
    ray_nodes.remove_node(ray_nodes.worker_nodes.copy().pop(), allow_graceful=False)
    until(lambda: len(attempts(run)) == 2)
    ray_nodes.add_node(**NODE)  # there before the two workers have started, and so at the end of their first epoch
    _, told = driver.communicate()
    assert driver.returncode == 0, told
    assert_same_run(run, straight)
    assert [attempt["workers"] for attempt in attempts(run)] == [3, 2, 3]
    lost, stopped, done = (attempt["why"] for attempt in attempts(run))
    assert "lost" in lost
    assert (stopped, done) == ("stopped after an epoch: more workers fit", "done")
    assert [entry["ranks"] for entry in history(run)][1:] == [2, 3, 3]
    lines = told.splitlines()
    assert lines[0] == f"voxlane: {lost}; going on from the last checkpoint"
    assert "voxlane: training on 2 workers instead of 3: 3 of the batch's 6 patches on each" in lines
    assert lines[-1] == "voxlane: training on 3 workers instead of 2: 2 of the batch's 6 patches on each"


def command(run: Path, ray_data: Data, *more: str) -> list[str]:
    """`voxlane train`, as a user writes it; config fields are JSON, which is YAML."""
    data, said = ray_data
    fields = [f"{name}={json.dumps(value)}" for name, value in said.items()]
    return [sys.executable, "-m", "voxlane.cli.main", "train", data, "--run", str(run), *more, *fields]


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.cluster
def test_a_killed_driver_is_resumed_and_its_local_ray_leaves_another_alone(
    ray_nodes: Any, ray_data: Data, straight: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    driver = subprocess.Popen(command(run, ray_data, "--workers", "2"), stdout=subprocess.DEVNULL)
    until(lambda: len(history(run)) >= 1)
    driver.kill()
    driver.wait()
    for rank in attempts(run)[0]["ranks"]:
        until(lambda pid=rank["pid"]: not alive(pid))
    assert len(history(run)) < 4
    done = subprocess.run(
        [*command(run, (ray_data[0], {})), "--workers", "2", "--resume"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"run: {run}" in done.stdout
    assert_same_run(run, straight)
    assert [attempt["why"] for attempt in attempts(run)] == ["its driver went away", "done"]
    with cluster(ray_nodes.address) as other:
        assert not other.own
        assert len(other.nodes()) == 3
        assert {attempt["ranks"][0]["node"] for attempt in attempts(run)}.isdisjoint(n.id for n in other.nodes())


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGTERM, 143, "voxlane: file://{run}: stopped by SIGTERM. --resume goes on from the last checkpoint\n"),
        (signal.SIGINT, 130, "voxlane: interrupted; --resume goes on from the last checkpoint\n"),
    ],
)
def test_a_signal_ends_it_with_one_line(
    ray_data: Data, tmp_path: Path, number: signal.Signals, status: int, said: str
) -> None:
    run = tmp_path / "run"
    driver = subprocess.Popen(command(run, ray_data, "--workers", "2"), stderr=subprocess.PIPE, text=True)
    until(lambda: (run / "workers.json").exists())
    driver.send_signal(number)
    _, told = driver.communicate()
    assert (driver.returncode, told) == (status, said.format(run=run))
    assert attempts(run)[0]["ended"] is not None


@pytest.mark.cluster
def test_what_a_rank_raises_is_raised_once(ray_nodes: Any, ray_data: Data, tmp_path: Path) -> None:
    data, said = ray_data
    broken = tmp_path / "data"
    shutil.copytree(data, broken)
    for shard in broken.glob("cases/*/image/c/**/*"):
        if shard.is_file():
            shard.write_bytes(shard.read_bytes() + b"!")
    run, lines = tmp_path / "run", []
    with pytest.raises(VoxlaneError, match="image") as raised:
        train_on_ray(
            str(broken), str(run), said, workers=2, address=ray_nodes.address, progress=False, say=lines.append
        )
    assert not isinstance(raised.value, ClusterError)
    (attempt,) = attempts(run)
    assert attempt["why"] == str(raised.value)
    assert lines == []


def test_what_cannot_work_is_said_before_anything_is_written(ray_nodes: Any, ray_data: Data, tmp_path: Path) -> None:
    data, said = ray_data
    run = str(tmp_path / "run")
    at = {"address": ray_nodes.address}
    for more, kind, text in (
        ({"workers": 6, "cpus_per_worker": 2, **at}, ClusterError, "the cluster has 6 CPU on 3 nodes: 3 fit"),
        ({"workers": 0, **at}, ConfigError, "--workers 0"),
        ({"workers": 4, **at}, ConfigError, "batch: 6 patches do not share out evenly over 4 workers"),
        ({"workers": 4, "nodes": 3}, ConfigError, "--nodes 3: 4 workers do not share out evenly"),
        ({"workers": 3, "min_workers": 4}, ConfigError, "--min-workers 4"),
        ({"workers": 2, "gpus_per_worker": 0.5, **at}, ConfigError, "cannot share a GPU"),
        ({"workers": 2, "gpus_per_worker": 1, **at}, ClusterError, "the cluster has 0 GPU"),
        ({"workers": 2, "address": "127.0.0.1:1"}, ClusterError, "no Ray cluster answers at 127.0.0.1:1"),
        ({"workers": 2, "address": "ray://head:10001"}, ConfigError, "Give host:port"),
    ):
        with pytest.raises(kind) as raised:
            train_on_ray(data, run, said, **more)  # type: ignore[arg-type]
        assert text in str(raised.value)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ClusterError, match="no Ray cluster answers at"):
            train_on_ray(data, run, said, workers=2, address=f"127.0.0.1:{server.server_port}")
        server.shutdown()
    with pytest.raises(ConfigError, match="epochs"):
        train_on_ray(data, run, {**said, "epochs": 0}, workers=2)
    assert not Path(run).exists()
