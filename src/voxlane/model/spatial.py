"""Rotation, scaling and mirroring of patches, in one resampling.

A sample that drew a rotation or a scaling is resampled once, its mirroring part of the same matrix; one that drew
neither is copied, mirrored, which costs no interpolation.
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


def matrix_of(angles_radians: Sequence[float], scales: Sequence[float]) -> Matrix:
    """Where each voxel of the result comes from, relative to the patch's centre, in voxels (z, y, x).

    Scaling first, then a rotation about each axis in turn; a scale above 1 makes things smaller.
    """
    product = np.diag(np.asarray(scales, dtype=np.float64))
    for axis, angle in enumerate(angles_radians):
        if angle != 0:
            first, second = (axis + 1) % 3, (axis + 2) % 3
            rotation = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
            rotation[first][first] = rotation[second][second] = math.cos(angle)
            rotation[first][second], rotation[second][first] = -math.sin(angle), math.sin(angle)
            product = np.array(rotation) @ product
    return product


def transform(
    image: torch.Tensor,
    label: torch.Tensor,
    matrices: Sequence[Matrix | None],
    flips: Sequence[tuple[bool, bool, bool]],
    patch: Triple,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors of `patch` voxels around the centre of image (B, C, Z, Y, X) and label (B, Z, Y, X), each sample
    turned by its matrix (None: not) and mirrored. Images linearly, labels by the nearest voxel, both repeating the
    border outside."""
    source = image.shape[2:]
    new_image = torch.empty((*image.shape[:2], *patch), dtype=torch.float32, device=image.device)
    new_label = torch.empty((len(label), *patch), dtype=label.dtype, device=label.device)
    turned = [index for index, matrix in enumerate(matrices) if matrix is not None]
    packed = torch.from_numpy(steps_of(matrices, flips, patch, source))
    # One small transfer for the whole batch; from pinned memory, because any other copy waits for the GPU.
    steps = iter((packed.pin_memory() if image.is_cuda else packed).to(image.device, non_blocking=True))
    middle = tuple(slice((s - p) // 2, (s - p) // 2 + p) for s, p in zip(source, patch, strict=True))
    for index in range(len(image)):
        if index in turned:
            grid = _grid(next(steps), patch)
            new_image[index] = _sample(image[index].float(), grid, "bilinear")
            # As float32, because grid_sample takes no integers; values up to 2**24 stay exact.
            new_label[index] = _sample(label[index][None].float(), grid, "nearest")[0]
        else:
            axes = [axis - 3 for axis, flipped in enumerate(flips[index]) if flipped]
            new_image[index] = torch.flip(image[index][(slice(None), *middle)], axes)
            new_label[index] = torch.flip(label[index][middle], axes)
    return new_image, new_label


def steps_of(
    matrices: Sequence[Matrix | None], flips: Sequence[tuple[bool, bool, bool]], patch: Triple, source: Sequence[int]
) -> npt.NDArray[np.float32]:
    """What each plane, row and column of the result adds to the source coordinate, for each of the N samples that have
    a matrix: (N, D + H + W, 3).

    The coordinates are grid_sample's: x, y, z from -1 to 1 between the outer faces of the source.
    """
    turned = [(matrix, flip) for matrix, flip in zip(matrices, flips, strict=True) if matrix is not None]
    steps = np.empty((len(turned), sum(patch), 3), dtype=np.float32)
    if not turned:
        return steps
    # Mirroring the result is turning the signs of the matrix's columns.
    signs = np.where([flip for _, flip in turned], -1.0, 1.0)
    columns = np.stack([matrix for matrix, _ in turned]) * signs[:, None] * (2.0 / np.asarray(source))[:, None]
    start = 0
    for axis, size in enumerate(patch):
        places = np.arange(size) - (size - 1) / 2
        steps[:, start : start + size] = places[:, None] * columns[:, None, ::-1, axis]
        start += size
    return steps


def _grid(steps: torch.Tensor, patch: Triple) -> torch.Tensor:
    """The source coordinate of every voxel (D, H, W, 3); an affine map's grid is the sum of three vectors."""
    planes, rows, columns = torch.split(steps, list(patch))
    return planes[:, None, None] + (rows[:, None] + columns[None, :])[None]


def _sample(x: torch.Tensor, grid: torch.Tensor, mode: str) -> torch.Tensor:
    depth, height, width = grid.shape[:3]
    slabs = torch.get_num_threads() if x.device.type == "cpu" else 1
    if slabs > 1 and depth % slabs == 0:
        # On the CPU only the batch axis is worked on in parallel, so the grid's slabs become a batch that shares one
        # source.
        grid = grid.view(slabs, depth // slabs, height, width, 3)
        parts = _grid_sample(x[None].expand(slabs, *x.shape), grid, mode)
        return parts.transpose(0, 1).reshape(x.shape[0], depth, height, width)
    return _grid_sample(x[None], grid[None], mode)[0]


def _grid_sample(x: torch.Tensor, grid: torch.Tensor, mode: str) -> torch.Tensor:
    return functional.grid_sample(x, grid, mode=mode, padding_mode="border", align_corners=False)
