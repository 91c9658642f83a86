"""Manifests of the operator are valid and contain no secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.operator.world import CONFIG, World
from voxlane.cli.main import main
from voxlane.cluster.kubernetes.names import node_key
from voxlane.cluster.kubernetes.operator.agent import check_links
from voxlane.cluster.kubernetes.operator.crd import CRD
from voxlane.cluster.kubernetes.operator.manifests import (
    CLUSTER_RULES,
    NAMESPACE_RULES,
    REQUIRED_ACCESS,
    build_copier_permissions,
    build_event,
    build_manifests,
    build_pod,
    build_volume,
)
from voxlane.cluster.kubernetes.operator.plan import StartPod
from voxlane.cluster.kubernetes.operator.resource import InstallConfig
from voxlane.cluster.kubernetes.pod_security import find_violations
from voxlane.errors import ConfigError, DatasetError
from voxlane.sizes import parse_bytes, parse_duration

SPECS: list[dict[str, Any]] = [
    {},
    {"source": "s3://b/p", "credentials": {"secret": "keys", "endpoint": "https://s3.lab:9000"}, "capacity": "2Gi"},
    {"source": "gcs://b/p", "credentials": {"secret": "keys", "file": "key.json"}},
    {"source": "az://c/p", "credentials": {"serviceAccount": "trainer"}, "timeout": "1h30m"},
    {"source": "nfs://filer.lab/export/kits", "tolerations": [{"key": "gpu", "value": "a100", "effect": "NoExecute"}]},
]


def validate(*manifests: dict[str, Any]) -> None:
    import kubernetes_validate

    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def copier_for(spec: dict[str, Any]) -> dict[str, Any]:
    w = World()
    w.create("d", **spec)
    return build_pod(w.read("d"), StartPod("copy", "node-a", "u1", 0), CONFIG)


@pytest.mark.parametrize("spec", SPECS)
def test_pods_and_their_permissions_are_valid(spec: dict[str, Any]) -> None:
    w = World()
    w.create("d", **spec)
    dataset = w.read("d")
    assert dataset.problem == ""
    agents = (StartPod(role, "node-a", "u1", 3) for role in ("copy", "prepare", "remove"))
    pods = [build_pod(dataset, agent, CONFIG) for agent in agents]
    validate(
        *pods,
        *build_copier_permissions(dataset),
        *build_volume(dataset),
        build_event(dataset, True, "Failed", "message", "2026-01-01T00:00:00Z", "x1"),
    )
    for pod in pods:
        term = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["nodeSelectorTerms"][0]["matchFields"][0]["values"] == ["node-a"]
        assert pod["spec"]["restartPolicy"] == "Never"
        assert "privileged" not in str(pod)
        assert pod["spec"]["containers"][0]["command"][:4] == ["python3", "-I", "-m", "voxlane"]
        assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    for pod in pods[1:]:
        assert pod["metadata"]["namespace"] == "sys"
        assert pod["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("spec", SPECS)
def test_a_namespace_that_enforces_restricted_admits_copiers(spec: dict[str, Any]) -> None:
    """Such a namespace refuses hostPath volumes, with which its users could change the whole node."""
    refused = ["volume source is of the type nfs"] if spec.get("source", "").startswith("nfs") else []
    assert find_violations(copier_for(spec), "restricted") == refused
    assert "hostPath" not in str(copier_for(spec))


def test_agents_reach_only_the_folder_of_their_namespace() -> None:
    w = World()
    w.create("d")
    volume, claim = build_volume(w.read("d"))
    assert volume["spec"]["hostPath"]["path"] == "/var/lib/voxlane/namespaces/ns"
    assert volume["spec"]["claimRef"]["namespace"] == claim["metadata"]["namespace"] == "ns"
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    remover = build_pod(w.read("d"), StartPod("remove", "node-a", "u1", 0), CONFIG)["spec"]
    assert remover["securityContext"]["runAsNonRoot"] is True
    (disk,) = (item["hostPath"]["path"] for item in remover["volumes"] if "hostPath" in item)
    assert disk == "/var/lib/voxlane/namespaces/ns"


def test_copies_of_earlier_versions_can_be_removed() -> None:
    """They are in one folder for all namespaces, which root owns."""
    w = World()
    w.create("d")
    w.datasets["d"]["status"] = {"hostPath": "/var/lib/voxlane/datasets/ns.d"}
    dataset = w.read("d")
    assert "where an earlier version of voxlane stored them. Delete the dataset and create it again" in dataset.problem
    remover = build_pod(dataset, StartPod("remove", "node-a", "u1", 0), CONFIG)["spec"]
    assert remover["securityContext"]["runAsUser"] == 0
    (disk,) = (item["hostPath"]["path"] for item in remover["volumes"] if "hostPath" in item)
    assert disk == "/var/lib/voxlane"


def test_copier_gets_its_source_and_credentials() -> None:
    s3 = copier_for(SPECS[1])["spec"]["containers"][0]
    assert "envFrom" not in s3
    keys = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in s3["env"] if "valueFrom" in e}
    assert keys["AWS_ACCESS_KEY_ID"] == {"name": "keys", "key": "AWS_ACCESS_KEY_ID"}
    assert keys["AWS_SESSION_TOKEN"] == {"name": "keys", "key": "AWS_SESSION_TOKEN", "optional": True}
    assert all(name.startswith("AWS_") for name in keys)
    names = [e["name"] for e in s3["env"]]
    assert len(names) == len(set(names))
    assert {"name": "AWS_ENDPOINT_URL", "value": "https://s3.lab:9000"} in s3["env"]
    assert "--capacity=2147483648" in s3["args"]
    gcs = copier_for(SPECS[2])["spec"]
    assert {"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": "/voxlane/credentials/key.json"} in gcs["containers"][0][
        "env"
    ]
    az = copier_for(SPECS[3])["spec"]
    assert (az["serviceAccountName"], az["activeDeadlineSeconds"]) == ("trainer", 5400)
    assert copier_for(SPECS[3])["metadata"]["labels"]["azure.workload.identity/use"] == "true"
    assert "azure.workload.identity/use" not in copier_for(SPECS[1])["metadata"]["labels"]
    nfs = copier_for(SPECS[4])["spec"]
    assert {"name": "source", "nfs": {"server": "filer.lab", "path": "/export/kits", "readOnly": True}} in nfs[
        "volumes"
    ]
    assert "--source=/voxlane/source" in nfs["containers"][0]["args"]
    assert "--origin=nfs://filer.lab/export/kits" in nfs["containers"][0]["args"]


def test_each_attempt_machine_and_source_has_its_own_pod() -> None:
    w = World()
    w.create("d")
    names = {
        build_pod(w.read("d"), StartPod("copy", node, uid, attempt), CONFIG)["metadata"]["name"]
        for node, uid, attempt in (("a", "1", 0), ("a", "1", 1), ("a", "2", 0), ("b", "3", 0))
    }
    w.edit("d", source="gs://b/other")
    names.add(build_pod(w.read("d"), StartPod("copy", "a", "1", 0), CONFIG)["metadata"]["name"])
    assert len(names) == 5


def test_installation_is_valid_and_its_permissions_cover_what_the_operator_checks() -> None:
    manifests = build_manifests(InstallConfig(image="v:1"), namespace="voxlane-system")
    validate(*manifests)
    assert [manifest["kind"] for manifest in manifests][:2] == ["Namespace", "CustomResourceDefinition"]
    plurals = {"StagedDataset": "stageddatasets", "ServiceAccount": "serviceaccounts"}
    for verb, version, kind, subresource in REQUIRED_ACCESS:
        group = version.rpartition("/")[0]
        plural = plurals.get(kind, f"{kind.lower()}s") + (f"/{subresource}" if subresource else "")
        rules = [r for r in (*CLUSTER_RULES, *NAMESPACE_RULES) if group in r["apiGroups"] and plural in r["resources"]]
        assert any(verb in r["verbs"] for r in rules), (verb, kind)
    assert not [r for r in (*CLUSTER_RULES, *NAMESPACE_RULES) if "secrets" in r["resources"] or "*" in str(r)]
    operator = manifests[-1]["spec"]["template"]
    assert find_violations(operator, "restricted") == []
    for serve, kinds in ((None, ["ClusterRoleBinding"]), ("team", ["RoleBinding", "RoleBinding"])):
        bindings = [
            (m["kind"], m["metadata"].get("namespace"))
            for m in build_manifests(InstallConfig(image="v:1"), namespace="sys", serve=serve)
            if m["kind"].endswith("Binding") and m["metadata"]["name"].endswith("-namespaced")
        ]
        assert [kind for kind, _ in bindings] == kinds
        assert {namespace for _, namespace in bindings} == ({None} if serve is None else {"team", "sys"})
    with pytest.raises(ConfigError, match="Give --image"):
        build_manifests(InstallConfig(), namespace="x")


def test_rendering_needs_no_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert main(["operator", "install", "--render", "--image", "v:1", "--data-path", "/mnt/ssd"]) == 0
    manifests = list(yaml.safe_load_all(capsys.readouterr().out))
    assert manifests[1] == CRD
    assert "--disk-reserve=15%" in manifests[-1]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--data-path=/mnt/ssd" in manifests[-1]["spec"]["template"]["spec"]["containers"][0]["args"]
    for command in (["install"], ["run"], ["uninstall"]):
        assert main(["operator", *command]) == 1
        assert "no cluster is configured" in capsys.readouterr().err
    for path in ("/", "data", "/a/../b"):
        assert main(["operator", "install", "--render", "--image", "v:1", "--data-path", path]) == 1
        assert "Give an absolute folder" in capsys.readouterr().err
    inner = ["--data-path", "/mnt/ssd", "--data-path", "/mnt/ssd/namespaces/other"]
    assert main(["operator", "install", "--render", "--image", "v:1", *inner]) == 1
    assert "'/mnt/ssd/namespaces/other' is inside '/mnt/ssd'" in capsys.readouterr().err
    assert main(["operator", "install", "--render", "--image", "v:1", "--disk-reserve", "lots"]) == 1
    assert "'lots' is no part of a disk. Give one such as 15% or 50Gi" in capsys.readouterr().err


def test_names_on_nodes_are_short_and_unique() -> None:
    assert node_key("ns", "kits") == "ns.kits"
    long = [node_key("n" * 40, "d" * 40 + end) for end in "ab"]
    assert all(len(key) == 63 for key in long)
    assert long[0] != long[1]
    assert len(node_key("n" * 31, "d" * 31)) == 63


def test_sizes_and_durations_are_parsed() -> None:
    assert [parse_bytes(text) for text in ("0", "5k", "1.5Ki", "100Gi", 7)] == [0, 5000, 1536, 100 << 30, 7]
    assert [parse_duration(text) for text in ("30m", "1h30m", "2d", "5s")] == [1800, 5400, 172800, 5]
    for bad in ("", "5", "1h 30m", "30m1h", "-5s", "1w"):
        with pytest.raises(ConfigError, match="expected a duration"):
            parse_duration(bad)
    for bad in ("", "5 Gi", "-1", "1GiB", "1e3", "x"):
        with pytest.raises(ConfigError, match="expected a size"):
            parse_bytes(bad)


def test_links_that_lead_out_of_a_mount_are_refused(tmp_path: Path) -> None:
    """Such links would copy files of the copier, such as its token, or other datasets."""
    (tmp_path / "source/inner").mkdir(parents=True)
    (tmp_path / "source/a").write_text("a")
    (tmp_path / "source/inner/good").symlink_to("../a")
    check_links(f"file://{tmp_path}/source")
    (tmp_path / "source/inner/bad").symlink_to("/etc")
    with pytest.raises(DatasetError, match=r"inner/bad: a link leads out of the source: /etc. Replace it"):
        check_links(f"file://{tmp_path}/source")
