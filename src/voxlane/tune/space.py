"""A space of training configs: a config file some of whose values are distributions.

    optimizer:
      lr: {loguniform: [0.0001, 0.1]}
      name: {choice: [sgd, adamw]}
    base_features: {logint: [8, 64]}
    tune: {trials: 20}

Everything wrong with it is said before anything starts. Pure: nothing here draws at random or trains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from voxlane import settings
from voxlane.errors import ConfigError
from voxlane.train import config as configs
from voxlane.train.config import TrainConfig
from voxlane.tune.config import TRIALS, TuneConfig

KINDS: Mapping[str, str] = {
    "choice": "[a, b, ...]",
    "grid": "[a, b, ...]",
    "uniform": "[low, high]",
    "loguniform": "[low, high]",
    "int": "[low, high]",
    "logint": "[low, high]",
    "quniform": "[low, high, step]",
}
"""Each kind of distribution, and what it takes. Both ends are inclusive."""
_NOT_SEARCHED = {
    "fold": "Name the folds that every trial trains in tune.folds",
    "devices": "Give tune.workers_per_trial for trials of several processes",
    "loader.disk_cache": "Give tune.cache",
}


@dataclass(frozen=True)
class Distribution:
    """The values that a field may take."""

    kind: str
    values: tuple[Any, ...]

    @property
    def listed(self) -> bool:
        """Whether it is a list of values, not a range."""
        return self.kind in ("choice", "grid")

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.kind in ("int", "logint")

    @property
    def log(self) -> bool:
        """Whether it is even over the logarithm."""
        return self.kind in ("loguniform", "logint")

    def plain(self) -> dict[str, list[Any]]:
        """As in the file."""
        return {self.kind: list(self.values)}

    def probes(self) -> list[Any]:
        """Values to check: all that are listed, or the ends of a range and one between, which is no whole number
        unless all are."""
        if self.listed:
            return list(self.values)
        low, high = self.values[:2]
        between = low + (high - low) * 0.6180339887
        if self.kind == "quniform":
            between = low + self.values[2]
        return [low, high, round(between) if self.whole else between]

    def nearest(self, value: float) -> float | int:
        """A drawn number as it is used: inside the range, on its grid, with five digits and no more, which is what
        people can read and copy."""
        low, high = self.values[:2]
        if self.whole:
            return int(min(max(round(value), low), high))
        if self.kind == "quniform":
            step = self.values[2]
            value = low + round((value - low) / step) * step
            return float(f"{min(max(value, low), high):.12g}")
        return float(min(max(float(f"{value:.5g}"), low), high))


@dataclass(frozen=True)
class Space:
    """What is searched, and what every trial shares."""

    fields: dict[str, Distribution]
    """By dotted name, in the order of the file."""
    fixed: dict[str, Any]
    """The other fields, nested."""
    tune: TuneConfig = field(default_factory=TuneConfig)
    origin: str = ""
    """The file, for errors."""

    @property
    def search(self) -> str:
        """optuna, random or grid."""
        if self.tune.search is not None:
            return self.tune.search
        return "grid" if any(d.kind == "grid" for d in self.fields.values()) else "optuna"

    def said(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The config of a trial, as plain nested values over its preset."""
        values = _copied(self.fixed)
        for name, value in params.items():
            _put(values, name, value)
        return values

    def plain(self) -> dict[str, Any]:
        """By dotted name: {kind: values}."""
        return {name: distribution.plain() for name, distribution in self.fields.items()}

    def combinations(self) -> list[dict[str, Any]]:
        """Every combination of listed values, the last field changing fastest; [{}] where none is listed."""
        names = [name for name, distribution in self.fields.items() if distribution.listed]
        return [
            dict(zip(names, values, strict=True))
            for values in itertools.product(*(self.fields[name].values for name in names))
        ]

    @property
    def trials(self) -> int:
        """How many configurations are tried."""
        if self.search != "grid":
            finite = len(self.combinations()) if all(d.listed for d in self.fields.values()) else None
            wanted = self.tune.trials or TRIALS
            return wanted if finite is None or self.tune.trials is not None else min(wanted, finite)
        return self.tune.trials or len(self.combinations())

    def probes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Trials to check before any starts: each value of `Distribution.probes` of one field, named, with the first
        one of every other."""
        first = {name: distribution.probes()[0] for name, distribution in self.fields.items()}
        for name, distribution in self.fields.items():
            for value in distribution.probes():
                yield name, {**first, name: value}

    @property
    def max_epochs(self) -> int:
        """The most epochs that a trial may do."""
        return max(configs.build(self.said(params)).epochs for _, params in self.probes())


def parse(values: Mapping[str, Any], *, origin: str = "") -> Space:
    """The space of a file's values, checked as far as it can be without the dataset; `origin` names it in errors."""
    said = dict(values)
    part = said.pop("tune", None) or {}
    if not isinstance(part, Mapping):
        raise ConfigError(f"tune: it holds fields, not {part!r}", uri=origin, fix="Write lines such as trials: 20")
    tune = settings.build(TunePart, {"tune": part}, origin=origin).tune
    fields: dict[str, Distribution] = {}
    fixed = _split(said, "", fields, origin)
    if not fields:
        raise ConfigError(
            "no field has a distribution, so there is nothing to search",
            uri=origin,
            fix="Write one such as `optimizer: {lr: {loguniform: [0.0001, 0.1]}}`",
        )
    space = Space(fields, fixed, tune, origin)
    _check_fields(space)
    space = Space({name: _as_configured(space, name) for name in fields}, fixed, tune, origin)
    _check_counts(space)
    return space


