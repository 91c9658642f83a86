"""An app's whole life, with real parts: data staged onto nodes, two pods that train one network, a node that
is drained in the middle, logs that outlive the pods."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import Bucket
from tests.kube.jobsets import JobSets
from tests.kube.kubelet import Kubelet
from tests.kube.test_operator import Operator
from tests.kube.test_operator import operator as operator
from tests.kube.test_played import wait_for
from tests.train.test_fit import TINY, fold_with_cases
from tests.volume import made
from voxlane.kube.client import Cluster, path_of, path_of_object
from voxlane.volume.prepared import Prepared

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def voxlane(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "voxlane", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_staged_trained_drained_finished(
    cluster: Cluster,
    kubelet: Kubelet,
    operator: Operator,
    jobsets: JobSets,
    add_node: Callable[..., None],
    gcs: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("node-a", "node-b", "node-c"):
        add_node(name)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", str(gcs.config.endpoint))
    source = made.put(gcs, made.kits(), "scans/")
    made.prepared(source, f"{gcs.uri}/data", gcs.config)
    fold = fold_with_cases(Prepared.load(f"{gcs.uri}/data", gcs.config))

    operator.start()
    folder = tmp_path / "kits"
    voxlane("app", "init", "kits", "--dir", str(folder))
    (folder / "train.yaml").write_text(
        yaml.safe_dump({**TINY, "fold": fold, "batch": 4, "epochs": 6, "steps_per_epoch": 40})
    )
    (folder / "app.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "kits",
                "template": "jobset",
                "image": "here:1",
                "train": {"data": f"{gcs.uri}/data", "run": f"{gcs.uri}/run", "config": "train.yaml"},
                "nodes": 2,
                "resources": {"cpu": 1, "memory": "4Gi"},
                "restarts": 0,
                "credentials": {"endpoint": gcs.config.endpoint},
                "stage": [{"name": "data", "source": f"{gcs.uri}/data", "capacity": "1Gi"}],
            }
        )
    )
    print(voxlane("app", "deploy", str(folder), "-n", cluster.namespace))
    print(voxlane("app", "status", str(folder), "-n", cluster.namespace))
    pods = path_of("v1", "Pod", cluster.namespace)

    def training() -> list[str]:
        every = cluster.list(pods, labels="voxlane.dev/app=kits,voxlane.dev/part=job")
        return [pod["metadata"]["name"] for pod in every if pod["status"].get("phase") == "Running"]

    wait_for(lambda: gcs.store.exists("run/history.json"), 100)
    first = training()
    assert len(first) == 2
    hosts = {cluster.get(f"{pods}/{name}")["spec"]["nodeName"] for name in first}
    assert len(hosts) == 2, "one pod a node"
    drained = next(name for name in first if "-0-1-" in name)
    cluster.delete(f"{pods}/{drained}")
    jobset = path_of("jobset.x-k8s.io/v1alpha2", "JobSet", cluster.namespace, "kits")
    wait_for(lambda: cluster.get(jobset)["status"].get("restarts") == 1, 60)
    wait_for(lambda: cluster.get(jobset)["status"].get("terminalState"), 200)
    print(voxlane("app", "status", str(folder), "-n", cluster.namespace))
    assert cluster.get(jobset)["status"]["terminalState"] == "Completed"
    history = json.loads(bytes(gcs.store.get("run/history.json")))
    assert [entry["step"] for entry in history] == [40 * n for n in range(1, 7)]
    assert {entry["ranks"] for entry in history} == {2}
    said = voxlane("app", "logs", str(folder), "-n", cluster.namespace)
    assert "epoch 6 of 6" in said
    print(voxlane("app", "undeploy", str(folder), "-n", cluster.namespace))
    kept = voxlane("app", "logs", str(folder), "-n", cluster.namespace)
    assert "stopped by SIGTERM" in kept, "what the first pods said"
    assert "epoch 6 of 6" in kept
    left = cluster.list(pods) + cluster.list(path_of("voxlane.dev/v1alpha1", "StagedDataset", cluster.namespace))
    assert [path_of_object(one) for one in left] == []
    assert list(kubelet.root.glob("*/var/lib/voxlane/datasets/*")) == []


def test_loading_is_measured_and_kept_in_the_bucket(
    cluster: Cluster,
    kubelet: Kubelet,
    jobsets: JobSets,
    add_node: Callable[..., None],
    gcs: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("node-a", "node-b"):
        add_node(name)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", str(gcs.config.endpoint))
    made.prepared(made.put(gcs, made.kits(), "scans/"), f"{gcs.uri}/data", gcs.config)
    folder = tmp_path / "bench"
    voxlane("app", "init", "bench", "--dir", str(folder))
    loading = ["voxlane", "bench", "loading", f"{gcs.uri}/data", "--steps", 4, "--batch", 1, "--step-time", 0.02]
    (folder / "app.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "bench",
                "template": "jobset",
                "image": "here:1",
                "command": loading,
                "run": f"{gcs.uri}/bench",
                "nodes": 2,
                "devices_per_node": 2,
                "resources": {"cpu": 1, "memory": "4Gi"},
                "restarts": 0,
                "credentials": {"endpoint": gcs.config.endpoint},
            }
        )
    )
    print(voxlane("app", "deploy", str(folder), "-n", cluster.namespace))
    jobset = path_of("jobset.x-k8s.io/v1alpha2", "JobSet", cluster.namespace, "bench")
    wait_for(lambda: cluster.get(jobset).get("status", {}).get("terminalState"), 200)
    said = voxlane("app", "logs", str(folder), "-n", cluster.namespace)
    assert cluster.get(jobset)["status"]["terminalState"] == "Completed", said
    assert "samples/s" in said
    found = json.loads(bytes(gcs.store.get("bench/loading-bench.json")))
    assert (found["setting"]["nodes"], found["setting"]["ranks"]) == (2, 2)
    assert [(node["node"], node["samples"]) for node in found["epochs"][0]["nodes"]] == [(0, 8), (1, 8)]
    assert bytes(gcs.store.get("bench/loading-bench.png")).startswith(b"\x89PNG")
    print(voxlane("app", "undeploy", str(folder), "-n", cluster.namespace))
