"""Copies of sources: whole, right, up to date, shared, bounded."""

from __future__ import annotations

import errno
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
from tests.staging.killed import stage_and_tell
from voxlane.errors import CacheError, ChangedError, ConfigError, NoRoomError, StoreError, TooLargeError
from voxlane.staging import Progress, Survey, evict, remove, stage, staged, survey, touch
from voxlane.staging.copying import Copying
from voxlane.staging.shelf import MANIFEST, STAGED, digest_of_file, read_manifest
from voxlane.store import Store, StoreConfig
from voxlane.testing import Emulator, Faults

BIG = 20 << 20
"""Bytes of an object of three parts."""


def content(name: str, size: int) -> bytes:
    return Emulator.synthetic(name, size)


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


def found(folder: str | Path) -> dict[str, bytes]:
    """Every object's file below a copy."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".voxlane/")}


def requests(emulator: Emulator) -> dict[str, int]:
    """How many there were of each kind."""
    told = emulator.counters().to_json().items()
    return {kind: count["requests"] for kind, count in told if isinstance(count, dict) and count.get("requests")}


def blobs(root: Path) -> list[Path]:
    return [path for path in (root / "objects").rglob("*") if path.is_file()]


@pytest.fixture(params=["gcs", "s3", "azure", "folder"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    made: Bucket = request.getfixturevalue(request.param)
    return made


def test_a_copy_holds_what_the_source_holds(bucket: Bucket, tmp_path: Path) -> None:
    source = fill(bucket)
    done = stage(source, tmp_path / "root", config=bucket.config)
    assert found(done.folder) == OBJECTS
    assert (done.objects, done.copied, done.shared, done.removed) == (6, 6, 0, 0)
    assert done.copied_bytes == done.total_bytes == sum(map(len, OBJECTS.values()))
    assert len(blobs(tmp_path / "root")) == 5  # two are the same
    assert not list((tmp_path / "root" / "partial").iterdir())
    lines = read_manifest(done.folder)[1]
    assert {name: line.digest for name, line in lines.items()} == {
        name: digest_of_file(f"{done.folder}/{name}") for name in OBJECTS
    }
    again = stage(f"{source}/", tmp_path / "root", config=bucket.config)
    assert (again.copied, again.folder, again.version) == (0, done.folder, done.version)
    assert stage(source, tmp_path / "root", config=bucket.config, verify=True).copied == 0


def test_a_second_run_reads_nothing(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = fill(gcs)
    stage(source, tmp_path, config=gcs.config)
    emulator.reset_counters()
    stage(source, tmp_path, config=gcs.config)
    assert requests(emulator) == {"list": 1}


def test_what_changed_at_the_source_changes_here(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs)
    first = stage(source, tmp_path, config=gcs.config)
    store = gcs.store
    store.put("src/a.bin", b"other")
    store.put("src/deep/new", b"new")
    store.delete(["src/deep/er/b.bin", "src/big.bin"])
    done = stage(source, tmp_path, config=gcs.config)
    assert (done.copied, done.removed) == (2, 3)
    assert done.version != first.version
    wanted = {**OBJECTS, "a.bin": b"other", "deep/new": b"new"}
    del wanted["deep/er/b.bin"], wanted["big.bin"]
    assert found(done.folder) == wanted
    assert not Path(done.folder, "deep/er").exists()
    assert max(path.stat().st_size for path in blobs(tmp_path)) < BIG
    # A file becomes a folder, and a folder a file.
    store.delete(["src/a.bin", "src/deep/new", "src/deep/empty", "src/deep/same.bin"])
    store.put("src/a.bin/inner", b"1")
    store.put("src/deep", b"2")
    stage(source, tmp_path, config=gcs.config)
    assert found(done.folder) == {"a.bin/inner": b"1", "deep": b"2", "with space & ünïcode.txt": b"text"}


def test_copies_share_contents(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = fill(gcs)
    one = stage(source, tmp_path, config=gcs.config)
    emulator.reset_counters()
    two = stage(f"{gcs.uri}/src/deep", tmp_path, config=gcs.config)
    assert (two.copied, two.shared) == (0, 3)
    assert requests(emulator) == {"list": 1}
    fill(gcs, "other", {"x": OBJECTS["big.bin"], "y": b"y"})
    three = stage(f"{gcs.uri}/other", tmp_path, config=gcs.config)
    assert (three.copied, three.shared) == (2, 0)  # another object: only its bytes tell that it is the same
    assert os.path.samefile(f"{three.folder}/x", f"{one.folder}/big.bin")
    size = sum(path.stat().st_size for path in blobs(tmp_path))
    assert remove(tmp_path, two.name) == 0
    assert found(one.folder) == OBJECTS
    assert remove(tmp_path, one.name) == size - BIG - 1
    assert remove(tmp_path, one.name) == 0
    assert found(three.folder) == {"x": OBJECTS["big.bin"], "y": b"y"}
    assert remove(tmp_path, three.name) == BIG + 1
    assert not blobs(tmp_path)


def test_the_same_uri_on_another_server_is_another_source(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = fill(gcs, objects={"a": b"1"})
    stage(source, tmp_path, name="one", config=gcs.config)
    other = gcs.with_config(endpoint=emulator.url.replace("127.0.0.1", "localhost"))
    assert stage(source, tmp_path, name="two", config=other.config).copied == 1


def test_a_name_can_be_given_to_another_source(gcs: Bucket, tmp_path: Path) -> None:
    fill(gcs, "one", {"a": b"1", "b": b"2"})
    fill(gcs, "two", {"a": b"3"})
    stage(f"{gcs.uri}/one", tmp_path, name="data", config=gcs.config)
    done = stage(f"{gcs.uri}/two", tmp_path, name="data", config=gcs.config)
    assert found(done.folder) == {"a": b"3"}
    assert [one.source for one in staged(tmp_path)] == ["gs://bkt/two"]
    mounted = stage(f"{gcs.uri}/two", tmp_path, name="nfs", config=gcs.config, origin="nfs://server/export/two/")
    assert mounted.shared == 0
    assert staged(tmp_path)[1].source == "nfs://server/export/two"


def test_through_failures_of_the_server(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = fill(gcs, objects={**OBJECTS, **{f"n/{i}": content(f"{i}", 300_000) for i in range(40)}})
    emulator.set_faults(Faults(error_rate=0.2, cut_rate=0.2, truncate_rate=0.2, kinds=("get",), seed=3))
    seen: list[Progress] = []
    done = stage(source, tmp_path, config=gcs.config, progress=seen.append)
    assert len(found(done.folder)) == 46
    assert all(found(done.folder)[name] == body for name, body in OBJECTS.items())
    assert seen[-1] == Progress("copying", 46, 46, done.total_bytes, done.total_bytes)
    assert all(one.bytes <= one.total_bytes for one in seen)


def test_an_object_that_changes_meanwhile_is_named_and_the_rest_is_kept(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs, objects={f"{i:03}": content(f"{i}", 1000) for i in range(100)})
    before = survey(source, gcs.config)
    gcs.store.put("src/050", b"x")
    with pytest.raises(ChangedError, match=r"gs://bkt/src/050: the object changed or went away"):
        stage(source, tmp_path, config=gcs.config, expected=before)
    (one,) = staged(tmp_path)
    assert not one.whole
    assert one.objects > 30
    gcs.store.delete("src/050")
    with pytest.raises(ChangedError, match="changed or went away"):
        stage(source, tmp_path, config=gcs.config, expected=before)
    done = stage(source, tmp_path, config=gcs.config)
    assert done.copied + one.objects <= 99 + 1
    assert len(found(done.folder)) == 99


def test_without_versions_the_size_tells(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs, objects={"a": b"12345"})
    blind = Survey.of(source, [("a", 5, None)])
    assert stage(source, tmp_path, config=gcs.config, expected=blind).copied == 1
    assert stage(source, tmp_path, config=gcs.config, expected=blind).copied == 0
    longer = Survey.of(source, [("a", 4, None)])
    with pytest.raises(ChangedError):
        stage(source, tmp_path, config=gcs.config, expected=longer)


class Damaging(Store):
    """A store on whose way bytes are damaged in the first `times` readings: otherwise each time, unless `same`."""

    times, same = 1, False

    def get_chunks(
        self, key: str, start: int, stop: int, take: Callable[[int, Any], None], *, etag: str | None = None
    ) -> int:
        damage = self.times > 0
        self.times -= 1

        def damaged(place: int, chunk: Any) -> None:
            body = bytearray(chunk)
            if damage and place == start:
                body[0] ^= 1 if self.same else 1 + self.times % 200
            take(place, bytes(body))

        return super().get_chunks(key, start, stop, damaged, etag=etag)


@pytest.mark.parametrize("size", [1000, BIG])
@pytest.mark.parametrize(("times", "same", "fits"), [(1, False, True), (1000, False, False), (1000, True, None)])
def test_bytes_that_do_not_fit_the_servers_checksum(
    gcs: Bucket, tmp_path: Path, size: int, times: int, same: bool, fits: bool | None
) -> None:
    """Damaged once: read again. Damaged always: refused. The same bytes twice: the etag is no checksum."""
    from voxlane.staging import shelf as shelves

    body = content("x", size)
    found_ = survey(fill(gcs, objects={"x": body}), gcs.config)
    store = Damaging(gcs.uri, gcs.config)
    store.times, store.same = times, same
    shelf, folder = shelves.Shelf(tmp_path), f"{tmp_path}/datasets/x"
    with shelf.alone():
        shelf.make_folder(f"{folder}/.voxlane")
        shelves.write_manifest(folder, shelves.Origin("gs://bkt/src", None), [])
        copying = Copying(store, "src/", shelf, folder, md5=True)
        if fits is False:
            with pytest.raises(StoreError, match="none fits its checksum"):
                copying.run(found_.objects, lambda *_: None)
            assert not found(folder)
            assert not blobs(tmp_path)
            return
        copying.run(found_.objects, lambda *_: None)
    assert (Path(folder, "x").read_bytes() == body) is bool(fits)


def test_damage_on_the_disk_is_found(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs)
    done = stage(source, tmp_path, config=gcs.config)
    victim = Path(done.folder, "big.bin")
    kept = victim.stat()
    victim.chmod(0o644)
    with victim.open("r+b") as file:
        file.seek(9 << 20)
        file.write(b"!")
    assert stage(source, tmp_path, config=gcs.config).copied == 1  # its time tells
    os.utime(victim, ns=(kept.st_mtime_ns, kept.st_mtime_ns))
    assert stage(source, tmp_path, config=gcs.config).copied == 0  # only read, to be sure: its bytes are right
    line = read_manifest(done.folder)[1]["big.bin"]
    victim.chmod(0o644)
    with victim.open("r+b") as file:
        file.write(b"!!!")
    os.utime(victim, ns=(line.mtime, line.mtime))
    assert stage(source, tmp_path, config=gcs.config).copied == 0  # nothing tells
    assert stage(source, tmp_path, config=gcs.config, verify=True).copied == 1
    assert found(done.folder) == OBJECTS


def test_two_contents_with_one_digest_are_told_apart(
    gcs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("voxlane.staging.copying.digest_of", lambda _: "0" * 32)
    done = stage(fill(gcs, objects={"a": b"1", "b": b"2", "c": b"2"}), tmp_path, config=gcs.config)
    assert found(done.folder) == {"a": b"1", "b": b"2", "c": b"2"}


def test_a_content_with_as_many_links_as_there_can_be(
    gcs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def few(source: str, target: str) -> None:
        if os.stat(source).st_nlink >= 3:
            raise OSError(errno.EMLINK, "Too many links")
        link(source, target)

    monkeypatch.setattr(os, "link", few)
    objects = {f"{i}": b"same" for i in range(9)}
    done = stage(fill(gcs, objects=objects), tmp_path, config=gcs.config)
    assert found(done.folder) == objects
    stage(fill(gcs, objects=objects), tmp_path, name="other", config=gcs.config)
    assert found(tmp_path / "datasets" / "other") == objects


def test_only_the_owner_looks_into_a_root_and_anybody_reads_a_copy(gcs: Bucket, tmp_path: Path) -> None:
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
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o755  # somebody's folder stays as it is
    assert stat.S_IMODE((tmp_path / "mine" / "datasets").stat().st_mode) == 0o700


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_source_beyond_the_capacity_copies_nothing(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs)
    with pytest.raises(TooLargeError, match=r"gs://bkt/src: its 20\.2 MiB are more than the 1\.0 MiB"):
        stage(source, tmp_path / "root", config=gcs.config, capacity_bytes=1 << 20)
    assert not (tmp_path / "root").exists()
    total = survey(source, gcs.config).total_bytes
    assert stage(source, tmp_path / "root", config=gcs.config, capacity_bytes=total).copied == 6


def test_files_of_any_size_are_what_was_read(gcs: Bucket, tmp_path: Path) -> None:
    """Buffered or in whole blocks past the page cache, with and without a last block to cut off."""
    sizes = (1, 4096, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 1_000_000, 1 << 20, (8 << 20) + 1, (8 << 20) + 4096)
    objects = {str(size): content(str(size), size) for size in sizes}
    done = stage(fill(gcs, objects=objects), tmp_path, config=gcs.config)
    assert found(done.folder) == objects
    assert stage(f"{gcs.uri}/src", tmp_path, config=gcs.config, verify=True).copied == 0


def test_a_disk_that_becomes_full_keeps_what_is_whole(
    gcs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = {f"{i:03}": content(f"{i}", 10_000) for i in range(200)}
    source = fill(gcs, objects=objects)
    write, left = os.pwrite, [500_000]

    def full(handle: int, body: Any, place: int) -> int:
        left[0] -= len(body)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, body, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(NoRoomError, match="the disk became full") as raised:
            stage(source, tmp_path, config=gcs.config)
    assert raised.value.lacking_bytes >= 1
    assert not list((tmp_path / "partial").iterdir())
    (one,) = staged(tmp_path)
    assert (one.whole, one.objects) == (False, 50)
    done = stage(source, tmp_path, config=gcs.config)
    assert done.copied == 150
    assert found(done.folder) == objects


def test_folders_that_cannot_be_used(gcs: Bucket, tmp_path: Path) -> None:
    source = fill(gcs, objects={"a": b"1"})
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="the folder cannot be used: Not a directory"):
        stage(source, tmp_path / "file" / "root", config=gcs.config)
    for name in ("..", "a/b", "", "x" * 300, ".hidden"):
        with pytest.raises(ConfigError, match="cannot name a copy"):
            remove(tmp_path, name)
    with pytest.raises(ConfigError, match="cannot name a copy"):
        stage(source, tmp_path / "root", name="../out", config=gcs.config)
    assert staged(tmp_path / "nowhere") == []
    assert remove(tmp_path / "nowhere", "a") == 0
    assert evict(tmp_path / "nowhere", 1) == []
    touch(tmp_path / "nowhere", "a")
    assert not (tmp_path / "nowhere").exists()


def test_progress_may_end_it(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = fill(gcs, objects={f"{i:03}": content(f"{i}", 10_000) for i in range(100)})
    emulator.set_faults(Faults(latency_s=0.1, kinds=("get",)))

    def stop(now: Progress) -> None:
        if now.doing == "copying":
            raise TimeoutError("too slow")

    with pytest.raises(TimeoutError, match="too slow"):
        stage(source, tmp_path, config=gcs.config, progress=stop)
    emulator.clear_faults()
    assert stage(source, tmp_path, config=gcs.config).copied < 100


# -- what is here ------------------------------------------------------------------------------------------------------


def test_eviction_takes_what_was_not_used_for_longest(gcs: Bucket, tmp_path: Path) -> None:
    common = {"common": content("common", 50_000)}
    for number, name in enumerate(("one", "two", "three")):
        objects = {**common, "own": content(name, 10_000)}
        stage(fill(gcs, name, objects), tmp_path, name=name, config=gcs.config)
        os.utime(tmp_path / "datasets" / name / ".voxlane" / "used", (number + 1, number + 1))
    assert [(one.name, one.last_used.timestamp()) for one in staged(tmp_path)] == [("one", 1), ("three", 3), ("two", 2)]
    assert evict(tmp_path, 1 << 30) == []  # all of it would not be enough
    assert evict(tmp_path, 0) == []
    assert evict(tmp_path, 20_001, keep={"three"}) == []  # what `three` shares stays
    touch(tmp_path, "one")
    assert evict(tmp_path, 10_000) == ["two"]
    assert evict(tmp_path, 60_001) == ["three", "one"]
    assert staged(tmp_path) == []
    assert not blobs(tmp_path)


def test_what_is_said_of_copies(gcs: Bucket, tmp_path: Path) -> None:
    begin = time.time() - 1
    done = stage(fill(gcs), tmp_path, name="data", config=gcs.config)
    (one,) = staged(tmp_path)
    assert (one.name, one.folder, one.source) == ("data", done.folder, "gs://bkt/src")
    assert (one.objects, one.bytes, one.whole, one.version) == (6, done.total_bytes, True, done.version)
    assert begin < one.last_used.timestamp() < time.time() + 1
    Path(done.folder, STAGED).unlink()
    assert not staged(tmp_path)[0].whole
    assert staged(tmp_path)[0].objects == 6
    Path(done.folder, MANIFEST).write_text("garbage")
    assert staged(tmp_path)[0].objects == 0
    assert stage(fill(gcs), tmp_path, name="data", config=gcs.config).copied == 6


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Any]:
    """Start a process that stages; all are gone afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.staging.killed"])
    started: list[Any] = []

    def run(source: str, root: Path, config: StoreConfig) -> Any:
        """The process, once it has begun."""
        begun = context.Event()
        started.append(context.Process(target=stage_and_tell, args=(source, root, config, begun)))
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
    emulator.set_faults(Faults(latency_s=0.2, kinds=("get",)))
    known = survey(source, gcs.config)
    other = start(source, tmp_path, gcs.config)
    seen: list[Progress] = []
    again = stage(source, tmp_path, name="data", config=gcs.config, expected=known, progress=seen.append)
    assert again.copied == 0
    assert seen[0].doing == "waiting"
    other.join()
    assert other.exitcode == 0


