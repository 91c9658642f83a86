"""Fixtures: a control plane per session, and a namespace per test."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.kubernetes import control_plane as plane
from tests.cluster.kubernetes.jobsets import JobSets
from tests.cluster.kubernetes.kubelet import Kubelet
from voxlane.cluster.kubernetes.client import Cluster, path_of, path_of_object


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the kubeconfig of a control plane that serves JobSets, Kueue's queues, RayJobs and TrainJobs."""
    if plane.find_starter() is None:
        pytest.skip(plane.SKIP_REASON)
    with plane.running(tmp_path_factory.mktemp("control-plane")) as kubeconfig, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kubeconfig))
        plane.install_kinds(Cluster.connect())
        yield kubeconfig


@pytest.fixture
def kubeconfig(control_plane: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set KUBECONFIG and PATH for this test."""
    monkeypatch.setenv("KUBECONFIG", str(control_plane))
    monkeypatch.setenv("PATH", plane.path_with_tools())
    return control_plane


@pytest.fixture
def cluster(kubeconfig: Path) -> Iterator[Cluster]:
    """Yield a connection with a new namespace; the cluster has no nodes."""
    cluster = Cluster.connect(namespace=f"test-{secrets.token_hex(4)}")
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}})
    yield cluster
    for pod in cluster.list(path_of("v1", "Pod", cluster.namespace)):
        cluster.delete(path_of_object(pod), grace_s=0)
    for node in cluster.list(path_of("v1", "Node")):
        cluster.delete(path_of_object(node))
    cluster.delete(path_of("v1", "Namespace", None, cluster.namespace))


@pytest.fixture
def add_node(cluster: Cluster) -> Callable[..., None]:
    """Return a function that adds a ready node."""

    def add(name: str, cpu: int = 8, memory: str = "32Gi", gpus: int = 0, labels: dict[str, str] | None = None) -> None:
        plane.add_node(cluster, name, cpu, memory, gpus, labels)

    return add


@pytest.fixture
def kubelet(cluster: Cluster, control_plane: Path, tmp_path: Path) -> Iterator[Kubelet]:
    """Run scheduled pods; the disks of nodes are folders below tmp_path/nodes."""
    with Kubelet(cluster, tmp_path / "nodes", control_plane) as running:
        yield running


@pytest.fixture
def jobsets(cluster: Cluster) -> Iterator[JobSets]:
    """Run the JobSet controller."""
    with JobSets(cluster) as running:
        yield running


@pytest.fixture
def vox(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., str]:
    """Return a function that runs `voxlane app COMMAND ARGUMENTS` in an empty folder and the test's namespace, checks
    its exit status, and returns its output on both streams."""
    from voxlane.cli.main import main

    (tmp_path / "app").mkdir()
    monkeypatch.chdir(tmp_path / "app")

    def run(command: str, *arguments: str, rc: int = 0) -> str:
        capfd.readouterr()
        status = main(["app", command, "-n", cluster.namespace, *arguments])
        out, err = capfd.readouterr()
        assert status == rc, out + err
        return out + err

    return run
