"""Distributed checkpoints: saved and loaded by many ranks, resharded, never half-published."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.conftest import Bucket
from tests.ranks import RankPool
from voxlane import errors
from voxlane.checkpoint import Checkpoint
from voxlane.checkpoint.collective import unwrap_rank_errors
from voxlane.checkpoint.distributed_metadata import StoredFile
from voxlane.checkpoint.distributed_reader import DistributedReader, load_sharded
from voxlane.checkpoint.distributed_writer import DistributedWriter, save_sharded
from voxlane.checkpoint.lifecycle import list_checkpoints


def _full() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(37, 5000, generator=g),
        "columns": torch.randn(300, 61, generator=g),
        "half": torch.randn(64, 1000, generator=g).to(torch.bfloat16),
        "tiny": torch.randn(3, generator=g),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "replicated": torch.randn(1000, 1000, generator=g),
    }


def _sharded(rank: int, full: dict[str, torch.Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": [Shard(0)], "columns": [Shard(1)], "half": [Shard(0)]}
    return {
        name: distribute_tensor(t, mesh, placements[name]) if name in placements else t.clone()
        for name, t in full.items()
    }


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: DTensor.from_local(
            torch.zeros_like(t.to_local()), t.device_mesh, t.placements, shape=t.shape, stride=t.stride()
        )
        if isinstance(t, DTensor)
        else torch.zeros_like(t)
        for name, t in state.items()
    }


def _save(rank: int, uri: str, config: Any) -> None:
    state = {"model": _sharded(rank, _full()), "step": 12, "loader": {"epoch": 1, "position": [3, 4]}}
    save_sharded(state, uri, config)


def _load(rank: int, uri: str, config: Any) -> int:
    expected = _full()
    state = {"model": _blank(_sharded(rank, expected)), "step": 0, "loader": {"epoch": 0, "position": [0, 0]}}
    reader = DistributedReader(uri, config)
    dcp.load(state, storage_reader=reader)
    for name, tensor in state["model"].items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, expected[name]), name
    assert state["step"] == 12
    assert state["loader"] == {"epoch": 1, "position": [3, 4]}
    return reader._store.counters.read().bytes_read


@pytest.mark.parametrize("kind", ["gcs", "s3", "azure", "folder"])
def test_saved_on_four_ranks_and_loaded_on_four_two_and_one(
    kind: str, request: pytest.FixtureRequest, ranks: RankPool
) -> None:
    bucket: Bucket = request.getfixturevalue(kind)
    uri = f"{bucket.uri}/run/step-1"
    ranks.run(_save, 4, uri, bucket.config)
    for num_ranks in (4, 2, 1):
        ranks.run(_load, num_ranks, uri, bucket.config)


def test_data_that_many_ranks_need_is_read_once(gcs: Bucket, ranks: RankPool) -> None:
    uri = f"{gcs.uri}/run/replicated"
    ranks.run(_save_replicated, 1, uri, gcs.config)
    stored = sum(len(gcs.store.get(k)) for k in _keys(gcs, "run/replicated/"))
    together = sum(ranks.run(_load_replicated, 4, uri, gcs.config, True))
    alone = sum(ranks.run(_load_replicated, 4, uri, gcs.config, False))
    assert together <= 1.3 * stored
    assert alone >= 4 * 0.9 * stored


def _keys(bucket: Bucket, prefix: str) -> list[str]:
    return [key for page in bucket.store.list_pages(prefix) for key in page.column("path").to_pylist()]


def _replicated() -> dict[str, Any]:
    g = torch.Generator().manual_seed(4)
    weights = {f"layer{i}": torch.randn(1000, 1000 + i, generator=g) for i in range(6)}
    return {**weights, "bias": torch.randn(7, generator=g), "half": torch.ones(3000).to(torch.float16)}


def _save_replicated(rank: int, uri: str, config: Any) -> None:
    save_sharded({"model": _replicated(), "epoch": 3}, uri, config)


def _load_replicated(rank: int, uri: str, config: Any, read_once: bool) -> int:
    expected = _replicated()
    state: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in expected.items()}, "epoch": 0}
    reader = DistributedReader(uri, config, read_once=read_once)
    dcp.load(state, storage_reader=reader)
    assert all(torch.equal(state["model"][name], expected[name]) for name in expected)
    assert state["epoch"] == 3
    return reader._store.counters.read().bytes_read


def test_shards_of_replicas_are_read_once(gcs: Bucket, ranks: RankPool) -> None:
    """Hybrid sharding has two replicas of two shards each."""
    uri = f"{gcs.uri}/run/hybrid"
    ranks.run(_save_hybrid, 4, uri, gcs.config)
    stored = sum(len(gcs.store.get(k)) for k in _keys(gcs, "run/hybrid/"))
    assert sum(ranks.run(_load_hybrid, 4, uri, gcs.config)) <= 1.3 * stored


def _hybrid() -> DTensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    whole = torch.randn(4000, 1000, generator=torch.Generator().manual_seed(9))
    return distribute_tensor(whole, mesh, [Replicate(), Shard(0)])


def _save_hybrid(rank: int, uri: str, config: Any) -> None:
    save_sharded({"w": _hybrid()}, uri, config)


def _load_hybrid(rank: int, uri: str, config: Any) -> int:
    expected = _hybrid()
    state = _blank({"w": expected})
    reader = DistributedReader(uri, config)
    dcp.load(state, storage_reader=reader)
    assert torch.equal(state["w"].to_local(), expected.to_local())
    return reader._store.counters.read().bytes_read


def test_one_file_is_read_once_for_all_ranks(gcs: Bucket, ranks: RankPool) -> None:
    state = {"w": torch.randn(3000, 3000), "n": 5}
    Checkpoint(gcs.uri, gcs.config).save(state, "one.ckpt")
    size = gcs.store.head("one.ckpt").size
    sums = ranks.run(_load_one, 4, gcs.uri, gcs.config)
    assert len({total for total, _ in sums}) == 1
    assert sums[0][0] == pytest.approx(state["w"].double().sum().item())
    assert sum(read for _, read in sums) <= 1.1 * size


def _load_one(rank: int, uri: str, config: Any) -> tuple[float, int]:
    checkpoint = Checkpoint(uri, dataclasses.replace(config, part_bytes=2 << 20))
    state = checkpoint.load("one.ckpt", read_once=True)
    return state["w"].double().sum().item(), checkpoint.store.counters.read().bytes_read


def test_rank_that_cannot_read_fails_all_of_them(gcs: Bucket, ranks: RankPool) -> None:
    ranks.run(_save_replicated, 1, f"{gcs.uri}/broken", gcs.config)
    key = next(k for k in _keys(gcs, "broken/") if k.endswith("_0.distcp") or "__0_0" in k)
    body = bytearray(gcs.store.get(key))
    body[len(body) // 2] ^= 1
    gcs.store.put(key, body)
    for message in ranks.run(_fail_to_load, 4, f"{gcs.uri}/broken", gcs.config):
        assert key in message
        assert "not those that were written" in message


def _fail_to_load(rank: int, uri: str, config: Any) -> str:
    state = {"model": {name: torch.zeros_like(t) for name, t in _replicated().items()}, "epoch": 0}
    with pytest.raises(errors.CorruptError) as caught:
        load_sharded(state, uri, config)
    return str(caught.value)


# -- one process -------------------------------------------------------------------------------------------------------


def _state() -> dict[str, Any]:
    return {"model": {"a": torch.arange(50_000.0).reshape(100, 500), "b": torch.ones(3)}, "step": 4}


def _blank_state() -> dict[str, Any]:
    return {"model": {"a": torch.zeros(100, 500), "b": torch.zeros(3)}, "step": 0}


def test_save_and_load_in_one_process(bucket: Bucket) -> None:
    save_sharded(_state(), f"{bucket.uri}/x", bucket.config)
    loaded = _blank_state()
    load_sharded(loaded, f"{bucket.uri}/x", bucket.config)
    assert torch.equal(loaded["model"]["a"], _state()["model"]["a"])
    assert loaded["step"] == 4


def test_torch_and_voxlane_read_each_others_checkpoints(folder: Bucket) -> None:
    path = folder.uri.removeprefix("file://")
    save_sharded(_state(), f"{path}/voxlane", folder.config)
    read_by_torch = _blank_state()
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.load(read_by_torch, storage_reader=dcp.FileSystemReader(f"{path}/voxlane"))
    assert torch.equal(read_by_torch["model"]["a"], _state()["model"]["a"])
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save(_state(), storage_writer=dcp.FileSystemWriter(f"{path}/torch"))
    loaded = _blank_state()
    load_sharded(loaded, f"{path}/torch", folder.config)
    assert torch.equal(loaded["model"]["a"], _state()["model"]["a"])
    assert loaded["step"] == 4
    assert [c.complete for c in list_checkpoints(path)] == [True, True]


def test_overwriting_leaves_no_old_files(bucket: Bucket) -> None:
    for step in (1, 2):
        save_sharded({"w": torch.full((2000,), float(step))}, f"{bucket.uri}/last", bucket.config)
    loaded = {"w": torch.zeros(2000)}
    load_sharded(loaded, f"{bucket.uri}/last", bucket.config)
    assert loaded["w"][0] == 2
    assert len(_keys(bucket, bucket.key("last/"))) == 2
    with pytest.raises(errors.AlreadyExistsError, match="last"):
        save_sharded({"w": torch.zeros(2000)}, f"{bucket.uri}/last", bucket.config, overwrite=False)


class _Failing(dcp.DefaultSavePlanner):
    """A planner that fails to resolve one of its tensors."""

    def resolve_data(self, write_item: Any) -> Any:
        if "b" in write_item.index.fqn:
            raise OSError("the device is gone")
        return super().resolve_data(write_item)


def test_failed_save_publishes_nothing_and_keeps_the_previous_checkpoint(bucket: Bucket) -> None:
    uri = f"{bucket.uri}/last"
    save_sharded(_state(), uri, bucket.config)
    before = sorted(_keys(bucket, bucket.key("last/")))
    changed = _state()
    changed["model"]["a"] += 1
    with pytest.raises(CheckpointException, match="the device is gone"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(changed, storage_writer=DistributedWriter(uri, bucket.config), planner=_Failing())
    assert sorted(_keys(bucket, bucket.key("last/"))) == before
    loaded = _blank_state()
    load_sharded(loaded, uri, bucket.config)
    assert torch.equal(loaded["model"]["a"], _state()["model"]["a"])


class _Forgetful(DistributedWriter):
    """A writer that loses an item, as torch's threaded writer does when a thread dies."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        done = super().write_data(plan, planner)
        filtered: Any = torch.futures.Future()
        filtered.set_result([r for r in done.value() if "model.b" not in r.index.fqn])
        return filtered


