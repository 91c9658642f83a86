"""Reading of a prepared dataset from a local copy made by `voxlane.store.staging` instead of from the bucket.

Runs still use the bucket's URI: a machine with no copy or an incomplete one reads the rest from the bucket.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from voxlane import uri as uris
from voxlane.errors import ChangedError, PreparedError
from voxlane.store import Store, StoreConfig, staging
from voxlane.store.private_folder import check_existing_folder
from voxlane.store.staging import SourceListing, StagingReport, local_store
from voxlane.store.staging.sources import RECORDS, default_name, normalize_source, strip_quotes
from voxlane.volume.prepared_dataset import COPY_AGAIN, HEADER, Prepared, as_prefix


def list_training_objects(prepared: Prepared) -> SourceListing:
    """List the index and every object that training reads, from the dataset's table, without listing the bucket."""
    objects = [*prepared.index, *prepared.objects()]
    rows = ((item.key, item.size, item.required_etag) for item in objects)
    return SourceListing.of(prepared.uri, rows, {item.key: item.checksum for item in objects})


def is_prepared(uri: str, config: StoreConfig | None = None) -> bool:
    """Return whether there is a prepared dataset at `uri`."""
    return Store(uri, config).exists(as_prefix(uris.parse(uri).key) + HEADER)


def stage(prepared: Prepared, root: str | os.PathLike[str], **options: Any) -> StagingReport:
    """Copy the objects that training reads to a folder below `root`; `options` are those of `staging.stage`."""
    expected = list_training_objects(prepared)
    try:
        return staging.stage(prepared.uri, root, config=prepared.config, expected=expected, **options)
    except ChangedError as error:
        raise PreparedError(
            "an object of the dataset was deleted or changed after preparation",
            uri=error.uri,
            fix=COPY_AGAIN,
        ) from None


@dataclass(frozen=True)
class _Copy:
    """State of a local copy."""

    folder: str
    manifest: int
    """Inode of the manifest; it changes with the manifest's content."""
    prefix: str
    """Prefix of keys in the bucket that is not part of the objects' names in the copy."""
    versions: dict[str, tuple[str, str | None]]
    """Checksum and etag of each object that is completely copied, under its own name."""

    def has(self, key: str, version: str | None) -> bool:
        return strip_quotes(version) in self.versions.get(key.removeprefix(self.prefix), ())


class StagedReader:
    """A local copy of a dataset. Opened on first use in each process; cheap to pickle and thread-safe. `path` is the
    root passed to `voxlane stage`, or the folder of the copy itself, such as a mount in a container."""

    def __init__(self, path: str | os.PathLike[str], prepared: Prepared) -> None:
        self._path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self._source = normalize_source(prepared.uri)
        self._prefix = as_prefix(uris.parse(prepared.uri).key)
        self._copy: _Copy | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copy": None}

    def read(self, key: str, version: str | None, start: int, stop: int) -> bytes | None:
        """Return the bytes `[start, stop)` of an object, or None if the copy does not have that version, which is its
        checksum, or its etag in a dataset of format 1."""
        copy = self._copy
        if copy is None:  # threads may do this concurrently, with the same result
            copy = self._copy = self._load(self._find())
        if not copy.has(key, version):
            return None
        try:
            with open(f"{copy.folder}/{key.removeprefix(copy.prefix)}", "rb", buffering=0) as file:
                body = os.pread(file.fileno(), stop - start, start)
            # Staging writes a manifest without the object before it replaces the file, so the same manifest means that
            # this was the right version.
            if os.stat(f"{copy.folder}/{local_store.MANIFEST}").st_ino != copy.manifest:
                copy = self._copy = self._load(copy.folder)
                if not copy.has(key, version):
                    return None
        except OSError:  # removed in the meantime; the bucket still has it
            return None
        return body if len(body) == stop - start else None

    def _find(self) -> str:
        """Return the folder of the copy, or where it would be; raise CacheError if another user could have written
        it."""
        check_existing_folder(self._path, is_mounted=True)
        if os.path.isdir(f"{self._path}/{RECORDS}"):
            return self._path
        root = local_store.StagingRoot(self._path)
        first = default_name(self._source)
        exact, containing = [], []
        for name in root.copy_names():
            origin, _ = local_store.read_manifest(root.copy_folder(name), entries=False)
            if origin and origin.source == self._source:
                exact.append(name)
            elif origin and self._source.startswith(f"{origin.source}/"):
                containing.append(name)
        # Prefer a copy of exactly this source to a copy of a folder that contains it.
        exact.sort(key=lambda name: name != first)
        return root.copy_folder([*exact, *containing, first][0])

    def _load(self, path: str) -> _Copy:
        """Read which objects are complete, and mark the copy as used."""
        manifest = -1
        with contextlib.suppress(OSError):
            manifest = os.stat(f"{path}/{local_store.MANIFEST}").st_ino
        origin, entries = local_store.read_manifest(path)
        prefix = self._prefix
        if origin:
            # Names are relative to the copied source: the dataset, or a folder that contains it.
            if self._source.startswith(f"{origin.source}/"):
                prefix = prefix.removesuffix(as_prefix(self._source.removeprefix(f"{origin.source}/")))
            with contextlib.suppress(OSError):  # a container mounts the copy read-only
                local_store.mark_used(path)
        versions = {name: (entry.digest, entry.etag) for name, entry in entries.items() if entry.path is None}
        return _Copy(path, manifest, prefix, versions)
