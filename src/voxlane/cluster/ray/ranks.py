"""`run_on_ranks`: run a function on every rank of a group of Ray workers, through Ray Train's `TorchTrainer`.

An error of a rank is raised unchanged. A lost worker, machine or head raises `LostError`: nothing is retried here, and
Ray's own checkpoints are not used; the caller decides how to continue.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from voxlane.cluster.ray import cluster as clusters
from voxlane.cluster.ray.cluster import shorten
from voxlane.errors import ClusterError, LostError, NoMemoryError, RunError, VoxlaneError
from voxlane.temporary import temporary_folder

_PEER_LOSS_DELAY_S = 1.5
"""Time that a rank waits before it reports the loss of a peer, so that the peer's own error arrives first."""
_PEER_LOSS = re.compile(
    "connection (closed|reset) by peer|connection refused|broken pipe|gloo|nccl|timed out waiting for|process group"
    "|rendezvous|tcpstore",
    re.IGNORECASE,
)
"""Texts in torch's messages when another rank is gone. Gloo raises a plain RuntimeError."""
_DEATHS = {
    "low on memory": "",
    "node (was terminated|is dead|has died|died)": "its machine was lost",
    "unavailable": "it stopped responding",
    "connection error|died unexpectedly": "its process was killed",
}
"""Patterns of Ray's messages about a lost worker, and their meaning; empty: use Ray's message.

Ray raises the same type for all of them."""


def run_on_ranks(
    function: Callable[[], Any],
    *,
    workers: int,
    nodes: int | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `function` on `workers` ranks, and return its result of rank 0 when all ranks have returned.

    It runs in this process's Ray cluster, with a process group (NCCL if workers have GPUs, gloo otherwise) and
    torchrun's environment variables; it must be importable there, as a module's function or a partial of one.
    `nodes`: use exactly this many machines, with equally many workers on each. `cpus`, `gpus`: resources of each
    worker, possibly fractions. `environment`: variables for the workers. Raises the error of a rank, or `LostError` if
    a worker, its machine or the cluster's head is lost.
    """
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    clusters.set_defaults()
    # Threads that spin while they wait take cores from the loader and from the other ranks of the machine.
    variables = {"OMP_WAIT_POLICY": "PASSIVE"}
    if not gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""  # a worker that requests no GPU uses none
    node_labels = None
    if nodes is not None:
        placed = clusters.place_workers(clusters.list_free_nodes(), workers, cpus, gpus, nodes)
        if len(placed) < workers:
            raise LostError(f"{workers} workers on {nodes} nodes requested, but only {len(placed)} fit now")
        node_labels = [{"ray.io/node-id": node_id} for node_id in placed]
    with temporary_folder("ray") as folder:
        trainer = TorchTrainer(
            partial(_translate_errors, function),
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu=gpus > 0,
                resources_per_worker={"CPU": cpus, **({"GPU": gpus} if gpus else {})},
                label_selector=node_labels,
            ),
            run_config=RunConfig(
                name="run",
                storage_path=folder,
                # By default Ray retries placing workers, and preempted workers, forever.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
                worker_runtime_env={"env_vars": {**variables, **(environment or {})}},
                logging_config=LoggingConfig(log_level="CRITICAL"),
            ),
        )
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        return _wait_for(trainer).return_value


def _translate_errors(function: Callable[[], Any]) -> Any:
    """Call `function` and turn any error into a VoxlaneError, which survives pickling on its way to the driver."""
    rank = os.environ.get("RANK", "0")
    try:
        return function()
    except VoxlaneError:
        raise
    except Exception as error:  # a process boundary: the driver must get the error, whatever it is
        if is_peer_loss(error):
            time.sleep(_PEER_LOSS_DELAY_S)
            raise LostError(f"rank {rank} lost its peers: {shorten(error, 200)}") from error
        raise RunError(f"rank {rank} failed: {type(error).__name__}: {shorten(error, 500)}") from error


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an exception only says that another rank is gone."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _PEER_LOSS.search(str(error)) is not None


def _wait_for(trainer: Any) -> Any:
    """Fit in a thread, so that Ctrl-C reaches the caller and a lost head is noticed, and wait for its end."""
    import ray
    from ray.exceptions import RayError
    from ray.train.v2.api.exceptions import TrainingFailedError

    try:
        return clusters.wait_watching_head(clusters.run_in_thread(trainer.fit), ray.get_runtime_context().gcs_address)
    except TimeoutError:
        raise LostError("Ray gave up waiting for its workers") from None
    except TrainingFailedError as error:
        raise explain_failure(error) from None
    except RayError as error:
        raise LostError(f"the run's controller was lost: {shorten(error)}") from None


def explain_failure(error: Exception) -> VoxlaneError:
    """Return the error that ended the ranks: a worker's death, else an error of a rank, else a lost peer."""
    failures: dict[int, BaseException] = dict(sorted(getattr(error, "worker_failures", {}).items()))
    for rank, failure in failures.items():
        cause_of_death = _explain_death(failure) or ""
        if "low on memory" in cause_of_death.lower():
            return NoMemoryError(
                f"the machine of rank {rank} ran out of memory, and Ray killed the rank",
                fix="Lower batch, device_batch, patch or loader.ram_cache_bytes, or run fewer workers per machine",
            )
        if cause_of_death:
            return LostError(f"rank {rank} was lost: {cause_of_death}")
    own_errors = [failure for failure in failures.values() if isinstance(failure, VoxlaneError)]
    for failure in sorted(own_errors, key=lambda failure: isinstance(failure, LostError)):
        return failure
    for rank, failure in failures.items():
        return RunError(f"rank {rank} failed: {type(failure).__name__}: {shorten(failure)}")
    cause = getattr(error, "controller_failure", None) or error
    name = type(cause).__name__
    if name in ("WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError", "InsufficientClusterResourcesError"):
        return LostError(f"the workers could not be placed: {shorten(cause)}")
    if name == "PreemptionError" or "ActorDied" in name or "ActorError" in name or "Lost" in name:
        return LostError(f"a rank was lost while it started: {_explain_death(cause) or shorten(cause)}")
    return ClusterError(f"Ray Train failed: {name}: {shorten(cause)}")


def _explain_death(failure: BaseException) -> str | None:
    """Return how a worker's process ended; None if it did not."""
    from ray.exceptions import RayActorError

    actor_error = getattr(failure, "health_check_failure", failure)
    if type(failure).__name__ == "WorkerHealthCheckTimeoutError":
        return "it did not respond"
    if not isinstance(actor_error, RayActorError):
        return None
    for pattern, meaning in _DEATHS.items():
        if re.search(pattern, " ".join(str(actor_error).split()), re.IGNORECASE):
            return meaning or shorten(actor_error)
    return shorten(actor_error, 200) or "its process ended"
