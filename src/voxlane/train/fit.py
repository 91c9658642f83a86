"""`fit`: the part of a run that each rank does. `train`: prepare a run and fit it on this machine.

Whatever starts the ranks (this process alone, local processes, torchrun, a cluster), each calls `fit` with the run's
URI: the run's folder holds everything else that it needs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils.data
from lightning.pytorch.utilities.exceptions import SIGTERMException

from voxlane import settings
from voxlane.checkpoint.lightning import AsyncBucketCheckpointIO
from voxlane.dataset.prefetch import ordered_prefetch
from voxlane.distributed import run_on_rank_zero
from voxlane.errors import ConfigError, NoMemoryError, ReportedError, StoppedError, VoxlaneError
from voxlane.store import StoreConfig
from voxlane.train.config import TrainConfig, resolve_network, split_batch
from voxlane.train.dataset_location import check_dataset, load_dataset
from voxlane.train.initial_weights import load_initial_weights, names_starting_anew
from voxlane.train.local_ranks import run_on_local_ranks
from voxlane.train.patch_loader import PatchLoader
from voxlane.train.ranks import RankInfo, process_group, read_job_start, read_rank_info
from voxlane.train.recorder import Recorder
from voxlane.train.run import Run, TrainedRun
from voxlane.train.run_setup import check_devices, prepare_run, uses_gpu
from voxlane.train.segmenter import Segmenter
from voxlane.train.time_limit import TimeLimit
from voxlane.train.trainer import LAST, LastCheckpoint, OnEpoch, make_trainer, silence_lightning
from voxlane.volume.case_volumes import CacheLimits, Cases
from voxlane.volume.patch_stream import PatchStream
from voxlane.volume.plan import Plan
from voxlane.volume.prepared_dataset import Prepared

RESUME_FIX = "--resume continues from the last checkpoint"


def train(
    data: str | None,
    run_uri: str,
    config_values: Mapping[str, Any] | None = None,
    store: StoreConfig | None = None,
    *,
    resume: bool = False,
    command: Sequence[str] = (),
    progress: bool | None = None,
) -> dict[str, Any]:
    """Train on the prepared dataset `data` into the folder `run_uri`; return the stall report.

    `data` may be None for a run that is resumed: it finds its dataset (`dataset_location`). If it was moved, `data` is
    its new place, which the run remembers.
    `config_values`: fields of `TrainConfig` as plain nested data, over its preset. With `resume` the run continues from
    its last checkpoint with the config it has; `config_values` may then change only fields that decide neither patches
    nor network: epochs (which stretches the schedule), max_minutes, early_stop, devices, loader, validation.
    `progress`: a bar (True) or nothing (False); by default a bar on a terminal, and otherwise a line per epoch.
    """
    rank_info = read_rank_info()
    run = Run(run_uri, store)
    resume = resume or (rank_info.is_restart and run.exists)
    loaded: list[Prepared] = []
    lease = run.open_lease(start=read_job_start())

    def prepare() -> tuple[bool, int]:
        loaded.append(load_for_start(data, run, resume=resume))
        config = prepare_run(
            loaded[0],
            run_uri,
            config_values,
            store,
            ranks=rank_info.world_size if rank_info.world_size > 1 else None,
            resume=resume,
            command=command,
            check_local_devices=True,
            lease=lease,
            print_line=partial(print, "voxlane:", file=sys.stderr, flush=True),
        )
        return resume, config.devices

    with process_group(), ExitStack() as cleanup:
        cleanup.callback(lease.release, whole_job=True)
        try:
            resume, devices = run_on_rank_zero(prepare)
        except VoxlaneError as error:
            if rank_info.rank == 0:
                raise
            raise ReportedError(str(error)) from None
        if devices > 1:
            fix = f"Saved checkpoints remain: {RESUME_FIX}"
            fit_rank = partial(fit, run_uri, store, resume, progress, lease_token=lease.token)
            report: dict[str, Any] = run_on_local_ranks(fit_rank, devices, uri=run_uri, fix=fix)
            return report
        loaded_here = loaded[0] if loaded else None
        return fit(run_uri, store, resume=resume, progress=progress, prepared=loaded_here, lease_token=lease.token)


def load_for_start(data: str | None, run: Run, *, resume: bool) -> Prepared:
    """Load the dataset of a run that starts or resumes."""
    if resume:
        return load_dataset(run, TrainedRun.load(run), data)
    if data is None:
        raise ConfigError("a new run needs the URI of a prepared dataset", uri=run.folder_uri)
    return Prepared.load(data, run.config)


def fit(
    run_uri: str,
    store: StoreConfig | None = None,
    resume: bool = False,
    progress: bool | None = None,
    *,
    until_epoch: int | None = None,
    on_epoch: OnEpoch | None = None,
    prepared: Prepared | None = None,
    lease_token: str | None = None,
) -> dict[str, Any]:
    """Do this rank's part of the run at `run_uri`; return the stall report of all ranks.

    The environment says which rank this is, as torchrun and Ray Train set it; without it there is one rank.
    `until_epoch`: stop after this many epochs of the run, though its schedule goes on. `on_epoch`: called on every rank
    with each new entry of the history, after its checkpoint was started; if it returns True on any rank, the run stops
    there with its checkpoint. `prepared`: the run's dataset, if it is loaded already. `lease_token`: of the job that
    holds the run's lease; the first rank takes it over, and gives it up at the end.
    """
    with process_group(), _hold_lease(Run(run_uri, store), lease_token) as run:
        rank_info = read_rank_info()
        trained = TrainedRun.load(run)
        config, plan = trained.config, trained.plan
        if prepared is None:
            prepared = load_dataset(run, trained)
        else:
            check_dataset(run, trained, prepared)
        check_devices(config, rank_info.local_world_size)
        last_epoch = min(config.epochs, until_epoch or config.epochs)
        history, checkpoint = _find_resume_point(run, config, last_epoch) if resume else ([], None)
        if _count_epochs(history) >= last_epoch:  # ranks saved everything, and were lost before they could report it
            if _count_epochs(history) >= config.epochs and rank_info.rank == 0:
                run.mark_done(_count_epochs(history), config.epochs)
            return dict(run.read_json("stall.json") or {})
        rank_batch = split_batch(trained.batch, rank_info.world_size)
        # By default a device computes as many patches at once as each rank had when the run started. A Dice over the
        # batch as one needs all of them.
        share_at_start = -(-trained.batch // trained.facts.get("ranks", config.devices))
        at_once = config.device_batch or (rank_batch if plan.batch_dice else share_at_start)
        training_rows, held_out_rows = _find_case_rows(run, trained, prepared)
        held_out_rows = held_out_rows[: config.validation.max_cases]
        loader = make_loader(config, plan, prepared, training_rows, rank_batch, rank_info)
        progress_bar = sys.stdout.isatty() if progress is None else progress
        with silence_lightning(), _explain_out_of_memory(config, plan):
            parts = -(-rank_batch // at_once)
            module = Segmenter(
                config,
                plan,
                trained.description,
                ranks=rank_info.world_size,
                parts=parts,
                starting_anew=names_starting_anew(trained.facts),
            )
            if checkpoint is None and trained.facts.get("init"):
                load_initial_weights(run, module.network, trained.facts["init"])
            recorder = Recorder(
                run,
                module,
                loader,
                history,
                print_epochs=progress is None and not progress_bar,
                previous_stall=run.read_json("stall.json") if checkpoint else None,
            )
            trainer = make_trainer(
                module,
                run,
                recorder,
                rank_info,
                last_epoch,
                patches_at_once=min(at_once, rank_batch),
                validates=bool(held_out_rows),
                progress_bar=progress_bar,
                on_epoch=on_epoch,
            )
            volumes = _make_volume_loader(config, loader.dataset, held_out_rows)
            last_checkpoint = next(c for c in trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint))
            with _translate_stop(run, trainer), last_checkpoint.handle_sigterm():
                trainer.fit(module, loader, volumes, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
            report = recorder.finish(trainer)
            trainer.strategy.checkpoint_io.teardown()
        if rank_info.rank == 0:
            _mark_if_done(run, trainer, _count_epochs(recorder.history), config)
        return report


def _find_case_rows(run: Run, trained: TrainedRun, prepared: Prepared) -> tuple[list[int], list[int]]:
    """Return the rows of the cases that the run trains on and of those that it holds out. They are those that the run
    started with, whatever the dataset's split is now."""
    try:
        return prepared.find_rows(trained.training_cases), prepared.find_rows(trained.held_out_cases)
    except KeyError:
        raise run.damaged_error() from None


