"""The U-Net3D of MLPerf Training (image segmentation, KiTS19)."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from voxlane.model.layers import ConvStage, FinalConv, UpConv
from voxlane.model.norm import make_norm_and_act

FEATURES = (32, 64, 128, 256, 320, 320)
"""Channels at each resolution, finest first; the last is the bottleneck."""
DIVISORS = (32, 32, 32)
"""Numbers that the sides of the input must be multiples of, for five halvings."""


class UNet3D(nn.Module):
    """The benchmark's network: two 3-cubed convolutions with instance norm and ReLU at each of six resolutions,
    halving by stride, doubling by 2-cubed transposed convolutions, concatenated skips, and PyTorch's initial weights.

    Input (batch, channels, z, y, x), each side a multiple of 32; output logits at the input's resolution, in training
    too. With one channel and three outputs it has 31,190,243 parameters: convolutions before a norm have no bias, but
    the transposed ones and the last one have.

    fused: compute norm and ReLU by one kernel where supported, with the same parameters and results.
    """

    def __init__(self, channels: int, outputs: int, *, fused: bool = True) -> None:
        super().__init__()
        steps = list(itertools.pairwise(FEATURES))
        self.enter = make_conv_pair(channels, FEATURES[0], 1, fused)
        self.down = nn.ModuleList(make_conv_pair(fine, coarse, 2, fused) for fine, coarse in steps)
        self.up = nn.ModuleList(UpConv(coarse, fine, 2, fused=fused) for fine, coarse in reversed(steps))
        self.merge = nn.ModuleList(make_conv_pair(2 * fine, fine, 1, fused) for fine, _ in reversed(steps))
        self.head = FinalConv(FEATURES[0], outputs, fused=fused)

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


def make_conv_pair(before: int, after: int, stride: int, fused: bool = True) -> ConvStage:
    """Build two convolutions, the first with the stride."""
    return ConvStage(
        nn.Conv3d(before, after, 3, stride, 1, bias=False),
        *make_norm_and_act(nn.InstanceNorm3d(after, affine=True), 0.0, fused=fused),
        nn.Conv3d(after, after, 3, 1, 1, bias=False),
        *make_norm_and_act(nn.InstanceNorm3d(after, affine=True), 0.0, fused=fused),
    )
