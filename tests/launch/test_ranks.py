"""`on_ranks` with plain functions on a real cluster: what comes back, and what is raised."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from voxlane.errors import ConfigError, LostError, RunError
from voxlane.launch.cluster import Cluster, cluster
from voxlane.launch.ranks import on_ranks


@pytest.fixture(scope="module")
def connected(ray_nodes: Any) -> Iterator[Cluster]:
    with cluster(ray_nodes.address) as found:
        yield found


def everyone(kind: str) -> list[Any]:
    """Each rank tells who it is; rank 1 may do something else first."""
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
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (*mine, os.environ.get("SAID")))
    return told


def test_rank_0s_value_comes_back_from_as_many_nodes_as_were_asked_for(connected: Cluster) -> None:
    told = on_ranks(partial(everyone, ""), workers=4, nodes=2, cpus=0.5, environment={"SAID": "this"})
    assert [rank for rank, *_ in told] == ["0", "1", "2", "3"]
    nodes = [node for _, node, *_ in told]
    assert sorted(map(nodes.count, set(nodes))) == [2, 2]
    assert {(policy, said) for _, _, policy, said in told} == {("PASSIVE", "this")}


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("config", ConfigError, r"gs://b/run: lr: no\. Give another"),
        ("foreign", RunError, r"rank 1 failed: KeyError: 'lr'"),
        # Ray may notice while it is still starting the others, and then does not know which it was.
        ("killed", LostError, r"(rank 1|a rank) was lost.*: its process was killed"),
    ],
)
def test_what_ended_a_rank_is_what_is_raised(connected: Cluster, kind: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^{said}$") as raised:
        on_ranks(partial(everyone, kind), workers=2)
    assert type(raised.value) is error


def test_more_than_the_nodes_hold(connected: Cluster) -> None:
    with pytest.raises(LostError, match="4 workers on 2 nodes asked for, there is room for 0 now"):
        on_ranks(partial(everyone, ""), workers=4, nodes=2, cpus=2)
    with pytest.raises(ConfigError, match="do not share out evenly"):
        on_ranks(partial(everyone, ""), workers=3, nodes=2)
