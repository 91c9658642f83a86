"""Ranks of a benchmark: started here, or one that a launcher started."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from voxlane.errors import CheckpointError, ConfigError, VoxlaneError

_GRACE_S = 5.0
"""How long the other ranks have to say what they saw after one failed."""


class LostRankError(CheckpointError):
    """Another rank went away; what it says matters more."""


def run(work: Callable[..., Any], num_ranks: int, accelerator: str, *arguments: Any) -> Any:
    """Call `work(device, *arguments)` in `num_ranks` new processes that form a process group; returns what the first
    rank returned. A VoxlaneError of any rank is raised here. `work` is importable."""
    device_type(accelerator, num_ranks)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="voxlane-bench-") as folder:
        processes = [
            context.Process(target=_main, args=(work, rank, num_ranks, accelerator, folder, arguments))
            for rank in range(num_ranks)
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
        return pickle.loads(Path(folder, "result").read_bytes())


def take_part(work: Callable[..., Any], accelerator: str, *arguments: Any) -> Any:
    """Call `work(device, *arguments)` as the rank that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name; returns what
    it returned on the first rank, None on others."""
    os.environ.setdefault("MASTER_PORT", "29500")
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ["RANK"])
    with _group(accelerator, "env://", local_rank, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as device:
        result = work(device, *arguments)
        return result if dist.get_rank() == 0 else None


def gather(value: Any) -> list[Any]:
    """Every rank's value, by rank; all ranks wait for one another here."""
    values: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(values, value)
    except RuntimeError as error:
        raise LostRankError(f"another rank was lost: {str(error).splitlines()[0]}") from None
    return values


def from_first(work: Callable[[], Any]) -> Any:
    """What `work` returns on the first rank, for every rank; where it raised there, the others raise LostRankError."""
    if not dist.is_initialized():
        return work()
    said: list[Any] = [None, False]
    try:
        if dist.get_rank() == 0:
            said = [work(), True]
    finally:
        dist.broadcast_object_list(said, src=0)
    if not said[1]:
        raise LostRankError("the first rank failed")
    return said[0]


def device_type(accelerator: str, num_local_ranks: int = 1) -> str:
    """cpu or cuda; ConfigError when there are not enough GPUs."""
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= num_local_ranks else "cpu"
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is here, or this torch cannot use it", fix="Choose --accelerator cpu")
    if accelerator == "cuda" and torch.cuda.device_count() < num_local_ranks:
        raise ConfigError(
            f"{num_local_ranks} ranks and {torch.cuda.device_count()} GPUs",
            fix="Give as many --ranks as there are GPUs",
        )
    return accelerator


@contextlib.contextmanager
def _group(accelerator: str, rendezvous: str, local_rank: int, rank: int, num_ranks: int) -> Iterator[torch.device]:
    kind = device_type(accelerator)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # torch writes warnings, with tracebacks, straight to the root logger for what it then raises anyway.
    logging.getLogger().addFilter(lambda record: record.levelno >= logging.ERROR)
    torch.set_num_threads(1)  # nothing is computed, and threads that wait for one another slow small copies down
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=num_ranks)
    try:
        yield device
    finally:
        if dist.is_initialized():  # training ends its group itself
            dist.destroy_process_group()


def _main(
    work: Callable[..., Any], rank: int, num_ranks: int, accelerator: str, folder: str, arguments: tuple[Any, ...]
) -> None:
    threading.Thread(target=_end_with_parent, name="voxlane-parent", daemon=True).start()
    try:
        with _group(accelerator, f"file://{folder}/rendezvous", rank, rank, num_ranks) as device:
            result = work(device, *arguments)
            if rank == 0:
                Path(folder, "result").write_bytes(pickle.dumps(result))
            if dist.is_initialized():
                gather(None)
    except VoxlaneError as error:
        Path(folder, f"failure-{rank}").write_bytes(pickle.dumps(error))
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """A parent that was killed ends no rank: they would go on, and nobody would read what they find."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _wait(processes: Sequence[BaseProcess]) -> None:
    """Until all have ended, or one failed and the others had time to notice."""
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
                f"rank {rank} ended with status {process.exitcode}", fix="What it said is above; -9 is lack of memory"
            )