@settings.record
class TunePart:
    """So that errors name tune.FIELD."""

    tune: TuneConfig = TuneConfig()


def _split(values: Mapping[str, Any], prefix: str, fields: dict[str, Distribution], origin: str) -> dict[str, Any]:
    """The fixed part of `values`; distributions go to `fields`."""
    fixed: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            fixed[str(key)] = value
        elif found := [kind for kind in value if kind in KINDS]:
            if len(value) > 1:
                raise ConfigError(
                    f"{name}: {' and '.join(map(str, value))}", uri=origin, fix="A distribution has one of them alone"
                )
            fields[name] = distribution(name, found[0], value[found[0]], origin=origin)
        else:
            inner = _split(value, f"{name}.", fields, origin)
            if inner or not value:
                fixed[str(key)] = inner
    return fixed


def distribution(name: str, kind: str, values: Any, *, origin: str = "") -> Distribution:
    """The distribution `{kind: values}` of the field `name`, or ConfigError for one that makes no sense."""

    def refuse(what: str, fix: str = "") -> ConfigError:
        return ConfigError(f"{name}: {what}", uri=origin, fix=fix or f"Write {kind}: {KINDS[kind]}")

    if not isinstance(values, (list, tuple)):
        raise refuse(f"{kind} takes a list, not {values!r}")
    if kind in ("choice", "grid"):
        if not values:
            raise refuse(f"{kind} of no value")
        if any(values[i] in values[:i] and _same_type(values, i) for i in range(len(values))):
            raise refuse(f"{kind} names a value twice", "Name each once")
        return Distribution(kind, tuple(values))
    wanted = 3 if kind == "quniform" else 2
    if len(values) != wanted:
        raise refuse(f"{kind} of {len(values)} values")
    numbers = [_number(value) for value in values]
    if any(number is None for number in numbers):
        raise refuse(f"{kind} of {list(values)!r}, which are not all numbers")
    low, high = float(numbers[0] or 0.0), float(numbers[1] or 0.0)
    if not low < high:
        raise refuse(f"{kind} from {values[0]} to {values[1]}", "Give the lower end first")
    if kind in ("loguniform", "logint") and low <= 0:
        raise refuse(f"{kind} from {values[0]}, which has no logarithm", "Let it start above zero")
    if kind in ("int", "logint"):
        if low != int(low) or high != int(high):
            raise refuse(f"{kind} from {values[0]} to {values[1]}", "Give whole numbers, or uniform")
        return Distribution(kind, (int(low), int(high)))
    if kind == "quniform":
        step = float(numbers[2] or 0.0)
        count = (high - low) / step if step > 0 else 0.0
        if count < 1 or abs(count - round(count)) > 1e-9 * max(1.0, count):
            raise refuse(f"quniform from {values[0]} to {values[1]} in steps of {values[2]}", "Let the steps fit")
        return Distribution(kind, (low, high, step))
    return Distribution(kind, (low, high))


