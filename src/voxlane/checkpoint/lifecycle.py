"""Managing checkpoints in a bucket: list, find the latest, verify, remove, copy and clean up.

A checkpoint is either one file or a folder that a distributed save wrote. A file is published in one step. A folder is
complete when it has its `.metadata` and every file that `.metadata` names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from voxlane import uri as uris
from voxlane.checkpoint import distributed_metadata as commits
from voxlane.checkpoint.distributed_metadata import DATA_SUFFIX, METADATA, CheckpointFiles
from voxlane.checkpoint.plain import CheckpointWriter
from voxlane.checkpoint.verified_reader import (
    CHECKSUM_SUFFIX,
    SavedContents,
    VerifiedObject,
    open_verified,
    read_contents,
)
from voxlane.checkpoint.writer import ChecksummedWriter
from voxlane.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConfigError,
    IncompleteError,
    NotFoundError,
    VoxlaneError,
)
from voxlane.store import ObjectInfo, Store, StoreConfig
from voxlane.store.uploads import UnfinishedUpload, drop_upload, list_unfinished_uploads

_FILE_SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors")
"""Files that are listed even without checksums beside them."""
LIGHTNING_META = "meta.pt"
"""Lightning's name for the file with everything besides weights and optimizer states. Its own strategies put it beside
a distributed checkpoint."""
_Progress = Callable[[int], None]


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in a bucket, complete or not."""

    store: Store
    key: str
    """Key of the file, or of the folder with a slash at the end."""
    created: datetime
    """When the checkpoint was published or, if it is incomplete, last written to."""
    size: int
    """Size of all its files in bytes."""
    problem: str
    """Why the checkpoint is not complete; empty if it is."""
    files: tuple[str, ...]
    """Keys of its objects; the one that publishes the checkpoint comes first."""
    written_by_voxlane: bool = True
    """Whether voxlane wrote it; other files cannot be known to be complete."""

    @property
    def uri(self) -> str:
        """URI of the checkpoint."""
        return self.store.uri(self.key).rstrip("/")

    @property
    def name(self) -> str:
        """Last path component of the URI."""
        return self.key.rstrip("/").rpartition("/")[2]

    @property
    def is_folder(self) -> bool:
        """Whether a distributed save wrote it."""
        return self.key.endswith("/")

    @property
    def complete(self) -> bool:
        """Whether it is known to be complete."""
        return not self.problem and self.written_by_voxlane

    @property
    def published(self) -> bool:
        """Whether its save finished; a checkpoint that was damaged later is published but not complete."""
        return not self.is_folder or self.key + METADATA in self.files

    @property
    def step(self) -> int | None:
        """Step number in the name: the number after `step`, else the last number."""
        match = re.search(r"step[=_-]?(\d+)", self.name) or re.search(r".*?(\d+)(?!.*\d)", self.name)
        return int(match[1]) if match else None


# -- listing -----------------------------------------------------------------------------------------------------------


def list_checkpoints(uri: str, config: StoreConfig | None = None) -> list[StoredCheckpoint]:
    """Return all checkpoints at or below `uri`, complete or not, oldest first."""
    store, key = Store.locate(uri, config)
    checkpoints = _group_objects(store, _list_objects(store, key))
    # Some services report whole seconds; then names decide, with numbers in them compared as numbers.
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.created, _natural_sort_key(checkpoint.key)))


def latest(uri: str, config: StoreConfig | None = None) -> StoredCheckpoint:
    """Return the complete checkpoint at or below `uri` that was published last; raise IncompleteError if none is."""
    complete = [checkpoint for checkpoint in list_checkpoints(uri, config) if checkpoint.complete]
    if not complete:
        raise commits.no_complete_checkpoint(uri)
    return complete[-1]


def find_checkpoint(uri: str, config: StoreConfig | None = None) -> StoredCheckpoint:
    """Return the checkpoint at `uri`, complete or not; raise NotFoundError if there is none."""
    key = uris.parse(uri).key.rstrip("/")
    for checkpoint in list_checkpoints(uri, config):
        if checkpoint.key.rstrip("/") == key:
            return checkpoint
    raise NotFoundError(
        "no checkpoint of this name", uri=uri, fix="List the checkpoints that exist: voxlane checkpoint ls"
    )


