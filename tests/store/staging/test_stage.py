"""Staging copies objects completely and correctly, updates and shares them, and respects its limits."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Bucket
from tests.store.staging.killed import stage_and_signal
from voxlane.errors import (
    CacheError,
    ChangedError,
    ConfigError,
    NoRoomError,
    OverQuotaError,
    StoreError,
    TooLargeError,
)
from voxlane.store import Store, StoreConfig
from voxlane.store.staging import SourceListing, StagingProgress, list_copies, list_source, local_store, remove, stage
from voxlane.store.staging.copying import ObjectCopier
from voxlane.store.staging.local_store import (
    MANIFEST,
    STAGED,
    CopyOrigin,
    StagingRoot,
    hash_file,
    read_manifest,
    write_manifest,
)
from voxlane.testing import Emulator, Faults, synthetic

BIG = 20 << 20
"""Size in bytes of an object of three parts."""


def content(name: str, size: int) -> bytes:
    return synthetic(name, size)


OBJECTS = {
    "a.bin": content("a", 100_000),
    "big.bin": content("big", BIG),
    "deep/er/b.bin": content("b", 5),
    "deep/empty": b"",
    "deep/same.bin": content("a", 100_000),
    "with space & ünïcode.txt": b"text",
}


def fill(bucket: Bucket, folder: str = "src", objects: dict[str, bytes] = OBJECTS) -> str:
    store = bucket.store
    for name, body in objects.items():
        store.put(bucket.key(f"{folder}/{name}"), body)
    return f"{bucket.uri}/{folder}"


def read_files(folder: str | Path) -> dict[str, bytes]:
    """Return the content of every object of a copy."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".voxlane/")}


def count_requests(emulator: Emulator) -> dict[str, int]:
    """Return the number of requests of each kind."""
    counters = emulator.counters().to_json().items()
    return {kind: count["requests"] for kind, count in counters if isinstance(count, dict) and count.get("requests")}


def list_blobs(root: Path) -> list[Path]:
    return [path for path in (root / "objects").rglob("*") if path.is_file()]


