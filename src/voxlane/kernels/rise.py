"""The way up of a U-Net, channels-last: transposed convolutions whose windows do not overlap, with their bias, and the
joining of channels.

cuDNN adds the bias in a second pass, which takes longer than the convolution, and its gradient is a third; `torch.cat`
moves channels-last volumes at a fifth of the memory's rate.
"""

# ruff: noqa: N803
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxlane.kernels.support import launched_there

BLOCK = 128
"""Voxels at a time."""
PROGRAMS = 1056
"""That share a sum: eight for each of an H200's multiprocessors."""

_LAST_3D = torch.channels_last_3d


def rise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """conv_transpose3d(x, weight, bias, stride=weight.shape[2:]), channels-last.

    x (B, C, D, H, W) of 16 bits, channels-last; weight (C, outputs, kz, ky, kx) and bias (outputs,) of float32 are
    rounded to x's dtype, as autocast would.
    """
    made: Tensor = _rise(x, weight, bias)
    return made


def join(first: Tensor, second: Tensor) -> Tensor:
    """cat((first, second), 1), channels-last."""
    if first.shape[0] != second.shape[0] or first.shape[2:] != second.shape[2:] or first.dtype != second.dtype:
        raise ValueError(
            f"{tuple(first.shape)} of {first.dtype} and {tuple(second.shape)} of {second.dtype} do not fit"
        )
    made: Tensor = _join(first, second)
    return made


@torch.library.custom_op("voxlane::rise", mutates_args=())
@launched_there
def _rise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = x.contiguous(memory_format=_LAST_3D)
    batch, channels, depth, height, width = x.shape
    outputs, (up_z, up_y, up_x) = weight.shape[1], weight.shape[2:]
    shape = (batch, outputs, depth * up_z, height * up_y, width * up_x)
    y = _volume(shape, x)
    packed = weight.permute(2, 3, 4, 0, 1).to(x.dtype).contiguous()  # [place][channel][output]
    wide = min(64, triton.next_power_of_2(outputs))
    deep = min(64, triton.next_power_of_2(channels))
    voxels = batch * depth * height * width
    _ascend[(triton.cdiv(voxels, BLOCK), up_z * up_y, triton.cdiv(outputs, wide))](
        x, packed, bias, y, voxels, depth, height, width, channels, outputs,
        UP_Z=up_z, UP_Y=up_y, UP_X=up_x, BLOCK=BLOCK, DEEP=max(16, deep), WIDE=max(16, wide), num_warps=4,
    )  # fmt: skip
    return y


@_rise.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    sides = [side * up for side, up in zip(x.shape[2:], weight.shape[2:], strict=True)]
    return _volume((x.shape[0], weight.shape[1], *sides), x)


def _keep_rise(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.kind = inputs[2].dtype


def _differentiate_rise(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    # cuDNN's other gradients are near the memory's rate.
    x, weight = ctx.saved_tensors
    dy = dy.contiguous(memory_format=_LAST_3D)
    up, wanted = list(weight.shape[2:]), ctx.needs_input_grad
    dx, d_weight, _ = torch.ops.aten.convolution_backward(
        dy,
        x,
        weight.to(x.dtype, memory_format=_LAST_3D),
        None,
        up,
        [0, 0, 0],
        [1, 1, 1],
        True,
        [0, 0, 0],
        1,
        [wanted[0], wanted[1], False],
    )
    d_bias = _sums(dy).to(ctx.kind) if wanted[2] else None
    return dx, None if d_weight is None else d_weight.to(weight.dtype), d_bias


_rise.register_autograd(_differentiate_rise, setup_context=_keep_rise)


@torch.library.custom_op("voxlane::channel_sums", mutates_args=())
@launched_there
def _sums(x: Tensor) -> Tensor:
    """Of each channel, in float32."""
    x = x.contiguous(memory_format=_LAST_3D)
    channels = x.shape[1]
    rows = x.numel() // channels
    wide = min(64, triton.next_power_of_2(channels))
    tall = 4096 // wide
    each = triton.cdiv(triton.cdiv(rows, tall), PROGRAMS) * tall
    parts = triton.cdiv(rows, each)
    sums = x.new_empty((parts, channels), dtype=torch.float32)
    _add_rows[(parts, triton.cdiv(channels, wide))](x, sums, rows, each, channels, TALL=tall, WIDE=wide, num_warps=4)
    return sums.sum(0)


@_sums.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1],), dtype=torch.float32)


