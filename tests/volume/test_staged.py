"""Copies of prepared datasets on a machine's own disk."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.train import made
from voxlane.cli.main import main
from voxlane.errors import CacheError, NoRoomError, PreparedError
from voxlane.staging import remove
from voxlane.staging import stage as stage_any
from voxlane.staging.shelf import MANIFEST
from voxlane.store import Store
from voxlane.volume.cases import Caching, Cases
from voxlane.volume.prepared import Prepared
from voxlane.volume.staged import Staged, objects_of, stage


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny prepared dataset, for reading only."""
    folder = tmp_path_factory.mktemp("source")
    made.prepared(folder)
    return folder / "prepared"


@pytest.fixture
def prepared(source: Path, tmp_path: Path) -> Prepared:
    """A tiny prepared dataset of the test's own. Its volumes' versions are those of the files, so they are linked."""
    shutil.copytree(source, tmp_path / "data", copy_function=lambda a, b: Path(b).hardlink_to(a))
    return Prepared.load(str(tmp_path / "data"))


def patches(prepared: Prepared, where: Path | None) -> tuple[list[bytes], int]:
    """Every volume's bytes, and how many bytes came from where the dataset is."""
    cases = Cases(prepared, Caching(ram_bytes=0, staged=where))
    found = []
    for row in range(len(prepared)):
        image, label = cases.open(row).whole()
        found += [image.numpy().tobytes(), label.numpy().tobytes(), cases.open(row).foreground().tobytes()]
    return found, cases.timing().bytes_read


def test_a_staged_dataset_reads_the_same_without_the_bucket(prepared: Prepared, tmp_path: Path) -> None:
    done = stage(prepared, tmp_path / "disk")
    assert done.copied == done.objects == len(objects_of(prepared).objects)
    assert done.copied_bytes == done.total_bytes > 0
    direct, read = patches(prepared, None)
    assert read > 0
    assert patches(prepared, tmp_path / "disk") == (direct, 0)


def test_from_a_bucket(source: Path, gcs: Bucket, tmp_path: Path) -> None:
    how = made.PrepareConfig(
        folds=2, workers=1, plan={"patch": [16, 16, 16], "batch": 2, "network": made.NETWORK, "spacing": [1.5, 1, 1]}
    )
    scans = source.parent / "scans" / "list.json"
    made.prepare(str(scans), f"{gcs.uri}/data", how, gcs.config, progress=False)
    prepared = Prepared.load(f"{gcs.uri}/data", gcs.config)
    stage(prepared, tmp_path / "disk")
    assert patches(prepared, tmp_path / "disk") == (patches(prepared, None)[0], 0)


