"""Run a search on Ray Tune: adapters of Ray's searcher, scheduler and callbacks, and the work in a trial's process.

Ray stores nothing of value: the record and the runs are voxlane's, and a search resumes from those alone.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import platform
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.util.queue import Empty, Queue

from voxlane import uri as uris
from voxlane.cluster.ray import cluster as clusters
from voxlane.cluster.ray.cluster import run_in_thread, shorten
from voxlane.errors import ClusterError, LostError, NoMemoryError, TuneError, VoxlaneError
from voxlane.redaction import redact_text
from voxlane.store import StoreConfig
from voxlane.temporary import temporary_folder
from voxlane.train.config import build_config
from voxlane.train.run import Run
from voxlane.tune.capacity import TrialCapacity
from voxlane.tune.ledger import SearchLedger
from voxlane.tune.space import Space, TuneConfig, grace_epochs, rungs
from voxlane.tune.task import Report, TrialTask, Watch, run_trial
from voxlane.tune.trials import Trial

Work = Callable[[TrialTask, Report], None]
_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_SYNCER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial reports how it ended without a Dice
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "100000000",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Settings that Ray Tune reads from the environment only."""
_STOP_LIMIT_S = "600"
"""Time in which a stopped trial may save and end; Ray would give up the next trial after 2 s."""
_POLL_S = 0.5
WAIT_NOTICE_S = 30.0
"""The search says what it waits for after this long without resources for any trial, then every ten times as long."""
WAIT_LIMIT_S = 1800.0
"""The search fails once no trial has had its resources for this long."""


# -- in the workers ----------------------------------------------------------------------------------------------------


class _WorkersNotStartedError(ClusterError):
    """Raised when the workers of a trial do not start in time."""


@dataclass(frozen=True)
class Training:
    """Trains a trial. Created in the driver, called in the trial's process."""

    data: str
    store: StoreConfig | None
    capacity: TrialCapacity
    cache: str | None
    """Folder of the disk cache, as in `TuneConfig.cache`."""
    command: tuple[str, ...] = ()
    """Command line that started the search."""
    start_limit_s: float = 600.0
    """The trial fails if its workers have not started within this time."""
    lease_token: str | None = None
    """Token of the search's lease, which the leases of its runs share."""

    def __call__(self, task: TrialTask, report: Report) -> None:
        """Train the trial's runs and report their epochs."""
        from voxlane.train.run_setup import prepare_run

        def begin(run: Run, values: Mapping[str, Any]) -> None:
            values = _add_cache(values, self)
            prepare_run(self.data, run.uri, values, self.store, ranks=self.capacity.workers, command=self.command)

        train = self._train_alone if self.capacity.workers == 1 else self._train_on_ranks
        try:
            run_trial(task, self.store, begin, train, report)
        except VoxlaneError:
            raise  # its message is complete
        except Exception:
            Run(task.run_uri, self.store).write_bytes("error.txt", redact_text(traceback.format_exc()).encode())
            raise

    def _train_alone(self, run: Run, until: int, watch: Watch) -> None:
        import torch

        from voxlane.train.fit import fit

        torch.set_num_threads(self.capacity.threads)
        if 0 < self.capacity.gpus < 1 and torch.cuda.is_available():
            # Trials that share a device keep to their part, so that none runs out of memory because of another.
            torch.cuda.set_per_process_memory_fraction(self.capacity.gpus)
        fit(
            run.uri,
            self.store,
            resume=True,
            progress=False,
            until_epoch=until,
            on_epoch=watch,
            lease_token=self.lease_token,
        )

    def _train_on_ranks(self, run: Run, until: int, watch: Watch) -> None:
        from voxlane.cluster.ray.ranks import run_on_ranks

        questions, answers = Queue(actor_options={"num_cpus": 0}), Queue(actor_options={"num_cpus": 0})
        ranks = partial(
            run_on_ranks,
            partial(_train_rank, run.uri, self.store, self.lease_token, until, questions, answers),
            workers=self.capacity.workers,
            cpus=self.capacity.cpus,
            gpus=self.capacity.gpus,
            environment={"OMP_NUM_THREADS": str(self.capacity.threads)},
        )
        end = run_in_thread(ranks)
        deadline = time.monotonic() + self.start_limit_s
        try:
            while not end.done():
                try:
                    entry = questions.get(timeout=_POLL_S)
                except Empty:
                    if time.monotonic() > deadline:
                        raise _WorkersNotStartedError(
                            f"its {self.capacity.resources} each did not start within {self.start_limit_s:.0f} s",
                            fix="Check with `ray status` what else uses the cluster",
                        ) from None
                    continue
                deadline = math.inf
                if entry is not None:
                    answers.put(watch(entry))
            end.result()
        finally:
            questions.shutdown(force=True)
            answers.shutdown(force=True)


