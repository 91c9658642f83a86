"""Metrics that compare a predicted mask with the truth: Dice, 95th-percentile Hausdorff distance, surface Dice,
volumes.

EMPTY_TARGET_RULE states for reports how empty targets are scored. A target in neither mask says nothing about the
network, so its scores are NaN; a target in only one mask is completely wrong.

The surface of a mask is its voxels that share a face with a voxel outside it; the edge of the volume counts as outside.
Distances are in millimetres, from the centre of each surface voxel of one mask to the nearest of the other, as in
MONAI.

To add a metric, compute it in `score_target` and, if it is to be averaged over cases, add it to AVERAGED_SCORES.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from voxlane.errors import ConfigError
from voxlane.model.statistics import bootstrap_mean, describe_bootstrap
from voxlane.volume.description import Description

EMPTY_TARGET_RULE = (
    "A target that is absent from both ground truth and prediction is not scored. A target that is in only one of them "
    "scores Dice 0 and surface Dice 0, and its Hausdorff distance is the scan's diagonal."
)
AVERAGED_SCORES = ("dice", "hd95_mm", "surface_dice")
"""Names of the scores that are averaged over cases."""
Scores = dict[str, float]
Mask = npt.NDArray[np.bool_]
Spacing = tuple[float, float, float]


def score_case(
    predicted: npt.NDArray[np.uint8],
    truth: npt.NDArray[np.uint8],
    spacing: Spacing,
    description: Description,
    surface_tolerance_mm: float = 1.0,
) -> dict[str, Scores]:
    """Return the scores of each target, for masks (z, y, x) of label values and `spacing` in millimetres (z, y, x).

    dice: 0 to 1. hd95_mm: the larger of the two directions' 95th percentiles. surface_dice: fraction of both surfaces
    within `surface_tolerance_mm` of the other. volume_true_ml, volume_predicted_ml: millilitres.
    For empty targets see EMPTY_TARGET_RULE; a target that is not scored has NaN.
    """
    from scipy.ndimage import find_objects

    if predicted.shape != truth.shape:
        raise ConfigError(f"the mask has {predicted.shape} voxels, but the truth has {truth.shape}")
    # Outside the box both are background, so the work depends on the size of the organs, not of the scan.
    boxes = find_objects(((predicted != 0) | (truth != 0)).view(np.uint8))
    box = boxes[0] if boxes else (slice(0, 0),) * 3
    predicted_box, truth_box = predicted[box], truth[box]
    diagonal_mm = math.hypot(*(n * s for n, s in zip(truth.shape, spacing, strict=True)))
    scores = {}
    for target, values in zip(description.targets, description.target_values, strict=True):
        masks = np.isin(predicted_box, values), np.isin(truth_box, values)
        scores[target] = score_target(*masks, spacing, diagonal_mm, surface_tolerance_mm)
    return scores


def score_target(
    predicted: Mask, truth: Mask, spacing: Spacing, diagonal_mm: float, surface_tolerance_mm: float
) -> Scores:
    """Return the scores of one target; `diagonal_mm` replaces a distance that does not exist."""
    voxel_ml = math.prod(spacing) / 1000
    sizes = int(predicted.sum()), int(truth.sum())
    volumes = {"volume_true_ml": sizes[1] * voxel_ml, "volume_predicted_ml": sizes[0] * voxel_ml}
    if not any(sizes):
        return {"dice": math.nan, "hd95_mm": math.nan, "surface_dice": math.nan, **volumes}
    if not all(sizes):
        return {"dice": 0.0, "hd95_mm": diagonal_mm, "surface_dice": 0.0, **volumes}
    dice = 2 * int((predicted & truth).sum()) / sum(sizes)
    forward, backward = surface_distances(predicted, truth, spacing)
    hd95 = max(float(np.percentile(forward, 95)), float(np.percentile(backward, 95)))
    near = int((forward <= surface_tolerance_mm).sum()) + int((backward <= surface_tolerance_mm).sum())
    return {"dice": dice, "hd95_mm": hd95, "surface_dice": near / (len(forward) + len(backward)), **volumes}


def surface_distances(
    first: Mask, second: Mask, spacing: Spacing
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the millimetres from each surface voxel of the first mask to the nearest of the second, and the reverse.

    Trees of surface points need memory in proportion to the surface, a distance transform in proportion to the box.
    """
    from scipy.spatial import cKDTree

    points = [np.argwhere(surface(mask)) * np.asarray(spacing) for mask in (first, second)]
    trees = [cKDTree(p, balanced_tree=False, compact_nodes=False) for p in points]
    return trees[1].query(points[0])[0], trees[0].query(points[1])[0]


