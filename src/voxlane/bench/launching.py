"""How the ranks of a benchmark come to be: processes of this machine, or workers of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from voxlane.bench import ranks

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""A rank is one thread of arithmetic, however many share a machine: so that more of them is all that changes."""


class Launch(Protocol):
    """Calls a picklable function on every rank of a new process group; returns what the first rank returned."""

    def __call__(self, function: Callable[[], Any], *, workers: int) -> Any: ...


def local(function: Callable[[], Any], *, workers: int, per_node: int | None = None) -> Any:
    """`workers` processes of this machine, which passes for several nodes where each has `per_node` of them."""
    return ranks.run(_call, workers, "cpu", per_node or workers, function)


def _call(device: torch.device, per_node: int, function: Callable[[], Any]) -> Any:
    """As torchrun would: the group stands, and the environment says who is who."""
    rank, size = dist.get_rank(), dist.get_world_size()
    said = {"RANK": rank, "WORLD_SIZE": size, "GROUP_RANK": rank // per_node}
    said |= {"LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    os.environ |= {name: str(value) for name, value in said.items()} | _ENVIRONMENT
    return function()


@contextmanager
def on_ray(address: str | None, most: int, *, real: bool = False, nodes: int | None = None) -> Iterator[Launch]:
    """Up to `most` ranks on a Ray cluster, exactly on `nodes` machines where given. Unless they are `real`, they wait
    most of the time, and may be more than there are processors."""
    from voxlane.launch.cluster import check, cluster
    from voxlane.launch.ranks import on_ranks

    with cluster(address) as found:
        machines = found.nodes()
        cpus = 1.0 if real else min(1.0, cpu_share([node.cpus for node in machines], most))
        gpus = 1.0 if real and any(node.gpus for node in machines) else 0.0
        check(machines, most, cpus, gpus, nodes)
        yield partial(on_ranks, cpus=cpus, gpus=gpus, nodes=nodes, environment=_ENVIRONMENT)


def cpu_share(cpus: Sequence[float], workers: int) -> float:
    """The largest share of a CPU, in hundredths, of which machines with so many `cpus` have room for all `workers`."""
    return next((s / 100 for s in range(100, 0, -1) if sum(int(100 * c + 1e-6) // s for c in cpus) >= workers), 0.01)
