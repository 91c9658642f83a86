"""What an installation of the operator has to know about a cluster: other operators, when kubelets evict pods, and what
Pod Security refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from voxlane.cluster.kubernetes.client import Cluster, Object, path_of, path_of_object
from voxlane.cluster.kubernetes.operator.manifests import (
    COPIER,
    NAMESPACE_LABEL,
    OPERATOR_NAME,
    build_pod,
    cluster_name,
)
from voxlane.cluster.kubernetes.operator.plan import StartPod
from voxlane.cluster.kubernetes.operator.resource import (
    DEFAULT_DISK_RESERVE,
    InstallConfig,
    OperatorConfig,
    read_dataset,
)
from voxlane.cluster.kubernetes.pod_security import ENFORCE_LABEL, find_violations, get_enforced_level
from voxlane.errors import ClusterError, ConfigError, ForbiddenError
from voxlane.sizes import parse_bytes

_RBAC = "rbac.authorization.k8s.io/v1"
_OWN_LABEL = f"app.kubernetes.io/name={OPERATOR_NAME}"
_SIGNALS = ("nodefs.available", "imagefs.available")
"""Signals of the kubelet about disks that staged data may be on."""
_THREADS = 16


@dataclass(frozen=True)
class InstalledOperator:
    """An operator in the cluster."""

    namespace: str
    """Namespace that it runs in."""
    serves: str | None
    """Namespace that it serves; None means all."""
    image: str

    @property
    def scope(self) -> str:
        """What it serves, for messages."""
        return "all namespaces" if self.serves is None else f"namespace {self.serves}"


def list_operators(cluster: Cluster, namespace: str | None = None) -> list[InstalledOperator]:
    """Return the operators that are installed in a namespace, or in all."""
    operators = []
    for deployment in cluster.list(path_of("apps/v1", "Deployment", namespace), labels=_OWN_LABEL):
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        arguments = dict(argument.partition("=")[::2] for argument in container.get("args") or ())
        serves = arguments.get("--namespace", "all")
        own_namespace = deployment["metadata"]["namespace"]
        operators.append(InstalledOperator(own_namespace, None if serves == "all" else serves, container["image"]))
    return sorted(operators, key=lambda operator: operator.namespace)


def check_side_by_side(others: Sequence[InstalledOperator], serve: str | None) -> None:
    """Raise ClusterError if another operator serves a namespace that a new one is to serve (None: all)."""
    for other in others:
        if serve is not None and other.serves not in (None, serve):
            continue
        fix = f"Restrict it first: voxlane operator install -n {other.namespace} --serve NAMESPACE"
        if other.serves is not None:
            fix = "Give --serve with another namespace" + (
                f", or uninstall that one: voxlane operator uninstall -n {other.namespace}"
            )
        raise ClusterError(
            f"the operator in {other.namespace} already serves {other.scope}, and two must not copy the same data",
            fix=fix,
        )


# -- eviction thresholds -----------------------------------------------------------------------------------------------


def read_disk_reserve(cluster: Cluster) -> tuple[tuple[str, ...], str]:
    """Return the largest thresholds at which the kubelets evict pods for lack of disk space, as a percentage, a size or
    both, and where they are from. The operator itself may not read them: that takes a permission with which one can run
    commands on nodes."""
    default = (DEFAULT_DISK_RESERVE,)
    if not cluster.may("get", "v1", "Node", subresource="proxy"):
        return default, "the kubelet's default, because you may not read the configuration of nodes (nodes/proxy)"
    names = [node["metadata"]["name"] for node in cluster.list(path_of("v1", "Node"))]
    with ThreadPoolExecutor(_THREADS) as pool:
        answers = list(pool.map(lambda name: _read_thresholds(cluster, name), names))
    thresholds = [values for values in answers if values is not None]
    if not thresholds:
        return default, "the kubelet's default, because no node answers"
    percentages = [float(value[:-1]) for values in thresholds for value in values if value.endswith("%")]
    sizes = [parse_bytes(value) for values in thresholds for value in values if not value.endswith("%")]
    reserve = [f"{min(math.ceil(max(percentages)), 99)}%"] if any(percentages) else []
    reserve += [str(max(sizes))] if any(sizes) else []
    unknown = f"; {len(names) - len(thresholds)} more do not answer" if len(thresholds) < len(names) else ""
    return tuple(reserve) or ("0",), f"the largest eviction threshold of {len(thresholds)} nodes{unknown}"


def _read_thresholds(cluster: Cluster, node: str) -> list[str] | None:
    """Return the thresholds of a node's kubelet; None if it does not answer."""
    try:
        config = cluster.get(f"{path_of('v1', 'Node', None, node)}/proxy/configz")["kubeletconfig"]
    except (ClusterError, KeyError):
        return None
    values = [(config.get(kind) or {}).get(signal) for kind in ("evictionHard", "evictionSoft") for signal in _SIGNALS]
    return [value for value in values if isinstance(value, str) and _is_amount(value)]


