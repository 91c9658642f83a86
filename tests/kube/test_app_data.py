"""Apps with staged data: waited for, taken back when the deploy fails, kept or handed over when the app goes."""

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

from tests.kube.test_app_deploy import AddNode, Vox, everything, write
from tests.kube.test_played import wait_for
from voxlane.app import deploy
from voxlane.kube.client import Cluster, path_of
from voxlane.operator.crd import CRD

STAGED = "voxlane.dev/v1alpha1"
DATA = {"name": "kits19", "source": "gs://bucket/kits19"}


@pytest.fixture
def data(cluster: Cluster) -> Callable[..., None]:
    """Plays the operator: sets a StagedDataset's status, once it is there."""
    cluster.apply(CRD)
    wait_for(lambda: cluster.serves(STAGED, "StagedDataset"))

    def say(name: str = "kits19", **status: Any) -> None:
        path = path_of(STAGED, "StagedDataset", cluster.namespace, name)
        wait_for(lambda: cluster.find(path))
        cluster.patch(path, {"status": {"observedGeneration": 9, **status}}, subresource="status")

    return say


def test_data_is_waited_for_and_goes_with_the_app(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None]
) -> None:
    add_node("node-a")
    write(nodes=1, stage=[DATA])

    def operate() -> None:
        data(phase="Staging", progress="40%", size="1.0 GiB", ready="0/1")
        wait_for(lambda: "staging: the training waits for data kits19: staging at 40%" in look())
        time.sleep(2 * deploy._POLL_S)
        data(message="node-a: ErrImagePull")
        wait_for(lambda: "staging: the training waits for data kits19: staging at 40%" in look())
        time.sleep(2 * deploy._POLL_S)
        data(phase="Ready", ready="1/1", progress="100%")

    def look() -> str:
        from voxlane.app.look import look, now
        from voxlane.app.why import verdict

        return verdict(look(cluster, "demo"), now()).text

    operator = threading.Thread(target=operate)
    operator.start()
    said = vox("deploy")
    operator.join()
    assert "data kits19: Staging 40%\n" in said
    assert "data kits19: Staging 40% (node-a: ErrImagePull)" in said
    assert said.index("StagedDataset kits19: on 1/1 nodes, 1.0 GiB") < said.index("JobSet demo: created")
    assert "data    kits19  Ready on 1/1 nodes, 1.0 GiB" in vox("status")
    said = vox("undeploy")
    assert "StagedDataset kits19: removed" in said
    assert everything(cluster) == []


def test_data_that_cannot_be_staged_leaves_nothing(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node("node-a")
    write(nodes=1, stage=[DATA])
    words = "the source holds 2.0 TiB, more than its capacity of 1.0 TiB."
    operator = threading.Thread(target=lambda: data(phase="Failed", message=words))
    operator.start()
    said = vox("deploy", rc=1)
    operator.join()
    assert "StagedDataset kits19: the data cannot be staged: the source holds 2.0 TiB" in said
    assert "StagedDataset kits19: removed again" in said
    assert everything(cluster) == []
    monkeypatch.setattr(deploy, "_OPERATOR_S", 1.0)
    assert "nobody has looked at it for 1 s. Check that voxlane's operator runs" in vox("deploy", rc=1)
    assert everything(cluster) == []


@pytest.mark.parametrize("numbers", [["INT"], ["TERM"], ["HUP"], ["TERM", "TERM"]], ids="-".join)
def test_an_interrupted_deploy_leaves_nothing(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None], numbers: list[str]
) -> None:
    add_node("node-a")
    write(nodes=1, stage=[DATA])
    words = [sys.executable, "-m", "voxlane", "app", "deploy", "-n", cluster.namespace]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    data(phase="Staging", progress="10%")
    for number in numbers:
        process.send_signal(signal.Signals[f"SIG{number}"])
        time.sleep(0.03)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130 or len(numbers) > 1, said
    assert "StagedDataset kits19: removed again" in said or "HUP" in numbers  # nobody is there to read it
    assert "Traceback" not in said
    assert everything(cluster) == []


