"""What a sample is: one object of a source, or one of each of several sources matched by key."""

from __future__ import annotations

import fcntl
import os
import tempfile
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch.utils.data import get_worker_info

from voxlane import uri as uris
from voxlane.dataset.cache import DiskCache
from voxlane.dataset.compose import DEFAULT_MAX_BYTES, Composer
from voxlane.dataset.order import Positions
from voxlane.dataset.reading import Pending, Reader
from voxlane.dataset.tally import Tally
from voxlane.errors import ConfigError, DecodeError, EmptyError, PairError, VoxlaneError
from voxlane.listing import Entry, Manifest, list_objects
from voxlane.store import Store, StoreConfig

Compose = Literal["off", "on", "auto"]
"""Whether small objects of a GCS bucket are joined on the server. "auto" follows our measurements, and they say never
(docs/composed-download.md)."""
Decode = Callable[[bytes], Any]
READ_AHEAD_BYTES = 256 << 20
"""How much a stream has on its way or waiting, by default."""


class Source:
    """One URI or manifest and how to read it. Builds without I/O; lists and opens on first use, per process."""

    def __init__(
        self,
        source: str | os.PathLike[str] | Manifest,
        *,
        decode: Decode | None,
        match: str | Sequence[str] | None,
        config: StoreConfig | None,
        cache: str | os.PathLike[str] | None,
        cache_bytes: int,
        compose: Compose,
        compose_max_bytes: int = DEFAULT_MAX_BYTES,
        concurrency: int = 64,
    ) -> None:
        if compose not in ("off", "on", "auto"):
            raise ConfigError(f"compose={compose!r}", fix='Give "off", "on" or "auto"')
        if not isinstance(source, str | os.PathLike | Manifest):
            raise ConfigError(f"a dataset over {source!r}", fix="Give a URI, a path or a Manifest")
        listed = isinstance(match, Sequence) and all(isinstance(m, str) for m in match)
        if match is not None and not listed:  # a single pattern is a sequence of strings too
            raise ConfigError(f"match={match!r}", fix="Give a pattern or a list of patterns")
        if decode is not None and not callable(decode):
            raise ConfigError(f"decode={decode!r} cannot be called", fix="Give a function from bytes to a sample")
        self.uri = source.uri if isinstance(source, Manifest) else os.fspath(source)
        parsed = uris.parse(self.uri)
        if compose == "on" and parsed.scheme != "gs":
            raise ConfigError("composed download exists on GCS only", uri=self.uri, fix='Pass compose="auto" or "off"')
        self.decode = decode
        self.store = Store(self.uri, config)
        self._match = match
        self._manifest = source.match(match) if isinstance(source, Manifest) else None
        self._cache = None if cache is None else DiskCache(cache, cache_bytes)
        self._compose = compose
        self._compose_max_bytes = compose_max_bytes
        self._concurrency = concurrency
        self._id = uuid.uuid4().hex
        self._reader: tuple[int, Reader] | None = None
        self._tally: Tally | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def attach(self, tally: Tally) -> None:
        """Count this source's requests in `tally`."""
        self._tally = tally
        self._reader = None

    @property
    def manifest(self) -> Manifest:
        """The objects of this source, listed now if they were not yet."""
        if self._manifest is None:
            self._manifest = self._list() if get_worker_info() is None else self._list_once_per_node()
        if not len(self._manifest):
            what = f"no object fits match={self._match!r}" if self._match else "no objects"
            raise EmptyError(f"{what} under this prefix", uri=self.uri, fix="Check the prefix: voxlane ls URI")
        return self._manifest

    def _list(self) -> Manifest:
        self._enter_process()
        return list_objects(
            self.uri,
            match=self._match,
            store=self.store,
            concurrency=self._concurrency,
            generations=self._compose == "on",
        )

    def _list_once_per_node(self) -> Manifest:
        """In a DataLoader worker whose parent had not listed: one worker lists, the others read its listing."""
        path = self._listing_path()
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(path):
                self._list().save(path)
        return Manifest.load(path)

    def remove_listing_when_dropped(self, owner: object) -> None:
        """Remove the file that workers shared when `owner`, an object of the parent process, goes."""
        weakref.finalize(owner, _remove, os.getpid(), self._listing_path())

    def _listing_path(self) -> str:
        return os.path.join(tempfile.gettempdir(), f"voxlane-{os.getuid()}", f"listing-{self._id}.parquet")

    def _enter_process(self) -> None:
        if self._tally is not None:
            self.store.counters = self._tally.counters()

    @property
    def reader(self) -> Reader:
        """The reader of this process."""
        if self._reader is None or self._reader[0] != os.getpid():
            self._enter_process()
            self._reader = os.getpid(), Reader(self.store, self._cache, self._composer())
        return self._reader[1]

    def _composer(self) -> Composer | None:
        if self._compose != "on":
            return None
        composer = Composer(self.store, self._compose_max_bytes)
        composer.check_permissions()
        return composer

    def decoded(self, entry: Entry, body: bytes) -> Any:
        """The user's view of an object."""
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
                fix='Mend the object or decode, or pass on_error="skip"',
            ) from error


