"""Measure several variants of a training step, in one process, in turns. Needs torch alone (and Triton)."""

from __future__ import annotations

import gc
import itertools
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from voxlane.bench.report import print_progress
from voxlane.bench.step.profile import (
    ConvolutionWork,
    StepProfile,
    count_work,
    measure_copy_bytes_per_s,
    measure_matrix_flops_per_s,
    profile_variant,
    settle,
)
from voxlane.bench.step.settings import CPU_PATCH, GPU_PATCH, VARIANTS, StepSettings
from voxlane.bench.step.variants import Batch, Variant, build, make_batches
from voxlane.errors import ConfigError, VoxlaneError


@dataclass
class VariantTimes:
    """Measurements of one variant."""

    name: str
    notes: list[str] = field(default_factory=list)
    first_s: float = math.nan
    """Seconds from building it to the end of its first step, including compilation and capture."""
    peak_bytes: int | None = None
    """Peak of allocated bytes, including start-up and warm-up; None on a CPU."""
    held_bytes: int | None = None
    """Device memory that its steps hold after start-up, including the allocator's cache and graphs."""
    first_losses: list[float] = field(default_factory=list)
    """Losses of the warm-up, from the initial weights on."""
    last_loss: float = math.nan
    rounds_ms: list[list[float]] = field(default_factory=list)
    """Milliseconds of each step, by round."""
    profile: StepProfile | None = None
    error: str | None = None
    """Error that it failed with, in one line."""


@dataclass
class StepResult:
    """Result of the step benchmark."""

    device: str
    patch: tuple[int, int, int]
    variants: list[VariantTimes]
    left_out: dict[str, str]
    """Reason for each variant that this machine does not support."""
    orders: list[list[str]]
    """Order of the variants in each round."""
    work: dict[str, ConvolutionWork]
    """Work of the convolutions, by kind of network."""
    matrix_flops_per_s: float
    copy_bytes_per_s: float


def measure(settings: StepSettings) -> StepResult:
    """Measure all variants. One that fails is reported, and the others go on."""
    device = find_device(settings.device)
    on_gpu = device.type == "cuda"
    patch = settings.patch_shape or (GPU_PATCH if on_gpu else CPU_PATCH)
    names, left_out = choose_variants(settings.variants, device)
    for name, reason in left_out.items():
        print_progress(f"{name}: left out, {reason}")
    with cudnn_benchmark():
        rates = measure_matrix_flops_per_s(device), measure_copy_bytes_per_s(device)
        batches = make_batches(settings, patch, device)
        results = {name: VariantTimes(name) for name in names}
        ready: dict[str, Variant] = {}
        for name in names:
            try:
                ready[name] = start(results[name], settings, batches, device)
            except Exception as error:  # noqa: BLE001 - one variant's failure must not lose the figures of the others
                record_failure(results[name], error)
        orders = interleave(ready, results, settings, batches, device)
        for name, variant in () if settings.no_profile else list(ready.items()):
            try:
                results[name].profile = profile_variant(variant, batches, device)
            except Exception as error:  # noqa: BLE001 - the times are valid even where profiling is not allowed
                print_progress(f"{name}: no profile, {format_error(error)}")
                results[name].notes.append(f"no profile: {format_error(error)}")
    kinds = dict.fromkeys(VARIANTS[name].kind for name in names)
    return StepResult(
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        patch=patch,
        variants=list(results.values()),
        left_out=left_out,
        orders=orders,
        work={kind: count_work(kind, settings, patch) for kind in kinds},
        matrix_flops_per_s=rates[0],
        copy_bytes_per_s=rates[1],
    )


