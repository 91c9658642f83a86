"""TensorBoard of a run in a bucket: its event files copied here as they grow, and TensorBoard over the copy.

TensorBoard itself can read few kinds of bucket, and none with our settings. Only event files move, and of one that has
grown only what is new.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from voxlane import uri as uris
from voxlane.errors import ChangedError, ConfigError, MissingExtraError, NotFoundError, RunError, VoxlaneError
from voxlane.store import RetryConfig, Store, StoreConfig

HOST = "127.0.0.1"
"""TensorBoard asks nobody who they are: only this machine may reach it."""
_FOLDER = "tensorboard"
_EVENTS = "tfevents"
_MARKS = {"run.json", "tune.json", "space.json"}
_LEAVES = {"checkpoints", "evaluation", "logs"}
"""Folders of a run that hold no events, and may hold very many objects."""
_DEPTH = 7
"""Levels of folders: of many searches one search, its trials, one, its fold, the fold's events."""
_MOST_FOLDERS = 5000
_CALLS = 16
_PART_BYTES = 64 << 20
_COMPARED_BYTES = 256
_TRIED_PORTS = 100
_RETRY = RetryConfig(deadline_s=20.0)


@dataclass(frozen=True)
class Events:
    """One event file in the bucket."""

    key: str
    size: int
    """Bytes."""
    etag: str | None


@dataclass
class Found:
    """What lies below a URI."""

    events: list[Events] = field(default_factory=list)
    run: bool = False
    """Whether a run or a search is there, with events or without any yet."""


@dataclass(frozen=True)
class Synced:
    """What a `sync` found and moved."""

    found: Found
    files: int
    """Files that were new, had grown or were replaced."""
    moved_bytes: int


def local_name(root: str, key: str) -> str:
    """Where the event file `key` lies in the copy of the prefix `root` (which ends in a slash, or is empty). Folders
    are TensorBoard's names of runs, so that the folder `tensorboard` is left out, and a run has the name that it has
    in the bucket."""
    base = root.rstrip("/").rpartition("/")[2]
    parts = key[len(root) :].split("/")
    if base == _FOLDER:
        base = root.rstrip("/").rpartition("/")[0].rpartition("/")[2]
    return "/".join(part for part in (base or "run", *parts[:-1], parts[-1]) if part not in (_FOLDER, "", "."))


