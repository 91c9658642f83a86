"""From a scan's grid to the plan's and back."""

from __future__ import annotations

import json
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from voxlane.volume.geometry import Geometry
from voxlane.volume.grid import (
    Grid,
    grid_affine,
    image_to_grid,
    label_to_grid,
    mask_to_scan,
    outputs_to_scan,
    plan_grid,
)
from voxlane.volume.plan import Network, Normalisation, Plan
from voxlane.volume.planner import mlperf_kits19

SMALL = st.integers(1, 14)
MM = st.floats(0.4, 6.0)


def plan(spacing: Any = (1.0, 1.0, 1.0), **changes: Any) -> Plan:
    values = {"normalisation": (Normalisation(scheme="none"),), "patch": (8, 8, 8), "batch": 2, "network": Network()}
    return Plan(spacing=spacing, **{**values, **changes})


def mlperf(patch: Any = (128, 128, 128), spacing: Any = (1.6, 1.2, 1.2)) -> Plan:
    made = mlperf_kits19()
    return Plan(
        **{name: getattr(made, name) for name in ("recipe", "normalisation", "batch", "network", "pad_to_patch")},
        patch=patch,
        spacing=spacing,
    )


def ball(shape: tuple[int, int, int], spacing: Any, centre_mm: Any, radius_mm: float) -> np.ndarray:
    axes = [np.arange(n) * mm - c for n, mm, c in zip(shape, spacing, centre_mm, strict=True)]
    z, y, x = np.meshgrid(*axes, indexing="ij")
    return (z**2 + y**2 + x**2 < radius_mm**2).astype(np.uint8)


def dice(a: np.ndarray, b: np.ndarray) -> float:
    return 2 * float(np.logical_and(a, b).sum()) / float((a > 0).sum() + (b > 0).sum())


def there_and_back(label: np.ndarray, grid: Grid, how: Plan) -> np.ndarray:
    """The label on the plan's grid, taken for a network's outputs, and brought back as a prediction is."""
    made = torch.from_numpy(label_to_grid(label, grid, how).astype(np.float32))
    kept = outputs_to_scan(torch.stack([1 - made, made]), grid).argmax(dim=0).to(torch.uint8)
    return mask_to_scan(kept.numpy(), grid)


