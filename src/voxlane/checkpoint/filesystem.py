"""Buckets for code that uses fsspec, as Lightning does for its checkpoints and logs."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from voxlane import uri as uris
from voxlane.checkpoint.filesystem_writer import BucketTransaction, open_file_writer
from voxlane.checkpoint.fsspec_schemes import USUAL_CLASSES
from voxlane.checkpoint.reader import RangedReader
from voxlane.checkpoint.verified_reader import CHECKSUM_SUFFIX, open_verified
from voxlane.errors import ConfigError, NotFoundError
from voxlane.store import ObjectInfo, Store, StoreConfig

_FSSPEC_OPTIONS = frozenset({"asynchronous", "listings_expiry_time", "loop", "max_paths", "use_listings_cache"})
"""Options of fsspec's base class, which have nothing to do with buckets."""


@dataclass(frozen=True)
class _Registration:
    """A config that was registered for fsspec, for as long as its owner lives."""

    config: StoreConfig | None = None
    owner: Callable[[], Any] = lambda: None

    def is_alive(self) -> bool:
        return self.owner() is not None


_newest = _Registration()
_folders: dict[str, _Registration] = {}
"""The registration that was the newest one when fsspec first opened each folder."""


class BucketFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """An fsspec file system over `Store`. Names are complete URIs, so that they mean the same everywhere. Creating a
    folder does nothing, as in fsspec's base class.

    The storage options are the fields of StoreConfig (`anonymous=True`, `endpoint=...`), or one `config`. Without any
    it uses the config registered for the URI that it was opened with (see `register_filesystem`).

    Files appear when they are closed, or together when a transaction (`with fs.transaction:`) ends without an
    exception. Mode xb fails if there is a file. Mode ab writes the file again with what is added; it fails if another
    process has changed the file meanwhile. Other modes would change an object in place, which no service can do.
    """

    protocol = ("gs", "gcs", "s3", "s3a", "az")
    cachable = False
    transaction_type = BucketTransaction

    def __init__(self, config: StoreConfig | None = None, *, opened_uri: str = "", **storage_options: Any) -> None:
        super().__init__(**{name: storage_options.pop(name) for name in _FSSPEC_OPTIONS & storage_options.keys()})
        if storage_options:
            if config is not None:
                raise ConfigError(
                    f"both a config and options ({', '.join(storage_options)}) were given", fix="Put them in the config"
                )
            config = StoreConfig.from_dict(storage_options)
        self._config = config if config is not None else _choose_registration(opened_uri).config
        self._stores: dict[str, Store] = {}

    def __reduce__(self) -> Any:
        return type(self), (self._config,)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {"opened_uri": str(uris.parse(path)).rstrip("/")}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(entry) for entry in path]
        return str(uris.parse(path)).rstrip("/")

    def _locate(self, path: str) -> tuple[Store, str]:
        parsed = uris.parse(path)
        if parsed.root not in self._stores:
            self._stores[parsed.root] = Store(parsed.root, self._config)
        return self._stores[parsed.root], parsed.key

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List the files and folders directly in a folder, without checksum files."""
        entries = self.find(path, maxdepth=1, withdirs=True, detail=True)
        if not entries:
            info = self.info(path)
            entries = {info["name"]: info}
        return list(entries.values()) if detail else list(entries)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        """Return the files below a folder, without checksum files, in the order of their names; with `withdirs` also
        the folders. A file is below itself. With `detail` the result is a dict of descriptions by name."""
        if maxdepth is not None and maxdepth < 1:
            raise ConfigError(f"maxdepth must be at least 1, got {maxdepth}")
        store, key = self._locate(path)
        folder = key.rstrip("/") + "/" if key else ""
        entries: dict[str, dict[str, Any]] = {}
        for entry in store.list_folder(folder):
            *parents, name = entry.key.removeprefix(folder).split("/")
            if withdirs:
                for depth in range(1, len(parents[:maxdepth]) + 1):
                    uri = store.uri(folder + "/".join(parents[:depth]))
                    entries.setdefault(uri, _describe_folder(uri))
            is_within = maxdepth is None or len(parents) < maxdepth
            if name and is_within and not name.endswith(CHECKSUM_SUFFIX):
                uri = store.uri(entry.key)
                entries[uri] = {**_describe_file(uri, entry), "created": entry.modified}
        if not entries and key and self.isfile(path):
            info = self.info(path)
            entries[info["name"]] = info
        return {name: entries[name] for name in sorted(entries)} if detail else sorted(entries)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return name, size and type of a file or folder; raise FileNotFoundError if there is neither."""
        store, key = self._locate(path)
        if not key:
            return _describe_folder(store.root.rstrip("/"))
        try:
            return _describe_file(store.uri(key), store.head(key))
        except NotFoundError:
            for _ in store.list_pages(key.rstrip("/") + "/"):
                return _describe_folder(store.uri(key))
            raise

    def modified(self, path: str) -> Any:
        """Return when a file, or the newest file in a folder, was written."""
        store, key = self._locate(path)
        entries = store.list_folder(key.rpartition("/")[0] + "/" if "/" in key else "")
        times = [e.modified for e in entries if e.modified and (e.key == key or e.key.startswith(key + "/"))]
        if not times:
            raise FileNotFoundError(path)
        return max(times)

    def rm_file(self, path: str) -> None:
        """Delete a file and its checksums."""
        store, key = self._locate(path)
        store.delete_one(key)
        store.delete_one(key + CHECKSUM_SUFFIX)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete files, or whole folders with `recursive`, with all checksums. `path` may be a list or a pattern."""
        if maxdepth is not None:
            super().rm(path, recursive=recursive, maxdepth=maxdepth)
            return
        for uri in self.expand_path(path):
            if self.info(uri)["type"] == "file":
                self.rm_file(uri)
            elif recursive:
                store, key = self._locate(uri)
                store.delete_prefix(key + "/" if key else "")
            else:
                raise IsADirectoryError(f"{uri} is a folder; pass recursive=True to delete all files in it")

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file within or between buckets."""
        with self._open(path1) as source, self._open(path2, "wb") as target:
            while block := source.read(8 << 20):
                target.write(block)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file in one call; with mode "create" only if there is none."""
        with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as file:
            file.write(value)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Write an empty file; without `truncate` only if there is none."""
        if truncate or not self.exists(path):
            self.pipe_file(path, b"")

    def open(self, path: str, mode: str = "rb", *args: Any, compression: str | None = None, **kwargs: Any) -> Any:
        """Open a file; text modes give an `io.TextIOWrapper`."""
        if compression is not None and "r" not in mode:
            # The compressors leave the file below them open, and a file that nobody closes is discarded.
            raise ConfigError(
                "a file system cannot open a compressed file for writing",
                uri=path,
                fix="Use fsspec.open, which closes both the compressor and the file",
            )
        return super().open(path, mode, *args, compression=compression, **kwargs)

    def _open(self, path: str, mode: str = "rb", *, autocommit: bool = True, **kwargs: Any) -> Any:
        store, key = self._locate(path)
        if mode == "rb":
            return RangedReader(open_verified(store, key))
        return open_file_writer(store, key, mode, in_transaction=not autocommit)


