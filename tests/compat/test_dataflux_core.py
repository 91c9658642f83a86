"""`dataflux_core`, Dataflux's client library: listing, downloads, composing, the user agent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core.retry import Retry
from google.cloud import storage

from tests.conftest import Bucket
from voxlane import errors
from voxlane.compat.dataflux import dataflux_core
from voxlane.compat.dataflux.dataflux_core import download, fast_list, user_agent
from voxlane.testing import Emulator

from .conftest import BUCKET_NAME, PREFIX, PROJECT_NAME, Put, close_client, new_client

PARAMS = download.DataFluxDownloadOptimizationParams(max_composite_object_size=100_000_000)
DOWNLOADS = [
    download.dataflux_download,
    download.dataflux_download_lazy,
    download.dataflux_download_threaded,
    download.dataflux_download_parallel,
]


def test_positional_orders_are_those_of_dataflux() -> None:
    listing = list(inspect.signature(fast_list.ListingController).parameters)
    assert listing == [
        "max_parallelism", "project", "bucket", "sort_results", "skip_compose", "prefix", "allowed_storage_classes",
        "retry_config",
    ]  # fmt: skip
    extras = ["threading_enabled", "threading_enabled", "threads", "parallelization"]
    for call, extra in zip(DOWNLOADS, extras, strict=True):
        assert list(inspect.signature(call).parameters) == [
            "project_name", "bucket_name", "objects", "storage_client", "dataflux_download_optimization_params", extra,
            "retry_config",
        ]  # fmt: skip
    assert list(inspect.signature(download.download_single).parameters)[:3] == [
        "storage_client", "bucket_name", "object_name",
    ]  # fmt: skip


@pytest.mark.parametrize("max_parallelism", [1, 4])
def test_listing(objects: dict[str, bytes], max_parallelism: int) -> None:
    controller = dataflux_core.fast_list.ListingController(
        max_parallelism=max_parallelism, project=PROJECT_NAME, bucket=BUCKET_NAME, sort_results=True, prefix=PREFIX
    )
    assert controller.run() == [(name, len(body)) for name, body in objects.items()]


def test_listing_with_a_client(objects: dict[str, bytes], client: storage.Client, emulator: Emulator) -> None:
    controller = fast_list.ListingController(4, PROJECT_NAME, BUCKET_NAME)
    controller.client = client
    assert len(controller.run()) == 21


def test_objects_that_are_left_out_are_counted(
    gcs: Bucket, environment: Emulator, client: storage.Client, caplog: pytest.LogCaptureFixture
) -> None:
    for name, storage_class in {"a": "STANDARD", "b": "NEARLINE", "c": "COLDLINE"}.items():
        environment.put(BUCKET_NAME, name, b"x", storage_class=storage_class)
    environment.put(BUCKET_NAME, "todo/", b"")
    listing = fast_list.ListingController(2, PROJECT_NAME, BUCKET_NAME)
    assert listing.run() == [("a", 1)]
    assert caplog.messages == ["gs://bkt/: objects left out, because their storage class is not STANDARD: 2"]
    caplog.clear()
    environment.put(BUCKET_NAME, "full/", b"bytes")
    listing.allowed_storage_classes = ["STANDARD", "NEARLINE", "COLDLINE"]
    expected = ["gs://bkt/: objects left out, because their names end in a slash: 1"]
    assert len(listing.run()) == 3
    assert caplog.messages == expected
    caplog.clear()
    listing.client = SimpleNamespace(bucket=client.bucket)  # listed with its own methods
    assert len(listing.run()) == 3
    assert caplog.messages == expected


def test_storage_classes_and_joined_objects_of_a_listing(fake_gcs_url: str) -> None:
    client = new_client(fake_gcs_url)
    bucket = client.create_bucket("listed")
    names = {"a": "STANDARD", "b": "NEARLINE", "f/": "STANDARD", "dataflux-composed-objects/1": "STANDARD"}
    for name, storage_class in names.items():
        blob = bucket.blob(name)
        blob.storage_class = storage_class
        blob.upload_from_string(b"x")

    def list_names(**options: Any) -> list[str]:
        controller = fast_list.ListingController(2, PROJECT_NAME, "listed", **options)
        controller.client = client
        return [name for name, _ in controller.run()]

    assert list_names() == ["a"]
    assert list_names(allowed_storage_classes=["STANDARD", "NEARLINE"]) == ["a", "b"]
    assert list_names(allowed_storage_classes=["ARCHIVE"]) == []
    assert list_names(skip_compose=False) == ["a", "dataflux-composed-objects/1"]
    close_client(client)


@pytest.mark.parametrize("call", DOWNLOADS)
@pytest.mark.parametrize("server", ["emulator", "fake-gcs-server"])
def test_downloads_are_complete_and_in_order(
    call: Any, server: str, emulator: Emulator, fake_gcs_url: str, request: pytest.FixtureRequest
) -> None:
    client = new_client(emulator.url if server == "emulator" else fake_gcs_url)
    bucket = client.bucket(f"downloads-{call.__name__.replace('_', '-')}")
    client.create_bucket(bucket)
    contents = {f"{i}": bytes([i]) * (i * 100) for i in range(30)}
    for name, body in contents.items():
        bucket.blob(name).upload_from_string(body)
    listed = [(name, len(body)) for name, body in contents.items()][::-1]
    downloaded = call(
        project_name=PROJECT_NAME,
        bucket_name=bucket.name,
        objects=listed,
        storage_client=client,
        dataflux_download_optimization_params=PARAMS,
        retry_config=Retry(timeout=10.0),
    )
    assert list(downloaded) == list(contents.values())[::-1]
    assert download.download_single(client, bucket.name, "7") == contents["7"]
    close_client(client)


def test_downloads_without_a_client(objects: dict[str, bytes]) -> None:
    listed = [(name, len(body)) for name, body in objects.items()]
    assert download.dataflux_download(PROJECT_NAME, BUCKET_NAME, listed) == list(objects.values())
    assert download.download_single(None, BUCKET_NAME, "other") == b"x"


def test_failed_download_raises_instead_of_a_shorter_result(objects: dict[str, bytes]) -> None:
    for call in DOWNLOADS:
        with pytest.raises(errors.NotFoundError, match="gs://bkt/gone"):
            list(call(PROJECT_NAME, BUCKET_NAME, [("other", 1), ("gone", 5)]))


def test_compose_and_decompose(gcs: Bucket, put: Put, environment: Emulator, client: storage.Client) -> None:
    put(gcs, {"a": b"one", "b": b"three"})
    listed = [("a", 3), ("b", 5)]
    name = f"{download.COMPOSED_PREFIX}joined"
    blob = download.compose(PROJECT_NAME, BUCKET_NAME, name, listed, client)
    assert blob.download_as_bytes() == b"onethree"
    assert download.decompose(PROJECT_NAME, BUCKET_NAME, name, listed, client) == [b"one", b"three"]
    with pytest.raises(errors.ChangedError, match="has 8 bytes, its parts have 7"):
        download.decompose(PROJECT_NAME, BUCKET_NAME, name, [("a", 3), ("b", 4)], client)
    with pytest.raises(ValueError, match="at most 32 objects in one request, got 33"):
        download.compose(PROJECT_NAME, BUCKET_NAME, name, listed[:1] * 33, client)


def test_user_agent_is_added_once(client: storage.Client) -> None:
    for _ in range(2):
        user_agent.add_dataflux_user_agent(client)
        assert client._connection.user_agent.count(user_agent.user_agent_string) == 1


def test_functions_mark_the_client_that_they_are_passed(objects: dict[str, bytes], emulator: Emulator) -> None:
    def run_lister(client: storage.Client) -> None:
        lister = fast_list.ListingController(1, PROJECT_NAME, BUCKET_NAME)
        lister.client = client
        lister.run()

    listed = [("other", 1)]
    calls: list[Callable[[storage.Client], Any]] = [
        run_lister,
        lambda client: download.compose(PROJECT_NAME, BUCKET_NAME, "joined", listed, client),
        lambda client: download.decompose(PROJECT_NAME, BUCKET_NAME, "joined", listed, client),
        *(lambda client, call=call: list(call(PROJECT_NAME, BUCKET_NAME, listed, client)) for call in DOWNLOADS),
    ]
    for call in calls:
        client = new_client(emulator.url)
        call(client)
        assert client._connection.user_agent.startswith("dataflux/1.0 ")
        close_client(client)


def test_client_of_a_users_own_class_needs_no_connection() -> None:
    user_agent.add_dataflux_user_agent(object())
