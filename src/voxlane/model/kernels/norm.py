"""Instance norm and (leaky) ReLU in one, for channels-last volumes; forward and backward are limited only by memory.

Forward reads the volume twice and writes it once; backward reads volume and gradient twice and writes once. The
activation's sign is recomputed from the volume, so only the volume and two numbers per channel are saved. A sample of
few voxels is read once, in a single kernel.

Statistics are float32: count, mean and sum of squared deviations of pieces of a sample, combined by Chan's formula in a
fixed order, so that results repeat exactly.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxlane.model.kernels.support import operator

PROGRAMS = 2112
"""Programs that share a batch: sixteen for each of an H200's 132 multiprocessors."""
TILE = 4096
"""Numbers that a program processes at a time."""
FEW_VOXELS = 2048
"""Largest sample that is normalised in one kernel."""
FEW_PIECES = 32
"""Most pieces of a sample that each program combines by itself."""
FOLDED_PIECES = 16
"""Number that more pieces are first reduced to, because each of a large volume's many programs reads them all."""

FOLD = 16
"""Pieces that are combined at a time; constant, because each size is another kernel to compile."""

_LAST_3D = torch.channels_last_3d
_COUNTS = ["voxels", "rows", "pieces", "blocks", "batch", "pieces_in", "pieces_out"]
"""Arguments whose values Triton does not specialise kernels for."""


def norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    slope: float,
    partials: Tensor | None = None,
    omitted_bias: Tensor | None = None,
) -> Tensor:
    """Compute leaky_relu(instance_norm(x) * weight + bias, slope), in x's dtype and channels-last.

    x: (B, C, D, H, W), bfloat16, float16 or float32; copied unless channels-last.
    slope: 0 is a ReLU, 1 no activation.
    weight, bias: (C,); None means 1 and 0.
    partials: (B, T, 3, C) float32, count, mean and sum of squared deviations of the T pieces of each sample, if known.
    omitted_bias: (C,), a bias that was not added to x because the norm subtracts it again; its gradient is zero.
    """
    voxels = x.shape[2] * x.shape[3] * x.shape[4]
    if voxels == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {x.shape}")
    x = x.contiguous(memory_format=_LAST_3D)
    return _forward(x, weight, bias, eps, slope, partials, omitted_bias)[0]


@operator("voxlane::norm_act", lambda x, *_: _allocate(x, 2, *x.shape[:2]))
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    slope: float,
    partials: Tensor | None,
    omitted_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the result, and each channel's mean and 1 / deviation (2, B, C)."""
    x = x.contiguous(memory_format=_LAST_3D)
    batch, channels = x.shape[:2]
    voxels = x.shape[2] * x.shape[3] * x.shape[4]
    y, stats = _allocate(x, 2, batch, channels)
    if not x.numel():
        return y, stats
    if partials is None and voxels <= FEW_VOXELS:
        small = _Small(batch, voxels, channels)
        _small_forward[small.grid](
            x, weight, bias, y, stats, eps, slope, voxels, channels, small.blocks, batch, **small.tile
        )
        return y, stats
    cut = _Cut(batch, voxels, channels)
    if partials is None:
        partials = x.new_empty((batch, cut.pieces, 3, channels), dtype=torch.float32)
        _describe[cut.grid](x, partials, voxels, channels, cut.rows, cut.pieces, cut.blocks, **cut.tile)
    partials = _reduce_pieces(partials, _fold_stats)
    _apply[cut.grid](
        x, weight, bias, partials, y, stats, eps, slope,
        voxels, channels, cut.rows, cut.pieces, cut.blocks, batch, partials.shape[1],
        FEW=FEW_PIECES, **cut.tile,
    )  # fmt: skip
    return y, stats


