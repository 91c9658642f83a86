"""Parquet files in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def read_table(body: Any) -> pa.Table:
    """Return the table in the bytes of a Parquet file; raise pa.ArrowInvalid if they are not a Parquet file."""
    return _open_file(_copy_to_arrow(body)).read(use_threads=False)


class ParquetRows:
    """A Parquet file in memory that is read by column or row by row.

    A row group is decoded when one of its rows is first read, and cached. Pickles as the bytes of the file. Safe to use
    from many threads and in forked children, because nothing is locked: if two threads decode the same group, they get
    the same result.
    """

    def __init__(self, body: Any) -> None:
        """Raise pa.ArrowInvalid if the bytes are not a Parquet file."""
        self._memory = _copy_to_arrow(body)
        self._metadata = _open_file(self._memory).metadata
        sizes = [self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        """Index of the first row of each group, and the number of all rows."""
        self._groups: dict[tuple[int, tuple[str, ...]], list[pa.Array]] = {}

    def __getstate__(self) -> bytes:
        body: bytes = self._memory.to_pybytes()
        return body

    def __setstate__(self, body: bytes) -> None:
        ParquetRows.__init__(self, body)

    def table(self, columns: Sequence[str]) -> pa.Table:
        """Return all rows of some columns."""
        return _open_file(self._memory, self._metadata).read(list(columns), use_threads=False)

    def row(self, index: int, columns: Sequence[str]) -> list[Any]:
        """Return the values of one row, in the order of `columns`; rows count from 0."""
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"row {index} is out of range for {self._starts[-1]} rows")
        group = int(np.searchsorted(self._starts, index, "right")) - 1
        key = group, tuple(columns)
        if key not in self._groups:
            table = _open_file(self._memory, self._metadata).read_row_group(group, list(columns), use_threads=False)
            self._groups[key] = [table[name].combine_chunks() for name in columns]
        return [column[index - int(self._starts[group])].as_py() for column in self._groups[key]]


def _copy_to_arrow(body: Any) -> pa.Buffer:
    """Copy `body` into Arrow's own memory. Arrow releases Python buffers late, and the process aborts if the
    interpreter has ended by then. For the same reason files are read on the calling thread."""
    memory = pa.allocate_buffer(len(body))
    np.frombuffer(memory, np.uint8)[:] = np.frombuffer(body, np.uint8)
    return memory


def _open_file(memory: pa.Buffer, metadata: Any = None) -> Any:
    # pq.read_table would import pandas if it is installed, which takes 0.3 s.
    return pq.ParquetFile(pa.BufferReader(memory), metadata=metadata, pre_buffer=False)