def surface(mask: Mask) -> Mask:
    """Return the voxels of the mask that have one of six neighbours outside it."""
    from scipy.ndimage import binary_erosion

    border: Mask = mask & ~binary_erosion(mask)
    return border


def summarise_cases(cases: Sequence[Mapping[str, Mapping[str, float | None]]]) -> dict[str, Any]:
    """Summarise the scores of cases, in which None counts as NaN, as JSON-compatible data.

    For each target and score: mean with its bootstrap confidence interval (`mean_ci95`), median, population standard
    deviation, count, and the number of cases not scored. `mean_dice` is the mean over targets of their means. Values
    without any scored case, and intervals of fewer than two, are None.
    """
    targets = list(dict.fromkeys(target for case in cases for target in case))
    table = {
        target: {
            name: summarise_values([case[target][name] for case in cases if target in case]) for name in AVERAGED_SCORES
        }
        for target in targets
    }
    means = [row["dice"]["mean"] for row in table.values() if row["dice"]["mean"] is not None]
    dice = [[_as_number(case[t]["dice"]) if t in case else math.nan for t in targets] for case in cases]
    interval = bootstrap_mean(dice) if means else None
    return {
        "targets": table,
        "mean_dice": float(np.mean(means)) if means else None,
        "mean_dice_ci95": None if interval is None else list(interval),
        "bootstrap": describe_bootstrap(),
        "cases": len(cases),
        "rule": EMPTY_TARGET_RULE,
    }


def summarise_values(values: Sequence[float | None]) -> dict[str, Any]:
    """Return mean, its interval, median, std and count of the numbers, and the number of other values."""
    scored = np.array([v for v in values if v is not None and not math.isnan(v)])
    counts = {"count": len(scored), "not_scored": len(values) - len(scored)}
    if not len(scored):
        return {"mean": None, "mean_ci95": None, "median": None, "std": None, **counts}
    mean, median, std = float(scored.mean()), float(np.median(scored)), float(scored.std())
    interval = bootstrap_mean(scored)
    return {"mean": mean, "mean_ci95": interval and list(interval), "median": median, "std": std, **counts}


def _as_number(value: float | None) -> float:
    return math.nan if value is None else value


def dice_counts(predicted: Tensor, truth: Tensor, description: Description) -> Tensor:
    """Count (targets, 3) int64: voxels in both masks, only in the prediction, and only in the truth.

    The masks of label values have the same shape and device; the counts stay on that device. The counts of parts of a
    volume add up to those of the volume.
    """
    rows = []
    for values in description.target_values:
        in_prediction, in_truth = select_values(predicted, values), select_values(truth, values)
        both = (in_prediction & in_truth).sum()
        rows.append(torch.stack((both, in_prediction.sum() - both, in_truth.sum() - both)))
    return torch.stack(rows)


def dice_from_counts(counts: Tensor) -> Tensor:
    """Return the Dice of each target from `dice_counts`, float64; NaN for a target in neither mask."""
    both, only_predicted, only_true = counts.double().unbind(-1)
    return 2 * both / (2 * both + only_predicted + only_true)


def select_values(mask: Tensor, values: Sequence[int]) -> Tensor:
    """Return the voxels at which the mask has one of the values."""
    selected = mask == values[0]
    for value in values[1:]:
        selected |= mask == value
    return selected
