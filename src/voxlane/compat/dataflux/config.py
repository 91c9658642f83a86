"""Dataflux's Config and storage clients, translated to voxlane's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from voxlane.store import RetryConfig, StoreConfig


@dataclass
class Config:
    """Dataflux's settings.

    Listing is always parallel and sorted, downloads are always concurrent and composed download follows voxlane's
    measurements, so `sort_listing_results`, `num_processes`, `threads_per_process` and `max_listing_retries` are
    accepted and ignored.
    """

    sort_listing_results: bool = False
    max_composite_object_size: int = 100_000_000
    """Maximum size of a joined object in bytes; 0 disables composed download."""
    num_processes: int | None = os.cpu_count()
    prefix: str | None = None
    max_listing_retries: int = 3
    threads_per_process: int = 1
    disable_compose: bool = False
    list_retry_config: Any = None
    """A google.api_core Retry, used if `download_retry_config` is not set."""
    download_retry_config: Any = None
    """A google.api_core Retry, also used for listing."""

    def __post_init__(self) -> None:
        if self.disable_compose:
            self.max_composite_object_size = 0


class ClientCredentials:
    """Provides tokens from the credentials of a google-cloud-storage client and refreshes them when they expire."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> Mapping[str, Any]:
        """Return a token and the time at which it expires."""
        from google.auth.transport.requests import Request

        if not self._credentials.valid:
            self._credentials.refresh(Request())
        expiry = self._credentials.expiry
        return {"token": self._credentials.token, "expires_at": None if expiry is None else expiry.replace(tzinfo=UTC)}


def client_config(storage_client: Any) -> StoreConfig | None:
    """Return a StoreConfig with the storage client's endpoint and credentials, or None without a client."""
    return store_config(Config(), storage_client) if storage_client is not None else None


def store_config(config: Config, storage_client: Any) -> StoreConfig:
    """Return a StoreConfig with the storage client's endpoint and credentials and the config's retries."""
    fields: dict[str, Any] = {}
    retry = config.download_retry_config or config.list_retry_config
    if retry is not None:
        deadline_s = getattr(retry, "_timeout", None) or getattr(retry, "_deadline", None)
        fields["retry"] = RetryConfig(
            deadline_s=deadline_s or RetryConfig().deadline_s,
            initial_delay_s=retry._initial,
            multiplier=max(1.0, retry._multiplier),
            max_delay_s=retry._maximum,
        )
    if storage_client is not None:
        endpoint = storage_client._connection.API_BASE_URL
        if endpoint and not endpoint.endswith("storage.googleapis.com"):
            fields["endpoint"] = endpoint
        credentials = storage_client._credentials
        if type(credentials).__name__ == "AnonymousCredentials":
            fields["anonymous"] = True
        elif credentials is not None:
            fields["credential_provider"] = ClientCredentials(credentials)
    return StoreConfig(**fields)
