"""The exit status that tells a launcher "stopped on request, start me again"."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

STOPPED = 128 + signal.SIGTERM
"""Exit status of a run that stopped because it was asked to."""
VARIABLE = "VOXLANE_STOPPED"
"""Environment variable that names the marker file of such a run. torchrun does not pass on its processes' status."""


def mark_stopped(environment: Mapping[str, str]) -> None:
    """Create the marker file, if the environment names one."""
    if VARIABLE in environment:
        Path(environment[VARIABLE]).touch()


def resolve_status(status: int, environment: Mapping[str, str]) -> int:
    """Return STOPPED if a failed command left the marker file, else the command's own `status`."""
    return STOPPED if status and os.path.exists(environment.get(VARIABLE, "")) else status