def _list_objects(store: Store, key: str) -> list[ObjectInfo]:
    """Return the object `key` itself, its checksums, and all objects below it."""
    objects: list[ObjectInfo] = []
    if key and not key.endswith("/"):
        objects += filter(None, map(store.find, (key, key + CHECKSUM_SUFFIX)))
        key += "/"
    return [*objects, *store.list_folder(key)]


def _written_at(o: ObjectInfo) -> datetime:
    return o.modified or datetime.now(UTC)


def _group_objects(store: Store, objects: Sequence[ObjectInfo]) -> list[StoredCheckpoint]:
    by_key = {o.key: o for o in objects}
    folders: dict[str, list[ObjectInfo]] = defaultdict(list)
    for o in objects:
        folder, _, name = o.key.rpartition("/")
        if name == METADATA or _is_data_file(name):
            folders[folder + "/" if folder else ""].append(o)
    pending: list[Future[StoredCheckpoint]] = [
        store.submit(_describe_folder, store, folder, files, by_key) for folder, files in folders.items()
    ]
    for o in objects:
        has_checksums = o.key + CHECKSUM_SUFFIX in by_key
        folder = o.key.rpartition("/")[0] + "/"
        is_part = folder + METADATA in by_key  # such as the meta.pt of Lightning's own strategies
        if has_checksums or (o.key.endswith(_FILE_SUFFIXES) and not is_part):
            pending.append(store.submit(_describe_file, store, o, has_checksums))
    return [future.result() for future in pending]


def _describe_file(store: Store, o: ObjectInfo, has_checksums: bool) -> StoredCheckpoint:
    files = (o.key, o.key + CHECKSUM_SUFFIX) if has_checksums else (o.key,)
    problem = ""
    try:
        contents = read_contents(store, o.key) if has_checksums else SavedContents()
        sizes = [checksums.size for checksums in contents.checksums]
        if sizes and not contents.unknown_etags and o.size not in sizes:
            problem = f"has {o.size:,} bytes, {sizes[-1]:,} were written"
    except CheckpointError as error:
        problem = str(error)
    return StoredCheckpoint(store, o.key, _written_at(o), o.size, problem, files, written_by_voxlane=has_checksums)


def _describe_folder(
    store: Store, folder: str, stored: Sequence[ObjectInfo], by_key: dict[str, ObjectInfo]
) -> StoredCheckpoint:
    commit = by_key.get(folder + METADATA)
    all_keys = tuple(sorted((o.key for o in stored), key=lambda key: key != folder + METADATA))
    stored_bytes = sum(o.size for o in stored)
    if commit is None:
        newest = max(_written_at(o) for o in stored)
        return StoredCheckpoint(store, folder, newest, stored_bytes, "never published", all_keys)
    published = _written_at(commit)
    try:
        metadata, files = commits.read(store, folder)
    except CheckpointError as error:
        return StoredCheckpoint(store, folder, published, stored_bytes, str(error), all_keys)
    sizes = {folder + path: size for path, size in commits.file_sizes(metadata, files).items()}
    keys = (folder + METADATA, *sizes)
    if files is None and folder + LIGHTNING_META in by_key:
        keys = (*keys, folder + LIGHTNING_META)
    problems = []
    for key, size in sizes.items():
        o = by_key.get(key)
        if o is None:
            problems.append(f"{key.rpartition('/')[2]} is gone")
        elif o.size < size or (files is not None and o.size != size):
            problems.append(f"{key.rpartition('/')[2]} has {o.size:,} bytes, {size:,} were written")
    total_bytes = commit.size + sum(sizes.values())
    return StoredCheckpoint(store, folder, published, total_bytes, problems[0] if problems else "", keys)


