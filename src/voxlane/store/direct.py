"""Requests on keys that the byte engine cannot address, and listings with the exact keys, by plain HTTP.

The engine's keys are paths: it rejects empty, `.` and `..` segments and control characters, and drops a slash at either
end. For a service such keys are as good as any. `DirectStore` offers the part of the engine's interface that `Store`
uses, so that `Store` only chooses between the two.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

from voxlane.errors import AlreadyExistsError, MissingExtraError, RangeError
from voxlane.store.config import StoreConfig
from voxlane.store.crc32c import combine, crc32c, decode
from voxlane.store.http import HttpPool, HttpResponse
from voxlane.store.service_checksums import Crc32c, ServiceChecksum, find_service_checksum
from voxlane.store.services import AzureService, GcsService, S3Service, Service
from voxlane.store.translate import (
    TransientError,
    no_etag_error,
    not_a_listing_error,
    translate_response,
    unknown_length_error,
)

if TYPE_CHECKING:
    from voxlane.store.list_xml import ListPage

_UNADDRESSABLE = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)|[\x00-\x1f\x7f]")
LIST_PAGE_KEYS = 1000
"""Most keys that one list request returns on S3 and GCS; the engine's list requests are counted by it."""
COPY_BYTES = 256 * 1024
"""Bytes of a body that are handled at a time: few calls, but still within the processor's cache."""
TakeChunk = Callable[[int, Any], None]
"""Called with the offset of a chunk in its object, and the chunk."""
_GOOG_CRC32C = re.compile(r"crc32c=([A-Za-z0-9+/]+=*)")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_SERVICES: Mapping[str, Callable[[str, StoreConfig], Service]] = {
    "gs": GcsService,
    "s3": S3Service,
    "az": AzureService,
}


