"""Fingerprints of single cases, and merged fingerprints of datasets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from voxlane import settings
from voxlane.errors import BadCasesError
from voxlane.volume import fingerprint
from voxlane.volume.fingerprint import CaseFingerprint, Fingerprint


def _make_case(seed: int, shape: tuple[int, ...] = (2, 12, 13, 14), foreground: float = 0.2) -> CaseFingerprint:
    rng = np.random.default_rng(seed)
    image = rng.gamma(2.0, 100.0 + seed, size=shape).astype(np.float32)
    label = (rng.random(shape[1:]) < foreground).astype(np.uint8)
    return fingerprint.fingerprint_case(image, label, (3.0, 1.0, 1.0 + seed / 100))


@given(st.integers(0, 10**6), st.integers(0, 12))
@hypothesis_settings(max_examples=50, deadline=None)
def test_crop_contains_all_nonzero_voxels(seed: int, voxels: int) -> None:
    rng = np.random.default_rng(seed)
    image = np.zeros((2, 6, 7, 8), np.float32)
    indices = rng.integers((2, 6, 7, 8), size=(voxels, 4))
    image[tuple(indices.T)] = rng.choice([-1.0, 1.0], size=voxels)
    box = fingerprint.crop_to_nonzero(image)
    if not voxels:
        assert box == (slice(0, 6), slice(0, 7), slice(0, 8))
        return
    low, high = indices[:, 1:].min(axis=0), indices[:, 1:].max(axis=0) + 1
    assert box == tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))


def test_fingerprint_of_a_case() -> None:
    image = np.zeros((1, 8, 10, 12), np.float32)
    image[0, 1:7, 2:8, 3:9] = np.arange(1, 217).reshape(6, 6, 6)
    label = np.zeros((8, 10, 12), np.uint8)
    label[1:7, 2:8, 3:9] = 2
    label[0, 0, 0] = 1  # outside the crop, where the scan is blank
    case = fingerprint.fingerprint_case(image, label, (2.0, 1.0, 0.5))
    assert case.shape == (6, 6, 6)
    assert case.spacing == (2.0, 1.0, 0.5)
    assert case.relative_size == 216 / 960
    (channel,) = case.intensities
    assert (channel.low, channel.high, channel.mean) == (1, 216, 108.5)
    assert channel.mean_square == pytest.approx(np.mean(np.arange(1, 217) ** 2))
    assert list(channel.quantiles) == sorted(channel.quantiles)
    assert set(channel.quantiles) == set(range(1, 217))
    assert settings.build(CaseFingerprint, settings.to_plain(case)) == case


def test_merged_statistics_match_a_large_sample() -> None:
    rng = np.random.default_rng(0)
    cases, samples = [], []
    for seed in range(8):
        image = rng.gamma(2.0, 50.0 * (seed + 1), size=(1, 20, 20, 20)).astype(np.float32)
        label = (rng.random((20, 20, 20)) < 0.1 * (seed + 1)).astype(np.uint8)
        cases.append(fingerprint.fingerprint_case(image, label, (1.0, 1.0, 1.0)))
        samples.append(rng.choice(image[0][label > 0], 100_000))
    pooled = np.concatenate(samples)
    merged = fingerprint.merge_cases(cases)
    (channel,) = merged.intensities
    assert channel.mean == pytest.approx(pooled.mean(), rel=0.01)
    assert channel.std == pytest.approx(pooled.std(), rel=0.01)
    low, median, high = np.percentile(pooled, (0.5, 50, 99.5))
    assert channel.percentile_00_5 == pytest.approx(low, rel=0.03)
    assert channel.median == pytest.approx(median, rel=0.01)
    assert channel.percentile_99_5 == pytest.approx(high, rel=0.03)
    assert (channel.low, channel.high) == (pooled.min(), pooled.max())


def test_merging_does_not_depend_on_order() -> None:
    cases = [_make_case(seed) for seed in range(7)]
    merged = fingerprint.merge_cases(cases)
    assert settings.build(Fingerprint, settings.to_plain(merged)) == merged
    for seed in range(5):
        random.Random(seed).shuffle(cases)
        assert fingerprint.merge_cases(iter(cases)) == merged
    assert len(merged.shapes) == 7
    assert np.median(merged.shapes, axis=0).tolist() == [12.0, 13.0, 14.0]
    assert np.median(merged.spacings, axis=0).tolist() == [3.0, 1.0, 1.03]


def test_large_foreground_is_sampled_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_MAX_SORTED_VOXELS", 500)
    image = np.random.default_rng(0).normal(size=(1, 16, 16, 16)).astype(np.float32)
    label = np.ones((16, 16, 16), np.uint8)
    first, again, other = (fingerprint.fingerprint_case(image, label, (1.0, 1.0, 1.0), seed) for seed in (1, 1, 2))
    assert first == again
    assert first.intensities[0].quantiles != other.intensities[0].quantiles
    assert first.intensities[0].mean == other.intensities[0].mean
    assert np.median(first.intensities[0].quantiles) == pytest.approx(0, abs=0.2)


def test_cases_without_foreground() -> None:
    empty_case = _make_case(0, foreground=0.0)
    assert empty_case.intensities == ()
    merged = fingerprint.merge_cases([empty_case, _make_case(1)])
    assert len(merged.shapes) == 2
    assert merged.intensities == fingerprint.merge_cases([_make_case(1)]).intensities
    with pytest.raises(BadCasesError, match="no case has any foreground"):
        fingerprint.merge_cases([empty_case])
    with pytest.raises(BadCasesError, match="no case"):
        fingerprint.merge_cases([])
    with pytest.raises(BadCasesError, match=r"different numbers of channels: \[1, 2\]"):
        fingerprint.merge_cases([_make_case(1), _make_case(2, shape=(1, 5, 5, 5))])
