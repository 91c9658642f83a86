"""`PatchStream`: training patches straight from the bucket, by ranged reads of the chunks they touch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.utils.data

from voxlane.dataset.ahead import in_order
from voxlane.dataset.base import OrderedDataset
from voxlane.errors import ConfigError
from voxlane.volume.array import MAX_GAP_BYTES
from voxlane.volume.cases import Caching, Cases
from voxlane.volume.draw import Placement, Triple, augment_seed, case_at, draw_patch, is_forced
from voxlane.volume.prepared import Prepared

NNUNET_FOREGROUND_SHARE = 0.33


class PatchStream(OrderedDataset, torch.utils.data.IterableDataset[dict[str, Any]]):
    """Patches of a prepared dataset as a stream, many on their way at once, in an order that (seed, epoch) fix.

    rows: the cases to draw from (`Prepared.split`); all when left out.
    samples: patches in an epoch, over all ranks.
    patch: voxels (z, y, x); the plan's when left out. Where it reaches beyond a volume, the image is zero (the mean,
        after normalisation) and the label background.
    foreground_share: the share of patches drawn around foreground.
    in_flight: patches that are being fetched or decoded, or wait to be taken, per process. Memory is about this many
        patches, twice. A pass begins with those of one batch, so that the first batch does not wait for others.
    max_gap_bytes: chunks that lie at most so far apart in an object come in one request: more means fewer requests and
        more bytes.

    A sample is a dict of plain tensors: image (C, Z, Y, X) float32, label (Z, Y, X) uint8, and int64 scalars `seed`
    (for its augmentation), `row` (its case) and `position` (its place in the epoch). Ranks, and the workers of a
    DataLoader, share an epoch out by themselves. Fetching and decoding run in threads, also in this process: a few
    patches a second need no workers. From about 50 of 128 cubed on, threads of one process wait for each other, and
    DataLoader workers, which see the same patches, are faster.
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
        caching: Caching | None = None,
        max_gap_bytes: int = MAX_GAP_BYTES,
    ) -> None:
        super().__init__(shuffle=False, seed=seed, rank=rank, world_size=world_size, tail="keep")
        self.rows = list(range(len(prepared))) if rows is None else list(rows)
        if not self.rows:
            raise ConfigError("a stream of patches over no cases", uri=prepared.uri)
        if not 0 <= min(self.rows) <= max(self.rows) < len(prepared):
            raise ConfigError(f"rows: from 0 to {len(prepared) - 1} there are cases", uri=prepared.uri)
        if patch is not None and (len(patch) != 3 or min(patch) < 1):
            raise ConfigError(f"patch={patch}", fix="Give 1 or more voxels along each of (z, y, x)")
        if samples < 1:
            raise ConfigError(f"samples={samples}", fix="Give 1 or more")
        if in_flight < 1:
            raise ConfigError(f"in_flight={in_flight}", fix="Give 1 or more")
        if placement not in ("centre", "inside"):
            raise ConfigError(f"placement={placement!r}", fix='Give "centre" or "inside"')
        if not 0 <= foreground_share <= 1:
            raise ConfigError(f"foreground_share={foreground_share}", fix="Give a share from 0 to 1")
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
        """Patches of one epoch, over all ranks."""
        return self.samples

    def fingerprint(self) -> str:
        """Names what is drawn from, and how."""
        rows = hashlib.sha256(repr(self.rows).encode()).hexdigest()[:8]
        how = "x".join(map(str, self.patch)), self.foreground_share, self.placement, f"{len(self.rows)} cases {rows}"
        return "/".join(map(str, (self.prepared.digest, *how)))

    def where(self) -> str:
        """The prepared dataset."""
        return self.prepared.uri

    def __len__(self) -> int:
        """Patches this rank still gives in this epoch."""
        return self.rank_length()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.start_pass()
        return self._stream(self.process_indices().tolist())

    def _stream(self, positions: list[int]) -> Iterator[dict[str, Any]]:
        if self._pool is None or self._pool[0] != os.getpid():
            self.cases.enter_process()
            self._pool = os.getpid(), ThreadPoolExecutor(self.in_flight, thread_name_prefix="voxlane-patch")
            self.cases.count_into(self._tally.counters())
        work = partial(self.sample, epoch=self.epoch)
        for sample in in_order(self._pool[1], work, positions, self.in_flight, batch=self.block):
            timing = self.cases.timing()
            self._tally.set_times(timing.wait_s, timing.decode_s)
            yield sample
        self.end_pass()

    @property
    def times_s(self) -> tuple[float, float]:
        """Seconds that threads waited for the bucket, and decoded, in all processes."""
        return self._tally.times_s

    def sample(self, position: int, epoch: int) -> dict[str, Any]:
        """The patch at a position of an epoch, read now."""
        row = self.rows[case_at(position, cases=len(self.rows), samples=self.samples, seed=self.seed, epoch=epoch)]
        volume = self.cases.open(row)
        forced = is_forced(position, self.foreground_share)
        drawn = draw_patch(
            position,
            seed=self.seed,
            epoch=epoch,
            patch=self.patch,
            shape=volume.shape,
            foreground=volume.foreground() if forced else _NOTHING,
            forced=forced,
            placement=self.placement,
        )
        image, label = volume.read_padded(drawn.start, self.patch)
        return {
            "image": image,
            "label": label,
            "seed": augment_seed(position, seed=self.seed, epoch=epoch),
            "row": row,
            "position": position,
        }


_NOTHING = torch.empty((0, 4), dtype=torch.int32).numpy()
