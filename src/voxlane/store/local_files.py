"""Files of this machine: their listing, and those whose names the byte engine cannot address.

The engine fails on a folder with a control character in a name, a name that is not UTF-8 or a loop of links.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from voxlane.errors import UnsupportedError

_log = logging.getLogger("voxlane")
_UNFINISHED = re.compile(r"#\d+\Z")
"""Suffix that the engine gives to a file that it has not finished."""


class LocalFiles:
    """The files of this machine, with the part of the engine's interface that `Store` uses. Keys are absolute paths
    without the first slash."""

    def get(self, key: str, options: Mapping[str, Any] | None = None) -> _FileResponse:
        """Return a file, or `options["range"]` of it: a pair (start, stop) or {"offset": start}."""
        byte_range = (options or {}).get("range")
        start, stop = (byte_range["offset"], None) if isinstance(byte_range, dict) else byte_range or (0, None)
        return _FileResponse(f"/{key}", start, stop)

    def head(self, key: str) -> dict[str, Any]:
        """Return the size and version of a file."""
        return _describe(os.stat(f"/{key}"))

    def put(self, key: str, data: Any, *, mode: Any = "overwrite", use_multipart: bool, **options: Any) -> Any:
        """Write a file from a buffer, or from an iterator of parts, and rename it into place."""
        if isinstance(mode, dict):
            raise UnsupportedError("files have no conditional writes", uri=f"file:///{key}")
        handle, partial = tempfile.mkstemp(dir=os.path.dirname(f"/{key}"), suffix="#0")
        try:
            with open(handle, "wb") as file:
                file.writelines(data if use_multipart else [data])
            if mode == "create":
                os.link(partial, f"/{key}")
            else:
                os.replace(partial, f"/{key}")
        finally:
            if os.path.exists(partial):
                os.unlink(partial)
        return self.head(key)

    def copy(self, source: str, target: str, *, overwrite: bool) -> None:
        """Copy a file."""
        with open(f"/{source}", "rb") as file:
            parts = iter(lambda: file.read(1 << 20), b"")
            self.put(target, parts, mode="overwrite" if overwrite else "create", use_multipart=True)
        shutil.copymode(f"/{source}", f"/{target}")

    def delete(self, key: str) -> None:
        """Delete a file."""
        os.unlink(f"/{key}")


class _FileResponse:
    """A file that is about to be read."""

    def __init__(self, path: str, start: int, stop: int | None) -> None:
        self._path = path
        self.meta = _describe(os.stat(path))
        """Size, e_tag, version and last_modified of the file."""
        self.range = start, self.meta["size"] if stop is None else min(stop, self.meta["size"])
        """Bytes `(start, stop)` that the body holds."""

    def bytes(self) -> Any:
        """Return the body."""
        with open(self._path, "rb") as file:
            file.seek(self.range[0])
            return file.read(self.range[1] - self.range[0])

    def stream(self, min_chunk_size: int) -> Iterator[Any]:
        """Yield the body."""
        yield self.bytes()


def list_files(prefix: str, start_after: str | None) -> Any:
    """Return the files whose keys start with `prefix` as one Arrow batch, in key order.

    Names that are not UTF-8, which no key can have, and unfinished files are left out with a warning.
    """
    import pyarrow as pa  # slow to import

    unlisted: list[str] = []
    paths = _walk(f"/{prefix[: prefix.rfind('/') + 1]}", (), unlisted)
    rows = sorted(
        (key, status)
        for key, status in ((path[1:], status) for path, status in paths)
        if key.startswith(prefix) and (start_after is None or key > start_after)
    )
    if unlisted:
        example = ascii(min(unlisted))
        _log.warning(
            "%d files are not listed, such as %s: their names are not UTF-8 or end in #NUMBER like those of unfinished "
            "files; rename them",
            len(unlisted),
            example,
        )
    infos = [_describe(status) for _, status in rows]
    columns = [
        pa.array([key for key, _ in rows], pa.large_string()),
        pa.array([info["last_modified"] for info in infos], pa.timestamp("us", "UTC")),
        pa.array([info["size"] for info in infos], pa.int64()),
        pa.array([info["e_tag"] for info in infos], pa.large_string()),
        pa.nulls(len(rows), pa.large_string()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["path", "last_modified", "size", "e_tag", "version"])


def _walk(
    folder: str, ancestors: tuple[tuple[int, int], ...], unlisted: list[str]
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of each file below `folder`, and add the files to leave out to `unlisted`. Links are
    followed, but not into a folder that holds them."""
    try:
        status = os.stat(folder)
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
        return
    identity = status.st_dev, status.st_ino
    if identity in ancestors:
        entries.close()
        return
    with entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, (*ancestors, identity), unlisted)
            elif _UNFINISHED.search(entry.name) or not _is_text(entry.path):
                unlisted.append(entry.path)
            elif entry.is_file():
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    yield entry.path, entry.stat()


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe(status: os.stat_result) -> dict[str, Any]:
    """Return what the engine reports about a file, with its etag."""
    return {
        "size": status.st_size,
        "e_tag": f'"{status.st_ino:x}-{status.st_mtime_ns // 1000:x}-{status.st_size:x}"',
        "version": None,
        "last_modified": datetime.fromtimestamp(status.st_mtime, UTC),
    }
