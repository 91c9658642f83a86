"""Pairing of scans or masks with labels by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Bucket
from voxlane.errors import LayoutError
from voxlane.volume.pairing import Pairing, pair_files


def pair(folder: Path, images: list[str], labels: list[str]) -> Pairing:
    for below, names in (("images", images), ("labels", labels)):
        for name in names:
            path = folder / below / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return pair_files(str(folder / "images"), str(folder / "labels"))


def file_names(pairing: Pairing) -> dict[str, tuple[list[str], str]]:
    return {
        case.id: ([uri.split("/images/")[1] for uri in case.images], str(case.label).split("/labels/")[1])
        for case in pairing.cases
    }


@pytest.mark.parametrize(
    ("images", "labels", "expected"),
    [
        (["a.nii.gz", "b.nii"], ["a.nii.gz", "b.mha"], {"a": (["a.nii.gz"], "a.nii.gz"), "b": (["b.nii"], "b.mha")}),
        (["a_0000.nii.gz"], ["a.nii.gz"], {"a": (["a_0000.nii.gz"], "a.nii.gz")}),
        (
            ["a_0001.nii.gz", "a_0000.nii.gz", "la_0003_0000.nii.gz"],
            ["a.nii.gz", "la_0003.nii.gz"],
            {
                "a": (["a_0000.nii.gz", "a_0001.nii.gz"], "a.nii.gz"),
                "la_0003": (["la_0003_0000.nii.gz"], "la_0003.nii.gz"),
            },
        ),
        (["v_0001.nii.gz"], ["v_0001.nii.gz"], {"v_0001": (["v_0001.nii.gz"], "v_0001.nii.gz")}),
        (["a_x.npy"], ["a_y.npy"], {"a": (["a_x.npy"], "a_y.npy")}),
        (
            ["c1/imaging.nii.gz", "c2/imaging.nii.gz"],
            ["c1/segmentation.nii.gz", "c2/segmentation.nii.gz"],
            {
                "c1": (["c1/imaging.nii.gz"], "c1/segmentation.nii.gz"),
                "c2": (["c2/imaging.nii.gz"], "c2/segmentation.nii.gz"),
            },
        ),
        (
            ["s1/a.nii.gz", "s2/a.nii.gz", "s2/b.nii.gz"],
            ["s1/a.nii.gz", "s2/a.nii.gz", "s2/b.nii.gz"],
            {f"{s}_{c}": ([f"{s}/{c}.nii.gz"], f"{s}/{c}.nii.gz") for s, c in (("s1", "a"), ("s2", "a"), ("s2", "b"))},
        ),
    ],
)
def test_pairs(tmp_path: Path, images: list[str], labels: list[str], expected: object) -> None:
    pairing = pair(tmp_path, images, labels)
    assert file_names(pairing) == expected
    assert (pairing.without_image, pairing.without_label) == ((), ())


def test_unpaired_files_are_named(tmp_path: Path) -> None:
    pairing = pair(tmp_path, ["a.nii.gz", "b_0000.nii.gz", "._a.nii.gz", "dataset.json"], ["a.nii.gz", "c.nii.gz"])
    assert [case.id for case in pairing.cases] == ["a"]
    assert (pairing.without_label, pairing.without_image) == (("b",), ("c",))


def test_two_files_are_a_pair(tmp_path: Path) -> None:
    pair(tmp_path, ["mask.nii.gz"], ["truth.nii.gz"])
    pairing = pair_files(str(tmp_path / "images/mask.nii.gz"), str(tmp_path / "labels/truth.nii.gz"))
    assert file_names(pairing) == {"truth": (["mask.nii.gz"], "truth.nii.gz")}


def test_files_in_a_bucket(gcs: Bucket) -> None:
    for name in ("p/a.nii.gz", "p/b.nii.gz", "l/a.nii.gz"):
        gcs.store.put(name, b"")
    pairing = pair_files("gs://bkt/p", "gs://bkt/l/", gcs.config)
    assert [(case.images, case.label) for case in pairing.cases] == [(("gs://bkt/p/a.nii.gz",), "gs://bkt/l/a.nii.gz")]
    assert pairing.without_label == ("b",)


def test_folders_that_cannot_be_paired(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"images/: no scans here: it contains notes.txt. Use a folder of files"):
        pair(tmp_path, ["notes.txt"], ["a.nii.gz"])
    with pytest.raises(LayoutError, match=r"two files are named a\. Give a list of pairs"):
        pair(tmp_path, ["a.nii.gz"], ["a.nii.gz", "a.nii"])
