"""Datasets that nnU-Net preprocessed become prepared datasets with the same volumes."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.nnunet_folders import DATASET, INTENSITIES, PATCH, SPACING, make_plans
from voxlane.cli.main import main
from voxlane.errors import ConfigError, ImportedModelError, PreparedError, UnsafeError
from voxlane.train.imports.nnunet_plans import read_configuration
from voxlane.train.imports.nnunet_preprocessed import PreprocessedFolder, import_preprocessed
from voxlane.volume.case_volumes import Cases
from voxlane.volume.geometry import Geometry
from voxlane.volume.grid import image_to_grid, label_to_grid, plan_grid
from voxlane.volume.prepared_dataset import Prepared

MIRRORED = np.diag([-0.9, -1.3, 2.1, 1.0])
CASES = ("a", "b", "c")
Save = Callable[[str, np.ndarray], None]


def make_scan(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a scan (1, z, y, x) and its label (z, y, x) along the axes of the file; a border is empty."""
    generator = np.random.default_rng(number)
    image = generator.normal(50, 9, (1, 12, 22, 18)).astype(np.float32)
    image[:, :3] = image[..., -2:] = 0
    label = np.zeros(image.shape[1:], np.uint8)
    label[5:8, 4:12, 3:9], label[8:10, 4:12, 3:9] = 1, 2
    return image, label


