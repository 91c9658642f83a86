"""A real control plane for tests: API server, controller manager, scheduler, without kubelets."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from voxlane.kube.client import Cluster, path_of

VARIABLE = "VOXLANE_CONTROL_PLANE"
_BESIDE = Path(__file__).parents[3] / "shared/kubernetes/control-plane"
WHY_SKIPPED = f"no Kubernetes control plane: set {VARIABLE} to a starter (CONTRIBUTING.md says what it is)"
_CRDS = (
    "jobset.x-k8s.io_jobsets",
    "kueue.x-k8s.io_localqueues",
    "kueue.x-k8s.io_workloads",
    "ray.io_rayjobs",
    "trainer.kubeflow.org_trainjobs",
)


_UNKNOWN = ("x-kubernetes-validations", "conversion", "selectableFields")
# A list's key must have a default or be required, and this server drops defaults that are empty.
_UNKNOWN += ("x-kubernetes-list-type", "x-kubernetes-list-map-keys")


def starter() -> Path | None:
    """The program that starts one."""
    said = os.environ.get(VARIABLE)
    found = Path(said) if said else _BESIDE
    return found if found.is_file() else None


def path_with_tools() -> str:
    """PATH with this environment's commands first: voxlane, torchrun, kubectl."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Path]:
    """Starts one with its state in `folder`; gives its kubeconfig."""
    program = starter()
    assert program is not None
    env = {**os.environ, "PATH": path_with_tools()}
    try:
        done = subprocess.run([program, "up", folder], env=env, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        yield Path(done.stdout.split()[-1])
    finally:
        subprocess.run([program, "down", folder], env=env, check=True, timeout=30)


def install_kinds(cluster: Cluster) -> None:
    """The custom resources of the field, from their published definitions."""
    program = starter()
    assert program is not None
    for name in _CRDS:
        file = program.parent.parent / f"schemas/{name}.yaml"
        definition = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
        cluster.create(_for_old_servers(definition))


def _for_old_servers(value: Any, inside: str = "") -> Any:
    """Without what Kubernetes 1.20 does not know."""
    if isinstance(value, list):
        return [_for_old_servers(item, inside) for item in value]
    if not isinstance(value, dict):
        return value
    value = {k: _for_old_servers(v, k) for k, v in value.items() if k not in _UNKNOWN}
    if inside != "properties" and value.get("default", 0) in ("", None):
        del value["default"]
    return value


def add_node(
    cluster: Cluster, name: str, cpu: int = 8, memory: str = "32Gi", gpus: int = 0, labels: dict[str, str] | None = None
) -> None:
    """A ready node."""
    has = {"cpu": str(cpu), "memory": memory, "pods": "600", "ephemeral-storage": "100Gi"}
    if gpus:
        has["nvidia.com/gpu"] = str(gpus)
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})}
    cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    cluster.patch(
        path_of("v1", "Node", None, name), {"status": {"capacity": has, "allocatable": has}}, subresource="status"
    )
    set_ready(cluster, name, "True")


def set_ready(cluster: Cluster, name: str, status: str) -> None:
    """A node's Ready condition: True, False or Unknown."""
    from tests.kube.kubelet import now

    condition = {"type": "Ready", "status": status, "reason": "Played", "message": "", "lastTransitionTime": now()}
    condition["lastHeartbeatTime"] = now()
    cluster.patch(path_of("v1", "Node", None, name), {"status": {"conditions": [condition]}}, subresource="status")