@operator("voxlane::norm_act_backward", lambda dy, x, *_: _allocate(x, 3, x.shape[1]))
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and those of weight, bias and omitted bias (3, C) in float32."""
    dy, x = dy.contiguous(memory_format=_LAST_3D), x.contiguous(memory_format=_LAST_3D)
    batch, channels = x.shape[:2]
    voxels = x.shape[2] * x.shape[3] * x.shape[4]
    dx, grads = _allocate(x, 3, channels)
    if not x.numel():
        return dx, grads.zero_()
    if voxels <= FEW_VOXELS:
        small = _Small(batch, voxels, channels)
        sums = grads if batch == 1 else x.new_empty((batch, 3, channels), dtype=torch.float32)
        _small_backward[small.grid](
            dy, x, weight, bias, stats, dx, sums, slope, voxels, channels, small.blocks, batch, **small.tile
        )
        if batch > 1:
            _fold_sums[(small.blocks,)](
                sums, grads, channels, small.blocks, batch, 1, COLS=small.tile["COLS"], FOLD=FOLD, num_warps=4
            )
        return dx, grads
    cut = _Cut(batch, voxels, channels)
    sums = x.new_empty((batch, cut.pieces, 3, channels), dtype=torch.float32)
    _describe_gradient[cut.grid](
        dy, x, weight, bias, stats, sums, slope, voxels, channels, cut.rows, cut.pieces, cut.blocks, batch, **cut.tile
    )
    sums = _reduce_pieces(sums, _fold_sums)
    _apply_gradient[cut.grid](
        dy, x, weight, bias, stats, sums, dx, grads, slope,
        voxels, channels, cut.rows, cut.pieces, cut.blocks, batch, sums.shape[1],
        FEW=FEW_PIECES, **cut.tile,
    )  # fmt: skip
    return dx, grads


def _allocate(x: Tensor, *numbers: int) -> tuple[Tensor, Tensor]:
    """Allocate a volume like x, and float32 numbers of this shape."""
    return torch.empty_like(x, memory_format=_LAST_3D), x.new_empty(numbers, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, slope, _, omitted_bias = inputs
    ctx.set_materialize_grads(False)  # otherwise each call would allocate zeros for the statistics' gradient
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.slope = slope
    ctx.omitted_bias = None if omitted_bias is None else omitted_bias.dtype


def _run_backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, stats = ctx.saved_tensors
    if dy is None:
        return (None,) * 7
    dx, grads = _backward(dy, x, weight, bias, stats, ctx.slope)
    d_weight = None if weight is None else grads[0].to(weight.dtype)
    d_bias = None if bias is None else grads[1].to(bias.dtype)
    d_omitted_bias = None if ctx.omitted_bias is None else grads[2].to(ctx.omitted_bias)
    return dx, d_weight, d_bias, None, None, None, d_omitted_bias


_forward.register_autograd(_run_backward, setup_context=_save_for_backward)


class _Cut:
    """Division of a batch into pieces of rows (voxels) and blocks of channels, with one program for each."""

    def __init__(self, batch: int, voxels: int, channels: int) -> None:
        cols = _choose_columns(channels, 64)
        tile_rows = TILE // cols
        self.blocks = triton.cdiv(channels, cols)
        tiles = triton.cdiv(voxels, tile_rows)
        # With few pieces no kernel is needed to reduce them; but each must stay small.
        pieces = FEW_PIECES if tiles <= 4 * FEW_PIECES else triton.cdiv(PROGRAMS, batch * self.blocks)
        self.rows = triton.cdiv(tiles, pieces) * tile_rows
        self.pieces = triton.cdiv(voxels, self.rows)
        self.grid = (batch * self.pieces * self.blocks,)
        # Numbers that are not aligned to 16 bytes are loaded one by one, each with an address, which needs more
        # threads.
        self.tile = {
            **_tile_shape(tile_rows, cols, channels),
            "num_warps": 4 if channels % 16 == 0 or channels == 8 else 8,
        }


class _Small:
    """Division of a batch of small samples into blocks of channels, with one program per sample and block."""

    def __init__(self, batch: int, voxels: int, channels: int) -> None:
        tile_rows = max(16, triton.next_power_of_2(voxels))
        # Few channels per program, for more programs; 16 of 2 bytes fill a memory transaction of 32 bytes.
        cols = _choose_columns(channels, 16 if tile_rows <= 1024 else 8)
        self.blocks = triton.cdiv(channels, cols)
        self.grid = (batch * self.blocks,)
        warps = min(16, max(1, tile_rows * cols // 1024))
        self.tile = {**_tile_shape(tile_rows, cols, channels), "num_warps": warps}


def _choose_columns(channels: int, at_most: int) -> int:
    """Return a power of two that divides the channels, if a large one does, or is at least their number."""
    fits = min(at_most, channels & -channels)
    return fits if fits >= min(16, at_most) else min(at_most, triton.next_power_of_2(channels))


def _tile_shape(rows: int, cols: int, channels: int) -> dict[str, Any]:
    """Return a tile's shape, and facts for the compiler: whether it has all channels, and none beyond the last."""
    return {"ROWS": rows, "COLS": cols, "WHOLE": cols == channels and channels < 16, "EVEN": channels % cols == 0}


