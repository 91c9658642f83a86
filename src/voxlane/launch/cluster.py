"""A Ray cluster to run on: one of our own on this machine, or one that is there already; and what fits on it.

What fits is decided by pure functions over `Node`s; `cluster` and `Cluster` are the thin part that talks to Ray.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from voxlane.errors import ClusterError, ConfigError, MissingExtraError

_CONNECT_S = 5.0
_ANSWER_S = 15.0
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = 4
"""What a gRPC server, which a Ray head is, answers first."""
_OBJECT_STORE_BYTES = 160 << 20
_SOCKET_PATH_BYTES = 107
_SESSION_NAME_BYTES = 70
"""Of what Ray adds to its folder: /session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store."""
_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise Ray hides the GPUs from workers that asked for none, and says on every start that it will not one day.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A worker that died is noticed within this time; at Ray's 2 s every kill costs as much.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # One more process a run, for what a lost node says anyway.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Workers keep their folder, so that a relative path in a decoder or config means what it does elsewhere.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Ray's settings, where the user has not set them; Ray reads them from the environment only."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, with what it has in all, or with what is free on it."""

    id: str
    host: str
    cpus: float
    gpus: float

    def room(self, cpus: float, gpus: float) -> int:
        """How many workers of that size fit; a worker that asks for nothing fits without end, counted as a million."""
        limits = [math.floor(has / each + 1e-6) for has, each in ((self.cpus, cpus), (self.gpus, gpus)) if each > 0]
        return max(0, min(limits, default=1_000_000))


def fits(nodes: Sequence[Node], workers: int, cpus: float, gpus: float = 0.0, spread: int | None = None) -> int:
    """How many workers of that size fit on `nodes`, `workers` at most.

    `spread`: they lie on that many nodes, equally many on each; on fewer nodes that have room, each keeps its share.
    """
    return len(place(nodes, workers, cpus, gpus, spread))


def place(nodes: Sequence[Node], workers: int, cpus: float, gpus: float = 0.0, spread: int | None = None) -> list[str]:
    """The node's id of every worker that fits, workers of a node in a row; fewer than `workers` where not all fit.

    The nodes with most room come first, so that as few as possible share a run.
    """
    by_room = sorted(nodes, key=lambda node: (-node.room(cpus, gpus), node.id))
    if spread is None:
        found = [node.id for node in by_room for _ in range(min(workers, node.room(cpus, gpus)))]
        return found[:workers]
    each = share(workers, spread)
    wide = [node.id for node in by_room if node.room(cpus, gpus) >= each]
    return [node_id for node_id in wide[:spread] for _ in range(each)]


def share(workers: int, nodes: int) -> int:
    """Workers on each of `nodes`."""
    if nodes < 1 or workers % nodes:
        raise ConfigError(
            f"--nodes {nodes}: {workers} workers do not share out evenly over them",
            fix=f"Give --workers {max(1, round(workers / max(1, nodes))) * max(1, nodes)}",
        )
    return workers // nodes


def with_back(free: Sequence[Node], taken: Sequence[str], cpus: float, gpus: float) -> list[Node]:
    """What would be free if workers of that size on the nodes `taken` (an id a worker) gave theirs back."""
    return [replace(n, cpus=n.cpus + cpus * taken.count(n.id), gpus=n.gpus + gpus * taken.count(n.id)) for n in free]


def check(
    nodes: Sequence[Node],
    workers: int,
    cpus: float,
    gpus: float = 0.0,
    spread: int | None = None,
    least: int | None = None,
) -> None:
    """Raise when fewer than `least` (all, unless given) workers of that size could ever run on these `nodes`."""
    for name, number, low in (
        ("--workers", workers, 1),
        ("--cpus-per-worker", cpus, 0),
        ("--gpus-per-worker", gpus, 0),
    ):
        if not number >= low:
            raise ConfigError(f"{name} {number:g}", fix=f"Give {low or 'zero'} or more")
    room = fits(nodes, workers, cpus, gpus, spread)
    if room >= (workers if least is None else least):
        return
    if spread is not None and spread > len(nodes):
        raise ClusterError(f"{spread} nodes asked for, the cluster has {len(nodes)}", fix=f"Give --nodes {len(nodes)}")
    whole = sum(n.gpus for n in nodes) if gpus else sum(n.cpus for n in nodes)
    thing, option = ("GPU", "--gpus-per-worker") if gpus else ("CPU", "--cpus-per-worker")
    wants = f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
    across = f" on {spread} nodes" if spread is not None else ""
    fixes = [f"--workers {room}"] if room and spread is None else []
    smaller = math.floor(100 * whole / workers) / 100
    if spread is None and 0 < smaller < (gpus or cpus):
        fixes.append(f"{option} {smaller:g}")
    raise ClusterError(
        f"{workers} workers of {wants}{across} asked for, the cluster has {whole:g} {thing} "
        f"on {len(nodes)} node{'s' * (len(nodes) != 1)}: {room} fit",
        fix=f"Give {' or '.join(fixes)}" if fixes else f"Give fewer workers, or a smaller {option}",
    )


@dataclass(frozen=True)
class Cluster:
    """A cluster this process is connected to."""

    address: str
    """host:port of its head."""
    own: bool
    """Whether it was started here, and ends with us."""

    def nodes(self) -> list[Node]:
        """Its machines, with all they have."""
        return _nodes()

    def free(self) -> list[Node]:
        """Its machines, with what no one has taken."""
        return free()

    def head_answers(self) -> bool:
        """Whether the head can still be reached."""
        return listens(self.address)


