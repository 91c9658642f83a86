"""Build what `voxlane operator install` applies, and what the operator creates: the pods that copy datasets to nodes'
disks and remove them there, the permissions of these pods, and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from voxlane.cluster.kubernetes.client import plural_of
from voxlane.cluster.kubernetes.names import API_VERSION, GROUP, claim_name
from voxlane.cluster.kubernetes.operator.crd import CRD
from voxlane.cluster.kubernetes.operator.plan import StartPod
from voxlane.cluster.kubernetes.operator.resource import (
    ATTEMPT_ANNOTATION,
    DATASET_LABEL,
    NODE_ANNOTATION,
    NODE_UID_ANNOTATION,
    REVISION_ANNOTATION,
    ROLE_LABEL,
    WORKLOADS,
    InstallConfig,
    OperatorConfig,
    StagedDataset,
    short_hash,
)
from voxlane.cluster.kubernetes.pod_security import CONTAINER_SECURITY, ENFORCE_LABEL, SECCOMP, build_pod_security
from voxlane.errors import ConfigError
from voxlane.sizes import parse_bytes

Manifest = dict[str, Any]
OPERATOR_NAME = "voxlane-operator"
HEALTH_PORT = 8081
_LABELS = {"app.kubernetes.io/managed-by": "voxlane", "app.kubernetes.io/name": OPERATOR_NAME}
DISK = "/voxlane/staged"
"""Path in a pod of the folder on the node's disk."""
TEMPORARY = "/voxlane/tmp"
"""Path in a pod of a small writable folder; the rest of its file system is read-only."""
SOURCE = "/voxlane/source"
"""Path in a copier of the mounted NFS source."""
TERMINATION_LOG = "/dev/termination-log"
COPIER = "voxlane-copier"
"""Name of the service account, Role and RoleBinding of copiers in every namespace with datasets."""
NAMESPACE_LABEL = f"{GROUP}/namespace"
"""Label of a volume of the operator: the namespace whose data it has."""
VOLUME_SIZE = "1Gi"
"""Nominal size of a volume. It limits nothing: the folder may use as much of the disk as the quota allows."""
_MANAGED = {"app.kubernetes.io/managed-by": "voxlane", f"{GROUP}/part": "data"}
_PYTHON = ("python3", "-I", "-m", "voxlane")
"""Isolated: no variable, and no file of the working folder, adds modules to those of the image."""
_AGENT_COMMANDS = {"prepare": "prepare", "copy": "stage", "remove": "remove"}
_SCHEME_ALIASES = {"gcs": "gs", "s3a": "s3", "azure": "az"}

_RBAC = "rbac.authorization.k8s.io"
Permission = tuple[str, tuple[str, ...], str, tuple[str, ...], tuple[str, ...]]
_CLUSTER_PERMISSIONS: list[Permission] = [
    # Also if it serves one namespace: a namespace that is being deleted loses its RoleBindings first, and would wait
    # forever for an operator that may not finish the removal of its datasets.
    (API_VERSION, ("StagedDataset",), "", ("get",), ("list", "watch", "patch")),
    (API_VERSION, ("StagedDataset",), "status", (), ("patch",)),
    ("v1", ("Pod",), "", (), ("list", "watch")),
    *((version, (kind,), "", (), ("list",)) for version, kind in WORKLOADS),
    ("v1", ("Node",), "", ("get",), ("list", "watch", "patch")),
    ("v1", ("PersistentVolume",), "", ("get",), ("list", "create", "patch", "delete")),
]
_NAMESPACE_PERMISSIONS: list[Permission] = [
    ("v1", ("Pod",), "", (), ("create", "delete")),
    ("v1", ("Event",), "", ("create", "list"), ()),
    ("v1", ("ServiceAccount",), "", ("create",), ("patch",)),
    ("v1", ("PersistentVolumeClaim",), "", ("get", "create"), ("patch", "delete")),
    (f"{_RBAC}/v1", ("Role", "RoleBinding"), "", ("create",), ("patch",)),
]
"""API version, kinds and subresource, the verbs that the operator assumes, and those that it checks before it starts;
for the whole cluster, and for the namespaces that it serves."""


def _build_rules(permissions: list[Permission]) -> list[Manifest]:
    return [
        {
            "apiGroups": [version.rpartition("/")[0]],
            "resources": [f"{plural_of(kind)}/{subresource}".rstrip("/") for kind in kinds],
            "verbs": [*assumed, *checked],
        }
        for version, kinds, subresource, assumed, checked in permissions
    ]


