"""The fused norm: equal to PyTorch's in float64, forward and backward, whatever the shape, the dtype and the layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from voxlane.kernels import norm as kernel
from voxlane.kernels.norm import norm_act
from voxlane.model import norm as model
from voxlane.model.layers import Stage, conv_norm_act
from voxlane.model.norm import InstanceNormAct

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the largest number: a few times what the dtype rounds to."""
LAST = torch.channels_last_3d

TINY = [(2, 3, 3, 4, 5), (1, 1, 3, 1, 5), (3, 20, 2, 3, 3), (1, 33, 1, 1, 2), (1, 8, 5, 3, 2)]
LARGE = [(2, 32, 64, 64, 64), (1, 320, 8, 8, 8), (2, 256, 16, 16, 16), (1, 1, 77, 63, 65), (3, 33, 31, 17, 29)]
on_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def whole_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's convolutions would otherwise round float32, and each kind of them in its own way."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def fused_anywhere(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The modules take the kernels on the CPU too."""
    if device.type == "cpu":
        monkeypatch.setattr(model, "kernels_run", lambda x: x.dtype in CLOSE)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """No sample is small; on the CPU tiles are small instead, for large volumes would take it minutes."""
    monkeypatch.setattr(kernel, "FEW_VOXELS", 0)
    if device.type == "cpu":
        monkeypatch.setattr(kernel, "TILE", 64)
        monkeypatch.setattr(kernel, "PROGRAMS", 6)
        monkeypatch.setattr(kernel, "FEW_PIECES", 4)
        monkeypatch.setattr(kernel, "FOLDED_PIECES", 2)


