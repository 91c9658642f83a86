"""Scans, labels and probabilities from one voxel grid to another, as nnU-Net (the default) or MLPerf resample them.

Resizing along one axis is a matrix, the same for every line of the volume, so a volume is resized by one product an
axis. A cubic spline's matrix is nearly banded: an input voxel's weight falls by 0.27 with each voxel of distance, so
blocks of output rows need few input columns.

Arrays are (C, Z, Y, X) or (Z, Y, X); spacings are millimetres (z, y, x). scipy is needed for cubic splines.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from voxlane.volume.plan import Triple

Array = NDArray[Any]
Method = Literal["nnunet", "mlperf"]

ANISOTROPIC = 3.0
"""A grid whose coarsest spacing is more than this many times its finest is not interpolated along its coarse axis."""
_PAD = 12
"""Voxels an axis is extended by before the spline is fitted, as scipy does for edges that repeat."""
_NEGLIGIBLE = 1e-8
"""Weights of the spline's matrix below this are left out; single precision rounds away more."""
_TIED = 1e-5
"""Labels whose scores differ by less are tied; single precision cannot tell them apart."""
_ROWS = 64
"""Output voxels computed by one product."""


def new_shape(
    shape: tuple[int, ...], spacing: tuple[float, ...], target: tuple[float, ...], method: Method = "nnunet"
) -> Triple:
    """Voxels (z, y, x) that cover what `shape` covers, at `target` spacing; rounded, by MLPerf cut off; 1 at least."""
    sizes = [old / new * n for n, old, new in zip(shape, spacing, target, strict=True)]
    z, y, x = (max(1, int(s) if method == "mlperf" else round(s)) for s in sizes)
    return z, y, x


def coarse_axis(spacing: tuple[float, ...], target: tuple[float, ...]) -> int | None:
    """The axis not to interpolate along: the coarse one of an anisotropic scan, or of the grid it goes to."""
    for grid in (spacing, target):
        if max(grid) / min(grid) > ANISOTROPIC:
            coarse = [axis for axis, mm in enumerate(grid) if mm == max(grid)]
            return coarse[0] if len(coarse) == 1 else None
    return None


def to_spacing(
    image: Array, spacing: tuple[float, ...], target: tuple[float, ...], method: Method = "nnunet"
) -> NDArray[np.float32]:
    """`image` (C, Z, Y, X) at `target` spacing.

    nnunet: cubic splines whose edges repeat, clipped to the image's range; where the scan or the target grid is
    anisotropic, splines within the slices and the nearest slice across. mlperf: trilinear with corner voxels aligned,
    which is what the reference of that benchmark does.
    """
    shape = new_shape(image.shape[1:], spacing, target, method)
    if method == "mlperf":
        source = torch.from_numpy(np.ascontiguousarray(image, np.float32))[None]
        resized: NDArray[np.float32] = _interpolate(source, shape, mode="trilinear", align_corners=True)[0].numpy()
        return resized
    return to_shape(image, shape, nearest_axis=coarse_axis(spacing, target))


def to_shape(image: Array, shape: Triple, *, nearest_axis: int | None = None) -> NDArray[np.float32]:
    """`image` (C, Z, Y, X) over the same extent with `shape` voxels: cubic splines, along `nearest_axis` the nearest
    voxel. The result lies within the range of each channel, or of each slice across `nearest_axis`.

    Needs the result and, at the same time, up to twice one channel of the larger grid in float32.
    """
    if image.shape[1:] == tuple(shape):
        return np.asarray(image, np.float32)
    result = np.empty((image.shape[0], *shape), np.float32)
    for volume, resized in zip(image, result, strict=True):
        resized[...] = _splines(np.ascontiguousarray(volume, np.float32), shape, nearest_axis)
    return result


def label_to_spacing(
    label: NDArray[np.uint8], spacing: tuple[float, ...], target: tuple[float, ...], method: Method = "nnunet"
) -> NDArray[np.uint8]:
    """`label` (Z, Y, X) at `target` spacing; nnunet: as label_to_shape does, mlperf: the nearest voxel."""
    shape = new_shape(label.shape, spacing, target, method)
    if method == "mlperf":
        source = torch.from_numpy(np.ascontiguousarray(label))[None, None]
        resized: NDArray[np.uint8] = _interpolate(source, shape, mode="nearest")[0, 0].numpy()
        return resized
    return label_to_shape(label, shape, nearest_axis=coarse_axis(spacing, target))


