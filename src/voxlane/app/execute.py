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

from voxlane.app.objects import Object, deleting, name_of, spec
from voxlane.app.trouble import ready
from voxlane.errors import ClusterError, NotRunningError
from voxlane.kube.client import Cluster, path_of

_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE = 0, 1, 2, 3, 4


def choose(pods: Sequence[Object], app: str, why: str) -> Object:
    """The first pod that runs; `why` says why none does."""
    up = [pod for pod in pods if ready(pod) and not deleting(pod)]
    if not up:
        raise NotRunningError(f"no pod of it runs: {why}", uri=f"app {app}")
    return min(up, key=name_of)


def run(cluster: Cluster, pod: Object, command: Sequence[str], *, container: str = "", stdin: bool, tty: bool) -> int:
    """Run it with this process's streams; returns its status. `tty`: this terminal is handed over until it ends."""
    query = [
        ("container", container or str(spec(pod)["containers"][0]["name"])),
        *(("command", word) for word in command),
        ("stdin", str(stdin).lower()),
        ("stdout", "true"),
        ("stderr", str(not tty).lower()),
        ("tty", str(tty).lower()),
    ]
    socket = cluster.socket(f"{path_of('v1', 'Pod', cluster.namespace, name_of(pod))}/exec", query=query)
    with contextlib.closing(socket), _raw_terminal(socket) if tty else contextlib.nullcontext():
        if stdin:
            # A daemon: a read of a terminal that nobody types at cannot be ended.
            threading.Thread(target=_send, args=(socket,), daemon=True).start()
        return _receive(socket)


def _send(socket: Any) -> None:
    from websocket import WebSocketException

    with contextlib.suppress(WebSocketException, OSError):
        while data := os.read(sys.stdin.fileno(), 65536):
            socket.send_binary(bytes([_STDIN]) + data)
        socket.send_binary(bytes([255, _STDIN]))  # that it ends: known to servers from Kubernetes 1.30 on


def _receive(socket: Any) -> int:
    """Print what comes until the command has ended; returns its status."""
    from websocket import WebSocketException

    out = {_STDOUT: sys.stdout.buffer, _STDERR: sys.stderr.buffer}
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
            return ended(data)
        if channel in out and data:
            out[channel].write(data)
            out[channel].flush()


def ended(said: bytes) -> int:
    """A command's status, from what the server says at its end."""
    try:
        outcome = json.loads(said)
    except ValueError:
        outcome = {"status": "Failure", "message": said.decode(errors="replace")}
    if outcome.get("status") == "Success":
        return 0
    for cause in (outcome.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise ClusterError(f"the command could not be run: {' '.join(str(outcome.get('message')).split())}")


@contextlib.contextmanager
def _raw_terminal(socket: Any) -> Iterator[None]:
    """This terminal passes every key on, and its size."""
    import termios
    import tty

    stream = sys.stdin.fileno()
    before = termios.tcgetattr(stream)

    def resize(*_: object) -> None:
        size = os.get_terminal_size(sys.stdout.fileno())
        socket.send_binary(bytes([_RESIZE]) + json.dumps({"Width": size.columns, "Height": size.lines}).encode())

    earlier = signal.signal(signal.SIGWINCH, resize)
    try:
        tty.setraw(stream)
        resize()
        yield
    finally:
        signal.signal(signal.SIGWINCH, earlier)
        termios.tcsetattr(stream, termios.TCSADRAIN, before)
