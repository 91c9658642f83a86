"""Translate DistMIS's JSON configs to voxlane's.

DistMIS has two dialects. Its TensorFlow scripts read `num_replicas`, `batch_size_per_replica`, `num_epochs`, `debug`,
and hold the searched grid in their code; its PyTorch scripts read `lr`, `epochs`, `batch_size`, `num_workers`, `nodes`,
`gpus`, `use_gpu` and, to search, `num_samples`, `cpu_per_trial`, `gpu_per_trial`. The batch size is per replica in
both. Settings that a file leaves out get the value that those scripts use. docs/from-distmis.md has the full table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from voxlane.errors import ConfigError

_TENSORFLOW = frozenset({"num_replicas", "batch_size_per_replica", "num_epochs", "multi"})
_PYTORCH = frozenset({"lr", "batch_size", "nodes", "gpus", "num_workers", "use_gpu", "verbose", "multinode", "adress"})
_TRIALS = frozenset({"gpu_per_trial", "cpu_per_trial", "num_samples"})
_SHARED = frozenset({"epochs", "norm", "b2", "amsgrad", "debug"})
"""Keys that do not identify a file as DistMIS's, because voxlane has them too or ignores them."""
KEYS = _TENSORFLOW | _PYTORCH | _TRIALS | _SHARED
"""Every key that `translate` accepts."""

_OPTIMIZER = {"name": "adamw", "weight_decay": 0.0, "schedule": "constant", "clip_norm": None}
"""Adam at a constant rate, as DistMIS trains: AdamW without decay is Adam."""
_GRID_LR = [1e-4, 5e-4, 1e-3, 5e-3]
_GRID_NORM = ["batch", "group"]
_GRID_B2 = [0.99, 0.999]
_GRID_AMSGRAD = [True, False]
_LR_RANGE = [1e-4, 1e-2]
_SAMPLES = 24
_NORMS = {"bn": "batch", "gn": "group", "in": "instance"}


@dataclass(frozen=True)
class Translated:
    """A config of DistMIS as settings of voxlane."""

    fields: dict[str, Any]
    """Nested config fields; for a search, some are distributions, and `tune` is one of them."""
    options: dict[str, Any]
    """Options of the command by name: workers, nodes, gpus_per_worker, no_progress and address."""
    notes: list[str]
    """Sentences about differences from DistMIS."""


def is_distmis(values: Mapping[str, Any]) -> bool:
    """Return whether these are the values of a DistMIS config, which has at least two keys that voxlane does not have.
    A single one is more likely a typo in a config of voxlane, and an error about it helps more."""
    return len((_TENSORFLOW | _PYTORCH | _TRIALS) & values.keys()) >= 2


def translate(values: Mapping[str, Any], *, searching: bool = False) -> Translated:
    """Translate the values of a DistMIS config for `voxlane train`, or with `searching` for `voxlane tune`. The file
    may also hold fields of voxlane, which take precedence. ConfigError names the key of DistMIS."""
    distmis = {name: value for name, value in values.items() if name in KEYS and value is not None}
    own_fields = {name: value for name, value in values.items() if name not in KEYS}
    notes = [
        "an epoch is steps_per_epoch steps (250 by default), not a pass over the cases: for DistMIS's length give "
        "steps_per_epoch=CASES/BATCH"
    ]
    fields = _translate_fields(distmis, notes, searching)
    if searching:
        fields["tune"] = _search_settings(distmis, fields, notes)
        address = _cluster_address(distmis, _check_integer("nodes", distmis.get("nodes", 1)))
        options = {} if address is None else {"address": address}
    else:
        options = _launch_options(distmis, notes)
        if search_only := sorted(distmis.keys() & _TRIALS):
            takes = f"only voxlane tune takes {'these' if len(search_only) > 1 else 'this'}"
            notes.append(f"{', '.join(search_only)}: {takes}")
    for name in fields.keys() & {"optimizer", "tune"}:
        part = own_fields.pop(name, {})
        if not isinstance(part, Mapping):
            raise ConfigError(f"{name}: expected fields, got {part!r}")
        fields[name] |= part
    return Translated({**fields, **own_fields}, options, notes)


