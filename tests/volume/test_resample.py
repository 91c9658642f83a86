"""Resampling matches scipy and follows the rules of nnU-Net and MLPerf."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from voxlane.volume import resample
from voxlane.volume.plan import Triple

_SIZES = st.tuples(*[st.integers(1, 24)] * 3)


def _zoom_with_scipy(volume: np.ndarray, shape: Triple, order: int) -> np.ndarray:
    factors = [new / old for new, old in zip(shape, volume.shape, strict=True)]
    return scipy.ndimage.zoom(volume.astype(np.float64), factors, order=order, mode="nearest", grid_mode=True)


def _make_blobs(shape: Triple, values: int, seed: int) -> np.ndarray:
    field = scipy.ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=shape), 1.5)
    return np.digitize(field, np.quantile(field, np.linspace(0.5, 1, values)[:-1])).astype(np.uint8)


@given(_SIZES, _SIZES, st.integers(0, 99))
@hypothesis_settings(max_examples=60, deadline=None)
def test_splines_match_scipy(old: Triple, new: Triple, seed: int) -> None:
    image = np.random.default_rng(seed).normal(size=(2, *old)).astype(np.float32)
    resized = resample.to_shape(image, new)
    assert resized.dtype == np.float32
    for channel, actual in zip(image, resized, strict=True):
        expected = np.clip(_zoom_with_scipy(channel, new, 3), channel.min(), channel.max())
        np.testing.assert_allclose(actual, expected, atol=5e-6)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("new", [(9, 22, 5), (17, 8, 21)])
def test_other_orders_match_scipy(order: int, new: Triple) -> None:
    image = np.random.default_rng(order).normal(size=(1, 12, 15, 11)).astype(np.float32)
    resized = resample.to_shape(image, new, order=order)
    np.testing.assert_allclose(resized[0], _zoom_with_scipy(image[0], new, order), atol=5e-6)


def test_axes_longer_than_a_block() -> None:
    image = np.random.default_rng(0).normal(size=(1, 3, 300, 5)).astype(np.float32)
    for shape in ((3, 411, 5), (3, 97, 5)):
        expected = np.clip(_zoom_with_scipy(image[0], shape, 3), image.min(), image.max())
        np.testing.assert_allclose(resample.to_shape(image, shape)[0], expected, atol=5e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("slices", [4, 15])
def test_coarse_axis_uses_the_nearest_slice(axis: int, slices: int) -> None:
    old, new = [16, 18, 20], [22, 13, 25]
    old[axis], new[axis] = 9, slices
    image = np.random.default_rng(1).normal(size=(1, *old)).astype(np.float32)
    resized = resample.to_shape(image, (new[0], new[1], new[2]), nearest_axis=axis)
    plane = [n for a, n in enumerate(new) if a != axis]
    for index in range(slices):
        source = np.take(image[0], int((index + 0.5) * 9 / slices), axis=axis)
        factors = [n / o for n, o in zip(plane, source.shape, strict=True)]
        expected = scipy.ndimage.zoom(source.astype(np.float64), factors, order=3, mode="nearest", grid_mode=True)
        expected = np.clip(expected, source.min(), source.max())
        np.testing.assert_allclose(np.take(resized[0], index, axis=axis), expected, atol=5e-6)


def test_find_coarse_axis() -> None:
    assert resample.find_coarse_axis((5, 0.8, 0.8), (1, 1, 1)) == 0
    assert resample.find_coarse_axis((0.8, 5, 0.8), (1, 1, 1)) == 1
    assert resample.find_coarse_axis((1, 1, 1), (1, 1, 3.5)) == 2
    assert resample.find_coarse_axis((3, 1, 1), (1, 1, 1)) is None, "three times is not more than three times"
    assert resample.find_coarse_axis((0.2, 1, 1), (5, 1, 1)) is None, "two coarse axes are not one"


def test_compute_new_shape() -> None:
    shape, spacing, target = (100, 512, 512), (3.0, 0.78, 0.78), (1.6, 1.2, 1.2)
    assert resample.compute_new_shape(shape, spacing, target) == (188, 333, 333)
    assert resample.compute_new_shape(shape, spacing, target, truncate=True) == (187, 332, 332)
    assert resample.compute_new_shape((1, 1, 1), (0.1, 0.1, 0.1), (1, 1, 1)) == (1, 1, 1)


def test_equal_grid_changes_nothing() -> None:
    image = np.random.default_rng(2).normal(size=(1, 5, 6, 7)).astype(np.float32)
    label = _make_blobs((5, 6, 7), 3, 0)
    assert np.array_equal(resample.to_shape(image, (5, 6, 7)), image)
    assert np.array_equal(resample.label_to_shape(label, (5, 6, 7)), label)
    probabilities = torch.from_numpy(image)
    assert resample.restore_probabilities(probabilities, (5, 6, 7)) is probabilities


@given(_SIZES, _SIZES, st.integers(1, 4), st.integers(0, 99))
@hypothesis_settings(max_examples=60, deadline=None)
def test_labels_take_the_value_with_the_highest_score(old: Triple, new: Triple, values: int, seed: int) -> None:
    label = _make_blobs(old, values + 1, seed)
    resized = resample.label_to_shape(label, new)
    assert resized.shape == new
    assert resized.dtype == np.uint8
    scores = np.stack([_zoom_with_scipy(label == value, new, 1) for value in range(256)[: int(label.max()) + 1]])
    chosen_scores = np.take_along_axis(scores, resized[None].astype(np.int64), axis=0)[0]
    assert np.all(chosen_scores >= scores.max(axis=0) - 1e-4)
    unambiguous = np.sort(scores, axis=0)[-1] - (np.sort(scores, axis=0)[-2] if len(scores) > 1 else 0) > 1e-4
    assert np.array_equal(resized[unambiguous], scores.argmax(axis=0)[unambiguous])


def test_ties_take_the_nearest_voxel() -> None:
    label = np.array([0, 3, 3, 0, 7, 7, 0, 0], np.uint8).reshape(1, 1, 8)
    # New voxel 1 (of 4) is midway between the values 3 and 0, and voxel 0 between 0 and 3.
    resized = resample.label_to_shape(label, (1, 1, 4))
    assert resized.reshape(-1).tolist() == [3, 0, 7, 0]
    assert resample.label_to_shape(label[..., ::-1].copy(), (1, 1, 16)).reshape(-1).tolist() == [
        v for v in label.reshape(-1)[::-1] for _ in range(2)
    ]


def test_labels_use_the_nearest_slice_along_the_coarse_axis() -> None:
    label = _make_blobs((6, 20, 22), 4, 5)
    spacing, target = (5, 1, 1), (2, 1.4, 0.8)
    shape, axis = resample.compute_new_shape(label.shape, spacing, target), resample.find_coarse_axis(spacing, target)
    resized = resample.label_to_shape(label, shape, nearest_axis=axis)
    assert resized.shape == (15, 14, 28)
    for index in range(15):
        plane = label[int((index + 0.5) * 6 / 15)]
        assert np.array_equal(resized[index], resample.label_to_shape(plane[None], (1, 14, 28))[0])


def test_empty_labels() -> None:
    assert not resample.label_to_shape(np.zeros((4, 5, 6), np.uint8), (8, 3, 6)).any()
    full = resample.label_to_shape(np.full((4, 5, 6), 255, np.uint8), (8, 3, 6))
    assert (full == 255).all()


@pytest.mark.parametrize("nearest_axis", [None, 0])
def test_probabilities_are_restored_linearly(nearest_axis: int | None) -> None:
    probabilities = np.random.default_rng(3).random((3, 7, 9, 8)).astype(np.float32)
    restored = resample.restore_probabilities(
        torch.from_numpy(probabilities), (12, 13, 5), nearest_axis=nearest_axis
    ).numpy()
    for channel, actual in zip(probabilities, restored, strict=True):
        if nearest_axis is None:
            expected = _zoom_with_scipy(channel, (12, 13, 5), 1)
        else:
            slices = [int((i + 0.5) * 7 / 12) for i in range(12)]
            expected = np.concatenate([_zoom_with_scipy(channel[s][None], (1, 13, 5), 1) for s in slices])
        np.testing.assert_allclose(actual, expected, atol=1e-5)
