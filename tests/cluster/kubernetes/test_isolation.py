"""Tenants of a real control plane are kept apart: what a copier runs, what a namespace admits, who serves whom."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.cluster.app.test_config import build_app
from tests.cluster.kubernetes.control_plane import wait_for
from tests.cluster.kubernetes.kubelet import Kubelet
from tests.cluster.kubernetes.test_app_deploy import Vox, list_everything, write
from tests.cluster.kubernetes.test_operator import (
    OBJECTS,
    Operator,
    Put,
    create,
    dataset_path,
    gone,
    operator,
    source,
    status,
    wait_for_phase,
)
from tests.conftest import Bucket
from voxlane.cli.main import main
from voxlane.cluster.kubernetes.app.config import App, Template
from voxlane.cluster.kubernetes.app.render import render, render_tensorboard
from voxlane.cluster.kubernetes.client import Cluster, Object, path_of
from voxlane.cluster.kubernetes.names import API_VERSION
from voxlane.cluster.kubernetes.operator.agent import make_namespace_folder
from voxlane.cluster.kubernetes.operator.crd import CRD
from voxlane.cluster.kubernetes.pod_security import ENFORCE_LABEL, find_violations, list_pod_templates
from voxlane.errors import CacheError, ClusterError
from voxlane.testing import Emulator

__all__ = ["operator", "source"]  # fixtures
DOCS = Path(__file__).parents[3] / "docs/kubernetes"
RBAC = "rbac.authorization.k8s.io/v1"


# -- copiers -----------------------------------------------------------------------------------------------------------


def test_variables_and_files_of_a_tenant_run_no_code_in_a_copier(
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    s3_emulator: Bucket,
    put: Put,
    tmp_path: Path,
) -> None:
    """A staged sitecustomize.py and a Secret with PYTHONPATH once overwrote the data of another tenant."""
    marker = tmp_path / "code-of-the-tenant-ran"
    attack = f"open({str(marker)!r}, 'w').write('x')\n".encode()
    put(s3_emulator, {"evil/sitecustomize.py": attack, "evil/usercustomize.py": attack, "d/a": b"a"})
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "good"}, "stringData": keys})
    add_node("node-a")
    operator.start()
    create(cluster, "evil", f"{s3_emulator.uri}/evil", emulator, credentials={"secret": "good"})
    staged = wait_for_phase(cluster, "evil", "Ready")["hostPath"]
    folder = str(kubelet.disk("node-a", staged))
    assert Path(folder, "sitecustomize.py").is_file()
    hostile = {"PYTHONPATH": folder, "PYTHONUSERBASE": folder, "PYTHONSTARTUP": f"{folder}/sitecustomize.py"}
    hostile |= {"LD_PRELOAD": f"{folder}/sitecustomize.py", "PATH": folder}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bad"}, "stringData": keys | hostile})
    create(cluster, "kits", f"{s3_emulator.uri}/d", emulator, credentials={"secret": "bad"})
    assert wait_for_phase(cluster, "kits", "Ready")["objects"] == 1
    assert not marker.exists()


def test_copier_without_privileges_fills_only_its_folder(gcs: Bucket, put: Put, emulator: Emulator) -> None:
    """A real process with the copiers' user id, as the kubelet starts it: the mount is its working folder."""
    import tempfile

    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can start a process of another user, with setpriv")
    put(gcs, {"d/a": b"a" * 300_000, "d/b": b""})
    with tempfile.TemporaryDirectory() as disk:
        make_namespace_folder(disk, "team", 65532)
        make_namespace_folder(disk, "team", 65532)  # again, for the next dataset
        folder = Path(disk, "namespaces/team")
        assert folder.stat().st_uid == 65532
        # The capability to read any file, because Python itself may be in a home folder here.
        reader = ["setpriv", "--reuid=65532", "--regid=65532", "--clear-groups", "--no-new-privs"]
        reader += [f"--{kind}={drop}+dac_read_search" for kind, drop in (("bounding-set", "-all,"), ("inh-caps", ""))]
        reader += ["--ambient-caps=+dac_read_search"]
        command = [*reader, sys.executable, "-m", "voxlane", "operator", "agent", "stage"]
        command += [f"--folder={folder}", "--name=d"]
        command += ["--source=gs://bkt/d", "--node=n", "--dataset=team/d", "--uid=u", "--disk-reserve=0"]
        environment = {"PATH": os.environ["PATH"], "STORAGE_EMULATOR_HOST": emulator.url, "HOME": "/nonexistent"}
        environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {path.stat().st_uid for path in files} == {65532}
        copy = folder / "datasets/d"
        assert {path.name: path.stat().st_mode & 0o777 for path in copy.iterdir() if path.is_file()} == {
            "a": 0o444,
            "b": 0o444,
        }  # other users, such as that of an app, may read them
        done = subprocess.run(["touch", f"{disk}/namespaces/other"], user=65532, group=65532, extra_groups=[])
        assert done.returncode != 0


