"""Plain checkpoints: torch.save and torch.load with any bucket."""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import random
import re
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane import Checkpoint, Store, StoreConfig, errors
from voxlane.checkpoint import save_sharded, verified_reader
from voxlane.checkpoint.checksums import BLOCK_BYTES, BlockDigests, Checksums, digest
from voxlane.checkpoint.verified_reader import add_contents, read_contents
from voxlane.checkpoint.writer import ChecksummedWriter
from voxlane.testing import Emulator

MIB = 1 << 20


def test_save_and_load(bucket: Bucket) -> None:
    small_parts = bucket.with_config(part_bytes=5 * MIB)
    ckpt = Checkpoint(f"{bucket.uri}/run1", small_parts.config)
    state = {"step": 7, "weights": torch.arange(3 * MIB, dtype=torch.float32), "bias": torch.ones(5)}
    with ckpt.writer("epoch0.ckpt") as file:
        torch.save(state, file)
    with ckpt.reader("epoch0.ckpt") as file:
        loaded = torch.load(file, weights_only=True)
    assert loaded["step"] == 7
    assert torch.equal(loaded["weights"], state["weights"])


def test_reader_behaves_like_a_file(gcs: Bucket) -> None:
    body = random.Random(0).randbytes(300_000)
    gcs.store.put("k", body)
    reference = io.BytesIO(body)
    rng = random.Random(1)
    with Checkpoint("gs://bkt", gcs.with_config(part_bytes=10_000).config).reader("k") as file:
        for _ in range(300):
            offset, whence = rng.choice(
                [(rng.randrange(310_000), 0), (rng.randrange(-50, 50), 1), (-rng.randrange(99), 2)]
            )
            if whence == 1 and reference.tell() + offset < 0:
                continue
            assert file.seek(offset, whence) == reference.seek(offset, whence)
            count = rng.choice([0, 1, 100, 25_000])
            assert file.read(count) == reference.read(count)
            assert file.tell() == reference.tell()
        assert file.seek(0) == 0
        assert file.read() == body


def test_replacing_an_object_during_a_read_is_detected(gcs: Bucket) -> None:
    gcs.store.put("k", bytes(100_000))
    with Checkpoint("gs://bkt", gcs.with_config(part_bytes=1000).config).reader("k") as file:
        file.read(10)
        gcs.store.put("k", bytes([1]) * 100_000)
        file.seek(90_000)
        with pytest.raises(errors.ChangedError, match="gs://bkt/k"):
            file.read(10)


def test_missing_checkpoint_is_named(gcs: Bucket) -> None:
    with pytest.raises(errors.NotFoundError, match=r"gs://bkt/run/none\.ckpt"):
        Checkpoint("gs://bkt/run", gcs.config).reader("none.ckpt")


def test_reading_backwards_holds_few_blocks(gcs: Bucket) -> None:
    body = bytes(range(200)) * 500
    gcs.store.put("k", body)
    with Checkpoint("gs://bkt", gcs.with_config(part_bytes=1000).config).reader("k") as file:
        for start in range(99_000, -1, -1000):
            file.seek(start)
            assert file.read(1000) == body[start : start + 1000]
            assert len(file._blocks) <= 12
        with pytest.raises(ValueError, match="before the start"):
            file.seek(-5)


# -- checksums ---------------------------------------------------------------------------------------------------------


def _flip(bucket: Bucket, name: str, at: int) -> None:
    body = bytearray(bucket.store.get(bucket.key(name)))
    body[at] ^= 1
    bucket.store.put(bucket.key(name), body)


@pytest.mark.parametrize("at", [0, 1_000_000, 5_000_000, -1])
def test_changed_byte_is_detected_anywhere(bucket: Bucket, at: int) -> None:
    ckpt = Checkpoint(bucket.uri, bucket.config)
    state = {"w": torch.randn(1500, 1000)}
    ckpt.save(state, "a.ckpt")
    assert torch.equal(ckpt.load("a.ckpt")["w"], state["w"])
    _flip(bucket, "a.ckpt", at)
    with ckpt.reader("a.ckpt") as file, pytest.raises(errors.CorruptError, match=r"a\.ckpt.*not those that were"):
        file.read()


def test_torch_load_of_a_damaged_file_raises_corrupt_error(gcs: Bucket) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    ckpt.save({"w": torch.randn(3_000_000)}, "a.ckpt")
    _flip(gcs, "a.ckpt", 6_000_000)
    for options in ({}, {"mmap": True}):
        with pytest.raises(errors.CorruptError, match=r"gs://bkt/a\.ckpt"):
            ckpt.load("a.ckpt", **options)


