"""Streaming upload of one object: parts are sent while the caller writes; nothing is visible before `commit()`."""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import StoreError
from voxlane.store.objects import ObjectInfo
from voxlane.store.translate import TransientError, is_foreign, is_lost_completion, translate

if TYPE_CHECKING:
    from voxlane.store.bucket import Store

_PARTS_IN_FLIGHT = 8
_MAX_PARTS = 10_000
"""Most parts that S3 and GCS accept in one upload."""
_MIN_PART_BYTES = 5 << 20
"""Smallest part that S3 and GCS accept, except for the last one."""
_Part = npt.NDArray[np.uint8]


class _Aborted(Exception):
    """Raised inside the engine's upload to abort it."""


class _FailedError(Exception):
    """Raised from an error by which parts were lost that cannot be sent twice, so that there is no other attempt."""


class _Upload:
    """One multipart upload on its own thread. It has no reference to its Writer, so that a Writer that is dropped
    without being closed is garbage-collected and aborts."""

    def __init__(self, store: Store, key: str, part_bytes: int) -> None:
        self.store = store
        self.key = key
        self.part_bytes = part_bytes
        # Very large objects need large parts: send fewer at a time to limit memory.
        self.in_flight = max(2, min(_PARTS_IN_FLIGHT, _PARTS_IN_FLIGHT * (8 << 20) // part_bytes))
        self.result: Any = None
        self.failure: BaseException | None = None
        self._started = False
        self._parts: queue.Queue[_Part | _Aborted | None] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._run, name="voxlane-upload", daemon=True)
        self._thread.start()

    def send(self, part: _Part | _Aborted | None) -> None:
        """Pass on a part, the end (None), or the request to abort. Blocks while the queue is full; raises if the upload
        failed."""
        while self.failure is None:
            try:
                self._parts.put(part, timeout=0.1)
                return
            except queue.Full:
                continue
        if not isinstance(part, _Aborted):
            self.join()

    def join(self) -> None:
        """Wait for the upload to end; raise its error if it failed."""
        self._thread.join()
        error = self.failure
        if error is None:
            return
        if not is_foreign(error):
            raise error
        translated = translate(error, self.store.uri(self.key))
        raise (translated.to_unavailable(1) if isinstance(translated, TransientError) else translated) from None

    def abort(self) -> None:
        """Abort the upload, so that the service drops the parts."""
        self.send(_Aborted())
        self._thread.join()

    def _run(self) -> None:
        try:
            self.result = self.store.call("part", self.store.uri(self.key), self._put)
        except _FailedError as failed:
            self.failure = failed.__cause__
        except Exception as error:  # noqa: BLE001 - a thread's boundary: the next write or commit raises it
            self.failure = error

    def _put(self) -> Any:
        native = self.store.open_native(engine_retries=True)
        try:
            return native.put(
                self.key, self._chunks(), use_multipart=True, chunk_size=self.part_bytes, max_concurrency=self.in_flight
            )
        except Exception as error:
            if self._started:
                raise _FailedError from error
            raise  # no part was sent yet, so it can be tried again

    def _chunks(self) -> Iterator[_Part]:
        while True:
            part = self._parts.get()
            self._started = True
            if part is None:
                return
            if isinstance(part, _Aborted):
                raise part
            self.store.counters.add("part", bytes_written=len(part))
            yield part


class Writer(io.RawIOBase):
    """A write-only file object. It holds at most about twelve parts in memory, whatever the size of the object: 96 MiB
    with the default part size.

    Publishing is explicit: `commit()`, or leaving a `with` block without an exception. `close()`, an exception,
    garbage collection and a killed process publish nothing. After `abort()` the service drops the parts. Parts of a
    killed process stay hidden in the bucket until `voxlane checkpoint gc`, or a lifecycle rule for incomplete uploads,
    removes them.
    """

    def __init__(self, store: Store, key: str, size_hint: int = 0) -> None:
        store.check_writable(key)
        self._store = store
        self._key = key
        hinted_bytes = -(-size_hint // (_MAX_PARTS * 9 // 10))  # a larger object must not have too many parts
        self._part_bytes = max(store.config.part_bytes, _MIN_PART_BYTES, -(-hinted_bytes >> 20) << 20)
        self._part: _Part | None = None
        self._filled = 0
        self._num_parts = 0
        self._upload: _Upload | None = None
        self._size = 0
        self._done = False
        self._failure: Exception | None = None

    @property
    def closed(self) -> bool:
        """Whether the writer was committed or aborted."""
        return self._done

    @property
    def failed(self) -> bool:
        """Whether a write failed; leaving the `with` block raises the error."""
        return self._failure is not None

    def writable(self) -> bool:
        """Return True until the writer is committed or aborted."""
        return not self._done

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def write(self, data: Any) -> int:
        """Append `data` (any contiguous buffer) and return its length in bytes. Blocks while enough is in flight."""
        self._check_open()
        view = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        self._size += len(view)
        position = 0
        while position < len(view):
            if self._part is None:
                self._part = np.empty(self._part_bytes, np.uint8)
            count = min(self._part_bytes - self._filled, len(view) - position)
            # numpy releases the interpreter's lock while it copies, a bytearray does not.
            self._part[self._filled : self._filled + count] = view[position : position + count]
            self._filled += count
            position += count
            if self._filled == self._part_bytes:
                try:
                    self._send_part()
                except StoreError as error:
                    self._failure = error
                    raise
        return len(view)

    def commit(self) -> ObjectInfo:
        """Finish the upload; when this returns, the complete object exists."""
        self._check_open()
        self.finish_parts()
        self._done = True
        if self._upload is None:  # all of it fits one request
            return self._store.put(self._key, b"" if self._part is None else self._part[: self._filled])
        self._upload.send(None)
        try:
            self._upload.join()
        except StoreError as error:
            is_lost = is_lost_completion(self._upload.failure or error)
            if not is_lost or (info := self._find_stored()) is None:
                raise
            return info
        self._store.counters.add("part")  # the request that completes the upload
        result = self._upload.result
        return ObjectInfo(self._key, self._size, result["e_tag"], result["version"])

    def _find_stored(self) -> ObjectInfo | None:
        """Return the object if it certainly holds what was written; a plain writer cannot tell."""
        return None

    def finish_parts(self) -> None:
        """Send the last part of a large object now, so that it uploads while the caller prepares the commit."""
        if self._upload is not None and self._filled:
            self._send_part()

    def abort(self) -> None:
        """Publish nothing and make the service drop the parts. Has no effect after `commit()`."""
        if self._done:
            return
        self._done = True
        self._part = None
        if self._upload is not None:
            self._upload.abort()

    close = abort

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            if self._failure is not None and error is not self._failure:
                # torch.save replaces an error of its file with one of its own, which is useless.
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
                fix="Pass its size (size_hint), or raise StoreConfig.part_bytes",
            )
        if self._upload is None:
            self._upload = _Upload(self._store, self._key, self._part_bytes)
        self._upload.send(self._part[: self._filled])
        self._num_parts += 1
        self._part, self._filled = None, 0  # the engine owns the part's memory until it is stored

    def _check_open(self) -> None:
        if self._done:
            raise StoreError(
                "this writer was already committed or aborted", uri=self._store.uri(self._key), fix="Open another one"
            )
