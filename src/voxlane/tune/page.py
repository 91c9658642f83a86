"""The page of a search: one HTML text that needs no other file, in the dress of the training report. Pure: the same
search, the same page."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from html import escape
from typing import Any

import yaml

from voxlane.train.page_pieces import NONE, duration, fact_list, missing, moment, number, plural
from voxlane.train.page_style import SCRIPT as REPORT_SCRIPT
from voxlane.train.page_style import STYLE as REPORT_STYLE
from voxlane.tune import charts
from voxlane.tune.axes import number as numeric
from voxlane.tune.axes import text
from voxlane.tune.charts import has_dice, sign, stroke
from voxlane.tune.importance import BEST_SHARE, MIN_TRIALS, importance, scored, spread
from voxlane.tune.page_style import SCRIPT, STYLE
from voxlane.tune.page_table import table
from voxlane.tune.parallel import parallel
from voxlane.tune.trials import Search, State, Trial

_CLOSE = 0.005
"""Two trials this near in Dice are not told apart by one validation of a few dozen cases."""
_STATES: tuple[State, ...] = ("done", "running", "stopped", "infeasible", "failed")
"""In the order in which they are shown."""
_MEANING = {
    "done": "trained to its last epoch",
    "stopped": "stopped early: others did better at the same epoch",
    "infeasible": "a device or machine has too little memory for it",
    "failed": "it raised an error",
    "running": "not at its end when this page was written",
}

_NOT_DONE = {
    "stopped": " It was stopped early, because others did better at the same epoch.",
    "running": " It is still running.",
    "failed": " It failed after that; its last checkpoint is kept.",
}
"""Of a best trial that is not done."""


def page(search: Search) -> str:
    """The whole page."""
    sections = {
        "best": ("The best trial", _best(search)),
        "fields": ("What was tried", _tried(search)),
        "course": ("How the search went", _course(search)),
        "importance": ("Which fields matter", _importance(search)),
        "timeline": ("Where the time went", _timeline(search)),
        "trials": ("Every trial", table(search)),
        "again": ("How to run it again", _again(search)),
    }
    links = "".join(f'<a href="#{key}">{title}</a>' for key, (title, _) in sections.items())
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>{content}</section>'
        for key, (title, content) in sections.items()
    )
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(search.name)}: search report</title><style>{REPORT_STYLE}{STYLE}</style></head><body>"
        f'<header><div><p class="brand">voxlane search report</p><h1>{escape(search.name)}</h1>{_lead(search)}'
        f'<nav aria-label="Sections">{links}</nav>{_tiles(search)}</div></header><main>{body}</main>'
        f'<footer>{escape(_home(search))}</footer><div class="tip" hidden></div>'
        f"<script>{REPORT_SCRIPT}{SCRIPT}</script></body></html>\n"
    )


# -- the top -------------------------------------------------------------------------------------------------------


def _lead(search: Search) -> str:
    """One sentence: what was searched on what, how, and when."""
    config = search.config
    how = {
        "optuna": "proposed by Optuna",
        "random": "drawn at random",
        "grid": "over the whole grid",
    }.get(str(config.get("search") or ("grid" if any("grid" in s for s in search.space.values()) else "optuna")), "")
    folds = config.get("folds")
    over = f", each over <b>{plural(len(folds), 'fold')}</b>" if isinstance(folds, list) and len(folds) > 1 else ""
    stop = ", bad ones stopped early" if config.get("scheduler") == "asha" else ""
    when = moment(search.created)
    return (
        f'<p class="lead"><b>{plural(len(search.trials), "trial")}</b> of <b>{plural(len(search.space), "field")}</b>'
        f"{', ' + how if how else ''}{over}{stop}, on <b>{escape(_short(search.data))}</b>"
        + (f', begun <span class="whole">{escape(when)}</span>' if when else "")
        + ".</p>"
    )


def _tiles(search: Search) -> str:
    """The figures to see first."""
    best = search.best
    found = number(best.dice, 3) if best is not None and has_dice(best) else NONE
    tiles = [("Best mean Dice", found, f"trial {best.number}" if best is not None else "no trial has reported")]
    counts = Counter(t.state for t in search.trials)
    said = ", ".join(f"{counts[s]} {s}" for s in _STATES if counts[s] and s != "done")
    tiles.append(("Trials done", f"{counts['done']}", said or f"of {len(search.trials)}"))
    spent, full = _epochs(search)
    if spent:
        tiles.append(
            ("Epochs trained", number(spent, 0), f"of {number(full, 0)} without stopping" if full else "in all")
        )
    if search.makespan_s > 0:
        tiles.append(("Time", duration(search.makespan_s), "from first start to last end"))
    if search.efficiency is not None:
        tiles.append(("Efficiency", f"{search.efficiency:.0%}", f"of the time of {search.devices:g} slots used"))
    items = "".join(
        f'<div class="tile"><dt>{title}</dt><dd>{value}<small>{note}</small></dd></div>' for title, value, note in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _epochs(search: Search) -> tuple[int, int]:
    """Epochs that were trained, and those that all trials would have taken had none been stopped; 0: none was, or it
    cannot be known because none is done."""
    whole = max((t.epochs for t in search.trials if t.state == "done"), default=0)
    stopped = [t for t in search.trials if t.state == "stopped"]
    spent = sum(t.epochs for t in search.trials)
    return spent, spent + sum(max(whole - t.epochs, 0) for t in stopped) if whole and stopped else 0


def _short(uri: str) -> str:
    """A local URI as the path that it is."""
    return uri.removeprefix("file://")


def _home(search: Search) -> str:
    """The search's folder, as its trials know it."""
    return next((t.run.rpartition("/trials/")[0] for t in search.trials if "/trials/" in t.run), "")


