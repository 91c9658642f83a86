"""A port of a pod as a port of this machine, over the API server's websocket.

Each local connection has a websocket of its own, opened when it comes, to the pod that is there then: a pod that is
replaced is found again by the next connection.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from voxlane.errors import ClusterError, ConfigError
from voxlane.kube.client import Cluster, path_of

HOST = "127.0.0.1"
_DATA, _ERROR = 0, 1
"""Channels of the first port. What comes first on each is the port's number."""
_READ_BYTES = 64 * 1024
_POLL_S = 0.3
_PATIENCE_S = 20.0
"""How long a connection is held while no pod takes it."""
_PING_S = 30.0


class Forward:
    """Listens on `port` of the loopback address for the time of the block, and passes connections to `remote_port` of
    the pod whose name `pod` returns."""

    def __init__(
        self,
        cluster: Cluster,
        pod: Callable[[], str],
        remote_port: int,
        local_port: int = 0,
        *,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`pod` may raise a ClusterError, and is then asked again. `local_port` 0: any. `say` takes a line when pods
        take no connections, and when they do again."""
        self._cluster = cluster
        self._pod = pod
        self._remote_port = remote_port
        self._say = say
        self._failing = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self.port = local_port

    def __enter__(self) -> Forward:
        self._listener = socket.socket()
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((HOST, self.port))
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"port {self.port} cannot be used: {error.strerror}", fix="Choose another") from None
        self._listener.listen(64)
        self._listener.settimeout(_POLL_S)
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="voxlane-forward", daemon=True)
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._accepting.join(5)
        with self._lock:
            left = list(self._threads)
        for thread in left:
            thread.join(2)  # daemons: one that waits for the server does not hold the end up

    def _accept(self) -> None:
        with self._listener:
            while not self._stop.is_set():
                try:
                    local, _ = self._listener.accept()
                except TimeoutError:
                    continue
                thread = threading.Thread(target=self._serve, args=(local,), name="voxlane-forward", daemon=True)
                with self._lock:
                    self._threads.add(thread)
                thread.start()

    def _serve(self, local: socket.socket) -> None:
        try:
            with local:
                local.settimeout(None)
                if (remote := self._connect()) is not None:
                    try:
                        self._pass_on(local, remote)
                    finally:
                        _close(remote)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _connect(self) -> Any:
        """A websocket to the pod's port; None if there was none in time."""
        until = time.monotonic() + _PATIENCE_S
        while not self._stop.is_set():
            try:
                where = path_of("v1", "Pod", self._cluster.namespace, self._pod())
                return self._cluster.socket(f"{where}/portforward", query=[("ports", str(self._remote_port))])
            except ClusterError as error:
                self._failed(str(error))
            if time.monotonic() > until:
                return None
            self._stop.wait(_POLL_S)
        return None

    def _pass_on(self, local: socket.socket, remote: Any) -> None:
        """Both ways, in one thread, because a TLS connection must not be read and written by two at once."""
        from websocket import WebSocketException

        begun: set[int] = set()
        quiet_since = time.monotonic()
        with selectors.DefaultSelector() as ready, contextlib.suppress(WebSocketException, OSError):
            ready.register(local, selectors.EVENT_READ)
            ready.register(remote.sock, selectors.EVENT_READ)
            while not self._stop.is_set():
                # What TLS has read ahead is not seen by select.
                held = getattr(remote.sock, "pending", int)()
                found = {remote.sock} if held else {key.fileobj for key, _ in ready.select(_POLL_S)}
                if remote.sock in found and not self._from_pod(local, remote, begun):
                    return
                if local in found:
                    if not (data := local.recv(_READ_BYTES)):
                        return
                    remote.send_binary(bytes([_DATA]) + data)
                if found:
                    quiet_since = time.monotonic()
                elif time.monotonic() - quiet_since > _PING_S:  # whatever lies between may end quiet connections
                    remote.ping()
                    quiet_since = time.monotonic()

    def _from_pod(self, local: socket.socket, remote: Any, begun: set[int]) -> bool:
        """Pass one frame on; False: it was the last one."""
        from websocket import ABNF

        kind, frame = remote.recv_data_frame(True)
        if kind == ABNF.OPCODE_CLOSE:
            return False
        if kind != ABNF.OPCODE_BINARY or not frame.data:
            return True
        channel, data = frame.data[0], frame.data[1:]
        if channel not in begun:
            begun.add(channel)
        elif channel == _ERROR:
            self._failed(f"the pod does not take connections: {data.decode(errors='replace').strip()}")
            return False
        elif channel == _DATA:
            local.sendall(data)
            self._works()
        return True

    def _failed(self, why: str) -> None:
        with self._lock:
            said, self._failing = self._failing, True
        if not said and self._say is not None and not self._stop.is_set():
            self._say(why)

    def _works(self) -> None:
        with self._lock:
            said, self._failing = self._failing, False
        if said and self._say is not None:
            self._say("connected again")


def _close(remote: Any) -> None:
    """Say goodbye without waiting for an answer. (`WebSocket.close` waits 3 s for one, and where the server was the
    first to close leaves the connection open.)"""
    from websocket import WebSocketException

    with contextlib.suppress(WebSocketException, OSError, AttributeError):  # the last: there is no connection any more
        remote.send_close()
    remote.shutdown()
