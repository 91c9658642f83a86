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
"""Batches up to this size are prefetched, one at a time. That hides the latency, which dominates small batches; large
ones would only compete for the processor (docs/log.md)."""


class MapDataset(BucketDataset, torch.utils.data.Dataset[Any]):
    """The objects under a URI (or of a manifest) as a map-style dataset: `len(ds)`, `ds[i]`, `DataLoader(ds)`.

    source: `gs://`, `s3://`, `az://` or `file://` URI or path, a plain string prefix; or a `Manifest`.
    decode: function from an object's bytes to the sample; default: the bytes.
    match: shell pattern(s) for keys, such as "*.nii.gz".
    config: endpoint, credentials, timeouts, retries, concurrency (`StoreConfig`).
    cache, cache_bytes: a local folder that caches objects, and its maximum size in bytes.
    compose: join small objects on the server (GCS only): "on", "off", or "auto", which follows our measurements.
    shuffle, seed: the order in which `voxlane.DataLoader` or `sampler()` take samples, different in each epoch.
    rank, world_size: default: those of torch.distributed, if initialised.
    tail: what happens to samples that cannot be divided evenly among ranks: "keep", "drop" or "repeat".
    on_error: "raise", or "skip": leave samples that failed out of batches, count them in `skipped` and log them.

    Nothing is read before the first use. Then the bucket is listed once, and the listing pins versions: an object
    that changes later raises `ChangedError`. The objects of a batch are fetched concurrently.
    """

    def __init__(self, source: Any, **arguments: Any) -> None:
        super().__init__(source, **arguments)
        self.block = 0
        """Number of samples in a batch if batches follow the dataset's own order; `voxlane.DataLoader` sets it."""
        self._ahead: tuple[int, list[int], list[PendingSample]] | None = None
        """The prefetched batch: the process that fetches it (a forked child must not use its parent's), the indices of
        its samples, and the samples."""
        self._places: tuple[tuple[int, int], Positions, dict[int, int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ahead": None, "_places": None}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        samples = len(self.samples)
        if not -samples <= index < samples:
            raise IndexError(f"index {index} is out of range for a dataset of {samples} samples")
        return self.samples.submit([index % samples])[0].result()

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples in key order, prefetched; for a loop without a DataLoader."""
        for sample in read_ahead(self.samples, range(len(self.samples)), READ_AHEAD_BYTES):
            value = self.take(sample)
            if not isinstance(value, Skipped):
                yield value

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch, fetched concurrently; torch's DataLoader calls this. With `voxlane.DataLoader` the order is
        known, so the process's next batch is prefetched meanwhile."""
        indices = list(indices)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (os.getpid(), indices):
            pending = ahead[2]
        else:
            pending = self.samples.submit(indices)
        if following := self._predict_next(indices):
            self._ahead = os.getpid(), following, self.samples.submit(following)
        try:
            batch = [self.take(sample) for sample in pending]
        except BaseException:
            for sample in pending:
                sample.cancel()
            raise
        if self.yield_skipped:
            return batch
        remaining = [value for value in batch if not isinstance(value, Skipped)]
        if batch and not remaining:
            raise DatasetError(
                f"every sample of a batch failed, the last one with: {batch[-1].reason}",
                fix="Use voxlane.DataLoader, which leaves such batches out; torch's cannot",
            )
        return remaining

    def _predict_next(self, indices: list[int]) -> list[int]:
        """Return the batch that this process will load after `indices`; empty if it is unknown or too large to
        prefetch."""
        if not self.block or not indices:
            return []
        key = (self._counters.epoch, self._counters.consumed)
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
        """Return the position in the epoch; `voxlane.DataLoader.state_dict` also counts the batches it returned."""
        return self.state_after(0)

    def sampler(self) -> Sampler:
        """Return a sampler of this rank's samples for torch's DataLoader: `DataLoader(ds, sampler=ds.sampler())`."""
        return Sampler(self)


class Sampler(torch.utils.data.Sampler[int]):
    """This rank's samples of a MapDataset in the epoch's order; `set_epoch` works as in DistributedSampler."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[int]:
        self._dataset.start_pass()
        yield from self._dataset.rank_indices().tolist()
        self._dataset.end_pass()

    def __len__(self) -> int:
        return self._dataset.rank_length()

    def set_epoch(self, epoch: int) -> None:
        """Use the shuffle of `epoch`."""
        self._dataset.set_epoch(epoch)
