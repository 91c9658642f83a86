"""What each rank of a scaling benchmark does, and how ranks come to be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from voxlane.bench import ranks, simulated
from voxlane.bench.launching import Launch, local, on_ray
from voxlane.bench.scaling_setting import Point, ScalingSetting
from voxlane.errors import CorruptError
from voxlane.model.networks import build as build_network
from voxlane.model.networks import check_patch
from voxlane.store import StoreConfig
from voxlane.train import fit
from voxlane.train import ranks as train_ranks
from voxlane.train.config import TrainConfig, network_for
from voxlane.train.ranks import Ranks, RanksEnvironment
from voxlane.train.recorder import PatchLoader
from voxlane.volume.cases import Caching
from voxlane.volume.prepared import Prepared
from voxlane.volume.stream import PatchStream


@contextmanager
def launcher(setting: ScalingSetting) -> Iterator[Launch]:
    """How this benchmark starts ranks."""
    if setting.launcher == "local":
        yield local
        return
    with on_ray(setting.address, max(setting.workers), real=setting.real) as launch:
        yield launch


@dataclass(frozen=True, kw_only=True)
class Job:
    """A point, as it travels to every rank."""

    point: Point
    data: str
    config: TrainConfig
    step_s: float
    warmup: int
    store: StoreConfig | None


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank saw. Clocks of the machine are `time.time`, to be compared between its processes."""

    entered: float
    """Machine's clock when the rank's function was called."""
    left: float
    """And when it returned."""
    setup_s: float
    """From there to the first batch being asked for."""
    first_s: float
    """The steps to warm up, which also fill the loader."""
    steps_s: list[float]
    """The steps after those, one by one."""
    waited_s: float
    """Of those, waited for patches."""
    exposed_s: float
    """Of those, waited for gradients when the device had ended its part."""
    cpu_s: float
    """Seconds of a processor that the rank's process, all its threads, used during those."""
    positions: list[int]
    """Places in the epoch of all patches it got."""


def simulate(job: Job) -> list[RankTimes]:
    """Train on a simulated accelerator as one rank; returns all ranks' times, by rank.

    Raises CorruptError if gradients were not averaged over all ranks at every step, or a patch came twice or never.
    """
    entered, began = time.time(), time.perf_counter()
    torch.set_num_threads(1)  # there is next to nothing to compute
    config, point = job.config, job.point
    prepared = Prepared.load(job.data, job.store)
    plan, description = prepared.plan, prepared.description
    patch = config.patch or plan.patch
    check_patch(network_for(config, plan), patch)
    where = train_ranks.of_environment()
    world_size = where.world_size
    steps = job.warmup + point.steps
    stream = PatchStream(
        prepared,
        prepared.split(config.fold)[0],
        samples=steps * point.batch * world_size,
        patch=patch,
        foreground_share=config.foreground_share,
        placement=config.placement,
        seed=config.seed,
        in_flight=config.loader.in_flight,
        caching=Caching(
            ram_bytes=config.loader.ram_cache_bytes,
            folder=config.loader.disk_cache,
            disk_bytes=config.loader.disk_cache_bytes,
        ),
    )
    loader = PatchLoader(stream, point.batch, num_workers=config.loader.workers or 0)
    shape = network_for(config, plan)
    make = partial(
        build_network, shape, len(description.channels), description.outputs, deep_supervision=config.deep_supervision
    )
    torch.manual_seed(config.seed)
    with torch.device("meta"):
        costs = simulated.multiplications(make(), len(description.channels), patch)
    module = simulated.SimulatedModule(simulated.SimulatedNetwork(make(), costs, step_s=job.step_s))
    before = [p.detach().clone() for p in module.network.parameters()]
    watch = _Watch(loader, job.warmup)
    with fit.quiet():
        _trainer(where, sum(p.numel() for p in before), watch).fit(module, loader)
    check_weights(before, list(module.network.parameters()), steps, rank=where.rank, world_size=world_size)
    ends = [watch.began, *watch.ended]
    mine = RankTimes(
        entered=entered,
        left=time.time(),
        setup_s=watch.began - began,
        first_s=ends[job.warmup] - watch.began,
        steps_s=[after - before for before, after in zip(ends[job.warmup :], ends[job.warmup + 1 :], strict=False)],
        waited_s=loader.waited_s - watch.waited_before_s,
        exposed_s=sum(module.exposed_s[job.warmup :]),
        cpu_s=watch.cpu_after_s - watch.cpu_before_s,
        positions=watch.positions,
    )
    every: list[RankTimes] = ranks.gather(mine) if dist.is_initialized() else [mine]
    seen = sorted(position for rank in every for position in rank.positions)
    if seen != list(range(stream.samples)):
        raise CorruptError(f"{len(seen)} patches came, {len(set(seen))} different ones, of {stream.samples}")
    return every


def train(run_uri: str, store: StoreConfig | None) -> tuple[float, float]:
    """Train a run that was begun, as one rank; returns the machine's clock when it came and when it left."""
    entered = time.time()
    fit.fit(run_uri, store, progress=False)
    return entered, time.time()


class _Watch(pl.Callback):
    """Notes when each step ended, and which patches it had."""

    def __init__(self, loader: PatchLoader, warmup: int) -> None:
        self._loader = loader
        self._warmup = warmup
        self.began = 0.0
        self.ended: list[float] = []
        self.positions: list[int] = []
        self.cpu_before_s = self.cpu_after_s = self.waited_before_s = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began = time.perf_counter()

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
    """Raise unless weights moved by the mean of all ranks' gradients, which were rank + 1, at every step."""
    moved = steps * simulated.LEARNING_RATE * (world_size + 1) / 2
    for old, new in zip(before, after, strict=True):
        if not torch.allclose(old - moved, new, rtol=1e-4, atol=1e-5):
            off = float((new.detach() - old + moved).abs().max())
            raise CorruptError(f"the weights of rank {rank} are {off:g} from where the gradients of all ranks lead")


def _trainer(where: Ranks, parameters: int, watch: pl.Callback) -> pl.Trainer:
    many = where.world_size > 1
    strategy: Any = train_ranks.data_parallel(parameters) if many else "auto"
    return pl.Trainer(
        accelerator="cpu",
        devices=where.local_size,
        num_nodes=where.nodes,
        strategy=strategy,
        plugins=[RanksEnvironment() if many else LightningEnvironment()],
        max_epochs=1,
        callbacks=[watch],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