_make_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


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
        self.pool = HttpPool(self._service.endpoint, config)
        """Connections of `get` and the like."""
        # S3 sends the checksums that it has only to those who ask.
        self._checksum_headers = {"x-amz-checksum-mode": "ENABLED"} if scheme == "s3" and config.verify != "off" else {}

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, key: str, options: Mapping[str, Any] | None = None) -> DirectResponse:
        """Request an object, or `options["range"]` of it: (start, stop), {"offset": start} or {"suffix": num_bytes}."""
        byte_range = (options or {}).get("range")
        start, stop = 0, None
        if isinstance(byte_range, dict):
            start = byte_range["offset"] if "offset" in byte_range else -byte_range["suffix"]
        elif byte_range is not None:
            start, stop = byte_range
        headers = dict(self._checksum_headers)
        if byte_range is not None:
            headers = {"Range": f"bytes={start if start < 0 else f'{start}-'}{'' if stop is None else stop - 1}"}
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
                self._find_checksum(response.headers, is_range=byte_range is not None),
            )
        except BaseException:
            stack.close()
            raise

    def encode_get(self, key: str) -> bytes:
        """Return the request for a whole object, with credentials."""
        return self.pool.encode("GET", *self._address("GET", key, None, self._checksum_headers, None))[0]

    def check_whole(self, headers: Mapping[str, str], body: bytes, key: str) -> None:
        """Raise WrongBytesError unless an object has the checksum that the headers of its response state, if any."""
        checksum = self._find_checksum(headers, is_range=False)
        if checksum is not None:
            hasher = checksum.new_hasher()
            hasher.update(body)
            checksum.check(hasher.digest(), self._root + key)

    def head(self, key: str) -> dict[str, Any]:
        """Return the size and version of an object, and the service's checksum of it."""
        with self._request("HEAD", key, headers=self._checksum_headers) as response:
            response.read()
            self._check_length(response, key)
            modified = response.headers.get("last-modified")
            return {
                **self._describe(response),
                "last_modified": None if modified is None else parsedate_to_datetime(modified),
                "checksum": self._find_checksum(response.headers, is_range=False),
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
        root = b"EnumerationResults" if self._is_azure else b"ListBucketResult"
        if b"<" + root not in body[:500] or not body.rstrip().endswith(b"</" + root + b">"):
            raise not_a_listing_error(body, self._root + prefix)
        try:
            page = parse_azure_page(body) if self._is_azure else parse_s3_page(body)
        except ValueError:
            raise not_a_listing_error(body, self._root + prefix) from None
        if page.token is None and b"<IsTruncated>true<" in body:
            raise TransientError("the listing is truncated, but does not say where it goes on", self._root + prefix)
        return page

    # -- writing -------------------------------------------------------------------------------------------------

    def put(self, key: str, data: Any, *, mode: Any = "overwrite", **_: Any) -> Any:
        """Write an object from a buffer in one request."""
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

    # -- uploads in parts ----------------------------------------------------------------------------------------

    def check_credentials(self) -> None:
        """Raise MissingExtraError or CredentialsError if requests cannot be signed here."""
        self._sign("PUT", self._service.root, {}, None, self._root)

    def start_upload(self, key: str) -> str:
        """Start an upload in parts and return its id. Azure has none: its parts belong to the key."""
        if self._is_azure:
            return ""
        with self._request("POST", key, {"uploads": ""}, self._service.put_headers) as response:
            text = response.read()
        return _find_element(text, "UploadId", self._root + key)

    def put_part(self, key: str, upload_id: str, number: int, part: npt.NDArray[np.uint8]) -> str:
        """Send part `number`, counted from 1, and return what the service calls it."""
        uri = self._root + key
        name = urllib.parse.quote(f"cGFydA{number:010d}") if self._is_azure else ""
        query = {"comp": "block", "blockid": name} if self._is_azure else _part_query(upload_id, number)
        with self._request("PUT", key, query, body=part.data) as response:
            _check_late_error(response, response.read(), uri)
        stored = find_crc32c(response.headers)
        if stored is not None and stored != crc32c(part):
            raise TransientError("the service received other bytes than were sent", uri)
        if not (name or response.headers.get("etag")):
            raise TransientError("the response has no ETag", uri)
        return name or response.headers["etag"]

    def complete_upload(self, key: str, upload_id: str, names: Sequence[str]) -> dict[str, Any]:
        """Publish the object that the parts make up; return its e_tag and version."""
        uri = self._root + key
        if self._is_azure:
            blocks = "".join(f"<Latest>{name}</Latest>" for name in names)
            body = f"<BlockList>{blocks}</BlockList>".encode()
            headers = {"x-ms-blob-content-type": "application/octet-stream"}
            with self._request("PUT", key, {"comp": "blocklist"}, headers, body) as response:
                _check_late_error(response, response.read(), uri)
                return self._describe(response)
        rows = (
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in enumerate(names, 1)
        )
        body = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()
        with self._request("POST", key, {"uploadId": upload_id}, body=body) as response:
            text = response.read()
            _check_late_error(response, text, uri)
            return {**self._describe(response), "e_tag": _find_element(text, "ETag", uri)}

    def drop_upload(self, key: str, upload_id: str) -> None:
        """Drop the parts of an upload. Azure drops them by itself after a week."""
        if not self._is_azure:
            with self._request("DELETE", key, {"uploadId": upload_id}) as response:
                response.read()

    # -- requests ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        refusals: Mapping[int, Exception] | None = None,
    ) -> Iterator[HttpResponse]:
        """Send a request on `key`, or on the bucket if it is empty; raise for an error status. `refusals` has the
        errors for statuses that mean something special to this request."""
        uri = self._root + (key or (query or {}).get("prefix", ""))
        target, signed = self._address(method, key, query, headers, body)
        with self.pool.request(method, target, signed, body, uri=uri) as response:
            if response.status >= 300:
                error = translate_response(response.status, response.read_error(), uri)
                raise (refusals or {}).get(response.status, error)
            if "etag" not in response.headers and response.headers.get("content-type", "").startswith("text/html"):
                raise TransientError("the response is an HTML page, not the service's", uri)
            yield response

    def _address(
        self, method: str, key: str, query: Mapping[str, str] | None, headers: Mapping[str, str] | None, body: Any
    ) -> tuple[str, dict[str, str]]:
        """Return the target of a request and its headers, with credentials."""
        target = f"{self._service.root}/{self._service.quote(key)}" if key else self._service.root
        if query:
            target += "?" + urllib.parse.urlencode(query, quote_via=urllib.parse.quote)
        uri = self._root + (key or (query or {}).get("prefix", ""))
        target, signed = self._sign(method, target, headers or {}, body, uri)
        if key and self._root.startswith("gs:"):
            # Ask for the stored bytes: GCS unpacks objects with Content-Encoding gzip for other clients.
            signed = {**signed, "Accept-Encoding": "gzip"}
        return target, signed

    def _sign(
        self, method: str, target: str, headers: Mapping[str, str], body: Any, uri: str
    ) -> tuple[str, dict[str, str]]:
        try:
            return self._service.sign(method, target, headers, body)
        except MissingExtraError:
            needed_for = "the byte engine cannot send this request, and sending it without"
            raise MissingExtraError.of(self._service.extra, needed_for, uri=uri) from None

    def _find_checksum(self, headers: Mapping[str, str], *, is_range: bool) -> ServiceChecksum | None:
        """Return the checksum that the bytes of a whole object are compared with."""
        if self._config.verify == "off":
            return None
        checksum = find_service_checksum(headers, is_s3=self._root.startswith("s3:"), is_range=is_range)
        is_wanted = checksum is not None and (self._config.verify == "all" or checksum.algorithm.startswith("crc"))
        return checksum if is_wanted else None

    def _check_length(self, response: HttpResponse, key: str) -> None:
        if "content-length" not in response.headers:
            raise unknown_length_error(self._root + key)

    def _describe(self, response: HttpResponse) -> dict[str, Any]:
        return {
            "size": int(response.headers.get("content-length") or 0),
            "e_tag": response.headers.get("etag"),
            "version": response.headers.get(self._service.version_header),
            "crc32c": find_crc32c(response.headers),
        }