def _is_amount(value: str) -> bool:
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?%", value):
        return True
    try:
        parse_bytes(value)
    except ConfigError:
        return False
    return True


# -- Pod Security ------------------------------------------------------------------------------------------------------


def check_pod_security(namespace: Object, config: InstallConfig) -> None:
    """Raise ClusterError if the operator's own namespace would refuse the pods that make folders on nodes."""
    name, level = namespace["metadata"]["name"], get_enforced_level(namespace)
    resource = {"metadata": {"name": "d", "namespace": "n", "uid": "u"}, "spec": {"source": "gs://bucket/data"}}
    dataset = read_dataset(resource, config)
    operator = OperatorConfig(image=config.image, data_paths=config.data_paths, own_namespace=name)
    pod = build_pod(dataset, StartPod("prepare", "node", "u", 0), operator)
    if violations := find_violations(pod, level):
        raise ClusterError(
            f"namespace {name} enforces Pod Security {level}, which refuses pods that make folders on nodes: "
            + "; ".join(violations),
            fix=f"Run: kubectl label namespace {name} {ENFORCE_LABEL}=privileged --overwrite, or give another with -n",
        )


# -- removal -----------------------------------------------------------------------------------------------------------


def list_obsolete(cluster: Cluster, namespace: str, manifests: Sequence[Object]) -> list[Object]:
    """Return the roles and bindings of the operator in `namespace` that are not among these manifests: it served
    other namespaces before, or an earlier version installed it, under names that all operators shared."""
    paths = {path_of_object(manifest) for manifest in manifests}
    own_names = {cluster_name(namespace), f"{cluster_name(namespace)}-namespaced"}
    obsolete = []
    for kind in ("RoleBinding", "ClusterRoleBinding", "ClusterRole"):
        for item in cluster.list(path_of(_RBAC, kind), labels=_OWN_LABEL):
            item = {"apiVersion": _RBAC, "kind": kind, **item}
            name = item["metadata"]["name"]
            is_own = name in own_names
            if name == OPERATOR_NAME:
                is_own = _is_shared_by(cluster, namespace)
            if is_own and path_of_object(item) not in paths:
                obsolete.append(item)
    return obsolete


def _is_shared_by(cluster: Cluster, namespace: str) -> bool:
    """Return whether the binding of an earlier version is for the operator in this namespace."""
    binding = cluster.find(path_of(_RBAC, "ClusterRoleBinding", None, OPERATOR_NAME))
    subjects = (binding or {}).get("subjects") or ()
    return any(subject.get("namespace") == namespace for subject in subjects)


def list_volumes(cluster: Cluster, serves: str | None) -> list[Object]:
    """Return the volumes and claims of the namespaces that an operator serves (None: all)."""
    selector = NAMESPACE_LABEL if serves is None else f"{NAMESPACE_LABEL}={serves}"
    claims = cluster.list(path_of("v1", "PersistentVolumeClaim", serves), labels=selector)
    return [*claims, *cluster.list(path_of("v1", "PersistentVolume"), labels=selector)]


def list_copier_permissions(cluster: Cluster, serves: str | None) -> list[Object]:
    """Return the roles and accounts of copiers in the namespaces that an operator serves (None: all)."""
    labels = "app.kubernetes.io/managed-by=voxlane,voxlane.dev/part=data"
    permissions: list[Object] = []
    for version, kind in ((_RBAC, "RoleBinding"), (_RBAC, "Role"), ("v1", "ServiceAccount")):
        items = cluster.list(path_of(version, kind, serves), labels=labels)
        permissions += [item for item in items if item["metadata"]["name"].split("-")[:2] == COPIER.split("-")]
    return permissions


def find_operator(cluster: Cluster, namespace: str) -> InstalledOperator | None:
    """Return the operator that is installed in a namespace, or None."""
    return next(iter(list_operators(cluster, namespace)), None)


def list_others(cluster: Cluster, namespace: str) -> list[InstalledOperator]:
    """Return the operators in other namespaces. Raise ForbiddenError with what to do if this user may not list them."""
    try:
        return [operator for operator in list_operators(cluster) if operator.namespace != namespace]
    except ForbiddenError:
        raise ForbiddenError(
            "you may not list Deployments of all namespaces, to find other operators",
            uri=cluster.name,
            fix="Ask the cluster's administrator to run this command, or to apply what --render prints",
        ) from None
