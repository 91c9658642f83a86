"""The space of a search: a config file in which some values are distributions, with a section of settings.

    optimizer:
      lr: {loguniform: [0.0001, 0.1]}
      name: {choice: [sgd, adamw]}
    base_features: {logint: [8, 64]}
    tune: {trials: 20}

Every mistake in it is reported before anything starts. Pure: this module neither draws at random nor trains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pydantic

from voxlane import settings
from voxlane.errors import ConfigError
from voxlane.train import config as configs
from voxlane.train.config import TrainConfig

KINDS: Mapping[str, str] = {
    "choice": "[a, b, ...]",
    "grid": "[a, b, ...]",
    "uniform": "[low, high]",
    "loguniform": "[low, high]",
    "int": "[low, high]",
    "logint": "[low, high]",
    "quniform": "[low, high, step]",
}
"""Arguments of each kind of distribution. Both ends are inclusive."""
DEFAULT_TRIALS = 20
"""Number of configs that a search tries when `trials` is not set."""
_NOT_SEARCHED = {
    "fold": "List the folds that every trial trains in tune.folds",
    "split": "Compare all trials on one split",
    "devices": "Use tune.workers_per_trial for trials of several processes",
    "loader.disk_cache": "Use tune.cache",
}


@settings.record
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


@settings.record
class TuneSection:
    """Wraps `TuneConfig` so that errors name tune.FIELD."""

    tune: TuneConfig = TuneConfig()


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


@dataclass(frozen=True)
class Distribution:
    """The values that a field may take."""

    kind: str
    """One of `KINDS`."""
    values: tuple[Any, ...]
    """Listed values, or the ends and perhaps the step of a range."""

    @property
    def listed(self) -> bool:
        """Return whether it is a list of values, not a range."""
        return self.kind in ("choice", "grid")

    @property
    def integer(self) -> bool:
        """Return whether it is a range of integers."""
        return self.kind in ("int", "logint")

    @property
    def log(self) -> bool:
        """Return whether it is even over the logarithm."""
        return self.kind in ("loguniform", "logint")

    def probes(self) -> list[Any]:
        """Return values to check: all listed ones, or the ends of a range and a value between them, which is a fraction
        unless the range holds integers only."""
        if self.listed:
            return list(self.values)
        low, high = self.values[:2]
        between = low + (high - low) * 0.6180339887
        if self.kind == "quniform":
            between = low + self.values[2]
        return [low, high, round(between) if self.integer else between]

    def nearest(self, value: float) -> float | int:
        """Return a drawn number as trials use it: inside the range, on its grid, and with at most five digits, so that
        people can read and copy it."""
        low, high = self.values[:2]
        if self.integer:
            return int(min(max(round(value), low), high))
        if self.kind == "quniform":
            step = self.values[2]
            value = low + round((value - low) / step) * step
            return float(f"{min(max(value, low), high):.12g}")
        return float(min(max(float(f"{value:.5g}"), low), high))


@dataclass(frozen=True)
class Space:
    """The searched fields, and the fields that all trials share."""

    fields: dict[str, Distribution]
    """Searched fields by dotted name, in the order of the file."""
    fixed: dict[str, Any]
    """The other fields, nested."""
    tune: TuneConfig = field(default_factory=TuneConfig)
    """Settings of the search."""
    origin: str = ""
    """Name of the file, for errors."""

    @property
    def search(self) -> str:
        """Return optuna, random or grid."""
        if self.tune.search is not None:
            return self.tune.search
        return "grid" if any(d.kind == "grid" for d in self.fields.values()) else "optuna"

    def config_values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config of a trial as plain nested values over its preset."""
        return set_dotted(self.fixed, params)

    def plain(self) -> dict[str, Any]:
        """Return {kind: values} by dotted name."""
        return {name: {distribution.kind: list(distribution.values)} for name, distribution in self.fields.items()}

    def combinations(self) -> list[dict[str, Any]]:
        """Return every combination of listed values, the last field changing fastest; [{}] if no field is listed."""
        names = [name for name, distribution in self.fields.items() if distribution.listed]
        return [
            dict(zip(names, values, strict=True))
            for values in itertools.product(*(self.fields[name].values for name in names))
        ]

    @property
    def trials(self) -> int:
        """Return how many configs are tried."""
        if self.tune.trials is not None:
            return self.tune.trials
        if self.search == "grid":
            return len(self.combinations())
        finite = all(d.listed for d in self.fields.values())
        return min(DEFAULT_TRIALS, len(self.combinations())) if finite else DEFAULT_TRIALS

    def probes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the trials to check before any starts, each with the name of the field that it probes.

        That field takes each of its `Distribution.probes`, and every other field the first one of its own.
        """
        for name, distribution in self.fields.items():
            for value in distribution.probes():
                yield name, {**self.first_probe, name: value}

    @property
    def first_probe(self) -> dict[str, Any]:
        """Return the values of one trial, for what all trials share."""
        return {name: distribution.probes()[0] for name, distribution in self.fields.items()}

    @property
    def folds(self) -> tuple[int, ...]:
        """Return the folds that every trial trains; none if the config holds out no fold."""
        if self.tune.folds is not None:
            return self.tune.folds
        fold = self.example_config.fold
        return () if fold is None else (fold,)

    @property
    def max_epochs(self) -> int:
        """Return the most epochs that a trial may train."""
        return max(configs.build_config(self.config_values(params)).epochs for _, params in self.probes())

    @property
    def example_config(self) -> TrainConfig:
        """Return the config of one trial, for the fields that all trials share."""
        return configs.build_config(self.config_values(self.first_probe))


def parse_space(values: Mapping[str, Any], *, origin: str = "") -> Space:
    """Return the space of a file's values, checked as far as possible without the dataset; `origin` names the file in
    errors."""
    try:
        return _parse_space(dict(values), origin)
    except ConfigError as error:
        if error.uri:
            raise
        raise ConfigError(str(error), uri=origin) from None


def _parse_space(values: dict[str, Any], origin: str) -> Space:
    section = values.pop("tune", None) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"tune: expected fields, got {section!r}", fix="Write lines such as trials: 20")
    tune = settings.build(TuneSection, {"tune": section}, origin=origin).tune
    fields: dict[str, Distribution] = {}
    fixed = _split(values, "", fields)
    if not fields:
        raise ConfigError(
            "no field has a distribution, so there is nothing to search",
            fix="Add one such as `optimizer: {lr: {loguniform: [0.0001, 0.1]}}`",
        )
    space = Space(fields, fixed, tune, origin)
    _check_fields(space)
    space = replace(space, fields={name: _as_configured(space, name) for name in fields})
    _check_counts(space)
    return space


def _split(values: Mapping[str, Any], prefix: str, fields: dict[str, Distribution]) -> dict[str, Any]:
    """Return the fixed part of `values`; distributions go into `fields`."""
    fixed: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            fixed[str(key)] = value
        elif kinds := [kind for kind in value if kind in KINDS]:
            if len(value) > 1:
                raise ConfigError(f"{name}: {' and '.join(map(str, value))}", fix="A distribution has exactly one kind")
            try:
                fields[name] = _parse_distribution(kinds[0], value[kinds[0]])
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        else:
            inner = _split(value, f"{name}.", fields)
            if inner or not value:
                fixed[str(key)] = inner
    return fixed


def _parse_distribution(kind: str, values: Any) -> Distribution:
    """Return the distribution `{kind: values}`; raise ConfigError if it makes no sense."""
    distribution, usage = Distribution(kind, ()), f"Write {kind}: {KINDS[kind]}"
    if not isinstance(values, (list, tuple)):
        raise ConfigError(f"{kind} takes a list, got {values!r}", fix=usage)
    if distribution.listed:
        if not values:
            raise ConfigError(f"{kind} of no values", fix=usage)
        # 1 and true are equal, but not the same value.
        if any(a == b and type(a) is type(b) for a, b in itertools.combinations(values, 2)):
            raise ConfigError(f"{kind} lists a value twice", fix="List each value once")
        return replace(distribution, values=tuple(values))
    if len(values) != (3 if kind == "quniform" else 2):
        raise ConfigError(f"{kind} of {len(values)} values", fix=usage)
    bounds = [number for number in map(_parse_number, values) if number is not None]
    if len(bounds) < len(values):
        raise ConfigError(f"{kind} of {list(values)!r}, which are not all numbers", fix=usage)
    _check_range(distribution, values, bounds)
    return replace(distribution, values=tuple(map(int, bounds) if distribution.integer else bounds))


def _check_range(distribution: Distribution, values: Sequence[Any], bounds: Sequence[float]) -> None:
    """Raise ConfigError if a range makes no sense; `values` are its `bounds` as they were written."""
    low, high = bounds[:2]
    described = f"{distribution.kind} from {values[0]} to {values[1]}"
    if not low < high:
        raise ConfigError(described, fix="Give the lower end first")
    if distribution.log and low <= 0:
        raise ConfigError(f"{distribution.kind} from {values[0]}, which has no logarithm", fix="Start above zero")
    if distribution.integer and (low != int(low) or high != int(high)):
        raise ConfigError(described, fix="Use integers, or uniform")
    if distribution.kind == "quniform":
        count = (high - low) / bounds[2] if bounds[2] > 0 else 0.0
        if count < 1 or abs(count - round(count)) > 1e-9 * max(1.0, count):
            raise ConfigError(f"{described} in steps of {values[2]}", fix="Choose a step that divides the range")


def _parse_number(value: Any) -> float | None:
    """Return a finite number, also from the text that YAML makes of 1e-4; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _check_fields(space: Space) -> None:
    for name, fix in _NOT_SEARCHED.items():
        if name in space.fields:
            raise ConfigError(f"{name}: this field cannot be searched", fix=fix)
    for name, params in space.probes():
        try:
            config = configs.build_config(space.config_values(params), origin=space.origin)
        except ConfigError as error:
            distribution = space.fields[name]
            if distribution.kind in ("uniform", "loguniform", "quniform") and error.code.startswith("int_"):
                fix = f"Use {'logint' if distribution.log else 'int'}"
                raise ConfigError(f"{name}: expected integers, got {distribution.kind}", fix=fix) from None
            raise
        if config.devices != 1:
            raise ConfigError(
                f"devices: {config.devices}, but each worker of a trial is one process",
                fix=f"Use tune.workers_per_trial: {config.devices}",
            )
    folds = space.tune.folds
    if folds is not None and (not folds or len(set(folds)) < len(folds)):
        raise ConfigError(f"tune.folds: {list(folds)}", fix="List each fold once, such as [0, 1, 2]")
    if not space.folds:
        raise ConfigError(
            "fold: null holds out no cases, so there is no Dice to compare trials by", fix="Choose a fold"
        )


