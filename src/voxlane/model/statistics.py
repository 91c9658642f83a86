"""Uncertainty of scores: bootstrap confidence intervals, and the comparison of two methods on the same cases.

Intervals are percentiles of the means of `RESAMPLES` resamples of the cases, drawn with replacement by a generator with
a fixed seed: the same scores give the same interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
"""Number of resamples of a bootstrap."""
LEVEL = 0.95
"""Confidence level of the intervals."""
SEED = 0
_MAX_DRAWS = 1 << 20
"""Largest number of cases that are drawn at once, which bounds the memory."""
Interval = tuple[float, float]


def bootstrap_mean(
    values: npt.ArrayLike, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = SEED
) -> Interval | None:
    """Return the confidence interval of the mean of `values`, one per case; None for fewer than two cases.

    For a table (cases, targets), in which NaN means not scored, it is that of the mean over targets of their means.
    """
    table = np.asarray(values, np.float64)
    table = table[:, None] if table.ndim == 1 else table
    table = table[~np.isnan(table).all(axis=1)]
    if len(table) < 2:
        return None
    means = np.concatenate(list(_resample_means(table, resamples, seed)))
    tail = 100 * (1 - level) / 2
    low, high = np.nanpercentile(means, [tail, 100 - tail])
    return float(low), float(high)


def _resample_means(table: npt.NDArray[np.float64], resamples: int, seed: int) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the means of all resamples, in parts of bounded size."""
    generator = np.random.default_rng(seed)
    is_scored = ~np.isnan(table)
    filled = np.where(is_scored, table, 0.0)
    at_once = max(1, _MAX_DRAWS // len(table))
    for start in range(0, resamples, at_once):
        rows = generator.integers(len(table), size=(min(at_once, resamples - start), len(table)))
        counts = is_scored[rows].sum(axis=1)
        with np.errstate(invalid="ignore"):  # a target that no case of a resample has
            means = filled[rows].sum(axis=1) / counts
        num_targets = (counts > 0).sum(axis=1)
        yield np.where(counts > 0, means, 0.0).sum(axis=1) / num_targets


def describe_bootstrap() -> dict[str, Any]:
    """Return how the intervals are computed, as data for JSON."""
    return {"method": "percentile bootstrap over cases", "resamples": RESAMPLES, "level": LEVEL, "seed": SEED}


def compare_paired(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Compare the scores of the same cases by two methods, as data for JSON.

    `difference` is the mean of second minus first, with its bootstrap interval. `p` is that of Wilcoxon's signed-rank
    test, two-sided; cases with equal scores are left out of it, and it is None if all are equal.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    differences = b - a
    interval = bootstrap_mean(differences)
    return {
        "cases": len(differences),
        "first_mean": float(a.mean()) if len(a) else None,
        "second_mean": float(b.mean()) if len(b) else None,
        "difference": float(differences.mean()) if len(differences) else None,
        "difference_ci95": None if interval is None else list(interval),
        "higher": int((differences > 0).sum()),
        "lower": int((differences < 0).sum()),
        "equal": int((differences == 0).sum()),
        "p": _wilcoxon(differences),
    }


def _wilcoxon(differences: npt.NDArray[np.float64]) -> float | None:
    from scipy.stats import wilcoxon

    changed = differences[differences != 0]
    return float(wilcoxon(changed).pvalue) if len(changed) else None
