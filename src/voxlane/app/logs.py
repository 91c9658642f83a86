"""What an app's pods print: of all pods by time, also of those that have ended, or as it comes."""

from __future__ import annotations

import contextlib
import heapq
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any

from voxlane.app.objects import APP, PART, Object, deleting, label, name_of, shorts, spec, status, when
from voxlane.app.trouble import container_states
from voxlane.errors import ClusterError, ConfigError, MissingObjectError
from voxlane.kube.client import Cluster, path_of

_AT_ONCE = 16
_MOST_FOLLOWED = 200
"""Pods that are followed at once: each holds a connection and a thread."""
_SPOOL_BYTES = 1 << 20
_POLL_S = 1.0
_LAG_POLLS = 3
_SETTLE_S = 0.2
"""Lines are held this long, so that those of several pods come in the order of their times."""


@dataclass(frozen=True, order=True)
class Line:
    """One line of one container."""

    time: str
    """RFC 3339, UTC, of the same length for all, so that text orders as time does."""
    pod: str
    """Its short name; pod/container where a pod has several."""
    text: str


@dataclass(frozen=True)
class Wanted:
    """Which lines."""

    since_s: float | None = None
    """Of the last seconds; None: all."""
    tail: int | None = None
    """At most so many last lines of each pod; None: all."""
    pods: tuple[str, ...] = ()
    """Of these pods, by whole or short name; (): all."""
    previous: bool = False
    """Of containers that were restarted: what they printed before."""


# -- pods --------------------------------------------------------------------------------------------------------------


def pods_of(cluster: Cluster, app: str, *, part: str = "") -> list[Object]:
    """An app's pods by age; of the training unless `part` says another."""
    found = cluster.list(path_of("v1", "Pod", cluster.namespace), labels=f"{APP}={app}")
    own = [pod for pod in found if (label(pod, PART) == part if part else label(pod, PART) != "board")]
    return sorted(own, key=lambda pod: (str(pod["metadata"].get("creationTimestamp")), name_of(pod)))


def chosen(pods: Sequence[Object], app: str, names: Collection[str]) -> list[Object]:
    """Those pods that were asked for; one that is not there is a ConfigError that lists those that are."""
    short = shorts(pods, app)
    known = {name for pair in short.items() for name in pair}
    if unknown := [name for name in names if name not in known]:
        there = ", ".join(sorted(set(short.values()))[:20]) or "none"
        raise ConfigError(f"no pod {unknown[0]!r}", uri=f"app {app}", fix=f"There are: {there}")
    return [pod for pod in pods if not names or name_of(pod) in names or short[name_of(pod)] in names]


def containers(pod: Mapping[str, Any], *, previous: bool = False) -> list[str]:
    """Containers of a pod that have printed, or may have: started at least once."""
    found = []
    for one in container_states(pod):
        state = one.get("state") or {}
        begun = "running" in state or "terminated" in state
        if one.get("restartCount") if previous else (begun or one.get("restartCount")):
            found.append(str(one["name"]))
    return found


def ended(pod: Mapping[str, Any]) -> bool:
    """Whether a pod prints no more."""
    return status(pod).get("phase") in ("Succeeded", "Failed")


# -- once --------------------------------------------------------------------------------------------------------------


def read(cluster: Cluster, app: str, pods: Sequence[Object], wanted: Wanted) -> Iterator[Line]:
    """All lines of these pods by time. Memory stays small: each container's lines lie in a file until they are
    merged."""
    sources = _sources(app, pods, previous=wanted.previous)
    with contextlib.ExitStack() as stack:
        files: list[Any] = [stack.enter_context(tempfile.SpooledTemporaryFile(_SPOOL_BYTES)) for _ in sources]
        with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(sources)))) as pool:
            list(pool.map(lambda file, one: _spool(file, cluster, one[0], one[1], wanted), files, sources))
        yield from heapq.merge(*(_from_file(file, one[2]) for file, one in zip(files, sources, strict=True)))


def _sources(app: str, pods: Sequence[Object], *, previous: bool = False) -> list[tuple[str, str, str]]:
    """(pod, container, name to show) of all that has printed."""
    short, found = shorts(pods, app), []
    for pod in pods:
        several = len(spec(pod).get("containers") or ()) + len(spec(pod).get("initContainers") or ()) > 1
        for one in containers(pod, previous=previous):
            name = short[name_of(pod)]
            found.append((name_of(pod), one, f"{name}/{one}" if several else name))
    return found


def _spool(file: IO[bytes], cluster: Cluster, pod: str, container: str, wanted: Wanted) -> None:
    for line in _stream(cluster, pod, container, wanted):
        file.write(line + b"\n")
    file.seek(0)


def _stream(
    cluster: Cluster, pod: str, container: str, wanted: Wanted, *, follow: bool = False, after: str = ""
) -> Iterator[bytes]:
    """A container's lines with their times; none where its node does not know it any more. `after`: from this time
    on."""
    query: dict[str, Any] = {"container": container, "timestamps": "true"}
    if follow:
        query["follow"] = "true"
    if wanted.previous:
        query["previous"] = "true"
    if after:
        query["sinceTime"] = after
    else:
        query |= {"sinceSeconds": max(1, round(wanted.since_s))} if wanted.since_s is not None else {}
        query |= {"tailLines": wanted.tail} if wanted.tail is not None else {}
    try:
        yield from cluster.stream(f"{path_of('v1', 'Pod', cluster.namespace, pod)}/log", query=query)
    except MissingObjectError:
        return
    except ClusterError as error:
        # 400: the container waits, or its node has thrown the log away. 500, 502: its node does not answer.
        if "does not answer" in str(error) or "you may not" in str(error):
            raise
        stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        yield f"{stamp} (no log: {' '.join(str(error).split())})".encode()


