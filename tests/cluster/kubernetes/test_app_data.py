"""Apps with staged data: deploy waits for it and rolls it back on failure; undeploy keeps it or hands it over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kubernetes.control_plane import wait_for
from tests.cluster.kubernetes.test_app_deploy import AddNode, Vox, list_everything, write
from voxlane.cluster.kubernetes.app import deploy
from voxlane.cluster.kubernetes.client import Cluster, path_of
from voxlane.cluster.kubernetes.operator.crd import CRD

STAGED = "voxlane.dev/v1alpha1"
DATA = {"name": "kits19", "source": "gs://bucket/kits19"}


@pytest.fixture
def data(cluster: Cluster) -> Callable[..., None]:
    """Simulate the operator: set the status of a StagedDataset once it exists."""
    cluster.apply(CRD)
    wait_for(lambda: cluster.serves(STAGED, "StagedDataset"))

    def say(name: str = "kits19", **status: Any) -> None:
        path = path_of(STAGED, "StagedDataset", cluster.namespace, name)
        wait_for(lambda: cluster.find(path))
        cluster.patch(path, {"status": {"observedGeneration": 9, **status}}, subresource="status")

    return say


def test_deploy_waits_for_data_and_undeploy_removes_it(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None]
) -> None:
    add_node("node-a")
    write(nodes=1, stage=[DATA])

    def operate() -> None:
        data(phase="Staging", progress="40%", size="1.0 GiB", ready="0/1")
        wait_for(lambda: "staging: the training is waiting for data kits19: staging at 40%" in diagnose())
        time.sleep(2 * deploy._POLL_S)
        data(message="node-a: ErrImagePull")
        wait_for(lambda: "staging: the training is waiting for data kits19: staging at 40%" in diagnose())
        time.sleep(2 * deploy._POLL_S)
        data(phase="Ready", ready="1/1", progress="100%")

    def diagnose() -> str:
        from voxlane.cluster.kubernetes.app.diagnosis import diagnose_app
        from voxlane.cluster.kubernetes.app.snapshot import take_snapshot

        return diagnose_app(take_snapshot(cluster, "demo")).text

    operator = threading.Thread(target=operate)
    operator.start()
    output = vox("deploy")
    operator.join()
    assert "data kits19: Staging 40%\n" in output
    assert "data kits19: Staging 40% (node-a: ErrImagePull)" in output
    assert output.index("StagedDataset kits19: on 1/1 nodes, 1.0 GiB") < output.index("JobSet demo: created")
    assert "data    kits19  Ready on 1/1 nodes, 1.0 GiB" in vox("status")
    output = vox("undeploy")
    assert "StagedDataset kits19: removed" in output
    assert list_everything(cluster) == []


def test_data_that_cannot_be_staged_leaves_nothing(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node("node-a")
    write(nodes=1, stage=[DATA])
    command_line = "the source holds 2.0 TiB, more than its capacity of 1.0 TiB."
    operator = threading.Thread(target=lambda: data(phase="Failed", message=command_line))
    operator.start()
    output = vox("deploy", rc=1)
    operator.join()
    assert "StagedDataset kits19: the data cannot be staged: the source holds 2.0 TiB" in output
    assert "StagedDataset kits19: removed again" in output
    assert list_everything(cluster) == []
    monkeypatch.setattr(deploy, "_OPERATOR_TIMEOUT_S", 1.0)
    assert "no operator has picked this up for 1 s. Check that voxlane's operator runs" in vox("deploy", rc=1)
    assert list_everything(cluster) == []


@pytest.mark.parametrize("numbers", [["INT"], ["TERM"], ["HUP"], ["TERM", "TERM"]], ids="-".join)
def test_interrupted_deploy_leaves_nothing(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None], numbers: list[str]
) -> None:
    add_node("node-a")
    write(nodes=1, stage=[DATA])
    command_line = [sys.executable, "-m", "voxlane", "app", "deploy", "-n", cluster.namespace]
    process = subprocess.Popen(
        command_line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
    )
    data(phase="Staging", progress="10%")
    for number in numbers:
        process.send_signal(signal.Signals[f"SIG{number}"])
        time.sleep(0.03)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130 or len(numbers) > 1, output
    assert "StagedDataset kits19: removed again" in output or "HUP" in numbers  # after SIGHUP, nobody reads the output
    assert "Traceback" not in output
    assert list_everything(cluster) == []


def test_failed_deploy_restores_existing_objects(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a second deploy fails, the files and data of the first are restored and new objects are removed."""
    add_node("node-a")
    Path("space.yaml").write_text("optimizer: {lr: {loguniform: [0.001, 0.1]}}\n")
    tune = {"space": "space.yaml", "data": "gs://bucket/kits19", "run": "gs://bucket/search"}
    fields = {"command": ..., "template": "rayjob", "nodes": 1, "tune": tune}
    write(**fields)
    vox("deploy")
    config = path_of("v1", "ConfigMap", cluster.namespace, "demo-config")
    first = cluster.get(config)
    ray = path_of("ray.io/v1", "RayJob", cluster.namespace, "demo")
    ended = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
    cluster.patch(ray, {"status": ended}, subresource="status")
    Path("space.yaml").write_text("optimizer: {lr: {loguniform: [0.01, 0.1]}}\n")
    write(**fields, stage=[DATA])
    monkeypatch.setattr(deploy, "_OPERATOR_TIMEOUT_S", 1.0)
    output = vox("deploy", rc=1)
    assert "ConfigMap demo-config: restored" in output
    assert cluster.get(config)["data"] == first["data"]
    assert list_everything(cluster) == ["ConfigMap demo-config", "RayJob demo"]
    assert "would be changed" in vox("deploy", "--dry-run")
    operator = threading.Thread(target=lambda: data(phase="Ready", ready="1/1"))
    operator.start()
    assert "RayJob demo: removed" in vox("deploy")
    operator.join()
    assert cluster.get(config)["data"] != first["data"]


