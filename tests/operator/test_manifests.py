"""What the operator creates fits its kinds, strictly, and shows no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.operator.world import RULES, World
from voxlane.cli.main import main
from voxlane.errors import ConfigError, DatasetError
from voxlane.kube.names import node_key
from voxlane.operator.agent import check_links
from voxlane.operator.crd import CRD
from voxlane.operator.manifests import NEEDED, RIGHTS, manifests
from voxlane.operator.plan import StartCopy, StartRemoval
from voxlane.operator.pods import copier, event, remover, rights
from voxlane.operator.resource import Rules
from voxlane.sizes import bytes_of, seconds_of

SPECS: list[dict[str, Any]] = [
    {},
    {"source": "s3://b/p", "credentials": {"secret": "keys", "endpoint": "https://s3.lab:9000"}, "capacity": "2Gi"},
    {"source": "gcs://b/p", "credentials": {"secret": "keys", "file": "key.json"}},
    {"source": "az://c/p", "credentials": {"serviceAccount": "trainer"}, "timeout": "1h30m"},
    {"source": "nfs://filer.lab/export/kits", "dataPath": "/var/lib/voxlane/nfs"},
]


def strictly(*made: dict[str, Any]) -> None:
    import kubernetes_validate

    for one in made:
        kubernetes_validate.validate(one, "1.37", strict=True)


def made_of(spec: dict[str, Any]) -> dict[str, Any]:
    w = World()
    w.create("d", **spec)
    return copier(w.read("d"), StartCopy("node-a", "u1", 0, (("nvidia.com/gpu", "NoSchedule"),)))


@pytest.mark.parametrize("spec", SPECS)
def test_pods_and_their_rights_fit_their_kinds(spec: dict[str, Any]) -> None:
    w = World()
    w.create("d", **spec)
    dataset = w.read("d")
    assert dataset.problem == ""
    pods = [made_of(spec), remover(dataset, StartRemoval("node-a", "u1", 3), RULES)]
    strictly(*pods, *rights(dataset), event(dataset, True, "Failed", "why", "2026-01-01T00:00:00Z", "x1"))
    for pod in pods:
        term = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["nodeSelectorTerms"][0]["matchFields"][0]["values"] == ["node-a"]
        assert pod["spec"]["restartPolicy"] == "Never"
        assert "privileged" not in str(pod)
    assert pods[1]["metadata"]["namespace"] == "sys"
    assert pods[1]["spec"]["automountServiceAccountToken"] is False


def test_a_copier_finds_its_source_and_credentials() -> None:
    s3 = made_of(SPECS[1])["spec"]["containers"][0]
    assert s3["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert {"name": "AWS_ENDPOINT_URL", "value": "https://s3.lab:9000"} in s3["env"]
    assert "--capacity=2147483648" in s3["args"]
    gcs = made_of(SPECS[2])["spec"]
    assert {"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": "/voxlane/credentials/key.json"} in gcs["containers"][0][
        "env"
    ]
    az = made_of(SPECS[3])["spec"]
    assert (az["serviceAccountName"], az["activeDeadlineSeconds"]) == ("trainer", 5400)
    assert made_of(SPECS[3])["metadata"]["labels"]["azure.workload.identity/use"] == "true"
    assert "azure.workload.identity/use" not in made_of(SPECS[1])["metadata"]["labels"]
    nfs = made_of(SPECS[4])["spec"]
    assert {"name": "source", "nfs": {"server": "filer.lab", "path": "/export/kits", "readOnly": True}} in nfs[
        "volumes"
    ]
    assert "--source=/voxlane/source" in nfs["containers"][0]["args"]
    assert "--origin=nfs://filer.lab/export/kits" in nfs["containers"][0]["args"]


def test_another_attempt_machine_or_source_is_another_pod() -> None:
    w = World()
    w.create("d")
    names = {
        copier(w.read("d"), StartCopy(node, uid, attempt))["metadata"]["name"]
        for node, uid, attempt in (("a", "1", 0), ("a", "1", 1), ("a", "2", 0), ("b", "3", 0))
    }
    w.edit("d", source="gs://b/other")
    names.add(copier(w.read("d"), StartCopy("a", "1", 0))["metadata"]["name"])
    assert len(names) == 5


def test_what_is_installed_fits_and_the_rights_cover_what_is_asked_before_the_start() -> None:
    made = manifests(Rules(image="v:1"), namespace="voxlane-system")
    strictly(*made)
    assert [one["kind"] for one in made][:2] == ["Namespace", "CustomResourceDefinition"]
    plurals = {"StagedDataset": "stageddatasets", "ServiceAccount": "serviceaccounts"}
    for verb, version, kind, subresource in NEEDED:
        group = version.rpartition("/")[0]
        plural = plurals.get(kind, f"{kind.lower()}s") + (f"/{subresource}" if subresource else "")
        rules = [r for r in RIGHTS if group in r["apiGroups"] and plural in r["resources"]]
        assert any(verb in r["verbs"] for r in rules), (verb, kind)
    assert not [r for r in RIGHTS if "secrets" in r["resources"] or "*" in str(r)]
    with pytest.raises(ConfigError, match="Give --image"):
        manifests(Rules(), namespace="x")


def test_rendering_needs_no_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert main(["operator", "install", "--render", "--image", "v:1", "--data-path", "/mnt/ssd"]) == 0
    made = list(yaml.safe_load_all(capsys.readouterr().out))
    assert made[1] == CRD
    assert "--data-path=/mnt/ssd" in made[-1]["spec"]["template"]["spec"]["containers"][0]["args"]
    for words in (["install"], ["run"], ["uninstall"]):
        assert main(["operator", *words]) == 1
        assert "no cluster is configured" in capsys.readouterr().err
    for path in ("/", "data", "/a/../b"):
        assert main(["operator", "install", "--render", "--image", "v:1", "--data-path", path]) == 1
        assert "Give an absolute folder" in capsys.readouterr().err


def test_names_on_nodes_are_short_and_not_shared() -> None:
    assert node_key("ns", "kits") == "ns.kits"
    long = [node_key("n" * 40, "d" * 40 + end) for end in "ab"]
    assert all(len(key) == 63 for key in long)
    assert long[0] != long[1]
    assert len(node_key("n" * 31, "d" * 31)) == 63


def test_sizes_and_times() -> None:
    assert [bytes_of(text) for text in ("0", "5k", "1.5Ki", "100Gi", 7)] == [0, 5000, 1536, 100 << 30, 7]
    assert [seconds_of(text) for text in ("30m", "1h30m", "2d", "5s")] == [1800, 5400, 172800, 5]
    for bad in ("", "5", "1h 30m", "30m1h", "-5s", "1w"):
        with pytest.raises(ConfigError, match="is no time"):
            seconds_of(bad)
    for bad in ("", "5 Gi", "-1", "1GiB", "1e3", "x"):
        with pytest.raises(ConfigError, match="is no size"):
            bytes_of(bad)


def test_links_that_lead_out_of_a_mount_are_refused(tmp_path: Path) -> None:
    """They would copy what the copier sees: its token, other datasets."""
    (tmp_path / "source/inner").mkdir(parents=True)
    (tmp_path / "source/a").write_text("a")
    (tmp_path / "source/inner/good").symlink_to("../a")
    check_links(f"file://{tmp_path}/source")
    (tmp_path / "source/inner/bad").symlink_to("/etc")
    with pytest.raises(DatasetError, match=r"inner/bad: a link leads out of the source: /etc. Replace it"):
        check_links(f"file://{tmp_path}/source")
