"""nnU-Net's plain convolutional U-Net, built from a plan's Network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from voxlane.model.layers import Head, Rise, Stage
from voxlane.model.norm import norm_and_act

if TYPE_CHECKING:  # where a plan's own imports are not installed, networks are built all the same
    from voxlane.volume.plan import Network, Norm, Triple

SLOPE = 0.01
"""Of the leaky ReLU below zero."""


class UNet(nn.Module):
    """Convolutions with instance norm and leaky ReLU, strided down, transposed up, skips concatenated.

    Input (batch, channels, z, y, x), each side a multiple of the product of the network's strides there. In training
    mode with deep supervision: a list of logits, finest first, each at its own resolution, halved or so from one to the
    next. Otherwise one tensor of logits at the input's resolution.

    nnU-Net also has a head at the coarsest decoder resolution, and weighs it with zero; here it is left out, which
    trains the same network and leaves no parameter without a gradient for distributed training to wait for.

    `fused`: instance norm and leaky ReLU by one kernel where there is one for the device; same parameters and results.
    """

    def __init__(
        self, channels: int, outputs: int, network: Network, *, deep_supervision: bool = True, fused: bool = True
    ) -> None:
        super().__init__()
        self.deep_supervision = deep_supervision
        features, kernels, strides = network.features, network.kernels, network.strides
        entering = (channels, *features[:-1])
        self.down = nn.ModuleList(
            stage(before, after, network.convs, kernel, stride, network.norm, fused)
            for before, after, kernel, stride in zip(entering, features, kernels, strides, strict=True)
        )
        # Coarse to fine, in the order of computation.
        rising = range(len(features) - 2, -1, -1)
        self.up = nn.ModuleList(Rise(features[i + 1], features[i], strides[i + 1], fused=fused) for i in rising)
        self.merge = nn.ModuleList(
            stage(2 * features[i], features[i], network.convs, kernels[i], (1, 1, 1), network.norm, fused)
            for i in rising
        )
        # Finest first, so that heads.0 is the one that predicts whether or not the others exist.
        supervised = max(1, len(features) - 2) if deep_supervision else 1
        self.heads = nn.ModuleList(Head(features[i], outputs, fused=fused) for i in range(supervised))
        self.apply(initialise)
        self.register_load_state_dict_pre_hook(drop_missing_heads)  # type: ignore[no-untyped-call]

    def forward(self, x_BCDHW: Tensor) -> Tensor | list[Tensor]:  # noqa: N803
        """Logits; see the class."""
        x = x_BCDHW
        skips: list[Tensor] = []
        for down in self.down:
            x = down(x)
            skips.append(x)
        skips.pop()
        every = self.training and self.deep_supervision
        logits: list[Tensor] = []
        for up, merge in zip(self.up, self.merge, strict=True):
            level = len(skips) - 1
            x = merge(up(x), skips.pop())
            if level == 0 or (every and level < len(self.heads)):
                logits.append(self.heads[level](x))
        return logits[::-1] if every else logits[-1]


def stage(
    before: int, after: int, convs: int, kernel: Triple, stride: Triple, norm: Norm = "instance", fused: bool = True
) -> Stage:
    """The convolutions of one resolution, the first of which has the stride."""
    layers: list[nn.Module] = []
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    for i in range(convs):
        layers += [
            nn.Conv3d(before if i == 0 else after, after, kernel, stride if i == 0 else 1, padding),
            *norm_and_act(make_norm(norm, after), SLOPE, fused=fused),
        ]
    return Stage(*layers)


def make_norm(norm: Norm, features: int) -> nn.Module:
    """The normalisation of so many channels."""
    if norm == "batch":
        return nn.BatchNorm3d(features)
    if norm == "group":
        groups = max(1, features // 8)
        return nn.GroupNorm(math.gcd(groups, features), features)
    return nn.InstanceNorm3d(features, affine=True)


def initialise(module: nn.Module) -> None:
    """He's normal weights for a leaky ReLU and zero biases, as nnU-Net starts."""
    if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
        nn.init.kaiming_normal_(module.weight, a=SLOPE)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def drop_missing_heads(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a network without deep supervision load the weights of one trained with it."""
    assert isinstance(module, UNet)
    if not module.deep_supervision:
        own = {f"{prefix}heads.{i}." for i in range(len(module.heads))}
        heads = [key for key in state if key.startswith(f"{prefix}heads.")]
        for key in heads:
            if not any(key.startswith(name) for name in own):
                del state[key]


def divisors(strides: Sequence[Triple]) -> Triple:
    """What each side of the input must be a multiple of (z, y, x)."""
    z = y = x = 1
    for stride in strides:
        z, y, x = z * stride[0], y * stride[1], x * stride[2]
    return z, y, x
