"""Loading and checking of cases, so that every unusable case is known before training begins."""

from __future__ import annotations

import posixpath
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from voxlane.errors import NotFoundError, ScanError
from voxlane.store import StoreConfig
from voxlane.volume.dataset_layouts import SourceCase
from voxlane.volume.description import Description
from voxlane.volume.formats import NotVolumeError
from voxlane.volume.geometry import Array, Geometry, align_axes, describe_grid_difference, max_voxel_distance_mm
from voxlane.volume.scan import LabelValuesError, Scan, read_label, read_scan

ProblemKind = Literal[
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
"""Grids that differ by less than this fraction of the smallest spacing still match voxel by voxel: only a warning."""

_MAX_TABLE_ROWS = 60
"""Most rows of the table of problems."""


@dataclass(frozen=True)
class CaseProblem:
    """A problem of one case."""

    case: str
    kind: ProblemKind
    detail: str
    """Description of the problem that names the file."""
    fatal: bool
    """Whether the case cannot be used for training."""


def load_case(
    case: SourceCase, description: Description, config: StoreConfig | None = None
) -> tuple[Scan | None, Label | None, list[CaseProblem]]:
    """Read the images and the label of `case` once, stack the channels, and check them all.

    The image or label is None if it has a fatal problem; problems are in the order of detection. At its peak this holds
    the case's image twice and the file being decompressed. Errors that concern more than this case, such as missing
    credentials or an unreachable bucket, are raised.
    """
    loader = _CaseLoader(case, description, config)
    scan = loader.load_images()
    broken_image = loader.has_fatal_problem()
    label = loader.load_label(None if scan is None else scan.geometry)
    return None if broken_image else scan, label, loader.problems


def format_problems(problems: Sequence[CaseProblem], width: int = 120) -> str:
    """Format the problems as an aligned table, sorted by case and `width` characters wide. Returns "" without problems.
    A long table is cut off, followed by the number of problems of each kind."""
    if not problems:
        return ""
    rows = [("case", "problem", "", "detail")]
    ordered = sorted(problems, key=lambda problem: (problem.case, not problem.fatal))
    rows += [(p.case, p.kind, "error" if p.fatal else "warning", p.detail) for p in ordered[:_MAX_TABLE_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for row in rows:
        row_start = "  ".join(f"{cell:<{size}}" for cell, size in zip(row[:3], widths, strict=True)) + "  "
        detail_width = max(width - len(row_start), 30)
        detail = textwrap.wrap(row[3], detail_width, break_long_words=False, break_on_hyphens=False)
        lines += [row_start + detail[0], *(" " * len(row_start) + rest for rest in detail[1:])]
    if len(ordered) > _MAX_TABLE_ROWS:
        counts = Counter(problem.kind for problem in ordered)
        kinds_text = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        lines.append(f"... and {len(ordered) - _MAX_TABLE_ROWS} more; in total {kinds_text}")
    return "\n".join(line.rstrip() for line in lines)


@dataclass
class _CaseLoader:
    """Loads one case and collects its problems."""

    case: SourceCase
    description: Description
    config: StoreConfig | None
    problems: list[CaseProblem] = field(default_factory=list)

    def add(self, kind: ProblemKind, detail: str, *, fatal: bool = True) -> None:
        self.problems.append(CaseProblem(self.case.id, kind, detail, fatal))

    def has_fatal_problem(self, since: int = 0) -> bool:
        return any(problem.fatal for problem in self.problems[since:])

    def load_images(self) -> Scan | None:
        """Load all channels as one scan, also if there are problems, so that the label can still be compared."""
        images = self.case.images
        scans: list[Scan] = []
        for uri in images:
            try:
                scans.append(read_scan(uri, self.config, spacing=self.description.spacing))
            except (NotFoundError, ScanError) as error:
                self.add_unreadable(uri, error, "missing-image")
        if len(scans) < len(images):
            return scans[0] if scans else None
        first = scans[0]
        if len(scans) > 1:
            for uri, scan in zip(images, scans, strict=True):
                if len(scan.image) > 1:
                    name = f"{_file_name(uri)} is a 4D file of {len(scan.image)} volumes"
                    self.add("not-3d", f"{name}; expected one 3D channel per file")
                if scan is not first:
                    self.compare(first.geometry, uri, scan.geometry)
            if self.has_fatal_problem():
                return first
        channels = sum(len(scan.image) for scan in scans)
        if channels != len(self.description.channels):
            self.add("channels", _describe_channels(self.case, channels, self.description))
        stacked = stack_channels(scans)
        for index, channel in enumerate(stacked.image):
            if bad_voxels := count_not_finite(channel):
                name = _file_name(images[index if len(images) > 1 else 0])
                channel_text = f" of channel {index}" if len(images) == 1 and channels > 1 else ""
                share = f"{bad_voxels:,} of {channel.size:,} voxels"
                self.add("nan", f"{name}: {share}{channel_text} are NaN or infinite")
        return stacked

    def load_label(self, grid: Geometry | None) -> Label | None:
        """Load the label, or return None if it is unusable. `grid` is the image's, if known."""
        uri = self.case.label
        if uri is None:
            self.add("missing-label", f"no label file for {_file_name(self.case.images[0])}")
            return None
        try:
            label, geometry = read_label(uri, self.config, spacing=self.description.spacing)
        except (NotFoundError, ScanError) as error:
            self.add_unreadable(uri, error, "missing-label")
            return None
        problems_before = len(self.problems)
        if grid is not None:
            self.compare(grid, uri, geometry)
            label = np.ascontiguousarray(align_axes(label, geometry, grid))
        counts = count_values(label)
        outside = [value for value in np.flatnonzero(counts).tolist() if value not in self.description.labels.values()]
        if outside:
            self.add("label-values", _describe_outside(uri, outside, counts, self.description))
        elif not counts[1:].any():
            self.add("empty-foreground", f"{_file_name(uri)} contains only background", fatal=False)
        return None if self.has_fatal_problem(problems_before) else label

    def compare(self, grid: Geometry, uri: str, other: Geometry) -> None:
        """Record how the grid of `uri` differs from that of the first image, if it does."""
        difference, fatal = compare_grids(grid, other)
        if difference is None:
            return
        detail = f"{_file_name(self.case.images[0])} and {_file_name(uri)}: {difference}"
        kind: ProblemKind = "affine" if grid.canonical_shape == other.canonical_shape else "shape"
        self.add(kind, detail if fatal else f"{detail}, less than half a voxel", fatal=fatal)

    def add_unreadable(self, uri: str, error: NotFoundError | ScanError, missing: ProblemKind) -> None:
        """Record that a file could not be read; raise errors that are not the file's fault."""
        if isinstance(error, NotFoundError):
            if type(error) is not NotFoundError:  # the bucket itself
                raise error
            self.add(missing, f"{uri} does not exist")
            return
        kinds: dict[type[ScanError], ProblemKind] = {NotVolumeError: "not-3d", LabelValuesError: "label-values"}
        message = str(error).removeprefix(f"{error.uri}: ")
        self.add(kinds.get(type(error), "unreadable"), f"{_file_name(uri)}: {message}")


def compare_grids(a: Geometry, b: Geometry) -> tuple[str | None, bool]:
    """Return how two grids differ (None if they do not), and whether their voxels do not even nearly coincide."""
    difference = describe_grid_difference(a, b)
    if difference is None or a.canonical_shape != b.canonical_shape:
        return difference, difference is not None
    return difference, max_voxel_distance_mm(a, b) > _WARN_VOXELS * min(a.spacing)


def count_values(label: Label) -> npt.NDArray[np.int64]:
    """Return the number of voxels of each value from 0 to 255."""
    # Slice by slice, because bincount needs eight bytes per voxel.
    counts: npt.NDArray[np.int64] = np.sum([np.bincount(plane.reshape(-1), minlength=256) for plane in label], axis=0)
    return counts


def stack_channels(scans: Sequence[Scan]) -> Scan:
    """Combine channels of the same grid into one scan, as float32 if their types differ."""
    first = scans[0]
    if len(scans) == 1:
        return first
    dtypes = {scan.image.dtype for scan in scans}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    channels_by_scan = [
        align_axes(scan.image, scan.geometry, first.geometry).astype(dtype, copy=False) for scan in scans
    ]
    return Scan(np.concatenate(channels_by_scan), first.geometry, first.dtype)


def count_not_finite(channel: Array) -> int:
    """Count the voxels that are NaN or infinite."""
    if channel.dtype.kind != "f":
        return 0
    with np.errstate(invalid="ignore"):
        total = channel.sum(dtype=np.float64)
    if np.isfinite(total):  # a sum over float32 in float64 is finite only when every voxel is
        return 0
    return int(sum(np.count_nonzero(~np.isfinite(plane)) for plane in channel))


def _describe_channels(case: SourceCase, channels: int, description: Description) -> str:
    expected = f"but the description has {len(description.channels)} ({', '.join(description.channels)})"
    if len(case.images) > 1:
        return f"{channels} image files, {expected}"
    kind = f"is a 4D file of {channels} channels" if channels > 1 else "is a 3D file of 1 channel"
    return f"{_file_name(case.images[0])} {kind}, {expected}"


def _describe_outside(uri: str, outside: Sequence[int], counts: npt.NDArray[np.int64], description: Description) -> str:
    values = ", ".join(f"{value} ({counts[value]:,} voxels)" for value in outside[:5])
    more = f" and {len(outside) - 5} more" if len(outside) > 5 else ""
    known_labels = ", ".join(f"{name} {value}" for name, value in description.labels.items())
    detail = f"{_file_name(uri)} contains the values {values}{more}, which are not among: {known_labels}"
    enhancing = description.labels.get("ET")
    if enhancing in (3, 4) and list(outside) == [7 - enhancing]:
        years = "BraTS 2018 to 2021" if enhancing == 3 else "BraTS since 2023"
        detail += (
            f". {years} number the enhancing tumour {7 - enhancing}; set description.labels and description.regions "
            "accordingly"
        )
    return detail


def _file_name(uri: str) -> str:
    return posixpath.basename(uri.rstrip("/"))
