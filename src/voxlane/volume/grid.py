"""From a scan's own grid to the plan's, and a prediction back: what preparation and prediction do alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from voxlane.volume import normalise, resample
from voxlane.volume.fingerprint import crop_to_nonzero
from voxlane.volume.geometry import Affine
from voxlane.volume.plan import Plan, Triple

Array = npt.NDArray[Any]
MLPERF = "mlperf-kits19"
"""The recipe that resamples first and normalises then."""


@dataclass(frozen=True)
class Grid:
    """Where a prepared volume lies in its scan's canonical frame (z, y, x)."""

    scan_shape: Triple
    """Voxels of the scan."""
    scan_spacing: tuple[float, float, float]
    """Millimetres."""
    crop_start: Triple
    crop_stop: Triple
    """The part of the scan that was kept: what lies outside is zero in every channel."""
    shape: Triple
    """Voxels of that part, resampled."""
    spacing: tuple[float, float, float]
    """Millimetres between those."""
    pad: Triple
    """Voxels added before the first one on each axis."""
    padded_shape: Triple
    """Voxels of the prepared volume."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Grid:
        """Read what `to_dict` gave, also through JSON."""
        return cls(**{name: tuple(value) for name, value in values.items()})

    @property
    def crop(self) -> tuple[slice, slice, slice]:
        """The kept part, as slices."""
        z, y, x = (slice(a, b) for a, b in zip(self.crop_start, self.crop_stop, strict=True))
        return z, y, x


def plan_grid(image: Array, spacing: tuple[float, float, float], plan: Plan) -> Grid:
    """The grid that `image` (C, Z, Y, X) is prepared on."""
    mlperf = plan.recipe == MLPERF
    shape = image.shape[1:]
    box = tuple(slice(0, n) for n in shape) if mlperf else crop_to_nonzero(image)
    start, stop = tuple(part.start for part in box), tuple(part.stop for part in box)
    cropped = tuple(part.stop - part.start for part in box)
    new = resample.new_shape(cropped, spacing, plan.spacing, "mlperf" if mlperf else "nnunet")
    missing = tuple(max(0, p - n) if plan.pad_to_patch else 0 for p, n in zip(plan.patch, new, strict=True))
    return Grid(
        scan_shape=_triple(shape),
        scan_spacing=spacing,
        crop_start=_triple(start),
        crop_stop=_triple(stop),
        shape=new,
        spacing=plan.spacing,
        pad=_triple(tuple(m // 2 for m in missing)),
        padded_shape=_triple(tuple(n + m for n, m in zip(new, missing, strict=True))),
    )


def image_to_grid(image: Array, grid: Grid, plan: Plan) -> npt.NDArray[np.float32]:
    """`image` (C, Z, Y, X) normalised, on the plan's grid.

    As nnU-Net does it: cropped, normalised, resampled; as MLPerf does it: resampled, normalised, padded by repeating
    the outermost voxels.
    """
    kept = image[(slice(None), *grid.crop)]
    if plan.recipe == MLPERF:
        made = resample.to_spacing(kept, grid.scan_spacing, grid.spacing, "mlperf")
        return _padded(normalise.apply(made, plan.normalisation), grid)
    return resample.to_spacing(normalise.apply(kept, plan.normalisation), grid.scan_spacing, grid.spacing)


def label_to_grid(label: npt.NDArray[np.uint8], grid: Grid, plan: Plan) -> npt.NDArray[np.uint8]:
    """`label` (Z, Y, X) on the plan's grid; MLPerf pads it as it pads the image."""
    kept = label[grid.crop]
    if plan.recipe == MLPERF:
        return _padded(resample.label_to_spacing(kept, grid.scan_spacing, grid.spacing, "mlperf"), grid)
    return resample.label_to_spacing(kept, grid.scan_spacing, grid.spacing)


def outputs_to_scan(outputs: torch.Tensor, grid: Grid) -> torch.Tensor:
    """A network's outputs (K, Z, Y, X) on the plan's grid, interpolated onto the kept part of the scan."""
    z, y, x = (slice(p, p + n) for p, n in zip(grid.pad, grid.shape, strict=True))
    cropped = _triple(tuple(b - a for a, b in zip(grid.crop_start, grid.crop_stop, strict=True)))
    axis = resample.coarse_axis(grid.scan_spacing, grid.spacing)
    return resample.probabilities_back(outputs[:, z, y, x], cropped, nearest_axis=axis)


def grid_affine(grid: Grid, scan_affine: Affine, plan: Plan) -> list[list[float]]:
    """From an index (x, y, z) of the prepared volume to millimetres, 4x4; `scan_affine` does so for the scan along the
    anatomical axes (`Geometry.canonical_affine`)."""
    to_scan = np.eye(4)
    for axis in range(3):
        old, new = grid.crop_stop[axis] - grid.crop_start[axis], grid.shape[axis]
        if plan.recipe == MLPERF:  # it lays the corner voxels onto each other, the others the volumes' outer faces
            step, first = (old - 1) / max(1, new - 1), 0.0
        else:
            step, first = old / new, (old / new - 1) / 2
        x_first = 2 - axis
        to_scan[x_first, x_first] = step
        to_scan[x_first, 3] = grid.crop_start[axis] + first - step * grid.pad[axis]
    made: list[list[float]] = (np.asarray(scan_affine) @ to_scan).tolist()
    return made


def mask_to_scan(mask: npt.NDArray[np.uint8], grid: Grid) -> npt.NDArray[np.uint8]:
    """A mask of the kept part, in the whole scan; background elsewhere."""
    whole = np.zeros(grid.scan_shape, np.uint8)
    whole[grid.crop] = mask
    return whole


def _padded(volume: Array, grid: Grid) -> Array:
    """`volume` (..., Z, Y, X) in the middle of the padded shape, its outermost voxels repeated."""
    if grid.padded_shape == grid.shape:
        return volume
    sides = [(p, whole - p - n) for p, n, whole in zip(grid.pad, grid.shape, grid.padded_shape, strict=True)]
    return np.pad(volume, [(0, 0)] * (volume.ndim - 3) + sides, mode="edge")


def _triple(values: tuple[int, ...]) -> Triple:
    z, y, x = (int(v) for v in values)
    return z, y, x