# -- sections ------------------------------------------------------------------------------------------------------


def _best(search: Search) -> str:
    best = search.best
    if best is None or best.dice is None:
        counts = Counter(t.state for t in search.trials)
        reasons = list(dict.fromkeys(t.why for t in search.trials if t.why))[:3]
        if not search.trials:
            return missing("No trial has begun yet.")
        if counts["infeasible"] == len(search.trials):
            said = "No trial fits into memory: let the space have smaller batches, patches or networks."
        elif counts["running"]:
            said = "No trial has reported a Dice yet."
        else:
            said = "No trial has reported a Dice."
        why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
        return missing(said) + (f"<p>What they said:</p><ul>{why}</ul>" if why else "")
    others = [t for t in search.trials if t is not best and has_dice(t)]
    near = sum(best.dice - (t.dice or 0.0) < _CLOSE for t in others)
    state = _NOT_DONE.get(best.state, "")
    close = (
        f" {plural(near, 'other trial')} {'lies' if near == 1 else 'lie'} within {_CLOSE:g} of it, which one "
        "validation does not tell apart."
        if near
        else ""
    )
    chosen = (
        f" It is the highest of {len(others) + 1} on the very cases that chose it, which flatters: score the model you "
        "keep on cases that the search did not see."
        if others
        else " It is the only trial with a Dice, so nothing was compared."
    )
    fields = [(f"<code>{escape(k)}</code>", f"<b>{escape(text(v))}</b>") for k, v in best.params.items()]
    return (
        f'<p class="said">Trial <b>{best.number}</b> reached a mean Dice of <b>{best.dice:.4f}</b> in '
        f"{plural(best.epochs, 'epoch')}.{state}{close}</p><p>{chosen.strip()}</p>"
        f'<div class="pair"><div class="best-fields"><h3>Its fields</h3>{fact_list(fields)}</div>'
        f"<div><h3>Next</h3>{_next(search, best)}</div></div>"
    )


