"""Build responses, and parse and format HTTP headers for all dialects."""

from __future__ import annotations

import gzip
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from email.utils import formatdate, parsedate_to_datetime
from functools import lru_cache
from http import HTTPStatus

from voxlane.testing import errors
from voxlane.testing.bodies import Body, content
from voxlane.testing.objects import STANDARD, StoredObject

Chunk = bytes | memoryview

OBJECT_FIELDS = {
    "contentType": "Content-Type",
    "contentEncoding": "Content-Encoding",
    "contentDisposition": "Content-Disposition",
    "contentLanguage": "Content-Language",
    "cacheControl": "Cache-Control",
}
"""Headers that belong to an object, by their names in the JSON API."""
METADATA_PREFIXES = {"s3": "x-amz-meta-", "gcs": "x-goog-meta-", "json": "x-goog-meta-"}
"""Prefixes of the headers with an object's user metadata, by dialect."""
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_RANGE = re.compile(r"\s*bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*$")


NO_LENGTH = -1
"""Length of a response without Content-Length."""


class Response:
    """Status, headers and body of a response.

    ``head`` contains encoded header lines, each ending in CRLF. ``length`` is the Content-Length, which differs from
    the body only for HEAD; :data:`NO_LENGTH` leaves the header out.
    """

    __slots__ = ("chunks", "head", "length", "status")

    def __init__(self, status: int, head: str = "", chunks: Sequence[Chunk] = (), length: int | None = None) -> None:
        self.status = status
        self.head = head
        self.chunks = chunks
        self.length = sum(map(len, chunks)) if length is None else length

    def encode_head(self, keep_alive: bool) -> bytes:
        """Return the encoded status line and headers."""
        status_line = _STATUS_LINES.get(self.status) or f"HTTP/1.1 {self.status} Unknown\r\n"
        length = "" if self.status in (204, 304) or self.length < 0 else f"Content-Length: {self.length}\r\n"
        close = "" if keep_alive else "Connection: close\r\n"
        return f"{status_line}Date: {format_http_date(int(time.time()))}\r\n{close}{length}{self.head}\r\n".encode()


def build_content_response(body: Body, head: str, range_header: str | None) -> Response:
    """Build the response to a read of a body, or of the range that a Range header requests."""
    content_range = parse_range(range_header, body.size) if range_header else None
    if content_range is None:
        return Response(200, head, body.slices(0, body.size), body.size)
    start, stop = content_range
    head = f"Content-Range: bytes {start}-{stop - 1}/{body.size}\r\n{head}"
    return Response(206, head, body.slices(start, stop), stop - start)


def build_read_response(stored: StoredObject, dialect: str, headers: Mapping[str, str], *, head: bool) -> Response:
    """Build the response to a read of an object, or of its headers only if ``head`` is true."""
    if dialect != "s3" and "Content-Encoding" in stored.headers:
        data = _transcode(stored, headers.get("Accept-Encoding", ""))
        if data is not None:
            return _build_transcoded_response(data, build_object_headers(stored, dialect, transcoded=True), head=head)
    object_headers = build_object_headers(stored, dialect)
    if head:
        return Response(200, object_headers, length=stored.body.size)
    return build_content_response(stored.body, object_headers, headers.get("Range"))


def _transcode(stored: StoredObject, accept_encoding: str) -> bytes | None:
    """Return the content that GCS decompresses for a client which does not accept gzip; None if it does not."""
    if stored.headers["Content-Encoding"].lower() != "gzip" or "gzip" in accept_encoding.lower():
        return None
    if "no-transform" in stored.headers.get("Cache-Control", "").lower():
        return None
    try:
        return gzip.decompress(content(stored.body))
    except (OSError, EOFError, zlib.error):
        return None  # not gzip in spite of its metadata


def _build_transcoded_response(data: bytes, object_headers: str, *, head: bool) -> Response:
    """Build a response to a decompressed read. As in GCS, it has no Content-Length, and ranges are ignored."""
    if head:
        return Response(200, object_headers, length=NO_LENGTH)
    framed = [b"%x\r\n" % len(data), data, b"\r\n0\r\n\r\n"] if data else [b"0\r\n\r\n"]
    return Response(200, f"Transfer-Encoding: chunked\r\n{object_headers}", framed, NO_LENGTH)


Handler = Callable[..., Response]
"""Function that handles one operation of an API."""


@lru_cache(maxsize=64)
def format_http_date(second: int) -> str:
    """Format a whole number of seconds since 1970 as an HTTP date."""
    return formatdate(second, usegmt=True)


