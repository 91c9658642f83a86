"""Read the logs of an app's pods merged by time, including pods that have ended, or follow them live."""

from __future__ import annotations

import contextlib
import heapq
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any

from voxlane.cluster.kubernetes.app import k8s
from voxlane.cluster.kubernetes.app.k8s import Object
from voxlane.cluster.kubernetes.client import Cluster, path_of
from voxlane.errors import ClusterError, ConfigError, MissingObjectError

_MAX_PARALLEL = 16
_MAX_FOLLOWED = 200
"""Number of pods that can be followed at once: each needs a connection and a thread."""
_SPOOL_BYTES = 1 << 20
_POLL_S = 1.0
_STATUS_POLLS = 3
_SETTLE_S = 0.2
"""Lines wait this long, so that the lines of several pods are ordered by time."""


@dataclass(frozen=True, order=True)
class LogLine:
    """One line of one container."""

    time: str
    """Time in UTC (RFC 3339), of the same length for all lines, so that they sort by time."""
    pod: str
    """Short name of the pod; pod/container if a pod has several containers."""
    text: str


@dataclass(frozen=True)
class LogQuery:
    """Which lines to read."""

    since_s: float | None = None
    """Only lines of the last `since_s` seconds; None for all."""
    tail: int | None = None
    """Number of last lines to show of each pod; None for all."""
    pods: tuple[str, ...] = ()
    """Full or short names of the pods to read; () for all."""
    previous: bool = False
    """Whether to read what restarted containers printed before their last restart."""


# -- pods --------------------------------------------------------------------------------------------------------------


def list_pods(cluster: Cluster, app: str, *, board: bool = False) -> list[Object]:
    """Return the pods of an app's training, or of its TensorBoard, oldest first."""
    pods = cluster.list(path_of("v1", "Pod", cluster.namespace), labels=f"{k8s.APP_LABEL}={app}")
    selected = [pod for pod in pods if (k8s.label(pod, k8s.PART_LABEL) == k8s.BOARD) == board]
    return sorted(selected, key=lambda pod: (k8s.created_at(pod), k8s.name_of(pod)))


def select_pods(pods: Sequence[Object], app: str, names: Collection[str], *, check: bool = True) -> list[Object]:
    """Return the pods with these full or short names (all if empty); with `check`, raise ConfigError if a name has no
    pod."""
    short_names = k8s.shorten_pod_names(pods, app)
    existing = {name for pair in short_names.items() for name in pair}
    if check and (unknown := [name for name in names if name not in existing]):
        listed = ", ".join(sorted(set(short_names.values()))[:20]) or "none"
        raise ConfigError(f"no pod {unknown[0]!r}", uri=f"app {app}", fix=f"There are: {listed}")
    return [pod for pod in pods if not names or {k8s.name_of(pod), short_names[k8s.name_of(pod)]} & {*names}]


def list_started_containers(pod: Object, *, previous: bool = False) -> list[str]:
    """Return the names of a pod's containers that were started at least once, or, with `previous`, were restarted."""

    def is_started(container: Object) -> bool:
        state = container.get("state") or {}
        return bool(container.get("restartCount") or (not previous and ("running" in state or "terminated" in state)))

    return [str(container["name"]) for container in filter(is_started, k8s.list_container_statuses(pod))]


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """One container whose lines are read."""

    pod: str
    container: str
    title: str
    """Name to show before its lines."""


def read_logs(cluster: Cluster, app: str, pods: Sequence[Object], query: LogQuery) -> Iterator[LogLine]:
    """Yield all lines of these pods by time; each container's lines are spooled to a file until they are merged."""
    sources = _list_sources(app, pods, previous=query.previous)
    with contextlib.ExitStack() as stack:
        files: list[Any] = [stack.enter_context(tempfile.SpooledTemporaryFile(_SPOOL_BYTES)) for _ in sources]

        def spool(file: IO[bytes], source: _Source) -> None:
            file.writelines(line + b"\n" for line in _stream(cluster, source, query))
            file.seek(0)

        with ThreadPoolExecutor(min(_MAX_PARALLEL, max(1, len(sources)))) as pool:
            list(pool.map(spool, files, sources))
        yield from heapq.merge(*(parse_lines(file, source.title) for file, source in zip(files, sources, strict=True)))


def _list_sources(app: str, pods: Sequence[Object], *, previous: bool = False) -> list[_Source]:
    short_names, sources = k8s.shorten_pod_names(pods, app), []
    for pod in pods:
        has_several = len(k8s.spec(pod).get("containers") or ()) + len(k8s.spec(pod).get("initContainers") or ()) > 1
        for container in list_started_containers(pod, previous=previous):
            name = short_names[k8s.name_of(pod)]
            sources.append(_Source(k8s.name_of(pod), container, f"{name}/{container}" if has_several else name))
    return sources


def _stream(
    cluster: Cluster, source: _Source, query: LogQuery, *, follow: bool = False, since_time: str = ""
) -> Iterator[bytes]:
    """Yield a container's lines with their times, from `since_time` on if given; none if the pod does not exist."""
    flags = {"timestamps": True, "follow": follow, "previous": query.previous}
    parameters: dict[str, Any] = {"container": source.container, **{key: str(flags[key]).lower() for key in flags}}
    if since_time:
        parameters["sinceTime"] = since_time
    elif query.since_s is not None:
        parameters["sinceSeconds"] = max(1, round(query.since_s))
    if not since_time and query.tail is not None:
        parameters["tailLines"] = query.tail
    try:
        yield from cluster.stream(f"{path_of('v1', 'Pod', cluster.namespace, source.pod)}/log", query=parameters)
    except MissingObjectError:
        return
    except ClusterError as error:
        if error.status is None:  # the cluster itself does not answer
            raise
        # 400: the container waits, or its node has deleted the log. 500, 502: its node does not answer.
        stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        yield f"{stamp} (no log: {' '.join(str(error).split())})".encode()


