"""`PatchStream`: training patches directly from the bucket, by ranged reads of the chunks they touch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.utils.data

from voxlane.dataset.base import OrderedDataset
from voxlane.dataset.prefetch import ordered_prefetch
from voxlane.errors import ConfigError
from voxlane.volume.case_volumes import CacheLimits, Cases
from voxlane.volume.patch_sampling import Placement, augment_seed, case_for_position, draw_patch, is_forced
from voxlane.volume.plan import Triple
from voxlane.volume.prepared_dataset import Prepared
from voxlane.volume.zarr_array import MAX_GAP_BYTES

NNUNET_FOREGROUND_SHARE = 0.33


class PatchStream(OrderedDataset, torch.utils.data.IterableDataset[dict[str, Any]]):
    """Patches of a prepared dataset as a stream, fetched concurrently, in an order determined by (seed, epoch).

    rows: the cases to draw from (`Prepared.split`), by default all.
    samples: patches in an epoch, over all ranks.
    patch: voxels (z, y, x), by default the plan's. Outside the volume the image is zero (the mean, after
        normalisation) and the label background.
    foreground_share: fraction of patches drawn around foreground.
    in_flight: patches per process that are being fetched or decoded or wait to be consumed. Memory is about twice this
        many patches. A pass begins with those of one batch, so that the first batch does not wait for others.
    max_gap_bytes: chunks at most this far apart in an object are read in one request; a larger value means fewer
        requests and more bytes.

    A sample is a dict: image (C, Z, Y, X) float32, label (Z, Y, X) uint8, and integers `seed` (of its augmentation),
    `row` (its case) and `position` (in the epoch). Ranks and DataLoader workers divide an epoch among themselves.
    Threads fetch and decode, also in this process, so a few patches per second need no workers. Above about 50 patches
    of 128 cubed per second, threads of one process block each other, and DataLoader workers are faster.
    """

    resume_fix = "Resume over the prepared dataset and the split of the first run"

    def __init__(
        self,
        prepared: Prepared,
        rows: Sequence[int] | None = None,
        *,
        samples: int,
        patch: Triple | None = None,
        foreground_share: float = NNUNET_FOREGROUND_SHARE,
        placement: Placement = "centre",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        in_flight: int = 16,
        caching: CacheLimits | None = None,
        max_gap_bytes: int = MAX_GAP_BYTES,
    ) -> None:
        super().__init__(shuffle=False, seed=seed, rank=rank, world_size=world_size, tail="keep")
        self.rows = list(range(len(prepared))) if rows is None else list(rows)
        if not self.rows:
            raise ConfigError("rows: a stream of patches needs at least one case", uri=prepared.uri)
        if not 0 <= min(self.rows) <= max(self.rows) < len(prepared):
            raise ConfigError(f"rows: expected rows from 0 to {len(prepared) - 1}", uri=prepared.uri)
        if patch is not None and (len(patch) != 3 or min(patch) < 1):
            raise ConfigError(f"patch={patch}", fix="Use 1 or more voxels along each of (z, y, x)")
        for name, value in (("samples", samples), ("in_flight", in_flight)):
            if value < 1:
                raise ConfigError(f"{name}={value}", fix="Use 1 or more")
        if placement not in ("centre", "inside"):
            raise ConfigError(f"placement={placement!r}", fix='Use "centre" or "inside"')
        if not 0 <= foreground_share <= 1:
            raise ConfigError(f"foreground_share={foreground_share}", fix="Use a fraction from 0 to 1")
        self.prepared = prepared
        self.samples = samples
        self.patch: Triple = prepared.plan.patch if patch is None else patch
        self.foreground_share = foreground_share
        self.placement: Placement = placement
        self.in_flight = in_flight
        self.cases = Cases(prepared, caching, max_gap_bytes=max_gap_bytes)
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pool": None}

    def num_samples(self) -> int:
        """Return the patches in an epoch, over all ranks."""
        return self.samples

    def fingerprint(self) -> str:
        """Identify the cases and settings that the patches depend on."""
        rows = f"{len(self.rows)} cases {hashlib.sha256(repr(self.rows).encode()).hexdigest()[:8]}"
        patch = "x".join(map(str, self.patch))
        return f"{self.prepared.digest}/{patch}/{self.foreground_share}/{self.placement}/{rows}"

    def location(self) -> str:
        """Return the URI of the prepared dataset."""
        return self.prepared.uri

    def __len__(self) -> int:
        """Return the number of patches that this rank has left in this epoch."""
        return self.rank_length()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.start_pass()
        return self._stream(self.process_indices().tolist())

    def _stream(self, positions: list[int]) -> Iterator[dict[str, Any]]:
        if self._pool is None or self._pool[0] != os.getpid():
            self.cases.enter_process()
            self._pool = os.getpid(), ThreadPoolExecutor(self.in_flight, thread_name_prefix="voxlane-patch")
            self.cases.count_into(self._counters.for_this_process())
        work = partial(self.sample, epoch=self.epoch)
        for sample in ordered_prefetch(self._pool[1], work, positions, self.in_flight, batch=self.block):
            timing = self.cases.timing()
            self._counters.set_times(timing.wait_s, timing.decode_s)
            yield sample
        self.end_pass()

    @property
    def times_s(self) -> tuple[float, float]:
        """Seconds that threads spent waiting for the bucket and decoding, over all processes."""
        return self._counters.times_s

    def sample(self, position: int, epoch: int) -> dict[str, Any]:
        """Read the patch at a position of an epoch."""
        key = {"seed": self.seed, "epoch": epoch}
        row = self.rows[case_for_position(position, cases=len(self.rows), samples=self.samples, **key)]
        volume = self.cases.open(row)
        foreground = volume.foreground() if is_forced(position, self.foreground_share) else None
        start = draw_patch(
            position, **key, patch=self.patch, shape=volume.shape, foreground=foreground, placement=self.placement
        )
        image, label = volume.read_padded(start, self.patch)
        seed = augment_seed(position, **key)
        return {"image": image, "label": label, "seed": seed, "row": row, "position": position}
