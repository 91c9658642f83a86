"""From scans to a prepared dataset: every layout, bad cases, cut off half-way, run again."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import zarr

from tests.conftest import Bucket
from tests.volume import made
from voxlane import settings
from voxlane.errors import BadCasesError, ConfigError, LayoutError, NotFoundError, PermissionDeniedError, PreparedError
from voxlane.testing import Access, Emulator
from voxlane.volume.cases import Cases
from voxlane.volume.planner import mlperf_kits19
from voxlane.volume.prepare import PrepareConfig, foreground_voxels, prepare
from voxlane.volume.prepared import Prepared, fold_of

ROOT = Path(__file__).parents[2]
CT_NOTHING = {"patch": [16, 16, 16], "spacing": [2.0, 1.0, 1.0], "normalisation": [{"scheme": "none"}]}
"""A plan under which volumes hold the scans' own voxels."""


@pytest.fixture
def scans(tmp_path: Path) -> str:
    return made.save(tmp_path / "scans", made.kits())


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    return tmp_path / "data"


def volumes(dst: Path) -> dict[str, bytes]:
    """What is in the volumes, without what depends on the place."""
    return {name: body for name, body in made.files_of(dst).items() if name.startswith("cases/")}


def canonical(objects: made.Objects, name: str) -> np.ndarray:
    """A scan of a layout as (z, y, x) along the anatomical axes."""
    image = nibabel.as_closest_canonical(nibabel.Nifti1Image.from_bytes(gzip.decompress(objects[name])))
    return np.asarray(image.dataobj).T


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objects", "src", "channels", "targets", "values"),
    [
        (made.kits(3), "", 1, ("kidney", "tumour"), {0, 1, 2}),
        (made.msd(), "", 2, ("WT", "TC", "ET"), {0, 1, 2, 3}),
        (made.nnunet(), "", 2, ("PZ", "TZ"), {0, 1, 2}),
        (made.brats(2018), "", 4, ("WT", "TC", "ET"), {0, 1, 2, 4}),
        (made.brats(2023), "", 4, ("WT", "TC", "ET"), {0, 1, 2, 3}),
        (made.pairs("json"), "/list.json", 1, ("kidney", "tumour"), {0, 1, 2}),
        (made.pairs("csv"), "/list.csv", 1, ("kidney", "tumour"), {0, 1, 2}),
    ],
    ids=["kits19", "msd", "nnunet", "brats2018", "brats2023", "json", "csv"],
)
def test_every_layout(
    tmp_path: Path, dst: Path, objects: Any, src: str, channels: int, targets: Any, values: set[int]
) -> None:
    described = {"channels": ["CT"], "labels": {"background": 0, "kidney": 1, "tumour": 2}} if "csv" in src else {}
    done = made.prepared(made.save(tmp_path / "scans", objects) + src, str(dst), description=described)
    dataset = done.prepared
    assert (done.checked, done.written, done.problems) == (3, 3, [])
    assert dataset.description.targets == targets
    cases = Cases(dataset)
    for row in range(3):
        image, label = cases.open(row).whole()
        assert image.shape == (channels, *label.shape)
        assert image.isfinite().all()
        assert {int(v) for v in label.unique()} == values
        assert {int(v) for v in np.unique(cases.open(row).foreground()[:, 0])} == values - {0}
    schemes = {n.scheme for n in dataset.plan.normalisation}
    assert schemes == ({"ct"} if channels == 1 else {"zscore"})


def test_brats_regions_by_their_numbering_and_patients_in_one_fold(tmp_path: Path) -> None:
    old = made.prepared(made.save(tmp_path / "a", made.brats(2018)), str(tmp_path / "b")).prepared
    assert old.description.target_values == ((1, 2, 4), (1, 4), (4,))
    new = made.prepared(made.save(tmp_path / "c", made.brats(2023)), str(tmp_path / "d")).prepared
    assert new.description.target_values == ((1, 2, 3), (1, 3), (3,))
    assert new.ids == ["BraTS-GLI-00000-000", "BraTS-GLI-00000-001", "BraTS-GLI-00001-000"]
    assert [new.case(i).patient for i in range(3)] == ["BraTS-GLI-00000"] * 2 + ["BraTS-GLI-00001"]
    assert new.case(0).fold == new.case(1).fold == fold_of("BraTS-GLI-00000", 2)
    msd = made.prepared(made.save(tmp_path / "e", made.msd()), str(tmp_path / "f")).prepared
    assert msd.description.target_values == ((1, 2, 3), (2, 3), (3,))


