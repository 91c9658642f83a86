"""The table of trials: every value that the charts draw, to be read and sorted. The page's script takes the words for
what is pointed at from its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from voxlane.train.page_pieces import NONE, duration, missing
from voxlane.tune.axes import number, text
from voxlane.tune.charts import has_dice, sign, told, until
from voxlane.tune.trials import Search, Trial


def table(search: Search) -> str:
    """One row a trial, the best first."""
    if not search.trials:
        return missing("No trial has begun yet.")
    now, best = until(search), search.best
    names = list(search.space)
    heads = ["Trial", "State", "Dice", "Epochs", "Time", *names, "Machine", "Why"]
    words = {1, len(heads) - 2, len(heads) - 1}
    head = "".join(
        f'<th scope="col" data-column="{i}"{" class=words" if i in words else ""}>'
        f'<button type="button">{escape(title)}</button></th>'
        for i, title in enumerate(heads)
    )
    ordered = sorted(search.trials, key=lambda t: (-(t.dice or 0.0) if has_dice(t) else math.inf, t.number))
    body = "".join(_row(t, names, now, best is not None and t.number == best.number) for t in ordered)
    return (
        '<p class="soft">Best first; a heading sorts by its column.</p>'
        f'<div class="scroll tall"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(trial: Trial, names: Sequence[str], now: float, best: bool) -> str:
    dice = trial.dice if trial.dice is not None and has_dice(trial) else None
    took = max(0.0, (trial.ended if trial.ended is not None else now) - trial.started) if trial.started > 0 else 0.0
    bar = (
        f'<td data-sort="{dice:.6f}"><span class="bar" style="--c:var(--accent);--v:{min(max(dice, 0.0), 1.0):.0%}">'
        f"{dice:.4f}</span></td>"
        if dice is not None
        else f'<td data-sort="">{NONE}</td>'
    )
    values = "".join(_value_cell(trial.params.get(name)) for name in names)
    said = escape(told(trial, now), quote=True)
    return (
        f'<tr data-trial="{trial.number}" data-state="{trial.state}" data-told="{said}" tabindex="0"'
        f'{" class=best" if best else ""}><th scope="row" data-sort="{trial.number}">{trial.number}</th>'
        f'<td class="words" data-sort="{trial.state}"><span class="state">{sign(trial.state)}{trial.state}</span></td>'
        f'{bar}<td data-sort="{trial.epochs}">{trial.epochs}</td>'
        f'<td data-sort="{took:.3f}">{duration(took)}</td>{values}'
        f'<td class="words" data-sort="{escape(trial.node, quote=True)}">{escape(trial.node)}</td>'
        f'<td class="words why soft" data-sort="{escape(trial.why, quote=True)}">{escape(trial.why)}</td></tr>'
    )


def _value_cell(value: Any) -> str:
    known = number(value)
    order = f"{known!r}" if known is not None else text(value)
    return f'<td data-sort="{escape(order, quote=True)}">{escape(text(value))}</td>'