def _reduce_pieces(partials: Tensor, fold: Any) -> Tensor:
    """Reduce partials (B, T, 3, C) to few pieces T."""
    batch, many, _, channels = partials.shape
    if many <= FEW_PIECES:
        return partials.contiguous()
    cols = _choose_columns(channels, 64)
    blocks = triton.cdiv(channels, cols)
    each = triton.cdiv(many, FOLDED_PIECES)
    few = triton.cdiv(many, each)
    folded = partials.new_empty((batch, few, 3, channels))
    fold[(batch * few * blocks,)](
        partials.contiguous(), folded, channels, blocks, many, few, COLS=cols, FOLD=FOLD, num_warps=4
    )
    return folded


# -- kernels -----------------------------------------------------------------------------------------------------
# A program's number counts blocks of channels first, then pieces, then samples. Passes over the same volume go through
# it alternately from the end and from the start, because what one pass read last is still in the cache for the next.
# Addresses within a program's piece are 32-bit, its start is 64-bit.


@triton.jit
def _locate(place, blocks, pieces):
    """Return a program's block of channels, its piece over all samples and in its sample, and its sample."""
    block, rest = place % blocks, place // blocks
    return block, rest, rest % pieces, rest // pieces


@triton.jit
def _columns(block, channels, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr):
    """Return the distance of voxels in memory, a block's channels, and which of them exist."""
    stride = COLS if WHOLE else channels
    col = block * COLS + tl.arange(0, COLS)
    inside = col < (block + 1) * COLS if EVEN else col < channels
    return stride, col, inside


@triton.jit
def _piece_bounds(piece, sample, rows, voxels, stride):
    """Return a piece's number of voxels, and the offset of its first number."""
    first = piece.to(tl.int64) * rows
    return tl.minimum(rows, voxels - first).to(tl.int32), (sample.to(tl.int64) * voxels + first) * stride


@triton.jit
def _valid_cells(row, count, inside, EVEN: tl.constexpr):
    """Return which cells of a tile are one of `count` voxels and an existing channel."""
    valid = (row < count)[:, None]
    if not EVEN:
        valid = valid & inside[None, :]
    return valid


@triton.jit
def _parameters(weight, bias, col, inside, COLS: tl.constexpr):
    w = tl.full((COLS,), 1.0, tl.float32)
    b = tl.zeros((COLS,), tl.float32)
    if weight is not None:
        w = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        b = tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)
    return w, b


@triton.jit
def _load_norm(stats, weight, bias, sample, batch, channels, col, inside, COLS: tl.constexpr):
    """Return mean, 1 / deviation, and the scale and bias that map a distance from the mean to the norm's result."""
    mean = tl.load(stats + sample * channels + col, mask=inside, other=0.0)
    rstd = tl.load(stats + (batch + sample) * channels + col, mask=inside, other=0.0)
    w, b = _parameters(weight, bias, col, inside, COLS)
    return mean, rstd, rstd * w, b


@triton.jit
def _through_act(value, g, mean, scale, b, slope):
    """Return the distance from the mean, and the gradient before the activation."""
    off = value - mean[None, :]
    return off, tl.where(off * scale[None, :] + b[None, :] > 0, g, g * slope)


@triton.jit
def _combine_pieces(partials, pieces, channels, col, inside, FEW: tl.constexpr):
    """Combine count, mean and squared deviations of a sample's pieces (pieces, 3, channels) by Chan's formula."""
    piece = tl.arange(0, FEW)[:, None]
    at = partials + piece * 3 * channels + col[None, :]
    mask = (piece < pieces) & inside[None, :]
    n = tl.load(at, mask=mask, other=0.0)
    mean = tl.where(n > 0, tl.load(at + channels, mask=mask, other=0.0), 0.0)
    m2 = tl.where(n > 0, tl.load(at + 2 * channels, mask=mask, other=0.0), 0.0)
    count = tl.sum(n, 0)
    middle = tl.sum(n * mean, 0) / tl.maximum(count, 1.0)
    off = mean - middle[None, :]
    return count, middle, tl.sum(m2 + n * off * off, 0)


