"""Charts of a search as SVG text: parallel coordinates, history, learning curves, importance, one field against Dice,
and a timeline. Pure.

Every shape of a trial carries the trial's number (`data-trial`), by which the page's script highlights and filters the
trial in all charts. Without the script, the charts are complete. The page's style sheet sets the colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from voxlane.pages import charts as draw
from voxlane.pages.charts import Axis, Plot
from voxlane.pages.formatting import as_number, format_duration, format_value, value_key
from voxlane.sizes import format_plural
from voxlane.tune.trials import Search, Trial

_HEIGHT = 290
_SMALL_WIDTH, _SMALL_HEIGHT = 300, 204
STRIP = 26
"""Height of the strip below a Dice axis for trials that have no Dice."""
_MAX_BANDS = 8
"""A range of fewer integers than this is drawn as names, one band per integer."""
_AXIS_DISTANCE = 124
"""Minimum distance between two axes."""
_DRAWING_ORDER = {"stopped": 0, "failed": 1, "infeasible": 1, "running": 2, "done": 3}
_Trace = tuple[Trial, list[float | None]]
"""One trial's line: its position on each axis, 0 to 1; None if the trial has no value there."""


# -- axes --------------------------------------------------------------------------------------------------------------


def make_axis(name: str, spec: Any, values: Sequence[Any]) -> Axis:
    """Return the axis of a field from its distribution, such as {"loguniform": [1e-4, 0.1]}.

    The axis is wide enough for all `values`. If the distribution is unknown, the values alone decide.
    """
    kind, bounds = next(iter(spec.items())) if isinstance(spec, Mapping) and len(spec) == 1 else ("", [])
    bounds = list(bounds) if isinstance(bounds, (list, tuple)) else []
    if kind in ("choice", "grid"):
        return draw.names_axis(name, [*bounds, *values])
    shown = [*bounds[:2], *(v for v in values if v is not None)]
    numbers = [n for n in map(as_number, shown) if n is not None]
    if not numbers or len(numbers) < len(shown):
        return draw.names_axis(name, shown[len(bounds[:2]) :])
    low, high = min(numbers), max(numbers)
    integer = kind in ("int", "logint")
    if integer and high - low < _MAX_BANDS:
        return draw.names_axis(name, range(math.floor(low), math.ceil(high) + 1))
    if kind in ("loguniform", "logint") and 0 < low < high:
        return draw.log_axis(name, low, high)
    return draw.round_axis(name, low, high, integer=integer)


def dice_axis(values: Sequence[float], name: str = "Dice") -> Axis:
    """Return the axis of the mean Dice, between round numbers around the values."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    marks = [t for t in draw.round_numbers(min(finite), max(finite), 5) if 0 <= t <= 1] or [0.0, 1.0]
    low, high = min(marks[0], min(finite)), max(marks[-1], max(finite))
    if not high > low:
        low, high = 0.0, 1.0
    return draw.linear_axis(name, low, high, marks)


def search_axes(search: Search) -> list[Axis]:
    """Return the axes of the searched fields, in the space's order."""
    return [
        make_axis(name, spec, [t.params[name] for t in search.trials if name in t.params])
        for name, spec in search.space.items()
    ]


def field_position(axis: Axis, trial: Trial) -> float | None:
    """Return the position of a trial on a field's axis; None if the trial has no value."""
    return axis.position(trial.params[axis.name]) if axis.name in trial.params else None


def trial_group(trial: Trial, search: Search, kind: str, *children: Any, **attributes: Any) -> Markup:
    """Return a group of shapes of a trial; `kind` is the chart's class for them."""
    best = search.best is not None and search.best.number == trial.number
    classes = " ".join(["trial", trial.state, kind, *(["best"] if best else [])])
    return draw.element("g", *children, class_=classes, data_trial=trial.number, **attributes)


def _draw_point(trial: Trial, search: Search, x: float, y: float, size: float = 4.2) -> Markup:
    """Draw a trial as a point whose shape, not only its colour, tells the state.

    A disc is done, a ring stopped, a dashed ring running, a triangle infeasible, and a cross failed.
    """
    near = draw.element("circle", class_="near", cx=x, cy=y, r=size + 5)
    if trial.state == "infeasible":
        s = size * 1.2
        shape = draw.path(f"M{x:.1f} {y - s:.1f}l{s:.1f} {1.8 * s:.1f}h{-2 * s:.1f}z")
    elif trial.state == "failed":
        s = size * 0.95
        shape = draw.path(f"M{x - s:.1f} {y - s:.1f}l{2 * s:.1f} {2 * s:.1f}m0 {-2 * s:.1f}l{-2 * s:.1f} {2 * s:.1f}")
    else:
        shape = draw.element("circle", cx=x, cy=y, r=size)
    return trial_group(trial, search, "point", near, shape)


