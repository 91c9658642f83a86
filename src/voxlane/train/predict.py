"""`predict`: masks of new scans, in each scan's own grid."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from voxlane import uri as uris
from voxlane.errors import ConfigError, ScanError
from voxlane.store import StoreConfig
from voxlane.train.predictor import Predictor
from voxlane.volume.check import not_finite, stack
from voxlane.volume.description import Description
from voxlane.volume.geometry import furthest_mm, same_grid
from voxlane.volume.scan import Scan, open_store, read_scan, stem, write_mask

_APART_VOXELS = 0.5
"""Channels whose voxels lie further apart than this are not of one scan; preparation draws the same line."""


@dataclass(frozen=True)
class Job:
    """One scan and the mask it will get."""

    scan: str
    """As it was given."""
    files: tuple[str, ...]
    """One a channel, or one with all of them."""
    mask: str
    """URI of the mask."""


@dataclass(frozen=True)
class Predicted:
    """One mask."""

    scan: str
    mask: str
    """URI of the mask."""
    volumes_ml: dict[str, float]
    """Millilitres by target."""
    seconds: float


def plan(scans: Sequence[str], out: str) -> list[Job]:
    """What will be read and written: each scan's mask goes below `out`, as NAME.nii.gz. Reads no scan.

    A scan is a NIfTI file, a folder of one DICOM series, or, where the model takes several channels, one file a channel
    joined by commas. ConfigError where a mask would be written over another one or over a scan.
    """
    folder = str(uris.parse(out)).rstrip("/")
    jobs: dict[str, Job] = {}
    for scan in scans:
        parts = [part.strip() for part in scan.split(",")]
        if not all(parts) or not uris.parse(parts[0]).key.strip("/"):
            raise ConfigError(f"{scan!r} names no scan", fix="Give a file or folder, or one file a channel: a,b,c")
        files = tuple(str(uris.parse(part)) for part in parts)
        name = stem(files[0])
        job = Job(scan, files, f"{folder}/{name}.nii.gz")
        if job.mask in jobs:
            raise ConfigError(
                f"{jobs[job.mask].scan} and {scan} would both write {name}.nii.gz", fix="Predict them into two folders"
            )
        jobs[job.mask] = job
    masks = {_real(job.mask) for job in jobs.values()}
    for job in jobs.values():
        for file in job.files:
            if _real(file) in masks:
                raise ConfigError("a mask would be written over this scan", uri=file, fix="Choose another folder (-o)")
    return list(jobs.values())


def _real(uri: str) -> str:
    """Where a local URI leads through links, so that one file is not taken for two."""
    place = uris.parse(uri)
    return os.path.realpath(f"/{place.key}") if place.scheme == "file" else uri


def predict(
    predictor: Predictor, job: Job, config: StoreConfig | None = None, *, progress: bool | None = None
) -> Predicted:
    """Read a scan, segment it and write its mask.

    The mask has the scan's grid, affine and integer type; uint8 where the scan has floats, or integers that cannot
    hold the labels. `progress` forces the bar on or off; by default it shows on a terminal.
    """
    began = time.perf_counter()
    target = uris.parse(job.mask)
    open_store(target.root, config).check_writable(target.key)
    scan = read_channels(job.files, config)
    with tqdm(desc=stem(job.mask), unit="window", disable=None if progress is None else not progress) as bar:

        def step(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        mask = predictor.predict(scan.image, scan.geometry.spacing, uri=job.scan, progress=step)
    description = predictor.description
    write_mask(job.mask, mask, scan.geometry, dtype=mask_dtype(scan.dtype, description), config=config)
    voxel_ml = float(np.prod(scan.geometry.spacing)) / 1000
    counts = value_counts(mask)
    members = zip(description.targets, description.target_values, strict=True)
    volumes = {target: float(counts[list(values)].sum()) * voxel_ml for target, values in members}
    return Predicted(job.scan, job.mask, volumes, time.perf_counter() - began)


def read_channels(files: Sequence[str], config: StoreConfig | None = None) -> Scan:
    """The files of one scan as one; they must lie on one grid, and their voxels must be numbers."""
    scans = [read_scan(file, config) for file in files]
    first = scans[0]
    for file, scan in zip(files, scans, strict=True):
        if len(files) > 1 and len(scan.image) > 1:
            raise ScanError(
                f"a 4D file of {len(scan.image)} volumes where each file is one channel",
                uri=file,
                fix="Give it alone, or its volumes as 3D files",
            )
        differs = same_grid(first.geometry, scan.geometry)
        alike = first.geometry.canonical_shape == scan.geometry.canonical_shape
        if differs and not (
            alike and furthest_mm(first.geometry, scan.geometry) <= _APART_VOXELS * min(first.geometry.spacing)
        ):
            raise ScanError(
                f"not on the grid of {files[0]}: {differs}", uri=file, fix="Resample the channels onto one grid"
            )
        if strange := sum(not_finite(channel) for channel in scan.image):
            raise ScanError(
                f"{strange:,} of {scan.image.size:,} voxels are NaN or infinite", uri=file, fix="Set them to a number"
            )
    return stack(scans)


def mask_dtype(scan_dtype: np.dtype[Any], description: Description) -> np.dtype[Any]:
    """The scan's type where it is an integer that holds every label, else uint8."""
    if scan_dtype.kind in "iu" and np.iinfo(scan_dtype).max >= max(description.labels.values()):
        return scan_dtype
    return np.dtype(np.uint8)


def value_counts(mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Voxels of each of the values 0 to 255; slice by slice, because bincount takes eight bytes a voxel."""
    counts: npt.NDArray[np.int64] = np.sum([np.bincount(plane.reshape(-1), minlength=256) for plane in mask], axis=0)
    return counts
