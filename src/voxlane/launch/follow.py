"""What a driver prints of a run whose ranks train elsewhere, read from its history: a line an epoch, or a bar."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm import tqdm

from voxlane.errors import VoxlaneError
from voxlane.train.recorder import line
from voxlane.train.run import Run

_EVERY_S = 1.0


class Follower:
    """Reads RUN/history.json every second, in a thread, for the time of the block."""

    def __init__(
        self, run: Run, epochs: int, progress: bool | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        """`progress`: a bar (True), nothing (False), or a bar on a terminal and otherwise a line an epoch. `say`: takes
        the lines about workers."""
        bar = sys.stdout.isatty() if progress is None else progress
        self._run = run
        self._epochs = epochs
        self._lines = progress is None and not bar
        self._say = say
        self._seen = -1
        self._bar: tqdm[Any] | None = None
        if bar:
            self._bar = tqdm(total=epochs, unit="epoch", dynamic_ncols=True)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="voxlane-follow", daemon=True)

    def __enter__(self) -> Follower:
        for entry in self._history():  # what an earlier part of the run did is no news
            self._seen = max(self._seen, entry["epoch"])
        if self._bar is not None:
            self._bar.update(self._seen + 1)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(timeout=10)
        if kind is None:
            self._tell()
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str) -> None:
        """A line about the workers."""
        if self._say is not None:
            self._say(text)
        elif self._bar is not None:
            self._bar.write(f"voxlane: {text}", file=sys.stderr)
        else:
            print(f"voxlane: {text}", file=sys.stderr, flush=True)

    def _follow(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._tell()

    def _history(self) -> list[dict[str, Any]]:
        try:
            return self._run.read_json("history.json") or []
        except VoxlaneError:
            return []  # a bucket that does not answer now is asked again; training goes on without us

    def _tell(self) -> None:
        for entry in self._history():
            if entry["epoch"] <= self._seen:
                continue
            self._seen = entry["epoch"]
            if self._bar is not None:
                self._bar.update(1)
                dice = {} if entry["mean_dice"] is None else {"dice": f"{entry['mean_dice']:.3f}"}
                speed = {"patches/s": f"{entry['patches_per_s']:.1f}", "workers": entry["ranks"]}
                self._bar.set_postfix({"loss": f"{entry['loss']:.3f}", **dice, **speed})
            elif self._lines:
                print(line(entry, self._epochs), flush=True)
