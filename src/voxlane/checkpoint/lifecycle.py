"""The life of checkpoints in a bucket: what is there, which is the latest, is it sound, remove, copy, clean up.

A checkpoint is either one file, or a folder that a distributed save wrote. A file is published in one step; a
folder is complete when it has its `.metadata` and every file which that names. Nothing else counts.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from voxlane import uri as uris
from voxlane.checkpoint import distributed_metadata as commits
from voxlane.checkpoint.distributed_metadata import DATA_SUFFIX, METADATA, Files
from voxlane.checkpoint.plain import CheckpointWriter
from voxlane.checkpoint.reader import RangedReader
from voxlane.checkpoint.source import SUMS_SUFFIX, Contents, Source, open_source, read_contents
from voxlane.checkpoint.writer import SummedWriter
from voxlane.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConfigError,
    IncompleteError,
    NotFoundError,
    VoxlaneError,
)
from voxlane.store import ObjectInfo, Store, StoreConfig
from voxlane.store.uploads import OpenUpload, drop_upload, open_uploads

_FILE_SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors")
"""Files that are listed even without checksums beside them."""
LIGHTNING_META = "meta.pt"
"""What Lightning's own strategies put beside a distributed checkpoint."""
_Progress = Callable[[int], None]


@dataclass(frozen=True)
class StoredObject:
    """One object of a listing."""

    key: str
    size: int
    modified: datetime


@dataclass(frozen=True)
class Found:
    """A checkpoint, or what was to become one."""

    store: Store
    key: str
    """Of the file, or of the folder, ending in a slash."""
    created: datetime
    """When it was published; of an incomplete one, when it was last written to."""
    size: int
    """Bytes of all its files."""
    problem: str
    """Why it is not complete; empty if it is."""
    files: tuple[str, ...]
    """The keys it is made of, the one that publishes it first."""
    is_ours: bool = True
    """Whether voxlane wrote it: of other files nobody knows if they are whole."""

    @property
    def uri(self) -> str:
        """Where it is."""
        return self.store.uri(self.key).rstrip("/")

    @property
    def name(self) -> str:
        """Its last path component."""
        return self.key.rstrip("/").rpartition("/")[2]

    @property
    def is_folder(self) -> bool:
        """Whether a distributed save wrote it."""
        return self.key.endswith("/")

    @property
    def complete(self) -> bool:
        """Whether it is known to be whole."""
        return not self.problem and self.is_ours

    @property
    def published(self) -> bool:
        """Whether its save ended; one that was damaged later is published and not complete."""
        return not self.is_folder or self.key + METADATA in self.files

    @property
    def step(self) -> int | None:
        """The step in its name: the number after `step`, else the last number."""
        match = re.search(r"step[=_-]?(\d+)", self.name) or re.search(r".*?(\d+)(?!.*\d)", self.name)
        return int(match[1]) if match else None


# -- looking -----------------------------------------------------------------------------------------------------------


def list_checkpoints(uri: str, config: StoreConfig | None = None) -> list[Found]:
    """Everything at or below `uri` that is a checkpoint or was to become one, oldest first."""
    parsed = uris.parse(uri)
    store = Store(str(parsed), config)
    return _order(_group(store, _objects(store, parsed.key)))


def latest(uri: str, config: StoreConfig | None = None) -> Found:
    """The checkpoint at or below `uri` that was published last and is complete; IncompleteError if there is none."""
    found = [checkpoint for checkpoint in list_checkpoints(uri, config) if checkpoint.complete]
    if not found:
        raise IncompleteError("no complete checkpoint here", uri=uri, fix="See what there is: voxlane checkpoint ls")
    return found[-1]


def find(uri: str, config: StoreConfig | None = None) -> Found:
    """The one checkpoint at `uri`, complete or not."""
    wanted = uris.parse(uri).key.rstrip("/")
    for checkpoint in list_checkpoints(uri, config):
        if checkpoint.key.rstrip("/") == wanted:
            return checkpoint
    raise NotFoundError("no checkpoint of this name", uri=uri, fix="See what there is: voxlane checkpoint ls")


