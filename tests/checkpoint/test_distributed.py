"""Distributed checkpoints: saved and loaded by many ranks, resharded, never half-published."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.conftest import Bucket
from tests.ranks import run_ranks
from voxlane.checkpoint.distributed_reader import DistributedReader, load_sharded
from voxlane.checkpoint.distributed_writer import DistributedWriter, save_sharded


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
    wanted = _full()
    state = {"model": _blank(_sharded(rank, wanted)), "step": 0, "loader": {"epoch": 0, "position": [0, 0]}}
    reader = DistributedReader(uri, config)
    dcp.load(state, storage_reader=reader)
    for name, tensor in state["model"].items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, wanted[name]), name
    assert state["step"] == 12
    assert state["loader"] == {"epoch": 1, "position": [3, 4]}
    return reader._store.counters.read().bytes_read


@pytest.mark.parametrize("kind", ["gcs", "folder"])
def test_saved_on_four_ranks_and_loaded_on_four_two_and_one(kind: str, request: pytest.FixtureRequest) -> None:
    bucket: Bucket = request.getfixturevalue(kind)
    uri = f"{bucket.uri}/run/step-1"
    run_ranks(_save, 4, uri, bucket.config)
    for num_ranks in (4, 2, 1):
        run_ranks(_load, num_ranks, uri, bucket.config)
