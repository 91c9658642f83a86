"""Failing servers: checkpoints are saved and loaded exactly, or one clear error is raised and the last one stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import Bucket
from voxlane import Checkpoint, RetryConfig, errors
from voxlane.checkpoint import lifecycle
from voxlane.checkpoint.distributed_reader import load_sharded
from voxlane.checkpoint.distributed_writer import save_sharded
from voxlane.testing import Emulator, Faults

SHORT = RetryConfig(deadline_s=0.5, initial_delay_s=0.05)
_COUNT = 4_000_000
"""Number of elements of the large tensor, which has 16 MB in several parts."""


def _state(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "weights": torch.arange(_COUNT, dtype=torch.int32) + step,
        "bias": torch.full((10,), float(step)),
    }


class Plain:
    """Checkpoints that are single files."""

    name = "run/last.ckpt"

    def save(self, bucket: Bucket, step: int) -> None:
        Checkpoint(bucket.uri, bucket.config).save(_state(step), self.name)

    def load(self, bucket: Bucket) -> dict[str, Any]:
        loaded: dict[str, Any] = Checkpoint(bucket.uri, bucket.config).load(self.name)
        return loaded


class Sharded:
    """Checkpoints that are folders, saved as by ranks but in one process."""

    name = "run/last"

    def save(self, bucket: Bucket, step: int) -> None:
        save_sharded(_state(step), f"{bucket.uri}/{self.name}", bucket.config)

    def load(self, bucket: Bucket) -> dict[str, Any]:
        state = _state(-1)
        load_sharded(state, f"{bucket.uri}/{self.name}", bucket.config)
        return state


Kind = Plain | Sharded


@pytest.fixture(params=[Plain, Sharded])
def kind(request: pytest.FixtureRequest) -> Kind:
    checkpoint_kind: Kind = request.param()
    return checkpoint_kind


@pytest.fixture(params=["gcs", "s3_emulator"])
def faulty(request: pytest.FixtureRequest) -> Bucket:
    """Return a bucket on the emulator, for either protocol."""
    bucket: Bucket = request.getfixturevalue(request.param)
    return bucket.with_config(part_bytes=5 << 20)


def _check(kind: Kind, bucket: Bucket, step: int) -> None:
    loaded, expected = kind.load(bucket), _state(step)
    assert loaded.keys() == expected.keys()
    assert loaded["step"] == step
    assert all(torch.equal(loaded[name], expected[name]) for name in ("weights", "bias"))


@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_some_requests_fail(kind: Kind, faulty: Bucket, emulator: Emulator, rate: float) -> None:
    """The same fraction of requests is rejected, cut off and truncated."""
    for seed in range(5):
        emulator.set_faults(
            Faults(error_rate=rate, error_statuses=(429, 503), cut_rate=rate, truncate_rate=rate, seed=seed)
        )
        kind.save(faulty, seed)
        _check(kind, faulty, seed)
    if rate > 0.01:  # otherwise the faults may hit no request
        assert emulator.counters().injected


def test_responses_to_uploads_are_lost(kind: Kind, faulty: Bucket, emulator: Emulator) -> None:
    """The last response too: the object then exists, but a second attempt to complete it finds no such upload."""
    for seed in range(6):
        emulator.set_faults(Faults(cut_rate=0.15, truncate_rate=0.15, kinds=("part", "other"), seed=seed))
        kind.save(faulty, seed)
        emulator.clear_faults()
        _check(kind, faulty, seed)


def _fails_and_keeps_the_previous_checkpoint(
    kind: Kind, bucket: Bucket, emulator: Emulator, faults: Faults, expected: type[errors.VoxlaneError]
) -> None:
    kind.save(bucket, 1)
    before = emulator.keys("bkt")
    emulator.set_faults(faults)
    with pytest.raises(expected, match=f"{bucket.uri}/{kind.name}"):
        kind.save(bucket.with_config(retry=SHORT), 2)
    emulator.clear_faults()
    _check(kind, bucket, 1)
    uri = f"{bucket.uri}/run"
    lifecycle.find_orphans(uri, bucket.config, older_than_s=0).remove()
    assert emulator.keys("bkt") == before
    assert emulator.uploads("bkt") == []
    assert lifecycle.latest(uri, bucket.config).complete
    kind.save(bucket, 3)
    _check(kind, bucket, 3)


@pytest.mark.parametrize(("status", "expected"), [(403, errors.PermissionDeniedError), (500, errors.UnavailableError)])
def test_part_that_fails_permanently(
    kind: Kind, faulty: Bucket, emulator: Emulator, status: int, expected: type[errors.VoxlaneError]
) -> None:
    faults = Faults(error_rate=1.0, error_statuses=(status,), kinds=("part",))
    _fails_and_keeps_the_previous_checkpoint(kind, faulty, emulator, faults, expected)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_part_that_fails_while_torch_still_writes(faulty: Bucket, emulator: Emulator, is_sharded: bool) -> None:
    state = {"weights": torch.zeros(30_000_000)}  # more than the writer buffers
    emulator.set_faults(Faults(error_rate=1.0, error_statuses=(403,), kinds=("part",)))
    with pytest.raises(errors.PermissionDeniedError, match=f"{faulty.uri}/run/big"):
        if is_sharded:
            save_sharded(state, f"{faulty.uri}/run/big", faulty.config)
        else:
            Checkpoint(faulty.uri, faulty.config).save(state, "run/big.ckpt")
    assert emulator.keys("bkt") == []


@pytest.mark.parametrize(("status", "expected"), [(403, errors.PermissionDeniedError), (507, errors.StoreError)])
def test_full_quota(
    kind: Kind, faulty: Bucket, emulator: Emulator, status: int, expected: type[errors.VoxlaneError]
) -> None:
    """Services then reject every write: GCS and S3 with 403, some S3-compatible servers with 507."""
    faults = Faults(error_rate=1.0, error_statuses=(status,), kinds=("put", "part"))
    _fails_and_keeps_the_previous_checkpoint(kind, faulty, emulator, faults, expected)


@pytest.mark.parametrize("of", ["run/last.ckpt.sums", "run/last/.metadata"])
def test_publishing_object_cannot_be_written(faulty: Bucket, emulator: Emulator, of: str) -> None:
    kind = Plain() if of.endswith(".sums") else Sharded()
    faults = Faults(error_rate=1.0, error_statuses=(403,), kinds=("put",), key_prefix=of)
    _fails_and_keeps_the_previous_checkpoint(kind, faulty, emulator, faults, errors.PermissionDeniedError)


def test_bucket_vanishes_during_a_save(kind: Kind, faulty: Bucket, emulator: Emulator) -> None:
    emulator.set_faults(Faults(latency_s=0.2))
    timer = threading.Timer(0.3, emulator.wipe)
    timer.start()
    start = time.monotonic()
    with pytest.raises(errors.BucketNotFoundError, match="no such bucket"):
        kind.save(faulty, 1)
    timer.join()
    assert time.monotonic() - start < 10


def test_bucket_has_vanished_before_a_load(kind: Kind, faulty: Bucket, emulator: Emulator) -> None:
    kind.save(faulty, 1)
    emulator.wipe()
    with pytest.raises(errors.BucketNotFoundError, match="no such bucket"):
        kind.load(faulty)


def _positions(size: int) -> list[int]:
    return sorted({0, 1, size // 3, size // 2, size - 20, size - 12, size - 1})


def _damage(emulator: Emulator, key: str, position: int) -> Callable[[], None]:
    """Flip one stored bit; return a function that restores it."""
    body = emulator.get("bkt", key)
    damaged = bytearray(body)
    damaged[position] ^= 1
    emulator.put("bkt", key, bytes(damaged))
    return lambda: emulator.put("bkt", key, body)


@pytest.mark.parametrize("suffix", [".ckpt", ".sums", ".distcp", ".metadata"])
def test_damaged_byte_is_detected_anywhere(gcs: Bucket, emulator: Emulator, suffix: str) -> None:
    kind = Plain() if suffix in (".ckpt", ".sums") else Sharded()
    kind.save(gcs, 1)
    missed = []
    for key in [key for key in emulator.keys("bkt") if key.endswith(suffix)]:
        for position in _positions(len(emulator.get("bkt", key))):
            restore = _damage(emulator, key, position)
            location = f"byte {position} of {key}"
            try:
                kind.load(gcs)
                missed.append(f"load does not detect {location}")
            except errors.CorruptError as error:
                if f"gs://bkt/{key}:" not in str(error):
                    missed.append(f"load blames another object for {location}: {error}")
            checkpoint = lifecycle.find_checkpoint(f"gs://bkt/{kind.name}", gcs.config)
            problems = lifecycle.verify(checkpoint).problems
            if len(problems) != 1 or f"gs://bkt/{key}:" not in problems[0]:
                missed.append(f"verify reports for {location}: {problems}")
            restore()
    assert missed == []
    _check(kind, gcs, 1)


def test_gc_leaves_uploads_of_neighbours_alone(faulty: Bucket, emulator: Emulator) -> None:
    with faulty.store.open_writer("run10/a.ckpt") as file:
        file.write(bytes(12 << 20))
        _wait_for(lambda: emulator.uploads("bkt"))
        assert len(lifecycle.find_orphans(f"{faulty.uri}/run1", faulty.config, older_than_s=0)) == 0
        orphans = lifecycle.find_orphans(f"{faulty.uri}/run10", faulty.config, older_than_s=0)
        assert [upload.key for upload in orphans.uploads] == ["run10/a.ckpt"]
    orphans.remove()  # an upload that is no longer open is not an error
    assert emulator.keys("bkt") == ["run10/a.ckpt"]


def _wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
