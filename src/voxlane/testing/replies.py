"""Answers, before they are written to a connection, and the HTTP vocabulary shared by the dialects."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from email.utils import formatdate, parsedate_to_datetime
from functools import lru_cache
from http import HTTPStatus

from voxlane.testing import refusals

Chunk = bytes | memoryview

KEPT_HEADERS = (
    "Content-Type",
    "Content-Encoding",
    "Content-Disposition",
    "Content-Language",
    "Cache-Control",
)
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_RANGE = re.compile(r"\s*bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*$")


class Reply:
    """Status, headers and body of an answer.

    ``head`` is header lines already in wire form, each ending in CRLF. ``length`` is the Content-Length to
    announce; it differs from the body only for HEAD.
    """

    __slots__ = ("chunks", "head", "length", "status")

    def __init__(self, status: int, head: str = "", chunks: Sequence[Chunk] = (), length: int | None = None) -> None:
        self.status = status
        self.head = head
        self.chunks = chunks
        self.length = sum(map(len, chunks)) if length is None else length

    def wire_head(self, keep_alive: bool) -> bytes:
        """The status line and all headers, as sent."""
        status_line = _STATUS_LINES.get(self.status) or f"HTTP/1.1 {self.status} Unknown\r\n"
        length = "" if self.status in (204, 304) else f"Content-Length: {self.length}\r\n"
        close = "" if keep_alive else "Connection: close\r\n"
        return f"{status_line}Date: {_date(int(time.time()))}\r\n{close}{length}{self.head}\r\n".encode()


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


def http_date(seconds: float) -> str:
    """Seconds since the epoch as an HTTP date."""
    return formatdate(int(seconds), usegmt=True)


def iso_date(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, with milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def date_seconds(header: str | None) -> float | None:
    """An HTTP date as seconds since the epoch; None when absent or not a date, as RFC 9110 asks."""
    if header is None:
        return None
    try:
        return parsedate_to_datetime(header).timestamp()
    except ValueError:
        return None


def header_lines(headers: Mapping[str, str], prefix: str = "") -> str:
    """Headers in wire form."""
    return "".join(f"{prefix}{name}: {value}\r\n" for name, value in headers.items())


def wanted_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The ``[start, stop)`` a Range header asks of ``size`` bytes; None when the whole is to be sent.

    Several ranges, and anything that is not a byte range, are ignored, as the services do. Raises 416 when
    the range begins past the end.
    """
    match = _RANGE.match(header) if header else None
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        if size == 0 or int(last) == 0:
            raise refusals.unsatisfiable(size)
        return max(0, size - int(last)), size
    start = int(first)
    if last and int(last) < start:
        return None
    if start >= size:
        raise refusals.unsatisfiable(size)
    return start, min(int(last) + 1, size) if last else size


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of an upload that belong to the object."""
    kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
    encoding = kept.pop("Content-Encoding", "")
    # aws-chunked frames the transfer; it is not a property of the object.
    codings = [each.strip() for each in encoding.split(",") if each.strip() not in ("", "aws-chunked")]
    if codings:
        kept["Content-Encoding"] = ",".join(codings)
    return kept


def prefixed(headers: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The headers that start with ``prefix`` (lower case), without it."""
    return {name[len(prefix) :].lower(): value for name, value in headers.items() if name.lower().startswith(prefix)}


def unchunked(body: bytes) -> bytes:
    """The payload of an aws-chunked body, without chunk signatures and trailing checksums."""
    pieces: list[memoryview] = []
    view = memoryview(body)
    place = 0
    while True:
        line_end = body.find(b"\r\n", place)
        if line_end < 0:
            raise refusals.invalid("The aws-chunked body ends before its last chunk", "IncompleteBody")
        try:
            length = int(body[place:line_end].split(b";", 1)[0], 16)
        except ValueError:
            raise refusals.invalid("The aws-chunked body has a chunk without a size", "InvalidRequest") from None
        if length == 0:
            return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        start = line_end + 2
        if start + length > len(body):
            raise refusals.invalid("The aws-chunked body ends inside a chunk", "IncompleteBody")
        pieces.append(view[start : start + length])
        place = start + length + 2
