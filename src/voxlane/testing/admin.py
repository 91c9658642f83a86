"""Handle administrative requests under ``/_emulator/``, without faults, counters and credentials."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from voxlane.testing import errors
from voxlane.testing.access import Access
from voxlane.testing.bodies import Blob, content
from voxlane.testing.counters import RequestRecorder
from voxlane.testing.faults import FaultInjector, Faults
from voxlane.testing.json_api import build_json_response
from voxlane.testing.objects import ObjectStore, StoredObject, SyntheticFill
from voxlane.testing.request_parsing import ApiRequest
from voxlane.testing.responses import Handler, Response


class Admin:
    """Handle requests of the dialect ``admin`` and hold the settings they change."""

    def __init__(self, objects: ObjectStore, recorder: RequestRecorder) -> None:
        self.injector = FaultInjector(Faults())
        self.access = Access()
        self._objects = objects
        self._recorder = recorder

    def handle(self, request: ApiRequest) -> Response:
        """Handle a request; raise :class:`RequestError`, or ValueError for an invalid Faults or Access."""
        handler: Handler | None = getattr(self, f"_do_{request.method.lower()}_{request.op}", None)
        if handler is None:
            raise errors.RequestError(404, "NotFound", f"No admin request {request.method} {request.op}")
        return handler(request)

    def _do_get_health(self, request: ApiRequest) -> Response:
        return build_json_response({"ok": True})

    def _do_get_counters(self, request: ApiRequest) -> Response:
        return build_json_response(self._recorder.snapshot().to_json())

    def _do_delete_counters(self, request: ApiRequest) -> Response:
        self._recorder.reset()
        return Response(204)

    def _do_get_faults(self, request: ApiRequest) -> Response:
        return build_json_response(asdict(self.injector.faults))

    def _do_put_faults(self, request: ApiRequest) -> Response:
        self.injector = FaultInjector(Faults(**json.loads(request.body)))
        return Response(204)

    def _do_put_access(self, request: ApiRequest) -> Response:
        self.access = Access(**json.loads(request.body))
        return Response(204)

    def _do_put_bucket(self, request: ApiRequest) -> Response:
        self._objects.create(request.param("bucket"))
        return Response(204)

    def _do_post_objects(self, request: ApiRequest) -> Response:
        """Store objects; the body is a line of JSON, ``[[key, size in bytes], ...]``, and then all contents."""
        bucket = self._objects.require(request.param("bucket"))
        offset = request.body.index(b"\n") + 1
        entries: list[tuple[str, int]] = json.loads(request.body[:offset])
        for key, size in entries:
            data = request.body[offset : offset + size]
            offset += size
            md5 = hashlib.md5(data).digest()
            bucket.put(StoredObject(key, Blob(data), md5, self._objects.next_generation()))
        return build_json_response(len(entries))

    def _do_get_objects(self, request: ApiRequest) -> Response:
        keys, prefix = self._objects.require(request.param("bucket")).keys(), request.param("prefix")
        return build_json_response([key for key in keys if key.startswith(prefix)])

    def _do_get_object(self, request: ApiRequest) -> Response:
        stored = self._objects.require(request.param("bucket")).require(request.param("key"))
        return Response(200, chunks=[content(stored.body)])

    def _do_delete_object(self, request: ApiRequest) -> Response:
        bucket = self._objects.require(request.param("bucket"))
        bucket.require(request.param("key"))
        bucket.remove(request.param("key"))
        return Response(204)

    def _do_post_fill(self, request: ApiRequest) -> Response:
        options: dict[str, Any] = json.loads(request.body)
        bucket = self._objects.require(options["bucket"])
        first, count, template = options["first"], options["count"], options["key"]
        like = bucket.require(options["like"]) if options.get("like") else None
        if like is not None and options["size_bytes"]:
            raise ValueError("give either size_bytes or like, not both")
        size = like.body.size if like else options["size_bytes"]
        keys = [template.format(number) for number in range(first, first + count)]
        bucket.fill(keys, SyntheticFill(size, self._objects.next_generation(), like))
        return build_json_response(len(keys))

    def _do_get_uploads(self, request: ApiRequest) -> Response:
        uploads = self._objects.require(request.param("bucket")).uploads.values()
        sizes = [{number: part.body.size for number, part in upload.parts.items()} for upload in uploads]
        return build_json_response(
            [
                {"upload_id": upload.upload_id, "key": upload.key, "parts": parts}
                for upload, parts in zip(uploads, sizes, strict=True)
            ]
        )

    def _do_post_wipe(self, request: ApiRequest) -> Response:
        self._objects.buckets.clear()
        return Response(204)
