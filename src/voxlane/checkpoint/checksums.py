"""Checksums of an object, block by block, so that any part of it can be verified when it is read.

Each MiB has one 64-bit XXH3: 8 bytes per MiB, at about memory speed. It detects damage, not tampering.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from voxlane.errors import CorruptError

BLOCK_BYTES = 1 << 20
ALGORITHM = "xxh3-64"
_DIGEST_BYTES = 8


def digest(data: Any) -> bytes:
    """Return the 8-byte checksum of a buffer."""
    return xxhash.xxh3_64_digest(data)


class BlockDigests:
    """The checksums of consecutive blocks, computed from chunks of any size as they arrive."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._digests = bytearray()
        self._hash = xxhash.xxh3_64()
        self._filled = 0

    def update(self, chunk: Any) -> None:
        """Append the bytes of a numpy array."""
        position = 0
        while position < len(chunk):
            piece = chunk[position : position + self._block_bytes - self._filled]
            position += len(piece)
            if len(piece) == self._block_bytes:
                self._digests += digest(piece)
                continue
            self._hash.update(piece)
            self._filled += len(piece)
            if self._filled == self._block_bytes:
                self._end_block()

    def finish(self) -> bytes:
        """Return the checksums, 8 bytes per block; the last block may be short."""
        if self._filled:
            self._end_block()
        return bytes(self._digests)

    def _end_block(self) -> None:
        self._digests += self._hash.digest()
        self._hash.reset()
        self._filled = 0


@dataclass(frozen=True)
class Checksums:
    """The size of an object and the checksum of each of its blocks; the last block may be short."""

    size: int
    """Size of the object in bytes."""
    digests: bytes
    """Checksums of all blocks, 8 bytes per block."""
    block_bytes: int = BLOCK_BYTES

    def find_damaged_block(self, start: int, digests: bytes) -> tuple[int, int] | None:
        """Return the first block `[start, stop)` that differs from what was written, or None. `digests` are those of
        the blocks from `start` on, which is a block boundary."""
        first = start // self.block_bytes * _DIGEST_BYTES
        expected = self.digests[first : first + len(digests)]
        if digests == expected:
            return None
        blocks = range(0, len(digests), _DIGEST_BYTES)
        at = next(i for i in blocks if digests[i : i + _DIGEST_BYTES] != expected[i : i + _DIGEST_BYTES])
        low = (first + at) // _DIGEST_BYTES * self.block_bytes
        return low, min(low + self.block_bytes, self.size)

    def to_json(self) -> dict[str, Any]:
        """Return the checksums as JSON-compatible data."""
        return {
            "size": self.size,
            "block_bytes": self.block_bytes,
            "algorithm": ALGORITHM,
            "digests": base64.b64encode(self.digests).decode(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], uri: str) -> Checksums:
        """Read the result of `to_json`; errors name `uri`."""
        try:
            if data["algorithm"] != ALGORITHM:
                raise ValueError(f"unsupported checksum algorithm {data['algorithm']!r}")
            checksums = cls(int(data["size"]), base64.b64decode(data["digests"]), int(data["block_bytes"]))
            if checksums.block_bytes < 1:
                raise ValueError(f"a block size of {checksums.block_bytes} bytes")
            num_blocks = -(-checksums.size // checksums.block_bytes)
            if len(checksums.digests) != num_blocks * _DIGEST_BYTES:
                raise ValueError("the number of checksums differs from the number of blocks")
        except (KeyError, TypeError, ValueError) as error:
            raise corrupt_error(uri, f"the checksums cannot be read ({error})") from None
        return checksums


def corrupt_error(uri: str, problem: str) -> CorruptError:
    """Return the error for damage found in the object at `uri`."""
    return CorruptError(
        problem, uri=uri, fix="The object is damaged: load an earlier checkpoint (voxlane checkpoint ls)"
    )
