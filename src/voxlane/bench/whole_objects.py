"""Patches the way the public segmentation demo makes them: every patch downloads and decodes a whole scan and label.

What differs from `PatchStream` is only that: the same cases at the same places of an epoch, the same patches where
grids agree, through the same client and loader. So what the two are apart is what reading whole objects costs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from voxlane.bench.raw_set import RawCase, RawSet, arrays
from voxlane.dataset.ahead import in_order
from voxlane.dataset.base import OrderedDataset
from voxlane.dataset.cache import DiskCache
from voxlane.dataset.reading import Reader
from voxlane.store import Store, StoreConfig
from voxlane.volume.draw import Triple, case_at, draw_patch, is_forced


class WholeObjects(OrderedDataset, torch.utils.data.IterableDataset[dict[str, Any]]):
    """Patches of raw scans as a stream; a sample is a dict as `PatchStream` gives it, without normalisation.

    samples: patches in an epoch, over all ranks.
    in_flight: scans that are being fetched or decoded, or wait as patches, per process. Memory is about so many scans.
    cache: keeps whole objects on disk.
    """

    def __init__(
        self,
        raw: RawSet,
        config: StoreConfig,
        *,
        samples: int,
        patch: Triple,
        foreground_share: float,
        seed: int,
        in_flight: int,
        cache: DiskCache | None = None,
    ) -> None:
        super().__init__(shuffle=False, seed=seed, rank=None, world_size=None, tail="keep")
        self.raw = raw
        self.samples = samples
        self.patch = patch
        self.foreground_share = foreground_share
        self.in_flight = in_flight
        self._store = Store(raw.manifest.uri, config)
        self._cache = cache
        self._opened: tuple[int, Reader, ThreadPoolExecutor] | None = None
        self._times = _Times()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened": None, "_times": _Times()}

    def num_samples(self) -> int:
        """Patches of one epoch, over all ranks."""
        return self.samples

    def fingerprint(self) -> str:
        """Names what is drawn from."""
        return self.raw.manifest.fingerprint

    def where(self) -> str:
        """The raw set."""
        return self.raw.manifest.uri

    def __len__(self) -> int:
        return self.rank_length()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.start_pass()
        return self._stream(self.process_indices().tolist())

    def _stream(self, positions: list[int]) -> Iterator[dict[str, Any]]:
        if self._opened is None or self._opened[0] != os.getpid():
            self._times = _Times()
            self._store.counters = self._tally.counters()
            self._store.open_native()
            pool = ThreadPoolExecutor(self.in_flight, thread_name_prefix="voxlane-scan")
            self._opened = os.getpid(), Reader(self._store, self._cache, None), pool
        _, reader, pool = self._opened
        work = partial(self._sample, reader, epoch=self.epoch)
        for sample in in_order(pool, work, positions, self.in_flight, batch=self.block):
            self._tally.set_times(self._times.waited_s, self._times.decoded_s)
            yield sample
        self.end_pass()

    @property
    def times_s(self) -> tuple[float, float]:
        """Seconds that threads waited for the bucket, and decoded, in all processes."""
        return self._tally.times_s

    def _sample(self, reader: Reader, position: int, epoch: int) -> dict[str, Any]:
        cases = self.raw.cases
        row = case_at(position, cases=len(cases), samples=self.samples, seed=self.seed, epoch=epoch)
        began = time.perf_counter()
        keys, bodies = self._fetched(reader, cases[row])
        there = time.perf_counter()
        image, label = arrays(cases[row], keys, bodies)
        forced = is_forced(position, self.foreground_share)
        drawn = draw_patch(
            position,
            seed=self.seed,
            epoch=epoch,
            patch=self.patch,
            shape=(label.shape[0], label.shape[1], label.shape[2]),
            foreground=_foreground(label) if forced else _NOTHING,
            forced=forced,
        )
        cut = {
            "image": torch.from_numpy(cropped(image, drawn.start, self.patch).astype(np.float32, copy=False)),
            "label": torch.from_numpy(cropped(label[None], drawn.start, self.patch)[0]),
        }
        self._times.add(there - began, time.perf_counter() - there)
        return {**cut, "row": row, "position": position}

    def _fetched(self, reader: Reader, case: RawCase) -> tuple[list[str], list[bytes]]:
        entries = [self.raw.manifest[row] for row in (*case.images, case.label)]
        pending = reader.submit(entries)
        return [self._store.uri(entry.key) for entry in entries], [each.result() for each in pending]


class _Times:
    """Seconds that the threads of this process spent."""

    def __init__(self) -> None:
        self.waited_s = self.decoded_s = 0.0
        self._lock = threading.Lock()

    def add(self, waited_s: float, decoded_s: float) -> None:
        with self._lock:
            self.waited_s += waited_s
            self.decoded_s += decoded_s

    def __reduce__(self) -> tuple[type[_Times], tuple[()]]:
        return _Times, ()


_NOTHING: npt.NDArray[np.int32] = np.empty((0, 4), np.int32)


def _foreground(label: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Rows (label value, z, y, x) of every voxel that is not background."""
    where = np.argwhere(label)
    return np.column_stack([label[tuple(where.T)].astype(np.int64), where])


def cropped(array: npt.NDArray[Any], start: Triple, patch: Triple) -> npt.NDArray[Any]:
    """Voxels `[start, start + patch)` of (C, Z, Y, X), zero beyond the volume; a copy, so that the volume can go."""
    inside = [slice(max(0, a), max(0, min(n, a + p))) for a, p, n in zip(start, patch, array.shape[1:], strict=True)]
    found = array[(slice(None), *inside)]
    if found.shape[1:] == patch:
        return found.copy()
    whole = np.zeros((array.shape[0], *patch), array.dtype)
    at = [slice(s.start - a, s.stop - a) for s, a in zip(inside, start, strict=True)]
    whole[(slice(None), *at)] = found
    return whole
