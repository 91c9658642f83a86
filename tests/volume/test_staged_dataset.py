"""Copies of prepared datasets on local disks."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.train import tiny_runs
from voxlane.cli.main import main
from voxlane.errors import CacheError, NoRoomError, PreparedError
from voxlane.store import Store
from voxlane.store.staging import remove
from voxlane.store.staging import stage as stage_any
from voxlane.store.staging.local_store import MANIFEST
from voxlane.volume.case_volumes import CacheLimits, Cases
from voxlane.volume.prepared_dataset import Prepared
from voxlane.volume.staged_dataset import StagedReader, list_training_objects, stage


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny prepared dataset, which tests must not change."""
    folder = tmp_path_factory.mktemp("source")
    tiny_runs.prepare_balls(folder)
    return folder / "prepared"


@pytest.fixture
def prepared(source: Path, tmp_path: Path) -> Prepared:
    """Return a copy of the dataset for one test."""
    shutil.copytree(source, tmp_path / "data")
    return Prepared.load(str(tmp_path / "data"))


def read_all(prepared: Prepared, staged: Path | None) -> tuple[list[bytes], int]:
    """Return the contents of all volumes, and the number of bytes read from the source."""
    cases = Cases(prepared, CacheLimits(ram_bytes=0, staged=staged))
    contents = []
    for row in range(len(prepared)):
        image, label = cases.open(row).read_whole()
        contents += [image.numpy().tobytes(), label.numpy().tobytes(), cases.open(row).foreground().tobytes()]
    return contents, cases.timing().bytes_read


def test_staged_dataset_is_read_without_the_source(prepared: Prepared, tmp_path: Path) -> None:
    report = stage(prepared, tmp_path / "disk")
    assert report.copied == report.objects == len(list_training_objects(prepared).objects)
    assert report.copied_bytes == report.total_bytes > 0
    expected, bytes_read = read_all(prepared, None)
    assert bytes_read > 0
    assert read_all(prepared, tmp_path / "disk") == (expected, 0)


def test_stage_from_a_bucket(source: Path, gcs: Bucket, tmp_path: Path) -> None:
    options = tiny_runs.PrepareConfig(
        folds=2,
        workers=1,
        plan={"patch": [16, 16, 16], "batch": 2, "network": tiny_runs.NETWORK, "spacing": [1.5, 1, 1]},
    )
    scans = source.parent / "scans" / "list.json"
    tiny_runs.prepare(str(scans), f"{gcs.uri}/data", options, gcs.config, progress=False)
    prepared = Prepared.load(f"{gcs.uri}/data", gcs.config)
    stage(prepared, tmp_path / "disk")
    assert read_all(prepared, tmp_path / "disk") == (read_all(prepared, None)[0], 0)


