"""Bootstrap intervals and Wilcoxon's test, against scipy and against sums over all sign patterns."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import scipy.stats

from voxlane.model.statistics import bootstrap_mean, compare_paired


def test_interval_is_that_of_scipy() -> None:
    values = np.random.default_rng(1).beta(8, 2, 40)
    expected = scipy.stats.bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=3)
    actual = bootstrap_mean(values, resamples=20_000)
    assert actual == pytest.approx(tuple(expected.confidence_interval), abs=0.002)
    assert actual == bootstrap_mean(values, resamples=20_000), "the seed is fixed"
    assert actual != bootstrap_mean(values, resamples=20_000, seed=1)


def test_interval_of_two_cases_is_known() -> None:
    """The means of resamples of 0 and 1 are 0, 0.5 and 1 with probabilities 1/4, 1/2 and 1/4."""
    assert bootstrap_mean([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_mean([0.0, 1.0], level=0.4) == (0.5, 0.5)
    assert bootstrap_mean([0.7]) is None
    assert bootstrap_mean([]) is None


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    samples = generator.normal(0.5, 0.1, (300, 30))
    intervals = [bootstrap_mean(sample, resamples=300) or (0, 0) for sample in samples]
    covered = np.mean([low <= 0.5 <= high for low, high in intervals])
    assert 0.88 < covered < 0.98


def test_table_of_targets_with_cases_that_are_not_scored() -> None:
    generator = np.random.default_rng(2)
    table = generator.uniform(0, 1, (50, 2))
    table[10:, 1] = np.nan
    rows = np.random.default_rng(5).integers(50, size=(4000, 50))
    means = [np.nanmean(np.nanmean(table[own], axis=0)) for own in rows]
    assert bootstrap_mean(table, resamples=4000) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.01)
    table[:, 1] = np.nan
    assert bootstrap_mean(table) == pytest.approx(bootstrap_mean(table[:, 0]))


def test_memory_is_bounded_for_many_cases() -> None:
    low, high = bootstrap_mean(np.linspace(0, 1, 600_000), resamples=4) or (0, 0)
    assert low == pytest.approx(0.5, abs=0.01)
    assert high == pytest.approx(0.5, abs=0.01)


def test_wilcoxon_is_the_share_of_all_sign_patterns() -> None:
    """Exact two-sided p: with ranks 1 to n, the share of the 2^n sign patterns that are at least as extreme."""
    first = np.array([0.70, 0.71, 0.72, 0.73, 0.74, 0.75, 0.76])
    differences = np.array([0.01, -0.02, 0.03, 0.04, 0.05, 0.06, 0.07])
    result = compare_paired(list(first), list(first + differences))
    ranks = np.arange(1, 8)
    observed = min(ranks[differences > 0].sum(), ranks[differences < 0].sum())
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign) for signs in itertools.product((0, 1), repeat=7)
    ]
    expected = np.mean([min(s, ranks.sum() - s) <= observed for s in sums])
    assert result["p"] == pytest.approx(expected)
    assert (result["higher"], result["lower"], result["equal"]) == (6, 1, 0)
    assert result["difference"] == pytest.approx(differences.mean())
    low, high = result["difference_ci95"]
    assert low < differences.mean() < high


def test_equal_and_missing_scores() -> None:
    equal = compare_paired([0.5, 0.6, 0.7], [0.5, 0.6, 0.7])
    assert (equal["p"], equal["difference"], equal["difference_ci95"], equal["equal"]) == (None, 0.0, [0.0, 0.0], 3)
    assert compare_paired([0.5, 0.6, 0.7], [0.5, 0.7, 0.8])["p"] == pytest.approx(0.5), "two cases differ"
    json.dumps(compare_paired([], []), allow_nan=False)
