"""Diagnoses of real objects: messages of the real scheduler, and pods whose status the test sets."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.cluster.kubernetes.control_plane import wait_for
from tests.cluster.kubernetes.jobsets import JobSets
from tests.cluster.kubernetes.kubelet import Kubelet
from tests.cluster.kubernetes.test_app_deploy import AddNode, Vox, write
from voxlane.cluster.kubernetes.app.diagnosis import diagnose_app
from voxlane.cluster.kubernetes.app.snapshot import take_snapshot
from voxlane.cluster.kubernetes.app.status import format_status
from voxlane.cluster.kubernetes.client import Cluster, Object, path_of, path_of_object
from voxlane.testing import Emulator

KUEUE = "kueue.x-k8s.io/v1beta2"
JOBSET = "jobset.x-k8s.io/v1alpha2"


def pods(cluster: Cluster) -> list[Object]:
    return cluster.list(path_of("v1", "Pod", cluster.namespace), labels="voxlane.dev/app=demo")


def set_status(cluster: Cluster, thing: Object, **status: Any) -> None:
    cluster.patch(path_of_object(thing, cluster.namespace), {"status": status}, subresource="status")


def test_unschedulable_pods(vox: Vox, cluster: Cluster, jobsets: JobSets, add_node: AddNode) -> None:
    add_node("node-a", cpu=4, gpus=2)
    write(nodes=2, device="gpu", devices_per_node=4)
    assert "requests 4 nvidia.com/gpu on each node, but none has more than 2: it will wait" in vox("deploy")
    wait_for(lambda: "2 of 2 pods cannot be scheduled" in vox("status"))
    output = vox("status")
    assert "each pod requests 4 GPUs, but no node has more than 2. Lower devices_per_node" in output
    write(nodes=2, resources={"cpu": 1})
    vox("deploy", "--replace")
    wait_for(lambda: "cannot be scheduled: 1 node already with a pod of this app" in vox("status"))


def test_queued_app(vox: Vox, cluster: Cluster, jobsets: JobSets, add_node: AddNode) -> None:
    add_node("node-a")
    write(nodes=1, queue="gpu")
    assert "queue gpu does not exist" in vox("deploy", rc=1)
    queue = {"apiVersion": KUEUE, "kind": "LocalQueue", "metadata": {"name": "gpu"}, "spec": {"clusterQueue": "team"}}
    cluster.create(queue)
    vox("deploy")
    assert "queued: it is waiting in queue gpu, and Kueue has not picked it up" in vox("status")
    app = cluster.get(path_of(JOBSET, "JobSet", cluster.namespace, "demo"))
    owner = {"apiVersion": JOBSET, "kind": "JobSet", "name": "demo", "uid": app["metadata"]["uid"]}
    meta = {"name": "jobset-demo-1", "labels": {"kueue.x-k8s.io/job-uid": app["metadata"]["uid"]}}
    workload = cluster.create(
        {"apiVersion": KUEUE, "kind": "Workload", "metadata": {**meta, "ownerReferences": [owner]}, "spec": {}}
    )
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    quota_message = (
        "couldn't assign flavors to pod set node: insufficient unused quota for cpu in flavor a, 3 more needed"
    )
    reserved = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": quota_message}
    set_status(cluster, workload, conditions=[{**reserved, "lastTransitionTime": moment}])
    output = vox("status")
    assert "queued: it is waiting for quota in queue gpu: 3 more cpu needed in flavor a" in output
    assert "queue   gpu   app waits for quota" in output
    cluster.patch(path_of_object(app), {"spec": {"suspend": False}})
    yes = {"status": "True", "reason": "Admitted", "message": "x", "lastTransitionTime": moment}
    set_status(cluster, workload, conditions=[{**yes, "type": "QuotaReserved"}, {**yes, "type": "Admitted"}])
    assert wait_for(lambda: "app admitted" in (output := vox("status")) and "suspended" not in output)


@pytest.mark.parametrize(
    ("state", "output"),
    [
        (
            {"waiting": {"reason": "ErrImagePull", "message": "rpc error: manifest unknown"}},
            "cannot pull image registry.example/team/demo:1: the registry has no such image",
        ),
        (
            {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "bucket" not found'}},
            "needs Secret bucket, which does not exist",
        ),
        (
            {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
            "ran out of memory: its limit is 4Gi",
        ),
        (
            {"terminated": {"reason": "Error", "exitCode": 1, "message": "ValueError: no labels\n"}},
            "crashed with exit code 1\n    | ValueError: no labels",
        ),
    ],
)
def test_container_states(
    vox: Vox, cluster: Cluster, jobsets: JobSets, add_node: AddNode, state: Object, output: str
) -> None:
    add_node("node-a")
    write(nodes=1, restarts=0, resources={"memory": "4Gi"})
    vox("deploy")
    pod = wait_for(lambda: next((container for container in pods(cluster) if "nodeName" in container["spec"]), None))
    container = {
        "name": "node",
        "image": "registry.example/team/demo:1",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
    }
    phase = "Failed" if "terminated" in state else "Pending"
    set_status(cluster, pod, phase=phase, containerStatuses=[{**container, "state": state}])
    snapshot = take_snapshot(cluster, "demo")
    assert output in "\n".join(format_status(snapshot, diagnose_app(snapshot)))


def test_lost_node(vox: Vox, cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: AddNode) -> None:
    add_node("node-a")
    write(nodes=1)
    vox("deploy")
    wait_for(lambda: "running: 1 pod" in vox("status"))
    kubelet.lose("node-a")
    pod = pods(cluster)[0]
    gone = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    set_status(cluster, pod, conditions=[gone])  # as the node controller would, which this control plane does not run
    assert "pod node-0 is on node node-a, which does not answer" in vox("status")


def test_logs_of_deleted_pods(
    vox: Vox, cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: AddNode, emulator: Emulator
) -> None:
    """Logs come from the run's bucket once the pods, or the whole app, are gone."""
    add_node("node-a")
    write("echo hello from $PET_NODE_RANK", nodes=1, run="gs://bkt/run", credentials={"endpoint": emulator.url})
    vox("deploy")
    wait_for(lambda: "finished: it finished" in vox("status"), 60)
    assert "node-0 | hello from 0" in vox("logs")
    for pod in pods(cluster):
        cluster.delete(path_of_object(pod), grace_s=0)
    store_options = ("--endpoint", emulator.url)
    assert vox("logs", *store_options) == "node-0 | hello from 0\n"
    assert "no pod 'node-9'" in vox("logs", "--pod", "node-9", *store_options, rc=1)
    assert "stays: the run gs://bkt/run" in vox("undeploy")
    assert vox("logs", "--tail", "1", "--since", "1h", *store_options) == "node-0 | hello from 0\n"


