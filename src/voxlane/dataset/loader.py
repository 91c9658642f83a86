"""`DataLoader`: torch's DataLoader with a state that resumes exactly on any number of ranks and workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.utils.data
from torch.utils.data import BatchSampler, default_collate

from voxlane.dataset.base import OrderedDataset, Skipped
from voxlane.dataset.map import MapDataset
from voxlane.errors import ConfigError, VoxlaneError
from voxlane.processes import Parent, SupervisedContext, init_loader_worker
from voxlane.temporary import mark_children


def _collate_remaining(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Collate the samples that did not fail; return one of the `Skipped` if all of them did."""
    remaining = [s for s in samples if not isinstance(s, Skipped)]
    return collate(remaining) if remaining else samples[-1]


def _strip_worker_traceback(error: VoxlaneError) -> VoxlaneError:
    """Return the error that a worker raised without the worker's traceback, which torch adds to the message."""
    kind = type(error)
    head, mark, message = str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")
    return kind(message.rstrip()) if mark and "Original Traceback" in head else error


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader over a `MapDataset`, `IterableDataset` or `PatchStream`, in the dataset's order (its
    `shuffle` and `seed`), sharded over ranks, with `state_dict` and `load_state_dict`.

    The state counts the batches that were returned, not those prefetched, and does not depend on workers: after
    `load_state_dict` exactly the remaining samples of the epoch follow, also with another number of ranks or workers or
    another batch size. All ranks must have taken the same number of batches when it is saved. Each pass over the loader
    is one epoch with its own shuffle. Other arguments (num_workers, collate_fn, pin_memory, ...) are those of torch.
    """

    dataset: Any

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
                    f"voxlane.DataLoader does not accept {name}", fix="Pass shuffle and seed to the dataset"
                )
        if not isinstance(dataset, OrderedDataset):
            raise ConfigError(
                f"voxlane.DataLoader does not support a {type(dataset).__name__}",
                fix="Use torch's DataLoader for other datasets",
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size must be an integer of at least 1, got {batch_size}")
        method = arguments.get("multiprocessing_context") or multiprocessing.get_start_method()
        if arguments.get("num_workers") and method == "spawn":  # as in processes that were spawned themselves
            arguments["multiprocessing_context"] = SupervisedContext()
        collate = partial(_collate_remaining, collate_fn or default_collate)
        self._taken_batches = 0
        self._batches_before = 0
        """Number of batches of this epoch that were returned before `load_state_dict`."""
        self._samples_per_batch = batch_size
        self._init_worker = arguments.get("worker_init_fn")
        if isinstance(dataset, MapDataset):
            sampler = BatchSampler(dataset.sampler(), batch_size, drop_last)
            super().__init__(dataset, batch_sampler=sampler, collate_fn=collate, **arguments)
        else:
            stream: Any = dataset
            super().__init__(stream, batch_size, drop_last=drop_last, collate_fn=collate, **arguments)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator
        self._taken_batches = 0
        # Set for this pass only, because another loader may use the same dataset.
        if self.num_workers:
            mark_children()
            self.worker_init_fn = partial(init_loader_worker, Parent.current(), self._init_worker)
        before = self.dataset.block, self.dataset.yield_skipped
        self.dataset.block, self.dataset.yield_skipped = self._samples_per_batch, True
        try:
            for batch in super().__iter__():
                self._taken_batches += 1
                if not isinstance(batch, Skipped):
                    yield batch
        except VoxlaneError as error:
            raise _strip_worker_traceback(error) from None
        finally:
            self.dataset.block, self.dataset.yield_skipped = before
        self._taken_batches = self._batches_before = 0
        self.dataset.set_epoch(self.dataset.epoch + 1)

    def __len__(self) -> int:
        """Return the number of batches of the epoch, including those before `load_state_dict`, as Lightning and
        progress bars count."""
        samples: int = self.dataset.rank_length()
        left = samples // self._samples_per_batch if self.drop_last else -(-samples // self._samples_per_batch)
        return self._batches_before + left

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the beginning of `epoch`; the epoch of a state that was just loaded continues."""
        if epoch != self.dataset.epoch:
            self._batches_before = 0
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch after the batches returned so far; after the last one, the start of the next
        epoch."""
        state: dict[str, Any] = self.dataset.state_after(self._taken_batches * self._samples_per_batch)
        batches = self._batches_before + self._taken_batches
        if batches and batches >= len(self):
            return {**state, "epoch": state["epoch"] + 1, "consumed": 0, "batches": 0}
        return {**state, "batches": batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; the next pass yields the rest of that epoch."""
        self.dataset.load_state_dict({name: value for name, value in state.items() if name != "batches"})
        self._taken_batches = 0
        self._batches_before = int(state.get("batches", 0))
