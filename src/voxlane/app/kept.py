"""What an app's pods printed, kept in the run's bucket:

    RUN/logs/<pod>/<when the container began>-<number>.log

Every object is written once, and holds whole lines, each after the moment it was printed, as `kubectl logs
--timestamps` shows them. Together a container's objects, in the order of their names, are all that it printed.
"""

from __future__ import annotations

import heapq
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from voxlane import uri as uris
from voxlane.errors import NotFoundError, UnavailableError, VoxlaneError
from voxlane.store import RetryConfig, Store, StoreConfig

FOLDER = "logs"
"""Name of the folder in a run."""
_EVERY_S = 10.0
_EVERY_URGED_S = 1.0
_OBJECT_BYTES = 1 << 20
_LINE_BYTES = 256 * 1024
"""A line that is still going on at this length is broken."""
_WAITING_BYTES = 64 << 20
"""What may wait for a bucket that takes nothing; beyond it the oldest is given up: training needs the memory."""
_RETRY = RetryConfig(deadline_s=3.0, initial_delay_s=0.5, max_delay_s=1.0)
_AHEAD = 2


@dataclass(frozen=True)
class Line:
    """One line that a pod printed."""

    time: datetime
    """With its time zone, UTC."""
    pod: str
    text: str
    """Without its end."""


# -- writing -----------------------------------------------------------------------------------------------------------


class Lines:
    """A stream's bytes as lines with their times. Of a progress bar, which writes one line over and over, what a
    terminal would show at the end is taken, and at every `look`."""

    def __init__(self) -> None:
        self._open = b""
        self._looked = b""

    def add(self, data: bytes, now: float) -> list[bytes]:
        """Lines that have ended with `data`, printed at `now` (Unix seconds)."""
        *ended, self._open = (self._open + data).split(b"\n")
        if len(self._open) > _LINE_BYTES:
            ended.append(self._open)
            self._open = b""
        lines = []
        for line in ended:
            shown = _shown(line)
            if not (shown and shown == self._looked):  # a bar's last state may have been taken a moment ago
                lines.append(_stamped(shown, now))
            self._looked = b""
        return lines

    def look(self, now: float) -> list[bytes]:
        """The state of a line that is written over and over, if it is another than at the last look."""
        if b"\r" not in self._open:
            return []
        shown = _shown(self._open)
        self._open = b"\r" + self._open.rpartition(b"\r")[2]
        if not shown or shown == self._looked:
            return []
        self._looked = shown
        return [_stamped(shown, now)]

    def end(self, now: float) -> list[bytes]:
        """The last line, if it has no end."""
        return self.add(b"\n", now) if self._open.strip(b"\r") else []


