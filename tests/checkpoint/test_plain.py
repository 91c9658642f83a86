"""Plain checkpoints: torch.save and torch.load over any bucket."""

from __future__ import annotations

import io
import random

import pytest
import torch

from tests.conftest import Bucket
from voxlane import Checkpoint, errors

MIB = 1 << 20


def test_save_and_load(bucket: Bucket) -> None:
    small_parts = bucket.with_config(part_bytes=5 * MIB)
    ckpt = Checkpoint(f"{bucket.uri}/run1", small_parts.config)
    state = {"step": 7, "weights": torch.arange(3 * MIB, dtype=torch.float32), "bias": torch.ones(5)}
    with ckpt.writer("epoch0.ckpt") as file:
        torch.save(state, file)
    with ckpt.reader("epoch0.ckpt") as file:
        loaded = torch.load(file, weights_only=True)
    assert loaded["step"] == 7
    assert torch.equal(loaded["weights"], state["weights"])


def test_reading_is_that_of_a_file(gcs: Bucket) -> None:
    body = random.Random(0).randbytes(300_000)
    gcs.store.put("k", body)
    reference = io.BytesIO(body)
    rng = random.Random(1)
    with Checkpoint("gs://bkt", gcs.with_config(part_bytes=10_000).config).reader("k") as file:
        for _ in range(300):
            offset, whence = rng.choice(
                [(rng.randrange(310_000), 0), (rng.randrange(-50, 50), 1), (-rng.randrange(99), 2)]
            )
            if whence == 1 and reference.tell() + offset < 0:
                continue
            assert file.seek(offset, whence) == reference.seek(offset, whence)
            count = rng.choice([0, 1, 100, 25_000])
            assert file.read(count) == reference.read(count)
            assert file.tell() == reference.tell()
        assert file.seek(0) == 0
        assert file.read() == body


def test_an_object_replaced_while_it_is_read_is_noticed(gcs: Bucket) -> None:
    gcs.store.put("k", bytes(100_000))
    with Checkpoint("gs://bkt", gcs.with_config(part_bytes=1000).config).reader("k") as file:
        file.read(10)
        gcs.store.put("k", bytes([1]) * 100_000)
        file.seek(90_000)
        with pytest.raises(errors.ChangedError, match="gs://bkt/k"):
            file.read(10)


def test_a_missing_checkpoint_is_named(gcs: Bucket) -> None:
    with pytest.raises(errors.NotFoundError, match=r"gs://bkt/run/none\.ckpt"):
        Checkpoint("gs://bkt/run", gcs.config).reader("none.ckpt")


def test_reading_backwards_holds_few_blocks(gcs: Bucket) -> None:
    body = bytes(range(200)) * 500
    gcs.store.put("k", body)
    with Checkpoint("gs://bkt", gcs.with_config(part_bytes=1000).config).reader("k") as file:
        for start in range(99_000, -1, -1000):
            file.seek(start)
            assert file.read(1000) == body[start : start + 1000]
            assert len(file._blocks) <= 12
        with pytest.raises(ValueError, match="before the start"):
            file.seek(-5)
