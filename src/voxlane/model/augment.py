"""Augmentation of a batch of patches on the training device.

The operations on a sample are drawn on the CPU from the sample's own seed (`draws`, a pure function). They then run on
the batch's device and read nothing back, so the CPU never waits for a GPU. An operation touches only the samples and
channels that drew it.

The order is nnU-Net's: rotation and scaling, noise, blur, brightness, contrast, low resolution, inverted gamma, gamma.
Mirroring, which nnU-Net does last, is done with the rotation; every other operation treats both directions of an axis
alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import torch

from voxlane.errors import ConfigError
from voxlane.model import transforms
from voxlane.model.kernels import support
from voxlane.settings import record
from voxlane.volume.plan import Triple

Probability = Annotated[float, pydantic.Field(ge=0, le=1)]
Positive = Annotated[float, pydantic.Field(gt=0)]
Range = tuple[float, float]
PositiveRange = tuple[Positive, Positive]

ANISOTROPY = 3.0
"""Ratio of longest to shortest side above which a patch is rotated, scaled and lowered in resolution only in the plane
of its two longer sides."""


@record
class AugmentSettings:
    """Operations on training patches, with probabilities and strengths. Ranges are (lowest, highest)."""

    preset: Literal["nnunet", "mlperf", "none"] = "nnunet"
    """nnunet: the fields below, with nnU-Net 2.8's defaults. mlperf: the MLPerf U-Net3D recipe (each axis mirrored with
    probability 1/3, brightness x 0.7 to 1.3 and noise up to 0.1 with probability 0.1 each). none: no augmentation."""
    strength: float = pydantic.Field(default=1.0, ge=0)
    """Factor for every probability, up to 1; for mirroring only below 1, because one half is the most random."""
    mirror_axes: tuple[Annotated[int, pydantic.Field(ge=0, le=2)], ...] = (0, 1, 2)
    """Axes that may be mirrored (0: z, 1: y, 2: x)."""
    mirror_p: Probability = 0.5
    """Probability of mirroring each axis, independently."""
    rotation_p: Probability = 0.2
    """Probability of a rotation about all axes."""
    rotation_degrees: Range = (-30.0, 30.0)
    """Angle about each axis, in degrees."""
    rotation_degrees_in_plane: Range = (-180.0, 180.0)
    """Angle in the plane of an anisotropic patch, which is rotated in no other, in degrees."""
    scaling_p: Probability = 0.2
    """Probability of scaling by the same factor along all axes (of an anisotropic patch: in the plane only)."""
    scaling: PositiveRange = (0.7, 1.4)
    """Factor of the field of view; above 1 structures become smaller."""
    noise_p: Probability = 0.1
    """Probability of Gaussian noise, on all channels."""
    noise_std: tuple[Annotated[float, pydantic.Field(ge=0)], Annotated[float, pydantic.Field(ge=0)]] = (0.0, 0.1)
    """Standard deviation of the noise, in units of the normalised intensity."""
    blur_p: Probability = 0.2
    """Probability that a sample is blurred."""
    blur_channel_p: Probability = 0.5
    """Probability that a channel of a blurred sample is blurred."""
    blur_sigma_voxels: PositiveRange = (0.5, 1.0)
    """Gaussian sigma in voxels, drawn for each axis."""
    brightness_p: Probability = 0.15
    """Probability of multiplying intensities, with a factor for each channel."""
    brightness: PositiveRange = (0.75, 1.25)
    """Brightness factor; values below and above 1 are equally likely."""
    contrast_p: Probability = 0.15
    """Probability of scaling intensities about the channel's mean, within the channel's range."""
    contrast: PositiveRange = (0.75, 1.25)
    """Contrast factor; values below and above 1 are equally likely."""
    low_resolution_p: Probability = 0.25
    """Probability that a sample is resampled to a low resolution and back."""
    low_resolution_channel_p: Probability = 0.5
    """Probability that a channel of such a sample is resampled."""
    low_resolution_scale: PositiveRange = (0.5, 1.0)
    """Fraction of the resolution that remains along all axes (of an anisotropic patch: in the plane only)."""
    gamma_inverted_p: Probability = 0.1
    """Probability of a gamma curve on the negative image."""
    gamma_p: Probability = 0.3
    """Probability of a gamma curve on the image."""
    gamma: PositiveRange = (0.7, 1.5)
    """Exponent, drawn for each channel; values below and above 1 are equally likely."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> AugmentSettings:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_range = isinstance(value, tuple) and field.name != "mirror_axes"
            if is_range and value[0] > value[1]:
                raise ValueError(f"{field.name}: expected (lowest, highest), got {list(value)}")
            fixed = self.preset != "nnunet" and field.name not in ("preset", "strength")
            if fixed and value != field.default:
                raise ValueError(f"{field.name}: can be set only with preset nnunet, not with {self.preset}")
        if self.low_resolution_scale[1] > 1:
            raise ValueError("low_resolution_scale: expected fractions of the resolution, at most 1")
        return self

    def in_effect(self) -> AugmentSettings:
        """Return the same augmentation expressed by the fields of preset nnunet at strength 1."""
        changes: dict[str, Any] = {name: getattr(self, name) for name in _PROBABILITIES}
        if self.preset != "nnunet":
            changes = dict.fromkeys(_PROBABILITIES, 0.0)
        if self.preset == "mlperf":
            changes |= {"mirror_p": 1 / 3, "brightness_p": 0.1, "brightness": (0.7, 1.3), "noise_p": 0.1}
        for name in _PROBABILITIES:
            strength = min(self.strength, 1.0) if name == "mirror_p" else self.strength
            changes[name] = min(changes[name] * strength, 1.0)
        return dataclasses.replace(self, preset="nnunet", strength=1.0, **changes)