def test_folders_of_namespaces_are_never_made_through_links(tmp_path: Path) -> None:
    target, disk = tmp_path / "target", tmp_path / "disk"
    target.mkdir()
    disk.mkdir()
    make_namespace_folder(str(disk), "team", os.getuid())
    assert (disk / "namespaces/team").stat().st_mode & 0o777 == 0o700
    (disk / "namespaces/evil").symlink_to(target)
    with pytest.raises(CacheError, match=r"folder of namespace evil: a file or link is in its place\. Remove"):
        make_namespace_folder(str(disk), "evil", os.getuid())
    other = tmp_path / "other"
    other.mkdir()
    (other / "namespaces").symlink_to(target)
    with pytest.raises(CacheError, match="a file or link is in its place"):
        make_namespace_folder(str(other), "team", os.getuid())
    assert list(target.iterdir()) == []


def test_results_of_pods_in_other_namespaces_are_ignored(
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    source: str,
) -> None:
    """Anyone can give a pod the labels of a copier; here, one of the operator's namespace claims to be one."""
    add_node("node-a")
    node = cluster.get(path_of("v1", "Node", None, "node-a"))["metadata"]["uid"]
    create(cluster, "kits", source, emulator, nodeSelector={"never": "there"}, replicas=1)
    operator.start()
    wait_for_phase(cluster, "kits", "Pending")
    cluster.patch(
        dataset_path(cluster, "kits"), {"status": {"nodes": {"node-a": {"phase": "Copying"}}}}, subresource="status"
    )
    key = f"{cluster.namespace}.kits"
    labels = {"voxlane.dev/dataset": key, "voxlane.dev/staging": "copy"}
    annotations = {"voxlane.dev/node": "node-a", "voxlane.dev/node-uid": node}
    metadata = {
        "name": f"fake-{cluster.namespace}",
        "namespace": "default",
        "labels": labels,
        "annotations": annotations,
    }
    spec = {"restartPolicy": "Never", "containers": [{"name": "copy", "image": "x", "command": ["true"]}]}
    cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**spec, "nodeName": "node-a"}})
    fake = path_of("v1", "Pod", "default", metadata["name"])
    try:
        wait_for(lambda: cluster.get(fake)["status"].get("phase") == "Succeeded")
        cluster.patch(dataset_path(cluster, "kits"), {"metadata": {"annotations": {"wake": "up"}}})
        wait_for(lambda: "node-a" not in (status(cluster, "kits").get("nodes") or {}))
        label = f"staged.voxlane.dev/{key}"
        assert label not in cluster.get(path_of("v1", "Node", None, "node-a"))["metadata"]["labels"]
    finally:
        cluster.delete(fake, grace_s=0)


# -- Pod Security ------------------------------------------------------------------------------------------------------


