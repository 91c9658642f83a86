"""DistMIS's JSON configs, understood as voxlane's.

DistMIS has two dialects. Its TensorFlow scripts read `num_replicas`, `batch_size_per_replica`, `num_epochs`, `debug`,
and hold the searched grid in their code; its PyTorch scripts read `lr`, `epochs`, `batch_size`, `num_workers`, `nodes`,
`gpus`, `use_gpu` and, to search, `num_samples`, `cpu_per_trial`, `gpu_per_trial`. Batches are a replica's in both.
What a file leaves open is filled in as those scripts do. docs/from-distmis.md has the whole table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from voxlane.errors import ConfigError

_TENSORFLOW = frozenset({"num_replicas", "batch_size_per_replica", "num_epochs", "multi"})
_PYTORCH = frozenset({"lr", "batch_size", "nodes", "gpus", "num_workers", "use_gpu", "verbose", "multinode", "adress"})
_TRIALS = frozenset({"gpu_per_trial", "cpu_per_trial", "num_samples"})
_SHARED = frozenset({"epochs", "norm", "b2", "amsgrad", "debug"})
"""Named alike here, searched by its scripts, or of no consequence, and so at home in a file of either dialect."""
KEYS = _TENSORFLOW | _PYTORCH | _TRIALS | _SHARED
"""Every key that is understood."""

_OPTIMIZER = {"name": "adamw", "weight_decay": 0.0, "schedule": "constant", "clip_norm": None}
"""Adam at a constant rate, as DistMIS trains: AdamW without decay is Adam."""
_GRID_LR = [1e-4, 5e-4, 1e-3, 5e-3]
_GRID_NORM = ["batch", "group"]
_LR_RANGE = [1e-4, 1e-2]
_SAMPLES = 24
_NORMS = {"bn": "batch", "gn": "group", "in": "instance"}


@dataclass(frozen=True)
class Translated:
    """A config of DistMIS in our words."""

    said: dict[str, Any]
    """Config fields, nested; where it searches, some are distributions, and `tune` is among them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the command by their names there: workers, nodes, gpus_per_worker, no_progress, and address."""
    tune: dict[str, Any] = field(default_factory=dict)
    """The `tune` part of a space file."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what is not as it was."""


def is_distmis(values: Mapping[str, Any]) -> bool:
    """Whether these are the values of a DistMIS config: two keys or more that only it has. One alone is more likely a
    slip in a config of ours, and an error about it then helps more."""
    return len((_TENSORFLOW | _PYTORCH | _TRIALS) & values.keys()) >= 2


def translate(values: Mapping[str, Any], *, searching: bool = False) -> Translated:
    """The values of a DistMIS config for `voxlane train`, or with `searching` for `voxlane tune`. Fields of ours may
    stand beside its keys and go before them. ConfigError names the key of DistMIS."""
    theirs = {name: value for name, value in values.items() if name in KEYS and value is not None}
    ours = {name: value for name, value in values.items() if name not in KEYS}
    notes = [
        "an epoch is steps_per_epoch steps (250 unless said), not a pass over the cases: for DistMIS's length give "
        "steps_per_epoch=CASES/BATCH"
    ]
    said = _fields(theirs, notes, searching)
    options: dict[str, Any] = {}
    tune: dict[str, Any] = {}
    if searching:
        tune = _search(theirs, said, notes)
        address = _address(theirs, _whole("nodes", theirs.get("nodes", 1)))
        options = {} if address is None else {"address": address}
        ours = {**ours, "tune": {**tune, **_part(ours, "tune")}}
    else:
        options = _launch(theirs, said, notes)
        lost = sorted(theirs.keys() & _TRIALS)
        if lost:
            notes.append(f"{', '.join(lost)}: only voxlane tune takes {'these' if len(lost) > 1 else 'this'}")
    said = {**said, **ours, "optimizer": {**said["optimizer"], **_part(ours, "optimizer")}}
    return Translated(said, options, tune, notes)


def _part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name}: it holds fields, not {found!r}")
    return dict(found)


# -- fields --------------------------------------------------------------------------------------------------------


def _fields(theirs: Mapping[str, Any], notes: list[str], searching: bool) -> dict[str, Any]:
    """What both commands take."""
    optimizer: dict[str, Any] = dict(_OPTIMIZER)
    said: dict[str, Any] = {"optimizer": optimizer}
    tensorflow = _is_tensorflow(theirs)
    if "lr" in theirs:
        optimizer["lr"] = _value("lr", theirs["lr"], searching, _rate)
    elif not searching:
        optimizer["lr"] = 1e-3
        notes.append(
            "lr: DistMIS's script tries a grid of its own; this trains with 0.001 (`voxlane tune` has the grid)"
        )
    epochs = _either(theirs, "num_epochs", "epochs")
    if epochs is not None:
        said["epochs"] = _value(epochs, theirs[epochs], searching, _whole)
    batch = _either(theirs, "batch_size_per_replica", "batch_size")
    if batch is not None:
        said["batch_per_worker"] = _value(batch, theirs[batch], searching, _whole)
    if "norm" in theirs:
        said["norm"] = _value("norm", theirs["norm"], searching, _norm)
    if "use_gpu" in theirs:
        said["accelerator"] = "gpu" if _flag("use_gpu", theirs["use_gpu"]) else "cpu"
    if tensorflow and isinstance(said.get("batch_per_worker"), int):
        # data_parallel.py multiplies its rates by num_replicas; with the batch a replica's, that is the linear rule.
        optimizer.update(lr_scaling="linear", lr_batch=said["batch_per_worker"])
    left = sorted(theirs.keys() & {"b2", "amsgrad"})
    if left:
        notes.append(f"{' and '.join(left)}: left out, voxlane's Adam has 0.999 and no AMSGrad")
    if theirs.get("debug") is True:
        notes.append("debug: left out, progress is shown on every terminal and TensorBoard's events are always written")
    return said


