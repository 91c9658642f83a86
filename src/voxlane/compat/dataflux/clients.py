"""Storage clients: voxlane's engine takes over the endpoint and the credentials of a google-cloud-storage client.

A client of another class with the same methods, such as a fake in a unit test, cannot be taken over. Its own methods
are called instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC
from typing import Any

from voxlane.errors import ConfigError, CredentialsError, MissingExtraError, PermissionDeniedError
from voxlane.store import RetryConfig, Store, StoreConfig
from voxlane.store.gcs_json import GcsJson

CREATE = "storage.objects.create"
DELETE = "storage.objects.delete"
USER_AGENT = "dataflux/1.0"


class ClientCredentials:
    """Provides tokens from the credentials of a google-cloud-storage client and refreshes them when they expire."""

    def __init__(self, credentials: Any) -> None:
        self.credentials = credentials

    def __call__(self) -> Mapping[str, Any]:
        """Return a token and the time at which it expires."""
        from google.auth.transport.requests import Request

        if not self.credentials.valid:
            self.credentials.refresh(Request())
        expiry = self.credentials.expiry
        return {"token": self.credentials.token, "expires_at": None if expiry is None else expiry.replace(tzinfo=UTC)}


def is_google_client(client: Any) -> bool:
    """Return whether the client is a google-cloud-storage client, or an instance of a subclass."""
    return any(t.__name__ == "Client" and t.__module__ == "google.cloud.storage.client" for t in type(client).__mro__)


def is_foreign_client(client: Any) -> bool:
    """Return whether the client can only be used through its own methods. Raises ConfigError for a client of another
    cloud."""
    if client is None or is_google_client(client):
        return False
    if not callable(getattr(client, "bucket", None)):
        raise ConfigError(
            f"storage_client must be a google.cloud.storage.Client, got {type(client).__module__}."
            f"{type(client).__qualname__}",
            fix="For other clouds use voxlane's own classes with a StoreConfig (docs/from-dataflux.md)",
        )
    return True


def client_config(client: Any) -> StoreConfig | None:
    """Return a StoreConfig with the client's endpoint and credentials; None without a google-cloud-storage client, so
    that the usual credentials of the environment are used."""
    if client is None or is_foreign_client(client):
        return None
    fields: dict[str, Any] = {"endpoint": client._connection.API_BASE_URL}
    credentials = client._credentials
    if credentials is None:
        raise CredentialsError("the storage client has no credentials", fix="Construct it with credentials=")
    if type(credentials).__name__ == "AnonymousCredentials":
        fields["anonymous"] = True
    else:
        fields["credential_provider"] = ClientCredentials(credentials)
    return StoreConfig(**fields)


def store_config(client: Any, retry: RetryConfig) -> StoreConfig:
    """Return a StoreConfig with the client's endpoint and credentials, and `retry`."""
    return replace(client_config(client) or StoreConfig(), retry=retry)


def new_client(project: str | None, config: StoreConfig | None = None) -> Any:
    """Return a new google-cloud-storage client, with the endpoint and credentials of `config` if it is given."""
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage
    except ImportError:
        raise MissingExtraError(
            "a storage client needs a package that is not installed", fix="Run: pip install google-cloud-storage"
        ) from None
    if config is None:
        return storage.Client(project=project)
    provider = config.credential_provider
    credentials = provider.credentials if isinstance(provider, ClientCredentials) else AnonymousCredentials()
    return storage.Client(project=project, credentials=credentials, client_options={"api_endpoint": config.endpoint})


_stores_by_client: weakref.WeakKeyDictionary[Any, dict[Any, Store]] = weakref.WeakKeyDictionary()
_default_stores: dict[Any, Store] = {}


def open_store(client: Any, bucket_name: str, retry: RetryConfig | None = None) -> Store:
    """Return the store of a bucket for a client. Later calls return the same one, which has its connections open."""
    retry = retry or RetryConfig()
    if "/" in bucket_name:
        raise ConfigError(
            f"bucket_name must be the name alone, got {bucket_name!r}",
            fix="Leave out gs://; Config(prefix=) names a folder",
        )
    new = Store(f"gs://{bucket_name}", store_config(client, retry))
    stores = _default_stores if client is None else _stores_by_client.setdefault(client, {})
    return stores.setdefault((bucket_name, retry, new.endpoint), new)


