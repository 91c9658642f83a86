"""DICOM series, and .nrrd and .mha files, read through SimpleITK, which needs files on a disk."""

from __future__ import annotations

import contextlib
import locale
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from voxlane import uri as uris
from voxlane.errors import MissingExtraError, NotFoundError, ScanError
from voxlane.store import StoreConfig
from voxlane.store.listing import list_objects
from voxlane.volume.formats import NotVolumeError, StoredVoxels, open_store
from voxlane.volume.geometry import Array, Geometry, format_shape

try:
    import SimpleITK as sitk  # noqa: N813
except ImportError:
    raise MissingExtraError.of("dicom", "reading DICOM, .nrrd and .mha") from None

_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])
_UNEVEN_SHARE = 0.05
"""Largest deviation of a gap between slices from the usual gap, as a fraction of it, that counts as rounding."""

sitk.ProcessObject.SetGlobalWarningDisplay(False)  # the checks below report the same problems


def read_file(uri: str, config: StoreConfig | None) -> tuple[StoredVoxels, Geometry]:
    """Read one .nrrd or .mha file."""
    with _preserve_locale(), _as_local_files([uri], config) as paths:
        return _to_voxels(_read_pixels(paths[0], uri, image_io="", kind="it"), uri)


def read_series(uri: str, config: StoreConfig | None) -> tuple[StoredVoxels, Geometry]:
    """Read the single DICOM series below the folder or prefix `uri`."""
    listing = list_objects(uri.rstrip("/") + "/", config=config, progress=False)
    keys = [key for key in listing.keys() if not _is_ignored(key.rpartition("/")[2])]
    if not keys:
        raise NotFoundError(
            "no scan here: neither a file nor a folder with DICOM files",
            uri=uri,
            fix="Use a .nii.gz, .nii, .nrrd or .mha file, or the folder of one DICOM series",
        )
    with _preserve_locale(), _as_local_files([listing.root + key for key in keys], config) as paths:
        slices = [image_slice for path in paths if (image_slice := _read_slice_header(path)) is not None]
        if not slices:
            names = ", ".join(key.rpartition("/")[2] for key in keys[:3])
            raise ScanError(f"no DICOM image among {len(keys)} files ({names})", uri=uri, fix="Use another folder")
        return _assemble(slices, uri)


@contextlib.contextmanager
def _preserve_locale() -> Iterator[None]:
    """Restore the process's locale, which the DICOM library sets to C; text files would then be read as ASCII."""
    before = locale.setlocale(locale.LC_ALL)
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, before)


@dataclass(frozen=True)
class _Slice:
    """Header of one DICOM file."""

    path: str
    series: str
    size: tuple[int, ...]
    components: int
    position: Array
    """Position of the first voxel in mm, LPS."""
    axes: Array
    """Direction times spacing along rows and columns, (3, 2), in mm, LPS."""


def _read_slice_header(path: str) -> _Slice | None:
    """Read the header of `path`; return None if it is not a DICOM image."""
    reader = sitk.ImageFileReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileName(path)
    try:
        reader.ReadImageInformation()
    except RuntimeError:
        return None
    series = reader.GetMetaData("0020|000e").strip("\0 ") if reader.HasMetaDataKey("0020|000e") else ""
    direction = np.asarray(reader.GetDirection()).reshape(reader.GetDimension(), -1)[:3, :2]
    axes, position = direction * np.asarray(reader.GetSpacing()[:2]), np.asarray(reader.GetOrigin()[:3])
    return _Slice(path, series, tuple(reader.GetSize()), reader.GetNumberOfComponents(), position, axes)


