"""The 1 x 1 x 1 convolution from features to logits. Forward reads the large volume once; backward reads and writes it
once and computes the gradients of weights and bias on the way."""

# ruff: noqa: N803
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxlane.model.kernels.support import operator, save_inputs

PROGRAMS = 1056
"""Programs that share a batch in backward: eight for each multiprocessor of an H200."""
BLOCK = 128
"""Voxels per block."""
MAX_OUTPUTS = 32
CHANNELS = (16, 32, 64, 128)

_LAST_3D = torch.channels_last_3d


@operator("voxlane::final_conv", lambda x, weight, bias: x.new_empty((x.shape[0], weight.shape[0], *x.shape[2:])))
def final_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute conv3d(x, weight, bias) with each output's voxels contiguous, as a loss reads them.

    x (B, C, D, H, W), 16-bit or float32, channels-last; weight (outputs, C, 1, 1, 1), bias (outputs,) float32.
    """
    x = x.contiguous(memory_format=_LAST_3D)
    batch, channels, voxels = x.shape[0], x.shape[1], x[0, 0].numel()
    outputs = weight.shape[0]
    y = x.new_empty((batch, outputs, *x.shape[2:]))
    _logits[(triton.cdiv(voxels, BLOCK), batch)](
        x, weight.contiguous(), bias, y, voxels, outputs,
        CHANNELS=channels, OUTPUTS=_padded(outputs), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return y


@operator("voxlane::final_conv_backward", lambda x, weight, dy: _allocate_gradients(x, weight))
def _backward(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = x.contiguous(memory_format=_LAST_3D), dy.contiguous()
    batch, channels, voxels = x.shape[0], x.shape[1], x[0, 0].numel()
    outputs, blocks = weight.shape[0], triton.cdiv(voxels, BLOCK)
    blocks_per_program = triton.cdiv(blocks, max(1, PROGRAMS // batch))
    pieces = triton.cdiv(blocks, blocks_per_program)
    dx = torch.empty_like(x, memory_format=_LAST_3D)
    padded = _padded(outputs)
    sums = x.new_empty((batch * pieces, padded, channels), dtype=torch.float32)
    totals = x.new_empty((batch * pieces, padded), dtype=torch.float32)
    _gradients[(pieces, batch)](
        x, weight.contiguous(), dy, dx, sums, totals, voxels, outputs, blocks_per_program,
        CHANNELS=channels, OUTPUTS=padded, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return dx, sums.sum(0)[:outputs].reshape(weight.shape), totals.sum(0)[:outputs]


def _allocate_gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_weight, d_bias = (x.new_empty(shape, dtype=torch.float32) for shape in (weight.shape, weight.shape[:1]))
    return torch.empty_like(x, memory_format=_LAST_3D), d_weight, d_bias


def _run_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = ctx.saved_tensors
    dx, d_weight, d_bias = _backward(x, weight, dy)
    return dx, d_weight.to(weight.dtype), d_bias.to(bias.dtype)


final_conv.register_autograd(_run_backward, setup_context=save_inputs)


def _padded(outputs: int) -> int:
    """Round up to a size that a matrix product supports."""
    return max(16, 1 << (outputs - 1).bit_length())


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    x, weight, bias, y, voxels, outputs, CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr
):
    sample = tl.program_id(1).to(tl.int64)
    voxel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = voxel < voxels
    channel, output = tl.arange(0, CHANNELS), tl.arange(0, OUTPUTS)
    real = output < outputs
    at = x + (sample * voxels + voxel)[:, None] * CHANNELS + channel[None, :]
    features = tl.load(at, mask=inside[:, None], other=0.0)
    w = tl.load(weight + output[:, None] * CHANNELS + channel[None, :], mask=real[:, None], other=0.0)
    result = tl.dot(w.to(features.dtype), tl.trans(features), input_precision="ieee")
    result += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[:, None]
    to = y + (sample * outputs + output)[:, None] * voxels + voxel[None, :]
    tl.store(to, result.to(y.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    x, weight, dy, dx, sums, totals, voxels, outputs, blocks,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    piece, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel, output = tl.arange(0, CHANNELS), tl.arange(0, OUTPUTS)
    real = output < outputs
    w = tl.load(weight + output[:, None] * CHANNELS + channel[None, :], mask=real[:, None], other=0.0)
    w = w.to(x.dtype.element_ty)
    of_weight = tl.zeros((OUTPUTS, CHANNELS), tl.float32)
    of_bias = tl.zeros((OUTPUTS,), tl.float32)
    for block in range(piece * blocks, tl.minimum((piece + 1) * blocks, tl.cdiv(voxels, BLOCK))):
        voxel = block * BLOCK + tl.arange(0, BLOCK)
        inside = voxel < voxels
        from_y = dy + (sample * outputs + output)[:, None] * voxels + voxel[None, :]
        gradient = tl.load(from_y, mask=real[:, None] & inside[None, :], other=0.0)
        rows = (sample * voxels + voxel)[:, None] * CHANNELS + channel[None, :]
        features = tl.load(x + rows, mask=inside[:, None], other=0.0)
        of_bias += tl.sum(gradient.to(tl.float32), 1)
        gradient = gradient.to(features.dtype)
        of_weight = tl.dot(gradient, features, of_weight, input_precision="ieee")
        of_x = tl.dot(tl.trans(gradient), w, input_precision="ieee")
        tl.store(dx + rows, of_x.to(dx.dtype.element_ty), mask=inside[:, None])
    place = sample * tl.num_programs(0) + piece
    tl.store(sums + (place * OUTPUTS + output)[:, None] * CHANNELS + channel[None, :], of_weight)
    tl.store(totals + place * OUTPUTS + output, of_bias)
