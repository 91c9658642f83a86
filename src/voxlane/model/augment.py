"""Augmentation of a batch of patches on the device they are trained on.

What is done to a sample is drawn on the CPU from the sample's own seed (`draw`, a pure function); the operations then
run on the batch's device and read nothing back from it, so that a GPU is never waited for. An operation touches only
the samples and channels that drew it.

nnU-Net's order: rotation and scaling, noise, blur, brightness, contrast, low resolution, inverted gamma, gamma, and
mirroring, which is done first here, with the rotation: every other operation treats both directions of an axis alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch

from voxlane.errors import ConfigError
from voxlane.kernels import support
from voxlane.model import intensity, spatial
from voxlane.settings import record
from voxlane.volume.plan import Triple

Probability = Annotated[float, pydantic.Field(ge=0, le=1)]
Positive = Annotated[float, pydantic.Field(gt=0)]
Range = tuple[float, float]
PositiveRange = tuple[Positive, Positive]

ANISOTROPY = 3.0
"""A patch longer than this many times its shortest side is turned in the plane of its two longer sides only."""


@record
class AugmentSettings:
    """What is done to training patches, how often and how strongly. Ranges are (lowest, highest)."""

    preset: Literal["nnunet", "mlperf", "none"] = "nnunet"
    """nnunet: the fields below, whose defaults are nnU-Net 2.8's. mlperf: the MLPerf U-Net3D recipe (each axis mirrored
    with probability 1/3, brightness x 0.7 to 1.3 and noise up to 0.1 with probability 0.1 each). none: nothing."""
    strength: float = pydantic.Field(default=1.0, ge=0)
    """Multiplies every probability, up to 1; mirroring's only below 1, because one half is its most random."""
    mirror_axes: tuple[Annotated[int, pydantic.Field(ge=0, le=2)], ...] = (0, 1, 2)
    """Axes that may be mirrored (0: z, 1: y, 2: x)."""
    mirror_p: Probability = 0.5
    """Probability of mirroring, each axis by itself."""
    rotation_p: Probability = 0.2
    """Probability of a rotation about all axes."""
    rotation_degrees: Range = (-30.0, 30.0)
    """Angle about each axis."""
    rotation_degrees_in_plane: Range = (-180.0, 180.0)
    """Angle in the plane of an anisotropic patch, which is turned in no other."""
    scaling_p: Probability = 0.2
    """Probability of scaling, by the same factor along all axes (in the plane only for an anisotropic patch)."""
    scaling: PositiveRange = (0.7, 1.4)
    """Factor of the field of view: above 1 things become smaller."""
    noise_p: Probability = 0.1
    """Probability of Gaussian noise, on all channels."""
    noise_std: tuple[Annotated[float, pydantic.Field(ge=0)], Annotated[float, pydantic.Field(ge=0)]] = (0.0, 0.1)
    """Standard deviation of the noise, in units of the normalised intensity."""
    blur_p: Probability = 0.2
    """Probability that a sample is blurred."""
    blur_channel_p: Probability = 0.5
    """Probability of each channel of such a sample."""
    blur_sigma_voxels: PositiveRange = (0.5, 1.0)
    """Gaussian sigma, drawn for each axis."""
    brightness_p: Probability = 0.15
    """Probability of multiplying intensities, each channel by its own factor."""
    brightness: PositiveRange = (0.75, 1.25)
    """Factor; below and above 1 are equally likely."""
    contrast_p: Probability = 0.15
    """Probability of scaling intensities about the channel's mean, within the channel's range."""
    contrast: PositiveRange = (0.75, 1.25)
    """Factor; below and above 1 are equally likely."""
    low_resolution_p: Probability = 0.25
    """Probability that a sample is brought to a low resolution and back."""
    low_resolution_channel_p: Probability = 0.5
    """Probability of each channel of such a sample."""
    low_resolution_scale: PositiveRange = (0.5, 1.0)
    """Share of the resolution that is left, the same along all axes (in the plane only for an anisotropic patch)."""
    gamma_inverted_p: Probability = 0.1
    """Probability of a gamma curve on the negative image."""
    gamma_p: Probability = 0.3
    """Probability of a gamma curve on the image."""
    gamma: PositiveRange = (0.7, 1.5)
    """Exponent, each channel's own; below and above 1 are equally likely."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> AugmentSettings:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_range = isinstance(value, tuple) and field.name != "mirror_axes"
            if is_range and value[0] > value[1]:
                raise ValueError(f"{field.name}: {list(value)} is not (lowest, highest)")
            fixed = self.preset != "nnunet" and field.name not in ("preset", "strength")
            if fixed and value != field.default:
                raise ValueError(f"{field.name}: preset {self.preset} has its own; set it with preset nnunet")
        if self.low_resolution_scale[1] > 1:
            raise ValueError("low_resolution_scale: a share of the resolution, at most 1")
        return self

    def in_effect(self) -> AugmentSettings:
        """The same augmentation in the fields of preset nnunet, at strength 1."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.preset != "nnunet":
            values |= dict.fromkeys(_CHANCES, 0.0)
        if self.preset == "mlperf":
            values |= {"mirror_p": 1 / 3, "brightness_p": 0.1, "brightness": (0.7, 1.3), "noise_p": 0.1}
        for name in _CHANCES:
            strength = min(self.strength, 1.0) if name == "mirror_p" else self.strength
            values[name] = min(values[name] * strength, 1.0)
        return AugmentSettings(**(values | {"preset": "nnunet", "strength": 1.0}))


