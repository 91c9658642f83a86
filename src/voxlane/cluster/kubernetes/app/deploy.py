"""Deploy an app to a cluster, all of it or nothing.

    files and data  ->  wait for the data  ->  the old job ends  ->  the new job

Data that must be copied again waits for the pods that use it, so the old job then ends first.

Everything is first sent to the server as a dry run. Each object that a deploy creates or changes carries the deploy's
token. If anything fails before the new job exists, also on Ctrl-C, all of it is rolled back: new objects are removed
and changed objects are restored.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from voxlane.cluster.kubernetes.app import k8s, undeploy
from voxlane.cluster.kubernetes.app.diagnosis import diagnose_app
from voxlane.cluster.kubernetes.app.k8s import AppSnapshot, Object, Report
from voxlane.cluster.kubernetes.client import Cluster, path_of, path_of_object, write_query
from voxlane.cluster.kubernetes.names import API_VERSION
from voxlane.cluster.kubernetes.operator.resource import RESTAGE
from voxlane.errors import ClusterError, DryRunUnsupportedError, ForbiddenError, MissingObjectError, VoxlaneError

_POLL_S = 0.5
_MAX_SILENCE_S = 300.0
"""How long a cluster may not answer while a deploy waits for data."""
_MAX_CHANGE_ATTEMPTS = 5
"""How often a change is tried if other clients change the object first."""
_OPERATOR_TIMEOUT_S = 30.0
"""After this time without a status, a StagedDataset has no operator."""
DEPLOY_ANNOTATION = "voxlane.dev/deploy"
"""Annotation with the random token of the deploy that last created or changed an object."""
_CONFLICT = 409
Progress = Callable[[Object], None]


@dataclass(frozen=True)
class DeployStep:
    """What a deploy does about one manifest."""

    action: str
    """create, change, replace (create when the old object is gone), same, or use (leave the object of another app)."""
    manifest: Object
    before: Object | None = None
    """The object before the deploy; None if it did not exist."""

    @property
    def title(self) -> str:
        """Kind and name of the object."""
        return k8s.title_of(self.manifest)

    @property
    def waits_for_users(self) -> bool:
        """Whether data is copied again or is still being removed: the operator does neither while it is in use."""
        if self.manifest["kind"] != "StagedDataset" or self.before is None or self.action not in ("change", "replace"):
            return False
        new = merge_manifest(self.before, self.manifest)
        restaged = k8s.annotation(self.before, RESTAGE) != k8s.annotation(new, RESTAGE)
        moved = k8s.spec(self.before).get("source") != k8s.spec(new).get("source")
        return self.action == "replace" or restaged or moved


@dataclass(frozen=True)
class DeployPlan:
    """The steps of a deploy, and the objects of an earlier deploy that must be removed first."""

    steps: list[DeployStep] = field(default_factory=list)
    """Steps in order; the workload is the last."""
    remove: list[Object] = field(default_factory=list)
    """Workloads of an earlier deploy, which have ended or are to be replaced."""
    ends: bool = False
    """Whether a workload in `remove` has not ended yet."""

    @property
    def ends_first(self) -> bool:
        """Whether the old workload must end before the data can be ready."""
        return self.ends and any(step.waits_for_users for step in self.steps)


def read_existing(cluster: Cluster, manifests: Sequence[Object]) -> list[Object | None]:
    """Return the objects in the cluster that have the manifests' names; None for those that do not exist."""
    return [cluster.find(path_of_object(manifest, cluster.namespace)) for manifest in manifests]


def plan(
    manifests: Sequence[Object], existing: Sequence[Object | None], snapshot: AppSnapshot, *, replace: bool
) -> DeployPlan:
    """Plan a deploy, given the existing objects. Raise ClusterError if it is not allowed. Pure."""
    steps = [_plan_step(manifest, before, snapshot.name) for manifest, before in zip(manifests, existing, strict=True)]
    if snapshot.workload is None:
        return DeployPlan(steps)
    diagnosis = diagnose_app(snapshot)
    if not diagnosis.has_ended and not k8s.is_deleting(snapshot.workload) and not replace:
        fix = "Give --replace to end it and start again (its run continues), or undeploy it first"
        state = f"{diagnosis.state}: {diagnosis.reason}"
        raise ClusterError(f"it is already deployed ({state})", uri=f"app {snapshot.name}", fix=fix)
    return DeployPlan(steps, [snapshot.workload], not diagnosis.has_ended)


