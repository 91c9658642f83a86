"""What boto3 does, in particular what obstore never asks for."""

from __future__ import annotations

import hashlib
import io
import os
from typing import Any

import pytest
from botocore.exceptions import ClientError

from voxlane.testing import Access, Emulator

from .conftest import BUCKET

PART_BYTES = 5 << 20


def code(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def test_put_with_trailing_checksum(s3: Any, emulator: Emulator) -> None:
    # A file body with a checksum is sent aws-chunked, with the checksum in a trailer.
    data = os.urandom(200_000)
    s3.put_object(Bucket=BUCKET, Key="k", Body=io.BytesIO(data), ChecksumAlgorithm="SHA256", Metadata={"a": "b"})
    assert emulator.get(BUCKET, "k") == data
    response = s3.get_object(Bucket=BUCKET, Key="k")
    assert response["Body"].read() == data
    assert response["Metadata"] == {"a": "b"}
    assert response["ETag"] == f'"{hashlib.md5(data).hexdigest()}"'
    assert "ContentEncoding" not in response


@pytest.mark.parametrize(("header", "expected"), [("bytes=2-4", b"234"), ("bytes=7-", b"789"), ("bytes=-2", b"89")])
def test_ranges(s3: Any, emulator: Emulator, header: str, expected: bytes) -> None:
    emulator.put(BUCKET, "k", b"0123456789")
    response = s3.get_object(Bucket=BUCKET, Key="k", Range=header)
    assert response["Body"].read() == expected
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 206


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-12", "bytes=-0"])
def test_range_past_the_end(s3: Any, emulator: Emulator, header: str) -> None:
    emulator.put(BUCKET, "k", b"0123456789")
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket=BUCKET, Key="k", Range=header)
    assert code(error) == "InvalidRange"


def test_errors_have_the_codes_of_s3(s3: Any) -> None:
    with pytest.raises(s3.exceptions.NoSuchKey):
        s3.get_object(Bucket=BUCKET, Key="none")
    with pytest.raises(s3.exceptions.NoSuchBucket):
        s3.list_objects_v2(Bucket="none")
    with pytest.raises(ClientError) as error:
        s3.head_object(Bucket=BUCKET, Key="none")
    assert code(error) == "404"
    with pytest.raises(s3.exceptions.NoSuchUpload):
        s3.upload_part(Bucket=BUCKET, Key="k", UploadId="none", PartNumber=1, Body=b"")


def test_conditional_writes(s3: Any) -> None:
    tag = s3.put_object(Bucket=BUCKET, Key="k", Body=b"1", IfNoneMatch="*")["ETag"]
    with pytest.raises(ClientError) as error:
        s3.put_object(Bucket=BUCKET, Key="k", Body=b"2", IfNoneMatch="*")
    assert code(error) == "PreconditionFailed"
    s3.put_object(Bucket=BUCKET, Key="k", Body=b"3", IfMatch=tag)
    with pytest.raises(ClientError) as error:
        s3.put_object(Bucket=BUCKET, Key="k", Body=b"4", IfMatch=tag)
    assert code(error) == "PreconditionFailed"
    with pytest.raises(ClientError) as error:
        s3.put_object(Bucket=BUCKET, Key="absent", Body=b"4", IfMatch=tag)
    assert code(error) == "NoSuchKey"


KEYS = ["a", "a b+c%", "a//b", "foo/", "foo/bar", "img-", "img-1", "z/ünï", "z/𝄞", "\u007f", "\uffee"]


@pytest.mark.parametrize("version", ["list_objects", "list_objects_v2"])
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_pages_of_any_size_give_all_keys_in_utf8_order(s3: Any, emulator: Emulator, version: str, size: int) -> None:
    emulator.put_many(BUCKET, dict.fromkeys(KEYS, b"x"))
    pages = s3.get_paginator(version).paginate(Bucket=BUCKET, PaginationConfig={"PageSize": size})
    keys = [row["Key"] for page in pages for row in page.get("Contents", [])]
    assert keys == sorted(KEYS, key=str.encode)


@pytest.mark.parametrize("version", ["list_objects", "list_objects_v2"])
@pytest.mark.parametrize("size", [1, 1000])
def test_delimiter_rolls_up_across_pages(s3: Any, emulator: Emulator, version: str, size: int) -> None:
    emulator.put_many(BUCKET, dict.fromkeys(KEYS, b"x"))
    pages = list(s3.get_paginator(version).paginate(Bucket=BUCKET, Delimiter="/", PaginationConfig={"PageSize": size}))
    keys = [row["Key"] for page in pages for row in page.get("Contents", [])]
    prefixes = [row["Prefix"] for page in pages for row in page.get("CommonPrefixes", [])]
    assert keys == ["a", "a b+c%", "img-", "img-1", "\u007f", "\uffee"]
    assert prefixes == ["a/", "foo/", "z/"]


def test_listing_bounds(s3: Any, emulator: Emulator) -> None:
    emulator.put_many(BUCKET, dict.fromkeys(["a", "b", "c"], b"x"))
    page = s3.list_objects_v2(Bucket=BUCKET, StartAfter="a", MaxKeys=1)
    assert [row["Key"] for row in page["Contents"]] == ["b"]
    assert page["IsTruncated"]
    assert s3.list_objects_v2(Bucket=BUCKET, MaxKeys=0)["KeyCount"] == 0
    with pytest.raises(ClientError):
        s3.list_objects_v2(Bucket=BUCKET, ContinuationToken="not one of ours")


