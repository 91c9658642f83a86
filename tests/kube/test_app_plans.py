"""What deploy, undeploy and logs decide before they do anything. No cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from voxlane.app import deploy, events, execute, logs, preflight, undeploy
from voxlane.app.objects import Seen
from voxlane.cli.app_cluster import _kept_names
from voxlane.errors import ClusterError, ConfigError, NotRunningError

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
Object = dict[str, Any]


def thing(kind: str, name: str, app: str = "demo", **more: Any) -> Object:
    labels = {"voxlane.dev/app": app, **more.pop("labels", {})}
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": labels}, **more}


# -- deploy ------------------------------------------------------------------------------------------------------------


def test_an_object_that_already_is_what_is_asked() -> None:
    wanted = {"spec": {"source": "gs://a", "list": [{"x": 1}]}}
    assert deploy.covers({"spec": {"source": "gs://a", "list": [{"x": 1, "y": 2}], "more": 3}, "status": {}}, wanted)
    assert not deploy.covers({"spec": {"source": "gs://b", "list": [{"x": 1}]}}, wanted)
    assert not deploy.covers({"spec": {"source": "gs://a", "list": []}}, wanted)


def test_a_change_keeps_what_others_wrote() -> None:
    before = thing("StagedDataset", "d", spec={"source": "a", "old": 1}, status={"phase": "Ready"})
    before["metadata"] |= {"finalizers": ["operator"], "resourceVersion": "7", "managedFields": [1]}
    made = deploy.changed(before, thing("StagedDataset", "d", spec={"source": "b"}))
    assert made["spec"] == {"source": "b"}
    assert made["metadata"]["finalizers"] == ["operator"]
    assert made["metadata"]["resourceVersion"] == "7"
    assert "managedFields" not in made["metadata"]
    assert made["status"] == {"phase": "Ready"}


def test_the_stand_in_of_a_dry_run_is_as_long_and_another() -> None:
    for name in ("demo", "a", "a" * 50):
        made = deploy.stand_in(thing("JobSet", name))["metadata"]["name"]
        assert len(made) == len(name)
        assert made != name


def test_what_may_not_be_deployed() -> None:
    def plan(manifest: Object, there: Object | None, seen: Seen, replace: bool = False) -> deploy.Plan:
        return deploy.plan([manifest], [there], seen, NOW, replace=replace)

    none = Seen(name="demo", namespace="team")
    assert plan(thing("ConfigMap", "c", data={}), None, none).steps[0].action == "create"
    with pytest.raises(ClusterError, match="ConfigMap c is there, and not of this app"):
        plan(thing("ConfigMap", "c"), thing("ConfigMap", "c", app="other"), none)
    going = thing("StagedDataset", "d", status={"message": "removes its copies from n1."})
    going["metadata"]["deletionTimestamp"] = "2026-05-04T11:00:00Z"
    assert plan(thing("StagedDataset", "d", spec={}), going, none).steps[0].action == "replace"
    going["metadata"]["labels"] = {"voxlane.dev/app": "other"}
    with pytest.raises(ClusterError, match=r"StagedDataset d is still being removed \(removes its copies from n1\)"):
        plan(thing("StagedDataset", "d", spec={}), going, none)
    runs = thing("JobSet", "demo", spec={"replicatedJobs": []})
    seen = Seen(name="demo", namespace="team", workload=runs)
    with pytest.raises(ClusterError, match=r"it is deployed already .* Give --replace"):
        plan(thing("JobSet", "demo"), runs, seen)
    made = plan(thing("JobSet", "demo"), runs, seen, replace=True)
    assert (made.steps[0].action, made.remove) == ("replace", [runs])
    done = {**runs, "status": {"conditions": [{"type": "Completed", "status": "True"}]}}
    assert plan(thing("JobSet", "demo"), done, Seen(name="demo", namespace="team", workload=done)).remove == [done]


def test_the_old_job_ends_first_where_data_waits_for_it() -> None:
    runs = thing("JobSet", "demo", spec={"replicatedJobs": []})
    ended = {**runs, "status": {"conditions": [{"type": "Completed", "status": "True"}]}}
    going = thing("StagedDataset", "d", spec={"source": "gs://a"})
    going["metadata"]["deletionTimestamp"] = "2026-05-04T11:00:00Z"

    def first(before: Object, wanted: Object, old: Object = runs) -> bool:
        seen = Seen(name="demo", namespace="team", workload=old)
        return deploy.plan([wanted, thing("JobSet", "demo")], [before, old], seen, NOW, replace=True).ends_first

    def data(**spec: Any) -> Object:
        return thing("StagedDataset", "d", spec=spec)

    assert not first(data(source="gs://a"), data(source="gs://a"))
    assert not first(data(source="gs://a"), data(source="gs://a", timeout="3h"))
    assert first(data(source="gs://a"), data(source="gs://b"))
    assert not first(data(source="gs://a"), data(source="gs://b"), ended)  # nothing waits for it
    again = data(source="gs://a")
    again["metadata"]["annotations"] = {"voxlane.dev/restage": "2"}
    assert first(data(source="gs://a"), again)
    assert not first(again, data(source="gs://a"))  # a change keeps what others wrote
    assert first(going, data(source="gs://a"))


def test_when_data_is_ready() -> None:
    def data(generation: int = 1, **status: Any) -> Object:
        return {"metadata": {"name": "d", "generation": generation}, "status": {"observedGeneration": 1, **status}}

    assert deploy.is_ready(data(phase="Ready"), 2)
    assert not deploy.is_ready(data(2, phase="Ready"), 2)
    assert deploy.is_ready(data(phase="Degraded", ready="2/3"), 2)
    assert not deploy.is_ready(data(phase="Degraded", ready="1/3"), 2)
    assert not deploy.is_ready({"metadata": {"name": "d"}}, 1)


def test_a_cluster_that_does_not_answer_for_a_moment_costs_no_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moody:
        namespace = "team"
        answers: list[Any] = [ClusterError("it does not answer")] * 3 + [{"phase": "Ready", "ready": "1/1"}]

        def get(self, path: str) -> Object:
            found = self.answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return {"metadata": {"name": "d"}, "status": found}

    monkeypatch.setattr(deploy, "_POLL_S", 0.01)
    told: list[str] = []
    deploy.await_data(Moody(), "d", lambda _: None, told.append)  # type: ignore[arg-type]
    assert told == ["StagedDataset d: on 1/1 nodes, size not known"]
    monkeypatch.setattr(deploy, "_SILENCE_S", 0.0)
    Moody.answers = [ClusterError("it does not answer")] * 3
    with pytest.raises(ClusterError, match="does not answer"):
        deploy.await_data(Moody(), "d", lambda _: None, told.append)  # type: ignore[arg-type]


# -- preflight ---------------------------------------------------------------------------------------------------------


def test_what_manifests_need() -> None:
    pod = {
        "serviceAccountName": "trainer",
        "priorityClassName": "high",
        "nodeSelector": {"pool": "a100"},
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [{"name": "c", "secret": {"secretName": "google", "items": [{"key": "key.json", "path": "x"}]}}],
        "containers": [
            {
                "name": "node",
                "envFrom": [{"secretRef": {"name": "bucket"}}],
                "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "one", "key": "a"}}}],
                "resources": {"limits": {"nvidia.com/gpu": "4"}},
            }
        ],
    }
    labels = {"kueue.x-k8s.io/queue-name": "gpu", "staged.voxlane.dev/kits19": "true", "staged.voxlane.dev/own": "true"}
    job = {"replicas": 1, "template": {"spec": {"parallelism": 3, "template": {"spec": pod}}}}
    manifests = [
        thing("StagedDataset", "own", spec={"source": "s3://a/b", "replicas": 3, "credentials": {"secret": "bucket"}}),
        thing("JobSet", "demo", labels=labels, spec={"replicatedJobs": [job]}),
    ]
    found = preflight.needs(manifests, keys=["AWS_ACCESS_KEY_ID"])
    assert found.queue == "gpu"
    assert found.data == {"kits19": (True, ""), "own": (False, "")}
    assert found.secrets == {
        "bucket": {"AWS_ACCESS_KEY_ID"},
        "google": {"key.json"},
        "one": {"a"},
        "registry": {".dockerconfigjson"},
    }
    assert (found.accounts, found.priorities) == ({"trainer"}, {"high"})
    assert found.nodes == [("data own", 3, {}, {}), ("the app", 3, {"pool": "a100"}, {"nvidia.com/gpu": 4.0})]
    node = {"metadata": {"name": "n", "labels": {"pool": "a100"}}, "status": {"allocatable": {"nvidia.com/gpu": "2"}}}
    answer = preflight.nodes_found([node], found)
    assert answer.problems == []
    assert answer.notes == [
        "data own asks for 3 nodes, and the cluster has 1 node: it will wait",
        "the app asks for 3 nodes with pool=a100, and the cluster has 1 node: it will wait",
        "the app asks for 4 nvidia.com/gpu on each node with pool=a100, and none has more than 2: it will wait",
    ]
    assert "no node has the labels that the app asks for (pool=a100)" in str(
        preflight.nodes_found([], found).problems[0]
    )


# -- undeploy ----------------------------------------------------------------------------------------------------------


def test_what_goes_and_what_stays() -> None:
    run = thing("JobSet", "demo", spec={})
    run["metadata"]["annotations"] = {"voxlane.dev/run": "gs://b/run"}
    own = [run, thing("ConfigMap", "c"), *(thing("StagedDataset", name, spec={}) for name in ("a", "b"))]
    own.append(thing("StagedDataset", "kept", spec={"keep": True}))
    other = thing("JobSet", "other", app="other", labels={"staged.voxlane.dev/b": "true"}, spec={})
    made = undeploy.plan(own, [run, other], "demo")
    assert [one["metadata"]["name"] for one in made.remove] == ["demo", "c", "a"]
    assert made.stays == ["data b, which other uses", "data kept (keep: true)", "the run gs://b/run"]
    assert made.hand_over == {"b": "other"}
    assert [one["kind"] for one in undeploy.plan(own, [], "demo", keep_data=True).remove] == ["JobSet", "ConfigMap"]


def test_why_something_is_still_there() -> None:
    going = {"metadata": {"name": "p", "deletionTimestamp": "x", "deletionGracePeriodSeconds": 120}}
    assert undeploy.waits_for("JobSet", None, [going]) == "waits for 1 pod to end (they have 120 s to save)"
    used = thing("StagedDataset", "d", status={"message": "2 pods still use it."})
    assert undeploy.waits_for("StagedDataset", used, []) == "2 pods still use it"


# -- logs, events, exec ------------------------------------------------------------------------------------------------


def test_lines_and_their_times() -> None:
    first = logs.parsed(b"2026-05-04T12:00:00.5Z hello world", "node-0")
    assert first == logs.Line("2026-05-04T12:00:00.500000000Z", "node-0", "hello world")
    assert logs.parsed(b"2026-05-04T12:00:01Z ", "node-0").time > first.time
    assert logs.parsed(b"no time at all", "node-0", first.time) == logs.Line(first.time, "node-0", "no time at all")
    assert logs.parsed(b"2026-05-04T11:00:00Z back", "node-0", first.time).time == first.time
    assert logs.parsed(b"2026-05-04T12:00:00Z \xff", "n").text == "\ufffd"


def test_a_connection_that_broke_goes_on_where_it_broke() -> None:
    """The server repeats the second that it broke in; no line comes twice, none is lost."""
    stamps = ["00.1", "00.1", "00.2", "01.0", "01.0", "01.0", "02.0"]
    lines = [logs.parsed(f"2026-05-04T12:00:{s}Z {i}".encode(), "node-0") for i, s in enumerate(stamps)]
    assert list(logs.unseen(iter(lines), "", 0)) == lines
    known = lines[:5]
    assert list(logs.unseen(iter(lines[3:]), known[-1].time, 2)) == lines[5:]


def test_names_of_pods_that_are_gone() -> None:
    names = ["demo-node-0-0-abcde", "demo-node-0-1-abcde", "demo-node-0-1-fghij"]
    assert list(_kept_names(names, "demo").values()) == ["node-0", "node-0-1-abcde", "node-0-1-fghij"]


def test_pods_are_chosen_by_either_name() -> None:
    pods = [{"metadata": {"name": "demo-head-abcde", "generateName": "demo-head-"}}]
    assert logs.chosen(pods, "demo", ["head"]) == logs.chosen(pods, "demo", ["demo-head-abcde"]) == pods
    with pytest.raises(ConfigError, match=r"no pod 'x'\. There are: head"):
        logs.chosen(pods, "demo", ["x"])
    with pytest.raises(NotRunningError, match="no pod of it runs: queued"):
        execute.choose(pods, "demo", "queued")


def test_events_of_an_app() -> None:
    def event(kind: str, name: str, uid: str, **more: Any) -> Object:
        about = {"kind": kind, "name": name, "uid": uid}
        return {"metadata": {}, "involvedObject": about, "lastTimestamp": "2026-05-04T11:59:00Z", **more}

    pod = {"kind": "Pod", "metadata": {"name": "demo-node-0-0-a", "uid": "1"}}
    found = [
        event("Pod", "demo-node-0-0-a", "1", type="Warning", reason="Failed", message="no\nimage", count=3),
        event("Pod", "demo-node-0-0-gone", "2", type="Normal", reason="Killing", message="x"),
        event("JobSet", "demo", "3", type="Normal", reason="Made", message="y"),
        event("Pod", "other-node-0-0-a", "4", type="Normal", reason="z", message="z"),
    ]
    own = events.of_app(found, [pod], "demo")
    assert [one["reason"] for one in own] == ["Failed", "Killing", "Made"]
    assert events.lines(own, "demo", NOW)[1].split() == [
        *("60s", "Warning", "Failed", "pod", "node-0-0-a", "no", "image", "(x3)")
    ]


def test_the_end_of_a_command() -> None:
    assert execute.ended(b'{"status": "Success"}') == 0
    code = b'{"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "5"}]}}'
    assert execute.ended(code) == 5
    with pytest.raises(ClusterError, match="could not be run: no such file"):
        execute.ended(b'{"status": "Failure", "message": "no such file"}')
