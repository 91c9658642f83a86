"""Dataflux's Lightning checkpoints, distributed checkpoints and strategies, on one process and on two ranks."""

from __future__ import annotations

import inspect
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from google.cloud import storage
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.ranks import RankPool
from voxlane import errors
from voxlane.compat.dataflux.lightning import (
    DatafluxFSDPStrategy,
    DatafluxLightningAsyncCheckpoint,
    DatafluxLightningCheckpoint,
    FSSpecFSDPStrategy,
    GCSDistributedReader,
    GCSDistributedWriter,
    GCSFileSystem,
)
from voxlane.compat.dataflux.lightning.strategies import LoadFromBootDiskFSDP
from voxlane.testing import Access, Emulator

from .conftest import BUCKET_NAME, PROJECT_NAME, new_client
from .test_dataflux_datasets import Token

ROOT = f"gs://{BUCKET_NAME}"
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "accelerator": "cpu",
}

# -- one file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [f"{ROOT}/a.ckpt", "gcs://bkt/a.ckpt", Path(f"{ROOT}/a.ckpt")])
def test_checkpoint_at_a_string_or_path(client: storage.Client, emulator: Emulator, path: Any) -> None:
    checkpoints = DatafluxLightningCheckpoint(PROJECT_NAME, client, disable_multipart=True)
    checkpoints.save_checkpoint({"w": torch.arange(5)}, path, storage_options={"ignored": True})
    assert torch.equal(checkpoints.load_checkpoint(path)["w"], torch.arange(5))
    assert torch.equal(checkpoints.load_checkpoint(path, "cpu")["w"], torch.arange(5))
    checkpoints.remove_checkpoint(path)
    checkpoints.teardown()
    assert emulator.keys(BUCKET_NAME) == []
    assert (checkpoints.project_name, checkpoints.disable_multipart) == (PROJECT_NAME, True)
    assert checkpoints.storage_client is client


@pytest.mark.parametrize("path", ["bkt/a.ckpt", Path("bkt/a.ckpt"), "/local/a.ckpt", "s3://bkt/a.ckpt"])
def test_paths_outside_gcs_are_errors(client: storage.Client, path: Any) -> None:
    checkpoints = DatafluxLightningCheckpoint(PROJECT_NAME, client)
    for call in (
        lambda p: checkpoints.save_checkpoint({}, p),
        checkpoints.load_checkpoint,
        checkpoints.remove_checkpoint,
    ):
        with pytest.raises(ValueError, match="does not begin with gs:// or gcs://"):
            call(path)


def test_credentials_of_the_client_are_used(emulator: Emulator) -> None:
    emulator.set_access(Access(bearer_token="secret-token"))
    allowed, refused = new_client(emulator.url, Token()), new_client(emulator.url)  # type: ignore[no-untyped-call]
    DatafluxLightningCheckpoint(PROJECT_NAME, allowed).save_checkpoint({"a": 1}, f"{ROOT}/a.ckpt")
    strategy = DatafluxFSDPStrategy(PROJECT_NAME, allowed)
    assert strategy.checkpoint_io.load_checkpoint(f"{ROOT}/a.ckpt") == {"a": 1}
    assert strategy.storage_client is allowed
    with pytest.raises((errors.CredentialsError, errors.PermissionDeniedError)):
        DatafluxLightningCheckpoint(PROJECT_NAME, refused).load_checkpoint(f"{ROOT}/a.ckpt")
    allowed.close()
    refused.close()


class LateTeardown(DatafluxLightningAsyncCheckpoint):
    """The asynchronous checkpoint of Dataflux's single-node benchmark, which also saves after training."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Leave the executor to `finalize`."""

    def finalize(self) -> None:
        super().teardown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [DatafluxLightningCheckpoint, LateTeardown])
def test_steps_of_the_single_node_benchmark(environment: Emulator, kind: Any) -> None:
    checkpoints = kind(project_name=PROJECT_NAME)
    saving = ModelCheckpoint(
        save_top_k=1, every_n_train_steps=1, filename="checkpoint-{epoch:02d}-{step:02d}", enable_version_counter=True
    )
    trainer = pl.Trainer(
        default_root_dir=f"{ROOT}/run/", plugins=[checkpoints], callbacks=[saving], max_steps=2, **QUIET
    )
    model = BoringModel()
    trainer.fit(model)
    for i in range(2):
        trainer.save_checkpoint(os.path.join(f"{ROOT}/run/", f"ckpt_{i}.ckpt"))
    if kind is LateTeardown:
        checkpoints.finalize()
    for i in range(2):
        loaded = checkpoints.load_checkpoint(os.path.join(f"{ROOT}/run/", f"ckpt_{i}.ckpt"))
        assert torch.equal(loaded["state_dict"]["layer.weight"], model.layer.weight)
    saved = [key for key in environment.keys(BUCKET_NAME, "run/checkpoints/") if key.endswith(".ckpt")]
    assert saved == ["run/checkpoints/checkpoint-epoch=00-step=02.ckpt"]


