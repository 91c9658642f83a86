"""Loading a case and finding what is wrong with it, so that every bad case is known before any is trained on."""

from __future__ import annotations

import posixpath
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from voxlane.errors import NotFoundError, ScanError
from voxlane.store import StoreConfig
from voxlane.volume.description import Description
from voxlane.volume.geometry import Array, Geometry, along, furthest_mm, same_grid
from voxlane.volume.layouts import SourceCase
from voxlane.volume.scan import LabelValuesError, NotVolumeError, Scan, read_label, read_scan

Kind = Literal[
    "unreadable",
    "not-3d",
    "shape",
    "affine",
    "missing-label",
    "missing-image",
    "label-values",
    "nan",
    "empty-foreground",
    "channels",
]
Label = npt.NDArray[np.uint8]
_WARN_VOXELS = 0.5
"""Grids that differ by less than this share of the smallest spacing pair each voxel with the right one; a warning."""

_MOST_ROWS = 60
"""Of the table."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one case."""

    case: str
    kind: Kind
    detail: str
    """A sentence that names the file."""
    fatal: bool
    """Whether the case cannot be trained on."""


def load_case(
    case: SourceCase, description: Description, config: StoreConfig | None = None
) -> tuple[Scan | None, Label | None, list[Problem]]:
    """Read the images and the label of `case` once, stack the channels, and check them all.

    Image and label are None when something fatal is wrong with them; the problems come in the order they were found.
    At the peak it holds the case's image twice and the inflated file that is being read. What concerns more than this
    case, such as missing credentials or a bucket that does not answer, is raised.
    """
    problems: list[Problem] = []
    scan = _images(case, description, config, problems)
    broken_image = any(problem.fatal for problem in problems)
    label = _label(case, description, config, None if scan is None else scan.geometry, problems)
    return None if broken_image else scan, label, problems


