"""A prepared dataset's copy on a machine's own disk, made by `voxlane.staging`, read there instead of from the bucket.

The run keeps the bucket's URI: a machine without a copy, or with part of one, reads the rest from there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from voxlane import staging
from voxlane import uri as uris
from voxlane.errors import ChangedError, PreparedError
from voxlane.staging import Progress, Report, Survey, shelf
from voxlane.staging.sources import RECORDS, bare, default_name, place_of
from voxlane.store import Store, StoreConfig
from voxlane.volume.prepared import HEADER, Prepared, case_key, folder


def objects_of(prepared: Prepared) -> Survey:
    """Every object that training reads; known from the dataset's table, without listing the bucket."""
    found = []
    for row in range(len(prepared)):
        case = prepared.case(row)
        below = case_key("", case.id)
        found += [(f"{below}/{name}", int(size), etag) for name, size, etag in case.volume["objects"]]
    return Survey.of(prepared.uri, found)


def is_prepared(uri: str, config: StoreConfig | None = None) -> bool:
    """Whether a prepared dataset is at `uri`."""
    return Store(uri, config).exists(folder(uris.parse(uri).key) + HEADER)


def stage(
    prepared: Prepared,
    root: str | os.PathLike[str],
    *,
    name: str | None = None,
    capacity_bytes: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    verify: bool = False,
    reserve_bytes: int = staging.RESERVE_BYTES,
) -> Report:
    """Copy what training reads of a prepared dataset below `root`; see `staging.stage`."""
    try:
        return staging.stage(
            prepared.uri,
            root,
            name=name,
            config=prepared.config,
            capacity_bytes=capacity_bytes,
            expected=objects_of(prepared),
            progress=progress,
            verify=verify,
            reserve_bytes=reserve_bytes,
        )
    except ChangedError as error:
        raise PreparedError(
            "an object of the dataset is gone or changed after it was prepared",
            uri=error.uri,
            fix="Run `voxlane prepare` again",
        ) from None


@dataclass(frozen=True)
class _Copy:
    """What is known of a copy."""

    folder: str
    manifest: int
    """The manifest's inode: another one says something else."""
    prefix: str
    """Of keys in the bucket, before the objects' names in the copy."""
    versions: dict[str, str | None]
    """Of the objects that are whole."""

    def has(self, key: str, etag: str | None) -> bool:
        return self.versions.get(key.removeprefix(self.prefix), _NO_VERSION) == bare(etag)


class Staged:
    """The copy of a dataset at `where`: a root that `voxlane stage` was given, or a copy's own folder, as a container
    has it mounted. Opened on first use, in each process; cheap to pickle, safe to use from many threads."""

    def __init__(self, where: str | os.PathLike[str], prepared: Prepared) -> None:
        self._where = os.path.abspath(os.path.expanduser(os.fspath(where)))
        self._source = place_of(prepared.uri)
        self._prefix = folder(uris.parse(prepared.uri).key)
        self._copy: _Copy | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copy": None}

    def read(self, key: str, etag: str | None, start: int, stop: int) -> bytes | None:
        """The bytes `[start, stop)` of an object of the dataset, None where this copy does not have that version."""
        copy = self._copy
        if copy is None:  # several threads may come here at once; each finds the same
            copy = self._copy = self._load(self._find())
        if not copy.has(key, etag):
            return None
        try:
            with open(f"{copy.folder}/{key.removeprefix(copy.prefix)}", "rb", buffering=0) as file:
                body = os.pread(file.fileno(), stop - start, start)
            # A line is taken back, in a new manifest, before its file is replaced: unless that happened, this is it.
            if os.stat(f"{copy.folder}/{shelf.MANIFEST}").st_ino != copy.manifest:
                copy = self._copy = self._load(copy.folder)
                if not copy.has(key, etag):
                    return None
        except OSError:  # removed meanwhile: the bucket has it
            return None
        return body if len(body) == stop - start else None

    def _find(self) -> str:
        """The folder of the copy, or of where it would be."""
        if os.path.isdir(f"{self._where}/{RECORDS}"):
            return self._where
        root = shelf.Shelf(self._where)
        first = default_name(self._source)
        names = root.names()
        # The copy of this source by itself before that of a folder it lies in.
        for name in sorted(names, key=lambda name: name != first):
            origin, _ = shelf.read_manifest(root.dataset(name), lines=False)
            if origin and origin.source == self._source:
                return root.dataset(name)
        for name in names:
            origin, _ = shelf.read_manifest(root.dataset(name), lines=False)
            if origin and self._source.startswith(f"{origin.source}/"):
                return root.dataset(name)
        return root.dataset(first)

    def _load(self, place: str) -> _Copy:
        """Read which objects are whole, and note that the copy is used."""
        manifest = -1
        with contextlib.suppress(OSError):
            manifest = os.stat(f"{place}/{shelf.MANIFEST}").st_ino
        origin, lines = shelf.read_manifest(place)
        prefix = self._prefix
        if origin:
            # Names are below what was copied: the dataset, or a folder it lies in.
            if self._source.startswith(f"{origin.source}/"):
                prefix = prefix.removesuffix(folder(self._source.removeprefix(f"{origin.source}/")))
            with contextlib.suppress(OSError):  # a container cannot write there; whoever mounted it knows that it does
                shelf.touch(place)
        return _Copy(place, manifest, prefix, {name: line.etag for name, line in lines.items()})


_NO_VERSION = "\0"
