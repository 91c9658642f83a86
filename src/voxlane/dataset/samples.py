"""Samples: each is one object of a source, or one object of each of several sources that are matched by key."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch.utils.data import get_worker_info

from voxlane.dataset.cache import DiskCache
from voxlane.dataset.compose import DEFAULT_MAX_BYTES, Composer
from voxlane.dataset.order import Positions
from voxlane.dataset.prefetch import WindowTuner
from voxlane.dataset.reading import ObjectReader, PendingObject
from voxlane.dataset.shared_counters import SharedCounters
from voxlane.distributed import run_on_rank_zero
from voxlane.errors import ConfigError, DecodeError, EmptyError, PairError, VoxlaneError
from voxlane.store import Store, StoreConfig
from voxlane.store.listing import Entry, Manifest, list_objects
from voxlane.store.private_folder import make_private_folder
from voxlane.uri import StrPath

Compose = Literal["off", "on", "auto"]
"""Whether small objects of a GCS bucket are joined on the server. "auto" follows our measurements, in which it never
helped (docs/composed-download.md)."""
Decode = Callable[[bytes], Any]
READ_AHEAD_BYTES = 256 << 20
"""Default number of bytes that a stream has being fetched or waiting."""


def list_once(
    uri: str, *, match: str | Sequence[str] | None = None, config: StoreConfig | None = None, concurrency: int = 64
) -> Manifest:
    """List `uri` on rank 0 and return the manifest on every rank. This is a collective call: all ranks must make it.
    Without an initialised process group it just lists. If rank 0 fails, every rank raises its error."""
    return run_on_rank_zero(lambda: list_objects(uri, match=match, config=config, concurrency=concurrency))


class SampleSource:
    """One URI or manifest and how to read it. Constructed without I/O; lists and opens on first use in each process."""

    _may_be_empty = False
    """Whether a listing without objects is a dataset without samples instead of an error."""

    def __init__(
        self,
        source: StrPath | Manifest,
        *,
        decode: Decode | None = None,
        match: str | Sequence[str] | None = None,
        config: StoreConfig | None = None,
        cache: StrPath | None = None,
        cache_bytes: int = 100 << 30,
        compose: Compose = "auto",
        compose_max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        if compose not in ("off", "on", "auto"):
            raise ConfigError(f'compose must be "off", "on" or "auto", got {compose!r}')
        if not isinstance(source, str | os.PathLike | Manifest):
            raise ConfigError(f"the source of a dataset must be a URI, a path or a Manifest, got {source!r}")
        are_patterns = isinstance(match, Sequence) and all(isinstance(m, str) for m in match)
        if match is not None and not are_patterns:  # a single pattern is a sequence of strings too
            raise ConfigError(f"match must be a pattern or a list of patterns, got {match!r}")
        if decode is not None and not callable(decode):
            raise ConfigError(f"decode must be a function from bytes to a sample, got {decode!r}")
        self.uri = source.uri if isinstance(source, Manifest) else os.fspath(source)
        self.store = Store(self.uri, config)
        if compose == "on" and self.store.scheme != "gs":
            raise ConfigError("composed download exists only on GCS", uri=self.uri, fix='Pass compose="auto" or "off"')
        self.decode = decode
        self._match = match
        self._manifest = source.match(match) if isinstance(source, Manifest) else None
        self._cache = None if cache is None else DiskCache(cache, cache_bytes)
        self._compose = compose
        self._compose_max_bytes = compose_max_bytes
        self._id = uuid.uuid4().hex
        self._reader: tuple[int, ObjectReader] | None = None
        self._counters: SharedCounters | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def attach(self, owner: object, counters: SharedCounters) -> None:
        """Count the requests of this source in `counters`, and remove the listing that workers share when `owner`, an
        object of the parent process, is collected."""
        self._counters = counters
        self._reader = None
        weakref.finalize(owner, _remove_listing, os.getpid(), self._listing_path())

    @property
    def manifest(self) -> Manifest:
        """The objects of this source; listed on first use."""
        if self._manifest is None:
            self._manifest = self._list() if get_worker_info() is None else self._list_once_per_node()
        if not len(self._manifest) and not self._may_be_empty:
            problem = f"no object matches {self._match!r}" if self._match else "no objects"
            raise EmptyError(f"{problem} under this prefix", uri=self.uri, fix="Check the prefix: voxlane ls URI")
        return self._manifest

    def _list(self) -> Manifest:
        self._enter_process()
        return list_objects(self.uri, match=self._match, store=self.store, generations=self._compose == "on")

    def _list_once_per_node(self) -> Manifest:
        """List in a DataLoader worker whose parent has not listed: one worker lists, the others read its listing."""
        path = self._listing_path()
        make_private_folder(os.path.dirname(path))
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(path):
                self._list().save(path)
        return Manifest.load(path)

    def _listing_path(self) -> str:
        return os.path.join(tempfile.gettempdir(), f"voxlane-{os.getuid()}", f"listing-{self._id}.parquet")

    def _enter_process(self) -> None:
        if self._counters is not None:
            self.store.counters = self._counters.for_this_process()

    @property
    def reader(self) -> ObjectReader:
        """The reader in this process."""
        if self._reader is None or self._reader[0] != os.getpid():
            self._enter_process()
            composer = None
            if self._compose == "on":
                composer = Composer(self.store, self._compose_max_bytes)
                composer.json_api.check_compose_permissions()
            self._reader = os.getpid(), ObjectReader(self.store, self._cache, composer)
        return self._reader[1]

    def decode_sample(self, entry: Entry, body: bytes) -> Any:
        """Return the decoded object."""
        if self.decode is None:
            return body
        try:
            return self.decode(body)
        except VoxlaneError:
            raise
        except Exception as error:
            raise DecodeError(
                f"decode raised {type(error).__name__}: {error}",
                uri=self.store.uri(entry.key),
                fix='Fix the object or decode, or pass on_error="skip"',
            ) from error


class Samples:
    """A sequence of samples over one source, or over several matched by key (then a sample is a dict)."""

    def __init__(
        self, sources: Mapping[str, SampleSource] | SampleSource, key: Callable[[str], str] | None = None
    ) -> None:
        self.sources = {"": sources} if isinstance(sources, SampleSource) else dict(sources)
        self.zipped = not isinstance(sources, SampleSource)
        self._key = key

    def __getstate__(self) -> dict[str, Any]:
        # Once matched, the key function is no longer needed, and it may be a lambda, which cannot be pickled.
        return {**self.__dict__, "_key": None if "_rows" in self.__dict__ else self._key}

    @property
    def first_source(self) -> SampleSource:
        """The only source, or the first of those that are zipped."""
        return next(iter(self.sources.values()))

    def __len__(self) -> int:
        return len(next(iter(self._rows.values())))

    @cached_property
    def _rows(self) -> dict[str, Positions]:
        """Rows of each source's manifest in the order of the samples."""
        if not self.zipped:
            return {"": np.arange(len(self.first_source.manifest))}
        names = {n: self._sample_names(s) for n, s in self.sources.items()}
        return align({n: s.uri for n, s in self.sources.items()}, names)

    def _sample_names(self, source: SampleSource) -> list[str]:
        keys = source.manifest.keys()
        if self._key is None:
            parts = [key[len(source.manifest.folder) :].rpartition("/") for key in keys]
            return [folder + slash + name.split(".", 1)[0] for folder, slash, name in parts]
        names = []
        for key in keys:
            try:
                names.append(self._key(key))
            except Exception as error:
                raise PairError(
                    f"key= raised {type(error).__name__} on {key!r}: {error}",
                    fix="Pass a function that returns a name for every key",
                ) from error
        return names

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""
        if not self.zipped:
            return self.sources[""].manifest.fingerprint
        return "+".join(s.manifest.take(self._rows[n]).fingerprint for n, s in self.sources.items())

    def entries(self, index: int) -> dict[str, Entry]:
        """Return the objects of one sample by source name."""
        return {name: source.manifest[int(self._rows[name][index])] for name, source in self.sources.items()}

    def size(self, index: int) -> int:
        """Return the size in bytes of the objects of one sample."""
        return sum(int(s.manifest.sizes[self._rows[n][index]]) for n, s in self.sources.items())

    def submit(self, indices: Sequence[int]) -> list[PendingSample]:
        """Start to read the samples at `indices`."""
        chosen = [self.entries(i) for i in indices]
        pending = {n: s.reader.submit([entries[n] for entries in chosen]) for n, s in self.sources.items()}
        return [PendingSample(self, e, {n: pending[n][i] for n in pending}) for i, e in enumerate(chosen)]

    def group_sizes(self, indices: Sequence[int]) -> list[int]:
        """Return how many consecutive samples of `indices` to submit together, group by group."""
        if self.zipped:
            return [1] * len(indices)
        return self.sources[""].reader.group_sizes([self.size(i) for i in indices])


