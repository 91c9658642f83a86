"""Spaces of tiny trainings."""

from __future__ import annotations

from typing import Any

FIELDS: dict[str, Any] = {
    "epochs": 4,
    "steps_per_epoch": 2,
    "batch": 2,
    "augment": {"preset": "none"},
    "validation": {"every_epochs": 1, "max_cases": 1},
    "optimizer": {"name": "adamw", "lr": {"loguniform": [0.0001, 0.1]}},
}
"""Fixed fields and one searched field."""


def space(tune: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the values of a space file."""
    return {**FIELDS, **fields, "tune": tune}