_CHANCES = (
    "mirror_p",
    "rotation_p",
    "scaling_p",
    "noise_p",
    "blur_p",
    "brightness_p",
    "contrast_p",
    "low_resolution_p",
    "gamma_inverted_p",
    "gamma_p",
)


@dataclass(frozen=True)
class ChannelDraw:
    """What is done to one channel of one sample; None: not done."""

    blur_voxels: tuple[float, float, float] | None = None
    brightness: float | None = None
    contrast: float | None = None
    low_resolution: float | None = None
    gamma_inverted: float | None = None
    gamma: float | None = None


@dataclass(frozen=True)
class Draw:
    """What is done to one sample."""

    angles: tuple[float, float, float] | None
    """Radians about z, y and x."""
    scales: tuple[float, float, float] | None
    """Factor of the field of view along z, y and x."""
    flips: tuple[bool, bool, bool]
    noise_std: float | None
    noise_seed: int
    channels: tuple[ChannelDraw, ...]

    @property
    def matrix(self) -> spatial.Matrix | None:
        """Rotation and scaling, None where neither is done."""
        if self.angles is None and self.scales is None:
            return None
        return spatial.matrix_of(self.angles or (0.0, 0.0, 0.0), self.scales or (1.0, 1.0, 1.0))


_PER_SAMPLE, _PER_CHANNEL = 20, 14


def draw(settings: AugmentSettings, seed: int, channels: int, flat_axis: int | None = None) -> Draw:
    """The augmentation of the sample with this seed, by settings that are `in_effect`.

    Every number has its own place in the seed's random sequence, so that changing one setting leaves what the others
    draw as it was. `flat_axis` is the axis out of whose plane an anisotropic patch is not turned.
    """
    return draws(settings, [seed], channels, flat_axis)[0]


def draws(settings: AugmentSettings, seeds: Iterable[int], channels: int, flat_axis: int | None = None) -> list[Draw]:
    """`draw` for each seed."""
    # One generator that gets every seed's key: making one takes as long as all that a sample draws.
    philox = np.random.Philox(key=0)
    random = np.random.Generator(philox)
    start = philox.state
    made = []
    for seed in seeds:
        start["state"]["key"][0] = seed % 2**64
        philox.state = start
        noise_seed = int(random.integers(2**63))
        numbers = random.random(_PER_SAMPLE + channels * _PER_CHANNEL).tolist()
        made.append(_draw_sample(settings, noise_seed, numbers, flat_axis))
    return made


def _draw_sample(settings: AugmentSettings, noise_seed: int, numbers: list[float], flat_axis: int | None) -> Draw:
    """`numbers` are the sample's own, then those of each channel."""
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
    return Draw(
        angles=angles,
        scales=scales,
        flips=(flips[0], flips[1], flips[2]),
        noise_std=_between(settings.noise_std, u[10]) if u[9] < settings.noise_p else None,
        noise_seed=noise_seed,
        channels=tuple(_draw_channel(settings, u, v) for v in of_channels),
    )


