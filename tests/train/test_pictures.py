"""Test pictures: the right slice and orientation, true proportions, and valid PNG."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from voxlane.train import pictures
from voxlane.volume.description import Description

SPACING = (5.0, 1.0, 1.0)


def volume() -> tuple[np.ndarray, np.ndarray]:
    """Return a bright ball in a grey body, and its label, most of it in slice 2."""
    image = np.full((5, 40, 60), 30.0, np.float32)
    label = np.zeros((5, 40, 60), np.uint8)
    label[1, 20:24, 40:44] = 1
    label[2, 18:28, 36:48] = 1
    label[2, 18:22, 36:40] = 2
    image[label > 0] = 200.0
    return image, label


def test_row_is_truth_scan_prediction() -> None:
    image, label = volume()
    row = pictures.draw_row(image, label, np.zeros_like(label), SPACING, (0, 255), height_px=80)
    width = (row.shape[1] - 2 * pictures.GAP_PX) // 3
    truth, scan, prediction = (row[:, i * (width + pictures.GAP_PX) :][:, :width] for i in range(3))
    assert row.dtype == np.uint8
    assert row.shape == (80, 3 * 120 + 2 * pictures.GAP_PX, 3)
    assert np.ptp(scan.astype(int), axis=2).max() == 0, "the scan is grey"
    assert np.ptp(truth.astype(int), axis=2).max() > 100, "the truth is coloured"
    white = (prediction == 255).all(2)
    assert 40 < white.sum() < 300, "a missed structure shows as its outline"
    assert np.array_equal(prediction[~white], scan[~white]), "and nothing else is on the prediction"


def test_front_is_up_and_the_patients_right_is_left() -> None:
    image, _ = volume()  # the ball lies to the right (large x) and somewhat to the front (large y)
    row = pictures.draw_row(image, None, None, SPACING, (0, 255), height_px=80)
    bright = np.argwhere(row[..., 0] > 150)
    assert row.shape == (80, 120, 3)
    assert bright[:, 1].mean() < 60
    assert bright[:, 0].mean() < 40


def test_slice_with_most_foreground_is_shown() -> None:
    _, label = volume()
    empty = np.zeros_like(label)
    assert pictures.choose_slice(label, None, 5) == 2
    assert pictures.choose_slice(empty, np.roll(label, 1, 0), 5) == 3
    assert pictures.choose_slice(empty, empty, 5) == 2
    assert pictures.choose_slice(None, None, 9) == 4


def test_small_class_counts_as_much_as_a_large_one() -> None:
    label = np.zeros((5, 20, 20), np.uint8)
    label[1:4] = 1
    label[1, :12] = 0
    label[1, :3, :3] = 2
    assert pictures.choose_slice(label, None, 5) == 1


def test_hounsfield_units_get_an_abdominal_window() -> None:
    assert pictures.choose_window(np.array([-1000.0, 40, 900])) == pictures.ABDOMEN
    assert pictures.choose_window(np.linspace(0, 100, 1001)) == pytest.approx((1, 99.5))
    assert pictures.choose_window(np.array([np.nan])) == (0, 1)


def test_pixels_have_true_proportions() -> None:
    image = np.full((3, 50, 50), 100.0, np.float32)
    row = pictures.draw_row(image, None, None, (1.0, 2.0, 1.0), (0, 255), height_px=100)
    assert row.shape == (100, 50, 3)


def test_empty_air_is_cropped_but_segmentation_is_not() -> None:
    image = np.full((1, 100, 100), -1000.0, np.float32)
    image[0, 40:60, 20:80] = 50.0
    assert pictures.draw_row(image, None, None, SPACING, pictures.ABDOMEN, height_px=66).shape[1] == pytest.approx(
        186, abs=8
    )
    far = np.zeros((1, 100, 100), np.uint8)
    far[0, 5, 5] = 1
    row = pictures.draw_row(image, None, far, SPACING, pictures.ABDOMEN, height_px=100)
    assert (np.ptp(row.astype(int), axis=2) > 60).any()


def test_constant_or_nan_image_is_still_a_picture() -> None:
    flat = np.zeros((2, 8, 8), np.float32)
    assert pictures.draw_row(flat, None, None, SPACING, height_px=16).shape == (16, 16, 3)
    flat[:, 0, 0] = np.nan
    assert pictures.draw_row(flat, None, None, SPACING, height_px=16).shape == (16, 16, 3)


def test_scan_without_truth_has_two_pictures() -> None:
    image, label = volume()
    row = pictures.draw_row(image, None, label, SPACING, (0, 255), height_px=80)
    assert row.shape[1] == 2 * 120 + pictures.GAP_PX


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_png_stores_every_pixel(height: int, width: int, seed: int) -> None:
    picture = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    read = Image.open(io.BytesIO(pictures.encode_png(picture)))
    assert np.array_equal(np.asarray(read), picture)


def test_png_is_the_row() -> None:
    image, label = volume()
    body = pictures.encode_png(pictures.draw_row(image, label, label, SPACING, height_px=80))
    assert np.array_equal(
        np.asarray(Image.open(io.BytesIO(body))), pictures.draw_row(image, label, label, SPACING, height_px=80)
    )


def test_resizing_keeps_constants_and_ramps() -> None:
    ramp = np.arange(8, dtype=np.float32)[None].repeat(4, 0)
    large = pictures.resize(ramp, (8, 32))
    assert large.shape == (8, 32)
    assert np.allclose(large[:, 2:-2], (np.arange(32) + 0.5)[2:-2] / 4 - 0.5)
    assert np.array_equal(pictures.resize(ramp, (4, 8)), ramp)


def test_legend_names_the_painted_classes() -> None:
    kits = Description(name="kits", channels=("CT",), labels={"background": 0, "kidney": 1, "tumour": 2})
    assert pictures.legend(kits) == [("kidney", pictures.PALETTE[0]), ("tumour", pictures.PALETTE[1])]
    brats = Description(
        name="brats",
        channels=("T1",),
        labels={"background": 0, "NCR": 1, "ED": 2, "ET": 3},
        regions={"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)},
    )
    assert [name for name, _ in pictures.legend(brats)] == ["WT", "TC", "ET"]
    assert len({colour for _, colour in pictures.legend(brats)}) == 3
