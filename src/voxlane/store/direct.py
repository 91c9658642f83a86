"""Requests on keys that the byte engine cannot address, and listings with the exact keys, by plain HTTP.

The engine's keys are paths: it rejects empty, `.` and `..` segments and control characters, and drops a slash at either
end. For a service such keys are as good as any. `DirectStore` offers the part of the engine's interface that `Store`
uses, so that `Store` only chooses between the two.
"""

from __future__ import annotations

import contextlib
import re
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

from voxlane.errors import AlreadyExistsError, MissingExtraError, RangeError
from voxlane.store.config import StoreConfig
from voxlane.store.counters import RequestCounters
from voxlane.store.http import HttpPool, HttpResponse
from voxlane.store.retry import Retrier
from voxlane.store.services import AzureService, GcsService, S3Service, Service
from voxlane.store.translate import TransientError, translate_response, unknown_length_error

if TYPE_CHECKING:
    from voxlane.store.list_xml import ListPage

_UNADDRESSABLE = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)|[\x00-\x1f\x7f]")
LIST_PAGE_KEYS = 1000
"""Most keys that one list request returns on S3 and GCS; the engine's list requests are counted by it."""
COPY_BYTES = 256 * 1024
"""Bytes of a body that are handled at a time: few calls, but still within the processor's cache."""
TakeChunk = Callable[[int, Any], None]
"""Called with the offset of a chunk in its object, and the chunk."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_SERVICES: Mapping[str, Callable[[str, StoreConfig], Service]] = {
    "gs": GcsService,
    "s3": S3Service,
    "az": AzureService,
}


def is_addressable(key: str) -> bool:
    """Return whether the byte engine can address `key`."""
    if not ("//" in key or "/." in key or key.startswith((".", "/")) or key.endswith("/")) and key.isprintable():
        return True  # nearly all keys; the search would take longer than the rest of a read's own work
    return not key or _UNADDRESSABLE.search(key) is None


class DirectStore:
    """One bucket, by plain HTTP. Methods make one attempt and raise voxlane's errors, or TransientError."""

    def __init__(self, scheme: str, bucket: str, config: StoreConfig) -> None:
        self._service: Service = _SERVICES[scheme](bucket, config)
        self._root = f"{scheme}://{bucket}/"
        self._is_azure = scheme == "az"
        self._config = config
        self._pool = HttpPool(self._service.endpoint, config)

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, key: str, options: Mapping[str, Any] | None = None) -> DirectResponse:
        """Request an object, or `options["range"]` of it: a pair (start, stop) or {"offset": start}."""
        byte_range = (options or {}).get("range")
        start, stop = (byte_range["offset"], None) if isinstance(byte_range, dict) else byte_range or (0, None)
        headers = {} if byte_range is None else {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
        stack = contextlib.ExitStack()
        response = stack.enter_context(self._request("GET", key, headers=headers))
        try:
            self._check_length(response, key)
            return DirectResponse(
                response,
                stack,
                self._describe(response),
                None if byte_range is None else (start, stop),
                self._root + key,
            )
        except BaseException:
            stack.close()
            raise

    def head(self, key: str) -> dict[str, Any]:
        """Return the size and version of an object."""
        with self._request("HEAD", key) as response:
            response.read()
            self._check_length(response, key)
            modified = response.headers.get("last-modified")
            return {
                **self._describe(response),
                "last_modified": None if modified is None else parsedate_to_datetime(modified),
            }

    def list_page(self, prefix: str, start_after: str | None, token: str | None) -> ListPage:
        """Return the page of keys that start with `prefix` which `token` stands for, or the first one; on S3 and GCS it
        begins after key `start_after`."""
        from voxlane.store.list_xml import parse_azure_page, parse_s3_page  # pyarrow is slow to import

        query = {"prefix": prefix}
        if self._is_azure:
            query |= {"restype": "container", "comp": "list"} | ({"marker": token} if token else {})
        else:
            query |= {"list-type": "2", "encoding-type": "url", "max-keys": str(LIST_PAGE_KEYS)}
            query |= {"continuation-token": token} if token else {"start-after": start_after} if start_after else {}
        with self._request("GET", "", {name: text for name, text in query.items() if text}) as response:
            body = response.read()
        return parse_azure_page(body) if self._is_azure else parse_s3_page(body)

    # -- writing -------------------------------------------------------------------------------------------------

    def put(self, key: str, data: Any, *, mode: Any = "overwrite", use_multipart: bool, **options: Any) -> Any:
        """Write an object from a buffer; with `use_multipart`, from an iterator of parts."""
        if use_multipart:
            return self._put_parts(key, data)
        headers = dict(self._service.put_headers)
        if mode == "create":
            headers |= self._service.preconditions(None, None)
        elif isinstance(mode, dict):
            headers |= self._service.preconditions(mode["e_tag"], mode.get("version"))
        return self._write(key, bytes(data), headers, is_new=mode == "create")

    def copy(self, source: str, target: str, *, overwrite: bool) -> None:
        """Copy an object inside the bucket."""
        path = f"{self._service.root}/{self._service.quote(source)}"
        headers = {self._service.copy_header: f"{self._service.endpoint}{path}" if self._is_azure else path}
        if not overwrite:
            headers |= self._service.preconditions(None, None)
        self._write(target, b"", headers, is_new=not overwrite)

    def delete(self, key: str) -> None:
        """Delete an object."""
        with self._request("DELETE", key) as response:
            response.read()

    def _write(self, key: str, body: bytes, headers: Mapping[str, str], *, is_new: bool) -> dict[str, Any]:
        uri = self._root + key
        exists = AlreadyExistsError("the object exists already", uri=uri, fix="Write another key, or overwrite it")
        refusals = {409: exists, 412: exists} if is_new else {}
        with self._request("PUT", key, headers=headers, body=body, refusals=refusals) as response:
            _check_late_error(response, response.read(), uri)
            return self._describe(response)

    def _put_parts(self, key: str, parts: Iterable[Any]) -> dict[str, Any]:
        """Upload parts one after another; each is sent again if it fails, as the engine does."""
        names: list[str] = []
        upload_id = ""
        try:
            if not self._is_azure:
                document = ElementTree.fromstring(self._send("POST", key, {"uploads": ""})[0])
                upload_id = document.findtext("{*}UploadId", "")
            for number, part in enumerate(parts, 1):
                if self._is_azure:
                    names.append(urllib.parse.quote(f"cGFydA{number:010d}"))
                    self._send("PUT", key, {"comp": "block", "blockid": names[-1]}, part)
                else:
                    query = {"partNumber": str(number), "uploadId": upload_id}
                    names.append(self._send("PUT", key, query, part)[1]["e_tag"])
        except BaseException:
            if upload_id:
                self._send("DELETE", key, {"uploadId": upload_id})
            raise
        return self._complete(key, upload_id, names)

    def _complete(self, key: str, upload_id: str, names: Sequence[str]) -> dict[str, Any]:
        if self._is_azure:
            blocks = "".join(f"<Latest>{name}</Latest>" for name in names)
            return self._send("PUT", key, {"comp": "blocklist"}, f"<BlockList>{blocks}</BlockList>".encode())[1]
        rows = (
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in enumerate(names, 1)
        )
        body = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()
        text, meta = self._send("POST", key, {"uploadId": upload_id}, body)
        return {**meta, "e_tag": ElementTree.fromstring(text).findtext("{*}ETag", "")}

    # -- requests ------------------------------------------------------------------------------------------------

    def _send(self, method: str, key: str, query: Mapping[str, str], body: Any = None) -> tuple[bytes, dict[str, Any]]:
        """Send a request of an upload, with retries that nobody counts, like those of the engine."""
        uri = self._root + key

        def attempt() -> tuple[bytes, dict[str, Any]]:
            data = None if body is None else bytes(body)
            with self._request(method, key, query, body=data) as response:
                text = response.read()
                _check_late_error(response, text, uri)
                return text, self._describe(response)

        return Retrier(self._config.retry).call("part", uri, attempt, RequestCounters())

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        refusals: Mapping[int, Exception] | None = None,
    ) -> Iterator[HttpResponse]:
        """Send a request on `key`, or on the bucket if it is empty; raise for an error status. `refusals` has the
        errors for statuses that mean something special to this request."""
        uri = self._root + (key or (query or {}).get("prefix", ""))
        target = f"{self._service.root}/{self._service.quote(key)}" if key else self._service.root
        if query:
            target += "?" + urllib.parse.urlencode(query, quote_via=urllib.parse.quote)
        try:
            target, signed = self._service.sign(method, target, headers or {}, body)
        except MissingExtraError:
            needed_for = "the byte engine cannot send this request, and sending it without"
            raise MissingExtraError.of(self._service.extra, needed_for, uri=uri) from None
        if key and self._root.startswith("gs:"):
            # Ask for the stored bytes: GCS unpacks objects with Content-Encoding gzip for other clients.
            signed = {**signed, "Accept-Encoding": "gzip"}
        with self._pool.request(method, target, signed, body, uri=uri) as response:
            if response.status >= 300:
                error = translate_response(response.status, response.read(), uri)
                raise (refusals or {}).get(response.status, error)
            yield response

    def _check_length(self, response: HttpResponse, key: str) -> None:
        if "content-length" not in response.headers:
            raise unknown_length_error(self._root + key)

    def _describe(self, response: HttpResponse) -> dict[str, Any]:
        return {
            "size": int(response.headers.get("content-length") or 0),
            "e_tag": response.headers.get("etag"),
            "version": response.headers.get(self._service.version_header),
        }


