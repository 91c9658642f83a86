"""Comparison of each case with the rest of its dataset. It only gives warnings, because what differs may be right."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from voxlane.settings import record
from voxlane.volume.case_checks import CaseProblem, LoadedCase, count_values
from voxlane.volume.description import Description
from voxlane.volume.geometry import Array, format_mm

MIN_CASES = 5
"""Fewest cases among which one can be an outlier."""
_MAX_RATIO = 4.0
"""Largest usual ratio between a length and the median of the dataset."""
_MAX_RANGE_RATIO = 20.0
"""Largest usual ratio between a channel's range of intensities and the median of the dataset."""
_MAX_DEVIATIONS = 10.0
"""Largest usual distance of a channel's median from those of other cases, in their deviations."""
_MAX_LABEL_RATIO = 50.0
"""Largest usual ratio between the volume of the foreground and the median of the dataset."""


@record
class CaseSummary:
    """Measures of one case that are compared with those of other cases."""

    shape: tuple[int, int, int]
    """Voxels (z, y, x) of the scan."""
    spacing: tuple[float, float, float]
    """Millimetres between voxels (z, y, x)."""
    dtype: str
    """Data type in the file."""
    channels: tuple[tuple[float, ...], ...]
    """Smallest and largest intensity of each channel, and its percentiles 1, 50 and 99."""
    label_voxels: Mapping[int, int]
    """Number of voxels of each value of the label that occurs."""
    image_digest: str
    """Checksum of the voxels of the image."""


def summarize_case(loaded: LoadedCase) -> CaseSummary | None:
    """Return the measures of a case, or None if it cannot be used."""
    if loaded.scan is None or loaded.label is None:
        return None
    counts = count_values(loaded.label)
    return CaseSummary(
        shape=loaded.scan.geometry.canonical_shape,
        spacing=loaded.scan.geometry.spacing,
        dtype=str(loaded.scan.dtype),
        channels=tuple((channel.low, channel.high, *channel.percentiles) for channel in loaded.channels),
        label_voxels={value: int(counts[value]) for value in np.flatnonzero(counts).tolist()},
        image_digest=_digest(loaded.scan.image),
    )


def find_outliers(summaries: Mapping[str, CaseSummary], description: Description) -> list[CaseProblem]:
    """Return warnings about cases that differ from the rest, scans that occur twice, and labels that never occur; by
    case."""
    problems = list(_find_duplicates(summaries))
    if summaries:
        problems += _find_missing_labels(summaries.values(), description)
    if len(summaries) >= MIN_CASES:
        problems += _find_geometry_outliers(summaries)
        problems += _find_intensity_outliers(summaries, description.channels)
        problems += _find_label_outliers(summaries)
    return sorted(problems, key=lambda problem: (problem.case, problem.kind))


def _warn(case: str, text: str, kind: Any = "outlier") -> CaseProblem:
    return CaseProblem(case, kind, text, fatal=False)


def _find_duplicates(summaries: Mapping[str, CaseSummary]) -> Iterable[CaseProblem]:
    cases_by_digest = defaultdict(list)
    for name, summary in sorted(summaries.items()):
        cases_by_digest[summary.image_digest].append(name)
    for first, *others in cases_by_digest.values():
        for name in others:
            yield _warn(name, f"the same scan as {first}, which may be in another fold", "duplicate")


def _find_missing_labels(summaries: Iterable[CaseSummary], description: Description) -> Iterable[CaseProblem]:
    values = {value for summary in summaries for value in summary.label_voxels}
    for name, value in description.foreground:
        if value not in values:
            yield _warn("", f"no case has a voxel of {name} ({value})", "label-values")


def _find_geometry_outliers(summaries: Mapping[str, CaseSummary]) -> Iterable[CaseProblem]:
    spacings = {name: summary.spacing for name, summary in summaries.items()}
    extents = {
        name: tuple(n * mm for n, mm in zip(summary.shape, summary.spacing, strict=True))
        for name, summary in summaries.items()
    }
    for title, lengths in (("spacing", spacings), ("extent", extents)):
        usual = [statistics.median(values) for values in zip(*lengths.values(), strict=True)]
        for name, values in lengths.items():
            if any(_ratio(value, middle) > _MAX_RATIO for value, middle in zip(values, usual, strict=True)):
                text = f"{title} {format_mm(values)} mm (z, y, x), where the median is {format_mm(usual)}"
                yield _warn(name, text)


def _find_intensity_outliers(summaries: Mapping[str, CaseSummary], channels: Sequence[str]) -> Iterable[CaseProblem]:
    for index, channel in enumerate(channels):
        values = {name: summary.channels[index] for name, summary in summaries.items() if index < len(summary.channels)}
        if len(values) < MIN_CASES:
            continue
        ranges = {name: last - first for name, (_, _, first, _, last) in values.items()}
        middles = {name: middle for name, (_, _, _, middle, _) in values.items()}
        usual_range, usual_middle = statistics.median(ranges.values()), statistics.median(middles.values())
        deviation = 1.4826 * statistics.median(abs(value - usual_middle) for value in middles.values())
        for name in values:
            low, high = (f"{value:.4g}" for value in (values[name][2], values[name][4]))
            if _ratio(ranges[name], usual_range) > _MAX_RANGE_RATIO:
                text = f"{channel}: intensities from {low} to {high}, a range of {ranges[name]:.4g}"
                yield _warn(name, f"{text}, where the median is {usual_range:.4g}")
            elif abs(middles[name] - usual_middle) > max(_MAX_DEVIATIONS * deviation, usual_range):
                text = f"{channel}: the median intensity is {middles[name]:.4g}"
                yield _warn(name, f"{text}, where {usual_middle:.4g} is usual")


def _find_label_outliers(summaries: Mapping[str, CaseSummary]) -> Iterable[CaseProblem]:
    volumes_ml = {}
    for name, summary in summaries.items():
        voxels = sum(count for value, count in summary.label_voxels.items() if value != 0)
        volumes_ml[name] = voxels * float(np.prod(summary.spacing)) / 1000
    positive = [volume for volume in volumes_ml.values() if volume > 0]
    if len(positive) < MIN_CASES:
        return
    usual = statistics.median(positive)
    for name, volume in volumes_ml.items():
        if volume > 0 and _ratio(volume, usual) > _MAX_LABEL_RATIO:
            yield _warn(name, f"{volume:.3g} ml are labelled, where the median is {usual:.3g} ml")


def _ratio(value: float, usual: float) -> float:
    """Return how many times one of the values is larger than the other."""
    low, high = sorted((value, usual))
    return high / low if low > 0 else float("inf") if high > 0 else 1.0


def _digest(image: Array) -> str:
    digest = xxhash.xxh3_128()
    for channel in image:
        digest.update(np.ascontiguousarray(channel).data)
    return digest.hexdigest()
