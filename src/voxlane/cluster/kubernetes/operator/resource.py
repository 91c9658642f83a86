"""Read API objects into the facts that the operator plans with. Nothing is fetched here."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Annotated, Any

import pydantic
from pydantic.alias_generators import to_camel, to_snake

from voxlane.cluster.kubernetes.credentials import Credentials
from voxlane.cluster.kubernetes.names import (
    API_VERSION,
    DATA_PATH,
    GROUP,
    claim_name,
    copy_path,
    node_folder,
    node_key,
    node_label,
)
from voxlane.errors import ConfigError
from voxlane.settings import NO_FLAG, Flag, record
from voxlane.sizes import parse_bytes, parse_duration

Object = Mapping[str, Any]
FINALIZER = f"{GROUP}/staged"
RESTAGE = f"{GROUP}/restage"
"""Annotation of a StagedDataset; the operator lists and copies the source again whenever its value changes."""
OVER_QUOTA = "Quota"
"""Reason of a copy that its namespace's quota has no room for."""
STALE = "Stale"
"""Reason of a waiting copy that holds another revision."""
DATASET_LABEL = f"{GROUP}/dataset"
"""Label of agent pods: the `node_key` of the dataset."""
ROLE_LABEL = f"{GROUP}/staging"
"""Label of agent pods: `prepare`, `copy` or `remove`."""
NODE_ANNOTATION = f"{GROUP}/node"
NODE_UID_ANNOTATION = f"{GROUP}/node-uid"
ATTEMPT_ANNOTATION = f"{GROUP}/attempt"
REVISION_ANNOTATION = f"{GROUP}/revision"