def test_brats_labels_of_another_year_are_bad_cases(tmp_path: Path, dst: Path) -> None:
    objects = {name.replace("BraTS18", "B"): body for name, body in made.brats(2018).items()}
    names = {"_t1.": "-t1n.", "_t1ce.": "-t1c.", "_t2.": "-t2w.", "_flair.": "-t2f.", "_seg.": "-seg."}
    for name, newer in names.items():
        objects = {key.replace(name, newer): body for key, body in objects.items()}
    with pytest.raises(BadCasesError, match=r"no case can be used(.|\n)*number the enhancing tumour\s+4"):
        made.prepared(made.save(tmp_path / "scans", objects), str(dst))


def test_mlperf_recipe(tmp_path: Path, dst: Path) -> None:
    objects = made.kits(2)
    dataset = made.prepared(made.save(tmp_path / "scans", objects), str(dst), recipe="mlperf-kits19", plan={}).prepared
    assert dataset.plan == mlperf_kits19()
    assert dataset.case(0).fold == 0, "case_00000 is one of those that MLPerf scores"
    assert dataset.case(1).fold > 0
    assert dataset.case(0).shape == (128, 128, 128)
    image, label = Cases(dataset).open(0).whole()
    raw = canonical(objects, "case_00000/imaging.nii.gz")
    low, high = (max(-79, raw.min()) - 101) / 76.9, (min(304, raw.max()) - 101) / 76.9
    assert low - 0.01 <= image.min() < image.max() <= high + 0.01
    # A Hounsfield unit is stored as one integer: half of one is the most that rounding moves a voxel.
    grid = Cases(dataset).open(0).grid
    z, y, x = (p + n // 2 for p, n in zip(grid.pad, grid.shape, strict=True))
    assert label[z - 5 : z + 5, y - 5 : y + 5, x - 5 : x + 5].any()
    for side in range(grid.pad[0]):  # the outermost slice, repeated
        np.testing.assert_array_equal(image[:, side], image[:, grid.pad[0]])
        np.testing.assert_array_equal(label[side], label[grid.pad[0]])
    with pytest.raises(ConfigError, match="mlperf-kits19 is for one CT channel, this dataset has 2"):
        made.prepared(made.save(tmp_path / "mr", made.msd()), str(tmp_path / "b"), recipe="mlperf-kits19", plan={})


# -- what is written ---------------------------------------------------------------------------------------------------


def test_anyones_zarr_reads_it(tmp_path: Path, dst: Path) -> None:
    objects = made.kits(2)
    dataset = made.prepared(made.save(tmp_path / "scans", objects), str(dst), plan=CT_NOTHING).prepared
    for row, case in enumerate(dataset.ids):
        group = zarr.open_group(str(dst / "cases" / f"{case}.zarr"), mode="r", zarr_format=3)
        assert sorted(group.array_keys()) == ["foreground", "image", "label"]
        image, label, foreground = group["image"], group["label"], group["foreground"]
        assert (image.dtype, label.dtype, foreground.dtype) == (np.int16, np.uint8, np.int32)
        assert image.metadata.dimension_names == ("c", "z", "y", "x")
        assert label.metadata.dimension_names == ("z", "y", "x")
        scan = canonical(objects, f"{case}/imaging.nii.gz")
        truth = canonical(objects, f"{case}/segmentation.nii.gz")
        said = dict(group.attrs)
        values = image[...] * np.asarray(said["scale_factor"])[:, None, None, None]
        values = values + np.asarray(said["add_offset"])[:, None, None, None]
        np.testing.assert_allclose(values[0], scan, atol=0.5)
        np.testing.assert_array_equal(label[...], truth)
        assert said["case"] == case
        assert said["spacing"] == [2.0, 1.0, 1.0]
        assert said["geometry"]["affine"] == made.AFFINE.tolist()
        first_x, first_y = scan.shape[2] - 1, scan.shape[1] - 1
        expected = [[1, 0, 0, -first_x], [0, 1, 0, -first_y], [0, 0, 2, 0], [0, 0, 0, 1]]
        np.testing.assert_allclose(said["affine"], expected, atol=1e-6)
        rows = foreground[...]
        np.testing.assert_array_equal(truth[tuple(rows[:, 1:].T)], rows[:, 0])
        assert said == {name: dataset.case(row).volume[name] for name in said}


def test_stored_ct_is_within_half_a_hounsfield_unit(tmp_path: Path, dst: Path) -> None:
    objects = made.kits(2)
    dataset = made.prepared(made.save(tmp_path / "scans", objects), str(dst)).prepared
    (how,) = dataset.plan.normalisation
    scan = canonical(objects, "case_00001/imaging.nii.gz").astype(np.float64)
    found = Cases(dataset).open(1).whole()[0][0].double().numpy() * how.std + how.mean
    assert np.abs(found - np.clip(scan, how.lower, how.upper)).max() <= 0.5 + 1e-3


def test_the_foreground_index_holds_every_class_and_no_more_than_it_says() -> None:
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


def test_a_case_without_foreground_is_prepared_with_a_warning(tmp_path: Path, dst: Path) -> None:
    objects = made.kits(3)
    _, label = made.ct(1, (27, 24, 14))
    objects["case_00001/segmentation.nii.gz"] = made.nifti(np.zeros_like(label))
    done = made.prepared(made.save(tmp_path / "scans", objects), str(dst))
    assert [(p.case, p.kind, p.fatal) for p in done.problems] == [("case_00001", "empty-foreground", False)]
    volume = Cases(done.prepared).open(1)
    assert volume.foreground().shape == (0, 4)
    assert not volume.whole()[1].any()


# -- bad input ---------------------------------------------------------------------------------------------------------


def bad_kits() -> made.Objects:
    """Six cases of which three cannot be used."""
    objects = made.kits()
    _, label = made.ct(0)
    objects["case_00001/imaging.nii.gz"] = objects["case_00001/imaging.nii.gz"][:500]
    objects["case_00003/segmentation.nii.gz"] = made.nifti(label[:, :, :3])
    del objects["case_00004/segmentation.nii.gz"]
    return objects


def test_bad_cases_fail_in_one_table_and_publish_nothing(tmp_path: Path, dst: Path) -> None:
    src = made.save(tmp_path / "scans", bad_kits())
    with pytest.raises(BadCasesError) as caught:
        made.prepared(src, str(dst))
    said = str(caught.value)
    assert "3 of 6 cases cannot be used" in said
    for case, kind in (("00001", "unreadable"), ("00003", "shape"), ("00004", "missing-label")):
        assert any(f"case_{case}" in line and kind in line for line in said.splitlines())
    assert "leave them out with bad_cases=exclude" in said
    assert not (dst / "prepared.json").exists()
    assert not (dst / "cases").exists()
    with pytest.raises(PreparedError, match="its preparation has not finished"):
        Prepared.load(str(dst))


def test_bad_cases_are_excluded_when_asked(tmp_path: Path, dst: Path) -> None:
    src = made.save(tmp_path / "scans", bad_kits())
    done = made.prepared(src, str(dst), bad_cases="exclude")
    assert done.prepared.ids == ["case_00000", "case_00002", "case_00005"]
    assert {p.case for p in done.problems} == {"case_00001", "case_00003", "case_00004"}
    assert {e["case"] for e in done.prepared.source["excluded"]} == {"case_00001", "case_00003", "case_00004"}
    good = made.kits()
    made.save(tmp_path / "scans", {name: body for name, body in good.items() if bad_kits().get(name) != body})
    again = made.prepared(src, str(dst), bad_cases="exclude")
    assert (again.checked, len(again.prepared), again.problems) == (3, 6, [])


def test_no_good_case_at_all(tmp_path: Path, dst: Path) -> None:
    objects = {name: body[:100] for name, body in made.kits(2).items()}
    with pytest.raises(BadCasesError, match="no case can be used"):
        made.prepared(made.save(tmp_path / "scans", objects), str(dst), bad_cases="exclude")
    assert not (dst / "prepared.json").exists()


def test_labels_told_after_a_failure_are_checked_anew(scans: str, dst: Path) -> None:
    with pytest.raises(BadCasesError, match="label-values"):
        made.prepared(scans, str(dst), description={"labels": {"background": 0, "kidney": 1}})
    told = {"labels": {"background": 0, "kidney": 1, "cyst": 2}}
    done = made.prepared(scans, str(dst), description=told)
    assert (done.checked, done.prepared.description.targets) == (6, ("kidney", "cyst"))


def test_nothing_to_prepare(tmp_path: Path, dst: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LayoutError, match="nothing is here"):
        made.prepared(str(tmp_path / "empty"), str(dst))
    assert not dst.exists()
    with pytest.raises(NotFoundError, match=r"not there/: no such folder\. Check its spelling"):
        made.prepared(str(tmp_path / "not there"), str(dst))


def test_source_and_destination_may_not_be_the_same(scans: str, tmp_path: Path) -> None:
    before = made.files_of(tmp_path)
    for same in (scans, scans + "/", f"file://{scans}", f"{scans}/../scans"):
        with pytest.raises(ConfigError, match="SRC and DST are the same"):
            made.prepared(scans, same)
    assert made.files_of(tmp_path) == before


def test_a_destination_inside_the_source(scans: str) -> None:
    first = made.prepared(scans, f"{scans}/prepared")
    again = made.prepared(scans, f"{scans}/prepared")
    assert (again.checked, again.written, again.prepared) == (0, 0, first.prepared)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no folder that takes no files")
def test_a_folder_that_takes_no_files(scans: str) -> None:
    with pytest.raises(PermissionDeniedError, match=r"/proc/data/prepared\.json: cannot write here.*Choose a folder"):
        made.prepared(scans, "/proc/data")


def test_a_destination_that_is_a_file_or_below_one(scans: str, dst: Path) -> None:
    dst.write_bytes(b"mine")
    for target in (dst, dst / "deeper"):
        with pytest.raises(PermissionDeniedError, match=r"cannot write here.*Choose a folder"):
            made.prepared(scans, str(target))
    assert dst.read_bytes() == b"mine"


def test_a_bucket_that_takes_no_objects(gcs: Bucket, emulator: Emulator) -> None:
    src = made.put(gcs, made.kits(2), "scans/")
    emulator.set_access(Access(denied_permissions=frozenset({"storage.objects.create"})))
    with pytest.raises(PermissionDeniedError, match="gs://bkt/data/"):
        made.prepared(src, "gs://bkt/data", gcs.config)


def test_a_full_disk(tmp_path: Path) -> None:
    """No file may grow beyond some bytes, which is what a full disk looks like."""
    made.save(tmp_path / "scans", made.kits(2))
    code = f"""
        import resource, signal, sys
        from tests.volume import made
        from voxlane.errors import StoreError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        try:
            made.prepared({str(tmp_path / "scans")!r}, {str(tmp_path / "data")!r})
        except StoreError as error:
            sys.exit(f"said: {{error}}")
        """
    found = run(code)
    assert found.returncode == 1
    assert "said: file://" in found.stderr
    assert "Traceback" not in found.stderr
    with pytest.raises(PreparedError, match=r"has not finished|no prepared dataset"):
        Prepared.load(str(tmp_path / "data"))
    assert made.prepared(str(tmp_path / "scans"), str(tmp_path / "data")).written == 2


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"patsh": [16, 16, 16]}, r"plan\.patsh: no such field.*Did you mean patch"),
        ({"patch": "big"}, r"plan\.patch: "),
        ({"patch": [16, 16]}, r"plan\.patch"),
        ({"patch": [16, 0, 16]}, r"plan\.patch\.1: .*greater than or equal to 1"),
        ({"patch": [16, 16, 27]}, r"plan\.patch: .*Take \[16, 16, 28\]"),
        ({"spacing": [0, 1, 1]}, r"plan\.spacing\.0: .*greater than 0"),
        ({"batch": 0}, r"plan\.batch: "),
        ({"network": {"convs": 0}}, r"plan\.network\.convs"),
        ({"network": {"depth": 3}}, r"plan\.network\.depth: no such field"),
        ({"network": {"features": [4]}}, r"plan\.network: .*one entry a resolution"),
        ({"recipe": "mlperf-kits19"}, r"plan\.recipe: .*Set recipe=mlperf-kits19"),
        ({"normalisation": [{"scheme": "zscore"}] * 4}, r"plan\.normalisation: 4 for 1 channels.*another dataset"),
    ],
)
def test_a_wrong_field_of_the_plan_is_named(tiny_folder: Path, dst: Path, plan: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made.prepared(str(tiny_folder.parent / "scans"), str(dst), plan=plan)
    assert not (dst / "prepared.json").exists()


def test_a_plan_of_another_dataset(tmp_path: Path, tiny: Prepared, dst: Path) -> None:
    src = made.save(tmp_path / "mr", made.msd())
    with pytest.raises(ConfigError, match="this plan was made for another dataset"):
        made.prepared(src, str(dst), plan=settings.plain(tiny.plan))


def test_wrong_fields_of_the_config_are_named() -> None:
    for values, said in (
        ({"folds": 1}, "folds: "),
        ({"bad_cases": "keep"}, "bad_cases: "),
        ({"memory_gb": 0}, "memory_gb: "),
        ({"recipe": "nnunet"}, "recipe: "),
        ({"worker": 2}, "worker: no such field.*workers"),
        ({"workers": -1}, "workers: "),
    ):
        with pytest.raises(ConfigError, match=said):
            settings.build(PrepareConfig, values)


def test_fields_of_the_plan_by_hand(tiny_folder: Path, tmp_path: Path) -> None:
    scans = str(tiny_folder.parent / "scans")
    plan = made.prepared(scans, str(tmp_path / "a"), plan={"patch": [16, 16, 16], "batch": 3}).prepared.plan
    assert (plan.patch, plan.batch) == ((16, 16, 16), 3)
    assert all(np.prod(plan.network.strides, axis=0) <= 4)  # the network follows the patch
    plan = made.prepared(scans, str(tmp_path / "b"), plan={"network": {"convs": 1}}).prepared.plan
    assert plan.network.convs == 1
    own = made.prepared(scans, str(tmp_path / "c"), plan={}).prepared.plan
    assert own.network.strides == plan.network.strides
    pinned = made.prepared(scans, str(tmp_path / "d"), plan=settings.plain(own)).prepared.plan
    assert pinned == own


# -- again -------------------------------------------------------------------------------------------------------------


def test_a_second_run_writes_nothing(scans: str, dst: Path) -> None:
    first = made.prepared(scans, str(dst))
    before = {p: p.stat().st_mtime_ns for p in dst.rglob("*") if p.is_file()}
    second = made.prepared(scans, str(dst))
    assert (second.checked, second.written) == (0, 0)
    assert second.prepared == first.prepared
    assert {p: p.stat().st_mtime_ns for p in dst.rglob("*") if p.is_file()} == before


def test_a_changed_case_alone_is_done_again(scans: str, dst: Path) -> None:
    plan = CT_NOTHING  # a CT's normalisation otherwise follows the intensities of all cases
    first = made.prepared(scans, str(dst), plan=plan).prepared
    image, label = made.ct(99, (28, 24, 15))
    made.save(Path(scans), {"case_00002/imaging.nii.gz": made.nifti(image)})
    made.save(Path(scans), {"case_00002/segmentation.nii.gz": made.nifti(label)})
    before = volumes(dst)
    second = made.prepared(scans, str(dst), plan=plan)
    assert (second.checked, second.written) == (1, 1)
    changed = {name.split("/")[1] for name, body in volumes(dst).items() if before.get(name) != body}
    assert changed == {"case_00002.zarr"}
    np.testing.assert_array_equal(Cases(second.prepared).open(2).whole()[0][0], nib_canonical(image))
    assert second.prepared.digest != first.digest


def nib_canonical(array: np.ndarray) -> np.ndarray:
    return np.asarray(nibabel.as_closest_canonical(nibabel.Nifti1Image(array, made.AFFINE)).dataobj).T


def test_cases_that_come_and_go_leave_the_folds_of_the_others(scans: str, dst: Path) -> None:
    first = made.prepared(scans, str(dst), plan=CT_NOTHING).prepared
    folds = {first.case(i).id: first.case(i).fold for i in range(6)}
    made.save(Path(scans), made.kits(2, first=6))
    for file in Path(scans, "case_00001").iterdir():
        file.unlink()
    done = made.prepared(scans, str(dst), plan=CT_NOTHING)
    assert (done.checked, done.written) == (2, 2)
    assert done.prepared.ids == [f"case_{n:05d}" for n in (0, 2, 3, 4, 5, 6, 7)]
    found = {done.prepared.case(i).id: done.prepared.case(i).fold for i in range(7)}
    assert {case: fold for case, fold in found.items() if case in folds} == {c: folds[c] for c in found if c in folds}
    with pytest.raises(PreparedError):
        Prepared.load(f"{dst}/cases")


def test_another_plan_and_back(scans: str, dst: Path) -> None:
    """The volumes of the first plan were written over by the second: its notes hold no longer."""
    first = made.prepared(scans, str(dst), plan=CT_NOTHING)
    before = volumes(dst)
    coarse = made.prepared(scans, str(dst), plan={**CT_NOTHING, "spacing": [4.0, 2.0, 2.0]})
    assert (coarse.checked, coarse.written) == (0, 6)
    back = made.prepared(scans, str(dst), plan=CT_NOTHING)
    assert (back.checked, back.written) == (0, 6)
    after = volumes(dst)
    assert {name: after[name] for name in before} == before
    assert back.prepared.plan == first.prepared.plan
    for row in range(6):
        Cases(back.prepared).open(row).whole()


def test_what_the_volumes_do_not_depend_on_does_not_write_them(scans: str, dst: Path) -> None:
    made.prepared(scans, str(dst))
    done = made.prepared(
        scans, str(dst), plan={**made.PLAN, "batch": 7, "network": {"convs": 1}}, folds=3, description={"name": "mine"}
    )
    assert (done.checked, done.written) == (0, 0)
    assert (done.prepared.plan.batch, done.prepared.folds, done.prepared.description.name) == (7, 3, "mine")


def test_damaged_notes_are_made_anew(scans: str, dst: Path) -> None:
    made.prepared(scans, str(dst))
    for note in (dst / "work").rglob("case_00003*.json"):
        note.write_bytes(b"{")
    done = made.prepared(scans, str(dst))
    assert (done.checked, done.written) == (1, 1)


def test_two_workers_write_the_same_bytes_as_one(scans: str, dst: Path, tmp_path: Path) -> None:
    made.prepared(scans, str(dst))
    done = made.prepared(scans, str(tmp_path / "two"), workers=2)
    assert (done.checked, done.written) == (6, 6)
    assert volumes(tmp_path / "two") == volumes(dst)
    assert json.loads((tmp_path / "two" / "prepared.json").read_text())["fingerprint"] == done.prepared.fingerprint
    one = Prepared.load(str(dst))
    assert (one.plan, one.fingerprint, one.ids) == (done.prepared.plan, done.prepared.fingerprint, done.prepared.ids)


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_run_that_is_killed_goes_on(scans: str, dst: Path, tmp_path: Path) -> None:
    for number in range(3, 6):  # slow enough to be killed half-way
        image, label = made.ct(number, (112, 112, 48))
        made.save(Path(scans, f"case_{number:05d}"), {"imaging.nii.gz": made.nifti(image)})
        made.save(Path(scans, f"case_{number:05d}"), {"segmentation.nii.gz": made.nifti(label)})
    code = f"from tests.volume import made; made.prepared({scans!r}, {str(dst)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wanted, deadline = 2, time.monotonic() + 60
    while len(list((dst / "work" / "write").glob("*.json"))) < wanted:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    checked, written = (len(list((dst / "work" / stage).glob("*.json"))) for stage in ("check", "write"))
    assert checked == 6
    assert wanted <= written < 6
    with pytest.raises(PreparedError, match=r"has not finished\. Run the same voxlane prepare again: it goes on"):
        Prepared.load(str(dst))
    done = made.prepared(scans, str(dst))
    assert (done.checked, done.written) == (6 - checked, 6 - written)
    whole = made.prepared(scans, str(tmp_path / "whole"))
    assert volumes(dst) == volumes(tmp_path / "whole")
    assert done.prepared.plan == whole.prepared.plan


# -- places ------------------------------------------------------------------------------------------------------------


def test_from_and_to_every_kind_of_bucket(shared_bucket: Bucket, scans: str, tmp_path: Path) -> None:
    bucket = shared_bucket
    src = made.put(bucket, made.kits(3), "my scans/")
    there = made.prepared(src, f"{bucket.uri}/data/", bucket.config)
    assert (there.checked, there.written) == (3, 3)
    assert there.prepared.uri == f"{bucket.uri}/data"
    again = made.prepared(src, f"{bucket.uri}/data", bucket.config)
    assert (again.checked, again.written, again.prepared) == (0, 0, there.prepared)
    here = made.prepared(src, str(tmp_path / "out"), bucket.config).prepared
    for row in range(3):
        for one, other in zip(Cases(there.prepared).open(row).whole(), Cases(here).open(row).whole(), strict=True):
            np.testing.assert_array_equal(one, other)
    # A volume whose object is gone is written again.
    bucket.store.delete(bucket.key("data/cases/case_00001.zarr/label/c/0/0/0"))
    mended = made.prepared(src, f"{bucket.uri}/data", bucket.config)
    assert (mended.checked, mended.written) == (0, 1)
    Cases(mended.prepared).open(1).whole()


def test_to_the_root_of_a_bucket_from_a_folder(gcs: Bucket, scans: str) -> None:
    dataset = made.prepared(scans, "gs://bkt", gcs.config).prepared
    Cases(dataset).open(0).whole()
    assert Prepared.load("gs://bkt/", gcs.config).ids == dataset.ids


def test_ids_with_odd_characters(bucket: Bucket, tmp_path: Path) -> None:
    ids = ["visit 1", "ü.1", "50%", "a+b=c", "x#y?z", "a%20b", "a b", "case:1", "[1]*", "a~", "&'\"<>"]
    rows = [{"image": "case_00000/imaging.nii.gz", "label": "case_00000/segmentation.nii.gz", "id": i} for i in ids]
    description = {"channels": ["CT"], "labels": {"background": 0, "kidney": 1, "tumour": 2}}
    document = {"description": description, "cases": rows}
    src = made.save(tmp_path / "scans", made.kits(1) | {"list.json": json.dumps(document).encode()})
    for times in (len(ids), 0):
        done = made.prepared(f"{src}/list.json", f"{bucket.uri}/data", bucket.config)
        assert (done.checked, done.written) == (times, times)
    assert done.prepared.ids == sorted(ids)
    cases = Cases(done.prepared)
    for row, case in enumerate(sorted(ids)):
        assert cases.open(row).case.volume["case"] == case
        assert cases.open(row).whole()[1].any()


def test_progress_is_shown_when_asked(scans: str, dst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(scans, str(dst), made.how(), progress=False)
    assert capsys.readouterr().err == ""
    prepare(scans, str(dst), made.how(), progress=True)
    said = capsys.readouterr().err
    assert "checking: 100%" in said
    assert "preparing: 100%" in said


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="workers are found in /proc")
def test_a_worker_that_is_killed_says_to_use_fewer(tmp_path: Path, dst: Path) -> None:
    scans = made.save(tmp_path / "scans", made.kits(60))
    code = f"from tests.volume import made; made.prepared({scans!r}, {str(dst)!r}, workers=2)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(dst.glob("work/check/*")):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(spawned_by(process.pid)[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a worker process was killed, most likely for want of memory. Run the same command with fewer" in said
    done = made.prepared(scans, str(dst))
    assert len(done.prepared) == 60


def spawned_by(pid: int) -> list[int]:
    """Worker processes of `pid`; not what keeps track of their shared memory."""
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_another_dataset_is_not_written_over(tmp_path: Path, dst: Path) -> None:
    made.prepared(made.save(tmp_path / "scans", made.kits(2)), str(dst))
    before = (dst / "prepared.json").read_bytes()
    with pytest.raises(PreparedError, match=r"prepared from .*scans/, is here. Choose another DST"):
        made.prepared(made.save(tmp_path / "others", made.kits(2, first=7)), str(dst))
    assert (dst / "prepared.json").read_bytes() == before
