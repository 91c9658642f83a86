"""Description of a stored object, and the error for an object that changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from voxlane.errors import ChangedError

_PUBLISHED_LAST = frozenset({"prepared.json", ".metadata"})
"""Names of the objects that declare a prepared dataset or a checkpoint complete."""


def is_published_last(key: str) -> bool:
    """Return whether an object declares others complete, so that a copy must write it after them."""
    return key.rpartition("/")[2] in _PUBLISHED_LAST


@dataclass(frozen=True)
class ObjectInfo:
    """Size and version of one object."""

    key: str
    """Complete path inside the bucket."""
    size: int
    """Size in bytes."""
    etag: str | None
    """Entity tag, which changes whenever the content does."""
    version: str | None
    """Generation or version id, where the service has them."""
    modified: datetime | None = field(default=None, compare=False)
    """When the object was last written; unknown (None) right after a write and in manifests."""


def changed_error(uri: str, listed: str, current: str) -> ChangedError:
    """Return the error for an object whose version or size is not the listed one."""
    return ChangedError(
        f"the object changed after it was listed (listed {listed}, now {current})",
        uri=uri,
        fix="List the bucket again, or restore the object",
    )
