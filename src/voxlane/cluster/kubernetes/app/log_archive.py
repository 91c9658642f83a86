"""Archive the output of an app's pods in the run's bucket.

    RUN/logs/<pod>/<start of the container>-<number>.log

Every object is written once and holds complete lines, each with the time at which it was printed, as `kubectl logs
--timestamps` shows them. The objects of a container, ordered by name, are everything that it printed.
"""

from __future__ import annotations

import heapq
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from voxlane import uri as uris
from voxlane.cluster.kubernetes.app.k8s import Report
from voxlane.cluster.kubernetes.app.logs import LogLine, parse_lines
from voxlane.errors import NotFoundError, UnavailableError, VoxlaneError
from voxlane.store import RetryConfig, Store, StoreConfig

FOLDER = "logs"
"""Name of the folder in a run."""
_INTERVAL_S = 10.0
_URGENT_INTERVAL_S = 1.0
_OBJECT_BYTES = 1 << 20
_MAX_LINE_BYTES = 256 * 1024
"""A longer line is split."""
_MAX_PENDING_BYTES = 64 << 20
"""Size of the objects that may wait for an unavailable bucket; the oldest are dropped, as training needs the memory."""
_RETRY = RetryConfig(deadline_s=3.0, initial_delay_s=0.5, max_delay_s=1.0)
_PREFETCHED_OBJECTS = 2


# -- writing -----------------------------------------------------------------------------------------------------------


