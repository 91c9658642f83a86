"""What each rank of the scaling benchmark does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from voxlane.bench import ranks
from voxlane.bench.scaling import simulated_step
from voxlane.bench.scaling.settings import ScalingPoint
from voxlane.errors import CorruptError
from voxlane.model.networks import build as build_network
from voxlane.model.networks import check_patch
from voxlane.store import StoreConfig
from voxlane.train import fit
from voxlane.train import ranks as train_ranks
from voxlane.train.config import TrainConfig, resolve_network
from voxlane.train.patch_loader import PatchLoader
from voxlane.train.ranks import LauncherEnvironment, RankInfo
from voxlane.train.trainer import silence_lightning
from voxlane.volume.prepared_dataset import Prepared
from voxlane.volume.split_files import choose_split


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Times of one rank."""

    entered: float
    """`time.time` at which the function of the rank was called; processes of a machine can be compared by it."""
    setup_s: float
    """Seconds from the call until the first batch is requested."""
    first_s: float
    """Seconds of the warm-up steps, which also fill the loader."""
    steps_s: list[float]
    """Seconds of each step after those."""
    waited_s: float
    """Seconds of those steps spent waiting for patches."""
    exposed_s: float
    """Seconds of those steps spent waiting for gradients after the device had finished."""
    cpu_s: float
    """Processor seconds of the process, with all its threads, during those steps."""
    positions: list[int]
    """Positions in the epoch of all patches it received."""


def make_network(config: TrainConfig, prepared: Prepared) -> torch.nn.Module:
    """Return the network that `config` trains on a dataset."""
    network, description = resolve_network(config, prepared.plan), prepared.description
    return build_network(
        network, len(description.channels), description.outputs, deep_supervision=config.deep_supervision
    )


def simulate(
    point: ScalingPoint, data: str, config: TrainConfig, step_s: float, warmup: int, store: StoreConfig | None
) -> list[RankTimes]:
    """Train on a simulated accelerator as one rank and return the times of all ranks, in order of rank.

    Raise CorruptError if gradients were not averaged over all ranks at every step, or a patch came twice or never.
    """
    entered, start = time.time(), time.perf_counter()
    torch.set_num_threads(1)  # there is next to nothing to compute
    prepared = Prepared.load(data, store)
    patch = config.patch or prepared.plan.patch
    check_patch(resolve_network(config, prepared.plan), patch)
    rank_info = train_ranks.read_rank_info()
    world_size = rank_info.world_size
    steps = warmup + point.steps
    samples = steps * point.batch * world_size
    run = replace(config, accelerator="cpu", steps_per_epoch=steps, batch=point.batch * world_size)
    cases = choose_split(prepared, config.split, store).select(config.fold, data)
    training_rows = prepared.find_rows(cases.train)
    loader = fit.make_loader(run, prepared.plan, prepared, training_rows, point.batch, rank_info)
    torch.manual_seed(config.seed)
    with torch.device("meta"):
        costs = simulated_step.count_multiplications(
            make_network(config, prepared), len(prepared.description.channels), patch
        )
    network = simulated_step.SimulatedNetwork(make_network(config, prepared), costs, step_s=step_s)
    module = simulated_step.SimulatedModule(network)
    before = [p.detach().clone() for p in module.network.parameters()]
    watch = _Watch(loader, warmup)
    with silence_lightning():
        _make_trainer(rank_info, sum(p.numel() for p in before), watch).fit(module, loader)
    check_weights(before, list(module.network.parameters()), steps, rank=rank_info.rank, world_size=world_size)
    ends = [watch.started, *watch.ended]
    own_times = RankTimes(
        entered=entered,
        setup_s=watch.started - start,
        first_s=ends[warmup] - watch.started,
        steps_s=[after - before for before, after in zip(ends[warmup:], ends[warmup + 1 :], strict=False)],
        waited_s=loader.waited_s - watch.waited_before_s,
        exposed_s=sum(module.exposed_s[warmup:]),
        cpu_s=watch.cpu_after_s - watch.cpu_before_s,
        positions=watch.positions,
    )
    all_times: list[RankTimes] = ranks.gather(own_times)
    positions = sorted(position for times in all_times for position in times.positions)
    if positions != list(range(samples)):
        raise CorruptError(
            f"received {len(positions)} patches, {len(set(positions))} different ones, instead of {samples}"
        )
    return all_times


def train(run_uri: str, store: StoreConfig | None) -> tuple[float, float]:
    """Train a run that was begun, as one rank, and return the times at which it started and ended."""
    entered = time.time()
    fit.fit(run_uri, store, progress=False)
    return entered, time.time()


class _Watch(pl.Callback):
    """Notes the end of each step and the positions of its patches."""

    def __init__(self, loader: PatchLoader, warmup: int) -> None:
        self._loader = loader
        self._warmup = warmup
        self.started = 0.0
        self.ended: list[float] = []
        self.positions: list[int] = []
        self.cpu_before_s = self.cpu_after_s = self.waited_before_s = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ended.append(time.perf_counter())
        self.positions += batch["position"].tolist()
        self.cpu_after_s = time.process_time()
        if batch_idx + 1 == self._warmup:
            self.cpu_before_s, self.waited_before_s = self.cpu_after_s, self._loader.waited_s


def check_weights(
    before: Sequence[torch.Tensor], after: Sequence[torch.nn.Parameter], steps: int, *, rank: int, world_size: int
) -> None:
    """Raise CorruptError unless weights moved by the mean of all gradients, which are rank + 1, at every step."""
    moved = steps * simulated_step.LEARNING_RATE * (world_size + 1) / 2
    for old, new in zip(before, after, strict=True):
        if not torch.allclose(old - moved, new, rtol=1e-4, atol=1e-5):
            difference = float((new.detach() - old + moved).abs().max())
            raise CorruptError(f"the weights of rank {rank} differ by {difference:g} from the mean of all gradients")


def _make_trainer(rank_info: RankInfo, parameters: int, watch: pl.Callback) -> pl.Trainer:
    many = rank_info.world_size > 1
    strategy: Any = train_ranks.make_ddp_strategy(parameters) if many else "auto"
    return pl.Trainer(
        accelerator="cpu",
        devices=rank_info.local_world_size,
        num_nodes=rank_info.nodes,
        strategy=strategy,
        plugins=[LauncherEnvironment() if many else LightningEnvironment()],
        max_epochs=1,
        callbacks=[watch],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