def _next(search: Search, best: Trial) -> str:
    home, data, kept = (_short(uri) for uri in (_home(search), search.data, best.run))
    local = "://" not in home
    config = f"{home}/best.yaml" if local and home else "best.yaml"
    whole = shlex.join(["voxlane", "train", data, "--run", "RUN", "--folds", "all", "--config", config])
    lines = [
        ("Score it on all of its held-out cases, and segment with it", None),
        (
            "",
            f"voxlane evaluate {shlex.quote(kept)}\nvoxlane predict {shlex.quote(kept)} SCAN.nii.gz -o masks",
        ),
        (
            "Train its config on every fold"
            + ("" if local else f" (best.yaml is in <code>{escape(home)}</code>: copy it here first)"),
            None,
        ),
        ("", whole),
    ]
    out = ""
    for said, command in lines:
        out += (
            f'<p class="soft">{said}</p>'
            if command is None
            else f'<pre class="command"><code>{escape(command)}</code></pre>'
        )
    return out


def _tried(search: Search) -> str:
    chart = parallel(search)
    if not chart:
        return missing("No trial has begun yet." if not search.trials else "The space has no field to search.")
    counts = Counter(t.state for t in search.trials)
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-only="{s}" title="{escape(_MEANING[s])}">{sign(s)}'
        f"{counts[s]} {s}</button>"
        for s in _STATES
        if counts[s]
    )
    lines = [
        (stroke("stroke:var(--best);stroke-width:3") + "best", search.best is not None),
        ('worst <span class="ramp"></span> second best, by rank', sum(map(has_dice, search.trials)) > 2),
        (
            stroke("stroke:var(--c);stroke-width:2;stroke-dasharray:4 3", "infeasible") + "infeasible",
            counts["infeasible"],
        ),
        (stroke("stroke:var(--c);stroke-width:2;stroke-dasharray:1.5 3", "failed") + "failed", counts["failed"]),
    ]
    legend = f'<ul class="legend">{"".join(f"<li>{said}</li>" for said, shown in lines if shown)}</ul>'
    return (
        '<p class="soft">One line is one trial. Point at a line to see it everywhere on this page, click to go to its '
        "row; drag along an axis to keep the trials that pass there, click the axis to let go.</p>"
        f'<div class="sift" role="group" aria-label="Filter trials">{buttons}'
        '<button type="button" class="all" hidden>Show all</button>'
        f'<span class="shown" role="status">all {plural(len(search.trials), "trial")}</span></div>'
        f'{legend}<div class="scroll"><figure>{chart}</figure></div>'
    )


def _course(search: Search) -> str:
    drawn = charts.history(search)
    if not drawn:
        return missing("No trial has begun yet.")
    counts = Counter(t.state for t in search.trials)
    states = "".join(f'<li title="{escape(_MEANING[s])}">{sign(s)}{s}</li>' for s in _STATES if counts[s])
    rungs = _rungs(search)
    lines = charts.curves(search, rungs)
    marks = '<li><span class="swatch dash"></span>trials are compared</li>' if rungs else ""
    best = f"<li>{stroke('stroke:var(--best);stroke-width:3')}best</li>"
    learning = (
        f'<ul class="legend">{best}{_line_keys(counts)}{marks}</ul>{lines}'
        if lines
        else missing("No trial has reported an epoch.")
    )
    sofar = f"<li>{stroke('stroke:var(--best);stroke-width:1.6')}best so far</li>" if search.best else ""
    return (
        f'<div class="pair"><figure><h3>Dice of every trial</h3><ul class="legend">{states}{sofar}</ul>{drawn}</figure>'
        f"<figure><h3>Learning curves</h3>{learning}</figure></div>"
    )


def _line_keys(counts: Counter[State]) -> str:
    wear: dict[State, str] = {"done": "1.8", "stopped": "1.1;opacity:.7", "running": "1.8;stroke-dasharray:5 3"}
    return "".join(f"<li>{stroke(f'stroke:var(--c);stroke-width:{wear[s]}', s)}{s}</li>" for s in wear if counts[s])


