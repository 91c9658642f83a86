"""Parquet files from memory: whole, and row by row."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from voxlane.store.listing.parquet import ParquetRows, read_table


def parquet(table: pa.Table, rows_a_group: int) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd", row_group_size=rows_a_group)
    return file.getvalue()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.text(max_size=5)), max_size=30), st.integers(1, 31))
def test_rows_are_those_of_the_table(values: list[tuple[int, str]], rows_a_group: int) -> None:
    numbers = pa.array([n for n, _ in values], pa.int64())
    table = pa.table({"number": numbers, "text": pa.array([t for _, t in values], pa.string())})
    body = parquet(table, rows_a_group)
    assert read_table(body).equals(table)
    rows = ParquetRows(body)
    assert rows.table(["number"]).equals(table.select(["number"]))
    for again in (rows, pickle.loads(pickle.dumps(rows))):
        assert [tuple(again.row(i, ["number", "text"])) for i in reversed(range(len(values)))] == values[::-1]
    assert [rows.row(i, ["text"]) for i in range(len(values))] == [[text] for _, text in values]


def test_many_threads_read_the_same_rows() -> None:
    rows = ParquetRows(parquet(pa.table({"n": list(range(5000))}), 100))
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda i: rows.row(i % 5000, ["n"])[0], range(20_000))) == [
            i % 5000 for i in range(20_000)
        ]


@pytest.mark.parametrize("index", [-1, 3])
def test_row_out_of_range(index: int) -> None:
    with pytest.raises(IndexError, match=f"row {index} is out of range for 3 rows"):
        ParquetRows(parquet(pa.table({"n": [1, 2, 3]}), 2)).row(index, ["n"])


@pytest.mark.parametrize("read", [read_table, ParquetRows])
def test_other_files_are_rejected(read: type[ParquetRows]) -> None:
    for body in (b"", b"not parquet", b"PAR1" + bytes(100)):
        with pytest.raises(pa.ArrowInvalid):
            read(body)


def test_reading_does_not_import_pandas(tmp_path: Path) -> None:
    """Importing pandas takes longer than reading a table of a hundred thousand rows."""
    (tmp_path / "t").write_bytes(parquet(pa.table({"n": [1]}), 1))
    script = (
        "import pathlib, sys; from voxlane.store.listing.parquet import read_table; "
        "read_table(pathlib.Path(sys.argv[1]).read_bytes()); sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "t")]).returncode == 0
