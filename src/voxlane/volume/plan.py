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
NNUNET_RECIPE = "nnunet"
"""Recipe of plans that were imported from nnU-Net."""


@record
class Normalisation:
    """Normalisation of one channel's intensities."""

    scheme: Literal["ct", "zscore", "rescale", "none"]
    """ct: clip to [lower, upper], subtract mean and divide by std, with the same values for all cases. zscore: use each
    case's own mean and standard deviation. rescale: map each case's own range to 0..1. none: leave unchanged."""
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

    kind: Literal["unet", "residual", "mlperf"] = "unet"
    """unet: nnU-Net's plain convolutional U-Net with the fields below. residual: the same with nnU-Net's residual
    encoder. mlperf: exactly the U-Net3D of MLPerf."""
    features: tuple[int, ...] = (32, 64, 128, 256, 320)
    """Channels at each resolution, finest first."""
    strides: tuple[Triple, ...] = ((1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 2, 2))
    """Strides (z, y, x) of the first convolution at each resolution."""
    kernels: tuple[Triple, ...] = ((3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3))
    """Convolution kernels (z, y, x) at each resolution."""
    convs: int = pydantic.Field(default=2, ge=1)
    """Convolutions at each resolution of the encoder and of the decoder."""
    encoder_convs: tuple[int, ...] | None = None
    """Convolutions at each resolution of the encoder, finest first, if they differ; residual: blocks of two."""
    decoder_convs: tuple[int, ...] | None = None
    """Convolutions at each resolution of the decoder, finest first, if they differ."""
    norm: Norm = "instance"
    """Normalisation after each convolution: instance (as in nnU-Net), batch (over a device's own patches) or group (of
    about 8 channels)."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Network:
        if not len(self.features) == len(self.strides) == len(self.kernels):
            raise ValueError("features, strides and kernels: expected one entry per resolution in each")
        for name, counts, levels in (
            ("encoder_convs", self.encoder_convs, len(self.features)),
            ("decoder_convs", self.decoder_convs, len(self.features) - 1),
        ):
            if counts is not None and (len(counts) != levels or min(counts, default=1) < 1):
                raise ValueError(f"{name}: expected {levels} numbers above 0, one per resolution, got {list(counts)}")
        return self


@record
class Resampling:
    """Interpolation of scans to the plan's grid."""

    order: Literal[0, 1, 3] = 3
    """Order of the splines: 3 cubic, 1 linear, 0 the nearest voxel."""
    separate: bool = True
    """Whether slices along the coarse axis of an anisotropic grid are not interpolated: the nearest one is taken. This
    applies to the network's outputs too."""


@record
class Plan:
    """Everything that preparation, training and prediction must agree on."""

    recipe: str = "auto"
    """auto: derived from the fingerprint, as in nnU-Net; mlperf-kits19: the constants of that benchmark; nnunet:
    imported from nnU-Net, whose rounding prediction reproduces."""
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
    resampling: Resampling = Resampling()
    """Interpolation between a scan's grid and the plan's."""
    axes: Literal["anatomical", "stored"] = "anatomical"
    """Axes that the network sees: anatomical, so that z, y and x run to the superior, anterior and right; or stored, as
    in each scan's file, which models of nnU-Net are trained on. Prepared datasets have anatomical axes."""
    pad_to_patch: bool = False
    """mlperf-kits19: whether preparation pads volumes that are smaller than the patch to its size."""


def to_triple(values: Iterable[int]) -> Triple:
    """Return exactly three values as a tuple of integers."""
    z, y, x = (int(value) for value in values)
    return z, y, x
