"""Counters of the requests, bytes and retries of a bucket, by kind of request."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

KINDS = ("get", "put", "part", "list", "head", "copy", "delete", "compose")
FIELDS = ("requests", "retries", "bytes_read", "bytes_written")

# US list prices in dollars per 10,000 requests (class A / class B), the same order on GCS, S3 and Azure.
_CLASS_A = frozenset({"put", "part", "list", "copy", "compose"})
_CLASS_A_USD_PER_10K = 0.05
_CLASS_B_USD_PER_10K = 0.004


@dataclass(frozen=True)
class Traffic:
    """A snapshot of the counters: `by_kind[kind][field]`."""

    by_kind: dict[str, dict[str, int]]

    def total(self, field: str) -> int:
        """Return the sum of one field ("requests", "retries", "bytes_read", "bytes_written") over all kinds."""
        return sum(kind[field] for kind in self.by_kind.values())

    @property
    def requests(self) -> int:
        """HTTP requests sent, retries included."""
        return self.total("requests")

    @property
    def retries(self) -> int:
        """Requests sent again because an attempt failed."""
        return self.total("retries")

    @property
    def bytes_read(self) -> int:
        """Bytes of object data received (egress)."""
        return self.total("bytes_read")

    @property
    def request_cost_usd(self) -> float:
        """Request charges at list prices (0.05 and 0.004 USD per 10,000 class A and B operations); egress excluded."""
        per_kind = (
            k["requests"] * (_CLASS_A_USD_PER_10K if name in _CLASS_A else _CLASS_B_USD_PER_10K)
            for name, k in self.by_kind.items()
            if name != "delete"
        )
        return sum(per_kind) / 10_000

    def __str__(self) -> str:
        rows = [
            f"{name}: {k['requests']:,} requests, {k['retries']:,} retries, "
            f"{k['bytes_read']:,} B read, {k['bytes_written']:,} B written"
            for name, k in self.by_kind.items()
            if k["requests"]
        ]
        return "; ".join(rows) or "no requests"


_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]  # a thread may have held it
_process_retries = 0


def count_process_retries() -> int:
    """Return how many requests of this process were sent again because they failed."""
    return _process_retries


class RequestCounters:
    """Counters in an int64 array of len(KINDS) x len(FIELDS). The array may be shared memory, so that the reads of
    DataLoader workers are counted too."""

    def __init__(self, cells: npt.NDArray[np.int64] | None = None) -> None:
        self._cells = np.zeros((len(KINDS), len(FIELDS)), np.int64) if cells is None else cells

    def add(
        self, kind: str, *, requests: int = 1, retries: int = 0, bytes_read: int = 0, bytes_written: int = 0
    ) -> None:
        """Count one finished or failed request (and its body)."""
        global _process_retries
        row = self._cells[KINDS.index(kind)]
        with _lock:
            _process_retries += retries
            for field, count in enumerate((requests, retries, bytes_read, bytes_written)):
                if count:  # adding all four as one array takes ten times as long
                    row[field] += count

    def read(self) -> Traffic:
        """Return the counts so far."""
        rows = zip(KINDS, self._cells.tolist(), strict=True)
        return Traffic({kind: dict(zip(FIELDS, row, strict=True)) for kind, row in rows})
