"""Names under which Dataflux's checkpoint benchmarks take their settings: environment variables and flags.

Its multi-node and simulated benchmarks are set by environment variables, also in their JobSets; its single-node
benchmark by flags. `fill_settings` translates both to fields of `CheckpointSettings`. A flag of voxlane's own wins over
a name of Dataflux's, and a flag over a variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from voxlane.bench.field_types import Positive
from voxlane.bench.report import in_job
from voxlane.errors import ConfigError, UsageError
from voxlane.settings import PathOrUri, record

STRATEGY_NAMES = {"dataflux_fsdp": "voxlane", "fsspec_fsdp": "fsspec", "fsdp": "filesystem"}
"""Strategies of the multi-node benchmark, and voxlane's for them."""
_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "df_lightning": {"strategy": ("voxlane",)},
    "async_df_lightning": {"strategy": ("voxlane",), "use_async": True},
    "no_lightning": {"strategy": ("voxlane",)},
    "no_df": {"strategy": ("fsspec",)},
}
"""Settings for each --checkpoint of the single-node benchmark, besides the format."""


@record
class DatafluxOptions:
    """Flags of Dataflux's checkpoint benchmarks, for which voxlane has other names."""

    flag_group: ClassVar[str] = "Options of Dataflux's benchmarks"

    ckpt_dir_path: PathOrUri = ""
    """The same as --dir."""
    steps: Positive | None = None
    """Number of saves and of loads, for --saves and --loads."""
    checkpoint: Literal["df_lightning", "async_df_lightning", "no_df", "no_lightning"] | None = None
    """Sets --format single and the strategy: fsspec for no_df, voxlane for the others (with --async for
    async_df_lightning)."""
    distributed_filesystem: bool = False
    """Check that the strategy is filesystem (fsdp)."""
    project: str = ""
    """Has no effect: buckets are found without a project."""


@dataclass(frozen=True)
class JobNode:
    """One node of a JobSet of Dataflux's benchmarks."""

    index: int
    """Number of this node, from 0."""
    count: int
    """Number of nodes."""
    address: str
    """Host name of the first node, and port."""


def find_node() -> JobNode | None:
    """Return the node that this process is, if COORDINATOR_ADDRESS says that it is part of a JobSet and no launcher has
    made it a rank already."""
    if in_job() or not os.environ.get("COORDINATOR_ADDRESS"):
        return None
    count = _read_count("NUM_NODES") or _read_count("WORLD_SIZE") or _read_count("PROCESSES_IN_JOB") or 1
    indices = [_read_index("JOB_INDEX"), _read_index("JOB_COMPLETION_INDEX")]
    index = indices[0] * (_read_count("PROCESSES_IN_JOB") or 1) + indices[1]
    if index >= count:
        problem = f"JOB_INDEX and JOB_COMPLETION_INDEX make this node {index} of {count}"
        raise ConfigError(problem, fix="Set NUM_NODES to the number of pods of the JobSet")
    return JobNode(index, count, f"{os.environ['COORDINATOR_ADDRESS']}:{os.environ.get('MASTER_PORT') or 29500}")


def fill_settings(fields: dict[str, Any]) -> None:
    """Set the fields that are not given from Dataflux's flags among them, or else from the environment."""
    _fill_from_flags(fields)
    for variable, (names, read) in _VARIABLES.items():
        value = read(variable) if os.environ.get(variable) else None
        for name in names if value is not None else ():
            fields.setdefault(name, value)
    node = find_node()
    if in_job():
        fields["ranks"] = _read_count("WORLD_SIZE")
    elif node is not None:
        fields["ranks"] = node.count * _count_devices(fields)
    elif "ranks" not in fields:
        fields["ranks"] = (_read_count("NUM_NODES") or 1) * _count_devices(fields)


def _fill_from_flags(fields: dict[str, Any]) -> None:
    if fields.get("ckpt_dir_path"):
        fields.setdefault("dir", fields["ckpt_dir_path"])
    if (steps := fields.get("steps")) is not None:
        fields.setdefault("saves", steps)
        fields.setdefault("loads", steps)
    if (checkpoint := fields.get("checkpoint")) in _CHECKPOINTS:
        for name, value in {"format": "single", **_CHECKPOINTS[checkpoint]}.items():
            fields.setdefault(name, value)
    strategies = {STRATEGY_NAMES.get(name, name) for name in fields.get("strategy") or ()}
    if fields.get("distributed_filesystem") and strategies != {"filesystem"}:
        raise UsageError(
            "voxlane bench checkpoint: --distributed-filesystem needs the strategy filesystem",
            fix="Add --strategy filesystem (or fsdp)",
        )


def _count_devices(fields: dict[str, Any]) -> int:
    """Return NUM_DEVICES. `auto`, its default, is the number of GPUs if they hold the model, and otherwise 1."""
    if os.environ.get("NUM_DEVICES") not in (None, "", "auto"):
        return _read_count("NUM_DEVICES") or 1
    if fields.get("accelerator", "cpu") == "cpu":
        return 1
    import torch

    return max(torch.cuda.device_count(), 1) if torch.cuda.is_available() else 1


# -- variables ---------------------------------------------------------------------------------------------------------


def _read_text(variable: str) -> str:
    return os.environ[variable]


def _read_count(variable: str) -> int | None:
    """Return the value of a variable, or None if it is not set."""
    return _read_integer(variable, 1) if os.environ.get(variable) else None


def _read_index(variable: str) -> int:
    return _read_integer(variable, 0) if os.environ.get(variable) else 0


def _read_integer(variable: str, minimum: int) -> int:
    text = os.environ[variable]
    if not text.isdecimal() or int(text) < minimum:
        expected = f"an integer, {minimum} or more" + (", or auto" if variable == "NUM_DEVICES" else "")
        raise ConfigError(f"{variable}: expected {expected}, got {text!r}")
    return int(text)


def _read_seconds(variable: str) -> float:
    try:
        return float(os.environ[variable])
    except ValueError:
        raise ConfigError(f"{variable}: expected a number of seconds, got {os.environ[variable]!r}") from None


def _read_switch(variable: str) -> bool:
    text = os.environ[variable].lower()
    if text not in ("0", "1", "false", "true", "no", "yes"):
        raise ConfigError(f"{variable}: expected 1 or 0, got {os.environ[variable]!r}")
    return text in ("1", "true", "yes")


def _read_strategy(variable: str) -> tuple[str] | None:
    return ("fsspec",) if _read_switch(variable) else None


_VARIABLES: dict[str, tuple[tuple[str, ...], Callable[[str], Any]]] = {
    "CKPT_DIR_PATH": (("dir",), _read_text),
    "CKPT_RESTORE_PATH": (("restore",), _read_text),
    "ACCELERATOR": (("accelerator",), _read_text),
    "NUM_LAYERS": (("layers",), _read_count),
    "NUM_SAVE_CALLS": (("saves",), _read_count),
    "NUM_LOAD_CALLS": (("loads",), _read_count),
    "SAMPLE_COUNT": (("saves", "loads"), _read_count),
    "LAYER_SIZE": (("layer_size",), _read_count),
    "PADDING_SIZE": (("padding_size",), _read_count),
    "USE_FSSPEC": (("strategy",), _read_strategy),
    "USE_ASYNC": (("use_async",), _read_switch),
    "STEPS_PER_SAVE": (("steps_per_save",), _read_count),
    "SIMULATED_WORKLOAD_DURATION": (("step_time",), _read_seconds),
}
"""Fields that each variable sets, and how its text is read."""