def _plan_step(manifest: Object, before: Object | None, app: str) -> DeployStep:
    title, kind, uri = k8s.title_of(manifest), manifest["kind"], f"app {app}"
    if before is None:
        return DeployStep("create", manifest)
    is_own = k8s.label(before, k8s.APP_LABEL) == app
    if k8s.is_deleting(before) and kind == "StagedDataset" and is_own:
        return DeployStep("replace", manifest, before)
    if k8s.is_deleting(before) and kind not in k8s.WORKLOADS:
        reason = undeploy.explain_wait(kind, before, [])
        raise ClusterError(f"{title} is still being removed ({reason})", uri=uri, fix="Run it again when it is gone")
    if kind == "StagedDataset" and not is_own:
        if k8s.spec(before).get("source") != k8s.spec(manifest).get("source"):
            message = f"{title} exists with another source: {k8s.spec(before).get('source')}"
            raise ClusterError(message, uri=uri, fix="Give the data in app.yaml another name")
        return DeployStep("use", manifest, before)
    if not is_own:
        raise ClusterError(f"{title} exists and does not belong to this app", uri=uri, fix="Give the app another name")
    if kind in k8s.WORKLOADS:
        return DeployStep("replace", manifest, before)
    return DeployStep("same" if matches(before, manifest) else "change", manifest, before)


def matches(existing: Any, manifest: Any) -> bool:
    """Return whether an object has all values of a manifest; its other values were filled in by the server."""
    if isinstance(manifest, Mapping):
        has_keys = isinstance(existing, Mapping) and manifest.keys() <= existing.keys()
        return has_keys and all(matches(existing[key], value) for key, value in manifest.items())
    if isinstance(manifest, list):
        same_length = isinstance(existing, list) and len(existing) == len(manifest)
        return same_length and all(map(matches, existing, manifest))
    return bool(existing == manifest)


def rename_for_dry_run(manifest: Object) -> dict[str, Any]:
    """Return the manifest under an unused name of the same length, for the dry run of an object that still exists."""
    name = k8s.name_of(manifest)
    unused = ("x" + hashlib.sha256(name.encode()).hexdigest() * 4)[: len(name)]
    return {**manifest, "metadata": {**manifest["metadata"], "name": unused}}


def merge_manifest(before: Object, manifest: Object) -> Object:
    """Return the object with a manifest's values; what others wrote into it (finalizers, status) stays."""
    metadata = {key: value for key, value in before["metadata"].items() if key != "managedFields"}
    for part in ("labels", "annotations"):
        metadata[part] = {**(metadata.get(part) or {}), **(manifest["metadata"].get(part) or {})}
    return {**before, **manifest, "apiVersion": before["apiVersion"], "kind": before["kind"], "metadata": metadata}


# -- execution ---------------------------------------------------------------------------------------------------------


def dry_run(cluster: Cluster, deploy_plan: DeployPlan) -> None:
    """Ask the server whether it would accept each step, without changing anything."""
    for step in deploy_plan.steps:
        try:
            if step.action == "create":
                cluster.create(step.manifest, dry_run=True)
            elif step.action == "replace":
                cluster.create(rename_for_dry_run(step.manifest), dry_run=True)
            elif step.action == "change":
                _change(cluster, step, partial(merge_manifest, manifest=step.manifest), dry_run=True)
        except DryRunUnsupportedError:
            continue  # the deploy itself will show whether the cluster accepts the object
        except ForbiddenError:
            raise
        except ClusterError as error:
            message = str(error).removeprefix(f"{error.uri}: ")
            raise ClusterError(f"the cluster rejects it: {message}", uri=step.title) from None


def _change(cluster: Cluster, step: DeployStep, update: Callable[[Object], Object], *, dry_run: bool = False) -> None:
    """Replace a step's object by `update` of its current state. The status of data changes all the time, and the server
    rejects a change that is based on an older state."""
    path = path_of_object(step.manifest, cluster.namespace)
    for remaining in reversed(range(_MAX_CHANGE_ATTEMPTS)):
        try:
            cluster.request("PUT", path, update(cluster.get(path)), query=write_query(dry_run=dry_run))
            return
        except ClusterError as error:
            if not remaining or error.status != _CONFLICT:
                raise


