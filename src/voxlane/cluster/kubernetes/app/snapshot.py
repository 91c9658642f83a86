"""Take a snapshot of what a cluster holds of an app, and fetch its events; all kinds are listed at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from voxlane.cluster.kubernetes.app import k8s
from voxlane.cluster.kubernetes.app.diagnosis import diagnose_pods
from voxlane.cluster.kubernetes.app.k8s import AppSnapshot, Object
from voxlane.cluster.kubernetes.client import Cluster, path_of
from voxlane.cluster.kubernetes.names import API_VERSION
from voxlane.errors import ClusterError, ForbiddenError

_T = TypeVar("_T")
ListingTask = Callable[[], list[Object]]
_MAX_PARALLEL = 12
_TAIL_LINES = 10
"""Number of log lines that are shown of a crash."""
_TAIL_TIMEOUT_S = 2.0
_JOB_UID = "kueue.x-k8s.io/job-uid"


def run_permitted(tasks: Mapping[str, Callable[[], _T]]) -> tuple[dict[str, _T], dict[str, ForbiddenError]]:
    """Run tasks at the same time; return the results of those that this user may run, and the errors of the others."""
    results: dict[str, _T] = {}
    forbidden: dict[str, ForbiddenError] = {}
    with ThreadPoolExecutor(min(_MAX_PARALLEL, max(1, len(tasks)))) as pool:
        futures = {name: pool.submit(task) for name, task in tasks.items()}
        for name, future in futures.items():
            try:
                results[name] = future.result()
            except ForbiddenError as error:
                forbidden[name] = error
    return results, forbidden


def build_listing_tasks(cluster: Cluster, kinds: Mapping[str, str], labels: str = "") -> dict[str, ListingTask]:
    """Return tasks that list the objects of each kind (by apiVersion) with these labels."""
    paths = {kind: path_of(version, kind, cluster.namespace) for kind, version in kinds.items()}
    return {kind: partial(cluster.list, path, labels=labels) for kind, path in paths.items()}


def take_snapshot(cluster: Cluster, name: str, *, tails: bool = True) -> AppSnapshot:
    """Return a snapshot of one app; with `tails`, it has the last log lines of the pod that crashed."""
    objects, unreadable = _list_objects(cluster, f"{k8s.APP_LABEL}={name}")
    return _build_snapshot(cluster, name, objects, unreadable, tails=tails)


def take_all_snapshots(cluster: Cluster) -> list[AppSnapshot]:
    """Return snapshots of all apps of the namespace, ordered by name."""
    objects, unreadable = _list_objects(cluster, f"{k8s.MANAGED_BY_LABEL}={k8s.MANAGED_BY},{k8s.APP_LABEL}")
    names = {k8s.label(item, k8s.APP_LABEL) for kind in k8s.KINDS for item in objects.get(kind, ())}
    return [_build_snapshot(cluster, name, objects, unreadable, tails=False) for name in sorted(names)]


def find_kueue_version(cluster: Cluster) -> str:
    """Return the version of Kueue's API in the cluster, such as kueue.x-k8s.io/v1beta2; empty if Kueue is not there."""
    group = cluster.find("/apis/kueue.x-k8s.io")
    return str(group["preferredVersion"]["groupVersion"]) if group else ""


def _list_objects(cluster: Cluster, labels: str) -> tuple[dict[str, list[Object]], list[str]]:
    """Return objects by kind, and the kinds that this user may not list."""
    tasks = build_listing_tasks(cluster, k8s.KINDS, labels)
    tasks["Event"] = partial(cluster.list, path_of("v1", "Event", cluster.namespace), fields="type=Warning")
    objects, forbidden = run_permitted(tasks)
    if "Pod" in forbidden and not any(objects.get(kind) for kind in k8s.WORKLOADS):
        fix = "Ask the cluster's administrator for the verbs get and list"
        raise ForbiddenError(f"you may not list pods in namespace {cluster.namespace}", uri=cluster.name, fix=fix)
    return objects, list(forbidden)


def _build_snapshot(
    cluster: Cluster, name: str, objects: Mapping[str, list[Object]], unreadable: list[str], *, tails: bool
) -> AppSnapshot:
    """Return the snapshot of an app, given the listed objects of at least this app."""

    def select(*kinds: str, board: bool = False) -> list[Object]:
        listed = [item for kind in kinds for item in objects.get(kind, ()) if k8s.label(item, k8s.APP_LABEL) == name]
        selected = [item for item in listed if (k8s.label(item, k8s.PART_LABEL) == k8s.BOARD) == board]
        return sorted(selected, key=k8s.name_of)

    snapshot = AppSnapshot(
        name=name,
        namespace=cluster.namespace,
        workload=max(select(*k8s.WORKLOADS), key=k8s.created_at, default=None),
        jobs=select("Job"),
        pods=select("Pod"),
        boards=select("Deployment", board=True),
        board_pods=select("Pod", board=True),
        data=select("StagedDataset"),
        warnings=sorted(objects.get("Event", ()), key=k8s.get_event_time),
        unreadable=unreadable,
    )
    snapshot = snapshot if snapshot.workload is None else _complete(cluster, snapshot, snapshot.workload)
    problems = diagnose_pods(snapshot.pods, snapshot) if tails and snapshot.workload else []
    if not problems or problems[0].kind not in ("crash", "memory"):
        return snapshot
    crashed = next(pod for pod in snapshot.pods if k8s.name_of(pod) == problems[0].pod)
    return replace(snapshot, log_tails={problems[0].pod: read_log_tail(cluster, crashed)})


