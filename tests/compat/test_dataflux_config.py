"""Dataflux's Config: its fields, their positional orders, and its retries."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from google.api_core.retry import Retry
from google.cloud.storage.retry import DEFAULT_RETRY

from tests.conftest import Bucket
from voxlane import errors
from voxlane.compat.dataflux import dataflux_iterable_dataset, dataflux_mapstyle_dataset
from voxlane.compat.dataflux.config import translate_retry
from voxlane.store import RetryConfig
from voxlane.testing import Emulator, Faults

from .conftest import BUCKET_NAME, PROJECT_NAME, Put

FIELDS = [
    "sort_listing_results", "max_composite_object_size", "num_processes", "prefix", "max_listing_retries",
    "threads_per_process", "disable_compose", "list_retry_config", "download_retry_config",
]  # fmt: skip


def test_positional_orders_are_those_of_dataflux() -> None:
    assert list(inspect.signature(dataflux_mapstyle_dataset.Config).parameters) == FIELDS
    iterable_fields = [name for name in FIELDS if name != "threads_per_process"]
    assert list(inspect.signature(dataflux_iterable_dataset.Config).parameters) == iterable_fields


@pytest.mark.parametrize("module", [dataflux_mapstyle_dataset, dataflux_iterable_dataset])
def test_defaults_are_those_of_dataflux(module: Any) -> None:
    config = module.Config()
    assert (config.sort_listing_results, config.max_composite_object_size) == (False, 100_000_000)
    assert (config.prefix, config.max_listing_retries) == (None, 3)
    assert config.list_retry_config is config.download_retry_config is module.MODIFIED_RETRY
    assert translate_retry(module.MODIFIED_RETRY) == RetryConfig(
        deadline_s=100_000.0, initial_delay_s=1.0, multiplier=1.5, max_delay_s=30.0
    )


def test_disabled_composed_download_has_a_maximum_size_of_zero() -> None:
    assert dataflux_mapstyle_dataset.Config(disable_compose=True).max_composite_object_size == 0
    assert dataflux_iterable_dataset.Config(False, 5, 1, None, 3, True).max_composite_object_size == 0


def test_misspelt_setting_raises_an_error_with_its_name() -> None:
    with pytest.raises(TypeError, match="prefx"):
        dataflux_mapstyle_dataset.Config(prefx="train/")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        (Retry(initial=0.5, multiplier=3.0, maximum=7.0, timeout=42.0), (42.0, 0.5, 3.0, 7.0)),
        (DEFAULT_RETRY.with_deadline(300.0).with_delay(1, 45, 1.2), (300.0, 1.0, 1.2, 45.0)),
        (DEFAULT_RETRY.with_timeout(None), (315_360_000.0, 1.0, 2.0, 60.0)),  # for ever
    ],
)
def test_pauses_and_deadline_of_a_retry_are_followed(retry: Retry, expected: tuple[float, ...]) -> None:
    followed = translate_retry(retry)
    values = (followed.deadline_s, followed.initial_delay_s, followed.multiplier, followed.max_delay_s)
    assert values == expected


@pytest.mark.parametrize("module", [dataflux_mapstyle_dataset, dataflux_iterable_dataset])
def test_listing_and_reading_have_their_own_retries(module: Any, gcs: Bucket, put: Put, environment: Emulator) -> None:
    """Two requests of a kind fail: the error is raised where retries are off, and overcome where they are on."""
    put(gcs, {"a": b"x"})
    patient = Retry(initial=0.001, maximum=0.01, timeout=60.0)
    kind = getattr(module, "DataFluxMapStyleDataset", None) or module.DataFluxIterableDataset

    def new_dataset(list_retry: Retry | None, download_retry: Retry | None) -> Any:
        config = module.Config(
            disable_compose=True,
            max_listing_retries=1,
            list_retry_config=list_retry,
            download_retry_config=download_retry,
        )
        return kind(PROJECT_NAME, BUCKET_NAME, config)

    environment.set_faults(Faults(fail_next=2, kinds=("list",)))
    with pytest.raises(errors.UnavailableError):
        _ = new_dataset(None, patient).objects
    environment.set_faults(Faults(fail_next=2, kinds=("list",)))
    dataset = new_dataset(patient, None)
    assert dataset.objects == [("a", 1)]

    environment.set_faults(Faults(fail_next=2, kinds=("get",)))
    with pytest.raises(errors.UnavailableError):
        list(dataset)
    environment.set_faults(Faults(fail_next=2, kinds=("get",)))
    assert list(new_dataset(None, patient)) == [b"x"]


def test_listing_is_attempted_as_often_as_the_config_says(gcs: Bucket, put: Put, environment: Emulator) -> None:
    put(gcs, {"a": b"x"})
    environment.set_faults(Faults(error_rate=1.0, kinds=("list",)))
    config = dataflux_mapstyle_dataset.Config(max_listing_retries=4, list_retry_config=None)
    environment.reset_counters()
    with pytest.raises(errors.UnavailableError):
        _ = dataflux_mapstyle_dataset.DataFluxMapStyleDataset(PROJECT_NAME, BUCKET_NAME, config).objects
    assert environment.counters().list.requests == 4
