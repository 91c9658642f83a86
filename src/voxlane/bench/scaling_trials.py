"""How much of a search's time its trials have: trials of known length, some at once, through the real tuner."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from voxlane.bench.scaling_setting import ScalingSetting
from voxlane.errors import TuneError

if TYPE_CHECKING:
    from voxlane.tune.trial import Report, Task

EPOCHS = 5
"""After each of which a trial reports."""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """One search."""

    concurrent: int
    trials: int
    repetition: int
    trial_s: float
    """What every trial takes by itself."""
    makespan_s: float
    """From the first trial having a place to run to the last one's end."""
    first_s: float
    """Until then, from the call: checks, and the first workers' start."""
    total_s: float
    """The whole call, with the pages and files at its end."""
    busy_s: float
    """Sum over trials of the time from each one's start to its end, as the search has it."""

    @property
    def efficiency(self) -> float:
        """Sum of the trials' own lengths over (trials at once x makespan)."""
        return self.trials * self.trial_s / (self.concurrent * self.makespan_s)

    @property
    def overhead_s(self) -> float:
        """What a trial costs beyond its own length. A last round that is not full counts as one."""
        rounds = math.ceil(self.trials / self.concurrent)
        return self.makespan_s / rounds - self.trial_s


def trial_of(seconds: float, task: Task, report: Report) -> None:
    """A trial that waits so long in all, and reports as training does."""
    began = time.perf_counter()
    epochs = task.rungs[-1]
    for epoch in range(1, epochs + 1):
        time.sleep(max(0.0, began + seconds * epoch / epochs - time.perf_counter()))
        if report(epoch, epoch / (epochs + 1)):
            return


def search(setting: ScalingSetting, data: str, out: str, concurrent: int, repetition: int, cpus: float) -> Searched:
    """Search once in this process's Ray cluster, into the folder `out`; `cpus`: of the cluster."""
    from voxlane.tune.runner import tune

    values = {
        "preset": "small",
        "epochs": EPOCHS,
        "optimizer": {"lr": {"loguniform": [1e-4, 1e-1]}},
        "tune": {
            "trials": setting.trials,
            "search": "random",
            "scheduler": "none",  # all of them take as long as is known
            "max_concurrent": concurrent,
            "cpus_per_trial": min(1.0, cpus / concurrent),
        },
    }
    asked, began = time.time(), time.perf_counter()
    found = tune(values, data, out, setting.store, progress=False, work=partial(trial_of, setting.trial_time_s))
    total_s = time.perf_counter() - began
    bad = [trial for trial in found.trials if trial.state != "done"]
    if bad or len(found.trials) != setting.trials:
        why = bad[0].why if bad else f"{len(found.trials)} trials of {setting.trials}"
        raise TuneError(f"a trial of the benchmark did not end as it should: {why}")
    return Searched(
        concurrent=concurrent,
        trials=setting.trials,
        repetition=repetition,
        trial_s=setting.trial_time_s,
        makespan_s=found.makespan_s,
        first_s=min(trial.started for trial in found.trials) - asked,
        total_s=total_s,
        busy_s=sum((trial.ended or 0.0) - trial.started for trial in found.trials),
    )