def _from_file(file: IO[bytes], shown: str) -> Iterator[Line]:
    last = ""
    for raw in file:
        line = parsed(raw.rstrip(b"\n"), shown, last)
        last = line.time
        yield line


def parsed(raw: bytes, shown: str, last: str = "") -> Line:
    """A line with its time, as the server writes it; `last`: the time of one that has none of its own. Times of one
    container never go back, so that its lines keep their order."""
    stamp, _, text = raw.decode(errors="replace").partition(" ")
    if not re.match(r"^\d{4}-\d\d-\d\dT", stamp):
        return Line(last or "0", shown, raw.decode(errors="replace"))
    whole, _, part = stamp.removesuffix("Z").partition(".")
    return Line(max(f"{whole}.{part[:9]:0<9}Z", last), shown, text)


# -- followed ----------------------------------------------------------------------------------------------------------


class Follower:
    """Lines of an app's pods as they come, also of pods that come later. Stop it by closing the iterator."""

    def __init__(self, cluster: Cluster, app: str, wanted: Wanted, over: Callable[[Sequence[Object]], bool]) -> None:
        self._cluster, self._app, self._wanted, self._over = cluster, app, wanted, over
        self._lines: queue.Queue[Line] = queue.Queue(maxsize=10_000)
        self._threads: dict[tuple[str, str], threading.Thread] = {}
        self._stop = threading.Event()
        self._failure: ClusterError | None = None

    def __iter__(self) -> Iterator[Line]:
        try:
            held: list[tuple[float, Line]] = []
            looked, done = 0.0, False
            while True:
                if not done and time.monotonic() - looked >= _POLL_S:
                    done, looked = self._look(), time.monotonic()
                held += [(time.monotonic(), line) for line in self._taken()]
                held.sort(key=lambda pair: pair[1].time)
                quiet = done and not any(one.is_alive() for one in self._threads.values()) and self._lines.empty()
                settled = time.monotonic() - _SETTLE_S
                while held and (quiet or held[0][0] <= settled):
                    yield held.pop(0)[1]
                if self._failure is not None:
                    raise self._failure
                if quiet and not held:
                    return
        finally:
            self._stop.set()

    def _taken(self) -> list[Line]:
        """What has come, after a short wait for the first."""
        found = []
        try:
            found.append(self._lines.get(timeout=_SETTLE_S / 4))
            while len(found) < 1000:
                found.append(self._lines.get_nowait())
        except queue.Empty:
            pass
        return found

    def _look(self) -> bool:
        """Follow pods that are new; whether all has ended."""
        pods = pods_of(self._cluster, self._app)
        wanted = [
            pod
            for pod in pods
            if not self._wanted.pods or {name_of(pod), shorts(pods, self._app)[name_of(pod)]} & set(self._wanted.pods)
        ]
        for pod, container, shown in _sources(self._app, wanted, previous=self._wanted.previous):
            if (pod, container) in self._threads:
                continue
            if sum(one.is_alive() for one in self._threads.values()) >= _MOST_FOLLOWED:
                raise ConfigError(
                    f"more than {_MOST_FOLLOWED} pods cannot be followed at once", fix="Choose with --pod"
                )
            thread = threading.Thread(target=self._follow, args=(pod, container, shown), daemon=True)
            self._threads[pod, container] = thread
            thread.start()
        return self._over(pods)

    def _follow(self, pod: str, container: str, shown: str) -> None:
        """One container until it has ended. A connection that breaks before, as servers close long ones, is opened
        again where it broke."""
        last, at_last = "", 0
        while not self._stop.is_set():
            raw = _stream(self._cluster, pod, container, self._wanted, follow=True, after=_second(last))
            try:
                for line in unseen((parsed(one, shown) for one in raw), last, at_last):
                    if self._stop.is_set():
                        return
                    at_last = at_last + 1 if line.time == last else 1
                    last = line.time
                    self._lines.put(line)
            except ClusterError as error:
                self._failure = self._failure or error
                return
            if self._ended(pod, container):
                return

    def _ended(self, pod: str, container: str) -> bool:
        """Whether a container whose lines ended has ended too. Its status follows within seconds."""
        for _ in range(_LAG_POLLS):
            now = self._cluster.find(path_of("v1", "Pod", self._cluster.namespace, pod))
            if now is None or ended(now) or deleting(now) or self._container_over(now, container):
                return True
            if self._stop.wait(_POLL_S):
                return True
        return False

    @staticmethod
    def _container_over(pod: Object, container: str) -> bool:
        own = next((one for one in container_states(pod) if one["name"] == container), {})
        return "terminated" in (own.get("state") or {}) and spec(pod).get("restartPolicy") == "Never"


def unseen(lines: Iterator[Line], last: str, count: int) -> Iterator[Line]:
    """Lines that are new, where `count` lines of the time `last` and all before it are known; "": none is. A server
    that is asked again repeats the whole second."""
    for line in lines:
        if line.time < last:
            continue
        if line.time == last and count:
            count -= 1
            continue
        yield line


def _second(stamp: str) -> str:
    """The whole second of a time, which is what `sinceTime` takes."""
    moment = when(re.sub(r"\.\d+", "", stamp))
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment else ""
