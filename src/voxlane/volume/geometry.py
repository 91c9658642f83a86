"""Voxel grids of files, and conversion between a file's own axes and the anatomical axes.

A file's array is indexed (x, y, z) along axes that its scanner chose. After reading, everything is indexed (z, y, x)
along the closest anatomical axes: x to the Right, y to the Anterior, z to the Superior. The conversion permutes and
flips axes and never interpolates, so it is lossless; an oblique grid stays oblique.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Affine = tuple[tuple[float, float, float, float], ...]
Array = npt.NDArray[Any]
SAME_MM = 0.01
"""Largest distance between voxels of grids that count as the same; float32 headers round by less."""
_SPACING_TOLERANCE_MM = 1e-3
_DIRECTION_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Geometry:
    """The voxel grid of one file."""

    shape: tuple[int, int, int]
    """Number of voxels along the file's own axes (x, y, z)."""
    affine: Affine
    """Row-major 4x4 matrix from a voxel's index (x, y, z) along the file's own axes to its centre in mm, in RAS."""

    @classmethod
    def of(cls, shape: tuple[int, ...], affine: npt.ArrayLike) -> Geometry:
        """Build from array-like values; raise ValueError if they do not describe a grid in space."""
        matrix = np.asarray(affine, np.float64)
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"expected a shape of three positive sizes, got {tuple(shape)}")
        if matrix.shape != (4, 4) or not np.isfinite(matrix).all():
            raise ValueError("the affine contains values that are not finite")
        lengths = np.linalg.norm(matrix[:3, :3], axis=0)
        if lengths.min() <= 0 or abs(np.linalg.det(matrix[:3, :3] / lengths)) < 1e-4:
            raise ValueError("the affine is singular: its axes do not span space")
        return cls((int(shape[0]), int(shape[1]), int(shape[2])), _to_affine(matrix))

    @cached_property
    def anatomical_axes(self) -> tuple[tuple[int, int, int], tuple[bool, bool, bool]]:
        """The file's axis closest to each of R, A and S, and whether it runs in the opposite direction."""
        from nibabel.orientations import io_orientation

        # Row i: the anatomical axis of file axis i, and its sign.
        orientations = io_orientation(np.asarray(self.affine))
        order = np.argsort(orientations[:, 0])
        flips = orientations[order, 1] < 0
        return (int(order[0]), int(order[1]), int(order[2])), (bool(flips[0]), bool(flips[1]), bool(flips[2]))

    @property
    def canonical_shape(self) -> tuple[int, int, int]:
        """Number of voxels along the anatomical axes (z, y, x)."""
        x, y, z = self.anatomical_axes[0]
        return self.shape[z], self.shape[y], self.shape[x]

    @cached_property
    def canonical_affine(self) -> Affine:
        """Like `affine`, but for an index (x, y, z) along the anatomical axes."""
        order, flips = self.anatomical_axes
        matrix = np.asarray(self.affine)
        rotated = matrix.copy()
        for axis, (source, flip) in enumerate(zip(order, flips, strict=True)):
            rotated[:3, axis] = -matrix[:3, source] if flip else matrix[:3, source]
            if flip:
                rotated[:3, 3] += matrix[:3, source] * (self.shape[source] - 1)
        return _to_affine(rotated)

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Millimetres between voxels along the anatomical axes (z, y, x)."""
        x, y, z = (float(v) for v in np.linalg.norm(np.asarray(self.canonical_affine)[:3, :3], axis=0))
        return z, y, x

    def to_canonical(self, array: Array) -> Array:
        """Return a view of `array` (..., x, y, z), in file order, as (..., z, y, x) along the anatomical axes."""
        order, flips = self.anatomical_axes
        return _flip(_permute(array, order), flips).swapaxes(-1, -3)

    def from_canonical(self, array: Array) -> Array:
        """Return a view of `array` (..., z, y, x), along the anatomical axes, as (..., x, y, z) in the file's order."""
        order, flips = self.anatomical_axes
        return _permute(_flip(array.swapaxes(-1, -3), flips), [order.index(axis) for axis in range(3)])

    @property
    def stored_spacing(self) -> tuple[float, float, float]:
        """Millimetres between voxels along the file's own axes, in the order (z, y, x)."""
        x, y, z = (float(v) for v in np.linalg.norm(np.asarray(self.affine)[:3, :3], axis=0))
        return z, y, x

    def to_stored(self, array: Array) -> Array:
        """Return a view of `array` (..., z, y, x), along the anatomical axes, as (..., z, y, x) along the file's."""
        return self.from_canonical(array).swapaxes(-1, -3)

    def from_stored(self, array: Array) -> Array:
        """Return a view of `array` (..., z, y, x), along the file's own axes, as (..., z, y, x) along the anatomical
        ones."""
        return self.to_canonical(array.swapaxes(-1, -3))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Geometry:
        """Build from the result of `dataclasses.asdict`; floats survive a round trip through JSON exactly."""
        return cls.of(tuple(values["shape"]), values["affine"])


