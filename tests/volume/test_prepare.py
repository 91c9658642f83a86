"""Preparing scans: all layouts, bad cases, interrupted runs, and repeated runs."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import zarr

from tests.conftest import Bucket
from tests.faults.proxy import Fault, FaultProxy
from tests.volume import sample_data
from voxlane import settings
from voxlane.errors import BadCasesError, ConfigError, LayoutError, NotFoundError, PermissionDeniedError, PreparedError
from voxlane.testing import Access, Emulator, Faults
from voxlane.volume import case_checks, formats, scan
from voxlane.volume.case_volumes import Cases
from voxlane.volume.planner import make_mlperf_plan
from voxlane.volume.prepare import PrepareConfig, foreground_voxels, prepare
from voxlane.volume.prepared_dataset import Prepared

ROOT = Path(__file__).parents[2]
UNNORMALISED_PLAN = {"patch": [16, 16, 16], "spacing": [2.0, 1.0, 1.0], "normalisation": [{"scheme": "none"}]}
"""A plan whose volumes have the original voxels of the scans."""


@pytest.fixture
def scans(tmp_path: Path) -> str:
    return sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19())


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    return tmp_path / "data"


def read_volumes(dst: Path) -> dict[str, bytes]:
    """Return the files of the volumes, without those that depend on the location."""
    return {name: body for name, body in sample_data.read_files(dst).items() if name.startswith("cases/")}


def read_canonical(objects: sample_data.Objects, name: str) -> np.ndarray:
    """Return a scan of a layout as (z, y, x) along the anatomical axes."""
    image = nibabel.as_closest_canonical(nibabel.Nifti1Image.from_bytes(gzip.decompress(objects[name])))
    return np.asarray(image.dataobj).T


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objects", "src", "channels", "targets", "values"),
    [
        (sample_data.make_kits19(3), "", 1, ("kidney", "tumour"), {0, 1, 2}),
        (sample_data.make_msd(), "", 2, ("WT", "TC", "ET"), {0, 1, 2, 3}),
        (sample_data.make_nnunet(), "", 2, ("PZ", "TZ"), {0, 1, 2}),
        (sample_data.make_brats(2018), "", 4, ("WT", "TC", "ET"), {0, 1, 2, 4}),
        (sample_data.make_brats(2023), "", 4, ("WT", "TC", "ET"), {0, 1, 2, 3}),
        (sample_data.make_listed_pairs("json"), "/list.json", 1, ("kidney", "tumour"), {0, 1, 2}),
        (sample_data.make_listed_pairs("csv"), "/list.csv", 1, ("kidney", "tumour"), {0, 1, 2}),
    ],
    ids=["kits19", "msd", "nnunet", "brats2018", "brats2023", "json", "csv"],
)
def test_all_layouts(
    tmp_path: Path, dst: Path, objects: Any, src: str, channels: int, targets: Any, values: set[int]
) -> None:
    description = {"channels": ["CT"], "labels": {"background": 0, "kidney": 1, "tumour": 2}} if "csv" in src else {}
    result = sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "scans", objects) + src, str(dst), description=description
    )
    dataset = result.prepared
    assert (result.cases_checked, result.cases_written, result.problems) == (3, 3, [])
    assert dataset.description.targets == targets
    cases = Cases(dataset)
    for row in range(3):
        image, label = cases.open(row).read_whole()
        assert image.shape == (channels, *label.shape)
        assert image.isfinite().all()
        assert {int(v) for v in label.unique()} == values
        assert {int(v) for v in np.unique(cases.open(row).foreground()[:, 0])} == values - {0}
    schemes = {n.scheme for n in dataset.plan.normalisation}
    assert schemes == ({"ct"} if channels == 1 else {"zscore"})


def test_brats_regions_and_patients_in_one_fold(tmp_path: Path) -> None:
    old = sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "a", sample_data.make_brats(2018)), str(tmp_path / "b")
    ).prepared
    assert old.description.target_values == ((1, 2, 4), (1, 4), (4,))
    new = sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "c", sample_data.make_brats(2023)), str(tmp_path / "d")
    ).prepared
    assert new.description.target_values == ((1, 2, 3), (1, 3), (3,))
    assert new.ids == ["BraTS-GLI-00000-000", "BraTS-GLI-00000-001", "BraTS-GLI-00001-000"]
    assert [new.case(i).patient for i in range(3)] == ["BraTS-GLI-00000"] * 2 + ["BraTS-GLI-00001"]
    assert new.case(0).fold == new.case(1).fold != new.case(2).fold
    msd = sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "e", sample_data.make_msd()), str(tmp_path / "f")
    ).prepared
    assert msd.description.target_values == ((1, 2, 3), (2, 3), (3,))


def test_brats_labels_of_another_year_are_rejected(tmp_path: Path, dst: Path) -> None:
    objects = {name.replace("BraTS18", "B"): body for name, body in sample_data.make_brats(2018).items()}
    names = {"_t1.": "-t1n.", "_t1ce.": "-t1c.", "_t2.": "-t2w.", "_flair.": "-t2f.", "_seg.": "-seg."}
    for name, new_name in names.items():
        objects = {key.replace(name, new_name): body for key, body in objects.items()}
    with pytest.raises(BadCasesError, match=r"no case can be used(.|\n)*number the enhancing tumour\s+4"):
        sample_data.prepare_dataset(sample_data.write_folder(tmp_path / "scans", objects), str(dst))


def test_mlperf_recipe(tmp_path: Path, dst: Path) -> None:
    objects = sample_data.make_kits19(2)
    dataset = sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "scans", objects), str(dst), recipe="mlperf-kits19", plan={}
    ).prepared
    assert dataset.plan == make_mlperf_plan()
    assert dataset.case(0).fold == 0, "case_00000 is one of those that MLPerf scores"
    assert dataset.case(1).fold > 0
    assert dataset.case(0).shape == (128, 128, 128)
    image, label = Cases(dataset).open(0).read_whole()
    raw = read_canonical(objects, "case_00000/imaging.nii.gz")
    low, high = (max(-79, raw.min()) - 101) / 76.9, (min(304, raw.max()) - 101) / 76.9
    assert low - 0.01 <= image.min() < image.max() <= high + 0.01
    # Voxels are stored as integers in Hounsfield units, so rounding changes them by at most half a unit.
    grid = Cases(dataset).open(0).grid
    z, y, x = (p + n // 2 for p, n in zip(grid.pad, grid.shape, strict=True))
    assert label[z - 5 : z + 5, y - 5 : y + 5, x - 5 : x + 5].any()
    for side in range(grid.pad[0]):  # repetitions of the outermost slice
        np.testing.assert_array_equal(image[:, side], image[:, grid.pad[0]])
        np.testing.assert_array_equal(label[side], label[grid.pad[0]])
    with pytest.raises(ConfigError, match="mlperf-kits19 needs one CT channel, this dataset has 2"):
        sample_data.prepare_dataset(
            sample_data.write_folder(tmp_path / "mr", sample_data.make_msd()),
            str(tmp_path / "b"),
            recipe="mlperf-kits19",
            plan={},
        )


# -- written files -----------------------------------------------------------------------------------------------------


def test_zarr_python_reads_prepared_cases(tmp_path: Path, dst: Path) -> None:
    objects = sample_data.make_kits19(2)
    dataset = sample_data.prepare_dataset(
        sample_data.write_folder(tmp_path / "scans", objects), str(dst), plan=UNNORMALISED_PLAN
    ).prepared
    for row, case in enumerate(dataset.ids):
        group = zarr.open_group(str(dst / "cases" / f"{case}.zarr"), mode="r", zarr_format=3)
        assert sorted(group.array_keys()) == ["foreground", "image", "label"]
        image, label, foreground = group["image"], group["label"], group["foreground"]
        assert (image.dtype, label.dtype, foreground.dtype) == (np.int16, np.uint8, np.int32)
        assert image.metadata.dimension_names == ("c", "z", "y", "x")
        assert label.metadata.dimension_names == ("z", "y", "x")
        scan = read_canonical(objects, f"{case}/imaging.nii.gz")
        truth = read_canonical(objects, f"{case}/segmentation.nii.gz")
        attributes = dict(group.attrs)
        values = image[...] * np.asarray(attributes["scale_factor"])[:, None, None, None]
        values = values + np.asarray(attributes["add_offset"])[:, None, None, None]
        np.testing.assert_allclose(values[0], scan, atol=0.5)
        np.testing.assert_array_equal(label[...], truth)
        assert attributes["case"] == case
        assert attributes["spacing"] == [2.0, 1.0, 1.0]
        assert attributes["geometry"]["affine"] == sample_data.AFFINE.tolist()
        first_x, first_y = scan.shape[2] - 1, scan.shape[1] - 1
        expected = [[1, 0, 0, -first_x], [0, 1, 0, -first_y], [0, 0, 2, 0], [0, 0, 0, 1]]
        np.testing.assert_allclose(attributes["affine"], expected, atol=1e-6)
        rows = foreground[...]
        np.testing.assert_array_equal(truth[tuple(rows[:, 1:].T)], rows[:, 0])
        assert attributes == {name: dataset.case(row).volume[name] for name in attributes}


def test_stored_ct_is_within_half_a_hounsfield_unit(tmp_path: Path, dst: Path) -> None:
    objects = sample_data.make_kits19(2)
    dataset = sample_data.prepare_dataset(sample_data.write_folder(tmp_path / "scans", objects), str(dst)).prepared
    (normalisation,) = dataset.plan.normalisation
    scan = read_canonical(objects, "case_00001/imaging.nii.gz").astype(np.float64)
    actual = Cases(dataset).open(1).read_whole()[0][0].double().numpy() * normalisation.std + normalisation.mean
    assert np.abs(actual - np.clip(scan, normalisation.lower, normalisation.upper)).max() <= 0.5 + 1e-3


def test_foreground_index_has_every_class_and_is_limited() -> None:
    label = np.zeros((30, 30, 30), np.uint8)
    label[:15] = 1
    label[20, 20, 20] = 200
    rows = foreground_voxels(label, "a")
    assert rows.dtype == np.int32
    values, counts = np.unique(rows[:, 0], return_counts=True)
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {1: 1000, 200: 1}
    assert len({tuple(row) for row in rows.tolist()}) == 1001
    np.testing.assert_array_equal(label[tuple(rows[:, 1:].T)], rows[:, 0])
    np.testing.assert_array_equal(foreground_voxels(label, "a"), rows)
    assert not np.array_equal(foreground_voxels(label, "b"), rows)
    assert foreground_voxels(np.zeros((3, 3, 3), np.uint8), "a").shape == (0, 4)


def test_case_without_foreground_gives_a_warning(tmp_path: Path, dst: Path) -> None:
    objects = sample_data.make_kits19(3)
    _, label = sample_data.make_ct(1, (27, 24, 14))
    objects["case_00001/segmentation.nii.gz"] = sample_data.encode_nifti(np.zeros_like(label))
    result = sample_data.prepare_dataset(sample_data.write_folder(tmp_path / "scans", objects), str(dst))
    assert [(p.case, p.kind, p.fatal) for p in result.problems] == [("case_00001", "empty-foreground", False)]
    volume = Cases(result.prepared).open(1)
    assert volume.foreground().shape == (0, 4)
    assert not volume.read_whole()[1].any()


# -- bad input ---------------------------------------------------------------------------------------------------------


def make_bad_kits19() -> sample_data.Objects:
    """Return six cases, three of which cannot be used."""
    objects = sample_data.make_kits19()
    _, label = sample_data.make_ct(0)
    objects["case_00001/imaging.nii.gz"] = objects["case_00001/imaging.nii.gz"][:500]
    objects["case_00003/segmentation.nii.gz"] = sample_data.encode_nifti(label[:, :, :3])
    del objects["case_00004/segmentation.nii.gz"]
    return objects


def test_bad_cases_are_listed_and_nothing_is_published(tmp_path: Path, dst: Path) -> None:
    src = sample_data.write_folder(tmp_path / "scans", make_bad_kits19())
    with pytest.raises(BadCasesError) as caught:
        sample_data.prepare_dataset(src, str(dst))
    message = str(caught.value)
    assert "3 of 6 cases cannot be used" in message
    for case, kind in (("00001", "unreadable"), ("00003", "shape"), ("00004", "missing-label")):
        assert any(f"case_{case}" in line and kind in line for line in message.splitlines())
    assert "exclude them with bad_cases=exclude" in message
    assert not (dst / "prepared.json").exists()
    assert not (dst / "cases").exists()
    with pytest.raises(PreparedError, match="preparation is incomplete"):
        Prepared.load(str(dst))


def test_bad_cases_can_be_excluded(tmp_path: Path, dst: Path) -> None:
    src = sample_data.write_folder(tmp_path / "scans", make_bad_kits19())
    result = sample_data.prepare_dataset(src, str(dst), bad_cases="exclude")
    assert result.prepared.ids == ["case_00000", "case_00002", "case_00005"]
    assert {p.case for p in result.problems} == {"case_00001", "case_00003", "case_00004"}
    assert {e["case"] for e in result.prepared.source["excluded"]} == {"case_00001", "case_00003", "case_00004"}
    good = sample_data.make_kits19()
    sample_data.write_folder(
        tmp_path / "scans", {name: body for name, body in good.items() if make_bad_kits19().get(name) != body}
    )
    again = sample_data.prepare_dataset(src, str(dst), bad_cases="exclude")
    assert (again.cases_checked, len(again.prepared), again.problems) == (3, 6, [])


def test_no_good_case(tmp_path: Path, dst: Path) -> None:
    objects = {name: body[:100] for name, body in sample_data.make_kits19(2).items()}
    with pytest.raises(BadCasesError, match="no case can be used"):
        sample_data.prepare_dataset(
            sample_data.write_folder(tmp_path / "scans", objects), str(dst), bad_cases="exclude"
        )
    assert not (dst / "prepared.json").exists()


def test_new_labels_are_checked_again_after_a_failure(scans: str, dst: Path) -> None:
    with pytest.raises(BadCasesError, match="label-values"):
        sample_data.prepare_dataset(scans, str(dst), description={"labels": {"background": 0, "kidney": 1}})
    overrides = {"labels": {"background": 0, "kidney": 1, "cyst": 2}}
    result = sample_data.prepare_dataset(scans, str(dst), description=overrides)
    assert (result.cases_checked, result.prepared.description.targets) == (6, ("kidney", "cyst"))


def test_nothing_to_prepare(tmp_path: Path, dst: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LayoutError, match="the folder is empty"):
        sample_data.prepare_dataset(str(tmp_path / "empty"), str(dst))
    assert not dst.exists()
    with pytest.raises(NotFoundError, match=r"not there/: no such folder\. Check its spelling"):
        sample_data.prepare_dataset(str(tmp_path / "not there"), str(dst))


def test_source_and_destination_must_differ(scans: str, tmp_path: Path) -> None:
    before = sample_data.read_files(tmp_path)
    for same in (scans, scans + "/", f"file://{scans}", f"{scans}/../scans"):
        with pytest.raises(ConfigError, match="SRC and DST are the same"):
            sample_data.prepare_dataset(scans, same)
    assert sample_data.read_files(tmp_path) == before


def test_destination_inside_the_source(scans: str) -> None:
    first = sample_data.prepare_dataset(scans, f"{scans}/prepared")
    again = sample_data.prepare_dataset(scans, f"{scans}/prepared")
    assert (again.cases_checked, again.cases_written, again.prepared) == (0, 0, first.prepared)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where no file can be created")
def test_folder_without_write_access(scans: str) -> None:
    with pytest.raises(PermissionDeniedError, match=r"/proc/data/prepared\.json: cannot write here.*Choose a folder"):
        sample_data.prepare_dataset(scans, "/proc/data")


def test_destination_is_a_file_or_below_one(scans: str, dst: Path) -> None:
    dst.write_bytes(b"mine")
    for target in (dst, dst / "deeper"):
        with pytest.raises(PermissionDeniedError, match=r"cannot write here.*Choose a folder"):
            sample_data.prepare_dataset(scans, str(target))
    assert dst.read_bytes() == b"mine"


def test_bucket_without_write_access(gcs: Bucket, emulator: Emulator) -> None:
    src = sample_data.upload(gcs, sample_data.make_kits19(2), "scans/")
    emulator.set_access(Access(denied_permissions=frozenset({"storage.objects.create"})))
    with pytest.raises(PermissionDeniedError, match="gs://bkt/data/"):
        sample_data.prepare_dataset(src, "gs://bkt/data", gcs.config)


def test_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk."""
    sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19(2))
    code = f"""
        import resource, signal, sys
        from tests.volume import sample_data
        from voxlane.errors import StoreError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        try:
            sample_data.prepare_dataset({str(tmp_path / "scans")!r}, {str(tmp_path / "data")!r})
        except StoreError as error:
            sys.exit(f"reported: {{error}}")
        """
    process = run_python(code)
    assert process.returncode == 1
    assert "reported: file://" in process.stderr
    assert "Traceback" not in process.stderr
    with pytest.raises(PreparedError, match=r"is incomplete|no prepared dataset"):
        Prepared.load(str(tmp_path / "data"))
    assert sample_data.prepare_dataset(str(tmp_path / "scans"), str(tmp_path / "data")).cases_written == 2


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"patsh": [16, 16, 16]}, r"plan\.patsh: no such field.*Did you mean patch"),
        ({"patch": "big"}, r"plan\.patch: "),
        ({"patch": [16, 16]}, r"plan\.patch"),
        ({"patch": [16, 0, 16]}, r"plan\.patch\.1: .*greater than or equal to 1"),
        ({"patch": [16, 16, 27]}, r"plan\.patch: .*Use \[16, 16, 28\]"),
        ({"spacing": [0, 1, 1]}, r"plan\.spacing\.0: .*greater than 0"),
        ({"batch": 0}, r"plan\.batch: "),
        ({"network": {"convs": 0}}, r"plan\.network\.convs"),
        ({"network": {"depth": 3}}, r"plan\.network\.depth: no such field"),
        ({"network": {"features": [4]}}, r"plan\.network: .*one entry per resolution"),
        ({"recipe": "mlperf-kits19"}, r"plan\.recipe: .*Set recipe=mlperf-kits19"),
        ({"normalisation": [{"scheme": "zscore"}] * 4}, r"plan\.normalisation: 4 entries for 1 chan.*another dataset"),
    ],
)
def test_errors_name_the_field_of_the_plan(tiny_folder: Path, dst: Path, plan: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample_data.prepare_dataset(str(tiny_folder.parent / "scans"), str(dst), plan=plan)
    assert not (dst / "prepared.json").exists()


def test_plan_of_another_dataset(tmp_path: Path, tiny: Prepared, dst: Path) -> None:
    src = sample_data.write_folder(tmp_path / "mr", sample_data.make_msd())
    with pytest.raises(ConfigError, match="this plan was made for another dataset"):
        sample_data.prepare_dataset(src, str(dst), plan=settings.to_plain(tiny.plan))


def test_errors_name_the_field_of_the_config() -> None:
    for values, message in (
        ({"folds": 1}, "folds: "),
        ({"bad_cases": "keep"}, "bad_cases: "),
        ({"memory_gb": 0}, "memory_gb: "),
        ({"recipe": "nnunet"}, "recipe: "),
        ({"worker": 2}, "worker: no such field.*workers"),
        ({"workers": -1}, "workers: "),
    ):
        with pytest.raises(ConfigError, match=message):
            settings.build(PrepareConfig, values)


def test_plan_overrides(tiny_folder: Path, tmp_path: Path) -> None:
    scans = str(tiny_folder.parent / "scans")
    plan = sample_data.prepare_dataset(
        scans, str(tmp_path / "a"), plan={"patch": [16, 16, 16], "batch": 3}
    ).prepared.plan
    assert (plan.patch, plan.batch) == ((16, 16, 16), 3)
    assert all(np.prod(plan.network.strides, axis=0) <= 4)  # the network is adapted to the patch
    plan = sample_data.prepare_dataset(scans, str(tmp_path / "b"), plan={"network": {"convs": 1}}).prepared.plan
    assert plan.network.convs == 1
    default_plan = sample_data.prepare_dataset(scans, str(tmp_path / "c"), plan={}).prepared.plan
    assert default_plan.network.strides == plan.network.strides
    explicit_plan = sample_data.prepare_dataset(
        scans, str(tmp_path / "d"), plan=settings.to_plain(default_plan)
    ).prepared.plan
    assert explicit_plan == default_plan


# -- repeated runs -----------------------------------------------------------------------------------------------------


def test_second_run_writes_nothing(scans: str, dst: Path) -> None:
    first = sample_data.prepare_dataset(scans, str(dst))
    before = {p: p.stat().st_mtime_ns for p in dst.rglob("*") if p.is_file()}
    second = sample_data.prepare_dataset(scans, str(dst))
    assert (second.cases_checked, second.cases_written) == (0, 0)
    assert second.prepared == first.prepared
    assert {p: p.stat().st_mtime_ns for p in dst.rglob("*") if p.is_file()} == before


def test_only_a_changed_case_is_prepared_again(scans: str, dst: Path) -> None:
    plan = UNNORMALISED_PLAN  # the normalisation of a CT would depend on the intensities of all cases
    first = sample_data.prepare_dataset(scans, str(dst), plan=plan).prepared
    image, label = sample_data.make_ct(99, (28, 24, 15))
    sample_data.write_folder(Path(scans), {"case_00002/imaging.nii.gz": sample_data.encode_nifti(image)})
    sample_data.write_folder(Path(scans), {"case_00002/segmentation.nii.gz": sample_data.encode_nifti(label)})
    before = read_volumes(dst)
    second = sample_data.prepare_dataset(scans, str(dst), plan=plan)
    assert (second.cases_checked, second.cases_written) == (1, 1)
    changed = {name.split("/")[1] for name, body in read_volumes(dst).items() if before.get(name) != body}
    assert changed == {"case_00002.zarr"}
    np.testing.assert_array_equal(Cases(second.prepared).open(2).read_whole()[0][0], to_canonical(image))
    assert second.prepared.digest != first.digest


def to_canonical(array: np.ndarray) -> np.ndarray:
    return np.asarray(nibabel.as_closest_canonical(nibabel.Nifti1Image(array, sample_data.AFFINE)).dataobj).T


def test_added_and_removed_cases_keep_hash_folds_of_others(scans: str, dst: Path) -> None:
    first = sample_data.prepare_dataset(scans, str(dst), plan=UNNORMALISED_PLAN, split="hash").prepared
    folds = {first.case(i).id: first.case(i).fold for i in range(6)}
    sample_data.write_folder(Path(scans), sample_data.make_kits19(2, first=6))
    for file in Path(scans, "case_00001").iterdir():
        file.unlink()
    result = sample_data.prepare_dataset(scans, str(dst), plan=UNNORMALISED_PLAN)
    assert (result.cases_checked, result.cases_written) == (2, 2)
    assert result.prepared.ids == [f"case_{n:05d}" for n in (0, 2, 3, 4, 5, 6, 7)]
    actual = {result.prepared.case(i).id: result.prepared.case(i).fold for i in range(7)}
    assert {case: fold for case, fold in actual.items() if case in folds} == {c: folds[c] for c in actual if c in folds}
    with pytest.raises(PreparedError):
        Prepared.load(f"{dst}/cases")


def test_change_of_plan_and_back(scans: str, dst: Path) -> None:
    """The second plan overwrites the volumes of the first, so the records of the first become invalid."""
    first = sample_data.prepare_dataset(scans, str(dst), plan=UNNORMALISED_PLAN)
    before = read_volumes(dst)
    coarse = sample_data.prepare_dataset(scans, str(dst), plan={**UNNORMALISED_PLAN, "spacing": [4.0, 2.0, 2.0]})
    assert (coarse.cases_checked, coarse.cases_written) == (0, 6)
    restored = sample_data.prepare_dataset(scans, str(dst), plan=UNNORMALISED_PLAN)
    assert (restored.cases_checked, restored.cases_written) == (0, 6)
    after = read_volumes(dst)
    assert {name: after[name] for name in before} == before
    assert restored.prepared.plan == first.prepared.plan
    for row in range(6):
        Cases(restored.prepared).open(row).read_whole()


def test_unrelated_settings_do_not_rewrite_volumes(scans: str, dst: Path) -> None:
    sample_data.prepare_dataset(scans, str(dst))
    result = sample_data.prepare_dataset(
        scans,
        str(dst),
        plan={**sample_data.PLAN, "batch": 7, "network": {"convs": 1}},
        folds=3,
        description={"name": "mine"},
    )
    assert (result.cases_checked, result.cases_written) == (0, 0)
    assert (result.prepared.plan.batch, result.prepared.folds, result.prepared.description.name) == (7, 3, "mine")


def test_cases_with_damaged_records_are_prepared_again(scans: str, dst: Path) -> None:
    sample_data.prepare_dataset(scans, str(dst))
    for note in (dst / "work").rglob("case_00003*.json"):
        note.write_bytes(b"{")
    result = sample_data.prepare_dataset(scans, str(dst))
    assert (result.cases_checked, result.cases_written) == (1, 1)


def test_number_of_workers_does_not_change_bytes(scans: str, dst: Path, tmp_path: Path) -> None:
    sample_data.prepare_dataset(scans, str(dst))
    result = sample_data.prepare_dataset(scans, str(tmp_path / "two"), workers=2)
    assert (result.cases_checked, result.cases_written) == (6, 6)
    assert read_volumes(tmp_path / "two") == read_volumes(dst)
    assert json.loads((tmp_path / "two" / "prepared.json").read_text())["fingerprint"] == result.prepared.fingerprint
    one_worker = Prepared.load(str(dst))
    assert (one_worker.plan, one_worker.fingerprint, one_worker.ids) == (
        result.prepared.plan,
        result.prepared.fingerprint,
        result.prepared.ids,
    )


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)


