"""Buckets for code that goes through fsspec, as Lightning's `ModelCheckpoint` does to look folders up.

Listing, looking up, deleting, and files that are published only when they are closed without an exception.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from voxlane import uri as uris
from voxlane.checkpoint.plain import CheckpointWriter
from voxlane.checkpoint.reader import RangedReader
from voxlane.checkpoint.source import SUMS_SUFFIX, open_source
from voxlane.errors import NotFoundError
from voxlane.store import Store, StoreConfig

_OTHERS = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "az": "adlfs"}
"""The packages that usually serve these schemes."""
_config: StoreConfig | None = None


class BucketFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """fsspec over `Store`. Names are whole URIs, so that they mean the same everywhere."""

    protocol = ("gs", "gcs", "s3", "s3a", "az")
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(entry) for entry in path]
        return str(uris.parse(path)).rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        """Names are whole URIs already."""
        return str(self._strip_protocol(name))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What lies directly in a folder; checksum files are not shown."""
        store, key = _place(path)
        folder = key.rstrip("/") + "/" if key else ""
        found: dict[str, dict[str, Any]] = {}
        for page in store.list_pages(folder):
            columns = (page.column(name).to_pylist() for name in ("path", "size", "last_modified", "e_tag"))
            for name, size, modified, etag in zip(*columns, strict=True):
                child, slash, _ = name.removeprefix(folder).partition("/")
                uri = store.uri(folder + child)
                if slash:
                    found[uri] = {"name": uri, "size": 0, "type": "directory"}
                elif not name.endswith(SUMS_SUFFIX):
                    found[uri] = {"name": uri, "size": size, "type": "file", "created": modified, "ETag": etag}
        if not found:
            info = self.info(path)
            found[info["name"]] = info
        return [found[name] if detail else name for name in sorted(found)]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Of a file or a folder; FileNotFoundError if there is neither."""
        store, key = _place(path)
        if not key:
            return {"name": store.root.rstrip("/"), "size": 0, "type": "directory"}
        try:
            found = store.head(key)
            return {"name": store.uri(key), "size": found.size, "type": "file", "ETag": found.etag}
        except NotFoundError:
            for _ in store.list_pages(key.rstrip("/") + "/"):
                return {"name": store.uri(key), "size": 0, "type": "directory"}
            raise

    def modified(self, path: str) -> Any:
        """When a file, or the newest file of a folder, was written."""
        store, key = _place(path)
        times = []
        for page in store.list_pages(key.rpartition("/")[0] + "/" if "/" in key else ""):
            columns = (page.column(name).to_pylist() for name in ("path", "last_modified"))
            times += [t for name, t in zip(*columns, strict=True) if name == key or name.startswith(key + "/")]
        if not times:
            raise FileNotFoundError(path)
        return max(times)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Buckets have no folders to make."""

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Buckets have no folders to make."""

    def rm_file(self, path: str) -> None:
        """Delete a file and its checksums."""
        store, key = _place(path)
        store.delete_one(key)
        store.delete_one(key + SUMS_SUFFIX)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file, in any bucket."""
        with self._open(path1) as source, self._open(path2, "wb") as target:
            while block := source.read(8 << 20):
                target.write(block)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        store, key = _place(path)
        if mode == "rb":
            return RangedReader(open_source(store, key))
        if mode != "wb":
            raise NotImplementedError(f"mode {mode!r}: objects are read or written whole")
        store.check_writable(key)
        return _PublishedOnClose(store, key)


class _PublishedOnClose(CheckpointWriter):
    """As fsspec's users expect, `close()` publishes; an exception in the `with` block, or no close, does not."""

    def close(self) -> None:
        if not self.closed:
            self.commit()


def _place(path: str) -> tuple[Store, str]:
    parsed = uris.parse(path)
    return Store(str(parsed), _config), parsed.key


def register_filesystem(config: StoreConfig | None = None, *, override: bool = False) -> None:
    """Let fsspec reach gs://, s3:// and az:// through voxlane, with `config`: where no other package for the scheme is
    installed, or everywhere in this process with `override`."""
    global _config
    if config is not None:
        _config = config
    for scheme, package in _OTHERS.items():
        if override or importlib.util.find_spec(package) is None:
            fsspec.register_implementation(scheme, BucketFileSystem, clobber=True)
