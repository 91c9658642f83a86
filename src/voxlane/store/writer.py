"""Streaming upload of one object: parts go up while the caller still writes; nothing shows before `commit()`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from voxlane.errors import StoreError
from voxlane.store.translate import Transient, is_foreign, is_lost_completion, translate

if TYPE_CHECKING:
    from voxlane.store.bucket import ObjectInfo, Store

_PARTS_IN_FLIGHT = 8
_MAX_PARTS = 10_000
"""What S3 and GCS take in one upload."""
_MIN_PART_BYTES = 5 << 20
"""S3 and GCS refuse smaller parts, the last one excepted."""
_Part = npt.NDArray[np.uint8]


def part_bytes_for(size_bytes: int, part_bytes: int) -> int:
    """The part size for an object of about `size_bytes`: `part_bytes`, unless that would be too many parts."""
    needed = -(-size_bytes // (_MAX_PARTS * 9 // 10))
    return max(part_bytes, _MIN_PART_BYTES, -(-needed >> 20) << 20)


class _Aborted(Exception):
    """Raised inside the engine's upload to make it give up."""


class _Failed(Exception):
    """Parts are gone that cannot be sent twice: no other attempt."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Upload:
    """One multipart upload on a thread of its own. It knows nothing of its Writer, so that a Writer which is dropped
    without a word is collected, and aborts."""

    def __init__(self, store: Store, key: str, part_bytes: int) -> None:
        self.store = store
        self.key = key
        self.part_bytes = part_bytes
        # Parts of objects so large that they need large ones: fewer at a time, for the memory's sake.
        self.in_flight = max(2, min(_PARTS_IN_FLIGHT, _PARTS_IN_FLIGHT * (8 << 20) // part_bytes))
        self.outcome: Any = None
        self.failure: Exception | None = None
        self._begun = False
        self._parts: queue.Queue[_Part | _Aborted | None] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._run, name="voxlane-upload", daemon=True)
        self._thread.start()

    def send(self, part: _Part | _Aborted | None) -> None:
        """Hand over a part, or the end (None), or the order to give up. Waits for room; raises if the upload failed."""
        while self.failure is None:
            try:
                self._parts.put(part, timeout=0.1)
                return
            except queue.Full:
                continue
        if not isinstance(part, _Aborted):
            self.join()

    def join(self) -> None:
        """Wait for the upload to end; raises if it failed."""
        self._thread.join()
        error = self.failure
        if error is None:
            return
        if isinstance(error, StoreError) or not is_foreign(error):
            raise error
        translated = translate(error, self.store.uri(self.key))
        raise (translated.final(1) if isinstance(translated, Transient) else translated) from None

    @property
    def may_be_complete(self) -> bool:
        """Whether it failed in a way that leaves open if the object is there."""
        return self.failure is not None and is_lost_completion(self.failure)

    def give_up(self) -> None:
        """Tell the service to drop the parts."""
        self.send(_Aborted())
        self._thread.join()

    def _run(self) -> None:
        try:
            self.outcome = self.store.call("part", self.store.uri(self.key), self._put)
        except _Failed as failed:
            self.failure = failed.cause
        except Exception as error:  # noqa: BLE001 - a thread's boundary: kept, and raised by the next write or commit
            self.failure = error

    def _put(self) -> Any:
        native = self.store.open_native(engine_retries=True)
        try:
            return native.put(
                self.key,
                self._chunks(),
                use_multipart=True,
                chunk_size=self.part_bytes,
                max_concurrency=self.in_flight,
            )
        except Exception as error:
            if self._begun:
                raise _Failed(error) from error
            raise  # the upload was not even begun: all parts are still here, and it can be tried again

    def _chunks(self) -> Iterator[_Part]:
        while True:
            part = self._parts.get()
            self._begun = True
            if part is None:
                return
            if isinstance(part, _Aborted):
                raise part
            self.store.counters.add("part", bytes_written=len(part))
            yield part


class Writer:
    """A file-like, write-only object. It holds at most about twelve parts in memory, whatever the object's size: 96 MiB
    with the default part size.

    Publishing is explicit: `commit()`, or leaving a `with` block without an exception. `close()`, an exception,
    garbage collection and a killed process publish nothing. After `abort()` the service drops the parts; parts of
    a killed process stay hidden in the bucket until `voxlane checkpoint gc`, or a lifecycle rule for incomplete
    uploads, removes them.
    """

    def __init__(self, store: Store, key: str, size_hint: int = 0) -> None:
        self._store = store
        self._key = key
        self._part_bytes = part_bytes_for(size_hint, store.config.part_bytes)
        self._part: _Part | None = None
        self._filled = 0
        self._num_parts = 0
        self._upload: _Upload | None = None
        self._size = 0
        self._done = False
        self._failure: Exception | None = None

    @property
    def closed(self) -> bool:
        """Whether it was committed or aborted."""
        return self._done

    @property
    def failed(self) -> bool:
        """Whether a write failed; leaving the `with` block raises why."""
        return self._failure is not None

    def writable(self) -> bool:
        """True until committed or aborted."""
        return not self._done

    def readable(self) -> bool:
        """False."""
        return False

    def seekable(self) -> bool:
        """False: bytes are on their way once they are written."""
        return False

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Nothing to do: parts are sent when they are full."""

    def write(self, data: Any) -> int:
        """Append `data` (any contiguous buffer); returns its length in bytes. Waits while enough is in flight."""
        self._check_open()
        view = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        self._size += len(view)
        position = 0
        while position < len(view):
            if self._part is None:
                self._part = np.empty(self._part_bytes, np.uint8)
            taken = min(self._part_bytes - self._filled, len(view) - position)
            # numpy copies without the interpreter's lock, a bytearray would not.
            self._part[self._filled : self._filled + taken] = view[position : position + taken]
            self._filled += taken
            position += taken
            if self._filled == self._part_bytes:
                try:
                    self._send_part()
                except StoreError as error:
                    self._failure = error
                    raise
        return len(view)

    def commit(self) -> ObjectInfo:
        """Finish the upload; when this returns the object is there, whole."""
        from voxlane.store.bucket import ObjectInfo  # the two modules know each other

        self._check_open()
        self.finish_parts()
        self._done = True
        if self._upload is None:  # all of it fits one request
            return self._store.put(self._key, b"" if self._part is None else self._part[: self._filled])
        self._upload.send(None)
        try:
            self._upload.join()
        except StoreError:
            if not self._upload.may_be_complete or (info := self._find_stored()) is None:
                raise
            return info
        self._store.counters.add("part")  # to complete it
        outcome = self._upload.outcome
        return ObjectInfo(self._key, self._size, outcome["e_tag"], outcome["version"])

    def _find_stored(self) -> ObjectInfo | None:
        """The object, if it is certain that it holds what was written; a plain writer cannot tell."""
        return None

    def finish_parts(self) -> None:
        """Send the last part of a large object now; what the caller does between this and `commit()` costs no time."""
        if self._upload is not None and self._filled:
            self._send_part()

    def abort(self) -> None:
        """Give up: nothing is published, and the service is told to drop the parts. No effect after `commit()`."""
        if self._done:
            return
        self._done = True
        self._part = None
        if self._upload is not None:
            self._upload.give_up()

    close = abort

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            if self._failure is not None and error is not self._failure:
                # torch.save turns an error of its file into one of its own, which says nothing.
                raise self._failure from None
        elif not self._done:
            self.commit()

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self.abort()

    def _send_part(self) -> None:
        assert self._part is not None
        if self._num_parts == _MAX_PARTS:
            raise StoreError(
                f"the object is larger than {_MAX_PARTS:,} parts of {self._part_bytes >> 20} MiB",
                uri=self._store.uri(self._key),
                fix="Say how large it will be (size_hint), or raise StoreConfig.part_bytes",
            )
        if self._upload is None:
            self._upload = _Upload(self._store, self._key, self._part_bytes)
        self._upload.send(self._part[: self._filled])
        self._num_parts += 1
        self._part, self._filled = None, 0  # the engine keeps the part's memory until it is stored

    def _check_open(self) -> None:
        if self._done:
            raise StoreError(
                "this writer was committed or aborted", uri=self._store.uri(self._key), fix="Open another one"
            )
