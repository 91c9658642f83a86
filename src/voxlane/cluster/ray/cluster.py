"""Start or connect to a Ray cluster, and place workers on it.

Pure functions over `RayNode`s decide which workers fit; `open_cluster` and the functions after it talk to Ray.
"""

from __future__ import annotations

import getpass
import importlib
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from voxlane.cluster.ray import reaper
from voxlane.errors import ClusterError, ConfigError, LostError, MissingExtraError
from voxlane.temporary import make_short_folder, remove_short_folder

_CONNECT_S = 5.0
_ANSWER_S = 15.0
_HEAD_INTERVAL_S, _HEAD_MISSES = 3.0, 4
"""Time between checks of the cluster's head, and failed checks in a row after which it is lost."""
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = 4
"""Type of the first frame that a gRPC server, such as a Ray head, sends."""
_TOKEN_MODE = "RAY_AUTH_MODE"
_OBJECT_STORE_BYTES = 160 << 20
_SOCKET_PATH_BYTES = 107
_SESSION_NAME_BYTES = 70
"""Length of the path that Ray adds to its folder: /session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store."""
_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise Ray hides GPUs from workers that request none, and warns on every start that this will change.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Time within which a dead worker is noticed; Ray's default of 2 s delays every recovery by as much.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # It costs a process per run, and reports only what a lost node shows anyway.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Workers keep their working directory, so that relative paths in a decoder or config keep their meaning.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Our defaults for settings that Ray reads only from the environment."""


@dataclass(frozen=True)
class RayNode:
    """A machine of a Ray cluster, with its total or its free resources."""

    id: str
    cpus: float
    gpus: float

    def count_fitting_workers(self, cpus: float, gpus: float) -> int:
        """Return how many workers of that size fit; a million for workers that need nothing."""
        limits = [
            math.floor(available / needed + 1e-6)
            for available, needed in ((self.cpus, cpus), (self.gpus, gpus))
            if needed > 0
        ]
        return max(0, min(limits, default=1_000_000))


def place_workers(
    nodes: Sequence[RayNode], workers: int, cpus: float, gpus: float = 0.0, spread: int | None = None
) -> list[str]:
    """Return the node id of every worker that fits, grouped by node; fewer than `workers` if not all fit.

    The nodes with the most free resources come first, so that a run uses as few nodes as possible. `spread`: use this
    many nodes with equally many workers on each; if fewer nodes have the resources, each keeps its number.
    """
    by_capacity = sorted(nodes, key=lambda node: (-node.count_fitting_workers(cpus, gpus), node.id))
    if spread is None:
        placed = [node.id for node in by_capacity for _ in range(min(workers, node.count_fitting_workers(cpus, gpus)))]
        return placed[:workers]
    per_node = workers_per_node(workers, spread)
    usable = [node.id for node in by_capacity if node.count_fitting_workers(cpus, gpus) >= per_node]
    return [node_id for node_id in usable[:spread] for _ in range(per_node)]


def workers_per_node(workers: int, nodes: int) -> int:
    """Return the number of workers on each of `nodes`. Raises ConfigError if they do not divide evenly."""
    if nodes < 1 or workers % nodes:
        raise ConfigError(
            f"--nodes {nodes}: {workers} workers do not divide evenly over them",
            fix=f"Give --workers {max(1, round(workers / max(1, nodes))) * max(1, nodes)}",
        )
    return workers // nodes


def add_released(free: Sequence[RayNode], node_ids: Sequence[str], cpus: float, gpus: float) -> list[RayNode]:
    """Return the resources that would be free if workers of that size on `node_ids` (one id per worker) ended."""
    return [
        replace(node, cpus=node.cpus + cpus * node_ids.count(node.id), gpus=node.gpus + gpus * node_ids.count(node.id))
        for node in free
    ]


