"""A stored object that is read in whole blocks, each verified against the checksums stored beside it. Reads of many
ranges are planned as few requests that run concurrently."""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from voxlane.checkpoint.checksums import BlockDigests, Checksums, corrupt_error, digest
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
from voxlane.store.retry import read_until_intact

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
    Without any, nothing is verified. If the first block fits none of them, `read_again` returns the current ones: a
    save may have recorded its contents after they were read and published the object before its version was read.
    """

    def __init__(
        self,
        store: Store,
        info: ObjectInfo,
        contents: Sequence[Checksums] = (),
        read_again: Callable[[], Sequence[Checksums]] | None = None,
    ) -> None:
        self.store = store
        self.info = info
        self.uri = store.uri(info.key)
        self._read_again = read_again
        self._contents = self._select_size(contents)
        self._lock = threading.Lock()
        if contents and not self._contents:
            contents = self._read_contents_again() or contents
        if contents and not self._contents:
            raise corrupt_error(self.uri, f"the object has {info.size:,} bytes, {contents[-1].size:,} were written")
        if len({checksums.block_bytes for checksums in self._contents}) > 1:
            raise corrupt_error(self.uri, "its checksums are of blocks of different sizes")
        self.block_bytes = self._contents[0].block_bytes if self._contents else 1
        """Ranges that are read begin and end at multiples of this, or at the end of the object."""

    def _select_size(self, contents: Sequence[Checksums]) -> list[Checksums]:
        return [checksums for checksums in contents if checksums.size == self.info.size]

    def _read_contents_again(self) -> Sequence[Checksums]:
        """Replace the contents by the current ones, once, and return these; empty if that is not possible."""
        read_again, self._read_again = self._read_again, None
        contents = read_again() if read_again is not None else ()
        self._contents = self._select_size(contents) or self._contents
        return contents

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
        self._read_request(Span(start, start + len(target)), [ReadTarget(start, target)])

    def verify(self, start: int, data: npt.NDArray[np.uint8]) -> None:
        """Raise CorruptError unless `data` is what was written from `start` on; the range is aligned to blocks."""
        digests = BlockDigests(self.block_bytes)
        if self._contents:
            digests.update(data)
        self._check_digests(start, digests.finish())

    def _check_digests(self, start: int, digests: bytes) -> None:
        if not self._contents:
            return
        matching = self._match(start, digests)
        if len(matching) == len(self._contents):
            self._read_again = None  # from now on other contents do not count
            return
        with self._lock:
            remaining = self._match(start, digests)  # another thread may have changed the contents
            if not remaining and self._read_contents_again():
                remaining = self._match(start, digests)
            self._read_again = None
            if not remaining and matching:
                raise corrupt_error(self.uri, "its blocks come from different saves")
            if not remaining and (damaged := self._contents[0].find_damaged_block(start, digests)) is not None:
                low, high = damaged
                raise corrupt_error(self.uri, f"bytes {low:,} to {high:,} are not those that were written")
            self._contents = remaining

    def _match(self, start: int, digests: bytes) -> list[Checksums]:
        """Return the contents whose blocks from `start` on have these checksums."""
        return [checksums for checksums in self._contents if checksums.find_damaged_block(start, digests) is None]

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
        """Read a range of whole blocks into the targets that need some of it, ordered by start. Each chunk is hashed as
        it arrives in its final memory, while it is in the processor's cache."""
        pieces = _lay_out(span, targets)
        is_scattered = pieces is not None
        if pieces is None:
            pieces = [np.empty(span.size, np.uint8)]
        digests = BlockDigests(self.block_bytes)
        store, key = self.store, self.info.key

        def update(offset: int, chunk: Any) -> None:
            nonlocal digests
            if offset == span.start:  # also after a failed attempt
                digests = BlockDigests(self.block_bytes)
            digests.update(chunk)

        take = update if self._contents else None

        def read() -> None:
            store.get_into(key, span.start, pieces, etag=self.info.etag, take=take)
            self._check_digests(span.start, digests.finish())

        read_until_intact(read, CorruptError, store.counters)
        if not is_scattered:
            for target in targets:
                low, high = max(target.start, span.start), min(target.stop, span.stop)
                data = pieces[0][low - span.start : high - span.start]
                target.target[low - target.start : high - target.start] = data


