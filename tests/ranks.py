"""Runs a function on several ranks, each a process with a gloo group, as a training job has them."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_s: float = 100.0) -> list[Any]:
    """Call `function(rank, *arguments)` on every rank; returns their results by rank, or raises with the first
    traceback. `function` must be importable."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_main, args=(rank, num_ranks, f"{folder}/rendezvous", results, function, arguments), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        answers: dict[int, Any] = {}
        try:
            while len(answers) < num_ranks:
                rank, value, failure = results.get(timeout=timeout_s)
                if failure is not None:
                    raise AssertionError(f"rank {rank}:\n{failure}")
                answers[rank] = value
        except queue.Empty:
            raise AssertionError(f"ranks {sorted(set(range(num_ranks)) - set(answers))} did not answer") from None
        finally:
            for process in processes:
                process.join(timeout=10 if len(answers) == num_ranks else 0.1)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [answers[rank] for rank in range(num_ranks)]


def _main(
    rank: int, num_ranks: int, rendezvous: str, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(OMP_NUM_THREADS="1")
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
        value = function(rank, *arguments)
        dist.barrier()
        results.put((rank, value, None))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - a process's boundary: the test that started it raises it
        results.put((rank, None, traceback.format_exc()))
