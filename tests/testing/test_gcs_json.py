"""What google-cloud-storage does with the JSON API."""

from __future__ import annotations

import base64
import hashlib
import io
import os

import google_crc32c
import pytest
import requests
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import InvalidOperation
from google.cloud import storage

from voxlane.testing import Access, Emulator, synthetic

from .conftest import BUCKET, close_gcs

# The library leaves the connection of a refused download open, to be closed when it is collected.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

CHUNK_BYTES = 256 << 10


def test_emulator_host_variable(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.url)
    client = storage.Client(project="test", credentials=AnonymousCredentials())
    client.bucket(BUCKET).blob("k").upload_from_string(b"1")
    assert emulator.get(BUCKET, "k") == b"1"
    close_gcs(client)


@pytest.mark.parametrize("name", ["plain", "a/b c", "a//b", "foo/", "Ünï+cödé %", "𝄞?#&"])
def test_upload_and_download(gcs: storage.Client, emulator: Emulator, name: str) -> None:
    data = os.urandom(1000)
    blob = gcs.bucket(BUCKET).blob(name)
    blob.metadata = {"mine": "värde"}
    blob.upload_from_string(data, content_type="image/x")
    assert emulator.keys(BUCKET) == [name]
    blob_read = gcs.bucket(BUCKET).get_blob(name)
    assert blob_read is not None
    assert (blob_read.size, blob_read.content_type, blob_read.metadata) == (1000, "image/x", {"mine": "värde"})
    assert blob_read.md5_hash == base64.b64encode(hashlib.md5(data).digest()).decode()
    assert blob_read.crc32c == base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
    assert blob_read.generation == blob.generation
    assert blob_read.download_as_bytes() == data
    assert blob_read.download_as_bytes(start=10, end=19) == data[10:20]
    blob_read.delete()
    assert not blob_read.exists()


def test_resumable_upload_in_chunks(gcs: storage.Client, emulator: Emulator) -> None:
    data = os.urandom(3 * CHUNK_BYTES + 5)
    blob = gcs.bucket(BUCKET).blob("big", chunk_size=CHUNK_BYTES)
    blob.upload_from_file(io.BytesIO(data), content_type="image/x", if_generation_match=0)
    assert emulator.get(BUCKET, "big") == data
    assert emulator.counters().put.requests == 4
    blob.reload()
    assert blob.content_type == "image/x"
    # Also of unknown length, through the file interface.
    with gcs.bucket(BUCKET).blob("file").open("wb", chunk_size=CHUNK_BYTES) as out:
        out.write(data)
    assert emulator.get(BUCKET, "file") == data
    with gcs.bucket(BUCKET).blob("file").open("rb", chunk_size=CHUNK_BYTES) as source:
        assert source.read() == data


def test_media_upload(emulator: Emulator) -> None:
    url = f"{emulator.url}/upload/storage/v1/b/{BUCKET}/o"
    response = requests.post(url, params={"uploadType": "media", "name": "k"}, data=b"12", timeout=60)
    assert response.json()["size"] == "2"
    assert emulator.get(BUCKET, "k") == b"12"


def test_upload_may_contain_boundary_markers(gcs: storage.Client, emulator: Emulator) -> None:
    data = b"--==\r\n--x--\r\n\r\n" * 3
    gcs.bucket(BUCKET).blob("k").upload_from_string(data)
    assert emulator.get(BUCKET, "k") == data


def test_generation_preconditions(gcs: storage.Client, emulator: Emulator) -> None:
    blob = gcs.bucket(BUCKET).blob("k")
    blob.upload_from_string(b"1", if_generation_match=0)
    first = blob.generation
    with pytest.raises(exceptions.PreconditionFailed):
        blob.upload_from_string(b"2", if_generation_match=0)
    blob.upload_from_string(b"3", if_generation_match=first)
    assert blob.generation > first
    with pytest.raises(exceptions.PreconditionFailed):
        blob.download_as_bytes(if_generation_match=first)
    with pytest.raises(exceptions.NotModified):
        blob.reload(if_generation_not_match=blob.generation)
    with pytest.raises(exceptions.NotFound):
        gcs.bucket(BUCKET).blob("k", generation=first).download_as_bytes()
    with pytest.raises(exceptions.PreconditionFailed):
        blob.delete(if_generation_match=first)
    blob.delete(if_generation_match=blob.generation)
    assert emulator.keys(BUCKET) == []


def test_listing(gcs: storage.Client, emulator: Emulator) -> None:
    names = ["a", "a b+c%", "a//b", "d/1", "d/e/2", "foo/", "img-", "z𝄞", "\uffee"]
    emulator.put_many(BUCKET, dict.fromkeys(names, b"x"))
    assert [blob.name for blob in gcs.list_blobs(BUCKET, page_size=2)] == sorted(names, key=str.encode)
    assert [blob.name for blob in gcs.list_blobs(BUCKET, prefix="d/")] == ["d/1", "d/e/2"]
    within = gcs.list_blobs(BUCKET, start_offset="d/1", end_offset="img-")
    assert [blob.name for blob in within] == ["d/1", "d/e/2", "foo/"]
    rolled = gcs.list_blobs(BUCKET, delimiter="/", page_size=1)
    assert [blob.name for blob in rolled] == ["a", "a b+c%", "img-", "z𝄞", "\uffee"]
    assert rolled.prefixes == {"a/", "d/", "foo/"}
    assert len(list(gcs.list_blobs(BUCKET, max_results=3))) == 3


