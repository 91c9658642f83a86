"""Test that docs/performance.md matches the committed result files, and that the page names missing ones."""

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


def generate_page(results: Path, out: Path) -> str:
    """Return the page that the generator writes for a folder of result files."""
    script = ROOT / "benchmarks" / "performance.py"
    command = [sys.executable, str(script), "--results", str(results), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out.read_text()


def test_committed_page_matches_the_committed_results(tmp_path: Path) -> None:
    assert generate_page(RESULTS, tmp_path / "page.md") == PAGE.read_text(), "run: make bench-report"


def test_links_of_the_page_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert len(targets) > 30
    assert not [target for target in targets if not (PAGE.parent / target).exists()]


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    text = generate_page(tmp_path / "empty", tmp_path / "page.md")
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


def test_ratio_is_qualified_by_the_spread(functions: Any) -> None:
    our_spread, peer_spread = spread(1.0, 0.8, 1.25), spread(2.0, 1.5, 4.0)
    assert functions.faster(our_spread, peer_spread) == {"median": 2.0, "min": 1.2, "max": 5.0}
    assert functions.more(peer_spread, our_spread) == functions.faster(our_spread, peer_spread)
    assert functions.times(functions.faster(our_spread, peer_spread)) == "2.00x (1.20 to 5.00)"
    assert functions.times(functions.faster(peer_spread, our_spread)) == "0.50x (0.20 to 0.83), **slower**"
    assert functions.times(spread(1.2, 0.9, 1.4)) == "1.20x (0.90 to 1.40), not significant"


def test_peer_that_is_faster_is_listed_and_a_quick_run_is_named(tmp_path: Path) -> None:
    document = json.loads((RESULTS / "listing.json").read_text())
    document["settings"]["quick"] = True
    for row in document["summary"]:
        if row["contender"] == "dataflux":
            row["total_s"] = spread(0.01, 0.009, 0.011)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "listing.json").write_text(json.dumps(document))
    text = generate_page(tmp_path / "results", tmp_path / "page.md")
    slower = text.split("## Where we are slower")[1].split("\n## ")[0]
    assert slower.count("| dataflux |") == len({r["keys"] for r in document["summary"] if r["contender"] == "dataflux"})
    assert slower.count("**slower**") >= slower.count("| dataflux |")
    assert "quick run: do not quote" in text


def loading_row(contender: str, latency_s: float, total_s: float) -> dict[str, Any]:
    cell = {"service": "s3", "latency_s": latency_s, "size_bytes": 100 << 10, "style": "map", "contender": contender}
    figures = {"total_s": spread(total_s, total_s - 0.1, total_s + 0.1), "bytes_per_s": spread(1e8, 9e7, 1.1e8)}
    return {**cell, **figures}


def test_latencies_of_the_loading_table_are_compared_separately(tmp_path: Path) -> None:
    rows = [loading_row("voxlane", 0.0, 1.0), loading_row("boto3", 0.0, 0.5)]
    rows += [loading_row("voxlane", 0.02, 1.0), loading_row("boto3", 0.02, 4.0)]
    document = {
        "date": "2026-11-16T00:00:00",
        "commit": "abc",
        "hardware": {"cpu": "a CPU", "cores": 2, "memory_gib": 16.0},
        "python": "3.12.0",
        "settings": {"latencies_s": [0.0, 0.02], "num_workers": 2, "rounds": 5, "quick": False},
        "summary": rows,
    }
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "loading.json").write_text(json.dumps(document))
    text = generate_page(tmp_path / "results", tmp_path / "page.md")
    section = text.split("## Loading from a bucket")[1].split("\n## ")[0]
    assert "with a latency of 0 ms and 20 ms added to every request, in 5 interleaved rounds" in section
    assert "| S3 (SeaweedFS) | 0 ms | map | 100 KiB | 1.00 (0.90 to 1.10) | 100 | boto3 0.50x" in section
    assert "| S3 (SeaweedFS) | 20 ms | map | 100 KiB | 1.00 (0.90 to 1.10) | 100 | boto3 4.00x" in section
    slower = text.split("## Where we are slower")[1].split("\n## ")[0]
    assert slower.count("| boto3 |") == 1
    assert "| an epoch of 100 KiB objects, S3 (SeaweedFS), 0 ms, map-style | boto3 | 0.50x" in slower
    claim = next(line for line in text.splitlines() if line.startswith("| an epoch of 100 KiB objects, S3, 20 ms"))
    assert "4.00x" in claim