CLUSTER_RULES = _build_rules(_CLUSTER_PERMISSIONS)
NAMESPACE_RULES = _build_rules(_NAMESPACE_PERMISSIONS)
"""Rules of the operator's roles. It reads no Secrets, and grants only permissions that it has itself."""
REQUIRED_ACCESS = [
    (verb, version, kind, subresource)
    for version, kinds, subresource, _, checked in (*_CLUSTER_PERMISSIONS, *_NAMESPACE_PERMISSIONS)
    for kind in kinds
    for verb in checked
]
"""Verb, API version, kind and subresource of the permissions that the operator checks before it starts."""


def cluster_name(namespace: str) -> str:
    """Return the name of the ClusterRole and ClusterRoleBinding of the operator in a namespace. Operators that are
    installed side by side share only the definition of StagedDataset."""
    return f"{OPERATOR_NAME}-{namespace}"


def build_manifests(config: InstallConfig, *, namespace: str, serve: str | None = None) -> list[Manifest]:
    """Return the manifests in the order in which to apply them. The operator runs in `namespace` and serves the
    namespace `serve`; None means all."""
    if not config.image:
        raise ConfigError(
            "the operator and its copiers need an image", fix="Give --image, with voxlane[kubernetes] installed in it"
        )
    meta: dict[str, Any] = {"name": OPERATOR_NAME, "namespace": namespace, "labels": dict(_LABELS)}
    # Its pods that make folders on the nodes' disks run as root, which only this level admits.
    labels = {**_LABELS, ENFORCE_LABEL: "privileged"}
    # Removers run in the operator's own namespace.
    scopes = [None] if serve is None else sorted({serve, namespace})
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}},
        CRD,
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        *_build_role(cluster_name(namespace), CLUSTER_RULES, namespace, [None]),
        *_build_role(f"{cluster_name(namespace)}-namespaced", NAMESPACE_RULES, namespace, scopes),
        _build_deployment(config, namespace, serve),
    ]


def _build_role(name: str, rules: list[Manifest], namespace: str, scopes: Sequence[str | None]) -> list[Manifest]:
    """Return a ClusterRole and what binds it to the operator in these namespaces; None means the whole cluster."""
    meta = {"name": name, "labels": dict(_LABELS)}
    binding = {
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": OPERATOR_NAME, "namespace": namespace}],
    }
    manifests: list[Manifest] = [{"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": meta, "rules": rules}]
    for scope in scopes:
        kind, metadata = "ClusterRoleBinding", meta
        if scope is not None:
            kind, metadata = "RoleBinding", {**meta, "namespace": scope}
        manifests.append({"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": metadata, **binding})
    return manifests


def _build_deployment(config: InstallConfig, namespace: str, serve: str | None) -> Manifest:
    arguments = [f"--namespace={serve or 'all'}", f"--image={config.image}", f"--health-port={HEALTH_PORT}"]
    arguments += [f"--data-path={path}" for path in config.data_paths]
    arguments += [f"--disk-reserve={size}" for size in config.disk_reserve]
    arguments += [f"--quota={config.quota}"] if config.quota else []
    arguments += [f"--user={config.user}"]
    probe = {"httpGet": {"path": "/healthz", "port": HEALTH_PORT}, "periodSeconds": 20, "failureThreshold": 3}
    container = {
        "name": "operator",
        "image": config.image,
        "command": [*_PYTHON, "operator", "run"],
        "args": arguments,
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "livenessProbe": {**probe, "initialDelaySeconds": 15},
        "ports": [{"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"}],
        "securityContext": dict(CONTAINER_SECURITY),
    }
    pod = {
        "serviceAccountName": OPERATOR_NAME,
        "securityContext": build_pod_security(config.user),
        "containers": [container],
        "terminationGracePeriodSeconds": 30,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": OPERATOR_NAME, "namespace": namespace, "labels": dict(_LABELS)},
        "spec": {
            "replicas": 1,
            # Never two operators at once; a gap does no harm, because each starts from the current state.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {"app.kubernetes.io/name": OPERATOR_NAME}},
            "template": {"metadata": {"labels": dict(_LABELS)}, "spec": pod},
        },
    }


