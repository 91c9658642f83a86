"""What trials of known outcome do, in Ray's workers; importable there."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from voxlane.errors import NoMemoryError
from voxlane.tune.trial import Report, Task


class Scored:
    """Reports its learning rate as its Dice, at every epoch, and leaves which process it ran in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, task: Task, report: Report) -> None:
        with open(self._folder / f"{task.number}.pid", "a") as file:
            file.write(f"{os.getpid()}\n")
        for epoch in range(task.known + 1, task.rungs[-1] + 1):
            if report(epoch, task.said["optimizer"]["lr"]):
                return


class Troubled(Scored):
    """Raises, runs out of memory, is killed once, or does well, by its number."""

    def __call__(self, task: Task, report: Report) -> None:
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


def full_disk(task: Task, report: Report) -> None:
    """Fails in the same way, whoever it is."""
    raise OSError(28, "No space left on device")


def leave(task: Task, report: Report) -> None:
    """Ends the process's thread without a word."""
    sys.exit(3)
