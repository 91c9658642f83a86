"""Plans of the operator in a simulated cluster."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.operator.world import CONFIG, World
from voxlane.cluster.kubernetes.operator import plan as plans
from voxlane.cluster.kubernetes.operator.plan import StartPod
from voxlane.cluster.kubernetes.operator.resource import Taint
from voxlane.cluster.kubernetes.operator.status import build_merge_patch


def world(*nodes: str, **config: Any) -> World:
    simulated = World(config=replace(CONFIG, **config))
    simulated.node(*nodes)
    return simulated


def kinds(plan: plans.DatasetPlan) -> list[str]:
    return [type(action).__name__ for action in plan.actions]


# -- staging -----------------------------------------------------------------------------------------------------------


def test_finalizer_and_the_status_precede_the_first_pod() -> None:
    w = world("a", "b")
    w.create("d")
    assert kinds(w.step("d")) == ["SetFinalizer", "PatchStatus", "RecordEvent", "StartPod"]
    assert w.phase("d") == "Staging"
    assert w.status("d")["hostPath"] == "/var/lib/voxlane/namespaces/ns/datasets/ns.d"
    claim = {"claimName": "voxlane-data", "readOnly": True}
    assert w.status("d")["volume"] == {"persistentVolumeClaim": claim}
    assert w.status("d")["subPath"] == "datasets/ns.d"
    assert kinds(w.step("d")) == []  # nothing changed
    w.run_pods()
    assert kinds(w.step("d")) == ["StartPod"]
    assert kinds(w.step("d")) == []
    w.run_pods()
    assert kinds(w.step("d")) == ["SetNodeLabel", "PatchStatus", "RecordEvent", "DeletePod", "DeletePod"]
    assert w.labelled("d") == ["a"]
    assert w.status("d")["ready"] == "1/1"
    assert w.status("d")["progress"] == "100%"
    assert w.status("d")["conditions"][0]["status"] == "True"
    assert kinds(w.step("d")) == []


def test_spec_determines_the_number_of_nodes() -> None:
    w = world("a", "b", "c")
    w.change("b", labels={"disk": "ssd"})
    w.change("c", labels={"disk": "ssd"})
    w.create("one")
    w.create("two", replicas=2)
    w.create("all", nodeSelector={"disk": "ssd"})
    w.create("some", nodeSelector={"disk": "ssd"}, replicas=1)
    w.settle()
    assert len(w.labelled("one")) == 1
    assert len(w.labelled("two")) == 2
    assert w.labelled("all") == ["b", "c"]
    assert len(w.labelled("some")) == 1
    w.node("d", labels={"disk": "ssd"})
    w.settle()
    assert w.labelled("all") == ["b", "c", "d"]


def test_nodes_with_less_data_are_chosen_first() -> None:
    w = world("a", "b", "c")
    for name in ("x", "y", "z"):
        w.create(name)
        w.settle()
    assert sorted(w.labelled("x") + w.labelled("y") + w.labelled("z")) == ["a", "b", "c"]


def test_progress_covers_all_nodes() -> None:
    w = world("a", "b")
    w.create("d", replicas=2)
    w.start_copiers("d")
    for pod in w.agent_pods():
        pod["status"]["phase"] = "Running"
    w.status("d")["nodes"]["a"] |= {"bytes": 60, "totalBytes": 100, "objects": 6, "totalObjects": 10}
    w.status("d")["nodes"]["b"] |= {"bytes": 20, "totalBytes": 100, "objects": 2, "totalObjects": 10}
    w.step("d")
    assert w.status("d")["progress"] == "40%"
    assert w.status("d")["size"] == "100 B"
    assert w.status("d")["nodes"]["a"]["phase"] == "Copying"
    assert w.status("d")["nodes"]["a"]["bytes"] == 60
    assert w.status("d")["ready"] == "0/2"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"source": "http://x/y"}, "source: 'http://x/y' is not a URI that can be staged"),
        ({"source": "nfs://server"}, "has no path on the server"),
        ({"capacity": "lots"}, "capacity: expected a size such as 100Gi, got 'lots'"),
        ({"timeout": "soon"}, "timeout: expected a duration such as 2h or 30m, got 'soon'"),
        ({"timeout": ""}, "timeout: expected a duration such as 2h or 30m, got ''"),
        ({"timeout": "0s"}, "timeout: expected a duration such as 2h or 30m, got '0s'"),
        ({"dataPath": "/etc"}, "the operator does not allow /etc. Choose from /var/lib/voxlane, or start the operator"),
        ({"dataPath": "/var/lib/voxlane/objects"}, "the operator does not allow"),
        ({"dataPath": "/var/lib/voxlane/namespaces/other"}, "the operator does not allow"),
        ({"dataPath": "/var/lib/voxlane/../../etc"}, "the operator does not allow"),
        ({"dataPath": "/var/lib/voxlane2"}, "the operator does not allow"),
        ({"credentials": {"file": "key.json"}}, "credentials.file needs credentials.secret"),
    ],
)
def test_invalid_spec_is_reported_and_nothing_is_created(spec: dict[str, Any], message: str) -> None:
    w = world("a")
    w.create("d", **spec)
    assert kinds(w.step("d")) == ["PatchStatus", "RecordEvent"]
    assert w.phase("d") == "Failed"
    assert message in w.status("d")["message"]
    assert w.events[0][1] == "Failed"
    assert kinds(w.step("d")) == []
    w.edit("d", source="gs://b/d", capacity="1Gi", timeout="1h", dataPath="/var/lib/voxlane", credentials={})
    w.settle()
    assert w.phase("d") == "Ready"


def test_missing_image_and_a_long_name_are_reported() -> None:
    w = world("a", image=None)
    w.create("d")
    w.step("d")
    assert "the operator has no image" in w.status("d")["message"]
    w = world("a")
    w.create("n" * 64)
    w.step("n" * 64)
    assert "more than 63 characters" in w.status("n" * 64)["message"]


def test_data_path_cannot_change_while_data_is_staged() -> None:
    w = world("a", data_paths=("/one", "/two"))
    w.create("d", dataPath="/one")
    w.settle()
    w.edit("d", dataPath="/two")
    w.step("d")
    assert "differs from /one, where the data is staged" in w.status("d")["message"]
    w.delete("d")
    w.settle()
    assert w.datasets == {}
    assert w.disks["a"] == {}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"nodeSelector": {"disk": "ssd"}}, "no node matches nodeSelector disk=ssd"),
        ({"replicas": 3}, "3 nodes were requested, but there are only 2 nodes"),
        ({"replicas": 2}, "2 of 2 nodes are needed, but 1 can take a copy now"),
    ],
)
def test_too_few_nodes_are_explained(spec: dict[str, Any], message: str) -> None:
    w = world("a", "b")
    w.change("b", schedulable=False)
    w.create("d", **spec)
    w.settle()
    assert message in w.status("d")["message"]
    assert w.phase("d") == ("Pending" if "nodeSelector" in spec else "Degraded")
    w.change("b", schedulable=True, labels={"disk": "ssd"})
    w.node("c")
    w.settle()
    assert w.phase("d") == "Ready"


def test_tainted_nodes_are_used_only_if_every_taint_is_named() -> None:
    """A nodeSelector that matches a node, such as one of the control plane, is no reason to tolerate its taints."""
    w = World()
    gpu, control = Taint("nvidia.com/gpu", "NoSchedule", "present"), Taint("node-role.kubernetes.io/control-plane", "x")
    w.node("gpu", taints=(gpu,), labels={"gpu": "yes"})
    w.node("control", taints=(gpu, control), labels={"gpu": "yes"})
    for number, tolerations in enumerate(([], [{"key": "other"}], [{"key": gpu.key, "value": "absent"}])):
        w.create(f"d{number}", nodeSelector={"gpu": "yes"}, tolerations=tolerations)
        w.step(f"d{number}")
        assert not w.agent_pods()
        assert (
            "there are nodes with the taint node-role.kubernetes.io/control-plane, which tolerations must name"
            in (w.status(f"d{number}")["message"])
        )
    w.create("e", nodeSelector={"gpu": "yes"}, tolerations=[{"key": gpu.key, "effect": "NoSchedule"}])
    w.settle()
    assert w.labelled("e") == ["gpu"]
    w.create("f", tolerations=[{"key": gpu.key, "operator": "Equal", "value": "present"}])
    assert w.step("f").actions[-1] == StartPod("prepare", "gpu", w.nodes["gpu"].uid, 0)
    (pod,) = w.agent_pods()
    assert pod["spec"]["tolerations"] == [{"operator": "Equal", "key": gpu.key, "value": "present"}]


def test_copier_starts_only_once_its_folder_is_made() -> None:
    w = world("a")
    w.create("d")
    assert [a.role for a in w.step("d").actions if isinstance(a, StartPod)] == ["prepare"]
    w.run_pods(lambda _: {"reason": "Disk", "message": "a file or link is in its place"})
    w.step("d")
    assert w.status("d")["message"] == "a: a file or link is in its place"
    assert not w.agent_pods()
    w.settle()
    assert w.phase("d") == "Ready"


def test_quota_evicts_only_datasets_of_the_same_namespace() -> None:
    w = world("a")
    for name in ("own", "others"):
        w.create(name)
        w.settle()
    w.datasets["others"]["metadata"]["namespace"] = "other"
    w.create("new")
    w.step("new")
    w.run_pods()
    w.step("new")
    w.run_pods(lambda _: {"reason": "Quota", "message": "over the quota", "lackingBytes": 150})
    w.step("new")
    assert (w.phase("new"), w.status("new")["nodes"]["a"]["phase"]) == ("Failed", "NoRoom")
    assert "Removing" not in str(w.datasets["others"]["status"])
    assert "Removing" not in str(w.datasets["own"]["status"])  # it alone would not free enough
    w.datasets["others"]["metadata"]["namespace"] = "ns"
    w.step("new")
    assert "Removing" in str(w.datasets["others"]["status"])


# -- failures ----------------------------------------------------------------------------------------------------------


def test_failures_are_retried_with_growing_pauses_and_then_on_another_node() -> None:
    w = world("a", "b")
    w.create("d")
    attempts = []
    for _ in range(3):
        w.step("d")
        attempts.append((w.now, [p["metadata"]["annotations"]["voxlane.dev/attempt"] for p in w.agent_pods()]))
        w.run_pods(lambda _: {"reason": "Disk", "message": "the disk is broken"})
        plan = w.step("d")
        assert w.phase("d") in ("Failed", "Staging")
        assert "a: the disk is broken" in w.status("d")["message"]
        assert w.events.count(("d", "CopyFailed", "a: the disk is broken")) == len(attempts)
        w.now += (plan.retry_after_s or 0) + 1
    assert [a for _, a in attempts] == [["0"], ["1"], ["2"]]
    waited = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(attempts)]
    assert waited[1] > waited[0] >= 10
    w.settle()
    assert w.labelled("d") == ["b"]
    assert list(w.status("d")["nodes"]) == ["b"]


@pytest.mark.parametrize("reason", ["Source", "TooLarge"])
def test_bad_source_is_not_tried_on_other_nodes(reason: str) -> None:
    w = world("a", "b")
    w.create("d")
    for _ in range(5):
        w.step("d")
        assert {p["metadata"]["annotations"]["voxlane.dev/node"] for p in w.agent_pods()} <= {"a"}
        w.run_pods(lambda _: {"reason": reason, "message": "the source is wrong"})
        w.step("d")
        assert w.phase("d") == "Failed"
        w.now += 700
    w.step("d")
    assert len(w.agent_pods()) == 1
    assert w.phase("d") == "Failed"  # a retry is no news
    assert [reason for _, reason, _ in w.events].count("Failed") == 1
    assert w.status("d")["message"] == "a: the source is wrong"
    w.edit("d", source="gs://b/right")
    w.step("d")
    assert w.phase("d") == "Staging"
    w.settle()
    assert w.phase("d") == "Ready"


def test_timeout_is_final_until_the_spec_changes() -> None:
    w = world("a")
    w.create("d", timeout="30m")
    plan = w.step("d")
    plan = w.step("d")
    assert plan.retry_after_s == pytest.approx(1801, abs=2)
    w.now += 1802
    w.step("d")
    assert w.agent_pods() == []
    assert w.status("d")["message"] == "a: the copy did not start within the timeout of 30m; raise the timeout to retry"
    assert w.phase("d") == "Failed"
    w.now += 100_000
    w.settle()
    assert w.phase("d") == "Failed"
    w.edit("d", timeout="2h")
    w.settle()
    assert w.phase("d") == "Ready"


def test_problems_of_a_pending_pod_are_reported() -> None:
    w = world("a")
    w.create("d")
    w.step("d")
    (pod,) = w.agent_pods()
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
    w.step("d")
    assert w.status("d")["message"] == 'a: CreateContainerConfigError: secret "keys" not found'
    pod["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient cpu."}],
    }
    w.step("d")
    assert w.status("d")["message"] == "a: the pod cannot be scheduled on the node: 0/1 nodes: Insufficient cpu."


def test_malformed_results_are_ignored() -> None:
    w = world("a")
    w.create("d")
    w.start_copiers("d")
    (pod,) = w.agent_pods()
    ended = {"exitCode": 0, "message": '{"bytes": "many", "phase": "Evicted", "message": 3, "objects": 7}'}
    w.disks["a"]["ns.d"] = 100
    pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": ended}}]}
    w.step("d")
    assert w.phase("d") == "Ready"
    assert w.status("d")["nodes"]["a"]["objects"] == 7
    assert "bytes" not in w.status("d")["nodes"]["a"]


def test_crashed_copier_reports_its_last_line() -> None:
    w = world("a")
    w.create("d")
    w.step("d")
    (pod,) = w.agent_pods()
    ended = {"exitCode": 2, "message": "Traceback\n  File\nMemoryError"}
    pod["status"] = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]}
    w.step("d")
    assert w.status("d")["message"] == "a: the copier exited with status 2: MemoryError"


# -- nodes come and go -------------------------------------------------------------------------------------------------


def test_lost_node_is_replaced_and_reused_when_it_is_back() -> None:
    w = world("a", "b", "c")
    w.create("d", replicas=2)
    w.settle()
    assert w.labelled("d") == ["a", "b"]
    w.ready("a", False)
    plan = w.step("d")
    assert w.labelled("d") == ["a", "b"]  # it may be back soon
    assert plan.retry_after_s == pytest.approx(300)
    w.now += 301
    w.step("d")
    assert w.status("d")["nodes"]["a"]["phase"] == "Lost"
    assert w.labelled("d") == ["b"]
    assert w.phase("d") == "Degraded"
    assert "a does not respond" in w.status("d")["message"]
    w.settle()
    assert w.labelled("d") == ["b", "c"]
    assert w.phase("d") == "Ready"
    w.ready("a", True)
    w.settle()
    assert len(w.labelled("d")) == 2
    assert sum("ns.d" in disk for disk in w.disks.values()) == 2  # no data stays behind


def test_node_that_returns_before_its_replacement_is_complete_keeps_its_copy() -> None:
    w = world("a", "b")
    w.create("d")
    w.settle()
    w.ready("a", False)
    w.now += 301
    w.step("d")
    assert [p["metadata"]["annotations"]["voxlane.dev/node"] for p in w.agent_pods()] == ["b"]
    w.ready("a", True)
    copied = w.copied
    w.step("d")
    w.step("d")
    w.settle()
    assert w.labelled("d") == ["a"]
    assert w.copied == copied
    assert w.disks["b"] == {}


def test_recreated_node_is_copied_to_again() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.node("a")  # same name, empty disk, no label
    w.settle()
    assert w.labelled("d") == ["a"]
    assert w.copied == 200


def test_deleted_node_is_forgotten() -> None:
    w = world("a", "b")
    w.create("d")
    w.settle()
    del w.nodes["a"]
    w.settle()
    assert w.labelled("d") == ["b"]
    assert list(w.status("d")["nodes"]) == ["b"]


def test_lost_status_is_rebuilt_from_the_labels() -> None:
    w = world("a", "b", "c")
    w.create("d", replicas=2)
    w.settle()
    w.change("a", schedulable=True)
    nodes = w.labelled("d")
    w.datasets["d"]["status"] = {}
    w.settle()
    assert w.labelled("d") == nodes
    assert w.copied == 200


def test_fewer_replicas_free_unused_nodes_first() -> None:
    w = world("a", "b", "c")
    w.create("d", replicas=3)
    w.settle()
    w.use("d", "p", "c")
    w.edit("d", replicas=1)
    w.settle()
    assert w.labelled("d") == ["c"]
    w.edit("d", replicas=1, nodeSelector={"disk": "ssd"})
    w.change("a", labels={"disk": "ssd"})
    w.step("d")
    w.step("d")
    assert w.status("d")["nodes"]["c"]["message"] == "waiting for Pod p to finish"
    w.end("p")
    w.settle()
    assert w.labelled("d") == ["a"]
    assert w.disks["c"] == {}


def test_another_source_is_copied() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.edit("d", source="gs://b/other")
    w.disks["a"]["ns.d"] = 0
    plan = w.step("d")
    assert kinds(plan)[0] == "SetNodeLabel"
    assert w.labelled("d") == []
    w.settle()
    assert w.labelled("d") == ["a"]


def test_annotation_restages_the_source() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.restage("d", "2")
    w.step("d")
    w.run_pods()
    w.step("d")
    assert w.agent_pods() == []  # a pod may be starting
    w.now += 6
    w.step("d")
    assert len(w.agent_pods()) == 1
    w.settle()
    assert w.phase("d") == "Ready"
    assert w.copied == 100


@pytest.mark.parametrize("change", ["source", "annotation"])
def test_data_is_not_replaced_while_a_pod_uses_it(change: str) -> None:
    w = world("a", "b")
    w.create("d", replicas=2)
    w.settle()
    w.use("d", "train", kind="JobSet")
    w.use("d", "train-0", "a")
    w.use("d", "train-1")  # has no node yet, and waits for a label itself
    if change == "source":
        w.edit("d", source="gs://b/other")
    else:
        w.restage("d", "2")
    old, new = w.revisions["a", "ns.d"], w.read("d").revision
    plan = w.step("d")
    assert kinds(plan)[:2] == ["SetNodeLabel", "SetNodeLabel"]
    assert w.labelled("d") == []
    w.settle()
    assert w.labelled("d") == ["b"]
    assert (w.revisions["a", "ns.d"], w.revisions["b", "ns.d"]) == (old, new)
    assert w.phase("d") == "Staging"
    assert w.status("d")["message"] == "a: waiting for Pod train-0 to finish before copying again"
    assert w.status("d")["ready"] == "1/2"
    assert w.status("d")["progress"] == "50%"
    assert w.plan("d").retry_after_s == pytest.approx(3)
    w.end("train-0")
    w.settle()
    assert w.phase("d") == "Ready"
    assert w.labelled("d") == ["a", "b"]
    assert w.revisions["a", "ns.d"] == new
    assert "message" not in w.status("d")["nodes"]["a"]


def test_restage_waits_for_a_pod_that_starts_while_the_label_is_removed() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.restage("d", "2")
    w.step("d")
    w.now += 2
    w.use("d", "late", "a")
    w.settle()
    assert w.labelled("d") == []
    assert w.status("d")["nodes"]["a"]["message"] == "waiting for Pod late to finish before copying again"
    w.restage("d", "")  # the old value again: the data is checked once the pod has ended
    w.settle()
    assert w.labelled("d") == []
    w.end("late")
    w.settle()
    assert w.labelled("d") == ["a"]
    assert w.copied == 100


def test_copy_that_waits_to_be_replaced_can_be_deleted_or_lost() -> None:
    w = world("a", "b")
    w.create("d")
    w.settle()
    w.use("d", "p", "a")
    w.edit("d", source="gs://b/other")
    w.settle()
    w.ready("a", False)
    w.now += 301
    w.settle()
    assert w.labelled("d") == ["b"]
    w.ready("a", True)
    w.settle()
    assert w.labelled("d") == ["b"]
    assert w.status("d")["nodes"]["a"]["message"] == "waiting for Pod p to finish"
    w.delete("d")
    w.settle()
    assert w.disks["a"]
    w.end("p")
    w.settle()
    assert w.datasets == {}
    assert all(disk == {} for disk in w.disks.values())


# -- disk space --------------------------------------------------------------------------------------------------------


def test_least_recently_used_dataset_is_evicted_and_returns_when_used() -> None:
    w = world("a")
    w.capacity["a"] = 250
    for name in ("old", "new"):
        w.create(name)
        w.settle()
        w.now += 100
    w.use("old", "p", "a")
    w.settle()
    w.end("p")
    w.now += 100
    w.create("big", size=120)
    w.settle()
    assert w.labelled("big") == ["a"]
    assert w.labelled("old") == ["a"]  # used after the other
    assert w.phase("new") == "Evicted"
    assert "it will be staged again when something uses it" in w.status("new")["message"]
    assert sum(w.disks["a"].values()) == 220
    w.delete("big")
    w.settle()
    assert w.phase("new") == "Evicted"
    w.use("new", "job", kind="JobSet")
    w.settle()
    assert w.labelled("new") == ["a"]


def test_protected_and_used_datasets_are_not_evicted() -> None:
    w = world("a", "b", "c")
    w.capacity |= {"a": 150, "b": 150, "c": 150}
    w.change("c", schedulable=False)
    w.create("protected", keep=True)
    w.settle()
    w.create("used")
    w.settle()
    w.use("used", "p", w.labelled("used")[0])
    w.settle()
    w.create("big", size=140)
    w.settle()
    assert w.phase("big") == "Failed"
    assert "the disk lacks 90 B below /var/lib/voxlane" in w.status("big")["message"]
    assert (w.phase("protected"), w.phase("used")) == ("Ready", "Ready")
    w.change("c", schedulable=True)
    w.settle()
    assert w.labelled("big") == ["c"]
    assert list(w.status("big")["nodes"]) == ["c"]


def test_datasets_are_evicted_where_the_copy_began() -> None:
    w = world("a", "b")
    w.capacity |= {"a": 150, "b": 150}
    for name in ("one", "two"):
        w.create(name)
        w.settle()
    assert (w.labelled("one"), w.labelled("two")) == (["a"], ["b"])
    w.create("big", size=140)
    w.settle()
    assert w.labelled("big") == ["a"]
    assert (w.phase("one"), w.phase("two")) == ("Evicted", "Ready")


def test_nothing_is_evicted_if_it_would_not_free_enough() -> None:
    w = world("a")
    w.capacity["a"] = 150
    w.create("small")
    w.settle()
    w.create("huge", size=1000)
    w.settle()
    assert w.phase("small") == "Ready"
    assert w.phase("huge") == "Failed"


# -- deletion ----------------------------------------------------------------------------------------------------------


def test_deletion_waits_for_users_and_then_removes_every_copy() -> None:
    w = world("a", "b")
    w.create("d", replicas=2)
    w.settle()
    w.use("d", "train", kind="JobSet")
    w.use("d", "train-0", "a")
    w.delete("d")
    w.settle()
    assert w.phase("d") == "Deleting"
    assert w.status("d")["message"] == "waiting for JobSet train and Pod train-0 to finish"
    assert w.labelled("d") == ["a", "b"]  # its pods may be restarted
    w.end("train")
    w.end("train-0")
    w.settle()
    assert w.datasets == {}
    assert w.disks == {"a": {}, "b": {}}
    assert w.labelled("d") == []
    assert w.pods == {}


def test_deletion_waits_for_an_unresponsive_node_but_not_for_a_deleted_one() -> None:
    w = world("a", "b")
    w.create("d", replicas=2)
    w.settle()
    w.ready("a", False)
    w.delete("d")
    w.settle()
    assert w.status("d")["message"] == "waiting for a to respond, to remove the copy there"
    assert w.disks["b"] == {}
    del w.nodes["a"]
    w.settle()
    assert w.datasets == {}


def test_deletion_during_a_copy_removes_the_partial_copy() -> None:
    w = world("a")
    w.create("d")
    w.step("d")
    w.disks["a"]["ns.d"] = 40
    w.delete("d")
    w.settle()
    assert w.datasets == {}
    assert w.disks["a"] == {}


def test_failed_removal_is_reported_and_retried() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.delete("d")
    w.step("d")
    w.now += 6
    assert StartPod("remove", "a", w.nodes["a"].uid, 0) in w.step("d").actions
    w.run_pods(lambda _: {"reason": "Disk", "message": "read-only disk"})
    w.step("d")
    assert w.status("d")["message"] == "a: cannot remove the copy: read-only disk"
    w.settle()
    assert w.datasets == {}


def test_deletion_respects_the_allowed_data_paths() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.status("d")["hostPath"] = "/etc/datasets/ns.d"
    w.delete("d")
    w.settle()
    assert "does not allow /etc" in w.status("d")["message"]
    assert not w.agent_pods()


# -- all together ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_operator_converges_despite_kills_and_failures(seed: int) -> None:
    """The simulation fails if a label is wrong, or data is removed or replaced under a pod."""
    rng = random.Random(seed)
    w = world("a", "b", "c", "d")
    w.capacity = dict.fromkeys("abcd", rng.choice([250, 1 << 40]))
    for name in ("x", "y", "z"):
        w.create(name, replicas=rng.randint(1, 2))

    def fault(_: Any) -> dict[str, Any] | None:
        return {"reason": "Disk", "message": "broken"} if rng.random() < 0.2 else None

    for turn in range(60):
        for name in list(w.datasets):
            if name in w.datasets:
                w.step(name, only=rng.choice([None, None, 0, 1, 2, 3]))
        if rng.random() < 0.6:
            w.run_pods(fault)
        match rng.randint(0, 10):
            case 0:
                node = rng.choice("abcd")
                w.ready(node, not w.nodes[node].ready)
            case 1:
                w.node(rng.choice("abcd"))
            case 2 if w.labelled("x"):
                w.use("x", f"p{turn}", rng.choice(w.labelled("x")))
            case 3 if users := [name for space, name in w.pods if space == "ns" and name.startswith("p")]:
                w.end(rng.choice(users))
            case 4 if "y" in w.datasets:
                w.edit("y", replicas=rng.randint(1, 3))
            case 5 if rng.random() < 0.2 and "z" in w.datasets:
                w.delete("z")
            case 6 if w.agent_pods():
                pod = rng.choice(w.agent_pods())["metadata"]
                del w.pods[pod["namespace"], pod["name"]]
            case 10:
                w.restage("x", rng.choice("123"))
        w.now += rng.choice([0, 1, 5, 30, 200])
    w.capacity = dict.fromkeys("abcd", 1 << 40)
    for node in "abcd":
        w.ready(node, True)
    for space, name in list(w.pods):
        if space == "ns" and name.startswith("p"):
            w.end(name)
    w.now += 2000
    for name in list(w.datasets):
        w.use(name, f"q{name}", kind="JobSet")
    w.settle(patience_s=1000)
    for name, resource in w.datasets.items():
        if "deletionTimestamp" in resource["metadata"]:
            assert w.phase(name) == "Deleting"
            continue
        assert w.phase(name) == "Ready", w.status(name)
        assert len(w.labelled(name)) == resource["spec"]["replicas"]
        for node, disk in w.disks.items():
            assert (disk.get(f"ns.{name}") == 100) == (node in w.labelled(name))
    for name in list(w.datasets):
        w.delete(name)
        w.end(f"q{name}")
    w.settle(patience_s=1000)
    assert w.datasets == {}
    assert all(disk == {} for disk in w.disks.values())
    assert w.pods == {}


def test_merge_patches() -> None:
    old = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1], "f": {"g": 1}}
    assert build_merge_patch(old, old) == {}
    assert build_merge_patch(old, {"b": {"c": 2, "d": 4}, "e": [2], "f": {}, "h": {}}) == {
        "a": None,
        "b": {"d": 4},
        "e": [2],
        "f": {"g": None},
        "h": {},
    }
