"""Write files past the page cache where the file system supports it.

Buffered writes cost a copy in memory and page cache that training needs. Measured on ext4 with sequential files:
1.2 GB/s instead of 0.3 (docs/log.md). O_DIRECT requires buffers, offsets and sizes in whole blocks, so the last block
of a file is padded and the file truncated afterwards.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import numpy as np

BUFFER_BYTES = 1 << 20
"""Size of one write; a divisor of the part size."""
_BLOCK_BYTES = 4096
_MIN_DIRECT_BYTES = 256 * 1024
"""Smaller files are written through the page cache, because a direct write waits for the disk."""
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


def open_new(path: str, size: int) -> tuple[int, bool]:
    """Create a file for `size` bytes; return its descriptor and whether its writes are direct."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    if direct and size >= _MIN_DIRECT_BYTES:
        try:
            return os.open(path, flags | direct, 0o600), True
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            flags &= ~os.O_EXCL  # the failed call may have created the file
    return os.open(path, flags, 0o600), False


class Buffer:
    """Block-aligned memory that collects chunks of any size; each thread has its own."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BUFFER_BYTES)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self.filled = 0

    def add(self, chunk: Any, consumed: int) -> int:
        """Add as much of `chunk[consumed:]` as fits; return how many bytes of `chunk` are consumed now."""
        count = min(len(chunk) - consumed, BUFFER_BYTES - self.filled)
        # numpy copies without holding the interpreter lock.
        self._bytes[self.filled : self.filled + count] = np.frombuffer(chunk, np.uint8, count, consumed)
        self.filled += count
        return consumed + count

    @property
    def full(self) -> bool:
        """Whether the buffer must be written before more is added."""
        return self.filled == BUFFER_BYTES

    def content(self, *, padded: bool = False) -> memoryview:
        """Return the buffered bytes, padded to a whole block if `padded`."""
        size = -(-self.filled // _BLOCK_BYTES) * _BLOCK_BYTES if padded else self.filled
        return memoryview(self._memory)[:size]
