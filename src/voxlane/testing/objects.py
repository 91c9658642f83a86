"""Store buckets in memory: objects, open uploads and preconditions."""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import google_crc32c

from voxlane.testing import errors
from voxlane.testing.bodies import Body, Joined, Synthetic

# Above this many new keys, sorting the list is cheaper than inserting each of them.
_INSERT_ONE_BY_ONE = 64
STANDARD = "STANDARD"
"""Storage class of objects for which neither the request nor the bucket has another."""
EMPTY_MD5 = hashlib.md5(b"").digest()


@dataclass(slots=True)
class StoredObject:
    """A stored object. Only its metadata is changed in place; new content replaces the object."""

    key: str
    body: Body
    md5: bytes | None
    """MD5 of the content; None for composites, multipart uploads and synthetic bodies, as in GCS."""
    generation: int
    """Microseconds since 1970 at the time of creation, unique."""
    etag: str = ""
    """Quoted entity tag of the XML dialects; by default the MD5 or the generation."""
    headers: dict[str, str] = field(default_factory=dict)
    """Content-Type and other headers of the object, with their usual capitalization."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Metadata of the user, without the x-amz-meta- or x-goog-meta- prefix."""
    metageneration: int = 1
    updated_s: float = 0.0
    """Time of the last change in seconds since 1970, by default that of creation."""
    component_count: int | None = None
    has_crc32c: bool = True
    storage_class: str = STANDARD
    class_updated_s: float = 0.0
    """Time of the last change of the storage class in seconds since 1970, by default that of creation."""
    rendered: dict[str, str] = field(default_factory=dict)
    """Cache of texts that the dialects render for listings and reads."""
    _crc32c: str | None = None

    def __post_init__(self) -> None:
        self.updated_s = self.updated_s or self.created_s
        self.class_updated_s = self.class_updated_s or self.created_s
        self.etag = self.etag or f'"{f"-{self.json_etag}" if self.md5 is None else self.md5.hex()}"'

    @property
    def created_s(self) -> float:
        """Time of creation in seconds since 1970."""
        return self.generation / 1e6

    def copy(self, key: str, generation: int, **changes: Any) -> StoredObject:
        """Return a new object with the same content and metadata, except for ``changes`` of its fields."""
        copies = {"headers": dict(self.headers), "metadata": dict(self.metadata), "rendered": {}}
        reset = {"metageneration": 1, "updated_s": 0.0, "class_updated_s": 0.0}
        return replace(self, key=key, generation=generation, **(copies | reset | changes))

    def crc32c(self) -> str | None:
        """Return the base64 of the big-endian CRC32C, computed on first use; None for synthetic bodies.

        A page of a listing would otherwise have to generate and read a thousand synthetic bodies.
        """
        if self._crc32c is None and self.has_crc32c:
            crc = 0
            for view in self.body.slices(0, self.body.size):
                # The extension accepts only bytes; the view of a complete bytes object provides it without a copy.
                data = view.obj if isinstance(view.obj, bytes) and view.nbytes == len(view.obj) else bytes(view)
                crc = google_crc32c.extend(crc, data)
            self._crc32c = format_crc32c(crc)
        return self._crc32c

    def hashes(self) -> dict[str, str]:
        """Return the base64 of CRC32C and MD5 by name, without those that are unknown."""
        md5 = None if self.md5 is None else base64.b64encode(self.md5).decode()
        return {name: value for name, value in (("crc32c", self.crc32c()), ("md5", md5)) if value is not None}

    @property
    def json_etag(self) -> str:
        """Entity tag of the JSON API, which changes with content and metadata.

        As in GCS, it is the protocol-buffer encoding of generation and metageneration.
        """
        tag = b"\x08" + _encode_varint(self.generation) + b"\x10" + _encode_varint(self.metageneration)
        return base64.b64encode(tag).decode()

    @property
    def content_type(self) -> str:
        """Content-Type header of the object."""
        return self.headers.get("Content-Type", "application/octet-stream")


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticFill:
    """Common properties of the objects of one :meth:`Emulator.fill`, stored instead of a million objects."""

    size: int
    generation: int
    storage_class: str = STANDARD
    like: StoredObject | None = None
    """Object whose content they share; None if each has its own synthetic content."""
    rendered: dict[str, str] = field(default_factory=dict)
    """Cache of texts that the dialects render for listings."""

    def stored(self, key: str) -> StoredObject:
        """Build the object of a key."""
        if self.like is not None:
            self.like.crc32c()  # computed once instead of for every object
            return self.like.copy(key, self.generation, storage_class=self.storage_class)
        md5 = EMPTY_MD5 if self.size == 0 else None
        body = Synthetic(key, self.size)
        return StoredObject(
            key, body, md5, self.generation, has_crc32c=self.size == 0, storage_class=self.storage_class
        )


