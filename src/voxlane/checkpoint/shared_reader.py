"""One file read by many ranks together: each block comes from the bucket once and goes to all of them."""

from __future__ import annotations

import os
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from voxlane.checkpoint.collective import Ranks
from voxlane.checkpoint.reader import ObjectFile
from voxlane.checkpoint.source import Source, open_source
from voxlane.store import Store

_WINDOW_BLOCKS = 8
_Block = npt.NDArray[np.uint8]


class SharedReader(ObjectFile):
    """A seekable file for ranks that read the same things in the same order, as `torch.load` of one file does.

    Ranks take turns in reading blocks from the bucket, eight at a time and the next eight ahead, and send them to the
    others. All ranks must make the same calls; a rank that fails to read makes all of them raise.
    """

    def __init__(self, store: Store, key: str, ranks: Ranks) -> None:
        ranks.gather(store.uri(key))
        info, contents = ranks.once(lambda: _describe(open_source(store, key)))
        super().__init__(Source(store, info, contents))
        self._ranks = ranks
        self._num_blocks = -(-info.size // self._block_bytes)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._mine: dict[int, Future[_Block]] = {}

    read = ObjectFile.read

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current position; returns how many bytes there were. Collective."""
        target = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        wanted = min(len(target), max(0, self.size - self._position))
        done = 0
        while done < wanted:
            index, start = divmod(self._position, self._block_bytes)
            block = self._block(index)
            count = min(wanted - done, len(block) - start)
            target[done : done + count] = block[start : start + count]
            done += count
            self._position += count
        return done

    def save_to(self, path: str | os.PathLike[str] | None) -> None:
        """Read all of it, and write it to a local file on ranks that give one. Collective."""
        with open(path if path is not None else os.devnull, "wb") as file:
            file.writelines(self._block(index).data for index in range(self._num_blocks))

    def close(self) -> None:
        """Drop what was fetched."""
        for future in self._mine.values():
            future.cancel()
        self._mine.clear()
        self._blocks.clear()
        super().close()

    def _block(self, index: int) -> _Block:
        if index not in self._blocks:
            # A window only when reading goes forward: torch.load first looks at the end of the file.
            forward = index == 0 or index - 1 in self._blocks
            window = range(index, min(index + (_WINDOW_BLOCKS if forward else 1), self._num_blocks))
            self._fetch(window)
            self._exchange(window)
            if forward:
                self._fetch(range(window.stop, min(window.stop + _WINDOW_BLOCKS, self._num_blocks)))
        return self._blocks[index]

    def _fetch(self, window: range) -> None:
        for index in window:
            if index % self._ranks.size == self._ranks.rank and index not in self._mine and index not in self._blocks:
                self._mine[index] = self._source.store.submit_part(self._read_block, index)

    def _exchange(self, window: range) -> None:
        read: dict[int, _Block] = {}
        failure: BaseException | None = None
        for index in window:
            if index in self._mine:
                try:
                    read[index] = self._mine.pop(index).result()
                except Exception as error:  # noqa: BLE001 - the other ranks wait: all of them must raise it
                    failure = error
        self._ranks.agree(failure)
        for index in window:
            if index in self._blocks:
                continue
            start, stop = self._span(index)
            block = read.get(index)
            if block is None:
                block = np.empty(stop - start, np.uint8)
            self._ranks.broadcast(torch.from_numpy(block), index % self._ranks.size)
            self._blocks[index] = block
        while len(self._blocks) > _WINDOW_BLOCKS + 1:
            self._blocks.popitem(last=False)


def _describe(source: Source) -> tuple[Any, Any]:
    return source.info, source.contents
