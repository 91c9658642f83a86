"""The search on Ray Tune: adapters between Ray's searcher, scheduler and callbacks and our record, and what runs in
Ray's workers. Ray keeps nothing of value: the record and the runs are ours, and a search goes on from those alone.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import platform
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from voxlane import uri as uris
from voxlane.errors import LostError, NoMemoryError, TuneError, VoxlaneError
from voxlane.launch.cluster import Cluster
from voxlane.store import StoreConfig
from voxlane.train.run import Run
from voxlane.tune import trial as trials
from voxlane.tune.config import TuneConfig, grace
from voxlane.tune.ledger import Ledger
from voxlane.tune.room import Room
from voxlane.tune.trial import Report, Task
from voxlane.tune.trials import Trial

Work = Callable[[Task, Report], None]
_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_SYNCER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # how a trial ended is reported without a Dice
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "100000000",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Ray Tune reads these from the environment only."""
_END_S = "600"
"""A stopped trial may take so long to save and end; Ray would give up the next one after 2 s."""
_POLL_S, _HEAD_MISSES = 3.0, 4


# -- in the workers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What a trial does: it trains. Made in the driver, called where the trial runs."""

    data: str
    store: StoreConfig | None
    room: Room
    cache: str | None
    command: tuple[str, ...] = ()

    def __call__(self, task: Task, report: Report) -> None:
        """Train the trial's runs and report them."""
        from voxlane.train import fit

        def begin(run: Run, said: Mapping[str, Any]) -> None:
            fit.begin(
                self.data, run.uri, _cached(said, self), self.store, ranks=self.room.workers, command=self.command
            )

        train = self._alone if self.room.workers == 1 else self._on_ranks
        try:
            trials.work(task, self.store, begin, train, report)
        except VoxlaneError:
            raise  # its one sentence says all
        except Exception:
            Run(task.run_uri, self.store).write("error.txt", traceback.format_exc().encode())
            raise

    def _alone(self, run: Run, until: int, watch: trials.Watch) -> None:
        import torch

        from voxlane.train.fit import fit

        torch.set_num_threads(self.room.threads)
        if 0 < self.room.gpus < 1 and torch.cuda.is_available():
            # Trials that share a device: each keeps to its part, so that none runs out of memory by a neighbour.
            torch.cuda.set_per_process_memory_fraction(self.room.gpus)
        fit(run.uri, self.store, resume=True, progress=False, until=until, watch=watch)

    def _on_ranks(self, run: Run, until: int, watch: trials.Watch) -> None:
        from voxlane.launch.ranks import on_ranks

        gate = _Gate.remote()  # type: ignore[attr-defined]
        ranks = partial(
            on_ranks,
            partial(_rank, run.uri, self.store, until, gate),
            workers=self.room.workers,
            cpus=self.room.cpus,
            gpus=self.room.gpus,
            environment={"OMP_NUM_THREADS": str(self.room.threads)},
        )
        end = _in_thread(ranks)
        try:
            while not end.done():
                for entry in ray.get(gate.heard.remote()):
                    ray.get(gate.answer.remote(entry["epoch"], watch(entry)))
            end.result()
        finally:
            ray.kill(gate)


