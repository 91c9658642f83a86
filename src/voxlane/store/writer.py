"""Streaming upload of one object: parts are sent while the caller writes; nothing is visible before it is closed."""

from __future__ import annotations

import atexit
import io
import multiprocessing.util
import os
import queue
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import ClosedWriterError, DiscardedWarning, StoreError, VoxlaneError
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
_QUEUED_PARTS = 2
"""Parts that wait for the engine, in addition to those in flight."""
_open_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
"""Writers that are neither published nor aborted; those that are left when the process ends are reported."""
_running_uploads: set[_Upload] = set()
"""Uploads whose threads run; the process waits at its end until those that were aborted have dropped their parts."""


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
        self._aborted = False
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._free_slots = threading.Semaphore(_QUEUED_PARTS)
        self._thread = threading.Thread(target=self._run, name="voxlane-upload", daemon=True)
        _running_uploads.add(self)
        self._thread.start()

    def send(self, part: _Part | None) -> None:
        """Pass on a part, or the end (None). Blocks while the queue is full; raises if the upload failed."""
        while self.failure is None:
            if self._free_slots.acquire(timeout=0.1):
                self._parts.put(part)
                return
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

    def request_abort(self) -> None:
        """Make the upload abort soon, so that the service drops the parts. Never waits, so that a finalizer can call
        it: it may run at any moment, also on a thread that holds a lock."""
        self._aborted = True
        self._parts.put(None)  # wakes the thread; the put of this queue is reentrant

    def abort(self) -> None:
        """Abort the upload and wait for its end."""
        self.request_abort()
        self._thread.join()

    def _run(self) -> None:
        try:
            self.result = self.store.call("part", self.store.uri(self.key), self._put)
        except _FailedError as failed:
            self.failure = failed.__cause__
        except Exception as error:  # noqa: BLE001 - a thread's boundary: the next write or commit raises it
            self.failure = error
        finally:
            _running_uploads.discard(self)

    def _put(self) -> Any:
        if self._aborted:
            raise _FailedError from _Aborted()
        engine = self.store.engine_for(self.key, engine_retries=True)
        try:
            return engine.put(
                self.key, self._chunks(), use_multipart=True, chunk_size=self.part_bytes, max_concurrency=self.in_flight
            )
        except Exception as error:
            if self._started:
                raise _FailedError from error
            raise  # no part was sent yet, so it can be tried again

    def _chunks(self) -> Iterator[_Part]:
        while True:
            part = self._parts.get()
            self._free_slots.release()
            self._started = True
            if self._aborted:
                raise _Aborted
            if part is None:
                return
            self.store.counters.add("part", bytes_written=len(part))
            yield part


