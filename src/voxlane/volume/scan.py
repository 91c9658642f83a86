"""Reading one scan or label from any URI, and writing a mask in the same grid.

NIfTI is read from memory: the object is fetched whole, inflated and viewed, without temporary files. Memory at the
peak is about the compressed object, twice the inflated one, and the image that is returned.
"""

from __future__ import annotations

import functools
import gzip
import io
import logging
import os
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane import uri as uris
from voxlane.errors import ConfigError, MissingExtraError, NotFoundError, ScanError
from voxlane.store import Store, StoreConfig
from voxlane.volume.geometry import Array, Geometry

NIFTI = (".nii.gz", ".nii")
ITK = (".nrrd", ".mha")
"""Read through SimpleITK."""
SUFFIXES = NIFTI + ITK
_MAX_LABEL = 255
_SILENT = logging.Logger("nibabel-header")
_SILENT.addHandler(logging.NullHandler())


class NotVolumeError(ScanError):
    """The file is readable and holds something else than a 3D scan: one slice, a film, colours."""


class LabelValuesError(ScanError):
    """The file is readable and its values are no class numbers."""


@dataclass
class Scan:
    """One scan along the anatomical axes."""

    image: Array
    """(C, Z, Y, X), contiguous; the file's integers, or float32 where the file has floats or scales its integers."""
    geometry: Geometry
    """The file's own grid."""
    dtype: np.dtype[Any]
    """What the file stores."""


def read_scan(uri: str, config: StoreConfig | None = None) -> Scan:
    """The scan at `uri`: a NIfTI file (4D: one channel a volume), a .nrrd or .mha file, or a folder or bucket prefix
    that holds the DICOM files of one series.

    ScanError when it is no readable 3D scan, NotFoundError when nothing is there.
    """
    stored, geometry = _read(uri, config)
    return Scan(_image(stored, geometry), geometry, stored.array.dtype.newbyteorder("="))


def image_of(body: bytes, uri: str) -> Array:
    """What `read_scan` gives as its image, of a NIfTI file whose bytes are here; `uri` is for errors."""
    return _image(*_nifti(body, uri))


def _image(stored: Stored, geometry: Geometry) -> Array:
    return np.ascontiguousarray(geometry.to_canonical(_native(stored.values())))


def read_label(uri: str, config: StoreConfig | None = None) -> tuple[npt.NDArray[np.uint8], Geometry]:
    """The label at `uri` as (Z, Y, X) class numbers along the anatomical axes, and its own grid.

    Whole numbers stored as floats are fine; LabelValuesError for any other value.
    """
    stored, geometry = _read(uri, config)
    return _label(stored, geometry, uri), geometry


def label_of(body: bytes, uri: str) -> npt.NDArray[np.uint8]:
    """What `read_label` gives, of a NIfTI file whose bytes are here; `uri` is for errors."""
    return _label(*_nifti(body, uri), uri)


def _label(stored: Stored, geometry: Geometry, uri: str) -> npt.NDArray[np.uint8]:
    if len(stored.array) != 1:
        raise NotVolumeError(
            f"the label is a 4D file of {len(stored.array)} volumes", uri=uri, fix="Give one 3D volume of class numbers"
        )
    return np.ascontiguousarray(geometry.to_canonical(_whole_numbers(stored.values(exact=True)[0], uri)))


def write_mask(
    uri: str | os.PathLike[str],
    mask_zyx: Array,
    geometry: Geometry,
    dtype: npt.DTypeLike = np.uint8,
    config: StoreConfig | None = None,
) -> None:
    """Write `mask_zyx`, which lies along the anatomical axes, as NIfTI in the grid of `geometry`: its axes, shape and
    affine are those of the scan it was made from. Compressed when the name ends in .gz; the same mask gives the same
    bytes."""
    import nibabel

    name = os.fspath(uri)
    if not name.endswith(NIFTI):
        raise ConfigError("a mask is written as NIfTI", uri=name, fix="End the name in .nii.gz or .nii")
    if mask_zyx.shape != geometry.canonical_shape:
        raise ConfigError(f"a mask of shape {mask_zyx.shape} for a grid of {geometry.canonical_shape}", uri=name)
    own = geometry.from_canonical(mask_zyx).astype(dtype, order="F")
    affine = np.asarray(geometry.affine)
    image = nibabel.Nifti1Image(own, affine, dtype=own.dtype)
    image.header.set_xyzt_units("mm")
    image.set_sform(affine, code="scanner")
    # A quaternion cannot say that axes are sheared (a tilted gantry); then only the sform speaks.
    image.set_qform(affine, code="scanner" if _orthogonal(affine) else "unknown", strip_shears=True)
    body = image.to_bytes()
    if name.endswith(".gz"):
        body = gzip.compress(body, 6, mtime=0)
    parsed = uris.parse(name)
    open_store(parsed.root, config).put(parsed.key, body)