def drawn(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A volume off zero, weight, bias and a gradient."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=rng) * 2 + 3
    weight, bias = torch.randn(2, shape[1], generator=rng).unbind()
    gradient = torch.randn(shape, generator=rng)
    return [t.to(device) for t in (x.to(dtype), weight.clone(), bias.clone(), gradient.to(dtype))]


def by_pytorch(x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, slope: float) -> list[Tensor]:
    """Result and gradients in float64."""
    held = [t.detach().double().requires_grad_() for t in (x, weight, bias) if t is not None]
    scale = held[1] if weight is not None else None
    if weight is None and bias is not None:  # one without the other has no gradient on a GPU
        scale = torch.ones_like(held[1], requires_grad=False)
    y = functional.instance_norm(held[0], weight=scale, bias=held[-1] if bias is not None else None)
    y = functional.leaky_relu(y, slope)
    return [y.detach(), *torch.autograd.grad(y, held, dy.double())]


def check(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, slope: float = 0.01, **more: Any
) -> Tensor:
    """The kernel against float64; its result."""
    held = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    wanted = iter(held)
    y = norm_act(*(next(wanted) if t is not None else None for t in (x, weight, bias)), 1e-5, slope, **more)  # type: ignore[arg-type]
    ours = [y.detach(), *torch.autograd.grad(y, held, dy)]
    assert y.dtype == x.dtype
    assert y.is_contiguous(memory_format=LAST)
    for own, right in zip(ours, by_pytorch(x, weight, bias, dy, slope), strict=True):
        close = CLOSE[own.dtype] if own.shape == x.shape else 1e-4
        torch.testing.assert_close(own.double(), right, rtol=0, atol=close * max(1.0, right.abs().max().item()))
    return y


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("dtype", CLOSE)
def test_small_samples(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    check(*drawn(shape, device, dtype))


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.usefixtures("in_pieces")
def test_samples_in_pieces(shape: tuple[int, ...], device: torch.device) -> None:
    check(*drawn(shape, device))


def test_320_channels(device: torch.device) -> None:
    check(*drawn((1, 320, 2, 1, 2), device, torch.bfloat16))


@on_card
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("dtype", CLOSE)
def test_large_samples(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias, dy = drawn(shape, device, dtype)
    first = check(x.contiguous(memory_format=LAST), weight, bias, dy)
    assert torch.equal(first, norm_act(x, weight, bias, 1e-5, 0.01))


@on_card
def test_more_numbers_than_32_bits_count(device: torch.device) -> None:
    x = torch.randn(1, 16, 512, 512, 513, device=device, dtype=torch.bfloat16).contiguous(memory_format=LAST)
    y = norm_act(x, None, None, 1e-5, 1.0)
    for part in (x[:, :, -1], y[:, :, -1]):
        assert part.float().std().item() == pytest.approx(1, abs=0.01)
    torch.testing.assert_close(y[:, :, -1], x[:, :, -1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("slope", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("few", [0, 2048])
def test_slopes_and_no_parameters(
    slope: float, few: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "FEW_VOXELS", few)
    x, _, bias, dy = drawn((2, 3, 3, 4, 5), device)
    check(x, None, None, dy, slope)
    check(x, None, bias, dy, slope)


@pytest.mark.parametrize("few", [0, 2048])
def test_a_mean_far_from_zero_costs_no_digits(few: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "FEW_VOXELS", few)
    x, weight, bias, _ = drawn((2, 4, 6, 6, 6), device)
    x = x + 1000
    right = functional.instance_norm(x.double(), weight=weight.double(), bias=bias.double())
    torch.testing.assert_close(norm_act(x, weight, bias, 1e-5, 1.0).double(), right, rtol=0, atol=1e-3)


def test_any_layout(device: torch.device) -> None:
    x, weight, bias, dy = drawn((2, 6, 4, 4, 6), device)
    first = check(x, weight, bias, dy)
    assert torch.equal(first, check(x.contiguous(memory_format=LAST), weight, bias, dy.contiguous(memory_format=LAST)))
    wide = torch.stack((x, x), -1)[..., 0]
    assert torch.equal(first, check(wide, weight, bias, dy[:, :, :1, :1, :1].expand_as(dy) * 0 + dy))
    check(x[:, ::2, 1:], weight[::2].contiguous(), bias[::2].contiguous(), dy[:, ::2, 1:])
    check(x, weight, bias, dy[:, :, :1, :1, :1].expand_as(dy))


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.usefixtures("in_pieces")
def test_statistics_that_are_known(pieces: int, device: torch.device) -> None:
    x, weight, bias, dy = drawn((2, 3, 4, 3, 5), device)
    described = []
    for piece in x.flatten(2).tensor_split(pieces, 2):
        mean = piece.mean(2)
        off = piece - mean[..., None]
        described.append(torch.stack((torch.full_like(mean, piece.shape[2]), mean, off.square().sum(2)), 1))
    if pieces == 5:  # one of no voxels, whose mean is none
        described.append(torch.full_like(described[0], math.nan))
        described[-1][:, 0] = 0
    partials = torch.stack(described, 1)
    check(x, weight, bias, dy, partials=partials)


@pytest.mark.parametrize("few", [0, 2048])
def test_nan_stays_in_its_channel(few: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "FEW_VOXELS", few)
    x, weight, bias, dy = drawn((2, 5, 3, 3, 4), device)
    x[1, 2, 1, 1, 1] = math.nan
    x.requires_grad_()
    y = norm_act(x, weight, bias, 1e-5, 0.0)
    y.backward(dy)
    assert x.grad is not None
    for result in (y, x.grad):
        bad = result.isnan().flatten(2)
        assert bad[1, 2].all()
        assert bad.sum() == bad[1, 2].numel()


def test_one_voxel_is_refused_as_pytorch_refuses_it(device: torch.device) -> None:
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        norm_act(torch.ones(2, 3, 1, 1, 1, device=device), None, None, 1e-5, 0.0)


@pytest.mark.usefixtures("fused_anywhere")
def test_a_module_refuses_one_voxel_alike(device: torch.device) -> None:
    norm = InstanceNormAct(3, slope=0.0).to(device)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        norm(torch.ones(2, 3, 1, 1, 1, device=device))


def twins(device: torch.device, slope: float = 0.01) -> tuple[Stage, nn.Sequential]:
    """A stage, and PyTorch's own modules with the same weights."""
    torch.manual_seed(0)
    stage = Stage(nn.Conv3d(2, 4, 3, 1, 1), InstanceNormAct(4, slope=slope), nn.Identity()).to(device)
    plain = nn.Sequential(nn.Conv3d(2, 4, 3, 1, 1), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(slope)).to(device)
    with torch.no_grad():
        stage[1].weight.uniform_(-1, 1)  # type: ignore[operator]
        stage[1].bias.uniform_(-1, 1)  # type: ignore[operator]
    plain.load_state_dict(stage.state_dict())
    return stage, plain


def gradients(network: nn.Module) -> list[Tensor]:
    found = [p.grad for p in network.parameters()]
    network.zero_grad()
    assert all(g is not None for g in found)
    return [g for g in found if g is not None]


@pytest.mark.usefixtures("fused_anywhere")
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_stage_is_its_modules_and_a_dead_bias_has_no_gradient(recomputed: bool, device: torch.device) -> None:
    stage, plain = twins(device)
    x = torch.randn(2, 2, 4, 5, 6, device=device)
    y = checkpoint(stage, x, use_reentrant=False) if recomputed else stage(x)
    assert y.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(y, plain(x), rtol=1e-3, atol=1e-3)
    y.square().mean().backward()
    plain(x).square().mean().backward()
    ours = gradients(stage)
    assert not ours[1].any()
    for own, right in zip(ours, gradients(plain), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-2, atol=2e-3)


@pytest.mark.usefixtures("fused_anywhere")
def test_a_hooked_convolution_is_called(device: torch.device) -> None:
    stage, plain = twins(device)
    seen: list[Tensor] = []
    stage[0].register_forward_hook(lambda _, __, out: seen.append(out))
    x = torch.randn(1, 2, 4, 5, 6, device=device)
    torch.testing.assert_close(conv_norm_act(stage[0], stage[1], x), plain(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(seen[0], stage[0](x))


@pytest.mark.usefixtures("fused_anywhere")
def test_autocast_keeps_the_inputs_dtype(device: torch.device) -> None:
    stage, plain = twins(device)
    x = torch.randn(2, 2, 4, 5, 6, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = stage(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), plain(x), rtol=0.05, atol=0.05)
    y.float().square().mean().backward()
    assert all(g.dtype == torch.float32 for g in gradients(stage))


@pytest.mark.usefixtures("fused_anywhere")
@pytest.mark.filterwarnings("ignore")  # the compiler imports what torch itself calls deprecated
def test_compiled_whole(device: torch.device) -> None:
    # Without a GPU the interpreter runs below whatever would generate code; the graph is the same.
    stage, _ = twins(device)
    compiled = torch.compile(stage, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    x = torch.randn(2, 2, 4, 5, 6, device=device)
    torch.testing.assert_close(compiled(x), stage(x), rtol=1e-3, atol=1e-3)
    compiled(x).square().mean().backward()
    found = gradients(stage)
    stage(x).square().mean().backward()
    for own, right in zip(found, gradients(stage), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-2, atol=1e-3)


def test_the_operation_is_well_formed(device: torch.device) -> None:
    x, weight, bias, _ = drawn((2, 3, 2, 3, 4), device)
    x = x.contiguous(memory_format=LAST)
    held = [t.requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(torch.ops.voxlane.norm_act.default, (*held, 1e-5, 0.01, None, None))


@on_card
@pytest.mark.filterwarnings("ignore")  # of streams that differ: the first run is on another than the recording
def test_recorded_and_replayed(device: torch.device) -> None:
    x, weight, bias, dy = drawn((2, 32, 24, 24, 24), device, torch.bfloat16)
    held = [t.requires_grad_() for t in (x.contiguous(memory_format=LAST), weight, bias)]

    def step() -> list[Tensor]:
        y = norm_act(*held, 1e-5, 0.01)  # type: ignore[call-arg, misc, arg-type]
        return [y, *torch.autograd.grad(y, held, dy)]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        first = step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
