"""The parts of GCS's JSON API that the byte engine lacks: compose, permissions, and listings of only what is needed."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from voxlane import uri as uris
from voxlane.errors import NotFoundError, PermissionDeniedError, UnsupportedError
from voxlane.store.bucket import Store
from voxlane.store.direct import LIST_PAGE_KEYS
from voxlane.store.http import HttpPool
from voxlane.store.list_pages import ListingProgress
from voxlane.store.services import GcsService
from voxlane.store.translate import not_a_listing_error, translate_response

COMPOSED_PREFIX = "voxlane-composed/"
"""Prefix of joined objects, which exist only while a composed download runs."""
COMPOSED_PREFIXES = (COMPOSED_PREFIX, "dataflux-composed-objects/")
"""Prefixes of joined objects, ours and those of Google's Dataflux connector: never samples, and cleaned up alike."""

_LIST_MEMBERS = frozenset({"kind", "items", "prefixes", "nextPageToken"})
"""Members of the response to a list request."""


class GcsJson:
    """JSON requests to one bucket, with the store's retries and counters."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._service = GcsService(store.bucket, store.config)
        self._pool = HttpPool(self._service.endpoint, store.config)

    def compose(self, target: str, sources: Sequence[tuple[str, str | None]]) -> None:
        """Join (key, generation) pairs into `target`; raise ChangedError if an object has another generation now."""
        body = {
            "sourceObjects": [
                {"name": key, "generation": generation, "objectPreconditions": {"ifGenerationMatch": generation}}
                if generation is not None
                else {"name": key}
                for key, generation in sources
            ],
            "destination": {"contentType": "application/octet-stream"},
        }
        path = f"/storage/v1/b/{uris.quote(self._store.bucket)}/o/{uris.quote(target)}/compose"
        self.send("compose", "POST", path, target, body)

    def check_compose_permissions(self) -> None:
        """Raise PermissionDeniedError unless the credentials may read, create and delete objects in the bucket."""
        missing = self.find_missing_permissions(
            ["storage.objects.get", "storage.objects.create", "storage.objects.delete"]
        )
        if missing:
            raise PermissionDeniedError(
                f"composed download needs permissions that these credentials lack: {', '.join(missing)}",
                uri=self._store.root,
                fix='Ask for them, or pass compose="off"',
            )

    def find_missing_permissions(self, needed: Sequence[str]) -> list[str]:
        """Return those of the `needed` IAM permissions on the bucket that the credentials lack, sorted."""
        query = urllib.parse.urlencode([("permissions", p) for p in needed])
        path = f"/storage/v1/b/{uris.quote(self._store.bucket)}/iam/testPermissions?{query}"
        try:
            response = json.loads(self.send("head", "GET", path))
        except (UnsupportedError, NotFoundError):
            return []  # an emulator without IAM, or no such bucket: the first request that is not permitted fails
        return sorted(set(needed) - set(response.get("permissions", [])))

    def pages(self, prefix: str, start_after: str | None, *, storage_class: bool = False) -> Iterator[Any]:
        """Yield Arrow batches (key, size, etag, version) of the keys that start with `prefix`, in order, with the
        generation as version. The etag is the one that the engine's reads report. With `storage_class` the batches have
        a fifth column of that name."""
        from voxlane.store.list_json import parse_page, select_fields  # pyarrow is slow to import

        self._service.authorization()  # raises before a request is counted if there are no credentials
        query = {"prefix": prefix, "maxResults": str(LIST_PAGE_KEYS), "prettyPrint": "false"}
        query["fields"] = select_fields(storage_class=storage_class)
        if start_after is not None:
            query["startOffset"] = start_after
        uri, progress = self._store.uri(prefix), ListingProgress(prefix, start_after, is_ordered=True)

        def read_page(body: bytes) -> tuple[Any, str | None]:
            try:
                page, token = parse_page(body, storage_class=storage_class)
                if not page.num_rows and json.loads(body).keys() - _LIST_MEMBERS:
                    raise not_a_listing_error(body, uri)
            except (ValueError, KeyError, TypeError):
                raise not_a_listing_error(body, uri) from None
            if page.num_rows and page.column("key")[0].as_py() == start_after:
                page = page.slice(1)  # startOffset is inclusive
            progress.check(page.column("key"), token, uri)
            return page, token

        first_path = f"/storage/v1/b/{uris.quote(self._store.bucket)}/o?{urllib.parse.urlencode(query)}"
        path = first_path
        while True:
            page, token = self.send("list", "GET", path, prefix, read=read_page)
            if page.num_rows:
                yield page
            if not token:
                return
            path = f"{first_path}&pageToken={urllib.parse.quote_plus(token)}"

    def send(
        self,
        kind: str,
        method: str,
        path: str,
        key: str = "",
        body: Any = None,
        read: Callable[[bytes], Any] = lambda text: text,
    ) -> Any:
        """Send one request of the JSON or XML API, retried and counted as `kind`; return what `read` makes of the
        response's body. It raises TransientError for a response that is worth another attempt."""
        uri = self._store.uri(key)

        def attempt() -> Any:
            headers = {"Content-Type": "application/json", **self._service.authorization()}
            data = None if body is None else json.dumps(body)
            with self._pool.request(method, path, headers, data, uri=uri) as response:
                text = response.read()
            if response.status >= 300:
                raise translate_response(response.status, text, uri)
            return read(text)

        return self._store.call(kind, uri, attempt)