def _natural_sort_key(text: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", text) if p]


# -- verifying ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifyReport:
    """Result of reading every byte of a checkpoint."""

    problems: tuple[str, ...]
    """One line for each damaged object, with its name; empty if the checkpoint is intact."""
    unchecked: tuple[str, ...]
    """Keys of objects that could be read but have no checksums."""


def verify(checkpoint: StoredCheckpoint, progress: _Progress | None = None) -> VerifyReport:
    """Read every byte of a checkpoint and compare it with its checksums. `progress` is called with the bytes just
    read."""
    if checkpoint.problem:
        return VerifyReport((f"{checkpoint.uri}: {checkpoint.problem}",), ())
    problems: list[str] = []
    unchecked: list[str] = []
    for source in _open_sources(checkpoint, problems):
        try:
            for block in source.read_blocks():
                if progress is not None:
                    progress(len(block))
            if not source.contents:
                unchecked.append(source.info.key)
        except VoxlaneError as error:
            problems.append(str(error))
    return VerifyReport(tuple(problems), tuple(unchecked))


def _open_sources(checkpoint: StoredCheckpoint, problems: list[str]) -> list[VerifiedObject]:
    """Open the data files of a checkpoint; append a line to `problems` for each that cannot be opened."""
    store = checkpoint.store
    sources = []
    files: CheckpointFiles | None = None
    if checkpoint.is_folder:
        _, files = commits.read(store, checkpoint.key)
    for key in checkpoint.files:
        if key.endswith(("/" + METADATA, CHECKSUM_SUFFIX)) or key == METADATA:
            continue  # already read and verified
        try:
            if checkpoint.is_folder:
                contents = [files.checksums[key.removeprefix(checkpoint.key)]] if files is not None else []
                sources.append(VerifiedObject(store, store.head(key), contents))
            else:
                sources.append(open_verified(store, key))
        except VoxlaneError as error:
            problems.append(str(error))
    return sources


# -- removing ----------------------------------------------------------------------------------------------------------


def remove_checkpoint(checkpoint: StoredCheckpoint) -> None:
    """Delete a checkpoint, beginning with the object that publishes it, so that an interrupted removal leaves orphans
    and never half a checkpoint."""
    first, *rest = checkpoint.files
    checkpoint.store.delete_one(first)
    checkpoint.store.delete(rest)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints to keep."""

    keep_last: int = 3
    """Number of newest checkpoints to keep; at least 1."""
    keep_every: int | None = None
    """Also keep checkpoints whose step is a multiple of this."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ConfigError(f"keep_last must be at least 1, got {self.keep_last}", fix="Keep at least the last one")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every must be at least 1, got {self.keep_every}")

    def surplus(self, checkpoints: Sequence[StoredCheckpoint]) -> list[StoredCheckpoint]:
        """Return the checkpoints to remove from `checkpoints`, which are ordered by age. Incomplete ones are neither
        counted nor removed: gc removes them."""
        older = [c for c in checkpoints if c.complete][: -self.keep_last]
        if self.keep_every is None:
            return older
        return [c for c in older if c.step is not None and c.step % self.keep_every]


def prune(uri: str, retention: Retention, config: StoreConfig | None = None) -> list[StoredCheckpoint]:
    """Remove the checkpoints below `uri` that `retention` does not keep; return the removed ones."""
    surplus = retention.surplus(list_checkpoints(uri, config))
    for checkpoint in surplus:
        remove_checkpoint(checkpoint)
    return surplus


@dataclass(frozen=True)
class Orphans:
    """Uploads and objects that belong to no checkpoint, left by saves that were killed or interrupted."""

    store: Store
    uploads: tuple[UnfinishedUpload, ...]
    """Uploads that were started and never finished."""
    objects: tuple[ObjectInfo, ...]
    """Data files that no published checkpoint names, and checksums of files that do not exist."""
    younger: int
    """Number of further orphans that a running save may still use."""

    def __len__(self) -> int:
        return len(self.uploads) + len(self.objects)

    def remove(self) -> None:
        """Delete all of them."""
        for upload in self.uploads:
            drop_upload(self.store, upload)
        self.store.delete([o.key for o in self.objects])


