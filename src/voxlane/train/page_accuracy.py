"""The report page's accuracy: figures by target, every case as a dot and as a row, pictures of the worst."""

from __future__ import annotations

import base64
import math
import shlex
from html import escape

from voxlane.train import charts
from voxlane.train.findings import Evaluation, Findings, as_float, mean_dice, score, shown
from voxlane.train.page_pieces import NONE, css_colour, missing, number, swatch

_HEADS = '<div class="heads" aria-hidden="true"><span>ground truth</span><span>scan</span><span>prediction</span></div>'
"""Above a picture's three parts."""
_COLUMNS = (("dice", "Dice", 3), ("surface_dice", "Surface", 3), ("hd95_mm", "HD95 mm", 1))


def accuracy(found: Findings) -> str:
    """Every evaluation: table, dots, pictures."""
    if not found.evaluations:
        return missing(
            "This run has not been evaluated by itself yet. "
            f"<code>voxlane evaluate {escape(shlex.quote(found.uri))}</code> scores its held-out cases; "
            "make the report again after it."
        )
    return '<div class="gap"></div>'.join(_evaluation(found, one) for one in found.evaluations)


def _evaluation(found: Findings, one: Evaluation) -> str:
    rows = []
    for target in one.targets:
        figures = one.summary["targets"].get(target) or {}
        dice, hd95, surface = (figures.get(name) or {} for name in ("dice", "hd95_mm", "surface_dice"))
        spread = f' <span class="soft">± {number(dice.get("std"), 3)}</span>'
        rows.append(
            f'<tr><th scope="row">{swatch(found, target)}{escape(target)}</th>'
            f"<td>{number(dice.get('mean'), 3)}{spread}</td><td>{number(dice.get('median'), 3)}</td>"
            f"<td>{number(surface.get('mean'), 3)}</td><td>{number(hd95.get('mean'), 1)}</td>"
            f"<td>{number(hd95.get('median'), 1)}</td><td>{number(dice.get('count'), 0)}</td></tr>"
        )
    if len(rows) > 1:
        blank = "<td></td>" * 5
        mean = number(one.summary.get("mean_dice"), 3)
        rows.append(f'<tr class="total"><th scope="row">mean</th><td>{mean}</td>{blank}</tr>')
    heads = ("Dice, mean", "median", "Surface Dice", "HD95, mean (mm)", "median (mm)", "Cases scored")
    table = (
        '<div class="scroll"><table><thead><tr><th scope="col">Target</th>'
        + "".join(f'<th scope="col">{h}</th>' for h in heads)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    dots = charts.dots(
        [(t, css_colour(found, t), [(str(c["case"]), score(c, t, "dice")) for c in one.cases]) for t in one.targets],
        label=f"Dice of every case by target, {one.name}",
        x_name="Dice; one dot a case, the line is the mean",
    )
    rule = str(one.summary.get("rule") or "")
    notes = " ".join(filter(None, (rule, _weights(found, one))))
    said = f'<p class="soft gap">{escape(notes)}</p>' if notes else ""
    title = escape(_title(one))
    chart = f'<figure class="scroll across">{dots}</figure>' if dots else missing("No per-case figures were written.")
    return f"<h3>{title}</h3>{table}{said}<div class='gap'>{chart}</div>{_looks(found, one)}"


def _title(one: Evaluation) -> str:
    if one.name == "validation":
        return "Held-out validation cases"
    folds = sorted({str(case["fold"]) for case in one.cases if case.get("fold") is not None})
    if one.name != "cross-validation" or not folds:
        return one.name
    return f"Cross-validation, fold{'s' if len(folds) > 1 else ''} {', '.join(folds)}"


def _weights(found: Findings, one: Evaluation) -> str:
    """Which weights were scored, and whether the scores flatter them; empty where it is not known."""
    which = ((one.summary.get("config") or {}).get("predict") or {}).get("checkpoint")
    if which == "best" and found.best is not None:
        return (
            "The weights are the best of the run, chosen by Dice on held-out cases, so the scores flatter them a "
            "little; predict.checkpoint=last scores those of its end."
        )
    return "The weights are those of the run's end." if which in ("best", "last") else ""


def _looks(found: Findings, one: Evaluation) -> str:
    """Pictures of the worst cases."""
    chosen = shown(one)
    if not chosen:
        return ""
    if not one.overlays:
        return '<h3 class="gap">The worst cases</h3>' + missing("No pictures were written with this evaluation.")
    figures = []
    for case, why in chosen:
        name = str(case["case"])
        scores = "".join(
            f"<span>{swatch(found, t)} {escape(t)} {number(score(case, t, 'dice'), 3)}</span>" for t in one.targets
        )
        image = one.overlays.get(name)
        picture = (
            f'<img alt="Ground truth, scan and prediction of {escape(name, quote=True)}" loading="lazy" '
            f'src="data:image/png;base64,{base64.b64encode(image).decode()}">'
            if image
            else missing("No picture of this case was written.")
        )
        tag = f' <span class="tag">{escape(why)}</span>' if why else ""
        caption = f"<figcaption><b>{escape(name)}</b>{tag}{scores}</figcaption>"
        figures.append(f"<figure>{_HEADS if image else ''}{picture}{caption}</figure>")
    key = "".join(f"<li>{swatch(found, t, True)}{escape(t)}</li>" for t in one.targets)
    line = '<li><span class="swatch line"></span>outline of the truth, on the prediction</li>'
    return (
        '<h3 class="gap">The worst cases</h3><p class="soft">By mean Dice, worst first; the slice where each target '
        f'shows most. The patient\'s right is on the left.</p><ul class="legend">{key}{line}</ul>'
        f'<div class="cases">{"".join(figures)}</div>'
    )


def every_case(found: Findings) -> str:
    """Every case of every evaluation in a table that sorts."""
    tables = [_case_table(found, one) for one in found.evaluations if one.cases]
    return "".join(tables) or missing("There are no per-case figures before an evaluation.")


def _case_table(found: Findings, one: Evaluation) -> str:
    groups, heads, column = [], [], 2
    for target in one.targets:
        span = len(_COLUMNS) + 2
        groups.append(
            f'<th scope="colgroup" colspan="{span}" class="group starts">{swatch(found, target)}{escape(target)}</th>'
        )
        for index, title in enumerate([*(title for _, title, _ in _COLUMNS), "True ml", "Found ml"]):
            heads.append(_sort_head(title, column, "starts" if index == 0 else ""))
            column += 1
    rows = []
    for case in sorted(one.cases, key=lambda c: (math.isnan(m := mean_dice(c, one.targets)), m)):
        cells = [
            f'<th scope="row" data-sort="{escape(str(case["case"]), quote=True)}">{escape(str(case["case"]))}</th>'
        ]
        cells.append(_cell(as_float(case.get("fold")), 0))
        for target in one.targets:
            colour = css_colour(found, target)
            cells += [_cell(score(case, target, k), d, colour if k == "dice" else "") for k, _, d in _COLUMNS]
            cells += [_cell(score(case, target, k), 1) for k in ("volume_true_ml", "volume_predicted_ml")]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    title = escape(_title(one))
    return (
        f'<div class="scroll tall"><table class="sortable"><caption>{title}: {len(rows)} in all, worst first. '
        "Press a heading to sort; – was not scored.</caption>"
        f"<thead><tr><td></td><td></td>{''.join(groups)}</tr><tr>{_sort_head('Case', 0)}{_sort_head('Fold', 1)}"
        f"{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _sort_head(title: str, column: int, css: str = "") -> str:
    return f'<th scope="col" class="{css}" data-column="{column}"><button type="button">{escape(title)}</button></th>'


def _cell(value: float, digits: int, bar_colour: str = "") -> str:
    if not math.isfinite(value):
        return f'<td data-sort=""{" class=starts" if bar_colour else ""}>{NONE}</td>'
    text = f"{value:.{digits}f}"
    if not bar_colour:
        return f'<td data-sort="{value:.6g}">{text}</td>'
    style = f"--c:{bar_colour};--v:{min(max(value, 0), 1):.1%}"
    return f'<td class="starts" data-sort="{value:.6g}"><span class="bar" style="{style}">{text}</span></td>'
