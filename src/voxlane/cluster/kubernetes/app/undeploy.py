"""Remove everything that an app created in a cluster, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from voxlane.cluster.kubernetes.app import k8s
from voxlane.cluster.kubernetes.app.k8s import Object, Report
from voxlane.cluster.kubernetes.app.snapshot import build_listing_tasks, run_permitted
from voxlane.cluster.kubernetes.client import Cluster, path_of, path_of_object
from voxlane.cluster.kubernetes.names import API_VERSION
from voxlane.errors import ClusterError

KINDS = {**k8s.WORKLOADS, "Deployment": "apps/v1", "ConfigMap": "v1", "StagedDataset": API_VERSION}
"""apiVersion of the kinds that an app creates, in the order of their removal: running pods first, their data last."""
_KINDS_WITH_PODS = (*k8s.WORKLOADS, "Deployment")
_POLL_S = 0.5
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class UndeployPlan:
    """What an undeploy removes and what it keeps."""

    remove: list[Object] = field(default_factory=list)
    """Objects to remove, in this order."""
    remaining: list[str] = field(default_factory=list)
    """Descriptions of what stays in the cluster and the bucket."""
    hand_over: dict[str, str] = field(default_factory=dict)
    """Names of StagedDatasets that another app uses, and that app, which becomes their owner."""


def list_objects(cluster: Cluster, app: str = "") -> tuple[list[Object], list[str]]:
    """Return the objects of an app, or of all apps, in the order in which they are removed, without those that are
    removed with their owner; and the kinds that this user may not list. Raise ForbiddenError if these are all kinds. To
    users of one namespace, a server forbids even the kinds that it does not have, but a user who deployed an app may
    list all kinds that it uses: `deploy` checks."""
    labels = f"{k8s.MANAGED_BY_LABEL}={k8s.MANAGED_BY},{k8s.APP_LABEL}" + (f"={app}" if app else "")
    objects, forbidden = run_permitted(build_listing_tasks(cluster, KINDS, labels))
    if not objects:
        raise next(iter(forbidden.values()))
    listed = [item for kind in KINDS for item in objects.get(kind, ())]
    return [item for item in listed if not item["metadata"].get("ownerReferences")], list(forbidden)


def list_apps(cluster: Cluster) -> list[str]:
    """Return the names of all apps that have objects in the namespace."""
    return sorted({k8s.label(item, k8s.APP_LABEL) for item in list_objects(cluster)[0]})


def list_workloads(cluster: Cluster) -> list[Object]:
    """Return all workloads of the namespace that this user may list, to see who else uses an app's data."""
    objects, _ = run_permitted(build_listing_tasks(cluster, {**k8s.WORKLOADS, "Deployment": "apps/v1"}))
    return [item for items in objects.values() for item in items]


def plan(objects: Sequence[Object], workloads: Sequence[Object], app: str, *, keep_data: bool = False) -> UndeployPlan:
    """Plan which of an app's objects to remove; `workloads` are those of all apps. Pure."""
    remove, remaining, hand_over = [], [], {}
    for item in objects:
        name = k8s.name_of(item)
        if item["kind"] != "StagedDataset":
            remove.append(item)
            continue
        users = {k8s.label(w, k8s.APP_LABEL) or k8s.name_of(w) for w in workloads if name in k8s.list_used_datasets(w)}
        other_users = sorted(users - {app})
        if k8s.spec(item).get("keep"):
            remaining.append(f"data {name} (keep: true)")
        elif keep_data:
            remaining.append(f"data {name} (--keep-data)")
        elif other_users:
            remaining.append(f"data {name}, which {other_users[0]} uses")
            hand_over[name] = other_users[0]
        else:
            remove.append(item)
    runs = dict.fromkeys(run for item in objects if (run := k8s.annotation(item, k8s.RUN_ANNOTATION)))
    return UndeployPlan(remove, [*remaining, *(f"the run {run}" for run in runs)], hand_over)


def apply(cluster: Cluster, undeploy_plan: UndeployPlan, *, report: Report, wait: bool = True) -> None:
    """Carry out a plan; with `wait`, return when all of it is gone. `report` gets a line for every object."""
    deadline = time.monotonic() + _TIMEOUT_S
    for name, other in undeploy_plan.hand_over.items():
        path = path_of(API_VERSION, "StagedDataset", cluster.namespace, name)
        cluster.patch(path, {"metadata": {"labels": {k8s.APP_LABEL: other}}})
    for kind in KINDS:
        objects = [item for item in undeploy_plan.remove if item["kind"] == kind]
        for item in objects:
            cluster.delete(path_of_object(item), foreground=kind in _KINDS_WITH_PODS)
        for item in objects:
            if wait:
                _wait_until_gone(cluster, item, deadline, report)
            else:
                report(f"{k8s.title_of(item)}: is being removed")


def _wait_until_gone(cluster: Cluster, item: Object, deadline: float, report: Report) -> None:
    """Wait until an object and its pods are gone; report a line when the reason to wait changes."""
    started, reported, has_pods = time.monotonic(), "", item["kind"] in _KINDS_WITH_PODS
    labels = ",".join(f"{key}={k8s.label(item, key)}" for key in (k8s.APP_LABEL, k8s.PART_LABEL))
    list_pods = partial(cluster.list, path_of("v1", "Pod", cluster.namespace), labels=labels)
    pod_count = len(list_pods()) if has_pods else 0
    while True:
        current = find_again(cluster, item)
        pods = list_pods() if has_pods else []
        waited = time.monotonic() - started
        if current is None and not pods:
            with_pods = f", with {k8s.count_noun(pod_count, 'pod')}" if pod_count else ""
            took = f" ({k8s.format_duration(waited)})" if waited > 5 else ""
            report(f"{k8s.title_of(item)}: removed{with_pods}{took}")
            return
        reason = explain_wait(item["kind"], current, pods)
        if reason != reported and waited > 2:
            reported = reason
            report(f"{k8s.title_of(item)}: {reason}")
        if time.monotonic() > deadline:
            fix = "The removal continues in the cluster; `voxlane app undeploy` waits again"
            raise ClusterError(f"{k8s.title_of(item)} still exists: {reason}", uri=cluster.name, fix=fix)
        time.sleep(_POLL_S)


def find_again(cluster: Cluster, item: Object) -> Object | None:
    """Return an object as it is now; None if it is gone, also if somebody has created another of its name."""
    current = cluster.find(path_of_object(item, cluster.namespace))
    return current if current is not None and k8s.uid_of(current) == k8s.uid_of(item) else None


def explain_wait(kind: str, current: Object | None, pods: Sequence[Object]) -> str:
    """Explain why an object that is being removed still exists."""
    if kind == "StagedDataset" and current is not None:
        return k8s.collapse_message(k8s.status(current).get("message")) or "waits for the operator to remove the copies"
    if pods:
        grace_s = max((pod["metadata"].get("deletionGracePeriodSeconds") or 0 for pod in pods), default=0)
        grace = f" (they have {grace_s} s to save)" if all(k8s.is_deleting(pod) for pod in pods) and grace_s else ""
        return f"waits for {k8s.count_noun(len(pods), 'pod')} to end{grace}"
    return "waits for the objects that it owns"
