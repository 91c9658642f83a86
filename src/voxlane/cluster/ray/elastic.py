"""`train_on_ray`: train a run on Ray workers, and continue when workers, machines or capacity come and go.

Each attempt is `fit` on as many workers as the cluster has capacity for; when a worker is lost, the next attempt
resumes from the last checkpoint. The global batch does not depend on the number of workers, so every attempt continues
the same run. RUN/workers.json records where each rank ran, and why each attempt ended.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

from voxlane.cluster.ray import cluster as clusters
from voxlane.cluster.ray.cluster import RayNode
from voxlane.cluster.ray.ranks import run_on_ranks
from voxlane.distributed import gather_objects
from voxlane.errors import ClusterError, ConfigError, LostError, RunError, StoppedError, VoxlaneError
from voxlane.store import StoreConfig
from voxlane.train.fit import RESUME_FIX, fit, load_for_start
from voxlane.train.ranks import read_job_start
from voxlane.train.recorder import format_epoch
from voxlane.train.run import Run, TrainedRun
from voxlane.train.run_setup import check_config, prepare_run

WORKERS_FILE = "workers.json"
MAX_ATTEMPTS_WITHOUT_PROGRESS = 3
_POLL_S = 0.5
_FOLLOW_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Patience:
    """How long a run waits for lost capacity."""

    for_all_s: float = 30.0
    """Seconds to wait until all requested workers fit again; then the run continues with fewer."""
    for_least_s: float = 600.0
    """Seconds to wait until the minimum number of workers fits; then the run stops."""


@dataclass(frozen=True)
class WorkerRequest:
    """The workers that the user requests, each with `cpus` and `gpus`, to share batches of `batch` patches.

    The run starts with no fewer than `min_workers_at_start`, and continues with no fewer than `min_workers` when some
    are lost. `nodes`: number of machines, with equally many workers on each; None: any.
    """

    workers: int
    min_workers: int
    min_workers_at_start: int
    nodes: int | None
    cpus: float
    gpus: float
    batch: int

    def count_workers(self, free: Sequence[RayNode]) -> int:
        """Return the largest number of workers, up to the request, that fit on `free` and divide the batch evenly."""
        return self.limit_workers(len(clusters.place_workers(free, self.workers, self.cpus, self.gpus, self.nodes)))

    def limit_workers(self, limit: int) -> int:
        """Return the largest number of workers, up to `limit`, that fill whole machines and divide the batch evenly."""
        step = 1 if self.nodes is None else clusters.workers_per_node(self.workers, self.nodes)
        return max((n for n in range(step, limit + 1, step) if self.batch % n == 0), default=0)

    def count_nodes(self, workers: int) -> int | None:
        """Return the number of machines for this many workers; None: any."""
        return None if self.nodes is None else workers * self.nodes // self.workers


def train_on_ray(
    data: str | None,
    run_uri: str,
    config_values: Mapping[str, Any] | None = None,
    store: StoreConfig | None = None,
    *,
    workers: int,
    nodes: int | None = None,
    min_workers: int | None = None,
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float | None = None,
    address: str | None = None,
    resume: bool = False,
    command: Sequence[str] = (),
    progress: bool | None = None,
    patience: Patience | None = None,
    print_line: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train as `train.fit.train` does, on `workers` Ray workers; return the stall report.

    `nodes`: use exactly this many machines, with equally many workers on each. `min_workers`: smallest number of
    workers to continue with when some are lost (default: one), and to start with (default: all). `gpus_per_worker`: by
    default one if the cluster has GPUs and the config does not choose CPUs. `address`: an existing cluster; by default
    one is started on this machine for the run. `print_line`: receives the lines about lost and new workers, and
    about the weights that the run starts from (default: stderr).
    """
    if workers < 1:
        raise ConfigError(f"--workers {workers} is too small", fix="Give 1 or more")
    if min_workers is not None and not 1 <= min_workers <= workers:
        raise ConfigError(
            f"--min-workers {min_workers} is out of range", fix=f"Give 1 to {workers}, the number of workers"
        )
    if nodes is not None:
        clusters.workers_per_node(workers, nodes)
    run = Run(run_uri, store)
    prepared = load_for_start(data, run, resume=resume)  # report mistakes first: a cluster takes seconds to start
    config = TrainedRun.load(run).config if resume else check_config(prepared, config_values or {}, workers)
    if not resume and run.exists and run.has_results:
        raise run.already_exists_error()
    lease = run.open_lease(start=read_job_start())
    accelerator = str((config_values or {}).get("accelerator", config.accelerator))
    with _raise_on_sigterm(run), clusters.open_cluster(address) as head_address, ExitStack() as cleanup:
        gpus = _choose_gpus(gpus_per_worker, clusters.list_nodes(), accelerator, workers)
        clusters.check_capacity(clusters.list_nodes(), workers, cpus_per_worker, gpus, nodes, min_workers)
        cleanup.callback(lease.release, whole_job=True)
        config = prepare_run(
            prepared,
            run_uri,
            config_values,
            store,
            ranks=workers,
            resume=resume,
            command=command,
            lease=lease,
            print_line=print_line or partial(print, "voxlane:", file=sys.stderr, flush=True),
        )
        assert config.batch is not None, "prepare_run sets it"
        request = WorkerRequest(
            workers, min_workers or 1, min_workers or workers, nodes, cpus_per_worker, gpus, config.batch
        )
        with _follow_history(run, config.epochs, progress, print_line) as report_workers:
            return _run_attempts(
                run, lease.token, head_address, request, resume, report_workers, patience or Patience()
            )


