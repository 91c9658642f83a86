"""Reading of a scan or label from any URI in any supported format, and writing of masks.

`voxlane.volume.formats` holds the formats and says how to add one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane import uri as uris
from voxlane.errors import ConfigError, NotFoundError, ScanError
from voxlane.store import StoreConfig
from voxlane.volume.formats import NotVolumeError, Remark, StoredVoxels, check_regular_file, open_store, read_object
from voxlane.volume.formats.nifti import NIFTI_SUFFIXES, encode_nifti, parse_nifti
from voxlane.volume.formats.npy import NPY_SUFFIX, parse_npy
from voxlane.volume.geometry import Array, Geometry

ITK_SUFFIXES = (".nrrd", ".mha")
"""Suffixes of files that are read through SimpleITK."""
SCAN_SUFFIXES = (*NIFTI_SUFFIXES, *ITK_SUFFIXES, NPY_SUFFIX)
_UNSUPPORTED = (".hdr", ".img", ".mhd", ".nhdr", ".dcm", ".png", ".jpg", ".tif", ".tiff", ".npz")
_MAX_LABEL = 255
Spacing = tuple[float, float, float]
"""Millimetres between voxels along (z, y, x)."""


class LabelValuesError(ScanError):
    """Raised for a readable file whose values are not class numbers."""


@dataclass
class Scan:
    """A scan along the anatomical axes."""

    image: Array
    """(C, Z, Y, X), contiguous; the file's integers, or float32 if the file has floats or scaled integers."""
    geometry: Geometry
    """The file's own grid."""
    dtype: np.dtype[Any]
    """Data type stored in the file."""
    remarks: tuple[Remark, ...] = ()
    """What is suspicious about the file."""


@dataclass
class Label:
    """A label along the anatomical axes."""

    values: npt.NDArray[np.uint8]
    """Class numbers (Z, Y, X), contiguous."""
    geometry: Geometry
    """The file's own grid."""
    remarks: tuple[Remark, ...] = ()
    """What is suspicious about the file."""


def read_scan(
    uri: str, config: StoreConfig | None = None, *, body: bytes | None = None, spacing: Spacing | None = None
) -> Scan:
    """Read a NIfTI file (4D: one channel per volume), a .nrrd, .mha or .npy file, or a folder or bucket prefix with the
    DICOM files of one series. Raises ScanError if it is not a readable 3D scan, and NotFoundError if it does not exist.

    body: the bytes of a NIfTI or .npy file that was read already; errors name `uri`.
    spacing: millimetres (z, y, x) between voxels for a format that stores none (.npy); None: 1 mm.
    """
    stored, geometry = _read_voxels(uri, config, spacing) if body is None else _parse(body, uri, spacing)
    image = np.ascontiguousarray(geometry.to_canonical(_to_native(stored.scaled())))
    return Scan(image, geometry, stored.array.dtype.newbyteorder("="), stored.remarks)


def read_label(
    uri: str, config: StoreConfig | None = None, *, body: bytes | None = None, spacing: Spacing | None = None
) -> tuple[npt.NDArray[np.uint8], Geometry]:
    """Read a label as class numbers (Z, Y, X) along the anatomical axes, and its own grid. Integers stored as floats
    are accepted; LabelValuesError is raised for any other value. `body` and `spacing` are as for `read_scan`."""
    label = load_label(uri, config, body=body, spacing=spacing)
    return label.values, label.geometry


def load_label(
    uri: str, config: StoreConfig | None = None, *, body: bytes | None = None, spacing: Spacing | None = None
) -> Label:
    """Read a label as `read_label` does, together with what is suspicious about its file."""
    stored, geometry = _read_voxels(uri, config, spacing) if body is None else _parse(body, uri, spacing)
    if len(stored.array) != 1:
        raise NotVolumeError(
            f"the label is a 4D file of {len(stored.array)} volumes", uri=uri, fix="Use one 3D volume of class numbers"
        )
    label = _to_class_numbers(stored.scaled(exact=True)[0], uri)
    return Label(np.ascontiguousarray(geometry.to_canonical(label)), geometry, stored.remarks)


