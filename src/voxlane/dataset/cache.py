"""A disk cache of objects, bounded in size, shared by any number of processes.

A file is named by the hash of its URI and version, and is renamed into place after it is written, so that it is always
complete, also after a kill. The sum of sizes is stored in a small locked file; when it exceeds the limit, the least
recently used files are removed. The cache never causes a failure: if the disk is full, it is disabled with one warning.
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
from voxlane.store.private_folder import make_private_folder
from voxlane.uri import StrPath

_log = logging.getLogger("voxlane")
_EVICT_TO = 0.9
"""Eviction frees space down to this fraction of the limit, so that it is not needed again at once."""
_TOUCH_AFTER_S = 60.0
"""A hit updates the time of a file only if it is older than this."""
_PARTIAL_MAX_AGE_S = 3600.0
"""Age at which partly written files of killed processes are removed."""


class DiskCache:
    """Objects cached in `folder`, at most `max_bytes` in total. Opened on first use."""

    def __init__(self, folder: StrPath, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise ConfigError(f"cache_bytes must be above zero, got {max_bytes}", fix="To disable it, leave out cache")
        self.folder = os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self.max_bytes = max_bytes
        self._opened = False
        self._off = False

    def get(self, uri: str, version: str, size: int) -> bytes | None:
        """Return the bytes of the object if this version is cached, else None."""
        self.open()
        path = self._path(uri, version)
        try:
            with open(path, "rb") as file:
                body = file.read()
                age_s = time.time() - os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        if len(body) != size:  # damaged by another program
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        if age_s > _TOUCH_AFTER_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return body

    def put(self, uri: str, version: str, body: Any) -> None:
        """Cache an object and evict others if necessary. Does nothing if the object alone exceeds the limit."""
        size = len(body)
        if self._off or size > self.max_bytes:
            return
        self.open()
        partial = os.path.join(self.folder, "partial", f"{os.getpid()}-{uuid.uuid4().hex}")
        path = self._path(uri, version)
        try:
            self._reserve(partial, size)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(partial, "r+b") as file:
                file.write(body)
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            self._off = True
            _log.warning(
                "%s: the disk cache is disabled for this process: %s. Objects are read from the bucket (%s); "
                "free some disk space or set a smaller cache_bytes.",
                self.folder,
                error.strerror,
                uri,
            )

    def open(self) -> None:
        """Create the folder, for this user alone, and check that it is private and writable. What is read from it
        becomes training data, so no other user may write there."""
        if self._opened:
            return
        try:
            for folder in (self.folder, os.path.join(self.folder, "objects"), os.path.join(self.folder, "partial")):
                make_private_folder(folder)
            with self._locked():
                pass
        except OSError as error:
            raise CacheError(
                f"the cache folder cannot be used: {error.strerror}",
                uri=self.folder,
                fix="Choose a folder that this user can write to, on a disk with free space, or leave `cache` out",
            ) from None
        self._opened = True

    @property
    def used_bytes(self) -> int:
        """Size of all cached objects in bytes."""
        return sum(size for _, size, _ in self._files("objects"))

    def _path(self, uri: str, version: str) -> str:
        name = hashlib.sha256(f"{uri}\0{version}".encode()).hexdigest()
        return os.path.join(self.folder, "objects", name[:2], name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Yield the locked lock file, which stores the sum of sizes."""
        handle = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)

    def _reserve(self, partial: str, size: int) -> None:
        """Free space for `size` bytes and create the file for them with that size, so that it is counted at once."""
        with self._locked() as handle:
            text = os.pread(handle, 32, 0)
            if not text.strip().isdigit() or (used := int(text)) + size > self.max_bytes:
                used = self._evict(int(self.max_bytes * _EVICT_TO) - size)
            with open(partial, "xb") as file:
                file.truncate(size)
            os.pwrite(handle, f"{used + size:<32}".encode(), 0)

    def _evict(self, target_bytes: int) -> int:
        """Remove least recently used files until at most `target_bytes` are left; return the bytes that are left,
        including files that are being written. Recounts, so that a wrong sum is corrected here."""
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
        """Yield (time of last use, size in bytes, path) of every file in one of the two folders."""
        for folder, _, names in os.walk(os.path.join(self.folder, kind)):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    info = os.stat(path)
                    yield info.st_mtime, info.st_size, path
