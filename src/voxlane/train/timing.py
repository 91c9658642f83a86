"""How a run's time is spent, and how to speed it up; patches copied and augmented beside the step before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from voxlane.store import Traffic

_MAX_WAIT_SHARE = 0.05
"""A loader keeps up if training waits for it less than this fraction of the time."""
STEPS_AHEAD = 2
"""Largest number of steps launched but not finished. One runs, one follows; more would only hold more patches."""


@dataclass
class Stopwatch:
    """Measures the seconds spent in one kind of work; on a GPU those of the GPU, without waiting for it."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: float = 0.0
    _pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def start(self) -> None:
        """Start measuring."""
        self._started: Any = record_event() if self.device.type == "cuda" else time.perf_counter()

    def stop(self) -> None:
        """Stop measuring."""
        if self.device.type == "cuda":
            self._pairs.append((self._started, record_event()))
        else:
            self.seconds += time.perf_counter() - self._started

    def total(self) -> float:
        """Return the seconds so far. Waits for the GPU."""
        if self._pairs:
            torch.cuda.synchronize(self.device)
            self.seconds += sum(started.elapsed_time(ended) / 1000 for started, ended in self._pairs)
            self._pairs.clear()
        return self.seconds


def record_event(*, blocking: bool = False) -> Any:
    """Record a point in time on the current stream. `blocking`: waiting for it yields the core to other threads."""
    point: Any = torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]
    point.record()
    return point


@dataclass(frozen=True)
class GpuWaits:
    """Seconds that the steps of a GPU waited for their patches."""

    augment_s: float = 0.0
    """Seconds waited for copying and augmenting."""
    loader_s: float = 0.0
    """Seconds waited for the loader."""

    def __add__(self, other: GpuWaits) -> GpuWaits:
        return GpuWaits(self.augment_s + other.augment_s, self.loader_s + other.loader_s)


def attribute_wait(late_s: float, work_s: float, loader_s: float) -> GpuWaits:
    """Attribute the wait of a step whose patches were ready `late_s` after the step before had ended.

    `work_s`: seconds that copying and augmenting the patches took. `loader_s`: seconds spent waiting for the loader
    before. The work comes last, so the wait is attributed to it first; what neither explains is Python's.
    """
    late = max(0.0, late_s)
    augment = min(late, work_s)
    return GpuWaits(augment, min(late - augment, loader_s))