class _PodSecurity(BaseHTTPRequestHandler):
    """Admits pods as the Pod Security admission of newer API servers does."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        reasons = find_violations(request["object"], "restricted")
        response = {"uid": request["uid"], "allowed": not reasons}
        if reasons:
            response["status"] = {"code": 403, "message": f"violates PodSecurity restricted: {', '.join(reasons)}"}
        body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def restricted(cluster: Cluster, control_plane: Path) -> Iterator[str]:
    """Make the API server enforce `restricted` in the test's namespace, whatever its version."""
    certificate = control_plane.parent / "certs/apiserver.crt"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _PodSecurity)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    version, kind = "admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration"
    import base64

    client = {
        "url": f"https://127.0.0.1:{server.server_port}/",
        "caBundle": base64.b64encode(certificate.read_bytes()).decode(),
    }
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    hook = {
        "name": "pod-security.voxlane.test",
        "clientConfig": client,
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {ENFORCE_LABEL: "restricted", "test": cluster.namespace}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
    }
    path = f"/apis/{version}/validatingwebhookconfigurations"
    metadata = {"name": cluster.namespace}
    cluster.request("POST", path, {"apiVersion": version, "kind": kind, "metadata": metadata, "webhooks": [hook]})
    labels = {ENFORCE_LABEL: "restricted", "test": cluster.namespace}
    cluster.patch(path_of("v1", "Namespace", None, cluster.namespace), {"metadata": {"labels": labels}})
    container = {"name": "root", "image": "x"}
    root = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root"}, "spec": {"containers": [container]}}

    def is_refused() -> bool:
        try:
            cluster.create(root, dry_run=True)
        except ClusterError as error:
            return "violates PodSecurity restricted" in str(error)
        return False

    wait_for(is_refused)
    yield cluster.namespace
    with suppress(ClusterError):
        cluster.delete(f"{path}/{cluster.namespace}")
    server.shutdown()
    server.server_close()


def test_restricted_namespace_admits_copiers_and_every_app(
    restricted: str,
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    source: str,
) -> None:
    add_node("node-a")
    operator.start()
    create(cluster, "kits", source, emulator)
    assert wait_for_phase(cluster, "kits", "Ready")["objects"] == len(OBJECTS)
    count = 0
    for sample in (*get_args(Template), "loading"):
        app = App.load(DOCS / sample)
        manifests = render(app, app.image, namespace=cluster.namespace)
        manifests += render_tensorboard(app, app.image, namespace=cluster.namespace)
        for template in (item for manifest in manifests for item in list_pod_templates(manifest)):
            count += 1
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{count}"}, "spec": dict(template["spec"])}
            pod["spec"].pop("priorityClassName", None)
            pod["spec"]["containers"] = [{"image": app.image, **item} for item in pod["spec"]["containers"]]
            cluster.create(pod, dry_run=True)
    assert count >= len(get_args(Template)) + 3


def test_trainjob_sets_what_restricted_requires() -> None:
    app = App.load(DOCS / "trainjob")
    job = render(app, app.image, namespace="team")[-1]
    (patch,) = (item["trainingRuntimeSpec"]["template"]["spec"] for item in job["spec"]["runtimePatches"])
    spec = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert find_violations({"spec": spec}, "restricted") == []


def test_deploy_says_what_the_namespace_would_refuse(vox: Vox, cluster: Cluster) -> None:
    cluster.apply(CRD)
    wait_for(lambda: cluster.serves(API_VERSION, "StagedDataset"))
    namespace = path_of("v1", "Namespace", None, cluster.namespace)
    cluster.patch(namespace, {"metadata": {"labels": {ENFORCE_LABEL: "restricted"}}})
    write(nodes=1, user=0, stage=[{"name": "kits", "source": "nfs://filer/kits"}])
    output = vox("deploy", "--no-node-check", rc=1)
    assert "the namespace enforces the Pod Security level restricted\n" in output
    assert "the namespace would refuse the pods of JobSet demo: pod runs as root (runAsUser 0)" in output
    assert "Set user in app.yaml to the id of a user other than root" in output
    assert (
        "refuse the pods that copy StagedDataset kits: volume source is of the type nfs. Copy nfs://filer/kits"
        in output
    )
    assert list_everything(cluster) == []
    write(nodes=1)
    assert "the namespace enforces the Pod Security level restricted\n" in vox("deploy", "--no-node-check", "--dry-run")
    cluster.patch(namespace, {"metadata": {"labels": {ENFORCE_LABEL: "baseline"}}})
    write(nodes=1, user=0)
    assert "refuse" not in vox("deploy", "--no-node-check", "--dry-run")