def table(problems: Sequence[Problem], width: int = 120) -> str:
    """The problems by case, one aligned table `width` characters wide; empty when there are none. Of very many, the
    first, and how many there are of each kind."""
    if not problems:
        return ""
    rows = [("case", "problem", "", "detail")]
    ordered = sorted(problems, key=lambda problem: (problem.case, not problem.fatal))
    rows += [(p.case, p.kind, "error" if p.fatal else "warning", p.detail) for p in ordered[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for row in rows:
        head = "  ".join(f"{cell:<{size}}" for cell, size in zip(row[:3], widths, strict=True)) + "  "
        room = max(width - len(head), 30)
        detail = textwrap.wrap(row[3], room, break_long_words=False, break_on_hyphens=False)
        lines += [head + detail[0], *(" " * len(head) + rest for rest in detail[1:])]
    if len(ordered) > _MOST_ROWS:
        kinds = Counter(problem.kind for problem in ordered)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        lines.append(f"... and {len(ordered) - _MOST_ROWS} more; in all {told}")
    return "\n".join(line.rstrip() for line in lines)


def _images(
    case: SourceCase, description: Description, config: StoreConfig | None, problems: list[Problem]
) -> Scan | None:
    """All channels as one scan, even when something else is wrong with them, so that the label can be compared."""
    scans: list[Scan] = []
    for uri in case.images:
        try:
            scans.append(read_scan(uri, config))
        except (NotFoundError, ScanError) as error:
            problems.append(_unread(case, uri, error, "missing-image"))
    if len(scans) < len(case.images):
        return scans[0] if scans else None
    first = scans[0]
    if len(scans) > 1:
        for uri, scan in zip(case.images, scans, strict=True):
            if len(scan.image) > 1:
                detail = f"{_name(uri)} is a 4D file of {len(scan.image)} volumes where each file is one 3D channel"
                problems.append(Problem(case.id, "not-3d", detail, True))
            if scan is not first:
                _compare(case, (case.images[0], first.geometry), (uri, scan.geometry), problems)
        if any(problem.fatal for problem in problems):
            return first
    channels = sum(len(scan.image) for scan in scans)
    if channels != len(description.channels):
        problems.append(Problem(case.id, "channels", _channels(case, channels, description), True))
    stacked = stack(scans)
    for index, channel in enumerate(stacked.image):
        if strange := not_finite(channel):
            uri = case.images[index if len(case.images) > 1 else 0]
            which = f" of channel {index}" if len(case.images) == 1 and channels > 1 else ""
            detail = f"{_name(uri)}: {strange:,} of {channel.size:,} voxels{which} are NaN or infinite"
            problems.append(Problem(case.id, "nan", detail, True))
    return stacked


def _label(
    case: SourceCase,
    description: Description,
    config: StoreConfig | None,
    grid: Geometry | None,
    problems: list[Problem],
) -> Label | None:
    """The label, or None when it cannot be used; `grid` is that of the image, when there is one."""
    if case.label is None:
        problems.append(Problem(case.id, "missing-label", f"no label file for {_name(case.images[0])}", True))
        return None
    try:
        label, geometry = read_label(case.label, config)
    except (NotFoundError, ScanError) as error:
        problems.append(_unread(case, case.label, error, "missing-label"))
        return None
    found = len(problems)
    if grid is not None:
        _compare(case, (case.images[0], grid), (case.label, geometry), problems)
        label = np.ascontiguousarray(along(label, geometry, grid))
    # Slice by slice, because bincount takes eight bytes a voxel.
    counts = np.sum([np.bincount(plane.ravel(), minlength=256) for plane in label], axis=0)
    outside = [value for value in np.flatnonzero(counts).tolist() if value not in description.labels.values()]
    if outside:
        problems.append(Problem(case.id, "label-values", _outside(case.label, outside, counts, description), True))
    elif not counts[1:].any():
        detail = f"{_name(case.label)} is background everywhere"
        problems.append(Problem(case.id, "empty-foreground", detail, False))
    return None if any(problem.fatal for problem in problems[found:]) else label


def _compare(case: SourceCase, one: tuple[str, Geometry], other: tuple[str, Geometry], problems: list[Problem]) -> None:
    """Note how the grids of two files differ, if they do."""
    (uri, a), (other_uri, b) = one, other
    difference = same_grid(a, b)
    if difference is None:
        return
    detail = f"{_name(uri)} and {_name(other_uri)}: {difference}"
    if a.canonical_shape != b.canonical_shape:
        problems.append(Problem(case.id, "shape", detail, True))
        return
    fatal = furthest_mm(a, b) > _WARN_VOXELS * min(a.spacing)
    problems.append(Problem(case.id, "affine", detail if fatal else f"{detail}, less than half a voxel", fatal))


def _unread(case: SourceCase, uri: str, error: NotFoundError | ScanError, missing: Kind) -> Problem:
    """What reading `uri` failed for; raises again what is not the file's fault."""
    if isinstance(error, NotFoundError):
        if type(error) is not NotFoundError:  # the bucket itself
            raise error
        return Problem(case.id, missing, f"{uri} does not exist", True)
    kind: Kind = "unreadable"
    if isinstance(error, NotVolumeError):
        kind = "not-3d"
    elif isinstance(error, LabelValuesError):
        kind = "label-values"
    said = str(error).removeprefix(f"{error.uri}: ")
    return Problem(case.id, kind, f"{_name(uri)}: {said}", True)


def stack(scans: Sequence[Scan]) -> Scan:
    """Channels of one grid as one scan; float32 when their types differ."""
    first = scans[0]
    if len(scans) == 1:
        return first
    kinds = {scan.image.dtype for scan in scans}
    dtype = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
    pieces = [along(scan.image, scan.geometry, first.geometry).astype(dtype, copy=False) for scan in scans]
    return Scan(np.concatenate(pieces), first.geometry, first.dtype)


def not_finite(channel: Array) -> int:
    """How many voxels are NaN or infinite."""
    if channel.dtype.kind != "f":
        return 0
    with np.errstate(invalid="ignore"):
        total = channel.sum(dtype=np.float64)
    if np.isfinite(total):  # a sum over float32 in float64 is finite only when every voxel is
        return 0
    return int(sum(np.count_nonzero(~np.isfinite(plane)) for plane in channel))


def _channels(case: SourceCase, channels: int, description: Description) -> str:
    wanted = f"the description has {len(description.channels)} ({', '.join(description.channels)})"
    if len(case.images) > 1:
        return f"{channels} image files, {wanted}"
    kind = f"is a 4D file of {channels} channels" if channels > 1 else "is a 3D file of 1 channel"
    return f"{_name(case.images[0])} {kind}, {wanted}"


def _outside(uri: str, outside: Sequence[int], counts: npt.NDArray[np.int64], description: Description) -> str:
    values = ", ".join(f"{value} ({counts[value]:,} voxels)" for value in outside[:5])
    more = f" and {len(outside) - 5} more" if len(outside) > 5 else ""
    known = ", ".join(f"{name} {value}" for name, value in description.labels.items())
    detail = f"{_name(uri)} has the values {values}{more}, which are not among: {known}"
    enhancing = description.labels.get("ET")
    if enhancing in (3, 4) and list(outside) == [7 - enhancing]:
        years = "BraTS 2018 to 2021" if enhancing == 3 else "BraTS since 2023"
        detail += f". {years} number the enhancing tumour {7 - enhancing}: describe labels and regions so"
    return detail


def _name(uri: str) -> str:
    return posixpath.basename(uri.rstrip("/"))
