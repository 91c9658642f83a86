"""Save and load the state of a demo model repeatedly, by each strategy in turn."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from voxlane import uri as uris
from voxlane.bench import ranks
from voxlane.bench.checkpoint import demo_model
from voxlane.bench.checkpoint.settings import CheckpointSettings
from voxlane.bench.checkpoint.strategies import State, Strategy
from voxlane.bench.process_usage import PeakMemory
from voxlane.bench.report import in_job
from voxlane.errors import CorruptError
from voxlane.store import Store, StoreConfig


@dataclass(frozen=True)
class CheckpointCall:
    """One save or load by all ranks together."""

    strategy: str
    operation: str
    """save or load."""
    uri: str
    seconds: float
    """Seconds of the slowest rank."""
    extra_bytes: int | None
    """Peak memory above that before the call, of the rank that needed most; None where it is not known. A single-file
    load creates a new state, which counts."""


@dataclass(frozen=True)
class CheckpointResult:
    """Result of the checkpoint benchmark."""

    calls: list[CheckpointCall]
    """All calls, in order."""
    checkpoint_bytes: int
    """Bytes of all tensors."""
    device: str
    """Type of the device that held the model."""
    kept_uris: list[str]
    """Checkpoints that were kept."""


def measure(settings: CheckpointSettings) -> CheckpointResult | None:
    """Run the benchmark on new local ranks, or as one rank of the job that this process belongs to. In a job, ranks
    other than the first get None."""
    start = partial(ranks.join_job, _run) if in_job() else partial(ranks.run, _run, settings.ranks)
    result: CheckpointResult | None = start(settings.device_kind, settings)
    return result


def _run(device: torch.device, settings: CheckpointSettings) -> CheckpointResult:
    """Run one rank's part of the benchmark."""
    is_distributed = settings.format == "distributed"
    strategies = [Strategy(name, settings) for name in settings.strategies]
    ranks.print_on_rank_zero(f"building a model of {settings.layers} layers on {dist.get_world_size()} ranks")
    state: State
    if is_distributed:
        state = demo_model.sharded_model(settings.layers, device).state_dict()
    else:
        state = demo_model.full_state(settings.layers, device)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    ranks.print_on_rank_zero(f"checkpoints of {size / 1e6:.1f} MB")
    calls: list[CheckpointCall] = []
    saved: dict[str, list[str]] = {strategy.name: [] for strategy in strategies}
    try:
        for index in range(settings.num_save_calls):
            for strategy in strategies:
                folder = f"{settings.save_folder.rstrip('/')}/voxlane-bench/{strategy.name}-{settings.format}"
                uri = f"{folder}/ckpt-{index}"
                saved[strategy.name].append(uri)
                # A single file is written by one rank, as Lightning does.
                save = partial(strategy.save, state, uri) if is_distributed or dist.get_rank() == 0 else None
                calls.append(_time(strategy, "save", uri, index, save)[0])
        for index in range(settings.num_load_calls):
            for strategy in strategies:
                uris_to_load = [settings.restore_uri] if settings.restore_uri else saved[strategy.name]
                uri = uris_to_load[index % len(uris_to_load)]
                if is_distributed:
                    demo_model.scramble(state)
                call, loaded = _time(strategy, "load", uri, index, partial(strategy.load, state, uri))
                calls.append(call)
                if (name := demo_model.first_difference(loaded)) is not None:
                    problem = f"{strategy.name} loaded values that differ from the saved ones, first in {name!r}"
                    fix = "Load a checkpoint that this benchmark saved with the same --layers; otherwise report a bug"
                    raise CorruptError(problem, uri=strategy.location(uri), fix=fix)
    finally:
        if dist.get_rank() == 0 and not settings.keeps_checkpoints:
            _remove(strategies, saved, settings.store)
    kept_uris = [strategy.location(uri) for strategy in strategies for uri in saved[strategy.name]]
    return CheckpointResult(calls, size, device.type, kept_uris if settings.keeps_checkpoints else [])


def _time(
    strategy: Strategy, operation: str, uri: str, index: int, work: Callable[[], Any] | None
) -> tuple[CheckpointCall, Any]:
    """Time one call on all ranks together and return it with the result of `work` on this rank."""
    ranks.gather(None)
    with PeakMemory() as memory:
        start = time.perf_counter()
        result = None if work is None else work()
        seconds = time.perf_counter() - start
    measurements: list[Any] = ranks.gather((seconds, memory.extra_bytes))
    slowest = max(seconds for seconds, _ in measurements)
    extra = max((extra for _, extra in measurements if extra is not None), default=None)
    ranks.print_on_rank_zero(f"{operation} {index + 1}, {strategy.name}: {slowest:.2f} s")
    return CheckpointCall(strategy.name, operation, strategy.location(uri), slowest, extra), result


def _remove(strategies: Sequence[Strategy], saved: dict[str, list[str]], config: StoreConfig) -> None:
    for strategy in strategies:
        if saved[strategy.name]:
            folder = uris.parse(strategy.location(saved[strategy.name][0].rpartition("/")[0]))
            if folder.scheme == "file":
                shutil.rmtree(Path("/", folder.key), ignore_errors=True)
            else:
                Store(str(folder), config).delete_prefix(folder.key + "/")
