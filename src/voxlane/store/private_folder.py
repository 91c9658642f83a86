"""Folders on this machine whose files only their owner may change: caches, staged copies, shared listings."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from voxlane.errors import CacheError
from voxlane.uri import StrPath


def make_private_folder(path: StrPath) -> None:
    """Create a folder, and its parents, that only this user can enter. An empty folder of this user becomes private.
    Raises CacheError if another user could have put files into the folder."""
    path = os.fspath(path).rstrip("/") or "/"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not os.listdir(path):
            os.chmod(path, 0o700)
            if os.listdir(path):  # another user was faster
                os.chmod(path, stat.S_IMODE(status.st_mode))
        check_private_folder(path)


def check_private_folder(path: StrPath, *, is_mounted: bool = False) -> None:
    """Raise CacheError if another user could have put files into the folder. With `is_mounted` it may be a read-only
    mount that belongs to anybody, as a container gets it, because whoever mounted it vouches for its content."""
    path = os.fspath(path).rstrip("/") or "/"
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        problem, fix = "it is a symbolic link, which can be pointed elsewhere", f"Give {os.path.realpath(path)} itself"
    elif not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    elif is_mounted and os.statvfs(path).f_flag & os.ST_RDONLY:
        return
    elif status.st_uid != os.geteuid():
        problem = f"it belongs to another user (uid {status.st_uid}), who could change what is read from it"
        fix = f"Choose a folder of your own, such as {path}/voxlane-{os.geteuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"other users may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
        fix = f"Choose a new folder, such as {path}/voxlane-{os.geteuid()}, or run chmod go-w if you trust its content"
    else:
        return
    raise CacheError(f"the folder is not private: {problem}", uri=path, fix=fix)


def check_existing_folder(path: StrPath, *, is_mounted: bool = False) -> None:
    """Do the same as `check_private_folder`, for a folder that need not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        check_private_folder(path, is_mounted=is_mounted)
