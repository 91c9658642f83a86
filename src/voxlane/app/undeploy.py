"""Remove what an app made, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from voxlane.app.look import at_once
from voxlane.app.objects import (
    APP,
    MANAGED,
    OURS,
    PART,
    RUN,
    WORKLOADS,
    Object,
    annotation,
    deleting,
    label,
    name_of,
    span,
    spec,
    status,
    used_data,
)
from voxlane.errors import ClusterError, ForbiddenError, MissingObjectError
from voxlane.kube.client import Cluster, path_of, path_of_object
from voxlane.kube.names import API_VERSION

KINDS = {
    **WORKLOADS,
    "Job": "batch/v1",
    "Deployment": "apps/v1",
    "Service": "v1",
    "ConfigMap": "v1",
    "StagedDataset": API_VERSION,
}
"""In the order in which they are removed: what runs first, what it reads last."""
_POLL_S = 0.5
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Plan:
    """What goes and what stays."""

    remove: list[Object] = field(default_factory=list)
    """In this order."""
    stays: list[str] = field(default_factory=list)
    """Sentences."""
    hand_over: dict[str, str] = field(default_factory=dict)
    """Data that another app uses, by name, and that app: it is that app's from now on."""


def found(cluster: Cluster, app: str) -> tuple[list[Object], list[str]]:
    """The objects that carry an app's labels and belong to no other object, which would go with its owner; and the
    kinds that this user may not list. What the user deployed is of none of those: `deploy` asks for that right too."""
    listed, unread = _listed(cluster, f"{APP}={app},{MANAGED}={OURS}")
    return [one for one in listed if not one["metadata"].get("ownerReferences")], unread


def apps(cluster: Cluster) -> list[str]:
    """Names of all apps of the namespace that anything is there of."""
    return sorted({label(one, APP) for one in _listed(cluster, f"{MANAGED}={OURS},{APP}")[0]})


def _listed(cluster: Cluster, labels: str) -> tuple[list[Object], list[str]]:
    """Objects in the order in which they are removed, and the kinds that may not be listed; ForbiddenError where that
    are all of them. A server says no to a kind that it does not even have, to users of one namespace."""
    refused: dict[str, ForbiddenError] = {}

    def ask(kind: str, version: str) -> list[Object]:
        try:
            return cluster.list(path_of(version, kind, cluster.namespace), labels=labels)
        except ForbiddenError as error:
            refused[kind] = error
            return []

    listed = at_once({kind: partial(ask, kind, version) for kind, version in KINDS.items()})
    if len(refused) == len(KINDS):
        raise next(iter(refused.values()))
    return [one for kind in KINDS for one in listed[kind]], [kind for kind in KINDS if kind in refused]


def users(cluster: Cluster) -> list[Object]:
    """Workloads of the namespace that are there, to see who else uses an app's data."""

    def listed(kind: str, version: str) -> list[Object]:
        try:
            return cluster.list(path_of(version, kind, cluster.namespace))
        except ForbiddenError:
            return []

    kinds = {**WORKLOADS, "Deployment": "apps/v1"}
    return [one for part in at_once({k: partial(listed, k, v) for k, v in kinds.items()}).values() for one in part]


def plan(own: Sequence[Object], workloads: Sequence[Object], app: str, *, keep_data: bool = False) -> Plan:
    """What to remove of an app's objects; `workloads`: of all apps. Pure."""
    remove, stays, hand_over = [], [], {}
    runs = list(dict.fromkeys(run for one in own if (run := annotation(one, RUN))))
    for one in own:
        name = name_of(one)
        if one["kind"] != "StagedDataset":
            remove.append(one)
            continue
        others = sorted({label(w, APP) or name_of(w) for w in workloads if name in used_data(w)} - {app})
        if spec(one).get("keep"):
            stays.append(f"data {name} (keep: true)")
        elif keep_data:
            stays.append(f"data {name} (--keep-data)")
        elif others:
            stays.append(f"data {name}, which {others[0]} uses")
            hand_over[name] = others[0]
        else:
            remove.append(one)
    return Plan(remove, [*stays, *(f"the run {run}" for run in runs)], hand_over)


