"""The report page: a run's findings as one HTML text that needs no other file. Pure: the same findings, the same
page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import yaml

from voxlane.train import charts
from voxlane.train.findings import Findings, as_float
from voxlane.train.page_accuracy import accuracy, every_case
from voxlane.train.page_pieces import (
    byte_size,
    colour_variables,
    css_colour,
    duration,
    fact_list,
    missing,
    moment,
    money,
    number,
    plural,
    rounded,
    swatch,
    times,
)
from voxlane.train.page_style import SCRIPT, STYLE

_SHARES = {
    "bucket": ("#3778bf", "waiting for bytes from the bucket"),
    "decode": ("#7a5fc0", "unpacking chunks into patches"),
    "augment": ("#b0559b", "augmentation"),
    "step": ("#1a7a63", "forward, backward and optimizer"),
    "validate": ("#96660c", "sliding-window validation"),
    "other": ("#66727e", "everything else: start, logging, checkpoints"),
}
"""Colour and meaning of each part of a run's time."""


def page(found: Findings) -> str:
    """The whole page."""
    name = str((found.run.get("data") or {}).get("name") or (found.run.get("description") or {}).get("name") or "run")
    sections = {
        "accuracy": ("Accuracy", accuracy(found)),
        "cases": ("Every case", every_case(found)),
        **_course(found),
        "setup": ("What was trained on what", _setup(found)),
        "again": ("How to run it again", _again(found)),
    }
    links = "".join(f'<a href="#{key}">{title}</a>' for key, (title, _) in sections.items())
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>{content}</section>'
        for key, (title, content) in sections.items()
    )
    damaged = "".join(missing(f"<code>{escape(file)}</code> is damaged and was left out.") for file in found.broken)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: training report</title><style>{STYLE}{colour_variables(found)}</style></head><body>"
        f'<header><div><p class="brand">voxlane training report</p><h1>{escape(name)}</h1>{_lead(found)}'
        f'<nav aria-label="Sections">{links}</nav>{_tiles(found)}</div></header>'
        f"<main>{damaged}{body}</main>"
        f"<footer>{escape(found.uri)}</footer><script>{SCRIPT}</script></body></html>\n"
    )


# -- the top -----------------------------------------------------------------------------------------------------


def _lead(found: Findings) -> str:
    """One sentence: what was trained on what, and when."""
    run = found.run
    cases = run.get("cases") or {}
    held_out = len(cases.get("validation") or [])
    kind = ((run.get("plan") or {}).get("network") or {}).get("kind", "unet")
    network = "The U-Net3D of MLPerf" if kind == "mlperf" else "A 3D U-Net"
    parameters = as_float(run.get("parameters"))
    size = f" of {rounded(parameters)} parameters" if math.isfinite(parameters) else ""
    when = moment(str(run.get("created") or ""))
    trained = len(cases.get("train") or [])
    on = f"trained on <b>{plural(trained, 'case')}</b>" if trained else "trained once a fold"
    return (
        f'<p class="lead">{network}{size}, {on}'
        + (f" with <b>{held_out}</b> held out" + ("" if trained else " in turn") if held_out else "")
        + (f" (fold {run['fold']})" if isinstance(run.get("fold"), int) else "")
        + (f', begun <span class="whole">{escape(when)}</span>' if when else "")
        + ".</p>"
    )


def _tiles(found: Findings) -> str:
    """The figures to see first."""
    tiles: list[tuple[str, str, str]] = []
    if found.evaluations:
        first = found.evaluations[0]
        cases = f"{plural(len(first.cases), 'case')}, {escape(first.name)}"
        tiles.append(("Mean Dice", number(first.summary.get("mean_dice"), 3), cases))
        for target in first.targets:
            figures = (first.summary["targets"].get(target) or {}).get("dice") or {}
            tiles.append((f"{swatch(found, target)}{escape(target)}", number(figures.get("mean"), 3), "Dice"))
    elif best := found.best:
        tiles.append(("Best mean Dice", number(best[1], 3), f"during training, epoch {best[0]}"))
    if found.history:
        steps = number(found.history[-1].get("step"), 0)
        tiles.append(("Epochs", f"{len(found.history)}", f"{steps} steps"))
    seconds = as_float(found.stall.get("seconds"))
    if math.isfinite(seconds):
        tiles.append(("Time", duration(seconds), f"{_rate(found)} patches/s"))
        waited = _share(found, "bucket") + _share(found, "decode")
        tiles.append(("Waiting for data", f"{waited:.1%}", "of the run's time"))
    if "bytes_read" in found.stall:
        bytes_read, requests = found.stall["bytes_read"], found.stall.get("requests")
        tiles.append(("Bytes read", byte_size(as_float(bytes_read)), f"{number(requests, 0)} requests"))
    items = "".join(
        f'<div class="tile"><dt>{title}</dt><dd>{value}<small>{note}</small></dd></div>' for title, value, note in tiles
    )
    return f'<dl class="tiles">{items}</dl>' if tiles else ""