def test_existing_files_are_verified_and_kept(prepared: Prepared, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    copy_folder = Path(stage(prepared, disk).folder)
    assert stage(prepared, disk).copied == 0
    files = sorted(path for path in (copy_folder / "cases").rglob("*") if path.is_file())
    body = bytearray(files[0].read_bytes())
    body[len(body) // 2] ^= 1
    files[0].chmod(0o644)
    files[0].write_bytes(body)
    files[1].unlink()
    assert stage(prepared, disk).copied == 2
    assert read_all(prepared, disk) == (read_all(prepared, None)[0], 0)


def test_partial_copy_is_completed_from_the_source(prepared: Prepared, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    manifest = Path(stage(prepared, disk).folder, MANIFEST)
    lines = manifest.read_text()
    manifest.write_text(lines[: len(lines) // 2])  # ends within a line, as after a kill
    actual, bytes_read = read_all(prepared, disk)
    assert actual == read_all(prepared, None)[0]
    assert 0 < bytes_read < read_all(prepared, None)[1]
    assert 0 < stage(prepared, disk).copied < len(list_training_objects(prepared).objects)


def test_old_copy_is_not_used_for_a_newly_prepared_dataset(prepared: Prepared, tmp_path: Path) -> None:
    stage(prepared, tmp_path / "disk")
    case_list = tiny_runs.write_cases(tmp_path / "other", tiny_runs.case_ids(), seed=1)
    options = tiny_runs.PrepareConfig(
        folds=2,
        workers=1,
        plan={"patch": [16, 16, 16], "batch": 2, "network": tiny_runs.NETWORK, "spacing": [1.5, 1, 1]},
    )
    new_dataset = tiny_runs.prepare(str(case_list), str(tmp_path / "anew"), options, progress=False).prepared
    assert read_all(new_dataset, tmp_path / "disk") == read_all(new_dataset, None)


def test_insufficient_disk_space_copies_nothing(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(NoRoomError, match="the disk lacks") as raised:
        stage(prepared, tmp_path / "disk", reserve_bytes=free + (1 << 30))
    assert raised.value.lacking_bytes >= 1 << 29  # other processes write to this disk too
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert main(["stage", prepared.uri, str(tmp_path / "disk"), "--if-room"]) == 0
    assert "too little room; it will be read from" in capsys.readouterr().out
    assert main(["stage", prepared.uri, str(tmp_path / "disk")]) == 1
    assert "Free some disk space, or choose a folder on another disk" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "disk").rglob("*") if path.is_file()] == ["lock"]
    assert not list((tmp_path / "disk" / "datasets").iterdir())


def test_error_names_the_changed_object(prepared: Prepared, tmp_path: Path) -> None:
    store = Store(prepared.uri)
    key = f"{tmp_path}/data/{list_training_objects(prepared).objects[0].name}".lstrip("/")
    body = bytes(store.get(key))
    store.put(key, body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(PreparedError, match="deleted or changed after preparation"):
        stage(prepared, tmp_path / "disk")
    assert list_training_objects(prepared).objects[0].name not in "".join(
        p.read_text() for p in (tmp_path / "disk" / "datasets").glob(f"*/{MANIFEST}")
    )
    with pytest.raises(CacheError, match="cannot use the folder"):
        stage(prepared, f"/{key}/below")


def test_concurrent_processes_copy_once(prepared: Prepared, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        reports = pool.starmap(stage, [(prepared, tmp_path / "disk")] * 2)
    assert sorted(report.copied for report in reports) == [0, len(list_training_objects(prepared).objects)]


def test_stage_command_copies_and_removes(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["stage", prepared.uri, str(tmp_path / "disk")]
    assert main(arguments) == 0
    assert "copied " in capsys.readouterr().out
    assert main(arguments) == 0
    assert "all were there" in capsys.readouterr().out
    assert main([*arguments, "--remove"]) == 0
    assert not list((tmp_path / "disk" / "datasets").iterdir())
    assert read_all(prepared, tmp_path / "disk") == read_all(prepared, None)


def test_folder_of_a_copy_can_be_mounted_elsewhere(prepared: Prepared, tmp_path: Path) -> None:
    report = stage(prepared, tmp_path / "disk")
    (tmp_path / "elsewhere").mkdir()
    mounted = tmp_path / "elsewhere" / "mount"
    shutil.copytree(report.folder, mounted)
    assert read_all(prepared, mounted) == (read_all(prepared, None)[0], 0)


def test_copy_of_the_whole_dataset_or_its_parent_is_read(prepared: Prepared, tmp_path: Path) -> None:
    full_report = stage_any(prepared.uri, tmp_path / "all")
    assert full_report.objects > len(
        list_training_objects(prepared).objects
    )  # includes the header and the table of cases
    expected = read_all(prepared, None)[0]
    assert read_all(prepared, tmp_path / "all") == (expected, 0)
    (tmp_path / "around").mkdir()
    (tmp_path / "data").rename(tmp_path / "around" / "data")
    moved = Prepared.load(str(tmp_path / "around" / "data"))
    report = stage_any(str(tmp_path / "around"), tmp_path / "disk")
    assert read_all(moved, tmp_path / "disk") == (expected, 0)
    assert read_all(moved, Path(report.folder)) == (expected, 0)


def test_reader_notices_replaced_and_removed_copies(prepared: Prepared, tmp_path: Path) -> None:
    report = stage(prepared, tmp_path / "disk")
    reader = StagedReader(tmp_path / "disk", prepared)
    first, second = [item for item in list_training_objects(prepared).objects if item.name.startswith("cases/")][:2]
    keys = [f"{tmp_path}/data/{item.name}".lstrip("/") for item in (first, second)]
    assert reader.read(keys[0], first.checksum, 0, 4) == Path(report.folder, first.name).read_bytes()[:4]
    assert reader.read(keys[0], "another", 0, 4) is None
    assert reader.read(keys[0], first.checksum, 0, first.size + 1) is None
    manifest = Path(report.folder, MANIFEST)
    manifest.with_suffix(".new").write_text(
        "\n".join(t for t in manifest.read_text().split("\n") if first.name not in t)
    )
    manifest.with_suffix(".new").replace(manifest)
    assert reader.read(keys[0], first.checksum, 0, 4) is None
    assert reader.read(keys[1], second.checksum, 0, 4) is not None
    remove(tmp_path / "disk", report.name)
    assert reader.read(keys[1], second.checksum, 0, 4) is None