class LineSplitter:
    """Splits a stream's bytes into lines with their times. Of a progress bar, which overwrites one line again and
    again, it takes the state that a terminal would show at the end, and at every `sample`."""

    def __init__(self) -> None:
        self._open_line = b""
        self._sampled = b""

    def add(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that end in `data`, which was printed at `now` (Unix seconds)."""
        *ended, self._open_line = (self._open_line + data).split(b"\n")
        if len(self._open_line) > _MAX_LINE_BYTES:
            ended.append(self._open_line)
            self._open_line = b""
        lines = []
        for line in ended:
            visible = _get_visible(line)
            if not (visible and visible == self._sampled):  # the last state of a bar may already have been sampled
                lines.append(_add_time(visible, now))
            self._sampled = b""
        return lines

    def sample(self, now: float) -> list[bytes]:
        """Return the state of a line that is being overwritten, if it has changed since the last sample."""
        if b"\r" not in self._open_line:
            return []
        visible = _get_visible(self._open_line)
        self._open_line = b"\r" + self._open_line.rpartition(b"\r")[2]
        if not visible or visible == self._sampled:
            return []
        self._sampled = visible
        return [_add_time(visible, now)]

    def finish(self, now: float) -> list[bytes]:
        """Return the last line, if it has no line end."""
        return self.add(b"\n", now) if self._open_line.strip(b"\r") else []


def _get_visible(line: bytes) -> bytes:
    """Return what a terminal shows of a line: the text after its last carriage return."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


def _add_time(line: bytes, now: float) -> bytes:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode() + line + b"\n"


def _print_error(text: str) -> None:
    print(f"voxlane: {text}", file=sys.stderr, flush=True)


class LogArchiver:
    """Writes what a container prints below a URI, in a thread of its own. It reports once that the bucket is
    unavailable and tries again; meanwhile the output waits in memory."""

    def __init__(
        self,
        uri: str,
        pod: str,
        config: StoreConfig | None = None,
        *,
        interval_s: float = _INTERVAL_S,
        report: Report = _print_error,
    ) -> None:
        # Short timeouts, because a pod that must end has little time.
        self._store = Store(uri, replace(config or StoreConfig(), retry=_RETRY, connect_timeout_s=5, read_timeout_s=10))
        started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        self._prefix = f"{uris.parse(uri).key.rstrip('/')}/{pod}/{started}Z-".lstrip("/")
        self._interval_s = interval_s
        self._report = report
        self._lock = threading.Condition()
        self._streams: dict[int, LineSplitter] = {}
        self._lines: list[bytes] = []
        self._size = 0
        self._first_line_at = 0.0
        self._pending: deque[tuple[str, bytes]] = deque()
        self._number = 0
        self._dropped_lines = 0
        self._failing = False
        self._retry_at = 0.0
        self._is_closing = self._has_given_up = False
        self._thread = threading.Thread(target=self._write, name="voxlane-logs", daemon=True)

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def add(self, stream: int, data: bytes) -> None:
        """Add what was just printed on a stream (1 or 2), without waiting for the bucket."""
        now = time.time()
        with self._lock:
            self._add_lines(self._streams.setdefault(stream, LineSplitter()).add(data, now))

    def urge(self) -> None:
        """Write what there is now, and from now on every second, because the container must end."""
        with self._lock:
            self._interval_s = min(self._interval_s, _URGENT_INTERVAL_S)
            self._retry_at = 0.0
            self._lock.notify()

    def note(self, text: str) -> None:
        """End the open lines and add a line of voxlane's own, if `text` is not empty."""
        now = time.time()
        with self._lock:
            for splitter in self._streams.values():
                self._add_lines(splitter.finish(now))
            self._add_lines([_add_time(text.encode(), now)] if text else [])

    def close(self, timeout_s: float = 6.0) -> bool:
        """Write the rest, for at most `timeout_s`; return whether everything is in the bucket."""
        self.note("")
        with self._lock:
            self._is_closing = True
            self._lock.notify()
        self._thread.join(timeout_s)
        with self._lock:
            self._has_given_up = True
            pending_lines = sum(body.count(b"\n") for _, body in self._pending)
            missing = self._dropped_lines + pending_lines + len(self._lines)
        if missing:
            self._report(f"{missing} lines of the log could not be archived in {self._store.uri(self._prefix)}")
        return missing == 0

    def _add_lines(self, lines: list[bytes]) -> None:
        if lines and not self._lines:
            self._first_line_at = time.monotonic()
            self._lock.notify()
        self._lines += lines
        self._size += sum(map(len, lines))
        if self._size >= _OBJECT_BYTES:
            self._seal_object()
            self._lock.notify()

    def _seal_object(self) -> None:
        """Turn the lines so far into an object to write."""
        if self._lines:
            self._pending.append((f"{self._prefix}{self._number:06d}.log", b"".join(self._lines)))
            self._number += 1
            self._lines, self._size = [], 0
        while len(self._pending) > 1 and sum(len(body) for _, body in self._pending) > _MAX_PENDING_BYTES:
            # The first object stays, because it may be in transit.
            self._dropped_lines += self._pending[1][1].count(b"\n")
            del self._pending[1]

    def _write(self) -> None:
        while (item := self._wait_for_object()) is not None:
            key, body = item
            try:
                self._store.put(key, body)
            except VoxlaneError as error:
                self._set_failing(error)
                if self._has_given_up or (self._is_closing and not isinstance(error, UnavailableError)):
                    return
            except Exception as error:  # noqa: BLE001  a failure of the archive must not end a training that goes well
                self._set_failing(error)
                return
            else:
                with self._lock:
                    self._pending.popleft()
                    self._failing = False

    def _wait_for_object(self) -> tuple[str, bytes] | None:
        """Return the next object when it is due; None if there will be no more."""
        with self._lock:
            while True:
                now = time.monotonic()
                due = self._first_line_at + self._interval_s
                if self._is_closing or now >= due:
                    for splitter in self._streams.values():
                        self._add_lines(splitter.sample(time.time()))
                    self._seal_object()
                    self._first_line_at = now
                if self._pending and (self._is_closing or now >= self._retry_at):
                    return self._pending[0]
                if self._is_closing:
                    return None
                wake_at = self._retry_at if self._pending else due
                self._lock.wait(max(wake_at - now, 0.01))

    def _set_failing(self, error: Exception) -> None:
        with self._lock:
            self._retry_at = time.monotonic() + self._interval_s
            was_failing, self._failing = self._failing, True
        if not was_failing:
            self._report(f"the log cannot be archived at the moment; voxlane tries again: {error}")


# -- reading -----------------------------------------------------------------------------------------------------------


def read_archive(
    run_uri: str, config: StoreConfig | None = None, *, since: datetime | None = None, pods: Collection[str] = ()
) -> Iterator[LogLine]:
    """Yield the archived lines of a run's pods (all, or those named) by time, from `since` on, if there are any."""
    store = Store(run_uri, config)
    parts = [
        parse_lines(_read_lines(store, keys), pod, "1970-01-01T00:00:00.000000000Z")
        for pod, keys in sorted(_list_objects(store, run_uri, since).items())
        if not pods or pod in pods
    ]
    first_time = since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z") if since else ""
    for line in heapq.merge(*parts, key=lambda line: line.time):
        if line.time >= first_time:
            yield line


def list_archived_pods(run_uri: str, store_config: StoreConfig | None = None) -> list[str]:
    """Return the names of the pods whose lines were archived."""
    return sorted(_list_objects(Store(run_uri, store_config), run_uri, None))


def _list_objects(store: Store, run_uri: str, since: datetime | None) -> dict[str, list[str]]:
    """Return the keys of every pod's objects that were written from `since` on, in the order of their lines."""
    folder = f"{uris.parse(run_uri).key.rstrip('/')}/{FOLDER}/".lstrip("/")
    keys_by_pod: dict[str, list[str]] = {}
    try:
        for page in store.list_pages(folder):
            columns = (page.column(name).to_pylist() for name in ("path", "last_modified"))
            for key, modified in zip(*columns, strict=True):
                pod, _, name = key[len(folder) :].partition("/")
                if name.endswith(".log") and "/" not in name and (since is None or modified >= since):
                    keys_by_pod.setdefault(pod, []).append(key)
    except NotFoundError as error:
        if type(error) is not NotFoundError:  # a missing folder is not an error, a missing bucket is
            raise
    return {pod: sorted(keys) for pod, keys in keys_by_pod.items()}


def _read_lines(store: Store, keys: list[str]) -> Iterator[bytes]:
    downloads: deque[Future[Any]] = deque()
    for key in keys:
        downloads.append(store.submit(store.get, key))
        if len(downloads) >= _PREFETCHED_OBJECTS:
            yield from bytes(downloads.popleft().result()).split(b"\n")[:-1]
    for download in downloads:
        yield from bytes(download.result()).split(b"\n")[:-1]
