"""The scans in folders, prefixes and patterns, and the channels of nnU-Net's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Bucket
from voxlane.errors import ConfigError, NotFoundError
from voxlane.train.scan_inputs import ScanInput, find_scans


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return folder


def names(scans: list[ScanInput]) -> list[str]:
    return [scan.name for scan in scans]


def last_parts(scan: ScanInput) -> list[str]:
    return [file.rpartition("/")[2] for file in scan.files]


def test_all_scans_below_a_folder_keep_their_place(tmp_path: Path) -> None:
    folder = touch(tmp_path / "in", "b.nii.gz", "a.nii", "deep/er/c.nrrd", "notes.txt", ".hidden.nii.gz")
    result = find_scans([str(folder)], 1, str(tmp_path / "out"))
    assert names(result.scans) == ["a", "b", "deep/er/c"]
    assert result.scans[2].files == (f"file://{folder}/deep/er/c.nrrd",)
    assert result.notes == [f"{folder}: 3 scans; left out 2 other files, such as .hidden.nii.gz"]


def test_prefix_and_pattern_in_a_bucket(gcs: Bucket) -> None:
    for name in ("scans/a.nii.gz", "scans/b.nii.gz", "scans/x/b.nii.gz", "scans/list.json", "other/c.nii.gz"):
        gcs.store.put(name, b"")
    for word in ("gs://bkt/scans", "gs://bkt/scans/"):
        result = find_scans([word], 1, "gs://bkt/masks", gcs.config)
        assert names(result.scans) == ["a", "b", "x/b"]
        assert result.scans[2].files == ("gs://bkt/scans/x/b.nii.gz",)
    result = find_scans(["gs://bkt/scans/*b.nii.gz", "gs://bkt/other/?.nii.gz"], 1, "gs://bkt/masks", gcs.config)
    assert names(result.scans) == ["b", "x/b", "c"]
    with pytest.raises(NotFoundError, match="no scan matches this pattern"):
        find_scans(["gs://bkt/scans/*.npy"], 1, "gs://bkt/masks", gcs.config)


def test_channels_are_grouped_by_nnunets_names(tmp_path: Path) -> None:
    folder = touch(tmp_path, "p1_0000.nii.gz", "p1_0001.nii.gz", "p2_0000.nii.gz", "p2_0001.nii.gz", "all.nii.gz")
    scans = find_scans([str(folder)], 2, str(tmp_path / "out")).scans
    assert names(scans) == ["all", "p1", "p2"]
    assert last_parts(scans[0]) == ["all.nii.gz"]  # one file with both channels
    assert last_parts(scans[1]) == ["p1_0000.nii.gz", "p1_0001.nii.gz"]


def test_missing_channel_is_left_to_the_reader(tmp_path: Path) -> None:
    folder = touch(tmp_path, "p1_0000.nii.gz", "p1_0002.nii.gz")
    (scan,) = find_scans([str(folder)], 3, str(tmp_path / "out")).scans
    assert last_parts(scan) == ["p1_0000.nii.gz", "p1_0001.nii.gz", "p1_0002.nii.gz"]


def test_ending_is_dropped_for_one_channel_only_if_all_files_have_it(tmp_path: Path) -> None:
    raw = touch(tmp_path / "raw", "p1_0000.nii.gz", "p2_0000.nii.gz")
    assert names(find_scans([str(raw)], 1, str(tmp_path / "out")).scans) == ["p1", "p2"]
    slices = touch(tmp_path / "numbered", "scan_0000.nii.gz", "scan_0001.nii.gz")
    assert names(find_scans([str(slices)], 1, str(tmp_path / "out")).scans) == ["scan_0000", "scan_0001"]


def test_files_keep_their_names(tmp_path: Path) -> None:
    folder = touch(tmp_path, "a_0000.nii.gz", "b.nii.gz", "odd*name.nii.gz", "without-suffix")
    words = [str(folder / name) for name in ("a_0000.nii.gz", "odd*name.nii.gz", "without-suffix")]
    result = find_scans([*words, f"{words[0]},{folder}/b.nii.gz"], 2, str(tmp_path / "out"))
    assert names(result.scans) == ["a_0000", "odd*name", "without-suffix", "a_0000"]
    assert last_parts(result.scans[3]) == ["a_0000.nii.gz", "b.nii.gz"]
    assert result.notes == []


def test_folders_of_dicom_series(tmp_path: Path) -> None:
    study = touch(tmp_path / "study", "p1/1.dcm", "p1/2.dcm", "p2/late/1", "DICOMDIR")
    result = find_scans([str(study), str(study / "p1")], 1, str(tmp_path / "out"))
    assert names(result.scans) == ["p1", "p2/late", "p1"]
    assert result.scans[1].files == (f"file://{study}/p2/late",)


def test_masks_of_an_earlier_prediction_are_no_scans(tmp_path: Path) -> None:
    folder = touch(tmp_path / "in", "a.nii.gz", "masks/a.nii.gz")
    assert names(find_scans([str(folder)], 1, str(folder / "masks")).scans) == ["a"]
    for out in (folder, tmp_path):
        with pytest.raises(ConfigError, match=r"the masks would be written among these scans. Choose another folder"):
            find_scans([str(folder)], 1, str(out))


def test_folder_without_scans_is_left_to_the_reader(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (scan,) = find_scans([str(tmp_path / "empty")], 1, str(tmp_path / "out")).scans
    assert scan.files == (f"file://{tmp_path}/empty",)