def check_capacity(
    nodes: Sequence[RayNode],
    workers: int,
    cpus: float,
    gpus: float = 0.0,
    spread: int | None = None,
    min_workers: int | None = None,
) -> None:
    """Raise if fewer than `min_workers` (default: all) workers of that size could ever run on `nodes`."""
    minimums = {"--workers": (workers, 1), "--cpus-per-worker": (cpus, 0), "--gpus-per-worker": (gpus, 0)}
    for name, (number, minimum) in minimums.items():
        if not number >= minimum:
            raise ConfigError(f"{name} {number:g} is too small", fix=f"Give {minimum} or more")
    fitting = len(place_workers(nodes, workers, cpus, gpus, spread))
    if fitting >= (workers if min_workers is None else min_workers):
        return
    if spread is not None and spread > len(nodes):
        raise ClusterError(f"{spread} nodes requested, the cluster has {len(nodes)}", fix=f"Give --nodes {len(nodes)}")
    total = sum(node.gpus if gpus else node.cpus for node in nodes)
    resource, option = ("GPU", "--gpus-per-worker") if gpus else ("CPU", "--cpus-per-worker")
    across = f" on {spread} nodes" if spread is not None else ""
    fixes = [f"--workers {fitting}"] if fitting and spread is None else []
    smaller = math.floor(100 * total / workers) / 100
    if spread is None and 0 < smaller < (gpus or cpus):
        fixes.append(f"{option} {smaller:g}")
    raise ClusterError(
        f"{workers} workers of {format_resources(cpus, gpus)}{across} requested, the cluster has {total:g} {resource} "
        f"on {len(nodes)} node{'s' * (len(nodes) != 1)}: {fitting} fit",
        fix=f"Give {' or '.join(fixes)}" if fixes else f"Give fewer workers, or a smaller {option}",
    )


def format_resources(cpus: float, gpus: float) -> str:
    """Format resources, such as `1 CPU and 0.5 GPU`."""
    return f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")


@contextmanager
def open_cluster(address: str | None = None, *, cpus: float | None = None) -> Iterator[str]:
    """Connect to the Ray cluster at `address`, or start one on this machine that ends with the block; yield the address
    (host:port) of its head.

    `address`: host:port of its head, or `auto` for the cluster that this machine is a node of. `cpus`: CPUs of a
    cluster started here (default: all of the machine). A process that is connected already keeps its cluster.
    """
    set_defaults()
    try:
        import ray
        import ray._private.auto_init_hook as hook
        import ray._private.worker
        import ray.train.torch
    except ImportError:
        raise MissingExtraError.of("ray", "running on a cluster") from None
    # A thread that still waits for ranks when we disconnect would otherwise start or join any Ray on the machine.
    hook.enable_auto_connect = False
    if ray.is_initialized():
        yield ray.get_runtime_context().gcs_address
        return
    with ExitStack() as cleanup:
        arguments: dict[str, Any] = {"address": address}
        environment: Any = nullcontext()
        if address is None:
            parent = tempfile.gettempdir()
            if len(os.fsencode(parent)) + 20 + _SESSION_NAME_BYTES > _SOCKET_PATH_BYTES:
                parent = "/tmp"  # the paths of Ray's sockets would be too long for the system
            folder = make_short_folder(parent)
            cleanup.callback(remove_short_folder, folder)
            cleanup.enter_context(_reap_processes(folder))
            environment = _temporary_files_in(folder)
            arguments = {
                "address": "local",
                "num_cpus": cpus,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": True,  # without it, actors that a scheduler stops keep their resources forever
                "_temp_dir": folder,
            }
        elif address != "auto":
            _check_reachable(address)
        # Ray installs handlers of SIGTERM: one in Python, that exits with status 15, and one that prints a stack trace.
        handler = signal.getsignal(signal.SIGTERM)
        cleanup.callback(setattr, ray._private.utils, "set_sigterm_handler", ray._private.utils.set_sigterm_handler)
        ray._private.utils.set_sigterm_handler = lambda handler: None
        try:
            with environment:
                ray.init(**arguments, log_to_driver=False, logging_level=logging.CRITICAL)
        except Exception as error:  # noqa: BLE001 - Ray raises any type; each is translated
            raise _explain_connection_error(address, error) from None
        cleanup.callback(ray.shutdown)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        ray._private.worker._worker_logs_enabled = False  # voxlane itself reports dead workers
        yield ray.get_runtime_context().gcs_address


