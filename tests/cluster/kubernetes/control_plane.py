"""Start a real control plane for tests: API server, controller manager and scheduler, without kubelets."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from voxlane.cluster.kubernetes.client import Cluster, path_of

VARIABLE = "VOXLANE_CONTROL_PLANE"
_DEFAULT_STARTER = Path(__file__).parents[4] / "shared/kubernetes/control-plane"
SKIP_REASON = f"no Kubernetes control plane: set {VARIABLE} to a starter (see CONTRIBUTING.md)"
_START_ATTEMPTS = 3
_START_TIMEOUT_S = 600
_CRDS = (
    "jobset.x-k8s.io_jobsets",
    "kueue.x-k8s.io_localqueues",
    "kueue.x-k8s.io_workloads",
    "ray.io_rayjobs",
    "trainer.kubeflow.org_trainjobs",
)
# A list's key must have a default or be required, and Kubernetes 1.20 drops defaults that are empty.
_UNSUPPORTED_FIELDS = (
    "x-kubernetes-validations",
    "conversion",
    "selectableFields",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
)


def wait_for(condition: Callable[[], Any], seconds: float = 150.0) -> Any:
    """Return the result of `condition` as soon as it is true; fail after `seconds`, which suits a busy machine."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"the condition did not become true within {seconds:.0f} s"
        time.sleep(0.05)
    return result


def now() -> str:
    """Return the current time in the format of the API."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_starter() -> Path | None:
    """Return the program that starts a control plane, or None if there is none."""
    configured = os.environ.get(VARIABLE)
    program = Path(configured) if configured else _DEFAULT_STARTER
    return program if program.is_file() else None


def path_with_tools() -> str:
    """Return PATH with the commands of this environment first: voxlane, torchrun, kubectl."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Path]:
    """Run a control plane with its state in `folder`, and yield its kubeconfig."""
    program = find_starter()
    assert program is not None
    environment = {**os.environ, "PATH": path_with_tools()}
    try:
        yield _start(program, folder, environment)
    finally:
        subprocess.run([program, "down", folder], env=environment, check=True, timeout=_START_TIMEOUT_S)


def _start(program: Path, folder: Path, environment: dict[str, str]) -> Path:
    """Start a control plane; start it again if another program took one of the ports that the starter chose."""
    error = ""
    for _ in range(_START_ATTEMPTS):
        result = subprocess.run(
            [program, "up", folder], env=environment, capture_output=True, text=True, timeout=_START_TIMEOUT_S
        )
        error = result.stderr
        if result.returncode == 0 and _is_serving(folder):
            return Path(result.stdout.split()[-1])
        pids = [int(file.read_text()) for file in folder.glob("*.pid")]
        subprocess.run([program, "down", folder], env=environment, check=True, timeout=_START_TIMEOUT_S)
        wait_for(lambda pids=pids: not any(map(_is_alive, pids)))  # type: ignore[misc]
        shutil.rmtree(folder / "etcd-data", ignore_errors=True)
    raise AssertionError(f"the control plane did not start in {_START_ATTEMPTS} attempts: {error}")


def _is_serving(folder: Path) -> bool:
    """Wait until the scheduler and the controller manager serve; return False if one of them has exited."""
    for name in ("kube-scheduler", "kube-controller-manager"):
        log, pid = folder / f"{name}.log", int((folder / f"{name}.pid").read_text())
        wait_for(lambda log=log, pid=pid: "Serving securely" in log.read_text() or not _is_alive(pid))  # type: ignore[misc]
        if not _is_alive(pid):
            return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def install_kinds(cluster: Cluster) -> None:
    """Install the custom resources that voxlane uses from their published definitions."""
    program = find_starter()
    assert program is not None
    for name in _CRDS:
        file = program.parent.parent / f"schemas/{name}.yaml"
        definition = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
        cluster.create(_remove_unsupported(definition))


def _remove_unsupported(value: Any, parent: str = "") -> Any:
    """Return a definition without the fields that Kubernetes 1.20 does not support."""
    if isinstance(value, list):
        return [_remove_unsupported(item, parent) for item in value]
    if not isinstance(value, dict):
        return value
    value = {k: _remove_unsupported(v, k) for k, v in value.items() if k not in _UNSUPPORTED_FIELDS}
    if parent != "properties" and value.get("default", 0) in ("", None):
        del value["default"]
    return value


def add_node(
    cluster: Cluster, name: str, cpu: int = 8, memory: str = "32Gi", gpus: int = 0, labels: dict[str, str] | None = None
) -> None:
    """Add a ready node."""
    resources = {"cpu": str(cpu), "memory": memory, "pods": "600", "ephemeral-storage": "100Gi"}
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})}
    cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    status = {"capacity": resources, "allocatable": resources}
    cluster.patch(path_of("v1", "Node", None, name), {"status": status}, subresource="status")
    set_ready(cluster, name, "True")


def set_ready(cluster: Cluster, name: str, status: str) -> None:
    """Set the Ready condition of a node: True, False or Unknown."""
    condition = {"type": "Ready", "status": status, "reason": "Simulated", "message": "", "lastTransitionTime": now()}
    condition["lastHeartbeatTime"] = now()
    cluster.patch(path_of("v1", "Node", None, name), {"status": {"conditions": [condition]}}, subresource="status")
