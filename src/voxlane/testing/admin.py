"""The emulator's own requests, under ``/_emulator/``: no faults, no counts, no credentials."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from voxlane.testing import refusals
from voxlane.testing.access import Access
from voxlane.testing.bodies import content
from voxlane.testing.calls import Call
from voxlane.testing.counters import Ledger
from voxlane.testing.faults import Dice, Faults
from voxlane.testing.json_api import json_reply
from voxlane.testing.listing import after_prefix
from voxlane.testing.objects import Objects
from voxlane.testing.replies import Reply


class Admin:
    """Answers calls of the dialect ``admin`` and holds what they change."""

    def __init__(self, objects: Objects, ledger: Ledger) -> None:
        self.dice = Dice(Faults())
        self.access = Access()
        self._objects = objects
        self._ledger = ledger
        self._ops: dict[tuple[str, str], Callable[[Call], Reply]] = {
            ("GET", "health"): self._health,
            ("GET", "counters"): self._counters,
            ("DELETE", "counters"): self._reset_counters,
            ("GET", "faults"): self._faults,
            ("PUT", "faults"): self._set_faults,
            ("PUT", "access"): self._set_access,
            ("PUT", "bucket"): self._create_bucket,
            ("POST", "objects"): self._put_many,
            ("GET", "objects"): self._keys,
            ("GET", "object"): self._get,
            ("DELETE", "object"): self._delete,
            ("POST", "fill"): self._fill,
            ("GET", "uploads"): self._uploads,
            ("POST", "wipe"): self._wipe,
        }

    def answer(self, call: Call) -> Reply:
        """Carry out a call; raises :class:`RefusedError`, and ValueError for a bad Faults or Access."""
        op = self._ops.get((call.method, call.op))
        if op is None:
            raise refusals.RefusedError(404, "NotFound", f"No admin request {call.method} {call.op}", "notFound")
        return op(call)

    def _health(self, call: Call) -> Reply:
        return json_reply({"ok": True})

    def _counters(self, call: Call) -> Reply:
        return json_reply(self._ledger.snapshot().to_json())

    def _reset_counters(self, call: Call) -> Reply:
        self._ledger.reset()
        return Reply(204)

    def _faults(self, call: Call) -> Reply:
        return json_reply(self.dice.faults.to_json())

    def _set_faults(self, call: Call) -> Reply:
        self.dice = Dice(Faults.from_json(json.loads(call.body)))
        return Reply(204)

    def _set_access(self, call: Call) -> Reply:
        self.access = Access.from_json(json.loads(call.body))
        return Reply(204)

    def _create_bucket(self, call: Call) -> Reply:
        self._objects.create(call.arg("bucket"))
        return Reply(204)

    def _put_many(self, call: Call) -> Reply:
        """The body is a line of JSON, ``[[key, size in bytes], ...]``, and then all contents end to end."""
        bucket = self._objects.need(call.arg("bucket"))
        place = call.body.index(b"\n") + 1
        entries: list[tuple[str, int]] = json.loads(call.body[:place])
        for key, size in entries:
            data = call.body[place : place + size]
            place += size
            self._objects.put(bucket, key, data, hashlib.md5(data).digest())
        return json_reply(len(entries))

    def _keys(self, call: Call) -> Reply:
        keys = self._objects.need(call.arg("bucket")).keys()
        prefix = call.arg("prefix")
        end = after_prefix(prefix)
        return json_reply([key for key in keys if key >= prefix and (end is None or key < end)] if prefix else keys)

    def _get(self, call: Call) -> Reply:
        stored = self._objects.need(call.arg("bucket")).need(call.arg("key"))
        return Reply(200, chunks=[content(stored.body)])

    def _delete(self, call: Call) -> Reply:
        bucket = self._objects.need(call.arg("bucket"))
        bucket.need(call.arg("key"))
        bucket.remove(call.arg("key"))
        return Reply(204)

    def _fill(self, call: Call) -> Reply:
        order: dict[str, Any] = json.loads(call.body)
        bucket = self._objects.need(order["bucket"])
        first, count, template = order["first"], order["count"], order["key"]
        keys = map(template.format, range(first, first + count))
        like = bucket.need(order["like"]) if order.get("like") else None
        if like is not None and order["size_bytes"]:
            raise ValueError("size_bytes and like: give one of them, an object like another has its size")
        return json_reply(self._objects.fill(bucket, keys, order["size_bytes"], like))

    def _uploads(self, call: Call) -> Reply:
        found = self._objects.need(call.arg("bucket")).uploads.values()
        return json_reply(
            [
                {
                    "upload_id": each.upload_id,
                    "key": each.key,
                    "parts": {n: p.body.size for n, p in each.parts.items()},
                }
                for each in found
            ]
        )

    def _wipe(self, call: Call) -> Reply:
        self._objects.buckets.clear()
        return Reply(204)
