"""Buckets for code that uses fsspec, as Lightning's `ModelCheckpoint` does for folders.

It lists, looks up and deletes files, and publishes files only when they are closed without an exception.
"""

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
from voxlane.checkpoint.plain import CheckpointWriter
from voxlane.checkpoint.reader import RangedReader
from voxlane.checkpoint.verified_reader import CHECKSUM_SUFFIX, open_verified
from voxlane.errors import NotFoundError
from voxlane.store import ObjectInfo, Store, StoreConfig

_USUAL_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "az": "adlfs"}
"""The packages that usually serve these schemes in fsspec."""


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
    folder does nothing, as in fsspec's base class. Without a `config` it uses the one registered for the URI that it
    was opened with (see `register_filesystem`)."""

    protocol = ("gs", "gcs", "s3", "s3a", "az")
    cachable = False

    def __init__(self, config: StoreConfig | None = None, *, opened_uri: str = "", **storage_options: Any) -> None:
        super().__init__(**storage_options)
        self._config = config if config is not None else _choose_registration(opened_uri).config

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

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List the files and folders directly in a folder, without checksum files."""
        store, key = Store.locate(path, self._config)
        folder = key.rstrip("/") + "/" if key else ""
        entries: dict[str, dict[str, Any]] = {}
        for entry in store.list_folder(folder):
            child, slash, _ = entry.key.removeprefix(folder).partition("/")
            uri = store.uri(folder + child)
            if slash:
                entries[uri] = _describe_folder(uri)
            elif not entry.key.endswith(CHECKSUM_SUFFIX):
                entries[uri] = {**_describe_file(uri, entry), "created": entry.modified}
        if not entries:
            info = self.info(path)
            entries[info["name"]] = info
        return [entries[name] if detail else name for name in sorted(entries)]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return name, size and type of a file or folder; raise FileNotFoundError if there is neither."""
        store, key = Store.locate(path, self._config)
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
        store, key = Store.locate(path, self._config)
        entries = store.list_folder(key.rpartition("/")[0] + "/" if "/" in key else "")
        times = [e.modified for e in entries if e.modified and (e.key == key or e.key.startswith(key + "/"))]
        if not times:
            raise FileNotFoundError(path)
        return max(times)

    def rm_file(self, path: str) -> None:
        """Delete a file and its checksums."""
        store, key = Store.locate(path, self._config)
        store.delete_one(key)
        store.delete_one(key + CHECKSUM_SUFFIX)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file within or between buckets."""
        with self._open(path1) as source, self._open(path2, "wb") as target:
            while block := source.read(8 << 20):
                target.write(block)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        store, key = Store.locate(path, self._config)
        if mode == "rb":
            return RangedReader(open_verified(store, key))
        if mode != "wb":
            raise NotImplementedError(f"mode must be 'rb' or 'wb', got {mode!r}: objects cannot be changed in place")
        return _PublishedOnClose(store, key)


def _describe_folder(uri: str) -> dict[str, Any]:
    return {"name": uri, "size": 0, "type": "directory"}


def _describe_file(uri: str, info: ObjectInfo) -> dict[str, Any]:
    return {"name": uri, "size": info.size, "type": "file", "ETag": info.etag}


class _PublishedOnClose(CheckpointWriter):
    """A writer whose `close()` publishes, as users of fsspec expect; an exception in the `with` block does not."""

    def close(self) -> None:
        if not self.closed:
            self.commit()


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
    for scheme, package in _USUAL_PACKAGES.items():
        if override or importlib.util.find_spec(package) is None:
            fsspec.register_implementation(scheme, BucketFileSystem, clobber=True)
