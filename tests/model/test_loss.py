"""The loss: equal to MONAI's where they coincide, to MLPerf's formula, and over ranks to the whole batch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.ranks import Ranks
from voxlane.model.loss import DiceCE, head_weights, shrink
from voxlane.volume.description import Description

CLASSES = Description(name="t", channels=("CT",), labels={"background": 0, "kidney": 1, "tumour": 4})
REGIONS = Description(
    name="t",
    channels=("CT",),
    labels={"background": 0, "a": 1, "b": 2, "c": 4},
    regions={"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)},
)


def drawn(outputs: int, values: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, outputs, 4, 6, 8, generator=rng)
    label = torch.tensor(values, dtype=torch.uint8)[torch.randint(len(values), (3, 4, 6, 8), generator=rng)]
    return logits, label


@pytest.mark.parametrize("batch", [False, True])
def test_classes_equal_monai(batch: bool) -> None:
    from monai.losses import DiceCELoss

    logits, label = drawn(3, (0, 1, 4))
    theirs = DiceCELoss(
        include_background=False, to_onehot_y=True, softmax=True, smooth_nr=1e-5, smooth_dr=1e-5, batch=batch
    )
    dense = torch.where(label == 4, 2, label.long())[:, None]
    torch.testing.assert_close(DiceCE.of(CLASSES, batch_dice=batch)(logits, label), theirs(logits, dense))


@pytest.mark.parametrize("batch", [False, True])
def test_regions_equal_monai(batch: bool) -> None:
    from monai.losses import DiceLoss

    logits, label = drawn(3, (0, 1, 2, 4))
    truth = torch.stack([label > 0, (label == 1) | (label == 4), label == 4], 1).float()
    dice = DiceLoss(sigmoid=True, smooth_nr=1e-5, smooth_dr=1e-5, batch=batch)(logits, truth)
    expected = dice + functional.binary_cross_entropy_with_logits(logits, truth)
    torch.testing.assert_close(DiceCE.of(REGIONS, batch_dice=batch)(logits, label), expected)


def test_mlperfs_formula() -> None:
    logits, label = drawn(3, (0, 1, 4))
    chances = logits.softmax(1)
    dense = torch.where(label == 4, 2, label.long())
    dice = []
    for sample in range(3):
        for index in (1, 2):
            p, t = chances[sample, index], (dense[sample] == index).float()
            dice.append((2 * (p * t).sum() + 1e-6) / (p.sum() + t.sum() + 1e-6))
    expected = (1 - torch.stack(dice).mean() + functional.cross_entropy(logits, dense)) / 2
    torch.testing.assert_close(DiceCE.of(CLASSES, recipe="mlperf")(logits, label), expected)


def test_heads_weigh_half_of_the_one_before() -> None:
    assert head_weights(3) == [4 / 7, 2 / 7, 1 / 7]
    logits, label = drawn(3, (0, 1, 4))
    coarse = torch.randn(3, 3, 4, 3, 4)
    loss = DiceCE.of(CLASSES)
    expected = 2 / 3 * loss(logits, label) + 1 / 3 * loss(coarse, label[:, :, 1::2, 1::2])
    torch.testing.assert_close(loss([logits, coarse], label), expected)


@pytest.mark.parametrize("step", [(1, 2, 2), (2, 2, 2), (4, 4, 4), (3, 1, 2)])
def test_labels_shrink_to_the_nearest_voxel(step: tuple[int, int, int]) -> None:
    label = torch.randint(0, 5, (2, 12, 8, 16), dtype=torch.uint8)
    shape = [n // s for n, s in zip((12, 8, 16), step, strict=True)] if step[0] != 3 else [4, 8, 8]
    wanted = functional.interpolate(label[:, None].float(), shape, mode="nearest-exact")[:, 0].to(torch.uint8)
    torch.testing.assert_close(shrink(label, shape), wanted)


def test_a_right_answer_costs_nothing_and_absent_targets_count_as_found() -> None:
    label = torch.zeros(1, 4, 4, 4, dtype=torch.uint8)
    label[0, 0] = 1
    logits = torch.full((1, 3, 4, 4, 4), -30.0)
    logits[0, 1, 0] = logits[0, 0, 1:] = 30.0
    assert DiceCE.of(CLASSES)(logits, label).item() == pytest.approx(0, abs=1e-6)


def test_float32_inside_autocast() -> None:
    logits, label = drawn(3, (0, 1, 4))
    half = logits.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = DiceCE.of(CLASSES)(half, label)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, DiceCE.of(CLASSES)(half.float(), label))
    loss.backward()
    assert half.grad is not None
    assert half.grad.isfinite().all()


@pytest.mark.parametrize("description", [CLASSES, REGIONS])
def test_unknown_label_values_are_background(description: Description) -> None:
    logits, label = drawn(3, (0, 1, 4, 99))
    strange = label.to(torch.int16)
    strange[label == 99] = -1
    strange[0, 0] = 300
    label[0, 0] = 0
    loss = DiceCE.of(description)
    torch.testing.assert_close(loss(logits, strange), loss(logits, label))
    label[label == 99] = 0
    torch.testing.assert_close(loss(logits, strange), loss(logits, label))


def test_without_kernels_the_choice_of_them_changes_nothing() -> None:
    logits, label = drawn(3, (0, 1, 4))
    assert torch.equal(DiceCE.of(CLASSES)(logits, label), DiceCE.of(CLASSES, fused=False)(logits, label))


def test_the_table_is_no_state_to_save() -> None:
    assert not DiceCE.of(REGIONS).state_dict()


def test_batch_dice_counts_over_ranks(ranks: Ranks) -> None:
    logits, label = drawn(3, (0, 1, 4))
    logits, label = logits[:2].requires_grad_(), label[:2]
    whole = DiceCE.of(CLASSES, batch_dice=True)(logits, label)
    whole.backward()
    parts = ranks.run(on_rank, 2, logits.detach().numpy(), label.numpy())
    # Each rank has the Dice of both and the cross-entropy of its own; their mean is the loss of the batch, and so,
    # after distributed training has averaged the gradients, are those.
    assert sum(loss for loss, _ in parts) / 2 == pytest.approx(whole.item())
    gradient = torch.cat([torch.from_numpy(g) for _, g in parts]) / 2
    torch.testing.assert_close(gradient, logits.grad)


def on_rank(rank: int, logits: Any, label: Any) -> tuple[float, Any]:
    own = torch.from_numpy(logits[rank : rank + 1]).requires_grad_()
    loss = DiceCE.of(CLASSES, batch_dice=True)(own, torch.from_numpy(label[rank : rank + 1]))
    loss.backward()
    assert own.grad is not None
    return loss.item(), own.grad.numpy()
