"""NIfTI files, parsed and encoded in memory without temporary files.

Reading needs memory for the compressed object, the decompressed one, and the resulting image. The header is checked
first: no more is decompressed than its shape needs, and a shape that does not fit into memory is rejected.
"""

from __future__ import annotations

import gzip
import io
import logging
import math
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import ScanError
from voxlane.volume.formats import NotVolumeError, Remark, StoredVoxels
from voxlane.volume.geometry import Array, Geometry, format_mm, format_shape, max_index_distance_mm
from voxlane.volume.memory import check_scan_fits

NIFTI_SUFFIXES = (".nii.gz", ".nii")
_COPY_AGAIN = "Copy it again from its source"
_CORRECT_FORMS = "Correct the sform or qform in the header"
_SILENT = logging.Logger("nibabel-header")
_SILENT.addHandler(logging.NullHandler())
_HEADER_BYTES = 540
"""Size of the largest header."""
_FEED_BYTES = 1 << 18
"""Compressed bytes that are decompressed at a time; they become at most a thousand times as many."""
_MAX_GZIP_RATIO = 1032
"""No deflate stream grows by more than this factor."""
_MAX_TRAILING_BYTES = 1 << 26
"""Most decompressed bytes after the voxels that are read to reach the checksum of the compressed data."""
_UNITS = {1: "metres", 3: "micrometres"}
"""Codes of units of length other than millimetres."""


def parse_nifti(body: Any, uri: str) -> tuple[StoredVoxels, Geometry]:
    """Parse the bytes of a NIfTI file, compressed or not; errors name `uri`."""
    if len(body) == 0:
        raise ScanError("the file is empty", uri=uri, fix=_COPY_AGAIN)
    source = _Source(memoryview(body), uri)
    header, remarks = _parse_header(source.read_start(_HEADER_BYTES), uri)
    shape = _volume_shape(tuple(int(n) for n in header.get_data_shape()), uri)
    dtype = header.get_data_dtype()
    if dtype.kind not in "iuf":
        content = "colours" if dtype.names else f"{dtype} values"
        raise NotVolumeError(f"the voxels are {content}", uri=uri, fix="Use a scan of plain intensities")
    offset, count = int(header.get_data_offset()), math.prod(shape)
    size = format_shape(shape[:3] if shape[3] == 1 else shape)
    end = offset + count * dtype.itemsize
    if end <= source.most_bytes:
        # The decompressed file, the scan along anatomical axes, and a copy while channels are stacked.
        copies = 3 if source.is_compressed else 2
        check_scan_fits(count * max(dtype.itemsize, 4) * copies, uri, f"an image of {size} voxels of {dtype}")
    raw, trailing_bytes = source.read(end)
    if len(raw) < end:
        raise ScanError(
            f"truncated: {size} voxels of {dtype} need {count * dtype.itemsize:,} bytes, "
            f"the file has {max(len(raw) - offset, 0):,}",
            uri=uri,
            fix=_COPY_AGAIN,
        )
    if trailing_bytes:
        text = f"{trailing_bytes:,} bytes follow the voxels of shape {size}; the shape in the header may be wrong"
        remarks.append(Remark("header", text))
    array = np.frombuffer(raw, dtype, count, offset).reshape(shape, order="F")
    try:
        geometry = Geometry.of(shape[:3], _choose_affine(header, shape[:3], remarks, uri))
    except ValueError as error:
        raise ScanError(str(error), uri=uri, fix=_CORRECT_FORMS) from None
    slope, intercept = _read_scaling(header, uri)
    if slope < 0:
        remarks.append(Remark("header", f"scl_slope is negative ({slope:g}), which inverts the intensities"))
    return StoredVoxels(np.moveaxis(array, 3, 0), slope, intercept, tuple(remarks)), geometry


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


