"""Conversion from the grid of a scan to the grid of a plan and back."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
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
    compute_grid_affine,
    image_to_grid,
    label_to_grid,
    mask_to_scan,
    outputs_to_scan,
    plan_grid,
)
from voxlane.volume.plan import Network, Normalisation, Plan, Resampling
from voxlane.volume.planner import make_mlperf_plan

SMALL = st.integers(1, 14)
MM = st.floats(0.4, 6.0)


def make_test_plan(spacing: Any = (1.0, 1.0, 1.0), **changes: Any) -> Plan:
    values = {"normalisation": (Normalisation(scheme="none"),), "patch": (8, 8, 8), "batch": 2, "network": Network()}
    return Plan(spacing=spacing, **{**values, **changes})


def make_small_mlperf_plan(patch: Any = (128, 128, 128), spacing: Any = (1.6, 1.2, 1.2)) -> Plan:
    full_plan = make_mlperf_plan()
    return Plan(
        **{name: getattr(full_plan, name) for name in ("recipe", "normalisation", "batch", "network", "pad_to_patch")},
        patch=patch,
        spacing=spacing,
    )


def make_ball(shape: tuple[int, int, int], spacing: Any, centre_mm: Any, radius_mm: float) -> np.ndarray:
    axes = [np.arange(n) * mm - c for n, mm, c in zip(shape, spacing, centre_mm, strict=True)]
    z, y, x = np.meshgrid(*axes, indexing="ij")
    return (z**2 + y**2 + x**2 < radius_mm**2).astype(np.uint8)


def compute_dice(a: np.ndarray, b: np.ndarray) -> float:
    return 2 * float(np.logical_and(a, b).sum()) / float((a > 0).sum() + (b > 0).sum())


def round_trip(label: np.ndarray, grid: Grid, grid_plan: Plan) -> np.ndarray:
    """Return the label after conversion to the grid of the plan and back, like the outputs of a network."""
    grid_label = torch.from_numpy(label_to_grid(label, grid, grid_plan).astype(np.float32))
    predicted = outputs_to_scan(torch.stack([1 - grid_label, grid_label]), grid).argmax(dim=0).to(torch.uint8)
    return mask_to_scan(predicted.numpy(), grid)


def test_mlperf_resampling_matches_its_reference() -> None:
    random = np.random.default_rng(4)
    image = random.normal(size=(1, 9, 8, 7)).astype(np.float32)
    label = random.integers(0, 3, (9, 8, 7), np.uint8)
    image.flags.writeable = label.flags.writeable = False  # as decoded scans are; torch warns about such arrays
    grid_plan = make_test_plan((1.6, 1.2, 1.2), recipe="mlperf-kits19")
    grid = plan_grid(image, (3.0, 0.9, 0.9), grid_plan)
    resized = image_to_grid(image, grid, grid_plan)
    assert resized.shape == (1, 16, 6, 5)
    # Corner voxels are aligned.
    assert resized[0, 0, 0, 0] == image[0, 0, 0, 0]
    np.testing.assert_allclose(resized[0, -1, -1, -1], image[0, -1, -1, -1], rtol=1e-5)
    nearest = label[np.ix_(*[np.arange(n) * o // n for n, o in zip((16, 6, 5), (9, 8, 7), strict=True)])]
    assert np.array_equal(label_to_grid(label, grid, grid_plan), nearest)


@settings(max_examples=60, deadline=None)
@given(st.tuples(SMALL, SMALL, SMALL), st.tuples(MM, MM, MM), st.tuples(MM, MM, MM), st.booleans(), st.integers(0, 99))
def test_mask_has_the_shape_of_the_scan(shape: Any, spacing: Any, target: Any, benchmark: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    image = random.normal(size=(1, *shape)).astype(np.float32)
    image[:, : random.integers(0, shape[0])] = 0
    label = random.integers(0, 2, shape, np.uint8)
    grid_plan = make_small_mlperf_plan((8, 8, 8), target) if benchmark else make_test_plan(target)
    grid = plan_grid(image, spacing, grid_plan)
    assert Grid.from_dict(json.loads(json.dumps(asdict(grid)))) == grid
    grid_image, grid_label = image_to_grid(image, grid, grid_plan), label_to_grid(label, grid, grid_plan)
    assert grid_image.shape == (1, *grid.padded_shape)
    assert grid_image.dtype == np.float32
    assert grid_label.shape == grid.padded_shape
    assert grid_label.dtype == np.uint8
    if benchmark:
        assert all(n >= 8 for n in grid.padded_shape)
    outputs = outputs_to_scan(torch.zeros((3, *grid.padded_shape)), grid)
    mask = mask_to_scan(np.ones(outputs.shape[1:], np.uint8), grid)
    assert mask.shape == shape
    assert mask[grid.crop].all()
    assert mask.sum() == mask[grid.crop].size


def test_equal_grid_changes_nothing() -> None:
    image = np.random.default_rng(0).normal(size=(1, 9, 8, 7)).astype(np.float32)
    label = (image[0] > 0).astype(np.uint8)
    grid = plan_grid(image, (1.0, 1.0, 1.0), make_test_plan())
    np.testing.assert_array_equal(image_to_grid(image, grid, make_test_plan()), image)
    np.testing.assert_array_equal(round_trip(label, grid, make_test_plan()), label)


def test_zero_borders_are_cropped_and_restored_as_background() -> None:
    image = np.zeros((2, 20, 16, 18), np.float32)
    image[0, 3:15, 4:12, 5:17] = 1.0
    image[1, 2, 4, 5] = 1.0  # the crop contains nonzero voxels of all channels
    label = np.zeros(image.shape[1:], np.uint8)
    label[5:10, 6:9, 8:12] = 1
    grid_plan = make_test_plan(normalisation=(Normalisation(scheme="none"),) * 2)
    grid = plan_grid(image, (1.0, 1.0, 1.0), grid_plan)
    assert grid.crop == (slice(2, 15), slice(4, 12), slice(5, 17))
    assert image_to_grid(image, grid, grid_plan).shape == (2, 13, 8, 12)
    np.testing.assert_array_equal(label_to_grid(label, grid, grid_plan), label[grid.crop])
    np.testing.assert_array_equal(round_trip(label, grid, grid_plan), label)


@pytest.mark.parametrize(
    ("shape", "spacing", "target"),
    [
        ((40, 40, 40), (1.0, 1.0, 1.0), (1.4, 1.4, 1.4)),
        ((40, 40, 40), (1.5, 1.5, 1.5), (1.0, 1.0, 1.0)),
        ((12, 60, 60), (5.0, 0.8, 0.8), (5.0, 1.0, 1.0)),  # anisotropic before and after
        ((12, 60, 60), (5.0, 0.8, 0.8), (1.5, 1.5, 1.5)),
        ((60, 60, 12), (0.8, 0.8, 5.0), (1.0, 1.0, 5.0)),  # coarse along another axis
    ],
)
def test_mask_survives_a_round_trip(shape: Any, spacing: Any, target: Any) -> None:
    middle = [n * mm / 2 for n, mm in zip(shape, spacing, strict=True)]
    label = make_ball(shape, spacing, middle, 14.0)
    image = label[None].astype(np.float32) + 1
    grid_plan = make_test_plan(target)
    grid = plan_grid(image, spacing, grid_plan)
    assert compute_dice(round_trip(label, grid, grid_plan), label) > 0.93


def test_mlperf_pads_with_edge_voxels() -> None:
    grid_plan = make_small_mlperf_plan((16, 8, 9))
    image = np.full((1, 10, 8, 4), -500, np.int16)
    image[0, 0, 0, 0] = 1000
    image[0, -1] = 101
    label = np.zeros((10, 8, 4), np.uint8)
    label[-1] = 2
    grid = plan_grid(image, (1.6, 1.2, 1.2), grid_plan)
    assert (grid.shape, grid.padded_shape, grid.pad) == ((10, 8, 4), (16, 8, 9), (3, 0, 2))
    result = image_to_grid(image, grid, grid_plan)
    low, high = (-79 - 101) / 76.9, (304 - 101) / 76.9
    np.testing.assert_allclose([result.min(), result.max()], [low, high], rtol=1e-6)
    np.testing.assert_allclose(result[0, :4, 0, :3], high, rtol=1e-6)  # the bright corner
    np.testing.assert_allclose(result[0, -4:], 0, atol=1e-6)
    grid_label = label_to_grid(label, grid, grid_plan)
    assert (grid_label[-4:] == 2).all()
    assert not grid_label[:-4].any()
    np.testing.assert_array_equal(round_trip((label > 0).astype(np.uint8), grid, grid_plan), label > 0)


def test_mlperf_does_not_crop_and_round_trip_is_close() -> None:
    shape, spacing = (20, 64, 64), (3.0, 0.8, 0.8)
    label = make_ball(shape, spacing, (30, 25, 25), 15.0)
    image = np.where(label, 100, 0)[None].astype(np.int16)  # nearly all voxels are 0, which is water in a CT
    grid_plan = make_small_mlperf_plan()
    grid = plan_grid(image, spacing, grid_plan)
    assert grid.crop == (slice(0, 20), slice(0, 64), slice(0, 64))
    assert grid.shape == (37, 42, 42)
    assert grid.padded_shape == (128, 128, 128)
    # MLPerf takes the preceding voxel for labels and aligns corners for images, so they differ by up to a voxel.
    assert compute_dice(round_trip(label, grid, grid_plan), label) > 0.88


OBLIQUE = nibabel.affines.from_matvec(
    nibabel.eulerangles.euler2mat(0.3, -0.2, 0.25) @ np.diag([-0.8, 1.1, 2.2]), (10.0, -20.0, 30.0)
)


@pytest.mark.parametrize("benchmark", [False, True])
@pytest.mark.parametrize("affine", [np.diag([-1.0, -1.0, 2.5, 1.0]), OBLIQUE])
def test_affine_gives_positions_of_prepared_voxels(affine: np.ndarray, benchmark: bool) -> None:
    """The intensities of the scan are coordinates in millimetres, so each prepared voxel shows its origin."""
    shape = (30, 28, 20)
    geometry = Geometry.of(shape, affine)
    indices = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)
    world = indices @ affine[:3, :3].T + affine[:3, 3] + 1000  # only the cropped border is 0
    fields = np.stack([geometry.to_canonical(world[..., axis]) for axis in range(3)]).astype(np.float32)
    fields[:, :2] = 0
    normalisation_ct = Normalisation(scheme="ct", lower=-1e6, upper=1e6) if benchmark else Normalisation(scheme="none")
    grid_plan = make_test_plan((2.0, 1.3, 1.3), normalisation=(normalisation_ct,) * 3)
    if benchmark:
        fields = np.stack([geometry.to_canonical(world[..., axis]) for axis in range(3)]).astype(np.float32)
        grid_plan = make_test_plan(
            (2.0, 1.3, 1.3), normalisation=(normalisation_ct,) * 3, recipe="mlperf-kits19", pad_to_patch=True
        )
    grid = plan_grid(fields, geometry.spacing, grid_plan)
    assert grid.crop_start == ((0, 0, 0) if benchmark else (2, 0, 0))
    result = image_to_grid(fields, grid, grid_plan) - 1000
    actual = np.asarray(compute_grid_affine(grid, geometry.canonical_affine, grid_plan))
    z, y, x = (n // 2 for n in result.shape[1:])
    for index in ((z, y, x), (z - 3, y + 4, x - 4)):
        np.testing.assert_allclose(actual @ [*index[::-1], 1], [*result[:, *index], 1], atol=0.02)
    np.testing.assert_allclose(np.linalg.norm(actual[:3, :3], axis=0)[::-1], (2.0, 1.3, 1.3), rtol=0.08)


def test_grid_without_separate_axis_is_interpolated_along_all() -> None:
    ramp = np.broadcast_to(np.arange(6, dtype=np.float32)[:, None, None], (6, 8, 8))
    label = (ramp > 2).astype(np.uint8)
    spacing, target = (5.0, 1.0, 1.0), (2.5, 1.0, 1.0)
    separate = make_test_plan(spacing=target)
    blended = dataclasses.replace(separate, resampling=Resampling(order=1, separate=False))
    grid = plan_grid(ramp[None] + 1, spacing, separate)
    steps = [np.unique(np.diff(image_to_grid(ramp[None] + 1, grid, p)[0], axis=0)[1:-1]) for p in (separate, blended)]
    assert [len(step) for step in steps] == [2, 1], "repeated slices, and even steps"
    assert [int(label_to_grid(label, grid, p).sum()) for p in (separate, blended)] == [6 * 64] * 2
    outputs = torch.linspace(0, 1, 12)[None, :, None, None].expand(1, 12, 8, 8)
    restored = [outputs_to_scan(outputs, grid, separate=value)[0, :, 0, 0] for value in (True, False)]
    torch.testing.assert_close(restored[0], outputs[0, 1::2, 0, 0])
    torch.testing.assert_close(restored[1], (outputs[0, ::2, 0, 0] + outputs[0, 1::2, 0, 0]) / 2)
