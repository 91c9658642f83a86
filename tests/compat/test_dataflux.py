"""The samples of Dataflux's README, with only the import changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from google.api_core.retry import Retry
from google.auth.credentials import AnonymousCredentials, Credentials
from google.cloud import storage
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.conftest import Bucket
from voxlane import errors
from voxlane.compat.dataflux import dataflux_checkpoint, dataflux_iterable_dataset, dataflux_mapstyle_dataset, lightning
from voxlane.testing import Access, Emulator

Put = Callable[[Bucket, dict[str, bytes]], None]
PROJECT_NAME, BUCKET_NAME, PREFIX = "project", "bkt", "train/"


@pytest.fixture(autouse=True)
def objects(gcs: Bucket, put: Put, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.url)
    objects = {f"train/{i:02d}.bin": bytes([i]) * (i + 1) for i in range(20)}
    put(gcs, objects | {"other": b"x"})
    return objects


@pytest.fixture
def client(emulator: Emulator) -> Iterator[storage.Client]:
    client = storage.Client(
        project=PROJECT_NAME, credentials=AnonymousCredentials(), client_options={"api_endpoint": emulator.url}
    )
    yield client
    client.close()


def test_map_style(objects: dict[str, bytes]) -> None:
    map_dataset = dataflux_mapstyle_dataset.DataFluxMapStyleDataset(
        project_name=PROJECT_NAME,
        bucket_name=BUCKET_NAME,
        config=dataflux_mapstyle_dataset.Config(prefix=PREFIX),
    )
    sample_object = map_dataset.objects[0]
    assert (sample_object[0], sample_object[1]) == ("train/00.bin", 1)
    assert list(map_dataset) == list(objects.values())


def test_iterable_style_with_the_other_modules_config_and_a_format(objects: dict[str, bytes]) -> None:
    iterable_dataset = dataflux_iterable_dataset.DataFluxIterableDataset(
        project_name=PROJECT_NAME,
        bucket_name=BUCKET_NAME,
        config=dataflux_mapstyle_dataset.Config(prefix=PREFIX),
        data_format_fn=lambda body: numpy.frombuffer(body, numpy.uint8),
    )
    assert [len(array) for array in iterable_dataset] == list(range(1, 21))
    assert iterable_dataset.objects[1] == ("train/01.bin", 2)


@pytest.mark.parametrize("config", [{"max_composite_object_size": 0}, {"disable_compose": True}])
def test_composed_download_can_be_turned_off(
    emulator: Emulator, objects: dict[str, bytes], config: dict[str, int]
) -> None:
    dataset = dataflux_mapstyle_dataset.DataFluxMapStyleDataset(
        project_name=PROJECT_NAME,
        bucket_name=BUCKET_NAME,
        config=dataflux_mapstyle_dataset.Config(prefix=PREFIX, sort_listing_results=True, num_processes=4, **config),
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=list)
    assert sorted(b for batch in loader for b in batch) == sorted(objects.values())
    assert emulator.counters().compose.requests == 0


def test_retry_configs_are_followed(objects: dict[str, bytes]) -> None:
    retry = Retry(initial=0.5, multiplier=3.0, maximum=7.0, timeout=42.0)
    dataset = dataflux_mapstyle_dataset.DataFluxMapStyleDataset(
        PROJECT_NAME,
        BUCKET_NAME,
        dataflux_mapstyle_dataset.Config(prefix=PREFIX, list_retry_config=retry, download_retry_config=retry),
    )
    followed = dataset.samples.sources[""].store.config.retry
    assert (followed.deadline_s, followed.initial_delay_s) == (42.0, 0.5)
    assert (followed.multiplier, followed.max_delay_s) == (3.0, 7.0)
    assert len(dataset) == 20


def test_misspelt_setting_raises_an_error_with_its_name() -> None:
    with pytest.raises(TypeError, match="prefx"):
        dataflux_mapstyle_dataset.Config(prefx="train/")  # type: ignore[call-arg]


class Token(Credentials):  # type: ignore[misc,no-untyped-call]
    """Credentials that have a token after a refresh."""

    def refresh(self, request: object) -> None:
        self.token = "secret-token"


def test_storage_clients_endpoint_and_credentials_survive_pickling(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, objects: dict[str, bytes]
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    emulator.set_access(Access(bearer_token="secret-token"))
    client = storage.Client(
        project=PROJECT_NAME,
        credentials=Token(),  # type: ignore[no-untyped-call]
        client_options={"api_endpoint": emulator.url},
    )
    dataset = dataflux_mapstyle_dataset.DataFluxMapStyleDataset(
        PROJECT_NAME, BUCKET_NAME, dataflux_mapstyle_dataset.Config(prefix=PREFIX), storage_client=client
    )
    copy = pickle.loads(pickle.dumps(dataset))
    assert list(copy) == list(objects.values())
    emulator.set_access(Access(bearer_token="another"))
    with pytest.raises((errors.CredentialsError, errors.PermissionDeniedError)):
        list(copy)
    client.close()


def test_checkpoint(client: storage.Client, emulator: Emulator) -> None:
    ckpt = dataflux_checkpoint.DatafluxCheckpoint(
        project_name=PROJECT_NAME, bucket_name=BUCKET_NAME, storage_client=client
    )
    model = torch.nn.Linear(300, 200)
    with ckpt.writer("checkpoints/epoch0.ckpt") as writer:
        torch.save(model.state_dict(), writer)
    with ckpt.reader("checkpoints/epoch0.ckpt") as reader:
        read_state_dict = torch.load(reader)
    assert torch.equal(read_state_dict["weight"], model.weight)
    with pytest.raises(ZeroDivisionError), ckpt.writer("checkpoints/broken.ckpt") as writer:
        torch.save(model.state_dict(), writer)
        raise ZeroDivisionError
    assert emulator.keys("bkt", "checkpoints/") == ["checkpoints/epoch0.ckpt", "checkpoints/epoch0.ckpt.sums"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_lightning_checkpoint(client: storage.Client, asynchronous: bool) -> None:
    kind = lightning.DatafluxLightningAsyncCheckpoint if asynchronous else lightning.DatafluxLightningCheckpoint
    checkpoints = kind(PROJECT_NAME, storage_client=client)
    model = BoringModel()
    trainer = Trainer(
        default_root_dir=f"gs://{BUCKET_NAME}/runs/",
        plugins=[checkpoints],
        callbacks=[
            ModelCheckpoint(
                dirpath=f"gs://{BUCKET_NAME}/runs/", filename="{step}", save_top_k=-1, every_n_train_steps=2
            )
        ],
        accelerator="cpu",
        max_steps=4,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    loaded = lightning.DatafluxLightningCheckpoint(PROJECT_NAME, storage_client=client).load_checkpoint(
        f"gs://{BUCKET_NAME}/runs/step=4.ckpt"
    )
    assert torch.equal(loaded["state_dict"]["layer.weight"], model.layer.weight)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoint(client: storage.Client) -> None:
    state = {"w": torch.randn(100, 100)}
    path = Path(f"gs://{BUCKET_NAME}/dist")  # as in the demo of Dataflux
    dcp.save(state, storage_writer=lightning.GCSDistributedWriter(path, PROJECT_NAME, client, thread_count=3))
    loaded = {"w": torch.zeros(100, 100)}
    dcp.load(loaded, storage_reader=lightning.GCSDistributedReader(path, PROJECT_NAME, client))
    assert torch.equal(loaded["w"], state["w"])
    strategy = lightning.DatafluxFSDPStrategy(str(path), PROJECT_NAME, client, model=None)
    assert strategy._state_dict_type == "sharded"
