"""Where a training step's time goes on the device, and the least it could take: kernels grouped by what they are for,
the convolutions' arithmetic, and what the device reaches on a matrix product and on a copy."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from voxlane.bench.step_setting import StepSetting
from voxlane.bench.step_variants import Batch, Marks, Variant, plain_or_fused

GROUPS = (
    "convolution",
    "norm+activation",
    "layout copies",
    "concatenation",
    "loss",
    "optimizer",
    "other",
)
TOP = 25
"""Kernels by name that the result file keeps of a variant."""

_NAMES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (group, re.compile(pattern, re.IGNORECASE))
    for group, pattern in (
        # Inductor names its kernels after all operations in them: one that has "convolution" in it only adds a bias or
        # lays out an operand. With a norm in it, it is the norm's; else nothing can be told.
        ("norm+activation", r"^triton_.*(batch_norm|instance_norm|var_mean)"),
        ("other", r"^triton_(poi|red|per|tem|for|mm)_"),
        ("layout copies", r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|convertTensor|TransposeKernel|transpose_kernel"),
        ("layout copies", r"transpose_readWrite|NchwNhwc|LayoutTransform"),
        # Copies between tensors of the same layout, which only change the type, run in the vectorised or the unrolled
        # kernel; the general one has strides.
        ("layout copies", r"(?<!vectorized_)(?<!unrolled_)elementwise_kernel<.*copy_kernel"),
        ("concatenation", r"CatArrayBatchedCopy|aten::cat\b|concat"),
        ("optimizer", r"multi_tensor_apply|FusedSgd|FusedAdam|_foreach_|_fused_sgd|_fused_adam"),
        ("loss", r"softmax|nll_loss|cross_entropy|dice|entropy|one_hot|scatter"),
        ("norm+activation", r"batch_norm|instance_norm|\bbn_[fb]w|norm_act|leaky_?relu|threshold|relu|clamp|welford"),
        ("convolution", r"conv|xmma|cutlass|fprop|dgrad|wgrad|implicit|gemm|winograd|cudnn_generated|nvjet|splitk"),
        ("norm+activation", r"norm"),
    )
)
_OWN = {"norm": "norm+activation", "loss": "loss"} | dict.fromkeys(("head", "rise"), "convolution")
"""What the Triton kernels of voxlane.kernels are for, by module."""
_OWN_NAMES = {
    **dict.fromkeys(("conv_forward", "conv_weights", "stem_forward", "stem_weights"), "convolution"),
    "_shuffle": "concatenation",
}
"""The same of those in CUDA C++, and of one that is not like the rest of its module."""


@dataclass(frozen=True)
class Kernel:
    """One kernel's run."""

    name: str
    start_us: float
    us: float


@dataclass(frozen=True)
class Profile:
    """Milliseconds of a step, by group and by name."""

    groups_ms: dict[str, float]
    """All of GROUPS."""
    kernels: list[dict[str, Any]]
    """The longest: name, group, ms and runs of a step."""
    launches: float
    """Kernels of a step."""

    @property
    def busy_ms(self) -> float:
        """Of a step."""
        return sum(self.groups_ms.values())


def group_of(name: str, own: Mapping[str, str]) -> str:
    """What a kernel is for: our own by the module that has it, others by their names."""
    return own.get(name) or next((group for group, pattern in _NAMES if pattern.search(name)), "other")


def own_groups() -> dict[str, str]:
    """Of our kernels in the modules that are loaded. A name that two modules have tells nothing."""
    found: dict[str, str] = {}
    for module, group in _OWN.items():
        for value in vars(sys.modules.get(f"voxlane.kernels.{module}", object)).values():
            function = value
            while hasattr(function, "fn"):  # of Triton's wrappers, one in another
                function = function.fn
            name = getattr(function, "__name__", "")
            if function is not value and name:
                found[name] = group if found.get(name, group) == group else "other"
    return {**found, **_OWN_NAMES}


