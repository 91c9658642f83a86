"""The highest rate over a window of time, as a monitoring system reports it."""

from __future__ import annotations

import numpy as np

_BINS = 60
"""Bins of a window; windows begin at multiples of a bin."""


class Windows:
    """Amounts over time, in bins of a window of `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._bin_s = window_s / _BINS
        self._amounts: list[float] = []

    def add(self, when_s: float, amount: float) -> None:
        """Add an amount at one point in time."""
        index = int(when_s / self._bin_s)
        self._extend(index)
        self._amounts[index] += amount

    def add_rate(self, start_s: float, stop_s: float, rate: float) -> None:
        """Add `rate` per second from `start_s` to `stop_s`."""
        if stop_s <= start_s or not rate:
            return
        index, last = int(start_s / self._bin_s), int(stop_s / self._bin_s)
        self._extend(last)
        while index < last:
            edge = (index + 1) * self._bin_s
            self._amounts[index] += rate * (edge - start_s)
            start_s, index = edge, index + 1
        self._amounts[last] += rate * (stop_s - start_s)

    def highest(self, end_s: float) -> float:
        """Return the highest mean rate over a window within `[0, end_s)`, or over all of it if that is shorter."""
        total = float(sum(self._amounts))
        if end_s <= self._bin_s * _BINS or len(self._amounts) <= _BINS:
            return total / end_s if end_s else 0.0
        cumulative = np.concatenate([[0.0], np.cumsum(self._amounts)])
        return float((cumulative[_BINS:] - cumulative[:-_BINS]).max() / (self._bin_s * _BINS))

    def highest_at_worst(self, end_s: float) -> float:
        """Return the same over consecutive windows that begin at the worst moment. A chart of full minutes shows a
        short peak as a value between this and `highest`."""
        if end_s <= self._bin_s * _BINS or not self._amounts:
            return self.highest(end_s)
        amounts = np.array(self._amounts)
        worst = np.inf
        for start in range(_BINS):
            padded = np.concatenate([np.zeros(start), amounts, np.zeros(-(start + len(amounts)) % _BINS)])
            worst = min(worst, float(padded.reshape(-1, _BINS).sum(axis=1).max()))
        return worst / (self._bin_s * _BINS)

    def _extend(self, index: int) -> None:
        if index >= len(self._amounts):
            self._amounts += [0.0] * (index + 1 - len(self._amounts))