@functools.lru_cache(maxsize=16)
def open_store(root: str, config: StoreConfig | None) -> Store:
    """One store a bucket and process, because opening one for each of many small files costs more than reading it."""
    return Store(root, config)


def stem(uri: str) -> str:
    """A file's name without its folder and its known suffix: `a/b/case_1.nii.gz` gives `case_1`."""
    name = uri.rstrip("/").rpartition("/")[2]
    return next((name[: -len(suffix)] for suffix in SUFFIXES if name.lower().endswith(suffix)), name)


@dataclass
class Stored:
    """What a file holds, before scaling."""

    array: Array
    """(C, x, y, z) along the file's own axes, in its own dtype and byte order."""
    slope: float = 1.0
    intercept: float = 0.0

    def values(self, *, exact: bool = False) -> Array:
        """Scaled values: unscaled integers as they are, else float32, or float64 when `exact`."""
        if self.slope == 1.0 and self.intercept == 0.0:
            return self.array
        wide: Array = self.array.astype(np.float64 if exact else np.float32)
        wide *= self.slope
        wide += self.intercept
        return wide


def _read(uri: str, config: StoreConfig | None) -> tuple[Stored, Geometry]:
    """Read whatever is at `uri`."""
    parsed = uris.parse(uri)
    lower = parsed.key.lower()
    local = f"/{parsed.key}" if parsed.scheme == "file" else ""
    if lower.endswith(ITK) and not os.path.isdir(local):
        found: tuple[Stored, Geometry] = _series().read_file(str(parsed), config)
        return found
    if lower.endswith(NIFTI) and not os.path.isdir(local):
        return _nifti(open_store(parsed.root, config).get(parsed.key), uri)
    if lower.endswith((".hdr", ".img", ".mhd", ".nhdr", ".dcm", ".png", ".jpg", ".tif", ".tiff", ".npy", ".npz")):
        what = lower.rpartition(".")[2]
        fix = "Give the folder of the whole series" if what == "dcm" else "Convert it to .nii.gz"
        raise ScanError(f"a single .{what} file is not read as a scan", uri=uri, fix=fix)
    if local and not os.path.isdir(local):
        if not os.path.exists(local):
            raise NotFoundError("no such file or folder", uri=uri, fix="Check its spelling")
        return _nifti(open_store(parsed.root, config).get(parsed.key), uri)  # its first bytes say what it is
    found = _series().read_series(str(parsed), config)
    return found


def _series() -> Any:
    """The module that needs SimpleITK."""
    try:
        import SimpleITK  # noqa: F401
    except ImportError:
        raise MissingExtraError.of("dicom", "reading DICOM, .nrrd and .mha") from None
    from voxlane.volume import series

    return series


def _nifti(body: Any, uri: str) -> tuple[Stored, Geometry]:
    """Parse the bytes of a NIfTI file, compressed or not."""
    raw = _inflate(body, uri)
    header = _header(raw, uri)
    shape = _volume_shape(tuple(int(n) for n in header.get_data_shape()), uri)
    dtype = header.get_data_dtype()
    if dtype.kind not in "iuf":
        what = "colours" if dtype.names else f"{dtype} values"
        raise NotVolumeError(f"the voxels are {what}", uri=uri, fix="Give a scan of plain intensities")
    offset = int(header.get_data_offset())
    count = int(np.prod(shape, dtype=np.int64))
    if len(raw) < offset + count * dtype.itemsize:
        wanted = f"{_by(shape[:3] if shape[3] == 1 else shape)} voxels of {dtype} need {count * dtype.itemsize:,} bytes"
        raise ScanError(
            f"truncated: {wanted}, the file has {max(len(raw) - offset, 0):,}",
            uri=uri,
            fix="Copy it again from its source",
        )
    array = np.frombuffer(raw, dtype, count, offset).reshape(shape, order="F")
    try:
        geometry = Geometry.of(shape[:3], _affine(header))
    except ValueError as error:
        raise ScanError(str(error), uri=uri, fix="Correct the sform or qform in the header") from None
    slope, intercept = header.get_slope_inter()
    stored = Stored(np.moveaxis(array, 3, 0), 1.0 if slope is None else slope, intercept or 0.0)
    return stored, geometry


def _inflate(body: Any, uri: str) -> Any:
    """The file's bytes without gzip; told by its first bytes, not by its name."""
    if len(body) == 0:
        raise ScanError("the file is empty", uri=uri, fix="Copy it again from its source")
    view = memoryview(body)
    if bytes(view[:2]) != b"\x1f\x8b":
        return view
    try:
        return gzip.decompress(view)
    except EOFError:
        said = "truncated: the compressed data ends early"
    except (gzip.BadGzipFile, zlib.error) as error:
        said = f"damaged: its compressed data cannot be read ({error})"
    raise ScanError(said, uri=uri, fix="Copy it again from its source") from None