@dataclass(slots=True)
class Upload:
    """A multipart upload that is neither completed nor aborted."""

    key: str
    headers: dict[str, str]
    metadata: dict[str, str]
    storage_class: str
    upload_id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    started_s: float = field(default_factory=time.time)
    parts: dict[int, StoredObject] = field(default_factory=dict)
    """Uploaded parts by number; each is like an object with the key of the upload."""


class Bucket:
    """Objects by key, and their keys in order."""

    def __init__(self, name: str, created_s: float) -> None:
        self.name = name
        self.created_s = created_s
        self.storage_class = STANDARD
        """Storage class of new objects for which none is given."""
        self.properties: dict[str, Any] = {"location": "US"}
        """Properties of the JSON resource that have no effect in the emulator."""
        self.metageneration = 1
        self.updated_s = created_s
        self.uploads: dict[str, Upload] = {}
        self._objects: dict[str, StoredObject | SyntheticFill] = {}
        self._keys: list[str] = []
        self._unsorted: list[str] = []

    def find(self, key: str) -> StoredObject | None:
        """Return the object, or None. An object of a fill is built for each call: change it through :meth:`put`."""
        entry = self._objects.get(key)
        return entry.stored(key) if type(entry) is SyntheticFill else entry  # type: ignore[return-value]

    def entry(self, key: str) -> StoredObject | SyntheticFill:
        """Return the stored entry, for listings, which must not build a thousand objects for a page."""
        return self._objects[key]

    def common_fill(self, keys: Sequence[str]) -> SyntheticFill | None:
        """Return the fill that all keys belong to, or None; its listings repeat one text with another key."""
        entries = set(map(id, map(self._objects.__getitem__, keys)))
        entry = self._objects[keys[0]] if len(entries) == 1 else None
        return entry if isinstance(entry, SyntheticFill) else None

    def require(self, key: str, generation: int | str | None = None) -> StoredObject:
        """Return the object; raise NoSuchKey if it does not exist or has another generation than a given one."""
        stored = self.find(key)
        if stored is None or (generation not in (None, "") and str(generation) != str(stored.generation)):
            raise errors.RequestError(404, "NoSuchKey", f"No such object: {self.name}/{key}")
        return stored

    def put(self, stored: StoredObject) -> None:
        """Add or replace an object."""
        if stored.key not in self._objects:
            self._unsorted.append(stored.key)
        self._objects[stored.key] = stored

    def fill(self, keys: Sequence[str], fill: SyntheticFill) -> None:
        """Add or replace synthetic objects."""
        self._unsorted.extend(key for key in keys if key not in self._objects)
        self._objects.update(dict.fromkeys(keys, fill))

    def remove(self, key: str) -> None:
        """Remove the object, which must exist."""
        keys = self.keys()
        del self._objects[key]
        del keys[bisect_left(keys, key)]

    def keys(self) -> list[str]:
        """Return all keys in order of their UTF-8 bytes. The list belongs to the bucket: do not change it."""
        if self._unsorted:
            if len(self._unsorted) <= _INSERT_ONE_BY_ONE:
                for key in self._unsorted:
                    insort(self._keys, key)
            else:
                self._keys.extend(self._unsorted)
                self._keys.sort()
            self._unsorted.clear()
        return self._keys

    def require_upload(self, upload_id: str, key: str) -> Upload:
        """Return an open upload; raise NoSuchUpload if it does not exist."""
        upload = self.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise errors.no_such_upload(upload_id)
        return upload


