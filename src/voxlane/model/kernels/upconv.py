"""Upsampling in a U-Net, channels-last: transposed convolutions without overlapping windows, with their bias, and the
concatenation of channels.

cuDNN adds the bias in a second pass, which takes longer than the convolution, and needs a third for its gradient;
`torch.cat` copies channels-last volumes at a fifth of the memory's rate.
"""

# ruff: noqa: N803
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxlane.model.kernels.support import operator, save_inputs

BLOCK = 128
"""Voxels per block."""
PROGRAMS = 1056
"""Programs that share a sum: eight for each multiprocessor of an H200."""

_LAST_3D = torch.channels_last_3d


@operator("voxlane::upconv", lambda x, weight, bias: _allocate(x, weight.shape[1], weight.shape[2:]))
def upconv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute conv_transpose3d(x, weight, bias, stride=weight.shape[2:]), channels-last.

    x (B, C, D, H, W) is 16-bit and channels-last; weight (C, outputs, kz, ky, kx) and bias (outputs,) are float32 and
    rounded to x's dtype, as with autocast.
    """
    x = x.contiguous(memory_format=_LAST_3D)
    batch, channels, depth, height, width = x.shape
    outputs, (up_z, up_y, up_x) = weight.shape[1], weight.shape[2:]
    y = _allocate(x, outputs, weight.shape[2:])
    packed = weight.permute(2, 3, 4, 0, 1).to(x.dtype).contiguous()  # [place][channel][output]
    tile_columns = min(64, triton.next_power_of_2(outputs))
    channel_tile = min(64, triton.next_power_of_2(channels))
    voxels = batch * depth * height * width
    _upconv_kernel[(triton.cdiv(voxels, BLOCK), up_z * up_y, triton.cdiv(outputs, tile_columns))](
        x, packed, bias, y, voxels, depth, height, width, channels, outputs,
        UP_Z=up_z, UP_Y=up_y, UP_X=up_x,
        BLOCK=BLOCK, DEEP=max(16, channel_tile), WIDE=max(16, tile_columns), num_warps=4,
    )  # fmt: skip
    return y


def _upconv_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    # cuDNN computes the other gradients at nearly the memory's rate.
    x, weight, bias = ctx.saved_tensors
    dy = dy.contiguous(memory_format=_LAST_3D)
    up, needed = list(weight.shape[2:]), ctx.needs_input_grad
    weight_16 = weight.to(x.dtype, memory_format=_LAST_3D)
    dx, d_weight, _ = torch.ops.aten.convolution_backward(
        dy, x, weight_16, None, up, [0, 0, 0], [1, 1, 1], True, [0, 0, 0], 1, [needed[0], needed[1], False]
    )
    d_bias = _sums(dy).to(bias.dtype) if needed[2] else None
    return dx, None if d_weight is None else d_weight.to(weight.dtype), d_bias


upconv.register_autograd(_upconv_backward, setup_context=save_inputs)


@operator("voxlane::channel_sums", lambda x: x.new_empty((x.shape[1],), dtype=torch.float32))
def _sums(x: Tensor) -> Tensor:
    """Sum each channel in float32."""
    x = x.contiguous(memory_format=_LAST_3D)
    channels = x.shape[1]
    rows = x.numel() // channels
    tile_columns = min(64, triton.next_power_of_2(channels))
    tile_rows = 4096 // tile_columns
    rows_per_program = triton.cdiv(triton.cdiv(rows, tile_rows), PROGRAMS) * tile_rows
    parts = triton.cdiv(rows, rows_per_program)
    sums = x.new_empty((parts, channels), dtype=torch.float32)
    _sum_rows_kernel[(parts, triton.cdiv(channels, tile_columns))](
        x, sums, rows, rows_per_program, channels, TALL=tile_rows, WIDE=tile_columns, num_warps=4
    )
    return sums.sum(0)


def join_channels(first: Tensor, second: Tensor) -> Tensor:
    """Compute cat((first, second), 1), channels-last."""
    if first.shape[0] != second.shape[0] or first.shape[2:] != second.shape[2:] or first.dtype != second.dtype:
        raise ValueError(
            f"{tuple(first.shape)} of {first.dtype} and {tuple(second.shape)} of {second.dtype} do not match"
        )
    return _join(first, second)


@operator("voxlane::join_channels", lambda first, second: _allocate(first, first.shape[1] + second.shape[1]))
def _join(first: Tensor, second: Tensor) -> Tensor:
    first, second = first.contiguous(memory_format=_LAST_3D), second.contiguous(memory_format=_LAST_3D)
    y = _allocate(first, first.shape[1] + second.shape[1])
    _copy_channels(first, second, y, split=False)
    return y


@operator("voxlane::split_channels", lambda both, channels: _allocate_parts(both, channels))
def _split(both: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    both = both.contiguous(memory_format=_LAST_3D)
    first, second = _allocate_parts(both, channels)
    _copy_channels(first, second, both, split=True)
    return first, second


def _save_join(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.channels = inputs[0].shape[1]


def _join_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return _split(dy, ctx.channels)


_join.register_autograd(_join_backward, setup_context=_save_join)


def _allocate(like: Tensor, channels: int, factors: Sequence[int] = (1, 1, 1)) -> Tensor:
    """Allocate a channels-last volume with this number of channels and the sides of `like` times `factors`."""
    shape = (like.shape[0], channels, *(side * factor for side, factor in zip(like.shape[2:], factors, strict=True)))
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=_LAST_3D)


def _allocate_parts(both: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    return _allocate(both, channels), _allocate(both, both.shape[1] - channels)


def _copy_channels(first: Tensor, second: Tensor, both: Tensor, *, split: bool) -> None:
    rows = both.numel() // both.shape[1]
    tile_columns = min(64, triton.next_power_of_2(max(first.shape[1], second.shape[1])))
    tile_rows = 4096 // tile_columns
    _join_kernel[(triton.cdiv(rows, tile_rows), triton.cdiv(max(first.shape[1], second.shape[1]), tile_columns))](
        first, second, both, rows, first.shape[1], second.shape[1], APART=split,
        TALL=tile_rows, WIDE=tile_columns, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["voxels", "depth", "height", "width"])
def _upconv_kernel(  # type: ignore[no-untyped-def]
    x, weights, bias, y, voxels, depth, height, width, channels, outputs,
    UP_Z: tl.constexpr, UP_Y: tl.constexpr, UP_X: tl.constexpr,
    BLOCK: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute a voxel's results of one (z, y) in its window: neighbours along x, which are written consecutively."""
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
        result = tl.zeros((BLOCK, WIDE), tl.float32)
        for start in range(0, channels, DEEP):
            channel = start + tl.arange(0, DEEP)
            valid_channel = channel < channels
            from_x = x + voxel[:, None] * channels + channel[None, :]
            a = tl.load(from_x, mask=inside[:, None] & valid_channel[None, :], other=0.0)
            at = weights + (place * channels + channel)[:, None] * outputs + output[None, :]
            result = tl.dot(a, tl.load(at, mask=valid_channel[:, None] & real[None, :], other=0.0), result)
        to = y + (target + step)[:, None] * outputs + output[None, :]
        tl.store(to, (result + added).to(y.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def _sum_rows_kernel(x, sums, rows, rows_per_program, channels, TALL: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.program_id(0)
    column = (tl.program_id(1) * WIDE + tl.arange(0, WIDE))[None, :]
    total = tl.zeros((TALL, WIDE), tl.float32)
    for start in range(part * rows_per_program, tl.minimum((part + 1) * rows_per_program, rows), TALL):
        row = (start + tl.arange(0, TALL))[:, None]
        at = x + row.to(tl.int64) * channels + column
        total += tl.load(at, mask=(row < rows) & (column < channels), other=0.0).to(tl.float32)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    tl.store(sums + part * channels + column, tl.sum(total, 0), mask=column < channels)


@triton.jit
def _join_kernel(  # type: ignore[no-untyped-def]
    first, second, both, rows,
    first_channels, second_channels, APART: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL))[:, None]
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None, :]
    for half in tl.static_range(2):
        own = first_channels if half == 0 else second_channels
        part = first if half == 0 else second
        shift = 0 if half == 0 else first_channels
        valid = (row < rows) & (column < own)
        part_at, joined_at = part + row * own + column, both + row * (first_channels + second_channels) + shift + column
        if APART:
            tl.store(part_at, tl.load(joined_at, mask=valid), mask=valid)
        else:
            tl.store(joined_at, tl.load(part_at, mask=valid), mask=valid)
