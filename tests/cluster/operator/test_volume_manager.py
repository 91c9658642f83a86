"""Conversion of kube-volume-controller's VolumeManagers to StagedDatasets."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from voxlane.cli.main import main
from voxlane.cluster.kubernetes.operator.resource import InstallConfig, read_spec
from voxlane.cluster.kubernetes.validate import validate
from voxlane.cluster.kubernetes.volume_manager import convert
from voxlane.errors import ManifestError

S3 = {
    "id": "train",
    "replicas": 2,
    "sourceType": "S3",
    "accessMode": "ReadWriteOnce",
    "capacity": "5Gi",
    "labels": {"team": "ct"},
    "options": {"awsCredentialsSecretName": "aws-creds", "sourceURL": "s3://scans/brats/"},
}
NFS = {
    "id": "val",
    "replicas": 1,
    "sourceType": "NFS",
    "accessMode": "ReadOnlyMany",
    "labels": {"team": "mr"},
    "options": {"server": "10.0.0.7", "path": "/exports/val"},
}
AFFINITY = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}]
    }
}


def manager(*volumes: dict[str, Any], name: str = "brats", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "lab"}
    spec = {"volumeConfigs": list(volumes)}
    return {
        "apiVersion": "vck.intelai.org/v1alpha1",
        "kind": "VolumeManager",
        "metadata": metadata,
        "spec": spec,
        **more,
    }


def with_option(**options: str) -> dict[str, Any]:
    return S3 | {"options": S3["options"] | options}  # type: ignore[operator]


def converted(*volumes: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Convert a VolumeManager, check the datasets as a cluster and the operator would, and return the warnings."""
    conversion = convert(yaml.safe_dump(manager(*volumes)), "volumes.yaml")
    validate(conversion.datasets)
    for dataset in conversion.datasets:
        read_spec(dataset["spec"], InstallConfig(image="i", data_paths=("/var/lib/voxlane", "/var/datasets")))
    return conversion.datasets, "\n".join(conversion.warnings)


def test_fields_of_s3_and_nfs() -> None:
    (train, val), warnings = converted(S3, NFS)
    assert train == {
        "apiVersion": "voxlane.dev/v1alpha1",
        "kind": "StagedDataset",
        "metadata": {"name": "brats-train", "namespace": "lab", "labels": {"team": "ct"}},
        "spec": {
            "source": "s3://scans/brats/",
            "replicas": 2,
            "capacity": "5Gi",
            "credentials": {"secret": "aws-creds"},
        },
    }
    assert val["spec"] == {"source": "nfs://10.0.0.7/exports/val", "replicas": 1}
    lines = warnings.splitlines()
    assert [line.split(": ")[1] for line in lines if "brats-train" in line] == [
        *("capacity", "awsCredentialsSecretName", "accessMode")
    ]
    assert [line.split(": ")[1] for line in lines if "brats-val" in line] == ["sourceType"]


@pytest.mark.parametrize(
    ("volume", "field", "value", "warning"),
    [
        (with_option(dataPath="/var/datasets"), "dataPath", "/var/datasets", "install --data-path /var/datasets"),
        (with_option(timeoutForDataDownload="1.5h"), "timeout", "90m", ""),
        (with_option(timeoutForDataDownload="2m30s"), "timeout", "150s", ""),
        (with_option(timeoutForDataDownload="100ms"), "timeout", "1s", ""),
        (S3 | {"nodeAffinity": AFFINITY}, "nodeSelector", {"disk": "ssd"}, ""),
        (S3 | {"sourceType": "S3-Dev"}, "source", "s3://scans/brats/", ""),
        (with_option(sourceURL="s3://scans/a.tar.gz"), "source", "s3://scans/a.tar.gz", "for a single object"),
        (with_option(sourceURL="s3://scans"), "source", "s3://scans", ""),
        (S3 | {"tolerations": [{"key": "gpu", "operator": "Exists"}]}, "replicas", 2, "tolerations: left out"),
        (with_option(resync="true"), "replicas", 2, "resync: left out"),
        (with_option(distributionStrategy='{"*0*": 1, "*1*": 1}'), "replicas", 2, "every node gets the whole source"),
        (
            {key: value for key, value in S3.items() if key != "options"} | {"sourceURL": "s3://old/"},
            *("source", "s3://old/", ""),
        ),
    ],
)
def test_field_is_converted_or_named(volume: dict[str, Any], field: str, value: Any, warning: str) -> None:
    (dataset,), warnings = converted(volume)
    assert dataset["spec"][field] == value
    assert warning in warnings


def test_endpoint_without_a_scheme() -> None:
    (dataset,), warnings = converted(with_option(endpointURL="minio-svc.default:9000"))
    assert dataset["spec"]["credentials"]["endpoint"] == "http://minio-svc.default:9000"
    assert "endpointURL: it has no scheme" in warnings
    (dataset,), warnings = converted(with_option(endpointURL="https://minio:9000"))
    assert dataset["spec"]["credentials"]["endpoint"] == "https://minio:9000"
    assert "endpointURL" not in warnings


