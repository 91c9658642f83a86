"""From a URI and a StoreConfig to the engine's store, with credentials from each cloud's usual sources.

This is the only module of the library that reads the clouds' standard environment variables.
"""

from __future__ import annotations

import configparser
import json
import os
import shutil
import urllib.parse
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from voxlane.errors import ConfigError, CredentialsError, MissingExtraError
from voxlane.store.config import StoreConfig
from voxlane.store.native import obstore
from voxlane.uri import Uri

_EMULATOR_TOKEN = "emulator"
"""Token for GCS emulators; without a token the engine would ask the metadata server before each write."""


def open_native(uri: Uri, config: StoreConfig, *, engine_retries: bool = False) -> Any:
    """Return the engine's store for the bucket of `uri`. No request is made. With `engine_retries` the engine itself
    retries, uncounted. Multipart uploads need it, because their parts cannot be sent again from here."""
    store = obstore().store
    if uri.scheme == "file":
        return store.LocalStore("/", mkdir=True)
    if uri.scheme == "memory":
        return _memory(uri.bucket)
    if uri.scheme == "gs":
        kind, options = store.GCSStore, _gcs_options(config)
    elif uri.scheme == "s3":
        kind, options = store.S3Store, _s3_options(config)
    else:
        kind, options = store.AzureStore, _azure_options(uri.bucket, config)
    if config.anonymous:
        options["skip_signature"] = True
    endpoint = options.get("endpoint") or options.get("base_url")
    return kind(uri.bucket, **options, **_client_options(config, endpoint, engine_retries))


def resolve_endpoint(uri: Uri, config: StoreConfig) -> str | None:
    """Return the URL of the server for `uri` if config or environment choose one (on Azure also the account's own);
    None for a cloud's default server or a local store."""
    if uri.scheme == "gs":
        return gcs_endpoint(config)
    if uri.scheme == "s3":
        return _resolve_s3(config)[0]
    if uri.scheme == "az":
        endpoint, account, _ = azure_account(uri.bucket, config)
        return endpoint or f"https://{account}.blob.core.windows.net"
    return None


def gcs_endpoint(config: StoreConfig) -> str | None:
    """Return the URL of the GCS server, or None for Google's own."""
    endpoint = config.endpoint or os.environ.get("STORAGE_EMULATOR_HOST")
    if endpoint and "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    return endpoint.rstrip("/") if endpoint else None


def gcs_bearer_token(config: StoreConfig) -> str | None:
    """Return the configured token, or the one for emulators; None means application default credentials."""
    if config.token:
        return config.token
    endpoint = gcs_endpoint(config)
    is_google = f".{urllib.parse.urlsplit(endpoint or '').hostname}".endswith(".googleapis.com")
    is_emulator = endpoint and not (config.service_account or config.credential_provider or is_google)
    return _EMULATOR_TOKEN if is_emulator else None


