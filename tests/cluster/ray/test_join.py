"""A Ray cluster that is started and joined with the commands of docs/ray.md."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
DOCUMENTATION = Path(__file__).parents[3] / "docs" / "ray.md"
DRIVER = """
import sys
from voxlane.cluster.ray.cluster import list_nodes, open_cluster
from voxlane.errors import ClusterError
try:
    with open_cluster(sys.argv[1]):
        print(len(list_nodes()), "nodes")
except ClusterError as error:
    print(error)
"""
SMALL = ["--object-store-memory=80000000", "--num-cpus=1", "--disable-usage-stats"]


def documented_commands() -> list[str]:
    """Return the shell lines of the part about tokens: the variables, the head and a node that joins."""
    text = DOCUMENTATION.read_text(encoding="utf-8")
    block = re.search(r"```bash\n(export RAY_AUTH_MODE=.*?)```", text, re.DOTALL)
    assert block is not None
    return [line.partition("  #")[0].strip() for line in block[1].splitlines()]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Start the head and a second node as documented; yield the head's address and the user's variables."""
    variables, head, join = documented_commands()
    folder = Path("/tmp") / f"vl-join-{secrets.token_hex(3)}"  # the paths of Ray's sockets must be short
    folder.mkdir(mode=0o700)
    address = f"127.0.0.1:{free_port()}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder)}
    environment |= {"TOKEN": secrets.token_hex(32)}
    options = {
        head: [f"--port={address.rpartition(':')[2]}", f"--temp-dir={folder}", f"--dashboard-port={free_port()}"],
        join: [],
    }
    log = tmp_path_factory.mktemp("ray") / "log"
    try:
        for command, own in options.items():
            script = f"{variables}\n{command.replace('HEAD:6379', address)} {shlex.join([*own, *SMALL])}"
            with open(log, "ab") as output:  # not a pipe: Ray's processes keep it open
                done = subprocess.run(
                    ["bash", "-c", script], env=environment, stdout=output, stderr=output, check=False, timeout=200
                )
            assert done.returncode == 0, log.read_text()
        yield address, environment
    finally:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(folder).encode() in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def connect(address: str, environment: dict[str, str], **variables: str) -> str:
    command = [sys.executable, "-c", DRIVER, address]
    done = subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_documented_commands_start_and_join_a_cluster(cluster: tuple[str, dict[str, str]]) -> None:
    address, environment = cluster
    token = environment["TOKEN"]
    assert connect(address, environment, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token) == "2 nodes\n"
    # The token alone is enough for a driver, as it is for the head.
    assert connect(address, environment, RAY_AUTH_TOKEN=token) == "2 nodes\n"


@pytest.mark.parametrize("variables", [{}, {"RAY_AUTH_TOKEN": "0" * 64}])
def test_missing_or_wrong_token_is_named(cluster: tuple[str, dict[str, str]], variables: dict[str, str]) -> None:
    address, environment = cluster
    message = connect(address, environment, **variables)
    assert f"the Ray cluster at {address} rejects the token. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in message