def run(
    cluster: Cluster,
    app: str,
    doing: Plan,
    *,
    tell: Callable[[str], None],
    wait: bool = True,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Carry out a plan; returns when all of it is gone. `tell` gets a line for every object."""
    until = time.monotonic() + timeout_s
    for name, other in doing.hand_over.items():
        path = path_of(API_VERSION, "StagedDataset", cluster.namespace, name)
        cluster.patch(path, {"metadata": {"labels": {APP: other}}})
    for kind in KINDS:
        going = [one for one in doing.remove if one["kind"] == kind]
        for one in going:
            cluster.delete(path_of_object(one), foreground=kind in WORKLOADS or kind in ("Job", "Deployment"))
        if not wait:
            for one in going:
                tell(f"{kind} {name_of(one)}: told to go")
            continue
        for one in going:
            _gone(cluster, one, app, until, tell)


def _gone(cluster: Cluster, one: Object, app: str, until: float, tell: Callable[[str], None]) -> None:
    """Wait until an object and its pods are gone; a line when what it waits for changes."""
    began, said, path = time.monotonic(), "", path_of_object(one)
    runs = one["kind"] in WORKLOADS or one["kind"] in ("Job", "Deployment")
    first = len(_pods(cluster, app, one)) if runs else 0
    while True:
        now = cluster.find(path)
        if now is not None and now["metadata"].get("uid") != one["metadata"].get("uid"):
            now = None  # another of that name: somebody deployed meanwhile
        pods = _pods(cluster, app, one) if runs else []
        if now is None and not pods:
            took = time.monotonic() - began
            more = f", with {first} pod{'s' * (first != 1)}" if first else ""
            slow = f" ({span(took)})" if took > 5 else ""
            tell(f"{one['kind']} {name_of(one)}: removed{more}{slow}")
            return
        waits = waits_for(one["kind"], now, pods)
        if waits != said and time.monotonic() - began > 2:
            said = waits
            tell(f"{one['kind']} {name_of(one)}: {waits}")
        if time.monotonic() > until:
            raise ClusterError(
                f"{one['kind']} {name_of(one)} is still there: {waits}",
                uri=cluster.name,
                fix="It will go when that does; `voxlane app undeploy` waits again",
            )
        time.sleep(_POLL_S)


def waits_for(kind: str, now: Object | None, pods: Sequence[Object]) -> str:
    """Why an object that was told to go is still there."""
    if kind == "StagedDataset" and now is not None:
        message = " ".join(str(status(now).get("message") or "").split()).rstrip(".")
        return message or "waits for the operator to remove the copies"
    if pods:
        grace = max((pod["metadata"].get("deletionGracePeriodSeconds") or 0 for pod in pods), default=0)
        told = all(deleting(pod) for pod in pods)
        save = f" (they have {grace} s to save)" if told and grace else ""
        return f"waits for {len(pods)} pod{'s' * (len(pods) != 1)} to end{save}"
    return "waits for what it owns to go"


def _pods(cluster: Cluster, app: str, one: Object) -> list[Object]:
    """Pods of the same part of the app."""
    labels = f"{APP}={app}" + (f",{PART}={label(one, PART)}" if label(one, PART) else "")
    return cluster.list(path_of("v1", "Pod", cluster.namespace), labels=labels)


def remove(cluster: Cluster, one: Object) -> bool:
    """Remove an object if it still is that one and not another of its name; returns whether it was there."""
    now = cluster.find(path_of_object(one))
    if now is None or now["metadata"].get("uid") != one["metadata"].get("uid"):
        return False
    try:
        return cluster.delete(path_of_object(one))
    except MissingObjectError:
        return False
