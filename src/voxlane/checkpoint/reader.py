"""A read-only file over an object, fetched in concurrent ranges."""

from __future__ import annotations

import io
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import numpy as np

from voxlane.store import Store

_READ_AHEAD_BLOCKS = 8
_KEPT_BLOCKS = 4


class RangedReader(io.RawIOBase):
    """Blocks of the store's `part_bytes` are fetched ahead while reading goes forward, and a few are kept, so that
    memory is bounded by about twelve blocks whatever the object's size. Every block is checked to be of the version
    that was there when the file was opened."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self._store = store
        self._info = store.head(key)
        self._block_bytes = store.config.part_bytes
        self._blocks: OrderedDict[int, Future[Any]] = OrderedDict()
        self._position = 0

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
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}, before the start of the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current position; returns how many bytes there were."""
        target = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        wanted = min(len(target), max(0, self._info.size - self._position))
        done = 0
        while done < wanted:
            index, start = divmod(self._position, self._block_bytes)
            block = np.frombuffer(self._block(index), np.uint8)
            count = min(wanted - done, len(block) - start)
            target[done : done + count] = block[start : start + count]
            done += count
            self._position += count
        return done

    def close(self) -> None:
        """Drop what was fetched."""
        for future in self._blocks.values():
            future.cancel()
        self._blocks.clear()
        super().close()

    def _block(self, index: int) -> Any:
        last = (self._info.size - 1) // self._block_bytes
        # Ahead only when reading goes forward: torch.load first looks at the end of the file.
        ahead = _READ_AHEAD_BLOCKS if index - 1 in self._blocks or index == 0 else 1
        for i in range(index, min(index + ahead, last + 1)):
            if i not in self._blocks:
                start = i * self._block_bytes
                stop = min(start + self._block_bytes, self._info.size)
                self._blocks[i] = self._store.submit_part(
                    self._store.get, self._info.key, start, stop, etag=self._info.etag
                )
        self._blocks.move_to_end(index)
        body = self._blocks[index].result()
        while len(self._blocks) > _READ_AHEAD_BLOCKS + _KEPT_BLOCKS:
            self._blocks.popitem(last=False)[1].cancel()
        return body
