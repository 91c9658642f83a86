"""Test the page of a search: complete, self-contained, correct, and clear about what is missing."""

from __future__ import annotations

import base64
import hashlib
import html as entities
import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.test_report import Outline
from tests.tune import fake_search
from voxlane.pages.formatting import format_value
from voxlane.tune import charts
from voxlane.tune.charts import dice_axis, make_axis
from voxlane.tune.report import render_search_page
from voxlane.tune.trials import Search, Trial


@pytest.fixture(scope="module")
def search() -> Search:
    return fake_search.search()


@pytest.fixture(scope="module")
def html(search: Search) -> str:
    return render_search_page(search)


def test_complete_search(search: Search, html: str) -> None:
    outline = Outline(html)
    best = search.best
    assert best is not None
    assert f"Best mean Dice {best.dice:.3f} trial {best.number}" in outline.text
    assert f"Trial {best.number} reached a mean Dice of {best.dice:.4f} in 27 epochs" in outline.text
    for name, value in best.params.items():
        assert f"{name} {format_value(value)}" in outline.text, "the best trial's fields"
    assert f"voxlane evaluate {best.run}" in outline.text
    assert "--folds all --config best.yaml" in outline.text
    assert "voxlane tune space.yaml gs://demo/prepared/kits --run gs://demo/searches/kidneys" in outline.text
    assert "loguniform: [0.0001, 0.1]" in html
    assert 'class="missing"' not in html
    assert len(outline.ids) == len(set(outline.ids))


def test_page_loads_nothing(html: str) -> None:
    outline = Outline(html)
    assert outline.sources == []
    assert all(link.startswith("#") and link[1:] in outline.ids for link in outline.links)
    for word in ("http://", "https://", "@import", "url("):
        assert word not in html
    assert "default-src 'none'" in html


def test_every_trial_is_in_every_chart(search: Search, html: str) -> None:
    numbers = {t.number for t in search.trials}
    traces, spans = (set(_numbers(html, kind)) for kind in ("trace", "span"))
    assert traces == spans == numbers
    assert set(_numbers(html, "curve")) == {t.number for t in search.trials if t.curve}
    points = _numbers(html, "point")
    assert all(points.count(n) == 1 + len(search.space) for n in numbers), "history, and each field against Dice"
    assert set(map(int, re.findall(r'<tr data-trial="(\d+)"', html))) == numbers


def _numbers(html: str, kind: str) -> list[int]:
    return [int(n) for n in re.findall(rf'<g class="trial \w+ {kind}[^"]*" data-trial="(\d+)"', html)]


def test_best_trial_is_marked_and_comes_first(search: Search, html: str) -> None:
    assert search.best is not None
    rows = [int(n) for n in re.findall(r'<tr data-trial="(\d+)"', html)]
    dice = {t.number: t.dice for t in search.trials}
    scored = [n for n in rows if dice[n] is not None]
    assert scored == rows[: len(scored)] == sorted(scored, key=lambda n: (-(dice[n] or 0), n))
    marked = {int(n) for n in re.findall(r'class="trial \w+ \w+ best" data-trial="(\d+)"', html)}
    assert marked == {search.best.number} == {rows[0]}


def test_states_differ_in_shape(html: str) -> None:
    shapes = dict(re.findall(r'<g class="trial (\w+) point[^>]*><circle class="near"[^>]*/><(\w+)', html))
    assert shapes["done"] == shapes["stopped"] == "circle"
    assert shapes["infeasible"] == shapes["failed"] == "path"
    triangle, cross = (
        re.search(rf'<g class="trial {s} point.*?<path d="([^"]*)"', html) for s in ("infeasible", "failed")
    )
    assert triangle is not None
    assert cross is not None
    assert triangle[1].endswith("z")
    assert not cross[1].endswith("z")


def test_reasons_of_trials_without_dice_are_shown(search: Search, html: str) -> None:
    outline = Outline(html)
    assert "The GPU has too little memory: lower batch, patch or base_features" in outline.text
    assert "it changed after it was prepared" in outline.text
    row = re.search(r'<tr [^>]*data-state="infeasible".*?</tr>', html, re.DOTALL)
    assert row is not None
    assert 'data-sort=""' in row[0], "sorts to the end"


def test_log_axis_has_powers_as_ticks() -> None:
    axis = make_axis("lr", {"loguniform": [1e-4, 1e-1]}, [])
    assert axis.kind == "log"
    assert [label for _, label in axis.ticks] == ["1e-4", "0.001", "0.01", "0.1"]
    assert [position for position, _ in axis.ticks] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert axis.position(1e-3) == pytest.approx(1 / 3)
    assert [label for _, label in make_axis("f", {"logint": [8, 64]}, []).ticks] == ["10", "20", "50"]
    assert [label for _, label in make_axis("w", {"loguniform": [2, 6]}, []).ticks] == ["2", "3", "4", "5", "6"]


