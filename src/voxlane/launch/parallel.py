"""Voxlane commands that run on several machines: how their processes come to be, and what they are told. Pure.

SLURM jobs and apps on Kubernetes ask here, so that one more such command is one more entry of `COMMANDS`::

    torchrun   starts a process for every device of every node, each of which takes part as a rank
    Ray        is there before the command, which runs once and is told where and how large it is
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Launcher = Literal["ray", "torchrun", "none"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A Ray cluster for one command."""

    nodes: int
    per_node: int
    """Processes on each node."""
    cpus: str = "1"
    """Cores of each process, as the launcher's language writes it: a number, or a variable of a shell."""
    gpus: float = 0.0
    """GPUs of each process."""
    address: str = "auto"
    """Of the cluster, in the same language."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """One of these commands."""

    name: str
    """Its words after `voxlane`, such as bench loading."""
    torchrun: bool
    """Whether its processes may be ranks that torchrun started."""
    ray: Callable[[Place, Mapping[str, str]], dict[str, str]] | None
    """Options that tell it about a Ray cluster, given those that its user gave; None: it knows no Ray."""
    resumes: bool = False
    """Whether --auto-resume goes on with what an earlier start did."""
    result: str = ""
    """Name of the file that it writes to --out, which may be a URI; empty: it writes none."""


def _on_ray(place: Place, said: Mapping[str, str]) -> dict[str, str]:
    """For a command that looks at the cluster and decides by itself."""
    return {"--address": place.address} if said.get("--launcher", "ray") == "ray" else {}


def _workers(place: Place, said: Mapping[str, str]) -> dict[str, str]:
    where = {"--address": place.address}
    if "--workers" in said:
        return where
    gpus = {"--gpus-per-worker": f"{place.gpus:g}"} if place.gpus else {}
    many = {"--workers": str(place.nodes * place.per_node), "--nodes": str(place.nodes)}
    return {**many, "--cpus-per-worker": place.cpus, **gpus, **where}


def _ranks(place: Place, said: Mapping[str, str]) -> dict[str, str]:
    if not (where := _on_ray(place, said)):
        return {}
    return {"--launcher": "ray", "--nodes": str(place.nodes), "--ranks": str(place.per_node), **where}


COMMANDS = (
    Parallel(name="train", torchrun=True, ray=_workers, resumes=True),
    Parallel(name="tune", torchrun=False, ray=_on_ray, resumes=True),
    Parallel(name="bench loading", torchrun=True, ray=_ranks, result="loading-bench.json"),
    Parallel(name="bench scaling", torchrun=False, ray=_on_ray),
    Parallel(name="bench checkpoint", torchrun=True, ray=None),
)


def found(words: Sequence[str]) -> Parallel | None:
    """The entry of a command, given as the words after `voxlane`; None: it runs on one machine."""
    return next((one for one in COMMANDS if list(words[: len(one.name.split())]) == one.name.split()), None)


def title(words: Sequence[str]) -> str:
    """What a command is called, without its options."""
    known = found(words)
    return known.name if known is not None else words[0]


def launcher(words: Sequence[str], nodes: int) -> Launcher:
    """How a command's processes come to be on so many nodes unless its user says otherwise."""
    known = found(words)
    if known is None or (known.ray is None and nodes == 1):
        return "none"
    return "ray" if known.ray else "torchrun"


def options(words: Sequence[str]) -> dict[str, str]:
    """The options that a command's words give, and their values: what follows = or is the next word."""
    said = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            said[name] = value if equals else after
    return said


def ray_words(words: Sequence[str], place: Place) -> list[str]:
    """Words to add to a command that runs on a Ray cluster; what its user said is left as it is."""
    known, said = found(words), options(words)
    if known is None or known.ray is None:
        return []
    return [word for option, value in known.ray(place, said).items() if option not in said for word in (option, value)]


def restarted(words: Sequence[str]) -> tuple[str, ...]:
    """The command of a second start: one that can goes on where it was."""
    known = found(words)
    if known is None or not known.resumes:
        return tuple(words)
    return (*(word for word in words if word not in ("--resume", "--auto-resume")), "--auto-resume")
