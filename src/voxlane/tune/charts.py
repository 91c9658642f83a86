"""Charts of a search as SVG text: history, learning curves, importance, one field against Dice, and a timeline. Pure.
Whatever is drawn of a trial carries its number (`data-trial`), by which the page's script lights it up in every chart
at once and filters; without a script all of it is there. Colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from voxlane.train.page_pieces import duration
from voxlane.tune.axes import Axis, axis, dice_axis, key, straight, text
from voxlane.tune.trials import Search, Trial

WIDTH, HEIGHT, ACROSS = 560, 290, 1080
"""Units of a chart's own coordinates: of one in a column, and the width of one across the page."""
SMALL_WIDTH, SMALL_HEIGHT = 300, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 16, 14, 40
LANE = 26
"""Height of the strip below an axis of Dice for trials that have none."""


def has_dice(trial: Trial) -> bool:
    """Whether it has a Dice that can be drawn."""
    return trial.dice is not None and math.isfinite(trial.dice)


def ranks(search: Search) -> dict[int, float]:
    """Of every scored trial its place, 0 for the worst and 1 for the best: one bad trial far away does not make all
    others look the same."""
    ordered = sorted((t for t in search.trials if has_dice(t)), key=lambda t: (t.dice or 0.0, -t.number))
    last = max(len(ordered) - 1, 1)
    return {t.number: i / last if len(ordered) > 1 else 1.0 for i, t in enumerate(ordered)}


def place_on(one: Axis, trial: Trial) -> float | None:
    """Where a trial lies on a field's axis; None: it has no value."""
    return one.share(trial.params[one.name]) if one.name in trial.params else None


def search_axes(search: Search) -> list[Axis]:
    """The axes of the searched fields, in the space's order."""
    return [
        axis(name, spec, [t.params[name] for t in search.trials if name in t.params])
        for name, spec in search.space.items()
    ]


def opened(label: str, width: float, height: float, more: str = "") -> str:
    """The beginning of a chart; the page gives the width."""
    said = escape(label, quote=True)
    return f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{said}"{more}>'


def tagged(trial: Trial, search: Search, *classes: str) -> str:
    """Attributes of a shape of this trial."""
    best = search.best
    names = ["trial", trial.state, *classes, *(["best"] if best is not None and best.number == trial.number else [])]
    return f'class="{" ".join(names)}" data-trial="{trial.number}"'


def mark(trial: Trial, search: Search, x: float, y: float, size: float = 4.2) -> str:
    """A trial as a point, its state told by shape as well as by colour: a disc for done, a ring for stopped, half a
    disc for running, a triangle for infeasible, a cross for failed."""
    attributes = tagged(trial, search, "point")
    if trial.state == "infeasible":
        s = size * 1.2
        shape = f'<path d="M{x:.1f} {y - s:.1f}l{s:.1f} {1.8 * s:.1f}h{-2 * s:.1f}z"/>'
    elif trial.state == "failed":
        s = size * 0.95
        shape = f'<path d="M{x - s:.1f} {y - s:.1f}l{2 * s:.1f} {2 * s:.1f}m0 {-2 * s:.1f}l{-2 * s:.1f} {2 * s:.1f}"/>'
    else:
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
    hit = f'<circle class="near" cx="{x:.1f}" cy="{y:.1f}" r="{size + 5}"/>'
    return f"<g {attributes}>{hit}{shape}</g>"


def sign(state: str) -> str:
    """The mark of a state, for a line of text."""
    shapes = {"infeasible": '<path d="M7 2l5 9.5h-10z"/>', "failed": '<path d="M3 3l8 8m0 -8l-8 8"/>'}
    shape = shapes.get(state, '<circle cx="7" cy="7" r="4.6"/>')
    return f'<svg class="key chart" viewBox="0 0 14 14" aria-hidden="true"><g class="point {state}">{shape}</g></svg>'


