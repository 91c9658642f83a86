"""Compare the loss curves of runs: the difference between two paths of a computation, and between two seeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def mean(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are not None; 0 if there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else 0.0


def comparison(rows: Sequence[dict[str, Any]], smooth: int = 4) -> dict[str, Any] | None:
    """Compare paths at equal seeds, and seeds at equal paths, by loss and by Dice.

    Losses are smoothed by a running mean over `smooth` windows. Differences are given as the mean over the curve, the
    mean over its second half, and the maximum. Return None if a path or a seed is missing.
    """
    by = {(row["path"], row["seed"]): row for row in rows}
    seeds = sorted({seed for path, seed in by if path == "fast"} & {seed for path, seed in by if path == "plain"})
    if len(seeds) < 2:
        return None
    pairs = {
        "paths": [(by["fast", seed], by["plain", seed]) for seed in seeds],
        "seeds": [
            (by[path, a], by[path, b]) for path in ("fast", "plain") for a, b in itertools.combinations(seeds, 2)
        ],
        "again": [(by["fast", seed], by["fast, again", seed]) for seed in seeds if ("fast, again", seed) in by],
    }
    loss = {name: [_apart(a["losses"], b["losses"], smooth) for a, b in run_pairs] for name, run_pairs in pairs.items()}
    means = {path: mean([by[path, seed]["scores"]["mean_dice"] for seed in seeds]) for path in ("fast", "plain")}
    dice = {
        name: [abs(a["scores"]["mean_dice"] - b["scores"]["mean_dice"]) for a, b in run_pairs]
        for name, run_pairs in pairs.items()
    }
    # The largest gap between paths is compared with the smallest gap between seeds, so that a diverging run cannot
    # loosen its own limit. The second half is compared separately, because seeds differ most at the start.
    widest = {part: max(gap[part] for gap in loss["paths"]) for part in ("mean", "late")}
    spread = {part: min(gap[part] for gap in loss["seeds"]) for part in ("mean", "late")}
    return {
        "seeds": seeds,
        "loss_apart": loss,
        "loss_paths": widest,
        "loss_seeds": spread,
        "loss_agrees": all(widest[part] <= spread[part] for part in spread),
        "dice_apart": dice,
        "dice_means": means,
        "dice_difference": means["fast"] - means["plain"],
        "dice_within_0_005": abs(means["fast"] - means["plain"]) <= 0.005,
    }


def smoothed(losses: Sequence[float], over: int) -> list[float]:
    """Return running means over `over` values, `over` - 1 fewer than there are losses."""
    over = min(over, len(losses))
    return [sum(losses[i : i + over]) / over for i in range(len(losses) - over + 1)]


def _apart(first: Sequence[float], second: Sequence[float], smooth: int) -> dict[str, float]:
    gaps = [abs(a - b) for a, b in zip(smoothed(first, smooth), smoothed(second, smooth), strict=True)]
    return {"mean": mean(gaps), "late": mean(gaps[len(gaps) // 2 :]), "most": max(gaps)}
