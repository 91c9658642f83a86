"""Weights as safetensors at a URI, the same as the safetensors package's, read tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.conftest import Bucket
from voxlane import errors
from voxlane.checkpoint.safetensors import SafetensorsFile, load_safetensors, save_safetensors


def _weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "big": torch.randn(2000, 1500, generator=g),
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(7, 3, generator=g).to(torch.bfloat16),
        "column": torch.randn(50, 60, generator=g).t(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 4),
    }


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_voxlane_and_the_package_read_what_voxlane_wrote(bucket: Bucket, tmp_path: Path) -> None:
    uri = f"{bucket.uri}/model.safetensors"
    save_safetensors(_weights(), uri, bucket.config, metadata={"epoch": "3"})
    file = SafetensorsFile(uri, bucket.config)
    assert file.metadata == {"epoch": "3"}
    assert _equal(file.load(), _weights())
    (tmp_path / "m.safetensors").write_bytes(bytes(bucket.store.get(bucket.key("model.safetensors"))))
    assert _equal(safetensors.torch.load_file(tmp_path / "m.safetensors"), _weights())


def test_voxlane_reads_what_the_package_wrote(gcs: Bucket) -> None:
    plain = {name: tensor.contiguous() for name, tensor in _weights().items()}
    gcs.store.put("m.safetensors", safetensors.torch.save(plain))
    assert _equal(load_safetensors(f"{gcs.uri}/m.safetensors", gcs.config), plain)


def test_only_the_requested_tensors_are_read(gcs: Bucket) -> None:
    weights = {f"layer{i}": torch.randn(1024, 1024) for i in range(12)}
    save_safetensors(weights, f"{gcs.uri}/m.safetensors", gcs.config)
    file = SafetensorsFile(f"{gcs.uri}/m.safetensors", gcs.config)
    before = file._source.store.counters.read().bytes_read
    assert torch.equal(file.load(["layer7"])["layer7"], weights["layer7"])
    assert file._source.store.counters.read().bytes_read - before <= 6 << 20  # 4 MiB and the blocks at its ends


@pytest.mark.parametrize(
    "body", [b"", b"12345678", (1 << 40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"]
)
def test_other_files_raise_an_error_with_their_name(gcs: Bucket, body: bytes) -> None:
    gcs.store.put("x.safetensors", body)
    with pytest.raises(errors.CheckpointError, match=r"x\.safetensors: not a safetensors file"):
        SafetensorsFile(f"{gcs.uri}/x.safetensors", gcs.config)


def test_missing_and_unsupported_tensors_are_named(gcs: Bucket) -> None:
    save_safetensors({"a": torch.zeros(3)}, f"{gcs.uri}/m.safetensors", gcs.config)
    with pytest.raises(errors.MismatchError, match="no tensor 'b'"):
        load_safetensors(f"{gcs.uri}/m.safetensors", gcs.config, names=["b"])
    with pytest.raises(errors.ConfigError, match=r"'s' is a torch\.float32 torch\.sparse"):
        save_safetensors({"s": torch.eye(3).to_sparse()}, f"{gcs.uri}/s.safetensors", gcs.config)
    assert not gcs.store.exists("s.safetensors")
