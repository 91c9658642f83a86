"""Comparison of two sets of scores: pairing, statistics, caveats, and the page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from voxlane.cli.main import main
from voxlane.errors import RunError
from voxlane.train import pictures
from voxlane.train.comparison import MEAN, compare, format_comparison
from voxlane.train.comparison_report import write_comparison

MEASURES = ("dice", "hd95_mm", "surface_dice", "volume_true_ml", "volume_predicted_ml")


def write_scores(folder: Path, dice: dict[str, dict[str, float | None]], *, space: str = "scan") -> Path:
    """Write cases.json and summary.json as an evaluation does, with the same true volumes, and a picture each."""
    cases: list[dict[str, Any]] = []
    for case, targets in dice.items():
        row: dict[str, Any] = {"case": case, "fold": 0}
        for target, value in targets.items():
            hd95 = None if value is None else 10 * (1 - value)
            row[target] = dict(zip(MEASURES, (value, hd95, value, 12.0, 11.0), strict=True))
        cases.append(row)
    (folder / "overlays").mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    (folder / "summary.json").write_text(json.dumps({"space": space}))
    for case in dice:
        image = np.random.default_rng(len(case)).normal(size=(4, 24, 20))
        label = np.zeros((4, 24, 20), np.uint8)
        label[1:3, 8:15, 5:12] = 1
        png = pictures.encode_png(pictures.draw_row(image, label, label, (1.0, 1.0, 1.0)))
        (folder / "overlays" / f"{case}.png").write_bytes(png)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """Two evaluated runs with twelve cases in common; the tumour is in every second case."""
    generator = np.random.default_rng(3)
    kidney, tumour = generator.uniform(0.7, 0.9, 14), generator.uniform(0.3, 0.8, 14)
    gain = generator.normal(0.03, 0.02, (2, 14))
    first = {f"c{i:02d}": {"kidney": kidney[i], "tumour": tumour[i] if i % 2 else None} for i in range(13)}
    second = {
        f"c{i:02d}": {"kidney": kidney[i] + gain[0, i], "tumour": tumour[i] + gain[1, i] if i % 2 else None}
        for i in range(1, 14)
    }
    write_scores(tmp_path / "a/evaluation/validation", first)
    write_scores(tmp_path / "b/evaluation/validation", second)
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_table_is_that_of_scipy(runs: tuple[str, str]) -> None:
    comparison = compare(*runs)
    assert (len(comparison.cases), comparison.targets) == (12, ("kidney", "tumour"))
    for target in comparison.targets:
        pairs = np.array([comparison.values(case, target, "dice") for case in comparison.cases])
        pairs = pairs[~np.isnan(pairs).any(axis=1)]
        row = comparison.table[target]["dice"]
        expected = scipy.stats.wilcoxon(pairs[:, 1], pairs[:, 0])
        assert row["p"] == pytest.approx(expected.pvalue)
        assert row["difference"] == pytest.approx(np.diff(pairs).mean())
        assert row["difference_ci95"][0] < row["difference"] < row["difference_ci95"][1]
    assert comparison.table["kidney"]["dice"]["cases"] == 12
    assert comparison.table["tumour"]["dice"]["cases"] == 6
    hd95 = comparison.table["kidney"]["hd95_mm"]
    assert hd95["difference"] == pytest.approx(-10 * comparison.table["kidney"]["dice"]["difference"])
    case = comparison.first.cases["c01"]
    assert comparison.values("c01", MEAN, "dice")[0] == pytest.approx(
        (case["kidney"]["dice"] + case["tumour"]["dice"]) / 2
    )
    assert comparison.notes == (
        "1 case only in A, not compared: c00",
        "1 case only in B, not compared: c13",
    )
    text = format_comparison(comparison)
    assert "12 cases in common; differences are B minus A" in text
    assert "2,000 resamples of the cases" in text


class Outline(HTMLParser):
    """Number of each element, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_and_data(runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs, "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert f"page: file://{tmp_path}/out/compare.html" in printed.out
    assert "warning: 1 case only in A, not compared: c00" in printed.err
    page = (tmp_path / "out/compare.html").read_text()
    outline = Outline(page)
    assert outline.counts["img"] == 12, "six cases, by A and by B"
    for words in ("kidney", "tumour", "Wilcoxon", "c13", "−"):
        assert words in outline.text
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    document = json.loads((tmp_path / "out/compare.json").read_text())
    row = document["cases"][0]
    assert row["case"] == "c01"
    assert row["kidney"]["dice"] == [pytest.approx(v) for v in compare(*runs).values("c01", "kidney", "dice")]
    assert document["targets"]["kidney"]["dice"]["p"] < 0.05
    assert document["bootstrap"]["resamples"] == 2000
    assert write_comparison(compare(*runs), str(tmp_path / "again")).endswith("compare.html")
    assert (tmp_path / "again/compare.html").read_text() == page


def test_score_folders_and_other_evaluations(runs: tuple[str, str], tmp_path: Path) -> None:
    folder = write_scores(tmp_path / "tool", {f"c{i:02d}": {"kidney": 0.8} for i in range(3)}, space="prepared")
    for uri in (str(folder), f"{folder}/cases.json"):
        comparison = compare(runs[0], uri)
        assert comparison.targets == ("kidney",)
        assert "targets only in A, not compared: tumour" in comparison.notes
        assert "A was scored in scan space and B in prepared space" in comparison.notes
        assert "with 3 cases, Wilcoxon's p cannot be below 0.05: 6 are needed" in comparison.notes
    write_scores(tmp_path / "a/evaluation/external-x", {"x": {"kidney": 0.8}})
    write_scores(tmp_path / "b/evaluation/external-x", {"x": {"kidney": 0.9}})
    assert compare(*runs).first.title == "a (validation)"
    chosen = compare(*runs, evaluation="external-x")
    assert (chosen.cases, chosen.first.title) == (("x",), "a (external-x)")


def test_other_labels_are_noticed(runs: tuple[str, str]) -> None:
    path = Path(runs[1], "evaluation/validation/cases.json")
    cases = json.loads(path.read_text())
    cases[0]["kidney"]["volume_true_ml"] = 13.0
    path.write_text(json.dumps(cases))
    assert "the labels differ in 1 case: c01" in compare(*runs).notes


def test_equal_scores(runs: tuple[str, str], tmp_path: Path) -> None:
    comparison = compare(runs[0], runs[0])
    assert comparison.table["kidney"]["dice"]["p"] is None
    assert comparison.table["kidney"]["dice"]["equal"] == 13
    write_comparison(comparison, str(tmp_path / "same"))


def test_mistakes(runs: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"empty: no scores here. Make them: voxlane evaluate RUN, or voxlane score -o"):
        compare(runs[0], str(tmp_path / "empty"))
    with pytest.raises(RunError, match=r"b: no evaluation 'external-x'. Choose from: validation"):
        write_scores(tmp_path / "a/evaluation/external-x", {"x": {"kidney": 0.8}})
        compare(*runs, evaluation="external-x")
    folder = write_scores(tmp_path / "other", {"z": {"kidney": 0.8}})
    with pytest.raises(RunError, match=r"no case in common: A has c00, .* and 8 more, B has z. Compare runs that were"):
        compare(runs[0], str(folder))
    folder = write_scores(tmp_path / "by-value", {"c03": {"1": 0.8}})
    with pytest.raises(
        RunError, match=r"no target in common: A has kidney, tumour, B has 1. Score masks with the names"
    ):
        compare(runs[0], str(folder))
    (folder / "cases.json").write_text('{"a": 1}')
    with pytest.raises(RunError, match=r"cases.json: the file does not have the content that voxlane writes"):
        compare(runs[0], str(folder))
