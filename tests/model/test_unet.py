"""The networks: shapes, parameter counts, heads, initial weights, and errors about wrong patches."""

from __future__ import annotations

import itertools
import logging
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from voxlane.errors import ConfigError
from voxlane.model import networks
from voxlane.model.kernels import support
from voxlane.model.layers import InstanceNormAct, make_norm_and_act
from voxlane.model.networks import SLOPE, UNet, UNet3D
from voxlane.volume.plan import Network

SMALL = Network(
    features=(4, 8, 12, 12),
    strides=((1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 2)),
    kernels=((1, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3)),
)


NNUNET_PARAMETERS = 31_196_399
MLPERF_PARAMETERS = 31_190_243


def count_parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_training_returns_all_heads_and_evaluation_the_first() -> None:
    network = UNet(2, 3, SMALL)
    image = torch.randn(2, 2, 8, 16, 24)
    heads = network(image)
    assert [tuple(h.shape) for h in heads] == [(2, 3, 8, 16, 24), (2, 3, 8, 8, 12)]
    with torch.no_grad():
        logits = network.eval()(image)
    assert isinstance(logits, Tensor)
    torch.testing.assert_close(logits, heads[0].detach())


def test_every_parameter_gets_a_gradient() -> None:
    # Distributed training would otherwise wait for gradients that never arrive.
    for deep in (True, False):
        network = UNet(1, 2, SMALL, deep_supervision=deep)
        out = network(torch.randn(1, 1, 8, 16, 16))
        heads = out if isinstance(out, list) else [out]
        assert len(heads) == (2 if deep else 1)
        sum(h.square().mean() for h in heads).backward()
        assert all(p.grad is not None for p in network.parameters())


def test_weights_trained_with_deep_supervision_load_without_it() -> None:
    trained, plain = UNet(1, 2, SMALL), UNet(1, 2, SMALL, deep_supervision=False)
    plain.load_state_dict(trained.state_dict())
    image = torch.randn(1, 1, 8, 16, 16)
    torch.testing.assert_close(plain.train()(image), trained.eval()(image))
    with pytest.raises(RuntimeError, match=r"heads\.1"):
        trained.load_state_dict(plain.state_dict())


def test_parameter_count_matches_nnunet() -> None:
    # nnU-Net's PlainConvUNet of this shape has 31,196,399 parameters, 963 of them in the head with weight zero.
    features = (32, 64, 128, 256, 320, 320)
    strides = ((1, 1, 1), *[(2, 2, 2)] * 5)
    network = Network(features=features, strides=strides, kernels=((3, 3, 3),) * 6)
    with torch.device("meta"):
        assert count_parameters(UNet(1, 3, network)) == NNUNET_PARAMETERS - (features[4] * 3 + 3)


def test_initial_weights_follow_he() -> None:
    torch.manual_seed(0)
    network = UNet(1, 2, Network(features=(32, 64), strides=((1, 1, 1), (2, 2, 2)), kernels=((3, 3, 3),) * 2))
    gain = math.sqrt(2 / (1 + SLOPE**2))
    for module in network.modules():
        if isinstance(module, nn.Conv3d) and module.weight.numel() > 10_000:
            fan_in = module.in_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(gain / math.sqrt(fan_in), rel=0.03)
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            assert module.bias is not None
            assert not module.bias.any()


def test_parameter_count_matches_mlperf() -> None:
    # The sum follows the definition of the benchmark: each convolution has 27 weights per pair of channels, no bias,
    # and 2 norm parameters per channel. Each transposed convolution has 8 weights per pair and a bias.
    widths = [32, 64, 128, 256, 320, 320]

    def conv(a: int, b: int) -> int:
        return 27 * a * b + 2 * b

    expected = conv(1, 32) + conv(32, 32)
    for fine, coarse in itertools.pairwise(widths):
        expected += conv(fine, coarse) + conv(coarse, coarse)
        expected += 8 * coarse * fine + fine + conv(2 * fine, fine) + conv(fine, fine)
    expected += 32 * 3 + 3
    with torch.device("meta"):
        network = UNet3D(1, 3)
    assert count_parameters(network) == expected == MLPERF_PARAMETERS


def test_mlperf_keeps_the_input_resolution() -> None:
    network = UNet3D(1, 3)
    with torch.device("meta"):
        network = network.to("meta")
        assert network(torch.empty(1, 1, 128, 128, 128)).shape == (1, 3, 128, 128, 128)


def test_build_follows_the_plan() -> None:
    with torch.device("meta"):
        assert isinstance(networks.build(Network(kind="mlperf"), 1, 3, True), UNet3D)
        result = networks.build(SMALL, 1, 3, False)
    assert isinstance(result, UNet)
    assert not result.deep_supervision


def test_patch_not_divisible_by_strides_is_rejected() -> None:
    networks.check_patch(SMALL, (8, 16, 16))
    assert networks.patch_divisors(Network(kind="mlperf")) == (32, 32, 32)
    with pytest.raises(ConfigError, match=r"patch: 20 along y is not a multiple of 8.*Use 16 or 24"):
        networks.check_patch(SMALL, (8, 20, 16))
    with pytest.raises(ConfigError, match=r"patch: 2 along z.*Use 4"):
        networks.check_patch(SMALL, (2, 16, 16))
    with pytest.raises(ConfigError, match="one voxel"):
        networks.check_patch(SMALL, (4, 8, 8))


