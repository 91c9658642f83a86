"""Construction of the network that a plan specifies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from voxlane.errors import ConfigError
from voxlane.model import mlperf_unet, unet

if TYPE_CHECKING:
    from voxlane.volume.plan import Network, Triple


def build(
    network: Network, channels: int, outputs: int, deep_supervision: bool = True, *, fused: bool = True
) -> nn.Module:
    """Build the network with initial weights from torch's random state.

    deep_supervision: has no effect on MLPerf's network, which lacks it.
    fused: use our kernels where supported.
    """
    if network.kind == "mlperf":
        return mlperf_unet.UNet3D(channels, outputs, fused=fused)
    return unet.UNet(channels, outputs, network, deep_supervision=deep_supervision, fused=fused)


def patch_divisors(network: Network) -> Triple:
    """Return the numbers (z, y, x) that the sides of a patch must be multiples of."""
    return mlperf_unet.DIVISORS if network.kind == "mlperf" else unet.patch_divisors(network.strides)


def check_patch(network: Network, patch: Triple) -> None:
    """Raise ConfigError unless the network supports this patch: each side is a multiple of its divisor, and the
    coarsest resolution has more than one voxel, because instance norm would otherwise divide by zero."""
    needed = patch_divisors(network)
    for axis, size, divisor in zip("zyx", patch, needed, strict=True):
        if size < divisor or size % divisor:
            near = [n for n in (size // divisor * divisor, (size // divisor + 1) * divisor) if n]
            fix = f"Use {' or '.join(str(n) for n in near)}"
            raise ConfigError(
                f"patch: {size} along {axis} is not a multiple of {divisor}, as the strides need", fix=fix
            )
    if patch == needed:
        raise ConfigError(
            f"patch: {list(patch)} leaves one voxel at the coarsest resolution",
            fix="Use a patch twice as large along one axis, or fewer strides",
        )
