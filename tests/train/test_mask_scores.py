"""Scores of masks from any tool: real files, compared with scores that are computed by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK

from voxlane.cli.main import main
from voxlane.errors import BadCasesError, LayoutError
from voxlane.train.mask_scores import ScoreConfig, score_masks

AFFINE = np.diag([1.0, 2.0, 3.0, 1.0])


def save(path: Path, values: np.ndarray, affine: np.ndarray = AFFINE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values.astype(np.uint8), affine), path)


def make_box(*sizes: int, value: int = 1) -> np.ndarray:
    values = np.zeros((20, 16, 12))
    values[tuple(slice(2, 2 + size) for size in sizes)] = value
    return values


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """Case a: a box of 8 x 6 x 4 predicted as one of 4 x 6 x 4; b: exact, with a second class; c: only background."""
    masks, labels = tmp_path / "masks", tmp_path / "labels"
    save(labels / "a.nii.gz", make_box(8, 6, 4))
    save(masks / "a.nii.gz", make_box(4, 6, 4))
    both = make_box(8, 6, 4) + make_box(2, 2, 2, value=2)
    save(labels / "b.nii.gz", both)
    save(masks / "b.nii.gz", both)
    save(labels / "c.nii.gz", make_box(0, 0, 0))
    save(masks / "c.nii.gz", make_box(0, 0, 0))
    return str(masks), str(labels)


def test_scores_are_those_computed_by_hand(folders: tuple[str, str]) -> None:
    result, description = score_masks(*folders, progress=False)
    assert description.targets == ("1", "3"), "values without names are classes of their own"
    a, b, c = result.cases
    assert a["1"]["dice"] == pytest.approx(2 * 96 / (96 + 192))
    assert a["1"]["volume_true_ml"] == pytest.approx(192 * 6 / 1000)
    assert a["1"]["hd95_mm"] == pytest.approx(4.0), "the far side of the label is 4 voxels of 1 mm away"
    assert 0 < a["1"]["surface_dice"] < 1
    assert np.isnan(a["3"]["dice"])
    assert b["1"]["dice"] == b["3"]["dice"] == b["1"]["surface_dice"] == 1.0
    assert (b["3"]["hd95_mm"], b["3"]["volume_predicted_ml"]) == (0.0, pytest.approx(8 * 6 / 1000))
    assert np.isnan(c["1"]["dice"])
    dice = result.summary["targets"]["1"]["dice"]
    assert (dice["mean"], dice["count"], dice["not_scored"]) == (pytest.approx((2 / 3 + 1) / 2), 2, 1)
    assert dice["mean_ci95"] == [pytest.approx(2 / 3), 1.0]


def test_regions_and_names(folders: tuple[str, str]) -> None:
    config = ScoreConfig(labels={"organ": 1, "tumour": 3}, regions={"all": (1, 3), "tumour": (3,)})
    result, description = score_masks(*folders, config, progress=False)
    assert description.targets == ("all", "tumour")
    assert result.cases[1]["all"]["volume_true_ml"] == pytest.approx(192 * 6 / 1000)


def test_same_grid_in_another_order_of_axes(folders: tuple[str, str]) -> None:
    """A mask that another tool wrote with other axes and in another format is the same mask."""
    masks, labels = folders
    image = SimpleITK.ReadImage(f"{masks}/a.nii.gz")
    Path(masks, "a.nii.gz").unlink()
    SimpleITK.WriteImage(SimpleITK.DICOMOrient(image, "PSL"), f"{masks}/a.mha")
    result, _ = score_masks(masks, labels, progress=False)
    assert result.cases[0]["1"]["dice"] == pytest.approx(2 / 3)
    assert result.summary["problems"] == []


def test_mistakes_are_named_and_the_rest_is_scored(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masks, labels = Path(folders[0]), Path(folders[1])
    save(labels / "shape.nii.gz", make_box(3, 3, 3))
    save(masks / "shape.nii.gz", np.zeros((20, 16, 11)))
    save(labels / "moved.nii.gz", make_box(3, 3, 3))
    shifted = AFFINE.copy()
    shifted[0, 3] = 5
    save(masks / "moved.nii.gz", make_box(3, 3, 3), shifted)
    save(labels / "only_label.nii.gz", make_box(3, 3, 3))
    save(masks / "only_mask.nii.gz", make_box(3, 3, 3))
    save(labels / "value.nii.gz", make_box(3, 3, 3))
    save(masks / "value.nii.gz", make_box(3, 3, 3, value=9))
    save(labels / "broken.nii.gz", make_box(3, 3, 3))
    (masks / "broken.nii.gz").write_bytes(b"not a scan")
    words = ["score", str(masks), str(labels), "labels={organ: 1, tumour: 3}", "--no-progress"]
    out = tmp_path / "scores"
    assert main([*words, "-o", str(out)]) == 1
    printed = capsys.readouterr()
    assert "organ" in printed.out
    assert "2,000 resamples of the cases" in printed.out
    for line in (
        "shape: mask and label have different grids: the shapes differ: 11 x 16 x 20 and 12 x 16 x 20 voxels",
        "moved: mask and label have different grids: ",
        "only_label: the label has no mask",
        "only_mask: the mask has no label",
        "value: values 9 are not in labels",
        "broken: ",
        "6 cases of 9 could not be scored; the means are of the others. Correct them, or leave them out with bad_cases",
    ):
        assert line in printed.err
    summary = json.loads((out / "summary.json").read_text())
    assert len(summary["problems"]) == 6
    assert summary["targets"]["organ"]["dice"]["count"] == 2
    rows = list(csv.DictReader((out / "cases.csv").read_text().splitlines()))
    assert [(row["case"], row["fold"]) for row in rows] == [("a", ""), ("b", ""), ("c", "")]
    assert main([*words, "bad_cases=exclude", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [case["case"] for case in document["scores"]] == ["a", "b", "c"]


def test_one_mask(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", f"{folders[0]}/a.nii.gz", f"{folders[1]}/a.nii.gz", "--no-progress"]) == 0
    assert "0.667" in capsys.readouterr().out


def test_nothing_to_score(tmp_path: Path, folders: tuple[str, str]) -> None:
    for config in (ScoreConfig(), ScoreConfig(labels={"organ": 1})):
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / "a.nii.gz").write_bytes(b"not a scan")
        with pytest.raises(BadCasesError, match=r"bad: no (case|voxel) (.|\n)*a  +unreadable"):
            score_masks(str(tmp_path / "bad"), folders[1], config, progress=False)
    save(tmp_path / "other" / "z.nii.gz", make_box(1, 1, 1))
    with pytest.raises(
        LayoutError, match=r"no mask has a label of the same name(.|\n)*Give each mask the name of its label"
    ):
        score_masks(str(tmp_path / "other"), folders[1], progress=False)
