"""Plain HTTP requests to one server, for what the byte engine cannot do.

Paths are sent exactly as given. HTTP libraries resolve `..` and join slashes, which would address another object.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import re
import ssl
import time
import urllib.parse
import urllib.request
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any

from voxlane.errors import ConfigError, VoxlaneError
from voxlane.store.config import StoreConfig
from voxlane.store.translate import TransientError, describe_connection_error

MAX_IDLE_S = 15.0
"""Connections that were idle for longer are closed, because servers close them at about that time."""
_MAX_LINE_BYTES = 64 << 10
_MAX_HEADERS = 200
_SEND_BYTES = 256 << 10
"""Bytes of a body that are sent at a time: the socket's timeout limits how long each call may take."""
_MAX_ERROR_BYTES = 64 << 10
_DEFAULT_PORTS = {"http": 80, "https": 443}
_UNSENDABLE = re.compile(r"[\r\n\0]|[^\x00-\xff]")


class HttpResponse(HTTPResponse):
    """A response whose header is parsed without the email package.

    `http.client` hands headers to that package, which takes 0.2 ms of processor time per response: twice as long as
    receiving 100 KiB (docs/log.md).
    """

    headers: dict[str, str]  # type: ignore[assignment]  # their names are in lower case

    def __init__(self, connection: HTTPConnection, method: str, config: StoreConfig) -> None:
        super().__init__(connection.sock, method=method)
        self._config = config
        self._window_start_s = time.monotonic()
        self._window_bytes = 0

    def begin(self) -> None:
        """Read the status and the header."""
        status = 100
        while status == 100:  # an interim response
            line = self._read_line()
            version, _, rest = line.partition(b" ")
            if not (version.startswith(b"HTTP/1.") and rest[:3].isdigit()):
                raise http.client.BadStatusLine(line[:80].decode("latin-1"))
            status = int(rest[:3])
            headers = self._read_headers()
        self.status = self.code = status
        self.version = 10 if version == b"HTTP/1.0" else 11
        self.headers = self.msg = headers  # type: ignore[assignment]
        self.chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self.chunk_left = None
        length = headers.get("content-length", "")
        self.length = int(length) if length.isdecimal() and not self.chunked else None
        if status in (204, 304) or self._method == "HEAD":  # type: ignore[attr-defined]
            self.length = 0
        options = headers.get("connection", "").lower()
        keeps_open = "keep-alive" in options if self.version == 10 else "close" not in options
        self.will_close = not keeps_open or (self.length is None and not self.chunked)

    def receive_into(self, target: memoryview) -> int:
        """Fill `target` with what has arrived of the body, and wait for the first byte; return the number of bytes,
        which is 0 after the end. `readinto` would wait until `target` is full, however slow the server is."""
        if self.fp is None or self.length == 0:
            return 0
        count: int = self.fp.readinto1(target if self.length is None else target[: self.length])
        if self.length is not None:
            self.length -= count
        if not count or not self.length:
            self._close_conn()  # type: ignore[attr-defined]
        if count and self.length != 0:
            self._check_rate(count)
        return count

    def _check_rate(self, count: int) -> None:
        """Raise TimeoutError if the body, of which `count` bytes have just arrived, is too slow."""
        self._window_bytes += count
        elapsed_s = time.monotonic() - self._window_start_s
        if elapsed_s > self._config.read_timeout_s:
            if self._window_bytes < elapsed_s * self._config.min_bytes_per_s:
                rate = self._window_bytes / elapsed_s
                raise TimeoutError(f"the response is too slow: {rate:,.0f} B/s in the last {elapsed_s:.0f} s")
            self._window_start_s, self._window_bytes = time.monotonic(), 0

    def read(self, amt: int | None = None) -> bytes:
        """Return the rest of the body; raise if it ends early or is too slow."""
        if amt is not None or self.length == 0:
            return super().read(amt)
        if self.length is None:  # in chunks, or until the server closes the connection
            pieces = []
            while piece := self.read1():
                pieces.append(piece)
                self._check_rate(len(piece))
            return b"".join(pieces)
        body, filled = memoryview(bytearray(self.length)), 0
        while filled < len(body):
            count = self.receive_into(body[filled:])
            if not count:
                raise http.client.IncompleteRead(bytes(body[:filled]), len(body) - filled)
            filled += count
        return bytes(body)

    def read_error(self) -> bytes:
        """Return the body of an error, or what arrives of it: its status counts, even if its body never ends."""
        body = bytearray()
        try:
            if self.chunked:
                return self.read()
            buffer = memoryview(bytearray(_MAX_ERROR_BYTES))
            while len(body) < _MAX_ERROR_BYTES and (count := self.receive_into(buffer)):
                body += buffer[:count]
        except (OSError, http.client.HTTPException):
            self.will_close = True
        return bytes(body)

    def _read_line(self) -> bytes:
        line: bytes = self.fp.readline(_MAX_LINE_BYTES)
        if not line:
            raise http.client.RemoteDisconnected("the server closed the connection without a response")
        if not line.endswith(b"\n"):
            raise http.client.HTTPException("the response ends in its header, or a line of it is too long")
        return line

    def _read_headers(self) -> dict[str, str]:
        """Return the headers; values of headers that come more than once are joined with commas."""
        arrived = self.fp.peek()  # nearly always all of the header, which is faster to read at once
        end = arrived.find(b"\r\n\r\n")
        block = self._read_header_lines() if end < 0 or arrived.startswith(b"\r\n") else self.fp.read(end + 4)[:-2]
        if block.count(b"\n") > _MAX_HEADERS:
            raise http.client.HTTPException(f"the response has more than {_MAX_HEADERS} headers")
        return parse_headers(block)

    def _read_header_lines(self) -> bytes:
        """Return the lines of the header, line by line, up to the empty one."""
        lines: list[bytes] = []
        while (line := self._read_line()) not in (b"\r\n", b"\n"):
            lines.append(line)
            if len(lines) > _MAX_HEADERS:
                raise http.client.HTTPException(f"the response has more than {_MAX_HEADERS} headers")
        return b"".join(lines)


