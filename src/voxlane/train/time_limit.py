"""The time limit of a run (`max_minutes`): how much of it is used, on which all ranks agree."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from voxlane.distributed import run_on_rank_zero
from voxlane.train.recorder import Recorder
from voxlane.train.segmenter import Segmenter

_SLACK = 0.05
"""Fraction of the limit that does not count. A slow start then leaves the learning rate of a run alone that has time
for all its steps."""
_AGREEMENTS = 128
"""Number of times that several ranks agree on the time, over the whole run."""


def used_share(elapsed_s: float, limit_s: float) -> float:
    """Return the share of the limit that is used, from 0 at the end of the slack to 1 at the limit."""
    return min(1.0, max(0.0, (elapsed_s / limit_s - _SLACK) / (1 - _SLACK)))


class TimeLimit(pl.Callback):
    """Tells the learning rate's schedule how much of the time is used, and knows when it is over.

    The time is that of all starts of the run, as the history has it. Rank 0 measures it. The other ranks take over its
    measurement after the same steps, because ranks with different learning rates would train different weights.
    """

    def __init__(self, limit_s: float, recorder: Recorder, module: Segmenter) -> None:
        self.limit_s = limit_s
        self.has_ended_run = False
        """Whether the run stopped because the time was over."""
        self._recorder = recorder
        self._module = module
        self._first_step, self._first_elapsed_s = 0, 0.0
        self._next_step = 0

    def is_over(self) -> bool:
        """Return whether the time is over by this rank's clock."""
        return self._recorder.elapsed_s >= self.limit_s

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over what earlier starts of the run have used."""
        self._first_step, self._first_elapsed_s = trainer.global_step, self._recorder.elapsed_s
        self._agree(trainer.global_step)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the validation before this epoch."""
        self._agree(trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the steps since the last agreement."""
        if trainer.global_step >= self._next_step:
            self._agree(trainer.global_step)

    def _agree(self, step: int) -> None:
        """Give the schedule rank 0's measurement, and choose the step of the next one."""

        def measure() -> tuple[float, int]:
            elapsed_s = self._recorder.elapsed_s
            step_s = (elapsed_s - self._first_elapsed_s) / max(1, step - self._first_step)
            interval_s = min(self.limit_s / _AGREEMENTS, (self.limit_s - elapsed_s) / 4)
            return used_share(elapsed_s, self.limit_s), max(1, int(interval_s / max(step_s, 1e-9)))

        self._module.used_time_share, interval = run_on_rank_zero(measure)
        self._module.set_learning_rate()
        self._next_step = step + (interval if self._module.ranks > 1 else 1)
