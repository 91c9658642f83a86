"""Evaluation of a run on labelled scans that are not in its dataset."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from tests.train import tiny_runs
from voxlane.cli.main import main
from voxlane.errors import BadCasesError, ConfigError, LayoutError, RunError
from voxlane.model import metrics
from voxlane.train.external import ExternalConfig, ExternalSet, evaluate_external, find_external_set
from voxlane.train.findings import read_findings
from voxlane.train.predictor import Predictor
from voxlane.train.report import report
from voxlane.train.run import Run, TrainedRun, find_runs
from voxlane.volume.scan import read_label, read_scan

NAMES = ["s_1", "s_2", "s_3"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run per fold, and other scans, in two folders, as a list, and as nnU-Net's raw data."""
    folder = tmp_path_factory.mktemp("external")
    tiny_runs.train_folds(folder / "cv", tiny_runs.prepare_balls(folder))
    tiny_runs.write_cases(folder / "site2", NAMES, seed=7)
    for below in ("images", "labels"):
        (folder / "pairs" / below).mkdir(parents=True)
    for name in NAMES:
        shutil.copy(folder / "site2" / f"{name}.nii.gz", folder / "pairs/images" / f"{name}_0000.nii.gz")
        shutil.copy(folder / "site2" / f"{name}-label.nii.gz", folder / "pairs/labels" / f"{name}.nii.gz")
    return folder


@pytest.fixture
def runs(root: Path) -> list[Run]:
    return find_runs(str(root / "cv"))


@pytest.fixture
def pairs(root: Path, tmp_path: Path) -> Path:
    """A copy of the two folders, to damage."""
    return Path(shutil.copytree(root / "pairs", tmp_path / "pairs"))


def find(pairs: Path, runs: list[Run]) -> ExternalSet:
    description = TrainedRun.load(runs[0]).description
    return find_external_set(str(pairs / "images"), str(pairs / "labels"), description)


def test_all_folds_score_every_scan_in_its_own_grid(root: Path, runs: list[Run], tmp_path: Path) -> None:
    out = Run(str(tmp_path / "out"))
    result = evaluate_external(runs, find(root / "pairs", runs), out, progress=False)
    assert result.folder_uri.endswith("/evaluation/external-pairs")
    assert [case["case"] for case in result.cases] == NAMES
    predictor = Predictor.load(runs)
    for case in result.cases:
        scan = read_scan(str(root / "site2" / f"{case['case']}.nii.gz"))
        truth, geometry = read_label(str(root / "site2" / f"{case['case']}-label.nii.gz"))
        mask, mask_geometry = read_label(f"{result.folder_uri}/masks/{case['case']}.nii.gz")
        assert mask_geometry == geometry
        np.testing.assert_array_equal(mask, predictor.predict(scan.image, geometry.spacing))
        for target, scores in metrics.score_case(mask, truth, geometry.spacing, predictor.description).items():
            assert case[target] == pytest.approx(scores, nan_ok=True)
    assert result.summary["images"] == f"file://{root}/pairs/images"
    assert len(list((tmp_path / "out/evaluation/external-pairs/overlays").iterdir())) == 3


def test_list_and_folders_give_the_same_scores(root: Path, runs: list[Run], tmp_path: Path) -> None:
    description = TrainedRun.load(runs[0]).description
    config = ExternalConfig(masks=False)
    listed = find_external_set(str(root / "site2" / "list.json"), None, description)
    results = [
        evaluate_external(runs[:1], external, Run(str(tmp_path)), config, name=name, progress=False)
        for name, external in (("a", listed), ("b", find(root / "pairs", runs)))
    ]
    assert results[0].cases == results[1].cases
    assert listed.name == "external-list"


def test_the_scores_of_the_run_itself_stay(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(root / "cv/fold_0", tmp_path / "run"))
    assert main(["evaluate", str(run), "masks=false", "--no-progress"]) == 0
    own = {path: path.read_bytes() for path in (run / "evaluation/validation").rglob("*") if path.is_file()}
    words = ["--images", str(root / "pairs/images"), "--labels", str(root / "pairs/labels")]
    assert main(["evaluate", str(run), *words, "--no-progress"]) == 0
    printed = capsys.readouterr()
    assert "95% CI" in printed.out
    assert "warning" not in printed.err
    assert {path: path.read_bytes() for path in own} == own
    names = [evaluation.name for evaluation in read_findings(str(run)).evaluations]
    assert names == ["validation", "external-pairs"]
    report(str(run))
    assert "external-pairs" in (run / "report.html").read_text()
    assert (
        main(["evaluate", str(run), "--images", str(root / "scans/list.json"), "--name", "pairs", "masks=false"]) == 0
    )
    assert "have the names of cases that the run trained on" in capsys.readouterr().err


