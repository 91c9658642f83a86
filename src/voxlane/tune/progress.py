"""What a search prints while it goes on, and the table at its end."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

from tqdm import tqdm

from voxlane.tune.room import Room
from voxlane.tune.space import Space
from voxlane.tune.trials import Search, State, Trial


class Progress:
    """A bar on a terminal, a line a trial elsewhere, or nothing."""

    def __init__(self, space: Space, search: Search, progress: bool | None) -> None:
        self._bar: Any = None
        self._wants_bar = sys.stdout.isatty() if progress is None else progress
        self._lines = progress is None
        self._total = max(space.trials, len(search.trials))
        self._over = sum(trial.state != "running" for trial in search.trials)
        self._best = search.best

    @contextmanager
    def shown(self, room: Room) -> Iterator[None]:
        """While trials run."""
        if self._lines and not self._wants_bar:
            print(f"{self._total - self._over} trials, {described(room)}", flush=True)
        self._bar = tqdm(total=self._total, initial=self._over, unit="trial") if self._wants_bar else None
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.close()

    def ended(self, trial: Trial) -> None:
        """One more is over."""
        self._over += 1
        best = self._best
        better = trial.dice is not None and (best is None or best.dice is None or trial.dice > best.dice)
        self._best = trial if better and trial.state != "infeasible" else best
        if self._bar is not None:
            self._bar.update()
            if self._best is not None:
                self._bar.set_postfix_str(f"best dice {self._best.dice:.3f} (trial {self._best.id})")
            if trial.state in ("failed", "infeasible"):
                self._bar.write(line(trial, self._over, self._total))
        elif self._lines:
            print(line(trial, self._over, self._total) + ", the best so far" * better, flush=True)


def described(room: Room) -> str:
    """How they run."""
    what = f"{room.cpus:g} CPU" + (f" and {room.gpus:g} GPU" if room.gpus else "")
    each = f"{room.workers} workers of {what}" if room.workers > 1 else what
    return f"{room.trials} at once with {each} each"


def line(trial: Trial, over: int, total: int) -> str:
    """A trial that ended."""
    dice = "" if trial.dice is None else f" dice {trial.dice:.3f}"
    seconds = (trial.ended or trial.started) - trial.started
    why = f" ({trial.why})" if trial.why and trial.state in ("failed", "infeasible") else ""
    return (
        f"trial {trial.id} ({over} of {total}): {trial.state}{dice} after {trial.epochs} epochs in {seconds:.0f} s, "
        f"{values(trial.params)}{why}"
    )


def values(params: Mapping[str, Any]) -> str:
    """As they could be written on the command line."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in params.items()
    )


def table(search: Search, rows: int = 5) -> str:
    """The best trials, how many ended how, and how well the devices were used."""
    ranked = sorted(
        (trial for trial in search.trials if trial.dice is not None and trial.state != "infeasible"),
        key=lambda trial: (-(trial.dice or 0.0), trial.number),
    )
    lines = [f"{'trial':<7}{'dice':>7}{'epochs':>8}  {'state':<9}values"]
    lines += [f"{t.id:<7}{t.dice:>7.4f}{t.epochs:>8}  {t.state:<9}{values(t.params)}" for t in ranked[:rows]]
    counts = Counter(trial.state for trial in search.trials)
    told = ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state])
    used = "" if search.efficiency is None else f", devices used {search.efficiency:.0%} of the time"
    lines.append(f"{len(search.trials)} trials ({told}) in {search.makespan_s:.0f} s, {search.devices:g} at once{used}")
    return "\n".join(lines)
