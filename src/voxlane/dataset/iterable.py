"""`IterableDataset`: a bucket as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.utils.data

from voxlane.dataset.base import BucketDataset, Skipped
from voxlane.dataset.samples import READ_AHEAD_BYTES, read_ahead
from voxlane.errors import ConfigError, StateError


class IterableDataset(BucketDataset, torch.utils.data.IterableDataset[Any]):
    """The objects under a URI (or of a manifest) as a stream, prefetched concurrently and yielded in order.

    It accepts the arguments of `MapDataset`, and
    read_ahead_bytes: maximum number of bytes per process that are being fetched or waiting; one sample is always
        allowed, whatever its size. So a worker holds at most this plus one sample.

    It shards itself over ranks and DataLoader workers: each sample is yielded exactly once.
    """

    def __init__(self, source: Any, *, read_ahead_bytes: int = READ_AHEAD_BYTES, **arguments: Any) -> None:
        if read_ahead_bytes < 1:
            raise ConfigError(f"read_ahead_bytes must be at least 1, got {read_ahead_bytes}")
        super().__init__(source, **arguments)
        self.read_ahead_bytes = read_ahead_bytes
        self._taken = 0
        self._skip = 0

    def _order_arguments(self) -> dict[str, Any]:
        return {**super()._order_arguments(), "read_ahead_bytes": self.read_ahead_bytes}

    def __len__(self) -> int:
        """Return the number of samples that this rank has left in this epoch."""
        return self.rank_length()

    def __iter__(self) -> Iterator[Any]:
        self.start_pass()
        indices = self.process_indices()
        self._taken, self._skip = self._skip, 0
        return self._stream(indices[self._taken :].tolist())

    def _stream(self, indices: list[int]) -> Iterator[Any]:
        for sample in read_ahead(self.samples, indices, self.read_ahead_bytes):
            self._taken += 1
            value = self.take(sample)
            if self.yield_skipped or not isinstance(value, Skipped):
                yield value
        self.end_pass()

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of `epoch`."""
        super().set_epoch(epoch)
        self._taken = self._skip = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream after the last sample it yielded.

        In the main process the state resumes on any number of ranks, provided that all ranks took the same number of
        samples. In a DataLoader worker (as with torchdata's StatefulDataLoader) it resumes only the same worker of the
        same number; use `voxlane.DataLoader` for a state that does not depend on workers.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return self.state_after(self._taken)
        position = {"id": worker.id, "num_workers": worker.num_workers, "block": self.block, "taken": self._taken}
        return {**self.state_after(0), "worker": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: exactly the remaining samples of its epoch follow."""
        state = dict(state)
        position = state.pop("worker", None)
        super().load_state_dict(state)
        self._taken = self._skip = 0
        if position is not None:
            worker = torch.utils.data.get_worker_info()
            current = worker and {"id": worker.id, "num_workers": worker.num_workers, "block": self.block}
            if current != {name: position[name] for name in ("id", "num_workers", "block")}:
                raise StateError(
                    f"the state of worker {position['id']} of {position['num_workers']} was loaded in another worker",
                    fix="Keep the number of workers, or use voxlane.DataLoader, whose state fits any number",
                )
            self._skip = int(position["taken"])
