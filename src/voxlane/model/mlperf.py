"""The U-Net3D of MLPerf Training (image segmentation, KiTS19)."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from voxlane.model.layers import Head, Rise, Stage
from voxlane.model.norm import norm_and_act

FEATURES = (32, 64, 128, 256, 320, 320)
"""Channels at each resolution, finest first; the last is the bottleneck."""
DIVISORS = (32, 32, 32)
"""What each side of the input must be a multiple of: five halvings."""


class UNet3D(nn.Module):
    """The benchmark's network: two 3-cubed convolutions with instance norm and ReLU at each of six resolutions,
    halving by stride, doubling by 2-cubed transposed convolutions, skips concatenated; PyTorch's own initial weights.

    Input (batch, channels, z, y, x), each side a multiple of 32; output logits at the input's resolution, in training
    too. With one channel and three outputs it has 31,190,243 parameters: convolutions before a norm have no bias, the
    transposed ones and the last one do.

    `fused`: norm and ReLU by one kernel where there is one for the device; same parameters and results.
    """

    def __init__(self, channels: int, outputs: int, *, fused: bool = True) -> None:
        super().__init__()
        steps = list(itertools.pairwise(FEATURES))
        self.enter = pair(channels, FEATURES[0], 1, fused)
        self.down = nn.ModuleList(pair(fine, coarse, 2, fused) for fine, coarse in steps)
        self.up = nn.ModuleList(Rise(coarse, fine, 2, fused=fused) for fine, coarse in reversed(steps))
        self.merge = nn.ModuleList(pair(2 * fine, fine, 1, fused) for fine, _ in reversed(steps))
        self.head = Head(FEATURES[0], outputs, fused=fused)

    def forward(self, x_BCDHW: Tensor) -> Tensor:  # noqa: N803
        """Logits."""
        x = self.enter(x_BCDHW)
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(up(x), skips.pop())
        logits: Tensor = self.head(x)
        return logits


def pair(before: int, after: int, stride: int, fused: bool = True) -> Stage:
    """Two convolutions, the first of which has the stride."""
    return Stage(
        nn.Conv3d(before, after, 3, stride, 1, bias=False),
        *norm_and_act(nn.InstanceNorm3d(after, affine=True), 0.0, fused=fused),
        nn.Conv3d(after, after, 3, 1, 1, bias=False),
        *norm_and_act(nn.InstanceNorm3d(after, affine=True), 0.0, fused=fused),
    )
