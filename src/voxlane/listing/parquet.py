"""Parquet files from memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def table_from(body: Any) -> pa.Table:
    """The table in the bytes of a Parquet file; pa.ArrowInvalid when they are none."""
    return _file(_memory(body)).read(use_threads=False)


class ParquetRows:
    """A Parquet file in memory of which few columns are wanted at once and the others row by row. A group of rows is
    decoded when one of them is first asked for, and kept. Pickles as the file's bytes; safe to use from many threads
    and in forked children, because nothing is locked: two threads may decode the same group, to the same end."""

    def __init__(self, body: Any) -> None:
        """pa.ArrowInvalid when the bytes are no Parquet file."""
        self._memory = _memory(body)
        self._metadata = _file(self._memory).metadata
        sizes = [self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        """Number of the first row of each group, and of all rows."""
        self._groups: dict[tuple[int, tuple[str, ...]], list[pa.Array]] = {}

    def __getstate__(self) -> bytes:
        body: bytes = self._memory.to_pybytes()
        return body

    def __setstate__(self, body: bytes) -> None:
        ParquetRows.__init__(self, body)

    def table(self, columns: Sequence[str]) -> pa.Table:
        """All rows of some columns."""
        return _file(self._memory, self._metadata).read(list(columns), use_threads=False)

    def row(self, index: int, columns: Sequence[str]) -> list[Any]:
        """The values of one row, in the order of `columns`; rows count from 0."""
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"row {index} of {self._starts[-1]}")
        group = int(np.searchsorted(self._starts, index, "right")) - 1
        key = group, tuple(columns)
        if key not in self._groups:
            read = _file(self._memory, self._metadata).read_row_group(group, list(columns), use_threads=False)
            self._groups[key] = [read[name].combine_chunks() for name in columns]
        return [column[index - int(self._starts[group])].as_py() for column in self._groups[key]]


def _memory(body: Any) -> pa.Buffer:
    """Memory of Arrow's own: its pool lets go of a Python buffer later, and when the interpreter is gone by then, the
    process aborts. For the same reason files are read on the calling thread."""
    memory = pa.allocate_buffer(len(body))
    np.frombuffer(memory, np.uint8)[:] = np.frombuffer(body, np.uint8)
    return memory


def _file(memory: pa.Buffer, metadata: Any = None) -> Any:
    # Not pq.read_table, which imports pandas where that is installed: 0.3 s.
    return pq.ParquetFile(pa.BufferReader(memory), metadata=metadata, pre_buffer=False)
