"""Counts that DataLoader workers and their parent share."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import get_worker_info

from voxlane.store.counters import FIELDS, KINDS, Counters, Traffic, traffic

_SLOTS = 257
"""One for the main process and one a worker; workers beyond 256 share, and may then miscount."""
_CELLS = len(KINDS) * len(FIELDS)


class Tally:
    """Requests and skipped samples of a dataset over all processes that hold it, and the epoch they are in."""

    def __init__(self) -> None:
        self._cells = _shared(_SLOTS, _CELLS + 1)
        self._progress = _shared(2)

    @staticmethod
    def _slot() -> int:
        worker = get_worker_info()
        return 0 if worker is None else 1 + worker.id % (_SLOTS - 1)

    def counters(self) -> Counters:
        """Counters of this process."""
        row = self._cells[self._slot(), :_CELLS].numpy()
        return Counters(row.reshape(len(KINDS), len(FIELDS)))

    def add_skipped(self) -> None:
        """Count one sample left out."""
        self._cells[self._slot(), _CELLS] += 1

    @property
    def skipped(self) -> int:
        """Samples left out so far."""
        return int(self._cells[:, _CELLS].sum())

    def traffic(self) -> Traffic:
        """Requests and bytes of all processes so far."""
        rows = self._cells[:, :_CELLS].numpy().reshape(_SLOTS, len(KINDS), len(FIELDS))
        return traffic([rows.sum(axis=0, dtype=np.int64)])

    @property
    def epoch(self) -> int:
        """The epoch that iteration is in or will start with."""
        return int(self._progress[0])

    @property
    def consumed(self) -> int:
        """Samples of that epoch's global order that were taken before iteration starts."""
        return int(self._progress[1])

    def start(self, epoch: int, consumed: int) -> None:
        """Set where the next iteration starts; workers that are running already see it too."""
        self._progress[0] = epoch
        self._progress[1] = consumed


def _shared(*shape: int) -> torch.Tensor:
    """Zeros that every process sees which inherits or unpickles them from a DataLoader."""
    tensor = torch.zeros(shape, dtype=torch.int64)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
