"""Searches over tiny trainings."""

from __future__ import annotations

from typing import Any

SAID: dict[str, Any] = {
    "epochs": 4,
    "steps_per_epoch": 2,
    "batch": 2,
    "augment": {"preset": "none"},
    "validation": {"every_epochs": 1, "max_cases": 1},
    "optimizer": {"name": "adamw", "lr": {"loguniform": [0.0001, 0.1]}},
}
"""Fixed fields and one that is searched."""


def space(tune: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The values of a space file."""
    return {**SAID, **more, "tune": tune}
