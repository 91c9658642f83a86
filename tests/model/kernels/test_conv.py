"""Convolutions in CUDA C++ match cuDNN in float32. They need a Hopper GPU, since no interpreter can run them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from voxlane.model.kernels import conv, stem

_CHANNELS_LAST = torch.channels_last_3d
_TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True)
def _disable_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def relative_error(kernel_output: Tensor, reference: Tensor) -> float:
    return ((kernel_output.double() - reference.double()).norm() / reference.double().norm()).item()


def random_volume(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=_CHANNELS_LAST)


def combine_partials(partials: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count, mean and variance of each sample and channel."""
    count, mean, squares = partials.double().unbind(2)
    total = count.sum(1)
    total_mean = (count * mean).sum(1) / total
    return total, total_mean, (squares + count * (mean - total_mean[:, None]) ** 2).sum(1) / total


def check_statistics(partials: Tensor, y: Tensor) -> None:
    count, mean, variance = combine_partials(partials)
    flat = y.double().flatten(2)
    assert (count == flat.shape[2]).all()
    torch.testing.assert_close(mean, flat.mean(2), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(variance, flat.var(2, unbiased=False), rtol=1e-4, atol=1e-6)


SHAPES = [(1, 8, 16, 16), (2, 20, 21, 35), (1, 9, 8, 8), (2, 33, 24, 40), (8, 40, 56, 40), (1, 64, 128, 128)]


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_conv_and_its_gradients(shape: tuple[int, ...], parts: int, dtype: torch.dtype) -> None:
    """The output, its statistics and all gradients match cuDNN."""
    batch, *sides = shape
    inputs = [random_volume(batch, 32, *sides, dtype=dtype).requires_grad_() for _ in range(parts)]
    weight = (torch.randn(32, 32 * parts, 3, 3, 3, device="cuda") / 30).requires_grad_()
    y, partials = conv.conv(inputs[0], inputs[1] if parts > 1 else None, weight)
    assert y.is_contiguous(memory_format=_CHANNELS_LAST)
    assert y.dtype == dtype
    float_inputs = [part.detach().float().requires_grad_() for part in inputs]
    rounded_weight = weight.detach().to(dtype).float().requires_grad_()
    reference = functional.conv3d(torch.cat(float_inputs, 1), rounded_weight, padding=1)
    assert relative_error(y, reference) < _TOLERANCE[dtype]
    check_statistics(partials, y)
    dy = random_volume(*y.shape, dtype=dtype)
    y.backward(dy)
    reference.backward(dy.float())
    for tensor, reference_tensor in zip((*inputs, weight), (*float_inputs, rounded_weight), strict=True):
        assert tensor.grad is not None
        assert relative_error(tensor.grad, reference_tensor.grad) < _TOLERANCE[dtype]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@hopper
def test_channel_slices_are_read_in_place() -> None:
    """A slice of channels in the channels-last layout gives the same result as a copy."""
    wide_volume = random_volume(2, 64, 16, 24, 24, dtype=torch.bfloat16)
    weight = torch.randn(32, 64, 3, 3, 3, device="cuda") / 40
    sliced, _ = conv.conv(wide_volume[:, :32], wide_volume[:, 32:], weight)
    copied, _ = conv.conv(wide_volume[:, :32].contiguous(), wide_volume[:, 32:].clone(), weight)
    assert torch.equal(sliced, copied)
    mixed, _ = conv.conv(wide_volume[:, :32], wide_volume[:, 32:].contiguous(memory_format=_CHANNELS_LAST), weight)
    assert torch.equal(mixed, copied)


@hopper
def test_nan_spreads_only_to_its_neighbours() -> None:
    """One NaN voxel makes 27 voxels of each channel NaN."""
    x = random_volume(1, 32, 16, 16, 16, dtype=torch.bfloat16)
    x[0, 3, 5, 6, 7] = torch.nan
    y, _ = conv.conv(x, None, torch.randn(32, 32, 3, 3, 3, device="cuda"))
    assert y.isnan().sum().item() == 27 * 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 8, 8, 8), (2, 21, 19, 37), (2, 40, 56, 40), (1, 64, 64, 128)])
def test_stem_and_its_gradient(shape: tuple[int, ...], channels: int, dtype: torch.dtype) -> None:
    """The stem accepts float32 and 16-bit images in any memory layout."""
    batch, *sides = shape
    x = torch.randn(batch, channels, *sides, device="cuda")
    weight = (torch.randn(32, channels, 3, 3, 3, device="cuda") / 5).requires_grad_()
    rounded_weight = weight.detach().to(dtype).float().requires_grad_()
    reference = functional.conv3d(x.to(dtype).float(), rounded_weight, padding=1)
    dy = random_volume(*reference.shape, dtype=dtype)
    reference.backward(dy.float())
    for image in (
        x,
        x.contiguous(memory_format=_CHANNELS_LAST),
        x.to(dtype),
        x.transpose(3, 4).contiguous().transpose(3, 4),
    ):
        weight.grad = None
        y, partials = stem.stem(image, weight, dtype)
        assert y.is_contiguous(memory_format=_CHANNELS_LAST)
        assert relative_error(y, reference) < _TOLERANCE[dtype]
        check_statistics(partials, y)
        y.backward(dy)
        assert weight.grad is not None
        assert relative_error(weight.grad, rounded_weight.grad) < _TOLERANCE[dtype]


def test_stem_spreads_nan_only_to_its_neighbours() -> None:
    """Taps that only pad the matrix product do not multiply a NaN by zero."""
    x = torch.randn(1, 1, 16, 16, 32, device="cuda")
    x[0, 0, 5, 6, 7] = torch.nan
    y, _ = stem.stem(x, torch.randn(32, 1, 3, 3, 3, device="cuda"), torch.bfloat16)
    assert y.isnan().sum().item() == 27 * 32


def test_stem_with_16_bit_weights() -> None:
    """A network converted to 16 bits has 16-bit weights."""
    x = torch.randn(2, 1, 16, 20, 24, device="cuda").bfloat16()
    weight = (torch.randn(32, 1, 3, 3, 3, device="cuda") / 5).bfloat16().requires_grad_()
    y, _ = stem.stem(x, weight, torch.bfloat16)
    expected, _ = stem.stem(x, weight.detach().float(), torch.bfloat16)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
