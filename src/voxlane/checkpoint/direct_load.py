"""Load a file of `torch.save` with all its tensors read at a time, each straight into its final memory.

`torch.load` asks for one tensor after the other and says where it belongs only then. Whatever is read ahead has to be
copied from other memory, and memory that was never used before costs more time than a fast network. Here `torch.load`
builds the state without reading the tensors (`torch.serialization.skip_data`), and then the bytes of all tensors are
read concurrently.

This works for plain states: dicts, lists, numbers, texts and tensors in CPU memory. For everything else, `load_direct`
raises NotDirectError before it reads a tensor, and the caller uses `torch.load` alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from voxlane.checkpoint.reader import ObjectFile
from voxlane.checkpoint.verified_reader import ReadTarget, VerifiedObject, open_with_end
from voxlane.errors import CorruptError, NotFoundError, StoreError
from voxlane.store import Store
from voxlane.store.ranges import Span

_END_BYTES = 2 << 20
"""Bytes at the end of a file that are read first: the zip directory, at least one whole block of checksums."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Header before each record of a zip file: signature, length of the name and of the extra field."""
_HAS_DESCRIPTOR = 0x08
_ZIP64_LIMIT = 0xFFFFFFFF
_HUGE_PAGES_FROM_BYTES = 4 << 20
_PLAIN_GLOBALS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
}
"""Functions and types that a plain state is made of. None of them looks at the values of a tensor."""


class NotDirectError(Exception):
    """Raised when a file cannot be loaded in this way; it says nothing about whether the file is intact."""


def load_direct(store: Store, key: str, map_location: Any, load: Callable[[Any, Any], Any]) -> Any:
    """Return the state in the file at `key`. `load(file, map_location)` calls `torch.load` with `weights_only`.

    Raises CorruptError or ChangedError like every reader, and NotDirectError if this way does not suit the file.
    """
    if map_location not in (None, "cpu", torch.device("cpu")) or not hasattr(torch.serialization, "skip_data"):
        raise NotDirectError
    file = _open_edges(store, key)
    try:
        layout = _read_layout(file, any_location=map_location is not None)
    except NotDirectError:
        raise
    except Exception as error:
        # A file that is no checkpoint: the caller reads it in another way, which tells what is wrong.
        raise NotDirectError from error
    storages: list[torch.UntypedStorage] = []

    def collect(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        _request_huge_pages(storage)
        storages.append(storage)
        return storage

    file.seek(0)
    with torch.serialization.skip_data():
        state = load(file, collect)
    if [storage.nbytes() for storage in storages] != [record.size for record in layout]:
        raise NotDirectError
    headers = [np.empty(_LOCAL_HEADER.size, np.uint8) for _ in layout]
    file.fill(
        [
            target
            for record, storage, header in zip(layout, storages, headers, strict=True)
            if record.size
            for target in (ReadTarget(record.header, header), ReadTarget(record.start, _view_storage(storage)))
        ]
    )
    if not all(record.matches(header) for record, header in zip(layout, headers, strict=True) if record.size):
        raise NotDirectError
    return state


@dataclass(frozen=True)
class _Record:
    """Where the bytes of a storage are in the file."""

    header: int
    start: int
    size: int

    def matches(self, header: npt.NDArray[np.uint8]) -> bool:
        """Return whether the header before the record, which is read together with it, confirms where it starts."""
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header.tobytes())
        return bool(
            signature == b"PK\x03\x04" and self.header + _LOCAL_HEADER.size + name_bytes + extra_bytes == self.start
        )