def _normalize_data_paths(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return normalized folders; raise ValueError for one that would be a whole disk, or that lies in another."""
    for path in paths:
        if not path.startswith("/") or posixpath.normpath(path) == "/" or ".." in path.split("/"):
            raise ValueError(f"{path!r} cannot hold data. Give an absolute folder of the nodes other than /")
    folders = tuple(posixpath.normpath(path) for path in paths)
    for folder in folders:
        outer = next((other for other in folders if folder.startswith(f"{other}/")), None)
        if outer is not None:
            raise ValueError(f"{folder!r} is inside {outer!r}, which has folders of its own. Give folders side by side")
    return folders


def _check_quota(value: str | None) -> str | None:
    if value is not None:
        try:
            parse_bytes(value)
        except ConfigError:
            raise ValueError(f"{value!r} is not a size. Give one such as 500Gi") from None
    return value


def _check_disk_reserve(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not re.fullmatch(r"[0-9]{1,2}%", value):
            try:
                parse_bytes(value)
            except ConfigError:
                raise ValueError(f"{value!r} is no part of a disk. Give one such as 15% or 50Gi") from None
    return values


DEFAULT_DISK_RESERVE = "15%"
"""The larger of the kubelet's own thresholds: it evicts pods at 10% of the node's disk, or 15% of that of images."""
Seconds = Annotated[float, pydantic.Field(ge=0)]
DiskReserve = Annotated[
    tuple[str, ...], pydantic.AfterValidator(_check_disk_reserve), Flag(long="--disk-reserve", metavar="SIZE")
]
DataPaths = Annotated[
    tuple[str, ...], pydantic.AfterValidator(_normalize_data_paths), Flag(long="--data-path", metavar="FOLDER")
]


@record
class InstallConfig:
    """Settings of an installed operator."""

    image: str | None = None
    """Image of the pods that copy, with voxlane[kubernetes] installed."""
    data_paths: DataPaths = (DATA_PATH,)
    """Folder on the nodes' disks for data (repeatable); the first is the default for datasets. Each namespace has its
    own folder below it."""
    quota: Annotated[str | None, pydantic.AfterValidator(_check_quota), Flag(metavar="SIZE")] = None
    """Largest size of a namespace's data on a node, below each data path, such as 500Gi (default: none)."""
    disk_reserve: DiskReserve = (DEFAULT_DISK_RESERVE,)
    """Space that staging leaves free on a node's disk, as a percentage of it or a size (repeatable: the largest
    counts). It must not be below the thresholds at which the kubelets evict pods."""
    user: Annotated[int, pydantic.Field(ge=1)] = 65532
    """User and group id of the pods that copy, which owns the data on the nodes."""


@record
class OperatorConfig(InstallConfig):
    """Settings of a running operator."""

    own_namespace: Annotated[str, NO_FLAG] = "voxlane-system"
    """Namespace of the operator, in which removers run: a namespace that is being deleted starts no pods."""
    lost_after_s: Annotated[Seconds, Flag(long="--lost-after", metavar="SECONDS")] = 300.0
    """Seconds after which a node that is not ready counts as lost."""
    settle_s: Annotated[Seconds, Flag(long="--settle", hidden=True)] = 5.0
    """Seconds to wait after a node loses its label before data is removed there, so that pods that were being scheduled
    meanwhile become visible."""
    retry_s: Annotated[Seconds, Flag(long="--retry", hidden=True)] = 10.0
    """Pause in seconds after the first failure; it doubles with each further failure, up to ten minutes."""


# -- the dataset -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Validated `spec` of a StagedDataset."""

    source: str
    replicas: int | None
    """Number of nodes; None means every node that the selector matches."""
    node_selector: Mapping[str, str]
    tolerations: tuple[Toleration, ...]
    """Taints of nodes that may hold a copy all the same."""
    capacity_bytes: int | None
    data_path: str
    """Folder on the nodes' disks that has a folder for each namespace."""
    credentials: Credentials
    timeout_s: int


@dataclass(frozen=True, kw_only=True)
class NodeCopy:
    """Entry of one node in `status.nodes`."""

    phase: str
    bytes: int = 0
    total_bytes: int = 0
    objects: int = 0
    total_objects: int = 0
    lacking_bytes: int = 0
    message: str = ""
    version: str = ""
    since: float = 0.0
    """When the copy entered its phase, in seconds since 1970."""
    revision: str = ""
    attempts: int = 0
    retry_at: float = 0.0
    """Earliest time of the next attempt, in seconds since 1970; 0 means now."""
    reason: str = ""
    """Kind of a failure. For `Removing`, the next phase; if empty, the entry is deleted. For `Waiting`, STALE means
    that the copy holds another revision, which is not touched while a pod uses it."""

    @classmethod
    def from_json(cls, entry: Object) -> NodeCopy:
        """Read an entry of `status.nodes`."""
        return cls(
            phase=entry.get("phase", "Waiting"),
            since=parse_time(entry.get("since")),
            retry_at=parse_time(entry.get("retryAt")),
            **{name: entry[key] for name, key in COPY_FIELDS.items() if key in entry},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the entry for `status.nodes`, without empty fields."""
        entry = {key: getattr(self, name) for name, key in COPY_FIELDS.items()}
        entry |= {"since": format_time(self.since), "retryAt": format_time(self.retry_at)}
        return {"phase": self.phase} | {key: value for key, value in entry.items() if value}


COPY_FIELDS = {
    item.name: to_camel(item.name) for item in fields(NodeCopy) if item.name not in ("phase", "since", "retry_at")
}
"""Names in `status.nodes` of the fields of NodeCopy that are stored as they are."""


@dataclass(frozen=True, kw_only=True)
class StagedDataset:
    """A StagedDataset of the cluster."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    finalizers: tuple[str, ...]
    spec: DatasetSpec | None
    """None if the dataset cannot be staged; `problem` then says why."""
    problem: str
    data_path: str
    """Folder on the nodes' disks: where data already is, if any; empty if the operator does not allow it."""
    is_old_layout: bool
    """Whether the data is where earlier versions stored it: in one folder for all namespaces."""
    revision: str
    """Identifies the source and the restage annotation; copies of another revision are stale."""
    keep: bool
    status: Object
    copies: Mapping[str, NodeCopy]
    last_used: float
    """When the dataset was last used, or else created, in seconds since 1970."""

    @property
    def key(self) -> str:
        """Name of the dataset in node labels and on disks."""
        return node_key(self.namespace, self.name)

    @property
    def label(self) -> str:
        """Label of the nodes that hold a complete copy."""
        return node_label(self.namespace, self.name)

    @property
    def title(self) -> str:
        """NAMESPACE/NAME, for messages."""
        return f"{self.namespace}/{self.name}"

    @property
    def root(self) -> str:
        """Folder on the nodes' disks that agents may change; empty if the operator allows none."""
        if not self.data_path or self.is_old_layout:
            return self.data_path
        return node_folder(self.data_path, self.namespace)

    @property
    def host_path(self) -> str:
        """Folder of the copy on a node's disk."""
        return f"{self.root}/{copy_path(self.namespace, self.name)}"

    def ref(self) -> dict[str, Any]:
        """Return a reference to the object for events and owned objects."""
        return {"apiVersion": API_VERSION, "kind": "StagedDataset", "name": self.name, "uid": self.uid}


def read_dataset(resource: Object, config: InstallConfig) -> StagedDataset:
    """Read a StagedDataset. An invalid spec raises no error: the dataset's `problem` describes it."""
    meta, raw, status = resource["metadata"], resource.get("spec") or {}, resource.get("status") or {}
    spec, problem, data_path, is_old_layout = None, "", "", False
    try:
        # The folder that already holds data has priority over the spec, but must be allowed too, whoever wrote it.
        if current := str(status.get("hostPath") or ""):
            data_path, is_old_layout = _find_data_path(current, meta["namespace"], meta["name"], config)
        spec = read_spec(raw, config)
        data_path = data_path or spec.data_path
        if len(meta["name"]) > 63:
            raise ConfigError("the name has more than 63 characters, too many for a label of pods", fix="Shorten it")
        if is_old_layout:
            raise ConfigError(
                f"its copies are at {current}, where an earlier version of voxlane stored them",
                fix="Delete the dataset and create it again",
            )
        if spec.data_path != data_path:
            raise ConfigError(
                f"dataPath: {spec.data_path} differs from {data_path}, where the data is staged",
                fix="Set it back, or delete the dataset and create it again",
            )
    except ConfigError as error:
        spec, problem = None, str(error)
    return StagedDataset(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        deleting="deletionTimestamp" in meta,
        finalizers=tuple(meta.get("finalizers") or ()),
        spec=spec,
        problem=problem,
        data_path=data_path,
        is_old_layout=is_old_layout,
        revision=short_hash(f"{raw.get('source')} {(meta.get('annotations') or {}).get(RESTAGE, '')}"),
        keep=bool(raw.get("keep")),
        status=status,
        copies={node: NodeCopy.from_json(entry) for node, entry in (status.get("nodes") or {}).items()},
        last_used=parse_time(status.get("lastUsed")) or parse_time(meta.get("creationTimestamp")),
    )


def read_spec(raw: Object, config: InstallConfig) -> DatasetSpec:
    """Validate what the schema of the resource cannot; the error names the field."""
    source = str(raw.get("source") or "")
    if not re.match(r"(gs|gcs|s3|s3a|az|azure|nfs)://[^/]+", source):
        raise ConfigError(
            f"source: {source!r} is not a URI that can be staged",
            fix="Write gs://BUCKET/PREFIX, s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or nfs://SERVER/PATH",
        )
    if source.startswith("nfs://") and not re.match(r"nfs://[^/]+/", source):
        raise ConfigError(f"source: {source!r} has no path on the server", fix="Write nfs://SERVER/PATH")
    selector = dict(raw.get("nodeSelector") or {})
    if not config.image:
        raise ConfigError("the operator has no image for copiers", fix="Run it with --image")
    capacity, timeout, credentials = raw.get("capacity"), raw.get("timeout"), raw.get("credentials") or {}
    if credentials.get("file") and not credentials.get("secret"):
        raise ConfigError("credentials.file needs credentials.secret", fix="Set it to the Secret that has the file")
    return DatasetSpec(
        source=source,
        replicas=raw.get("replicas") or (None if selector else 1),
        node_selector=selector,
        capacity_bytes=None if capacity is None else parse_bytes(capacity, name="capacity"),
        tolerations=tuple(read_toleration(item) for item in raw.get("tolerations") or ()),
        data_path=check_data_path(raw.get("dataPath") or config.data_paths[0], config),
        credentials=Credentials(**{to_snake(name): value for name, value in credentials.items()}),
        timeout_s=parse_duration("24h" if timeout is None else timeout, name="timeout"),
    )


def check_data_path(path: str, config: InstallConfig) -> str:
    """Return the folder without a final slash; raise ConfigError if it is none of the operator's own.

    A folder below one of these could be that of another namespace, or one that the operator itself uses.
    """
    if path.rstrip("/") in config.data_paths:
        return path.rstrip("/")
    raise ConfigError(
        f"dataPath: the operator does not allow {path}",
        fix=f"Choose from {', '.join(config.data_paths)}, or start the operator with --data-path {path}",
    )


def _find_data_path(host_path: str, namespace: str, name: str, config: InstallConfig) -> tuple[str, bool]:
    """Return the data path of a dataset's copies, and whether they are in the layout of earlier versions. Raise
    ConfigError if the operator does not allow it: people who may write a status must not choose folders of nodes."""
    copy = copy_path(namespace, name)
    for data_path in config.data_paths:
        if host_path == f"{node_folder(data_path, namespace)}/{copy}":
            return data_path, False
        if host_path == f"{data_path}/{copy}":
            return data_path, True
    data_path = host_path.removesuffix(f"/{copy}")
    return check_data_path(data_path.removesuffix(node_folder("", namespace)), config), False


@dataclass(frozen=True)
class Toleration:
    """A taint of nodes that a dataset names: any with this key or, if given, with this value and effect only."""

    key: str
    value: str | None = None
    effect: str | None = None

    def matches(self, taint: Taint) -> bool:
        """Return whether this names a taint."""
        return self.key == taint.key and self.value in (None, taint.value) and self.effect in (None, taint.effect)

    def to_json(self) -> dict[str, str]:
        """Return the toleration of a pod."""
        values = {"key": self.key, "value": self.value, "effect": self.effect}
        operator = "Exists" if self.value is None else "Equal"
        return {"operator": operator} | {name: value for name, value in values.items() if value is not None}


def read_toleration(raw: Object) -> Toleration:
    """Read a toleration of a spec."""
    if not raw.get("key"):
        raise ConfigError(
            "tolerations: each must have the key of a taint", fix="Name the taint, such as nvidia.com/gpu"
        )
    value = None if raw.get("operator", "Equal" if raw.get("value") else "Exists") == "Exists" else raw.get("value", "")
    return Toleration(raw["key"], value, raw.get("effect"))


def _is_at_or_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


# -- nodes, pods, users ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taint:
    """A taint of a node that keeps pods away."""

    key: str
    effect: str
    value: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A node of the cluster."""

    name: str
    uid: str = ""
    """Identifies the machine; a node recreated under the same name has another uid."""
    ready: bool = True
    ready_changed_at: float = 0.0
    """When `ready` last changed, in seconds since 1970."""
    schedulable: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    """Taints that keep pods away, without those that the cluster sets for the node's state."""


def read_node(resource: Object) -> ClusterNode:
    """Read a node."""
    meta, spec, status = resource["metadata"], resource.get("spec") or {}, resource.get("status") or {}
    ready: Object = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), {})
    return ClusterNode(
        name=meta["name"],
        uid=meta.get("uid", ""),
        ready=ready.get("status") == "True",
        ready_changed_at=parse_time(ready.get("lastTransitionTime")),
        schedulable=not spec.get("unschedulable"),
        labels=meta.get("labels") or {},
        taints=tuple(
            Taint(taint["key"], taint["effect"], taint.get("value", ""))
            for taint in spec.get("taints") or ()
            if taint["effect"] in ("NoSchedule", "NoExecute") and not taint["key"].startswith("node.kubernetes.io/")
        ),
    )


