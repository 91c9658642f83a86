"""Small pieces of the report page: numbers as a reader likes them, lists of facts, and the targets' colours."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from typing import Any

from voxlane.train import pictures
from voxlane.train.findings import Findings, as_float

NONE = '<span class="soft" title="not scored">–</span>'
"""In the place of a figure that there is not."""


def target_colours(found: Findings) -> dict[str, str]:
    """Every target and its colour in the pictures."""
    if (described := found.description) is not None:
        return dict(pictures.legend(described))
    names: Iterable[str] = (t for one in found.evaluations for t in one.targets)
    return {name: pictures.colour(i + 1) for i, name in enumerate(dict.fromkeys(names))}


def colour_variables(found: Findings) -> str:
    """CSS variables of the targets: as in the pictures on a dark page, deeper on a light one."""
    chosen = list(target_colours(found).values())
    deep = "".join(f"--t{i}:{_deeper(c)};" for i, c in enumerate(chosen))
    plain = "".join(f"--t{i}:{c};" for i, c in enumerate(chosen))
    return f":root{{{deep}}}@media (prefers-color-scheme:dark){{:root{{{plain}}}}}"


def _deeper(colour: str) -> str:
    red, green, blue = (int(int(colour[i : i + 2], 16) * 0.8) for i in (1, 3, 5))
    return f"#{red:02x}{green:02x}{blue:02x}"


def css_colour(found: Findings, target: str) -> str:
    """The target's colour as CSS that follows the page's dress."""
    names = list(target_colours(found))
    return f"var(--t{names.index(target)})" if target in names else "var(--accent)"


def swatch(found: Findings, target: str, as_painted: bool = False) -> str:
    """A small square of the target's colour; `as_painted` is that of the pictures in either dress."""
    colour = target_colours(found).get(target, "") if as_painted else css_colour(found, target)
    return f'<span class="swatch" style="background:{colour or "var(--accent)"}"></span>'


def missing(said: str) -> str:
    """A plain word about what is not there; `said` is HTML."""
    return f'<p class="missing">{said}</p>'


def fact_list(facts: Sequence[tuple[str, str]]) -> str:
    """Names and values (HTML); those without a value are left out."""
    kept = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts if value and value != NONE)
    return f'<dl class="facts">{kept}</dl>' if kept else ""


def times(values: Any, digits: int = 6) -> str:
    """Sizes such as 32 × 64 × 64."""
    return " × ".join(f"{v:.{digits}g}" for v in values or ())


def number(value: Any, digits: int) -> str:
    """A figure with `digits` after the point and thin spaces between thousands; NONE for what is none."""
    known = as_float(value)
    return f"{known:,.{digits}f}".replace(",", "\u202f") if math.isfinite(known) else NONE


def rounded(value: float) -> str:
    """A large number in words."""
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:,.0f}".replace(",", "\u202f")


def plural(count: int, noun: str) -> str:
    """How many of something."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def byte_size(value: float) -> str:
    """Bytes in decimal units."""
    if not math.isfinite(value):
        return NONE
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds in the units of a clock."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def moment(iso: str) -> str:
    """A moment in UTC to the minute; one without a zone, or no moment at all, as it was written."""
    try:
        known = datetime.datetime.fromisoformat(iso)
    except ValueError:
        return iso
    if known.tzinfo is None:
        return f"{known:%Y-%m-%d %H:%M}"
    return f"{known.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC"


def money(dollars: float) -> str:
    """US dollars; empty for what is not known."""
    if not math.isfinite(dollars):
        return ""
    return f"${dollars:,.2f}" if dollars >= 0.01 else f"${dollars:.5f}" if dollars else "nothing"
