"""Put an app into a cluster, all of it or nothing.

    files and data  ->  wait for the data  ->  the old job ends  ->  what runs

Data that is to be copied anew waits for those who use it: the old job then ends before all else.

Everything is asked of the server as a dry run first. What a deploy makes or changes carries its token; when anything
fails, also Ctrl-C, before what runs exists, all of that is taken back: the new removed, the changed restored.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from voxlane.app import undeploy, why
from voxlane.app.look import at_once
from voxlane.app.objects import (
    APP,
    RUN,
    WORKLOADS,
    Object,
    Seen,
    annotation,
    deleting,
    label,
    name_of,
    span,
    spec,
    status,
)
from voxlane.errors import ClusterError, ForbiddenError, MissingObjectError, VoxlaneError
from voxlane.kube.client import FIELD_MANAGER, Cluster, path_of, path_of_object
from voxlane.kube.names import API_VERSION
from voxlane.operator.resource import RESTAGE

_POLL_S = 0.5
_SILENCE_S = 300.0
"""How long a cluster may not answer while data is waited for."""
_CHANGES = 5
"""How often a change is tried that others' changes come before."""
_OPERATOR_S = 30.0
"""Data that nobody looks at for so long has no operator."""
DEPLOY = "voxlane.dev/deploy"
"""Annotation with a random token of the deploy that made or changed an object last."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """What is done about one manifest."""

    action: str
    """create, change, replace (made anew when the old is gone), same, or use (another's, which is left as it is)."""
    manifest: Mapping[str, Any]
    before: Object | None = None

    @property
    def title(self) -> str:
        """Kind and name."""
        return f"{self.manifest['kind']} {name_of(self.manifest)}"


@dataclass(frozen=True)
class Plan:
    """Steps in order, what runs last; and what of the app is there and in the way."""

    steps: list[Step] = field(default_factory=list)
    remove: list[Object] = field(default_factory=list)
    """Workloads of an earlier deploy, which have ended or are to be replaced."""
    ends: bool = False
    """Whether what is removed has not ended yet."""

    @property
    def ends_first(self) -> bool:
        """Whether it must end before the data can be there."""
        return self.ends and any(waits_for_users(step) for step in self.steps)


def waits_for_users(step: Step) -> bool:
    """Whether data is copied anew, or still to go: the operator does neither while something uses it."""
    if step.manifest["kind"] != "StagedDataset" or step.before is None or step.action not in ("change", "replace"):
        return False
    old, new = step.before, changed(step.before, step.manifest)
    again = spec(old).get("source") != spec(new).get("source") or annotation(old, RESTAGE) != annotation(new, RESTAGE)
    return step.action == "replace" or again


def read(cluster: Cluster, manifests: Sequence[Mapping[str, Any]]) -> list[Object | None]:
    """What is in the cluster under the manifests' names."""
    found = at_once({str(i): _finder(cluster, one) for i, one in enumerate(manifests)})
    return [found[str(i)] for i in range(len(manifests))]


def _finder(cluster: Cluster, manifest: Mapping[str, Any]) -> Callable[[], Object | None]:
    return lambda: cluster.find(path_of_object(manifest, cluster.namespace))


def plan(
    manifests: Sequence[Mapping[str, Any]], there: Sequence[Object | None], seen: Seen, now: datetime, *, replace: bool
) -> Plan:
    """What to do, given what is there. Raises ClusterError where it may not be done. Pure."""
    steps, app = [], seen.name
    for manifest, before in zip(manifests, there, strict=True):
        title = f"{manifest['kind']} {name_of(manifest)}"
        if before is None:
            steps.append(Step("create", manifest))
        elif deleting(before) and manifest["kind"] == "StagedDataset" and label(before, APP) == app:
            steps.append(Step("replace", manifest, before))
        elif deleting(before) and manifest["kind"] not in WORKLOADS:
            waits = undeploy.waits_for(manifest["kind"], before, [])
            raise ClusterError(f"{title} is still being removed ({waits})", uri=f"app {app}", fix="Run it again then")
        elif manifest["kind"] == "StagedDataset" and label(before, APP) != app:
            if spec(before).get("source") != spec(manifest).get("source"):
                raise ClusterError(
                    f"{title} is there with another source: {spec(before).get('source')}",
                    uri=f"app {app}",
                    fix="Give the data in app.yaml another name",
                )
            steps.append(Step("use", manifest, before))
        elif label(before, APP) != app:
            raise ClusterError(
                f"{title} is there, and not of this app", uri=f"app {app}", fix="Give the app another name"
            )
        elif manifest["kind"] in WORKLOADS:
            steps.append(Step("replace", manifest, before))
        else:
            steps.append(Step("same" if covers(before, manifest) else "change", manifest, before))
    remove, ends = [], False
    if seen.workload is not None:
        found = why.verdict(seen, now)
        if not found.ended and not deleting(seen.workload) and not replace:
            since = f"{found.state}: {found.why}" if found.why else found.state
            raise ClusterError(
                f"it is deployed already ({since})",
                uri=f"app {app}",
                fix="Give --replace to end it and begin anew (its run goes on), or undeploy it first",
            )
        remove, ends = [seen.workload], not found.ended
    return Plan(steps, remove, ends)


def covers(there: Any, wanted: Any) -> bool:
    """Whether an object already is what a manifest says; what else it has was filled in by the server."""
    if isinstance(wanted, Mapping):
        return isinstance(there, Mapping) and all(key in there and covers(there[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(there, list) and len(there) == len(wanted) and all(map(covers, there, wanted))
    return bool(there == wanted)


def stand_in(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The same under a name of the same length that nothing has: to ask the server about what it still has."""
    made = copy.deepcopy(dict(manifest))
    name = name_of(manifest)
    made["metadata"]["name"] = ("x" + hashlib.sha256(name.encode()).hexdigest() * 4)[: len(name)]
    return made


def changed(before: Object, manifest: Mapping[str, Any]) -> Object:
    """The object with what a manifest says; what others wrote into it (finalizers, status) is kept."""
    made = copy.deepcopy(before)
    for part in ("labels", "annotations"):
        made["metadata"][part] = {**(made["metadata"].get(part) or {}), **(manifest["metadata"].get(part) or {})}
    made["metadata"].pop("managedFields", None)
    for key, value in manifest.items():
        if key not in ("apiVersion", "kind", "metadata"):
            made[key] = copy.deepcopy(value)
    return made


# -- doing -------------------------------------------------------------------------------------------------------------


def rehearse(cluster: Cluster, doing: Plan) -> None:
    """Ask the server whether it would take each step; nothing is made."""
    for step in doing.steps:
        try:
            if step.action in ("create", "replace"):
                cluster.create(stand_in(step.manifest) if step.action == "replace" else step.manifest, dry_run=True)
            elif step.action == "change":
                _change(cluster, step, partial(changed, manifest=step.manifest), dry_run=True)
        except ForbiddenError:
            raise
        except ClusterError as error:
            if "does not support dry run" in str(error):  # of a webhook that the cluster runs: the real thing will tell
                continue
            raise ClusterError(f"the cluster refuses it: {_reason(error)}", uri=step.title) from None


def _reason(error: ClusterError) -> str:
    """What the server said, without where we said it to."""
    return str(error).removeprefix(f"{error.uri}: ")


def _change(cluster: Cluster, step: Step, make: Callable[[Object], Object], *, dry_run: bool = False) -> None:
    """Replace a step's object by what `make` makes of it as it is now: the status of data moves all the time, and the
    server refuses what is made of an older one."""
    path = path_of_object(step.manifest, cluster.namespace)
    query = {"fieldManager": FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})}
    for left in reversed(range(_CHANGES)):
        try:
            cluster.request("PUT", path, make(cluster.get(path)), query=query)
            return
        except ClusterError as error:
            if not left or "object has been modified" not in str(error):
                raise


def take_back(cluster: Cluster, steps: Sequence[Step], token: str, tell: Tell) -> None:
    """Undo the steps of one deploy, the last first: what carries its token is removed or as it was before. Looked up
    in the cluster and not remembered, because an interrupt may come between the server's deed and its answer."""
    for step in reversed(steps):
        if step.action not in ("create", "change", "replace"):
            continue
        try:
            now = cluster.find(path_of_object(step.manifest, cluster.namespace))
            if now is None or annotation(now, DEPLOY) != token:
                continue
            if step.action == "change":
                assert step.before is not None
                _change(cluster, step, partial(_restored, step.before))
                tell(f"{step.title}: as it was before")
            elif undeploy.remove(cluster, now):
                left = cluster.find(path_of_object(now, cluster.namespace))
                gone = left is None or left["metadata"].get("uid") != now["metadata"].get("uid")
                tell(f"{step.title}: {'removed again' if gone else 'told to go'}")
        except VoxlaneError as error:
            tell(f"{step.title}: could not be taken back: {error}")


def _restored(before: Object, now: Object) -> Object:
    """An object as it was, for a server that has it as it is now."""
    old = copy.deepcopy(before)
    old["metadata"]["resourceVersion"] = now["metadata"]["resourceVersion"]
    old["metadata"].pop("managedFields", None)
    return old


def carry_out(
    cluster: Cluster,
    app: str,
    doing: Plan,
    *,
    tell: Tell,
    wait: bool = True,
    progress: Callable[[Object], None] = lambda _: None,
    needed: int = 1,
    timeout_s: float | None = None,
) -> None:
    """Do it. `wait`: for data, before what runs is made; `progress` gets each dataset as it is looked at, and `needed`
    nodes must have it. `timeout_s` holds for each dataset, and for one that has to go first. On any failure before
    what runs exists, everything is as it was, but for an old job that was told to end: then that is said."""
    token = secrets.token_hex(8)
    begun: list[Step] = []
    try:
        *first, last = doing.steps
        if doing.ends_first:
            tell("data is copied anew, which waits for the pods that use it: the old job ends first")
            undeploy.run(cluster, app, undeploy.Plan(doing.remove), tell=tell)
        for step in first:
            if step.action == "replace":
                await_gone(cluster, step, tell, timeout_s=timeout_s)
            begun.append(step)
            _do(cluster, step, token, tell)
        if wait:
            for step in first:
                if step.manifest["kind"] == "StagedDataset":
                    await_data(cluster, name_of(step.manifest), progress, tell, needed=needed, timeout_s=timeout_s)
        if doing.remove and not doing.ends_first:
            undeploy.run(cluster, app, undeploy.Plan(doing.remove), tell=tell)
        begun.append(last)
        _do(cluster, last, token, tell)
    except BaseException:  # also Ctrl-C: nothing half-made stays behind
        with _undisturbed(tell):
            take_back(cluster, begun, token, tell)
            if doing.ends:
                _say_ended(cluster, doing.remove, token, tell)
        raise


def _say_ended(cluster: Cluster, old: Sequence[Object], token: str, tell: Tell) -> None:
    """What ran before and does not any more. Looked up, as what is taken back is."""
    for one in old:
        title = f"{one['kind']} {name_of(one)}"
        try:
            now = cluster.find(path_of_object(one, cluster.namespace))
        except VoxlaneError as error:
            tell(f"{title}: whether it still runs is not known: {error}")
            continue
        if now is not None and now["metadata"].get("uid") == one["metadata"].get("uid") and not deleting(now):
            continue
        if now is not None and annotation(now, DEPLOY) == token:
            continue  # could not be taken back, and that is said
        run = annotation(one, RUN)
        tell(
            f"{title}: the one that ran before has ended. `voxlane app deploy` with the app.yaml that it had starts it "
            f"again" + (f", and its run {run} goes on" if run else "")
        )


@contextlib.contextmanager
def _undisturbed(tell: Tell) -> Iterator[None]:
    """Another Ctrl-C meanwhile is answered and not obeyed, a third one is: else an impatient one leaves half of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def answer(number: int, _: object) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt
        tell("takes back what was made; interrupt once more to leave it there")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, answer) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _do(cluster: Cluster, step: Step, token: str, tell: Tell) -> None:
    marked = copy.deepcopy(dict(step.manifest))
    marked["metadata"].setdefault("annotations", {})[DEPLOY] = token
    if step.action in ("create", "replace"):
        cluster.create(marked)
        tell(f"{step.title}: created")
    elif step.action == "change":
        _change(cluster, step, partial(changed, manifest=marked))
        tell(f"{step.title}: changed")
    elif step.action == "same":
        tell(f"{step.title}: is there already")
    else:
        owner = label(step.before or {"metadata": {}}, APP)
        tell(f"{step.title}: is there already" + (f", of app {owner}" if owner else ""))


def await_gone(cluster: Cluster, step: Step, tell: Tell, *, timeout_s: float | None = None) -> None:
    """Wait until an object that is being deleted is gone; a line when what it waits for changes."""
    began, said, path = time.monotonic(), "", path_of_object(step.manifest, cluster.namespace)
    while (now := cluster.find(path)) is not None and deleting(now):
        # Until the operator has looked at it, its message is of before.
        seen = status(now).get("phase") == "Deleting"
        waits = undeploy.waits_for(step.manifest["kind"], now if seen else {}, [])
        if waits != said:
            said = waits
            tell(f"{step.title}: waits until the old one is gone ({waits})")
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            raise ClusterError(
                f"the old one is still being removed after {span(timeout_s)}: {waits}",
                uri=step.title,
                fix="Give a longer --timeout, or run it again when it is gone",
            )
        time.sleep(_POLL_S)


def await_data(
    cluster: Cluster,
    name: str,
    progress: Callable[[Object], None],
    tell: Tell,
    *,
    needed: int = 1,
    timeout_s: float | None = None,
) -> None:
    """Wait until a StagedDataset is on enough nodes; ClusterError where it cannot be."""
    began, path = time.monotonic(), path_of(API_VERSION, "StagedDataset", cluster.namespace, name)
    heard = began
    while True:
        try:
            now = cluster.get(path)
        except (ForbiddenError, MissingObjectError):
            raise
        except ClusterError:  # a server that is replaced meanwhile must not cost hours of copying
            if time.monotonic() - heard > _SILENCE_S:
                raise
            time.sleep(_POLL_S)
            continue
        heard = time.monotonic()
        progress(now)
        if is_ready(now, needed):
            said = status(now)
            tell(f"StagedDataset {name}: on {said.get('ready') or '?'} nodes, {said.get('size') or 'size not known'}")
            return
        waited = time.monotonic() - began
        message = " ".join(str(status(now).get("message") or "").split()).rstrip(".")
        if current(now) and status(now).get("phase") == "Failed":
            raise ClusterError(f"the data cannot be staged: {message}", uri=f"StagedDataset {name}")
        if not status(now).get("phase") and waited > _OPERATOR_S:
            raise ClusterError(
                f"nobody has looked at it for {_OPERATOR_S:.0f} s",
                uri=f"StagedDataset {name}",
                fix="Check that voxlane's operator runs; voxlane operator install installs it",
            )
        if timeout_s is not None and waited > timeout_s:
            raise ClusterError(
                f"it is not staged after {span(timeout_s)}: {message or 'nobody has looked at it yet'}",
                uri=f"StagedDataset {name}",
                fix="Give a longer --timeout, or --no-wait: pods then wait for the data by themselves",
            )
        time.sleep(_POLL_S)


def current(data: Mapping[str, Any]) -> bool:
    """Whether the status is about the spec that is there now."""
    seen, now = status(data).get("observedGeneration"), data["metadata"].get("generation")
    return seen is None or now is None or seen >= now


def is_ready(data: Mapping[str, Any], needed: int) -> bool:
    """Whether a StagedDataset is whole on enough nodes: on all it should be, or, while one is replaced, on as many as
    the app needs."""
    said = status(data)
    if not current(data):
        return False
    if said.get("phase") == "Ready":
        return True
    have = str(said.get("ready") or "0").split("/")[0]
    return said.get("phase") == "Degraded" and have.isdigit() and int(have) >= needed
