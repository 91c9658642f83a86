"""The final convolution, the transposed convolution and the joining of channels match PyTorch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from voxlane.bench.step.variants import NetworkShape
from voxlane.model import layers
from voxlane.model.kernels.final_conv import final_conv
from voxlane.model.kernels.loss import dice_ce_sums
from voxlane.model.kernels.norm import norm_act
from voxlane.model.kernels.upconv import join_channels, upconv
from voxlane.model.networks import UNet

if TYPE_CHECKING:
    from voxlane.volume.plan import Network

_CHANNELS_LAST = torch.channels_last_3d


def random_tensor(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).requires_grad_()


def random_channels_last(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).contiguous(memory_format=_CHANNELS_LAST).requires_grad_()


def check_output_and_gradients(kernel_output: Tensor, reference: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(kernel_output, reference, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(reference)
    for kernel_gradient, reference_gradient in zip(
        torch.autograd.grad(kernel_output, inputs, dy), torch.autograd.grad(reference, inputs, dy), strict=True
    ):
        torch.testing.assert_close(kernel_gradient, reference_gradient, rtol=1e-3, atol=1e-3)


@pytest.fixture(autouse=True)
def _disable_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize(("channels", "outputs"), [(16, 2), (32, 3), (64, 17)])
def test_final_conv(channels: int, outputs: int, device: torch.device) -> None:
    """The logits and all gradients match, also with a partly filled block of voxels."""
    x = random_channels_last(2, channels, 5, 6, 7, device=device)
    weight, bias = random_tensor(outputs, channels, 1, 1, 1, device=device), random_tensor(outputs, device=device)
    y = final_conv(x, weight, bias)
    assert y.is_contiguous()
    check_output_and_gradients(y, functional.conv3d(x, weight, bias), (x, weight, bias))


@pytest.mark.parametrize(
    ("channels", "outputs", "up"), [(32, 16, (2, 2, 2)), (40, 20, (1, 2, 2)), (96, 80, (2, 2, 2)), (16, 16, (3, 1, 2))]
)
def test_upconv(channels: int, outputs: int, up: tuple[int, int, int], device: torch.device) -> None:
    """Channel counts need not be powers of two, and strides may differ by axis."""
    if device.type == "cuda":
        pytest.skip("a GPU rounds matrix products of float32; see the next test")
    x = random_channels_last(2, channels, 3, 4, 5, device=device)
    weight, bias = random_tensor(channels, outputs, *up, device=device), random_tensor(outputs, device=device)
    y = upconv(x, weight, bias)
    assert y.is_contiguous(memory_format=_CHANNELS_LAST)
    check_output_and_gradients(y, functional.conv_transpose3d(x, weight, bias, up), (x, weight, bias))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("channels", "outputs", "side"), [(64, 32, 40), (128, 64, 16), (320, 256, 8), (320, 320, 4)])
def test_upconv_in_16_bits(channels: int, outputs: int, side: int, device: torch.device) -> None:
    """The result matches autocast up to rounding."""
    x = random_channels_last(2, channels, side, side, side, device=device).detach().bfloat16().requires_grad_()
    weight, bias = (
        random_tensor(channels, outputs, 2, 2, 2, device=device, scale=0.1),
        random_tensor(outputs, device=device),
    )
    y = upconv(x, weight, bias)
    with torch.autocast("cuda", torch.bfloat16):
        reference = functional.conv_transpose3d(x, weight, bias, 2)
    assert ((y.double() - reference.double()).norm() / reference.double().norm()).item() < 5e-3
    dy = torch.randn_like(reference)
    for kernel_gradient, reference_gradient in zip(
        torch.autograd.grad(y, (x, weight, bias), dy),
        torch.autograd.grad(reference, (x, weight, bias), dy),
        strict=True,
    ):
        assert (
            (kernel_gradient.double() - reference_gradient.double()).norm() / reference_gradient.double().norm()
        ).item() < 1e-2


@pytest.mark.parametrize(("first", "second"), [(5, 8), (32, 32), (80, 16), (1, 1)])
def test_join_channels(first: int, second: int, device: torch.device) -> None:
    """Channels are joined, and their gradients split again, for inputs of either layout."""
    first_part, second_part = (
        random_tensor(2, first, 3, 4, 5, device=device),
        random_channels_last(2, second, 3, 4, 5, device=device),
    )
    y = join_channels(first_part, second_part)
    assert y.is_contiguous(memory_format=_CHANNELS_LAST)
    check_output_and_gradients(y, torch.cat((first_part, second_part), 1), (first_part, second_part))


def test_join_channels_rejects_mismatched_parts(device: torch.device) -> None:
    """The kernel would read beyond the end of the smaller part."""
    first_part = random_channels_last(2, 4, 4, 4, 4, device=device)
    for mismatched_part in (
        random_channels_last(2, 4, 3, 4, 4, device=device),
        random_channels_last(1, 4, 4, 4, 4, device=device),
        first_part.double(),
    ):
        with pytest.raises(ValueError, match="do not match"):
            join_channels(first_part, mismatched_part)


@pytest.fixture
def compute_dtype(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> torch.dtype:
    """Return the dtype in which the network computes.

    On the CPU this is float32, and the interpreted kernels are used, but not those in CUDA C++.
    """
    if device.type == "cuda":
        return torch.bfloat16
    monkeypatch.setattr(layers, "can_use_kernels", lambda x: True)
    monkeypatch.setattr(layers, "_HALF_DTYPES", (torch.float32,))
    monkeypatch.setattr(layers, "_MIN_SIDE", 1000)
    return torch.float32


def make_networks(device: torch.device) -> tuple[UNet, UNet]:
    """Return a network that uses the kernels, and one of plain PyTorch with the same weights."""
    # NetworkShape needs only torch, like everything else in this test.
    shape = NetworkShape(features=(32, 32, 40), strides=((1, 1, 1), (1, 2, 2), (2, 2, 2)), kernels=((3, 3, 3),) * 3)
    topology = cast("Network", shape)
    fused, plain = (UNet(1, 3, topology, fused=fused).to(device) for fused in (True, False))
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def outputs_and_gradients(network: UNet, x: Tensor, autocast: torch.dtype | None) -> list[Tensor]:
    """Return the logits of all heads and the gradient of every parameter by their mean square, in float64."""
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        heads = network(x)
    torch.stack([logits.to(x.dtype).square().mean() for logits in heads]).sum().backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(network.parameters())), "every parameter has a gradient"
    return [tensor.detach().double() for tensor in (*heads, *gradients)]


def test_network_is_as_accurate_as_pytorch(compute_dtype: torch.dtype, device: torch.device) -> None:
    """The kernels' error against float64 is at most twice that of PyTorch's operations in the same precision.

    Between the input and a gradient of this network lie about 50 tensors that are rounded to bfloat16, each with a
    relative error of up to u = 2^-9, and activations whose sign rounding flips, which changes their gradient a
    hundredfold. PyTorch's bfloat16 gradients are therefore wrong by 0.4% in the last layer and up to 20% in the first
    (measured on a CPU). The kernels round other intermediate values, so the two differ from each other by as much. A
    bound on that difference cannot tell a bug from rounding. But the kernels must not be less accurate than PyTorch.
    The factor 2 allows for chance in small tensors, and so does one more rounding of the result: 2 u, or in float32,
    where the order of sums matters more, 1e-5.
    """
    torch.manual_seed(0)
    fused, plain = make_networks(device)
    exact_network = copy.deepcopy(plain).double()
    side = 32 if device.type == "cuda" else 8
    x = torch.randn(2, 1, side, side, side, device=device)
    autocast, slack = (None, 1e-5) if compute_dtype == torch.float32 else (compute_dtype, 2**-8)
    results = [outputs_and_gradients(network, x, autocast) for network in (fused, plain)]
    results.append(outputs_and_gradients(exact_network, x.double(), None))
    names = [f"head {i}" for i in range(len(fused.heads))] + [name for name, _ in fused.named_parameters()]
    for name, kernel_output, pytorch_output, reference in zip(names, *results, strict=True):
        error, pytorch_error = (kernel_output - reference).norm(), (pytorch_output - reference).norm()
        assert error <= 2 * pytorch_error + slack * reference.norm(), f"{name}: {error:.3g}, {pytorch_error:.3g}"


@pytest.mark.parametrize("shape", [(1, 1, 8, 9, 8), (1, 2, 8, 8, 8), (1, 3, 8, 8, 8)])
def test_network_rejects_images_of_wrong_shape(
    shape: tuple[int, ...], compute_dtype: torch.dtype, device: torch.device
) -> None:
    """The strides must divide the sides, and the number of channels must match the network."""
    fused, _ = make_networks(device)
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
        pytest.raises(RuntimeError, match=r"Sizes of tensors must match|channels"),
    ):
        fused(torch.randn(shape, device=device))


def test_operations_launch_on_the_device_of_their_tensors(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """They do not launch on the current GPU, which is Triton's default."""
    launch_tensors: list[Tensor] = []
    device_of = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: launch_tensors.append(x) or device_of(x))
    x = random_channels_last(1, 16, 4, 4, 4, device=device)
    weight, bias = random_tensor(2, 16, 1, 1, 1, device=device), random_tensor(2, device=device)
    label = torch.zeros(1, 4, 4, 4, dtype=torch.uint8, device=device)
    table = torch.zeros(256, dtype=torch.int64, device=device)
    normalised = norm_act(x, None, None, 1e-5, 0.0)
    logits = final_conv(normalised, weight, bias)
    dice_ce_sums(logits, label, table)[3].sum().backward()
    join_channels(
        x, upconv(x, random_tensor(16, 16, 1, 1, 1, device=device), random_tensor(16, device=device))
    ).sum().backward()
    assert len(launch_tensors) == 10, "five operations and a gradient of each"
    assert all(tensor.device == x.device for tensor in launch_tensors)