def test_with_another_source_the_old_job_ends_first_and_a_failure_reports_it(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None]
) -> None:
    add_node("node-a")
    write(nodes=1, run="gs://bucket/run", stage=[DATA])
    vox("deploy", "--no-wait")
    data(phase="Failed", message="no such bucket")
    write(nodes=1, run="gs://bucket/run", stage=[{**DATA, "source": "gs://bucket/other"}])
    output = vox("deploy", "--replace", rc=1)
    assert output.index("the old job ends first") < output.index("JobSet demo: removed")
    assert output.index("JobSet demo: removed") < output.index("StagedDataset kits19: changed")
    assert "StagedDataset kits19: restored" in output
    assert (
        "JobSet demo: the previous one has ended. `voxlane app deploy` with its app.yaml starts it again, and its run "
        "gs://bucket/run continues\n"
    ) in output
    assert list_everything(cluster) == ["StagedDataset kits19"]
    data(phase="Ready", ready="1/1")
    assert "StagedDataset kits19: changed" in vox("deploy")
    # With the same source, the old job runs until the data is ready, so an earlier failure does not end it.
    data(phase="Failed", message="no such bucket")
    write(nodes=1, run="gs://bucket/run", stage=[{**DATA, "source": "gs://bucket/other", "timeout": "3h"}])
    output = vox("deploy", "--replace", rc=1)
    assert "has ended" not in output
    assert list_everything(cluster) == ["JobSet demo", "StagedDataset kits19"]