def grouped(kernels: Iterable[Kernel], phases: Sequence[str], steps: int) -> Profile:
    """Kernels of so many steps. Between the marks of a loss and of an optimizer all is theirs, whatever its name."""
    groups = dict.fromkeys(GROUPS, 0.0)
    by_name: dict[tuple[str, str], list[float]] = {}
    own, marks = own_groups(), 0
    for kernel in sorted(kernels, key=lambda each: each.start_us):
        if Marks.KERNEL in kernel.name:
            marks += 1
            continue
        phase = phases[marks % len(phases)] if phases else ""
        group = phase if phase in ("loss", "optimizer") else group_of(kernel.name, own)
        ms = kernel.us / 1000 / steps
        groups[group] += ms
        by_name.setdefault((group, kernel.name), []).append(ms)
    longest = sorted(by_name.items(), key=lambda each: -sum(each[1]))
    top = [
        {"name": name[:200], "group": group, "ms": sum(each), "runs": len(each) / steps}
        for (group, name), each in longest[:TOP]
    ]
    return Profile(groups, top, sum(map(len, by_name.values())) / steps)


def profile(variant: Variant, batches: Sequence[Batch], device: torch.device) -> Profile:
    """Of some steps, after one that is not looked at."""
    on_gpu = device.type == "cuda"
    steps = 3 if on_gpu else 1
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    variant.marks.on = on_gpu
    try:
        variant.step(batches[0])
        if on_gpu:
            torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=[activity]) as recorder:
            for index in range(steps):
                variant.step(batches[index % len(batches)])
            if on_gpu:
                torch.cuda.synchronize(device)
    finally:
        variant.marks.on = False
    if on_gpu:
        ran = [
            e for e in recorder.events() if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False)
        ]
        kernels = [Kernel(e.name, e.time_range.start, e.time_range.elapsed_us()) for e in ran]
        return grouped(kernels, variant.phases, steps)
    # On a CPU operations take the place of kernels, each without those that it called.
    kernels = [Kernel(e.name, e.time_range.start, e.self_cpu_time_total) for e in recorder.events()]
    return grouped(kernels, (), steps)


# -- the floor ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What the convolutions of a step must do at the least."""

    flops: float
    """Forward, and twice that backward."""
    moved_bytes: float
    """Forward: each input read and each output written once. Backward: the output's gradient read twice, the input
    once, its gradient written once. Two bytes a number; norms, activations, concatenation and loss for nothing."""


def work_of(kind: Any, setting: StepSetting, patch: tuple[int, int, int]) -> Work:
    """Counted on tensors without data."""
    with torch.device("meta"):
        network = plain_or_fused(kind, setting.channels, setting.outputs, fused=False)
        image = torch.empty((setting.batch, setting.channels, *patch))
    flops = moved = 0.0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal flops, moved
        assert isinstance(module, nn.Conv3d | nn.ConvTranspose3d)
        down = isinstance(module, nn.Conv3d)
        # One multiplication and one addition a weight, at every output (of a transposed one: at every input).
        places = (output if down else inputs[0])[:, 0].numel()
        flops += 3 * 2 * places * module.weight.numel()
        moved += 2 * (3 * inputs[0].numel() + 3 * output.numel())

    for module in network.modules():
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            module.register_forward_hook(count)
    network(image)
    return Work(flops, moved)


def matrix_flops_per_s(device: torch.device) -> float:
    """The best of some products of two large matrices, bfloat16 on a GPU."""
    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    left, right = (torch.randn((size, size), device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return float(2 * size**3 / best_s(lambda: torch.mm(left, right, out=product), device))


def copy_bytes_per_s(device: torch.device) -> float:
    """The best of some copies of a large tensor; bytes read and bytes written both count."""
    size = 2**30 if device.type == "cuda" else 2**24
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return float(2 * size / best_s(lambda: target.copy_(source), device))


def best_s(work: Callable[[], Any], device: torch.device, tries: int = 5, each: int = 8) -> float:
    """Seconds of one call: the best try of several calls."""
    found = []
    for _ in range(tries + 1):  # the first is for the caches
        settle(device)
        start = time.perf_counter()
        for _ in range(each):
            work()
        settle(device)
        found.append((time.perf_counter() - start) / each)
    return min(found[1:])


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