@dataclass(frozen=True)
class PartChecksum:
    """What is known about the bytes of one part of an object."""

    start: int
    size: int
    crc32c: int | None
    """Checksum of the part; None unless the object's is of this kind."""
    whole: ServiceChecksum
    """The service's checksum of the whole object."""


def check_parts(parts: Sequence[PartChecksum], whole: ServiceChecksum | None, body: Any, uri: str) -> None:
    """Raise WrongBytesError unless the parts, which make up `body`, have the object's checksum: `whole`, if the
    service stated it in another response than those with the parts."""
    crcs = [(part.crc32c, part.size) for part in sorted(parts, key=lambda part: part.start) if part.crc32c is not None]
    if crcs and len(crcs) == len(parts):
        parts[0].whole.check(combine(crcs).to_bytes(4, "big"), uri)
        return
    if whole is None:
        if not parts:
            return
        whole = parts[0].whole
    hasher = whole.new_hasher()
    hasher.update(body)
    whole.check(hasher.digest(), uri)


def new_writable_bytes(size: int) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """Return a new bytes object and a writable view of its memory.

    PyBytes_FromStringAndSize(NULL, n) exists to fill a bytes object before anything else sees it. The alternative, a
    bytearray that is copied to bytes at the end, holds a 150 MB object twice and costs a third of its download time.
    """
    if not size:
        return b"", np.empty(0, np.uint8)
    body: bytes = _make_bytes(None, size)
    memory = (ctypes.c_uint8 * size).from_address(id(body) + bytes.__basicsize__ - 1)
    return body, np.ctypeslib.as_array(memory)


