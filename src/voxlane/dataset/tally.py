"""Counts that DataLoader workers and their parent share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from voxlane.store.counters import FIELDS, KINDS, Counters, Traffic, traffic

_SLOTS = 257
"""One for the main process and one a worker; workers beyond 256 share, and may then miscount."""
_CELLS = len(KINDS) * len(FIELDS)
_SKIPPED, _WAITED_US, _DECODED_US = _CELLS, _CELLS + 1, _CELLS + 2
_COLUMNS = _CELLS + 3
_EPOCH, _CONSUMED = 0, 1


class Tally:
    """Requests and skipped samples of a dataset over all processes that hold it, and the epoch they are in.

    A tensor in shared memory, because that is what reaches DataLoader workers both by fork and by spawn. All work on
    it goes through numpy: torch's own kernels may wait for OpenMP threads that a forked child does not have.
    """

    def __init__(self) -> None:
        rows, columns = _SLOTS + 1, _COLUMNS  # the last row holds the epoch's progress
        # Fresh pages are zero.
        storage = torch.UntypedStorage._new_shared(rows * columns * 8)  # type: ignore[no-untyped-call]
        self._tensor = torch.empty(0, dtype=torch.int64).set_(storage, 0, (rows, columns), (columns, 1))
        self._view()

    def _view(self) -> None:
        table: npt.NDArray[np.int64] = self._tensor.numpy()
        self._table, self._progress = table[:_SLOTS], table[_SLOTS]

    def __getstate__(self) -> dict[str, Any]:
        return {"_tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tensor = state["_tensor"]
        self._view()

    @staticmethod
    def _slot() -> int:
        worker = get_worker_info()
        return 0 if worker is None else 1 + worker.id % (_SLOTS - 1)

    def counters(self) -> Counters:
        """Counters of this process."""
        return Counters(self._table[self._slot(), :_CELLS].reshape(len(KINDS), len(FIELDS)))

    def add_skipped(self) -> None:
        """Count one sample left out."""
        self._table[self._slot(), _SKIPPED] += 1

    @property
    def skipped(self) -> int:
        """Samples left out so far."""
        return int(self._table[:, _SKIPPED].sum())

    def set_times(self, waited_s: float, decoded_s: float) -> None:
        """Seconds that threads of this process have waited for the bucket, and decoded, so far."""
        self._table[self._slot(), [_WAITED_US, _DECODED_US]] = int(waited_s * 1e6), int(decoded_s * 1e6)

    @property
    def times_s(self) -> tuple[float, float]:
        """Seconds waited and decoded, of all processes."""
        waited, decoded = self._table[:, [_WAITED_US, _DECODED_US]].sum(axis=0).tolist()
        return waited / 1e6, decoded / 1e6

    def traffic(self) -> Traffic:
        """Requests and bytes of all processes so far."""
        return traffic([self._table[:, :_CELLS].sum(axis=0).reshape(len(KINDS), len(FIELDS))])

    @property
    def epoch(self) -> int:
        """The epoch that iteration is in or will start with."""
        return int(self._progress[_EPOCH])

    @property
    def consumed(self) -> int:
        """Samples of that epoch's global order that were taken before iteration starts."""
        return int(self._progress[_CONSUMED])

    def start(self, epoch: int, consumed: int) -> None:
        """Set where the next iteration starts; workers that are running already see it too."""
        self._progress[_EPOCH] = epoch
        self._progress[_CONSUMED] = consumed