# -- curves and time ---------------------------------------------------------------------------------------------


def _course(found: Findings) -> dict[str, tuple[str, str]]:
    """How training went; of several folds, where each tells it."""
    folds = found.run.get("fold_runs")
    if not folds:
        return {"curves": ("Training curves", _curves(found)), "time": ("Where the time went", _time(found))}
    links = "".join(f'<li><a href="{escape(name)}/report.html">{escape(name)}</a></li>' for name in folds)
    return {"folds": ("Each fold", f"<p>Curves and times are on each fold's own page.</p><ul>{links}</ul>")}


def _curves(found: Findings) -> str:
    if not found.history:
        return missing("No epoch has been finished yet.")
    rows = found.history

    def series(name: str, key: str, colour: str) -> charts.Series:
        return charts.Series(name, colour, tuple((as_float(r.get("epoch")), as_float(r.get(key))) for r in rows))

    targets = list(dict.fromkeys(t for r in rows for t in (r.get("dice") or {})))
    dice = [
        charts.Series(
            t,
            css_colour(found, t),
            tuple((as_float(r.get("epoch")), as_float((r.get("dice") or {}).get(t))) for r in rows),
            faint=len(targets) > 1,
        )
        for t in targets
    ]
    if len(targets) != 1:
        dice.append(series("mean", "mean_dice", "var(--ink)"))
    best = found.best
    mark = f'<li><span class="swatch dash"></span>best mean, {best[1]:.3f} at epoch {best[0]}</li>' if best else ""
    accent = "var(--accent)"
    figures = [
        _figure("Training loss", [series("loss", "loss", accent)]),
        _figure("Validation Dice during training", dice, mark, y_range=(0, 1), mark=best[0] if best else -1),
        _figure("Learning rate", [series("learning rate", "lr", accent)], from_zero=True),
        _figure("Speed", [series("patches a second", "patches_per_s", accent)], from_zero=True),
    ]
    return f'<div class="pair gap">{"".join(figures)}</div>'


def _figure(title: str, series: Sequence[charts.Series], more: str = "", **options: Any) -> str:
    """A line chart with its heading and legend; `more` are further lines of the legend."""
    chart = charts.lines(series, label=f"{title} by epoch", **options)
    if not chart:
        return f"<figure><h3>{title}</h3>{missing('Nothing was recorded.')}</figure>"
    key = "".join(
        f'<li><span class="swatch" style="background:{s.colour}"></span>{escape(s.name)}</li>' for s in series
    )
    return f'<figure><h3>{title}</h3><ul class="legend">{key}{more}</ul>{chart}</figure>'


def _time(found: Findings) -> str:
    stall = found.stall
    shares = {k: as_float(v) for k, v in (stall.get("shares") or {}).items()}
    shares = {k: v for k, v in shares.items() if math.isfinite(v) and v > 0}
    total = sum(shares.values())
    if not total:
        return missing("The run wrote no time report; it writes one when it ends.")
    said = str(stall.get("sentence") or "")
    order = [*(k for k in _SHARES if k in shares), *(k for k in shares if k not in _SHARES)]
    bar, rows = [], []
    for name in order:
        colour, meaning = _SHARES.get(name, _SHARES["other"])
        part = shares[name] / total
        text = f"{name} {part:.0%}" if part > 0.11 else ""
        hint = escape(f"{name}: {duration(shares[name])}, {part:.1%}", quote=True)
        bar.append(f'<div style="flex:{part:.4f} 1 0;--c:{colour}" title="{hint}">{escape(text)}</div>')
        strong = ' <span class="tag">bottleneck</span>' if name == stall.get("bottleneck") else ""
        rows.append(
            f'<tr><th scope="row"><span class="swatch" style="background:{colour}"></span>{escape(name)}{strong}</th>'
            f"<td>{duration(shares[name])}</td><td>{part:.1%}</td>"
            f'<td class="soft words">{meaning if name in _SHARES else ""}</td></tr>'
        )
    spoken = escape("Time by part: " + ", ".join(f"{k} {shares[k] / total:.0%}" for k in order), quote=True)
    memory = [m for row in found.history if math.isfinite(m := as_float(row.get("memory_bytes")))]
    patches, bytes_read = as_float(stall.get("patches")), as_float(stall.get("bytes_read"))
    facts = [
        ("Read", f"{byte_size(bytes_read)} in {number(stall.get('requests'), 0)} requests"),
        ("Patches", f"{number(patches, 0)}" + (f", {byte_size(bytes_read / patches)} each" if patches > 0 else "")),
        ("Steps", number(stall.get("steps"), 0)),
        ("Cost of requests", money(as_float(stall.get("cost_usd")))),
        ("Peak memory", byte_size(max(memory, default=math.nan))),
    ]
    sentence = f'<p class="said"><b>{escape(said)}</b></p>' if said else ""
    return (
        f'{sentence}<div class="stack" role="img" aria-label="{spoken}">{"".join(bar)}</div><div class="pair uneven">'
        '<div class="scroll"><table><thead><tr><th scope="col">Part</th><th scope="col">Time</th>'
        '<th scope="col">Share</th><th scope="col" class="words">What it is</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{fact_list(facts)}</div>"
    )


