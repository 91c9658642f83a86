"""The byte engine (obstore) for this process, also after a fork.

obstore runs its own thread pool inside its extension module. A forked child inherits the pool's memory but not its
threads, so any call in the child would wait for ever. The child therefore imports the package again, with the extension
module loaded from a private copy of its file: it has another inode, so the dynamic loader maps it again with fresh
state. One copy on disk (about 15 MB) serves all children of one fork depth; loading it takes 50 ms per child.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from types import ModuleType
from typing import Any

_EXTENSION = "obstore._obstore"
_COPY_MAX_AGE_S = 24 * 3600.0
entering_process = threading.RLock()
"""Held while an object that a fork copied drops what belongs to the parent: several threads of the child may find that
it has to."""
_lock = threading.Lock()
_depth = 0
_stale = False
_keep_alive: list[Any] = []
"""Modules of the parent, never freed in the child: their destructors would wait for threads that do not exist."""


def _after_fork_in_child() -> None:
    global _stale, _lock
    _lock = threading.Lock()
    if "obstore" in sys.modules:
        _stale = True


os.register_at_fork(after_in_child=_after_fork_in_child)
os.register_at_fork(after_in_child=entering_process._at_fork_reinit)  # type: ignore[attr-defined]


def obstore() -> Any:
    """Return the obstore package, safe to call in this process."""
    global _stale, _depth
    with _lock:
        if _stale:
            _depth += 1
            _import_private_copy(_depth)
            _stale = False
        return importlib.import_module("obstore")


def _import_private_copy(depth: int) -> None:
    # Iterate over a copy: other threads of this child may be importing, and a dict must not grow during iteration.
    old = {name: m for name, m in sys.modules.copy().items() if name == "obstore" or name.startswith("obstore.")}
    _keep_alive.append(old)
    original = _origin(old)
    if original is None:  # imported only partly; an ordinary import starts fresh
        return
    if depth > 1:  # this process is a fork of a fork: `original` is already a private copy
        original = _origin(_keep_alive[0]) or original
    loader = importlib.machinery.ExtensionFileLoader(_EXTENSION, _private_copy(original, depth))
    spec = importlib.util.spec_from_file_location(_EXTENSION, loader.path, loader=loader)
    assert spec is not None
    for name in old:
        del sys.modules[name]
    # The package is imported next and takes the extension module from here.
    extension = sys.modules[_EXTENSION] = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)


def _origin(modules: dict[str, ModuleType]) -> str | None:
    """Return the file that the extension module was loaded from."""
    spec = modules[_EXTENSION].__spec__ if _EXTENSION in modules else None
    return spec.origin if spec else None


def _private_copy(original: str, depth: int) -> str:
    """Return the path of a copy of `original` that no process of a smaller fork depth has loaded. Making a new copy
    removes old ones."""
    info = os.stat(original)
    name = f"obstore-{info.st_ino:x}-{info.st_mtime_ns:x}-{info.st_size:x}-{depth}.so"
    try:
        folder = _private_folder()
        path = os.path.join(folder, name)
        if not (os.path.exists(path) and os.path.getsize(path) == info.st_size):
            handle, partial = tempfile.mkstemp(dir=folder)
            os.close(handle)
            shutil.copyfile(original, partial)
            os.replace(partial, path)  # atomic: a sibling never loads half a file
            for entry in os.scandir(folder):  # processes that have loaded an old copy are not affected
                if entry.name.startswith("obstore-") and time.time() - entry.stat().st_mtime > _COPY_MAX_AGE_S:
                    os.unlink(entry.path)
        return path
    except OSError:
        return _memory_copy(original)


def _private_folder() -> str:
    """Return a folder that only this user can write to, because code is loaded from it."""
    folder = os.path.join(tempfile.gettempdir(), f"voxlane-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a private folder of this user")
    return folder


def _memory_copy(original: str) -> str:
    """Return the path of a copy in anonymous memory, for hosts whose temporary folder is full, shared or read-only."""
    handle = os.memfd_create("voxlane-obstore")
    with open(original, "rb") as source, os.fdopen(os.dup(handle), "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return f"/proc/self/fd/{handle}"
