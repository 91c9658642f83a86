"""Copying of objects between buckets and disks: in parallel, verified, and continued where an earlier copy stopped.

An object appears at the target whole or not at all, so a size that agrees means that it was copied, unless the source
has become newer. Objects that declare others complete, such as the header of a prepared dataset, are copied last; where
the target has another one, it is deleted first. So half a copy is never taken for a whole one.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from itertools import groupby

from voxlane import uri as uris
from voxlane.errors import ChangedError, ConfigError, EmptyError, StoreError
from voxlane.store.bucket import Store
from voxlane.store.config import StoreConfig
from voxlane.store.content import PART_BYTES, ContentHasher, checksum_content
from voxlane.store.objects import ObjectInfo, is_published_last
from voxlane.store.ranges import split
from voxlane.store.retry import MAX_READS

_WORKERS = 16
"""Number of objects of at most one part that are copied at the same time."""
_LARGE_WORKERS = 4
"""Number of larger objects that are copied at the same time; each takes up to about 120 MiB of memory."""
_PARTS_AHEAD = 2
"""Parts of a large object that are requested ahead."""
_TICK_S = 0.1
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


@dataclass(frozen=True)
class Transfer:
    """An object to copy."""

    name: str
    """Name below the source and below the target; empty for a single object."""
    source: ObjectInfo
    target: str
    """Key at the target."""
    checksum: str | None
    """Checksum that the content must have (`store.content`), if it is known."""


@dataclass(frozen=True)
class TransferReport:
    """Result of a copy."""

    objects: int
    total_bytes: int
    copied: int
    """Number of objects that were missing at the target or different."""
    copied_bytes: int


def copy_objects(
    source: str,
    target: str,
    config: StoreConfig | None = None,
    *,
    target_config: StoreConfig | None = None,
    checksums: Mapping[str, str | None] | None = None,
    skip: Callable[[str], bool] = lambda name: False,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> TransferReport:
    """Copy the objects below `source`, or the single object `source`, to `target`; keep what the target has already.

    checksums: by name, those that contents must have; an object of another content raises StoreError.
    skip: names to leave out.
    verify: also read the objects that the target has, and compare their contents instead of sizes and times.
    progress: called on this thread with the bytes present at the target and the total, about ten times a second.
    """
    source_store, target_store = Store(source, config), Store(target, target_config or config)
    transfers = [
        item for item in _plan(source_store, source, target_store, target, checksums or {}) if not skip(item.name)
    ]
    if not transfers:
        raise EmptyError("there are no objects to copy", uri=source, fix="Check its spelling")
    existing = _list_existing(target_store, transfers, uris.parse(target).key)
    copier = _Copier(source_store, target_store, progress or (lambda done, total: None))
    copier.total_bytes = sum(item.source.size for item in transfers)
    missing = copier.select_missing(transfers, existing, verify)
    if missing:
        # Until all objects have arrived, the target is neither its old content nor the new one.
        target_store.delete(
            [item.target for item in missing if is_published_last(item.target) and item.target in existing]
        )
    for (_, is_large), batch in groupby(sorted(missing, key=_batch_key), key=_batch_key):
        copier.run(copier.copy, list(batch), _LARGE_WORKERS if is_large else _WORKERS)
    copied_bytes = sum(item.source.size for item in missing)
    return TransferReport(len(transfers), copier.total_bytes, len(missing), copied_bytes)


def hash_object(store: Store, item: ObjectInfo, progress: Callable[[int], None] | None = None) -> str:
    """Read an object in the listed version and return the checksum of its content. Call `progress` with the bytes read
    on this thread."""
    hasher = ContentHasher()
    for part in split(item.size, PART_BYTES):
        body = store.get(item.key, part.start, part.stop, etag=item.etag)
        hasher.update(body)
        if progress is not None:
            progress(part.size)
    return hasher.checksum()


def _batch_key(item: Transfer) -> tuple[bool, bool]:
    """Return the batch that an object is copied with; what declares others complete comes last."""
    return is_published_last(item.target), item.source.size > PART_BYTES


def _plan(
    source_store: Store, source: str, target_store: Store, target: str, checksums: Mapping[str, str | None]
) -> list[Transfer]:
    """List the source and name each object's key at the target."""
    source_key, target_key = uris.parse(source).key, uris.parse(target).key
    prefix, root = _as_prefix(source_key), _as_prefix(target_key)
    transfers = []
    for info in source_store.list_folder(prefix):
        name = info.key.removeprefix(prefix)
        if target_store.scheme == "file" and (not uris.stays_below(name) or not all(name.split("/"))):
            raise ConfigError(
                f"the key {name!r} cannot be the path of a file", uri=source, fix="Copy it to a bucket instead"
            )
        transfers.append(Transfer(name, info, root + name, checksums.get(name)))
    contains = root.startswith(prefix) or prefix.startswith(root)
    if not transfers and source_key and not source_key.endswith("/"):
        single = source_store.find(source_key)
        key = _name_single(target_store, target_key, source_key.rpartition("/")[2])
        transfers = [] if single is None else [Transfer("", single, key, None)]
        contains = key == source_key
    is_same_bucket = source_store.root == target_store.root and source_store.endpoint == target_store.endpoint
    if transfers and is_same_bucket and contains:
        raise ConfigError("SRC and DST must not lie in one another", uri=target, fix="Choose another DST")
    return transfers