def _as_configured(space: Space, name: str) -> Distribution:
    """Return listed values as the config stores them: YAML reads 1e-3 as text, and the record has a number."""
    distribution = space.fields[name]
    if not distribution.listed:
        return distribution
    values = []
    for value in distribution.values:
        built = settings.to_plain(configs.build_config(space.config_values({**space.first_probe, name: value})))
        for part in name.split("."):
            built = built[part]
        values.append(value if isinstance(value, Mapping) or isinstance(built, Mapping) else built)
    return Distribution(distribution.kind, tuple(values))


def _check_counts(space: Space) -> None:
    grids = [name for name, d in space.fields.items() if d.kind == "grid"]
    if space.search != "grid":
        if grids:
            problem = f"{grids[0]}: grid values need tune.search: grid, got {space.search}"
            raise ConfigError(problem, fix="Use choice, or remove tune.search")
        return
    combinations = len(space.combinations())
    if space.trials < combinations:
        raise ConfigError(
            f"tune.trials: {space.trials}, but the grid has {combinations} combinations",
            fix="Remove trials to try all of them, or use tune.search: random",
        )
    if space.trials > combinations and all(d.listed for d in space.fields.values()):
        raise ConfigError(
            f"tune.trials: {space.trials}, but the grid has only {combinations} combinations",
            fix="Remove trials, or also search seed to repeat each combination",
        )


def set_dotted(values: Mapping[str, Any], dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested `values` with those of `dotted` set by their dotted names. The arguments stay as they are."""
    result = dict(values)
    for name, value in dotted.items():
        *parents, last = name.split(".")
        fields = result
        for parent in parents:
            inner = fields.get(parent)
            fields[parent] = dict(inner) if isinstance(inner, Mapping) else {}
            fields = fields[parent]
        fields[last] = value
    return result
