"""Composed download on GCS: the server joins small objects, which are fetched in one request and split again.

Each join names the generations of its sources, so that the join fails if an object was overwritten after it was listed.
The joined object exists under `COMPOSED_PREFIX` until it has been fetched; `voxlane clean` removes objects that killed
processes leave there.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import accumulate

from voxlane.errors import ChangedError, ConfigError, NotFoundError
from voxlane.store import Store
from voxlane.store.gcs_json import COMPOSED_PREFIX, GcsJson
from voxlane.store.listing import Entry
from voxlane.store.objects import changed_error

MAX_SOURCES = 32
"""Maximum number of objects that GCS joins in one request."""
DEFAULT_MAX_BYTES = 100_000_000
"""Maximum size of a joined object in bytes."""


def plan_groups(sizes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Return groups of consecutive indices to join, each of at most MAX_SOURCES objects and `max_bytes` (inclusive). A
    larger object is a group by itself. So is an empty object, because there is nothing to fetch for it."""
    groups: list[list[int]] = []
    left_bytes = 0
    for index, size in enumerate(sizes):
        is_alone = size == 0 or size > max_bytes
        if not is_alone and size <= left_bytes and len(groups[-1]) < MAX_SOURCES:
            groups[-1].append(index)
        else:
            groups.append([index])
            left_bytes = 0 if is_alone else max_bytes
        left_bytes -= size
    return groups


class Composer:
    """Runs composed downloads on the store's threads."""

    def __init__(self, store: Store, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._store = store
        self.json_api = GcsJson(store)

    def submit(self, entries: Sequence[Entry]) -> list[Future[memoryview]]:
        """Start to read `entries` as one download; return one future per entry."""
        for entry in entries:
            if entry.version is None:
                raise ConfigError(
                    "composed download needs each object's generation, and the manifest has none",
                    uri=self._store.uri(entry.key),
                    fix='Let the dataset list the bucket itself, or pass compose="off"',
                )
        futures: list[Future[memoryview]] = [Future() for _ in entries]
        self._store.submit(self._run, list(entries), futures)
        return futures

    def _run(self, entries: list[Entry], futures: list[Future[memoryview]]) -> None:
        stops = accumulate(entry.size for entry in entries)
        running = [
            (future, slice(stop - entry.size, stop))
            for entry, future, stop in zip(entries, futures, stops, strict=True)
            if future.set_running_or_notify_cancel()
        ]
        if not running:
            return
        target = f"{COMPOSED_PREFIX}{uuid.uuid4().hex}"
        try:
            body = self._fetch_joined(target, entries)
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: the callers of result() get it
            for future, _ in running:
                future.set_exception(error)
        else:
            for future, part in running:
                future.set_result(body[part])
        finally:
            self._store.delete_one(target)

    def _fetch_joined(self, target: str, entries: list[Entry]) -> memoryview:
        try:
            self.json_api.compose(target, [(e.key, e.version) for e in entries])
            body = memoryview(self._store.get(target))
        except (ChangedError, NotFoundError) as error:
            raise self._find_changed(entries) or error from None
        if len(body) != sum(e.size for e in entries):
            raise self._find_changed(entries) or ChangedError(
                "an object changed while it was read", uri=self._store.root
            )
        return body

    def _find_changed(self, entries: Sequence[Entry]) -> ChangedError | NotFoundError | None:
        """Return the error for the first source that changed after it was listed, or None."""
        for entry in entries:
            try:
                current = self._store.head(entry.key).version
            except NotFoundError as error:
                return error
            if current != entry.version:
                return changed_error(self._store.uri(entry.key), f"as generation {entry.version}", f"{current}")
        return None
