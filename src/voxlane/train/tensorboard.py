"""Serve TensorBoard for runs in a bucket, over a local copy of their event files that follows the bucket.

TensorBoard itself can read few kinds of buckets, and none with our settings. Only event files are copied, and of a file
that has grown only the new part.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import time
import urllib.parse
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from voxlane import uri as uris
from voxlane.errors import ChangedError, ConfigError, MissingExtraError, NotFoundError, RunError, VoxlaneError
from voxlane.store import ObjectInfo, RetryConfig, Store, StoreConfig
from voxlane.store.bucket import ignore_missing_object
from voxlane.temporary import make_temporary_folder

HOST = "127.0.0.1"
"""TensorBoard has no access control, so only this machine may reach it."""
_FOLDER = "tensorboard"
_EVENTS = "tfevents"
_MARKER_FILES = {"run.json", "tune.json", "space.json"}
_SKIPPED_FOLDERS = {"checkpoints", "evaluation", "logs"}
"""Folders of a run without events, which may hold very many objects."""
_DEPTH = 7
"""Levels of folders: searches, a search, its trials, a trial, its folds, a fold, the events."""
_MAX_FOLDERS = 5000
_CONCURRENCY = 16
_PART_BYTES = 64 << 20
_COMPARED_BYTES = 256
_TRIED_PORTS = 100
_RETRY = RetryConfig(deadline_s=20.0)


@dataclass
class EventListing:
    """The event files below a URI."""

    event_files: list[ObjectInfo] = field(default_factory=list)
    has_run: bool = False
    """Whether there is a run or a search, even one without events yet."""


def local_name(root: str, key: str) -> str:
    """Return the path of the event file `key` in the copy of the prefix `root` (which ends in a slash, or is empty).
    TensorBoard names runs after folders, so the folder `tensorboard` is left out, and a run keeps its name. No key
    leads out of the copy."""
    folders = [part for part in root.split("/") if part not in (_FOLDER, "")]
    parts = [*(folders[-1:] or ["run"]), *key[len(root) :].split("/")]
    return "/".join(part for part in parts if part not in (_FOLDER, "", ".", ".."))


class EventMirror:
    """A copy in `folder` of the event files below a URI: of a run, a search with its trials, or a folder of runs."""

    def __init__(self, uri: str, config: StoreConfig | None, folder: Path) -> None:
        self.uri = uri
        self._store = Store(uri, replace(config or StoreConfig(), retry=_RETRY))
        key = uris.parse(uri).key.rstrip("/")
        self._root = f"{key}/" if key else ""
        self.folder = folder
        self._copied: dict[str, ObjectInfo] = {}
        self._closed = False
        self._pool = ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="voxlane-board")

    def close(self) -> None:
        """Stop, without waiting for pending requests; nothing more is written."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def sync(self) -> EventListing:
        """Update the copy to the current content of the bucket."""
        listing = self._list_events()
        for key in set(self._copied) - {file.key for file in listing.event_files}:
            self._remove(key)
        list(self._pool.map(self._update, listing.event_files))
        return listing

    # -- listing -------------------------------------------------------------------------------------------------------

    def _list_events(self) -> EventListing:
        """List folder by folder, because a listing of everything would include every mask and checkpoint."""
        listing = EventListing()
        level, listed = [self._root], 0
        for _ in range(_DEPTH):
            listed += len(level)
            if listed > _MAX_FOLDERS:
                raise ConfigError(
                    f"more than {_MAX_FOLDERS} folders", uri=self.uri, fix="Give a run, or a folder of runs"
                )
            contents = list(self._pool.map(self._list_folder, level))
            level = [folder for content in contents for folder in _add_folder(listing, *content)]
        return listing

    def _list_folder(self, folder: str) -> tuple[list[str], list[ObjectInfo]]:
        """Return the folders (keys with a trailing slash) and the objects directly in `folder`."""
        prefix = folder.rstrip("/") or None
        response: Any = {"common_prefixes": [], "objects": []}
        with ignore_missing_object():  # a missing folder counts as empty
            response = self._store.call(
                "list", self._store.uri(folder), lambda: self._store.native.list_with_delimiter(prefix)
            )
        folders = [f"{key.rstrip('/')}/" for key in response["common_prefixes"]]
        return folders, [ObjectInfo(meta["path"], meta["size"], meta["e_tag"], None) for meta in response["objects"]]

    # -- copying -------------------------------------------------------------------------------------------------------

    def _update(self, remote: ObjectInfo) -> None:
        """Update the copy of one file."""
        copied = self._copied.get(remote.key)
        if copied == remote:
            return
        with contextlib.suppress(ChangedError, NotFoundError):  # being replaced or removed; the next sync will notice
            if copied is None:
                self._download(remote)
            elif remote.size > copied.size and (rest := self._read_appended(copied, remote)) is not None:
                with self._path(remote.key).open("ab") as file:
                    file.write(rest)
            else:
                # Other content under the same name. TensorBoard continues where it was, and would not notice: so the
                # file is removed, which ends the run for TensorBoard, and downloaded again by the next sync.
                self._remove(remote.key)
                return
            self._copied[remote.key] = remote

    def _download(self, remote: ObjectInfo) -> None:
        path = self._path(remote.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            if self._closed:
                return
            for start in range(0, remote.size, _PART_BYTES):
                stop = min(start + _PART_BYTES, remote.size)
                file.write(self._store.get(remote.key, start, stop, etag=remote.etag))

    def _read_appended(self, copied: ObjectInfo, remote: ObjectInfo) -> bytes | None:
        """Return the bytes after the copied ones; None if the copied bytes have changed."""
        same = min(_COMPARED_BYTES, copied.size)
        with self._path(copied.key).open("rb") as file:
            first = file.read(same)
            file.seek(copied.size - same)
            last = file.read(same)
        if bytes(self._store.get(remote.key, 0, same, etag=remote.etag)) != first:
            return None
        rest = bytes(self._store.get(remote.key, copied.size - same, remote.size, etag=remote.etag))
        return rest[same:] if rest[:same] == last else None

    def _remove(self, key: str) -> None:
        path = self._path(key)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it contains other files
            path.parent.rmdir()
        del self._copied[key]

    def _path(self, key: str) -> Path:
        return self.folder / local_name(self._root, key)


def _add_folder(listing: EventListing, folders: list[str], objects: list[ObjectInfo]) -> list[str]:
    """Add the content of a folder to the listing; return its folders that may hold more events."""
    names = {file.key.rpartition("/")[2] for file in objects}
    listing.event_files += [file for file in objects if _EVENTS in file.key.rpartition("/")[2]]
    listing.has_run = listing.has_run or bool(listing.event_files) or bool(names & _MARKER_FILES)
    if "run.json" in names:
        return [folder for folder in folders if folder.split("/")[-2] == _FOLDER]
    return [folder for folder in folders if folder.split("/")[-2] not in _SKIPPED_FOLDERS]


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def serve(
    uri: str,
    config: StoreConfig | None,
    *,
    port: int,
    every_s: float,
    print_line: Callable[[str], None],
    ready: Callable[[str], None],
    wait: bool = False,
) -> None:
    """Serve TensorBoard for the runs below `uri` until KeyboardInterrupt; remove the local copy then. `ready` is called
    with its URL. `wait`: a run that does not exist yet is not an error."""
    folder = Path(make_temporary_folder("tensorboard"))
    mirror = EventMirror(uri, config, folder)
    try:
        listing = mirror.sync()
        if not (listing.has_run or wait):
            raise RunError("no run exists here", uri=uri, fix="Give the URI of a run, a search or a folder of runs")
        url, bound_port = launch(folder, port, every_s, title=uri)
        if bound_port != port and port:
            print_line(f"port {port} is in use; using {bound_port}")
        ready(url)
        _follow(mirror, listing, every_s, print_line)
    finally:
        mirror.close()
        for _ in range(20):  # a thread may be creating a folder in it
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.05)


