"""Parquet files from memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def table_from(body: Any) -> pa.Table:
    """The table in the bytes of a Parquet file; pa.ArrowInvalid when they are none.

    From memory of Arrow's own and on this thread: its pool lets go of a Python buffer later, and when the interpreter
    is gone by then, the process aborts.
    """
    memory = pa.allocate_buffer(len(body))
    np.frombuffer(memory, np.uint8)[:] = np.frombuffer(body, np.uint8)
    return pq.read_table(pa.BufferReader(memory), use_threads=False, pre_buffer=False)