@triton.jit(do_not_specialize=_COUNTS)
def _describe(
    x, partials, voxels, channels, rows, pieces, blocks,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute count, mean and squared deviations of a piece. Each cell of the tile has its own mean (Welford), so that
    the program's threads synchronise only at the end."""
    block, rest, piece, sample = _locate(tl.num_programs(0) - 1 - tl.program_id(0), blocks, pieces)
    stride, col, inside = _columns(block, channels, COLS, WHOLE, EVEN)
    row = tl.arange(0, ROWS)
    count, start = _piece_bounds(piece, sample, rows, voxels, stride)
    at = x + start
    offset = row[:, None] * stride + col[None, :]
    mean = tl.zeros((ROWS, COLS), tl.float32)
    m2 = tl.zeros((ROWS, COLS), tl.float32)
    for tile in range(tl.cdiv(count, ROWS)):
        valid = _valid_cells(tile * ROWS + row, count, inside, EVEN)
        value = tl.load(at + offset, mask=valid, other=0.0).to(tl.float32)
        off = tl.where(valid, value - mean, 0.0)
        mean += off * (1.0 / (tile + 1))
        m2 += off * (value - mean)
        at += ROWS * stride
    n = ((count - row + ROWS - 1) // ROWS).to(tl.float32)[:, None]
    middle = tl.sum(n * mean, 0) / count
    off = mean - middle[None, :]
    out = partials + rest.to(tl.int64) * 3 * channels + col
    tl.store(out, tl.zeros((COLS,), tl.float32) + count, mask=inside)
    tl.store(out + channels, middle, mask=inside)
    tl.store(out + 2 * channels, tl.sum(m2 + n * off * off, 0), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def _fold_stats(partials, folded, channels, blocks, pieces_in, pieces_out, COLS: tl.constexpr, FOLD: tl.constexpr):
    """Combine counts, means and squared deviations (B, pieces_in, 3, C) to those of fewer, larger pieces."""
    block, rest, piece, sample = _locate(tl.program_id(0), blocks, pieces_out)
    col = block * COLS + tl.arange(0, COLS)
    inside = col < channels
    each = tl.cdiv(pieces_in, pieces_out)
    row = tl.arange(0, FOLD)[:, None]
    count = tl.zeros((FOLD, COLS), tl.float32)
    mean = tl.zeros((FOLD, COLS), tl.float32)
    m2 = tl.zeros((FOLD, COLS), tl.float32)
    start = piece * each
    source = partials + sample.to(tl.int64) * pieces_in * 3 * channels
    for first in range(start, tl.minimum(start + each, pieces_in), FOLD):
        mask = (first + row < tl.minimum(start + each, pieces_in)) & inside[None, :]
        at = source + (first + row).to(tl.int64) * 3 * channels + col[None, :]
        n = tl.load(at, mask=mask, other=0.0)
        off = tl.where(n > 0, tl.load(at + channels, mask=mask, other=0.0) - mean, 0.0)
        more = tl.where(n > 0, tl.load(at + 2 * channels, mask=mask, other=0.0), 0.0)
        total = count + n
        share = n / tl.maximum(total, 1.0)
        m2 += more + off * off * count * share
        mean += off * share
        count = total
    piece_count = tl.sum(count, 0)
    middle = tl.sum(count * mean, 0) / tl.maximum(piece_count, 1.0)
    off = mean - middle[None, :]
    out = folded + rest.to(tl.int64) * 3 * channels + col
    tl.store(out, piece_count, mask=inside)
    tl.store(out + channels, middle, mask=inside)
    tl.store(out + 2 * channels, tl.sum(m2 + count * off * off, 0), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def _apply(
    x, weight, bias, partials, y, stats, eps, slope, voxels, channels, rows, pieces, blocks, batch, pieces_in,
    FEW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    block, _, piece, sample = _locate(tl.program_id(0), blocks, pieces)
    stride, col, inside = _columns(block, channels, COLS, WHOLE, EVEN)
    n, mean, m2 = _combine_pieces(
        partials + sample.to(tl.int64) * pieces_in * 3 * channels, pieces_in, channels, col, inside, FEW
    )
    rstd = tl.rsqrt(m2 / tl.maximum(n, 1.0) + eps)
    if piece == 0:
        tl.store(stats + sample * channels + col, mean, mask=inside)
        tl.store(stats + (batch + sample) * channels + col, rstd, mask=inside)
    w, b = _parameters(weight, bias, col, inside, COLS)
    scale = rstd * w
    row = tl.arange(0, ROWS)
    count, start = _piece_bounds(piece, sample, rows, voxels, stride)
    source, out = x + start, y + start
    offset = row[:, None] * stride + col[None, :]
    for tile in range(tl.cdiv(count, ROWS)):
        valid = _valid_cells(tile * ROWS + row, count, inside, EVEN)
        value = tl.load(source + offset, mask=valid, other=0.0).to(tl.float32)
        z = (value - mean[None, :]) * scale[None, :] + b[None, :]
        z = tl.where(z > 0, z, z * slope)
        tl.store(out + offset, z.to(y.dtype.element_ty), mask=valid)
        source += ROWS * stride
        out += ROWS * stride


@triton.jit(do_not_specialize=_COUNTS)
def _small_forward(
    x, weight, bias, y, stats, eps, slope, voxels, channels, blocks, batch,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    block, sample = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    stride, col, inside = _columns(block, channels, COLS, WHOLE, EVEN)
    row = tl.arange(0, ROWS)
    valid = _valid_cells(row, voxels, inside, EVEN)
    start = sample.to(tl.int64) * voxels * stride
    offset = row[:, None] * stride + col[None, :]
    value = tl.load(x + start + offset, mask=valid, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / voxels
    off = tl.where(valid, value - mean[None, :], 0.0)
    rstd = tl.rsqrt(tl.sum(off * off, 0) / voxels + eps)
    tl.store(stats + sample * channels + col, mean, mask=inside)
    tl.store(stats + (batch + sample) * channels + col, rstd, mask=inside)
    w, b = _parameters(weight, bias, col, inside, COLS)
    z = off * (rstd * w)[None, :] + b[None, :]
    z = tl.where(z > 0, z, z * slope)
    tl.store(y + start + offset, z.to(y.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=_COUNTS)
def _describe_gradient(
    dy, x, weight, bias, stats, sums, slope, voxels, channels, rows, pieces, blocks, batch,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sum over a piece the activation's gradient, and the gradient times the normalised volume."""
    block, rest, piece, sample = _locate(tl.num_programs(0) - 1 - tl.program_id(0), blocks, pieces)
    stride, col, inside = _columns(block, channels, COLS, WHOLE, EVEN)
    mean, rstd, scale, b = _load_norm(stats, weight, bias, sample, batch, channels, col, inside, COLS)
    row = tl.arange(0, ROWS)
    count, start = _piece_bounds(piece, sample, rows, voxels, stride)
    source, slopes = x + start, dy + start
    offset = row[:, None] * stride + col[None, :]
    scaled_sum = tl.zeros((ROWS, COLS), tl.float32)
    plain_sum = tl.zeros((ROWS, COLS), tl.float32)
    for tile in range(tl.cdiv(count, ROWS)):
        valid = _valid_cells(tile * ROWS + row, count, inside, EVEN)
        value = tl.load(source + offset, mask=valid, other=0.0).to(tl.float32)
        g = tl.load(slopes + offset, mask=valid, other=0.0).to(tl.float32)
        off, g = _through_act(value, g, mean, scale, b, slope)
        scaled_sum += g * off
        plain_sum += g
        source += ROWS * stride
        slopes += ROWS * stride
    out = sums + rest.to(tl.int64) * 3 * channels + col
    tl.store(out, tl.sum(scaled_sum, 0) * rstd, mask=inside)
    tl.store(out + channels, tl.sum(plain_sum, 0), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def _fold_sums(sums, folded, channels, blocks, pieces_in, pieces_out, COLS: tl.constexpr, FOLD: tl.constexpr):
    """Sum the first two of (B, pieces_in, 3, C) to (B, pieces_out, 3, C), with zero as the third."""
    block, rest, piece, sample = _locate(tl.program_id(0), blocks, pieces_out)
    col = block * COLS + tl.arange(0, COLS)
    inside = col < channels
    each = tl.cdiv(pieces_in, pieces_out)
    row = tl.arange(0, FOLD)[:, None]
    scaled_sum = tl.zeros((FOLD, COLS), tl.float32)
    plain_sum = tl.zeros((FOLD, COLS), tl.float32)
    start = piece * each
    source = sums + sample.to(tl.int64) * pieces_in * 3 * channels
    for first in range(start, tl.minimum(start + each, pieces_in), FOLD):
        mask = (first + row < tl.minimum(start + each, pieces_in)) & inside[None, :]
        at = source + (first + row).to(tl.int64) * 3 * channels + col[None, :]
        scaled_sum += tl.load(at, mask=mask, other=0.0)
        plain_sum += tl.load(at + channels, mask=mask, other=0.0)
    out = folded + rest.to(tl.int64) * 3 * channels + col
    tl.store(out, tl.sum(scaled_sum, 0), mask=inside)
    tl.store(out + channels, tl.sum(plain_sum, 0), mask=inside)
    tl.store(out + 2 * channels, tl.zeros((COLS,), tl.float32), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def _apply_gradient(
    dy, x, weight, bias, stats, sums, dx, grads, slope,
    voxels, channels, rows, pieces, blocks, batch, pieces_in,
    FEW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    block, rest, piece, sample = _locate(tl.program_id(0), blocks, pieces)
    stride, col, inside = _columns(block, channels, COLS, WHOLE, EVEN)
    part = tl.arange(0, FEW)[:, None]
    mask = (part < pieces_in) & inside[None, :]
    at = sums + part * 3 * channels + col[None, :]
    if rest == 0:  # gradients of the parameters, over all samples
        scaled_sum = tl.zeros((FEW, COLS), tl.float32)
        plain_sum = tl.zeros((FEW, COLS), tl.float32)
        own = at
        for _ in range(batch):
            scaled_sum += tl.load(own, mask=mask, other=0.0)
            plain_sum += tl.load(own + channels, mask=mask, other=0.0)
            own += pieces_in * 3 * channels
        tl.store(grads + col, tl.sum(scaled_sum, 0), mask=inside)
        tl.store(grads + channels + col, tl.sum(plain_sum, 0), mask=inside)
        tl.store(grads + 2 * channels + col, tl.zeros((COLS,), tl.float32), mask=inside)
    at += sample.to(tl.int64) * pieces_in * 3 * channels
    mean, rstd, scale, b = _load_norm(stats, weight, bias, sample, batch, channels, col, inside, COLS)
    tilt = tl.sum(tl.load(at, mask=mask, other=0.0), 0) * rstd / voxels
    shift = tl.sum(tl.load(at + channels, mask=mask, other=0.0), 0) / voxels
    row = tl.arange(0, ROWS)
    count, start = _piece_bounds(piece, sample, rows, voxels, stride)
    source, slopes, out = x + start, dy + start, dx + start
    offset = row[:, None] * stride + col[None, :]
    for tile in range(tl.cdiv(count, ROWS)):
        valid = _valid_cells(tile * ROWS + row, count, inside, EVEN)
        value = tl.load(source + offset, mask=valid, other=0.0).to(tl.float32)
        g = tl.load(slopes + offset, mask=valid, other=0.0).to(tl.float32)
        off, g = _through_act(value, g, mean, scale, b, slope)
        result = scale[None, :] * (g - shift[None, :] - off * tilt[None, :])
        tl.store(out + offset, result.to(dx.dtype.element_ty), mask=valid)
        source += ROWS * stride
        slopes += ROWS * stride
        out += ROWS * stride


@triton.jit(do_not_specialize=_COUNTS)
def _small_backward(
    dy, x, weight, bias, stats, dx, sums, slope, voxels, channels, blocks, batch,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Do both passes over a sample that fits into one program; sums (B, 3, C) are like _apply_gradient's grads."""
    block, sample = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    stride, col, inside = _columns(block, channels, COLS, WHOLE, EVEN)
    row = tl.arange(0, ROWS)
    valid = _valid_cells(row, voxels, inside, EVEN)
    start = sample.to(tl.int64) * voxels * stride
    offset = row[:, None] * stride + col[None, :]
    value = tl.load(x + start + offset, mask=valid, other=0.0).to(tl.float32)
    g = tl.load(dy + start + offset, mask=valid, other=0.0).to(tl.float32)
    mean, rstd, scale, b = _load_norm(stats, weight, bias, sample, batch, channels, col, inside, COLS)
    off, g = _through_act(value, g, mean, scale, b, slope)
    scaled_sum, plain_sum = tl.sum(g * off, 0) * rstd, tl.sum(g, 0)
    result = scale[None, :] * (g - (plain_sum / voxels)[None, :] - off * (scaled_sum * rstd / voxels)[None, :])
    tl.store(dx + start + offset, result.to(dx.dtype.element_ty), mask=valid)
    out = sums + sample.to(tl.int64) * 3 * channels + col
    tl.store(out, scaled_sum, mask=inside)
    tl.store(out + channels, plain_sum, mask=inside)
    tl.store(out + 2 * channels, tl.zeros((COLS,), tl.float32), mask=inside)