def _name_single(store: Store, target_key: str, name: str) -> str:
    """Return the key of a single object at the target, which may be a folder to put it into."""
    is_folder = store.scheme == "file" and os.path.isdir(f"/{target_key}")
    if is_folder or not target_key or target_key.endswith("/"):
        return _as_prefix(target_key) + name
    return target_key


def _as_prefix(key: str) -> str:
    return key.rstrip("/") + "/" if key.strip("/") else ""


def _list_existing(store: Store, transfers: Sequence[Transfer], target_key: str) -> dict[str, ObjectInfo]:
    """Return the objects that the target has, by key."""
    if len(transfers) == 1:
        single = store.find(transfers[0].target)
        return {} if single is None else {single.key: single}
    return {info.key: info for info in store.list_folder(_as_prefix(target_key))}


def _may_be_copied(source: ObjectInfo, target: ObjectInfo) -> bool:
    """Return whether the target's object can be a copy of the source's, judged without reading them."""
    if source.size != target.size:
        return False
    tags = [_MD5.fullmatch(info.etag or "") for info in (source, target)]
    if tags[0] is not None and tags[1] is not None:
        return tags[0][1] == tags[1][1]
    if source.modified is None or target.modified is None:
        return True
    written = target.modified
    if not written.microsecond:  # some services tell only the second
        written = written.replace(microsecond=999_999)
    return source.modified <= written


class _CopyStoppedError(Exception):
    """Raised on a thread whose object is not to be finished, because another one failed."""


class _Copier:
    """Runs copies on the threads of the source's store, and counts bytes."""

    def __init__(self, source: Store, target: Store, progress: Callable[[int, int], None]) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._lock = threading.Lock()
        self._stopped = False
        self._done_bytes = 0
        self.total_bytes = 0

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes

    def select_missing(
        self, transfers: Sequence[Transfer], existing: Mapping[str, ObjectInfo], verify: bool
    ) -> list[Transfer]:
        """Return the objects that the target lacks, or has with another content."""
        present = [t for t in transfers if t.target in existing and _may_be_copied(t.source, existing[t.target])]
        if verify:
            equal: list[Transfer] = []

            def compare(item: Transfer) -> None:
                expected = item.checksum or hash_object(self._source, item.source)
                actual = hash_object(self._target, existing[item.target], self._count)
                if actual == expected:
                    equal.append(item)
                else:
                    self._count(-item.source.size)

            same_size = [t for t in transfers if t.target in existing and t.source.size == existing[t.target].size]
            self.run(compare, same_size, _WORKERS)
            present = equal
        else:
            self._count(sum(item.source.size for item in present))
        names = {item.target for item in present}
        return [item for item in transfers if item.target not in names]

    def run(self, work: Callable[[Transfer], None], items: Collection[Transfer], workers: int) -> None:
        """Call `work` with each item on several threads, and report progress on this one. After a failure no further
        item is begun."""
        queue, lock = iter(items), threading.Lock()

        def work_through() -> None:
            try:
                while not self._stopped:
                    with lock:
                        item = next(queue, None)
                    if item is None:
                        return
                    work(item)
            except _CopyStoppedError:
                return
            except BaseException:
                self._stopped = True
                raise

        self._source.open_native()
        self._target.open_native()
        workers = min(workers, self._source.config.max_concurrency, len(items))
        running: set[Future[None]] = {self._source.submit(work_through) for _ in range(workers)}
        try:
            while running:
                done, running = wait(running, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                self._progress(self._done_bytes, self.total_bytes)
        finally:
            self._stopped = bool(running)
            wait(running)

    def copy(self, item: Transfer) -> None:
        """Copy one object; publish it only if its content is the expected one."""
        try:
            if item.source.size <= PART_BYTES:
                self._copy_small(item)
            else:
                self._copy_large(item)
        except ChangedError as error:
            if error.uri != self._source.uri(item.source.key):
                raise
            raise ChangedError(
                "the object changed while it was copied", uri=error.uri, fix="Run the same command again"
            ) from None

    def _copy_small(self, item: Transfer) -> None:
        for _ in range(MAX_READS):
            body = self._source.get_bytes(item.source.key, etag=item.source.etag, size=item.source.size)
            if item.checksum in (None, checksum_content(body)):
                self._target.put(item.target, body)
                self._count(len(body))
                return
        raise self._wrong_content(item)

    def _copy_large(self, item: Transfer) -> None:
        hasher, info = ContentHasher(), item.source
        counted = 0
        try:
            with self._target.open_writer(item.target, size_hint=info.size) as writer:
                spans = iter(split(info.size, PART_BYTES))
                ahead: list[Future[bytes]] = []
                while True:
                    while len(ahead) <= _PARTS_AHEAD and (span := next(spans, None)) is not None:
                        ahead.append(
                            self._source.submit_part(self._source.get, info.key, span.start, span.stop, etag=info.etag)
                        )
                    if not ahead:
                        break
                    body = ahead.pop(0).result()
                    hasher.update(body)
                    writer.write(body)
                    self._count(len(body))
                    counted += len(body)
                    if self._stopped:
                        raise _CopyStoppedError
                if item.checksum not in (None, hasher.checksum()):
                    raise self._wrong_content(item)
        except BaseException:
            self._count(-counted)
            raise

    def _wrong_content(self, item: Transfer) -> StoreError:
        return StoreError(
            "the object has another content than the dataset's index says",
            uri=self._source.uri(item.source.key),
            fix="Copy it to the source again, or run voxlane prepare again",
        )