def _is_tensorflow(theirs: Mapping[str, Any]) -> bool:
    return bool(_TENSORFLOW & theirs.keys())


def _either(theirs: Mapping[str, Any], *names: str) -> str | None:
    """The one of these keys that the file has."""
    there = [name for name in names if name in theirs]
    if len(there) > 1 and theirs[there[0]] != theirs[there[1]]:
        raise ConfigError(f"{' and '.join(there)} differ", fix="Leave one of them out")
    return there[0] if there else None


def _value(name: str, value: Any, searching: bool, check: Any) -> Any:
    """A value, or the grid of a list."""
    if not isinstance(value, list):
        return check(name, value)
    if not value:
        raise ConfigError(f"{name}: the list is empty", fix="Give values to try, or one value")
    if not searching:
        raise ConfigError(
            f"{name}: a list is a grid to search, not one training",
            fix="Run: voxlane tune CONFIG DATA --run OUT; or give one value",
        )
    return {"grid": [check(name, one) for one in value]}


def _rate(name: str, value: Any) -> float:
    if isinstance(value, str):  # 1e-04, which DistMIS's files write, is a number in JSON and a text in YAML
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{name}: a number above 0 is wanted, not {value!r}")
    return float(value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: a whole number from 1 is wanted, not {value!r}")
    return value


def _share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"{name}: a number from 0 is wanted, not {value!r}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: true or false is wanted, not {value!r}")
    return value


def _norm(name: str, value: Any) -> str:
    found = _NORMS.get(value, value) if isinstance(value, str) else None
    if found not in _NORMS.values():
        raise ConfigError(f"{name}: bn, gn or in is wanted, not {value!r}")
    return str(found)


# -- one training --------------------------------------------------------------------------------------------------


def _launch(theirs: Mapping[str, Any], said: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Where and how widely a training runs."""
    options: dict[str, Any] = {}
    nodes = _whole("nodes", theirs.get("nodes", 1))
    per_node = {"gpus": _whole("gpus", theirs["gpus"])} if theirs.get("gpus") else {}
    given = _either(theirs, "num_replicas", "num_workers")
    workers = _whole(given, theirs[given]) if given else nodes * per_node.get("gpus", 1)
    if given and per_node and workers != nodes * per_node["gpus"]:
        notes.append(f"{given} is {workers}, nodes x gpus {nodes * per_node['gpus']}: {given} counts, as in DistMIS")
    if workers > 1 or nodes > 1:
        options["workers"] = workers
        if "use_gpu" in theirs:
            options["gpus_per_worker"] = 1.0 if theirs["use_gpu"] else 0.0
    if nodes > 1 and workers % nodes == 0:
        options["nodes"] = nodes
    elif nodes > 1:
        notes.append(f"nodes: {workers} workers do not divide over {nodes} machines; they go where there is room")
    address = _address(theirs, nodes)
    if address is not None and options:
        options["address"] = address
    if theirs.get("verbose") == 0:
        options["no_progress"] = True
    return options


def _address(theirs: Mapping[str, Any], nodes: int) -> str | None:
    """Several machines are a cluster that runs already; on one, DistMIS's `ray start` is not needed."""
    if isinstance(theirs.get("adress"), str):
        return str(theirs["adress"])
    several = any(_flag(name, theirs[name]) for name in ("multinode", "multi") if name in theirs)
    return "auto" if several or nodes > 1 else None


# -- a search ------------------------------------------------------------------------------------------------------


def _search(theirs: Mapping[str, Any], said: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The `tune` part; what its scripts search by themselves is added to `said`."""
    optimizer = said["optimizer"]
    tune: dict[str, Any] = {"scheduler": "none"}
    notes.append("DistMIS stops no trial early, and so does this; tune.scheduler=asha does")
    if _is_tensorflow(theirs):
        optimizer.setdefault("lr", {"grid": _GRID_LR})
        said.setdefault("norm", {"grid": _GRID_NORM})
        notes.append("the grid of DistMIS's script over b2 and amsgrad is left out, voxlane has no such fields")
    elif not isinstance(optimizer.get("lr"), dict):
        optimizer["lr"] = {"loguniform": _LR_RANGE}
        notes.append("lr: DistMIS's search draws it from 0.0001 to 0.01 whatever the file says, and so does this")
    grid = any(isinstance(v, dict) and "grid" in v for v in (*said.values(), *optimizer.values()))
    samples = _whole("num_samples", theirs["num_samples"]) if "num_samples" in theirs else None
    if not grid:
        tune.update(search="random", trials=samples or _SAMPLES)
    else:
        tune["search"] = "grid"
        if samples is not None and samples > 1:
            raise ConfigError(
                f"num_samples: {samples} times the same grid, which would train the same again",
                fix="Leave it out, or vary seed: {grid: [0, 1]}",
            )
    workers = _whole("num_replicas", theirs.get("num_replicas", 1))
    if workers > 1:
        tune["workers_per_trial"] = workers
    for name, ours in (("cpu_per_trial", "cpus_per_trial"), ("gpu_per_trial", "gpus_per_trial")):
        if name in theirs:
            tune[ours] = _share(name, theirs[name])
    if theirs.get("use_gpu") is False:
        tune["gpus_per_trial"] = 0
    if "num_workers" in theirs:
        notes.append("num_workers: its search does not use it; tune.workers_per_trial=K gives each trial K workers")
    return tune