def rollback(cluster: Cluster, steps: Sequence[DeployStep], token: str, report: Report) -> None:
    """Undo the steps of a deploy, the last first: remove or restore each object that carries its token. The objects are
    looked up in the cluster, because an interrupt may come between the server's change and its response."""
    for step in reversed(steps):
        if step.action not in ("create", "change", "replace"):
            continue
        path = path_of_object(step.manifest, cluster.namespace)
        try:
            current = cluster.find(path)
            if current is None or k8s.annotation(current, DEPLOY_ANNOTATION) != token:
                continue
            if step.action == "change":
                assert step.before is not None
                _change(cluster, step, partial(_restore, step.before))
                report(f"{step.title}: restored")
            elif cluster.delete(path):
                remains = undeploy.find_again(cluster, current) is not None
                report(f"{step.title}: {'is being removed' if remains else 'removed again'}")
        except VoxlaneError as error:
            report(f"{step.title}: could not be rolled back: {error}")


def _restore(before: Object, current: Object) -> Object:
    """Return an object as it was before, with the resource version that the server expects."""
    metadata = {**before["metadata"], "resourceVersion": current["metadata"]["resourceVersion"]}
    metadata.pop("managedFields", None)
    return {**before, "metadata": metadata}


def apply(
    cluster: Cluster,
    deploy_plan: DeployPlan,
    *,
    report: Report,
    progress: Progress,
    wait: bool,
    required_nodes: int,
    timeout_s: float | None,
) -> None:
    """Carry out a plan. With `wait`, the workload is created once `required_nodes` nodes have the data; `progress` gets
    each dataset whenever it is polled. `timeout_s` limits the wait for each dataset, and for the removal of an old one.
    If anything fails before the workload exists, everything is rolled back, except an old job that has ended."""
    token = secrets.token_hex(8)
    started_steps: list[DeployStep] = []
    *first_steps, last_step = deploy_plan.steps
    remove_old = partial(undeploy.apply, cluster, undeploy.UndeployPlan(deploy_plan.remove), report=report)
    try:
        if deploy_plan.ends_first:
            report("data is copied again, which waits for the pods that use it: the old job ends first")
            remove_old()
        for step in first_steps:
            if step.action == "replace":
                wait_until_removed(cluster, step, report, timeout_s=timeout_s)
            started_steps.append(step)
            _execute(cluster, step, token, report)
        for step in first_steps:
            if wait and step.manifest["kind"] == "StagedDataset":
                name = k8s.name_of(step.manifest)
                wait_for_data(cluster, name, progress, report, nodes=required_nodes, timeout_s=timeout_s)
        if not deploy_plan.ends_first:
            remove_old()
        started_steps.append(last_step)
        _execute(cluster, last_step, token, report)
    except BaseException:  # also on Ctrl-C: nothing incomplete stays behind
        with _defer_interrupts(report):
            rollback(cluster, started_steps, token, report)
            if deploy_plan.ends:
                _report_ended(cluster, deploy_plan.remove, token, report)
        raise


def _report_ended(cluster: Cluster, old_workloads: Sequence[Object], token: str, report: Report) -> None:
    """Report the workloads that ran before and have ended. They are looked up, as in `rollback`."""
    for workload in old_workloads:
        title = k8s.title_of(workload)
        try:
            current = cluster.find(path_of_object(workload, cluster.namespace))
        except VoxlaneError as error:
            report(f"{title}: cannot find out whether it still runs: {error}")
            continue
        if current is not None:
            is_running = k8s.uid_of(current) == k8s.uid_of(workload) and not k8s.is_deleting(current)
            if is_running or k8s.annotation(current, DEPLOY_ANNOTATION) == token:
                continue  # or the new one could not be rolled back, which was reported
        run = k8s.annotation(workload, k8s.RUN_ANNOTATION)
        restart = "`voxlane app deploy` with its app.yaml starts it again"
        report(f"{title}: the previous one has ended. {restart}" + (f", and its run {run} continues" if run else ""))


