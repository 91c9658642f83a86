"""Object bodies: what the emulator keeps in place of one long byte string.

A body hands out slices as memoryviews, so that a range of a 150 MiB object, an object completed from parts
and a composite are all sent without copying. Synthetic bodies are made from a key and a size when they are
read; a million of them cost no memory.
"""

from __future__ import annotations

import hashlib
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from typing import Protocol

# A prime close to 1 MiB: reading at an offset that is wrong by any power of two gives different bytes, which
# a period of exactly 1 MiB would hide.
PATTERN_BYTES = 1_048_583


class Body(Protocol):
    """Immutable bytes of a known length."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def slices(self, start: int, stop: int) -> list[memoryview]:
        """The bytes of ``[start, stop)`` in order, as views. Requires ``0 <= start <= stop <= size``."""


class Blob:
    """A body that is one piece of memory."""

    __slots__ = ("_view", "size")

    def __init__(self, data: bytes) -> None:
        self._view = memoryview(data)
        self.size = len(data)

    def slices(self, start: int, stop: int) -> list[memoryview]:
        return [self._view[start:stop]] if stop > start else []


class Joined:
    """A body made of others placed end to end: a completed multipart upload or a composite."""

    __slots__ = ("_ends", "_pieces", "size")

    def __init__(self, pieces: Iterable[Body]) -> None:
        self._pieces: list[Body] = []
        for piece in pieces:
            # Flattened, so that composing composites again and again does not deepen every later read.
            self._pieces.extend(piece._pieces if isinstance(piece, Joined) else [piece])
        self._ends = list(accumulate(piece.size for piece in self._pieces))
        self.size = self._ends[-1] if self._ends else 0

    def slices(self, start: int, stop: int) -> list[memoryview]:
        found: list[memoryview] = []
        index = bisect_right(self._ends, start)
        while start < stop:
            piece = self._pieces[index]
            begin = self._ends[index] - piece.size
            upto = min(stop, self._ends[index])
            found.extend(piece.slices(start - begin, upto - begin))
            start, index = upto, index + 1
        return found


@cache
def _pattern() -> memoryview:
    """Two periods of the pattern, so that any window of one period is contiguous."""
    return memoryview(hashlib.shake_128(b"voxlane synthetic body").digest(PATTERN_BYTES) * 2)


class Synthetic:
    """A body that follows from its key: a window into an endless repetition of one pseudo-random pattern."""

    __slots__ = ("_phase", "size")

    def __init__(self, key: str, size: int) -> None:
        self._phase = zlib.crc32(key.encode()) % PATTERN_BYTES
        self.size = size

    def slices(self, start: int, stop: int) -> list[memoryview]:
        return list(self._windows(start, stop))

    def _windows(self, start: int, stop: int) -> Iterator[memoryview]:
        pattern = _pattern()
        while start < stop:
            place = (self._phase + start) % PATTERN_BYTES
            length = min(stop - start, PATTERN_BYTES)
            yield pattern[place : place + length]
            start += length


def synthetic(key: str, size_bytes: int) -> bytes:
    """The ``size_bytes`` bytes that :meth:`Emulator.fill` gives to ``key``, the same on every machine."""
    return b"".join(Synthetic(key, size_bytes).slices(0, size_bytes))


def content(body: Body) -> bytes:
    """All bytes of ``body``, copied."""
    return b"".join(body.slices(0, body.size))