def _choose_gpus(requested: float | None, nodes: Sequence[RayNode], accelerator: str, workers: int) -> float:
    """Return the GPUs of each worker."""
    if requested is None:
        return 1.0 if accelerator != "cpu" and any(node.gpus >= 1 for node in nodes) else 0.0
    if workers > 1 and requested != int(requested):
        raise ConfigError(
            f"--gpus-per-worker {requested:g}: the ranks of one run cannot share a GPU",
            fix="Give whole GPUs, or --workers 1",
        )
    return requested


@contextmanager
def _follow_history(
    run: Run, epochs: int, progress: bool | None, print_line: Callable[[str], None] | None
) -> Iterator[Callable[[str], None]]:
    """Print the epochs of RUN/history.json while the block runs; yield the function that prints a line about workers.

    `progress`: a bar (True), nothing (False), or by default a bar on a terminal and otherwise a line per epoch.
    """
    use_bar = sys.stdout.isatty() if progress is None else progress
    bar = tqdm(total=epochs, unit="epoch", dynamic_ncols=True, disable=not use_bar)
    ended = threading.Event()

    def read_history() -> list[dict[str, Any]]:
        try:
            return run.read_json("history.json") or []
        except VoxlaneError:
            return []  # the next read may succeed; training does not depend on it

    # Epochs of an earlier part of the run are not reported again.
    last_epoch = max((entry["epoch"] for entry in read_history() if not entry.get("cut")), default=-1)
    bar.update(last_epoch + 1)

    def report_new_epochs() -> None:
        nonlocal last_epoch
        for entry in read_history():
            if entry["epoch"] <= last_epoch:
                continue
            last_epoch = entry["epoch"]
            dice = {} if entry["mean_dice"] is None else {"dice": f"{entry['mean_dice']:.3f}"}
            speed = {"patches/s": f"{entry['patches_per_s']:.1f}", "workers": entry["ranks"]}
            bar.update(1)
            bar.set_postfix({"loss": f"{entry['loss']:.3f}", **dice, **speed})
            if progress is None and not use_bar:
                print(format_epoch(entry, epochs), flush=True)

    def follow() -> None:
        while not ended.wait(_FOLLOW_INTERVAL_S):
            report_new_epochs()

    thread = threading.Thread(target=follow, name="voxlane-follow", daemon=True)
    thread.start()
    with bar:
        try:
            yield print_line or (lambda text: bar.write(f"voxlane: {text}", file=sys.stderr))
        finally:
            ended.set()
            thread.join(timeout=10)
        report_new_epochs()


def _run_attempts(
    run: Run,
    lease_token: str,
    head_address: str,
    request: WorkerRequest,
    resume: bool,
    report_workers: Callable[[str], None],
    patience: Patience,
) -> dict[str, Any]:
    """Run attempt after attempt, until the run is done or cannot continue."""
    previous, failed_attempts = 0, 0
    while True:
        epochs = _count_epochs(run)
        workers = _wait_for_capacity(request, patience, report_workers, is_first=previous == 0)
        if workers != previous and (previous or workers < request.workers):
            report_workers(_describe_change(previous, workers, request))
        number = len(_read_attempts(run))
        fit_rank = partial(_fit_rank, run.folder_uri, run.config, lease_token, resume, number, request, workers)
        try:
            _start_attempt(run, workers)  # in the try block, because a signal may come as soon as it is written
            nodes, cpus, gpus = request.count_nodes(workers), request.cpus, request.gpus
            report, can_grow = run_on_ranks(fit_rank, workers=workers, nodes=nodes, cpus=cpus, gpus=gpus)
        except LostError as error:
            _end_attempt(run, number, str(error))
            if not clusters.is_listening(head_address):
                raise LostError(
                    f"the head of the Ray cluster at {head_address} was lost; saved checkpoints remain",
                    uri=run.folder_uri,
                    fix=RESUME_FIX,
                ) from None
            failed_attempts = 0 if _count_epochs(run) > epochs else failed_attempts + 1
            if failed_attempts >= MAX_ATTEMPTS_WITHOUT_PROGRESS:
                raise LostError(
                    f"{failed_attempts} attempts in a row ended before an epoch was done, the last because {error}",
                    uri=run.folder_uri,
                    fix=f"Saved checkpoints remain: {RESUME_FIX}",
                ) from None
            if run.is_done:  # it was lost after its last checkpoint
                return dict(run.read_json("stall.json") or {})
            report_workers(f"{error}; continuing from the last checkpoint")
            resume = True
        except BaseException as error:
            cause = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            _end_attempt(run, number, str(error) if isinstance(error, VoxlaneError) else cause)
            raise
        else:
            if not can_grow or run.is_done:
                _end_attempt(run, number, "done")
                return dict(report)
            _end_attempt(run, number, "stopped after an epoch: more workers fit")
            resume, failed_attempts = True, 0
        previous = workers