def _follow(
    mirror: EventMirror, listing: EventListing | None, every_s: float, print_line: Callable[[str], None]
) -> None:
    """Sync forever. An unreachable bucket is reported once, and tried again."""
    last_count = -1
    while True:
        if listing is not None:
            count = len(listing.event_files)
            if (count > 0) != (last_count > 0) or last_count < 0:
                size = sum(file.size for file in listing.event_files)
                files = f"{count} event file{'s' if count != 1 else ''}, {size / (1 << 20):.1f} MiB"
                print_line(files if count else f"no events yet; checking every {every_s:g} s")
            last_count = count
        time.sleep(every_s)
        failed_before = listing is None
        try:
            listing = mirror.sync()
            if failed_before:
                print_line("the bucket answers again")
        except VoxlaneError as error:
            listing = None
            if not failed_before:
                print_line(f"{error}; trying again every {every_s:g} s")


def launch(folder: Path, port: int, every_s: float, title: str) -> tuple[str, int]:
    """Start TensorBoard over `folder` in threads of this process; return its URL and port. It listens on `port` or the
    next free one; on any free port if `port` is 0."""
    try:
        from tensorboard import program
    except ImportError:
        raise MissingExtraError.of("train", "TensorBoard") from None
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    # Twice as often as the copy changes, so that TensorBoard notices the removal of a file before its replacement.
    reload_s = max(1, int(every_s // 2))
    arguments = ["--logdir", str(folder), "--host", HOST, "--window_title", title, "--reload_interval", str(reload_s)]
    last_message = ""
    for candidate in range(port, min(port + _TRIED_PORTS, 65536)) if port else [0]:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():  # advice about TensorFlow
            warnings.simplefilter("ignore")
            board: Any = program.TensorBoard()
            board.configure(argv=["tensorboard", *arguments, "--port", str(candidate)])
            try:
                url: str = board.launch()
            except program.TensorBoardPortInUseError as error:
                last_message = error.msg
                continue
            except SystemExit:  # werkzeug's answer to a port that is taken between TensorBoard's check and its own bind
                last_message = f"port {candidate} is in use"
                continue
            except program.TensorBoardServerException as error:
                raise ConfigError(f"TensorBoard cannot serve: {error.msg}", fix="Choose another --port") from None
            return url, urllib.parse.urlsplit(url).port or candidate
    raise ConfigError(f"no free port from {port} on: {last_message}", fix="Choose another --port")