def label_to_shape(label: NDArray[np.uint8], shape: Triple, *, nearest_axis: int | None = None) -> NDArray[np.uint8]:
    """`label` (Z, Y, X) over the same extent with `shape` voxels: each value's mask is interpolated linearly (along
    `nearest_axis`: the nearest voxel) and the value with the most wins, the nearest voxel's where several have that.

    One value at a time, and only the box around the foreground: about 24 bytes a voxel of that box, beside the result.
    """
    if label.shape == tuple(shape):
        return label
    result = np.zeros(shape, np.uint8)
    values = (np.flatnonzero(np.bincount(label.reshape(-1), minlength=1)[1:]) + 1).astype(np.uint8)
    if not len(values):
        return result
    matrices = []
    nearest = []
    region = []
    inside = []
    for axis, (old, new) in enumerate(zip(label.shape, shape, strict=True)):
        others = tuple(a for a in range(3) if a != axis)
        used = np.flatnonzero((label != 0).any(axis=others))
        columns = slice(int(used[0]), int(used[-1]) + 1)
        matrix = _nearest_matrix(old, new) if axis == nearest_axis else _linear_matrix(old, new)
        rows = np.flatnonzero((matrix[:, columns] != 0).any(axis=1))
        if not len(rows):
            return result
        wanted = slice(int(rows[0]), int(rows[-1]) + 1)
        region.append(wanted)
        inside.append(columns)
        matrices.append(np.ascontiguousarray(matrix[wanted, columns], np.float32))
        nearest.append(_nearest_voxels(old, new)[wanted])
    result[tuple(region)] = _strongest(label[tuple(inside)], label[np.ix_(*nearest)], values, matrices)
    return result


def probabilities_back(probabilities: torch.Tensor, shape: Triple, *, nearest_axis: int | None = None) -> torch.Tensor:
    """`probabilities` (C, Z, Y, X) over the same extent with `shape` voxels: trilinear, corners not aligned; along
    `nearest_axis` the nearest voxel, as nnU-Net does for anisotropic scans.

    On their device and in their dtype, one channel at a time: needs the result and one channel more.
    """
    if probabilities.shape[1:] == torch.Size(shape):
        return probabilities
    result = probabilities.new_empty((probabilities.shape[0], *shape))
    between = list(shape)
    chosen = None
    if nearest_axis is not None:
        old = probabilities.shape[1 + nearest_axis]
        chosen = torch.from_numpy(_nearest_voxels(old, shape[nearest_axis])).to(probabilities.device)
        between[nearest_axis] = old
    for channel, resized in zip(probabilities, result, strict=True):
        plane = _interpolate(channel[None, None], tuple(between), mode="trilinear", align_corners=False)[0, 0]
        resized.copy_(plane if chosen is None or nearest_axis is None else plane.index_select(nearest_axis, chosen))
    return result


def _interpolate(volume: torch.Tensor, shape: tuple[int, ...], **how: Any) -> torch.Tensor:
    return torch.nn.functional.interpolate(volume, size=shape, **how)


def _splines(volume: NDArray[np.float32], shape: Triple, nearest_axis: int | None) -> NDArray[np.float32]:
    """One channel of to_shape."""
    chosen = None
    if nearest_axis is not None and volume.shape[nearest_axis] != shape[nearest_axis]:
        chosen = _nearest_voxels(volume.shape[nearest_axis], shape[nearest_axis])
        if len(chosen) < volume.shape[nearest_axis]:
            # Slices that nobody will see need not be resized.
            volume = np.take(volume, chosen, axis=nearest_axis)
            chosen = None
    within = tuple(axis for axis in range(3) if axis != nearest_axis) if nearest_axis is not None else (0, 1, 2)
    low = volume.min(axis=within, keepdims=True)
    high = volume.max(axis=within, keepdims=True)
    # Shrinking first leaves less to do for the axes after.
    for axis in sorted(within, key=lambda a: shape[a] / volume.shape[a]):
        if volume.shape[axis] != shape[axis]:
            volume = _along(volume, _spline_matrix(volume.shape[axis], shape[axis]), axis)
    np.clip(volume, low, high, out=volume)
    return volume if chosen is None or nearest_axis is None else np.take(volume, chosen, axis=nearest_axis)


