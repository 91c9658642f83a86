"""Print the progress of a run whose ranks train elsewhere, from its history: a line per epoch, or a bar."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from voxlane.errors import VoxlaneError
from voxlane.train.recorder import format_epoch
from voxlane.train.run import Run

_INTERVAL_S = 1.0


class Follower:
    """Reads RUN/history.json every second in a thread, while the block runs."""

    def __init__(
        self, run: Run, epochs: int, progress: bool | None = None, print_line: Callable[[str], None] | None = None
    ) -> None:
        """`progress`: a bar (True), nothing (False), or by default a bar on a terminal and otherwise a line per epoch.

        `print_line`: receives the lines about workers (default: stderr).
        """
        use_bar = sys.stdout.isatty() if progress is None else progress
        self._run = run
        self._epochs = epochs
        self._print_epochs = progress is None and not use_bar
        self._print_line = print_line
        self._last_epoch = -1
        self._bar = tqdm(total=epochs, unit="epoch", dynamic_ncols=True, disable=not use_bar)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="voxlane-follow", daemon=True)

    def __enter__(self) -> Follower:
        # Epochs of an earlier part of the run are not reported again.
        self._last_epoch = max((entry["epoch"] for entry in self._history()), default=-1)
        self._bar.update(self._last_epoch + 1)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=10)
        if kind is None:
            self._report_new_epochs()
        self._bar.close()

    def report(self, text: str) -> None:
        """Print a line about the workers."""
        if self._print_line is not None:
            self._print_line(text)
        else:
            self._bar.write(f"voxlane: {text}", file=sys.stderr)

    def _follow(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._report_new_epochs()

    def _history(self) -> list[dict[str, Any]]:
        try:
            return self._run.read_json("history.json") or []
        except VoxlaneError:
            return []  # the next read may succeed; training does not depend on it

    def _report_new_epochs(self) -> None:
        for entry in self._history():
            if entry["epoch"] <= self._last_epoch:
                continue
            self._last_epoch = entry["epoch"]
            dice = {} if entry["mean_dice"] is None else {"dice": f"{entry['mean_dice']:.3f}"}
            speed = {"patches/s": f"{entry['patches_per_s']:.1f}", "workers": entry["ranks"]}
            self._bar.update(1)
            self._bar.set_postfix({"loss": f"{entry['loss']:.3f}", **dice, **speed})
            if self._print_epochs:
                print(format_epoch(entry, self._epochs), flush=True)
