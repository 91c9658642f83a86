"""The cases of a prepared dataset as tensors: patches, whole volumes, foreground."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from voxlane import uri as uris
from voxlane.dataset.cache import DiskCache
from voxlane.store import Store
from voxlane.store.counters import Counters
from voxlane.volume import normalise
from voxlane.volume.array import MAX_GAP_BYTES
from voxlane.volume.draw import Triple
from voxlane.volume.grid import Grid
from voxlane.volume.prepared import Prepared, PreparedCase, case_key, folder
from voxlane.volume.staged import Staged
from voxlane.volume.volume_reader import Pending, Timing, VolumeReader, Volumes

_OPEN_CASES = 4096
"""Cases whose metadata stay parsed."""


@dataclass(frozen=True, kw_only=True)
class Caching:
    """What is kept of a prepared dataset on its way."""

    ram_bytes: int = 1 << 30
    """Compressed chunks in memory, per process."""
    index_bytes: int = 128 << 20
    """Shard indexes and small objects in memory, per process."""
    folder: str | os.PathLike[str] | None = None
    """Compressed chunks on disk, for all processes of a machine; None: none."""
    disk_bytes: int = 100 << 30
    """At most so much there."""
    staged: str | os.PathLike[str] | None = None
    """Where `voxlane stage` has put a copy of the dataset; what is not there is read from the bucket."""


class CaseVolume:
    """One case: reads nothing before it is asked."""

    def __init__(self, case: PreparedCase, reader: VolumeReader) -> None:
        self.case = case
        self.shape = case.shape
        """Voxels (z, y, x)."""
        self._reader = reader
        self._scale: Sequence[float] = case.volume["scale_factor"]
        self._offset: Sequence[float] = case.volume["add_offset"]

    @property
    def grid(self) -> Grid:
        """Where the volume lies in its scan."""
        return Grid.from_dict(self.case.volume["grid"])

    def foreground(self) -> npt.NDArray[np.int32]:
        """Rows (label value, z, y, x) of voxels to draw patches around."""
        return self._reader.read("foreground")

    def read_padded(self, start: Triple, patch: Triple) -> tuple[torch.Tensor, torch.Tensor]:
        """Image (C, Z, Y, X) float32 and label (Z, Y, X) uint8 of a region that may reach beyond the volume: there the
        image is zero and the label background."""
        stop = [a + n for a, n in zip(start, patch, strict=True)]
        image = self._reader.start_padded("image", start, stop, 0)
        label = self._reader.start_padded("label", start, stop, 0)
        image.wait()
        label.wait()
        with self._reader.shared.decoding:
            return self._decoded(image, label, start, stop)

    def _decoded(
        self, image: Pending, label: Pending, start: Triple, stop: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = normalise.decode(image.result(), self._scale, self._offset)
        if any(self._offset) and (
            any(a < 0 for a in start) or any(b > n for b, n in zip(stop, self.shape, strict=True))
        ):
            _blank_outside(values, start, self.shape)
        return torch.from_numpy(values), torch.from_numpy(label.result())

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole image and label."""
        return self.read_padded((0, 0, 0), self.shape)


def _blank_outside(values: npt.NDArray[np.float32], start: Triple, shape: Triple) -> None:
    """Stored zeros do not mean zero where the intensities have an offset."""
    for axis, (first, size) in enumerate(zip(start, shape, strict=True), 1):
        index = np.arange(values.shape[axis]) + first
        outside = (index < 0) | (index >= size)
        values[(slice(None),) * axis + (outside,)] = 0


class Cases:
    """All cases of a prepared dataset; they share connections and caches. Cheap to build and to pickle."""

    def __init__(
        self, prepared: Prepared, caching: Caching | None = None, *, max_gap_bytes: int = MAX_GAP_BYTES
    ) -> None:
        """`max_gap_bytes`: chunks that lie at most so far apart in an object come in one request, with what is between
        them."""
        self.prepared = prepared
        self._caching = caching or Caching()
        self._max_gap_bytes = max_gap_bytes
        disk = None if self._caching.folder is None else DiskCache(self._caching.folder, self._caching.disk_bytes)
        self._prefix = folder(uris.parse(prepared.uri).key)
        staged = None if self._caching.staged is None else Staged(self._caching.staged, prepared)
        self._volumes = Volumes(
            Store(prepared.uri, prepared.config),
            memory_bytes=self._caching.ram_bytes,
            index_bytes=self._caching.index_bytes,
            max_gap_bytes=max_gap_bytes,
            disk=disk,
            staged=staged,
        )
        self.open = lru_cache(_OPEN_CASES)(self._open)

    def __getstate__(self) -> dict[str, Any]:
        return {"prepared": self.prepared, "caching": self._caching, "max_gap_bytes": self._max_gap_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Cases.__init__(self, **state)

    def _open(self, row: int) -> CaseVolume:
        """The case at a row of the dataset's table."""
        case = self.prepared.case(row)
        return CaseVolume(case, self._volumes.open(case_key(self._prefix, case.id), case.volume))

    def enter_process(self) -> None:
        """Open the bucket from this thread. A forked child loads the engine anew for it, which must not happen while
        other threads import modules."""
        self._volumes.store.open_native()

    def count_into(self, counters: Counters) -> None:
        """Count requests in `counters` from now on."""
        self._volumes.store.counters = counters

    def timing(self) -> Timing:
        """What reading has cost in this process."""
        return self._volumes.timing
