"""Test `benchmarks/compare_training.py`: planning the length of a run, comparing curves, and its section."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compare_training
import training_processes
import training_report
from compare_training import Pace, covered
from loss_curves import comparison, smoothed
from performance_results import Results
from training_processes import Line, Watched


def run(path: str, seed: int, losses: list[float], dice: float) -> dict[str, Any]:
    """Return a run as `curves` records it."""
    scores = {"mean_dice": dice}
    return {"path": path, "seed": seed, "fields": "", "losses": losses, "training_s": 1.0, "scores": scores}


RUNS = [
    run("fast", 0, [1.0, 0.5, 0.4, 0.3], 0.880),
    run("plain", 0, [1.01, 0.51, 0.41, 0.31], 0.882),
    run("fast", 1, [1.2, 0.7, 0.6, 0.5], 0.884),
    run("plain", 1, [1.2, 0.7, 0.6, 0.5], 0.884),
]


def test_epochs_that_fit_follow_from_the_pace_of_a_short_run() -> None:
    lines = [Line(at, f"epoch {n} of 4: loss 1") for n, at in enumerate((12.0, 14.0, 16.0, 19.0), 1)]
    pace = Pace.of(Watched(20.0, [Line(11.0, "a warning"), *lines]), validate_s=1.0)
    assert pace == Pace(start_s=10.0, epoch_s=2.0, validation_s=1.0, end_s=1.0)
    epochs = pace.epochs_within(100.0, validations=5, margin=0.05)
    assert epochs == 39
    assert pace.start_s + epochs * pace.epoch_s + 5 * pace.validation_s + pace.end_s <= 95
    assert pace.epochs_within(5.0, validations=5, margin=0.0) == 1


def test_paths_are_held_against_the_spread_of_seeds() -> None:
    result = comparison(RUNS, smooth=1)
    assert result is not None
    assert result["loss_paths"] == pytest.approx({"mean": 0.01, "late": 0.01})
    assert result["loss_seeds"] == pytest.approx({"mean": 0.19, "late": 0.19})
    assert result["loss_agrees"]
    assert result["dice_within_0_005"]
    assert result["dice_difference"] == pytest.approx(-0.001)
    far = comparison([*RUNS[:3], run("plain", 1, [9.0, 9.0, 9.0, 9.0], 0.7)])
    assert far is not None
    assert not far["loss_agrees"]
    assert not far["dice_within_0_005"]
    assert comparison(RUNS[:3]) is None


def test_seeds_that_differ_at_first_do_not_excuse_paths_that_differ_later() -> None:
    late = [run("fast", seed, [9.0 * seed, 9.0 * seed, 0.3, 0.3], 0.88) for seed in (0, 1)]
    late += [run("plain", seed, [9.0 * seed, 9.0 * seed, 0.4, 0.4], 0.88) for seed in (0, 1)]
    result = comparison(late, smooth=1)
    assert result is not None
    assert result["loss_paths"]["mean"] < result["loss_seeds"]["mean"]
    assert not result["loss_agrees"]


def test_smoothing_a_short_curve() -> None:
    assert smoothed([1.0, 2.0, 3.0], 2) == [1.5, 2.5]
    assert smoothed([1.0, 3.0], 4) == [2.0]


def test_spans_that_overlap_count_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0
    assert covered([]) == 0.0


def test_command_that_fails_says_so_without_paths(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(f"print('reading'); raise SystemExit('gone: {tmp_path}/data')")
    with pytest.raises(training_processes.FailedError) as failed:
        training_processes.watch_command([sys.executable, str(script)], echo=False)
    assert failed.value.short == "gone: ..."


def test_without_nvidia_smi_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with training_processes.Gpu() as gpu:
        pass
    assert gpu.between(0, 1e9) is None


@pytest.mark.parametrize("failed", [False, True])
def test_page_and_figures_of_runs(tmp_path: Path, failed: bool) -> None:
    hardware = {"cpu": "a", "cores": 2, "memory_gib": 1.0}
    settings = {"steps": 100, "window": 25, "plain": "x=y", "curve_cases": 2, "epoch_steps": 5, "quick": False}
    settings |= {"volumes": 2, "side": 64, "real_ct": False, "profile_steps": 3, "mirror": True, "fields": ["a=b"]}
    score = {"error": "no"} if failed else {"mean_dice": 0.9, "targets": {"a": 0.9}, "standard_error": 0.01}
    summary = {"training_s": 99.0, "budget_s": 100.0, "steps": 10, "patches": 80, "step_ms": 5.0, "prepare_s": 1.0}
    summary |= {"within_budget": not failed}
    common = {"hardware": hardware, "settings": settings}
    runs = [{**row, "error": "no"} for row in RUNS[:1]] + RUNS[1:] if failed else RUNS
    disk = {"variant": "v", "patches_per_s": 80.0, "step_ms": 25.0, "gpu": {"busy_share": 0.95}, "profile": None}
    disk |= {"waited_share": 0.01, "memory_bytes": 1e9, "within_epochs_patches_per_s": [70.0, 80.0]}
    disk |= {"stall": {"sentence": "The step."}}
    documents: dict[str, dict[str, Any]] = {
        "hippocampus": {
            **common,
            "split": {"trained_on": 5, "held_out": ["a"], "rule": "fold 0"},
            "summary": {**summary, "seconds": {"start": 9.0}},
            "scores": {"mirrored": score, "plain": score},
            "peer": compare_training.NNUNET,
            "curve": [{"at_s": 1.0, "mean_dice": None}, {"at_s": 2.0, "mean_dice": 0.5}],
        },
        "curves": {**common, "summary": None if failed else comparison(RUNS), "runs": runs},
        "disk": {**common, "prepared_bytes": 1, "summary": [{"variant": "v", "error": "no"} if failed else disk]},
    }
    for name, document in documents.items():
        document = json.loads(json.dumps(document))
        text = getattr(training_report, name)(Results({}, frozenset()), document)
        assert ("failed: no" in text) == failed
        getattr(training_report, f"draw_{name}")(document, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
