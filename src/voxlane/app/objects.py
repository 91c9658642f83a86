"""What a cluster holds of an app: the labels it is found by, and small readers of Kubernetes objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from voxlane.kube.names import STAGED

Object = dict[str, Any]

APP = "voxlane.dev/app"
PART = "voxlane.dev/part"
RUN = "voxlane.dev/run"
IMAGE = "voxlane.dev/image"
MANAGED = "app.kubernetes.io/managed-by"
OURS = "voxlane"
QUEUE = "kueue.x-k8s.io/queue-name"
_JOBSETS = "jobset.sigs.k8s.io"
JOBSET = f"{_JOBSETS}/jobset-name"

WORKLOADS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "RayJob": "ray.io/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
"""Kinds that an app's training runs as."""


@dataclass(frozen=True)
class Seen:
    """One app's objects, as the server gave them. `nodes` is None where they were not asked for or may not be read."""

    name: str
    namespace: str
    workload: Object | None = None
    jobs: list[Object] = field(default_factory=list)
    pods: list[Object] = field(default_factory=list)
    """Of the training, not of the board."""
    boards: list[Object] = field(default_factory=list)
    board_pods: list[Object] = field(default_factory=list)
    data: list[Object] = field(default_factory=list)
    """StagedDatasets that the app made or uses."""
    lacking_data: list[str] = field(default_factory=list)
    """Names of those that it uses and that are not there."""
    queue: Object | None = None
    """The LocalQueue it is in."""
    admissions: list[Object] = field(default_factory=list)
    """Kueue's Workloads of it."""
    warnings: list[Object] = field(default_factory=list)
    """Events of type Warning in the namespace, oldest first."""
    nodes: list[Object] | None = None
    tails: dict[str, list[str]] = field(default_factory=dict)
    """Last lines of pods that crashed, by pod name."""
    unread: list[str] = field(default_factory=list)
    """Kinds that this user may not read."""

    @property
    def queue_name(self) -> str:
        """The queue it asks for; empty: none."""
        return label(self.workload, QUEUE) if self.workload else ""


def name_of(thing: Mapping[str, Any]) -> str:
    """An object's name."""
    return str(thing["metadata"]["name"])


def uid_of(thing: Mapping[str, Any]) -> str:
    """An object's identity: a new one has another, also under the same name."""
    return str(thing["metadata"].get("uid", ""))


def label(thing: Mapping[str, Any], key: str) -> str:
    """A label; empty: none."""
    return str((thing["metadata"].get("labels") or {}).get(key, ""))


def annotation(thing: Mapping[str, Any], key: str) -> str:
    """An annotation; empty: none."""
    return str((thing["metadata"].get("annotations") or {}).get(key, ""))


