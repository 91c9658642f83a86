"""How many trials run at once, and what each gets: decided from a cluster's machines before anything starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from voxlane.errors import ClusterError, ConfigError
from voxlane.launch.cluster import Node, fits
from voxlane.tune.config import TuneConfig

_MANY = 4096
"""Trials at once, at most, whatever the cluster has."""


@dataclass(frozen=True)
class Room:
    """What a search has to run on."""

    trials: int
    """At once."""
    workers: int
    """Of each trial."""
    cpus: float
    """Of each worker."""
    gpus: float
    """Of each worker."""
    full: bool
    """Whether the cluster's room, not `max_concurrent`, is what bounds them."""

    @property
    def threads(self) -> int:
        """Threads of each worker's arithmetic."""
        return max(1, math.floor(self.cpus))


def room(nodes: Sequence[Node], config: TuneConfig, accelerator: str = "auto") -> Room:
    """What trials get on `nodes`; ClusterError where not even one fits. `accelerator`: that of their config."""
    workers = config.workers_per_trial
    cpus = (config.cpus_per_trial or float(workers)) / workers
    gpus = config.gpus_per_trial
    if gpus is None:
        wants_gpu = accelerator == "gpu" or (accelerator == "auto" and any(node.gpus for node in nodes))
        gpus = float(workers) if wants_gpu else 0.0
    gpus /= workers
    if accelerator == "gpu" and not gpus:
        raise ConfigError("tune.gpus_per_trial: 0, and accelerator is gpu", fix="Leave one of them out")
    if workers > 1 and gpus and gpus != int(gpus):
        raise ConfigError(
            f"tune.gpus_per_trial: {gpus * workers:g} do not give each of {workers} workers a GPU of its own",
            fix=f"Give {workers}, or tune.workers_per_trial=1 to share one",
        )
    found = fits(nodes, _MANY * workers, cpus, gpus) // workers
    if not found:
        raise _too_little(nodes, workers, cpus, gpus)
    bound = config.max_concurrent or _MANY
    return Room(min(found, bound), workers, cpus, gpus, full=found <= bound)


def _too_little(nodes: Sequence[Node], workers: int, cpus: float, gpus: float) -> ClusterError:
    """Says what one trial wants, and what would fit."""
    has = (
        f"{sum(n.cpus for n in nodes):g} CPU and {sum(n.gpus for n in nodes):g} GPU "
        f"on {len(nodes)} node{'s' * (len(nodes) != 1)}"
    )
    each = f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
    wants = f"{workers} workers of {each} each" if workers > 1 else each
    fitting = fits(nodes, workers, cpus, gpus)
    if fitting:
        fix = f"Give tune.workers_per_trial={fitting}"
    elif gpus and not any(node.gpus for node in nodes):
        fix = "Leave tune.gpus_per_trial and accelerator out to train on CPUs"
    elif gpus:
        fix = f"Give tune.gpus_per_trial={max(node.gpus for node in nodes):g} or less"
    else:
        fix = f"Give tune.cpus_per_trial={max((node.cpus for node in nodes), default=1) * workers:g} or less"
    return ClusterError(f"a trial wants {wants}, the cluster has {has}: none would ever start", fix=fix)
