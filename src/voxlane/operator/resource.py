"""What the operator knows: API objects, read into the few facts that its plans are made of. Nothing is fetched here."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from voxlane.errors import ConfigError
from voxlane.kube.credentials import Credentials
from voxlane.kube.names import GROUP, node_key, node_label
from voxlane.sizes import bytes_of, seconds_of

Object = Mapping[str, Any]
FINALIZER = f"{GROUP}/staged"
RESTAGE = f"{GROUP}/restage"
"""Annotation of a StagedDataset: with every new value the source is looked at, and copied, again."""
STALE = "Stale"
"""Reason of a copy that waits: it is of another revision."""
OF = f"{GROUP}/dataset"
"""Label of the operator's pods: the dataset's `node_key`."""
ROLE = f"{GROUP}/staging"
"""Label of the operator's pods: `copy` or `remove`."""
NODE = f"{GROUP}/node"
ATTEMPT = f"{GROUP}/attempt"
NODE_UID = f"{GROUP}/node-uid"
REVISION = f"{GROUP}/revision"
_A_DAY_S = 86400


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What an operator was started with."""

    data_paths: tuple[str, ...] = ("/var/lib/voxlane",)
    """Folders on nodes' disks at or below which data may lie; the first is the default."""
    image: str | None = None
    """Image of the pods that copy and remove."""
    namespace: str = "voxlane-system"
    """The operator's own, where the pods that remove run: a namespace that is being deleted starts none."""
    lost_after_s: float = 300.0
    """A node that is not ready for longer is lost: its data is staged elsewhere."""
    settle_s: float = 5.0
    """From taking a node's label away until data is removed there: pods that were just being placed come to light."""
    retry_s: float = 10.0
    """Pause after a first failure; each further one doubles it, up to ten minutes."""


