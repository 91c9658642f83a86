"""What the emulator does not implement fails with the name of what was asked for, in the dialect of the request."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
import requests
from google.api_core import exceptions
from google.cloud import storage

from voxlane.testing import Access, Emulator

from .conftest import BUCKET, s3_store

OBJECTS = f"/storage/v1/b/{BUCKET}/o"
GCS = {"Authorization": "Bearer t"}
S3 = {"Authorization": "AWS4-HMAC-SHA256 Credential=k/"}


@pytest.mark.parametrize(
    ("method", "path", "body", "named"),
    [
        ("GET", f"{OBJECTS}?userProject=p", None, "userProject"),
        ("GET", f"{OBJECTS}?softDeleted=true", None, "softDeleted"),
        ("GET", f"{OBJECTS}?matchGlob=**", None, "matchGlob"),
        ("POST", f"/upload{OBJECTS}?uploadType=media&name=k&kmsKeyName=x", None, "kmsKeyName"),
        ("POST", f"/upload{OBJECTS}?uploadType=media&name=k&predefinedAcl=publicRead", None, "predefinedAcl"),
        ("POST", f"/upload{OBJECTS}?uploadType=resumable&name=k", {"temporaryHold": True}, "temporaryHold"),
        ("PATCH", f"{OBJECTS}/k", {"retention": {"mode": "Locked"}}, "retention"),
        ("PATCH", f"{OBJECTS}/k", {"storageClass": "NEARLINE"}, "storageClass"),
        ("PATCH", f"/storage/v1/b/{BUCKET}", {"versioning": {"enabled": True}}, "versioning"),
        ("PATCH", f"/storage/v1/b/{BUCKET}", {"lifecycle": {"rule": [{}]}}, "lifecycle"),
        ("GET", f"{OBJECTS}/k/acl", None, "/o/k/acl"),
        ("POST", f"/storage/v1/b/{BUCKET}/notificationConfigs", {}, "notificationConfigs"),
        ("POST", f"{OBJECTS}/k/restore?generation=1", None, "/o/k/restore"),
    ],
)
def test_json_api(emulator: Emulator, method: str, path: str, body: Any, named: str) -> None:
    emulator.put(BUCKET, "k", b"1")
    response = requests.request(method, emulator.url + path, json=body, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["errors"][0]["reason"]) == (501, "notImplemented")
    assert named in error["message"]


@pytest.mark.parametrize("credentials", [GCS, S3], ids=["gcs", "s3"])
@pytest.mark.parametrize(
    ("method", "path", "headers", "named"),
    [
        ("GET", f"/{BUCKET}?acl", {}, "acl"),
        ("PUT", f"/{BUCKET}?versioning", {}, "versioning"),
        ("GET", f"/{BUCKET}?versions", {}, "versions"),
        ("PUT", f"/{BUCKET}?lifecycle", {}, "lifecycle"),
        ("GET", f"/{BUCKET}/k?tagging", {}, "tagging"),
        ("GET", f"/{BUCKET}/k?versionId=1", {}, "versionId"),
        ("GET", f"/{BUCKET}/k?partNumber=1", {}, "partNumber"),
        ("POST", f"/{BUCKET}", {}, "POST of a bucket"),
        ("PUT", f"/{BUCKET}/k", {"x-goog-encryption-key": "secret"}, "x-goog-encryption-key"),
        ("PUT", f"/{BUCKET}/k", {"x-amz-server-side-encryption": "aws:kms"}, "x-amz-server-side-encryption"),
        ("PUT", f"/{BUCKET}/k", {"x-amz-acl": "public-read"}, "x-amz-acl"),
        ("PUT", f"/{BUCKET}/k", {"x-amz-object-lock-mode": "COMPLIANCE"}, "x-amz-object-lock-mode"),
    ],
)
def test_xml_dialects(
    emulator: Emulator, credentials: dict[str, str], method: str, path: str, headers: dict[str, str], named: str
) -> None:
    emulator.put(BUCKET, "k", b"1")
    response = requests.request(method, emulator.url + path, headers=credentials | headers, timeout=60)
    assert response.status_code == 501
    assert "<Code>NotImplemented</Code>" in response.text
    assert named in response.text
    assert "secret" not in response.text
    assert ("<Details>" in response.text) == (credentials is GCS)
    assert emulator.get(BUCKET, "k") == b"1"


def test_archive_classes_of_s3_are_refused(s3: Any, emulator: Emulator) -> None:
    from botocore.exceptions import ClientError

    for name, code in (("GLACIER", "NotImplemented"), ("NO_SUCH_CLASS", "InvalidStorageClass")):
        with pytest.raises(ClientError) as error:
            s3.put_object(Bucket=BUCKET, Key="k", Body=b"1", StorageClass=name)
        assert error.value.response["Error"]["Code"] == code
    assert emulator.keys(BUCKET) == []


def test_unknown_storage_class_of_gcs_is_invalid(gcs: storage.Client, emulator: Emulator) -> None:
    for size in (1, 9 << 20):  # in one request, and resumable
        blob = gcs.bucket(BUCKET).blob("k", chunk_size=None if size == 1 else 1 << 20)
        blob.storage_class = "SLOW"
        with pytest.raises(exceptions.BadRequest, match="SLOW"):
            blob.upload_from_string(bytes(size))
    assert emulator.keys(BUCKET) == []


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, "gcs"),
        ({"x-goog-api-client": "x"}, "gcs"),
        ({"amz-sdk-request": "attempt=1"}, "s3"),
        ({"x-amz-date": "x"}, "s3"),
    ],
    ids=str,
)
def test_dialect_of_requests_without_credentials(emulator: Emulator, headers: dict[str, str], expected: str) -> None:
    response = requests.get(f"{emulator.url}/{BUCKET}/none", headers=headers, timeout=60)
    assert response.status_code == 404
    assert ("<Details>" in response.text, "<Resource>" in response.text) == (expected == "gcs", expected == "s3")


def test_dialect_of_anonymous_requests_can_be_set(emulator: Emulator) -> None:
    emulator.set_access(Access(anonymous_dialect="s3"))
    store = s3_store(emulator, skip_signature=True)
    store.put("k", b"1", attributes={"mine": "v"})
    assert store.get("k").attributes["mine"] == "v"
    assert "<Resource>" in requests.get(f"{emulator.url}/{BUCKET}/none", timeout=60).text
    with pytest.raises(ValueError, match="anonymous_dialect"):
        Access(anonymous_dialect="azure")  # type: ignore[arg-type]


def test_part_that_differs_from_its_checksum_is_refused(emulator: Emulator) -> None:
    url = f"{emulator.url}/{BUCKET}/k"
    document = requests.post(f"{url}?uploads", headers=GCS, timeout=60).text
    assert 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"' in document
    upload_id = document.partition("<UploadId>")[2].partition("<")[0]
    part_url = f"{url}?partNumber=1&uploadId={upload_id}"
    for checksum, code in (("crc32c=AAAAAA==", "CrcMismatch"), ("md5=AAAA", "BadDigest")):
        response = requests.put(part_url, b"1", headers=GCS | {"x-goog-hash": checksum}, timeout=60)
        assert (response.status_code, f"<Code>{code}</Code>" in response.text) == (400, True)
    response = requests.put(part_url, b"1", headers=GCS | {"x-goog-hash": "crc32c=kPWZ4w=="}, timeout=60)
    assert (response.status_code, response.headers["x-goog-hash"]) == (200, "crc32c=kPWZ4w==")


@pytest.mark.parametrize("path", [f"/{BUCKET}/k", f"{OBJECTS}/k?alt=media"])
def test_gzip_is_served_as_stored_when_it_may_not_be_decompressed(emulator: Emulator, path: str) -> None:
    compressed = gzip.compress(b"text" * 100)
    target = f"{emulator.url}/{BUCKET}/k"
    identity = {"Accept-Encoding": "identity"}
    for stored, extra in ((compressed, {"Cache-Control": "no-transform"}), (b"not gzip", {})):
        headers = GCS | {"Content-Encoding": "gzip"} | extra
        assert requests.put(target, stored, headers=headers, timeout=60).ok
        with requests.get(emulator.url + path, headers=GCS | identity, stream=True, timeout=60) as response:
            assert response.raw.read(decode_content=False) == stored
            assert response.headers["Content-Length"] == str(len(stored))
    assert requests.put(target, compressed, headers=GCS | {"Content-Encoding": "gzip"}, timeout=60).ok
    part = {"Accept-Encoding": "gzip", "Range": "bytes=0-3"}
    with requests.get(emulator.url + path, headers=GCS | part, stream=True, timeout=60) as response:
        assert (response.status_code, response.raw.read(decode_content=False)) == (206, compressed[:4])
    head = requests.head(target, headers=GCS | identity, timeout=60)
    assert ("Content-Length" in head.headers, head.headers["x-goog-stored-content-encoding"]) == (False, "gzip")
    # S3 never decompresses.
    with requests.get(target, headers=S3 | identity, stream=True, timeout=60) as response:
        assert response.raw.read(decode_content=False) == compressed


def test_default_class_applies_to_every_way_of_writing(gcs: storage.Client, emulator: Emulator) -> None:
    bucket = gcs.bucket(BUCKET)
    bucket.storage_class = "COLDLINE"
    bucket.patch()
    emulator.put(BUCKET, "admin", b"1")
    emulator.put(BUCKET, "archived", b"1", storage_class="ARCHIVE")
    emulator.fill(BUCKET, 1, key="filled")
    requests.put(f"{emulator.url}/{BUCKET}/xml", b"1", headers=GCS, timeout=60).raise_for_status()
    bucket.blob("composed").compose([bucket.blob("xml")])
    classes = {blob.name: blob.storage_class for blob in bucket.list_blobs()}
    expected = dict.fromkeys(["admin", "composed", "filled", "xml"], "COLDLINE") | {"archived": "ARCHIVE"}
    assert classes == expected
    document = requests.get(f"{emulator.url}/{BUCKET}", headers=GCS, timeout=60).text
    assert (document.count("COLDLINE"), document.count("ARCHIVE")) == (4, 1)
