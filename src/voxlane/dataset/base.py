"""Base classes of both dataset styles: sources, order, epoch, state and counters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal, Self

import torch.distributed
from torch.utils.data import get_worker_info

from voxlane.dataset.order import Positions, State, Tail, epoch_order, rank_share, rank_share_size, worker_share
from voxlane.dataset.samples import PendingSample, Samples, SampleSource
from voxlane.dataset.shared_counters import SharedCounters
from voxlane.errors import (
    ChangedError,
    ConfigError,
    DamagedError,
    DecodeError,
    InvalidKeyError,
    MissingExtraError,
    NotFoundError,
    RangeError,
    StateError,
    UnavailableError,
    VoxlaneError,
)
from voxlane.store import Traffic
from voxlane.store.listing import Manifest
from voxlane.uri import StrPath

OnError = Literal["raise", "skip"]
_SKIPPABLE = (
    NotFoundError,
    ChangedError,
    DamagedError,
    DecodeError,
    InvalidKeyError,
    RangeError,
    UnavailableError,
)
"""Errors of a single object, which can be skipped. Errors of the bucket (credentials, permissions) always raise."""
_log = logging.getLogger("voxlane")


class Skipped:
    """Placeholder for a sample that failed, so that batches keep their size; `DataLoader` drops it before collating."""

    def __init__(self, error: VoxlaneError) -> None:
        self.reason = str(error)


class OrderedDataset:
    """Samples in an order that seed and epoch determine, distributed over ranks, with a state that resumes exactly on
    any number of ranks. `voxlane.DataLoader` loads such datasets; subclasses define the samples."""

    resume_fix = ""
    """Advice in the error for a state of another dataset."""

    def __init__(self, *, shuffle: bool, seed: int, rank: int | None, world_size: int | None, tail: Tail) -> None:
        if tail not in ("keep", "drop", "repeat"):
            raise ConfigError(f'tail must be "keep", "drop" or "repeat", got {tail!r}')
        if (rank is None) != (world_size is None):
            raise ConfigError(
                "rank and world_size belong together", fix="Pass both, or neither under torch.distributed"
            )
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size} ranks", fix="Ranks count from 0 to world_size - 1")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seed must be an integer of at least 0, got {seed!r}")
        self.shuffle = shuffle
        self.seed = seed
        self.tail = tail
        self.yield_skipped = False
        """Whether to yield `Skipped` for a failed sample; `voxlane.DataLoader` sets it."""
        self.block = 1
        """Number of samples that a worker takes in turn; `voxlane.DataLoader` sets it to the batch size."""
        self._rank, self._world_size = rank, world_size
        self._pass_ended = False
        self._resumed = False
        self._counters = SharedCounters()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker is not in the process group of its parent.
        rank, world_size = self.rank_and_world_size()
        return {**self.__dict__, "_rank": rank, "_world_size": world_size}

    def num_samples(self) -> int:
        """Return the number of samples of one epoch over all ranks."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return a hash of the samples and their order before shuffling."""
        raise NotImplementedError

    def location(self) -> str:
        """Return the URI for error messages."""
        raise NotImplementedError

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and world size passed to the constructor, else those of torch.distributed, else (0, 1)."""
        if self._rank is not None and self._world_size is not None:
            return self._rank, self._world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    @property
    def epoch(self) -> int:
        """Epoch of the current or next iteration."""
        return self._counters.epoch

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`, with its shuffle. `voxlane.DataLoader` calls this.

        If a state of this epoch has just been loaded, the epoch continues: training loops such as Lightning's set the
        epoch before they resume it.
        """
        if self._resumed and epoch == self.epoch:
            return
        self._counters.start(epoch, 0)
        self._pass_ended = self._resumed = False

    def start_pass(self) -> None:
        """Prepare an iteration: after a resumed pass that has ended, the next one covers the whole epoch again."""
        if self._pass_ended:
            self.set_epoch(self.epoch)
        self._pass_ended = False

    def end_pass(self) -> None:
        """Record that an iteration has yielded its last sample."""
        self._pass_ended = True
        self._resumed = False

    def rank_indices(self) -> Positions:
        """Return the remaining samples of this rank in this epoch, in order."""
        rank, world_size = self.rank_and_world_size()
        samples = self.num_samples()
        order = epoch_order(samples, seed=self.seed, epoch=self._counters.epoch, shuffle=self.shuffle)
        return order[rank_share(samples, self._counters.consumed, rank, world_size, self.tail)]

    def process_indices(self) -> Positions:
        """Return this DataLoader worker's share of `rank_indices`, in order; all of them if there are no workers."""
        worker = get_worker_info()
        indices = self.rank_indices()
        return indices if worker is None else worker_share(indices, worker.id, worker.num_workers, self.block)

    def rank_length(self) -> int:
        """Return the number of samples in `rank_indices`."""
        rank, world_size = self.rank_and_world_size()
        return rank_share_size(self.num_samples(), self._counters.consumed, rank, world_size, self.tail)

    def state_after(self, taken: int) -> dict[str, Any]:
        """Return the state after every rank has taken `taken` samples of this iteration."""
        _, world_size = self.rank_and_world_size()
        samples = self.num_samples()
        state = State(
            seed=self.seed,
            epoch=self._counters.epoch,
            consumed=min(samples, self._counters.consumed + taken * world_size),
            shuffle=self.shuffle,
            samples=samples,
            fingerprint=self.fingerprint(),
        )
        return asdict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: the next iteration yields exactly the remaining samples of its epoch."""
        loaded = State.from_dict(state)
        if (loaded.samples, loaded.fingerprint) != (self.num_samples(), self.fingerprint()):
            raise StateError(
                f"the state belongs to a dataset of {loaded.samples} samples ({loaded.fingerprint}), this dataset has "
                f"{self.num_samples()} ({self.fingerprint()})",
                uri=self.location(),
                fix=self.resume_fix,
            )
        self.seed, self.shuffle = loaded.seed, loaded.shuffle
        self._counters.start(loaded.epoch, loaded.consumed)
        self._pass_ended = False
        self._resumed = True

    def traffic(self) -> Traffic:
        """Return the requests, bytes and retries so far, including those of DataLoader workers."""
        return self._counters.traffic()


class BucketDataset(OrderedDataset):
    """The common part of `MapDataset` and `IterableDataset`; see there."""

    resume_fix = "Resume over the manifest of the first run (Manifest.save / Manifest.load)"

    def __init__(
        self,
        source: StrPath | Manifest | Samples,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail = "keep",
        on_error: OnError = "raise",
        **reading: Any,
    ) -> None:
        """Store the order and the source; `reading` are the arguments of `SampleSource`."""
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error={on_error!r}", fix='Give "raise" or "skip"')
        super().__init__(shuffle=shuffle, seed=seed, rank=rank, world_size=world_size, tail=tail)
        self.samples = source if isinstance(source, Samples) else Samples(SampleSource(source, **reading))
        self.on_error = on_error
        for part in self.samples.sources.values():
            part.attach(self, self._counters)

    def num_samples(self) -> int:
        """Return the number of samples of one epoch over all ranks."""
        return len(self.samples)

    def fingerprint(self) -> str:
        """Return a hash of the samples and their order before shuffling."""
        return self.samples.fingerprint

    def location(self) -> str:
        """Return the URI of the first source."""
        return self.samples.first_source.uri

    @classmethod
    def zip(cls, *, key: Callable[[str], str] | None = None, **datasets: Any) -> Self:
        """Zip datasets into one whose samples are dicts: `zip(image=MapDataset(...), label=MapDataset(...))`.

        Objects belong together if `key` returns the same name for them; by default that is the path below the listed
        folder up to the first dot of the file name. An object without a partner is an error. Order, shuffling and error
        handling are those of the first dataset.
        """
        if len(datasets) < 2:
            raise ConfigError("zip needs two or more datasets by name", fix="Write zip(image=..., label=...)")
        for name, dataset in datasets.items():
            if not isinstance(dataset, cls) or len(dataset.samples.sources) != 1:
                raise ConfigError(
                    f"zip: {name!r} is not a plain {cls.__name__}", fix=f"Pass {cls.__name__}s of one URI each"
                )
        sources = {name: dataset.samples.first_source for name, dataset in datasets.items()}
        first: Any = next(iter(datasets.values()))
        return cls(Samples(sources, key), **first._order_arguments())

    def _order_arguments(self) -> dict[str, Any]:
        return {
            "shuffle": self.shuffle,
            "seed": self.seed,
            "rank": self._rank,
            "world_size": self._world_size,
            "tail": self.tail,
            "on_error": self.on_error,
        }

    @property
    def manifest(self) -> Manifest:
        """The listed objects (of the first source, if zipped)."""
        return self.samples.first_source.manifest

    def uris(self, index: int) -> dict[str, str]:
        """Return the URIs of the objects of sample `index` by source name ("" if not zipped)."""
        return {n: self.samples.sources[n].store.uri(e.key) for n, e in self.samples.entries(index).items()}

    @property
    def skipped(self) -> int:
        """Number of samples that were skipped because they failed, in all processes."""
        return self._counters.skipped

    def take(self, sample: PendingSample) -> Any:
        """Return the sample, or `Skipped` if it failed and failures are skipped; that is counted and logged."""
        try:
            return sample.result()
        except VoxlaneError as error:
            is_one_key = isinstance(error, _SKIPPABLE) or (isinstance(error, MissingExtraError) and error.uri)
            if self.on_error != "skip" or not is_one_key:
                raise
            self._counters.add_skipped()
            _log.warning("skipped: %s", error)
            return Skipped(error)
