"""JSON API of Google Cloud Storage, as google-cloud-storage, gcsfs and the Dataflux client use it."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from voxlane.testing import errors
from voxlane.testing.access import Access
from voxlane.testing.bodies import Blob, Joined
from voxlane.testing.errors import RequestError
from voxlane.testing.listing import decode_token, encode_token, plan_page
from voxlane.testing.multipart import split_multipart
from voxlane.testing.objects import Bucket, ObjectStore, Preconditions, StoredObject, SyntheticFill
from voxlane.testing.request_parsing import ApiRequest, parse_number
from voxlane.testing.responses import (
    OBJECT_FIELDS,
    Handler,
    Response,
    build_content_response,
    build_object_headers,
    format_iso_date,
)

_JSON_HEAD = "Content-Type: application/json; charset=UTF-8\r\n"
_WITHOUT_BUCKET = ("bucket_list", "bucket_insert", "upload", "upload_chunk", "upload_cancel")
"""Operations without a bucket, or that check it after the body of the request."""
_MAX_RESULTS = 1000
_MAX_SOURCES = 32
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")
_UNSAFE = re.compile("[^A-Za-z0-9_.~/-]")
# Key of the object that the template of a fill is made from, as JSON text and in a URL; nothing else looks like it.
_TEMPLATE_KEY, _KEY_IN_JSON, _KEY_IN_URL = "\x00key\x00", "\\u0000key\\u0000", "%00key%00"


def build_json_response(value: object, status: int = 200, head: str = "") -> Response:
    """Build a JSON response."""
    return Response(status, _JSON_HEAD + head, [json.dumps(value, ensure_ascii=False).encode()])


def build_error_response(error: RequestError) -> Response:
    """Build the response to a failed request."""
    detail = {"message": error.message, "domain": "global", "reason": error.reason}
    content = {"code": error.status, "message": error.message, "errors": [detail]}
    return build_json_response({"error": content}, error.status, error.head)


@dataclass(slots=True)
class _JsonUpload:
    """An upload, which may arrive in several chunks."""

    bucket: str
    key: str
    resource: Mapping[str, Any]
    conditions: Preconditions
    data: bytearray = field(default_factory=bytearray)
    """Bytes of the chunks so far."""


class JsonApi:
    """Handle requests of the dialect ``json``, except batches, which the server splits."""

    def __init__(self, objects: ObjectStore, base_url: str) -> None:
        self.access = Access()
        self._objects = objects
        self._base_url = base_url
        self._resumables: dict[str, _JsonUpload] = {}

    def handle(self, request: ApiRequest) -> Response:
        """Handle a request; raise :class:`RequestError` if it fails."""
        handler: Handler | None = getattr(self, f"_do_{request.op}", None)
        if handler is None:
            raise RequestError(404, "NotFound", f"The emulator does not support {request.method} here")
        if request.op in _WITHOUT_BUCKET:
            return handler(request)
        return handler(request, self._objects.require(request.bucket))

    # Reading objects

    def _do_object_media(self, request: ApiRequest, bucket: Bucket) -> Response:
        stored = _find_readable(request, bucket)
        return build_content_response(stored.body, build_object_headers(stored, "json"), request.headers.get("Range"))

    def _do_object_get(self, request: ApiRequest, bucket: Bucket) -> Response:
        return self._build_resource_response(bucket.name, _find_readable(request, bucket))

    def _do_object_list(self, request: ApiRequest, bucket: Bucket) -> Response:
        start, token = request.param("startOffset"), request.param("pageToken")
        limit = request.number("maxResults")
        page = plan_page(
            bucket.keys(),
            prefix=request.param("prefix"),
            delimiter=request.param("delimiter"),
            start=decode_token(token) if token else start,
            end=request.param("endOffset") or None,
            limit=_MAX_RESULTS if not limit else min(limit, _MAX_RESULTS),
        )
        top, item_fields = _parse_fields(request.param("fields"))
        members = ['"kind":"storage#objects"'] if top is None or "kind" in top else []
        if page.resume is not None and (top is None or "nextPageToken" in top):
            members.append(f'"nextPageToken":"{encode_token(page.resume)}"')
        if page.prefixes and (top is None or "prefixes" in top):
            members.append(f'"prefixes":{json.dumps(page.prefixes, ensure_ascii=False)}')
        if not page.keys or (top is not None and "items" not in top):
            return Response(200, _JSON_HEAD, [f"{{{','.join(members)}}}".encode()])
        items = ",".join(self._render_items(bucket, page.keys, item_fields)).encode()
        # In pieces, because a page has almost a megabyte, and every join would copy it.
        opening = f'{{{",".join([*members, ""])}"items":['
        return Response(200, _JSON_HEAD, [opening.encode(), items, b"]}"])

    # Changing objects

    def _do_object_delete(self, request: ApiRequest, bucket: Bucket) -> Response:
        stored = bucket.require(request.key, request.number("generation"))
        _check_write(request, stored)
        bucket.remove(request.key)
        return Response(204)

    def _do_object_patch(self, request: ApiRequest, bucket: Bucket) -> Response:
        stored = bucket.require(request.key, request.number("generation"))
        _check_write(request, stored)
        resource = _parse_body(request.body)
        if request.op == "object_update":
            stored.headers, stored.metadata = {}, {}
        _set_metadata(stored, resource)
        stored.metageneration += 1
        stored.updated_s = self._objects.next_generation() / 1e6
        stored.rendered.clear()
        bucket.put(stored)
        return self._build_resource_response(bucket.name, stored)

    _do_object_update = _do_object_patch

    def _do_rewrite(self, request: ApiRequest, bucket: Bucket) -> Response:
        stored = self._copy_object(request, bucket)
        size = str(stored.body.size)
        resource = json.loads(self._render(request.other_bucket, stored))
        return build_json_response(
            {
                "kind": "storage#rewriteResponse",
                "totalBytesRewritten": size,
                "objectSize": size,
                "done": True,
                "resource": resource,
            }
        )

    def _do_copy(self, request: ApiRequest, bucket: Bucket) -> Response:
        return self._build_resource_response(request.other_bucket, self._copy_object(request, bucket))

    def _copy_object(self, request: ApiRequest, bucket: Bucket) -> StoredObject:
        source = bucket.require(request.key, request.number("sourceGeneration"))
        Preconditions(
            generation=request.number("ifSourceGenerationMatch"),
            metageneration=request.number("ifSourceMetagenerationMatch"),
        ).check_read(source, "")
        destination = self._objects.require(request.other_bucket)
        _check_write(request, destination.find(request.other_key))
        stored = source.copy(request.other_key, self._objects.next_generation(), etag="")
        _set_metadata(stored, _parse_body(request.body))
        destination.put(stored)
        return stored

    def _do_compose(self, request: ApiRequest, bucket: Bucket) -> Response:
        document = _parse_body(request.body)
        source_refs: Sequence[Mapping[str, Any]] = document.get("sourceObjects") or []
        if not 1 <= len(source_refs) <= _MAX_SOURCES:
            message = f"The number of source components ({len(source_refs)}) is not between 1 and {_MAX_SOURCES}"
            raise errors.invalid(message)
        sources: list[StoredObject] = []
        for ref in source_refs:
            source = bucket.require(str(ref.get("name", "")), parse_number(ref.get("generation")))
            match = (ref.get("objectPreconditions") or {}).get("ifGenerationMatch")
            Preconditions(generation=parse_number(match)).check_read(source, "")
            sources.append(source)
        _check_write(request, bucket.find(request.key))
        stored = StoredObject(
            request.key,
            Joined(source.body for source in sources),
            None,
            self._objects.next_generation(),
            component_count=sum(source.component_count or 1 for source in sources),
            has_crc32c=all(source.has_crc32c for source in sources),
        )
        _set_metadata(stored, document.get("destination") or {})
        bucket.put(stored)
        return self._build_resource_response(bucket.name, stored)

    # Uploads

    def _do_upload(self, request: ApiRequest) -> Response:
        content_type = request.headers.get("Content-Type", "application/octet-stream")
        conditions = _parse_preconditions(request)
        if request.param("uploadType") != "multipart":
            upload = _JsonUpload(request.bucket, request.key, {"contentType": content_type}, conditions)
            return self._store(upload, request.body, request.md5())
        parts = split_multipart(request.body, content_type)
        if len(parts) != 2:
            raise errors.invalid("A multipart upload has a metadata part and a media part")
        (_, metadata), (media_headers, media) = parts
        resource = _parse_body(metadata)
        resource.setdefault("contentType", media_headers.get("content-type", "application/octet-stream"))
        key = request.param("name") or resource.get("name", "")
        upload = _JsonUpload(request.bucket, key, resource, conditions)
        return self._store(upload, media, hashlib.md5(media).digest())

    def _do_upload_start(self, request: ApiRequest, bucket: Bucket) -> Response:
        resource = _parse_body(request.body)
        declared = request.headers.get("X-Upload-Content-Type")
        if declared:
            resource.setdefault("contentType", declared)
        upload_id = secrets.token_urlsafe(24)
        key = request.param("name") or resource.get("name", "")
        self._resumables[upload_id] = _JsonUpload(request.bucket, key, resource, _parse_preconditions(request))
        location = (
            f"{self._base_url}/upload/storage/v1/b/{quote(request.bucket, safe='')}/o"
            f"?uploadType=resumable&upload_id={upload_id}"
        )
        return Response(200, f"Location: {location}\r\nX-GUploader-UploadID: {upload_id}\r\n")

    def _do_upload_chunk(self, request: ApiRequest) -> Response:
        upload_id = request.param("upload_id")
        resumable = self._resumables.get(upload_id)
        if resumable is None:
            raise errors.no_such_upload(upload_id)
        data = resumable.data
        match = _CONTENT_RANGE.match(request.headers.get("Content-Range", "bytes */*"))
        if match is None:
            raise errors.invalid("Invalid Content-Range header")
        first, _, total = match.groups()
        if first is None and "Content-Range" not in request.headers:
            data += request.body
            total = str(len(data))
        elif first is not None:
            if int(first) > len(data):
                raise RequestError(503, "ServiceUnavailable", f"Expected byte {len(data)}, got {first}")
            # A client that resumes may repeat bytes that were already received.
            data += request.body[len(data) - int(first) :]
        if total == "*" or int(total) > len(data):
            return Response(308, f"Range: bytes=0-{len(data) - 1}\r\n" if data else "")
        response = self._store(resumable, bytes(data), hashlib.md5(data).digest())
        del self._resumables[upload_id]
        return response

    def _do_upload_cancel(self, request: ApiRequest) -> Response:
        if self._resumables.pop(request.param("upload_id"), None) is None:
            raise errors.no_such_upload(request.param("upload_id"))
        return Response(499)

    def _store(self, upload: _JsonUpload, data: bytes, md5: bytes) -> Response:
        bucket = self._objects.require(upload.bucket)
        if not upload.key:
            raise errors.invalid("Required parameter: name")
        old = bucket.find(upload.key)
        upload.conditions.check_write(old, old.json_etag if old else "")
        stored = StoredObject(upload.key, Blob(data), md5, self._objects.next_generation())
        _check_checksums(upload.resource, stored)
        _set_metadata(stored, upload.resource)
        bucket.put(stored)
        return self._build_resource_response(upload.bucket, stored)

    # Buckets

    def _do_bucket_insert(self, request: ApiRequest) -> Response:
        name = str(_parse_body(request.body).get("name", ""))
        if not name:
            raise errors.invalid("Required parameter: name")
        return build_json_response(self._bucket_resource(self._objects.create(name)))

    def _do_bucket_get(self, request: ApiRequest, bucket: Bucket) -> Response:
        return build_json_response(self._bucket_resource(bucket))

    _do_bucket_patch = _do_bucket_get

    def _do_bucket_list(self, request: ApiRequest) -> Response:
        prefix = request.param("prefix")
        buckets = [
            self._bucket_resource(bucket)
            for name, bucket in sorted(self._objects.buckets.items())
            if name.startswith(prefix)
        ]
        return build_json_response({"kind": "storage#buckets"} | ({"items": buckets} if buckets else {}))

    def _do_bucket_delete(self, request: ApiRequest, bucket: Bucket) -> Response:
        self._objects.delete(request.bucket)
        return Response(204)

    def _do_test_permissions(self, request: ApiRequest, bucket: Bucket) -> Response:
        requested = request.query.get("permissions", [])
        granted = [permission for permission in requested if permission not in self.access.denied_permissions]
        return build_json_response(
            {"kind": "storage#testIamPermissionsResponse"} | ({"permissions": granted} if granted else {})
        )

    def _do_storage_layout(self, request: ApiRequest, bucket: Bucket) -> Response:
        return build_json_response(
            {
                "kind": "storage#storageLayout",
                "bucket": request.bucket,
                "location": "US",
                "locationType": "multi-region",
                "hierarchicalNamespace": {"enabled": False},
            }
        )

    def _bucket_resource(self, bucket: Bucket) -> dict[str, Any]:
        created = format_iso_date(bucket.created_s)
        return {
            "kind": "storage#bucket",
            "id": bucket.name,
            "name": bucket.name,
            "selfLink": f"{self._base_url}/storage/v1/b/{quote(bucket.name, safe='')}",
            "projectNumber": "0",
            "metageneration": "1",
            "location": "US",
            "locationType": "multi-region",
            "storageClass": "STANDARD",
            "etag": "CAE=",
            "timeCreated": created,
            "updated": created,
        }

    def _build_resource_response(self, bucket: str, stored: StoredObject) -> Response:
        return Response(200, f"{_JSON_HEAD}ETag: {stored.json_etag}\r\n", [self._render(bucket, stored).encode()])

    # Object resources, rendered quickly: a page of a listing has a thousand of them

    def _render(self, bucket: str, stored: StoredObject, fields: Collection[str] | None = None) -> str:
        """Return the resource of an object as JSON text, cached in the object."""
        cache_key = f"json {bucket} {fields}"
        rendered = stored.rendered.get(cache_key)
        if rendered is None:
            members = self._build_members(bucket, stored, fields)
            rendered = stored.rendered[cache_key] = json.dumps(members, ensure_ascii=False)
        return rendered

    def _render_items(self, bucket: Bucket, keys: Sequence[str], fields: Collection[str] | None) -> Iterable[str]:
        """Return the resources of a page of keys, restricted to ``fields`` unless that is None."""
        templates: dict[SyntheticFill, list[str]] = {}
        # Checked once per page, because hardly any page needs escaping.
        plain = not _UNSAFE.search("".join(keys))
        rows: list[str] = []
        for key in keys:
            entry = bucket.entry(key)
            if isinstance(entry, StoredObject):
                rows.append(self._render(bucket.name, entry, fields))
                continue
            template = templates.get(entry)
            if template is None:
                members = self._build_members(bucket.name, entry.stored(_TEMPLATE_KEY), fields)
                # A single character is found faster, and JSON text contains no control characters.
                template = templates[entry] = json.dumps(members).replace(_KEY_IN_JSON, "\x00").split(_KEY_IN_URL)
            name = key if plain else json.dumps(key, ensure_ascii=False)[1:-1]
            quoted = key.replace("/", "%2F") if plain else quote(key, safe="")
            rows.append(quoted.join(template).replace("\x00", name))
        return rows

    def _build_members(self, bucket: str, stored: StoredObject, fields: Collection[str] | None) -> dict[str, Any]:
        path = f"storage/v1/b/{quote(bucket, safe='')}/o/{quote(stored.key, safe='')}"
        created, updated = format_iso_date(stored.created_s), format_iso_date(stored.updated_s)
        members: dict[str, Any] = {
            "kind": "storage#object",
            "id": f"{bucket}/{stored.key}/{stored.generation}",
            "selfLink": f"{self._base_url}/{path}",
            "mediaLink": f"{self._base_url}/download/{path}?generation={stored.generation}&alt=media",
            "name": stored.key,
            "bucket": bucket,
            "generation": str(stored.generation),
            "metageneration": str(stored.metageneration),
            "contentType": stored.content_type,
            "storageClass": "STANDARD",
            "size": str(stored.body.size),
            "etag": stored.json_etag,
            "timeCreated": created,
            "updated": updated,
            "timeStorageClassUpdated": created,
            "timeFinalized": created,
        }
        for algorithm, value in stored.hashes().items():
            members["md5Hash" if algorithm == "md5" else algorithm] = value
        if stored.component_count is not None:
            members["componentCount"] = stored.component_count
        if stored.metadata:
            members["metadata"] = stored.metadata
        for field_name, header in OBJECT_FIELDS.items():
            if header in stored.headers:
                members[field_name] = stored.headers[header]
        return members if fields is None else {key: value for key, value in members.items() if key in fields}


def _find_readable(request: ApiRequest, bucket: Bucket) -> StoredObject:
    stored = bucket.require(request.key, request.number("generation"))
    if request.query or "If-Match" in request.headers or "If-None-Match" in request.headers:
        _parse_preconditions(request).check_read(stored, stored.json_etag)
    return stored


def _check_write(request: ApiRequest, stored: StoredObject | None) -> None:
    _parse_preconditions(request).check_write(stored, stored.json_etag if stored else "")


# Parsing requests


def _parse_fields(fields: str) -> tuple[set[str] | None, tuple[str, ...] | None]:
    """Parse the ``fields`` parameter of a listing into (members of the page, members of each item).

    None means all. Understands ``items(name,size),nextPageToken`` and ``items/name``; like the service, a
    listing whose fields leave out nextPageToken gets none.
    """
    if not fields or "*" in fields:
        return None, None
    top: set[str] = set()
    items: list[str] = []
    for name, group in re.findall(r"([A-Za-z0-9_/]+)(?:\(([^()]*)\))?", fields):
        head, _, tail = name.partition("/")
        top.add(head)
        if head == "items":
            items.extend(field.strip() for field in group.split(",") if field.strip())
            items.extend([tail] if tail else [])
    return top, tuple(items) or None


def _parse_preconditions(request: ApiRequest) -> Preconditions:
    return Preconditions(
        generation=request.number("ifGenerationMatch"),
        not_generation=request.number("ifGenerationNotMatch"),
        metageneration=request.number("ifMetagenerationMatch"),
        not_metageneration=request.number("ifMetagenerationNotMatch"),
        etags=request.headers.get("If-Match"),
        not_etags=request.headers.get("If-None-Match"),
    )


def _parse_body(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    try:
        value = json.loads(body)
    except ValueError:
        raise errors.invalid("Parse Error", "ParseError") from None
    if not isinstance(value, dict):
        raise errors.invalid("The request body is not a JSON object", "ParseError")
    return value


def _set_metadata(stored: StoredObject, resource: Mapping[str, Any]) -> None:
    """Set content type, user metadata and the like from an object resource; null removes a value."""
    headers = {header: resource[name] for name, header in OBJECT_FIELDS.items() if name in resource}
    metadata = resource.get("metadata", {})
    stored.headers = _merge(stored.headers, headers)
    stored.metadata = {} if metadata is None else _merge(stored.metadata, metadata)


def _merge(values: Mapping[str, str], changes: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in {**values, **changes}.items() if value is not None}


def _check_checksums(resource: Mapping[str, Any], stored: StoredObject) -> None:
    """Raise 400 if the content of an upload differs from the checksums in its metadata."""
    hashes = stored.hashes()
    for name, actual in (("md5Hash", hashes["md5"]), ("crc32c", hashes["crc32c"])):
        declared = resource.get(name)
        if declared is not None and declared != actual:
            raise errors.invalid(f'Provided {name} "{declared}" doesn\'t match calculated {name} "{actual}".')
