"""Create, update, verify, list and remove copies of sources on a local disk."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from voxlane import uri as uris
from voxlane.errors import CacheError, NoRoomError, OverQuotaError, TooLargeError, VoxlaneError
from voxlane.sizes import format_bytes
from voxlane.store import Store, StoreConfig
from voxlane.store.staging import local_store
from voxlane.store.staging.copying import BLOCK_BYTES, ObjectCopier, describe_disk_error
from voxlane.store.staging.local_store import STAGED, CopyOrigin, ManifestEntry, StagingRoot
from voxlane.store.staging.sources import (
    RECORDS,
    SourceListing,
    SourceObject,
    as_prefix,
    default_name,
    list_source,
    normalize_source,
)

RESERVE_BYTES = 256 << 20
"""Bytes left free on the disk for other programs."""
_VERIFY_THREADS = 4
"""Number of files that are verified at the same time."""
Activity = Literal["waiting", "checking", "copying"]


@dataclass(frozen=True)
class StagingProgress:
    """Progress of a copy."""

    activity: Activity
    """Current activity; `waiting` means that another process holds the lock of the root."""
    objects: int
    """Number of complete objects."""
    total_objects: int
    bytes: int
    """Bytes present in the copy, including those of incomplete objects."""
    total_bytes: int


@dataclass(frozen=True)
class StagingReport:
    """Result of staging a source."""

    name: str
    """Name of the copy below the root."""
    folder: str
    """Folder that holds the objects under their names."""
    objects: int
    total_bytes: int
    copied: int
    """Number of objects read from the source."""
    copied_bytes: int
    shared: int
    """Number of objects taken from other copies below the same root."""
    removed: int
    """Number of files removed because the source no longer has them, or has another version."""
    version: str
    """Version of the source, as in `SourceListing.version`."""
    seconds: float


@dataclass(frozen=True)
class StagedCopy:
    """A copy below a root, complete or not."""

    name: str
    folder: str
    source: str
    objects: int
    """Number of objects present in the copy."""
    bytes: int
    """Size of the objects present in the copy."""
    complete: bool
    """True once every object of the source has been copied."""
    version: str
    """Version of the source; empty while the copy is incomplete."""
    last_used: datetime.datetime


def stage(
    source: str,
    root: str | os.PathLike[str],
    *,
    name: str | None = None,
    config: StoreConfig | None = None,
    capacity_bytes: int | None = None,
    expected: SourceListing | None = None,
    origin: str | None = None,
    progress: Callable[[StagingProgress], None] | None = None,
    verify: bool = False,
    reserve_bytes: int = RESERVE_BYTES,
    reserve_files: int = 0,
    quota_bytes: int | None = None,
) -> StagingReport:
    """Make `root/datasets/name` hold the objects below `source` as they are now.

    Objects that are already complete are not copied again, so an interrupted copy resumes. Only one process at a time
    works below a root; others wait for it.

    name: name of the copy; default: the last path component of the source and a hash of its URI.
    capacity_bytes: raise TooLargeError before copying anything if the source is larger.
    expected: objects of the source, if they are known without listing it.
    origin: URI of the source in the records if it is read through a mount, such as nfs://SERVER/PATH.
    progress: called on this thread about ten times a second; an exception from it stops the copy.
    verify: read existing files and compare checksums, instead of comparing only sizes and modification times.
    reserve_bytes: bytes to leave free; raise NoRoomError before copying anything if the disk is too small, and later if
    other programs use them up.
    reserve_files: number of files (inodes) that the disk must have room for afterwards, besides these bytes.
    quota_bytes: raise OverQuotaError before copying anything if everything below root would become larger.

    Raise ChangedError if an object changes while it is copied, or has another content than `expected` says. The size of
    every object is checked; over plain http, where no TLS protects the transfer, so is the MD5 if the etag is one.
    """
    begin = time.monotonic()
    listing = expected or list_source(source, config)
    origin_uri = normalize_source(origin or listing.source)
    staging_root = StagingRoot(root)
    name = name or default_name(origin_uri)
    folder = staging_root.copy_folder(name)
    if capacity_bytes is not None and listing.total_bytes > capacity_bytes:
        raise TooLargeError(
            f"the source has {format_bytes(listing.total_bytes)}, more than the capacity of "
            f"{format_bytes(capacity_bytes)}",
            uri=origin_uri,
            fix="Raise the capacity, or stage a subfolder",
        )
    store = Store(source, config)
    check_md5 = (store.endpoint or "").startswith("http://")
    copier = ObjectCopier(store, as_prefix(uris.parse(source).key), staging_root, folder, check_md5)
    update = _CopyUpdate(staging_root, folder, CopyOrigin(origin_uri, store.endpoint), listing, progress)
    with staging_root.lock(lambda: update.report("waiting")):
        try:
            update.compare(verify)
            update.remove_outdated()
            if update.missing:
                update.link_shared()
            if update.missing:
                update.check_quota(quota_bytes)
                update.check_disk_space(reserve_bytes, reserve_files)
                copier.run(update.missing, partial(update.report_copying, reserve_bytes))
            update.declare_complete()
        except OSError as error:
            if isinstance(error, VoxlaneError) or error is update.progress_error:
                raise
            raise describe_disk_error(error, staging_root.root, update.missing_bytes - copier.bytes_copied) from None
    return StagingReport(
        name=name,
        folder=folder,
        objects=len(listing.objects),
        total_bytes=listing.total_bytes,
        copied=len(update.missing),
        copied_bytes=update.missing_bytes,
        shared=update.shared,
        removed=update.removed,
        version=listing.version,
        seconds=time.monotonic() - begin,
    )


@dataclass
class _CopyUpdate:
    """Update of one copy; the public methods are called in order while the lock is held."""

    root: StagingRoot
    folder: str
    origin: CopyOrigin
    listing: SourceListing
    progress: Callable[[StagingProgress], None] | None
    entries: list[ManifestEntry] = field(default_factory=list)
    """Objects that are complete."""
    entries_bytes: int = 0
    """Size of these objects in bytes."""
    missing: list[SourceObject] = field(default_factory=list)
    """Objects that the copy lacks."""
    shared: int = 0
    removed: int = 0
    progress_error: OSError | None = None
    """Error of the progress function, which is no error of the disk."""

    @property
    def missing_bytes(self) -> int:
        return sum(item.size for item in self.missing)

    def report(self, activity: Activity, objects: int = 0, arrived: int = 0) -> None:
        """Call the progress function with what is complete and what has arrived in addition."""
        if self.progress is None:
            return
        count, total = len(self.listing.objects), self.listing.total_bytes
        present = min(self.entries_bytes + arrived, total)
        try:
            self.progress(StagingProgress(activity, len(self.entries) + objects, count, present, total))
        except OSError as error:
            self.progress_error = error
            raise

    def report_copying(self, reserve_bytes: int, objects: int, arrived: int) -> None:
        """Report objects and bytes that have arrived. Raise NoRoomError if other programs use up the reserve: a part of
        it may be used by the records of the file system."""
        free = shutil.disk_usage(self.folder).free
        if free < reserve_bytes - RESERVE_BYTES // 2:
            raise NoRoomError(
                f"other programs fill the disk: {format_bytes(free)} are free, {format_bytes(reserve_bytes)} must be",
                uri=str(self.root.root),
                fix="Free some disk space and stage again to resume",
                lacking_bytes=max(reserve_bytes + self.missing_bytes - arrived - free, 1),
            )
        self.report("copying", objects, arrived)

    def _add(self, entry: ManifestEntry) -> None:
        self.entries.append(entry)
        self.entries_bytes += entry.size

    def compare(self, verify: bool) -> None:
        """Determine which objects of the copy match the source."""
        self.root.make_folder(f"{self.folder}/{RECORDS}")
        origin, entries = local_store.read_manifest(self.folder)
        self._old_entries = entries if origin == self.origin else {}
        self._files = local_store.scan_files(self.folder)
        unverified: list[ManifestEntry] = []
        for item in self.listing.objects:
            entry = self._old_entries.get(item.name)
            size, mtime = self._files.get(item.file, (-1, 0))
            if entry is None or size != item.size or not entry.matches(item):
                continue
            if verify or mtime != entry.mtime:
                unverified.append(entry)
            else:
                self._add(entry)
        self._verify(unverified)
        complete = {entry.name for entry in self.entries}
        self.missing = [item for item in self.listing.objects if item.name not in complete]
        current_files = {entry.file for entry in self.entries}
        self._outdated = [path for path in self._files if path not in current_files]

    def _verify(self, entries: list[ManifestEntry]) -> None:
        """Add the entries whose files have the right content; remove damaged contents from all copies."""
        self.report("checking")
        with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="voxlane-check") as pool:
            paths = [f"{self.folder}/{entry.file}" for entry in entries]
            for entry, path, digest in zip(entries, paths, pool.map(local_store.hash_file, paths), strict=True):
                if digest == entry.digest:
                    self._add(replace(entry, mtime=self._files[entry.file][1]))
                    self.report("checking")
                else:
                    blob = self.root.blob_path(entry.digest)
                    with contextlib.suppress(FileNotFoundError):
                        if os.path.samefile(path, blob):
                            os.unlink(blob)

    def remove_outdated(self) -> None:
        """Remove the entries of objects that the copy lacks, then their files."""
        was_interrupted = local_store.read_staged(self.folder) is None and bool(self._old_entries)
        if self.missing or self._outdated:
            Path(self.folder, STAGED).unlink(missing_ok=True)
        if self.missing or self._outdated or {entry.name: entry for entry in self.entries} != self._old_entries:
            local_store.write_manifest(self.folder, self.origin, self.entries)
        local_store.remove_files(self.folder, self._outdated)
        self.removed = len(self._outdated)
        if self._outdated or was_interrupted:
            self.root.remove_unreferenced()

    def link_shared(self) -> None:
        """Link missing objects that other copies already have."""
        available = self._index_other_copies()
        missing = []
        for item in self.missing:
            entry = available.get(item.checksum or (f"{self.origin.source}/{item.name}", item.etag, item.size))
            if entry and self.root.link_existing(entry.digest, entry.size, entry.mtime, f"{self.folder}/{item.file}"):
                self._add(replace(entry, name=item.name, path=item.path))
            else:
                missing.append(item)
        self.shared = len(self.missing) - len(missing)
        if self.shared:
            self.missing = missing
            local_store.write_manifest(self.folder, self.origin, self.entries)

    def _index_other_copies(self) -> dict[object, ManifestEntry]:
        """Return the objects that other copies have, by checksum, and those of the same bucket also by URI, etag and
        size."""
        available: dict[object, ManifestEntry] = {}
        bucket = "/".join(self.origin.source.split("/")[:3])
        for name in self.root.copy_names():
            other = self.root.copy_folder(name)
            if other == self.folder:
                continue
            origin, entries = local_store.read_manifest(other)
            available |= {entry.digest: entry for entry in entries.values()}
            if origin is None or origin.endpoint != self.origin.endpoint or not origin.source.startswith(bucket):
                continue
            for entry in entries.values():
                if entry.etag is not None:  # without a version, the same name may have another content
                    available[(f"{origin.source}/{entry.name}", entry.etag, entry.size)] = entry
        return available

    @property
    def _required_bytes(self) -> int:
        """Bytes of the disk that the missing objects will occupy."""
        return sum(-(-item.size // BLOCK_BYTES) * BLOCK_BYTES for item in self.missing)

    def check_quota(self, quota_bytes: int | None) -> None:
        """Raise OverQuotaError if everything below the root would become larger than its quota."""
        if quota_bytes is None:
            return
        lacking = self.root.measure_bytes() + self._required_bytes - quota_bytes
        if lacking > 0:
            self._discard_empty()
            raise OverQuotaError(
                f"the {format_bytes(self._required_bytes)} still to be copied exceed the quota of "
                f"{format_bytes(quota_bytes)} by {format_bytes(lacking)}",
                uri=self.origin.source,
                fix="Remove other copies, or ask the administrator for a larger quota",
                lacking_bytes=lacking,
            )

    def _discard_empty(self) -> None:
        """Remove the folder of a copy that has no objects and will get none."""
        if not self.entries:
            shutil.rmtree(self.folder)

    def check_disk_space(self, reserve_bytes: int, reserve_files: int) -> None:
        """Raise NoRoomError if the disk has too little free space, or room for too few files."""
        required = self._required_bytes
        disk = os.statvfs(self.folder)
        if disk.f_files and disk.f_favail < len(self.missing) + reserve_files:
            self._discard_empty()
            raise NoRoomError(
                f"the disk has room for {disk.f_favail} more files, but {len(self.missing)} are still to be copied and "
                f"{reserve_files} must stay free",
                uri=str(self.root.root),
                fix="Remove files, or choose a folder on another disk",
                lacking_bytes=1,
            )
        lacking = required + reserve_bytes - shutil.disk_usage(self.folder).free
        if lacking > 0:
            self._discard_empty()
            raise NoRoomError(
                f"the disk lacks {format_bytes(lacking)} for the {format_bytes(required)} still to be copied"
                + (f" and the {format_bytes(reserve_bytes)} to be left free" if reserve_bytes else ""),
                uri=str(self.root.root),
                fix="Free some disk space, or choose a folder on another disk",
                lacking_bytes=lacking,
            )

    def declare_complete(self) -> None:
        """Record that the copy is complete and in use now."""
        record = {
            **asdict(self.origin),
            "objects": len(self.listing.objects),
            "bytes": self.listing.total_bytes,
            "version": self.listing.version,
        }
        old = local_store.read_staged(self.folder)
        if old is None or {**old, **record} != old:
            local_store.sync(self.folder)  # a power failure must not lose bytes that are declared complete
            when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            local_store.write_staged(self.folder, {**record, "when": when})
        local_store.mark_used(self.folder)


# -- existing copies ---------------------------------------------------------------------------------------------------


def list_copies(root: str | os.PathLike[str]) -> list[StagedCopy]:
    """List the copies below `root`, complete or not, in order of their names."""
    staging_root = StagingRoot(root)
    copies = []
    for name in staging_root.copy_names():
        folder = staging_root.copy_folder(name)
        used = datetime.datetime.fromtimestamp(local_store.last_used(folder), datetime.UTC)
        record = local_store.read_staged(folder)
        if record is None:
            origin, entries = local_store.read_manifest(folder)
            size = sum(entry.size for entry in entries.values())
            record = {"source": origin.source if origin else "", "objects": len(entries), "bytes": size, "version": ""}
        source, objects, size, version = (record[key] for key in ("source", "objects", "bytes", "version"))
        copies.append(StagedCopy(name, folder, source, objects, size, bool(version), version, used))
    return copies


def remove(root: str | os.PathLike[str], name: str) -> int:
    """Remove a copy and return the number of bytes freed, without those that other copies share.

    Return 0 if there is no such copy.
    """
    staging_root = StagingRoot(root)
    folder, doomed = staging_root.copy_folder(name), f"{staging_root.partial}/removed"
    if not os.path.isdir(folder):
        return 0
    with staging_root.lock():
        try:
            # The manifest goes first, so that a concurrent reader takes missing objects from the source.
            Path(folder, local_store.MANIFEST).unlink(missing_ok=True)
            os.rename(folder, doomed)
            shutil.rmtree(doomed)
            return staging_root.remove_unreferenced()
        except FileNotFoundError:  # another process has removed it
            return 0
        except OSError as error:
            raise CacheError(
                f"cannot remove the copy: {error.strerror}",
                uri=folder,
                fix="Check the disk and who owns the folder",
            ) from None
