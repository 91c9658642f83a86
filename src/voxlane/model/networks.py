"""The networks that a plan can specify: nnU-Net's U-Nets, plain or with a residual encoder, and the U-Net3D of MLPerf
Training."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from voxlane.errors import ConfigError
from voxlane.model.layers import ConvStage, FinalConv, UpConv, make_norm_and_act

if TYPE_CHECKING:  # networks can be built without the dependencies of a plan
    from voxlane.volume.plan import Network, Norm, Triple

SLOPE = 0.01
"""Slope of nnU-Net's leaky ReLU below zero."""
_NO_ACTIVATION = 1.0
"""Slope of a leaky ReLU that changes nothing."""
MLPERF_FEATURES = (32, 64, 128, 256, 320, 320)
"""Channels of MLPerf's network at each resolution, finest first; the last is the bottleneck."""


def build(
    network: Network, channels: int, outputs: int, deep_supervision: bool = True, *, fused: bool = True
) -> nn.Module:
    """Build the network with initial weights from torch's random state.

    deep_supervision: has no effect on MLPerf's network, which lacks it.
    fused: use our kernels where supported.
    """
    if network.kind == "mlperf":
        return UNet3D(channels, outputs, fused=fused)
    return UNet(channels, outputs, network, deep_supervision=deep_supervision, fused=fused)


