"""Whole objects read many at a time by one thread.

With a thread for each request, small objects cost more processor time for handing the interpreter's lock around than
for their bytes: 0.13 ms instead of 0.08 ms for an object of 100 KiB (docs/log.md). Only the usual case is handled here:
a complete response with the expected size, version and checksum. Everything else is left to the caller's `fall_back`,
which retries and raises voxlane's errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from voxlane.store.config import StoreConfig
from voxlane.store.direct import DirectStore, new_writable_bytes
from voxlane.store.http import MAX_IDLE_S, HttpPool, parse_headers

_HEADER_BYTES = 16 << 10
"""Room for the header of a response; a longer one is left to `fall_back`."""
_SWEEP_S = 1.0
"""Seconds between two searches for connections that are too slow or were idle for too long."""
_CLOSE_S = 1.0
"""Seconds that closing waits for the thread to end."""


@dataclass(slots=True, eq=False)
class WholeRead:
    """One object to read."""

    key: str
    size: int
    etag: str | None
    """Version that is expected, without quotes; None for any."""
    request: bytes
    count: Callable[[int, int], None]
    """Called with the number of bytes that were read, and of retries that follow, once the request has ended."""
    fall_back: Callable[[], Future[bytes]]
    """Starts to read the object in another way."""
    future: Future[bytes] = field(default_factory=Future)
    is_repeated: bool = False
    """Whether the request was sent again because the server had closed an idle connection."""


class MultiplexedReader:
    """Reads whole objects of one bucket on a thread that all reads of a store share. Safe to use from many threads; of
    no use in a forked child. Raises OSError or RuntimeError if the process can open no file or start no thread."""

    def __init__(self, direct: DirectStore, config: StoreConfig) -> None:
        loop = asyncio.SelectorEventLoop()  # not `new_event_loop`: a program may have installed loops of another kind
        connections = _Connections(direct, config, loop)
        thread = threading.Thread(target=_run, args=(loop, connections), name="voxlane-reads", daemon=True)
        try:
            thread.start()
        except BaseException:
            loop.close()
            raise
        self._connections, self._loop = connections, loop
        weakref.finalize(self, _close, os.getpid(), loop, connections, thread)

    def submit(self, read: WholeRead) -> Future[bytes]:
        """Start to read an object; the future has its bytes."""
        if self._connections.take(read):
            with contextlib.suppress(RuntimeError):  # the loop has ended, and left the read to its `fall_back`
                self._loop.call_soon_threadsafe(self._connections.start_arrived)
        return read.future


def _run(loop: asyncio.AbstractEventLoop, connections: _Connections) -> None:
    try:
        loop.run_forever()
    finally:
        connections.end()
        loop.close()


def _close(pid: int, loop: asyncio.AbstractEventLoop, connections: _Connections, thread: threading.Thread) -> None:
    if os.getpid() != pid:
        return  # the loop belongs to the parent of this forked process
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(connections.close)
    if thread is not threading.current_thread():
        thread.join(_CLOSE_S)


class _Connections:
    """The connections to the server. Used by the loop's thread alone, except for `take`."""

    def __init__(self, direct: DirectStore, config: StoreConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.direct = direct
        self.config = config
        self._arrived: list[WholeRead] = []
        self._arriving = threading.Lock()
        self._has_ended = False
        self._loop = loop
        self._pool: HttpPool = direct.pool
        self._waiting: deque[WholeRead] = deque()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._openings: dict[WholeRead, asyncio.Task[None]] = {}
        self._max_connections = config.max_concurrency
        """Fewer for a second after a connection failed."""
        self._sweep_timer: asyncio.TimerHandle | None = None

    def take(self, read: WholeRead) -> bool:
        """Take over a read from any thread; return whether `start_arrived` must be scheduled for it."""
        with self._arriving:
            if not self._has_ended:
                self._arrived.append(read)
                return len(self._arrived) == 1
        read.future.set_running_or_notify_cancel()
        self.hand_over(read)
        return False

    def start_arrived(self) -> None:
        """Start the reads that were taken over."""
        with self._arriving:
            reads, self._arrived = self._arrived, []
        self._waiting.extend(reads)
        self._start_waiting()

    def _next_read(self) -> WholeRead | None:
        """Return the next read, which can no longer be cancelled."""
        while self._waiting:
            read = self._waiting.popleft()
            if read.future.running() or read.future.set_running_or_notify_cancel():
                return read
        return None

    def _start_waiting(self) -> None:
        while self._idle or len(self._open) + len(self._openings) < self._max_connections:
            read = self._next_read()
            if read is None:
                return
            if self._idle:
                self._idle.pop().start(read)
            else:
                self._openings[read] = self._loop.create_task(self._connect(read))

    async def _connect(self, read: WholeRead) -> None:
        try:
            host, port = self._pool.address
            async with asyncio.timeout(self.config.connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self), host, port, ssl=self._pool.tls
                )
        except Exception:  # noqa: BLE001 - a task's boundary: the read must not be lost; `fall_back` meets it again
            del self._openings[read]
            self._waiting.appendleft(read)
            # The process or the server may have no room for more connections; those that are open must be enough.
            self._max_connections = len(self._open) + len(self._openings)
            if not self._max_connections:  # the server cannot be reached
                self._max_connections = self.config.max_concurrency
                for waiting in iter(self._next_read, None):
                    self.hand_over(waiting)
            self._start_waiting()
            return
        del self._openings[read]
        self._open.add(connection)
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(_SWEEP_S, self._sweep)
        connection.start(read)

    def release(self, connection: _Connection) -> None:
        """Use a connection, whose response was read, for the next read."""
        read = self._next_read()
        if read is None:
            self._idle.append(connection)
        else:
            connection.start(read)

    def lose(self, connection: _Connection, read: WholeRead | None, *, repeat: bool) -> None:
        """Forget a connection that has ended, and read what it was reading in another way. `repeat`: the server closed
        it before it saw the request."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if read is not None and repeat and not read.is_repeated:
            read.is_repeated = True
            self._waiting.appendleft(read)
        elif read is not None:
            self.hand_over(read)
        self._start_waiting()

    def hand_over(self, read: WholeRead) -> None:
        """Leave a read to its `fall_back`."""

        def finish(other: Future[bytes]) -> None:
            error = other.exception()
            if error is None:
                read.future.set_result(other.result())
            else:
                read.future.set_exception(error)

        read.count(0, 1)
        try:
            read.fall_back().add_done_callback(finish)
        except RuntimeError as error:  # at exit no thread can be started, and the caller would wait for ever
            read.future.set_exception(error)

    def _sweep(self) -> None:
        """Close connections whose response is too slow, or that were idle for too long."""
        now_s = time.monotonic()
        for connection in list(self._open):
            connection.check_rate(now_s)
        self._max_connections = self.config.max_concurrency
        self._start_waiting()
        self._sweep_timer = self._loop.call_later(_SWEEP_S, self._sweep) if self._open else None

    def end(self) -> None:
        """Take over no more reads, and leave those that have not ended to their `fall_back`: nothing runs the loop."""
        with self._arriving:
            self._has_ended = True
        self._waiting.extend(self._arrived)
        reads = [*self._openings, *(connection.read for connection in self._open), *iter(self._next_read, None)]
        for read in reads:
            if read is not None:
                self.hand_over(read)

    def close(self) -> None:
        """Close all connections and end the loop."""
        for task in self._openings.values():
            task.cancel()
        self._waiting.clear()
        for connection in list(self._open):
            connection.abandon()
        self._loop.call_soon(self._loop.call_soon, self._loop.stop)  # after the connections' last callbacks


class _Connection(asyncio.BufferedProtocol):
    """One connection, which reads one object after the other."""

    def __init__(self, owner: _Connections) -> None:
        self._owner = owner
        self._transport: Any = None
        self.read: WholeRead | None = None
        """The object that is being read."""
        self._header = memoryview(bytearray(_HEADER_BYTES))
        self._body: bytes | None = None
        """The object, once the header of its response has arrived."""
        self._target = self._header
        """What is being filled: `_header`, or the memory of `_body`."""
        self._filled = 0
        self._headers: dict[str, str] = {}
        self._was_used = False
        self._since_s = time.monotonic()
        """When the connection became idle, or when the rate was last checked."""
        self._bytes_since = 0

    def connection_made(self, transport: Any) -> None:
        """Remember the connection's transport."""
        self._transport = transport

    def start(self, read: WholeRead) -> None:
        """Send the request for an object."""
        self.read = read
        self._since_s, self._bytes_since = time.monotonic(), 0
        self._transport.write(read.request)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes."""
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle bytes that have arrived."""
        self._filled += nbytes
        self._bytes_since += nbytes
        if self.read is None:
            self._transport.abort()  # nothing was requested
            return
        if self._body is None and not self._take_header(self.read):
            return
        if self._filled == self.read.size:
            self._finish(self.read)

    def _take_header(self, read: WholeRead) -> bool:
        """Return whether the header is complete and the response as expected."""
        text = bytes(self._header[: self._filled])
        end = text.find(b"\r\n\r\n")
        if end < 0:
            if self._filled == len(self._header):
                self._transport.abort()
            return False
        status, _, block = text[:end].partition(b"\r\n")
        self._headers = headers = parse_headers(block)
        arrived = self._filled - end - 4
        is_expected = (
            status[:7] == b"HTTP/1." and status[8:12] == b" 200"
            and headers.get("content-length") == str(read.size)
            and "transfer-encoding" not in headers
            and arrived <= read.size
            and bool(etag := headers.get("etag", "").strip('"'))
            and read.etag in (None, etag)
        )  # fmt: skip
        if not is_expected:
            self._transport.abort()
            return False
        self._body, target = new_writable_bytes(read.size)
        self._target = target.data
        self._target[:arrived] = self._header[end + 4 : self._filled]
        self._filled = arrived
        return True

    def _finish(self, read: WholeRead) -> None:
        """Check the object, which is complete, and use the connection for the next one."""
        body, headers = self._body, self._headers
        assert body is not None
        self.read = self._body = None
        self._target, self._filled, self._was_used = self._header, 0, True
        self._since_s = time.monotonic()
        try:
            self._owner.direct.check_whole(headers, body, read.key)
        except Exception:  # noqa: BLE001 - the loop's boundary: wrong bytes, or no checksum; `fall_back` meets it again
            self._owner.hand_over(read)
        else:
            read.count(len(body), 0)
            read.future.set_result(body)
        if "close" in headers.get("connection", "").lower():
            self._transport.close()
        else:
            self._owner.release(self)

    def check_rate(self, now_s: float) -> None:
        """Close the connection if its response is slower than the store's config allows, or if it is not in use."""
        elapsed_s = now_s - self._since_s
        if self.read is None:
            if elapsed_s > MAX_IDLE_S:
                self._transport.close()
        elif elapsed_s > self._owner.config.read_timeout_s:
            if self._bytes_since <= elapsed_s * self._owner.config.min_bytes_per_s:
                self._transport.abort()
            self._since_s, self._bytes_since = now_s, 0

    def abandon(self) -> None:
        """Close the connection without reading the object in another way: nobody waits for it."""
        self.read = None
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave an unfinished read to another connection."""
        read, self.read = self.read, None
        is_unused = self._was_used and self._body is None and self._filled == 0
        self._owner.lose(self, read, repeat=is_unused)