def test_killed_at_any_moment_it_goes_on(gcs: Bucket, emulator: Emulator, tmp_path: Path, start: Any) -> None:
    objects = {f"{i % 7}/{i:03}": content(f"{i}", 40_000 + i) for i in range(400)}
    objects |= {"big/0": content("big", BIG), "big/1": content("bigger", BIG + 1), "twin": content("0", 40_000)}
    source = fill(gcs, objects=objects)
    emulator.set_faults(Faults(latency_s=0.03, jitter_s=0.06, kinds=("get",)))
    whole = kills = 0
    for kill in range(20):
        process = start(source, tmp_path, gcs.config)
        time.sleep(0.01 * ((kill * 7) % 20))
        process.kill()
        process.join()
        kills += process.exitcode != 0
        _, lines = read_manifest(f"{tmp_path}/datasets/data")
        assert len(lines) >= whole  # nothing that was whole is lost
        whole = len(lines)
        for name in lines:
            assert Path(tmp_path, "datasets/data", name).read_bytes() == objects[name]
        assert (whole == len(objects)) or not Path(tmp_path, "datasets/data", STAGED).exists()
    assert kills > 5
    emulator.clear_faults()
    done = stage(source, tmp_path, name="data", config=gcs.config)
    assert found(done.folder) == objects
    assert staged(tmp_path)[0].whole
    assert len(blobs(tmp_path)) == len(objects) - 1
    assert sum(path.stat().st_nlink for path in blobs(tmp_path)) == 2 * len(blobs(tmp_path)) + 1
    assert not list((tmp_path / "partial").iterdir())


def test_a_killed_removal_leaves_nothing_behind(gcs: Bucket, tmp_path: Path) -> None:
    done = stage(fill(gcs), tmp_path, name="data", config=gcs.config)
    shutil.move(done.folder, tmp_path / "partial" / "removed")  # as a kill in the middle leaves it
    stage(fill(gcs, "other", {"a": b"1"}), tmp_path, name="other", config=gcs.config)
    remove(tmp_path, "other")
    assert not blobs(tmp_path)
    assert not list((tmp_path / "partial").iterdir())
