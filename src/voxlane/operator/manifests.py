"""What `voxlane operator install` applies: the resource's definition, and the operator with the rights it needs."""

from __future__ import annotations

from typing import Any

from voxlane.errors import ConfigError
from voxlane.kube.names import GROUP
from voxlane.operator.crd import CRD
from voxlane.operator.resource import WORKLOADS, Rules

Manifest = dict[str, Any]
NAME = "voxlane-operator"
HEALTH_PORT = 8081
_LABELS = {"app.kubernetes.io/managed-by": "voxlane", "app.kubernetes.io/name": NAME}

RIGHTS: list[dict[str, Any]] = [
    {"apiGroups": [GROUP], "resources": ["stageddatasets"], "verbs": ["get", "list", "watch", "patch"]},
    {"apiGroups": [GROUP], "resources": ["stageddatasets/status"], "verbs": ["patch"]},
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "create", "delete"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "list"]},
    {"apiGroups": [""], "resources": ["serviceaccounts"], "verbs": ["create", "patch"]},
    {
        "apiGroups": ["rbac.authorization.k8s.io"],
        "resources": ["roles", "rolebindings"],
        "verbs": ["create", "patch"],
    },
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["list"]},
    {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["list"]},
    {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["list"]},
    {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["list"]},
    {"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs"], "verbs": ["list"]},
]
"""No Secret is ever read; roles are made only with what the operator itself may do."""

NEEDED = [
    ("list", f"{GROUP}/v1alpha1", "StagedDataset", ""),
    ("watch", f"{GROUP}/v1alpha1", "StagedDataset", ""),
    ("patch", f"{GROUP}/v1alpha1", "StagedDataset", ""),
    ("patch", f"{GROUP}/v1alpha1", "StagedDataset", "status"),
    ("list", "v1", "Node", ""),
    ("watch", "v1", "Node", ""),
    ("patch", "v1", "Node", ""),
    ("list", "v1", "Pod", ""),
    ("watch", "v1", "Pod", ""),
    ("create", "v1", "Pod", ""),
    ("delete", "v1", "Pod", ""),
    ("patch", "v1", "ServiceAccount", ""),
    ("patch", "rbac.authorization.k8s.io/v1", "Role", ""),
    ("patch", "rbac.authorization.k8s.io/v1", "RoleBinding", ""),
    *(("list", version, kind, "") for version, kind in WORKLOADS),
]
"""Verb, API version, kind and subresource of what an operator looks at before it starts."""


def manifests(rules: Rules, *, namespace: str) -> list[Manifest]:
    """In the order in which they are applied; the operator runs in `namespace` and serves all."""
    if not rules.image:
        raise ConfigError(
            "no image for the operator and its copiers", fix="Give --image, one with voxlane[kubernetes] in it"
        )
    meta: dict[str, Any] = {"name": NAME, "labels": dict(_LABELS)}
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": _LABELS}},
        CRD,
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**meta, "namespace": namespace}},
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": meta, "rules": RIGHTS},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": NAME},
            "subjects": [subject],
        },
        _deployment(rules, namespace),
    ]


def _deployment(rules: Rules, namespace: str) -> Manifest:
    arguments = ["--namespace=all", f"--image={rules.image}", f"--health-port={HEALTH_PORT}"]
    arguments += [f"--data-path={path}" for path in rules.data_paths]
    probe = {"httpGet": {"path": "/healthz", "port": HEALTH_PORT}, "periodSeconds": 20, "failureThreshold": 3}
    container = {
        "name": "operator",
        "image": rules.image,
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
    pod = {"serviceAccountName": NAME, "containers": [container], "terminationGracePeriodSeconds": 30}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME, "namespace": namespace, "labels": dict(_LABELS)},
        "spec": {
            "replicas": 1,
            # Never two at once; each starts from what is there, so a gap costs nothing.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
            "template": {"metadata": {"labels": dict(_LABELS)}, "spec": pod},
        },
    }
