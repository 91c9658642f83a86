"""The scaling benchmark: the same training on more and more workers, in turn, and the same trials more and more at
once."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from voxlane.bench import scaling_ranks, scaling_trials
from voxlane.bench.launching import Launch
from voxlane.bench.scaling_data import make_prepared
from voxlane.bench.scaling_ranks import Job, RankTimes
from voxlane.bench.scaling_setting import Point, ScalingSetting, turns
from voxlane.bench.scaling_trials import Searched
from voxlane.errors import ConfigError
from voxlane.model.networks import build as build_network
from voxlane.train import config as configs
from voxlane.train.config import TrainConfig, network_for
from voxlane.train.fit import begin
from voxlane.train.ranks import bucket_mb
from voxlane.train.run import Run
from voxlane.volume.prepared import Prepared


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One repetition of a point."""

    workers: int
    batch: int
    repetition: int
    launch_s: float
    """From asking for ranks to the last one being there."""
    setup_s: float
    """simulated: from there to its first batch being asked for. real: all of rank 0's time outside of its epochs,
    saving at the end included."""
    first_s: float
    """simulated: the steps to warm up. real: the first epoch."""
    steady_s: float
    """What is measured: the steps, or epochs, after those, on the slowest rank, validation not included."""
    patches: int
    """In that time, over all ranks."""
    total_s: float
    """From asking for ranks to having them ended."""
    wait_s: float
    """Of `steady_s`, waited for patches, the mean over ranks."""
    load_1m: float
    """Processes that wanted to run on this machine, just before (its load average)."""
    steps_s: list[float] = field(default_factory=list)
    """simulated: each of those steps, on rank 0."""
    exposed_s: float | None = None
    """simulated: of `steady_s`, waited for gradients after the device had ended its part, the mean over ranks."""
    cpu_s: float | None = None
    """simulated: seconds of a processor that all ranks used in `steady_s`."""
    dice: list[tuple[float, float]] = field(default_factory=list)
    """real: (seconds of training, mean Dice) at each validation."""

    @property
    def patches_per_s(self) -> float:
        """In steady state, over all workers."""
        return self.patches / self.steady_s

    def seconds_to(self, dice: float) -> float | None:
        """real: training time until the first validation with this Dice; None: never."""
        return next((seconds for seconds, found in self.dice if found >= dice), None)


@dataclass(frozen=True)
class Outcome:
    """What a benchmark found."""

    measured: list[Measured]
    """In the order of measuring."""
    searches: list[Searched]
    """Likewise."""
    facts: dict[str, Any]
    """Of what was trained: dataset, patch, network, bytes of gradients."""


def measure(setting: ScalingSetting) -> Outcome:
    """Run the benchmark."""
    config = training_config(setting)
    with tempfile.TemporaryDirectory(prefix="voxlane-bench-") as folder:
        data = setting.data
        if not data:
            _say("making a dataset")
            data = make_prepared(Path(folder))
        prepared = Prepared.load(data, setting.store)
        with _connected(setting):
            measured = _workers(setting, config, prepared, folder) if setting.workers else []
            searches = _trials(setting, prepared, folder) if setting.trials else []
        return Outcome(measured, searches, _facts(setting, config, prepared))


def _connected(setting: ScalingSetting) -> AbstractContextManager[Any]:
    """One Ray cluster for all that follows, so that its start is no part of anything measured."""
    if setting.launcher == "local":
        return nullcontext()
    from voxlane.launch.cluster import cluster

    return cluster(setting.address)


def training_config(setting: ScalingSetting) -> TrainConfig:
    """What is trained: preset=small unless another is said."""
    ours = {"batch": "--batch or --global-batch", "batch_per_worker": "--batch", "devices": "--workers"}
    for name, flag in ours.items():
        if name in setting.said:
            raise ConfigError(f"{name}: the benchmark sets it", fix=f"Give {flag}")
    config = configs.build(_said(setting))
    if setting.real and config.epochs < 2:
        raise ConfigError("epochs: the first one is left out of what is measured", fix="Give epochs=2 or more")
    if setting.target_dice is not None and config.fold is None:
        raise ConfigError("fold: without a fold held out there is no Dice to time", fix="Give a fold")
    return config


def _said(setting: ScalingSetting) -> dict[str, Any]:
    return {"preset": "small", **setting.said}


def _workers(setting: ScalingSetting, config: TrainConfig, prepared: Prepared, folder: str) -> list[Measured]:
    measured: list[Measured] = []
    with scaling_ranks.launcher(setting) as launch:
        for repetition, point in turns(setting):
            load = os.getloadavg()[0]
            if setting.real:
                found = _train(launch, setting, prepared.uri, point, repetition, folder, load)
            else:
                found = _simulate(launch, setting, config, prepared.uri, point, repetition, load)
            _say(
                f"{point.workers} worker{'s'[: point.workers - 1]} x {point.batch} patches, repetition "
                f"{repetition + 1}: {found.patches_per_s:.1f} patches/s, "
                f"started in {found.launch_s + found.setup_s:.1f} s"
            )
            measured.append(found)
    return measured


