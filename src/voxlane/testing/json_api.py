"""JSON API of Google Cloud Storage, as google-cloud-storage, gcsfs and the Dataflux client use it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from voxlane.testing import errors
from voxlane.testing.access import Access
from voxlane.testing.bodies import Blob, Joined
from voxlane.testing.errors import RequestError
from voxlane.testing.listing import decode_token, encode_token, plan_page
from voxlane.testing.multipart import split_multipart
from voxlane.testing.objects import (
    NO_PRECONDITIONS,
    Bucket,
    ObjectStore,
    Preconditions,
    StoredObject,
    SyntheticFill,
)
from voxlane.testing.request_parsing import ApiRequest, parse_number
from voxlane.testing.responses import OBJECT_FIELDS, Handler, Response, build_read_response, format_iso_date
from voxlane.testing.scope import BUCKET_REFUSED, OBJECT_REFUSED, check_fields
from voxlane.testing.storage_class import check_gcs_class

_JSON_HEAD = "Content-Type: application/json; charset=UTF-8\r\n"
_WITHOUT_BUCKET = ("bucket_list", "bucket_insert", "upload", "upload_chunk", "upload_cancel")
"""Operations without a bucket, or that check it after the body of the request."""
_MAX_RESULTS = 1000
_MAX_SOURCES = 32
_CONDITION_NAMES = {"ifGenerationMatch", "ifGenerationNotMatch", "ifMetagenerationMatch", "ifMetagenerationNotMatch"}
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")
_ERROR_LOCATIONS = {401: "Authorization", 412: "If-Match"}
"""Header that the service names as the reason of an error, by status."""
_BUCKET_FIELDS = ("location", "labels", "iamConfiguration")
"""Fields of a bucket that are stored and returned, but have no effect."""
_UNSAFE = re.compile("[^A-Za-z0-9_.~/-]")
# Key of the object that the template of a fill is made from, as JSON text and in a URL; nothing else looks like it.
_TEMPLATE_KEY, _KEY_IN_JSON, _KEY_IN_URL = "\x00key\x00", "\\u0000key\\u0000", "%00key%00"


def build_json_response(value: object, status: int = 200, head: str = "") -> Response:
    """Build a JSON response."""
    return Response(status, _JSON_HEAD + head, [json.dumps(value, ensure_ascii=False).encode()])


def build_error_response(error: RequestError) -> Response:
    """Build the response to a failed request."""
    detail = {"message": error.message, "domain": "global", "reason": error.reason}
    if location := _ERROR_LOCATIONS.get(error.status):
        detail |= {"locationType": "header", "location": location}
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
    response: Response | None = None
    """Response to the last chunk, which a client that lost it gets again; None until the upload is complete."""


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
            raise errors.not_implemented(f"{request.method} {request.path}")
        if request.op in _WITHOUT_BUCKET:
            return handler(request)
        return handler(request, self._objects.require(request.bucket))

    # Reading objects

    def _do_object_media(self, request: ApiRequest, bucket: Bucket) -> Response:
        return build_read_response(_find_readable(request, bucket), "json", request.headers, head=False)

    def _do_object_get(self, request: ApiRequest, bucket: Bucket) -> Response:
        return self._build_resource_response(request, bucket.name, _find_readable(request, bucket))

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
        if resource.get("storageClass", stored.storage_class) != stored.storage_class:
            raise errors.not_implemented("a patch of the field storageClass; rewrite the object to change its class")
        if request.op == "object_update":
            stored.headers, stored.metadata = {}, {}
        _set_metadata(stored, resource)
        stored.metageneration += 1
        stored.updated_s = self._objects.next_generation() / 1e6
        stored.rendered.clear()
        bucket.put(stored)
        return self._build_resource_response(request, bucket.name, stored)

    _do_object_update = _do_object_patch

    def _do_rewrite(self, request: ApiRequest, bucket: Bucket) -> Response:
        stored = self._copy_object(request, bucket)
        size = str(stored.body.size)
        resource = json.loads(self._render(request.other_bucket, stored))
        response = {
            "kind": "storage#rewriteResponse",
            "totalBytesRewritten": size,
            "objectSize": size,
            "done": True,
            "resource": resource,
        }
        return build_json_response(_select_fields(response, request.param("fields")))

    def _do_copy(self, request: ApiRequest, bucket: Bucket) -> Response:
        return self._build_resource_response(request, request.other_bucket, self._copy_object(request, bucket))

    def _copy_object(self, request: ApiRequest, bucket: Bucket) -> StoredObject:
        source = bucket.require(request.key, request.number("sourceGeneration"))
        _check_source(request, source)
        destination = self._objects.require(request.other_bucket)
        _check_write(request, destination.find(request.other_key))
        resource = _parse_body(request.body)
        stored = source.copy(
            request.other_key,
            self._objects.next_generation(),
            etag="",
            storage_class=check_gcs_class(resource.get("storageClass")) or destination.storage_class,
        )
        _set_metadata(stored, resource)
        destination.put(stored)
        return stored

    def _do_move(self, request: ApiRequest, bucket: Bucket) -> Response:
        source = bucket.require(request.key)
        _check_source(request, source)
        if request.key == request.other_key:
            raise errors.invalid("The source and destination of a move must have different names")
        _check_write(request, bucket.find(request.other_key))
        stored = source.copy(request.other_key, self._objects.next_generation(), etag="")
        bucket.put(stored)
        bucket.remove(request.key)
        return self._build_resource_response(request, bucket.name, stored)

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
        destination = document.get("destination") or {}
        stored = StoredObject(
            request.key,
            Joined(source.body for source in sources),
            None,
            self._objects.next_generation(),
            component_count=sum(source.component_count or 1 for source in sources),
            has_crc32c=all(source.has_crc32c for source in sources),
            storage_class=check_gcs_class(destination.get("storageClass")) or bucket.storage_class,
        )
        _set_metadata(stored, destination)
        bucket.put(stored)
        return self._build_resource_response(request, bucket.name, stored)

    # Uploads

    def _do_upload(self, request: ApiRequest) -> Response:
        content_type = request.headers.get("Content-Type", "application/octet-stream")
        conditions = _parse_preconditions(request)
        if request.param("uploadType") != "multipart":
            resource = _add_encoding(request, {"contentType": content_type})
            upload = _JsonUpload(request.bucket, request.key, resource, conditions)
            return self._store(request, upload, request.body, request.md5())
        parts = split_multipart(request.body, content_type)
        if len(parts) != 2:
            raise errors.invalid("A multipart upload has a metadata part and a media part")
        (_, metadata), (media_headers, media) = parts
        resource = _add_encoding(request, _parse_body(metadata))
        resource.setdefault("contentType", media_headers.get("content-type", "application/octet-stream"))
        key = request.param("name") or resource.get("name", "")
        upload = _JsonUpload(request.bucket, key, resource, conditions)
        return self._store(request, upload, media, hashlib.md5(media).digest())

    def _do_upload_start(self, request: ApiRequest, bucket: Bucket) -> Response:
        resource = _add_encoding(request, _parse_body(request.body))
        check_fields(resource, OBJECT_REFUSED)
        check_gcs_class(resource.get("storageClass"))
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
        if resumable.response is not None:
            return resumable.response
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
        resumable.response = self._store(request, resumable, bytes(data), hashlib.md5(data).digest())
        data.clear()
        return resumable.response

    def _do_upload_cancel(self, request: ApiRequest) -> Response:
        resumable = self._resumables.get(request.param("upload_id"))
        if resumable is None or resumable.response is not None:
            raise errors.no_such_upload(request.param("upload_id"))
        del self._resumables[request.param("upload_id")]
        return Response(499)

    def _store(self, request: ApiRequest, upload: _JsonUpload, data: bytes, md5: bytes) -> Response:
        bucket = self._objects.require(upload.bucket)
        if not upload.key:
            raise errors.invalid("Required parameter: name")
        old = bucket.find(upload.key)
        upload.conditions.check_write(old, old.json_etag if old else "")
        storage_class = check_gcs_class(upload.resource.get("storageClass")) or bucket.storage_class
        stored = StoredObject(upload.key, Blob(data), md5, self._objects.next_generation(), storage_class=storage_class)
        _check_checksums(upload.resource, request.headers.get("x-goog-hash", ""), stored)
        _set_metadata(stored, upload.resource)
        bucket.put(stored)
        return self._build_resource_response(request, upload.bucket, stored)

    # Buckets

    def _do_bucket_insert(self, request: ApiRequest) -> Response:
        resource = _parse_body(request.body)
        name = str(resource.get("name", ""))
        if not name:
            raise errors.invalid("Required parameter: name")
        storage_class = _check_bucket_resource(resource)
        bucket = self._objects.create(name)
        _set_bucket_properties(bucket, resource, storage_class)
        return self._build_bucket_response(request, bucket)

    def _do_bucket_get(self, request: ApiRequest, bucket: Bucket) -> Response:
        conditions = _parse_preconditions(request)
        _check_bucket_conditions(conditions, bucket)
        if conditions.not_metageneration == bucket.metageneration:
            raise RequestError(304, "NotModified", "Not Modified")
        return self._build_bucket_response(request, bucket)

    def _do_bucket_patch(self, request: ApiRequest, bucket: Bucket) -> Response:
        _check_bucket_conditions(_parse_preconditions(request), bucket)
        resource = _parse_body(request.body)
        _set_bucket_properties(bucket, resource, _check_bucket_resource(resource))
        bucket.metageneration += 1
        bucket.updated_s = self._objects.next_generation() / 1e6
        return self._build_bucket_response(request, bucket)

    def _build_bucket_response(self, request: ApiRequest, bucket: Bucket) -> Response:
        return build_json_response(_select_fields(self._bucket_resource(bucket), request.param("fields")))

    def _do_bucket_list(self, request: ApiRequest) -> Response:
        prefix = request.param("prefix")
        buckets = [
            self._bucket_resource(bucket)
            for name, bucket in sorted(self._objects.buckets.items())
            if name.startswith(prefix)
        ]
        listed = {"kind": "storage#buckets"} | ({"items": buckets} if buckets else {})
        return build_json_response(_select_fields(listed, request.param("fields")))

    def _do_bucket_delete(self, request: ApiRequest, bucket: Bucket) -> Response:
        _check_bucket_conditions(_parse_preconditions(request), bucket)
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
                "location": bucket.properties["location"],
                "locationType": "multi-region",
                "hierarchicalNamespace": {"enabled": False},
            }
        )

    def _bucket_resource(self, bucket: Bucket) -> dict[str, Any]:
        return {
            "kind": "storage#bucket",
            "id": bucket.name,
            "name": bucket.name,
            "selfLink": f"{self._base_url}/storage/v1/b/{quote(bucket.name, safe='')}",
            "projectNumber": "0",
            "metageneration": str(bucket.metageneration),
            "locationType": "multi-region",
            "storageClass": bucket.storage_class,
            "etag": base64.b64encode(bytes([8, bucket.metageneration & 0x7F])).decode(),
            "timeCreated": format_iso_date(bucket.created_s),
            "updated": format_iso_date(bucket.updated_s),
        } | bucket.properties

    def _build_resource_response(self, request: ApiRequest, bucket: str, stored: StoredObject) -> Response:
        rendered = self._render(bucket, stored)
        if fields := request.param("fields"):
            rendered = json.dumps(_select_fields(json.loads(rendered), fields), ensure_ascii=False)
        return Response(200, f"{_JSON_HEAD}ETag: {stored.json_etag}\r\n", [rendered.encode()])

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
        if plain and (fill := bucket.common_fill(keys)) is not None:
            template = self._build_template(bucket.name, fill, fields)
            if len(template) == 1 and template[0].count("\x00") == 1:  # the key is its name only
                start, end = template[0].split("\x00")
                return [start + f"{end},{start}".join(keys) + end]
        rows: list[str] = []
        for key in keys:
            entry = bucket.entry(key)
            if isinstance(entry, StoredObject):
                rows.append(self._render(bucket.name, entry, fields))
                continue
            template = templates.get(entry) or self._build_template(bucket.name, entry, fields)
            templates[entry] = template
            name = key if plain else json.dumps(key, ensure_ascii=False)[1:-1]
            quoted = key.replace("/", "%2F") if plain else quote(key, safe="")
            rows.append(quoted.join(template).replace("\x00", name))
        return rows

    def _build_template(self, bucket: str, fill: SyntheticFill, fields: Collection[str] | None) -> list[str]:
        """Return the resource of an object of a fill as JSON text, split where the key is part of a URL, and with a
        NUL in place of its name."""
        members = self._build_members(bucket, fill.stored(_TEMPLATE_KEY), fields)
        # A single character is found faster, and JSON text contains no control characters.
        return json.dumps(members).replace(_KEY_IN_JSON, "\x00").split(_KEY_IN_URL)

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
            "storageClass": stored.storage_class,
            "size": str(stored.body.size),
            "etag": stored.json_etag,
            "timeCreated": created,
            "updated": updated,
            "timeStorageClassUpdated": format_iso_date(stored.class_updated_s),
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
    conditions = _parse_preconditions(request)
    if conditions is not NO_PRECONDITIONS:
        conditions.check_read(stored, stored.json_etag)
    return stored


def _check_write(request: ApiRequest, stored: StoredObject | None) -> None:
    _parse_preconditions(request).check_write(stored, stored.json_etag if stored else "")


def _check_source(request: ApiRequest, source: StoredObject) -> None:
    """Raise 412 unless the source of a copy or a move is as the request requires."""
    Preconditions(
        generation=request.number("ifSourceGenerationMatch"),
        not_generation=request.number("ifSourceGenerationNotMatch"),
        metageneration=request.number("ifSourceMetagenerationMatch"),
        not_metageneration=request.number("ifSourceMetagenerationNotMatch"),
    ).check_write(source, "")


def _check_bucket_conditions(conditions: Preconditions, bucket: Bucket) -> None:
    if conditions.metageneration not in (None, bucket.metageneration):
        raise errors.precondition_failed("metageneration")


def _check_bucket_resource(resource: Mapping[str, Any]) -> str | None:
    """Return the storage class in a bucket resource, None if it has none; raise 400 or 501 for what is refused."""
    check_fields(resource, BUCKET_REFUSED)
    return check_gcs_class(resource.get("storageClass"))


def _set_bucket_properties(bucket: Bucket, resource: Mapping[str, Any], storage_class: str | None) -> None:
    bucket.storage_class = storage_class or bucket.storage_class
    for name in _BUCKET_FIELDS:
        value = resource.get(name, bucket.properties.get(name))
        # As for objects, null removes a label.
        merged = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value
        if merged is not None:
            bucket.properties[name] = merged


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


def _select_fields(value: Any, fields: str) -> Any:
    """Return the parts of a JSON value that a ``fields`` parameter selects, such as ``name,resource(size,etag)``."""
    return value if not fields or "*" in fields else _select(value, _parse_selection(iter(fields)))


def _parse_selection(characters: Iterator[str]) -> dict[str, Any]:
    """Parse a selection into nested dictionaries; an empty one selects everything below it."""
    selection: dict[str, Any] = {}
    level, name = selection, ""
    for character in characters:
        if character == "/":
            level, name = level.setdefault(name.strip(), {}), ""
        elif character == "(":
            level.setdefault(name.strip(), {}).update(_parse_selection(characters))
            name = ""
        elif character in ",)":
            if name.strip():
                level.setdefault(name.strip(), {})
            level, name = selection, ""
            if character == ")":
                break
        else:
            name += character
    if name.strip():
        level.setdefault(name.strip(), {})
    return selection


def _select(value: Any, selection: Mapping[str, Any]) -> Any:
    if not selection:
        return value
    if isinstance(value, list):
        return [_select(item, selection) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _select(value[name], below) for name, below in selection.items() if name in value}


def _add_encoding(request: ApiRequest, resource: dict[str, Any]) -> dict[str, Any]:
    """Return an object resource with the ``contentEncoding`` of the query, which overrides that of the resource."""
    encoding = request.param("contentEncoding")
    return resource | {"contentEncoding": encoding} if encoding else resource


def _parse_preconditions(request: ApiRequest) -> Preconditions:
    headers = request.headers
    if "If-Match" not in headers and "If-None-Match" not in headers and not _CONDITION_NAMES & request.query.keys():
        return NO_PRECONDITIONS
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
    check_fields(resource, OBJECT_REFUSED)
    headers = {header: resource[name] for name, header in OBJECT_FIELDS.items() if name in resource}
    metadata = resource.get("metadata", {})
    stored.headers = _merge(stored.headers, headers)
    stored.metadata = {} if metadata is None else _merge(stored.metadata, metadata)


def _merge(values: Mapping[str, str], changes: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in {**values, **changes}.items() if value is not None}


def _check_checksums(resource: Mapping[str, Any], hash_header: str, stored: StoredObject) -> None:
    """Raise 400 if the content of an upload differs from the checksums in its metadata or its ``x-goog-hash``."""
    header_values = dict(item.strip().split("=", 1) for item in hash_header.split(",") if "=" in item)
    hashes = stored.hashes()
    checked = (
        ("md5Hash", resource.get("md5Hash"), hashes["md5"]),
        ("md5Hash", header_values.get("md5"), hashes["md5"]),
        ("crc32c", resource.get("crc32c"), hashes["crc32c"]),
        ("crc32c", header_values.get("crc32c"), hashes["crc32c"]),
    )
    for name, declared, actual in checked:
        if declared is not None and declared != actual:
            raise errors.invalid(f'Provided {name} "{declared}" doesn\'t match calculated {name} "{actual}".')