def test_names_keep_their_order_and_numbers_are_sorted() -> None:
    assert make_axis("n", {"choice": ["sgd", "adamw"]}, []).ticks == ((0.25, "sgd"), (0.75, "adamw"))
    assert [t for _, t in make_axis("b", {"grid": [8, 2, 4]}, []).ticks] == ["2", "4", "8"]
    assert [t for _, t in make_axis("p", {"choice": [[1, 2, 2], None, True]}, []).ticks] == [
        "1 × 2 × 2",
        "null",
        "true",
    ]
    assert make_axis("d", {"int": [3, 6]}, []).kind == "names", "few integers have a band each"
    assert make_axis("d", {"logint": [2, 8]}, []).kind == "names"
    assert make_axis("d", {"int": [3, 600]}, []).kind == "linear"


@given(
    st.sampled_from(["uniform", "loguniform", "int", "logint", "quniform", "choice", "grid", "nonsense"]),
    st.lists(st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.floats(), st.integers(-9, 9**9)), max_size=5),
    st.lists(st.one_of(st.none(), st.text(max_size=3), st.floats(), st.integers(-5, 5)), max_size=5),
)
def test_any_axis_places_any_value_inside(kind: str, bounds: list[object], values: list[object]) -> None:
    axis = make_axis("x", {kind: bounds}, values)
    assert all(0 <= share <= 1 for share, _ in axis.ticks)
    for value in [*values, *bounds]:
        share = axis.position(value)
        assert share is None or 0 <= share <= 1
        if kind == "choice":
            assert share is not None, "a choice has a place for every value"


def test_dice_axis_of_equal_values() -> None:
    for values in ([], [0.5], [0.0, 0.0], [1.0], [0.86, 0.861]):
        axis = dice_axis(values)
        assert 0 <= axis.low < axis.high <= 1
        assert len(axis.ticks) >= 2


def test_charts_are_well_formed_and_inside_their_box(search: Search) -> None:
    drawn = [charts.parallel_chart(search), charts.history_chart(search), charts.curve_chart(search, [3, 9])]
    drawn += [charts.field_chart(search, axis) for axis in charts.search_axes(search)]
    drawn.append(charts.timeline_chart(search))
    drawn.append(charts.importance_chart({"a.b": 0.7, "c": 0.3}, {"a.b": (0.5, 0.8), "c": (0.1, 0.4)}))
    for svg in drawn:
        root = ElementTree.fromstring(svg)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for circle in root.iter("circle"):
            assert 0 <= float(circle.attrib["cx"]) <= width
            assert 0 <= float(circle.attrib["cy"]) <= height
        for rect in root.iter("rect"):
            assert float(rect.attrib["x"]) >= 0
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width + 1
        for path in root.iter("path"):
            if "M" in path.attrib["d"] and not re.search("[a-z]", path.attrib["d"]):
                assert all(float(n) >= 0 for n in re.findall(r"-?\d+\.?\d*", path.attrib["d"]))


def test_concurrent_trials_have_separate_rows(search: Search) -> None:
    now = search.last_time
    rows = charts.assign_rows(search.trials, now)
    assert len(rows) == 4
    assert [node for node, _ in rows] == ["node-1", "node-1", "node-2", "node-2"]
    for _, row in rows:
        for trial, following in itertools.pairwise(row):
            assert (trial.ended or now) <= following.started + 0.5


def test_local_search_shows_paths(search: Search) -> None:
    trials = [replace(t, run=f"file:///data/my search/trials/{t.id}") for t in search.trials]
    text = Outline(render_search_page(replace(search, data="file:///data/prepared", trials=trials))).text
    assert "voxlane train /data/prepared --run RUN --folds all --config '/data/my search/best.yaml'" in text
    assert "copy it here first" not in text


def test_single_trial(search: Search) -> None:
    text = Outline(render_search_page(replace(search, trials=fake_search.only(search, "done").trials[:1]))).text
    assert "It is the only trial with a Dice, so nothing was compared." in text
    assert "1 scored trial cannot show it: with fewer than 12, any ranking of the fields would be chance." in text


def test_no_trials(search: Search) -> None:
    html = render_search_page(replace(search, trials=[]))
    assert Outline(html).text.count("No trial has started yet.") == 5
    assert "<svg" not in html


def test_no_trial_fits_into_memory(search: Search) -> None:
    infeasible = [
        replace(t, state="infeasible", dice=None, curve=[], epochs=0, reason="too little memory") for t in search.trials
    ]
    html = render_search_page(replace(search, trials=infeasible))
    text = Outline(html).text
    assert "No trial fits into memory: allow smaller batches, patches or networks in the space." in text
    assert "Messages of the trials: too little memory" in text
    assert "30 infeasible" in text
    assert "voxlane evaluate" not in text


def test_all_trials_failed_or_running(search: Search) -> None:
    failed = [replace(t, state="failed", dice=None, curve=[], reason="no such bucket") for t in search.trials[:3]]
    text = Outline(render_search_page(replace(search, trials=failed))).text
    assert "No trial has reported a Dice. Messages of the trials: no such bucket" in text
    running = [replace(t, state="running", dice=None, curve=[], ended=None, reason="") for t in search.trials[:3]]
    text = Outline(render_search_page(replace(search, trials=running))).text
    assert "No trial has reported a Dice yet." in text
    assert "Efficiency" not in text