def _add_cache(values: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """Add the cache that the trials of a machine share, unless the config has one."""
    loader = dict(values.get("loader") or {})
    folder = training.cache
    if folder == "auto":
        in_bucket = uris.parse(training.data).scheme not in ("file", "memory")
        folder = os.path.join(tempfile.gettempdir(), f"voxlane-cache-{os.getuid()}") if in_bucket else None
    if folder is None or loader.get("disk_cache") is not None:
        return dict(values)
    return {**values, "loader": {**loader, "disk_cache": folder}}


def _train_rank(
    run_uri: str, store: StoreConfig | None, lease_token: str | None, until: int, questions: Queue, answers: Queue
) -> None:
    """Train one rank of a trial; rank 0 asks the trial's process after each epoch whether to stop."""
    from voxlane.train.fit import fit

    first = os.environ.get("RANK", "0") == "0"
    if first:
        questions.put(None)  # the ranks, which start together, have started

    def watch(entry: dict[str, Any]) -> bool:
        if not first:
            return False  # all ranks stop when one of them does
        questions.put(entry)
        return bool(answers.get())

    fit(
        run_uri,
        store,
        resume=True,
        progress=False,
        until_epoch=until,
        on_epoch=watch,
        lease_token=lease_token,
    )


def _run_trial_process(work: Work, config: dict[str, Any]) -> None:
    """Run one trial, as Ray Tune's function. It does not raise: its last report says how the trial ended."""
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = _STOP_LIMIT_S
    for name in ("RANK", "WORLD_SIZE"):  # inherited from the process that started the cluster
        os.environ.pop(name, None)
    stop: list[SystemExit] = []

    def report(epochs: int, dice: float) -> bool:
        try:
            tune.report({"epoch": epochs, "dice": dice, "node": platform.node()})
        except SystemExit as stopped:  # how Ray Tune stops a trial
            stop.append(stopped)
        return bool(stop)

    state, reason, reusable = "done", "", True
    try:
        work(config["task"], report)
    except (NoMemoryError, MemoryError) as error:
        state, reason = "infeasible", str(error) or "the machine ran out of memory"
    except LostError as error:
        state, reason = "lost", str(error)
    except VoxlaneError as error:
        state, reason = "failed", str(error)
        reusable = not isinstance(error, _WorkersNotStartedError)
    except Exception as error:  # noqa: BLE001  ends the trial: the error goes into the record and other trials continue
        state, reason = "failed", redact_text(f"{type(error).__name__}: {shorten(error, 500)}")
    gc.collect()  # the next trial in this process needs the memory
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    if stop:
        raise stop[0]
    tune.report({"state": state, "reason": reason, "node": platform.node()})
    if not reusable:
        # A thread still waits for the workers. They end with this process, and so does their claim on resources.
        os.kill(os.getpid(), signal.SIGKILL)


# -- in the driver -----------------------------------------------------------------------------------------------------


class _DriverOnly:
    """Stays in the driver: Ray Tune copies and pickles its objects for its own way of resuming."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {}


def make_task(trial: Trial, space: Space, capacity: TrialCapacity) -> TrialTask:
    """Return the work that is sent to the process that runs `trial`."""
    values = space.config_values(trial.params)
    if not capacity.gpus:
        values["accelerator"] = "cpu"
    epochs = build_config(values).epochs
    steps = [rung for rung in rungs(space.tune, space.max_epochs) if rung < epochs]
    return TrialTask(trial.number, trial.run, values, space.folds, (*steps, epochs), trial.epochs)


class _LedgerSearcher(_DriverOnly, Searcher):  # type: ignore[misc]
    """Gives Ray the next trial of the ledger."""

    def __init__(self, ledger: SearchLedger, space: Space, capacity: TrialCapacity) -> None:
        super().__init__(metric="dice", mode="max")
        self._ledger, self._space, self._capacity = ledger, space, capacity
        # One more trial than can run waits, so that a free worker is used at once, and as many more if proposals do not
        # depend on results. None waits if something other than Ray's resources limits how many run.
        limited_by_ray = capacity.limited_by_cluster and capacity.workers == 1
        ahead = (1 if space.search == "optuna" else capacity.trials) if limited_by_ray else 0
        self._max_active = capacity.trials + ahead

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial's config, None for not now, or FINISHED for no more."""
        if self._ledger.finished or (self._ledger.common_failure and not self._ledger.active):
            return Searcher.FINISHED
        trial = self._ledger.next_trial() if self._ledger.active < self._max_active else None
        if trial is None:
            return None
        return {"number": trial.number, "task": make_task(trial, self._space, self._capacity)}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Do nothing: the callbacks record it."""

    def save(self, checkpoint_path: str) -> None:
        """Store nothing of Ray's."""
        Path(checkpoint_path).touch()


class _LedgerASHA(ASHAScheduler):  # type: ignore[misc]
    """ASHA by the ledger's trial numbers, so that a trial that starts again is not counted twice."""

    def __init__(self, config: TuneConfig, epochs: int, earlier: list[Trial]) -> None:
        super().__init__(
            time_attr="epoch",
            metric="dice",
            mode="max",
            max_t=epochs,
            grace_period=grace_epochs(config, epochs),
            reduction_factor=config.reduction,
            # Otherwise a trial that validates only every few epochs counts at earlier rungs with a later result.
            stop_last_trials=False,
        )
        for trial in earlier:
            replayed = SimpleNamespace(config={"number": trial.number})
            self.on_trial_add(None, replayed)
            for epoch, dice in trial.curve:
                self.on_trial_result(None, replayed, {"epoch": epoch, "dice": dice})

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, _numbered(trial))

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return str(super().on_trial_result(tune_controller, _numbered(trial), result))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Do nothing: every result was counted before."""

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Do nothing: the trial may start again."""