def _mark_if_done(run: Run, trainer: pl.Trainer, epochs_done: int, config: TrainConfig) -> None:
    stopped_early = any(callback.stopped_epoch > 0 for callback in trainer.early_stopping_callbacks)
    limits = [callback for callback in trainer.callbacks if isinstance(callback, TimeLimit)]  # type: ignore[attr-defined]
    if epochs_done >= config.epochs or stopped_early:
        run.mark_done(epochs_done, config.epochs)
    elif any(limit.has_ended_run for limit in limits):
        steps = {"steps": trainer.global_step, "planned_steps": config.total_steps}
        run.mark_done(epochs_done, config.epochs, max_minutes=config.max_minutes, **steps)


@contextmanager
def _hold_lease(run: Run, token: str | None) -> Iterator[Run]:
    """Hold the run's lease on the first rank, and yield the run, which checks the lease before it writes."""
    lease = run.open_lease(token, read_job_start())
    run_on_rank_zero(lease.acquire)
    try:
        yield replace(run, lease=lease)
    finally:
        lease.release()


def _count_epochs(history: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of epochs trained, without one that the time limit cut short."""
    complete = [entry["epoch"] + 1 for entry in history if not entry.get("cut")]
    return complete[-1] if complete else 0


def _find_resume_point(run: Run, config: TrainConfig, last_epoch: int) -> tuple[list[dict[str, Any]], str | None]:
    """Return the history and the URI of the checkpoint to resume from; None: the run was stopped before its first.

    The history may be ahead of the checkpoint; `Recorder` drops such entries once Lightning has loaded the checkpoint.
    Only a history that claims all epochs is compared with the checkpoint at once.
    """

    def read_history() -> list[dict[str, Any]] | None:
        if not run.store.exists(run.key(f"checkpoints/{LAST}.ckpt")):
            return None
        history: list[dict[str, Any]] = run.read_json("history.json") or []
        if error := run.finished_error(settings.to_plain(config)):
            raise error
        return history

    history = run_on_rank_zero(read_history)
    if history is None:
        return [], None
    checkpoint = f"{run.checkpoints_uri}/{LAST}.ckpt"
    if _count_epochs(history) >= last_epoch:
        step = AsyncBucketCheckpointIO(run.config).load_checkpoint(checkpoint)["global_step"]
        history = [entry for entry in history if entry["step"] <= step]
    return history, checkpoint


def make_loader(
    config: TrainConfig, plan: Plan, prepared: Prepared, rows: Sequence[int], rank_batch: int, rank_info: RankInfo
) -> PatchLoader:
    """Return the loader of a rank's patches, `rank_batch` per step, from the cases at `rows`."""
    workers = config.loader.workers
    if workers is None:
        workers = min(8, (os.cpu_count() or 1) // (2 * rank_info.local_world_size)) if uses_gpu(config) else 0
    if rank_info.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // rank_info.local_world_size))
    stream = PatchStream(
        prepared,
        rows,
        samples=config.steps_per_epoch * (config.batch or plan.batch),
        patch=config.patch or plan.patch,
        foreground_share=config.foreground_share,
        placement=config.placement,
        seed=config.seed,
        in_flight=-(-config.loader.in_flight // max(1, workers)),
        max_gap_bytes=config.loader.max_gap_bytes,
        caching=CacheLimits(
            ram_bytes=config.loader.ram_cache_bytes // max(1, workers),
            folder=config.loader.disk_cache,
            disk_bytes=config.loader.disk_cache_bytes,
            staged=config.loader.staged,
        ),
    )
    return PatchLoader(
        stream, rank_batch, pin_memory=uses_gpu(config), num_workers=workers, persistent_workers=workers > 0
    )


@dataclass(eq=False)
class _VolumeDataset(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Whole volumes, for validation."""

    cases: Cases
    rows: Sequence[int]
    read_ahead: int
    """Number of volumes that threads read before their turn."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.read_ahead:
            yield from map(self._read, self.rows)
            return
        with ThreadPoolExecutor(self.read_ahead, thread_name_prefix="voxlane-volume") as pool:
            yield from ordered_prefetch(pool, self._read, self.rows, self.read_ahead)

    def _read(self, row: int) -> dict[str, Any]:
        image, label = self.cases.open(row).read_whole()
        return {"image": image, "label": label, "row": row}


def _make_volume_loader(config: TrainConfig, stream: Any, held_out_rows: Sequence[int]) -> Any:
    """Return a loader of whole volumes, for this rank's share of the held-out cases."""
    rank, world_size = stream.rank_and_world_size()
    # Lightning needs at least one volume on every rank; a case that two ranks predict is counted once.
    rows = held_out_rows[rank::world_size] or held_out_rows[:1]
    # Beside a GPU, cores are free to read the next volumes while it predicts.
    volumes = _VolumeDataset(stream.cases, rows, read_ahead=2 if uses_gpu(config) else 0)
    return torch.utils.data.DataLoader(volumes, batch_size=None)


@contextmanager
def _translate_stop(run: Run, trainer: pl.Trainer) -> Iterator[None]:
    """Turn the SystemExit that Lightning raises on a signal into an error, after the pending save is published."""
    try:
        yield
    except SystemExit as stop:
        trainer.strategy.checkpoint_io.teardown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning has set it to be ignored
        if isinstance(stop, SIGTERMException):
            raise StoppedError("stopped by SIGTERM", uri=run.folder_uri, fix=RESUME_FIX) from None
        interrupt = stop.__context__  # the caller's own class may say which signal it was
        raise interrupt if isinstance(interrupt, KeyboardInterrupt) else KeyboardInterrupt from None


@contextmanager
def _explain_out_of_memory(config: TrainConfig, plan: Plan) -> Iterator[None]:
    """Turn a lack of memory on the device or the machine into an error that says which settings to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        # torch has no type for a failed allocation of host memory, only this text.
        is_host_allocation = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        if not on_gpu and not is_host_allocation:
            raise
        batch, patch = config.batch or plan.batch, "x".join(map(str, config.patch or plan.patch))
        device = "the GPU" if on_gpu else "the machine"
        raise NoMemoryError(
            f"{device} ran out of memory with batch={batch} patches of {patch} and "
            f"base_features={resolve_network(config, plan).features[0]}",
            fix="Lower batch, device_batch, patch or base_features" + (", or set precision=bfloat16" if on_gpu else ""),
        ) from None
