"""The part of GCS's JSON API that the byte engine does not speak: compose, permissions, listing with generations."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

from voxlane import uri as uris
from voxlane.errors import (
    BucketNotFoundError,
    ChangedError,
    CredentialsError,
    MissingExtraError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
    UnsupportedError,
)
from voxlane.store.bucket import LIST_PAGE_KEYS, Store
from voxlane.store.credentials import gcs_bearer_token, gcs_endpoint
from voxlane.store.translate import LOGIN, RETRIED_STATUS, Transient

COMPOSED_PREFIX = "voxlane-composed/"
"""Where joined objects live for a moment."""
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


class GcsJson:
    """JSON requests to one bucket, with the store's retries and counting. One connection a thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bucket = uris.parse(store.root).bucket
        self._local = threading.local()
        self._credentials: Any = None
        self._credentials_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self._store}

    def __setstate__(self, state: dict[str, Any]) -> None:
        GcsJson.__init__(self, state["store"])

    def compose(self, target: str, sources: Sequence[tuple[str, str | None]]) -> None:
        """Join (key, generation) pairs into `target`; ChangedError when one has another generation now."""
        body = {
            "sourceObjects": [
                {"name": key, "generation": generation, "objectPreconditions": {"ifGenerationMatch": generation}}
                if generation is not None
                else {"name": key}
                for key, generation in sources
            ],
            "destination": {"contentType": "application/octet-stream"},
        }
        self._request("compose", "POST", f"{self._object(target)}/compose", target, body)

    def generation(self, key: str) -> str:
        """The current generation of an object."""
        answer = self._request("head", "GET", f"{self._object(key)}?fields=generation", key)
        return str(answer["generation"])

    def check_permissions(self, needed: Sequence[str], what_for: str, fix: str) -> None:
        """Raise PermissionDeniedError unless all `needed` permissions are granted on the bucket."""
        query = urllib.parse.urlencode([("permissions", p) for p in needed])
        path = f"/storage/v1/b/{uris.quote(self._bucket)}/iam/testPermissions?{query}"
        try:
            answer = self._request("head", "GET", path, "")
        except UnsupportedError:
            return  # an emulator without IAM: the first join will tell
        missing = sorted(set(needed) - set(answer.get("permissions", [])))
        if missing:
            raise PermissionDeniedError(
                f"{what_for} needs permissions these credentials lack: {', '.join(missing)}",
                uri=self._store.root,
                fix=fix,
            )

    def pages(self, prefix: str, start_after: str | None) -> Iterator[Any]:
        """Arrow batches (key, size, etag, version) of the keys that start with `prefix`, in order, with the
        generation as version. The etag is the one the engine's reads report; joined objects have none that is known.
        """
        import pyarrow as pa  # slow to import, and only listing with generations needs it

        query = {
            "prefix": prefix,
            "maxResults": str(LIST_PAGE_KEYS),
            "fields": "nextPageToken,items(name,size,generation,md5Hash)",
        }
        if start_after is not None:
            query["startOffset"] = start_after
        while True:
            path = f"/storage/v1/b/{uris.quote(self._bucket)}/o?{urllib.parse.urlencode(query)}"
            answer = self._request("list", "GET", path, prefix)
            items = [i for i in answer.get("items", []) if i["name"] != start_after]  # startOffset is inclusive
            if items:
                yield pa.record_batch(
                    [
                        pa.array([i["name"] for i in items], pa.string()),
                        pa.array([int(i["size"]) for i in items], pa.int64()),
                        pa.array([_etag(i.get("md5Hash")) for i in items], pa.string()),
                        pa.array([str(i["generation"]) for i in items], pa.string()),
                    ],
                    names=["key", "size", "etag", "version"],
                )
            if "nextPageToken" not in answer:
                return
            query["pageToken"] = answer["nextPageToken"]

    def _object(self, key: str) -> str:
        return f"/storage/v1/b/{uris.quote(self._bucket)}/o/{uris.quote(key)}"

    def _request(self, kind: str, method: str, path: str, key: str, body: Any = None) -> Any:
        text = self.send(kind, method, path, key, body)
        return json.loads(text) if text else {}

    def send(self, kind: str, method: str, path: str, key: str = "", body: Any = None) -> bytes:
        """One request of either API, retried and counted as `kind`; the answer's body."""
        uri = self._store.uri(key)

        def attempt() -> bytes:
            headers = {"Content-Type": "application/json", **self._authorization(uri)}
            data = None if body is None else json.dumps(body)
            try:
                connection = self._connection()
                connection.request(method, path, data, headers)
                response = connection.getresponse()
                text = response.read()
            except (OSError, http.client.HTTPException) as error:
                self._local.connection = None
                raise Transient(f"the connection failed ({error})", uri) from None
            if response.status >= 300:
                raise _refusal(response.status, text, uri, self._store.root)
            return text

        return self._store.call(kind, uri, attempt)

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            endpoint = urllib.parse.urlsplit(gcs_endpoint(self._store.config) or "https://storage.googleapis.com")
            timeout_s = self._store.config.read_timeout_s
            if endpoint.scheme == "http":
                connection = _Http(endpoint.netloc, timeout=timeout_s)
            else:
                context = ssl.create_default_context()
                connection = _Https(endpoint.netloc, timeout=timeout_s, context=context)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local.connection = connection
        return connection

    def _authorization(self, uri: str) -> dict[str, str]:
        config = self._store.config
        token = gcs_bearer_token(config)
        if config.credential_provider is not None:
            token = config.credential_provider()["token"]
        elif token is None and not config.anonymous:
            token = self._refreshed(uri)
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _refreshed(self, uri: str) -> str:
        try:
            import google.auth
            import google.auth.exceptions
            import google.auth.transport.requests
            import google.oauth2.service_account
        except ImportError:
            raise MissingExtraError.of("gcs", "composed download") from None
        with self._credentials_lock:
            try:
                if self._credentials is None:
                    key_file = self._store.config.service_account
                    if key_file:
                        self._credentials = google.oauth2.service_account.Credentials.from_service_account_file(
                            key_file, scopes=[_SCOPE]
                        )
                    else:
                        self._credentials, _ = google.auth.default(scopes=[_SCOPE])
                if not self._credentials.valid:
                    self._credentials.refresh(google.auth.transport.requests.Request())
            except google.auth.exceptions.GoogleAuthError as error:
                raise CredentialsError(f"no usable credentials: {error}", uri=uri, fix=LOGIN["gs"]) from None
            return str(self._credentials.token)


