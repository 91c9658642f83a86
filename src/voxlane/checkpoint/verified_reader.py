"""A stored object that is read in whole blocks, each verified against the checksums stored beside it. Reads of many
ranges are planned as few requests that run concurrently."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from voxlane.checkpoint.checksums import Checksums, corrupt_error, digest
from voxlane.errors import (
    AlreadyExistsError,
    ChangedError,
    CheckpointError,
    CorruptError,
    NotFoundError,
    UnsupportedError,
)
from voxlane.store import ObjectInfo, Store
from voxlane.store.bucket import ignore_missing_object
from voxlane.store.ranges import Span, coalesce, split

CHECKSUM_SUFFIX = ".sums"
"""Suffix of the object that holds a file's checksums; it lies beside the file."""
_FORMAT = "voxlane-sums-1"
_MAX_CONTENTS = 4
_ATTEMPTS = 20
_MAX_GAP_BYTES = 256 * 1024
"""Ranges closer than this share a request."""


@dataclass(frozen=True)
class ReadTarget:
    """A buffer to fill with the bytes of a file from `start` on."""

    start: int
    target: npt.NDArray[np.uint8]

    @property
    def stop(self) -> int:
        """End of the range in the file, exclusive."""
        return self.start + len(self.target)


def view_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a contiguous CPU tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


