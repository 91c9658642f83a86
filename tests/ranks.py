"""Runs a function on several ranks, each a process in a gloo group, as in a training job.

The processes are reused from test to test, because importing torch takes longer than most tests. They meet at a file,
so no port has to be chosen.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("spawn")


class RankPool:
    """A pool of rank processes, which are started when they are needed."""

    def __init__(self, folder: str) -> None:
        self._members: list[tuple[Any, Connection]] = []
        self._folder = folder
        self._runs = itertools.count()

    def run(self, function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_s: float = 300.0) -> list[Any]:
        """Call `function(rank, *arguments)` on every rank; return the results by rank, or raise an AssertionError with
        the first traceback. `function` must be importable."""
        while len(self._members) < num_ranks:
            parent_end, child_end = _context.Pipe()
            process = _context.Process(target=_main, args=(child_end,))
            process.start()
            self._members.append((process, parent_end))
        rendezvous = f"{self._folder}/{next(self._runs)}"
        members = self._members[:num_ranks]
        for rank, (_, pipe) in enumerate(members):
            pipe.send((rank, num_ranks, rendezvous, function, arguments))
        deadline = time.monotonic() + timeout_s
        results = []
        try:
            for rank, (_, pipe) in enumerate(members):
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"rank {rank} did not answer within {timeout_s:.0f} s")
                value, failure = pipe.recv()
                if failure is not None:
                    raise AssertionError(f"rank {rank}:\n{failure}")
                results.append(value)
        except BaseException:
            self.close()  # the other ranks may hang
            raise
        return results

    def close(self) -> None:
        """Stop the processes."""
        for process, _ in self._members:
            process.kill()
            process.join()
        self._members.clear()


def _main(pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1")
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while True:
        try:
            rank, num_ranks, rendezvous, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
            value = function(rank, *arguments)
            dist.barrier()
            pipe.send((value, None))
        except BaseException:  # noqa: BLE001 - a process boundary: the test process raises it
            pipe.send((None, traceback.format_exc()))
        finally:
            dist.destroy_process_group()
