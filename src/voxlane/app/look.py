"""Fetch what a cluster holds of an app: each kind listed once by label, all kinds at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from voxlane.app import why
from voxlane.app.objects import (
    APP,
    JOBSET,
    MANAGED,
    OURS,
    PART,
    QUEUE,
    WORKLOADS,
    Object,
    Seen,
    condition,
    event_time,
    label,
    name_of,
    owned_by,
    status,
    uid_of,
    used_data,
)
from voxlane.app.trouble import container_states
from voxlane.errors import ClusterError, ForbiddenError
from voxlane.kube.client import Cluster, path_of
from voxlane.kube.names import API_VERSION as STAGED_API

_T = TypeVar("_T")
_AT_ONCE = 12
_TAIL_LINES = 20
_TAIL_S = 2.0
_JOB_UID = "kueue.x-k8s.io/job-uid"


def now() -> datetime:
    """This moment, as `why.verdict` wants it."""
    return datetime.now(UTC)


def at_once(tasks: Mapping[str, Callable[[], _T]]) -> dict[str, _T]:
    """The results of tasks that run at the same time, by their names; the first error is raised."""
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(tasks)))) as pool:
        running = {name: pool.submit(task) for name, task in tasks.items()}
        return {name: one.result() for name, one in running.items()}


def look(cluster: Cluster, name: str, *, tails: bool = True) -> Seen:
    """All that is there of one app; `tails`: with the last lines of the pod that crashed."""
    first = _listed(cluster, f"{APP}={name}")
    apps = _grouped(first, cluster.namespace, {name})
    return _completed(cluster, apps[name], first["unread"], tails=tails)


def look_at_all(cluster: Cluster) -> list[Seen]:
    """Every app of the namespace, by name."""
    first = _listed(cluster, f"{MANAGED}={OURS},{APP}")
    apps = _grouped(first, cluster.namespace, set())
    return [_completed(cluster, apps[name], first["unread"], tails=False) for name in sorted(apps)]


def queue_version(cluster: Cluster) -> str:
    """The version of Kueue's API that the cluster has (kueue.x-k8s.io/v1beta2); empty: it has none."""
    found = cluster.find("/apis/kueue.x-k8s.io")
    return str(found["preferredVersion"]["groupVersion"]) if found else ""


def _listed(cluster: Cluster, labels: str) -> dict[str, Any]:
    """Objects by kind, and under "unread" the kinds that this user may not list."""
    space, unread = cluster.namespace, []

    def task(kind: str, version: str, *, fields: str = "", chosen: str = labels) -> Callable[[], list[Object]]:
        def run() -> list[Object]:
            try:
                return cluster.list(path_of(version, kind, space), labels=chosen, fields=fields)
            except ForbiddenError:
                unread.append(kind)
                return []

        return run

    kinds = {**WORKLOADS, "Job": "batch/v1", "Deployment": "apps/v1", "Pod": "v1", "StagedDataset": STAGED_API}
    tasks = {kind: task(kind, version) for kind, version in kinds.items()}
    tasks["Event"] = task("Event", "v1", fields="type=Warning", chosen="")
    found: dict[str, Any] = at_once(tasks)
    if "Pod" in unread and not any(found[kind] for kind in WORKLOADS):
        raise ForbiddenError(
            f"you may not list pods in namespace {space}",
            uri=cluster.name,
            fix="Ask the cluster's administrator for the verbs get and list",
        )
    found["unread"] = unread
    return found


def _grouped(found: Mapping[str, Any], namespace: str, names: set[str]) -> dict[str, Seen]:
    """Apps by name, of what `_listed` found; `names` are there also where nothing was found of them."""
    of: dict[str, dict[str, list[Object]]] = {name: {} for name in names}
    for kind in (*WORKLOADS, "Job", "Deployment", "Pod", "StagedDataset"):
        for one in found[kind]:
            of.setdefault(label(one, APP), {}).setdefault(kind, []).append(one)
    warnings = sorted(found["Event"], key=event_time)
    apps = {}
    for name, kinds in of.items():
        workloads = [one for kind in WORKLOADS for one in kinds.get(kind, ()) if label(one, PART) != "board"]
        pods = kinds.get("Pod", [])
        apps[name] = Seen(
            name=name,
            namespace=namespace,
            workload=max(workloads, key=lambda one: str(one["metadata"].get("creationTimestamp")), default=None),
            jobs=sorted(kinds.get("Job", []), key=name_of),
            pods=sorted((pod for pod in pods if label(pod, PART) != "board"), key=name_of),
            boards=[one for one in kinds.get("Deployment", []) if label(one, PART) == "board"],
            board_pods=[pod for pod in pods if label(pod, PART) == "board"],
            data=kinds.get("StagedDataset", []),
            warnings=warnings,
        )
    return apps


