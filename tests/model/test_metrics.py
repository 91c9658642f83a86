"""Scores match MONAI, follow the rule for empty targets, and come from additive counts."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from voxlane.errors import ConfigError
from voxlane.model.metrics import (
    EMPTY_TARGET_RULE,
    dice_counts,
    dice_from_counts,
    score_case,
    summarise_cases,
)
from voxlane.volume.description import Description

KIDNEY = Description(name="t", channels=("CT",), labels={"background": 0, "kidney": 1, "tumour": 2})
JOINED = Description(
    name="t",
    channels=("CT",),
    labels={"background": 0, "kidney": 1, "tumour": 2},
    regions={"kidney+tumour": (1, 2), "tumour": (2,)},
)
SPACING = (3.0, 0.8, 1.1)


def make_blobs(seed: int, shape: tuple[int, int, int] = (12, 30, 26)) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a ball of value 1 with value 2 at its centre. The seed sets size and position; it may touch the edge."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.arange(n) for n in shape], indexing="ij"), -1) * np.asarray(SPACING)
    centre = (0.3 + 0.4 * rng.random(3)) * np.asarray(shape) * SPACING
    distance = np.linalg.norm(grid - centre, axis=-1)
    mask = np.zeros(shape, np.uint8)
    mask[distance < 6 + 6 * rng.random()] = 1
    mask[distance < 4] = 2
    return mask


# MONAI 1.6 uses an argument that it deprecates itself.
@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy:FutureWarning")
@pytest.mark.parametrize("seed", range(6))
def test_scores_match_monai(seed: int) -> None:
    from monai.metrics import compute_dice, compute_hausdorff_distance, compute_surface_dice

    predicted, truth = make_blobs(seed), make_blobs(seed + 100)
    scores = score_case(predicted, truth, SPACING, KIDNEY, surface_tolerance_mm=1.5)
    actual, expected = (
        torch.from_numpy(np.stack([m == v for v in range(3)]))[None].float() for m in (predicted, truth)
    )
    dice = compute_dice(actual, expected, include_background=False)[0]
    hd95 = compute_hausdorff_distance(actual, expected, percentile=95, spacing=SPACING)[0]
    surface_dice = compute_surface_dice(actual, expected, [1.5, 1.5], spacing=SPACING)[0]
    for i, target in enumerate(("kidney", "tumour")):
        assert scores[target]["dice"] == pytest.approx(dice[i].item(), abs=1e-6)
        assert scores[target]["hd95_mm"] == pytest.approx(hd95[i].item(), abs=1e-4)
        assert scores[target]["surface_dice"] == pytest.approx(surface_dice[i].item(), abs=1e-6)
        assert scores[target]["volume_true_ml"] == pytest.approx((truth == i + 1).sum() * 2.64 / 1000)


def test_identical_masks_have_perfect_scores() -> None:
    mask = make_blobs(0)
    for row in score_case(mask, mask, SPACING, KIDNEY).values():
        assert (row["dice"], row["hd95_mm"], row["surface_dice"]) == (1.0, 0.0, 1.0)
        assert row["volume_true_ml"] == row["volume_predicted_ml"] > 0


def test_distances_are_in_millimetres() -> None:
    truth = np.zeros((8, 20, 20), np.uint8)
    truth[2:6, 5:15, 5:15] = 1
    moved = np.roll(truth, 2, axis=1)
    row = score_case(moved, truth, (3.0, 0.5, 0.5), KIDNEY, surface_tolerance_mm=0.9)["kidney"]
    assert row["hd95_mm"] == pytest.approx(1.0)
    assert row["dice"] == pytest.approx(0.8)
    assert 0 < row["surface_dice"] < 1
    assert score_case(moved, truth, (3.0, 0.5, 0.5), KIDNEY, 1.0)["kidney"]["surface_dice"] == 1.0


def test_regions_combine_their_values() -> None:
    predicted, truth = make_blobs(1), make_blobs(1)
    predicted[predicted == 2] = 1
    scores = score_case(predicted, truth, SPACING, JOINED)
    assert scores["kidney+tumour"]["dice"] == 1.0
    assert scores["tumour"]["dice"] == 0.0


def test_empty_targets() -> None:
    empty, mask = np.zeros((10, 20, 30), np.uint8), np.zeros((10, 20, 30), np.uint8)
    mask[4, 5:9, 5:9] = 1
    diagonal = math.sqrt(30**2 + 20**2 + 30**2)
    for predicted, truth in ((mask, empty), (empty, mask)):
        scores = score_case(predicted, truth, (3.0, 1.0, 1.0), KIDNEY)
        row = scores["kidney"]
        assert (row["dice"], row["hd95_mm"], row["surface_dice"]) == (0.0, pytest.approx(diagonal), 0.0)
        assert all(math.isnan(scores["tumour"][name]) for name in ("dice", "hd95_mm", "surface_dice"))
        assert scores["tumour"]["volume_true_ml"] == 0.0
    both_empty = score_case(empty, empty, SPACING, KIDNEY)
    assert math.isnan(both_empty["kidney"]["dice"])


def test_masks_of_different_shapes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="but the truth has"):
        score_case(np.zeros((2, 3, 4), np.uint8), np.zeros((2, 3, 5), np.uint8), SPACING, KIDNEY)


def test_summary_skips_and_counts_missing_scores() -> None:
    def make_case(kidney: float, tumour: float) -> dict[str, dict[str, float]]:
        return {t: dict.fromkeys(("dice", "hd95_mm", "surface_dice"), v) for t, v in (("k", kidney), ("t", tumour))}

    actual = summarise_cases([make_case(0.9, math.nan), make_case(0.8, 0.5), make_case(0.4, 0.7)])
    assert actual["targets"]["k"]["dice"] == {
        "mean": pytest.approx(0.7),
        "mean_ci95": [pytest.approx(0.4), pytest.approx(0.9)],
        "median": pytest.approx(0.8),
        "std": pytest.approx(np.std([0.9, 0.8, 0.4])),
        "count": 3,
        "not_scored": 0,
    }
    assert actual["targets"]["t"]["dice"]["mean"] == pytest.approx(0.6)
    assert (actual["targets"]["t"]["dice"]["count"], actual["targets"]["t"]["dice"]["not_scored"]) == (2, 1)
    assert actual["mean_dice"] == pytest.approx(0.65)
    assert (actual["cases"], actual["rule"]) == (3, EMPTY_TARGET_RULE)
    low, high = actual["mean_dice_ci95"]
    assert low < 0.65 < high
    assert actual["bootstrap"]["resamples"] == 2000
    nothing = summarise_cases([make_case(math.nan, math.nan)])
    assert nothing["mean_dice"] is None
    assert nothing["targets"]["k"]["dice"]["mean"] is None
    json.dumps([actual, nothing, summarise_cases([])], allow_nan=False)


@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_counts_give_the_same_dice_and_are_additive(seed: int) -> None:
    predicted, truth = make_blobs(seed), make_blobs(seed + 1)
    for description in (KIDNEY, JOINED):
        counts = dice_counts(torch.from_numpy(predicted), torch.from_numpy(truth), description)
        scores = score_case(predicted, truth, SPACING, description)
        assert dice_from_counts(counts).tolist() == pytest.approx([row["dice"] for row in scores.values()])
        halves = [
            dice_counts(torch.from_numpy(predicted[s]), torch.from_numpy(truth[s]), description)
            for s in (slice(0, 5), slice(5, None))
        ]
        assert torch.equal(halves[0] + halves[1], counts)
    assert dice_from_counts(torch.zeros(1, 3, dtype=torch.int64)).isnan().all()