class DirectResponse:
    """The response to a GET, before its body is read."""

    def __init__(
        self,
        response: HttpResponse,
        stack: contextlib.ExitStack,
        meta: dict[str, Any],
        byte_range: tuple[int, int | None] | None,
        uri: str,
    ) -> None:
        self._response = response
        self._stack = stack
        self._uri = uri
        self.meta = meta
        """Size, e_tag and version of the object."""
        self.range = 0, meta["size"]
        """Bytes `(start, stop)` that the body holds."""
        if byte_range is not None:
            start, stop = byte_range
            header = response.headers.get("content-range") or ""
            match = _CONTENT_RANGE.fullmatch(header)
            if response.status == 206 and match is not None:
                self.range = int(match[1]), int(match[2]) + 1
                meta["size"] = int(match[3])
            expected = start, min(meta["size"], meta["size"] if stop is None else stop)
            if response.status != 206 or self.range != expected:
                raise TransientError(f"the response is not the requested range ({header or response.status})", uri)

    def close(self) -> None:
        """Give the connection back, or close it if the body was not read: then it cannot be used again."""
        self._stack.close()

    __del__ = close

    def bytes(self) -> Any:
        """Return the body."""
        with self._stack:
            return self._response.read()

    def read_into(self, pieces: Sequence[npt.NDArray[np.uint8]], take: TakeChunk | None) -> None:
        """Fill `pieces`, which together have the size of the requested range, with the body. Pass each chunk of them to
        `take(offset, chunk)` as soon as it is filled."""
        size = sum(map(len, pieces))
        if self.range[1] - self.range[0] != size:
            raise RangeError(
                "the range lies outside the object", uri=self._uri, fix="It may have changed: list it again"
            )
        length = int(self._response.headers["content-length"])
        if length != size:
            raise TransientError(f"got {length} of {size} bytes", self._uri)
        offset = self.range[0]
        with self._stack:
            for piece in pieces:
                step = COPY_BYTES if take is not None else len(piece)
                filled = 0
                while filled < len(piece):
                    count = self._response.readinto(piece.data[filled : filled + step])
                    if not count:
                        received = offset - self.range[0]
                        raise TransientError(f"the connection failed: got {received} of {length} bytes", self._uri)
                    if take is not None:
                        take(offset, piece[filled : filled + count])
                    filled += count
                    offset += count

    def stream(self, min_chunk_size: int) -> Iterator[Any]:
        """Yield the body in chunks of at most that size."""
        with self._stack:
            while chunk := self._response.read(min_chunk_size):
                yield chunk


def _check_late_error(response: HttpResponse, text: bytes, uri: str) -> None:
    """Raise for an error in the body of a successful response: S3 sends the status before a long copy or completion."""
    if text.lstrip().startswith(b"<?xml") and b"<Error>" in text[:200]:
        raise TransientError(f"the service failed after it had answered {response.status}", uri)
