"""The checkpoint benchmark: save and load the state of a demo model again and again, by each strategy in turn."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from voxlane import uri as uris
from voxlane.bench import demo_model, ranks
from voxlane.bench.peak_memory import PeakMemory
from voxlane.bench.setting import Setting, in_job
from voxlane.bench.strategies import State, Strategy
from voxlane.errors import CorruptError
from voxlane.store import Store

_T = TypeVar("_T")


@dataclass(frozen=True)
class Call:
    """One save or load by all ranks together."""

    strategy: str
    operation: str
    """save or load."""
    uri: str
    seconds: float
    """Of the slowest rank."""
    extra_bytes: int | None
    """How far the memory of the rank that took most rose above what it had before; None where that is not known. A
    single-file load makes a new state, which counts."""


@dataclass(frozen=True)
class Outcome:
    """What a benchmark found."""

    calls: list[Call]
    """In the order they were made."""
    checkpoint_bytes: int
    """Bytes of all tensors."""
    device: str
    """What the ranks kept the model on."""
    kept: list[str]
    """Checkpoints that were left in place."""


def measure(setting: Setting) -> Outcome | None:
    """Run the benchmark: on new local ranks, or as one rank of the job this process belongs to; then None is returned
    on all ranks but the first."""
    if in_job():
        outcome: Outcome | None = ranks.take_part(_work, setting.accelerator, setting)
        return outcome
    outcome = ranks.run(_work, setting.num_ranks, setting.accelerator, setting)
    return outcome


def _work(device: torch.device, setting: Setting) -> Outcome:
    return _Bench(device, setting).run()


class _Bench:
    """One rank's part."""

    def __init__(self, device: torch.device, setting: Setting) -> None:
        self._setting = setting
        self._device = device
        self._is_first = dist.get_rank() == 0
        self._strategies = [Strategy(name, setting) for name in setting.strategies]
        self._calls: list[Call] = []

    def run(self) -> Outcome:
        setting = self._setting
        self._say(f"building a model of {setting.num_layers} layers on {dist.get_world_size()} ranks")
        state: State
        if setting.format == "distributed":
            state = demo_model.sharded_model(setting.num_layers, self._device).state_dict()
        else:
            state = demo_model.full_state(setting.num_layers, self._device)
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        self._say(f"checkpoints of {size / 1e6:.1f} MB")
        saved: dict[str, list[str]] = {strategy.name: [] for strategy in self._strategies}
        try:
            for index in range(setting.num_save_calls):
                for strategy in self._strategies:
                    uri = f"{setting.folder.rstrip('/')}/voxlane-bench/{strategy.name}-{setting.format}/ckpt-{index}"
                    saved[strategy.name].append(uri)
                    self._save(strategy, state, uri, index)
            for index in range(setting.num_load_calls):
                for strategy in self._strategies:
                    known = [setting.restore] if setting.restore else saved[strategy.name]
                    self._load(strategy, state, known[index % len(known)], index)
        finally:
            if self._is_first and not setting.keep:
                self._remove(saved)
        kept = [strategy.location(uri) for strategy in self._strategies for uri in saved[strategy.name]]
        return Outcome(self._calls, size, self._device.type, kept if setting.keep else [])

    def _save(self, strategy: Strategy, state: State, uri: str, index: int) -> None:
        # One file holds all, so one rank writes it, as Lightning does.
        mine = self._setting.format == "distributed" or self._is_first
        self._timed(strategy, "save", uri, index, lambda: strategy.save(state, uri) if mine else None)

    def _load(self, strategy: Strategy, state: State, uri: str, index: int) -> None:
        if self._setting.format == "distributed":
            demo_model.scramble(state)
        loaded = self._timed(strategy, "load", uri, index, lambda: strategy.load(state, uri))
        if (name := demo_model.first_difference(loaded)) is not None:
            raise CorruptError(
                f"{strategy.name} loaded other values than were saved, in {name!r} first",
                uri=strategy.location(uri),
                fix="Was it saved by this benchmark, with as many layers? Then this is a bug",
            )

    def _timed(self, strategy: Strategy, operation: str, uri: str, index: int, call: Callable[[], _T]) -> _T:
        ranks.gather(None)
        with PeakMemory() as memory:
            start = time.perf_counter()
            result = call()
            seconds = time.perf_counter() - start
        found: list[Any] = ranks.gather((seconds, memory.extra_bytes))
        slowest = max(seconds for seconds, _ in found)
        extra = [extra for _, extra in found if extra is not None]
        self._calls.append(Call(strategy.name, operation, strategy.location(uri), slowest, max(extra, default=None)))
        self._say(f"{operation} {index + 1}, {strategy.name}: {slowest:.2f} s")
        return result

    def _remove(self, saved: dict[str, list[str]]) -> None:
        for strategy in self._strategies:
            if not saved[strategy.name]:
                continue
            place = uris.parse(strategy.location(saved[strategy.name][0].rpartition("/")[0]))
            if place.scheme == "file":
                shutil.rmtree(Path("/", place.key), ignore_errors=True)
            else:
                Store(str(place), self._setting.store).delete_prefix(place.key + "/")

    def _say(self, text: str) -> None:
        if self._is_first:
            print(text, file=sys.stderr, flush=True)
