"""What the cluster reports of an app's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from voxlane.app.objects import APP, WORKLOADS, Object, event_time, name_of, owned_by, since, uid_of
from voxlane.app.status import table
from voxlane.errors import ForbiddenError
from voxlane.kube.client import Cluster, path_of
from voxlane.kube.names import API_VERSION

_OWN = {**WORKLOADS, "Job": "batch/v1", "Deployment": "apps/v1", "Pod": "v1", "StagedDataset": API_VERSION}


def fetch(cluster: Cluster, app: str) -> list[Object]:
    """Events of what an app made, oldest first; also of pods that are gone, by their names."""
    from voxlane.app.look import at_once, queue_version

    space = cluster.namespace

    def own_of(kind: str, version: str) -> list[Object]:
        try:
            return cluster.list(path_of(version, kind, space), labels=f"{APP}={app}")
        except ForbiddenError:  # of a kind that the app is not of, as a rule; its events are found by name all the same
            return []

    tasks: dict[str, Callable[[], list[Object]]] = {
        kind: partial(own_of, kind, version) for kind, version in _OWN.items()
    }
    tasks["Event"] = lambda: cluster.list(path_of("v1", "Event", space))
    tasks["Workload"] = lambda: _admissions(cluster, queue_version(cluster))
    found = at_once(tasks)
    own = [one for kind in _OWN for one in found[kind]]
    uids = {uid_of(one) for one in own}
    own += [one for one in found["Workload"] if any(owned_by(one, uid) for uid in uids)]
    return sorted(of_app(found["Event"], own, app), key=event_time)


def _admissions(cluster: Cluster, version: str) -> list[Object]:
    try:
        return cluster.list(path_of(version, "Workload", cluster.namespace)) if version else []
    except ForbiddenError:
        return []


def of_app(events: Sequence[Object], own: Sequence[Object], app: str) -> list[Object]:
    """Those events that are about the app's objects."""
    uids = {uid_of(one) for one in own}
    named = {(one["kind"], name_of(one)) for one in own} | {(kind, app) for kind in WORKLOADS}
    found = []
    for event in events:
        about = event.get("involvedObject") or {}
        kind, name = str(about.get("kind")), str(about.get("name"))
        gone = kind in ("Pod", "Job") and name.startswith(f"{app}-node-")
        if about.get("uid") in uids or (kind, name) in named or gone:
            found.append(event)
    return found


def lines(events: Sequence[Mapping[str, Any]], app: str, now: datetime) -> list[str]:
    """Events as a table, oldest first."""
    body = []
    for event in events:
        about = event.get("involvedObject") or {}
        count = (event.get("series") or {}).get("count") or event.get("count") or 1
        message = " ".join(str(event.get("message") or "").split())
        times = f" (x{count})" if count > 1 else ""
        name = str(about.get("name")).removeprefix(f"{app}-")
        kind = "" if event.get("type") == "Normal" else str(event.get("type") or "")
        what = f"{str(about.get('kind')).lower()} {name}"
        body.append((since(event_time(event), now), kind, str(event.get("reason") or ""), what, message + times))
    return table([("AGO", "TYPE", "REASON", "OBJECT", "MESSAGE"), *body])