@settings(max_examples=60, deadline=None)
@given(st.tuples(SMALL, SMALL, SMALL), st.tuples(MM, MM, MM), st.tuples(MM, MM, MM), st.booleans(), st.integers(0, 99))
def test_any_scan_comes_back_in_its_own_shape(
    shape: Any, spacing: Any, target: Any, benchmark: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    image = random.normal(size=(1, *shape)).astype(np.float32)
    image[:, : random.integers(0, shape[0])] = 0
    label = random.integers(0, 2, shape, np.uint8)
    how = mlperf((8, 8, 8), target) if benchmark else plan(target)
    grid = plan_grid(image, spacing, how)
    assert Grid.from_dict(json.loads(json.dumps(grid.to_dict()))) == grid
    made, made_label = image_to_grid(image, grid, how), label_to_grid(label, grid, how)
    assert made.shape == (1, *grid.padded_shape)
    assert made.dtype == np.float32
    assert made_label.shape == grid.padded_shape
    assert made_label.dtype == np.uint8
    if benchmark:
        assert all(n >= 8 for n in grid.padded_shape)
    outputs = outputs_to_scan(torch.zeros((3, *grid.padded_shape)), grid)
    mask = mask_to_scan(np.ones(outputs.shape[1:], np.uint8), grid)
    assert mask.shape == shape
    assert mask[grid.crop].all()
    assert mask.sum() == mask[grid.crop].size


def test_the_same_grid_is_left_alone() -> None:
    image = np.random.default_rng(0).normal(size=(1, 9, 8, 7)).astype(np.float32)
    label = (image[0] > 0).astype(np.uint8)
    grid = plan_grid(image, (1.0, 1.0, 1.0), plan())
    np.testing.assert_array_equal(image_to_grid(image, grid, plan()), image)
    np.testing.assert_array_equal(there_and_back(label, grid, plan()), label)


def test_zero_borders_are_cropped_and_come_back_as_background() -> None:
    image = np.zeros((2, 20, 16, 18), np.float32)
    image[0, 3:15, 4:12, 5:17] = 1.0
    image[1, 2, 4, 5] = 1.0  # every channel counts
    label = np.zeros(image.shape[1:], np.uint8)
    label[5:10, 6:9, 8:12] = 1
    how = plan(normalisation=(Normalisation(scheme="none"),) * 2)
    grid = plan_grid(image, (1.0, 1.0, 1.0), how)
    assert grid.crop == (slice(2, 15), slice(4, 12), slice(5, 17))
    assert image_to_grid(image, grid, how).shape == (2, 13, 8, 12)
    np.testing.assert_array_equal(label_to_grid(label, grid, how), label[grid.crop])
    np.testing.assert_array_equal(there_and_back(label, grid, how), label)


@pytest.mark.parametrize(
    ("shape", "spacing", "target"),
    [
        ((40, 40, 40), (1.0, 1.0, 1.0), (1.4, 1.4, 1.4)),
        ((40, 40, 40), (1.5, 1.5, 1.5), (1.0, 1.0, 1.0)),
        ((12, 60, 60), (5.0, 0.8, 0.8), (5.0, 1.0, 1.0)),  # anisotropic, and stays so
        ((12, 60, 60), (5.0, 0.8, 0.8), (1.5, 1.5, 1.5)),
        ((60, 60, 12), (0.8, 0.8, 5.0), (1.0, 1.0, 5.0)),  # coarse along another axis
    ],
)
def test_a_mask_survives_the_way_there_and_back(shape: Any, spacing: Any, target: Any) -> None:
    middle = [n * mm / 2 for n, mm in zip(shape, spacing, strict=True)]
    label = ball(shape, spacing, middle, 14.0)
    image = label[None].astype(np.float32) + 1
    how = plan(target)
    grid = plan_grid(image, spacing, how)
    assert dice(there_and_back(label, grid, how), label) > 0.93


def test_mlperf_pads_by_repeating_the_outermost_voxels_of_image_and_label() -> None:
    how = mlperf((16, 8, 9))
    image = np.full((1, 10, 8, 4), -500, np.int16)
    image[0, 0, 0, 0] = 1000
    image[0, -1] = 101
    label = np.zeros((10, 8, 4), np.uint8)
    label[-1] = 2
    grid = plan_grid(image, (1.6, 1.2, 1.2), how)
    assert (grid.shape, grid.padded_shape, grid.pad) == ((10, 8, 4), (16, 8, 9), (3, 0, 2))
    made = image_to_grid(image, grid, how)
    low, high = (-79 - 101) / 76.9, (304 - 101) / 76.9
    np.testing.assert_allclose([made.min(), made.max()], [low, high], rtol=1e-6)
    np.testing.assert_allclose(made[0, :4, 0, :3], high, rtol=1e-6)  # the bright corner
    np.testing.assert_allclose(made[0, -4:], 0, atol=1e-6)
    made_label = label_to_grid(label, grid, how)
    assert (made_label[-4:] == 2).all()
    assert not made_label[:-4].any()
    np.testing.assert_array_equal(there_and_back((label > 0).astype(np.uint8), grid, how), label > 0)


def test_mlperf_keeps_zeros_and_comes_back_near_enough() -> None:
    shape, spacing = (20, 64, 64), (3.0, 0.8, 0.8)
    label = ball(shape, spacing, (30, 25, 25), 15.0)
    image = np.where(label, 100, 0)[None].astype(np.int16)  # nearly all of it is 0, which is water here
    how = mlperf()
    grid = plan_grid(image, spacing, how)
    assert grid.crop == (slice(0, 20), slice(0, 64), slice(0, 64))
    assert grid.shape == (37, 42, 42)
    assert grid.padded_shape == (128, 128, 128)
    # Its labels take the voxel before, its images lay corner on corner: up to a voxel apart, as in the benchmark.
    assert dice(there_and_back(label, grid, how), label) > 0.88


OBLIQUE = nibabel.affines.from_matvec(
    nibabel.eulerangles.euler2mat(0.3, -0.2, 0.25) @ np.diag([-0.8, 1.1, 2.2]), (10.0, -20.0, 30.0)
)


@pytest.mark.parametrize("benchmark", [False, True])
@pytest.mark.parametrize("affine", [np.diag([-1.0, -1.0, 2.5, 1.0]), OBLIQUE])
def test_the_affine_says_where_prepared_voxels_lie(affine: np.ndarray, benchmark: bool) -> None:
    """A scan whose intensity is a coordinate in millimetres tells where each prepared voxel was taken from."""
    shape = (30, 28, 20)
    geometry = Geometry.of(shape, affine)
    indices = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)
    world = indices @ affine[:3, :3].T + affine[:3, 3] + 1000  # nothing is 0 but the border that is cropped
    fields = np.stack([geometry.to_canonical(world[..., axis]) for axis in range(3)]).astype(np.float32)
    fields[:, :2] = 0
    wide = Normalisation(scheme="ct", lower=-1e6, upper=1e6) if benchmark else Normalisation(scheme="none")
    how = plan((2.0, 1.3, 1.3), normalisation=(wide,) * 3)
    if benchmark:
        fields = np.stack([geometry.to_canonical(world[..., axis]) for axis in range(3)]).astype(np.float32)
        how = plan((2.0, 1.3, 1.3), normalisation=(wide,) * 3, recipe="mlperf-kits19", pad_to_patch=True)
    grid = plan_grid(fields, geometry.spacing, how)
    assert grid.crop_start == ((0, 0, 0) if benchmark else (2, 0, 0))
    made = image_to_grid(fields, grid, how) - 1000
    found = np.asarray(grid_affine(grid, geometry.canonical_affine, how))
    z, y, x = (n // 2 for n in made.shape[1:])
    for place in ((z, y, x), (z - 3, y + 4, x - 4)):
        np.testing.assert_allclose(found @ [*place[::-1], 1], [*made[:, *place], 1], atol=0.02)
    np.testing.assert_allclose(np.linalg.norm(found[:3, :3], axis=0)[::-1], (2.0, 1.3, 1.3), rtol=0.08)
