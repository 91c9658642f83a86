"""The real clients, pointed at the session's emulator (tests/conftest.py)."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from google.auth.credentials import AnonymousCredentials
from obstore.store import GCSStore, S3Store

from tests.servers import fake_gcs_server
from voxlane.testing import Emulator

with warnings.catch_warnings():
    # google.api_core warns while it is imported where grpcio is installed and grpcio-status is not.
    warnings.simplefilter("ignore", ImportWarning)
    from google.cloud import storage

BUCKET = "bkt"
pytest.register_assert_rewrite("tests.testing.conformance")


@pytest.fixture
def s3(emulator: Emulator) -> Iterator[Any]:
    client = boto3.client(
        "s3",
        endpoint_url=emulator.url,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )
    yield client
    client.close()


@pytest.fixture(scope="session")
def fake_gcs_url() -> Iterator[str]:
    with fake_gcs_server() as url:
        yield url


@pytest.fixture
def gcs(emulator: Emulator) -> Iterator[storage.Client]:
    client = gcs_client(emulator.url)
    yield client
    close_gcs(client)


def close_gcs(client: storage.Client) -> None:
    client.close()
    with warnings.catch_warnings():
        # The library forgets to close the connection of a download that was refused; collected here, it does
        # not fail whichever test happens to run when the collector does.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def gcs_client(url: str) -> storage.Client:
    return storage.Client(project="test", credentials=AnonymousCredentials(), client_options={"api_endpoint": url})


def s3_store(emulator: Emulator, **more: Any) -> S3Store:
    options: dict[str, Any] = {"access_key_id": "key", "secret_access_key": "secret"}
    return S3Store(
        BUCKET,
        endpoint=emulator.url,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        **(options | more),
    )


def gcs_store(emulator: Emulator, **more: Any) -> GCSStore:
    return GCSStore(
        BUCKET,
        base_url=emulator.url,
        client_options={"allow_http": True},
        **({"bearer_token": "fake"} | more),
    )


@pytest.fixture(params=["s3", "gcs"])
def store(request: pytest.FixtureRequest, emulator: Emulator) -> S3Store | GCSStore:
    """An obstore store, once for each XML dialect."""
    return s3_store(emulator) if request.param == "s3" else gcs_store(emulator)
