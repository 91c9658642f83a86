"""How to reach a bucket: endpoint, credentials, timeouts, retries, concurrency."""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from voxlane.errors import ConfigError

MIB = 1 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """When and how long a failed request is tried again."""

    deadline_s: float = 120.0
    """No retry starts later than this after the first attempt; 0 turns retries off."""
    initial_delay_s: float = 0.1
    """Pause before the first retry; each pause is drawn between half and the whole of its nominal length."""
    multiplier: float = 2.0
    """Growth of the pause from one retry to the next."""
    max_delay_s: float = 15.0
    """Longest pause."""

    def __post_init__(self) -> None:
        _check_types(self, "retry.")
        _at_least(self, 0, "deadline_s", "initial_delay_s", "max_delay_s")
        _at_least(self, 1, "multiplier")


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How to reach a bucket. The defaults suit the public clouds; every field is optional."""

    endpoint: str | None = None
    """Server URL, for S3-compatible services and emulators. Default: STORAGE_EMULATOR_HOST for gs://,
    AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL for s3://, AZURE_STORAGE_ENDPOINT for az://, else the cloud's own."""
    region: str | None = None
    """S3 region. Default: AWS_REGION, AWS_DEFAULT_REGION, the profile's, else us-east-1."""
    anonymous: bool = False
    """Send no credentials (public buckets)."""
    profile: str | None = None
    """AWS profile of ~/.aws/credentials or ~/.aws/config. Default: AWS_PROFILE, else `default`."""
    access_key_id: str | None = None
    """S3 access key; give the secret too."""
    secret_access_key: str | None = field(default=None, repr=False)
    """S3 secret key."""
    session_token: str | None = field(default=None, repr=False)
    """S3 session token."""
    account: str | None = None
    """Azure storage account. Default: AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_ACCOUNT."""
    account_key: str | None = field(default=None, repr=False)
    """Azure account key. Default: the Azure variables, managed identity, or the Azure command line's login."""
    token: str | None = field(default=None, repr=False)
    """GCS bearer token, used as it is. Default: application default credentials."""
    service_account: str | None = None
    """Path of a GCS service-account key file. Default: application default credentials."""
    credential_provider: Callable[[], Mapping[str, Any]] | None = field(default=None, repr=False)
    """Called for fresh credentials whenever the last ones expire; returns what obstore's credential providers
    return ({"token": ..., "expires_at": ...} for GCS). Must pickle to reach spawned workers."""
    connect_timeout_s: float = 10.0
    """Longest wait for a connection."""
    read_timeout_s: float = 60.0
    """Longest silence inside a response; the whole transfer has no limit, so 100 GB objects pass."""
    retry: RetryConfig = field(default_factory=RetryConfig)
    """When and how long a failed request is tried again."""
    max_concurrency: int = 64
    """Requests in flight per process."""
    max_parts: int = 8
    """Ranges of large objects in flight per process. More cost processor time and gain nothing where one connection
    is fast (docs/log.md); raise it for few workers on a fast, distant link."""
    part_bytes: int = 8 * MIB
    """Objects larger than this are read as concurrent ranges of this size, and written as parts of it."""

    def __post_init__(self) -> None:
        _check_types(self, "")
        _at_least(self, 1, "max_concurrency", "max_parts", "part_bytes")
        if self.connect_timeout_s <= 0 or self.read_timeout_s <= 0:
            raise ConfigError("StoreConfig: a timeout must be above zero")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigError(
                "StoreConfig: access_key_id and secret_access_key go together", fix="Give both or neither"
            )
        if self.endpoint is not None and "://" not in self.endpoint:
            raise ConfigError(
                f"StoreConfig.endpoint {self.endpoint!r} has no scheme", fix=f"Write http://{self.endpoint}"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StoreConfig:
        """Build from plain data, as read from a file; an unknown field is an error that names the nearest one."""
        values = dict(values)
        if isinstance(values.get("retry"), Mapping):
            values["retry"] = _build(RetryConfig, values["retry"], "retry.")
        return _build(cls, values, "")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StoreConfig:
        """Build from the `[store]` table of a TOML file."""
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


def _build(cls: type[_T], values: Mapping[str, Any], where: str) -> _T:
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {where}{near[0]!r}?" if near else f"Fields: {', '.join(known)}"
            raise ConfigError(f"unknown store setting {where}{name!r}", fix=hint)
    return cls(**values)


def _check_types(config: Any, where: str) -> None:
    for field_ in dataclasses.fields(config):
        value, expected = getattr(config, field_.name), str(field_.type)
        if not _fits(value, expected):
            raise ConfigError(f"store setting {where}{field_.name!r} is {value!r}", fix=f"It takes {expected}")


def _fits(value: Any, expected: str) -> bool:
    """Whether a value fits a field's annotation (None, str, bool, int, float, a nested config or a callable)."""
    if isinstance(value, bool):
        return "bool" in expected
    if isinstance(value, str):
        return "str" in expected
    if isinstance(value, int):
        return "int" in expected or "float" in expected
    if isinstance(value, float):
        return "float" in expected
    if value is None:
        return "None" in expected
    return ("RetryConfig" in expected and isinstance(value, RetryConfig)) or (
        "Callable" in expected and callable(value)
    )


def _at_least(config: Any, least: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < least:
            raise ConfigError(f"{type(config).__name__}.{name} is {value}", fix=f"Give {least} or more")