# -- values --------------------------------------------------------------------------------------------------------


def _first_present(distmis: Mapping[str, Any], *names: str) -> str | None:
    """Return the one of these keys that the file has, or None."""
    present = [name for name in names if name in distmis]
    if len(present) > 1 and distmis[present[0]] != distmis[present[1]]:
        raise ConfigError(f"{' and '.join(present)} differ", fix="Leave one of them out")
    return present[0] if present else None


def _require(is_valid: bool, name: str, value: Any, expected: str) -> None:
    if not is_valid:
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_rate(name: str, value: Any) -> float:
    if isinstance(value, str):  # 1e-04, which DistMIS's files write, is a number in JSON and a text in YAML
        with contextlib.suppress(ValueError):
            value = float(value)
    _require(_is_number(value) and value > 0, name, value, "a number above 0")
    return float(value)


def _check_integer(name: str, value: Any) -> int:
    _require(_is_number(value) and isinstance(value, int) and value >= 1, name, value, "an integer of at least 1")
    return int(value)


def _check_beta(name: str, value: Any) -> float:
    _require(_is_number(value) and 0 <= value < 1, name, value, "a number from 0 to less than 1")
    return float(value)


def _check_switch(name: str, value: Any) -> bool:
    _require(isinstance(value, bool), name, value, "true or false")
    return bool(value)


def _check_norm(name: str, value: Any) -> str:
    norm = _NORMS.get(value, value) if isinstance(value, str) else None
    _require(norm in _NORMS.values(), name, value, "bn, gn or in")
    return str(norm)


# -- fields --------------------------------------------------------------------------------------------------------


def _translate_fields(distmis: Mapping[str, Any], notes: list[str], searching: bool) -> dict[str, Any]:
    """Return the config fields that both commands take."""

    def read(name: str, check: Callable[[str, Any], Any]) -> Any:
        """Return a checked value, or a grid for a list."""
        value = distmis[name]
        if not isinstance(value, list):
            return check(name, value)
        if not value:
            raise ConfigError(f"{name}: the list is empty", fix="Give values to try, or one value")
        if not searching:
            raise ConfigError(
                f"{name}: a list is a grid to search, not a value to train with",
                fix="Run: voxlane tune CONFIG DATA --run OUT; or give one value",
            )
        return {"grid": [check(name, item) for item in value]}

    optimizer: dict[str, Any] = dict(_OPTIMIZER)
    fields: dict[str, Any] = {"optimizer": optimizer}
    if "lr" in distmis:
        optimizer["lr"] = read("lr", _check_rate)
    elif not searching:
        optimizer["lr"] = 1e-3
        notes.append(
            "lr: DistMIS's script tries a grid of its own; this trains with 0.001 (`voxlane tune` has the grid)"
        )
    if (epochs := _first_present(distmis, "num_epochs", "epochs")) is not None:
        fields["epochs"] = read(epochs, _check_integer)
    if (batch := _first_present(distmis, "batch_size_per_replica", "batch_size")) is not None:
        fields["batch_per_worker"] = read(batch, _check_integer)
    if "b2" in distmis:
        optimizer["b2"] = read("b2", _check_beta)
    if "amsgrad" in distmis:
        optimizer["amsgrad"] = read("amsgrad", _check_switch)
    if "norm" in distmis:
        fields["norm"] = read("norm", _check_norm)
    if "use_gpu" in distmis:
        fields["accelerator"] = "gpu" if _check_switch("use_gpu", distmis["use_gpu"]) else "cpu"
    if _TENSORFLOW & distmis.keys() and isinstance(fields.get("batch_per_worker"), int):
        # data_parallel.py multiplies its rates by num_replicas; with the batch a replica's, that is the linear rule.
        optimizer.update(lr_scaling="linear", lr_batch=fields["batch_per_worker"])
    if distmis.get("debug") is True:
        notes.append("debug: left out, progress is shown on every terminal and TensorBoard's events are always written")
    return fields


