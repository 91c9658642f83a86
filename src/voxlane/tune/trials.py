"""The record of a search: its trials, how each went, and which is best. Stored as OUT/tune.json."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from voxlane.errors import TuneError

VERSION = 1
State = Literal["running", "done", "stopped", "infeasible", "failed"]


@dataclass(frozen=True)
class Trial:
    """One config that the search tried."""

    id: str
    """Name of the trial: the folder of its run below OUT/trials."""
    number: int
    """Number from 0, in the order in which trials started."""
    params: dict[str, Any]
    """Value of every searched field by dotted name."""
    state: State
    """stopped: early, because other trials did better at the same epoch. infeasible: a device or machine has too little
    memory. failed: the trial raised an error; `reason` holds its message."""
    dice: float | None = None
    """Best mean Dice over the folds that the trial reported."""
    epochs: int = 0
    """Number of epochs that every fold has trained."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Epochs trained and mean Dice over the folds at that point."""
    started: float = 0.0
    """Start time in Unix seconds."""
    ended: float | None = None
    """End time in Unix seconds; None while the trial is running."""
    node: str = ""
    """Name of the machine that ran the trial last."""
    reason: str = ""
    """Reason for which the trial is infeasible, failed or was stopped, in one sentence."""
    run: str = ""
    """URI of the trial's run, or of the folder of its folds' runs."""

    @property
    def score(self) -> float | None:
        """Return the Dice if it is a finite number, otherwise None."""
        return self.dice if self.dice is not None and math.isfinite(self.dice) else None

    def end(self, now: float) -> float:
        """Return the end time; `now` if it has not ended."""
        return now if self.ended is None else self.ended

    def seconds(self, now: float) -> float:
        """Return how long the trial ran, until `now` if it has not ended; 0 if it has not started."""
        return max(0.0, self.end(now) - self.started) if self.started > 0 else 0.0


@dataclass(frozen=True)
class Search:
    """All trials of a search and its settings."""

    name: str
    """Name of the search: the last part of its URI."""
    data: str
    """URI of the prepared dataset."""
    space: dict[str, Any]
    """Distribution of every searched field by dotted name, such as {"loguniform": [0.0001, 0.1]}."""
    config: dict[str, Any]
    """`TuneConfig` as plain data."""
    command: list[str]
    """Command line that started the search."""
    created: str
    """Creation time, ISO 8601 in UTC."""
    devices: float
    """Maximum number of trials that can run at once."""
    trials: list[Trial] = field(default_factory=list)
    """Trials by number."""

    @property
    def best(self) -> Trial | None:
        """Return the trial with the highest Dice, the earliest among equals; None if no trial reported a Dice."""
        scored = [trial for trial in self.trials if trial.dice is not None and trial.state != "infeasible"]
        return max(scored, key=lambda trial: (trial.dice or 0.0, -trial.number), default=None)

    @property
    def last_time(self) -> float:
        """Return the last start or end of a trial, in Unix seconds; 0 without trials."""
        return max((trial.end(trial.started) for trial in self.trials), default=0.0)

    @property
    def busy_s(self) -> float:
        """Return the sum of the durations of ended trials, in seconds."""
        return sum(trial.ended - trial.started for trial in self.trials if trial.ended is not None)

    @property
    def makespan_s(self) -> float:
        """Return the seconds from the first trial's start to the last one's end."""
        ended = [trial.ended for trial in self.trials if trial.ended is not None]
        return max(ended) - min(trial.started for trial in self.trials) if ended else 0.0

    @property
    def efficiency(self) -> float | None:
        """Return the share of `devices` x makespan in which trials ran, 1.0 being ideal; None if no trial has ended."""
        return self.busy_s / (self.devices * self.makespan_s) if self.makespan_s > 0 else None

    def to_json(self) -> str:
        """Return the text of tune.json."""
        values = asdict(self)
        values["trials"] = [_rename(trial, "reason", "why") for trial in values["trials"]]
        return json.dumps({"version": VERSION, **values}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = "") -> Search:
        """Read the text of tune.json; `origin` names the file in errors."""
        try:
            values = json.loads(text)
            if (version := values.pop("version")) != VERSION:
                raise TuneError(f"written by another voxlane (format {version}, this one reads {VERSION})", uri=origin)
            trials = [
                Trial(**{**trial, "curve": [(int(epoch), float(dice)) for epoch, dice in trial["curve"]]})
                for trial in (_rename(trial, "why", "reason") for trial in values.pop("trials"))
            ]
            search = cls(**values, trials=trials)
        except (ValueError, KeyError, TypeError, AttributeError):
            fix = "Restore it, or search into another folder"
            raise TuneError("not the record of a search", uri=origin, fix=fix) from None
        if any(trial.state not in get_args(State) for trial in trials):
            raise TuneError("a trial has an unknown state", uri=origin, fix="Restore the file")
        return search


def _rename(values: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Rename a key and keep the order; tune.json calls a trial's reason `why`."""
    return {new if key == old else key: value for key, value in values.items()}
