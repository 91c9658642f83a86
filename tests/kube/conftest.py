"""A control plane for the session, a namespace for each test."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kube import control_plane as plane
from tests.kube.jobsets import JobSets
from tests.kube.kubelet import Kubelet
from voxlane.kube.client import Cluster, path_of, path_of_object


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The kubeconfig of a running control plane that knows JobSets, Kueue's queues, RayJobs and TrainJobs."""
    if plane.starter() is None:
        pytest.skip(plane.WHY_SKIPPED)
    with plane.running(tmp_path_factory.mktemp("control-plane")) as kubeconfig, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kubeconfig))
        plane.install_kinds(Cluster.connect())
        yield kubeconfig


@pytest.fixture
def kubeconfig(control_plane: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, in this test's environment."""
    monkeypatch.setenv("KUBECONFIG", str(control_plane))
    monkeypatch.setenv("PATH", plane.path_with_tools())
    return control_plane


@pytest.fixture
def cluster(kubeconfig: Path) -> Iterator[Cluster]:
    """A connection whose namespace is this test's own; no nodes."""
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
    """Adds a ready node: name, cpu, memory, gpus, labels."""

    def add(name: str, cpu: int = 8, memory: str = "32Gi", gpus: int = 0, labels: dict[str, str] | None = None) -> None:
        plane.add_node(cluster, name, cpu, memory, gpus, labels)

    return add


@pytest.fixture
def kubelet(cluster: Cluster, control_plane: Path, tmp_path: Path) -> Iterator[Kubelet]:
    """Runs pods that are bound to nodes, on folders below tmp_path/nodes."""
    with Kubelet(cluster, tmp_path / "nodes", control_plane) as playing:
        yield playing


@pytest.fixture
def jobsets(cluster: Cluster) -> Iterator[JobSets]:
    """Makes the pods of JobSets."""
    with JobSets(cluster) as playing:
        yield playing


@pytest.fixture
def vox(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., str]:
    """Runs `voxlane app COMMAND WORDS` in an empty folder and the test's namespace, and expects the status `rc`; gives
    what it printed, both streams."""
    from voxlane.cli.main import main

    (tmp_path / "app").mkdir()
    monkeypatch.chdir(tmp_path / "app")

    def run(command: str, *words: str, rc: int = 0) -> str:
        capfd.readouterr()
        status = main(["app", command, "-n", cluster.namespace, *words])
        out, err = capfd.readouterr()
        assert status == rc, out + err
        return out + err

    return run
