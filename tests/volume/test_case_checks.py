"""Checks report every kind of problem, each shown with a real bad file."""

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
from voxlane.volume.case_checks import CaseProblem, ProblemKind, format_problems, load_case
from voxlane.volume.dataset_discovery import SourceCase
from voxlane.volume.description import Description

REAL = Path(os.environ.get("VOXLANE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
CT = Description(name="a", channels=("CT",), labels={"background": 0, "kidney": 1, "tumour": 2})
MR = replace(CT, channels=("T1", "T2"))
SHAPE = (6, 7, 8)
AFFINE = np.diag([-0.8, -0.8, 3, 1.0])


def save_nifti(path: Path, array: np.ndarray, affine: np.ndarray = AFFINE) -> str:
    path.write_bytes(gzip.compress(nibabel.Nifti1Image(array, affine).to_bytes(), 1))
    return str(path)


class CaseFiles:
    """A good case on disk, which tests damage."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.folder = folder
        self.image = rng.normal(size=SHAPE).astype(np.float32)
        self.label = rng.integers(0, 3, SHAPE, np.uint8)
        self.case = SourceCase(
            "c1",
            "c1",
            (save_nifti(folder / "image.nii.gz", self.image),),
            save_nifti(folder / "label.nii.gz", self.label),
        )

    def channels(self, *arrays: np.ndarray, affine: np.ndarray = AFFINE) -> SourceCase:
        """Return the case with these images. All but the first have `affine`."""
        return replace(
            self.case,
            images=tuple(
                save_nifti(self.folder / f"t{i}.nii.gz", array, affine if i else AFFINE)
                for i, array in enumerate(arrays)
            ),
        )


@pytest.fixture
def files(tmp_path: Path) -> CaseFiles:
    return CaseFiles(tmp_path)


def load_only_problem(case: SourceCase, description: Description = CT) -> CaseProblem:
    """Return the only problem of `case`, and check that a fatal problem withholds the scan or the label."""
    scan, label, problems = load_case(case, description)
    (problem,) = problems
    assert problem.case == "c1"
    assert problem.kind in get_args(ProblemKind)
    if problem.fatal:
        assert scan is None or label is None
    return problem


def test_good_case_has_no_problem(files: CaseFiles) -> None:
    scan, label, problems = load_case(files.case, CT)
    assert problems == []
    assert scan is not None
    assert label is not None
    assert scan.image.shape == (1, *label.shape) == (1, 8, 7, 6)
    np.testing.assert_array_equal(scan.geometry.from_canonical(label), files.label)
    np.testing.assert_array_equal(scan.geometry.from_canonical(scan.image[0]), files.image)


def test_unreadable(files: CaseFiles) -> None:
    for uri in (files.case.images[0], str(files.case.label)):
        body = Path(uri).read_bytes()
        Path(uri).write_bytes(body[: len(body) // 2])
        problem = load_only_problem(files.case)
        assert (problem.kind, problem.fatal) == ("unreadable", True)
        assert problem.detail.startswith(f"{Path(uri).name}: truncated")
        Path(uri).write_bytes(body)


def test_not_3d(files: CaseFiles) -> None:
    problem = load_only_problem(files.channels(files.image[0]))
    assert (problem.kind, problem.fatal) == ("not-3d", True)
    assert "a 2D image: shape 7 x 8" in problem.detail
    problem = load_only_problem(files.channels(np.zeros((6, 7, 8, 1, 2), np.float32)))
    assert "5D" in problem.detail
    array_4d = np.zeros((*SHAPE, 2), np.float32)
    problem = load_only_problem(files.channels(files.image, array_4d), MR)
    assert (problem.kind, problem.fatal) == ("not-3d", True)
    assert "t1.nii.gz is a 4D file of 2 volumes" in problem.detail
    problem = load_only_problem(
        replace(files.case, label=save_nifti(files.folder / "l4.nii.gz", array_4d.astype(np.uint8)))
    )
    assert problem.kind == "not-3d"
    assert "the label is a 4D file of 2 volumes" in problem.detail


def test_shape(files: CaseFiles) -> None:
    problem = load_only_problem(
        replace(files.case, label=save_nifti(files.folder / "short.nii.gz", files.label[:, :, :3]))
    )
    assert (problem.kind, problem.fatal) == ("shape", True)
    assert "8 x 7 x 6 and 3 x 7 x 6 voxels (z, y, x)" in problem.detail
    problem = load_only_problem(files.channels(files.image, files.image[:5]), MR)
    assert problem.kind == "shape"
    assert problem.detail.startswith("t0.nii.gz and t1.nii.gz")


@pytest.mark.parametrize(("shift_mm", "fatal"), [(5.0, True), (0.3, False), (0.005, None)])
def test_affine(files: CaseFiles, shift_mm: float, fatal: bool | None) -> None:
    shifted = AFFINE.copy()
    shifted[2, 3] = shift_mm
    case = replace(files.case, label=save_nifti(files.folder / "shifted.nii.gz", files.label, shifted))
    scan, label, problems = load_case(case, CT)
    assert scan is not None
    assert (label is None) == bool(fatal)
    assert [(p.kind, p.fatal) for p in problems] == ([] if fatal is None else [("affine", fatal)])
    assert all("the origins differ" in p.detail for p in problems)


def test_image_and_label_of_the_same_name_are_told_apart(files: CaseFiles) -> None:
    (files.folder / "labels").mkdir()
    case = replace(
        files.case, label=save_nifti(files.folder / "labels" / "image.nii.gz", files.label[:, :, :3].astype(np.uint8))
    )
    problem = load_only_problem(case)
    assert problem.detail.startswith("image image.nii.gz and label image.nii.gz: the shapes differ")
    (files.folder / "labels" / "image.nii.gz").write_bytes(b"")
    assert load_only_problem(case).detail.startswith("label image.nii.gz: the file is empty")
    Path(files.case.images[0]).write_bytes(b"")
    Path(str(case.label)).write_bytes(b"")
    problems = load_case(case, CT)[2]
    assert [problem.detail.partition(":")[0] for problem in problems] == ["image image.nii.gz", "label image.nii.gz"]


def test_affine_of_a_channel(files: CaseFiles) -> None:
    problem = load_only_problem(files.channels(files.image, files.image, affine=np.diag([-0.8, -0.8, 2, 1.0])), MR)
    assert (problem.kind, problem.fatal) == ("affine", True)
    assert "spacings differ: 3 x 0.8 x 0.8 and 2 x 0.8 x 0.8 mm" in problem.detail


def test_missing(files: CaseFiles) -> None:
    problem = load_only_problem(replace(files.case, label=None))
    assert (problem.kind, problem.fatal) == ("missing-label", True)
    assert "image.nii.gz" in problem.detail
    problem = load_only_problem(replace(files.case, label=f"{files.folder}/none.nii.gz"))
    assert problem.kind == "missing-label"
    problem = load_only_problem(replace(files.case, images=(f"{files.folder}/none.nii.gz",)))
    assert (problem.kind, problem.fatal) == ("missing-image", True)
    assert "none.nii.gz does not exist" in problem.detail
    case = replace(files.case, images=(*files.case.images, f"{files.folder}/none.nii.gz"))
    assert load_only_problem(case, MR).kind == "missing-image"


def test_label_values(files: CaseFiles) -> None:
    wrong_label = files.label.copy()
    wrong_label[0, 0, :2] = (7, 9)
    problem = load_only_problem(replace(files.case, label=save_nifti(files.folder / "wrong.nii.gz", wrong_label)))
    assert (problem.kind, problem.fatal) == ("label-values", True)
    assert problem.detail.startswith("wrong.nii.gz contains the values 7 (1 voxels), 9 (1 voxels), which are not among")
    assert "background 0, kidney 1, tumour 2" in problem.detail
    half_label = wrong_label.astype(np.float32) / 2
    problem = load_only_problem(replace(files.case, label=save_nifti(files.folder / "half.nii.gz", half_label)))
    assert problem.kind == "label-values"
    assert "not integers, such as 3.5" in problem.detail


@pytest.mark.parametrize(("described", "actual", "years"), [(3, 4, "2018 to 2021"), (4, 3, "since 2023")])
def test_label_values_of_the_other_brats_numbering(files: CaseFiles, described: int, actual: int, years: str) -> None:
    label = np.where(files.label == 2, actual, files.label).astype(np.uint8)
    description = Description(name="b", channels=("T1",), labels={"background": 0, "NCR": 1, "ED": 2, "ET": described})
    problem = load_only_problem(replace(files.case, label=save_nifti(files.folder / "b.nii.gz", label)), description)
    assert problem.kind == "label-values"
    assert years in problem.detail


def test_nan(files: CaseFiles) -> None:
    bad_image = files.image.copy()
    bad_image[0, 0, :3] = (np.nan, np.inf, -np.inf)
    problem = load_only_problem(files.channels(bad_image))
    assert (problem.kind, problem.fatal) == ("nan", True)
    assert problem.detail == "t0.nii.gz: 3 of 336 voxels are NaN or infinite"
    problem = load_only_problem(files.channels(files.image, bad_image), MR)
    assert problem.detail.startswith("t1.nii.gz: 3 of 336")
    problem = load_only_problem(files.channels(np.stack([files.image, bad_image], -1)), MR)
    assert "voxels of channel 1 are NaN" in problem.detail
    assert load_only_problem(files.channels(np.full(SHAPE, 1e300))).kind == "nan"  # overflows float32


def test_empty_foreground_is_a_warning(files: CaseFiles) -> None:
    case = replace(files.case, label=save_nifti(files.folder / "empty.nii.gz", np.zeros(SHAPE, np.uint8)))
    scan, label, problems = load_case(case, CT)
    assert scan is not None
    assert label is not None
    assert [(p.kind, p.fatal) for p in problems] == [("empty-foreground", False)]
    assert problems[0].detail == "empty.nii.gz contains only background"


def test_channels(files: CaseFiles) -> None:
    problem = load_only_problem(files.channels(np.stack([files.image] * 3, -1)))
    assert (problem.kind, problem.fatal) == ("channels", True)
    assert problem.detail == "t0.nii.gz is a 4D file of 3 channels, but the description has 1 (CT)"
    assert "is a 3D file of 1 channel, but the description has 2 (T1, T2)" in load_only_problem(files.case, MR).detail
    assert (
        "2 image files, but the description has 1 (CT)"
        in load_only_problem(files.channels(files.image, files.image)).detail
    )


def test_suspicious_headers_and_intensities(files: CaseFiles) -> None:
    uri = Path(files.case.images[0])
    body = bytearray(gzip.decompress(uri.read_bytes()))
    body[252:256] = bytes(4)  # neither sform nor qform
    uri.write_bytes(bytes(body) + b"more")
    _, _, problems = load_case(files.case, CT)
    assert [(p.kind, p.fatal) for p in problems[:2]] == [("header", False), ("geometry", False)]
    problem = load_only_problem(files.channels(np.full(SHAPE, 3, np.int16)))
    assert (problem.kind, problem.fatal) == ("intensity", True)
    assert problem.detail == "t0.nii.gz: every voxel is 3"


def test_every_kind_of_problem_has_a_test() -> None:
    names = ("case_checks", "case_workers", "dataset_check", "prepare")
    text = "".join(Path(__file__).with_name(f"test_{name}.py").read_text("utf-8") for name in names)
    assert all(f'"{kind}"' in text for kind in get_args(ProblemKind))


def test_channels_of_different_types_and_axes_share_one_grid(files: CaseFiles) -> None:
    values = np.arange(files.label.size, dtype=np.int16).reshape(files.label.shape)
    rotated = nibabel.Nifti1Image(values, AFFINE).as_reoriented(np.array([[2, 1], [0, -1], [1, 1]]))
    path = files.folder / "turned.nii.gz"
    path.write_bytes(gzip.compress(rotated.to_bytes()))
    case = replace(files.channels(files.image, files.image), label=files.case.label)
    scan, _, problems = load_case(replace(case, images=(case.images[0], str(path))), MR)
    assert problems == []
    assert scan is not None
    assert scan.image.dtype == np.float32
    np.testing.assert_array_equal(scan.geometry.from_canonical(scan.image[1]), values)
    np.testing.assert_array_equal(scan.geometry.from_canonical(scan.image[0]), files.image)


def test_all_problems_of_a_case_are_reported(files: CaseFiles) -> None:
    bad_image = files.image.copy()
    bad_image[0] = np.nan
    label = np.full((6, 7, 4), 9, np.uint8)
    case = replace(files.channels(bad_image), label=save_nifti(files.folder / "bad.nii.gz", label))
    scan, loaded_label, problems = load_case(case, CT)
    assert scan is None
    assert loaded_label is None
    assert [p.kind for p in problems] == ["nan", "shape", "label-values"]


def test_store_errors_are_raised(files: CaseFiles, gcs: Bucket) -> None:
    case = replace(files.case, images=("gs://no-such-bucket/a.nii.gz",))
    with pytest.raises(BucketNotFoundError):
        load_case(case, CT, gcs.config)


def test_load_case_runs_in_another_process(files: CaseFiles) -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        scan, label, problems = pool.submit(load_case, replace(files.case, label=None), CT).result(timeout=150)
    assert scan is not None
    assert scan.geometry.spacing == pytest.approx((3, 0.8, 0.8))
    assert label is None
    assert [p.kind for p in problems] == ["missing-label"]


def test_problem_table() -> None:
    long_detail = "word " * 40
    problems = [
        CaseProblem("case_2", "nan", long_detail.strip(), True),
        CaseProblem("case_10", "empty-foreground", "label.nii.gz contains only background", False),
        CaseProblem("case_10", "affine", "the origins differ", True),
    ]
    lines = format_problems(problems, width=100).splitlines()
    assert lines[0].split() == ["case", "problem", "detail"]
    assert lines[1].split()[:3] == ["case_10", "affine", "error"]
    assert lines[2].split()[:3] == ["case_10", "empty-foreground", "warning"]
    start = lines[0].index("detail")
    assert all(line[start - 1] == " " != line[start] for line in lines)
    assert all(len(line) <= 100 for line in lines)
    assert "\n".join(lines).count("word") == 40
    assert format_problems([]) == ""


@pytest.mark.skipif(not (REAL / "ct").is_dir(), reason="the real data is not available")
def test_real_bad_pair_is_rejected() -> None:
    case = SourceCase("ct", "ct", (f"{REAL}/ct/example_ct.nii.gz",), f"{REAL}/ct/example_seg.nii.gz")
    _, label, problems = load_case(case, CT)
    assert label is None
    assert [p.kind for p in problems] == ["shape", "label-values"]
    assert "112 x 101 x 122 and 30 x 101 x 122" in problems[0].detail


def test_long_problem_table_is_shortened_with_counts() -> None:
    problems = [CaseProblem(f"case_{n:03d}", "missing-label", "no label file", True) for n in range(100)]
    table_text = format_problems(problems)
    assert table_text.count("\n") == 61
    assert table_text.endswith("... and 40 more; in total 100 missing-label")