def _rungs(search: Search) -> list[int]:
    """Epochs at which ASHA compared trials; what the config leaves open follows from the longest trial that is done."""
    longest = max((t.epochs for t in search.trials if t.state == "done"), default=0)
    grace = numeric(search.config.get("grace_epochs")) or max(1, longest // 9)
    reduction = numeric(search.config.get("reduction")) or 0.0
    if search.config.get("scheduler") != "asha" or grace < 1 or reduction <= 1:
        return []
    return [math.ceil(grace * reduction**k) for k in range(20) if grace * reduction**k < longest]


def _importance(search: Search) -> str:
    shares = importance(search)
    known = len(scored(search))
    if shares:
        part = math.floor(known * BEST_SHARE)
        said = (
            f"<p>How differently the best quarter ({part} of {known} scored trials) lies along each field than all of "
            "them do (PED-ANOVA); the shares add up to 1. The thin line is where a share goes when a random third of "
            "the trials is left out: where these lines overlap, this search does not rank the fields.</p>"
        )
        figure = (
            f'<div class="pair uneven"><figure>{charts.bars(shares, spread(search))}</figure><div>{said}</div></div>'
        )
    elif known < MIN_TRIALS:
        figure = missing(
            f"Not told from {plural(known, 'scored trial')}: with fewer than {MIN_TRIALS} any ranking of the fields "
            "would be chance."
        )
    else:
        figure = missing("The trials do not differ enough to tell.")
    axes = charts.search_axes(search)
    axes.sort(key=lambda a: -shares.get(a.name, 0.0))
    log = ' <span class="soft">(log)</span>'
    each = "".join(
        f"<figure><h3>{escape(a.name)}{log if a.kind == 'log' else ''}</h3>{chart}</figure>"
        for a in axes
        if (chart := charts.against(search, a))
    )
    return figure + (f'<h3 class="gap">Dice against each field</h3><div class="fields">{each}</div>' if each else "")


def _timeline(search: Search) -> str:
    chart = charts.timeline(search)
    if not chart:
        return missing("No trial has begun yet.")
    busy = sum(t.ended - t.started for t in search.trials if t.ended is not None)
    said = ""
    if search.efficiency is not None:
        said = (
            f'<p class="said">Trials ran for <b>{duration(busy)}</b> in all, within '
            f"<b>{duration(search.makespan_s)}</b> on room for "
            f"{search.devices:g} at once: <b>{search.efficiency:.0%}</b> of the ideal.</p>"
        )
    counts = Counter(t.state for t in search.trials if t.started > 0)
    keys = "".join(f'<li><span class="swatch slot {s}"></span>{s}</li>' for s in _STATES if counts[s])
    best = '<li><span class="swatch slot trial best"></span>best</li>' if search.best else ""
    return f'{said}<ul class="legend">{best}{keys}</ul><div class="scroll across"><figure>{chart}</figure></div>'


class _Flat(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """YAML with every list on one line, as ranges are written."""

    def represent_list(self, data: Any) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Flat.add_representer(list, _Flat.represent_list)
_Flat.add_representer(tuple, _Flat.represent_list)


def _again(search: Search) -> str:
    command = shlex.join(map(str, search.command))
    known = {k: v for k, v in search.config.items() if v is not None}
    shown = [
        (title, yaml.dump(part, Dumper=_Flat, sort_keys=False, allow_unicode=True))
        for title, part in (
            ("Space", _nested(search.space)),
            ("Search", {"tune": known}),
        )
    ]
    parts = "".join(f"<div><h3>{title}</h3><pre><code>{escape(said)}</code></pre></div>" for title, said in shown)
    head = (
        f'<h3>Command</h3><pre class="command"><code>{escape(command)}</code></pre>'
        if command
        else missing("The search names no command.")
    )
    return f'{head}<div class="pair">{parts}</div>'


def _nested(dotted: dict[str, Any]) -> dict[str, Any]:
    """Dotted names as the nested fields of a file."""
    made: dict[str, Any] = {}
    for name, value in dotted.items():
        *parents, last = name.split(".")
        at = made
        for parent in parents:
            inner = at.setdefault(parent, {})
            if not isinstance(inner, dict):
                break
            at = inner
        at[last] = value
    return made