def test_violations_are_found_wherever_they_are() -> None:
    """The whole list was compared with the samples of Kubernetes' own tests; these are one of each kind."""
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    secure = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}

    def find(level: str = "restricted", container: Object | None = None, **spec: Any) -> list[str]:
        item = {"name": "c", "image": "x", "securityContext": context, **(container or {})}
        return find_violations({"spec": {"securityContext": secure, "containers": [item], **spec}}, level)

    assert find() == []
    assert find("privileged", hostPID=True) == []
    assert find("baseline", hostPID=True) == ["hostPID is true"]
    assert find("baseline", volumes=[{"name": "v", "hostPath": {"path": "/"}}]) == ["volume v is a hostPath"]
    assert find("baseline", {"ports": [{"hostPort": 80}]}) == ["container c uses hostPort 80"]
    assert find("baseline", {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}) == [
        "container c adds capability SYS_ADMIN"
    ]
    assert find("baseline", {"securityContext": {"privileged": True}}) == ["container c is privileged"]
    assert find(securityContext={}) == [
        "container c does not set runAsNonRoot to true",
        "container c does not set seccompProfile to RuntimeDefault",
    ]
    assert find(container={"securityContext": {}}) == [
        "container c does not set allowPrivilegeEscalation to false",
        "container c does not drop all capabilities",
    ]
    init = [{"name": "i", "image": "x", "securityContext": {**context, "runAsUser": 0}}]
    assert find(initContainers=init) == ["container i runs as root (runAsUser 0)"]


def test_every_template_of_an_app_is_admitted_by_restricted() -> None:
    stage = [{"name": "kits", "source": "gs://b/kits"}]
    for template in ("jobset", "trainjob"):
        app = build_app(template=template, stage=stage, credentials={"secret": "s", "file": "k.json"})
        for manifest in render(app, "v:1", namespace="team"):
            for item in list_pod_templates(manifest):
                assert find_violations(item, "restricted") == []


# -- several operators -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `voxlane operator ARGUMENTS`, checks its status and returns what it prints."""

    def run_operator(*arguments: str, rc: int = 0) -> str:
        capsys.readouterr()
        status = main(["operator", *arguments])
        out, err = capsys.readouterr()
        assert status == rc, out + err
        return out + err

    return run_operator


@pytest.fixture
def namespaces(cluster: Cluster) -> Iterator[tuple[str, str, str]]:
    """Yield the names of a namespace of a team, and of two for operators, which are removed again."""
    team = f"{cluster.namespace}-team"
    names = (team, f"{cluster.namespace}-one", f"{cluster.namespace}-two")
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team}})
    yield names
    for name in names[1:]:
        main(["operator", "uninstall", "-n", name])
    for name in names:
        cluster.delete(path_of("v1", "Namespace", None, name))


