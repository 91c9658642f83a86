"""The folder of a machine's disk that copies lie in, and what is written there about them.

    ROOT/objects/ab/<digest>                  every content once
    ROOT/datasets/<name>/<object name>        the objects of one copy: hard links to the contents
    ROOT/datasets/<name>/.voxlane/manifest.jsonl  the source, then a line an object that is whole
    ROOT/datasets/<name>/.voxlane/staged.json     written last, when all of them are
    ROOT/datasets/<name>/.voxlane/used            its time is that of the last use
    ROOT/partial/                             what is being replaced or removed; emptied by whoever holds the lock
    ROOT/lock

An object without its line is not there, whatever its file holds: it is written in its place, and what a killed process
left is removed by the next. A line goes before its file does. Users of the machine cannot look into ROOT; a container
that has one copy mounted can read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from voxlane.errors import CacheError, ConfigError
from voxlane.staging.sources import PART_BYTES, RECORDS

MANIFEST, STAGED, USED = f"{RECORDS}/manifest.jsonl", f"{RECORDS}/staged.json", f"{RECORDS}/used"
FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_POLL_S = 0.1
_COMPARE_BYTES = 1 << 20
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)


@dataclass(frozen=True, slots=True)
class Line:
    """An object that is whole in a copy."""

    name: str
    size: int
    etag: str | None
    digest: str
    mtime: int
    """Of its file, in nanoseconds: another one means that somebody wrote to it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a copy comes from."""

    source: str
    """URI, without a slash at the end."""
    endpoint: str | None
    """The server, where it is not the cloud's own: elsewhere the same URI is something else."""