def find_orphans(uri: str, config: StoreConfig | None = None, *, older_than_s: float = 86_400.0) -> Orphans:
    """Return the uploads and objects at or below `uri` that belong to no checkpoint and were last written at least
    `older_than_s` ago. The files of a save that is still running look the same, so do not choose too short a time."""
    store, key = Store.locate(uri, config)
    # Uploads are listed before objects, so that an upload that finishes meanwhile is seen as an object.
    uploads = _find_unfinished_uploads(store, key)
    objects = _find_orphaned_objects(store, key)
    # The files of a folder belong to one save: while the newest is young, none of them is abandoned.
    last_write: dict[str, datetime] = {}
    for o in objects:
        folder = o.key.rpartition("/")[0]
        last_write[folder] = max(last_write.get(folder, _written_at(o)), _written_at(o))
    # A server's clock may be ahead of ours, so an age of 0 means all.
    before = datetime.now(UTC) - timedelta(seconds=older_than_s) if older_than_s else datetime.max.replace(tzinfo=UTC)
    old_objects = tuple(o for o in objects if last_write[o.key.rpartition("/")[0]] <= before)
    old_uploads = tuple(u for u in uploads if u.started <= before)
    younger = len(objects) + len(uploads) - len(old_objects) - len(old_uploads)
    return Orphans(store, old_uploads, old_objects, younger)


def _find_unfinished_uploads(store: Store, key: str) -> list[UnfinishedUpload]:
    """Return the unfinished uploads of `key` and of keys below it."""
    folder = key if not key or key.endswith("/") else key + "/"
    uploads = [u for u in list_unfinished_uploads(store, key) if u.key == key or u.key.startswith(folder)]
    if store.scheme == "file":  # on disk only the name tells whether a temporary file belongs to a checkpoint
        return [u for u in uploads if _is_data_file(u.key) or u.key.endswith(_FILE_SUFFIXES)]
    return uploads


def _find_orphaned_objects(store: Store, key: str) -> list[ObjectInfo]:
    """Return the data and checksum files at or below `key` that belong to no published checkpoint."""
    objects = _list_objects(store, key)
    by_key = {o.key: o for o in objects}
    checkpoints = _group_objects(store, objects)
    owned = {key for checkpoint in checkpoints if checkpoint.published for key in checkpoint.files}
    unowned = [o for o in objects if o.key not in owned]
    return [o for o in unowned if _is_data_file(o.key) or _is_stray_checksum_file(store, o.key, by_key)]


def _is_data_file(key: str) -> bool:
    """Return whether only distributed saves write such files: `__3_0.5f0c.distcp`, `meta.pt.5f0c.attached`."""
    return key.endswith(DATA_SUFFIX) or commits.is_attachment(key)


def _is_stray_checksum_file(store: Store, key: str, by_key: dict[str, ObjectInfo]) -> bool:
    """Return whether voxlane wrote this checksum file and the file it belongs to does not exist."""
    if not key.endswith(CHECKSUM_SUFFIX) or key.removesuffix(CHECKSUM_SUFFIX) in by_key:
        return False
    try:
        return bool(read_contents(store, key.removesuffix(CHECKSUM_SUFFIX)).checksums)
    except CheckpointError:
        return False  # voxlane did not write it


# -- copying -----------------------------------------------------------------------------------------------------------


def copy_checkpoint(
    checkpoint: StoredCheckpoint, target: str, config: StoreConfig | None = None, progress: _Progress | None = None
) -> StoredCheckpoint:
    """Copy a complete checkpoint to another URI in any bucket and verify every byte. The object that publishes the copy
    is written last. Existing checkpoints are not overwritten."""
    if checkpoint.problem:
        raise IncompleteError(
            f"the checkpoint is not complete: {checkpoint.problem}", uri=checkpoint.uri, fix="Copy another checkpoint"
        )
    store, key = Store.locate(target, config)
    key = key.rstrip("/") + ("/" if checkpoint.is_folder else "")
    published = key + METADATA if checkpoint.is_folder else key
    store.check_writable(published)
    if store.exists(published):
        raise AlreadyExistsError("a checkpoint exists already", uri=target, fix="Choose another name, or remove it")
    problems: list[str] = []
    sources = _open_sources(checkpoint, problems)
    if problems:
        raise CheckpointError(problems[0])
    for source in sources:
        path = source.info.key.removeprefix(checkpoint.key) if checkpoint.is_folder else ""
        writer = ChecksummedWriter if checkpoint.is_folder else CheckpointWriter
        with writer(store, key + path, source.info.size) as file:
            for block in source.read_blocks():
                file.write(block)
                if progress is not None:
                    progress(len(block))
    if checkpoint.is_folder:
        commit = checkpoint.store.get(checkpoint.key + METADATA)
        store.put(published, commit, if_absent=True)
    return find_checkpoint(target, config)