def test_truncated_file_is_named(gcs: Bucket) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    ckpt.save({"w": torch.randn(1000)}, "a.ckpt")
    gcs.store.put("a.ckpt", bytes(gcs.store.get("a.ckpt"))[:-100])
    with pytest.raises(errors.CorruptError, match=r"a\.ckpt: the object has [\d,]+ bytes, [\d,]+ were written"):
        ckpt.load("a.ckpt")


def test_truncated_file_of_several_saves_names_the_size_of_the_last(gcs: Bucket) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    for values in (1000, 2000, 3000):
        ckpt.save({"w": torch.randn(values)}, "a.ckpt")
    body = bytes(gcs.store.get("a.ckpt"))
    gcs.store.put("a.ckpt", body[:-100])
    expected = f"a.ckpt: the object has {len(body) - 100:,} bytes, {len(body):,} were written"
    with pytest.raises(errors.CorruptError, match=re.escape(expected)):
        ckpt.load("a.ckpt")


def test_kill_between_checksums_and_file_leaves_the_old_file_intact(bucket: Bucket) -> None:
    """A kill at the worst moment, when the new checksums are stored but the new file is not."""
    ckpt = Checkpoint(bucket.uri, bucket.config)
    store, key = bucket.store, bucket.key("last.ckpt")
    ckpt.save({"n": 1}, "last.ckpt")
    writer = ckpt.writer("last.ckpt")
    writer.write(b"something else")
    add_contents(store, key, read_contents(store, key), writer.checksums())
    assert ckpt.load("last.ckpt") == {"n": 1}
    writer.abort()
    for n in range(2, 8):
        ckpt.save({"n": n}, "last.ckpt")
        assert ckpt.load("last.ckpt") == {"n": n}
    assert len(read_contents(store, key).checksums) == 4


def test_two_concurrent_saves_of_one_name_leave_one_complete_file(bucket: Bucket) -> None:
    ckpt = Checkpoint(bucket.uri, bucket.config)
    for turn in range(6):
        states = [{"n": turn, "w": torch.zeros(10 + 500 * i)} for i in range(2)]
        threads = [threading.Thread(target=ckpt.save, args=(state, "last.ckpt")) for state in states]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ckpt.load("last.ckpt")["n"] == turn


def test_save_that_starts_during_another_keeps_its_checksums(gcs: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    read_etag = verified_reader._read_etag
    earlier = iter([{"n": 1}])

    def save_another_first(store: Store, key: str) -> str | None:
        if not key.endswith(".sums") and (state := next(earlier, None)) is not None:
            ckpt.save(state, "a.ckpt")
        return read_etag(store, key)

    monkeypatch.setattr(verified_reader, "_read_etag", save_another_first)
    ckpt.save({"n": 2}, "a.ckpt")
    assert next(earlier, None) is None
    assert len(read_contents(gcs.store, gcs.key("a.ckpt")).checksums) == 2
    assert ckpt.load("a.ckpt") == {"n": 2}


def test_file_of_another_tool_survives_a_save_that_fails(bucket: Bucket) -> None:
    buffer = io.BytesIO()
    torch.save({"old": 1}, buffer)
    bucket.store.put(bucket.key("a.ckpt"), buffer.getvalue())
    ckpt = Checkpoint(bucket.uri, bucket.config)
    writer = ckpt.writer("a.ckpt")
    writer.write(b"new")
    add_contents(bucket.store, bucket.key("a.ckpt"), writer._before.result(), writer.checksums())
    writer.abort()
    assert ckpt.load("a.ckpt") == {"old": 1}
    ckpt.save({"new": 2}, "a.ckpt")
    assert ckpt.load("a.ckpt") == {"new": 2}


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_anonymous_client_overwrites_a_checkpoint(emulator: Emulator, scheme: str) -> None:
    ckpt = Checkpoint(f"{scheme}://bkt/run", StoreConfig(endpoint=emulator.url, anonymous=True))
    for n in range(3):
        ckpt.save({"n": n}, "a.ckpt")
        assert ckpt.load("a.ckpt") == {"n": n}


def test_service_without_generations_overwrites_a_checkpoint(gcs: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Store.head
    monkeypatch.setattr(Store, "head", lambda store, key: replace(head(store, key), version=None))
    with pytest.raises(errors.UnsupportedError, match="gs://bkt/k: the service gives no generation"):
        gcs.store.put("k", b"new", if_etag=gcs.store.put("k", b"old").etag)
    ckpt = Checkpoint(gcs.uri, gcs.config)
    for n in range(3):
        ckpt.save({"n": n}, "a.ckpt")
        assert ckpt.load("a.ckpt") == {"n": n}


def test_damaged_checksums_do_not_stop_the_next_save(gcs: Bucket) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    ckpt.save({"n": 1}, "a.ckpt")
    _flip(gcs, "a.ckpt.sums", 60)
    with pytest.raises(errors.CorruptError, match=r"a\.ckpt\.sums"):
        ckpt.load("a.ckpt")
    ckpt.save({"n": 2}, "a.ckpt")
    assert ckpt.load("a.ckpt") == {"n": 2}


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=6))
@settings(max_examples=25, deadline=None)
def test_checksums_do_not_depend_on_the_sizes_of_writes(sizes: list[int]) -> None:
    data = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8)
    pieces, whole = (ChecksummedWriter(Store("memory://checksums/"), name) for name in ("pieces", "whole"))
    position = 0
    for size in sizes:
        pieces.write(data[position : position + size])
        position += size
        assert pieces.tell() == position
    whole.write(data)
    sums = pieces.checksums()
    assert sums == whole.checksums()
    for writer in (pieces, whole):
        writer.commit()
        assert bytes(Store("memory://checksums/").get(writer._key)) == data.tobytes()
    assert sums.size == len(data)
    blocks = range(0, len(data), BLOCK_BYTES)
    assert sums.digests == b"".join(digest(data[start : start + BLOCK_BYTES]) for start in blocks)
    digests = BlockDigests(BLOCK_BYTES)
    for start in range(0, len(data), 700_001):
        digests.update(data[start : start + 700_001])
    assert digests.finish() == sums.digests
    assert sums.find_damaged_block(0, sums.digests) is None
    assert Checksums.from_json(json.loads(json.dumps(sums.to_json())), "") == sums
    if len(data):
        at = len(data) // 2
        data[at] ^= 1
        damaged = BlockDigests(BLOCK_BYTES)
        damaged.update(data)
        bad = sums.find_damaged_block(0, damaged.finish())
        assert bad is not None
        assert bad[0] <= at < bad[1]