def free() -> list[Node]:
    """What is free on the machines of the cluster that this process is connected to."""
    from ray._private.state import available_resources_per_node

    now = available_resources_per_node()
    return [
        replace(node, cpus=now[node.id].get("CPU", 0.0), gpus=now[node.id].get("GPU", 0.0))
        for node in _nodes()
        if node.id in now
    ]


def _nodes() -> list[Node]:
    import ray

    return [
        Node(found["NodeID"], found["NodeManagerHostname"], has.get("CPU", 0.0), has.get("GPU", 0.0))
        for found in ray.nodes()
        if found["Alive"]
        for has in [found["Resources"]]
    ]


@contextmanager
def cluster(
    address: str | None = None, *, cpus: float | None = None, gpus: float | None = None, temp: str | None = None
) -> Iterator[Cluster]:
    """A Ray cluster: without `address` one of our own on this machine, which ends with the block; with one, that one,
    which is left as it was.

    `address`: host:port of its head, or `auto`: the one that this machine is a node of. `cpus`, `gpus`: what our own
    one may give away (by default all that is here). `temp`: its folder for logs and sockets (by default one that is
    removed). A process that is connected already stays so, and its cluster is taken.
    """
    ray = _ray()
    if ray.is_initialized():
        yield Cluster(ray.get_runtime_context().gcs_address, own=False)
        return
    made = None
    if address is None:
        folder = temp or tempfile.mkdtemp(prefix="voxlane-", dir=_short(tempfile.gettempdir()))
        made = folder if temp is None else None
        arguments: dict[str, Any] = {
            "address": "local",
            "num_cpus": cpus,
            "num_gpus": gpus,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": True,  # without it, what a scheduler stops keeps its place for ever
            "_temp_dir": folder,
        }
    else:
        arguments = {"address": _reachable(address)}
    try:
        ours = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**arguments, log_to_driver=False, logging_level=logging.CRITICAL)
        except Exception as error:  # noqa: BLE001  Ray raises whatever its start ended in; it is told in our words
            raise _unreached(address, error) from None
        if callable(ours) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)  # Ray puts its own in place, which aborts
        _quiet()
        try:
            yield Cluster(ray.get_runtime_context().gcs_address, own=address is None)
        finally:
            ray.shutdown()
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def set_defaults() -> None:
    """Set what we want of Ray, where the user has not."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def _ray() -> Any:
    set_defaults()
    try:
        import ray
        import ray._private.auto_init_hook as hook
        import ray.train.torch
    except ImportError:
        raise MissingExtraError.of("ray", "running on a cluster") from None
    # A thread that still waits for ranks when we disconnect would start or join whatever Ray the machine has.
    hook.enable_auto_connect = False
    return ray


def _quiet() -> None:
    """What Ray would print here about workers that died is said by us, once."""
    import ray._private.worker as worker

    worker._worker_logs_enabled = False


def _short(folder: str) -> str:
    """`folder`, or /tmp where Ray's sockets below it would get a longer name than the system takes."""
    return folder if len(os.fsencode(folder)) + 20 + _SESSION_NAME_BYTES <= _SOCKET_PATH_BYTES else "/tmp"


def _reachable(address: str) -> str:
    """The address for Ray, once something that is a Ray head answers there; Ray itself would try for a minute."""
    if address == "auto":
        return address
    _, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise ConfigError(
            f"--address {address}", fix="Give host:port of the cluster's head, such as 10.0.0.5:6379, or auto"
        )
    if not listens(address) or not _is_head(address):
        raise ClusterError(
            f"no Ray cluster answers at {address}",
            fix="Check it with `ray status --address HOST:PORT`, or leave --address out to start one here",
        )
    return address


def _is_head(address: str) -> bool:
    """Whether what listens there speaks as a Ray head does; Ray itself would go on asking it for many minutes."""
    try:
        with socket.create_connection(_pair(address), timeout=_CONNECT_S) as connection:
            connection.sendall(_HTTP2_HELLO)
            frame = connection.recv(9)  # its length (3 bytes), type, flags, stream
    except OSError:
        return False
    if len(frame) < 4 or frame[3] != _HTTP2_SETTINGS:
        return False
    engine: Any = importlib.import_module("ray._raylet")
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # a refusal is an answer, and Ray's own start says what it means
            engine.GcsClient(address=address)
        answered.set()

    threading.Thread(target=ask, name="voxlane-head", daemon=True).start()
    return answered.wait(_ANSWER_S)


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listens(address: str) -> bool:
    """Whether anything takes connections at host:port."""
    try:
        with socket.create_connection(_pair(address), timeout=_CONNECT_S):
            return True
    except (OSError, OverflowError):
        return False


def _unreached(address: str | None, error: Exception) -> ClusterError:
    """What Ray's many ways of not starting or connecting mean."""
    text = " ".join(str(error).split())
    if address is None:
        return ClusterError(f"a local Ray did not start: {text[:300]}", fix="Check free memory and the disk of /tmp")
    if "uthenti" in text or "token" in text:
        return ClusterError(
            f"the Ray cluster at {address} does not take our token",
            fix="Set RAY_AUTH_TOKEN to the one it was started with",
        )
    if "ersion mismatch" in text:
        return ClusterError(
            f"the Ray cluster at {address} is of another version: {text[:200]}", fix="Install the same on all"
        )
    if address == "auto":
        return ClusterError(
            "this machine is no node of a running Ray cluster",
            fix="Start one (`ray start --head`), give --address HOST:PORT, or leave --address out",
        )
    return ClusterError(
        f"the Ray cluster at {address} does not take this machine: {text[:300]}",
        fix=f"Run on one of its nodes, or join it first: ray start --address={address}",
    )
