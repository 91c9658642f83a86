"""Forward a port of this machine to a port of a pod, over the API server's websocket.

Each local connection gets its own websocket to the pod that is current at that moment, so the next connection reaches a
pod that has been replaced.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

from voxlane.cluster.kubernetes.client import Cluster, path_of
from voxlane.errors import ClusterError, ConfigError

HOST = "127.0.0.1"
_DATA, _ERROR = 0, 1
"""Channels of the first port. The first message on each is the port's number."""
_READ_BYTES = 64 * 1024
_POLL_S = 0.3
_CONNECT_TIMEOUT_S = 20.0
"""How long a local connection waits for a pod that accepts it."""
_PING_S = 30.0


class _Server(socketserver.ThreadingTCPServer):
    # Daemon threads, because one that waits for the API server must not delay the end.
    allow_reuse_address = daemon_threads = True
    request_queue_size = 64


class PortForward:
    """Listens on `port` of the loopback address inside a `with` block, and forwards connections to `remote_port` of the
    pod whose name `find_pod` returns."""

    def __init__(
        self,
        cluster: Cluster,
        find_pod: Callable[[], str],
        remote_port: int,
        local_port: int = 0,
        *,
        attempts: int = 1,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """`find_pod` may raise a ClusterError, and is then called again. A `local_port` of 0 means any free port;
        otherwise the first free one of the `attempts` ports from `local_port` on is used. `report` gets a line when the
        pod stops accepting connections, and when it accepts them again."""
        self._cluster = cluster
        self._find_pod = find_pod
        self._remote_port = remote_port
        self._report = report
        self._failing = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._attempts = attempts
        self.port = local_port

    def __enter__(self) -> PortForward:
        self._server = self._listen()
        self.port = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="voxlane-forward", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()

    def _listen(self) -> _Server:
        for port in range(self.port, min(self.port + self._attempts, 65536)):
            try:
                return _Server((HOST, port), self._serve)
            except OSError as error:
                reason = error.strerror
        raise ConfigError(f"cannot listen on port {self.port}: {reason}", fix="Choose another --port")

    def _serve(self, local: socket.socket, *_: object) -> Any:
        """Forward one connection, in a thread of its own."""
        if (remote := self._connect()) is not None:
            try:
                self._relay(local, remote)
            finally:
                _close(remote)

    def _connect(self) -> Any:
        """Return a websocket to the pod's port, or None if no pod accepted it in time."""
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        while not self._stop.is_set():
            try:
                path = path_of("v1", "Pod", self._cluster.namespace, self._find_pod())
                return self._cluster.socket(f"{path}/portforward", query=[("ports", str(self._remote_port))])
            except ClusterError as error:
                self._set_failing(str(error))
            if time.monotonic() > deadline:
                return None
            self._stop.wait(_POLL_S)
        return None

    def _relay(self, local: socket.socket, remote: Any) -> None:
        """Copy bytes in both directions in one thread, because two threads must not share a TLS connection."""
        from websocket import WebSocketException

        opened_channels: set[int] = set()
        last_activity = time.monotonic()
        with selectors.DefaultSelector() as selector, contextlib.suppress(WebSocketException, OSError):
            selector.register(local, selectors.EVENT_READ)
            selector.register(remote.sock, selectors.EVENT_READ)
            while not self._stop.is_set():
                # select does not see the bytes that TLS has already read ahead.
                pending = getattr(remote.sock, "pending", int)()
                readable = {remote.sock} if pending else {key.fileobj for key, _ in selector.select(_POLL_S)}
                if remote.sock in readable and not self._relay_frame(local, remote, opened_channels):
                    return
                if local in readable:
                    if not (data := local.recv(_READ_BYTES)):
                        return
                    remote.send_binary(bytes([_DATA]) + data)
                if readable:
                    last_activity = time.monotonic()
                elif time.monotonic() - last_activity > _PING_S:  # proxies on the way may close idle connections
                    remote.ping()
                    last_activity = time.monotonic()

    def _relay_frame(self, local: socket.socket, remote: Any, opened_channels: set[int]) -> bool:
        """Copy one frame from the pod; return False if it was the last one."""
        from websocket import ABNF

        opcode, frame = remote.recv_data_frame(True)
        if opcode == ABNF.OPCODE_CLOSE:
            return False
        if opcode != ABNF.OPCODE_BINARY or not frame.data:
            return True
        channel, data = frame.data[0], frame.data[1:]
        if channel not in opened_channels:
            opened_channels.add(channel)
        elif channel == _ERROR:
            self._set_failing(f"the pod does not accept connections: {data.decode(errors='replace').strip()}")
            return False
        elif channel == _DATA:
            local.sendall(data)
            self._set_failing("")
        return True

    def _set_failing(self, reason: str) -> None:
        """Record whether the last attempt failed (for `reason`) or succeeded (""), and report a change."""
        with self._lock:
            changed, self._failing = self._failing != bool(reason), bool(reason)
        if changed and self._report is not None and not (reason and self._stop.is_set()):
            self._report(reason or "connected again")


def _close(remote: Any) -> None:
    """Close a websocket: `WebSocket.close` waits 3 s for the server, or leaves it open if the server closed first."""
    from websocket import WebSocketException

    with contextlib.suppress(WebSocketException, OSError, AttributeError):  # AttributeError: already disconnected
        remote.send_close()
    remote.shutdown()
