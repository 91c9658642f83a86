"""Build the pods that copy datasets to nodes' disks and remove them there, and the permissions of these pods."""

from __future__ import annotations

from typing import Any

from voxlane.cluster.kubernetes.names import GROUP
from voxlane.cluster.kubernetes.operator.plan import StartPod
from voxlane.cluster.kubernetes.operator.resource import (
    ATTEMPT_ANNOTATION,
    DATASET_LABEL,
    NODE_ANNOTATION,
    NODE_UID_ANNOTATION,
    REVISION_ANNOTATION,
    ROLE_LABEL,
    OperatorConfig,
    StagedDataset,
    short_hash,
)

Manifest = dict[str, Any]
DISK = "/voxlane/staged"
"""Path in a pod of the folder on the node's disk."""
SOURCE = "/voxlane/source"
"""Path in a copier of the mounted NFS source."""
TERMINATION_LOG = "/dev/termination-log"
COPIER = "voxlane-copier"
"""Name of the service account, Role and RoleBinding of copiers in every namespace with datasets."""
_MANAGED = {"app.kubernetes.io/managed-by": "voxlane", f"{GROUP}/part": "data"}
_SCHEME_ALIASES = {"gcs": "gs", "s3a": "s3", "azure": "az"}


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
    rbac = "rbac.authorization.k8s.io"
    role = {
        "apiVersion": f"{rbac}/v1",
        "kind": "Role",
        "metadata": {"name": COPIER, **meta},
        "rules": [{"apiGroups": [GROUP], "resources": ["stageddatasets/status"], "verbs": ["patch"]}],
    }
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": COPIER if account == COPIER else f"{COPIER}-{account}", **meta},
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": COPIER},
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