def _permute(array: Array, order: Sequence[int]) -> Array:
    """Put the last three axes into this order."""
    leading = array.ndim - 3
    return array.transpose(*range(leading), *(leading + axis for axis in order))


def _flip(array: Array, flips: Sequence[bool]) -> Array:
    """Reverse those of the last three axes that `flips` marks."""
    return array[(..., *(slice(None, None, -1 if flip else None) for flip in flips))]


def _to_affine(matrix: Array) -> Affine:
    rows: Any = tuple(tuple(row) for row in matrix.tolist())
    return rows  # type: ignore[no-any-return]


def describe_grid_difference(a: Geometry, b: Geometry, tolerance_mm: float = SAME_MM) -> str | None:
    """Return None if the voxels of `a` and `b` coincide, else a sentence that says how the grids differ.

    The order of a file's axes does not matter. Voxels coincide if those of the same index are at most `tolerance_mm`
    apart throughout the grid.
    """
    if a.shape == b.shape and _max_distance_mm(a.shape, a.affine, b.affine) <= tolerance_mm:
        return None
    if a.canonical_shape != b.canonical_shape:
        shapes = format_shape(a.canonical_shape), format_shape(b.canonical_shape)
        return f"the shapes differ: {shapes[0]} and {shapes[1]} voxels (z, y, x)"
    distance_mm = _max_distance_mm(a.canonical_shape[::-1], a.canonical_affine, b.canonical_affine)
    if distance_mm <= tolerance_mm:
        return None
    parts = []
    if np.abs(np.subtract(a.spacing, b.spacing)).max() > _SPACING_TOLERANCE_MM:
        parts.append(f"the spacings differ: {format_mm(a.spacing)} and {format_mm(b.spacing)} mm (z, y, x)")
    first, second = np.asarray(a.canonical_affine), np.asarray(b.canonical_affine)
    a_directions, b_directions = (m[:3, :3] / np.linalg.norm(m[:3, :3], axis=0) for m in (first, second))
    if np.abs(a_directions - b_directions).max() > _DIRECTION_TOLERANCE:
        parts.append("the directions of the axes differ")
    if not parts or np.abs(first[:3, 3] - second[:3, 3]).max() > SAME_MM:
        parts.append(f"the origins differ: {format_mm(first[:3, 3])} and {format_mm(second[:3, 3])} mm (x, y, z)")
    return f"{', '.join(parts)}; their voxels are up to {distance_mm:.3g} mm apart"


def max_voxel_distance_mm(a: Geometry, b: Geometry) -> float:
    """Return the largest distance between voxels of the same index, in grids of the same canonical shape."""
    canonical = _max_distance_mm(a.canonical_shape[::-1], a.canonical_affine, b.canonical_affine)
    source = _max_distance_mm(a.shape, a.affine, b.affine) if a.shape == b.shape else canonical
    return min(source, canonical)


def max_index_distance_mm(a: Geometry, b: Geometry) -> float:
    """Return the largest distance between voxels of the same index along the file's own axes, in grids of the same
    shape."""
    return _max_distance_mm(a.shape, a.affine, b.affine)


def align_axes(array_zyx: Array, source: Geometry, target: Geometry) -> Array:
    """Return `array_zyx` of grid `source` along the anatomical axes that `target` uses, for two files of the same grid.
    These axes differ only near 45 degrees, where rounding in a header decides which anatomical axis is closest."""
    if source.shape == target.shape and source.anatomical_axes != target.anatomical_axes:
        canonical = _max_distance_mm(source.canonical_shape[::-1], source.canonical_affine, target.canonical_affine)
        if _max_distance_mm(source.shape, source.affine, target.affine) < canonical:
            return target.to_canonical(source.from_canonical(array_zyx))
    return array_zyx


def _max_distance_mm(shape: tuple[int, ...], a: Affine, b: Affine) -> float:
    # Both maps are affine, so their difference is largest at a corner.
    corners = np.array([(*corner, 1) for corner in itertools.product(*((0, n - 1) for n in shape))], np.float64)
    return float(np.linalg.norm(corners @ (np.asarray(a) - np.asarray(b)).T, axis=1).max())


def format_shape(shape: tuple[int, ...]) -> str:
    """Format a shape as "3 x 4 x 5"."""
    return " x ".join(map(str, shape))


def format_mm(values: Any) -> str:
    """Format lengths along axes as "3 x 0.8 x 0.8"."""
    return " x ".join(f"{float(v):.6g}" for v in values)
