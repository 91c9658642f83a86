"""Processes that save checkpoints in a loop until they are killed, and what each checkpoint must then hold.

Every value follows from the step number, so that whoever finds a checkpoint can tell whether it is whole.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from voxlane import Checkpoint, StoreConfig
from voxlane.checkpoint import plain
from voxlane.checkpoint.distributed_reader import load_sharded
from voxlane.checkpoint.distributed_writer import DistributedWriter, save_sharded
from voxlane.store import writer

PHASES = ("serialising", "uploading", "publishing", "between saves")
GROUP_TIMEOUT_S = 8.0
"""How long ranks wait for one that is gone."""
_MB = 1_000_000


# -- states ----------------------------------------------------------------------------------------------------------


def plain_state(step: int) -> dict[str, Any]:
    """40 to 80 MB; two steps in a row have the same size, the next two another."""
    size_mb = 40 + 10 * (step // 2 % 5)
    return {
        "step": step,
        "weights": _values(step, size_mb * _MB // 4),
        "bias": _values(step + 1, 1000),
        "loader": {"epoch": step // 7, "position": [step, step * 3]},
    }


def full_state(step: int) -> dict[str, Any]:
    """What all ranks save together, unsharded: about 42 MB."""
    return {
        "model": {
            "rows": _values(step, 8 * _MB).reshape(8000, 1000),
            "columns": _values(step + 1, 2 * _MB).reshape(1000, 2000),
            "replicated": _values(step + 2, 500_000),
            "count": torch.tensor(step),
        },
        "step": step,
        "loader": {"epoch": step // 7, "position": [step, step * 3]},
    }


def _values(step: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32).mul_(31).add_(step * 1_000_003)


def _sharded_state(step: int, mesh: DeviceMesh) -> dict[str, Any]:
    state = full_state(step)
    for name, dim in (("rows", 0), ("columns", 1)):
        full = state["model"][name]
        local = full.chunk(mesh.size(), dim)[mesh.get_rank()].contiguous()
        state["model"][name] = DTensor.from_local(local, mesh, [Shard(dim)], shape=full.shape, stride=full.stride())
    return state


def load_step(uri: str, name: str, config: StoreConfig) -> int:
    """Load the checkpoint `name` below `uri`; returns its step, or raises if it is not exactly what that step holds."""
    if name.endswith(".ckpt"):
        found = Checkpoint(uri, config).load(name)
        wanted = plain_state(found["step"])
    else:
        found = full_state(-1)
        load_sharded(found, f"{uri}/{name}", config)
        wanted = full_state(found["step"])
    if difference := _difference(found, wanted):
        raise AssertionError(f"{name} says it is step {found['step']}, but {difference} is not what that step holds")
    return int(found["step"])


def _difference(found: Any, wanted: Any, where: str = "") -> str:
    """The path of the first thing that is not as wanted."""
    if isinstance(wanted, dict):
        if found.keys() != wanted.keys():
            return where or "the set of names"
        places = (_difference(found[key], wanted[key], f"{where}/{key}") for key in wanted)
        return next((place for place in places if place), "")
    same = torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted
    return "" if same else where


# -- savers ----------------------------------------------------------------------------------------------------------


class Reporter:
    """Tells over a pipe what a saver is at: `("ready", None)`, `("saving", (name, step))`, `("phase", name)`,
    `("saved", (name, step))`, `("error", text)`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def say(self, kind: str, value: Any = None) -> None:
        """Send one message; what was sent can be read after this process was killed."""
        with self._lock:
            self._pipe.send((kind, value))

    def announce(self, owner: Any, name: str, phase: str, after: str = "") -> None:
        """From now on, a call of `owner.name` begins `phase`, and its end the phase `after`."""
        call: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(call)
        def announced(*args: Any, **kwargs: Any) -> Any:
            self.say("phase", phase)
            result = call(*args, **kwargs)
            if after:
                self.say("phase", after)
            return result

        setattr(owner, name, announced)

    def loop(self, save: Callable[[Any, str], Any], state_of: Callable[[int], Any], suffix: str, step: int) -> None:
        """Save step after step, each under its own name and over `last`, until killed."""
        while True:
            state = state_of(step)
            for name in (f"step-{step:06d}{suffix}", f"last{suffix}"):
                self.say("saving", (name, step))
                save(state, name)
                self.say("saved", (name, step))
            step += 1


def save_alone(pipe: Connection, uri: str, config: StoreConfig) -> None:
    """A process that saves by itself; begins with the step that comes over the pipe."""
    os.setsid()
    torch.set_num_threads(1)
    report = Reporter(pipe)
    report.announce(writer._Upload, "__init__", "uploading")
    report.announce(plain, "add_contents", "publishing")
    checkpoint = Checkpoint(uri, config)
    report.say("ready")
    try:
        report.loop(checkpoint.save, plain_state, ".ckpt", pipe.recv())
    except Exception as error:  # noqa: BLE001 - a process's boundary: whoever started it judges the error
        report.say("error", _text(error))


def save_together(pipe: Connection, uri: str, config: StoreConfig, rank: int, num_ranks: int, rendezvous: str) -> None:
    """One rank of several that save together."""
    os.setsid()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = Reporter(pipe)
    report.announce(DistributedWriter, "write_data", "uploading", after="publishing")
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks, timeout=timeout
        )
        mesh = init_device_mesh("cpu", (num_ranks,))
        _sharded_state(0, mesh)  # what torch does once, at the first use
        report.say("ready")
        report.loop(
            lambda state, name: save_sharded(state, f"{uri}/{name}", config),
            lambda step: _sharded_state(step, mesh),
            "",
            pipe.recv(),
        )
    except Exception as error:  # noqa: BLE001 - a process's boundary: whoever started it judges the error
        report.say("error", _text(error))
    os._exit(1)  # a group with a dead member does not end in order


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
