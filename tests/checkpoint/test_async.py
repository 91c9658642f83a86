"""Background saves are exact, run one at a time, and always report failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import Bucket
from tests.ranks import RankPool
from voxlane import errors
from voxlane.checkpoint import AsyncSaver, load_sharded
from voxlane.checkpoint.lifecycle import list_checkpoints
from voxlane.testing import Emulator, Faults


def _load(uri: str, config: Any, like: dict[str, Any]) -> dict[str, Any]:
    state = {name: torch.zeros_like(t) for name, t in like.items()}
    load_sharded(state, uri, config)
    return state


def test_changes_after_save_returns_are_not_saved(gcs: Bucket) -> None:
    weights = {"w": torch.zeros(2_000_000), "b": torch.zeros(10)}
    with AsyncSaver(gcs.config) as saver:
        for step in range(3):
            saver.save(weights, f"{gcs.uri}/step-{step}")
            for tensor in weights.values():
                tensor += 1
    for step in range(3):
        loaded = _load(f"{gcs.uri}/step-{step}", gcs.config, weights)
        assert all(bool((t == step).all()) for t in loaded.values())


def test_future_the_next_save_and_the_end_raise_a_failure(gcs: Bucket) -> None:
    saver = AsyncSaver(gcs.config)
    future = saver.save({"w": torch.zeros(10)}, "gs://no-such-bucket/x")
    with pytest.raises(errors.BucketNotFoundError, match="no-such-bucket"):
        future.result(timeout=300)
    with pytest.raises(errors.BucketNotFoundError, match="no-such-bucket"):
        saver.save({"w": torch.zeros(10)}, f"{gcs.uri}/x")
    saver.save({"w": torch.zeros(10)}, f"{gcs.uri}/x").result(timeout=300)  # after the error it continues
    with pytest.raises(errors.BucketNotFoundError, match="no-such-bucket"), saver:
        saver.save({"w": torch.zeros(10)}, "gs://no-such-bucket/x")
    assert [c.name for c in list_checkpoints(gcs.uri, gcs.config)] == ["x"]


def test_save_waits_for_the_previous_one_or_raises(gcs: Bucket, emulator: Emulator) -> None:
    emulator.set_faults(Faults(latency_s=0.3))
    state = {"w": torch.zeros(1000)}
    with AsyncSaver(gcs.config) as saver:
        first = saver.save(state, f"{gcs.uri}/1")
        assert not first.done()
        saver.save(state, f"{gcs.uri}/2")
        assert first.done()
    with AsyncSaver(gcs.config, busy="refuse") as saver:
        saver.save(state, f"{gcs.uri}/3")
        with pytest.raises(errors.BusyError, match=r"gs://bkt/4.*still running"):
            saver.save(state, f"{gcs.uri}/4")
    emulator.clear_faults()
    assert [c.name for c in list_checkpoints(gcs.uri, gcs.config)] == ["1", "2", "3"]


def test_save_returns_before_the_upload_ends(gcs: Bucket, emulator: Emulator) -> None:
    with AsyncSaver(gcs.config) as saver:
        saver.save({"w": torch.zeros(1000)}, f"{gcs.uri}/0").result()  # the first save also starts threads
        emulator.set_faults(Faults(latency_s=2.0))  # a save is four round trips
        future = saver.save({"w": torch.zeros(1000)}, f"{gcs.uri}/1")
        assert not future.done()
        emulator.clear_faults()
        future.result()


def test_failing_rank_fails_the_save_on_every_rank(gcs: Bucket, ranks: RankPool) -> None:
    for message in ranks.run(_save_with_a_failing_rank, 2, gcs.uri, gcs.config):
        assert "rank 1 has no disk" in message
    assert list_checkpoints(gcs.uri, gcs.config) == []
    assert ranks.run(_save_in_a_process, 2, f"{gcs.uri}/p", gcs.config) == [1.0, 1.0]


def _save_with_a_failing_rank(rank: int, uri: str, config: Any) -> str:
    class Bad:
        def __reduce__(self) -> Any:
            raise OSError("rank 1 has no disk")

    state: dict[str, Any] = {"w": torch.ones(100_000)}
    if rank == 1:
        state["odd"] = Bad()
    with AsyncSaver(config) as saver:
        future = saver.save(state, f"{uri}/x")
        weights = torch.ones(3)
        dist.all_reduce(weights)  # messages of training do not mix with those of the save
        assert weights[0] == 2
        with pytest.raises(Exception, match="rank 1 has no disk") as caught:
            future.result(timeout=300)
        saver._running = None
    return str(caught.value)


def _save_in_a_process(rank: int, uri: str, config: Any) -> float:
    state = {"w": torch.ones(100_000)}
    with AsyncSaver(config, process=True) as saver:
        saver.save(state, uri)
        state["w"] += 1
    return float(_load(uri, config, state)["w"].mean())
