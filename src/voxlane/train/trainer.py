"""The Lightning trainer of a run: its callbacks, precision, strategy and checkpoints."""

from __future__ import annotations

import datetime
import logging
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from voxlane.checkpoint.lightning import AsyncBucketCheckpointIO, BucketCheckpointIO, BucketModelParallelStrategy
from voxlane.distributed import gather_objects
from voxlane.train.config import TrainConfig
from voxlane.train.ranks import LauncherEnvironment, RankInfo, make_ddp_strategy
from voxlane.train.recorder import ProgressBar, Recorder
from voxlane.train.run import Run
from voxlane.train.run_setup import uses_gpu
from voxlane.train.segmenter import Segmenter

LAST, BEST = "last", "best"
OnEpoch = Callable[[dict[str, Any]], bool | None]
CUDNN_BENCHMARK_MIN_VOXELS = 2_000_000
"""Voxels on a device at once from which cuDNN times all its convolutions and takes the fastest. On an H200 that takes
12 to 17 s; smaller steps are limited by Python first."""
_LAST_STEP_KEY = "voxlane/last-step"
_PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}


class LastCheckpoint(ModelCheckpoint):
    """Saves the checkpoint to resume from: after every few epochs, after a run's last epoch, and on SIGTERM. Lightning
    calls it after all other callbacks, so it also reports the epoch to `on_epoch`.

    On SIGTERM it saves and raises SIGTERMException, on all ranks after the same step, as a preempted job must.
    Lightning's own handler communicates with the other ranks from inside the signal handler, whatever they are doing
    at that moment, and only listens to rank 0. Here any rank may receive the signal. It writes the step after its own
    as the last one to the process group's store, before it takes part in that step. No rank can be further than that,
    because the step needs all ranks.
    """

    def __init__(self, recorder: Recorder, on_epoch: OnEpoch | None, **arguments: Any) -> None:
        super().__init__(filename=LAST, **arguments)
        self._recorder = recorder
        self._on_epoch = on_epoch
        self._received_sigterm = False
        self._stop_step: int | None = None

    @property
    def state_key(self) -> str:
        """Key of this callback's state in checkpoints. It holds an older class name, so that older runs resume."""
        return super().state_key.replace(type(self).__qualname__, "_Last", 1)

    @contextmanager
    def handle_sigterm(self) -> Iterator[None]:
        """Stop on SIGTERM during the block: after the current step, or after the first if training has yet to start."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._handle_sigterm)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _handle_sigterm(self, *_: Any) -> None:
        self._received_sigterm = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop if this step is the last."""
        if not self._is_last(trainer.global_step) or batch_idx + 1 == trainer.num_training_batches:
            return  # the end of an epoch is saved anyway
        self._recorder.pause(trainer)
        trainer.save_checkpoint(f"{self.dirpath}/{LAST}.ckpt")
        raise SIGTERMException

    def _is_last(self, step: int) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._received_sigterm
        if self._stop_step is None:
            store = dist.distributed_c10d._get_default_store()
            if self._received_sigterm:
                store.compare_set(_LAST_STEP_KEY, "", str(step + 1))
            if store.check([_LAST_STEP_KEY]):
                self._stop_step = int(store.get(_LAST_STEP_KEY))
        return self._stop_step is not None and step >= self._stop_step

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if it is time to, or if the run ends here."""
        if any(gather_objects(self._received_sigterm)) and trainer.current_epoch + 1 != trainer.max_epochs:
            trainer.should_stop = True
            self._save(trainer, pl_module)
            raise SIGTERMException
        self._save(trainer, pl_module)
        if self._on_epoch is not None and any(gather_objects(bool(self._on_epoch(self._recorder.history[-1])))):
            trainer.should_stop = True
            self._save(trainer, pl_module)

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs:
            self._every_n_epochs = 1
        super().on_train_epoch_end(trainer, pl_module)


def make_trainer(
    module: Segmenter,
    run: Run,
    recorder: Recorder,
    rank_info: RankInfo,
    last_epoch: int,
    *,
    patches_at_once: int,
    validates: bool,
    progress_bar: bool,
    on_epoch: OnEpoch | None,
) -> pl.Trainer:
    """Build the trainer of one rank. It trains until `last_epoch` (exclusive)."""
    # Before the callbacks: it registers the file system through which they look up their folder.
    checkpoint_io = AsyncBucketCheckpointIO(run.config, before_save=run.check_lease)
    config = module.settings
    on_gpu = uses_gpu(config)
    is_distributed = rank_info.world_size > 1
    precision: Any = _PRECISIONS[
        config.precision if config.precision != "auto" else "bfloat16" if on_gpu else "float32"
    ]
    # Explicit, because Lightning would otherwise take variables that SLURM set as a sign of other ranks.
    plugins: list[Any] = [LauncherEnvironment() if is_distributed else LightningEnvironment()]
    parameters = sum(weights.numel() for weights in module.network.parameters())
    strategy: Any = "auto"
    if is_distributed:
        strategy = make_ddp_strategy(parameters, find_unused=config.finetune.freeze_steps is not None)
    if is_distributed and config.strategy == "fsdp":
        # One full file, as without FSDP: a run may resume on any number of ranks, with either strategy.
        strategy = BucketModelParallelStrategy(
            data_parallel_size=rank_info.world_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            store_config=run.config,
        )
        strategy.checkpoint_io = BucketCheckpointIO(run.config, before_save=run.check_lease)
    else:
        plugins.append(checkpoint_io)
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=rank_info.local_world_size,
        num_nodes=rank_info.nodes,
        strategy=strategy,
        precision=precision,
        max_epochs=last_epoch,
        limit_val_batches=None if validates else 0,
        check_val_every_n_epoch=config.validation.every_epochs,
        num_sanity_val_steps=0,
        gradient_clip_val=config.optimizer.clip_norm,
        plugins=plugins,
        callbacks=_make_callbacks(config, run, recorder, validates, progress_bar, on_epoch),
        logger=False,
        enable_progress_bar=progress_bar,
        enable_model_summary=False,
        enable_checkpointing=True,
        sync_batchnorm=on_gpu and is_distributed and config.strategy == "ddp",
        use_distributed_sampler=False,
        benchmark=on_gpu and patches_at_once * math.prod(module.patch) >= CUDNN_BENCHMARK_MIN_VOXELS,
    )
    # Lightning asks rank 0 before every step whether it received SIGTERM, which waits for the GPU. `LastCheckpoint`
    # agrees on the last step without that. Lightning 2.6 calls this private method unconditionally: it has neither a
    # hook nor a flag for it, and a loop subclass would have to be installed through private names too.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer


def _make_callbacks(
    config: TrainConfig, run: Run, recorder: Recorder, validates: bool, progress_bar: bool, on_epoch: OnEpoch | None
) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = [recorder]
    checkpoint_options: dict[str, Any] = {
        "dirpath": run.checkpoints_uri,
        "save_on_train_epoch_end": True,
        "enable_version_counter": False,
    }
    if validates:
        callbacks.append(ModelCheckpoint(filename=BEST, monitor="dice", mode="max", **checkpoint_options))
    every = config.checkpoint_every_epochs
    callbacks.append(LastCheckpoint(recorder, on_epoch, every_n_epochs=every, **checkpoint_options))
    if config.early_stop is not None:
        callbacks.append(EarlyStopping("dice", mode="max", patience=config.early_stop, check_on_train_epoch_end=False))
    if config.max_minutes is not None:
        callbacks.append(Timer(datetime.timedelta(minutes=config.max_minutes), interval="epoch", verbose=False))
    if progress_bar:
        callbacks.append(ProgressBar(recorder))
    return callbacks


@contextmanager
def quiet_loggers(level: int, *names: str) -> Iterator[None]:
    """Let the loggers show only messages of at least `level`."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, previous in zip(loggers, levels, strict=True):
            logger.setLevel(previous)


@contextmanager
def silence_lightning() -> Iterator[None]:
    """Silence Lightning's advice about loaders and devices, which voxlane chooses."""
    with quiet_loggers(logging.ERROR, "lightning.pytorch", "lightning.fabric"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        for message in (
            ".*does not have many workers.*",
            ".*Checkpoint directory.*",
            "FSDP2-wrapped module .* returned a view",  # nothing writes to the view
            # About weights with sides of one voxel or channel, whose two layouts are the same bytes.
            "Grad strides do not match bucket view strides",
            "find_unused_parameters=True was specified",  # once the encoder is not frozen any more
        ):
            warnings.filterwarnings("ignore", message=message)
        yield