def test_killed_run_resumes(scans: str, dst: Path, tmp_path: Path) -> None:
    for number in range(3, 6):  # slow enough to be killed halfway
        image, label = sample_data.make_ct(number, (112, 112, 48))
        sample_data.write_folder(Path(scans, f"case_{number:05d}"), {"imaging.nii.gz": sample_data.encode_nifti(image)})
        sample_data.write_folder(
            Path(scans, f"case_{number:05d}"), {"segmentation.nii.gz": sample_data.encode_nifti(label)}
        )
    code = f"from tests.volume import sample_data; sample_data.prepare_dataset({scans!r}, {str(dst)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    min_cases_written, deadline = 2, time.monotonic() + 150
    while len(list((dst / "work" / "write").glob("*.json"))) < min_cases_written:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cases_checked, cases_written = (len(list((dst / "work" / stage).glob("*.json"))) for stage in ("check", "write"))
    assert cases_checked == 6
    assert min_cases_written <= cases_written < 6
    with pytest.raises(PreparedError, match=r"is incomplete\. Run the same voxlane prepare again; it will resume"):
        Prepared.load(str(dst))
    result = sample_data.prepare_dataset(scans, str(dst))
    assert (result.cases_checked, result.cases_written) == (6 - cases_checked, 6 - cases_written)
    full = sample_data.prepare_dataset(scans, str(tmp_path / "whole"))
    assert read_volumes(dst) == read_volumes(tmp_path / "whole")
    assert result.prepared.plan == full.prepared.plan