def test_affinity_that_labels_cannot_express_is_named() -> None:
    two_values = json.loads(json.dumps(AFFINITY).replace('["ssd"]', '["ssd", "nvme"]'))
    (dataset,), warnings = converted(S3 | {"nodeAffinity": two_values})
    assert "nodeSelector" not in dataset["spec"]
    assert "nodeAffinity: left out" in warnings
    preferred = AFFINITY | {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
        ]
    }
    (dataset,), warnings = converted(S3 | {"nodeAffinity": preferred})
    assert dataset["spec"]["nodeSelector"] == {"disk": "ssd"}
    assert "nodeAffinity: converted to nodeSelector {'disk': 'ssd'} only" in warnings


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"kind": "Pod", "metadata": {}}, "expected a VolumeManager, got kind Pod"),
        ("text", "'text', which has no kind"),
        (None, "there is no VolumeManager"),
        (manager(), "spec.volumeConfigs: expected a list of volumes"),
        (manager(S3 | {"sourceUrl": "s3://b/"}), "sourceUrl: .* no such field. Did you mean sourceURL"),
        (manager(with_option(sourceUrl="s3://b/")), r"options.sourceUrl: .* Did you mean options.sourceURL"),
        (manager(S3, extra=1), "extra: kube-volume-controller has no such field"),
        (manager(S3 | {"sourceType": "Pachyderm"}), "brats-train: sourceType: .* no source of type 'Pachyderm'"),
        (manager(S3 | {"replicas": 0}), "replicas: expected an integer, 1 or more, got 0"),
        (manager(S3 | {"replicas": "two"}), "replicas: expected an integer, 1 or more, got 'two'"),
        (manager(S3 | {"capacity": "big"}), "capacity: expected a size such as 100Gi, got 'big'"),
        (manager(S3 | {"labels": {"a": 1}}), "labels: expected named texts"),
        (manager(S3 | {"nodeAffinity": ["<insert-node-affinity-here>"]}), "nodeAffinity: expected a mapping"),
        (manager(S3 | {"tolerations": ["<insert-tolerations-here>"]}), r"tolerations\[0\]: expected a mapping"),
        (manager(S3, S3), "several volumes would be called brats-train. Give each its own id"),
        (manager(S3 | {"id": None}), "id: expected a name"),
        (manager(S3 | {"id": "x" * 60}), "is too long"),
        (manager(with_option(sourceURL="gs://b/")), "options.sourceURL: expected s3://BUCKET/PREFIX/"),
        (manager(with_option(timeoutForDataDownload="soon")), "expected a duration such as 30m, got 'soon'"),
        (manager(with_option(awsCredentialsSecretName="AKIA/x+y")), "not the name of a Secret"),
        (manager(NFS | {"options": {"server": "a"}}), "options.path: expected the server and a path"),
        (
            manager(S3) | {"metadata": {"name": "a", "namespace": "<insert-namespace-here>"}},
            "metadata.namespace: expected",
        ),
    ],
)
def test_mistakes_name_the_field(document: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=rf"(?s)volumes.yaml: .*{message}"):
        convert(yaml.safe_dump(document), "volumes.yaml")


def test_secret_value_in_place_of_a_name_is_not_shown() -> None:
    with pytest.raises(ManifestError) as raised:
        convert(json.dumps(manager(with_option(awsCredentialsSecretName="wJalr/XUtnFEMI"))), "volumes.yaml")
    assert "wJalr" not in str(raised.value)


def test_resources_as_kubectl_prints_them() -> None:
    stored = manager(S3 | {"id": "Vol_1"})
    stored["metadata"] |= {"uid": "u", "resourceVersion": "7", "annotations": {"a": "b"}, "finalizers": ["f"]}
    stored["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"] = "{}"
    stored["spec"]["state"] = "Running"
    stored["status"] = {"state": "Running"}
    conversion = convert(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [stored]}), "-")
    assert conversion.datasets[0]["metadata"] == {
        "name": "brats-vol-1",
        "namespace": "lab",
        "labels": {"team": "ct"},
        "annotations": {"a": "b"},
    }
    text = "\n".join(conversion.warnings)
    for name in ("status", "spec.state", "metadata.finalizers", "id"):
        assert f"{name}: " in text


def test_command_converts_several_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = yaml.safe_dump_all([manager(S3, NFS), manager(S3, name="kits")])
    file = tmp_path / "volumes.yaml"
    file.write_text(text)
    assert main(["operator", "convert", str(file)]) == 0
    output = capsys.readouterr()
    names = [document["metadata"]["name"] for document in yaml.safe_load_all(output.out)]
    assert names == ["brats-train", "brats-val", "kits-train"]
    assert "warning: StagedDataset brats-train: capacity: " in output.err
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["operator", "convert", "-"]) == 0
    assert capsys.readouterr() == output


def test_command_prints_nothing_if_one_volume_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "volumes.yaml"
    file.write_text(yaml.safe_dump(manager(NFS, S3 | {"sourceType": "Pachyderm"})))
    assert main(["operator", "convert", str(file)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"voxlane: {file}: StagedDataset brats-train: sourceType: ")
    for broken, message in (("a: [", "not YAML or JSON, line 1"), (b"\xff\xfe\xff", "not UTF-8")):
        file.write_bytes(broken.encode() if isinstance(broken, str) else broken)
        assert main(["operator", "convert", str(file)]) == 1
        assert message in capsys.readouterr().err
    assert main(["operator", "convert", str(tmp_path / "none.yaml")]) == 1
    assert "cannot read the manifest" in capsys.readouterr().err