def _simulate(
    launch: Launch,
    setting: ScalingSetting,
    config: TrainConfig,
    data: str,
    point: Point,
    repetition: int,
    load_1m: float,
) -> Measured:
    job = Job(
        point=point,
        data=data,
        config=config,
        step_s=setting.step_s(point.batch),
        warmup=setting.warmup,
        store=setting.store,
    )
    asked, began = time.time(), time.perf_counter()
    every: list[RankTimes] = launch(partial(scaling_ranks.simulate, job), workers=point.workers)
    return summed(point, repetition, every, asked=asked, total_s=time.perf_counter() - began, load_1m=load_1m)


def _train(
    launch: Launch,
    setting: ScalingSetting,
    data: str,
    point: Point,
    repetition: int,
    folder: str,
    load_1m: float,
) -> Measured:
    place = f"{(setting.run or folder).rstrip('/')}/{point.workers}-workers-{point.batch}-patches-{repetition}"
    said = {**_said(setting), "batch": point.batch * point.workers}
    begin(data, place, said, setting.store, ranks=point.workers)
    asked, began = time.time(), time.perf_counter()
    entered, left = launch(partial(scaling_ranks.train, place, setting.store), workers=point.workers)
    total_s = time.perf_counter() - began
    history: list[dict[str, Any]] = Run(place, setting.store).read_json("history.json")
    return from_history(
        point, repetition, history, launch_s=entered - asked, inside_s=left - entered, total_s=total_s, load_1m=load_1m
    )


def from_history(
    point: Point,
    repetition: int,
    history: Sequence[dict[str, Any]],
    *,
    launch_s: float,
    inside_s: float,
    total_s: float,
    load_1m: float,
) -> Measured:
    """One measurement from what a run says of its epochs; `inside_s`: of rank 0, all that it did."""
    seconds = [entry["patches"] / entry["patches_per_s"] for entry in history]  # without validation
    return Measured(
        workers=point.workers,
        batch=point.batch,
        repetition=repetition,
        launch_s=launch_s,
        setup_s=inside_s - history[-1]["seconds"],
        first_s=seconds[0],
        steady_s=sum(seconds[1:]),
        patches=sum(entry["patches"] for entry in history[1:]),
        total_s=total_s,
        wait_s=sum(entry["wait_share"] * s for entry, s in zip(history[1:], seconds[1:], strict=True)),
        load_1m=load_1m,
        dice=[(entry["seconds"], entry["mean_dice"]) for entry in history if entry["mean_dice"] is not None],
    )


def _trials(setting: ScalingSetting, prepared: Prepared, folder: str) -> list[Searched]:
    from voxlane.launch.cluster import cluster

    found = []
    with cluster(setting.address) as where:
        cpus = sum(node.cpus for node in where.nodes())
        for repetition in range(setting.repeat):
            for concurrent in setting.concurrent:
                out = f"{folder}/search-{concurrent}-{repetition}"
                found.append(scaling_trials.search(setting, prepared.uri, out, concurrent, repetition, cpus))
                _say(
                    f"{setting.trials} trials, {concurrent} at once, repetition {repetition + 1}: "
                    f"{found[-1].makespan_s:.1f} s, efficiency {found[-1].efficiency:.3f}"
                )
    return found


def summed(
    point: Point, repetition: int, every: Sequence[RankTimes], *, asked: float, total_s: float, load_1m: float
) -> Measured:
    """One measurement from what all ranks saw."""
    return Measured(
        workers=point.workers,
        batch=point.batch,
        repetition=repetition,
        launch_s=max(rank.entered for rank in every) - asked,
        setup_s=max(rank.setup_s for rank in every),
        first_s=max(rank.first_s for rank in every),
        steady_s=max(sum(rank.steps_s) for rank in every),
        patches=point.steps * point.batch * point.workers,
        total_s=total_s,
        wait_s=statistics.mean(rank.waited_s for rank in every),
        load_1m=load_1m,
        steps_s=every[0].steps_s,
        exposed_s=statistics.mean(rank.exposed_s for rank in every),
        cpu_s=sum(rank.cpu_s for rank in every),
    )


def _facts(setting: ScalingSetting, config: TrainConfig, prepared: Prepared) -> dict[str, Any]:
    import torch

    plan, description = prepared.plan, prepared.description
    network = network_for(config, plan)
    with torch.device("meta"):
        made = build_network(
            network, len(description.channels), description.outputs, deep_supervision=config.deep_supervision
        )
    parameters = sum(p.numel() for p in made.parameters())
    return {
        "data": setting.data or "made: balls in noise",
        "cases": len(prepared),
        "patch": list(config.patch or plan.patch),
        "features": list(network.features),
        "gradient_bytes": 4 * parameters,
        "bucket_mb": bucket_mb(parameters),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
