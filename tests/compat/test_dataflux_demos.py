"""The steps of Dataflux's demos and notebooks, in small: data loading, text, segmentation, training checkpoints."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from google.cloud import storage
from google.cloud.storage import retry
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils import data

from tests.conftest import Bucket
from voxlane.compat.dataflux import (
    dataflux_checkpoint,
    dataflux_core,
    dataflux_iterable_dataset,
    dataflux_mapstyle_dataset,
)
from voxlane.compat.dataflux import dataflux_iterable_dataset as df_iter
from voxlane.compat.dataflux.lightning import DatafluxLightningCheckpoint, path_utils
from voxlane.testing import Emulator

from .conftest import BUCKET_NAME, PREFIX, PROJECT_NAME, Put

# -- list and download ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["map", "iterable"])
@pytest.mark.parametrize("no_dataflux", [False, True])
def test_list_and_download(style: str, no_dataflux: bool, objects: dict[str, bytes], client: storage.Client) -> None:
    retry_config = retry.DEFAULT_RETRY.with_timeout(300.0).with_delay(initial=1.0, maximum=45.0, multiplier=1.2)
    settings: dict[str, Any] = {
        "max_composite_object_size": 100_000_000,
        "list_retry_config": retry_config,
        "download_retry_config": retry_config,
    }
    kind: Any
    if style == "map":
        config: Any = dataflux_mapstyle_dataset.Config(threads_per_process=2, **settings)
        kind = dataflux_mapstyle_dataset.DataFluxMapStyleDataset
    else:
        config = dataflux_iterable_dataset.Config(**settings)
        kind = dataflux_iterable_dataset.DataFluxIterableDataset
    if no_dataflux:
        config.max_composite_object_size = 0
        config.num_processes = 1
    config.prefix = PREFIX
    dataset = kind(
        project_name=PROJECT_NAME,
        bucket_name=BUCKET_NAME,
        config=config,
        data_format_fn=bytes,
        storage_client=client if no_dataflux else None,
    )
    assert len(dataset.objects) == 20
    loader = data.DataLoader(
        dataset=dataset,
        batch_size=7,
        shuffle=True if style == "map" else None,
        num_workers=1,
        prefetch_factor=2,
        persistent_workers=True,
    )
    for _ in range(2):
        batches = list(loader)
        assert sum(len(batch) for batch in batches) == 20
        assert sum(len(body) for batch in batches for body in batch) == sum(map(len, objects.values()))


# -- image segmentation --------------------------------------------------------------------------------------------


class SegmentationDataset(data.Dataset[Any]):
    """The demo's dataset: images and labels that are listed and downloaded with dataflux_core."""

    def __init__(self, images_prefix: str, labels_prefix: str) -> None:
        self.config = dataflux_mapstyle_dataset.Config(sort_listing_results=True)
        self.params = dataflux_core.download.DataFluxDownloadOptimizationParams(
            max_composite_object_size=self.config.max_composite_object_size
        )
        self.storage_client = storage.Client(project=PROJECT_NAME)
        self.images, self.labels = (
            dataflux_core.fast_list.ListingController(
                max_parallelism=self.config.num_processes,
                project=PROJECT_NAME,
                bucket=BUCKET_NAME,
                sort_results=self.config.sort_listing_results,
                prefix=prefix,
            ).run()
            for prefix in (images_prefix, labels_prefix)
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return tuple(
            numpy.load(
                io.BytesIO(
                    dataflux_core.download.download_single(
                        storage_client=self.storage_client, bucket_name=BUCKET_NAME, object_name=listed[index][0]
                    )
                )
            )
            for listed in (self.images, self.labels)
        )

    def __getitems__(self, indices: list[int]) -> list[Any]:
        images, labels = (
            dataflux_core.download.dataflux_download(
                project_name=PROJECT_NAME,
                bucket_name=BUCKET_NAME,
                objects=[listed[index] for index in indices],
                storage_client=self.storage_client,
                dataflux_download_optimization_params=self.params,
            )
            for listed in (self.images, self.labels)
        )
        return [
            (numpy.load(io.BytesIO(image)), numpy.load(io.BytesIO(label)))
            for image, label in zip(images, labels, strict=True)
        ]


def _encode(array: Any) -> bytes:
    buffer = io.BytesIO()
    numpy.save(buffer, array)
    return buffer.getvalue()


@pytest.fixture
def scans(gcs: Bucket, put: Put, environment: Emulator) -> None:
    scans = {f"images/case_{i:02d}_x.npy": _encode(numpy.full((1, 4, 4, 4), i, numpy.float32)) for i in range(8)}
    labels = {f"labels/case_{i:02d}_y.npy": _encode(numpy.full((1, 4, 4, 4), i, numpy.uint8)) for i in range(8)}
    put(gcs, scans | labels)


def test_image_segmentation(scans: None) -> None:
    dataset = SegmentationDataset("images/", "labels/")
    image, label = dataset[3]
    assert (image.mean(), label.mean()) == (3, 3)
    loader = data.DataLoader(dataset, batch_size=3, shuffle=True, num_workers=1, drop_last=True)
    batches = list(loader)
    assert [image.shape for image, _ in batches] == [torch.Size([3, 1, 4, 4, 4])] * 2
    for images, labels in batches:
        assert torch.equal(images, labels.float())
    dataset.storage_client.close()


def test_image_segmentation_with_two_datasets(scans: None) -> None:
    images, labels = (
        dataflux_mapstyle_dataset.DataFluxMapStyleDataset(
            project_name=PROJECT_NAME,
            bucket_name=BUCKET_NAME,
            config=dataflux_mapstyle_dataset.Config(sort_listing_results=True, prefix=prefix),
        )
        for prefix in ("images/", "labels/")
    )
    indices = [5, 0, 7]
    for image, label in zip(images.__getitems__(indices), labels.__getitems__(indices), strict=True):
        assert numpy.load(io.BytesIO(image)).mean() == numpy.load(io.BytesIO(label)).mean()


# -- text ----------------------------------------------------------------------------------------------------------


class ParquetIterableDataset(df_iter.DataFluxIterableDataset):
    """The demo's dataset: a sample is a row of a Parquet file, so there are more samples than objects."""

    def __init__(self, columns: list[str], batch_size: int, rank: int, world_size: int, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.columns, self.batch_size = columns, batch_size
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        worker = data.get_worker_info()
        per_node = math.ceil(len(self.objects) / self.world_size)
        per_worker = math.ceil(per_node / (worker.num_workers if worker else 1))
        start = self.rank * per_node + (worker.id if worker else 0) * per_worker
        for body in df_iter.dataflux_core.download.dataflux_download_lazy(
            project_name=self.project_name,
            bucket_name=self.bucket_name,
            objects=self.objects[start : min(start + per_worker, (self.rank + 1) * per_node)],
            storage_client=self.storage_client,
            dataflux_download_optimization_params=self.dataflux_download_optimization_params,
            retry_config=self.config.download_retry_config,
        ):
            for batch in self.data_format_fn(body).iter_batches(batch_size=self.batch_size, columns=self.columns):
                yield from batch.to_pylist()


def _open_parquet(body: bytes) -> Any:
    return pyarrow.parquet.ParquetFile(pyarrow.BufferReader(body))


class RowModel(pl.LightningModule):
    """Counts the rows that it is trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows: list[str] = []

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        self.rows += batch["text"]
        lengths = torch.tensor([[float(len(text))] for text in batch["text"]])
        return self.layer(lengths).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_text(workers: int, world_size: int, gcs: Bucket, put: Put, environment: Emulator) -> None:
    rows = [f"row {i}" for i in range(40)]
    files = {}
    for i in range(4):
        table = pyarrow.table({"text": rows[i * 10 : (i + 1) * 10], "id": list(range(10))})
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, sink)
        files[f"fineweb/{i}.parquet"] = sink.getvalue().to_pybytes()
    put(gcs, files)
    trained: list[str] = []
    for rank in range(world_size):
        dataset = ParquetIterableDataset(
            columns=["text", "id"],
            batch_size=3,
            rank=rank,
            world_size=world_size,
            project_name=PROJECT_NAME,
            bucket_name=BUCKET_NAME,
            config=df_iter.Config(prefix="fineweb/", sort_listing_results=True),
            data_format_fn=_open_parquet,
        )
        loader = data.DataLoader(dataset=dataset, batch_size=3, num_workers=workers, persistent_workers=workers > 0)
        model = RowModel()
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model=model, train_dataloaders=loader)
        trained += model.rows
    assert sorted(trained) == sorted(rows)  # Lightning trains with every row, not with one for each object


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_async", [False, True])
def test_checkpointing(use_async: bool, environment: Emulator) -> None:
    checkpoint = dataflux_checkpoint.DatafluxCheckpoint(PROJECT_NAME, BUCKET_NAME)
    executor = ThreadPoolExecutor(max_workers=1)
    model = torch.nn.LSTM(4, 8, batch_first=True)

    def save(path: str) -> None:
        with checkpoint.writer(path) as writer:
            torch.save(model.state_dict(), writer)

    for epoch in range(3):
        path = f"single-node/async/checkpoint_{epoch}.pth"
        executor.submit(save, path).result() if use_async else save(path)
    executor.shutdown(wait=True)
    with checkpoint.reader("single-node/async/checkpoint_2.pth") as reader:
        assert model.load_state_dict(torch.load(reader)).missing_keys == []


@pytest.mark.filterwarnings("ignore")
def test_lightning_notebook(environment: Emulator) -> None:
    checkpoints = DatafluxLightningCheckpoint(project_name=PROJECT_NAME)
    saving = ModelCheckpoint(
        save_top_k=-1, every_n_train_steps=1, filename="checkpoint-{epoch:02d}-{step:02d}", enable_version_counter=True
    )
    trainer = pl.Trainer(
        default_root_dir=f"gs://{BUCKET_NAME}/notebook/", plugins=[checkpoints], callbacks=[saving], min_epochs=4,
        max_epochs=5, max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    model = BoringModel()
    trainer.fit(model)
    trainer.save_checkpoint(f"gcs://{BUCKET_NAME}/checkpoints/ckpt.ckpt")
    loaded = checkpoints.load_checkpoint(f"gcs://{BUCKET_NAME}/checkpoints/ckpt.ckpt")
    assert torch.equal(loaded["state_dict"]["layer.weight"], model.layer.weight)
    saved = [key for key in environment.keys(BUCKET_NAME, "notebook/") if key.endswith(".ckpt")]
    assert len(saved) == 3
    checkpoints.remove_checkpoint(f"gs://{BUCKET_NAME}/{saved[0]}")
    assert len([key for key in environment.keys(BUCKET_NAME, "notebook/") if key.endswith(".ckpt")]) == 2


def test_single_node_benchmark_without_lightning(environment: Emulator) -> None:
    bucket_name, folder = path_utils.parse_gcs_path(f"gs://{BUCKET_NAME}/runs/")
    checkpoint = dataflux_checkpoint.DatafluxCheckpoint(project_name=PROJECT_NAME, bucket_name=bucket_name)
    model = torch.nn.Linear(10, 10)
    for i in range(2):
        with checkpoint.writer(f"{folder}checkpoint_{i}.ckpt") as writer:
            torch.save(model.state_dict(), writer)
    totals = []
    for i in range(2):
        with checkpoint.reader(f"{folder}checkpoint_{i}.ckpt") as reader:
            totals.append(float(torch.load(reader)["weight"].sum().detach()))
    assert statistics.mean(totals) == pytest.approx(float(model.weight.sum().detach()))
