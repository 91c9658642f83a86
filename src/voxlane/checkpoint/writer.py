"""A streaming writer that takes the checksums of what it uploads."""

from __future__ import annotations

from typing import Any

from voxlane.checkpoint.sums import BLOCK_BYTES, Sums, SumsBuilder
from voxlane.store import Store, Writer


class SummedWriter(Writer):
    """A `Writer` that knows the checksums of what was written."""

    def __init__(self, store: Store, key: str, size_hint: int = 0) -> None:
        super().__init__(store, key, size_hint)
        self._builder = SumsBuilder()

    def write(self, data: Any) -> int:
        """Append `data` (any contiguous buffer); returns its length in bytes. Waits while enough is in flight."""
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, BLOCK_BYTES):
            piece = view[start : start + BLOCK_BYTES]  # small enough to be in the processor's cache the second time
            self._builder.update(piece)
            super().write(piece)
        return view.nbytes

    def sums(self) -> Sums:
        """The checksums of all that was written; nothing can be written after."""
        return self._builder.finish()