def stroke(style: str, state: str = "") -> str:
    """A piece of line, for a line of text; `style` is CSS."""
    return f'<svg class="key {state}" viewBox="0 0 14 14" aria-hidden="true"><path d="M0 7H14" style="{style}"/></svg>'


# -- by trial, by epoch --------------------------------------------------------------------------------------------


def _frame(x: Axis, y: Axis, width: float, height: float, lane: bool, x_name: str) -> tuple[list[str], float]:
    """Grid, ticks and names of a chart; and where Dice's axis ends, above the strip of those without one."""
    floor = height - _BOTTOM - (LANE if lane else 0)
    parts = []
    for share, said in y.ticks:
        at = floor - share * (floor - _TOP)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{width - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(said)}</text>')
    if lane:
        parts.append(f'<text x="{_LEFT - 8}" y="{floor + LANE / 2 + 7:.1f}" text-anchor="end">none</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {height - _BOTTOM}H{width - _RIGHT}"/>')
    room = (width - _LEFT - _RIGHT) / max(len(x.ticks), 1)
    for share, said in x.ticks:
        at = _LEFT + share * (width - _LEFT - _RIGHT)
        said = said.replace(" × ", "×")
        clipped = said if len(said) * 6.3 <= max(room, 24) else said[: max(2, int(room / 6.3) - 1)] + "…"
        parts.append(f'<text x="{at:.1f}" y="{height - _BOTTOM + 17}" text-anchor="middle">{escape(clipped)}</text>')
    middle = (_LEFT + width - _RIGHT) / 2
    if x_name:
        parts.append(f'<text class="name" x="{middle}" y="{height - 4}" text-anchor="middle">{escape(x_name)}</text>')
    return parts, floor


def history(search: Search) -> str:
    """The Dice of every trial in the order in which they were begun, and the best so far; an empty string without a
    trial."""
    if not search.trials:
        return ""
    trials = sorted(search.trials, key=lambda t: t.number)
    x = straight("trial", trials[0].number - 0.5, trials[-1].number + 0.5, whole=True, wanted=7)
    y = dice_axis([t.dice for t in trials if t.dice is not None and has_dice(t)])
    lane = not all(has_dice(t) for t in trials)
    frame, floor = _frame(x, y, WIDTH, HEIGHT, lane, "trial")
    parts = [opened("Dice by trial, and the best so far", WIDTH, HEIGHT), *frame]

    def place(trial: Trial) -> tuple[float, float]:
        across = _LEFT + (x.share(trial.number) or 0.0) * (WIDTH - _LEFT - _RIGHT)
        share = y.share(trial.dice) if has_dice(trial) else None
        return across, floor + LANE / 2 + 3 if share is None else floor - share * (floor - _TOP)

    path, best = "", math.inf
    for trial in trials:
        across, at = place(trial)
        if has_dice(trial) and at < best:
            path += f"M{across:.1f} {at:.1f}" if not path else f"H{across:.1f}V{at:.1f}"
            best = at
    if path:
        parts.append(f'<path class="sofar" d="{path}H{WIDTH - _RIGHT}"/>')
    parts += [mark(t, search, *place(t)) for t in trials]
    return "".join(parts) + "</svg>"


