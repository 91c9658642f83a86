"""What both dataset styles share: sources, order, epoch, state, counts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch.distributed
from torch.utils.data import get_worker_info

from voxlane.dataset.order import (
    Positions,
    State,
    Tail,
    check_rank,
    epoch_order,
    rank_share,
    rank_share_size,
    worker_share,
)
from voxlane.dataset.samples import Compose, Decode, PendingSample, Samples, Source
from voxlane.dataset.tally import Tally
from voxlane.errors import (
    ChangedError,
    ConfigError,
    DecodeError,
    NotFoundError,
    RangeError,
    StateError,
    UnavailableError,
    VoxlaneError,
)
from voxlane.listing import Manifest
from voxlane.store import StoreConfig, Traffic

OnError = Literal["raise", "skip"]
_SKIPPABLE = (NotFoundError, ChangedError, DecodeError, RangeError, UnavailableError)
"""Failures of one object. Those of the whole bucket (credentials, permissions) always raise."""
_log = logging.getLogger("voxlane")


class Skipped:
    """Stands for a sample that failed, where a batch must keep count; `DataLoader` drops it before collating."""

    def __init__(self, error: VoxlaneError) -> None:
        self.why = str(error)


class OrderedDataset:
    """Samples in an order that (seed, epoch) fix, shared out over ranks, with a state that resumes exactly on any
    number of them. What `voxlane.DataLoader` takes: subclasses say what a sample is."""

    resume_fix = ""
    """What to do about a state of another dataset."""

    def __init__(self, *, shuffle: bool, seed: int, rank: int | None, world_size: int | None, tail: Tail) -> None:
        if tail not in ("keep", "drop", "repeat"):
            raise ConfigError(f"tail={tail!r}", fix='Give "keep", "drop" or "repeat"')
        if (rank is None) != (world_size is None):
            raise ConfigError("rank and world_size go together", fix="Give both, or neither under torch.distributed")
        if rank is not None and world_size is not None:
            check_rank(rank, world_size)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seed={seed!r}", fix="Give a whole number, zero or more")
        self.shuffle = shuffle
        self.seed = seed
        self.tail = tail
        self.keep_place = False
        """Yield `Skipped` for a failed sample instead of nothing; set by `voxlane.DataLoader`."""
        self.block = 1
        """Samples a worker takes at a turn; `voxlane.DataLoader` sets it to the batch size."""
        self._rank, self._world_size = rank, world_size
        self._pass_ended = False
        self._resumed = False
        self._tally = Tally()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not know the process group its parent is in.
        rank, world_size = self.rank_and_world_size()
        return {**self.__dict__, "_rank": rank, "_world_size": world_size}

    def num_samples(self) -> int:
        """Samples of one epoch, over all ranks."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Names the samples and their order before shuffling."""
        raise NotImplementedError

    def where(self) -> str:
        """The URI that errors name."""
        raise NotImplementedError

    def rank_and_world_size(self) -> tuple[int, int]:
        """As given, else as torch.distributed says, else one rank."""
        if self._rank is not None and self._world_size is not None:
            return self._rank, self._world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    @property
    def epoch(self) -> int:
        """The epoch that iteration is in or starts with."""
        return self._tally.epoch

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`: another shuffle. `voxlane.DataLoader` does it.

        The epoch of a state that was just loaded goes on where it stood: training loops, Lightning's among them, set
        the epoch before they resume it.
        """
        if self._resumed and epoch == self.epoch:
            return
        self._tally.start(epoch, 0)
        self._pass_ended = self._resumed = False

    def start_pass(self) -> None:
        """Call before iterating: after a resumed pass that came to its end, the next one is whole again."""
        if self._pass_ended:
            self.set_epoch(self.epoch)
        self._pass_ended = False

    def end_pass(self) -> None:
        """Call when an iteration has given its last sample."""
        self._pass_ended = True
        self._resumed = False

    def rank_indices(self) -> Positions:
        """The samples this rank still has to take in this epoch, in order."""
        rank, world_size = self.rank_and_world_size()
        samples = self.num_samples()
        order = epoch_order(samples, seed=self.seed, epoch=self._tally.epoch, shuffle=self.shuffle)
        return order[rank_share(samples, self._tally.consumed, rank, world_size, self.tail)]

    def process_indices(self) -> Positions:
        """Of `rank_indices`, those of this DataLoader worker, in order; all where there are no workers."""
        worker = get_worker_info()
        indices = self.rank_indices()
        return indices if worker is None else worker_share(indices, worker.id, worker.num_workers, self.block)

    def rank_length(self) -> int:
        """How many samples `rank_indices` gives."""
        rank, world_size = self.rank_and_world_size()
        return rank_share_size(self.num_samples(), self._tally.consumed, rank, world_size, self.tail)

    def state_after(self, taken: int) -> dict[str, Any]:
        """The state once every rank has taken `taken` samples of this iteration."""
        _, world_size = self.rank_and_world_size()
        samples = self.num_samples()
        return State(
            seed=self.seed,
            epoch=self._tally.epoch,
            consumed=min(samples, self._tally.consumed + taken * world_size),
            shuffle=self.shuffle,
            samples=samples,
            fingerprint=self.fingerprint(),
        ).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: the next iteration gives exactly the remaining samples of its epoch."""
        loaded = State.from_dict(state)
        if (loaded.samples, loaded.fingerprint) != (self.num_samples(), self.fingerprint()):
            raise StateError(
                f"the state was taken over {loaded.samples} samples ({loaded.fingerprint}), this dataset has "
                f"{self.num_samples()} ({self.fingerprint()})",
                uri=self.where(),
                fix=self.resume_fix,
            )
        self.seed, self.shuffle = loaded.seed, loaded.shuffle
        self._tally.start(loaded.epoch, loaded.consumed)
        self._pass_ended = False
        self._resumed = True

    def traffic(self) -> Traffic:
        """Requests, bytes and retries so far, DataLoader workers included."""
        return self._tally.traffic()


class BucketDataset(OrderedDataset):
    """The common part of `MapDataset` and `IterableDataset`; see there."""

    resume_fix = "Resume over the manifest of the first run (Manifest.save / Manifest.load)"

    def __init__(
        self,
        source: str | os.PathLike[str] | Manifest | Samples,
        *,
        decode: Decode | None = None,
        match: str | Sequence[str] | None = None,
        config: StoreConfig | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int = 100 << 30,
        compose: Compose = "auto",
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail = "keep",
        on_error: OnError = "raise",
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error={on_error!r}", fix='Give "raise" or "skip"')
        super().__init__(shuffle=shuffle, seed=seed, rank=rank, world_size=world_size, tail=tail)
        if isinstance(source, Samples):
            self.samples = source
        else:
            self.samples = Samples(
                Source(
                    source,
                    decode=decode,
                    match=match,
                    config=config,
                    cache=cache,
                    cache_bytes=cache_bytes,
                    compose=compose,
                )
            )
        self.on_error = on_error
        for part in self.samples.sources.values():
            part.attach(self._tally)
            part.remove_listing_when_dropped(self)

    def num_samples(self) -> int:
        """Samples of one epoch, over all ranks."""
        return len(self.samples)

    def fingerprint(self) -> str:
        """Names the samples and their order before shuffling."""
        return self.samples.fingerprint

    def where(self) -> str:
        """The URI that errors name."""
        return next(iter(self.samples.sources.values())).uri

    @classmethod
    def zip(cls, *, key: Callable[[str], str] | None = None, **datasets: Any) -> Self:
        """Datasets zipped into one whose samples are dicts: `zip(image=MapDataset(...), label=MapDataset(...))`.

        Objects belong together when `key` gives them the same name; by default that is the path below the listed
        folder up to the first dot of the file name. Whatever has no partner is an error that names it. Order,
        shuffling and error handling are those of the first dataset.
        """
        if len(datasets) < 2:
            raise ConfigError("zip takes two or more datasets by name", fix="Write zip(image=..., label=...)")
        sources: dict[str, Source] = {}
        for name, dataset in datasets.items():
            if not isinstance(dataset, cls) or len(dataset.samples.sources) != 1:
                raise ConfigError(
                    f"zip: {name!r} is not a plain {cls.__name__}", fix=f"Give {cls.__name__}s of one URI"
                )
            sources[name] = next(iter(dataset.samples.sources.values()))
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
        """The listed objects (of the first source, when zipped)."""
        return next(iter(self.samples.sources.values())).manifest

    def uris(self, index: int) -> dict[str, str]:
        """URIs of the objects of sample `index` by source name ("" when not zipped)."""
        return {n: self.samples.sources[n].store.uri(e.key) for n, e in self.samples.entries(index).items()}

    @property
    def skipped(self) -> int:
        """Samples left out because they failed, in all processes."""
        return self._tally.skipped

    def take(self, sample: PendingSample) -> Any:
        """The sample, or `Skipped` when it failed and is to be left out; that is counted and logged."""
        try:
            return sample.result()
        except VoxlaneError as error:
            if self.on_error != "skip" or not isinstance(error, _SKIPPABLE):
                raise
            self._tally.add_skipped()
            _log.warning("skipped: %s", error)
            return Skipped(error)
