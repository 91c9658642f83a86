"""The buckets in memory: objects, open uploads, and the preconditions that guard them."""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import google_crc32c

from voxlane.testing import refusals
from voxlane.testing.bodies import Blob, Body, Joined, Synthetic

# Above this many new keys one sort of the whole list is cheaper than placing each.
_INSERT_ONE_BY_ONE = 64
EMPTY_MD5 = hashlib.md5(b"").digest()


@dataclass(slots=True)
class Stored:
    """One object as it is now. Replaced, never edited, except for its metadata."""

    key: str
    body: Body
    etag: str
    """The quoted entity tag of the XML dialects."""
    generation: int
    created_s: float
    """Seconds since the epoch."""
    md5: bytes | None
    """None for composites, multipart uploads and synthetic bodies, which have no MD5 in GCS either."""
    headers: dict[str, str] = field(default_factory=dict)
    """Content-Type and the other headers kept with an object, under their usual capitalisation."""
    metadata: dict[str, str] = field(default_factory=dict)
    """The user's own names and values, without the x-amz-meta- or x-goog-meta- prefix."""
    metageneration: int = 1
    updated_s: float = 0.0
    component_count: int | None = None
    has_crc32c: bool = True
    rendered: dict[str, str] = field(default_factory=dict)
    """Text made from this object by a dialect, kept because listings and reads ask for it again and again."""
    _crc32c: str | None = None

    def crc32c(self) -> str | None:
        """Base64 of the big-endian CRC32C, computed when first asked; None for synthetic bodies.

        A page of a listing would otherwise have to generate and read a thousand synthetic bodies.
        """
        if self._crc32c is None and self.has_crc32c:
            crc = 0
            for view in self.body.slices(0, self.body.size):
                # The extension takes bytes only; a view of a whole bytes object lends it without a copy.
                data = view.obj if isinstance(view.obj, bytes) and view.nbytes == len(view.obj) else bytes(view)
                crc = google_crc32c.extend(crc, data)
            self._crc32c = base64.b64encode(crc.to_bytes(4)).decode()
        return self._crc32c

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "application/octet-stream")


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """What all objects of one :meth:`Emulator.fill` share; the bucket holds this instead of a million
    objects."""

    size: int
    generation: int
    created_s: float
    like: Stored | None = None
    """Whose content they have; None: each a synthetic one of its own."""

    def etag(self, key: str) -> str:
        """The true MD5 for empty objects; otherwise opaque, because an MD5 would need the body."""
        if self.like is not None:
            return self.like.etag
        if self.size == 0:
            return f'"{EMPTY_MD5.hex()}"'
        return f'"{zlib.crc32(key.encode()):08x}-{self.generation:x}"'

    def stored(self, key: str) -> Stored:
        if self.like is not None:
            self.like.crc32c()  # Known from here on, not computed again for each object and each time.
            return replace(
                self.like,
                key=key,
                generation=self.generation,
                metageneration=1,
                created_s=self.created_s,
                updated_s=self.created_s,
                headers=dict(self.like.headers),
                metadata=dict(self.like.metadata),
                rendered={},
            )
        return Stored(
            key=key,
            body=Synthetic(key, self.size),
            etag=self.etag(key),
            generation=self.generation,
            created_s=self.created_s,
            updated_s=self.created_s,
            md5=EMPTY_MD5 if self.size == 0 else None,
            has_crc32c=self.size == 0,
        )


class Part(NamedTuple):
    body: Body
    etag: str
    md5: bytes | None
    created_s: float


@dataclass(slots=True)
class Upload:
    """A multipart upload that is neither completed nor aborted."""

    upload_id: str
    key: str
    started_s: float
    headers: dict[str, str]
    metadata: dict[str, str]
    parts: dict[int, Part] = field(default_factory=dict)