def _header(raw: Any, uri: str) -> Any:
    """The NIfTI-1 or NIfTI-2 header, checked, with what files often leave out filled in."""
    import nibabel
    from nibabel.spatialimages import HeaderDataError

    size = bytes(raw[:4])
    kinds = {348: nibabel.Nifti1Header, 540: nibabel.Nifti2Header}
    kind = kinds.get(int.from_bytes(size, "little")) or kinds.get(int.from_bytes(size, "big"))
    if kind is None:
        raise ScanError("not a NIfTI file: it does not start with a NIfTI header", uri=uri, fix=_guess(raw))
    if len(raw) < kind.sizeof_hdr:
        raise ScanError("truncated inside the header", uri=uri, fix="Copy it again from its source")
    try:
        header = kind.from_fileobj(io.BytesIO(bytes(raw[: kind.sizeof_hdr])), check=False)
        magic = bytes(header["magic"].item())
        if not magic.startswith(b"n+"):
            pair = magic.startswith(b"ni")
            raise ScanError(
                "the header of a .hdr/.img pair" if pair else "the header lacks the mark of NIfTI",
                uri=uri,
                fix="Convert it to one .nii.gz file",
            )
        header.check_fix(logger=_SILENT, error_level=40)
        header.get_data_dtype()
    except (HeaderDataError, ValueError, KeyError) as error:
        raise ScanError(f"bad NIfTI header: {error}", uri=uri, fix="Write it again from its source") from None
    return header


def _guess(raw: Any) -> str:
    """What a file that is not NIfTI may be, as advice."""
    start = bytes(raw[:400])
    if start[128:132] == b"DICM":
        return "It is a DICOM file: give the folder of its series"
    if start.startswith(b"NRRD"):
        return "It is an NRRD file: name it .nrrd"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "It is a web page, perhaps an error message that was saved: download the scan again"
    if start.startswith(b"version https://git-lfs"):
        return "It is a Git LFS pointer: run git lfs pull"
    return "Check that it is the file you mean, and copy it again"


def _volume_shape(shape: tuple[int, ...], uri: str) -> tuple[int, int, int, int]:
    """(x, y, z, channels) of a NIfTI shape, or the reason that it is not 3D."""
    full = shape
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if any(n < 1 for n in shape) or not shape:
        raise ScanError(f"an empty image: shape {_by(full)}", uri=uri, fix="Write it again from its source")
    if len(shape) < 3 or min(shape[:3]) == 1:
        raise NotVolumeError(f"a 2D image: shape {_by(full)}", uri=uri, fix="Give a 3D scan of two slices or more")
    if len(shape) > 4:
        raise NotVolumeError(
            f"a {len(shape)}D image: shape {_by(full)}", uri=uri, fix="Give a 3D scan, or 4D with channels last"
        )
    return shape[0], shape[1], shape[2], shape[3] if len(shape) == 4 else 1


def _affine(header: Any) -> Array:
    """The sform, the qform, or the bare spacing, whichever is the first that spans space."""
    found = []
    for code, form in (("sform_code", header.get_sform), ("qform_code", header.get_qform)):
        if header[code] > 0:
            try:
                found.append(form())
            except (ValueError, np.linalg.LinAlgError):  # a quaternion longer than 1
                continue
    found.append(header.get_base_affine())
    for affine in found:
        lengths = np.linalg.norm(affine[:3, :3], axis=0)
        if np.isfinite(affine).all() and lengths.min() > 0 and np.linalg.matrix_rank(affine[:3, :3] / lengths) == 3:
            return np.asarray(affine)
    return np.asarray(found[0])


def _native(array: Array) -> Array:
    """Floats as float32, integers in this machine's byte order."""
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # becomes infinite, which checking a case finds
            return array.astype(np.float32, copy=False)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _whole_numbers(values: Array, uri: str) -> npt.NDArray[np.uint8]:
    """`values` as class numbers."""
    fix = "A label holds class numbers: check that this is the label and not the image, or a resampled label"
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            whole = np.rint(values)
            # Scaling by a header's float32 slope leaves errors of this size on whole numbers.
            wrong = ~(np.abs(values - whole) <= 1e-4)
        if wrong.any():
            raise LabelValuesError(
                f"{int(wrong.sum()):,} label voxels are no whole numbers, such as {float(values[wrong][0]):.6g}",
                uri=uri,
                fix=fix,
            )
        values = whole
    low, high = values.min(), values.max()
    if low < 0 or high > _MAX_LABEL:
        raise LabelValuesError(
            f"label values reach from {int(low)} to {int(high)}, outside 0 to {_MAX_LABEL}", uri=uri, fix=fix
        )
    return values.astype(np.uint8)


def _orthogonal(affine: Array) -> bool:
    axes = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    return bool(np.abs(axes.T @ axes - np.eye(3)).max() < 1e-4)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