def find_device(name: str) -> torch.device:
    """Return the requested device, or a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if not name:
        name = "cuda" if has_gpu else "cpu"
    if not name.startswith("cuda"):
        return torch.device(name)
    if not has_gpu:
        raise ConfigError(f"--device {name}: torch finds no GPU", fix="Give --device cpu, or see nvidia-smi")
    index = name.partition(":")[2] or str(torch.cuda.current_device())
    if not index.isdecimal() or int(index) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}", fix=f"Give cuda:N with N below {torch.cuda.device_count()}")
    torch.cuda.set_device(int(index))
    return torch.device("cuda", int(index))


def choose_variants(requested: Sequence[str], device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Return the variants to measure: the requested ones, or all that the device supports, with a reason for each that
    is left out."""
    if requested:
        return list(requested), {}
    left_out = {}
    for name, spec in VARIANTS.items():
        if spec.compiled and device.type == "cuda" and find_spec("triton") is None:
            left_out[name] = "torch.compile needs Triton"
        elif spec.compiled and spec.kind == "mlperf" and device.type == "cpu":
            left_out[name] = (
                "compiling for a CPU takes minutes and says nothing about a GPU (request it with --variant)"
            )
    return [name for name in VARIANTS if name not in left_out], left_out


@contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN try its algorithms and use the fastest, as in training."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def start(times: VariantTimes, settings: StepSettings, batches: Sequence[Batch], device: torch.device) -> Variant:
    """Build a variant, take its first step and warm it up."""
    on_gpu = device.type == "cuda"
    free_memory(device)
    allocated = reserved = 0
    if on_gpu:
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    variant = build(times.name, VARIANTS[times.name], settings, device, batches[0])
    times.notes = variant.notes
    losses = [variant.step(batches[0])]
    settle(device)
    times.first_s = time.perf_counter() - started
    losses += [variant.step(batches[i % len(batches)]) for i in range(1, settings.warmup)]
    times.first_losses = [float(loss) for loss in losses]
    if on_gpu:
        times.peak_bytes = torch.cuda.max_memory_allocated(device) - allocated
        free_memory(device)  # memory of trying algorithms and compiling is not part of a step
        torch.cuda.reset_peak_memory_stats(device)
        for batch in batches[:2]:
            variant.step(batch)
        settle(device)
        times.held_bytes = torch.cuda.max_memory_reserved(device) - reserved
    notes = f"; {', '.join(variant.notes)}" if variant.notes else ""
    print_progress(f"{times.name}: first step after {times.first_s:.1f} s, loss {times.first_losses[0]:.4f}{notes}")
    return variant


def interleave(
    ready: dict[str, Variant],
    results: dict[str, VariantTimes],
    settings: StepSettings,
    batches: Sequence[Batch],
    device: torch.device,
) -> list[list[str]]:
    """Run all rounds and return their orders. A variant that fails is removed from `ready`."""
    orders = []
    for number in range(settings.rounds):
        order = rotate(list(ready), number)
        orders.append(order)
        for name in order:
            try:
                step_ms, loss = run_steps(ready[name], settings.steps, batches, device)
            except Exception as error:  # noqa: BLE001 - as above
                record_failure(results[name], error)
                del ready[name]
                continue
            results[name].rounds_ms.append(step_ms)
            results[name].last_loss = float(loss)
        print_progress(f"round {number + 1} of {settings.rounds}")
    return orders


def rotate(names: list[str], count: int) -> list[str]:
    """Return the names with the first `count` moved to the end."""
    start = count % len(names) if names else 0
    return names[start:] + names[:start]


def run_steps(
    variant: Variant, steps: int, batches: Sequence[Batch], device: torch.device
) -> tuple[list[float], Tensor]:
    """Return the milliseconds of each of `steps` consecutive steps, after one that is not counted, and the last
    loss."""
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
        started = time.perf_counter()
        loss = variant.step(batches[index % len(batches)])
        times.append((time.perf_counter() - started) * 1000)
    return times, loss


def record_failure(times: VariantTimes, error: Exception) -> None:
    """Note and report a failure."""
    times.error = format_error(error)
    print_progress(f"{times.name}: failed, {times.error}")
    if not isinstance(error, VoxlaneError | torch.OutOfMemoryError):
        traceback.print_exception(error)


def format_error(error: Exception) -> str:
    """Return an error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def free_memory(device: torch.device) -> None:
    """Free unused memory."""
    gc.collect()
    if device.type == "cuda":
        settle(device)
        torch.cuda.empty_cache()