# -- distributed checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", [f"{ROOT}/dist", Path(f"{ROOT}/dist"), ROOT])
def test_distributed_checkpoint_with_other_files(client: storage.Client, emulator: Emulator, path: Any) -> None:
    writer = GCSDistributedWriter(path, PROJECT_NAME, client, thread_count=3)
    dcp.save({"w": torch.arange(100.0)}, checkpoint_id=path, storage_writer=writer)
    with writer.fs.create_stream(writer.path / "meta.pt", "wb") as file:
        torch.save({"step": 3}, file)
    reader = GCSDistributedReader(path, PROJECT_NAME, client)
    loaded = {"w": torch.zeros(100)}
    dcp.load(loaded, storage_reader=reader)
    assert torch.equal(loaded["w"], torch.arange(100.0))
    assert isinstance(reader.fs, GCSFileSystem)
    with reader.fs.create_stream(reader.path / "meta.pt", "rb") as file:
        assert torch.load(file) == {"step": 3}
    folder = "" if path == ROOT else "dist/"
    assert f"{folder}.metadata" in emulator.keys(BUCKET_NAME)
    assert pickle.loads(pickle.dumps(writer)).fs.storage_client.project == PROJECT_NAME


def test_distributed_checkpoint_outside_gcs_is_an_error(client: storage.Client, tmp_path: Path) -> None:
    for kind in (GCSDistributedWriter, GCSDistributedReader):
        with pytest.raises(ValueError, match="does not begin with gs://"):
            kind(str(tmp_path), PROJECT_NAME, client)


class FakeClient:
    """A client with the methods of google-cloud-storage, whose credentials cannot be taken over."""

    _connection = None

    def bucket(self, name: str) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("client", [FakeClient(), "secret-token"])
def test_client_that_cannot_be_used_is_an_error_and_not_ignored(client: Any) -> None:
    for construct in (
        lambda: GCSDistributedWriter(f"{ROOT}/a", PROJECT_NAME, client),
        lambda: GCSDistributedReader(f"{ROOT}/a", PROJECT_NAME, client),
        lambda: DatafluxFSDPStrategy(PROJECT_NAME, client),
    ):
        with pytest.raises(errors.ConfigError, match=r"google\.cloud\.storage\.Client, got "):
            construct()


def _follow_the_multi_node_demo(rank: int, url: str) -> list[float]:
    """Save and load as the strategy of the demo does, whose users have copied it."""
    client = new_client(url)
    mesh = init_device_mesh("cpu", (2,))
    path = Path(f"{ROOT}/multinode/ckpt_0.ckpt/")
    state: dict[str, Any] = {"model": {"w": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])}}
    writer = GCSDistributedWriter(path, client.project, client)
    dcp.save(state, checkpoint_id=path, storage_writer=writer)
    checkpoints = DatafluxLightningCheckpoint(PROJECT_NAME, client)
    if rank == 0:
        checkpoints.save_checkpoint({"epoch": 4}, path / "meta.pt")
    dist.barrier()

    reader = GCSDistributedReader(path, client.project, client)
    template: dict[str, Any] = {"model": {"w": distribute_tensor(torch.zeros(10), mesh, [Shard(0)])}}
    dcp.load(template, storage_reader=reader)
    with reader.fs.create_stream(path=path / "meta.pt", mode="rb") as file:
        assert torch.load(file) == {"epoch": 4}
    if rank == 0:  # one rank alone may read
        assert checkpoints.load_checkpoint(path / "meta.pt") == {"epoch": 4}
        assert GCSDistributedReader(path, client.project, client).read_metadata().state_dict_metadata
    dist.barrier()
    tensor = template["model"]["w"]
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().tolist()  # type: ignore[no-any-return]


def test_steps_of_the_multi_node_demo(ranks: RankPool, emulator: Emulator) -> None:
    expected = [float(i) for i in range(10)]
    assert ranks.run(_follow_the_multi_node_demo, 2, emulator.url) == [expected, expected]


def _follow_the_simulated_demo(rank: int, url: str) -> bool:
    """One writer and one reader for several checkpoints, each with other tensors on each rank."""
    client = new_client(url)
    writer = GCSDistributedWriter(ROOT, PROJECT_NAME, client)
    reader = GCSDistributedReader(ROOT, PROJECT_NAME, client)
    names = [f"dummy_tensor_{i}" for i in range(6) if i % 2 == rank]
    state = {name: torch.randn(3, 100) for name in names}
    for operation in ("save", "load"):
        for i in range(2):
            checkpoint_id = os.path.join(ROOT, f"checkpoints/ckpt_{i}.ckpt")
            template = {name: torch.empty(3, 100) for name in names}
            dist.barrier()
            if operation == "save":
                dcp.save(state_dict=state, checkpoint_id=checkpoint_id, storage_writer=writer)
            else:
                dcp.load(state_dict=template, checkpoint_id=checkpoint_id, storage_reader=reader)
                assert all(torch.equal(template[name], state[name]) for name in names)
            dist.barrier()
    return True


