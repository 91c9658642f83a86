"""Tests of `run_on_ranks` with plain functions on a real cluster: results and errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from voxlane.cluster.ray.cluster import open_cluster
from voxlane.cluster.ray.ranks import run_on_ranks
from voxlane.errors import ConfigError, LostError, RunError


@pytest.fixture(scope="module")
def connected(ray_nodes: Any) -> Iterator[str]:
    with open_cluster(ray_nodes.address) as address:
        yield address


def gather_ranks(kind: str) -> list[Any]:
    """Return a description of every rank; rank 1 fails first if `kind` says so."""
    import ray
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        if kind == "config":
            raise ConfigError("lr: no", uri="gs://b/run", fix="Give another")
        if kind == "foreign":
            raise KeyError("lr")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    mine = (os.environ["RANK"], ray.get_runtime_context().get_node_id(), os.environ["OMP_WAIT_POLICY"])
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (*mine, os.environ.get("EXTRA")))
    return by_rank


def test_result_of_rank_0_on_the_requested_nodes(connected: str) -> None:
    by_rank = run_on_ranks(partial(gather_ranks, ""), workers=4, nodes=2, cpus=0.5, environment={"EXTRA": "value"})
    assert [rank for rank, *_ in by_rank] == ["0", "1", "2", "3"]
    nodes = [node for _, node, *_ in by_rank]
    assert sorted(map(nodes.count, set(nodes))) == [2, 2]
    assert {(policy, extra) for _, _, policy, extra in by_rank} == {("PASSIVE", "value")}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("config", ConfigError, r"gs://b/run: lr: no\. Give another"),
        ("foreign", RunError, r"rank 1 failed: KeyError: 'lr'"),
        # Ray may notice it while other ranks still start, and then does not know which rank it was.
        ("killed", LostError, r"(rank 1|a rank) was lost.*: its process was killed"),
    ],
)
def test_error_of_a_rank_is_raised(connected: str, kind: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$") as raised:
        run_on_ranks(partial(gather_ranks, kind), workers=2)
    assert type(raised.value) is error


def test_more_workers_than_fit(connected: str) -> None:
    with pytest.raises(LostError, match="4 workers on 2 nodes requested, but only 0 fit now"):
        run_on_ranks(partial(gather_ranks, ""), workers=4, nodes=2, cpus=2)
    with pytest.raises(ConfigError, match="do not divide evenly"):
        run_on_ranks(partial(gather_ranks, ""), workers=3, nodes=2)