def _same_type(values: Any, index: int) -> bool:
    """Whether an equal value before `index` is one of the same type: 1 and true are equal, and not the same."""
    return any(values[index] == v and type(values[index]) is type(v) for v in values[:index])


def _number(value: Any) -> float | None:
    """A finite number, also as the text that YAML makes of 1e-4."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _check_fields(space: Space) -> None:
    for name in space.fields:
        for refused, fix in _NOT_SEARCHED.items():
            if name == refused:
                raise ConfigError(f"{name}: it is not searched", uri=space.origin, fix=fix)
    for name, params in space.probes():
        said = space.said(params)
        try:
            config = configs.build(said, origin=space.origin)
        except ConfigError as error:
            found = space.fields[name]
            if found.kind in ("uniform", "loguniform", "quniform") and "whole number" in str(error):
                fix = f"Write {'logint' if found.log else 'int'}"
                raise ConfigError(f"{name}: whole numbers are wanted", uri=space.origin, fix=fix) from None
            raise
        if config.devices != 1:
            raise ConfigError(
                f"devices: {config.devices}, and a trial is one process on each of its workers",
                uri=space.origin,
                fix=f"Give tune.workers_per_trial: {config.devices}",
            )
    folds = space.tune.folds
    if folds is not None and (not folds or len(set(folds)) < len(folds)):
        raise ConfigError(f"tune.folds: {list(folds)}", uri=space.origin, fix="Name each fold once, such as [0, 1, 2]")
    if folds is None and config_of(space).fold is None:
        raise ConfigError(
            "fold: null holds out no case, so that no Dice tells trials apart", uri=space.origin, fix="Give a fold"
        )


def config_of(space: Space) -> TrainConfig:
    """The config of one trial of the space: what is fixed is that of all."""
    return configs.build(space.said(next(space.probes())[1]))


def _as_configured(space: Space, name: str) -> Distribution:
    """Listed values as the config takes them, so that 1e-3, which YAML reads as text, is recorded as a number."""
    found = space.fields[name]
    if not found.listed:
        return found
    first = {n: d.probes()[0] for n, d in space.fields.items()}
    values = []
    for value in found.values:
        taken = _get(settings.plain(configs.build(space.said({**first, name: value}))), name)
        values.append(value if isinstance(value, Mapping) or isinstance(taken, Mapping) else taken)
    return Distribution(found.kind, tuple(values))


def _check_counts(space: Space) -> None:
    grids = [name for name, d in space.fields.items() if d.kind == "grid"]
    if space.search != "grid":
        if grids:
            raise ConfigError(
                f"{grids[0]}: grid values are for tune.search: grid, not {space.search}",
                uri=space.origin,
                fix="Write choice, or leave tune.search out",
            )
        return
    combinations = len(space.combinations())
    ranged = [name for name, d in space.fields.items() if not d.listed]
    if space.trials < combinations:
        raise ConfigError(
            f"tune.trials: {space.trials}, and the grid has {combinations} combinations",
            uri=space.origin,
            fix="Leave trials out to try all, or give tune.search: random",
        )
    if space.trials > combinations and not ranged:
        raise ConfigError(
            f"tune.trials: {space.trials}, and the grid has only {combinations} combinations",
            uri=space.origin,
            fix="Leave trials out, or search seed too to repeat each",
        )


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        inner = values.get(parent)
        values[parent] = values = dict(inner) if isinstance(inner, Mapping) else {}
    values[last] = value


def _get(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values
