"""Parallel coordinates of a search, as SVG text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from voxlane.tune.axes import Axis, dice_axis, key
from voxlane.tune.charts import ACROSS, LANE, has_dice, opened, place_on, ranks, search_axes, tagged
from voxlane.tune.trials import Search, Trial

_AXIS_GAP = 124
"""Axes stand no closer than this."""


@dataclass(frozen=True)
class _Line:
    """One trial over all axes."""

    trial: Trial
    shares: list[float | None]
    """Of each axis, 0 to 1; None: it has no value there."""


def parallel(search: Search) -> str:
    """One line a trial through an axis a searched field and that of Dice; an empty string when there is nothing to
    draw. A trial without Dice ends in the strip below the last axis. On an axis of names the lines of one name lie
    side by side, the best on top, so that they do not run into one point."""
    if not search.trials or not search.space:
        return ""
    fields = search_axes(search)
    scored = dice_axis([t.dice for t in search.trials if t.dice is not None and has_dice(t)], "mean Dice")
    axes = [*fields, scored]
    lane = not all(map(has_dice, search.trials))
    left, right, top, bottom = 66, 60, 52, LANE + 16 if lane else 14
    width, height = max(ACROSS, left + right + _AXIS_GAP * (len(axes) - 1)), 378 + bottom
    places = [left + (width - left - right) * i / (len(axes) - 1) for i in range(len(axes))]

    def up(share: float) -> float:
        return height - bottom - share * (height - top - bottom)

    rank = ranks(search)
    lines = [
        _Line(t, [*(place_on(a, t) for a in fields), scored.share(t.dice) if has_dice(t) else None])
        for t in sorted(search.trials, key=lambda t: (rank.get(t.number, -1.0), -t.number))
    ]
    _lay_side_by_side(axes, lines)
    spoken = (
        f"Parallel coordinates of {len(lines)} trials over {', '.join(a.name for a in fields)} and mean Dice; "
        "the table of trials has the same values"
    )
    style = f' style="min-width:{width * 0.74:.0f}px"'
    parts = [opened(spoken, width, height, style).replace('role="img"', 'role="group"')]
    parts += [f'<path class="axis" d="M{x:.1f} {top}V{height - bottom}"/>' for x in places]
    if lane:
        parts.append(f'<text x="{places[-1] + 10}" y="{height - 8}">none</text>')
    for line in lines:
        ys = [None if s is None else up(s) for s in line.shares]
        if ys[-1] is None:
            ys[-1] = height - 12
        points = [(x, y) for x, y in zip(places, ys, strict=True) if y is not None]
        told = ",".join("" if y is None else f"{y:.0f}" for y in ys)
        share = f"{rank.get(line.trial.number, 0.0):.0%}"
        path = _smooth(points)
        parts.append(
            f'<g {tagged(line.trial, search, "way")} style="--v:{share}" data-y="{told}">'
            f'<path class="near" d="{path}"/><path d="{path}"/></g>'
        )
    for index, (x, one) in enumerate(zip(places, axes, strict=True)):
        parts.append(_upright(one, x, up, last=one is scored))
        low = height - 2 if one is scored and lane else height - bottom
        name = escape(f"Filter by {one.name}: drag along the axis, or use the arrow keys", quote=True)
        parts.append(
            f'<g class="brush" data-axis="{index}" data-top="{top}" data-bottom="{low}" tabindex="0" role="button" '
            f'aria-label="{name}"><rect class="reach" x="{x - 17:.1f}" y="{top - 6}" width="34" '
            f'height="{low - top + 12}"/><rect class="kept" x="{x - 7:.1f}" y="{top}" width="14" height="0"/></g>'
        )
    return "".join(parts) + "</svg>"


def _lay_side_by_side(axes: Sequence[Axis], lines: Sequence[_Line]) -> None:
    """Spread the lines of one name over its band, in their order (the worst first, at the bottom)."""
    for index, one in enumerate(axes):
        if one.kind != "names":
            continue
        for name in one.names:
            there = [line for line in lines if key(line.trial.params.get(one.name)) == name]
            band = min(0.62 / len(one.names), 0.022 * len(there))
            for order, line in enumerate(there):
                share = line.shares[index]
                if share is not None and len(there) > 1:
                    line.shares[index] = share + band * (order / (len(there) - 1) - 0.5)


def _upright(one: Axis, x: float, up: Callable[[float], float], *, last: bool) -> str:
    """An axis's name above and its ticks beside it, over the lines so that they can be read."""
    group, _, name = one.name.rpartition(".")
    shown = name if len(name) <= 17 else name[:16] + "…"
    parts = [
        f'<g class="title"><title>{escape(one.name)}{" (log scale)" if one.kind == "log" else ""}</title>',
        f'<text x="{x:.1f}" y="14" text-anchor="middle">{escape(group + "." if group else "")}</text>',
        f'<text class="row" x="{x:.1f}" y="31" text-anchor="middle">{escape(shown)}</text></g>',
    ]
    side, anchor = (10, "start") if last else (-8, "end")
    for share, said in one.ticks:
        y = up(share)
        said = said.replace(" × ", "×")
        clipped = said if len(said) <= 13 else said[:12] + "…"
        parts.append(f'<path class="axis" d="M{x - 3:.1f} {y:.1f}h6"/>')
        parts.append(
            f'<text class="tick" x="{x + side:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{escape(clipped)}</text>'
        )
    return "".join(parts)


def _smooth(points: Sequence[tuple[float, float]]) -> str:
    """A path that leaves and meets every axis level, so that the eye can follow it across."""
    (x, y), *rest = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in rest:
        bend = (to_x - x) * 0.42
        parts.append(f"C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
    return "".join(parts)