def _numbered(trial: Any) -> Any:
    return SimpleNamespace(trial_id=trial.config["number"])


class _LedgerCallback(_DriverOnly, tune.Callback):  # type: ignore[misc]
    """Writes Ray's events into the ledger."""

    def __init__(self, ledger: SearchLedger) -> None:
        self._ledger = ledger
        self._started: set[int] = set()
        self._error: VoxlaneError | None = None
        self.stop = threading.Event()
        """Ends the search when it is set."""

    @property
    def waiting(self) -> bool:
        """Return whether trials were handed to Ray and none of them has its resources."""
        return bool(self._ledger.active) and not self._started

    def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
        """End the search if it must end; an exception from another callback would fail a trial instead."""
        if self.stop.is_set():
            raise _StopSearch
        self._note(self._ledger.flush)
        if self._error is not None:
            raise self._error

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._started.add(trial.config["number"])
        self._note(self._ledger.mark_started, trial.config["number"])

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        number = trial.config["number"]
        if "state" in result:
            self._end(number, result["state"], result["reason"])
        else:
            self._note(self._ledger.record_epochs, number, result["epoch"], result["dice"], result["node"])

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        if number in self._started:  # it did not report how it ended: the scheduler stopped it
            self._started.discard(number)
            self._note(self._ledger.finish_stopped, number, trial.config["task"].rungs[-1])

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        if number in self._started or not trial.last_result.get("state"):  # else it reported its end before it died
            self._end(number, *explain_death(trial.get_pickled_error()))

    def _end(self, number: int, state: str, reason: str) -> None:
        self._started.discard(number)
        if state == "lost":
            self._note(self._ledger.mark_lost, number, reason)
        else:
            self._note(self._ledger.finish, number, state, reason)

    def _note(self, update: Callable[..., None], *arguments: Any) -> None:
        try:
            update(*arguments)
        except VoxlaneError as error:  # the record cannot be written: the search ends, and the trials' runs are safe
            self._error = error


class _StopSearch(Exception):
    """Raised in Ray Tune's thread to end the search."""