def spec(thing: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is asked."""
    return thing.get("spec") or {}


def status(thing: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is."""
    return thing.get("status") or {}


def condition(thing: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of the status; {} where it is not there."""
    found = (one for one in status(thing).get("conditions") or () if one.get("type") == kind)
    return next(found, {})


def holds(thing: Mapping[str, Any], kind: str) -> bool:
    """Whether a condition is there and true."""
    return condition(thing, kind).get("status") == "True"


def owned_by(thing: Mapping[str, Any], uid: str) -> bool:
    """Whether an object belongs to the one with this uid."""
    return any(one.get("uid") == uid for one in thing["metadata"].get("ownerReferences") or ())


def deleting(thing: Mapping[str, Any]) -> bool:
    """Whether it was told to go and is still there."""
    return bool(thing["metadata"].get("deletionTimestamp"))


def used_data(thing: Mapping[str, Any]) -> list[str]:
    """Names of the StagedDatasets that a workload or pod says it uses."""
    labels = thing["metadata"].get("labels") or {}
    return sorted(key.removeprefix(f"{STAGED}/") for key in labels if key.startswith(f"{STAGED}/"))


def asked_pods(workload: Mapping[str, Any]) -> int:
    """How many pods a workload is made of when all of it runs; 0: not known."""
    asked = spec(workload)
    if workload["kind"] == "JobSet":
        return sum(
            int(one.get("replicas", 1)) * int(one.get("template", {}).get("spec", {}).get("parallelism") or 1)
            for one in asked.get("replicatedJobs") or ()
        )
    if workload["kind"] == "RayJob":
        groups = (asked.get("rayClusterSpec") or {}).get("workerGroupSpecs") or ()
        return 1 + sum(int(one.get("replicas", 0)) * int(one.get("numOfHosts") or 1) for one in groups)
    return int((asked.get("trainer") or {}).get("numNodes") or 0)


def restarts_of(workload: Mapping[str, Any]) -> tuple[int, int]:
    """How often a JobSet was started again, and how often of that counts against its limit. Where none does, because
    all were preemptions, JobSet leaves that number out."""
    said = status(workload)
    return int(said.get("restarts") or 0), int(said.get("restartsCountTowardsMax") or 0)


def short(pod: Mapping[str, Any], app: str) -> str:
    """A pod's name without the app's and without its random end: node-1 of a JobSet, where 1 is the node's rank."""
    job, index = label(pod, f"{_JOBSETS}/replicatedjob-name"), label(pod, "batch.kubernetes.io/job-completion-index")
    if job and index:
        several = label(pod, f"{_JOBSETS}/replicatedjob-replicas") not in ("", "1")
        return f"{job}-{label(pod, f'{_JOBSETS}/job-index')}-{index}" if several else f"{job}-{index}"
    name = name_of(pod)
    made = pod["metadata"].get("generateName", "").rstrip("-")
    if made and name.startswith(f"{made}-"):
        name = made
    return name.removeprefix(f"{app}-") or name


def shorts(pods: Iterable[Mapping[str, Any]], app: str) -> dict[str, str]:
    """Short names by pod name; two pods that would share one keep their whole names' ends."""
    pods = list(pods)
    made = {name_of(pod): short(pod, app) for pod in pods}
    counts: dict[str, int] = {}
    for one in made.values():
        counts[one] = counts.get(one, 0) + 1
    return {name: one if counts[one] == 1 else name.removeprefix(f"{app}-") for name, one in made.items()}


# -- time --------------------------------------------------------------------------------------------------------------


def when(text: str | None) -> datetime | None:
    """A time that the server wrote (RFC 3339)."""
    if not text:
        return None
    try:
        made = datetime.fromisoformat(text)
    except ValueError:
        return None
    return made if made.tzinfo else made.replace(tzinfo=UTC)


def since(text: str | None, now: datetime) -> str:
    """How long ago a time is, such as 12m; empty where there is none."""
    then = when(text)
    return "" if then is None else span((now - then).total_seconds())


def span(seconds: float) -> str:
    """A duration in its two largest units: 45s, 12m, 2h 5m, 3d 4h."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes}m"
    hours = minutes // 60
    if hours < 48:
        return f"{hours}h {minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours // 24}d {hours % 24}h" if hours % 24 else f"{hours // 24}d"


def event_time(event: Mapping[str, Any]) -> str:
    """When an event was last seen."""
    series = event.get("series") or {}
    found = (
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
    )
    return str(found or "")


# -- pods --------------------------------------------------------------------------------------------------------------


def pod_specs(manifest: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(how many, pod spec) of every kind of pod that a workload makes. A TrainJob's are its patches, because the rest
    is in its runtime."""
    asked, kind = spec(manifest), manifest["kind"]
    if kind == "JobSet":
        for one in asked.get("replicatedJobs") or ():
            job = one["template"]["spec"]
            yield one.get("replicas", 1) * (job.get("parallelism") or 1), job["template"]["spec"]
    elif kind == "RayJob":
        cluster = asked.get("rayClusterSpec") or {}
        if "headGroupSpec" in cluster:
            yield 1, cluster["headGroupSpec"]["template"]["spec"]
        for group in cluster.get("workerGroupSpecs") or ():
            yield group.get("replicas", 1), group["template"]["spec"]
        if "submitterPodTemplate" in asked:
            yield 1, asked["submitterPodTemplate"]["spec"]
    elif kind == "TrainJob":
        count = int((asked.get("trainer") or {}).get("numNodes") or 1)
        for patch in asked.get("runtimePatches") or ():
            template = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
            for one in (template.get("spec") or {}).get("replicatedJobs") or ():
                job = (one.get("template") or {}).get("spec") or {}
                yield count, (job.get("template") or {}).get("spec") or {}
    elif kind in ("Deployment", "Job"):
        yield asked.get("replicas", asked.get("parallelism", 1)), asked["template"]["spec"]
