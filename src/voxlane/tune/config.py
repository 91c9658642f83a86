"""What a search is told, beside its space."""

from __future__ import annotations

import math
from typing import Literal

import pydantic

from voxlane.errors import ConfigError
from voxlane.settings import record

TRIALS = 20
"""Configurations that are tried where nobody says how many."""


@record
class TuneConfig:
    """The `tune` part of a space file."""

    trials: int | None = pydantic.Field(default=None, ge=1)
    """Configurations to try; null: 20, or every combination of a grid once."""
    search: Literal["optuna", "random", "grid"] | None = None
    """Where the next configuration comes from. optuna: near those that did well (TPE). random: anywhere. grid: every
    combination of the `grid` and `choice` values, other fields drawn at random. null: grid where the space has a
    `grid`, optuna elsewhere."""
    scheduler: Literal["asha", "none"] = "asha"
    """asha: stop a trial early where its mean Dice is not among the best 1/`reduction` of those that came as far.
    none: every trial does all its epochs."""
    folds: tuple[int, ...] | None = None
    """Folds that each trial trains, one run each; what is compared is the mean of their Dice. null: that of `fold`."""
    grace_epochs: int | None = pydantic.Field(default=None, ge=1)
    """asha: epochs that every trial may do; null: a ninth of them."""
    reduction: float = pydantic.Field(default=3.0, gt=1, le=100)
    """asha: trials are compared after grace_epochs, and each time that they have done this many times more."""
    max_concurrent: int | None = pydantic.Field(default=None, ge=1)
    """Trials at once, at most; null: as many as the cluster has room for."""
    cpus_per_trial: float | None = pydantic.Field(default=None, gt=0)
    """CPUs of a trial, over all its workers, also a fraction; null: one a worker."""
    gpus_per_trial: float | None = pydantic.Field(default=None, ge=0)
    """GPUs of a trial, over all its workers; 0.5: two trials share one. null: one a worker where the cluster has
    GPUs, none elsewhere."""
    workers_per_trial: int = pydantic.Field(default=1, ge=1)
    """Processes that share each batch of a trial (data parallel)."""
    cache: str | None = "auto"
    """A folder on every machine where its trials share what they read from the bucket. auto: below the machine's
    temporary folder where the dataset is in a bucket. null: none, or that of loader.disk_cache."""
    seed: int = pydantic.Field(default=0, ge=0)
    """Fixes what is proposed: with search=random or grid, trial N is the same one whenever it is begun."""


def grace(config: TuneConfig, epochs: int) -> int:
    """Epochs that every trial of `epochs` may do."""
    wanted = config.grace_epochs or max(1, epochs // 9)
    if wanted > epochs:
        raise ConfigError(f"tune.grace_epochs: {wanted}, and a trial has {epochs} epochs", fix="Give fewer")
    return wanted


def rungs(config: TuneConfig, epochs: int) -> list[int]:
    """Epochs after which trials are compared, and at last `epochs`; only that without a scheduler."""
    if config.scheduler == "none":
        return [epochs]
    found = []
    rung = float(grace(config, epochs))
    while rung < epochs:
        found.append(math.ceil(rung))
        rung *= config.reduction
    return [*dict.fromkeys(found), epochs]
