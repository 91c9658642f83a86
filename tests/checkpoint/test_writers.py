"""Writers as files: when they publish, what they discard and say so, and how other libraries use them."""

from __future__ import annotations

import contextlib
import csv
import gc
import gzip
import io
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from tests.conftest import Bucket
from voxlane import Checkpoint, Store, errors
from voxlane.checkpoint import verified_reader
from voxlane.store import writer as store_writer
from voxlane.testing import Access, Emulator

MIB = 1 << 20


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# -- other libraries ---------------------------------------------------------------------------------------------------


def _write_pickle(file: Any) -> None:
    pickle.dump({"a": 1, "b": bytes(100_000)}, file, protocol=5)


def _write_arrays(file: Any) -> None:
    np.savez(file, a=np.arange(5), b=np.zeros((2, 3)), empty=np.zeros((0, 3)))


def _write_zip(file: Any) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", "hello " * 1000)
        archive.writestr("b.txt", "")


def _write_tar(file: Any) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))


def _write_parquet(file: Any) -> None:
    pq.write_table(pa.table({"key": ["a", "b"], "size": [1, 2]}), file)


def _write_arrow_csv(file: Any) -> None:
    pyarrow.csv.write_csv(pa.table({"key": ["a", "b"]}), file)


def _write_arrow_file(file: Any) -> None:
    table = pa.table({"key": ["a", "b"]})
    with pa.ipc.new_file(file, table.schema) as sink:
        sink.write_table(table)


def _write_torch(file: Any) -> None:
    torch.save({"w": torch.arange(100)}, file)


def _write_legacy_torch(file: Any) -> None:
    torch.save({"w": torch.arange(100)}, file, _use_new_zipfile_serialization=False)


def _write_arrays_directly(file: Any) -> None:
    for array in (np.arange(6.0).reshape(2, 3), np.zeros(3, complex), np.zeros((0, 3)), memoryview(b"abc")):
        assert file.write(array) == array.nbytes
    file.writelines([b"a", bytearray(b"b")])


_LIBRARIES = [
    _write_pickle,
    _write_arrays,
    _write_zip,
    _write_tar,
    _write_parquet,
    _write_arrow_csv,
    _write_arrow_file,
    _write_torch,
    _write_legacy_torch,
    _write_arrays_directly,
]


