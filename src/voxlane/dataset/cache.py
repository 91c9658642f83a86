"""A disk cache of objects, bounded in size, shared by any number of processes.

A file is named by the hash of its URI and version, written aside and renamed into place, so that whoever finds it
finds it whole, also after a kill. The sum of sizes lives in a small locked file; when it passes the bound, the least
recently used files go. A cache is never a reason to fail: a disk that fills up turns it off with one warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

from voxlane.errors import CacheError, ConfigError

_log = logging.getLogger("voxlane")
_EVICT_TO = 0.9
"""Eviction goes down to this share of the bound, so that it is not needed again at once."""
_TOUCH_AFTER_S = 60.0
"""A hit renews a file's time only when it is older than this."""
_PARTIAL_MAX_AGE_S = 3600.0
"""Half-written files of killed processes are removed after this time."""


class DiskCache:
    """Objects kept in `folder`, at most `max_bytes` in all. Opened on first use."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        if max_bytes <= 0:
            raise ConfigError(f"a cache of {max_bytes} bytes", fix="Give cache_bytes above zero, or no cache")
        self.folder = os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self.max_bytes = max_bytes
        self._opened = False
        self._off = False

    def get(self, uri: str, version: str, size: int) -> bytes | None:
        """The object's bytes if that version is here."""
        path = self._path(uri, version)
        try:
            with open(path, "rb") as file:
                body = file.read()
                age_s = time.time() - os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        if len(body) != size:  # damaged outside our hands
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        if age_s > _TOUCH_AFTER_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return body

    def put(self, uri: str, version: str, body: Any) -> None:
        """Keep an object; evicts others to make room. Does nothing when the object alone is over the bound."""
        size = len(body)
        if self._off or size > self.max_bytes:
            return
        self.open()
        partial = os.path.join(self.folder, "partial", f"{os.getpid()}-{uuid.uuid4().hex}")
        path = self._path(uri, version)
        try:
            self._reserve(partial, size)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(partial, "r+b") as file:
                file.write(body)
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            self._off = True
            _log.warning(
                "%s: the disk cache is off for this process: %s. The run goes on reading from the bucket (%s); "
                "free some disk or give a smaller cache_bytes.",
                self.folder,
                error.strerror,
                uri,
            )

    def open(self) -> None:
        """Make the folder and check that it can be written."""
        if self._opened:
            return
        try:
            os.makedirs(os.path.join(self.folder, "objects"), exist_ok=True)
            os.makedirs(os.path.join(self.folder, "partial"), exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            raise CacheError(
                f"the cache folder cannot be used: {error.strerror}",
                uri=self.folder,
                fix="Give a folder this user can write, on a disk with room, or leave `cache` out",
            ) from None
        self._opened = True

    @property
    def used_bytes(self) -> int:
        """Bytes of the objects here now."""
        return sum(size for _, size, _ in self._files("objects"))

    def _path(self, uri: str, version: str) -> str:
        name = hashlib.sha256(f"{uri}\0{version}".encode()).hexdigest()
        return os.path.join(self.folder, "objects", name[:2], name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The lock file, which holds the sum of sizes, held by this process and thread alone."""
        handle = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)

    def _reserve(self, partial: str, size: int) -> None:
        """Make room for `size` bytes and the file they will be written to, which has that size at once: whoever
        counts meanwhile counts it."""
        with self._locked() as handle:
            text = os.pread(handle, 32, 0)
            if not text.strip().isdigit() or (used := int(text)) + size > self.max_bytes:
                used = self._evict(int(self.max_bytes * _EVICT_TO) - size)
            with open(partial, "xb") as file:
                file.truncate(size)
            os.pwrite(handle, f"{used + size:<32}".encode(), 0)

    def _evict(self, target_bytes: int) -> int:
        """Remove least recently used files until at most `target_bytes` are left; returns what is left, with what
        others are writing now. Counts anew, so a wrong sum mends itself here."""
        partials = list(self._files("partial"))
        abandoned = [p for p in partials if time.time() - p[0] > _PARTIAL_MAX_AGE_S]
        objects = sorted(self._files("objects"))
        used = sum(size for _, size, _ in objects + partials)
        for _, size, path in abandoned + objects:
            if used <= max(0, target_bytes):
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= size
        return used

    def _files(self, kind: str) -> Iterator[tuple[float, int, str]]:
        """(time of last use, bytes, path) of every file in one of the two folders."""
        for folder, _, names in os.walk(os.path.join(self.folder, kind)):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    info = os.stat(path)
                    yield info.st_mtime, info.st_size, path
