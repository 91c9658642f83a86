"""Operations of augmentation: rotation, scaling and mirroring of patches, and changes of a channel's intensities.

A sample that drew a rotation or scaling is resampled once, with its mirroring as part of the same matrix. Other samples
are copied and mirrored without interpolation.

The functions for intensities change one channel in place, with nnU-Net's arithmetic. Each takes `x` (Z, Y, X), a
contiguous float32 view of the batch, and plain numbers as parameters. So only channels that drew an operation are
touched, and no value is read back from the device. Statistics (mean, smallest and largest value) stay on the device as
zero-dimensional tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from voxlane.volume.plan import Triple, to_triple

Matrix = npt.NDArray[np.float64]
_TINY = 1e-7


def make_matrix(angles_radians: Sequence[float], scales: Sequence[float]) -> Matrix:
    """Return the matrix from a voxel of the result to its source, relative to the patch's centre, in voxels (z, y, x).

    Scaling comes first, then a rotation about each axis in turn; a scale above 1 makes structures smaller.
    """
    product = np.diag(np.asarray(scales, dtype=np.float64))
    for axis, angle in enumerate(angles_radians):
        if angle != 0:
            first, second = (axis + 1) % 3, (axis + 2) % 3
            rotation = np.eye(3)
            rotation[first, first] = rotation[second, second] = math.cos(angle)
            rotation[first, second], rotation[second, first] = -math.sin(angle), math.sin(angle)
            product = rotation @ product
    return product


def resample_patches(
    image: torch.Tensor,
    label: torch.Tensor,
    matrices: Sequence[Matrix | None],
    flips: Sequence[tuple[bool, bool, bool]],
    patch: Triple,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new tensors of `patch` voxels around the centre of image (B, C, Z, Y, X) and label (B, Z, Y, X).

    Each sample is transformed by its matrix, unless None, and mirrored. Images are interpolated linearly and labels by
    the nearest voxel; both repeat the border outside.
    """
    source = image.shape[2:]
    new_image = torch.empty((*image.shape[:2], *patch), dtype=torch.float32, device=image.device)
    new_label = torch.empty((len(label), *patch), dtype=label.dtype, device=label.device)
    packed = torch.from_numpy(coordinate_steps(matrices, flips, patch, source))
    # One small transfer for the whole batch, from pinned memory, because any other copy waits for the GPU.
    steps = iter((packed.pin_memory() if image.is_cuda else packed).to(image.device, non_blocking=True))
    centre = tuple(slice((s - p) // 2, (s - p) // 2 + p) for s, p in zip(source, patch, strict=True))
    for index, matrix in enumerate(matrices):
        if matrix is not None:
            grid = _make_grid(next(steps), patch)
            new_image[index] = _resample(image[index].float(), grid, "bilinear")
            # As float32, because grid_sample does not support integers; values up to 2**24 are exact.
            new_label[index] = _resample(label[index][None].float(), grid, "nearest")[0]
        else:
            axes = [axis - 3 for axis, flipped in enumerate(flips[index]) if flipped]
            new_image[index] = torch.flip(image[index][(slice(None), *centre)], axes)
            new_label[index] = torch.flip(label[index][centre], axes)
    return new_image, new_label


def coordinate_steps(
    matrices: Sequence[Matrix | None], flips: Sequence[tuple[bool, bool, bool]], patch: Triple, source: Sequence[int]
) -> npt.NDArray[np.float32]:
    """Return what each plane, row and column of the result adds to the source coordinate, for the N samples with a
    matrix: (N, D + H + W, 3).

    The coordinates are those of grid_sample: x, y, z from -1 to 1 between the outer faces of the source.
    """
    transformed = [(matrix, flip) for matrix, flip in zip(matrices, flips, strict=True) if matrix is not None]
    steps = np.empty((len(transformed), sum(patch), 3), dtype=np.float32)
    if not transformed:
        return steps
    # Mirroring the result reverses the signs of the matrix's columns.
    signs = np.where([flip for _, flip in transformed], -1.0, 1.0)
    columns = np.stack([matrix for matrix, _ in transformed]) * signs[:, None] * (2.0 / np.asarray(source))[:, None]
    start = 0
    for axis, size in enumerate(patch):
        offsets = np.arange(size) - (size - 1) / 2
        steps[:, start : start + size] = offsets[:, None] * columns[:, None, ::-1, axis]
        start += size
    return steps


def _make_grid(steps: torch.Tensor, patch: Triple) -> torch.Tensor:
    """Return the source coordinate of every voxel (D, H, W, 3); the grid of an affine map is a sum of three vectors."""
    planes, rows, columns = torch.split(steps, list(patch))
    return planes[:, None, None] + (rows[:, None] + columns[None, :])[None]


def _resample(x: torch.Tensor, grid: torch.Tensor, mode: str) -> torch.Tensor:
    depth, height, width = grid.shape[:3]
    options: dict[str, Any] = {"padding_mode": "border", "align_corners": False}
    slabs = torch.get_num_threads() if x.device.type == "cpu" else 1
    if slabs > 1 and depth % slabs == 0:
        # On the CPU only the batch axis is parallel, so the grid's slabs become a batch that shares one source.
        grid = grid.view(slabs, depth // slabs, height, width, 3)
        parts = functional.grid_sample(x[None].expand(slabs, *x.shape), grid, mode, **options)
        return parts.transpose(0, 1).reshape(x.shape[0], depth, height, width)
    return functional.grid_sample(x[None], grid[None], mode, **options)[0]


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
    return to_triple(n if axis == unchanged_axis else max(round(n * scale), 1) for axis, n in enumerate(shape))