def _cached(said: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """With the cache that the trials of a machine share, unless the config has one."""
    loader = dict(said.get("loader") or {})
    folder = training.cache
    if folder == "auto":
        in_bucket = uris.parse(training.data).scheme not in ("file", "memory")
        folder = os.path.join(tempfile.gettempdir(), f"voxlane-cache-{os.getuid()}") if in_bucket else None
    if folder is None or loader.get("disk_cache") is not None:
        return dict(said)
    return {**said, "loader": {**loader, "disk_cache": folder}}


def _rank(run_uri: str, store: StoreConfig | None, until: int, gate: Any) -> None:
    """One rank of a trial; the first one asks whether to go on."""
    from voxlane.train.fit import fit

    first = os.environ.get("RANK", "0") == "0"

    def watch(entry: dict[str, Any]) -> bool:
        return first and bool(ray.get(gate.ask.remote(entry)))  # the ranks agree on what any of them says

    fit(run_uri, store, resume=True, progress=False, until=until, watch=watch)


@ray.remote(num_cpus=0)
class _Gate:
    """Where rank 0 of a trial asks, after each epoch, and the trial answers."""

    def __init__(self) -> None:
        import asyncio

        self._new: list[dict[str, Any]] = []
        self._answers: dict[int, asyncio.Future[bool]] = {}

    async def ask(self, entry: dict[str, Any]) -> bool:
        """Rank 0: whether to stop after this epoch."""
        import asyncio

        self._new.append(entry)
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._answers[entry["epoch"]] = waiting
        return await waiting

    async def heard(self) -> list[dict[str, Any]]:
        """The trial: entries that are new, at the latest after half a second."""
        import asyncio

        for _ in range(10):
            if self._new:
                break
            await asyncio.sleep(0.05)
        new, self._new = self._new, []
        return new

    async def answer(self, epoch: int, stop: bool) -> None:
        """The trial: go on, or stop."""
        self._answers.pop(epoch).set_result(stop)


def _trainable(work: Work, config: dict[str, Any]) -> None:
    """Ray Tune's function: one trial. It raises nothing: how it ended is what it reports last."""
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = _END_S
    for name in ("RANK", "WORLD_SIZE"):  # of whoever started the cluster
        os.environ.pop(name, None)
    told = json.loads(config["task"])
    task = Task(**{**told, "folds": tuple(told["folds"]), "rungs": tuple(told["rungs"])})
    stop: list[SystemExit] = []

    def report(epochs: int, dice: float) -> bool:
        try:
            tune.report({"epoch": epochs, "dice": dice, "node": platform.node()})
        except SystemExit as stopped:  # how Ray Tune stops a trial
            stop.append(stopped)
        return bool(stop)

    state, why = "done", ""
    try:
        work(task, report)
    except (NoMemoryError, MemoryError) as error:
        state, why = "infeasible", str(error) or "the machine ran out of memory"
    except LostError as error:
        state, why = "lost", str(error)
    except VoxlaneError as error:
        state, why = "failed", str(error)
    except Exception as error:  # noqa: BLE001  the end of a trial: it goes into the record, and the others go on
        state, why = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    _tidy()
    if stop:
        raise stop[0]
    tune.report({"state": state, "why": why, "node": platform.node()})


def _tidy() -> None:
    """Give back what the trial held, for the next one in this process."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- in the driver -----------------------------------------------------------------------------------------------------


class _Driver:
    """Stays in the driver: Ray Tune copies and pickles what it is given, for its own way of resuming."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Search(_Driver, Searcher):  # type: ignore[misc]
    """Ray asks here for the next trial."""

    def __init__(self, ledger: Ledger, task: Callable[[Trial], Task], at_most: int) -> None:
        super().__init__(metric="dice", mode="max")
        self._ledger, self._task, self._at_most = ledger, task, at_most

    def suggest(self, trial_id: str) -> Any:
        """Its config; None: not now; FINISHED: no more."""
        if self._ledger.finished or (self._ledger.hopeless and not self._ledger.live):
            return Searcher.FINISHED
        trial = self._ledger.next() if self._ledger.live < self._at_most else None
        return None if trial is None else {"number": trial.number, "task": json.dumps(asdict(self._task(trial)))}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """The record hears of it elsewhere."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing of Ray's is kept."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Nothing of Ray's is kept."""


class _Halving(ASHAScheduler):  # type: ignore[misc]
    """ASHA by our trial numbers, so that a trial which is begun again is not counted twice."""

    def __init__(self, config: TuneConfig, epochs: int, before: list[Trial]) -> None:
        super().__init__(
            time_attr="epoch",
            metric="dice",
            mode="max",
            max_t=epochs,
            grace_period=grace(config, epochs),
            reduction_factor=config.reduction,
            # Otherwise late results are counted at earlier rungs too, where a trial reports but once in some epochs.
            stop_last_trials=False,
        )
        for trial in before:
            stands_for = SimpleNamespace(config={"number": trial.number})
            self.on_trial_add(None, stands_for)
            for epoch, dice in trial.curve:
                self.on_trial_result(None, stands_for, {"epoch": epoch, "dice": dice})

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, _numbered(trial))

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return str(super().on_trial_result(tune_controller, _numbered(trial), result))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Every result was heard of."""

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """It may come back."""


def _numbered(trial: Any) -> Any:
    return SimpleNamespace(trial_id=trial.config["number"])


class _Events(_Driver, tune.Callback):  # type: ignore[misc]
    """Ray tells here what happens."""

    def __init__(self, ledger: Ledger, stop: threading.Event) -> None:
        self._ledger, self._stop = ledger, stop
        self._open: set[int] = set()
        self._trouble: VoxlaneError | None = None

    def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
        """The one place from which an exception ends the search; elsewhere Ray takes it for the trial's."""
        if self._stop.is_set():
            raise _Stopped
        self._note(self._ledger.flush)
        if self._trouble is not None:
            raise self._trouble

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._open.add(trial.config["number"])
        self._note(self._ledger.started, trial.config["number"])

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        number = trial.config["number"]
        if "state" not in result:
            self._note(self._ledger.reported, number, result["epoch"], result["dice"], result["node"])
            return
        self._open.discard(number)
        if result["state"] == "lost":
            self._note(self._ledger.lost, number, result["why"])
        else:
            self._note(self._ledger.over, number, result["state"], result["why"])

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        if number in self._open:  # it did not say how it ended: the scheduler stopped it
            self._open.discard(number)
            self._note(self._ledger.stopped, number, json.loads(trial.config["task"])["rungs"][-1])

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        if number not in self._open and trial.last_result.get("state"):
            return  # it had said how it ended before its process did
        self._open.discard(number)
        state, why = death(trial.get_pickled_error())
        if state == "infeasible":
            self._note(self._ledger.over, number, "infeasible", why)
        else:
            self._note(self._ledger.lost, number, why)

    def _note(self, do: Callable[..., None], *arguments: Any) -> None:
        try:
            do(*arguments)
        except VoxlaneError as error:  # the record cannot be written: the trials' runs are safe, and the search ends
            self._trouble = error


