"""What killed processes leave behind in a bucket."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from voxlane.store.bucket import ObjectInfo, Store
from voxlane.store.gcs_json import COMPOSED_PREFIX


def find_leftovers(store: Store, *, older_than_s: float) -> tuple[list[ObjectInfo], int]:
    """Joined objects of composed download last written at least `older_than_s` ago, and how many are younger."""
    before = datetime.now(UTC) - timedelta(seconds=older_than_s)
    found: list[ObjectInfo] = []
    seen = 0
    for page in store.list_pages(COMPOSED_PREFIX):
        columns = [page.column(name).to_pylist() for name in ("path", "size", "e_tag", "version", "last_modified")]
        seen += page.num_rows
        found += [
            ObjectInfo(key, size, etag, version)
            for key, size, etag, version, modified in zip(*columns, strict=True)
            if modified <= before
        ]
    return found, seen - len(found)
