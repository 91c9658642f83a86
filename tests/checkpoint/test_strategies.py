"""Lightning's FSDP and ModelParallel strategies, on real ranks, with their checkpoints in a bucket."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from tests.conftest import Bucket
from tests.ranks import RankPool
from voxlane import errors
from voxlane.checkpoint.lifecycle import list_checkpoints
from voxlane.checkpoint.lightning import BucketFSDPStrategy, BucketModelParallelStrategy


class Model(pl.LightningModule):
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self._sharded = sharded
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 8))

    def configure_model(self) -> None:
        if self._sharded and not isinstance(next(self.parameters()), DTensor):
            mesh = self.device_mesh["data_parallel"] if self.device_mesh is not None else None
            for layer in (self.layers[0], self.layers[2]):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def _strategy(kind: str, config: Any, world: int) -> Any:
    name, _, form = kind.partition("-")
    if name == "fsdp":
        return BucketFSDPStrategy(
            state_dict_type="full" if form == "full" else "sharded",
            auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
            store_config=config,
            async_save=form == "async",
        )
    return BucketModelParallelStrategy(
        data_parallel_size=world,
        tensor_parallel_size=1,
        save_distributed_checkpoint=form != "full",
        store_config=config,
        async_save=form == "async",
    )


def _fit(rank: int, world: int, kind: str, uri: str, config: Any, epochs: int, ckpt_path: str | None) -> Any:
    os.environ.update(
        TORCHELASTIC_RUN_ID="t", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK=str(rank), LOCAL_RANK=str(rank)
    )
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0")
    pl.seed_everything(1, verbose=False)
    model = Model(kind.startswith("fsdp2"))
    saving = ModelCheckpoint(
        dirpath=uri, filename="{epoch}", save_top_k=1, monitor="epoch", mode="max", save_last=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=_strategy(kind, config, world),
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[saving],
    )
    data = torch.utils.data.DataLoader(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), batch_size=2)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    state = trainer.strategy.lightning_module_state_dict()
    return trainer.global_step, _whole(trainer.model, state)


def _whole(model: Any, state: dict[str, Any]) -> float:
    """Return a number that depends on all weights and is the same on every rank and for every sharding."""
    total = torch.zeros(())
    for tensor in state.values():
        if isinstance(tensor, DTensor):
            total = total + tensor.full_tensor().double().sum()
        elif hasattr(tensor, "local_shards"):
            local = torch.stack([s.tensor.double().sum() for s in tensor.local_shards()] or [torch.zeros(()).double()])
            part = local.sum()
            torch.distributed.all_reduce(part)
            total = total + part
        else:
            total = total + tensor.double().sum()
    return float(total)


@pytest.mark.parametrize(
    # No fsdp-full: on the CPU, torch 2.13 itself crashes when FSDP 1 gathers a full state dict.
    "kind",
    ["fsdp-sharded", "fsdp-async", "fsdp2-sharded", "fsdp2-async", "fsdp2-full"],
)
def test_training_resumes_from_the_bucket(kind: str, gcs: Bucket, ranks: RankPool) -> None:
    uri = f"{gcs.uri}/{kind}"
    whole = ranks.run(_fit, 2, 2, kind, f"{uri}-whole", gcs.config, 2, None)
    ranks.run(_fit, 2, 2, kind, uri, gcs.config, 1, None)
    (saved,) = list_checkpoints(uri, gcs.config)
    assert saved.complete
    assert saved.is_folder == (not kind.endswith("full"))
    resumed = ranks.run(_fit, 2, 2, kind, uri, gcs.config, 2, saved.uri)
    assert resumed[0][0] == whole[0][0] == 8
    assert resumed[0][1] == pytest.approx(whole[0][1], rel=1e-6)
    (only,) = list_checkpoints(uri, gcs.config)  # the first one was removed after the second was published
    assert only.name != saved.name


def test_fsdp_starts_from_a_full_checkpoint(gcs: Bucket, ranks: RankPool) -> None:
    ranks.run(_fit, 2, 2, "fsdp2-full", f"{gcs.uri}/full", gcs.config, 1, None)
    (saved,) = list_checkpoints(f"{gcs.uri}/full", gcs.config)
    resumed = ranks.run(_fit, 2, 2, "fsdp-sharded", f"{gcs.uri}/x", gcs.config, 2, saved.uri)
    whole = ranks.run(_fit, 2, 2, "fsdp2-full", f"{gcs.uri}/whole", gcs.config, 2, None)
    assert resumed[0][1] == pytest.approx(whole[0][1], rel=1e-5)


def test_missing_checkpoint_raises_one_clear_error(gcs: Bucket, ranks: RankPool) -> None:
    for message in ranks.run(_fail_to_resume, 2, f"{gcs.uri}/none", gcs.config):
        assert "gs://bkt/none/epoch=0.ckpt: no complete checkpoint here" in message


def _fail_to_resume(rank: int, uri: str, config: Any) -> str:
    with pytest.raises(errors.IncompleteError) as caught:
        _fit(rank, 2, "fsdp-sharded", uri, config, 1, f"{uri}/epoch=0.ckpt")
    return str(caught.value)
