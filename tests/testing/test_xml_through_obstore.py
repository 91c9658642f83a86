"""What obstore does with S3 and with the GCS XML API: the same tests for both dialects."""

from __future__ import annotations

import os

import obstore
import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    NotModifiedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import GCSStore, S3Store

from voxlane.testing import Access, Emulator, synthetic

from .conftest import BUCKET, gcs_store, s3_store

Store = S3Store | GCSStore
PART_BYTES = 5 << 20


def test_objects_can_be_written_and_read(store: Store, emulator: Emulator) -> None:
    result = store.put("a/b.bin", b"hello")
    assert emulator.get(BUCKET, "a/b.bin") == b"hello"
    response = store.get("a/b.bin")
    assert bytes(response.bytes()) == b"hello"
    assert response.meta["e_tag"] == result["e_tag"] == '"5d41402abc4b2a76b9719d911017c592"'


def test_ranges(store: Store, emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", bytes(range(100)))
    assert bytes(store.get_range("k", start=10, end=20)) == bytes(range(10, 20))
    assert bytes(obstore.get(store, "k", options={"range": {"suffix": 5}}).bytes()) == bytes(range(95, 100))
    assert bytes(obstore.get(store, "k", options={"range": {"offset": 90}}).bytes()) == bytes(range(90, 100))
    both = store.get_ranges("k", starts=[0, 50], ends=[3, 60])
    assert [bytes(each) for each in both] == [bytes(range(3)), bytes(range(50, 60))]


def test_listed_metadata_equals_head(store: Store) -> None:
    store.put("simple", b"1234")
    store.put("parts", os.urandom(PART_BYTES + 1), use_multipart=True, chunk_size=PART_BYTES)
    store.copy("parts", "copy")
    listed = {meta["path"]: meta for meta in store.list().collect()}
    assert sorted(listed) == ["copy", "parts", "simple"]
    for path, meta in listed.items():
        head = store.head(path)
        assert (meta["e_tag"], meta["size"]) == (head["e_tag"], head["size"])


def test_multipart_joins_parts_in_order(store: Store, emulator: Emulator) -> None:
    data = os.urandom(2 * PART_BYTES + 17)
    store.put("big", data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=3)
    assert emulator.get(BUCKET, "big") == data
    assert emulator.uploads(BUCKET) == []
    assert emulator.counters().part.requests == 3
    assert emulator.counters().part.bytes_in == len(data)


def test_range_across_parts(store: Store) -> None:
    data = os.urandom(2 * PART_BYTES)
    store.put("big", data, use_multipart=True, chunk_size=PART_BYTES)
    start, end = PART_BYTES - 3, PART_BYTES + 3
    assert bytes(store.get_range("big", start=start, end=end)) == data[start:end]


def test_multipart_etag_depends_on_the_dialect(emulator: Emulator) -> None:
    data = bytes(PART_BYTES + 1)
    s3_tag = s3_store(emulator).put("s", data, use_multipart=True, chunk_size=PART_BYTES)["e_tag"]
    assert s3_tag is not None
    assert s3_tag.endswith('-2"')
    gcs = gcs_store(emulator)
    first = gcs.put("g", data, use_multipart=True, chunk_size=PART_BYTES)["e_tag"]
    second = gcs.put("g", data, use_multipart=True, chunk_size=PART_BYTES)["e_tag"]
    assert first != second


def test_delimiter_and_offset(store: Store, emulator: Emulator) -> None:
    emulator.put_many(BUCKET, dict.fromkeys(["a", "d/1", "d/2", "d/e/3", "f"], b""))
    top = store.list_with_delimiter()
    assert [meta["path"] for meta in top["objects"]] == ["a", "f"]
    assert top["common_prefixes"] == ["d"]
    assert [meta["path"] for meta in store.list(offset="d/1").collect()] == ["d/2", "d/e/3", "f"]
    assert [meta["path"] for meta in store.list("d/e").collect()] == ["d/e/3"]


def test_lists_many_pages_in_order(store: Store, emulator: Emulator) -> None:
    emulator.fill(BUCKET, 3500, key="n/{:05d}")
    assert [meta["path"] for meta in store.list().collect()] == [f"n/{i:05d}" for i in range(3500)]
    assert emulator.counters().list.requests == 4


@pytest.mark.parametrize("key", ["img-", "a b+c%", "Ünï/cödé ☃ 𝄞", "q?x=1&y", "#hash", "quote'\"<>&", "~tilde"])
def test_special_keys_are_preserved(store: Store, emulator: Emulator, key: str) -> None:
    store.put(key, b"x")
    assert emulator.keys(BUCKET) == [key]
    assert [meta["path"] for meta in store.list().collect()] == [key]
    assert bytes(store.get(key).bytes()) == b"x"
    store.delete(key)
    assert emulator.keys(BUCKET) == []


def test_create_only_and_update(store: Store, emulator: Emulator) -> None:
    first = store.put("k", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        store.put("k", b"2", mode="create")
    version = {name: value for name, value in first.items() if value is not None}
    store.put("k", b"3", mode=version)
    with pytest.raises(PreconditionError):
        store.put("k", b"4", mode=version)
    assert emulator.get(BUCKET, "k") == b"3"


def test_conditional_reads(store: Store, emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"1")
    tag = store.head("k")["e_tag"]
    assert bytes(obstore.get(store, "k", options={"if_match": tag}).bytes()) == b"1"
    with pytest.raises(PreconditionError):
        obstore.get(store, "k", options={"if_match": '"other"'})
    with pytest.raises(NotModifiedError):
        obstore.get(store, "k", options={"if_none_match": tag})


def test_copy_rename_delete(store: Store, emulator: Emulator) -> None:
    emulator.put(BUCKET, "a b%", b"1")
    store.copy("a b%", "c")
    store.rename("c", "d")
    assert emulator.keys(BUCKET) == ["a b%", "d"]
    store.delete(["a b%", "d"])
    assert emulator.keys(BUCKET) == []


def test_missing_objects(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.get("none")
    with pytest.raises(FileNotFoundError):
        store.head("none")
    with pytest.raises(FileNotFoundError):
        store.copy("none", "other")


def test_synthetic_bodies(store: Store, emulator: Emulator) -> None:
    size = 3_000_000
    assert emulator.fill(BUCKET, 3, key="s-{}", size_bytes=size) == 3
    expected = synthetic("s-1", size)
    assert bytes(store.get("s-1").bytes()) == expected == emulator.get(BUCKET, "s-1")
    assert bytes(store.get_range("s-1", start=1_048_000, end=2_500_000)) == expected[1_048_000:2_500_000]
    assert synthetic("s-2", size) != expected
    assert store.head("s-1")["e_tag"] == store.list().collect()[1]["e_tag"]


def test_attributes_are_stored(store: Store) -> None:
    store.put("k", b"x", attributes={"Content-Type": "text/plain", "Cache-Control": "no-store", "mine": "v"})
    attributes = obstore.get(store, "k").attributes
    assert (attributes["Content-Type"], attributes["Cache-Control"], attributes["mine"]) == (
        "text/plain",
        "no-store",
        "v",
    )


def test_credentials_are_required(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"1")
    emulator.set_access(Access(bearer_token="right", access_key_id="right"))
    assert bytes(gcs_store(emulator, bearer_token="right").get("k").bytes()) == b"1"
    assert bytes(s3_store(emulator, access_key_id="right").get("k").bytes()) == b"1"
    with pytest.raises(UnauthenticatedError):
        gcs_store(emulator, bearer_token="wrong").get("k")
    with pytest.raises(PermissionDeniedError):
        s3_store(emulator, access_key_id="wrong").get("k")
    with pytest.raises(PermissionDeniedError):
        s3_store(emulator, skip_signature=True).get("k")


def test_denied_permissions(store: Store, emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"1")
    emulator.set_access(Access(denied_permissions=frozenset({"storage.objects.create"})))
    assert bytes(store.get("k").bytes()) == b"1"
    with pytest.raises(PermissionDeniedError):
        store.put("k", b"2")
