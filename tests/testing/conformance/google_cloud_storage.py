"""Operations of google-cloud-storage, Google's own library."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import google_crc32c
import pytest
import requests
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage import transfer_manager

from .registry import Client, Server, operation

CHUNK_BYTES = 256 << 10
PART_BYTES = 5 << 20


def connect_anonymously(url: str) -> storage.Client:
    return storage.Client(project="test", credentials=AnonymousCredentials(), client_options={"api_endpoint": url})


@contextmanager
def _connect(server: Server) -> Iterator[storage.Bucket]:
    client = connect_anonymously(server.url)
    yield client.bucket(server.bucket)
    client.close()


GOOGLE = Client("google-cloud-storage", "gcs", _connect)


def _url(bucket: storage.Bucket) -> str:
    return str(bucket.client._connection.API_BASE_URL)


def _read(bucket: storage.Bucket, name: str) -> storage.Blob:
    blob = bucket.get_blob(name)
    assert blob is not None
    return blob


def _fill(bucket: storage.Bucket, *names: str) -> None:
    for name in names:
        bucket.blob(name).upload_from_string(name.encode())


@operation("write, read, delete", GOOGLE)
def write_and_read(bucket: storage.Bucket) -> None:
    blob = bucket.blob("a/b c")
    blob.upload_from_string(b"content", content_type="image/x")
    assert blob.download_as_bytes() == b"content"
    assert blob.exists()
    blob.delete()
    assert not blob.exists()


@operation("read ranges", GOOGLE)
def read_ranges(bucket: storage.Bucket) -> None:
    blob = bucket.blob("k")
    blob.upload_from_string(b"0123456789")
    assert blob.download_as_bytes(start=2, end=4) == b"234"
    assert blob.download_as_bytes(start=-3) == b"789"
    assert blob.download_as_bytes(start=7, end=99) == b"789"
    with pytest.raises(exceptions.RequestRangeNotSatisfiable):
        blob.download_as_bytes(start=10)


@operation("missing objects and buckets", GOOGLE)
def report_missing(bucket: storage.Bucket) -> None:
    missing = bucket.blob("none")
    for action in (missing.download_as_bytes, missing.reload, missing.delete):
        with pytest.raises(exceptions.NotFound):
            action()
    with pytest.raises(exceptions.NotFound):
        list(bucket.client.list_blobs("no-such-bucket"))


@operation("special characters in keys", GOOGLE)
def use_special_keys(bucket: storage.Bucket) -> None:
    names = sorted(["a//b", "foo/", "Ünï+cödé %", "𝄞?#&", "quote'\"<>", "~tilde"], key=str.encode)
    for name in names:
        bucket.blob(name).upload_from_string(name.encode())
    assert [blob.name for blob in bucket.list_blobs()] == names
    assert [bucket.blob(name).download_as_bytes().decode() for name in names] == names


@operation("checksums", GOOGLE)
def verify_checksums(bucket: storage.Bucket) -> None:
    data = os.urandom(1000)
    for checksum in ("md5", "crc32c"):
        bucket.blob("k").upload_from_string(data, checksum=checksum)
        assert bucket.blob("k").download_as_bytes(checksum=checksum) == data
    blob = _read(bucket, "k")
    assert blob.md5_hash == base64.b64encode(hashlib.md5(data).digest()).decode()
    assert blob.crc32c == base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
    blob = bucket.blob("wrong")
    blob.crc32c = "AAAAAA=="
    with pytest.raises(exceptions.BadRequest):
        blob.upload_from_string(data, checksum=None)
    assert not blob.exists()


@operation("metadata resource", GOOGLE)
def describe_object(bucket: storage.Bucket) -> None:
    blob = bucket.blob("k")
    blob.metadata = {"mine": "value"}
    blob.cache_control = "no-store"
    blob.upload_from_string(b"content", content_type="image/x")
    blob = _read(bucket, "k")
    assert (blob.size, blob.content_type, blob.cache_control) == (7, "image/x", "no-store")
    assert blob.metadata == {"mine": "value"}
    properties = blob._properties
    assert properties["kind"] == "storage#object"
    assert properties["id"] == f"{bucket.name}/k/{blob.generation}"
    assert blob.self_link == f"{_url(bucket)}/storage/v1/b/{bucket.name}/o/k"
    assert blob.media_link.startswith(f"{_url(bucket)}/download/storage/v1/b/{bucket.name}/o/k?")
    assert (blob.metageneration, blob.storage_class, blob.component_count) == (1, "STANDARD", None)
    assert blob.etag
    assert blob.time_created == blob.updated
    assert blob.time_created is not None


@operation("change metadata", GOOGLE)
def patch_metadata(bucket: storage.Bucket) -> None:
    blob = bucket.blob("k")
    blob.upload_from_string(b"1", content_type="image/x")
    generation = blob.generation
    blob.metadata = {"a": "1"}
    blob.patch()
    assert blob.metageneration == 2
    blob = _read(bucket, "k")
    assert (blob.metadata, blob.content_type, blob.generation) == ({"a": "1"}, "image/x", generation)
    blob.patch(if_metageneration_match=2)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.patch(if_metageneration_match=2)


@operation("resumable upload", GOOGLE)
def upload_in_chunks(bucket: storage.Bucket) -> None:
    data = os.urandom(3 * CHUNK_BYTES + 5)
    blob = bucket.blob("sized", chunk_size=CHUNK_BYTES)
    blob.upload_from_file(io.BytesIO(data), size=len(data), content_type="image/x")
    assert bucket.blob("sized").download_as_bytes() == data
    assert _read(bucket, "sized").content_type == "image/x"
    with bucket.blob("streamed").open("wb", chunk_size=CHUNK_BYTES) as out:
        out.write(data)
    assert bucket.blob("streamed").download_as_bytes() == data


@operation("resume an interrupted upload", GOOGLE)
def resume_upload(bucket: storage.Bucket) -> None:
    data = os.urandom(2 * CHUNK_BYTES + 5)
    url = bucket.blob("k").create_resumable_upload_session(content_type="image/x", size=len(data))
    first = {"Content-Range": f"bytes 0-{CHUNK_BYTES - 1}/{len(data)}"}
    status = {"Content-Range": f"bytes */{len(data)}"}
    assert requests.put(url, data[:CHUNK_BYTES], headers=first, timeout=60).status_code == 308
    response = requests.put(url, headers=status, timeout=60)
    assert (response.status_code, response.headers["Range"]) == (308, f"bytes=0-{CHUNK_BYTES - 1}")
    rest = {"Content-Range": f"bytes {CHUNK_BYTES}-{len(data) - 1}/{len(data)}"}
    assert requests.put(url, data[CHUNK_BYTES:], headers=rest, timeout=60).json()["size"] == str(len(data))
    assert bucket.blob("k").download_as_bytes() == data


@operation("status of a completed upload", GOOGLE)
def query_completed_upload(bucket: storage.Bucket) -> None:
    # A client asks when the response to its last chunk was lost.
    url = bucket.blob("k").create_resumable_upload_session(size=2)
    headers = {"Content-Range": "bytes 0-1/2"}
    first = requests.put(url, b"12", headers=headers, timeout=60).json()
    response = requests.put(url, headers={"Content-Range": "bytes */2"}, timeout=60)
    assert (response.status_code, response.json()["generation"]) == (200, first["generation"])


@operation("cancel a resumable upload", GOOGLE)
def cancel_upload(bucket: storage.Bucket) -> None:
    url = bucket.blob("k").create_resumable_upload_session(size=2)
    assert requests.delete(url, timeout=60).status_code == 499
    assert requests.put(url, b"12", timeout=60).status_code in (404, 410)
    assert not bucket.blob("k").exists()


@operation("transfer_manager: many objects", GOOGLE)
def transfer_many(bucket: storage.Bucket) -> None:
    contents = {f"d/{number}": os.urandom(100 + number) for number in range(5)}
    pairs = [(io.BytesIO(data), bucket.blob(name)) for name, data in contents.items()]
    uploads = transfer_manager.upload_many(pairs, worker_type=transfer_manager.THREAD)
    assert [result for result in uploads if isinstance(result, Exception)] == []
    targets = [(bucket.blob(name), io.BytesIO()) for name in contents]
    downloads = transfer_manager.download_many(targets, worker_type=transfer_manager.THREAD)
    assert [result for result in downloads if isinstance(result, Exception)] == []
    assert [target.getvalue() for _, target in targets] == list(contents.values())


@operation("transfer_manager: upload in parallel parts", GOOGLE)
def upload_parts_concurrently(bucket: storage.Bucket) -> None:
    data = os.urandom(PART_BYTES + 17)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "big")
        path.write_bytes(data)
        for checksum in ("auto", "md5"):
            transfer_manager.upload_chunks_concurrently(
                str(path),
                bucket.blob("big"),
                content_type="image/x",
                chunk_size=PART_BYTES,
                worker_type=transfer_manager.THREAD,
                checksum=checksum,
            )
    blob = _read(bucket, "big")
    assert (blob.size, blob.content_type, blob.md5_hash) == (len(data), "image/x", None)
    assert blob.download_as_bytes(checksum="crc32c") == data


@operation("transfer_manager: download in parallel ranges", GOOGLE)
def download_ranges_concurrently(bucket: storage.Bucket) -> None:
    data = os.urandom(3 * CHUNK_BYTES + 17)
    bucket.blob("big").upload_from_string(data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "big")
        transfer_manager.download_chunks_concurrently(
            bucket.blob("big"), str(path), chunk_size=CHUNK_BYTES, worker_type=transfer_manager.THREAD
        )
        assert path.read_bytes() == data


@operation("compose", GOOGLE)
def compose(bucket: storage.Bucket) -> None:
    _fill(bucket, "p1", "p2")
    target = bucket.blob("joined")
    target.content_type = "image/x"
    target.compose([bucket.blob("p1"), bucket.blob("p2")])
    target = _read(bucket, "joined")
    assert (target.download_as_bytes(), target.content_type) == (b"p1p2", "image/x")
    assert target.crc32c == base64.b64encode(google_crc32c.Checksum(b"p1p2").digest()).decode()
    with pytest.raises(exceptions.BadRequest):
        target.compose([bucket.blob("p1")] * 33)


@operation("composite objects have no MD5", GOOGLE)
def describe_composite(bucket: storage.Bucket) -> None:
    _fill(bucket, "p1", "p2")
    bucket.blob("joined").compose([bucket.blob("p1"), bucket.blob("p2")])
    target = _read(bucket, "joined")
    assert (target.component_count, target.md5_hash) == (2, None)


@operation("compose with preconditions", GOOGLE)
def compose_with_preconditions(bucket: storage.Bucket) -> None:
    _fill(bucket, "p1")
    source = _read(bucket, "p1")
    target = bucket.blob("joined")
    target.compose([source], if_generation_match=0, if_source_generation_match=[source.generation])
    with pytest.raises(exceptions.PreconditionFailed):
        target.compose([source], if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("other").compose([source], if_source_generation_match=[1])
    with pytest.raises(exceptions.NotFound):
        bucket.blob("other").compose([bucket.blob("none")])


@operation("copy and rewrite", GOOGLE)
def copy_and_rewrite(bucket: storage.Bucket) -> None:
    blob = bucket.blob("a/ b")
    blob.upload_from_string(b"1", content_type="image/x")
    copied = bucket.copy_blob(blob, bucket, "c/d")
    assert (copied.download_as_bytes(), _read(bucket, "c/d").content_type) == (b"1", "image/x")
    assert bucket.blob("e").rewrite(blob) == (None, 1, 1)
    assert bucket.blob("e").download_as_bytes() == b"1"
    with pytest.raises(exceptions.NotFound):
        bucket.copy_blob(bucket.blob("none"), bucket, "x")


@operation("copy with preconditions", GOOGLE)
def copy_with_preconditions(bucket: storage.Bucket) -> None:
    _fill(bucket, "a", "b")
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.copy_blob(bucket.blob("a"), bucket, "b", if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.copy_blob(bucket.blob("a"), bucket, "c", if_source_generation_match=1)
    bucket.copy_blob(bucket.blob("a"), bucket, "c", if_generation_match=0)
    assert bucket.blob("b").download_as_bytes() == b"b"


@operation("move", GOOGLE)
def move(bucket: storage.Bucket) -> None:
    blob = bucket.blob("a b")
    blob.upload_from_string(b"1", content_type="image/x")
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.move_blob(blob, "c", if_source_generation_match=1)
    moved = bucket.move_blob(blob, "c/d")
    assert [each.name for each in bucket.list_blobs()] == ["c/d"]
    assert (moved.content_type, moved.download_as_bytes()) == ("image/x", b"1")
    assert moved.generation != blob.generation
    with pytest.raises(exceptions.NotFound):
        bucket.move_blob(blob, "x")


@operation("conditional write", GOOGLE)
def write_conditionally(bucket: storage.Bucket) -> None:
    blob = bucket.blob("k")
    blob.upload_from_string(b"1", if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.upload_from_string(b"2", if_generation_match=0)
    blob.upload_from_string(b"3", if_generation_match=blob.generation)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.upload_from_string(b"4", if_generation_match=12345)
    assert blob.download_as_bytes() == b"3"


@operation("conditional read", GOOGLE)
def read_conditionally(bucket: storage.Bucket) -> None:
    blob = bucket.blob("k")
    blob.upload_from_string(b"1")
    assert blob.download_as_bytes(if_generation_match=blob.generation) == b"1"
    with pytest.raises(exceptions.PreconditionFailed):
        blob.download_as_bytes(if_generation_match=1)
    with pytest.raises(exceptions.NotModified):
        blob.reload(if_generation_not_match=blob.generation)
    blob.reload(if_metageneration_match=1)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.reload(if_metageneration_match=2)


@operation("conditional delete", GOOGLE)
def delete_conditionally(bucket: storage.Bucket) -> None:
    blob = bucket.blob("k")
    blob.upload_from_string(b"1")
    with pytest.raises(exceptions.PreconditionFailed):
        blob.delete(if_generation_match=1)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.delete(if_metageneration_match=2)
    blob.delete(if_generation_match=blob.generation)
    assert not blob.exists()


@operation("generations", GOOGLE)
def read_generations(bucket: storage.Bucket) -> None:
    blob = bucket.blob("k")
    blob.upload_from_string(b"1")
    first = blob.generation
    blob.upload_from_string(b"2")
    assert blob.generation > first
    assert bucket.blob("k", generation=blob.generation).download_as_bytes() == b"2"
    with pytest.raises(exceptions.NotFound):
        bucket.blob("k", generation=first).download_as_bytes()


@operation("storage class of an upload", GOOGLE)
def upload_with_class(bucket: storage.Bucket) -> None:
    blob = bucket.blob("k")
    blob.storage_class = "NEARLINE"
    blob.upload_from_string(b"1")
    _fill(bucket, "usual")
    assert {each.name: each.storage_class for each in bucket.list_blobs()} == {"k": "NEARLINE", "usual": "STANDARD"}
    assert _read(bucket, "k").storage_class == "NEARLINE"


@operation("change the storage class", GOOGLE)
def change_class(bucket: storage.Bucket) -> None:
    blob = bucket.blob("k")
    blob.upload_from_string(b"1", content_type="image/x")
    blob.update_storage_class("COLDLINE")
    blob = _read(bucket, "k")
    assert (blob.storage_class, blob.content_type, blob.download_as_bytes()) == ("COLDLINE", "image/x", b"1")
    moved = bucket.copy_blob(blob, bucket, "copy")
    assert moved.storage_class == "STANDARD"  # the default of the bucket


@operation("default storage class of a bucket", GOOGLE)
def use_default_class(bucket: storage.Bucket) -> None:
    other = bucket.client.bucket(f"{bucket.name}-nearline")
    other.storage_class = "NEARLINE"
    other.create()
    other.blob("k").upload_from_string(b"1")
    assert bucket.client.get_bucket(other.name).storage_class == "NEARLINE"
    assert _read(other, "k").storage_class == "NEARLINE"
    other.delete(force=True)


@operation("gzip transcoding", GOOGLE)
def transcode(bucket: storage.Bucket) -> None:
    compressed = gzip.compress(b"text" * 100)
    blob = bucket.blob("k")
    blob.content_encoding = "gzip"
    blob.upload_from_string(compressed, content_type="text/plain")
    assert blob.download_as_bytes(raw_download=True) == compressed
    assert blob.download_as_bytes() == b"text" * 100
    url = f"{_url(bucket)}/storage/v1/b/{bucket.name}/o/k"
    headers = {"Accept-Encoding": "identity", "Range": "bytes=0-3"}
    response = requests.get(url, params={"alt": "media"}, headers=headers, timeout=60)
    assert (response.status_code, response.content) == (200, b"text" * 100)
    assert "Content-Encoding" not in response.headers
    assert "Content-Length" not in response.headers
    assert response.headers["x-goog-stored-content-encoding"] == "gzip"
    assert response.headers["x-goog-stored-content-length"] == str(len(compressed))


@operation("batch delete", GOOGLE)
def delete_in_batch(bucket: storage.Bucket) -> None:
    names = ["a", "b/ c", "ü"]
    _fill(bucket, *names, "remaining")
    with bucket.client.batch():
        for name in names:
            bucket.blob(name).delete()
    assert [blob.name for blob in bucket.list_blobs()] == ["remaining"]
    with pytest.raises(exceptions.NotFound), bucket.client.batch():
        bucket.blob("none").delete()


LISTED = ["a", "d/1", "d/e/2", "foo/bar", "img-", "img-1", "ünï"]


@operation("list with a prefix and a delimiter", GOOGLE)
def list_prefixes(bucket: storage.Bucket) -> None:
    _fill(bucket, *LISTED)
    assert [blob.name for blob in bucket.list_blobs(prefix="d/")] == ["d/1", "d/e/2"]
    rows = bucket.list_blobs(delimiter="/")
    assert [blob.name for blob in rows] == ["a", "img-", "img-1", "ünï"]
    assert rows.prefixes == {"d/", "foo/"}


@operation("list between offsets", GOOGLE)
def list_between_offsets(bucket: storage.Bucket) -> None:
    _fill(bucket, *LISTED)
    rows = bucket.list_blobs(start_offset="d/1", end_offset="img-")
    assert [blob.name for blob in rows] == ["d/1", "d/e/2", "foo/bar"]


@operation("list in pages", GOOGLE)
def list_pages(bucket: storage.Bucket) -> None:
    _fill(bucket, *LISTED)
    pages = [[blob.name for blob in page] for page in bucket.list_blobs(page_size=3).pages]
    assert pages == [LISTED[:3], LISTED[3:6], LISTED[6:]]


@operation("list selected fields", GOOGLE)
def list_fields(bucket: storage.Bucket) -> None:
    _fill(bucket, *LISTED)
    rows = list(bucket.list_blobs(fields="items(name,size),nextPageToken"))
    assert [(blob.name, blob.size) for blob in rows] == [(name, len(name.encode())) for name in LISTED]
    assert {blob.md5_hash for blob in rows} == {None}
    url = f"{_url(bucket)}/storage/v1/b/{bucket.name}/o/a"
    assert requests.get(url, params={"fields": "name,size"}, timeout=60).json() == {"name": "a", "size": "1"}


@operation("anonymous access", GOOGLE)
def read_anonymously(bucket: storage.Bucket) -> None:
    # Without a token: through the JSON API with the library, through the XML API as a browser does.
    _fill(bucket, "k")
    client = storage.Client.create_anonymous_client()
    client.close()
    client = connect_anonymously(_url(bucket))
    assert client.bucket(bucket.name).blob("k").download_as_bytes() == b"k"
    client.close()
    response = requests.get(f"{_url(bucket)}/{bucket.name}/k", timeout=60)
    assert (response.status_code, response.content) == (200, b"k")
    assert "x-goog-generation" in response.headers
    assert "crc32c=" in response.headers["x-goog-hash"]
    response = requests.get(f"{_url(bucket)}/{bucket.name}/none", timeout=60)
    assert response.status_code == 404
    assert "<Code>NoSuchKey</Code>" in response.text
    assert "<Details>" in response.text  # which only errors of GCS have


@operation("buckets", GOOGLE)
def use_buckets(bucket: storage.Bucket) -> None:
    other = bucket.client.create_bucket(f"{bucket.name}-other")
    assert other.exists()
    assert other.name in [each.name for each in bucket.client.list_buckets()]
    with pytest.raises(exceptions.Conflict):
        bucket.client.create_bucket(other.name)
    _fill(other, "k")
    with pytest.raises(exceptions.Conflict):
        other.delete()
    other.delete(force=True)
    with pytest.raises(exceptions.NotFound):
        bucket.client.get_bucket(other.name)
