"""nnU-Net's plain convolutional U-Net, built from a plan's Network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from voxlane.model.layers import ConvStage, FinalConv, UpConv
from voxlane.model.norm import make_norm_and_act

if TYPE_CHECKING:  # networks can be built without the dependencies of a plan
    from voxlane.volume.plan import Network, Norm, Triple

SLOPE = 0.01
"""Slope of the leaky ReLU below zero."""


class UNet(nn.Module):
    """Convolutions with norm and leaky ReLU, strided downsampling, transposed upsampling and concatenated skips.

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
        entering = (channels, *features[:-1])
        self.down = nn.ModuleList(
            make_stage(before, after, network.convs, kernel, stride, network.norm, fused)
            for before, after, kernel, stride in zip(entering, features, kernels, strides, strict=True)
        )
        # Coarse to fine, in the order of computation.
        decoder_levels = range(len(features) - 2, -1, -1)
        self.up = nn.ModuleList(
            UpConv(features[i + 1], features[i], strides[i + 1], fused=fused) for i in decoder_levels
        )
        self.merge = nn.ModuleList(
            make_stage(2 * features[i], features[i], network.convs, kernels[i], (1, 1, 1), network.norm, fused)
            for i in decoder_levels
        )
        # Finest first, so that heads.0 makes predictions whether or not the others exist.
        supervised = max(1, len(features) - 2) if deep_supervision else 1
        self.heads = nn.ModuleList(FinalConv(features[i], outputs, fused=fused) for i in range(supervised))
        self.apply(init_weights)
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


def make_stage(
    before: int, after: int, convs: int, kernel: Triple, stride: Triple, norm: Norm = "instance", fused: bool = True
) -> ConvStage:
    """Build the convolutions of one resolution, the first with the stride."""
    layers: list[nn.Module] = []
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    for i in range(convs):
        layers += [
            nn.Conv3d(before if i == 0 else after, after, kernel, stride if i == 0 else 1, padding),
            *make_norm_and_act(make_norm(norm, after), SLOPE, fused=fused),
        ]
    return ConvStage(*layers)


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


def patch_divisors(strides: Sequence[Triple]) -> Triple:
    """Return the numbers (z, y, x) that the sides of the input must be multiples of."""
    z, y, x = (math.prod(stride[axis] for stride in strides) for axis in range(3))
    return z, y, x
