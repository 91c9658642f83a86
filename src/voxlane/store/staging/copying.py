"""Copy objects from a bucket to files in parallel; each byte is read once, checksummed and written as it arrives.

Files are written past the page cache where the file system supports it. Buffered writes cost a copy in memory and page
cache that training needs. Measured on ext4 with sequential files: 1.2 GB/s instead of 0.3 (docs/log.md). O_DIRECT
requires buffers, offsets and sizes in whole blocks, so the last block of a file is padded and the file truncated
afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from voxlane.errors import CacheError, ChangedError, NoRoomError, NotFoundError, RangeError, StoreError
from voxlane.store import Store
from voxlane.store.content import PART_BYTES, combine_checksums
from voxlane.store.objects import is_published_last
from voxlane.store.ranges import Span, split
from voxlane.store.staging.local_store import MANIFEST, ManifestEntry, StagingRoot
from voxlane.store.staging.sources import SourceObject

CONCURRENCY = 32
"""Maximum number of parts in flight; StoreConfig.max_concurrency may lower it."""
_BUFFER_BYTES = 1 << 20
"""Size of one write, and of each worker's block-aligned buffer; a divisor of the part size."""
BLOCK_BYTES = 4096
"""Block of the disk: files occupy whole blocks, and direct writes consist of whole blocks."""
_MIN_DIRECT_BYTES = 256 * 1024
"""Smaller files are written through the page cache, because a direct write waits for the disk."""
_NO_DIRECT_WRITES = (errno.EINVAL, errno.EOPNOTSUPP)
_TICK_S = 0.1
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_MD5 = re.compile(r"[0-9a-f]{32}")
_MAX_REREADS = 4
"""How many times to read an object again if its bytes do not match its checksum."""


@dataclass
class _Transfer:
    """An object that is being copied; its file stays open until the last part has arrived."""

    source: SourceObject
    path: str
    handle: int
    direct: bool
    """True if the file accepts only whole blocks."""
    checksums: list[bytes]
    """Checksum of each part."""
    parts_left: int
    """Number of parts that have not arrived."""

    @property
    def digest(self) -> str:
        """Checksum of the whole content, once all parts have arrived."""
        return combine_checksums(checksum for checksum in self.checksums if checksum)