# -- one training --------------------------------------------------------------------------------------------------


def _launch_options(distmis: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the options that say where a training runs, and on how many workers."""
    options: dict[str, Any] = {}
    nodes = _check_integer("nodes", distmis.get("nodes", 1))
    gpus = _check_integer("gpus", distmis["gpus"]) if distmis.get("gpus") else None
    workers = nodes * (gpus or 1)
    if (name := _first_present(distmis, "num_replicas", "num_workers")) is not None:
        by_gpus, workers = workers, _check_integer(name, distmis[name])
        if gpus and workers != by_gpus:
            notes.append(f"{name} is {workers}, nodes x gpus {by_gpus}: {name} counts, as in DistMIS")
    if workers > 1 or nodes > 1:
        options["workers"] = workers
        if "use_gpu" in distmis:
            options["gpus_per_worker"] = 1.0 if distmis["use_gpu"] else 0.0
    if nodes > 1 and workers % nodes == 0:
        options["nodes"] = nodes
    elif nodes > 1:
        notes.append(f"nodes: {workers} workers do not divide over {nodes} machines; they run where resources are free")
    address = _cluster_address(distmis, nodes)
    if address is not None and options:
        options["address"] = address
    if distmis.get("verbose") == 0:
        options["no_progress"] = True
    return options


def _cluster_address(distmis: Mapping[str, Any], nodes: int) -> str | None:
    """Return the address of the cluster. Several machines are a cluster that runs already; one machine needs none."""
    if isinstance(distmis.get("adress"), str):
        return str(distmis["adress"])
    flags = {name: distmis[name] for name in ("multinode", "multi") if name in distmis}
    for name, value in flags.items():
        _check_switch(name, value)
    return "auto" if any(flags.values()) or nodes > 1 else None


# -- a search ------------------------------------------------------------------------------------------------------


def _search_settings(distmis: Mapping[str, Any], fields: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the `tune` part, and add the fields that DistMIS's scripts search by themselves to `fields`."""
    optimizer = fields["optimizer"]
    tune: dict[str, Any] = {"scheduler": "none"}
    notes.append("DistMIS stops no trial early, and neither does this search; tune.scheduler=asha does")
    if _TENSORFLOW & distmis.keys():
        optimizer.setdefault("lr", {"grid": _GRID_LR})
        fields.setdefault("norm", {"grid": _GRID_NORM})
        optimizer.setdefault("b2", {"grid": _GRID_B2})
        optimizer.setdefault("amsgrad", {"grid": _GRID_AMSGRAD})
    elif not isinstance(optimizer.get("lr"), dict):
        optimizer["lr"] = {"loguniform": _LR_RANGE}
        notes.append("lr: DistMIS's search draws it from 0.0001 to 0.01 whatever the file says, as this search does")
    grid = any(isinstance(v, dict) and "grid" in v for v in (*fields.values(), *optimizer.values()))
    samples = _check_integer("num_samples", distmis.get("num_samples", 1 if grid else _SAMPLES))
    if grid and samples > 1:
        raise ConfigError(
            f"num_samples: {samples} repetitions of the same grid would train the same configs again",
            fix="Leave it out, or vary seed: {grid: [0, 1]}",
        )
    tune.update({"search": "grid"} if grid else {"search": "random", "trials": samples})
    if (workers := _check_integer("num_replicas", distmis.get("num_replicas", 1))) > 1:
        tune["workers_per_trial"] = workers
    for name, own_name in (("cpu_per_trial", "cpus_per_trial"), ("gpu_per_trial", "gpus_per_trial")):
        if name in distmis:
            share = tune[own_name] = distmis[name]
            _require(_is_number(share) and share >= 0, name, share, "a number of at least 0")
    if distmis.get("use_gpu") is False:
        tune["gpus_per_trial"] = 0
    if "num_workers" in distmis:
        notes.append(
            "num_workers: DistMIS's search does not use it; tune.workers_per_trial=K gives each trial K workers"
        )
    return tune