_PROBABILITIES = [
    field.name for field in dataclasses.fields(AugmentSettings) if field.name.removesuffix("_channel_p").endswith("_p")
]
"""Probabilities of the operations on a sample."""


@dataclass(frozen=True)
class ChannelAugmentation:
    """Operations on one channel of one sample; None means not done."""

    blur_voxels: tuple[float, float, float] | None = None
    brightness: float | None = None
    contrast: float | None = None
    low_resolution: float | None = None
    gamma_inverted: float | None = None
    gamma: float | None = None


@dataclass(frozen=True)
class SampleAugmentation:
    """Operations on one sample."""

    angles: tuple[float, float, float] | None
    """Rotation about z, y and x in radians."""
    scales: tuple[float, float, float] | None
    """Factors of the field of view along z, y and x."""
    flips: tuple[bool, bool, bool]
    noise_std: float | None
    noise_seed: int
    channels: tuple[ChannelAugmentation, ...]

    @property
    def matrix(self) -> transforms.Matrix | None:
        """Matrix of rotation and scaling; None if neither is done."""
        if self.angles is None and self.scales is None:
            return None
        return transforms.make_matrix(self.angles or (0.0, 0.0, 0.0), self.scales or (1.0, 1.0, 1.0))


_PER_SAMPLE, _PER_CHANNEL = 20, 14


def draws(
    settings: AugmentSettings, seeds: Iterable[int], channels: int, flat_axis: int | None = None
) -> list[SampleAugmentation]:
    """Draw the augmentation of each seed's sample, by settings from `in_effect`.

    Every number has its own position in a seed's random sequence, so changing one setting does not change the other
    draws. `flat_axis` is the short axis of an anisotropic patch, which is rotated only about that axis.
    """
    # One generator with each seed's key in turn, because creating one takes as long as all draws of a sample.
    philox = np.random.Philox(key=0)
    random = np.random.Generator(philox)
    start = philox.state
    drawn = []
    for seed in seeds:
        start["state"]["key"][0] = seed % 2**64
        philox.state = start
        noise_seed = int(random.integers(2**63))
        numbers = random.random(_PER_SAMPLE + channels * _PER_CHANNEL).tolist()
        drawn.append(_draw_sample(settings, noise_seed, numbers, flat_axis))
    return drawn


def _draw_sample(
    settings: AugmentSettings, noise_seed: int, numbers: list[float], flat_axis: int | None
) -> SampleAugmentation:
    """Draw from `numbers`: first those of the sample, then those of each channel."""
    u = numbers[:_PER_SAMPLE]
    of_channels = [numbers[at : at + _PER_CHANNEL] for at in range(_PER_SAMPLE, len(numbers), _PER_CHANNEL)]
    angles = scales = None
    if u[0] < settings.rotation_p:
        degrees = settings.rotation_degrees if flat_axis is None else settings.rotation_degrees_in_plane
        turned = [flat_axis in (None, axis) for axis in range(3)]
        angles = _triple(math.radians(_between(degrees, u[2 + axis])) if turned[axis] else 0.0 for axis in range(3))
    if u[1] < settings.scaling_p:
        scale = _between(settings.scaling, u[5])
        scales = _triple(1.0 if axis == flat_axis else scale for axis in range(3))
    flips = tuple(axis in settings.mirror_axes and u[6 + axis] < settings.mirror_p for axis in range(3))
    return SampleAugmentation(
        angles=angles,
        scales=scales,
        flips=(flips[0], flips[1], flips[2]),
        noise_std=_between(settings.noise_std, u[10]) if u[9] < settings.noise_p else None,
        noise_seed=noise_seed,
        channels=tuple(_draw_channel(settings, u, v) for v in of_channels),
    )


def _draw_channel(settings: AugmentSettings, u: list[float], v: list[float]) -> ChannelAugmentation:
    """Draw from the sample's numbers `u`, which decide whether an operation is done, and the channel's `v`."""
    blurred = u[11] < settings.blur_p and v[0] < settings.blur_channel_p
    lowered = u[14] < settings.low_resolution_p and v[8] < settings.low_resolution_channel_p
    return ChannelAugmentation(
        blur_voxels=_triple(_between(settings.blur_sigma_voxels, v[1 + axis]) for axis in range(3))
        if blurred
        else None,
        brightness=_around_one(settings.brightness, v[4], v[5]) if u[12] < settings.brightness_p else None,
        contrast=_around_one(settings.contrast, v[6], v[7]) if u[13] < settings.contrast_p else None,
        low_resolution=_between(settings.low_resolution_scale, v[9]) if lowered else None,
        gamma_inverted=_around_one(settings.gamma, v[10], v[11]) if u[15] < settings.gamma_inverted_p else None,
        gamma=_around_one(settings.gamma, v[12], v[13]) if u[16] < settings.gamma_p else None,
    )


