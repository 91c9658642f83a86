"""Diagnoses of apps that are not running, from objects as servers write them, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from voxlane.cluster.kubernetes.app import status
from voxlane.cluster.kubernetes.app.diagnosis import diagnose_app, explain_quota, explain_refused_pod
from voxlane.cluster.kubernetes.app.k8s import AppSnapshot, format_duration, shorten_pod_names
from voxlane.cluster.kubernetes.app.pod_diagnosis import parse_quantity, parse_scheduler_message

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
Object = dict[str, Any]


def time_ago(seconds: int) -> str:
    return datetime.fromtimestamp(NOW.timestamp() - seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def jobset(nodes: int = 2, **more: Any) -> Object:
    labels = more.pop("labels", {})
    return {
        "kind": "JobSet",
        "metadata": {"name": "kits", "uid": "u", "creationTimestamp": time_ago(600), "labels": labels},
        "spec": {
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": {"parallelism": nodes}}}],
            **more.pop("spec", {}),
        },
        "status": more,
    }


def pod(rank: int, phase: str = "Running", **more: Any) -> Object:
    spec = {"containers": [{"name": "node", "image": "registry.example/kits:1", **more.pop("container", {})}]}
    if node := more.pop("node", "n0"):
        spec["nodeName"] = node
    labels = {
        "jobset.sigs.k8s.io/replicatedjob-name": "node",
        "jobset.sigs.k8s.io/replicatedjob-replicas": "1",
        "batch.kubernetes.io/job-completion-index": str(rank),
        **more.pop("labels", {}),
    }
    return {
        "kind": "Pod",
        "metadata": {"name": f"kits-node-0-{rank}-abcde", "uid": f"p{rank}", "labels": labels}
        | {"creationTimestamp": time_ago(500)},
        "spec": {**spec, **more.pop("spec", {})},
        "status": {"phase": phase, "startTime": time_ago(480), **more},
    }


def waiting(reason: str, message: str = "") -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"name": "node", "image": "registry.example/kits:1", "state": state}]}


def terminated(code: int, reason: str = "Error", at: int = 60, **more: Any) -> Object:
    end = {"exitCode": code, "reason": reason, "finishedAt": time_ago(at), **more}
    return {"containerStatuses": [{"name": "node", "state": {"terminated": end}}]}


def unscheduled(rank: int, message: str, **more: Any) -> Object:
    diagnose = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(rank, "Pending", node="", conditions=[diagnose], **more)


def diagnose(**parts: Any) -> str:
    parts.setdefault("workload", jobset())
    return diagnose_app(AppSnapshot(name="kits", namespace="team", taken_at=NOW, **parts)).text


# -- ends --------------------------------------------------------------------------------------------------------------


def test_running_and_ended() -> None:
    two = [pod(0, node="n0"), pod(1, node="n1")]
    assert diagnose(pods=two) == "running: 2 pods on 2 nodes for 8m"
    assert diagnose(workload=None) == "absent: not deployed. Run: voxlane app deploy"
    board = {"kind": "Deployment", "metadata": {"name": "kits-board"}}
    alone = "only its TensorBoard is deployed, no training"
    assert diagnose(workload=None, boards=[board]) == f"starting: {alone}"
    assert diagnose(workload=None, boards=[board], board_pods=[pod(0)]) == f"running: {alone}"
    pulls = pod(0, "Pending", **waiting("ErrImagePull", "denied"))
    assert "the pod of its TensorBoard cannot pull" in diagnose(workload=None, boards=[board], board_pods=[pulls])
    done = [{"type": "Completed", "status": "True", "lastTransitionTime": time_ago(120)}]
    text = diagnose(workload=jobset(conditions=done))
    assert text == "finished: it finished 2m ago (2026-05-04 11:58 UTC), 8m after it was deployed"
    ray = {"kind": "RayJob", "metadata": {"name": "kits", "uid": "u"}, "spec": {}}
    ray["status"] = {
        "jobDeploymentStatus": "Failed",
        "jobStatus": "FAILED",
        "message": "no Dice.",
        "endTime": time_ago(9),
    }
    assert diagnose(workload=ray) == (
        "failed: it failed, 9s ago: no Dice. Its pods are gone; their logs are archived: voxlane app logs"
    )
    ray["status"] = {"jobDeploymentStatus": "ValidationFailed", "message": "The RayJob spec is invalid"}
    assert diagnose(workload=ray).startswith("failed: it failed: The RayJob spec is invalid")


def test_first_crash_is_reported_with_its_last_lines() -> None:
    failed = [
        {"type": "Failed", "status": "True", "message": "reached max restarts", "lastTransitionTime": time_ago(30)}
    ]
    crashes = [pod(0, "Failed", **terminated(134, at=31)), pod(1, "Failed", **terminated(1, at=60))]
    snapshot = AppSnapshot(
        name="kits",
        namespace="team",
        workload=jobset(conditions=failed, restarts=4, restartsCountTowardsMax=3),
        pods=crashes,
        log_tails={"kits-node-0-1-abcde": ["Traceback", "ValueError: x"]},
        taken_at=NOW,
    )
    diagnosis = diagnose_app(snapshot)
    assert diagnosis.text == (
        "failed: pod node-1 crashed with exit code 1, 30s ago (3 of 3 restarts used, and 1 for preemptions)"
    )
    assert diagnosis.log_lines == ("Traceback", "ValueError: x")
    preempted = replace(snapshot, workload=jobset(conditions=failed, restarts=5))
    assert "(0 of 3 restarts used, and 5 for preemptions)" in diagnose_app(preempted).text
    assert "0 of 3" in "\n".join(status.format_status(preempted, diagnosis))
    assert "    | ValueError: x" in status.format_status(snapshot, diagnosis)


def test_crashes() -> None:
    limit = {"resources": {"limits": {"memory": "32Gi"}}}
    oom = pod(1, "Failed", container=limit, **terminated(137, "OOMKilled"))
    assert diagnose(pods=[pod(0), oom]) == (
        "restarting: pod node-1 ran out of memory: its limit is 32Gi, 60s ago; 1 of 2 still run. "
        "Raise resources.memory in app.yaml"
    )
    assert "exit code 139 (SIGSEGV)" in diagnose(pods=[pod(0, "Failed", **terminated(139))])
    assert "exit code 127, 60s ago. The image has no such command" in diagnose(
        pods=[pod(0, "Failed", **terminated(127))]
    )
    looping = waiting("CrashLoopBackOff")
    looping["containerStatuses"][0] |= {"restartCount": 4, "lastState": terminated(2)["containerStatuses"][0]["state"]}
    assert "crashed with exit code 2 (restarted 4 times)" in diagnose(pods=[pod(0, **looping), pod(1)])
    late = jobset(conditions=[{"type": "Failed", "status": "True", "lastTransitionTime": time_ago(5)}])
    job = {"metadata": {"name": "j"}, "status": {"conditions": [{"type": "Failed", "reason": "DeadlineExceeded"}]}}
    assert "exceeded its time limit" in diagnose(workload=late, jobs=[job])


# -- taken away --------------------------------------------------------------------------------------------------------


def test_disruptions() -> None:
    def disrupted(reason: str, message: str = "") -> str:
        target = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        return diagnose(pods=[pod(0, "Failed", conditions=[target]), pod(1)])

    assert "pod node-0 was preempted by pods of higher priority; 1 of 2 still run" in disrupted("PreemptionByScheduler")
    assert "removed from node n0, which does not answer or was tainted" in disrupted("DeletionByTaintManager")
    assert "evicted from node n0, for example by a drain" in disrupted("EvictionByEvictionAPI")
    full = pod(0, "Failed", reason="Evicted", message="The node was low on resource: ephemeral-storage. ")
    assert "evicted from node n0: The node was low on resource: ephemeral-storage" in diagnose(pods=[full])
    nodes = [{"metadata": {"name": "n1"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}]
    assert "pod node-0 is on node n0, which is gone" in diagnose(pods=[pod(0), pod(1, node="n1")], nodes=nodes)
    assert "is on node n1, which does not answer" in diagnose(pods=[pod(1, node="n1")], nodes=nodes, workload=jobset(1))


# -- cannot start ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "explanation"),
    [
        ("manifest unknown", "the registry has no such image. Push it: voxlane app build"),
        ("unexpected status: 401 Unauthorized", "the registry does not let the cluster read it"),
        (
            "dial tcp: lookup registry.example: no such host",
            "the node cannot reach the registry (lookup registry.example:",
        ),
        ("something else", "cannot pull image registry.example/kits:1: something else"),
    ],
)
def test_image_pull_errors(message: str, explanation: str) -> None:
    pods = [
        pod(0, "Pending", **waiting("ErrImagePull", message)),
        pod(1, "Pending", **waiting("ErrImagePull", message)),
    ]
    text = diagnose(pods=pods)
    assert text.startswith("waiting: 2 of 2 pods cannot pull image registry.example/kits:1")
    assert explanation in text


def test_registry_error_is_found_in_the_warnings() -> None:
    event = {"reason": "Failed", "involvedObject": {"uid": "p0"}, "metadata": {}}
    event["message"] = 'Failed to pull image "registry.example/kits:1": not found'
    back = pod(0, "Pending", **waiting("ImagePullBackOff", 'Back-off pulling image "registry.example/kits:1"'))
    assert "the registry has no such image" in diagnose(pods=[back], warnings=[event])


def test_configuration_and_mounts() -> None:
    lacking = pod(0, "Pending", **waiting("CreateContainerConfigError", 'secret "bucket" not found'))
    assert diagnose(pods=[lacking, pod(1)]).startswith(
        "waiting: pod node-0 needs Secret bucket, which does not exist; 1 of 2"
    )
    missing_key = "couldn't find key AWS_ACCESS_KEY_ID in Secret team/bucket"
    lacking = pod(0, "Pending", **waiting("CreateContainerConfigError", missing_key))
    assert "needs key AWS_ACCESS_KEY_ID of Secret bucket, which has no such key" in diagnose(pods=[lacking])
    event = {"reason": "FailedMount", "involvedObject": {"uid": "p0"}, "metadata": {}}
    event["message"] = (
        'MountVolume.SetUp failed for volume "data-0" : hostPath type check failed: /var/x is not a directory'
    )
    creating = pod(0, "Pending", **waiting("ContainerCreating"))
    assert "cannot find folder /var/x on node n0" in diagnose(pods=[creating], warnings=[event])
    started = pod(
        0, "Failed", **terminated(127, "StartError", message='exec: "vox": executable file not found in $PATH')
    )
    assert 'cannot be started: exec: "vox": executable file not found' in diagnose(pods=[started])


# -- no node -----------------------------------------------------------------------------------------------------------


def node(name: str, **has: str) -> Object:
    return {"metadata": {"name": name}, "status": {"allocatable": {"cpu": "8", "memory": "32Gi", **has}}}


def test_unschedulable_pods_name_the_resource() -> None:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    few = [node("a", **{"nvidia.com/gpu": "2"}), node("b")]
    assert diagnose(
        pods=[unscheduled(0, message, container=gpus), unscheduled(1, message, container=gpus)], nodes=few
    ) == (
        "waiting: 2 of 2 pods cannot be scheduled: each pod requests 4 GPUs, but no node has more than 2. "
        "Lower devices_per_node in app.yaml"
    )
    busy = [node("a", **{"nvidia.com/gpu": "8"})]
    assert diagnose(pods=[pod(0, node="a"), unscheduled(1, message, container=gpus)], nodes=busy) == (
        "waiting: pod node-1 cannot be scheduled: 3 nodes with less than 4 GPUs free; 1 of 2 run"
    )
    memory = {"resources": {"requests": {"memory": "64Gi"}}}
    message = (
        "0/4 nodes are available: 1 Insufficient memory, 1 node(s) had taint {gpu: yes}, that the pod didn't tolerate, "
        "2 node(s) were unschedulable. preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling."
    )
    text = diagnose(pods=[unscheduled(0, message, container=memory)], nodes=[node("a")])
    assert "each pod requests 64 GiB memory, but no node has more than 32 GiB; 1 node with the taint gpu=yes" in text
    assert "2 nodes cordoned" in text
    chosen = unscheduled(0, "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.")
    chosen["spec"]["nodeSelector"] = {"pool": "a100"}
    assert "cannot be scheduled: 2 nodes without pool=a100. See node_selector" in diagnose(pods=[chosen])
    apart = "0/2 nodes are available: 2 node(s) didn't match pod affinity/anti-affinity, 2 node(s) didn't match pod "
    assert "already with a pod of this app" in diagnose(pods=[unscheduled(0, apart + "anti-affinity rules.")])
    assert "the cluster has no nodes" in diagnose(pods=[unscheduled(0, "no nodes available to schedule pods")])


def test_scheduler_message_is_parsed() -> None:
    message = "0/5 nodes are available: 1 Insufficient cpu, 2 node(s) had taint {a: b}, that the pod didn't tolerate."
    assert parse_scheduler_message(message) == [
        (1, "Insufficient cpu"),
        (2, "node(s) had taint {a: b}, that the pod didn't tolerate"),
    ]
    assert parse_scheduler_message("pod has unbound immediate PersistentVolumeClaims") == []


def test_unscheduled_pods_wait_for_staging() -> None:
    message = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
    uses = {"staged.voxlane.dev/kits19": "true"}
    half = {"kind": "StagedDataset", "metadata": {"name": "kits19"}}
    half["status"] = {"phase": "Staging", "progress": "40%", "size": "120.0 GiB", "ready": "1/3"}
    pods = [unscheduled(0, message, labels=uses), unscheduled(1, message, labels=uses)]
    assert diagnose(pods=pods, data=[half]) == (
        "staging: 2 of 2 pods are waiting for data kits19: staging at 40% of 120.0 GiB, ready on 1/3 nodes"
    )
    assert diagnose(workload=None, data=[half]).startswith("staging: the training is waiting for data kits19: staging")
    bad = {**half, "status": {"phase": "Failed", "message": "the source holds 2.0 TiB, more than its capacity."}}
    assert diagnose(pods=pods, data=[bad]).endswith(
        "cannot be copied: the source holds 2.0 TiB, more than its capacity"
    )
    assert "there is no StagedDataset of that name" in diagnose(pods=pods, missing_data=["kits19"])
    for claim in ('persistentvolumeclaim "voxlane-data" not found', "pod has unbound immediate PersistentVolumeClaims"):
        early = [unscheduled(0, claim, labels=uses)]
        assert "waiting for data kits19: staging at 40%" in diagnose(pods=early, data=[half])
    ready_data = {**half, "status": {"phase": "Ready"}}
    assert "3 nodes without its data" in diagnose(pods=pods[:1], data=[ready_data])


# -- queue -------------------------------------------------------------------------------------------------------------


def queued(*conditions: Object, **parts: Any) -> str:
    admission = {"metadata": {"name": "w"}, "spec": parts.pop("spec", {}), "status": {"conditions": list(conditions)}}
    admission["status"] |= parts.pop("status", {})
    parts.setdefault("queue", {"metadata": {"name": "gpu"}})
    parts.setdefault("admissions", [admission])
    suspended = jobset(labels={"kueue.x-k8s.io/queue-name": "gpu"}, spec={"suspend": True})
    return diagnose(workload=suspended, **parts)


def test_queued_app() -> None:
    reserved_condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending"}
    lacking = "insufficient unused quota for nvidia.com/gpu in flavor a100, 6 more needed"
    reserved_condition["message"] = f"couldn't assign flavors to pod set node: {lacking}"
    assert (
        queued(reserved_condition)
        == "queued: it is waiting for quota in queue gpu: 6 more nvidia.com/gpu needed in flavor a100"
    )
    put_back = {
        "type": "Evicted",
        "status": "True",
        "message": "Preempted to accommodate x",
        "lastTransitionTime": time_ago(90),
    }
    assert queued(reserved_condition, put_back).endswith("a100. It was evicted 90s ago: Preempted to accommodate x")
    assert "queue gpu does not exist in namespace team" in queued(queue=None)
    stopped = {"metadata": {"name": "gpu"}, "status": {"conditions": [{"type": "Active", "status": "False"}]}}
    stopped["status"]["conditions"][0]["message"] = "Can't submit new workloads to clusterQueue"
    assert "queue gpu is not active: Can't submit new" in queued(queue=stopped)
    assert "Check that Kueue runs and manages JobSets" in queued(admissions=[])
    check = {"admissionChecks": [{"name": "prov", "state": "Pending", "message": "nodes are coming."}]}
    reserved = {"type": "QuotaReserved", "status": "True"}
    assert queued(reserved, status=check).endswith("is waiting for the check prov: nodes are coming")
    assert "Kueue has removed it from queue gpu" in queued(spec={"active": False})
    assert "kubectl -n team patch jobset kits" in diagnose(workload=jobset(spec={"suspend": True}))


def test_quota_messages() -> None:
    message = "insufficient quota for cpu in flavor default, request > maximum capacity (10 > 9)"
    assert explain_quota(f"couldn't assign flavors to pod set main: {message}") == (
        "it requests 10 cpu, but flavor default has a total quota of 9"
    )
    message = "previously considered podsets requests (0) + current podset request (4) > maximum capacity (2)"
    assert explain_quota(f"insufficient quota for nvidia.com/gpu in flavor spot, {message}").startswith(
        "it requests 4 nvidia.com/gpu"
    )
    assert explain_quota("anything else.") == "anything else"


def test_no_pods() -> None:
    event = {"reason": "FailedCreate", "involvedObject": {"uid": "u"}, "metadata": {}}
    event["message"] = (
        'Error creating: pods "x" is forbidden: exceeded quota: team, requested: cpu=8, used: cpu=60, limited: cpu=64'
    )
    assert diagnose(warnings=[event]) == (
        "waiting: no pods can be created: "
        "the namespace's quota team is used up (requested cpu=8, used cpu=60, limit cpu=64)"
    )
    assert "but has no pods. Check that the controller of JobSets runs" in diagnose()
    assert explain_refused_pod('error looking up service account team/trainer: serviceaccount "trainer" not found') == (
        "service account trainer does not exist"
    )


# -- table -------------------------------------------------------------------------------------------------------------


def test_many_pods_are_counted() -> None:
    pods = [pod(i, node=f"n{i % 60}") for i in range(498)] + [pod(498, "Failed", **terminated(1)), pod(499)]
    snapshot = AppSnapshot(name="kits", namespace="team", workload=jobset(500), pods=pods)
    rows = status.build_rows(snapshot)
    assert [(r.name, r.state, r.node) for r in rows if r.kind == "pods"] == [
        ("499 of 500", "Running", "60 nodes"),
        ("1 of 500", "Error (exit code 1)", "1 node"),
    ]
    assert [r.name for r in rows if r.kind == "pod"] == ["node-498"]


def test_table_has_no_empty_columns() -> None:
    assert status.format_table([("A", "B", "C"), ("x", "", "yy"), ("xxx", "", "y")]) == ["A    C", "x    yy", "xxx  y"]


def test_formatting_and_parsing() -> None:
    assert [format_duration(s) for s in (5, 119, 125, 7200, 7380, 86400 * 3)] == [
        "5s",
        "119s",
        "2m",
        "2h",
        "2h 3m",
        "3d",
    ]
    assert [parse_quantity(q) for q in ("500m", "2", "1Ki", 3, "1e3")] == [0.5, 2, 1024, 3, 1000]
    restarted = [pod(0), {**pod(0), "metadata": {**pod(0)["metadata"], "name": "kits-node-0-0-fghij"}}]
    assert sorted(shorten_pod_names(restarted, "kits").values()) == ["node-0-0-abcde", "node-0-0-fghij"]