def state_icon(state: str) -> Markup:
    """Return the point of a state, for a line of text."""
    shapes = {"infeasible": draw.path("M7 2l5 9.5h-10z"), "failed": draw.path("M3 3l8 8m0 -8l-8 8")}
    shape = shapes.get(state, draw.element("circle", cx=7, cy=7, r=4.6))
    point = draw.element("g", shape, class_=f"point {state}")
    return draw.element("svg", point, class_="key chart", viewBox="0 0 14 14", aria_hidden="true")


def line_icon(style: str, state: str = "") -> Markup:
    """Return a piece of line, for a line of text; `style` is CSS."""
    return draw.element(
        "svg", draw.path("M0 7H14", style=style), class_=f"key {state}", viewBox="0 0 14 14", aria_hidden="true"
    )


# -- by trial, by epoch ------------------------------------------------------------------------------------------------


def history_chart(search: Search) -> Markup:
    """Return the Dice of every trial by number, and the best so far; an empty string without trials."""
    if not search.trials:
        return Markup()
    trials = sorted(search.trials, key=lambda t: t.number)
    x = draw.round_axis("trial", trials[0].number - 0.5, trials[-1].number + 0.5, 7, integer=True)
    y = dice_axis([t.score for t in trials if t.score is not None])
    complete = all(t.score is not None for t in trials)
    plot = Plot(height=_HEIGHT, left=58, bottom=40, strip=0 if complete else STRIP)

    def place(trial: Trial) -> tuple[float, float]:
        position = y.position(trial.score)
        across = plot.x(x.position(trial.number) or 0.0)
        return across, plot.strip_y if position is None else plot.y(position)

    commands, best = "", math.inf
    for trial in trials:
        across, height = place(trial)
        if trial.score is not None and height < best:
            commands += f"H{across:.1f}V{height:.1f}" if commands else f"M{across:.1f} {height:.1f}"
            best = height
    parts = [*plot.draw_y(y), *plot.draw_x(x, "trial")]
    if commands:
        parts.append(draw.path(f"{commands}H{plot.width - plot.right:g}", "best-so-far"))
    parts += [_draw_point(t, search, *place(t)) for t in trials]
    return draw.svg("Dice by trial, and the best so far", plot.width, plot.height, parts)


def curve_chart(search: Search, rungs: Sequence[int] = ()) -> Markup:
    """Return the Dice over epochs, one line per trial; an empty string if no trial has reported.

    `rungs` are the epochs at which trials were compared.
    """
    drawn = [t for t in search.trials if any(math.isfinite(d) for _, d in t.curve)]
    if not drawn:
        return Markup()
    longest = max(epoch for t in drawn for epoch, _ in t.curve)
    x = draw.round_axis("epochs", 0, max(longest, 1), 7, integer=True)
    y = dice_axis([dice for t in drawn for _, dice in t.curve])
    plot = Plot(height=_HEIGHT, left=58, bottom=40)
    parts = [*plot.draw_y(y), *plot.draw_x(x, "epochs trained")]
    parts += [plot.draw_mark(x.position(rung) or 0.0) for rung in rungs if rung < longest]
    for trial in sorted(drawn, key=lambda t: (t is search.best, _DRAWING_ORDER[t.state], t.number)):
        points = [
            (plot.x(x.position(epoch) or 0.0), plot.y(y.position(dice) or 0.0))
            for epoch, dice in trial.curve
            if math.isfinite(dice)
        ]
        line = draw.polyline(points)
        end = draw.element("circle", class_="end", cx=points[-1][0], cy=points[-1][1], r=2.6)
        parts.append(trial_group(trial, search, "curve", draw.path(line, "near"), draw.path(line), end))
    return draw.svg("Dice by epochs trained, one line per trial", plot.width, plot.height, parts)


def field_chart(search: Search, axis: Axis) -> Markup:
    """Return the Dice against one field, a point per trial; an empty string if no trial has a Dice."""
    placed = [t for t in search.trials if field_position(axis, t) is not None]
    scored = sorted((t for t in placed if t.score is not None), key=lambda t: t.score or 0.0)
    if not scored:
        return Markup()
    unscored = [t for t in placed if t.score is None]
    y = dice_axis([t.score or 0.0 for t in scored])
    plot = Plot(_SMALL_WIDTH, _SMALL_HEIGHT, left=58, bottom=40, strip=STRIP if unscored else 0)
    parts = [*plot.draw_y(y), *plot.draw_x(axis)]
    counts: dict[str, int] = {}
    for trial in [*unscored, *scored]:
        position = field_position(axis, trial) or 0.0
        if axis.kind == "names":
            key = value_key(trial.params[axis.name])
            counts[key] = counts.get(key, 0) + 1
            position += draw.jitter(counts[key]) * 0.5 / len(axis.names)
        dice = y.position(trial.score)
        parts.append(_draw_point(trial, search, plot.x(position), plot.strip_y if dice is None else plot.y(dice), 3.6))
    return draw.svg(f"Dice against {axis.name}", plot.width, plot.height - 14, parts)


# -- importance --------------------------------------------------------------------------------------------------------