# -- locations ---------------------------------------------------------------------------------------------------------


def test_all_kinds_of_buckets(shared_bucket: Bucket, scans: str, tmp_path: Path) -> None:
    bucket = shared_bucket
    src = sample_data.upload(bucket, sample_data.make_kits19(3), "my scans/")
    in_bucket = sample_data.prepare_dataset(src, f"{bucket.uri}/data/", bucket.config)
    assert (in_bucket.cases_checked, in_bucket.cases_written) == (3, 3)
    assert in_bucket.prepared.uri == f"{bucket.uri}/data"
    again = sample_data.prepare_dataset(src, f"{bucket.uri}/data", bucket.config)
    assert (again.cases_checked, again.cases_written, again.prepared) == (0, 0, in_bucket.prepared)
    on_disk = sample_data.prepare_dataset(src, str(tmp_path / "out"), bucket.config).prepared
    for row in range(3):
        for array, expected in zip(
            Cases(in_bucket.prepared).open(row).read_whole(), Cases(on_disk).open(row).read_whole(), strict=True
        ):
            np.testing.assert_array_equal(array, expected)
    # A volume with a missing object is written again.
    bucket.store.delete(bucket.key("data/cases/case_00001.zarr/label/c/0/0/0"))
    repaired = sample_data.prepare_dataset(src, f"{bucket.uri}/data", bucket.config)
    assert (repaired.cases_checked, repaired.cases_written) == (0, 1)
    Cases(repaired.prepared).open(1).read_whole()