def _objects(store: Store, key: str) -> list[StoredObject]:
    """The object `key` itself, its checksums, and what lies below it."""
    objects = []
    if key and not key.endswith("/"):
        for name in (key, key + SUMS_SUFFIX):
            with contextlib.suppress(NotFoundError):
                info = store.head(name)
                objects.append(StoredObject(name, info.size, info.modified or datetime.now(UTC)))
        key += "/"
    for page in store.list_pages(key):
        columns = (page.column(name).to_pylist() for name in ("path", "size", "last_modified"))
        objects += [StoredObject(*row) for row in zip(*columns, strict=True)]
    return objects


def _group(store: Store, objects: Sequence[StoredObject]) -> list[Found]:
    by_key = {o.key: o for o in objects}
    folders: dict[str, list[StoredObject]] = defaultdict(list)
    for o in objects:
        folder, _, name = o.key.rpartition("/")
        if name == METADATA or _is_data(name):
            folders[folder + "/" if folder else ""].append(o)
    pending: list[Future[Found]] = [
        store.submit(_folder_checkpoint, store, folder, files, by_key) for folder, files in folders.items()
    ]
    for o in objects:
        has_sums = o.key + SUMS_SUFFIX in by_key
        folder = o.key.rpartition("/")[0] + "/"
        is_part = folder + METADATA in by_key  # such as the meta.pt of Lightning's own strategies
        if has_sums or (o.key.endswith(_FILE_SUFFIXES) and not is_part):
            pending.append(store.submit(_file_checkpoint, store, o, has_sums))
    return [future.result() for future in pending]


def _file_checkpoint(store: Store, o: StoredObject, has_sums: bool) -> Found:
    files = (o.key, o.key + SUMS_SUFFIX) if has_sums else (o.key,)
    problem = ""
    try:
        contents = read_contents(store, o.key) if has_sums else Contents()
        if contents.sums and not contents.unknown_etags and o.size not in {sums.size for sums in contents.sums}:
            problem = f"has {o.size:,} bytes, {contents.sums[-1].size:,} were written"
    except CheckpointError as error:
        problem = str(error)
    return Found(store, o.key, o.modified, o.size, problem, files, is_ours=has_sums)


def _folder_checkpoint(
    store: Store, folder: str, stored: Sequence[StoredObject], by_key: dict[str, StoredObject]
) -> Found:
    commit = by_key.get(folder + METADATA)
    newest = max(o.modified for o in stored)
    everything = tuple(sorted((o.key for o in stored), key=lambda key: key != folder + METADATA))
    if commit is None:
        return Found(store, folder, newest, sum(o.size for o in stored), "never published", everything)
    try:
        metadata, files = commits.read(store, folder)
    except CheckpointError as error:
        return Found(store, folder, commit.modified, sum(o.size for o in stored), str(error), everything)
    sizes = {folder + path: size for path, size in commits.file_sizes(metadata, files).items()}
    keys = (folder + METADATA, *sizes)
    if files is None and folder + LIGHTNING_META in by_key:
        keys = (*keys, folder + LIGHTNING_META)
    problem = next((text for key, size in sizes.items() if (text := _missing(by_key, key, size, files))), "")
    return Found(store, folder, commit.modified, commit.size + sum(sizes.values()), problem, keys)


def _missing(by_key: dict[str, StoredObject], key: str, size: int, files: Files | None) -> str:
    """What is wrong with one file, as far as a listing tells."""
    o = by_key.get(key)
    if o is None:
        return f"{key.rpartition('/')[2]} is gone"
    if o.size < size or (files is not None and o.size != size):
        return f"{key.rpartition('/')[2]} has {o.size:,} bytes, {size:,} were written"
    return ""


def _order(found: Iterable[Found]) -> list[Found]:
    """Oldest first. Some services give whole seconds: then names decide between neighbours, numbers in them as
    numbers."""
    return sorted(found, key=lambda f: (f.created, _natural(f.key)))


