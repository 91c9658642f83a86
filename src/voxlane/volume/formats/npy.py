"""NumPy arrays in .npy files: (Z, Y, X), or (C, Z, Y, X) as in MLPerf's KiTS19.

The format has no geometry. Axes are taken as anatomical (z to the head, y to the front, x to the right), and the
spacing is the caller's. Files that hold Python objects are rejected, because reading those would run code.
"""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import numpy as np

from voxlane.errors import ScanError
from voxlane.volume.formats import NotVolumeError, StoredVoxels
from voxlane.volume.geometry import Array, Geometry, format_shape

NPY_SUFFIX = ".npy"
DEFAULT_SPACING = (1.0, 1.0, 1.0)
"""Millimetres (z, y, x) between voxels of a file, unless the caller knows better."""
_MAX_HEADER_BYTES = 1 << 16
"""Bytes in which a header ends; NumPy refuses headers of more than 10,000 characters."""
_COPY_AGAIN = "Copy it again from its source"
_AXES = "Save it as (Z, Y, X), or as (C, Z, Y, X) with channels first"


def parse_npy(body: Any, uri: str, spacing: tuple[float, float, float] | None = None) -> tuple[StoredVoxels, Geometry]:
    """Parse the bytes of a .npy file; errors name `uri`. The voxels are not copied."""
    array = _parse_array(body, uri)
    if array.dtype.kind == "b":
        array = array.view(np.uint8)
    if array.dtype.kind not in "iuf":
        raise NotVolumeError(f"the voxels are {array.dtype} values", uri=uri, fix="Use integers or floats")
    if array.ndim not in (3, 4):
        raise NotVolumeError(f"an array of {array.ndim} axes: shape {_shape(array)}", uri=uri, fix=_AXES)
    if array.size == 0:
        raise ScanError(f"an empty array: shape {_shape(array)}", uri=uri, fix="Save it again from its source")
    array = array if array.ndim == 4 else array[None]
    if min(array.shape[1:]) == 1:
        raise NotVolumeError(f"a 2D image: shape {_shape(array)}", uri=uri, fix="Use a 3D scan of two slices or more")
    z, y, x = spacing or DEFAULT_SPACING
    stored = array.swapaxes(1, 3)
    return StoredVoxels(stored), Geometry.of(stored.shape[1:], np.diag([x, y, z, 1.0]))


def _parse_array(body: Any, uri: str) -> Array:
    view = memoryview(body)
    file = io.BytesIO(view[:_MAX_HEADER_BYTES])
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"version {version[0]}.{version[1]} of the format is unknown")
        with warnings.catch_warnings():  # about headers that Python 2 wrote
            warnings.simplefilter("ignore", UserWarning)
            shape, is_fortran, dtype = readers[version](file)
    except ValueError as error:
        text = str(error).splitlines()[0]
        raise ScanError(f"not a .npy file, or one with a damaged header: {text}", uri=uri, fix=_COPY_AGAIN) from None
    if dtype.hasobject:
        raise ScanError(
            "the array holds Python objects, and reading those could run any code",
            uri=uri,
            fix="Save it as numbers: np.save(file, array.astype(np.float32))",
        )
    count, available = math.prod(shape), len(view) - file.tell()
    expected = count * dtype.itemsize
    if available != expected:
        problem = "truncated" if available < expected else "more than one array"
        size = f"{format_shape(shape)} values of {dtype} need {expected:,} bytes, the file has {available:,}"
        raise ScanError(f"{problem}: {size}", uri=uri, fix=_COPY_AGAIN)
    return np.frombuffer(view, dtype, count, file.tell()).reshape(shape, order="F" if is_fortran else "C")


def _shape(array: Array) -> str:
    return format_shape(array.shape) or "()"
