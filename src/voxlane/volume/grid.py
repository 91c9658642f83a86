"""Conversion between a scan's own grid and the plan's, shared by preparation and prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from voxlane.volume import normalise, resample
from voxlane.volume.fingerprint import crop_to_nonzero
from voxlane.volume.geometry import Affine
from voxlane.volume.plan import Plan, Triple, to_triple

Array = npt.NDArray[Any]
MLPERF_RECIPE = "mlperf-kits19"
"""Name of the recipe that resamples before it normalises."""


@dataclass(frozen=True)
class Grid:
    """Position of a prepared volume in its scan's canonical frame (z, y, x)."""

    scan_shape: Triple
    """Voxels of the scan."""
    scan_spacing: tuple[float, float, float]
    """Millimetres between voxels of the scan."""
    crop_start: Triple
    crop_stop: Triple
    """Exclusive end of the crop; everything outside the crop is zero in every channel."""
    shape: Triple
    """Voxels of the crop after resampling."""
    spacing: tuple[float, float, float]
    """Millimetres between voxels after resampling."""
    pad: Triple
    """Voxels of padding before the first one along each axis."""
    padded_shape: Triple
    """Voxels of the prepared volume."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Grid:
        """Build from the result of `dataclasses.asdict`, also after a round trip through JSON."""
        return cls(**{name: tuple(value) for name, value in values.items()})

    @property
    def crop(self) -> tuple[slice, slice, slice]:
        """The crop as slices."""
        z, y, x = (slice(a, b) for a, b in zip(self.crop_start, self.crop_stop, strict=True))
        return z, y, x

    @property
    def nearest_axis(self) -> int | None:
        """The axis along which nnU-Net's recipe does not interpolate scans and labels, if any."""
        return resample.find_coarse_axis(self.scan_spacing, self.spacing)

    @property
    def outputs_nearest_axis(self) -> int | None:
        """The axis along which nnU-Net's recipe does not interpolate outputs, if any."""
        return resample.find_coarse_axis(self.spacing, self.scan_spacing)


def plan_grid(image: Array, spacing: tuple[float, float, float], plan: Plan) -> Grid:
    """Return the grid on which `image` (C, Z, Y, X) is prepared."""
    mlperf = plan.recipe == MLPERF_RECIPE
    box = tuple(slice(0, n) for n in image.shape[1:]) if mlperf else crop_to_nonzero(image)
    cropped = tuple(part.stop - part.start for part in box)
    new = resample.compute_new_shape(cropped, spacing, plan.spacing, truncate=mlperf)
    missing = tuple(max(0, p - n) if plan.pad_to_patch else 0 for p, n in zip(plan.patch, new, strict=True))
    return Grid(
        scan_shape=to_triple(image.shape[1:]),
        scan_spacing=spacing,
        crop_start=to_triple(part.start for part in box),
        crop_stop=to_triple(part.stop for part in box),
        shape=new,
        spacing=plan.spacing,
        pad=to_triple(m // 2 for m in missing),
        padded_shape=to_triple(n + m for n, m in zip(new, missing, strict=True)),
    )


def image_to_grid(image: Array, grid: Grid, plan: Plan) -> npt.NDArray[np.float32]:
    """Normalise `image` (C, Z, Y, X) and resample it to the plan's grid. nnU-Net crops, normalises and resamples;
    MLPerf resamples trilinearly with aligned corner voxels, normalises and pads by repeating the outermost voxels."""
    cropped = image[(slice(None), *grid.crop)]
    if plan.recipe == MLPERF_RECIPE:
        source = torch.from_numpy(np.require(cropped, np.float32, ["C", "W"]))[None]
        resampled = functional.interpolate(source, grid.shape, mode="trilinear", align_corners=True)[0].numpy()
        return _pad_edges(normalise.apply(resampled, plan.normalisation), grid)
    nearest_axis = grid.nearest_axis if plan.resampling.separate else None
    normalised = normalise.apply(cropped, plan.normalisation)
    return resample.to_shape(normalised, grid.shape, nearest_axis=nearest_axis, order=plan.resampling.order)


def label_to_grid(label: npt.NDArray[np.uint8], grid: Grid, plan: Plan) -> npt.NDArray[np.uint8]:
    """Resample `label` (Z, Y, X) to the plan's grid; MLPerf takes the nearest voxels and pads like the image."""
    cropped = label[grid.crop]
    if plan.recipe == MLPERF_RECIPE:
        source = torch.from_numpy(np.require(cropped, requirements=["C", "W"]))[None, None]
        return _pad_edges(functional.interpolate(source, grid.shape, mode="nearest")[0, 0].numpy(), grid)
    nearest_axis = grid.nearest_axis if plan.resampling.separate else None
    return resample.label_to_shape(cropped, grid.shape, nearest_axis=nearest_axis)


def outputs_to_scan(outputs: torch.Tensor, grid: Grid, *, separate: bool = True) -> torch.Tensor:
    """Interpolate a network's outputs (K, Z, Y, X) from the plan's grid to the cropped part of the scan. `separate` is
    that of the plan's `Resampling`."""
    z, y, x = (slice(p, p + n) for p, n in zip(grid.pad, grid.shape, strict=True))
    scan_crop = to_triple(b - a for a, b in zip(grid.crop_start, grid.crop_stop, strict=True))
    nearest_axis = grid.outputs_nearest_axis if separate else None
    return resample.restore_probabilities(outputs[:, z, y, x], scan_crop, nearest_axis=nearest_axis)


def compute_grid_affine(grid: Grid, scan_affine: Affine, plan: Plan) -> list[list[float]]:
    """Return the 4x4 matrix from an index (x, y, z) of the prepared volume to millimetres, given that of the scan along
    the anatomical axes (`Geometry.canonical_affine`)."""
    to_scan = np.eye(4)
    for axis in range(3):
        old, new = grid.crop_stop[axis] - grid.crop_start[axis], grid.shape[axis]
        # MLPerf aligns the centres of the corner voxels, nnU-Net the outer faces of the volumes.
        if plan.recipe == MLPERF_RECIPE:
            step, first = (old - 1) / max(1, new - 1), 0.0
        else:
            step, first = old / new, (old / new - 1) / 2
        matrix_axis = 2 - axis
        to_scan[matrix_axis, matrix_axis] = step
        to_scan[matrix_axis, 3] = grid.crop_start[axis] + first - step * grid.pad[axis]
    affine: list[list[float]] = (np.asarray(scan_affine) @ to_scan).tolist()
    return affine


def mask_to_scan(mask: npt.NDArray[np.uint8], grid: Grid) -> npt.NDArray[np.uint8]:
    """Place a mask of the crop in the whole scan; the rest is background."""
    scan_mask = np.zeros(grid.scan_shape, np.uint8)
    scan_mask[grid.crop] = mask
    return scan_mask


def _pad_edges(volume: Array, grid: Grid) -> Array:
    """Centre `volume` (..., Z, Y, X) in the padded shape and repeat its outermost voxels."""
    if grid.padded_shape == grid.shape:
        return volume
    sides = [(p, padded - p - n) for p, n, padded in zip(grid.pad, grid.shape, grid.padded_shape, strict=True)]
    return np.pad(volume, [(0, 0)] * (volume.ndim - 3) + sides, mode="edge")
