"""What was drawn for a batch, in the words of the kernels that do it in a few launches (voxlane.kernels.augment, which
needs Triton). Without them a sample's channels are augmented one by one (`spatial`, `intensity`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from voxlane.kernels import augment as kernels
from voxlane.model import intensity, spatial
from voxlane.volume.plan import Triple

if TYPE_CHECKING:
    from voxlane.model.augment import ChannelDraw, Draw


def augment(
    image: torch.Tensor,
    label: torch.Tensor,
    draws: Sequence[Draw],
    patch: Triple,
    *,
    flat_axis: int | None,
    noise_last: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New image (float32) and label of `patch` voxels. `noise_last`: brightness does not change the noise."""
    matrices, flips = [made.matrix for made in draws], [made.flips for made in draws]
    steps = iter(spatial.steps_of(matrices, flips, patch, image.shape[2:]))
    samples = [
        kernels.Sample(
            steps=None if matrix is None else next(steps),
            flips=made.flips,
            noise_seed=made.noise_seed,
            channels=[
                _channel(channel, made.noise_std or 0.0, patch, flat_axis, noise_last) for channel in made.channels
            ],
        )
        for made, matrix in zip(draws, matrices, strict=True)
    ]
    return kernels.augment(image, label, samples, patch)


def _channel(
    made: ChannelDraw, noise_std: float, patch: Triple, flat_axis: int | None, noise_last: bool
) -> kernels.Channel:
    brightness = 1.0 if made.brightness is None else made.brightness
    blur = coarse = None
    if made.blur_voxels is not None:
        z, y, x = (intensity.gaussian(s, limit=size - 1) for s, size in zip(made.blur_voxels, patch, strict=True))
        blur = z, y, x
    if made.low_resolution is not None:
        coarse = intensity.coarse_shape(patch, made.low_resolution, flat_axis)
    return kernels.Channel(
        brightness=brightness,
        noise=noise_std if noise_last else noise_std * brightness,
        blur=blur,
        contrast=made.contrast,
        coarse=coarse,
        gamma_inverted=made.gamma_inverted,
        gamma=made.gamma,
    )
