"""Every case scored once, by the network that did not see its patient; and what is written of it."""

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
from tests.train import made
from tests.train.test_run import change
from voxlane.errors import ConfigError, RunError
from voxlane.model import scores
from voxlane.train import evaluate as evaluation
from voxlane.train.evaluate import EvaluateConfig, case_dice, evaluate, table, to_csv
from voxlane.train.fit import train
from voxlane.train.predictor import PredictConfig, Predictor
from voxlane.train.run import Run, Trained, runs_at
from voxlane.volume.prepare import PrepareConfig, prepare
from voxlane.volume.prepared import Prepared, fold_of
from voxlane.volume.scan import read_label, read_scan


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scans, the dataset prepared from them, and one run a fold."""
    folder = tmp_path_factory.mktemp("evaluate")
    made.trained(folder / "cv", made.prepared(folder))
    return folder


@pytest.fixture
def runs(root: Path) -> list[Run]:
    return runs_at(str(root / "cv"))


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """The runs again, to spoil; their dataset is the first one's."""
    return Path(shutil.copytree(root / "cv", tmp_path / "cv"))


def read(out: Path, name: str) -> Any:
    return json.loads((out / "evaluation" / name).read_text())


def test_one_run_scores_its_fold(root: Path, runs: list[Run], tmp_path: Path) -> None:
    one = Trained.of(runs[0])
    done = evaluate(runs[:1], Run(str(tmp_path)), progress=False)
    assert done.where == f"file://{tmp_path}/evaluation/validation"
    assert [case["case"] for case in done.cases] == sorted(one.held_out)
    predictor = Predictor.load(runs[:1])
    for case in done.cases:
        scan = read_scan(str(root / "scans" / f"{case['case']}.nii.gz"))
        truth, geometry = read_label(str(root / "scans" / f"{case['case']}-label.nii.gz"))
        mask, own = read_label(str(tmp_path / f"evaluation/validation/masks/{case['case']}.nii.gz"))
        assert own == geometry
        # The prepared volume is the scan rounded to one unit: a few voxels on the fence may fall to the other side.
        assert (mask != predictor.predict(scan.image, geometry.spacing)).mean() < 0.01
        again = scores.score_case(mask, truth, geometry.spacing, one.description)
        for target, wanted in again.items():
            assert case[target] == pytest.approx(wanted, nan_ok=True)
    listed = read(tmp_path, "validation/cases.json")
    assert [case["case"] for case in listed] == [case["case"] for case in done.cases]
    assert listed[0]["ball"]["dice"] == done.cases[0]["ball"]["dice"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "evaluation/validation/cases.csv").read_text())))
    assert [row["case"] for row in rows] == [case["case"] for case in done.cases]
    for row, case in zip(rows, done.cases, strict=True):
        assert row["fold"] == "0"
        for target in ("ball", "core"):
            for measure in ("dice", "hd95_mm", "surface_dice", "volume_true_ml", "volume_predicted_ml"):
                assert float(row[f"{target}/{measure}"]) == pytest.approx(case[target][measure], rel=1e-5)
    summary = read(tmp_path, "validation/summary.json")
    assert summary["rule"] == scores.RULE
    assert summary["cases"] == len(one.held_out)
    assert summary["folds"] == [0]
    assert summary["dataset_cases"] == 6
    mean = np.mean([case["ball"]["dice"] for case in done.cases])
    assert summary["targets"]["ball"]["dice"]["mean"] == pytest.approx(mean)
    pictures = sorted(path.stem for path in (tmp_path / "evaluation/validation/overlays").iterdir())
    assert pictures == [case["case"] for case in done.cases]
    assert "ball" in table(done, one.description)


