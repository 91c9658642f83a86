"""Patches of raw scans as the public segmentation demo makes them: every patch downloads and decodes a whole scan and
its label.

Everything else is as in `PatchStream`: the same cases at the same positions of an epoch, the same patches where grids
agree, the same client and loader. So the difference between the two is the cost of reading whole objects.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from voxlane.dataset.base import OrderedDataset
from voxlane.dataset.cache import DiskCache
from voxlane.dataset.reading import ObjectReader
from voxlane.errors import LayoutError, ScanError
from voxlane.store import Store, StoreConfig
from voxlane.store.counters import RequestCounters
from voxlane.store.listing import Manifest
from voxlane.volume.dataset_layouts import LAYOUTS, detect_layout
from voxlane.volume.formats.nifti import NIFTI_SUFFIXES
from voxlane.volume.formats.npy import NPY_SUFFIX
from voxlane.volume.patch_stream import PatchStream
from voxlane.volume.plan import Triple
from voxlane.volume.scan import read_label, read_scan
from voxlane.volume.volume_reader import ReadTiming

_SUFFIXES = (*NIFTI_SUFFIXES, NPY_SUFFIX)
"""Suffixes of scans that are one object."""


@dataclass(frozen=True)
class RawCase:
    """A scan with its label, as rows of the listing."""

    id: str
    images: tuple[int, ...]
    """Rows of one object per channel, or of one object that holds every channel."""
    label: int


@dataclass(frozen=True)
class RawDataset:
    """The cases in a listing of raw scans."""

    manifest: Manifest
    cases: tuple[RawCase, ...]
    """Cases, sorted by id."""
    left_out: int = 0
    """Number of cases without a label, or with an image that is missing."""

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def sample_bytes(self) -> float:
        """Mean bytes of all objects of a case."""
        sizes = self.manifest.sizes
        return float(np.mean([sizes[[*case.images, case.label]].sum() for case in self.cases]))

    @property
    def object_bytes(self) -> list[float]:
        """Mean bytes of each object of a case, images first and the label last; empty if cases have different numbers
        of objects."""
        objects = [self.manifest.sizes[[*case.images, case.label]] for case in self.cases]
        alike = len({len(sizes) for sizes in objects}) == 1
        return [float(size) for size in np.mean(objects, axis=0)] if alike else []


def find_cases(manifest: Manifest, document: Any) -> RawDataset:
    """Return the cases of a listing in a layout that `voxlane prepare` accepts. `document` is the content of its
    dataset.json, if any. Cases without a label, or whose image is missing, are left out and counted."""
    folder = len(manifest.folder)
    rows = {key[folder:]: row for row, key in enumerate(manifest.keys())}
    names = [name for name in rows if not posixpath.basename(name).startswith(".")]
    draft = LAYOUTS[detect_layout(names, document, manifest.uri)](names, document, manifest.uri)
    cases = [
        RawCase(case.id, tuple(rows[image] for image in case.images), rows[case.label])
        for case in draft.cases
        if case.label in rows and all(image in rows for image in case.images)
    ]
    unsupported = [name for case in draft.cases for name in case.images if not name.lower().endswith(_SUFFIXES)]
    if unsupported:
        raise LayoutError(
            f"{unsupported[0]} cannot be read as one whole object",
            uri=manifest.uri,
            fix=f"Give {', '.join(_SUFFIXES)}",
        )
    if not cases:
        raise LayoutError("no case has both an image and a label", uri=manifest.uri, fix="Give scans with labels")
    left_out = len(draft.cases) - len(cases)
    return RawDataset(manifest, tuple(sorted(cases, key=lambda case: case.id)), left_out)


def decode_case(
    case: RawCase, keys: Sequence[str], bodies: Sequence[bytes]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """Return the image (C, Z, Y, X) and the label (Z, Y, X) of a case. `keys` and `bodies` are those of its images,
    then of its label."""
    image_bodies = list(zip(keys[:-1], bodies[:-1], strict=True))
    label_key, label_body = keys[-1], bodies[-1]
    parts = [read_scan(key, body=body).image for key, body in image_bodies]
    image = parts[0] if len(parts) == 1 else np.concatenate(parts)
    label, _ = read_label(label_key, body=label_body)
    if image.shape[1:] != label.shape:
        raise ScanError(f"{case.id}: the image has {image.shape[1:]} voxels and the label {label.shape}", uri=label_key)
    return image, label


class WholeObjects(PatchStream):
    """A stream of patches of raw scans; a sample is a dict as in `PatchStream`, without normalisation.

    samples: patches per epoch, over all ranks.
    in_flight: scans per process that are being fetched or decoded, or wait as patches. Memory is about that many scans.
    cache: keeps whole objects on disk.
    """

    def __init__(
        self,
        raw: RawDataset,
        config: StoreConfig,
        *,
        samples: int,
        patch: Triple,
        foreground_share: float,
        seed: int,
        in_flight: int,
        cache: DiskCache | None = None,
    ) -> None:
        # PatchStream's own constructor opens a prepared dataset.
        OrderedDataset.__init__(self, shuffle=False, seed=seed, rank=None, world_size=None, tail="keep")
        self.raw = raw
        self.rows = list(range(len(raw.cases)))
        self.samples = samples
        self.patch = patch
        self.foreground_share = foreground_share
        self.placement = "centre"
        self.in_flight = in_flight
        self.cases: Any = _RawCases(raw, config, cache)
        self._pool = None

    def fingerprint(self) -> str:
        """Return the fingerprint of the listing."""
        return self.raw.manifest.fingerprint

    def location(self) -> str:
        """Return the URI of the raw scans."""
        return self.raw.manifest.uri


class _RawCases:
    """Cases of raw scans, in place of the `Cases` of a prepared dataset."""

    def __init__(self, raw: RawDataset, config: StoreConfig, cache: DiskCache | None) -> None:
        self._arguments = raw, config, cache
        self._raw = raw
        self._cache = cache
        self._store = Store(raw.manifest.uri, config)
        self._lock = threading.Lock()
        self._waited_s = self._decoded_s = 0.0

    def __reduce__(self) -> tuple[type[_RawCases], tuple[Any, ...]]:
        return _RawCases, self._arguments

    def enter_process(self) -> None:
        """Open the bucket and the cache from this thread."""
        self._waited_s = self._decoded_s = 0.0
        self._store.open_native()
        self._reader = ObjectReader(self._store, self._cache)

    def count_into(self, counters: RequestCounters) -> None:
        """Count requests in `counters` from now on."""
        self._store.counters = counters

    def timing(self) -> ReadTiming:
        """Return the seconds that threads of this process waited and decoded."""
        return ReadTiming(wait_s=self._waited_s, decode_s=self._decoded_s)

    def add_times(self, waited_s: float, decoded_s: float) -> None:
        with self._lock:
            self._waited_s += waited_s
            self._decoded_s += decoded_s

    def open(self, row: int) -> _RawVolume:
        """Download and decode a case."""
        started = time.perf_counter()
        case = self._raw.cases[row]
        entries = [self._raw.manifest[number] for number in (*case.images, case.label)]
        bodies = [pending.result() for pending in self._reader.submit(entries)]
        fetched = time.perf_counter()
        volume = _RawVolume(self, *decode_case(case, [self._store.uri(entry.key) for entry in entries], bodies))
        self.add_times(fetched - started, time.perf_counter() - fetched)
        return volume


@dataclass(frozen=True)
class _RawVolume:
    """A decoded scan and its label. The time to cut patches from them counts as decoding."""

    cases: _RawCases
    image: npt.NDArray[Any]
    label: npt.NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels (z, y, x)."""
        return self.label.shape

    def foreground(self) -> npt.NDArray[np.int64]:
        """Return rows (label value, z, y, x) of every voxel that is not background."""
        started = time.perf_counter()
        positions = np.argwhere(self.label)
        rows = np.column_stack([self.label[tuple(positions.T)].astype(np.int64), positions])
        self.cases.add_times(0.0, time.perf_counter() - started)
        return rows

    def read_padded(self, start: Triple, patch: Triple) -> tuple[torch.Tensor, torch.Tensor]:
        """Return image (C, Z, Y, X) float32 and label (Z, Y, X) uint8 of a region, zero beyond the volume."""
        started = time.perf_counter()
        image = torch.from_numpy(crop(self.image, start, patch).astype(np.float32, copy=False))
        label = torch.from_numpy(crop(self.label[None], start, patch)[0])
        self.cases.add_times(0.0, time.perf_counter() - started)
        return image, label


def crop(array: npt.NDArray[Any], start: Triple, patch: Triple) -> npt.NDArray[Any]:
    """Return a copy of the voxels `[start, start + patch)` of (C, Z, Y, X), zero beyond the volume."""
    inside = [slice(max(0, a), max(0, min(n, a + p))) for a, p, n in zip(start, patch, array.shape[1:], strict=True)]
    voxels = array[(slice(None), *inside)]
    if voxels.shape[1:] == patch:
        return voxels.copy()
    padded = np.zeros((array.shape[0], *patch), array.dtype)
    target = [slice(s.start - a, s.stop - a) for s, a in zip(inside, start, strict=True)]
    padded[(slice(None), *target)] = voxels
    return padded
