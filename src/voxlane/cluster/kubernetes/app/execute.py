"""Run a command in one of an app's pods, over the API server's websocket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from voxlane.cluster.kubernetes.app.k8s import Object, is_available, name_of, spec
from voxlane.cluster.kubernetes.client import Cluster, path_of
from voxlane.errors import ClusterError, NotRunningError

_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE = 0, 1, 2, 3, 4


def choose_pod(pods: Sequence[Object], app: str, reason: str) -> Object:
    """Return the first pod that runs; `reason` explains in the error why none does."""
    running = list(filter(is_available, pods))
    if not running:
        raise NotRunningError(f"none of its pods runs: {reason}", uri=f"app {app}")
    return min(running, key=name_of)


def run(cluster: Cluster, pod: Object, command: Sequence[str], *, container: str = "", stdin: bool, tty: bool) -> int:
    """Run a command with this process's streams (with `tty`, on this terminal) and return its exit status."""
    streams = {"stdin": stdin, "stdout": True, "stderr": not tty, "tty": tty}
    query = [
        ("container", container or str(spec(pod)["containers"][0]["name"])),
        *(("command", word) for word in command),
        *((name, str(is_used).lower()) for name, is_used in streams.items()),
    ]
    socket = cluster.socket(f"{path_of('v1', 'Pod', cluster.namespace, name_of(pod))}/exec", query=query)
    with contextlib.closing(socket), _raw_terminal(socket) if tty else contextlib.nullcontext():
        if stdin:
            # A daemon thread, because a read from an idle terminal cannot be interrupted.
            threading.Thread(target=_send_stdin, args=(socket,), daemon=True).start()
        return _print_output(socket)


def _send_stdin(socket: Any) -> None:
    from websocket import WebSocketException

    with contextlib.suppress(WebSocketException, OSError):
        while data := os.read(sys.stdin.fileno(), 65536):
            socket.send_binary(bytes([_STDIN]) + data)
        socket.send_binary(bytes([255, _STDIN]))  # end of input; supported by servers since Kubernetes 1.30


def _print_output(socket: Any) -> int:
    """Print the command's output until it has ended; return its exit status."""
    from websocket import WebSocketException

    streams = {_STDOUT: sys.stdout.buffer, _STDERR: sys.stderr.buffer}
    while True:
        try:
            data = socket.recv()
        except (WebSocketException, OSError):
            data = b""
        if isinstance(data, str):
            data = data.encode()
        if not data:
            raise ClusterError("the connection ended before the command did", fix="Run it again")
        channel, data = data[0], data[1:]
        if channel == _ERROR:
            return parse_exit_status(data)
        if channel in streams and data:
            streams[channel].write(data)
            streams[channel].flush()


def parse_exit_status(message: bytes) -> int:
    """Return a command's exit status, from the server's last message."""
    try:
        result = json.loads(message)
    except ValueError:
        result = {"status": "Failure", "message": message.decode(errors="replace")}
    if result.get("status") == "Success":
        return 0
    for cause in (result.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise ClusterError(f"the command could not be run: {' '.join(str(result.get('message')).split())}")


@contextlib.contextmanager
def _raw_terminal(socket: Any) -> Iterator[None]:
    """Send every key of this terminal to the command, and the terminal's size."""
    import termios
    import tty

    stream = sys.stdin.fileno()
    attributes = termios.tcgetattr(stream)

    def send_size(*_: object) -> None:
        size = os.get_terminal_size(sys.stdout.fileno())
        socket.send_binary(bytes([_RESIZE]) + json.dumps({"Width": size.columns, "Height": size.lines}).encode())

    handler = signal.signal(signal.SIGWINCH, send_size)
    try:
        tty.setraw(stream)
        send_size()
        yield
    finally:
        signal.signal(signal.SIGWINCH, handler)
        termios.tcsetattr(stream, termios.TCSADRAIN, attributes)
