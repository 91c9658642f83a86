"""The losses that the peers of `voxlane bench step` ship, operation by operation, so that a step of theirs costs here
what it costs there. They need torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from voxlane.model.loss import SMOOTH

SPACE = (2, 3, 4)


def mlperf_loss(logits: Tensor, label_B1DHW: Tensor) -> Tensor:  # noqa: N803
    """(Dice + cross-entropy) / 2 of MLPerf's reference: labels as one-hot floats, Dice of the foreground by sample."""
    index = label_B1DHW.squeeze(1).long()
    truth = functional.one_hot(index, logits.shape[1]).permute(0, 4, 1, 2, 3).float()[:, 1:]
    chances = torch.softmax(logits, 1)[:, 1:]
    smooth = SMOOTH["mlperf"]
    both = (truth * chances).sum(SPACE)
    dice = (2.0 * both + smooth) / (truth.sum(SPACE) + chances.sum(SPACE) + smooth)
    return (1.0 - dice.mean() + functional.cross_entropy(logits, index)) / 2


class NnunetLoss:
    """nnU-Net's Dice and cross-entropy of every head but the coarsest, each against its own label.

    `compiled`: the Dice is compiled and nothing else, as nnU-Net does. One added to the sum, as in ours, which leaves
    the gradient as it is and lets losses be compared.
    """

    def __init__(self, *, compiled: bool) -> None:
        self.dice: Callable[[Tensor, Tensor], Tensor] = torch.compile(soft_dice) if compiled else soft_dice

    def __call__(self, heads: Sequence[Tensor], labels_B1DHW: Sequence[Tensor], weights: Sequence[float]) -> Tensor:  # noqa: N803
        """The weighed sum, over heads whose weight is not zero."""
        told = zip(heads, labels_B1DHW, weights, strict=False)  # labels end where weights are zero
        losses = [
            weight * (1 - self.dice(head, label) + functional.cross_entropy(head, label[:, 0].long()))
            for head, label, weight in told
            if weight
        ]
        return torch.stack(losses).sum()


def soft_dice(logits: Tensor, label_B1DHW: Tensor) -> Tensor:  # noqa: N803
    """Mean over the foreground and samples, as nnU-Net's memory-efficient one."""
    chances = torch.softmax(logits, 1)
    with torch.no_grad():
        truth = torch.zeros(chances.shape, dtype=torch.bool, device=logits.device)
        truth.scatter_(1, label_B1DHW.long(), 1)
        truth = truth[:, 1:]
        sizes = truth.sum(SPACE)
    chances = chances[:, 1:]
    both, sums = (chances * truth).sum(SPACE), chances.sum(SPACE)
    smooth = SMOOTH["nnunet"]
    return ((2 * both + smooth) / torch.clip(sizes + sums + smooth, 1e-8)).mean()