@pytest.fixture(params=["gcs", "s3", "azure", "folder"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    bucket: Bucket = request.getfixturevalue(request.param)
    return bucket


def test_copy_holds_the_objects_of_the_source(bucket: Bucket, tmp_path: Path) -> None:
    source = fill(bucket)
    done = stage(source, tmp_path / "root", config=bucket.config)
    assert read_files(done.folder) == OBJECTS
    assert (done.objects, done.copied, done.shared, done.removed) == (6, 6, 0, 0)
    assert done.copied_bytes == done.total_bytes == sum(map(len, OBJECTS.values()))
    assert len(list_blobs(tmp_path / "root")) == 5  # two have the same content
    assert not list((tmp_path / "root" / "partial").iterdir())
    entries = read_manifest(done.folder)[1]
    assert {name: entry.digest for name, entry in entries.items()} == {
        name: hash_file(f"{done.folder}/{name}") for name in OBJECTS
    }
    again = stage(f"{source}/", tmp_path / "root", config=bucket.config)
    assert (again.copied, again.folder, again.version) == (0, done.folder, done.version)
    assert stage(source, tmp_path / "root", config=bucket.config, verify=True).copied == 0


def test_second_run_reads_no_objects(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = fill(gcs)
    stage(source, tmp_path, config=gcs.config)
    emulator.reset_counters()
    stage(source, tmp_path, config=gcs.config)
    assert count_requests(emulator) == {"list": 1}


def test_changes_of_the_source_are_copied(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs)
    first = stage(source, tmp_path, config=gcs.config)
    store = gcs.store
    store.put("src/a.bin", b"other")
    store.put("src/deep/new", b"new")
    store.delete(["src/deep/er/b.bin", "src/big.bin"])
    done = stage(source, tmp_path, config=gcs.config)
    assert (done.copied, done.removed) == (2, 3)
    assert done.version != first.version
    expected = {**OBJECTS, "a.bin": b"other", "deep/new": b"new"}
    del expected["deep/er/b.bin"], expected["big.bin"]
    assert read_files(done.folder) == expected
    assert not Path(done.folder, "deep/er").exists()
    assert max(path.stat().st_size for path in list_blobs(tmp_path)) < BIG
    # A file becomes a folder, and a folder a file.
    store.delete(["src/a.bin", "src/deep/new", "src/deep/empty", "src/deep/same.bin"])
    store.put("src/a.bin/inner", b"1")
    store.put("src/deep", b"2")
    stage(source, tmp_path, config=gcs.config)
    assert read_files(done.folder) == {"a.bin/inner": b"1", "deep": b"2", "with space & ünïcode.txt": b"text"}


def test_copies_share_contents(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = fill(gcs)
    first = stage(source, tmp_path, config=gcs.config)
    emulator.reset_counters()
    second = stage(f"{gcs.uri}/src/deep", tmp_path, config=gcs.config)
    assert (second.copied, second.shared) == (0, 3)
    assert count_requests(emulator) == {"list": 1}
    fill(gcs, "other", {"x": OBJECTS["big.bin"], "y": b"y"})
    third = stage(f"{gcs.uri}/other", tmp_path, config=gcs.config)
    assert (third.copied, third.shared) == (2, 0)  # only the bytes of the other object show that it is the same
    assert os.path.samefile(f"{third.folder}/x", f"{first.folder}/big.bin")
    size = sum(path.stat().st_size for path in list_blobs(tmp_path))
    assert remove(tmp_path, second.name) == 0
    assert read_files(first.folder) == OBJECTS
    assert remove(tmp_path, first.name) == size - BIG - 1
    assert remove(tmp_path, first.name) == 0
    assert read_files(third.folder) == {"x": OBJECTS["big.bin"], "y": b"y"}
    assert remove(tmp_path, third.name) == BIG + 1
    assert not list_blobs(tmp_path)


def test_same_uri_on_another_server_is_another_source(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = fill(gcs, objects={"a": b"1"})
    stage(source, tmp_path, name="one", config=gcs.config)
    other = gcs.with_config(endpoint=emulator.url.replace("127.0.0.1", "localhost"))
    assert stage(source, tmp_path, name="two", config=other.config).copied == 1


def test_name_can_be_reused_for_another_source(gcs: Bucket, tmp_path: Path) -> None:
    fill(gcs, "one", {"a": b"1", "b": b"2"})
    fill(gcs, "two", {"a": b"3"})
    stage(f"{gcs.uri}/one", tmp_path, name="data", config=gcs.config)
    done = stage(f"{gcs.uri}/two", tmp_path, name="data", config=gcs.config)
    assert read_files(done.folder) == {"a": b"3"}
    assert [copy.source for copy in list_copies(tmp_path)] == ["gs://bkt/two"]
    mounted = stage(f"{gcs.uri}/two", tmp_path, name="nfs", config=gcs.config, origin="nfs://server/export/two/")
    assert mounted.shared == 0
    assert list_copies(tmp_path)[1].source == "nfs://server/export/two"


def test_copies_survive_server_faults(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = fill(gcs, objects={**OBJECTS, **{f"n/{i}": content(f"{i}", 300_000) for i in range(40)}})
    emulator.set_faults(Faults(error_rate=0.2, cut_rate=0.2, truncate_rate=0.2, kinds=("get",), seed=3))
    reports: list[StagingProgress] = []
    done = stage(source, tmp_path, config=gcs.config, progress=reports.append)
    assert len(read_files(done.folder)) == 46
    assert all(read_files(done.folder)[name] == body for name, body in OBJECTS.items())
    assert reports[-1] == StagingProgress("copying", 46, 46, done.total_bytes, done.total_bytes)
    assert all(report.bytes <= report.total_bytes for report in reports)


def test_object_that_changes_during_the_copy_is_named_and_the_others_are_kept(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs, objects={f"{i:03}": content(f"{i}", 1000) for i in range(100)})
    before = list_source(source, gcs.config)
    gcs.store.put("src/050", b"x")
    with pytest.raises(ChangedError, match=r"gs://bkt/src/050: the object was changed or deleted"):
        stage(source, tmp_path, config=gcs.config, expected=before)
    (copy,) = list_copies(tmp_path)
    assert not copy.complete
    assert copy.objects > 30
    gcs.store.delete("src/050")
    with pytest.raises(ChangedError, match="changed or deleted"):
        stage(source, tmp_path, config=gcs.config, expected=before)
    done = stage(source, tmp_path, config=gcs.config)
    assert done.copied + copy.objects <= 99 + 1
    assert len(read_files(done.folder)) == 99


def test_without_etags_sizes_are_compared(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs, objects={"a": b"12345"})
    blind = SourceListing.of(source, [("a", 5, None)])
    assert stage(source, tmp_path, config=gcs.config, expected=blind).copied == 1
    assert stage(source, tmp_path, config=gcs.config, expected=blind).copied == 0
    longer = SourceListing.of(source, [("a", 4, None)])
    with pytest.raises(ChangedError):
        stage(source, tmp_path, config=gcs.config, expected=longer)


class Damaging(Store):
    """A store that damages the bytes of the first `times` reads, differently each time unless `same`."""

    times, same = 1, False

    def get_chunks(
        self, key: str, start: int, stop: int, receive: Callable[[int, Any], None], *, etag: str | None = None
    ) -> int:
        damage = self.times > 0
        self.times -= 1

        def damaged(position: int, chunk: Any) -> None:
            body = bytearray(chunk)
            if damage and position == start:
                body[0] ^= 1 if self.same else 1 + self.times % 200
            receive(position, bytes(body))

        return super().get_chunks(key, start, stop, damaged, etag=etag)


@pytest.mark.parametrize("size", [1000, BIG])
@pytest.mark.parametrize(("times", "same", "matches"), [(1, False, True), (1000, False, False), (1000, True, None)])
def test_bytes_that_do_not_match_the_checksum_of_the_server(
    gcs: Bucket, tmp_path: Path, size: int, times: int, same: bool, matches: bool | None
) -> None:
    """Damaged once: read again. Always damaged: refused. The same bytes twice: the etag is no checksum."""
    body = content("x", size)
    listing = list_source(fill(gcs, objects={"x": body}), gcs.config)
    store = Damaging(gcs.uri, gcs.config)
    store.times, store.same = times, same
    root, folder = StagingRoot(tmp_path), f"{tmp_path}/datasets/x"
    with root.lock():
        root.make_folder(f"{folder}/.voxlane")
        write_manifest(folder, CopyOrigin("gs://bkt/src", None), [])
        copier = ObjectCopier(store, "src/", root, folder, check_md5=True)
        if matches is False:
            with pytest.raises(StoreError, match="none matches the checksum"):
                copier.run(listing.objects, lambda *_: None)
            assert not read_files(folder)
            assert not list_blobs(tmp_path)
            return
        copier.run(listing.objects, lambda *_: None)
    assert (Path(folder, "x").read_bytes() == body) is bool(matches)


def test_damaged_files_are_copied_again(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs)
    done = stage(source, tmp_path, config=gcs.config)
    victim = Path(done.folder, "big.bin")
    before = victim.stat()
    victim.chmod(0o644)
    with victim.open("r+b") as file:
        file.seek(9 << 20)
        file.write(b"!")
    assert stage(source, tmp_path, config=gcs.config).copied == 1  # its modification time differs
    os.utime(victim, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert stage(source, tmp_path, config=gcs.config).copied == 0  # it is only read and found to be intact
    entry = read_manifest(done.folder)[1]["big.bin"]
    victim.chmod(0o644)
    with victim.open("r+b") as file:
        file.write(b"!!!")
    os.utime(victim, ns=(entry.mtime, entry.mtime))
    assert stage(source, tmp_path, config=gcs.config).copied == 0  # size and time are unchanged
    assert stage(source, tmp_path, config=gcs.config, verify=True).copied == 1
    assert read_files(done.folder) == OBJECTS


def test_contents_with_the_same_digest_are_distinguished(
    gcs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("voxlane.store.staging.copying.combine_checksums", lambda _: "0" * 32)
    done = stage(fill(gcs, objects={"a": b"1", "b": b"2", "c": b"2"}), tmp_path, config=gcs.config)
    assert read_files(done.folder) == {"a": b"1", "b": b"2", "c": b"2"}


def test_content_with_the_maximum_number_of_links(gcs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def few(source: str, target: str) -> None:
        if os.stat(source).st_nlink >= 3:
            raise OSError(errno.EMLINK, "Too many links")
        link(source, target)

    monkeypatch.setattr(os, "link", few)
    objects = {f"{i}": b"same" for i in range(9)}
    done = stage(fill(gcs, objects=objects), tmp_path, config=gcs.config)
    assert read_files(done.folder) == objects
    stage(fill(gcs, objects=objects), tmp_path, name="other", config=gcs.config)
    assert read_files(tmp_path / "datasets" / "other") == objects


def test_only_the_owner_can_read_a_root_and_anyone_can_read_a_copy(gcs: Bucket, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        done = stage(fill(gcs), tmp_path / "root", config=gcs.config)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "root").rglob("*")}
    assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == 0o700
    inside = {path: mode for path, mode in modes.items() if path.is_relative_to(done.folder)}
    assert {mode for path, mode in inside.items() if path.is_dir()} == {0o755}
    assert {mode for path, mode in inside.items() if path.is_file() and ".voxlane" not in path.parts} == {0o444}
    assert {mode for path, mode in inside.items() if path.is_file() and ".voxlane" in path.parts} == {0o644}
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine" / "file").touch()
    stage(fill(gcs), tmp_path / "mine", config=gcs.config)
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o755  # the mode of an existing folder does not change
    assert stat.S_IMODE((tmp_path / "mine" / "datasets").stat().st_mode) == 0o700


# -- limits ------------------------------------------------------------------------------------------------------------


def test_source_larger_than_the_capacity_is_not_copied(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs)
    with pytest.raises(TooLargeError, match=r"gs://bkt/src: the source has 20\.2 MiB, more than .* 1\.0 MiB"):
        stage(source, tmp_path / "root", config=gcs.config, capacity_bytes=1 << 20)
    assert not (tmp_path / "root").exists()
    total = list_source(source, gcs.config).total_bytes
    assert stage(source, tmp_path / "root", config=gcs.config, capacity_bytes=total).copied == 6


def test_files_of_any_size_are_copied_exactly(gcs: Bucket, tmp_path: Path) -> None:
    """Cover buffered and direct writes, with and without padding of the last block."""
    sizes = (1, 4096, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 1_000_000, 1 << 20, (8 << 20) + 1, (8 << 20) + 4096)
    objects = {str(size): content(str(size), size) for size in sizes}
    done = stage(fill(gcs, objects=objects), tmp_path, config=gcs.config)
    assert read_files(done.folder) == objects
    assert stage(f"{gcs.uri}/src", tmp_path, config=gcs.config, verify=True).copied == 0


def test_full_disk_keeps_complete_objects(gcs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {f"{i:03}": content(f"{i}", 10_000) for i in range(200)}
    source = fill(gcs, objects=objects)
    write, left = os.pwrite, [500_000]

    def full(handle: int, body: Any, offset: int) -> int:
        left[0] -= len(body)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, body, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(NoRoomError, match="the disk became full") as raised:
            stage(source, tmp_path, config=gcs.config)
    assert raised.value.lacking_bytes >= 1
    assert not list((tmp_path / "partial").iterdir())
    (copy,) = list_copies(tmp_path)
    assert (copy.complete, copy.objects) == (False, 50)
    done = stage(source, tmp_path, config=gcs.config)
    assert done.copied == 150
    assert read_files(done.folder) == objects


def test_quota_counts_everything_below_the_root_once(gcs: Bucket, tmp_path: Path) -> None:
    objects = {name: content("same", 1 << 20) for name in "ab"}  # one content, linked twice
    done = stage(fill(gcs, objects=objects), tmp_path, config=gcs.config, name="one")
    used = StagingRoot(tmp_path).measure_bytes()
    assert 1 << 20 <= used < 2 << 20
    other = fill(gcs, "other", {"c": content("c", 1 << 20)})
    with pytest.raises(OverQuotaError, match=r"other: the 1\.0 MiB still to be copied exceed the quota of") as raised:
        stage(other, tmp_path, config=gcs.config, name="two", quota_bytes=used + (1 << 20) - 4096)
    assert raised.value.lacking_bytes >= 4096
    assert [copy.name for copy in list_copies(tmp_path)] == ["one"]
    assert stage(other, tmp_path, config=gcs.config, name="two", quota_bytes=used + (2 << 20)).copied == 1
    # What is there already stays usable, even if the quota is lowered.
    assert stage(f"{gcs.uri}/src", tmp_path, config=gcs.config, name="one", quota_bytes=1).folder == done.folder


def test_disk_keeps_room_for_files(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs, objects={"a": b"1", "b": b"2"})
    free = os.statvfs(tmp_path).f_favail
    if not free:
        pytest.skip("this file system does not limit the number of files")
    with pytest.raises(NoRoomError, match=r"more files, but 2 are still to be copied and \d+ must stay free"):
        stage(source, tmp_path, config=gcs.config, reserve_files=free + 1000)
    assert list_copies(tmp_path) == []


def test_copy_stops_when_other_programs_use_up_the_reserve(
    gcs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node, the kubelet would evict pods next."""
    source = fill(gcs)
    usage = shutil.disk_usage(tmp_path)
    free = itertools.chain([2 << 30], itertools.repeat(100 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=next(free)))
    with pytest.raises(NoRoomError, match=r"other programs fill the disk: 100\.0 MiB are free, 1\.0 GiB must be"):
        stage(source, tmp_path, config=gcs.config, reserve_bytes=1 << 30)
    monkeypatch.undo()
    assert stage(source, tmp_path, config=gcs.config).objects == len(OBJECTS)


def test_unusable_folders_and_names_are_refused(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs, objects={"a": b"1"})
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="cannot use the folder: Not a directory"):
        stage(source, tmp_path / "file" / "root", config=gcs.config)
    for name in ("..", "a/b", "", "x" * 300, ".hidden"):
        with pytest.raises(ConfigError, match="is not a valid name for a copy"):
            remove(tmp_path, name)
    with pytest.raises(ConfigError, match="is not a valid name for a copy"):
        stage(source, tmp_path / "root", name="../out", config=gcs.config)
    assert list_copies(tmp_path / "nowhere") == []
    assert remove(tmp_path / "nowhere", "a") == 0
    assert not (tmp_path / "nowhere").exists()


def test_exception_from_progress_stops_the_copy(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = fill(gcs, objects={f"{i:03}": content(f"{i}", 10_000) for i in range(100)})
    emulator.set_faults(Faults(latency_s=0.1, kinds=("get",)))

    def stop(now: StagingProgress) -> None:
        if now.activity == "copying":
            raise TimeoutError("too slow")

    with pytest.raises(TimeoutError, match="too slow"):
        stage(source, tmp_path, config=gcs.config, progress=stop)
    emulator.clear_faults()
    assert stage(source, tmp_path, config=gcs.config).copied < 100


# -- existing copies ---------------------------------------------------------------------------------------------------


def test_copies_report_their_last_use(gcs: Bucket, tmp_path: Path) -> None:
    for number, name in enumerate(("first", "second", "third"), 1):
        stage(fill(gcs, name, {"own": content(name, 10_000)}), tmp_path, name=name, config=gcs.config)
        os.utime(tmp_path / "datasets" / name / ".voxlane" / "used", (number, number))
    used = [(copy.name, copy.last_used.timestamp()) for copy in list_copies(tmp_path)]
    assert used == [("first", 1), ("second", 2), ("third", 3)]
    begin = time.time() - 1
    local_store.mark_used(str(tmp_path / "datasets" / "first"))
    assert list_copies(tmp_path)[0].last_used.timestamp() > begin


def test_copies_are_listed_with_their_records(gcs: Bucket, tmp_path: Path) -> None:
    begin = time.time() - 1
    done = stage(fill(gcs), tmp_path, name="data", config=gcs.config)
    (copy,) = list_copies(tmp_path)
    assert (copy.name, copy.folder, copy.source) == ("data", done.folder, "gs://bkt/src")
    assert (copy.objects, copy.bytes, copy.complete, copy.version) == (6, done.total_bytes, True, done.version)
    assert begin < copy.last_used.timestamp() < time.time() + 1
    Path(done.folder, STAGED).unlink()
    assert not list_copies(tmp_path)[0].complete
    assert list_copies(tmp_path)[0].objects == 6
    Path(done.folder, MANIFEST).write_text("garbage")
    assert list_copies(tmp_path)[0].objects == 0
    assert stage(fill(gcs), tmp_path, name="data", config=gcs.config).copied == 6


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Any]:
    """Start processes that stage, and kill them after the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store.staging.killed"])
    started: list[Any] = []

    def run(source: str, root: Path, config: StoreConfig) -> Any:
        """Return the process once it has begun to stage."""
        begun = context.Event()
        started.append(context.Process(target=stage_and_signal, args=(source, root, config, begun)))
        started[-1].start()
        assert begun.wait(60)
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.join()
        process.close()


def test_processes_take_turns(gcs: Bucket, emulator: Emulator, tmp_path: Path, start: Any) -> None:
    source = fill(gcs, objects={f"{i:03}": content(f"{i}", 1000) for i in range(50)})
    emulator.set_faults(Faults(latency_s=3, kinds=("get",)))  # leaves a busy machine time to begin the second copy
    listing = list_source(source, gcs.config)
    other = start(source, tmp_path, gcs.config)
    activities: list[str] = []

    def record(progress: StagingProgress) -> None:
        if not activities:
            emulator.clear_faults()
        activities.append(progress.activity)

    again = stage(source, tmp_path, name="data", config=gcs.config, expected=listing, progress=record)
    assert again.copied == 0
    assert activities[0] == "waiting"
    other.join()
    assert other.exitcode == 0


def test_copy_resumes_after_a_kill_at_any_moment(gcs: Bucket, emulator: Emulator, tmp_path: Path, start: Any) -> None:
    objects = {f"{i % 7}/{i:03}": content(f"{i}", 40_000 + i) for i in range(400)}
    objects |= {"big/0": content("big", BIG), "big/1": content("bigger", BIG + 1), "twin": content("0", 40_000)}
    source = fill(gcs, objects=objects)
    emulator.set_faults(Faults(latency_s=0.03, jitter_s=0.06, kinds=("get",)))
    complete = kills = 0
    for kill in range(20):
        process = start(source, tmp_path, gcs.config)
        time.sleep(0.01 * ((kill * 7) % 20))
        process.kill()
        process.join()
        kills += process.exitcode != 0
        _, entries = read_manifest(f"{tmp_path}/datasets/data")
        assert len(entries) >= complete  # no complete object is lost
        complete = len(entries)
        for name in entries:
            assert Path(tmp_path, "datasets/data", name).read_bytes() == objects[name]
        assert (complete == len(objects)) or not Path(tmp_path, "datasets/data", STAGED).exists()
    assert kills > 5
    emulator.clear_faults()
    done = stage(source, tmp_path, name="data", config=gcs.config)
    assert read_files(done.folder) == objects
    assert list_copies(tmp_path)[0].complete
    assert len(list_blobs(tmp_path)) == len(objects) - 1
    assert sum(path.stat().st_nlink for path in list_blobs(tmp_path)) == 2 * len(list_blobs(tmp_path)) + 1
    assert not list((tmp_path / "partial").iterdir())


def test_killed_removal_leaves_nothing_behind(gcs: Bucket, tmp_path: Path) -> None:
    done = stage(fill(gcs), tmp_path, name="data", config=gcs.config)
    shutil.move(done.folder, tmp_path / "partial" / "removed")  # as a kill during the removal leaves it
    stage(fill(gcs, "other", {"a": b"1"}), tmp_path, name="other", config=gcs.config)
    remove(tmp_path, "other")
    assert not list_blobs(tmp_path)
    assert not list((tmp_path / "partial").iterdir())


def test_keys_that_no_file_can_have_are_staged_inside_the_folder(
    gcs: Bucket, emulator: Emulator, tmp_path: Path
) -> None:
    """A key such as ../../etc/x must not leave the folder, and must not fail the copy of the others."""
    keys = [
        "../../../escaped",
        "/etc/passwd",
        "a//b",
        "a/./b",
        "e",
        "e/x",
        "full/",
        "tab\tline\n",
        "é",
        "e\u0301",
        "%41",
    ]
    contents = {f"src/{key}": key.encode() for key in keys}
    emulator.put_many("bkt", {**contents, "src/todo/": b""})
    root = tmp_path / "root" / "staged"
    report = stage("gs://bkt/src", root, config=gcs.config, reserve_bytes=0)
    assert (report.objects, report.copied) == (len(keys), len(keys))
    entries = read_manifest(report.folder)[1]
    assert {f"src/{name}": Path(report.folder, entry.file).read_bytes() for name, entry in entries.items()} == contents
    files = {path for path in tmp_path.rglob("*") if path.is_file() and f"{root}/objects" not in str(path)}
    inside = {path for path in files if path.is_relative_to(report.folder)}
    assert {path.name for path in files - inside} == {"lock"}
    assert stage("gs://bkt/src", root, config=gcs.config, reserve_bytes=0, verify=True).copied == 0
    emulator.delete("bkt", "src/e/x")
    again = stage("gs://bkt/src", root, config=gcs.config, reserve_bytes=0)
    assert (again.copied, again.objects) == (1, len(keys) - 1)
    assert Path(again.folder, "e").read_bytes() == b"e"