def _gcs_options(config: StoreConfig) -> dict[str, Any]:
    endpoint = gcs_endpoint(config)
    options: dict[str, Any] = {"base_url": endpoint} if endpoint else {}
    # Credentials are needed also with skip_signature: the engine's writes ignore that flag and would search for some.
    if config.credential_provider:
        return {**options, "credential_provider": config.credential_provider}
    if token := gcs_bearer_token(config):
        return {**options, "bearer_token": token}
    if config.anonymous:
        return options
    kind = _google_credential_kind(config.service_account or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"))
    if config.service_account:
        return {**options, "service_account": config.service_account}
    if kind in (None, "service_account", "authorized_user"):
        return options
    # Only Google's own library supports workload identity federation and impersonation.
    try:
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError:
        raise MissingExtraError.of("gcs", f"a Google credential of type {kind!r}") from None
    return {**options, "credential_provider": GoogleCredentialProvider()}


def _google_credential_kind(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            kind = json.load(file).get("type")
    except OSError as error:
        raise CredentialsError(
            f"cannot read the Google credentials file: {error.strerror}",
            uri=path,
            fix="Correct GOOGLE_APPLICATION_CREDENTIALS or StoreConfig.service_account",
        ) from None
    except (ValueError, AttributeError):
        raise CredentialsError(
            "not a Google credentials file (JSON)", uri=path, fix="Download the key again, or unset the variable"
        ) from None
    return str(kind) if kind else None


def _resolve_s3(config: StoreConfig) -> tuple[str | None, str, str | None, Mapping[str, str]]:
    """Return the endpoint (None for Amazon's own), the region, and the profile's name (None if none is chosen) and
    settings."""
    profile_name = config.profile or _read_environment("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
    profile = _read_aws_profile(profile_name)
    endpoint = config.endpoint or _read_environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = endpoint or profile.get("endpoint_url")
    region = config.region or _read_environment("AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region")
    return endpoint.rstrip("/") if endpoint else None, region or "us-east-1", profile_name, profile


def s3_endpoint(config: StoreConfig) -> tuple[str | None, str]:
    """Return the URL of the S3 server, or None for Amazon's own, and the region."""
    return _resolve_s3(config)[:2]


def s3_session(config: StoreConfig) -> Any:
    """Return a boto3 session with the engine's credentials."""
    try:
        import boto3
    except ImportError:
        raise MissingExtraError.of("s3", "a request on S3 that the byte engine cannot send") from None
    _, region, profile_name, _ = _resolve_s3(config)
    return boto3.Session(
        profile_name=profile_name,
        region_name=region,
        aws_access_key_id=config.access_key_id,
        aws_secret_access_key=config.secret_access_key,
        aws_session_token=config.session_token,
    )


def s3_client(config: StoreConfig) -> Any:
    """Return a boto3 client, with the engine's credentials, for requests that the engine lacks."""
    session, (endpoint, _) = s3_session(config), s3_endpoint(config)
    import botocore
    from botocore.config import Config

    options = Config(
        s3={"addressing_style": "path"} if endpoint else {},
        connect_timeout=config.connect_timeout_s,
        signature_version=botocore.UNSIGNED if config.anonymous else None,
    )
    return session.client("s3", endpoint_url=endpoint, config=options)


def _s3_options(config: StoreConfig) -> dict[str, Any]:
    endpoint, region, profile_name, profile = _resolve_s3(config)
    options: dict[str, Any] = {"region": region} | ({"endpoint": endpoint} if endpoint else {})
    if config.anonymous:
        return options
    if config.credential_provider:
        options["credential_provider"] = config.credential_provider
    elif config.access_key_id:
        options |= _s3_keys(config.access_key_id, config.secret_access_key, config.session_token)
    elif config.profile or "AWS_ACCESS_KEY_ID" not in os.environ:
        options |= _aws_profile_credentials(profile_name, profile)
    return options


def _s3_keys(access_key_id: str, secret_access_key: str | None, session_token: str | None) -> dict[str, Any]:
    keys = {"access_key_id": access_key_id, "secret_access_key": secret_access_key}
    return keys | ({"session_token": session_token} if session_token else {})


def _read_aws_profile(name: str | None) -> Mapping[str, str]:
    """Return the merged settings of a profile; empty if `name` is None and there is no default profile."""
    config_file = os.path.expanduser(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"))
    secrets_file = os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    profile = name or "default"
    merged: dict[str, str] = {}
    for path, section in (
        (config_file, "default" if profile == "default" else f"profile {profile}"),
        (secrets_file, profile),
    ):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(path, encoding="utf-8")
        except configparser.Error as error:
            raise ConfigError(f"cannot parse: {error}", uri=path, fix="Correct the file") from None
        if parser.has_section(section):
            merged |= dict(parser.items(section))
    if name and not merged:
        raise CredentialsError(
            f"no AWS profile {name!r}", fix=f"Add it to {secrets_file}, or choose another AWS_PROFILE"
        )
    return merged


def _aws_profile_credentials(name: str | None, profile: Mapping[str, str]) -> dict[str, Any]:
    if "aws_access_key_id" in profile and "aws_secret_access_key" in profile:
        token = profile.get("aws_session_token")
        return _s3_keys(profile["aws_access_key_id"], profile["aws_secret_access_key"], token)
    if any(k.startswith("sso_") or k in ("role_arn", "credential_process") for k in profile):
        try:
            import boto3
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            raise MissingExtraError.of(
                "s3", f"the AWS profile {name or 'default'!r} (SSO or an assumed role)"
            ) from None
        return {"credential_provider": Boto3CredentialProvider(boto3.Session(profile_name=name))}
    return {}  # the engine itself finds web identity, container and instance credentials


def azure_account(container: str, config: StoreConfig) -> tuple[str | None, str, str | None]:
    """Return the endpoint (None for Azure's own), the account, and the account key or None."""
    account = config.account or _read_environment("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    if not account:
        raise CredentialsError(
            "no Azure storage account is set", uri=f"az://{container}", fix="Set AZURE_STORAGE_ACCOUNT_NAME"
        )
    endpoint = config.endpoint or _read_environment("AZURE_STORAGE_ENDPOINT")
    return endpoint, account, config.account_key or _read_environment("AZURE_STORAGE_KEY")


def azure_container(container: str, config: StoreConfig) -> Any:
    """Return a container client of Azure's own library, a context manager, for requests that the engine lacks."""
    try:
        from azure.storage.blob import ContainerClient
    except ImportError:
        raise MissingExtraError.of("azure", "listing unfinished uploads on Azure") from None
    endpoint, account, key = azure_account(container, config)
    if key is None:
        raise CredentialsError(
            "listing unfinished uploads on Azure needs the account's key",
            uri=f"az://{container}",
            fix="Set AZURE_STORAGE_KEY; otherwise Azure drops them after a week",
        )
    return ContainerClient(endpoint or f"https://{account}.blob.core.windows.net", container, credential=key)


def _azure_options(container: str, config: StoreConfig) -> dict[str, Any]:
    endpoint, account, key = azure_account(container, config)
    options: dict[str, Any] = {"account_name": account} | ({"endpoint": endpoint.rstrip("/")} if endpoint else {})
    if config.anonymous:
        return options
    if config.credential_provider:
        options["credential_provider"] = config.credential_provider
    elif key:
        options["account_key"] = key
    elif not any(name.startswith(("AZURE_CLIENT_", "AZURE_FEDERATED_", "AZURE_STORAGE_S")) for name in os.environ):
        options["use_azure_cli"] = shutil.which("az") is not None
    return options


def _read_environment(*names: str) -> str | None:
    """Return the first of these variables that is set and not empty."""
    return next((value for name in names if (value := os.environ.get(name))), None)


_memory_stores: dict[str, tuple[int, Any]] = {}


def _memory(name: str) -> Any:
    """Return the in-memory store of that name, which exists only in this process."""
    pid, store = _memory_stores.setdefault(name, (os.getpid(), obstore().store.MemoryStore()))
    if pid != os.getpid():
        raise ConfigError(
            "an in-memory store cannot leave its process", uri=f"memory://{name}/", fix="Use file:// or the emulator"
        )
    return store


def _client_options(config: StoreConfig, endpoint: str | None, engine_retries: bool) -> dict[str, Any]:
    retry = config.retry
    engine_retry = {
        "max_retries": 20,
        "retry_timeout": timedelta(seconds=retry.deadline_s),
        "backoff": {
            "init_backoff": timedelta(seconds=retry.initial_delay_s),
            "max_backoff": timedelta(seconds=retry.max_delay_s),
            "base": retry.multiplier,
        },
    }
    return {
        "client_options": {
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
            "connect_timeout": timedelta(seconds=config.connect_timeout_s),
            "read_timeout": timedelta(seconds=config.read_timeout_s),
            "timeout": timedelta(days=1),  # for a complete request; read_timeout limits silence
            "user_agent": "voxlane",
        },
        # Store.call retries, so that retries are counted and follow RetryConfig.
        "retry_config": engine_retry if engine_retries and retry.deadline_s else {"max_retries": 0},
    }
