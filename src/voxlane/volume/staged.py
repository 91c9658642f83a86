"""A prepared dataset copied to a machine's own disk, to be read there instead of from the bucket.

FOLDER/<digest>/cases/...        the objects, under the names they have in the dataset
FOLDER/<digest>/staged.jsonl     one line an object that is whole: name, bytes, version, checksums

The run keeps the bucket's URI: a machine without a copy, or with part of one, reads the rest from there. Objects are
written aside and renamed; one without its line is not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from voxlane import uri as uris
from voxlane.errors import CacheError, ChangedError, NotFoundError, PreparedError
from voxlane.store import Store
from voxlane.volume.prepared import Prepared, case_key, folder

JOURNAL = "staged.jsonl"
PART_BYTES = 8 << 20
_IN_FLIGHT = 32
"""Parts read at once: memory is at most this many of them."""
_RESERVE_BYTES = 256 << 20
"""Left free on the disk, for what else runs there."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object of the dataset."""

    name: str
    """Below the dataset."""
    size: int
    etag: str | None

    def parts(self) -> list[tuple[int, int]]:
        """Ranges `[start, stop)` that are copied and checked as one."""
        return [(a, min(a + PART_BYTES, self.size)) for a in range(0, self.size, PART_BYTES)] or [(0, 0)]


@dataclass(frozen=True)
class Report:
    """What staging did."""

    objects: int
    total_bytes: int
    copied: int
    """Objects that were not there."""
    copied_bytes: int
    seconds: float
    lacking_bytes: int = 0
    """Nothing was copied because the disk has so much too little room; 0: all is there."""


def wanted_of(prepared: Prepared) -> list[Wanted]:
    """Every object that training reads; known from the dataset's table, without listing the bucket."""
    found = []
    for row in range(len(prepared)):
        case = prepared.case(row)
        below = case_key("", case.id)
        found += [Wanted(f"{below}/{name}", int(size), etag) for name, size, etag in case.volume["objects"]]
    return found


