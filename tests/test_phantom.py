"""Phantoms of the demo are reproducible, have the layout of KiTS19, and have plausible anatomy."""

from __future__ import annotations

import gzip
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from tests.conftest import Bucket
from voxlane import list_objects


@pytest.fixture(scope="module")
def phantom() -> ModuleType:
    """Import demo/phantom.py, which is not part of the package."""
    path = Path(__file__).parents[1] / "demo" / "phantom.py"
    spec = importlib.util.spec_from_file_location("demo_phantom", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cases(phantom: ModuleType) -> list[Any]:
    return [phantom.make(case, size=64) for case in range(8)]


def test_same_seed_gives_the_same_case(phantom: ModuleType, cases: list[Any]) -> None:
    again = phantom.make(3, size=64)
    assert np.array_equal(again.image, cases[3].image)
    assert np.array_equal(again.label, cases[3].label)
    assert again.spacing == cases[3].spacing
    other = phantom.make(3, size=64, seed=1)
    assert other.image.shape != again.image.shape or not np.array_equal(other.image, again.image)


def test_arrays_resemble_a_ct(cases: list[Any]) -> None:
    for case in cases:
        assert case.image.dtype == np.int16
        assert case.label.dtype == np.uint8
        assert case.image.shape == case.label.shape
        assert case.image.shape[1:] == (64, 64)
        assert case.image.min() >= -1024
        assert np.median(case.image[:, :3]) < -950, "air in front of the patient"
    assert len({case.spacing for case in cases}) > 4, "every scanner has its own spacing"


def test_every_case_has_kidneys_and_most_have_tumours(cases: list[Any]) -> None:
    tumours = 0
    for case in cases:
        millilitres = np.prod(case.spacing) / 1000 * np.bincount(case.label.ravel(), minlength=3)
        assert 60 < millilitres[1] < 600
        tumours += millilitres[2] > 0.5
        assert set(np.unique(case.label)) <= {0, 1, 2}
    assert tumours >= 5


def test_kidneys_lie_in_the_back_on_both_sides_of_the_spine(cases: list[Any]) -> None:
    both = 0
    for case in cases:
        _, rows, columns = np.nonzero(case.label == 1)
        assert rows.mean() > 32, "behind the middle"
        left, right = (columns < 30).sum(), (columns > 34).sum()
        both += min(left, right) > 0.15 * len(columns)
    assert both >= 6, "now and then one kidney is gone"


def test_intensity_alone_does_not_find_the_kidney(cases: list[Any]) -> None:
    for case in cases:
        kidney = case.image[case.label == 1]
        assert 90 < kidney.mean() < 240
        low, high = np.percentile(kidney, [10, 90])
        alike = (case.image > low) & (case.image < high)
        actual = 2 * (alike & (case.label == 1)).sum() / (alike.sum() + (case.label == 1).sum())
        assert actual < 0.6


def test_tumours_are_darker_than_the_kidney_around_them(cases: list[Any]) -> None:
    for case in cases:
        if (case.label == 2).sum() > 50:
            assert case.image[case.label == 2].mean() < case.image[case.label == 1].mean() - 15


def test_bucket_has_the_kits19_layout(phantom: ModuleType, gcs: Bucket) -> None:
    options = {"size": 48, "slice_mm": (6.0, 8.0)}
    names = list(phantom.write(f"{gcs.uri}/kits", 2, gcs.config, seed=7, **options))
    assert names == ["case_00000", "case_00001"]
    listed = [entry.key for entry in list_objects(f"{gcs.uri}/kits/", config=gcs.config)]
    assert [key.rsplit("kits/")[1] for key in listed] == [
        f"{name}/{kind}.nii.gz" for name in names for kind in ("imaging", "segmentation")
    ]
    expected = phantom.make(1, seed=7, **options)
    for kind, volume in (("imaging", expected.image), ("segmentation", expected.label)):
        body = bytes(gcs.store.get(gcs.key(f"kits/case_00001/{kind}.nii.gz")))
        image = nib.Nifti1Image.from_stream(io.BytesIO(gzip.decompress(body)))
        assert np.array_equal(np.asarray(image.dataobj), volume)
        assert nib.aff2axcodes(image.affine) == ("I", "P", "L"), "slices, rows, columns of KiTS19"
        assert np.allclose(image.header.get_zooms(), expected.spacing)
