"""Temporary folders that carry their owner's identity in their names, so that the next start removes those of processes
that were killed.

Names are voxlane-PURPOSE-PID-START-SCOPE-RANDOM. Where sockets need a short path, an empty folder with such a name
stands for voxlane-RANDOM beside it. Only what belongs to this user and to a process that is known to have ended is
removed: nothing of other machines or containers that share the folder.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import os
import re
import shutil
import tempfile
from collections.abc import Iterator

from voxlane.processes import ProcessId, mark_multiprocessing_files

_FOLDER = re.compile(r"voxlane-[a-z]+-(\d+-\d+-[0-9a-z]+)-\w+")
_SEMAPHORE = re.compile(r"sem\.voxlane-(\d+-\d+-[0-9a-z]+)-\w+")
_SEMAPHORES = "/dev/shm"
_SHORT = "short"
_multiprocessing_folder: tuple[int, str] | None = None
"""The process that marked its multiprocessing files, and the folder for them."""


def make_temporary_folder(purpose: str, parent: str | None = None) -> str:
    """Create a folder below `parent` (default: the system's) and return its path. `purpose`: lower-case letters."""
    return tempfile.mkdtemp(prefix=f"voxlane-{purpose}-{ProcessId.current()}-", dir=parent)


@contextlib.contextmanager
def temporary_folder(purpose: str, parent: str | None = None) -> Iterator[str]:
    """Create a folder as `make_temporary_folder` does, and remove it after the block. Files that cannot be removed, or
    that appear meanwhile, remain for `remove_abandoned`."""
    folder = make_temporary_folder(purpose, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_short_folder(parent: str | None = None) -> str:
    """Create a folder with a path of at most 17 bytes more than that of `parent` and return its path. Remove it with
    `remove_short_folder`."""
    marker = make_temporary_folder(_SHORT, parent)
    folder = _find_short_folder(marker)
    os.mkdir(folder, 0o700)
    return folder


def remove_short_folder(folder: str) -> None:
    """Remove a folder that this process made with `make_short_folder`, and the one that stands for it."""
    parent, name = os.path.split(folder)
    shutil.rmtree(folder, ignore_errors=True)
    marker = f"voxlane-{_SHORT}-{ProcessId.current()}-{name.rpartition('-')[2]}"
    shutil.rmtree(os.path.join(parent, marker), ignore_errors=True)


def _find_short_folder(marker: str) -> str:
    """Return the path of the folder that the folder `marker` stands for."""
    parent, name = os.path.split(marker)
    return os.path.join(parent, f"voxlane-{name.rpartition('-')[2]}")


def mark_children() -> None:
    """Name the files that multiprocessing creates for the children of this process, so that they are found too. Called
    before children are started."""
    global _multiprocessing_folder
    if _multiprocessing_folder is not None and _multiprocessing_folder[0] == os.getpid():
        return
    inherited = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    folder = inherited
    if folder is None:
        folder = make_short_folder()
        atexit.register(_remove_own, os.getpid(), folder)
    mark_multiprocessing_files(folder)
    _multiprocessing_folder = os.getpid(), folder


def _remove_own(pid: int, folder: str) -> None:
    if os.getpid() == pid:  # a forked child inherits the function
        remove_short_folder(folder)


def remove_abandoned(*parents: str) -> list[str]:
    """Remove what killed processes left in `parents` (default: the system's temporary folder) and among the machine's
    semaphores; return the paths."""
    removed = []
    for folder, pattern in [*((path, _FOLDER) for path in parents or _list_parents()), (_SEMAPHORES, _SEMAPHORE)]:
        for path in _list_abandoned(folder, pattern):
            if os.path.isdir(path):
                if os.path.basename(path).startswith(f"voxlane-{_SHORT}-"):
                    shutil.rmtree(_find_short_folder(path), ignore_errors=True)
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            if not os.path.exists(path):
                removed.append(path)
    return removed


def _list_parents() -> list[str]:
    return sorted({tempfile.gettempdir(), "/tmp"})  # Ray needs a short path, and takes /tmp if the other is long


def _list_abandoned(folder: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the paths of this user's entries of `folder` whose owners have ended."""
    paths = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            owner = ProcessId.parse(match[1]) if match else None
            if owner is not None and owner.has_ended() and _is_own(entry):
                paths.append(entry.path)
    return paths


def _is_own(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_uid == os.getuid() and not entry.is_symlink()
    except OSError:  # removed meanwhile
        return False