# -- the dataset -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a StagedDataset asks for, checked."""

    source: str
    replicas: int | None
    """None: every node that the selector matches."""
    node_selector: Mapping[str, str]
    capacity_bytes: int | None
    root: str
    """Folder on the nodes' disks."""
    credentials: Credentials
    timeout_s: int
    keep: bool
    image: str


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What the status says of one node."""

    phase: str
    bytes: int = 0
    total_bytes: int = 0
    objects: int = 0
    total_objects: int = 0
    lacking_bytes: int = 0
    message: str = ""
    version: str = ""
    since: float = 0.0
    """Seconds since 1970."""
    revision: str = ""
    attempts: int = 0
    retry_at: float = 0.0
    """Seconds since 1970; 0: at once."""
    reason: str = ""
    """Of a failure its kind. Of `Removing` the phase that follows; empty: the entry goes away. Of `Waiting` STALE: what
    is there is of another revision, and not touched while a pod uses it."""

    @classmethod
    def read(cls, said: Object) -> Copy:
        """From an entry of `status.nodes`."""
        return cls(
            phase=said.get("phase", "Waiting"),
            since=epoch(said.get("since")),
            retry_at=epoch(said.get("retryAt")),
            **{name: said[key] for name, key in FIELDS.items() if key in said},
        )

    def plain(self) -> dict[str, Any]:
        """As an entry of `status.nodes`; fields that say nothing are left out."""
        said = {key: getattr(self, name) for name, key in FIELDS.items()}
        said |= {"since": rfc3339(self.since), "retryAt": rfc3339(self.retry_at)}
        return {"phase": self.phase} | {key: value for key, value in said.items() if value}


FIELDS = {
    "bytes": "bytes",
    "total_bytes": "totalBytes",
    "objects": "objects",
    "total_objects": "totalObjects",
    "lacking_bytes": "lackingBytes",
    "message": "message",
    "version": "version",
    "revision": "revision",
    "attempts": "attempts",
    "reason": "reason",
}


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A StagedDataset."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    finalizers: tuple[str, ...]
    spec: Spec | None
    """None: it cannot be served, and `problem` says why."""
    problem: str
    root: str
    """Folder on nodes' disks: where data is already, that one; empty where the operator does not allow it."""
    revision: str
    """Of the source; copies of another one are stale."""
    keep: bool
    image: str
    """Of its pods; may be empty while it cannot be served."""
    status: Object
    copies: Mapping[str, Copy]
    last_used: float
    """Seconds since 1970; since when it exists, where it was never used."""

    @property
    def key(self) -> str:
        return node_key(self.namespace, self.name)

    @property
    def label(self) -> str:
        """Of nodes that hold it."""
        return node_label(self.namespace, self.name)

    @property
    def title(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def host_path(self) -> str:
        return f"{self.root}/datasets/{self.key}"

    def ref(self) -> dict[str, Any]:
        """The object, as events and owned objects name it."""
        return {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "StagedDataset",
            "name": self.name,
            "uid": self.uid,
        }


def read_dataset(said: Object, rules: Rules) -> Dataset:
    """From the API's object. A spec that cannot be served is no error here: the dataset carries the sentence."""
    meta, raw, status = said["metadata"], said.get("spec") or {}, said.get("status") or {}
    spec, problem, root = None, "", ""
    try:
        # Where data lies already goes before what the spec says now; it too must be allowed, whoever wrote it there.
        held = posixpath.dirname(posixpath.dirname(str(status.get("hostPath") or "")))
        root = data_root(held, rules) if held else ""
        spec = read_spec(raw, rules)
        root = root or spec.root
        if len(meta["name"]) > 63:
            raise ConfigError("the name has more than 63 characters, and pods name it in a label", fix="Shorten it")
        if spec.root != root:
            raise ConfigError(
                f"dataPath: {spec.root} is not where the data is staged, {root}",
                fix="Set it back, or delete the dataset and create it again",
            )
    except ConfigError as error:
        spec, problem = None, str(error)
    return Dataset(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        deleting="deletionTimestamp" in meta,
        finalizers=tuple(meta.get("finalizers") or ()),
        spec=spec,
        problem=problem,
        root=root,
        revision=short_hash(f"{raw.get('source')} {(meta.get('annotations') or {}).get(RESTAGE, '')}"),
        keep=bool(raw.get("keep")),
        image=rules.image or "",
        status=status,
        copies={node: Copy.read(copy) for node, copy in (status.get("nodes") or {}).items()},
        last_used=epoch(status.get("lastUsed")) or epoch(meta.get("creationTimestamp")),
    )


def read_spec(raw: Object, rules: Rules) -> Spec:
    """Check what the schema cannot; the error names the field."""
    source = str(raw.get("source") or "")
    if not re.match(r"(gs|gcs|s3|s3a|az|azure|nfs)://[^/]+", source):
        raise ConfigError(
            f"source: {source!r} is nothing that can be staged",
            fix="Write gs://BUCKET/PREFIX, s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or nfs://SERVER/PATH",
        )
    if source.startswith("nfs://") and not re.match(r"nfs://[^/]+/", source):
        raise ConfigError(f"source: {source!r} names no path of the server", fix="Write nfs://SERVER/PATH")
    selector = dict(raw.get("nodeSelector") or {})
    if not rules.image:
        raise ConfigError("the operator has no image for copiers", fix="Run it with --image")
    said = raw.get("credentials") or {}
    if said.get("file") and not said.get("secret"):
        raise ConfigError("credentials.file: of which Secret?", fix="Set credentials.secret too")
    return Spec(
        source=source,
        replicas=raw.get("replicas") or (None if selector else 1),
        node_selector=selector,
        capacity_bytes=bytes_of(raw["capacity"], what="capacity") if raw.get("capacity") is not None else None,
        root=data_root(raw.get("dataPath") or rules.data_paths[0], rules),
        credentials=Credentials(
            secret=said.get("secret"),
            file=said.get("file"),
            service_account=said.get("serviceAccount"),
            endpoint=said.get("endpoint"),
        ),
        timeout_s=seconds_of(raw["timeout"], what="timeout") if raw.get("timeout") is not None else _A_DAY_S,
        keep=bool(raw.get("keep")),
        image=rules.image,
    )


def data_root(path: str, rules: Rules) -> str:
    """The folder, if it is one that the operator allows."""
    clean = posixpath.normpath(path)
    if path.startswith("/") and ".." not in path.split("/"):
        for allowed in rules.data_paths:
            if clean == allowed or clean.startswith(f"{allowed.rstrip('/')}/"):
                return clean
    raise ConfigError(
        f"dataPath: the operator does not allow {path}",
        fix=f"Choose a folder at or below {', '.join(rules.data_paths)}, or start the operator with --data-path {path}",
    )


# -- nodes, pods, users ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of the cluster."""

    name: str
    uid: str = ""
    """Another one under the same name is a machine made anew."""
    ready: bool = True
    since: float = 0.0
    """When that last changed, in seconds since 1970."""
    schedulable: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[tuple[str, str], ...] = ()
    """Key and effect of those that keep pods away, without the cluster's own about its state."""


def read_node(said: Object) -> Node:
    """From the API's object."""
    spec, status = said.get("spec") or {}, said.get("status") or {}
    ready: Object = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), {})
    taints = [(t["key"], t["effect"]) for t in spec.get("taints") or () if t["effect"] in ("NoSchedule", "NoExecute")]
    return Node(
        name=said["metadata"]["name"],
        uid=said["metadata"].get("uid", ""),
        ready=ready.get("status") == "True",
        since=epoch(ready.get("lastTransitionTime")),
        schedulable=not spec.get("unschedulable"),
        labels=said["metadata"].get("labels") or {},
        taints=tuple((key, effect) for key, effect in taints if not key.startswith("node.kubernetes.io/")),
    )


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod of the operator's."""

    namespace: str
    name: str
    role: str
    """`copy` or `remove`."""
    key: str
    """The dataset's."""
    node: str
    node_uid: str = ""
    attempt: int = 0
    revision: str = ""
    phase: str = "Pending"
    """Pending, Running, Succeeded or Failed."""
    created: float = 0.0
    started: float = 0.0
    """Seconds since 1970; 0: not yet."""
    leaving: bool = False
    why: str = ""
    """Why it does not run, or why it failed, where the cluster says."""
    reason: str = ""
    """Of a failure that the cluster names: DeadlineExceeded, Evicted, OOMKilled."""
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """What it left as its last words: an entry of `status.nodes`."""