def _assemble(slices: list[_Slice], uri: str) -> tuple[StoredVoxels, Geometry]:
    """Check that the slices form one evenly spaced stack, and read them in order."""
    series = sorted({image_slice.series for image_slice in slices})
    if len(series) > 1:
        named = ", ".join(f"{name or 'unnamed'} ({sum(s.series == name for s in slices)} files)" for name in series[:4])
        raise ScanError(
            f"{len(series)} DICOM series in one folder: {named}", uri=uri, fix="Put each series into its own folder"
        )
    first = slices[0]
    if first.components > 1:
        raise NotVolumeError("the voxels are colours", uri=uri, fix="Use a scan of plain intensities")
    if len(slices) == 1:  # an enhanced file holds the whole volume; a plain one is a single slice, rejected below
        return _to_voxels(_read_pixels(first.path, uri), uri)
    if len({image_slice.size for image_slice in slices}) > 1:
        sizes = sorted({format_shape(image_slice.size[:2]) for image_slice in slices})
        raise ScanError(f"slices of different sizes: {', '.join(sizes)}", uri=uri, fix="Keep the slices of one scan")
    if max(np.abs(image_slice.axes - first.axes).max() for image_slice in slices) > 1e-3:
        raise ScanError("slices of different directions or spacings", uri=uri, fix="Keep the slices of one scan")
    normal = np.cross(first.axes[:, 0], first.axes[:, 1])
    normal /= np.linalg.norm(normal)
    slices = sorted(slices, key=lambda image_slice: float(image_slice.position @ normal))
    _check_spacing(np.array([float(image_slice.position @ normal) for image_slice in slices]), uri)
    image = _read_pixels([image_slice.path for image_slice in slices], uri)
    step = (slices[-1].position - slices[0].position) / (len(slices) - 1)
    matrix = np.eye(4)
    matrix[:3, :3] = _LPS_TO_RAS @ np.column_stack([first.axes, step])
    matrix[:3, 3] = _LPS_TO_RAS @ slices[0].position
    return _to_voxels(image, uri, matrix)


def _check_spacing(heights_mm: Array, uri: str) -> None:
    """Raise ScanError for a stack with duplicate or missing slices."""
    gaps = np.diff(heights_mm)
    usual = float(np.median(gaps))
    duplicates = int((gaps < 1e-3).sum())
    if duplicates:
        raise ScanError(
            f"{duplicates} of {len(heights_mm)} slices have the position of another slice",
            uri=uri,
            fix="Remove the duplicates, or put each phase or time point into its own folder",
        )
    uneven = np.abs(gaps - usual) > max(_UNEVEN_SHARE * usual, 1e-3)
    if not uneven.any():
        return
    at = int(np.argmax(uneven))
    missing = np.rint(gaps / usual).astype(int) - 1
    explained = np.abs(gaps - (missing + 1) * usual) <= _UNEVEN_SHARE * usual
    if explained.all():
        raise ScanError(
            f"{int(missing.sum())} missing slices: a gap of {gaps[at]:.4g} mm where {usual:.4g} mm is usual "
            f"(after slice {at + 1} of {len(heights_mm)})",
            uri=uri,
            fix="Download the whole series",
        )
    raise ScanError(
        f"unevenly spaced slices: gaps from {gaps.min():.4g} to {gaps.max():.4g} mm",
        uri=uri,
        fix="Download the whole series, or resample it to even spacing",
    )


def _read_pixels(paths: str | list[str], uri: str, *, image_io: str = "GDCMImageIO", kind: str = "the series") -> Any:
    """Read the pixels of one file or of a stack of files, by default DICOM, scaled as the files specify."""
    try:
        return sitk.ReadImage(paths, imageIO=image_io)
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
            if not os.path.isfile(path):
                raise NotFoundError("no such file", uri=uri, fix="Check its spelling")
        yield paths
        return
    store = open_store(parsed[0].root, config)
    with tempfile.TemporaryDirectory(prefix="voxlane-") as folder:
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


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name.upper() == "DICOMDIR" or name.lower().endswith((".txt", ".json", ".xml"))


def _last_error_line(error: RuntimeError) -> str:
    """Return the last line of an ITK error, the informative one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rpartition("ERROR: ")[2][:200] if lines else "no reason given"
