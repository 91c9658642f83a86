"""The JSON API of Google Cloud Storage, as google-cloud-storage, gcsfs and the Dataflux client speak it."""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from voxlane.testing import refusals
from voxlane.testing.access import Access
from voxlane.testing.bodies import Blob, Joined
from voxlane.testing.calls import Call
from voxlane.testing.envelopes import split_multipart
from voxlane.testing.json_objects import KEPT_FIELDS, Renderer, wanted_fields
from voxlane.testing.listing import plan_page, start_of, token_of
from voxlane.testing.objects import Bucket, Objects, Preconditions, Stored, json_etag
from voxlane.testing.refusals import RefusedError
from voxlane.testing.replies import Reply, header_lines, http_date, iso_date, wanted_range

_JSON_HEAD = "Content-Type: application/json; charset=UTF-8\r\n"
_MAX_RESULTS = 1000
_MAX_SOURCES = 32
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")


def json_reply(value: object, status: int = 200, head: str = "") -> Reply:
    """A JSON answer."""
    return Reply(status, _JSON_HEAD + head, [json.dumps(value, ensure_ascii=False).encode()])


def error_reply(refused: RefusedError, call: Call) -> Reply:
    """The answer to a refused request."""
    if refused.status == 304:
        return Reply(304)
    head = ""
    if refused.status == 416:
        head = f"Content-Range: bytes */{refused.message.rsplit(' ', 2)[1]}\r\n"
    detail = {"message": refused.message, "domain": "global", "reason": refused.reason}
    error = {"code": refused.status, "message": refused.message, "errors": [detail]}
    return json_reply({"error": error}, refused.status, head)


@dataclass(slots=True)
class _Resumable:
    """A resumable upload in progress."""

    bucket: str
    key: str
    resource: Mapping[str, Any]
    conditions: Preconditions
    data: bytearray = field(default_factory=bytearray)


