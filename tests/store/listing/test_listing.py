"""Listing real servers, and manifests."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from tests.conftest import Bucket
from voxlane import Entry, Manifest, errors, list_objects
from voxlane.store.listing.manifest import SCHEMA
from voxlane.testing import Emulator

TRICKY = ["img", "img-", "img-1", "a", "aa", "aaa", "a/b", "日本/一", "日本/二", "éa", "z" * 300, "z" * 301, "x y", "~"]


@pytest.mark.parametrize("concurrency", [1, 32])
def test_parallel_and_sequential_agree(gcs: Bucket, emulator: Emulator, concurrency: int) -> None:
    emulator.put_many("bkt", {key: key.encode() for key in TRICKY})
    emulator.fill("bkt", count=25_000, key="scans/case-{:06d}/imaging.nii.gz", size_bytes=3)
    manifest = list_objects("gs://bkt/", config=gcs.config, concurrency=concurrency)
    expected = sorted([*TRICKY, *(f"scans/case-{i:06d}/imaging.nii.gz" for i in range(25_000))])
    assert manifest.keys() == expected
    assert manifest.total_bytes == 75_000 + sum(len(k.encode()) for k in TRICKY)


def test_small_bucket_costs_as_much_as_a_sequential_listing(gcs: Bucket, emulator: Emulator) -> None:
    emulator.fill("bkt", count=2_500, key="k{:05d}", size_bytes=1)
    store = gcs.store
    list_objects("gs://bkt/", store=store)
    assert store.counters.read().by_kind["list"]["requests"] == emulator.counters().list.requests == 3


def test_client_and_server_count_the_same_list_requests(gcs: Bucket, emulator: Emulator) -> None:
    emulator.fill("bkt", count=40_000, key="k{:06d}", size_bytes=1)
    store = gcs.store
    assert len(list_objects("gs://bkt/", store=store)) == 40_000
    assert store.counters.read().by_kind["list"]["requests"] == emulator.counters().list.requests


def test_server_that_lists_folder_by_folder(s3: Bucket) -> None:
    """SeaweedFS lists by folder. The listing must still be complete."""
    store = s3.with_config(max_concurrency=32).store
    names = [f"d{i % 3}{sep}{i:04d}" for i in range(2_200) for sep in ("-", "/")]
    for future in [store.submit(store.put, name, b"x") for name in names]:
        future.result()
    assert list_objects("s3://bkt/", store=store).keys() == sorted(names)


def test_folder_markers_are_left_out_and_counted(s3_emulator: Bucket, emulator: Emulator) -> None:
    """A marker is an empty object whose key ends in a slash; nothing else is one, whatever keys lie below it."""
    objects = {"scans/": b"", "scans/todo/": b"", "scans/a": b"x", "e": b"", "e/x": b"x", "full/": b"bytes", "/": b""}
    emulator.put_many("bkt", objects)
    manifest = list_objects("s3://bkt/", config=s3_emulator.config)
    assert manifest.keys() == ["e", "e/x", "full/", "scans/a"]
    assert manifest.folder_markers == 3
    assert manifest.match("*x").folder_markers == 3
    with_markers = list_objects("s3://bkt/", config=s3_emulator.config, folder_markers=True)
    assert with_markers.keys() == sorted(objects)
    assert with_markers.folder_markers == 0


def test_match(folder: Bucket) -> None:
    manifest = Manifest.of(
        "gs://b/data/", [Entry(f"data/{n}", 1, None, None) for n in ("a.nii.gz", "b.txt", "sub/c.nii.gz")]
    )
    assert manifest.match("*.nii.gz").keys() == ["data/a.nii.gz", "data/sub/c.nii.gz"]
    assert manifest.match("sub/*").keys() == ["data/sub/c.nii.gz"]
    assert manifest.match(["b.*", "a.*"]).keys() == ["data/a.nii.gz", "data/b.txt"]
    assert len(manifest.match("[")) == 0
    assert manifest.match(None) == manifest


def test_manifest_is_saved_and_loaded_anywhere(bucket: Bucket) -> None:
    manifest = Manifest.of("gs://b/p", [Entry("p/b", 2, '"e"', "7"), Entry("p/a", 1, None, None)])
    target = f"{bucket.uri}/manifests/m.parquet"
    manifest.save(target, bucket.config)
    loaded = Manifest.load(target, bucket.config)
    assert loaded == manifest
    assert list(loaded) == [Entry("p/a", 1, None, None), Entry("p/b", 2, '"e"', "7")]
    assert loaded[-1].key == "p/b"
    assert loaded[:1].keys() == ["p/a"]
    assert loaded.fingerprint == manifest.fingerprint


def test_fingerprint_does_not_depend_on_how_the_table_is_stored() -> None:
    manifest = Manifest.of("gs://b/p", [Entry(f"p/{i:03d}", i, None, None) for i in range(100)])
    assert (
        manifest.take(np.arange(10, 20)).fingerprint
        == manifest.take(np.arange(5, 50)).take(np.arange(5, 15)).fingerprint
    )
    assert manifest.take([1, 0]).fingerprint != manifest.take([0, 1]).fingerprint


def test_other_files_are_rejected_as_manifests(folder: Bucket) -> None:
    folder.store.put(folder.key("m"), b"not parquet")
    with pytest.raises(errors.ConfigError, match="not a manifest"):
        Manifest.load(f"{folder.uri}/m")
    with pytest.raises(errors.NotFoundError):
        Manifest.load(f"{folder.uri}/none")


def test_empty_bucket_lists_as_nothing(bucket: Bucket) -> None:
    manifest = list_objects(f"{bucket.uri}/nothing", config=bucket.config)
    assert len(manifest) == 0
    assert manifest.table.schema == SCHEMA
    assert manifest.fingerprint


def test_storage_classes_select_objects_on_gcs(gcs: Bucket, emulator: Emulator) -> None:
    client = storage.Client(
        project="test", credentials=AnonymousCredentials(), client_options={"api_endpoint": emulator.url}
    )
    for name, storage_class in {"a": "STANDARD", "b": "NEARLINE", "c": "ARCHIVE"}.items():
        blob = client.bucket("bkt").blob(name)
        blob.storage_class = storage_class
        blob.upload_from_string(b"x")
    client.close()
    assert list_objects(gcs.uri, config=gcs.config).keys() == ["a", "b", "c"]
    hot = list_objects(gcs.uri, config=gcs.config, storage_classes=["STANDARD", "ARCHIVE"])
    assert (hot.keys(), hot.other_classes) == (["a", "c"], 1)
    assert (hot.match("*a").other_classes, pickle.loads(pickle.dumps(hot)).other_classes) == (1, 1)
    assert list_objects(gcs.uri, config=gcs.config, storage_classes=["COLDLINE"]).keys() == []


def test_storage_classes_of_another_cloud_are_an_error(s3_emulator: Bucket) -> None:
    with pytest.raises(errors.ConfigError, match="storage_classes can be listed only on GCS"):
        list_objects(s3_emulator.uri, config=s3_emulator.config, storage_classes=["STANDARD"])
