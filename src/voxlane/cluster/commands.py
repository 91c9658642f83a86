"""The table of voxlane commands that run on several machines, the arguments that each launcher gives them, and the exit
status by which they ask to be started again.

SLURM jobs and Kubernetes apps read this table, so that a new parallel command is one more entry of `COMMANDS`::

    torchrun   starts one process per device on every node; each process is a rank of the command
    Ray        runs before the command does; the command runs once and gets the cluster's address and size
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Launcher = Literal["ray", "torchrun", "none"]
STOPPED = 128 + signal.SIGTERM
"""Exit status of a run that stopped because it was asked to."""
STOPPED_VARIABLE = "VOXLANE_STOPPED"
"""Environment variable that names the marker file of such a run. torchrun does not pass on its processes' status."""


@dataclass(frozen=True, kw_only=True)
class RayPlacement:
    """The nodes of a Ray cluster that a command runs on, and the processes on each of them.

    `cpus` (cores of each process) and `address` (of the cluster's head) are arguments: values, or shell variables that
    the launcher expands.
    """

    nodes: int
    per_node: int
    cpus: str = "1"
    gpus: float = 0.0
    address: str = "auto"


@dataclass(frozen=True, kw_only=True)
class ParallelCommand:
    """A command that runs on several machines."""

    name: str
    """Name of the command after `voxlane`, such as `bench loading`."""
    supports_torchrun: bool
    """Whether its processes may be ranks that torchrun started."""
    ray_options: Callable[[RayPlacement, Mapping[str, str]], dict[str, str]] | None
    """Function that returns the options which describe a Ray cluster, given the user's own options. None: the command
    does not support Ray."""
    resumes: bool = False
    """Whether --auto-resume continues what an earlier start did."""
    result_file: str = ""
    """Name of the file that it writes to --out, which may be a URI; empty: it writes none."""


def _address_option(placement: RayPlacement, options: Mapping[str, str]) -> dict[str, str]:
    """Return the address, for a command that reads the cluster's size by itself."""
    return {"--address": placement.address} if options.get("--launcher", "ray") == "ray" else {}


def _worker_options(placement: RayPlacement, options: Mapping[str, str]) -> dict[str, str]:
    address = {"--address": placement.address}
    if "--workers" in options:
        return address
    size = {"--workers": str(placement.nodes * placement.per_node), "--nodes": str(placement.nodes)}
    gpus = {"--gpus-per-worker": f"{placement.gpus:g}"} if placement.gpus else {}
    return {**size, "--cpus-per-worker": placement.cpus, **gpus, **address}


def _rank_options(placement: RayPlacement, options: Mapping[str, str]) -> dict[str, str]:
    if not (address := _address_option(placement, options)):
        return {}
    return {"--launcher": "ray", "--nodes": str(placement.nodes), "--ranks": str(placement.per_node), **address}


COMMANDS = (
    ParallelCommand(name="train", supports_torchrun=True, ray_options=_worker_options, resumes=True),
    ParallelCommand(name="tune", supports_torchrun=False, ray_options=_address_option, resumes=True),
    ParallelCommand(
        name="bench loading", supports_torchrun=True, ray_options=_rank_options, result_file="loading-bench.json"
    ),
    ParallelCommand(name="bench scaling", supports_torchrun=False, ray_options=_address_option),
    ParallelCommand(name="bench checkpoint", supports_torchrun=True, ray_options=None),
)


def find_command(arguments: Sequence[str]) -> ParallelCommand | None:
    """Return the entry for a command line (without `voxlane`), or None if the command runs on one machine."""
    for command in COMMANDS:
        name = command.name.split()
        if list(arguments[: len(name)]) == name:
            return command
    return None


def command_name(arguments: Sequence[str]) -> str:
    """Return the name of a command line (without `voxlane`), without its options."""
    command = find_command(arguments)
    return command.name if command is not None else arguments[0]


def default_launcher(arguments: Sequence[str], nodes: int) -> Launcher:
    """Return the launcher of a command on this many nodes, unless the user chooses another."""
    command = find_command(arguments)
    if command is None or (command.ray_options is None and nodes == 1):
        return "none"
    return "ray" if command.ray_options else "torchrun"


def parse_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options on a command line. A value is what follows `=`, or else the next argument."""
    options = {}
    for argument, next_argument in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            options[name] = value if equals else next_argument
    return options


def ray_arguments(arguments: Sequence[str], placement: RayPlacement) -> list[str]:
    """Return the arguments to append so that a command runs on a Ray cluster; the user's own options win."""
    command, options = find_command(arguments), parse_options(arguments)
    if command is None or command.ray_options is None:
        return []
    added = command.ray_options(placement, options)
    return [argument for name, value in added.items() if name not in options for argument in (name, value)]


def restart_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a second start, which resumes if the command can."""
    command = find_command(arguments)
    if command is None or not command.resumes:
        return tuple(arguments)
    return (*(word for word in arguments if word not in ("--resume", "--auto-resume")), "--auto-resume")


def mark_stopped(environment: Mapping[str, str]) -> None:
    """Create the marker file, if the environment names one."""
    if STOPPED_VARIABLE in environment:
        Path(environment[STOPPED_VARIABLE]).touch()


def resolve_status(status: int, environment: Mapping[str, str]) -> int:
    """Return STOPPED if a failed command left the marker file, else the command's own `status`."""
    return STOPPED if status and os.path.exists(environment.get(STOPPED_VARIABLE, "")) else status
