"""The pure parts of deploy, undeploy and logs, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.cluster.app.test_config import build_app
from voxlane.cluster.kubernetes.app import deploy, execute, logs, preflight, snapshot, status, undeploy
from voxlane.cluster.kubernetes.app.k8s import AppSnapshot, shorten_pod_names
from voxlane.cluster.kubernetes.app.render import render
from voxlane.errors import ClusterError, ConfigError, NotRunningError

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
Object = dict[str, Any]


def build_object(kind: str, name: str, app: str = "demo", **more: Any) -> Object:
    labels = {"voxlane.dev/app": app, **more.pop("labels", {})}
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": labels}, **more}


# -- deploy ------------------------------------------------------------------------------------------------------------


def test_matches_ignores_fields_filled_in_by_the_server() -> None:
    manifest = {"spec": {"source": "gs://a", "list": [{"x": 1}]}}
    assert deploy.matches({"spec": {"source": "gs://a", "list": [{"x": 1, "y": 2}], "more": 3}, "status": {}}, manifest)
    assert not deploy.matches({"spec": {"source": "gs://b", "list": [{"x": 1}]}}, manifest)
    assert not deploy.matches({"spec": {"source": "gs://a", "list": []}}, manifest)


def test_merge_keeps_what_others_wrote() -> None:
    before = build_object("StagedDataset", "d", spec={"source": "a", "old": 1}, status={"phase": "Ready"})
    before["metadata"] |= {"finalizers": ["operator"], "resourceVersion": "7", "managedFields": [1]}
    result = deploy.merge_manifest(before, build_object("StagedDataset", "d", spec={"source": "b"}))
    assert result["spec"] == {"source": "b"}
    assert result["metadata"]["finalizers"] == ["operator"]
    assert result["metadata"]["resourceVersion"] == "7"
    assert "managedFields" not in result["metadata"]
    assert result["status"] == {"phase": "Ready"}


def test_dry_run_name_has_the_same_length() -> None:
    for name in ("demo", "a", "a" * 50):
        result = deploy.rename_for_dry_run(build_object("JobSet", name))["metadata"]["name"]
        assert len(result) == len(name)
        assert result != name


def test_planned_actions_and_refusals() -> None:
    def plan(
        manifest: Object, before: Object | None, snapshot: AppSnapshot, replace: bool = False
    ) -> deploy.DeployPlan:
        return deploy.plan([manifest], [before], snapshot, replace=replace)

    none = AppSnapshot(name="demo", namespace="team")
    assert plan(build_object("ConfigMap", "c", data={}), None, none).steps[0].action == "create"
    with pytest.raises(ClusterError, match="ConfigMap c exists and does not belong to this app"):
        plan(build_object("ConfigMap", "c"), build_object("ConfigMap", "c", app="other"), none)
    deleting = build_object("StagedDataset", "d", status={"message": "removes its copies from n1."})
    deleting["metadata"]["deletionTimestamp"] = "2026-05-04T11:00:00Z"
    assert plan(build_object("StagedDataset", "d", spec={}), deleting, none).steps[0].action == "replace"
    deleting["metadata"]["labels"] = {"voxlane.dev/app": "other"}
    with pytest.raises(ClusterError, match=r"StagedDataset d is still being removed \(removes its copies from n1\)"):
        plan(build_object("StagedDataset", "d", spec={}), deleting, none)
    running = build_object("JobSet", "demo", spec={"replicatedJobs": []})
    snapshot = AppSnapshot(name="demo", namespace="team", workload=running)
    with pytest.raises(ClusterError, match=r"it is already deployed .* Give --replace"):
        plan(build_object("JobSet", "demo"), running, snapshot)
    result = plan(build_object("JobSet", "demo"), running, snapshot, replace=True)
    assert (result.steps[0].action, result.remove) == ("replace", [running])
    done = {**running, "status": {"conditions": [{"type": "Completed", "status": "True"}]}}
    assert plan(
        build_object("JobSet", "demo"), done, AppSnapshot(name="demo", namespace="team", workload=done)
    ).remove == [done]


def test_old_job_ends_first_if_data_waits_for_it() -> None:
    running = build_object("JobSet", "demo", spec={"replicatedJobs": []})
    ended = {**running, "status": {"conditions": [{"type": "Completed", "status": "True"}]}}
    deleting = build_object("StagedDataset", "d", spec={"source": "gs://a"})
    deleting["metadata"]["deletionTimestamp"] = "2026-05-04T11:00:00Z"

    def first(before: Object, manifest: Object, old: Object = running) -> bool:
        snapshot = AppSnapshot(name="demo", namespace="team", workload=old)
        return deploy.plan([manifest, build_object("JobSet", "demo")], [before, old], snapshot, replace=True).ends_first

    def data(**spec: Any) -> Object:
        return build_object("StagedDataset", "d", spec=spec)

    assert not first(data(source="gs://a"), data(source="gs://a"))
    assert not first(data(source="gs://a"), data(source="gs://a", timeout="3h"))
    assert first(data(source="gs://a"), data(source="gs://b"))
    assert not first(data(source="gs://a"), data(source="gs://b"), ended)  # the old job has ended
    again = data(source="gs://a")
    again["metadata"]["annotations"] = {"voxlane.dev/restage": "2"}
    assert first(data(source="gs://a"), again)
    assert not first(again, data(source="gs://a"))  # a change keeps annotations of others
    assert first(deleting, data(source="gs://a"))


def test_is_staged() -> None:
    def data(generation: int = 1, **status: Any) -> Object:
        return {"metadata": {"name": "d", "generation": generation}, "status": {"observedGeneration": 1, **status}}

    assert deploy.is_staged(data(phase="Ready"), 2)
    assert not deploy.is_staged(data(2, phase="Ready"), 2)
    assert deploy.is_staged(data(phase="Degraded", ready="2/3"), 2)
    assert not deploy.is_staged(data(phase="Degraded", ready="1/3"), 2)
    assert not deploy.is_staged({"metadata": {"name": "d"}}, 1)


def test_short_outage_of_the_cluster_does_not_end_the_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    class FlakyCluster:
        namespace = "team"
        answers: list[Any] = [ClusterError("it does not answer")] * 3 + [{"phase": "Ready", "ready": "1/1"}]

        def get(self, path: str) -> Object:
            requirements = self.answers.pop(0)
            if isinstance(requirements, Exception):
                raise requirements
            return {"metadata": {"name": "d"}, "status": requirements}

    monkeypatch.setattr(deploy, "_POLL_S", 0.01)
    reports: list[str] = []
    deploy.wait_for_data(FlakyCluster(), "d", lambda _: None, reports.append)  # type: ignore[arg-type]
    assert reports == ["StagedDataset d: on 1/1 nodes, size unknown"]
    monkeypatch.setattr(deploy, "_MAX_SILENCE_S", 0.0)
    FlakyCluster.answers = [ClusterError("it does not answer")] * 3
    with pytest.raises(ClusterError, match="does not answer"):
        deploy.wait_for_data(FlakyCluster(), "d", lambda _: None, reports.append)  # type: ignore[arg-type]


# -- preflight ---------------------------------------------------------------------------------------------------------


def test_preflight_reads_the_app() -> None:
    app = build_app(
        train={"data": "s3://a/b", "run": "s3://a/r"},
        nodes=3,
        device="gpu",
        devices_per_node=4,
        node_selector={"pool": "a100"},
        stage=[{"name": "own", "source": "s3://a/b", "node_selector": {}}, {"name": "kits19"}],
        credentials={"secret": "bucket"},
        pull_secret="registry",
    )
    secrets = {"bucket": {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}, "registry": {".dockerconfigjson"}}
    assert preflight.list_secrets(app) == secrets
    with_file = replace(app, credentials={"secret": "google", "file": "key.json"}, pull_secret="google")
    assert preflight.list_secrets(with_file) == {"google": {"key.json", ".dockerconfigjson"}}
    train_job = build_app(template="trainjob", credentials={"secret": "bucket"})  # its variables are optional
    assert preflight.list_secrets(train_job) == {}
    manifests = render(app, "kits:1")
    assert preflight.list_node_requests(app, manifests) == [
        ("data own", 3, {}, {}),
        ("the app", 3, {"pool": "a100"}, {"nvidia.com/gpu": "4"}),
    ]
    node = {"metadata": {"name": "n", "labels": {"pool": "a100"}}, "status": {"allocatable": {"nvidia.com/gpu": "2"}}}
    findings = preflight.check_nodes([node], app, manifests)
    assert all(finding.is_note for finding in findings)
    assert [finding.message for finding in findings] == [
        "data own requests 3 nodes, but the cluster has 1 node: it will wait",
        "the app requests 3 nodes with pool=a100, but the cluster has 1 node: it will wait",
        "the app requests 4 nvidia.com/gpu on each node with pool=a100, but none has more than 2: it will wait",
    ]
    problems = [finding for finding in preflight.check_nodes([], app, manifests) if not finding.is_note]
    assert "no node has the labels that the app requires (pool=a100)" in str(problems[0])


def test_preflight_counts_all_pods_of_a_ray_cluster_and_of_tensorboard() -> None:
    command = ["voxlane", "bench", "loading", "gs://b/kits"]
    ray = build_app(template="rayjob", command=command, run="gs://b/r", nodes=2, node_selector={"a": "b"})
    assert preflight.list_node_requests(ray, []) == [
        ("the app", 1, {}, {"cpu": "2", "memory": "8Gi"}),
        ("the app", 2, {"a": "b"}, {}),
        ("the app", 1, {}, {"cpu": "500m", "memory": "512Mi"}),
    ]
    board = build_app(template="tensorboard", run="gs://b/r")
    assert preflight.list_node_requests(board, []) == [("the app", 1, {}, {"cpu": "250m", "memory": "2Gi"})]


# -- undeploy ----------------------------------------------------------------------------------------------------------


def test_undeploy_plan() -> None:
    run = build_object("JobSet", "demo", spec={})
    run["metadata"]["annotations"] = {"voxlane.dev/run": "gs://b/run"}
    own_objects = [
        run,
        build_object("ConfigMap", "c"),
        *(build_object("StagedDataset", name, spec={}) for name in ("a", "b")),
    ]
    own_objects.append(build_object("StagedDataset", "kept", spec={"keep": True}))
    other = build_object("JobSet", "other", app="other", labels={"staged.voxlane.dev/b": "true"}, spec={})
    result = undeploy.plan(own_objects, [run, other], "demo")
    assert [item["metadata"]["name"] for item in result.remove] == ["demo", "c", "a"]
    assert result.remaining == ["data b, which other uses", "data kept (keep: true)", "the run gs://b/run"]
    assert result.hand_over == {"b": "other"}
    assert [item["kind"] for item in undeploy.plan(own_objects, [], "demo", keep_data=True).remove] == [
        "JobSet",
        "ConfigMap",
    ]


def test_explain_wait() -> None:
    deleting = {"metadata": {"name": "p", "deletionTimestamp": "x", "deletionGracePeriodSeconds": 120}}
    assert undeploy.explain_wait("JobSet", None, [deleting]) == "waits for 1 pod to end (they have 120 s to save)"
    used = build_object("StagedDataset", "d", status={"message": "2 pods still use it."})
    assert undeploy.explain_wait("StagedDataset", used, []) == "2 pods still use it"


# -- logs, events, exec ------------------------------------------------------------------------------------------------


def test_parse_line() -> None:
    first = logs.parse_line(b"2026-05-04T12:00:00.5Z hello world", "node-0")
    assert first == logs.LogLine("2026-05-04T12:00:00.500000000Z", "node-0", "hello world")
    assert logs.parse_line(b"2026-05-04T12:00:01Z ", "node-0").time > first.time
    assert logs.parse_line(b"no time at all", "node-0", first.time) == logs.LogLine(
        first.time, "node-0", "no time at all"
    )
    assert logs.parse_line(b"2026-05-04T11:00:00Z back", "node-0", first.time).time == first.time
    assert logs.parse_line(b"2026-05-04T12:00:00Z \xff", "n").text == "\ufffd"


def test_reopened_connection_continues_at_the_same_line() -> None:
    """The server repeats the last second; no line is printed twice, and none is lost."""
    stamps = ["00.1", "00.1", "00.2", "01.0", "01.0", "01.0", "02.0"]
    lines = [logs.parse_line(f"2026-05-04T12:00:{s}Z {i}".encode(), "node-0") for i, s in enumerate(stamps)]
    assert list(logs.skip_known_lines(iter(lines), "", 0)) == lines
    known_lines = lines[:5]
    assert list(logs.skip_known_lines(iter(lines[3:]), known_lines[-1].time, 2)) == lines[5:]


def test_short_names_of_archived_pods() -> None:
    names = ["demo-node-0-0-abcde", "demo-node-0-1-abcde", "demo-node-0-1-fghij"]
    pods = [{"metadata": {"name": name}} for name in names]
    assert list(shorten_pod_names(pods, "demo").values()) == ["node-0", "node-0-1-abcde", "node-0-1-fghij"]


def test_pods_are_selected_by_full_or_short_name() -> None:
    pods = [{"metadata": {"name": "demo-head-abcde", "generateName": "demo-head-"}}]
    assert logs.select_pods(pods, "demo", ["head"]) == logs.select_pods(pods, "demo", ["demo-head-abcde"]) == pods
    with pytest.raises(ConfigError, match=r"no pod 'x'\. There are: head"):
        logs.select_pods(pods, "demo", ["x"])
    with pytest.raises(NotRunningError, match="none of its pods runs: queued"):
        execute.choose_pod(pods, "demo", "queued")


def test_events_of_an_app() -> None:
    def event(kind: str, name: str, uid: str, **more: Any) -> Object:
        about = {"kind": kind, "name": name, "uid": uid}
        return {"metadata": {}, "involvedObject": about, "lastTimestamp": "2026-05-04T11:59:00Z", **more}

    pod = {"kind": "Pod", "metadata": {"name": "demo-node-0-0-a", "uid": "1"}}
    requirements = [
        event("Pod", "demo-node-0-0-a", "1", type="Warning", reason="Failed", message="no\nimage", count=3),
        event("Pod", "demo-node-0-0-gone", "2", type="Normal", reason="Killing", message="x"),
        event("JobSet", "demo", "3", type="Normal", reason="Made", message="y"),
        event("Pod", "other-node-0-0-a", "4", type="Normal", reason="z", message="z"),
    ]
    own_objects = snapshot.filter_events(requirements, [pod], "demo")
    assert [item["reason"] for item in own_objects] == ["Failed", "Killing", "Made"]
    assert status.format_events(own_objects, "demo", NOW)[1].split() == [
        *("60s", "Warning", "Failed", "pod", "node-0-0-a", "no", "image", "(x3)")
    ]


def test_exit_status_of_a_command() -> None:
    assert execute.parse_exit_status(b'{"status": "Success"}') == 0
    code = b'{"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "5"}]}}'
    assert execute.parse_exit_status(code) == 5
    with pytest.raises(ClusterError, match="could not be run: no such file"):
        execute.parse_exit_status(b'{"status": "Failure", "message": "no such file"}')
