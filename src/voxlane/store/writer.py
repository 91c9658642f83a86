"""Streaming upload of one object: parts are sent while the caller writes; nothing is visible before it is closed."""

from __future__ import annotations

import atexit
import io
import itertools
import multiprocessing.util
import os
import sys
import traceback
import warnings
import weakref
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import ClosedWriterError, DiscardedWarning, StoreError, VoxlaneError
from voxlane.store.multipart import BRIEF_DEADLINE_S, LostCompletionError, Part, Upload, open_upload, running_uploads
from voxlane.store.objects import ObjectInfo

if TYPE_CHECKING:
    from voxlane.store.bucket import Store

_MAX_PARTS = 10_000
"""Most parts that S3 and GCS accept in one upload."""
_MIN_PART_BYTES = 5 << 20
"""Smallest part that S3 and GCS accept, except for the last one."""
_open_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
"""Writers that are neither published nor aborted; those that are left when the process ends are reported."""
_exception_numbers = itertools.count(1)


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
        self._part: Part | None = None
        self._filled = 0
        self._num_parts = 0
        self._upload: Upload | None = None
        self._size = 0
        self._done = False
        self._failure: BaseException | None = None
        self._dropped_wrapper = ""
        self._handled_exception = _number_exception(sys.exception())
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
        try:
            result = self._upload.finish()
        except LostCompletionError as lost:
            info = self._find_stored_briefly()
            if info is None:
                raise lost.failure from None
            return info
        return ObjectInfo(self._key, self._size, result["e_tag"], result["version"])

    def _put_whole(self, data: Any) -> ObjectInfo:
        """Store an object that fits one request."""
        return self._store.put(self._key, data)

    def _check_condition(self) -> None:
        """Raise if an upload in parts must not be published; the engine has no conditional ones."""

    def _find_stored_briefly(self) -> ObjectInfo | None:
        """Return the object if it certainly holds what was written. Not being able to ask is no other error."""
        retry = self._store.config.retry
        brief = replace(retry, deadline_s=min(retry.deadline_s, BRIEF_DEADLINE_S))
        try:
            return self._find_stored(type(self._store)(self._store.root, replace(self._store.config, retry=brief)))
        except StoreError:
            return None

    def _find_stored(self, store: Store) -> ObjectInfo | None:
        """Return the object in `store` if it certainly holds what was written; a plain writer cannot tell."""
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
        elif error is not None and _number_exception(error) != self._handled_exception and self._failure is None:
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
            self._upload = open_upload(self._store, self._key, self._part_bytes)
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


def _number_exception(error: BaseException | None) -> int:
    """Return a number that no other exception has; 0 for None.

    A reference would keep the exception's frames, which may refer to the writer. `id` may belong to a later exception
    once this one is gone.
    """
    if error is None:
        return 0
    number: int = error.__dict__.setdefault("_voxlane_number", next(_exception_numbers))
    return number


@atexit.register
def _discard_open_writers() -> None:
    """Report and abort what this process leaves open, and wait until the service has dropped the parts."""
    for writer in list(_open_writers):
        if not writer.closed and writer._pid == os.getpid():
            try:
                writer.discard()
            except DiscardedWarning:  # warnings are errors in this process; the other writers are reported too
                traceback.print_exc()
    for upload in list(running_uploads):
        upload.abort()


def _discard_at_exit_of_child(_: object) -> None:
    multiprocessing.util.Finalize(None, _discard_open_writers, exitpriority=0)


# A child that multiprocessing forked runs no functions of atexit at its end.
multiprocessing.util.register_after_fork(_discard_open_writers, _discard_at_exit_of_child)
