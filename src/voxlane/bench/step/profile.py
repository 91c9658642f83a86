"""Where the time of a training step goes on the device, and its lower bound: kernels grouped by purpose, the arithmetic
of the convolutions, and the device's speed on a matrix product and on a copy."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from voxlane.bench.step.settings import StepSettings
from voxlane.bench.step.variants import Batch, Marks, Variant, plain_or_fused

GROUPS = ("convolution", "norm+activation", "layout copies", "concatenation", "loss", "optimizer", "other")
TOP = 25
"""Number of kernels per variant in the result file."""

_NAMES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (group, re.compile(pattern, re.IGNORECASE))
    for group, pattern in (
        # Inductor names its kernels after all operations in them: one with "convolution" in its name only adds a bias
        # or lays out an operand. One with a norm in its name belongs to the norm; others cannot be assigned.
        ("norm+activation", r"^triton_.*(batch_norm|instance_norm|var_mean)"),
        ("other", r"^triton_(poi|red|per|tem|for|mm)_"),
        ("layout copies", r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|convertTensor|TransposeKernel|transpose_kernel"),
        ("layout copies", r"transpose_readWrite|NchwNhwc|LayoutTransform"),
        # Copies between tensors of the same layout, which only change the type, use the vectorised or the unrolled
        # kernel; the general kernel has strides.
        ("layout copies", r"(?<!vectorized_)(?<!unrolled_)elementwise_kernel<.*copy_kernel"),
        ("concatenation", r"CatArrayBatchedCopy|aten::cat\b|concat"),
        ("optimizer", r"multi_tensor_apply|FusedSgd|FusedAdam|_foreach_|_fused_sgd|_fused_adam"),
        ("loss", r"softmax|nll_loss|cross_entropy|dice|entropy|one_hot|scatter"),
        ("norm+activation", r"batch_norm|instance_norm|\bbn_[fb]w|norm_act|leaky_?relu|threshold|relu|clamp|welford"),
        ("convolution", r"conv|xmma|cutlass|fprop|dgrad|wgrad|implicit|gemm|winograd|cudnn_generated|nvjet|splitk"),
        ("norm+activation", r"norm"),
    )
)
_OWN = {"norm": "norm+activation", "loss": "loss"} | dict.fromkeys(("final_conv", "upconv"), "convolution")
"""Group of the Triton kernels of voxlane.model.kernels, by module."""
_OWN_NAMES = {
    **dict.fromkeys(("conv_forward", "conv_weights", "stem_forward", "stem_weights"), "convolution"),
    "_join_kernel": "concatenation",
}
"""Group of the kernels in CUDA C++, and of one that differs from the rest of its module."""


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel."""

    name: str
    start_us: float
    us: float


@dataclass(frozen=True)
class StepProfile:
    """Milliseconds of a step, by group and by kernel."""

    groups_ms: dict[str, float]
    """Milliseconds of each of GROUPS."""
    kernels: list[dict[str, Any]]
    """Name, group, ms and runs per step of the longest kernels."""
    launches: float
    """Number of kernels per step."""


def group_of(name: str, own: Mapping[str, str]) -> str:
    """Return the group of a kernel: our own by their module, others by their name."""
    return own.get(name) or next((group for group, pattern in _NAMES if pattern.search(name)), "other")


def find_own_groups() -> dict[str, str]:
    """Return the groups of our kernels in the loaded modules; a name in modules of different groups is `other`."""
    groups: dict[str, str] = {}
    for module, group in _OWN.items():
        for value in vars(sys.modules.get(f"voxlane.model.kernels.{module}", object)).values():
            function = value
            while hasattr(function, "fn"):  # Triton's wrappers are nested
                function = function.fn
            name = getattr(function, "__name__", "")
            if function is not value and name:
                groups[name] = group if groups.get(name, group) == group else "other"
    return {**groups, **_OWN_NAMES}


