"""Dataflux's datasets: what its tests and notebooks ask of them, with only the import changed."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy
import pytest
import torch
from google.auth.credentials import Credentials
from google.cloud import storage
from torch.utils.data import DataLoader, IterableDataset

from tests.conftest import Bucket
from tests.ranks import RankPool
from voxlane import errors
from voxlane.cli.main import main
from voxlane.compat.dataflux import dataflux_iterable_dataset, dataflux_mapstyle_dataset
from voxlane.testing import Access, Emulator

from .conftest import BUCKET_NAME, PREFIX, PROJECT_NAME, Put, close_client, new_client

Config = dataflux_mapstyle_dataset.Config
Map = dataflux_mapstyle_dataset.DataFluxMapStyleDataset
Iterable = dataflux_iterable_dataset.DataFluxIterableDataset
STYLES = [Map, Iterable]


def new_dataset(style: Any, storage_client: Any = None, data_format_fn: Any = None, **settings: Any) -> Any:
    arguments = {} if data_format_fn is None else {"data_format_fn": data_format_fn}
    config = Config(**{"prefix": PREFIX, **settings})
    return style(PROJECT_NAME, BUCKET_NAME, config, storage_client=storage_client, **arguments)


# -- samples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_samples_are_the_objects_of_the_listing(style: Any, objects: dict[str, bytes]) -> None:
    dataset = new_dataset(style)
    assert dataset.objects == [(name, len(body)) for name, body in objects.items()]
    assert list(dataset) == list(objects.values())
    assert (dataset.project_name, dataset.bucket_name) == (PROJECT_NAME, BUCKET_NAME)
    assert dataset.config.prefix == PREFIX
    assert dataset.dataflux_download_optimization_params.max_composite_object_size == 100_000_000


def test_without_a_config_the_whole_bucket_is_listed(objects: dict[str, bytes]) -> None:
    dataset = Map(project_name=PROJECT_NAME, bucket_name=BUCKET_NAME)
    assert len(dataset) == len(dataset.objects) == 21
    assert dataset.storage_client is None
    assert dataset[0] == b"x"


def test_map_style_access(objects: dict[str, bytes]) -> None:
    dataset = new_dataset(Map, data_format_fn=len)
    assert (len(dataset), dataset[3], dataset[-1]) == (20, 4, 20)
    assert dataset.__getitems__([5, 0, 19, 5]) == [6, 1, 20, 6]
    with pytest.raises(IndexError):
        dataset[20]


def test_constructor_lists_nothing(objects: dict[str, bytes], emulator: Emulator) -> None:
    emulator.reset_counters()
    dataset = new_dataset(Map)
    assert emulator.counters().list.requests == 0
    assert len(dataset) == 20


@pytest.mark.parametrize("style", STYLES)
def test_empty_prefix_has_no_objects(style: Any, objects: dict[str, bytes]) -> None:
    dataset = new_dataset(style, prefix="missing/")
    assert dataset.objects == []
    assert list(dataset) == []


def test_iterable_dataset_has_no_length(objects: dict[str, bytes]) -> None:
    dataset = new_dataset(Iterable)
    assert isinstance(dataset, IterableDataset)
    with pytest.raises(TypeError, match="has no len"):
        len(dataset)
    assert dataset


@pytest.mark.parametrize("style", STYLES)
def test_error_of_the_format_function_is_raised_as_it_is(style: Any, objects: dict[str, bytes]) -> None:
    def fail(body: bytes) -> None:
        raise KeyError("unknown format")

    with pytest.raises(KeyError, match="unknown format") as raised:
        list(new_dataset(style, data_format_fn=fail))
    assert raised.value.__notes__ == ["while formatting gs://bkt/train/00.bin"]


@pytest.mark.parametrize("style", STYLES)
def test_format_function_and_client_can_be_replaced(
    style: Any, objects: dict[str, bytes], client: storage.Client
) -> None:
    dataset = new_dataset(style)
    assert dataset.data_format_fn(b"abc") == b"abc"
    dataset.data_format_fn = len
    dataset.storage_client = client
    assert dataset.storage_client is client
    assert list(dataset) == list(range(1, 21))


# -- `objects` -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_assigned_objects_are_the_samples(style: Any, objects: dict[str, bytes], emulator: Emulator) -> None:
    dataset = new_dataset(style)
    dataset.objects = dataset.objects[:5]
    emulator.reset_counters()
    assert list(dataset) == list(objects.values())[:5]
    assert emulator.counters().get.requests == 5
    assert len(dataset.objects) == 5


def test_split_of_one_listing_does_not_leak(objects: dict[str, bytes]) -> None:
    train, validation = new_dataset(Map), new_dataset(Map)
    train.objects, validation.objects = train.objects[:15], train.objects[15:]
    assert (len(train), len(validation)) == (15, 5)
    assert [*train, *validation] == list(objects.values())


@pytest.mark.parametrize("style", STYLES)
def test_objects_can_be_reordered_repeated_and_changed_in_place(style: Any, objects: dict[str, bytes]) -> None:
    dataset = new_dataset(style)
    random.Random(0).shuffle(dataset.objects)
    del dataset.objects[10:]
    dataset.objects.append(dataset.objects[0])
    names = [name for name, _ in dataset.objects]
    assert names != sorted(names)
    assert list(dataset) == [objects[name] for name in names]


@pytest.mark.parametrize(("style", "method"), [(Map, "fork"), (Map, "spawn"), (Iterable, "fork")])
def test_assigned_objects_reach_workers(style: Any, method: str, objects: dict[str, bytes]) -> None:
    dataset = new_dataset(style, data_format_fn=list)
    dataset.objects = dataset.objects[::-2]
    loader = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context=method, collate_fn=list)
    expected = [list(body) for body in list(objects.values())[::-2]]
    assert sorted(sample for batch in loader for sample in batch) == sorted(expected)
    assert list(pickle.loads(pickle.dumps(dataset))) == expected


@pytest.mark.parametrize("style", STYLES)
def test_objects_can_be_assigned_without_a_listing(style: Any, objects: dict[str, bytes], emulator: Emulator) -> None:
    dataset = new_dataset(style)
    emulator.reset_counters()
    dataset.objects = [("train/07.bin", 8), ("other", 0)]  # a size that is not known
    assert list(dataset) == [objects["train/07.bin"], b"x"]
    assert emulator.counters().list.requests == 0


def test_large_object_is_read_completely_whatever_its_size_in_the_list(
    gcs: Bucket, put: Put, environment: Emulator
) -> None:
    body = random.Random(0).randbytes(20 << 20)
    put(gcs, {"large": body})
    dataset = Map(PROJECT_NAME, BUCKET_NAME)
    for size in (1, 9 << 20, 30 << 20):
        dataset.objects = [("large", size)]
        assert dataset[0] == body


@pytest.mark.parametrize("style", STYLES)
def test_name_that_is_not_in_the_bucket_is_an_error(style: Any, objects: dict[str, bytes]) -> None:
    dataset = new_dataset(style)
    dataset.objects = [*dataset.objects[:1], ("train/gone.bin", 7)]
    with pytest.raises(errors.NotFoundError, match=r"gs://bkt/train/gone\.bin: no such object"):
        list(dataset)


def test_objects_must_be_names_with_sizes(objects: dict[str, bytes]) -> None:
    with pytest.raises(errors.ConfigError, match=r"\(name, size\) tuples, got 'train/00.bin'"):
        new_dataset(Map).objects = list(objects)


def test_subclass_may_choose_the_samples(objects: dict[str, bytes]) -> None:
    class EvenSizes(Map):
        def _list_GCS_blobs_with_retry(self) -> Any:  # noqa: N802 - Dataflux's name
            return [(name, size) for name, size in super()._list_GCS_blobs_with_retry() if size % 2 == 0]

    dataset = new_dataset(EvenSizes)
    assert [len(sample) for sample in dataset] == list(range(2, 21, 2))


# -- what is listed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_folder_markers_and_joined_objects_are_never_samples(
    style: Any, objects: dict[str, bytes], client: storage.Client
) -> None:
    bucket = client.bucket(BUCKET_NAME)
    for name in ("train/todo/", "dataflux-composed-objects/1", "voxlane-composed/1"):
        bucket.blob(name).upload_from_string(b"")
    dataset = new_dataset(style, prefix=None)
    assert [name for name, _ in dataset.objects] == ["other", *objects]


@pytest.mark.parametrize("style", STYLES)
def test_unusual_names_are_listed_and_read(style: Any, environment: Emulator, client: storage.Client) -> None:
    names = ["train/a//b", "train/e", "train/e/x", "train/./y", "train/tab\tname", "train/% +#?", "train/ü"]
    for name in names:
        client.bucket(BUCKET_NAME).blob(name).upload_from_string(b"" if name == "train/e" else name)
    dataset = new_dataset(style)
    assert [name for name, _ in dataset.objects] == sorted(names)
    assert list(dataset) == [b"" if name == "train/e" else name.encode() for name in sorted(names)]


def test_clean_removes_joined_objects_of_dataflux(
    client: storage.Client, environment: Emulator, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("dataflux-composed-objects/1", "voxlane-composed/1", "data"):
        client.bucket(BUCKET_NAME).blob(name).upload_from_string(b"abc")
    assert main(["clean", f"gs://{BUCKET_NAME}", "--older-than", "0"]) == 0
    assert "2 leftover objects" in capsys.readouterr().out
    assert environment.keys(BUCKET_NAME) == ["data"]


def test_only_objects_of_the_standard_storage_class_are_listed(fake_gcs_url: str) -> None:
    client = new_client(fake_gcs_url)
    bucket = client.create_bucket("classes")
    for name, storage_class in {"a": "STANDARD", "b": "NEARLINE", "c": "COLDLINE", "d": "STANDARD"}.items():
        blob = bucket.blob(name)
        blob.storage_class = storage_class
        blob.upload_from_string(name * 3)
    for style in STYLES:
        assert style(PROJECT_NAME, "classes", storage_client=client).objects == [("a", 3), ("d", 3)]
    close_client(client)


# -- composed download ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("settings", "is_composed"),
    [
        ({}, False),
        ({"max_composite_object_size": 0}, False),
        ({"disable_compose": True}, False),
        ({"disable_compose": False}, True),
    ],
)
def test_composed_download_is_opt_in(
    style: Any, settings: dict[str, Any], is_composed: bool, objects: dict[str, bytes], emulator: Emulator
) -> None:
    dataset = new_dataset(style, **settings)
    loader = DataLoader(dataset, batch_size=8, collate_fn=list)
    assert [sample for batch in loader for sample in batch] == list(objects.values())
    assert (emulator.counters().compose.requests > 0) == is_composed
    assert [key for key in emulator.keys(BUCKET_NAME) if "composed" in key] == []


def test_composed_download_reads_assigned_objects(objects: dict[str, bytes], emulator: Emulator) -> None:
    dataset = new_dataset(Map, disable_compose=False)
    dataset.objects = [*dataset.objects[::-3], ("other", 1)]
    assert dataset.__getitems__(range(8)) == [*list(objects.values())[::-3], b"x"]
    assert emulator.counters().compose.requests > 0


def test_config_is_followed_as_it_is_when_the_dataset_is_made(objects: dict[str, bytes], emulator: Emulator) -> None:
    config = Config(disable_compose=False)
    config.max_composite_object_size, config.num_processes, config.prefix = 0, 1, PREFIX
    dataset = Map(PROJECT_NAME, BUCKET_NAME, config)
    assert dataset.__getitems__(range(20)) == list(objects.values())
    assert emulator.counters().compose.requests == 0


@pytest.mark.parametrize("style", STYLES)
def test_missing_permissions_raise_a_permission_error(
    style: Any, objects: dict[str, bytes], emulator: Emulator, client: storage.Client
) -> None:
    emulator.set_access(Access(denied_permissions=frozenset({"storage.objects.delete"})))
    with pytest.raises(PermissionError, match=r"storage\.objects\.delete.*disable_compose=True"):
        new_dataset(style, client)
    assert list(new_dataset(style, client, disable_compose=True)) == list(objects.values())


def test_permissions_are_not_checked_where_dataflux_does_not(objects: dict[str, bytes], emulator: Emulator) -> None:
    emulator.set_access(Access(denied_permissions=frozenset({"storage.objects.delete"})))
    assert list(new_dataset(Map)) == list(objects.values())
    with pytest.raises(PermissionError):
        new_dataset(Iterable)


# -- workers and ranks ---------------------------------------------------------------------------------------------


def test_workers_of_an_iterable_dataset_take_consecutive_objects(objects: dict[str, bytes]) -> None:
    loader = DataLoader(new_dataset(Iterable, data_format_fn=len), batch_size=5, num_workers=2)
    assert [batch.tolist() for batch in loader] == [
        [1, 2, 3, 4, 5],
        [11, 12, 13, 14, 15],
        [6, 7, 8, 9, 10],
        [16, 17, 18, 19, 20],
    ]


def _read_own_part(rank: int, url: str) -> tuple[list[int], list[int]]:
    client = new_client(url)
    dataset = new_dataset(Iterable, client, data_format_fn=len)
    everything = list(dataset)
    dataset.objects = dataset.objects[rank::2]
    return everything, list(dataset)


def test_each_rank_reads_what_it_is_told_to(ranks: RankPool, objects: dict[str, bytes], emulator: Emulator) -> None:
    results = ranks.run(_read_own_part, 2, emulator.url)
    assert [everything for everything, _ in results] == [list(range(1, 21))] * 2
    assert [part for _, part in results] == [list(range(1, 21, 2)), list(range(2, 21, 2))]


class Token(Credentials):  # type: ignore[misc,no-untyped-call]
    """Credentials that have a token after a refresh."""

    def refresh(self, request: object) -> None:
        self.token = "secret-token"


@pytest.mark.parametrize("style", STYLES)
def test_credentials_of_the_client_survive_pickling(
    style: Any, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, objects: dict[str, bytes]
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    emulator.set_access(Access(bearer_token="secret-token"))
    client = new_client(emulator.url, Token())  # type: ignore[no-untyped-call]
    dataset = new_dataset(style, client)
    copy = pickle.loads(pickle.dumps(dataset))
    assert list(copy) == list(objects.values())
    assert isinstance(copy.storage_client, storage.Client)  # a subclass passes it on to dataflux_core
    assert isinstance(copy.storage_client._credentials, Token)
    copy.storage_client.close()
    emulator.set_access(Access(bearer_token="another"))
    with pytest.raises((errors.CredentialsError, errors.PermissionDeniedError)):
        list(copy)
    close_client(client)


@pytest.mark.parametrize("style", STYLES)
def test_client_of_another_cloud_is_an_error(style: Any) -> None:
    import boto3

    client = boto3.client("s3", region_name="us-east-1")
    with pytest.raises(errors.ConfigError, match=r"must be a google.cloud.storage.Client, got botocore"):
        new_dataset(style, client)
    client.close()


def test_client_without_credentials_is_an_error(client: storage.Client) -> None:
    client._credentials = None
    with pytest.raises(errors.CredentialsError, match="the storage client has no credentials"):
        new_dataset(Map, client)


# -- the notebook --------------------------------------------------------------------------------------------------


def _load_array(body: bytes) -> torch.Tensor:
    return torch.from_numpy(numpy.frombuffer(body, numpy.uint8).copy())


def test_steps_of_the_getting_started_notebook(environment: Emulator, client: storage.Client) -> None:
    source, bucket = client.create_bucket("public"), client.bucket("own")
    bucket.storage_class = "STANDARD"
    own = client.create_bucket(bucket, location="us")
    for i in range(20):
        source.blob(f"simple-demo-dataset/{i:02d}").upload_from_string(bytes([i]) * 8)
    for blob in source.list_blobs(prefix="simple-demo-dataset"):
        source.copy_blob(blob, own, blob.name)

    config = Config(prefix="simple-demo-dataset", sort_listing_results=True)
    dataset = Map(project_name=PROJECT_NAME, bucket_name="own", config=config)
    assert (len(dataset.objects), dataset.objects[0]) == (20, ("simple-demo-dataset/00", 8))
    iterable = Iterable(project_name=PROJECT_NAME, bucket_name="own", config=config)
    for count, (sample, streamed) in enumerate(zip(dataset, iterable, strict=False)):
        assert sample == streamed == bytes([count]) * 8
        if count == 5:
            break

    for style, arguments in ((Map, {"shuffle": True}), (Iterable, {})):
        for settings in ({}, {"max_composite_object_size": 0}):
            formatted = style(
                project_name=PROJECT_NAME,
                bucket_name="own",
                config=Config(prefix="simple-demo-dataset", sort_listing_results=True, **settings),
                data_format_fn=_load_array,
            )
            loader = DataLoader(formatted, num_workers=1, batch_size=5, **arguments)
            batches = list(loader)
            assert [batch.shape for batch in batches] == [torch.Size([5, 8])] * 4
            assert sorted(torch.cat(batches)[:, 0].tolist()) == list(range(20))
    for num_processes in (1, 5):
        listed = Map(PROJECT_NAME, "own", Config(prefix="simple-demo-dataset/", num_processes=num_processes))
        assert len(listed.objects) == 20


def test_bucket_name_with_a_scheme_is_refused() -> None:
    dataset = dataflux_mapstyle_dataset.DataFluxMapStyleDataset("project", "gs://demo")
    with pytest.raises(errors.ConfigError, match=r"bucket_name must be the name alone, got 'gs://demo'"):
        len(dataset)
