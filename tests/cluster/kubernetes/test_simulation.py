"""The simulated kubelet and JobSet controller behave as the other tests assume."""

from __future__ import annotations

from collections.abc import Callable

from tests.cluster.kubernetes.control_plane import wait_for
from tests.cluster.kubernetes.jobsets import JobSets
from tests.cluster.kubernetes.kubelet import Kubelet
from voxlane.cluster.kubernetes.client import Cluster, Object, path_of


def jobset(name: str, script: str, completions: int = 2, restarts: int = 0) -> Object:
    container = {"name": "main", "image": "x", "command": ["bash", "-c", script]}
    job = {
        "completions": completions,
        "parallelism": completions,
        "completionMode": "Indexed",
        "template": {"spec": {"containers": [container], "restartPolicy": "Never"}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": restarts},
            "replicatedJobs": [{"name": "w", "replicas": 1, "template": {"spec": job}}],
        },
    }


def test_jobset_runs_and_its_logs_can_be_read(
    cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: Callable[..., None]
) -> None:
    add_node("node-a")
    cluster.create(jobset("one", "echo rank $JOB_COMPLETION_INDEX"))
    path = path_of("jobset.x-k8s.io/v1alpha2", "JobSet", cluster.namespace, "one")
    wait_for(lambda: cluster.get(path).get("status", {}).get("terminalState") == "Completed")
    pods = cluster.list(path_of("v1", "Pod", cluster.namespace))
    logs = {
        b"".join(cluster.stream(f"{path_of('v1', 'Pod', cluster.namespace, p['metadata']['name'])}/log")) for p in pods
    }
    assert logs == {b"rank 0", b"rank 1"}


def test_failures_are_counted_and_fail_the_jobset(
    cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: Callable[..., None]
) -> None:
    add_node("node-a")
    cluster.create(jobset("two", "exit 3", completions=1, restarts=1))
    path = path_of("jobset.x-k8s.io/v1alpha2", "JobSet", cluster.namespace, "two")
    wait_for(lambda: cluster.get(path).get("status", {}).get("terminalState") == "Failed")
    assert cluster.get(path)["status"]["restarts"] == 1
