"""Parse requests: determine the dialect, the operation and the object.

Parsing is pure and uses only the request line and headers, so that faults and counters know the kind of a request
before its body is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qs, unquote

from voxlane.testing.counters import KINDS, Kind
from voxlane.testing.errors import RequestError

Dialect = Literal["s3", "gcs", "json", "admin"]
XmlDialect = Literal["s3", "gcs"]

_KINDS: dict[str, Kind] = {kind: kind for kind in KINDS} | {
    "part_copy": "part",
    "delete_many": "delete",
    "list_objects": "list",
    "object_get": "head",
    "object_media": "get",
    "object_list": "list",
    "object_delete": "delete",
    "upload": "put",
    "upload_chunk": "put",
    "rewrite": "copy",
    "move": "copy",
}
"""Kinds of operations; some operations have the name of their kind, and others than these are ``other``."""


_BUCKET_READS = {"iam/testPermissions": "test_permissions", "storageLayout": "storage_layout", "o": "object_list"}
"""Operations that read something of a bucket in the JSON API, by the path below the bucket."""


@dataclass(slots=True)
class ApiRequest:
    """A parsed request; ``op`` names the operation in its dialect."""

    dialect: Dialect
    op: str
    kind: Kind
    method: str
    bucket: str
    key: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    """Headers with case-insensitive names."""
    other_bucket: str = ""
    """Destination bucket of a JSON copy or move."""
    other_key: str = ""
    body: bytes = b""
    path: str = ""
    """Path of a request whose operation is unknown, for its error."""
    _md5: bytes | None = field(default=None, repr=False)

    def param(self, name: str, default: str = "") -> str:
        """Return the first value of a query parameter."""
        values = self.query.get(name)
        return values[0] if values else default

    def number(self, name: str) -> int | None:
        """Return a query parameter as a number; None if it is absent, 400 if it is no number."""
        return parse_number(self.param(name))

    def md5(self) -> bytes:
        """Return the MD5 of the body, computed on first use."""
        if self._md5 is None:
            self._md5 = hashlib.md5(self.body).digest()
        return self._md5


def parse_number(value: str | int | None) -> int | None:
    """Parse a decimal number, which is text or already a number in JSON; None if it is absent, 400 if it is neither."""
    if value is None or value == "":
        return None
    if not str(value).isdecimal():
        raise RequestError(400, "InvalidArgument", f"Not a number: {value}")
    return int(value)


def parse_request(
    method: str, target: str, headers: Mapping[str, str], anonymous_dialect: XmlDialect = "gcs"
) -> ApiRequest:
    """Parse a request from its method, target (``/path?query``, percent-encoded) and headers.

    ``anonymous_dialect`` is that of an XML request that nothing tells apart: it has no credentials and no header of
    either service.
    """
    path, _, query_text = target.partition("?")
    query = parse_qs(query_text, keep_blank_values=True) if query_text else {}
    if path.startswith(("/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/", "/batch/storage/v1")):
        return _parse_json_request(method, path, query, headers)
    bucket_text, _, key_text = path[1:].partition("/")
    bucket, key = _decode_path(bucket_text), _decode_path(key_text)
    if bucket == "_emulator":
        return ApiRequest("admin", key, "other", method, "", "", query, headers)
    op = _identify_xml_operation(method, bucket, key, query, headers)
    dialect = _identify_xml_dialect(headers, query) or anonymous_dialect
    return ApiRequest(dialect, op, _KINDS.get(op, "other"), method, bucket, key, query, headers)


def _decode_path(text: str) -> str:
    if "%" not in text:
        return text
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise RequestError(400, "InvalidURI", "The request path is not UTF-8") from None


def _identify_xml_dialect(headers: Mapping[str, str], query: Mapping[str, list[str]]) -> XmlDialect | None:
    """Return the dialect that the credentials, or else other names of the request, show; None if none does."""
    authorization = headers.get("Authorization", "")
    if authorization:
        return "s3" if authorization.startswith("AWS") else "gcs"
    for name in (*query, *headers):
        lower = name.lower()
        if lower.startswith(("x-goog-", "googleaccessid")):
            return "gcs"
        if lower.startswith(("x-amz-", "amz-sdk-", "awsaccesskeyid")):
            return "s3"
    return None


def _identify_xml_operation(
    method: str, bucket: str, key: str, query: Mapping[str, list[str]], headers: Mapping[str, str]
) -> str:
    if not bucket:
        return "list_buckets" if method == "GET" else "unknown"
    if not key:
        return _identify_bucket_operation(method, query)
    if method == "GET":
        return "list_parts" if "uploadId" in query else "get"
    if method == "HEAD":
        return "head"
    if method == "PUT":
        copying = "x-amz-copy-source" in headers or "x-goog-copy-source" in headers
        if "uploadId" in query:
            return "part_copy" if copying else "part"
        return "copy" if copying else "put"
    if method == "DELETE":
        return "abort" if "uploadId" in query else "delete"
    if method == "POST" and "uploads" in query:
        return "initiate"
    return "complete" if method == "POST" and "uploadId" in query else "unknown"


def _identify_bucket_operation(method: str, query: Mapping[str, list[str]]) -> str:
    if method == "GET":
        for subresource in ("uploads", "location", "versioning"):
            if subresource in query:
                return f"bucket_{subresource}"
        return "list_objects"
    if method == "POST":
        return "delete_many" if "delete" in query else "unknown"
    return {"PUT": "create_bucket", "HEAD": "head_bucket", "DELETE": "delete_bucket"}.get(method, "unknown")


def _parse_json_request(
    method: str, path: str, query: Mapping[str, list[str]], headers: Mapping[str, str]
) -> ApiRequest:
    area, _, rest = path[1:].partition("storage/v1")
    # Split before decoding: a slash inside a name arrives as %2F.
    names = [_decode_path(name) for name in rest[1:].split("/")]
    bucket = names[1] if len(names) > 1 and names[0] == "b" else ""
    key = names[3] if len(names) > 3 and names[2] == "o" else ""
    op = "batch" if area == "batch/" else _identify_json_operation(method, area, names, query)
    request = ApiRequest("json", op, _KINDS.get(op, "other"), method, bucket, key, query, headers, path=path)
    if op in ("rewrite", "copy"):
        request.other_bucket, request.other_key = names[6], names[8]
    if op == "move":
        request.other_bucket, request.other_key = bucket, names[6]
    if op in ("upload", "upload_start"):
        request.key = request.param("name")
    return request


def _identify_json_operation(method: str, area: str, names: list[str], query: Mapping[str, list[str]]) -> str:
    if area == "upload/":
        if "upload_id" in query:
            return {"PUT": "upload_chunk", "POST": "upload_chunk", "DELETE": "upload_cancel"}.get(method, "unknown")
        resumable = query.get("uploadType") == ["resumable"]
        return "unknown" if method != "POST" else "upload_start" if resumable else "upload"
    match names:
        case ["b"]:
            return {"GET": "bucket_list", "POST": "bucket_insert"}.get(method, "unknown")
        case ["b", _]:
            verbs = {"GET": "bucket_get", "DELETE": "bucket_delete", "PATCH": "bucket_patch", "PUT": "bucket_patch"}
            return verbs.get(method, "unknown")
        case ["b", _, *rest] if method == "GET" and "/".join(rest) in _BUCKET_READS:
            return _BUCKET_READS["/".join(rest)]
        case ["b", _, "o", _]:
            if method == "GET":
                return "object_media" if area == "download/" or query.get("alt") == ["media"] else "object_get"
            return {"DELETE": "object_delete", "PATCH": "object_patch", "PUT": "object_update"}.get(method, "unknown")
        case ["b", _, "o", _, "compose"]:
            return "compose" if method == "POST" else "unknown"
        case ["b", _, "o", _, ("rewriteTo" | "copyTo") as verb, "b", _, "o", _] if method == "POST":
            return "rewrite" if verb == "rewriteTo" else "copy"
        case ["b", _, "o", _, "moveTo", "o", _] if method == "POST":
            return "move"
    return "unknown"
