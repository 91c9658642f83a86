"""A request, sorted: which dialect it speaks, what it asks for, of which object.

Sorting is pure and looks at the request line and headers only, so that faults and counts know the kind of a
request before its body is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qs, unquote

from voxlane.testing.counters import Kind
from voxlane.testing.refusals import RefusedError

Dialect = Literal["s3", "gcs", "json", "admin"]

_XML_KINDS: dict[str, Kind] = {
    "get": "get",
    "head": "head",
    "put": "put",
    "part": "part",
    "copy": "copy",
    "part_copy": "part",
    "delete": "delete",
    "delete_many": "delete",
    "list_objects": "list",
}
_JSON_KINDS: dict[str, Kind] = {
    "object_get": "head",
    "object_media": "get",
    "object_list": "list",
    "object_delete": "delete",
    "upload": "put",
    "upload_chunk": "put",
    "rewrite": "copy",
    "copy": "copy",
    "compose": "compose",
}


@dataclass(slots=True)
class Call:
    """One request. ``op`` names the handler in its dialect."""

    dialect: Dialect
    op: str
    kind: Kind
    method: str
    bucket: str
    key: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    """Case-insensitive."""
    other_bucket: str = ""
    """Destination of a JSON copy."""
    other_key: str = ""
    body: bytes = b""
    _md5: bytes | None = field(default=None, repr=False)

    def arg(self, name: str, default: str = "") -> str:
        """The first value of a query parameter."""
        values = self.query.get(name)
        return values[0] if values else default

    def md5(self) -> bytes:
        """MD5 of the body."""
        if self._md5 is None:
            self._md5 = hashlib.md5(self.body).digest()
        return self._md5

    def know_md5(self, digest: bytes) -> None:
        """Take the MD5 of the body from a caller that computed it elsewhere."""
        self._md5 = digest


def sort_call(method: str, target: str, headers: Mapping[str, str]) -> Call:
    """Sort a request by its request target (``/path?query``, still percent-encoded) and headers."""
    path, _, query_text = target.partition("?")
    query = parse_qs(query_text, keep_blank_values=True) if query_text else {}
    if path.startswith(("/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/", "/batch/storage/v1")):
        return _sort_json(method, path, query, headers)
    bucket_text, _, key_text = path[1:].partition("/")
    bucket, key = _decoded(bucket_text), _decoded(key_text)
    if bucket == "_emulator":
        return Call("admin", key, "other", method, "", "", query, headers)
    op = _xml_op(method, bucket, key, query, headers)
    kind: Kind = _XML_KINDS.get(op, "other")
    return Call(_xml_dialect(headers, query), op, kind, method, bucket, key, query, headers)


def _decoded(text: str) -> str:
    if "%" not in text:
        return text
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise RefusedError(400, "InvalidURI", "The request path is not UTF-8", "invalid") from None


def _xml_dialect(headers: Mapping[str, str], query: Mapping[str, list[str]]) -> Dialect:
    authorization = headers.get("Authorization", "")
    if authorization.startswith("AWS"):
        return "s3"
    if authorization or "X-Goog-Signature" in query:
        return "gcs"
    return "gcs" if any(name.lower().startswith("x-goog-") for name in headers) else "s3"


def _xml_op(method: str, bucket: str, key: str, query: Mapping[str, list[str]], headers: Mapping[str, str]) -> str:
    if not bucket:
        return "list_buckets" if method == "GET" else "unknown"
    if not key:
        return _bucket_op(method, query)
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


def _bucket_op(method: str, query: Mapping[str, list[str]]) -> str:
    if method == "GET":
        for subresource in ("uploads", "location", "versioning"):
            if subresource in query:
                return f"bucket_{subresource}"
        return "list_objects"
    if method == "POST":
        return "delete_many" if "delete" in query else "unknown"
    return {"PUT": "create_bucket", "HEAD": "head_bucket", "DELETE": "delete_bucket"}.get(method, "unknown")


def _sort_json(method: str, path: str, query: Mapping[str, list[str]], headers: Mapping[str, str]) -> Call:
    area, _, rest = path[1:].partition("storage/v1")
    # Split before decoding: a slash inside a name arrives as %2F.
    names = [_decoded(each) for each in rest[1:].split("/")]
    bucket = names[1] if len(names) > 1 and names[0] == "b" else ""
    key = names[3] if len(names) > 3 and names[2] == "o" else ""
    op = "batch" if area == "batch/" else _json_op(method, area, names, query)
    call = Call("json", op, _JSON_KINDS.get(op, "other"), method, bucket, key, query, headers)
    if op in ("rewrite", "copy"):
        call.other_bucket, call.other_key = names[6], names[8]
    if op in ("upload", "upload_start"):
        call.key = call.arg("name")
    return call


def _json_op(method: str, area: str, names: list[str], query: Mapping[str, list[str]]) -> str:
    if area == "upload/":
        if "upload_id" in query:
            return {"PUT": "upload_chunk", "POST": "upload_chunk", "DELETE": "upload_cancel"}.get(method, "unknown")
        resumable = query.get("uploadType") == ["resumable"]
        return "unknown" if method != "POST" else "upload_start" if resumable else "upload"
    match names:
        case ["b"]:
            return {"GET": "bucket_list", "POST": "bucket_insert"}.get(method, "unknown")
        case ["b", _]:
            verbs = {
                "GET": "bucket_get",
                "DELETE": "bucket_delete",
                "PATCH": "bucket_patch",
                "PUT": "bucket_patch",
            }
            return verbs.get(method, "unknown")
        case ["b", _, "iam", "testPermissions"]:
            return "test_permissions"
        case ["b", _, "storageLayout"]:
            return "storage_layout"
        case ["b", _, "o"]:
            return "object_list" if method == "GET" else "unknown"
        case ["b", _, "o", _]:
            if method == "GET":
                return "object_media" if area == "download/" or query.get("alt") == ["media"] else "object_get"
            return {"DELETE": "object_delete", "PATCH": "object_patch", "PUT": "object_update"}.get(method, "unknown")
        case ["b", _, "o", _, "compose"]:
            return "compose" if method == "POST" else "unknown"
        case ["b", _, "o", _, ("rewriteTo" | "copyTo") as verb, "b", _, "o", _]:
            return "unknown" if method != "POST" else "rewrite" if verb == "rewriteTo" else "copy"
    return "unknown"
