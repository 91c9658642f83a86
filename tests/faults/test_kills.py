"""Commands killed at random moments leave no processes and no temporary files, and run to their end the next time."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.kills import run_kills

KILLS = int(os.environ.get("VOXLANE_KILLS", "200"))
SEED = int(os.environ.get("VOXLANE_KILLS_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.mark.timeout(1800)
def test_some_kills_leave_nothing(tmp_path: Path) -> None:
    counts = run_kills(tmp_path, 2, SEED, ["prepare", "train devices=2"], length=1)
    assert not counts.problems(), f"seed {SEED}\n{counts.format()}"


@pytest.mark.faults
@pytest.mark.timeout(4 * 3600)
def test_many_kills_leave_nothing(tmp_path: Path) -> None:
    names = os.environ.get("VOXLANE_KILLS_COMMANDS")
    counts = run_kills(tmp_path, KILLS, SEED, names.split(",") if names else None)
    print(f"seed {SEED}\n{counts.format()}")
    assert not counts.problems()
