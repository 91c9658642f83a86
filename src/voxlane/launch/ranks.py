"""`on_ranks`: one function on every rank of a group of Ray workers, through Ray Train's `TorchTrainer`.

What a rank raised comes back as it was raised. Workers, machines or a head that went away are `LostError`: nothing is
tried again here, and Ray's own checkpoints are not used; whoever calls decides how to go on.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from voxlane.errors import ClusterError, LostError, NoMemoryError, RunError, VoxlaneError
from voxlane.launch import cluster as clusters

_POLL_S = 0.5
_HEAD_S = 3.0
"""Between looks at the cluster's head."""
_HEAD_MISSES = 4
_COLLATERAL_S = 1.5
"""A rank that lost its peers waits so long before it says so, for the peer that has the reason to be heard first."""
_COLLATERAL = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo",
    "nccl",
    "timed out waiting for",
    "process group",
    "rendezvous",
    "tcpstore",
)
"""What torch says, in small letters, when another rank is gone."""
_DEATHS = {
    "low on memory": "",
    "node was terminated": "its machine went away",
    "node is dead": "its machine went away",
    "node has died": "its machine went away",
    "node died": "its machine went away",
    "unavailable": "it does not answer any more",
    "connection error": "its process was killed",
    "died unexpectedly": "its process was killed",
}
"""What Ray says of a worker that is gone, in small letters, and what it means; nothing: it is said as it is."""
_ENVIRONMENT = {
    # Threads that spin while they wait take the processor from the loader and from the other ranks of the machine.
    "OMP_WAIT_POLICY": "PASSIVE"
}


def on_ranks(
    function: Callable[[], Any],
    *,
    workers: int,
    nodes: int | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    environment: Mapping[str, str] | None = None,
    callbacks: Sequence[Any] = (),
) -> Any:
    """What `function` returns on rank 0, when it has returned on every one of `workers` ranks.

    It runs in this process's Ray cluster, with a process group (NCCL where workers have GPUs, gloo elsewhere) and
    torchrun's environment variables; it must be importable there, as a module's function or a partial of one.
    `nodes`: exactly so many machines, equally many workers on each. `cpus`, `gpus`: what each worker takes, fractions
    allowed. `environment`: variables for the workers. `callbacks`: Ray Train's. Raises what a rank raised; `LostError`
    if a worker, its machine or the cluster's head went away.
    """
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    clusters.set_defaults()
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}  # a worker that asked for no GPU uses none
    where = None
    if nodes is not None:
        found = clusters.place(clusters.free(), workers, cpus, gpus, nodes)
        if len(found) < workers:
            raise LostError(f"{workers} workers on {nodes} nodes asked for, there is room for {len(found)} now")
        where = [{"ray.io/node-id": node_id} for node_id in found]
    with tempfile.TemporaryDirectory(prefix="voxlane-ray-run-", ignore_cleanup_errors=True) as folder:
        trainer = TorchTrainer(
            _Told(function),
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu=gpus > 0,
                resources_per_worker={"CPU": cpus, **({"GPU": gpus} if gpus else {})},
                label_selector=where,
            ),
            run_config=RunConfig(
                name="run",
                storage_path=folder,
                # Ray's own limits on placing workers and on preemption are to try for ever.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
                worker_runtime_env={"env_vars": {**_ENVIRONMENT, **hidden, **(environment or {})}},
                logging_config=LoggingConfig(log_level="CRITICAL"),
                callbacks=list(callbacks),
            ),
        )
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        return _finished(trainer).return_value


class _Told:
    """`function`, with whatever it raises as an error of ours, which survives the way back to the caller."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __call__(self) -> Any:
        rank = os.environ.get("RANK", "0")
        try:
            return self._function()
        except VoxlaneError:
            raise
        except Exception as error:  # the end of a process's work: what it was must reach the driver, whatever it is
            text = " ".join(str(error).split())
            if collateral(error):
                time.sleep(_COLLATERAL_S)
                raise LostError(f"rank {rank} lost the others: {text[:200]}") from error
            raise RunError(f"rank {rank} failed: {type(error).__name__}: {text[:500]}") from error


def collateral(error: BaseException) -> bool:
    """Whether an exception says no more than that another rank is gone."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _COLLATERAL)


def _finished(trainer: Any) -> Any:
    """Wait for the end, in a thread of its own: so Ctrl-C stays the caller's, and a head that went away is noticed, for
    which Ray would wait a minute and then end the process."""
    import ray
    from ray.exceptions import RayError
    from ray.train.v2.api.exceptions import TrainingFailedError

    address = ray.get_runtime_context().gcs_address
    end: Future[Any] = Future()

    def fit() -> None:
        try:
            end.set_result(trainer.fit())
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: it is raised below
            end.set_exception(error)

    threading.Thread(target=fit, name="voxlane-ranks", daemon=True).start()
    looked, misses = time.monotonic(), 0
    while True:
        try:
            return end.result(_POLL_S)
        except NotYet:
            if end.done():
                raise LostError("Ray gave up waiting for its workers") from None
        except TrainingFailedError as error:
            raise reason(error) from None
        except RayError as error:
            raise LostError(f"the run's controller was lost: {_short(error)}") from None
        if time.monotonic() - looked >= _HEAD_S:
            looked = time.monotonic()
            misses = 0 if clusters.listens(address) else misses + 1
            if misses >= _HEAD_MISSES:
                raise LostError(f"the head of the Ray cluster at {address} went away")


def reason(error: Exception) -> VoxlaneError:
    """What ended the ranks, out of all that they say: a worker that died first, then what one of them raised, then what
    others noticed of it."""
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    ranks = sorted(failures.items())
    for rank, failure in ranks:
        why = _death(failure)
        if why is None:
            continue
        if "low on memory" in why.lower():
            return NoMemoryError(
                f"the machine of rank {rank} ran out of memory, and Ray ended it",
                fix="Lower batch, device_batch, patch or loader.ram_cache_bytes, or run fewer workers a machine",
            )
        return LostError(f"rank {rank} was lost: {why}")
    told = [failure for _, failure in ranks if isinstance(failure, VoxlaneError)]
    for failure in sorted(told, key=lambda failure: isinstance(failure, LostError)):
        return failure
    for rank, failure in ranks:
        return RunError(f"rank {rank} failed: {type(failure).__name__}: {_short(failure)}")
    cause = getattr(error, "controller_failure", None) or error
    name = type(cause).__name__
    if name in ("WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError", "InsufficientClusterResourcesError"):
        return LostError(f"the workers could not be placed: {_short(cause)}")
    if name == "PreemptionError" or "ActorDied" in name or "ActorError" in name or "Lost" in name:
        return LostError(f"a rank was lost while it started: {_death(cause) or _short(cause)}")
    return ClusterError(f"Ray Train failed: {name}: {_short(cause)}")


def _death(failure: BaseException) -> str | None:
    """How a worker's process ended, if it did."""
    from ray.exceptions import RayActorError

    found = getattr(failure, "health_check_failure", failure)
    if type(failure).__name__ == "WorkerHealthCheckTimeoutError":
        return "it did not answer"
    if not isinstance(found, RayActorError):
        return None
    text = " ".join(str(found).split())
    for words, meaning in _DEATHS.items():
        if words in text.lower():
            return meaning or text[:300]
    return text[:200]


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