def test_deploy_waits_for_data_that_is_being_removed(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None]
) -> None:
    add_node("node-a")
    write(nodes=1, stage=[DATA])
    path = path_of(STAGED, "StagedDataset", cluster.namespace, "kits19")

    def fail() -> None:
        wait_for(lambda: cluster.find(path))
        cluster.patch(path, {"metadata": {"finalizers": ["voxlane.dev/staged"]}})
        data(phase="Failed", message="no such bucket")

    def go() -> None:
        time.sleep(1)
        data(phase="Deleting", message="removes its copies from node-a")
        time.sleep(1.5)
        old = cluster.get(path)["metadata"]["uid"]
        cluster.patch(path, {"metadata": {"finalizers": []}})
        wait_for(lambda: (cluster.find(path) or {"metadata": {"uid": old}})["metadata"]["uid"] != old)
        data(phase="Ready", ready="1/1")

    operator = threading.Thread(target=fail)
    operator.start()
    output = vox("deploy", rc=1)
    operator.join()
    assert "StagedDataset kits19: is being removed" in output
    assert "removed again" not in output
    write(nodes=1, stage=[{**DATA, "source": "gs://bucket/right"}])
    output = vox("deploy", "--timeout", "1s", rc=1)
    assert "StagedDataset kits19: the old one is still being removed after 1s: waits for the operator" in output
    operator = threading.Thread(target=go)
    operator.start()
    output = vox("deploy", "--timeout", "1m")
    operator.join()
    assert "StagedDataset kits19: waits until the old one is gone (removes its copies from node-a)" in output
    assert output.index("StagedDataset kits19: created") < output.index("JobSet demo: created")
    assert cluster.get(path)["spec"]["source"] == "gs://bucket/right"


def test_data_whose_status_changes_can_be_changed(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status may change while the image is built, between the plan and the change."""
    add_node("node-a")
    write(nodes=1, stage=[DATA])
    vox("deploy", "--no-wait")
    monkeypatch.setattr(
        "voxlane.cluster.kubernetes.app.build.ensure_image", lambda *_, **__: data(phase="Ready", ready="1/1")
    )
    write(nodes=1, stage=[{**DATA, "timeout": "3h"}])
    assert "StagedDataset kits19: changed" in vox("deploy", "--replace")
    existing = cluster.get(path_of(STAGED, "StagedDataset", cluster.namespace, "kits19"))
    assert (existing["spec"]["timeout"], existing["status"]["phase"]) == ("3h", "Ready")


def test_data_of_another_app_is_shared_and_handed_over(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None]
) -> None:
    add_node("node-a")
    write(nodes=1, stage=[DATA])
    vox("deploy", "--no-wait")
    write(name="second", nodes=1, stage=[DATA])
    data(phase="Ready", ready="1/1")
    assert "StagedDataset kits19: already exists (app demo)" in vox("deploy")
    write(name="third", nodes=1, stage=[{**DATA, "source": "gs://bucket/other"}])
    assert "exists with another source: gs://bucket/kits19" in vox("deploy", rc=1)
    for shared in (DATA, {"name": "kits19"}):
        write(name="third", nodes=2, stage=[shared])
        assert "StagedDataset kits19 is on 1 node, but the app runs on 2" in vox("deploy", rc=1)
        write(name="third", nodes=1, stage=[{**shared, "data_path": "/fast"}])
        assert "StagedDataset kits19 is below /var/lib/voxlane, but the app expects it below /fast" in vox(
            "deploy", rc=1
        )
    write(name="third", nodes=1, stage=[{"name": "nothing"}])
    assert "StagedDataset nothing does not exist" in vox("deploy", rc=1)
    assert "stays: data kits19, which second uses" in vox("undeploy", "demo")
    assert list_everything(cluster) == ["JobSet second", "StagedDataset kits19"]
    output = vox("undeploy", "--all")
    assert "StagedDataset kits19: removed" in output
    assert list_everything(cluster) == []


def test_data_with_keep_is_not_removed(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None]
) -> None:
    add_node("node-a")
    write(nodes=1, run="gs://bucket/run", stage=[{**DATA, "keep": True}])
    vox("deploy", "--no-wait")
    assert "stays: data kits19 (keep: true); the run gs://bucket/run" in vox("undeploy")
    assert list_everything(cluster) == ["StagedDataset kits19"]
