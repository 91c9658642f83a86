"""The fused norm matches PyTorch in float64, forward and backward, for any shape, dtype and layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from voxlane.model import layers as model
from voxlane.model.kernels import norm as kernel
from voxlane.model.kernels.norm import norm_act
from voxlane.model.layers import ConvStage, InstanceNormAct, conv_norm_act

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Tolerance relative to the largest value: a few times the rounding error of the dtype."""
CHANNELS_LAST = torch.channels_last_3d

TINY = [(2, 3, 3, 4, 5), (1, 1, 3, 1, 5), (3, 20, 2, 3, 3), (1, 33, 1, 1, 2), (1, 8, 5, 3, 2)]
LARGE = [(2, 32, 64, 64, 64), (1, 320, 8, 8, 8), (2, 256, 16, 16, 16), (1, 1, 77, 63, 65), (3, 33, 31, 17, 29)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def disable_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable TF32, with which convolutions on a GPU round float32 differently."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def kernels_on_any_device(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Let the modules use the kernels on the CPU too."""
    if device.type == "cpu":
        monkeypatch.setattr(model, "can_use_kernels", lambda x: x.dtype in TOLERANCE)


@pytest.fixture
def several_pieces(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Treat no sample as small. On the CPU make tiles small, because large volumes would take minutes."""
    monkeypatch.setattr(kernel, "FEW_VOXELS", 0)
    if device.type == "cpu":
        monkeypatch.setattr(kernel, "TILE", 64)
        monkeypatch.setattr(kernel, "PROGRAMS", 6)
        monkeypatch.setattr(kernel, "FEW_PIECES", 4)
        monkeypatch.setattr(kernel, "FOLDED_PIECES", 2)


def random_inputs(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return a volume with a nonzero mean, a weight, a bias and a gradient of the output."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=rng) * 2 + 3
    weight, bias = torch.randn(2, shape[1], generator=rng).unbind()
    gradient = torch.randn(shape, generator=rng)
    return [t.to(device) for t in (x.to(dtype), weight.clone(), bias.clone(), gradient.to(dtype))]


def pytorch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, slope: float) -> list[Tensor]:
    """Return the result and the gradients of PyTorch in float64."""
    arguments = [t.detach().double().requires_grad_() for t in (x, weight, bias) if t is not None]
    scale = arguments[1] if weight is not None else None
    if weight is None and bias is not None:  # PyTorch gives no gradient for a bias without a weight on a GPU.
        scale = torch.ones_like(arguments[1], requires_grad=False)
    y = functional.instance_norm(arguments[0], weight=scale, bias=arguments[-1] if bias is not None else None)
    y = functional.leaky_relu(y, slope)
    return [y.detach(), *torch.autograd.grad(y, arguments, dy.double())]


def check_against_pytorch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, slope: float = 0.01, **options: Any
) -> Tensor:
    """Compare the kernel with PyTorch in float64, and return its result."""
    arguments = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    tensors = iter(arguments)
    y = norm_act(*(next(tensors) if t is not None else None for t in (x, weight, bias)), 1e-5, slope, **options)  # type: ignore[arg-type]
    kernel_results = [y.detach(), *torch.autograd.grad(y, arguments, dy)]
    assert y.dtype == x.dtype
    assert y.is_contiguous(memory_format=CHANNELS_LAST)
    for actual, expected in zip(kernel_results, pytorch_norm(x, weight, bias, dy, slope), strict=True):
        tolerance = TOLERANCE[actual.dtype] if actual.shape == x.shape else 1e-4
        torch.testing.assert_close(
            actual.double(), expected, rtol=0, atol=tolerance * max(1.0, expected.abs().max().item())
        )
    return y


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_small_samples(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    check_against_pytorch(*random_inputs(shape, device, dtype))


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.usefixtures("several_pieces")
def test_samples_in_pieces(shape: tuple[int, ...], device: torch.device) -> None:
    check_against_pytorch(*random_inputs(shape, device))


def test_320_channels(device: torch.device) -> None:
    check_against_pytorch(*random_inputs((1, 320, 2, 1, 2), device, torch.bfloat16))


@needs_gpu
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_large_samples(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias, dy = random_inputs(shape, device, dtype)
    first = check_against_pytorch(x.contiguous(memory_format=CHANNELS_LAST), weight, bias, dy)
    assert torch.equal(first, norm_act(x, weight, bias, 1e-5, 0.01))


@needs_gpu
def test_more_elements_than_32_bit_indices(device: torch.device) -> None:
    x = torch.randn(1, 16, 512, 512, 513, device=device, dtype=torch.bfloat16).contiguous(memory_format=CHANNELS_LAST)
    y = norm_act(x, None, None, 1e-5, 1.0)
    for part in (x[:, :, -1], y[:, :, -1]):
        assert part.float().std().item() == pytest.approx(1, abs=0.01)
    torch.testing.assert_close(y[:, :, -1], x[:, :, -1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("slope", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("few_voxels", [0, 2048])
def test_slopes_and_no_parameters(
    slope: float, few_voxels: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "FEW_VOXELS", few_voxels)
    x, _, bias, dy = random_inputs((2, 3, 3, 4, 5), device)
    check_against_pytorch(x, None, None, dy, slope)
    check_against_pytorch(x, None, bias, dy, slope)


@pytest.mark.parametrize("few_voxels", [0, 2048])
def test_mean_far_from_zero_stays_accurate(
    few_voxels: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "FEW_VOXELS", few_voxels)
    x, weight, bias, _ = random_inputs((2, 4, 6, 6, 6), device)
    x = x + 1000
    expected = functional.instance_norm(x.double(), weight=weight.double(), bias=bias.double())
    torch.testing.assert_close(norm_act(x, weight, bias, 1e-5, 1.0).double(), expected, rtol=0, atol=1e-3)


def test_any_layout(device: torch.device) -> None:
    x, weight, bias, dy = random_inputs((2, 6, 4, 4, 6), device)
    first = check_against_pytorch(x, weight, bias, dy)
    assert torch.equal(
        first,
        check_against_pytorch(
            x.contiguous(memory_format=CHANNELS_LAST), weight, bias, dy.contiguous(memory_format=CHANNELS_LAST)
        ),
    )
    wide = torch.stack((x, x), -1)[..., 0]
    assert torch.equal(first, check_against_pytorch(wide, weight, bias, dy[:, :, :1, :1, :1].expand_as(dy) * 0 + dy))
    check_against_pytorch(x[:, ::2, 1:], weight[::2].contiguous(), bias[::2].contiguous(), dy[:, ::2, 1:])
    check_against_pytorch(x, weight, bias, dy[:, :, :1, :1, :1].expand_as(dy))


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.usefixtures("several_pieces")
def test_precomputed_statistics(pieces: int, device: torch.device) -> None:
    x, weight, bias, dy = random_inputs((2, 3, 4, 3, 5), device)
    statistics = []
    for piece in x.flatten(2).tensor_split(pieces, 2):
        mean = piece.mean(2)
        deviations = piece - mean[..., None]
        statistics.append(torch.stack((torch.full_like(mean, piece.shape[2]), mean, deviations.square().sum(2)), 1))
    if pieces == 5:  # a piece without voxels, whose mean is NaN
        statistics.append(torch.full_like(statistics[0], math.nan))
        statistics[-1][:, 0] = 0
    partials = torch.stack(statistics, 1)
    check_against_pytorch(x, weight, bias, dy, partials=partials)


@pytest.mark.parametrize("few_voxels", [0, 2048])
def test_nan_stays_in_its_channel(few_voxels: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "FEW_VOXELS", few_voxels)
    x, weight, bias, dy = random_inputs((2, 5, 3, 3, 4), device)
    x[1, 2, 1, 1, 1] = math.nan
    x.requires_grad_()
    y = norm_act(x, weight, bias, 1e-5, 0.0)
    y.backward(dy)
    assert x.grad is not None
    for result in (y, x.grad):
        is_nan = result.isnan().flatten(2)
        assert is_nan[1, 2].all()
        assert is_nan.sum() == is_nan[1, 2].numel()


def test_single_voxel_is_rejected_as_in_pytorch(device: torch.device) -> None:
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        norm_act(torch.ones(2, 3, 1, 1, 1, device=device), None, None, 1e-5, 0.0)


@pytest.mark.usefixtures("kernels_on_any_device")
def test_module_rejects_single_voxel(device: torch.device) -> None:
    norm = InstanceNormAct(3, slope=0.0).to(device)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        norm(torch.ones(2, 3, 1, 1, 1, device=device))


def make_stage_and_modules(device: torch.device, slope: float = 0.01) -> tuple[ConvStage, nn.Sequential]:
    """Return a stage, and PyTorch modules with the same weights."""
    torch.manual_seed(0)
    stage = ConvStage(nn.Conv3d(2, 4, 3, 1, 1), InstanceNormAct(4, slope=slope), nn.Identity()).to(device)
    plain = nn.Sequential(nn.Conv3d(2, 4, 3, 1, 1), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(slope)).to(device)
    with torch.no_grad():
        stage[1].weight.uniform_(-1, 1)  # type: ignore[operator]
        stage[1].bias.uniform_(-1, 1)  # type: ignore[operator]
    plain.load_state_dict(stage.state_dict())
    return stage, plain


def take_gradients(network: nn.Module) -> list[Tensor]:
    values = [p.grad for p in network.parameters()]
    network.zero_grad()
    assert all(g is not None for g in values)
    return [g for g in values if g is not None]


@pytest.mark.usefixtures("kernels_on_any_device")
@pytest.mark.parametrize("recomputed", [False, True])
def test_stage_matches_its_modules_and_unused_bias_has_zero_gradient(recomputed: bool, device: torch.device) -> None:
    stage, plain = make_stage_and_modules(device)
    x = torch.randn(2, 2, 4, 5, 6, device=device)
    y = checkpoint(stage, x, use_reentrant=False) if recomputed else stage(x)
    assert y.is_contiguous(memory_format=CHANNELS_LAST)
    torch.testing.assert_close(y, plain(x), rtol=1e-3, atol=1e-3)
    y.square().mean().backward()
    plain(x).square().mean().backward()
    stage_gradients = take_gradients(stage)
    assert not stage_gradients[1].any()
    for actual, expected in zip(stage_gradients, take_gradients(plain), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=2e-3)


@pytest.mark.usefixtures("kernels_on_any_device")
def test_convolution_with_a_hook_is_called(device: torch.device) -> None:
    stage, plain = make_stage_and_modules(device)
    observed: list[Tensor] = []
    stage[0].register_forward_hook(lambda _, __, out: observed.append(out))
    x = torch.randn(1, 2, 4, 5, 6, device=device)
    torch.testing.assert_close(conv_norm_act(stage[0], stage[1], x), plain(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(observed[0], stage[0](x))


@pytest.mark.usefixtures("kernels_on_any_device")
def test_autocast_keeps_the_inputs_dtype(device: torch.device) -> None:
    stage, plain = make_stage_and_modules(device)
    x = torch.randn(2, 2, 4, 5, 6, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = stage(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), plain(x), rtol=0.05, atol=0.05)
    y.float().square().mean().backward()
    assert all(g.dtype == torch.float32 for g in take_gradients(stage))


@pytest.mark.usefixtures("kernels_on_any_device")
@pytest.mark.filterwarnings("ignore")  # the compiler imports modules that torch deprecates
def test_stage_compiles_to_one_graph(device: torch.device) -> None:
    # Without a GPU the interpreter cannot run below a code generator. The graph is the same.
    stage, _ = make_stage_and_modules(device)
    compiled = torch.compile(stage, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    x = torch.randn(2, 2, 4, 5, 6, device=device)
    torch.testing.assert_close(compiled(x), stage(x), rtol=1e-3, atol=1e-3)
    compiled(x).square().mean().backward()
    compiled_gradients = take_gradients(stage)
    stage(x).square().mean().backward()
    for actual, expected in zip(compiled_gradients, take_gradients(stage), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3)


def test_operation_passes_opcheck(device: torch.device) -> None:
    x, weight, bias, _ = random_inputs((2, 3, 2, 3, 4), device)
    x = x.contiguous(memory_format=CHANNELS_LAST)
    arguments = [t.requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(torch.ops.voxlane.norm_act.default, (*arguments, 1e-5, 0.01, None, None))


@needs_gpu
@pytest.mark.filterwarnings("ignore")  # a warning about the first run, which is on another stream than the recording
def test_cuda_graph_replay_gives_the_same_result(device: torch.device) -> None:
    x, weight, bias, dy = random_inputs((2, 32, 24, 24, 24), device, torch.bfloat16)
    arguments = [t.requires_grad_() for t in (x.contiguous(memory_format=CHANNELS_LAST), weight, bias)]

    def step() -> list[Tensor]:
        y = norm_act(*arguments, 1e-5, 0.01)  # type: ignore[call-arg, misc, arg-type]
        return [y, *torch.autograd.grad(y, arguments, dy)]

    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        first = step()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(first, replayed, strict=True))
