"""Manifests are valid, deterministic and free of secrets, and match the samples in the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.app.test_config import BASE, LOADING, TRAIN, build_app
from voxlane.cli.main import main
from voxlane.cluster.kubernetes.app.config import App
from voxlane.cluster.kubernetes.app.pod import Manifest
from voxlane.cluster.kubernetes.app.render import hash_manifests, render, render_tensorboard, to_yaml
from voxlane.cluster.kubernetes.names import node_key
from voxlane.cluster.kubernetes.validate import validate
from voxlane.errors import ConfigError, ManifestError

DOCS = Path(__file__).parents[3] / "docs/kubernetes"
IMAGE = "registry.example/team/kits:0123"


def render_workload(app: App) -> Manifest:
    return render(app, IMAGE, namespace="team")[-1]


def get_job(jobset: Manifest) -> dict[str, Any]:
    result: dict[str, Any] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    return result


def get_pod(jobset: Manifest) -> dict[str, Any]:
    result: dict[str, Any] = get_job(jobset)["template"]["spec"]
    return result


def get_command(jobset: Manifest) -> list[str]:
    item = get_pod(jobset)["containers"][0]
    return [*item["command"], *item.get("args", [])]


def test_one_process_needs_no_torchrun() -> None:
    assert get_command(render_workload(build_app(train={**TRAIN, "set": {"epochs": 3}}))) == [
        *("voxlane", "app", "entry", "--logs", "gs://b/runs/a/logs", "--"),
        *("voxlane", "train", "gs://b/kits", "epochs=3", "--run", "gs://b/runs/a", "--auto-resume"),
    ]


def test_ranks_of_several_nodes_find_rank_0_by_name() -> None:
    rendered = render_workload(build_app(nodes=3, devices_per_node=2, grace_s=90))
    assert rendered["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    message = get_command(rendered)
    assert message[6:14] == [
        "torchrun",
        "--nnodes=3",
        "--nproc-per-node=2",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=kits-node-0-0.kits",
        "--master-port=29500",
        "--max-restarts=0",
        "--shutdown-timeout=80",
    ]
    assert get_pod(rendered)["terminationGracePeriodSeconds"] == 90
    job = get_job(rendered)
    assert (job["completionMode"], job["completions"], job["parallelism"], job["backoffLimit"]) == ("Indexed", 3, 3, 0)
    apart = get_pod(rendered)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"].items() <= job["template"]["metadata"]["labels"].items()


def test_disruption_does_not_count_as_a_restart() -> None:
    rendered = render_workload(build_app(restarts=2))
    policy = get_job(rendered)["podFailurePolicy"]["rules"]
    assert policy == [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [143]}},
    ]
    failure = rendered["spec"]["failurePolicy"]
    assert failure["maxRestarts"] == 2
    assert failure["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert failure["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert get_pod(rendered)["restartPolicy"] == "Never"


def test_command_gets_torchruns_variables() -> None:
    rendered = render_workload(build_app(command=["torchrun", "train.py"], nodes=2, devices_per_node=4))
    assert get_command(rendered) == ["torchrun", "train.py"]
    env = {item["name"]: item for item in get_pod(rendered)["containers"][0]["env"]}
    assert env["PET_NNODES"]["value"] == "2"
    assert env["PET_NPROC_PER_NODE"]["value"] == "4"
    assert env["PET_MASTER_ADDR"]["value"] == "kits-node-0-0.kits"
    assert "job-completion-index" in env["PET_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    with_run = render_workload(build_app(command=["python", "a.py"], run="gs://b/r/"))
    assert get_command(with_run)[:6] == ["voxlane", "app", "entry", "--logs", "gs://b/r/logs", "--"]


def test_loading_benchmark_runs_as_ranks_like_training() -> None:
    rendered = render_workload(
        build_app(command=[*LOADING, "--batch", 4], run="s3://b/bench/", nodes=2, devices_per_node=4)
    )
    command = get_command(rendered)
    entry, torchrun, loading = command[:6], command[6:16], command[16:]
    assert entry == ["voxlane", "app", "entry", "--logs", "s3://b/bench/logs", "--"]
    assert torchrun[0] == "torchrun"
    assert torchrun == get_command(render_workload(build_app(nodes=2, devices_per_node=4)))[6:16]
    assert loading == [*LOADING, "--batch", "4", "--out", "s3://b/bench/loading-bench.json"]
    assert not any(item["name"].startswith("PET_") for item in get_pod(rendered)["containers"][0]["env"])


def test_benchmark_with_one_process_and_its_own_out() -> None:
    rendered = render_workload(build_app(command=[*LOADING, "--out=gs://b/x.json"]))
    assert get_command(rendered) == [*LOADING, "--out=gs://b/x.json"]


def test_loading_benchmark_on_ray_gets_the_cluster_size() -> None:
    settings = {"template": "rayjob", "nodes": 8, "devices_per_node": 4, "resources": {"cpu": 16}}
    rendered = render_workload(build_app(command=[*LOADING, "--ranks", 2], run="gs://b/r", **settings))
    validate([rendered])
    options = "--out gs://b/r/loading-bench.json --launcher ray --nodes 8 --address auto"
    assert rendered["spec"]["entrypoint"].endswith(f"-- {' '.join(LOADING)} --ranks 2 {options}")
    assert "--ranks 4" in render_workload(build_app(command=LOADING, run="gs://b/r", **settings))["spec"]["entrypoint"]


def test_benchmark_gets_credentials_for_the_buckets_in_its_arguments() -> None:
    rendered = render_workload(
        build_app(command=[*LOADING, "s3://raw/kits"], run="gs://b/r", credentials={"endpoint": "http://x:1"})
    )
    env = {item["name"]: item.get("value") for item in get_pod(rendered)["containers"][0]["env"]}
    assert env["AWS_ENDPOINT_URL"] == env["STORAGE_EMULATOR_HOST"] == "http://x:1"
    assert "AZURE_STORAGE_ENDPOINT" not in env


def test_wrong_voxlane_command_is_rejected_before_deploying(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_values = {**BASE, "image": "kits:1", "command": ["voxlane", "bench", "checkpoint", "--epoch", "3"]}
    (tmp_path / "app.yaml").write_text(yaml.safe_dump(config_values))
    assert main(["app", "render", str(tmp_path)]) == 2
    assert "voxlane bench checkpoint: unknown option --epoch" in capsys.readouterr().err


def test_queued_app_is_suspended_and_placed_by_kueue() -> None:
    near = {"required": "cloud.google.com/block"}
    queued, free = (
        render_workload(build_app(nodes=2, queue="q", topology=near)),
        render_workload(build_app(nodes=2, topology=near)),
    )
    assert queued["spec"]["suspend"] is True
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    notes = get_job(queued)["template"]["metadata"]["annotations"]
    assert notes == {"kueue.x-k8s.io/podset-required-topology": "cloud.google.com/block"}
    assert "podAffinity" not in get_pod(queued)["affinity"]
    assert "suspend" not in free["spec"]
    terms = get_pod(free)["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms[0]["topologyKey"] == "cloud.google.com/block"


def test_pods_run_on_nodes_with_the_data() -> None:
    stage = [{"name": "kits", "source": "gs://b/kits", "capacity": "1Gi", "keep": True}, {"name": "more", "path": "/m"}]
    files, *_ = manifests = render(
        build_app(nodes=2, stage=stage, node_selector={"pool": "x"}), IMAGE, namespace="team"
    )
    assert [item["kind"] for item in manifests] == ["StagedDataset", "JobSet"]
    assert files["spec"] == {
        "source": "gs://b/kits",
        "replicas": 2,
        "nodeSelector": {"pool": "x"},
        "capacity": "1Gi",
        "dataPath": "/var/lib/voxlane",
        "keep": True,
    }
    jobset = manifests[-1]
    pod = get_pod(jobset)
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [(item["key"], item["values"]) for item in terms[0]["matchExpressions"]] == [
        ("staged.voxlane.dev/team.kits", ["ready"]),
        ("staged.voxlane.dev/team.more", ["ready"]),
    ]
    claim = {"claimName": "voxlane-data", "readOnly": True}
    assert [v for v in pod["volumes"] if v["name"] == "data-0"] == [{"name": "data-0", "persistentVolumeClaim": claim}]
    mounts = {item["mountPath"]: item for item in pod["containers"][0]["volumeMounts"]}
    for path, copy in (("/data/kits", "team.kits"), ("/m", "team.more")):
        expected = {"name": "data-0", "mountPath": path, "readOnly": True, "subPath": f"datasets/{copy}"}
        assert mounts[path] == expected
    assert "hostPath" not in json.dumps(jobset)
    for labels in (jobset["metadata"]["labels"], get_job(jobset)["template"]["metadata"]["labels"]):
        assert labels["staged.voxlane.dev/kits"] == labels["staged.voxlane.dev/more"] == "true"
    assert "loader.staged=/data/kits" in get_command(jobset)


def test_data_may_be_only_on_the_nodes() -> None:
    rendered = render_workload(
        build_app(
            train={"data": "/data/kits/prepared", "run": "gs://b/r"},
            stage=[{"name": "kits", "source": "nfs://server/kits"}],
        )
    )
    assert "/data/kits/prepared" in get_command(rendered)
    assert not any(word.startswith("loader.staged") for word in get_command(rendered))


def test_gpus_and_memory_are_requested() -> None:
    rendered = build_app(device="gpu", devices_per_node=4, resources={"cpu": 8, "memory": "64Gi", "disk": "10Gi"})
    item = get_pod(render_workload(rendered))["containers"][0]
    assert item["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi", "ephemeral-storage": "10Gi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "64Gi", "ephemeral-storage": "10Gi", "nvidia.com/gpu": "4"},
    }
    shm = [item["emptyDir"] for item in get_pod(render_workload(rendered))["volumes"] if "emptyDir" in item]
    assert shm == [{"medium": "Memory", "sizeLimit": "2Gi"}]
    assert "volumes" not in get_pod(render_workload(build_app(shared_memory=None)))


def test_credentials_are_only_names() -> None:
    google = get_pod(render_workload(build_app(credentials={"secret": "bucket", "file": "key.json"})))
    env = {item["name"]: item.get("value") for item in google["containers"][0]["env"]}
    assert env["GOOGLE_APPLICATION_CREDENTIALS"] == "/voxlane/credentials/key.json"
    assert google["volumes"][0]["secret"]["items"] == [{"key": "key.json", "path": "key.json"}]
    s3 = {"data": "s3://b/kits", "run": "s3://b/r"}
    amazon = build_app(train=s3, credentials={"secret": "bucket", "endpoint": "https://minio.example"})
    item = get_pod(render_workload(amazon))["containers"][0]
    assert item["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    assert {"name": "AWS_ENDPOINT_URL", "value": "https://minio.example"} in item["env"]
    by_key = render_workload(build_app(template="trainjob", train=s3, credentials={"secret": "bucket"}))["spec"][
        "trainer"
    ]["env"]
    keys = [item["name"] for item in by_key if "secretKeyRef" in item.get("valueFrom", {})]
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(keys)
    azure = build_app(train={"data": "az://c/k", "run": "az://c/r"}, credentials={"service_account": "trainer"})
    template = get_job(render_workload(azure))["template"]
    assert template["spec"]["serviceAccountName"] == "trainer"
    assert template["metadata"]["labels"]["azure.workload.identity/use"] == "true"


def test_search_runs_on_its_own_ray_cluster() -> None:
    rendered = render(_build_search(nodes=4, resources={"cpu": "6500m"}), IMAGE)[-1]
    spec = rendered["spec"]["rayClusterSpec"]
    assert rendered["spec"]["entrypoint"].endswith(
        "-- voxlane tune /voxlane/config/space.yaml gs://b/kits --run gs://b/runs/a --address auto --auto-resume"
    )
    assert spec["workerGroupSpecs"][0]["replicas"] == 4
    assert spec["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] == "6"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["authOptions"] == {"mode": "token"}


def test_tensorboard_listens_on_loopback_and_is_separate_from_the_job() -> None:
    rendered = render_tensorboard(build_app(nodes=2, device="gpu", stage=[{"name": "kits"}]), IMAGE, namespace="team")[
        0
    ]
    assert rendered["metadata"]["name"] == "kits-board"
    template = rendered["spec"]["template"]
    item = template["spec"]["containers"][0]
    assert item["command"] == ["voxlane", "tensorboard", "gs://b/runs/a", "--port", "6006", "--no-open", "--wait"]
    assert "ports" not in item
    assert "nvidia.com/gpu" not in json.dumps(rendered)
    assert "persistentVolumeClaim" not in json.dumps(rendered)
    assert not any(key.startswith("staged.") for key in template["metadata"]["labels"])
    with pytest.raises(ConfigError, match="nothing to show"):
        render_tensorboard(build_app(command=["x"]), IMAGE)


def _build_search(**values: Any) -> App:
    tune = {**BASE, "template": "rayjob", "tune": TRAIN, "files": {"space.yaml": "a: 1\n"}, **values}
    return App(**tune)


_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "placement": [
        {},
        {"nodes": 3, "queue": "q", "topology": {"preferred": "a/b"}},
        {"nodes": 2, "topology": {"required": "h"}},
    ],
    "resources": [
        {},
        {"device": "gpu", "devices_per_node": 8, "node_selector": {"a": True}, "tolerations": [{"key": "gpu"}]},
        {"resources": {"cpu": 0.5, "memory": "4Gi", "disk": "1Gi"}, "shared_memory": None, "pull_secret": "p"},
    ],
    "data": [
        {},
        {"stage": [{"name": "kits", "source": "gs://b/kits", "node_selector": {"a": "b"}, "timeout": "1h30m"}]},
        {"stage": [{"name": "there"}], "credentials": {"secret": "s", "file": "k.json"}, "env": {"A": 1}},
        {"credentials": {"secret": "s", "service_account": "sa", "endpoint": "http://minio:9000"}},
    ],
}
_WORK: dict[str, dict[str, Any]] = {
    "jobset": {"train": TRAIN, "ttl_s": 60, "priority_class": "high"},
    "command": {"command": ["python", "-c", "print('a b')"], "run": "s3://b/r"},
    "trainjob": {"train": TRAIN, "template": "trainjob"},
    "rayjob": {"tune": TRAIN, "template": "rayjob", "files": {"space.yaml": "a: 1\n"}},
}


@pytest.mark.parametrize("work", _WORK)
def test_every_manifest_fits_its_kind(work: str) -> None:
    for turn in range(12):  # all pairs of placement and data, with each of the resources
        parts = [
            variants[turn // step % len(variants)] for variants, step in zip(_VARIANTS.values(), (1, 4, 1), strict=True)
        ]
        values = {name: value for part in parts for name, value in part.items()}
        app = App(**{**BASE, **_WORK[work], **values})
        manifests = render(app, IMAGE, namespace="team")
        validate(manifests)
        assert manifests == render(app, IMAGE, namespace="team")
        assert list(yaml.load_all(to_yaml(manifests), yaml.CSafeLoader)) == manifests
        kinds = {item["metadata"]["labels"]["voxlane.dev/part"] for item in manifests}
        assert kinds <= {"job", "data", "config"}
        assert all(item["metadata"]["labels"]["voxlane.dev/app"] == "kits" for item in manifests)
        if app.run_uri:
            validate(render_tensorboard(app, IMAGE))


def test_content_hash_depends_on_the_manifests() -> None:
    def of(rendered: App) -> str:
        result: str = render_workload(rendered)["metadata"]["annotations"]["voxlane.dev/content"]
        return result

    assert of(build_app()) == of(build_app())
    assert of(build_app()) != of(build_app(nodes=2))
    assert hash_manifests([{"a": 1, "b": 2}]) == hash_manifests([{"b": 2, "a": 1}])


def test_long_names_of_data_fit_a_label() -> None:
    rendered = build_app(stage=[{"name": "d" * 60, "source": "gs://b/d"}], train=TRAIN)
    key = node_key("team", "d" * 60)
    assert len(key) == 63
    validate(render(rendered, IMAGE, namespace="team"))


# -- validation --------------------------------------------------------------------------------------------------------


def _replace_field(path: str, value: Any) -> list[Manifest]:
    rendered = json.loads(json.dumps(render(build_app(nodes=2, stage=[{"name": "k", "source": "gs://b/k"}]), IMAGE)))
    *parents, last = path.split("/")
    at: Any = rendered
    for part in parents:
        at = at[int(part)] if part.isdigit() else at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return list(rendered)


_POD = "1/spec/replicatedJobs/0/template/spec/template/spec"
_POD_PATH = "JobSet kits: spec.replicatedJobs[0].template.spec.template.spec"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{_POD}/nodeSelectr", {}, f"{_POD_PATH}.nodeSelectr: no such field. Did you mean nodeSelector?"),
        (f"{_POD}/containers/0/image", 3, f"{_POD_PATH}.containers[0].image: expected a string, got 3"),
        (f"{_POD}/containers/0/name", None, f"{_POD_PATH}.containers[0].name: missing"),
        (
            f"{_POD}/containers/0/resources",
            {"limits": {"cpu": [1]}},
            "resources.limits.cpu: expected an integer or a string",
        ),
        ("1/spec/failurePolicy/rules/0/action", "Again", "rules[0].action: unexpected value 'Again'. Use one of FailJ"),
        ("1/metadata/lables", {}, "JobSet kits: metadata.lables: no such field. Did you mean labels?"),
        ("1/metadata/labels", {"a": 1}, "JobSet kits: metadata.labels.a: expected a string, got 1"),
        ("0/spec/sources", "x", "StagedDataset k: spec.sources: no such field. Did you mean source?"),
        ("0/spec/source", None, "StagedDataset k: spec.source: missing"),
        ("0/spec/replicas", 0, "StagedDataset k: spec.replicas: 0 is less than the minimum of 1"),
        ("0/spec/keep", "yes", "StagedDataset k: spec.keep: expected true or false, got 'yes'"),
    ],
)
def test_invalid_field_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        validate(_replace_field(path, value))
    assert message in str(caught.value)


def test_core_kinds_are_checked_strictly() -> None:
    config: Manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"a": "b"}}
    validate([config])
    with pytest.raises(ManifestError, match=r"ConfigMap a: datas: no such field. Did you mean data\?"):
        validate([{**config, "datas": {}}])


# -- samples -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["jobset", "rayjob", "trainjob", "tensorboard", "loading"])
def test_samples_match_the_rendered_manifests(template: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", "render", str(DOCS / template)]) == 0
    again = f"voxlane app render docs/kubernetes/{template} > docs/kubernetes/{template}.yaml"
    assert capsys.readouterr().out == DOCS.joinpath(f"{template}.yaml").read_text(), f"run: {again}"