def test_destination_is_the_root_of_a_bucket(gcs: Bucket, scans: str) -> None:
    dataset = sample_data.prepare_dataset(scans, "gs://bkt", gcs.config).prepared
    Cases(dataset).open(0).read_whole()
    assert Prepared.load("gs://bkt/", gcs.config).ids == dataset.ids


def test_ids_with_odd_characters(bucket: Bucket, tmp_path: Path) -> None:
    ids = ["visit 1", "ü.1", "50%", "a+b=c", "x#y?z", "a%20b", "a b", "case:1", "[1]*", "a~", "&'\"<>"]
    rows = [{"image": "case_00000/imaging.nii.gz", "label": "case_00000/segmentation.nii.gz", "id": i} for i in ids]
    description = {"channels": ["CT"], "labels": {"background": 0, "kidney": 1, "tumour": 2}}
    document = {"description": description, "cases": rows}
    src = sample_data.write_folder(
        tmp_path / "scans", sample_data.make_kits19(1) | {"list.json": json.dumps(document).encode()}
    )
    for expected_count in (len(ids), 0):
        result = sample_data.prepare_dataset(f"{src}/list.json", f"{bucket.uri}/data", bucket.config)
        assert (result.cases_checked, result.cases_written) == (expected_count, expected_count)
    assert result.prepared.ids == sorted(ids)
    cases = Cases(result.prepared)
    for row, case in enumerate(sorted(ids)):
        assert cases.open(row).case.volume["case"] == case
        assert cases.open(row).read_whole()[1].any()


