"""Every kind of problem, from a real bad file."""

from __future__ import annotations

import concurrent.futures
import gzip
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

import nibabel
import numpy as np
import pytest

from tests.conftest import Bucket
from voxlane.errors import BucketNotFoundError
from voxlane.volume.check import Kind, Problem, load_case, table
from voxlane.volume.description import Description
from voxlane.volume.source import SourceCase

REAL = Path(os.environ.get("VOXLANE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
CT = Description(name="a", channels=("CT",), labels={"background": 0, "kidney": 1, "tumour": 2})
MR = replace(CT, channels=("T1", "T2"))
SHAPE = (6, 7, 8)
AFFINE = np.diag([-0.8, -0.8, 3, 1.0])


def save(path: Path, array: np.ndarray, affine: np.ndarray = AFFINE) -> str:
    path.write_bytes(gzip.compress(nibabel.Nifti1Image(array, affine).to_bytes(), 1))
    return str(path)


class Files:
    """A good case on disk, to be made bad."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.folder = folder
        self.image = rng.normal(size=SHAPE).astype(np.float32)
        self.label = rng.integers(0, 3, SHAPE, np.uint8)
        self.case = SourceCase(
            "c1",
            "c1",
            (save(folder / "image.nii.gz", self.image),),
            save(folder / "label.nii.gz", self.label),
        )

    def channels(self, *arrays: np.ndarray, affine: np.ndarray = AFFINE) -> SourceCase:
        """The case with these images; `affine` is that of all but the first."""
        return replace(
            self.case,
            images=tuple(
                save(self.folder / f"t{i}.nii.gz", array, affine if i else AFFINE) for i, array in enumerate(arrays)
            ),
        )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def only(case: SourceCase, description: Description = CT) -> Problem:
    """The one problem of `case`; what it concerns is not returned."""
    scan, label, problems = load_case(case, description)
    (problem,) = problems
    assert problem.case == "c1"
    assert problem.kind in get_args(Kind)
    if problem.fatal:
        assert scan is None or label is None
    return problem


def test_a_good_case_has_no_problem(files: Files) -> None:
    scan, label, problems = load_case(files.case, CT)
    assert problems == []
    assert scan is not None
    assert label is not None
    assert scan.image.shape == (1, *label.shape) == (1, 8, 7, 6)
    np.testing.assert_array_equal(scan.geometry.from_canonical(label), files.label)
    np.testing.assert_array_equal(scan.geometry.from_canonical(scan.image[0]), files.image)


def test_unreadable(files: Files) -> None:
    for uri in (files.case.images[0], str(files.case.label)):
        good = Path(uri).read_bytes()
        Path(uri).write_bytes(good[: len(good) // 2])
        problem = only(files.case)
        assert (problem.kind, problem.fatal) == ("unreadable", True)
        assert problem.detail.startswith(f"{Path(uri).name}: truncated")
        Path(uri).write_bytes(good)


def test_not_3d(files: Files) -> None:
    problem = only(files.channels(files.image[0]))
    assert (problem.kind, problem.fatal) == ("not-3d", True)
    assert "a 2D image: shape 7 x 8" in problem.detail
    problem = only(files.channels(np.zeros((6, 7, 8, 1, 2), np.float32)))
    assert "5D" in problem.detail
    four = np.zeros((*SHAPE, 2), np.float32)
    problem = only(files.channels(files.image, four), MR)
    assert (problem.kind, problem.fatal) == ("not-3d", True)
    assert "t1.nii.gz is a 4D file of 2 volumes" in problem.detail
    problem = only(replace(files.case, label=save(files.folder / "l4.nii.gz", four.astype(np.uint8))))
    assert problem.kind == "not-3d"
    assert "the label is a 4D file of 2 volumes" in problem.detail


def test_shape(files: Files) -> None:
    problem = only(replace(files.case, label=save(files.folder / "short.nii.gz", files.label[:, :, :3])))
    assert (problem.kind, problem.fatal) == ("shape", True)
    assert "8 x 7 x 6 and 3 x 7 x 6 voxels (z, y, x)" in problem.detail
    problem = only(files.channels(files.image, files.image[:5]), MR)
    assert problem.kind == "shape"
    assert problem.detail.startswith("t0.nii.gz and t1.nii.gz")


@pytest.mark.parametrize(("shift_mm", "fatal"), [(5.0, True), (0.3, False), (0.005, None)])
def test_affine(files: Files, shift_mm: float, fatal: bool | None) -> None:
    shifted = AFFINE.copy()
    shifted[2, 3] = shift_mm
    case = replace(files.case, label=save(files.folder / "shifted.nii.gz", files.label, shifted))
    scan, label, problems = load_case(case, CT)
    assert scan is not None
    assert (label is None) == bool(fatal)
    assert [(p.kind, p.fatal) for p in problems] == ([] if fatal is None else [("affine", fatal)])
    assert all("the origins differ" in p.detail for p in problems)


def test_affine_of_a_channel(files: Files) -> None:
    problem = only(files.channels(files.image, files.image, affine=np.diag([-0.8, -0.8, 2, 1.0])), MR)
    assert (problem.kind, problem.fatal) == ("affine", True)
    assert "spacings differ: 3 x 0.8 x 0.8 and 2 x 0.8 x 0.8 mm" in problem.detail


def test_missing(files: Files) -> None:
    problem = only(replace(files.case, label=None))
    assert (problem.kind, problem.fatal) == ("missing-label", True)
    assert "image.nii.gz" in problem.detail
    problem = only(replace(files.case, label=f"{files.folder}/none.nii.gz"))
    assert problem.kind == "missing-label"
    problem = only(replace(files.case, images=(f"{files.folder}/none.nii.gz",)))
    assert (problem.kind, problem.fatal) == ("missing-image", True)
    assert "none.nii.gz does not exist" in problem.detail
    case = replace(files.case, images=(*files.case.images, f"{files.folder}/none.nii.gz"))
    assert only(case, MR).kind == "missing-image"


def test_label_values(files: Files) -> None:
    wrong = files.label.copy()
    wrong[0, 0, :2] = (7, 9)
    problem = only(replace(files.case, label=save(files.folder / "wrong.nii.gz", wrong)))
    assert (problem.kind, problem.fatal) == ("label-values", True)
    assert problem.detail.startswith("wrong.nii.gz has the values 7 (1 voxels), 9 (1 voxels), which are not among")
    assert "background 0, kidney 1, tumour 2" in problem.detail
    half = wrong.astype(np.float32) / 2
    problem = only(replace(files.case, label=save(files.folder / "half.nii.gz", half)))
    assert problem.kind == "label-values"
    assert "no whole numbers, such as 3.5" in problem.detail


@pytest.mark.parametrize(("own", "found", "years"), [(3, 4, "2018 to 2021"), (4, 3, "since 2023")])
def test_label_values_of_the_other_brats_numbering(files: Files, own: int, found: int, years: str) -> None:
    label = np.where(files.label == 2, found, files.label).astype(np.uint8)
    description = Description(name="b", channels=("T1",), labels={"background": 0, "NCR": 1, "ED": 2, "ET": own})
    problem = only(replace(files.case, label=save(files.folder / "b.nii.gz", label)), description)
    assert problem.kind == "label-values"
    assert years in problem.detail


def test_nan(files: Files) -> None:
    bad = files.image.copy()
    bad[0, 0, :3] = (np.nan, np.inf, -np.inf)
    problem = only(files.channels(bad))
    assert (problem.kind, problem.fatal) == ("nan", True)
    assert problem.detail == "t0.nii.gz: 3 of 336 voxels are NaN or infinite"
    problem = only(files.channels(files.image, bad), MR)
    assert problem.detail.startswith("t1.nii.gz: 3 of 336")
    problem = only(files.channels(np.stack([files.image, bad], -1)), MR)
    assert "voxels of channel 1 are NaN" in problem.detail
    assert only(files.channels(np.full(SHAPE, 1e300))).kind == "nan"  # more than float32 holds


def test_empty_foreground_is_a_warning(files: Files) -> None:
    case = replace(files.case, label=save(files.folder / "empty.nii.gz", np.zeros(SHAPE, np.uint8)))
    scan, label, problems = load_case(case, CT)
    assert scan is not None
    assert label is not None
    assert [(p.kind, p.fatal) for p in problems] == [("empty-foreground", False)]
    assert problems[0].detail == "empty.nii.gz is background everywhere"


def test_channels(files: Files) -> None:
    problem = only(files.channels(np.zeros((*SHAPE, 3), np.float32)))
    assert (problem.kind, problem.fatal) == ("channels", True)
    assert problem.detail == "t0.nii.gz is a 4D file of 3 channels, the description has 1 (CT)"
    assert "is a 3D file of 1 channel, the description has 2 (T1, T2)" in only(files.case, MR).detail
    assert "2 image files, the description has 1 (CT)" in only(files.channels(files.image, files.image)).detail


def test_every_kind_is_made_above() -> None:
    text = Path(__file__).read_text()
    assert all(f'"{kind}"' in text for kind in get_args(Kind))


def test_channels_of_other_types_and_axes_are_stacked_in_one_grid(files: Files) -> None:
    turned = nibabel.Nifti1Image(files.label.astype(np.int16), AFFINE).as_reoriented(
        np.array([[2, 1], [0, -1], [1, 1]])
    )
    path = files.folder / "turned.nii.gz"
    path.write_bytes(gzip.compress(turned.to_bytes()))
    case = replace(files.channels(files.image, files.image), label=files.case.label)
    scan, label, problems = load_case(replace(case, images=(case.images[0], str(path))), MR)
    assert problems == []
    assert scan is not None
    assert scan.image.dtype == np.float32
    np.testing.assert_array_equal(scan.image[1], label)
    np.testing.assert_array_equal(scan.geometry.from_canonical(scan.image[0]), files.image)


def test_several_problems_of_one_case_come_together(files: Files) -> None:
    bad = files.image.copy()
    bad[0] = np.nan
    label = np.full((6, 7, 4), 9, np.uint8)
    case = replace(files.channels(bad), label=save(files.folder / "bad.nii.gz", label))
    scan, found, problems = load_case(case, CT)
    assert scan is None
    assert found is None
    assert [p.kind for p in problems] == ["nan", "shape", "label-values"]


def test_what_is_no_fault_of_the_case_is_raised(files: Files, gcs: Bucket) -> None:
    case = replace(files.case, images=("gs://no-such-bucket/a.nii.gz",))
    with pytest.raises(BucketNotFoundError):
        load_case(case, CT, gcs.config)


def test_runs_in_another_process(files: Files) -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        scan, label, problems = pool.submit(load_case, replace(files.case, label=None), CT).result(timeout=60)
    assert scan is not None
    assert scan.geometry.spacing == pytest.approx((3, 0.8, 0.8))
    assert label is None
    assert [p.kind for p in problems] == ["missing-label"]


def test_table() -> None:
    long = "word " * 40
    problems = [
        Problem("case_2", "nan", long.strip(), True),
        Problem("case_10", "empty-foreground", "label.nii.gz is background everywhere", False),
        Problem("case_10", "affine", "the origins differ", True),
    ]
    lines = table(problems, width=100).splitlines()
    assert lines[0].split() == ["case", "problem", "detail"]
    assert lines[1].split()[:3] == ["case_10", "affine", "error"]
    assert lines[2].split()[:3] == ["case_10", "empty-foreground", "warning"]
    start = lines[0].index("detail")
    assert all(line[start - 1] == " " != line[start] for line in lines)
    assert all(len(line) <= 100 for line in lines)
    assert "\n".join(lines).count("word") == 40
    assert table([]) == ""


@pytest.mark.skipif(not (REAL / "ct").is_dir(), reason="the real data is not here")
def test_the_real_bad_pair_is_refused() -> None:
    case = SourceCase("ct", "ct", (f"{REAL}/ct/example_ct.nii.gz",), f"{REAL}/ct/example_seg.nii.gz")
    _, label, problems = load_case(case, CT)
    assert label is None
    assert [p.kind for p in problems] == ["shape", "label-values"]
    assert "112 x 101 x 122 and 30 x 101 x 122" in problems[0].detail


def test_of_very_many_problems_the_kinds_are_counted() -> None:
    problems = [Problem(f"case_{n:03d}", "missing-label", "no label file", True) for n in range(100)]
    told = table(problems)
    assert told.count("\n") == 61
    assert told.endswith("... and 40 more; in all 100 missing-label")
