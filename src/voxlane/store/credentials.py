"""From a URI and a StoreConfig to the engine's store, with credentials from where each cloud's users keep them.

The one place of the library that reads the clouds' standard environment variables.
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

EMULATOR_TOKEN = "emulator"
"""What a GCS emulator is sent; without any token the engine would ask the metadata server before each write."""


def open_native(uri: Uri, config: StoreConfig, *, engine_retries: bool = False) -> Any:
    """The engine's store for the bucket of `uri`. No request is made.

    With `engine_retries` the engine itself retries, uncounted: for multipart uploads, whose parts we cannot repeat.
    """
    if uri.scheme == "gs":
        return _gcs(uri.bucket, config, engine_retries)
    if uri.scheme == "s3":
        return _s3(uri.bucket, config, engine_retries)
    if uri.scheme == "az":
        return _azure(uri.bucket, config, engine_retries)
    if uri.scheme == "file":
        return obstore().store.LocalStore("/", mkdir=True)
    return _memory(uri.bucket)


def endpoint_of(uri: Uri, config: StoreConfig) -> str | None:
    """The server of the bucket of `uri` where one was chosen, or the account's; None: the cloud's own, or a disk."""
    if uri.scheme == "gs":
        return gcs_endpoint(config)
    if uri.scheme == "s3":
        endpoint = _s3_place(config, _aws_profile(_aws_profile_name(config)))[0]
        return endpoint.rstrip("/") if endpoint else None
    if uri.scheme == "az":
        endpoint, account, _ = _azure_place(uri.bucket, config)
        return endpoint or f"https://{account}.blob.core.windows.net"
    return None


def gcs_endpoint(config: StoreConfig) -> str | None:
    """The GCS server to talk to, or None for Google's own."""
    endpoint = config.endpoint or os.environ.get("STORAGE_EMULATOR_HOST")
    if endpoint and "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    return endpoint.rstrip("/") if endpoint else None


def gcs_bearer_token(config: StoreConfig) -> str | None:
    """A token given outright, or the one for emulators; None means application default credentials."""
    if config.token:
        return config.token
    endpoint = gcs_endpoint(config)
    if endpoint and not (config.service_account or config.credential_provider or _is_google(endpoint)):
        return EMULATOR_TOKEN
    return None


def _gcs(bucket: str, config: StoreConfig, engine_retries: bool) -> Any:
    store = obstore().store
    options: dict[str, Any] = {}
    endpoint = gcs_endpoint(config)
    if endpoint:
        options["base_url"] = endpoint
    token = gcs_bearer_token(config)
    if config.anonymous:
        options["skip_signature"] = True
    if config.credential_provider:
        options["credential_provider"] = config.credential_provider
    elif token:
        # Together with skip_signature: the engine's writes ignore that flag and would go looking for credentials.
        options["bearer_token"] = token
    elif not config.anonymous:
        key_file = config.service_account or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        kind = _google_credential_kind(key_file)
        if config.service_account:
            options["service_account"] = config.service_account
        elif kind not in (None, "service_account", "authorized_user"):
            # Workload identity federation and impersonation: only Google's own library speaks them.
            try:
                from obstore.auth.google import GoogleCredentialProvider
            except ImportError:
                raise MissingExtraError.of("gcs", f"a Google credential of type {kind!r}") from None
            options["credential_provider"] = GoogleCredentialProvider()
    return store.GCSStore(bucket, **options, **_client(config, endpoint, engine_retries))


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


def _s3_place(config: StoreConfig, profile: Mapping[str, str]) -> tuple[str | None, str]:
    """Endpoint (None for Amazon's own) and region."""
    environment = os.environ
    endpoint = (
        config.endpoint
        or environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or profile.get("endpoint_url")
    )
    region = config.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return endpoint, region or profile.get("region") or "us-east-1"


def _aws_profile_name(config: StoreConfig) -> str | None:
    return config.profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")


def s3_client(config: StoreConfig) -> Any:
    """A boto3 client for what the engine cannot ask of S3; credentials as the engine's."""
    try:
        import boto3
        import botocore
        from botocore.config import Config
    except ImportError:
        raise MissingExtraError.of("s3", "listing unfinished uploads on S3") from None
    profile_name = _aws_profile_name(config)
    endpoint, region = _s3_place(config, _aws_profile(profile_name))
    style = {"addressing_style": "path"} if endpoint else {}
    options: dict[str, Any] = {"s3": style, "connect_timeout": config.connect_timeout_s}
    if config.anonymous:
        options["signature_version"] = botocore.UNSIGNED
    keys: dict[str, Any] = {
        "aws_access_key_id": config.access_key_id,
        "aws_secret_access_key": config.secret_access_key,
        "aws_session_token": config.session_token,
    }
    session = boto3.Session(profile_name=profile_name, region_name=region, **keys)
    return session.client("s3", endpoint_url=endpoint, config=Config(**options))


