"""Settings of a search, apart from its space."""

from __future__ import annotations

import math
from typing import Literal

import pydantic

from voxlane.errors import ConfigError
from voxlane.settings import record

DEFAULT_TRIALS = 20
"""Number of configs that a search tries when `trials` is not set."""


@record
class TuneConfig:
    """The `tune` section of a space file."""

    trials: int | None = pydantic.Field(default=None, ge=1)
    """Number of configs to try; null: 20, or every combination of a grid once."""
    search: Literal["optuna", "random", "grid"] | None = None
    """Source of the next config. optuna: near the configs that scored well (TPE). random: anywhere in the space. grid:
    every combination of the `grid` and `choice` values, with the other fields drawn at random. null: grid if the space
    has a `grid`, otherwise optuna."""
    scheduler: Literal["asha", "none"] = "asha"
    """asha: stop a trial early if its mean Dice is not among the best 1/`reduction` of the trials that came as far.
    none: every trial trains all its epochs."""
    folds: tuple[int, ...] | None = None
    """Folds that each trial trains, one run per fold; trials are compared by the mean of their Dice. null: the config's
    `fold`."""
    grace_epochs: int | None = pydantic.Field(default=None, ge=1)
    """asha: number of epochs that every trial may train; null: a ninth of the trial's epochs."""
    reduction: float = pydantic.Field(default=3.0, gt=1, le=100)
    """asha: trials are compared after grace_epochs, and again each time their epochs have grown by this factor."""
    max_concurrent: int | None = pydantic.Field(default=None, ge=1)
    """Maximum number of concurrent trials; null: as many as fit on the cluster."""
    cpus_per_trial: float | None = pydantic.Field(default=None, gt=0)
    """CPUs of a trial, over all its workers; may be a fraction. null: one per worker."""
    gpus_per_trial: float | None = pydantic.Field(default=None, ge=0)
    """GPUs of a trial, over all its workers; 0.5: two trials share a GPU. null: one per worker if the cluster has GPUs,
    otherwise none."""
    workers_per_trial: int = pydantic.Field(default=1, ge=1)
    """Number of processes that share each batch of a trial (data parallel)."""
    cache: str | None = "auto"
    """Folder on every machine in which its trials share what they read from the bucket. auto: below the machine's
    temporary folder if the dataset is in a bucket. null: none, or that of loader.disk_cache."""
    seed: int = pydantic.Field(default=0, ge=0)
    """Seed of the proposed configs. With search=random or grid, trial N always has the same config."""


def grace_epochs(config: TuneConfig, epochs: int) -> int:
    """Return the number of epochs that every trial of `epochs` may train."""
    grace = config.grace_epochs or max(1, epochs // 9)
    if grace > epochs:
        raise ConfigError(
            f"tune.grace_epochs: {grace}, but a trial has only {epochs} epochs", fix=f"Use {epochs} or less"
        )
    return grace


def rungs(config: TuneConfig, epochs: int) -> list[int]:
    """Return the epochs after which trials are compared, followed by `epochs`; without a scheduler only `epochs`."""
    if config.scheduler == "none":
        return [epochs]
    compared = []
    rung = float(grace_epochs(config, epochs))
    while rung < epochs:
        compared.append(math.ceil(rung))
        rung *= config.reduction
    return [*dict.fromkeys(compared), epochs]
