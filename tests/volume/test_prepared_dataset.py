"""The header, the cases and the folds of a prepared dataset."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Bucket
from tests.volume import sample_data
from voxlane import settings
from voxlane.errors import BucketNotFoundError, ConfigError, PreparedError
from voxlane.volume.dataset_index import StoredObject
from voxlane.volume.prepared_dataset import HEADER, Prepared, PreparedCase, as_prefix, publish_dataset
from voxlane.volume.splits import fold_for_patient


def publish_patients(
    bucket: Bucket, dataset: Prepared, patients: list[str], prefix: str = "data/", folds: int = 5
) -> str:
    """Publish a dataset with one case per patient, whose volumes do not exist. Return its URI."""
    cases = [
        PreparedCase(
            f"case {i} of {p}", p, fold_for_patient(p, folds), {"images": ["gs://a/b"], "label": None}, {"n": i}
        )
        for i, p in enumerate(patients)
    ]
    header_fields = {name: getattr(dataset, name) for name in ("description", "plan", "fingerprint", "source")}
    publish_dataset(bucket.store, bucket.key(prefix), folds=folds, cases=cases, **header_fields)
    return f"{bucket.uri}/{prefix}"


def test_published_dataset_is_loaded(bucket: Bucket, tiny: Prepared) -> None:
    uri = publish_patients(bucket, tiny, ["b", "a", "c"])
    actual = Prepared.load(uri, bucket.config)
    assert actual.uri == uri.rstrip("/")
    assert actual.ids == ["case 0 of b", "case 1 of a", "case 2 of c"]
    assert (actual.description, actual.plan, actual.fingerprint) == (tiny.description, tiny.plan, tiny.fingerprint)
    assert actual.case(1) == PreparedCase(
        "case 1 of a", "a", fold_for_patient("a", 5), {"images": ["gs://a/b"], "label": None}, {"n": 1}
    )
    again = pickle.loads(pickle.dumps(actual))
    assert again == actual
    assert again.ids == actual.ids
    assert Prepared.load(uri.rstrip("/"), bucket.config) == actual


def test_publishing_again_writes_nothing(gcs: Bucket, tiny: Prepared, emulator: Any) -> None:
    publish_patients(gcs, tiny, ["a", "b"])
    emulator.reset_counters()
    publish_patients(gcs, tiny, ["a", "b"])
    assert emulator.counters().bytes_in == 0
    first = Prepared.load(f"{gcs.uri}/data", gcs.config)
    publish_patients(gcs, tiny, ["a", "b", "c"])
    assert Prepared.load(f"{gcs.uri}/data", gcs.config).digest != first.digest


def test_errors_distinguish_missing_and_incomplete_datasets(bucket: Bucket) -> None:
    uri = f"{bucket.uri}/data"
    with pytest.raises(
        PreparedError, match=r"data: there is no prepared dataset at this URI. Run: voxlane prepare SRC DST"
    ):
        Prepared.load(uri, bucket.config)
    bucket.store.put(bucket.key("data/work/check/a-0.json"), b"{}")
    with pytest.raises(PreparedError, match=r"is incomplete. Run the same voxlane prepare again; it will resume"):
        Prepared.load(uri, bucket.config)


def test_missing_bucket_is_not_reported_as_missing_dataset(gcs: Bucket) -> None:
    with pytest.raises(BucketNotFoundError):
        Prepared.load("gs://other/data", gcs.config)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"7", b"{}", b'{"version": 1}', b'{"version": 1, "description": {}, "plan": {}, "cases": "c"}'],
)
def test_damaged_header(folder: Bucket, body: bytes) -> None:
    folder.store.put(folder.key(f"data/{HEADER}"), body)
    with pytest.raises(
        PreparedError, match=r"data/prepared.json: the dataset's header is damaged. Copy the dataset again"
    ):
        Prepared.load(f"{folder.uri}/data", folder.config)


def test_header_of_a_newer_version(folder: Bucket) -> None:
    folder.store.put(folder.key(f"data/{HEADER}"), b'{"version": 3}')
    with pytest.raises(PreparedError, match=r"newer version of voxlane \(format 3, .* up to 2\). Update voxlane"):
        Prepared.load(f"{folder.uri}/data", folder.config)


def test_any_change_of_the_header_is_noticed(folder: Bucket, tiny: Prepared) -> None:
    uri, key = publish_patients(folder, tiny, ["a"]), folder.key(f"data/{HEADER}")
    header = bytes(folder.store.get(key))
    folder.store.put(key, header.replace(b'"folds": 5', b'"folds": 4'))
    with pytest.raises(PreparedError, match="header is damaged"):
        Prepared.load(uri, folder.config)


def test_digest_depends_on_the_content_alone(folder: Bucket, gcs: Bucket, tiny: Prepared) -> None:
    def digest_of(bucket: Bucket, size: int, checksum: str, source: str) -> str:
        rows = [["image/c/0", size, checksum, 7, f"etag in {bucket.kind}"]]
        cases = [PreparedCase(name, name, 0, {"images": [source]}, {"objects": rows}) for name in "ba"]
        fields = {name: getattr(tiny, name) for name in ("description", "plan", "fingerprint")}
        publish_dataset(bucket.store, bucket.key("d/"), folds=2, cases=cases, source={"uri": source}, **fields)
        return Prepared.load(f"{bucket.uri}/d", bucket.config).digest

    first = digest_of(folder, 10, "c", "/scans")
    assert len(bytes.fromhex(first)) == 32
    assert digest_of(gcs, 10, "c", "gs://scans") == first
    assert digest_of(gcs, 10, "d", "gs://scans") != first
    assert digest_of(gcs, 11, "c", "gs://scans") != first


def test_dataset_of_format_1(folder: Bucket, tiny: Prepared) -> None:
    table = pa.table({"id": ["a"], "patient": ["a"], "fold": [0], "source": ["{}"]})
    volume = json.dumps({"objects": [["image/c/0", 10, "an etag"]]})
    buffer = io.BytesIO()
    pq.write_table(table.append_column("volume", [[volume]]), buffer)
    name = f"cases-{hashlib.sha256(buffer.getvalue()).hexdigest()[:16]}.parquet"
    header = {"version": 1, "digest": "0123", "folds": 5, "cases": name, "fingerprint": {}, "source": {}}
    header |= {"plan": settings.to_plain(tiny.plan), "description": settings.to_plain(tiny.description)}
    folder.store.put(folder.key(f"data/{name}"), buffer.getvalue())
    folder.store.put(folder.key(f"data/{HEADER}"), json.dumps(header).encode())
    dataset = Prepared.load(f"{folder.uri}/data", folder.config)
    assert (dataset.format, dataset.digest) == (1, "0123")
    (stored,) = dataset.objects()
    assert stored == StoredObject("cases/a.zarr/image/c/0", 10, None, None, "an etag")
    assert (stored.required_etag, stored.version) == ("an etag", "an etag")
    assert dataset.case(0).volume["objects"] == [["image/c/0", 10, None, None, "an etag"]]


def test_missing_or_damaged_table_of_cases(folder: Bucket, tiny: Prepared) -> None:
    uri = publish_patients(folder, tiny, ["a"])
    header = json.loads(bytes(folder.store.get(folder.key(f"data/{HEADER}"))))
    key = folder.key(f"data/{header['cases']}")
    body = bytes(folder.store.get(key))
    folder.store.put(key, body[:-1] + b"x")
    with pytest.raises(PreparedError, match="table of cases is damaged"):
        Prepared.load(uri, folder.config)
    folder.store.delete(key)
    with pytest.raises(PreparedError, match=r"table of cases is missing\. Copy the dataset again"):
        Prepared.load(uri, folder.config)


PATIENTS = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=30)


@given(PATIENTS, PATIENTS, st.integers(2, 10))
def test_fold_depends_only_on_the_patient(patients: list[str], other_patients: list[str], folds: int) -> None:
    before = {patient: fold_for_patient(patient, folds) for patient in patients}
    after = {patient: fold_for_patient(patient, folds) for patient in other_patients + patients}
    assert before == {patient: after[patient] for patient in patients}
    assert all(0 <= fold < folds for fold in after.values())


def test_folds_have_similar_sizes() -> None:
    counts = [0] * 5
    for number in range(2000):
        counts[fold_for_patient(f"case_{number:05d}", 5)] += 1
    assert all(330 < count < 470 for count in counts)
    assert [fold_for_patient(f"case_{n:05d}", 5) for n in range(6)] == [1, 1, 2, 3, 0, 2]  # must never change


def test_split_holds_one_fold_out(folder: Bucket, tiny: Prepared) -> None:
    patients = [f"p{i // 2}" for i in range(30)]
    dataset = Prepared.load(publish_patients(folder, tiny, patients), folder.config)
    validated_rows: list[int] = []
    for fold in range(5):
        train, validation = dataset.split(fold)
        assert sorted(train + validation) == list(range(30))
        assert {dataset.case(i).fold for i in validation} == {fold}
        assert not {dataset.case(i).patient for i in validation} & {dataset.case(i).patient for i in train}
        validated_rows += validation
    assert sorted(validated_rows) == list(range(30))
    assert dataset.split(None) == (list(range(30)), [])


def test_invalid_or_empty_fold(folder: Bucket, tiny: Prepared) -> None:
    dataset = Prepared.load(publish_patients(folder, tiny, ["a"]), folder.config)
    for fold in (-1, 5):
        with pytest.raises(ConfigError, match=r"fold: expected 0 to 4, got"):
            dataset.split(fold)
    with pytest.raises(ConfigError, match=r"has 1 of 1 cases.*fold=null"):
        dataset.split(fold_for_patient("a", 5))
    with pytest.raises(ConfigError, match="has 0 of 1 cases"):
        dataset.split((fold_for_patient("a", 5) + 1) % 5)


def test_dataset_at_the_root_of_a_bucket(gcs: Bucket, tiny: Prepared) -> None:
    publish_patients(gcs, tiny, ["a"], prefix="")
    assert Prepared.load("gs://bkt", gcs.config).uri == "gs://bkt"
    assert (as_prefix(""), as_prefix("a/b"), as_prefix("a/b/")) == ("", "a/b/", "a/b/")


def test_cases_record_their_source(tiny: Prepared, tmp_path: Path) -> None:
    case = tiny.case(0)
    assert case.source["images"][0].endswith("/case_00000/imaging.nii.gz")
    assert case.source["label"].endswith("/case_00000/segmentation.nii.gz")
    assert tiny.source["layout"] == "kits19"
    assert case.shape == tuple(case.volume["label"]["shape"])
    assert replace(tiny, config=None) == tiny
    assert len(tiny) == len(sample_data.make_kits19()) // 2


def test_table_with_several_groups(folder: Bucket, tiny: Prepared) -> None:
    patients = [f"p{number}" for number in range(2500)]
    dataset = Prepared.load(publish_patients(folder, tiny, patients), folder.config)
    numbers = {f"case {number} of p{number}": number for number in range(2500)}
    for row in (0, 1023, 1024, 2047, 2048, 2499):
        case = dataset.case(row)
        assert case.id == dataset.ids[row]
        assert case.volume == {"n": numbers[case.id]}
        assert (case.patient, case.fold) == (f"p{numbers[case.id]}", fold_for_patient(case.patient, 5))
    with pytest.raises(IndexError):
        dataset.case(2500)
    assert pickle.loads(pickle.dumps(dataset)).case(2048) == dataset.case(2048)
