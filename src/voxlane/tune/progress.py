"""Print the progress of a search, and the table at its end."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

from tqdm import tqdm

from voxlane.tune.capacity import TrialCapacity
from voxlane.tune.space import Space
from voxlane.tune.trials import Search, State, Trial


class SearchProgress:
    """Shows a bar on a terminal, one line per ended trial elsewhere, or nothing."""

    def __init__(self, space: Space, search: Search, progress: bool | None) -> None:
        """`progress`: a bar (True), nothing (False), or whatever suits the output (None)."""
        self._use_bar = sys.stdout.isatty() if progress is None else progress
        self._print_lines = progress is None and not self._use_bar
        self._total = max(space.trials, len(search.trials))
        self._ended = sum(trial.state != "running" for trial in search.trials)
        self._best = search.best
        self._bar = tqdm(disable=True)

    @contextmanager
    def show(self, capacity: TrialCapacity) -> Iterator[None]:
        """Show progress while trials run."""
        if self._print_lines:
            running = f"{capacity.trials} at once with {capacity.resources} each"
            print(f"{self._total - self._ended} trials, {running}", flush=True)
        self._bar = tqdm(total=self._total, initial=self._ended, unit="trial", disable=not self._use_bar)
        with self._bar:
            yield

    def show_waiting(self, message: str) -> None:
        """Show what the search is waiting for."""
        if self._use_bar or self._print_lines:
            self._bar.write(message)
            sys.stdout.flush()

    def add_ended(self, trial: Trial) -> None:
        """Count and show a trial that ended."""
        self._ended += 1
        best = self._best
        better = trial.dice is not None and (best is None or best.dice is None or trial.dice > best.dice)
        self._best = trial if better and trial.state != "infeasible" else best
        dice = "" if trial.dice is None else f" dice {trial.dice:.3f}"
        seconds = (trial.ended or trial.started) - trial.started
        has_problem = trial.state in ("failed", "infeasible")
        reason = f" ({trial.reason})" if trial.reason and has_problem else ""
        line = (
            f"trial {trial.id} ({self._ended} of {self._total}): {trial.state}{dice} after {trial.epochs} epochs in "
            f"{seconds:.0f} s, {_format_values(trial.params)}{reason}"
        )
        self._bar.update()
        if self._best is not None:
            self._bar.set_postfix_str(f"best dice {self._best.dice:.3f} (trial {self._best.id})")
        if self._use_bar and has_problem:
            self._bar.write(line)
        elif self._print_lines:
            print(line + ", the best so far" * better, flush=True)


def _format_values(params: Mapping[str, Any]) -> str:
    """Format values as they could be written on the command line."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in params.items()
    )


def format_table(search: Search, rows: int = 5) -> str:
    """Format the best trials, the number of trials per state, and how well the devices were used."""
    ranked = sorted(
        (trial for trial in search.trials if trial.dice is not None and trial.state != "infeasible"),
        key=lambda trial: (-(trial.dice or 0.0), trial.number),
    )
    lines = [f"{'trial':<7}{'dice':>7}{'epochs':>8}  {'state':<9}values"]
    lines += [f"{t.id:<7}{t.dice:>7.4f}{t.epochs:>8}  {t.state:<9}{_format_values(t.params)}" for t in ranked[:rows]]
    counts = Counter(trial.state for trial in search.trials)
    states = ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state])
    used = "" if search.efficiency is None else f", devices used {search.efficiency:.0%} of the time"
    lines.append(
        f"{len(search.trials)} trials ({states}) in {search.makespan_s:.0f} s, {search.devices:g} at once{used}"
    )
    return "\n".join(lines)