def curves(search: Search, rungs: Sequence[int] = ()) -> str:
    """Dice over epochs, one line a trial; `rungs` are the epochs at which trials were compared. An empty string when no
    trial has reported."""
    drawn = [t for t in search.trials if any(math.isfinite(d) for _, d in t.curve)]
    if not drawn:
        return ""
    longest = max(e for t in drawn for e, _ in t.curve)
    x, y = (
        straight("epochs done", 0, max(longest, 1), whole=True, wanted=7),
        dice_axis([d for t in drawn for _, d in t.curve]),
    )
    frame, floor = _frame(x, y, WIDTH, HEIGHT, False, "epochs done")
    parts = [opened("Dice by epochs done, one line a trial", WIDTH, HEIGHT), *frame]

    def place(epoch: int, dice: float) -> tuple[float, float]:
        across = _LEFT + (x.share(epoch) or 0.0) * (WIDTH - _LEFT - _RIGHT)
        return across, floor - (y.share(dice) or 0.0) * (floor - _TOP)

    for rung in rungs:
        if rung < longest:
            across, _ = place(rung, 0)
            parts.append(f'<path class="mark" d="M{across:.1f} {_TOP}V{floor}"/>')
    best = search.best
    order = {"stopped": 0, "failed": 1, "infeasible": 1, "running": 2, "done": 3}
    for trial in sorted(drawn, key=lambda t: (t is best, order[t.state], t.number)):
        points = [place(e, d) for e, d in trial.curve if math.isfinite(d)]
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        end = "".join(f'<circle class="end" cx="{a:.1f}" cy="{b:.1f}" r="2.6"/>' for a, b in points[-1:])
        parts.append(
            f'<g {tagged(trial, search, "curve")}><path class="near" d="M{path}"/><path d="M{path}"/>{end}</g>'
        )
    return "".join(parts) + "</svg>"


def against(search: Search, one: Axis) -> str:
    """Dice against one field, a point a trial; an empty string when no trial has Dice."""
    drawn = [t for t in search.trials if has_dice(t) and place_on(one, t) is not None]
    if not drawn:
        return ""
    y = dice_axis([t.dice or 0.0 for t in drawn])
    lost = [t for t in search.trials if not has_dice(t) and place_on(one, t) is not None]
    frame, floor = _frame(one, y, SMALL_WIDTH, SMALL_HEIGHT + 14, bool(lost), "")
    parts = [opened(f"Dice against {one.name}", SMALL_WIDTH, SMALL_HEIGHT), *frame]
    seen: dict[str, int] = {}
    for trial in [*lost, *sorted(drawn, key=lambda t: t.dice or 0.0)]:
        value = trial.params[one.name]
        share = one.share(value) or 0.0
        if one.kind == "names":
            order = seen[key(value)] = seen.get(key(value), 0) + 1
            share += (order * 0.618034 % 1 - 0.5) * 0.5 / len(one.names)  # apart, the same every time
        across = _LEFT + share * (SMALL_WIDTH - _LEFT - _RIGHT)
        found = y.share(trial.dice) if has_dice(trial) else None
        at = floor + LANE / 2 + 3 if found is None else floor - found * (floor - _TOP)
        parts.append(mark(trial, search, across, at, 3.6))
    return "".join(parts) + "</svg>"


# -- importance ----------------------------------------------------------------------------------------------------


def bars(shares: Mapping[str, float], spread: Mapping[str, tuple[float, float]]) -> str:
    """A bar a field, with a line over what its share could have been."""
    if not shares:
        return ""
    left, right, line, top = 158, 58, 34, 6
    height = top + line * len(shares) + 6
    most = max([0.1, *shares.values(), *(high for _, high in spread.values())])

    def across(share: float) -> float:
        return left + share / most * (WIDTH - left - right)

    said = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    parts = [opened(f"Importance: {said}", WIDTH, height)]
    for index, (name, share) in enumerate(shares.items()):
        y = top + line * (index + 0.5)
        shown = name if len(name) <= 22 else "…" + name[-21:]
        low, high = spread.get(name, (share, share))
        told = escape(f"{name}: {share:.0%}, between {low:.0%} and {high:.0%} with a third of the trials left out")
        parts.append(
            f"<g><title>{told}</title>"
            f'<text class="field" x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(shown)}</text>'
            f'<rect class="weight" x="{left}" y="{y - 9:.1f}" width="{max(across(share) - left, 1.5):.1f}" height="18" '
            f'rx="3"/><path class="range" d="M{across(low):.1f} {y:.1f}H{across(high):.1f}M{across(low):.1f} '
            f'{y - 4:.1f}v8M{across(high):.1f} {y - 4:.1f}v8"/>'
            f'<text class="share" x="{across(max(high, share)) + 9:.1f}" y="{y + 4:.1f}">{share:.0%}</text></g>'
        )
    return "".join(parts) + "</svg>"