def _read_members(body: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("write", _LIBRARIES)
def test_writer_is_a_file_for_other_libraries(bucket: Bucket, write: Callable[[Any], None]) -> None:
    ckpt, expected = Checkpoint(bucket.uri, bucket.config), io.BytesIO()
    write(expected)
    closed, left = ckpt.writer("closed"), ckpt.writer("left")
    write(closed)
    closed.close()
    with left:
        write(left)
    for name in ("closed", "left"):
        with ckpt.reader(name) as file:
            stored = file.read()
        if write in (_write_arrays, _write_zip):
            # Zip files of streams that cannot seek hold the sizes after the data, so compare the members.
            assert _read_members(stored) == _read_members(expected.getvalue())
        elif write is _write_legacy_torch:  # it holds the addresses of the storages
            assert torch.equal(torch.load(io.BytesIO(stored))["w"], torch.arange(100))
        else:
            assert stored == expected.getvalue()


def test_attributes_that_libraries_look_at(gcs: Bucket) -> None:
    with Checkpoint(gcs.uri, gcs.config).writer("a") as file:
        assert (file.name, file.mode, file.closed) == ("gs://bkt/a", "wb", False)
        assert (file.writable(), file.readable(), file.seekable(), file.isatty()) == (True, False, False, False)
        for call in (file.fileno, file.read, lambda: file.seek(0), lambda: file.truncate(0)):
            with pytest.raises(io.UnsupportedOperation):
                call()
        file.flush()
        with pytest.raises(TypeError, match="bytes-like"):
            file.write("text")
        with pytest.raises(TypeError, match="gs://bkt/a: a writer cannot be pickled"):
            pickle.dumps(file)


def _wrap_text(file: Any) -> Any:
    return io.TextIOWrapper(file, newline="")


def _wrap_buffered_text(file: Any) -> Any:
    return io.TextIOWrapper(io.BufferedWriter(file), newline="")


class _Encoder(contextlib.AbstractContextManager[Any]):
    """A library's file that takes text and closes the file below it."""

    def __init__(self, file: Any, opened: Callable[[Any], Any]) -> None:
        self._file, self._opened = file, opened(file)

    def write(self, text: str) -> None:
        self._opened.write(text.encode())

    def close(self) -> None:
        self._opened.close()
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _wrap_gzip(file: Any) -> Any:
    return _Encoder(file, lambda below: gzip.GzipFile(fileobj=below, mode="wb"))


def _wrap_arrow(file: Any) -> Any:
    return _Encoder(file, lambda below: pa.PythonFile(below, mode="w"))


_WRAPPERS = [_wrap_text, _wrap_buffered_text, _wrap_gzip, _wrap_arrow]


@pytest.mark.parametrize("wrap", _WRAPPERS)
def test_wrappers_publish_when_they_are_closed(gcs: Bucket, wrap: Callable[[Any], Any]) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    with wrap(ckpt.writer("a")) as file:
        for number in range(3):
            file.write(f"{number},x\r\n")
    with ckpt.reader("a") as stored:
        body = stored.read()
    text = (gzip.decompress(body) if wrap is _wrap_gzip else body).decode()
    assert list(csv.reader(text.splitlines())) == [["0", "x"], ["1", "x"], ["2", "x"]]


# -- exceptions and cleanup --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [*_WRAPPERS, contextlib.closing])
@pytest.mark.parametrize("size", [10, 20 * MIB])
def test_cleanup_after_an_exception_publishes_nothing(
    gcs: Bucket, emulator: Emulator, wrap: Callable[[Any], Any], size: int
) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    ckpt.save({"n": 1}, "a.ckpt")
    writer = ckpt.writer("a.ckpt")
    writer.write(bytes(size))
    with (
        pytest.warns(errors.DiscardedWarning, match=r"gs://bkt/a\.ckpt: [\d,]+ bytes .* \(ZeroDivisionError\).*commit"),
        pytest.raises(ZeroDivisionError),
        wrap(writer),
    ):
        raise ZeroDivisionError
    assert writer.closed
    assert ckpt.load("a.ckpt") == {"n": 1}
    assert emulator.uploads("bkt") == []


def test_close_in_finally_publishes_only_without_an_exception(gcs: Bucket, emulator: Emulator) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)

    def write(name: str, *, fail: bool) -> None:
        writer = ckpt.writer(name)
        try:
            writer.write(b"half")
            if fail:
                raise ZeroDivisionError
        finally:
            writer.close()

    write("whole", fail=False)
    with pytest.warns(errors.DiscardedWarning, match="ZeroDivisionError"), pytest.raises(ZeroDivisionError):
        write("half", fail=True)
    try:
        raise ValueError
    except ValueError:  # an exception from before the writer was opened does not count
        write("while-handling", fail=False)
    try:
        writer = ckpt.writer("handled")
        raise ValueError
    except ValueError:
        writer.commit()  # publishes in any case
    assert [key for key in emulator.keys("bkt") if not key.endswith(".sums")] == ["handled", "while-handling", "whole"]


def test_writer_of_an_exception_handler_is_not_published_by_a_later_exception(gcs: Bucket, emulator: Emulator) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    try:
        raise ValueError
    except ValueError:
        writer = ckpt.writer("a.ckpt")
    writer.write(b"half")
    with (
        pytest.warns(errors.DiscardedWarning, match="KeyError"),
        pytest.raises(KeyError),
        contextlib.closing(writer),
    ):
        raise KeyError  # may lie where the first exception was in memory
    assert emulator.keys("bkt") == []


def test_exceptions_that_nobody_reports_give_a_warning(gcs: Bucket, emulator: Emulator) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)

    def write_steps() -> Iterator[None]:
        with ckpt.writer("a") as file:
            file.write(bytes(6 * MIB))
            yield

    def write_and_exit() -> None:
        with ckpt.writer("b") as file:
            file.write(b"half")
            sys.exit()

    steps = write_steps()
    next(steps)
    with pytest.warns(errors.DiscardedWarning, match="gs://bkt/a: .*GeneratorExit"):
        del steps
    with pytest.warns(errors.DiscardedWarning, match="gs://bkt/b: 4 bytes .*SystemExit"), pytest.raises(SystemExit):
        write_and_exit()
    _wait_until(lambda: not store_writer.running_uploads)
    assert emulator.keys("bkt") == []


