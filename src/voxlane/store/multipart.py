"""Uploads in parts: what a writer has filled is sent on threads of the upload's own.

On a service each part is a plain request, which is repeated by itself until the deadline of `StoreConfig.retry`. Only
where plain requests have no credentials (an extra is not installed) does the byte engine send the parts. It repeats
them by rules of its own, and a part that it gives up cannot be sent again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import CredentialsError, MissingExtraError, NotFoundError, StoreError, UnavailableError
from voxlane.store.crc32c import combine, crc32c
from voxlane.store.direct import DirectStore, is_addressable
from voxlane.store.retry import Retrier
from voxlane.store.translate import TransientError, is_foreign, is_lost_completion, translate

if TYPE_CHECKING:
    from voxlane.store.bucket import Store

Part = npt.NDArray[np.uint8]
_PARTS_IN_FLIGHT = 8
_QUEUED_PARTS = 2
"""Parts that wait for a thread, in addition to those in flight."""
BRIEF_DEADLINE_S = 10.0
"""Longest time for which requests are repeated that clean up after a failure."""
_log = logging.getLogger("voxlane")
running_uploads: set[Upload] = set()
"""Uploads whose threads run; the process waits at its end until those that were aborted have dropped their parts."""


class LostCompletionError(Exception):
    """Raised when the response to the request that publishes an object was lost, so that it may have been published."""

    def __init__(self, failure: StoreError) -> None:
        super().__init__(str(failure))
        self.failure = failure
        """The error to raise if it was not published."""


class _Aborted(Exception):
    """Raised on an upload's threads to abort it."""


class _FailedError(Exception):
    """Raised from an error by which parts were lost that cannot be sent twice, so that there is no other attempt."""


def open_upload(store: Store, key: str, part_bytes: int) -> Upload:
    """Return a new upload to `key`. No request is made."""
    if store.scheme in ("gs", "s3", "az"):
        try:
            direct: DirectStore = store.open_direct(key)
            direct.check_credentials()
            return _RequestUpload(store, key, part_bytes, direct)
        except (MissingExtraError, CredentialsError):
            if not is_addressable(key):
                raise
    return _EngineUpload(store, key, part_bytes)