def _wait_for_capacity(
    request: WorkerRequest, patience: Patience, report_workers: Callable[[str], None], *, is_first: bool
) -> int:
    """Wait until all workers fit, at most as long as `patience` allows; return the number of workers that fit.

    At first "all" is the number that the whole cluster could hold, later the number requested, since lost machines may
    come back.
    """
    started_at, reported = time.monotonic(), False
    least = request.min_workers_at_start if is_first else request.min_workers
    full = request.count_workers(clusters.list_nodes()) if is_first else request.limit_workers(request.workers)
    while True:
        workers, waited_s = request.count_workers(clusters.list_free_nodes()), time.monotonic() - started_at
        if workers >= full or (workers >= least and waited_s >= patience.for_all_s):
            return workers
        if waited_s >= max(patience.for_all_s, patience.for_least_s):
            raise ClusterError(
                f"only {workers} workers fit after waiting {waited_s:.0f} s, at least {least} are needed",
                fix=f"When the cluster has free capacity, {'try again' if is_first else RESUME_FIX}",
            )
        # A worker that has just ended releases its resources within a second or two.
        if not reported and waited_s > 3:
            reported = True
            limit_s = patience.for_all_s if workers >= least else patience.for_least_s
            report_workers(f"{workers} of {request.workers} workers fit: waiting up to {limit_s:.0f} s for more")
        time.sleep(_POLL_S)


def _describe_change(before: int, now: int, request: WorkerRequest) -> str:
    share = f"{request.batch // now} of the batch's {request.batch} patches on each"
    if not before:
        return f"training on the {now} of {request.workers} workers that fit: {share}"
    return f"training on {now} workers instead of {before}: {share}"


def _count_epochs(run: Run) -> int:
    return len(run.read_json("history.json") or [])


@contextmanager
def _raise_on_sigterm(run: Run) -> Iterator[None]:
    """Turn SIGTERM into a StoppedError, which ends the run and a cluster started for it; checkpoints remain."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise StoppedError("stopped by SIGTERM", uri=run.folder_uri, fix=RESUME_FIX)

    previous_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


# -- on the ranks ------------------------------------------------------------------------------------------------------


def _fit_rank(
    run_uri: str,
    store: StoreConfig | None,
    lease_token: str,
    resume: bool,
    attempt: int,
    request: WorkerRequest,
    workers: int,
) -> tuple[dict[str, Any], bool]:
    """Do one rank's part; return the stall report, and whether it stopped because more workers fit."""
    import ray

    run, can_grow = Run(run_uri, store), False
    mine = {"node": ray.get_runtime_context().get_node_id(), "host": socket.gethostname(), "pid": os.getpid()}
    ranks = gather_objects(mine)
    is_first_rank = os.environ.get("RANK", "0") == "0"

    def stop_to_grow(entry: Mapping[str, Any]) -> bool:
        """Return whether more workers would fit; raise if a newer attempt has started."""
        nonlocal can_grow
        if not is_first_rank:
            return False
        newest = len(_read_attempts(run)) - 1
        if newest != attempt:
            fix = "Train the run only once at a time"
            raise RunError(f"attempt {newest + 1} of the run took over", uri=run.folder_uri, fix=fix)
        if workers < request.workers:
            node_ids = [rank["node"] for rank in ranks]
            available = clusters.add_released(clusters.list_free_nodes(), node_ids, request.cpus, request.gpus)
            can_grow = request.count_workers(available) > workers
        return can_grow

    if is_first_rank:
        _update_attempt(run, attempt, ranks=ranks, nodes=len({rank["node"] for rank in ranks}))
    report = fit(run_uri, store, resume=resume, progress=False, on_epoch=stop_to_grow, lease_token=lease_token)
    return report, can_grow


# -- RUN/workers.json: a list with an entry per attempt: its start and end, the cause of its end, and its ranks --------
# The driver writes it before the ranks start and after they end, rank 0 in between.


def _read_attempts(run: Run) -> list[dict[str, Any]]:
    return run.read_json(WORKERS_FILE) or []


def _start_attempt(run: Run, workers: int) -> None:
    """Add a new attempt. Its number is the number of attempts before it."""
    attempts = _read_attempts(run)
    if attempts and attempts[-1]["ended"] is None:
        attempts[-1].update(ended=_now(), why="its driver was lost")
    attempts.append({"began": _now(), "workers": workers, "ranks": [], "ended": None, "why": None})
    run.write_json(WORKERS_FILE, attempts)


def _update_attempt(run: Run, number: int, **values: Any) -> None:
    attempts = _read_attempts(run)
    if number < len(attempts):  # a signal may come before it is written
        attempts[number].update(values)
        run.write_json(WORKERS_FILE, attempts)


def _end_attempt(run: Run, number: int, cause: str) -> None:
    _update_attempt(run, number, ended=_now(), why=cause)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
