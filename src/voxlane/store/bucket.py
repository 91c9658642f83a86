"""One bucket: get, ranges, put, list, head, copy, delete, with retries, counting and our own errors."""

from __future__ import annotations

import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from voxlane import uri as uris
from voxlane.errors import (
    AlreadyExistsError,
    ChangedError,
    ConfigError,
    NotFoundError,
    PermissionDeniedError,
    RangeError,
    StoreError,
    VoxlaneError,
)
from voxlane.store.config import StoreConfig
from voxlane.store.counters import Counters
from voxlane.store.credentials import endpoint_of, open_native
from voxlane.store.ranges import Span, coalesce
from voxlane.store.translate import Transient, is_foreign, translate
from voxlane.store.writer import Writer

_T = TypeVar("_T")
LIST_PAGE_KEYS = 1000
"""Keys a list request returns at most on S3 and GCS; also how listed keys are counted as requests."""


_log = logging.getLogger("voxlane")
_ATTEMPTS_BEFORE_A_WORD = 5
"""A request that fails this often, some seconds, is worth a warning."""
_WORD_EVERY_S = 30.0
_COPY_BYTES = 256 * 1024
"""How much `get_into` copies at a time: enough to be few calls, little enough to stay in the processor's cache."""


@dataclass(frozen=True)
class ObjectInfo:
    """What the store says of one object."""

    key: str
    size: int
    """Bytes."""
    etag: str | None
    """Changes whenever the content does."""
    version: str | None
    """Generation or version id, where the service has them."""
    modified: datetime | None = field(default=None, compare=False)
    """When it was last written, where that was asked for (`head`)."""


