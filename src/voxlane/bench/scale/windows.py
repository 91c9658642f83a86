"""The highest rate over a window of time, as a monitoring system draws it."""

from __future__ import annotations

import numpy as np

_BINS = 60
"""Parts of a window; windows begin at multiples of such a part."""


class Windows:
    """Amounts over time, kept by parts of a window of `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._bin_s = window_s / _BINS
        self._amounts: list[float] = []

    def add(self, when_s: float, amount: float) -> None:
        """Something at a moment."""
        place = int(when_s / self._bin_s)
        self._reach(place)
        self._amounts[place] += amount

    def spread(self, start_s: float, stop_s: float, rate: float) -> None:
        """So much a second from `start_s` to `stop_s`."""
        if stop_s <= start_s or not rate:
            return
        place, last = int(start_s / self._bin_s), int(stop_s / self._bin_s)
        self._reach(last)
        while place < last:
            edge = (place + 1) * self._bin_s
            self._amounts[place] += rate * (edge - start_s)
            start_s, place = edge, place + 1
        self._amounts[last] += rate * (stop_s - start_s)

    def highest(self, end_s: float) -> float:
        """The highest mean rate over a window within `[0, end_s)`; over all of it when that is shorter."""
        total = float(sum(self._amounts))
        if end_s <= self._bin_s * _BINS or len(self._amounts) <= _BINS:
            return total / end_s if end_s else 0.0
        grown = np.concatenate([[0.0], np.cumsum(self._amounts)])
        return float((grown[_BINS:] - grown[:-_BINS]).max() / (self._bin_s * _BINS))

    def highest_at_worst(self, end_s: float) -> float:
        """As `highest`, over windows that follow one another, if they begin at the worst moment: what a chart of whole
        minutes shows of a peak that is shorter than two of them lies between the two."""
        if end_s <= self._bin_s * _BINS or not self._amounts:
            return self.highest(end_s)
        amounts = np.array(self._amounts)
        worst = np.inf
        for start in range(_BINS):
            padded = np.concatenate([np.zeros(start), amounts, np.zeros(-(start + len(amounts)) % _BINS)])
            worst = min(worst, float(padded.reshape(-1, _BINS).sum(axis=1).max()))
        return worst / (self._bin_s * _BINS)

    def _reach(self, place: int) -> None:
        if place >= len(self._amounts):
            self._amounts += [0.0] * (place + 1 - len(self._amounts))
