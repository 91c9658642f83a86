"""Loss curves of runs: how far two paths of one computation lie apart, and how far two seeds do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def mean(values: Sequence[float | None]) -> float:
    """Of those that are there; 0 where none is."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else 0.0


def comparison(rows: Sequence[dict[str, Any]], smooth: int = 4) -> dict[str, Any] | None:
    """How far the paths lie apart at equal seeds, and seeds at equal paths: over the curves, over their second halves,
    and at most, each smoothed by a running mean over `smooth` windows; and the same of Dice. None where a path or a
    seed is missing."""
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
    loss = {name: [_apart(a["losses"], b["losses"], smooth) for a, b in found] for name, found in pairs.items()}
    means = {path: mean([by[path, seed]["scores"]["mean_dice"] for seed in seeds]) for path in ("fast", "plain")}
    dice = {
        name: [abs(a["scores"]["mean_dice"] - b["scores"]["mean_dice"]) for a, b in found]
        for name, found in pairs.items()
    }
    # The widest gap of paths against the narrowest of seeds: a run that went astray must not widen what it is held to.
    # The second half counts by itself, because seeds differ most while their first weights still show.
    widest = {part: max(one[part] for one in loss["paths"]) for part in ("mean", "late")}
    spread = {part: min(one[part] for one in loss["seeds"]) for part in ("mean", "late")}
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
    """Running means; as many fewer as are needed for the first."""
    over = min(over, len(losses))
    return [sum(losses[i : i + over]) / over for i in range(len(losses) - over + 1)]


def _apart(first: Sequence[float], second: Sequence[float], smooth: int) -> dict[str, float]:
    gaps = [abs(a - b) for a, b in zip(smoothed(first, smooth), smoothed(second, smooth), strict=True)]
    return {"mean": mean(gaps), "late": mean(gaps[len(gaps) // 2 :]), "most": max(gaps)}
