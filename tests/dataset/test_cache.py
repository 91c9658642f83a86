"""The disk cache: bounded, shared, keyed by version, never a reason to fail."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from tests.conftest import Bucket
from voxlane import IterableDataset, MapDataset, errors
from voxlane.dataset import DiskCache
from voxlane.testing import Emulator

Put = Callable[[Bucket, dict[str, bytes]], None]
STYLES = [MapDataset, IterableDataset]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("workers", [0, 2])
def test_second_epoch_makes_no_requests(
    gcs: Bucket, put: Put, emulator: Emulator, tmp_path: Path, style: type[Any], workers: int
) -> None:
    objects = {f"o{i:02d}": bytes([i]) * 1000 * i for i in range(30)}
    put(gcs, objects)
    small_parts = gcs.with_config(part_bytes=10_000)
    dataset = style("gs://bkt/", config=small_parts.config, cache=tmp_path / "cache")
    for expected_gets in (True, False):
        emulator.reset_counters()
        loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=list)
        assert sorted(b for batch in loader for b in batch) == sorted(objects.values())
        assert bool(emulator.counters().get.requests) is expected_gets


def test_new_version_is_a_new_entry(gcs: Bucket, put: Put, tmp_path: Path) -> None:
    put(gcs, {"k": b"old"})
    assert list(MapDataset("gs://bkt/", config=gcs.config, cache=tmp_path)) == [b"old"]
    put(gcs, {"k": b"new"})
    assert list(MapDataset("gs://bkt/", config=gcs.config, cache=tmp_path)) == [b"new"]


def test_limit_holds_and_the_least_recently_used_is_evicted(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=10_000)
    for i in range(9):
        cache.put(f"gs://b/{i}", "v", bytes(1000))
        os.utime(cache._path(f"gs://b/{i}", "v"), (i, i))
    assert cache.get("gs://b/0", "v", 1000) == bytes(1000)  # a use makes it young again
    cache.put("gs://b/9", "v", bytes(2000))
    assert cache.used_bytes <= 10_000
    assert cache.get("gs://b/0", "v", 1000) is not None
    assert cache.get("gs://b/1", "v", 1000) is None
    cache.put("gs://b/huge", "v", bytes(10_001))
    assert cache.get("gs://b/huge", "v", 10_001) is None
    assert cache.used_bytes > 0


def _fill(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    cache = DiskCache(folder, max_bytes=50_000)
    for _ in range(300):
        key = rng.randrange(60)
        size = 1000 + key * 10
        body = cache.get(f"gs://b/{key}", "v", size)
        assert body is None or body == bytes([key]) * size
        if body is None:
            cache.put(f"gs://b/{key}", "v", bytes([key]) * size)


def test_processes_share_the_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_fill, args=(tmp_path, seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert 0 < DiskCache(tmp_path, 50_000).used_bytes <= 50_000


def _fill_endlessly(folder: Path) -> None:
    cache = DiskCache(folder, max_bytes=1 << 20)
    for i in range(10**9):
        cache.put(f"gs://b/{i % 100}", str(i), bytes([i % 256]) * 20_000)


def test_killed_process_leaves_the_cache_intact(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    rng = random.Random(1)
    for _ in range(10):
        process = context.Process(target=_fill_endlessly, args=(tmp_path,))
        process.start()
        time.sleep(0.05 + rng.random() * 0.1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    cache = DiskCache(tmp_path, max_bytes=1 << 20)
    files = [path for _, _, path in cache._files("objects")]
    assert files
    for path in files:
        body = Path(path).read_bytes()
        assert body == body[:1] * 20_000
    cache.put("gs://b/after", "v", b"works")
    assert cache.get("gs://b/after", "v", 5) == b"works"


def test_damaged_file_is_a_miss(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=1 << 20)
    cache.put("gs://b/k", "v", bytes(100))
    Path(cache._path("gs://b/k", "v")).write_bytes(b"short")
    assert cache.get("gs://b/k", "v", 100) is None
    (tmp_path / "lock").write_text("rubbish")
    cache.put("gs://b/k", "v", bytes(100))
    assert cache.get("gs://b/k", "v", 100) == bytes(100)


def test_unusable_folder_is_an_error(gcs: Bucket, put: Put, tmp_path: Path) -> None:
    put(gcs, {"k": b"v"})
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.CacheError, match=r"file/cache: the cache folder cannot be used"):
        list(MapDataset("gs://bkt/", config=gcs.config, cache=tmp_path / "file" / "cache"))


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "tiny"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mounted], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield mounted
    subprocess.run(["umount", mounted], check=True)


def test_full_disk_logs_one_warning_and_reading_continues(
    gcs: Bucket, put: Put, tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    objects = {f"o{i:02d}": bytes([i]) * 20_000 for i in range(20)}
    put(gcs, objects)
    with caplog.at_level(logging.WARNING, "voxlane"):
        assert list(MapDataset("gs://bkt/", config=gcs.config, cache=tiny_disk)) == list(objects.values())
    messages = [r.getMessage() for r in caplog.records]
    assert 1 <= len(messages) <= 64  # at most one per thread that was writing
    assert str(tiny_disk) in messages[0]
    assert "No space left" in messages[0]
