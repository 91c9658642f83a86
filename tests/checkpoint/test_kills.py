"""Savers killed at random moments leave every checkpoint whole, and nothing that gc does not find.

`make kill-test` does the same a hundred times.
"""

from __future__ import annotations

import pytest

from tests.kills import open_target, run_kills


@pytest.mark.parametrize(
    ("server", "mode", "num_kills"),
    [
        ("seaweedfs", "single", 3),
        ("emulator", "single", 3),
        ("folder", "distributed", 2),
        ("emulator", "distributed", 1),
    ],
)
def test_kills_are_survived(server: str, mode: str, num_kills: int) -> None:
    with open_target(server) as target:
        for result in run_kills(target, mode, num_kills, seed=7):
            assert not result.problems, result