@torch.library.custom_op("voxlane::join", mutates_args=())
@launched_there
def _join(first: Tensor, second: Tensor) -> Tensor:
    first, second = first.contiguous(memory_format=_LAST_3D), second.contiguous(memory_format=_LAST_3D)
    channels = first.shape[1] + second.shape[1]
    y = _volume((first.shape[0], channels, *first.shape[2:]), first)
    _move(first, second, y, apart=False)
    return y


@torch.library.custom_op("voxlane::part", mutates_args=())
@launched_there
def _part(both: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    both = both.contiguous(memory_format=_LAST_3D)
    batch, rest = both.shape[0], both.shape[1] - channels
    first, second = (_volume((batch, own, *both.shape[2:]), both) for own in (channels, rest))
    _move(first, second, both, apart=True)
    return first, second


@_join.register_fake
def _(first: Tensor, second: Tensor) -> Tensor:
    shape = (first.shape[0], first.shape[1] + second.shape[1], *first.shape[2:])
    return _volume(shape, first)


@_part.register_fake
def _(both: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    batch, rest = both.shape[0], both.shape[1] - channels
    first, second = (_volume((batch, own, *both.shape[2:]), both) for own in (channels, rest))
    return first, second


def _keep_join(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.channels = inputs[0].shape[1]


def _differentiate_join(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = _part(dy, ctx.channels)
    return made


_join.register_autograd(_differentiate_join, setup_context=_keep_join)


def _volume(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=_LAST_3D)


def _move(first: Tensor, second: Tensor, both: Tensor, *, apart: bool) -> None:
    rows = both.numel() // both.shape[1]
    wide = min(64, triton.next_power_of_2(max(first.shape[1], second.shape[1])))
    tall = 4096 // wide
    _shuffle[(triton.cdiv(rows, tall), triton.cdiv(max(first.shape[1], second.shape[1]), wide))](
        first, second, both, rows, first.shape[1], second.shape[1], APART=apart, TALL=tall, WIDE=wide, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["voxels", "depth", "height", "width"])
def _ascend(  # type: ignore[no-untyped-def]
    x, weights, bias, y, voxels, depth, height, width, channels, outputs,
    UP_Z: tl.constexpr, UP_Y: tl.constexpr, UP_X: tl.constexpr,
    BLOCK: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A voxel's results of one (z, y) in its window: neighbours along x, which are written one after the other."""
    plane_and_line = tl.program_id(1)
    voxel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = voxel < voxels
    output = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    real = output < outputs
    column, plane = voxel % width, voxel // width
    line, plane = plane % height, plane // height
    plane = plane * UP_Z + plane_and_line // UP_Y  # of all samples, one after another
    line = line * UP_Y + plane_and_line % UP_Y
    target = (plane * (height * UP_Y) + line) * (width * UP_X) + column * UP_X
    added = tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[None, :]
    for step in tl.static_range(UP_X):
        place = plane_and_line * UP_X + step
        made = tl.zeros((BLOCK, WIDE), tl.float32)
        for start in range(0, channels, DEEP):
            channel = start + tl.arange(0, DEEP)
            known = channel < channels
            from_x = x + voxel[:, None] * channels + channel[None, :]
            a = tl.load(from_x, mask=inside[:, None] & known[None, :], other=0.0)
            at = weights + (place * channels + channel)[:, None] * outputs + output[None, :]
            made = tl.dot(a, tl.load(at, mask=known[:, None] & real[None, :], other=0.0), made)
        to = y + (target + step)[:, None] * outputs + output[None, :]
        tl.store(to, (made + added).to(y.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows", "each"])
def _add_rows(x, sums, rows, each, channels, TALL: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.program_id(0)
    column = (tl.program_id(1) * WIDE + tl.arange(0, WIDE))[None, :]
    total = tl.zeros((TALL, WIDE), tl.float32)
    for start in range(part * each, tl.minimum((part + 1) * each, rows), TALL):
        row = (start + tl.arange(0, TALL))[:, None]
        at = x + row.to(tl.int64) * channels + column
        total += tl.load(at, mask=(row < rows) & (column < channels), other=0.0).to(tl.float32)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    tl.store(sums + part * channels + column, tl.sum(total, 0), mask=column < channels)


@triton.jit
def _shuffle(  # type: ignore[no-untyped-def]
    first, second, both, rows,
    first_channels, second_channels, APART: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL))[:, None]
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None, :]
    for half in tl.static_range(2):
        own = first_channels if half == 0 else second_channels
        part = first if half == 0 else second
        shift = 0 if half == 0 else first_channels
        there = (row < rows) & (column < own)
        alone, among = part + row * own + column, both + row * (first_channels + second_channels) + shift + column
        if APART:
            tl.store(alone, tl.load(among, mask=there), mask=there)
        else:
            tl.store(among, tl.load(alone, mask=there), mask=there)
