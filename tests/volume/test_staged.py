"""Copies of prepared datasets on a machine's own disk."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.train import made
from voxlane.cli.main import main
from voxlane.errors import CacheError, PreparedError
from voxlane.store import Store
from voxlane.volume import staged
from voxlane.volume.cases import Caching, Cases
from voxlane.volume.prepared import Prepared
from voxlane.volume.staged import JOURNAL, stage, wanted_of


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
    assert done.copied == done.objects == len(wanted_of(prepared))
    assert done.copied_bytes == done.total_bytes > 0
    assert done.lacking_bytes == 0
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
    stage(prepared, disk)
    assert stage(prepared, disk).copied == 0
    files = sorted(path for path in (disk / prepared.digest / "cases").rglob("*") if path.is_file())
    body = bytearray(files[0].read_bytes())
    body[len(body) // 2] ^= 1
    files[0].write_bytes(body)
    files[1].unlink()
    assert stage(prepared, disk).copied == 2
    assert patches(prepared, disk) == (patches(prepared, None)[0], 0)


def test_part_of_a_copy_is_used_and_the_rest_comes_from_the_bucket(prepared: Prepared, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    stage(prepared, disk)
    journal = disk / prepared.digest / JOURNAL
    whole = journal.read_text()
    journal.write_text(whole[: len(whole) // 2])  # as a kill may leave it, within a line
    found, read = patches(prepared, disk)
    assert found == patches(prepared, None)[0]
    assert 0 < read < patches(prepared, None)[1]
    assert 0 < stage(prepared, disk).copied < len(wanted_of(prepared))


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
    monkeypatch.setattr(staged, "_RESERVE_BYTES", free + (1 << 30))
    done = stage(prepared, tmp_path / "disk")
    assert done.lacking_bytes >= 1 << 30
    assert done.copied == 0
    assert main(["stage", prepared.uri, str(tmp_path / "disk"), "--if-room"]) == 0
    assert "too little room" in capsys.readouterr().out
    assert main(["stage", prepared.uri, str(tmp_path / "disk")]) == 1
    assert "Make room, or train without staging" in capsys.readouterr().err


def test_an_object_that_changed_is_named(prepared: Prepared, tmp_path: Path) -> None:
    store = Store(prepared.uri)
    key = f"{tmp_path}/data/{wanted_of(prepared)[0].name}".lstrip("/")
    body = bytes(store.get(key))
    Path(f"/{key}").unlink()
    store.put(key, body)
    with pytest.raises(PreparedError, match="gone or changed after it was prepared"):
        stage(prepared, tmp_path / "disk")
    assert wanted_of(prepared)[0].name not in "".join(p.read_text() for p in (tmp_path / "disk").rglob(JOURNAL))
    with pytest.raises(CacheError, match="the folder cannot be used"):
        stage(prepared, f"/{key}/below")


def test_processes_that_stage_at_once_copy_once(prepared: Prepared, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        reports = pool.starmap(stage, [(prepared, tmp_path / "disk")] * 2)
    assert sorted(report.copied for report in reports) == [0, len(wanted_of(prepared))]


def test_the_command_copies_and_removes(prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["stage", prepared.uri, str(tmp_path / "disk")]
    assert main(words) == 0
    assert "copied " in capsys.readouterr().out
    assert main(words) == 0
    assert "all were there" in capsys.readouterr().out
    assert main([*words, "--remove"]) == 0
    assert not (tmp_path / "disk" / prepared.digest).exists()
    assert patches(prepared, tmp_path / "disk") == patches(prepared, None)
