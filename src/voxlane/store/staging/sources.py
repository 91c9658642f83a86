"""List the objects below a source, and check that a folder can hold files with their names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from voxlane import uri as uris
from voxlane.errors import ConfigError, EmptyError
from voxlane.store import Store, StoreConfig
from voxlane.store.listing import list_objects

PART_BYTES = 8 << 20
"""Size of the parts in which objects are read and checksummed."""
RECORDS = ".voxlane"
"""Name of the folder inside a copy that holds its records; objects in such a folder are not staged."""
_MAX_NAME_BYTES = 255
"""Longest file name that file systems accept."""


@dataclass(frozen=True, slots=True)
class SourceObject:
    """An object of a source."""

    name: str
    """Key relative to the source, which is also the path in the copy."""
    size: int
    """Size in bytes."""
    etag: str | None
    """Version of the object, without quotes; None if the server reports none."""


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
        """Sixteen hexadecimal digits that are equal for equal names, sizes and etags."""
        digest = hashlib.sha256()
        for item in self.objects:
            digest.update(json.dumps([item.name, item.size, item.etag]).encode())
        return digest.hexdigest()[:16]

    @classmethod
    def of(cls, source: str, objects: Iterable[tuple[str, int, str | None]]) -> SourceListing:
        """Build a listing from (name, size, etag) tuples; raise ConfigError if a folder cannot hold such names."""
        items = [
            SourceObject(name, size, strip_quotes(etag))
            for name, size, etag in objects
            if name.partition("/")[0] != RECORDS
        ]
        check_names(source, [item.name for item in items])
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


def check_names(source: str, names: list[str]) -> None:
    """Raise ConfigError for object names that cannot be files below one folder, or would escape it."""
    folders: set[str] = set()
    for name in names:
        for component in name.split("/"):
            if problem := _describe_invalid_component(component):
                shown = name if len(name) < 80 else f"{name[:60]}..."
                raise ConfigError(
                    f"the object {shown!r} cannot be stored as a file: {problem}",
                    uri=source,
                    fix="Rename it in the bucket, or stage a folder that does not contain it",
                )
        folder = name.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    if conflicts := folders.intersection(names):
        raise ConfigError(
            f"{min(conflicts)!r} is both an object and a prefix of other objects",
            uri=source,
            fix="Rename it: on a disk it would be both a file and a folder",
        )


def _describe_invalid_component(component: str) -> str:
    """Return why a path component cannot be a file name, or an empty string if it can."""
    if not component:
        return "its name contains an empty path component"
    if component in (".", ".."):
        return f"its name contains the path component {component!r}"
    if "\0" in component:
        return "its name contains a null byte"
    if len(component.encode("utf-8", "surrogatepass")) > _MAX_NAME_BYTES:
        return f"its name contains a path component longer than {_MAX_NAME_BYTES} bytes"
    return ""