def test_cross_validation_scores_every_case_once_by_the_run_that_did_not_see_it(
    root: Path, runs: list[Run], tmp_path: Path
) -> None:
    done = evaluate(runs, Run(str(tmp_path)), EvaluateConfig(masks=False), progress=False)
    assert done.where.endswith("/evaluation/cross-validation")
    assert [case["case"] for case in done.cases] == made.ids()
    for case in done.cases:
        assert case["case"] not in Trained.of(runs[case["fold"]]).trained_on
    apart = [evaluate([run], Run(str(tmp_path)), EvaluateConfig(masks=False), progress=False) for run in runs]
    alone = sorted((case for one in apart for case in one.cases), key=lambda case: str(case["case"]))
    assert alone == done.cases
    assert done.summary["folds"] == [0, 1]
    assert not (tmp_path / "evaluation/cross-validation/masks").exists()


def test_prepared_space_needs_no_source(root: Path, runs: list[Run], tmp_path: Path) -> None:
    how = EvaluateConfig(space="prepared", predict=PredictConfig(overlap=0.0))
    hidden = (root / "scans").rename(root / "gone")
    try:
        done = evaluate(runs, Run(str(tmp_path)), how, progress=False)
        assert done.summary["space"] == "prepared"
        assert len(done.cases) == 6
        assert len(list((tmp_path / "evaluation/cross-validation/masks").iterdir())) == 6
        with pytest.raises(RunError, match=r"case_\d+-label.nii.gz: the label of case .* is gone.*space=prepared"):
            evaluate(runs, Run(str(tmp_path)), progress=False)
    finally:
        hidden.rename(root / "scans")


def test_a_label_that_is_another_now(root: Path, runs: list[Run], tmp_path: Path) -> None:
    case = Trained.of(runs[0]).held_out[0]
    file = root / "scans" / f"{case}-label.nii.gz"
    body = file.read_bytes()
    image = nibabel.load(file)
    values = np.asarray(image.dataobj)
    try:
        nibabel.save(nibabel.Nifti1Image(values[:-1], image.affine), file)
        with pytest.raises(RunError, match=r"not the one that was prepared.*space=prepared"):
            evaluate(runs[:1], Run(str(tmp_path)), progress=False)
        nibabel.save(nibabel.Nifti1Image(values + 5, image.affine), file)
        with pytest.raises(RunError, match="not the one that was prepared"):
            evaluate(runs[:1], Run(str(tmp_path)), progress=False)
        file.write_bytes(body[:100])
        with pytest.raises(RunError, match=r"cannot be read now: truncated.*space=prepared"):
            evaluate(runs[:1], Run(str(tmp_path)), progress=False)
    finally:
        file.write_bytes(body)


def test_overlays_are_of_the_worst_cases(runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "OVERLAYS", 2)
    out = tmp_path / "evaluation/cross-validation"
    for folder, name in (("overlays", "old.png"), ("masks", "old.nii.gz")):
        (out / folder).mkdir(parents=True)
        (out / folder / name).write_bytes(b"of an evaluation before")
    (out / "notes.txt").write_text("mine")
    done = evaluate(runs, Run(str(tmp_path)), progress=False)
    worst = sorted(done.cases, key=case_dice)[:2]
    assert {path.stem for path in (out / "overlays").iterdir()} == {case["case"] for case in worst}
    assert {path.name for path in (out / "masks").iterdir()} == {f"{case['case']}.nii.gz" for case in done.cases}
    assert (out / "notes.txt").exists()


def test_cases_without_a_target() -> None:
    nothing, wrong = {"dice": math.nan}, {"dice": 0.0}
    assert case_dice({"case": "a", "fold": 0, "ball": nothing, "core": nothing}) == 1.0
    assert case_dice({"case": "a", "fold": 0, "ball": wrong, "core": nothing}) == 0.0
    assert case_dice({"case": "a", "fold": 0, "ball": wrong, "core": {"dice": 0.5}}) == 0.25


def test_csv_leaves_out_what_was_not_scored(runs: list[Run]) -> None:
    description = Trained.of(runs[0]).description
    empty = {"dice": math.nan, "hd95_mm": math.nan, "surface_dice": math.nan}
    volumes = {"volume_true_ml": 0.0, "volume_predicted_ml": 0.0}
    text = to_csv([{"case": "a,b", "fold": 1, "ball": {**empty, **volumes}, "core": {**empty, **volumes}}], description)
    row = next(csv.DictReader(io.StringIO(text)))
    assert (row["case"], row["fold"], row["ball/dice"], row["core/volume_true_ml"]) == ("a,b", "1", "", "0")