class Samples:
    """A sequence of samples over one source, or over several matched by key (then a sample is a dict)."""

    def __init__(self, sources: Mapping[str, Source] | Source, key: Callable[[str], str] | None = None) -> None:
        self.sources = {"": sources} if isinstance(sources, Source) else dict(sources)
        self._zipped = not isinstance(sources, Source)
        self._key = key
        self._rows: dict[str, Positions] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Once matched, the key function is not needed any more, and it may be a lambda, which does not pickle.
        return {**self.__dict__, "_key": None if self._rows is not None else self._key}

    def __len__(self) -> int:
        return len(self._aligned()[next(iter(self.sources))])

    def _aligned(self) -> dict[str, Positions]:
        if self._rows is None:
            if self._zipped:
                names = {n: self._sample_names(s) for n, s in self.sources.items()}
                self._rows = align({n: s.uri for n, s in self.sources.items()}, names)
            else:
                ((name, source),) = self.sources.items()
                self._rows = {name: np.arange(len(source.manifest))}
        return self._rows

    def _sample_names(self, source: Source) -> list[str]:
        if self._key is not None:
            return [self._named(key) for key in source.manifest.keys()]
        start = len(source.manifest.folder)
        parts = [key[start:].rpartition("/") for key in source.manifest.keys()]
        return [folder + slash + name.split(".", 1)[0] for folder, slash, name in parts]

    def _named(self, key: str) -> str:
        assert self._key is not None
        try:
            return self._key(key)
        except Exception as error:
            raise PairError(
                f"key= raised {type(error).__name__} on {key!r}: {error}", fix="Give a function that names every key"
            ) from error

    @property
    def fingerprint(self) -> str:
        """Names the samples and their order."""
        if not self._zipped:
            return self.sources[""].manifest.fingerprint
        return "+".join(s.manifest.take(self._aligned()[n]).fingerprint for n, s in self.sources.items())

    def entries(self, index: int) -> dict[str, Entry]:
        """The objects of one sample."""
        rows = self._aligned()
        return {name: source.manifest[int(rows[name][index])] for name, source in self.sources.items()}

    def size(self, index: int) -> int:
        """Bytes of the objects of one sample."""
        return sum(int(s.manifest.sizes[self._aligned()[n][index]]) for n, s in self.sources.items())

    def submit(self, indices: Sequence[int]) -> list[PendingSample]:
        """Start reading the samples at `indices`."""
        chosen = [self.entries(i) for i in indices]
        pending = {n: s.reader.submit([entries[n] for entries in chosen]) for n, s in self.sources.items()}
        return [
            PendingSample(self, entries, {n: pending[n][i] for n in self.sources}) for i, entries in enumerate(chosen)
        ]

    def group_sizes(self, indices: Sequence[int]) -> list[int]:
        """How many of the next samples to submit together."""
        if self._zipped:
            return [1] * len(indices)
        return self.sources[""].reader.group_sizes([self.size(i) for i in indices])

    def decoded(self, entries: dict[str, Entry], bodies: dict[str, bytes]) -> Any:
        """The sample itself."""
        parts = {n: s.decoded(entries[n], bodies[n]) for n, s in self.sources.items()}
        return parts if self._zipped else parts[""]


