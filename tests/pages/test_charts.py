"""Test charts: round ticks that cover the data, every point inside the chart, well-formed SVG."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxlane.pages import charts
from voxlane.pages.formatting import format_tick

VALUES = st.floats(-1e6, 1e6, allow_nan=False)


@given(VALUES, VALUES, st.integers(2, 9))
def test_ticks_cover_the_range_and_are_few(a: float, b: float, count: int) -> None:
    low, high = min(a, b), max(a, b)
    ticks = charts.round_numbers(low, high, count)
    assert 2 <= len(ticks) <= 2 * count + 2
    assert ticks == sorted(set(ticks))
    slack = 1e-6 * max(abs(low), abs(high), 1e-300)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack


def test_ticks_are_round() -> None:
    assert charts.round_numbers(0, 1, 5) == [0, 0.25, 0.5, 0.75, 1]
    assert charts.round_numbers(0.13, 0.87, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert charts.round_numbers(0, 29, 7, integer=True) == [0, 5, 10, 15, 20, 25]
    assert charts.round_numbers(0, 2, 7, integer=True) == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (5e-5, "5e-5"), (1.5e6, "1.5e6"), (20000, "20000")]
)
def test_ticks_are_short(value: float, text: str) -> None:
    assert format_tick(value) == text


@given(st.lists(st.tuples(st.integers(0, 500), st.floats()), max_size=30, unique_by=lambda p: p[0]))
def test_line_chart_accepts_any_values(points: list[tuple[int, float]]) -> None:
    moderate = [(x, y) for x, y in points if not math.isfinite(y) or abs(y) < 1e9]
    series = charts.Series("a <b>", "red", tuple(sorted(moderate)))
    svg = charts.line_chart([series], label='Loss & "more"')
    if not series.drawn:
        assert svg == ""
        return
    assert ElementTree.fromstring(svg).attrib["aria-label"] == 'Loss & "more"'
    for x, y in re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', svg):
        assert 0 <= float(x) <= charts.WIDTH
        assert 0 <= float(y) <= charts.HEIGHT


def test_pointing_at_an_epoch_shows_its_values() -> None:
    series = [charts.Series("loss", "red", ((0, 1.0), (1, 0.5))), charts.Series("dice", "blue", ((1, 0.25),))]
    svg = charts.line_chart(series, label="both")
    assert "<title>epoch 0: loss 1</title>" in svg
    assert "<title>epoch 1: loss 0.5, dice 0.25</title>" in svg


def test_dot_chart_shows_every_scored_case() -> None:
    svg = charts.dot_chart(
        [("kidney", "red", [("a<1>", 0.5), ("b", math.nan), ("c", 1.0)]), ("cyst", "blue", [])],
        label="x",
        x_name="Dice",
    )
    chart = ElementTree.fromstring(svg)
    assert len(chart.findall("circle")) == 2
    assert [t.text for t in chart.findall("circle/title")] == ["a<1>: 0.500", "c: 1.000"]
    assert "mean 0.750" in svg
    assert "no case has it" in svg
    assert charts.dot_chart([("cyst", "blue", [("a", math.nan)])], label="x", x_name="Dice") == ""


def test_charts_of_one_run_share_the_x_axis() -> None:
    nan = float("nan")
    late = charts.line_chart([charts.Series("dice", "red", ((0, nan), (1, nan), (2, 0.5), (4, 0.6)))], label="late")
    complete = charts.line_chart(
        [charts.Series("loss", "red", ((0, 1.0), (1, 0.9), (2, 0.5), (4, 0.6)))], label="complete"
    )
    assert "nan" not in late
    last = [re.findall(r'<circle[^>]* cx="([\d.]+)"', svg)[-2:] for svg in (late, complete)]
    assert last[0] == last[1]