def _s3(bucket: str, config: StoreConfig, engine_retries: bool) -> Any:
    store = obstore().store
    environment = os.environ
    profile_name = _aws_profile_name(config)
    profile = _aws_profile(profile_name)
    endpoint, region = _s3_place(config, profile)
    options: dict[str, Any] = {"region": region}
    if endpoint:
        options["endpoint"] = endpoint.rstrip("/")
    if config.anonymous:
        options["skip_signature"] = True
    elif config.credential_provider:
        options["credential_provider"] = config.credential_provider
    elif config.access_key_id:
        options["access_key_id"] = config.access_key_id
        options["secret_access_key"] = config.secret_access_key
        if config.session_token:
            options["session_token"] = config.session_token
    elif config.profile or "AWS_ACCESS_KEY_ID" not in environment:
        options |= _aws_profile_credentials(profile_name, profile)
    return store.S3Store(bucket, **options, **_client(config, endpoint, engine_retries))


def _aws_profile(name: str | None) -> Mapping[str, str]:
    """The merged settings of one profile; empty when no files name it and it was not asked for."""
    config_file = os.path.expanduser(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"))
    secrets_file = os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    wanted = name or "default"
    merged: dict[str, str] = {}
    for path, section in (
        (config_file, "default" if wanted == "default" else f"profile {wanted}"),
        (secrets_file, wanted),
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
        keys = {
            "access_key_id": profile["aws_access_key_id"],
            "secret_access_key": profile["aws_secret_access_key"],
        }
        if "aws_session_token" in profile:
            keys["session_token"] = profile["aws_session_token"]
        return keys
    if any(k.startswith("sso_") or k in ("role_arn", "credential_process") for k in profile):
        try:
            import boto3
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            raise MissingExtraError.of(
                "s3", f"the AWS profile {name or 'default'!r} (SSO or an assumed role)"
            ) from None
        return {"credential_provider": Boto3CredentialProvider(boto3.Session(profile_name=name))}
    return {}  # web identity, container and instance credentials: the engine finds them itself


def _azure_place(container: str, config: StoreConfig) -> tuple[str | None, str, str | None]:
    """Endpoint (None for Azure's own), account and account key, where there is one."""
    environment = os.environ
    account = (
        config.account or environment.get("AZURE_STORAGE_ACCOUNT_NAME") or environment.get("AZURE_STORAGE_ACCOUNT")
    )
    if not account:
        raise CredentialsError(
            "no Azure storage account is named", uri=f"az://{container}", fix="Set AZURE_STORAGE_ACCOUNT_NAME"
        )
    endpoint = config.endpoint or environment.get("AZURE_STORAGE_ENDPOINT")
    return endpoint, account, config.account_key or environment.get("AZURE_STORAGE_KEY")


def azure_container(container: str, config: StoreConfig) -> Any:
    """A client of Azure's own library for what the engine cannot ask; a context manager."""
    try:
        from azure.storage.blob import ContainerClient
    except ImportError:
        raise MissingExtraError.of("azure", "listing unfinished uploads on Azure") from None
    endpoint, account, key = _azure_place(container, config)
    if key is None:
        raise CredentialsError(
            "listing unfinished uploads on Azure needs the account's key",
            uri=f"az://{container}",
            fix="Set AZURE_STORAGE_KEY; without it, Azure drops them by itself after a week",
        )
    return ContainerClient(endpoint or f"https://{account}.blob.core.windows.net", container, credential=key)


def _azure(container: str, config: StoreConfig, engine_retries: bool) -> Any:
    store = obstore().store
    environment = os.environ
    endpoint, account, key = _azure_place(container, config)
    options: dict[str, Any] = {"account_name": account}
    if endpoint:
        options["endpoint"] = endpoint.rstrip("/")
    if config.anonymous:
        options["skip_signature"] = True
    elif config.credential_provider:
        options["credential_provider"] = config.credential_provider
    elif key:
        options["account_key"] = key
    elif not any(name.startswith(("AZURE_CLIENT_", "AZURE_FEDERATED_", "AZURE_STORAGE_S")) for name in environment):
        options["use_azure_cli"] = shutil.which("az") is not None
    return store.AzureStore(container, **options, **_client(config, endpoint, engine_retries))


_memory_stores: dict[str, tuple[int, Any]] = {}


def _memory(name: str) -> Any:
    """The process's in-memory store of that name; it is gone with the process and is not seen by others."""
    pid, store = _memory_stores.setdefault(name, (os.getpid(), obstore().store.MemoryStore()))
    if pid != os.getpid():
        raise ConfigError(
            "an in-memory store cannot leave its process", uri=f"memory://{name}/", fix="Use file:// or the emulator"
        )
    return store


def _client(config: StoreConfig, endpoint: str | None, engine_retries: bool) -> dict[str, Any]:
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
            "timeout": timedelta(days=1),  # of a whole request; silence is what read_timeout catches
            "user_agent": "voxlane",
        },
        # Retries are ours, so that they are counted and follow RetryConfig.
        "retry_config": engine_retry if engine_retries and retry.deadline_s else {"max_retries": 0},
    }


def _is_google(endpoint: str) -> bool:
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    return host == "googleapis.com" or host.endswith(".googleapis.com")
