"""Writing past the page cache, where the file system can: buffered writes cost the processor a copy and the machine the
memory that training wants. Measured on ext4, one file after another: 1.2 GB/s instead of 0.3 (docs/log.md).

O_DIRECT wants buffers, places and sizes in whole blocks; the last block of a file is padded, and cut off at its end.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import numpy as np

BUFFER_BYTES = 1 << 20
"""Written at once. A divisor of the parts that objects are read in."""
_BLOCK = 4096
_WORTH_BYTES = 256 * 1024
"""Smaller files are buffered: a direct write waits for the disk."""
_NOT_HERE = (errno.EINVAL, errno.EOPNOTSUPP)


def open_new(path: str, size: int) -> tuple[int, bool]:
    """A new file for `size` bytes, and whether its writes are direct."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    if direct and size >= _WORTH_BYTES:
        try:
            return os.open(path, flags | direct, 0o600), True
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            flags &= ~os.O_EXCL  # the file may have been made all the same
    return os.open(path, flags, 0o600), False


class Buffer:
    """Whole blocks of memory, that chunks of any size are put together in; one for each thread."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BUFFER_BYTES)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self.filled = 0

    def add(self, chunk: Any, taken: int) -> int:
        """Add what fits of `chunk` from its byte `taken` on; returns how many bytes of it are taken now."""
        count = min(len(chunk) - taken, BUFFER_BYTES - self.filled)
        # numpy copies without the interpreter's lock.
        self._bytes[self.filled : self.filled + count] = np.frombuffer(chunk, np.uint8, count, taken)
        self.filled += count
        return taken + count

    @property
    def full(self) -> bool:
        """Whether it must be written before more is added."""
        return self.filled == BUFFER_BYTES

    def content(self, *, padded: bool = False) -> memoryview:
        """What is in it, up to a whole block if `padded`."""
        size = -(-self.filled // _BLOCK) * _BLOCK if padded else self.filled
        return memoryview(self._memory)[:size]
