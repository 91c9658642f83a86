"""How a run that was told to stop, and did, says so to what started it, which may then start it again."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

STOPPED = 128 + signal.SIGTERM
"""The exit status of such a run."""
VARIABLE = "VOXLANE_STOPPED"
"""Names a file that is made then: torchrun does not pass its processes' status on."""


def mark(environment: Mapping[str, str]) -> None:
    """Make that file, where one is named."""
    if VARIABLE in environment:
        open(environment[VARIABLE], "w", encoding="utf-8").close()


def of(status: int, environment: Mapping[str, str]) -> int:
    """The status of a command that ended with `status`: STOPPED if a process of it made the file."""
    return STOPPED if status and os.path.exists(environment.get(VARIABLE, "")) else status
