"""The parts of GCS's JSON API that the byte engine lacks: compose, permissions, listing with generations."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

from voxlane import uri as uris
from voxlane.errors import CredentialsError, MissingExtraError, PermissionDeniedError, UnsupportedError
from voxlane.store.bucket import LIST_PAGE_KEYS, Store
from voxlane.store.credentials import gcs_bearer_token, gcs_endpoint
from voxlane.store.translate import LOGIN_HINTS, TransientError, translate_response

COMPOSED_PREFIX = "voxlane-composed/"
"""Prefix of joined objects, which exist only while a composed download runs."""
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


class GcsJson:
    """JSON requests to one bucket, with the store's retries and counters. Each thread has one connection."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._local = threading.local()
        self._credentials: Any = None
        self._credentials_lock = threading.Lock()

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
        needed = ["storage.objects.get", "storage.objects.create", "storage.objects.delete"]
        query = urllib.parse.urlencode([("permissions", p) for p in needed])
        path = f"/storage/v1/b/{uris.quote(self._store.bucket)}/iam/testPermissions?{query}"
        try:
            response = json.loads(self.send("head", "GET", path))
        except UnsupportedError:
            return  # an emulator without IAM: the first join fails if it is not permitted
        missing = sorted(set(needed) - set(response.get("permissions", [])))
        if missing:
            raise PermissionDeniedError(
                f"composed download needs permissions that these credentials lack: {', '.join(missing)}",
                uri=self._store.root,
                fix='Ask for them, or pass compose="off"',
            )

    def pages(self, prefix: str, start_after: str | None) -> Iterator[Any]:
        """Yield Arrow batches (key, size, etag, version) of the keys that start with `prefix`, in order, with the
        generation as version. The etag is the one that the engine's reads report; joined objects have none."""
        import pyarrow as pa  # slow to import, and only listing with generations needs it

        query = {
            "prefix": prefix,
            "maxResults": str(LIST_PAGE_KEYS),
            "fields": "nextPageToken,items(name,size,generation,md5Hash)",
        }
        if start_after is not None:
            query["startOffset"] = start_after
        while True:
            path = f"/storage/v1/b/{uris.quote(self._store.bucket)}/o?{urllib.parse.urlencode(query)}"
            response = json.loads(self.send("list", "GET", path, prefix))
            items = [i for i in response.get("items", []) if i["name"] != start_after]  # startOffset is inclusive
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
            if "nextPageToken" not in response:
                return
            query["pageToken"] = response["nextPageToken"]

    def send(self, kind: str, method: str, path: str, key: str = "", body: Any = None) -> bytes:
        """Send one request of the JSON or XML API, retried and counted as `kind`; return the body of the response."""
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
                raise TransientError(f"the connection failed ({error})", uri) from None
            if response.status >= 300:
                raise translate_response(response.status, text, uri)
            return text

        return self._store.call(kind, uri, attempt)

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            endpoint = urllib.parse.urlsplit(gcs_endpoint(self._store.config) or "https://storage.googleapis.com")
            kind = _Http if endpoint.scheme == "http" else _Https
            connection = self._local.connection = kind(endpoint.netloc, timeout=self._store.config.read_timeout_s)
        return connection

    def _authorization(self, uri: str) -> dict[str, str]:
        config = self._store.config
        token = gcs_bearer_token(config)
        if config.credential_provider is not None:
            token = config.credential_provider()["token"]
        elif token is None and not config.anonymous:
            token = self._refresh_token(uri)
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _refresh_token(self, uri: str) -> str:
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
                raise CredentialsError(f"no usable credentials: {error}", uri=uri, fix=LOGIN_HINTS["gs"]) from None
            return str(self._credentials.token)


class _Http(http.client.HTTPConnection):
    """A connection that closes itself when its thread ends."""

    def __del__(self) -> None:
        self.close()


class _Https(http.client.HTTPSConnection):
    """A TLS connection that closes itself when its thread ends."""

    def __del__(self) -> None:
        self.close()


def _etag(md5_base64: str | None) -> str | None:
    return None if md5_base64 is None else f'"{base64.b64decode(md5_base64).hex()}"'
