"""Tests of training on Ray: the same run as on one process, whatever is killed meanwhile."""

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
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.ray.conftest import NODE, assert_same_run, attempts, history
from voxlane.cluster.ray.cluster import list_nodes, open_cluster
from voxlane.cluster.ray.elastic import train_on_ray
from voxlane.errors import ClusterError, ConfigError, VoxlaneError

Data = tuple[str, dict[str, Any]]


def wait_until(condition: Callable[[], Any], timeout_s: float = 300.0) -> Any:
    """Wait until `condition` returns a true value; return it."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"the condition did not become true within {timeout_s:.0f} s")


@contextmanager
def run_meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Run `action` in a thread; raise its error at the end of the block."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - a thread boundary: raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.cluster
def test_three_nodes_train_the_same_network_as_one_process(
    ray_nodes: Any, ray_data: Data, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, config_values = ray_data
    run = tmp_path / "run"
    report = train_on_ray(data, str(run), config_values, workers=3, nodes=3, address=ray_nodes.address)
    assert report["patches"] == 4 * 12 * 6
    assert_same_run(run, straight)
    (attempt,) = attempts(run)
    assert attempt["why"] == "done"
    assert len({rank["node"] for rank in attempt["ranks"]}) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch {n} of 4" for n in (1, 2, 3, 4)]
    with pytest.raises(VoxlaneError, match="a run already exists here"):
        train_on_ray(data, str(run), config_values, workers=2, address=ray_nodes.address)


@pytest.mark.cluster
def test_killed_worker_costs_at_most_its_epoch(ray_nodes: Any, ray_data: Data, straight: Path, tmp_path: Path) -> None:
    data, config_values = ray_data
    run, lines = tmp_path / "run", []

    def kill() -> None:
        wait_until(lambda: len(history(run)) >= 1)
        os.kill(attempts(run)[0]["ranks"][1]["pid"], signal.SIGKILL)

    with run_meanwhile(kill):
        train_on_ray(
            data, str(run), config_values, workers=2, address=ray_nodes.address, progress=False, print_line=lines.append
        )
    assert_same_run(run, straight)
    assert [attempt["why"] for attempt in attempts(run)] == ["rank 1 was lost: its process was killed", "done"]
    assert lines == ["rank 1 was lost: its process was killed; continuing from the last checkpoint"]


@pytest.mark.cluster
def test_lost_node_means_fewer_workers_until_it_is_back(
    ray_nodes: Any, ray_data: Data, straight: Path, tmp_path: Path
) -> None:
    """Three workers fill a node each; two of them remain, then there are three again."""
    data, config_values = ray_data
    run = tmp_path / "run"
    program = (
        "from voxlane.cluster.ray.elastic import Patience, train_on_ray\n"
        f"train_on_ray({data!r}, {str(run)!r}, {config_values!r}, workers=3, cpus_per_worker=2, "
        f"address={ray_nodes.address!r}, progress=False, patience=Patience(for_all_s=5, for_least_s=60))\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(history(run)) >= 1)
    ray_nodes.remove_node(ray_nodes.worker_nodes.copy().pop(), allow_graceful=False)
    wait_until(lambda: len(attempts(run)) == 2)
    ray_nodes.add_node(**NODE)  # back before the two workers have started, and so at the end of their first epoch
    _, stderr = driver.communicate()
    assert driver.returncode == 0, stderr
    assert_same_run(run, straight)
    assert [attempt["workers"] for attempt in attempts(run)] == [3, 2, 3]
    lost, stopped, done = (attempt["why"] for attempt in attempts(run))
    assert "lost" in lost
    assert (stopped, done) == ("stopped after an epoch: more workers fit", "done")
    # Two workers trained the second epoch, or the first again if the node was lost before its checkpoint was saved.
    assert sorted(entry["ranks"] for entry in history(run)) == [2, 3, 3, 3]
    lines = stderr.splitlines()
    assert lines[0] == f"voxlane: {lost}; continuing from the last checkpoint"
    assert "voxlane: training on 2 workers instead of 3: 3 of the batch's 6 patches on each" in lines
    assert lines[-1] == "voxlane: training on 3 workers instead of 2: 2 of the batch's 6 patches on each"


def make_command(run: Path, ray_data: Data, *options: str) -> list[str]:
    """Return a `voxlane train` command line; config fields are JSON, which is YAML."""
    data, config_values = ray_data
    fields = [f"{name}={json.dumps(value)}" for name, value in config_values.items()]
    return [sys.executable, "-m", "voxlane.cli.main", "train", data, "--run", str(run), *options, *fields]


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def parent_of(pid: int) -> int:
    """Return the parent of a process: the Ray node's own process, for a worker."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.cluster
