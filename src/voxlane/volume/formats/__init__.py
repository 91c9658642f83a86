"""File formats of scans, one module for each family, and what each returns: the stored voxels of a file.

To add a format, write a module here that returns `StoredVoxels` and a `Geometry`, and call it from `_read_voxels` of
`voxlane.volume.scan`, which chooses the format by the name of the file.
"""

from __future__ import annotations

import functools
import os
import stat
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from voxlane import uri as uris
from voxlane.errors import ScanError
from voxlane.store import Store, StoreConfig
from voxlane.volume.geometry import Array


class NotVolumeError(ScanError):
    """Raised for a readable file that is not a 3D scan, such as a single slice, a time series or colours."""


RemarkKind = Literal["geometry", "header", "intensity", "slices"]


@dataclass(frozen=True)
class Remark:
    """A suspicious property of a scan."""

    kind: RemarkKind
    detail: str
    fatal: bool = False
    """Whether results would be wrong, not only suspicious."""


@dataclass
class StoredVoxels:
    """The voxels of a file before scaling."""

    array: Array
    """(C, x, y, z) along the file's own axes, in its own dtype and byte order."""
    slope: float = 1.0
    intercept: float = 0.0
    remarks: tuple[Remark, ...] = ()
    """What is suspicious about the file, though it can be read."""

    def scaled(self, *, exact: bool = False) -> Array:
        """Return the scaled values: unscaled integers unchanged, else float32, or float64 if `exact`."""
        if self.slope == 1.0 and self.intercept == 0.0:
            return self.array
        values: Array = self.array.astype(np.float64 if exact else np.float32)
        values *= self.slope
        values += self.intercept
        return values


@functools.lru_cache(maxsize=16)
def open_store(root: str, config: StoreConfig | None) -> Store:
    """Return this process's store for a bucket; opening one per small file would cost more than reading the file."""
    return Store(root, config)


def read_object(uri: str, config: StoreConfig | None) -> Any:
    """Return the bytes of a whole object. A local file must be a regular one, because reading a pipe or device may
    never end."""
    parsed = uris.parse(uri)
    if parsed.scheme == "file":
        check_regular_file(f"/{parsed.key}", uri)
    return open_store(parsed.root, config).get(parsed.key)


def check_regular_file(path: str, uri: str) -> None:
    """Raise ScanError if `path` is a pipe, device or socket, or may not be read. A missing file passes."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return
    except OSError as error:
        raise ScanError(f"cannot be read: {error.strerror}", uri=uri, fix="Check the file and its folder") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ScanError("not a regular file but a pipe, device or socket", uri=uri, fix="Use a file or folder")
    if not os.access(path, os.R_OK):
        raise ScanError("cannot be read: permission denied", uri=uri, fix="Ask for read permission on it")
