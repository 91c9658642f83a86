"""Start and stop an app's TensorBoard in the cluster, and connect to it from this machine through a forwarded port."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace

from voxlane.cluster.kubernetes.app import k8s, render
from voxlane.cluster.kubernetes.app.config import App
from voxlane.cluster.kubernetes.app.k8s import AppSnapshot, Object, Report
from voxlane.cluster.kubernetes.app.pod_diagnosis import PodProblem, diagnose_pod
from voxlane.cluster.kubernetes.app.snapshot import read_log_tail
from voxlane.cluster.kubernetes.client import Cluster, path_of, path_of_object
from voxlane.cluster.kubernetes.forward import HOST, PortForward
from voxlane.cluster.kubernetes.validate import validate
from voxlane.errors import ClusterError, MissingObjectError, NotRunningError

_POLL_S = 0.5
_TIMEOUT_S = 600.0
_STUCK_TIMEOUT_S = 60.0
"""How long to wait for a pod that cannot run: a second attempt to pull the image may succeed."""
_STUCK_KINDS = ("crash", "memory", "image", "config", "start", "mount")
"""Kinds of problems that rarely go away while one waits."""
_PORT_ATTEMPTS = 100


def show(cluster: Cluster, name: str, port: int, *, report: Report, open_url: Callable[[str], None]) -> None:
    """Forward the TensorBoard of app `name` to `port` of this machine, or the next free one, until KeyboardInterrupt.
    `open_url` is called with its URL once it answers; `report` gets a line whenever the reason to wait changes."""
    deadline, current, is_open = time.monotonic() + _TIMEOUT_S, "", False

    def find_pod() -> str:
        nonlocal current
        pod = cluster.find(path_of("v1", "Pod", cluster.namespace, current)) if current else None
        if pod is None or not k8s.is_available(pod):
            ready = list(filter(k8s.is_ready, _take_snapshot(cluster, name).board_pods))
            if not ready:
                raise NotRunningError("its pod is not ready", uri=f"TensorBoard of {name}")
            current = k8s.name_of(max(ready, key=k8s.created_at))
        return current

    def report_when_open(text: str) -> None:
        if is_open:
            report(text)

    wait_for_pod(cluster, name, report=report, deadline=deadline)
    attempts, remote_port = _PORT_ATTEMPTS if port else 1, render.TENSORBOARD_PORT
    with PortForward(cluster, find_pod, remote_port, port, attempts=attempts, report=report_when_open) as forwarded:
        if port and forwarded.port != port:
            report(f"port {port} is in use; using {forwarded.port}")
        url = f"http://{HOST}:{forwarded.port}/"
        while not _answers(url):
            if time.monotonic() > deadline:
                raise NotRunningError("it does not answer", uri=f"TensorBoard of {name}", fix="See: voxlane app logs")
            time.sleep(_POLL_S)
            wait_for_pod(cluster, name, report=report, deadline=deadline)
        is_open = True
        open_url(url)
        while True:
            time.sleep(3600)


def apply(cluster: Cluster, app: App, image: str) -> None:
    """Create the app's TensorBoard or bring it up to date."""
    manifests = render.render_tensorboard(app, image, namespace=cluster.namespace)
    validate(manifests)
    for manifest in manifests:
        cluster.apply(manifest)


def stop(cluster: Cluster, name: str) -> bool:
    """Remove the TensorBoard of app `name`; return whether there was one."""
    deployments = _list_board(cluster, "apps/v1", "Deployment", name)
    for deployment in deployments:
        cluster.delete(path_of_object(deployment))
    return bool(deployments)


def _list_board(cluster: Cluster, version: str, kind: str, name: str) -> list[Object]:
    """Return the Deployment or the pods of app `name`'s TensorBoard, unless they are being deleted."""
    labels = f"{k8s.APP_LABEL}={name},{k8s.PART_LABEL}={k8s.BOARD}"
    objects = cluster.list(path_of(version, kind, cluster.namespace), labels=labels)
    return [item for item in objects if not k8s.is_deleting(item)]


def wait_for_pod(cluster: Cluster, name: str, *, report: Report, deadline: float) -> None:
    """Wait until TensorBoard's pod is ready. Raise NotRunningError with the reason at the deadline (of the monotonic
    clock), or earlier if the pod crashes or cannot be started for a minute."""
    reported, stuck_deadline = "", 0.0
    while True:
        snapshot = _take_snapshot(cluster, name)
        if any(map(k8s.is_ready, snapshot.board_pods)):
            return
        delay = _explain_delay(snapshot)
        if delay.message != reported:
            reported, stuck_deadline = delay.message, time.monotonic() + _STUCK_TIMEOUT_S
            report(f"TensorBoard of {name}: {reported}")
        if time.monotonic() > deadline or (delay.kind in _STUCK_KINDS and time.monotonic() > stuck_deadline):
            lines = [line for pod in snapshot.board_pods for line in read_log_tail(cluster, pod)]
            last_line = f"; its last line: {lines[-1].strip()}" if lines else ""
            fix = delay.fix or "See: voxlane app events"
            raise NotRunningError(f"{reported}{last_line}", uri=f"TensorBoard of {name}", fix=fix)
        time.sleep(_POLL_S)


def _explain_delay(snapshot: AppSnapshot) -> PodProblem:
    """Explain why the TensorBoard of an app is not ready; the message begins with "its pod"."""
    if snapshot.board_pods:
        pod = min(snapshot.board_pods, key=k8s.name_of)
        problem = diagnose_pod(pod, snapshot) or PodProblem("", "is starting")
        return replace(problem, message=f"its pod {problem.message}")
    for deployment in snapshot.boards:
        if k8s.is_true(deployment, "ReplicaFailure"):
            reason = k8s.condition(deployment, "ReplicaFailure").get("message")
            return PodProblem("start", f"its pod is rejected: {reason}")
    return PodProblem("", "its pod is being created")


def _take_snapshot(cluster: Cluster, name: str) -> AppSnapshot:
    deployments = _list_board(cluster, "apps/v1", "Deployment", name)
    if not deployments:
        fix = "Start one in the app's folder: voxlane app tensorboard"
        raise MissingObjectError("it has no TensorBoard in the cluster", uri=f"app {name}", fix=fix)
    pods = _list_board(cluster, "v1", "Pod", name)
    warnings: list[Object] = []
    if not any(map(k8s.is_ready, pods)):
        # Users who may not read events get a less precise reason.
        with contextlib.suppress(ClusterError):
            warnings = cluster.list(path_of("v1", "Event", cluster.namespace), fields="type=Warning")
    return AppSnapshot(name, cluster.namespace, boards=deployments, board_pods=pods, warnings=warnings)


def _answers(url: str) -> bool:
    """Return whether TensorBoard answers: a pod may be ready before it does."""
    try:
        urllib.request.urlopen(url, timeout=30).close()
    except OSError:
        return False
    return True
