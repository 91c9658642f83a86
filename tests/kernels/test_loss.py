"""The sums of Dice and cross-entropy: equal to PyTorch's in float64, with their gradients, and so is the whole loss."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from voxlane.kernels import loss as kernel
from voxlane.kernels.loss import dice_ce_sums
from voxlane.model import loss as model
from voxlane.model.loss import DiceCE, class_table, region_table, shrink

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LAST = torch.channels_last_3d
CLASSES = ((1,), (4, 5))
REGIONS = ((1, 2, 4), (1, 4), (4,))
UNKNOWN = 99
on_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def fused_anywhere(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The loss takes the kernels on the CPU too."""
    if device.type == "cpu":
        monkeypatch.setattr(model, "kernels_run", lambda x: x.dtype in CLOSE)


def drawn(
    outputs: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Logits, and a label of values that targets know and do not know."""
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape[0], outputs, *shape[1:], generator=rng)
    values = torch.tensor([0, 1, 2, 4, 5, UNKNOWN], dtype=torch.uint8)
    label = values[torch.randint(len(values), shape, generator=rng)]
    return logits.to(device, dtype), label.to(device)


def by_pytorch(logits: Tensor, label: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    index, space = label.long(), (2, 3, 4)
    if table.dim() == 2:
        truth = torch.stack([row[index] for row in table.double()], 1)
        chances = logits.sigmoid()
        entropy = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none").sum((1, 2, 3, 4))
    else:
        classes = table[index]
        truth = functional.one_hot(classes, logits.shape[1]).movedim(-1, 1)[:, 1:].double()
        chances = logits.softmax(1)[:, 1:]
        entropy = functional.cross_entropy(logits, classes, reduction="none").sum((1, 2, 3))
    return (chances * truth).sum(space), chances.sum(space), truth.sum(space), entropy


def check(logits: Tensor, label: Tensor, table: Tensor) -> None:
    table = table.to(logits.device)
    own, right = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    ours, theirs = dice_ce_sums(own, label, table), by_pytorch(right, label, table)
    pulls = [torch.randn_like(s) for s in ours]
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-4)
    # The truth's sums depend on no logit.
    sum((s * p).sum() for i, (s, p) in enumerate(zip(ours, pulls, strict=True)) if i != 2).backward()  # type: ignore[union-attr]
    sum((s * p.double()).sum() for i, (s, p) in enumerate(zip(theirs, pulls, strict=True)) if i != 2).backward()  # type: ignore[union-attr]
    assert own.grad is not None
    assert right.grad is not None
    assert own.grad.dtype == logits.dtype
    atol = CLOSE[logits.dtype] * right.grad.abs().max().item()
    torch.testing.assert_close(own.grad.double(), right.grad, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("values", [CLASSES, REGIONS])
def test_sums_and_gradients(dtype: torch.dtype, values: tuple[tuple[int, ...], ...], device: torch.device) -> None:
    table = region_table(values) if values is REGIONS else class_table(values)
    logits, label = drawn(3, (2, 3, 5, 7), device, dtype)
    check(logits, label, table)
    check(logits.contiguous(memory_format=LAST), label, table)


@pytest.mark.parametrize("outputs", [2, 5, 130])
def test_numbers_of_classes(outputs: int, device: torch.device) -> None:
    logits, label = drawn(outputs, (1, 2, 3, 3), device)
    check(logits, label, class_table([(value,) for value in range(1, outputs)]))


def test_in_many_pieces_of_many_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE", 32)
    monkeypatch.setattr(kernel, "PROGRAMS", 6)
    logits, label = drawn(3, (2, 3, 5, 7), device)
    check(logits, label, class_table(CLASSES))


@on_card
@pytest.mark.parametrize("values", [CLASSES, REGIONS])
def test_large(values: tuple[tuple[int, ...], ...], device: torch.device) -> None:
    table = region_table(values) if values is REGIONS else class_table(values)
    logits, label = drawn(3, (2, 63, 64, 65), device, torch.bfloat16)
    check(logits.contiguous(memory_format=LAST), label, table)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_unknown_values_are_background_in_either_path(dtype: torch.dtype, device: torch.device) -> None:
    logits, label = drawn(3, (1, 2, 4, 5), device)
    strange = label.to(dtype)
    strange[label == UNKNOWN] = -1
    if dtype != torch.int8:
        strange[0, 0, 0] = 300
        label[0, 0, 0] = 0
    for ours, right in zip(
        dice_ce_sums(logits, strange, class_table(CLASSES).to(device)),
        dice_ce_sums(logits, label, class_table(CLASSES).to(device)),
        strict=True,
    ):
        assert torch.equal(ours, right)
    plain = DiceCE(False, target_values=CLASSES, fused=False).to(device)
    torch.testing.assert_close(plain(logits, strange), plain(logits, label))


def test_strided_labels_and_logits(device: torch.device) -> None:
    logits, label = drawn(3, (2, 6, 8, 4), device)
    coarse = shrink(label, (3, 4, 2))
    assert not coarse.is_contiguous()
    check(logits[:, :, ::2, 1::2, ::2], coarse, class_table(CLASSES))


@pytest.mark.usefixtures("fused_anywhere")
@pytest.mark.parametrize("recipe", ["nnunet", "mlperf"])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("values", [CLASSES, REGIONS])
def test_the_whole_loss_is_the_plain_one(
    recipe: Literal["nnunet", "mlperf"], batch: bool, values: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    made = [
        DiceCE(values is REGIONS, batch, target_values=values, recipe=recipe, fused=fused).to(device)
        for fused in (True, False)
    ]
    logits, label = drawn(3, (2, 4, 4, 2), device)
    coarse = torch.randn(2, 3, 2, 2, 1, device=device)
    found = []
    for loss in made:
        heads = [h.detach().requires_grad_() for h in (logits, coarse)]
        total = loss(heads, label)
        found.append([total.detach(), *torch.autograd.grad(total, heads)])
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("fused_anywhere")
def test_autocast_copies_no_logits(device: torch.device) -> None:
    logits, label = drawn(3, (2, 2, 3, 4), device, torch.bfloat16)
    logits.requires_grad_()
    kept: list[torch.dtype] = []
    with (
        torch.autocast(device.type, dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) if t.dim() == 5 else t, lambda t: t),
    ):
        loss = DiceCE(False, target_values=CLASSES).to(device)(logits, label)
    assert loss.dtype == torch.float32
    assert kept == [torch.bfloat16]
    plain = DiceCE(False, target_values=CLASSES, fused=False).to(device)(logits, label)
    torch.testing.assert_close(loss, plain)


@pytest.mark.usefixtures("fused_anywhere")
def test_too_few_outputs_are_refused_as_before(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("there PyTorch's refusal ends the process")
    logits, label = drawn(2, (1, 2, 3, 4), device)
    with pytest.raises(IndexError):
        DiceCE(False, target_values=CLASSES)(logits, label)


def test_nan_stays_in_its_sample(device: torch.device) -> None:
    logits, label = drawn(3, (2, 2, 3, 4), device)
    logits[1, 1, 0, 0, 0] = float("nan")
    for of_target in dice_ce_sums(logits, label, class_table(CLASSES).to(device)):
        assert not of_target[0].isnan().any()
    assert dice_ce_sums(logits, label, class_table(CLASSES).to(device))[3][1].isnan()


def test_what_does_not_fit_is_named(device: torch.device) -> None:
    logits, label = drawn(3, (2, 2, 3, 4), device)
    with pytest.raises(ValueError, match="do not fit label"):
        dice_ce_sums(logits, label[:, 1:], class_table(CLASSES).to(device))
    with pytest.raises(ValueError, match="none of 3 outputs"):
        dice_ce_sums(logits, label, region_table(CLASSES).to(device))


@pytest.mark.usefixtures("fused_anywhere")
@pytest.mark.filterwarnings("ignore")  # the compiler imports what torch itself calls deprecated
def test_compiled_whole(device: torch.device) -> None:
    loss = DiceCE(False, target_values=CLASSES).to(device)
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    logits, label = drawn(3, (1, 2, 4, 6), device)
    logits.requires_grad_()
    torch.testing.assert_close(compiled(logits, label), loss(logits, label))
    found = torch.autograd.grad(compiled(logits, label), logits)[0]
    torch.testing.assert_close(found, torch.autograd.grad(loss(logits, label), logits)[0])


def test_the_operation_is_well_formed(device: torch.device) -> None:
    logits, label = drawn(3, (1, 2, 2, 3), device)
    table = class_table(CLASSES).to(device)
    torch.library.opcheck(torch.ops.voxlane.dice_ce_sums.default, (logits.requires_grad_(), label, table))
