"""Tests of evaluation: every case is scored once, by a network that was not trained on its patient."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from tests.conftest import Bucket
from tests.train import tiny_runs
from tests.train.test_run import edit_facts
from voxlane.errors import ConfigError, RunError
from voxlane.model import metrics
from voxlane.train import evaluate as evaluation
from voxlane.train.evaluate import EvaluateConfig, case_dice, evaluate, format_csv, format_table
from voxlane.train.fit import train
from voxlane.train.predictor import PredictConfig, Predictor
from voxlane.train.run import Run, TrainedRun, find_runs
from voxlane.volume.prepare import PrepareConfig, prepare
from voxlane.volume.prepared_dataset import Prepared
from voxlane.volume.scan import read_label, read_scan


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scans, the dataset prepared from them, and one run per fold."""
    folder = tmp_path_factory.mktemp("evaluate")
    tiny_runs.train_folds(folder / "cv", tiny_runs.prepare_balls(folder))
    return folder


@pytest.fixture
def runs(root: Path) -> list[Run]:
    return find_runs(str(root / "cv"))


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the runs, to damage; they share the dataset."""
    return Path(shutil.copytree(root / "cv", tmp_path / "cv"))


def read_result(out: Path, name: str) -> Any:
    return json.loads((out / "evaluation" / name).read_text())


def test_one_run_scores_its_fold(root: Path, runs: list[Run], tmp_path: Path) -> None:
    trained = TrainedRun.load(runs[0])
    result = evaluate(runs[:1], Run(str(tmp_path)), progress=False)
    assert result.folder_uri == f"file://{tmp_path}/evaluation/validation"
    assert [case["case"] for case in result.cases] == sorted(trained.held_out_cases)
    predictor = Predictor.load(runs[:1])
    for case in result.cases:
        scan = read_scan(str(root / "scans" / f"{case['case']}.nii.gz"))
        truth, geometry = read_label(str(root / "scans" / f"{case['case']}-label.nii.gz"))
        mask, mask_geometry = read_label(str(tmp_path / f"evaluation/validation/masks/{case['case']}.nii.gz"))
        assert mask_geometry == geometry
        # The prepared volume is the scan rounded to one unit, so a few borderline voxels may differ.
        assert (mask != predictor.predict(scan.image, geometry.spacing)).mean() < 0.01
        expected = metrics.score_case(mask, truth, geometry.spacing, trained.description)
        for target, scores in expected.items():
            assert case[target] == pytest.approx(scores, nan_ok=True)
    listed = read_result(tmp_path, "validation/cases.json")
    assert [case["case"] for case in listed] == [case["case"] for case in result.cases]
    assert listed[0]["ball"]["dice"] == result.cases[0]["ball"]["dice"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "evaluation/validation/cases.csv").read_text())))
    assert [row["case"] for row in rows] == [case["case"] for case in result.cases]
    for row, case in zip(rows, result.cases, strict=True):
        assert row["fold"] == "0"
        for target in ("ball", "core"):
            for measure in ("dice", "hd95_mm", "surface_dice", "volume_true_ml", "volume_predicted_ml"):
                assert float(row[f"{target}/{measure}"]) == pytest.approx(case[target][measure], rel=1e-5)
    summary = read_result(tmp_path, "validation/summary.json")
    assert summary["rule"] == metrics.EMPTY_TARGET_RULE
    assert summary["cases"] == len(trained.held_out_cases)
    assert summary["folds"] == [0]
    assert summary["dataset_cases"] == 6
    mean = np.mean([case["ball"]["dice"] for case in result.cases])
    assert summary["targets"]["ball"]["dice"]["mean"] == pytest.approx(mean)
    pictures = sorted(path.stem for path in (tmp_path / "evaluation/validation/overlays").iterdir())
    assert pictures == [case["case"] for case in result.cases]
    assert "ball" in format_table(result, trained.description)


def test_cross_validation_scores_every_case_by_the_run_that_held_it_out(
    root: Path, runs: list[Run], tmp_path: Path
) -> None:
    result = evaluate(runs, Run(str(tmp_path)), EvaluateConfig(masks=False), progress=False)
    assert result.folder_uri.endswith("/evaluation/cross-validation")
    assert [case["case"] for case in result.cases] == tiny_runs.case_ids()
    for case in result.cases:
        assert case["case"] not in TrainedRun.load(runs[case["fold"]]).training_cases
    separate = [evaluate([run], Run(str(tmp_path)), EvaluateConfig(masks=False), progress=False) for run in runs]
    cases = sorted((case for result in separate for case in result.cases), key=lambda case: str(case["case"]))
    assert cases == result.cases
    assert result.summary["folds"] == [0, 1]
    assert not (tmp_path / "evaluation/cross-validation/masks").exists()


def test_prepared_space_needs_no_source(root: Path, runs: list[Run], tmp_path: Path) -> None:
    config = EvaluateConfig(space="prepared", predict=PredictConfig(overlap=0.0))
    hidden = (root / "scans").rename(root / "gone")
    try:
        result = evaluate(runs, Run(str(tmp_path)), config, progress=False)
        assert result.summary["space"] == "prepared"
        assert len(result.cases) == 6
        assert len(list((tmp_path / "evaluation/cross-validation/masks").iterdir())) == 6
        with pytest.raises(
            RunError, match=r"case_\d+-label.nii.gz: the label of case .* does not exist.*space=prepared"
        ):
            evaluate(runs, Run(str(tmp_path)), progress=False)
    finally:
        hidden.rename(root / "scans")


def test_changed_label_is_reported(root: Path, runs: list[Run], tmp_path: Path) -> None:
    case = TrainedRun.load(runs[0]).held_out_cases[0]
    file = root / "scans" / f"{case}-label.nii.gz"
    body = file.read_bytes()
    image = nibabel.load(file)
    values = np.asarray(image.dataobj)
    try:
        nibabel.save(nibabel.Nifti1Image(values[:-1], image.affine), file)
        with pytest.raises(RunError, match=r"has changed since it was prepared.*space=prepared"):
            evaluate(runs[:1], Run(str(tmp_path)), progress=False)
        nibabel.save(nibabel.Nifti1Image(values + 5, image.affine), file)
        with pytest.raises(RunError, match="has changed since it was prepared"):
            evaluate(runs[:1], Run(str(tmp_path)), progress=False)
        file.write_bytes(body[:100])
        with pytest.raises(RunError, match=r"cannot be read anymore: truncated.*space=prepared"):
            evaluate(runs[:1], Run(str(tmp_path)), progress=False)
    finally:
        file.write_bytes(body)


def test_overlays_are_of_the_worst_cases(runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_OVERLAYS", 2)
    out = tmp_path / "evaluation/cross-validation"
    for folder, name in (("overlays", "old.png"), ("masks", "old.nii.gz")):
        (out / folder).mkdir(parents=True)
        (out / folder / name).write_bytes(b"of a previous evaluation")
    (out / "notes.txt").write_text("mine")
    result = evaluate(runs, Run(str(tmp_path)), progress=False)
    worst = sorted(result.cases, key=case_dice)[:2]
    assert {path.stem for path in (out / "overlays").iterdir()} == {case["case"] for case in worst}
    assert {path.name for path in (out / "masks").iterdir()} == {f"{case['case']}.nii.gz" for case in result.cases}
    assert (out / "notes.txt").exists()


def test_cases_without_a_target() -> None:
    absent, wrong = {"dice": math.nan}, {"dice": 0.0}
    assert case_dice({"case": "a", "fold": 0, "ball": absent, "core": absent}) == 1.0
    assert case_dice({"case": "a", "fold": 0, "ball": wrong, "core": absent}) == 0.0
    assert case_dice({"case": "a", "fold": 0, "ball": wrong, "core": {"dice": 0.5}}) == 0.25


def test_csv_has_empty_cells_for_missing_scores(runs: list[Run]) -> None:
    description = TrainedRun.load(runs[0]).description
    empty = {"dice": math.nan, "hd95_mm": math.nan, "surface_dice": math.nan}
    volumes = {"volume_true_ml": 0.0, "volume_predicted_ml": 0.0}
    text = format_csv(
        [{"case": "a,b", "fold": 1, "ball": {**empty, **volumes}, "core": {**empty, **volumes}}], description
    )
    row = next(csv.DictReader(io.StringIO(text)))
    assert (row["case"], row["fold"], row["ball/dice"], row["core/volume_true_ml"]) == ("a,b", "1", "", "0")


def test_same_fold_twice(runs: list[Run]) -> None:
    with pytest.raises(ConfigError, match=r"hold out the same cases, such as case_.*Give one run per fold"):
        evaluate([runs[0], runs[1], runs[0]], progress=False)


def test_run_on_all_cases(copy: Path) -> None:
    def hold_out_none(facts: dict[str, Any]) -> None:
        facts["fold"] = None
        facts["cases"] = {"train": facts["cases"]["train"] + facts["cases"]["validation"], "validation": []}

    edit_facts(copy / "fold_0", hold_out_none)
    with pytest.raises(RunError, match=r"trained on all cases, so none is left.*fold=0"):
        evaluate(find_runs(str(copy)), progress=False)


def test_another_dataset(copy: Path) -> None:
    edit_facts(copy / "fold_1", lambda facts: facts["data"].update(fingerprint="0" * 16))
    with pytest.raises(ConfigError, match=r"fold_1: this run was trained on another dataset than .*fold_0"):
        evaluate(find_runs(str(copy)), progress=False)


def test_dataset_that_was_prepared_again(copy: Path, tmp_path: Path) -> None:
    listed = tiny_runs.write_cases(tmp_path / "scans", tiny_runs.case_ids(), seed=1)
    config = PrepareConfig(folds=2, workers=1)
    other = prepare(str(listed), str(tmp_path / "prepared"), config, progress=False).prepared
    with pytest.raises(RunError, match=r"prepared is not the dataset of the run: it was prepared with another plan"):
        evaluate([Run(str(copy / "fold_0"))], data=other.uri, progress=False)


def test_patient_on_both_sides(root: Path, runs: list[Run]) -> None:
    trained = [TrainedRun.load(run) for run in runs]
    prepared = Prepared.load(trained[0].data_uri)
    evaluation.check_folds(runs, trained, prepared)
    index = prepared.table.column_names.index("patient")
    table = prepared.table.set_column(index, "patient", [["the same patient"] * len(prepared)])
    object.__setattr__(prepared, "table", table)
    with pytest.raises(RunError, match="trained on the patient of its held-out case"):
        evaluation.check_folds(runs, trained, prepared)


def test_in_a_bucket(root: Path, gcs: Bucket) -> None:
    for path in (root / "cv").rglob("*"):
        if path.is_file() and "evaluation" not in path.parts:
            gcs.store.put(f"cv/{path.relative_to(root / 'cv')}", path.read_bytes())
    runs = find_runs("gs://bkt/cv", gcs.config)
    out = Run("gs://bkt/cv", gcs.config)
    result = evaluate(runs, out, EvaluateConfig(space="prepared"), progress=False)
    assert result.folder_uri == "gs://bkt/cv/evaluation/cross-validation"
    assert out.read_json("evaluation/cross-validation/summary.json")["cases"] == 6
    mask, _ = read_label("gs://bkt/cv/evaluation/cross-validation/masks/case_1.nii.gz", gcs.config)
    assert mask.shape == (22, 24, 26)


def test_cases_may_have_any_name(tmp_path: Path) -> None:
    odd = "a b%20c é+"
    data = tiny_runs.prepare_balls(tmp_path, [odd, *tiny_runs.case_ids(4)])
    prepared = Prepared.load(data)
    fold = prepared.case(prepared.ids.index(odd)).fold
    train(data, str(tmp_path / "run"), {**tiny_runs.CONFIG, "fold": fold}, progress=False)
    for _ in range(2):  # the second overwrites the files of the first
        result = evaluate([Run(str(tmp_path / "run"))], progress=False)
    assert odd in [case["case"] for case in result.cases]
    for folder in ("masks", "overlays"):
        assert len(list((tmp_path / "run/evaluation/validation" / folder).iterdir())) == len(result.cases)
