"""How well a mask matches the truth: Dice, 95th-percentile Hausdorff distance, surface Dice, volumes.

The rule for empty targets, in one sentence for reports, is RULE. A target that is in neither mask says nothing about
the network, so it is not scored, which is NaN here; one that is in only one of them is wholly wrong.

A mask's surface is its voxels with a face to a voxel outside it, the edge of the volume being outside. Distances run
from the centre of each surface voxel of one mask to the nearest of the other, in millimetres; that is what MONAI
computes too.
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
from voxlane.volume.description import Description

RULE = (
    "A target absent from truth and prediction is not scored; one present in only one of them has Dice 0, "
    "surface Dice 0 and as Hausdorff distance the scan's diagonal."
)
SCORES = ("dice", "hd95_mm", "surface_dice")
"""Those that are averaged over cases."""
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
    """Target to its scores, for masks (z, y, x) of label values and `spacing` in millimetres (z, y, x).

    dice: 0 to 1. hd95_mm: the larger of the two directions' 95th percentiles. surface_dice: share of both surfaces that
    lies within `surface_tolerance_mm` of the other. volume_true_ml, volume_predicted_ml: millilitres.
    Empty targets: see RULE; not scored is NaN.
    """
    if predicted.shape != truth.shape:
        raise ConfigError(f"a mask of {predicted.shape} voxels against a truth of {truth.shape}")
    # Everything outside is background in both and adds nothing, so the work is by the organs' size, not the scan's.
    box = bounding_box((predicted != 0) | (truth != 0))
    own, other = predicted[box], truth[box]
    diagonal_mm = math.hypot(*(n * s for n, s in zip(truth.shape, spacing, strict=True)))
    scores = {}
    for target, values in zip(description.targets, description.target_values, strict=True):
        found, wanted = np.isin(own, values), np.isin(other, values)
        scores[target] = score_target(found, wanted, spacing, diagonal_mm, surface_tolerance_mm)
    return scores


def score_target(
    found: Mask, wanted: Mask, spacing: Spacing, diagonal_mm: float, surface_tolerance_mm: float
) -> Scores:
    """The scores of one target; `diagonal_mm` stands for a distance that does not exist."""
    voxel_ml = math.prod(spacing) / 1000
    sizes = int(found.sum()), int(wanted.sum())
    volumes = {"volume_true_ml": sizes[1] * voxel_ml, "volume_predicted_ml": sizes[0] * voxel_ml}
    if not any(sizes):
        return {"dice": math.nan, "hd95_mm": math.nan, "surface_dice": math.nan, **volumes}
    if not all(sizes):
        return {"dice": 0.0, "hd95_mm": diagonal_mm, "surface_dice": 0.0, **volumes}
    dice = 2 * int((found & wanted).sum()) / sum(sizes)
    there, back = surface_distances(found, wanted, spacing)
    hd95 = max(float(np.percentile(there, 95)), float(np.percentile(back, 95)))
    near = int((there <= surface_tolerance_mm).sum()) + int((back <= surface_tolerance_mm).sum())
    return {"dice": dice, "hd95_mm": hd95, "surface_dice": near / (len(there) + len(back)), **volumes}


def surface_distances(
    first: Mask, second: Mask, spacing: Spacing
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Millimetres from each surface voxel of the first mask to the nearest of the second, and the other way round.

    By trees of the surfaces' points, whose memory is by the surface, where a distance transform's is by the box.
    """
    from scipy.spatial import cKDTree

    points = [np.argwhere(surface(mask)) * np.asarray(spacing) for mask in (first, second)]
    trees = [cKDTree(p, balanced_tree=False, compact_nodes=False) for p in points]
    return trees[1].query(points[0])[0], trees[0].query(points[1])[0]


def surface(mask: Mask) -> Mask:
    """Voxels of the mask that have one of six neighbours outside it."""
    inside = np.pad(mask, 1)
    core = inside[1:-1, 1:-1, 1:-1].copy()
    for axis in range(3):
        for side in (slice(None, -2), slice(2, None)):
            place = [slice(1, -1)] * 3
            place[axis] = side
            core &= inside[tuple(place)]
    return mask & ~core


def bounding_box(mask: Mask) -> tuple[slice, slice, slice]:
    """The smallest box that holds the mask; one without voxels when it is empty."""
    sides = []
    for axis in range(3):
        others = tuple(a for a in range(3) if a != axis)
        filled = np.flatnonzero(mask.any(others))
        sides.append(slice(int(filled[0]), int(filled[-1]) + 1) if filled.size else slice(0, 0))
    return sides[0], sides[1], sides[2]


def summary(cases: Sequence[Mapping[str, Mapping[str, float | None]]]) -> dict[str, Any]:
    """Over cases' scores (None counts as NaN), plain data for JSON: for each target and score the mean, median,
    standard deviation (of the population), count, and the number not scored; over targets, `mean_dice`, the mean of
    the targets' means. What no case was scored on is None."""
    targets = list(dict.fromkeys(target for case in cases for target in case))
    table = {
        target: {name: spread([case[target][name] for case in cases if target in case]) for name in SCORES}
        for target in targets
    }
    means = [row["dice"]["mean"] for row in table.values() if row["dice"]["mean"] is not None]
    mean_dice = float(np.mean(means)) if means else None
    return {"targets": table, "mean_dice": mean_dice, "cases": len(cases), "rule": RULE}


def spread(values: Sequence[float | None]) -> dict[str, float | int | None]:
    """Mean, median, std and count of those that are numbers, and how many are not."""
    scored = np.array([v for v in values if v is not None and not math.isnan(v)])
    counts = {"count": len(scored), "not_scored": len(values) - len(scored)}
    if not len(scored):
        return {"mean": None, "median": None, "std": None, **counts}
    mean, median, std = float(scored.mean()), float(np.median(scored)), float(scored.std())
    return {"mean": mean, "median": median, "std": std, **counts}


def plain(scores: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """A case's scores with None for NaN, which JSON has no word for."""
    return {t: {name: None if math.isnan(v) else v for name, v in row.items()} for t, row in scores.items()}


def dice_counts(predicted: Tensor, truth: Tensor, description: Description) -> Tensor:
    """(targets, 3) int64: voxels in both, in the prediction alone, in the truth alone. Masks of label values, of any
    one shape and on one device, where the counts stay; counts of parts add up to those of the whole."""
    rows = []
    for values in description.target_values:
        found, wanted = members(predicted, values), members(truth, values)
        both = (found & wanted).sum()
        rows.append(torch.stack((both, found.sum() - both, wanted.sum() - both)))
    return torch.stack(rows)


def dice_of(counts: Tensor) -> Tensor:
    """Dice a target from `dice_counts`, float64; NaN for a target that is in neither mask."""
    both, alone, missed = counts.double().unbind(-1)
    return 2 * both / (2 * both + alone + missed)


def members(mask: Tensor, values: Sequence[int]) -> Tensor:
    """Where the mask has one of the values."""
    found = mask == values[0]
    for value in values[1:]:
        found |= mask == value
    return found