def test_listed_fields(gcs: storage.Client, emulator: Emulator) -> None:
    emulator.put_many(BUCKET, dict.fromkeys(["a", "b", "c"], b"xx"))
    emulator.fill(BUCKET, 2, key='f"/{}', size_bytes=7)
    blobs = list(gcs.list_blobs(BUCKET, fields="items(name,size),nextPageToken", page_size=2))
    assert [(blob.name, blob.size) for blob in blobs] == [
        ("a", 2),
        ("b", 2),
        ("c", 2),
        ('f"/0', 7),
        ('f"/1', 7),
    ]
    assert blobs[0].md5_hash is None
    url = f"{emulator.url}/storage/v1/b/{BUCKET}/o"
    page = requests.get(url, params={"fields": "items/name", "maxResults": "1"}, timeout=60).json()
    assert page == {"items": [{"name": "a"}]}


def test_listed_resource_equals_metadata(gcs: storage.Client, emulator: Emulator) -> None:
    emulator.fill(BUCKET, 2, key="f/ü {}", size_bytes=7)
    emulator.fill(BUCKET, 2, key="plain/{}")
    emulator.put(BUCKET, "put", b"1")
    url = f"{emulator.url}/storage/v1/b/{BUCKET}/o"
    for item in requests.get(url, timeout=60).json()["items"]:
        assert requests.get(item["selfLink"], timeout=60).json() == item
        assert requests.get(item["mediaLink"], timeout=60).content == emulator.get(BUCKET, item["name"])


def test_compose(gcs: storage.Client, emulator: Emulator) -> None:
    bucket = gcs.bucket(BUCKET)
    emulator.put_many(BUCKET, {f"p{i}": bytes([i]) * 10 for i in range(3)})
    sources = [bucket.get_blob(f"p{i}") for i in range(3)]
    target = bucket.blob("joined")
    target.content_type = "image/x"
    target.compose(sources, if_generation_match=0, if_source_generation_match=[each.generation for each in sources])
    expected = b"".join(bytes([i]) * 10 for i in range(3))
    assert target.download_as_bytes() == expected
    target.reload()
    assert (target.component_count, target.md5_hash, target.content_type) == (3, None, "image/x")
    assert target.crc32c == base64.b64encode(google_crc32c.Checksum(expected).digest()).decode()
    # Composites of composites add up; reading a range across their seams works.
    bucket.blob("twice").compose([target, sources[0], target])
    twice = bucket.get_blob("twice")
    assert twice is not None
    assert twice.component_count == 7
    assert twice.download_as_bytes(start=25, end=44) == (expected + bytes(10) + expected)[25:45]
    assert emulator.counters().compose.requests == 2


def test_invalid_compositions_are_refused(gcs: storage.Client, emulator: Emulator) -> None:
    bucket = gcs.bucket(BUCKET)
    emulator.put_many(BUCKET, {f"p{i:02d}": b"x" for i in range(33)})
    blobs = list(bucket.list_blobs())
    with pytest.raises(exceptions.BadRequest):
        bucket.blob("t").compose(blobs)
    with pytest.raises(exceptions.NotFound):
        bucket.blob("t").compose([bucket.blob("none")])
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("t").compose(blobs[:1], if_source_generation_match=[1])
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("p00").compose(blobs[:1], if_generation_match=0)
    old = bucket.blob("p01", generation=blobs[1].generation)
    emulator.put(BUCKET, "p01", b"changed")
    with pytest.raises(exceptions.NotFound):
        bucket.blob("t").compose([old])
    assert "t" not in emulator.keys(BUCKET)
    bucket.blob("t").compose([*blobs[2:32], blobs[0], blobs[0]])


def test_composite_etag_changes_with_the_generation(gcs: storage.Client, emulator: Emulator) -> None:
    emulator.put(BUCKET, "p", b"x")
    bucket = gcs.bucket(BUCKET)
    tags = set()
    for _ in range(2):
        bucket.blob("t").compose([bucket.blob("p")])
        headers = requests.get(f"{emulator.url}/{BUCKET}/t", headers={"x-goog-user-project": "p"}, timeout=60).headers
        assert headers["x-goog-component-count"] == "1"
        assert "md5" not in headers["x-goog-hash"]
        tags.add(headers["ETag"])
    assert len(tags) == 2


