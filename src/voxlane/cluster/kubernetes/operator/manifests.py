"""Build what `voxlane operator install` applies: the custom resource definition, the operator and its permissions."""

from __future__ import annotations

from typing import Any

from voxlane.cluster.kubernetes.client import plural_of
from voxlane.cluster.kubernetes.names import API_VERSION
from voxlane.cluster.kubernetes.operator.crd import CRD
from voxlane.cluster.kubernetes.operator.resource import WORKLOADS, InstallConfig
from voxlane.errors import ConfigError

Manifest = dict[str, Any]
OPERATOR_NAME = "voxlane-operator"
HEALTH_PORT = 8081
_LABELS = {"app.kubernetes.io/managed-by": "voxlane", "app.kubernetes.io/name": OPERATOR_NAME}

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
