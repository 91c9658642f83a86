"""Intensity augmentations of one channel, in place, with nnU-Net's arithmetic.

Each takes `x` (Z, Y, X), a contiguous float32 view of the batch, and plain numbers as parameters. So only channels that
drew an operation are touched, and no value is read back from the device. Statistics (mean, smallest and largest value)
stay on the device as zero-dimensional tensors.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from voxlane.volume.plan import Triple

_TINY = 1e-7


def add_noise(x: torch.Tensor, std: float, seed: int) -> None:
    """Add Gaussian noise of standard deviation `std` to a tensor of any shape."""
    noise = torch.empty_like(x).normal_(generator=torch.Generator(x.device).manual_seed(seed))
    x.add_(noise, alpha=std)


def adjust_contrast(x: torch.Tensor, factor: float) -> None:
    """Scale the distance of every voxel from the mean, and clip to the original range."""
    mean = x.mean()
    smallest, largest = torch.aminmax(x)
    x.sub_(mean).mul_(factor).add_(mean).clamp_(smallest, largest)


def adjust_gamma(x: torch.Tensor, gamma: float, *, inverted: bool) -> None:
    """Apply gamma on the channel's own range, or on the negative image if `inverted`, and restore mean and deviation.

    Mapping back from [0, 1] and restoring mean and deviation are both linear, so they are done in one operation.
    """
    deviation, mean = torch.std_mean(x)
    smallest, largest = torch.aminmax(x)
    value_range = largest - smallest
    if inverted:
        x.neg_().add_(largest)
    else:
        x.sub_(smallest)
    x.div_(value_range.clamp(min=_TINY)).pow_(gamma)
    new_deviation, new_mean = torch.std_mean(x)
    slope = value_range * deviation / (value_range * new_deviation).clamp_(min=_TINY)
    x.sub_(new_mean).mul_(-slope if inverted else slope).add_(mean)


def blur(x: torch.Tensor, sigmas_voxels: tuple[float, float, float]) -> None:
    """Blur with one Gaussian sigma per axis (z, y, x), mirrored at the border without repeating the edge voxel."""
    # A few shifted sums instead of a convolution: kernels have 3 to 7 taps, a one-channel convolution is slow on the
    # CPU, and its weights would have to be copied to the GPU.
    for axis, sigma in enumerate(sigmas_voxels):
        size = x.shape[axis]
        centre_weight, *weights = gaussian_weights(sigma, limit=size - 1)
        if not weights:
            continue
        radius = len(weights)
        padding = [0] * 6
        padding[2 * (2 - axis)] = padding[2 * (2 - axis) + 1] = radius
        padded = functional.pad(x[None, None], padding, mode="reflect")[0, 0]
        x.mul_(centre_weight)
        for step, weight in enumerate(weights, 1):
            x.add_(padded.narrow(axis, radius - step, size), alpha=weight)
            x.add_(padded.narrow(axis, radius + step, size), alpha=weight)


def gaussian_weights(sigma_voxels: float, limit: int) -> list[float]:
    """Return the weights of the centre voxel and of voxels 1, 2, ... steps away; with their mirror images they sum to
    1.

    The kernel spans the odd number nearest to 6 sigma + 0.5 voxels, and at most `limit` neighbours on each side.
    """
    radius = min(math.floor((6 * sigma_voxels + 0.5) / 2), limit)
    weights = [math.exp(-0.5 * (step / sigma_voxels) ** 2) for step in range(radius + 1)]
    total = weights[0] + 2 * sum(weights[1:])
    return [weight / total for weight in weights]


def lower_resolution(x: torch.Tensor, scale: float, unchanged_axis: int | None) -> None:
    """Sample the channel at `scale` times its resolution (nearest voxel) and interpolate back linearly; the resolution
    along `unchanged_axis` does not change."""
    shape: Triple = (x.shape[0], x.shape[1], x.shape[2])
    coarse = functional.interpolate(x[None, None], coarse_shape(shape, scale, unchanged_axis), mode="nearest-exact")
    x.copy_(functional.interpolate(coarse, shape, mode="trilinear", align_corners=False)[0, 0])


def coarse_shape(shape: Triple, scale: float, unchanged_axis: int | None) -> Triple:
    """Return the shape at `scale` times the resolution, unchanged along `unchanged_axis`."""
    z, y, x = (size if axis == unchanged_axis else max(round(size * scale), 1) for axis, size in enumerate(shape))
    return z, y, x
