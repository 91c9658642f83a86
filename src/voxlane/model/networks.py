"""The network that a plan asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from voxlane.errors import ConfigError
from voxlane.model import mlperf, unet

if TYPE_CHECKING:
    from voxlane.volume.plan import Network, Triple


def build(
    network: Network, channels: int, outputs: int, deep_supervision: bool = True, *, fused: bool = True
) -> nn.Module:
    """The network with fresh weights from torch's random state. MLPerf's has no deep supervision: the choice is then
    without effect. `fused`: whether it takes our kernels where they run."""
    if network.kind == "mlperf":
        return mlperf.UNet3D(channels, outputs, fused=fused)
    return unet.UNet(channels, outputs, network, deep_supervision=deep_supervision, fused=fused)


def divisors(network: Network) -> Triple:
    """What each side of a patch must be a multiple of (z, y, x)."""
    return mlperf.DIVISORS if network.kind == "mlperf" else unet.divisors(network.strides)


def check_patch(network: Network, patch: Triple) -> None:
    """Raise ConfigError unless the network takes this patch: each side a multiple of its divisor, and more than one
    voxel left at the coarsest resolution, where instance norm would otherwise divide by a spread of zero."""
    needed = divisors(network)
    for axis, size, divisor in zip("zyx", patch, needed, strict=True):
        if size < divisor or size % divisor:
            near = [n for n in (size // divisor * divisor, (size // divisor + 1) * divisor) if n]
            fix = f"Take {' or '.join(str(n) for n in near)}"
            raise ConfigError(
                f"patch: {size} along {axis} is no multiple of {divisor}, which the strides need", fix=fix
            )
    if patch == needed:
        raise ConfigError(
            f"patch: {list(patch)} leaves one voxel at the coarsest resolution",
            fix="Take a patch twice as large along one axis, or fewer strides",
        )