class Mirror:
    """A copy, in `folder`, of the event files below a URI: of a run, of a search with all its trials, or of a folder
    of runs."""

    def __init__(self, uri: str, config: StoreConfig | None, folder: Path) -> None:
        self.uri = uri
        self._store = Store(uri, replace(config or StoreConfig(), retry=_RETRY))
        key = uris.parse(uri).key.rstrip("/")
        self._root = f"{key}/" if key else ""
        self.folder = folder
        self._here: dict[str, Events] = {}
        self._closed = False
        self._pool = ThreadPoolExecutor(_CALLS, thread_name_prefix="voxlane-board")

    def close(self) -> None:
        """End, without waiting for what the bucket was asked; no more is written here."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def sync(self) -> Synced:
        """Bring the copy up to what the bucket holds now."""
        found = self._find()
        for key in set(self._here) - {one.key for one in found.events}:
            self._drop(key)
        moved = [size for size in self._pool.map(self._fetch, found.events) if size is not None]
        return Synced(found, len(moved), sum(moved))

    # -- what is there -------------------------------------------------------------------------------------------------

    def _find(self) -> Found:
        """Walk folder by folder, because a listing of all below would name every mask and checkpoint."""
        found = Found()
        level, listed = [self._root], 0
        for _ in range(_DEPTH):
            listed += len(level)
            if listed > _MOST_FOLDERS:
                raise ConfigError(
                    f"more than {_MOST_FOLDERS} folders are here", uri=self.uri, fix="Name a run, or a folder of runs"
                )
            inside = list(self._pool.map(self._list, level))
            level = [folder for part in inside for folder in _add(found, *part)]
        return found

    def _list(self, folder: str) -> tuple[list[str], list[Events]]:
        """Folders (keys with a slash at the end) and objects right in `folder`."""
        prefix = folder.rstrip("/") or None
        try:
            said = self._store.call(
                "list", self._store.uri(folder), lambda: self._store.native.list_with_delimiter(prefix)
            )
        except NotFoundError as error:
            if type(error) is not NotFoundError:  # a folder that is not there is an empty one, a bucket is not
                raise
            return [], []
        folders = [f"{key.rstrip('/')}/" for key in said["common_prefixes"]]
        return folders, [Events(meta["path"], meta["size"], meta["e_tag"]) for meta in said["objects"]]

    # -- what is here --------------------------------------------------------------------------------------------------

    def _fetch(self, there: Events) -> int | None:
        """Bring one file here; returns the bytes that moved, None if it is as it was or cannot be had now."""
        here = self._here.get(there.key)
        if here == there:
            return None
        try:
            if here is None:
                moved = self._whole(there)
            elif there.size > here.size and (rest := self._grown(here, there)) is not None:
                with self._file(there.key).open("ab") as file:
                    file.write(rest)
                moved = len(rest)
            else:
                # Other content under the same name. TensorBoard reads on where it was, and would not see it: the file
                # goes now, which ends the run for TensorBoard, and comes again with the next sync.
                self._drop(there.key)
                return None
        except (ChangedError, NotFoundError):
            return None  # written or removed at this moment; the next sync will see
        self._here[there.key] = there
        return moved

    def _whole(self, there: Events) -> int:
        path = self._file(there.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            if self._closed:
                return 0
            for start in range(0, there.size, _PART_BYTES):
                stop = min(start + _PART_BYTES, there.size)
                file.write(self._store.get(there.key, start, stop, etag=there.etag))
        return there.size

    def _grown(self, here: Events, there: Events) -> bytes | None:
        """What comes after the bytes that are here; None if those are other ones."""
        same = min(_COMPARED_BYTES, here.size)
        with self._file(here.key).open("rb") as file:
            first = file.read(same)
            file.seek(here.size - same)
            last = file.read(same)
        if bytes(self._store.get(there.key, 0, same, etag=there.etag)) != first:
            return None
        rest = bytes(self._store.get(there.key, here.size - same, there.size, etag=there.etag))
        return rest[same:] if rest[:same] == last else None

    def _drop(self, key: str) -> None:
        path = self._file(key)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds other files
            path.parent.rmdir()
        del self._here[key]

    def _file(self, key: str) -> Path:
        return self.folder / local_name(self._root, key)


def _add(found: Found, folders: list[str], objects: list[Events]) -> list[str]:
    """Note what a folder holds; returns those of its folders that may hold more."""
    names = {one.key.rpartition("/")[2] for one in objects}
    found.events += [one for one in objects if _EVENTS in one.key.rpartition("/")[2]]
    found.run = found.run or bool(found.events) or bool(names & _MARKS)
    if "run.json" in names:
        return [folder for folder in folders if folder.split("/")[-2] == _FOLDER]
    return [folder for folder in folders if folder.split("/")[-2] not in _LEAVES]


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def show(
    uri: str,
    config: StoreConfig | None,
    *,
    port: int,
    every_s: float,
    say: Callable[[str], None],
    ready: Callable[[str], None],
    wait: bool = False,
) -> None:
    """Show TensorBoard of what lies below `uri` until KeyboardInterrupt comes; then nothing is left here. `ready` is
    called with its URL. `wait`: a run that is not there yet is no error."""
    with _copy(uri, config) as mirror:
        synced = mirror.sync()
        if not (synced.found.run or wait):
            raise RunError("no run is here", uri=uri, fix="Give the URI of a run, a search or a folder of runs")
        own = free_port(port)
        if own != port and port:
            say(f"port {port} is taken; {own} is used")
        ready(launch(mirror.folder, own, every_s, title=uri))
        _follow(mirror, synced, every_s, say)


@contextlib.contextmanager
def _copy(uri: str, config: StoreConfig | None) -> Iterator[Mirror]:
    folder = Path(tempfile.mkdtemp(prefix="voxlane-tensorboard-"))
    mirror = Mirror(uri, config, folder)
    try:
        yield mirror
    finally:
        mirror.close()
        for _ in range(20):  # a thread may just be making a folder in it
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.05)


def _follow(mirror: Mirror, synced: Synced | None, every_s: float, say: Callable[[str], None]) -> None:
    """Sync for ever; a bucket that does not answer is said once, and asked again."""
    seen = -1
    failing = False
    while True:
        if synced is not None:
            count = len(synced.found.events)
            if (count > 0) != (seen > 0) or seen < 0:
                size = sum(one.size for one in synced.found.events)
                files = f"{count} event file{'s' if count != 1 else ''}, {size / (1 << 20):.1f} MiB"
                say(files if count else f"no events yet; looked for every {every_s:g} s")
            seen = count
        time.sleep(every_s)
        try:
            synced = mirror.sync()
            if failing:
                say("the bucket answers again")
            failing = False
        except VoxlaneError as error:
            synced = None
            if not failing:
                say(f"{error}; tried again every {every_s:g} s")
            failing = True


def free_port(port: int) -> int:
    """`port`, or the next one that nobody listens on; for 0 any."""
    last = OSError()
    for one in range(port, min(port + _TRIED_PORTS, 65536)) if port else [0]:
        with socket.socket() as probe:
            # As servers do: a port whose last connections are still closing is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, one))
            except OSError as error:
                last = error
                continue
            found: int = probe.getsockname()[1]
            return found
    raise ConfigError(f"no port from {port} on can be used: {last.strerror}", fix="Choose another --port")


def launch(folder: Path, port: int, every_s: float, title: str) -> str:
    """Start TensorBoard over `folder` in threads of this process, until that ends; returns its URL."""
    try:
        from tensorboard import program
    except ImportError:
        raise MissingExtraError.of("train", "TensorBoard") from None
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    # Twice as often as the copy changes, so that a file that is replaced is seen to be gone in between.
    reload_s = max(1, int(every_s // 2))
    words = ["--logdir", str(folder), "--host", HOST, "--port", str(port), "--window_title", title]
    words += ["--reload_interval", str(reload_s)]
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():  # advice about TensorFlow
        warnings.simplefilter("ignore")
        board: Any = program.TensorBoard()
        board.configure(argv=["tensorboard", *words])
        try:
            url: str = board.launch()
        except program.TensorBoardServerException as error:
            raise ConfigError(f"TensorBoard cannot serve: {error.msg}", fix="Choose another --port") from None
    return url