def test_delete_many_and_missing(s3: Any, emulator: Emulator) -> None:
    emulator.put_many(BUCKET, dict.fromkeys(KEYS, b"x"))
    response = s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in [*KEYS, "absent"]]})
    assert [row["Key"] for row in response["Deleted"]] == [*KEYS, "absent"]
    assert emulator.keys(BUCKET) == []
    s3.delete_object(Bucket=BUCKET, Key="absent")


def test_copy_keeps_or_replaces_metadata(s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="ü b", Body=b"1", Metadata={"a": "1"}, ContentType="text/plain")
    source = {"Bucket": BUCKET, "Key": "ü b"}
    s3.copy_object(Bucket=BUCKET, Key="kept", CopySource=source)
    s3.copy_object(Bucket=BUCKET, Key="new", CopySource=source, MetadataDirective="REPLACE", Metadata={"c": "3"})
    copied, replaced = s3.head_object(Bucket=BUCKET, Key="kept"), s3.head_object(Bucket=BUCKET, Key="new")
    assert (copied["Metadata"], copied["ContentType"]) == ({"a": "1"}, "text/plain")
    assert replaced["Metadata"] == {"c": "3"}


def test_multipart_step_by_step(s3: Any, emulator: Emulator) -> None:
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key="k", ContentType="text/plain")["UploadId"]
    emulator.put(BUCKET, "source", b"0123456789")
    first, second = os.urandom(PART_BYTES), b"tail"
    # Out of order, and the first one twice: the later one counts.
    tags = {2: s3.upload_part(Bucket=BUCKET, Key="k", UploadId=upload, PartNumber=2, Body=second)["ETag"]}
    s3.upload_part(Bucket=BUCKET, Key="k", UploadId=upload, PartNumber=1, Body=b"replaced")
    tags[1] = s3.upload_part(Bucket=BUCKET, Key="k", UploadId=upload, PartNumber=1, Body=first)["ETag"]
    copied = s3.upload_part_copy(
        Bucket=BUCKET,
        Key="k",
        UploadId=upload,
        PartNumber=3,
        CopySource={"Bucket": BUCKET, "Key": "source"},
        CopySourceRange="bytes=2-4",
    )
    tags[3] = copied["CopyPartResult"]["ETag"]
    listed = s3.list_parts(Bucket=BUCKET, Key="k", UploadId=upload)["Parts"]
    assert [(part["PartNumber"], part["Size"]) for part in listed] == [(1, PART_BYTES), (2, 4), (3, 3)]
    assert [row["Key"] for row in s3.list_multipart_uploads(Bucket=BUCKET)["Uploads"]] == ["k"]
    (held,) = emulator.uploads(BUCKET)
    assert (held.upload_id, held.key, held.parts[2]) == (upload, "k", 4)
    parts = [{"PartNumber": number, "ETag": tags[number]} for number in (1, 2, 3)]
    with pytest.raises(ClientError) as error:
        s3.complete_multipart_upload(Bucket=BUCKET, Key="k", UploadId=upload, MultipartUpload={"Parts": parts[::-1]})
    assert code(error) == "InvalidPartOrder"
    assert "k" not in emulator.keys(BUCKET)
    done = s3.complete_multipart_upload(Bucket=BUCKET, Key="k", UploadId=upload, MultipartUpload={"Parts": parts})
    digests = b"".join(hashlib.md5(data).digest() for data in (first, second, b"234"))
    assert done["ETag"] == f'"{hashlib.md5(digests).hexdigest()}-3"'
    assert emulator.get(BUCKET, "k") == first + second + b"234"
    assert s3.head_object(Bucket=BUCKET, Key="k")["ContentType"] == "text/plain"


def test_abort_removes_the_parts(s3: Any, emulator: Emulator) -> None:
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key="k")["UploadId"]
    s3.upload_part(Bucket=BUCKET, Key="k", UploadId=upload, PartNumber=1, Body=b"1")
    s3.abort_multipart_upload(Bucket=BUCKET, Key="k", UploadId=upload)
    assert emulator.uploads(BUCKET) == []
    assert emulator.keys(BUCKET) == []


def test_managed_transfer(s3: Any, emulator: Emulator) -> None:
    data = os.urandom(20 << 20)
    s3.upload_fileobj(io.BytesIO(data), BUCKET, "big")
    assert emulator.get(BUCKET, "big") == data
    target = io.BytesIO()
    s3.download_fileobj(BUCKET, "big", target)
    assert target.getvalue() == data


def test_buckets(s3: Any) -> None:
    s3.create_bucket(Bucket="other")
    assert [row["Name"] for row in s3.list_buckets()["Buckets"]] == [BUCKET, "other"]
    s3.head_bucket(Bucket="other")
    s3.put_object(Bucket="other", Key="k", Body=b"")
    with pytest.raises(ClientError) as error:
        s3.delete_bucket(Bucket="other")
    assert code(error) == "BucketNotEmpty"
    s3.delete_object(Bucket="other", Key="k")
    s3.delete_bucket(Bucket="other")
    with pytest.raises(ClientError):
        s3.head_bucket(Bucket="other")


def test_access_key(s3: Any, emulator: Emulator) -> None:
    emulator.set_access(Access(access_key_id="another"))
    with pytest.raises(ClientError) as error:
        s3.list_objects_v2(Bucket=BUCKET)
    assert code(error) == "InvalidAccessKeyId"
    emulator.set_access(Access(access_key_id="key"))
    assert s3.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 0


def test_presigned_url(s3: Any, emulator: Emulator) -> None:
    import requests

    emulator.put(BUCKET, "k", b"1")
    emulator.set_access(Access(access_key_id="key"))
    url = s3.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": "k"})
    assert requests.get(url, timeout=60).content == b"1"
    assert requests.get(url.partition("?")[0], timeout=60).status_code == 403