def _natural(text: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", text) if p]


# -- checking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What reading every byte of a checkpoint showed."""

    problems: tuple[str, ...]
    """One line a damaged object, naming it; empty if all is well."""
    unchecked: tuple[str, ...]
    """Keys that could be read but have no checksums to compare with."""


def verify(checkpoint: Found, progress: _Progress | None = None) -> Verdict:
    """Read every byte of a checkpoint and compare with its checksums. `progress` is called with bytes done."""
    if checkpoint.problem:
        return Verdict((f"{checkpoint.uri}: {checkpoint.problem}",), ())
    problems: list[str] = []
    unchecked: list[str] = []
    for source in _sources(checkpoint, problems):
        if not source.checked:
            unchecked.append(source.info.key)
        try:
            _read_all(source, progress)
        except VoxlaneError as error:
            problems.append(str(error))
    return Verdict(tuple(problems), tuple(unchecked))


def _sources(checkpoint: Found, problems: list[str]) -> list[Source]:
    store = checkpoint.store
    sources = []
    files: Files | None = None
    if checkpoint.is_folder:
        _, files = commits.read(store, checkpoint.key)
    for key in checkpoint.files:
        if key.endswith(("/" + METADATA, SUMS_SUFFIX)) or key == METADATA:
            continue  # read, and checked, on the way here
        try:
            if files is not None:
                sources.append(Source(store, store.head(key), [files.sums[key.removeprefix(checkpoint.key)]]))
            elif checkpoint.is_folder:
                sources.append(Source(store, store.head(key)))
            else:
                sources.append(open_source(store, key))
        except VoxlaneError as error:
            problems.append(str(error))
    return sources


def _read_all(source: Source, progress: _Progress | None) -> None:
    step = source.request_bytes
    size = source.info.size
    # A few at a time: what was read is dropped at once, and memory stays bounded.
    spans = [(at, min(at + step, size)) for at in range(0, size, step)]
    for at in range(0, len(spans), source.store.config.max_parts):
        batch = spans[at : at + source.store.config.max_parts]
        futures = [source.store.submit_part(_read_span, source, a, b) for a, b in batch]
        for future, (a, b) in zip(futures, batch, strict=True):
            future.result()
            if progress is not None:
                progress(b - a)


def _read_span(source: Source, start: int, stop: int) -> None:
    source.read_into(start, np.empty(stop - start, np.uint8))


# -- removing ----------------------------------------------------------------------------------------------------------


def remove(checkpoint: Found) -> None:
    """Delete a checkpoint, what publishes it first: a removal that is cut short leaves orphans, never half of one."""
    first, *rest = checkpoint.files
    checkpoint.store.delete_one(first)
    checkpoint.store.delete(rest)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints to keep."""

    keep_last: int = 3
    """The newest so many; at least 1."""
    keep_every: int | None = None
    """Also those whose step is a multiple of this."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ConfigError(f"keep_last is {self.keep_last}", fix="Keep at least the last one")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every is {self.keep_every}", fix="Give 1 or more")

    def surplus(self, checkpoints: Sequence[Found]) -> list[Found]:
        """Of checkpoints in order of age, those to remove. Incomplete ones neither count nor go: gc takes them."""
        complete = [c for c in checkpoints if c.complete]
        return [c for c in complete[: -self.keep_last] if not self._is_milestone(c)]

    def _is_milestone(self, checkpoint: Found) -> bool:
        if self.keep_every is None:
            return False
        return checkpoint.step is None or checkpoint.step % self.keep_every == 0


def prune(uri: str, retention: Retention, config: StoreConfig | None = None) -> list[Found]:
    """Remove what `retention` does not keep of the checkpoints below `uri`; returns what was removed."""
    surplus = retention.surplus(list_checkpoints(uri, config))
    for checkpoint in surplus:
        remove(checkpoint)
    return surplus


@dataclass(frozen=True)
class Orphans:
    """What belongs to no checkpoint: left by saves that were killed or cut short."""

    store: Store
    uploads: tuple[OpenUpload, ...]
    """Uploads that were begun and never finished."""
    objects: tuple[StoredObject, ...]
    """Data files that no published checkpoint names, and checksums of files that are not there."""
    younger: int
    """How many more there are that a save may still be at work on."""

    def __len__(self) -> int:
        return len(self.uploads) + len(self.objects)

    def remove(self) -> None:
        """Delete them all."""
        for upload in self.uploads:
            drop_upload(self.store, upload)
        self.store.delete([o.key for o in self.objects])