def test_interrupted_write_is_never_published(gcs: Bucket, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    writer = Checkpoint(gcs.uri, gcs.config).writer("a")
    writer.write(b"first")
    with monkeypatch.context() as patch:
        patch.setattr(store_writer.Writer, "_append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.write(bytes(2 * MIB))
    for call in (lambda: writer.write(b"more"), writer.commit, lambda: writer.write(b"more")):
        with pytest.raises(errors.ClosedWriterError, match="gs://bkt/a: a write was interrupted"):
            call()
    assert writer.closed
    assert emulator.keys("bkt") == []


def test_commit_after_a_failed_write_publishes_nothing(gcs: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "_MAX_PARTS", 2)
    writer = gcs.with_config(part_bytes=5 * MIB).store.open_writer("a")
    with pytest.raises(errors.StoreError, match="larger than 2 parts"):
        writer.write(bytes(20 * MIB))
    with pytest.raises(errors.StoreError, match="larger than 2 parts"):
        writer.commit()
    assert not gcs.store.exists("a")


def test_failed_close_raises_and_publishes_nothing(gcs: Bucket, emulator: Emulator) -> None:
    emulator.set_access(Access(denied_permissions=frozenset({"storage.objects.create"})))
    for size in (10, 20 * MIB):
        writer = gcs.store.open_writer("a")
        with pytest.raises(errors.PermissionDeniedError):
            writer.write(bytes(size))
            writer.close()
        writer.abort()
        writer.close()
    assert emulator.keys("bkt") == []


# -- garbage collection ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [_wrap_text, _wrap_buffered_text, lambda file: io.BufferedWriter(file)])
def test_dropped_wrapper_publishes_nothing(gcs: Bucket, emulator: Emulator, wrap: Callable[[Any], Any]) -> None:
    wrapper = wrap(Checkpoint(gcs.uri, gcs.config).writer("a"))
    wrapper.write("text" if isinstance(wrapper, io.TextIOBase) else b"text")
    with pytest.warns(errors.DiscardedWarning, match=r"gs://bkt/a: 4 bytes .*(TextIOWrapper|BufferedWriter) around"):
        del wrapper
    assert emulator.keys("bkt") == []


def test_finalizer_does_not_wait(gcs: Bucket, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer may be collected on any thread: here on a thread of its own upload."""
    store = gcs.with_config(part_bytes=5 * MIB).store
    add, resume, collected = store.counters.add, threading.Event(), threading.Event()
    first_thread = threading.Lock()

    def collect(kind: str, **changes: int) -> None:
        if kind == "part" and changes.get("bytes_written") and first_thread.acquire(blocking=False):
            assert resume.wait(60)
            gc.collect()
            collected.set()
        add(kind, **changes)

    def resume_and_wait() -> None:
        resume.set()
        assert collected.wait(60)

    monkeypatch.setattr(store.counters, "add", collect)
    writer: Any = store.open_writer("a")
    writer.write(bytes(15 * MIB))
    writer.itself = writer
    del writer
    with pytest.warns(errors.DiscardedWarning, match="gs://bkt/a: 15,728,640 bytes"):
        resume_and_wait()
    _wait_until(lambda: not store_writer.running_uploads)
    assert emulator.keys("bkt") == []
    assert emulator.uploads("bkt") == []


# -- the end of a process ----------------------------------------------------------------------------------------------

_OPEN_WRITERS = """
import os, signal, sys
from voxlane import Store, StoreConfig
store = Store("gs://bkt", StoreConfig(endpoint=sys.argv[1]))
small, large = store.open_writer("small"), store.open_writer("large")
small.write(bytes(1000))
large.write(bytes(20 << 20))
print("ready", flush=True)
"""


@pytest.mark.parametrize(
    ("end", "status", "is_reported"),
    [
        ("", 0, True),
        ("sys.exit(3)", 3, True),
        ("raise ZeroDivisionError", 1, True),
        ("import warnings; warnings.simplefilter('error')", 0, True),
        ("os._exit(4)", 4, False),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, False),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, False),
    ],
)
def test_process_that_ends_publishes_nothing(
    gcs: Bucket, emulator: Emulator, end: str, status: int, is_reported: bool
) -> None:
    command = [sys.executable, "-c", _OPEN_WRITERS + end, emulator.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (status, "ready\n"), done.stderr
    reports = re.findall(r"DiscardedWarning: gs://bkt/(\w+): ([\d,]+) bytes were discarded", done.stderr)
    assert sorted(reports) == ([("large", "20,971,520"), ("small", "1,000")] if is_reported else [])
    assert emulator.keys("bkt") == []
    if is_reported:
        assert emulator.uploads("bkt") == []


_left_open: list[Any] = []


def _leave_open(uri: str, config: Any) -> None:
    _left_open.append(Checkpoint(uri, config).writer("a"))
    _left_open[0].write(b"abc")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_process_reports_its_open_writers(gcs: Bucket, capfd: pytest.CaptureFixture[str], method: str) -> None:
    child: Any = multiprocessing.get_context(method).Process(target=_leave_open, args=(gcs.uri, gcs.config))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert "DiscardedWarning: gs://bkt/a: 3 bytes were discarded" in capfd.readouterr().err
    assert not gcs.store.exists("a")


@pytest.mark.parametrize("size", [10, 60 * MIB])  # the latter fills the queue of the upload
def test_forked_child_cannot_publish_or_abort_the_writer_of_its_parent(gcs: Bucket, size: int) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    with ckpt.writer("a") as writer:
        writer.write(bytes(size))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in (lambda: writer.write(b"child"), writer.close):
                    try:
                        call()
                    except errors.ClosedWriterError as error:
                        status = 0 if "belongs to the process" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.write(b"parent")
    with ckpt.reader("a") as file:
        assert file.read() == bytes(size) + b"parent"


# -- several writers of one name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_writers", [2, 8])
def test_writers_of_one_name_leave_one_whole_file(bucket: Bucket, num_writers: int) -> None:
    """Of the writers of one name the last one that closes wins; all that are open at once keep their checksums."""
    ckpt = Checkpoint(bucket.uri, bucket.config)
    for turn in range(3):
        start = threading.Barrier(num_writers)

        def save(number: int, turn: int = turn, start: threading.Barrier = start) -> None:
            state = {"turn": turn, "w": torch.full((1000,), float(number))}
            with ckpt.writer("last.ckpt") as file:
                start.wait(60)
                torch.save(state, file)

        threads = [threading.Thread(target=save, args=(number,)) for number in range(num_writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        loaded = ckpt.load("last.ckpt")
        assert loaded["turn"] == turn
        assert len(loaded["w"].unique()) == 1


def test_overtaken_writers_keep_their_checksums(bucket: Bucket) -> None:
    """Six writers record their checksums before any of them publishes; each file that appears then is verified."""
    ckpt = Checkpoint(bucket.uri, bucket.config)
    writers = [ckpt.writer("a") for _ in range(6)]
    records = [writer._before.result() for writer in writers]
    for number, (writer, record) in enumerate(zip(writers, records, strict=True)):
        writer.write(bytes([number]) * 100)
        verified_reader.add_contents(writer._store, writer._key, record, writer.checksums())
    for number, writer in enumerate(writers):
        super(type(writer), writer)._publish()
        with ckpt.reader("a") as file:
            assert file.read() == bytes([number]) * 100
    for number in range(3):
        ckpt.save({"n": number}, "a")
    contents = verified_reader.read_contents(bucket.store, bucket.key("a")).checksums
    assert len(contents) == 4  # the record does not grow for ever


@pytest.mark.parametrize("new_size", [100, 200])
def test_save_between_the_two_reads_of_a_load_is_no_damage(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, new_size: int
) -> None:
    """A reader gets the checksums, then another process saves, then the reader gets the version of the file."""
    ckpt = Checkpoint(bucket.uri, bucket.config)
    head, contents = Store.head, iter([b"new" * new_size])
    with ckpt.writer("a") as file:
        file.write(b"old" * 100)

    def save_first(store: Store, key: str) -> Any:
        if not key.endswith(".sums") and threading.current_thread() is threading.main_thread():
            for content in contents:
                _wait_until(recorded.is_set)
                monkeypatch.setattr(Store, "head", head)
                with ckpt.writer("a") as file:
                    file.write(content)
        return head(store, key)

    recorded = threading.Event()
    read = verified_reader.read_contents

    def read_and_record(store: Store, key: str) -> Any:
        result = read(store, key)
        recorded.set()
        return result

    monkeypatch.setattr(verified_reader, "read_contents", read_and_record)
    monkeypatch.setattr(Store, "head", save_first)
    with ckpt.reader("a") as file:
        assert file.read() == b"new" * new_size
    assert next(contents, None) is None
