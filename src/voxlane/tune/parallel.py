"""Parallel coordinates of a search as SVG text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from voxlane.pages import charts as draw
from voxlane.pages.charts import Axis, Plot
from voxlane.pages.formatting import value_key
from voxlane.tune.charts import STRIP, dice_axis, field_position, search_axes, trial_group
from voxlane.tune.trials import Search, Trial

_AXIS_DISTANCE = 124
"""Minimum distance between two axes."""
_Trace = tuple[Trial, list[float | None]]
"""One trial's line: its position on each axis, 0 to 1; None if the trial has no value there."""


def rank_trials(search: Search) -> dict[int, float]:
    """Return the rank of every scored trial, 0 for the worst and 1 for the best.

    Ranks rather than Dice set the colours: one bad outlier would make all other trials look the same.
    """
    ordered = sorted((t for t in search.trials if t.score is not None), key=lambda t: (t.score or 0.0, -t.number))
    last = max(len(ordered) - 1, 1)
    return {t.number: i / last if len(ordered) > 1 else 1.0 for i, t in enumerate(ordered)}


def parallel_chart(search: Search) -> Markup:
    """Return one line per trial through an axis per searched field and the Dice axis; an empty string without either.

    A trial without Dice ends in the strip below the last axis. On an axis of names, the lines of one name lie side by
    side, the best on top, so that they do not run into one point.
    """
    if not search.trials or not search.space:
        return Markup()
    fields = search_axes(search)
    dice = dice_axis([t.score for t in search.trials if t.score is not None], "mean Dice")
    axes = [*fields, dice]
    has_strip = any(t.score is None for t in search.trials)
    bottom = STRIP + 16 if has_strip else 14
    width = max(draw.FULL_WIDTH, 126 + _AXIS_DISTANCE * len(fields))
    plot = Plot(width, 378 + bottom, left=66, right=60, top=52, bottom=bottom)
    xs = [plot.x(i / len(fields)) for i in range(len(axes))]
    ranks = rank_trials(search)
    traces: list[_Trace] = [
        (t, [*(field_position(axis, t) for axis in fields), dice.position(t.score)])
        for t in sorted(search.trials, key=lambda t: (ranks.get(t.number, -1.0), -t.number))
    ]
    _spread_names(axes, traces)
    parts = [draw.path(f"M{x:.1f} {plot.top:g}V{plot.floor:g}", "axis") for x in xs]
    if has_strip:
        parts.append(draw.text("none", xs[-1] + 10, plot.height - 8, "start"))
    parts += [_draw_trace(trace, search, plot, xs, ranks.get(trace[0].number, 0.0)) for trace in traces]
    for index, (x, axis) in enumerate(zip(xs, axes, strict=True)):
        parts += _draw_axis(axis, x, plot, last=axis is dice)
        bottom_y = plot.height - 2 if axis is dice and has_strip else plot.floor
        parts.append(_draw_brush(index, axis.name, x, plot, bottom_y))
    label = (
        f"Parallel coordinates of {len(traces)} trials over {', '.join(axis.name for axis in fields)} and mean Dice; "
        "the table of trials has the same values"
    )
    return draw.svg(label, width, plot.height, parts, role="group", style=f"min-width:{width * 0.74:.0f}px")


def _draw_trace(trace: _Trace, search: Search, plot: Plot, xs: Sequence[float], rank: float) -> Markup:
    trial, positions = trace
    ys = [None if position is None else plot.y(position) for position in positions]
    if ys[-1] is None:
        ys[-1] = plot.height - 12
    line = _smooth_line([(x, y) for x, y in zip(xs, ys, strict=True) if y is not None])
    heights = ",".join("" if y is None else f"{y:.0f}" for y in ys)
    shapes = (draw.path(line, "near"), draw.path(line))
    return trial_group(trial, search, "trace", *shapes, style=f"--v:{rank:.0%}", data_y=heights)


def _draw_brush(index: int, name: str, x: float, plot: Plot, bottom: float) -> Markup:
    """Draw the area in which dragging selects a part of an axis."""
    area = {"x": x - 17, "y": plot.top - 6, "width": 34, "height": bottom - plot.top + 12}
    selection = {"x": x - 7, "y": plot.top, "width": 14, "height": 0}
    return draw.element(
        "g",
        draw.element("rect", class_="reach", **area),
        draw.element("rect", class_="selection", **selection),
        class_="brush",
        data_axis=index,
        data_top=plot.top,
        data_bottom=bottom,
        tabindex=0,
        role="button",
        aria_label=f"Filter by {name}: drag along the axis, or use the arrow keys",
    )


def _spread_names(axes: Sequence[Axis], traces: Sequence[_Trace]) -> None:
    """Spread the lines of one name over its band in their order, the worst at the bottom."""
    for index, axis in enumerate(axes):
        for name in axis.names:
            same = [positions for trial, positions in traces if value_key(trial.params.get(axis.name)) == name]
            band = min(0.62 / len(axis.names), 0.022 * len(same))
            for order, positions in enumerate(same):
                position = positions[index]
                if position is not None and len(same) > 1:
                    positions[index] = position + band * (order / (len(same) - 1) - 0.5)


def _draw_axis(axis: Axis, x: float, plot: Plot, *, last: bool) -> list[Markup]:
    """Draw an axis's name above it and its ticks beside it, on top of the lines so that they can be read."""
    group, _, name = axis.name.rpartition(".")
    title = draw.element("title", f"{axis.name}{' (log scale)' if axis.kind == 'log' else ''}")
    heading = (draw.text(group + "." if group else "", x, 14), draw.text(draw.clip(name, 17), x, 31, class_="row"))
    parts = [draw.element("g", title, *heading, class_="title")]
    side, anchor = (10, "start") if last else (-8, "end")
    for position, label in axis.ticks:
        y = plot.y(position)
        parts.append(draw.path(f"M{x - 3:.1f} {y:.1f}h6", "axis"))
        parts.append(draw.text(draw.clip(label.replace(" × ", "×"), 13), x + side, y + 4, anchor, "tick"))
    return parts


def _smooth_line(points: Sequence[tuple[float, float]]) -> str:
    """Return the path of a line that crosses every axis horizontally, so that the eye can follow it."""
    (x, y), *rest = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in rest:
        bend = (to_x - x) * 0.42
        parts.append(f"C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
    return "".join(parts)
