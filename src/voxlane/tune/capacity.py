"""Decide from a cluster's nodes how many trials run at once and what each one gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from voxlane.cluster.ray.cluster import RayNode, format_resources, place_workers
from voxlane.errors import ClusterError, ConfigError
from voxlane.tune.space import TuneConfig

_MAX_CONCURRENT = 4096
"""Upper limit of concurrent trials, whatever the cluster has."""


@dataclass(frozen=True)
class TrialCapacity:
    """How many trials run at once, and how many workers each of them has, with these CPUs and GPUs each."""

    trials: int
    workers: int
    cpus: float
    gpus: float
    limited_by_cluster: bool
    """True when the cluster's resources, not `max_concurrent`, limit the number of trials."""

    @property
    def threads(self) -> int:
        """Return the number of compute threads of each worker."""
        return max(1, math.floor(self.cpus))

    @property
    def resources(self) -> str:
        """Describe the resources of one trial, such as `2 workers of 1 CPU`."""
        each = format_resources(self.cpus, self.gpus)
        return f"{self.workers} workers of {each}" if self.workers > 1 else each


def plan_capacity(nodes: Sequence[RayNode], config: TuneConfig, accelerator: str = "auto") -> TrialCapacity:
    """Return what trials get on `nodes`; raise ClusterError when not even one trial fits.

    `accelerator` is that of the trials' config.
    """
    workers = config.workers_per_trial
    cpus = (config.cpus_per_trial or float(workers)) / workers
    trial_gpus = config.gpus_per_trial
    if trial_gpus is None:
        use_gpu = accelerator == "gpu" or (accelerator == "auto" and any(node.gpus for node in nodes))
        trial_gpus = float(workers) if use_gpu else 0.0
    gpus = trial_gpus / workers
    if accelerator == "gpu" and not gpus:
        raise ConfigError("tune.gpus_per_trial is 0, but accelerator is gpu", fix="Remove one of them")
    if workers > 1 and gpus and gpus != int(gpus):
        raise ConfigError(
            f"tune.gpus_per_trial: {trial_gpus:g} GPUs cannot be divided among {workers} workers",
            fix=f"Use {workers}, or share one GPU with tune.workers_per_trial=1",
        )
    fitting = len(place_workers(nodes, _MAX_CONCURRENT * workers, cpus, gpus)) // workers
    if not fitting:
        raise _too_small(nodes, workers, cpus, gpus)
    limit = config.max_concurrent or _MAX_CONCURRENT
    return TrialCapacity(min(fitting, limit), workers, cpus, gpus, limited_by_cluster=fitting <= limit)


def _too_small(nodes: Sequence[RayNode], workers: int, cpus: float, gpus: float) -> ClusterError:
    """Return the error that states what one trial needs, what the cluster has, and what would fit."""
    total = f"{sum(n.cpus for n in nodes):g} CPU and {sum(n.gpus for n in nodes):g} GPU"
    total += f" on {len(nodes)} node{'s' * (len(nodes) != 1)}"
    each = format_resources(cpus, gpus)
    needed = f"{workers} workers of {each} each" if workers > 1 else each
    fitting = len(place_workers(nodes, workers, cpus, gpus))
    if fitting:
        fix = f"Use tune.workers_per_trial={fitting}"
    elif gpus and not any(node.gpus for node in nodes):
        fix = "Remove tune.gpus_per_trial and accelerator to train on CPUs"
    elif gpus:
        fix = f"Use tune.gpus_per_trial={max(node.gpus for node in nodes):g} or less"
    else:
        fix = f"Use tune.cpus_per_trial={max((node.cpus for node in nodes), default=1) * workers:g} or less"
    return ClusterError(f"a trial needs {needed}, but the cluster has {total}: no trial could start", fix=fix)
