"""The labels of an app's objects in a cluster, a snapshot of these objects, and small readers of Kubernetes objects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from voxlane.cluster.kubernetes.names import API_VERSION, STAGED

Object = dict[str, Any]
Report = Callable[[str], None]
"""Gets a line for the user."""

APP_LABEL = "voxlane.dev/app"
PART_LABEL = "voxlane.dev/part"
BOARD = "board"
"""Part (value of PART_LABEL) of an app's TensorBoard."""
RUN_ANNOTATION = "voxlane.dev/run"
IMAGE_ANNOTATION = "voxlane.dev/image"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "voxlane"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_JOBSET_GROUP = "jobset.sigs.k8s.io"
JOBSET_LABEL = f"{_JOBSET_GROUP}/jobset-name"

WORKLOADS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "RayJob": "ray.io/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
"""apiVersion of the kinds that an app's training runs as."""
KINDS = {**WORKLOADS, "Job": "batch/v1", "Deployment": "apps/v1", "Pod": "v1", "StagedDataset": API_VERSION}
"""apiVersion of the kinds that make up an app."""


@dataclass(frozen=True)
class AppSnapshot:
    """The objects of one app, as the server returned them."""

    name: str
    namespace: str
    workload: Object | None = None
    jobs: list[Object] = field(default_factory=list)
    pods: list[Object] = field(default_factory=list)
    """Pods of the training, without those of TensorBoard."""
    boards: list[Object] = field(default_factory=list)
    """Deployments of the app's TensorBoard; at most one."""
    board_pods: list[Object] = field(default_factory=list)
    data: list[Object] = field(default_factory=list)
    """StagedDatasets that the app created or uses."""
    missing_data: list[str] = field(default_factory=list)
    """Names of StagedDatasets that the app uses and that do not exist."""
    queue: Object | None = None
    """LocalQueue that the app is in."""
    admissions: list[Object] = field(default_factory=list)
    """Kueue's Workload objects of the app, oldest first."""
    warnings: list[Object] = field(default_factory=list)
    """Events of type Warning in the namespace, oldest first."""
    nodes: list[Object] | None = None
    """Nodes of the cluster; None if they were not listed or may not be read."""
    log_tails: dict[str, list[str]] = field(default_factory=dict)
    """Last log lines of crashed pods, by pod name."""
    unreadable: list[str] = field(default_factory=list)
    """Kinds that this user may not read."""
    taken_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """When the objects were read."""

    @property
    def queue_name(self) -> str:
        """Name of the queue that the app asks for; empty if none."""
        return label(self.workload, QUEUE_LABEL) if self.workload else ""

    @property
    def run_uri(self) -> str:
        """URI of the app's run; empty if it is not deployed or has none."""
        return annotation(self.workload, RUN_ANNOTATION) if self.workload else ""

    @property
    def image(self) -> str:
        """Image of the app; empty if it is not deployed."""
        return annotation(self.workload, IMAGE_ANNOTATION) if self.workload else ""

    @property
    def alive_pods(self) -> list[Object]:
        """Pods of the training that have not ended."""
        return [pod for pod in self.pods if not has_ended(pod)]

    def is_older_than(self, text: str | None, seconds: float) -> bool:
        """Return whether a time that the server wrote was more than `seconds` ago; False if there is none."""
        moment = parse_time(text)
        return moment is not None and (self.taken_at - moment).total_seconds() > seconds

    def format_age(self, text: str | None) -> str:
        """Format how long ago a time was, such as 12m; empty if there is no time."""
        return format_age(text, self.taken_at)

    def format_ago(self, text: str) -> str:
        """Format how long ago a time was as the end of a sentence, such as ", 12m ago"; empty if there is no time."""
        return f", {self.format_age(text)} ago" if text else ""


def name_of(item: Object) -> str:
    """Return an object's name."""
    return str(item["metadata"]["name"])


def title_of(item: Object) -> str:
    """Return an object's kind and name, for messages."""
    return f"{item['kind']} {name_of(item)}"


def uid_of(item: Object) -> str:
    """Return an object's uid, which differs from that of an earlier object of the same name."""
    return str(item["metadata"].get("uid", ""))


def created_at(item: Object) -> str:
    """Return the time at which an object was created (RFC 3339); empty if unknown."""
    return str(item["metadata"].get("creationTimestamp") or "")


def label(item: Object, key: str) -> str:
    """Return a label's value; empty if it is not set."""
    return str((item["metadata"].get("labels") or {}).get(key, ""))


def annotation(item: Object, key: str) -> str:
    """Return an annotation's value; empty if it is not set."""
    return str((item["metadata"].get("annotations") or {}).get(key, ""))


def spec(item: Object) -> Object:
    """Return an object's spec; {} if it has none."""
    return item.get("spec") or {}


def status(item: Object) -> Object:
    """Return an object's status; {} if it has none."""
    return item.get("status") or {}


def condition(item: Object, kind: str) -> Object:
    """Return a condition of the status; {} if it is not set."""
    return next((entry for entry in status(item).get("conditions") or () if entry.get("type") == kind), {})


def is_true(item: Object, kind: str) -> bool:
    """Return whether a condition of the status is set and true."""
    return condition(item, kind).get("status") == "True"


def is_owned_by(item: Object, uid: str) -> bool:
    """Return whether an object belongs to the object with this uid."""
    return any(owner.get("uid") == uid for owner in item["metadata"].get("ownerReferences") or ())


