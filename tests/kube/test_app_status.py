"""Sentences about real objects: what the real scheduler says of pods, and pods whose status a test sets."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.kube.jobsets import JobSets
from tests.kube.kubelet import Kubelet
from tests.kube.test_app_deploy import AddNode, Vox, write
from tests.kube.test_played import wait_for
from voxlane.app.look import look, now
from voxlane.app.status import text
from voxlane.app.why import verdict
from voxlane.kube.client import Cluster, Object, path_of, path_of_object
from voxlane.testing import Emulator

KUEUE = "kueue.x-k8s.io/v1beta2"
JOBSET = "jobset.x-k8s.io/v1alpha2"


def pods(cluster: Cluster) -> list[Object]:
    return cluster.list(path_of("v1", "Pod", cluster.namespace), labels="voxlane.dev/app=demo")


def set_status(cluster: Cluster, thing: Object, **status: Any) -> None:
    cluster.patch(path_of_object(thing, cluster.namespace), {"status": status}, subresource="status")


def test_why_the_scheduler_finds_no_node(vox: Vox, cluster: Cluster, jobsets: JobSets, add_node: AddNode) -> None:
    add_node("node-a", cpu=4, gpus=2)
    write(nodes=2, device="gpu", devices_per_node=4)
    assert "asks for 4 nvidia.com/gpu on each node, and none has more than 2: it will wait" in vox("deploy")
    wait_for(lambda: "2 of 2 pods find no node" in vox("status"))
    said = vox("status")
    assert "each pod asks for 4 GPUs and no node has more than 2. Lower devices_per_node" in said
    write(nodes=2, resources={"cpu": 1})
    vox("deploy", "--replace")
    wait_for(lambda: "finds no node: 1 node already with a pod of this app" in vox("status"))


def test_why_it_waits_in_its_queue(vox: Vox, cluster: Cluster, jobsets: JobSets, add_node: AddNode) -> None:
    add_node("node-a")
    write(nodes=1, queue="gpu")
    assert "queue gpu does not exist" in vox("deploy", rc=1)
    queue = {"apiVersion": KUEUE, "kind": "LocalQueue", "metadata": {"name": "gpu"}, "spec": {"clusterQueue": "team"}}
    cluster.create(queue)
    vox("deploy")
    assert "queued: it waits in queue gpu, and Kueue has not looked at it" in vox("status")
    app = cluster.get(path_of(JOBSET, "JobSet", cluster.namespace, "demo"))
    owner = {"apiVersion": JOBSET, "kind": "JobSet", "name": "demo", "uid": app["metadata"]["uid"]}
    meta = {"name": "jobset-demo-1", "labels": {"kueue.x-k8s.io/job-uid": app["metadata"]["uid"]}}
    made = cluster.create(
        {"apiVersion": KUEUE, "kind": "Workload", "metadata": {**meta, "ownerReferences": [owner]}, "spec": {}}
    )
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    short = "couldn't assign flavors to pod set node: insufficient unused quota for cpu in flavor a, 3 more needed"
    waits = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": short}
    set_status(cluster, made, conditions=[{**waits, "lastTransitionTime": moment}])
    said = vox("status")
    assert "queued: it waits for quota in queue gpu: 3 more cpu needed in flavor a" in said
    assert "queue   gpu   app waits for quota" in said
    cluster.patch(path_of_object(app), {"spec": {"suspend": False}})
    yes = {"status": "True", "reason": "Admitted", "message": "x", "lastTransitionTime": moment}
    set_status(cluster, made, conditions=[{**yes, "type": "QuotaReserved"}, {**yes, "type": "Admitted"}])
    assert wait_for(lambda: "app admitted" in (said := vox("status")) and "suspended" not in said)


@pytest.mark.parametrize(
    ("state", "said"),
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
def test_what_nodes_say_of_containers(
    vox: Vox, cluster: Cluster, jobsets: JobSets, add_node: AddNode, state: Object, said: str
) -> None:
    add_node("node-a")
    write(nodes=1, restarts=0, resources={"memory": "4Gi"})
    vox("deploy")
    pod = wait_for(lambda: next((one for one in pods(cluster) if "nodeName" in one["spec"]), None))
    one = {"name": "node", "image": "registry.example/team/demo:1", "imageID": "", "ready": False, "restartCount": 0}
    phase = "Failed" if "terminated" in state else "Pending"
    set_status(cluster, pod, phase=phase, containerStatuses=[{**one, "state": state}])
    seen = look(cluster, "demo")
    assert said in "\n".join(text(seen, verdict(seen, now()), now()))


def test_a_lost_node(vox: Vox, cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: AddNode) -> None:
    add_node("node-a")
    write(nodes=1)
    vox("deploy")
    wait_for(lambda: "running: 1 pod" in vox("status"))
    kubelet.lose("node-a")
    pod = pods(cluster)[0]
    gone = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    set_status(cluster, pod, conditions=[gone])  # as the node controller says, which this control plane does not run
    assert "pod node-0 is on node node-a, which does not answer" in vox("status")


def test_logs_of_pods_that_are_gone(
    vox: Vox, cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: AddNode, emulator: Emulator
) -> None:
    """From the run's bucket: while the app's pods are gone, and after all of it is."""
    add_node("node-a")
    write("echo hello from $PET_NODE_RANK", nodes=1, run="gs://bkt/run", credentials={"endpoint": emulator.url})
    vox("deploy")
    wait_for(lambda: "finished: it finished" in vox("status"), 60)
    assert "node-0 | hello from 0" in vox("logs")
    for pod in pods(cluster):
        cluster.delete(path_of_object(pod), grace_s=0)
    where = ("--endpoint", emulator.url)
    assert vox("logs", *where) == "node-0 | hello from 0\n"
    assert "no pod 'node-9'" in vox("logs", "--pod", "node-9", *where, rc=1)
    assert "stays: the run gs://bkt/run" in vox("undeploy")
    assert vox("logs", "--tail", "1", "--since", "1h", *where) == "node-0 | hello from 0\n"


def test_all_apps(vox: Vox, cluster: Cluster, jobsets: JobSets, add_node: AddNode, tmp_path: Any) -> None:
    assert vox("status") == f"no apps in namespace {cluster.namespace}\n"
    add_node("node-a", cpu=2)
    write(nodes=1, resources={"cpu": 1})
    vox("deploy")
    write(name="large", nodes=1, resources={"cpu": 3})
    vox("deploy")
    (tmp_path / "app" / "app.yaml").unlink()
    wait_for(lambda: "asks for 3 cpu" in vox("status"))
    said = vox("status").splitlines()
    assert said[0].split() == ["APP", "KIND", "STATE", "AGE", "WHY"]
    assert [line.split()[:2] for line in said[1:]] == [["demo", "JobSet"], ["large", "JobSet"]]
    assert "There are: demo, large" in vox("status", "nothing", rc=1)
    assert "there is no app here" in vox("undeploy", rc=1)


@pytest.mark.cluster
def test_status_of_500_pods_takes_less_than_two_seconds(cluster: Cluster, add_node: AddNode) -> None:
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

    def make(number: int) -> None:
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
        one = {"name": "node", "image": "x", "imageID": "", "ready": True, "restartCount": 0}
        started = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        ready = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
        said = {"phase": "Running", "conditions": ready, "startTime": "2026-01-01T00:00:00Z"}
        set_status(cluster, pod, **said, containerStatuses=[{**one, "state": started}])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(500)))
    fresh = Cluster.connect(namespace=cluster.namespace)
    begun = time.monotonic()
    seen = look(fresh, "demo")
    lines = text(seen, verdict(seen, now()), now())
    took = time.monotonic() - begun
    cluster.request("DELETE", path_of("v1", "Pod", cluster.namespace), {"gracePeriodSeconds": 0})
    assert lines[0].startswith("demo: running: 500 pods on 10 nodes")
    assert any("500 of 500" in line and "Running" in line for line in lines)
    assert len(lines) < 10
    assert took < 2.0, took


def test_a_command_is_not_mistaken_for_an_app(vox: Vox) -> None:
    assert "no command was given" in vox("exec", "demo", rc=1)
    assert "no command was given" in vox("exec", "--", rc=1)
    assert "'soon' is no time" in vox("logs", "demo", "--since", "soon", rc=1)
    assert "--tail -1" in vox("logs", "demo", "--tail", "-1", rc=1)
    assert "Leave --follow" in vox("logs", "demo", "--kept", "-f", rc=1)
    assert "not deployed" in vox("logs", "demo", rc=1)
    assert "not deployed" in vox("exec", "demo", "--", "ls", rc=1)
    assert "no events of app demo" in vox("events", "demo")
    assert "Give one of them" in vox("undeploy", "demo", "--all", rc=1)
