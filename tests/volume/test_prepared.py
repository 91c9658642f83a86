"""The header, the cases and the folds of a prepared dataset."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Bucket
from tests.volume import made
from voxlane.errors import BucketNotFoundError, ConfigError, PreparedError
from voxlane.volume.prepared import HEADER, Prepared, PreparedCase, fold_of, folder, publish


def publish_some(bucket: Bucket, dataset: Prepared, patients: list[str], prefix: str = "data/", folds: int = 5) -> str:
    """A dataset of the cases of these patients, one each; their volumes are nowhere."""
    cases = [
        PreparedCase(f"case {i} of {p}", p, fold_of(p, folds), {"images": ["gs://a/b"], "label": None}, {"n": i})
        for i, p in enumerate(patients)
    ]
    parts = {name: getattr(dataset, name) for name in ("description", "plan", "fingerprint", "source")}
    publish(bucket.store, bucket.key(prefix), folds=folds, cases=cases, **parts)
    return f"{bucket.uri}/{prefix}"


def test_what_is_published_is_loaded(bucket: Bucket, tiny: Prepared) -> None:
    uri = publish_some(bucket, tiny, ["b", "a", "c"])
    found = Prepared.load(uri, bucket.config)
    assert found.uri == uri.rstrip("/")
    assert found.ids == ["case 0 of b", "case 1 of a", "case 2 of c"]
    assert (found.description, found.plan, found.fingerprint) == (tiny.description, tiny.plan, tiny.fingerprint)
    assert found.case(1) == PreparedCase(
        "case 1 of a", "a", fold_of("a", 5), {"images": ["gs://a/b"], "label": None}, {"n": 1}
    )
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert again.ids == found.ids
    assert Prepared.load(uri.rstrip("/"), bucket.config) == found


def test_publishing_the_same_again_writes_nothing(gcs: Bucket, tiny: Prepared, emulator: Any) -> None:
    publish_some(gcs, tiny, ["a", "b"])
    emulator.reset_counters()
    publish_some(gcs, tiny, ["a", "b"])
    assert emulator.counters().bytes_in == 0
    first = Prepared.load(f"{gcs.uri}/data", gcs.config)
    publish_some(gcs, tiny, ["a", "b", "c"])
    assert Prepared.load(f"{gcs.uri}/data", gcs.config).digest != first.digest


def test_nothing_there_and_unfinished_are_told_apart(bucket: Bucket) -> None:
    uri = f"{bucket.uri}/data"
    with pytest.raises(PreparedError, match=r"data: no prepared dataset is here. Run: voxlane prepare SRC DST"):
        Prepared.load(uri, bucket.config)
    bucket.store.put(bucket.key("data/work/check/a-0.json"), b"{}")
    with pytest.raises(PreparedError, match=r"has not finished. Run the same voxlane prepare again: it goes on"):
        Prepared.load(uri, bucket.config)


def test_a_bucket_that_is_not_there_is_no_missing_dataset(gcs: Bucket) -> None:
    with pytest.raises(BucketNotFoundError):
        Prepared.load("gs://other/data", gcs.config)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"7", b"{}", b'{"version": 1}', b'{"version": 1, "description": {}, "plan": {}, "cases": "c"}'],
)
def test_a_damaged_header(folder: Bucket, body: bytes) -> None:
    folder.store.put(folder.key(f"data/{HEADER}"), body)
    with pytest.raises(PreparedError, match=r"data/prepared.json: its header is damaged. Run voxlane prepare again"):
        Prepared.load(f"{folder.uri}/data", folder.config)


def test_a_header_of_another_version(folder: Bucket) -> None:
    folder.store.put(folder.key(f"data/{HEADER}"), b'{"version": 2}')
    with pytest.raises(PreparedError, match=r"format 2, this one reads 1"):
        Prepared.load(f"{folder.uri}/data", folder.config)


def test_a_table_of_cases_that_is_gone_or_damaged(folder: Bucket, tiny: Prepared) -> None:
    uri = publish_some(folder, tiny, ["a"])
    header = json.loads(bytes(folder.store.get(folder.key(f"data/{HEADER}"))))
    key = folder.key(f"data/{header['cases']}")
    body = bytes(folder.store.get(key))
    folder.store.put(key, body[:-1] + b"x")
    with pytest.raises(PreparedError, match="table of cases is damaged"):
        Prepared.load(uri, folder.config)
    folder.store.delete(key)
    with pytest.raises(PreparedError, match=r"table of cases is gone\. Run voxlane prepare again"):
        Prepared.load(uri, folder.config)


PATIENTS = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=30)


@given(PATIENTS, PATIENTS, st.integers(2, 10))
def test_a_fold_is_the_patients_own_whoever_else_there_is(some: list[str], more: list[str], folds: int) -> None:
    before = {patient: fold_of(patient, folds) for patient in some}
    after = {patient: fold_of(patient, folds) for patient in more + some}
    assert before == {patient: after[patient] for patient in some}
    assert all(0 <= fold < folds for fold in after.values())


def test_folds_are_about_equal() -> None:
    counts = [0] * 5
    for number in range(2000):
        counts[fold_of(f"case_{number:05d}", 5)] += 1
    assert all(330 < count < 470 for count in counts)
    assert [fold_of(f"case_{n:05d}", 5) for n in range(6)] == [1, 1, 2, 3, 0, 2]  # for ever


def test_split_holds_one_fold_out(folder: Bucket, tiny: Prepared) -> None:
    patients = [f"p{i // 2}" for i in range(30)]
    dataset = Prepared.load(publish_some(folder, tiny, patients), folder.config)
    seen: list[int] = []
    for fold in range(5):
        train, held = dataset.split(fold)
        assert sorted(train + held) == list(range(30))
        assert {dataset.case(i).fold for i in held} == {fold}
        assert not {dataset.case(i).patient for i in held} & {dataset.case(i).patient for i in train}
        seen += held
    assert sorted(seen) == list(range(30))
    assert dataset.split(None) == (list(range(30)), [])


def test_a_fold_that_is_not_there_or_empty(folder: Bucket, tiny: Prepared) -> None:
    dataset = Prepared.load(publish_some(folder, tiny, ["a"]), folder.config)
    for fold in (-1, 5):
        with pytest.raises(ConfigError, match=r"fold: .* folds 0 to 4"):
            dataset.split(fold)
    with pytest.raises(ConfigError, match=r"holds 1 of 1 cases.*fold=null"):
        dataset.split(fold_of("a", 5))
    with pytest.raises(ConfigError, match="holds 0 of 1 cases"):
        dataset.split((fold_of("a", 5) + 1) % 5)


def test_a_dataset_at_the_root_of_a_bucket(gcs: Bucket, tiny: Prepared) -> None:
    publish_some(gcs, tiny, ["a"], prefix="")
    assert Prepared.load("gs://bkt", gcs.config).uri == "gs://bkt"
    assert (folder(""), folder("a/b"), folder("a/b/")) == ("", "a/b/", "a/b/")


def test_the_tiny_dataset_says_where_its_cases_come_from(tiny: Prepared, tmp_path: Path) -> None:
    case = tiny.case(0)
    assert case.source["images"][0].endswith("/case_00000/imaging.nii.gz")
    assert case.source["label"].endswith("/case_00000/segmentation.nii.gz")
    assert tiny.source["layout"] == "kits19"
    assert case.shape == tuple(case.volume["label"]["shape"])
    assert replace(tiny, config=None) == tiny
    assert len(tiny) == len(made.kits()) // 2


def test_a_table_of_many_groups_gives_every_case(folder: Bucket, tiny: Prepared) -> None:
    patients = [f"p{number}" for number in range(2500)]
    dataset = Prepared.load(publish_some(folder, tiny, patients), folder.config)
    places = {f"case {number} of p{number}": number for number in range(2500)}
    for row in (0, 1023, 1024, 2047, 2048, 2499):
        case = dataset.case(row)
        assert case.id == dataset.ids[row]
        assert case.volume == {"n": places[case.id]}
        assert (case.patient, case.fold) == (f"p{places[case.id]}", fold_of(case.patient, 5))
    with pytest.raises(IndexError):
        dataset.case(2500)
    assert pickle.loads(pickle.dumps(dataset)).case(2048) == dataset.case(2048)