class _Lossy(DistributedWriter):
    """A writer that loses a file between upload and commit."""

    def finish(self, metadata: Any, results: Any) -> None:
        file = next(r.storage_data for r in results[0] if isinstance(r.storage_data, StoredFile))
        self._store.delete_one(self._folder + file.path)
        super().finish(metadata, results)


@pytest.mark.parametrize(
    ("writer", "message"), [(_Forgetful, "1 items were not stored.*'model.b'"), (_Lossy, "no such object")]
)
def test_nothing_is_published_if_data_is_missing(gcs: Bucket, writer: Any, message: str) -> None:
    with (
        pytest.raises(errors.VoxlaneError, match=message),
        warnings.catch_warnings(),
        unwrap_rank_errors(gcs.uri),
    ):
        warnings.simplefilter("ignore")
        dcp.save(_state(), storage_writer=writer(f"{gcs.uri}/x", gcs.config))
    assert _keys(gcs, "x/") == []


def test_of_two_concurrent_saves_one_wins_and_the_other_raises(bucket: Bucket) -> None:
    class Late(DistributedWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            save_sharded({"w": torch.ones(3000)}, f"{bucket.uri}/x", bucket.config)
            super().finish(metadata, results)

    with (
        pytest.raises(errors.CheckpointError, match="another process published"),
        warnings.catch_warnings(),
        unwrap_rank_errors(bucket.uri),
    ):
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.zeros(3000)}, storage_writer=Late(f"{bucket.uri}/x", bucket.config))
    loaded = {"w": torch.zeros(3000)}
    load_sharded(loaded, f"{bucket.uri}/x", bucket.config)
    assert loaded["w"][0] == 1
    assert len(_keys(bucket, bucket.key("x/"))) == 2  # the files of the loser are deleted


