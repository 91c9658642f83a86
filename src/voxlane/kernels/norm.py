"""InstanceNorm and a (leaky) ReLU in one, for channels-last volumes: forward and backward bound by memory alone.

Forward reads the volume twice and writes it once, backward reads volume and gradient twice and writes once; what the
activation let through is computed again from the volume, so that only it and two numbers a channel are kept. A sample
of few voxels is read once, in a single kernel.

Statistics are float32: count, mean and sum of squared deviations of pieces of a sample, put together by Chan's formula
in a fixed order, so that results repeat exactly.
"""

# ruff: noqa: N803
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxlane.kernels.support import launched_there

PROGRAMS = 2112
"""To cut a batch into: sixteen for each of an H200's 132 multiprocessors."""
TILE = 4096
"""Numbers that a program holds at a time."""
FEW_VOXELS = 2048
"""Samples up to this size are normalised in one kernel."""
FEW_PIECES = 32
"""Up to so many of a sample are put together by each program that needs the whole."""
FOLDED_PIECES = 16
"""More are made so many first: each of a large volume's many programs reads them all."""

FOLD = 16
"""Pieces that are taken at a time, whatever their number: another size is another kernel to compile."""

_LAST_3D = torch.channels_last_3d
_COUNTS = ["voxels", "rows", "pieces", "blocks", "batch", "pieces_in", "pieces_out"]
"""Arguments for whose values no kernel of its own is compiled."""


def norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    slope: float,
    partials: Tensor | None = None,
    dead: Tensor | None = None,
) -> Tensor:
    """leaky_relu(instance_norm(x) * weight + bias, slope), in x's dtype and channels-last.

    x (B, C, D, H, W), bfloat16, float16 or float32; other layouts than channels-last are copied to it. slope 0 is a
    ReLU, 1 no activation. weight, bias (C,): None is 1, 0. partials (B, T, 3, C) float32: count, mean and sum of
    squared deviations of T pieces that make up each sample, where they are known. dead (C,): a parameter added to x's
    channels that the mean takes away again, and that was left out therefore; its gradient is zero.
    """
    voxels = x.shape[2] * x.shape[3] * x.shape[4]
    if voxels == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {x.shape}")
    x = x.contiguous(memory_format=_LAST_3D)
    y: Tensor = _forward(x, weight, bias, eps, slope, partials, dead)[0]
    return y


@torch.library.custom_op("voxlane::norm_act", mutates_args=())
@launched_there
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    slope: float,
    partials: Tensor | None,
    dead: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The result, and each channel's mean and 1 / deviation (2, B, C)."""
    x = x.contiguous(memory_format=_LAST_3D)
    y = torch.empty_like(x, memory_format=_LAST_3D)
    batch, channels = x.shape[:2]
    voxels = x.shape[2] * x.shape[3] * x.shape[4]
    stats = x.new_empty((2, batch, channels), dtype=torch.float32)
    if not x.numel():
        return y, stats
    if partials is None and voxels <= FEW_VOXELS:
        small = _Small(batch, voxels, channels)
        _small_forward[small.grid](
            x, weight, bias, y, stats, eps, slope, voxels, channels, small.blocks, batch, **small.how
        )
        return y, stats
    if partials is None:
        cut = _Cut(batch, voxels, channels)
        partials = x.new_empty((batch, cut.pieces, 3, channels), dtype=torch.float32)
        _describe[cut.grid](x, partials, voxels, channels, cut.rows, cut.pieces, cut.blocks, **cut.how)
    partials = _few(partials, _fold_stats)
    cut = _Cut(batch, voxels, channels)
    _apply[cut.grid](
        x, weight, bias, partials, y, stats, eps, slope,
        voxels, channels, cut.rows, cut.pieces, cut.blocks, batch, partials.shape[1],
        FEW=FEW_PIECES, **cut.how,
    )  # fmt: skip
    return y, stats


