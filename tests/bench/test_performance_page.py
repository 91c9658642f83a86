"""docs/performance.md is what the generator makes of the committed result files, and says what is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"


def made(results: Path, out: Path) -> str:
    """The page that the generator writes for a folder of result files."""
    script = ROOT / "benchmarks" / "performance.py"
    command = [sys.executable, str(script), "--results", str(results), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out.read_text()


def test_the_committed_page_is_that_of_the_committed_results(tmp_path: Path) -> None:
    assert made(RESULTS, tmp_path / "page.md") == PAGE.read_text(), "run: make bench-report"


def test_what_the_page_points_to_is_there() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert len(targets) > 30
    assert not [target for target in targets if not (PAGE.parent / target).exists()]


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    text = made(tmp_path / "empty", tmp_path / "page.md")
    summary = text.split("## Summary")[1].split("## Where we are slower")[0]
    claims = [line for line in summary.splitlines() if line.startswith("| ")][1:]
    assert claims
    assert all("| not measured yet |" in line for line in claims)
    assert "better than ours: 0" in text
    assert text.count("Not measured yet. To measure: `") >= 13


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import performance_results

    return performance_results


def spread(median: float, least: float, most: float) -> dict[str, float]:
    return {"median": median, "min": least, "max": most}


def test_a_ratio_says_what_the_spreads_allow(functions: Any) -> None:
    ours, peers = spread(1.0, 0.8, 1.25), spread(2.0, 1.5, 4.0)
    assert functions.faster(ours, peers) == {"median": 2.0, "min": 1.2, "max": 5.0}
    assert functions.more(peers, ours) == functions.faster(ours, peers)
    assert functions.times(functions.faster(ours, peers)) == "2.00x (1.20 to 5.00)"
    assert functions.times(functions.faster(peers, ours)) == "0.50x (0.20 to 0.83), **slower**"
    assert functions.times(spread(1.2, 0.9, 1.4)) == "1.20x (0.90 to 1.40), not told apart"


def test_a_peer_that_is_faster_is_listed_and_a_quick_run_is_named(tmp_path: Path) -> None:
    document = json.loads((RESULTS / "listing.json").read_text())
    document["settings"]["quick"] = True
    for row in document["summary"]:
        if row["contender"] == "dataflux":
            row["total_s"] = spread(0.01, 0.009, 0.011)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "listing.json").write_text(json.dumps(document))
    text = made(tmp_path / "results", tmp_path / "page.md")
    slower = text.split("## Where we are slower")[1].split("\n## ")[0]
    assert slower.count("| dataflux |") == len({r["keys"] for r in document["summary"] if r["contender"] == "dataflux"})
    assert slower.count("**slower**") >= slower.count("| dataflux |")
    assert "quick run: do not quote" in text


def test_what_failed_is_neither_ours_nor_a_gain(tmp_path: Path) -> None:
    document = json.loads((RESULTS / "listing.json").read_text())
    for row in document["summary"]:
        if row["contender"] == "voxlane":
            row.clear()
            row.update(service="gcs", keys=1, contender="voxlane", error="it broke")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "listing.json").write_text(json.dumps(document))
    text = made(tmp_path / "results", tmp_path / "page.md")
    line = next(line for line in text.splitlines() if line.startswith("| listing a million keys"))
    assert "not measured yet" in line
