"""The sums of soft Dice and cross-entropy in one pass over logits and labels, and their gradient in another.

Logits are read in their own layout and dtype; arithmetic is float32. Sums of pieces are combined in a fixed order, so
that they repeat exactly.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxlane.model.kernels.support import operator, save_inputs

PROGRAMS = 2112
"""Programs that share a batch: sixteen for each of an H200's 132 multiprocessors."""
TILE = 1024
"""Logits that a program processes at a time, unless a voxel has more."""
LABELS = 256
"""Number of label values in a table, from 0 on."""
VOXELS = 2**31 - 2**20
"""Upper limit of voxels in a sample; indices are 32-bit, because 64-bit divisions would take longer than all the
rest."""

_COUNTS = [
    "height", "width", "voxels", "rows", "pieces",
    *(f"{of}{axis}_stride" for of in ("", "l", "g") for axis in "bdhw"),
    "both_b", "both_k", "chances_b", "chances_k", "entropy_b",
]  # fmt: skip
"""Arguments whose values Triton does not specialise kernels for."""


def dice_ce_sums(logits: Tensor, label: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum over each sample's voxels in float32: for each target (B, targets) probability times truth, probability, and
    truth; and cross-entropy (B,), for regions also over the regions.

    logits (B, K, D, H, W) and integer label (B, D, H, W) may have any strides. Classes: table (256,) holds the class of
    each label value, probabilities are a softmax, and targets are all classes except class 0. Regions: table (K, 256)
    holds which label values belong to each, and probabilities are sigmoids. Label values outside the table count as
    0, background.
    """
    if logits.dim() != 5 or label.shape != (logits.shape[0], *logits.shape[2:]):
        raise ValueError(f"logits {tuple(logits.shape)} do not match label {tuple(label.shape)}")
    if table.shape not in ((LABELS,), (logits.shape[1], LABELS)):
        raise ValueError(f"a table {tuple(table.shape)} does not match {logits.shape[1]} outputs")
    if logits.shape[2] * logits.shape[3] * logits.shape[4] >= VOXELS:
        raise ValueError(f"samples of {VOXELS} voxels and more are too large: {tuple(label.shape)}")
    if label.dtype == torch.bool:
        label = label.view(torch.uint8)
    return _forward(logits, label, table)


@operator("voxlane::dice_ce_sums", lambda logits, label, table: _allocate_sums(logits, table))
def _forward(logits: Tensor, label: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = _allocate_sums(logits, table)
    if not label.numel():
        for empty in sums:
            empty.zero_()
        return sums
    batch, outputs = logits.shape[:2]
    targets = sums[0].shape[1]
    cut = _Cut(logits, table)
    partials = logits.new_empty((batch, cut.pieces, 4, cut.tile["COLS"]), dtype=torch.float32)
    _sum_pieces[(batch * cut.pieces,)](
        logits, label, table, partials, *logits.stride(), *label.stride(), *cut.counts, **cut.tile
    )
    _sum_all[(batch * 4,)](
        partials, *sums, cut.pieces, targets,
        COLS=cut.tile["COLS"], SKIP=outputs - targets, FOLD=max(16, TILE // cut.tile["COLS"]),
    )  # fmt: skip
    return sums


@operator("voxlane::dice_ce_sums_backward", lambda logits, *_: torch.empty_like(logits))
def _backward(
    logits: Tensor, label: Tensor, table: Tensor, both: Tensor | None, chances: Tensor | None, entropy: Tensor | None
) -> Tensor:
    """Return the logits' gradient, given the gradients of three of the sums; None means zero."""
    gradient = torch.empty_like(logits)
    if not label.numel():
        return gradient
    cut = _Cut(logits, table)
    strides = [s for g in (both, chances) for s in ((0, 0) if g is None else g.stride())]
    _gradient_pieces[(logits.shape[0] * cut.pieces,)](
        logits, label, table, both, chances, entropy, gradient,
        *logits.stride(), *label.stride(), *gradient.stride(), *strides, 0 if entropy is None else entropy.stride(0),
        *cut.counts, SKIP=0 if table.dim() == 2 else 1, **cut.tile,
    )  # fmt: skip
    return gradient


def _run_backward(
    ctx: Any, both: Tensor | None, chances: Tensor | None, _: Tensor | None, entropy: Tensor | None
) -> tuple[Tensor | None, None, None]:
    if both is None and chances is None and entropy is None:
        return None, None, None
    logits, label, table = ctx.saved_tensors
    return _backward(logits, label, table, both, chances, entropy), None, None


_forward.register_autograd(_run_backward, setup_context=save_inputs)


def _allocate_sums(logits: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, outputs = logits.shape[:2]
    targets = outputs if table.dim() == 2 else outputs - 1
    both, chances, truth = (logits.new_empty((batch, targets), dtype=torch.float32) for _ in range(3))
    return both, chances, truth, logits.new_empty(batch, dtype=torch.float32)


class _Cut:
    """Division of a batch into pieces of voxels, with one program for each."""

    def __init__(self, logits: Tensor, table: Tensor) -> None:
        batch, outputs, depth, height, width = logits.shape
        cols = triton.next_power_of_2(outputs)
        tile_rows = max(8, TILE // cols)
        voxels = depth * height * width
        tiles = triton.cdiv(voxels, tile_rows)
        rows = triton.cdiv(tiles, triton.cdiv(PROGRAMS, batch)) * tile_rows
        self.pieces: int = triton.cdiv(voxels, rows)
        self.counts = (height, width, voxels, rows, self.pieces)
        self.tile = {"OUTPUTS": outputs, "COLS": cols, "ROWS": tile_rows, "REGIONS": table.dim() == 2, "num_warps": 4}


# -- kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _target(label, table, place, valid, k, REGIONS: tl.constexpr):
    """Return 1 where a voxel belongs to an output (rows, cols), else 0."""
    value = tl.load(label + place, mask=valid, other=0).to(tl.int64)
    value = tl.where((value >= 0) & (value < 256), value, 0)
    if REGIONS:
        cells = table + k[None, :] * 256 + value[:, None]
        truth = tl.load(cells, mask=valid[:, None] & (k >= 0)[None, :], other=0.0).to(tl.float32)
    else:
        index = tl.load(table + value).to(tl.int32)
        truth = ((index[:, None] == k[None, :]) & valid[:, None]).to(tl.float32)
    return truth


@triton.jit(do_not_specialize=_COUNTS)
def _sum_pieces(
    logits, label, table, partials,
    b_stride, k_stride, d_stride, h_stride, w_stride, lb_stride, ld_stride, lh_stride, lw_stride,
    height, width, voxels, rows, pieces,
    OUTPUTS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, REGIONS: tl.constexpr,
):  # fmt: skip
    """Compute a piece's sums (4, COLS): probability times truth, probability, truth, and cross-entropy."""
    place = tl.program_id(0)
    piece, sample = place % pieces, (place // pieces).to(tl.int64)
    col = tl.arange(0, COLS).to(tl.int64)
    k = tl.where(col < OUTPUTS, col, -1)
    both = tl.zeros((ROWS, COLS), tl.float32)
    chances = tl.zeros((ROWS, COLS), tl.float32)
    truths = tl.zeros((ROWS, COLS), tl.float32)
    entropy = tl.zeros((ROWS, COLS), tl.float32)
    start = piece * rows
    end = start + tl.minimum(rows, voxels - start)
    voxel = start + tl.arange(0, ROWS)
    for _ in range(tl.cdiv(end - start, ROWS)):
        valid = voxel < end
        w, line = (voxel % width).to(tl.int64), voxel // width
        h, d = (line % height).to(tl.int64), (line // height).to(tl.int64)
        at = sample * lb_stride + d * ld_stride + h * lh_stride + w * lw_stride
        truth = _target(label, table, at, valid, k, REGIONS)
        at = sample * b_stride + d * d_stride + h * h_stride + w * w_stride
        real = valid[:, None] & (k >= 0)[None, :]
        z = tl.load(
            logits + at[:, None] + tl.arange(0, COLS).to(tl.int64)[None, :] * k_stride, mask=real, other=0.0
        ).to(tl.float32)
        if REGIONS:
            away = tl.exp(-tl.abs(z))
            chance = tl.where(z < 0, away, 1.0) / (1.0 + away)
            surprise = tl.where(z < 0, 0.0, z) - z * truth + tl.log(1.0 + away)
        else:
            z = tl.where((k >= 0)[None, :], z, float("-inf"))
            top = tl.max(z, 1)[:, None]
            e = tl.exp(z - top)
            total = tl.sum(e, 1)[:, None]
            chance = e / total
            surprise = tl.where(truth > 0, top + tl.log(total) - z, 0.0)
        both += tl.where(real, chance * truth, 0.0)
        chances += tl.where(real, chance, 0.0)
        truths += tl.where(real, truth, 0.0)
        entropy += tl.where(real, surprise, 0.0)
        voxel += ROWS
    out = partials + place.to(tl.int64) * 4 * COLS + col
    tl.store(out, tl.sum(both, 0))
    tl.store(out + COLS, tl.sum(chances, 0))
    tl.store(out + 2 * COLS, tl.sum(truths, 0))
    tl.store(out + 3 * COLS, tl.sum(entropy, 0))


@triton.jit(do_not_specialize=["pieces", "targets"])
def _sum_all(
    partials, both, chances, truths, entropy, pieces, targets,
    COLS: tl.constexpr, SKIP: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Combine one of a sample's four sums over all its pieces."""
    which, sample = tl.program_id(0) % 4, (tl.program_id(0) // 4).to(tl.int64)
    row, k = tl.arange(0, FOLD), tl.arange(0, COLS)
    at = partials + (sample * pieces * 4 + which) * COLS + k[None, :]
    total = tl.zeros((FOLD, COLS), tl.float32)
    for first in range(0, pieces, FOLD):
        total += tl.load(at + (first + row)[:, None] * 4 * COLS, mask=(first + row < pieces)[:, None], other=0.0)
    each = tl.sum(total, 0)
    place = sample * targets + k - SKIP
    is_target = (k >= SKIP) & (k < targets + SKIP)
    if which == 0:
        tl.store(both + place, each, mask=is_target)
    elif which == 1:
        tl.store(chances + place, each, mask=is_target)
    elif which == 2:
        tl.store(truths + place, each, mask=is_target)
    else:
        tl.store(entropy + sample, tl.sum(each, 0))


@triton.jit(do_not_specialize=_COUNTS)
def _gradient_pieces(
    logits, label, table, both, chances, entropy, gradient,
    b_stride, k_stride, d_stride, h_stride, w_stride, lb_stride, ld_stride, lh_stride, lw_stride,
    gb_stride, gk_stride, gd_stride, gh_stride, gw_stride,
    both_b, both_k, chances_b, chances_k, entropy_b,
    height, width, voxels, rows, pieces,
    SKIP: tl.constexpr,
    OUTPUTS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, REGIONS: tl.constexpr,
):  # fmt: skip
    """Compute the logits' gradient over a piece."""
    place = tl.program_id(0)
    piece, sample = place % pieces, (place // pieces).to(tl.int64)
    col = tl.arange(0, COLS).to(tl.int64)
    k = tl.where(col < OUTPUTS, col, -1)
    is_target = k >= SKIP
    of_both = tl.zeros((COLS,), tl.float32)
    of_chance = tl.zeros((COLS,), tl.float32)
    of_entropy = 0.0
    if both is not None:
        of_both = tl.load(both + sample * both_b + (k - SKIP) * both_k, mask=is_target, other=0.0).to(tl.float32)
    if chances is not None:
        at_chance = chances + sample * chances_b + (k - SKIP) * chances_k
        of_chance = tl.load(at_chance, mask=is_target, other=0.0).to(tl.float32)
    if entropy is not None:
        of_entropy = tl.load(entropy + sample * entropy_b).to(tl.float32)
    start = piece * rows
    end = start + tl.minimum(rows, voxels - start)
    voxel = start + tl.arange(0, ROWS)
    for _ in range(tl.cdiv(end - start, ROWS)):
        valid = voxel < end
        w, line = (voxel % width).to(tl.int64), voxel // width
        h, d = (line % height).to(tl.int64), (line // height).to(tl.int64)
        at = sample * lb_stride + d * ld_stride + h * lh_stride + w * lw_stride
        truth = _target(label, table, at, valid, k, REGIONS)
        at = sample * b_stride + d * d_stride + h * h_stride + w * w_stride
        real = valid[:, None] & (k >= 0)[None, :]
        z = tl.load(logits + at[:, None] + col[None, :] * k_stride, mask=real, other=0.0).to(tl.float32)
        pull = of_both[None, :] * truth + of_chance[None, :]
        if REGIONS:
            away = tl.exp(-tl.abs(z))
            chance = tl.where(z < 0, away, 1.0) / (1.0 + away)
            result = pull * chance * (1.0 - chance) + of_entropy * (chance - truth)
        else:
            z = tl.where((k >= 0)[None, :], z, float("-inf"))
            e = tl.exp(z - tl.max(z, 1)[:, None])
            chance = e / tl.sum(e, 1)[:, None]
            result = chance * (pull - tl.sum(chance * pull, 1)[:, None]) + of_entropy * (chance - truth)
        out = sample * gb_stride + d * gd_stride + h * gh_stride + w * gw_stride
        tl.store(gradient + out[:, None] + col[None, :] * gk_stride, result.to(gradient.dtype.element_ty), mask=real)
        voxel += ROWS
