"""File formats of scans, one module for each family, and what each returns: the stored voxels of a file.

To add a format, write a module here that returns `StoredVoxels` and a `Geometry`, and call it from `_read_voxels` of
`voxlane.volume.scan`, which chooses the format by the name of the file.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from voxlane.errors import ScanError
from voxlane.store import Store, StoreConfig
from voxlane.volume.geometry import Array


class NotVolumeError(ScanError):
    """Raised for a readable file that is not a 3D scan, such as a single slice, a time series or colours."""


@dataclass
class StoredVoxels:
    """The voxels of a file before scaling."""

    array: Array
    """(C, x, y, z) along the file's own axes, in its own dtype and byte order."""
    slope: float = 1.0
    intercept: float = 0.0

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
