"""The record of a search while it goes on: who runs, who is next, what came of whom. Nothing of Ray is known here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from voxlane.tune.search import Proposals
from voxlane.tune.space import Space
from voxlane.tune.trials import Search, State, Trial

LOST_AT_MOST = 3
"""Times in a row that a trial may be lost without a new epoch; then it has failed."""
HOPELESS = 3
"""Trials that fail with the same words, before any has a Dice, after which no more are begun."""
_WRITE_S = 1.0
"""New points of curves are written together, once in so many seconds; changes of state at once."""


class Ledger:
    """One search. All calls come from one thread."""

    def __init__(
        self,
        search: Search,
        space: Space,
        out: str,
        write: Callable[[Search], None],
        ended: Callable[[Trial], None] | None = None,
    ) -> None:
        """`out`: URI of the search. `write` keeps the record; `ended` hears of every trial that ends. Trials that
        `search` has as running are begun again, from what their runs have saved."""
        self._search = replace(search, trials=[])
        self._trials = {trial.number: trial for trial in search.trials}
        self._out, self._write, self._ended = out, write, ended
        self._proposals = Proposals(space, [trial for trial in search.trials if trial.state != "running"])
        self._again = sorted(trial.number for trial in search.trials if trial.state == "running")
        self._fresh = [number for number in range(space.trials) if number not in self._trials]
        self._open: dict[int, Trial] = {}
        self._lost: dict[int, int] = {}
        self._dirty, self._wrote_at = False, 0.0

    @property
    def search(self) -> Search:
        """As it stands."""
        return replace(self._search, trials=[self._trials[number] for number in sorted(self._trials)])

    def on(self, devices: float) -> None:
        """So many trials can run at once."""
        self._search = replace(self._search, devices=devices)
        self.flush(at_once=True)

    @property
    def finished(self) -> bool:
        """Whether every trial is over."""
        return not (self._again or self._fresh or self._open)

    @property
    def live(self) -> int:
        """Trials that were handed out and are not over."""
        return len(self._open)

    @property
    def hopeless(self) -> str:
        """Why it makes no sense to begin more trials; empty: it does."""
        over = [trial for trial in self._trials.values() if trial.state != "running"]
        reasons = {trial.why for trial in over if trial.state == "failed"}
        scored = any(trial.dice is not None or trial.state != "failed" for trial in over)
        return reasons.pop() if len(over) >= HOPELESS and len(reasons) == 1 and not scored else ""

    def next(self) -> Trial | None:
        """The next trial to run: one that was lost before, or a new one; None: there is none now."""
        if self._again:
            trial = self._trials[self._again.pop(0)]
        elif self._fresh and not self.hopeless:
            number = self._fresh.pop(0)
            name = f"{number:04d}"
            trial = Trial(name, number, self._proposals.ask(number), "running", run=f"{self._out}/trials/{name}")
        else:
            return None
        self._open[trial.number] = trial
        return trial

    def started(self, number: int) -> None:
        """It has a place to run."""
        trial = self._open[number]
        self._set(replace(trial, started=trial.started or time.time()), at_once=True)

    def reported(self, number: int, epochs: int, dice: float | None, node: str = "") -> None:
        """It has done so many epochs, with this mean Dice over its folds."""
        trial = self._open[number]
        if epochs > trial.epochs:
            self._lost.pop(number, None)
        curve, best = trial.curve, trial.dice
        if dice is not None and (not curve or epochs > curve[-1][0]):
            curve = [*curve, (epochs, dice)]
            best = max(dice, dice if best is None else best)
        epochs = max(epochs, trial.epochs)
        self._set(replace(trial, epochs=epochs, curve=curve, dice=best, node=node or trial.node))

    def over(self, number: int, state: State, why: str = "") -> None:
        """It has ended."""
        trial = replace(self._open.pop(number), state=state, why=why, ended=time.time())
        trial = replace(trial, started=trial.started or trial.ended or 0.0)
        self._trials[number] = trial
        self._proposals.tell(trial)
        self.flush(at_once=True)
        if self._ended is not None:
            self._ended(trial)

    def stopped(self, number: int, epochs: int) -> None:
        """The scheduler ended it; at the end of its `epochs` that is no stop."""
        trial = self._open[number]
        if trial.epochs >= epochs:
            self.over(number, "done")
        else:
            last = f"{trial.curve[-1][1]:.3f}" if trial.curve else "no Dice"
            self.over(number, "stopped", f"others did better than its {last} after {trial.epochs} epochs")

    def lost(self, number: int, why: str) -> None:
        """What it ran on went away: it is begun again, unless that happened too often without a new epoch."""
        self._lost[number] = self._lost.get(number, 0) + 1
        if self._lost[number] >= LOST_AT_MOST:
            self.over(number, "failed", f"lost {LOST_AT_MOST} times without a new epoch: {why}")
            return
        self._trials[number] = self._open.pop(number)
        self._again.append(number)
        self.flush(at_once=True)

    def flush(self, *, at_once: bool = False) -> None:
        """Write what is new, if it is time."""
        if at_once or (self._dirty and time.monotonic() - self._wrote_at >= _WRITE_S):
            self._write(self.search)
            self._dirty, self._wrote_at = False, time.monotonic()

    def _set(self, trial: Trial, *, at_once: bool = False) -> None:
        self._open[trial.number] = self._trials[trial.number] = trial
        self._dirty = True
        self.flush(at_once=at_once)