# -- publishing --------------------------------------------------------------------------------------------------------


def test_exception_keeps_the_previous_file(bucket: Bucket) -> None:
    ckpt = Checkpoint(bucket.uri, bucket.config)
    ckpt.save({"n": 1}, "a.ckpt")
    with pytest.raises(ZeroDivisionError), ckpt.writer("a.ckpt") as file:
        file.write(bytes(20 << 20))
        raise ZeroDivisionError
    assert ckpt.load("a.ckpt") == {"n": 1}


def test_upload_that_fails_inside_torch_save_raises_its_own_error(gcs: Bucket) -> None:
    big = {f"w{i}": torch.zeros(8 << 20) for i in range(4)}
    with pytest.raises(errors.BucketNotFoundError, match="gs://no-such-bucket"):
        Checkpoint("gs://no-such-bucket", gcs.config).save(big, "a.ckpt")
    with pytest.raises(errors.BucketNotFoundError), Checkpoint("gs://no-such-bucket", gcs.config).writer("a") as file:
        torch.save(big, file)
    with pytest.raises(errors.BucketNotFoundError, match="gs://no-such-bucket"):
        save_sharded(big, "gs://no-such-bucket/x", gcs.config)


def test_nothing_is_fetched_twice(gcs: Bucket) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    for name, sizes in {"large": [5_000_000] * 6, "small": [20_000] * 2000}.items():
        ckpt.save({str(i): torch.zeros(size) for i, size in enumerate(sizes)}, name)
        before = ckpt.store.counters.read().bytes_read
        ckpt.load(name)
        read = ckpt.store.counters.read().bytes_read - before
        assert read < 1.02 * ckpt.store.head(name).size + 64_000  # and the checksums


def test_writer_that_is_dropped_publishes_nothing(gcs: Bucket, emulator: Emulator) -> None:
    writer = Checkpoint(gcs.uri, gcs.config).writer("a.ckpt")
    writer.write(bytes(20 << 20))
    with pytest.warns(errors.DiscardedWarning, match=r"gs://bkt/a\.ckpt: 20,971,520 bytes were discarded.*close"):
        del writer
    while emulator.uploads("bkt"):  # a finalizer does not wait
        time.sleep(0.01)
    assert emulator.keys("bkt") == []


