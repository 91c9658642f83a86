"""Unfinished uploads: what a killed process leaves hidden in a bucket, and is billed for, until somebody drops it.

The byte engine can neither list nor drop them, so each service is asked in its own way.
"""

from __future__ import annotations

import os
import re
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from voxlane import uri as uris
from voxlane.errors import BucketNotFoundError, NotFoundError, StoreError
from voxlane.store.bucket import Store
from voxlane.store.credentials import azure_container, s3_client
from voxlane.store.gcs_json import GcsJson

_STAGED = re.compile(r"#\d+$")
"""How the engine names a local file that it has not finished."""


@dataclass(frozen=True)
class OpenUpload:
    """An upload that was begun and neither finished nor dropped."""

    key: str
    """The object it would have become."""
    upload_id: str
    started: datetime
    """When it was begun; of a local file, when it was last written."""


def open_uploads(store: Store, prefix: str) -> list[OpenUpload]:
    """The unfinished uploads of keys that start with `prefix`."""
    listings = {"s3": _list_s3, "gs": _list_gcs, "az": _list_azure, "file": _list_local}
    return list(listings[store.scheme](store, prefix)) if store.scheme in listings else []


def drop_upload(store: Store, upload: OpenUpload) -> None:
    """Tell the service to drop what was uploaded; one that is gone already is no error."""
    if store.scheme == "file":
        store.counters.add("delete")
        if os.path.exists(upload.upload_id):
            os.unlink(upload.upload_id)
    elif store.scheme == "gs":
        bucket, key = uris.quote(uris.parse(store.root).bucket), urllib.parse.quote(upload.key)
        query = urllib.parse.urlencode({"uploadId": upload.upload_id})
        try:
            GcsJson(store).send("delete", "DELETE", f"/{bucket}/{key}?{query}", upload.key)
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise
    elif store.scheme == "s3":
        with _said_by_boto3(store):
            s3_client(store.config).abort_multipart_upload(
                Bucket=uris.parse(store.root).bucket, Key=upload.key, UploadId=upload.upload_id
            )
        store.counters.add("delete")
    elif store.scheme == "az":
        _drop_azure(store, upload)


def _list_s3(store: Store, prefix: str) -> Iterator[OpenUpload]:
    bucket = uris.parse(store.root).bucket
    with _said_by_boto3(store):
        pages = s3_client(store.config).get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            store.counters.add("list")
            for upload in page.get("Uploads", []):
                if upload["Key"].startswith(prefix):
                    yield OpenUpload(upload["Key"], upload["UploadId"], upload["Initiated"].astimezone(UTC))


class _said_by_boto3:  # noqa: N801 - reads as a word in a with statement
    """Turns boto3's errors into ours."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or not type(error).__module__.startswith(("botocore", "boto3")):
            return False
        answer: Any = getattr(error, "response", {})
        code = answer.get("Error", {}).get("Code", "")
        if code == "NoSuchUpload":
            return True  # it is gone already
        if code == "NoSuchBucket":
            raise BucketNotFoundError("no such bucket", uri=self._store.root, fix="Check its spelling") from None
        raise StoreError(
            f"cannot list or drop unfinished uploads: {error}",
            uri=self._store.root,
            fix="It needs the permissions s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
        ) from None


def _list_gcs(store: Store, prefix: str) -> Iterator[OpenUpload]:
    service = GcsJson(store)
    bucket = uris.quote(uris.parse(store.root).bucket)
    query = {"prefix": prefix}
    while True:
        text = service.send("list", "GET", f"/{bucket}?uploads&{urllib.parse.urlencode(query)}")
        root = ElementTree.fromstring(text)
        space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
        for entry in root.iter(f"{space}Upload"):
            started = datetime.fromisoformat(entry.findtext(f"{space}Initiated", ""))
            yield OpenUpload(entry.findtext(f"{space}Key", ""), entry.findtext(f"{space}UploadId", ""), started)
        if root.findtext(f"{space}IsTruncated") != "true":
            return
        query["key-marker"] = root.findtext(f"{space}NextKeyMarker", "")
        query["upload-id-marker"] = root.findtext(f"{space}NextUploadIdMarker", "")


def _list_local(store: Store, prefix: str) -> Iterator[OpenUpload]:
    folder = "/" + prefix.rpartition("/")[0]
    for path, _, names in os.walk(folder):
        for name in names:
            full = os.path.join(path, name)
            if _STAGED.search(name) and full.lstrip("/").startswith(prefix):
                started = datetime.fromtimestamp(os.stat(full).st_mtime, UTC)
                yield OpenUpload(_STAGED.sub("", full).lstrip("/"), full, started)


def _list_azure(store: Store, prefix: str) -> Iterator[OpenUpload]:
    with azure_container(uris.parse(store.root).bucket, store.config) as container:
        finished = {blob.name for blob in container.list_blobs(name_starts_with=prefix)}
        for blob in container.list_blobs(name_starts_with=prefix, include=["uncommittedblobs"]):
            if blob.name not in finished:
                yield OpenUpload(blob.name, "", blob.last_modified or blob.creation_time or datetime.now(UTC))


def _drop_azure(store: Store, upload: OpenUpload) -> None:
    """Azure has no order to drop blocks; writing an empty blob in their place does it, and that can be deleted."""
    with azure_container(uris.parse(store.root).bucket, store.config) as container:
        blob = container.get_blob_client(upload.key)
        if not blob.exists():  # else it was finished after all
            blob.upload_blob(b"", overwrite=True)
            blob.delete_blob()
