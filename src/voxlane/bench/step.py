"""`voxlane bench step`: a training step done in several ways, in one process, in turns.

Needs torch alone (and Triton, for compiled variants and for ours): `python -m voxlane.bench.step` runs on machines that
have nothing else of this package's requirements.
"""

from __future__ import annotations

import gc
import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from voxlane.bench.step_profile import (
    Profile,
    Work,
    copy_bytes_per_s,
    matrix_flops_per_s,
    profile,
    settle,
    work_of,
)
from voxlane.bench.step_setting import CPU_PATCH, GPU_PATCH, WAYS, StepSetting
from voxlane.bench.step_variants import Batch, Variant, build, make_batches
from voxlane.errors import ConfigError, VoxlaneError

Say = Callable[[str], None]


@dataclass
class Measured:
    """What is known of one variant."""

    name: str
    notes: list[str] = field(default_factory=list)
    first_s: float = math.nan
    """From building it to the end of its first step: compilation and capture are in it."""
    peak_bytes: int | None = None
    """The most that was allocated at a time for it, start-up and warm-up included; None on a CPU."""
    held_bytes: int | None = None
    """Device memory that its steps held after start-up, with what the allocator keeps and graphs own."""
    first_losses: list[float] = field(default_factory=list)
    """Of the warm-up, from the seed's weights on."""
    last_loss: float = math.nan
    rounds_ms: list[list[float]] = field(default_factory=list)
    """Of each step, by round."""
    profile: Profile | None = None
    error: str | None = None
    """What it failed of, in a line."""


@dataclass
class Outcome:
    """Of all."""

    device: str
    patch: tuple[int, int, int]
    variants: list[Measured]
    left_out: dict[str, str]
    """Variants that this machine cannot do, and why."""
    orders: list[list[str]]
    """Of each round."""
    work: dict[str, Work]
    """By kind of network."""
    matrix_flops_per_s: float
    copy_bytes_per_s: float

    @property
    def failed(self) -> bool:
        """Whether a variant did."""
        return any(each.error is not None for each in self.variants)


def measure(setting: StepSetting, say: Say) -> Outcome:
    """Measure all variants; one that fails is told, and the others go on."""
    device = find_device(setting.device)
    on_gpu = device.type == "cuda"
    patch = setting.patch or (GPU_PATCH if on_gpu else CPU_PATCH)
    names, left_out = fitting(setting.variants, device)
    for name, why in left_out.items():
        say(f"{name}: left out, {why}")
    with algorithms_tried():
        rates = matrix_flops_per_s(device), copy_bytes_per_s(device)
        batches = make_batches(setting, patch, device)
        found = {name: Measured(name) for name in names}
        ready: dict[str, Variant] = {}
        for name in names:
            try:
                ready[name] = start(found[name], setting, batches, device, say)
            except Exception as error:  # noqa: BLE001 - a contender's failure must not take the others' figures with it
                give_up(found[name], error, say)
        orders = interleave(ready, found, setting, batches, device, say)
        for name, variant in list(ready.items()) if setting.profile else ():
            try:
                found[name].profile = profile(variant, batches, device)
            except Exception as error:  # noqa: BLE001 - a profiler that is not allowed here leaves the times as they are
                say(f"{name}: no profile, {told(error)}")
                found[name].notes.append(f"no profile: {told(error)}")
    kinds = dict.fromkeys(WAYS[name].kind for name in names)
    return Outcome(
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        patch=patch,
        variants=list(found.values()),
        left_out=left_out,
        orders=orders,
        work={kind: work_of(kind, setting, patch) for kind in kinds},
        matrix_flops_per_s=rates[0],
        copy_bytes_per_s=rates[1],
    )


def find_device(name: str) -> torch.device:
    """The one asked for, or a GPU if there is one."""
    there = torch.cuda.is_available()
    if not name:
        name = "cuda" if there else "cpu"
    if not name.startswith("cuda"):
        return torch.device(name)
    if not there:
        raise ConfigError(f"--device {name}: torch finds no GPU here", fix="Give --device cpu, or see nvidia-smi")
    index = name.partition(":")[2] or str(torch.cuda.current_device())
    if not index.isdecimal() or int(index) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}", fix=f"Give cuda:N with N below {torch.cuda.device_count()}")
    torch.cuda.set_device(int(index))
    return torch.device("cuda", int(index))


