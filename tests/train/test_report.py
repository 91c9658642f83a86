"""Test the report page: complete, self-contained, correct, and clear about what is missing."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Bucket
from tests.train import fake_run
from voxlane.errors import RunError
from voxlane.train import findings
from voxlane.train.report import render_run_page, report

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Outline(HTMLParser):
    """Checks that elements close in order; collects ids, links, sources and visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if attributes.get("id") else []
        self.links += [attributes["href"]] if attributes.get("href") else []
        self.sources += [attributes["src"]] if attributes.get("src") else []
        assert not any(name.startswith("on") for name in attributes)
        if tag == "img":
            assert attributes.get("alt")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def render_page(folder: Path) -> str:
    uri = report(str(folder))
    assert uri == f"file://{folder}/report.html"
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return fake_run.write(tmp_path / "run", overlay=fake_run.small_overlay())


def test_complete_run(run: Path) -> None:
    html = render_page(run)
    outline = Outline(html)
    text = outline.text
    for phrase in ("Phantom KiTS", "1.4 million parameters", "28 cases", "12 held out", "Held-out validation cases"):
        assert phrase in text
    assert "voxlane train gs://demo/prepared --run 'gs://demo/runs/first run' epochs=30" in text
    assert "momentum: 0.99" in text, "the config"
    assert "patch: [32, 64, 64]" in text
    assert "2.13.0" in text, "the environment"
    assert "The training step is the bottleneck" in text
    assert "412 MB in 5 321 requests" in text
    assert "$0.00213" in text
    assert html.count("<svg") == 5
    assert 'class="missing"' not in html
    assert len(outline.ids) == len(set(outline.ids))


def test_figures_match_the_evaluation(run: Path) -> None:
    text = Outline(render_page(run)).text
    summary = json.loads((run / "evaluation/validation/summary.json").read_text(encoding="utf-8"))
    assert f"Mean Dice {summary['mean_dice']:.3f} 12 cases, validation" in text
    for target in ("kidney", "tumour"):
        dice = summary["targets"][target]["dice"]
        assert f"{target} {dice['mean']:.3f} ± {dice['std']:.3f} {dice['median']:.3f}" in text
    cases = json.loads((run / "evaluation/validation/cases.json").read_text(encoding="utf-8"))
    for case in cases:
        scored = [case[t]["dice"] for t in ("kidney", "tumour") if math.isfinite(case[t]["dice"])]
        assert all(f"{dice:.3f}" in text for dice in scored)


def test_page_loads_nothing(run: Path) -> None:
    html = render_page(run)
    outline = Outline(html)
    assert all(source.startswith("data:image/png;base64,") for source in outline.sources)
    assert all(link.startswith("#") and link[1:] in outline.ids for link in outline.links)
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert "url(" not in html
    assert "default-src 'none'" in html


def test_worst_cases_come_first(run: Path) -> None:
    html = render_page(run)
    cases = json.loads((run / "evaluation/validation/cases.json").read_text(encoding="utf-8"))
    ranked = sorted(cases, key=lambda c: findings.mean_dice(c, ["kidney", "tumour"]))
    shown = re.findall(r"<figcaption><b>(case_\d+)</b>", html)
    assert shown[: findings.WORST_CASES] == [c["case"] for c in ranked[: findings.WORST_CASES]]
    assert len(shown) == findings.WORST_CASES + 1
    picture = base64.b64encode(fake_run.small_overlay()).decode()
    assert html.count(picture) == len(shown)


def test_rows_are_sortable_and_unscored_values_are_dashes(run: Path) -> None:
    html = render_page(run)
    rows = re.findall(r'<tr><th scope="row" data-sort="(case_\d+)">(.*?)</tr>', html)
    assert len(rows) == 12
    assert {len(re.findall("<td", row)) for _, row in rows} == {11}
    columns = [int(c) for c in re.findall(r'data-column="(\d+)"', html)]
    assert columns == list(range(12))
    unscored = dict(rows)["case_00039"]
    assert unscored.count('data-sort=""') == 3