class Store:
    """One bucket. Cheap to build and to pickle: it opens no connection before the first request, and opens its own
    in every process, forked ones included. Safe to use from many threads.

    Keys are whole paths inside the bucket; prefixes are plain string prefixes (`foo/a` finds `foo/a1`).
    """

    def __init__(self, uri: str, config: StoreConfig | None = None) -> None:
        parsed = uris.parse(uri)
        if not (config is None or isinstance(config, StoreConfig)):
            raise ConfigError(f"config={config!r}", uri=uri, fix="Give a StoreConfig; StoreConfig.from_dict makes one")
        self.root = parsed.root
        """The bucket's URI, ending in a slash."""
        self.config = config or StoreConfig()
        self.counters = Counters()
        """Requests, bytes and retries of this object in this process."""
        self._bucket = uris.Uri(parsed.scheme, parsed.bucket, "")
        self._reset()

    def _reset(self) -> None:
        self._pid = -1
        self._last_word = -_WORD_EVERY_S
        self._native: dict[bool, Any] = {}
        self._opening = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._part_pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self.scheme == "memory":
            raise ConfigError(
                "an in-memory store cannot leave its process", uri=self.root, fix="Use file:// or the emulator"
            )
        return {"root": self.root, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Store.__init__(self, state["root"], state["config"])

    def __repr__(self) -> str:
        return f"Store({self.root!r})"

    @property
    def scheme(self) -> str:
        """gs, s3, az, file or memory."""
        return self._bucket.scheme

    @property
    def endpoint(self) -> str | None:
        """The server that was chosen by settings or environment; None: the cloud's own, or none at all."""
        return endpoint_of(self._bucket, self.config)

    def uri(self, key: str) -> str:
        """The URI of `key` in this bucket."""
        return self.root + key

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> Any:
        """The bytes `[start, stop)` of an object (to its end when `stop` is None), as a read-only buffer.

        With `etag`, an object that is not that version raises ChangedError before its body is read.
        """
        uri = self.uri(key)
        if stop is not None and stop <= start:
            return b""
        options: dict[str, Any] = {}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}

        def attempt() -> Any:
            response = self.native.get(key, options=options or None)
            self._check_version(response.meta, etag, uri)
            body = response.bytes()
            first, last = response.range
            if len(body) != last - first:
                raise Transient(f"got {len(body)} of {last - first} bytes", uri)
            return body

        body = self.call("get", uri, attempt)
        self.counters.add("get", requests=0, bytes_read=len(body))
        return body

    def get_into(self, key: str, start: int, target: npt.NDArray[np.uint8], *, etag: str | None = None) -> None:
        """Fill `target` with the object's bytes from `start` on, without holding them twice.

        RangeError when the object ends before the target does.
        """
        uri = self.uri(key)

        def attempt() -> None:
            response = self.native.get(key, options={"range": (start, start + len(target))})
            self._check_version(response.meta, etag, uri)
            first, last = response.range
            if last - first != len(target):
                raise RangeError("the range lies outside the object", uri=uri, fix="It may have changed: list it again")
            filled = 0
            for chunk in response.stream(min_chunk_size=_COPY_BYTES):
                # numpy copies without the interpreter's lock, a memoryview would not.
                target[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
                filled += len(chunk)
            if filled != len(target):
                raise Transient(f"got {filled} of {len(target)} bytes", uri)

        self.call("get", uri, attempt)
        self.counters.add("get", requests=0, bytes_read=len(target))

    def get_chunks(
        self, key: str, start: int, stop: int, take: Callable[[int, Any], None], *, etag: str | None = None
    ) -> int:
        """Hand the bytes `[start, stop)` of an object, which are not none, to `take(place, chunk)` as they arrive: in
        order, never holding more than a few chunks. Returns the size of the whole object.

        After a failure on the way they come again, from `start` on. RangeError when the object ends before `stop`.
        """
        uri = self.uri(key)

        def attempt() -> int:
            response = self.native.get(key, options={"range": (start, stop)})
            self._check_version(response.meta, etag, uri)
            if tuple(response.range) != (start, stop):
                raise RangeError("the range lies outside the object", uri=uri, fix="It may have changed: list it again")
            place = start
            for chunk in response.stream(min_chunk_size=_COPY_BYTES):
                take(place, chunk)
                place += len(chunk)
            if place != stop:
                raise Transient(f"got {place - start} of {stop - start} bytes", uri)
            return int(response.meta["size"])

        size = self.call("get", uri, attempt)
        self.counters.add("get", requests=0, bytes_read=stop - start)
        return size

    def get_ranges(
        self, key: str, spans: Sequence[tuple[int, int]], *, etag: str | None = None, max_gap_bytes: int = 64 * 1024
    ) -> list[memoryview]:
        """Many ranges `[start, stop)` of one object, fetched concurrently, returned in the order asked.

        Ranges closer than `max_gap_bytes` share a request; what lies between them is read and dropped.
        """
        plan = coalesce([Span(a, b) for a, b in spans], max_gap_bytes=max_gap_bytes)
        futures = [self.submit(self.get, key, g.start, g.stop, etag=etag) for g in plan.groups]
        bodies = [memoryview(f.result()) for f in futures]
        return [bodies[g][start : start + span.size] for span, (g, start) in zip(plan.spans, plan.places, strict=True)]

    def head(self, key: str) -> ObjectInfo:
        """Size and version of one object."""
        meta = self.call("head", self.uri(key), lambda: self.native.head(key))
        return ObjectInfo(key, meta["size"], meta["e_tag"], meta["version"], meta["last_modified"])

    def exists(self, key: str) -> bool:
        """Whether there is an object at `key`."""
        try:
            self.head(key)
        except NotFoundError as error:
            if type(error) is NotFoundError:
                return False
            raise
        return True

    def list_pages(self, folder: str, start_after: str | None = None) -> Iterator[Any]:
        """Arrow record batches (path, last_modified, size, e_tag, version) of the objects below `folder`, which is
        empty or ends in a slash, after key `start_after`, in the service's order.

        This is the service's own listing; `voxlane.listing` builds plain prefixes and parallel listing on it.
        """
        uri = self.uri(folder)
        seen = start_after
        pages: Iterator[Any] | None = None

        def next_page() -> Any:
            nonlocal pages
            if pages is None:
                pages = iter(
                    self.native.list(
                        folder.rstrip("/") or None, offset=seen, chunk_size=LIST_PAGE_KEYS, return_arrow=True
                    )
                )
            try:
                return next(pages, None)
            except BaseException:
                pages = None  # a stream that failed is dead: the next attempt starts after the last key seen
                raise

        while (page := self.call("list", uri, next_page)) is not None:
            yield page
            seen = page.column("path")[page.num_rows - 1].as_py()
            if page.num_rows < LIST_PAGE_KEYS:
                return
        if seen != start_after:
            self.counters.add("list", requests=-1)  # the end was known without asking again

    # -- writing -------------------------------------------------------------------------------------------------

    def put(self, key: str, data: Any, *, if_absent: bool = False, if_etag: str | None = None) -> ObjectInfo:
        """Write one object in one request, atomically.

        `if_absent` writes only a key that does not exist (AlreadyExistsError); `if_etag` only over that version
        (ChangedError). A service without such preconditions raises UnsupportedError.
        """
        self.check_writable(key)
        mode: Any = "overwrite"
        if if_absent:
            mode = "create"
        elif if_etag is not None:
            mode = {"e_tag": if_etag}
            if self.scheme == "gs":
                mode["version"] = self._generation(key, if_etag)
        view = memoryview(data).cast("B")
        attempts = 0

        def attempt() -> Any:
            nonlocal attempts
            attempts += 1
            return self.native.put(key, view, mode=mode, use_multipart=False)

        try:
            result = self.call("put", self.uri(key), attempt)
        except (AlreadyExistsError, ChangedError):
            # The answer to an earlier attempt may have been lost on its way: then the object in the way is ours.
            if attempts == 1 or memoryview(self.get(key)) != view:
                raise
            return self.head(key)
        self.counters.add("put", requests=0, bytes_written=view.nbytes)
        return ObjectInfo(key, view.nbytes, result["e_tag"], result["version"])

    def open_writer(self, key: str, *, size_hint: int = 0) -> Writer:
        """A streaming writer for an object of any size: uploads parts of `config.part_bytes` while you write, in
        bounded memory, and publishes only on `commit()` or a clean end of its `with` block.

        `size_hint` is about how many bytes will come; beyond 80 GB it is needed, because an upload has at most 10,000
        parts."""
        self.check_writable(key)
        return Writer(self, key, size_hint)

    def check_writable(self, key: str) -> None:
        """Raise at once for a key that cannot be written: an empty one, or one in a folder that takes no files. There
        the engine would try for ever to create one."""
        if not key or key.endswith("/"):
            raise ConfigError("the URI names no object to write", uri=self.uri(key), fix="Add a name after the slash")
        if self.scheme != "file":
            return
        folder = os.path.dirname(f"/{key}")
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise PermissionDeniedError(
                f"cannot write here: {error.strerror}", uri=self.uri(key), fix="Choose a folder this user can write"
            ) from None
        if os.path.isdir(f"/{key}"):
            raise ConfigError("this is a folder", uri=self.uri(key), fix="Add a file name")

    def _generation(self, key: str, etag: str) -> str | None:
        """GCS conditions writes on generations: the one that `etag` names, if that is still the current object."""
        info = self.head(key)
        if (info.etag or "").strip('"') != etag.strip('"'):
            raise ChangedError("the object is not the expected version", uri=self.uri(key), fix="Read it again")
        return info.version

    def copy(self, source: str, target: str, *, overwrite: bool = True) -> None:
        """Copy inside the bucket, without the bytes passing here."""
        self.call("copy", self.uri(source), lambda: self.native.copy(source, target, overwrite=overwrite))

    def delete(self, keys: str | Iterable[str]) -> None:
        """Delete objects; one that is gone already is no error."""
        wanted = [keys] if isinstance(keys, str) else list(keys)
        for future in [self.submit(self.delete_one, key) for key in wanted]:
            future.result()

    def delete_one(self, key: str) -> None:
        """Delete one object, on the calling thread."""
        try:
            self.call("delete", self.uri(key), lambda: self.native.delete(key))
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise

    def delete_prefix(self, prefix: str) -> int:
        """Delete every object whose key starts with `prefix`, a plain string; returns how many there were."""
        deleted = 0
        folder = prefix[: prefix.rfind("/") + 1]
        for page in self.list_pages(folder):
            keys = [key for key in page.column("path").to_pylist() if key.startswith(prefix)]
            self.delete(keys)
            deleted += len(keys)
        return deleted

    # -- machinery -----------------------------------------------------------------------------------------------

    @property
    def native(self) -> Any:
        """The engine's store of this process."""
        return self.open_native()

    def open_native(self, *, engine_retries: bool = False) -> Any:
        """The engine's store of this process, made once; with `engine_retries` the one that retries by itself, for
        uploads in parts."""
        self._enter_process()
        if engine_retries in self._native:
            return self._native[engine_retries]
        with self._opening:  # it takes 20 ms, and many threads may ask at once
            if engine_retries not in self._native:
                try:
                    self._native[engine_retries] = open_native(self._bucket, self.config, engine_retries=engine_retries)
                except Exception as error:
                    if isinstance(error, VoxlaneError) or not is_foreign(error):
                        raise
                    said = str(error).splitlines()[0]
                    raise ConfigError(f"cannot open the bucket: {said}", uri=self.root) from None
            return self._native[engine_retries]

    def submit(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> Future[_T]:
        """Run `call` on the store's own threads, of which there are `config.max_concurrency`. What runs there must
        not wait for another submitted call."""
        self._enter_process()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.config.max_concurrency, thread_name_prefix="voxlane")
        return self._pool.submit(call, *args, **kwargs)

    def submit_part(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> Future[_T]:
        """As `submit`, for ranges of large objects, of which `config.max_parts` are in flight."""
        self._enter_process()
        if self._part_pool is None:
            self._part_pool = ThreadPoolExecutor(self.config.max_parts, thread_name_prefix="voxlane-part")
        return self._part_pool.submit(call, *args, **kwargs)

    def _enter_process(self) -> None:
        """Forget what belongs to the parent when this is a forked child."""
        if self._pid != (pid := os.getpid()):
            _inherited.append((self._native, self._pool, self._part_pool))
            self._reset()
            self._pid = pid

    def _check_version(self, meta: Any, etag: str | None, uri: str) -> None:
        # Azure's listing leaves out the quotes that its reads have.
        if etag is not None and meta["e_tag"] is not None and meta["e_tag"].strip('"') != etag.strip('"'):
            raise ChangedError(
                f"the object changed after it was listed (listed as {etag}, now {meta['e_tag']})",
                uri=uri,
                fix="List the bucket again, or restore the object",
            )

    def call(self, kind: str, uri: str, attempt: Callable[[], _T]) -> _T:
        """Call `attempt` until it succeeds, fails for good, or the deadline passes; count every request."""
        retry = self.config.retry
        deadline = time.monotonic() + retry.deadline_s
        delay_s = retry.initial_delay_s
        attempts = 0
        while True:
            attempts += 1
            self.counters.add(kind, retries=int(attempts > 1))
            try:
                return attempt()
            except Transient as error:
                failure = error
            except Exception as error:
                if isinstance(error, VoxlaneError) or not is_foreign(error):
                    raise
                translated = translate(error, uri)
                if isinstance(translated, StoreError):
                    raise translated from None
                failure = translated
            pause_s = delay_s * random.uniform(0.5, 1.0)
            if time.monotonic() + pause_s > deadline:
                raise failure.final(attempts) from None
            if attempts == _ATTEMPTS_BEFORE_A_WORD:
                self._say_that_it_retries(failure)
            time.sleep(pause_s)
            delay_s = min(delay_s * retry.multiplier, retry.max_delay_s)

    def _say_that_it_retries(self, failure: Transient) -> None:
        now = time.monotonic()
        if now - self._last_word > _WORD_EVERY_S:  # many requests fail together; one line is enough
            self._last_word = now
            deadline_s = self.config.retry.deadline_s
            _log.warning("%s: %s; trying again for up to %.0f s", failure.uri, failure, deadline_s)


_inherited: list[Any] = []
"""Engine objects of the parent process, kept for ever: their destructors would wait for threads that are gone."""
