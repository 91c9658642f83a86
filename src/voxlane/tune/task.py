"""Train one trial, wherever it runs: start or continue the runs of its folds, rung by rung, and report.

Folds advance together: all of them train the epochs of a rung before any trains those of the next, so that the reported
mean Dice covers all folds at equal epochs. A trial that was started before continues from its runs' checkpoints, and
first reports the epochs that nobody received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from voxlane.errors import LostError
from voxlane.store import StoreConfig
from voxlane.train.run import Run

Report = Callable[[int, float], bool]
"""Takes the epochs trained and the mean Dice; returns True to stop the trial."""
Watch = Callable[[dict[str, Any]], bool]
"""Takes a run's history entry of an epoch; returns True to stop the run."""
Fit = Callable[[Run, int, Watch], Any]
"""Trains a run up to a number of epochs, from its last checkpoint if it has one, and calls the watch every epoch."""
_MAX_LOSSES = 3
"""The ranks of a trial may be lost fewer times than this in a row without a new epoch."""


@dataclass(frozen=True)
class TrialTask:
    """Work of a trial, sent to the process that runs it."""

    number: int
    run_uri: str
    """URI of the trial's run, or of the folder of its folds' runs."""
    config_values: dict[str, Any]
    """The trial's config, over its preset."""
    folds: tuple[int, ...]
    rungs: tuple[int, ...]
    """Epochs after which folds wait for each other; the trial ends after the last."""
    reported_epochs: int = 0
    """Number of epochs that were reported before."""

    def runs(self, store: StoreConfig | None) -> list[tuple[int, Run]]:
        """Return each fold with its run."""
        if len(self.folds) == 1:
            return [(self.folds[0], Run(self.run_uri, store))]
        return [(fold, Run(f"{self.run_uri}/fold_{fold}", store)) for fold in self.folds]


def run_trial(
    task: TrialTask, store: StoreConfig | None, begin: Callable[[Run, Mapping[str, Any]], Any], fit: Fit, report: Report
) -> None:
    """Train the trial to its end, or until `report` returns True."""
    runs = task.runs(store)
    for fold, run in runs:
        if not run.exists:
            begin(run, {**task.config_values, "fold": fold})
    reported_epochs = task.reported_epochs

    def report_new(histories: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
        """Report every new point once, in order; return True to stop the trial."""
        nonlocal reported_epochs
        for epoch, dice in mean_points(histories, reported_epochs):
            reported_epochs = epoch
            if report(epoch, dice):
                return True
        return False

    if len(runs) == 1:
        run = runs[0][1]
        entries = read_history(run)

        def watch(entry: dict[str, Any]) -> bool:
            entries.append(entry)
            return report_new([entries])

        if not report_new([entries]):
            _train_until(run, task.rungs[-1], fit, watch)
        return
    ended: set[int] = set()
    for rung in task.rungs:
        for fold, run in runs:
            if fold not in ended and _train_until(run, rung, fit, lambda entry: False) < rung:
                ended.add(fold)  # stopped by its own early_stop or max_minutes
        if report_new([read_history(run) for _, run in runs]) or len(ended) == len(runs):
            return


def _train_until(run: Run, epochs: int, fit: Fit, watch: Watch) -> int:
    """Train `run` until it has `epochs` epochs and return how many it has.

    Ranks that are lost start again as long as they make progress.
    """
    losses = 0
    while not run.is_done:
        before = len(read_history(run))
        try:
            fit(run, epochs, watch)
            return len(read_history(run))
        except LostError:
            losses = 1 if len(read_history(run)) > before else losses + 1
            if losses >= _MAX_LOSSES:
                raise
    return len(read_history(run))


def read_history(run: Run) -> list[dict[str, Any]]:
    """Return a run's history entries, one per epoch."""
    history: list[dict[str, Any]] = run.read_json("history.json") or []
    return history


def mean_points(histories: Sequence[Sequence[Mapping[str, Any]]], after: int = 0) -> Iterator[tuple[int, float]]:
    """Yield epochs trained and mean Dice over all folds, for every epoch beyond `after` that all folds validated."""
    by_fold = [
        {int(entry["epoch"]) + 1: float(entry["mean_dice"]) for entry in entries if entry["mean_dice"] is not None}
        for entries in histories
    ]
    for epoch in sorted(set(by_fold[0]).intersection(*by_fold[1:])):
        if epoch > after:
            yield epoch, sum(fold[epoch] for fold in by_fold) / len(by_fold)
