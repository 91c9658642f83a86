"""Folds that are made here: balanced, by a hash, with groups and classes; and how a dataset stores them."""

from __future__ import annotations

import collections
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from voxlane.errors import ConfigError
from voxlane.volume.splits import Fold, Split, assign_folds, fold_for_patient, make_folds, read_record


def count_held_out(split: Split) -> list[int]:
    return [len(fold.held_out) for fold in split.folds]


def name_cases(count: int) -> dict[str, str]:
    return {f"case_{i:03d}": f"case_{i:03d}" for i in range(count)}


def test_24_cases_are_split_evenly() -> None:
    split = assign_folds(name_cases(24), 5)
    assert count_held_out(split) == [5, 5, 5, 5, 4]
    assert split.describe() == "folds 0, 1, 2, 3, 4 (balanced): 4 to 5 cases held out"


@given(
    patients=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    folds=st.integers(2, 7),
    classes=st.lists(st.sets(st.integers(1, 4)), min_size=60, max_size=60),
)
def test_balanced_folds(patients: list[int], folds: int, classes: list[set[int]]) -> None:
    by_case = {f"c{i}": f"p{patient}" for i, patient in enumerate(patients)}
    split = assign_folds(by_case, folds, classes={f"c{i}": values for i, values in enumerate(classes)})
    distinct = len(set(patients))
    assert len(split.folds) == min(folds, distinct)
    sizes = [len({by_case[case] for case in fold.held_out}) for fold in split.folds]
    assert sum(sizes) == distinct, "a patient is in two folds"
    assert max(sizes) - min(sizes) <= 1
    for fold in split.folds:
        assert sorted(fold.train + fold.held_out) == sorted(by_case)
    reordered = dict(sorted(by_case.items(), key=lambda item: hash(item)))
    assert assign_folds(reordered, folds, classes={f"c{i}": v for i, v in enumerate(classes)}) == split


def test_rare_classes_are_in_every_fold() -> None:
    """A tumour in 5 of 40 cases and a cyst in 10 others, as a random split would rarely place them."""
    cases = list(name_cases(40))
    classes = {case: {1} | ({2} if i < 5 else set()) | ({3} if 20 <= i < 30 else set()) for i, case in enumerate(cases)}
    split = assign_folds(name_cases(40), 5, classes=classes)
    for fold in split.folds:
        present = collections.Counter(value for case in fold.held_out for value in classes[case])
        assert present == {1: 8, 2: 1, 3: 2}


def test_groups_are_kept_together() -> None:
    """Sites of 9, 6, 4, 3 and 2 patients; a patient with scans at two sites joins them."""
    sites = [site for site, size in zip("abcde", (9, 6, 4, 3, 2), strict=True) for _ in range(size)]
    groups = {f"case_{i:03d}": site for i, site in enumerate(sites)}
    split = assign_folds(name_cases(24), 3, groups=groups)
    assert sorted(count_held_out(split)) == [7, 8, 9]
    for fold in split.folds:
        assert not {groups[c] for c in fold.train} & {groups[c] for c in fold.held_out}
    joined = {**name_cases(24), "case_000": "the same", "case_023": "the same"}
    split = assign_folds(joined, 3, groups=groups)
    fold = next(fold for fold in split.folds if "case_000" in fold.held_out)
    assert {groups[case] for case in fold.held_out} >= {"a", "e"}
    assert len(assign_folds(name_cases(24), 7, groups=groups).folds) == 5


def test_hash_folds_are_those_of_earlier_versions() -> None:
    split = assign_folds(name_cases(24), 5, method="hash")
    for number, fold in enumerate(split.folds):
        assert list(fold.held_out) == [case for case in name_cases(24) if fold_for_patient(case, 5) == number]
    assert fold_for_patient("case_00000", 5) == 1, "a fixed value: earlier versions stored it"


def test_test_cases_are_fold_0() -> None:
    split = assign_folds(name_cases(24), 5, test_cases={"case_003", "case_004", "another"})
    assert split.folds[0].held_out == ("case_003", "case_004")
    assert count_held_out(split)[1:] == [6, 6, 5, 5]


def test_few_cases() -> None:
    split = assign_folds(name_cases(3), 5)
    assert count_held_out(split) == [1, 1, 1]
    with pytest.raises(ConfigError, match=r"^u: fold: expected 0 to 2, got 4. Choose one of \[0, 1, 2\], or fold=null"):
        split.select(4, "u")
    alone = assign_folds({"a": "p", "b": "p"}, 5)
    assert alone.usable == []
    assert "all cases belong together, so none can be held out; train with fold=null" in alone.describe()
    with pytest.raises(ConfigError, match=r"fold 0 has 2 of 2 cases. Train on all cases with fold=null"):
        alone.select(0)
    assert alone.select(None) == Fold(("a", "b"), ())


@settings(max_examples=50)
@given(lists=st.lists(st.lists(st.sampled_from(["train", "val", "neither"]), min_size=6, max_size=6), min_size=1))
def test_any_split_is_stored_and_read_again(lists: list[list[str]]) -> None:
    cases = tuple("abcdef")
    folds = tuple(
        Fold(*(tuple(c for c, own in zip(cases, sides, strict=True) if own == side) for side in ("train", "val")))
        for sides in lists
    )
    split = Split("file", cases, folds, "file:///s.json", {"a": "g"}, ("x",))
    record = json.loads(json.dumps(split.to_record()))
    assert read_record(record, split.numbers, len(folds)) == split
    is_partition = make_folds(split.numbers, len(folds)) == folds
    assert ("lists" in record) == (not is_partition), "lists are stored only where the numbers do not give them"


def test_dataset_of_an_earlier_version_has_hash_folds() -> None:
    split = read_record(None, {"a": 2, "b": 0}, 5)
    assert (split.method, split.usable, split.folds[2]) == ("hash", [0, 2], Fold(("b",), ("a",)))


def test_large_datasets() -> None:
    """10,000 cases: nothing is quadratic in their number."""
    patients = name_cases(10_000)
    split = assign_folds(patients, 5, classes={case: {1, i % 3} for i, case in enumerate(patients)})
    assert count_held_out(split) == [2000] * 5
    assert read_record(split.to_record(), split.numbers, 5) == split


@pytest.mark.parametrize("record", ["hash", {}, {"lists": [{}]}, {"lists": [{"train": ["x"], "val": []}]}])
def test_wrong_records(record: Any) -> None:
    record = {"method": "file", **record} if record and isinstance(record, dict) else record
    with pytest.raises((TypeError, ValueError, LookupError)):
        read_record(record, {"a": 0, "b": 0}, 1)