class ObjectName:
    """Stands for a Blob of google-cloud-storage where there is no client: the names of an object and its bucket."""

    client = None

    def __init__(self, name: str, bucket_name: str = "") -> None:
        self.name = name
        self.bucket = ObjectName(bucket_name) if bucket_name else None


def is_foreign_blob(blob: Any) -> bool:
    """Return whether a Blob belongs to a client that can only be used through its own methods."""
    return not isinstance(blob, ObjectName) and not is_google_client(getattr(blob, "client", None))


def locate_blob(blob: Any) -> tuple[Store, str]:
    """Return the store and the key of a Blob."""
    if is_foreign_blob(blob):
        raise ConfigError(f"expected a Blob of google-cloud-storage, got {type(blob).__qualname__}")
    return open_store(blob.client, blob.bucket.name), blob.name


def check_compose_permissions(client: Any, bucket_name: str) -> None:
    """Raise PermissionDeniedError, a PermissionError, unless the client may create and delete objects."""
    needed = [CREATE, DELETE]
    if is_foreign_client(client):
        granted = client.bucket(bucket_name).test_iam_permissions(needed)
        missing = [permission for permission in needed if permission not in granted]
    else:
        missing = GcsJson(open_store(client, bucket_name)).find_missing_permissions(needed)
    if missing:
        raise PermissionDeniedError(
            f"missing permissions for composed download: {', '.join(missing)}",
            uri=f"gs://{bucket_name}",
            fix="Grant them, or set Config(disable_compose=True)",
        )


def add_user_agent(client: Any) -> None:
    """Put Dataflux's name before the user agent of a storage client, once. None and clients without a connection stay
    as they are. Only requests that the client makes itself carry the name; those of voxlane's engine are marked
    `voxlane`."""
    connection = getattr(client, "_connection", None)
    if not connection:
        return
    if not connection._client_info:
        from google.api_core.client_info import ClientInfo

        connection._client_info = ClientInfo(user_agent=USER_AGENT)
        return
    present = connection._client_info.user_agent or ""
    if USER_AGENT not in present:
        connection._client_info.user_agent = f"{USER_AGENT} {present}".strip()


class ClientHolder:
    """Base of the classes that store checkpoints: a project and the storage client that was passed, if any."""

    def __init__(self, project_name: str | None, storage_client: Any) -> None:
        self.project_name = project_name
        self.store_config = client_config(storage_client)
        """The endpoint and credentials of the client; None for those of the environment."""
        self._client = storage_client
        add_user_agent(storage_client)

    def __getstate__(self) -> dict[str, Any]:
        # A google-cloud-storage client cannot be pickled; its endpoint and credentials can.
        return self.__dict__ if self.has_foreign_client else {**self.__dict__, "_client": None}

    @property
    def has_foreign_client(self) -> bool:
        """Whether only the client's own methods can be used."""
        return is_foreign_client(self._client)

    def require_google_client(self) -> None:
        """Raise ConfigError for a client that can only be used through its own methods."""
        if self.has_foreign_client:
            raise ConfigError(
                f"a distributed checkpoint needs a google.cloud.storage.Client, got {type(self._client).__qualname__}",
                fix="Pass such a client, or none to use the credentials of the environment",
            )

    @property
    def storage_client(self) -> Any:
        """The client that was passed. If none was, or after unpickling, it is created when it is first needed; voxlane
        itself does not need it."""
        if self._client is None:
            self._client = new_client(self.project_name, self.store_config)
            add_user_agent(self._client)
        return self._client

    def blob(self, bucket_name: str, name: str) -> Any:
        """Return the client's Blob; an ObjectName if no client was passed. Makes no request."""
        if self._client is None and self.store_config is None:
            return ObjectName(name, bucket_name)
        return self.storage_client.bucket(bucket_name).blob(name)
