"""Axes of searched fields: where a value lies between the two ends, and which ticks are drawn. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from voxlane.train.charts import short, ticks

_LOG = ("loguniform", "logint")
_NAMES = ("choice", "grid")
_FEW = 8
"""Whole numbers of a range this small are drawn as names, one band each."""


@dataclass(frozen=True)
class Axis:
    """One searched field, or the Dice."""

    name: str
    kind: Literal["linear", "log", "names"]
    low: float
    high: float
    """Ends of the axis, in the field's own unit; for names 0 and their number."""
    ticks: tuple[tuple[float, str], ...]
    """Share of the axis, 0 to 1, and what stands there."""
    names: tuple[str, ...] = ()
    """names: `key` of every value, in order."""

    def share(self, value: Any) -> float | None:
        """Where a value lies, 0 to 1; None: it has no place here."""
        if self.kind == "names":
            found = key(value)
            return (self.names.index(found) + 0.5) / len(self.names) if found in self.names else None
        known = number(value)
        if known is None or (self.kind == "log" and known <= 0):
            return None
        low, high = self._scaled(self.low), self._scaled(self.high)
        return min(max((self._scaled(known) - low) / (high - low), 0.0), 1.0)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.kind == "log" else value


def axis(name: str, spec: Any, values: Sequence[Any]) -> Axis:
    """The axis of a field from its part of the space, such as {"loguniform": [1e-4, 0.1]}, wide enough for every one
    of `values` too; a part that is none of ours is understood from the values alone."""
    kind, bounds = next(iter(spec.items())) if isinstance(spec, Mapping) and len(spec) == 1 else ("", [])
    bounds = list(bounds) if isinstance(bounds, (list, tuple)) else []
    given = [v for v in values if v is not None or kind in _NAMES]
    numbers = [n for n in map(number, [*bounds[:2], *given]) if n is not None]
    if kind in _NAMES or not numbers or len(numbers) < len([*bounds[:2], *given]):
        return _named(name, [*(bounds if kind in _NAMES else []), *given])
    low, high = min(numbers), max(numbers)
    whole = kind in ("int", "logint")
    if whole and high - low < _FEW:
        return _named(name, list(range(math.floor(low), math.ceil(high) + 1)))
    if kind in _LOG and 0 < low < high:
        return Axis(name, "log", low, high, _log_ticks(low, high))
    return straight(name, low, high, whole=whole)


def dice_axis(values: Sequence[float], name: str = "Dice") -> Axis:
    """The axis of mean Dice, from round numbers around what was reached."""
    known = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    marks = [t for t in ticks(min(known), max(known), 5) if 0 <= t <= 1] or [0.0, 1.0]
    low, high = min(marks[0], min(known)), max(marks[-1], max(known))
    if not high > low:
        low, high = 0.0, 1.0
    return Axis(name, "linear", low, high, tuple(((t - low) / (high - low), short(t)) for t in marks))


def straight(name: str, low: float, high: float, *, whole: bool = False, wanted: int = 5) -> Axis:
    """An axis of evenly spaced numbers with about `wanted` ticks; `whole`: at whole numbers only."""
    if not high > low:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    marks = [t for t in ticks(low, high, wanted, whole=whole) if low <= t <= high]
    return Axis(name, "linear", low, high, tuple(((t - low) / (high - low), short(t)) for t in marks))


def _named(name: str, values: Sequence[Any]) -> Axis:
    unique = list({key(v): v for v in values}.values())
    if unique and all(number(v) is not None for v in unique):
        unique.sort(key=lambda v: number(v) or 0.0)
    count = max(len(unique), 1)
    places = tuple(((i + 0.5) / count, text(v)) for i, v in enumerate(unique))
    return Axis(name, "names", 0, count, places, tuple(key(v) for v in unique))


def _log_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Powers of ten where there are three, else 1, 2 and 5 times these, else all between, else round numbers."""
    span = math.log(high) - math.log(low)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), range(1, 10)):
        marks = [m * 10.0**p for p in powers for m in steps if low * 0.9999 <= m * 10.0**p <= high * 1.0001]
        if len(marks) >= 3:
            break
    else:
        marks = [t for t in ticks(low, high, 4) if low <= t <= high] or [low, high]
    every = max(1, math.ceil(len(marks) / 7))
    return tuple(((math.log(m) - math.log(low)) / span, short(float(f"{m:.6g}"))) for m in marks[::every])


def number(value: Any) -> float | None:
    """A finite number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def key(value: Any) -> str:
    """One text for equal values, whether they came from a file or from a search."""
    return json.dumps(value, sort_keys=True, default=str)


def text(value: Any) -> str:
    """A value as a reader likes it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else _scientific(value)
    if isinstance(value, (list, tuple)) and value and all(number(v) is not None for v in value):
        return " × ".join(text(v) for v in value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _scientific(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
