"""Parse and build multipart bodies of the JSON API: multipart/related uploads and multipart/mixed batches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message
from itertools import pairwise
from urllib.parse import urlsplit

from voxlane.testing import errors
from voxlane.testing.request_parsing import ApiRequest, parse_request
from voxlane.testing.responses import Chunk, Response

_BATCH_BOUNDARY = "batch_emulator"


def split_multipart(body: bytes, content_type: str) -> list[tuple[dict[str, str], bytes]]:
    """Split a multipart body into (headers with lower-case names, content)."""
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_boundary()
    if not boundary:
        raise errors.invalid("The multipart content type has no boundary")
    boundaries = list(_find_boundaries(body, b"--" + boundary.encode()))
    return [split_headers(body[after:before]) for (_, after), (before, _) in pairwise(boundaries)]


def _find_boundaries(body: bytes, marker: bytes) -> Iterator[tuple[int, int]]:
    """Yield the end of the content before each boundary line and its beginning after it.

    It searches for the marker instead of using a regular expression over line starts, which takes seconds on
    150 MiB.
    """
    index = body.find(marker)
    while index >= 0:
        line_end = body.find(b"\n", index)
        line_end = len(body) if line_end < 0 else line_end + 1
        suffix = body[index + len(marker) : line_end].strip()
        # A boundary must be a line of its own, because content may contain it elsewhere.
        if (index == 0 or body[index - 1 : index] == b"\n") and suffix in (b"", b"--"):
            before = index - 1 if index else 0
            if before and body[before - 1 : before] == b"\r":
                before -= 1
            yield before, line_end
        index = body.find(marker, index + len(marker))


def split_headers(block: bytes) -> tuple[dict[str, str], bytes]:
    """Split a block into headers and the content after the blank line."""
    match = re.search(rb"^\r?\n|\r?\n\r?\n", block)
    head, content = (block[: match.start()], block[match.end() :]) if match else (block, b"")
    lines = (line.partition(":") for line in head.decode("utf-8", "replace").splitlines())
    return {name.strip().lower(): value.strip() for name, colon, value in lines if colon}, content


def split_batch(batch: ApiRequest) -> list[tuple[str, ApiRequest]]:
    """Split a batch into its requests with their content ids; they have the credentials of the batch by default."""
    requests: list[tuple[str, ApiRequest]] = []
    for outer, content in split_multipart(batch.body, batch.headers.get("Content-Type", "")):
        request_line, _, rest = content.lstrip(b"\r\n").partition(b"\n")
        parts = request_line.decode("utf-8", "replace").split()
        if len(parts) < 2:
            raise errors.invalid("A batch part has no request line")
        url = urlsplit(parts[1])
        target = url.path + (f"?{url.query}" if url.query else "")
        headers, body = split_headers(rest)
        default_headers = {"Authorization": batch.headers.get("Authorization", "")}
        titled_headers = {name.title(): value for name, value in headers.items()}
        request = parse_request(parts[0].upper(), target, default_headers | titled_headers)
        request.body = body.rstrip(b"\r\n")
        requests.append((outer.get("content-id", ""), request))
    return requests


def build_batch_response(responses: list[tuple[str, Response]]) -> Response:
    """Build the response to a batch from (content id, response) of each request, in order."""
    pieces: list[Chunk] = []
    for content_id, response in responses:
        response_id = f"Content-ID: <response-{content_id.strip('<>')}>\r\n" if content_id else ""
        pieces.append(f"--{_BATCH_BOUNDARY}\r\nContent-Type: application/http\r\n{response_id}\r\n".encode())
        pieces += [response.encode_head(keep_alive=True), *response.chunks, b"\r\n"]
    pieces.append(f"--{_BATCH_BOUNDARY}--\r\n".encode())
    return Response(200, f"Content-Type: multipart/mixed; boundary={_BATCH_BOUNDARY}\r\n", [b"".join(pieces)])