def test_close_publishes(bucket: Bucket) -> None:
    ckpt = Checkpoint(bucket.uri, bucket.config)
    for name, tensor in {"small": torch.arange(10), "large": torch.arange(3 << 20)}.items():
        writer = ckpt.writer(name)
        torch.save({"w": tensor}, writer)  # type: ignore[arg-type]
        writer.close()
        writer.close()
        assert torch.equal(ckpt.load(name)["w"], tensor)
        with pytest.raises(ValueError, match=f"{name}: this writer was already closed or aborted"):
            writer.write(b"more")


def test_close_after_a_failed_write_raises_its_error(gcs: Bucket) -> None:
    writer = Checkpoint("gs://no-such-bucket", gcs.config).writer("a")
    with pytest.raises(errors.BucketNotFoundError):
        for _ in range(100):
            writer.write(bytes(8 << 20))
    with pytest.raises(errors.BucketNotFoundError):
        writer.close()
    assert writer.closed


def test_delete_removes_the_file_and_its_checksums(bucket: Bucket) -> None:
    ckpt = Checkpoint(f"{bucket.uri}/run", bucket.config)
    ckpt.save({"n": 1}, "a.ckpt")
    ckpt.delete("a.ckpt")
    assert list(bucket.store.list_pages(bucket.key("run/"))) == []


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
def test_load_accepts_only_weights_by_default(gcs: Bucket, mmap: bool) -> None:
    ckpt = Checkpoint(gcs.uri, gcs.config)
    state = {"w": torch.randn(300, 400), "names": ["a", "b"]}
    ckpt.save(state, "a.ckpt")
    loaded = ckpt.load("a.ckpt", mmap=mmap)
    assert torch.equal(loaded["w"], state["w"])
    loaded["w"] += 1  # a private copy of the mapped file
    ckpt.save({"odd": argparse.Namespace(x=1)}, "odd.ckpt")
    with pytest.raises(errors.UnsafeError, match=r"odd\.ckpt.*Namespace.*weights_only=False"):
        ckpt.load("odd.ckpt", mmap=mmap)
    assert ckpt.load("odd.ckpt", mmap=mmap, weights_only=False)["odd"].x == 1


@pytest.mark.parametrize("body", [b"", b"not a checkpoint", b"hello world, no checkpoint" * 100, bytes(3_000_000)])
def test_files_that_are_no_checkpoint_raise_one_clear_error(gcs: Bucket, body: bytes) -> None:
    gcs.store.put("a.ckpt", body)
    with pytest.raises(errors.CheckpointError, match=r"gs://bkt/a\.ckpt"):
        Checkpoint(gcs.uri, gcs.config).load("a.ckpt")


def test_save_and_load_need_little_memory_besides_the_state(gcs: Bucket) -> None:
    """Measured in a separate process with its own peak memory: 1 GB in parts of 8 MiB."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    process = context.Process(target=_peak_memory, args=(gcs.uri, gcs.config, results))
    process.start()
    save_bytes, load_bytes = results.get(timeout=400)
    process.join()
    assert save_bytes < 256 << 20
    assert load_bytes < (1 << 30) + (256 << 20)  # only the loaded state, once


def _peak_memory(uri: str, config: Any, results: Any) -> None:
    ckpt = Checkpoint(uri, config)
    ckpt.save({"w": torch.ones(1 << 20)}, "warm.ckpt")
    ckpt.load("warm.ckpt")
    state = {f"w{i}": torch.ones(64 << 20) for i in range(4)}
    peaks = []
    for work in (lambda: ckpt.save(state, "big.ckpt"), lambda: ckpt.load("big.ckpt")):
        before = _resident_bytes()
        watch = _Watch()
        result = work()
        peaks.append(watch.peak() - before)
        del result
    results.put(peaks)


class _Watch:
    """Records the peak resident memory while it runs."""

    def __init__(self) -> None:
        self._most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self._most = max(self._most, _resident_bytes())

    def peak(self) -> int:
        self._stop.set()
        self._thread.join()
        return self._most


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_name_of_checksums_is_refused(bucket: Bucket) -> None:
    ckpt = Checkpoint(bucket.uri, bucket.config)
    with pytest.raises(errors.ConfigError, match=r"x\.sums: names that end in \.sums are those of checksums"):
        ckpt.save({"n": 1}, "x.sums")


def test_file_that_is_no_checkpoint_is_not_called_unsafe(gcs: Bucket) -> None:
    gcs.store.put("notes.txt", "à la carte".encode())
    with pytest.raises(errors.CheckpointError, match=r"notes\.txt: not a torch checkpoint"):
        Checkpoint(gcs.uri, gcs.config).load("notes.txt")
