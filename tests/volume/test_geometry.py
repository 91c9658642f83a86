"""The grid of a file, and the conversion to anatomical axes and back."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import asdict

import nibabel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxlane.volume.geometry import Geometry, align_axes, describe_grid_difference, max_voxel_distance_mm

SHAPE = (3, 4, 5)
ORDERS = list(itertools.product(itertools.permutations(range(3)), itertools.product((1, -1), repeat=3)))


def _make_affine(
    order: tuple[int, ...], signs: tuple[int, ...], tilt: float = 0.0, spacing=(0.7, 1.1, 2.5)
) -> np.ndarray:
    """Return an affine whose file axis i runs along anatomical axis order[i], rotated by `tilt` radians about x."""
    rotation = np.array([[1, 0, 0], [0, np.cos(tilt), -np.sin(tilt)], [0, np.sin(tilt), np.cos(tilt)]])
    affine = np.eye(4)
    for file_axis, (axis, sign) in enumerate(zip(order, signs, strict=True)):
        affine[:3, file_axis] = rotation[:, axis] * sign * spacing[file_axis]
    affine[:3, 3] = (-10, 20, 30)
    return affine


def expected_spacing(affine: np.ndarray) -> list[float]:
    return [float(np.linalg.norm(affine[:3, axis])) for axis in (2, 1, 0)]


@pytest.mark.parametrize(("order", "signs"), ORDERS)
def test_canonical_array_is_the_transpose_of_nibabel(order: tuple[int, ...], signs: tuple[int, ...]) -> None:
    affine = _make_affine(order, signs, tilt=0.2)
    array = np.arange(60).reshape(SHAPE)
    expected = nibabel.as_closest_canonical(nibabel.Nifti1Image(array.astype(np.int16), affine))
    geometry = Geometry.of(SHAPE, affine)
    canonical = geometry.to_canonical(array)
    np.testing.assert_array_equal(canonical, np.asarray(expected.dataobj).transpose(2, 1, 0))
    np.testing.assert_allclose(geometry.canonical_affine, expected.affine, atol=1e-6)
    np.testing.assert_allclose(geometry.spacing, expected.header.get_zooms()[::-1], rtol=1e-6)
    assert geometry.canonical_shape == canonical.shape
    np.testing.assert_array_equal(geometry.from_canonical(canonical), array)
    np.testing.assert_array_equal(geometry.to_stored(canonical), array.transpose(2, 1, 0))
    np.testing.assert_array_equal(geometry.from_stored(geometry.to_stored(canonical)), canonical)
    assert geometry.stored_spacing == pytest.approx(expected_spacing(affine))


@given(
    st.sampled_from(ORDERS),
    st.tuples(*[st.integers(1, 5)] * 3),
    st.floats(-0.7, 0.7),
    st.lists(st.integers(1, 3), max_size=2),
)
def test_from_canonical_restores_the_array(order_signs, shape: tuple[int, ...], tilt: float, lead: list[int]) -> None:
    geometry = Geometry.of(shape, _make_affine(*order_signs, tilt=tilt))
    array = np.arange(int(np.prod([*lead, *shape]))).reshape(*lead, *shape)
    canonical = geometry.to_canonical(array)
    assert canonical.shape == (*lead, *geometry.canonical_shape)
    np.testing.assert_array_equal(geometry.from_canonical(canonical), array)
    # A voxel keeps its position in space.
    x, y, z = (n - 1 for n in shape)
    value = array[(*[0] * len(lead), x, y, z)]
    (index,) = np.argwhere(canonical[(0,) * len(lead)] == value)
    world = np.asarray(geometry.affine) @ (x, y, z, 1)
    np.testing.assert_allclose(np.asarray(geometry.canonical_affine) @ (*index[::-1], 1), world, atol=1e-9)


def test_geometry_survives_json_and_pickle() -> None:
    geometry = Geometry.of(SHAPE, _make_affine((2, 0, 1), (1, -1, 1), tilt=0.3))
    assert geometry.spacing  # fills the cached properties
    assert Geometry.from_dict(json.loads(json.dumps(asdict(geometry)))) == geometry
    assert pickle.loads(pickle.dumps(geometry)) == geometry
    assert hash(geometry) == hash(Geometry.from_dict(asdict(geometry)))


@pytest.mark.parametrize(
    ("affine", "message"),
    [
        (np.diag([1, 1, 0, 1]), "singular"),
        (np.diag([1, np.nan, 1, 1]), "not finite"),
        (np.array([[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]]), "singular"),
    ],
)
def test_invalid_affines_are_rejected(affine: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Geometry.of(SHAPE, affine)


def test_shape_needs_three_sizes() -> None:
    with pytest.raises(ValueError, match="expected a shape of three positive sizes"):
        Geometry.of((3, 4), np.eye(4))


def test_reoriented_grids_are_equal() -> None:
    a = Geometry.of((3, 4, 5), _make_affine((0, 1, 2), (1, 1, 1)))
    flipped = nibabel.Nifti1Image(np.zeros((3, 4, 5), np.int16), np.asarray(a.affine)).as_reoriented(
        np.array([[2, -1], [0, 1], [1, -1]])
    )
    b = Geometry.of(flipped.shape, flipped.affine)
    assert b.shape != a.shape
    assert describe_grid_difference(a, b) is None
    assert max_voxel_distance_mm(a, b) < 1e-6


def _make_geometry(**changes: np.ndarray | float) -> Geometry:
    affine = np.eye(4)
    if "spacing" in changes:
        affine[0, 0] = changes["spacing"]
    if "tilt" in changes:
        affine = _make_affine((0, 1, 2), (1, 1, 1), tilt=changes["tilt"], spacing=(1, 1, 1))
        affine[:3, 3] = 0
    if "origin" in changes:
        affine[2, 3] = changes["origin"]
    return Geometry.of((10, 10, 10), affine)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (_make_geometry(spacing=1.5), "the spacings differ: 1 x 1 x 1 and 1 x 1 x 1.5 mm"),
        (_make_geometry(tilt=0.1), "the directions of the axes differ"),
        (_make_geometry(origin=7.5), "the origins differ: 0 x 0 x 0 and 0 x 0 x 7.5 mm"),
        (Geometry.of((10, 10, 3), np.eye(4)), "the shapes differ: 10 x 10 x 10 and 3 x 10 x 10 voxels"),
    ],
)
def test_grid_differences_are_described(other: Geometry, message: str) -> None:
    difference = describe_grid_difference(_make_geometry(), other)
    assert difference is not None
    assert message in difference


def test_rounding_errors_are_tolerated() -> None:
    affine = _make_affine((2, 1, 0), (-1, -1, -1), tilt=0.1)
    a = Geometry.of((121, 512, 512), affine)
    b = Geometry.of((121, 512, 512), affine.astype(np.float32))
    assert a != b
    assert describe_grid_difference(a, b) is None
    assert describe_grid_difference(a, b, tolerance_mm=0) is not None
    assert describe_grid_difference(_make_geometry(), _make_geometry(origin=0.05), tolerance_mm=0.1) is None


def test_grid_at_45_degrees_matches_itself_after_rounding() -> None:
    # At 45 degrees the last bit decides which anatomical axis is closest.
    a, b = (Geometry.of((6, 6, 6), _make_affine((0, 1, 2), (1, 1, 1), tilt=np.pi / 4 + e)) for e in (1e-7, -1e-7))
    assert describe_grid_difference(a, b) is None
    assert max_voxel_distance_mm(a, b) < 1e-4
    array = np.arange(216).reshape(6, 6, 6)
    np.testing.assert_array_equal(align_axes(b.to_canonical(array), b, a), a.to_canonical(array))
    np.testing.assert_array_equal(align_axes(a.to_canonical(array), a, a), a.to_canonical(array))