def test_the_same_fold_twice(runs: list[Run]) -> None:
    with pytest.raises(ConfigError, match=r"hold out the same cases, such as case_.*Evaluate one run a fold"):
        evaluate([runs[0], runs[1], runs[0]], progress=False)


def test_a_run_on_all_cases(copy: Path) -> None:
    def every(facts: dict[str, Any]) -> None:
        facts["fold"] = None
        facts["cases"] = {"train": facts["cases"]["train"] + facts["cases"]["validation"], "validation": []}

    change(copy / "fold_0", every)
    with pytest.raises(RunError, match=r"trained on all cases: none is left.*fold=0"):
        evaluate(runs_at(str(copy)), progress=False)


def test_another_dataset(copy: Path) -> None:
    change(copy / "fold_1", lambda facts: facts["data"].update(fingerprint="0"))
    with pytest.raises(ConfigError, match=r"fold_1: this run was trained on another dataset than .*fold_0"):
        evaluate(runs_at(str(copy)), progress=False)


def test_a_dataset_prepared_anew(copy: Path, tmp_path: Path) -> None:
    listed = made.write_cases(tmp_path / "scans", made.ids(), seed=1)
    how = PrepareConfig(folds=2, workers=1)
    other = prepare(str(listed), str(tmp_path / "prepared"), how, progress=False).prepared
    change(copy / "fold_0", lambda facts: facts["data"].update(uri=other.uri))
    with pytest.raises(RunError, match=r"was prepared anew after the run was begun. Train again"):
        evaluate([Run(str(copy / "fold_0"))], progress=False)
    change(copy / "fold_0", lambda facts: facts["data"].update(uri=f"{tmp_path}/none"))
    with pytest.raises(Exception, match="no prepared dataset is here"):
        evaluate([Run(str(copy / "fold_0"))], progress=False)


def test_a_patient_on_both_sides(root: Path, runs: list[Run]) -> None:
    trained = [Trained.of(run) for run in runs]
    prepared = Prepared.load(trained[0].data_uri)
    evaluation.check_folds(runs, trained, prepared)
    index = prepared.table.column_names.index("patient")
    one = prepared.table.set_column(index, "patient", [["the same patient"] * len(prepared)])
    object.__setattr__(prepared, "table", one)
    with pytest.raises(RunError, match="trained on the patient of its held-out case"):
        evaluation.check_folds(runs, trained, prepared)


def test_in_a_bucket(root: Path, gcs: Bucket) -> None:
    for path in (root / "cv").rglob("*"):
        if path.is_file() and "evaluation" not in path.parts:
            gcs.store.put(f"cv/{path.relative_to(root / 'cv')}", path.read_bytes())
    runs = runs_at("gs://bkt/cv", gcs.config)
    out = Run("gs://bkt/cv", gcs.config)
    done = evaluate(runs, out, EvaluateConfig(space="prepared"), progress=False)
    assert done.where == "gs://bkt/cv/evaluation/cross-validation"
    assert out.read_json("evaluation/cross-validation/summary.json")["cases"] == 6
    mask, _ = read_label("gs://bkt/cv/evaluation/cross-validation/masks/case_1.nii.gz", gcs.config)
    assert mask.shape == (22, 24, 26)


def test_cases_may_have_any_name(tmp_path: Path) -> None:
    odd = "a b%20c é+"
    data = made.prepared(tmp_path, [odd, *made.ids(4)])
    fold = fold_of(odd, made.FOLDS)
    train(data, str(tmp_path / "run"), {**made.SAID, "fold": fold}, progress=False)
    for _ in range(2):  # the second finds the files of the first, and keeps them
        done = evaluate([Run(str(tmp_path / "run"))], progress=False)
    assert odd in [case["case"] for case in done.cases]
    for folder in ("masks", "overlays"):
        assert len(list((tmp_path / "run/evaluation/validation" / folder).iterdir())) == len(done.cases)