def find_orphans(uri: str, config: StoreConfig | None = None, *, older_than_s: float = 86_400.0) -> Orphans:
    """Everything at or below `uri` that belongs to no checkpoint and was last touched `older_than_s` ago or earlier; a
    save that is still running looks the same, so give it time."""
    parsed = uris.parse(uri)
    store = Store(str(parsed), config)
    # Uploads before objects: one that is finished in between then counts as an object of its checkpoint.
    below = parsed.key if not parsed.key or parsed.key.endswith("/") else parsed.key + "/"
    uploads = [u for u in open_uploads(store, parsed.key) if u.key == parsed.key or u.key.startswith(below)]
    if store.scheme == "file":  # there only a name tells them
        uploads = [u for u in uploads if _is_data(u.key) or u.key.endswith(_FILE_SUFFIXES)]
    objects = _objects(store, parsed.key)
    by_key = {o.key: o for o in objects}
    owned = {key for found in _group(store, objects) if found.published for key in found.files}
    orphans = [o for o in objects if o.key not in owned and (_is_data(o.key) or _is_stray_sums(store, o.key, by_key))]
    # A folder's files are one save's: while the newest is young, none of them is abandoned.
    last_touch: dict[str, datetime] = {}
    for o in orphans:
        folder = o.key.rpartition("/")[0]
        last_touch[folder] = max(last_touch.get(folder, o.modified), o.modified)
    before = datetime.now(UTC) - timedelta(seconds=older_than_s)
    old_objects = [o for o in orphans if last_touch[o.key.rpartition("/")[0]] <= before or older_than_s == 0]
    old_uploads = [u for u in uploads if u.started <= before or older_than_s == 0]
    younger = len(orphans) + len(uploads) - len(old_objects) - len(old_uploads)
    return Orphans(store, tuple(old_uploads), tuple(old_objects), younger)


def _is_data(key: str) -> bool:
    """Files that only a distributed save writes: `__3_0.5f0c.distcp` and attachments, `meta.pt.5f0c.attached`."""
    return key.endswith(DATA_SUFFIX) or commits.is_attachment(key)


def _is_stray_sums(store: Store, key: str, by_key: dict[str, StoredObject]) -> bool:
    """Whether these are checksums that we wrote, of a file that is not there."""
    if not key.endswith(SUMS_SUFFIX) or key.removesuffix(SUMS_SUFFIX) in by_key:
        return False
    try:
        return bool(read_contents(store, key.removesuffix(SUMS_SUFFIX)).sums)
    except CheckpointError:
        return False  # somebody else's


# -- copying -----------------------------------------------------------------------------------------------------------


def copy(checkpoint: Found, target: str, config: StoreConfig | None = None, progress: _Progress | None = None) -> Found:
    """Copy a complete checkpoint to another URI, in any bucket, checking every byte on the way; what publishes it is
    written last. Refuses to write over anything."""
    if checkpoint.problem:
        raise IncompleteError(f"not complete: {checkpoint.problem}", uri=checkpoint.uri, fix="Copy another one")
    parsed = uris.parse(target)
    key = parsed.key.rstrip("/") + ("/" if checkpoint.is_folder else "")
    store = Store(str(parsed), config)
    published = key + METADATA if checkpoint.is_folder else key
    store.check_writable(published)
    if store.exists(published):
        raise AlreadyExistsError("there is a checkpoint already", uri=target, fix="Choose another name, or remove it")
    problems: list[str] = []
    sources = _sources(checkpoint, problems)
    if problems:
        raise CheckpointError(problems[0])
    for source in sources:
        path = source.info.key.removeprefix(checkpoint.key) if checkpoint.is_folder else ""
        writer = SummedWriter if checkpoint.is_folder else CheckpointWriter
        _copy_file(source, writer(store, key + path, source.info.size), progress)
    if checkpoint.is_folder:
        commit = checkpoint.store.get(checkpoint.key + METADATA)
        store.put(published, commit, if_absent=True)
    return find(target, config)


def _copy_file(source: Source, target: SummedWriter, progress: _Progress | None) -> ObjectInfo:
    with RangedReader(source) as file, target:
        while block := file.read(source.request_bytes):
            target.write(block)
            if progress is not None:
                progress(len(block))
        return target.commit()
