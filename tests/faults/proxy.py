"""An HTTP proxy before a real server that injects the faults of networks, proxies and overloaded services.

It stands between the client and any server (the emulator, SeaweedFS, Azurite): a client uses its URL as the endpoint.
Requests are forwarded byte by byte, so that signatures stay valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

FaultKind = Literal[
    "reset", "lost", "truncated", "corrupted", "short", "429", "500", "503", "404", "403", "418", "html", "redirect",
    "trickle", "hang", "stall", "repeated page",
]  # fmt: skip
OF_BODIES: frozenset[FaultKind] = frozenset({"truncated", "corrupted", "short", "trickle", "stall"})
"""Faults of the bodies of responses; the others may meet every request."""
_LISTING = re.compile(rb"[?&](list-type=2|comp=list)(&|$)|^/storage/v1/b/[^/?]+/o\?")
_ENTITY = re.compile(rb"^/storage/v1/|[?&](comp=list|list-type=2|uploads)(&|=|$)")
_HTML = b"<html><head><title>Sign in</title></head><body>Please accept the terms of this network.</body></html>"
_TRICKLE_BYTES_PER_S = 100


@dataclass
class Fault:
    """A fault and the requests that meet it."""

    kind: FaultKind
    times: int = 2
    """Number of requests that meet it: the first ones that it can meet."""
    method: str = ""
    """Method of requests that meet it; empty means all."""
    path: str = ""
    """Text in the target of requests that meet it."""
    met: int = 0
    """Requests that have met it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, request: _Request) -> bool:
        """Return whether a request meets the fault, and count it."""
        if self.kind == "repeated page" and not request.is_listing:
            return False
        if self.kind == "corrupted" and request.is_entity:
            return False  # listings have no checksum
        if self.kind in OF_BODIES and request.method != b"GET":
            return False
        if (self.method and request.method != self.method.encode()) or self.path.encode() not in request.target:
            return False
        with self.lock:
            if self.met >= self.times:
                return False
            self.met += 1
            return True


class _Request(NamedTuple):
    method: bytes
    target: bytes
    head: bytes
    body: bytes

    @property
    def is_listing(self) -> bool:
        return self.method == b"GET" and _LISTING.search(self.target) is not None

    @property
    def is_entity(self) -> bool:
        """Whether the response is a document of the service rather than an object."""
        return _ENTITY.search(self.target) is not None


