"""Copies of sources on a machine's disk: made, brought up to date, checked, listed, removed."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from voxlane import uri as uris
from voxlane.errors import CacheError, NoRoomError, TooLargeError, VoxlaneError
from voxlane.sizes import written
from voxlane.staging import shelf as shelves
from voxlane.staging.copying import Copying, disk_failure
from voxlane.staging.shelf import STAGED, Line, Origin, Shelf
from voxlane.staging.sources import RECORDS, Survey, Wanted, below, default_name, place_of, survey
from voxlane.store import Store, StoreConfig

RESERVE_BYTES = 256 << 20
"""Left free on the disk, for what else runs there."""
_BLOCK_BYTES = 4096
"""A file takes whole blocks of the disk."""
_READERS = 4
"""Files that are checked at once."""
Doing = Literal["waiting", "checking", "copying"]


@dataclass(frozen=True)
class Progress:
    """How far a copy is."""

    doing: Doing
    """`waiting` while another process works below the same root."""
    objects: int
    """Whole ones."""
    total_objects: int
    bytes: int
    """Of the copy, with what was there already and what has arrived of unfinished objects."""
    total_bytes: int


@dataclass(frozen=True)
class Report:
    """What staging did."""

    name: str
    """Of the copy, below the root."""
    folder: str
    """Where the objects lie, under their names."""
    objects: int
    total_bytes: int
    copied: int
    """Objects that were read from the source."""
    copied_bytes: int
    shared: int
    """Objects that another copy below the same root had."""
    removed: int
    """Files that the source does not have, or has otherwise by now."""
    version: str
    """Of the source, as its survey names it."""
    seconds: float


@dataclass(frozen=True)
class Staged:
    """A copy that is here."""

    name: str
    folder: str
    source: str
    objects: int
    bytes: int
    whole: bool
    """False: its copying has not finished; `objects` and `bytes` are what is there."""
    version: str
    """Of the source; empty while the copy is not whole."""
    last_used: datetime.datetime


def stage(
    source: str,
    root: str | os.PathLike[str],
    *,
    name: str | None = None,
    config: StoreConfig | None = None,
    capacity_bytes: int | None = None,
    expected: Survey | None = None,
    origin: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    verify: bool = False,
    reserve_bytes: int = RESERVE_BYTES,
) -> Report:
    """Make `root/datasets/name` hold the objects below `source`, as they are now. Whatever is whole there is kept, so
    it goes on where it was killed; one process at a time works below a root, others wait for it.

    name: default: the source's last word and a hash of it.
    capacity_bytes: a larger source is a TooLargeError, before anything is copied.
    expected: the source's objects, where they are known without listing it.
    origin: what the source is called in the records, where it is read through a mount: nfs://SERVER/PATH.
    progress: called on this thread, about ten times a second; what it raises ends the copying.
    verify: read what is there and compare checksums; otherwise size and time of each file are enough.
    reserve_bytes: to be left free. Too little room is a NoRoomError, before anything is copied.

    An object that changes meanwhile is a ChangedError. The bytes of every object are compared with its size, and on
    the way over plain http also with its MD5, where its etag is one; TLS sees to that itself.
    """
    begin = time.monotonic()
    found = expected or survey(source, config)
    called = place_of(origin or found.source)
    shelf = Shelf(root)
    name = name or default_name(called)
    folder = shelf.dataset(name)
    if capacity_bytes is not None and found.total_bytes > capacity_bytes:
        raise TooLargeError(
            f"its {written(found.total_bytes)} are more than the {written(capacity_bytes)} that it may take",
            uri=called,
            fix="Raise the capacity, or stage a folder of it",
        )
    store = Store(source, config)
    said = _Said(found, progress)
    with shelf.alone(lambda: said.tell("waiting")):
        work = _Update(shelf, folder, Origin(called, store.endpoint), found, said)
        try:
            work.compare(verify)
            work.drop()
            work.share()
            work.check_room(reserve_bytes)
            if work.todo:
                md5 = (store.endpoint or "").startswith("http://")
                copying = Copying(store, below(uris.parse(source).key), shelf, folder, md5)
                copying.run(work.todo, lambda objects, arrived: said.tell("copying", objects, arrived))
            work.declare()
        except _Halted as halted:
            raise halted.error from None
        except OSError as error:
            if isinstance(error, VoxlaneError):
                raise
            raise disk_failure(error, shelf.root, sum(one.size for one in work.todo)) from None
    return Report(
        name=name,
        folder=folder,
        objects=len(found.objects),
        total_bytes=found.total_bytes,
        copied=len(work.todo),
        copied_bytes=sum(one.size for one in work.todo),
        shared=work.shared,
        removed=work.removed,
        version=found.version,
        seconds=time.monotonic() - begin,
    )


class _Said:
    """What the caller is told."""

    def __init__(self, found: Survey, progress: Callable[[Progress], None] | None) -> None:
        self._found, self._progress = found, progress
        self.objects = self.bytes = 0
        """What was there before copying."""

    def tell(self, doing: Doing, objects: int = 0, arrived: int = 0) -> None:
        if self._progress:
            total = self._found.total_bytes
            there = min(self.bytes + arrived, total)
            try:
                self._progress(Progress(doing, self.objects + objects, len(self._found.objects), there, total))
            except OSError as error:
                raise _Halted(error) from None


class _Halted(Exception):
    """Carries an error of the caller's past those of the disk."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class _Update:
    """One bringing up to date of a copy; its methods are called in order, with the lock held."""

    shelf: Shelf
    folder: str
    origin: Origin
    found: Survey
    said: _Said
    kept: list[Line] = field(default_factory=list)
    todo: list[Wanted] = field(default_factory=list)
    """What the copy lacks."""
    shared: int = 0
    removed: int = 0

    def compare(self, verify: bool) -> None:
        """Find what of the copy is as the source is."""
        self.shelf.make_folder(f"{self.folder}/{RECORDS}")
        origin, lines = shelves.read_manifest(self.folder)
        self._lines = lines if origin == self.origin else {}
        self._files = shelves.files_of(self.folder)
        doubted: list[Line] = []
        for one in self.found.objects:
            line = self._lines.get(one.name)
            size, mtime = self._files.get(one.name, (-1, 0))
            if line is None or (line.etag, line.size, size) != (one.etag, one.size, one.size):
                continue
            (doubted if verify or mtime != line.mtime else self.kept).append(line)
        self.kept += self._reread(doubted)
        whole = {line.name for line in self.kept}
        self.todo = [one for one in self.found.objects if one.name not in whole]
        self._stale = [name for name in self._files if name not in whole]
        self._count()

    def _reread(self, doubted: list[Line]) -> list[Line]:
        """Those whose file holds the bytes that were copied; the contents of others are dropped for all copies."""
        good = []
        self.said.tell("checking")
        with ThreadPoolExecutor(_READERS, thread_name_prefix="voxlane-check") as pool:
            paths = [f"{self.folder}/{line.name}" for line in doubted]
            for line, path, digest in zip(doubted, paths, pool.map(shelves.digest_of_file, paths), strict=True):
                if digest == line.digest:
                    mtime = self._files[line.name][1]
                    good.append(Line(line.name, line.size, line.etag, line.digest, mtime))
                    self.said.objects, self.said.bytes = len(good), self.said.bytes + line.size
                    self.said.tell("checking")
                else:
                    with contextlib.suppress(FileNotFoundError):
                        if os.path.samefile(path, self.shelf.blob(line.digest)):
                            os.unlink(self.shelf.blob(line.digest))
        return good

    def _count(self) -> None:
        self.said.objects, self.said.bytes = len(self.kept), sum(line.size for line in self.kept)

    def drop(self) -> None:
        """Take back what is said of objects that the copy lacks, then remove their files."""
        told = shelves.read_staged(self.folder)
        unfinished = told is None and bool(self._lines)
        if self.todo or self._stale:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.folder}/{STAGED}")
        old = {line.name: line for line in self.kept}
        if self.todo or self._stale or old != self._lines:
            shelves.write_manifest(self.folder, self.origin, self.kept)
        if self._stale:
            shelves.prune(self.folder, self._stale)
            self.removed = len(self._stale)
        if self._stale or unfinished:
            self.shelf.sweep()

    def share(self) -> None:
        """Take from other copies what they have of the same objects."""
        if not self.todo:
            return
        known = self._known()
        lacking, lines = [], []
        for one in self.todo:
            line = known.get((self._uri(self.origin.source, one.name), one.etag, one.size))
            if line and self.shelf.share(line.digest, line.size, line.mtime, f"{self.folder}/{one.name}"):
                lines.append(Line(one.name, one.size, one.etag, line.digest, line.mtime))
            else:
                lacking.append(one)
        if lines:
            self.shared = len(lines)
            self.kept += lines
            self.todo = lacking
            shelves.write_manifest(self.folder, self.origin, self.kept)
            self._count()

    def _known(self) -> dict[tuple[str, str | None, int], Line]:
        """What other copies have of the same bucket, by URI, version and size."""
        known: dict[tuple[str, str | None, int], Line] = {}
        bucket = "/".join(self.origin.source.split("/")[:3])
        for name in self.shelf.names():
            other = self.shelf.dataset(name)
            if other == self.folder:
                continue
            origin, lines = shelves.read_manifest(other)
            if origin is None or origin.endpoint != self.origin.endpoint or not origin.source.startswith(bucket):
                continue
            for line in lines.values():
                if line.etag is not None:  # without a version, the same name may be another content
                    known[(self._uri(origin.source, line.name), line.etag, line.size)] = line
        return known

    @staticmethod
    def _uri(source: str, name: str) -> str:
        return f"{source}/{name}"

    def check_room(self, reserve_bytes: int) -> None:
        """Raise NoRoomError when the disk has too little."""
        if not self.todo:
            return
        need = sum(-(-one.size // _BLOCK_BYTES) * _BLOCK_BYTES for one in self.todo)
        lacking = need + reserve_bytes - shutil.disk_usage(self.folder).free
        if lacking > 0:
            if not self.kept:
                shutil.rmtree(self.folder)
            raise NoRoomError(
                f"{written(lacking)} too little room for the {written(need)} still to be copied"
                + (f" and {written(reserve_bytes)} that stay free" if reserve_bytes else ""),
                uri=str(self.shelf.root),
                fix="Make room, or give another disk's folder",
                lacking_bytes=lacking,
            )

    def declare(self) -> None:
        """Say that the copy is whole, and used now."""
        told = {
            "source": self.origin.source,
            "endpoint": self.origin.endpoint,
            "objects": len(self.found.objects),
            "bytes": self.found.total_bytes,
            "version": self.found.version,
        }
        before = shelves.read_staged(self.folder)
        if before is None or any(before.get(key) != value for key, value in told.items()):
            shelves.sync(self.folder)  # it must not be said of bytes that a power cut can take
            when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            shelves.write_staged(self.folder, {**told, "when": when})
        shelves.touch(self.folder)
        self._count()


# -- what is here ------------------------------------------------------------------------------------------------------


def staged(root: str | os.PathLike[str]) -> list[Staged]:
    """The copies below `root`, whole or not, by name."""
    shelf = Shelf(root)
    found = []
    for name in shelf.names():
        folder = shelf.dataset(name)
        used = datetime.datetime.fromtimestamp(shelves.last_used(folder), datetime.UTC)
        if told := shelves.read_staged(folder):
            found.append(
                Staged(name, folder, told["source"], told["objects"], told["bytes"], True, told["version"], used)
            )
            continue
        origin, lines = shelves.read_manifest(folder)
        size = sum(line.size for line in lines.values())
        found.append(Staged(name, folder, origin.source if origin else "", len(lines), size, False, "", used))
    return found


def touch(root: str | os.PathLike[str], name: str) -> None:
    """Note that a copy is used now; eviction takes the one that was not for longest. Nothing when it is not here."""
    folder = Shelf(root).dataset(name)
    if os.path.isdir(f"{folder}/{RECORDS}"):
        shelves.touch(folder)


def remove(root: str | os.PathLike[str], name: str) -> int:
    """Remove a copy; the bytes that became free, which are not those that other copies share. 0 when it is not here."""
    shelf = Shelf(root)
    if not os.path.isdir(shelf.dataset(name)):
        return 0
    with shelf.alone():
        return _remove(shelf, name)


def _remove(shelf: Shelf, name: str) -> int:
    folder, doomed = shelf.dataset(name), f"{shelf.partial}/removed"
    try:
        # What is said of it first: whoever is reading then takes what is gone from the source.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/{shelves.MANIFEST}")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
        return shelf.sweep()
    except FileNotFoundError:  # another process has removed it
        return 0
    except OSError as error:
        raise CacheError(
            f"the copy cannot be removed: {error.strerror}", uri=folder, fix="Check the disk and its owner"
        ) from None


def evict(root: str | os.PathLike[str], need_bytes: int, *, keep: Collection[str] = ()) -> list[str]:
    """Remove copies, but those named in `keep`, beginning with the one that was not used for longest, until at least
    `need_bytes` became free; returns their names. Nothing is removed where all of them together would not be enough.
    """
    shelf = Shelf(root)
    if not shelf.names():
        return []
    with shelf.alone():
        copies = sorted((one for one in staged(root) if one.name not in keep), key=lambda one: one.last_used)
        doomed = _enough([(one.name, one.folder) for one in copies], need_bytes)
        for name in doomed:
            _remove(shelf, name)
    return doomed


def _enough(copies: list[tuple[str, str]], need_bytes: int) -> list[str]:
    """The first of `copies` whose removal frees `need_bytes`; none when all of them do not."""
    if need_bytes <= 0:
        return []
    links: Counter[int] = Counter()
    freed = 0
    for count, (_, folder) in enumerate(copies, 1):
        for name in shelves.files_of(folder):
            found = os.stat(f"{folder}/{name}", follow_symlinks=False)
            links[found.st_ino] += 1
            # A content goes when only its own name among `objects` is left.
            if links[found.st_ino] == max(found.st_nlink - 1, 1):
                freed += found.st_size
        if freed >= need_bytes:
            return [name for name, _ in copies[:count]]
    return []
