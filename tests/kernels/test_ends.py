"""The head, the way up and the joining of channels against PyTorch's own."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from voxlane.kernels import head, rise

_LAST = torch.channels_last_3d


def made(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).requires_grad_()


def last(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).contiguous(memory_format=_LAST).requires_grad_()


def check(ours: Tensor, reference: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(reference)
    for own, theirs in zip(
        torch.autograd.grad(ours, inputs, dy), torch.autograd.grad(reference, inputs, dy), strict=True
    ):
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize(("channels", "outputs"), [(16, 2), (32, 3), (64, 17)])
def test_head(channels: int, outputs: int, device: torch.device) -> None:
    """Logits and all gradients; one block of voxels is not whole."""
    x = last(2, channels, 5, 6, 7, device=device)
    weight, bias = made(outputs, channels, 1, 1, 1, device=device), made(outputs, device=device)
    y = head.head(x, weight, bias)
    assert y.is_contiguous()
    check(y, functional.conv3d(x, weight, bias), (x, weight, bias))


@pytest.mark.parametrize(
    ("channels", "outputs", "up"), [(32, 16, (2, 2, 2)), (40, 20, (1, 2, 2)), (96, 80, (2, 2, 2)), (16, 16, (3, 1, 2))]
)
def test_rise(channels: int, outputs: int, up: tuple[int, int, int], device: torch.device) -> None:
    """Channels that are no power of two, strides that differ by axis."""
    if device.type == "cuda":
        pytest.skip("a matrix product of float32 is rounded on a GPU; see the next test")
    x = last(2, channels, 3, 4, 5, device=device)
    weight, bias = made(channels, outputs, *up, device=device), made(outputs, device=device)
    y = rise.rise(x, weight, bias)
    assert y.is_contiguous(memory_format=_LAST)
    check(y, functional.conv_transpose3d(x, weight, bias, up), (x, weight, bias))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("channels", "outputs", "side"), [(64, 32, 40), (128, 64, 16), (320, 256, 8), (320, 320, 4)])
def test_rise_in_16_bits(channels: int, outputs: int, side: int, device: torch.device) -> None:
    """As autocast would, up to the rounding."""
    x = last(2, channels, side, side, side, device=device).detach().bfloat16().requires_grad_()
    weight, bias = made(channels, outputs, 2, 2, 2, device=device, scale=0.1), made(outputs, device=device)
    y = rise.rise(x, weight, bias)
    with torch.autocast("cuda", torch.bfloat16):
        reference = functional.conv_transpose3d(x, weight, bias, 2)
    assert ((y.double() - reference.double()).norm() / reference.double().norm()).item() < 5e-3
    dy = torch.randn_like(reference)
    for own, theirs in zip(
        torch.autograd.grad(y, (x, weight, bias), dy),
        torch.autograd.grad(reference, (x, weight, bias), dy),
        strict=True,
    ):
        assert ((own.double() - theirs.double()).norm() / theirs.double().norm()).item() < 1e-2


@pytest.mark.parametrize(("first", "second"), [(5, 8), (32, 32), (80, 16), (1, 1)])
def test_join(first: int, second: int, device: torch.device) -> None:
    """And apart again, in the gradient; inputs of either layout."""
    one, two = made(2, first, 3, 4, 5, device=device), last(2, second, 3, 4, 5, device=device)
    y = rise.join(one, two)
    assert y.is_contiguous(memory_format=_LAST)
    check(y, torch.cat((one, two), 1), (one, two))