def test_best_trial_that_was_stopped(search: Search) -> None:
    best = search.best
    assert best is not None
    text = Outline(render_search_page(replace(search, trials=[replace(best, state="stopped")]))).text
    assert "in 27 epochs. It was stopped early" in text


def test_grid_without_early_stopping(search: Search) -> None:
    config = {**search.config, "search": "grid", "scheduler": "none", "folds": [0]}
    text = Outline(render_search_page(replace(fake_search.only(search, "done"), config=config))).text
    assert "over the whole grid" in text
    assert "stopped early" not in text
    assert "trials are compared" not in text
    assert "without stopping" not in text


def test_hostile_strings_stay_text(search: Search) -> None:
    bad = "</script><script>alert(1)</script><img src=x onerror=\"alert('2')\">'&"
    trials = [
        replace(t, params={f"a.{bad}": bad, "b": t.number}, reason=bad, node=bad, id=bad, run=f"gs://x/{bad}/trials/1")
        for t in search.trials
    ]
    space = {f"a.{bad}": {"choice": [bad]}, "b": {"uniform": [0, 40]}}
    html = render_search_page(
        replace(search, name=bad, data=bad, space=space, command=[bad], created=bad, trials=trials)
    )
    outline = Outline(html)
    assert outline.sources == []
    assert "<img" not in html
    assert html.count("<script>") == html.count("</script>") == 1
    assert bad in outline.text


def test_tooltips_have_every_field(search: Search, html: str) -> None:
    tips = [entities.unescape(t) for t in re.findall(r'data-tip="([^"]*)"', html)]
    assert len(tips) == len(search.trials)
    assert all(f"{name} = " in tip for name in search.space for tip in tips)


def test_trial_without_some_field_is_drawn(search: Search) -> None:
    params = {"optimizer.lr": 0.01, "norm": "unknown"}
    odd = Trial(id="x", number=99, params=params, state="done", dice=0.5, epochs=1, curve=[(1, 0.5)])
    html = render_search_page(replace(search, trials=[*search.trials, odd]))
    Outline(html)
    assert 99 in _numbers(html, "trace")
    assert _numbers(html, "point").count(99) == 3, "history, and its two fields"
    assert 99 not in _numbers(html, "span"), "its times are unknown"
    assert "unknown" in html


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed: the page's script is not run")
def test_pointing_filtering_and_sorting(search: Search, html: str, tmp_path: Path) -> None:
    acts = """
    const results = {};
    const at = document.querySelector('.trace.best .near');
    at.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 300, clientY: 300}));
    results.lit = [...new Set([...document.querySelectorAll('.lit')].map(e => e.dataset.trial))];
    results.tip = tip.hidden ? '' : tip.textContent.split('\\n')[0];
    document.body.dispatchEvent(new PointerEvent('pointermove', {bubbles: true}));
    results.unlit = document.querySelectorAll('.lit').length + Number(!tip.hidden);
    const brush = [...document.querySelectorAll('.brush')].at(-1);
    brush.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowUp'}));
    results.kept = [...rows].filter(([, row]) => !row.hidden).map(([id]) => id);
    results.shown = document.querySelector('.shown-count').textContent;
    document.querySelector('.all').click();
    document.querySelector('[data-only=stopped]').click();
    results.unstopped = [...rows.values()].filter(row => !row.hidden).length;
    document.querySelector('.all').click();
    results.again = [...rows.values()].filter(row => !row.hidden).length;
    document.querySelector('th[data-column="0"] button').click();
    results.order = [...document.querySelectorAll('tbody tr[data-trial]')].map(row => Number(row.dataset.trial));
    document.body.textContent = JSON.stringify(results);
    """
    digest = base64.b64encode(hashlib.sha256(acts.encode()).digest()).decode()
    page = html.replace("script-src ", f"script-src 'sha256-{digest}' ").replace(
        "</body>", f"<script>{acts}</script></body>"
    )
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'chromium'}"]
    ran = subprocess.run([*command, "--dump-dom", str(file)], capture_output=True, text=True, timeout=400, check=True)
    body = re.search("<body[^>]*>(.*)</body>", ran.stdout, re.DOTALL)
    assert body is not None
    results = json.loads(entities.unescape(body[1]))
    assert search.best is not None
    assert results["lit"] == [str(search.best.number)]
    assert results["tip"].startswith(f"Trial {search.best.number}, done: Dice {search.best.dice:.4f}")
    assert results["unlit"] == 0
    last = {
        int(n): float(ys.rsplit(",", 1)[1]) for n, ys in re.findall(r'data-trial="(\d+)"[^>]*data-y="([^"]*)"', html)
    }
    low, high = map(float, re.findall(r'data-top="([\d.]+)" data-bottom="([\d.]+)"', html)[-1])
    inside = {str(n) for n, y in last.items() if y <= low + (high - low) / 4}
    assert 0 < len(inside) < 30
    assert set(results["kept"]) == inside
    assert results["shown"] == f"{len(results['kept'])} of 30 trials"
    assert results["unstopped"] == sum(t.state != "stopped" for t in search.trials)
    assert results["again"] == 30
    assert results["order"] == list(range(30))