class JsonApi:
    """Answers calls of the dialect ``json``, except batches, which the server takes apart."""

    def __init__(self, objects: Objects, base_url: str) -> None:
        self.access = Access()
        self._objects = objects
        self._base_url = base_url
        self._renderer = Renderer(base_url)
        self._resumables: dict[str, _Resumable] = {}
        self._ops: dict[str, Callable[[Call], Reply]] = {
            "object_media": self._media,
            "object_get": self._object_get,
            "object_list": self._object_list,
            "object_delete": self._object_delete,
            "object_patch": self._object_patch,
            "object_update": self._object_patch,
            "upload": self._upload,
            "upload_start": self._upload_start,
            "upload_chunk": self._upload_chunk,
            "upload_cancel": self._upload_cancel,
            "rewrite": self._rewrite,
            "copy": self._copy,
            "compose": self._compose,
            "bucket_list": self._bucket_list,
            "bucket_insert": self._bucket_insert,
            "bucket_get": self._bucket_get,
            "bucket_patch": self._bucket_get,
            "bucket_delete": self._bucket_delete,
            "test_permissions": self._test_permissions,
            "storage_layout": self._storage_layout,
        }

    def answer(self, call: Call) -> Reply:
        """Carry out a call; raises :class:`RefusedError`."""
        op = self._ops.get(call.op)
        if op is None:
            raise RefusedError(404, "NotFound", f"The emulator has no {call.method} here", "notFound")
        return op(call)

    # Reading objects

    def _media(self, call: Call) -> Reply:
        stored = self._readable(call)
        size = stored.body.size
        span = wanted_range(call.headers.get("Range"), size)
        if span is None:
            return Reply(200, _media_head(stored), stored.body.slices(0, size), size)
        start, stop = span
        head = f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n{_media_head(stored)}"
        return Reply(206, head, stored.body.slices(start, stop), stop - start)

    def _object_get(self, call: Call) -> Reply:
        return self._resource_reply(call, self._readable(call))

    def _readable(self, call: Call) -> Stored:
        stored = _right_generation(call, self._objects.need(call.bucket).need(call.key))
        if call.query or "If-Match" in call.headers or "If-None-Match" in call.headers:
            _conditions(call).check_read(stored, json_etag(stored.generation, stored.metageneration))
        return stored

    def _object_list(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        start, token = call.arg("startOffset"), call.arg("pageToken")
        if token:
            try:
                start = start_of(token)
            except ValueError:
                raise refusals.invalid(f"Invalid pageToken: {token}") from None
        limit = _number(call.arg("maxResults"))
        page = plan_page(
            bucket.keys(),
            prefix=call.arg("prefix"),
            delimiter=call.arg("delimiter"),
            start=start,
            end=call.arg("endOffset") or None,
            limit=_MAX_RESULTS if not limit else min(limit, _MAX_RESULTS),
        )
        top, item_fields = wanted_fields(call.arg("fields"))
        members = ['"kind":"storage#objects"'] if top is None or "kind" in top else []
        if page.resume is not None and (top is None or "nextPageToken" in top):
            members.append(f'"nextPageToken":"{token_of(page.resume)}"')
        if page.prefixes and (top is None or "prefixes" in top):
            members.append(f'"prefixes":{json.dumps(page.prefixes, ensure_ascii=False)}')
        if not page.keys or (top is not None and "items" not in top):
            return Reply(200, _JSON_HEAD, [f"{{{','.join(members)}}}".encode()])
        items = ",".join(self._renderer.items(bucket, page.keys, item_fields)).encode()
        # In pieces, because a page is most of a megabyte and every further join would copy it.
        opening = f'{{{",".join([*members, ""])}"items":['
        return Reply(200, _JSON_HEAD, [opening.encode(), items, b"]}"])

    # Changing objects

    def _object_delete(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        stored = _right_generation(call, bucket.need(call.key))
        self._check_write(call, stored)
        bucket.remove(call.key)
        return Reply(204)

    def _object_patch(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        stored = _right_generation(call, bucket.need(call.key))
        self._check_write(call, stored)
        resource = _parsed(call.body)
        if call.op == "object_update":
            stored.headers, stored.metadata = {}, {}
        _describe(stored, resource)
        stored.metageneration += 1
        stored.updated_s = self._objects.next_generation() / 1e6
        stored.rendered.clear()
        bucket.put(stored)
        return self._resource_reply(call, stored)

    def _rewrite(self, call: Call) -> Reply:
        stored = self._copied(call)
        size = str(stored.body.size)
        resource = json.loads(self._renderer.resource(call.other_bucket, stored))
        return json_reply(
            {
                "kind": "storage#rewriteResponse",
                "totalBytesRewritten": size,
                "objectSize": size,
                "done": True,
                "resource": resource,
            }
        )

    def _copy(self, call: Call) -> Reply:
        stored = self._copied(call)
        return Reply(200, _JSON_HEAD, [self._renderer.resource(call.other_bucket, stored).encode()])

    def _copied(self, call: Call) -> Stored:
        source = self._objects.need(call.bucket).need(call.key)
        wanted = _number(call.arg("sourceGeneration"))
        if wanted is not None and wanted != source.generation:
            raise refusals.no_such_key(call.bucket, call.key)
        Preconditions(
            generation=_number(call.arg("ifSourceGenerationMatch")),
            metageneration=_number(call.arg("ifSourceMetagenerationMatch")),
        ).check_read(source, "")
        bucket = self._objects.need(call.other_bucket)
        self._check_write(call, bucket.find(call.other_key))
        stored = self._objects.stored(
            call.other_key,
            source.body,
            source.md5,
            headers=dict(source.headers),
            metadata=dict(source.metadata),
            component_count=source.component_count,
        )
        stored.has_crc32c = source.has_crc32c
        _describe(stored, _parsed(call.body))
        bucket.put(stored)
        return stored

    def _compose(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        request = _parsed(call.body)
        wanted: Sequence[Mapping[str, Any]] = request.get("sourceObjects") or []
        if not 1 <= len(wanted) <= _MAX_SOURCES:
            message = f"The number of source components ({len(wanted)}) is not between 1 and {_MAX_SOURCES}"
            raise refusals.invalid(message)
        sources: list[Stored] = []
        for each in wanted:
            source = bucket.need(str(each.get("name", "")))
            generation = _given(each.get("generation"))
            if generation is not None and generation != source.generation:
                raise refusals.no_such_key(call.bucket, source.key)
            match = (each.get("objectPreconditions") or {}).get("ifGenerationMatch")
            Preconditions(generation=_given(match)).check_read(source, "")
            sources.append(source)
        self._check_write(call, bucket.find(call.key))
        stored = self._objects.stored(
            call.key,
            Joined(source.body for source in sources),
            None,
            component_count=sum(source.component_count or 1 for source in sources),
        )
        stored.has_crc32c = all(source.has_crc32c for source in sources)
        _describe(stored, request.get("destination") or {})
        bucket.put(stored)
        return self._resource_reply(call, stored)

    # Uploads

    def _upload(self, call: Call) -> Reply:
        content_type = call.headers.get("Content-Type", "application/octet-stream")
        if call.arg("uploadType") != "multipart":
            return self._store(call.bucket, call.key, {"contentType": content_type}, call.body, _conditions(call), call)
        parts = split_multipart(call.body, content_type)
        if len(parts) != 2:
            raise refusals.invalid("A multipart upload has a metadata part and a media part")
        (_, metadata), (media_headers, media) = parts
        resource = _parsed(metadata)
        resource.setdefault("contentType", media_headers.get("content-type", "application/octet-stream"))
        return self._store(
            call.bucket,
            call.arg("name") or resource.get("name", ""),
            resource,
            media,
            _conditions(call),
            call,
        )

    def _upload_start(self, call: Call) -> Reply:
        self._objects.need(call.bucket)
        resource = _parsed(call.body)
        declared = call.headers.get("X-Upload-Content-Type")
        if declared:
            resource.setdefault("contentType", declared)
        upload_id = secrets.token_urlsafe(24)
        key = call.arg("name") or resource.get("name", "")
        self._resumables[upload_id] = _Resumable(call.bucket, key, resource, _conditions(call))
        location = (
            f"{self._base_url}/upload/storage/v1/b/{quote(call.bucket, safe='')}/o"
            f"?uploadType=resumable&upload_id={upload_id}"
        )
        return Reply(200, f"Location: {location}\r\nX-GUploader-UploadID: {upload_id}\r\n")

    def _upload_chunk(self, call: Call) -> Reply:
        upload_id = call.arg("upload_id")
        resumable = self._resumables.get(upload_id)
        if resumable is None:
            raise refusals.no_such_upload(upload_id)
        data = resumable.data
        match = _CONTENT_RANGE.match(call.headers.get("Content-Range", "bytes */*"))
        if match is None:
            raise refusals.invalid("Invalid Content-Range header")
        first, _, total = match.groups()
        if first is None and "Content-Range" not in call.headers:
            data += call.body
            total = str(len(data))
        elif first is not None:
            if int(first) > len(data):
                raise RefusedError(503, "ServiceUnavailable", f"Expected byte {len(data)}, got {first}", "backendError")
            # A client that resumes may send again what was already received.
            data += call.body[len(data) - int(first) :]
        if total == "*" or int(total) > len(data):
            have = f"Range: bytes=0-{len(data) - 1}\r\n" if data else ""
            return Reply(308, have)
        reply = self._store(
            resumable.bucket, resumable.key, resumable.resource, bytes(data), resumable.conditions, None
        )
        del self._resumables[upload_id]
        return reply

    def _upload_cancel(self, call: Call) -> Reply:
        if self._resumables.pop(call.arg("upload_id"), None) is None:
            raise refusals.no_such_upload(call.arg("upload_id"))
        return Reply(499)

    def _store(
        self,
        bucket_name: str,
        key: str,
        resource: Mapping[str, Any],
        data: bytes,
        conditions: Preconditions,
        call: Call | None,
    ) -> Reply:
        bucket = self._objects.need(bucket_name)
        if not key:
            raise refusals.invalid("Required parameter: name")
        old = bucket.find(key)
        conditions.check_write(old, json_etag(old.generation, old.metageneration) if old else "")
        if call is None or call.body is not data:
            call = Call("json", "upload", "put", "POST", bucket_name, key, {}, {}, body=data)
        stored = self._objects.stored(key, Blob(data), call.md5())
        _check_declared(resource, stored)
        _describe(stored, resource)
        bucket.put(stored)
        return Reply(200, _JSON_HEAD, [self._renderer.resource(bucket_name, stored).encode()])

    # Buckets

    def _bucket_insert(self, call: Call) -> Reply:
        name = str(_parsed(call.body).get("name", ""))
        if not name:
            raise refusals.invalid("Required parameter: name")
        if name in self._objects.buckets:
            message = "Your previous request to create the named bucket succeeded and you already own it."
            raise RefusedError(409, "BucketAlreadyOwnedByYou", message, "conflict")
        return json_reply(self._bucket_resource(self._objects.create(name)))

    def _bucket_get(self, call: Call) -> Reply:
        return json_reply(self._bucket_resource(self._objects.need(call.bucket)))

    def _bucket_list(self, call: Call) -> Reply:
        prefix = call.arg("prefix")
        found = [
            self._bucket_resource(bucket)
            for name, bucket in sorted(self._objects.buckets.items())
            if name.startswith(prefix)
        ]
        return json_reply({"kind": "storage#buckets"} | ({"items": found} if found else {}))

    def _bucket_delete(self, call: Call) -> Reply:
        if len(self._objects.need(call.bucket)):
            raise RefusedError(409, "BucketNotEmpty", "The bucket you tried to delete is not empty.", "conflict")
        del self._objects.buckets[call.bucket]
        return Reply(204)

    def _test_permissions(self, call: Call) -> Reply:
        self._objects.need(call.bucket)
        asked = call.query.get("permissions", [])
        held = [each for each in asked if each not in self.access.denied_permissions]
        return json_reply({"kind": "storage#testIamPermissionsResponse"} | ({"permissions": held} if held else {}))

    def _storage_layout(self, call: Call) -> Reply:
        self._objects.need(call.bucket)
        return json_reply(
            {
                "kind": "storage#storageLayout",
                "bucket": call.bucket,
                "location": "US",
                "locationType": "multi-region",
                "hierarchicalNamespace": {"enabled": False},
            }
        )

    def _bucket_resource(self, bucket: Bucket) -> dict[str, Any]:
        created = iso_date(bucket.created_s)
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

    def _resource_reply(self, call: Call, stored: Stored) -> Reply:
        head = f"{_JSON_HEAD}ETag: {json_etag(stored.generation, stored.metageneration)}\r\n"
        return Reply(200, head, [self._renderer.resource(call.bucket, stored).encode()])

    def _check_write(self, call: Call, stored: Stored | None) -> None:
        etag = json_etag(stored.generation, stored.metageneration) if stored else ""
        _conditions(call).check_write(stored, etag)


def _number(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal():
        raise refusals.invalid(f"Invalid value: {text}")
    return int(text)


def _given(value: str | int | None) -> int | None:
    """A number in a JSON document, which clients write as a string, as a number or as null."""
    return None if value is None else _number(str(value))


def _conditions(call: Call) -> Preconditions:
    return Preconditions(
        generation=_number(call.arg("ifGenerationMatch")),
        not_generation=_number(call.arg("ifGenerationNotMatch")),
        metageneration=_number(call.arg("ifMetagenerationMatch")),
        not_metageneration=_number(call.arg("ifMetagenerationNotMatch")),
        etags=call.headers.get("If-Match"),
        not_etags=call.headers.get("If-None-Match"),
    )


def _right_generation(call: Call, stored: Stored) -> Stored:
    """``stored``, unless the call names another generation: without versioning, that one is gone."""
    wanted = _number(call.arg("generation"))
    if wanted is not None and wanted != stored.generation:
        raise refusals.no_such_key(call.bucket, call.key)
    return stored


def _parsed(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    try:
        value = json.loads(body)
    except ValueError:
        raise refusals.invalid("Parse Error", "ParseError") from None
    if not isinstance(value, dict):
        raise refusals.invalid("The request body is not a JSON object", "ParseError")
    return value


def _describe(stored: Stored, resource: Mapping[str, Any]) -> None:
    """Take content type, user metadata and the like from an object resource; null removes a value."""
    for field_name, header in KEPT_FIELDS.items():
        if field_name in resource:
            if resource[field_name] is None:
                stored.headers.pop(header, None)
            else:
                stored.headers[header] = str(resource[field_name])
    changes = resource.get("metadata", {})
    if changes is None:
        stored.metadata = {}
        return
    for name, value in changes.items():
        if value is None:
            stored.metadata.pop(name, None)
        else:
            stored.metadata[name] = str(value)


def _check_declared(resource: Mapping[str, Any], stored: Stored) -> None:
    """Refuse an upload whose content differs from the checksums in its metadata."""
    md5 = base64.b64encode(stored.md5 or b"").decode()
    for name, actual in (("md5Hash", md5), ("crc32c", stored.crc32c())):
        declared = resource.get(name)
        if declared is not None and declared != actual:
            raise refusals.invalid(f'Provided {name} "{declared}" doesn\'t match calculated {name} "{actual}".')


def _media_head(stored: Stored) -> str:
    found = stored.rendered.get("json head")
    if found is None:
        hashes = []
        if (crc32c := stored.crc32c()) is not None:
            hashes.append(f"crc32c={crc32c}")
        if stored.md5 is not None:
            hashes.append(f"md5={base64.b64encode(stored.md5).decode()}")
        found = stored.rendered["json head"] = (
            f"ETag: {json_etag(stored.generation, stored.metageneration)}\r\n"
            f"Last-Modified: {http_date(stored.updated_s)}\r\nAccept-Ranges: bytes\r\n"
            + header_lines({"Content-Type": stored.content_type} | stored.headers)
            + header_lines(stored.metadata, "X-Goog-Meta-")
            + f"X-Goog-Generation: {stored.generation}\r\nX-Goog-Metageneration: {stored.metageneration}\r\n"
            + f"X-Goog-Stored-Content-Length: {stored.body.size}\r\nX-Goog-Storage-Class: STANDARD\r\n"
            + (f"X-Goog-Hash: {','.join(hashes)}\r\n" if hashes else "")
        )
    return found
