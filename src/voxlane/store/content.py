"""Checksum of an object's content, by which copies, prepared datasets and their indexes recognise it.

It is the 128-bit XXH3 of the 128-bit XXH3s of the object's parts of 8 MiB, so that parts can be read in any order. It
runs at about memory speed, and detects damage and every accidental change, not forgery.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

PART_BYTES = 8 << 20
"""Size of the parts in which objects are read and checksummed. Stored checksums depend on it."""


def combine_checksums(checksums: Iterable[bytes]) -> str:
    """Return the checksum of a content from the 128-bit XXH3s of its parts, in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(checksums))


def checksum_content(data: Any) -> str:
    """Return the checksum of a buffer."""
    view = memoryview(data).cast("B")
    parts = range(0, len(view), PART_BYTES)
    return combine_checksums(xxhash.xxh3_128_digest(view[start : start + PART_BYTES]) for start in parts)


class ContentHasher:
    """The checksum of a content that arrives piece by piece, in order."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._part = xxhash.xxh3_128()
        self._filled = 0

    def update(self, data: Any) -> None:
        """Append the bytes of a buffer."""
        view = memoryview(data).cast("B")
        while view:
            piece = view[: PART_BYTES - self._filled]
            self._part.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == PART_BYTES:
                self._end_part()

    def checksum(self) -> str:
        """Return the checksum of all bytes; no more may follow."""
        if self._filled:
            self._end_part()
        return combine_checksums(self._parts)

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part.reset()
        self._filled = 0