def _completed(cluster: Cluster, seen: Seen, unread: Iterable[str], *, tails: bool) -> Seen:
    """With what can only be asked for now: the queue, data of others that it uses, nodes, last lines."""
    workload, unread = seen.workload, list(unread)
    if workload is None:
        return replace(seen, unread=unread)
    kind, name, uid = workload["kind"], name_of(workload), uid_of(workload)

    def guarded(what: str, ask: Callable[[], Any], otherwise: Any) -> Callable[[], Any]:
        def run() -> Any:
            try:
                return ask()
            except ForbiddenError:
                unread.append(what)
                return otherwise

        return run

    tasks: dict[str, Callable[[], Any]] = {}
    held = {name_of(one) for one in seen.data}
    for one in used_data(workload):
        if one not in held:
            path = path_of(STAGED_API, "StagedDataset", seen.namespace, one)
            tasks[f"data {one}"] = guarded("StagedDataset", partial(cluster.find, path), None)
    if label(workload, QUEUE):
        tasks["queue"] = guarded("LocalQueue", lambda: _queue(cluster, seen, uid), (None, []))
    if _needs_nodes(seen):
        tasks["nodes"] = guarded("Node", lambda: cluster.list(path_of("v1", "Node")), None)
    if not seen.jobs and kind in ("JobSet", "TrainJob"):
        tasks["jobs"] = guarded(
            "Job", lambda: cluster.list(path_of("batch/v1", "Job", seen.namespace), labels=f"{JOBSET}={name}"), []
        )
    if not seen.pods and kind == "TrainJob":
        tasks["pods"] = guarded(
            "Pod", lambda: cluster.list(path_of("v1", "Pod", seen.namespace), labels=f"{JOBSET}={name}"), []
        )
    got = at_once(tasks) if tasks else {}
    asked = {key.removeprefix("data "): one for key, one in got.items() if key.startswith("data ")}
    queue, admissions = got.get("queue", (None, []))
    whole = replace(
        seen,
        data=[*seen.data, *(one for one in asked.values() if one)],
        lacking_data=[key for key, one in asked.items() if one is None and "StagedDataset" not in unread],
        queue=queue,
        admissions=admissions,
        nodes=got.get("nodes"),
        jobs=sorted(got.get("jobs", seen.jobs), key=name_of),
        pods=sorted(got.get("pods", seen.pods), key=name_of),
        unread=sorted(set(unread)),
    )
    if not tails:
        return whole
    wanted = why.suspects(whole, now())
    return replace(whole, tails={pod: tail(cluster, whole, pod) for pod in wanted})


def _queue(cluster: Cluster, seen: Seen, uid: str) -> tuple[Object | None, list[Object]]:
    """The LocalQueue of an app and Kueue's Workloads of it, oldest first."""
    version = queue_version(cluster)
    if not version:
        return None, []
    path = path_of(version, "Workload", seen.namespace)
    got = at_once(
        {
            "queue": lambda: cluster.find(path_of(version, "LocalQueue", seen.namespace, seen.queue_name)),
            "own": lambda: cluster.list(path, labels=f"{_JOB_UID}={uid}"),
        }
    )
    own: Any = got["own"] or [one for one in cluster.list(path) if owned_by(one, uid)]
    queue: Any = got["queue"]
    return queue, sorted(own, key=lambda one: str(one["metadata"].get("creationTimestamp")))


def _needs_nodes(seen: Seen) -> bool:
    """Nodes are listed only where they may say something: of pods that wait or have stood still, not of 500 that run
    well, because a cluster may have thousands."""
    return any(
        status(pod).get("phase", "Pending") == "Pending" or condition(pod, "Ready").get("status") == "False"
        for pod in seen.pods
        if status(pod).get("phase") not in ("Succeeded", "Failed")
    )


def tail(cluster: Cluster, seen: Seen, pod: str) -> list[str]:
    """The last lines that a pod's containers wrote: what the node kept with its end, or its log; [] where neither can
    be had."""
    own = next((one for one in seen.pods if name_of(one) == pod), None)
    if own is None:
        return []
    path = path_of("v1", "Pod", seen.namespace, pod)
    for one in container_states(own):
        end = (one.get("state") or {}).get("terminated") or (one.get("lastState") or {}).get("terminated") or {}
        if not end.get("exitCode"):
            continue
        if end.get("message"):
            return [line for line in str(end["message"]).splitlines() if line.strip()]
        query = {"container": one["name"], "tailLines": _TAIL_LINES}
        if not (one.get("state") or {}).get("terminated"):
            query["previous"] = "true"
        try:
            lines = list(cluster.stream(f"{path}/log", query=query, timeout_s=_TAIL_S))
        except ClusterError:  # the node is gone, or may not be read: the sentence stands alone
            return []
        return [line.decode(errors="replace") for line in lines]
    return []
