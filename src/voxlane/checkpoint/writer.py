"""A streaming writer that takes the checksums of what it uploads."""

from __future__ import annotations

from typing import Any

import numpy as np

from voxlane.checkpoint.sums import BLOCK_BYTES, Sums, SumsBuilder
from voxlane.errors import NotFoundError
from voxlane.store import ObjectInfo, Store, Writer

_READ_BYTES = 8 * BLOCK_BYTES
_SMALL_BYTES = 16 * 1024
_SMALL_TOGETHER_BYTES = 256 * 1024


class SummedWriter(Writer):
    """A `Writer` that knows the checksums of what was written."""

    def __init__(self, store: Store, key: str, size_hint: int = 0) -> None:
        super().__init__(store, key, size_hint)
        self._builder = SumsBuilder()
        self._small = bytearray()
        """Small writes, of which torch.save makes twenty for each tensor, are taken together."""

    def tell(self) -> int:
        """Bytes written so far."""
        return super().tell() + len(self._small)

    def write(self, data: Any) -> int:
        """Append `data` (any contiguous buffer); returns its length in bytes. Waits while enough is in flight."""
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
        """Send the last part of a large object now; what the caller does between this and `commit()` costs no time."""
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
        sums = self.sums()
        try:
            info = self._store.head(self._key)
        except NotFoundError:
            return None
        if info.size != sums.size:
            return None
        for start in range(0, info.size, _READ_BYTES):
            data = np.empty(min(_READ_BYTES, info.size - start), np.uint8)
            self._store.get_into(self._key, start, data, etag=info.etag)
            if sums.first_bad(start, data) is not None:
                return None
        return info

    def sums(self) -> Sums:
        """The checksums of all that was written; nothing can be written after."""
        self._flush_small()
        return self._builder.finish()