class _Source:
    """The bytes of a file, decompressed only as far as they are needed. Gzip is recognised by its first bytes, not by
    the file's name."""

    def __init__(self, body: memoryview, uri: str) -> None:
        self.is_compressed = bytes(body[:2]) == b"\x1f\x8b"
        self.most_bytes = len(body) * (_MAX_GZIP_RATIO if self.is_compressed else 1)
        """No more than this many bytes can come of the file."""
        self._body, self._uri = body, uri

    def read_start(self, num_bytes: int) -> bytes:
        """Return the first bytes, fewer if the file ends before."""
        if not self.is_compressed:
            return bytes(self._body[:num_bytes])
        try:
            return zlib.decompressobj(wbits=31).decompress(self._body[:_FEED_BYTES], num_bytes)
        except zlib.error as error:
            raise self._damaged(error) from None

    def read(self, num_bytes: int) -> tuple[Any, int]:
        """Return a buffer with the first `num_bytes`, fewer if the file ends before, and the number of bytes after
        those. All of the compressed data is checked against its checksum."""
        if not self.is_compressed:
            return self._body[:num_bytes], max(0, len(self._body) - num_bytes)
        # Of a file that is too short for its header, only what is there.
        output = np.empty(min(num_bytes, self.most_bytes), np.uint8)
        filled, trailing = 0, 0
        position, stream, pending = 0, zlib.decompressobj(wbits=31), b""
        try:
            while pending or position < len(self._body):
                if not pending:
                    pending = bytes(self._body[position : position + _FEED_BYTES])
                    position += len(pending)
                chunk = stream.decompress(pending, max(len(output) - filled, 1 << 20))
                num_used = min(len(chunk), len(output) - filled)
                output[filled : filled + num_used] = np.frombuffer(chunk, np.uint8, num_used)
                filled, trailing = filled + num_used, trailing + len(chunk) - num_used
                if trailing > _MAX_TRAILING_BYTES:
                    raise ScanError(
                        f"more than {trailing:,} bytes follow the voxels: the shape in the header is wrong, or the "
                        "file is no scan",
                        uri=self._uri,
                        fix="Write it again from its source",
                    )
                pending = stream.unconsumed_tail
                if stream.eof:  # another member may follow; zeros pad archives
                    pending = stream.unused_data.lstrip(b"\0")
                    if pending or position < len(self._body):
                        rest = pending or bytes(self._body[position:]).lstrip(b"\0")
                        if not rest:
                            break
                        stream = zlib.decompressobj(wbits=31)
        except zlib.error as error:
            raise self._damaged(error) from None
        if not stream.eof:
            raise ScanError("truncated: the compressed data ends early", uri=self._uri, fix=_COPY_AGAIN)
        return output[:filled], trailing

    def _damaged(self, error: zlib.error) -> ScanError:
        return ScanError(f"damaged: the compressed data cannot be read ({error})", uri=self._uri, fix=_COPY_AGAIN)


def _parse_header(raw: bytes, uri: str) -> tuple[Any, list[Remark]]:
    """Parse and check the NIfTI-1 or NIfTI-2 header, and fill in what files often omit. Return it with what is
    suspicious about it. The spacing stays as stored."""
    import nibabel
    from nibabel.spatialimages import HeaderDataError

    size = raw[:4]
    kinds = {348: nibabel.Nifti1Header, 540: nibabel.Nifti2Header}
    kind = kinds.get(int.from_bytes(size, "little")) or kinds.get(int.from_bytes(size, "big"))
    if kind is None:
        if len(raw) < 4:
            raise ScanError("truncated inside the header", uri=uri, fix=_COPY_AGAIN)
        raise ScanError("not a NIfTI file: it does not start with a NIfTI header", uri=uri, fix=_guess_format(raw))
    if len(raw) < kind.sizeof_hdr:
        raise ScanError("truncated inside the header", uri=uri, fix=_COPY_AGAIN)
    remarks = []
    try:
        header = kind.from_fileobj(io.BytesIO(raw[: kind.sizeof_hdr]), check=False)
        magic = bytes(header["magic"].item())
        if not magic.startswith(b"n+"):
            pair = magic.startswith(b"ni")
            raise ScanError(
                "the file is the header of a .hdr/.img pair" if pair else "the header lacks the NIfTI magic number",
                uri=uri,
                fix="Convert it to one .nii.gz file",
            )
        offset = float(header["vox_offset"])
        if not math.isfinite(offset) or not 0 <= offset < 2**53:
            raise ScanError(f"invalid NIfTI header: vox_offset is {offset}", uri=uri, fix=_COPY_AGAIN)
        bits = int(header["bitpix"])
        spacing = header["pixdim"][1:4].copy()
        header.check_fix(logger=_SILENT, error_level=40)
        header["pixdim"][1:4] = spacing
        expected_bits = header.get_data_dtype().itemsize * 8
        if bits != expected_bits:
            text = f"bitpix is {bits}, but the data type has {expected_bits} bits; the data type is used"
            remarks.append(Remark("header", text))
    except (HeaderDataError, ValueError, KeyError, OverflowError) as error:
        raise ScanError(f"invalid NIfTI header: {error}", uri=uri, fix="Write it again from its source") from None
    if unit := _UNITS.get(int(header["xyzt_units"]) & 7):
        raise ScanError(
            f"the header gives lengths in {unit}",
            uri=uri,
            fix="Convert the spacing and the affine to millimetres, and set xyzt_units to 2",
        )
    return header, remarks


