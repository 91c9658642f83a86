"""Intensities are normalised, encoded as integers, and decoded within the documented error."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from voxlane.errors import ConfigError
from voxlane.volume import normalise
from voxlane.volume.plan import Normalisation

_CT = Normalisation(scheme="ct", lower=-79, upper=304, mean=101.0, std=76.9)
_ZSCORE = Normalisation(scheme="zscore")


def _random_scan(channels: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(100, 300, size=(channels, 6, 7, 8)).astype(np.float32)


def test_ct_clips_and_scales() -> None:
    image = np.array([-1000, -79, 101, 304, 3000], np.int16).reshape(1, 1, 1, 5)
    before = image.copy()
    result = normalise.apply(image, [_CT])
    np.testing.assert_allclose(result.reshape(-1), [-180 / 76.9, -180 / 76.9, 0, 203 / 76.9, 203 / 76.9], rtol=1e-6)
    assert result.dtype == np.float32
    assert np.array_equal(image, before), "the caller's array is left alone"


def test_zscore_is_computed_per_channel() -> None:
    image = _random_scan(2) * np.array([1, 50], np.float32).reshape(2, 1, 1, 1)
    result = normalise.apply(image, [_ZSCORE, _ZSCORE])
    np.testing.assert_allclose(result.mean(axis=(1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(result.std(axis=(1, 2, 3)), 1, rtol=1e-5)
    assert not normalise.apply(np.full((1, 3, 3, 3), 7.0), [_ZSCORE]).any(), "a constant channel becomes 0"


def test_rescale_maps_each_channel_to_one() -> None:
    image = np.array([[[[-5, 0, 15]]], [[[7, 7, 7]]]], np.int16)
    rescaled = normalise.apply(image, [Normalisation(scheme="rescale")] * 2)
    np.testing.assert_allclose(rescaled, [[[[0, 0.25, 1]]], [[[0, 0, 0]]]])


def test_zscore_of_the_nonzero_region() -> None:
    image = np.zeros((2, 10, 10, 10), np.float32)
    image[:, 2:8, 3:8, 1:7] = np.random.default_rng(1).normal(500, 40, size=(2, 6, 5, 6))
    image[:, 4, 5, 3] = 0  # an enclosed zero counts as inside
    normalisation = Normalisation(scheme="zscore", nonzero=True)
    result = normalise.apply(image, [normalisation, _ZSCORE])
    inside = np.zeros((10, 10, 10), bool)
    inside[2:8, 3:8, 1:7] = True
    assert np.array_equal(normalise.nonzero_mask(image), inside)
    assert not result[0][~inside].any()
    np.testing.assert_allclose([result[0][inside].mean(), result[0][inside].std()], [0, 1], atol=1e-4)
    assert result[1][~inside].any(), "the other channel was asked to take every voxel"
    assert not normalise.apply(np.zeros((1, 3, 3, 3)), [normalisation]).any()


@given(st.integers(0, 10**6), st.floats(0.1, 0.9))
@hypothesis_settings(max_examples=30, deadline=None)
def test_nonzero_mask_matches_scipy(seed: int, density: float) -> None:
    image = (np.random.default_rng(seed).random((2, 7, 8, 9)) < density).astype(np.float32)
    expected = scipy.ndimage.binary_fill_holes(image.any(axis=0))
    assert np.array_equal(normalise.nonzero_mask(image), expected)


@given(st.integers(0, 99), st.floats(-500, 500), st.floats(1, 2000), st.floats(-300, 300), st.floats(5, 500))
@hypothesis_settings(max_examples=40, deadline=None)
def test_ct_is_decoded_within_half_a_unit(seed: int, lower: float, width: float, mean: float, std: float) -> None:
    normalisation = Normalisation(scheme="ct", lower=lower, upper=lower + width, mean=mean, std=std)
    normalised = normalise.apply(_random_scan(seed=seed), [normalisation])
    codes, scale, offset = normalise.encode(normalised, [normalisation])
    assert codes.dtype == np.int16
    error = np.abs(normalise.decode(codes, scale, offset) - normalised).max() * std
    assert error <= 0.5 + 1e-3


def test_ct_codes_are_hounsfield_units() -> None:
    image = np.arange(-79, 305, dtype=np.int16).reshape(1, 1, 1, -1)
    codes, scale, offset = normalise.encode(normalise.apply(image, [_CT]), [_CT])
    assert np.array_equal(codes, image)
    assert (scale, offset) == ((1 / 76.9,), (-101.0 / 76.9,))


def test_zscore_is_decoded_within_its_unit() -> None:
    normalised = normalise.apply(_random_scan(2), [_ZSCORE] * 2)
    codes, scale, offset = normalise.encode(normalised, [_ZSCORE] * 2)
    assert np.abs(normalise.decode(codes, scale, offset) - normalised).max() <= 1 / 1024 + 1e-6
    assert (scale, offset) == ((1 / 512,) * 2, (0.0, 0.0))
    outliers = np.array([-1e9, 0, 1e9], np.float32).reshape(1, 1, 1, 3)
    codes, scale, offset = normalise.encode(outliers, [_ZSCORE])
    np.testing.assert_allclose(normalise.decode(codes, scale, offset).reshape(-1), [-64, 0, 64], atol=0.01)


def test_encoding_decoded_values_gives_the_same_codes() -> None:
    for normalisation in (_CT, _ZSCORE):
        codes, scale, offset = normalise.encode(normalise.apply(_random_scan(), [normalisation]), [normalisation])
        second_codes, *_ = normalise.encode(normalise.decode(codes, scale, offset), [normalisation])
        assert np.array_equal(second_codes, codes)


@pytest.mark.parametrize("values", [[0, 5, 32767], [0.25, 0.5, 1.0], [0, 1e6, 2e6], [3.5, 3.5, 3.5], [-7, -7, 9]])
def test_unnormalised_channels_keep_their_range(values: list[float]) -> None:
    normalisation = Normalisation(scheme="none")
    image = np.array(values, np.float32).reshape(1, 1, 1, 3)
    assert np.array_equal(normalise.apply(image, [normalisation]), image)
    codes, scale, offset = normalise.encode(image, [normalisation])
    step = (max(values) - min(values)) / 65534
    np.testing.assert_allclose(normalise.decode(codes, scale, offset), image, atol=step, rtol=1e-6)


def test_ct_range_beyond_16_bits() -> None:
    normalisation = Normalisation(scheme="ct", lower=-1e5, upper=1e5, mean=0, std=1000)
    normalised = np.linspace(-100, 100, 50, dtype=np.float32).reshape(1, 1, 5, 10)
    codes, scale, offset = normalise.encode(normalised, [normalisation])
    np.testing.assert_allclose(normalise.decode(codes, scale, offset), normalised, atol=200 / 65534)


def test_wrong_number_of_channels_is_rejected() -> None:
    with pytest.raises(ConfigError, match="2 channels, but the plan has 1"):
        normalise.apply(_random_scan(2), [_CT])
    with pytest.raises(ConfigError, match="1 channels, but the plan has 2"):
        normalise.encode(_random_scan(1), [_CT, _CT])