def group_kernels(kernels: Iterable[Kernel], phases: Sequence[str], steps: int) -> StepProfile:
    """Return the profile of `steps` steps. All kernels between the marks of a loss or an optimizer belong to it."""
    groups = dict.fromkeys(GROUPS, 0.0)
    by_name: dict[tuple[str, str], list[float]] = {}
    own, marks = find_own_groups(), 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        if Marks.KERNEL in kernel.name:
            marks += 1
            continue
        phase = phases[marks % len(phases)] if phases else ""
        group = phase if phase in ("loss", "optimizer") else group_of(kernel.name, own)
        ms = kernel.us / 1000 / steps
        groups[group] += ms
        by_name.setdefault((group, kernel.name), []).append(ms)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    top = [
        {"name": name[:200], "group": group, "ms": sum(runs_ms), "runs": len(runs_ms) / steps}
        for (group, name), runs_ms in longest[:TOP]
    ]
    return StepProfile(groups, top, sum(map(len, by_name.values())) / steps)


def profile_variant(variant: Variant, batches: Sequence[Batch], device: torch.device) -> StepProfile:
    """Profile a few steps, after one that is not counted."""
    on_gpu = device.type == "cuda"
    steps = 3 if on_gpu else 1
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    variant.marks.on = on_gpu
    try:
        variant.step(batches[0])
        settle(device)
        with torch.profiler.profile(activities=[activity]) as recorder:
            for index in range(steps):
                variant.step(batches[index % len(batches)])
            settle(device)
    finally:
        variant.marks.on = False
    if on_gpu:
        events = [
            e for e in recorder.events() if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False)
        ]
        kernels = [Kernel(e.name, e.time_range.start, e.time_range.elapsed_us()) for e in events]
        return group_kernels(kernels, variant.phases, steps)
    # On a CPU, operations take the place of kernels, each without the operations it called.
    kernels = [Kernel(e.name, e.time_range.start, e.self_cpu_time_total) for e in recorder.events()]
    return group_kernels(kernels, (), steps)


# -- the floor ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvolutionWork:
    """Least work of the convolutions of a step."""

    flops: float
    """Floating-point operations: forward, and twice that backward."""
    moved_bytes: float
    """Bytes at two per number. Forward: each input read and each output written once. Backward: the gradient of the
    output read twice, the input read once, its gradient written once. Nothing for norms, activations, concatenation and
    loss."""


def count_work(kind: Any, settings: StepSettings, patch: tuple[int, int, int]) -> ConvolutionWork:
    """Count the work on tensors without data."""
    with torch.device("meta"):
        network = plain_or_fused(kind, settings.channels, settings.outputs, fused=False)
        image = torch.empty((settings.batch, settings.channels, *patch))
    flops = moved = 0.0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal flops, moved
        assert isinstance(module, nn.Conv3d | nn.ConvTranspose3d)
        down = isinstance(module, nn.Conv3d)
        # One multiplication and one addition per weight, at every output (transposed: at every input).
        positions = (output if down else inputs[0])[:, 0].numel()
        flops += 3 * 2 * positions * module.weight.numel()
        moved += 2 * (3 * inputs[0].numel() + 3 * output.numel())

    for module in network.modules():
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            module.register_forward_hook(count)
    network(image)
    return ConvolutionWork(flops, moved)


def measure_matrix_flops_per_s(device: torch.device) -> float:
    """Return the best speed of several products of two large matrices, bfloat16 on a GPU."""
    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    left, right = (torch.randn((size, size), device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return float(2 * size**3 / best_s(lambda: torch.mm(left, right, out=product), device))


def measure_copy_bytes_per_s(device: torch.device) -> float:
    """Return the best speed of several copies of a large tensor; bytes read and bytes written both count."""
    size = 2**30 if device.type == "cuda" else 2**24
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return float(2 * size / best_s(lambda: target.copy_(source), device))


def best_s(work: Callable[[], Any], device: torch.device, tries: int = 5, calls: int = 8) -> float:
    """Return the seconds of one call, in the best of several tries."""
    seconds = []
    for _ in range(tries + 1):  # the first fills the caches
        settle(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        settle(device)
        seconds.append((time.perf_counter() - start) / calls)
    return min(seconds[1:])


def settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