@torch.library.custom_op("voxlane::norm_act_backward", mutates_args=())
@launched_there
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and those of weight, bias and what is dead (3, C), in float32."""
    dy, x = dy.contiguous(memory_format=_LAST_3D), x.contiguous(memory_format=_LAST_3D)
    dx = torch.empty_like(x, memory_format=_LAST_3D)
    batch, channels = x.shape[:2]
    voxels = x.shape[2] * x.shape[3] * x.shape[4]
    grads = x.new_empty((3, channels), dtype=torch.float32)
    if not x.numel():
        return dx, grads.zero_()
    if voxels <= FEW_VOXELS:
        small = _Small(batch, voxels, channels)
        sums = grads if batch == 1 else x.new_empty((batch, 3, channels), dtype=torch.float32)
        _small_backward[small.grid](
            dy, x, weight, bias, stats, dx, sums, slope, voxels, channels, small.blocks, batch, **small.how
        )
        if batch > 1:
            _fold_sums[(small.blocks,)](
                sums, grads, channels, small.blocks, batch, 1, COLS=small.how["COLS"], FOLD=FOLD, num_warps=4
            )
        return dx, grads
    cut = _Cut(batch, voxels, channels)
    sums = x.new_empty((batch, cut.pieces, 3, channels), dtype=torch.float32)
    _describe_gradient[cut.grid](
        dy, x, weight, bias, stats, sums, slope, voxels, channels, cut.rows, cut.pieces, cut.blocks, batch, **cut.how
    )
    sums = _few(sums, _fold_sums)
    _apply_gradient[cut.grid](
        dy, x, weight, bias, stats, sums, dx, grads, slope,
        voxels, channels, cut.rows, cut.pieces, cut.blocks, batch, sums.shape[1],
        FEW=FEW_PIECES, **cut.how,
    )  # fmt: skip
    return dx, grads


@_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    slope: float,
    partials: Tensor | None,
    dead: Tensor | None,
) -> tuple[Tensor, Tensor]:
    stats = x.new_empty((2, x.shape[0], x.shape[1]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=_LAST_3D), stats


@_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    grads = x.new_empty((3, x.shape[1]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=_LAST_3D), grads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, slope, _, dead = inputs
    ctx.set_materialize_grads(False)  # the statistics' own would be made, of zeros, at each call
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.slope = slope
    ctx.dead = None if dead is None else dead.dtype


def _differentiate(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, stats = ctx.saved_tensors
    if dy is None:
        return (None,) * 7
    dx, grads = _backward(dy, x, weight, bias, stats, ctx.slope)
    d_weight = None if weight is None else grads[0].to(weight.dtype)
    d_bias = None if bias is None else grads[1].to(bias.dtype)
    d_dead = None if ctx.dead is None else grads[2].to(ctx.dead)
    return dx, d_weight, d_bias, None, None, None, d_dead


_forward.register_autograd(_differentiate, setup_context=_keep)


class _Cut:
    """A batch in pieces of whole rows (voxels) and blocks of channels, one program for each."""

    def __init__(self, batch: int, voxels: int, channels: int) -> None:
        cols = _columns(channels, 64)
        tile_rows = TILE // cols
        self.blocks = triton.cdiv(channels, cols)
        tiles = triton.cdiv(voxels, tile_rows)
        # Few pieces save the kernel that makes them few, if each stays small.
        pieces = FEW_PIECES if tiles <= 4 * FEW_PIECES else triton.cdiv(PROGRAMS, batch * self.blocks)
        self.rows = triton.cdiv(tiles, pieces) * tile_rows
        self.pieces = triton.cdiv(voxels, self.rows)
        self.grid = (batch * self.pieces * self.blocks,)
        # Numbers that do not lie as 16 bytes are loaded one by one, each with an address: more threads hold those.
        self.how = {**_shape(tile_rows, cols, channels), "num_warps": 4 if channels % 16 == 0 or channels == 8 else 8}


class _Small:
    """A batch of samples so small that one program holds one, in blocks of channels."""

    def __init__(self, batch: int, voxels: int, channels: int) -> None:
        tile_rows = max(16, triton.next_power_of_2(voxels))
        # Few channels a program, for more programs; 16 of 2 bytes fill the 32 that memory gives at a time.
        cols = _columns(channels, 16 if tile_rows <= 1024 else 8)
        self.blocks = triton.cdiv(channels, cols)
        self.grid = (batch * self.blocks,)
        warps = min(16, max(1, tile_rows * cols // 1024))
        self.how = {**_shape(tile_rows, cols, channels), "num_warps": warps}


def _columns(channels: int, at_most: int) -> int:
    """A power of two that divides the channels, if a large one does, or holds all of them."""
    fits = min(at_most, channels & -channels)
    return fits if fits >= min(16, at_most) else min(at_most, triton.next_power_of_2(channels))


def _shape(rows: int, cols: int, channels: int) -> dict[str, Any]:
    """A tile's shape, and what the compiler may know of how it lies: all channels in it (it sees for itself what
    multiples of 16 mean), none beyond the last."""
    return {"ROWS": rows, "COLS": cols, "WHOLE": cols == channels and channels < 16, "EVEN": channels % cols == 0}


def _few(partials: Tensor, fold: Any) -> Tensor:
    """Partials (B, T, 3, C) with T few."""
    batch, many, _, channels = partials.shape
    if many <= FEW_PIECES:
        return partials.contiguous()
    cols = _columns(channels, 64)
    blocks = triton.cdiv(channels, cols)
    each = triton.cdiv(many, FOLDED_PIECES)
    few = triton.cdiv(many, each)
    folded = partials.new_empty((batch, few, 3, channels))
    fold[(batch * few * blocks,)](
        partials.contiguous(), folded, channels, blocks, many, few, COLS=cols, FOLD=FOLD, num_warps=4
    )
    return folded


# -- kernels -----------------------------------------------------------------------------------------------------
# A program's place counts blocks of channels first, then pieces, then samples. Passes over the same volume go through
# it in turn from the end and from the start: what one read last is still in the cache for the next. Addresses within
# a program's piece are 32 bits, its start is 64.


@triton.jit
def _parameters(weight, bias, col, inside, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    w = tl.full((COLS,), 1.0, tl.float32)
    b = tl.zeros((COLS,), tl.float32)
    if weight is not None:
        w = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        b = tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)
    return w, b


@triton.jit
def _together(partials, pieces, channels, col, inside, FEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count, mean and squared deviations of a sample's pieces (pieces, 3, channels) by Chan's formula."""
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
def _describe(  # type: ignore[no-untyped-def]
    x, partials, voxels, channels, rows, pieces, blocks,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Count, mean and squared deviations of a piece. Each cell of the tile keeps its own mean (Welford), so that the
    programs' threads meet only at the end."""
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    block, rest = place % blocks, place // blocks
    piece, sample = rest % pieces, rest // pieces
    stride = COLS if WHOLE else channels
    col = block * COLS + tl.arange(0, COLS)
    inside = col < (block + 1) * COLS if EVEN else col < channels
    row = tl.arange(0, ROWS)
    first = piece.to(tl.int64) * rows
    count = tl.minimum(rows, voxels - first).to(tl.int32)
    at = x + (sample.to(tl.int64) * voxels + first) * stride
    offset = row[:, None] * stride + col[None, :]
    mean = tl.zeros((ROWS, COLS), tl.float32)
    m2 = tl.zeros((ROWS, COLS), tl.float32)
    for tile in range(tl.cdiv(count, ROWS)):
        here = (tile * ROWS + row < count)[:, None]
        if not EVEN:
            here = here & inside[None, :]
        value = tl.load(at + offset, mask=here, other=0.0).to(tl.float32)
        off = tl.where(here, value - mean, 0.0)
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
def _fold_stats(  # type: ignore[no-untyped-def]
    partials, folded, channels, blocks, pieces_in, pieces_out, COLS: tl.constexpr, FOLD: tl.constexpr
):
    """Counts, means and squared deviations (B, pieces_in, 3, C) of fewer, larger pieces."""
    place = tl.program_id(0)
    block, rest = place % blocks, place // blocks
    piece, sample = rest % pieces_out, rest // pieces_out
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
    whole = tl.sum(count, 0)
    middle = tl.sum(count * mean, 0) / tl.maximum(whole, 1.0)
    off = mean - middle[None, :]
    out = folded + rest.to(tl.int64) * 3 * channels + col
    tl.store(out, whole, mask=inside)
    tl.store(out + channels, middle, mask=inside)
    tl.store(out + 2 * channels, tl.sum(m2 + count * off * off, 0), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def _apply(  # type: ignore[no-untyped-def]
    x, weight, bias, partials, y, stats, eps, slope, voxels, channels, rows, pieces, blocks, batch, pieces_in,
    FEW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    block, rest = place % blocks, place // blocks
    piece, sample = rest % pieces, rest // pieces
    stride = COLS if WHOLE else channels
    col = block * COLS + tl.arange(0, COLS)
    inside = col < (block + 1) * COLS if EVEN else col < channels
    n, mean, m2 = _together(
        partials + sample.to(tl.int64) * pieces_in * 3 * channels, pieces_in, channels, col, inside, FEW
    )
    rstd = tl.rsqrt(m2 / tl.maximum(n, 1.0) + eps)
    if piece == 0:
        tl.store(stats + sample * channels + col, mean, mask=inside)
        tl.store(stats + (batch + sample) * channels + col, rstd, mask=inside)
    w, b = _parameters(weight, bias, col, inside, COLS)
    scale = rstd * w
    row = tl.arange(0, ROWS)
    first = piece.to(tl.int64) * rows
    count = tl.minimum(rows, voxels - first).to(tl.int32)
    start = (sample.to(tl.int64) * voxels + first) * stride
    source, out = x + start, y + start
    offset = row[:, None] * stride + col[None, :]
    for tile in range(tl.cdiv(count, ROWS)):
        here = (tile * ROWS + row < count)[:, None]
        if not EVEN:
            here = here & inside[None, :]
        value = tl.load(source + offset, mask=here, other=0.0).to(tl.float32)
        z = (value - mean[None, :]) * scale[None, :] + b[None, :]
        z = tl.where(z > 0, z, z * slope)
        tl.store(out + offset, z.to(y.dtype.element_ty), mask=here)
        source += ROWS * stride
        out += ROWS * stride


@triton.jit(do_not_specialize=_COUNTS)
def _small_forward(  # type: ignore[no-untyped-def]
    x, weight, bias, y, stats, eps, slope, voxels, channels, blocks, batch,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    block, sample = place % blocks, place // blocks
    stride = COLS if WHOLE else channels
    col = block * COLS + tl.arange(0, COLS)
    inside = col < (block + 1) * COLS if EVEN else col < channels
    row = tl.arange(0, ROWS)
    here = (row < voxels)[:, None]
    if not EVEN:
        here = here & inside[None, :]
    start = sample.to(tl.int64) * voxels * stride
    offset = row[:, None] * stride + col[None, :]
    value = tl.load(x + start + offset, mask=here, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / voxels
    off = tl.where(here, value - mean[None, :], 0.0)
    rstd = tl.rsqrt(tl.sum(off * off, 0) / voxels + eps)
    tl.store(stats + sample * channels + col, mean, mask=inside)
    tl.store(stats + (batch + sample) * channels + col, rstd, mask=inside)
    w, b = _parameters(weight, bias, col, inside, COLS)
    z = off * (rstd * w)[None, :] + b[None, :]
    z = tl.where(z > 0, z, z * slope)
    tl.store(y + start + offset, z.to(y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=_COUNTS)
def _describe_gradient(  # type: ignore[no-untyped-def]
    dy, x, weight, bias, stats, sums, slope, voxels, channels, rows, pieces, blocks, batch,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sums over a piece of the gradient after the activation, times the normalised volume and alone."""
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    block, rest = place % blocks, place // blocks
    piece, sample = rest % pieces, rest // pieces
    stride = COLS if WHOLE else channels
    col = block * COLS + tl.arange(0, COLS)
    inside = col < (block + 1) * COLS if EVEN else col < channels
    mean = tl.load(stats + sample * channels + col, mask=inside, other=0.0)
    rstd = tl.load(stats + (batch + sample) * channels + col, mask=inside, other=0.0)
    w, b = _parameters(weight, bias, col, inside, COLS)
    scale = rstd * w
    row = tl.arange(0, ROWS)
    first = piece.to(tl.int64) * rows
    count = tl.minimum(rows, voxels - first).to(tl.int32)
    start = (sample.to(tl.int64) * voxels + first) * stride
    source, slopes = x + start, dy + start
    offset = row[:, None] * stride + col[None, :]
    along = tl.zeros((ROWS, COLS), tl.float32)
    alone = tl.zeros((ROWS, COLS), tl.float32)
    for tile in range(tl.cdiv(count, ROWS)):
        here = (tile * ROWS + row < count)[:, None]
        if not EVEN:
            here = here & inside[None, :]
        value = tl.load(source + offset, mask=here, other=0.0).to(tl.float32)
        g = tl.load(slopes + offset, mask=here, other=0.0).to(tl.float32)
        off = value - mean[None, :]
        g = tl.where(off * scale[None, :] + b[None, :] > 0, g, g * slope)
        along += g * off
        alone += g
        source += ROWS * stride
        slopes += ROWS * stride
    out = sums + rest.to(tl.int64) * 3 * channels + col
    tl.store(out, tl.sum(along, 0) * rstd, mask=inside)
    tl.store(out + channels, tl.sum(alone, 0), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def _fold_sums(  # type: ignore[no-untyped-def]
    sums, folded, channels, blocks, pieces_in, pieces_out, COLS: tl.constexpr, FOLD: tl.constexpr
):
    """The first two of (B, pieces_in, 3, C) summed to (B, pieces_out, 3, C), the third zero."""
    place = tl.program_id(0)
    block, rest = place % blocks, place // blocks
    piece, sample = rest % pieces_out, rest // pieces_out
    col = block * COLS + tl.arange(0, COLS)
    inside = col < channels
    each = tl.cdiv(pieces_in, pieces_out)
    row = tl.arange(0, FOLD)[:, None]
    along = tl.zeros((FOLD, COLS), tl.float32)
    alone = tl.zeros((FOLD, COLS), tl.float32)
    start = piece * each
    source = sums + sample.to(tl.int64) * pieces_in * 3 * channels
    for first in range(start, tl.minimum(start + each, pieces_in), FOLD):
        mask = (first + row < tl.minimum(start + each, pieces_in)) & inside[None, :]
        at = source + (first + row).to(tl.int64) * 3 * channels + col[None, :]
        along += tl.load(at, mask=mask, other=0.0)
        alone += tl.load(at + channels, mask=mask, other=0.0)
    out = folded + rest.to(tl.int64) * 3 * channels + col
    tl.store(out, tl.sum(along, 0), mask=inside)
    tl.store(out + channels, tl.sum(alone, 0), mask=inside)
    tl.store(out + 2 * channels, tl.zeros((COLS,), tl.float32), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def _apply_gradient(  # type: ignore[no-untyped-def]
    dy, x, weight, bias, stats, sums, dx, grads, slope,
    voxels, channels, rows, pieces, blocks, batch, pieces_in,
    FEW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    block, rest = place % blocks, place // blocks
    piece, sample = rest % pieces, rest // pieces
    stride = COLS if WHOLE else channels
    col = block * COLS + tl.arange(0, COLS)
    inside = col < (block + 1) * COLS if EVEN else col < channels
    part = tl.arange(0, FEW)[:, None]
    mask = (part < pieces_in) & inside[None, :]
    at = sums + part * 3 * channels + col[None, :]
    if rest == 0:  # the parameters' gradients, over all samples
        along = tl.zeros((FEW, COLS), tl.float32)
        alone = tl.zeros((FEW, COLS), tl.float32)
        own = at
        for _ in range(batch):
            along += tl.load(own, mask=mask, other=0.0)
            alone += tl.load(own + channels, mask=mask, other=0.0)
            own += pieces_in * 3 * channels
        tl.store(grads + col, tl.sum(along, 0), mask=inside)
        tl.store(grads + channels + col, tl.sum(alone, 0), mask=inside)
        tl.store(grads + 2 * channels + col, tl.zeros((COLS,), tl.float32), mask=inside)
    at += sample.to(tl.int64) * pieces_in * 3 * channels
    mean = tl.load(stats + sample * channels + col, mask=inside, other=0.0)
    rstd = tl.load(stats + (batch + sample) * channels + col, mask=inside, other=0.0)
    w, b = _parameters(weight, bias, col, inside, COLS)
    scale = rstd * w
    tilt = tl.sum(tl.load(at, mask=mask, other=0.0), 0) * rstd / voxels
    shift = tl.sum(tl.load(at + channels, mask=mask, other=0.0), 0) / voxels
    row = tl.arange(0, ROWS)
    first = piece.to(tl.int64) * rows
    count = tl.minimum(rows, voxels - first).to(tl.int32)
    start = (sample.to(tl.int64) * voxels + first) * stride
    source, slopes, out = x + start, dy + start, dx + start
    offset = row[:, None] * stride + col[None, :]
    for tile in range(tl.cdiv(count, ROWS)):
        here = (tile * ROWS + row < count)[:, None]
        if not EVEN:
            here = here & inside[None, :]
        value = tl.load(source + offset, mask=here, other=0.0).to(tl.float32)
        g = tl.load(slopes + offset, mask=here, other=0.0).to(tl.float32)
        off = value - mean[None, :]
        g = tl.where(off * scale[None, :] + b[None, :] > 0, g, g * slope)
        result = scale[None, :] * (g - shift[None, :] - off * tilt[None, :])
        tl.store(out + offset, result.to(dx.dtype.element_ty), mask=here)
        source += ROWS * stride
        slopes += ROWS * stride
        out += ROWS * stride


@triton.jit(do_not_specialize=_COUNTS)
def _small_backward(  # type: ignore[no-untyped-def]
    dy, x, weight, bias, stats, dx, sums, slope, voxels, channels, blocks, batch,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Both passes over a sample that a program holds whole; sums (B, 3, C) of it as _apply_gradient's grads."""
    place = tl.program_id(0)
    block, sample = place % blocks, place // blocks
    stride = COLS if WHOLE else channels
    col = block * COLS + tl.arange(0, COLS)
    inside = col < (block + 1) * COLS if EVEN else col < channels
    row = tl.arange(0, ROWS)
    here = (row < voxels)[:, None]
    if not EVEN:
        here = here & inside[None, :]
    start = sample.to(tl.int64) * voxels * stride
    offset = row[:, None] * stride + col[None, :]
    value = tl.load(x + start + offset, mask=here, other=0.0).to(tl.float32)
    g = tl.load(dy + start + offset, mask=here, other=0.0).to(tl.float32)
    mean = tl.load(stats + sample * channels + col, mask=inside, other=0.0)
    rstd = tl.load(stats + (batch + sample) * channels + col, mask=inside, other=0.0)
    w, b = _parameters(weight, bias, col, inside, COLS)
    scale = rstd * w
    off = value - mean[None, :]
    g = tl.where(off * scale[None, :] + b[None, :] > 0, g, g * slope)
    along, alone = tl.sum(g * off, 0) * rstd, tl.sum(g, 0)
    result = scale[None, :] * (g - (alone / voxels)[None, :] - off * (along * rstd / voxels)[None, :])
    tl.store(dx + start + offset, result.to(dx.dtype.element_ty), mask=here)
    out = sums + sample.to(tl.int64) * 3 * channels + col
    tl.store(out, along, mask=inside)
    tl.store(out + channels, alone, mask=inside)
    tl.store(out + 2 * channels, tl.zeros((COLS,), tl.float32), mask=inside)
