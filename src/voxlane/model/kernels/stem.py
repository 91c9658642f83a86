"""The first 3 x 3 x 3 convolution of a network, from one to four channels to 32. It should take only the time to read a
volume and write a large one; see stem.cu. cuDNN takes ten times as long for one channel."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from voxlane.model.kernels.cuda import CompiledKernel, CompileJob, explain_failure
from voxlane.model.kernels.support import operator

MAX_CHANNELS = 4
OUTPUTS = 32

_BRICK = 16, 8, 32
"""Voxels (z, y, x) of a block."""
_THREADS = 256
_LAST_3D = torch.channels_last_3d
_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@operator("voxlane::stem", lambda x, weight, dtype: _allocate_results(x, dtype), "cuda")
def stem(x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute conv3d(x, weight, padding=1) in a 16-bit `dtype`, channels-last, and partial statistics of the output
    (B, T, 3, 32): count, mean and sum of squared distances from it.

    x (B, C, D, H, W), float32 or `dtype`, gets no gradient; weight (32, C, 3, 3, 3) is float32 or `dtype`. Both are
    rounded to `dtype`, as with autocast.
    """
    x = _with_even_strides(x, dtype)
    y, partials = _allocate_results(x, dtype)
    kernel, _ = _load(dtype, x.dtype == torch.float32, x.shape[1], x.device.index)
    kernel(_launch_grid(x), x, weight.float().contiguous(), y, partials, *_kernel_geometry(x))
    return y, partials


@operator(
    "voxlane::stem_weight_gradient",
    lambda x, dy: x.new_empty((OUTPUTS, x.shape[1], 3, 3, 3), dtype=torch.float32),
    "cuda",
)
def _backward(x: Tensor, dy: Tensor) -> Tensor:
    x, dy = _with_even_strides(x, dy.dtype), dy.contiguous(memory_format=_LAST_3D)
    channels, grid = x.shape[1], _launch_grid(x)
    taps = -(-27 * channels // 16) * 16
    sums = x.new_empty((math.prod(grid), taps, OUTPUTS), dtype=torch.float32)
    _, kernel = _load(dy.dtype, x.dtype == torch.float32, channels, x.device.index)
    kernel(grid, x, dy, sums, *_kernel_geometry(x))
    return sums.sum(0)[: 27 * channels].t().reshape(OUTPUTS, channels, 3, 3, 3).contiguous()


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0])
    ctx.kind = inputs[1].dtype


def _run_backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    return None, None if dy is None else _backward(x, dy).to(ctx.kind), None


stem.register_autograd(_run_backward, setup_context=_save_for_backward)


def _with_even_strides(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a dtype that the kernels read, with evenly spaced voxels in memory."""
    x = x if x.dtype in (torch.float32, dtype) else x.to(dtype)
    return x if x.is_contiguous(memory_format=_LAST_3D) else x.contiguous()


def _launch_grid(x: Tensor) -> tuple[int, int, int]:
    """Return the number of blocks along x and y, and along z over all samples."""
    z, y, column = (-(-side // block_side) for side, block_side in zip(x.shape[2:], _BRICK, strict=True))
    return column, y, z * x.shape[0]


def _kernel_geometry(x: Tensor) -> tuple[int, ...]:
    """Return the sides, the strides of channels and voxels, and the number of blocks along z of a sample."""
    is_channels_last = x.shape[1] == 1 or not x.is_contiguous()
    strides = (1, x.shape[1]) if is_channels_last else (x[0, 0].numel(), 1)
    return *x.shape[2:], *strides, -(-x.shape[2] // _BRICK[0])


def _allocate_results(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], OUTPUTS, *x.shape[2:])
    y = torch.empty(shape, dtype=dtype, device=x.device, memory_format=_LAST_3D)
    pieces = math.prod(_launch_grid(x)) // x.shape[0]
    return y, x.new_empty((x.shape[0], pieces, 3, OUTPUTS), dtype=torch.float32)


@functools.cache
def _load(dtype: torch.dtype, from_float: bool, channels: int, device: int) -> tuple[CompiledKernel, CompiledKernel]:
    """Return the kernels of forward and of the weights' gradient."""
    z, y, x = _BRICK
    brick = -(-channels * (z + 2) * (y + 2) * (x + 2) // 8) * 8 * 2
    staged = brick + _THREADS // 32 * 16 * OUTPUTS * 2
    job = _job(dtype, from_float, channels, device)
    with torch.cuda.device(device):
        return (
            CompiledKernel(job, "stem_forward", _THREADS, brick),
            CompiledKernel(job, "stem_weights", _THREADS, staged),
        )


def _job(dtype: torch.dtype, from_float: bool, channels: int, device: int) -> CompileJob:
    kind = "float" if from_float else "u16"
    major, minor = torch.cuda.get_device_capability(device)
    defines = (f"T={_TYPES[dtype]}", f"SOURCE={kind}", f"CHANNELS={channels}", f"BZ={_BRICK[0]}")
    return "stem.cu", f"sm_{major}{minor}", defines


@functools.cache
def unsupported_reason(device_index: int, dtype: torch.dtype, channels: int) -> str | None:
    """Compile this convolution for a GPU; return None, or the reason if it does not support it."""
    jobs = [_job(dtype, from_float, channels, device_index) for from_float in (True, False)]
    return explain_failure(jobs, lambda: [_load(dtype, kind, channels, device_index) for kind in (True, False)])
