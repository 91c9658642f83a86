"""`DataLoader`: torch's, with a state that resumes exactly, on any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data
from torch.utils.data import BatchSampler, default_collate

from voxlane.dataset.base import OrderedDataset, Skipped
from voxlane.dataset.map import MapDataset
from voxlane.errors import ConfigError, VoxlaneError


class _AllSkipped:
    """A batch of which nothing is left."""


class _Collate:
    """The user's collate over the samples that did not fail."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        kept = [s for s in samples if not isinstance(s, Skipped)]
        return self._collate(kept) if kept else _AllSkipped()


def _as_raised(error: VoxlaneError) -> VoxlaneError:
    """What a worker raised, without the worker's traceback, which torch puts into the message."""
    kind = type(error)
    head, mark, told = str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")
    return kind(told.rstrip()) if mark and "Original Traceback" in head else error


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader over a `MapDataset`, `IterableDataset` or `PatchStream`, in the dataset's order (its
    `shuffle` and `seed`), sharded over ranks, with `state_dict` and `load_state_dict`.

    The state counts the batches that were given out, not those fetched ahead, and names samples, not workers: after
    `load_state_dict` exactly the remaining samples of the epoch follow, also on another number of ranks, workers or
    another batch size. All ranks must have taken equally many batches when it is saved. Each pass over the loader is
    one epoch, shuffled anew. Takes torch's other arguments (num_workers, collate_fn, pin_memory, ...).
    """

    def __init__(
        self,
        dataset: OrderedDataset,
        batch_size: int = 1,
        *,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **arguments: Any,
    ) -> None:
        for name in ("shuffle", "sampler", "batch_sampler"):
            if name in arguments:
                raise ConfigError(
                    f"voxlane.DataLoader takes no {name}", fix="Give shuffle and seed to the dataset, which keeps order"
                )
        if not isinstance(dataset, OrderedDataset):
            raise ConfigError(
                f"voxlane.DataLoader over a {type(dataset).__name__}", fix="Use torch's DataLoader for other datasets"
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}", fix="Give 1 or more")
        collate = _Collate(collate_fn or default_collate)
        self._taken_batches = 0
        self._batches_before = 0
        """Of this epoch, given out before `load_state_dict`."""
        self._samples_a_batch = batch_size
        if isinstance(dataset, MapDataset):
            sampler = BatchSampler(dataset.sampler(), batch_size, drop_last)
            super().__init__(dataset, batch_sampler=sampler, collate_fn=collate, **arguments)
        else:
            stream: Any = dataset
            super().__init__(stream, batch_size, drop_last=drop_last, collate_fn=collate, **arguments)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator
        dataset: Any = self.dataset
        self._taken_batches = 0
        # For this pass only: the dataset may also be given to another loader.
        before = dataset.block, dataset.keep_place
        dataset.block, dataset.keep_place = self._samples_a_batch, True
        try:
            for batch in super().__iter__():
                self._taken_batches += 1
                if not isinstance(batch, _AllSkipped):
                    yield batch
        except VoxlaneError as error:
            raise _as_raised(error) from None
        finally:
            dataset.block, dataset.keep_place = before
        self._taken_batches = self._batches_before = 0
        dataset.set_epoch(dataset.epoch + 1)

    def __len__(self) -> int:
        """Batches of the epoch, those given out before `load_state_dict` included, as Lightning and progress bars
        count."""
        dataset: Any = self.dataset
        samples: int = dataset.rank_length()
        left = samples // self._samples_a_batch if self.drop_last else -(-samples // self._samples_a_batch)
        return self._batches_before + left

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the beginning of `epoch`; the epoch of a state that was just loaded goes on."""
        dataset: Any = self.dataset
        if epoch != dataset.epoch:
            self._batches_before = 0
        dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands after the batches given out so far; after the last one, the next epoch's start."""
        dataset: Any = self.dataset
        state: dict[str, Any] = dataset.state_after(self._taken_batches * self._samples_a_batch)
        batches = self._batches_before + self._taken_batches
        if batches and batches >= len(self):
            return {**state, "epoch": state["epoch"] + 1, "consumed": 0, "batches": 0}
        return {**state, "batches": batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; the next pass gives the rest of that epoch."""
        dataset: Any = self.dataset
        dataset.load_state_dict({name: value for name, value in state.items() if name != "batches"})
        self._taken_batches = 0
        self._batches_before = int(state.get("batches", 0))