@dataclass
class ObjectCopier:
    """Copy objects into the folder of a copy; call `run` once."""

    store: Store
    prefix: str
    """Prefix of the objects' keys that their names omit."""
    root: StagingRoot
    folder: str
    """Folder of the copy."""
    check_md5: bool
    """Whether to check objects against etags that look like an MD5."""
    _stop: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: dict[str, _Transfer] = field(default_factory=dict)
    _bytes_copied: list[int] = field(default_factory=list)
    """Number of bytes copied by each worker."""

    @property
    def bytes_copied(self) -> int:
        """Number of bytes that have arrived."""
        return sum(self._bytes_copied)

    def run(self, objects: Sequence[SourceObject], tick: Callable[[int, int], None]) -> None:
        """Copy all objects, those that declare others complete last; call `tick(objects, bytes)` on this thread with
        what has arrived, every 0.1 s."""
        self._objects_copied = 0
        self._total_bytes = sum(item.size for item in objects)
        workers = min(CONCURRENCY, self.store.config.max_concurrency)
        self._bytes_copied = [0] * workers
        self._buffers = [np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8) for _ in range(workers)]
        self.store.open_native()
        with open(f"{self.folder}/{MANIFEST}", "ab") as self._manifest:
            for is_last in (False, True):
                batch = [item for item in objects if is_published_last(item.name) == is_last]
                if batch:
                    self._run_batch(batch, workers, tick)

    def _run_batch(self, objects: Sequence[SourceObject], workers: int, tick: Callable[[int, int], None]) -> None:
        self._tasks, self._stop = self._split_parts(objects), False
        running = {self.store.submit(self._copy_parts, number) for number in range(workers)}
        try:
            while running:
                done, running = wait(running, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                tick(self._objects_copied, self.bytes_copied)
        finally:
            self._stop = True
            wait(running)
            for transfer in self._open.values():
                os.close(transfer.handle)
                with contextlib.suppress(OSError):
                    os.unlink(transfer.path)

    def _split_parts(self, objects: Sequence[SourceObject]) -> Iterator[tuple[_Transfer, int, Span]]:
        """Yield the objects part by part; a file is opened when the first part of its object is next."""
        for item in objects:
            # Written in place at once: the object counts only once the manifest has its entry, and a rename from
            # elsewhere would take a lock of the whole file system for every object.
            path = f"{self.folder}/{item.file}"
            self.root.make_folder(os.path.dirname(path))
            handle, is_direct = _open_new(path, item.size)
            parts = split(item.size, PART_BYTES) or [Span(0, 0)]
            transfer = _Transfer(item, path, handle, is_direct, [b""] * len(parts), len(parts))
            self._open[path] = transfer
            for index, part in enumerate(parts):
                yield transfer, index, part

    def _copy_parts(self, worker: int) -> None:
        """Copy parts on a thread until there are none left."""
        try:
            while not self._stop:
                with self._lock:
                    task = next(self._tasks, None)
                if task is None:
                    return
                self._copy_part(*task, worker)
        except BaseException:
            self._stop = True
            raise

    def _copy_part(self, transfer: _Transfer, index: int, part: Span, worker: int) -> None:
        expected_md5 = self._expected_md5(transfer.source)
        is_whole = len(transfer.checksums) == 1
        md5 = hashlib.md5(usedforsecurity=False) if expected_md5 and is_whole else None
        transfer.checksums[index], md5 = self._read(transfer, part, worker, md5)
        with self._lock:
            transfer.parts_left -= 1
            if transfer.parts_left:
                return
        if transfer.source.checksum is not None:
            if transfer.digest != transfer.source.checksum:
                self._reread_content(transfer, worker)
        elif expected_md5 and (md5 or _hash_file_md5(transfer)).hexdigest() != expected_md5:
            self._reread(transfer, expected_md5, worker)
        self._publish(transfer)

    def _expected_md5(self, item: SourceObject) -> str | None:
        """Return the MD5 in the etag, or None if the etag is no MD5 or is not checked.

        Objects uploaded in parts, and those of Azure and of file systems, have other etags.
        """
        return item.etag if self.check_md5 and item.etag and item.size and _MD5.fullmatch(item.etag) else None

    def _reread(self, transfer: _Transfer, expected_md5: str, worker: int) -> None:
        """Read an object again until its bytes match its MD5.

        If the same bytes arrive twice, they were not damaged in transit: the etag is no MD5, for example because the
        object is encrypted with a customer's key.
        """
        for _ in range(_MAX_REREADS):
            before = list(transfer.checksums)
            self._bytes_copied[worker] -= transfer.source.size
            md5 = hashlib.md5(usedforsecurity=False)
            for index, part in enumerate(split(transfer.source.size, PART_BYTES)):
                transfer.checksums[index], md5 = self._read(transfer, part, worker, md5)
            if md5.hexdigest() == expected_md5 or transfer.checksums == before:
                return
        raise StoreError(
            f"{_MAX_REREADS + 1} reads returned different bytes, and none matches the checksum",
            uri=self.store.uri(self.prefix + transfer.source.name),
            fix="Something between the server and this machine corrupts data: use https, then stage again",
        )

    def _reread_content(self, transfer: _Transfer, worker: int) -> None:
        """Read an object again until its content is the expected one; raise ChangedError if it has another."""
        for _ in range(_MAX_REREADS):
            self._bytes_copied[worker] -= transfer.source.size
            for index, part in enumerate(split(transfer.source.size, PART_BYTES)):
                transfer.checksums[index], _unused = self._read(transfer, part, worker, None)
            if transfer.digest == transfer.source.checksum:
                return
        raise ChangedError(
            f"the object has another content than its index says (the same after {_MAX_REREADS + 1} reads)",
            uri=self.store.uri(self.prefix + transfer.source.name),
            fix="Copy it to the source again",
        )

    def _read(self, transfer: _Transfer, part: Span, worker: int, md5: Any) -> tuple[bytes, Any]:
        """Read a part into the file; return its checksum, and a copy of `md5` updated with its bytes."""
        if not part.size:
            return b"", md5
        checksum: Any = None
        updated_md5: Any = None
        buffer, filled, offset = self._buffers[worker], 0, part.start

        def flush() -> None:
            nonlocal offset, filled
            body = buffer.data[:filled]
            checksum.update(body)
            if updated_md5:
                updated_md5.update(body)
            padded = -(-filled // BLOCK_BYTES) * BLOCK_BYTES
            self._write(transfer.handle, buffer.data[:padded] if transfer.direct else body, offset)
            offset += filled
            self._bytes_copied[worker] += filled
            filled = 0

        def receive(position: int, chunk: Any) -> None:
            nonlocal checksum, updated_md5, offset, filled
            if position == part.start:  # the first attempt, or a retry after a failure
                checksum, updated_md5 = xxhash.xxh3_128(), md5 and md5.copy()
                self._bytes_copied[worker] -= offset - part.start
                offset, filled = part.start, 0
            rest = np.frombuffer(chunk, np.uint8)
            while len(rest):
                count = min(len(rest), _BUFFER_BYTES - filled)
                buffer[filled : filled + count] = rest[:count]  # numpy copies without holding the interpreter lock
                rest, filled = rest[count:], filled + count
                if filled == _BUFFER_BYTES:
                    flush()

        item = transfer.source
        key = self.prefix + item.name
        try:
            size = self.store.get_chunks(key, part.start, part.stop, receive, etag=item.etag)
        except (ChangedError, NotFoundError, RangeError) as error:
            if type(error) not in (ChangedError, NotFoundError, RangeError):
                raise
            size = -1
        if size != item.size:
            raise ChangedError(
                "the object was changed or deleted during the copy",
                uri=self.store.uri(key),
                fix="Stage again when nothing writes to the source",
            )
        if filled:
            flush()
        return checksum.digest(), updated_md5

    def _publish(self, transfer: _Transfer) -> None:
        """Close the file of an object that has arrived, and add its entry to the manifest."""
        digest, item = transfer.digest, transfer.source
        if transfer.direct:
            os.ftruncate(transfer.handle, item.size)
        os.fchmod(transfer.handle, 0o444)
        with self._lock:
            del self._open[transfer.path]
        os.close(transfer.handle)
        self.root.publish(transfer.path, digest)
        mtime = os.stat(transfer.path).st_mtime_ns
        line = ManifestEntry(item.name, item.size, item.etag, digest, mtime, path=item.path).to_json() + "\n"
        with self._lock:
            self._manifest.write(line.encode())
            self._manifest.flush()
            self._objects_copied += 1

    def _write(self, handle: int, body: memoryview, offset: int) -> None:
        try:
            while body:
                count = os.pwrite(handle, body, offset)
                body, offset = body[count:], offset + count
        except OSError as error:
            # Translated here, because the store would retry an OSError as a failure of the bucket.
            raise describe_disk_error(error, self.root.root, self._total_bytes - self.bytes_copied) from None


def describe_disk_error(error: OSError, root: os.PathLike[str], missing_bytes: int) -> CacheError:
    """Translate an error of the disk below `root` that occurred with `missing_bytes` still to be copied."""
    path = os.fspath(root)
    if error.errno not in _DISK_FULL:
        return CacheError(f"the copy stopped: {error.strerror}", uri=path, fix="Check the disk, then stage again")
    return NoRoomError(
        "the disk became full during the copy; complete objects are kept",
        uri=path,
        fix="Free some disk space and stage again to resume",
        lacking_bytes=max(missing_bytes - shutil.disk_usage(path).free, 1),
    )


def _hash_file_md5(transfer: _Transfer) -> Any:
    """Return the MD5 of an object from its file."""
    if transfer.direct:
        os.ftruncate(transfer.handle, transfer.source.size)
    with open(transfer.path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))


def _open_new(path: str, size: int) -> tuple[int, bool]:
    """Create a file for `size` bytes; return its descriptor and whether its writes are direct."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    if direct and size >= _MIN_DIRECT_BYTES:
        try:
            return os.open(path, flags | direct, 0o600), True
        except OSError as error:
            if error.errno not in _NO_DIRECT_WRITES:
                raise
            flags &= ~os.O_EXCL  # the failed call may have created the file
    return os.open(path, flags, 0o600), False