class Staged:
    """The copy of a dataset below `where`. Opened on first use, in each process; cheap to pickle."""

    def __init__(self, where: str | os.PathLike[str], prepared: Prepared) -> None:
        self.place = Path(where).expanduser() / prepared.digest
        self._prefix = folder(uris.parse(prepared.uri).key)
        self._versions: dict[str, str | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_versions": None}

    def read(self, key: str, etag: str | None, start: int, stop: int) -> bytes | None:
        """The bytes `[start, stop)` of an object of the dataset, None where this copy does not have that version."""
        if self._versions is None:
            self._versions = {name: line["etag"] for name, line in _journal(self.place).items()}
        name = key.removeprefix(self._prefix)
        if self._versions.get(name, _NO_VERSION) != etag:
            return None
        try:
            with open(self.place / name, "rb") as file:
                body = os.pread(file.fileno(), stop - start, start)
        except OSError:  # removed meanwhile: the bucket has it
            return None
        return body if len(body) == stop - start else None


_NO_VERSION = "\0"


def stage(prepared: Prepared, where: str | os.PathLike[str]) -> Report:
    """Copy what is not there yet, checking what is; one process of a machine at a time does it, others wait for it.

    When the disk has too little room nothing is copied, and the report says how much is lacking.
    """
    begin = time.monotonic()
    place = Path(where).expanduser() / prepared.digest
    wanted = wanted_of(prepared)
    total = sum(w.size for w in wanted)
    with _alone(place):
        _drop_partials(place)
        todo = [w for w, whole in zip(wanted, _checked(place, wanted), strict=True) if not whole]
        need = sum(w.size for w in todo)
        lacking = need + _RESERVE_BYTES - shutil.disk_usage(place).free
        if todo and lacking > 0:
            return Report(len(wanted), total, 0, 0, time.monotonic() - begin, lacking)
        _Copy(prepared, place).run(todo)
    return Report(len(wanted), total, len(todo), need, time.monotonic() - begin)


def remove(prepared: Prepared, where: str | os.PathLike[str]) -> bool:
    """Remove a copy; returns whether there was one."""
    place = Path(where).expanduser() / prepared.digest
    if not place.is_dir():
        return False
    with _alone(place):
        # The journal first: whoever is reading then takes what is gone from the bucket.
        (place / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(place)
    return True


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold the copy's lock."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise CacheError(
            f"the folder cannot be used: {error.strerror}",
            uri=str(place.parent),
            fix="Give a folder on this machine's own disk that this user can write",
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        place.mkdir(exist_ok=True)
        yield
    finally:
        os.close(handle)


def _journal(place: Path) -> dict[str, dict[str, Any]]:
    """The objects that are whole, by name."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (place / JOURNAL).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a kill cut off
                entry = json.loads(line)
                found[entry["name"]] = entry
    return found


def _checked(place: Path, wanted: list[Wanted]) -> list[bool]:
    """Which objects are here as they were copied; reads them."""
    journal = _journal(place)

    def whole(one: Wanted) -> bool:
        line = journal.get(one.name)
        if line is None or line["etag"] != one.etag or line["size"] != one.size:
            return False
        try:
            with open(place / one.name, "rb") as file:
                if os.fstat(file.fileno()).st_size != one.size:
                    return False
                bodies = (os.pread(file.fileno(), stop - start, start) for start, stop in one.parts())
                return bool([xxhash.xxh3_64_hexdigest(body) for body in bodies] == line["sums"])
        except OSError:
            return False

    return [whole(one) for one in wanted]


def _drop_partials(place: Path) -> None:
    """Remove what a killed copy left; nobody else is writing here."""
    for partial in place.rglob("*.partial"):
        partial.unlink(missing_ok=True)


@dataclass
class _Object:
    """An object being copied."""

    wanted: Wanted
    handle: int
    sums: list[str]
    left: int
    """Parts that have not arrived."""


@dataclass
class _Copy:
    """One copying: parts of objects in flight, in the order of the dataset."""

    prepared: Prepared
    place: Path
    _open: dict[str, _Object] = field(default_factory=dict)
    _flying: deque[tuple[_Object, int, Future[str]]] = field(default_factory=deque)

    def run(self, todo: list[Wanted]) -> None:
        store = Store(self.prepared.uri, self.prepared.config)
        prefix = folder(uris.parse(self.prepared.uri).key)
        try:
            for wanted in todo:
                one = self._begin(wanted)
                for number, (start, stop) in enumerate(wanted.parts()):
                    if len(self._flying) >= _IN_FLIGHT:
                        self._land()
                    future = store.submit(self._part, store, prefix + wanted.name, one, start, stop)
                    self._flying.append((one, number, future))
            while self._flying:
                self._land()
        except OSError as error:
            if isinstance(error, NotFoundError | PreparedError):
                raise
            raise CacheError(f"the copy stopped: {error.strerror}", uri=str(self.place), fix="Make room") from None
        finally:
            for _, _, future in self._flying:
                future.cancel()
            for _, _, future in self._flying:
                if not future.cancelled():
                    future.exception()  # its thread must be done with the file before the file is closed
            for one in self._open.values():
                os.close(one.handle)

    def _begin(self, wanted: Wanted) -> _Object:
        path = self.place / f"{wanted.name}.partial"
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        parts = len(wanted.parts())
        one = _Object(wanted, handle, [""] * parts, parts)
        self._open[wanted.name] = one
        return one

    @staticmethod
    def _part(store: Store, key: str, one: _Object, start: int, stop: int) -> str:
        try:
            body = store.get(key, start, stop, etag=one.wanted.etag)
        except (ChangedError, NotFoundError) as error:
            if isinstance(error, NotFoundError) and type(error) is not NotFoundError:
                raise
            raise PreparedError(
                "an object of the dataset is gone or changed after it was prepared",
                uri=store.uri(key),
                fix="Run `voxlane prepare` again",
            ) from None
        os.pwrite(one.handle, body, start)
        return xxhash.xxh3_64_hexdigest(body)

    def _land(self) -> None:
        """Wait for the part that was asked for first; publish its object when it was the last one."""
        one, number, future = self._flying[0]
        one.sums[number] = future.result()
        self._flying.popleft()
        one.left -= 1
        if one.left:
            return
        wanted = one.wanted
        os.close(self._open.pop(wanted.name).handle)
        os.replace(self.place / f"{wanted.name}.partial", self.place / wanted.name)
        line = {"name": wanted.name, "size": wanted.size, "etag": wanted.etag, "sums": one.sums}
        with open(self.place / JOURNAL, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