def check_patch(network: Network, patch: Triple) -> None:
    """Raise ConfigError unless the network supports this patch: each side is a multiple of its divisor, and the
    coarsest resolution has more than one voxel, because instance norm would otherwise divide by zero."""
    divisors = patch_divisors(network)
    for axis, size, divisor in zip("zyx", patch, divisors, strict=True):
        if size < divisor or size % divisor:
            near = [n for n in (size // divisor * divisor, (size // divisor + 1) * divisor) if n]
            fix = f"Use {' or '.join(str(n) for n in near)}"
            raise ConfigError(
                f"patch: {size} along {axis} is not a multiple of {divisor}, as the strides need", fix=fix
            )
    if patch == divisors:
        raise ConfigError(
            f"patch: {list(patch)} leaves one voxel at the coarsest resolution",
            fix="Use a patch twice as large along one axis, or fewer strides",
        )


def patch_divisors(network: Network) -> Triple:
    """Return the numbers (z, y, x) that the sides of a patch must be multiples of: the products of the strides."""
    strides = ((2, 2, 2),) * (len(MLPERF_FEATURES) - 1) if network.kind == "mlperf" else network.strides
    z, y, x = (math.prod(stride[axis] for stride in strides) for axis in range(3))
    return z, y, x


def count_convs(network: Network) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of convolutions (residual blocks) at each resolution of encoder and decoder, finest first."""
    levels = len(network.features)
    return network.encoder_convs or (network.convs,) * levels, network.decoder_convs or (network.convs,) * (levels - 1)


class UNet(nn.Module):
    """nnU-Net's network: convolutions with norm and leaky ReLU, strided downsampling, transposed upsampling and
    concatenated skips. With a network of kind residual, the encoder consists of residual blocks.

    Input (batch, channels, z, y, x), each side a multiple of the product of the network's strides along it. The output
    in training mode with deep supervision is a list of logits from the finest resolution to the coarsest; otherwise one
    tensor of logits at the input's resolution.

    nnU-Net also has a head at the coarsest decoder resolution, with weight zero. It is omitted here, which trains the
    same network and leaves no parameter without a gradient, for which distributed training would wait.

    fused: compute instance norm and leaky ReLU by one kernel where supported, with the same parameters and results.
    """

    def __init__(
        self, channels: int, outputs: int, network: Network, *, deep_supervision: bool = True, fused: bool = True
    ) -> None:
        super().__init__()
        self.deep_supervision = deep_supervision
        features, kernels, strides = network.features, network.kernels, network.strides
        is_residual = network.kind == "residual"
        entering = (features[0] if is_residual else channels, *features[:-1])
        make_down = make_residual_stage if is_residual else make_stage
        convs_down, convs_up = count_convs(network)
        levels = zip(entering, features, convs_down, kernels, strides, strict=True)
        down = [make_down(*level, network.norm, fused) for level in levels]
        if is_residual:
            down[0].insert(0, make_stage(channels, features[0], 1, kernels[0], (1, 1, 1), network.norm, fused))
        self.down = nn.ModuleList(down)
        # Coarse to fine, in the order of computation.
        decoder_levels = range(len(features) - 2, -1, -1)
        self.up = nn.ModuleList(
            UpConv(features[i + 1], features[i], strides[i + 1], fused=fused) for i in decoder_levels
        )
        self.merge = nn.ModuleList(
            make_stage(2 * features[i], features[i], convs_up[i], kernels[i], (1, 1, 1), network.norm, fused)
            for i in decoder_levels
        )
        # Finest first, so that heads.0 makes predictions whether or not the others exist.
        supervised = max(1, len(features) - 2) if deep_supervision else 1
        self.heads = nn.ModuleList(FinalConv(features[i], outputs, fused=fused) for i in range(supervised))
        self.apply(init_weights)
        for module in self.modules():
            if isinstance(module, ResidualBlock):
                module.close()
        self.register_load_state_dict_pre_hook(drop_missing_heads)  # type: ignore[no-untyped-call]

    def forward(self, x_BCDHW: Tensor) -> Tensor | list[Tensor]:  # noqa: N803
        """Return logits; see the class."""
        x = x_BCDHW
        skips: list[Tensor] = []
        for down in self.down:
            x = down(x)
            skips.append(x)
        skips.pop()
        all_heads = self.training and self.deep_supervision
        logits: list[Tensor] = []
        for up, merge in zip(self.up, self.merge, strict=True):
            level = len(skips) - 1
            x = merge(up(x), skips.pop())
            if level == 0 or (all_heads and level < len(self.heads)):
                logits.append(self.heads[level](x))
        return logits[::-1] if all_heads else logits[-1]


class UNet3D(nn.Module):
    """The network of MLPerf Training (image segmentation, KiTS19): two 3-cubed convolutions with instance norm and
    ReLU at each of six resolutions, halving by stride, doubling by 2-cubed transposed convolutions, concatenated skips,
    and PyTorch's initial weights.

    Input (batch, channels, z, y, x), each side a multiple of 32; output logits at the input's resolution, in training
    too. With one channel and three outputs it has 31,190,243 parameters: convolutions before a norm have no bias, but
    the transposed ones and the last one have.

    fused: compute norm and ReLU by one kernel where supported, with the same parameters and results.
    """

    def __init__(self, channels: int, outputs: int, *, fused: bool = True) -> None:
        super().__init__()
        steps = list(itertools.pairwise(MLPERF_FEATURES))
        stage = functools.partial(make_stage, convs=2, kernel=(3, 3, 3), fused=fused, bias=False, slope=0.0)
        self.enter = stage(channels, MLPERF_FEATURES[0], stride=(1, 1, 1))
        self.down = nn.ModuleList(stage(fine, coarse, stride=(2, 2, 2)) for fine, coarse in steps)
        self.up = nn.ModuleList(UpConv(coarse, fine, 2, fused=fused) for fine, coarse in reversed(steps))
        self.merge = nn.ModuleList(stage(2 * fine, fine, stride=(1, 1, 1)) for fine, _ in reversed(steps))
        self.head = FinalConv(MLPERF_FEATURES[0], outputs, fused=fused)

    def forward(self, x_BCDHW: Tensor) -> Tensor:  # noqa: N803
        """Return logits."""
        x = self.enter(x_BCDHW)
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(up(x), skips.pop())
        logits: Tensor = self.head(x)
        return logits


def make_stage(
    before: int,
    after: int,
    convs: int,
    kernel: Triple,
    stride: Triple,
    norm: Norm = "instance",
    fused: bool = True,
    *,
    bias: bool = True,
    slope: float = SLOPE,
) -> ConvStage:
    """Build the convolutions of one resolution, the first with the stride."""
    layers: list[nn.Module] = []
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    for i in range(convs):
        layers += [
            nn.Conv3d(before if i == 0 else after, after, kernel, stride if i == 0 else 1, padding, bias=bias),
            *make_norm_and_act(make_norm(norm, after), slope, fused=fused),
        ]
    return ConvStage(*layers)


class ResidualBlock(nn.Module):
    """nnU-Net's residual block: two convolutions, the first with the stride, beside a skip connection that averages
    over the stride and changes the number of channels if needed."""

    def __init__(self, before: int, after: int, kernel: Triple, stride: Triple, norm: Norm, fused: bool) -> None:
        super().__init__()
        stage = functools.partial(make_stage, after=after, convs=1, norm=norm, fused=fused)
        unit = (1, 1, 1)
        self.first = stage(before, kernel=kernel, stride=stride)
        self.second = stage(after, kernel=kernel, stride=unit, slope=_NO_ACTIVATION)
        self.pool = nn.AvgPool3d(stride, stride) if stride != unit else nn.Identity()
        projected = before != after
        self.skip = stage(before, kernel=unit, stride=unit, bias=False, slope=_NO_ACTIVATION) if projected else None

    def close(self) -> None:
        """Let the block start as its skip connection, as in nnU-Net."""
        scale = self.second[1].weight
        assert isinstance(scale, Tensor)
        nn.init.zeros_(scale)

    def forward(self, x_BCDHW: Tensor) -> Tensor:  # noqa: N803
        """Return the block's output."""
        skip = self.pool(x_BCDHW)
        if self.skip is not None:
            skip = self.skip(skip)
        return functional.leaky_relu_(self.second(self.first(x_BCDHW)) + skip, SLOPE)


def make_residual_stage(
    before: int, after: int, blocks: int, kernel: Triple, stride: Triple, norm: Norm = "instance", fused: bool = True
) -> nn.Sequential:
    """Build the residual blocks of one resolution, the first with the stride."""
    first = ResidualBlock(before, after, kernel, stride, norm, fused)
    others = (ResidualBlock(after, after, kernel, (1, 1, 1), norm, fused) for _ in range(blocks - 1))
    return nn.Sequential(first, *others)


def make_norm(norm: Norm, features: int) -> nn.Module:
    """Build the normalisation of `features` channels."""
    if norm == "batch":
        return nn.BatchNorm3d(features)
    if norm == "group":
        groups = max(1, features // 8)
        return nn.GroupNorm(math.gcd(groups, features), features)
    return nn.InstanceNorm3d(features, affine=True)


def init_weights(module: nn.Module) -> None:
    """Initialise convolutions with He-normal weights for a leaky ReLU and zero biases, as in nnU-Net."""
    if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
        nn.init.kaiming_normal_(module.weight, a=SLOPE)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def drop_missing_heads(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a network without deep supervision load the weights of a network trained with it."""
    assert isinstance(module, UNet)
    if not module.deep_supervision:
        own = tuple(f"{prefix}heads.{i}." for i in range(len(module.heads)))
        for key in [key for key in state if key.startswith(f"{prefix}heads.") and not key.startswith(own)]:
            del state[key]