def write_preprocessed(folder: Path, transpose: tuple[int, int, int] = (0, 1, 2), *, compressed: bool = False) -> Path:
    """Write what nnU-Net writes, with its rules as voxlane implements them, along the axes of its network."""
    plans = make_plans() | {"transpose_forward": list(transpose)}
    volumes = folder / "nnUNetPlans_3d_fullres"
    volumes.mkdir(parents=True)
    plan = read_configuration(plans, "3d_fullres", "").plan
    for number, case in enumerate(CASES):
        image, label = make_scan(number)
        grid = plan_grid(image, (2.1, 1.3, 0.9), plan)
        outside = label_to_grid((image[0] != 0).astype(np.uint8), grid, plan) == 0
        seg = np.where(outside, -1, label_to_grid(label, grid, plan).astype(np.int8)).transpose(transpose)[None]
        data = image_to_grid(image, grid, plan).transpose(0, *(1 + axis for axis in transpose))
        box = [[grid.crop_start[axis], grid.crop_stop[axis]] for axis in transpose]
        properties = {
            "sitk_stuff": {"spacing": (0.9, 1.3, 2.1), "origin": (0, 0, 0), "direction": (1, 0, 0, 0, 1, 0, 0, 0, 1)},
            "spacing": [np.float64(2.1), np.float64(1.3), np.float64(0.9)],
            "shape_before_cropping": tuple(label.shape[axis] for axis in transpose),
            "bbox_used_for_cropping": box,
            "class_locations": {1: np.zeros((4, 4), np.int64)},
        }
        (volumes / f"{case}.pkl").write_bytes(pickle.dumps(properties))
        if compressed:
            blosc2 = pytest.importorskip("blosc2")
            blosc2.asarray(np.ascontiguousarray(data), urlpath=str(volumes / f"{case}.b2nd"))
            blosc2.asarray(np.ascontiguousarray(seg), urlpath=str(volumes / f"{case}_seg.b2nd"))
        else:
            np.savez_compressed(volumes / f"{case}.npz", data=data, seg=seg)
    fingerprint = {
        "foreground_intensity_properties_per_channel": {"0": INTENSITIES | {"min": 0.0, "max": 99.0}},
        "median_relative_size_after_cropping": 0.7,
        "shapes_after_crop": [[9, 22, 16]],
        "spacings": [[2.1, 1.3, 1.0]],
    }
    splits = [{"train": ["b", "c"], "val": ["a"]}, {"train": ["a", "c"], "val": ["b"]}]
    for name, content in (
        ("dataset.json", DATASET),
        ("nnUNetPlans.json", plans),
        ("dataset_fingerprint.json", fingerprint),
        ("splits_final.json", splits),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder


def check_volumes(prepared: Prepared) -> None:
    """Compare every volume with the same scan, prepared along the anatomical axes."""
    cases = Cases(prepared)
    for row, case in enumerate(prepared.ids):
        stored_image, stored_label = make_scan(row)
        geometry = Geometry.of((18, 22, 12), MIRRORED)
        image, label = geometry.from_stored(stored_image), geometry.from_stored(stored_label)
        grid = plan_grid(image, geometry.spacing, prepared.plan)
        volume = cases.open(row)
        actual_image, actual_label = volume.read_whole()
        assert volume.grid == grid, case
        np.testing.assert_allclose(actual_image.numpy(), image_to_grid(image, grid, prepared.plan), atol=2 / 512)
        np.testing.assert_array_equal(actual_label.numpy(), label_to_grid(label, grid, prepared.plan))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("transpose", [(0, 1, 2), (2, 0, 1)])
def test_volumes_equal_prepared_scans(transpose: tuple[int, int, int], compressed: bool, tmp_path: Path) -> None:
    folder = write_preprocessed(tmp_path / "Dataset007_Blobs", transpose, compressed=compressed)
    prepared = import_preprocessed(PreprocessedFolder(str(folder)), str(tmp_path / "out"), progress=False)
    check_volumes(prepared)
    plan = prepared.plan
    if transpose == (0, 1, 2):
        assert (list(plan.patch), list(plan.spacing)) == (PATCH, SPACING)
    assert plan.axes == "anatomical"
    assert prepared.description.labels == DATASET["labels"]
    assert prepared.table.column("fold").to_pylist()[:2] == [0, 1], "as in splits_final.json"
    assert prepared.fingerprint["relative_size"] == 0.7


def test_import_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_preprocessed(tmp_path / "Dataset007_Blobs")
    assert main(["import", str(folder), str(tmp_path / "out"), "--no-progress"]) == 0
    assert capsys.readouterr().out.startswith("Dataset007_Blobs: 3 cases in ")
    check_volumes(Prepared.load(str(tmp_path / "out")))


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


def test_bad_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_preprocessed(tmp_path / "Dataset007_Blobs")

    def read(**options: Any) -> Prepared:
        return import_preprocessed(PreprocessedFolder(str(folder), **options), str(tmp_path / "out"), progress=False)

    with pytest.raises(ImportedModelError, match=r"has no Others.json. Give --plans nnUNetPlans"):
        read(plans_name="Others")
    with pytest.raises(ImportedModelError, match=r"no cases in nnUNetPlans_3d_bigger_batch. Run nnUNetv2_preprocess"):
        read(configuration_name="3d_bigger_batch")
    splits = folder / "splits_final.json"
    before = splits.read_text()
    splits.write_text(json.dumps([{"train": [], "val": ["a"]}] * 2))
    with pytest.raises(ConfigError, match="holds out a in two folds"):
        read()
    splits.write_text(before)
    (folder / "nnUNetPlans_3d_fullres" / "b.pkl").write_bytes(pickle.dumps(RunsCode()))
    with pytest.raises(UnsafeError, match=r"system, and reading it can run code"):
        read()
    assert not (tmp_path / "was-run").exists()
    sideways = {"original_affine": np.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])}
    properties = pickle.loads((folder / "nnUNetPlans_3d_fullres" / "a.pkl").read_bytes()) | {"nibabel_stuff": sideways}
    (folder / "nnUNetPlans_3d_fullres" / "a.pkl").write_bytes(pickle.dumps(properties))
    with pytest.raises(ImportedModelError, match="stores its axes in another order than x, y, z"):
        read()
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "prepared.json").write_text("{}")
    with pytest.raises(PreparedError, match="DST already holds a prepared dataset"):
        read()
