"""Storage classes of both services."""

from __future__ import annotations

from voxlane.testing import errors

_GCS_CLASSES = frozenset(
    {
        *("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE"),
        *("MULTI_REGIONAL", "REGIONAL", "DURABLE_REDUCED_AVAILABILITY"),
    }
)
_S3_CLASSES = frozenset(
    {"STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR", "REDUCED_REDUNDANCY"}
)
_S3_ARCHIVE_CLASSES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Classes whose objects cannot be read before they are restored."""


def check_gcs_class(name: str | None) -> str | None:
    """Return the name of a class of GCS in upper case, None if it is absent; raise 400 for another."""
    if not name:
        return None
    if str(name).upper() not in _GCS_CLASSES:
        raise errors.invalid(f"Invalid storage class: {name}", "InvalidArgument")
    return str(name).upper()


def check_s3_class(name: str | None) -> str | None:
    """Return the name of a class of S3, None if it is absent; raise 400 for another and 501 for archives."""
    if not name:
        return None
    if name in _S3_ARCHIVE_CLASSES:
        raise errors.not_implemented(f"the storage class {name}, whose objects must be restored before they are read")
    if name not in _S3_CLASSES:
        raise errors.invalid("The storage class you specified is not valid", "InvalidStorageClass")
    return name
