"""The rank of this process and the number of ranks, read from the environment that the launcher sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy

from voxlane.store.lease import JobStart


@dataclass(frozen=True)
class RankInfo:
    """This process among the processes that train together."""

    world_size: int = 1
    rank: int = 0
    """Index of this rank, from 0."""
    local_world_size: int = 1
    """Number of ranks on this machine."""
    is_restart: bool = False
    """Whether the launcher restarted the ranks after some were lost."""

    @property
    def nodes(self) -> int:
        """Number of machines, if each has as many ranks as this one."""
        return max(1, self.world_size // self.local_world_size)


def read_rank_info() -> RankInfo:
    """Read the variables that torchrun and Ray Train set for each process; without them there is one rank."""
    environment = os.environ
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return RankInfo()
    return RankInfo(
        int(environment["WORLD_SIZE"]),
        int(environment["RANK"]),
        int(environment.get("LOCAL_WORLD_SIZE", 1)),
        int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0,
    )


def read_job_start() -> JobStart:
    """Read the variables that SLURM and torchrun set for a job that they restart."""
    environment = os.environ
    if "SLURM_JOB_ID" in environment:
        job, restarts = f"SLURM job {environment['SLURM_JOB_ID']}", environment.get("SLURM_RESTART_COUNT", "0")
        # Within one start of the job, torchrun may start the ranks again.
        attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
        return JobStart(job, 1000 * int(restarts) + attempt)
    if environment.get("TORCHELASTIC_RUN_ID", "none") != "none":
        job = f"torchrun {environment['TORCHELASTIC_RUN_ID']}"
        return JobStart(job, int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)))
    return JobStart()


class LauncherEnvironment(TorchElasticEnvironment):
    """The launcher's environment for Lightning. Machines may hold different numbers of ranks, unlike in the base."""

    def node_rank(self) -> int:
        """Return the index of this machine, which torchrun calls a group and Ray a node."""
        return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", 0)))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any numbers: the launcher has chosen the machines."""


def gradient_bucket_mb(parameters: int) -> float:
    """Return the megabytes of gradients to average in one call: an eighth of all, from 1 to 25 (torch's default)."""
    return min(25.0, max(1.0, 4 * parameters / 8 / 1e6))


def make_ddp_strategy(parameters: int, *, find_unused: bool = False) -> DDPStrategy:
    """Return DDP for a network with this many parameters. `find_unused`: some of them are frozen in some steps only.

    In buckets of torch's default size, most gradients of a small network wait for those of its last layer; in smaller
    buckets they are averaged while earlier layers are still computed.
    """
    return DDPStrategy(bucket_cap_mb=gradient_bucket_mb(parameters), find_unused_parameters=find_unused)


@contextmanager
def process_group() -> Iterator[None]:
    """Create a process group of all ranks for the block, unless there is one rank or a group exists already."""
    if read_rank_info().world_size == 1 or dist.is_initialized():
        yield
        return
    # Created here and not by Lightning, so that ranks can communicate before they train, and without a GPU too.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
