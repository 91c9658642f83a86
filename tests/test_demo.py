"""`make demo` with small numbers: every step runs and writes its results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import pytest

ROOT = Path(__file__).parents[1]
TINY = ("epochs=1", "steps_per_epoch=2", "batch=1", "validation.every_epochs=1", "validation.max_cases=1")


def run_demo(script: str, *words: str) -> str:
    """Run the demo and return its output."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "demo" / script), *words],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def printed(out: Path) -> str:
    return run_demo("demo.py", "--out", str(out), "--cases", "8", "--size", "48", *TINY)


def test_every_command_is_shown_and_succeeds(printed: str) -> None:
    commands = re.findall(r"^\$ voxlane (\w+)", printed, re.MULTILINE)
    assert commands == ["ls", "prepare", "train", "evaluate", "report", "predict"]
    assert "16 objects" in printed
    assert "8 cases in gs://demo/prepared" in printed


def test_training_shows_its_progress_and_has_no_time_limit(printed: str) -> None:
    assert "longer on a busy machine: the progress shows how long is left" in printed
    assert re.search(r"^epoch 1 of 1: loss ", printed, re.MULTILINE)
    assert "2 steps, 2 patches" in printed
    assert "max_minutes" not in printed


def test_output_ends_with_scores_traffic_and_the_report(printed: str, out: Path) -> None:
    end = printed[printed.index("── results") :]
    for target in ("kidney", "tumour", "mean"):
        assert re.search(rf"^{target} +(\d\.\d{{3}}|-)", end, re.MULTILINE)
    requests = {line.split("  ")[0]: int(line.split()[-1]) for line in end.splitlines() if line.startswith("voxlane,")}
    assert requests["voxlane, as the server counted it"] > 0
    assert "a whole scan and label for every patch" in end
    assert (out / "report.html").resolve().as_uri() in end


def test_results_are_downloaded(printed: str, out: Path) -> None:
    html = (out / "report.html").read_text()
    assert "voxlane train gs://demo/prepared --run gs://demo/runs/first" in html
    overlays = list((out / "overlays").glob("case_*.png"))
    assert overlays
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in [*overlays, out / "new_scan.png"])
    scan, mask = nib.load(out / "new_scan.nii.gz"), nib.load(out / "masks" / "new_scan.nii.gz")
    assert mask.shape == scan.shape
    assert (mask.affine == scan.affine).all()
    assert len(list((out / "masks").glob("case_*.nii.gz"))) == 1


def test_whole_objects_are_streamed_and_resumed(tmp_path: Path) -> None:
    printed = run_demo("streaming.py", "--out", str(tmp_path), "--cases", "64")
    assert "56 samples before, 8 after, 64 in all" in printed
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")
