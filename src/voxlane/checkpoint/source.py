"""One stored object, read in whole blocks, each checked against the checksums kept for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.checkpoint.sums import Sums, corrupt, digest
from voxlane.errors import AlreadyExistsError, ChangedError, CheckpointError, NotFoundError, UnsupportedError
from voxlane.store import ObjectInfo, Store

SUMS_SUFFIX = ".sums"
"""A file's checksums lie beside it, under its name and this."""
_FORMAT = "voxlane-sums-1"
_KEPT_CONTENTS = 4
_ATTEMPTS = 20


class Source:
    """An object of one version. With several `contents`, it may hold any of them; the first blocks that are read tell
    which. Without any, nothing is known and nothing is checked. Safe to use from many threads."""

    def __init__(self, store: Store, info: ObjectInfo, contents: Sequence[Sums] = ()) -> None:
        self.store = store
        self.info = info
        self.uri = store.uri(info.key)
        self._contents = [sums for sums in contents if sums.size == info.size]
        self._lock = threading.Lock()
        if contents and not self._contents:
            written = " or ".join(f"{sums.size:,}" for sums in contents)
            raise corrupt(self.uri, f"the object has {info.size:,} bytes, {written} were written")
        self.block_bytes = self._contents[0].block_bytes if self._contents else 1
        """Ranges that are read begin and end at multiples of this, or at the object's end."""

    @property
    def contents(self) -> tuple[Sums, ...]:
        """What it may still hold, as far as is known."""
        return tuple(self._contents)

    @property
    def checked(self) -> bool:
        """Whether there are checksums to compare with."""
        return bool(self._contents)

    @property
    def request_bytes(self) -> int:
        """A good size for one request: the store's part size in whole blocks."""
        return max(1, self.store.config.part_bytes // self.block_bytes) * self.block_bytes

    def aligned(self, start: int, stop: int) -> tuple[int, int]:
        """The smallest range of whole blocks that holds `[start, stop)`; the range itself when nothing is checked."""
        return self._contents[0].aligned(start, stop) if self._contents else (start, stop)

    def read_into(self, start: int, target: npt.NDArray[np.uint8]) -> None:
        """Fill `target` with what lies at `start` on; the range must be aligned. CorruptError if it is not as
        written."""
        self.store.get_into(self.info.key, start, target, etag=self.info.etag)
        if not self._contents:
            return
        fitting = [sums for sums in self._contents if sums.first_bad(start, target) is None]
        if len(fitting) == len(self._contents):
            return
        with self._lock:
            if not fitting:
                self._contents[0].check(start, target, self.uri)
            self._contents = [sums for sums in self._contents if sums in fitting]
            if not self._contents:
                raise corrupt(self.uri, "the blocks are of different contents")


@dataclass(frozen=True)
class Contents:
    """What the file at a key may hold: the last few that were saved under its name. Which of them it is, its bytes
    tell; so a save can be cut short, or two can race, and the file that is there has its checksums."""

    sums: tuple[Sums, ...] = ()
    """Oldest first."""
    unknown_etags: tuple[str, ...] = ()
    """Versions of the file that were there before, without checksums."""
    etag: str | None = None
    """Of the object that keeps this; None when there is none."""

    def and_also(self, sums: Sums) -> Contents:
        """With one more, and the oldest left out beyond a few."""
        kept = [known for known in self.sums if known != sums]
        return replace(self, sums=(*kept, sums)[-_KEPT_CONTENTS:])


def read_contents(store: Store, key: str) -> Contents:
    """What is known of the file at `key`; empty when no checksums are kept for it."""
    sums_key = key + SUMS_SUFFIX
    try:
        # The version before the text: of a newer text it would be an older one, and a conditional write then fails.
        etag = _etag(store, sums_key)
        text = bytes(store.get(sums_key))  # also when it is not there: unlike HEAD, GET tells a bucket that is gone
    except NotFoundError as error:
        if type(error) is NotFoundError:
            return Contents()
        raise
    try:
        document: Any = json.loads(text)
        plain, unknown = document["contents"], document["unknown_etags"]
        if document["format"] != _FORMAT or document["digest"] != _digest([plain, unknown]):
            raise ValueError(document["format"])
    except (ValueError, KeyError, TypeError):
        raise corrupt(store.uri(sums_key), "not a list of checksums") from None
    return Contents(tuple(Sums.from_json(entry, store.uri(sums_key)) for entry in plain), tuple(unknown), etag)


def add_contents(store: Store, key: str, known: Contents, sums: Sums) -> None:
    """Note, before it is published, that the file at `key` may hold `sums`. `known` is what was read before; another
    save of the same name may have noted its own meanwhile, which stays."""
    for _ in range(_ATTEMPTS):
        wanted = known.and_also(sums)
        try:
            _write(store, key, wanted)
            return
        except (AlreadyExistsError, ChangedError):
            known = read_contents(store, key)
    raise CheckpointError("too many processes save this at once", uri=store.uri(key), fix="Give each its own name")


def add_missing_contents(store: Store, key: str, sums: Sums) -> None:
    """Note `sums` again if another save of the same name wrote over the note."""
    known = read_contents(store, key)
    if sums not in known.sums:
        add_contents(store, key, known, sums)


def unchecked_before(store: Store, key: str) -> Contents:
    """For a file at `key` that is about to be replaced and has no usable checksums: it stays readable without."""
    there = _etag(store, key)
    return Contents((), (there,) if there is not None else (), _etag(store, key + SUMS_SUFFIX))


def _etag(store: Store, key: str) -> str | None:
    try:
        return store.head(key).etag
    except NotFoundError:
        return None


def _write(store: Store, key: str, contents: Contents) -> None:
    plain, unknown = [sums.to_json() for sums in contents.sums], list(contents.unknown_etags)
    document = {"format": _FORMAT, "contents": plain, "unknown_etags": unknown, "digest": _digest([plain, unknown])}
    data, sums_key = json.dumps(document).encode(), key + SUMS_SUFFIX
    try:
        if contents.etag is None:
            store.put(sums_key, data, if_absent=True)
        else:
            store.put(sums_key, data, if_etag=contents.etag)
    except UnsupportedError:  # folders, and a few servers, cannot replace conditionally
        store.put(sums_key, data)


def _digest(contents: Any) -> str:
    """The checksum of the checksums, so that damage to them is not taken for damage to the file."""
    return digest(json.dumps(contents).encode()).hex()


def source_of(store: Store, info: ObjectInfo, contents: Contents) -> Source:
    """An object with what is known of it; without checks if it is a version from before there were checksums."""
    if (info.etag or "") in contents.unknown_etags:
        return Source(store, info)
    return Source(store, info, contents.sums)


def open_source(store: Store, key: str) -> Source:
    """The file at `key` as it is now, with its checksums where it has any."""
    contents = store.submit(read_contents, store, key)
    try:
        info = store.head(key)
    except NotFoundError:
        contents.result()  # raises if the bucket itself is gone, which a HEAD cannot tell
        raise
    return source_of(store, info, contents.result())
