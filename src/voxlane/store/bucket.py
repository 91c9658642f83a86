"""One bucket: get, put, list, head, copy and delete, with retries, request counters and voxlane's errors."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from voxlane import uri as uris
from voxlane.errors import (
    AlreadyExistsError,
    ChangedError,
    ConfigError,
    CredentialsError,
    InvalidKeyError,
    MissingExtraError,
    NotFoundError,
    PermissionDeniedError,
    RangeError,
    UnsupportedError,
)
from voxlane.store.config import StoreConfig
from voxlane.store.counters import RequestCounters
from voxlane.store.credentials import open_native, resolve_endpoint
from voxlane.store.direct import COPY_BYTES, DirectResponse, DirectStore, PartChecksum, TakeChunk, is_addressable
from voxlane.store.file_locks import lock_current_version, not_expected_version
from voxlane.store.list_pages import drop_folder_markers, list_pages
from voxlane.store.local_files import LocalFiles
from voxlane.store.multiplexed import MultiplexedReader, WholeRead
from voxlane.store.native import entering_process
from voxlane.store.objects import ObjectInfo, changed_error
from voxlane.store.retry import Retrier
from voxlane.store.service_checksums import ServiceChecksum
from voxlane.store.translate import TransientError, UnknownLengthError, WrongBytesError, is_foreign, no_etag_error
from voxlane.store.writer import Writer

_T = TypeVar("_T")


@contextlib.contextmanager
def ignore_missing_object() -> Iterator[None]:
    """Ignore that an object does not exist; a missing bucket is still an error."""
    try:
        yield
    except NotFoundError as error:
        if type(error) is not NotFoundError:
            raise


@contextlib.contextmanager
def _closing(response: Any) -> Iterator[Any]:
    """Close a plain response at the end, also if its body was not read: its connection must not wait for the garbage
    collector. The engine's and files' responses hold nothing."""
    try:
        yield response
    finally:
        if isinstance(response, DirectResponse):
            response.close()


class Store:
    """The bucket of a URI; a key in the URI is ignored (see `locate`). Safe to use from many threads.

    It is cheap to construct and to pickle: connections are opened with the first request, separately in every process,
    forked ones included. Keys are complete paths inside the bucket; prefixes are plain string prefixes (`foo/a`
    matches `foo/a1`).
    """

    def __init__(self, uri: str, config: StoreConfig | None = None) -> None:
        parsed = uris.parse(uri)
        if not (config is None or isinstance(config, StoreConfig)):
            raise ConfigError(
                f"config must be a StoreConfig, got {config!r}", uri=uri, fix="StoreConfig.from_dict makes one"
            )
        self.root = parsed.root
        """The bucket's URI, ending in a slash."""
        self.scheme = parsed.scheme
        """gs, s3, az, file or memory."""
        self.bucket = parsed.bucket
        """Name of the bucket or container; empty for `file`."""
        self.config = config or StoreConfig()
        self.counters = RequestCounters()
        """Requests, bytes and retries of this store in this process."""
        self._bucket = uris.Uri(parsed.scheme, parsed.bucket, "")
        self._reset()

    @classmethod
    def locate(cls, uri: uris.StrPath, config: StoreConfig | None = None) -> tuple[Self, str]:
        """Return the bucket of `uri`, and the key in it."""
        parsed = uris.parse(uri)
        return cls(str(parsed), config), parsed.key

    def _reset(self) -> None:
        self._pid = -1
        self._retrier = Retrier(self.config.retry)
        self._native: dict[bool, Any] = {}
        self._has_credentials = True  # for plain requests, until they turn out to be missing
        self._packed: set[str] = set()  # keys of objects that GCS would unpack for the engine
        self._direct: DirectStore | LocalFiles | None = None
        self._multiplexed: MultiplexedReader | None = None
        self._opening = threading.Lock()
        self._pools: dict[str, ThreadPoolExecutor] = {}

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
    def endpoint(self) -> str | None:
        """URL of the server that config or environment choose; None for a cloud's default server or a local store."""
        return resolve_endpoint(self._bucket, self.config)

    def uri(self, key: str) -> str:
        """Return the URI of `key` in this bucket."""
        return self.root + key

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> Any:
        """Return the bytes `[start, stop)` of an object (to its end if `stop` is None) as a read-only buffer. With
        `etag`, raise ChangedError if the object has another version, before its body is read."""
        if stop is not None and stop <= start:
            return b""
        options: dict[str, Any] = {}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}
        return self._get(key, options or None, etag, lambda response, _: response.bytes())

    def get_bytes(self, key: str, *, etag: str | None = None, size: int | None = None) -> bytes:
        """Return a whole object as `bytes`, read in one request; with `etag`, only that version, as `get` does. With
        `size`, a body of another size is read again before ChangedError is raised."""

        def read_body(response: Any, length: int) -> bytes:
            if size is not None:
                self._check_size(key, length, size)
            if isinstance(response, DirectResponse):
                return response.bytes()
            # A stream of one chunk fills the bytes object straight from the network's buffers, and joining one chunk
            # returns it. `response.bytes()` would be copied twice. Files are not streamed: their chunks have 8 KiB.
            is_file = self.scheme == "file"
            return bytes(response.bytes()) if is_file else b"".join(response.stream(min_chunk_size=length))

        body: bytes = self._get(key, None, etag, read_body)
        return body

    def _get(self, key: str, options: Any, etag: str | None, read_body: Callable[[Any, int], Any]) -> Any:
        """Return what `read_body(response, size)` returns, which must be as many bytes as the response announces."""
        uri = self.uri(key)

        def attempt() -> Any:
            with _closing(self._reader_for(key).get(key, options=options)) as response:
                self._check_version(response.meta, etag, uri)
                first, last = response.range
                body = read_body(response, last - first)
            if len(body) != last - first:
                raise TransientError(f"got {len(body)} of {last - first} bytes", uri)
            return body

        body = self._read("get", key, attempt)
        self.counters.add("get", requests=0, bytes_read=len(body))
        return body

    def get_end(self, key: str, num_bytes: int) -> tuple[ObjectInfo, Any]:
        """Return the size and version of an object, and its last `num_bytes` bytes, or all of a smaller one."""
        uri = self.uri(key)

        def attempt() -> tuple[ObjectInfo, Any]:
            with _closing(self._reader_for(key).get(key, options={"range": {"suffix": num_bytes}})) as response:
                meta, body = response.meta, response.bytes()
            info = ObjectInfo(key, meta["size"], meta["e_tag"], meta["version"], meta.get("last_modified"))
            if len(body) != min(num_bytes, info.size):
                raise TransientError(f"got {len(body)} of {min(num_bytes, info.size)} bytes", uri)
            return info, body

        if self.scheme in ("gs", "s3") and is_addressable(key):  # Azure cannot count from the end
            with contextlib.suppress(UnknownLengthError):  # GCS would unpack it: see _read
                info, body = self._read("get", key, attempt)
                self.counters.add("get", requests=0, bytes_read=len(body))
                return info, body
        info = self.head(key)
        return info, self.get(key, max(0, info.size - num_bytes), info.size, etag=info.etag)

    @property
    def receives_directly(self) -> bool:
        """Whether objects are read by plain requests: their bytes are compared with the service's checksums, and
        `get_into` lets the system write straight into its target."""
        return self._has_credentials and self.scheme in ("gs", "s3", "az")

    def submit_whole(self, key: str, *, size: int, etag: str | None = None) -> Future[bytes]:
        """Start to read a whole object as `get_bytes` does. Suits objects of up to a few hundred KB, of which many are
        read at once."""

        def fall_back() -> Future[bytes]:
            return self.submit(self.get_bytes, key, etag=etag, size=size)

        try:
            reader = self._open_multiplexed(key) if key and self.receives_directly else None
            if reader is None:
                return fall_back()
            request = self.open_direct(key).encode_get(key)
        except Exception:  # noqa: BLE001 - no credentials, no thread, ...: the future has the error if it comes again
            return fall_back()
        expected = None if etag is None else etag.strip('"')
        return reader.submit(WholeRead(key, size, expected, request, self._count_whole, fall_back))

    def _count_whole(self, bytes_read: int, retries: int) -> None:
        self.counters.add("get", retries=retries, bytes_read=bytes_read)

    def _open_multiplexed(self, key: str) -> MultiplexedReader | None:
        """Return the reader of whole objects in this process, created once; None if a proxy must be used."""
        direct: DirectStore = self.open_direct(key)
        if self._multiplexed is None and not direct.pool.has_proxy:
            with self._opening:
                self._multiplexed = self._multiplexed or MultiplexedReader(direct, self.config)
        return self._multiplexed

    def get_into(
        self,
        key: str,
        start: int,
        target: npt.NDArray[np.uint8] | Sequence[npt.NDArray[np.uint8]],
        *,
        etag: str | None = None,
        take: TakeChunk | None = None,
        is_whole: bool = False,
    ) -> PartChecksum | None:
        """Fill `target`, an array or several that follow each other, with the object's bytes from `start` on, without a
        second copy in memory. Raises RangeError if the object ends before the target is full.

        `is_whole`: the target is as large as the object, which is requested as a whole, because S3 states no checksum
        with a range. An object of another size raises ChangedError.
        Chunks are passed to `take(offset, chunk)` in order as they arrive; after a failure again from `start` on.
        Returns what `check_parts` needs to compare all parts of an object with the service's checksum, if known.
        """
        pieces = [target] if isinstance(target, np.ndarray) else target
        if self.receives_directly:
            try:
                return self._receive_into(key, None if is_whole else start, pieces, etag, take)
            except (MissingExtraError, CredentialsError):
                self._has_credentials = False  # the engine may still find some
        starts = list(itertools.accumulate(map(len, pieces), initial=start))

        def copy(offset: int, chunk: Any) -> None:
            data = np.frombuffer(chunk, np.uint8)
            index, position = bisect.bisect_right(starts, offset) - 1, 0
            while position < len(data):
                low = offset + position - starts[index]
                piece = pieces[index][low : low + len(data) - position]
                # numpy releases the interpreter's lock while it copies, a memoryview does not.
                piece[:] = data[position : position + len(piece)]
                index, position = index + 1, position + len(piece)
            if take is not None:
                take(offset, data)

        self.get_chunks(key, start, starts[-1], copy, etag=etag)
        return None

    def _receive_into(
        self,
        key: str,
        start: int | None,
        pieces: Sequence[npt.NDArray[np.uint8]],
        etag: str | None,
        take: TakeChunk | None,
    ) -> PartChecksum | None:
        """Fill `pieces` by a plain request, from `start` on or with the whole object. The system writes the body
        straight into them: this takes 40% less processor time than the engine, which has buffers of its own."""
        self._check_names_object(key)
        uri, size = self.uri(key), sum(map(len, pieces))
        options = None if start is None else {"range": (start, start + size)}

        def attempt() -> PartChecksum | None:
            direct: DirectStore = self.open_direct(key)
            with contextlib.closing(direct.get(key, options=options)) as response:
                self._check_version(response.meta, etag, uri)
                if start is None:
                    self._check_size(key, response.range[1], size)
                return response.read_into(pieces, take)

        checksum = self.call("get", uri, attempt)
        self.counters.add("get", requests=0, bytes_read=size)
        return checksum

    def find_checksum(self, key: str, *, etag: str | None = None) -> ServiceChecksum | None:
        """Return the checksum of an object of S3, which states it only with whole objects, or None: the checksums of
        other services come with every part."""
        if self.scheme != "s3" or self.config.verify == "off" or not self.receives_directly:
            return None

        def attempt() -> ServiceChecksum | None:
            meta = self.open_direct(key).head(key)
            self._check_version(meta, etag, self.uri(key))
            checksum: ServiceChecksum | None = meta["checksum"]
            return checksum

        return self.call("head", self.uri(key), attempt)

    def get_chunks(self, key: str, start: int, stop: int, take: TakeChunk, *, etag: str | None = None) -> int:
        """Pass the bytes `[start, stop)` of an object, at least one, to `take(offset, chunk)` in order as they arrive.

        At most a few chunks are in memory. After a failure the bytes are passed again from `start` on. Returns the size
        of the object in bytes; raises RangeError if the object ends before `stop`.
        """
        uri = self.uri(key)

        def attempt() -> int:
            with _closing(self._reader_for(key).get(key, options={"range": (start, stop)})) as response:
                self._check_version(response.meta, etag, uri)
                if tuple(response.range) != (start, stop):
                    fix = "It may have changed: list it again"
                    raise RangeError("the range lies outside the object", uri=uri, fix=fix)
                offset = start
                for chunk in response.stream(min_chunk_size=COPY_BYTES):
                    if offset + len(chunk) <= stop:
                        take(offset, chunk)
                    offset += len(chunk)
            if offset != stop:
                raise TransientError(f"got {offset - start} of {stop - start} bytes", uri)
            return int(response.meta["size"])

        size = self._read("get", key, attempt)
        self.counters.add("get", requests=0, bytes_read=stop - start)
        return size

    def head(self, key: str) -> ObjectInfo:
        """Return the size and version of one object."""

        def attempt() -> Any:
            meta = self.engine_for(key).head(key)
            if meta["e_tag"] is None and self.scheme in ("gs", "s3", "az"):
                raise no_etag_error(self.uri(key))
            return meta

        meta = self._read("head", key, attempt)
        return ObjectInfo(key, meta["size"], meta["e_tag"], meta["version"], meta["last_modified"])

    def _read(self, kind: str, key: str, attempt: Callable[[], _T]) -> _T:
        """Call `attempt`, which asks `engine_for(key)`. GCS unpacks objects that are stored with Content-Encoding gzip
        for clients that do not ask for the stored bytes, and then sends no length; plain requests ask for them."""
        self._check_names_object(key)
        try:
            return self.call(kind, self.uri(key), attempt)
        except (MissingExtraError, CredentialsError):
            if not self.receives_directly or not is_addressable(key):
                raise
            self._has_credentials = False  # the engine may still find some
            return self._read(kind, key, attempt)
        except UnknownLengthError:
            if self.scheme != "gs" or key in self._packed:
                raise
            self._packed.add(key)
            return self.call(kind, self.uri(key), attempt)

    def find(self, key: str) -> ObjectInfo | None:
        """Return the size and version of one object, or None if it does not exist."""
        with ignore_missing_object():
            return self.head(key)
        return None

    def exists(self, key: str) -> bool:
        """Return whether there is an object at `key`."""
        return self.find(key) is not None

    def list_pages(self, prefix: str, start_after: str | None = None, *, folder_markers: bool = False) -> Iterator[Any]:
        """Yield Arrow record batches (path, last_modified, size, e_tag, version) of the objects whose keys start with
        `prefix`, a plain string, after key `start_after`, in the service's order.

        A folder marker, which is an empty object whose key ends in a slash, is left out unless `folder_markers` is set.
        This is the service's own listing; `voxlane.store.listing` adds parallel listing to it.
        """
        for page in list_pages(self, prefix, start_after):
            listed = page if folder_markers else drop_folder_markers(page)
            if listed.num_rows:
                yield listed

    def list_folder(self, folder: str) -> Iterator[ObjectInfo]:
        """Yield the objects below `folder`, which is empty or ends in a slash, in the service's order."""
        for page in self.list_pages(folder):
            columns = ("path", "size", "e_tag", "version", "last_modified")
            for row in zip(*(page.column(name).to_pylist() for name in columns), strict=True):
                yield ObjectInfo(*row)

    # -- writing -------------------------------------------------------------------------------------------------

    def put(self, key: str, data: Any, *, if_absent: bool = False, if_etag: str | None = None) -> ObjectInfo:
        """Write one object in one request, atomically.

        `if_absent` writes only if the key does not exist (else AlreadyExistsError); `if_etag` only if the object has
        that version (else ChangedError). A service without such preconditions raises UnsupportedError.
        """
        self.check_writable(key)
        if if_etag is not None and self.scheme == "file":
            with lock_current_version(f"/{key}", self.uri(key)):
                self._head_version(key, if_etag)
                return self.put(key, data)
        mode: Any = "overwrite"
        if if_absent:
            mode = "create"
        elif if_etag is not None:
            mode = {"e_tag": if_etag}
            if self.scheme == "gs":
                # On GCS conditional writes need generations.
                mode["version"] = self._head_version(key, if_etag).version
                if mode["version"] is None:
                    problem = "the service gives no generation, so the object cannot be replaced conditionally"
                    raise UnsupportedError(problem, uri=self.uri(key))
        view = memoryview(data).cast("B")
        attempts = 0

        def attempt() -> Any:
            nonlocal attempts
            attempts += 1
            return self.engine_for(key).put(key, view, mode=mode, use_multipart=False)

        try:
            result = self.call("put", self.uri(key), attempt)
        except (AlreadyExistsError, ChangedError):
            # The response to an earlier attempt may have been lost: then the existing object is the one we wrote.
            if attempts == 1 or memoryview(self.get(key)) != view:
                raise
            return self.head(key)
        self.counters.add("put", requests=0, bytes_written=view.nbytes)
        return ObjectInfo(key, view.nbytes, result["e_tag"], result["version"])

    def open_writer(self, key: str, *, size_hint: int = 0) -> Writer:
        """Open a streaming writer for an object of any size.

        It uploads parts of `config.part_bytes` while you write, in bounded memory, and publishes only on `close()` or
        when its `with` block ends without an exception. `size_hint` is the approximate size in bytes; above 80 GB it is
        required, because an upload has at most 10,000 parts.
        """
        return Writer(self, key, size_hint)

    def check_writable(self, key: str) -> None:
        """Raise for a key that cannot be written: an empty key, or a key in a folder where no file can be created. The
        engine would retry the latter for ever."""
        if not key or key.endswith("/"):
            problem = "voxlane writes no key that ends in a slash" if key else "the URI names no object"
            raise ConfigError(problem, uri=self.uri(key), fix="Add a name after the slash")
        if self.scheme != "file":
            return
        folder = os.path.dirname(f"/{key}")
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise PermissionDeniedError(
                f"cannot write here: {error.strerror}", uri=self.uri(key), fix="Choose a folder this user can write to"
            ) from None
        if os.path.isdir(f"/{key}"):
            raise ConfigError("the URI is a folder", uri=self.uri(key), fix="Add a file name")

    def _head_version(self, key: str, etag: str) -> ObjectInfo:
        """Return the size and version of an object; raise ChangedError unless its version is `etag`."""
        info = self.head(key)
        if (info.etag or "").strip('"') != etag.strip('"'):
            raise not_expected_version(self.uri(key))
        return info

    def copy(self, source: str, target: str, *, overwrite: bool = True) -> None:
        """Copy an object inside the bucket; the service copies it without a download."""
        uses_engine = is_addressable(source) and is_addressable(target) and not overwrite

        def attempt() -> None:
            engine = self.engine_for(source) if uses_engine else self._reader_for(source, target)
            engine.copy(source, target, overwrite=overwrite)

        self._read("copy", source, attempt)

    def delete(self, keys: str | Iterable[str]) -> None:
        """Delete objects; it is no error if one does not exist."""
        key_list = [keys] if isinstance(keys, str) else list(keys)
        for future in [self.submit(self.delete_one, key) for key in key_list]:
            future.result()

    def delete_one(self, key: str) -> None:
        """Delete one object on the calling thread."""
        with ignore_missing_object():
            self._read("delete", key, lambda: self._reader_for(key).delete(key))

    def delete_prefix(self, prefix: str) -> int:
        """Delete every object whose key starts with `prefix`, a plain string; return how many there were."""
        deleted = 0
        for page in self.list_pages(prefix, folder_markers=True):
            keys = page.column("path").to_pylist()
            self.delete(keys)
            deleted += len(keys)
        return deleted

    # -- connections, threads and retries ------------------------------------------------------------------------

    @property
    def native(self) -> Any:
        """The engine's store in this process."""
        return self.open_native()

    def open_native(self, *, engine_retries: bool = False) -> Any:
        """Return the engine's store in this process, created once; with `engine_retries` one that retries requests by
        itself, for multipart uploads."""
        self._enter_process()
        if engine_retries in self._native:
            return self._native[engine_retries]
        with self._opening:  # opening takes 20 ms, and many threads may need it at once
            if engine_retries not in self._native:
                try:
                    self._native[engine_retries] = open_native(self._bucket, self.config, engine_retries=engine_retries)
                except Exception as error:
                    if not is_foreign(error):
                        raise
                    reason = str(error).splitlines()[0]
                    raise ConfigError(f"cannot open the bucket: {reason}", uri=self.root) from None
            return self._native[engine_retries]

    def engine_for(self, key: str, *, engine_retries: bool = False) -> Any:
        """Return the engine's store in this process, or for a key that the engine cannot address or read, the store
        that sends plain requests. It has the same methods."""
        if is_addressable(key) and key not in self._packed:
            return self.open_native(engine_retries=engine_retries)
        return self.open_direct(key)

    def _reader_for(self, *keys: str) -> Any:
        """Return the store that reads, copies and deletes `keys`: where possible by plain requests. Their responses
        state checksums, and the pages of proxies are recognised."""
        if self.receives_directly:
            return self.open_direct(keys[0])
        return self.engine_for(next((key for key in keys if not is_addressable(key)), keys[0]))

    def open_direct(self, key: str = "") -> Any:
        """Return the store that sends plain requests, created once per process."""
        self._enter_process()
        if self._direct is None:
            if self.scheme == "memory":
                raise InvalidKeyError("an in-memory store cannot hold this key", uri=self.uri(key), fix="Use file://")
            with self._opening:
                if self.scheme == "file":
                    self._direct = LocalFiles()
                else:
                    self._direct = self._direct or DirectStore(self.scheme, self.bucket, self.config)
        return self._direct

    def submit(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> Future[_T]:
        """Run `call` on one of the store's `config.max_concurrency` threads. It must not wait for another submitted
        call."""
        return self._open_pool("voxlane", self.config.max_concurrency).submit(call, *args, **kwargs)

    def submit_part(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> Future[_T]:
        """Run `call` like `submit`, for ranges of large objects: at most `config.max_parts` run at a time."""
        return self._open_pool("voxlane-part", self.config.max_parts).submit(call, *args, **kwargs)

    def _open_pool(self, name: str, num_threads: int) -> ThreadPoolExecutor:
        self._enter_process()
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        return self._pools[name]

    def _enter_process(self) -> None:
        """Drop the parent's connections and threads if this is a forked child."""
        if self._pid == (pid := os.getpid()):
            return
        with entering_process:
            if self._pid != pid:
                if self._pid != -1:
                    _inherited.append((self._native, self._direct, self._multiplexed, self._pools))
                self._reset()
                self._pid = pid

    def _check_names_object(self, key: str) -> None:
        if not key:
            raise ConfigError("the URI names no object", uri=self.root, fix="Add a name after the slash")

    def _check_version(self, meta: Any, etag: str | None, uri: str) -> None:
        # Azure's listings omit the quotes that its reads have.
        if etag is not None and meta["e_tag"] is not None and meta["e_tag"].strip('"') != etag.strip('"'):
            raise changed_error(uri, f"as {etag}", meta["e_tag"])

    def _check_size(self, key: str, length: int, expected: int) -> None:
        """Raise an error unless a response has the listed size: it is read again before ChangedError is raised."""
        if length != expected:
            blame = lambda _: changed_error(self.uri(key), f"with {expected} bytes", f"{length}")  # noqa: E731
            raise WrongBytesError(f"got {length} of {expected} bytes", self.uri(key), blame)

    def call(self, kind: str, uri: str, attempt: Callable[[], _T]) -> _T:
        """Call `attempt` until it succeeds, fails permanently, or the deadline passes; count every request."""
        return self._retrier.call(kind, uri, attempt, self.counters)

    def call_again(self, kind: str, uri: str, attempt: Callable[[], _T]) -> _T:
        """Call `attempt` like `call`. Its first call checks bytes that were read before, so it counts no request; the
        others count as retries by the requests that they make."""
        return self._retrier.call(kind, uri, attempt, RequestCounters())


_inherited: list[Any] = []
"""Engine objects of the parent process, never freed: their destructors would wait for threads that do not exist."""