def _lay_out(span: Span, targets: Sequence[ReadTarget]) -> list[npt.NDArray[np.uint8]] | None:
    """Return consecutive arrays that receive the bytes of `span`: the parts of the targets in it, ordered by start, and
    new memory for the bytes between them. Return None if two targets need the same bytes."""
    pieces: list[npt.NDArray[np.uint8]] = []
    position = span.start
    for target in targets:
        low, high = max(target.start, span.start), min(target.stop, span.stop)
        if low < position:
            return None
        if low > position:
            pieces.append(np.empty(low - position, np.uint8))
        pieces.append(target.target[low - target.start : high - target.start])
        position = high
    if position < span.stop:
        pieces.append(np.empty(span.stop - position, np.uint8))
    return pieces


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
    uri = store.uri(key + CHECKSUM_SUFFIX)
    return read_until_intact(lambda: _parse_contents(*_read_record(store, key), uri=uri), CorruptError, store.counters)


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


def add_contents(store: Store, key: str, before: SavedContents, checksums: Checksums) -> bool:
    """Record, before the file at `key` is published, that it may hold `checksums`; return whether another save of the
    same name certainly preserves that. `before` is what was read earlier.

    Only contents that were old when `before` was read are dropped. Those that other saves have added since then may be
    published next, in any order.
    """
    dropped = before.checksums[: -(_MAX_CONTENTS - 1)]
    for _ in range(_ATTEMPTS):
        preserved = itertools.dropwhile(dropped.__contains__, before.checksums)
        others = [earlier for earlier in preserved if earlier != checksums]
        try:
            return _write_contents(store, key, replace(before, checksums=(*others, checksums)))
        except (AlreadyExistsError, ChangedError):
            before = read_contents(store, key)
    raise CheckpointError("too many processes save this at once", uri=store.uri(key), fix="Give each its own name")


def _read_etag(store: Store, key: str) -> str | None:
    info = store.find(key)
    return info.etag if info is not None else None


def _write_contents(store: Store, key: str, contents: SavedContents) -> bool:
    """Write the record if it has not changed; return False if the service cannot tell, so that it was overwritten."""
    entries, unknown = [checksums.to_json() for checksums in contents.checksums], list(contents.unknown_etags)
    digest_text = _digest_entries([entries, unknown])
    document = {"format": _FORMAT, "contents": entries, "unknown_etags": unknown, "digest": digest_text}
    data, checksum_key = json.dumps(document).encode(), key + CHECKSUM_SUFFIX
    try:
        store.put(checksum_key, data, if_absent=contents.etag is None, if_etag=contents.etag)
        return True
    except UnsupportedError:  # a few servers cannot replace conditionally
        store.put(checksum_key, data)
        return False


def _digest_entries(entries: Any) -> str:
    """Return the checksum of the checksums, so that damage to them is not mistaken for damage to the file."""
    return digest(json.dumps(entries).encode()).hex()


def open_verified(store: Store, key: str) -> VerifiedObject:
    """Open the current version of the file at `key`, with its checksums if it has any."""
    return _open_verified(store, key, lambda: (store.head(key), None))[0]


def open_with_end(store: Store, key: str, end_bytes: int) -> tuple[VerifiedObject, npt.NDArray[np.uint8]]:
    """Open like `open_verified`, and return also the last `end_bytes` bytes of the file, or all of a smaller one, from
    the same request. They are not verified."""
    source, end = _open_verified(store, key, lambda: store.get_end(key, end_bytes))
    return source, np.frombuffer(end, np.uint8)


def _open_verified(
    store: Store, key: str, describe: Callable[[], tuple[ObjectInfo, Any]]
) -> tuple[VerifiedObject, Any]:
    future = store.submit(read_contents, store, key)
    try:
        info, body = describe()
    except NotFoundError:
        future.result()  # raises if the bucket itself is gone, which a HEAD cannot tell
        raise
    contents = future.result()
    if (info.etag or "") in contents.unknown_etags:  # a version from before there were checksums
        return VerifiedObject(store, info), body
    return VerifiedObject(store, info, contents.checksums, lambda: read_contents(store, key).checksums), body