def explain_death(error: BaseException | None) -> tuple[str, str]:
    """Return the state (infeasible or lost) and the reason of a trial whose process died."""
    from ray.exceptions import OutOfMemoryError

    # Ray has a type for a task that it ends for lack of memory, but for an actor it has only this text.
    if isinstance(error, OutOfMemoryError) or "running low on memory" in " ".join(str(error).split()):
        return "infeasible", "the machine ran out of memory, and Ray ended the trial"
    return "lost", shorten(error or "") or "its process went away"


def run_search(
    ledger: SearchLedger,
    work: Work,
    space: Space,
    capacity: TrialCapacity,
    head_address: str,
    *,
    on_wait: Callable[[str], None],
) -> None:
    """Run every trial of `ledger` to its end on the cluster that this process is connected to.

    `head_address` is the address of its head. `on_wait` is called with a message while no trial gets its resources;
    after `WAIT_LIMIT_S` that is a ClusterError.
    """
    os.environ.update(_ENVIRONMENT)
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(capacity.trials)
    for name in ("ray.tune", "ray.train", "ray.air"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    scheduler: TrialScheduler = FIFOScheduler()
    if space.tune.scheduler == "asha":
        scheduler = _LedgerASHA(space.tune, space.max_epochs, ledger.search.trials)
    callback = _LedgerCallback(ledger)
    resources: dict[str, float] = {"CPU": capacity.cpus, **({"GPU": capacity.gpus} if capacity.gpus else {})}
    if capacity.workers > 1:
        # The trial itself only waits; its ranks get the CPUs. Ray refuses a request for nothing.
        resources = {"memory": 1}
    with temporary_folder("tune") as folder:
        tuner = tune.Tuner(
            tune.with_resources(partial(_run_trial_process, work), tune.PlacementGroupFactory([resources])),
            param_space={},
            tune_config=tune.TuneConfig(
                num_samples=-1,
                search_alg=_LedgerSearcher(ledger, space, capacity),
                scheduler=scheduler,
                reuse_actors=True,
                trial_name_creator=_trial_name,
                trial_dirname_creator=_trial_name,
            ),
            run_config=tune.RunConfig(
                name="search",
                storage_path=folder,
                callbacks=[callback],
                failure_config=tune.FailureConfig(max_failures=0),
                verbose=0,
            ),
        )
        end = run_in_thread(tuner.fit)
        check_wait = _ResourceWait(callback, capacity, on_wait).check
        try:
            clusters.wait_watching_head(end, head_address, fix="Continue with --resume", on_wait=check_wait)
        except VoxlaneError:
            raise
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(cause, VoxlaneError):
                raise cause from None
            raise TuneError(f"Ray Tune failed: {type(cause).__name__}: {shorten(cause)}") from error
        finally:
            callback.stop.set()
            with suppress(TimeoutError):
                end.exception(30)  # so that Ray Tune does not talk to a cluster that is gone


def _trial_name(trial: Any) -> str:
    return f"trial_{trial.config['number']:04d}_{trial.trial_id}"


class _ResourceWait:
    """Says what the search waits for while no trial gets its resources, and ends the wait after a limit."""

    def __init__(self, callback: _LedgerCallback, capacity: TrialCapacity, on_wait: Callable[[str], None]) -> None:
        self._callback, self._capacity, self._on_wait = callback, capacity, on_wait
        self._since = self._notified = time.monotonic()

    def check(self) -> None:
        """Raise ClusterError once the wait is too long."""
        now = time.monotonic()
        if not self._callback.waiting:
            self._since = self._notified = now
            return
        waited = now - self._since
        if waited >= WAIT_LIMIT_S:
            raise ClusterError(
                f"no trial got its resources within {WAIT_LIMIT_S:.0f} s: {self._describe()}",
                fix="Check with `ray status` what else uses the cluster, then continue with --resume",
            ) from None
        first_notice = self._notified == self._since
        if now - self._notified >= (WAIT_NOTICE_S if first_notice else 10 * WAIT_NOTICE_S):
            self._notified = now
            self._on_wait(f"waiting for resources since {waited:.0f} s: {self._describe()}")

    def _describe(self) -> str:
        free, total = (
            clusters.format_resources(sum(node.cpus for node in nodes), sum(node.gpus for node in nodes))
            for nodes in (clusters.list_free_nodes(), clusters.list_nodes())
        )
        return f"a trial needs {self._capacity.resources}, and {free} of the cluster's {total} are free"