@dataclass(frozen=True, kw_only=True)
class AgentPod:
    """A pod of the operator that copies or removes a dataset on a node."""

    namespace: str
    name: str
    role: str
    """`prepare`, `copy` or `remove`."""
    dataset_key: str
    node: str
    node_uid: str = ""
    attempt: int = 0
    revision: str = ""
    phase: str = "Pending"
    """Pending, Running, Succeeded or Failed."""
    since: float = 0.0
    """When the pod started, or else was created, in seconds since 1970."""
    terminating: bool = False
    problem: str = ""
    """Why the pod does not run, or why it failed, as far as the pod itself or the cluster reports it."""
    reason: str = ""
    """Kind of a failure that the pod itself or the cluster reports, such as NoRoom, Timeout or OOMKilled."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """What a copier reports about its copy when it ends: values of fields of `NodeCopy`."""


def read_pod(resource: Object) -> AgentPod:
    """Read a pod that has the operator's labels."""
    meta, status = resource["metadata"], resource.get("status") or {}
    annotations = meta.get("annotations") or {}
    container: Object = next(iter(status.get("containerStatuses") or ()), {})
    state = container.get("state") or {}
    terminated = state.get("terminated") or {}
    result = parse_result(terminated.get("message") or "")
    problem = result.get("message") or " ".join(_describe_problem(status, state, bool(result)).split())
    reason = result.get("reason") or status.get("reason") or terminated.get("reason") or ""
    return AgentPod(
        namespace=meta["namespace"],
        name=meta["name"],
        role=meta["labels"].get(ROLE_LABEL, ""),
        dataset_key=meta["labels"].get(DATASET_LABEL, ""),
        node=annotations.get(NODE_ANNOTATION, ""),
        node_uid=annotations.get(NODE_UID_ANNOTATION, ""),
        attempt=int(annotations.get(ATTEMPT_ANNOTATION, 0)),
        revision=annotations.get(REVISION_ANNOTATION, ""),
        phase=status.get("phase") or "Pending",
        since=parse_time(status.get("startTime")) or parse_time(meta.get("creationTimestamp")),
        terminating="deletionTimestamp" in meta,
        problem=problem,
        reason="Timeout" if reason == "DeadlineExceeded" else reason,
        counts={name: value for name, value in result.items() if name not in ("message", "reason")},
    )