def test_run_without_evaluation(tmp_path: Path) -> None:
    folder = fake_run.write(tmp_path / "run", evaluated=False)
    text = Outline(render_page(folder)).text
    assert "This run has not been evaluated by itself yet." in text
    assert f"voxlane evaluate file://{folder}" in text
    assert "Best mean Dice" in text, "the validation during training stands in"


def test_run_that_its_time_limit_ended(run: Path) -> None:
    history = json.loads((run / "history.json").read_text())
    history[-1]["cut"] = 7
    fake_run.dump(run / "history.json", history)
    done = {"epochs": 29, "of": 30, "max_minutes": 4.5, "steps": 600, "planned_steps": 700}
    fake_run.dump(run / "done.json", done)
    text = Outline(render_page(run)).text
    assert "max_minutes=4.5 ended the run after 600 of 700 steps: its schedule ended with the time" in text
    assert "Epochs 29 600 of 700 planned steps" in text
    fake_run.dump(run / "done.json", {**done, "steps": 500})
    assert "ended the run" not in Outline(render_page(run)).text, "it was continued since"
    fake_run.dump(run / "done.json", {"epochs": 30, "of": 30})
    assert "ended the run" not in Outline(render_page(run)).text


def test_run_that_has_just_started(tmp_path: Path) -> None:
    folder = fake_run.write(tmp_path / "run", evaluated=False)
    (folder / "history.json").unlink()
    (folder / "stall.json").unlink()
    text = Outline(render_page(folder)).text
    assert "No epoch has been finished yet." in text
    assert "The run wrote no time report" in text


def test_damaged_files_are_named_and_left_out(run: Path) -> None:
    (run / "history.json").write_text('[{"epoch": 0, "lo')
    (run / "evaluation/validation/cases.json").write_text("{}")
    text = Outline(render_page(run)).text
    assert "history.json is damaged and was left out." in text
    assert "evaluation/validation/cases.json is damaged and was left out." in text
    assert "Held-out validation cases" in text


def test_cases_without_a_picture_are_marked(tmp_path: Path) -> None:
    folder = fake_run.write(tmp_path / "run", cases=3)
    assert "No pictures were written with this evaluation." in Outline(render_page(folder)).text
    fake_run.write(folder, cases=3, overlay=fake_run.small_overlay())
    (folder / "evaluation/validation/overlays/case_00038.png").unlink()
    html = render_page(folder)
    assert html.count("No picture of this case was written.") == 1
    assert html.count("<img") == 2


@pytest.mark.parametrize("file", ["run.json", "history.json", "stall.json"])
def test_any_field_may_be_missing_or_null(run: Path, file: str) -> None:
    complete = json.loads((run / file).read_text(encoding="utf-8"))
    for part in complete if isinstance(complete, dict) else complete[-1]:
        for change in ("missing", "null"):
            value: Any = json.loads(json.dumps(complete))
            for row in [value] if isinstance(value, dict) else value:
                row[part] = None
                if change == "missing":
                    del row[part]
            (run / file).write_text(json.dumps(value))
            assert "How to run it again" in Outline(render_page(run)).text


@pytest.mark.parametrize("part", ["targets", "mean_dice", "cases", "rule"])
def test_summary_may_lack_parts(run: Path, part: str) -> None:
    path = run / "evaluation/validation/summary.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    del value[part]
    path.write_text(json.dumps(value))
    assert "Every case" in Outline(render_page(run)).text


def test_names_are_never_markup(run: Path) -> None:
    evil = '<script>alert("x")</script>'
    value = json.loads((run / "run.json").read_text(encoding="utf-8"))
    value["data"]["name"] = value["data"]["uri"] = value["command"][2] = evil
    value["config"]["note"] = value["environment"]["device"] = evil
    value["cases"]["train"][0] = evil
    (run / "run.json").write_text(json.dumps(value))
    cases = json.loads((run / "evaluation/validation/cases.json").read_text(encoding="utf-8"))
    cases[0]["case"] = evil
    (run / "evaluation/validation/cases.json").write_text(json.dumps(cases))
    html = render_page(run)
    assert evil not in html
    assert html.count("<script>") == 1
    assert "alert" in Outline(html).text


