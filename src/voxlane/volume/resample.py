"""Resampling of scans, labels and probabilities to another voxel grid, as nnU-Net does.

Resizing along one axis applies the same matrix to every line of the volume, so each axis takes one matrix product. The
matrix of a cubic spline is nearly banded: the weight of an input voxel falls by a factor of 0.27 with each voxel of
distance, so a block of output rows needs few input columns.

Arrays are (C, Z, Y, X) or (Z, Y, X); spacings are millimetres (z, y, x). Cubic splines need scipy. If the scan or the
target grid is anisotropic, slices along its coarse axis are not interpolated: the nearest slice is taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from voxlane.volume.plan import Triple, to_triple

Array = NDArray[Any]

ANISOTROPIC = 3.0
"""Ratio of coarsest to finest spacing above which a grid is not interpolated along its coarse axis."""
_SPLINE_PADDING = 12
"""Voxels by which an axis is extended before fitting the spline, as in scipy for repeated edges."""
_NEGLIGIBLE = 1e-8
"""Spline weights below this are dropped; single precision rounds away more."""
_TIE_TOLERANCE = 1e-5
"""Labels whose scores differ by less are tied, because single precision cannot distinguish them."""
_BLOCK_ROWS = 64
"""Output voxels computed by one matrix product."""


def compute_new_shape(
    shape: tuple[int, ...], spacing: tuple[float, ...], target: tuple[float, ...], *, truncate: bool = False
) -> Triple:
    """Return the voxels (z, y, x), at least 1, that cover `shape` at `target` spacing: rounded, or truncated as in
    MLPerf."""
    sizes = [old / new * n for n, old, new in zip(shape, spacing, target, strict=True)]
    return to_triple(max(1, int(size) if truncate else round(size)) for size in sizes)


def find_coarse_axis(spacing: tuple[float, ...], target: tuple[float, ...]) -> int | None:
    """Return the axis to exclude from interpolation: the coarse axis of an anisotropic scan or target grid, if any."""
    for grid in (spacing, target):
        if max(grid) / min(grid) > ANISOTROPIC:
            coarse = [axis for axis, mm in enumerate(grid) if mm == max(grid)]
            return coarse[0] if len(coarse) == 1 else None
    return None


def to_shape(image: Array, shape: Triple, *, nearest_axis: int | None = None, order: int = 3) -> NDArray[np.float32]:
    """Resize `image` (C, Z, Y, X) to `shape` by splines with repeated edges, with the nearest voxel along
    `nearest_axis`. The splines are of order 3 (cubic), 1 (linear) or 0 (the nearest voxel).

    Values stay within the range of each channel, or of each slice across `nearest_axis`. Memory: the result and up to
    two channels of the larger grid in float32.
    """
    if image.shape[1:] == tuple(shape):
        return np.asarray(image, np.float32)
    result = np.empty((image.shape[0], *shape), np.float32)
    for volume, resized in zip(image, result, strict=True):
        resized[...] = _resize_splines(np.ascontiguousarray(volume, np.float32), shape, nearest_axis, order)
    return result


def label_to_shape(label: NDArray[np.uint8], shape: Triple, *, nearest_axis: int | None = None) -> NDArray[np.uint8]:
    """Resize `label` (Z, Y, X) to `shape`: interpolate each value's mask linearly (by the nearest voxel along
    `nearest_axis`) and take the value with the highest score; ties go to the nearest voxel's value.

    Works on one value at a time and only in the box around the foreground, with about 24 bytes per voxel of that box
    besides the result.
    """
    if label.shape == tuple(shape):
        return label
    result = np.zeros(shape, np.uint8)
    values = (np.flatnonzero(np.bincount(label.reshape(-1), minlength=1)[1:]) + 1).astype(np.uint8)
    if not len(values):
        return result
    matrices, nearest, region, inside = [], [], [], []
    for axis, (old, new) in enumerate(zip(label.shape, shape, strict=True)):
        others = tuple(a for a in range(3) if a != axis)
        used_columns = np.flatnonzero((label != 0).any(axis=others))
        columns = slice(int(used_columns[0]), int(used_columns[-1]) + 1)
        nearest_voxels = _nearest_voxels(old, new)
        matrix = _interpolation_matrix(old, new, 0 if axis == nearest_axis else 1)
        rows = np.flatnonzero((matrix[:, columns] != 0).any(axis=1))
        if not len(rows):
            return result
        row_range = slice(int(rows[0]), int(rows[-1]) + 1)
        region.append(row_range)
        inside.append(columns)
        matrices.append(np.ascontiguousarray(matrix[row_range, columns], np.float32))
        nearest.append(nearest_voxels[row_range])
    result[tuple(region)] = _vote_labels(label[tuple(inside)], label[np.ix_(*nearest)], values, matrices)
    return result


def restore_probabilities(
    probabilities: torch.Tensor, shape: Triple, *, nearest_axis: int | None = None
) -> torch.Tensor:
    """Resize `probabilities` (C, Z, Y, X) to `shape`: trilinear without aligned corners, and by the nearest voxel along
    `nearest_axis`, as nnU-Net does for anisotropic scans.

    Keeps device and dtype and works on one channel at a time; memory: the result and one channel.
    """
    if probabilities.shape[1:] == torch.Size(shape):
        return probabilities
    result = probabilities.new_empty((probabilities.shape[0], *shape))
    intermediate_shape = list(shape)
    nearest_slices = None
    if nearest_axis is not None:
        old = probabilities.shape[1 + nearest_axis]
        nearest_slices = torch.from_numpy(_nearest_voxels(old, shape[nearest_axis])).to(probabilities.device)
        intermediate_shape[nearest_axis] = old
    for channel, resized in zip(probabilities, result, strict=True):
        source = channel[None, None]
        volume = functional.interpolate(source, intermediate_shape, mode="trilinear", align_corners=False)[0, 0]
        if nearest_slices is not None and nearest_axis is not None:
            volume = volume.index_select(nearest_axis, nearest_slices)
        resized.copy_(volume)
    return result


def _resize_splines(
    volume: NDArray[np.float32], shape: Triple, nearest_axis: int | None, order: int
) -> NDArray[np.float32]:
    """Resize one channel for `to_shape`."""
    nearest_slices = None
    if nearest_axis is not None and volume.shape[nearest_axis] != shape[nearest_axis]:
        nearest_slices = _nearest_voxels(volume.shape[nearest_axis], shape[nearest_axis])
        if len(nearest_slices) < volume.shape[nearest_axis]:
            # Slices that are not selected need not be resized.
            volume = np.take(volume, nearest_slices, axis=nearest_axis)
            nearest_slices = None
    within = tuple(axis for axis in range(3) if axis != nearest_axis)
    low = volume.min(axis=within, keepdims=True)
    high = volume.max(axis=within, keepdims=True)
    # Shrinking first leaves less work for the remaining axes.
    for axis in sorted(within, key=lambda a: shape[a] / volume.shape[a]):
        if volume.shape[axis] != shape[axis]:
            volume = _apply_matrix(volume, _interpolation_matrix(volume.shape[axis], shape[axis], order), axis)
    np.clip(volume, low, high, out=volume)
    return volume if nearest_slices is None else np.take(volume, nearest_slices, axis=nearest_axis)


def _vote_labels(
    label: NDArray[np.uint8], nearest: NDArray[np.uint8], values: Array, matrices: list[NDArray[np.float32]]
) -> NDArray[np.uint8]:
    """Return the value with the highest interpolated mask at each voxel; `nearest` holds the winner of ties."""
    background = np.ones(nearest.shape, np.float32)
    best = np.zeros(nearest.shape, np.float32)
    winner = np.zeros(nearest.shape, np.uint8)
    nearest_score = np.zeros(nearest.shape, np.float32)
    for value in values:
        score = (label == value).astype(np.float32)
        for axis, matrix in enumerate(matrices):
            score = _apply_matrix(score, matrix, axis)
        background -= score
        np.copyto(winner, value, where=score > best)
        np.copyto(nearest_score, score, where=nearest == value)
        np.maximum(best, score, out=best)
    # All masks sum to one, so background, the most expensive to interpolate, is the remainder.
    np.copyto(winner, 0, where=background >= best)
    np.copyto(nearest_score, background, where=nearest == 0)
    np.maximum(best, background, out=best)
    np.copyto(winner, nearest, where=nearest_score >= best - _TIE_TOLERANCE)
    return winner


def _apply_matrix(volume: NDArray[np.float32], matrix: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """Apply `matrix` (out, in) to every line of `volume` along `axis`, block by block of its band."""
    before, size, after = int(np.prod(volume.shape[:axis])), volume.shape[axis], int(np.prod(volume.shape[axis + 1 :]))
    lines = volume.reshape((before, size) if after == 1 else (before, size, after))
    shape = (*volume.shape[:axis], matrix.shape[0], *volume.shape[axis + 1 :])
    result = np.empty((before, matrix.shape[0], *lines.shape[2:]), np.float32)
    for start in range(0, matrix.shape[0], _BLOCK_ROWS):
        rows = matrix[start : start + _BLOCK_ROWS]
        used_columns = np.flatnonzero((rows != 0).any(axis=0))
        columns = slice(int(used_columns[0]), int(used_columns[-1]) + 1) if len(used_columns) else slice(0, 1)
        weights = rows[:, columns]
        part = result[:, start : start + _BLOCK_ROWS]
        if after == 1:
            np.matmul(lines[:, columns], weights.T, out=part)
        else:
            np.matmul(weights, lines[:, columns], out=part)
    return result.reshape(shape)


def _positions(old: int, new: int) -> NDArray[np.float64]:
    """Return the centres of `new` voxels in units of `old` voxels over the same extent, from the first old centre."""
    return (np.arange(new, dtype=np.float64) + 0.5) * (old / new) - 0.5


def _nearest_voxels(old: int, new: int) -> NDArray[np.int64]:
    """Return the index of the old voxel nearest to each new one."""
    return np.clip(np.floor(_positions(old, new) + 0.5), 0, old - 1).astype(np.int64)


def _interpolation_matrix(old: int, new: int, order: int) -> NDArray[np.float32]:
    """Return the matrix (new, old) that resizes a line by splines of an order."""
    if order == 0:
        return np.eye(old, dtype=np.float32)[_nearest_voxels(old, new)]
    return _linear_matrix(old, new) if order == 1 else _spline_matrix(old, new)


def _linear_matrix(old: int, new: int) -> NDArray[np.float32]:
    positions = np.clip(_positions(old, new), 0, old - 1)
    first = np.minimum(np.floor(positions).astype(np.int64), max(0, old - 2))
    matrix = np.zeros((new, old), np.float64)
    rows = np.arange(new)
    matrix[rows, np.minimum(first + 1, old - 1)] += positions - first
    matrix[rows, first] += 1 - (positions - first)
    return matrix.astype(np.float32)


def _spline_matrix(old: int, new: int) -> NDArray[np.float32]:
    """Return the matrix by which scipy.ndimage.zoom(order=3, mode="nearest", grid_mode=True) transforms a line."""
    from scipy.ndimage import spline_filter1d

    unit = np.pad(np.eye(old), ((_SPLINE_PADDING, _SPLINE_PADDING), (0, 0)), mode="edge")
    coefficients = spline_filter1d(unit, order=3, axis=0, mode="nearest")
    positions = _positions(old, new) + _SPLINE_PADDING
    index = np.floor(positions).astype(np.int64)
    t = (positions - index)[:, None]
    matrix = (
        (1 - t) ** 3 / 6 * coefficients[index - 1]
        + (4 - 6 * t**2 + 3 * t**3) / 6 * coefficients[index]
        + (1 + 3 * t + 3 * t**2 - 3 * t**3) / 6 * coefficients[index + 1]
        + t**3 / 6 * coefficients[index + 2]
    )
    matrix[np.abs(matrix) < _NEGLIGIBLE] = 0
    result: NDArray[np.float32] = matrix.astype(np.float32)
    return result