def parse_lines(lines: Iterable[bytes], title: str, last_time: str = "") -> Iterator[LogLine]:
    """Parse the lines of one container, whose times never decrease; see `parse_line`."""
    for raw in lines:
        line = parse_line(raw.rstrip(b"\n"), title, last_time)
        last_time = line.time
        yield line


def parse_line(raw: bytes, title: str, last_time: str = "") -> LogLine:
    """Parse a line with its time, as the server writes it. A line without a time gets `last_time`, and no line is
    earlier than that, so that the lines of a container keep their order."""
    stamp, _, text = raw.decode(errors="replace").partition(" ")
    if not re.match(r"^\d{4}-\d\d-\d\dT", stamp):
        return LogLine(last_time or "0", title, raw.decode(errors="replace"))
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return LogLine(max(f"{seconds}.{fraction[:9]:0<9}Z", last_time), title, text)


# -- following ---------------------------------------------------------------------------------------------------------


class LogFollower:
    """Iterates over the lines of an app's pods as they are printed, including pods that start later, until `is_over`
    returns True for the pods. Close the iterator to stop."""

    def __init__(
        self, cluster: Cluster, app: str, query: LogQuery, is_over: Callable[[Sequence[Object]], bool]
    ) -> None:
        self._cluster, self._app, self._query, self._is_over = cluster, app, query, is_over
        self._lines: queue.Queue[LogLine] = queue.Queue(maxsize=10_000)
        self._threads: dict[tuple[str, str], threading.Thread] = {}
        self._stop = threading.Event()
        self._failure: ClusterError | None = None

    def __iter__(self) -> Iterator[LogLine]:
        try:
            waiting: list[tuple[float, LogLine]] = []
            polled_at, is_over = 0.0, False
            while True:
                if not is_over and time.monotonic() - polled_at >= _POLL_S:
                    is_over, polled_at = self._poll_pods(), time.monotonic()
                waiting += [(time.monotonic(), line) for line in self._take_lines()]
                waiting.sort(key=lambda pair: pair[1].time)
                is_drained = is_over and not self._count_active() and self._lines.empty()
                settled = time.monotonic() - _SETTLE_S
                while waiting and (is_drained or waiting[0][0] <= settled):
                    yield waiting.pop(0)[1]
                if self._failure is not None:
                    raise self._failure
                if is_drained and not waiting:
                    return
        finally:
            self._stop.set()

    def _count_active(self) -> int:
        return sum(thread.is_alive() for thread in self._threads.values())

    def _take_lines(self) -> list[LogLine]:
        """Return the lines that have arrived, after a short wait for the first."""
        lines = []
        with contextlib.suppress(queue.Empty):
            lines.append(self._lines.get(timeout=_SETTLE_S / 4))
            while len(lines) < 1000:
                lines.append(self._lines.get_nowait())
        return lines

    def _poll_pods(self) -> bool:
        """Follow new pods; return whether the app is over."""
        pods = list_pods(self._cluster, self._app)
        selected = select_pods(pods, self._app, self._query.pods, check=False)  # the others may start later
        for source in _list_sources(self._app, selected, previous=self._query.previous):
            if (source.pod, source.container) in self._threads:
                continue
            if self._count_active() >= _MAX_FOLLOWED:
                raise ConfigError(f"cannot follow more than {_MAX_FOLLOWED} pods at once", fix="Choose with --pod")
            thread = threading.Thread(target=self._follow, args=(source,), daemon=True)
            self._threads[source.pod, source.container] = thread
            thread.start()
        return self._is_over(pods)

    def _follow(self, source: _Source) -> None:
        """Follow one container until it has ended; a connection that the server closes is reopened at the same line."""
        last_time, count_at_last = "", 0
        while not self._stop.is_set():
            moment = k8s.parse_time(last_time)
            since_time = f"{moment:%Y-%m-%dT%H:%M:%SZ}" if moment else ""  # the server accepts no fraction
            stream = _stream(self._cluster, source, self._query, follow=True, since_time=since_time)
            try:
                lines = (parse_line(raw, source.title) for raw in stream)
                for line in skip_known_lines(lines, last_time, count_at_last):
                    if self._stop.is_set():
                        return
                    count_at_last = count_at_last + 1 if line.time == last_time else 1
                    last_time = line.time
                    self._lines.put(line)
            except ClusterError as error:
                self._failure = self._failure or error
                return
            if self._has_container_ended(source):
                return

    def _has_container_ended(self, source: _Source) -> bool:
        """Return whether a container has ended after its lines have; its status follows within seconds."""
        for _ in range(_STATUS_POLLS):
            pod = self._cluster.find(path_of("v1", "Pod", self._cluster.namespace, source.pod))
            if pod is None or k8s.has_ended(pod) or k8s.is_deleting(pod):
                return True
            statuses = (item for item in k8s.list_container_statuses(pod) if item["name"] == source.container)
            state = next(statuses, {}).get("state") or {}
            if "terminated" in state and k8s.spec(pod).get("restartPolicy") == "Never":
                return True
            if self._stop.wait(_POLL_S):
                return True
        return False


def skip_known_lines(lines: Iterator[LogLine], last_time: str, count: int) -> Iterator[LogLine]:
    """Yield the new lines, if all lines before `last_time` and `count` lines at that time are known. A server that is
    asked again repeats the whole second."""
    for line in lines:
        if line.time < last_time:
            continue
        if line.time == last_time and count:
            count -= 1
            continue
        yield line
