"""Dice and cross-entropy loss with deep supervision, for classes and for overlapping regions.

To add a loss, write a module with the call signature of `DiceCE` and choose it in `voxlane.train.segmenter`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from voxlane.model.kernels.support import can_use_kernels

SMOOTH = {"nnunet": 1e-5, "mlperf": 1e-6}
"""Constant added to numerator and denominator of Dice, so that correctly predicting an absent class scores 1."""

MANY_VOXELS = 2**30
"""Number of voxels per sample from which the kernels cannot count."""


class DiceCE(nn.Module):
    """Soft Dice plus cross-entropy, in float32 regardless of autocast; on GPUs computed by our kernels.

    Takes logits (batch, outputs, z, y, x), or a list of them from the finest to the coarsest, and label values
    (batch, z, y, x) of any integer type at the finest resolution. The losses of a list are weighted 1, 1/2, 1/4 and so
    on, divided by the sum of weights; labels for coarser logits are sampled at the nearest voxel.

    Classes: softmax, Dice over the foreground. Regions: sigmoid, Dice over every region, binary cross-entropy.

    recipe "nnunet": 1 - Dice + CE, which is nnU-Net's loss plus one, with the same gradient. "mlperf": the benchmark's
    (1 - Dice + CE) / 2, with Dice per sample.
    """

    label_table: Tensor
    head_halves: Tensor

    def __init__(
        self,
        regions: bool,
        batch_dice: bool = False,
        *,
        target_values: Sequence[Sequence[int]],
        recipe: Literal["nnunet", "mlperf"] = "nnunet",
        fused: bool = True,
    ) -> None:
        """Build the loss.

        target_values: label values of each target, as in Description.target_values.
        batch_dice: compute one Dice over the batch, including all ranks of torch.distributed, instead of per sample.
        fused: use our kernels where supported, with the same results.
        """
        super().__init__()
        self.regions = regions
        self.batch_dice = batch_dice
        self.recipe = recipe
        self.fused = fused
        self.targets = len(target_values)
        table = make_region_table(target_values) if regions else make_class_table(target_values)
        self.register_buffer("label_table", table, persistent=False)
        # On the device, because numbers from the host would synchronise and cannot be part of a recorded step.
        self.register_buffer("head_halves", 0.5 ** torch.arange(16.0), persistent=False)

    def forward(self, logits: Tensor | Sequence[Tensor], label_BDHW: Tensor) -> Tensor:  # noqa: N803
        """Return the mean loss over the batch."""
        heads = [logits] if isinstance(logits, Tensor) else list(logits)
        labels = [downsample_label(label_BDHW, head.shape[2:]) for head in heads]
        with torch.autocast(label_BDHW.device.type, enabled=False):
            if all(self.uses_kernels(head, label) for head, label in zip(heads, labels, strict=True)):
                return self._fused_loss(heads, labels)
            weights = head_weights(len(heads))
            losses = [
                weight * self._head_loss(head.float(), label)
                for weight, head, label in zip(weights, heads, labels, strict=True)
            ]
            return torch.stack(losses).sum()

    def uses_kernels(self, logits: Tensor, label: Tensor) -> bool:
        """Return whether the kernels are used; PyTorch reports an error for inputs that do not match."""
        outputs = self.targets if self.regions else self.targets + 1
        return (
            self.fused
            and can_use_kernels(logits)
            and label.device == logits.device
            and not label.is_floating_point()
            and math.prod(label.shape[1:]) < MANY_VOXELS
            and logits.dim() == 5
            and label.shape == (logits.shape[0], *logits.shape[2:])
            and (logits.shape[1] == outputs or (logits.shape[1] > outputs and not self.regions))
        )

    def _fused_loss(self, heads: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """Compute the weighted loss of all heads from the kernels' sums.

        Heads are processed together, because the remaining operations take longer to launch than to compute.
        """
        from voxlane.model.kernels.loss import dice_ce_sums

        sums = [dice_ce_sums(head, label, self.label_table) for head, label in zip(heads, labels, strict=True)]
        overlap, probabilities, truth = (torch.stack([head_sums[i] for head_sums in sums]) for i in range(3))
        counts = [head.numel() if self.regions else label.numel() for head, label in zip(heads, labels, strict=True)]
        entropies = [head_sums[3] / count for head_sums, count in zip(sums, counts, strict=True)]
        cross_entropy = torch.stack(entropies).sum(1)
        dice = self._soft_dice(overlap, probabilities + truth).flatten(1).mean(1)
        weights = self.head_halves[: len(heads)] * head_weights(len(heads))[0]
        total = ((1 - dice + cross_entropy) * weights).sum()
        return total / 2 if self.recipe == "mlperf" else total

    def _head_loss(self, logits: Tensor, label: Tensor) -> Tensor:
        """Compute the loss of one head at its own resolution, with PyTorch's operations."""
        index = label.long()
        if label.dtype != torch.uint8:  # the table covers every uint8; other unknown values are background
            index = torch.where((index >= 0) & (index < self.label_table.shape[-1]), index, 0)
        if self.regions:
            truth = torch.stack([table[index] for table in self.label_table], 1)
            cross_entropy = functional.binary_cross_entropy_with_logits(logits, truth)
            probabilities = logits.sigmoid()
        else:
            classes = self.label_table[index]
            cross_entropy = functional.cross_entropy(logits, classes)
            probabilities = logits.softmax(1)[:, 1:]
            values = torch.arange(1, logits.shape[1], device=logits.device).view(1, -1, 1, 1, 1)
            truth = (classes[:, None] == values).float()
        space = (2, 3, 4)
        overlap, sizes = (probabilities * truth).sum(space), probabilities.sum(space) + truth.sum(space)
        total = 1 - self._soft_dice(overlap, sizes).mean() + cross_entropy
        return total / 2 if self.recipe == "mlperf" else total

    def _soft_dice(self, overlap: Tensor, sizes: Tensor) -> Tensor:
        """Return soft Dice per target and, unless over the batch, per sample, from sums (..., batch, targets)."""
        if self.batch_dice:
            sums = torch.stack((overlap, sizes)).sum(-2)
            overlap, sizes = sum_over_ranks(sums)
        smooth = SMOOTH[self.recipe]
        return (2 * overlap + smooth) / (sizes + smooth).clamp_min(1e-8)


