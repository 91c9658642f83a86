"""Keep the record of a running search: which trials run, which is next, and how each ended. It does not use Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from voxlane.tune.proposals import Proposals
from voxlane.tune.space import Space
from voxlane.tune.trials import Search, State, Trial

MAX_LOSSES = 3
"""A trial fails once it has been lost this many times in a row without a new epoch."""
MAX_EQUAL_FAILURES = 3
"""No trial starts after this many trials failed with the same message before any reported a Dice."""
_WRITE_INTERVAL_S = 1.0
"""New points of curves are written together, once per interval; changes of state are written at once."""


class SearchLedger:
    """Record of one search. All calls come from one thread."""

    def __init__(
        self,
        search: Search,
        space: Space,
        out: str,
        write: Callable[[Search], None],
        on_end: Callable[[Trial], None] | None = None,
    ) -> None:
        """Continue `search` at the URI `out`; trials that it lists as running start again from their checkpoints.

        `write` stores the record; `on_end` is called with every trial that ends.
        """
        self._search = replace(search, trials=[])
        self._trials = {trial.number: trial for trial in search.trials}
        self._out, self._write, self._on_end = out, write, on_end
        self._proposals = Proposals(space, [trial for trial in search.trials if trial.state != "running"])
        self._restarts = sorted(trial.number for trial in search.trials if trial.state == "running")
        self._new_numbers = [number for number in range(space.trials) if number not in self._trials]
        self._active: dict[int, Trial] = {}
        self._losses: dict[int, int] = {}
        self._dirty, self._written_at = False, 0.0

    @property
    def search(self) -> Search:
        """Return the current record."""
        return replace(self._search, trials=[self._trials[number] for number in sorted(self._trials)])

    def set_devices(self, devices: float) -> None:
        """Record how many trials can run at once."""
        self._search = replace(self._search, devices=devices)
        self.flush(at_once=True)

    @property
    def finished(self) -> bool:
        """Return whether every trial has ended."""
        return not (self._restarts or self._new_numbers or self._active)

    @property
    def active(self) -> int:
        """Return the number of trials that were handed out and have not ended."""
        return len(self._active)

    @property
    def common_failure(self) -> str:
        """Return the message with which every trial so far failed, after which no more trials start; or an empty
        string."""
        ended = [trial for trial in self._trials.values() if trial.state != "running"]
        reasons = {trial.reason for trial in ended if trial.state == "failed"}
        any_success = any(trial.dice is not None or trial.state != "failed" for trial in ended)
        return reasons.pop() if len(ended) >= MAX_EQUAL_FAILURES and len(reasons) == 1 and not any_success else ""

    def next_trial(self) -> Trial | None:
        """Return the next trial to run, first those that were lost; None if there is none now."""
        if self._restarts:
            trial = self._trials[self._restarts.pop(0)]
        elif self._new_numbers and not self.common_failure:
            number = self._new_numbers.pop(0)
            name = f"{number:04d}"
            trial = Trial(name, number, self._proposals.propose(number), "running", run=f"{self._out}/trials/{name}")
        else:
            return None
        self._active[trial.number] = trial
        return trial

    def mark_started(self, number: int) -> None:
        """Record that the trial has its resources."""
        trial = self._active[number]
        self._set(replace(trial, started=trial.started or time.time()), at_once=True)

    def record_epochs(self, number: int, epochs: int, dice: float | None, node: str = "") -> None:
        """Record the number of epochs that the trial has trained, and its mean Dice over folds."""
        trial = self._active[number]
        if epochs > trial.epochs:
            self._losses.pop(number, None)
        curve, best = trial.curve, trial.dice
        if dice is not None and (not curve or epochs > curve[-1][0]):
            curve = [*curve, (epochs, dice)]
            best = max(dice, dice if best is None else best)
        epochs = max(epochs, trial.epochs)
        self._set(replace(trial, epochs=epochs, curve=curve, dice=best, node=node or trial.node))

    def finish(self, number: int, state: State, reason: str = "") -> None:
        """Record the end of a trial."""
        trial = replace(self._active.pop(number), state=state, reason=reason, ended=time.time())
        trial = replace(trial, started=trial.started or trial.ended or 0.0)
        self._trials[number] = trial
        self._proposals.add_result(trial)
        self.flush(at_once=True)
        if self._on_end is not None:
            self._on_end(trial)

    def finish_stopped(self, number: int, epochs: int) -> None:
        """Record that the scheduler ended a trial of `epochs`; after its last epoch the trial is done."""
        trial = self._active[number]
        if trial.epochs >= epochs:
            self.finish(number, "done")
        else:
            last = f"{trial.curve[-1][1]:.3f}" if trial.curve else "no Dice"
            self.finish(number, "stopped", f"other trials did better than its {last} after {trial.epochs} epochs")

    def mark_lost(self, number: int, reason: str) -> None:
        """Record that the trial's process or machine went away; the trial starts again unless it is lost too often."""
        self._losses[number] = self._losses.get(number, 0) + 1
        if self._losses[number] >= MAX_LOSSES:
            self.finish(number, "failed", f"lost {MAX_LOSSES} times without a new epoch: {reason}")
            return
        self._trials[number] = self._active.pop(number)
        self._restarts.append(number)
        self.flush(at_once=True)

    def flush(self, *, at_once: bool = False) -> None:
        """Write changes once the write interval has passed, or at once."""
        if at_once or (self._dirty and time.monotonic() - self._written_at >= _WRITE_INTERVAL_S):
            self._write(self.search)
            self._dirty, self._written_at = False, time.monotonic()

    def _set(self, trial: Trial, *, at_once: bool = False) -> None:
        self._active[trial.number] = self._trials[trial.number] = trial
        self._dirty = True
        self.flush(at_once=at_once)
