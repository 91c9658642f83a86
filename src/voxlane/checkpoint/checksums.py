"""Checksums of an object, block by block, so that any part of it can be verified when it is read.

Each MiB has one 64-bit XXH3: 8 bytes per MiB, at about memory speed. It detects damage, not tampering.
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
    """Return the 8-byte checksum of a buffer."""
    return xxhash.xxh3_64_digest(data)


@dataclass(frozen=True)
class Checksums:
    """The size of an object and the checksum of each of its blocks; the last block may be short."""

    size: int
    """Size of the object in bytes."""
    digests: bytes
    """Checksums of all blocks, 8 bytes per block."""
    block_bytes: int = BLOCK_BYTES

    def find_damaged_block(self, start: int, data: Any) -> tuple[int, int] | None:
        """Return the first block `[start, stop)` of `data` that differs from what was written, or None. `data` begins
        at `start`, which is a block boundary, and ends at a block boundary or at the end of the object."""
        view = np.frombuffer(data, np.uint8)
        for offset in range(0, len(view), self.block_bytes):
            block = view[offset : offset + self.block_bytes]
            index = (start + offset) // self.block_bytes * _DIGEST_BYTES
            if digest(block) != self.digests[index : index + _DIGEST_BYTES]:
                return start + offset, start + offset + len(block)
        return None

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
