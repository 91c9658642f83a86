"""Checksums of an object, block by block, so that any part of it can be checked when it is read.

One 64-bit XXH3 for every MiB: 8 bytes a MiB, at about memory speed. It finds damage, not malice.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from voxlane.errors import CorruptError

BLOCK_BYTES = 1 << 20
ALGORITHM = "xxh3-64"
_DIGEST_BYTES = 8


def digest(data: Any) -> bytes:
    """The 8-byte checksum of a buffer."""
    return xxhash.xxh3_64_digest(data)


@dataclass(frozen=True)
class Sums:
    """The size of an object and the checksum of each of its blocks, the last of which may be short."""

    size: int
    """Bytes."""
    digests: bytes
    """8 bytes a block."""
    block_bytes: int = BLOCK_BYTES

    def aligned(self, start: int, stop: int) -> tuple[int, int]:
        """The smallest range of whole blocks that holds `[start, stop)`."""
        return start // self.block_bytes * self.block_bytes, min(
            -(-stop // self.block_bytes) * self.block_bytes, self.size
        )

    def first_bad(self, start: int, data: Any) -> tuple[int, int] | None:
        """The first block `[start, stop)` of `data` that is not as written. `data` begins at `start`, a block's
        boundary, and ends at another or at the object's end."""
        view = np.frombuffer(data, np.uint8)
        for at in range(0, len(view), self.block_bytes):
            block = view[at : at + self.block_bytes]
            index = (start + at) // self.block_bytes * _DIGEST_BYTES
            if digest(block) != self.digests[index : index + _DIGEST_BYTES]:
                return start + at, start + at + len(block)
        return None

    def check(self, start: int, data: Any, uri: str) -> None:
        """Raise CorruptError if a block of `data` (see `first_bad`) is not as written."""
        if (bad := self.first_bad(start, data)) is not None:
            raise corrupt(uri, f"bytes {bad[0]:,} to {bad[1]:,} are not those that were written")

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "size": self.size,
            "block_bytes": self.block_bytes,
            "algorithm": ALGORITHM,
            "digests": base64.b64encode(self.digests).decode(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], uri: str) -> Sums:
        """Read what `to_json` gave; `uri` is named when it is not that."""
        try:
            if data["algorithm"] != ALGORITHM:
                raise ValueError(f"checksums of another kind ({data['algorithm']})")
            sums = cls(int(data["size"]), base64.b64decode(data["digests"]), int(data["block_bytes"]))
            if sums.block_bytes < 1 or len(sums.digests) != -(-sums.size // sums.block_bytes) * _DIGEST_BYTES:
                raise ValueError("another number of checksums than of blocks")
        except (KeyError, TypeError, ValueError) as error:
            raise corrupt(uri, f"the checksums cannot be read ({error})") from None
        return sums


class SumsBuilder:
    """Takes an object's bytes as they are written."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._partial = xxhash.xxh3_64()
        self._partial_bytes = 0
        self._size = 0

    def update(self, data: Any) -> None:
        """Append `data`, any contiguous buffer."""
        view = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        self._size += len(view)
        position = 0
        while position < len(view):
            taken = min(BLOCK_BYTES - self._partial_bytes, len(view) - position)
            piece = view[position : position + taken]
            position += taken
            if taken == BLOCK_BYTES:
                self._digests += digest(piece)
                continue
            self._partial.update(piece.data)
            self._partial_bytes += taken
            if self._partial_bytes == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> Sums:
        """The checksums of all that came."""
        if self._partial_bytes:
            self._end_block()
        return Sums(self._size, bytes(self._digests))

    def _end_block(self) -> None:
        self._digests += self._partial.digest()
        self._partial.reset()
        self._partial_bytes = 0


def corrupt(uri: str, what: str) -> CorruptError:
    """The error for damage found in the object at `uri`."""
    return CorruptError(what, uri=uri, fix="The object is damaged: load an earlier checkpoint (voxlane checkpoint ls)")
