"""Buckets and storage clients for the tests of `voxlane.compat.dataflux`: real servers, and Google's own client."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import Bucket
from tests.servers import fake_gcs_server
from voxlane.testing import Emulator

with warnings.catch_warnings():
    # google.api_core warns while it is imported where grpcio is installed and grpcio-status is not.
    warnings.simplefilter("ignore", ImportWarning)
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

PROJECT_NAME, BUCKET_NAME, PREFIX = "project", "bkt", "train/"
Put = Callable[[Bucket, dict[str, bytes]], None]


@pytest.fixture(scope="session")
def fake_gcs_url() -> Iterator[str]:
    with fake_gcs_server() as url:
        yield url


def new_client(url: str, credentials: object | None = None) -> storage.Client:
    return storage.Client(
        project=PROJECT_NAME,
        credentials=credentials or AnonymousCredentials(),
        client_options={"api_endpoint": url},
    )


def close_client(client: storage.Client) -> None:
    client.close()
    with warnings.catch_warnings():
        # The library leaves the connection of a refused request open, to be closed when it is collected.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def environment(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """Point clients without arguments at the emulator, which has the empty bucket `bkt`."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.url)
    return emulator


@pytest.fixture
def client(emulator: Emulator) -> Iterator[storage.Client]:
    client = new_client(emulator.url)
    yield client
    close_client(client)


@pytest.fixture
def objects(gcs: Bucket, put: Put, environment: Emulator) -> dict[str, bytes]:
    """Return twenty objects below `train/`, in order of their names; the bucket has another one."""
    objects = {f"train/{i:02d}.bin": bytes([i]) * (i + 1) for i in range(20)}
    put(gcs, objects | {"other": b"x"})
    return objects
