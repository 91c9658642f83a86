"""What lies below a source: names, sizes and versions of its objects, and whether a folder can hold them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from voxlane import uri as uris
from voxlane.errors import ConfigError, EmptyError
from voxlane.listing import list_objects
from voxlane.store import Store, StoreConfig

PART_BYTES = 8 << 20
"""Objects are read, and their checksums made, in parts of this size."""
RECORDS = ".voxlane"
"""The folder inside a copy that holds what is known of it; never an object."""
_NAME_BYTES = 255
"""File systems take no longer one."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object of a source."""

    name: str
    """Below the source; its path in the copy."""
    size: int
    """Bytes."""
    etag: str | None
    """Its version, without quotes; None where the server tells none."""

    def parts(self) -> list[tuple[int, int]]:
        """Ranges `[start, stop)` that are read and summed as one; none for an empty object."""
        return [(a, min(a + PART_BYTES, self.size)) for a in range(0, self.size, PART_BYTES)]


@dataclass(frozen=True)
class Survey:
    """What a source held when it was looked at."""

    source: str
    """Its URI, without a slash at the end."""
    objects: tuple[Wanted, ...]
    """By name."""

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(one.size for one in self.objects)

    @cached_property
    def version(self) -> str:
        """Names the content: the same names, sizes and versions give the same 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for one in self.objects:
            digest.update(json.dumps([one.name, one.size, one.etag]).encode())
        return digest.hexdigest()[:16]

    @classmethod
    def of(cls, source: str, objects: Iterable[tuple[str, int, str | None]]) -> Survey:
        """Of (name, size, etag); ConfigError when a folder cannot hold such names."""
        found = [Wanted(name, size, bare(etag)) for name, size, etag in objects if name.partition("/")[0] != RECORDS]
        check_names(source, [one.name for one in found])
        return cls(place_of(source), tuple(sorted(found, key=lambda one: one.name)))


def survey(source: str, config: StoreConfig | None = None) -> Survey:
    """List what lies below `source`, a bucket's folder or a folder; EmptyError when that is nothing."""
    prefix = below(uris.parse(source).key)
    store = Store(source, config)
    manifest = list_objects(store.uri(prefix), store=store, progress=False)
    found = Survey.of(source, ((e.key.removeprefix(prefix), e.size, e.etag) for e in manifest))
    if found.objects:
        return found
    if prefix and store.exists(prefix.rstrip("/")):
        raise ConfigError("this is one object, not a folder of them", uri=source, fix="Give the folder it lies in")
    raise EmptyError("no objects are here", uri=source, fix="Check its spelling")


def below(key: str) -> str:
    """A key as the prefix of what lies below it."""
    return key.rstrip("/") + "/" if key.strip("/") else ""


def place_of(source: str) -> str:
    """A source's URI as it is recorded: whole, without a slash at the end."""
    return source.rstrip("/") if source.startswith("nfs://") else str(uris.parse(source)).rstrip("/")


def bare(etag: str | None) -> str | None:
    """An etag without the quotes that some answers of a server have and others have not."""
    return etag if etag is None else etag.strip('"')


def default_name(source: str) -> str:
    """What the copy of a source is called unless somebody says: its last word, and a hash of all of it."""
    place = place_of(source)
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", place.rpartition("/")[2]).strip(".-")[:46]
    return f"{word or 'data'}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def check_names(source: str, names: list[str]) -> None:
    """Raise ConfigError for names that cannot be files below one folder, or would lie outside of it."""
    folders: set[str] = set()
    for name in names:
        for word in name.split("/"):
            if word in ("", ".", "..") or "\0" in word or len(word.encode("utf-8", "surrogatepass")) > _NAME_BYTES:
                shown = name if len(name) < 80 else f"{name[:60]}..."
                raise ConfigError(
                    f"the object {shown!r} cannot be a file: {_why(word)}",
                    uri=source,
                    fix="Rename it in the bucket, or stage a folder beside it",
                )
        folder = name.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    if both := folders.intersection(names):
        raise ConfigError(
            f"{min(both)!r} is an object, and the start of other objects' names",
            uri=source,
            fix="Rename it: on a disk it would be a file and a folder at once",
        )


def _why(word: str) -> str:
    if not word:
        return "it has an empty part between slashes"
    if word in (".", ".."):
        return f"a part of its name is {word!r}"
    return "it holds a zero byte" if "\0" in word else f"a part of its name is longer than {_NAME_BYTES} bytes"
