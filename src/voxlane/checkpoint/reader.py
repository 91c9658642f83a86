"""Read-only files over an object, fetched in concurrent ranges and verified, by one process or by ranks together."""

from __future__ import annotations

import contextlib
import io
import os
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from voxlane.checkpoint.checksums import Checksums
from voxlane.checkpoint.collective import RankGroup, run_once
from voxlane.checkpoint.verified_reader import ReadTarget, VerifiedObject, open_verified
from voxlane.errors import CheckpointError
from voxlane.store import ObjectInfo, Store
from voxlane.uri import StrPath

_PREFETCH_BLOCKS = 8
_MIN_PREFETCH_BLOCKS = 2
_RETAINED_BLOCKS = 4
_SHARED_WINDOW_BLOCKS = 8
_Block = npt.NDArray[np.uint8]


class ObjectFile(io.RawIOBase):
    """Base of all read-only files over an object: a size and a position."""

    def __init__(self, source: VerifiedObject) -> None:
        super().__init__()
        self._source = source
        self._block_bytes = source.request_bytes
        self._position = 0
        self._spare: list[_Block] = []
        """Whole blocks whose memory can be reused."""

    @property
    def size(self) -> int:
        """Size of the object in bytes."""
        return self._source.info.size

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position and return it; this makes no request."""
        self._check_open()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence must be 0, 1 or 2, got {whence}")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}, which is before the start of the file")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes | None:
        """Return up to `size` bytes, or all remaining bytes if it is negative."""
        # Each subclass repeats this name: after a failed `readinto` torch.load looks for `read` in the class itself
        # only and would hide the failure behind "has no attribute 'read'".
        return super().read(size)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def _block_range(self, index: int) -> tuple[int, int]:
        return index * self._block_bytes, min((index + 1) * self._block_bytes, self.size)

    def _read_block(self, index: int) -> _Block:
        start, stop = self._block_range(index)
        block = np.empty(stop - start, np.uint8)
        if len(block) == self._block_bytes:
            with contextlib.suppress(IndexError):  # another thread may take the last one
                block = self._spare.pop()
        self._source.read_into(start, block)
        return block


class RangedReader(ObjectFile):
    """A seekable file over an object of any size.

    Whole blocks are read straight into the caller's buffer, with many requests in flight. While reading goes forward,
    the next eight blocks are prefetched and a few are retained, so memory is bounded by about twelve blocks of the
    store's `part_bytes`.

    Every block must belong to the version that the file was opened with (else ChangedError) and, if the file has
    checksums, must be what was written (else CorruptError).
    """

    def __init__(self, source: VerifiedObject) -> None:
        super().__init__(source)
        self._blocks: OrderedDict[int, Future[_Block]] = OrderedDict()
        self._next_block = 0
        self._current: tuple[int, _Block] = 0, np.empty(0, np.uint8)
        """Start and bytes of the block that was read last; most reads of torch.load continue in it."""

    read = ObjectFile.read

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current position and return the number of bytes read."""
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
        direct_reads: list[Future[None]] = []
        buffered: list[int] = []
        for index in range(first, last + 1):
            low, high = self._block_range(index)
            if index not in self._blocks and start <= low and high <= stop:
                piece = target[low - start : high - start]
                direct_reads.append(self._source.store.submit_part(self._source.read_into, low, piece))
            else:
                self._fetch(index)
                buffered.append(index)
        self._prefetch(first, last)
        for index in buffered:
            self._copy_block(index, start, target[: stop - start])
        for future in direct_reads:
            future.result()
        while len(self._blocks) > _PREFETCH_BLOCKS + _RETAINED_BLOCKS:
            self._drop(self._blocks.popitem(last=False)[1])
        self._position = stop
        return stop - start

    def _prefetch(self, first: int, last: int) -> None:
        """Fetch blocks after those of the current read, `first` to `last`, if reading goes forward."""
        # torch.load first reads the end of the file: that is no reason to prefetch.
        if first in (self._next_block, self._next_block - 1):
            # Large reads keep the connections busy by themselves and need no copy from a block.
            count = max(_MIN_PREFETCH_BLOCKS, _PREFETCH_BLOCKS - (last + 1 - first))
            for index in range(last + 1, min(last + 1 + count, -(-self.size // self._block_bytes))):
                self._fetch(index)
        self._next_block = last + 1

    def _copy_block(self, index: int, start: int, target: _Block) -> None:
        """Copy the part of a fetched block that falls into `target`, which begins at `start` of the file."""
        low, high = self._block_range(index)
        copy_start, copy_stop = max(low, start), min(high, start + len(target))
        data = self._blocks[index].result()
        target[copy_start - start : copy_stop - start] = data[copy_start - low : copy_stop - low]
        self._current = low, data
        if copy_stop == high:  # read to its end, so it is dropped before the prefetched blocks
            self._blocks.move_to_end(index, last=False)

    def save_to(self, path: StrPath) -> None:
        """Write the object to a local file, many blocks at a time."""
        with open(path, "wb") as file:
            try:
                if self.size:
                    # Writing to a mapped file that runs out of disk space kills the process.
                    os.posix_fallocate(file.fileno(), 0, self.size)
            except OSError as error:
                raise CheckpointError(
                    f"not enough disk space for {self.size:,} bytes ({error.strerror})",
                    uri=os.fspath(path),
                    fix="Free some space, or set TMPDIR to a larger disk",
                ) from None
        if self.size:
            self._source.read_targets([ReadTarget(0, np.memmap(path, np.uint8, "r+"))])

    def close(self) -> None:
        """Drop the fetched blocks."""
        for future in self._blocks.values():
            future.cancel()
        self._blocks.clear()
        self._spare.clear()
        self._current = 0, np.empty(0, np.uint8)
        super().close()

    def _fetch(self, index: int) -> None:
        if index not in self._blocks:
            self._blocks[index] = self._source.store.submit_part(self._read_block, index)

    def _drop(self, future: Future[_Block]) -> None:
        """Retain a block's memory for the next one: allocating memory takes longer than filling it."""
        if future.cancel() or not future.done() or future.exception() is not None:
            return
        block = future.result()
        if len(block) == self._block_bytes and block is not self._current[1]:
            self._spare.append(block)


class SharedReader(ObjectFile):
    """A seekable file for ranks that read the same ranges in the same order, as `torch.load` of one file does.

    Ranks take turns to read blocks from the bucket, eight at a time and eight ahead, and send them to the others. All
    ranks must make the same calls; if one rank fails to read, all of them raise.
    """

    def __init__(self, store: Store, key: str, ranks: RankGroup) -> None:
        def describe() -> tuple[ObjectInfo, tuple[Checksums, ...]]:
            source = open_verified(store, key)
            return source.info, source.contents

        ranks.wait_for_all(store.uri(key))
        info, contents = run_once(ranks, describe)
        super().__init__(VerifiedObject(store, info, contents))
        self._ranks = ranks
        self._num_blocks = -(-info.size // self._block_bytes)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._pending: dict[int, Future[_Block]] = {}
        """Blocks that this rank reads for all."""

    read = ObjectFile.read

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current position and return the number of bytes read. Collective."""
        target = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        total = min(len(target), max(0, self.size - self._position))
        done = 0
        while done < total:
            index, start = divmod(self._position, self._block_bytes)
            block = self._get_block(index)
            count = min(total - done, len(block) - start)
            target[done : done + count] = block[start : start + count]
            done += count
            self._position += count
        return done

    def save_to(self, path: StrPath | None) -> None:
        """Read the whole object and write it to a local file on ranks that pass a path. Collective."""
        with open(path if path is not None else os.devnull, "wb") as file:
            file.writelines(self._get_block(index).data for index in range(self._num_blocks))

    def close(self) -> None:
        """Drop the fetched blocks."""
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        self._blocks.clear()
        super().close()

    def _get_block(self, index: int) -> _Block:
        if index not in self._blocks:
            # Fetch a window only if reading goes forward: torch.load first reads the end of the file.
            forward = index == 0 or index - 1 in self._blocks
            window = range(index, min(index + (_SHARED_WINDOW_BLOCKS if forward else 1), self._num_blocks))
            self._fetch(window)
            self._exchange(window)
            if forward:
                self._fetch(range(window.stop, min(window.stop + _SHARED_WINDOW_BLOCKS, self._num_blocks)))
        return self._blocks[index]

    def _fetch(self, window: range) -> None:
        for index in window:
            is_reader = index % self._ranks.size == self._ranks.rank
            if is_reader and index not in self._pending and index not in self._blocks:
                self._pending[index] = self._source.store.submit_part(self._read_block, index)

    def _exchange(self, window: range) -> None:
        read: dict[int, _Block] = {}
        failure: BaseException | None = None
        for index in window:
            if index in self._pending:
                try:
                    read[index] = self._pending.pop(index).result()
                except Exception as error:  # noqa: BLE001 - the other ranks wait: all of them must raise it
                    failure = error
        self._ranks.raise_if_any_failed(failure)
        for index in window:
            if index in self._blocks:
                continue
            start, stop = self._block_range(index)
            block = read[index] if index in read else np.empty(stop - start, np.uint8)
            dist.broadcast(torch.from_numpy(block), group=self._ranks.group, group_src=index % self._ranks.size)
            self._blocks[index] = block
        while len(self._blocks) > _SHARED_WINDOW_BLOCKS + 1:
            self._blocks.popitem(last=False)