class VerifiedObject:
    """One version of an object, verified as it is read. Safe to use from many threads.

    With several possible `contents`, the object may hold any of them; the first blocks that are read tell which.
    Without any, nothing is verified.
    """

    def __init__(self, store: Store, info: ObjectInfo, contents: Sequence[Checksums] = ()) -> None:
        self.store = store
        self.info = info
        self.uri = store.uri(info.key)
        self._contents = [checksums for checksums in contents if checksums.size == info.size]
        self._lock = threading.Lock()
        if contents and not self._contents:
            expected = " or ".join(dict.fromkeys(f"{checksums.size:,}" for checksums in contents))
            raise corrupt_error(self.uri, f"the object has {info.size:,} bytes, {expected} were written")
        self.block_bytes = self._contents[0].block_bytes if self._contents else 1
        """Ranges that are read begin and end at multiples of this, or at the end of the object."""

    @property
    def contents(self) -> tuple[Checksums, ...]:
        """The contents that the object may still hold, given what was read so far; empty if nothing is verified."""
        return tuple(self._contents)

    @property
    def request_bytes(self) -> int:
        """A good size for one request: the store's part size in whole blocks."""
        return max(1, self.store.config.part_bytes // self.block_bytes) * self.block_bytes

    def _align_to_blocks(self, target: ReadTarget) -> Span:
        """Return the smallest range of whole blocks that contains a target, or its own range if nothing is verified."""
        if not self._contents:
            return Span(target.start, target.stop)
        start, stop = target.start // self.block_bytes, -(-target.stop // self.block_bytes)
        return Span(start * self.block_bytes, min(stop * self.block_bytes, self.info.size))

    def read_into(self, start: int, target: npt.NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `start` on; the range must be aligned to blocks. Raises CorruptError if
        they differ from what was written."""
        self.store.get_into(self.info.key, start, target, etag=self.info.etag)
        if not self._contents:
            return
        matching = [checksums for checksums in self._contents if checksums.find_damaged_block(start, target) is None]
        if len(matching) == len(self._contents):
            return
        with self._lock:
            if not matching and (damaged := self._contents[0].find_damaged_block(start, target)) is not None:
                low, high = damaged
                raise corrupt_error(self.uri, f"bytes {low:,} to {high:,} are not those that were written")
            self._contents = [checksums for checksums in self._contents if checksums in matching]
            if not self._contents:
                raise corrupt_error(self.uri, "its blocks come from different saves")

    def read_blocks(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the whole object in order, in arrays of `request_bytes`, with the store's `max_parts` in flight."""
        pending: deque[Future[npt.NDArray[np.uint8]]] = deque()
        try:
            for span in split(self.info.size, self.request_bytes):
                pending.append(self.store.submit_part(self.read_span, span))
                if len(pending) == self.store.config.max_parts:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def read_span(self, span: Span) -> npt.NDArray[np.uint8]:
        """Return the bytes of a range that is aligned to blocks."""
        data = np.empty(span.size, np.uint8)
        self.read_into(span.start, data)
        return data

    def read_bytes(self, start: int, stop: int) -> bytes:
        """Return the bytes `[start, stop)`."""
        data = np.empty(stop - start, np.uint8)
        self.read_targets([ReadTarget(start, data)])
        return data.tobytes()

    def read_targets(self, targets: Sequence[ReadTarget]) -> None:
        """Fill all targets."""
        futures = self.submit_reads(targets)
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()

    def submit_reads(self, targets: Sequence[ReadTarget]) -> list[Future[None]]:
        """Start to fill all targets, on the store's threads."""
        return [self.store.submit_part(self._read_request, *request) for request in self._plan_requests(targets)]

    def _plan_requests(self, targets: Sequence[ReadTarget]) -> list[tuple[Span, list[ReadTarget]]]:
        """Return ranges of whole blocks that cover all targets, each with the targets that need some of it. Nearby
        targets share a range, up to a good request size."""
        ordered = sorted((target for target in targets if len(target.target)), key=lambda target: target.start)
        step = self.request_bytes
        requests: list[tuple[Span, list[ReadTarget]]] = [
            (Span(start, min(start + step, group.stop)), [])
            for group in coalesce([*map(self._align_to_blocks, ordered)], max_gap_bytes=_MAX_GAP_BYTES).groups
            for start in range(group.start, group.stop, step)
        ]
        first = 0
        for target in ordered:
            while requests[first][0].stop <= target.start:
                first += 1
            index = first
            while index < len(requests) and requests[index][0].start < target.stop:
                requests[index][1].append(target)
                index += 1
        return requests

    def _read_request(self, span: Span, targets: Sequence[ReadTarget]) -> None:
        first = targets[0]
        if len(targets) == 1 and first.start <= span.start and span.stop <= first.stop:  # straight into the target
            self.read_into(span.start, first.target[span.start - first.start : span.stop - first.start])
            return
        data = self.read_span(span)
        for target in targets:
            low, high = max(target.start, span.start), min(target.stop, span.stop)
            target.target[low - target.start : high - target.start] = data[low - span.start : high - span.start]


@dataclass(frozen=True)
class SavedContents:
    """The contents that a file may hold: the last few that were saved under its name.

    The bytes of the file tell which of them it is. So a save can be interrupted, or two can race, and the file that
    ends up there still has its checksums.
    """

    checksums: tuple[Checksums, ...] = ()
    """Checksums of each possible content, oldest first."""
    unknown_etags: tuple[str, ...] = ()
    """Versions of the file that existed before it had checksums."""
    etag: str | None = None
    """Version of the object that stores this; None if there is no such object."""


def read_contents(store: Store, key: str) -> SavedContents:
    """Return the contents recorded for the file at `key`; empty if it has no checksums."""
    return _parse_contents(*_read_record(store, key), uri=store.uri(key + CHECKSUM_SUFFIX))


def read_contents_before_save(store: Store, key: str) -> SavedContents:
    """Return the contents that the file at `key` may hold before a save. One that has no usable checksums may be read
    unverified. The version is that of the record as it was read here: if another save of the same name writes a record
    meanwhile, the conditional write that follows fails."""
    text, etag = _read_record(store, key)
    try:
        contents = _parse_contents(text, etag, uri=store.uri(key + CHECKSUM_SUFFIX))
    except CorruptError:
        contents = SavedContents(etag=etag)
    if contents.checksums:
        return contents
    file_etag = _read_etag(store, key)
    return replace(contents, unknown_etags=(file_etag,) if file_etag is not None else ())


def _read_record(store: Store, key: str) -> tuple[bytes | None, str | None]:
    """Return the text of a file's record and its version; None if there is no record."""
    checksum_key = key + CHECKSUM_SUFFIX
    with ignore_missing_object():
        # The version is read before the text. If the text is newer, the conditional write that follows fails.
        # The text is read also without a version: unlike HEAD, GET tells if the bucket is gone.
        etag = _read_etag(store, checksum_key)
        return bytes(store.get(checksum_key)), etag
    return None, None


def _parse_contents(text: bytes | None, etag: str | None, *, uri: str) -> SavedContents:
    if text is None:
        return SavedContents()
    try:
        document: Any = json.loads(text)
        entries, unknown = document["contents"], document["unknown_etags"]
        if document["format"] != _FORMAT or document["digest"] != _digest_entries([entries, unknown]):
            raise ValueError(document["format"])
    except (ValueError, KeyError, TypeError):
        raise corrupt_error(uri, "not a list of checksums") from None
    return SavedContents(tuple(Checksums.from_json(entry, uri) for entry in entries), tuple(unknown), etag)


def add_contents(store: Store, key: str, before: SavedContents, checksums: Checksums) -> None:
    """Record, before the file at `key` is published, that it may hold `checksums`. `before` is what was read earlier;
    contents that another save of the same name has added since then are preserved."""
    for _ in range(_ATTEMPTS):
        try:
            others = [earlier for earlier in before.checksums if earlier != checksums]
            _write_contents(store, key, replace(before, checksums=(*others, checksums)[-_MAX_CONTENTS:]))
            return
        except (AlreadyExistsError, ChangedError):
            before = read_contents(store, key)
    raise CheckpointError("too many processes save this at once", uri=store.uri(key), fix="Give each its own name")


def _read_etag(store: Store, key: str) -> str | None:
    info = store.find(key)
    return info.etag if info is not None else None


def _write_contents(store: Store, key: str, contents: SavedContents) -> None:
    entries, unknown = [checksums.to_json() for checksums in contents.checksums], list(contents.unknown_etags)
    digest_text = _digest_entries([entries, unknown])
    document = {"format": _FORMAT, "contents": entries, "unknown_etags": unknown, "digest": digest_text}
    data, checksum_key = json.dumps(document).encode(), key + CHECKSUM_SUFFIX
    try:
        store.put(checksum_key, data, if_absent=contents.etag is None, if_etag=contents.etag)
    except UnsupportedError:  # folders and a few servers cannot replace conditionally
        store.put(checksum_key, data)


def _digest_entries(entries: Any) -> str:
    """Return the checksum of the checksums, so that damage to them is not mistaken for damage to the file."""
    return digest(json.dumps(entries).encode()).hex()


def open_verified(store: Store, key: str) -> VerifiedObject:
    """Open the current version of the file at `key`, with its checksums if it has any."""
    future = store.submit(read_contents, store, key)
    try:
        info = store.head(key)
    except NotFoundError:
        future.result()  # raises if the bucket itself is gone, which a HEAD cannot tell
        raise
    contents = future.result()
    if (info.etag or "") in contents.unknown_etags:  # a version from before there were checksums
        return VerifiedObject(store, info)
    return VerifiedObject(store, info, contents.checksums)