class Upload:
    """One upload in parts. It has no reference to its Writer, so that a Writer that is dropped without being closed is
    garbage-collected and aborts."""

    def __init__(self, store: Store, key: str, part_bytes: int) -> None:
        self.store = store
        self.key = key
        self.part_bytes = part_bytes
        # Very large objects need large parts: send fewer at a time to limit memory.
        self.in_flight = max(2, min(_PARTS_IN_FLIGHT, _PARTS_IN_FLIGHT * (8 << 20) // part_bytes))
        self.failure: BaseException | None = None
        self._aborted = False
        self._slots = threading.Semaphore(_QUEUED_PARTS)
        self._threads: list[threading.Thread] = []
        self._num_parts = 0
        self._parts: queue.SimpleQueue[tuple[int, Part] | None] = queue.SimpleQueue()
        running_uploads.add(self)

    def send(self, part: Part) -> None:
        """Pass on a part. Blocks while enough are in flight; raises if the upload failed."""
        while self.failure is None:
            if self._slots.acquire(timeout=0.1):
                self._num_parts += 1
                self._parts.put((self._num_parts, part))
                return
        self.abort()
        self._raise_failure()

    def finish(self) -> Any:
        """Publish the object and return its size, e_tag and version. Raises LostCompletionError if it may or may not
        have been published."""
        raise NotImplementedError

    def request_abort(self) -> None:
        """Make the upload abort soon, so that the service drops the parts. Never waits, so that a finalizer can call
        it: it may run at any moment, also on a thread that holds a lock."""
        self._aborted = True
        for _ in self._threads:
            self._parts.put(None)  # wakes a thread; the put of this queue is reentrant

    def abort(self) -> None:
        """Abort the upload and wait for its end."""
        self.request_abort()
        self._join()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="voxlane-upload", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        raise NotImplementedError

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _raise_failure(self) -> None:
        error = self.failure
        if error is None:
            return
        if not is_foreign(error):
            raise error
        translated = translate(error, self.store.uri(self.key))
        if isinstance(translated, TransientError):
            raise UnavailableError(
                f"{translated}; the byte engine gave up",
                uri=translated.uri,
                fix="Check the network and the endpoint, then try again. Parts are repeated until StoreConfig.retry's "
                "deadline only if the extra for this service (voxlane[gcs], [s3] or [azure]) is installed",
            ) from None
        raise translated from None


class _RequestUpload(Upload):
    """An upload of plain requests. Each part is sent again by itself if that fails."""

    def __init__(self, store: Store, key: str, part_bytes: int, direct: DirectStore) -> None:
        super().__init__(store, key, part_bytes)
        self._direct = direct
        self._slots = threading.Semaphore(self.in_flight + _QUEUED_PARTS)
        self._starting = threading.Lock()
        self._upload_id: str | None = None
        self._counting = threading.Lock()
        self._num_running = 0
        self._parts_sent: dict[int, tuple[int, int]] = {}
        """Checksum and size of each part; only on GCS, whose objects have that of all of them."""
        self._names: dict[int, str] = {}
        """What the service calls each part."""

    def send(self, part: Part) -> None:
        """Pass on a part. Blocks while enough are in flight; raises if the upload failed."""
        super().send(part)
        if len(self._threads) < self.in_flight:
            with self._counting:
                self._num_running += 1
            self._start_thread()

    def _run(self) -> None:
        try:
            while (numbered := self._parts.get()) is not None and not self._aborted:
                try:
                    self._send_part(*numbered)
                finally:
                    del numbered  # its memory is free before the next one is taken
                    self._slots.release()
        except BaseException:  # noqa: BLE001 - a thread's boundary: `failure` is set, and the next write raises it
            pass
        finally:
            with self._counting:
                self._num_running -= 1
                is_last = self._num_running == 0
            if is_last:
                if self._aborted or self.failure is not None:
                    self._drop()
                running_uploads.discard(self)

    def _send_part(self, number: int, part: Part) -> None:
        with self._starting:
            if self._upload_id is None:
                self._upload_id = self._call(lambda: self._direct.start_upload(self.key))
        upload_id = self._upload_id
        self._names[number] = self._call(lambda: self._direct.put_part(self.key, upload_id, number, part))
        if self.store.scheme == "gs":
            self._parts_sent[number] = crc32c(part), len(part)
        self.store.counters.add("part", requests=0, bytes_written=len(part))

    def _call(self, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` until it succeeds, fails permanently, or the deadline passes, or the upload ends."""

        def checked_attempt() -> Any:
            if self._aborted or self.failure is not None:
                raise _Aborted
            return attempt()

        try:
            return self.store.call("part", self.store.uri(self.key), checked_attempt)
        except BaseException as error:
            if not isinstance(error, _Aborted):
                self.failure = self.failure or error
            raise

    def finish(self) -> Any:
        """Publish the object and return its size, e_tag and version. Raises LostCompletionError if it may or may not
        have been published."""
        for _ in self._threads:
            self._parts.put(None)
        try:
            self._join()
            self._raise_failure()
            return self._complete()
        except BaseException:
            self.abort()
            self._drop()
            raise

    def _complete(self) -> Any:
        names = [self._names[number] for number in sorted(self._names)]
        num_attempts = 0

        def attempt() -> Any:
            nonlocal num_attempts
            num_attempts += 1
            return self._direct.complete_upload(self.key, self._upload_id or "", names)

        try:
            return self.store.call("part", self.store.uri(self.key), attempt)
        except NotFoundError as error:
            # The response to an earlier attempt may have been lost: then the upload was completed and is gone.
            if num_attempts == 1 or type(error) is not NotFoundError:
                raise
            stored = self._call_briefly("head", lambda: self._direct.head(self.key))
            if self._is_published(stored, names):
                return stored
            raise LostCompletionError(error) from None
        except UnavailableError as error:
            raise LostCompletionError(error) from None

    def _is_published(self, stored: dict[str, Any], names: list[str]) -> bool:
        """Return whether a stored object certainly holds the parts: it has the checksum, or the tag, of all of them."""
        if self._parts_sent and stored["crc32c"] is not None:
            return bool(stored["crc32c"] == combine(self._parts_sent[number] for number in sorted(self._parts_sent)))
        try:
            digest = hashlib.md5(b"".join(bytes.fromhex(name.strip('"')) for name in names), usedforsecurity=False)
        except ValueError:  # the tags are no MD5s
            return False
        return bool((stored["e_tag"] or "").strip('"') == f"{digest.hexdigest()}-{len(names)}")

    def _call_briefly(self, kind: str, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` with a short deadline, because the caller waits for an error already."""
        retry = self.store.config.retry
        retrier = Retrier(replace(retry, deadline_s=min(retry.deadline_s, BRIEF_DEADLINE_S)))
        return retrier.call(kind, self.store.uri(self.key), attempt, self.store.counters)

    def _drop(self) -> None:
        """Make the service drop the parts, once."""
        with self._starting:
            upload_id, self._upload_id = self._upload_id, None
        if not upload_id:
            return
        try:
            self._call_briefly("part", lambda: self._direct.drop_upload(self.key, upload_id))
        except NotFoundError:
            pass
        except StoreError as error:
            _log.warning("%s; its parts stay until `voxlane checkpoint gc` removes them", error)


class _EngineUpload(Upload):
    """An upload by the byte engine, on one thread."""

    def __init__(self, store: Store, key: str, part_bytes: int) -> None:
        super().__init__(store, key, part_bytes)
        self._result: Any = None
        self._started = False
        self._start_thread()

    def finish(self) -> Any:
        """Publish the object and return its e_tag and version. Raises LostCompletionError if it may or may not have
        been published."""
        self._parts.put(None)
        self._join()
        try:
            self._raise_failure()
        except StoreError as error:
            if is_lost_completion(self.failure or error):
                raise LostCompletionError(error) from None
            raise
        self.store.counters.add("part")  # the request that completes the upload
        return self._result

    def _run(self) -> None:
        try:
            self._result = self.store.call("part", self.store.uri(self.key), self._put)
        except _FailedError as failed:
            self.failure = failed.__cause__
        except Exception as error:  # noqa: BLE001 - a thread's boundary: the next write or commit raises it
            self.failure = error
        finally:
            running_uploads.discard(self)

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

    def _chunks(self) -> Iterator[Part]:
        while True:
            numbered = self._parts.get()
            self._slots.release()
            self._started = True
            if self._aborted:
                raise _Aborted
            if numbered is None:
                return
            self.store.counters.add("part", bytes_written=len(numbered[1]))
            yield numbered[1]


os.register_at_fork(after_in_child=running_uploads.clear)
