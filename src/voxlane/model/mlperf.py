"""The U-Net3D of MLPerf Training (image segmentation, KiTS19)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

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
    """

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        steps = list(itertools.pairwise(FEATURES))
        self.enter = pair(channels, FEATURES[0], 1)
        self.down = nn.ModuleList(pair(fine, coarse, 2) for fine, coarse in steps)
        self.up = nn.ModuleList(nn.ConvTranspose3d(coarse, fine, 2, 2) for fine, coarse in reversed(steps))
        self.merge = nn.ModuleList(pair(2 * fine, fine, 1) for fine, _ in reversed(steps))
        self.head = nn.Conv3d(FEATURES[0], outputs, 1)

    def forward(self, x_BCDHW: Tensor) -> Tensor:  # noqa: N803
        """Logits."""
        x = self.enter(x_BCDHW)
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((up(x), skips.pop()), 1))
        logits: Tensor = self.head(x)
        return logits


def pair(before: int, after: int, stride: int) -> nn.Sequential:
    """Two convolutions, the first of which has the stride."""
    return nn.Sequential(
        nn.Conv3d(before, after, 3, stride, 1, bias=False),
        nn.InstanceNorm3d(after, affine=True),
        nn.ReLU(inplace=True),
        nn.Conv3d(after, after, 3, 1, 1, bias=False),
        nn.InstanceNorm3d(after, affine=True),
        nn.ReLU(inplace=True),
    )