def test_what_is_there_is_checked_and_kept(prepared: Prepared, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    place = Path(stage(prepared, disk).folder)
    assert stage(prepared, disk).copied == 0
    files = sorted(path for path in (place / "cases").rglob("*") if path.is_file())
    body = bytearray(files[0].read_bytes())
    body[len(body) // 2] ^= 1
    files[0].chmod(0o644)
    files[0].write_bytes(body)
    files[1].unlink()
    assert stage(prepared, disk).copied == 2
    assert patches(prepared, disk) == (patches(prepared, None)[0], 0)


def test_part_of_a_copy_is_used_and_the_rest_comes_from_the_bucket(prepared: Prepared, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    journal = Path(stage(prepared, disk).folder, MANIFEST)
    whole = journal.read_text()
    journal.write_text(whole[: len(whole) // 2])  # as a kill may leave it, within a line
    found, read = patches(prepared, disk)
    assert found == patches(prepared, None)[0]
    assert 0 < read < patches(prepared, None)[1]
    assert 0 < stage(prepared, disk).copied < len(objects_of(prepared).objects)


def test_a_dataset_that_was_prepared_anew_is_not_read_from_the_old_copy(prepared: Prepared, tmp_path: Path) -> None:
    stage(prepared, tmp_path / "disk")
    listed = made.write_cases(tmp_path / "other", made.ids(), seed=1)
    how = made.PrepareConfig(
        folds=2, workers=1, plan={"patch": [16, 16, 16], "batch": 2, "network": made.NETWORK, "spacing": [1.5, 1, 1]}
    )
    anew = made.prepare(str(listed), str(tmp_path / "anew"), how, progress=False).prepared
    assert patches(anew, tmp_path / "disk") == patches(anew, None)


def test_too_little_room_copies_nothing_and_says_how_much(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(NoRoomError, match="too little room") as raised:
        stage(prepared, tmp_path / "disk", reserve_bytes=free + (1 << 30))
    assert raised.value.lacking_bytes >= 1 << 29  # others write to this disk too
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert main(["stage", prepared.uri, str(tmp_path / "disk"), "--if-room"]) == 0
    assert "too little room; it will be read from" in capsys.readouterr().out
    assert main(["stage", prepared.uri, str(tmp_path / "disk")]) == 1
    assert "Make room, or give another disk's folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "disk").rglob("*") if path.is_file()] == ["lock"]
    assert not list((tmp_path / "disk" / "datasets").iterdir())


def test_an_object_that_changed_is_named(prepared: Prepared, tmp_path: Path) -> None:
    store = Store(prepared.uri)
    key = f"{tmp_path}/data/{objects_of(prepared).objects[0].name}".lstrip("/")
    body = bytes(store.get(key))
    Path(f"/{key}").unlink()
    store.put(key, body)
    with pytest.raises(PreparedError, match="gone or changed after it was prepared"):
        stage(prepared, tmp_path / "disk")
    assert objects_of(prepared).objects[0].name not in "".join(
        p.read_text() for p in (tmp_path / "disk" / "datasets").glob(f"*/{MANIFEST}")
    )
    with pytest.raises(CacheError, match="the folder cannot be used"):
        stage(prepared, f"/{key}/below")


def test_processes_that_stage_at_once_copy_once(prepared: Prepared, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        reports = pool.starmap(stage, [(prepared, tmp_path / "disk")] * 2)
    assert sorted(report.copied for report in reports) == [0, len(objects_of(prepared).objects)]


def test_the_command_copies_and_removes(prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["stage", prepared.uri, str(tmp_path / "disk")]
    assert main(words) == 0
    assert "copied " in capsys.readouterr().out
    assert main(words) == 0
    assert "all were there" in capsys.readouterr().out
    assert main([*words, "--remove"]) == 0
    assert not list((tmp_path / "disk" / "datasets").iterdir())
    assert patches(prepared, tmp_path / "disk") == patches(prepared, None)


def test_a_copys_own_folder_is_read_as_its_root_is(prepared: Prepared, tmp_path: Path) -> None:
    done = stage(prepared, tmp_path / "disk")
    (tmp_path / "elsewhere").mkdir()
    mounted = tmp_path / "elsewhere" / "mount"
    shutil.copytree(done.folder, mounted)
    assert patches(prepared, mounted) == (patches(prepared, None)[0], 0)


def test_the_copy_of_all_that_lies_there_or_around_is_read(prepared: Prepared, tmp_path: Path) -> None:
    listed = stage_any(prepared.uri, tmp_path / "all")
    assert listed.objects > len(objects_of(prepared).objects)  # the header and the table of cases too
    whole = patches(prepared, None)[0]
    assert patches(prepared, tmp_path / "all") == (whole, 0)
    (tmp_path / "around").mkdir()
    (tmp_path / "data").rename(tmp_path / "around" / "data")
    moved = Prepared.load(str(tmp_path / "around" / "data"))
    done = stage_any(str(tmp_path / "around"), tmp_path / "disk")
    assert patches(moved, tmp_path / "disk") == (whole, 0)
    assert patches(moved, Path(done.folder)) == (whole, 0)


def test_a_reader_sees_that_a_copy_is_replaced_or_removed(prepared: Prepared, tmp_path: Path) -> None:
    done = stage(prepared, tmp_path / "disk")
    reader = Staged(tmp_path / "disk", prepared)
    first, second = objects_of(prepared).objects[:2]
    keys = [f"{tmp_path}/data/{one.name}".lstrip("/") for one in (first, second)]
    assert reader.read(keys[0], first.etag, 0, 4) == Path(done.folder, first.name).read_bytes()[:4]
    assert reader.read(keys[0], f'"{first.etag}"', 0, 4) is not None
    assert reader.read(keys[0], "another", 0, 4) is None
    assert reader.read(keys[0], first.etag, 0, first.size + 1) is None
    manifest = Path(done.folder, MANIFEST)
    manifest.with_suffix(".new").write_text(
        "\n".join(t for t in manifest.read_text().split("\n") if first.name not in t)
    )
    manifest.with_suffix(".new").replace(manifest)
    assert reader.read(keys[0], first.etag, 0, 4) is None
    assert reader.read(keys[1], second.etag, 0, 4) is not None
    remove(tmp_path / "disk", done.name)
    assert reader.read(keys[1], second.etag, 0, 4) is None
