"""Plain HTTP requests to one server, for what the byte engine cannot do.

Paths are sent exactly as given. HTTP libraries resolve `..` and join slashes, which would address another object.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import time
import urllib.parse
import urllib.request
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPSConnection
from typing import Any

from voxlane.errors import VoxlaneError
from voxlane.store.config import StoreConfig
from voxlane.store.translate import TransientError, describe_connection_error

_MAX_IDLE_S = 15.0
"""Connections that were idle for longer are closed, because servers close them at about that time."""


class HttpPool:
    """Connections to one server, which are kept open and shared by all threads."""

    def __init__(self, endpoint: str, config: StoreConfig) -> None:
        self._endpoint = urllib.parse.urlsplit(endpoint)
        self._config = config
        self._idle: deque[tuple[float, HTTPConnection]] = deque()
        # Not `__del__`: in a reference cycle the sockets' finalizers could run first, and warn.
        weakref.finalize(self, _close_all, self._idle)
        self._tls: ssl.SSLContext | None = None
        is_direct = urllib.request.proxy_bypass(self._endpoint.netloc)
        self._proxy = None if is_direct else urllib.request.getproxies().get(self._endpoint.scheme)

    @contextlib.contextmanager
    def request(
        self, method: str, target: str, headers: Mapping[str, str], body: Any = None, *, uri: str
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield its response, whatever its status. `target` is the path and query, percent-encoded.
        Raises TransientError, which names `uri`, if the connection fails before the response was read."""
        connection, is_reused = self._acquire()
        response = None
        try:
            try:
                connection.request(method, self._absolute(target), body, dict(headers))
                response = connection.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                if not is_reused or method == "POST":  # a POST may have had its effect
                    raise
                connection.close()  # the server closed it while it was idle
                connection = self._connect()
                connection.request(method, self._absolute(target), body, dict(headers))
                response = connection.getresponse()
            yield response
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, VoxlaneError):  # the caller's, for the response's status
                raise
            raise TransientError(f"the connection failed ({describe_connection_error(error)})", uri) from None
        finally:
            if response is not None and response.isclosed() and not response.will_close:
                self._idle.append((time.monotonic(), connection))
            else:
                connection.close()
                if response is not None:
                    response.close()

    def _acquire(self) -> tuple[HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        while True:
            try:
                since_s, connection = self._idle.pop()
            except IndexError:
                return self._connect(), False
            if time.monotonic() - since_s < _MAX_IDLE_S:
                return connection, True
            connection.close()

    def _connect(self) -> HTTPConnection:
        scheme, host = self._endpoint.scheme, self._endpoint.hostname or ""
        timeout_s = self._config.read_timeout_s
        address, proxy = self._endpoint.netloc, self._proxy
        if scheme == "http":
            return HTTPConnection(urllib.parse.urlsplit(proxy).netloc if proxy else address, timeout=timeout_s)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        if not proxy:
            return HTTPSConnection(address, timeout=timeout_s, context=self._tls)
        connection = HTTPSConnection(urllib.parse.urlsplit(proxy).netloc, timeout=timeout_s, context=self._tls)
        connection.set_tunnel(host, self._endpoint.port)
        return connection

    def _absolute(self, target: str) -> str:
        """Return the target as the request line needs it: an http proxy needs the complete URL."""
        is_proxied = self._endpoint.scheme == "http" and self._proxy
        return f"http://{self._endpoint.netloc}{target}" if is_proxied else target


def _close_all(connections: deque[tuple[float, HTTPConnection]]) -> None:
    while connections:
        connections.pop()[1].close()
