"""One stored object, read in whole blocks, each checked against the checksums kept for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.checkpoint.sums import Sums, corrupt, digest
from voxlane.errors import NotFoundError
from voxlane.store import ObjectInfo, Store

SUMS_SUFFIX = ".sums"
"""A file's checksums lie beside it, under its name and this."""
_FORMAT = "voxlane-sums-1"


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


def read_contents(store: Store, key: str) -> list[Sums]:
    """The contents that the file at `key` may hold, newest last; empty when no checksums are kept for it."""
    sums_key = key + SUMS_SUFFIX
    try:
        text = bytes(store.get(sums_key))
    except NotFoundError as error:
        if type(error) is NotFoundError:
            return []
        raise
    try:
        document: Any = json.loads(text)
        if document["format"] != _FORMAT or document["digest"] != _digest(document["contents"]):
            raise ValueError(document["format"])
    except (ValueError, KeyError, TypeError):
        raise corrupt(store.uri(sums_key), "not a list of checksums") from None
    return [Sums.from_json(entry, store.uri(sums_key)) for entry in document["contents"]]


def write_contents(store: Store, key: str, contents: Sequence[Sums]) -> None:
    """Keep `contents` as those the file at `key` may hold."""
    plain = [sums.to_json() for sums in contents]
    document = {"format": _FORMAT, "contents": plain, "digest": _digest(plain)}
    store.put(key + SUMS_SUFFIX, json.dumps(document).encode())


def _digest(contents: Any) -> str:
    """The checksum of the checksums, so that damage to them is not taken for damage to the file."""
    return digest(json.dumps(contents).encode()).hex()


def open_source(store: Store, key: str) -> Source:
    """The file at `key` as it is now, with its checksums where it has any."""
    contents = store.submit(read_contents, store, key)
    try:
        info = store.head(key)
    except NotFoundError:
        contents.result()  # raises if the bucket itself is gone, which a HEAD cannot tell
        raise
    return Source(store, info, contents.result())
