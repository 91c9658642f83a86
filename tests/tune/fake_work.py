"""Work of trials with known results, importable in Ray's workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from voxlane.errors import NoMemoryError
from voxlane.tune.task import Report, TrialTask


class Scored:
    """Reports its learning rate as its Dice at every epoch, and writes the id of its process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, task: TrialTask, report: Report) -> None:
        with open(self._folder / f"{task.number}.pid", "a") as file:
            file.write(f"{os.getpid()}\n")
        for epoch in range(task.reported_epochs + 1, task.rungs[-1] + 1):
            if report(epoch, task.config_values["optimizer"]["lr"]):
                return


class Failing(Scored):
    """Raises, runs out of memory, is killed once, or succeeds, depending on the trial's number."""

    def __call__(self, task: TrialTask, report: Report) -> None:
        if task.number == 0:
            raise ZeroDivisionError("division\nby zero")
        if task.number == 1:
            raise NoMemoryError("the GPU ran out of memory with batch=2")
        marker = self._folder / "killed"
        if task.number == 2 and not marker.exists():
            report(1, 0.1)
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__call__(task, report)


def fill_disk(task: TrialTask, report: Report) -> None:
    """Fail in the same way in every trial."""
    raise OSError(28, "No space left on device")
