"""Manage the folder on a local disk that holds staged copies and their records.

    ROOT/objects/ab/<digest>                      each distinct content, stored once
    ROOT/datasets/<name>/<object name>            objects of one copy, as hard links to the contents; names that cannot
                                                  be paths are escaped (sources.file_paths)
    ROOT/datasets/<name>/.voxlane/manifest.jsonl  the source, then one line per complete object
    ROOT/datasets/<name>/.voxlane/staged.json     written last, once every object is complete
    ROOT/datasets/<name>/.voxlane/used            its modification time is the time of the last use
    ROOT/partial/                                 files being replaced or removed; the lock holder empties it
    ROOT/lock

An object counts as present only if the manifest has its entry. Objects are written in place, so the next process
removes incomplete files that a killed process left. An entry is always removed before its file. Other users of the
machine cannot read ROOT, but a container that mounts one copy can read that copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import filecmp
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from voxlane.errors import CacheError, ConfigError
from voxlane.redaction import redact_urls
from voxlane.store.content import PART_BYTES, ContentHasher
from voxlane.store.private_folder import make_private_folder
from voxlane.store.staging.sources import RECORDS, SourceObject
from voxlane.uri import stays_below

MANIFEST, STAGED, USED = f"{RECORDS}/manifest.jsonl", f"{RECORDS}/staged.json", f"{RECORDS}/used"
FORMAT = 1
_DIGEST = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_POLL_S = 0.1
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)


@dataclass(frozen=True, slots=True)
class ManifestEntry(SourceObject):
    """A complete object of a copy."""

    digest: str
    """Digest of the content, as `store.content` computes it."""
    mtime: int
    """Modification time of the file in nanoseconds; a different time means that the file was modified."""

    def matches(self, item: SourceObject) -> bool:
        """Return whether the entry is the content, or without a checksum the version, of an object of a source."""
        same = self.etag == item.etag if item.checksum is None else self.digest == item.checksum
        return same and (self.size, self.path) == (item.size, item.path)

    def to_json(self) -> str:
        """Return the entry as a line of the manifest, without the newline."""
        optional = ("path", "checksum")
        return json.dumps({name: value for name, value in asdict(self).items() if name not in optional or value})


@dataclass(frozen=True, slots=True)
class CopyOrigin:
    """The source that a copy was made from."""

    source: str
    """URI of the source, without a trailing slash."""
    endpoint: str | None
    """Server of the source, without credentials, or None for the cloud's own; the same URI on another server is another
    source."""

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            object.__setattr__(self, "endpoint", redact_urls(self.endpoint))


class StagingRoot:
    """A folder that holds staged copies. The constructor does no I/O."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).expanduser().absolute()
        self.objects, self.datasets, self.partial = (str(self.root / n) for n in ("objects", "datasets", "partial"))
        self._created_folders: set[str] = set()
        self._replace_lock = threading.Lock()

    def blob_path(self, digest: str) -> str:
        """Return the path of a content."""
        return f"{self.objects}/{digest[:2]}/{digest}"

    def copy_folder(self, name: str) -> str:
        """Return the folder of a copy; raise ConfigError if the name is invalid."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not a valid name for a copy",
                fix="Use at most 200 letters, digits, dots, dashes and underscores",
            )
        return f"{self.datasets}/{name}"

    def copy_names(self) -> list[str]:
        """Return the names of all copies, complete or not, in order."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(entry.name for entry in os.scandir(self.datasets) if _NAME.fullmatch(entry.name))
        return []

    @contextlib.contextmanager
    def lock(self, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the folder's lock; call `on_wait` every 0.1 s while another process holds it.

        Files that a killed process left in `partial` are removed first.
        """
        try:
            self._make_root()
            handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CacheError(
                f"cannot use the folder: {error.strerror}",
                uri=str(self.root),
                fix="Choose a folder on a local disk that you can write to",
            ) from None
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if on_wait:
                        on_wait()
                    time.sleep(_POLL_S)
            self._created_folders.clear()
            for entry in list(os.scandir(self.partial)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
            yield
        finally:
            os.close(handle)

    def _make_root(self) -> None:
        for folder in (str(self.root), self.objects, self.datasets, self.partial):
            make_private_folder(folder)

    def make_folder(self, path: str) -> None:
        """Create a folder that every user may read, whatever the umask, unless this object already did."""
        if path in self._created_folders:
            return
        parent = os.path.dirname(path)
        if parent not in (self.objects, self.datasets):
            self.make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            os.chmod(path, 0o755)
        self._created_folders.add(path)

    # -- contents --------------------------------------------------------------------------------------------------

    def publish(self, target: str, digest: str) -> None:
        """Register the complete, closed file `target` as the content `digest`, or replace it by a hard link to that
        content if another copy already has it."""
        blob, temporary = self.blob_path(digest), f"{self.partial}/{digest}"
        self.make_folder(os.path.dirname(blob))
        try:
            self._link(target, blob)
        except FileExistsError:
            with self._replace_lock:  # no thread may replace a file that another thread is comparing
                # The digest is not cryptographic: someone who can write to a source could craft a collision.
                if filecmp.cmp(target, blob, shallow=False) and self._link(blob, temporary):
                    os.replace(temporary, target)
                else:
                    self._link(target, temporary)
                    os.replace(temporary, blob)  # it was damaged, or has the maximum number of links

    def link_existing(self, digest: str, size: int, mtime: int, target: str) -> bool:
        """Create the file `target` as a link to an existing content; return False if there is no such content."""
        blob = self.blob_path(digest)
        try:
            status = os.stat(blob)
        except FileNotFoundError:
            return False
        if (status.st_size, status.st_mtime_ns) != (size, mtime):
            return False
        self.make_folder(os.path.dirname(target))
        return self._link(blob, target)

    def _link(self, source: str, target: str) -> bool:
        """Create a hard link; return False if `source` has the maximum number of links."""
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno == errno.EMLINK:
                return False
            if error.errno in _NO_LINKS:
                raise CacheError(
                    "the file system of the folder does not support hard links",
                    uri=str(self.root),
                    fix="Choose a folder on a local disk",
                ) from None
            raise
        return True

    def measure_bytes(self) -> int:
        """Return the bytes of the disk that everything below the root occupies; linked files count once."""
        sizes: dict[int, int] = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(f"{folder}/{name}")
                    sizes[status.st_ino] = status.st_blocks * 512
        return sum(sizes.values())

    def remove_unreferenced(self) -> int:
        """Remove contents that no copy uses; return the number of bytes freed."""
        freed = 0
        for folder in os.scandir(self.objects):
            for entry in os.scandir(folder.path):
                status = entry.stat(follow_symlinks=False)
                if status.st_nlink == 1:
                    os.unlink(entry.path)
                    freed += status.st_size
        return freed


# -- records -----------------------------------------------------------------------------------------------------------


def read_manifest(folder: str, *, entries: bool = True) -> tuple[CopyOrigin | None, dict[str, ManifestEntry]]:
    """Return the origin of the copy in `folder` and its complete objects by name; (None, {}) without a valid manifest.

    With `entries` false, read only the origin. Raises CacheError for an entry whose file is outside the copy.
    """
    try:
        with open(f"{folder}/{MANIFEST}", encoding="utf-8", errors="replace") as file:
            header = json.loads(file.readline())
            lines = file.readlines() if entries else []
        if header["format"] != FORMAT:
            return None, {}
        origin = CopyOrigin(header["source"], header["endpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, {}
    complete = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # a killed process may leave a truncated line
            entry = ManifestEntry(**json.loads(line))
            if not stays_below(entry.file) or not _DIGEST.fullmatch(entry.digest):
                raise CacheError(
                    f"the record of the copy names {entry.file!r}, which is no file of a copy",
                    uri=f"{folder}/{MANIFEST}",
                    fix="Remove the folder and stage the dataset again",
                )
            complete[entry.name] = entry
    return origin, complete


def write_manifest(folder: str, origin: CopyOrigin, entries: list[ManifestEntry]) -> None:
    """Replace the manifest of the copy in `folder` atomically."""
    header = json.dumps({"format": FORMAT, **asdict(origin)})
    _replace(f"{folder}/{MANIFEST}", "".join(f"{line}\n" for line in (header, *(e.to_json() for e in entries))))


def read_staged(folder: str) -> dict[str, Any] | None:
    """Return the content of `staged.json`, or None if the copy is incomplete."""
    try:
        with open(f"{folder}/{STAGED}", encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None


def write_staged(folder: str, record: dict[str, Any]) -> None:
    """Declare a copy complete."""
    _replace(f"{folder}/{STAGED}", json.dumps({"format": FORMAT, **record}, indent=1) + "\n")


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


def mark_used(folder: str) -> None:
    """Record that a copy is in use now."""
    path = f"{folder}/{USED}"
    try:
        os.utime(path)
    except FileNotFoundError:
        _replace(path, "")


def last_used(folder: str) -> float:
    """Return when a copy was last used or written, in seconds since 1970; 0 if unknown."""
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


def scan_files(folder: str, parent: str = "") -> dict[str, tuple[int, int]]:
    """Return (size in bytes, modification time in nanoseconds) of every file of a copy, or of its subfolder `parent`
    (ending in a slash), by name, without the records."""
    files: dict[str, tuple[int, int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(f"{folder}/{parent}"):
            name = parent + entry.name
            if not entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                files[name] = (status.st_size, status.st_mtime_ns)
            elif name != RECORDS:
                files |= scan_files(folder, f"{name}/")
    return files


def hash_file(path: str) -> str | None:
    """Return the checksum of a file's content, or None if it cannot be read."""
    hasher = ContentHasher()
    try:
        with open(path, "rb", buffering=0) as file:
            while body := file.read(PART_BYTES):
                hasher.update(body)
    except OSError:
        return None
    return hasher.checksum()


def remove_files(folder: str, names: list[str]) -> None:
    """Remove files of a copy, and the folders that this leaves empty."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/{name}")
    for parent in sorted({os.path.dirname(name) for name in names} - {""}, key=len, reverse=True):
        with contextlib.suppress(OSError):  # not empty, or gone; the copy's own folder still has its records
            os.removedirs(f"{folder}/{parent}")
