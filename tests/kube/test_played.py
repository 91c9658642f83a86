"""The played kubelet and JobSet controller do what the tests beside this one rely on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.kube.jobsets import JobSets
from tests.kube.kubelet import Kubelet
from voxlane.kube.client import Cluster, Object, path_of


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What it returns as soon as that is true."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it did not come to be"
        time.sleep(0.05)
    return found


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


def test_a_jobset_runs_and_its_logs_are_read(
    cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: Callable[..., None]
) -> None:
    add_node("node-a")
    cluster.create(jobset("one", "echo rank $JOB_COMPLETION_INDEX"))
    where = path_of("jobset.x-k8s.io/v1alpha2", "JobSet", cluster.namespace, "one")
    wait_for(lambda: cluster.get(where).get("status", {}).get("terminalState") == "Completed")
    pods = cluster.list(path_of("v1", "Pod", cluster.namespace))
    said = {
        b"".join(cluster.stream(f"{path_of('v1', 'Pod', cluster.namespace, p['metadata']['name'])}/log")) for p in pods
    }
    assert said == {b"rank 0", b"rank 1"}


def test_failures_are_counted_and_end_it(
    cluster: Cluster, kubelet: Kubelet, jobsets: JobSets, add_node: Callable[..., None]
) -> None:
    add_node("node-a")
    cluster.create(jobset("two", "exit 3", completions=1, restarts=1))
    where = path_of("jobset.x-k8s.io/v1alpha2", "JobSet", cluster.namespace, "two")
    wait_for(lambda: cluster.get(where).get("status", {}).get("terminalState") == "Failed")
    assert cluster.get(where)["status"]["restarts"] == 1