def step_row(variant: str, kind: str, ms: float) -> dict[str, Any]:
    groups = {"convolution": ms / 2, "layout copies": 0.0, "between kernels": 1.0}
    return {
        "variant": variant,
        "kind": kind,
        "notes": ["a note"],
        "step_ms": spread(ms, ms - 0.5, ms + 0.5),
        "patches_per_s": spread(2000 / ms, 2000 / (ms + 0.5), 2000 / (ms - 0.5)),
        "times_floor": ms / 7.2,
        "first_s": 3.0,
        "peak_bytes": 2**34 if variant == "compile" else 2**35,
        "held_bytes": 2**35,
        "first_loss": 1.0,
        "last_loss": 0.5,
        "finite": True,
        "profile": {"groups_ms": groups, "launches": 100.0, "kernels": []},
    }


def test_training_step_is_compared_with_the_first_variant_of_its_kind(tmp_path: Path) -> None:
    rows = [
        step_row("reference", "mlperf", 57.6),
        step_row("compile", "mlperf", 20.0),
        step_row("ours", "mlperf", 24.0),
    ]
    broken = {"variant": "nnunet", "kind": "nnunet", "notes": [], "error": "it broke"}
    setting = {"batch": 2, "patch": [128, 128, 128], "channels": 1, "outputs": 3, "rounds": 5, "steps": 10}
    document = {
        "date": "2026-11-16T00:00:00",
        "commit": "abc",
        "hardware": {"cpu": "a CPU", "cores": 16, "memory_gib": 128.0, "gpus": ["NVIDIA H200"]},
        "python": "3.12.0",
        "setting": {**setting, "device": "NVIDIA H200"},
        "floor": {"matrix_flops_per_s": 7.9e14, "copy_bytes_per_s": 4.1e12, "kinds": {}},
        "summary": [*rows, broken, step_row("nnunet-ours", "nnunet", 27.0)],
    }
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "step.json").write_text(json.dumps(document))
    text = generate_page(tmp_path / "results", tmp_path / "page.md")
    assert "a CPU, 16 cores, 128.0 GiB, NVIDIA H200" in text
    section = text.split("## A training step")[1].split("\n## ")[0]
    assert "| ours | 24.00 (23.50 to 24.50) | 2.40x (2.33 to 2.47) | 83.3 | 3.33 |" in section
    assert "| nnunet | failed: it broke |" in section
    assert "| layout copies | 0.00 | 0.00 | 0.00 | 0.00 |" in section
    summary = text.split("## Summary")[1].split("## Where we are slower")[0]
    assert "against its reference | 24.0 (23.5 to 24.5) ms | reference: 57.6 (57.1 to 58.1) | 2.40x" in summary
    assert "nnU-Net as it ships | not measured yet |" in summary
    slower = text.split("## Where we are slower")[1].split("\n## ")[0]
    assert "| a training step of MLPerf's network | compile | 0.83x (0.80 to 0.87), **slower** |" in slower
    assert "| peak memory, a training step of MLPerf's network | compile | 0.50x, no spread, **slower** |" in slower


def test_failed_variant_gives_no_ratio(tmp_path: Path) -> None:
    document = json.loads((RESULTS / "listing.json").read_text())
    for row in document["summary"]:
        if row["contender"] == "voxlane":
            row.clear()
            row.update(service="gcs", keys=1, contender="voxlane", error="it broke")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "listing.json").write_text(json.dumps(document))
    text = generate_page(tmp_path / "results", tmp_path / "page.md")
    line = next(line for line in text.splitlines() if line.startswith("| listing a million keys"))
    assert "not measured yet" in line
