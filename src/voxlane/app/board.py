"""An app's TensorBoard in the cluster: a Deployment beside the training, which it outlives, seen from here through a
forwarded port."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from voxlane.app.config import App
from voxlane.app.look import tail
from voxlane.app.objects import APP, PART, Object, Seen, deleting, name_of, status, uid_of
from voxlane.app.render import render_board
from voxlane.app.trouble import ready, trouble
from voxlane.app.validate import validate
from voxlane.errors import ClusterError, MissingObjectError, NotRunningError
from voxlane.kube.client import Cluster, path_of, path_of_object
from voxlane.kube.forward import HOST, Forward
from voxlane.train.board import free_port

PORT = 6006
"""In the pod, on its own loopback address."""
_PART = "board"
_POLL_S = 0.5
_HOPELESS_S = 60.0
"""How long a pod that cannot run is watched before it is given up: an image may still be pulled at a second try."""
Say = Callable[[str], None]


def show(cluster: Cluster, name: str, port: int, *, say: Say, open_url: Say, within_s: float = 600.0) -> None:
    """Forward the TensorBoard of app `name` to `port` of this machine, or the next free one, until KeyboardInterrupt.
    `open_url` is called with its URL once it answers; `say` takes a line whenever something else is the reason to
    wait."""
    until = time.monotonic() + within_s
    pod_ready(cluster, name, say=say, until=until)
    own = free_port(port)
    if own != port and port:
        say(f"port {port} is taken; {own} is used")
    answered = False
    with forward(cluster, name, own, say=lambda text: say(text) if answered else None) as open_port:
        url = f"http://{HOST}:{open_port}/"
        while not _answers(url):
            if time.monotonic() > until:
                raise NotRunningError("it does not answer", uri=f"TensorBoard of {name}", fix="See: voxlane app logs")
            time.sleep(_POLL_S)
            pod_ready(cluster, name, say=say, until=until)
        answered = True
        open_url(url)
        while True:
            time.sleep(3600)


def apply(cluster: Cluster, app: App, image: str) -> bool:
    """Make the app's TensorBoard, or bring it to what the app says now; returns whether it is new."""
    manifests = render_board(app, image, namespace=cluster.namespace)
    validate(manifests)
    new = not boards(cluster, app.name)
    for one in manifests:
        cluster.apply(one)
    return new


def stop(cluster: Cluster, name: str) -> bool:
    """Remove the TensorBoard of app `name`; returns whether there was one."""
    own = boards(cluster, name)
    for one in own:
        cluster.delete(path_of_object(one))
    return bool(own)


def boards(cluster: Cluster, name: str) -> list[Object]:
    """The Deployment of app `name`'s TensorBoard, if there is one."""
    where = path_of("apps/v1", "Deployment", cluster.namespace)
    return [one for one in cluster.list(where, labels=f"{APP}={name},{PART}={_PART}") if not deleting(one)]


@contextlib.contextmanager
def forward(cluster: Cluster, name: str, local_port: int, *, say: Say | None = None) -> Iterator[int]:
    """A port of this machine's loopback address that leads to the TensorBoard of app `name`, also when its pod is
    replaced; yields the port."""
    known = ""

    def pod() -> str:
        nonlocal known
        if known and not _up(cluster, known):
            known = ""
        known = known or name_of(_ready_pod(cluster, name))
        return known

    with Forward(cluster, pod, PORT, local_port, say=say) as forwarding:
        yield forwarding.port


def pod_ready(cluster: Cluster, name: str, *, say: Say, until: float) -> str:
    """The name of the TensorBoard's pod, once it is ready. NotRunningError says why it is not when time is up (`until`,
    of the monotonic clock), or earlier if it crashes or cannot be started for a minute."""
    told, hopeless = "", 0.0
    while True:
        seen = _look(cluster, name)
        for pod in seen.board_pods:
            if ready(pod) and not deleting(pod):
                return name_of(pod)
        found = why_not(seen, datetime.now(UTC))
        if found.words != told:
            told, hopeless = found.words, time.monotonic() + _HOPELESS_S
            say(f"TensorBoard of {name}: {told}")
        if time.monotonic() > until or (found.stuck and time.monotonic() > hopeless):
            last = _last_words(cluster, seen)
            raise NotRunningError(
                f"{told}{last}", uri=f"TensorBoard of {name}", fix=found.fix or "See: voxlane app events"
            )
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Reason:
    """Why a TensorBoard is not there yet."""

    words: str
    fix: str = ""
    stuck: bool = False
    """Whether waiting alone will hardly help."""


def why_not(seen: Seen, now: datetime) -> Reason:
    """Why the TensorBoard of an app is not ready, from what was fetched before."""
    for pod in sorted(seen.board_pods, key=name_of):
        if deleting(pod):
            continue
        if (found := trouble(pod, seen, now)) is not None:
            stuck = found.kind in ("crash", "memory", "image", "config", "start", "mount")
            return Reason(f"its pod {found.said}", found.fix, stuck)
        return Reason("its pod is starting")
    for one in seen.boards:
        for said in status(one).get("conditions") or ():
            if said.get("type") == "ReplicaFailure" and said.get("status") == "True":
                return Reason(f"its pod is refused: {said.get('message')}", stuck=True)
    return Reason("its pod is being made")


def _look(cluster: Cluster, name: str) -> Seen:
    labels = f"{APP}={name},{PART}={_PART}"
    own = boards(cluster, name)
    if not own:
        raise MissingObjectError(
            "it has no TensorBoard in the cluster",
            uri=f"app {name}",
            fix="Start one in the app's folder: voxlane app tensorboard",
        )
    pods = cluster.list(path_of("v1", "Pod", cluster.namespace), labels=labels)
    uids = {uid_of(pod) for pod in pods}
    waiting = not any(ready(pod) for pod in pods)
    warnings = [
        event
        for event in (_events(cluster) if waiting else [])
        if (event.get("involvedObject") or {}).get("uid") in uids
    ]
    return Seen(name, cluster.namespace, boards=own, board_pods=pods, warnings=warnings)


def _last_words(cluster: Cluster, seen: Seen) -> str:
    """The last line of a pod that crashed, as the end of a sentence."""
    lines = [line for pod in seen.board_pods for line in tail(cluster, replace(seen, pods=[pod]), name_of(pod))]
    return f"; its last line: {lines[-1].strip()}" if lines else ""


def _events(cluster: Cluster) -> list[Object]:
    try:
        return cluster.list(path_of("v1", "Event", cluster.namespace), fields="type=Warning")
    except ClusterError:  # who may not read events is told less, and not refused
        return []


def _ready_pod(cluster: Cluster, name: str) -> Object:
    found = [pod for pod in _look(cluster, name).board_pods if ready(pod) and not deleting(pod)]
    if not found:
        raise NotRunningError("its pod is not ready", uri=f"TensorBoard of {name}")
    return max(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))


def _up(cluster: Cluster, pod: str) -> bool:
    found = cluster.find(path_of("v1", "Pod", cluster.namespace, pod))
    return found is not None and ready(found) and not deleting(found)


def _answers(url: str) -> bool:
    """Whether TensorBoard does: a pod may be called ready before."""
    try:
        urllib.request.urlopen(url, timeout=30).close()
    except OSError:
        return False
    return True