@contextmanager
def _reap_processes(folder: str) -> Iterator[None]:
    """End the processes of the cluster whose folder this is after the block, or when this process ends."""
    if not os.path.exists("/proc/self/environ"):
        yield
        return
    command = [sys.executable, "-I", "-S", reaper.__file__, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield  # then the input is closed, and the reaper is waited for


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Let the processes that are started in the block put their temporary files into a folder. Caches of compiled code
    stay where they are."""
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # as torch does
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    environment = {"TORCHINDUCTOR_CACHE_DIR": cache, **os.environ, "TMPDIR": folder}
    before = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR")}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def list_nodes() -> list[RayNode]:
    """Return the nodes of the cluster that this process is connected to, with all their resources."""
    import ray

    return [
        RayNode(node["NodeID"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def list_free_nodes() -> list[RayNode]:
    """Return the nodes of the cluster that this process is connected to, with their free resources."""
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    return [
        replace(node, cpus=available[node.id].get("CPU", 0.0), gpus=available[node.id].get("GPU", 0.0))
        for node in list_nodes()
        if node.id in available
    ]


def set_defaults() -> None:
    """Set our defaults for Ray in the environment, unless the user has set them."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def _check_reachable(address: str) -> None:
    """Raise if no Ray head answers at host:port. Ray itself would try for a minute."""
    _, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise ConfigError(
            f"--address: expected host:port, got {address!r}",
            fix="Give host:port of the cluster's head, such as 10.0.0.5:6379, or auto",
        )
    answer = _ask_head(address) if _is_grpc_server(address) else None
    if answer is None:
        raise ClusterError(
            f"no Ray cluster answers at {address}",
            fix="Check it with `ray status --address HOST:PORT`, or leave --address out to start one on this machine",
        )
    if _is_token_missing(answer) and _enable_token():
        answer = _ask_head(address)
    if answer is not None and _is_token_missing(answer):
        raise _token_error(address)
    # Other errors are answers too: ray.init reports what they mean.


def _is_grpc_server(address: str) -> bool:
    """Return whether a gRPC server, as a Ray head is one, answers there."""
    try:
        with _connect(address) as connection:
            connection.sendall(_HTTP2_HELLO)
            frame = connection.recv(9)  # length (3 bytes), type, flags, stream
    except (OSError, OverflowError):
        return False
    return len(frame) >= 4 and frame[3] == _HTTP2_SETTINGS


def _ask_head(address: str) -> Future[Any] | None:
    """Return the result of connecting to a Ray head; None if it does not answer. Ray itself would keep trying for many
    minutes."""
    raylet: Any = importlib.import_module("ray._raylet")
    answer = run_in_thread(partial(raylet.GcsClient, address=address))
    return answer if futures.wait([answer], timeout=_ANSWER_S).done else None


def _is_token_missing(answer: Future[Any]) -> bool:
    """Return whether a head refused this process because of its token."""
    return type(answer.exception()).__name__ == "AuthenticationError"


def _enable_token() -> bool:
    """Send the user's token from now on; return False if there is none, or if the user has set Ray's mode.

    A token is enough for `ray start --head`, but a process that connects sends it only if the mode is set too.
    """
    raylet: Any = importlib.import_module("ray._raylet")
    if _TOKEN_MODE in os.environ or not raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        return False
    os.environ[_TOKEN_MODE] = "token"
    raylet.Config.initialize("")  # Ray has read the mode already
    return True


def _token_error(address: str | None) -> ClusterError:
    return ClusterError(
        f"the Ray cluster at {address} rejects the token",
        fix="Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token it was started with",
    )


def is_listening(address: str) -> bool:
    """Return whether anything accepts connections at host:port."""
    try:
        with _connect(address):
            return True
    except (OSError, OverflowError):
        return False


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S)


def run_in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in a thread that does not keep the process alive; return its future result."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: whoever waits gets it
            result.set_exception(error)

    threading.Thread(target=run, name="voxlane-ray", daemon=True).start()
    return result


def wait_watching_head(
    result: Future[Any], address: str, *, fix: str = "", on_wait: Callable[[], None] | None = None
) -> Any:
    """Return what `result` becomes. Raises LostError with `fix` when the head at `address` is lost.

    Ray itself would wait a minute for a lost head, and then end the process. `on_wait` is called every few seconds.
    """
    misses = 0
    while not futures.wait([result], timeout=_HEAD_INTERVAL_S).done:
        misses = 0 if is_listening(address) else misses + 1
        if misses >= _HEAD_MISSES:
            raise LostError(f"the head of the Ray cluster at {address} was lost", fix=fix)
        if on_wait is not None and not misses:
            on_wait()
    return result.result()


def shorten(error: object, length: int = 300) -> str:
    """Return an error's text on one line."""
    return " ".join(str(error).split())[:length]


def _explain_connection_error(address: str | None, error: Exception) -> ClusterError:
    """Return the error for a failed start or connection. Ray has no types for its causes, only text."""
    text = shorten(error)
    if address is None:
        return ClusterError(f"a local Ray did not start: {text}", fix="Check free memory and the disk of /tmp")
    problem = f"does not accept this machine: {text}"
    fix = f"Run on one of its nodes, or join it first: ray start --address={address}"
    if "uthenti" in str(error) or "token" in str(error):
        return _token_error(address)
    if "ersion mismatch" in str(error):
        problem, fix = f"has another version: {text[:200]}", "Install the same version on all"
    elif address == "auto":
        return ClusterError(
            "this machine is not a node of a running Ray cluster",
            fix="Start one (`ray start --head`), give --address HOST:PORT, or leave --address out",
        )
    return ClusterError(f"the Ray cluster at {address} {problem}", fix=fix)
