"""Dice and cross-entropy, with deep supervision, for classes and for overlapping regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from voxlane.volume.description import Description

SMOOTH = {"nnunet": 1e-5, "mlperf": 1e-6}
"""Added to both sides of the Dice fraction, so that a class absent from a patch counts as found when it is."""


class DiceCE(nn.Module):
    """Soft Dice plus cross-entropy, in float32 whatever the autocast around it.

    Called with logits (batch, outputs, z, y, x), or a list of them from the finest to the coarsest, and label values
    (batch, z, y, x) of any integer type at the finest resolution. A list's losses are weighed 1, 1/2, 1/4 and so on,
    divided by the weights' sum; labels for coarser logits are picked at the nearest voxel.

    Classes: softmax, Dice over the foreground. Regions: sigmoid, Dice over every region, binary cross-entropy.

    recipe "nnunet": 1 - Dice + CE, which is nnU-Net's loss plus one, with the same gradient. "mlperf": the benchmark's
    (1 - Dice + CE) / 2, with Dice by sample.
    """

    label_table: Tensor

    def __init__(
        self,
        regions: bool,
        batch_dice: bool = False,
        *,
        target_values: Sequence[Sequence[int]],
        recipe: Literal["nnunet", "mlperf"] = "nnunet",
    ) -> None:
        """`target_values`: the label values that make up each target, as Description.target_values. `batch_dice`:
        count one Dice over the batch, of all ranks where torch.distributed runs, instead of one a sample."""
        super().__init__()
        self.regions = regions
        self.batch_dice = batch_dice
        self.recipe = recipe
        table = region_table(target_values) if regions else class_table(target_values)
        self.register_buffer("label_table", table, persistent=False)

    @classmethod
    def of(
        cls, description: Description, *, batch_dice: bool = False, recipe: Literal["nnunet", "mlperf"] = "nnunet"
    ) -> DiceCE:
        """The loss for a dataset's targets."""
        regions = bool(description.regions)
        return cls(regions, batch_dice, target_values=description.target_values, recipe=recipe)

    def forward(self, logits: Tensor | Sequence[Tensor], label_BDHW: Tensor) -> Tensor:  # noqa: N803
        """One number, the mean over the batch."""
        heads = [logits] if isinstance(logits, Tensor) else list(logits)
        weights = head_weights(len(heads))
        with torch.autocast(label_BDHW.device.type, enabled=False):
            losses = [
                weight * self.one(head.float(), shrink(label_BDHW, head.shape[2:]))
                for weight, head in zip(weights, heads, strict=True)
            ]
            return torch.stack(losses).sum()

    def one(self, logits: Tensor, label: Tensor) -> Tensor:
        """The loss of one head, at its own resolution."""
        index = label.long()
        if self.regions:
            truth = torch.stack([table[index] for table in self.label_table], 1)
            entropy = functional.binary_cross_entropy_with_logits(logits, truth)
            chances = logits.sigmoid()
        else:
            classes = self.label_table[index]
            entropy = functional.cross_entropy(logits, classes)
            chances = logits.softmax(1)[:, 1:]
            values = torch.arange(1, logits.shape[1], device=logits.device).view(1, -1, 1, 1, 1)
            truth = (classes[:, None] == values).float()
        total = 1 - self.dice(chances, truth) + entropy
        return total / 2 if self.recipe == "mlperf" else total

    def dice(self, chances: Tensor, truth: Tensor) -> Tensor:
        """Mean soft Dice over targets and, unless by batch, samples."""
        space = (2, 3, 4)
        both, sizes = (chances * truth).sum(space), chances.sum(space) + truth.sum(space)
        if self.batch_dice:
            sums = torch.stack((both, sizes)).sum(1)
            both, sizes = sum_over_ranks(sums)
        smooth = SMOOTH[self.recipe]
        return ((2 * both + smooth) / (sizes + smooth).clamp_min(1e-8)).mean()


def head_weights(heads: int) -> list[float]:
    """Halving from one to the next, with sum 1."""
    halves = [0.5**i for i in range(heads)]
    return [half / sum(halves) for half in halves]


def shrink(label: Tensor, shape: Sequence[int]) -> Tensor:
    """The label at a coarser resolution that divides its own: a view of the voxels nearest to the coarse centres,
    the later one of an even pair, as torch's nearest-exact."""
    z, y, x = (own // coarse for own, coarse in zip(label.shape[1:], shape, strict=True))
    return label[:, z // 2 :: z, y // 2 :: y, x // 2 :: x]


def class_table(target_values: Sequence[Sequence[int]]) -> Tensor:
    """256 class indices by label value: 0 for background and unknown values, 1 on in the targets' order."""
    table = torch.zeros(256, dtype=torch.int64)
    for index, values in enumerate(target_values, 1):
        table[list(values)] = index
    return table


def region_table(target_values: Sequence[Sequence[int]]) -> Tensor:
    """(regions, 256): 1 where a label value belongs to the region."""
    table = torch.zeros(len(target_values), 256)
    for row, values in zip(table, target_values, strict=True):
        row[list(values)] = 1
    return table


def sum_over_ranks(sums: Tensor) -> Tensor:
    """The sum over ranks, through which gradients flow to every rank; the same tensor in a single process."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return sums
    total: Tensor = _SumOverRanks.apply(sums)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    """Every rank's loss depends on every rank's part, so the gradients are summed as well."""

    @staticmethod
    def forward(_: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total