def importance_chart(shares: Mapping[str, float], ranges: Mapping[str, tuple[float, float]]) -> Markup:
    """Return a bar per field, with a line over the range of its share."""
    if not shares:
        return Markup()
    line = 34
    plot = Plot(draw.WIDTH, 12 + line * len(shares), left=158, right=58, top=6, bottom=6)
    largest = max([0.1, *shares.values(), *(high for _, high in ranges.values())])
    parts = []
    for index, (name, share) in enumerate(shares.items()):
        y = plot.top + line * (index + 0.5)
        low, high = ranges.get(name, (share, share))
        end, low_x, high_x = (plot.x(value / largest) for value in (share, low, high))
        label = name if len(name) <= 22 else "…" + name[-21:]
        title = f"{name}: {share:.0%}, between {low:.0%} and {high:.0%} with a third of the trials left out"
        size = {"x": plot.left, "y": y - 9, "width": max(end - plot.left, 1.5), "height": 18, "rx": 3}
        whiskers = f"M{low_x:.1f} {y:.1f}H{high_x:.1f}M{low_x:.1f} {y - 4:.1f}v8M{high_x:.1f} {y - 4:.1f}v8"
        parts.append(
            draw.element(
                "g",
                draw.element("title", title),
                draw.text(label, plot.left - 12, y + 4, "end", "field"),
                draw.element("rect", class_="weight", **size),
                draw.path(whiskers, "range"),
                draw.text(f"{share:.0%}", max(end, high_x) + 9, y + 4, "start", "share"),
            )
        )
    described = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return draw.svg(f"Importance: {described}", plot.width, plot.height, parts)


# -- parallel coordinates ----------------------------------------------------------------------------------------------


def _rank_trials(search: Search) -> dict[int, float]:
    """Return the rank of every scored trial, 0 for the worst and 1 for the best.

    Ranks rather than Dice set the colours: one bad outlier would make all other trials look the same.
    """
    ordered = sorted((t for t in search.trials if t.score is not None), key=lambda t: (t.score or 0.0, -t.number))
    return {t.number: i / (len(ordered) - 1) if len(ordered) > 1 else 1.0 for i, t in enumerate(ordered)}


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
    ranks = _rank_trials(search)
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


# -- timeline ----------------------------------------------------------------------------------------------------------


def assign_rows(trials: Sequence[Trial], now: float) -> list[tuple[str, list[Trial]]]:
    """Return (machine, trials by time), with one row for each trial that a machine ran at the same time."""
    rows: list[tuple[str, list[Trial]]] = []
    for trial in sorted(trials, key=lambda t: (t.started, t.number)):
        start = trial.started + 0.5  # the clocks of two reports differ slightly
        row = next((row for node, row in rows if node == trial.node and row[-1].end(now) <= start), None)
        if row is None:
            rows.append((trial.node, [trial]))
        else:
            row.append(trial)
    return sorted(rows, key=lambda row: row[0])


def timeline_chart(search: Search) -> Markup:
    """Return when and on which machine each trial ran; an empty string if none has started."""
    started = [t for t in search.trials if t.started > 0]
    if not started:
        return Markup()
    start = min(t.started for t in started)
    end = max(search.last_time, start + 1)
    rows = assign_rows(started, end)
    line = 26
    plot = Plot(draw.FULL_WIDTH, 6 + line * len(rows) + 40, left=112, top=6, bottom=40)
    units = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
    unit, unit_name = next((unit, name) for unit, name in units if end - start > 2 * unit or unit == 1)
    axis = draw.round_axis("time", 0.0, (end - start) / unit, 9)
    parts = plot.draw_x(axis, f"{unit_name} since the first trial", grid=True)
    for index, (node, row) in enumerate(rows):
        y = plot.top + line * index
        if index == 0 or node != rows[index - 1][0]:
            title, name = draw.element("title", node), draw.clip(node, 15) or "machine"
            place = {"x": plot.left - 12, "y": y + 17, "text_anchor": "end"}
            parts.append(draw.element("text", name, title, class_="field", **place))
        for trial in row:
            left, right = (plot.x((time - start) / (end - start)) for time in (trial.started, trial.end(end)))
            width = max(right - left - 1, 2)
            size = {"x": left, "y": y + 2, "width": width, "height": line - 4, "rx": 4}
            has_space = width > 7 * len(str(trial.number)) + 4
            label = draw.text(str(trial.number), left + width / 2, y + 17) if has_space else Markup()
            parts.append(trial_group(trial, search, "span", draw.element("rect", **size), label))
    return draw.svg(f"When each of {len(started)} trials ran", plot.width, plot.height, parts)


def describe_trial(trial: Trial, now: float) -> str:
    """Describe a trial for the tooltip of its shapes."""
    dice = "no Dice" if trial.score is None else f"Dice {trial.score:.4f}"
    head = f"Trial {trial.number}, {trial.state}: {dice}"
    length = f"{format_plural(trial.epochs, 'epoch')} in {format_duration(trial.seconds(now))}"
    fields = [f"{name} = {format_value(value)}" for name, value in trial.params.items()]
    return "\n".join([head, length, *fields, *([trial.reason] if trial.reason else [])])