class GpuPrefetch:
    """Copies and augments patches on a CUDA stream of its own, and measures how long steps waited for that.

    Python is a step ahead of the GPU: when it takes a batch, the GPU still computes the previous one. Work launched for
    the new batch on another stream therefore runs beside that step, though no batch is taken from the loader early: a
    checkpoint's position in the epoch is the batch that is being trained.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._ends: deque[Any] = deque(maxlen=STEPS_AHEAD)
        """Events at the end of the last steps."""
        self._pending: deque[tuple[Any, Any, Any, float]] = deque()
        """Uncounted batches: end of the previous step, start and end of the work, seconds waited for the loader."""
        self._total = GpuWaits()

    def __call__(self, work: Callable[[], dict[str, Any]], loader_s: float) -> dict[str, Any]:
        """Launch `work` on the stream and return its result; the current stream waits for it, this thread does not.

        `loader_s`: seconds that this batch waited for the loader.
        """
        if len(self._ends) == STEPS_AHEAD:
            self._ends[0].synchronize()
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            started = record_event()
            batch = work()
            ended = record_event()
        compute.wait_event(ended)
        for value in batch.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(compute)  # or its memory could be reused before the step has read it
        self._pending.append((self._ends[-1] if self._ends else started, started, ended, loader_s))
        return batch

    def end_step(self) -> None:
        """Note that the step of the last batch is launched."""
        self._ends.append(record_event(blocking=True))
        self.waits()

    def waits(self, *, wait: bool = False) -> GpuWaits:
        """Return the waits of the steps so far; of finished steps only, unless `wait` waits for all."""
        if wait:
            torch.cuda.synchronize(self._device)
        while self._pending and all(point.query() for point in self._pending[0][:3]):
            previous_end, started, ended, loader_s = self._pending.popleft()
            late_s, work_s = previous_end.elapsed_time(ended) / 1000, started.elapsed_time(ended) / 1000
            self._total += attribute_wait(late_s, work_s, loader_s)
        return self._total


def split_seconds(wall_s: float, measured: Mapping[str, float]) -> dict[str, float]:
    """Split the run's seconds by activity.

    Activities: waiting for patches that are being downloaded (bucket) or decoded (decode), augmenting, the step
    (forward, loss, backward, optimizer), validating, and the rest. `measured` holds the seconds of augment, step and
    validate, and of the loader: those that training `waited` for it, and those that its threads spent on bucket and
    decode, summed over threads. Augmenting beside a step counts only as long as the next step waited for it. Time spent
    waiting for the loader is divided by what its threads did meanwhile; time in which a GPU worked as well counts as
    the GPU's.
    """
    device = {name: measured[name] for name in ("augment", "step", "validate")}
    waited = min(measured["waited"], max(0.0, wall_s - sum(device.values())))
    busy = measured["bucket"] + measured["decode"]
    bucket = waited * measured["bucket"] / busy if busy else waited
    seconds = {"bucket": bucket, "decode": waited - bucket, **device}
    return {**seconds, "other": max(0.0, wall_s - sum(seconds.values()))}


def find_bottleneck(seconds: Mapping[str, float], *, on_gpu: bool) -> tuple[str, str]:
    """Return the activity that takes most of the training time, and a sentence about it that says what would help."""
    faster = "A faster GPU, larger patches or a smaller network" if on_gpu else "A GPU or a smaller base_features"
    titles = {"bucket": "the bucket", "decode": "decoding", "augment": "augmentation", "step": "the training step"}
    total = sum(seconds[name] for name in titles) or 1.0
    waiting = (seconds["bucket"] + seconds["decode"]) / total
    keeps_up = waiting < _MAX_WAIT_SHARE
    name = max(("step", "augment") if keeps_up else titles, key=lambda activity: seconds[activity])
    summary = f"The bottleneck is {titles[name]} ({seconds[name] / total:.0%} of training time); "
    if keeps_up:
        remedy = faster if name == "step" else "A faster device or augment.strength below 1"
        waits = f"the loader kept up: training waited for it {waiting:.1%} of the time"
        return name, f"{summary}{waits}. {remedy} would speed it up."
    advice = {
        "bucket": "Raise loader.in_flight or loader.ram_cache_bytes, set loader.disk_cache, or train nearer the bucket",
        "decode": "Raise loader.workers if the machine has idle cores",
        "augment": "Use a faster device or augment.strength below 1",
        "step": f"{faster} would help, and so would loader.workers",
    }[name]
    return name, f"{summary}{waiting:.0%} of it went into waiting for data. {advice}."


def make_stall_report(
    wall_s: float,
    measured: Mapping[str, float],
    previous: Mapping[str, Any] | None,
    *,
    steps: int,
    patches: int,
    traffic: Traffic,
    on_gpu: bool,
) -> dict[str, Any]:
    """Return the content of stall.json. `measured`: see `split_seconds`. `previous`: the report from before a resume,
    which is added."""
    report: dict[str, Any] = {
        "steps": steps,
        "seconds": wall_s,
        "patches": patches,
        "bytes_read": traffic.bytes_read,
        "requests": traffic.requests,
        "retries": traffic.retries,
        "cost_usd": traffic.request_cost_usd,
    }
    loader_s = {name: measured[name] for name in ("bucket", "decode")}
    shares = split_seconds(wall_s, measured)
    if previous:
        report = {name: previous.get(name, 0) + value for name, value in report.items()}
        loader_s = {n: previous[f"{n}_ms_a_patch"] / 1000 * previous["patches"] + s for n, s in loader_s.items()}
        shares = {name: previous["shares"].get(name, 0.0) + seconds for name, seconds in shares.items()}
    name, sentence = find_bottleneck(shares, on_gpu=on_gpu)
    per_patch = {f"{n}_ms_a_patch": 1000 * s / max(1, report["patches"]) for n, s in loader_s.items()}
    return {**report, "shares": shares, "bottleneck": name, "sentence": sentence, **per_patch}
