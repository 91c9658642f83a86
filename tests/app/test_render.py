"""Manifests: right for their kinds, the same each time, without secrets; the samples in docs are what is rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.app.test_config import BASE, LOADING, TRAIN, app
from voxlane.app.config import App
from voxlane.app.pod import Manifest
from voxlane.app.render import content, render, render_board, to_yaml
from voxlane.app.validate import validate
from voxlane.cli.main import main
from voxlane.errors import ConfigError, ManifestError
from voxlane.kube import validate as kube
from voxlane.kube.names import node_key

DOCS = Path(__file__).parents[2] / "docs/kubernetes"
IMAGE = "registry.example/team/kits:0123"


def workload(made: App) -> Manifest:
    return render(made, IMAGE, namespace="team")[-1]


def job_of(jobset: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    return found


def pod_of(jobset: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = job_of(jobset)["template"]["spec"]
    return found


def words(jobset: Manifest) -> list[str]:
    one = pod_of(jobset)["containers"][0]
    return [*one["command"], *one.get("args", [])]


def test_one_process_needs_no_torchrun() -> None:
    assert words(workload(app(train={**TRAIN, "set": {"epochs": 3}}))) == [
        *("voxlane", "app", "entry", "--logs", "gs://b/runs/a/logs", "--"),
        *("voxlane", "train", "gs://b/kits", "epochs=3", "--run", "gs://b/runs/a", "--auto-resume"),
    ]


def test_ranks_of_several_nodes_find_rank_0_by_name() -> None:
    made = workload(app(nodes=3, devices_per_node=2, grace_s=90))
    assert made["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    said = words(made)
    assert said[6:14] == [
        "torchrun",
        "--nnodes=3",
        "--nproc-per-node=2",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=kits-node-0-0.kits",
        "--master-port=29500",
        "--max-restarts=0",
        "--shutdown-timeout=80",
    ]
    assert pod_of(made)["terminationGracePeriodSeconds"] == 90
    job = job_of(made)
    assert (job["completionMode"], job["completions"], job["parallelism"], job["backoffLimit"]) == ("Indexed", 3, 3, 0)
    apart = pod_of(made)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"].items() <= job["template"]["metadata"]["labels"].items()


def test_a_disruption_costs_no_restart() -> None:
    made = workload(app(restarts=2))
    policy = job_of(made)["podFailurePolicy"]["rules"]
    assert policy == [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [143]}},
    ]
    failure = made["spec"]["failurePolicy"]
    assert failure["maxRestarts"] == 2
    assert failure["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert failure["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert pod_of(made)["restartPolicy"] == "Never"


def test_a_command_gets_what_torchrun_reads() -> None:
    made = workload(app(command=["torchrun", "train.py"], nodes=2, devices_per_node=4))
    assert words(made) == ["torchrun", "train.py"]
    env = {one["name"]: one for one in pod_of(made)["containers"][0]["env"]}
    assert env["PET_NNODES"]["value"] == "2"
    assert env["PET_NPROC_PER_NODE"]["value"] == "4"
    assert env["PET_MASTER_ADDR"]["value"] == "kits-node-0-0.kits"
    assert "job-completion-index" in env["PET_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    kept = workload(app(command=["python", "a.py"], run="gs://b/r/"))
    assert words(kept)[:6] == ["voxlane", "app", "entry", "--logs", "gs://b/r/logs", "--"]


def test_a_benchmark_of_loading_is_ranks_as_training_is() -> None:
    made = workload(app(command=[*LOADING, "--batch", 4], run="s3://b/bench/", nodes=2, devices_per_node=4))
    entry, (torchrun, *where), loading = words(made)[:6], words(made)[6:16], words(made)[16:]
    assert entry == ["voxlane", "app", "entry", "--logs", "s3://b/bench/logs", "--"]
    assert torchrun == "torchrun"
    assert ["torchrun", *where] == words(workload(app(nodes=2, devices_per_node=4)))[6:16]
    assert loading == [*LOADING, "--batch", "4", "--out", "s3://b/bench/loading-bench.json"]
    assert not any(one["name"].startswith("PET_") for one in pod_of(made)["containers"][0]["env"])


def test_one_process_of_a_benchmark_and_a_result_where_its_user_says() -> None:
    made = workload(app(command=[*LOADING, "--out=gs://b/x.json"]))
    assert words(made) == [*LOADING, "--out=gs://b/x.json"]


def test_a_benchmark_of_loading_on_ray_is_told_how_large_it_is() -> None:
    asked = {"template": "rayjob", "nodes": 8, "devices_per_node": 4, "resources": {"cpu": 16}}
    made = workload(app(command=[*LOADING, "--ranks", 2], run="gs://b/r", **asked))
    validate([made])
    told = "--out gs://b/r/loading-bench.json --launcher ray --nodes 8 --address auto"
    assert made["spec"]["entrypoint"].endswith(f"-- {' '.join(LOADING)} --ranks 2 {told}")
    assert "--ranks 4" in workload(app(command=LOADING, run="gs://b/r", **asked))["spec"]["entrypoint"]


def test_a_benchmark_reaches_the_buckets_that_its_words_name() -> None:
    made = workload(app(command=[*LOADING, "s3://raw/kits"], run="gs://b/r", credentials={"endpoint": "http://x:1"}))
    env = {one["name"]: one.get("value") for one in pod_of(made)["containers"][0]["env"]}
    assert env["AWS_ENDPOINT_URL"] == env["STORAGE_EMULATOR_HOST"] == "http://x:1"
    assert "AZURE_STORAGE_ENDPOINT" not in env


def test_a_wrong_command_of_ours_is_refused_before_it_is_deployed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {**BASE, "image": "kits:1", "command": ["voxlane", "bench", "checkpoint", "--epoch", "3"]}
    (tmp_path / "app.yaml").write_text(yaml.safe_dump(said))
    with pytest.raises(SystemExit):
        main(["app", "render", str(tmp_path)])
    assert "unrecognized arguments: --epoch" in capsys.readouterr().err


def test_a_queue_lets_it_go_and_places_it() -> None:
    near = {"required": "cloud.google.com/block"}
    queued, free = workload(app(nodes=2, queue="q", topology=near)), workload(app(nodes=2, topology=near))
    assert queued["spec"]["suspend"] is True
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    notes = job_of(queued)["template"]["metadata"]["annotations"]
    assert notes == {"kueue.x-k8s.io/podset-required-topology": "cloud.google.com/block"}
    assert "podAffinity" not in pod_of(queued)["affinity"]
    assert "suspend" not in free["spec"]
    terms = pod_of(free)["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms[0]["topologyKey"] == "cloud.google.com/block"


def test_pods_go_where_the_data_is() -> None:
    stage = [{"name": "kits", "source": "gs://b/kits", "capacity": "1Gi", "keep": True}, {"name": "more", "path": "/m"}]
    files, *_ = manifests = render(app(nodes=2, stage=stage, node_selector={"pool": "x"}), IMAGE, namespace="team")
    assert [one["kind"] for one in manifests] == ["StagedDataset", "JobSet"]
    assert files["spec"] == {
        "source": "gs://b/kits",
        "replicas": 2,
        "nodeSelector": {"pool": "x"},
        "capacity": "1Gi",
        "dataPath": "/var/lib/voxlane",
        "keep": True,
    }
    jobset = manifests[-1]
    pod = pod_of(jobset)
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [(one["key"], one["values"]) for one in terms[0]["matchExpressions"]] == [
        ("staged.voxlane.dev/team.kits", ["ready"]),
        ("staged.voxlane.dev/team.more", ["ready"]),
    ]
    paths = [one["hostPath"] for one in pod["volumes"] if "hostPath" in one]
    assert paths[0] == {"path": "/var/lib/voxlane/datasets/team.kits", "type": "Directory"}
    mounts = {one["mountPath"]: one.get("readOnly") for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["/data/kits"] is True
    assert mounts["/m"] is True
    for labels in (jobset["metadata"]["labels"], job_of(jobset)["template"]["metadata"]["labels"]):
        assert labels["staged.voxlane.dev/kits"] == labels["staged.voxlane.dev/more"] == "true"
    assert "loader.staged=/data/kits" in words(jobset)


def test_data_may_be_on_the_nodes_alone() -> None:
    made = workload(
        app(
            train={"data": "/data/kits/prepared", "run": "gs://b/r"},
            stage=[{"name": "kits", "source": "nfs://server/kits"}],
        )
    )
    assert "/data/kits/prepared" in words(made)
    assert not any(word.startswith("loader.staged") for word in words(made))


def test_gpus_and_memory_are_asked_for() -> None:
    made = app(device="gpu", devices_per_node=4, resources={"cpu": 8, "memory": "64Gi", "disk": "10Gi"})
    one = pod_of(workload(made))["containers"][0]
    assert one["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi", "ephemeral-storage": "10Gi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "64Gi", "ephemeral-storage": "10Gi", "nvidia.com/gpu": "4"},
    }
    shm = [one["emptyDir"] for one in pod_of(workload(made))["volumes"] if "emptyDir" in one]
    assert shm == [{"medium": "Memory", "sizeLimit": "2Gi"}]
    assert "volumes" not in pod_of(workload(app(shared_memory=None)))


def test_credentials_are_names() -> None:
    google = pod_of(workload(app(credentials={"secret": "bucket", "file": "key.json"})))
    env = {one["name"]: one.get("value") for one in google["containers"][0]["env"]}
    assert env["GOOGLE_APPLICATION_CREDENTIALS"] == "/voxlane/credentials/key.json"
    assert google["volumes"][0]["secret"]["items"] == [{"key": "key.json", "path": "key.json"}]
    s3 = {"data": "s3://b/kits", "run": "s3://b/r"}
    amazon = app(train=s3, credentials={"secret": "bucket", "endpoint": "https://minio.example"})
    one = pod_of(workload(amazon))["containers"][0]
    assert one["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    assert {"name": "AWS_ENDPOINT_URL", "value": "https://minio.example"} in one["env"]
    by_key = workload(app(template="trainjob", train=s3, credentials={"secret": "bucket"}))["spec"]["trainer"]["env"]
    keys = [one["name"] for one in by_key if "secretKeyRef" in one.get("valueFrom", {})]
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(keys)
    azure = app(train={"data": "az://c/k", "run": "az://c/r"}, credentials={"service_account": "trainer"})
    template = job_of(workload(azure))["template"]
    assert template["spec"]["serviceAccountName"] == "trainer"
    assert template["metadata"]["labels"]["azure.workload.identity/use"] == "true"


def test_a_search_runs_on_a_ray_of_its_own() -> None:
    made = render(_search(nodes=4, resources={"cpu": "6500m"}), IMAGE)[-1]
    spec = made["spec"]["rayClusterSpec"]
    assert made["spec"]["entrypoint"].endswith(
        "-- voxlane tune /voxlane/config/space.yaml gs://b/kits --run gs://b/runs/a --address auto --auto-resume"
    )
    assert spec["workerGroupSpecs"][0]["replicas"] == 4
    assert spec["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] == "6"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["authOptions"] == {"mode": "token"}


def test_a_board_is_on_loopback_and_apart_from_the_job() -> None:
    made = render_board(app(nodes=2, device="gpu", stage=[{"name": "kits"}]), IMAGE, namespace="team")[0]
    assert made["metadata"]["name"] == "kits-board"
    template = made["spec"]["template"]
    one = template["spec"]["containers"][0]
    assert one["command"] == ["voxlane", "tensorboard", "gs://b/runs/a", "--port", "6006", "--no-open", "--wait"]
    assert "ports" not in one
    assert "nvidia.com/gpu" not in json.dumps(made)
    assert "hostPath" not in json.dumps(made)
    assert not any(key.startswith("staged.") for key in template["metadata"]["labels"])
    with pytest.raises(ConfigError, match="nothing to show"):
        render_board(app(command=["x"]), IMAGE)


def _search(**values: Any) -> App:
    tune = {**BASE, "template": "rayjob", "tune": TRAIN, "files": {"space.yaml": "a: 1\n"}, **values}
    return App(**tune)


_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "where": [
        {},
        {"nodes": 3, "queue": "q", "topology": {"preferred": "a/b"}},
        {"nodes": 2, "topology": {"required": "h"}},
    ],
    "on": [
        {},
        {"device": "gpu", "devices_per_node": 8, "node_selector": {"a": True}, "tolerations": [{"key": "gpu"}]},
        {"resources": {"cpu": 0.5, "memory": "4Gi", "disk": "1Gi"}, "shared_memory": None, "pull_secret": "p"},
    ],
    "with": [
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
    for turn in range(12):  # where and with in all pairs, on with each of either
        parts = [
            variants[turn // step % len(variants)] for variants, step in zip(_VARIANTS.values(), (1, 4, 1), strict=True)
        ]
        values = {name: value for part in parts for name, value in part.items()}
        made = App(**{**BASE, **_WORK[work], **values})
        manifests = render(made, IMAGE, namespace="team")
        validate(manifests)
        assert manifests == render(made, IMAGE, namespace="team")
        assert list(yaml.load_all(to_yaml(manifests), yaml.CSafeLoader)) == manifests
        kinds = {one["metadata"]["labels"]["voxlane.dev/part"] for one in manifests}
        assert kinds <= {"job", "data", "config"}
        assert all(one["metadata"]["labels"]["voxlane.dev/app"] == "kits" for one in manifests)
        if made.run_uri:
            validate(render_board(made, IMAGE))


def test_the_content_hash_follows_what_is_rendered() -> None:
    def of(made: App) -> str:
        found: str = workload(made)["metadata"]["annotations"]["voxlane.dev/content"]
        return found

    assert of(app()) == of(app())
    assert of(app()) != of(app(nodes=2))
    assert content([{"a": 1, "b": 2}]) == content([{"b": 2, "a": 1}])


def test_long_names_of_data_fit_a_label() -> None:
    made = app(stage=[{"name": "d" * 60, "source": "gs://b/d"}], train=TRAIN)
    key = node_key("team", "d" * 60)
    assert len(key) == 63
    validate(render(made, IMAGE, namespace="team"))


# -- validation --------------------------------------------------------------------------------------------------------


def _wrong(path: str, value: Any) -> list[Manifest]:
    made = json.loads(json.dumps(render(app(nodes=2, stage=[{"name": "k", "source": "gs://b/k"}]), IMAGE)))
    *parents, last = path.split("/")
    at: Any = made
    for part in parents:
        at = at[int(part)] if part.isdigit() else at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return list(made)


_POD = "1/spec/replicatedJobs/0/template/spec/template/spec"
_SAID = "JobSet kits: spec.replicatedJobs[0].template.spec.template.spec"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (f"{_POD}/nodeSelectr", {}, f"{_SAID}.nodeSelectr: no such field. Did you mean nodeSelector?"),
        (f"{_POD}/containers/0/image", 3, f"{_SAID}.containers[0].image: text is wanted, not 3"),
        (f"{_POD}/containers/0/name", None, f"{_SAID}.containers[0].name: missing"),
        (f"{_POD}/containers/0/resources", {"limits": {"cpu": [1]}}, "resources.limits.cpu: a whole number or text"),
        ("1/spec/failurePolicy/rules/0/action", "Again", "rules[0].action: 'Again' is none of its values. Give FailJ"),
        ("1/metadata/lables", {}, "JobSet kits: metadata.lables: no such field. Did you mean labels?"),
        ("1/metadata/labels", {"a": 1}, "JobSet kits: metadata.labels.a: text is wanted, not 1"),
        ("1/metadata/name", None, "document 2, a JobSet: metadata.name: missing"),
        ("1/apiVersion", "jobset.x-k8s.io/v1", "no schema of jobset.x-k8s.io/v1 JobSet is known. Known is: jobset.x-k"),
        ("1/kind", "JobSett", "no schema of jobset.x-k8s.io/v1alpha2 JobSett is known"),
        ("0/spec/sources", "x", "StagedDataset k: spec.sources: no such field. Did you mean source?"),
        ("0/spec/source", None, "StagedDataset k: spec.source: missing"),
        ("0/spec/replicas", 0, "StagedDataset k: spec.replicas: 0 is less than the minimum of 1"),
        ("0/spec/keep", "yes", "StagedDataset k: spec.keep: true or false is wanted, not 'yes'"),
    ],
)
def test_a_field_that_does_not_fit_is_named(path: str, value: Any, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        validate(_wrong(path, value))
    assert said in str(caught.value)


def test_core_kinds_are_checked_strictly() -> None:
    config: Manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"a": "b"}}
    kube.validate([config])
    with pytest.raises(ManifestError, match=r"ConfigMap a: datas: no such field. Did you mean data\?"):
        kube.validate([{**config, "datas": {}}])
    with pytest.raises(ManifestError, match=r"ConfigMap a: it is there twice"):
        kube.validate([config, config])
    with pytest.raises(ManifestError, match="StagedDataset a: no schema"):
        kube.validate([{"apiVersion": "voxlane.dev/v1alpha1", "kind": "StagedDataset", "metadata": {"name": "a"}}])


# -- samples -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["jobset", "rayjob", "trainjob", "tensorboard", "loading"])
def test_the_samples_are_what_is_rendered(template: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", "render", str(DOCS / template)]) == 0
    again = f"voxlane app render docs/kubernetes/{template} > docs/kubernetes/{template}.yaml"
    assert capsys.readouterr().out == DOCS.joinpath(f"{template}.yaml").read_text(), f"run: {again}"
