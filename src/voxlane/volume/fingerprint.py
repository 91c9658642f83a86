"""Fingerprint of a dataset: sizes and spacings of its scans and intensities of their foreground, as a plan needs them.

`fingerprint_case` measures one case; `merge_cases` combines cases, with the same result in any order.
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
"""Number of quantiles that represent a case's foreground, so that each case has the same weight."""
_MAX_SORTED_VOXELS = 2_000_000
"""Foregrounds with more voxels than this are sampled before sorting."""


@record
class CaseIntensity:
    """One channel's intensities in the foreground of one case."""

    mean: float
    """Mean over all foreground voxels."""
    mean_square: float
    """Mean of the squared intensities of all foreground voxels."""
    low: float
    """Smallest foreground intensity."""
    high: float
    """Largest foreground intensity."""
    quantiles: tuple[float, ...]
    """Evenly spaced quantiles of the distribution, in ascending order."""


@record
class CaseFingerprint:
    """Fingerprint of one case."""

    shape: Triple
    """Voxels (z, y, x) of the bounding box of all nonzero voxels."""
    spacing: SpacingMm
    """Millimetres between voxels (z, y, x)."""
    relative_size: float
    """Voxels of that box divided by voxels of the scan."""
    intensities: tuple[CaseIntensity, ...]
    """Intensities of each channel; empty if the case has no foreground."""


@record
class Intensity:
    """One channel's foreground intensities over all cases, with equal weight for each case."""

    mean: float
    std: float
    median: float
    low: float
    """Smallest intensity of any case."""
    high: float
    """Largest intensity of any case."""
    percentile_00_5: float
    percentile_99_5: float


@record
class Fingerprint:
    """Sizes, spacings and intensities of a dataset's scans."""

    shapes: tuple[Triple, ...]
    """Voxels (z, y, x) of each case's nonzero box."""
    spacings: tuple[SpacingMm, ...]
    """Millimetres (z, y, x) of each case, in the same order."""
    relative_size: float
    """Median over cases of the nonzero box's share of the scan."""
    intensities: tuple[Intensity, ...]
    """Intensities of each channel."""


def crop_to_nonzero(image: NDArray[Any]) -> Box:
    """Return the bounding box of all voxels of `image` (C, Z, Y, X) that are nonzero in any channel: slices (z, y, x)
    with inclusive start and exclusive stop. An image of zeros is not cropped."""
    planes = np.zeros(image.shape[1:3], np.bool_)
    columns = np.zeros(image.shape[3], np.bool_)
    for channel in image:
        # Plane by plane, to avoid a mask of the whole scan.
        for z, plane in enumerate(channel):
            nonzero = plane != 0
            planes[z] |= nonzero.any(axis=1)
            columns |= nonzero.any(axis=0)
    if not columns.any():
        return slice(0, image.shape[1]), slice(0, image.shape[2]), slice(0, image.shape[3])
    return _extent(planes.any(axis=1)), _extent(planes.any(axis=0)), _extent(columns)


def fingerprint_case(
    image: NDArray[Any], label: NDArray[np.uint8], spacing: SpacingMm, seed: int = 0
) -> CaseFingerprint:
    """Measure the fingerprint of `image` (C, Z, Y, X) with `label` (Z, Y, X). `seed` selects the sampled voxels if the
    foreground has more than two million."""
    box = crop_to_nonzero(image)
    cropped = image[(slice(None), *box)]
    z, y, x = cropped.shape[1:]
    return CaseFingerprint(
        shape=(z, y, x),
        spacing=spacing,
        relative_size=z * y * x / math.prod(image.shape[1:]),
        intensities=_foreground_intensities(cropped, label[box] != 0, seed),
    )


def merge_cases(cases: Iterable[CaseFingerprint]) -> Fingerprint:
    """Combine the cases' fingerprints into that of the dataset; their order does not matter."""
    ordered = sorted(cases, key=lambda case: (case.shape, case.spacing, case.relative_size))
    intensities_by_case = [case.intensities for case in ordered if case.intensities]
    if not intensities_by_case:
        raise BadCasesError(
            "no case has any foreground, so there is nothing to learn", fix="Check the labels and their values"
        )
    channels = {len(channel) for channel in intensities_by_case}
    if len(channels) > 1:
        raise BadCasesError(f"cases have different numbers of channels: {sorted(channels)}")
    return Fingerprint(
        shapes=tuple(case.shape for case in ordered),
        spacings=tuple(case.spacing for case in ordered),
        relative_size=statistics.median(case.relative_size for case in ordered),
        intensities=tuple(_pool_intensities(channel) for channel in zip(*intensities_by_case, strict=True)),
    )


def _extent(used: Any) -> slice:
    """Return the range from the first to the last true element."""
    indices = np.flatnonzero(used)
    return slice(int(indices[0]), int(indices[-1]) + 1)


def _foreground_intensities(image: NDArray[Any], foreground: NDArray[np.bool_], seed: int) -> tuple[CaseIntensity, ...]:
    indices = np.flatnonzero(foreground)
    if not len(indices):
        return ()
    chosen = indices
    if len(indices) > _MAX_SORTED_VOXELS:
        chosen = indices[np.random.default_rng(seed).integers(len(indices), size=_MAX_SORTED_VOXELS)]
    steps = ((np.arange(_QUANTILES) + 0.5) / _QUANTILES * len(chosen)).astype(np.int64)
    result = []
    for channel in image:
        values = channel[foreground].astype(np.float64)
        ranked = np.sort(channel.reshape(-1)[chosen] if len(chosen) < len(indices) else values)
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


def _pool_intensities(cases: tuple[CaseIntensity, ...]) -> Intensity:
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