def _describe_folder(uri: str) -> dict[str, Any]:
    return {"name": uri, "size": 0, "type": "directory"}


def _describe_file(uri: str, info: ObjectInfo) -> dict[str, Any]:
    return {"name": uri, "size": info.size, "type": "file", "ETag": info.etag}


def _choose_registration(uri: str) -> _Registration:
    """Return the registration for a URI that fsspec opens, so that `ModelCheckpoint`, which opens its folder when it is
    constructed and again when training starts, gets the same config both times."""
    bound = _folders.get(uri)
    if bound is not None and bound != _newest and bound.is_alive():
        gc.collect()  # a finished Trainer is part of reference cycles, and must not hold on to its folder
        if bound.is_alive():
            return bound
    if uri:
        _folders[uri] = _newest
    return _newest


def register_filesystem(
    config: StoreConfig | None = None, *, override: bool = False, owner: object | None = None
) -> None:
    """Make fsspec use voxlane for gs://, s3:// and az:// if no other package for the scheme is installed, or in any
    case with `override`.

    fsspec uses `config` from now on, except for folders that it first opened under an earlier `config` whose `owner`
    still lives.
    """
    global _newest
    if config is not None:
        _newest = _Registration(config, weakref.ref(owner) if owner is not None else lambda: None)
    for scheme, (package, _) in USUAL_CLASSES.items():
        if override or importlib.util.find_spec(package) is None:
            fsspec.register_implementation(scheme, BucketFileSystem, clobber=True)
