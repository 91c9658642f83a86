"""The plan of a dataset: resampling, normalisation, and the network, patch and batch for training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import pydantic

from voxlane.settings import record

Triple = tuple[int, int, int]
Millimetres = Annotated[float, pydantic.Field(gt=0)]
Voxels = Annotated[int, pydantic.Field(ge=1)]
Norm = Literal["instance", "batch", "group"]
MAX_FEATURES = 320
"""Largest number of channels that nnU-Net gives a 3D network."""


@record
class Normalisation:
    """Normalisation of one channel's intensities."""

    scheme: Literal["ct", "zscore", "none"]
    """ct: clip to [lower, upper], subtract mean and divide by std, with the same values for all cases. zscore: use each
    case's own mean and standard deviation. none: leave unchanged."""
    lower: float = 0.0
    """ct: lower limit of clipping."""
    upper: float = 0.0
    """ct: upper limit of clipping."""
    mean: float = 0.0
    """ct: mean to subtract."""
    std: float = pydantic.Field(default=1.0, gt=0)
    """ct: standard deviation to divide by."""
    nonzero: bool = False
    """zscore: normalise only the scan's nonzero region and leave all other voxels 0; for scans with a blank background,
    such as skull-stripped brains."""


@record
class Network:
    """Architecture of a U-Net."""

    kind: Literal["unet", "mlperf"] = "unet"
    """unet: nnU-Net's plain convolutional U-Net with the fields below. mlperf: exactly the U-Net3D of MLPerf."""
    features: tuple[int, ...] = (32, 64, 128, 256, 320)
    """Channels at each resolution, finest first."""
    strides: tuple[Triple, ...] = ((1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 2, 2))
    """Strides (z, y, x) of the first convolution at each resolution."""
    kernels: tuple[Triple, ...] = ((3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3))
    """Convolution kernels (z, y, x) at each resolution."""
    convs: int = pydantic.Field(default=2, ge=1)
    """Convolutions at each resolution of the encoder and of the decoder."""
    norm: Norm = "instance"
    """Normalisation after each convolution: instance (as in nnU-Net), batch (over a device's own patches) or group (of
    about 8 channels)."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Network:
        if not len(self.features) == len(self.strides) == len(self.kernels):
            raise ValueError("features, strides and kernels: expected one entry per resolution in each")
        return self


@record
class Plan:
    """Everything that preparation, training and prediction must agree on."""

    recipe: str = "auto"
    """auto: derived from the fingerprint, as in nnU-Net; mlperf-kits19: the constants of that benchmark."""
    spacing: tuple[Millimetres, Millimetres, Millimetres]
    """Millimetres between voxels (z, y, x) after resampling."""
    normalisation: tuple[Normalisation, ...]
    """Normalisation of each channel."""
    patch: tuple[Voxels, Voxels, Voxels]
    """Voxels of a training patch and of a sliding window (z, y, x)."""
    batch: int = pydantic.Field(ge=1)
    """Patches in one training step, over all ranks."""
    network: Network
    """Network for this patch."""
    batch_dice: bool = False
    """Whether the Dice loss is computed over the whole batch, as suits patches that are small parts of large scans."""
    pad_to_patch: bool = False
    """mlperf-kits19: whether preparation pads volumes that are smaller than the patch to its size."""


def to_triple(values: Iterable[int]) -> Triple:
    """Return exactly three values as a tuple of integers."""
    z, y, x = (int(value) for value in values)
    return z, y, x