class ObjectStore:
    """All buckets of one emulator."""

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}
        self._generation = 0

    def require(self, bucket: str) -> Bucket:
        """Return a bucket; raise NoSuchBucket if it does not exist."""
        if bucket not in self.buckets:
            raise errors.RequestError(404, "NoSuchBucket", f"The specified bucket does not exist: {bucket}")
        return self.buckets[bucket]

    def create(self, bucket: str, *, exist_ok: bool = False) -> Bucket:
        """Create and return a bucket. If it exists, return it with ``exist_ok``, else raise BucketAlreadyOwnedByYou."""
        if bucket in self.buckets and not exist_ok:
            message = "Your previous request to create the named bucket succeeded and you already own it."
            raise errors.RequestError(409, "BucketAlreadyOwnedByYou", message)
        return self.buckets.setdefault(bucket, Bucket(bucket, time.time()))

    def delete(self, bucket: str) -> None:
        """Remove a bucket; raise BucketNotEmpty if it has objects."""
        if self.require(bucket).keys():
            raise errors.RequestError(409, "BucketNotEmpty", "The bucket you tried to delete is not empty.")
        del self.buckets[bucket]

    def next_generation(self) -> int:
        """Return a unique generation: microseconds since 1970, as in GCS."""
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        return self._generation

    def finish_upload(
        self, bucket: Bucket, upload: Upload, listed: Sequence[tuple[int, str]], *, s3_etag: bool
    ) -> StoredObject:
        """Join the listed parts, (number, etag) in ascending order, into an object; change nothing if one is wrong."""
        if not listed:
            raise errors.invalid("The upload lists no parts", "MalformedXML")
        if [number for number, _ in listed] != sorted({number for number, _ in listed}):
            raise errors.invalid("The list of parts was not in ascending order", "InvalidPartOrder")
        parts: list[StoredObject] = []
        for number, etag in listed:
            part = upload.parts.get(number)
            if part is None or etag.strip('"') != part.etag.strip('"'):
                raise errors.invalid(f"Part {number} was not uploaded, or its ETag differs", "InvalidPart")
            parts.append(part)
        digests = [part.md5 for part in parts if part.md5 is not None]
        joined_etag = ""
        if s3_etag and len(digests) == len(parts):
            joined_etag = f'"{hashlib.md5(b"".join(digests)).hexdigest()}-{len(parts)}"'
        body = Joined(part.body for part in parts)
        stored = StoredObject(
            upload.key,
            body,
            None,
            self.next_generation(),
            joined_etag,
            upload.headers,
            upload.metadata,
            storage_class=upload.storage_class,
        )
        bucket.put(stored)
        del bucket.uploads[upload.upload_id]
        return stored


class Preconditions(NamedTuple):
    """Preconditions of a request on the current object; None for those that it does not have."""

    generation: int | None = None
    not_generation: int | None = None
    metageneration: int | None = None
    not_metageneration: int | None = None
    etags: str | None = None
    """Value of the If-Match header."""
    not_etags: str | None = None
    """Value of the If-None-Match header."""
    modified_since_s: float | None = None
    unmodified_since_s: float | None = None

    def check_read(self, stored: StoredObject, etag: str) -> None:
        """Raise 304 or 412 unless ``stored``, whose tag is ``etag``, may be read."""
        if self.generation not in (None, stored.generation):
            raise errors.precondition_failed("generation")
        if self.metageneration not in (None, stored.metageneration):
            raise errors.precondition_failed("metageneration")
        if self.etags is not None:
            if not _matches_etag(self.etags, etag):
                raise errors.precondition_failed("If-Match")
        elif self.unmodified_since_s is not None and int(stored.updated_s) > self.unmodified_since_s:
            raise errors.precondition_failed("If-Unmodified-Since")
        unchanged = stored.generation == self.not_generation or stored.metageneration == self.not_metageneration
        if self.not_etags is not None:
            unchanged = unchanged or _matches_etag(self.not_etags, etag)
        elif self.modified_since_s is not None:
            unchanged = unchanged or int(stored.updated_s) <= self.modified_since_s
        if unchanged:
            raise errors.RequestError(304, "NotModified", "Not Modified")

    def check_write(self, stored: StoredObject | None, etag: str) -> None:
        """Raise 412 unless ``stored`` (None if absent), whose tag is ``etag``, may be replaced or removed."""
        generation, metageneration = (stored.generation, stored.metageneration) if stored else (0, 0)
        if self.generation not in (None, generation) or self.not_generation == generation:
            raise errors.precondition_failed("generation")
        if self.metageneration not in (None, metageneration) or self.not_metageneration == metageneration:
            raise errors.precondition_failed("metageneration")
        if self.etags is not None:
            if stored is None:
                raise errors.RequestError(404, "NoSuchKey", "If-Match names an object that does not exist")
            if not _matches_etag(self.etags, etag):
                raise errors.precondition_failed("If-Match")
        if self.not_etags is not None and stored is not None and _matches_etag(self.not_etags, etag):
            raise errors.precondition_failed("If-None-Match")


NO_PRECONDITIONS = Preconditions()


def format_crc32c(crc: int) -> str:
    """Return a CRC32C as the services write it: base64 of the big-endian number."""
    return base64.b64encode(crc.to_bytes(4)).decode()


def _encode_varint(number: int) -> bytes:
    """Return a number as protocol buffers encode it."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _matches_etag(header: str, etag: str) -> bool:
    """Return whether an If-Match or If-None-Match header matches ``etag``."""
    if header.strip() == "*":
        return True
    tag = etag.strip('"')
    return any(item.strip().removeprefix("W/").strip('"') == tag for item in header.split(","))