class Bucket:
    """Objects by key, and their keys in order."""

    def __init__(self, name: str, created_s: float) -> None:
        self.name = name
        self.created_s = created_s
        self.uploads: dict[str, Upload] = {}
        self._objects: dict[str, Stored | Fill] = {}
        self._keys: list[str] = []
        self._unsorted: list[str] = []

    def __len__(self) -> int:
        return len(self._objects)

    def find(self, key: str) -> Stored | None:
        """The object, or None. One that came from a fill is made anew each time: change it through
        :meth:`put`."""
        found = self._objects.get(key)
        return found.stored(key) if type(found) is Fill else found  # type: ignore[return-value]

    def entry(self, key: str) -> Stored | Fill:
        """The object as it is held, for listings, which must not build a thousand objects for a page."""
        return self._objects[key]

    def need(self, key: str) -> Stored:
        """The object; NoSuchKey when there is none."""
        found = self.find(key)
        if found is None:
            raise refusals.no_such_key(self.name, key)
        return found

    def put(self, stored: Stored) -> None:
        if stored.key not in self._objects:
            self._unsorted.append(stored.key)
        self._objects[stored.key] = stored

    def fill(self, keys: Sequence[str], fill: Fill) -> None:
        self._unsorted.extend(key for key in keys if key not in self._objects)
        self._objects.update(dict.fromkeys(keys, fill))

    def remove(self, key: str) -> None:
        """Remove the object, which must exist."""
        keys = self.keys()
        del self._objects[key]
        del keys[bisect_left(keys, key)]

    def keys(self) -> list[str]:
        """All keys, ascending by UTF-8 bytes. The bucket's own list: do not change it."""
        if self._unsorted:
            if len(self._unsorted) <= _INSERT_ONE_BY_ONE:
                for key in self._unsorted:
                    insort(self._keys, key)
            else:
                self._keys.extend(self._unsorted)
                self._keys.sort()
            self._unsorted.clear()
        return self._keys

    def need_upload(self, upload_id: str, key: str) -> Upload:
        upload = self.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise refusals.no_such_upload(upload_id)
        return upload


class Objects:
    """All buckets of one emulator."""

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}
        self._generation = 0

    def need(self, bucket: str) -> Bucket:
        found = self.buckets.get(bucket)
        if found is None:
            raise refusals.no_such_bucket(bucket)
        return found

    def create(self, bucket: str) -> Bucket:
        """The bucket, made if it does not exist."""
        found = self.buckets.get(bucket)
        if found is None:
            found = self.buckets[bucket] = Bucket(bucket, time.time())
        return found

    def next_generation(self) -> int:
        """Microseconds since the epoch like GCS gives, but never the same number twice."""
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        return self._generation

    def stored(
        self,
        key: str,
        body: Body,
        md5: bytes | None,
        *,
        etag: str | None = None,
        headers: dict[str, str] | None = None,
        metadata: dict[str, str] | None = None,
        component_count: int | None = None,
    ) -> Stored:
        """A new object, not yet in a bucket. By default ``etag`` follows from MD5 or generation."""
        generation = self.next_generation()
        now_s = generation / 1e6
        if etag is None:
            etag = f'"{md5.hex()}"' if md5 is not None else f'"-{json_etag(generation, 1)}"'
        return Stored(
            key=key,
            body=body,
            etag=etag,
            generation=generation,
            created_s=now_s,
            updated_s=now_s,
            md5=md5,
            headers=headers or {},
            metadata=metadata or {},
            component_count=component_count,
        )

    def put(self, bucket: Bucket, key: str, data: bytes, md5: bytes) -> Stored:
        """Store plain bytes."""
        stored = self.stored(key, Blob(data), md5)
        bucket.put(stored)
        return stored

    def fill(self, bucket: Bucket, keys: Iterable[str], size: int, like: Stored | None = None) -> int:
        """Store synthetic objects of ``size`` bytes, or ones with the content of ``like``; returns how many keys were
        given."""
        generation = self.next_generation()
        names = list(keys)
        bucket.fill(names, Fill(like.body.size if like else size, generation, generation / 1e6, like))
        return len(names)

    def start_upload(self, bucket: Bucket, key: str, headers: dict[str, str], metadata: dict[str, str]) -> Upload:
        upload = Upload(secrets.token_urlsafe(24), key, time.time(), headers, metadata)
        bucket.uploads[upload.upload_id] = upload
        return upload

    def finish_upload(
        self, bucket: Bucket, upload: Upload, wanted: Sequence[tuple[int, str]], *, s3_etag: bool
    ) -> Stored:
        """Publish the wanted parts, (number, etag) ascending, as one object. Nothing changes when one is
        amiss."""
        if not wanted:
            raise refusals.invalid("The upload lists no parts", "MalformedXML")
        if [number for number, _ in wanted] != sorted({number for number, _ in wanted}):
            raise refusals.invalid("The list of parts was not in ascending order", "InvalidPartOrder")
        parts: list[Part] = []
        for number, etag in wanted:
            part = upload.parts.get(number)
            if part is None or etag.strip('"') != part.etag.strip('"'):
                raise refusals.invalid(f"Part {number} was not uploaded, or its ETag differs", "InvalidPart")
            parts.append(part)
        digests = [part.md5 for part in parts if part.md5 is not None]
        etag_text = None
        if s3_etag and len(digests) == len(parts):
            etag_text = f'"{hashlib.md5(b"".join(digests)).hexdigest()}-{len(parts)}"'
        stored = self.stored(
            upload.key,
            Joined(part.body for part in parts),
            None,
            etag=etag_text,
            headers=upload.headers,
            metadata=upload.metadata,
        )
        bucket.put(stored)
        del bucket.uploads[upload.upload_id]
        return stored


