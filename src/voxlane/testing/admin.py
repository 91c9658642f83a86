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
from voxlane.testing.responses import Response


class Admin:
    """Handle requests of the dialect ``admin`` and hold the settings they change."""

    def __init__(self, objects: ObjectStore, recorder: RequestRecorder) -> None:
        self.injector = FaultInjector(Faults())
        self.access = Access()
        self._objects = objects
        self._recorder = recorder

    def handle(self, request: ApiRequest) -> Response:
        """Handle a request; raise :class:`RequestError`, or ValueError for an invalid Faults or Access.

        A handler takes the body, if there is one, and the query as keywords. It returns the bytes or the JSON value of
        the response, or None for a response without content.
        """
        handler = getattr(self, f"_do_{request.method.lower()}_{request.op}", None)
        if handler is None:
            raise errors.RequestError(404, "NotFound", f"No admin request {request.method} {request.op}")
        body = [request.body] if request.body else []
        result = handler(*body, **{name: values[0] for name, values in request.query.items()})
        if result is None:
            return Response(204)
        return Response(200, chunks=[result]) if isinstance(result, bytes) else build_json_response(result)

    def _do_get_health(self) -> dict[str, bool]:
        return {"ok": True}

    def _do_get_counters(self) -> dict[str, Any]:
        return self._recorder.snapshot()

    def _do_delete_counters(self) -> None:
        self._recorder.reset()

    def _do_get_faults(self) -> dict[str, Any]:
        return asdict(self.injector.faults)

    def _do_put_faults(self, body: bytes) -> None:
        self.injector = FaultInjector(Faults(**json.loads(body)))

    def _do_put_access(self, body: bytes) -> None:
        self.access = Access(**json.loads(body))

    def _do_put_bucket(self, bucket: str) -> None:
        self._objects.create(bucket, exist_ok=True)

    def _do_post_objects(self, body: bytes, bucket: str, storage_class: str) -> None:
        """Store objects; the body is a line of JSON, ``[[key, size in bytes], ...]``, and then all contents."""
        target = self._objects.require(bucket)
        storage_class = storage_class or target.storage_class
        offset = body.index(b"\n") + 1
        for key, size in json.loads(body[:offset]):
            data = body[offset : offset + size]
            offset += size
            md5, generation = hashlib.md5(data).digest(), self._objects.next_generation()
            target.put(StoredObject(key, Blob(data), md5, generation, storage_class=storage_class))

    def _do_get_objects(self, bucket: str, prefix: str) -> list[str]:
        return [key for key in self._objects.require(bucket).keys() if key.startswith(prefix)]

    def _do_get_object(self, bucket: str, key: str) -> bytes:
        return content(self._objects.require(bucket).require(key).body)

    def _do_delete_object(self, bucket: str, key: str) -> None:
        self._objects.require(bucket).require(key)
        self._objects.require(bucket).remove(key)

    def _do_post_fill(self, bucket: str, count: str, key: str, size_bytes: str, first: str, like: str) -> int:
        target = self._objects.require(bucket)
        source = target.require(like) if like else None
        if source is not None and int(size_bytes):
            raise ValueError("give either size_bytes or like, not both")
        keys = [key.format(number) for number in range(int(first), int(first) + int(count))]
        size = source.body.size if source else int(size_bytes)
        target.fill(keys, SyntheticFill(size, self._objects.next_generation(), target.storage_class, source))
        return len(keys)

    def _do_get_uploads(self, bucket: str) -> list[dict[str, Any]]:
        return [
            {
                "upload_id": upload.upload_id,
                "key": upload.key,
                "parts": [(number, part.body.size) for number, part in upload.parts.items()],
            }
            for upload in self._objects.require(bucket).uploads.values()
        ]

    def _do_post_wipe(self) -> None:
        self._objects.buckets.clear()