def _describe_problem(status: Object, state: Object, has_result: bool) -> str:
    """Return why a pod does not run or why it failed; empty if there is nothing to report."""
    scheduled: Object = next((c for c in status.get("conditions") or () if c["type"] == "PodScheduled"), {})
    waiting = state.get("waiting") or {}
    if scheduled.get("status") == "False":
        return f"the pod cannot be scheduled on the node: {scheduled.get('message') or scheduled.get('reason')}"
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    if status.get("phase") != "Failed":
        return ""
    if status.get("message") or has_result:
        return status.get("message") or ""
    terminated = state.get("terminated") or {}
    if terminated.get("reason") == "OOMKilled":
        return "the copier ran out of memory"
    last_line = (terminated.get("message") or "").strip().splitlines()[-1:]
    code = terminated.get("exitCode")
    return ": ".join(["the copier failed" if code is None else f"the copier exited with status {code}", *last_line])


def parse_result(text: str) -> dict[str, Any]:
    """Parse a termination message; drop unknown and malformed fields, because the image may be anything."""
    try:
        parsed = json.loads(text or "null")
    except ValueError:
        parsed = None
    values = parsed if isinstance(parsed, dict) else {}
    numbers = ("bytes", "total_bytes", "objects", "total_objects", "lacking_bytes")
    counts = {name: values.get(COPY_FIELDS[name]) for name in numbers}
    texts = {name: values.get(name) for name in ("message", "version", "reason")}
    return {name: count for name, count in counts.items() if isinstance(count, int)} | {
        name: " ".join(value.split()) for name, value in texts.items() if isinstance(value, str)
    }


