"""DICOM series and single .nrrd and .mha files, read through SimpleITK, which wants files on a disk."""

from __future__ import annotations

import contextlib
import locale
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813

from voxlane import uri as uris
from voxlane.errors import NotFoundError, ScanError
from voxlane.listing import list_objects
from voxlane.store import StoreConfig
from voxlane.volume.geometry import Array, Geometry
from voxlane.volume.scan import NotVolumeError, Stored, open_store

_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])
_UNEVEN_SHARE = 0.05
"""A gap between slices that differs from the usual one by more than this share is a fault, not rounding."""

sitk.ProcessObject.SetGlobalWarningDisplay(False)  # what it would print is checked here and said once


def read_file(uri: str, config: StoreConfig | None) -> tuple[Stored, Geometry]:
    """One .nrrd or .mha file."""
    with _own_locale(), _on_disk([uri], config) as paths:
        try:
            image = sitk.ReadImage(paths[0])
        except RuntimeError as error:
            raise ScanError(f"unreadable: {_said(error)}", uri=uri, fix="Copy it again from its source") from None
    return _stored(image, uri)


def read_series(uri: str, config: StoreConfig | None) -> tuple[Stored, Geometry]:
    """The one DICOM series below the folder or prefix `uri`."""
    found = list_objects(uri.rstrip("/") + "/", config=config, progress=False)
    keys = [key for key in found.keys() if not _ignored(key.rpartition("/")[2])]
    if not keys:
        raise NotFoundError(
            "no scan here: neither a file nor a folder with DICOM files",
            uri=uri,
            fix="Give a .nii.gz, .nii, .nrrd or .mha file, or the folder of one DICOM series",
        )
    with _own_locale(), _on_disk([found.root + key for key in keys], config) as paths:
        slices = [piece for path in paths if (piece := _slice(path)) is not None]
        if not slices:
            names = ", ".join(key.rpartition("/")[2] for key in keys[:3])
            raise ScanError(f"no DICOM image among its {len(keys)} files ({names})", uri=uri, fix="Give another folder")
        return _assemble(slices, uri)


@contextlib.contextmanager
def _own_locale() -> Iterator[None]:
    """The DICOM library sets the process's locale to C and leaves it so; files would be read as ASCII from then on."""
    before = locale.setlocale(locale.LC_ALL)
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, before)


@dataclass(frozen=True)
class _Slice:
    """The header of one DICOM file."""

    path: str
    series: str
    size: tuple[int, ...]
    components: int
    position: Array
    """Of the first voxel, mm, LPS."""
    axes: Array
    """Direction times spacing of a row's and a column's steps, (3, 2), mm, LPS."""


def _slice(path: str) -> _Slice | None:
    """The header of `path`, or None when it is no DICOM image."""
    reader = sitk.ImageFileReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileName(path)
    try:
        reader.ReadImageInformation()
    except RuntimeError:
        return None
    series = reader.GetMetaData("0020|000e").strip("\0 ") if reader.HasMetaDataKey("0020|000e") else ""
    direction = np.asarray(reader.GetDirection()).reshape(reader.GetDimension(), -1)[:3, :2]
    spacing = np.asarray(reader.GetSpacing()[:2])
    return _Slice(
        path,
        series,
        tuple(reader.GetSize()),
        reader.GetNumberOfComponents(),
        np.asarray(reader.GetOrigin()[:3]),
        direction * spacing,
    )


def _assemble(slices: list[_Slice], uri: str) -> tuple[Stored, Geometry]:
    """Check that the slices make one even stack, and read them in its order."""
    series = sorted({piece.series for piece in slices})
    if len(series) > 1:
        named = ", ".join(f"{name or 'unnamed'} ({sum(s.series == name for s in slices)} files)" for name in series[:4])
        raise ScanError(
            f"{len(series)} DICOM series in one folder: {named}", uri=uri, fix="Put each series into its own folder"
        )
    first = slices[0]
    if first.components > 1:
        raise NotVolumeError("the voxels are colours", uri=uri, fix="Give a scan of plain intensities")
    if len(slices) == 1:  # an enhanced file holds the whole volume; a plain one is a single slice, refused below
        return _stored(_load([first.path], uri), uri)
    if len({piece.size for piece in slices}) > 1:
        sizes = sorted({" x ".join(map(str, piece.size[:2])) for piece in slices})
        raise ScanError(f"slices of different sizes: {', '.join(sizes)}", uri=uri, fix="Keep those of one scan only")
    if max(np.abs(piece.axes - first.axes).max() for piece in slices) > 1e-3:
        raise ScanError("slices of different directions or spacings", uri=uri, fix="Keep those of one scan only")
    normal = np.cross(first.axes[:, 0], first.axes[:, 1])
    normal /= np.linalg.norm(normal)
    slices = sorted(slices, key=lambda piece: float(piece.position @ normal))
    _check_even(np.array([float(piece.position @ normal) for piece in slices]), uri)
    image = _load([piece.path for piece in slices], uri)
    step = (slices[-1].position - slices[0].position) / (len(slices) - 1)
    matrix = np.eye(4)
    matrix[:3, :3] = _LPS_TO_RAS @ np.column_stack([first.axes, step])
    matrix[:3, 3] = _LPS_TO_RAS @ slices[0].position
    return _stored(image, uri, matrix)


