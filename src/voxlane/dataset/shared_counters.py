"""Counters that DataLoader workers share with their parent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from voxlane.store.counters import FIELDS, KINDS, RequestCounters, Traffic

_SLOTS = 257
"""One slot for the main process and one for each worker; workers beyond 256 share slots and may miscount."""
_CELLS = len(KINDS) * len(FIELDS)
_SKIPPED, _WAITED_US, _DECODED_US = _CELLS, _CELLS + 1, _CELLS + 2
_COLUMNS = _CELLS + 3
_EPOCH, _CONSUMED = 0, 1


class SharedCounters:
    """Requests and skipped samples of a dataset in all processes that use it, and the epoch they are in.

    The counters are a tensor in shared memory, because that reaches DataLoader workers both by fork and by spawn. They
    are accessed through numpy: torch's own kernels may wait for OpenMP threads that a forked child does not have.
    """

    def __init__(self) -> None:
        rows, columns = _SLOTS + 1, _COLUMNS  # the last row holds the progress of the epoch
        # New pages are filled with zeros.
        storage = torch.UntypedStorage._new_shared(rows * columns * 8)  # type: ignore[no-untyped-call]
        self._tensor = torch.empty(0, dtype=torch.int64).set_(storage, 0, (rows, columns), (columns, 1))

    @property
    def _table(self) -> npt.NDArray[np.int64]:
        return self._tensor.numpy()[:_SLOTS]

    @property
    def _progress(self) -> npt.NDArray[np.int64]:
        return self._tensor.numpy()[_SLOTS, :]

    @staticmethod
    def _slot() -> int:
        worker = get_worker_info()
        return 0 if worker is None else 1 + worker.id % (_SLOTS - 1)

    def for_this_process(self) -> RequestCounters:
        """Return the counters of this process."""
        return RequestCounters(self._table[self._slot(), :_CELLS].reshape(len(KINDS), len(FIELDS)))

    def add_skipped(self) -> None:
        """Count one skipped sample."""
        self._table[self._slot(), _SKIPPED] += 1

    @property
    def skipped(self) -> int:
        """Number of samples skipped so far."""
        return int(self._table[:, _SKIPPED].sum())

    def set_times(self, waited_s: float, decoded_s: float) -> None:
        """Set the seconds that threads of this process have spent waiting for the bucket and decoding so far."""
        self._table[self._slot(), [_WAITED_US, _DECODED_US]] = int(waited_s * 1e6), int(decoded_s * 1e6)

    @property
    def times_s(self) -> tuple[float, float]:
        """Seconds spent waiting and decoding, summed over all processes."""
        waited, decoded = self._table[:, [_WAITED_US, _DECODED_US]].sum(axis=0).tolist()
        return waited / 1e6, decoded / 1e6

    def traffic(self) -> Traffic:
        """Return the requests and bytes of all processes so far."""
        return RequestCounters(self._table[:, :_CELLS].sum(axis=0).reshape(len(KINDS), len(FIELDS))).read()

    @property
    def epoch(self) -> int:
        """Epoch of the current or next iteration."""
        return int(self._progress[_EPOCH])

    @property
    def consumed(self) -> int:
        """Number of samples of the epoch's global order that were taken before the iteration starts."""
        return int(self._progress[_CONSUMED])

    def start(self, epoch: int, consumed: int) -> None:
        """Set the position at which the next iteration starts; running workers see it too."""
        self._progress[_EPOCH] = epoch
        self._progress[_CONSUMED] = consumed