def parse_headers(block: bytes) -> dict[str, str]:
    """Return the headers in the lines of `block` by their names in lower case; values of headers that come more than
    once are joined with commas."""
    headers: dict[str, str] = {}
    for line in block.decode("latin-1").split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


class HttpPool:
    """Connections to one server, which are kept open and shared by all threads."""

    def __init__(self, endpoint: str, config: StoreConfig) -> None:
        self._endpoint = urllib.parse.urlsplit(endpoint)
        self._config = config
        self._idle: deque[tuple[float, HTTPConnection]] = deque()
        # Not `__del__`: in a reference cycle the sockets' finalizers could run first, and warn.
        weakref.finalize(self, _close_all, self._idle)
        if self._endpoint.scheme not in _DEFAULT_PORTS:
            raise ConfigError(
                "the endpoint must start with http:// or https://",
                uri=endpoint,
                fix="Correct StoreConfig.endpoint, or the variable that holds it",
            )
        try:
            is_valid = bool(self.address[0].encode("idna"))
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ConfigError(
                "the host or the port of the endpoint is not valid",
                uri=endpoint,
                fix="Correct StoreConfig.endpoint, or the variable that holds it",
            )
        self._netloc, self._authorization = _split_user(self._endpoint.netloc)
        is_direct = urllib.request.proxy_bypass(self._netloc)
        self._proxy = None if is_direct else urllib.request.getproxies().get(self._endpoint.scheme)
        self._proxy_netloc, self._proxy_authorization = _split_user(urllib.parse.urlsplit(self._proxy or "").netloc)
        self._host = self._netloc.removesuffix(f":{_DEFAULT_PORTS[self._endpoint.scheme]}")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the server."""
        return self._endpoint.hostname or "", self._endpoint.port or _DEFAULT_PORTS[self._endpoint.scheme]

    @property
    def has_proxy(self) -> bool:
        """Whether requests go through a proxy that the environment names."""
        return self._proxy is not None

    @functools.cached_property
    def tls(self) -> ssl.SSLContext | None:
        """How to encrypt connections; None for http."""
        return ssl.create_default_context() if self._endpoint.scheme == "https" else None

    @contextlib.contextmanager
    def request(
        self, method: str, target: str, headers: Mapping[str, str], body: Any = None, *, uri: str
    ) -> Iterator[HttpResponse]:
        """Send a request and yield its response, whatever its status. `target` is the path and query, percent-encoded.
        Raises TransientError, which names `uri`, if the connection fails before the response was read."""
        message = self.encode(method, target, headers, body)
        connection, is_reused = self._acquire()
        response = None
        try:
            try:
                response = _exchange(connection, method, message, self._config)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                if not is_reused or method == "POST":  # a POST may have had its effect
                    raise
                connection.close()  # the server closed it while it was idle
                connection = self._connect()
                response = _exchange(connection, method, message, self._config)
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

    def encode(self, method: str, target: str, headers: Mapping[str, str], body: Any = None) -> tuple[bytes, Any]:
        """Return the head of the request and its body."""
        lines = {"Host": self._host, "Accept-Encoding": "identity", **self._authorization}
        if self._proxy and self._endpoint.scheme == "http":
            target = f"http://{self._netloc}{target}"  # this proxy needs the complete URL
            lines |= _for_proxy(self._proxy_authorization)
        if isinstance(body, str):
            body = body.encode()
        if body is not None or method in ("PUT", "POST"):
            lines["Content-Length"] = str(len(body or b""))
        names = {name.lower() for name in headers}
        lines = {name: value for name, value in lines.items() if name.lower() not in names} | dict(headers)
        pieces = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]
        if any(map(_UNSENDABLE.search, pieces)):
            raise ConfigError(
                "a header of the request would contain a line break, or a character that HTTP cannot send",
                uri=self._endpoint.geturl(),
                fix="Remove it from tokens and keys",
            )
        return "\r\n".join([*pieces, "", ""]).encode("latin-1"), body

    def _acquire(self) -> tuple[HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        while True:
            try:
                since_s, connection = self._idle.pop()
            except IndexError:
                return self._connect(), False
            if time.monotonic() - since_s < MAX_IDLE_S:
                return connection, True
            connection.close()

    def _connect(self) -> HTTPConnection:
        scheme, host = self._endpoint.scheme, self._endpoint.hostname or ""
        timeout_s = self._config.connect_timeout_s  # `_exchange` replaces it once the connection is open
        if scheme == "http":
            return HTTPConnection(self._proxy_netloc if self._proxy else self._netloc, timeout=timeout_s)
        if not self._proxy:
            return HTTPSConnection(self._netloc, timeout=timeout_s, context=self.tls)
        connection = HTTPSConnection(self._proxy_netloc, timeout=timeout_s, context=self.tls)
        connection.set_tunnel(host, self._endpoint.port, _for_proxy(self._proxy_authorization))
        return connection


def _split_user(netloc: str) -> tuple[str, dict[str, str]]:
    """Return the host and port of a URL, and the header with the user and password before them, if there are any."""
    user, _, address = netloc.rpartition("@")
    credentials = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
    return address, {"Authorization": f"Basic {credentials}"} if user else {}


def _for_proxy(headers: Mapping[str, str]) -> dict[str, str]:
    return {f"Proxy-{name}": value for name, value in headers.items()}


def _exchange(connection: HTTPConnection, method: str, message: tuple[bytes, Any], config: StoreConfig) -> HttpResponse:
    """Send a request and return its response, before its body is read."""
    head, body = message
    if connection.sock is None:
        connection.connect()
        connection.sock.settimeout(config.read_timeout_s)  # type: ignore[attr-defined]
    connection.send(head)
    view = memoryview(body or b"")
    for start in range(0, len(view), _SEND_BYTES):
        connection.send(view[start : start + _SEND_BYTES])
    response = HttpResponse(connection, method, config)
    try:
        response.begin()
    except BaseException:
        response.close()
        raise
    return response


def _close_all(connections: deque[tuple[float, HTTPConnection]]) -> None:
    while connections:
        connections.pop()[1].close()
