"""Represent the contents of objects without one long byte string for each.

A body hands out slices as memoryviews, so that a range of a 150 MiB object, an object completed from parts
and a composite are all sent without copying. Synthetic bodies are generated from a key and a size when they
are read, so a million of them cost no memory.
"""

from __future__ import annotations

import hashlib
import zlib
from bisect import bisect_right
from collections.abc import Iterable
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
        """Return the bytes ``[start, stop)`` as views in order; ``0 <= start <= stop <= size``."""


class Blob:
    """A body in one piece of memory."""

    __slots__ = ("_view", "size")

    def __init__(self, data: bytes) -> None:
        self._view = memoryview(data)
        self.size = len(data)

    def slices(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` as views in order."""
        return [self._view[start:stop]] if stop > start else []


class Joined:
    """A concatenation of bodies: a completed multipart upload or a composite."""

    __slots__ = ("_ends", "_pieces", "size")

    def __init__(self, pieces: Iterable[Body]) -> None:
        self._pieces: list[Body] = []
        for piece in pieces:
            # Flattened, so that repeated composition does not slow down later reads.
            self._pieces.extend(piece._pieces if isinstance(piece, Joined) else [piece])
        self._ends = list(accumulate(piece.size for piece in self._pieces))
        self.size = self._ends[-1] if self._ends else 0

    def slices(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` as views in order."""
        slices: list[memoryview] = []
        index = bisect_right(self._ends, start)
        while start < stop:
            piece = self._pieces[index]
            begin = self._ends[index] - piece.size
            end = min(stop, self._ends[index])
            slices.extend(piece.slices(start - begin, end - begin))
            start, index = end, index + 1
        return slices


@cache
def _pattern() -> memoryview:
    """Return two periods of the pattern, so that every window of one period is contiguous."""
    return memoryview(hashlib.shake_128(b"voxlane synthetic body").digest(PATTERN_BYTES) * 2)


class Synthetic:
    """A body derived from its key: a window into an endless repetition of a pseudo-random pattern."""

    __slots__ = ("_phase", "size")

    def __init__(self, key: str, size: int) -> None:
        self._phase = zlib.crc32(key.encode()) % PATTERN_BYTES
        self.size = size

    def slices(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` as views in order."""
        slices: list[memoryview] = []
        for begin in range(start, stop, PATTERN_BYTES):
            offset = (self._phase + begin) % PATTERN_BYTES
            slices.append(_pattern()[offset : offset + min(stop - begin, PATTERN_BYTES)])
        return slices


def synthetic(key: str, size_bytes: int) -> bytes:
    """Return the ``size_bytes`` bytes that :meth:`Emulator.fill` stores under ``key``, equal on every machine."""
    return b"".join(Synthetic(key, size_bytes).slices(0, size_bytes))


def content(body: Body) -> bytes:
    """Return all bytes of a body."""
    return b"".join(body.slices(0, body.size))