def head_weights(heads: int) -> list[float]:
    """Return weights that halve from one head to the next and sum to 1."""
    powers = [0.5**i for i in range(heads)]
    return [half / sum(powers) for half in powers]


def downsample_label(label: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a view of the label at a coarser resolution that divides its own: the voxels nearest to the coarse
    centres, and the later one of an even pair, like torch's nearest-exact."""
    z, y, x = (own // coarse for own, coarse in zip(label.shape[1:], shape, strict=True))
    return label[:, z // 2 :: z, y // 2 :: y, x // 2 :: x]


def make_class_table(target_values: Sequence[Sequence[int]]) -> Tensor:
    """Return 256 class indices by label value: 0 for background and unknown values, then 1, 2, ... for the targets."""
    table = torch.zeros(256, dtype=torch.int64)
    for index, values in enumerate(target_values, 1):
        table[list(values)] = index
    return table


def make_region_table(target_values: Sequence[Sequence[int]]) -> Tensor:
    """Return a table (regions, 256) that is 1 where a label value belongs to the region."""
    table = torch.zeros(len(target_values), 256)
    for row, values in zip(table, target_values, strict=True):
        row[list(values)] = 1
    return table


def sum_over_ranks(sums: Tensor) -> Tensor:
    """Sum over ranks, with gradients to every rank; return the same tensor in a single process."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return sums
    total: Tensor = _SumOverRanks.apply(sums)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    """Sums values forward and gradients backward, because every rank's loss depends on every rank's part."""

    @staticmethod
    def forward(_: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    backward = forward  # type: ignore[assignment]