class Writer(io.RawIOBase):
    """A write-only file object. It holds at most about twelve parts in memory, whatever the size of the object: 96 MiB
    with the default part size.

    It publishes as a Python file does: `close()`, or leaving a `with` block without an exception. An exception in the
    block, `abort()`, garbage collection and a killed process publish nothing, nor does a `close()` that cleans up
    after an exception, as in `finally` or in the `with` block of another object: half a file must not replace a whole
    one. Whatever is discarded without an exception that is reported, or an `abort()`, gives a DiscardedWarning.

    After `abort()` the service drops the parts. Parts of a killed process stay hidden in the bucket until
    `voxlane checkpoint gc`, or a lifecycle rule for incomplete uploads, removes them.
    """

    mode = "wb"
    """As of a file that Python opened."""

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
        self._failure: BaseException | None = None
        self._dropped_wrapper = ""
        self._handled_exception = id(sys.exception())  # not the exception itself, whose frames may refer to the writer
        self._pid = os.getpid()  # a forked child inherits the writer, but must neither publish nor abort nor report it
        _open_writers.add(self)

    @property
    def name(self) -> str:
        """The URI of the object."""
        return self._store.uri(self._key)

    @property
    def closed(self) -> bool:
        """Whether the writer was closed or aborted."""
        return self._done

    @property
    def failed(self) -> bool:
        """Whether a write failed; closing raises the error."""
        return self._failure is not None

    def writable(self) -> bool:
        """Return True until the writer is closed or aborted."""
        return not self._done

    def readinto(self, buffer: Any) -> int:
        """Raise, as files that are open for writing do."""
        raise io.UnsupportedOperation("not readable")

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def write(self, data: Any) -> int:
        """Append `data` (any contiguous buffer) and return its length in bytes. Blocks while enough is in flight."""
        self._check_usable(is_closed=self.closed)
        view = np.frombuffer(data, np.uint8)
        try:
            self._append(view)
        except BaseException as error:  # part of the data may be lost, so nothing may be published any more
            self._failure = error
            raise
        return len(view)

    def _append(self, view: npt.NDArray[np.uint8]) -> None:
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
                self._send_part()
        self._size += len(view)

    def commit(self) -> ObjectInfo:
        """Publish as `close()` does, also after an exception, and return what was stored; when this returns, the
        complete object exists."""
        try:
            self._check_usable(is_closed=self._done)
            return self._publish()
        except BaseException:
            self.abort()
            raise

    def _publish(self) -> ObjectInfo:
        self.finish_parts()
        if self._upload is None:  # all of it fits one request
            self._done = True
            return self._put_whole(b"" if self._part is None else self._part[: self._filled])
        self._check_condition()
        self._done = True
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

    def _put_whole(self, data: Any) -> ObjectInfo:
        """Store an object that fits one request."""
        return self._store.put(self._key, data)

    def _check_condition(self) -> None:
        """Raise if an upload in parts must not be published; the engine has no conditional ones."""

    def _find_stored(self) -> ObjectInfo | None:
        """Return the object if it certainly holds what was written; a plain writer cannot tell."""
        return None

    def finish_parts(self) -> None:
        """Send the last part of a large object now, so that it uploads while the caller prepares the commit."""
        if self._upload is not None and self._filled:
            self._send_part()

    def abort(self) -> None:
        """Publish nothing and make the service drop the parts. Has no effect on a closed writer."""
        self._abort(wait=True)

    def _abort(self, *, wait: bool) -> None:
        if self._done:
            return
        self._done = True
        self._part = None
        if self._upload is not None and self._pid == os.getpid():
            (self._upload.abort if wait else self._upload.request_abort)()

    def close(self) -> None:
        """Publish the object, unless the writer is closed already, or this cleans up after an exception. Raises the
        error of a write that failed."""
        if self.closed:
            return
        error = sys.exception()
        if self._dropped_wrapper:
            self.discard(f"the {self._dropped_wrapper} around the writer was not closed", wait=False)
        elif error is not None and id(error) != self._handled_exception and self._failure is None:
            self.discard(
                f"the writer is closed after an exception ({type(error).__name__})",
                fix="To publish them nevertheless, call commit()",
            )
        else:
            self._end()

    def _end(self) -> None:
        """Publish, because the writer was closed without an exception."""
        self.commit()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            if not self.closed:
                self._end()
            return
        if issubclass(kind, GeneratorExit | SystemExit) and not self._done and self._pid == os.getpid():
            # Nobody reports these. A generator may be closed by a finalizer.
            reason = f"its with block ended with {kind.__name__}"
            self.discard(reason, fix="To publish them nevertheless, call commit()", wait=kind is not GeneratorExit)
        self.abort()
        if self._failure is not None and error is not self._failure:
            # torch.save replaces an error of its file with one of its own, which is useless.
            raise self._failure from None

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.name}: a writer cannot be pickled. Open one in the process that writes")

    def __del__(self) -> None:
        if not getattr(self, "_done", True) and self._pid == os.getpid():
            self.discard(wait=False)

    def _dealloc_warn(self, wrapper: object) -> None:
        """Note that `wrapper`, an object of `io` around this one, is garbage-collected; it closes the writer next."""
        self._dropped_wrapper = type(wrapper).__name__

    def discard(
        self,
        reason: str = "the writer was not closed",
        *,
        fix: str = "Call close(), or use the writer in a with block",
        wait: bool = True,
    ) -> None:
        """Abort with a warning. Finalizers must not `wait` for the service to drop the parts."""
        message = f"{self.tell():,} bytes were discarded, because {reason}"
        self._abort(wait=wait)
        warnings.warn(f"{self.name}: {message}. {fix}", DiscardedWarning, stacklevel=3)

    def _send_part(self) -> None:
        assert self._part is not None
        if self._num_parts == _MAX_PARTS:
            raise StoreError(
                f"the object is larger than {_MAX_PARTS:,} parts of {self._part_bytes >> 20} MiB",
                uri=self.name,
                fix="Pass its size (size_hint), or raise StoreConfig.part_bytes",
            )
        if self._upload is None:
            self._upload = _Upload(self._store, self._key, self._part_bytes)
        self._upload.send(self._part[: self._filled])
        self._num_parts += 1
        self._part, self._filled = None, 0  # the engine owns the part's memory until it is stored

    def _check_usable(self, *, is_closed: bool) -> None:
        if self._pid != os.getpid():
            raise ClosedWriterError(
                "this writer belongs to the process that opened it",
                uri=self.name,
                fix="Open another one in this process",
            )
        if isinstance(self._failure, VoxlaneError):
            raise self._failure
        if self._failure is not None:
            raise ClosedWriterError(
                f"a write was interrupted ({type(self._failure).__name__}), so nothing can be published",
                uri=self.name,
                fix="Write the object again, with another writer",
            )
        if is_closed:
            raise ClosedWriterError("this writer was already closed or aborted", uri=self.name, fix="Open another one")


@atexit.register
def _discard_open_writers() -> None:
    """Report and abort what this process leaves open, and wait until the service has dropped the parts."""
    for writer in list(_open_writers):
        if not writer.closed and writer._pid == os.getpid():
            try:
                writer.discard()
            except DiscardedWarning:  # warnings are errors in this process; the other writers are reported too
                traceback.print_exc()
    for upload in list(_running_uploads):
        upload.abort()


def _discard_at_exit_of_child(_: object) -> None:
    multiprocessing.util.Finalize(None, _discard_open_writers, exitpriority=0)


# A child that multiprocessing forked runs no functions of atexit at its end.
multiprocessing.util.register_after_fork(_discard_open_writers, _discard_at_exit_of_child)
os.register_at_fork(after_in_child=_running_uploads.clear)
