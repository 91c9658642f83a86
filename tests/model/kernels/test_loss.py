"""The sums of Dice and cross-entropy, their gradients and the whole loss match PyTorch in float64."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from voxlane.model import loss as model
from voxlane.model.kernels import loss as kernel
from voxlane.model.kernels.loss import dice_ce_sums
from voxlane.model.loss import DiceCE, downsample_label, make_class_table, make_region_table

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CHANNELS_LAST = torch.channels_last_3d
CLASSES = ((1,), (4, 5))
REGIONS = ((1, 2, 4), (1, 4), (4,))
UNKNOWN_VALUE = 99
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def kernels_on_any_device(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Let the loss use the kernels on the CPU too."""
    if device.type == "cpu":
        monkeypatch.setattr(model, "can_use_kernels", lambda x: x.dtype in TOLERANCE)


def random_logits_and_label(
    outputs: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return random logits, and a label with values inside and outside the targets."""
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape[0], outputs, *shape[1:], generator=rng)
    values = torch.tensor([0, 1, 2, 4, 5, UNKNOWN_VALUE], dtype=torch.uint8)
    label = values[torch.randint(len(values), shape, generator=rng)]
    return logits.to(device, dtype), label.to(device)


def pytorch_sums(logits: Tensor, label: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    index, space = label.long(), (2, 3, 4)
    if table.dim() == 2:
        truth = torch.stack([row[index] for row in table.double()], 1)
        probabilities = logits.sigmoid()
        entropy = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none").sum((1, 2, 3, 4))
    else:
        classes = table[index]
        truth = functional.one_hot(classes, logits.shape[1]).movedim(-1, 1)[:, 1:].double()
        probabilities = logits.softmax(1)[:, 1:]
        entropy = functional.cross_entropy(logits, classes, reduction="none").sum((1, 2, 3))
    return (probabilities * truth).sum(space), probabilities.sum(space), truth.sum(space), entropy


def check_sums_and_gradients(logits: Tensor, label: Tensor, table: Tensor) -> None:
    table = table.to(logits.device)
    kernel_logits, exact_logits = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    kernel_sums, exact_sums = dice_ce_sums(kernel_logits, label, table), pytorch_sums(exact_logits, label, table)
    gradients = [torch.randn_like(s) for s in kernel_sums]
    for actual, expected in zip(kernel_sums, exact_sums, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    # The sums of the truth do not depend on the logits.
    sum((s * g).sum() for i, (s, g) in enumerate(zip(kernel_sums, gradients, strict=True)) if i != 2).backward()  # type: ignore[union-attr]
    sum((s * g.double()).sum() for i, (s, g) in enumerate(zip(exact_sums, gradients, strict=True)) if i != 2).backward()  # type: ignore[union-attr]
    assert kernel_logits.grad is not None
    assert exact_logits.grad is not None
    assert kernel_logits.grad.dtype == logits.dtype
    atol = TOLERANCE[logits.dtype] * exact_logits.grad.abs().max().item()
    torch.testing.assert_close(kernel_logits.grad.double(), exact_logits.grad, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("values", [CLASSES, REGIONS])
def test_sums_and_gradients(dtype: torch.dtype, values: tuple[tuple[int, ...], ...], device: torch.device) -> None:
    table = make_region_table(values) if values is REGIONS else make_class_table(values)
    logits, label = random_logits_and_label(3, (2, 3, 5, 7), device, dtype)
    check_sums_and_gradients(logits, label, table)
    check_sums_and_gradients(logits.contiguous(memory_format=CHANNELS_LAST), label, table)


@pytest.mark.parametrize("outputs", [2, 5, 130])
def test_numbers_of_classes(outputs: int, device: torch.device) -> None:
    logits, label = random_logits_and_label(outputs, (1, 2, 3, 3), device)
    check_sums_and_gradients(logits, label, make_class_table([(value,) for value in range(1, outputs)]))


def test_many_programs_with_many_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE", 32)
    monkeypatch.setattr(kernel, "PROGRAMS", 6)
    logits, label = random_logits_and_label(3, (2, 3, 5, 7), device)
    check_sums_and_gradients(logits, label, make_class_table(CLASSES))


@needs_gpu
@pytest.mark.parametrize("values", [CLASSES, REGIONS])
def test_large_volumes(values: tuple[tuple[int, ...], ...], device: torch.device) -> None:
    table = make_region_table(values) if values is REGIONS else make_class_table(values)
    logits, label = random_logits_and_label(3, (2, 63, 64, 65), device, torch.bfloat16)
    check_sums_and_gradients(logits.contiguous(memory_format=CHANNELS_LAST), label, table)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_unknown_values_are_background_with_and_without_kernels(dtype: torch.dtype, device: torch.device) -> None:
    logits, label = random_logits_and_label(3, (1, 2, 4, 5), device)
    unknown_label = label.to(dtype)
    unknown_label[label == UNKNOWN_VALUE] = -1
    if dtype != torch.int8:
        unknown_label[0, 0, 0] = 300
        label[0, 0, 0] = 0
    for kernel_output, expected in zip(
        dice_ce_sums(logits, unknown_label, make_class_table(CLASSES).to(device)),
        dice_ce_sums(logits, label, make_class_table(CLASSES).to(device)),
        strict=True,
    ):
        assert torch.equal(kernel_output, expected)
    plain = DiceCE(False, target_values=CLASSES, fused=False).to(device)
    torch.testing.assert_close(plain(logits, unknown_label), plain(logits, label))


def test_strided_labels_and_logits(device: torch.device) -> None:
    logits, label = random_logits_and_label(3, (2, 6, 8, 4), device)
    coarse = downsample_label(label, (3, 4, 2))
    assert not coarse.is_contiguous()
    check_sums_and_gradients(logits[:, :, ::2, 1::2, ::2], coarse, make_class_table(CLASSES))


@pytest.mark.usefixtures("kernels_on_any_device")
@pytest.mark.parametrize("recipe", ["nnunet", "mlperf"])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("values", [CLASSES, REGIONS])
def test_fused_loss_matches_plain_loss(
    recipe: Literal["nnunet", "mlperf"], batch: bool, values: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    losses = [
        DiceCE(values is REGIONS, batch, target_values=values, recipe=recipe, fused=fused).to(device)
        for fused in (True, False)
    ]
    logits, label = random_logits_and_label(3, (2, 4, 4, 2), device)
    coarse = torch.randn(2, 3, 2, 2, 1, device=device)
    actual = []
    for loss in losses:
        heads = [h.detach().requires_grad_() for h in (logits, coarse)]
        total = loss(heads, label)
        actual.append([total.detach(), *torch.autograd.grad(total, heads)])
    for kernel_output, expected in zip(*actual, strict=True):
        torch.testing.assert_close(kernel_output, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("kernels_on_any_device")
def test_autocast_copies_no_logits(device: torch.device) -> None:
    logits, label = random_logits_and_label(3, (2, 2, 3, 4), device, torch.bfloat16)
    logits.requires_grad_()
    saved_dtypes: list[torch.dtype] = []
    with (
        torch.autocast(device.type, dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved_dtypes.append(t.dtype) if t.dim() == 5 else t, lambda t: t
        ),
    ):
        loss = DiceCE(False, target_values=CLASSES).to(device)(logits, label)
    assert loss.dtype == torch.float32
    assert saved_dtypes == [torch.bfloat16]
    plain = DiceCE(False, target_values=CLASSES, fused=False).to(device)(logits, label)
    torch.testing.assert_close(loss, plain)


@pytest.mark.usefixtures("kernels_on_any_device")
def test_too_few_outputs_are_rejected(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("PyTorch aborts the process on a GPU")
    logits, label = random_logits_and_label(2, (1, 2, 3, 4), device)
    with pytest.raises(IndexError):
        DiceCE(False, target_values=CLASSES)(logits, label)


def test_nan_stays_in_its_sample(device: torch.device) -> None:
    logits, label = random_logits_and_label(3, (2, 2, 3, 4), device)
    logits[1, 1, 0, 0, 0] = float("nan")
    for sums in dice_ce_sums(logits, label, make_class_table(CLASSES).to(device)):
        assert not sums[0].isnan().any()
    assert dice_ce_sums(logits, label, make_class_table(CLASSES).to(device))[3][1].isnan()


def test_errors_name_mismatched_inputs(device: torch.device) -> None:
    logits, label = random_logits_and_label(3, (2, 2, 3, 4), device)
    with pytest.raises(ValueError, match="do not match label"):
        dice_ce_sums(logits, label[:, 1:], make_class_table(CLASSES).to(device))
    with pytest.raises(ValueError, match="does not match 3 outputs"):
        dice_ce_sums(logits, label, make_region_table(CLASSES).to(device))


@pytest.mark.usefixtures("kernels_on_any_device")
@pytest.mark.filterwarnings("ignore")  # the compiler imports modules that torch deprecates
def test_loss_compiles_to_one_graph(device: torch.device) -> None:
    loss = DiceCE(False, target_values=CLASSES).to(device)
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    logits, label = random_logits_and_label(3, (1, 2, 4, 6), device)
    logits.requires_grad_()
    torch.testing.assert_close(compiled(logits, label), loss(logits, label))
    actual = torch.autograd.grad(compiled(logits, label), logits)[0]
    torch.testing.assert_close(actual, torch.autograd.grad(loss(logits, label), logits)[0])


def test_operation_passes_opcheck(device: torch.device) -> None:
    logits, label = random_logits_and_label(3, (1, 2, 2, 3), device)
    table = make_class_table(CLASSES).to(device)
    torch.library.opcheck(torch.ops.voxlane.dice_ce_sums.default, (logits.requires_grad_(), label, table))
