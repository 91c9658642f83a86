"""Operations of boto3, Amazon's own library."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
import pytest
import requests
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from .registry import Client, Server, operation

PART_BYTES = 5 << 20


@dataclass(frozen=True)
class S3Bucket:
    """A client and the name of a bucket."""

    client: Any
    name: str

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the client for the bucket."""
        return getattr(self.client, method)(Bucket=self.name, **arguments)

    def put(self, *keys: str) -> None:
        for key in keys:
            self.call("put_object", Key=key, Body=key.encode())

    def read(self, key: str, **arguments: Any) -> bytes:
        data: bytes = self.call("get_object", Key=key, **arguments)["Body"].read()
        return data

    def fail(self, method: str, **arguments: Any) -> str:
        """Call a method that must fail, and return the code of its error."""
        with pytest.raises(ClientError) as error:
            self.call(method, **arguments)
        return str(error.value.response["Error"]["Code"])


def connect_boto3(server: Server, **settings: Any) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, **settings),
    )


@contextmanager
def _connect(server: Server) -> Iterator[S3Bucket]:
    client = connect_boto3(server)
    yield S3Bucket(client, server.bucket)
    client.close()


BOTO3 = Client("boto3", "s3", _connect)


@operation("write, read, delete", BOTO3)
def write_and_read(bucket: S3Bucket) -> None:
    bucket.put("a/b c")
    assert bucket.read("a/b c") == b"a/b c"
    bucket.call("delete_object", Key="a/b c")
    bucket.call("delete_object", Key="absent")
    assert bucket.fail("head_object", Key="a/b c") == "404"


@operation("read ranges", BOTO3)
def read_ranges(bucket: S3Bucket) -> None:
    bucket.call("put_object", Key="k", Body=b"0123456789")
    assert bucket.read("k", Range="bytes=2-4") == b"234"
    assert bucket.read("k", Range="bytes=-3") == b"789"
    assert bucket.read("k", Range="bytes=7-99") == b"789"
    assert bucket.fail("get_object", Key="k", Range="bytes=10-") == "InvalidRange"


@operation("missing objects and buckets", BOTO3)
def report_missing(bucket: S3Bucket) -> None:
    assert bucket.fail("get_object", Key="none") == "NoSuchKey"
    assert S3Bucket(bucket.client, "no-such-bucket").fail("list_objects_v2") == "NoSuchBucket"


@operation("special characters in keys", BOTO3)
def use_special_keys(bucket: S3Bucket) -> None:
    keys = sorted(["Ünï+cödé %", "𝄞?#&", "quote'\"<>", "~tilde"], key=str.encode)
    bucket.put(*keys)
    assert [row["Key"] for row in bucket.call("list_objects_v2")["Contents"]] == keys
    assert [bucket.read(key).decode() for key in keys] == keys


@operation("checksums", BOTO3)
def verify_checksums(bucket: S3Bucket) -> None:
    data = os.urandom(200_000)
    for algorithm in ("CRC32", "SHA256"):
        # A file is sent in chunks with the checksum behind them, bytes with the checksum in a header.
        bucket.call("put_object", Key="file", Body=io.BytesIO(data), ChecksumAlgorithm=algorithm)
        bucket.call("put_object", Key="bytes", Body=data, ChecksumAlgorithm=algorithm)
        assert bucket.read("file") == bucket.read("bytes") == data
    assert bucket.call("head_object", Key="file")["ETag"] == f'"{hashlib.md5(data).hexdigest()}"'
    wrong = "AAAAAAAAAAAAAAAAAAAAAA=="
    assert bucket.fail("put_object", Key="k", Body=data, ContentMD5=wrong) in ("BadDigest", "InvalidDigest")


@operation("metadata resource", BOTO3)
def describe_object(bucket: S3Bucket) -> None:
    bucket.call("put_object", Key="k", Body=b"content", ContentType="image/x", Metadata={"mine": "value"})
    head = bucket.call("head_object", Key="k")
    assert (head["ContentLength"], head["ContentType"], head["Metadata"]) == (7, "image/x", {"mine": "value"})
    assert head["ETag"] == bucket.call("list_objects_v2")["Contents"][0]["ETag"]
    assert head["LastModified"].tzinfo is not None


