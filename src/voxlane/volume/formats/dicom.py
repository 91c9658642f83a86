"""DICOM series, and .nrrd and .mha files, read through SimpleITK, which needs files on a disk."""

from __future__ import annotations

import contextlib
import locale
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from voxlane import uri as uris
from voxlane.errors import MissingExtraError, NotFoundError, ScanError
from voxlane.sizes import format_plural
from voxlane.store import StoreConfig
from voxlane.store.listing import list_objects
from voxlane.temporary import temporary_folder
from voxlane.volume.formats import NotVolumeError, Remark, StoredVoxels, check_regular_file, open_store
from voxlane.volume.formats.itk_headers import check_header
from voxlane.volume.geometry import Array, Geometry, format_shape
from voxlane.volume.memory import check_scan_fits

try:
    import SimpleITK as sitk  # noqa: N813
except ImportError:
    raise MissingExtraError.of("dicom", "reading DICOM, .nrrd and .mha") from None

_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])
_UNEVEN_SHARE = 0.05
"""Largest deviation of a gap between slices from the usual gap, as a fraction of it, that counts as rounding."""

_CORRECT_FILE = "Correct that file, or copy the series again from its source"
_OTHER_CLASSES = tuple(
    f"1.2.840.10008.5.1.4.1.1.{number}"
    for number in ("11.", "66", "88.", "9.", "104.", "481.3", "481.4", "481.5", "481.6", "481.8", "481.9")
)
"""First characters of the classes of DICOM objects that are not images: presentation states, segmentations and other
derived data, reports, waveforms, documents, radiotherapy structures and plans."""

sitk.ProcessObject.SetGlobalWarningDisplay(False)  # the checks below report the same problems


def read_file(uri: str, config: StoreConfig | None) -> tuple[StoredVoxels, Geometry]:
    """Read one .nrrd or .mha file."""
    with _preserved_locale, _as_local_files([uri], config) as paths:
        remarks = check_header(paths[0], uri)
        size, num_components = _read_size(paths[0], uri)
        _check_fits(size, num_components, uri)
        stored, geometry = _to_voxels(_read_pixels(paths[0], uri, image_io="", kind="it"), uri)
        return replace(stored, remarks=tuple(remarks)), geometry


def read_series(uri: str, config: StoreConfig | None) -> tuple[StoredVoxels, Geometry]:
    """Read the single DICOM series below the folder or prefix `uri`. Files that are not of the series must not look as
    if they were: an unreadable slice is an error that names it."""
    listing = list_objects(uri.rstrip("/") + "/", config=config, progress=False)
    keys = [key for key in listing.keys() if not _is_ignored(key.rpartition("/")[2])]
    if not keys:
        raise NotFoundError(
            "no scan here: neither a file nor a folder with DICOM files",
            uri=uri,
            fix="Use a .nii.gz, .nii, .nrrd or .mha file, or the folder of one DICOM series",
        )
    _check_special_files(uri)
    names = [key.removeprefix(uris.parse(uri).key.rstrip("/") + "/") for key in keys]
    with _preserved_locale, _as_local_files([listing.root + key for key in keys], config) as paths:
        slices, others = [], []
        for path, name in zip(paths, names, strict=True):
            if (image_slice := _read_slice_header(path, name, uri)) is not None:
                slices.append(image_slice)
            else:
                others.append((path, name))
        remarks = _check_other_files(others, slices, uri)
        if not slices:
            shown = ", ".join(names[:3])
            raise ScanError(f"no DICOM image among {len(keys)} files ({shown})", uri=uri, fix="Use another folder")
        stored, geometry = _assemble(slices, remarks, uri)
        return replace(stored, remarks=tuple(remarks)), geometry


