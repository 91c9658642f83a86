"""The pods that copy datasets onto nodes' disks and remove them there, and what they may do in the cluster."""

from __future__ import annotations

from typing import Any

from voxlane.kube.names import API_VERSION, GROUP
from voxlane.operator.plan import StartCopy, StartRemoval
from voxlane.operator.resource import ATTEMPT, NODE, NODE_UID, OF, REVISION, ROLE, Dataset, Rules, short_hash

Manifest = dict[str, Any]
DISK = "/voxlane/staged"
"""Where a pod sees the node's folder."""
SOURCE = "/voxlane/source"
"""Where a copier sees what an NFS server has."""
LAST_WORDS = "/dev/termination-log"
COPIER = "voxlane-copier"
"""Service account, Role and RoleBinding of copiers, in every namespace with datasets."""
_MANAGED = {"app.kubernetes.io/managed-by": "voxlane", f"{GROUP}/part": "data"}
_ANY_TAINT = [{"operator": "Exists"}]


def copier(dataset: Dataset, start: StartCopy) -> Manifest:
    """The pod that copies onto a node. It runs beside the dataset, where the Secret is."""
    spec = dataset.spec
    assert spec is not None
    scheme = spec.source.partition("://")[0]
    parts = spec.credentials.pod_parts(_SCHEMES.get(scheme, scheme))
    volumes, mounts = [_disk(dataset), *parts["volumes"]], [_DISK_MOUNT, *parts["volumeMounts"]]
    source = spec.source
    if scheme == "nfs":
        server, _, path = source.removeprefix("nfs://").partition("/")
        source = SOURCE
        volumes.append({"name": "source", "nfs": {"server": server, "path": f"/{path}", "readOnly": True}})
        mounts.append({"name": "source", "mountPath": source, "readOnly": True})
    arguments = [f"--source={source}", f"--folder={DISK}", f"--name={dataset.key}", f"--node={start.node}"]
    if scheme == "nfs":
        arguments.append(f"--origin={spec.source}")
    arguments += [f"--dataset={dataset.title}", f"--uid={dataset.uid}", f"--last-words={LAST_WORDS}"]
    if spec.capacity_bytes is not None:
        arguments.append(f"--capacity={spec.capacity_bytes}")
    container = _container("copy", spec.image, "stage", arguments)
    container |= {"env": [{"name": "OMP_NUM_THREADS", "value": "1"}, *parts["env"]], "volumeMounts": mounts}
    if parts["envFrom"]:
        container["envFrom"] = parts["envFrom"]
    pod = _pod("copy", dataset, start, container, volumes)
    pod["metadata"]["namespace"] = dataset.namespace
    pod["metadata"]["ownerReferences"] = [{**dataset.ref(), "controller": True}]
    pod["spec"]["serviceAccountName"] = spec.credentials.service_account or COPIER
    if spec.credentials.service_account and _SCHEMES.get(scheme, scheme) == "az":
        pod["metadata"]["labels"]["azure.workload.identity/use"] = "true"  # Azure gives its identity to such pods alone
    pod["spec"]["activeDeadlineSeconds"] = spec.timeout_s
    if start.tolerate:
        pod["spec"]["tolerations"] = [
            {"key": key, "operator": "Exists", "effect": effect} for key, effect in start.tolerate
        ]
    return pod


def remover(dataset: Dataset, start: StartRemoval, rules: Rules) -> Manifest:
    """The pod that removes a node's copy. It runs beside the operator, with no rights in the cluster: the dataset's
    namespace may be on its way out."""
    arguments = [f"--folder={DISK}", f"--name={dataset.key}", f"--last-words={LAST_WORDS}"]
    container = _container("remove", rules.image or dataset.image, "remove", arguments) | {
        "volumeMounts": [_DISK_MOUNT]
    }
    pod = _pod("remove", dataset, start, container, [_disk(dataset)])
    pod["metadata"]["namespace"] = rules.namespace
    pod["spec"] |= {"automountServiceAccountToken": False, "tolerations": _ANY_TAINT, "activeDeadlineSeconds": 3600}
    return pod


def rights(dataset: Dataset) -> list[Manifest]:
    """What the copiers of a namespace need there: to say how far they are, and nothing else."""
    meta = {"namespace": dataset.namespace, "labels": dict(_MANAGED)}
    account = (dataset.spec.credentials.service_account if dataset.spec else None) or COPIER
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": COPIER, **meta},
        "rules": [{"apiGroups": [GROUP], "resources": ["stageddatasets/status"], "verbs": ["patch"]}],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": COPIER if account == COPIER else f"{COPIER}-{account}", **meta},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": COPIER},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": dataset.namespace}],
    }
    if account != COPIER:
        return [role, binding]
    own = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": COPIER, **meta}}
    return [own, role, binding]


def event(dataset: Dataset, warning: bool, reason: str, message: str, when: str, unique: str) -> Manifest:
    """An Event about a dataset; `unique` ends its name."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{dataset.name}.{unique}", "namespace": dataset.namespace},
        "involvedObject": {**dataset.ref(), "namespace": dataset.namespace},
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:1000],
        "source": {"component": "voxlane-operator"},
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }


_SCHEMES = {"gcs": "gs", "s3a": "s3", "azure": "az"}
_DISK_MOUNT = {"name": "staged", "mountPath": DISK}


def _disk(dataset: Dataset) -> Manifest:
    return {"name": "staged", "hostPath": {"path": dataset.root, "type": "DirectoryOrCreate"}}


def _container(name: str, image: str, verb: str, arguments: list[str]) -> Manifest:
    return {
        "name": name,
        "image": image,
        "command": ["voxlane", "operator", "agent", verb],
        "args": arguments,
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "terminationMessagePath": LAST_WORDS,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # Root, because the folder on the node's disk is; without root's powers over other files.
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _pod(
    role: str, dataset: Dataset, start: StartCopy | StartRemoval, container: Manifest, volumes: list[Manifest]
) -> Manifest:
    unique = short_hash(f"{role} {dataset.uid} {start.node_uid} {dataset.revision} {start.attempt}")
    short = dataset.name[:40].replace(".", "-").rstrip("-")
    here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [start.node]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}
    notes = {NODE: start.node, NODE_UID: start.node_uid, ATTEMPT: str(start.attempt), REVISION: dataset.revision}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{short}-{role}-{unique}",
            "labels": {**_MANAGED, OF: dataset.key, ROLE: role},
            "annotations": notes,
        },
        "spec": {
            "restartPolicy": "Never",
            "affinity": {"nodeAffinity": required},
            "containers": [container],
            "volumes": volumes,
            "terminationGracePeriodSeconds": 5,
        },
    }


def status_path(namespace: str, name: str) -> str:
    """Where the API server takes a dataset's status."""
    return f"/apis/{API_VERSION}/namespaces/{namespace}/stageddatasets/{name}/status"
