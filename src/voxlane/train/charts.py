"""Charts as SVG text: lines over epochs, and one dot a case. Pure functions; colours are CSS variables of the page, so
that they follow its light or dark dress."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 280
"""Units of a line chart's own coordinates; it takes the width it is given."""
DOTS_WIDTH = 1080
"""The same of a chart of dots, which lies across the page."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 14, 38
_HOVER_COLUMNS = 400
"""More points than this are too narrow to be pointed at one by one."""


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str
    colour: str
    """Any CSS colour."""
    points: tuple[tuple[float, float], ...]
    """(x, y), by x; y that is not finite breaks nothing and is not drawn."""
    faint: bool = False
    """Drawn thin, for what is only context."""

    @property
    def drawn(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        return [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]


def lines(
    series: Sequence[Series],
    *,
    label: str,
    x_name: str = "epoch",
    y_range: tuple[float, float] | None = None,
    from_zero: bool = False,
    mark: float = -1,
) -> str:
    """A line chart as `<svg>`, or an empty string when there is nothing to draw. `label` says in words what it shows;
    the y axis spans `y_range`, or the values, or with `from_zero` those and 0; `mark` is an x to point out."""
    shown = [s for s in series if s.drawn]
    if not shown:
        return ""
    xs = [x for s in shown for x, _ in s.drawn]
    ys = [y for s in shown for _, y in s.drawn]
    every_x = [x for s in series for x, _ in s.points if math.isfinite(x)]  # so that charts of one run line up
    x_low, x_high = min(every_x), max(max(every_x), min(every_x) + 1)
    y_ticks = ticks(*(y_range or (min([*ys, 0] if from_zero else ys), max(ys))), 5)
    y_low, y_high = y_range or (min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys)))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        up = (min(max(y, y_low), y_high) - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)
        return _LEFT + across, HEIGHT - _BOTTOM - up

    parts = [_open(label, WIDTH, HEIGHT)]
    for tick in y_ticks:
        _, y = place(x_low, tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in ticks(x_low, x_high, 7, whole=True):
        x, _ = place(tick, y_low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="name" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_name)}</text>')
    if x_low <= mark <= x_high:
        x, _ = place(mark, y_low)
        parts.append(f'<path class="mark" d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
    for one in sorted(shown, key=lambda s: not s.faint):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in one.drawn))
        width = 1.4 if one.faint else 2.2
        parts.append(f'<path class="line" style="stroke:{one.colour};stroke-width:{width}" d="M{path}"/>')
        if len(one.drawn) <= 40 and not one.faint:
            for point in one.drawn:
                x, y = place(*point)
                parts.append(f'<circle style="fill:{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.8"/>')
    parts += _hover(shown, x_name, [place(x, y_low)[0] for x in sorted(set(xs))], sorted(set(xs)))
    return "".join(parts) + "</svg>"


def _hover(series: Sequence[Series], x_name: str, places: Sequence[float], xs: Sequence[float]) -> Iterable[str]:
    """Unseen columns, one for each x, that tell its values when pointed at."""
    if len(xs) > _HOVER_COLUMNS:
        return
    tables = [(s.name, dict(s.drawn)) for s in series]
    for i, x in enumerate(xs):
        left = (places[i - 1] + places[i]) / 2 if i else places[i] - 6
        right = (places[i + 1] + places[i]) / 2 if i + 1 < len(places) else places[i] + 6
        values = [f"{name} {table[x]:.4g}" for name, table in tables if x in table]
        said = escape(f"{x_name} {short(x)}: " + ", ".join(values))
        size = f'x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{HEIGHT - _TOP - _BOTTOM}"'
        yield f'<rect class="hover" {size}><title>{said}</title></rect>'


def dots(rows: Sequence[tuple[str, str, Sequence[tuple[str, float]]]], *, label: str, x_name: str) -> str:
    """One dot a case between 0 and 1 for every row (name, colour, [(case, value)]), and a line at each row's mean;
    an empty string when there is nothing to draw."""
    kept = [(name, colour, [(c, v) for c, v in values if math.isfinite(v)]) for name, colour, values in rows]
    if not any(values for _, _, values in kept):
        return ""
    left, line, top = 124, 58, 8
    height = top + line * len(kept) + _BOTTOM

    def place(value: float) -> float:
        return left + min(max(value, 0.0), 1.0) * (DOTS_WIDTH - left - _RIGHT)

    parts = [_open(label, DOTS_WIDTH, height)]
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
        x = place(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{height - _BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - _BOTTOM + 18}" text-anchor="middle">{short(tick)}</text>')
    middle = (left + DOTS_WIDTH - _RIGHT) / 2
    parts.append(f'<text class="name" x="{middle}" y="{height - 4}" text-anchor="middle">{escape(x_name)}</text>')
    for index, (name, colour, values) in enumerate(kept):
        y = top + line * (index + 0.5)
        clipped = name if len(name) <= 15 else name[:14] + "…"
        parts.append(f'<text class="row" x="{left - 14}" y="{y + 4:.1f}" text-anchor="end">{escape(clipped)}</text>')
        if not values:
            parts.append(f'<text x="{left + 8}" y="{y + 4:.1f}">no case has it</text>')
            continue
        for order, (case, value) in enumerate(sorted(values, key=lambda item: item[1])):
            spread = (order * 0.618034 % 1 - 0.5) * line * 0.5  # apart enough to be seen, the same every time
            parts.append(
                f'<circle class="dot" style="fill:{colour}" cx="{place(value):.1f}" cy="{y + spread:.1f}" r="4.2">'
                f"<title>{escape(f'{case}: {value:.3f}')}</title></circle>"
            )
        mean = sum(v for _, v in values) / len(values)
        parts.append(
            f'<path class="mean" d="M{place(mean):.1f} {y - line * 0.4:.1f}v{line * 0.8:.1f}">'
            f"<title>{escape(f'{name}: mean {mean:.3f}')}</title></path>"
        )
    return "".join(parts) + "</svg>"


def ticks(low: float, high: float, wanted: int, *, whole: bool = False) -> list[float]:
    """About `wanted` round numbers from at most `low` to at least `high`; with `whole`, integers between the two."""
    if not high > low:
        low, high = low - (abs(low) / 2 or 0.5), low + (abs(low) / 2 or 0.5)
    raw = (high - low) / max(wanted - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999), 10 * power)
    if whole:
        step = max(1, math.ceil(step))
        return [float(step * i) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * i:.12g}") for i in range(first, last + 1)]


def short(value: float) -> str:
    """A tick's number without needless digits."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.6g}"


def _open(label: str, width: int, height: int) -> str:
    # The viewBox alone sizes it: the page gives the width.
    name = escape(label, quote=True)
    return f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{name}">'
