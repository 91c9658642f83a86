"""Operations that a server does not support, with the reason. Each of them must fail: a test says if it passes."""

from __future__ import annotations

# Imported for their operations.
from . import boto3_client, fsspec_clients, google_cloud_storage, obstore_clients, tensorstore_clients  # noqa: F401
from .registry import FAKE_GCS_SERVER, OPERATIONS, SEAWEEDFS

_GOOGLE = "google-cloud-storage"
_NO_XML = "fake-gcs-server has no XML API for uploads, listings and copies"
_NO_PRECONDITIONS = "fake-gcs-server does not check preconditions of this kind"

EXCEPTIONS: dict[tuple[str, str, str], str] = {
    (FAKE_GCS_SERVER, _GOOGLE, "checksums"): "fake-gcs-server stores an upload that differs from its CRC32C",
    (FAKE_GCS_SERVER, _GOOGLE, "metadata resource"): "fake-gcs-server: the id of an object has no generation",
    (FAKE_GCS_SERVER, _GOOGLE, "change metadata"): "fake-gcs-server has no metageneration",
    (FAKE_GCS_SERVER, _GOOGLE, "resume an interrupted upload"): (
        "fake-gcs-server reports 200 and one byte too many for an incomplete upload"
    ),
    (FAKE_GCS_SERVER, _GOOGLE, "status of a completed upload"): (
        "fake-gcs-server does not return the object for a completed upload"
    ),
    (FAKE_GCS_SERVER, _GOOGLE, "cancel a resumable upload"): "fake-gcs-server accepts data after a cancellation",
    (FAKE_GCS_SERVER, _GOOGLE, "transfer_manager: upload in parallel parts"): _NO_XML,
    (FAKE_GCS_SERVER, _GOOGLE, "composite objects have no MD5"): (
        "fake-gcs-server: a composite object has an MD5 and no component count"
    ),
    (FAKE_GCS_SERVER, _GOOGLE, "compose with preconditions"): _NO_PRECONDITIONS,
    (FAKE_GCS_SERVER, _GOOGLE, "copy with preconditions"): _NO_PRECONDITIONS,
    (FAKE_GCS_SERVER, _GOOGLE, "move"): "fake-gcs-server cannot move objects; gcsfs copies and deletes them instead",
    (FAKE_GCS_SERVER, _GOOGLE, "conditional read"): _NO_PRECONDITIONS,
    (FAKE_GCS_SERVER, _GOOGLE, "conditional delete"): _NO_PRECONDITIONS,
    (FAKE_GCS_SERVER, _GOOGLE, "change the storage class"): "fake-gcs-server ignores the storage class of a rewrite",
    (FAKE_GCS_SERVER, _GOOGLE, "default storage class of a bucket"): (
        "fake-gcs-server ignores the default storage class of a bucket"
    ),
    (FAKE_GCS_SERVER, _GOOGLE, "gzip transcoding"): "fake-gcs-server sends Content-Length with decompressed content",
    (FAKE_GCS_SERVER, _GOOGLE, "batch delete"): "fake-gcs-server has no batches",
    (FAKE_GCS_SERVER, _GOOGLE, "list selected fields"): "fake-gcs-server ignores the parameter fields",
    (FAKE_GCS_SERVER, _GOOGLE, "anonymous access"): "fake-gcs-server: errors of the XML API are plain text",
    (FAKE_GCS_SERVER, _GOOGLE, "buckets"): "fake-gcs-server answers 412 instead of 409 for a bucket that is not empty",
    (FAKE_GCS_SERVER, "tensorstore", "conditional write"): _NO_PRECONDITIONS,
    (FAKE_GCS_SERVER, "tensorstore", "conditional read"): _NO_PRECONDITIONS,
    **{
        (FAKE_GCS_SERVER, "obstore", each.name): _NO_XML
        for each in OPERATIONS
        if each.client.name == "obstore" and each.client.api == "gcs" and each.name != "missing objects and buckets"
    },
    (SEAWEEDFS, "boto3", "change the storage class"): (
        "SeaweedFS refuses to copy an object onto itself with another storage class"
    ),
    (SEAWEEDFS, "boto3", "anonymous access"): "SeaweedFS has no public buckets once it has credentials",
    (SEAWEEDFS, "boto3", "buckets"): "SeaweedFS deletes a bucket that is not empty",
}
"""Reasons by server, client and operation."""
