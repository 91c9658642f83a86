"""Record a run while it trains: the progress bar, history.json, TensorBoard and the stall report."""

from __future__ import annotations

import hashlib
import math
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from voxlane.distributed import gather_objects
from voxlane.sizes import format_plural, format_rough_duration
from voxlane.store import Traffic
from voxlane.temporary import make_temporary_folder
from voxlane.train import pictures
from voxlane.train.patch_loader import PatchLoader
from voxlane.train.run import Run
from voxlane.train.segmenter import Segmenter
from voxlane.train.timing import make_stall_report, record_event
from voxlane.volume.patch_stream import PatchStream

_LOSS_STEPS = 10
_BAR_INTERVAL_S = 0.1


class Recorder(pl.Callback):
    """Writes the run's history, stall report and TensorBoard events to its bucket at the end of every epoch."""

    def __init__(
        self,
        run: Run,
        module: Segmenter,
        loader: PatchLoader,
        history: list[dict[str, Any]],
        *,
        print_epochs: bool,
        previous_stall: dict[str, Any] | None,
    ) -> None:
        """`print_epochs`: print a line per epoch. `previous_stall`: the stall report from before a resume."""
        self.history = history
        self._print_epochs = print_epochs
        self._previous_stall = previous_stall
        self._run = run
        self._module = module
        self._loader = loader
        module.waited_s = lambda: loader.waited_s
        self._stream: PatchStream = loader.dataset
        self._previous_s = history[-1]["seconds"] if history else 0.0
        self._started_at = time.perf_counter()
        self._last_loss = math.nan
        self._steps = 0
        self._events: EventWriter | None = None
        self._reset_epoch()

    def _reset_epoch(self) -> None:
        self._epoch_started_at, self._epoch_waited_s = time.perf_counter(), self._waited_s()
        self._epoch_speed: tuple[float, float] | None = None
        self._losses: list[torch.Tensor] = []
        self._pending_loss: tuple[torch.Tensor, Any] | None = None
        """A loss that is being copied from a GPU, and an event at the end of the copy."""
        self._patches, self._order = 0, 0
        self._paused_epoch: dict[str, Any] = {}
        """Totals of this epoch from before the run was stopped in the middle of it."""

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Drop the epochs that were recorded after the checkpoint was saved, and one that the time limit cut short."""
        step = checkpoint["global_step"]
        self.history[:] = [entry for entry in self.history if entry["step"] <= step and not entry.get("cut")]
        self._previous_s = self.history[-1]["seconds"] if self.history else 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, after set-up."""
        self._started_at = self._epoch_started_at = time.perf_counter()
        if trainer.is_global_zero:
            self._events = EventWriter(self._run)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Plan validation for a run that resumes in the middle of an epoch, which has no epoch start."""
        self._plan_validation(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the epoch's totals and choose its patches."""
        self._loader.set_epoch(trainer.current_epoch)
        self._plan_validation(trainer)
        self._reset_epoch()

    def _plan_validation(self, trainer: pl.Trainer) -> None:
        """Validate after the last epoch, whatever the interval."""
        is_last = trainer.max_epochs is not None and trainer.current_epoch + 1 >= trainer.max_epochs
        trainer.check_val_every_n_epoch = 1 if is_last else self._module.settings.validation.every_epochs

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has trained and validated, over all its starts."""
        return self._previous_s + time.perf_counter() - self._started_at

    def remaining_s(self, trainer: pl.Trainer) -> float | None:
        """Estimate the seconds to the end of the run, from the steps of this start; None before the first."""
        config = self._module.settings
        if not self._steps:
            return None
        step_s = (time.perf_counter() - self._started_at) / self._steps
        remaining_s = step_s * (config.total_steps - trainer.global_step)
        limit_s = math.inf if config.max_minutes is None else 60 * config.max_minutes
        return max(0.0, min(remaining_s, limit_s - self.elapsed_s))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss, without waiting for the device, and count the patches."""
        if self._run.lease is not None:
            self._run.lease.raise_if_lost()
        self._losses.append(outputs["loss"].detach())
        self._steps += 1
        positions = batch["position"].tolist()
        self._patches += len(positions)
        self._order += sum(hash_patch(trainer.current_epoch, trainer.global_step, position) for position in positions)

    def speed(self) -> tuple[float, float]:
        """Return the patches per second over all ranks and the fraction of time spent waiting for them. Both are of
        this epoch so far, without its validation."""
        if self._epoch_speed is not None:
            return self._epoch_speed
        elapsed_s = max(1e-9, time.perf_counter() - self._epoch_started_at)
        _, world_size = self._stream.rank_and_world_size()
        patches = len(self._losses) * (self._loader.batch_size or 1) * world_size
        return patches / elapsed_s, (self._waited_s() - self._epoch_waited_s) / elapsed_s

    def _waited_s(self) -> float:
        """Return the seconds that training waited for the loader; on a GPU, those of the GPU in finished steps."""
        prefetch = self._module.prefetch
        return self._loader.waited_s if prefetch is None else prefetch.waits().loader_s

    @property
    def loss(self) -> float:
        """Mean loss of the last steps. On a GPU it may be a few steps old, because it never waits for the GPU."""
        if self._pending_loss is not None and self._pending_loss[1].query():
            self._last_loss, self._pending_loss = float(self._pending_loss[0]), None
        if self._pending_loss is None and self._losses:
            mean = torch.stack(self._losses[-_LOSS_STEPS:]).mean()
            if mean.is_cuda:
                # Into pinned memory, or it would wait.
                self._pending_loss = mean.to("cpu", non_blocking=True), record_event()
            else:
                self._last_loss = float(mean)
        return self._last_loss

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fix the epoch's speed, which does not include validation."""
        self._epoch_speed = self.speed()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Append the epoch to the history and write everything."""
        module, totals = self._module, self._epoch_totals()
        patches_per_s, wait_share = self.speed()
        entry = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "seconds": totals["seconds"],
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "loss": totals["loss"],
            "dice": module.dice_by_target,
            "mean_dice": module.mean_dice,
            "patches_per_s": patches_per_s,
            "wait_share": wait_share,
            "memory_bytes": peak_memory_bytes(module.device),
            "ranks": totals["ranks"],
            "patches": totals["patches"],
            "order": totals["order"],
            "remaining_s": self.remaining_s(trainer),
        }
        if totals["steps"] < module.settings.steps_per_epoch:
            entry["cut"] = totals["steps"]
        self.history.append(entry)
        self._write_stall(trainer)
        if trainer.is_global_zero:
            self._run.write_json("history.json", self.history)
            assert self._events is not None
            self._events.add_scalars(entry)
            for drawn in module.drawn:
                case = self._stream.prepared.case(drawn["row"])
                image, truth, predicted = drawn["image"][0].numpy(), drawn["label"].numpy(), drawn["predicted"].numpy()
                picture = pictures.draw_row(image, truth, predicted, case.volume["spacing"])
                self._events.writer.add_image(f"validation/{case.id}", picture, trainer.global_step, dataformats="HWC")
            self._events.publish()
            if self._print_epochs:
                print(format_epoch(entry, trainer.max_epochs), flush=True)
        module.dice_by_target, module.mean_dice, module.drawn = None, None, []
        self._paused_epoch = {}

    def _epoch_totals(self) -> dict[str, Any]:
        """Return the totals of this epoch so far over all ranks, including its part before a stop."""
        losses = torch.stack(self._losses) if self._losses else torch.zeros(1)
        by_rank = gather_objects((float(losses.mean()), self._patches, self._order))
        before, steps = self._paused_epoch, len(self._losses)
        loss = sum(part[0] for part in by_rank) / len(by_rank)
        steps_before = before.get("steps", 0)
        if steps_before:
            loss = (before["loss"] * steps_before + loss * steps) / (steps_before + steps)
        order = int(before.get("order", "0"), 16) + sum(part[2] for part in by_rank)
        return {
            "loss": loss,
            "steps": steps_before + steps,
            "patches": before.get("patches", 0) + sum(part[1] for part in by_rank),
            "order": f"{order % (1 << 64):016x}",
            "ranks": len(by_rank),
            "seconds": self.elapsed_s,
        }

    def save_in_epoch(self, trainer: pl.Trainer, uri: str) -> None:
        """Save a checkpoint from which the epoch continues after this step. Every rank must call it."""
        before, self._paused_epoch = self._paused_epoch, self._epoch_totals()
        trainer.save_checkpoint(uri)
        self._paused_epoch = before

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch's totals, for a checkpoint in the middle of an epoch."""
        return dict(self._paused_epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from those totals."""
        self._paused_epoch = dict(state_dict)
        self._previous_s = state_dict.get("seconds", self._previous_s)

    def finish(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Write and return the final stall report of all ranks. Every rank must call it."""
        report = self._write_stall(trainer)
        if self._events is not None:
            self._events.close()
        return report

    def _write_stall(self, trainer: pl.Trainer) -> dict[str, Any]:
        seconds = {name: watch.total() for name, watch in self._module.watches.items()}
        seconds["waited"] = self._loader.waited_s
        seconds["bucket"], seconds["decode"] = self._stream.times_s
        prefetch = self._module.prefetch
        if prefetch is not None:
            waits = prefetch.waits(wait=True)
            seconds["augment"], seconds["waited"] = waits.augment_s, waits.loader_s
        by_rank = gather_objects((seconds, self._stream.traffic().by_kind))
        ranks = len(by_rank)
        traffic = {
            kind: {name: sum(rank[1][kind][name] for rank in by_rank) for name in counts}
            for kind, counts in by_rank[0][1].items()
        }
        report = make_stall_report(
            time.perf_counter() - self._started_at,
            {name: sum(rank[0][name] for rank in by_rank) / ranks for name in seconds},
            self._previous_stall,
            steps=self._steps,
            patches=self._steps * (self._loader.batch_size or 1) * ranks,
            traffic=Traffic(traffic),
            on_gpu=prefetch is not None,
        )
        if trainer.is_global_zero:
            self._run.write_json("stall.json", report)
        return report


def format_epoch(entry: dict[str, Any], epochs: int | None) -> str:
    """Format an entry of the history as a line."""
    cut = f", cut after {format_plural(entry['cut'], 'step')}" if entry.get("cut") else ""
    dice = "" if entry["mean_dice"] is None else f", dice {entry['mean_dice']:.3f}"
    left_s = 0.0 if cut else entry.get("remaining_s") or 0.0
    left = f", about {format_rough_duration(left_s)} left" if left_s > 0 else ""
    return (
        f"epoch {entry['epoch'] + 1} of {epochs}{cut}: loss {entry['loss']:.3f}{dice}, "
        f"{entry['patches_per_s']:.1f} patches/s, waited {entry['wait_share']:.0%}, {entry['seconds']:.0f} s{left}"
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far, of the GPU or else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def hash_patch(epoch: int, step: int, position: int) -> int:
    """Return a number for a patch's part in a step. Its sum over an epoch is the same on any number of ranks, and
    changes if a patch is skipped, repeated or moved to another step."""
    return int.from_bytes(hashlib.blake2b(f"{epoch}/{step}/{position}".encode(), digest_size=8).digest())


class EventWriter:
    """Writes TensorBoard event files to a local folder, and copies them to the run's bucket at every `publish`."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._run = run
        self._folder = Path(make_temporary_folder("board"))
        self.writer = SummaryWriter(str(self._folder))

    def add_scalars(self, entry: dict[str, Any]) -> None:
        """Add the numbers of one epoch."""
        names = ("loss", "lr", "mean_dice", "patches_per_s", "wait_share", "memory_bytes")
        values = {name: entry[name] for name in names}
        values |= {f"dice/{target}": dice for target, dice in (entry["dice"] or {}).items()}
        for name, value in values.items():
            if value is not None:
                self.writer.add_scalar(name, value, entry["step"])

    def publish(self) -> None:
        """Copy the event files to the bucket."""
        self.writer.flush()
        for file in sorted(self._folder.iterdir()):
            self._run.write_bytes(f"tensorboard/{file.name}", file.read_bytes())

    def close(self) -> None:
        """Publish, and remove the local folder."""
        self.writer.close()
        self.publish()
        shutil.rmtree(self._folder, ignore_errors=True)


class ProgressBar(TQDMProgressBar):
    """Lightning's bar with loss, Dice, patches per second and the fraction of time spent waiting for data."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(refresh_rate=1)
        self._recorder = recorder
        self._drawn_at = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Redraw at most ten times a second, however short the steps are."""
        now = time.perf_counter()
        if now >= self._drawn_at + _BAR_INTERVAL_S or batch_idx + 1 == trainer.num_training_batches:
            self._drawn_at = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the values to show behind the bar."""
        assert isinstance(pl_module, Segmenter)
        speed, wait = self._recorder.speed()
        metrics: dict[str, Any] = {"loss": f"{self._recorder.loss:.3f}"}
        if pl_module.dice is not None:  # Lightning's own copy of it would have to be read from the GPU
            metrics["dice"] = f"{pl_module.dice:.3f}"
        metrics |= {"patches/s": f"{speed:.1f}", "wait": f"{wait:.0%}"}
        left_s = self._recorder.remaining_s(trainer)
        return metrics if left_s is None else {**metrics, "left": format_rough_duration(left_s)}