# -- objects that the operator creates ---------------------------------------------------------------------------------


def build_pod(dataset: StagedDataset, start: StartPod, config: OperatorConfig) -> Manifest:
    """Return the pod that makes the folder for a copy on a node, copies a dataset there, or removes the copy, with
    `voxlane operator agent`.

    A copier runs in the namespace of its dataset, which has the Secret, and reaches nothing of the node but the folder
    of that namespace. The others run in the namespace of the operator, because that of the dataset may be terminating
    and need not admit root or hostPath volumes.
    """
    unique = short_hash(f"{start.role} {dataset.uid} {start.node_uid} {dataset.revision} {start.attempt}")
    short = dataset.name[:40].replace(".", "-").rstrip("-")
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [start.node]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    container: Manifest = {
        "name": start.role,
        "image": config.image or "",
        "command": [*_PYTHON, "operator", "agent", _AGENT_COMMANDS[start.role]],
        "args": [f"--folder={DISK}", f"--last-words={TERMINATION_LOG}"],
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {**CONTAINER_SECURITY, "readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "staged", "mountPath": DISK},
            {"name": "temporary", "mountPath": TEMPORARY},
        ],
        "env": [{"name": name, "value": TEMPORARY} for name in ("HOME", "TMPDIR")],
    }
    pod: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": dataset.namespace if start.role == "copy" else config.own_namespace,
            "name": f"{short}-{start.role}-{unique}",
            "labels": {**_MANAGED, DATASET_LABEL: dataset.key, ROLE_LABEL: start.role},
            "annotations": {
                NODE_ANNOTATION: start.node,
                NODE_UID_ANNOTATION: start.node_uid,
                ATTEMPT_ANNOTATION: str(start.attempt),
                REVISION_ANNOTATION: dataset.revision,
            },
        },
        "spec": {
            "restartPolicy": "Never",
            "enableServiceLinks": False,
            "affinity": {"nodeAffinity": required},
            "securityContext": build_pod_security(config.user),
            "containers": [container],
            "volumes": [{"name": "temporary", "emptyDir": {"sizeLimit": "64Mi"}}],
            "terminationGracePeriodSeconds": 5,
        },
    }
    if start.role == "copy":
        _complete_copier(pod, dataset, config)
    else:
        _complete_own_pod(pod, dataset, start, config)
    return pod


