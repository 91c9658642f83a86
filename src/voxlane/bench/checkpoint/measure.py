"""Save and load the state of a demo model repeatedly, by each strategy in turn."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from voxlane import uri as uris
from voxlane.bench import ranks
from voxlane.bench.checkpoint import demo_model
from voxlane.bench.checkpoint.dataflux_names import find_node
from voxlane.bench.checkpoint.settings import CheckpointSettings
from voxlane.bench.checkpoint.strategies import State, Strategy
from voxlane.bench.process_usage import PeakMemory
from voxlane.bench.report import in_job
from voxlane.distributed import run_on_rank_zero
from voxlane.errors import CheckpointError, CorruptError
from voxlane.store import Store


@dataclass(frozen=True)
class CheckpointCall:
    """One save or load by all ranks together."""

    strategy: str
    operation: str
    """save or load; of a save in the background, blocked (the time in which the ranks could not train) and stored (the
    time until the checkpoint was complete)."""
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
    if in_job():
        start = partial(ranks.join_job, _run)
    elif (node := find_node()) is not None:
        local = settings.ranks // node.count
        own_ranks = range(node.index * local, (node.index + 1) * local)
        start = partial(ranks.run_on_node, _run, own_ranks, settings.ranks, node.address)
    else:
        start = partial(ranks.run, _run, settings.ranks)
    result: CheckpointResult | None = start(settings.device_kind, settings)
    return result


def _run(device: torch.device, settings: CheckpointSettings) -> CheckpointResult:
    """Run one rank's part of the benchmark."""
    strategies = [Strategy(name, settings) for name in settings.strategies]
    run_on_rank_zero(partial(_check_restore, strategies, settings))
    existed_before = run_on_rank_zero(partial(_has_checkpoints, strategies, settings))
    state = _make_state(device, settings)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    ranks.print_on_rank_zero(f"checkpoints of {size / 1e6:.1f} MB")
    calls: list[CheckpointCall] = []
    keeps_checkpoints = settings.keeps_checkpoints or existed_before  # an earlier --save-only may have left them
    try:
        for index in range(settings.num_save_calls):
            for strategy in strategies:
                calls += _measure_save(strategy, state, index, settings)
        if settings.clear_kernel_cache:
            _drop_from_page_cache(strategies, settings)
        for index in range(settings.num_load_calls):
            for strategy in strategies:
                calls.append(_measure_load(strategy, state, index, settings))
    finally:
        if dist.get_rank() == 0 and settings.num_save_calls and not keeps_checkpoints:
            _remove(strategies, settings)
    kept_uris = list(
        dict.fromkeys(
            strategy.location(settings.checkpoint_uri(strategy.name, index))
            for strategy in strategies
            for index in range(settings.num_save_calls)
        )
    )
    return CheckpointResult(calls, size, device.type, kept_uris if keeps_checkpoints else [])


def _check_restore(strategies: Sequence[Strategy], settings: CheckpointSettings) -> None:
    """Raise if a checkpoint that this run does not save itself is missing, before anything is saved."""
    if not settings.num_load_calls or not (settings.load_only or settings.restore_uri):
        return
    for strategy in strategies:
        uris_to_load = {
            strategy.location(settings.restore_uri or settings.checkpoint_uri(strategy.name, index))
            for index in range(settings.num_load_calls)
        }
        for uri in sorted(uris_to_load):
            store, key = Store.locate(uri, settings.store)
            if not store.exists(f"{key}/.metadata" if settings.format == "distributed" else key):
                fix = "Save it first (--save-only), with the same --strategy, --format and number of --saves"
                raise CheckpointError("no complete checkpoint here", uri=uri, fix=fix)


def _has_checkpoints(strategies: Sequence[Strategy], settings: CheckpointSettings) -> bool:
    """Return whether there are files already where this run will save its checkpoints."""
    if not settings.num_save_calls:
        return False
    folders = [_folder_of(strategy, settings) for strategy in strategies]
    return any(True for f in folders for _ in Store(str(f), settings.store).list_pages(f.key + "/"))


