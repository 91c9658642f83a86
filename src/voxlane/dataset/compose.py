"""Composed download on GCS: small objects joined by the server, fetched in one request, cut apart, removed.

Each join names its sources' generations, so an object overwritten after it was listed fails the join instead of
shifting its neighbours' bytes. The joined object lives under `COMPOSED_PREFIX` for the moments between join and
delete; what a killed process leaves there `voxlane clean` removes.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import Future

from voxlane.errors import ChangedError, ConfigError, NotFoundError
from voxlane.listing import Entry
from voxlane.store import Store
from voxlane.store.gcs_json import COMPOSED_PREFIX, GcsJson

MAX_SOURCES = 32
"""GCS joins at most this many objects in one request."""
DEFAULT_MAX_BYTES = 100_000_000
"""Largest joined object."""


def plan_groups(sizes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Consecutive indices to join: at most MAX_SOURCES objects and `max_bytes` a group, the bound included.

    An object over the bound is a group of its own, and so is an empty one: there is nothing to fetch for it.
    """
    groups: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if size == 0 or size > max_bytes:
            groups.append([index])
            room = 0
            continue
        if groups and size <= room and len(groups[-1]) < MAX_SOURCES:
            groups[-1].append(index)
            room -= size
        else:
            groups.append([index])
            room = max_bytes - size
    return groups


class Composer:
    """Joins, fetches, cuts and removes, on the store's threads."""

    def __init__(self, store: Store, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._store = store
        self._json = GcsJson(store)

    def check_permissions(self) -> None:
        """Raise unless these credentials may read, create and delete objects in the bucket."""
        needed = ["storage.objects.get", "storage.objects.create", "storage.objects.delete"]
        self._json.check_permissions(needed, "composed download", 'Ask for them, or pass compose="off"')

    def submit(self, entries: Sequence[Entry]) -> list[Future[memoryview]]:
        """Start reading `entries` as one download; one future an entry."""
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
        wanted = [f.set_running_or_notify_cancel() for f in futures]
        if not any(wanted):
            return
        target = f"{COMPOSED_PREFIX}{uuid.uuid4().hex}"
        try:
            try:
                self._json.compose(target, [(e.key, e.version) for e in entries])
                body = memoryview(self._store.get(target))
            except (ChangedError, NotFoundError) as error:
                raise self._blame(entries) or error from None
            if len(body) != sum(e.size for e in entries):
                raise self._blame(entries) or ChangedError("an object changed while it was read", uri=self._store.root)
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: whoever waits for a future gets it
            for future, go in zip(futures, wanted, strict=True):
                if go:
                    future.set_exception(error)
        else:
            start = 0
            for entry, future, go in zip(entries, futures, wanted, strict=True):
                if go:
                    future.set_result(body[start : start + entry.size])
                start += entry.size
        finally:
            self._store.delete_one(target)

    def _blame(self, entries: Sequence[Entry]) -> ChangedError | NotFoundError | None:
        """Which of the sources is not what was listed."""
        for entry in entries:
            try:
                generation = self._json.generation(entry.key)
            except NotFoundError as error:
                return error
            if generation != entry.version:
                return ChangedError(
                    f"the object changed after it was listed (listed as generation {entry.version}, now {generation})",
                    uri=self._store.uri(entry.key),
                    fix="List the bucket again, or restore the object",
                )
        return None
