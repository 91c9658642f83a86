"""The operator with a real control plane; its pods run as processes that copy from the emulator to folders."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.kubernetes.control_plane import wait_for
from tests.cluster.kubernetes.kubelet import Kubelet
from tests.conftest import Bucket
from voxlane.cli.main import main
from voxlane.cluster.kubernetes.client import Cluster, Object, path_of
from voxlane.cluster.kubernetes.names import API_VERSION, node_label, use_label
from voxlane.cluster.kubernetes.operator.crd import CRD
from voxlane.errors import ClusterError
from voxlane.testing import Emulator

Put = Callable[[Bucket, dict[str, bytes]], None]
OBJECTS = {f"d/{i:02}/volume.bin": os.urandom(40_000 + i) for i in range(12)} | {"d/empty": b""}


class Operator:
    """Process of `voxlane operator run` for the namespace of a test."""

    def __init__(self, cluster: Cluster, log: Path) -> None:
        self.cluster, self.log = cluster, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        command = [sys.executable, "-m", "voxlane", "operator", "run", "--image=voxlane:test", "--settle=0.5"]
        command += [f"--namespace={self.cluster.namespace}", "--lost-after=1", "--retry=1"]
        command += ["--disk-reserve=0", *more]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(120)

    @property
    def output(self) -> str:
        return self.log.read_text()


@pytest.fixture
def operator(cluster: Cluster, kubelet: Kubelet, tmp_path: Path) -> Iterator[Operator]:
    """Yield an operator that has not been started."""
    cluster.apply(CRD)
    wait_for(lambda: cluster.serves(API_VERSION, "StagedDataset"))
    running = Operator(cluster, tmp_path / "operator.log")
    yield running
    if running.process is not None and running.process.poll() is None:
        running.kill()
    for dataset in cluster.list(path_of(API_VERSION, "StagedDataset", cluster.namespace)):
        cluster.patch(dataset_path(cluster, dataset["metadata"]["name"]), {"metadata": {"finalizers": None}})
    print(running.output if running.log.exists() else "")


@pytest.fixture
def source(gcs: Bucket, put: Put) -> str:
    put(gcs, OBJECTS)
    return "gs://bkt/d"


def dataset_path(cluster: Cluster, name: str) -> str:
    return path_of(API_VERSION, "StagedDataset", cluster.namespace, name)


def create(cluster: Cluster, name: str, source: str, emulator: Emulator, **spec: Any) -> None:
    credentials = {"endpoint": emulator.url, **spec.pop("credentials", {})}
    body = {"source": source, "credentials": credentials, **spec}
    cluster.create({"apiVersion": API_VERSION, "kind": "StagedDataset", "metadata": {"name": name}, "spec": body})


def status(cluster: Cluster, name: str) -> Object:
    return cluster.get(dataset_path(cluster, name)).get("status") or {}


def wait_for_phase(cluster: Cluster, name: str, phase: str, seconds: float = 150.0) -> Object:
    """Return the status of a dataset once it has reached `phase`."""
    deadline = time.monotonic() + seconds
    while (current := status(cluster, name)).get("phase") != phase:
        assert time.monotonic() < deadline, f"no {phase}: {current}"
        time.sleep(0.1)
    return current


def labelled(cluster: Cluster, name: str) -> list[str]:
    label = node_label(cluster.namespace, name)
    return sorted(n["metadata"]["name"] for n in cluster.list(path_of("v1", "Node"), labels=f"{label}=ready"))


def files(folder: Path) -> dict[str, bytes]:
    """Return the files that a pod sees in a folder, without the records of voxlane. A copier may be changing them."""
    contents = {}
    for parent, _, names in os.walk(folder):  # unlike rglob, os.walk passes over folders that disappear meanwhile
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                contents[str(path.relative_to(folder))] = path.read_bytes()
    return {name: body for name, body in contents.items() if not name.startswith(".voxlane/")}


def gone(cluster: Cluster, name: str) -> bool:
    return cluster.find(dataset_path(cluster, name)) is None


def test_dataset_is_staged_survives_restarts_and_is_removed_when_unused(
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    source: str,
) -> None:
    for name in ("node-a", "node-b", "node-c"):
        add_node(name)
    operator.start()
    create(cluster, "kits", source, emulator, replicas=2, capacity="1Gi")
    ready_status = wait_for_phase(cluster, "kits", "Ready")
    total = sum(map(len, OBJECTS.values()))
    assert (ready_status["ready"], ready_status["progress"], ready_status["objects"], ready_status["bytes"]) == (
        "2/2",
        "100%",
        13,
        total,
    )
    nodes = labelled(cluster, "kits")
    assert len(nodes) == 2
    assert ready_status["message"] == f"ready on {nodes[0]} and {nodes[1]}"
    folder = f"/var/lib/voxlane/namespaces/{cluster.namespace}"
    assert ready_status["hostPath"] == f"{folder}/datasets/{cluster.namespace}.kits"
    term = ready_status["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]
    assert term["matchExpressions"][0]["key"] == node_label(cluster.namespace, "kits")
    for node in nodes:
        assert files(kubelet.disk(node, ready_status["hostPath"])) == {k[2:]: v for k, v in OBJECTS.items()}
    shown = subprocess.run(
        ["kubectl", "-n", cluster.namespace, "get", "sds", "kits"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert shown[0].split() == ["NAME", "SOURCE", "PHASE", "NODES", "PROGRESS", "SIZE", "AGE"]
    assert shown[1].split()[:6] == ["kits", "gs://bkt/d", "Ready", "2/2", "100%", "468.8"]
    assert cluster.list(path_of("v1", "Pod", cluster.namespace)) == []

    operator.kill()
    emulator.reset_counters()
    user = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "reader"},
        "spec": {
            "affinity": {"nodeAffinity": ready_status["nodeAffinity"]},
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "x", "command": ["sleep", "600"]}],
            "volumes": [{"name": "data", "hostPath": {"path": ready_status["hostPath"]}}],
        },
    }
    cluster.create(user)
    reader = path_of("v1", "Pod", cluster.namespace, "reader")
    wait_for(lambda: cluster.get(reader)["status"].get("phase") == "Running")
    assert cluster.get(reader)["spec"]["nodeName"] in nodes
    cluster.delete(dataset_path(cluster, "kits"))
    operator.start()
    deleting = wait_for_phase(cluster, "kits", "Deleting")
    assert deleting["message"] == "waiting for Pod reader to finish"
    assert labelled(cluster, "kits") == nodes
    assert emulator.counters().requests == 0
    cluster.delete(reader)
    wait_for(lambda: gone(cluster, "kits"))
    assert labelled(cluster, "kits") == []
    for node in nodes:
        assert not kubelet.disk(node, ready_status["hostPath"]).exists()
        assert not [p for p in kubelet.disk(node, f"{folder}/objects").rglob("*") if p.is_file()]
    assert operator.kill(signal.SIGTERM) == 0
    assert operator.output.splitlines()[-1].endswith("ended; copies and removals continue at the next start")


def test_another_source_is_not_copied_while_a_pod_uses_the_data(
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    gcs: Bucket,
    put: Put,
    source: str,
) -> None:
    add_node("node-a")
    add_node("node-b")
    operator.start()
    create(cluster, "kits", source, emulator, replicas=2)
    ready_status = wait_for_phase(cluster, "kits", "Ready")
    volume = {"name": "data", "hostPath": {"path": ready_status["hostPath"]}}
    main = {"name": "main", "image": "x", "command": ["sleep", "600"]}
    reader = {"nodeName": "node-a", "restartPolicy": "Never", "containers": [main], "volumes": [volume]}
    cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "reader"}, "spec": reader})
    path = path_of("v1", "Pod", cluster.namespace, "reader")
    wait_for(lambda: cluster.get(path)["status"].get("phase") == "Running")
    put(gcs, {"e/new": b"new"})
    cluster.patch(dataset_path(cluster, "kits"), {"spec": {"source": source.removesuffix("d") + "e"}})
    # node-b may keep its label for a moment after node-a lost its own, before it is copied again.
    wait_for(lambda: files(kubelet.disk("node-b", ready_status["hostPath"])) == {"new": b"new"})
    wait_for(lambda: labelled(cluster, "kits") == ["node-b"])
    assert files(kubelet.disk("node-a", ready_status["hostPath"])) == {k[2:]: v for k, v in OBJECTS.items()}
    partial = wait_for(lambda: (s := cluster.get(dataset_path(cluster, "kits"))["status"])["ready"] == "1/2" and s)
    assert (partial["phase"], partial["message"]) == (
        "Staging",
        "node-a: waiting for Pod reader to finish before copying again",
    )
    cluster.delete(path, grace_s=0)
    wait_for_phase(cluster, "kits", "Ready")
    assert labelled(cluster, "kits") == ["node-a", "node-b"]
    assert files(kubelet.disk("node-a", ready_status["hostPath"])) == {"new": b"new"}


def test_lost_node_is_replaced_and_its_copy_removed_when_it_returns(
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    source: str,
) -> None:
    add_node("node-a", labels={"disk": "ssd"})
    add_node("node-b", labels={"disk": "ssd"})
    add_node("node-c")
    operator.start()
    create(cluster, "kits", source, emulator, replicas=1, nodeSelector={"disk": "ssd"})
    host_path = wait_for_phase(cluster, "kits", "Ready")["hostPath"]
    (first,) = labelled(cluster, "kits")
    other = {"node-a": "node-b", "node-b": "node-a"}[first]
    kubelet.lose(first)
    wait_for(lambda: labelled(cluster, "kits") == [other])
    ready_status = wait_for_phase(cluster, "kits", "Ready")
    assert ready_status["nodes"][first]["phase"] == "Lost"
    assert files(kubelet.disk(other, host_path)) == files(kubelet.disk(first, host_path))
    kubelet.bring_back(first)
    wait_for(lambda: list(status(cluster, "kits")["nodes"]) == [other])
    assert labelled(cluster, "kits") == [other]
    assert not kubelet.disk(first, host_path).exists()


def test_datasets_that_cannot_be_staged_are_explained(
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    s3_emulator: Bucket,
    put: Put,
    source: str,
) -> None:
    add_node("node-a")
    put(s3_emulator, OBJECTS)
    operator.start()
    create(cluster, "no-bucket", "gs://nowhere/d", emulator)
    create(cluster, "empty", "gs://bkt/nothing", emulator)
    create(cluster, "large", source, emulator, capacity="100Ki")
    create(cluster, "no-secret", f"{s3_emulator.uri}/d", emulator, credentials={"secret": "keys"})
    create(cluster, "no-node", source, emulator, nodeSelector={"disk": "ssd"})
    create(cluster, "no-path", source, emulator, dataPath="/etc")
    expected = {
        "no-bucket": ("Failed", "node-a: gs://nowhere"),
        "empty": ("Failed", "node-a: gs://bkt/nothing"),
        "large": ("Failed", "Raise the capacity"),
        "no-secret": ("Staging", 'secrets "keys" not found'),
        "no-node": ("Pending", "no node matches nodeSelector disk=ssd"),
        "no-path": ("Failed", "dataPath: the operator does not allow /etc"),
    }
    for name, (phase, message) in expected.items():
        wait_for(lambda n=name, m=message: m in status(cluster, n).get("message", ""))  # type: ignore[misc]
        assert status(cluster, name)["phase"] == phase
        assert status(cluster, name)["ready"].startswith("0/")
        assert labelled(cluster, name) == []
    assert files(kubelet.disk("node-a", f"/var/lib/voxlane/datasets/{cluster.namespace}.large")) == {}
    events = {
        (e["involvedObject"]["name"], e["type"], e["reason"])
        for e in cluster.list(path_of("v1", "Event", cluster.namespace))
    }
    assert {("no-bucket", "Warning", "Failed"), ("no-node", "Warning", "Pending")} <= events
    with pytest.raises(Exception, match=r"spec\.replicas in body should be greater than or equal to 1"):
        create(cluster, "bad", source, emulator, replicas=0)
    with pytest.raises(Exception, match=r"spec\.source in body should match"):
        create(cluster, "bad", "http://x/y", emulator)

    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": keys})
    cluster.patch(dataset_path(cluster, "large"), {"spec": {"capacity": "1Gi"}})
    cluster.patch(path_of("v1", "Node", None, "node-a"), {"metadata": {"labels": {"disk": "ssd"}}})
    for name in ("large", "no-secret", "no-node"):
        wait_for_phase(cluster, name, "Ready")


@pytest.fixture
def small_disk(kubelet: Kubelet) -> Iterator[Callable[[str], Path]]:
    """Return a function that gives a node a disk with 4 MiB above what the copy leaves free."""
    mounted: list[Path] = []

    def mount(node: str) -> Path:
        folder = kubelet.disk(node, "/var/lib/voxlane")
        folder.mkdir(parents=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=260m", "tmpfs", folder], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a small disk needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.cluster
def test_full_disk_evicts_unused_datasets(
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    small_disk: Callable[[str], Path],
) -> None:
    add_node("node-a")
    disk = small_disk("node-a")
    emulator.fill("bkt", 5, key="one/{}", size_bytes=500_000)
    emulator.fill("bkt", 5, key="two/{}", size_bytes=500_001)
    emulator.fill("bkt", 30, key="huge/{}", size_bytes=500_001)
    operator.start()
    create(cluster, "one", "gs://bkt/one", emulator)
    wait_for_phase(cluster, "one", "Ready")
    create(cluster, "two", "gs://bkt/two", emulator)
    wait_for_phase(cluster, "two", "Ready")
    evicted = wait_for_phase(cluster, "one", "Evicted")
    assert evicted["message"] == "evicted from node-a to make room; it will be staged again when something uses it"
    datasets = disk / "namespaces" / cluster.namespace / "datasets"
    assert [p.name for p in datasets.iterdir()] == [f"{cluster.namespace}.two"]
    create(cluster, "huge", "gs://bkt/huge", emulator)
    wait_for(lambda: "node-a: the disk lacks" in status(cluster, "huge").get("message", ""))
    assert status(cluster, "two")["phase"] == "Ready"
    # A Deployment needs the first dataset: it returns and evicts the second.
    pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "user", "labels": {use_label("one"): "true"}},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "template": pod},
    }
    deployment["spec"]["template"]["spec"]["nodeSelector"] = {"never": "placed"}  # type: ignore[index]
    cluster.create(deployment)
    wait_for_phase(cluster, "one", "Ready")
    assert wait_for_phase(cluster, "two", "Evicted")


def service_account(cluster: Cluster, namespace: str, name: str, template: Path, file: Path) -> Path:
    """Write a kubeconfig of a service account."""
    import base64

    import yaml

    def token() -> str:
        for secret in cluster.list(path_of("v1", "Secret", namespace)):
            if secret["metadata"].get("annotations", {}).get("kubernetes.io/service-account.name") == name:
                return base64.b64decode(secret["data"]["token"]).decode()
        return ""

    config = yaml.safe_load(template.read_text())
    config["users"][0]["user"] = {"token": wait_for(token)}
    config["contexts"][0]["context"]["namespace"] = namespace
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.cluster
@pytest.mark.parametrize("scope", ["all", "one"])
def test_installation_runs_with_its_own_permissions_and_namespaces_can_be_deleted(
    scope: str,
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    source: str,
    kubeconfig: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    system = f"{cluster.namespace}-system"
    serve = ["--serve", cluster.namespace] if scope == "one" else []
    account = {"name": "voxlane-operator", "namespace": system}
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system}})
    cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    own = service_account(cluster, system, "voxlane-operator", kubeconfig, tmp_path / "operator.yaml")
    nobody = service_account(cluster, system, "default", kubeconfig, tmp_path / "nobody.yaml")
    kubelet.environment["KUBECONFIG"] = str(own)

    monkeypatch.setenv("KUBECONFIG", str(nobody))
    assert main(["operator", "run"]) == 1
    assert "the operator may not list StagedDataset in all namespaces" in capsys.readouterr().err
    assert main(["operator", "install", "--image", "x"]) == 1
    assert "you may not patch Namespace voxlane-system" in capsys.readouterr().err
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))

    assert main(["operator", "install", "-n", system, "--image", "voxlane:test", "--disk-reserve", "0", *serve]) == 0
    assert f"Deployment voxlane-operator in {system}: created" in capsys.readouterr().out
    add_node("node-a")
    create(cluster, "kits", source, emulator)
    host_path = wait_for_phase(cluster, "kits", "Ready")["hostPath"]

    copier = service_account(cluster, cluster.namespace, "voxlane-copier", kubeconfig, tmp_path / "copier.yaml")
    monkeypatch.setenv("KUBECONFIG", str(copier))
    copier_cluster = Cluster.connect()
    assert copier_cluster.may("patch", API_VERSION, "StagedDataset", subresource="status")
    for verb in ("get", "list", "patch", "delete"):
        assert not copier_cluster.may(verb, API_VERSION, "StagedDataset")
        assert not copier_cluster.may(verb, "v1", "Secret")
    assert not copier_cluster.may("patch", API_VERSION, "StagedDataset", "default", "status")
    monkeypatch.setenv("KUBECONFIG", str(own))
    assert not Cluster.connect().may("get", "v1", "Secret", "")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))

    namespace = path_of("v1", "Namespace", None, cluster.namespace)
    cluster.delete(namespace)
    wait_for(lambda: cluster.find(namespace) is None)
    assert not kubelet.disk("node-a", host_path).exists()
    assert labelled(cluster, "kits") == []
    assert main(["operator", "uninstall", "-n", system]) == 0
    output = capsys.readouterr().out
    assert f"ClusterRole voxlane-operator-{system}: removed" in output
    assert "CustomResourceDefinition" not in output
    assert "Namespace" not in output  # it existed before the installation
    assert cluster.serves(API_VERSION, "StagedDataset")
    cluster.delete(path_of("v1", "Namespace", None, system))


def test_missing_kind_is_reported_with_the_install_command(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], operator: Operator
) -> None:
    definition = path_of("apiextensions.k8s.io/v1", "CustomResourceDefinition", None, "stageddatasets.voxlane.dev")
    cluster.delete(definition)
    wait_for(lambda: not cluster.serves(API_VERSION, "StagedDataset"))
    try:
        assert main(["operator", "run"]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "no kind StagedDataset (voxlane.dev/v1alpha1). Run: voxlane operator install" in error
    finally:
        wait_for(lambda: cluster.find(definition) is None)
        cluster.apply(CRD)
        wait_for(lambda: cluster.serves(API_VERSION, "StagedDataset"))


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("source", {}),
        ("source", {"source": "ftp://a/b"}),
        ("replicas", {"replicas": 0}),
        ("capacity", {"capacity": "lots"}),
        ("capacity", {"capacity": -5}),
        ("timeout", {"timeout": "3 weeks"}),
        ("dataPath", {"dataPath": "data"}),
        ("credentials.secret", {"credentials": {"secret": "wJalrXUtnFEMI/K7MDENG+bPxRfiCY"}}),
        ("credentials.file", {"credentials": {"secret": "a", "file": '{"private_key": "x"}'}}),
        ("credentials.serviceAccount", {"credentials": {"serviceAccount": "A B"}}),
        ("credentials.endpoint", {"credentials": {"endpoint": "https://me:password@s3.lab"}}),
    ],
)
def test_server_rejects_invalid_specs(cluster: Cluster, field: str, spec: dict[str, Any]) -> None:
    """Before anything is stored: a value that is no valid name may be the secret itself."""
    cluster.apply(CRD)
    wait_for(lambda: cluster.serves(API_VERSION, "StagedDataset"))
    good = {"source": "gs://a/b"} if field != "source" else {}
    manifest = {"apiVersion": API_VERSION, "kind": "StagedDataset", "metadata": {"name": "d"}, "spec": {**good, **spec}}
    with pytest.raises(ClusterError, match=f"spec.{field}"):
        cluster.create(manifest, dry_run=True)


def test_converted_volume_is_staged(
    cluster: Cluster,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    s3_emulator: Bucket,
    put: Put,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What `voxlane operator convert` prints for a VolumeManager is staged as it is."""
    put(s3_emulator, OBJECTS)
    options = {"sourceURL": f"{s3_emulator.uri}/d/", "endpointURL": emulator.url.removeprefix("http://")}
    options["awsCredentialsSecretName"] = "aws-creds"
    volume = {
        "id": "vol1",
        "replicas": 1,
        "sourceType": "S3",
        "capacity": "5Gi",
        "labels": {"a": "b"},
        "options": options,
    }
    metadata = {"name": "vm", "namespace": cluster.namespace}
    manifest = {"kind": "VolumeManager", "metadata": metadata, "spec": {"volumeConfigs": [volume]}}
    file = tmp_path / "volumes.yaml"
    file.write_text(yaml.safe_dump(manifest))
    assert main(["operator", "convert", str(file)]) == 0
    secret = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "aws-creds"}, "stringData": secret})
    add_node("node-a")
    operator.start()
    cluster.apply(yaml.safe_load(capsys.readouterr().out))
    assert wait_for_phase(cluster, "vm-vol1", "Ready")["objects"] == len(OBJECTS)
