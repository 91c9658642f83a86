"""The index of a prepared dataset: its header, and what is known of each object, by which any copy is recognised.

Sizes and checksums identify objects wherever they lie; versions that a service gives them do not move with them. Format
1 had only versions: `upgrade_objects` translates it, and such a dataset is usable only where it was prepared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from voxlane.errors import PreparedError

VERSION = 2
"""Format that is written."""
OBJECT_LISTS = ("objects", "documents")
"""Lists of objects in the metadata of a case: those that training reads, and its zarr.json files."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What identifies an object of a dataset."""

    key: str
    """Key in the bucket, or name below the folder of the case."""
    size: int
    """Size in bytes."""
    checksum: str | None
    """Checksum of the content (`store.content`); None in format 1."""
    index_checksum: int | None
    """CRC-32C of a shard's index, which holds place and size of each chunk; chunks have checksums of their own."""
    etag: str | None
    """Version in the bucket where it was written; in format 1 the only version that is accepted."""

    @property
    def version(self) -> str | None:
        """What tells this content from others of the same key."""
        return self.checksum or self.etag

    @property
    def required_etag(self) -> str | None:
        """The version that every response must have; None if the content is checked instead."""
        return self.etag if self.checksum is None else None


def read_objects(metadata: Mapping[str, Any], folder: str, lists: Iterable[str] = ("objects",)) -> list[StoredObject]:
    """Return the objects of a case from its metadata, with `folder` in front of their names."""
    rows = [row for name in lists for row in metadata.get(name, ())]
    return [StoredObject(f"{folder}/{row[0]}", int(row[1]), *row[2:]) for row in rows]


def upgrade_objects(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a case of format 1, whose objects are (name, size, etag), in today's format."""
    rows = [[name, size, None, None, etag] for name, size, etag in metadata.get("objects", ())]
    return {**metadata, "objects": rows} if rows else metadata


def drop_etags(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a case without what depends on the bucket that it was written to."""
    rows = {name: [[*row[:4], None] for row in metadata[name]] for name in OBJECT_LISTS if name in metadata}
    return {**metadata, **rows}


def compute_digest(content: Any) -> str:
    """Return the SHA-256 of JSON-compatible content, as hexadecimal digits."""
    return hashlib.sha256(to_compact_json(content).encode()).hexdigest()


def to_compact_json(value: Any) -> str:
    """Return `value` as JSON that is the same for equal values."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def encode_header(fields: Mapping[str, Any]) -> bytes:
    """Return the content of a header, with a checksum of its own."""
    header = {"version": VERSION, **fields}
    return json.dumps({**header, "checksum": compute_digest(header)}, indent=1).encode()


def decode_header(body: bytes, uri: str, fix: str) -> dict[str, Any]:
    """Return the fields of a header. Raise PreparedError, which names `uri` and `fix`, if it is damaged or of a later
    format."""
    damaged = PreparedError("the dataset's header is damaged", uri=uri, fix=fix)
    try:
        header = json.loads(body)
    except ValueError:
        raise damaged from None
    if not isinstance(header, dict) or type(header.get("version")) is not int:
        raise damaged
    if header["version"] > VERSION:
        raise PreparedError(
            f"prepared by a newer version of voxlane (format {header['version']}, this version reads up to {VERSION})",
            uri=uri,
            fix="Update voxlane, or run voxlane prepare again with this version",
        )
    if header["version"] == VERSION and header.pop("checksum", None) != compute_digest(header):
        raise damaged
    return header