class _LocaleGuard:
    """Restores the process's locale, which the DICOM library sets to C; text files would then be read as ASCII. The
    last of several threads restores what the first one found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._before = ""

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._before = locale.setlocale(locale.LC_ALL)
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                locale.setlocale(locale.LC_ALL, self._before)


_preserved_locale = _LocaleGuard()


@dataclass(frozen=True)
class _Slice:
    """Header of one DICOM file."""

    path: str
    name: str
    """Name of the file below the folder of the series."""
    series: str
    size: tuple[int, ...]
    components: int
    position: Array
    """Position of the first voxel in mm, LPS."""
    axes: Array
    """Direction times spacing along rows and columns, (3, 2), in mm, LPS."""
    tags: Mapping[str, str]
    """The values of `_TAGS` that the file has, by their names."""

    def numbers(self, tag: str) -> list[float]:
        """Return the numbers of a tag, NaN for text that is no number; empty if the tag is missing or empty."""
        return [_parse_number(part) for part in self.tags.get(tag, "").split("\\") if part]


_TAGS = {
    "series": "0020|000e",
    "instance": "0020|0013",
    "instance_uid": "0008|0018",
    "position": "0020|0032",
    "pixel_spacing": "0028|0030",
    "slice_spacing": "0018|0088",
    "intercept": "0028|1052",
    "slope": "0028|1053",
    "images": "0020|1002",
}


def _read_slice_header(path: str, name: str, uri: str) -> _Slice | None:
    """Read the header of `path`; return None if it is not a DICOM image."""
    reader = sitk.ImageFileReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileName(path)
    try:
        reader.ReadImageInformation()
    except RuntimeError:
        return None
    tags = {tag: reader.GetMetaData(key).strip("\0 ") for tag, key in _TAGS.items() if reader.HasMetaDataKey(key)}
    direction = np.asarray(reader.GetDirection()).reshape(reader.GetDimension(), -1)[:3, :2]
    axes, position = direction * np.asarray(reader.GetSpacing()[:2]), np.asarray(reader.GetOrigin()[:3])
    image_slice = _Slice(
        path,
        name,
        tags.get("series", ""),
        tuple(reader.GetSize()),
        reader.GetNumberOfComponents(),
        position,
        axes,
        tags,
    )
    for tag in ("slope", "intercept", "pixel_spacing", "position"):
        numbers = image_slice.numbers(tag)
        is_wrong = {"slope": 0 in numbers, "pixel_spacing": min(numbers, default=1) <= 0}.get(tag, False)
        if is_wrong or not np.isfinite(numbers).all():
            raise ScanError(f"{name}: {tag.replace('_', ' ')} is {tags[tag]!r}", uri=uri, fix=_CORRECT_FILE)
    return image_slice


def _check_other_files(others: list[tuple[str, str]], slices: list[_Slice], uri: str) -> list[Remark]:
    """Raise ScanError if one of the files that are not DICOM images should be one; return a remark about the others."""
    suffixes = {os.path.splitext(image_slice.name)[1].lower() for image_slice in slices}
    damaged, ignored = [], []
    for path, name in others:
        with open(path, "rb") as file:
            start = file.read(1024)
        if not start:
            damaged.append(f"{name} is empty")
        elif start[128:132] == b"DICM":
            if _is_image_class(start):
                damaged.append(f"{name} is truncated or damaged")
            else:
                ignored.append(name)
        elif os.path.splitext(name)[1].lower() in suffixes:
            damaged.append(f"{name} is not DICOM, though it is named like the slices")
        else:
            ignored.append(name)
    if damaged:
        more = f", and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise ScanError(
            f"{len(damaged)} of {len(damaged) + len(slices)} slices cannot be read: {', '.join(damaged[:3])}{more}",
            uri=uri,
            fix="Copy the series again from its source",
        )
    if not ignored:
        return []
    shown = ", ".join(ignored[:3]) + (", ..." if len(ignored) > 3 else "")
    return [Remark("slices", f"{len(ignored)} files that are not images of the series were ignored: {shown}")]


def _check_special_files(uri: str) -> None:
    """Raise ScanError if a local folder has a pipe or a broken link, which listings leave out."""
    parsed = uris.parse(uri)
    if parsed.scheme != "file":
        return
    for folder, _, names in os.walk(f"/{parsed.key}"):
        for name in names:
            path = os.path.join(folder, name)
            if not _is_ignored(name) and not os.path.isfile(path):
                raise ScanError(f"{name} is not a regular file", uri=uri, fix="Remove it, or copy the series again")


def _is_image_class(start: bytes) -> bool:
    """Return whether the first bytes of a DICOM file declare an image, and not a structure set, a report or the
    like."""
    marker = b"\x02\x00\x02\x00UI"
    at = start.find(marker)
    if at < 0:
        return True
    length = int.from_bytes(start[at + 6 : at + 8], "little")
    sop_class = start[at + 8 : at + 8 + length].rstrip(b"\0 ").decode("ascii", "replace")
    return not sop_class.startswith(_OTHER_CLASSES)


def _assemble(slices: list[_Slice], remarks: list[Remark], uri: str) -> tuple[StoredVoxels, Geometry]:
    """Check that the slices form one evenly spaced stack, and read them in order. Add what is suspicious to
    `remarks`."""
    series = sorted({image_slice.series for image_slice in slices})
    if len(series) > 1:
        named = ", ".join(f"{name or 'unnamed'} ({sum(s.series == name for s in slices)} files)" for name in series[:4])
        raise ScanError(
            f"{len(series)} DICOM series in one folder: {named}", uri=uri, fix="Put each series into its own folder"
        )
    first = slices[0]
    if first.components > 1:
        raise NotVolumeError("the voxels are colours", uri=uri, fix="Use a scan of plain intensities")
    _check_fits((*first.size[:2], sum(math.prod(image_slice.size[2:]) for image_slice in slices)), 1, uri)
    if len(slices) == 1:  # an enhanced file holds the whole volume; a plain one is a single slice, rejected below
        return _to_voxels(_read_pixels(first.path, uri), uri)
    _check_alike(slices, uri)
    normal = np.cross(first.axes[:, 0], first.axes[:, 1])
    if not np.linalg.norm(normal) > 0:
        raise ScanError(f"{first.name}: its rows and columns do not span a plane", uri=uri, fix=_CORRECT_FILE)
    normal /= np.linalg.norm(normal)
    slices = sorted(slices, key=lambda image_slice: float(image_slice.position @ normal))
    _check_spacing(slices, np.array([float(image_slice.position @ normal) for image_slice in slices]), uri)
    step = (slices[-1].position - slices[0].position) / (len(slices) - 1)
    remarks += _check_completeness(slices, float(np.linalg.norm(step)))
    # Each file's own scaling is applied; one type must hold the values of all.
    scalings = {(tuple(s.numbers("slope")), tuple(s.numbers("intercept"))) for s in slices}
    pixel_type = sitk.sitkFloat32 if len(scalings) > 1 else sitk.sitkUnknown
    image = _read_pixels([image_slice.path for image_slice in slices], uri, pixel_type=pixel_type)
    matrix = np.eye(4)
    matrix[:3, :3] = _LPS_TO_RAS @ np.column_stack([first.axes, step])
    matrix[:3, 3] = _LPS_TO_RAS @ slices[0].position
    return _to_voxels(image, uri, matrix)


def _check_alike(slices: list[_Slice], uri: str) -> None:
    """Raise ScanError unless all slices have a position and the same size, directions and spacing."""
    first = slices[0]
    for image_slice in slices:
        if missing := [tag for tag in ("position", "pixel_spacing") if not image_slice.tags.get(tag)]:
            text = f"{image_slice.name}: no {missing[0].replace('_', ' ')}"
            raise ScanError(text, uri=uri, fix=_CORRECT_FILE)
        if image_slice.size != first.size:
            sizes = sorted({format_shape(image_slice.size[:2]) for image_slice in slices})
            raise ScanError(
                f"slices of different sizes: {', '.join(sizes)} ({first.name} and {image_slice.name})",
                uri=uri,
                fix="Keep the slices of one scan",
            )
        if not np.abs(image_slice.axes - first.axes).max() <= 1e-3:
            raise ScanError(
                f"slices of different directions or spacings ({first.name} and {image_slice.name})",
                uri=uri,
                fix="Keep the slices of one scan",
            )


def _check_spacing(slices: list[_Slice], heights_mm: Array, uri: str) -> None:
    """Raise ScanError for a stack with duplicate or missing slices; `slices` are in the order of their heights."""
    gaps = np.diff(heights_mm)
    names = [image_slice.name for image_slice in slices]
    duplicates = np.flatnonzero(gaps < 1e-3)
    if len(duplicates):
        first = int(duplicates[0])
        raise ScanError(
            f"{len(duplicates)} of {len(heights_mm)} slices have the position of another slice "
            f"({names[first]} and {names[first + 1]})",
            uri=uri,
            fix="Remove the duplicates, or put each phase or time point into its own folder",
        )
    usual = float(np.median(gaps))
    uneven = np.abs(gaps - usual) > max(_UNEVEN_SHARE * usual, 1e-3)
    if not uneven.any():
        return
    at = int(np.argmax(np.abs(gaps - usual)))
    missing = np.rint(gaps / usual).astype(int) - 1
    explained = np.abs(gaps - (missing + 1) * usual) <= _UNEVEN_SHARE * usual
    if explained.all():
        count = format_plural(int(missing.sum()), "missing slice")
        raise ScanError(
            f"{count}: a gap of {gaps[at]:.4g} mm where {usual:.4g} mm is usual "
            f"(after slice {at + 1} of {len(heights_mm)}, between {names[at]} and {names[at + 1]})",
            uri=uri,
            fix="Download the whole series",
        )
    raise ScanError(
        f"unevenly spaced slices: gaps from {gaps.min():.4g} to {gaps.max():.4g} mm "
        f"(such as between {names[at]} and {names[at + 1]})",
        uri=uri,
        fix="Download the whole series, or resample it to even spacing",
    )


def _check_completeness(slices: list[_Slice], step_mm: float) -> list[Remark]:
    """Return what says that slices of an evenly spaced stack may be missing, such as at its ends."""
    remarks = []
    instances = sorted(int(n) for s in slices for n in s.numbers("instance")[:1] if math.isfinite(n))
    if len(instances) == len(slices):
        repeated = len(instances) - len(set(instances))
        lacking = instances[-1] - instances[0] + 1 - len(set(instances))
        if repeated:
            remarks.append(Remark("slices", f"{repeated} slices have the instance number of another slice"))
        elif lacking:
            text = f"{lacking} instance numbers between {instances[0]} and {instances[-1]} have no slice"
            remarks.append(Remark("slices", f"{text}; slices may be missing"))
        elif instances[0] > 1:
            remarks.append(Remark("slices", f"the first instance number is {instances[0]}; slices may be missing"))
    expected = max((int(n) for s in slices for n in s.numbers("images")[:1] if math.isfinite(n)), default=0)
    if expected > len(slices):
        text = f"the header announces {expected} images, and {len(slices)} are there; slices may be missing"
        remarks.append(Remark("slices", text))
    spacings = slices[0].numbers("slice_spacing")
    if spacings and abs(abs(spacings[0]) - step_mm) > max(_UNEVEN_SHARE * step_mm, 1e-3):
        text = f"the positions of slices are {step_mm:.4g} mm apart, but the header says {spacings[0]:.4g} mm"
        remarks.append(Remark("slices", f"{text}; the positions are used"))
    uids = Counter(s.tags["instance_uid"] for s in slices if s.tags.get("instance_uid"))
    if repeated := sum(count - 1 for count in uids.values()):
        remarks.append(Remark("slices", f"{repeated} slices have the instance UID of another slice"))
    return remarks


def _read_size(path: str, uri: str) -> tuple[tuple[int, ...], int]:
    """Return the size and the number of components that the header of a .nrrd or .mha file declares."""
    reader = sitk.ImageFileReader()
    reader.SetFileName(path)
    try:
        reader.ReadImageInformation()
    except RuntimeError as error:
        fix = "Copy it again from its source"
        raise ScanError(f"unreadable: {_last_error_line(error)}", uri=uri, fix=fix) from None
    return tuple(reader.GetSize()), reader.GetNumberOfComponents()


def _check_fits(size: tuple[int, ...], num_components: int, uri: str) -> None:
    # As read, as a NumPy array along anatomical axes, and as channels are stacked.
    check_scan_fits(math.prod(size) * num_components * 4 * 3, uri, f"an image of {format_shape(size)} voxels")


def _read_pixels(
    paths: str | list[str],
    uri: str,
    *,
    image_io: str = "GDCMImageIO",
    kind: str = "the series",
    pixel_type: int = sitk.sitkUnknown,
) -> Any:
    """Read the pixels of one file or of a stack of files, by default DICOM, scaled as the files specify."""
    try:
        return sitk.ReadImage(paths, pixel_type, imageIO=image_io)
    except RuntimeError as error:
        fix = f"Copy {kind} again from its source"
        raise ScanError(f"unreadable: {_last_error_line(error)}", uri=uri, fix=fix) from None


def _to_voxels(image: Any, uri: str, affine: Array | None = None) -> tuple[StoredVoxels, Geometry]:
    """Convert a SimpleITK image; `affine` replaces the image's own."""
    size = image.GetSize()
    shape = format_shape(size)
    if image.GetDimension() == 4 and size[3] == 1:
        image = image[:, :, :, 0]
    if image.GetDimension() != 3 or min(image.GetSize()) == 1:
        dimensions = 2 if min(size) == 1 else len(size)
        raise NotVolumeError(
            f"a {dimensions}D image: shape {shape}", uri=uri, fix="Use a 3D scan of two slices or more"
        )
    array = sitk.GetArrayFromImage(image)  # (z, y, x) or (z, y, x, C)
    channels_last = array if image.GetNumberOfComponentsPerPixel() > 1 else array[..., None]
    if affine is None:
        affine = np.eye(4)
        direction = np.asarray(image.GetDirection()).reshape(3, 3)
        affine[:3, :3] = _LPS_TO_RAS @ direction @ np.diag(image.GetSpacing())
        affine[:3, 3] = _LPS_TO_RAS @ np.asarray(image.GetOrigin())
    try:
        geometry = Geometry.of(image.GetSize(), affine)
    except ValueError as error:
        raise ScanError(str(error), uri=uri, fix="Correct its header") from None
    return StoredVoxels(channels_last.transpose(3, 2, 1, 0)), geometry