class PendingSample:
    """One sample on its way."""

    def __init__(self, samples: Samples, entries: dict[str, Entry], parts: dict[str, Pending]) -> None:
        self._samples = samples
        self.entries = entries
        self._parts = parts

    @property
    def size(self) -> int:
        """Bytes of its objects."""
        return sum(e.size for e in self.entries.values())

    def result(self) -> Any:
        """The decoded sample; raises what went wrong with it."""
        bodies = {name: part.result() for name, part in self._parts.items()}
        return self._samples.decoded(self.entries, bodies)

    def cancel(self) -> None:
        """Do not start what has not started yet."""
        for part in self._parts.values():
            part.cancel()


def read_ahead(samples: Samples, indices: Sequence[int], max_bytes: int) -> Iterator[PendingSample]:
    """The samples at `indices`, in order, each on its way before it is asked for.

    At most `max_bytes` are on their way or waiting, but always one group of samples, whatever its size. Closing the
    generator drops what has not started.
    """
    groups = samples.group_sizes(indices) if indices else []
    # Beyond this many the threads have all they can do, and memory goes to bookkeeping.
    most = 4 * max(s.store.config.max_concurrency for s in samples.sources.values())
    window: deque[PendingSample] = deque()
    window_bytes = start = 0
    try:
        for count in groups:
            chosen = indices[start : start + count]
            start += count
            group_bytes = sum(samples.size(i) for i in chosen)
            while window and (window_bytes + group_bytes > max_bytes or len(window) >= most):
                window_bytes -= window[0].size
                yield window.popleft()
            window.extend(samples.submit(chosen))
            window_bytes += group_bytes
        while window:
            yield window.popleft()
    finally:
        for sample in window:
            sample.cancel()


def align(uris_by_name: Mapping[str, str], names: Mapping[str, Sequence[str]]) -> dict[str, Positions]:
    """Rows of each source that belong together, in the order of the first source's names.

    Raises PairError, naming them, when a name is missing somewhere or stands twice in a source.
    """
    first, *others = names.values()
    if all(listed == first for listed in others) and len(set(first)) == len(first):  # as nearly always
        return {source: np.arange(len(first)) for source in names}
    places: dict[str, dict[str, int]] = {}
    for source, listed in names.items():
        places[source] = {}
        for row, name in enumerate(listed):
            if name in places[source]:
                raise PairError(
                    f"two objects of {source!r} are named {name!r}: numbers {places[source][name]} and {row} by key",
                    uri=uris_by_name[source],
                    fix="Pass key=, a function from a key to the sample's name",
                )
            places[source][name] = row
    union = set().union(*places.values())
    problems = []
    for source, found in places.items():
        if missing := sorted(union - found.keys()):
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            problems.append(f"{len(missing)} of {len(union)} missing in {source!r} ({uris_by_name[source]}): {shown}")
    if problems:
        raise PairError(
            f"the zipped sources do not line up: {'; '.join(problems)}",
            fix="Add or remove objects, or pass key=, a function from a key to the sample's name",
        )
    ordered = list(next(iter(names.values())))
    return {s: np.array([places[s][n] for n in ordered], dtype=np.int64) for s in names}


def _remove(pid: int, path: str) -> None:
    if os.getpid() == pid:
        for name in (path, f"{path}.lock"):
            if os.path.exists(name):
                os.unlink(name)
