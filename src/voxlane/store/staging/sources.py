"""List the objects below a source, and choose the paths of their files in a copy."""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from voxlane import uri as uris
from voxlane.errors import ConfigError, EmptyError
from voxlane.store import Store, StoreConfig
from voxlane.store.listing import list_objects

RECORDS = ".voxlane"
"""Name of the folder inside a copy that holds its records; objects in such a folder are not staged."""
_ESCAPE = "%voxlane-"
"""Start of the name of a file for a part of a key that cannot be a file name."""
_MAX_NAME_BYTES = 255
"""Longest file name that file systems accept."""


@dataclass(frozen=True, slots=True)
class SourceObject:
    """An object of a source."""

    name: str
    """Key relative to the source."""
    size: int
    """Size in bytes."""
    etag: str | None
    """Version of the object, without quotes; None if the server reports none."""
    path: str | None = field(default=None, kw_only=True)
    """Path of the file in the copy; None if it is the name."""
    checksum: str | None = field(default=None, kw_only=True)
    """Checksum that the content must have (`store.content`), whatever its version; None if only the etag is known."""

    @property
    def file(self) -> str:
        """Path of the file in the copy."""
        return self.name if self.path is None else self.path


@dataclass(frozen=True)
class SourceListing:
    """Objects of a source at the time it was listed."""

    source: str
    """URI of the source, without a trailing slash."""
    objects: tuple[SourceObject, ...]
    """Objects in order of their names."""

    @cached_property
    def total_bytes(self) -> int:
        """Size of all objects in bytes."""
        return sum(item.size for item in self.objects)

    @cached_property
    def version(self) -> str:
        """Sixteen hexadecimal digits that are equal for equal names, sizes and contents or etags."""
        digest = hashlib.sha256()
        for item in self.objects:
            digest.update(json.dumps([item.name, item.size, item.checksum or item.etag]).encode())
        return digest.hexdigest()[:16]

    @classmethod
    def of(
        cls,
        source: str,
        objects: Iterable[tuple[str, int, str | None]],
        checksums: Mapping[str, str | None] | None = None,
    ) -> SourceListing:
        """Build a listing from (name, size, etag) tuples, and the checksums by name of those that have a known
        content."""
        rows = [row for row in objects if row[0].partition("/")[0] != RECORDS]
        paths, contents = file_paths(name for name, _, _ in rows), checksums or {}
        items = [
            SourceObject(name, size, strip_quotes(etag), path=paths.get(name), checksum=contents.get(name))
            for name, size, etag in rows
        ]
        return cls(normalize_source(source), tuple(sorted(items, key=lambda item: item.name)))


def list_source(source: str, config: StoreConfig | None = None) -> SourceListing:
    """List the objects below `source`, a prefix of a bucket or a local folder; raise EmptyError if there are none."""
    prefix = as_prefix(uris.parse(source).key)
    store = Store(source, config)
    manifest = list_objects(store.uri(prefix), store=store, progress=False)
    listing = SourceListing.of(source, ((e.key.removeprefix(prefix), e.size, e.etag) for e in manifest))
    if listing.objects:
        return listing
    if prefix and store.exists(prefix.rstrip("/")):
        raise ConfigError(
            "the source is a single object, not a folder", uri=source, fix="Give the folder that holds it"
        )
    raise EmptyError("the source contains no objects", uri=source, fix="Check its spelling")


def as_prefix(key: str) -> str:
    """Return `key` with exactly one trailing slash, or an empty string for the root of a bucket."""
    return key.rstrip("/") + "/" if key.strip("/") else ""


def normalize_source(source: str) -> str:
    """Return the absolute URI of a source without a trailing slash, as records store it."""
    return source.rstrip("/") if source.startswith("nfs://") else str(uris.parse(source)).rstrip("/")


def strip_quotes(etag: str | None) -> str | None:
    """Return an etag without quotes; servers are inconsistent about sending them."""
    return etag if etag is None else etag.strip('"')


def default_name(source: str) -> str:
    """Return the default name for the copy of a source: its last path component and a hash of its URI."""
    uri = normalize_source(source)
    component = re.sub(r"[^A-Za-z0-9._-]+", "-", uri.rpartition("/")[2]).strip(".-")[:46]
    return f"{component or 'data'}-{hashlib.sha256(uri.encode()).hexdigest()[:8]}"


def file_paths(names: Iterable[str]) -> dict[str, str]:
    """Return the path, relative to one folder, of the file for each object whose name cannot be its path.

    A part between slashes that cannot be a file name (empty, `.`, `..`, with a null byte, longer than 255 bytes) is
    written as `%voxlane-` and its percent-encoding, or its SHA-256 if it is too long. An object that is also a folder
    of others is stored in that folder as `%voxlane-object`. No path leaves the folder, and no two names share one.
    """
    escaped = {name: "/".join(map(_escape_part, name.split("/"))) for name in names}
    folders: set[str] = set()
    for path in escaped.values():
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    paths = {name: f"{path}/{_ESCAPE}object" if path in folders else path for name, path in escaped.items()}
    return {name: path for name, path in paths.items() if path != name}


def _escape_part(part: str) -> str:
    """Return a part of a name as the name of a file or folder."""
    encoded = part.encode()
    if len(encoded) > _MAX_NAME_BYTES:
        return _ESCAPE + hashlib.sha256(encoded).hexdigest()
    if part in ("", ".", "..") or "\0" in part or part.startswith(_ESCAPE):
        return _ESCAPE + urllib.parse.quote(part, safe="").replace(".", "%2E")
    return part