@contextlib.contextmanager
def _as_local_files(file_uris: list[str], config: StoreConfig | None) -> Iterator[list[str]]:
    """Yield paths of local files with these contents, in order: the files themselves, or temporary copies."""
    parsed = [uris.parse(uri) for uri in file_uris]
    if parsed[0].scheme == "file":
        paths = [f"/{source.key}" for source in parsed]
        for path, uri in zip(paths, file_uris, strict=True):
            check_regular_file(path, uri)
            if not os.path.isfile(path):
                raise NotFoundError("no such file", uri=uri, fix="Check its spelling")
        yield paths
        return
    store = open_store(parsed[0].root, config)
    with temporary_folder("dicom") as folder:
        suffix = os.path.splitext(parsed[0].key)[1]
        paths = [os.path.join(folder, f"{i:06d}{suffix}") for i in range(len(parsed))]

        def fetch(key: str, path: str) -> None:
            body = store.get(key)
            with open(path, "wb") as file:
                file.write(body)

        downloads = [store.submit(fetch, source.key, path) for source, path in zip(parsed, paths, strict=True)]
        for future in downloads:
            future.result()
        yield paths


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name.upper() == "DICOMDIR" or name.lower().endswith((".txt", ".json", ".xml"))


def _last_error_line(error: RuntimeError) -> str:
    """Return the last line of an ITK error, the informative one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rpartition("ERROR: ")[2][:200] if lines else "no reason given"
