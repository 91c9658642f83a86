"""Where a scan's voxels lie: the grid of a file, and the way between its own axes and the anatomical ones.

A file's array is indexed (x, y, z) along whatever axes its scanner chose. Everything after reading is indexed
(z, y, x) along the closest anatomical axes: x to the Right, y to the Anterior, z to the Superior. Going from one to
the other permutes and flips axes and never interpolates, so it loses nothing; an oblique grid stays oblique.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Affine = tuple[tuple[float, float, float, float], ...]
Array = npt.NDArray[Any]
SAME_MM = 0.01
"""Grids whose voxels lie closer than this are the same one; float32 headers round by less."""
_ALIKE_SPACING_MM = 1e-3
_ALIKE_DIRECTION = 1e-3


@dataclass(frozen=True)
class Geometry:
    """The voxel grid of one file."""

    shape: tuple[int, int, int]
    """Voxels along the file's own axes (x, y, z)."""
    affine: Affine
    """4x4, rows first: from a voxel's index (x, y, z) along the file's own axes to its centre in mm, in RAS."""

    @classmethod
    def of(cls, shape: tuple[int, ...], affine: npt.ArrayLike) -> Geometry:
        """From anything array-like; ValueError when it is no grid in space."""
        matrix = np.asarray(affine, np.float64)
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"a shape of {tuple(shape)} is not three lengths")
        if matrix.shape != (4, 4) or not np.isfinite(matrix).all():
            raise ValueError("the affine holds values that are not finite")
        lengths = np.linalg.norm(matrix[:3, :3], axis=0)
        if lengths.min() <= 0 or abs(np.linalg.det(matrix[:3, :3] / lengths)) < 1e-4:
            raise ValueError("the affine is singular: its axes do not span space")
        rows: Any = tuple(tuple(float(v) for v in row) for row in matrix)
        return cls((int(shape[0]), int(shape[1]), int(shape[2])), rows)

    @cached_property
    def _axes(self) -> tuple[tuple[int, int, int], tuple[bool, bool, bool]]:
        """The file's axis that runs along each of R, A, S, and whether it runs the other way."""
        from nibabel.orientations import io_orientation

        towards = io_orientation(np.asarray(self.affine))  # row i: the anatomical axis of file axis i, and its sign
        order = np.argsort(towards[:, 0])
        flips = towards[order, 1] < 0
        return (int(order[0]), int(order[1]), int(order[2])), (bool(flips[0]), bool(flips[1]), bool(flips[2]))

    @property
    def canonical_shape(self) -> tuple[int, int, int]:
        """Voxels along the anatomical axes (z, y, x)."""
        x, y, z = self._axes[0]
        return self.shape[z], self.shape[y], self.shape[x]

    @cached_property
    def canonical_affine(self) -> Affine:
        """As `affine`, for the index (x, y, z) along the anatomical axes."""
        order, flips = self._axes
        matrix = np.asarray(self.affine)
        turned = matrix.copy()
        for axis, (own, flip) in enumerate(zip(order, flips, strict=True)):
            turned[:3, axis] = -matrix[:3, own] if flip else matrix[:3, own]
            if flip:
                turned[:3, 3] += matrix[:3, own] * (self.shape[own] - 1)
        rows: Any = tuple(tuple(float(v) for v in row) for row in turned)
        return rows  # type: ignore[no-any-return]

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Millimetres between voxels along the anatomical axes (z, y, x)."""
        x, y, z = (float(v) for v in np.linalg.norm(np.asarray(self.canonical_affine)[:3, :3], axis=0))
        return z, y, x

    def to_canonical(self, array: Array) -> Array:
        """A view of `array` (..., x, y, z) in the file's own order as (..., z, y, x) along the anatomical axes."""
        lead = array.ndim - 3
        order, flips = self._axes
        turned = array.transpose(*range(lead), *(lead + axis for axis in order))
        turned = turned[(..., *(slice(None, None, -1 if flip else None) for flip in flips))]
        return turned.transpose(*range(lead), lead + 2, lead + 1, lead)

    def from_canonical(self, array: Array) -> Array:
        """The way back: a view of `array` (..., z, y, x) as (..., x, y, z) in the file's own order."""
        lead = array.ndim - 3
        order, flips = self._axes
        turned = array.transpose(*range(lead), lead + 2, lead + 1, lead)
        turned = turned[(..., *(slice(None, None, -1 if flip else None) for flip in flips))]
        return turned.transpose(*range(lead), *(lead + order.index(axis) for axis in range(3)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; floats come back exactly."""
        return {"shape": list(self.shape), "affine": [list(row) for row in self.affine]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Geometry:
        """What `to_dict` gave."""
        return cls.of(tuple(values["shape"]), values["affine"])


def same_grid(a: Geometry, b: Geometry, tolerance_mm: float = SAME_MM) -> str | None:
    """None when the voxels of `a` and `b` lie at the same places, else a sentence that says how they differ.

    Files that store the same grid along other axes are the same grid. `tolerance_mm` is how far apart two voxels of
    the same index may lie, anywhere in the grid.
    """
    if a.shape == b.shape and _furthest_mm(a.shape, a.affine, b.affine) <= tolerance_mm:
        return None
    if a.canonical_shape != b.canonical_shape:
        return f"the shapes differ: {_by(a.canonical_shape)} and {_by(b.canonical_shape)} voxels (z, y, x)"
    shape = a.canonical_shape[::-1]
    apart_mm = _furthest_mm(shape, a.canonical_affine, b.canonical_affine)
    if apart_mm <= tolerance_mm:
        return None
    return f"{_difference(a, b)}; their voxels lie up to {apart_mm:.3g} mm apart"


def furthest_mm(a: Geometry, b: Geometry) -> float:
    """The largest distance between two voxels of the same index in grids of the same canonical shape."""
    canonical = _furthest_mm(a.canonical_shape[::-1], a.canonical_affine, b.canonical_affine)
    own = _furthest_mm(a.shape, a.affine, b.affine) if a.shape == b.shape else canonical
    return min(own, canonical)


def along(array_zyx: Array, own: Geometry, target: Geometry) -> Array:
    """`array_zyx` of grid `own` along the anatomical axes as `target` has them, for two files of the same grid.

    They differ only near 45 degrees, where rounding in the header decides which anatomical axis is the closest.
    """
    if own.shape == target.shape and own._axes != target._axes:
        canonical = _furthest_mm(own.canonical_shape[::-1], own.canonical_affine, target.canonical_affine)
        if _furthest_mm(own.shape, own.affine, target.affine) < canonical:
            return target.to_canonical(own.from_canonical(array_zyx))
    return array_zyx


def _furthest_mm(shape: tuple[int, ...], a: Affine, b: Affine) -> float:
    # Both maps are affine, so their difference is largest at a corner.
    corners = np.array([(*corner, 1) for corner in itertools.product(*((0, n - 1) for n in shape))], np.float64)
    return float(np.linalg.norm(corners @ (np.asarray(a) - np.asarray(b)).T, axis=1).max())


def _difference(a: Geometry, b: Geometry) -> str:
    """What of two affines differs, for a reader."""
    parts = []
    if np.abs(np.subtract(a.spacing, b.spacing)).max() > _ALIKE_SPACING_MM:
        parts.append(f"the spacings differ: {_mm(a.spacing)} and {_mm(b.spacing)} mm (z, y, x)")
    one, other = np.asarray(a.canonical_affine), np.asarray(b.canonical_affine)
    turned = one[:3, :3] / np.linalg.norm(one[:3, :3], axis=0) - other[:3, :3] / np.linalg.norm(other[:3, :3], axis=0)
    if np.abs(turned).max() > _ALIKE_DIRECTION:
        parts.append("the directions of the axes differ")
    if not parts or np.abs(one[:3, 3] - other[:3, 3]).max() > SAME_MM:
        parts.append(f"the origins differ: {_mm(one[:3, 3])} and {_mm(other[:3, 3])} mm (x, y, z)")
    return ", ".join(parts)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _mm(values: Any) -> str:
    return " x ".join(f"{float(v):.6g}" for v in values)