def is_deleting(item: Object) -> bool:
    """Return whether an object is being deleted and still exists."""
    return bool(item["metadata"].get("deletionTimestamp"))


def has_ended(pod: Object) -> bool:
    """Return whether a pod has ended and prints no more."""
    return status(pod).get("phase") in ("Succeeded", "Failed")


def is_about(event: Object, uids: Collection[str]) -> bool:
    """Return whether an event is about an object with one of these uids."""
    return str((event.get("involvedObject") or {}).get("uid")) in uids


def list_used_datasets(item: Object) -> list[str]:
    """Return the names of the StagedDatasets that a workload or pod uses, according to its labels."""
    labels = item["metadata"].get("labels") or {}
    return sorted(key.removeprefix(f"{STAGED}/") for key in labels if key.startswith(f"{STAGED}/"))


def count_requested_pods(workload: Object) -> int:
    """Return how many pods a workload has when all of it runs; 0 if unknown."""
    if workload["kind"] == "JobSet":
        jobs = spec(workload).get("replicatedJobs") or ()
        return sum(int(job.get("replicas", 1)) * int(spec(job["template"]).get("parallelism") or 1) for job in jobs)
    if workload["kind"] == "RayJob":
        groups = (spec(workload).get("rayClusterSpec") or {}).get("workerGroupSpecs") or ()
        return 1 + sum(int(group.get("replicas", 0)) * int(group.get("numOfHosts") or 1) for group in groups)
    return int((spec(workload).get("trainer") or {}).get("numNodes") or 0)


def count_restarts(workload: Object) -> tuple[int, int, int | None]:
    """Return how often a JobSet was restarted, how many of these restarts count against its limit, and the limit.
    JobSet leaves the second number out if all restarts were preemptions."""
    current, limit = status(workload), (spec(workload).get("failurePolicy") or {}).get("maxRestarts")
    return int(current.get("restarts") or 0), int(current.get("restartsCountTowardsMax") or 0), limit


def _shorten_pod_name(pod: Object, app: str) -> str:
    """Return a pod's name without the app's name and without its random suffix: node-1 for rank 1 of a JobSet."""
    job = label(pod, f"{_JOBSET_GROUP}/replicatedjob-name")
    index = label(pod, "batch.kubernetes.io/job-completion-index")
    if job and index:
        has_replicas = label(pod, f"{_JOBSET_GROUP}/replicatedjob-replicas") not in ("", "1")
        return f"{job}-{label(pod, f'{_JOBSET_GROUP}/job-index')}-{index}" if has_replicas else f"{job}-{index}"
    name = name_of(pod)
    prefix = pod["metadata"].get("generateName", "").rstrip("-")
    if prefix and name.startswith(f"{prefix}-"):
        name = prefix
    # Of a pod whose labels are lost, as the archive of logs names it.
    return re.sub(r"^node-0-(\d+)-[a-z0-9]{5}$", r"node-\1", name.removeprefix(f"{app}-")) or name


def shorten_pod_names(pods: Iterable[Object], app: str) -> dict[str, str]:
    """Return short names by pod name; pods that would share a short name keep their random suffixes."""
    names = {name_of(pod): _shorten_pod_name(pod, app) for pod in pods}
    counts = Counter(names.values())
    return {name: short if counts[short] == 1 else name.removeprefix(f"{app}-") for name, short in names.items()}


def collapse_message(text: Any) -> str:
    """Return a message of the cluster as one line without a final full stop."""
    return " ".join(str(text or "").split()).rstrip(". ")


def count_noun(count: int, noun: str) -> str:
    """Return a count with its noun, such as 1 pod or 2 pods."""
    return f"{count} {noun}{'s' * (count != 1)}"


# -- time --------------------------------------------------------------------------------------------------------------


def parse_time(text: str | None) -> datetime | None:
    """Parse a time that the server wrote (RFC 3339)."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def format_age(text: str | None, now: datetime) -> str:
    """Format how long ago a time is, such as 12m; empty if there is no time."""
    moment = parse_time(text)
    return "" if moment is None else format_duration((now - moment).total_seconds())


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: 45s, 12m, 2h 5m, 3d 4h."""
    seconds = max(0, int(seconds))
    minutes, hours = seconds // 60, seconds // 3600
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 60:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h {minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours // 24}d {hours % 24}h" if hours % 24 else f"{hours // 24}d"


def get_event_time(event: Object) -> str:
    """Return the time at which an event last occurred (RFC 3339); empty if unknown."""
    last_observed = (event.get("series") or {}).get("lastObservedTime")
    return str(last_observed or event.get("lastTimestamp") or event.get("eventTime") or created_at(event))


# -- pods --------------------------------------------------------------------------------------------------------------


def list_container_statuses(pod: Object) -> Iterator[Object]:
    """Yield the status of every container, init containers first."""
    yield from status(pod).get("initContainerStatuses") or ()
    yield from status(pod).get("containerStatuses") or ()


def is_ready(pod: Object) -> bool:
    """Return whether a pod runs and is ready."""
    return status(pod).get("phase") == "Running" and (is_true(pod, "Ready") or not condition(pod, "Ready"))


def is_available(pod: Object) -> bool:
    """Return whether a pod is ready and stays."""
    return is_ready(pod) and not is_deleting(pod)


def count_container_restarts(pod: Object) -> int:
    """Return how often containers of a pod were restarted."""
    return sum(container.get("restartCount", 0) for container in list_container_statuses(pod))