def _draw_channel(settings: AugmentSettings, u: list[float], v: list[float]) -> ChannelDraw:
    """`u` are the sample's numbers, which say whether an operation is done; `v` the channel's, which say how."""
    blurred = u[11] < settings.blur_p and v[0] < settings.blur_channel_p
    lowered = u[14] < settings.low_resolution_p and v[8] < settings.low_resolution_channel_p
    return ChannelDraw(
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
    """Below 1 half of the time where the range allows it, evenly on each side."""
    low, high = limits
    if low < 1 and (side < 0.5 or high <= 1):
        return _between((low, min(high, 1.0)), u)
    return _between((max(low, 1.0), high), u)


class Augment(torch.nn.Module):
    """Augments batches of patches; holds no parameters and no state."""

    def __init__(self, settings: AugmentSettings, patch: Triple, anisotropic: bool | None = None) -> None:
        """`patch` is the network's size in voxels (z, y, x). `anisotropic`: rotate, scale and lower the resolution only
        in the plane of the two longer sides; None: where the longest side is more than 3 times the shortest."""
        super().__init__()
        self.settings = settings
        self.patch = patch
        flat = max(patch) / min(patch) > ANISOTROPY if anisotropic is None else anisotropic
        self.flat_axis = patch.index(min(patch)) if flat else None
        self._in_effect = settings.in_effect()

    def draw(self, seed: int, channels: int) -> Draw:
        """What is done to the sample with this seed."""
        return self.draws([seed], channels)[0]

    def draws(self, seeds: Iterable[int], channels: int) -> list[Draw]:
        """What is done to the samples with these seeds."""
        made = draws(self._in_effect, seeds, channels, self.flat_axis)
        if self.settings.preset != "mlperf":
            return made
        # One image-wide factor, as the benchmark multiplies the whole array.
        return [dataclasses.replace(one, channels=one.channels[:1] * channels) for one in made]

    @torch.no_grad()
    def forward(
        self, image: torch.Tensor, label: torch.Tensor, seeds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New image (float32) and label of `patch` voxels, on the device of the given ones, which stay as they are.

        image: (B, C, Z, Y, X); label: (B, Z, Y, X) of integers; seeds: (B,) int64 on the CPU.

        A sample's result depends on its seed alone: not on its neighbours in the batch, nor on the rank; and the
        parameters not on the device, though the noise's voxels do. Patches larger than `patch` are cut to their middle
        after rotation and scaling, which then see what lies around; patches of its size have their border repeated.
        """
        self._check(image, label, seeds)
        if self.settings.preset == "none" and tuple(image.shape[2:]) == self.patch:
            return image, label
        draws = self.draws(seeds.tolist(), image.shape[1])
        if support.usable(image):
            return self._at_once(image, label, draws)
        image, label = spatial.transform(
            image, label, [made.matrix for made in draws], [made.flips for made in draws], self.patch
        )
        generator = torch.Generator(image.device) if any(made.noise_std for made in draws) else None
        for sample, made in zip(image, draws, strict=True):
            self._change_intensity(sample, made, generator)
        return image, label

    def _at_once(
        self, image: torch.Tensor, label: torch.Tensor, draws: list[Draw]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By kernels that take the whole batch: one by one, small patches are all launches."""
        from voxlane.model import batched  # which imports Triton

        noise_last = self.settings.preset == "mlperf"
        return batched.augment(image, label, draws, self.patch, flat_axis=self.flat_axis, noise_last=noise_last)

    def _change_intensity(self, sample: torch.Tensor, made: Draw, generator: torch.Generator | None) -> None:
        noise_last = self.settings.preset == "mlperf"
        if not noise_last:
            _add_noise(sample, made, generator)
        for x, channel in zip(sample, made.channels, strict=True):
            if channel.blur_voxels is not None:
                intensity.blur(x, channel.blur_voxels)
            if channel.brightness is not None:
                x.mul_(channel.brightness)
            if channel.contrast is not None:
                intensity.stretch(x, channel.contrast)
            if channel.low_resolution is not None:
                intensity.lower_resolution(x, channel.low_resolution, self.flat_axis)
            if channel.gamma_inverted is not None:
                intensity.bend(x, channel.gamma_inverted, inverted=True)
            if channel.gamma is not None:
                intensity.bend(x, channel.gamma, inverted=False)
        if noise_last:
            _add_noise(sample, made, generator)

    def _check(self, image: torch.Tensor, label: torch.Tensor, seeds: torch.Tensor) -> None:
        if image.dim() != 5 or label.shape != (image.shape[0], *image.shape[2:]):
            raise ConfigError(
                f"an image of shape {tuple(image.shape)} and a label of shape {tuple(label.shape)} are no batch",
                fix="Give (B, C, Z, Y, X) and (B, Z, Y, X)",
            )
        if any(size < wanted for size, wanted in zip(image.shape[2:], self.patch, strict=True)):
            raise ConfigError(f"patches of {tuple(image.shape[2:])} voxels cannot be cut to {self.patch}")
        if seeds.device.type != "cpu" or seeds.shape != image.shape[:1]:
            raise ConfigError("seeds: one number a sample, on the CPU, so that no device is waited for")


def _add_noise(sample: torch.Tensor, made: Draw, generator: torch.Generator | None) -> None:
    if made.noise_std and generator is not None:
        intensity.add_noise(sample, made.noise_std, generator.manual_seed(made.noise_seed))
