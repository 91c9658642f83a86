"""Processes that save checkpoints in a loop until they are killed, and the expected contents of each checkpoint.

Every value follows from the step number, so that a test can tell whether a checkpoint is complete.
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
"""Seconds that ranks wait for a rank that is gone."""
_MB = 1_000_000


# -- states ----------------------------------------------------------------------------------------------------------


def plain_state(step: int) -> dict[str, Any]:
    """Return a state of 40 to 80 MB; pairs of successive steps have the same size."""
    size_mb = 40 + 10 * (step // 2 % 5)
    return {
        "step": step,
        "weights": _values(step, size_mb * _MB // 4),
        "bias": _values(step + 1, 1000),
        "loader": {"epoch": step // 7, "position": [step, step * 3]},
    }


def full_state(step: int) -> dict[str, Any]:
    """Return the unsharded state of about 42 MB that all ranks save together."""
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
    """Load the checkpoint `name` below `uri` and return its step; raise if it is not exactly the state of that step."""
    if name.endswith(".ckpt"):
        loaded = Checkpoint(uri, config).load(name)
        expected = plain_state(loaded["step"])
    else:
        loaded = full_state(-1)
        load_sharded(loaded, f"{uri}/{name}", config)
        expected = full_state(loaded["step"])
    if difference := _find_difference(loaded, expected):
        raise AssertionError(f"{name} claims to be step {loaded['step']}, but {difference} differs from that step")
    return int(loaded["step"])


def _find_difference(loaded: Any, expected: Any, path: str = "") -> str:
    """Return the path of the first value that differs, or an empty string."""
    if isinstance(expected, dict):
        if loaded.keys() != expected.keys():
            return path or "the set of names"
        paths = (_find_difference(loaded[key], expected[key], f"{path}/{key}") for key in expected)
        return next((difference for difference in paths if difference), "")
    same = torch.equal(loaded, expected) if isinstance(expected, torch.Tensor) else loaded == expected
    return "" if same else path


# -- savers ----------------------------------------------------------------------------------------------------------


class Reporter:
    """Reports over a pipe what a saver does: `("ready", None)`, `("saving", (name, step))`, `("phase", name)`,
    `("saved", (name, step))`, `("error", text)`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, kind: str, value: Any = None) -> None:
        """Send one message; it can be read even after this process was killed."""
        with self._lock:
            self._pipe.send((kind, value))

    def announce(self, owner: Any, name: str, phase: str, after: str = "") -> None:
        """Report `phase` when `owner.name` is called from now on, and the phase `after` when it returns."""
        call: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(call)
        def announced(*args: Any, **kwargs: Any) -> Any:
            self.send("phase", phase)
            result = call(*args, **kwargs)
            if after:
                self.send("phase", after)
            return result

        setattr(owner, name, announced)

    def loop(self, save: Callable[[Any, str], Any], state_of: Callable[[int], Any], suffix: str, step: int) -> None:
        """Save step after step, each under its own name and over `last`, until killed."""
        while True:
            state = state_of(step)
            for name in (f"step-{step:06d}{suffix}", f"last{suffix}"):
                self.send("saving", (name, step))
                save(state, name)
                self.send("saved", (name, step))
            step += 1


def save_alone(pipe: Connection, uri: str, config: StoreConfig) -> None:
    """Save by itself, beginning with the step that the pipe delivers."""
    os.setsid()
    torch.set_num_threads(1)
    report = Reporter(pipe)
    report.announce(writer, "open_upload", "uploading")
    report.announce(plain, "add_contents", "publishing")
    checkpoint = Checkpoint(uri, config)
    report.send("ready")
    try:
        report.loop(checkpoint.save, plain_state, ".ckpt", pipe.recv())
    except Exception as error:  # noqa: BLE001 - a process boundary: the parent process judges the error
        report.send("error", _text(error))


def save_together(pipe: Connection, uri: str, config: StoreConfig, rank: int, num_ranks: int, rendezvous: str) -> None:
    """Save as one of several ranks that save together."""
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
        _sharded_state(0, mesh)  # the first use initialises parts of torch
        report.send("ready")
        report.loop(
            lambda state, name: save_sharded(state, f"{uri}/{name}", config),
            lambda step: _sharded_state(step, mesh),
            "",
            pipe.recv(),
        )
    except Exception as error:  # noqa: BLE001 - a process boundary: the parent process judges the error
        report.send("error", _text(error))
    os._exit(1)  # a group with a dead member does not shut down cleanly


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
