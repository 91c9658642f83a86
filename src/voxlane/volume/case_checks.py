"""Loading and checking of cases, so that every unusable case is known before training begins.

A problem is an error, which makes the case unusable, or a warning. Its cause is permanent (the stored files are wrong)
or transient (reading them failed, and may not fail again).
"""

from __future__ import annotations

import hashlib
import posixpath
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from voxlane.errors import BucketNotFoundError, ChangedError, DamagedError, NotFoundError, ScanError, VoxlaneError
from voxlane.store import StoreConfig
from voxlane.volume.dataset_layouts import SourceCase
from voxlane.volume.description import Description
from voxlane.volume.formats import NotVolumeError, Remark, read_object
from voxlane.volume.geometry import Array, Geometry, align_axes, describe_grid_difference, max_voxel_distance_mm
from voxlane.volume.memory import ScanMemoryError
from voxlane.volume.scan import SCAN_SUFFIXES, LabelValuesError, Scan, load_label, read_scan
from voxlane.volume.scan import Label as LoadedLabel
from voxlane.volume.scan_checks import ChannelSummary, check_geometry, check_intensities

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
    "geometry",
    "header",
    "intensity",
    "slices",
    "outlier",
    "duplicate",
    "memory",
    "time",
    "crash",
    "read-again",
]
_T = TypeVar("_T")
_MAX_LABEL_SHARE = 0.9
"""Largest usual share of foreground in a scan."""
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
    transient: bool = False
    """Whether the problem may not occur again although the files stay the same."""

    @property
    def severity(self) -> str:
        """The severity, "error" or "warning"."""
        return "error" if self.fatal else "warning"


def load_case(
    case: SourceCase, description: Description, config: StoreConfig | None = None, listed: Collection[str] = ()
) -> tuple[Scan | None, Label | None, list[CaseProblem]]:
    """Read the images and the label of `case` once, stack the channels, and check them all.

    The image or label is None if it has a fatal problem; problems are in the order of detection. At its peak this holds
    the case's image twice and the file being decompressed. Errors that concern more than this case, such as missing
    credentials or an unreachable bucket, are raised. A file that cannot be read is read again before it is blamed.

    listed: URIs of the files that the source's listing named.
    """
    loaded = examine_case(case, description, config, listed)
    return loaded.scan, loaded.label, loaded.problems


@dataclass
class LoadedCase:
    """A case that was read and checked."""

    scan: Scan | None
    """None if the image has a fatal problem."""
    label: Label | None
    """None if the label has a fatal problem."""
    problems: list[CaseProblem]
    channels: list[ChannelSummary]
    """Intensities of each channel; empty if the image has a fatal problem."""


def examine_case(
    case: SourceCase, description: Description, config: StoreConfig | None = None, listed: Collection[str] = ()
) -> LoadedCase:
    """Do as `load_case`, and return the intensities too."""
    loader = _CaseLoader(case, description, config, frozenset(listed))
    scan = label = None
    try:
        scan = loader.load_images()
    except MemoryError:
        loader.add("memory", f"{loader.name(case.images[0])} does not fit into the memory for one case")
    broken_image = loader.has_fatal_problem()
    try:
        label = loader.load_label(None if scan is None else scan.geometry)
    except MemoryError:
        loader.add("memory", f"{loader.name(str(case.label))} does not fit into the memory for one case")
    if scan is not None and label is not None:
        loader.compare_contents(scan.image, label)
    usable_scan = None if broken_image or (loader.has_fatal_problem() and label is not None) else scan
    return LoadedCase(usable_scan, label, loader.problems, [] if usable_scan is None else loader.channels)