def test_fused_and_plain_networks_are_interchangeable() -> None:
    # Old checkpoints use the names of the plain network, and a seed gives both networks the same weights.
    for kind in (SMALL, Network(kind="mlperf")):
        built_networks = []
        for fused in (True, False):
            torch.manual_seed(0)
            built_networks.append(networks.build(kind, 1, 3, fused=fused))
        fused_network, plain = built_networks
        assert any(isinstance(m, InstanceNormAct) for m in fused_network.modules())
        assert not any(isinstance(m, InstanceNormAct) for m in plain.modules())
        assert list(fused_network.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in fused_network.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert all(
            torch.equal(a, b)
            for a, b in zip(fused_network.state_dict().values(), plain.state_dict().values(), strict=True)
        )
    fused_network, plain = (networks.build(SMALL, 1, 3, fused=fused) for fused in (True, False))
    plain.load_state_dict(fused_network.state_dict())
    image = torch.randn(1, 1, 8, 16, 16)
    for head, expected in zip(fused_network(image), plain(image), strict=True):
        assert torch.equal(head, expected)


def test_parameter_names_in_a_checkpoint() -> None:
    names = list(networks.build(SMALL, 1, 3).state_dict())
    assert names[:8] == [f"down.0.{i}.{kind}" for i in (0, 1, 3, 4) for kind in ("weight", "bias")]
    with torch.device("meta"):
        names = list(UNet3D(1, 3).state_dict())
    assert names[:6] == [
        f"enter.{name}" for name in ("0.weight", "1.weight", "1.bias", "3.weight", "4.weight", "4.bias")
    ]


@pytest.mark.parametrize("slope", [0.0, 0.01])
def test_norm_without_kernel_matches_pytorch(slope: float) -> None:
    x = torch.randn(2, 4, 3, 4, 5, requires_grad=True)
    fused_norm = InstanceNormAct(4, slope=slope)
    plain = nn.Sequential(*make_norm_and_act(nn.InstanceNorm3d(4, affine=True), slope, fused=False))
    assert torch.equal(fused_norm(x), plain(x))
    assert torch.equal(fused_norm(x[0]), plain(x[0]))
    bias = torch.randn(4, requires_grad=True)
    torch.testing.assert_close(fused_norm(x, omitted_bias=bias), plain(x))
    fused_norm(x, omitted_bias=bias).sum().backward()
    assert bias.grad is not None
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        fused_norm(torch.ones(1, 4, 1, 1, 1))
    with pytest.raises(ValueError, match="num_features"):
        fused_norm(torch.ones(1, 3, 2, 2, 2))
    tracking = InstanceNormAct(4, slope=slope, track_running_stats=True)
    tracking(x)
    assert tracking.running_mean is not None
    assert tracking.running_mean.any()
    assert isinstance(make_norm_and_act(nn.BatchNorm3d(4), slope, fused=True)[0], nn.BatchNorm3d)


def test_unsupported_gpu_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(support, "unsupported_reason", lambda index: "Triton is not installed (pip install triton)")
    support._check_and_warn.cache_clear()
    with caplog.at_level(logging.WARNING, "voxlane"):
        assert not support._is_device_supported(0)
        assert not support._is_device_supported(0)
    support._check_and_warn.cache_clear()
    (message,) = caplog.messages
    assert "cuda:0" in message
    assert "pip install triton" in message


def test_networks_and_loss_need_only_torch() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('pydantic', 'numpy', 'triton'));"
        "from voxlane.model import loss, networks;"
        "networks.make_stage(1, 2, 1, (3, 3, 3), (1, 1, 1)); loss.DiceCE(False, target_values=[(1,)])"
    )
    process = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


RESIDUAL = Network(
    kind="residual",
    features=SMALL.features,
    strides=SMALL.strides,
    kernels=SMALL.kernels,
    encoder_convs=(1, 2, 3, 2),
    decoder_convs=(2, 1, 1),
)


def test_residual_network() -> None:
    network = networks.build(RESIDUAL, 2, 3)
    assert isinstance(network, UNet)
    heads = network(torch.randn(1, 2, 8, 16, 16))
    assert [tuple(head.shape) for head in heads] == [(1, 3, 8, 16, 16), (1, 3, 8, 8, 8)]
    sum(head.square().mean() for head in heads).backward()
    assert all(p.grad is not None for p in network.parameters())
    assert [len(stage) for stage in network.down] == [2, 2, 3, 2], "the first level begins with a convolution"
    assert [len(stage) // 3 for stage in network.merge] == [1, 1, 2], "coarse to fine"


def test_new_residual_block_is_its_skip_connection() -> None:
    block = networks.build(RESIDUAL, 1, 2).down[1][1]  # type: ignore[union-attr,index]
    x = torch.randn(1, RESIDUAL.features[1], 4, 4, 4)
    torch.testing.assert_close(block(x), nn.functional.leaky_relu(x, SLOPE))  # type: ignore[operator]


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_fused_residual_network_equals_the_plain_one(norm: str) -> None:
    fused, plain = (networks.build(replace(RESIDUAL, norm=norm), 1, 2, False, fused=fused) for fused in (True, False))
    for parameter in fused.parameters():
        nn.init.normal_(parameter)
    plain.load_state_dict(fused.state_dict())
    image = torch.randn(2, 1, 8, 16, 16)
    torch.testing.assert_close(fused(image), plain(image))


@pytest.mark.parametrize("counts", [{"encoder_convs": (1, 2)}, {"decoder_convs": (1, 1, 0)}])
def test_one_number_of_convolutions_per_resolution(counts: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"expected . numbers above 0, one per resolution"):
        replace(SMALL, **counts)
