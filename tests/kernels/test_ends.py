"""The head, the way up and the joining of channels against PyTorch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from voxlane.bench.step_variants import Topology
from voxlane.kernels import head, rise
from voxlane.kernels.loss import dice_ce_sums
from voxlane.kernels.norm import norm_act
from voxlane.model import layers, norm
from voxlane.model.unet import UNet

if TYPE_CHECKING:
    from voxlane.volume.plan import Network

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


def test_parts_that_do_not_fit_are_not_joined(device: torch.device) -> None:
    """The kernel would read beyond the smaller one."""
    one = last(2, 4, 4, 4, 4, device=device)
    for other in (last(2, 4, 3, 4, 4, device=device), last(1, 4, 4, 4, 4, device=device), one.double()):
        with pytest.raises(ValueError, match="do not fit"):
            rise.join(one, other)


@pytest.fixture
def kernels_anywhere(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> torch.dtype:
    """What the network computes in: on the CPU float32, in which the interpreted kernels are taken too, but for those
    in CUDA C++."""
    if device.type == "cuda":
        return torch.bfloat16
    for module in (layers, norm):
        monkeypatch.setattr(module, "kernels_run", lambda x: True)
    monkeypatch.setattr(layers, "_SHORT", (torch.float32,))
    monkeypatch.setattr(layers, "_LEAST_SIDE", 1000)
    return torch.float32


def networks(device: torch.device) -> tuple[UNet, UNet]:
    """By the kernels, and by PyTorch with the same weights."""
    # Of a class that needs torch alone, as all else here does.
    shape = Topology(features=(32, 32, 40), strides=((1, 1, 1), (1, 2, 2), (2, 2, 2)), kernels=((3, 3, 3),) * 3)
    topology = cast("Network", shape)
    fused, plain = (UNet(1, 3, topology, fused=fused).to(device) for fused in (True, False))
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def test_a_whole_network_is_pytorchs(kernels_anywhere: torch.dtype, device: torch.device) -> None:
    """Every layer takes its kernels, and none leaves a parameter without its gradient."""
    torch.manual_seed(0)
    fused, plain = networks(device)
    side = 32 if device.type == "cuda" else 8
    x = torch.randn(2, 1, side, side, side, device=device)
    close = 1e-3 if kernels_anywhere == torch.float32 else 5e-2
    found = []
    for network in (fused, plain):
        with torch.autocast(device.type, kernels_anywhere, enabled=kernels_anywhere != torch.float32):
            heads = network(x)
        torch.stack([logits.float().square().mean() for logits in heads]).sum().backward()
        found.append([*heads, *(p.grad for p in network.parameters() if p.grad is not None)])
    assert len(found[0]) == len(heads) + len(list(fused.parameters()))
    for own, theirs in zip(*found, strict=True):
        assert (own.float() - theirs.float()).norm() <= close * theirs.float().norm() + 1e-3


@pytest.mark.parametrize("shape", [(1, 1, 8, 9, 8), (1, 2, 8, 8, 8), (1, 3, 8, 8, 8)])
def test_what_does_not_fit_a_network_is_refused_as_before(
    shape: tuple[int, ...], kernels_anywhere: torch.dtype, device: torch.device
) -> None:
    """Sides that the strides do not divide, and other channels than it was built for."""
    fused, _ = networks(device)
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
        pytest.raises(RuntimeError, match=r"Sizes of tensors must match|channels"),
    ):
        fused(torch.randn(shape, device=device))


def test_operations_launch_where_their_tensors_are(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """And not on the current GPU, which Triton would take."""
    asked: list[Tensor] = []
    device_of = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: asked.append(x) or device_of(x))
    x = last(1, 16, 4, 4, 4, device=device)
    weight, bias = made(2, 16, 1, 1, 1, device=device), made(2, device=device)
    label = torch.zeros(1, 4, 4, 4, dtype=torch.uint8, device=device)
    table = torch.zeros(256, dtype=torch.int64, device=device)
    normed = norm_act(x, None, None, 1e-5, 0.0)
    logits = head.head(normed, weight, bias)
    dice_ce_sums(logits, label, table)[3].sum().backward()
    rise.join(x, rise.rise(x, made(16, 16, 1, 1, 1, device=device), made(16, device=device))).sum().backward()
    assert len(asked) == 10, "five operations and a gradient of each"
    assert all(found.device == x.device for found in asked)
