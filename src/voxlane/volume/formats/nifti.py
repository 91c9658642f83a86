"""NIfTI files, parsed and encoded in memory without temporary files.

Reading needs memory for the compressed object, twice the decompressed one, and the resulting image.
"""

from __future__ import annotations

import gzip
import io
import logging
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import ScanError
from voxlane.volume.formats import NotVolumeError, StoredVoxels
from voxlane.volume.geometry import Array, Geometry, format_shape

NIFTI_SUFFIXES = (".nii.gz", ".nii")
_COPY_AGAIN = "Copy it again from its source"
_SILENT = logging.Logger("nibabel-header")
_SILENT.addHandler(logging.NullHandler())


def parse_nifti(body: Any, uri: str) -> tuple[StoredVoxels, Geometry]:
    """Parse the bytes of a NIfTI file, compressed or not; errors name `uri`."""
    raw = _decompress(body, uri)
    header = _parse_header(raw, uri)
    shape = _volume_shape(tuple(int(n) for n in header.get_data_shape()), uri)
    dtype = header.get_data_dtype()
    if dtype.kind not in "iuf":
        content = "colours" if dtype.names else f"{dtype} values"
        raise NotVolumeError(f"the voxels are {content}", uri=uri, fix="Use a scan of plain intensities")
    offset = int(header.get_data_offset())
    count = int(np.prod(shape, dtype=np.int64))
    if len(raw) < offset + count * dtype.itemsize:
        size = format_shape(shape[:3] if shape[3] == 1 else shape)
        raise ScanError(
            f"truncated: {size} voxels of {dtype} need {count * dtype.itemsize:,} bytes, "
            f"the file has {max(len(raw) - offset, 0):,}",
            uri=uri,
            fix=_COPY_AGAIN,
        )
    array = np.frombuffer(raw, dtype, count, offset).reshape(shape, order="F")
    try:
        geometry = Geometry.of(shape[:3], _choose_affine(header))
    except ValueError as error:
        raise ScanError(str(error), uri=uri, fix="Correct the sform or qform in the header") from None
    slope, intercept = header.get_slope_inter()
    stored = StoredVoxels(np.moveaxis(array, 3, 0), 1.0 if slope is None else slope, intercept or 0.0)
    return stored, geometry


def encode_nifti(mask_zyx: Array, geometry: Geometry, dtype: npt.DTypeLike, *, compress: bool) -> bytes:
    """Encode `mask_zyx`, which is along the anatomical axes, in the grid of `geometry`; equal masks give equal
    bytes."""
    import nibabel

    array = geometry.from_canonical(mask_zyx).astype(dtype, order="F")
    affine = np.asarray(geometry.affine)
    image = nibabel.Nifti1Image(array, affine, dtype=array.dtype)
    image.header.set_xyzt_units("mm")
    image.set_sform(affine, code="scanner")
    # A quaternion cannot represent sheared axes (a tilted gantry); then only the sform is valid.
    axes = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    is_sheared = np.abs(axes.T @ axes - np.eye(3)).max() >= 1e-4
    image.set_qform(affine, code="unknown" if is_sheared else "scanner", strip_shears=True)
    body = bytes(image.to_bytes())
    return gzip.compress(body, 6, mtime=0) if compress else body


def _decompress(body: Any, uri: str) -> Any:
    """Decompress gzip, which is recognised by its first bytes, not by the file's name."""
    if len(body) == 0:
        raise ScanError("the file is empty", uri=uri, fix=_COPY_AGAIN)
    view = memoryview(body)
    if bytes(view[:2]) != b"\x1f\x8b":
        return view
    try:
        return gzip.decompress(view)
    except EOFError:
        message = "truncated: the compressed data ends early"
    except (gzip.BadGzipFile, zlib.error) as error:
        message = f"damaged: the compressed data cannot be read ({error})"
    raise ScanError(message, uri=uri, fix=_COPY_AGAIN) from None


def _parse_header(raw: Any, uri: str) -> Any:
    """Parse and check the NIfTI-1 or NIfTI-2 header, and fill in what files often omit."""
    import nibabel
    from nibabel.spatialimages import HeaderDataError

    size = bytes(raw[:4])
    kinds = {348: nibabel.Nifti1Header, 540: nibabel.Nifti2Header}
    kind = kinds.get(int.from_bytes(size, "little")) or kinds.get(int.from_bytes(size, "big"))
    if kind is None:
        raise ScanError("not a NIfTI file: it does not start with a NIfTI header", uri=uri, fix=_guess_format(raw))
    if len(raw) < kind.sizeof_hdr:
        raise ScanError("truncated inside the header", uri=uri, fix=_COPY_AGAIN)
    try:
        header = kind.from_fileobj(io.BytesIO(bytes(raw[: kind.sizeof_hdr])), check=False)
        magic = bytes(header["magic"].item())
        if not magic.startswith(b"n+"):
            pair = magic.startswith(b"ni")
            raise ScanError(
                "the file is the header of a .hdr/.img pair" if pair else "the header lacks the NIfTI magic number",
                uri=uri,
                fix="Convert it to one .nii.gz file",
            )
        header.check_fix(logger=_SILENT, error_level=40)
        header.get_data_dtype()
    except (HeaderDataError, ValueError, KeyError) as error:
        raise ScanError(f"invalid NIfTI header: {error}", uri=uri, fix="Write it again from its source") from None
    return header


def _guess_format(raw: Any) -> str:
    """Return advice about a file that is not NIfTI, by its first bytes."""
    start = bytes(raw[:400])
    if start[128:132] == b"DICM":
        return "It is a DICOM file: use the folder of its series"
    if start.startswith(b"NRRD"):
        return "It is an NRRD file: name it .nrrd"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "It is a web page, perhaps a saved error message: download the scan again"
    if start.startswith(b"version https://git-lfs"):
        return "It is a Git LFS pointer: run git lfs pull"
    return "Check that this is the intended file, and copy it again"


def _volume_shape(shape: tuple[int, ...], uri: str) -> tuple[int, int, int, int]:
    """Return (x, y, z, channels) of a NIfTI shape; raise if it is not 3D."""
    full = format_shape(shape)
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if any(n < 1 for n in shape) or not shape:
        raise ScanError(f"an empty image: shape {full}", uri=uri, fix="Write it again from its source")
    if len(shape) < 3 or min(shape[:3]) == 1:
        raise NotVolumeError(f"a 2D image: shape {full}", uri=uri, fix="Use a 3D scan of two slices or more")
    if len(shape) > 4:
        raise NotVolumeError(
            f"a {len(shape)}D image: shape {full}", uri=uri, fix="Use a 3D scan, or 4D with channels last"
        )
    return shape[0], shape[1], shape[2], shape[3] if len(shape) == 4 else 1


def _choose_affine(header: Any) -> Array:
    """Return the first of sform, qform and bare spacing that spans space."""
    candidates = []
    for code, form in (("sform_code", header.get_sform), ("qform_code", header.get_qform)):
        if header[code] > 0:
            try:
                candidates.append(form())
            except (ValueError, np.linalg.LinAlgError):  # a quaternion longer than 1
                continue
    candidates.append(header.get_base_affine())
    for affine in candidates:
        lengths = np.linalg.norm(affine[:3, :3], axis=0)
        if np.isfinite(affine).all() and lengths.min() > 0 and np.linalg.matrix_rank(affine[:3, :3] / lengths) == 3:
            return np.asarray(affine)
    return np.asarray(candidates[0])