def _complete(cluster: Cluster, snapshot: AppSnapshot, workload: Object) -> AppSnapshot:
    """Add what can only be fetched once the workload is known: its queue, other apps' data, nodes, unlabelled pods."""
    own_data = set(map(k8s.name_of, snapshot.data))
    other_data = [name for name in k8s.list_used_datasets(workload) if name not in own_data]
    # Tasks by the kind that they read, followed by a name if there are several of one kind.
    tasks: dict[str, Callable[[], Any]] = {
        f"StagedDataset {name}": partial(cluster.find, path_of(API_VERSION, "StagedDataset", cluster.namespace, name))
        for name in other_data
    }
    if snapshot.queue_name:
        tasks["LocalQueue"] = partial(_read_queue, cluster, snapshot.queue_name, k8s.uid_of(workload))
    # Nodes can explain pods that wait or stand still; a cluster may have thousands, so they are not read otherwise.
    if any(
        k8s.status(pod).get("phase", "Pending") == "Pending" or k8s.condition(pod, "Ready").get("status") == "False"
        for pod in snapshot.alive_pods
    ):
        tasks["Node"] = partial(cluster.list, path_of("v1", "Node"))
    unlabelled = {"Job": "batch/v1"} if not snapshot.jobs and workload["kind"] in ("JobSet", "TrainJob") else {}
    unlabelled |= {"Pod": "v1"} if not snapshot.pods and workload["kind"] == "TrainJob" else {}
    tasks |= build_listing_tasks(cluster, unlabelled, f"{k8s.JOBSET_LABEL}={k8s.name_of(workload)}")
    results, forbidden = run_permitted(tasks)
    queue, admissions = results.get("LocalQueue", (None, []))
    unreadable = sorted({*snapshot.unreadable, *(name.split()[0] for name in forbidden)})
    datasets = {name: results.get(f"StagedDataset {name}") for name in other_data}
    missing_data = [name for name, dataset in datasets.items() if dataset is None]
    return replace(
        snapshot,
        data=[*snapshot.data, *filter(None, datasets.values())],
        missing_data=missing_data if "StagedDataset" not in unreadable else [],
        queue=queue,
        admissions=admissions,
        nodes=results.get("Node"),
        jobs=sorted(results.get("Job", snapshot.jobs), key=k8s.name_of),
        pods=sorted(results.get("Pod", snapshot.pods), key=k8s.name_of),
        unreadable=unreadable,
    )


def _read_queue(cluster: Cluster, queue: str, uid: str) -> tuple[Object | None, list[Object]]:
    """Return a LocalQueue and Kueue's Workloads of the object with this uid, oldest first."""
    version = find_kueue_version(cluster)
    if not version:
        return None, []
    path = path_of(version, "Workload", cluster.namespace)
    admissions = cluster.list(path, labels=f"{_JOB_UID}={uid}")
    admissions = admissions or [item for item in cluster.list(path) if k8s.is_owned_by(item, uid)]
    local_queue = cluster.find(path_of(version, "LocalQueue", cluster.namespace, queue))
    return local_queue, sorted(admissions, key=k8s.created_at)


def fetch_events(cluster: Cluster, app: str) -> list[Object]:
    """Return the events about an app's objects, oldest first, including those of pods that are gone, which are found by
    their names."""

    def list_admissions() -> list[Object]:
        version = find_kueue_version(cluster)
        return cluster.list(path_of(version, "Workload", cluster.namespace)) if version else []

    tasks = build_listing_tasks(cluster, k8s.KINDS, f"{k8s.APP_LABEL}={app}")
    tasks["Event"] = partial(cluster.list, path_of("v1", "Event", cluster.namespace))
    objects, forbidden = run_permitted({**tasks, "Workload": list_admissions})
    if "Event" in forbidden:
        raise forbidden["Event"]
    # A forbidden kind is usually one that the app does not use; its events are found by name anyway.
    own_objects = [item for kind in k8s.KINDS for item in objects.get(kind, ())]
    uids = set(map(k8s.uid_of, own_objects))
    own_objects += [item for item in objects.get("Workload", ()) if any(k8s.is_owned_by(item, uid) for uid in uids)]
    return sorted(filter_events(objects["Event"], own_objects, app), key=k8s.get_event_time)


def filter_events(events: Sequence[Object], own_objects: Sequence[Object], app: str) -> list[Object]:
    """Return the events that are about the app's objects."""
    uids = set(map(k8s.uid_of, own_objects))
    names = {(item["kind"], k8s.name_of(item)) for item in own_objects} | {(kind, app) for kind in k8s.WORKLOADS}

    def is_own(event: Object) -> bool:
        subject = event.get("involvedObject") or {}
        kind, name = str(subject.get("kind")), str(subject.get("name"))
        is_former_pod = kind in ("Pod", "Job") and name.startswith(f"{app}-node-")
        return k8s.is_about(event, uids) or (kind, name) in names or is_former_pod

    return list(filter(is_own, events))


def read_log_tail(cluster: Cluster, pod: Object) -> list[str]:
    """Return the last lines that a failed container of a pod printed, from its termination message or its log."""
    for container in k8s.list_container_statuses(pod):
        terminated = (container.get("state") or {}).get("terminated")
        last = terminated or (container.get("lastState") or {}).get("terminated") or {}
        if not last.get("exitCode"):
            continue
        if last.get("message"):
            return [line for line in str(last["message"]).splitlines() if line.strip()][-_TAIL_LINES:]
        query = {"container": container["name"], "tailLines": _TAIL_LINES}
        if not terminated:
            query["previous"] = "true"
        path = path_of("v1", "Pod", cluster.namespace, k8s.name_of(pod))
        try:
            lines = list(cluster.stream(f"{path}/log", query=query, timeout_s=_TAIL_TIMEOUT_S))
        except ClusterError:  # the node is gone, or may not be read: the diagnosis stands without log lines
            return []
        return [line.decode(errors="replace") for line in lines]
    return []
