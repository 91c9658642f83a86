"""`train_on_ray`: a run on Ray workers that goes on when workers, machines or the cluster's room come and go.

Each attempt is `fit` on as many workers as fit; when one is lost, the next goes on from the last checkpoint. The global
batch is the run's, whatever the number of workers, so every attempt continues the same run. RUN/workers.json keeps
which rank ran where, and why each attempt ended.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from voxlane.errors import ClusterError, ConfigError, LostError, RunError, StoppedError, VoxlaneError
from voxlane.launch import cluster as clusters
from voxlane.launch.cluster import Cluster, Node
from voxlane.launch.follow import Follower
from voxlane.launch.ranks import on_ranks
from voxlane.store import StoreConfig
from voxlane.train.config import TrainConfig
from voxlane.train.fit import begin, checked, fit
from voxlane.train.recorder import gathered
from voxlane.train.run import Run, Trained
from voxlane.volume.prepared import Prepared

WORKERS_FILE = "workers.json"
ATTEMPTS_WITHOUT_PROGRESS = 3
_POLL_S = 0.5
RESUME = "--resume goes on from the last checkpoint"


@dataclass(frozen=True)
class Patience:
    """How long lost room is waited for, in seconds."""

    for_all_s: float = 30.0
    """Until all workers that were asked for fit again; then the run goes on with fewer."""
    for_least_s: float = 600.0
    """Until the least number of workers fits; then the run stops."""


@dataclass(frozen=True)
class Shape:
    """The workers that were asked for."""

    workers: int
    least: int
    """To go on with, when some are lost."""
    least_at_first: int
    nodes: int | None
    cpus: float
    gpus: float
    batch: int

    def width(self, free: Sequence[Node]) -> int:
        """The most workers, none more than asked for, that fit on `free` and share the batch out evenly; 0: none."""
        room = clusters.fits(free, self.workers, self.cpus, self.gpus, self.nodes)
        step = 1 if self.nodes is None else clusters.share(self.workers, self.nodes)
        able = [n for n in range(step, room + 1, step) if self.batch % n == 0]
        return max(able, default=0)

    def nodes_of(self, width: int) -> int | None:
        """Machines for so many workers."""
        return None if self.nodes is None else width * self.nodes // self.workers


def train_on_ray(
    data: str,
    run_uri: str,
    said: Mapping[str, Any] | None = None,
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
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train as `train.fit.train` does, on `workers` Ray workers; returns the stall report.

    `nodes`: exactly so many machines, equally many workers on each. `min_workers`: go on with no fewer when some are
    lost (by default one), and begin with no more if no more fit. `gpus_per_worker`: by default one where the cluster
    has GPUs and the config does not ask for CPUs. `address`: an existing cluster; without it one of our own here, for
    the time of the run. `say`: takes the lines about workers that came and went (by default they go to stderr).
    """
    if workers < 1:
        raise ConfigError(f"--workers {workers}", fix="Give 1 or more")
    if min_workers is not None and not 1 <= min_workers <= workers:
        raise ConfigError(f"--min-workers {min_workers}", fix=f"Give 1 to {workers}, the number of workers")
    if nodes is not None:
        clusters.share(workers, nodes)
    run = Run(run_uri, store)
    prepared = Prepared.load(data, store)  # mistakes first: a cluster takes seconds to start
    before = Trained.of(run).config if resume else checked(prepared, said or {}, workers)
    if not resume and run.begun:
        raise run.here_already()
    accelerator = str((said or {}).get("accelerator", before.accelerator))
    with _terminable(run), clusters.cluster(address) as cluster:
        gpus = _gpus(gpus_per_worker, cluster.nodes(), accelerator, workers)
        clusters.check(cluster.nodes(), workers, cpus_per_worker, gpus, nodes, min_workers)
        config = begin(data, run_uri, said, store, ranks=workers, resume=resume, command=command)
        shape = Shape(workers, min_workers or 1, min_workers or workers, nodes, cpus_per_worker, gpus, _batch(config))
        with Follower(run, config.epochs, progress, say) as follower:
            return _attempts(run, cluster, shape, config, resume, follower, patience or Patience())


