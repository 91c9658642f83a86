"""What the operator decides, in a cluster that is simulated around it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.operator.world import RULES, World
from voxlane.operator import plan as plans
from voxlane.operator.plan import StartCopy, StartRemoval, difference


def world(*nodes: str, **rules: Any) -> World:
    made = World(rules=replace(RULES, **rules))
    made.node(*nodes)
    return made


def kinds(planned: plans.Plan) -> list[str]:
    return [type(action).__name__ for action in planned.actions]


# -- staging -----------------------------------------------------------------------------------------------------------


def test_the_finalizer_and_the_status_come_before_the_first_pod() -> None:
    w = world("a", "b")
    w.create("d")
    assert kinds(w.step("d")) == ["SetFinalizer", "Patch", "Tell", "StartCopy"]
    assert w.phase("d") == "Staging"
    assert w.status("d")["hostPath"] == "/var/lib/voxlane/datasets/ns.d"
    assert kinds(w.step("d")) == []  # nothing changed
    w.run_pods()
    assert kinds(w.step("d")) == ["Label", "Patch", "Tell", "StopPod"]
    assert w.on("d") == ["a"]
    assert w.status("d")["ready"] == "1/1"
    assert w.status("d")["progress"] == "100%"
    assert w.status("d")["conditions"][0]["status"] == "True"
    assert kinds(w.step("d")) == []


def test_how_many_nodes() -> None:
    w = world("a", "b", "c")
    w.change("b", labels={"disk": "ssd"})
    w.change("c", labels={"disk": "ssd"})
    w.create("one")
    w.create("two", replicas=2)
    w.create("all", nodeSelector={"disk": "ssd"})
    w.create("some", nodeSelector={"disk": "ssd"}, replicas=1)
    w.settle()
    assert len(w.on("one")) == 1
    assert len(w.on("two")) == 2
    assert w.on("all") == ["b", "c"]
    assert len(w.on("some")) == 1
    w.node("d", labels={"disk": "ssd"})
    w.settle()
    assert w.on("all") == ["b", "c", "d"]


def test_nodes_that_hold_less_are_taken_first() -> None:
    w = world("a", "b", "c")
    for name in ("x", "y", "z"):
        w.create(name)
        w.settle()
    assert sorted(w.on("x") + w.on("y") + w.on("z")) == ["a", "b", "c"]


def test_progress_is_over_all_nodes() -> None:
    w = world("a", "b")
    w.create("d", replicas=2)
    w.step("d")
    for pod in w.pods.values():
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
    ("spec", "said"),
    [
        ({"source": "http://x/y"}, "source: 'http://x/y' is nothing that can be staged"),
        ({"source": "nfs://server"}, "names no path of the server"),
        ({"capacity": "lots"}, "capacity: 'lots' is no size"),
        ({"timeout": "soon"}, "timeout: 'soon' is no time"),
        ({"timeout": ""}, "timeout: '' is no time"),
        ({"timeout": "0s"}, "timeout: '0s' is no time"),
        ({"dataPath": "/etc"}, "the operator does not allow /etc. Choose a folder at or below /var/lib/voxlane"),
        ({"dataPath": "/var/lib/voxlane/../../etc"}, "the operator does not allow"),
        ({"dataPath": "/var/lib/voxlane2"}, "the operator does not allow"),
        ({"credentials": {"file": "key.json"}}, "credentials.file: of which Secret?"),
    ],
)
def test_a_spec_that_cannot_be_served_is_a_sentence_and_nothing_is_made(spec: dict[str, Any], said: str) -> None:
    w = world("a")
    w.create("d", **spec)
    assert kinds(w.step("d")) == ["Patch", "Tell"]
    assert w.phase("d") == "Failed"
    assert said in w.status("d")["message"]
    assert w.events[0][1] == "Failed"
    assert kinds(w.step("d")) == []
    w.edit("d", source="gs://b/d", capacity="1Gi", timeout="1h", dataPath="/var/lib/voxlane/x", credentials={})
    w.settle()
    assert w.phase("d") == "Ready"


def test_no_image_and_too_long_names() -> None:
    w = world("a", image=None)
    w.create("d")
    w.step("d")
    assert "the operator has no image" in w.status("d")["message"]
    w = world("a")
    w.create("n" * 64)
    w.step("n" * 64)
    assert "more than 63 characters" in w.status("n" * 64)["message"]


def test_the_data_path_stays_where_data_is() -> None:
    w = world("a")
    w.create("d", dataPath="/var/lib/voxlane/one")
    w.settle()
    w.edit("d", dataPath="/var/lib/voxlane/two")
    w.step("d")
    assert "is not where the data is staged, /var/lib/voxlane/one" in w.status("d")["message"]
    w.delete("d")
    w.settle()
    assert w.datasets == {}
    assert w.disks["a"] == {}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"nodeSelector": {"disk": "ssd"}}, "no node matches nodeSelector disk=ssd"),
        ({"replicas": 3}, "3 nodes are asked for, and there are 2 nodes"),
        ({"replicas": 2}, "2 of 2 nodes are needed, and 1 can take a copy now"),
    ],
)
def test_too_few_nodes(spec: dict[str, Any], said: str) -> None:
    w = world("a", "b")
    w.change("b", schedulable=False)
    w.create("d", **spec)
    w.settle()
    assert said in w.status("d")["message"]
    assert w.phase("d") == ("Pending" if "nodeSelector" in spec else "Degraded")
    w.change("b", schedulable=True, labels={"disk": "ssd"})
    w.node("c")
    w.settle()
    assert w.phase("d") == "Ready"


def test_tainted_nodes_are_taken_only_when_they_are_asked_for() -> None:
    w = World()
    w.node("gpu", taints=(("nvidia.com/gpu", "NoSchedule"),), labels={"gpu": "yes"})
    w.create("d")
    w.step("d")
    assert "nodes with taints are taken when a nodeSelector names them" in w.status("d")["message"]
    w.create("e", nodeSelector={"gpu": "yes"})
    planned = w.step("e")
    assert planned.actions[-1] == StartCopy("gpu", w.nodes["gpu"].uid, 0, (("nvidia.com/gpu", "NoSchedule"),))


# -- failures ----------------------------------------------------------------------------------------------------------


def test_failures_are_tried_again_later_and_later_and_then_elsewhere() -> None:
    w = world("a", "b")
    w.create("d")
    attempts = []
    for _ in range(3):
        w.step("d")
        attempts.append((w.now, [p["metadata"]["annotations"]["voxlane.dev/attempt"] for p in w.ours()]))
        w.run_pods(lambda _: {"reason": "Disk", "message": "the disk is broken"})
        planned = w.step("d")
        assert w.phase("d") in ("Failed", "Staging")
        assert "a: the disk is broken" in w.status("d")["message"]
        assert w.events.count(("d", "CopyFailed", "a: the disk is broken")) == len(attempts)
        w.now += (planned.again_s or 0) + 1
    assert [a for _, a in attempts] == [["0"], ["1"], ["2"]]
    waited = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(attempts)]
    assert waited[1] > waited[0] >= 10
    w.settle()
    assert w.on("d") == ["b"]
    assert list(w.status("d")["nodes"]) == ["b"]


@pytest.mark.parametrize("reason", ["Source", "TooLarge"])
def test_what_is_wrong_with_the_source_is_not_tried_on_other_nodes(reason: str) -> None:
    w = world("a", "b")
    w.create("d")
    for _ in range(5):
        w.step("d")
        assert {p["metadata"]["annotations"]["voxlane.dev/node"] for p in w.ours()} <= {"a"}
        w.run_pods(lambda _: {"reason": reason, "message": "the source is wrong"})
        w.step("d")
        assert w.phase("d") == "Failed"
        w.now += 700
    w.step("d")
    assert len(w.ours()) == 1
    assert w.phase("d") == "Failed"  # another try is no news
    assert [reason for _, reason, _ in w.events].count("Failed") == 1
    assert w.status("d")["message"] == "a: the source is wrong"
    w.edit("d", source="gs://b/right")
    w.step("d")
    assert w.phase("d") == "Staging"
    w.settle()
    assert w.phase("d") == "Ready"


def test_a_timeout_ends_it_until_the_spec_changes() -> None:
    w = world("a")
    w.create("d", timeout="30m")
    planned = w.step("d")
    planned = w.step("d")
    assert planned.again_s == pytest.approx(1801, abs=2)
    w.now += 1802
    w.step("d")
    assert w.ours() == []
    assert w.status("d")["message"] == "a: the copy did not start within timeout, 30m; raise it to go on"
    assert w.phase("d") == "Failed"
    w.now += 100_000
    w.settle()
    assert w.phase("d") == "Failed"
    w.edit("d", timeout="2h")
    w.settle()
    assert w.phase("d") == "Ready"


def test_why_a_pod_does_not_run_is_said() -> None:
    w = world("a")
    w.create("d")
    w.step("d")
    (pod,) = w.ours()
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
    w.step("d")
    assert w.status("d")["message"] == 'a: CreateContainerConfigError: secret "keys" not found'
    pod["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient cpu."}],
    }
    w.step("d")
    assert w.status("d")["message"] == "a: the node has no place for the pod: 0/1 nodes: Insufficient cpu."


def test_last_words_that_make_no_sense_are_not_believed() -> None:
    w = world("a")
    w.create("d")
    w.step("d")
    (pod,) = w.ours()
    ended = {"exitCode": 0, "message": '{"bytes": "many", "phase": "Evicted", "message": 3, "objects": 7}'}
    w.disks["a"]["ns.d"] = 100
    pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": ended}}]}
    w.step("d")
    assert w.phase("d") == "Ready"
    assert w.status("d")["nodes"]["a"]["objects"] == 7
    assert "bytes" not in w.status("d")["nodes"]["a"]


def test_a_copier_that_crashed_says_its_last_line() -> None:
    w = world("a")
    w.create("d")
    w.step("d")
    (pod,) = w.ours()
    ended = {"exitCode": 2, "message": "Traceback\n  File\nMemoryError"}
    pod["status"] = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]}
    w.step("d")
    assert w.status("d")["message"] == "a: the copier ended with status 2: MemoryError"


# -- nodes come and go -------------------------------------------------------------------------------------------------


def test_a_lost_node_is_replaced_and_reused_when_it_is_back() -> None:
    w = world("a", "b", "c")
    w.create("d", replicas=2)
    w.settle()
    assert w.on("d") == ["a", "b"]
    w.ready("a", False)
    planned = w.step("d")
    assert w.on("d") == ["a", "b"]  # it may be back in a moment
    assert planned.again_s == pytest.approx(300)
    w.now += 301
    w.step("d")
    assert w.status("d")["nodes"]["a"]["phase"] == "Lost"
    assert w.on("d") == ["b"]
    assert w.phase("d") == "Degraded"
    assert "a does not answer" in w.status("d")["message"]
    w.settle()
    assert w.on("d") == ["b", "c"]
    assert w.phase("d") == "Ready"
    w.ready("a", True)
    w.settle()
    assert len(w.on("d")) == 2
    assert sum("ns.d" in disk for disk in w.disks.values()) == 2  # nothing stays behind


def test_a_node_that_comes_back_before_its_replacement_is_whole_is_kept() -> None:
    w = world("a", "b")
    w.create("d")
    w.settle()
    w.ready("a", False)
    w.now += 301
    w.step("d")
    assert [p["metadata"]["annotations"]["voxlane.dev/node"] for p in w.ours()] == ["b"]
    w.ready("a", True)
    copied = w.copied
    w.step("d")
    w.step("d")
    w.settle()
    assert w.on("d") == ["a"]
    assert w.copied == copied
    assert w.disks["b"] == {}


def test_a_node_that_was_made_anew_is_copied_to_again() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.node("a")  # same name, empty disk, no label
    w.settle()
    assert w.on("d") == ["a"]
    assert w.copied == 200


def test_a_node_that_is_gone_is_forgotten() -> None:
    w = world("a", "b")
    w.create("d")
    w.settle()
    del w.nodes["a"]
    w.settle()
    assert w.on("d") == ["b"]
    assert list(w.status("d")["nodes"]) == ["b"]


def test_a_status_that_was_lost_is_found_again_by_the_labels() -> None:
    w = world("a", "b", "c")
    w.create("d", replicas=2)
    w.settle()
    w.change("a", schedulable=True)
    held = w.on("d")
    w.datasets["d"]["status"] = {}
    w.settle()
    assert w.on("d") == held
    assert w.copied == 200


def test_fewer_replicas_leave_nodes_that_nobody_uses_first() -> None:
    w = world("a", "b", "c")
    w.create("d", replicas=3)
    w.settle()
    w.use("d", "p", "c")
    w.edit("d", replicas=1)
    w.settle()
    assert w.on("d") == ["c"]
    w.edit("d", replicas=1, nodeSelector={"disk": "ssd"})
    w.change("a", labels={"disk": "ssd"})
    w.step("d")
    w.step("d")
    assert w.status("d")["nodes"]["c"]["message"] == "waits for Pod p to end"
    w.end("p")
    w.settle()
    assert w.on("d") == ["a"]
    assert w.disks["c"] == {}


def test_another_source_is_copied_anew() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.edit("d", source="gs://b/other")
    w.disks["a"]["ns.d"] = 0
    planned = w.step("d")
    assert kinds(planned)[0] == "Label"
    assert w.on("d") == []
    w.settle()
    assert w.on("d") == ["a"]


def test_an_annotation_has_the_source_looked_at_again() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.restage("d", "2")
    w.step("d")
    assert w.ours() == []  # a pod may just be coming
    w.now += 6
    w.step("d")
    assert len(w.ours()) == 1
    w.settle()
    assert w.phase("d") == "Ready"
    assert w.copied == 100


@pytest.mark.parametrize("how", ["source", "annotation"])
def test_what_a_pod_uses_is_not_replaced_under_it(how: str) -> None:
    w = world("a", "b")
    w.create("d", replicas=2)
    w.settle()
    w.use("d", "train", kind="JobSet")
    w.use("d", "train-0", "a")
    w.use("d", "train-1")  # has no place yet, and waits for a label itself
    if how == "source":
        w.edit("d", source="gs://b/other")
    else:
        w.restage("d", "2")
    old, new = w.revisions["a", "ns.d"], w.read("d").revision
    planned = w.step("d")
    assert kinds(planned)[:2] == ["Label", "Label"]
    assert w.on("d") == []
    w.settle()
    assert w.on("d") == ["b"]
    assert (w.revisions["a", "ns.d"], w.revisions["b", "ns.d"]) == (old, new)
    assert w.phase("d") == "Staging"
    assert w.status("d")["message"] == "a: waits for Pod train-0 before it is copied anew"
    assert w.status("d")["ready"] == "1/2"
    assert w.status("d")["progress"] == "50%"
    assert w.plan("d").again_s == pytest.approx(3)
    w.end("train-0")
    w.settle()
    assert w.phase("d") == "Ready"
    assert w.on("d") == ["a", "b"]
    assert w.revisions["a", "ns.d"] == new
    assert "message" not in w.status("d")["nodes"]["a"]


def test_a_pod_that_comes_while_the_label_goes_is_waited_for() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.restage("d", "2")
    w.step("d")
    w.now += 2
    w.use("d", "late", "a")
    w.settle()
    assert w.on("d") == []
    assert w.status("d")["nodes"]["a"]["message"] == "waits for Pod late before it is copied anew"
    w.restage("d", "")  # as it was: a pod still reads it, so what it is then is looked at later
    w.settle()
    assert w.on("d") == []
    w.end("late")
    w.settle()
    assert w.on("d") == ["a"]
    assert w.copied == 100


def test_what_waits_to_be_replaced_can_be_deleted_or_lost() -> None:
    w = world("a", "b")
    w.create("d")
    w.settle()
    w.use("d", "p", "a")
    w.edit("d", source="gs://b/other")
    w.settle()
    w.ready("a", False)
    w.now += 301
    w.settle()
    assert w.on("d") == ["b"]
    w.ready("a", True)
    w.settle()
    assert w.on("d") == ["b"]
    assert w.status("d")["nodes"]["a"]["message"] == "waits for Pod p to end"
    w.delete("d")
    w.settle()
    assert w.disks["a"]
    w.end("p")
    w.settle()
    assert w.datasets == {}
    assert all(disk == {} for disk in w.disks.values())


# -- room --------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_make_room_and_come_back_when_used() -> None:
    w = world("a")
    w.room["a"] = 250
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
    assert w.on("big") == ["a"]
    assert w.on("old") == ["a"]  # used after the other
    assert w.phase("new") == "Evicted"
    assert "it is staged again when something uses it" in w.status("new")["message"]
    assert sum(w.disks["a"].values()) == 220
    w.delete("big")
    w.settle()
    assert w.phase("new") == "Evicted"
    w.use("new", "job", kind="JobSet")
    w.settle()
    assert w.on("new") == ["a"]


def test_what_is_kept_or_used_is_not_evicted_and_another_node_is_taken() -> None:
    w = world("a", "b", "c")
    w.room |= {"a": 150, "b": 150, "c": 150}
    w.change("c", schedulable=False)
    w.create("kept", keep=True)
    w.settle()
    w.create("used")
    w.settle()
    w.use("used", "p", w.on("used")[0])
    w.settle()
    w.create("big", size=140)
    w.settle()
    assert w.phase("big") == "Failed"
    assert "the disk lacks 90 B of room below /var/lib/voxlane" in w.status("big")["message"]
    assert (w.phase("kept"), w.phase("used")) == ("Ready", "Ready")
    w.change("c", schedulable=True)
    w.settle()
    assert w.on("big") == ["c"]
    assert list(w.status("big")["nodes"]) == ["c"]


def test_room_is_made_where_the_copy_began() -> None:
    w = world("a", "b")
    w.room |= {"a": 150, "b": 150}
    for name in ("one", "two"):
        w.create(name)
        w.settle()
    assert (w.on("one"), w.on("two")) == (["a"], ["b"])
    w.create("big", size=140)
    w.settle()
    assert w.on("big") == ["a"]
    assert (w.phase("one"), w.phase("two")) == ("Evicted", "Ready")


def test_nothing_is_evicted_where_it_would_not_be_enough() -> None:
    w = world("a")
    w.room["a"] = 150
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
    assert w.status("d")["message"] == "waits for JobSet train and Pod train-0 to end"
    assert w.on("d") == ["a", "b"]  # its pods may be restarted
    w.end("train")
    w.end("train-0")
    w.settle()
    assert w.datasets == {}
    assert w.disks == {"a": {}, "b": {}}
    assert w.on("d") == []
    assert w.pods == {}


def test_deletion_waits_for_a_node_that_does_not_answer_but_not_for_one_that_is_gone() -> None:
    w = world("a", "b")
    w.create("d", replicas=2)
    w.settle()
    w.ready("a", False)
    w.delete("d")
    w.settle()
    assert w.status("d")["message"] == "waits for a, which does not answer, to remove the copy there"
    assert w.disks["b"] == {}
    del w.nodes["a"]
    w.settle()
    assert w.datasets == {}


def test_deletion_in_the_middle_of_a_copy_removes_what_is_there() -> None:
    w = world("a")
    w.create("d")
    w.step("d")
    w.disks["a"]["ns.d"] = 40
    w.delete("d")
    w.settle()
    assert w.datasets == {}
    assert w.disks["a"] == {}


def test_a_removal_that_fails_is_said_and_tried_again() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.delete("d")
    w.step("d")
    w.now += 6
    assert StartRemoval("a", w.nodes["a"].uid, 0) in w.step("d").actions
    w.run_pods(lambda _: {"reason": "Disk", "message": "read-only disk"})
    w.step("d")
    assert w.status("d")["message"] == "a: the copy cannot be removed: read-only disk"
    w.settle()
    assert w.datasets == {}


def test_deletion_does_not_go_where_the_operator_may_not() -> None:
    w = world("a")
    w.create("d")
    w.settle()
    w.status("d")["hostPath"] = "/etc/datasets/ns.d"
    w.delete("d")
    w.settle()
    assert "does not allow /etc" in w.status("d")["message"]
    assert not w.ours()


# -- everything at once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_killed_anywhere_among_any_troubles_it_comes_to_what_was_asked_for(seed: int) -> None:
    """The world itself fails where a label is not true or data is removed or replaced under a pod."""
    rng = random.Random(seed)
    w = world("a", "b", "c", "d")
    w.room = dict.fromkeys("abcd", rng.choice([250, 1 << 40]))
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
            case 2 if w.on("x"):
                w.use("x", f"p{turn}", rng.choice(w.on("x")))
            case 3 if users := [name for space, name in w.pods if space == "ns" and name.startswith("p")]:
                w.end(rng.choice(users))
            case 4 if "y" in w.datasets:
                w.edit("y", replicas=rng.randint(1, 3))
            case 5 if rng.random() < 0.2 and "z" in w.datasets:
                w.delete("z")
            case 6 if w.ours():
                pod = rng.choice(w.ours())["metadata"]
                del w.pods[pod["namespace"], pod["name"]]
            case 10:
                w.restage("x", rng.choice("123"))
        w.now += rng.choice([0, 1, 5, 30, 200])
    w.room = dict.fromkeys("abcd", 1 << 40)
    for node in "abcd":
        w.ready(node, True)
    for space, name in list(w.pods):
        if space == "ns" and name.startswith("p"):
            w.end(name)
    w.now += 2000
    for name in list(w.datasets):
        w.use(name, f"q{name}", kind="JobSet")
    w.settle(patience_s=1000)
    for name, said in w.datasets.items():
        if "deletionTimestamp" in said["metadata"]:
            assert w.phase(name) == "Deleting"
            continue
        assert w.phase(name) == "Ready", w.status(name)
        assert len(w.on(name)) == said["spec"]["replicas"]
        for node, disk in w.disks.items():
            assert (disk.get(f"ns.{name}") == 100) == (node in w.on(name))
    for name in list(w.datasets):
        w.delete(name)
        w.end(f"q{name}")
    w.settle(patience_s=1000)
    assert w.datasets == {}
    assert all(disk == {} for disk in w.disks.values())
    assert w.pods == {}


def test_differences_are_merge_patches() -> None:
    old = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1], "f": {"g": 1}}
    assert difference(old, old) == {}
    assert difference(old, {"b": {"c": 2, "d": 4}, "e": [2], "f": {}, "h": {}}) == {
        "a": None,
        "b": {"d": 4},
        "e": [2],
        "f": {"g": None},
        "h": {},
    }
