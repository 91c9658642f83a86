"""What is known of a search: its trials, how each went, and which is best. Kept as OUT/tune.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from voxlane.errors import TuneError

VERSION = 1
State = Literal["running", "done", "stopped", "infeasible", "failed"]


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried."""

    id: str
    """Its name: the folder of its run below OUT/trials."""
    number: int
    """From 0, in the order in which trials were begun."""
    params: dict[str, Any]
    """Dotted name of every searched field, and the value that this trial has."""
    state: State
    """stopped: early, because others did better at the same epoch. infeasible: a device or machine has too little
    memory for it. failed: it raised, for which see `why`."""
    dice: float | None = None
    """The best mean Dice over its folds that it reported."""
    epochs: int = 0
    """Epochs that every fold of it has done."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Epochs done, and the mean Dice over its folds then."""
    started: float = 0.0
    """Unix seconds."""
    ended: float | None = None
    """Unix seconds; None while it is running."""
    node: str = ""
    """The machine that it ran on last."""
    why: str = ""
    """One sentence: why it is infeasible, failed, or was stopped."""
    run: str = ""
    """URI of its run, or of the folder of its folds' runs."""


@dataclass(frozen=True)
class Search:
    """All trials, and what was asked for."""

    name: str
    data: str
    """URI of the prepared dataset."""
    space: dict[str, Any]
    """Dotted name of every searched field: {kind: [...]}, such as {"loguniform": [0.0001, 0.1]}."""
    config: dict[str, Any]
    """`TuneConfig` as plain data."""
    command: list[str]
    created: str
    """ISO 8601, UTC."""
    devices: float
    """Trials that can run at once, at most."""
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        """The trial with the highest Dice; of equals the one that was begun first. None: no Dice was reported."""
        scored = [trial for trial in self.trials if trial.dice is not None and trial.state != "infeasible"]
        return max(scored, key=lambda trial: (trial.dice or 0.0, -trial.number), default=None)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first trial's start to the last one's end."""
        ended = [trial.ended for trial in self.trials if trial.ended is not None]
        return max(ended) - min(trial.started for trial in self.trials) if ended else 0.0

    @property
    def efficiency(self) -> float | None:
        """Share of `devices` x makespan in which trials ran: 1.0 is ideal. None: no trial has ended."""
        if not self.makespan_s > 0:
            return None
        busy = sum(trial.ended - trial.started for trial in self.trials if trial.ended is not None)
        return busy / (self.devices * self.makespan_s)

    def to_json(self) -> str:
        """As it is kept."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = "") -> Search:
        """As it was kept; `origin` names it in errors."""
        try:
            values = json.loads(text)
            version = values.pop("version")
            if version == VERSION:
                trials = [
                    Trial(**{**trial, "curve": [(int(epoch), float(dice)) for epoch, dice in trial["curve"]]})
                    for trial in values.pop("trials")
                ]
                if all(trial.state in get_args(State) for trial in trials):
                    return cls(**values, trials=trials)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TuneError(
                "it does not hold what a search writes", uri=origin, fix="Restore it, or search into another folder"
            ) from None
        if version != VERSION:
            raise TuneError(f"a search of another voxlane (format {version}, this one reads {VERSION})", uri=origin)
        raise TuneError("a trial has a state that no search writes", uri=origin, fix="Restore it")
