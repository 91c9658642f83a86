"""The plan: how a dataset's scans are resampled and normalised, and the network, patch and batch that suit them."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from voxlane.settings import record

Triple = tuple[int, int, int]
Millimetres = Annotated[float, pydantic.Field(gt=0)]
Voxels = Annotated[int, pydantic.Field(ge=1)]
Norm = Literal["instance", "batch", "group"]


@record
class Normalisation:
    """How one channel's intensities become the network's input."""

    scheme: Literal["ct", "zscore", "none"]
    """ct: clip to [lower, upper], subtract mean, divide by std, the same for every case. zscore: each case by its own
    mean and standard deviation. none: as they are."""
    lower: float = 0.0
    """ct: smallest value kept."""
    upper: float = 0.0
    """ct: largest value kept."""
    mean: float = 0.0
    """ct: subtracted."""
    std: float = pydantic.Field(default=1.0, gt=0)
    """ct: divided by."""
    nonzero: bool = False
    """zscore: mean and standard deviation of the scan's nonzero region alone, outside of which voxels stay 0; for scans
    with their surroundings blanked, such as brains without their skulls."""


@record
class Network:
    """A U-Net's shape."""

    kind: Literal["unet", "mlperf"] = "unet"
    """unet: nnU-Net's plain convolutional U-Net of the fields below. mlperf: the U-Net3D of MLPerf, exactly."""
    features: tuple[int, ...] = (32, 64, 128, 256, 320)
    """Channels at each resolution, finest first."""
    strides: tuple[Triple, ...] = ((1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 2, 2))
    """Of the first convolution at each resolution (z, y, x)."""
    kernels: tuple[Triple, ...] = ((3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3))
    """Convolution kernels at each resolution (z, y, x)."""
    convs: int = pydantic.Field(default=2, ge=1)
    """Convolutions at each resolution, on the way down and on the way up."""
    norm: Norm = "instance"
    """What follows each convolution: instance (nnU-Net's), batch (over a device's own patches) or group (of 8 channels
    or so)."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Network:
        if not len(self.features) == len(self.strides) == len(self.kernels):
            raise ValueError("features, strides and kernels need one entry a resolution each")
        return self


@record
class Plan:
    """Everything that preparation, training and prediction must agree on."""

    recipe: str = "auto"
    """auto: made from the fingerprint, as nnU-Net does; mlperf-kits19: the constants of that benchmark."""
    spacing: tuple[Millimetres, Millimetres, Millimetres]
    """Millimetres between voxels (z, y, x) after resampling."""
    normalisation: tuple[Normalisation, ...]
    """One a channel."""
    patch: tuple[Voxels, Voxels, Voxels]
    """Voxels of a training patch and of a sliding window (z, y, x)."""
    batch: int = pydantic.Field(ge=1)
    """Patches in one training step, over all ranks."""
    network: Network
    """The network that suits this patch."""
    batch_dice: bool = False
    """Whether the Dice loss counts over the batch as one, as suits patches that hold small parts of large scans."""
    pad_to_patch: bool = False
    """mlperf-kits19: volumes smaller than the patch are padded to it when they are prepared."""
