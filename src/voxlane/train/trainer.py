"""The Lightning trainer of a run: its callbacks, precision, strategy and checkpoints."""

from __future__ import annotations

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
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from voxlane.checkpoint.lightning import AsyncBucketCheckpointIO, BucketCheckpointIO, BucketModelParallelStrategy
from voxlane.distributed import gather_objects, run_on_rank_zero
from voxlane.train.ranks import LauncherEnvironment, RankInfo, make_ddp_strategy
from voxlane.train.recorder import ProgressBar, Recorder
from voxlane.train.run import Run
from voxlane.train.run_setup import uses_gpu
from voxlane.train.segmenter import Segmenter
from voxlane.train.time_limit import TimeLimit

LAST, BEST = "last", "best"
OnEpoch = Callable[[dict[str, Any]], bool | None]
CUDNN_BENCHMARK_MIN_VOXELS = 2_000_000
"""Voxels on a device at once from which cuDNN times all its convolutions and takes the fastest. On an H200 that takes
12 to 17 s; smaller steps are limited by Python first."""
_SIGTERM, _TIME = "sigterm", "time"
_PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}


class LastCheckpoint(ModelCheckpoint):
    """Saves the checkpoint to resume from: after every few epochs, after a run's last epoch, on SIGTERM and when the
    time limit is reached. Lightning calls it after all other callbacks, so it also reports the epoch to `on_epoch`.

    On SIGTERM it saves and raises SIGTERMException, on all ranks after the same step, as a preempted job must.
    Lightning's own handler communicates with the other ranks from inside the signal handler, whatever they are doing
    at that moment, and only listens to rank 0. Here any rank may receive the signal. It writes the step after its own
    as the last one to the process group's store, before it takes part in that step. No rank can be further than that,
    because the step needs all ranks.

    The time limit, which rank 0 watches, ends the run after a step that is agreed in the same way. The epoch ends there
    with a validation, as a run's last epoch does. The checkpoint is saved before, at the step, so that a run with more
    time continues the epoch exactly.
    """

    def __init__(
        self, recorder: Recorder, on_epoch: OnEpoch | None, time_limit: TimeLimit | None, **arguments: Any
    ) -> None:
        super().__init__(filename=LAST, **arguments)
        self._recorder = recorder
        self._on_epoch = on_epoch
        self._time_limit = time_limit
        self._received_sigterm = False
        self._first_step = 0
        self._stop: tuple[int, str] | None = None
        """Last step and its cause, once the ranks agree on them."""
        self._is_saved_in_epoch = False

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
        cause = self._find_stop_cause(trainer.global_step)
        ends_epoch = batch_idx + 1 == trainer.num_training_batches  # which is saved anyway
        if cause == _SIGTERM and not ends_epoch:
            self._recorder.finish(trainer)
            self._recorder.save_in_epoch(trainer, f"{self.dirpath}/{LAST}.ckpt")
            raise SIGTERMException
        if cause == _TIME:
            assert self._time_limit is not None
            self._time_limit.has_ended_run = trainer.should_stop = True
            trainer.check_val_every_n_epoch = 1
            if not ends_epoch:
                self._recorder.save_in_epoch(trainer, f"{self.dirpath}/{LAST}.ckpt")
                self._is_saved_in_epoch = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the step, which tells apart the starts of runs in one process group."""
        super().on_train_start(trainer, pl_module)
        self._first_step = trainer.global_step

    def _find_stop_cause(self, step: int) -> str | None:
        """Return why this step is the last, the same on all ranks; None if it is not."""
        is_time_over = self._time_limit is not None and self._time_limit.is_over()
        own_cause = _SIGTERM if self._received_sigterm else _TIME if is_time_over else None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return own_cause
        if self._stop is None:
            store = dist.distributed_c10d._get_default_store()
            key = f"voxlane/last-step/{self.dirpath}/{self._first_step}"
            if own_cause == _SIGTERM or (own_cause == _TIME and dist.get_rank() == 0):
                store.compare_set(key, "", f"{step + 1} {own_cause}")
            if store.check([key]):
                last_step, _, cause = store.get(key).decode().partition(" ")
                self._stop = int(last_step), cause
        return self._stop[1] if self._stop is not None and step >= self._stop[0] else None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if it is time to, or if the run ends here."""
        is_end = trainer.current_epoch + 1 == trainer.max_epochs
        is_end = is_end or (self._time_limit is not None and self._end_in_time(trainer, self._time_limit))
        if any(gather_objects(self._received_sigterm)) and not is_end:
            trainer.should_stop = True
            self._save(trainer, pl_module)
            raise SIGTERMException
        self._save(trainer, pl_module)
        if self._on_epoch is not None and any(gather_objects(bool(self._on_epoch(self._recorder.history[-1])))):
            trainer.should_stop = True
            self._save(trainer, pl_module)

    def _end_in_time(self, trainer: pl.Trainer, limit: TimeLimit) -> bool:
        """Return whether the time limit ends the run with this epoch, also if only the validation has reached it: after
        another step the run would validate again."""
        is_validated = self._recorder.history[-1]["dice"] is not None
        if is_validated and run_on_rank_zero(limit.is_over):
            limit.has_ended_run = trainer.should_stop = True
        return limit.has_ended_run

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_saved_in_epoch:
            return  # from what is saved now, Lightning would continue with the next epoch
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
        callbacks=_make_callbacks(module, run, recorder, validates, progress_bar, on_epoch),
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
    module: Segmenter, run: Run, recorder: Recorder, validates: bool, progress_bar: bool, on_epoch: OnEpoch | None
) -> list[pl.Callback]:
    config = module.settings
    limit = None if config.max_minutes is None else TimeLimit(60 * config.max_minutes, recorder, module)
    callbacks: list[pl.Callback] = [recorder, *([limit] if limit else [])]
    checkpoint_options: dict[str, Any] = {
        "dirpath": run.checkpoints_uri,
        "save_on_train_epoch_end": True,
        "enable_version_counter": False,
    }
    if validates:
        callbacks.append(ModelCheckpoint(filename=BEST, monitor="dice", mode="max", **checkpoint_options))
    every = config.checkpoint_every_epochs
    callbacks.append(LastCheckpoint(recorder, on_epoch, limit, every_n_epochs=every, **checkpoint_options))
    if config.early_stop is not None:
        callbacks.append(EarlyStopping("dice", mode="max", patience=config.early_stop, check_on_train_epoch_end=False))
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
