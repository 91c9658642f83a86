"""A streaming writer that computes the checksums of what it uploads."""

from __future__ import annotations

from typing import Any

from voxlane.checkpoint.checksums import BLOCK_BYTES, ChecksumBuilder, Checksums
from voxlane.checkpoint.verified_reader import VerifiedObject
from voxlane.errors import CorruptError
from voxlane.store import ObjectInfo, Store, Writer

_SMALL_BYTES = 16 * 1024
_SMALL_TOGETHER_BYTES = 256 * 1024


class ChecksummedWriter(Writer):
    """A `Writer` that computes the checksums of what was written."""

    def __init__(self, store: Store, key: str, size_hint: int = 0) -> None:
        super().__init__(store, key, size_hint)
        self._builder = ChecksumBuilder()
        self._small = bytearray()
        """Small writes that are collected and sent together; torch.save makes twenty for each tensor."""

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return super().tell() + len(self._small)

    def write(self, data: Any) -> int:
        """Append `data` (any contiguous buffer) and return its length in bytes. Blocks while enough is in flight."""
        view = memoryview(data).cast("B")
        if view.nbytes < _SMALL_BYTES:
            self._check_open()
            self._small += view
            if len(self._small) >= _SMALL_TOGETHER_BYTES:
                self._flush_small()
        else:
            self._flush_small()
            self._append(view)
        return view.nbytes

    def finish_parts(self) -> None:
        """Send the last part of a large object now, so that it uploads while the caller prepares the commit."""
        self._flush_small()
        super().finish_parts()

    def _flush_small(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._append(memoryview(small))

    def _append(self, view: memoryview) -> None:
        for start in range(0, view.nbytes, BLOCK_BYTES):
            piece = view[start : start + BLOCK_BYTES]  # small enough to be in the processor's cache the second time
            self._builder.update(piece)
            super().write(piece)

    def _find_stored(self) -> ObjectInfo | None:
        info = self._store.find(self._key)
        if info is None:
            return None
        try:
            for _ in VerifiedObject(self._store, info, [self.checksums()]).read_blocks():
                pass
        except CorruptError:
            return None
        return info

    def checksums(self) -> Checksums:
        """Return the checksums of everything that was written; nothing can be written afterwards."""
        self._flush_small()
        return self._builder.finish()
