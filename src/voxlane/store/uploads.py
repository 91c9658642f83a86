"""Leftovers of killed processes, which are billed until somebody removes them: unfinished uploads and joined objects.

The byte engine can neither list nor drop uploads, so each service has its own functions here.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from voxlane import uri as uris
from voxlane.errors import BucketNotFoundError, StoreError
from voxlane.store.bucket import Store, ignore_missing_object
from voxlane.store.credentials import azure_container, s3_client
from voxlane.store.gcs_json import COMPOSED_PREFIXES, GcsJson
from voxlane.store.objects import ObjectInfo

_STAGED = re.compile(r"#\d+$")
"""Suffix that the engine gives to a local file that it has not finished."""


@dataclass(frozen=True)
class UnfinishedUpload:
    """An upload that was started and neither finished nor dropped."""

    key: str
    """Key of the object that it would have become."""
    upload_id: str
    started: datetime
    """When it was started or, for a local file, last written."""


def find_leftovers(store: Store, *, older_than_s: float) -> tuple[list[ObjectInfo], int]:
    """Return the joined objects of composed downloads that were written at least `older_than_s` ago, and the number of
    younger ones."""
    before = datetime.now(UTC) - timedelta(seconds=older_than_s)
    listed = [joined for prefix in COMPOSED_PREFIXES for joined in store.list_folder(prefix)]
    leftovers = [joined for joined in listed if joined.modified is not None and joined.modified <= before]
    return leftovers, len(listed) - len(leftovers)


def list_unfinished_uploads(store: Store, prefix: str) -> list[UnfinishedUpload]:
    """Return the unfinished uploads of keys that start with `prefix`."""
    listings = {"s3": _list_s3, "gs": _list_gcs, "az": _list_azure, "file": _list_local}
    return list(listings[store.scheme](store, prefix)) if store.scheme in listings else []


def drop_upload(store: Store, upload: UnfinishedUpload) -> None:
    """Drop an unfinished upload; it is no error if it no longer exists."""
    if store.scheme == "file":
        store.counters.add("delete")
        if os.path.exists(upload.upload_id):
            os.unlink(upload.upload_id)
    elif store.scheme == "gs":
        bucket, key = uris.quote(store.bucket), urllib.parse.quote(upload.key)
        query = urllib.parse.urlencode({"uploadId": upload.upload_id})
        with ignore_missing_object():
            GcsJson(store).send("delete", "DELETE", f"/{bucket}/{key}?{query}", upload.key)
    elif store.scheme == "s3":
        with _translate_boto3_errors(store):
            s3_client(store.config).abort_multipart_upload(
                Bucket=store.bucket, Key=upload.key, UploadId=upload.upload_id
            )
        store.counters.add("delete")
    elif store.scheme == "az":
        # Azure has no request that drops the blocks of an unfinished blob, but writing an empty blob does.
        with azure_container(store.bucket, store.config) as container:
            blob = container.get_blob_client(upload.key)
            if not blob.exists():  # otherwise it has been finished meanwhile
                blob.upload_blob(b"", overwrite=True)
                blob.delete_blob()


def _list_s3(store: Store, prefix: str) -> Iterator[UnfinishedUpload]:
    bucket = store.bucket
    with _translate_boto3_errors(store):
        pages = s3_client(store.config).get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            store.counters.add("list")
            for upload in page.get("Uploads", []):
                if upload["Key"].startswith(prefix):
                    yield UnfinishedUpload(upload["Key"], upload["UploadId"], upload["Initiated"].astimezone(UTC))


@contextlib.contextmanager
def _translate_boto3_errors(store: Store) -> Iterator[None]:
    """Raise voxlane's errors for those of boto3; ignore that an upload no longer exists."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("botocore", "boto3")):
            raise
        response: Any = getattr(error, "response", {})
        code = response.get("Error", {}).get("Code", "")
        if code == "NoSuchUpload":
            return
        if code == "NoSuchBucket":
            raise BucketNotFoundError("no such bucket", uri=store.root, fix="Check its spelling") from None
        raise StoreError(
            f"cannot list or drop unfinished uploads: {error}",
            uri=store.root,
            fix="This needs the permissions s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
        ) from None


def _list_gcs(store: Store, prefix: str) -> Iterator[UnfinishedUpload]:
    service = GcsJson(store)
    bucket = uris.quote(store.bucket)
    query = {"prefix": prefix}
    while True:
        text = service.send("list", "GET", f"/{bucket}?uploads&{urllib.parse.urlencode(query)}")
        root = ElementTree.fromstring(text)
        for entry in root.iterfind("{*}Upload"):
            started = datetime.fromisoformat(entry.findtext("{*}Initiated", ""))
            yield UnfinishedUpload(entry.findtext("{*}Key", ""), entry.findtext("{*}UploadId", ""), started)
        if root.findtext("{*}IsTruncated") != "true":
            return
        query["key-marker"] = root.findtext("{*}NextKeyMarker", "")
        query["upload-id-marker"] = root.findtext("{*}NextUploadIdMarker", "")


def _list_local(store: Store, prefix: str) -> Iterator[UnfinishedUpload]:
    folder = "/" + prefix.rpartition("/")[0]
    for path, _, names in os.walk(folder):
        for name in names:
            full = os.path.join(path, name)
            if _STAGED.search(name) and full.lstrip("/").startswith(prefix):
                started = datetime.fromtimestamp(os.stat(full).st_mtime, UTC)
                yield UnfinishedUpload(_STAGED.sub("", full).lstrip("/"), full, started)


def _list_azure(store: Store, prefix: str) -> Iterator[UnfinishedUpload]:
    with azure_container(store.bucket, store.config) as container:
        finished = {blob.name for blob in container.list_blobs(name_starts_with=prefix)}
        for blob in container.list_blobs(name_starts_with=prefix, include=["uncommittedblobs"]):
            if blob.name not in finished:
                yield UnfinishedUpload(blob.name, "", blob.last_modified or blob.creation_time or datetime.now(UTC))
