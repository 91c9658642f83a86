"""Deploy, inspect and undeploy apps with a real API server and scheduler."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.kubernetes.control_plane import wait_for
from tests.cluster.kubernetes.jobsets import JobSets
from tests.cluster.kubernetes.kubelet import Kubelet
from voxlane.cluster.kubernetes.app.undeploy import KINDS
from voxlane.cluster.kubernetes.client import Cluster, path_of
from voxlane.cluster.kubernetes.operator.crd import CRD
from voxlane.errors import ClusterError

JOBSET = "jobset.x-k8s.io/v1alpha2"
STAGED = "voxlane.dev/v1alpha1"
AddNode = Callable[..., None]
Vox = Callable[..., str]


def write(script: str = "echo hello from $PET_NODE_RANK; exec sleep 60", **fields: Any) -> None:
    """Write an app.yaml into the working folder."""
    app = {"name": "demo", "image": "registry.example/team/demo:1", "command": ["bash", "-c", script], "nodes": 2}
    app |= {"grace_s": 10, "shared_memory": None, **fields}
    Path("app.yaml").write_text(yaml.safe_dump({k: v for k, v in app.items() if v is not ...}))


def list_everything(cluster: Cluster) -> list[str]:
    """Return the kind and name of all objects that an app may create."""
    kinds = {**KINDS, "Job": "batch/v1", "Service": "v1", "Pod": "v1"}
    existing = [
        item for kind, version in kinds.items() for item in cluster.list(path_of(version, kind, cluster.namespace))
    ]
    own_objects = [item for item in existing if item["metadata"]["name"] != "kube-root-ca.crt"]
    return sorted(
        f"{item['kind']} {item['metadata']['name']}"
        for item in own_objects
        if "deletionTimestamp" not in item["metadata"]
    )


@pytest.fixture
def staging(cluster: Cluster) -> None:
    """Install the StagedDataset kind in the cluster."""
    cluster.apply(CRD)
    wait_for(lambda: cluster.serves(STAGED, "StagedDataset"))


def set_status(cluster: Cluster, name: str, **status: Any) -> None:
    path = path_of(STAGED, "StagedDataset", cluster.namespace, name)
    cluster.patch(path, {"status": {"observedGeneration": 9, **status}}, subresource="status")


# -- a life ------------------------------------------------------------------------------------------------------------


def test_deploy_inspect_and_undeploy(
    vox: Vox, cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: AddNode
) -> None:
    add_node("node-a")
    add_node("node-b")
    write()
    assert "not deployed" in vox("status", rc=1)
    output = vox("deploy")
    assert "JobSet demo: created" in output
    assert "voxlane app logs -f" in output
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
    assert "it is already deployed (running: 2 pods" in vox("deploy", rc=1)
    cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "of-somebody-else"}})
    output = vox("undeploy", "demo")
    assert "JobSet demo: removed, with 2 pods" in output
    assert list_everything(cluster) == ["ConfigMap of-somebody-else"]
    assert "There are no apps" in vox("undeploy", "demo", rc=1)
    assert kubelet.processes() == []


def test_crash_is_diagnosed_and_its_logs_remain(
    vox: Vox, cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: AddNode
) -> None:
    add_node("node-a")
    write("echo Traceback; echo ValueError: no labels; exit 3", nodes=1, restarts=0)
    output = vox("deploy", "--follow", rc=1)
    assert "node-0 | ValueError: no labels" in output
    assert "voxlane: failed: pod node-0 crashed with exit code 3" in output
    output = vox("status")
    assert "    | ValueError: no labels" in output
    write("echo fine", nodes=1)
    output = vox("deploy", "-f")  # an app that has ended is replaced without --replace
    assert "JobSet demo: removed" in output
    assert "node-0 | fine" in output
    assert "finished: it finished" in vox("status")


def test_followed_logs_continue_over_restarts(
    vox: Vox, cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: AddNode
) -> None:
    add_node("node-a")
    write("for i in 1 2 3; do echo line $i; sleep 0.6; done; exit 1", nodes=1, restarts=1)
    output = vox("deploy", "-f", rc=1)
    assert [line.split(" | ")[1] for line in output.splitlines() if " | line" in line] == 2 * [
        "line 1",
        "line 2",
        "line 3",
    ]
    assert "(1 of 1 restarts used)" in output


# -- nothing half-made -------------------------------------------------------------------------------------------------


def test_preflight_names_what_is_missing_and_creates_nothing(vox: Vox, cluster: Cluster, add_node: AddNode) -> None:
    add_node("node-a")
    write(
        queue="gpu",
        node_selector={"pool": "a100"},
        run="s3://bucket/run",
        credentials={"secret": "bucket"},
        priority_class="x",
    )
    output = vox("deploy", rc=1)
    assert "app demo: it cannot be deployed, for 4 reasons" in output
    assert f"Secret bucket does not exist in namespace {cluster.namespace}" in output
    assert "--from-literal=AWS_ACCESS_KEY_ID=..." in output
    assert "no node has the labels that the app requires (pool=a100)" in output
    assert "priority class x does not exist" in output
    assert f"queue gpu does not exist in namespace {cluster.namespace}. There are none" in output
    assert list_everything(cluster) == []
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket"}, "data": {"KEY": "c2VjcmV0"}})
    write(run="s3://bucket/run", credentials={"secret": "bucket"})
    output = vox("deploy", rc=1)
    assert "Secret bucket has no key AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY. It has: KEY" in output
    assert "c2VjcmV0" not in output
    assert "Run: kubectl create secret docker-registry pull -n" in _deploy_and_fail(vox, pull_secret="pull")
    assert "Secret bucket has no key .dockerconfigjson" in _deploy_and_fail(vox, pull_secret="bucket")
    assert "service account trainer does not exist" in _deploy_and_fail(vox, credentials={"service_account": "trainer"})
    assert list_everything(cluster) == []


def _deploy_and_fail(vox: Vox, **fields: Any) -> str:
    write(**fields)
    return vox("deploy", rc=1)


def test_missing_namespace_or_cluster(vox: Vox, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "does not accept these credentials. Log in again" in vox("status", rc=1)
    del config["clusters"][0]["cluster"]["insecure-skip-tls-verify"]
    broken.write_text(yaml.safe_dump(config))
    assert "kubeconfig does not trust the certificate of the cluster" in vox("status", rc=1)
    assert "no cluster is configured" in vox("status", "--context", "other", rc=1)
    monkeypatch.setenv("KUBECONFIG", "/no/such/file")
    assert "no cluster is configured" in vox("status", rc=1)


def test_user_without_permissions(
    vox: Vox, cluster: Cluster, add_node: AddNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node("node-a")
    _become_reader(cluster, monkeypatch)
    write(nodes=1)
    output = vox("deploy", rc=1)
    assert f"you may not create, delete jobsets.jobset.x-k8s.io in namespace {cluster.namespace}" in output
    assert "nodes was not checked: you may not read it" in output
    assert "not deployed" in vox("status", rc=1)
    assert list_everything(Cluster.connect(namespace=cluster.namespace, context="admin")) == []


def test_user_with_only_jobsets_can_undeploy(
    vox: Vox, cluster: Cluster, add_node: AddNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node("node-a")
    rules = [{"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["*"]}]
    rules += [{"apiGroups": ["", "batch"], "resources": ["pods", "events", "jobs"], "verbs": ["get", "list"]}]
    _become_reader(cluster, monkeypatch, rules)
    write(nodes=1)
    assert "JobSet demo: created" in vox("deploy")
    vox("events")
    output = vox("undeploy")
    assert "JobSet demo: removed" in output
    assert "you may not list them: RayJob, TrainJob" in output
    assert list_everything(Cluster.connect(namespace=cluster.namespace, context="admin")) == []


def _become_reader(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, rules: list[Any] | None = None) -> None:
    """Become a service account that may only read in the test's namespace, or do what `rules` allow."""
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
    token_request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
    token = cluster.request("POST", path, token_request)["status"]["token"]
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    config["users"].append({"name": "reader", "user": {"token": token}})
    config["contexts"].append({"name": "reader", "context": {"cluster": "test", "user": "reader"}})
    config["contexts"].append({"name": "admin", "context": {"cluster": "test", "user": "admin"}})
    config["current-context"] = "reader"
    Path("kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(Path("kubeconfig").absolute()))


def test_missing_kind(vox: Vox, cluster: Cluster, add_node: AddNode) -> None:
    add_node("node-a")
    path = path_of("apiextensions.k8s.io/v1", "CustomResourceDefinition", None, "jobsets.jobset.x-k8s.io")
    remaining = cluster.get(path)
    cluster.delete(path)
    try:
        wait_for(lambda: not cluster.serves(JOBSET, "JobSet"))
        write(nodes=1)
        output = vox("deploy", rc=1)
        assert "the cluster has no JobSet (jobset.x-k8s.io/v1alpha2). Install it: kubectl apply --server-side" in output
        assert list_everything(cluster) == []
    finally:
        remaining["metadata"] = {
            "name": remaining["metadata"]["name"],
            "annotations": remaining["metadata"].get("annotations", {}),
        }
        wait_for(lambda: cluster.find(path) is None)
        cluster.create({key: value for key, value in remaining.items() if key != "status"})
        wait_for(lambda: cluster.serves(JOBSET, "JobSet"))


def test_object_that_the_server_rejects_leaves_nothing(
    vox: Vox, cluster: Cluster, add_node: AddNode, staging: None
) -> None:
    add_node("node-a")
    forbid_jobsets(cluster)
    write(nodes=1, stage=[{"name": "kits19", "source": "gs://bucket/kits19"}])
    output = vox("deploy", "--no-wait", rc=1)
    assert "JobSet demo: the cluster rejects it" in output or "exceeded quota" in output, output
    assert list_everything(cluster) == []


def forbid_jobsets(cluster: Cluster) -> None:
    """Create a quota of no JobSets, and wait until the API server enforces it: its quotas come from a cache, and one
    whose status the controller manager has not filled in yet is ignored."""
    cluster.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "none"},
            "spec": {"hard": {"count/jobsets.jobset.x-k8s.io": "0"}},
        }
    )
    probe = {"apiVersion": JOBSET, "kind": "JobSet", "metadata": {"name": "probe"}, "spec": {"replicatedJobs": []}}

    def is_enforced() -> bool:
        try:
            cluster.create(probe, dry_run=True)
        except ClusterError as error:
            return "quota" in str(error)
        return False

    wait_for(is_enforced)
