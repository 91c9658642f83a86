"""Told to stop by SIGTERM, as a preempted job is: every rank saves the step it is at, and ends.

Lightning's own handler sends to the other ranks from inside the signal handler, whatever they are doing at that moment,
and hears rank 0 alone. Here any rank may be told; it names the step after its own as the last, in the group's store,
before it takes part in that step. No rank can have gone further, because that step needs them all.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from voxlane.train.recorder import Recorder, gathered

_KEY = "voxlane/last-step"


class Stopping(pl.Callback):
    """Saves to `where` and raises SIGTERMException, on all ranks after the same step."""

    def __init__(self, recorder: Recorder, where: str) -> None:
        self._recorder = recorder
        self._where = where
        self._told = False
        self._last_step: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take SIGTERM over from Lightning, which puts back what was before when training ends."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, *_: Any) -> None:
        self._told = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and end if this step is the last."""
        if not self._is_last(trainer.global_step) or batch_idx + 1 == trainer.num_training_batches:
            return  # the end of an epoch is saved as always
        self._recorder.pause(trainer, pl_module)
        trainer.save_checkpoint(self._where)
        raise SIGTERMException

    def told(self) -> bool:
        """Whether any rank was told; every rank must ask."""
        return any(gathered(self._told))

    def _is_last(self, step: int) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._told
        if self._last_step is None:
            store = dist.distributed_c10d._get_default_store()
            if self._told:
                store.compare_set(_KEY, "", str(step + 1))
            if store.check([_KEY]):
                self._last_step = int(store.get(_KEY))
        return self._last_step is not None and step >= self._last_step
