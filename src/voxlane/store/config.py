"""How to reach a bucket: endpoint, credentials, timeouts, retries, concurrency."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from voxlane.errors import ConfigError
from voxlane.redaction import redact_urls
from voxlane.settings import build, record
from voxlane.uri import StrPath

# Strict: a quoted number or a yes/no in a config file is a mistake, not a value to convert.
_Seconds = Annotated[float, Field(ge=0, strict=True)]
_Timeout = Annotated[float, Field(gt=0, strict=True)]
_Count = Annotated[int, Field(ge=1, strict=True)]


@record
class RetryConfig:
    """When and for how long a failed request is retried."""

    deadline_s: _Seconds = 120.0
    """No retry starts later than this after the first attempt; 0 turns retries off."""
    initial_delay_s: _Seconds = 0.1
    """Pause before the first retry; each pause is drawn between half and all of its nominal length."""
    multiplier: Annotated[float, Field(ge=1, strict=True)] = 2.0
    """Factor by which the pause grows from one retry to the next."""
    max_delay_s: _Seconds = 15.0
    """Longest pause between two attempts, in seconds."""


@record
class StoreConfig:
    """How to reach a bucket. The defaults suit the public clouds; every field is optional."""

    endpoint: str | None = None
    """Server URL, for S3-compatible services and emulators. Default: STORAGE_EMULATOR_HOST for gs://,
    AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL for s3://, AZURE_STORAGE_ENDPOINT for az://, else the cloud's own."""
    region: str | None = None
    """S3 region. Default: AWS_REGION, AWS_DEFAULT_REGION, the profile's, else us-east-1."""
    anonymous: StrictBool = False
    """Send no credentials (public buckets)."""
    profile: str | None = None
    """AWS profile of ~/.aws/credentials or ~/.aws/config. Default: AWS_PROFILE, else `default`."""
    access_key_id: str | None = None
    """S3 access key; requires the secret key."""
    secret_access_key: str | None = field(default=None, repr=False)
    """S3 secret key."""
    session_token: str | None = field(default=None, repr=False)
    """S3 session token."""
    account: str | None = None
    """Azure storage account. Default: AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_ACCOUNT."""
    account_key: str | None = field(default=None, repr=False)
    """Azure account key. Default: the Azure variables, managed identity, or the Azure command line's login."""
    token: str | None = field(default=None, repr=False)
    """GCS bearer token, never refreshed. Default: application default credentials."""
    service_account: str | None = None
    """Path of a GCS service-account key file. Default: application default credentials."""
    credential_provider: Callable[[], Mapping[str, Any]] | None = field(default=None, repr=False)
    """Function that returns fresh credentials whenever the last ones expire, in the form of obstore's credential
    providers ({"token": ..., "expires_at": ...} for GCS). Must be picklable to reach spawned workers."""
    connect_timeout_s: _Timeout = 10.0
    """Longest wait for a connection."""
    read_timeout_s: _Timeout = 30.0
    """Longest silence before or within a response; a complete transfer has no limit, so 100 GB objects are possible."""
    min_bytes_per_s: Annotated[float, Field(ge=0, strict=True)] = 1000.0
    """A response that is slower than this for `read_timeout_s` is requested again; 0 turns this off."""
    verify: Literal["all", "crc", "off"] = "all"
    """Which checksums of the service the bytes of whole objects are compared with: all that it sends, only the fast
    ones (CRC-32C, CRC-64/NVME and CRC-32, not MD5 and SHA), or none. Checksums of our own are always compared."""
    retry: RetryConfig = field(default_factory=RetryConfig)
    """When and for how long a failed request is retried."""
    max_concurrency: _Count = 64
    """Maximum number of requests in flight per process."""
    max_parts: _Count = 8
    """Maximum number of ranges of large objects in flight per process. More cost processor time and gain nothing if one
    connection is fast (docs/log.md); raise it for few workers on a fast, distant link."""
    part_bytes: _Count = 8 << 20
    """Larger objects are read as concurrent ranges of this size and written as parts of this size."""

    def __post_init__(self) -> None:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigError("access_key_id and secret_access_key belong together", fix="Set both or neither")
        if self.endpoint is not None and "://" not in self.endpoint:
            url = redact_urls(f"http://{self.endpoint}")
            raise ConfigError(f"endpoint {url.removeprefix('http://')!r} has no scheme", fix=f"Write {url}")

    def __repr__(self) -> str:
        shown = (f for f in fields(self) if f.repr)
        return redact_urls(f"StoreConfig({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StoreConfig:
        """Build a config from plain data, as read from a file; errors for unknown fields suggest a similar one."""
        return build(_StoreTable, {"store": dict(values)}).store

    @classmethod
    def load(cls, path: StrPath) -> StoreConfig:
        """Build a config from the `[store]` table of a TOML file."""
        try:
            with open(path, "rb") as file:
                document = tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"cannot read the config file: {error.strerror}", uri=os.fspath(path)) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"not valid TOML: {error}", uri=os.fspath(path)) from None
        if set(document) != {"store"} or not isinstance(document["store"], dict):
            names = ", ".join(map(repr, document)) or "nothing"
            raise ConfigError(
                f"the file holds {names}", uri=os.fspath(path), fix="Put the settings in one table named [store]"
            )
        return cls.from_dict(document["store"])


@record
class _StoreTable:
    """The part of a config file that holds a StoreConfig, so that errors name its fields as the file does."""

    store: StoreConfig