def write_mask(
    uri: str | os.PathLike[str],
    mask_zyx: Array,
    geometry: Geometry,
    dtype: npt.DTypeLike = np.uint8,
    config: StoreConfig | None = None,
) -> None:
    """Write `mask_zyx`, which is along the anatomical axes, as NIfTI with the axes, shape and affine of `geometry`. The
    file is compressed if its name ends in .gz. The same mask gives the same bytes."""
    name = os.fspath(uri)
    if not name.endswith(NIFTI_SUFFIXES):
        raise ConfigError("masks are written as NIfTI", uri=name, fix="Use a name that ends in .nii.gz or .nii")
    if mask_zyx.shape != geometry.canonical_shape:
        raise ConfigError(
            f"a mask of shape {mask_zyx.shape} does not match a grid of {geometry.canonical_shape}", uri=name
        )
    parsed = uris.parse(name)
    body = encode_nifti(mask_zyx, geometry, dtype, compress=name.endswith(".gz"))
    open_store(parsed.root, config).put(parsed.key, body)


def strip_scan_suffix(uri: str) -> str:
    """Return a file's name without its folder and scan suffix: `a/b/case_1.nii.gz` gives `case_1`."""
    name = uri.rstrip("/").rpartition("/")[2]
    return next((name[: -len(suffix)] for suffix in SCAN_SUFFIXES if name.lower().endswith(suffix)), name)


def _parse(body: Any, uri: str, spacing: Spacing | None) -> tuple[StoredVoxels, Geometry]:
    """Parse a file that was read as a whole; a file of an unknown name is NIfTI if its first bytes say so."""
    return parse_npy(body, uri, spacing) if uri.lower().endswith(NPY_SUFFIX) else parse_nifti(body, uri)


def _read_voxels(uri: str, config: StoreConfig | None, spacing: Spacing | None) -> tuple[StoredVoxels, Geometry]:
    """Read the file or series at `uri` in the format that its name indicates."""
    parsed = uris.parse(uri)
    lower = parsed.key.lower()
    local = f"/{parsed.key}" if parsed.scheme == "file" else ""
    is_folder = bool(local) and os.path.isdir(local)
    is_itk_file = lower.endswith(ITK_SUFFIXES) and not is_folder
    if lower.endswith((*NIFTI_SUFFIXES, NPY_SUFFIX)) and not is_folder:
        return _parse(read_object(uri, config), uri, spacing)
    if lower.endswith(_UNSUPPORTED):
        suffix = lower.rpartition(".")[2]
        fix = "Use the folder of the whole series" if suffix == "dcm" else "Convert it to .nii.gz"
        raise ScanError(f"a single .{suffix} file is not supported as a scan", uri=uri, fix=fix)
    if local and not is_folder and not is_itk_file:
        if not os.path.exists(local):
            raise NotFoundError("no such file or folder", uri=uri, fix="Check its spelling")
        return _parse(read_object(uri, config), uri, spacing)
    if local:
        check_regular_file(local, uri)
    from voxlane.volume.formats import dicom  # which needs SimpleITK, an optional dependency

    return (dicom.read_file if is_itk_file else dicom.read_series)(str(parsed), config)


def _to_native(array: Array) -> Array:
    """Convert floats to float32 and integers to this machine's byte order."""
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # becomes infinite, which the checks of a case detect
            return array.astype(np.float32, copy=False)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _to_class_numbers(values: Array, uri: str) -> npt.NDArray[np.uint8]:
    """Convert integral values from 0 to 255 to uint8; raise LabelValuesError for any other value."""
    if values.dtype == np.uint8:
        return values
    fix = "A label holds class numbers: check that this is not the image or an interpolated label"
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            rounded = np.rint(values)
            # Scaling by a header's float32 slope leaves errors of this size on integers.
            wrong = ~(np.abs(values - rounded) <= 1e-4)
        if wrong.any():
            raise LabelValuesError(
                f"{int(wrong.sum()):,} label voxels are not integers, such as {float(values[wrong][0]):.6g}",
                uri=uri,
                fix=fix,
            )
        values = rounded
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > _MAX_LABEL:
        raise LabelValuesError(f"label values range from {low} to {high}, outside 0 to {_MAX_LABEL}", uri=uri, fix=fix)
    return values.astype(np.uint8)
