"""Dice and cross-entropy, with deep supervision, for classes and for overlapping regions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from voxlane.model.norm import kernels_run

if TYPE_CHECKING:  # where a description's own imports are not installed, losses are built all the same
    from voxlane.volume.description import Description

SMOOTH = {"nnunet": 1e-5, "mlperf": 1e-6}
"""Added to both sides of the Dice fraction, so that a class absent from a patch counts as found when it is."""

MANY_VOXELS = 2**30
"""In a sample: too many for the kernels to count."""


class DiceCE(nn.Module):
    """Soft Dice plus cross-entropy, in float32 whatever the autocast around it; on GPUs by kernels of our own.

    Called with logits (batch, outputs, z, y, x), or a list of them from the finest to the coarsest, and label values
    (batch, z, y, x) of any integer type at the finest resolution. A list's losses are weighed 1, 1/2, 1/4 and so on,
    divided by the weights' sum; labels for coarser logits are picked at the nearest voxel.

    Classes: softmax, Dice over the foreground. Regions: sigmoid, Dice over every region, binary cross-entropy.

    recipe "nnunet": 1 - Dice + CE, which is nnU-Net's loss plus one, with the same gradient. "mlperf": the benchmark's
    (1 - Dice + CE) / 2, with Dice by sample.
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
        """`target_values`: the label values that make up each target, as Description.target_values. `batch_dice`:
        count one Dice over the batch, of all ranks where torch.distributed runs, instead of one a sample. `fused`: by
        our kernels where they run; same results."""
        super().__init__()
        self.regions = regions
        self.batch_dice = batch_dice
        self.recipe = recipe
        self.fused = fused
        self.targets = len(target_values)
        table = region_table(target_values) if regions else class_table(target_values)
        self.register_buffer("label_table", table, persistent=False)
        # On the device: numbers from the host would wait for it, and no recorded step could have them.
        self.register_buffer("head_halves", 0.5 ** torch.arange(16.0), persistent=False)

    @classmethod
    def of(
        cls,
        description: Description,
        *,
        batch_dice: bool = False,
        recipe: Literal["nnunet", "mlperf"] = "nnunet",
        fused: bool = True,
    ) -> DiceCE:
        """The loss for a dataset's targets."""
        regions = bool(description.regions)
        return cls(regions, batch_dice, target_values=description.target_values, recipe=recipe, fused=fused)

    def forward(self, logits: Tensor | Sequence[Tensor], label_BDHW: Tensor) -> Tensor:  # noqa: N803
        """One number, the mean over the batch."""
        heads = [logits] if isinstance(logits, Tensor) else list(logits)
        labels = [shrink(label_BDHW, head.shape[2:]) for head in heads]
        with torch.autocast(label_BDHW.device.type, enabled=False):
            if all(self.fast(head, label) for head, label in zip(heads, labels, strict=True)):
                return self.together(heads, labels)
            weights = head_weights(len(heads))
            losses = [
                weight * self.one(head.float(), label)
                for weight, head, label in zip(weights, heads, labels, strict=True)
            ]
            return torch.stack(losses).sum()

    def fast(self, logits: Tensor, label: Tensor) -> bool:
        """Whether such a head takes the kernels. What does not fit is left to PyTorch to refuse."""
        outputs = self.targets if self.regions else self.targets + 1
        return (
            self.fused
            and kernels_run(logits)
            and label.device == logits.device
            and not label.is_floating_point()
            and math.prod(label.shape[1:]) < MANY_VOXELS
            and logits.dim() == 5
            and label.shape == (logits.shape[0], *logits.shape[2:])
            and (logits.shape[1] == outputs or (logits.shape[1] > outputs and not self.regions))
        )

    def together(self, heads: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """The loss of all heads by the kernels' sums; as `one` of each, weighed. All heads at once, for what is left
        to do takes longer to launch than to compute."""
        from voxlane.kernels.loss import dice_ce_sums

        sums = [dice_ce_sums(head, label, self.label_table) for head, label in zip(heads, labels, strict=True)]
        both, chances, truth = (torch.stack([of_head[i] for of_head in sums]) for i in range(3))
        counts = [head.numel() if self.regions else label.numel() for head, label in zip(heads, labels, strict=True)]
        entropy = torch.stack([of_head[3] / count for of_head, count in zip(sums, counts, strict=True)]).sum(1)
        dice = self.dice(both, chances + truth).flatten(1).mean(1)
        weights = self.head_halves[: len(heads)] * head_weights(len(heads))[0]
        total = ((1 - dice + entropy) * weights).sum()
        return total / 2 if self.recipe == "mlperf" else total

    def one(self, logits: Tensor, label: Tensor) -> Tensor:
        """The loss of one head, at its own resolution."""
        index = label.long()
        if label.dtype != torch.uint8:  # whose every value is in the table; unknown ones are background
            index = torch.where((index >= 0) & (index < self.label_table.shape[-1]), index, 0)
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
        space = (2, 3, 4)
        both, sizes = (chances * truth).sum(space), chances.sum(space) + truth.sum(space)
        total = 1 - self.dice(both, sizes).mean() + entropy
        return total / 2 if self.recipe == "mlperf" else total

    def dice(self, both: Tensor, sizes: Tensor) -> Tensor:
        """Soft Dice by target and, unless by batch, sample, from sums (..., batch, targets)."""
        if self.batch_dice:
            sums = torch.stack((both, sizes)).sum(-2)
            both, sizes = sum_over_ranks(sums)
        smooth = SMOOTH[self.recipe]
        return (2 * both + smooth) / (sizes + smooth).clamp_min(1e-8)


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
