"""What one trial does, wherever it runs: begin or go on with the runs of its folds, rung by rung, and report.

Folds advance together: all of them do the epochs of a rung before any does those of the next, so that what is reported
is the mean Dice over all folds at equal epochs. A trial that was begun before goes on from its runs' own checkpoints,
and first reports what they did and nobody heard of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from voxlane.errors import LostError
from voxlane.store import StoreConfig
from voxlane.train.run import Run

Report = Callable[[int, float], bool]
"""Takes epochs done and the mean Dice then; True: stop here."""
Watch = Callable[[dict[str, Any]], bool]
Fit = Callable[[Run, int, Watch], Any]
"""Trains a run, from its last checkpoint where it has one, until so many epochs, and lets its history be watched."""
_LOST_AT_MOST = 3
"""Times in a row that the ranks of a trial may be lost without a new epoch."""


@dataclass(frozen=True)
class Task:
    """A trial's work. It travels to where the trial runs."""

    number: int
    run_uri: str
    """Its run, or the folder of its folds' runs."""
    said: dict[str, Any]
    """Its config, over the preset."""
    folds: tuple[int, ...]
    rungs: tuple[int, ...]
    """Epochs after which folds wait for each other; the last is the trial's end."""
    known: int = 0
    """Epochs that were reported before."""

    def runs(self, store: StoreConfig | None) -> list[tuple[int, Run]]:
        """Each fold and its run."""
        if len(self.folds) == 1:
            return [(self.folds[0], Run(self.run_uri, store))]
        return [(fold, Run(f"{self.run_uri}/fold_{fold}", store)) for fold in self.folds]


def work(
    task: Task, store: StoreConfig | None, begin: Callable[[Run, Mapping[str, Any]], Any], fit: Fit, report: Report
) -> None:
    """Do the trial to its end, or until `report` says to stop."""
    runs = task.runs(store)
    for fold, run in runs:
        if not run.begun:
            begin(run, {**task.said, "fold": fold})
    reporter = _Reporter(report, task.known)
    if len(runs) == 1:
        run = runs[0][1]
        entries = history(run)

        def heard(entry: dict[str, Any]) -> bool:
            entries.append(entry)
            return reporter.catch_up([entries])

        if not reporter.catch_up([entries]):
            _go_on(run, task.rungs[-1], fit, heard)
        return
    ended: set[int] = set()
    for rung in task.rungs:
        for fold, run in runs:
            if fold not in ended and _go_on(run, rung, fit, lambda entry: False) < rung:
                ended.add(fold)  # by its own early_stop or max_minutes
        if reporter.catch_up([history(run) for _, run in runs]) or len(ended) == len(runs):
            return


def _go_on(run: Run, until: int, fit: Fit, watch: Watch) -> int:
    """Train `run` until so many epochs, unless it has done them; returns how many it has done. Ranks that are lost
    come back as long as they get on."""
    lost = 0
    while not run.done:
        done = len(history(run))
        try:
            fit(run, until, watch)
            return len(history(run))
        except LostError:
            lost = 1 if len(history(run)) > done else lost + 1
            if lost >= _LOST_AT_MOST:
                raise
    return len(history(run))


def history(run: Run) -> list[dict[str, Any]]:
    """A run's entries, one an epoch."""
    found: list[dict[str, Any]] = run.read_json("history.json") or []
    return found


def points(histories: Sequence[Sequence[Mapping[str, Any]]], after: int = 0) -> Iterator[tuple[int, float]]:
    """Epochs done and mean Dice over all folds, for every epoch beyond `after` that all of them validated."""
    by_fold = [
        {int(entry["epoch"]) + 1: float(entry["mean_dice"]) for entry in entries if entry["mean_dice"] is not None}
        for entries in histories
    ]
    for epoch in sorted(set(by_fold[0]).intersection(*by_fold[1:])):
        if epoch > after:
            yield epoch, sum(fold[epoch] for fold in by_fold) / len(by_fold)


class _Reporter:
    """Reports every point once, in order, until it is told to stop."""

    def __init__(self, report: Report, known: int) -> None:
        self._report = report
        self._known = known

    def catch_up(self, histories: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
        """Report what is new; True: stop here."""
        for epoch, dice in points(histories, self._known):
            self._known = epoch
            if self._report(epoch, dice):
                return True
        return False