class _Stopped(Exception):
    """The driver was told to end."""


def death(error: BaseException | None) -> tuple[str, str]:
    """infeasible or lost, and why, of a trial whose process ended."""
    from ray.exceptions import OutOfMemoryError, RayActorError

    text = " ".join(str(error or "").split())
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return "infeasible", "the machine ran out of memory, and Ray ended the trial"
    if isinstance(error, RayActorError) and ("node" in text.lower() and "died" in text.lower()):
        return "lost", "its machine or process went away"
    return "lost", text[:300] or "its process went away"


def run(
    ledger: Ledger,
    task: Callable[[Trial], Task],
    work: Work,
    config: TuneConfig,
    epochs: int,
    room: Room,
    cluster: Cluster,
    *,
    model_based: bool,
) -> None:
    """Run every trial of `ledger` to its end on the cluster that this process is connected to."""
    for name, value in _ENVIRONMENT.items():
        os.environ[name] = value
    # One more than can run waits, so that a worker that gets free is used again at once; as many more where what is
    # proposed does not depend on results. Not where something else than Ray's resources bounds how many run.
    bounded = room.full and room.workers == 1
    ahead = (1 if model_based else room.trials) if bounded else 0
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(room.trials)
    for name in ("ray.tune", "ray.train", "ray.air"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    scheduler: TrialScheduler = FIFOScheduler()
    if config.scheduler == "asha":
        scheduler = _Halving(config, epochs, ledger.search.trials)
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="voxlane-tune-", ignore_cleanup_errors=True) as folder:
        tuner = tune.Tuner(
            tune.with_resources(_closed(work), _resources(room)),
            param_space={},
            tune_config=tune.TuneConfig(
                num_samples=-1,
                search_alg=_Search(ledger, task, room.trials + ahead),
                scheduler=scheduler,
                reuse_actors=True,
                trial_name_creator=_name,
                trial_dirname_creator=_name,
            ),
            run_config=tune.RunConfig(
                name="search",
                storage_path=folder,
                callbacks=[_Events(ledger, stop)],
                failure_config=tune.FailureConfig(max_failures=0),
                verbose=0,
            ),
        )
        end = _in_thread(tuner.fit)
        try:
            _wait(end, cluster)
        finally:
            stop.set()
            with suppress(TimeoutError):
                end.exception(30)  # so that Ray Tune does not speak to a cluster that is gone


def _closed(work: Work) -> Callable[[dict[str, Any]], None]:
    def trial(config: dict[str, Any]) -> None:
        _trainable(work, config)

    return trial


def _name(trial: Any) -> str:
    return f"trial_{trial.config['number']:04d}_{trial.trial_id}"


def _resources(room: Room) -> Any:
    if room.workers > 1:
        # The trial itself only waits; its ranks get the CPUs. A request for nothing is refused.
        return tune.PlacementGroupFactory([{"memory": 1}])
    return tune.PlacementGroupFactory([{"CPU": room.cpus, **({"GPU": room.gpus} if room.gpus else {})}])


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    end: Future[Any] = Future()

    def run() -> None:
        try:
            end.set_result(work())
        except BaseException as error:  # noqa: BLE001  the thread's boundary: whoever waits gets it
            end.set_exception(error)

    threading.Thread(target=run, name="voxlane-tune", daemon=True).start()
    return end


def _wait(end: Future[Any], cluster: Cluster) -> None:
    """Until the search is over. Ray waits a minute for a head that went away and then ends the process: here it is
    noticed before."""
    misses = 0
    while True:
        try:
            end.result(_POLL_S)
            return
        except TimeoutError:
            if end.done():
                raise
            misses = 0 if cluster.head_answers() else misses + 1
            if misses >= _HEAD_MISSES:
                raise LostError(
                    f"the head of the Ray cluster at {cluster.address} went away", fix="--resume goes on"
                ) from None
        except VoxlaneError:
            raise
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(cause, VoxlaneError):
                raise cause from None
            raise TuneError(f"Ray Tune failed: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}") from error
