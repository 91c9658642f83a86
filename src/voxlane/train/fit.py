"""`begin`: a run's folder, checked and written once; `fit`: what every rank of it does.

Whatever starts the ranks (this process alone, local processes, torchrun, a cluster), each calls `fit` with the run's
URI: all that it needs is in the run's folder. `train` is both on this machine.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
import os
import platform
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils.data
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from voxlane import __version__, settings
from voxlane.checkpoint.lightning import AsyncBucketCheckpointIO, BucketModelParallelStrategy
from voxlane.dataset.ahead import in_order
from voxlane.dataset.cache import DiskCache
from voxlane.errors import ConfigError, NoMemoryError, RunError, StoppedError
from voxlane.model.networks import build as build_network
from voxlane.model.networks import check_patch
from voxlane.store import StoreConfig
from voxlane.train import config as configs
from voxlane.train import ranks
from voxlane.train.config import TrainConfig, network_for, share_of
from voxlane.train.ranks import Ranks, RanksEnvironment
from voxlane.train.recorder import Bar, PatchLoader, Recorder, gathered
from voxlane.train.run import Run, Trained
from voxlane.train.segmenter import Segmenter
from voxlane.train.stopping import Stopping
from voxlane.volume.cases import Caching, Cases
from voxlane.volume.grid import MLPERF
from voxlane.volume.plan import Plan
from voxlane.volume.prepared import Prepared
from voxlane.volume.stream import PatchStream

LAST, BEST = "last", "best"
Watch = Callable[[dict[str, Any]], bool | None]
SEARCHED_VOXELS = 2_000_000
"""Of a device's share of a batch, from which cuDNN tries all its convolutions and takes the fastest. On an H200 that
takes 12 to 17 s; smaller steps are short of work from Python first."""
_PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}


def train(
    data: str,
    run_uri: str,
    said: Mapping[str, Any] | None = None,
    store: StoreConfig | None = None,
    *,
    resume: bool = False,
    command: Sequence[str] = (),
    progress: bool | None = None,
) -> dict[str, Any]:
    """Train on the prepared dataset `data` into the folder `run_uri`; returns the stall report.

    `said`: fields of `TrainConfig` as plain nested data, over its preset. With `resume` the run goes on from its last
    checkpoint with the config it has; `said` may then change what decides neither patches nor network: epochs (which
    stretches the schedule), max_minutes, early_stop, devices, loader, validation. `progress`: a bar (True) or nothing
    (False); by default a bar on a terminal, and otherwise a line an epoch.
    """
    where = ranks.of_environment()
    if where.world_size == 1:
        config = begin(data, run_uri, said, store, resume=resume, command=command, here=True)
        if config.devices > 1:
            return _local_ranks(config.devices, run_uri, store, resume, progress)
        return fit(run_uri, store, resume=resume, progress=progress)
    resume = resume or (where.restarted and Run(run_uri, store).begun)

    def start() -> bool:
        begin(data, run_uri, said, store, ranks=where.world_size, resume=resume, command=command, here=True)
        return resume

    with ranks.group():
        resumed = ranks.first_does(start)
        if resumed is not None:
            return fit(run_uri, store, resume=resumed, progress=progress)
    raise SystemExit(1)  # rank 0 says why


def begin(
    data: str,
    run_uri: str,
    said: Mapping[str, Any] | None = None,
    store: StoreConfig | None = None,
    *,
    ranks: int | None = None,
    resume: bool = False,
    command: Sequence[str] = (),
    here: bool = False,
) -> TrainConfig:
    """Check all that a run on so many ranks needs, and write what they will read; one process does it, before them.

    `ranks`: their number; None: the config's `devices`. `here`: they will run on this machine, so that its devices
    are checked too.
    """
    prepared = Prepared.load(data, store)
    run = Run(run_uri, store)
    before = run.facts() if resume else None
    config = _resumed(run, prepared, said or {}) if resume else configs.build(said or {})
    if ranks is None:
        ranks = config.devices
    elif (said or {}).get("devices", 1) != 1:
        raise ConfigError(f"devices: {config.devices}, and {ranks} workers were asked for", fix="Leave devices out")
    else:
        config = dataclasses.replace(config, devices=1)
    if not resume:
        config = configs.with_batch(config, prepared.plan, ranks)
    if config.loader.disk_cache is not None:  # ranks may run elsewhere in the file system
        absolute = os.path.abspath(os.path.expanduser(config.loader.disk_cache))
        config = dataclasses.replace(config, loader=dataclasses.replace(config.loader, disk_cache=absolute))
    _check(config, prepared, ranks)
    if here:
        _check_devices(config, config.devices)
    facts = _facts(config, prepared, ranks, command)
    if before is not None:
        run.update({**before, **{k: facts[k] for k in ("config", "environment")}})
    else:
        run.create(facts)
    return config


def checked(prepared: Prepared, said: Mapping[str, Any], ranks: int = 1) -> TrainConfig:
    """The config of `said` with its batch, if it can be trained on `prepared` by so many ranks; nothing is written."""
    config = configs.with_batch(configs.build(said), prepared.plan, ranks)
    _check(config, prepared, ranks)
    return config


_FREE_ON_RESUME = (
    "epochs",
    "max_minutes",
    "early_stop",
    "devices",
    "device_batch",
    "strategy",
    "accelerator",
    "loader",
    "validation",
    "compile",
    "fused",
    "checkpoint_every_epochs",
)


def _resumed(run: Run, prepared: Prepared, said: Mapping[str, Any]) -> TrainConfig:
    trained = Trained.of(run)
    if trained.facts["data"]["fingerprint"] != prepared.digest:
        raise RunError(
            f"the run was trained on {trained.facts['data']['uri']}, which was not this dataset or has been prepared "
            "anew since",
            uri=run.where,
            fix="Give the dataset of the run, or start a new one",
        )
    before = settings.plain(trained.config)
    wanted = configs.merged(before, said)
    changed = [name for name in wanted if wanted[name] != before.get(name) and name not in _FREE_ON_RESUME]
    if changed:
        raise ConfigError(
            f"{changed[0]}: a run that is resumed keeps it", uri=run.where, fix="Leave it out, or start a new run"
        )
    return settings.build(TrainConfig, wanted)


def _check(config: TrainConfig, prepared: Prepared, ranks: int) -> None:
    """Raise for what cannot be trained, before anything is written."""
    plan = prepared.plan
    if config.preset == "mlperf" and plan.recipe != MLPERF:
        raise ConfigError(
            f"preset: mlperf is for a dataset prepared with recipe={MLPERF}, this one has recipe={plan.recipe}",
            uri=prepared.uri,
        )
    patch = config.patch or plan.patch
    check_patch(network_for(config, plan), patch)
    share_of(config.batch or plan.batch, ranks)
    prepared.split(config.fold)
    if config.loader.disk_cache is not None:
        DiskCache(config.loader.disk_cache, config.loader.disk_cache_bytes).open()
    if config.fold is None and config.early_stop is not None:
        raise ConfigError("early_stop: without a fold held out there is no Dice to stop by", fix="Give a fold")


def _check_devices(config: TrainConfig, devices: int) -> None:
    """Raise where this machine cannot do it."""
    if config.accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError("accelerator: no GPU that torch can use is here", fix="Leave it out to train on the CPU")
    if not _on_gpu(config) and config.precision not in ("auto", "float32"):
        raise ConfigError(
            f"precision: {config.precision} is for GPUs; torch's 3D convolutions in it end the process on some CPUs",
            fix="Leave it out",
        )
    gpus = torch.cuda.device_count()
    if _on_gpu(config) and devices > gpus:
        raise ConfigError(f"devices: {devices}, and {gpus} GPUs are here")


def _on_gpu(config: TrainConfig) -> bool:
    return config.accelerator == "gpu" or (config.accelerator == "auto" and torch.cuda.is_available())


def _facts(config: TrainConfig, prepared: Prepared, ranks: int, command: Sequence[str]) -> dict[str, Any]:
    """The content of run.json."""
    train_rows, held_rows = prepared.split(config.fold)
    ids = prepared.ids
    description, plan = prepared.description, prepared.plan
    with torch.device("meta"):
        network = build_network(network_for(config, plan), len(description.channels), description.outputs)
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "config": settings.plain(config),
        "plan": settings.plain(plan),
        "network": settings.plain(network_for(config, plan)),
        "description": settings.plain(description),
        "data": {"uri": prepared.uri, "name": description.name, "fingerprint": prepared.digest},
        "cases": {"train": [ids[i] for i in train_rows], "validation": [ids[i] for i in held_rows]},
        "fold": config.fold,
        "ranks": ranks,
        "parameters": sum(p.numel() for p in network.parameters()),
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """What the run runs on."""
    return {
        "voxlane": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cpu_count": os.cpu_count(),
    }


def _local_ranks(
    devices: int, run_uri: str, store: StoreConfig | None, resume: bool, progress: bool | None
) -> dict[str, Any]:
    """`fit` in one process a device of this machine."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    how = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
    )
    # What went wrong is said once, below.
    loggers = [logging.getLogger(f"torch.distributed.{name}") for name in ("elastic", "launcher")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        reports: dict[int, dict[str, Any]] = elastic_launch(how, _rank)(run_uri, store, resume, progress)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        told: Any = failure.message
        why = str(told.get("message", told) if isinstance(told, dict) else told or "it was killed").splitlines()[0]
        raise RunError(f"rank {rank} failed: {why}", uri=run_uri, fix=f"What was saved is kept: {_RESUME}") from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    return reports[0]


def _rank(run_uri: str, store: StoreConfig | None, resume: bool, progress: bool | None) -> dict[str, Any]:
    return fit(run_uri, store, resume=resume, progress=progress)


def num_workers(config: TrainConfig, local_ranks: int) -> int:
    """Loader processes of each rank, where so many share this machine."""
    if config.loader.workers is not None:
        return config.loader.workers
    return min(8, (os.cpu_count() or 1) // (2 * local_ranks)) if _on_gpu(config) else 0


class _Whole(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Whole volumes, for validation."""

    def __init__(self, cases: Cases, rows: Sequence[int], *, ahead: int = 0) -> None:
        """`ahead`: volumes that are read by threads before their turn."""
        self._cases = cases
        self._rows = rows
        self._ahead = ahead

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._ahead:
            yield from map(self._read, self._rows)
            return
        with ThreadPoolExecutor(self._ahead, thread_name_prefix="voxlane-volume") as pool:
            yield from in_order(pool, self._read, self._rows, self._ahead)

    def _read(self, row: int) -> dict[str, Any]:
        image, label = self._cases.open(row).whole()
        return {"image": image, "label": label, "row": row}


class _Data(pl.LightningDataModule):
    """Built when the process group stands, so that each rank takes its own share."""

    def __init__(self, loader: PatchLoader, held: Sequence[int], *, ahead: int) -> None:
        super().__init__()
        self._loader = loader
        self._held = held
        self._ahead = ahead

    def train_dataloader(self) -> Any:
        """Patches."""
        return self._loader

    def val_dataloader(self) -> Any:
        """Whole volumes of this rank's share of the held-out cases."""
        stream: Any = self._loader.dataset
        rank, world_size = stream.rank_and_world_size()
        # Lightning wants something of every rank; a case that two ranks predict is counted once.
        share = self._held[rank::world_size] or self._held[:1]
        return torch.utils.data.DataLoader(_Whole(stream.cases, share, ahead=self._ahead), batch_size=None)


def fit(
    run_uri: str,
    store: StoreConfig | None = None,
    *,
    resume: bool = False,
    progress: bool | None = None,
    until: int | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Do this rank's part of the run at `run_uri`; returns the stall report of all ranks.

    Which rank of how many this is, the environment says, as torchrun sets it and Ray Train does too; without it there
    is one. `until`: stop after so many epochs of the run, though its schedule goes on. `watch`: called on every rank
    with each new entry of the history, when its checkpoint is on its way; where it returns True on any, the run stops
    there with its checkpoint.
    """
    with ranks.group():
        return _fit(run_uri, store, ranks.of_environment(), resume, progress, until, watch)


def _fit(
    run_uri: str,
    store: StoreConfig | None,
    where: Ranks,
    resume: bool,
    progress: bool | None,
    until: int | None,
    watch: Watch | None,
) -> dict[str, Any]:
    run = Run(run_uri, store)
    trained = Trained.of(run)
    config, plan, description = trained.config, trained.plan, trained.description
    prepared = Prepared.load(trained.facts["data"]["uri"], store)
    if prepared.digest != trained.facts["data"]["fingerprint"]:
        raise RunError("the dataset was prepared anew after the run was begun", uri=prepared.uri, fix="Start a new run")
    rows, held = prepared.split(config.fold)
    _check_devices(config, where.local_size)
    batch = config.batch or plan.batch
    share = share_of(batch, where.world_size)
    # As many as each rank had at first; a Dice over the batch as one needs them all at once, wherever they fit.
    first_share = share if plan.batch_dice else -(-batch // trained.facts.get("ranks", config.devices))
    at_once = config.device_batch or first_share
    workers = num_workers(config, where.local_size)
    if where.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // where.local_size))
    stream = PatchStream(
        prepared,
        rows,
        samples=config.steps_per_epoch * batch,
        patch=config.patch or plan.patch,
        foreground_share=config.foreground_share,
        placement=config.placement,
        seed=config.seed,
        in_flight=-(-config.loader.in_flight // max(1, workers)),
        max_gap_bytes=config.loader.max_gap_bytes,
        caching=Caching(
            ram_bytes=config.loader.ram_cache_bytes // max(1, workers),
            folder=config.loader.disk_cache,
            disk_bytes=config.loader.disk_cache_bytes,
            staged=config.loader.staged,
        ),
    )
    loader = PatchLoader(stream, share, pin_memory=_on_gpu(config), num_workers=workers, persistent_workers=workers > 0)
    with _spoken(config, plan):
        module = Segmenter(
            config,
            plan,
            description,
            config.epochs * config.steps_per_epoch,
            ranks=where.world_size,
            parts=-(-share // at_once),
        )
    history, start = _place(run) if resume else ([], None)
    done = history[-1]["epoch"] + 1 if history else 0
    last_epoch = min(config.epochs, until or config.epochs)
    if done >= config.epochs and run.done:
        raise RunError(f"the run has done its {config.epochs} epochs", uri=run.where, fix="Give more with epochs=N")
    if done >= last_epoch:  # all of it was saved by ranks that were lost before they could say so
        if done >= config.epochs and where.rank == 0:
            run.end(done, config.epochs)
        return dict(run.read_json("stall.json") or {})
    bar = sys.stdout.isatty() if progress is None else progress
    recorder = Recorder(
        run,
        loader,
        prepared,
        history,
        validate_every=config.validation.every_epochs,
        lines=progress is None and not bar,
        stall_before=run.read_json("stall.json") if start else None,
    )
    held = held[: config.validation.max_cases]
    parameters = sum(p.numel() for p in module.network.parameters())
    with quiet(), _spoken(config, plan):
        trainer = _trainer(
            config,
            run,
            recorder,
            where,
            last_epoch,
            parameters=parameters,
            voxels=min(at_once, share) * math.prod(module.patch),
            validates=bool(held),
            progress=bar,
            watch=watch,
        )
        with _stopped(run, trainer):
            # Beside a GPU cores are free to read volumes while it predicts others.
            data = _Data(loader, held, ahead=2 if _on_gpu(config) else 0)
            trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True if start else None)
        report = recorder.finish(trainer, module)
        trainer.strategy.checkpoint_io.teardown()
    epochs = recorder.history[-1]["epoch"] + 1 if recorder.history else 0
    stopped_early = any(isinstance(c, EarlyStopping) and c.stopped_epoch > 0 for c in trainer.early_stopping_callbacks)
    if where.rank == 0 and (epochs >= config.epochs or stopped_early):
        run.end(epochs, config.epochs)
    return report


@contextmanager
def _stopped(run: Run, trainer: pl.Trainer) -> Iterator[None]:
    """Lightning ends the process by itself when it is told to stop; here it is said, and what is being saved is."""
    try:
        yield
    except SystemExit as stop:
        trainer.strategy.checkpoint_io.teardown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which Lightning has set to nothing
        if isinstance(stop, SIGTERMException):
            raise StoppedError("stopped by SIGTERM", uri=run.where, fix=_RESUME) from None
        raise KeyboardInterrupt from None


_RESUME = "--resume goes on from the last checkpoint"


def _place(run: Run) -> tuple[list[dict[str, Any]], str | None]:
    """History up to the last checkpoint, and that checkpoint."""
    where = f"{run.checkpoints}/{LAST}.ckpt"
    history = run.read_json("history.json") or []
    if not run.store.exists(run.key(f"checkpoints/{LAST}.ckpt")):
        return [], None  # stopped before its first checkpoint: from the start
    step = AsyncBucketCheckpointIO(run.config).load_checkpoint(where)["global_step"]
    return [entry for entry in history if entry["step"] <= step], where


class _Last(ModelCheckpoint):
    """The checkpoint to go on from; the epoch that a run ends with is saved whatever the rhythm. Lightning calls it
    after everything else, so it also tells of the epoch."""

    def __init__(self, recorder: Recorder, stopping: Stopping, watch: Watch | None, **how: Any) -> None:
        super().__init__(**how)
        self._recorder = recorder
        self._watch = watch
        self._stopping = stopping

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save where it is time, or the end."""
        if self._stopping.told() and trainer.current_epoch + 1 != trainer.max_epochs:
            trainer.should_stop = True
            self._save(trainer, pl_module)
            raise SIGTERMException
        self._save(trainer, pl_module)
        if self._watch is not None and any(gathered(bool(self._watch(self._recorder.history[-1])))):
            trainer.should_stop = True
            self._save(trainer, pl_module)

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs:
            self._every_n_epochs = 1
        super().on_train_epoch_end(trainer, pl_module)


def _trainer(
    config: TrainConfig,
    run: Run,
    recorder: Recorder,
    where: Ranks,
    last_epoch: int,
    *,
    parameters: int,
    voxels: int,
    validates: bool,
    progress: bool,
    watch: Watch | None,
) -> pl.Trainer:
    io = AsyncBucketCheckpointIO(run.config)  # before the callbacks, which look their folder up
    stopping = Stopping(recorder, f"{run.checkpoints}/{LAST}.ckpt")
    callbacks: list[pl.Callback] = [recorder, stopping]
    saved: dict[str, Any] = {
        "dirpath": run.checkpoints,
        "save_on_train_epoch_end": True,
        "enable_version_counter": False,
    }
    if validates:
        callbacks.append(ModelCheckpoint(filename=BEST, monitor="dice", mode="max", **saved))
    callbacks.append(
        _Last(recorder, stopping, watch, filename=LAST, every_n_epochs=config.checkpoint_every_epochs, **saved)
    )
    if config.early_stop is not None:
        callbacks.append(EarlyStopping("dice", mode="max", patience=config.early_stop, check_on_train_epoch_end=False))
    if config.max_minutes is not None:
        callbacks.append(Timer(datetime.timedelta(minutes=config.max_minutes), interval="epoch", verbose=False))
    if progress:
        callbacks.append(Bar(recorder))
    on_gpu = _on_gpu(config)
    precision: Any = _PRECISIONS[
        config.precision if config.precision != "auto" else "bfloat16" if on_gpu else "float32"
    ]
    # Said, because Lightning would otherwise take a variable that SLURM left for word of other ranks.
    plugins: list[Any] = [RanksEnvironment() if where.world_size > 1 else LightningEnvironment()]
    strategy: Any = ranks.data_parallel(parameters) if where.world_size > 1 else "auto"
    if where.world_size > 1 and config.strategy == "fsdp":
        # One whole file, as without FSDP: a run may go on on any number of ranks, and either way.
        strategy = BucketModelParallelStrategy(
            data_parallel_size=where.world_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            store_config=run.config,
        )
    else:
        plugins.append(io)
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=where.local_size,
        num_nodes=where.nodes,
        strategy=strategy,
        precision=precision,
        max_epochs=last_epoch,
        limit_val_batches=None if validates else 0,
        check_val_every_n_epoch=config.validation.every_epochs,
        num_sanity_val_steps=0,
        gradient_clip_val=config.optimizer.clip_norm,
        plugins=plugins,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=progress,
        enable_model_summary=False,
        enable_checkpointing=True,
        sync_batchnorm=on_gpu and where.world_size > 1 and config.strategy == "ddp",
        use_distributed_sampler=False,
        benchmark=on_gpu and voxels >= SEARCHED_VOXELS,
    )
    # Before every step Lightning's ranks ask rank 0 whether it was told to stop, and the GPU is waited for until they
    # know. `Stopping` agrees on that without.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning's remarks on loaders and devices, which are ours to choose, stay unsaid."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*Checkpoint directory.*")
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing writes to it
            # Of weights with sides of one voxel or channel, whose two layouts are the same bytes.
            warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _spoken(config: TrainConfig, plan: Plan) -> Iterator[None]:
    """What a user can do about a device or machine that is too small."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        # What torch says of a machine's own memory.
        if not on_gpu and isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
    else:
        return
    batch, patch = config.batch or plan.batch, "x".join(map(str, config.patch or plan.patch))
    device = "the GPU" if on_gpu else "the machine"
    raise NoMemoryError(
        f"{device} ran out of memory with batch={batch} patches of {patch} and "
        f"base_features={network_for(config, plan).features[0]}",
        fix="Lower batch, device_batch, patch or base_features" + (", or set precision=bfloat16" if on_gpu else ""),
    ) from None