def test_regions_are_listed(run: Path) -> None:
    value = json.loads((run / "run.json").read_text(encoding="utf-8"))
    value["description"]["regions"] = {"kidney": [1, 2], "tumour": [2]}
    (run / "run.json").write_text(json.dumps(value))
    assert "kidney = 1+2; tumour = 2" in Outline(render_page(run)).text


def test_cross_validation_comes_first(run: Path) -> None:
    source = run / "evaluation/validation"
    for path in source.glob("*.json"):
        fake_run.dump(run / "evaluation/cross-validation" / path.name, json.loads(path.read_text(encoding="utf-8")))
    evaluations = findings.read_findings(str(run)).evaluations
    assert [evaluation.name for evaluation in evaluations] == ["cross-validation", "validation"]
    assert "12 cases, cross-validation" in Outline(render_page(run)).text


def test_missing_and_damaged_runs_have_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run exists here. Train one"):
        report(str(tmp_path / "nothing"))
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run.json is damaged"):
        report(str(tmp_path))


@pytest.mark.parametrize(
    ("created", "phrase"),
    [
        ("2026-03-02T09:41:07+00:00", "started 2026-03-02 09:41 UTC."),
        ("2026-03-02T09:41:07+02:00", "started 2026-03-02 07:41 UTC."),
        ("2026-03-02T09:41:07", "started 2026-03-02 09:41."),
        ("yesterday", "started yesterday."),
    ],
)
def test_time_is_in_utc(run: Path, created: str, phrase: str) -> None:
    value = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(json.dumps(value | {"created": created}))
    assert phrase.rstrip(".") + " ." in Outline(render_page(run)).text


def test_same_findings_give_the_same_page(run: Path) -> None:
    assert render_run_page(findings.read_findings(str(run))) == render_run_page(
        findings.read_findings(f"file://{run}/")
    )


def test_report_in_a_bucket(run: Path, gcs: Bucket) -> None:
    for path in run.rglob("*"):
        if path.is_file():
            gcs.store.put(gcs.key(f"runs/one/{path.relative_to(run)}"), path.read_bytes())
    uri = report(f"{gcs.uri}/runs/one/", gcs.config)
    assert uri == f"{gcs.uri}/runs/one/report.html"
    html = bytes(gcs.store.get(gcs.key("runs/one/report.html"))).decode()
    assert "Phantom KiTS" in Outline(html).text


def test_network_and_patch_are_the_trained_ones(run: Path) -> None:
    facts = json.loads((run / "run.json").read_text())
    trained = {**facts["plan"]["network"], "features": [3 * n for n in facts["plan"]["network"]["features"]]}
    config = {**facts["config"], "patch": [16, 48, 48], "batch": 5}
    (run / "run.json").write_text(json.dumps({**facts, "network": trained, "config": config}))
    text = Outline(render_page(run)).text
    assert f"0 {trained['features'][0]} 1 × 1 × 1" in text
    assert "16 × 48 × 48 voxels (z, y, x), 5 per step" in text


@pytest.mark.parametrize(
    ("checkpoint", "phrase"),
    [("best", "slightly optimistic"), ("last", "Scored: last weights, of step 600 (digest 0123456789ab).")],
)
def test_page_says_which_weights_were_scored(run: Path, checkpoint: str, phrase: str) -> None:
    file = run / "evaluation/validation/summary.json"
    assert phrase not in Outline(render_page(run)).text
    scored = {"run_uri": f"file://{run}", "name": checkpoint, "step": 600, "digest": "0123456789abcdef"}
    config = {"predict": {"checkpoint": checkpoint}}
    file.write_text(json.dumps({**json.loads(file.read_text()), "config": config, "checkpoints": [scored]}))
    assert phrase in Outline(render_page(run)).text


def test_folds_have_a_page_each_and_a_common_one(tmp_path: Path) -> None:
    for fold in (0, 1):
        fake_run.write(tmp_path / "cv" / f"fold_{fold}")
    uri = report(str(tmp_path / "cv"))
    assert uri.endswith("cv/report.html")
    text = (tmp_path / "cv" / "report.html").read_text(encoding="utf-8")
    assert "trained once per fold" in text
    assert 'href="fold_1/report.html"' in text
    assert (tmp_path / "cv" / "fold_1" / "report.html").exists()