def _batch(config: TrainConfig) -> int:
    assert config.batch is not None, "begin settles it"
    return config.batch


def _gpus(asked: float | None, nodes: Sequence[Node], accelerator: str, workers: int) -> float:
    """GPUs a worker."""
    if asked is None:
        return 1.0 if accelerator != "cpu" and any(node.gpus >= 1 for node in nodes) else 0.0
    if workers > 1 and asked != int(asked):
        raise ConfigError(
            f"--gpus-per-worker {asked:g}: the ranks of one run cannot share a GPU",
            fix="Give whole GPUs, or --workers 1",
        )
    return asked


def _attempts(
    run: Run,
    cluster: Cluster,
    shape: Shape,
    config: TrainConfig,
    resume: bool,
    follower: Follower,
    patience: Patience,
) -> dict[str, Any]:
    """Attempt after attempt, until the run is done or cannot go on."""
    log = Attempts(run)
    before, idle = 0, 0
    while True:
        epochs = _epochs(run)
        width = _room(cluster, shape, patience, follower, first=before == 0)
        if width != before and (before or width < shape.workers):
            follower.say(_change(before, width, shape))
        number = log.begin(width)
        rank = partial(_fit, run.where, run.config, resume, number, shape, width)
        try:
            report, grow = on_ranks(rank, workers=width, nodes=shape.nodes_of(width), cpus=shape.cpus, gpus=shape.gpus)
        except LostError as error:
            log.end(number, str(error))
            if not cluster.head_answers():
                raise LostError(
                    f"the head of the Ray cluster at {cluster.address} went away; what was saved is kept",
                    uri=run.where,
                    fix=RESUME,
                ) from None
            idle = 0 if _epochs(run) > epochs else idle + 1
            if idle >= ATTEMPTS_WITHOUT_PROGRESS:
                raise LostError(
                    f"{idle} attempts in a row ended before an epoch was done, the last because {error}",
                    uri=run.where,
                    fix=f"What was saved is kept: {RESUME}",
                ) from None
            if run.done:  # it was lost on its way out
                return dict(run.read_json("stall.json") or {})
            follower.say(f"{error}; going on from the last checkpoint")
            resume = True
        except VoxlaneError as error:
            log.end(number, str(error))
            raise
        except BaseException as error:
            log.end(number, "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
            raise
        else:
            if not grow or run.done:
                log.end(number, "done")
                return dict(report)
            log.end(number, "stopped after an epoch: more workers fit")
            resume, idle = True, 0
        before = width


def _room(cluster: Cluster, shape: Shape, patience: Patience, follower: Follower, *, first: bool) -> int:
    """Wait, for so long as `patience` says, for room for all workers; then take as many as fit.

    All: at first those for which the cluster is large enough, later those that were asked for, since what was lost may
    come back.
    """
    began, told = time.monotonic(), False
    least = shape.least_at_first if first else shape.least
    full = shape.width(cluster.nodes() if first else _endless(shape))
    while True:
        width, waited = shape.width(cluster.free()), time.monotonic() - began
        if width >= full or (width >= least and waited >= patience.for_all_s):
            return width
        if waited >= max(patience.for_all_s, patience.for_least_s):
            raise ClusterError(
                f"room for {width} of at least {least} workers after waiting {waited:.0f} s",
                fix=f"When the cluster has room again, {RESUME}" if not first else "Try again when it has room",
            )
        # A worker that has just ended gives its place back within a second or two.
        if not told and waited > 3:
            told = True
            longest = patience.for_all_s if width >= least else patience.for_least_s
            follower.say(f"room for {width} of {shape.workers} workers: waiting up to {longest:.0f} s for more")
        time.sleep(_POLL_S)


def _endless(shape: Shape) -> list[Node]:
    """Nodes with room for all."""
    each, count = (shape.workers, 1) if shape.nodes is None else (shape.workers // shape.nodes, shape.nodes)
    return [Node(str(n), "", each * shape.cpus + 1, each * shape.gpus + 1) for n in range(count)]


def _change(before: int, now: int, shape: Shape) -> str:
    share = f"{shape.batch // now} of the batch's {shape.batch} patches on each"
    if not before:
        return f"training on {now} of {shape.workers} workers, which is what fits: {share}"
    return f"training on {now} workers instead of {before}: {share}"


def _epochs(run: Run) -> int:
    return len(run.read_json("history.json") or [])


@contextmanager
def _terminable(run: Run) -> Iterator[None]:
    """SIGTERM ends the run as an error does, with its cluster; what was saved is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise StoppedError("stopped by SIGTERM", uri=run.where, fix=RESUME)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- on the ranks ------------------------------------------------------------------------------------------------------


def _fit(
    run_uri: str, store: StoreConfig | None, resume: bool, number: int, shape: Shape, width: int
) -> tuple[dict[str, Any], bool]:
    """What each rank does: the stall report, and whether it stopped because more workers fit."""
    import ray

    run = Run(run_uri, store)
    mine = {"node": ray.get_runtime_context().get_node_id(), "host": socket.gethostname(), "pid": os.getpid()}
    ranks = gathered(mine)
    watch = _Watch(run, number, shape, width, [rank["node"] for rank in ranks])
    if os.environ.get("RANK", "0") == "0":
        Attempts(run).placed(number, ranks)
        report = fit(run_uri, store, resume=resume, progress=False, watch=watch)
    else:
        report = fit(run_uri, store, resume=resume, progress=False, watch=lambda _: False)
    return report, watch.grow


class _Watch:
    """After every epoch, on rank 0: whether this attempt is still the run's, and whether more workers would fit."""

    def __init__(self, run: Run, number: int, shape: Shape, width: int, nodes: Sequence[str]) -> None:
        self._run = run
        self._number = number
        self._shape = shape
        self._width = width
        self._nodes = nodes
        self.grow = False

    def __call__(self, entry: Mapping[str, Any]) -> bool:
        newest = Attempts(self._run).newest
        if newest != self._number:
            raise RunError(
                f"attempt {newest + 1} of the run took over", uri=self._run.where, fix="Let only one train it"
            )
        if self._width < self._shape.workers:
            back = clusters.with_back(clusters.free(), self._nodes, self._shape.cpus, self._shape.gpus)
            self.grow = self._shape.width(back) > self._width
        return self.grow


class Attempts:
    """RUN/workers.json: a list, an entry an attempt, with when it began and ended, why, and where each rank ran.

    The driver writes before the ranks are there and after they are gone, rank 0 in between.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def _read(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._run.read_json(WORKERS_FILE) or []
        return found

    @property
    def newest(self) -> int:
        """The number of the last attempt, from 0."""
        return len(self._read()) - 1

    def begin(self, width: int) -> int:
        """Note a new attempt; returns its number."""
        every = self._read()
        if every and every[-1]["ended"] is None:
            every[-1].update(ended=_now(), why="its driver went away")
        every.append({"began": _now(), "workers": width, "ranks": [], "ended": None, "why": None})
        self._run.write_json(WORKERS_FILE, every)
        return len(every) - 1

    def placed(self, number: int, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Note where each rank runs."""
        self._set(number, ranks=[dict(rank) for rank in ranks], nodes=len({rank["node"] for rank in ranks}))

    def end(self, number: int, why: str) -> None:
        """Note the end of an attempt."""
        self._set(number, ended=_now(), why=why)

    def _set(self, number: int, **values: Any) -> None:
        every = self._read()
        every[number].update(values)
        self._run.write_json(WORKERS_FILE, every)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