class FaultProxy:
    """Forwards to `upstream` (a URL; its path belongs to the endpoint) on a thread of its own."""

    def __init__(self, upstream: str) -> None:
        parsed = urlsplit(upstream)
        self._upstream = parsed.hostname or "", parsed.port or 80
        self._path = parsed.path
        self.fault: Fault | None = None
        self.requests = 0
        self._page: tuple[bytes, bytes] | None = None
        """The first page that was listed since the fault was set."""
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: socket.socket | None = None
        self._port = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        """The endpoint for clients."""
        return f"http://127.0.0.1:{self._port}{self._path}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextlib.contextmanager
    def inject(self, fault: Fault | None) -> Iterator[None]:
        """Inject `fault` in the block."""
        self.fault, self._page = fault, None
        try:
            yield
        finally:
            self.fault = None

    def refuse(self) -> None:
        """Reset all connections and refuse new ones."""
        self._call(self._close())

    def accept(self) -> None:
        """Accept connections again, on the same port."""
        self._call(self._listen())

    def refuse_for(self, seconds: float, *, after_s: float = 0.0) -> threading.Thread:
        """Start a thread that refuses connections for that time; return it."""

        def run() -> None:
            time.sleep(after_s)
            self.refuse()
            time.sleep(seconds)
            self.accept()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def _call(self, coroutine: object) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)  # type: ignore[arg-type]

    async def _listen(self) -> None:
        # Not `asyncio.start_server`: its servers leak connections that arrive while they are closed.
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=1000)
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            task = self._loop.create_task(self._open(listener.accept()[0]))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        reader = asyncio.StreamReader(limit=1 << 20)
        await self._loop.connect_accepted_socket(lambda: asyncio.StreamReaderProtocol(reader, self._serve), connection)

    async def _close(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await asyncio.gather(*self._opening)
        for writer in list(self._writers):
            _reset(writer)
        for _ in range(1000):
            if not self._writers:
                return
            await asyncio.sleep(0.01)

    async def _finish(self) -> None:
        """End all connections, also those that were just accepted."""
        await self._close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # transports close in the next turns of the loop

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._listener is None:  # the store has just gone
            _reset(writer)
            return
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                async with contextlib.AsyncExitStack() as stack:
                    upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
                    while True:
                        request = await _read_request(reader, writer)
                        self.requests += 1
                        fault = self.fault
                        is_of_body = fault is not None and fault.kind in OF_BODIES
                        kind = fault.kind if fault is not None and not is_of_body and fault.claim(request) else None
                        if kind is not None and await _answer(kind, reader, writer):
                            return
                        if upstream is None:
                            upstream = await asyncio.open_connection(*self._upstream, limit=1 << 20)
                            stack.callback(upstream[1].close)
                        upstream[1].write(request.head + request.body)
                        await upstream[1].drain()
                        head, body = await _read_response(upstream[0], request.method)
                        has_body = len(body) > 1 and head.split(b" ", 2)[1].startswith(b"2")
                        if fault is not None and is_of_body and has_body and fault.claim(request):
                            kind = fault.kind
                        if request.is_listing and kind == "repeated page" and self._page is not None:
                            head, body = self._page
                        if request.is_listing and self._page is None:
                            self._page = head, body
                        if kind == "lost":
                            _reset(writer)
                            return
                        if not await _send_response(kind, head, body, reader, writer):
                            return
        finally:
            self._writers.discard(writer)
            writer.close()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Request:
    head = await reader.readuntil(b"\r\n\r\n")
    method, target, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if _header(head, b"expect"):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return _Request(method, target, head, await _read_body(reader, head))


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    if b"chunked" in _header(head, b"transfer-encoding"):
        body = b""
        while True:
            line = await reader.readline()
            chunk = await reader.readexactly(int(line, 16) + 2)
            body += line + chunk
            if line.strip() == b"0":
                return body
    length = _header(head, b"content-length")
    return await reader.readexactly(int(length)) if length else b""


async def _read_response(reader: asyncio.StreamReader, method: bytes) -> tuple[bytes, bytes]:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.split(b" ", 2)[1]
        if status != b"100":
            break
    if method == b"HEAD" or status in (b"204", b"304"):
        return head, b""
    return head, await _read_body(reader, head)


def _header(head: bytes, name: bytes) -> bytes:
    match = re.search(rb"\r\n" + name + rb":[ \t]*([^\r\n]*)", head, re.IGNORECASE)
    return match[1].strip() if match else b""


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a TCP reset, as a crashed server does."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _answer(kind: FaultKind, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Answer instead of the server, or break the connection; return False if the fault belongs to a response."""
    if kind == "reset":
        _reset(writer)
        return True
    if kind == "hang":
        await _wait_for_close(reader)
        return True
    head, body = b"", b"<Error><Code>Injected</Code><Message>Injected by the proxy</Message></Error>"
    if kind == "html":
        status, head, body = b"200 OK", b"Content-Type: text/html\r\n", _HTML
    elif kind == "redirect":
        status, head = b"302 Found", b"Location: http://127.0.0.1:9/elsewhere\r\n"
    elif kind.isdigit():
        status = kind.encode() + b" Injected"
        code = {"404": b"NoSuchKey", "403": b"AccessDenied", "418": b"Teapot"}.get(kind, b"SlowDown")
        body = b"<Error><Code>" + code + b"</Code><Message>Injected by the proxy</Message></Error>"
        head = b"Retry-After: 1\r\n" if kind in ("429", "503") else b""
    else:
        return False
    writer.write(
        b"HTTP/1.1 " + status + b"\r\n" + head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    with contextlib.suppress(OSError):
        await writer.drain()
    return True


async def _send_response(
    kind: FaultKind | None, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Send a response with the fault in it; return whether the connection can be used again."""
    if kind not in OF_BODIES:
        writer.write(head + body)
        await writer.drain()
        return b"close" not in _header(head, b"connection").lower()
    half = len(body) // 2
    if kind == "corrupted":
        writer.write(head + body[:half] + bytes([body[half] ^ 0x20]) + body[half + 1 :])
        await writer.drain()
        return True
    if kind == "short":
        writer.write(re.sub(rb"(?i)(\r\ncontent-length:[ \t]*)\d+", b"\\g<1>%d" % half, head) + body[:half])
        await writer.drain()
        return False
    if kind == "trickle":
        writer.write(head)
        for start in range(0, len(body), 10):
            writer.write(body[start : start + 10])
            await writer.drain()
            await asyncio.sleep(10 / _TRICKLE_BYTES_PER_S)
        return True
    writer.write(head + body[:half])
    await writer.drain()
    if kind == "stall":
        await _wait_for_close(reader)
    return False


async def _wait_for_close(reader: asyncio.StreamReader, timeout_s: float = 300.0) -> None:
    """Say nothing until the client gives up."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s and not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.05)
