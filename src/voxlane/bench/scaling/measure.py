"""Run the scaling benchmark: the same training on growing numbers of workers, and the same trials with growing
concurrency."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from voxlane.bench import ranks
from voxlane.bench.ranks import Launch
from voxlane.bench.report import print_progress
from voxlane.bench.scaling import rank
from voxlane.bench.scaling.rank import RankTimes
from voxlane.bench.scaling.settings import ScalingPoint, ScalingSettings, plan_measurements
from voxlane.bench.scaling.synthetic_dataset import make_prepared
from voxlane.errors import ConfigError, TuneError
from voxlane.temporary import temporary_folder
from voxlane.train import config as configs
from voxlane.train.config import TrainConfig, resolve_network
from voxlane.train.ranks import gradient_bucket_mb
from voxlane.train.run import Run
from voxlane.train.run_setup import prepare_run
from voxlane.volume.prepared_dataset import Prepared

if TYPE_CHECKING:
    from voxlane.tune.task import Report, TrialTask

_TRIAL_EPOCHS = 5
"""Epochs of a trial of a search, which reports after each."""


@dataclass(frozen=True, kw_only=True)
class PointTimes:
    """Times of one repetition of a point."""

    workers: int
    batch: int
    repetition: int
    launch_s: float
    """Seconds from the launch until the last rank has started."""
    setup_s: float
    """simulated: seconds from there until the first batch is requested. real: seconds of rank 0 outside of its epochs,
    including the final save."""
    first_s: float
    """Seconds of the warm-up steps (simulated) or of the first epoch (real)."""
    steady_s: float
    """Seconds of the measured steps or epochs after those, on the slowest rank, without validation."""
    patches: int
    """Patches in that time, over all ranks."""
    total_s: float
    """Seconds from the launch until all ranks have ended."""
    wait_s: float
    """Seconds of `steady_s` spent waiting for patches, averaged over ranks."""
    load_1m: float
    """Load average of this machine over one minute, just before."""
    steps_s: list[float] = field(default_factory=list)
    """simulated: seconds of each measured step on rank 0."""
    exposed_s: float | None = None
    """simulated: seconds of `steady_s` spent waiting for gradients after the device had finished, averaged over
    ranks."""
    cpu_s: float | None = None
    """simulated: processor seconds of all ranks in `steady_s`."""
    dice: list[tuple[float, float]] = field(default_factory=list)
    """real: (seconds of training, mean Dice) at each validation."""

    @property
    def patches_per_s(self) -> float:
        """Patches per second in steady state, over all workers."""
        return self.patches / self.steady_s

    def seconds_to(self, dice: float) -> float | None:
        """Return the seconds of training until the first validation with this Dice, or None if it was never reached."""
        return next((seconds for seconds, reached in self.dice if reached >= dice), None)


@dataclass(frozen=True, kw_only=True)
class SearchTimes:
    """Times of one search."""

    concurrent: int
    trials: int
    repetition: int
    trial_s: float
    """Seconds of a trial without overhead."""
    makespan_s: float
    """Seconds from the start of the first trial to the end of the last."""
    first_s: float
    """Seconds from the call to the start of the first trial: checks, and the start of the first workers."""
    total_s: float
    """Seconds of the complete call, including the pages and files at its end."""
    busy_s: float
    """Sum over trials of the seconds from start to end, as the search recorded them."""

    @property
    def efficiency(self) -> float:
        """Sum of the lengths of all trials, divided by (trials at once x makespan)."""
        return self.trials * self.trial_s / (self.concurrent * self.makespan_s)

    @property
    def overhead_s(self) -> float:
        """Seconds that a trial takes beyond its own length. A last round that is not full counts as a round."""
        rounds = math.ceil(self.trials / self.concurrent)
        return self.makespan_s / rounds - self.trial_s


def measure(settings: ScalingSettings) -> tuple[list[PointTimes], list[SearchTimes], dict[str, Any]]:
    """Run the benchmark. Return the measurements of training and of searches, in order, and facts about the training:
    dataset, patch, network and bytes of gradients."""
    config = build_config(settings)
    with temporary_folder("bench") as folder:
        data = settings.data
        if not data:
            print_progress("creating a synthetic dataset")
            data = make_prepared(Path(folder))
        prepared = Prepared.load(data, settings.store)
        cluster: AbstractContextManager[Any] = nullcontext()
        if settings.launcher == "ray":
            from voxlane.cluster.ray.cluster import open_cluster

            cluster = open_cluster(settings.address)  # once for all measurements, so that its start is part of none
        with cluster:
            points = _measure_points(settings, config, prepared, folder) if settings.workers else []
            searches = _measure_searches(settings, prepared, folder) if settings.trials else []
        return points, searches, _describe_training(settings, config, prepared)


def build_config(settings: ScalingSettings) -> TrainConfig:
    """Return the training config, of preset=small unless another is given."""
    flags = {"batch": "--batch or --global-batch", "batch_per_worker": "--batch", "devices": "--workers"}
    for name, flag in flags.items():
        if name in settings.config_values:
            raise ConfigError(f"{name}: the benchmark sets it", fix=f"Give {flag}")
    config = configs.build_config(_config_values(settings))
    if settings.real and config.epochs < 2:
        raise ConfigError("epochs: the first epoch is not measured", fix="Give epochs=2 or more")
    if settings.target_dice is not None and config.fold is None:
        raise ConfigError("fold: without a held-out fold there is no Dice to time", fix="Give a fold")
    return config


def _config_values(settings: ScalingSettings) -> dict[str, Any]:
    return {"preset": "small", **settings.config_values}


def _measure_points(
    settings: ScalingSettings, config: TrainConfig, prepared: Prepared, folder: str
) -> list[PointTimes]:
    measured: list[PointTimes] = []
    launcher: AbstractContextManager[Launch] = nullcontext(ranks.launch_local)
    if settings.launcher == "ray":
        launcher = ranks.launch_on_ray(settings.address, max(settings.workers), real=settings.real)
    with launcher as launch:
        for repetition, point in plan_measurements(settings):
            name = f"{point.workers}-workers-{point.batch}-patches-{repetition}"
            run_uri = f"{(settings.run or folder).rstrip('/')}/{name}"
            load_1m = os.getloadavg()[0]
            fields = _measure_point(launch, settings, config, prepared.uri, point, run_uri)
            times = PointTimes(
                workers=point.workers, batch=point.batch, repetition=repetition, load_1m=load_1m, **fields
            )
            print_progress(
                f"{point.workers} worker{'s'[: point.workers - 1]} x {point.batch} patches, repetition "
                f"{repetition + 1}: {times.patches_per_s:.1f} patches/s, "
                f"started in {times.launch_s + times.setup_s:.1f} s"
            )
            measured.append(times)
    return measured


def _measure_point(
    launch: Launch, settings: ScalingSettings, config: TrainConfig, data: str, point: ScalingPoint, run_uri: str
) -> dict[str, Any]:
    """Train for real or simulate, and return the measured fields of PointTimes."""
    work: Callable[[], Any]
    if settings.real:
        values = {**_config_values(settings), "batch": point.batch * point.workers}
        prepare_run(data, run_uri, values, settings.store, ranks=point.workers)
        work = partial(rank.train, run_uri, settings.store)
    else:
        step_s = settings.step_s(point.batch)
        work = partial(rank.simulate, point, data, config, step_s, settings.warmup, settings.store)
    launched_at, start = time.time(), time.perf_counter()
    result = launch(work, workers=point.workers)
    total_s = time.perf_counter() - start
    if settings.real:
        entered, left = result
        history = Run(run_uri, settings.store).read_json("history.json")
        times = from_history(history, launch_s=entered - launched_at, inside_s=left - entered)
    else:
        times = combine_ranks(point, result, launched_at=launched_at)
    return {**times, "total_s": total_s}


def from_history(history: Sequence[dict[str, Any]], *, launch_s: float, inside_s: float) -> dict[str, Any]:
    """Return the fields of PointTimes from the history of a run; `inside_s` is the complete time of rank 0."""
    seconds = [entry["patches"] / entry["patches_per_s"] for entry in history]  # without validation
    return {
        "launch_s": launch_s,
        "setup_s": inside_s - history[-1]["seconds"],
        "first_s": seconds[0],
        "steady_s": sum(seconds[1:]),
        "patches": sum(entry["patches"] for entry in history[1:]),
        "wait_s": sum(entry["wait_share"] * s for entry, s in zip(history[1:], seconds[1:], strict=True)),
        "dice": [(entry["seconds"], entry["mean_dice"]) for entry in history if entry["mean_dice"] is not None],
    }


def combine_ranks(point: ScalingPoint, ranks: Sequence[RankTimes], *, launched_at: float) -> dict[str, Any]:
    """Return the fields of PointTimes from the times of all ranks."""
    return {
        "launch_s": max(rank.entered for rank in ranks) - launched_at,
        "setup_s": max(rank.setup_s for rank in ranks),
        "first_s": max(rank.first_s for rank in ranks),
        "steady_s": max(sum(rank.steps_s) for rank in ranks),
        "patches": point.steps * point.batch * point.workers,
        "wait_s": statistics.mean(rank.waited_s for rank in ranks),
        "steps_s": ranks[0].steps_s,
        "exposed_s": statistics.mean(rank.exposed_s for rank in ranks),
        "cpu_s": sum(rank.cpu_s for rank in ranks),
    }


def _measure_searches(settings: ScalingSettings, prepared: Prepared, folder: str) -> list[SearchTimes]:
    from voxlane.cluster.ray.cluster import list_nodes

    searches = []
    cpus = sum(node.cpus for node in list_nodes())
    for repetition in range(settings.repeat):
        for concurrent in settings.concurrent:
            out = f"{folder}/search-{concurrent}-{repetition}"
            searches.append(time_search(settings, prepared.uri, out, concurrent, repetition, cpus))
            print_progress(
                f"{settings.trials} trials, {concurrent} at once, repetition {repetition + 1}: "
                f"{searches[-1].makespan_s:.1f} s, efficiency {searches[-1].efficiency:.3f}"
            )
    return searches


def run_trial(seconds: float, task: TrialTask, report: Report) -> None:
    """Run a trial that waits for `seconds` in all and reports as training does."""
    started = time.perf_counter()
    epochs = task.rungs[-1]
    for epoch in range(1, epochs + 1):
        time.sleep(max(0.0, started + seconds * epoch / epochs - time.perf_counter()))
        if report(epoch, epoch / (epochs + 1)):
            return


def time_search(
    settings: ScalingSettings, data: str, out: str, concurrent: int, repetition: int, cpus: float
) -> SearchTimes:
    """Search once in the Ray cluster of this process, which has `cpus` processors, into the folder `out`."""
    from voxlane.tune.runner import tune

    values = {
        "preset": "small",
        "epochs": _TRIAL_EPOCHS,
        "optimizer": {"lr": {"loguniform": [1e-4, 1e-1]}},
        "tune": {
            "trials": settings.trials,
            "search": "random",
            "scheduler": "none",  # all of them take the same known time
            "max_concurrent": concurrent,
            "cpus_per_trial": min(1.0, cpus / concurrent),
        },
    }
    called_at, start = time.time(), time.perf_counter()
    result = tune(values, data, out, settings.store, progress=False, work=partial(run_trial, settings.trial_time_s))
    total_s = time.perf_counter() - start
    failed = [trial for trial in result.trials if trial.state != "done"]
    if failed or len(result.trials) != settings.trials:
        reason = failed[0].reason if failed else f"{len(result.trials)} trials of {settings.trials}"
        raise TuneError(f"a trial of the benchmark failed: {reason}")
    return SearchTimes(
        concurrent=concurrent,
        trials=settings.trials,
        repetition=repetition,
        trial_s=settings.trial_time_s,
        makespan_s=result.makespan_s,
        first_s=min(trial.started for trial in result.trials) - called_at,
        total_s=total_s,
        busy_s=sum((trial.ended or 0.0) - trial.started for trial in result.trials),
    )


def _describe_training(settings: ScalingSettings, config: TrainConfig, prepared: Prepared) -> dict[str, Any]:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in rank.make_network(config, prepared).parameters())
    return {
        "data": settings.data or "made: balls in noise",
        "cases": len(prepared),
        "patch": list(config.patch or prepared.plan.patch),
        "features": list(resolve_network(config, prepared.plan).features),
        "gradient_bytes": 4 * parameters,
        "bucket_mb": gradient_bucket_mb(parameters),
    }