def fitting(asked: Sequence[str], device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The variants to measure, and of those that nobody asked for the ones left out, with the reason."""
    if asked:
        return list(asked), {}
    left_out = {}
    for name, way in WAYS.items():
        if way.compiled and device.type == "cuda" and find_spec("triton") is None:
            left_out[name] = "torch.compile needs Triton"
        elif way.compiled and way.kind == "mlperf" and device.type == "cpu":
            left_out[name] = "compiling for a CPU takes minutes and tells nothing of a GPU (--variant asks for it)"
    return [name for name in WAYS if name not in left_out], left_out


@contextmanager
def algorithms_tried() -> Iterator[None]:
    """cuDNN tries its algorithms and keeps the fastest, as in training."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def start(found: Measured, setting: StepSetting, batches: Sequence[Batch], device: torch.device, say: Say) -> Variant:
    """Build a variant, take its first step and warm it up."""
    on_gpu = device.type == "cuda"
    clean(device)
    allocated = reserved = 0
    if on_gpu:
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
    begun = time.perf_counter()
    variant = build(found.name, WAYS[found.name], setting, device, batches[0])
    found.notes = variant.notes
    losses = [variant.step(batches[0])]
    settle(device)
    found.first_s = time.perf_counter() - begun
    losses += [variant.step(batches[i % len(batches)]) for i in range(1, setting.warmup)]
    found.first_losses = [float(loss) for loss in losses]
    if on_gpu:
        found.peak_bytes = torch.cuda.max_memory_allocated(device) - allocated
        clean(device)  # what trying algorithms and compiling took is no part of a step
        torch.cuda.reset_peak_memory_stats(device)
        for batch in batches[:2]:
            variant.step(batch)
        settle(device)
        found.held_bytes = torch.cuda.max_memory_reserved(device) - reserved
    words = f"; {', '.join(variant.notes)}" if variant.notes else ""
    say(f"{found.name}: first step after {found.first_s:.1f} s, loss {found.first_losses[0]:.4f}{words}")
    return variant


def interleave(
    ready: dict[str, Variant],
    found: dict[str, Measured],
    setting: StepSetting,
    batches: Sequence[Batch],
    device: torch.device,
    say: Say,
) -> list[list[str]]:
    """All rounds; returns their orders. A variant that fails is taken out of `ready`."""
    orders = []
    for number in range(setting.rounds):
        order = rotated(list(ready), number)
        orders.append(order)
        for name in order:
            try:
                times, loss = block(ready[name], setting.steps, batches, device)
            except Exception as error:  # noqa: BLE001 - the same
                give_up(found[name], error, say)
                del ready[name]
                continue
            found[name].rounds_ms.append(times)
            found[name].last_loss = float(loss)
        say(f"round {number + 1} of {setting.rounds}")
    return orders


def rotated(names: list[str], by: int) -> list[str]:
    """Each round begins with another."""
    at = by % len(names) if names else 0
    return names[at:] + names[:at]


def block(variant: Variant, steps: int, batches: Sequence[Batch], device: torch.device) -> tuple[list[float], Tensor]:
    """Milliseconds of each of so many steps in a row, after one that is not counted, and the last one's loss."""
    loss = variant.step(batches[-1])
    settle(device)
    if device.type == "cuda":
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for index, event in enumerate(events[1:]):
            loss = variant.step(batches[index % len(batches)])
            event.record()
        settle(device)
        return [before.elapsed_time(after) for before, after in itertools.pairwise(events)], loss
    times = []
    for index in range(steps):
        begun = time.perf_counter()
        loss = variant.step(batches[index % len(batches)])
        times.append((time.perf_counter() - begun) * 1000)
    return times, loss


def give_up(found: Measured, error: Exception, say: Say) -> None:
    """Note a failure."""
    found.error = told(error)
    say(f"{found.name}: failed, {found.error}")
    if not isinstance(error, VoxlaneError | torch.OutOfMemoryError):
        traceback.print_exception(error)


def told(error: Exception) -> str:
    """An error in a line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def clean(device: torch.device) -> None:
    """Give back what nobody uses."""
    gc.collect()
    if device.type == "cuda":
        settle(device)
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark without the rest of the command line; returns the exit status."""
    from voxlane.bench import step_command

    options: Any = step_command.alone().parse_args(arguments)
    try:
        return step_command.run(options)
    except VoxlaneError as error:
        print(f"voxlane: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
