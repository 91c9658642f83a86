"""The first 3 x 3 x 3 convolution of a network, of one to four channels to 32: a volume is read and a large one
written, and that is all the time it should take; see stem.cu. cuDNN takes ten times as long for one channel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from voxlane.kernels.cuda import CompileError, Job, Kernel, compile_ahead

MAX_CHANNELS = 4
OUTPUTS = 32

_BRICK = 16, 8, 32
"""Voxels of a block (z, y, x)."""
_THREADS = 256
_LAST_3D = torch.channels_last_3d
_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


def stem(x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """conv3d(x, weight, padding=1) in `dtype`, of 16 bits, channels-last, and the output's partial statistics
    (B, T, 3, 32): count, mean and sum of squared distances from it.

    x (B, C, D, H, W), float32 or of `dtype`, gets no gradient; weight (32, C, 3, 3, 3), float32 or of `dtype`. Both are
    rounded to `dtype`, as autocast would.
    """
    made: tuple[Tensor, Tensor] = _forward(x, weight, dtype)
    return made


@torch.library.custom_op("voxlane::stem", mutates_args=(), device_types="cuda")
def _forward(x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _even(x, dtype)
    y, partials = _results(x, dtype)
    kernel, _ = compiled(dtype, x.dtype == torch.float32, x.shape[1], x.device.index)
    with torch.cuda.device(x.device):
        kernel(_grid(x), _THREADS, x, weight.float().contiguous(), y, partials, *_geometry(x))
    return y, partials


@torch.library.custom_op("voxlane::stem_weight_gradient", mutates_args=(), device_types="cuda")
def _backward(x: Tensor, dy: Tensor) -> Tensor:
    x, dy = _even(x, dy.dtype), dy.contiguous(memory_format=_LAST_3D)
    channels, grid = x.shape[1], _grid(x)
    taps = -(-27 * channels // 16) * 16
    _, kernel = compiled(dy.dtype, x.dtype == torch.float32, channels, x.device.index)
    sums = x.new_empty((grid[0] * grid[1] * grid[2], taps, OUTPUTS), dtype=torch.float32)
    with torch.cuda.device(x.device):
        kernel(grid, _THREADS, x, dy, sums, *_geometry(x))
    return sums.sum(0)[: 27 * channels].t().reshape(OUTPUTS, channels, 3, 3, 3).contiguous()


@_forward.register_fake
def _(x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _results(x, dtype)


@_backward.register_fake
def _(x: Tensor, dy: Tensor) -> Tensor:
    return x.new_empty((OUTPUTS, x.shape[1], 3, 3, 3), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0])
    ctx.kind = inputs[1].dtype


def _differentiate(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    return None, None if dy is None else _backward(x, dy).to(ctx.kind), None


_forward.register_autograd(_differentiate, setup_context=_keep)


def _even(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In a type that the kernels read, with voxels evenly spaced in memory."""
    x = x if x.dtype in (torch.float32, dtype) else x.to(dtype)
    return x if x.is_contiguous(memory_format=_LAST_3D) else x.contiguous()


def _grid(x: Tensor) -> tuple[int, int, int]:
    """Blocks along x and y, and along z of all samples."""
    z, y, column = (-(-side // own) for side, own in zip(x.shape[2:], _BRICK, strict=True))
    return column, y, z * x.shape[0]


def _geometry(x: Tensor) -> tuple[int, ...]:
    """Sides, what channels and voxels lie apart, and blocks along z of a sample."""
    last = x.shape[1] == 1 or not x.is_contiguous()
    apart = (1, x.shape[1]) if last else (x[0, 0].numel(), 1)
    return *x.shape[2:], *apart, -(-x.shape[2] // _BRICK[0])


def _results(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], OUTPUTS, *x.shape[2:])
    y = torch.empty(shape, dtype=dtype, device=x.device, memory_format=_LAST_3D)
    columns, rows, planes = _grid(x)
    pieces = columns * rows * planes // x.shape[0]
    return y, x.new_empty((x.shape[0], pieces, 3, OUTPUTS), dtype=torch.float32)


@functools.cache
def compiled(dtype: torch.dtype, from_float: bool, channels: int, device: int) -> tuple[Kernel, Kernel]:
    """Forward and the weights' gradient."""
    z, y, x = _BRICK
    brick = -(-channels * (z + 2) * (y + 2) * (x + 2) // 8) * 8 * 2
    job = _job(dtype, from_float, channels, device)
    with torch.cuda.device(device):
        staged = brick + _THREADS // 32 * 16 * OUTPUTS * 2
        return Kernel(job, "stem_forward", brick), Kernel(job, "stem_weights", staged)


def _job(dtype: torch.dtype, from_float: bool, channels: int, device: int) -> Job:
    kind = "float" if from_float else "u16"
    major, minor = torch.cuda.get_device_capability(device)
    defines = (f"T={_TYPES[dtype]}", f"SOURCE={kind}", f"CHANNELS={channels}", f"BZ={_BRICK[0]}")
    return "stem.cu", f"sm_{major}{minor}", defines


@functools.cache
def why_not(device_index: int, dtype: torch.dtype, channels: int) -> str | None:
    """What keeps this convolution from a GPU, in a clause; None: nothing. Compiles it."""
    try:
        compile_ahead([_job(dtype, from_float, channels, device_index) for from_float in (True, False)])
        for from_float in (True, False):
            compiled(dtype, from_float, channels, device_index)
    except (CompileError, OSError, RuntimeError) as error:
        return str(error).strip()
    return None