# -- timeline ------------------------------------------------------------------------------------------------------


def until(search: Search) -> float:
    """The last moment that the trials know of, in Unix seconds."""
    return max((t.ended if t.ended is not None else t.started for t in search.trials), default=0.0)


def slots(trials: Sequence[Trial], now: float) -> list[tuple[str, list[Trial]]]:
    """Trials by machine and, where it ran several at once, one row for each: (machine, trials by time)."""
    rows: list[tuple[str, float, list[Trial]]] = []
    for trial in sorted(trials, key=lambda t: (t.started, t.number)):
        end = trial.ended if trial.ended is not None else now
        for index, (node, free, row) in enumerate(rows):
            if node == trial.node and free <= trial.started + 0.5:  # clocks of two reports differ by a little
                rows[index] = (node, end, [*row, trial])
                break
        else:
            rows.append((trial.node, end, [trial]))
    return [(node, row) for node, _, row in sorted(rows, key=lambda r: r[0])]


def timeline(search: Search) -> str:
    """When each trial ran and where; an empty string when none has begun."""
    begun = [t for t in search.trials if t.started > 0]
    if not begun:
        return ""
    start, end = min(t.started for t in begun), max(until(search), min(t.started for t in begun) + 1)
    rows = slots(begun, end)
    left, line, top = 112, 26, 6
    height = top + line * len(rows) + _BOTTOM
    unit, name = next(
        (u, n) for u, n in ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds")) if end - start > 2 * u or u == 1
    )
    x = straight("time", 0.0, (end - start) / unit, wanted=9)

    def across(moment: float) -> float:
        return left + (moment - start) / (end - start) * (ACROSS - left - _RIGHT)

    parts = [opened(f"When each of {len(begun)} trials ran", ACROSS, height)]
    for share, said in x.ticks:
        at = left + share * (ACROSS - left - _RIGHT)
        parts.append(f'<path class="grid" d="M{at:.1f} {top}V{height - _BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - _BOTTOM + 17}" text-anchor="middle">{said}</text>')
    middle = (left + ACROSS - _RIGHT) / 2
    parts.append(
        f'<text class="name" x="{middle}" y="{height - 4}" text-anchor="middle">{name} since the first trial</text>'
    )
    told = ""
    for index, (node, row) in enumerate(rows):
        y = top + line * index
        if node != told or not index:
            shown = node if len(node) <= 15 else node[:14] + "…"
            parts.append(
                f'<text class="field" x="{left - 12}" y="{y + 17}" text-anchor="end">{escape(shown or "machine")}'
                f"<title>{escape(node)}</title></text>"
            )
            told = node
        for trial in row:
            a, b = across(trial.started), across(trial.ended if trial.ended is not None else end)
            wide = max(b - a - 1, 2)
            label = (
                f'<text x="{a + wide / 2:.1f}" y="{y + 17}" text-anchor="middle">{trial.number}</text>'
                if wide > 7 * len(str(trial.number)) + 4
                else ""
            )
            parts.append(
                f'<g {tagged(trial, search, "span")}><rect x="{a:.1f}" y="{y + 2}" width="{wide:.1f}" '
                f'height="{line - 4}" rx="4"/>{label}</g>'
            )
    return "".join(parts) + "</svg>"


def told(trial: Trial, now: float) -> str:
    """A trial in one line, for who points at it."""
    dice = f"Dice {trial.dice:.4f}" if trial.dice is not None and has_dice(trial) else "no Dice"
    took = (trial.ended if trial.ended is not None else now) - trial.started if trial.started > 0 else 0.0
    epochs = f"{trial.epochs} epoch{'' if trial.epochs == 1 else 's'}"
    head = f"Trial {trial.number}, {trial.state}: {dice}\n{epochs} in {duration(max(took, 0.0))}"
    fields = "\n".join(f"{name} = {text(value)}" for name, value in trial.params.items())
    return "\n".join(part for part in (head, fields, trial.why) if part)
