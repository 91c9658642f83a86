"""Which rank of how many this process is, as whoever started it says in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    world_size: int = 1
    rank: int = 0
    local_size: int = 1
    """How many share this machine."""
    restarted: bool = False
    """Whether a launcher started them anew, after some were lost."""

    @property
    def nodes(self) -> int:
        """Machines, where each has as many ranks as this one."""
        return max(1, self.world_size // self.local_size)


def of_environment() -> Ranks:
    """What torchrun, and Ray Train as well, set for each process; without it there is one rank."""
    said = os.environ
    if "RANK" not in said or "WORLD_SIZE" not in said:
        return Ranks()
    return Ranks(
        int(said["WORLD_SIZE"]),
        int(said["RANK"]),
        int(said.get("LOCAL_WORLD_SIZE", 1)),
        int(said.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0,
    )


class RanksEnvironment(TorchElasticEnvironment):
    """Lightning's view of it. Machines may hold different numbers of ranks, which Lightning's own refuses."""

    def node_rank(self) -> int:
        """The machine's number: torchrun calls it a group, Ray a node."""
        return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", 0)))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Nothing to refuse: the launcher knows its machines."""


def bucket_mb(parameters: int) -> float:
    """Megabytes of gradients that ranks average in one go: an eighth of all, from 1 to 25, torch's own size."""
    return min(25.0, max(1.0, 4 * parameters / 8 / 1e6))


def data_parallel(parameters: int) -> DDPStrategy:
    """DDP for a network of so many parameters. In torch's own buckets most gradients of a small one wait for its last
    layer's; in smaller ones they are averaged while the layers before are still computed."""
    return DDPStrategy(bucket_cap_mb=bucket_mb(parameters))


@contextmanager
def group() -> Iterator[None]:
    """A process group of all ranks, where there are several; one that stands is left as it is."""
    where = of_environment()
    if where.world_size == 1 or dist.is_initialized():
        yield
        return
    # Made here and not by Lightning, so that ranks can speak before they train, and also without a GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def first_does(work: Callable[[], _T]) -> _T | None:
    """Rank 0's result, for every rank; None on the others where it failed, and rank 0 raises."""
    said: list[_T | None] = [None]
    try:
        if dist.get_rank() == 0:
            said = [work()]
    finally:
        dist.broadcast_object_list(said, src=0)
    return said[0]
