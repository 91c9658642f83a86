"""What a run tells while it trains: the progress bar, history.json, TensorBoard and, at its end, the stall report."""

from __future__ import annotations

import hashlib
import math
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import TQDMProgressBar

from voxlane.dataset import DataLoader
from voxlane.store import Traffic
from voxlane.store.counters import traffic as add_traffic
from voxlane.train import pictures
from voxlane.train.packed import Packed
from voxlane.train.run import Run
from voxlane.train.segmenter import Segmenter, mean_dice
from voxlane.train.timing import LoaderTime, added, stall_report
from voxlane.volume.prepared import Prepared
from voxlane.volume.stream import PatchStream

_LOSS_STEPS = 10
_BAR_S = 0.1
"""Between two states of the progress bar."""


class PatchLoader(DataLoader):
    """The training loader, which knows how long it was waited for."""

    def __init__(self, stream: PatchStream, batch_size: int, **arguments: Any) -> None:
        super().__init__(stream, batch_size, collate_fn=Packed.of, **arguments)
        self.waited_s = 0.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches, None)
            finally:
                self.waited_s += time.perf_counter() - began
            if batch is None:
                return
            yield batch.opened()


class Recorder(pl.Callback):
    """Writes what happened into the run's bucket, at the end of every epoch, on rank 0."""

    def __init__(
        self,
        run: Run,
        loader: PatchLoader,
        prepared: Prepared,
        history: list[dict[str, Any]],
        *,
        validate_every: int,
        lines: bool = False,
        stall_before: dict[str, Any] | None = None,
    ) -> None:
        """`lines`: print one line an epoch. `stall_before`: the stall report of the parts before a resume."""
        self.history = history
        self._lines = lines
        self._stall_before = stall_before
        self._epoch_speed: tuple[float, float] | None = None
        self._run = run
        self._loader = loader
        self._stream: PatchStream = loader.dataset  # type: ignore[assignment]
        self._prepared = prepared
        self._before_s = history[-1]["seconds"] if history else 0.0
        self._began = self._epoch_began = time.perf_counter()
        self._epoch_waited = 0.0
        self._losses: list[torch.Tensor] = []
        self._loss_read, self._loss_read_at = math.nan, 0
        self._loss_coming: Coming | None = None
        self._module: Segmenter | None = None
        self._steps = 0
        self._patches, self._order = 0, 0
        self._before: dict[str, Any] = {}
        """Of this epoch, before the run was stopped in its middle."""
        self._validate_every = validate_every
        self._board: Board | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The clock starts here, after set-up."""
        assert isinstance(pl_module, Segmenter)
        self._module = pl_module
        pl_module.waited_s = lambda: self._loader.waited_s
        self._began = self._epoch_began = time.perf_counter()
        if trainer.is_global_zero:
            self._board = Board(self._run)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A run that was stopped in the middle of an epoch goes on there, without the start of one."""
        self._plan_validation(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Another epoch, other patches."""
        self._loader.set_epoch(trainer.current_epoch)
        self._plan_validation(trainer)
        self._epoch_began, self._epoch_waited = time.perf_counter(), self._waited_s()
        self._losses, self._loss_read_at, self._loss_coming = [], 0, None
        self._patches, self._order = 0, 0
        self._before = {}
        self._epoch_speed = None

    def _plan_validation(self, trainer: pl.Trainer) -> None:
        """The last epoch is validated, whatever the rhythm."""
        last = trainer.max_epochs is not None and trainer.current_epoch + 1 >= trainer.max_epochs
        trainer.check_val_every_n_epoch = 1 if last else self._validate_every

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss, without waiting for the device, and an account of the patches."""
        self._losses.append(outputs["loss"].detach())
        self._steps += 1
        positions = batch["position"].tolist()
        self._patches += len(positions)
        self._order += sum(mark(trainer.current_epoch, trainer.global_step, position) for position in positions)

    def speed(self) -> tuple[float, float]:
        """Patches a second over all ranks and the share of time spent waiting for them, in this epoch so far,
        without its validation."""
        if self._epoch_speed is not None:
            return self._epoch_speed
        elapsed = max(1e-9, time.perf_counter() - self._epoch_began)
        _, world_size = self._stream.rank_and_world_size()
        patches = len(self._losses) * (self._loader.batch_size or 1) * world_size
        return patches / elapsed, (self._waited_s() - self._epoch_waited) / elapsed

    def _waited_s(self) -> float:
        """Seconds that training waited for the loader: beside a GPU those of the GPU, of steps that are done."""
        prefetch = self._module.prefetch if self._module is not None else None
        return self._loader.waited_s if prefetch is None else prefetch.waits().loader_s

    @property
    def loss(self) -> float:
        """Mean over the last steps, or on a GPU over some a little earlier: it is never waited for."""
        on_gpu = bool(self._losses) and self._losses[-1].is_cuda
        if self._loss_coming is not None and self._loss_coming.here:
            self._loss_read, self._loss_coming = self._loss_coming.value, None
        if self._loss_coming is None and len(self._losses) >= self._loss_read_at + (_LOSS_STEPS if on_gpu else 1):
            self._loss_read_at = len(self._losses)
            mean = torch.stack(self._losses[-_LOSS_STEPS:]).mean()
            if on_gpu:
                self._loss_coming = Coming(mean)
            else:
                self._loss_read = float(mean)
        return self._loss_read

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validation is no part of the epoch's speed."""
        self._epoch_speed = self.speed()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One more line of history."""
        assert isinstance(pl_module, Segmenter)
        account = self._account()
        validated = bool(pl_module.validated)
        patches_per_s, wait_share = self.speed()
        by_target = mean_dice(pl_module.validated, pl_module.description.targets) if validated else None
        found = [d for d in (by_target or {}).values() if not math.isnan(d)]
        entry = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "seconds": account["seconds"],
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "loss": account["loss"],
            "dice": {t: None if math.isnan(d) else d for t, d in by_target.items()} if by_target else None,
            "mean_dice": sum(found) / len(found) if found else None,
            "patches_per_s": patches_per_s,
            "wait_share": wait_share,
            "memory_bytes": peak_memory_bytes(pl_module.device),
            "ranks": account["ranks"],
            "patches": account["patches"],
            "order": account["order"],
        }
        self.history.append(entry)
        self._write_stall(trainer, pl_module)
        if trainer.is_global_zero:
            self._run.write_json("history.json", self.history)
            assert self._board is not None
            self._board.scalars(entry)
            self._draw(pl_module, trainer.global_step)
            self._board.publish()
            if self._lines:
                print(line(entry, trainer.max_epochs), flush=True)
        pl_module.validated, pl_module.drawn = {}, []
        self._before = {}

    def _account(self) -> dict[str, Any]:
        """Of this epoch so far, over all ranks, with what was done before a stop in its middle."""
        losses = torch.stack(self._losses) if self._losses else torch.zeros(1)
        every = gathered((float(losses.mean()), self._patches, self._order))
        before, steps = self._before, len(self._losses)
        loss = sum(part[0] for part in every) / len(every)
        steps_before = before.get("steps", 0)
        if steps_before:
            loss = (before["loss"] * steps_before + loss * steps) / (steps_before + steps)
        order = int(before.get("order", "0"), 16) + sum(part[2] for part in every)
        return {
            "loss": loss,
            "steps": steps_before + steps,
            "patches": before.get("patches", 0) + sum(part[1] for part in every),
            "order": f"{order % (1 << 64):016x}",
            "ranks": len(every),
            "seconds": self._before_s + time.perf_counter() - self._began,
        }

    def pause(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """The run stops in the middle of an epoch; the next checkpoint holds what was done of it. On every rank."""
        assert isinstance(module, Segmenter)
        self._before = self._account()
        self._write_stall(trainer, module)
        if self._board is not None:
            self._board.close()

    def state_dict(self) -> dict[str, Any]:
        """Kept with the checkpoint: the epoch's account, where it is saved in the middle of one."""
        return dict(self._before)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._before = dict(state_dict)
        self._before_s = state_dict.get("seconds", self._before_s)

    def _draw(self, module: Segmenter, step: int) -> None:
        assert self._board is not None
        for drawn in module.drawn:
            case = self._prepared.case(drawn["row"])
            row = pictures.row(
                drawn["image"][0].numpy(), drawn["label"].numpy(), drawn["predicted"].numpy(), case.volume["spacing"]
            )
            self._board.picture(f"validation/{case.id}", row, step)

    def finish(self, trainer: pl.Trainer, module: Segmenter) -> dict[str, Any]:
        """Write the stall report of all ranks once more, and end; returns it. Every rank must call it."""
        report = self._write_stall(trainer, module)
        if self._board is not None:
            self._board.close()
        return report

    def _write_stall(self, trainer: pl.Trainer, module: Segmenter) -> dict[str, Any]:
        bucket_s, decode_s = self._stream.times_s
        parts = {name: watch.total() for name, watch in module.watches.items()}
        waited_s = self._loader.waited_s
        if module.prefetch is not None:
            waits = module.prefetch.waits(wait=True)
            parts["augment"], waited_s = waits.augment_s, waits.loader_s
        mine = {
            "loader": LoaderTime(waited_s, bucket_s, decode_s),
            "parts": parts,
            "traffic": self._stream.traffic(),
        }
        every = gathered(mine)
        ranks = len(every)
        mean = LoaderTime(*(sum(getattr(r["loader"], f) for r in every) / ranks for f in LoaderTime.__annotations__))
        on_gpu = module.watches["step"].device.type == "cuda"
        report = stall_report(
            time.perf_counter() - self._began,
            mean,
            {name: sum(r["parts"][name] for r in every) / ranks for name in parts},
            steps=self._steps,
            patches=self._steps * (self._loader.batch_size or 1) * ranks,
            traffic=_sum([r["traffic"] for r in every]),
            on_gpu=on_gpu,
        )
        if self._stall_before:
            report = added(self._stall_before, report, on_gpu=on_gpu)
        if trainer.is_global_zero:
            self._run.write_json("stall.json", report)
        return report


class Coming:
    """A number on its way from a GPU."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = number.to("cpu", non_blocking=True)  # into pinned memory, or it would wait
        self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    @property
    def here(self) -> bool:
        """Whether it has arrived."""
        return bool(self._copied.query())

    @property
    def value(self) -> float:
        """The number, once it is here."""
        return float(self._number)


def line(entry: dict[str, Any], epochs: int | None) -> str:
    """An epoch, for people."""
    dice = "" if entry["mean_dice"] is None else f", dice {entry['mean_dice']:.3f}"
    return (
        f"epoch {entry['epoch'] + 1} of {epochs}: loss {entry['loss']:.3f}{dice}, "
        f"{entry['patches_per_s']:.1f} patches/s, waited {entry['wait_share']:.0%}, {entry['seconds']:.0f} s"
    )


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory so far: the GPU's, or this process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gathered(mine: Any) -> list[Any]:
    """What each rank gives, by rank."""
    every: list[Any] = [mine]
    if dist.is_available() and dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    return every


def mark(epoch: int, step: int, position: int) -> int:
    """A number for a patch's part in a step. The sum over an epoch is the same on any number of ranks, and another if
    a patch is left out, taken twice or in another step."""
    return int.from_bytes(hashlib.blake2b(f"{epoch}/{step}/{position}".encode(), digest_size=8).digest())


def _sum(parts: list[Traffic]) -> Traffic:
    total = {kind: dict(fields) for kind, fields in add_traffic([]).by_kind.items()}
    for part in parts:
        for kind, fields in part.by_kind.items():
            for name, count in fields.items():
                total[kind][name] += count
    return Traffic(total)


class Board:
    """TensorBoard's event files, written here and put into the run's bucket at every `publish`."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._run = run
        self._folder = Path(tempfile.mkdtemp(prefix="voxlane-board-"))
        self._writer = SummaryWriter(str(self._folder))

    def scalars(self, entry: dict[str, Any]) -> None:
        """One epoch's numbers."""
        names = ("loss", "lr", "mean_dice", "patches_per_s", "wait_share", "memory_bytes")
        values = {name: entry[name] for name in names}
        values |= {f"dice/{target}": dice for target, dice in (entry["dice"] or {}).items()}
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, entry["step"])

    def picture(self, name: str, image: Any, step: int) -> None:
        """A picture (height, width, 3)."""
        self._writer.add_image(name, image, step, dataformats="HWC")

    def publish(self) -> None:
        """Put the event files into the bucket, whole."""
        self._writer.flush()
        for file in sorted(self._folder.iterdir()):
            self._run.write(f"tensorboard/{file.name}", file.read_bytes())

    def close(self) -> None:
        """Publish and remove what was written here."""
        self._writer.close()
        self.publish()
        shutil.rmtree(self._folder, ignore_errors=True)


class Bar(TQDMProgressBar):
    """Lightning's bar with loss, Dice, patches a second and the share of time spent waiting for data."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(refresh_rate=1)
        self._recorder = recorder
        self._drawn_at = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw it some times a second, however short the steps."""
        now = time.perf_counter()
        if now >= self._drawn_at + _BAR_S or batch_idx + 1 == trainer.num_training_batches:
            self._drawn_at = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What stands behind the bar."""
        assert isinstance(pl_module, Segmenter)
        speed, wait = self._recorder.speed()
        shown: dict[str, Any] = {"loss": f"{self._recorder.loss:.3f}"}
        if pl_module.dice is not None:  # Lightning's own copy of it would have to be read from the GPU
            shown["dice"] = f"{pl_module.dice:.3f}"
        return {**shown, "patches/s": f"{speed:.1f}", "wait": f"{wait:.0%}"}
