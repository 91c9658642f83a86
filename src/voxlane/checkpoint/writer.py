"""A streaming writer that computes the checksums of what it uploads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from voxlane.checkpoint.checksums import BLOCK_BYTES, Checksums, digest
from voxlane.checkpoint.verified_reader import VerifiedObject
from voxlane.errors import CorruptError
from voxlane.store import ObjectInfo, Store, Writer


class ChecksummedWriter(Writer):
    """A `Writer` that computes the checksums of what was written, block by block."""

    def __init__(self, store: Store, key: str, size_hint: int = 0) -> None:
        super().__init__(store, key, size_hint)
        self._digests = bytearray()
        self._block = np.empty(BLOCK_BYTES, np.uint8)
        """Collects writes until they fill a block; torch.save makes twenty small ones for each tensor."""
        self._block_filled = 0

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return super().tell() + self._block_filled

    def _append(self, view: npt.NDArray[np.uint8]) -> None:
        position = 0
        while position < len(view):
            count = min(BLOCK_BYTES - self._block_filled, len(view) - position)
            piece = view[position : position + count]
            position += count
            if count == BLOCK_BYTES:  # a whole block needs no copy
                self._append_block(piece)
                continue
            self._block[self._block_filled : self._block_filled + count] = piece
            self._block_filled += count
            if self._block_filled == BLOCK_BYTES:
                self._end_block()

    def finish_parts(self) -> None:
        """Send the last part of a large object now, so that it uploads while the caller prepares the commit."""
        self._end_block()
        super().finish_parts()

    def checksums(self) -> Checksums:
        """Return the checksums of everything that was written; nothing can be written afterwards."""
        self._end_block()
        return Checksums(self.tell(), bytes(self._digests))

    def _end_block(self) -> None:
        if self._block_filled:
            block, self._block_filled = self._block[: self._block_filled], 0
            self._append_block(block)

    def _append_block(self, block: npt.NDArray[np.uint8]) -> None:
        self._digests += digest(block)  # while the block is in the processor's cache
        super()._append(block)

    def _find_stored(self, store: Store) -> ObjectInfo | None:
        info = store.find(self._key)
        if info is None:
            return None
        try:
            for _ in VerifiedObject(store, info, [self.checksums()]).read_blocks():
                pass
        except CorruptError:
            return None
        return info