def format_iso_date(seconds: float) -> str:
    """Format seconds since 1970 as RFC 3339 in UTC, with milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def parse_http_date(header: str | None) -> float | None:
    """Parse an HTTP date to seconds since 1970; None if it is absent or invalid, as RFC 9110 requires."""
    if header is None:
        return None
    try:
        return parsedate_to_datetime(header).timestamp()
    except ValueError:
        return None


def build_object_headers(stored: StoredObject, dialect: str, *, transcoded: bool = False) -> str:
    """Return the headers that describe an object to its readers."""
    cache_key = dialect + (" transcoded head" if transcoded else " head")
    headers = stored.rendered.get(cache_key)
    if headers is None:
        object_headers = {"Content-Type": stored.content_type} | stored.headers
        if transcoded:
            del object_headers["Content-Encoding"]
            object_headers["X-Guploader-Response-Body-Transformations"] = "gunzipped"
            object_headers["Warning"] = "214 UploadServer gunzipped"
        else:
            object_headers["Accept-Ranges"] = "bytes"
        if "Content-Encoding" in stored.headers and dialect != "s3":
            object_headers["Vary"] = "Accept-Encoding"
        lines = [
            f"ETag: {stored.json_etag if dialect == 'json' else stored.etag}",
            f"Last-Modified: {format_http_date(int(stored.updated_s))}",
            *(f"{name}: {value}" for name, value in object_headers.items()),
            *(f"{METADATA_PREFIXES[dialect]}{name}: {value}" for name, value in stored.metadata.items()),
            build_version_headers(stored, dialect),
        ]
        headers = stored.rendered[cache_key] = "\r\n".join(lines)
    return headers


def build_version_headers(stored: StoredObject, dialect: str) -> str:
    """Return the headers that identify the version of an object."""
    if dialect == "s3":
        # S3 does not name the usual class.
        named_class = "" if stored.storage_class == STANDARD else f"x-amz-storage-class: {stored.storage_class}\r\n"
        return f"x-amz-request-id: EMULATOR\r\n{named_class}"
    lines = [
        f"x-goog-generation: {stored.generation}\r\nx-goog-metageneration: {stored.metageneration}\r\n",
        f"x-goog-stored-content-encoding: {stored.headers.get('Content-Encoding', 'identity')}\r\n",
        f"x-goog-stored-content-length: {stored.body.size}\r\nx-goog-storage-class: {stored.storage_class}\r\n",
    ]
    if hashes := [f"{name}={value}" for name, value in stored.hashes().items()]:
        lines.append(f"x-goog-hash: {','.join(hashes)}\r\n")
    if stored.component_count is not None:
        lines.append(f"x-goog-component-count: {stored.component_count}\r\n")
    return "".join(lines)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Parse a Range header for ``size`` bytes to ``[start, stop)``; None if the complete object is to be sent.

    Multiple ranges, and anything that is not a byte range, are ignored, as the services do. Raise 416 if the range
    begins past the end.
    """
    match = _RANGE.match(header) if header else None
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        if size == 0 or int(last) == 0:
            raise errors.unsatisfiable(size)
        return max(0, size - int(last)), size
    start = int(first)
    if last and int(last) < start:
        return None
    if start >= size:
        raise errors.unsatisfiable(size)
    return start, min(int(last) + 1, size) if last else size


def select_object_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an upload that belong to the object."""
    selected = {name: headers[name] for name in OBJECT_FIELDS.values() if name in headers}
    encoding = selected.pop("Content-Encoding", "")
    # aws-chunked encodes the transfer; it is not a property of the object.
    encodings = [item.strip() for item in encoding.split(",") if item.strip() not in ("", "aws-chunked")]
    if encodings:
        selected["Content-Encoding"] = ",".join(encodings)
    return selected


def decode_aws_chunked(body: bytes) -> bytes:
    """Return the payload of an aws-chunked body, without chunk signatures and trailing checksums."""
    pieces: list[memoryview] = []
    view = memoryview(body)
    offset = 0
    while True:
        line_end = body.find(b"\r\n", offset)
        if line_end < 0:
            raise errors.invalid("The aws-chunked body ends before its last chunk", "IncompleteBody")
        try:
            length = int(body[offset:line_end].split(b";", 1)[0], 16)
        except ValueError:
            raise errors.invalid("The aws-chunked body has a chunk without a size", "InvalidRequest") from None
        if length == 0:
            return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        start = line_end + 2
        if start + length > len(body):
            raise errors.invalid("The aws-chunked body ends inside a chunk", "IncompleteBody")
        pieces.append(view[start : start + length])
        offset = start + length + 2
