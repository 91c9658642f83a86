"""Convolutions in CUDA C++ against cuDNN in float32: on a Hopper GPU only, no interpreter runs them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from voxlane.kernels import conv, stem

_LAST = torch.channels_last_3d
_TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def relative(ours: Tensor, reference: Tensor) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def volume(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=_LAST)


def of_pieces(partials: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and variance of each sample and channel."""
    count, mean, squares = partials.double().unbind(2)
    total = count.sum(1)
    middle = (count * mean).sum(1) / total
    return total, middle, (squares + count * (mean - middle[:, None]) ** 2).sum(1) / total


def check_statistics(partials: Tensor, y: Tensor) -> None:
    count, mean, variance = of_pieces(partials)
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
    """Forward, statistics and all gradients."""
    batch, *sides = shape
    given = [volume(batch, 32, *sides, dtype=dtype).requires_grad_() for _ in range(parts)]
    weight = (torch.randn(32, 32 * parts, 3, 3, 3, device="cuda") / 30).requires_grad_()
    y, partials = conv.conv(given[0], given[1] if parts > 1 else None, weight)
    assert y.is_contiguous(memory_format=_LAST)
    assert y.dtype == dtype
    exact = [part.detach().float().requires_grad_() for part in given]
    rounded = weight.detach().to(dtype).float().requires_grad_()
    reference = functional.conv3d(torch.cat(exact, 1), rounded, padding=1)
    assert relative(y, reference) < _TOLERANCE[dtype]
    check_statistics(partials, y)
    dy = volume(*y.shape, dtype=dtype)
    y.backward(dy)
    reference.backward(dy.float())
    for own, theirs in zip((*given, weight), (*exact, rounded), strict=True):
        assert own.grad is not None
        assert relative(own.grad, theirs.grad) < _TOLERANCE[dtype]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@hopper
def test_channels_of_a_wider_volume_are_read_in_place() -> None:
    """A slice of channels needs no copy, and other layouts are copied."""
    both = volume(2, 64, 16, 24, 24, dtype=torch.bfloat16)
    weight = torch.randn(32, 64, 3, 3, 3, device="cuda") / 40
    sliced, _ = conv.conv(both[:, :32], both[:, 32:], weight)
    copied, _ = conv.conv(both[:, :32].contiguous(), both[:, 32:].clone(), weight)
    assert torch.equal(sliced, copied)
    mixed, _ = conv.conv(both[:, :32], both[:, 32:].contiguous(memory_format=_LAST), weight)
    assert torch.equal(mixed, copied)


@hopper
def test_nan_spreads_no_further_than_its_neighbours() -> None:
    """One voxel that is not a number makes 27 of each channel so."""
    x = volume(1, 32, 16, 16, 16, dtype=torch.bfloat16)
    x[0, 3, 5, 6, 7] = torch.nan
    y, _ = conv.conv(x, None, torch.randn(32, 32, 3, 3, 3, device="cuda"))
    assert y.isnan().sum().item() == 27 * 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 8, 8, 8), (2, 21, 19, 37), (2, 40, 56, 40), (1, 64, 64, 128)])
def test_stem_and_its_gradient(shape: tuple[int, ...], channels: int, dtype: torch.dtype) -> None:
    """Of float32, of 16 bits, channels first and last."""
    batch, *sides = shape
    x = torch.randn(batch, channels, *sides, device="cuda")
    weight = (torch.randn(32, channels, 3, 3, 3, device="cuda") / 5).requires_grad_()
    rounded = weight.detach().to(dtype).float().requires_grad_()
    reference = functional.conv3d(x.to(dtype).float(), rounded, padding=1)
    dy = volume(*reference.shape, dtype=dtype)
    reference.backward(dy.float())
    for given in (x, x.contiguous(memory_format=_LAST), x.to(dtype), x.transpose(3, 4).contiguous().transpose(3, 4)):
        weight.grad = None
        y, partials = stem.stem(given, weight, dtype)
        assert y.is_contiguous(memory_format=_LAST)
        assert relative(y, reference) < _TOLERANCE[dtype]
        check_statistics(partials, y)
        y.backward(dy)
        assert weight.grad is not None
        assert relative(weight.grad, rounded.grad) < _TOLERANCE[dtype]


def test_stem_keeps_nan_where_it_is() -> None:
    """Taps that are only padding of the matrix product do not multiply it with zero."""
    x = torch.randn(1, 1, 16, 16, 32, device="cuda")
    x[0, 0, 5, 6, 7] = torch.nan
    y, _ = stem.stem(x, torch.randn(32, 1, 3, 3, 3, device="cuda"), torch.bfloat16)
    assert y.isnan().sum().item() == 27 * 32


def test_a_stem_of_16_bits() -> None:
    """A network that was converted whole has weights of 16 bits."""
    x = torch.randn(2, 1, 16, 20, 24, device="cuda").bfloat16()
    weight = (torch.randn(32, 1, 3, 3, 3, device="cuda") / 5).bfloat16().requires_grad_()
    y, _ = stem.stem(x, weight, torch.bfloat16)
    expected, _ = stem.stem(x, weight.detach().float(), torch.bfloat16)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