class PendingSample:
    """One sample that is being read."""

    def __init__(self, samples: Samples, entries: dict[str, Entry], parts: dict[str, PendingObject]) -> None:
        self._samples = samples
        self.entries = entries
        self._parts = parts

    @property
    def size(self) -> int:
        """Size of its objects in bytes."""
        return sum(e.size for e in self.entries.values())

    def result(self) -> Any:
        """Return the decoded sample, or raise the error of its read or decoding."""
        bodies = {name: part.result() for name, part in self._parts.items()}
        sources = self._samples.sources
        decoded = {name: sources[name].decode_sample(self.entries[name], body) for name, body in bodies.items()}
        return decoded if self._samples.zipped else decoded[""]

    def cancel(self) -> None:
        """Cancel requests that have not started."""
        for part in self._parts.values():
            part.cancel()


def read_ahead(samples: Samples, indices: Sequence[int], max_bytes: int) -> Iterator[PendingSample]:
    """Yield the samples at `indices` in order, prefetched. At most `max_bytes` are being fetched or waiting, but always
    one group of samples, whatever its size. The window starts small and grows as long as that makes the stream faster
    (`WindowTuner`). Closing the generator cancels samples that have not started."""
    groups = samples.group_sizes(indices) if indices else []
    # More samples would not keep the threads busier, only use memory.
    max_samples = 4 * max(s.store.config.max_concurrency for s in samples.sources.values())
    tuner = WindowTuner(max_bytes=max_bytes, max_samples=max_samples, now_s=time.perf_counter())
    window: deque[PendingSample] = deque()
    window_bytes = start = 0
    try:
        for count in groups:
            chosen = indices[start : start + count]
            start += count
            group_bytes = sum(samples.size(i) for i in chosen)
            while window and (window_bytes + group_bytes > tuner.bytes or len(window) >= tuner.samples):
                sample = window.popleft()
                window_bytes -= sample.size
                yield sample
                tuner.count_taken(sample.size, time.perf_counter())
            window.extend(samples.submit(chosen))
            window_bytes += group_bytes
        while window:
            yield window.popleft()
    finally:
        for waiting in window:
            waiting.cancel()