def test_operators_are_installed_and_uninstalled_side_by_side(
    cluster: Cluster, namespaces: tuple[str, str, str], run: Callable[..., str]
) -> None:
    """The second installation once took the permissions of the first, and its removal deleted them."""
    team, first, second = namespaces
    # An earlier version used names that all operators shared.
    shared = {"name": "voxlane-operator", "labels": {"app.kubernetes.io/name": "voxlane-operator"}}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "voxlane-operator"}
    subjects = [{"kind": "ServiceAccount", "name": "voxlane-operator", "namespace": first}]
    binding = {"kind": "ClusterRoleBinding", "metadata": shared, "roleRef": role, "subjects": subjects}
    cluster.create({"apiVersion": RBAC, "kind": "ClusterRole", "metadata": shared, "rules": []})
    cluster.create({"apiVersion": RBAC, **binding})

    output = run("install", "-n", second, "--serve", team, "--image", "x")
    assert f"ClusterRoleBinding voxlane-operator-{second}: created" in output
    assert f"RoleBinding voxlane-operator-{second}-namespaced in {team}: created" in output
    assert f"serves namespace {team}\n" in output
    old = path_of(RBAC, "ClusterRoleBinding", None, "voxlane-operator")
    assert cluster.get(old)["subjects"] == subjects
    for clash in ([], ["--serve", team]):
        output = run("install", "-n", first, "--image", "x", *clash, rc=1)
        assert (
            f"the operator in {second} already serves namespace {team}, and two must not copy the same data" in output
        )
    assert cluster.find(path_of("v1", "Namespace", None, first)) is None

    output = run("install", "-n", first, "--serve", cluster.namespace, "--image", "x")
    assert "ClusterRoleBinding voxlane-operator: removed" in output
    assert cluster.find(old) is None
    output = run("uninstall", "-n", second, "--data")
    assert f"the kind StagedDataset stays, because the operators in {first} use it" in output
    assert f"Namespace {second}: removed" in output
    assert cluster.serves(API_VERSION, "StagedDataset")
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        names = {item["metadata"]["name"] for item in cluster.list(path_of(RBAC, kind))}
        assert f"voxlane-operator-{first}" in names
        assert f"voxlane-operator-{second}" not in names
    served = path_of(RBAC, "RoleBinding", cluster.namespace, f"voxlane-operator-{first}-namespaced")
    assert cluster.get(served)["subjects"][0]["namespace"] == first

    # An operator that serves another namespace from now on loses the permissions in the old one.
    output = run("install", "-n", first, "--image", "x")
    assert f"RoleBinding voxlane-operator-{first}-namespaced in {cluster.namespace}: removed" in output
    assert "serves all namespaces\n" in output
    output = run("install", "-n", second, "--serve", team, "--image", "x", rc=1)
    assert f"the operator in {first} already serves all namespaces" in output
    assert f"Restrict it first: voxlane operator install -n {first} --serve NAMESPACE" in output


def _answers(cluster: Cluster, node: str) -> bool:
    """Return whether the API server reaches a node's kubelet, which takes a while for a new node."""
    try:
        return bool(cluster.get(f"{path_of('v1', 'Node', None, node)}/proxy/configz"))
    except ClusterError:
        return False


def test_install_reads_when_kubelets_evict_pods(
    cluster: Cluster,
    kubelet: Kubelet,
    add_node: Callable[..., None],
    namespaces: tuple[str, str, str],
    run: Callable[..., str],
) -> None:
    team, first, _ = namespaces
    arguments = ("install", "-n", first, "--serve", team, "--image", "x")
    assert "leaves 15% of each disk free: the kubelet's default, because no node answers\n" in run(*arguments)
    kubelet.eviction["node-a"] = {"evictionHard": {"nodefs.available": "12.5%", "imagefs.available": "10Gi"}}
    kubelet.eviction["node-b"] = {"evictionSoft": {"nodefs.available": "18%", "memory.available": "90%"}}
    for name in ("node-a", "node-b"):
        add_node(name)
        cluster.patch(path_of("v1", "Node", None, name), {"spec": {"unschedulable": True}})
    wait_for(lambda: all(_answers(cluster, name) for name in ("node-a", "node-b")))
    output = run(*arguments)
    assert f"leaves 18% and {10 << 30} of each disk free: the largest eviction threshold of 2 nodes\n" in output
    container = cluster.get(path_of("apps/v1", "Deployment", first, "voxlane-operator"))["spec"]["template"]["spec"]
    reserves = [word for word in container["containers"][0]["args"] if word.startswith("--disk-reserve")]
    assert reserves == ["--disk-reserve=18%", f"--disk-reserve={10 << 30}"]
    assert "leaves 5Gi of each disk free: as given" in run(*arguments, "--disk-reserve", "5Gi")


