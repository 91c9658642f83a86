"""A Ray cluster of our own ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from voxlane.cluster.ray.reaper import find_processes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
DRIVER = """
import ray
from voxlane.cluster.ray.cluster import open_cluster
with open_cluster(cpus=1):
    ray.get(ray.remote(lambda: None).remote())
    print("ready", flush=True)
    input()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_all_processes_end_with_the_driver(killed: bool) -> None:
    environment = {**os.environ, "TMPDIR": "/tmp"}
    command = [sys.executable, "-c", DRIVER]
    before = set(Path("/tmp").glob("voxlane-*"))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        folders = [str(path) for path in {*Path("/tmp").glob("voxlane-*")} - before]
        assert any(map(find_processes, folders))
        if killed:
            driver.kill()
        else:
            driver.communicate("\n")
    assert driver.returncode == (-signal.SIGKILL if killed else 0)
    deadline = time.monotonic() + 5
    while any(map(find_processes, folders)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(find_processes, folders))