def test_what_was_there_before_is_as_it_was(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second deploy that fails: the first one's files and data are not touched, what is new is taken back."""
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
    monkeypatch.setattr(deploy, "_OPERATOR_S", 1.0)
    said = vox("deploy", rc=1)
    assert "ConfigMap demo-config: as it was before" in said
    assert cluster.get(config)["data"] == first["data"]
    assert everything(cluster) == ["ConfigMap demo-config", "RayJob demo"]
    assert "would be changed" in vox("deploy", "--dry-run")
    operator = threading.Thread(target=lambda: data(phase="Ready", ready="1/1"))
    operator.start()
    assert "RayJob demo: removed" in vox("deploy")
    operator.join()
    assert cluster.get(config)["data"] != first["data"]


def test_with_another_source_the_old_job_ends_first_and_a_failure_says_so(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None]
) -> None:
    add_node("node-a")
    write(nodes=1, run="gs://bucket/run", stage=[DATA])
    vox("deploy", "--no-wait")
    data(phase="Failed", message="no such bucket")
    write(nodes=1, run="gs://bucket/run", stage=[{**DATA, "source": "gs://bucket/other"}])
    said = vox("deploy", "--replace", rc=1)
    assert said.index("the old job ends first") < said.index("JobSet demo: removed")
    assert said.index("JobSet demo: removed") < said.index("StagedDataset kits19: changed")
    assert "StagedDataset kits19: as it was before" in said
    assert (
        "JobSet demo: the one that ran before has ended. `voxlane app deploy` with the app.yaml that it had starts it "
        "again, and its run gs://bucket/run goes on\n"
    ) in said
    assert everything(cluster) == ["StagedDataset kits19"]
    data(phase="Ready", ready="1/1")
    assert "StagedDataset kits19: changed" in vox("deploy")
    # With the same source it runs until the data is there: a failure before that costs nothing.
    data(phase="Failed", message="no such bucket")
    write(nodes=1, run="gs://bucket/run", stage=[{**DATA, "source": "gs://bucket/other", "timeout": "3h"}])
    said = vox("deploy", "--replace", rc=1)
    assert "has ended" not in said
    assert everything(cluster) == ["JobSet demo", "StagedDataset kits19"]


def test_data_that_is_still_going_is_waited_for(
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
    said = vox("deploy", rc=1)
    operator.join()
    assert "StagedDataset kits19: told to go" in said
    assert "removed again" not in said
    write(nodes=1, stage=[{**DATA, "source": "gs://bucket/right"}])
    said = vox("deploy", "--timeout", "1s", rc=1)
    assert "StagedDataset kits19: the old one is still being removed after 1s: waits for the operator" in said
    operator = threading.Thread(target=go)
    operator.start()
    said = vox("deploy", "--timeout", "1m")
    operator.join()
    assert "StagedDataset kits19: waits until the old one is gone (removes its copies from node-a)" in said
    assert said.index("StagedDataset kits19: created") < said.index("JobSet demo: created")
    assert cluster.get(path)["spec"]["source"] == "gs://bucket/right"


def test_data_whose_status_moves_is_changed_all_the_same(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the plan and the change lies the build of an image."""
    add_node("node-a")
    write(nodes=1, stage=[DATA])
    vox("deploy", "--no-wait")
    monkeypatch.setattr("voxlane.app.build.ensure", lambda *_, **__: data(phase="Ready", ready="1/1"))
    write(nodes=1, stage=[{**DATA, "timeout": "3h"}])
    assert "StagedDataset kits19: changed" in vox("deploy", "--replace")
    there = cluster.get(path_of(STAGED, "StagedDataset", cluster.namespace, "kits19"))
    assert (there["spec"]["timeout"], there["status"]["phase"]) == ("3h", "Ready")


def test_data_of_another_app_is_shared_and_handed_over(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None]
) -> None:
    add_node("node-a")
    write(nodes=1, stage=[DATA])
    vox("deploy", "--no-wait")
    write(name="second", nodes=1, stage=[DATA])
    data(phase="Ready", ready="1/1")
    assert "StagedDataset kits19: is there already, of app demo" in vox("deploy")
    write(name="third", nodes=1, stage=[{**DATA, "source": "gs://bucket/other"}])
    assert "is there with another source: gs://bucket/kits19" in vox("deploy", rc=1)
    for shared in (DATA, {"name": "kits19"}):
        write(name="third", nodes=2, stage=[shared])
        assert "StagedDataset kits19 is on 1 node, and the app runs on 2" in vox("deploy", rc=1)
        write(name="third", nodes=1, stage=[{**shared, "data_path": "/fast"}])
        assert "StagedDataset kits19 lies below /var/lib/voxlane, and the app looks below /fast" in vox("deploy", rc=1)
    write(name="third", nodes=1, stage=[{"name": "nothing"}])
    assert "StagedDataset nothing does not exist" in vox("deploy", rc=1)
    assert "stays: data kits19, which second uses" in vox("undeploy", "demo")
    assert everything(cluster) == ["JobSet second", "StagedDataset kits19"]
    said = vox("undeploy", "--all")
    assert "StagedDataset kits19: removed" in said
    assert everything(cluster) == []


def test_data_that_is_to_be_kept_stays(
    vox: Vox, cluster: Cluster, add_node: AddNode, data: Callable[..., None]
) -> None:
    add_node("node-a")
    write(nodes=1, run="gs://bucket/run", stage=[{**DATA, "keep": True}])
    vox("deploy", "--no-wait")
    assert "stays: data kits19 (keep: true); the run gs://bucket/run" in vox("undeploy")
    assert everything(cluster) == ["StagedDataset kits19"]
