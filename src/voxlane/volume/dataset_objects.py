"""Whether a prepared dataset is complete, and copies of it: every object against the index."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace

from voxlane import uri as uris
from voxlane.errors import NotFoundError, PreparedError
from voxlane.store import ObjectInfo, Store, StoreConfig
from voxlane.store.listing import list_objects
from voxlane.store.staging.sources import RECORDS, strip_quotes
from voxlane.store.transfer import TransferReport, copy_objects, hash_object
from voxlane.volume.dataset_index import OBJECT_LISTS, StoredObject
from voxlane.volume.prepared_dataset import COPY_AGAIN, HEADER, Prepared, as_prefix

_TABLES = "cases-*.parquet"
_NOT_COPIED = ("work/", "lease.json", f"{RECORDS}/")
"""What belongs to the preparation, or to a staged copy, and not to the dataset."""
_SMALL_BYTES = 1 << 20
"""Objects up to this size are read on many threads, larger ones on few."""
_NAMED = 20
"""Objects of one kind that a report names."""


@dataclass(frozen=True)
class DatasetContents:
    """The objects of a prepared dataset compared with its index. Lists hold keys below the dataset, in order."""

    objects: int
    """Objects that the index names."""
    total_bytes: int
    """Size of these objects in bytes."""
    missing: list[str]
    wrong_size: list[str]
    wrong_content: list[str]
    """Objects of the right size and another content; without reading them, those of format 1 with another version."""
    extra: list[str]
    """Objects among those of the cases that the index does not name; harmless."""

    @property
    def problem(self) -> str:
        """What is wrong, in a few words; empty if nothing is."""
        kinds = (
            ("missing", self.missing),
            ("of another size", self.wrong_size),
            ("of another content", self.wrong_content),
        )
        parts = [f"{len(names):,} {kind}" for kind, names in kinds if names]
        if not parts:
            return ""
        first = next(names[0] for _, names in kinds if names)
        return f"of {self.objects:,} objects, {', '.join(parts)}, such as {first}"

    def format(self) -> str:
        """Return one line for each problem and each extra object, at most 20 of a kind."""
        lines = []
        for kind in ("missing", "wrong_size", "wrong_content", "extra"):
            names: list[str] = getattr(self, kind)
            lines += [f"{kind.replace('_', ' '):<14}{name}" for name in names[:_NAMED]]
            lines += [f"{'':<14}and {len(names) - _NAMED:,} more"] if len(names) > _NAMED else []
        return "\n".join(lines)


def compare_contents(
    prepared: Prepared,
    *,
    read: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetContents:
    """List the dataset and compare names and sizes with its index; with `read`, read every byte and compare contents.

    progress: called with the bytes read so far and their total, on this thread.
    """
    store, prefix = Store(prepared.uri, prepared.config), as_prefix(uris.parse(prepared.uri).key)
    listed = list_objects(store.uri(prefix), store=store, progress=False)
    stored = {entry.key.removeprefix(prefix): entry for entry in listed}
    # `voxlane stage` copies only what training reads.
    has_documents = any(key.endswith("/zarr.json") for key in stored)
    lists = OBJECT_LISTS if has_documents else OBJECT_LISTS[:1]
    expected = {item.key: item for item in (*prepared.index, *prepared.objects(lists))}
    present = [item for key, item in expected.items() if key in stored]
    same_size = [item for item in present if item.size == stored[item.key].size]
    wrong_content = {item.key for item in same_size if not _has_required_etag(item, stored[item.key])}
    if read:
        wrong_content |= _find_wrong_contents(store, same_size, stored, progress)
    return DatasetContents(
        objects=len(expected),
        total_bytes=sum(item.size for item in expected.values()),
        missing=sorted(expected.keys() - stored.keys()),
        wrong_size=sorted({item.key for item in present} - {item.key for item in same_size}),
        wrong_content=sorted(wrong_content),
        extra=sorted(key for key in stored.keys() - expected.keys() if _is_data(key, prepared)),
    )


def _has_required_etag(item: StoredObject, stored: ObjectInfo) -> bool:
    """Return whether an object is the required version; those with checksums may have any."""
    return item.required_etag is None or strip_quotes(item.required_etag) == strip_quotes(stored.etag)


def load_if_prepared(uri: str, config: StoreConfig | None = None) -> Prepared | None:
    """Load the prepared dataset at `uri`; return None if there are only other objects. Raise PreparedError for one that
    is damaged or incomplete."""
    store, prefix = Store(uri, config), as_prefix(uris.parse(uri).key)
    if not store.exists(prefix + HEADER) and next(iter(store.list_pages(f"{prefix}cases-")), None) is None:
        return None
    return Prepared.load(uri, config)


def check_complete(prepared: Prepared) -> None:
    """Raise PreparedError if objects are missing or have another size than the index says; read none of them."""
    if problem := compare_contents(prepared).problem:
        raise PreparedError(f"the dataset is incomplete: {problem}", uri=prepared.uri, fix=COPY_AGAIN)


def _is_data(key: str, prepared: Prepared) -> bool:
    """Return whether an object that the index does not name lies where only objects of the dataset are."""
    is_document = prepared.format == 1 and key.endswith("zarr.json")  # format 1 does not list them
    return (key.startswith("cases/") and not is_document) or fnmatch.fnmatch(key, _TABLES)


def _find_wrong_contents(
    store: Store,
    items: Sequence[StoredObject],
    stored: Mapping[str, ObjectInfo],
    progress: Callable[[int, int], None] | None,
) -> set[str]:
    """Read objects completely, many at once, and return the keys of those whose content is not the expected one."""
    checksummed = [item for item in items if item.checksum is not None]
    total, done, wrong = sum(item.size for item in checksummed), 0, set[str]()
    pending = {}
    for item in checksummed:
        submit = store.submit if item.size <= _SMALL_BYTES else store.submit_part  # limits the memory for their parts
        pending[submit(hash_object, store, stored[item.key])] = item
    try:
        for future in as_completed(pending):
            item = pending[future]
            try:
                is_wrong = future.result() != item.checksum
            except NotFoundError:  # deleted since it was listed
                is_wrong = True
            wrong |= {item.key} if is_wrong else set()
            done += item.size
            if progress is not None:
                progress(done, total)
    finally:
        for future in pending:
            future.cancel()
    return wrong


def copy_dataset(
    prepared: Prepared,
    target: str,
    target_config: StoreConfig | None = None,
    *,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> TransferReport:
    """Copy a dataset and compare every byte with its index; the header is written last. Objects that an earlier copy
    wrote are kept; with `verify` they are read and compared too."""
    if prepared.format == 1:
        raise PreparedError(
            "an earlier version of voxlane prepared the dataset and stored no checksums, so no copy can be verified",
            uri=prepared.uri,
            fix="Run voxlane prepare again",
        )
    config = target_config or prepared.config
    _check_target(prepared, target, config)
    check_complete(prepared)
    items = [*prepared.index, *prepared.objects(OBJECT_LISTS)]
    report = copy_objects(
        prepared.uri,
        target,
        prepared.config,
        target_config=config,
        checksums={item.key: item.checksum for item in items},
        skip=lambda name: name.startswith(_NOT_COPIED),
        verify=verify,
        progress=progress,
    )
    check_complete(replace(prepared, uri=Prepared.load(target, config).uri, config=config))
    return report


def _check_target(prepared: Prepared, target: str, config: StoreConfig | None) -> None:
    """Raise if the target holds another dataset, because runs may be using it."""
    store, prefix = Store(target, config), as_prefix(uris.parse(target).key)
    if not store.exists(prefix + HEADER):
        return
    try:
        other = Prepared.load(target, config)
    except PreparedError:
        return  # damaged, or its table has not arrived: the copy repairs it
    if other.digest != prepared.digest:
        raise PreparedError(
            f"DST already holds another dataset: {other.description.name} of {len(other)} cases",
            uri=other.uri,
            fix="Choose another DST, or delete this one first",
        )