def _complete_own_pod(pod: Manifest, dataset: StagedDataset, start: StartPod, config: OperatorConfig) -> None:
    """Add the folder of the node's disk that a pod of the operator's namespace changes."""
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    path = dataset.root
    if start.role == "prepare":
        path = dataset.data_path
        container["args"] += [f"--namespace={dataset.namespace}", f"--user={config.user}"]
        # Only root may give the folder to the copiers' user.
        container["securityContext"] |= {"capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}}
        spec["tolerations"] = _list_tolerations(dataset)
    else:
        container["args"] += [f"--name={dataset.key}"]
        spec["tolerations"] = [{"operator": "Exists"}]  # the node may have been tainted since it was copied to
    if start.role == "prepare" or dataset.is_old_layout:
        spec["securityContext"] = {"runAsUser": 0, "runAsGroup": 0, "seccompProfile": dict(SECCOMP)}
    spec["volumes"].append({"name": "staged", "hostPath": {"path": path, "type": "DirectoryOrCreate"}})
    deadline_s = dataset.spec.timeout_s if start.role == "prepare" and dataset.spec else 3600
    spec |= {"automountServiceAccountToken": False, "activeDeadlineSeconds": deadline_s}


def _list_tolerations(dataset: StagedDataset) -> list[dict[str, str]]:
    return [toleration.to_json() for toleration in dataset.spec.tolerations] if dataset.spec else []


def _complete_copier(pod: Manifest, dataset: StagedDataset, config: OperatorConfig) -> None:
    """Add the source, credentials and identity of a copier, which runs in the namespace that has the Secret."""
    spec = dataset.spec
    assert spec is not None
    scheme, _, location = spec.source.partition("://")
    provider = _SCHEME_ALIASES.get(scheme, scheme)
    is_mount = scheme == "nfs"
    container, node = pod["spec"]["containers"][0], pod["metadata"]["annotations"][NODE_ANNOTATION]
    container["args"] += [f"--name={dataset.key}", f"--source={SOURCE if is_mount else spec.source}", f"--node={node}"]
    container["args"] += [f"--origin={spec.source}"] if is_mount else []
    container["args"] += [f"--dataset={dataset.title}", f"--uid={dataset.uid}"]
    container["args"] += [] if spec.capacity_bytes is None else [f"--capacity={spec.capacity_bytes}"]
    container["args"] += [f"--disk-reserve={size}" for size in config.disk_reserve]
    container["args"] += [f"--quota={parse_bytes(config.quota)}"] if config.quota else []
    # Not all variables of the Secret, which belongs to a tenant: PYTHONPATH or LD_PRELOAD would run code.
    parts = spec.credentials.allowed_pod_parts(provider)
    claim = {"claimName": claim_name(dataset.data_path)}
    pod["spec"]["volumes"] += [{"name": "staged", "persistentVolumeClaim": claim}, *parts["volumes"]]
    container["volumeMounts"] += parts["volumeMounts"]
    container["env"] += [{"name": "OMP_NUM_THREADS", "value": "1"}, *parts["env"]]
    if is_mount:
        server, _, path = location.partition("/")
        share = {"server": server, "path": f"/{path}", "readOnly": True}
        pod["spec"]["volumes"].append({"name": "source", "nfs": share})
        container["volumeMounts"].append({"name": "source", "mountPath": SOURCE, "readOnly": True})
    pod["metadata"]["ownerReferences"] = [{**dataset.ref(), "controller": True}]
    pod["spec"]["serviceAccountName"] = spec.credentials.service_account or COPIER
    if spec.credentials.service_account and provider == "az":
        pod["metadata"]["labels"]["azure.workload.identity/use"] = "true"  # required for a cloud identity on Azure
    pod["spec"]["activeDeadlineSeconds"] = spec.timeout_s
    if spec.tolerations:
        pod["spec"]["tolerations"] = _list_tolerations(dataset)


def build_volume(dataset: StagedDataset) -> list[Manifest]:
    """Return the volume of a namespace's folder on the nodes, and the claim through which pods there mount it.

    A pod that mounts it needs no hostPath volume, which would reach any folder of the node. The volume is reserved for
    this claim, and only administrators and the operator can create volumes.
    """
    claim, namespace = claim_name(dataset.data_path), dataset.namespace
    labels = {**_MANAGED, NAMESPACE_LABEL: namespace}
    modes = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeMode": "Filesystem"}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name(dataset), "labels": labels},
        "spec": {
            **modes,
            "capacity": {"storage": VOLUME_SIZE},
            # Of the type Directory: on a node whose disk was replaced, a pod waits instead of reading an empty folder.
            "hostPath": {"path": dataset.root, "type": "Directory"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": claim},
        },
    }
    requests = {"resources": {"requests": {"storage": VOLUME_SIZE}}, "volumeName": volume_name(dataset)}
    metadata = {"name": claim, "namespace": namespace, "labels": labels}
    return [
        volume,
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": {**modes, **requests}},
    ]


def volume_name(dataset: StagedDataset) -> str:
    """Return the name of the volume of a namespace's folder."""
    return f"{claim_name(dataset.data_path)}.{dataset.namespace}"


def build_copier_permissions(dataset: StagedDataset) -> list[Manifest]:
    """Return what allows the copiers of a namespace to report their progress, and nothing else."""
    meta = {"namespace": dataset.namespace, "labels": dict(_MANAGED)}
    account = (dataset.spec.credentials.service_account if dataset.spec else None) or COPIER
    role = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": {"name": COPIER, **meta},
        "rules": [{"apiGroups": [GROUP], "resources": ["stageddatasets/status"], "verbs": ["patch"]}],
    }
    binding = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": COPIER if account == COPIER else f"{COPIER}-{account}", **meta},
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": COPIER},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": dataset.namespace}],
    }
    if account != COPIER:
        return [role, binding]
    own = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": COPIER, **meta}}
    return [own, role, binding]


def build_event(dataset: StagedDataset, warning: bool, reason: str, message: str, time: str, suffix: str) -> Manifest:
    """Return an Event about a dataset; its name ends in `suffix`."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{dataset.name}.{suffix}", "namespace": dataset.namespace},
        "involvedObject": {**dataset.ref(), "namespace": dataset.namespace},
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:1000],
        "source": {"component": "voxlane-operator"},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
