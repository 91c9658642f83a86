"""Rotation, scaling and mirroring of patches in one resampling.

A sample that drew a rotation or scaling is resampled once, with its mirroring as part of the same matrix. Other samples
are copied and mirrored without interpolation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from voxlane.volume.plan import Triple

Matrix = npt.NDArray[np.float64]


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


def transform(
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
    transformed = [index for index, matrix in enumerate(matrices) if matrix is not None]
    packed = torch.from_numpy(coordinate_steps(matrices, flips, patch, source))
    # One small transfer for the whole batch, from pinned memory, because any other copy waits for the GPU.
    steps = iter((packed.pin_memory() if image.is_cuda else packed).to(image.device, non_blocking=True))
    centre = tuple(slice((s - p) // 2, (s - p) // 2 + p) for s, p in zip(source, patch, strict=True))
    for index in range(len(image)):
        if index in transformed:
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
    slabs = torch.get_num_threads() if x.device.type == "cpu" else 1
    if slabs > 1 and depth % slabs == 0:
        # On the CPU only the batch axis is parallel, so the grid's slabs become a batch that shares one source.
        grid = grid.view(slabs, depth // slabs, height, width, 3)
        parts = _grid_sample(x[None].expand(slabs, *x.shape), grid, mode)
        return parts.transpose(0, 1).reshape(x.shape[0], depth, height, width)
    return _grid_sample(x[None], grid[None], mode)[0]


def _grid_sample(x: torch.Tensor, grid: torch.Tensor, mode: str) -> torch.Tensor:
    return functional.grid_sample(x, grid, mode=mode, padding_mode="border", align_corners=False)