def json_etag(generation: int, metageneration: int) -> str:
    """An opaque tag that changes whenever content or metadata change, as the JSON API gives it."""
    return base64.b64encode(f"{generation:x}/{metageneration:x}".encode()).decode()


class Preconditions(NamedTuple):
    """What a request demands of the object as it is; None where it demands nothing."""

    generation: int | None = None
    not_generation: int | None = None
    metageneration: int | None = None
    not_metageneration: int | None = None
    etags: str | None = None
    """An If-Match header."""
    not_etags: str | None = None
    """An If-None-Match header."""
    modified_since_s: float | None = None
    unmodified_since_s: float | None = None

    def check_read(self, stored: Stored, etag: str) -> None:
        """Raise 304 or 412 unless ``stored``, known to the reader as ``etag``, may be read."""
        if self.generation is not None and stored.generation != self.generation:
            raise refusals.precondition_failed("generation")
        if self.metageneration is not None and stored.metageneration != self.metageneration:
            raise refusals.precondition_failed("metageneration")
        if self.etags is not None:
            if not _names(self.etags, etag):
                raise refusals.precondition_failed("If-Match")
        elif self.unmodified_since_s is not None and int(stored.updated_s) > self.unmodified_since_s:
            raise refusals.precondition_failed("If-Unmodified-Since")
        unchanged = stored.generation == self.not_generation or stored.metageneration == self.not_metageneration
        if self.not_etags is not None:
            unchanged = unchanged or _names(self.not_etags, etag)
        elif self.modified_since_s is not None:
            unchanged = unchanged or int(stored.updated_s) <= self.modified_since_s
        if unchanged:
            raise refusals.not_modified()

    def check_write(self, stored: Stored | None, etag: str) -> None:
        """Raise 412 unless ``stored`` (None: absent), known as ``etag``, may be replaced or removed."""
        generation = stored.generation if stored else 0
        if self.generation is not None and generation != self.generation:
            raise refusals.precondition_failed("generation")
        if self.not_generation is not None and generation == self.not_generation:
            raise refusals.precondition_failed("generation")
        metageneration = stored.metageneration if stored else 0
        if self.metageneration is not None and metageneration != self.metageneration:
            raise refusals.precondition_failed("metageneration")
        if self.not_metageneration is not None and metageneration == self.not_metageneration:
            raise refusals.precondition_failed("metageneration")
        if self.etags is not None:
            if stored is None:
                raise refusals.RefusedError(
                    404, "NoSuchKey", "If-Match names an object that does not exist", "notFound"
                )
            if not _names(self.etags, etag):
                raise refusals.precondition_failed("If-Match")
        if self.not_etags is not None and stored is not None and _names(self.not_etags, etag):
            raise refusals.precondition_failed("If-None-Match")


NO_PRECONDITIONS = Preconditions()


def _names(header: str, etag: str) -> bool:
    """Whether an If-Match or If-None-Match header names ``etag``."""
    if header.strip() == "*":
        return True
    bare = etag.strip('"')
    return any(each.strip().removeprefix("W/").strip('"') == bare for each in header.split(","))