def test_unpaired_scans_are_named(pairs: Path, runs: list[Run], tmp_path: Path) -> None:
    (pairs / "labels/s_1.nii.gz").rename(pairs / "labels/s_9.nii.gz")
    external = find(pairs, runs)
    with pytest.raises(BadCasesError, match=r"2 scans and labels have no counterpart\n(.|\n)*s_1 (.|\n)*s_9") as raised:
        evaluate_external(runs, external, Run(str(tmp_path / "out")), progress=False)
    assert str(raised.value).endswith("Add them, or score the others with bad_cases=exclude")
    assert not (tmp_path / "out").exists()
    config = ExternalConfig(bad_cases="exclude", masks=False)
    result = evaluate_external(runs[:1], external, Run(str(tmp_path / "out")), config, progress=False)
    assert [case["case"] for case in result.cases] == ["s_2", "s_3"]
    assert {problem["case"] for problem in result.summary["problems"]} == {"s_1", "s_9"}


def test_unusable_files_are_named_and_the_rest_is_scored(
    root: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label = nibabel.load(pairs / "labels/s_1.nii.gz")
    values = np.asarray(label.dataobj)
    nibabel.save(nibabel.Nifti1Image(values[:-2], label.affine), pairs / "labels/s_1.nii.gz")
    nibabel.save(nibabel.Nifti1Image(values * 5, label.affine), pairs / "labels/s_2.nii.gz")
    words = ["--images", str(pairs / "images"), "--labels", str(pairs / "labels"), "-o", str(tmp_path / "out")]
    assert main(["evaluate", str(root / "cv/fold_0"), *words, "masks=false", "--no-progress"]) == 1
    error = capsys.readouterr().err
    assert "s_1: s_1_0000.nii.gz and s_1.nii.gz: the shapes differ" in error
    assert "s_2: " in error
    assert "2 cases of 3 could not be scored" in error
    summary = json.loads((tmp_path / "out/evaluation/external-pairs/summary.json").read_text())
    assert summary["cases"] == 1
    (pairs / "images/s_3_0000.nii.gz").write_bytes(b"not a scan")
    assert main(["evaluate", str(root / "cv/fold_0"), *words, "masks=false", "--no-progress"]) == 1
    assert "no case could be scored" in capsys.readouterr().err


def test_mistakes(root: Path, pairs: Path, runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, external = Run(str(tmp_path / "out")), find(pairs, runs)
    with pytest.raises(ConfigError, match="--name validation: validation, cross-validation are the run's own"):
        evaluate_external(runs, external, out, name="validation")
    with pytest.raises(ConfigError, match="space: scans of another dataset are scored in their own grid"):
        evaluate_external(runs, external, out, ExternalConfig(space="prepared"))
    evaluate_external(runs[:1], external, out, ExternalConfig(masks=False), progress=False)
    other = find(root / "pairs", runs)
    with pytest.raises(RunError, match=r"holds the scores of file://.*/pairs/images. Choose another --name"):
        evaluate_external(runs, other, out, progress=False)
    with pytest.raises(LayoutError, match=r"no scan has a label\n(.|\n)*list the pairs"):
        description = TrainedRun.load(runs[0]).description
        find_external_set(str(pairs / "images"), str(root / "scans"), description)
    document: dict[str, Any] = json.loads((root / "site2/list.json").read_text())
    document["description"]["labels"] = {"background": 0, "core": 1, "ball": 2}
    (root / "site2/swapped.json").write_text(json.dumps(document))
    with pytest.raises(LayoutError, match="label core is 1 here, but 2 in the run's dataset"):
        find_external_set(str(root / "site2/swapped.json"), None, description)
    assert main(["evaluate", str(root / "cv/fold_0"), "--labels", "x"]) == 1
    assert "--labels is for scans outside the dataset. Give --images too" in capsys.readouterr().err
    assert main(["evaluate", str(root / "cv/fold_0"), "bad_cases=exclude"]) == 1
    assert "bad_cases" in capsys.readouterr().err