def _strongest(
    label: NDArray[np.uint8], nearest: NDArray[np.uint8], values: Array, matrices: list[NDArray[np.float32]]
) -> NDArray[np.uint8]:
    """The value with the highest interpolated mask, at each voxel of `nearest`, which holds what wins a tie."""
    background = np.ones(nearest.shape, np.float32)
    best = np.zeros(nearest.shape, np.float32)
    winner = np.zeros(nearest.shape, np.uint8)
    of_nearest = np.zeros(nearest.shape, np.float32)
    for value in values:
        score = (label == value).astype(np.float32)
        for axis, matrix in enumerate(matrices):
            score = _along(score, matrix, axis)
        background -= score
        np.copyto(winner, value, where=score > best)
        np.copyto(of_nearest, score, where=nearest == value)
        np.maximum(best, score, out=best)
    # The masks of all values sum to one, so that background's, the largest of all to interpolate, is what they leave.
    np.copyto(winner, 0, where=background >= best)
    np.copyto(of_nearest, background, where=nearest == 0)
    np.maximum(best, background, out=best)
    np.copyto(winner, nearest, where=of_nearest >= best - _TIED)
    return winner


def _along(volume: NDArray[np.float32], matrix: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """`matrix` (out, in) applied to every line of `volume` along `axis`, block by block of its band."""
    before, size, after = int(np.prod(volume.shape[:axis])), volume.shape[axis], int(np.prod(volume.shape[axis + 1 :]))
    lines = volume.reshape((before, size) if after == 1 else (before, size, after))
    shape = (*volume.shape[:axis], matrix.shape[0], *volume.shape[axis + 1 :])
    result = np.empty((before, matrix.shape[0], *lines.shape[2:]), np.float32)
    for start in range(0, matrix.shape[0], _ROWS):
        rows = matrix[start : start + _ROWS]
        used = np.flatnonzero((rows != 0).any(axis=0))
        columns = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1)
        weights = rows[:, columns]
        part = result[:, start : start + _ROWS]
        if after == 1:
            np.matmul(lines[:, columns], weights.T, out=part)
        else:
            np.matmul(weights, lines[:, columns], out=part)
    return result.reshape(shape)


def _positions(old: int, new: int) -> NDArray[np.float64]:
    """Where the centres of `new` voxels lie among `old` ones over the same extent, in voxels from the first centre."""
    return (np.arange(new, dtype=np.float64) + 0.5) * (old / new) - 0.5


def _nearest_voxels(old: int, new: int) -> NDArray[np.int64]:
    """The voxel that each new one takes."""
    return np.clip(np.floor(_positions(old, new) + 0.5), 0, old - 1).astype(np.int64)


def _nearest_matrix(old: int, new: int) -> NDArray[np.float32]:
    matrix = np.zeros((new, old), np.float32)
    matrix[np.arange(new), _nearest_voxels(old, new)] = 1
    return matrix


def _linear_matrix(old: int, new: int) -> NDArray[np.float32]:
    at = np.clip(_positions(old, new), 0, old - 1)
    first = np.minimum(np.floor(at).astype(np.int64), max(0, old - 2))
    matrix = np.zeros((new, old), np.float64)
    rows = np.arange(new)
    matrix[rows, np.minimum(first + 1, old - 1)] += at - first
    matrix[rows, first] += 1 - (at - first)
    return matrix.astype(np.float32)


def _spline_matrix(old: int, new: int) -> NDArray[np.float32]:
    """What scipy.ndimage.zoom(order=3, mode="nearest", grid_mode=True) does to a line."""
    from scipy.ndimage import spline_filter1d

    unit = np.pad(np.eye(old), ((_PAD, _PAD), (0, 0)), mode="edge")
    coefficients = spline_filter1d(unit, order=3, axis=0, mode="nearest")
    at = _positions(old, new) + _PAD
    whole = np.floor(at).astype(np.int64)
    t = (at - whole)[:, None]
    matrix = (
        (1 - t) ** 3 / 6 * coefficients[whole - 1]
        + (4 - 6 * t**2 + 3 * t**3) / 6 * coefficients[whole]
        + (1 + 3 * t + 3 * t**2 - 3 * t**3) / 6 * coefficients[whole + 1]
        + t**3 / 6 * coefficients[whole + 2]
    )
    matrix[np.abs(matrix) < _NEGLIGIBLE] = 0
    result: NDArray[np.float32] = matrix.astype(np.float32)
    return result