def test_install_needs_a_namespace_that_admits_its_pods(
    cluster: Cluster, namespaces: tuple[str, str, str], run: Callable[..., str]
) -> None:
    team, _, second = namespaces
    labels = {ENFORCE_LABEL: "baseline"}
    cluster.patch(path_of("v1", "Namespace", None, team), {"metadata": {"labels": labels}})
    output = run("install", "-n", team, "--serve", team, "--image", "x", rc=1)
    assert f"namespace {team} enforces Pod Security baseline, which refuses pods that make folders on nodes" in output
    assert f"kubectl label namespace {team} {ENFORCE_LABEL}=privileged --overwrite" in output
    assert cluster.find(path_of("apps/v1", "Deployment", team, "voxlane-operator")) is None
    assert "Deployment" in run("install", "-n", second, "--serve", team, "--image", "x")
    assert cluster.get(path_of("v1", "Namespace", None, second))["metadata"]["labels"][ENFORCE_LABEL] == "privileged"


@pytest.mark.cluster
def test_volume_of_a_namespace_is_its_own_and_ends_with_its_datasets(
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    add_node: Callable[..., None],
    emulator: Emulator,
    source: str,
) -> None:
    """Pods read the copy through a claim, which no other namespace can bind, and which is made again if deleted."""
    add_node("node-a")
    operator.start()
    create(cluster, "kits", source, emulator)
    ready = wait_for_phase(cluster, "kits", "Ready")
    claim = path_of("v1", "PersistentVolumeClaim", cluster.namespace, "voxlane-data")
    volume = path_of("v1", "PersistentVolume", None, f"voxlane-data.{cluster.namespace}")
    assert cluster.get(claim)["status"]["phase"] == "Bound"
    assert cluster.get(volume)["spec"]["hostPath"]["path"] == f"/var/lib/voxlane/namespaces/{cluster.namespace}"
    mount = {"name": "data", "mountPath": "/data", "subPath": ready["subPath"], "readOnly": True}
    container = {"name": "main", "image": "x", "command": ["bash", "-c", "ls /data | wc -l; exec sleep 600"]}
    spec = {"restartPolicy": "Never", "containers": [{**container, "volumeMounts": [mount]}]}
    spec |= {"volumes": [{"name": "data", **ready["volume"]}], "affinity": {"nodeAffinity": ready["nodeAffinity"]}}
    cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "reader"}, "spec": spec})
    reader = path_of("v1", "Pod", cluster.namespace, "reader")
    wait_for(
        lambda: b"".join(cluster.stream(f"{reader}/log")).strip() == b"13" if is_running(cluster, reader) else False
    )
    cluster.delete(dataset_path(cluster, "kits"))
    assert wait_for_phase(cluster, "kits", "Deleting")["message"] == "waiting for Pod reader to finish"
    cluster.delete(reader, grace_s=0)
    wait_for(lambda: gone(cluster, "kits"))
    wait_for(lambda: cluster.find(claim) is None and cluster.find(volume) is None)
    create(cluster, "again", source, emulator)
    wait_for_phase(cluster, "again", "Ready")
    cluster.delete(claim)
    wait_for(lambda: cluster.get(volume)["status"].get("phase") == "Released")
    create(cluster, "third", source, emulator)
    wait_for_phase(cluster, "third", "Ready")


def is_running(cluster: Cluster, pod: str) -> bool:
    return bool(cluster.get(pod)["status"].get("phase") == "Running")
