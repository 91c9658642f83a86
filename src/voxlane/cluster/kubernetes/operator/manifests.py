"""Build what `voxlane operator install` applies, and what the operator creates: the pods that copy datasets to nodes'
disks and remove them there, the permissions of these pods, and events."""

from __future__ import annotations

from typing import Any

from voxlane.cluster.kubernetes.client import plural_of
from voxlane.cluster.kubernetes.names import API_VERSION, GROUP
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
from voxlane.errors import ConfigError

Manifest = dict[str, Any]
OPERATOR_NAME = "voxlane-operator"
HEALTH_PORT = 8081
_LABELS = {"app.kubernetes.io/managed-by": "voxlane", "app.kubernetes.io/name": OPERATOR_NAME}
DISK = "/voxlane/staged"
"""Path in a pod of the folder on the node's disk."""
SOURCE = "/voxlane/source"
"""Path in a copier of the mounted NFS source."""
TERMINATION_LOG = "/dev/termination-log"
COPIER = "voxlane-copier"
"""Name of the service account, Role and RoleBinding of copiers in every namespace with datasets."""
_MANAGED = {"app.kubernetes.io/managed-by": "voxlane", f"{GROUP}/part": "data"}
_SCHEME_ALIASES = {"gcs": "gs", "s3a": "s3", "azure": "az"}

_RBAC = "rbac.authorization.k8s.io"
_PERMISSIONS = [
    (API_VERSION, ("StagedDataset",), "", ("get",), ("list", "watch", "patch")),
    (API_VERSION, ("StagedDataset",), "status", (), ("patch",)),
    ("v1", ("Node",), "", ("get",), ("list", "watch", "patch")),
    ("v1", ("Pod",), "", (), ("list", "watch", "create", "delete")),
    ("v1", ("Event",), "", ("create", "list"), ()),
    ("v1", ("ServiceAccount",), "", ("create",), ("patch",)),
    (f"{_RBAC}/v1", ("Role", "RoleBinding"), "", ("create",), ("patch",)),
    *((version, (kind,), "", (), ("list",)) for version, kind in WORKLOADS),
]
"""API version, kinds and subresource, the verbs that it assumes, and those that it checks before it starts."""
CLUSTER_RULES: list[Manifest] = [
    {
        "apiGroups": [version.rpartition("/")[0]],
        "resources": [f"{plural_of(kind)}/{subresource}".rstrip("/") for kind in kinds],
        "verbs": [*assumed, *checked],
    }
    for version, kinds, subresource, assumed, checked in _PERMISSIONS
]
"""Rules of the operator's ClusterRole. It reads no Secrets, and grants only permissions that it has itself."""
REQUIRED_ACCESS = [
    (verb, version, kind, subresource)
    for version, kinds, subresource, _, checked in _PERMISSIONS
    for kind in kinds
    for verb in checked
]
"""Verb, API version, kind and subresource of the permissions that the operator checks before it starts."""


def build_manifests(config: InstallConfig, *, namespace: str) -> list[Manifest]:
    """Return the manifests in the order in which to apply them; the operator runs in `namespace` and serves all."""
    if not config.image:
        raise ConfigError(
            "the operator and its copiers need an image", fix="Give --image, with voxlane[kubernetes] installed in it"
        )
    meta: dict[str, Any] = {"name": OPERATOR_NAME, "labels": dict(_LABELS)}
    subject = {"kind": "ServiceAccount", "name": OPERATOR_NAME, "namespace": namespace}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": _LABELS}},
        CRD,
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**meta, "namespace": namespace}},
        {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": meta, "rules": CLUSTER_RULES},
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": OPERATOR_NAME},
            "subjects": [subject],
        },
        _build_deployment(config, namespace),
    ]


def _build_deployment(config: InstallConfig, namespace: str) -> Manifest:
    arguments = ["--namespace=all", f"--image={config.image}", f"--health-port={HEALTH_PORT}"]
    arguments += [f"--data-path={path}" for path in config.data_paths]
    probe = {"httpGet": {"path": "/healthz", "port": HEALTH_PORT}, "periodSeconds": 20, "failureThreshold": 3}
    container = {
        "name": "operator",
        "image": config.image,
        "command": ["voxlane", "operator", "run"],
        "args": arguments,
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "livenessProbe": {**probe, "initialDelaySeconds": 15},
        "ports": [{"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"}],
        "securityContext": {
            "runAsUser": 65534,
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod = {"serviceAccountName": OPERATOR_NAME, "containers": [container], "terminationGracePeriodSeconds": 30}
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
    """Return the pod that copies a dataset to a node, or removes the copy there, with `voxlane operator agent`."""
    container: Manifest = {
        "name": start.role,
        "image": config.image or "",
        "command": ["voxlane", "operator", "agent", "stage" if start.role == "copy" else "remove"],
        "args": [f"--folder={DISK}", f"--name={dataset.key}", f"--last-words={TERMINATION_LOG}"],
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # Root, because root owns the folder on the node's disk, but without capabilities over other files.
        "securityContext": {"runAsUser": 0, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "staged", "mountPath": DISK}],
    }
    disk = {"name": "staged", "hostPath": {"path": dataset.root, "type": "DirectoryOrCreate"}}
    unique = short_hash(f"{start.role} {dataset.uid} {start.node_uid} {dataset.revision} {start.attempt}")
    short = dataset.name[:40].replace(".", "-").rstrip("-")
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [start.node]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    pod: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            # A remover runs in the operator's namespace, because that of the dataset may be terminating.
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
            "affinity": {"nodeAffinity": required},
            "containers": [container],
            "volumes": [disk],
            "terminationGracePeriodSeconds": 5,
        },
    }
    if start.role == "copy":
        _complete_copier(pod, dataset, start)
    else:
        any_taint = [{"operator": "Exists"}]
        pod["spec"] |= {"automountServiceAccountToken": False, "tolerations": any_taint, "activeDeadlineSeconds": 3600}
    return pod


def _complete_copier(pod: Manifest, dataset: StagedDataset, start: StartPod) -> None:
    """Add the source, credentials and identity of a copier, which runs in the namespace that has the Secret."""
    spec = dataset.spec
    assert spec is not None
    scheme, _, location = spec.source.partition("://")
    provider = _SCHEME_ALIASES.get(scheme, scheme)
    is_mount = scheme == "nfs"
    container = pod["spec"]["containers"][0]
    container["args"] += [f"--source={SOURCE if is_mount else spec.source}", f"--node={start.node}"]
    container["args"] += [f"--origin={spec.source}"] if is_mount else []
    container["args"] += [f"--dataset={dataset.title}", f"--uid={dataset.uid}"]
    container["args"] += [] if spec.capacity_bytes is None else [f"--capacity={spec.capacity_bytes}"]
    parts = spec.credentials.pod_parts(provider)
    pod["spec"]["volumes"] += parts["volumes"]
    container["volumeMounts"] += parts["volumeMounts"]
    container["env"] = [{"name": "OMP_NUM_THREADS", "value": "1"}, *parts["env"]]
    if parts["envFrom"]:
        container["envFrom"] = parts["envFrom"]
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
    if start.tolerate:
        pod["spec"]["tolerations"] = [
            {"key": key, "operator": "Exists", "effect": effect} for key, effect in start.tolerate
        ]


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