def test_steps_of_the_simulated_demo(ranks: RankPool, emulator: Emulator) -> None:
    assert ranks.run(_follow_the_simulated_demo, 2, emulator.url) == [True, True]
    assert {key.split("/")[1] for key in emulator.keys(BUCKET_NAME)} == {"ckpt_0.ckpt", "ckpt_1.ckpt"}


def _save_in_the_background(rank: int, url: str) -> bool:
    """Follow the sample of the README for asynchronous saves."""
    client = new_client(url)
    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    writer = GCSDistributedWriter(f"{ROOT}/async", PROJECT_NAME, client)
    future = None
    for epoch in range(3):
        if future is not None:
            future.result()
        state = {f"w{rank}": torch.full((10,), float(epoch))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save(state, checkpoint_id=f"{ROOT}/async", storage_writer=writer, process_group=group)
    assert future is not None
    future.result()
    loaded = {f"w{rank}": torch.zeros(10)}
    dcp.load(loaded, storage_reader=GCSDistributedReader(f"{ROOT}/async", PROJECT_NAME, client))
    return bool((loaded[f"w{rank}"] == 2).all())


def test_asynchronous_saves_of_the_readme(ranks: RankPool, emulator: Emulator) -> None:
    assert ranks.run(_save_in_the_background, 2, emulator.url) == [True, True]


# -- strategies ----------------------------------------------------------------------------------------------------


def test_positional_order_of_the_strategy_is_that_of_dataflux() -> None:
    parameters = list(inspect.signature(DatafluxFSDPStrategy).parameters)
    assert parameters[:3] == ["project_name", "storage_client", "use_async"]


def test_strategies_of_the_benchmark(environment: Emulator) -> None:
    policy = {torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer}
    options: dict[str, Any] = {"state_dict_type": "sharded", "use_orig_params": False, "auto_wrap_policy": policy}
    for strategy in (
        DatafluxFSDPStrategy(project_name=PROJECT_NAME, storage_client=None, **options),
        DatafluxFSDPStrategy(project_name=PROJECT_NAME, storage_client=None, use_async=True, **options),
        FSSpecFSDPStrategy(**options),
        LoadFromBootDiskFSDP(project_name=PROJECT_NAME, **options),
    ):
        assert strategy._state_dict_type == "sharded"
        with pytest.raises(TypeError, match="storage_options"):
            strategy.save_checkpoint({}, f"{ROOT}/a", storage_options={})


def test_strategy_refuses_paths_outside_gcs(client: storage.Client, tmp_path: Path) -> None:
    strategy = DatafluxFSDPStrategy(PROJECT_NAME, client)
    with pytest.raises(ValueError, match="does not begin with gs://"):
        strategy.save_checkpoint({}, str(tmp_path))
    with pytest.raises(ValueError, match="does not begin with gs://"):
        strategy.load_checkpoint(str(tmp_path))


class Model(pl.LightningModule):
    """A model of two wrapped layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layers(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)


def _train_with_the_strategy(rank: int, url: str, use_async: bool) -> tuple[int, int]:
    os.environ.update(
        TORCHELASTIC_RUN_ID="t", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK=str(rank), LOCAL_RANK=str(rank)
    )
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    client = new_client(url)

    def fit(max_steps: int, ckpt_path: str | None, callbacks: list[Any]) -> pl.Trainer:
        strategy = DatafluxFSDPStrategy(
            PROJECT_NAME, client, use_async=use_async, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear})
        )
        trainer = pl.Trainer(
            devices=2,
            strategy=strategy,
            max_steps=max_steps,
            callbacks=callbacks,
            use_distributed_sampler=False,
            enable_checkpointing=bool(callbacks),
            **QUIET,
        )
        data = torch.utils.data.DataLoader(torch.randn(8, 16), batch_size=2)
        trainer.fit(Model(), data, ckpt_path=ckpt_path)
        return trainer

    saving = ModelCheckpoint(
        dirpath=f"{ROOT}/fsdp", save_top_k=-1, every_n_train_steps=1, filename="checkpoint-{epoch:02d}-{step:02d}"
    )
    first = fit(2, None, [saving])
    resumed = fit(4, f"{ROOT}/fsdp/checkpoint-epoch=00-step=02.ckpt/", [])
    return first.global_step, resumed.global_step


def test_training_with_the_strategy_saves_in_the_background_and_resumes(ranks: RankPool, emulator: Emulator) -> None:
    assert ranks.run(_train_with_the_strategy, 2, emulator.url, True) == [(2, 4), (2, 4)]
    folders = {key.split("/")[1] for key in emulator.keys(BUCKET_NAME, "fsdp/")}
    assert folders == {"checkpoint-epoch=00-step=01.ckpt", "checkpoint-epoch=00-step=02.ckpt"}