def test_progress_is_optional(scans: str, dst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(scans, str(dst), sample_data.prepare_config(), progress=False, isolate=False)
    assert capsys.readouterr().err == ""
    prepare(scans, str(dst), sample_data.prepare_config(), progress=True, isolate=False)
    message = capsys.readouterr().err
    assert "checking: 100%" in message
    assert "preparing: 100%" in message


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="workers are found in /proc")
def test_case_of_a_killed_worker_is_tried_again(tmp_path: Path, dst: Path) -> None:
    scans = sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19(60))
    code = f"from tests.volume import sample_data; sample_data.prepare_dataset({scans!r}, {str(dst)!r}, workers=2)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 150
    while not any(dst.glob("work/check/*")):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(list_workers(process.pid)[0], signal.SIGKILL)
    _, message = process.communicate(timeout=150)
    assert process.returncode == 0, message
    assert len(Prepared.load(str(dst))) == 60


# -- verdicts that are checked again -----------------------------------------------------------------------------------


def test_object_that_is_gone_for_a_while_is_not_remembered_as_missing(
    gcs: Bucket, emulator: Emulator, dst: Path
) -> None:
    src = sample_data.upload(gcs, sample_data.make_kits19(3), "scans/")
    emulator.set_faults(
        Faults(error_rate=1.0, error_statuses=(404,), kinds=("get",), key_prefix="scans/case_00001/imaging")
    )
    with pytest.raises(BadCasesError) as caught:
        sample_data.prepare_dataset(src, str(dst), gcs.config)
    message = " ".join(str(caught.value).split())
    assert "is listed, but reading it says that it does not exist. This may pass: run again" in message
    assert "Run the same command again, which checks bad cases anew" in message
    emulator.clear_faults()
    result = sample_data.prepare_dataset(src, str(dst), gcs.config)
    assert (result.cases_checked, len(result.prepared), result.problems) == (1, 3, [])


