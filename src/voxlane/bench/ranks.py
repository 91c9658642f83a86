"""Ranks of a benchmark: new processes of this machine, workers of a Ray cluster, or one rank of a job that a launcher
started."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from voxlane.bench.report import print_progress
from voxlane.distributed import gather_objects
from voxlane.errors import CheckpointError, ConfigError, VoxlaneError
from voxlane.processes import SupervisedContext
from voxlane.temporary import mark_children, temporary_folder

_GRACE_S = 5.0
"""Seconds that the other ranks have to report their errors after one failed."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Each launched rank computes on one thread, however many share a machine, so that only the number of ranks changes."""
Launch = Callable[..., Any]
"""`launch(function, workers=n)` calls a picklable function on every rank of a new process group and returns the result
of the first rank."""


class LostRankError(CheckpointError):
    """Raised when another rank ended early; the error of that rank matters more."""


def run(work: Callable[..., Any], num_ranks: int, accelerator: str, *arguments: Any) -> Any:
    """Call `work(device, *arguments)` in `num_ranks` new processes that form a process group and return the result of
    the first rank. A VoxlaneError of any rank is raised here. `work` must be importable."""
    return run_on_node(work, range(num_ranks), num_ranks, "", accelerator, *arguments)


def run_on_node(
    work: Callable[..., Any], own_ranks: range, num_ranks: int, address: str, accelerator: str, *arguments: Any
) -> Any:
    """Start the ranks `own_ranks` of `num_ranks` as `run` does; other nodes start the others. All meet at `address`,
    host and port of the node with the first rank; without an address, all ranks are processes of this node. Nodes
    without the first rank get None."""
    device_type(accelerator, len(own_ranks))
    context = SupervisedContext()
    mark_children()
    with temporary_folder("bench") as folder:
        meeting_point = f"tcp://{address}" if address else f"file://{folder}/rendezvous"
        processes = [
            context.Process(
                target=_main, args=(work, rank, local_rank, num_ranks, meeting_point, accelerator, folder, arguments)
            )
            for local_rank, rank in enumerate(own_ranks)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
        _raise_failure(Path(folder), processes)
        return pickle.loads(Path(folder, "result").read_bytes()) if 0 in own_ranks else None


def join_job(work: Callable[..., Any], accelerator: str, *arguments: Any) -> Any:
    """Call `work(device, *arguments)` as the rank that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name. Return its
    result on the first rank and None on the others."""
    os.environ.setdefault("MASTER_PORT", "29500")
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ["RANK"])
    with _group(accelerator, "env://", local_rank, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as device:
        result = work(device, *arguments)
        return result if dist.get_rank() == 0 else None


def launch_local(function: Callable[[], Any], *, workers: int, per_node: int | None = None) -> Any:
    """Launch `workers` processes of this machine, as simulated nodes of `per_node` processes each."""
    return run(_call_as_rank, workers, "cpu", per_node or workers, function)


def _call_as_rank(device: torch.device, per_node: int, function: Callable[[], Any]) -> Any:
    """Set the environment as torchrun does and call the function."""
    rank, size = dist.get_rank(), dist.get_world_size()
    variables = {"RANK": rank, "WORLD_SIZE": size, "GROUP_RANK": rank // per_node}
    variables |= {"LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    os.environ |= {name: str(value) for name, value in variables.items()} | _ENVIRONMENT
    return function()


@contextlib.contextmanager
def launch_on_ray(
    address: str | None, max_workers: int, *, real: bool = False, nodes: int | None = None
) -> Iterator[Launch]:
    """Launch up to `max_workers` ranks on a Ray cluster, on exactly `nodes` machines if given. Unless `real`, they
    mostly wait, and there may be more of them than processors."""
    from voxlane.cluster.ray.cluster import check_capacity, list_nodes, open_cluster
    from voxlane.cluster.ray.ranks import run_on_ranks

    with open_cluster(address):
        machines = list_nodes()
        cpus = 1.0 if real else min(1.0, compute_cpu_share([node.cpus for node in machines], max_workers))
        gpus = 1.0 if real and any(node.gpus for node in machines) else 0.0
        check_capacity(machines, max_workers, cpus, gpus, nodes)
        yield partial(run_on_ranks, cpus=cpus, gpus=gpus, nodes=nodes, environment=_ENVIRONMENT)


def compute_cpu_share(cpus: Sequence[float], workers: int) -> float:
    """Return the largest share of a CPU, in hundredths, with which `workers` fit on machines with these `cpus`."""
    return next((s / 100 for s in range(100, 0, -1) if sum(int(100 * c + 1e-6) // s for c in cpus) >= workers), 0.01)


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def print_on_rank_zero(text: str) -> None:
    """Print one line on standard error, at once, as the first rank."""
    if rank() == 0:
        print_progress(text)


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in order of rank. All ranks must call this. Without a process group there is one
    rank."""
    try:
        return gather_objects(value)
    except RuntimeError as error:
        raise LostRankError(f"another rank was lost: {str(error).splitlines()[0]}") from None


def device_type(accelerator: str, num_local_ranks: int = 1) -> str:
    """Return cpu or cuda; raise ConfigError if there are not enough GPUs."""
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= num_local_ranks else "cpu"
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device that torch can use", fix="Choose --accelerator cpu")
    if accelerator == "cuda" and torch.cuda.device_count() < num_local_ranks:
        raise ConfigError(
            f"{num_local_ranks} ranks need as many GPUs, but there are {torch.cuda.device_count()}",
            fix="Give at most as many --ranks as there are GPUs",
        )
    return accelerator


@contextlib.contextmanager
def _group(accelerator: str, rendezvous: str, local_rank: int, rank: int, num_ranks: int) -> Iterator[torch.device]:
    kind = device_type(accelerator)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # torch logs warnings with tracebacks to the root logger for errors that it then raises anyway.
    logging.getLogger().addFilter(lambda record: record.levelno >= logging.ERROR)
    torch.set_num_threads(1)  # nothing is computed, and waiting threads slow small copies down
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=num_ranks)
    try:
        yield device
    finally:
        if dist.is_initialized():  # training ends its group itself
            dist.destroy_process_group()


def _main(
    work: Callable[..., Any],
    rank: int,
    local_rank: int,
    num_ranks: int,
    meeting_point: str,
    accelerator: str,
    folder: str,
    arguments: tuple[Any, ...],
) -> None:
    try:
        with _group(accelerator, meeting_point, local_rank, rank, num_ranks) as device:
            result = work(device, *arguments)
            if rank == 0:
                Path(folder, "result").write_bytes(pickle.dumps(result))
            gather(None)
    except VoxlaneError as error:
        Path(folder, f"failure-{rank}").write_bytes(pickle.dumps(error))
        raise SystemExit(1) from None


def _wait(processes: Sequence[BaseProcess]) -> None:
    """Wait until all have ended, or one failed and the others had time to notice."""
    failed_at: float | None = None
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > _GRACE_S:
                return
        time.sleep(0.02)


def _raise_failure(folder: Path, processes: Sequence[BaseProcess]) -> None:
    failures: list[VoxlaneError] = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("failure-*"))]
    failures.sort(key=lambda failure: isinstance(failure, LostRankError))
    if failures:
        raise failures[0]
    for rank, process in enumerate(processes):
        if process.exitcode:
            raise CheckpointError(
                f"rank {rank} ended with status {process.exitcode}", fix="See its output above; -9 means out of memory"
            )
