"""Where a run's time goes, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from voxlane.store import Traffic

_KEPT_UP = 0.05
"""A loader that is waited for less than this share of the time keeps up."""


@dataclass
class Stopwatch:
    """Seconds spent in one kind of work; on a GPU those that the GPU spent, without waiting for it."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: float = 0.0
    _pairs: list[tuple[Any, Any]] = field(default_factory=list)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Time what is done inside."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """From now on."""
        if self.device.type == "cuda":
            self._pairs.append((event(), None))
        else:
            self._began = time.perf_counter()

    def stop(self) -> None:
        """Until now."""
        if self.device.type == "cuda":
            self._pairs[-1] = self._pairs[-1][0], event()
        else:
            self.seconds += time.perf_counter() - self._began

    def total(self) -> float:
        """Seconds so far. Waits for the GPU."""
        if self._pairs:
            torch.cuda.synchronize(self.device)
            self.seconds += sum(a.elapsed_time(b) / 1000 for a, b in self._pairs if b is not None)
            self._pairs = [pair for pair in self._pairs if pair[1] is None]  # one that is not stopped yet
        return self.seconds


def event(*, blocking: bool = False) -> Any:
    """A point in time of the current stream. `blocking`: who waits for it lets other threads have the core."""
    point: Any = torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]
    point.record()
    return point


@dataclass(frozen=True)
class Waits:
    """What the steps of a GPU waited for, where patches are made ready beside them."""

    augment_s: float = 0.0
    """Copying and augmenting."""
    loader_s: float = 0.0
    """The loader."""

    def __add__(self, other: Waits) -> Waits:
        return Waits(self.augment_s + other.augment_s, self.loader_s + other.loader_s)


def waited_for(late_s: float, work_s: float, loader_s: float) -> Waits:
    """What a step waited for that could have begun `late_s` before its patches were ready.

    work_s: copying and augmenting them took this long. loader_s: this long they were waited for before. The work comes
    last, so that it is what the step waited for first; what neither explains is Python's.
    """
    late = max(0.0, late_s)
    augment = min(late, work_s)
    return Waits(augment, min(late - augment, loader_s))


@dataclass(frozen=True)
class LoaderTime:
    """What the loader did, by one rank."""

    waited_s: float
    """The training loop waited for a batch; beside a GPU, what its steps waited."""
    bucket_s: float
    """Threads waited for the bucket, together."""
    decode_s: float
    """Threads decoded and assembled, together."""


def split_seconds(wall_s: float, loader: LoaderTime, parts: dict[str, float]) -> dict[str, float]:
    """The run's seconds: waiting for patches that are on their way (bucket) or being decoded (decode), augmenting, the
    step (forward, loss, backward, optimizer), validating, and the rest. Augmenting beside a step counts only as long as
    the next step waited for it.

    Time waited for the loader is shared out by what its threads did meanwhile; what a GPU did at the same time counts
    as the GPU's."""
    measured = {name: parts.get(name, 0.0) for name in ("augment", "step", "validate")}
    waited = min(loader.waited_s, max(0.0, wall_s - sum(measured.values())))
    worked = loader.bucket_s + loader.decode_s
    bucket = waited * loader.bucket_s / worked if worked else waited
    seconds = {"bucket": bucket, "decode": waited - bucket, **measured}
    return {**seconds, "other": max(0.0, wall_s - sum(seconds.values()))}


def bottleneck(seconds: dict[str, float], *, on_gpu: bool) -> tuple[str, str]:
    """The part that training waits for most, and a sentence about it that says what would help."""
    faster = "A faster GPU, larger patches or a smaller network" if on_gpu else "A GPU or a smaller base_features"
    training = {name: seconds[name] for name in ("bucket", "decode", "augment", "step")}
    total = sum(training.values()) or 1.0
    waiting = (training["bucket"] + training["decode"]) / total
    if waiting < _KEPT_UP:
        name = "augment" if training["augment"] > training["step"] else "step"
        what = "the training step" if name == "step" else "augmentation"
        helps = faster if name == "step" else "augment.strength below 1 or a faster device"
        return name, (
            f"The bottleneck is {what} ({training[name] / total:.0%} of training time); the loader kept up: it was "
            f"waited for {waiting:.1%} of the time. {helps[0].upper()}{helps[1:]} would speed it up."
        )
    name = max(training, key=lambda part: training[part])
    advice = {
        "bucket": "Raise loader.in_flight, give loader.ram_cache_bytes or loader.disk_cache, or train closer to it",
        "decode": "Raise loader.workers, where there are cores left",
        "augment": "Use a faster device or augment.strength below 1",
        "step": f"{faster} would help, and so would loader.workers",
    }[name]
    words = {"bucket": "the bucket", "decode": "decoding", "augment": "augmentation", "step": "the training step"}
    return name, (
        f"The bottleneck is {words[name]} ({training[name] / total:.0%} of training time); "
        f"{waiting:.0%} of it went into waiting for data. {advice}."
    )


def added(before: dict[str, Any], now: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """The stall report of a run that was resumed: both parts together."""
    names = ("steps", "seconds", "patches", "bytes_read", "requests", "cost_usd")
    total = {name: before[name] + now[name] for name in names}
    shares = {name: before["shares"].get(name, 0.0) + seconds for name, seconds in now["shares"].items()}
    patches = max(1, total["patches"])
    each = {
        name: (before[name] * before["patches"] + now[name] * now["patches"]) / patches
        for name in ("bucket_ms_a_patch", "decode_ms_a_patch")
    }
    name, sentence = bottleneck(shares, on_gpu=on_gpu)
    return {**total, "shares": shares, "bottleneck": name, "sentence": sentence, **each}


def stall_report(
    wall_s: float,
    loader: LoaderTime,
    parts: dict[str, float],
    *,
    steps: int,
    patches: int,
    traffic: Traffic,
    on_gpu: bool,
) -> dict[str, Any]:
    """The content of stall.json."""
    seconds = split_seconds(wall_s, loader, parts)
    name, sentence = bottleneck(seconds, on_gpu=on_gpu)
    return {
        "steps": steps,
        "seconds": wall_s,
        "shares": seconds,
        "bottleneck": name,
        "sentence": sentence,
        "patches": patches,
        "bytes_read": traffic.bytes_read,
        "requests": traffic.requests,
        "cost_usd": traffic.request_cost_usd,
        "bucket_ms_a_patch": 1000 * loader.bucket_s / max(1, patches),
        "decode_ms_a_patch": 1000 * loader.decode_s / max(1, patches),
    }