class Shelf:
    """The folder at `root`. Nothing is read or written before a method is called."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).expanduser().absolute()
        self.objects, self.datasets, self.partial = (str(self.root / n) for n in ("objects", "datasets", "partial"))
        self._made: set[str] = set()
        self._judging = threading.Lock()

    def blob(self, digest: str) -> str:
        """Where a content lies."""
        return f"{self.objects}/{digest[:2]}/{digest}"

    def dataset(self, name: str) -> str:
        """The folder of a copy."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a copy", fix="Use letters, digits, dots, dashes and underscores, at most 200"
            )
        return f"{self.datasets}/{name}"

    def names(self) -> list[str]:
        """The copies that are here, whole or not."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(entry.name for entry in os.scandir(self.datasets) if _NAME.fullmatch(entry.name))
        return []

    @contextlib.contextmanager
    def alone(self, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the folder's lock; `waiting` is called every 0.1 s while another process has it. What a killed process
        was writing is removed."""
        try:
            self._make_root()
            handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CacheError(
                f"the folder cannot be used: {error.strerror}",
                uri=str(self.root),
                fix="Give a folder on this machine's own disk that this user can write",
            ) from None
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if waiting:
                        waiting()
                    time.sleep(_POLL_S)
            self._made.clear()
            self._empty_partial()
            yield
        finally:
            os.close(handle)

    def _make_root(self) -> None:
        if not self.root.is_dir() or not any(self.root.iterdir()):
            self.root.mkdir(parents=True, exist_ok=True)
            os.chmod(self.root, 0o700)
        for folder in (self.objects, self.datasets, self.partial):
            os.makedirs(folder, mode=0o700, exist_ok=True)

    def _empty_partial(self) -> None:
        for entry in list(os.scandir(self.partial)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

    def make_folder(self, path: str) -> None:
        """Make a folder that everybody may read, whatever the umask; once."""
        if path in self._made:
            return
        parent = os.path.dirname(path)
        if parent not in (self.objects, self.datasets):
            self.make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            os.chmod(path, 0o755)
        self._made.add(path)

    # -- contents --------------------------------------------------------------------------------------------------

    def publish(self, target: str, digest: str) -> None:
        """Make the whole, closed file `target` of an object the content `digest`. Where the same content is here
        already, that becomes the object's file."""
        blob, aside = self.blob(digest), f"{self.partial}/{digest}"
        self.make_folder(os.path.dirname(blob))
        try:
            self._link(target, blob)
        except FileExistsError:
            with self._judging:  # no thread replaces what another one compares
                # The digest is quick, not secret: whoever can write a source could make two contents that share one.
                if _same_bytes(target, blob) and self._try_link(blob, aside):
                    os.replace(aside, target)
                else:
                    self._link(target, aside)
                    os.replace(aside, blob)  # a damaged one, or one with as many links as there can be

    def share(self, digest: str, size: int, mtime: int, target: str) -> bool:
        """Make a content that is here the object's file `target`, which does not exist; whether that could be."""
        blob = self.blob(digest)
        try:
            found = os.stat(blob)
        except FileNotFoundError:
            return False
        if (found.st_size, found.st_mtime_ns) != (size, mtime):
            return False
        self.make_folder(os.path.dirname(target))
        return self._try_link(blob, target)

    def _try_link(self, source: str, target: str) -> bool:
        try:
            self._link(source, target)
        except OSError as error:
            if error.errno == errno.EMLINK:
                return False
            raise
        return True

    def _link(self, source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise CacheError(
                    "the folder's file system has no hard links", uri=str(self.root), fix="Give one on a local disk"
                ) from None
            raise

    def sweep(self) -> int:
        """Remove contents that no copy has; bytes that became free."""
        freed = 0
        for folder in os.scandir(self.objects):
            for entry in os.scandir(folder.path):
                found = entry.stat(follow_symlinks=False)
                if found.st_nlink == 1:
                    os.unlink(entry.path)
                    freed += found.st_size
        return freed


# -- records -----------------------------------------------------------------------------------------------------------


def read_manifest(folder: str, *, lines: bool = True) -> tuple[Origin | None, dict[str, Line]]:
    """Where the copy in `folder` comes from, and what is whole of it by name, unless `lines` is false; (None, {}) when
    nothing is said."""
    try:
        with open(f"{folder}/{MANIFEST}", encoding="utf-8", errors="replace") as file:
            first, rest = file.readline(), file.readlines() if lines else []
    except OSError:
        return None, {}
    try:
        head = json.loads(first)
        if head["format"] != FORMAT:
            return None, {}
        origin = Origin(head["source"], head["endpoint"])
    except (ValueError, KeyError, TypeError):
        return None, {}
    found = {}
    for text in rest:
        with contextlib.suppress(ValueError, TypeError):  # a line that a kill cut off
            line = Line(**json.loads(text))
            found[line.name] = line
    return origin, found


def write_manifest(folder: str, origin: Origin, lines: list[Line]) -> None:
    """Replace what is said of the copy in `folder`, at once."""
    head = json.dumps({"format": FORMAT, "source": origin.source, "endpoint": origin.endpoint})
    _replace(f"{folder}/{MANIFEST}", "".join(f"{text}\n" for text in (head, *map(spelled, lines))))


def spelled(line: Line) -> str:
    """A line as it is written."""
    told = {"name": line.name, "size": line.size, "etag": line.etag, "digest": line.digest, "mtime": line.mtime}
    return json.dumps(told)


def read_staged(folder: str) -> dict[str, Any] | None:
    """What `staged.json` says of a copy that is whole; None for others."""
    try:
        with open(f"{folder}/{STAGED}", encoding="utf-8") as file:
            told = json.load(file)
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and told.get("format") == FORMAT else None


def write_staged(folder: str, told: dict[str, Any]) -> None:
    """Say that a copy is whole."""
    _replace(f"{folder}/{STAGED}", json.dumps({"format": FORMAT, **told}, indent=1) + "\n")


def sync(folder: str | os.PathLike[str]) -> None:
    """Wait until everything written to the file system of `folder` is on its disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syncfs"):
        os.sync()
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc.syncfs(handle) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(folder))
    finally:
        os.close(handle)


def touch(folder: str) -> None:
    """Note that a copy is used now."""
    path = f"{folder}/{USED}"
    try:
        os.utime(path)
    except FileNotFoundError:
        _replace(path, "")


def last_used(folder: str) -> float:
    """When a copy was used or written last, in seconds since 1970; 0: nothing is known."""
    for name in (USED, MANIFEST):
        with contextlib.suppress(OSError):
            return os.stat(f"{folder}/{name}").st_mtime
    return 0.0


def _replace(path: str, text: str) -> None:
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(file.fileno(), 0o644)
    os.replace(partial, path)


# -- files -------------------------------------------------------------------------------------------------------------


def files_of(folder: str) -> dict[str, tuple[int, int]]:
    """Every file below a copy's folder but the records: name to (bytes, time of the last write in nanoseconds)."""
    found: dict[str, tuple[int, int]] = {}
    stack = [""]
    while stack:
        inner = stack.pop()
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(f"{folder}/{inner}"):
                name = inner + entry.name
                if name == RECORDS:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    stack.append(f"{name}/")
                else:
                    said = entry.stat(follow_symlinks=False)
                    found[name] = (said.st_size, said.st_mtime_ns)
    return found


def digest_of(sums: list[bytes]) -> str:
    """A content's digest from the checksums of its parts, in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(sums))


def digest_of_file(path: str) -> str | None:
    """The digest of a file's bytes, read anew; None when it cannot be read."""
    sums = []
    try:
        with open(path, "rb", buffering=0) as file:
            while body := file.read(PART_BYTES):
                sums.append(xxhash.xxh3_128_digest(body))
    except OSError:
        return None
    return digest_of(sums)


def _same_bytes(one: str, other: str) -> bool:
    if os.stat(one).st_size != os.stat(other).st_size:
        return False
    with open(one, "rb", buffering=0) as a, open(other, "rb", buffering=0) as b:
        while body := a.read(_COMPARE_BYTES):
            if body != b.read(_COMPARE_BYTES):
                return False
    return True


def prune(folder: str, names: list[str]) -> None:
    """Remove files below a copy's folder, and the folders that are empty then."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/{name}")
    for inner in sorted({os.path.dirname(name) for name in names} - {""}, key=len, reverse=True):
        while inner:
            try:
                os.rmdir(f"{folder}/{inner}")
            except OSError:  # not empty, or gone
                break
            inner = os.path.dirname(inner)