@dataclass(frozen=True, kw_only=True)
class DatasetUser:
    """An unfinished pod or workload that uses a dataset."""

    title: str
    """Kind and name of the object, such as `Pod train-0`."""
    node: str = ""
    """Node of a scheduled pod."""


WORKLOADS = (
    ("batch/v1", "Job"),
    ("apps/v1", "Deployment"),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    ("ray.io/v1", "RayJob"),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
)
"""API version and kind of workloads that carry the label of the data they use."""


def read_users(resources: Sequence[Object], dataset: StagedDataset, label: str) -> list[DatasetUser]:
    """Return the unfinished pods and workloads among `resources` that use a dataset.

    They carry `label` (ignored if empty; it is meaningful only in the dataset's namespace), or mount the copy.
    """
    users = []
    for resource in resources:
        meta, kind = resource["metadata"], resource["kind"]
        labels = meta.get("labels") or {}
        if ROLE_LABEL in labels or is_finished(resource):
            continue
        pod_spec: Object = resource["spec"] if kind == "Pod" else {}
        if label in labels or _mounts_copy(pod_spec, meta["namespace"], dataset):
            users.append(DatasetUser(title=f"{kind} {meta['name']}", node=pod_spec.get("nodeName", "")))
    return users


def _mounts_copy(pod_spec: Object, namespace: str, dataset: StagedDataset) -> bool:
    """Return whether a pod mounts a dataset's copy, or a folder of it, through the claim or from the node's disk."""
    for volume in pod_spec.get("volumes") or ():
        host_path = volume.get("hostPath")
        if host_path and _is_at_or_below(posixpath.normpath(host_path.get("path") or "/"), dataset.host_path):
            return True
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if namespace == dataset.namespace and claim == claim_name(dataset.data_path):
            copy = copy_path(namespace, dataset.name)
            containers = [*(pod_spec.get("initContainers") or ()), *(pod_spec.get("containers") or ())]
            mounts = [mount for container in containers for mount in container.get("volumeMounts") or ()]
            paths = [mount.get("subPath") or "" for mount in mounts if mount["name"] == volume["name"]]
            if any(not path or _is_at_or_below(posixpath.normpath(path), copy) for path in paths):
                return True
    return False


def is_finished(resource: Object) -> bool:
    """Return whether a pod or workload no longer needs its data."""
    kind, status = resource["kind"], resource.get("status") or {}
    if kind == "Pod":
        return bool(status.get("phase") in ("Succeeded", "Failed"))
    if kind == "Deployment":
        return bool((resource.get("spec") or {}).get("replicas", 1) == 0)
    if kind == "RayJob":
        return bool(status.get("jobDeploymentStatus") in ("Complete", "Failed", "ValidationFailed"))
    final = ("Complete", "Completed", "Failed")
    return any(c["type"] in final and c["status"] == "True" for c in status.get("conditions") or ())


# -- times, names ------------------------------------------------------------------------------------------------------


def parse_time(text: str | None) -> float:
    """Return the seconds since 1970 of an RFC 3339 time; 0 if it is missing or invalid."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0


def format_time(seconds: float) -> str:
    """Return an RFC 3339 time in whole seconds; empty for 0."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if seconds else ""


def short_hash(text: str) -> str:
    """Return ten hexadecimal digits that identify a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]
