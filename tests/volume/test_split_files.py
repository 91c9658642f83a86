"""Splits and groups from files: at `prepare`, at `train`, and how their mistakes are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Bucket
from tests.volume import sample_data
from voxlane.errors import ConfigError, LayoutError
from voxlane.volume.dataset_index import encode_header
from voxlane.volume.prepared_dataset import HEADER, Prepared
from voxlane.volume.split_files import choose_split, load_groups, load_split, parse_split
from voxlane.volume.splits import Fold, fold_for_patient

PATIENTS = {f"c{i}": f"p{i // 2}" for i in range(8)}
"""Eight cases of four patients."""


@pytest.fixture
def scans(tmp_path: Path) -> str:
    return sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19())


def write_json(folder: Path, value: Any, name: str = "splits_final.json") -> str:
    (folder / name).write_text(json.dumps(value))
    return str(folder / name)


def names(*numbers: int) -> list[str]:
    return [f"case_{n:05d}" for n in numbers]


# -- files -------------------------------------------------------------------------------------------------------------


def test_nnunet_splits_final(tmp_path: Path) -> None:
    folds = [{"train": ["c2", "c3", "c4", "c5", "c6", "c7"], "val": ["c1", "c0"]}]
    folds.append({"train": ["c0", "c1", "c4", "c5"], "val": ["c2", "c3"]})
    split = load_split(write_json(tmp_path, folds), PATIENTS)
    assert split.folds[0] == Fold(("c2", "c3", "c4", "c5", "c6", "c7"), ("c0", "c1"))
    assert split.folds[1] == Fold(("c0", "c1", "c4", "c5"), ("c2", "c3"))
    assert split.describe() == "folds 0, 1 (splits_final.json): 2 cases held out"


def test_train_and_test_lists_with_file_names(gcs: Bucket) -> None:
    lists = {"train": ["imagesTr/c0.nii.gz", "c1.nii.gz"], "test": ["c6", "c7"]}
    gcs.store.put("lists.json", json.dumps(lists).encode())
    split = load_split("gs://bkt/lists.json", PATIENTS, config=gcs.config)
    assert split.folds == (Fold(("c0", "c1"), ("c6", "c7")),)
    assert "4 cases in no list: c2, c3, c4, c5" in split.describe()


@pytest.mark.parametrize(
    ("text", "folds"),
    [
        ("case,split\nc0,train\nc1,train\nc6,val\n", (Fold(("c0", "c1"), ("c6",)),)),
        ("case,fold\nc0,0\nc1,0\nc6,1\n", (Fold(("c6",), ("c0", "c1")), Fold(("c0", "c1"), ("c6",)))),
    ],
)
def test_tables(tmp_path: Path, text: str, folds: Any) -> None:
    (tmp_path / "split.csv").write_text(text)
    assert load_split(str(tmp_path / "split.csv"), PATIENTS).folds == folds


def test_excluded_cases_are_named() -> None:
    split = parse_split({"train": ["c0", "bad"], "val": ["c2"]}, "u", PATIENTS, excluded={"bad"})
    assert (split.folds, split.excluded) == ((Fold(("c0",), ("c2",)),), ("bad",))
    assert "1 listed case excluded: bad" in split.describe()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"train": ["c0", "x"], "val": ["c2"]}, r"train names 1 unknown case: x. Use the dataset's ids, such as c0"),
        ([{"train": ["c0"], "val": ["c2"]}, {"train": ["y"], "val": ["c0"]}], "fold 1: train names 1 unknown case: y"),
        ({"train": ["c0"], "val": ["c1"]}, r"patient p0 is on both sides \(c0 in train, c1 held out\). Keep each"),
        ({"train": ["c0"], "val": ["c0"]}, "case c0 is on both sides. Keep each case on one side"),
        ({"train": ["c0", "c0.nii.gz"], "val": ["c2"]}, "train lists cases twice: c0. List each case once"),
        ({"train": [], "val": ["c2"]}, "train: the list is empty. Put at least one usable case on each side"),
        ({"train": ["c0"], "val": []}, "val: the list is empty"),
        ({"train": ["c0"], "val": ["bad"]}, "val: every case in it was excluded from the dataset"),
        ({"train": ["c0"], "val": ["c2"], "test": ["c4"]}, "fold 0 has val and test, but a fold holds out one list"),
        ({"train": ["c0"]}, r'fold 0 has no train and val. Write \[{"train": \["case_1", ...\], "val"'),
        ([{"train": ["c0"], "val": "c2"}], "fold 0: val is not a list of case names"),
        ([], "the split is not a list of folds"),
        ("c0", "the split is not a list of folds"),
        ([["c0"], ["c1"]], "fold 0 has no train and val"),
        ([{"case": "c0", "split": "train"}, {"case": "c2"}], "row 2 has neither a fold nor a split"),
        ([{"case": "c0", "split": "train"}], "the table does not name train and one of val and test"),
        ([{"case": "c0", "fold": "0"}, {"case": "c2", "fold": "999999999"}], "fold 999999999: there are only 2 cases"),
    ],
)
def test_mistakes_in_a_split(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^file:///s.json: {message}") as raised:
        parse_split(document, "file:///s.json", PATIENTS, excluded={"bad"})
    assert "\n" not in str(raised.value)


def test_group_on_both_sides() -> None:
    with pytest.raises(ConfigError, match=r"group site A is on both sides \(c0 in train, c2 held out\)"):
        parse_split({"train": ["c0"], "val": ["c2"]}, "u", PATIENTS, groups={"c0": "site A", "c2": "site A"})


def test_unreadable_split(tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text('[{"train": ["c0"], \n "val": ]')
    with pytest.raises(LayoutError, match=r"split.json: invalid JSON: Expecting value, line 2. Correct that line"):
        load_split(str(tmp_path / "split.json"), PATIENTS)
    with pytest.raises(ConfigError, match=r"split: 'ballanced' is no .json or .csv file. Give one, such as nnU-Net's"):
        load_split("ballanced", PATIENTS)
    with pytest.raises(FileNotFoundError, match=r"none.json"):
        load_split(str(tmp_path / "none.json"), PATIENTS)


def test_groups(tmp_path: Path) -> None:
    expected = {"a": "1", "b": "2"}
    assert load_groups(write_json(tmp_path, {"b.nii.gz": 2, "a": "1", "c": "3"}), ["a", "b"]) == expected
    (tmp_path / "groups.csv").write_text("case,group\na,1\nb,2\n")
    assert load_groups(str(tmp_path / "groups.csv"), ["b", "a"]) == expected


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"a": "1"}, r"1 case of the dataset without a group: b. Give each case a group"),
        ({"a": "1", "b": ""}, "1 case of the dataset without a group: b"),
        ({"a": "1", "b": None}, "the file does not name a group for each case"),
        (["a", "b"], "the file does not name a group for each case"),
        ([{"case": "a", "group": "1"}, {"case": "a", "group": "2"}], "a: listed twice"),
    ],
)
def test_mistakes_in_groups(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"groups.json: {message}"):
        load_groups(write_json(tmp_path, document, "groups.json"), ["a", "b"])


# -- prepare -----------------------------------------------------------------------------------------------------------


def test_prepare_writes_a_balanced_split(scans: str, tmp_path: Path) -> None:
    prepared = sample_data.prepare_dataset(scans, str(tmp_path / "data"), folds=4).prepared
    assert sorted(len(prepared.split(fold)[1]) for fold in range(4)) == [1, 1, 2, 2]
    assert json.loads((tmp_path / "data" / HEADER).read_text())["split"] == {"method": "balanced"}
    few = sample_data.prepare_dataset(scans, str(tmp_path / "data"), folds=9).prepared
    assert (few.folds, few.case_split.usable) == (6, [0, 1, 2, 3, 4, 5])


def test_prepare_with_a_published_split(scans: str, tmp_path: Path) -> None:
    folds = [{"train": names(0, 1), "val": names(2)}, {"train": names(2, 3), "val": names(4, 5)}]
    file = write_json(tmp_path, folds)
    prepared = sample_data.prepare_dataset(scans, str(tmp_path / "data"), split=file).prepared
    Path(file).unlink()
    loaded = Prepared.load(prepared.uri)
    assert [loaded.split(fold) for fold in (0, 1)] == [([0, 1], [2]), ([2, 3], [4, 5])]
    assert (loaded.folds, loaded.case_split.source) == (2, f"file://{file}")
    assert loaded.case(0).fold == -1, "case 0 is held out by no fold"


def test_prepare_keeps_groups_together(scans: str, tmp_path: Path) -> None:
    groups = dict(zip(names(*range(6)), "aabbcc", strict=True))
    file = write_json(tmp_path, groups, "sites.json")
    prepared = sample_data.prepare_dataset(scans, str(tmp_path / "data"), folds=3, groups=file).prepared
    assert sorted(prepared.split(fold)[1] for fold in range(3)) == [[0, 1], [2, 3], [4, 5]]
    split = write_json(tmp_path, {"train": names(0, 2), "val": names(1)})
    with pytest.raises(ConfigError, match="group a is on both sides"):
        choose_split(prepared, split)
    with pytest.raises(ConfigError, match=r"groups: a hash .* cannot keep groups together. Use split=balanced"):
        sample_data.prepare_dataset(scans, str(tmp_path / "data"), split="hash", groups=file)


def test_mistake_is_reported_before_scans_are_read(scans: str, tmp_path: Path) -> None:
    file = write_json(tmp_path, {"train": names(0, 7), "val": names(1)})
    with pytest.raises(ConfigError, match="train names 1 unknown case: case_00007"):
        sample_data.prepare_dataset(scans, str(tmp_path / "data"), split=file)
    assert not (tmp_path / "data" / "work").exists()


def test_another_split_keeps_digest_and_volumes(scans: str, tmp_path: Path) -> None:
    first = sample_data.prepare_dataset(scans, str(tmp_path / "data"), folds=3)
    second = sample_data.prepare_dataset(scans, str(tmp_path / "data"), split="hash")
    assert (second.cases_checked, second.cases_written) == (0, 0)
    assert second.prepared.split(1) != first.prepared.split(1)
    assert second.prepared.digest == first.prepared.digest
    other_plan = sample_data.prepare_dataset(scans, str(tmp_path / "data"), plan={**sample_data.PLAN, "batch": 7})
    assert other_plan.prepared.digest != first.prepared.digest
    assert other_plan.prepared.case_split.method == "hash", "the folds stay until another split is chosen"


def test_dataset_of_an_earlier_version_keeps_folds_and_digest(scans: str, tmp_path: Path) -> None:
    """Rewrite a header as earlier versions did, and prepare the dataset again."""
    hashed = sample_data.prepare_dataset(scans, str(tmp_path / "data"), split="hash", folds=5).prepared
    header = json.loads((tmp_path / "data" / HEADER).read_text())
    del header["split"], header["checksum"]
    (tmp_path / "data" / HEADER).write_bytes(encode_header(header))
    old = Prepared.load(hashed.uri)
    assert [old.case(row).fold for row in range(6)] == [fold_for_patient(name, 5) for name in names(*range(6))]
    again = sample_data.prepare_dataset(scans, str(tmp_path / "data"), folds=5).prepared
    assert again.table.equals(old.table)
    assert again.digest == hashed.digest
    balanced = sample_data.prepare_dataset(scans, str(tmp_path / "data"), folds=3, split="balanced").prepared
    assert [len(balanced.split(fold)[1]) for fold in range(3)] == [2, 2, 2]
    assert balanced.digest == hashed.digest, "the runs of the old dataset continue with their own split"
