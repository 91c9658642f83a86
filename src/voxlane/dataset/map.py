"""`MapDataset`: a bucket with random access."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch.utils.data

from voxlane.dataset.base import BucketDataset, Skipped
from voxlane.dataset.order import Positions
from voxlane.dataset.samples import READ_AHEAD_BYTES, PendingSample, read_ahead
from voxlane.errors import DatasetError

_MAX_AHEAD_BYTES = 8 << 20
"""Batches up to this size are fetched one ahead. It hides the wait for the first byte, which is what small batches
mostly consist of; large ones only compete with themselves for the processor (docs/log.md)."""


class MapDataset(BucketDataset, torch.utils.data.Dataset[Any]):
    """The objects under a URI (or of a manifest) as a map-style dataset: `len(ds)`, `ds[i]`, `DataLoader(ds)`.

    source: `gs://`, `s3://`, `az://`, `file://` URI or path, a plain string prefix; or a `Manifest`.
    decode: from an object's bytes to the sample; default: the bytes.
    match: shell pattern(s) for keys, such as "*.nii.gz".
    config: endpoint, credentials, timeouts, retries, concurrency (`StoreConfig`).
    cache, cache_bytes: a local folder that keeps objects, and its bound.
    compose: GCS only: join small objects on the server ("on", "off", or "auto", which follows our measurements).
    shuffle, seed: the order in which `voxlane.DataLoader` or `sampler()` take samples, new each epoch.
    rank, world_size: default: torch.distributed's, if initialised.
    tail: what happens to samples that ranks do not divide evenly: "keep", "drop" or "repeat".
    on_error: "raise", or "skip": batches leave out samples that failed, counted in `skipped` and logged.

    Nothing is read before the first use; then the bucket is listed once, and the listing pins versions: an object
    that changes later raises `ChangedError`. A batch is fetched concurrently.
    """

    def __init__(self, source: Any, **arguments: Any) -> None:
        super().__init__(source, **arguments)
        self.block = 0
        """Samples in a batch when batches follow the dataset's own order; set by `voxlane.DataLoader`."""
        self._ahead: tuple[int, list[int], list[PendingSample]] | None = None
        """What is fetched ahead: by which process (a forked child never gets its parent's), which samples, how far."""
        self._places: tuple[tuple[int, int], Positions, dict[int, int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ahead": None, "_places": None}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        samples = len(self.samples)
        if not -samples <= index < samples:
            raise IndexError(f"index {index} in a dataset of {samples} samples")
        return self.samples.submit([index % samples])[0].result()

    def __iter__(self) -> Iterator[Any]:
        """All samples in key order, read ahead; for a loop without a DataLoader."""
        for sample in read_ahead(self.samples, range(len(self.samples)), READ_AHEAD_BYTES):
            value = self.take(sample)
            if not isinstance(value, Skipped):
                yield value

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A whole batch, fetched concurrently; what DataLoader calls.

        Under `voxlane.DataLoader` the order is known, so the process's next batch is fetched ahead meanwhile.
        """
        indices = list(indices)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (os.getpid(), indices):
            pending = ahead[2]
        else:
            pending = self.samples.submit(indices)
        if following := self._following(indices):
            self._ahead = os.getpid(), following, self.samples.submit(following)
        try:
            batch = [self.take(sample) for sample in pending]
        except BaseException:
            for sample in pending:
                sample.cancel()
            raise
        if self.keep_place:
            return batch
        kept = [value for value in batch if not isinstance(value, Skipped)]
        if batch and not kept:
            raise DatasetError(
                f"every sample of a batch failed, the last one so: {batch[-1].why}",
                fix="voxlane.DataLoader leaves such batches out; torch's cannot",
            )
        return kept

    def _following(self, indices: list[int]) -> list[int]:
        """The batch this process will be asked for after `indices`; empty when that is not known, or is too large to
        fetch ahead."""
        if not self.block or not indices:
            return []
        key = (self._tally.epoch, self._tally.consumed)
        if self._places is None or self._places[0] != key:
            order = self.rank_indices()
            self._places = key, order, {index: place for place, index in enumerate(order.tolist())}
        _, order, places = self._places
        place = places.get(indices[0])
        if place is None or order[place : place + len(indices)].tolist() != indices:
            return []
        worker = torch.utils.data.get_worker_info()
        place += self.block * (1 if worker is None else worker.num_workers)
        following: list[int] = order[place : place + self.block].tolist()
        if sum(self.samples.size(i) for i in following) > _MAX_AHEAD_BYTES:
            return []
        return following

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands. Taken from `voxlane.DataLoader` instead, it also knows what the loader gave out."""
        return self.state_after(0)

    def sampler(self) -> Sampler:
        """A sampler of this rank's samples, for a plain torch DataLoader: `DataLoader(ds, sampler=ds.sampler())`."""
        return Sampler(self)


class Sampler(torch.utils.data.Sampler[int]):
    """This rank's samples of a MapDataset in the epoch's order; `set_epoch` as on DistributedSampler."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[int]:
        self._dataset.start_pass()
        yield from self._dataset.rank_indices().tolist()
        self._dataset.end_pass()

    def __len__(self) -> int:
        return self._dataset.rank_length()

    def set_epoch(self, epoch: int) -> None:
        """Another shuffle."""
        self._dataset.set_epoch(epoch)
