"""Positions, cases and seeds of sampled patches."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxlane.volume.patch_sampling import (
    Placement,
    augment_seed,
    case_for_position,
    draw_patch,
    is_forced,
    start_bounds,
)

SIZE = st.integers(1, 40)
TRIPLE = st.tuples(SIZE, SIZE, SIZE)
NO_FOREGROUND = np.empty((0, 4), np.int32)


@st.composite
def shapes_and_foreground(draw: Any) -> tuple[Any, np.ndarray]:
    """Draw the shape of a volume, and foreground voxels inside it."""
    shape = draw(TRIPLE)
    voxels = draw(st.lists(st.tuples(st.integers(1, 3), *(st.integers(0, n - 1) for n in shape)), max_size=8))
    return shape, np.array(voxels, np.int32).reshape(-1, 4)


@given(shapes_and_foreground(), TRIPLE, st.booleans(), st.sampled_from(["centre", "inside"]), st.integers(0, 10**6))
def test_patch_is_inside_the_volume_or_centred_on_it(
    volume: Any, patch: Any, forced: bool, placement: Placement, position: int
) -> None:
    shape, foreground = volume
    voxels_to_draw = foreground if forced else None
    start = draw_patch(
        position, seed=1, epoch=2, patch=patch, shape=shape, foreground=voxels_to_draw, placement=placement
    )
    for first, size, voxels in zip(start, patch, shape, strict=True):
        if size <= voxels:
            assert 0 <= first <= voxels - size
        else:  # centred on the volume, with the odd voxel after it
            before, after = -first, first + size - voxels
            assert before >= 0
            assert after - before in (0, 1)
    if forced and len(foreground):
        inside = ((foreground[:, 1:] >= start) & (foreground[:, 1:] < np.add(start, patch))).all(axis=1)
        assert inside.any()


@given(TRIPLE, TRIPLE)
def test_start_bounds_span_the_volume(patch: Any, shape: Any) -> None:
    low, high = start_bounds(patch, shape)
    assert (low <= high).all()
    for axis in range(3):
        expected = max(0, shape[axis] - patch[axis])
        assert high[axis] - low[axis] == expected


def test_starts_are_uniform() -> None:
    starts = Counter(
        draw_patch(p, seed=3, epoch=0, patch=(4, 4, 4), shape=(7, 5, 4), foreground=NO_FOREGROUND) for p in range(8000)
    )
    assert len(starts) == 4 * 2 * 1
    assert all(abs(count - 1000) < 5 * math.sqrt(1000) for count in starts.values())


def test_classes_are_drawn_equally_often() -> None:
    common, rare = np.full((999, 4), (1, 5, 5, 5)), np.full((1, 4), (7, 30, 30, 30))
    foreground = np.concatenate([common, rare]).astype(np.int32)
    patches = [
        draw_patch(p, seed=0, epoch=0, patch=(8, 8, 8), shape=(40, 40, 40), foreground=foreground) for p in range(2000)
    ]
    assert set(patches) == {(1, 1, 1), (26, 26, 26)}  # the foreground voxel is in the centre
    assert abs(sum(start[0] == 26 for start in patches) - 1000) < 5 * math.sqrt(500)


def test_placement_inside_puts_the_voxel_anywhere() -> None:
    voxel = np.array([[1, 20, 20, 20]], np.int32)
    starts = {
        draw_patch(p, seed=0, epoch=0, patch=(4, 4, 4), shape=(40, 40, 40), foreground=voxel, placement="inside")
        for p in range(2000)
    }
    assert starts == {(z, y, x) for z in range(17, 21) for y in range(17, 21) for x in range(17, 21)}


@given(st.floats(0, 1), st.integers(0, 500))
def test_fraction_of_forced_patches_is_exact(share: float, count: int) -> None:
    assert sum(is_forced(p, share) for p in range(count)) == int(count * share + 1e-9)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.33, 1 / 3, 0.5])
def test_forced_patches_are_spread_evenly(share: float) -> None:
    forced = [p for p in range(3000) if is_forced(p, share)]
    gaps = {b - a for a, b in pairwise(forced)}
    assert gaps <= {math.floor(1 / share), math.floor(1 / share) + 1}
    assert not any(is_forced(p, 0.0) for p in range(50))
    assert all(is_forced(p, 1.0) for p in range(50))


@given(st.integers(1, 20), st.integers(1, 50), st.integers(0, 5), st.integers(0, 100))
def test_every_case_is_drawn_once_per_round(cases: int, samples: int, seed: int, first_round: int) -> None:
    def case_at(global_position: int) -> int:
        epoch, position = divmod(global_position, samples)
        return case_for_position(position, cases=cases, samples=samples, seed=seed, epoch=epoch)

    for round_index in (first_round, first_round + 1):
        assert sorted(case_at(round_index * cases + i) for i in range(cases)) == list(range(cases))


def test_rounds_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(case_for_position(p, cases=12, samples=12, seed=seed, epoch=epoch) for p in range(12))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_draws_depend_only_on_seed_epoch_and_position() -> None:
    def draw_start(position: int, seed: int = 0, epoch: int = 0) -> Any:
        return draw_patch(position, seed=seed, epoch=epoch, patch=(8, 8, 8), shape=(90, 90, 90))

    starts = [draw_start(p) for p in range(60)]
    assert [draw_start(p) for p in reversed(range(60))] == starts[::-1]  # the order of draws does not matter
    assert len(set(starts)) == 60
    assert starts != [draw_start(p, seed=1) for p in range(60)]
    assert starts != [draw_start(p, epoch=1) for p in range(60)]


def test_augmentation_seeds_are_unique() -> None:
    seeds = [augment_seed(p, seed=s, epoch=e) for p in range(50) for s in range(3) for e in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 62 for seed in seeds)
    assert augment_seed(7, seed=1, epoch=2) == augment_seed(7, seed=1, epoch=2)


def test_draws_of_a_seed_never_change() -> None:
    """Resumed runs rely on these numbers: changing them breaks every unfinished run."""
    assert draw_patch(5, seed=1, epoch=2, patch=(8, 8, 8), shape=(90, 80, 70)) == (13, 32, 38)
    assert [case_for_position(p, cases=6, samples=9, seed=1, epoch=2) for p in range(9)] == [2, 0, 3, 5, 1, 4, 4, 2, 1]
    assert augment_seed(5, seed=1, epoch=2) == 814_740_641_395_527_912