def test_object_whose_bytes_stay_wrong_is_an_error_of_its_case(gcs: Bucket, dst: Path) -> None:
    """It once ended the check of all cases, also with bad_cases=exclude."""
    src = sample_data.upload(gcs, sample_data.make_kits19(3), "scans/")
    with FaultProxy(gcs.config.endpoint or "") as proxy:
        config = replace(gcs.config, endpoint=proxy.url)
        with proxy.inject(Fault("corrupted", times=10**9, path="case_00001%2Fimaging")):
            result = sample_data.prepare_dataset(src, str(dst), config, bad_cases="exclude")
        assert [(p.case, p.kind, p.fatal, p.transient) for p in result.problems] == [
            ("case_00001", "unreadable", True, True)
        ]
        assert "after 5 reads" in result.problems[0].detail
        result = sample_data.prepare_dataset(src, str(dst), config, bad_cases="exclude")
    assert (result.cases_checked, len(result.prepared), result.problems) == (1, 3, [])


def corrupt_reads(monkeypatch: pytest.MonkeyPatch, key: str, num_reads: int) -> None:
    """Flip another byte in each of the next reads of the objects whose names contain `key`."""
    read, remaining = formats.read_object, [num_reads]

    def read_corrupted(uri: str, config: Any) -> Any:
        body = bytearray(read(uri, config))
        if key in uri and remaining[0] > 0:
            body[len(body) // 2 + remaining[0]] ^= 0x55
            remaining[0] -= 1
        return bytes(body)

    for module in (scan, case_checks):
        monkeypatch.setattr(module, "read_object", read_corrupted)


def test_one_corrupted_read_is_repeated(scans: str, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt_reads(monkeypatch, "case_00002/imaging", 1)
    result = sample_data.prepare_dataset(scans, str(dst))
    assert [(p.case, p.kind, p.fatal, p.transient) for p in result.problems] == [
        ("case_00002", "read-again", False, True)
    ]
    again = sample_data.prepare_dataset(scans, str(dst))
    assert (again.cases_checked, again.cases_written, again.problems) == (1, 0, [])


def test_corruption_of_every_read_is_blamed_on_the_transfer(
    scans: str, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupt_reads(monkeypatch, "case_00002/imaging", 100)
    with pytest.raises(BadCasesError) as raised:
        sample_data.prepare_dataset(scans, str(dst))
    words = " ".join(str(raised.value).split())  # the table wraps its lines
    assert "Reading it again gives other bytes: the transfer is at fault, run again" in words
    monkeypatch.undo()
    assert len(sample_data.prepare_dataset(scans, str(dst)).prepared) == 6


def test_recheck_checks_good_cases_again(scans: str, dst: Path) -> None:
    sample_data.prepare_dataset(scans, str(dst))
    result = prepare(scans, str(dst), sample_data.prepare_config(), progress=False, recheck=True, isolate=False)
    assert (result.cases_checked, result.cases_written) == (6, 0)
    # A volume that was made of other bytes than those that are read now is written again.
    (record,) = (dst / "work" / "check").glob("case_00003-*.json")
    content = json.loads(record.read_bytes())
    content["fingerprint"]["relative_size"] = 0.5
    record.write_text(json.dumps(content))
    result = prepare(scans, str(dst), sample_data.prepare_config(), progress=False, recheck=True, isolate=False)
    assert (result.cases_checked, result.cases_written) == (6, 1)


def test_case_that_would_grow_too_much_is_bad(tmp_path: Path, dst: Path) -> None:
    objects = sample_data.make_kits19(3)
    image, label = sample_data.make_ct(9)
    wide = np.diag([-30.0, -30.0, 30.0, 1.0])
    objects["case_00001/imaging.nii.gz"] = sample_data.encode_nifti(image, wide)
    objects["case_00001/segmentation.nii.gz"] = sample_data.encode_nifti(label, wide)
    src = sample_data.write_folder(tmp_path / "scans", objects)
    with pytest.raises(BadCasesError, match=r"spacing of 30 x 30 x 30 mm(.|\n)*times its own"):
        sample_data.prepare_dataset(src, str(dst))
    result = sample_data.prepare_dataset(src, str(dst), bad_cases="exclude")
    assert result.prepared.ids == ["case_00000", "case_00002"]
    assert [(p.case, p.kind) for p in result.problems if p.fatal] == [("case_00001", "memory")]


def list_workers(pid: int) -> list[int]:
    """Return the worker processes of `pid`, without the tracker of their shared memory."""
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_another_dataset_is_not_overwritten(tmp_path: Path, dst: Path) -> None:
    sample_data.prepare_dataset(sample_data.write_folder(tmp_path / "scans", sample_data.make_kits19(2)), str(dst))
    before = (dst / "prepared.json").read_bytes()
    with pytest.raises(PreparedError, match=r"DST already holds .*, prepared from .*scans/. Choose another DST"):
        sample_data.prepare_dataset(
            sample_data.write_folder(tmp_path / "others", sample_data.make_kits19(2, first=7)), str(dst)
        )
    assert (dst / "prepared.json").read_bytes() == before