def _read_scaling(header: Any, uri: str) -> tuple[float, float]:
    """Return slope and intercept; (1, 0) if the header does not scale."""
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    for name, value in (("scl_slope", slope), ("scl_inter", intercept)):
        if not math.isfinite(value) and (name == "scl_slope" or slope != 0):
            raise ScanError(
                f"{name} is {value}, so the intensities are unknown",
                uri=uri,
                fix="Correct it in the header: 1 and 0 if the voxels need no scaling",
            )
    return (1.0, 0.0) if slope == 0 else (slope, intercept)


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


def _choose_affine(header: Any, shape: tuple[int, ...], remarks: list[Remark], uri: str) -> Array:
    """Return the affine of the sform, else of the qform, else of the bare spacing, and add what is suspicious about
    them to `remarks`. Raise ScanError if none that the header declares spans space."""
    spacing = np.abs(header["pixdim"][1:4].astype(np.float64))
    spacing_text = format_mm(header["pixdim"][1:4])
    is_spacing_valid = bool(np.isfinite(spacing).all() and spacing.min() > 0)
    is_negative = bool((header["pixdim"][1:4] < 0).any())
    header["pixdim"][1:4] = spacing
    usable: dict[str, Array] = {}
    unusable = []
    for name, form in (("sform", header.get_sform), ("qform", header.get_qform)):
        if header[f"{name}_code"] <= 0:
            continue
        try:
            with np.errstate(all="ignore"):  # what is not finite is rejected below
                affine = np.asarray(form(), np.float64)
        except (ValueError, np.linalg.LinAlgError):  # a quaternion longer than 1
            affine = np.full((4, 4), np.nan)
        if _spans_space(affine) and (name == "sform" or is_spacing_valid):
            usable[name] = affine
        else:
            unusable.append(name)
    if not usable:
        if not is_spacing_valid:
            raise ScanError(
                f"the spacing is {spacing_text} mm (x, y, z)"
                + f", and the {' and '.join(unusable)} cannot be used" * bool(unusable),
                uri=uri,
                fix=_CORRECT_FORMS,
            )
        if unusable:
            raise ScanError(
                f"the affine of the {' and of the '.join(unusable)} is singular or not finite",
                uri=uri,
                fix=_CORRECT_FORMS,
            )
        text = "neither sform nor qform is set: directions of the axes are unknown and taken as x to the right, y to "
        remarks.append(Remark("geometry", f"{text}the front, z to the head"))
        return np.asarray(header.get_base_affine(), np.float64)
    name, affine = next(iter(usable.items()))
    if unusable:
        remarks.append(Remark("geometry", f"the {unusable[0]} is singular or not finite; the {name} is used"))
    if len(usable) == 2:
        first, second = (Geometry.of(shape, form) for form in usable.values())
        apart_mm = max_index_distance_mm(first, second)
        if apart_mm > 0.5 * min(first.spacing):
            remarks.append(
                Remark("geometry", f"sform and qform put voxels up to {apart_mm:.3g} mm apart; the sform is used")
            )
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if name == "sform" and not (is_spacing_valid and np.allclose(lengths, spacing, rtol=0.02)):
        text = f"the spacing is {spacing_text} mm (x, y, z), but that of the sform is {format_mm(lengths)} mm"
        remarks.append(Remark("geometry", f"{text}; the sform is used"))
    elif is_negative:
        remarks.append(Remark("geometry", f"the spacing is negative: {spacing_text} mm (x, y, z)"))
    return affine


def _spans_space(affine: Array) -> bool:
    if not np.isfinite(affine).all():
        return False
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    return bool(lengths.min() > 0 and np.linalg.matrix_rank(affine[:3, :3] / lengths) == 3)
