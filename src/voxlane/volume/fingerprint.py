"""What the scans of a dataset are like: sizes, spacings and the intensities of what is to be segmented.

take() looks at one case and merge() joins the cases, in any order to the same result; a plan is made from that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from voxlane.errors import BadCasesError
from voxlane.settings import record
from voxlane.volume.plan import Triple

Box = tuple[slice, slice, slice]
SpacingMm = tuple[float, float, float]

_QUANTILES = 2000
"""Values that stand for one case's foreground; each case counts the same, however large its foreground."""
_MOST_SORTED = 2_000_000
"""Foreground voxels above this number are sampled before they are sorted."""


@record
class CaseIntensity:
    """One channel's intensities in the foreground of one case."""

    mean: float
    """Of every foreground voxel."""
    mean_square: float
    """Of every foreground voxel."""
    low: float
    """The smallest."""
    high: float
    """The largest."""
    quantiles: tuple[float, ...]
    """Evenly spaced through the distribution, in ascending order."""


@record
class CaseFingerprint:
    """What one case adds to the fingerprint."""

    shape: Triple
    """Voxels (z, y, x) of the box that holds everything but 0."""
    spacing: SpacingMm
    """Millimetres between voxels (z, y, x)."""
    relative_size: float
    """Voxels of that box over voxels of the scan."""
    intensities: tuple[CaseIntensity, ...]
    """One a channel; none at all where the case has no foreground."""


@record
class Intensity:
    """One channel's foreground intensities over all cases, each case counting the same."""

    mean: float
    std: float
    median: float
    low: float
    """The smallest."""
    high: float
    """The largest."""
    percentile_00_5: float
    percentile_99_5: float


@record
class Fingerprint:
    """What the scans of a dataset are like."""

    shapes: tuple[Triple, ...]
    """Voxels (z, y, x) of each case's nonzero box."""
    spacings: tuple[SpacingMm, ...]
    """Millimetres (z, y, x) of each case, in the same order."""
    relative_size: float
    """Median share of a scan that its nonzero box takes."""
    intensities: tuple[Intensity, ...]
    """One a channel."""

    @property
    def cases(self) -> int:
        """How many cases were looked at."""
        return len(self.shapes)

    @property
    def median_shape(self) -> tuple[float, ...]:
        """Voxels (z, y, x), before resampling."""
        return tuple(float(statistics.median(axis)) for axis in zip(*self.shapes, strict=True))

    @property
    def median_spacing(self) -> tuple[float, ...]:
        """Millimetres (z, y, x)."""
        return tuple(statistics.median(axis) for axis in zip(*self.spacings, strict=True))


def crop_to_nonzero(image: NDArray[Any]) -> Box:
    """The smallest box of `image` (C, Z, Y, X) that holds every voxel that is not 0 in some channel: slices (z, y, x),
    starts included, stops not. An image of zeros is not cropped."""
    planes = np.zeros(image.shape[1:3], np.bool_)
    columns = np.zeros(image.shape[3], np.bool_)
    for channel in image:
        # Plane by plane, so that no mask of the whole scan is held.
        for z, plane in enumerate(channel):
            nonzero = plane != 0
            planes[z] |= nonzero.any(axis=1)
            columns |= nonzero.any(axis=0)
    if not columns.any():
        return slice(0, image.shape[1]), slice(0, image.shape[2]), slice(0, image.shape[3])
    return _extent(planes.any(axis=1)), _extent(planes.any(axis=0)), _extent(columns)


def take(image: NDArray[Any], label: NDArray[np.uint8], spacing: SpacingMm, seed: int = 0) -> CaseFingerprint:
    """What `image` (C, Z, Y, X) with `label` (Z, Y, X) adds to the fingerprint. `seed` chooses among the foreground's
    voxels where they are more than two million."""
    box = crop_to_nonzero(image)
    cropped = image[(slice(None), *box)]
    z, y, x = cropped.shape[1:]
    return CaseFingerprint(
        shape=(z, y, x),
        spacing=spacing,
        relative_size=z * y * x / math.prod(image.shape[1:]),
        intensities=_intensities(cropped, label[box] != 0, seed),
    )


def merge(cases: Iterable[CaseFingerprint]) -> Fingerprint:
    """The fingerprint of a dataset; the order of `cases` does not matter."""
    ordered = sorted(cases, key=lambda case: (case.shape, case.spacing, case.relative_size))
    seen = [case.intensities for case in ordered if case.intensities]
    if not seen:
        raise BadCasesError(
            "no case has any foreground, so there is nothing to learn", fix="Check the labels and their values"
        )
    channels = {len(channel) for channel in seen}
    if len(channels) > 1:
        raise BadCasesError(f"cases have different numbers of channels: {sorted(channels)}")
    return Fingerprint(
        shapes=tuple(case.shape for case in ordered),
        spacings=tuple(case.spacing for case in ordered),
        relative_size=statistics.median(case.relative_size for case in ordered),
        intensities=tuple(_pool(channel) for channel in zip(*seen, strict=True)),
    )


def _extent(used: Any) -> slice:
    """From the first to the last that is true."""
    where = np.flatnonzero(used)
    return slice(int(where[0]), int(where[-1]) + 1)


def _intensities(image: NDArray[Any], foreground: NDArray[np.bool_], seed: int) -> tuple[CaseIntensity, ...]:
    where = np.flatnonzero(foreground)
    if not len(where):
        return ()
    chosen = where
    if len(where) > _MOST_SORTED:
        chosen = where[np.random.default_rng(seed).integers(len(where), size=_MOST_SORTED)]
    steps = ((np.arange(_QUANTILES) + 0.5) / _QUANTILES * len(chosen)).astype(np.int64)
    result = []
    for channel in image:
        values = channel[foreground].astype(np.float64)
        ranked = np.sort(channel.reshape(-1)[chosen] if len(chosen) < len(where) else values)
        result.append(
            CaseIntensity(
                mean=float(values.mean()),
                mean_square=float(np.square(values).mean()),
                low=float(values.min()),
                high=float(values.max()),
                quantiles=tuple(ranked[steps].tolist()),
            )
        )
    return tuple(result)


def _pool(cases: tuple[CaseIntensity, ...]) -> Intensity:
    # fsum rounds once, whatever the order of its terms.
    mean = math.fsum(case.mean for case in cases) / len(cases)
    mean_square = math.fsum(case.mean_square for case in cases) / len(cases)
    pooled = np.sort(np.concatenate([np.asarray(case.quantiles) for case in cases]))
    lower, median, upper = np.percentile(pooled, (0.5, 50, 99.5))
    return Intensity(
        mean=mean,
        std=math.sqrt(max(0.0, mean_square - mean * mean)),
        median=float(median),
        low=min(case.low for case in cases),
        high=max(case.high for case in cases),
        percentile_00_5=float(lower),
        percentile_99_5=float(upper),
    )