def format_problems(problems: Sequence[CaseProblem], width: int = 120) -> str:
    """Format the problems as an aligned table, sorted by case and `width` characters wide. Returns "" without problems.
    A long table is cut off, followed by the number of problems of each kind."""
    if not problems:
        return ""
    rows = [("case", "problem", "", "detail")]
    ordered = sorted(problems, key=lambda problem: (problem.case, not problem.fatal))
    rows += [(p.case or "(all)", p.kind, p.severity, p.detail) for p in ordered[:_MAX_TABLE_ROWS]]
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
    listed: frozenset[str]
    problems: list[CaseProblem] = field(default_factory=list)
    channels: list[ChannelSummary] = field(default_factory=list)

    def add(self, kind: ProblemKind, detail: str, *, fatal: bool = True, transient: bool = False) -> None:
        self.problems.append(CaseProblem(self.case.id, kind, detail, fatal, transient))

    def add_remarks(self, uri: str, remarks: Sequence[Remark]) -> None:
        for remark in remarks:
            self.add(remark.kind, f"{self.name(uri)}: {remark.detail}", fatal=remark.fatal)

    def name(self, uri: str) -> str:
        """Return the name of a file, and whether it is the image or the label if both have the same name."""
        name, label = _file_name(uri), self.case.label
        if label is None or _file_name(label) not in map(_file_name, self.case.images):
            return name
        return f"{'label' if uri == label else 'image'} {name}"

    def has_fatal_problem(self, since: int = 0) -> bool:
        return any(problem.fatal for problem in self.problems[since:])

    def load_images(self) -> Scan | None:
        """Load all channels as one scan, also if there are problems, so that the label can still be compared."""
        images = self.case.images
        scans: list[Scan] = []
        for uri in images:
            scan = self.read(uri, "missing-image", self._read_scan)
            if scan is not None:
                scans.append(scan)
                self.add_remarks(uri, (*scan.remarks, *check_geometry(scan.geometry)))
        if len(scans) < len(images):
            return scans[0] if scans else None
        first = scans[0]
        if len(scans) > 1:
            for uri, scan in zip(images, scans, strict=True):
                if len(scan.image) > 1:
                    name = f"{self.name(uri)} is a 4D file of {len(scan.image)} volumes"
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
                name = self.name(images[index if len(images) > 1 else 0])
                channel_text = f" of channel {index}" if len(images) == 1 and channels > 1 else ""
                share = f"{bad_voxels:,} of {channel.size:,} voxels"
                self.add("nan", f"{name}: {share}{channel_text} are NaN or infinite")
        remarks, self.channels = check_intensities(stacked.image, self.description.channels)
        self.add_remarks(images[0], remarks)
        return stacked

    def load_label(self, grid: Geometry | None) -> Label | None:
        """Load the label, or return None if it is unusable. `grid` is the image's, if known."""
        uri = self.case.label
        if uri is None:
            self.add("missing-label", f"no label file for {self.name(self.case.images[0])}")
            return None
        loaded = self.read(uri, "missing-label", self._read_label)
        if loaded is None:
            return None
        label, geometry = loaded.values, loaded.geometry
        problems_before = len(self.problems)
        self.add_remarks(uri, loaded.remarks)
        if grid is not None:
            self.compare(grid, uri, geometry)
            label = np.ascontiguousarray(align_axes(label, geometry, grid))
        counts = count_values(label)
        outside = [value for value in np.flatnonzero(counts).tolist() if value not in self.description.labels.values()]
        if outside:
            self.add("label-values", _describe_outside(self.name(uri), outside, counts, self.description))
        elif not counts[1:].any():
            self.add("empty-foreground", f"{self.name(uri)} contains only background", fatal=False)
        return None if self.has_fatal_problem(problems_before) else label

    def compare(self, grid: Geometry, uri: str, other: Geometry) -> None:
        """Record how the grid of `uri` differs from that of the first image, if it does."""
        difference, fatal = compare_grids(grid, other)
        if difference is None:
            return
        detail = f"{self.name(self.case.images[0])} and {self.name(uri)}: {difference}"
        kind: ProblemKind = "affine" if grid.canonical_shape == other.canonical_shape else "shape"
        self.add(kind, detail if fatal else f"{detail}, less than half a voxel", fatal=fatal)

    def compare_contents(self, image: Array, label: Label) -> None:
        """Record that image and label have the same content, or that nearly all of the image is labelled."""
        file = self.name(str(self.case.label))
        if image.shape[1:] == label.shape and label.any() and any(np.array_equal(c, label) for c in image):
            self.add("intensity", f"{file} is the same as {self.name(self.case.images[0])}: the image is the label")
        elif (share := np.count_nonzero(label) / label.size) > _MAX_LABEL_SHARE:
            self.add("label-values", f"{file} labels {share:.0%} of the scan", fatal=False)

    def _read_scan(self, uri: str) -> Scan:
        return read_scan(uri, self.config, spacing=self.description.spacing)

    def _read_label(self, uri: str) -> LoadedLabel:
        return load_label(uri, self.config, spacing=self.description.spacing)

    def read(self, uri: str, missing: ProblemKind, read: Callable[[str], _T]) -> _T | None:
        """Return what `read` returns. Record why a file cannot be read, and return None; raise errors that are not the
        file's fault. A failure is no verdict: the file is read a second time."""
        try:
            return read(uri)
        except DamagedError as error:  # the same after several reads
            self.add("unreadable", f"{self.name(uri)}: {_describe(error)}", transient=True)
            return None
        except (NotFoundError, ChangedError, ScanError) as error:
            first_error: VoxlaneError = error
        if isinstance(first_error, BucketNotFoundError):
            raise first_error
        if isinstance(first_error, _VERDICTS) or (isinstance(first_error, NotFoundError) and uri not in self.listed):
            self.add_unreadable(uri, first_error, missing)
            return None
        try:
            result = read(uri)
        except (NotFoundError, ChangedError, ScanError) as error:
            self.add_unreadable(uri, error, missing)
            return None
        text = f"{self.name(uri)} could not be read at first ({_describe(first_error)}); reading it again succeeded"
        self.add("read-again", text, fatal=False, transient=True)
        return result

    def add_unreadable(self, uri: str, error: VoxlaneError, missing: ProblemKind) -> None:
        """Record why a file could not be read, and whether that may pass."""
        name = self.name(uri)
        if isinstance(error, NotFoundError):
            if uri in self.listed:
                text = f"{uri} is listed, but reading it says that it does not exist. This may pass: run again"
                self.add(missing, text, transient=True)
            else:
                self.add(missing, f"{uri} does not exist")
        elif isinstance(error, ChangedError):
            self.add("unreadable", f"{name}: {_describe(error)}. It may be being written: run again", transient=True)
        elif isinstance(error, _VERDICTS):
            kinds: dict[type[VoxlaneError], ProblemKind] = {
                NotVolumeError: "not-3d",
                LabelValuesError: "label-values",
                ScanMemoryError: "memory",
            }
            self.add(kinds[type(error)], f"{name}: {_describe(error)}")
        elif self.reads_differ(uri):
            text = (
                f"{name}: {_describe(error)}. Reading it again gives other bytes: the transfer is at fault, run again"
            )
            self.add("unreadable", text, transient=True)
        else:
            self.add("unreadable", f"{name}: {_describe(error)}")

    def reads_differ(self, uri: str) -> bool:
        """Return whether two reads of one file give different bytes, or fail differently; False for a folder."""
        if not uri.lower().endswith(SCAN_SUFFIXES):
            return False
        digests = []
        for _ in range(2):
            try:
                digests.append(hashlib.sha256(read_object(uri, self.config)).hexdigest())
            except (NotFoundError, ChangedError, ScanError) as error:
                digests.append(type(error).__name__)
        return len(set(digests)) > 1


_VERDICTS = (NotVolumeError, LabelValuesError, ScanMemoryError)
"""Errors about the content of a file that was read completely."""


def _describe(error: VoxlaneError) -> str:
    return str(error).removeprefix(f"{error.uri}: ")


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
    remarks = tuple(remark for scan in scans for remark in scan.remarks)
    return Scan(np.concatenate(channels_by_scan), first.geometry, first.dtype, remarks)


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


def _describe_outside(
    name: str, outside: Sequence[int], counts: npt.NDArray[np.int64], description: Description
) -> str:
    values = ", ".join(f"{value} ({counts[value]:,} voxels)" for value in outside[:5])
    more = f" and {len(outside) - 5} more" if len(outside) > 5 else ""
    known_labels = ", ".join(f"{name} {value}" for name, value in description.labels.items())
    detail = f"{name} contains the values {values}{more}, which are not among: {known_labels}"
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