def _check_even(heights_mm: Array, uri: str) -> None:
    """Refuse a stack with slices twice or missing."""
    gaps = np.diff(heights_mm)
    usual = float(np.median(gaps))
    twice = int((gaps < 1e-3).sum())
    if twice:
        raise ScanError(
            f"{twice} of {len(heights_mm)} slices lie where another one does",
            uri=uri,
            fix="Remove the copies, or put each phase or time point into its own folder",
        )
    uneven = np.abs(gaps - usual) > max(_UNEVEN_SHARE * usual, 1e-3)
    if not uneven.any():
        return
    at = int(np.argmax(uneven))
    missing = np.rint(gaps / usual).astype(int) - 1
    whole = np.abs(gaps - (missing + 1) * usual) <= _UNEVEN_SHARE * usual
    if whole.all():
        raise ScanError(
            f"{int(missing.sum())} missing slices: {gaps[at]:.4g} mm between two where {usual:.4g} mm is usual "
            f"(after slice {at + 1} of {len(heights_mm)})",
            uri=uri,
            fix="Fetch the whole series",
        )
    raise ScanError(
        f"unevenly spaced slices: gaps from {gaps.min():.4g} to {gaps.max():.4g} mm",
        uri=uri,
        fix="Fetch the whole series, or resample it to even spacing",
    )


def _load(paths: list[str], uri: str) -> Any:
    """The pixels, scaled as the files say."""
    try:
        if len(paths) == 1:
            return sitk.ReadImage(paths[0], imageIO="GDCMImageIO")
        reader = sitk.ImageSeriesReader()
        reader.SetImageIO("GDCMImageIO")
        reader.SetFileNames(paths)
        return reader.Execute()
    except RuntimeError as error:
        raise ScanError(f"unreadable: {_said(error)}", uri=uri, fix="Copy the series again from its source") from None


def _stored(image: Any, uri: str, affine: Array | None = None) -> tuple[Stored, Geometry]:
    """A SimpleITK image as ours; `affine` in place of the image's own."""
    size = image.GetSize()
    shape = " x ".join(map(str, size))
    if image.GetDimension() == 4 and size[3] == 1:
        image = image[:, :, :, 0]
    if image.GetDimension() != 3 or min(image.GetSize()) == 1:
        dimensions = 2 if min(size) == 1 else len(size)
        raise NotVolumeError(
            f"a {dimensions}D image: shape {shape}", uri=uri, fix="Give a 3D scan of two slices or more"
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
    return Stored(channels_last.transpose(3, 2, 1, 0)), geometry


@contextlib.contextmanager
def _on_disk(file_uris: list[str], config: StoreConfig | None) -> Iterator[list[str]]:
    """Paths of local files with these contents, in order: the files themselves, or copies that are gone afterwards."""
    parsed = [uris.parse(uri) for uri in file_uris]
    if parsed[0].scheme == "file":
        paths = [f"/{place.key}" for place in parsed]
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

        waiting = [store.submit(fetch, place.key, path) for place, path in zip(parsed, paths, strict=True)]
        for future in waiting:
            future.result()
        yield paths


def _ignored(name: str) -> bool:
    return name.startswith(".") or name.upper() == "DICOMDIR" or name.lower().endswith((".txt", ".json", ".xml"))


def _said(error: RuntimeError) -> str:
    """The last line of an ITK error, which is the one that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rpartition("ERROR: ")[2][:200] if lines else "no reason given"
