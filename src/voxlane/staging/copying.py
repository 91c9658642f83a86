"""Objects from a bucket to files, many at once: each byte is read once, summed and written as it arrives."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field
from typing import Any

import xxhash

from voxlane.errors import CacheError, ChangedError, NoRoomError, NotFoundError, RangeError, StoreError, VoxlaneError
from voxlane.staging import direct
from voxlane.staging.shelf import MANIFEST, Line, Shelf, digest_of, spelled
from voxlane.staging.sources import Wanted
from voxlane.store import Store

CONCURRENCY = 32
"""Parts in flight, at most; fewer where StoreConfig.max_concurrency says so."""
_TICK_S = 0.1
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MD5 = re.compile(r"[0-9a-f]{32}")
_READINGS = 4
"""How often an object is read whose bytes do not fit its checksum."""


@dataclass
class _Arriving:
    """An object on its way; its file is open until the last part is there."""

    wanted: Wanted
    path: str
    handle: int
    direct: bool
    """Its file takes whole blocks only."""
    sums: list[bytes]
    left: int
    """Parts that have not arrived."""


@dataclass
class Copying:
    """One copying of objects into a copy's folder; `run` once."""

    store: Store
    prefix: str
    """Of the objects' keys, before their names."""
    shelf: Shelf
    folder: str
    """Of the copy."""
    md5: bool
    """Whether etags that look like an MD5 are checked."""
    _stop: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: dict[str, _Arriving] = field(default_factory=dict)
    _moved: list[int] = field(default_factory=list)
    _journal: int = -1

    def run(self, todo: Sequence[Wanted], tick: Callable[[int, int], None]) -> None:
        """Copy them all. `tick(objects, bytes)` is called on this thread with what has arrived, every 0.1 s."""
        self._tasks = self._parts(todo)
        self._arrived = 0
        total = sum(one.size for one in todo)
        workers = min(CONCURRENCY, self.store.config.max_concurrency)
        self._moved = [0] * workers
        self._buffers = [direct.Buffer() for _ in range(workers)]
        try:
            self._journal = os.open(f"{self.folder}/{MANIFEST}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self.store.open_native()
            running = {self.store.submit(self._work, number) for number in range(workers)}
            try:
                while running:
                    done, running = wait(running, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    tick(self._arrived, sum(self._moved))
            finally:
                self._stop = True
                wait(running)
        except VoxlaneError:
            raise
        except OSError as error:
            raise disk_failure(error, self.shelf.root, total - sum(self._moved)) from None
        finally:
            for one in self._open.values():
                os.close(one.handle)
                with contextlib.suppress(OSError):
                    os.unlink(one.path)
            if self._journal >= 0:
                os.close(self._journal)

    def _parts(self, todo: Sequence[Wanted]) -> Iterator[tuple[_Arriving, int, int, int]]:
        """Objects part by part, each opened when its first part's turn comes."""
        for wanted in todo:
            # In its place at once: it counts when its line is written, and a rename from elsewhere would take a lock
            # of the whole file system for every object.
            path = f"{self.folder}/{wanted.name}"
            self.shelf.make_folder(os.path.dirname(path))
            handle, unbuffered = direct.open_new(path, wanted.size)
            parts = wanted.parts() or [(0, 0)]
            one = _Arriving(wanted, path, handle, unbuffered, [b""] * len(parts), len(parts))
            self._open[path] = one
            for index, (start, stop) in enumerate(parts):
                yield one, index, start, stop

    def _work(self, worker: int) -> None:
        """A thread: parts, until there are none."""
        try:
            while not self._stop:
                with self._lock:
                    task = next(self._tasks, None)
                if task is None:
                    return
                one, index, start, stop = task
                self._arrive(one, index, start, stop, worker)
        except BaseException as error:
            self._stop = True
            if isinstance(error, _DiskError):
                raise error.error from None
            raise

    def _arrive(self, one: _Arriving, index: int, start: int, stop: int, worker: int) -> None:
        claimed = self._claimed(one.wanted)
        md5 = None
        if len(one.sums) == 1:
            md5 = hashlib.md5(usedforsecurity=False) if claimed else None
            one.sums[0], md5 = self._read(one, start, stop, worker, md5)
        else:
            one.sums[index], _ = self._read(one, start, stop, worker, None)
            with self._lock:
                one.left -= 1
                if one.left:
                    return
            if claimed:
                md5 = _md5_of(one.path, one.wanted.size)
        if claimed and md5 is not None and md5.hexdigest() != claimed:
            self._settle(one, claimed, worker)
        self._finish(one)

    def _claimed(self, wanted: Wanted) -> str | None:
        """The MD5 that the server gives, in the etag; None where it gives none or it is not checked. Objects that were
        uploaded in parts, and those of Azure and of file systems, have other etags."""
        return wanted.etag if self.md5 and wanted.etag and wanted.size and _MD5.fullmatch(wanted.etag) else None

    def _settle(self, one: _Arriving, claimed: str, worker: int) -> None:
        """Read an object whose bytes do not fit its MD5 again, until they do. When the same bytes come twice, they
        were not damaged on the way: the etag is none, as that of an object encrypted with a key of the user's."""
        for _ in range(_READINGS):
            before = list(one.sums)
            self._moved[worker] -= one.wanted.size
            md5 = hashlib.md5(usedforsecurity=False)
            for index, (start, stop) in enumerate(one.wanted.parts()):
                one.sums[index], md5 = self._read(one, start, stop, worker, md5)
            if md5.hexdigest() == claimed or one.sums == before:
                return
        raise StoreError(
            f"read {_READINGS + 1} times, and other bytes each time; none fits its checksum",
            uri=self.store.uri(self.prefix + one.wanted.name),
            fix="Something between the server and this machine damages what passes: use https, then stage again",
        )

    def _read(self, one: _Arriving, start: int, stop: int, worker: int, md5: Any) -> tuple[bytes, Any]:
        """Read a part into its place; its checksum, and `md5` with it added."""
        if stop == start:
            return b"", md5
        total: Any = None
        after: Any = None
        buffer, at = self._buffers[worker], start

        def flush() -> None:
            nonlocal at
            body = buffer.content()
            total.update(body)
            if after:
                after.update(body)
            _write(one.handle, buffer.content(padded=True) if one.direct else body, at)
            at += buffer.filled
            self._moved[worker] += buffer.filled
            buffer.filled = 0

        def take(place: int, chunk: Any) -> None:
            nonlocal total, after, at
            if place == start:  # the first time, or again after a failure
                total, after = xxhash.xxh3_128(), md5 and md5.copy()
                self._moved[worker] -= at - start
                at, buffer.filled = start, 0
            taken = 0
            while taken < len(chunk):
                taken = buffer.add(chunk, taken)
                if buffer.full:
                    flush()

        key, wanted = self.prefix + one.wanted.name, one.wanted
        try:
            size = self.store.get_chunks(key, start, stop, take, etag=wanted.etag)
        except (ChangedError, NotFoundError, RangeError) as error:
            if type(error) not in (ChangedError, NotFoundError, RangeError):
                raise
            raise _changed(self.store.uri(key)) from None
        if size != wanted.size:
            raise _changed(self.store.uri(key))
        if buffer.filled:
            flush()
        return total.digest(), after

    def _finish(self, one: _Arriving) -> None:
        """Publish an object whose parts are all there."""
        digest = digest_of([part for part in one.sums if part])
        if one.direct:
            os.ftruncate(one.handle, one.wanted.size)
        os.fchmod(one.handle, 0o444)
        with self._lock:
            del self._open[one.path]
        os.close(one.handle)
        wanted = one.wanted
        self.shelf.publish(one.path, digest)
        mtime = os.stat(one.path).st_mtime_ns
        text = spelled(Line(wanted.name, wanted.size, wanted.etag, digest, mtime)) + "\n"
        with self._lock:
            _write(self._journal, text.encode(), None)
            self._arrived += 1


def disk_failure(error: OSError, root: str | os.PathLike[str], missing_bytes: int) -> CacheError:
    """What an error of the disk below `root` means to the user, with so much still to be copied."""
    where = os.fspath(root)
    if error.errno not in _FULL:
        return CacheError(f"the copy stopped: {error.strerror}", uri=where, fix="Check the disk, then stage again")
    return NoRoomError(
        "the disk became full while objects were copied; those that are whole stay",
        uri=where,
        fix="Make room and stage again: it goes on",
        lacking_bytes=max(missing_bytes - shutil.disk_usage(where).free, 1),
    )


class _DiskError(VoxlaneError):
    """Carries an error of the local disk through the store, which would take it for the bucket's and try again."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _write(handle: int, body: Any, place: int | None) -> None:
    """Write all of `body`, at `place` or at the end."""
    view = memoryview(body)
    try:
        while view:
            count = os.write(handle, view) if place is None else os.pwrite(handle, view, place)
            view = view[count:]
            place = None if place is None else place + count
    except OSError as error:
        raise _DiskError(error) from None


def _md5_of(path: str, size: int) -> Any:
    """Of a file's first `size` bytes: it may end in a padded block still."""
    md5 = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while size and (body := file.read(min(size, 1 << 20))):
            md5.update(body)
            size -= len(body)
    return md5


def _changed(uri: str) -> ChangedError:
    return ChangedError(
        "the object changed or went away while the source was copied", uri=uri, fix="Stage again when nobody writes it"
    )
