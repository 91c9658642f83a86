"""The page of `voxlane compare`, and its data as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from markupsafe import Markup

from voxlane import uri as uris
from voxlane.model.metrics import EMPTY_TARGET_RULE
from voxlane.model.statistics import RESAMPLES
from voxlane.pages import charts
from voxlane.pages.formatting import format_number
from voxlane.pages.render import Tile, explain_wrong_content, render
from voxlane.store import StoreConfig
from voxlane.store.bucket import ignore_missing_object
from voxlane.train import pictures
from voxlane.train.comparison import MEAN, Comparison, ScoreSet, format_p
from voxlane.train.run import Run

JSON_NAME, PAGE_NAME = "compare.json", "compare.html"
PICTURED_CASES = 6
"""Number of cases that are shown with the pictures of both."""
Pictures = Sequence[tuple[str, bytes | None, bytes | None]]
"""Case, picture of A and picture of B as PNG."""


def write_comparison(comparison: Comparison, out: str, config: StoreConfig | None = None) -> str:
    """Write the comparison and its page below `out`, and return the URI of the page."""
    folder = Run(out, config)
    with explain_wrong_content(comparison.first.folder.folder_uri):
        page = render_comparison_page(comparison, read_pictures(comparison))
    folder.write_bytes(JSON_NAME, json.dumps(comparison.to_plain(), indent=1, allow_nan=False).encode())
    folder.write_bytes(PAGE_NAME, page.encode())
    return folder.file_uri(PAGE_NAME)


def read_pictures(comparison: Comparison) -> Pictures:
    """Return the pictures of the cases that differ most, as far as the evaluations wrote them."""
    chosen = comparison.ranked_cases[:PICTURED_CASES]
    rows = [(case, _read_picture(comparison.first, case), _read_picture(comparison.second, case)) for case in chosen]
    return [row for row in rows if row[1] or row[2]]


def _read_picture(scores: ScoreSet, case: str) -> bytes | None:
    folder = scores.folder
    with ignore_missing_object():
        return bytes(folder.store.get(folder.key(f"overlays/{uris.quote(case)}.png")))
    return None


def render_comparison_page(comparison: Comparison, shown: Pictures) -> str:
    """Return the page of a comparison. Pure: the same scores and pictures give the same page."""
    mean = comparison.table[MEAN]["dice"]
    interval = mean["difference_ci95"]
    low_to_high = "95% CI not defined" if interval is None else f"95% CI {interval[0]:+.3f} to {interval[1]:+.3f}"
    difference = "–" if mean["difference"] is None else f"{mean['difference']:+.3f}"
    colours = {target: pictures.colour(number + 1) for number, target in enumerate(comparison.targets)}
    return render(
        "compare.html.j2",
        title=f"{comparison.first.title} and {comparison.second.title}",
        tiles=[
            Tile("Cases in common", f"{len(comparison.cases):,}", "scored in both"),
            Tile("Mean Dice of A", format_number(mean["first_mean"], 3), comparison.first.title),
            Tile("Mean Dice of B", format_number(mean["second_mean"], 3), comparison.second.title),
            Tile("B minus A", difference, low_to_high),
            Tile("p", format_p(mean["p"]), "Wilcoxon signed-rank, of mean Dice"),
        ],
        footer=f"{comparison.first.folder.folder_uri} and {comparison.second.folder.folder_uri}",
        comparison=comparison,
        colours=colours,
        chart=_draw_differences(comparison, colours),
        format_p=format_p,
        isfinite=math.isfinite,
        pictures=shown,
        rule=EMPTY_TARGET_RULE,
        resamples=RESAMPLES,
    )


def _draw_differences(comparison: Comparison, colours: dict[str, str]) -> Markup:
    rows = []
    for target in comparison.targets:
        pairs = {case: comparison.values(case, target, "dice") for case in comparison.cases}
        differences = [(case, b - a) for case, (a, b) in pairs.items() if math.isfinite(b - a)]
        rows.append((target, colours[target], differences, comparison.table[target]["dice"]["difference_ci95"]))
    return charts.difference_chart(
        rows,
        label="Difference of Dice of every case by target, B minus A",
        x_name="Dice, B minus A; one dot per case, the line is the mean, the band its 95% confidence interval",
    )
