"""Cases of a prepared dataset as tensors: patches, whole volumes and foreground voxels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from voxlane import uri as uris
from voxlane.dataset.cache import DiskCache
from voxlane.store import Store
from voxlane.store.counters import RequestCounters
from voxlane.volume import normalise
from voxlane.volume.grid import Grid
from voxlane.volume.plan import Triple
from voxlane.volume.prepared_dataset import Prepared, PreparedCase, as_prefix, case_key
from voxlane.volume.staged_dataset import StagedReader
from voxlane.volume.volume_reader import ReadTiming, VolumeCache, VolumeReader
from voxlane.volume.zarr_array import MAX_GAP_BYTES

_OPEN_CASES = 4096
"""Number of cases whose parsed metadata stays in memory."""


@dataclass(frozen=True, kw_only=True)
class CacheLimits:
    """Cache sizes and locations for reading a prepared dataset."""

    ram_bytes: int = 1 << 30
    """Memory for compressed chunks, per process."""
    index_bytes: int = 128 << 20
    """Memory for shard indexes and small objects, per process."""
    folder: str | os.PathLike[str] | None = None
    """Folder for compressed chunks, shared by all processes of a machine; None disables the disk cache."""
    disk_bytes: int = 100 << 30
    staged: str | os.PathLike[str] | None = None
    """Folder that `voxlane stage` copied the dataset to; objects missing there are read from the bucket."""


class CaseVolume:
    """One case, read on demand."""

    def __init__(self, case: PreparedCase, reader: VolumeReader) -> None:
        self.case = case
        self.shape = case.shape
        """Voxels (z, y, x)."""
        self._reader = reader
        self._scale: Sequence[float] = case.volume["scale_factor"]
        self._offset: Sequence[float] = case.volume["add_offset"]

    @property
    def grid(self) -> Grid:
        """Position of the volume in its scan."""
        return Grid.from_dict(self.case.volume["grid"])

    def foreground(self) -> npt.NDArray[np.int32]:
        """Read the rows (label value, z, y, x) of the voxels to draw patches around."""
        return self._reader.read("foreground")

    def read_padded(self, start: Triple, patch: Triple) -> tuple[torch.Tensor, torch.Tensor]:
        """Read image (C, Z, Y, X) float32 and label (Z, Y, X) uint8 of a region. Where the region exceeds the volume,
        the image is zero and the label background."""
        stop = [a + n for a, n in zip(start, patch, strict=True)]
        image = self._reader.start("image", start, stop, fill=0)
        label = self._reader.start("label", start, stop, fill=0)
        image.wait()
        label.wait()
        with self._reader.shared.decoding:
            values = normalise.decode(image.result(), self._scale, self._offset)
            is_inside = min(start) >= 0 and all(b <= n for b, n in zip(stop, self.shape, strict=True))
            if any(self._offset) and not is_inside:
                _blank_outside(values, start, self.shape)
            return torch.from_numpy(values), torch.from_numpy(label.result())

    def read_whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the whole image and label."""
        return self.read_padded((0, 0, 0), self.shape)


def _blank_outside(values: npt.NDArray[np.float32], start: Triple, shape: Triple) -> None:
    """Set voxels outside the volume to zero; stored zeros mean something else if the intensities have an offset."""
    for axis, (first, size) in enumerate(zip(start, shape, strict=True), 1):
        index = np.arange(values.shape[axis]) + first
        outside = (index < 0) | (index >= size)
        values[(slice(None),) * axis + (outside,)] = 0


class Cases:
    """All cases of a prepared dataset, sharing connections and caches. Cheap to build and to pickle."""

    def __init__(
        self, prepared: Prepared, caching: CacheLimits | None = None, *, max_gap_bytes: int = MAX_GAP_BYTES
    ) -> None:
        """Open nothing yet. Chunks at most `max_gap_bytes` apart in an object are read in one request."""
        self.prepared = prepared
        self._caching = limits = caching or CacheLimits()
        self._max_gap_bytes = max_gap_bytes
        self._prefix = as_prefix(uris.parse(prepared.uri).key)
        self._volumes = VolumeCache(
            Store(prepared.uri, prepared.config),
            memory_bytes=limits.ram_bytes,
            index_bytes=limits.index_bytes,
            max_gap_bytes=max_gap_bytes,
            disk=None if limits.folder is None else DiskCache(limits.folder, limits.disk_bytes),
            staged=None if limits.staged is None else StagedReader(limits.staged, prepared),
        )
        self.open = lru_cache(_OPEN_CASES)(self._open)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Cases, max_gap_bytes=self._max_gap_bytes), (self.prepared, self._caching)

    def _open(self, row: int) -> CaseVolume:
        """Return the case at a row of the dataset's table."""
        case = self.prepared.case(row)
        return CaseVolume(case, self._volumes.open(case_key(self._prefix, case.id), case.volume))

    def enter_process(self) -> None:
        """Open the bucket from this thread. A forked child has to load the engine again, which must not happen while
        other threads import modules."""
        self._volumes.store.open_native()

    def count_into(self, counters: RequestCounters) -> None:
        """Count requests in `counters` from now on."""
        self._volumes.store.counters = counters

    def timing(self) -> ReadTiming:
        """Time and requests that reading has cost in this process."""
        return self._volumes.timing