class DirectResponse:
    """The response to a GET, before its body is read."""

    def __init__(
        self,
        response: HttpResponse,
        stack: contextlib.ExitStack,
        meta: dict[str, Any],
        byte_range: tuple[int, int | None] | None,
        uri: str,
        checksum: ServiceChecksum | None,
    ) -> None:
        self._response = response
        self._stack = stack
        self._uri = uri
        self.meta = meta
        """Size, e_tag and version of the object."""
        self.checksum = checksum
        """The service's checksum of the whole object, if it stated one."""
        self._received = 0
        if not meta["e_tag"]:
            raise no_etag_error(uri)
        self.range = 0, meta["size"]
        """Bytes `(start, stop)` that the body holds."""
        if byte_range is not None:
            start, stop = byte_range
            header = response.headers.get("content-range") or ""
            match = _CONTENT_RANGE.fullmatch(header)
            if response.status == 206 and match is not None:
                self.range = int(match[1]), int(match[2]) + 1
                meta["size"] = int(match[3])
            if start < 0:  # counted from the end
                start = max(0, meta["size"] + start)
            expected = start, min(meta["size"], meta["size"] if stop is None else stop)
            if response.status != 206 or self.range != expected:
                raise TransientError(f"the response is not the requested range ({header or response.status})", uri)

    def close(self) -> None:
        """Give the connection back, or close it if the body was not read: then it cannot be used again."""
        self._stack.close()

    __del__ = close

    def bytes(self) -> bytes:
        """Return the body."""
        body, target = new_writable_bytes(self.range[1] - self.range[0])
        self.read_into([target], None)
        return body

    def read_into(self, pieces: Sequence[npt.NDArray[np.uint8]], take: TakeChunk | None) -> PartChecksum | None:
        """Fill `pieces`, which together have the size of the requested range, with the body. Pass each chunk of them to
        `take(offset, chunk)` as soon as it is filled.

        A whole object is compared with the service's checksum. Of a part, return the checksum where those of all parts
        can be compared with the whole object's."""
        size = sum(map(len, pieces))
        if self.range[1] - self.range[0] != size:
            raise RangeError(
                "the range lies outside the object", uri=self._uri, fix="It may have changed: list it again"
            )
        length = int(self._response.headers["content-length"])
        if length != size:
            raise TransientError(f"got {length} of {size} bytes", self._uri)
        is_combinable = self.checksum is not None and self.checksum.algorithm == "crc32c"
        hasher = self.checksum.new_hasher() if self.checksum and (self._is_whole or is_combinable) else None
        offset = self.range[0]
        with self._stack:
            for piece in pieces:
                step = COPY_BYTES if take is not None or hasher is not None else len(piece)
                filled = 0
                while filled < len(piece):
                    chunk = piece[filled : filled + step]
                    self._fill(chunk)
                    if hasher is not None:
                        hasher.update(chunk)  # while it is in the processor's cache
                    if take is not None:
                        take(offset, chunk)
                    filled += len(chunk)
                    offset += len(chunk)
        if self.checksum is None:
            return None
        if self._is_whole and hasher is not None:
            self.checksum.check(hasher.digest(), self._uri)
        crc = hasher.value if isinstance(hasher, Crc32c) else None
        return PartChecksum(self.range[0], size, crc, self.checksum)

    def stream(self, min_chunk_size: int) -> Iterator[Any]:
        """Yield the body in chunks of that size, in new memory; a whole object is compared with the service's checksum
        after the last one."""
        hasher = self.checksum.new_hasher() if self.checksum and self._is_whole else None
        left = self.range[1] - self.range[0]
        with self._stack:
            while left:
                chunk = np.empty(min(left, min_chunk_size), np.uint8)
                self._fill(chunk)
                left -= len(chunk)
                if hasher is not None:
                    hasher.update(chunk)
                yield chunk.data
        if hasher is not None and self.checksum is not None:
            self.checksum.check(hasher.digest(), self._uri)

    @property
    def _is_whole(self) -> bool:
        return bool(self.range == (0, self.meta["size"]))

    def _fill(self, target: npt.NDArray[np.uint8]) -> None:
        """Fill `target` with the next bytes of the body."""
        view, filled = target.data, 0
        while filled < len(view):
            count = self._response.receive_into(view[filled:])
            if not count:
                size = self.range[1] - self.range[0]
                problem = f"the connection failed: got {self._received + filled} of {size} bytes"
                raise TransientError(problem, self._uri)
            filled += count
        self._received += filled


def _check_late_error(response: HttpResponse, text: bytes, uri: str) -> None:
    """Raise for an error in the body of a successful response: S3 sends the status before a long copy or completion."""
    if text.lstrip().startswith(b"<?xml") and b"<Error>" in text[:200]:
        raise TransientError(f"the service failed after it had answered {response.status}", uri)


def _part_query(upload_id: str, number: int) -> dict[str, str]:
    return {"partNumber": str(number), "uploadId": upload_id}


def _find_element(text: bytes, name: str, uri: str) -> str:
    """Return the text of an element of a response; raise TransientError for a page that is not the service's."""
    try:
        value = ElementTree.fromstring(text).findtext(f"{{*}}{name}", "")
    except ElementTree.ParseError:
        value = ""
    if not value:
        raise TransientError(f"the response has no {name}", uri)
    return value


def find_crc32c(headers: Mapping[str, str]) -> int | None:
    """Return the CRC-32C of the whole object that GCS's and S3's responses state, or None."""
    text = headers.get("x-amz-checksum-crc32c") or ""
    match = _GOOG_CRC32C.search(headers.get("x-goog-hash") or "")
    if match is not None:
        text = match[1]
    try:
        return decode(text) if text and "-" not in text else None
    except ValueError:
        return None