def read_pod(said: Object) -> Pod:
    """From the API's object of a pod with the operator's labels."""
    meta, status = said["metadata"], said.get("status") or {}
    notes = meta.get("annotations") or {}
    container: Object = next(iter(status.get("containerStatuses") or ()), {})
    state = container.get("state") or {}
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    scheduled: Object = next((c for c in status.get("conditions") or () if c["type"] == "PodScheduled"), {})
    outcome = read_outcome(ended.get("message") or "")
    why = ""
    if scheduled.get("status") == "False":
        why = f"the node has no place for the pod: {scheduled.get('message') or scheduled.get('reason')}"
    elif waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        why = f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    elif status.get("phase") == "Failed":
        why = status.get("message") or ("" if outcome else _ended(ended))
    return Pod(
        namespace=meta["namespace"],
        name=meta["name"],
        role=meta["labels"].get(ROLE, ""),
        key=meta["labels"].get(OF, ""),
        node=notes.get(NODE, ""),
        node_uid=notes.get(NODE_UID, ""),
        attempt=int(notes.get(ATTEMPT, 0)),
        revision=notes.get(REVISION, ""),
        phase=status.get("phase") or "Pending",
        created=epoch(meta.get("creationTimestamp")),
        started=epoch(status.get("startTime")),
        leaving="deletionTimestamp" in meta,
        why=" ".join(why.split()),
        reason=status.get("reason") or ended.get("reason") or "",
        outcome=outcome,
    )


OUTCOMES = ("bytes", "totalBytes", "objects", "totalObjects", "lackingBytes", "message", "version", "reason")
"""Fields of `status.nodes` that a pod of the operator's may leave as its last words."""


def read_outcome(words: str) -> dict[str, Any]:
    """A pod's last words, without what does not belong there: its image may be anything."""
    try:
        found = json.loads(words or "null")
    except ValueError:
        return {}
    told = found if isinstance(found, dict) else {}
    texts = ("message", "version", "reason")
    kept = {key: told[key] for key in OUTCOMES if isinstance(told.get(key), str if key in texts else int)}
    return {key: " ".join(value.split()) if key in texts else value for key, value in kept.items()}


def _ended(ended: Object) -> str:
    if ended.get("reason") == "OOMKilled":
        return "the copier had too little memory"
    said = (ended.get("message") or "").strip().splitlines()[-1:]
    status = f"the copier ended with status {ended['exitCode']}" if "exitCode" in ended else "the copier failed"
    return ": ".join([status, *said])


@dataclass(frozen=True, kw_only=True)
class User:
    """Something unfinished that uses a dataset."""

    kind: str
    name: str
    node: str = ""
    """Of a pod that has been placed."""

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name}"


WORKLOADS = (
    ("batch/v1", "Job"),
    ("apps/v1", "Deployment"),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    ("ray.io/v1", "RayJob"),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
)
"""Kinds that carry the label of data that they use."""


def read_users(found: Sequence[Object], host_path: str, labelled: str) -> list[User]:
    """Those of `found`, pods and workloads, that are unfinished and use the dataset: by the label
    `labelled` (empty: none; it means something in the dataset's namespace only), or by a volume in `host_path`."""
    users = []
    for one in found:
        meta, kind = one["metadata"], one["kind"]
        if ROLE in (meta.get("labels") or {}) or finished(one):
            continue
        if labelled in (meta.get("labels") or {}) or (kind == "Pod" and _mounts(one, host_path)):
            node = (one.get("spec") or {}).get("nodeName", "") if kind == "Pod" else ""
            users.append(User(kind=kind, name=meta["name"], node=node))
    return users


def _mounts(pod: Object, host_path: str) -> bool:
    for volume in pod["spec"].get("volumes") or ():
        path = posixpath.normpath((volume.get("hostPath") or {}).get("path") or "/")
        if path == host_path or path.startswith(f"{host_path}/"):
            return True
    return False


def finished(one: Object) -> bool:
    """Whether a pod or workload is done with its data."""
    kind, status = one["kind"], one.get("status") or {}
    if kind == "Pod":
        return bool(status.get("phase") in ("Succeeded", "Failed"))
    if kind == "Deployment":
        return bool((one.get("spec") or {}).get("replicas", 1) == 0)
    if kind == "RayJob":
        return bool(status.get("jobDeploymentStatus") in ("Complete", "Failed", "ValidationFailed"))
    ended = ("Complete", "Completed", "Failed")
    return any(c["type"] in ended and c["status"] == "True" for c in status.get("conditions") or ())


# -- times, names ------------------------------------------------------------------------------------------------------


def epoch(text: str | None) -> float:
    """Seconds since 1970 of an RFC 3339 time; 0 of none, and of what is no time."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0


def rfc3339(when: float) -> str:
    """The time in whole seconds; empty for 0."""
    return datetime.fromtimestamp(int(when), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if when else ""


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