@contextlib.contextmanager
def _defer_interrupts(report: Report) -> Iterator[None]:
    """Answer the next Ctrl-C with a message and obey the one after it, so that a rollback is not left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def handle(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
        report("rolling back; interrupt once more to stop and leave the objects in the cluster")

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _execute(cluster: Cluster, step: DeployStep, token: str, report: Report) -> None:
    annotations = {**(step.manifest["metadata"].get("annotations") or {}), DEPLOY_ANNOTATION: token}
    manifest = {**step.manifest, "metadata": {**step.manifest["metadata"], "annotations": annotations}}
    if step.action in ("create", "replace"):
        cluster.create(manifest)
        report(f"{step.title}: created")
    elif step.action == "change":
        _change(cluster, step, partial(merge_manifest, manifest=manifest))
        report(f"{step.title}: changed")
    else:
        owner = k8s.label(step.before, k8s.APP_LABEL) if step.action == "use" and step.before else ""
        report(f"{step.title}: already exists" + (f" (app {owner})" if owner else ""))


def wait_until_removed(cluster: Cluster, step: DeployStep, report: Report, *, timeout_s: float | None = None) -> None:
    """Wait until an object that is being deleted is gone; report a line when the reason to wait changes."""
    started, reported, path = time.monotonic(), "", path_of_object(step.manifest, cluster.namespace)
    while (current := cluster.find(path)) is not None and k8s.is_deleting(current):
        # Until the operator has picked up the deletion, the status has an older message.
        is_picked_up = k8s.status(current).get("phase") == "Deleting"
        reason = undeploy.explain_wait(step.manifest["kind"], current if is_picked_up else {}, [])
        if reason != reported:
            reported = reason
            report(f"{step.title}: waits until the old one is gone ({reason})")
        if timeout_s is not None and time.monotonic() - started > timeout_s:
            message = f"the old one is still being removed after {k8s.format_duration(timeout_s)}: {reason}"
            fix = "Give a longer --timeout, or run it again when it is gone"
            raise ClusterError(message, uri=step.title, fix=fix)
        time.sleep(_POLL_S)


def wait_for_data(
    cluster: Cluster, name: str, progress: Progress, report: Report, *, nodes: int = 1, timeout_s: float | None = None
) -> None:
    """Wait until a StagedDataset is on enough nodes; raise ClusterError if that fails."""
    path = path_of(API_VERSION, "StagedDataset", cluster.namespace, name)
    started = last_response = time.monotonic()
    while True:
        try:
            dataset = cluster.get(path)
        except (ForbiddenError, MissingObjectError):
            raise
        except ClusterError:  # a restart of the API server must not cost hours of copying
            if time.monotonic() - last_response > _MAX_SILENCE_S:
                raise
            time.sleep(_POLL_S)
            continue
        last_response = time.monotonic()
        progress(dataset)
        if is_staged(dataset, nodes):
            ready, size = (k8s.status(dataset).get(key) for key in ("ready", "size"))
            report(f"StagedDataset {name}: on {ready or '?'} nodes, {size or 'size unknown'}")
            return
        _check_staging(dataset, time.monotonic() - started, timeout_s)
        time.sleep(_POLL_S)


def _check_staging(dataset: Object, waited_s: float, timeout_s: float | None) -> None:
    """Raise ClusterError if it is of no use to wait longer for a StagedDataset."""
    phase, uri = k8s.status(dataset).get("phase"), f"StagedDataset {k8s.name_of(dataset)}"
    message = k8s.collapse_message(k8s.status(dataset).get("message"))
    if is_current(dataset) and phase == "Failed":
        raise ClusterError(f"the data cannot be staged: {message}", uri=uri)
    no_operator = "no operator has picked this up"
    if not phase and waited_s > _OPERATOR_TIMEOUT_S:
        fix = "Check that voxlane's operator runs; `voxlane operator install` installs it"
        raise ClusterError(f"{no_operator} for {_OPERATOR_TIMEOUT_S:.0f} s", uri=uri, fix=fix)
    if timeout_s is not None and waited_s > timeout_s:
        fix = "Give a longer --timeout, or --no-wait: pods then wait for the data by themselves"
        after = f"it is not staged after {k8s.format_duration(timeout_s)}"
        raise ClusterError(f"{after}: {message or no_operator}", uri=uri, fix=fix)


def is_current(dataset: Object) -> bool:
    """Return whether the status of a StagedDataset is about its current spec."""
    observed, generation = k8s.status(dataset).get("observedGeneration"), dataset["metadata"].get("generation")
    return observed is None or generation is None or observed >= generation


def is_staged(dataset: Object, required_nodes: int) -> bool:
    """Return whether a StagedDataset is on all its nodes or, while a copy is being replaced, on `required_nodes`."""
    phase, ready = k8s.status(dataset).get("phase"), str(k8s.status(dataset).get("ready")).split("/")[0]
    has_enough = phase == "Degraded" and ready.isdigit() and int(ready) >= required_nodes
    return is_current(dataset) and (phase == "Ready" or has_enough)