def test_copy_rewrite_rename(gcs: storage.Client, emulator: Emulator) -> None:
    emulator.create_bucket("other")
    bucket, other = gcs.bucket(BUCKET), gcs.bucket("other")
    blob = bucket.blob("a/ b")
    blob.upload_from_string(b"1", content_type="image/x")
    copied = bucket.copy_blob(blob, other, "c/d")
    assert (copied.content_type, emulator.get("other", "c/d")) == ("image/x", b"1")
    token, done, total = other.blob("e").rewrite(blob)
    assert (token, done, total) == (None, 1, 1)
    bucket.rename_blob(blob, "new")
    assert emulator.keys(BUCKET) == ["new"]
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.copy_blob(bucket.blob("new"), other, "e", if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.copy_blob(bucket.blob("new"), other, "x", if_source_generation_match=1)


def test_patch_changes_metadata_only(gcs: storage.Client, emulator: Emulator) -> None:
    emulator.fill(BUCKET, 1, key="f", size_bytes=5)
    blob = gcs.bucket(BUCKET).get_blob("f")
    assert blob is not None
    generation, etag = blob.generation, blob.etag
    blob.metadata = {"a": "1"}
    blob.content_type = "text/plain"
    blob.patch()
    blob_read = gcs.bucket(BUCKET).get_blob("f")
    assert blob_read is not None
    assert (blob_read.metadata, blob_read.content_type, blob_read.metageneration) == ({"a": "1"}, "text/plain", 2)
    assert blob_read.generation == generation
    assert blob_read.etag != etag
    assert blob_read.download_as_bytes() == synthetic("f", 5)


def test_batch_delete(gcs: storage.Client, emulator: Emulator) -> None:
    names = ["a", "b/ c", "ü"]
    emulator.put_many(BUCKET, dict.fromkeys([*names, "kept"], b"x"))
    with gcs.batch():
        for name in names:
            gcs.bucket(BUCKET).blob(name).delete()
    assert emulator.keys(BUCKET) == ["kept"]
    assert emulator.counters().delete.statuses == {204: 3}
    with pytest.raises(exceptions.NotFound), gcs.batch():
        gcs.bucket(BUCKET).blob("none").delete()


def test_batch_reads(gcs: storage.Client, emulator: Emulator) -> None:
    emulator.put_many(BUCKET, {"a": b"1", "b": b"22"})
    blobs = [gcs.bucket(BUCKET).blob(name) for name in "ab"]
    with gcs.batch():
        for blob in blobs:
            blob.reload()
    assert [blob.size for blob in blobs] == [1, 2]


def test_buckets(gcs: storage.Client) -> None:
    gcs.create_bucket("other")
    assert [bucket.name for bucket in gcs.list_buckets()] == [BUCKET, "other"]
    assert gcs.bucket("other").exists()
    with pytest.raises(exceptions.Conflict):
        gcs.create_bucket("other")
    gcs.bucket("other").blob("k").upload_from_string(b"")
    with pytest.raises(exceptions.Conflict):
        gcs.bucket("other").delete()
    gcs.bucket("other").delete(force=True)
    with pytest.raises(exceptions.NotFound):
        gcs.get_bucket("other")
    with pytest.raises(exceptions.NotFound):
        list(gcs.list_blobs("other"))


def test_permissions(gcs: storage.Client, emulator: Emulator) -> None:
    permissions = ["storage.objects.get", "storage.objects.create", "storage.objects.delete"]
    bucket = gcs.bucket(BUCKET)
    assert bucket.test_iam_permissions(permissions) == permissions
    emulator.set_access(Access(denied_permissions=frozenset({"storage.objects.create"})))
    assert bucket.test_iam_permissions(permissions) == ["storage.objects.get", "storage.objects.delete"]
    with pytest.raises(exceptions.Forbidden):
        bucket.blob("k").upload_from_string(b"1")


def test_anonymous_callers_need_the_token(gcs: storage.Client, emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"1")
    emulator.set_access(Access(bearer_token="token"))
    # On 401 the client tries to refresh its credentials, which anonymous ones cannot.
    with pytest.raises(InvalidOperation):
        gcs.bucket(BUCKET).blob("k").download_as_bytes()
    url = f"{emulator.url}/storage/v1/b/{BUCKET}/o/k?alt=media"
    assert requests.get(url, headers={"Authorization": "Bearer token"}, timeout=60).content == b"1"
    # Nor does the XML API, where GCS answers with another status.
    response = requests.get(f"{emulator.url}/{BUCKET}/k", timeout=60)
    assert (response.status_code, "<Code>AccessDenied</Code>" in response.text) == (403, True)


def test_error_documents(emulator: Emulator) -> None:
    response = requests.get(f"{emulator.url}/storage/v1/b/{BUCKET}/o/none", timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["errors"][0]["reason"]) == (404, 404, "notFound")


def test_upload_that_differs_from_its_checksum_is_refused(gcs: storage.Client, emulator: Emulator) -> None:
    blob = gcs.bucket(BUCKET).blob("k")
    blob.md5_hash = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    with pytest.raises(exceptions.BadRequest):
        blob.upload_from_string(b"1")
    assert emulator.keys(BUCKET) == []
