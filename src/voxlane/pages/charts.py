"""Charts as SVG text. Pure functions.

The charts are drawn here rather than by a library: Matplotlib's SVG is static and has 20 to 60 kB per chart, and a
JavaScript library has megabytes that every page would have to carry. These charts have a few kB, take their colours
from the page's CSS variables in light and dark mode, and mark their shapes with data attributes for the page's script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup, escape

from voxlane.pages.formatting import as_number, format_tick, format_value, value_key

WIDTH, HEIGHT = 560, 280
"""Size of a chart in a column, in units of its own coordinates; the page scales it to the available width."""
FULL_WIDTH = 1080
"""Width of a chart across the page."""
_MAX_HOVER_COLUMNS = 400
"""More points than this are too narrow to point at one by one."""
_MAX_DOTS = 40
"""Lines with more points than this have no dots."""


def element(name: str, *children: Any, **attributes: Any) -> Markup:
    """Return an SVG or HTML element with escaped attributes and children. Numbers are rounded to one decimal. `class_`
    and `data_x` become `class` and `data-x`; None omits an attribute."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_format_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    content = "".join(escape(child) for child in children)
    return Markup(f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>")


def _format_attribute(value: Any) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(value)


def svg(label: str, width: float, height: float, parts: Iterable[Markup], **attributes: Any) -> Markup:
    """Return a complete chart; `label` describes it to people who cannot see it."""
    attributes = {"role": "img", "aria_label": label, **attributes}
    return element("svg", *parts, class_="chart", viewBox=f"0 0 {width:g} {height:g}", **attributes)


def path(d: str, class_: str | None = None, *children: Any, **attributes: Any) -> Markup:
    """Return a path with the commands `d`."""
    return element("path", *children, class_=class_, **attributes, d=d)


def text(content: str, x: float, y: float, anchor: str = "middle", class_: str | None = None) -> Markup:
    """Return a text at (x, y)."""
    return element("text", content, class_=class_, x=float(x), y=float(y), text_anchor=anchor)


def clip(content: str, length: int) -> str:
    """Return `content`, shortened to `length` characters."""
    return content if len(content) <= length else content[: length - 1] + "…"


def jitter(order: int) -> float:
    """Return an offset in [-0.5, 0.5) that separates the points of one value, the same in every drawing."""
    return order * 0.618034 % 1 - 0.5


def polyline(points: Iterable[tuple[float, float]]) -> str:
    """Return the path commands of a line through `points`."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


# -- axes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Scale of one quantity, with its ticks."""

    name: str
    kind: Literal["linear", "log", "names"]
    """names: one band per value."""
    low: float
    """Lower end of the axis; 0 for names."""
    high: float
    """Upper end of the axis; the number of values for names."""
    ticks: tuple[tuple[float, str], ...]
    """Position of each tick, 0 to 1, and its label."""
    names: tuple[str, ...] = ()
    """names: `value_key` of every value, in order."""

    def position(self, value: Any) -> float | None:
        """Return the position of a value, 0 to 1, or None if it has none on this axis."""
        if self.kind == "names":
            key = value_key(value)
            return (self.names.index(key) + 0.5) / len(self.names) if key in self.names else None
        number = as_number(value)
        if number is None or (self.kind == "log" and number <= 0):
            return None
        low, high, scaled = (math.log(v) if self.kind == "log" else v for v in (self.low, self.high, number))
        return min(max((scaled - low) / (high - low), 0.0), 1.0)


def linear_axis(name: str, low: float, high: float, marks: Sequence[float]) -> Axis:
    """Return an axis from `low` to `high` with ticks at those `marks` that lie between."""
    ticks = tuple(((mark - low) / (high - low), format_tick(mark)) for mark in marks if low <= mark <= high)
    return Axis(name, "linear", low, high, ticks)


def round_axis(name: str, low: float, high: float, count: int = 5, *, integer: bool = False) -> Axis:
    """Return an axis from `low` to `high` with about `count` ticks at round numbers or, with `integer`, at integers."""
    if not high > low:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    return linear_axis(name, low, high, round_numbers(low, high, count, integer=integer))


def names_axis(name: str, values: Iterable[Any]) -> Axis:
    """Return an axis with one band per value; numbers are sorted, other values keep their order."""
    unique = list({value_key(v): v for v in values}.values())
    if all(as_number(v) is not None for v in unique):
        unique.sort(key=lambda v: as_number(v) or 0.0)
    count = max(len(unique), 1)
    ticks = tuple(((i + 0.5) / count, format_value(v)) for i, v in enumerate(unique))
    return Axis(name, "names", 0, count, ticks, tuple(value_key(v) for v in unique))


def log_axis(name: str, low: float, high: float) -> Axis:
    """Return a logarithmic axis with ticks at powers of ten if there are three, else also at 2 and 5 times these, else
    at all multiples, else at round numbers."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), range(1, 10)):
        marks = [m * 10.0**p for p in powers for m in steps if low * 0.9999 <= m * 10.0**p <= high * 1.0001]
        if len(marks) >= 3:
            break
    else:
        marks = [t for t in round_numbers(low, high, 4) if low <= t <= high] or [low, high]
    every = max(1, math.ceil(len(marks) / 7))
    span = math.log(high) - math.log(low)
    ticks = (((math.log(m) - math.log(low)) / span, format_tick(float(f"{m:.6g}"))) for m in marks[::every])
    return Axis(name, "log", low, high, tuple(ticks))


def round_numbers(low: float, high: float, count: int, *, integer: bool = False) -> list[float]:
    """Return about `count` round numbers from at most `low` to at least `high`; with `integer`, integers between."""
    if not high - low > 1e-300:  # also where the step would be too small for a float
        low, high = low - (abs(low) / 2 or 0.5), low + (abs(low) / 2 or 0.5)
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999), 10 * power)
    if integer:
        step = max(1, math.ceil(step))
        return [float(step * i) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * i:.12g}") for i in range(first, last + 1)]


@dataclass(frozen=True)
class Plot:
    """Area of a chart between its margins for labels; it turns positions from 0 to 1 into coordinates."""

    width: float = WIDTH
    height: float = HEIGHT
    left: float = 52
    right: float = 16
    top: float = 14
    bottom: float = 38
    strip: float = 0
    """Height of a strip above the bottom margin for shapes without a value."""

    def x(self, position: float) -> float:
        """Return the x coordinate of a position."""
        return self.left + position * (self.width - self.left - self.right)

    def y(self, position: float) -> float:
        """Return the y coordinate of a position; 0 is the lower end."""
        return self.floor - position * (self.floor - self.top)

    @property
    def floor(self) -> float:
        """Return the y coordinate of the lower end, above the strip."""
        return self.height - self.bottom - self.strip

    @property
    def strip_y(self) -> float:
        """Return the y coordinate of shapes in the strip."""
        return self.floor + self.strip / 2 + 3

    def draw_y(self, axis: Axis) -> list[Markup]:
        """Draw the grid lines and labels of the vertical axis."""
        parts = []
        for position, label in axis.ticks:
            y = self.y(position)
            parts.append(path(f"M{self.left:g} {y:.1f}H{self.width - self.right:g}", "grid"))
            parts.append(text(label, self.left - 8, y + 4, "end"))
        if self.strip:
            parts.append(text("none", self.left - 8, self.strip_y + 4, "end"))
        return parts

    def draw_x(self, axis: Axis, name: str = "", *, grid: bool = False) -> list[Markup]:
        """Draw the labels and name of the horizontal axis, with vertical grid lines if `grid`."""
        base = self.height - self.bottom
        label_width = (self.width - self.left - self.right) / max(len(axis.ticks), 1)
        parts = []
        for position, label in axis.ticks:
            x = self.x(position)
            if grid:
                parts.append(path(f"M{x:.1f} {self.top:g}V{base:g}", "grid"))
            label = label.replace(" × ", "×")
            fits = len(label) * 6.3 <= max(label_width, 24)
            parts.append(text(label if fits else clip(label, max(3, int(label_width / 6.3))), x, base + 17))
        if not grid:
            parts.append(path(f"M{self.left:g} {base:g}H{self.width - self.right:g}", "axis"))
        if name:
            parts.append(text(name, self.x(0.5), self.height - 4, class_="name"))
        return parts

    def draw_mark(self, position: float) -> Markup:
        """Draw a dashed vertical line that points out a position."""
        return path(f"M{self.x(position):.1f} {self.top:g}V{self.floor:g}", "mark")


# -- charts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """One line of a line chart."""

    name: str
    colour: str
    """Any CSS colour."""
    points: tuple[tuple[float, float], ...]
    """(x, y), sorted by x; points with a y that is not finite are left out."""
    faint: bool = False
    """Whether the line is only context, and drawn thin."""

    @property
    def drawn(self) -> list[tuple[float, float]]:
        """Return the points that can be drawn."""
        return [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_name: str = "epoch",
    y_range: tuple[float, float] | None = None,
    from_zero: bool = False,
    mark: float | None = None,
) -> Markup:
    """Return a line chart, or an empty string if there is nothing to draw. `label` describes it in words. The y axis
    spans `y_range`, or the values, or with `from_zero` the values and 0. `mark` is an x to point out."""
    shown = [s for s in series if s.drawn]
    if not shown:
        return Markup()
    x_axis, y_axis = _line_axes(series, shown, x_name, y_range, from_zero)
    plot = Plot()

    def place(x: float, y: float) -> tuple[float, float]:
        return plot.x(x_axis.position(x) or 0.0), plot.y(y_axis.position(y) or 0.0)

    parts = [*plot.draw_y(y_axis), *plot.draw_x(x_axis, x_name)]
    if mark is not None and x_axis.low <= mark <= x_axis.high:
        parts.append(plot.draw_mark(x_axis.position(mark) or 0.0))
    for line in sorted(shown, key=lambda s: not s.faint):
        points = [place(*point) for point in line.drawn]
        width = 1.4 if line.faint else 2.2
        parts.append(path(polyline(points), "line", style=f"stroke:{line.colour};stroke-width:{width}"))
        if len(points) <= _MAX_DOTS and not line.faint:
            parts += [element("circle", style=f"fill:{line.colour}", cx=x, cy=y, r=2.8) for x, y in points]
    parts += _hover_columns(shown, x_name, plot, x_axis)
    return svg(label, plot.width, plot.height, parts)


def _line_axes(
    series: Sequence[Series], shown: Sequence[Series], x_name: str, y_range: tuple[float, float] | None, from_zero: bool
) -> tuple[Axis, Axis]:
    xs = [x for s in series for x, _ in s.points if math.isfinite(x)]  # of all points: the charts of one run line up
    x_axis = round_axis(x_name, min(xs), max(*xs, min(xs) + 1), 7, integer=True)
    ys = [y for s in shown for _, y in s.drawn]
    low, high = y_range or (min([*ys, 0] if from_zero else ys), max(ys))
    marks = round_numbers(low, high, 5)
    if y_range is None:
        low, high = min(marks[0], low), max(marks[-1], high)
    return x_axis, linear_axis("", low, high, marks)


def _hover_columns(series: Sequence[Series], x_name: str, plot: Plot, x_axis: Axis) -> Iterable[Markup]:
    """Yield invisible columns, one per x, that show its values when pointed at."""
    xs = sorted({x for s in series for x, _ in s.drawn})
    if len(xs) > _MAX_HOVER_COLUMNS:
        return
    tables = [(s.name, dict(s.drawn)) for s in series]
    places = [plot.x(x_axis.position(x) or 0.0) for x in xs]
    for i, x in enumerate(xs):
        left = (places[i - 1] + places[i]) / 2 if i else places[i] - 6
        right = (places[i + 1] + places[i]) / 2 if i + 1 < len(places) else places[i] + 6
        values = ", ".join(f"{name} {table[x]:.4g}" for name, table in tables if x in table)
        title = element("title", f"{x_name} {format_tick(x)}: {values}")
        size = {"x": left, "y": plot.top, "width": right - left, "height": plot.floor - plot.top}
        yield element("rect", title, class_="hover", **size)


def dot_chart(rows: Sequence[tuple[str, str, Sequence[tuple[str, float]]]], *, label: str, x_name: str) -> Markup:
    """Return a chart with one dot per case from 0 to 1 for every row (name, colour, [(case, value)]). A line marks each
    row's mean. Returns an empty string if there is nothing to draw."""
    finite = [(name, colour, [(c, v) for c, v in values if math.isfinite(v)]) for name, colour, values in rows]
    if not any(values for _, _, values in finite):
        return Markup()
    line = 58
    plot = Plot(FULL_WIDTH, 8 + line * len(finite) + 38, left=124, top=8)
    axis = round_axis("", 0, 1, 6)
    parts = plot.draw_x(axis, x_name, grid=True)
    for index, (name, colour, values) in enumerate(finite):
        y = plot.top + line * (index + 0.5)
        parts.append(text(clip(name, 15), plot.left - 14, y + 4, "end", "row"))
        if not values:
            parts.append(text("no case has it", plot.left + 8, y + 4, "start"))
            continue
        for order, (case, value) in enumerate(sorted(values, key=lambda item: item[1])):
            title = element("title", f"{case}: {value:.3f}")
            place = {"cx": plot.x(axis.position(value) or 0.0), "cy": y + jitter(order) * line * 0.5, "r": 4.2}
            parts.append(element("circle", title, class_="dot", style=f"fill:{colour}", **place))
        mean = sum(v for _, v in values) / len(values)
        title = element("title", f"{name}: mean {mean:.3f}")
        x = plot.x(axis.position(mean) or 0.0)
        parts.append(path(f"M{x:.1f} {y - line * 0.4:.1f}v{line * 0.8:.1f}", "mean", title))
    return svg(label, plot.width, plot.height, parts)


def difference_chart(
    rows: Sequence[tuple[str, str, Sequence[tuple[str, float]], Sequence[float] | None]], *, label: str, x_name: str
) -> Markup:
    """Return a chart with one dot per case around zero for every row (name, colour, [(case, difference)], interval). A
    line marks each row's mean, and a band the interval, if there is one. Returns an empty string without any value."""
    values = [abs(v) for _, _, differences, _ in rows for _, v in differences]
    if not values:
        return Markup()
    line = 58
    plot = Plot(FULL_WIDTH, 8 + line * len(rows) + 38, left=124, top=8)
    limit = max(*values, 0.01) * 1.05
    axis = round_axis("", -limit, limit, 9)
    parts = plot.draw_x(axis, x_name, grid=True)
    parts.append(plot.draw_mark(axis.position(0.0) or 0.5))
    for index, (name, colour, differences, interval) in enumerate(rows):
        y = plot.top + line * (index + 0.5)
        parts.append(text(clip(name, 15), plot.left - 14, y + 4, "end", "row"))
        if not differences:
            parts.append(text("no case has it", plot.left + 8, y + 4, "start"))
            continue
        if interval is not None:
            left, right = (plot.x(axis.position(end) or 0.0) for end in interval)
            title = element("title", f"{name}: {interval[0]:+.3f} to {interval[1]:+.3f}")
            size = {"x": left, "y": y - line * 0.4, "width": max(right - left, 1.0), "height": line * 0.8}
            parts.append(element("rect", title, style=f"fill:{colour};opacity:0.25", **size))
        for order, (case, value) in enumerate(sorted(differences, key=lambda item: item[1])):
            title = element("title", f"{case}: {value:+.3f}")
            place = {"cx": plot.x(axis.position(value) or 0.0), "cy": y + jitter(order) * line * 0.5, "r": 4.2}
            parts.append(element("circle", title, class_="dot", style=f"fill:{colour}", **place))
        mean = sum(v for _, v in differences) / len(differences)
        x = plot.x(axis.position(mean) or 0.0)
        title = element("title", f"{name}: mean {mean:+.3f}")
        parts.append(path(f"M{x:.1f} {y - line * 0.4:.1f}v{line * 0.8:.1f}", "mean", title))
    return svg(label, plot.width, plot.height, parts)
