"""A read-only file over an object, fetched in concurrent ranges and checked as it is read."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.checkpoint.source import Source
from voxlane.errors import CheckpointError

_READ_AHEAD_BLOCKS = 8
_LEAST_AHEAD_BLOCKS = 2
_KEPT_BLOCKS = 4


class ObjectFile(io.RawIOBase):
    """What every read-only file over an object shares: a size and a position."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._block_bytes = source.request_bytes
        self._position = 0

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return self._source.info.size

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; costs nothing by itself."""
        self._check_open()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence={whence}, not 0, 1 or 2")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}, before the start of the file")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes | None:
        """Up to `size` bytes; all that are left when it is negative."""
        # Also a name of each subclass: after a failed `readinto` torch.load looks for it in the class itself only, and
        # would hide the failure behind "has no attribute 'read'".
        return super().read(size)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def _span(self, index: int) -> tuple[int, int]:
        return index * self._block_bytes, min((index + 1) * self._block_bytes, self.size)

    def _read_block(self, index: int) -> npt.NDArray[np.uint8]:
        start, stop = self._span(index)
        block = self._new_block(stop - start)
        self._source.read_into(start, block)
        return block

    def _new_block(self, size: int) -> npt.NDArray[np.uint8]:
        return np.empty(size, np.uint8)


class RangedReader(ObjectFile):
    """A seekable file. Whole blocks go straight to where the caller wants them, many requests at a time; while reading
    goes forward the next eight blocks are fetched ahead, and a few are kept, so that memory is bounded by about
    twelve blocks of the store's `part_bytes`, whatever the object's size.

    Every block is checked to be of the version that was there when the file was opened and, where checksums are kept,
    to be what was written (CorruptError).
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._blocks: OrderedDict[int, Future[npt.NDArray[np.uint8]]] = OrderedDict()
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._next_block = 0
        self._current: tuple[int, npt.NDArray[np.uint8]] = 0, np.empty(0, np.uint8)
        """The block that was read from last, and where it starts: most reads of torch.load are a few bytes on."""

    read = ObjectFile.read

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current position; returns how many bytes there were."""
        self._check_open()
        view = memoryview(buffer).cast("B")
        start = self._position
        block_start, block = self._current
        if block_start <= start and start + len(view) <= block_start + len(block):
            view[:] = block.data[start - block_start : start - block_start + len(view)]
            self._position += len(view)
            return len(view)
        target = np.frombuffer(view, np.uint8)
        stop = min(start + len(target), self.size)
        if stop <= start:
            return 0
        first, last = start // self._block_bytes, (stop - 1) // self._block_bytes
        direct: list[Future[None]] = []
        through: list[int] = []
        for index in range(first, last + 1):
            low, high = self._span(index)
            if index not in self._blocks and start <= low and high <= stop:
                piece = target[low - start : high - start]
                direct.append(self._source.store.submit_part(self._source.read_into, low, piece))
            else:
                self._fetch(index)
                through.append(index)
        if first in (self._next_block, self._next_block - 1):
            # Ahead only when reading goes forward: torch.load first looks at the end of the file.
            # Large reads keep the connections busy by themselves, and what they want need not be copied from a block.
            ahead = max(_LEAST_AHEAD_BLOCKS, _READ_AHEAD_BLOCKS - (last + 1 - first))
            for index in range(last + 1, min(last + 1 + ahead, -(-self.size // self._block_bytes))):
                self._fetch(index)
        self._next_block = last + 1
        for index in through:
            low, high = self._span(index)
            a, b = max(low, start), min(high, stop)
            data = self._blocks[index].result()
            target[a - start : b - start] = data[a - low : b - low]
            self._current = low, data
            if b == high:  # read to its end: the first to be dropped, before those that were fetched ahead
                self._blocks.move_to_end(index, last=False)
        for future in direct:
            future.result()
        while len(self._blocks) > _READ_AHEAD_BLOCKS + _KEPT_BLOCKS:
            self._drop(self._blocks.popitem(last=False)[1])
        self._position = stop
        return stop - start

    def save_to(self, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
        """Write the whole object to a local file, many blocks at a time; `progress` is called with bytes done."""
        with open(path, "wb") as file:
            try:
                if self.size:
                    os.posix_fallocate(file.fileno(), 0, self.size)  # a mapped file that runs out of disk kills us
            except OSError as error:
                raise CheckpointError(
                    f"no room for {self.size:,} bytes ({error.strerror})",
                    uri=os.fspath(path),
                    fix="Free some, or set TMPDIR to a larger disk",
                ) from None
        if self.size:
            self._fill(np.memmap(path, np.uint8, "r+"), progress)

    def _fill(self, target: npt.NDArray[np.uint8], progress: Callable[[int], None] | None) -> None:
        spans = [self._span(index) for index in range(-(-self.size // self._block_bytes))]
        futures = [self._source.store.submit_part(self._source.read_into, a, target[a:b]) for a, b in spans]
        try:
            for future, (a, b) in zip(futures, spans, strict=True):
                future.result()
                if progress is not None:
                    progress(b - a)
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Drop what was fetched."""
        for future in self._blocks.values():
            future.cancel()
        self._blocks.clear()
        self._spare.clear()
        self._current = 0, np.empty(0, np.uint8)
        super().close()

    def _fetch(self, index: int) -> None:
        if index not in self._blocks:
            self._blocks[index] = self._source.store.submit_part(self._read_block, index)

    def _drop(self, future: Future[npt.NDArray[np.uint8]]) -> None:
        """Keep a block's memory for the next one: new memory takes longer to come by than to fill."""
        if future.cancel() or not future.done() or future.exception() is not None:
            return
        block = future.result()
        if len(block) == self._block_bytes and block is not self._current[1]:
            self._spare.append(block)

    def _new_block(self, size: int) -> npt.NDArray[np.uint8]:
        if size == self._block_bytes and self._spare:
            return self._spare.pop()
        return super()._new_block(size)
