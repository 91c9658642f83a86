"""A complete training app with real parts: data staged on nodes, two pods that train one network, a node that is
drained in the middle, and logs that outlive the pods."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cluster.kubernetes.control_plane import wait_for
from tests.cluster.kubernetes.jobsets import JobSets
from tests.cluster.kubernetes.kubelet import Kubelet
from tests.cluster.kubernetes.test_operator import Operator
from tests.cluster.kubernetes.test_operator import operator as operator
from tests.conftest import Bucket
from tests.train.test_fit import TINY, fold_with_cases
from tests.volume import sample_data
from voxlane.cluster.kubernetes.client import Cluster, path_of, path_of_object
from voxlane.volume.prepared_dataset import Prepared

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def run_voxlane(*command_line: str) -> str:
    done = subprocess.run([sys.executable, "-m", "voxlane", *command_line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stage_train_drain_and_finish(
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
    source = sample_data.upload(gcs, sample_data.make_kits19(), "scans/")
    sample_data.prepare_dataset(source, f"{gcs.uri}/data", gcs.config)
    fold = fold_with_cases(Prepared.load(f"{gcs.uri}/data", gcs.config))

    operator.start()
    folder = tmp_path / "kits"
    run_voxlane("app", "init", "kits", "--dir", str(folder))
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
    print(run_voxlane("app", "deploy", str(folder), "-n", cluster.namespace))
    print(run_voxlane("app", "status", str(folder), "-n", cluster.namespace))
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
    print(run_voxlane("app", "status", str(folder), "-n", cluster.namespace))
    assert cluster.get(jobset)["status"]["terminalState"] == "Completed"
    history = json.loads(bytes(gcs.store.get("run/history.json")))
    assert [entry["step"] for entry in history] == [40 * n for n in range(1, 7)]
    assert {entry["ranks"] for entry in history} == {2}
    output = run_voxlane("app", "logs", str(folder), "-n", cluster.namespace)
    assert "epoch 6 of 6" in output
    print(run_voxlane("app", "undeploy", str(folder), "-n", cluster.namespace))
    archived = run_voxlane("app", "logs", str(folder), "-n", cluster.namespace)
    assert "stopped by SIGTERM" in archived, "what the first pods said"
    assert "epoch 6 of 6" in archived
    left = cluster.list(pods) + cluster.list(path_of("voxlane.dev/v1alpha1", "StagedDataset", cluster.namespace))
    assert [path_of_object(item) for item in left] == []
    assert list(kubelet.root.glob("*/var/lib/voxlane/datasets/*")) == []


def test_loading_benchmark_stores_its_result_in_the_bucket(
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
    sample_data.prepare_dataset(
        sample_data.upload(gcs, sample_data.make_kits19(), "scans/"), f"{gcs.uri}/data", gcs.config
    )
    folder = tmp_path / "bench"
    run_voxlane("app", "init", "bench", "--dir", str(folder))
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
    print(run_voxlane("app", "deploy", str(folder), "-n", cluster.namespace))
    jobset = path_of("jobset.x-k8s.io/v1alpha2", "JobSet", cluster.namespace, "bench")
    wait_for(lambda: cluster.get(jobset).get("status", {}).get("terminalState"), 200)
    output = run_voxlane("app", "logs", str(folder), "-n", cluster.namespace)
    assert cluster.get(jobset)["status"]["terminalState"] == "Completed", output
    assert "samples/s" in output
    objects = json.loads(bytes(gcs.store.get("bench/loading-bench.json")))
    assert (objects["setting"]["nodes"], objects["setting"]["ranks"]) == (2, 2)
    assert [(node["node"], node["samples"]) for node in objects["epochs"][0]["nodes"]] == [(0, 8), (1, 8)]
    assert bytes(gcs.store.get("bench/loading-bench.png")).startswith(b"\x89PNG")
    print(run_voxlane("app", "undeploy", str(folder), "-n", cluster.namespace))