class _Http(http.client.HTTPConnection):
    """Closed when dropped: connections belong to threads, and end with them."""

    def __del__(self) -> None:
        self.close()


class _Https(http.client.HTTPSConnection):
    """Likewise."""

    def __del__(self) -> None:
        self.close()


def _etag(md5_base64: str | None) -> str | None:
    return None if md5_base64 is None else f'"{base64.b64decode(md5_base64).hex()}"'


def _refusal(status: int, text: bytes, uri: str, root: str) -> StoreError | Transient:
    try:
        said = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = text[:200].decode(errors="replace")
    if status in RETRIED_STATUS:
        return Transient(f"the service answered {status} ({said})", uri)
    if status == 404 and "bucket" in said.lower():
        return BucketNotFoundError("no such bucket", uri=root, fix="Check its spelling and project")
    if status == 404:
        return NotFoundError("no such object", uri=uri, fix="It may have been deleted after it was listed")
    if status == 401:
        return CredentialsError(f"the credentials were not accepted ({said})", uri=uri, fix=LOGIN["gs"])
    if status == 403:
        return PermissionDeniedError(
            f"access denied ({said})", uri=uri, fix="Ask for permission, or use another identity"
        )
    if status == 412:
        return ChangedError("an object is not the expected version", uri=uri, fix="List the bucket again")
    if status in (405, 501):
        return UnsupportedError(f"the service cannot do that ({said})", uri=uri)
    return StoreError(f"the service answered {status} ({said})", uri=uri)