def test_status_of_all_apps(vox: Vox, cluster: Cluster, jobsets: JobSets, add_node: AddNode, tmp_path: Any) -> None:
    assert vox("status") == f"no apps in namespace {cluster.namespace}\n"
    add_node("node-a", cpu=2)
    write(nodes=1, resources={"cpu": 1})
    vox("deploy")
    write(name="large", nodes=1, resources={"cpu": 3})
    vox("deploy")
    (tmp_path / "app" / "app.yaml").unlink()
    wait_for(lambda: "requests 3 cpu" in vox("status"))
    output = vox("status").splitlines()
    assert output[0].split() == ["APP", "KIND", "STATE", "AGE", "WHY"]
    assert [line.split()[:2] for line in output[1:]] == [["demo", "JobSet"], ["large", "JobSet"]]
    assert "There are: demo, large" in vox("status", "nothing", rc=1)
    assert "there is no app here" in vox("undeploy", rc=1)


@pytest.mark.cluster
def test_status_of_500_pods_takes_less_than_two_seconds_of_processor_time(cluster: Cluster, add_node: AddNode) -> None:
    for number in range(10):
        add_node(f"node-{number}", cpu=100)
    labels = {"app.kubernetes.io/managed-by": "voxlane", "voxlane.dev/app": "demo", "voxlane.dev/part": "job"}
    job = {"parallelism": 500, "completions": 500, "template": {"spec": {"containers": [], "restartPolicy": "Never"}}}
    cluster.create(
        {
            "apiVersion": JOBSET,
            "kind": "JobSet",
            "metadata": {"name": "demo", "labels": labels},
            "spec": {"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}]},
        }
    )

    def create_pod(number: int) -> None:
        pod = cluster.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"demo-node-0-{number}-abcde", "labels": labels},
                "spec": {
                    "nodeName": f"node-{number % 10}",
                    "restartPolicy": "Never",
                    "containers": [{"name": "node", "image": "x", "env": [{"name": "A", "value": "b" * 500}]}],
                },
            }
        )
        container = {"name": "node", "image": "x", "imageID": "", "ready": True, "restartCount": 0}
        started = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        ready = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
        output = {"phase": "Running", "conditions": ready, "startTime": "2026-01-01T00:00:00Z"}
        set_status(cluster, pod, **output, containerStatuses=[{**container, "state": started}])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create_pod, range(500)))
    fresh = Cluster.connect(namespace=cluster.namespace)
    started_s = time.process_time()
    snapshot = take_snapshot(fresh, "demo")
    lines = format_status(snapshot, diagnose_app(snapshot))
    took_s = time.process_time() - started_s
    cluster.request("DELETE", path_of("v1", "Pod", cluster.namespace), {"gracePeriodSeconds": 0})
    assert lines[0].startswith("demo: running: 500 pods on 10 nodes")
    assert any("500 of 500" in line and "Running" in line for line in lines)
    assert len(lines) < 10
    assert took_s < 2.0


def test_wrong_arguments(vox: Vox) -> None:
    assert "missing COMMAND after --" in vox("exec", "demo", rc=2)
    assert "missing COMMAND after --" in vox("exec", "--", rc=2)
    assert "expected a duration such as 2h or 30m, got 'soon'" in vox("logs", "demo", "--since", "soon", rc=1)
    assert "--tail: " in vox("logs", "demo", "--tail", "-1", rc=1)
    assert "Leave --follow" in vox("logs", "demo", "--kept", "-f", rc=1)
    assert "not deployed" in vox("logs", "demo", rc=1)
    assert "not deployed" in vox("exec", "demo", "--", "ls", rc=1)
    assert "no events of app demo" in vox("events", "demo")
    assert "Give one of them" in vox("undeploy", "demo", "--all", rc=1)
