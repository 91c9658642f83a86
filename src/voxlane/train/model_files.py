"""The files of an exported model, in a folder or bucket prefix, or in one uncompressed .zip file.

Writers publish the file that describes the model, `model.json`, only when all others are complete; a .zip file appears
as a whole. Readers read single files of either by ranges, so that nothing else of a .zip file is fetched.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Iterable
from typing import Any

from voxlane.errors import AlreadyExistsError, CorruptError, IncompleteError, RunError
from voxlane.store import Store, StoreConfig
from voxlane.store.bucket import ignore_missing_object
from voxlane.train.model_facts import FileEntry
from voxlane.volume.prepared_dataset import as_prefix

ZIP_SUFFIX = ".zip"
"""Models at URIs that end in this are one file; all others are folders."""
MODEL_JSON = "model.json"
"""Name of the file that describes the model and lists all others."""
_COPY_BYTES = 8 << 20
"""Bytes of a local file that are copied at a time."""
_FIRST_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of all files in a .zip file, so that the same model gives the same bytes."""


class ModelWriter:
    """Writes the files of one model, that named `description` last. Leaving `with` without an exception publishes a
    .zip file."""

    def __init__(self, uri: str, config: StoreConfig | None = None, *, description: str = MODEL_JSON) -> None:
        self._store, self._key = Store.locate(uri, config)
        self._description = description
        self.uri = uri
        self._is_zip = uri.endswith(ZIP_SUFFIX)
        self._stack = contextlib.ExitStack()
        self._zip: zipfile.ZipFile | None = None

    def __enter__(self) -> ModelWriter:
        key = self._key if self._is_zip else as_prefix(self._key) + self._description
        if self._store.exists(key):
            raise self._exists_error()
        self._store.check_writable(key)
        if self._is_zip:
            file = self._stack.enter_context(self._store.open_writer(key))
            self._zip = self._stack.enter_context(zipfile.ZipFile(file, "w", zipfile.ZIP_STORED))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, name: str, chunks: Iterable[Any], size_bytes: int = 0) -> FileEntry:
        """Write a file whose content follows in `chunks`. `size_bytes` is its approximate size."""
        digest, size = hashlib.sha256(), 0
        with self._open(name, size_bytes) as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
                size += memoryview(chunk).nbytes
        return FileEntry(size_bytes=size, sha256=digest.hexdigest())

    def copy_file(self, name: str, path: str) -> FileEntry:
        """Write a file with the content of a local file."""
        with open(path, "rb") as file:
            return self.write(name, iter(lambda: file.read(_COPY_BYTES), b""), os.path.getsize(path))

    def finish(self, description: bytes) -> None:
        """Write the file that describes the model, with which it is complete."""
        if self._zip is not None:
            self.write(self._description, [description])
            return
        try:
            self._store.put(as_prefix(self._key) + self._description, description, if_absent=True)
        except AlreadyExistsError:
            raise self._exists_error() from None

    def _open(self, name: str, size_bytes: int) -> contextlib.AbstractContextManager[Any]:
        if self._zip is not None:
            return self._zip.open(zipfile.ZipInfo(name, _FIRST_DATE), "w", force_zip64=True)
        return self._store.open_writer(as_prefix(self._key) + name, size_hint=size_bytes)

    def _exists_error(self) -> RunError:
        return RunError("a model already exists here", uri=self.uri, fix="Choose another name, or remove it first")


class ModelReader:
    """Reads the files of one model. It does no I/O until a method is called."""

    def __init__(self, uri: str, config: StoreConfig | None = None) -> None:
        self._store, self._key = Store.locate(uri, config)
        self.uri = uri
        self.is_zip = uri.endswith(ZIP_SUFFIX)

    def file_uri(self, name: str) -> str:
        """Return the URI of a file of the model, for messages."""
        return f"{self.uri}:{name}" if self.is_zip else self._store.uri(as_prefix(self._key) + name)

    def read(self, name: str, size_bytes: int | None = None) -> bytes | None:
        """Return a file's content, or None if it does not exist. A file of another size than `size_bytes` is not read:
        it raises CorruptError."""
        if self.is_zip:
            return self._read_zipped(name, size_bytes)
        key = as_prefix(self._key) + name
        with ignore_missing_object():
            if size_bytes is not None:
                self._check_size(name, self._store.head(key).size, size_bytes)
            return self._store.get_bytes(key)
        return None

    def _read_zipped(self, name: str, size_bytes: int | None) -> bytes | None:
        with ignore_missing_object():
            info = self._store.head(self._key)
            try:
                archive = zipfile.ZipFile(_RangedFile(self._store, self._key, info.size, info.etag))
            except zipfile.BadZipFile:
                raise IncompleteError(
                    "not a complete .zip file", uri=self.uri, fix="Copy the model again from its source"
                ) from None
            with archive:
                return self._read_entry(archive, name, size_bytes)
        return None

    def _read_entry(self, archive: zipfile.ZipFile, name: str, size_bytes: int | None) -> bytes | None:
        if name not in archive.namelist():
            return None
        entry = archive.getinfo(name)
        self._check_size(name, entry.file_size, size_bytes)
        if entry.compress_type != zipfile.ZIP_STORED:
            problem = "the .zip file was compressed again, and models are stored uncompressed"
            raise IncompleteError(problem, uri=self.uri, fix="Copy the model again from its source")
        try:
            return archive.read(entry)
        except zipfile.BadZipFile:
            raise damaged_error(self.file_uri(name), "its checksum differs") from None

    def _check_size(self, name: str, size: int, expected: int | None) -> None:
        if expected is not None and size != expected:
            raise damaged_error(self.file_uri(name), f"it has {size:,} bytes instead of {expected:,}")


def damaged_error(uri: str, difference: str) -> CorruptError:
    """Return the error for a file that is not the one that model.json lists."""
    return CorruptError(
        f"not the file that was exported: {difference}",
        uri=uri,
        fix="Copy the model again from its source",
    )


class _RangedFile(io.RawIOBase):
    """One version of an object as a seekable file that reads ranges, for zipfile."""

    def __init__(self, store: Store, key: str, size: int, etag: str | None) -> None:
        self._store, self._key, self._size, self._etag = store, key, size, etag
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._size, self._position + size)
        body = bytes(self._store.get(self._key, self._position, stop, etag=self._etag))
        self._position = max(self._position, stop)
        return body