@operation("multipart upload", BOTO3)
def upload_parts(bucket: S3Bucket) -> None:
    first, second = os.urandom(PART_BYTES), b"tail"
    upload = bucket.call("create_multipart_upload", Key="k", ContentType="image/x")["UploadId"]
    tags = {
        number: bucket.call("upload_part", Key="k", UploadId=upload, PartNumber=number, Body=data)["ETag"]
        for number, data in ((2, second), (1, first))
    }
    listed = bucket.call("list_parts", Key="k", UploadId=upload)["Parts"]
    assert [(part["PartNumber"], part["Size"]) for part in listed] == [(1, PART_BYTES), (2, 4)]
    assert [row["Key"] for row in bucket.call("list_multipart_uploads")["Uploads"]] == ["k"]
    parts = {"Parts": [{"PartNumber": number, "ETag": tags[number]} for number in (1, 2)]}
    done = bucket.call("complete_multipart_upload", Key="k", UploadId=upload, MultipartUpload=parts)
    digests = hashlib.md5(first).digest() + hashlib.md5(second).digest()
    assert done["ETag"] == f'"{hashlib.md5(digests).hexdigest()}-2"'
    assert bucket.read("k") == first + second
    assert bucket.call("head_object", Key="k")["ContentType"] == "image/x"