def test_killed_driver_resumes_without_touching_another_cluster(
    ray_nodes: Any, ray_data: Data, straight: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    driver = subprocess.Popen(make_command(run, ray_data, "--workers", "2"), stdout=subprocess.DEVNULL)
    wait_until(lambda: len(history(run)) >= 1)
    # Ranks notice the loss of their driver only after a while, in which they could finish this short run.
    pids = [rank["pid"] for rank in attempts(run)[0]["ranks"]]
    node_processes = {parent_of(pid) for pid in pids}
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    driver.kill()
    driver.wait()
    for pid in node_processes:
        wait_until(lambda pid=pid: not is_alive(pid))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda pid=pid: not is_alive(pid))
    assert len(history(run)) < 4
    resumed = subprocess.run(
        [*make_command(run, (ray_data[0], {})), "--workers", "2", "--resume"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr == ""
    assert f"run: {run}" in resumed.stdout
    assert_same_run(run, straight)
    assert [attempt["why"] for attempt in attempts(run)] == ["its driver was lost", "done"]
    with open_cluster(ray_nodes.address) as other:
        assert other == ray_nodes.address
        assert len(list_nodes()) == 3
        assert {attempt["ranks"][0]["node"] for attempt in attempts(run)}.isdisjoint(n.id for n in list_nodes())


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (
            signal.SIGTERM,
            143,
            "voxlane: file://{run}: stopped by SIGTERM. --resume continues from the last checkpoint\n",
        ),
        (signal.SIGINT, 130, "voxlane: interrupted; --resume continues from the last checkpoint\n"),
    ],
)
def test_signal_ends_the_run_with_one_line(
    ray_data: Data, tmp_path: Path, number: signal.Signals, status: int, message: str
) -> None:
    run = tmp_path / "run"
    driver = subprocess.Popen(make_command(run, ray_data, "--workers", "2"), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (run / "workers.json").exists())
    driver.send_signal(number)
    _, stderr = driver.communicate()
    assert (driver.returncode, stderr) == (status, message.format(run=run))
    assert attempts(run)[0]["ended"] is not None


@pytest.mark.cluster
def test_error_of_a_rank_is_raised_once(ray_nodes: Any, ray_data: Data, tmp_path: Path) -> None:
    data, config_values = ray_data
    broken = tmp_path / "data"
    shutil.copytree(data, broken)
    for shard in broken.glob("cases/*/image/c/**/*"):
        if shard.is_file():
            body = shard.read_bytes()  # of the same size, so that only reading it shows the damage
            shard.write_bytes(bytes(byte ^ 1 for byte in body))
    run, lines = tmp_path / "run", []
    with pytest.raises(VoxlaneError, match="image") as raised:
        train_on_ray(
            str(broken),
            str(run),
            config_values,
            workers=2,
            address=ray_nodes.address,
            progress=False,
            print_line=lines.append,
        )
    assert not isinstance(raised.value, ClusterError)
    (attempt,) = attempts(run)
    assert attempt["why"] == str(raised.value)
    assert lines == []


def test_mistakes_are_reported_before_anything_is_written(ray_nodes: Any, ray_data: Data, tmp_path: Path) -> None:
    data, config_values = ray_data
    run = str(tmp_path / "run")
    existing = {"address": ray_nodes.address}
    for arguments, kind, message in (
        ({"workers": 6, "cpus_per_worker": 2, **existing}, ClusterError, "the cluster has 6 CPU on 3 nodes: 3 fit"),
        ({"workers": 0, **existing}, ConfigError, "--workers 0"),
        ({"workers": 4, **existing}, ConfigError, "batch: 6 patches do not divide evenly over 4 workers"),
        ({"workers": 4, "nodes": 3}, ConfigError, "--nodes 3: 4 workers do not divide evenly"),
        ({"workers": 3, "min_workers": 4}, ConfigError, "--min-workers 4"),
        ({"workers": 2, "gpus_per_worker": 0.5, **existing}, ConfigError, "cannot share a GPU"),
        ({"workers": 2, "gpus_per_worker": 1, **existing}, ClusterError, "the cluster has 0 GPU"),
        ({"workers": 2, "address": "127.0.0.1:1"}, ClusterError, "no Ray cluster answers at 127.0.0.1:1"),
        ({"workers": 2, "address": "ray://head:10001"}, ConfigError, "Give host:port"),
    ):
        with pytest.raises(kind) as raised:
            train_on_ray(data, run, config_values, **arguments)  # type: ignore[arg-type]
        assert message in str(raised.value)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ClusterError, match="no Ray cluster answers at"):
            train_on_ray(data, run, config_values, workers=2, address=f"127.0.0.1:{server.server_port}")
        server.shutdown()
    with pytest.raises(ConfigError, match="epochs"):
        train_on_ray(data, run, {**config_values, "epochs": 0}, workers=2)
    assert not Path(run).exists()