def _triple(values: Iterable[float]) -> tuple[float, float, float]:
    first, second, third = values
    return first, second, third


def _between(limits: Range, u: float) -> float:
    return limits[0] + (limits[1] - limits[0]) * u


def _around_one(limits: Range, side: float, u: float) -> float:
    """Draw below 1 with probability one half, if the range allows it, and uniformly on each side."""
    low, high = limits
    if low < 1 and (side < 0.5 or high <= 1):
        return _between((low, min(high, 1.0)), u)
    return _between((max(low, 1.0), high), u)


class Augment(torch.nn.Module):
    """Augments batches of patches; has no parameters and no state."""

    def __init__(self, settings: AugmentSettings, patch: Triple) -> None:
        """Build from settings and the network's input size in voxels (z, y, x)."""
        super().__init__()
        self.settings = settings
        self.patch = patch
        self.flat_axis = patch.index(min(patch)) if max(patch) / min(patch) > ANISOTROPY else None
        self._in_effect = settings.in_effect()
        self._noise_last = settings.preset == "mlperf"

    def draws(self, seeds: Iterable[int], channels: int) -> list[SampleAugmentation]:
        """Draw the operations on the samples with these seeds."""
        samples = draws(self._in_effect, seeds, channels, self.flat_axis)
        if self.settings.preset != "mlperf":
            return samples
        # One factor for all channels, because the benchmark multiplies the whole array.
        return [dataclasses.replace(drawn, channels=drawn.channels[:1] * channels) for drawn in samples]

    @torch.no_grad()
    def forward(
        self, image: torch.Tensor, label: torch.Tensor, seeds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a new image (float32) and label of `patch` voxels, on the device of the inputs, which are unchanged.

        image: (B, C, Z, Y, X); label: (B, Z, Y, X) of integers; seeds: (B,) int64 on the CPU.

        A sample's result depends only on its seed, not on the rest of the batch or the rank. The drawn parameters do
        not depend on the device, but the noise of single voxels does. Inputs larger than `patch` are cropped to their
        centre after rotation and scaling, which can use the margin; otherwise the border is repeated.
        """
        self._check(image, label, seeds)
        if self.settings.preset == "none" and tuple(image.shape[2:]) == self.patch:
            return image, label
        draws = self.draws(seeds.tolist(), image.shape[1])
        if support.is_supported(image):
            # For the whole batch; one by one, small patches would spend their time on launches.
            from voxlane.model.kernels.augment import augment  # which imports Triton

            return augment(image, label, draws, self.patch, flat_axis=self.flat_axis, noise_last=self._noise_last)
        image, label = transforms.resample_patches(
            image, label, [drawn.matrix for drawn in draws], [drawn.flips for drawn in draws], self.patch
        )
        for sample, drawn in zip(image, draws, strict=True):
            self._augment_intensity(sample, drawn)
        return image, label

    def _augment_intensity(self, sample: torch.Tensor, drawn: SampleAugmentation) -> None:
        if drawn.noise_std and not self._noise_last:
            transforms.add_noise(sample, drawn.noise_std, drawn.noise_seed)
        for x, channel in zip(sample, drawn.channels, strict=True):
            if channel.blur_voxels is not None:
                transforms.blur(x, channel.blur_voxels)
            if channel.brightness is not None:
                x.mul_(channel.brightness)
            if channel.contrast is not None:
                transforms.adjust_contrast(x, channel.contrast)
            if channel.low_resolution is not None:
                transforms.lower_resolution(x, channel.low_resolution, self.flat_axis)
            if channel.gamma_inverted is not None:
                transforms.adjust_gamma(x, channel.gamma_inverted, inverted=True)
            if channel.gamma is not None:
                transforms.adjust_gamma(x, channel.gamma, inverted=False)
        if drawn.noise_std and self._noise_last:
            transforms.add_noise(sample, drawn.noise_std, drawn.noise_seed)

    def _check(self, image: torch.Tensor, label: torch.Tensor, seeds: torch.Tensor) -> None:
        if image.dim() != 5 or label.shape != (image.shape[0], *image.shape[2:]):
            raise ConfigError(
                f"an image of shape {tuple(image.shape)} and a label of shape {tuple(label.shape)} do not match",
                fix="Pass (B, C, Z, Y, X) and (B, Z, Y, X)",
            )
        if any(size < target for size, target in zip(image.shape[2:], self.patch, strict=True)):
            raise ConfigError(f"patches of {tuple(image.shape[2:])} voxels cannot be cropped to {self.patch}")
        if seeds.device.type != "cpu" or seeds.shape != image.shape[:1]:
            raise ConfigError("seeds: expected one number per sample, on the CPU, to avoid waiting for the device")