def align(uris_by_name: Mapping[str, str], names: Mapping[str, Sequence[str]]) -> dict[str, Positions]:
    """Return the rows of each source that belong together, in the order of the first source's names. Raises PairError
    if a name is missing in a source or occurs twice."""
    first, *others = names.values()
    if all(other == first for other in others) and len(set(first)) == len(first):  # nearly always
        return {source: np.arange(len(first)) for source in names}
    rows: dict[str, dict[str, int]] = {}
    for source, source_names in names.items():
        rows[source] = {}
        for row, name in enumerate(source_names):
            if name in rows[source]:
                raise PairError(
                    f"two objects of {source!r} are named {name!r}: numbers {rows[source][name]} and {row} by key",
                    uri=uris_by_name[source],
                    fix="Pass key=, a function from a key to the sample's name",
                )
            rows[source][name] = row
    union = set().union(*rows.values())
    problems = []
    for source, source_rows in rows.items():
        if missing := sorted(union - source_rows.keys()):
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            problems.append(f"{len(missing)} of {len(union)} missing in {source!r} ({uris_by_name[source]}): {shown}")
    if problems:
        raise PairError(
            f"the zipped sources do not match: {'; '.join(problems)}",
            fix="Add or remove objects, or pass key=, a function from a key to the sample's name",
        )
    return {source: np.array([rows[source][name] for name in first], dtype=np.int64) for source in names}


def _remove_listing(pid: int, path: str) -> None:
    if os.getpid() == pid:
        for name in (path, f"{path}.lock"):
            if os.path.exists(name):
                os.unlink(name)