def _make_state(device: torch.device, settings: CheckpointSettings) -> State:
    num_ranks = dist.get_world_size()
    if settings.layer_size is not None:
        rows, count = settings.layer_size, settings.padding_size
        ranks.print_on_rank_zero(f"creating {count} tensors of {rows} x 1000 values on {num_ranks} ranks")
        if settings.format == "single":
            return demo_model.padding_state(rows, count, device)
        return demo_model.sharded_model(partial(demo_model.PaddingTensors, rows, count), device).state_dict()
    ranks.print_on_rank_zero(f"building a model of {settings.layers} layers on {num_ranks} ranks")
    if settings.format == "single":
        return demo_model.full_state(settings.layers, device)
    return demo_model.sharded_model(partial(demo_model.DemoTransformer, settings.layers), device).state_dict()


def _measure_save(strategy: Strategy, state: State, index: int, settings: CheckpointSettings) -> list[CheckpointCall]:
    uri = settings.checkpoint_uri(strategy.name, index)
    # A single file is written by one rank, as Lightning does.
    saves = settings.format == "distributed" or dist.get_rank() == 0
    if not settings.use_async:
        return [_time(strategy, "save", uri, index, partial(strategy.save, state, uri) if saves else None)[0]]
    stored_s = 0.0

    def save_behind_steps() -> float:
        """Save while simulated steps run and return the seconds of those steps."""
        nonlocal stored_s
        started = time.perf_counter()
        stored_at: list[float] = []
        future = strategy.start_save(state, uri)
        future.add_done_callback(lambda _: stored_at.append(time.perf_counter()))
        steps_started = time.perf_counter()
        time.sleep(settings.steps_per_save * settings.step_time)
        steps_s = time.perf_counter() - steps_started
        future.result()
        stored_s = (stored_at[0] if stored_at else time.perf_counter()) - started
        return steps_s

    call, steps_s = _time(strategy, "save and steps", uri, index, save_behind_steps if saves else None)
    stored = replace(call, operation="stored", seconds=max(ranks.gather(stored_s)))
    blocked_s = max(call.seconds - max(ranks.gather(steps_s or 0.0)), 0.0)
    return [replace(call, operation="blocked", seconds=blocked_s), stored]


def _measure_load(strategy: Strategy, state: State, index: int, settings: CheckpointSettings) -> CheckpointCall:
    uri = settings.restore_uri or settings.checkpoint_uri(strategy.name, index)
    if settings.format == "distributed":
        demo_model.scramble(state)
    call, loaded = _time(strategy, "load", uri, index, partial(strategy.load, state, uri))
    if (name := demo_model.first_difference(loaded)) is not None:
        problem = f"{strategy.name} loaded values that differ from the saved ones, first in {name!r}"
        fix = "Load a checkpoint that this benchmark saved with the same --layers; otherwise report a bug"
        raise CorruptError(problem, uri=strategy.location(uri), fix=fix)
    return call


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


def _drop_from_page_cache(strategies: Sequence[Strategy], settings: CheckpointSettings) -> None:
    """Make the next loads read from the disk or the mount. Every rank does so, because each may be on another node."""
    for folder in (_folder_of(strategy, settings) for strategy in strategies if strategy.name == "filesystem"):
        for path in (path for path in Path("/", folder.key).rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # pages that are not yet written cannot be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _remove(strategies: Sequence[Strategy], settings: CheckpointSettings) -> None:
    for strategy in strategies:
        folder = _folder_of(strategy, settings)
        if folder.scheme == "file":
            shutil.rmtree(Path("/", folder.key), ignore_errors=True)
        else:
            Store(str(folder), settings.store).delete_prefix(folder.key + "/")


def _folder_of(strategy: Strategy, settings: CheckpointSettings) -> uris.Uri:
    """Return the folder of all checkpoints of a strategy."""
    return uris.parse(strategy.location(settings.checkpoint_uri(strategy.name, 0).rpartition("/")[0]))