def _shown(line: bytes) -> bytes:
    """What a terminal shows of a line: what was written after its last carriage return."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


def _stamped(line: bytes, now: float) -> bytes:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode() + line + b"\n"


class Keeper:
    """Writes what a container prints below a URI, from a thread of its own. A bucket that takes nothing is said once,
    and asked again; what is printed meanwhile waits in memory."""

    def __init__(
        self,
        uri: str,
        pod: str,
        config: StoreConfig | None = None,
        *,
        every_s: float = _EVERY_S,
        say: Callable[[str], None] | None = None,
    ) -> None:
        where = uris.parse(uri)
        # Short, because a pod that is told to end has little time.
        self._store = Store(uri, replace(config or StoreConfig(), retry=_RETRY, connect_timeout_s=5, read_timeout_s=10))
        began = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        self._prefix = f"{where.key.rstrip('/')}/{pod}/{began}Z-".lstrip("/")
        self._every_s = every_s
        self._say = say or _to_stderr
        self._lock = threading.Condition()
        self._streams: dict[int, Lines] = {}
        self._lines: list[bytes] = []
        self._size = 0
        self._since = 0.0
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._number = 0
        self._lost = 0
        self._failing = False
        self._retry_at = 0.0
        self._ended = self._given_up = False
        self._thread = threading.Thread(target=self._write, name="voxlane-logs", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def add(self, stream: int, data: bytes) -> None:
        """Take what was just printed on a stream (1 or 2); never waits for the bucket."""
        now = time.time()
        with self._lock:
            self._take(self._streams.setdefault(stream, Lines()).add(data, now))

    def urge(self) -> None:
        """The container was told to end: write what there is now, and from now on every second."""
        with self._lock:
            self._every_s = min(self._every_s, _EVERY_URGED_S)
            self._retry_at = 0.0
            self._lock.notify()

    def note(self, text: str) -> None:
        """A line of ours after what was printed, which ends there."""
        now = time.time()
        with self._lock:
            for lines in self._streams.values():
                self._take(lines.end(now))
            self._take([_stamped(text.encode(), now)] if text else [])

    def close(self, within_s: float = 6.0) -> bool:
        """Write the rest, for so long at most; returns whether all of it is in the bucket."""
        self.note("")
        with self._lock:
            self._ended = True
            self._lock.notify()
        self._thread.join(within_s)
        with self._lock:
            self._given_up = True
            left = self._lost + sum(body.count(b"\n") for _, body in self._waiting) + len(self._lines)
        if left:
            self._say(f"{left} lines of the log could not be kept in {self._store.uri(self._prefix)}")
        return left == 0

    def _take(self, lines: list[bytes]) -> None:
        if lines and not self._lines:
            self._since = time.monotonic()
            self._lock.notify()
        self._lines += lines
        self._size += sum(map(len, lines))
        if self._size >= _OBJECT_BYTES:
            self._cut()
            self._lock.notify()

    def _cut(self) -> None:
        """Make an object of the lines so far."""
        if self._lines:
            self._waiting.append((f"{self._prefix}{self._number:06d}.log", b"".join(self._lines)))
            self._number += 1
            self._lines, self._size = [], 0
        while len(self._waiting) > 1 and sum(len(body) for _, body in self._waiting) > _WAITING_BYTES:
            # Not the first one, which may be on its way.
            self._lost += self._waiting[1][1].count(b"\n")
            del self._waiting[1]

    def _write(self) -> None:
        while (found := self._next()) is not None:
            key, body = found
            try:
                self._store.put(key, body)
            except VoxlaneError as error:
                self._failed(error)
                if self._given_up or (self._ended and not isinstance(error, UnavailableError)):
                    return
            except Exception as error:  # noqa: BLE001  a log that is not kept must not end a training that goes well
                self._failed(error)
                return
            else:
                with self._lock:
                    self._waiting.popleft()
                    self._failing = False

    def _next(self) -> tuple[str, bytes] | None:
        """The next object to write, when it is due; None: nothing will come."""
        with self._lock:
            while True:
                now = time.monotonic()
                due = self._since + self._every_s
                if self._ended or now >= due:
                    for lines in self._streams.values():
                        self._take(lines.look(time.time()))
                    self._cut()
                    self._since = now
                if self._waiting and (self._ended or now >= self._retry_at):
                    return self._waiting[0]
                if self._ended:
                    return None
                at = self._retry_at if self._waiting else due
                self._lock.wait(max(at - now, 0.01))

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self._retry_at = time.monotonic() + self._every_s
            said, self._failing = self._failing, True
        if not said:
            self._say(f"the log cannot be kept now, and is tried again: {error}")


def _to_stderr(text: str) -> None:
    print(f"voxlane: {text}", file=sys.stderr, flush=True)


# -- reading -----------------------------------------------------------------------------------------------------------


def read(
    run_uri: str,
    store_config: StoreConfig | None = None,
    *,
    since: datetime | None = None,
    pods: Collection[str] | None = None,
) -> Iterator[Line]:
    """The kept lines of a run's pods by time, at `since` or later, of all pods or those named. None where nothing was
    kept."""
    store = Store(run_uri, store_config)
    if since is not None and since.tzinfo is None:
        since = since.replace(tzinfo=UTC)
    found = _objects(store, _folder(run_uri), since)
    parts = [_lines(store, pod, keys) for pod, keys in sorted(found.items()) if pods is None or pod in pods]
    for line in heapq.merge(*parts, key=lambda line: line.time):
        if since is None or line.time >= since:
            yield line


def pods_of(run_uri: str, store_config: StoreConfig | None = None) -> list[str]:
    """Names of the pods whose lines were kept."""
    return sorted(_objects(Store(run_uri, store_config), _folder(run_uri), None))


def _folder(run_uri: str) -> str:
    return f"{uris.parse(run_uri).key.rstrip('/')}/{FOLDER}/".lstrip("/")


def _objects(store: Store, folder: str, since: datetime | None) -> dict[str, list[str]]:
    """Keys of every pod's objects, in the order of their lines. An object that was written before `since` holds only
    older lines."""
    found: dict[str, list[str]] = {}
    try:
        for page in store.list_pages(folder):
            columns = (page.column(name).to_pylist() for name in ("path", "last_modified"))
            for key, modified in zip(*columns, strict=True):
                pod, _, name = key[len(folder) :].partition("/")
                if name.endswith(".log") and "/" not in name and (since is None or modified >= since):
                    found.setdefault(pod, []).append(key)
    except NotFoundError as error:
        if type(error) is not NotFoundError:  # a folder that is not there is no error, a bucket is
            raise
    return {pod: sorted(keys) for pod, keys in found.items()}


def _lines(store: Store, pod: str, keys: list[str]) -> Iterator[Line]:
    coming: deque[Future[Any]] = deque()
    left = iter(keys)
    moment = datetime.fromtimestamp(0, UTC)
    while True:
        while len(coming) < _AHEAD and (key := next(left, None)) is not None:
            coming.append(store.submit(store.get, key))
        if not coming:
            return
        for line in bytes(coming.popleft().result()).decode(errors="replace").split("\n")[:-1]:
            stamp, _, text = line.partition(" ")
            try:
                # Never back: a machine's clock may be set while it prints.
                moment = max(moment, datetime.fromisoformat(stamp))
            except (ValueError, TypeError):
                text = line
            yield Line(moment, pod, text)