def _share(found: Findings, name: str) -> float:
    """A part of the run's time, 0 to 1."""
    shares = {k: as_float(v) for k, v in (found.stall.get("shares") or {}).items()}
    total = sum(v for v in shares.values() if math.isfinite(v))
    part = shares.get(name, 0.0)
    return part / total if total and math.isfinite(part) else 0.0


def _rate(found: Findings) -> str:
    patches, seconds = as_float(found.stall.get("patches")), as_float(found.stall.get("seconds"))
    return f"{patches / seconds:.3g}" if seconds > 0 and math.isfinite(patches) else "–"


# -- set-up ------------------------------------------------------------------------------------------------------


def _setup(found: Findings) -> str:
    run = found.run
    data, plan, described, config = (run.get(k) or {} for k in ("data", "plan", "description", "config"))
    network = run.get("network") or plan.get("network") or {}  # the one that was trained may differ from the plan's
    patch, batch = config.get("patch") or plan.get("patch"), config.get("batch") or plan.get("batch")
    labels = ", ".join(f"{n} = {v}" for n, v in (described.get("labels") or {}).items())
    regions = "; ".join(f"{n} = {'+'.join(map(str, v))}" for n, v in (described.get("regions") or {}).items())
    facts = [
        ("Prepared data", f"<code>{escape(str(data.get('uri', '')))}</code>"),
        ("Fingerprint", f"<code>{escape(str(data.get('fingerprint', '')))}</code>"),
        ("Channels", escape(", ".join(map(str, described.get("channels") or ())))),
        ("Labels", escape(labels)),
        ("Regions", escape(regions)),
        ("Plan", escape(str(plan.get("recipe", "")))),
        ("Spacing", f"{times(plan.get('spacing'), 3)} mm (z, y, x)" if plan.get("spacing") else ""),
        ("Patch", f"{times(patch)} voxels (z, y, x), {batch} in a step" if patch else ""),
        ("Intensities", "<br>".join(_normalisation(n) for n in plan.get("normalisation") or ())),
        ("Network", escape(str(network.get("kind", "")))),
        ("Parameters", number(run.get("parameters"), 0)),
    ]
    levels = "".join(
        f"<tr><td>{i}</td><td>{features}</td><td>{times(stride)}</td><td>{times(kernel)}</td></tr>"
        for i, (features, stride, kernel) in enumerate(
            zip(network.get("features") or (), network.get("strides") or (), network.get("kernels") or (), strict=False)
        )
    )
    table = (
        '<div class="scroll"><table><caption>Resolutions of the network, finest first</caption><thead><tr>'
        '<th scope="col">Level</th><th scope="col">Features</th><th scope="col">Stride</th><th scope="col">Kernel</th>'
        f"</tr></thead><tbody>{levels}</tbody></table></div>"
        if levels and network.get("kind") != "mlperf"
        else ""
    )
    lists = "".join(
        f"<details><summary>{plural(len(ids), 'case')} {said}</summary>"
        f"<p><code>{escape(', '.join(map(str, ids)))}</code></p></details>"
        for said, key in (("trained on", "train"), ("held out", "validation"))
        if (ids := (run.get("cases") or {}).get(key))
    )
    return f'<div class="pair gap">{fact_list(facts)}<div>{table}{lists}</div></div>'


class _Flat(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """YAML with every list on one line, as sizes are written."""

    def represent_list(self, data: Any) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Flat.add_representer(list, _Flat.represent_list)


def _again(found: Findings) -> str:
    run = found.run
    command = run.get("command") or []
    text = shlex.join(map(str, command)) if isinstance(command, list) else str(command)
    config = yaml.dump(run.get("config") or {}, Dumper=_Flat, sort_keys=False, allow_unicode=True)
    known = run.get("environment") or {}
    environment = [(escape(str(k).replace("_", " ")), escape(str(v))) for k, v in known.items()]
    return (
        "<h3 class='gap'>Command</h3>"
        + (f'<pre class="command"><code>{escape(text)}</code></pre>' if text else missing("run.json names no command."))
        + '<div class="pair"><div><h3>Config</h3>'
        + (f"<pre><code>{escape(config)}</code></pre>" if run.get("config") else missing("run.json holds no config."))
        + f"</div><div><h3>Environment</h3>{fact_list(environment) or missing('None was recorded.')}</div></div>"
    )


def _normalisation(channel: Mapping[str, Any]) -> str:
    scheme = str(channel.get("scheme", ""))
    if scheme != "ct":
        return "each case by its own mean and deviation" if scheme == "zscore" else escape(scheme)
    lower, upper, mean, std = (number(channel.get(k), 1) for k in ("lower", "upper", "mean", "std"))
    return f"CT: clipped to {lower} … {upper} HU, minus {mean}, over {std}"
