"""Apps against a real API server and scheduler: deployed whole or not at all, read, removed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.jobsets import JobSets
from tests.kube.kubelet import Kubelet
from tests.kube.test_played import wait_for
from voxlane.app.undeploy import KINDS
from voxlane.kube.client import Cluster, path_of
from voxlane.operator.crd import CRD

JOBSET = "jobset.x-k8s.io/v1alpha2"
STAGED = "voxlane.dev/v1alpha1"
AddNode = Callable[..., None]
Vox = Callable[..., str]


def write(script: str = "echo hello from $PET_NODE_RANK; exec sleep 60", **fields: Any) -> None:
    """An app.yaml in the working folder."""
    app = {"name": "demo", "image": "registry.example/team/demo:1", "command": ["bash", "-c", script], "nodes": 2}
    app |= {"grace_s": 10, "shared_memory": None, **fields}
    Path("app.yaml").write_text(yaml.safe_dump({k: v for k, v in app.items() if v is not ...}))


def everything(cluster: Cluster) -> list[str]:
    """Kind and name of all that an app may make."""
    kinds = {**KINDS, "Pod": "v1"}
    found = [one for kind, version in kinds.items() for one in cluster.list(path_of(version, kind, cluster.namespace))]
    ours = [one for one in found if one["metadata"]["name"] != "kube-root-ca.crt"]
    return sorted(
        f"{one['kind']} {one['metadata']['name']}" for one in ours if "deletionTimestamp" not in one["metadata"]
    )


@pytest.fixture
def staging(cluster: Cluster) -> None:
    """The cluster knows StagedDatasets."""
    cluster.apply(CRD)
    wait_for(lambda: cluster.serves(STAGED, "StagedDataset"))


def set_status(cluster: Cluster, name: str, **status: Any) -> None:
    path = path_of(STAGED, "StagedDataset", cluster.namespace, name)
    cluster.patch(path, {"status": {"observedGeneration": 9, **status}}, subresource="status")


# -- a life ------------------------------------------------------------------------------------------------------------


def test_a_whole_life(vox: Vox, cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: AddNode) -> None:
    add_node("node-a")
    add_node("node-b")
    write()
    assert "not deployed" in vox("status", rc=1)
    said = vox("deploy")
    assert "JobSet demo: created" in said
    assert "voxlane app logs -f" in said
    wait_for(lambda: "running: 2 pods on 2 nodes" in vox("status"))
    table = vox("status")
    assert [line.split()[:2] for line in table.splitlines()[4:]] == [
        ["JobSet", "demo"],
        ["pod", "node-0"],
        ["pod", "node-1"],
    ]
    rows = json.loads(vox("status", "--json"))["rows"]
    assert sorted(row["node"] for row in rows if row["kind"] == "pod") == ["node-a", "node-b"]
    assert wait_for(lambda: "node-1 | hello from 1" in vox("logs") and vox("logs", "--pod", "node-0", "--tail", "1"))
    assert "no pod 'node-7'. There are: node-0, node-1" in vox("logs", "--pod", "node-7", rc=1)
    assert "hello there" in vox("exec", "--", "echo", "hello there")
    assert (
        vox("exec", "demo", "--pod", "node-1", "--", "bash", "-c", "echo rank $PET_NODE_RANK; exit 5", rc=5)
        == "rank 1\n"
    )
    assert "could not be run" in vox("exec", "--", "no-such-command", rc=1)
    assert "Successfully assigned" in vox("events")
    assert "it is deployed already (running: 2 pods" in vox("deploy", rc=1)
    cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "of-somebody-else"}})
    said = vox("undeploy", "demo")
    assert "JobSet demo: removed, with 2 pods" in said
    assert everything(cluster) == ["ConfigMap of-somebody-else"]
    assert "There are no apps" in vox("undeploy", "demo", rc=1)
    assert kubelet.processes() == []


def test_a_crash_is_told_and_its_logs_stay(
    vox: Vox, cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: AddNode
) -> None:
    add_node("node-a")
    write("echo Traceback; echo ValueError: no labels; exit 3", nodes=1, restarts=0)
    said = vox("deploy", "--follow", rc=1)
    assert "node-0 | ValueError: no labels" in said
    assert "voxlane: failed: pod node-0 crashed with exit code 3" in said
    said = vox("status")
    assert "    | ValueError: no labels" in said
    write("echo fine", nodes=1)
    said = vox("deploy", "-f")  # what has ended is replaced without being asked
    assert "JobSet demo: removed" in said
    assert "node-0 | fine" in said
    assert "finished: it finished" in vox("status")


def test_restarts_keep_the_lines_together(
    vox: Vox, cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: AddNode
) -> None:
    add_node("node-a")
    write("for i in 1 2 3; do echo line $i; sleep 0.6; done; exit 1", nodes=1, restarts=1)
    said = vox("deploy", "-f", rc=1)
    assert [line.split(" | ")[1] for line in said.splitlines() if " | line" in line] == 2 * [
        "line 1",
        "line 2",
        "line 3",
    ]
    assert "(1 of 1 restarts used)" in said


# -- nothing half-made -------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_and_nothing_is_made(vox: Vox, cluster: Cluster, add_node: AddNode) -> None:
    add_node("node-a")
    write(
        queue="gpu",
        node_selector={"pool": "a100"},
        run="s3://bucket/run",
        credentials={"secret": "bucket"},
        priority_class="x",
    )
    said = vox("deploy", rc=1)
    assert "app demo: it cannot be deployed, for 4 reasons" in said
    assert f"Secret bucket does not exist in namespace {cluster.namespace}" in said
    assert "--from-literal=AWS_ACCESS_KEY_ID=..." in said
    assert "no node has the labels that the app asks for (pool=a100)" in said
    assert "priority class x does not exist" in said
    assert f"queue gpu does not exist in namespace {cluster.namespace}. There are none" in said
    assert everything(cluster) == []
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket"}, "data": {"KEY": "c2VjcmV0"}})
    write(run="s3://bucket/run", credentials={"secret": "bucket"})
    said = vox("deploy", rc=1)
    assert "Secret bucket has no key AWS_ACCESS_KEY_ID and none AWS_SECRET_ACCESS_KEY. It has: KEY" in said
    assert "c2VjcmV0" not in said
    assert "Run: kubectl create secret docker-registry pull -n" in _refused(vox, pull_secret="pull")
    assert "Secret bucket has no key .dockerconfigjson" in _refused(vox, pull_secret="bucket")
    assert "service account trainer does not exist" in _refused(vox, credentials={"service_account": "trainer"})
    assert everything(cluster) == []


def _refused(vox: Vox, **fields: Any) -> str:
    write(**fields)
    return vox("deploy", rc=1)


def test_a_namespace_or_cluster_that_is_not_there(vox: Vox, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    write(namespace="nowhere")
    assert "namespace nowhere does not exist. Run: kubectl create" in vox("deploy", "-n", "nowhere", rc=1)
    broken = Path("kubeconfig").absolute()
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    broken.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(broken))
    assert "https://127.0.0.1:1: the cluster does not answer" in vox("deploy", rc=1)
    config["users"][0]["user"]["token"] = "wrong"
    config["clusters"][0]["cluster"]["server"] = cluster._api.configuration.host
    broken.write_text(yaml.safe_dump(config))
    assert "does not know these credentials. Log in again" in vox("status", rc=1)
    del config["clusters"][0]["cluster"]["insecure-skip-tls-verify"]
    broken.write_text(yaml.safe_dump(config))
    assert "its certificate is not one that kubeconfig trusts" in vox("status", rc=1)
    assert "no cluster is configured" in vox("status", "--context", "other", rc=1)
    monkeypatch.setenv("KUBECONFIG", "/no/such/file")
    assert "no cluster is configured" in vox("status", rc=1)


def test_a_user_who_may_too_little(
    vox: Vox, cluster: Cluster, add_node: AddNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node("node-a")
    _become_reader(cluster, monkeypatch)
    write(nodes=1)
    said = vox("deploy", rc=1)
    assert f"you may not create, delete jobsets.jobset.x-k8s.io in namespace {cluster.namespace}" in said
    assert "nodes was not checked: you may not read it" in said
    assert "not deployed" in vox("status", rc=1)
    assert everything(Cluster.connect(namespace=cluster.namespace, context="admin")) == []


def test_a_user_who_may_jobsets_alone_can_undo_what_they_did(
    vox: Vox, cluster: Cluster, add_node: AddNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node("node-a")
    rules = [{"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["*"]}]
    rules += [{"apiGroups": ["", "batch"], "resources": ["pods", "events", "jobs"], "verbs": ["get", "list"]}]
    _become_reader(cluster, monkeypatch, rules)
    write(nodes=1)
    assert "JobSet demo: created" in vox("deploy")
    vox("events")
    said = vox("undeploy")
    assert "JobSet demo: removed" in said
    assert "you may not list them: RayJob, TrainJob" in said
    assert everything(Cluster.connect(namespace=cluster.namespace, context="admin")) == []


def _become_reader(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, rules: list[Any] | None = None) -> None:
    """From now on, this process is a service account that may read in the test's namespace, or what `rules` say."""
    kinds = ["jobs", "jobsets", "rayjobs", "trainjobs", "pods", "events", "deployments", "configmaps", "stageddatasets"]
    rules = rules or [{"apiGroups": ["*"], "resources": kinds, "verbs": ["get", "list"]}]
    account = {"kind": "ServiceAccount", "name": "reader", "namespace": cluster.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    rbac = "rbac.authorization.k8s.io/v1"
    cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader"}})
    cluster.create({"apiVersion": rbac, "kind": "Role", "metadata": {"name": "reader"}, "rules": rules})
    cluster.create(
        {
            "apiVersion": rbac,
            "kind": "RoleBinding",
            "metadata": {"name": "reader"},
            "subjects": [account],
            "roleRef": role,
        }
    )
    path = f"{path_of('v1', 'ServiceAccount', cluster.namespace, 'reader')}/token"
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
    token = cluster.request("POST", path, asked)["status"]["token"]
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    config["users"].append({"name": "reader", "user": {"token": token}})
    config["contexts"].append({"name": "reader", "context": {"cluster": "test", "user": "reader"}})
    config["contexts"].append({"name": "admin", "context": {"cluster": "test", "user": "admin"}})
    config["current-context"] = "reader"
    Path("kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(Path("kubeconfig").absolute()))


def test_a_kind_that_the_cluster_does_not_have(vox: Vox, cluster: Cluster, add_node: AddNode) -> None:
    add_node("node-a")
    path = path_of("apiextensions.k8s.io/v1", "CustomResourceDefinition", None, "jobsets.jobset.x-k8s.io")
    kept = cluster.get(path)
    cluster.delete(path)
    try:
        wait_for(lambda: not cluster.serves(JOBSET, "JobSet"))
        write(nodes=1)
        said = vox("deploy", rc=1)
        assert "the cluster has no JobSet (jobset.x-k8s.io/v1alpha2). Install it: kubectl apply --server-side" in said
        assert everything(cluster) == []
    finally:
        kept["metadata"] = {"name": kept["metadata"]["name"], "annotations": kept["metadata"].get("annotations", {})}
        wait_for(lambda: cluster.find(path) is None)
        cluster.create({key: value for key, value in kept.items() if key != "status"})
        wait_for(lambda: cluster.serves(JOBSET, "JobSet"))


def test_what_the_server_refuses_leaves_nothing(vox: Vox, cluster: Cluster, add_node: AddNode, staging: None) -> None:
    add_node("node-a")
    cluster.request("POST", f"/api/v1/namespaces/{cluster.namespace}/resourcequotas", _QUOTA)
    write(nodes=1, stage=[{"name": "kits19", "source": "gs://bucket/kits19"}])
    said = vox("deploy", "--no-wait", rc=1)
    assert "JobSet demo: the cluster refuses it" in said or "exceeded quota" in said, said
    assert everything(cluster) == []


_QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "none"},
    "spec": {"hard": {"count/jobsets.jobset.x-k8s.io": "0"}},
}