@operation("multipart upload from copies", BOTO3)
def upload_part_copies(bucket: S3Bucket) -> None:
    bucket.call("put_object", Key="source", Body=b"0123456789")
    upload = bucket.call("create_multipart_upload", Key="k")["UploadId"]
    part = bucket.call(
        "upload_part_copy",
        Key="k",
        UploadId=upload,
        PartNumber=1,
        CopySource={"Bucket": bucket.name, "Key": "source"},
        CopySourceRange="bytes=2-4",
    )["CopyPartResult"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    bucket.call("complete_multipart_upload", Key="k", UploadId=upload, MultipartUpload=parts)
    assert bucket.read("k") == b"234"


@operation("abort a multipart upload", BOTO3)
def abort_upload(bucket: S3Bucket) -> None:
    upload = bucket.call("create_multipart_upload", Key="k")["UploadId"]
    bucket.call("upload_part", Key="k", UploadId=upload, PartNumber=1, Body=b"1")
    bucket.call("abort_multipart_upload", Key="k", UploadId=upload)
    assert bucket.call("list_multipart_uploads").get("Uploads", []) == []
    assert bucket.fail("upload_part", Key="k", UploadId=upload, PartNumber=1, Body=b"1") == "NoSuchUpload"


@operation("managed transfer", BOTO3)
def transfer(bucket: S3Bucket) -> None:
    data = os.urandom(9 << 20)  # two parts
    bucket.client.upload_fileobj(io.BytesIO(data), bucket.name, "big")
    target = io.BytesIO()
    bucket.client.download_fileobj(bucket.name, "big", target)
    assert target.getvalue() == data


@operation("copy and rewrite", BOTO3)
def copy(bucket: S3Bucket) -> None:
    bucket.call("put_object", Key="ü b", Body=b"1", Metadata={"a": "1"}, ContentType="image/x")
    source = {"Bucket": bucket.name, "Key": "ü b"}
    bucket.call("copy_object", Key="same", CopySource=source)
    bucket.call("copy_object", Key="new", CopySource=source, MetadataDirective="REPLACE", Metadata={"c": "3"})
    same, new = bucket.call("head_object", Key="same"), bucket.call("head_object", Key="new")
    assert (same["Metadata"], same["ContentType"], new["Metadata"]) == ({"a": "1"}, "image/x", {"c": "3"})
    assert bucket.read("same") == b"1"
    missing = {"Bucket": bucket.name, "Key": "none"}
    assert bucket.fail("copy_object", Key="x", CopySource=missing) == "NoSuchKey"


@operation("conditional write", BOTO3)
def write_conditionally(bucket: S3Bucket) -> None:
    tag = bucket.call("put_object", Key="k", Body=b"1", IfNoneMatch="*")["ETag"]
    assert bucket.fail("put_object", Key="k", Body=b"2", IfNoneMatch="*") == "PreconditionFailed"
    bucket.call("put_object", Key="k", Body=b"3", IfMatch=tag)
    assert bucket.fail("put_object", Key="k", Body=b"4", IfMatch=tag) == "PreconditionFailed"
    assert bucket.read("k") == b"3"


@operation("conditional read", BOTO3)
def read_conditionally(bucket: S3Bucket) -> None:
    tag = bucket.call("put_object", Key="k", Body=b"1")["ETag"]
    assert bucket.read("k", IfMatch=tag) == b"1"
    assert bucket.fail("get_object", Key="k", IfMatch='"other"') == "PreconditionFailed"
    assert bucket.fail("get_object", Key="k", IfNoneMatch=tag) == "304"


@operation("storage class of an upload", BOTO3)
def upload_with_class(bucket: S3Bucket) -> None:
    bucket.call("put_object", Key="k", Body=b"1", StorageClass="STANDARD_IA")
    bucket.put("usual")
    rows = bucket.call("list_objects_v2")["Contents"]
    assert {row["Key"]: row["StorageClass"] for row in rows} == {"k": "STANDARD_IA", "usual": "STANDARD"}
    assert bucket.call("head_object", Key="k")["StorageClass"] == "STANDARD_IA"
    assert "StorageClass" not in bucket.call("head_object", Key="usual")


@operation("change the storage class", BOTO3)
def change_class(bucket: S3Bucket) -> None:
    bucket.put("k")
    source = {"Bucket": bucket.name, "Key": "k"}
    bucket.call("copy_object", Key="k", CopySource=source, StorageClass="ONEZONE_IA")
    assert bucket.call("head_object", Key="k")["StorageClass"] == "ONEZONE_IA"
    assert bucket.read("k") == b"k"


@operation("batch delete", BOTO3)
def delete_many(bucket: S3Bucket) -> None:
    keys = ["a", "b/ c", "ü", "quote'\"<>&"]
    bucket.put(*keys, "remaining")
    rows = [{"Key": key} for key in [*keys, "absent"]]
    deleted = bucket.call("delete_objects", Delete={"Objects": rows})["Deleted"]
    assert sorted(row["Key"] for row in deleted) == sorted([*keys, "absent"])
    assert [row["Key"] for row in bucket.call("list_objects_v2")["Contents"]] == ["remaining"]


LISTED = ["a", "d/1", "d/e/2", "foo/bar", "img-", "img-1", "ünï"]


def _list(bucket: S3Bucket, version: str, **arguments: Any) -> tuple[list[str], list[str]]:
    pages = list(bucket.client.get_paginator(version).paginate(Bucket=bucket.name, **arguments))
    keys = [row["Key"] for page in pages for row in page.get("Contents", [])]
    return keys, [row["Prefix"] for page in pages for row in page.get("CommonPrefixes", [])]


@operation("list with a prefix and a delimiter", BOTO3)
def list_prefixes(bucket: S3Bucket) -> None:
    bucket.put(*LISTED)
    for version in ("list_objects", "list_objects_v2"):
        assert _list(bucket, version, Prefix="d/") == (["d/1", "d/e/2"], [])
        assert _list(bucket, version, Delimiter="/") == (["a", "img-", "img-1", "ünï"], ["d/", "foo/"])


@operation("list between offsets", BOTO3)
def list_after_key(bucket: S3Bucket) -> None:
    bucket.put(*LISTED)
    assert _list(bucket, "list_objects_v2", StartAfter="foo/bar") == (["img-", "img-1", "ünï"], [])
    assert _list(bucket, "list_objects", Marker="img-") == (["img-1", "ünï"], [])


@operation("list in pages", BOTO3)
def list_pages(bucket: S3Bucket) -> None:
    bucket.put(*LISTED)
    for version in ("list_objects", "list_objects_v2"):
        for size in (1, 3):
            assert _list(bucket, version, PaginationConfig={"PageSize": size}) == (LISTED, [])
            keys, prefixes = _list(bucket, version, Delimiter="/", PaginationConfig={"PageSize": size})
            assert (keys, prefixes) == (["a", "img-", "img-1", "ünï"], ["d/", "foo/"])


@operation("presigned URLs", BOTO3)
def presign(bucket: S3Bucket) -> None:
    parameters = {"Bucket": bucket.name, "Key": "k"}
    url = bucket.client.generate_presigned_url("put_object", Params=parameters)
    assert requests.put(url, b"1", timeout=60).status_code == 200
    url = bucket.client.generate_presigned_url("get_object", Params=parameters)
    assert requests.get(url, timeout=60).content == b"1"


@operation("anonymous access", BOTO3)
def read_anonymously(bucket: S3Bucket) -> None:
    bucket.put("k")
    server = Server("", bucket.client.meta.endpoint_url, bucket.name)
    anonymous = S3Bucket(connect_boto3(server, signature_version=UNSIGNED), bucket.name)
    assert anonymous.read("k") == b"k"
    assert anonymous.fail("get_object", Key="none") == "NoSuchKey"
    anonymous.client.close()


@operation("buckets", BOTO3)
def use_buckets(bucket: S3Bucket) -> None:
    other = S3Bucket(bucket.client, f"{bucket.name}-other")
    other.call("create_bucket")
    assert other.name in [row["Name"] for row in bucket.client.list_buckets()["Buckets"]]
    other.call("head_bucket")
    other.put("k")
    assert other.fail("delete_bucket") == "BucketNotEmpty"
    other.call("delete_object", Key="k")
    other.call("delete_bucket")
    assert other.fail("head_bucket") == "404"