def test_cached_plans_are_supported(gcs: Bucket) -> None:
    for step in range(3):
        state = {"w": torch.full((5000,), float(step)), "step": step}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state, storage_writer=DistributedWriter(f"{gcs.uri}/x{step}", gcs.config), planner=planner)
        loaded = {"w": torch.zeros(5000), "step": -1}
        load_sharded(loaded, f"{gcs.uri}/x{step}", gcs.config)
        assert loaded["w"][0] == step == loaded["step"]


def test_writer_and_reader_pickle(gcs: Bucket) -> None:
    writer = pickle.loads(pickle.dumps(DistributedWriter(f"{gcs.uri}/x", gcs.config)))
    reader = pickle.loads(pickle.dumps(DistributedReader(f"{gcs.uri}/x", gcs.config)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state(), storage_writer=writer)
        dcp.load(loaded := _blank_state(), storage_reader=reader)
    assert loaded["step"] == 4


def test_loading_into_another_model_raises_one_clear_error(gcs: Bucket) -> None:
    save_sharded(_state(), f"{gcs.uri}/x", gcs.config)
    with pytest.raises(errors.MismatchError, match=r"x: the checkpoint does not fit the model.*model\.c"):
        load_sharded({"model": {"c": torch.zeros(3)}}, f"{gcs.uri}/x", gcs.config)
    with pytest.raises(errors.MismatchError, match=r"does not fit the model.*[Ss]ize"):
        load_sharded({"model": {"a": torch.zeros(100, 501)}}, f"{gcs.uri}/x", gcs.config)


def test_files_that_are_no_checkpoint_raise_one_clear_error(gcs: Bucket) -> None:
    with pytest.raises(errors.IncompleteError, match=r"gs://bkt/nothing.*no complete checkpoint"):
        load_sharded({"w": torch.zeros(3)}, f"{gcs.uri}/nothing", gcs.config)
    with pytest.raises(errors.BucketNotFoundError, match="gs://no-such-bucket"):
        load_sharded({"w": torch.zeros(3)}, "gs://no-such-bucket/x", gcs.config)
    with pytest.raises(errors.BucketNotFoundError, match="gs://no-such-bucket"):
        save_sharded({"w": torch.zeros(3)}, "gs://no-such-bucket/x", gcs.config)


def test_no_code_is_run_from_metadata_or_items(gcs: Bucket) -> None:
    save_sharded({"w": torch.zeros(3), "odd": _Code()}, f"{gcs.uri}/x", gcs.config)
    with pytest.raises(errors.UnsafeError, match=r"\[odd\].*weights_only=False"):
        load_sharded({"w": torch.zeros(3), "odd": None}, f"{gcs.uri}/x", gcs.config)
    gcs.store.put("y/.metadata", pickle.dumps(_Code()))
    with pytest.raises(errors.UnsafeError, match=r"y/\.metadata"):
        load_sharded({"w": torch.zeros(3)}, f"{gcs.uri}/y", gcs.config)
    assert _ran == []
    load_sharded({"w": torch.zeros(3), "odd": None}, f"{gcs.uri}/x", gcs.config, weights_only=False)
    assert _ran == ["ran"]


_ran: list[str] = []


class _Code:
    def __reduce__(self) -> Any:
        return (_run, ())


def _run() -> None:
    _ran.append("ran")


def test_lazy_views_are_saved_with_their_visible_values(memory: Bucket) -> None:
    expected = {
        "conj": torch.randn(2000, dtype=torch.complex64).conj(),
        "neg": torch.randn(2000, dtype=torch.cfloat).imag,
    }
    save_sharded(expected, f"{memory.uri}/x", memory.config)
    loaded = {"conj": torch.zeros(2000, dtype=torch.complex64), "neg": torch.zeros(2000)}
    load_sharded(loaded, f"{memory.uri}/x", memory.config)
    assert all(torch.equal(loaded[name], expected[name].resolve_conj()) for name in expected)


def test_values_that_cannot_be_saved_are_named(gcs: Bucket) -> None:
    with pytest.raises(errors.CheckpointError, match=r"gs://bkt/x: 'lock' cannot be saved \(TypeError"):
        save_sharded({"w": torch.zeros(3), "lock": threading.Lock()}, f"{gcs.uri}/x", gcs.config)
    assert _keys(gcs, "x/") == []


def test_attachments_are_published_with_the_checkpoint(bucket: Bucket) -> None:
    uri = f"{bucket.uri}/x"
    save_sharded(_state(), uri, bucket.config, attachments={"meta.pt": b"one"})
    assert DistributedReader(uri, bucket.config).attachment("meta.pt") == b"one"
    assert DistributedReader(uri, bucket.config).attachment("other") is None
    save_sharded(_state(), uri, bucket.config, attachments={"meta.pt": b"two"})
    assert DistributedReader(uri, bucket.config).attachment("meta.pt") == b"two"
    (checkpoint,) = list_checkpoints(uri, bucket.config)
    assert checkpoint.complete
    assert len(_keys(bucket, bucket.key("x/"))) == len(checkpoint.files)


@pytest.mark.parametrize("shape", [(40, 30, 20), (7,), (1, 1), (5, 0, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_any_box_of_a_tensor_is_read_as_it_was_written(memory: Bucket, shape: tuple[int, ...], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    whole = torch.randn(shape, generator=g, dtype=torch.float64)
    save_sharded({"t": whole}, f"{memory.uri}/x", memory.config)
    bounds = [sorted(torch.randint(0, n + 1, (2,), generator=g).tolist()) for n in shape]
    box = tuple(slice(a, b) for a, b in bounds)
    metadata = DistributedReader(f"{memory.uri}/x", memory.config)
    target = torch.zeros_like(whole[box])
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex("t"),
        dest_offsets=torch.Size([0] * len(shape)),
        storage_index=MetadataIndex("t", torch.Size([0] * len(shape))),
        storage_offsets=torch.Size([a for a, _ in bounds]),
        lengths=target.shape,
    )

    class Planner:
        def resolve_tensor(self, _: Any) -> torch.Tensor:
            return target

        def commit_tensor(self, *_: Any) -> None:
            pass

    metadata.set_up_storage_reader(metadata.read_metadata(), True)
    planner: Any = Planner()
    metadata.read_data(LoadPlan([item]), planner)
    assert torch.equal(target, whole[box])
