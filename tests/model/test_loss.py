"""The loss matches MONAI, the formula of MLPerf, and on several ranks the loss of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.ranks import RankPool
from voxlane.model.loss import DiceCE, downsample_label, head_weights
from voxlane.volume.description import Description

CLASSES = Description(name="t", channels=("CT",), labels={"background": 0, "kidney": 1, "tumour": 4})
REGIONS = Description(
    name="t",
    channels=("CT",),
    labels={"background": 0, "a": 1, "b": 2, "c": 4},
    regions={"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)},
)


def loss_of(description: Description, **options: Any) -> DiceCE:
    """Build the loss for a dataset's targets."""
    return DiceCE(bool(description.regions), target_values=description.target_values, **options)


def random_logits_and_label(outputs: int, values: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, outputs, 4, 6, 8, generator=rng)
    label = torch.tensor(values, dtype=torch.uint8)[torch.randint(len(values), (3, 4, 6, 8), generator=rng)]
    return logits, label


@pytest.mark.parametrize("batch", [False, True])
def test_classes_equal_monai(batch: bool) -> None:
    from monai.losses import DiceCELoss

    logits, label = random_logits_and_label(3, (0, 1, 4))
    reference = DiceCELoss(
        include_background=False, to_onehot_y=True, softmax=True, smooth_nr=1e-5, smooth_dr=1e-5, batch=batch
    )
    dense = torch.where(label == 4, 2, label.long())[:, None]
    torch.testing.assert_close(loss_of(CLASSES, batch_dice=batch)(logits, label), reference(logits, dense))


@pytest.mark.parametrize("batch", [False, True])
def test_regions_equal_monai(batch: bool) -> None:
    from monai.losses import DiceLoss

    logits, label = random_logits_and_label(3, (0, 1, 2, 4))
    truth = torch.stack([label > 0, (label == 1) | (label == 4), label == 4], 1).float()
    dice = DiceLoss(sigmoid=True, smooth_nr=1e-5, smooth_dr=1e-5, batch=batch)(logits, truth)
    expected = dice + functional.binary_cross_entropy_with_logits(logits, truth)
    torch.testing.assert_close(loss_of(REGIONS, batch_dice=batch)(logits, label), expected)


def test_mlperf_formula() -> None:
    logits, label = random_logits_and_label(3, (0, 1, 4))
    probabilities = logits.softmax(1)
    dense = torch.where(label == 4, 2, label.long())
    dice = []
    for sample in range(3):
        for index in (1, 2):
            p, t = probabilities[sample, index], (dense[sample] == index).float()
            dice.append((2 * (p * t).sum() + 1e-6) / (p.sum() + t.sum() + 1e-6))
    expected = (1 - torch.stack(dice).mean() + functional.cross_entropy(logits, dense)) / 2
    torch.testing.assert_close(loss_of(CLASSES, recipe="mlperf")(logits, label), expected)


def test_each_head_has_half_the_weight_of_the_previous() -> None:
    assert head_weights(3) == [4 / 7, 2 / 7, 1 / 7]
    logits, label = random_logits_and_label(3, (0, 1, 4))
    coarse = torch.randn(3, 3, 4, 3, 4)
    loss = loss_of(CLASSES)
    expected = 2 / 3 * loss(logits, label) + 1 / 3 * loss(coarse, label[:, :, 1::2, 1::2])
    torch.testing.assert_close(loss([logits, coarse], label), expected)


@pytest.mark.parametrize("step", [(1, 2, 2), (2, 2, 2), (4, 4, 4), (3, 1, 2)])
def test_labels_are_downsampled_to_the_nearest_voxel(step: tuple[int, int, int]) -> None:
    label = torch.randint(0, 5, (2, 12, 8, 16), dtype=torch.uint8)
    shape = [n // s for n, s in zip((12, 8, 16), step, strict=True)] if step[0] != 3 else [4, 8, 8]
    target = functional.interpolate(label[:, None].float(), shape, mode="nearest-exact")[:, 0].to(torch.uint8)
    torch.testing.assert_close(downsample_label(label, shape), target)


def test_perfect_prediction_has_zero_loss_even_without_some_targets() -> None:
    label = torch.zeros(1, 4, 4, 4, dtype=torch.uint8)
    label[0, 0] = 1
    logits = torch.full((1, 3, 4, 4, 4), -30.0)
    logits[0, 1, 0] = logits[0, 0, 1:] = 30.0
    assert loss_of(CLASSES)(logits, label).item() == pytest.approx(0, abs=1e-6)


def test_loss_is_float32_under_autocast() -> None:
    logits, label = random_logits_and_label(3, (0, 1, 4))
    half = logits.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(CLASSES)(half, label)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, loss_of(CLASSES)(half.float(), label))
    loss.backward()
    assert half.grad is not None
    assert half.grad.isfinite().all()


@pytest.mark.parametrize("description", [CLASSES, REGIONS])
def test_unknown_label_values_are_background(description: Description) -> None:
    logits, label = random_logits_and_label(3, (0, 1, 4, 99))
    unknown_label = label.to(torch.int16)
    unknown_label[label == 99] = -1
    unknown_label[0, 0] = 300
    label[0, 0] = 0
    loss = loss_of(description)
    torch.testing.assert_close(loss(logits, unknown_label), loss(logits, label))
    label[label == 99] = 0
    torch.testing.assert_close(loss(logits, unknown_label), loss(logits, label))


def test_fused_option_changes_nothing_on_the_cpu() -> None:
    logits, label = random_logits_and_label(3, (0, 1, 4))
    assert torch.equal(loss_of(CLASSES)(logits, label), loss_of(CLASSES, fused=False)(logits, label))


def test_table_is_not_in_the_state_dict() -> None:
    assert not loss_of(REGIONS).state_dict()


def test_batch_dice_sums_over_ranks(ranks: RankPool) -> None:
    logits, label = random_logits_and_label(3, (0, 1, 4))
    logits, label = logits[:2].requires_grad_(), label[:2]
    batch_loss = loss_of(CLASSES, batch_dice=True)(logits, label)
    batch_loss.backward()
    rank_results = ranks.run(compute_loss_on_rank, 2, logits.detach().numpy(), label.numpy())
    # Each rank has the Dice of the whole batch and the cross-entropy of its own sample. The mean over ranks is the
    # loss of the batch, and the averaged gradients are its gradients.
    assert sum(loss for loss, _ in rank_results) / 2 == pytest.approx(batch_loss.item())
    gradient = torch.cat([torch.from_numpy(g) for _, g in rank_results]) / 2
    torch.testing.assert_close(gradient, logits.grad)


def compute_loss_on_rank(rank: int, logits: Any, label: Any) -> tuple[float, Any]:
    rank_logits = torch.from_numpy(logits[rank : rank + 1]).requires_grad_()
    loss = loss_of(CLASSES, batch_dice=True)(rank_logits, torch.from_numpy(label[rank : rank + 1]))
    loss.backward()
    assert rank_logits.grad is not None
    return loss.item(), rank_logits.grad.numpy()