def _open_edges(store: Store, key: str) -> _EdgesFile:
    """Open the file with one round trip for its checksums, its start and its end."""
    start = store.submit(store.get, key, 0, _END_BYTES // 2)
    try:
        source, end = open_with_end(store, key, _END_BYTES)
    except NotFoundError:
        raise
    except StoreError as error:  # for example an empty object, which has no last bytes
        raise NotDirectError from error
    return _EdgesFile(source, np.frombuffer(start.result(), np.uint8), end)


class _EdgesFile(ObjectFile):
    """A file of which the first and the last blocks are in memory, verified."""

    def __init__(self, source: VerifiedObject, start: npt.NDArray[np.uint8], end: npt.NDArray[np.uint8]) -> None:
        super().__init__(source)
        block_bytes = source.block_bytes
        start = start[: len(start) if len(start) == self.size else len(start) // block_bytes * block_bytes]
        low = -(-(self.size - len(end)) // block_bytes) * block_bytes
        end = end[low - (self.size - len(end)) :]
        with contextlib.suppress(CorruptError):
            source.verify(low, end)
            self._edges = [(0, self._check_start(start)), (low, end)]
            return
        # Something on the way may have changed the bytes; this reads them again.
        self._edges = [(low, source.read_span(Span(low, self.size)))]
        self._edges.insert(0, (0, self._check_start(start)))

    def _check_start(self, start: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the first bytes of this version of the object. Those that were read together with the end may belong
        to another version, if the object was replaced in between; then they are read again."""
        if self._source.contents:
            with contextlib.suppress(CorruptError):
                self._source.verify(0, start)
                return start
        return self._source.read_span(Span(0, min(len(start), self.size))) if len(start) else start

    read = ObjectFile.read

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current position and return the number of bytes read."""
        target = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        count = max(0, min(len(target), self.size - self._position))
        self.fill([ReadTarget(self._position, target[:count])])
        self._position += count
        return count

    def fill(self, targets: list[ReadTarget]) -> None:
        """Fill all targets, from memory where possible, otherwise with concurrent requests."""
        self._source.read_targets([part for target in targets for part in self._copy_edges(target)])

    def _copy_edges(self, target: ReadTarget) -> list[ReadTarget]:
        """Copy what is in memory and return the rest."""
        start, stop = target.start, target.stop
        for offset, data in self._edges:
            low, high = max(target.start, offset), min(target.stop, offset + len(data))
            if low >= high:
                continue
            target.target[low - target.start : high - target.start] = data[low - offset : high - offset]
            if low <= start:
                start = max(start, high)
            if high >= stop:
                stop = min(stop, low)
        if start >= stop:
            return []
        return [ReadTarget(start, target.target[start - target.start : stop - target.start])]


# -- what is where in the file -----------------------------------------------------------------------------------------


def _read_layout(file: Any, *, any_location: bool) -> list[_Record]:
    """Return where each storage is, in the order in which `torch.load` asks for them.

    The position follows from that of the next record. The header of each record, which is read later, confirms it.
    """
    archive = zipfile.ZipFile(file)
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    by_name = {info.filename: info for info in infos}
    folder = infos[0].filename.partition("/")[0]
    if len(by_name) != len(infos) or archive.read(f"{folder}/byteorder").decode() != sys.byteorder:
        raise NotDirectError
    ends = {
        info.filename: following
        for info, following in zip(infos, [*(info.header_offset for info in infos[1:]), archive.start_dir], strict=True)
    }
    scan = _StorageScan(archive.read(f"{folder}/data.pkl"), any_location)
    layout: list[_Record] = []
    for storage_key, size in scan.storages():
        info = by_name[f"{folder}/data/{storage_key}"]
        if info.file_size != size or info.compress_type != zipfile.ZIP_STORED:
            raise NotDirectError
        is_large = max(info.header_offset, size) >= _ZIP64_LIMIT
        descriptor = (24 if is_large else 16) if info.flag_bits & _HAS_DESCRIPTOR else 0
        layout.append(_Record(info.header_offset, ends[info.filename] - descriptor - size, size))
    return layout


class _StorageScan(pickle.Unpickler):
    """Finds the storages that a pickle refers to. It builds nothing: every object is a stand-in."""

    def __init__(self, text: bytes, any_location: bool) -> None:
        super().__init__(io.BytesIO(text))
        self._any_location = any_location
        self._loaded: set[str] = set()
        self._storages: list[tuple[str, int]] = []

    def storages(self) -> list[tuple[str, int]]:
        """Return key and size of each storage, in the order in which `torch.load` creates them."""
        self.load()
        return self._storages

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a type that plain states consist of; raise NotDirectError for any other."""
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            if name == "UntypedStorage":
                return _StorageType(1)
            return _StorageType(torch.serialization.StorageType(name).dtype.itemsize)  # type: ignore[no-untyped-call]
        if (module, name) in _PLAIN_GLOBALS or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return _StandIn
        raise NotDirectError(f"{module}.{name}")

    def persistent_load(self, reference: Any) -> Any:
        """Record a storage, as `torch.load` does; it loads an empty one each time that it is referred to."""
        kind, storage_type, storage_key, location, count = reference
        if kind != "storage" or not (location == "cpu" or self._any_location):
            raise NotDirectError(location)
        if storage_key not in self._loaded:
            size = count * storage_type.item_bytes
            self._storages.append((storage_key, size))
            if size:
                self._loaded.add(storage_key)
        return _StandIn()


@dataclass(frozen=True)
class _StorageType:
    item_bytes: int


class _StandIn:
    """Accepts whatever a pickle does to an object, and ignores it."""

    def __new__(cls, *args: Any) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _request_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask the system for huge pages, as numpy does for its arrays: filling new memory then takes a quarter of the
    processor time. It is a hint, which the system may ignore."""
    if sys.platform != "linux" or storage.nbytes() < _HUGE_PAGES_FROM_BYTES:
        return
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def _view_storage(storage: torch.UntypedStorage) -> npt.NDArray[np.uint8]:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
