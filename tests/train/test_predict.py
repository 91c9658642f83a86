"""Masks of scans whose answer is known: the network is a function of intensity, the phantom one of places in space."""

from __future__ import annotations

import dataclasses
import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform

from tests.conftest import Bucket
from tests.volume.test_scan import dicom_series
from voxlane.errors import ConfigError, NotFoundError, ScanError, VoxlaneError
from voxlane.train.predictor import PredictConfig, Predictor, mask_dtype, plan_predictions, predict, read_channels
from voxlane.volume.description import Description
from voxlane.volume.plan import Network, Normalisation, Plan
from voxlane.volume.scan import read_label, read_scan

CLASSES = Description(name="balls", channels=("CT",), labels={"background": 0, "dim": 1, "bright": 2})
SHAPE, SPACING = (24, 28, 20), (1.0, 1.5, 2.0)
"""Along R, A, S."""
BALLS = (((9.0, 14.0, 12.0), 6.0, 100.0, 1), ((16.0, 30.0, 26.0), 5.0, 200.0, 2))
"""Centre and radius in mm, intensity and label; nothing about them is symmetric."""


class Bright(torch.nn.Module):
    """Background below 50, `dim` up to 150, `bright` above, in the first channel."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = x[:, :1] / 100
        return torch.cat([torch.zeros_like(value), value - 0.5, 2 * (value - 1.5) + 1], 1)


class Regions(Bright):
    """The regions whole (above 50) and core (above 150)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :1] - 50, x[:, :1] - 150], 1) / 100


class Always(Bright):
    """`dim` by so much everywhere."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.logit = logit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros_like(x[:, :1])
        return torch.cat([zero, zero + self.logit, zero - 10], 1)


class OneSided(Bright):
    """`dim` in the lower half of every window along x alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = Always(0.1)(x)
        middle = x.shape[-1] // 2
        logits[:, 1, ..., :middle] += 1
        logits[:, 1, ..., middle:] -= 1
        return logits


def predictor(
    *networks: torch.nn.Module,
    spacing: tuple[float, float, float] = (2.0, 1.5, 1.0),
    description: Description = CLASSES,
    **options: Any,
) -> Predictor:
    plan = Plan(
        spacing=spacing,
        normalisation=(Normalisation(scheme="none"),) * len(description.channels),
        patch=(16, 16, 16),
        batch=2,
        network=Network(),
    )
    networks = networks or (Bright(),)
    return Predictor(list(networks), plan, description, plan.patch, torch.device("cpu"), PredictConfig(**options))


def phantom(shape: tuple[int, ...], affine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intensities and labels of the balls on any grid."""
    index = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), -1)
    places = index @ affine[:3, :3].T + affine[:3, 3]
    image, label = np.full(shape, 1.0), np.zeros(shape, np.uint8)  # no zeros: nothing is cropped
    for centre, radius, intensity, value in BALLS:
        inside = np.linalg.norm(places - centre, axis=-1) <= radius
        image[inside], label[inside] = intensity, value
    return image, label


def grid(axes: str) -> tuple[tuple[int, ...], np.ndarray]:
    """Shape and affine of the phantom's grid stored along `axes`, such as LPS or SAR."""
    canonical = np.diag([*SPACING, 1.0])
    turn = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(axes))
    affine = canonical @ inv_ornt_aff(turn, SHAPE)
    shape = [0, 0, 0]
    for own, (target, _) in enumerate(turn):
        shape[int(target)] = SHAPE[own]
    return tuple(shape), affine


def save(path: Path, image: np.ndarray, affine: np.ndarray, dtype: Any = np.int16) -> str:
    nibabel.save(nibabel.Nifti1Image(image.astype(dtype), affine, dtype=dtype), path)
    return str(path)


def job(scan: str, out: Path | str) -> Any:
    (planned,) = plan_predictions([scan], str(out))
    return planned


def check_same_file_grid(mask: str, scan: str) -> Any:
    """The mask lies voxel by voxel where the scan does; returns its voxels."""
    mask_file, scan_file = nibabel.load(mask), nibabel.load(scan)
    assert mask_file.shape == scan_file.shape[:3]
    np.testing.assert_allclose(mask_file.affine, scan_file.affine, atol=1e-5)
    np.testing.assert_allclose(mask_file.header.get_zooms(), scan_file.header.get_zooms()[:3], rtol=1e-5)
    return np.asarray(mask_file.dataobj)


@pytest.mark.parametrize("axes", ["RAS", "LPS", "LAS", "SAR", "PIR", "ASL", "IPL"])
def test_orientations_give_the_same_mask_at_the_same_place(axes: str, tmp_path: Path) -> None:
    shape, affine = grid(axes)
    image, label = phantom(shape, affine)
    scan = save(tmp_path / "scan.nii.gz", image, affine)
    done = predict(predictor(), job(scan, tmp_path / "out"), progress=False)
    mask = check_same_file_grid(str(tmp_path / "out" / "scan.nii.gz"), scan)
    assert nibabel.load(tmp_path / "out" / "scan.nii.gz").get_data_dtype() == np.int16
    np.testing.assert_array_equal(mask, label)  # on the plan's own spacing, every voxel
    assert done.mask == f"file://{tmp_path}/out/scan.nii.gz"
    assert done.volumes_ml["dim"] == pytest.approx((label == 1).sum() * 3 / 1000)
    assert done.volumes_ml["bright"] == pytest.approx((label == 2).sum() * 3 / 1000)


def rotation(degrees: tuple[float, float, float]) -> np.ndarray:
    turned = np.eye(3)
    for axis, angle in enumerate(np.radians(degrees)):
        a, b = (i for i in range(3) if i != axis)
        about_axis = np.eye(3)
        about_axis[a, a] = about_axis[b, b] = np.cos(angle)
        about_axis[a, b], about_axis[b, a] = -np.sin(angle), np.sin(angle)
        turned = about_axis @ turned
    return turned


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    degrees=st.tuples(*[st.floats(-180, 180)] * 3),
    spacing=st.tuples(*[st.floats(0.8, 2.0)] * 2, st.floats(0.8, 4.0)),
    left_handed=st.booleans(),
)
def test_any_oblique_anisotropic_grid(
    degrees: tuple[float, float, float], spacing: tuple[float, ...], left_handed: bool, tmp_path: Path
) -> None:
    """Resampled to another spacing and back, the balls stay where they are in space."""
    turned = rotation(degrees) @ np.diag([-1.0 if left_handed else 1.0, 1.0, 1.0])
    shape = tuple(int(44 / s) for s in spacing)
    affine = np.eye(4)
    affine[:3, :3] = turned @ np.diag(spacing)
    affine[:3, 3] = np.array([12.5, 22.0, 19.0]) - affine[:3, :3] @ ((np.array(shape) - 1) / 2)
    _, label = phantom(shape, affine)
    scan = save(tmp_path / "scan.nii.gz", np.where(label > 0, 100, 1), affine, np.float32)
    predict(predictor(spacing=(1.6, 1.2, 1.2)), job(scan, tmp_path / "out"), progress=False)
    mask = check_same_file_grid(str(tmp_path / "out" / "scan.nii.gz"), scan)
    assert mask.dtype == np.uint8
    voxel_places = places(shape, affine)
    for centre, radius, _, value in BALLS:
        near = np.linalg.norm(voxel_places - centre, axis=-1) < radius + 3
        predicted, expected = (mask == 1) & near, label == value
        assert np.linalg.norm(voxel_places[predicted].mean(0) - voxel_places[expected].mean(0)) < 0.5
        assert 2 * (predicted & expected).sum() / (predicted.sum() + expected.sum()) > 0.85
    assert (mask > 0).sum() < 1.3 * (label > 0).sum()


def places(shape: tuple[int, ...], affine: np.ndarray) -> np.ndarray:
    index = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), -1)
    return np.asarray(index @ affine[:3, :3].T + affine[:3, 3])


def test_blank_borders_are_cropped_and_come_back_as_background(tmp_path: Path) -> None:
    shape, affine = grid("LPS")
    image, label = phantom(shape, affine)
    wide = [(5, 3), (0, 4), (2, 0)]
    shifted = affine.copy()
    shifted[:3, 3] -= affine[:3, :3] @ [low for low, _ in wide]
    scan = save(tmp_path / "s.nii", np.pad(image, wide), shifted)
    predict(predictor(), job(scan, tmp_path / "out"), progress=False)
    np.testing.assert_array_equal(check_same_file_grid(str(tmp_path / "out/s.nii.gz"), scan), np.pad(label, wide))


def test_dicom_series(tmp_path: Path) -> None:
    volume = np.zeros((12, 20, 18), np.int16)
    volume[3:9, 4:12, 5:15] = 100
    volume[5:8, 6:9, 10:14] = 200
    dicom_series(tmp_path / "patient 1", volume)
    scan = read_scan(str(tmp_path / "patient 1"))
    done = predict(
        predictor(spacing=scan.geometry.spacing), job(str(tmp_path / "patient 1"), tmp_path / "out"), progress=False
    )
    assert done.mask.endswith("/out/patient 1.nii.gz")
    mask, geometry = read_label(done.mask)
    assert geometry.shape == scan.geometry.shape
    np.testing.assert_allclose(geometry.affine, scan.geometry.affine, atol=1e-4)
    np.testing.assert_array_equal(mask, np.digitize(scan.image[0], [50, 150]))
    assert (mask == 2).sum() == 3 * 3 * 4


def test_bucket_to_bucket(gcs: Bucket, tmp_path: Path) -> None:
    shape, affine = grid("LPS")
    image, label = phantom(shape, affine)
    save(tmp_path / "a.nii.gz", image, affine)
    gcs.store.put("scans/a.nii.gz", (tmp_path / "a.nii.gz").read_bytes())
    done = predict(predictor(), job("gs://bkt/scans/a.nii.gz", "gs://bkt/masks/"), gcs.config, progress=False)
    assert done.mask == "gs://bkt/masks/a.nii.gz"
    (tmp_path / "mask.nii.gz").write_bytes(bytes(gcs.store.get("masks/a.nii.gz")))
    mask = check_same_file_grid(str(tmp_path / "mask.nii.gz"), str(tmp_path / "a.nii.gz"))
    np.testing.assert_array_equal(mask, label)


def test_channels_by_commas_and_in_one_file(tmp_path: Path) -> None:
    shape, affine = grid("RAS")
    image, label = phantom(shape, affine)
    first = save(tmp_path / "x_t1.nii.gz", image, affine)
    other = save(tmp_path / "x_t2.nii.gz", image * 0 + 7, affine, np.float32)
    both = save(tmp_path / "both.nii.gz", np.stack([image, image * 0 + 7], -1), affine)
    two = predictor(description=dataclasses.replace(CLASSES, channels=("T1", "T2")))
    for scan, name in ((f"{first},{other}", "x_t1"), (f"{first}, {other}", "x_t1"), (both, "both")):
        predict(two, job(scan, tmp_path / "out"), progress=False)
        np.testing.assert_array_equal(check_same_file_grid(str(tmp_path / f"out/{name}.nii.gz"), first), label)
    nudged = affine.copy()
    nudged[0, 3] += 0.3  # less than half a voxel, which preparation takes too
    save(tmp_path / "near.nii.gz", image, nudged)
    assert len(read_channels([first, str(tmp_path / "near.nii.gz")]).image) == 2
    for scan, words in (
        (first, r"the scan has 1 channel, but the model was trained on 2 \(T1, T2\)"),
        (f"{first},{other},{other}", "the scan has 3 channels"),
        (f"{first},{both}", "both.nii.gz: a 4D file of 2 volumes, but each file must be one channel"),
    ):
        with pytest.raises(ScanError, match=words):
            predict(two, job(scan, tmp_path / "out"), progress=False)


def test_file_stored_along_other_axes_is_the_same_channel(tmp_path: Path) -> None:
    first, second = grid("RAS"), grid("SPL")
    files = [save(tmp_path / f"{i}.nii.gz", phantom(*g)[0], g[1]) for i, g in enumerate((first, second))]
    image = read_channels(files).image
    np.testing.assert_array_equal(image[0], image[1])


def test_regions(tmp_path: Path) -> None:
    shape, affine = grid("LPS")
    image, label = phantom(shape, affine)
    regions = dataclasses.replace(CLASSES, regions={"whole": (1, 2), "core": (2,)})
    scan = save(tmp_path / "s.nii.gz", image, affine)
    done = predict(predictor(Regions(), description=regions), job(scan, tmp_path / "out"), progress=False)
    np.testing.assert_array_equal(check_same_file_grid(str(tmp_path / "out/s.nii.gz"), scan), label)
    assert done.volumes_ml["whole"] == pytest.approx((label > 0).sum() * 3 / 1000)
    assert done.volumes_ml["core"] == pytest.approx((label == 2).sum() * 3 / 1000)


def test_several_networks_are_averaged() -> None:
    image = np.ones((1, 20, 17, 18), np.int16)
    progress_calls: list[tuple[int, int]] = []
    for logits, expected in (((3.0, -1.0), 1), ((1.0, -3.0), 0), ((-1.0, -1.0, 2.5), 1)):
        progress_calls.clear()
        many = predictor(*(Always(logit) for logit in logits))
        mask = many.predict(image, (2.0, 1.5, 1.0), progress=lambda done, total: progress_calls.append((done, total)))
        assert (mask == expected).all()
        assert progress_calls[-1] == (
            progress_calls[-1][1],
            progress_calls[-1][1],
        )  # windows of all networks, up to the last
        assert [done for done, _ in progress_calls] == sorted({done for done, _ in progress_calls})
    outputs = predictor(Always(3.0), Always(-1.0)).predict_outputs(torch.ones(1, 16, 16, 16))
    assert outputs.dtype == torch.float16
    assert torch.allclose(outputs[1].float(), torch.tensor(1.0), atol=1e-3)


def test_mirroring_averages_over_flipped_inputs() -> None:
    image = np.ones((1, 16, 16, 16), np.int16)
    plain = predictor(OneSided()).predict(image, (2.0, 1.5, 1.0))
    assert (plain[..., :8] == 1).all()
    assert (plain[..., 8:] == 0).all()
    assert (predictor(OneSided(), mirror=True).predict(image, (2.0, 1.5, 1.0)) == 1).all()


def test_scans_that_cannot_be_segmented(tmp_path: Path) -> None:
    shape, affine = grid("RAS")
    image, _ = phantom(shape, affine)
    good = save(tmp_path / "good.nii.gz", image, affine)
    body = Path(good).read_bytes()
    (tmp_path / "cut.nii.gz").write_bytes(body[: len(body) // 2])
    (tmp_path / "text.nii.gz").write_bytes(gzip.compress(b"hello" * 100))
    (tmp_path / "empty.nii.gz").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    save(tmp_path / "flat.nii.gz", image[:, :, 0], affine)
    save(tmp_path / "film.nii.gz", np.stack([image] * 3, -1), affine)
    strange = image.copy()
    strange[3, 4, 5], strange[3, 4, 6] = np.nan, np.inf
    save(tmp_path / "nan.nii.gz", strange, affine, np.float32)
    shifted = affine.copy()
    shifted[0, 3] += 3
    save(tmp_path / "shifted.nii.gz", image, shifted)
    cases: list[tuple[str, type[VoxlaneError], str]] = [
        ("none.nii.gz", NotFoundError, "none.nii.gz"),
        ("nowhere", NotFoundError, "nowhere"),
        ("folder", NotFoundError, "no scan here"),
        ("cut.nii.gz", ScanError, "truncated"),
        ("text.nii.gz", ScanError, "not a NIfTI file"),
        ("empty.nii.gz", ScanError, "empty"),
        ("flat.nii.gz", ScanError, "2D image"),
        ("film.nii.gz", ScanError, "the scan has 3 channels, but the model was trained on 1"),
        ("nan.nii.gz", ScanError, "2 of 13,440 voxels are NaN or infinite"),
        ("good.nii.gz,shifted.nii.gz", ScanError, "shifted.nii.gz: not on the grid of .*good.nii.gz: .*origins"),
    ]
    single = predictor()
    for name, kind, words in cases:
        scan = ",".join(str(tmp_path / part) for part in name.split(","))
        with pytest.raises(kind, match=words):
            predict(single, job(scan, tmp_path / "out"), progress=False)
    assert list((tmp_path / "out").iterdir()) == []


def test_no_mask_is_written_over_anything(tmp_path: Path) -> None:
    scan = tmp_path / "a.nii.gz"
    scan.write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path)
    for out in (tmp_path, f"{tmp_path}/", f"file://{tmp_path}", tmp_path / "link", tmp_path / "sub" / ".."):
        with pytest.raises(ConfigError, match=r"overwrite this scan.*another folder"):
            plan_predictions([str(scan)], str(out))
    with pytest.raises(ConfigError, match="overwrite this scan"):
        plan_predictions(["gs://b/x/a.nii.gz"], "gs://b/x/")
    for pair in (("p/a.nii.gz", "q/a.nii.gz"), ("p/a.nii.gz", "p/a.nii"), ("a/", "q/a.NII.GZ"), ("a.nii", "a.nii")):
        with pytest.raises(ConfigError, match=r"would both write a.nii.gz. Predict them into two folders"):
            plan_predictions(pair, str(tmp_path / "out"))
    for scan_uri in ("", "a.nii.gz,", "/", "gs://bucket"):
        with pytest.raises(ConfigError):
            plan_predictions([scan_uri], str(tmp_path))
    (planned,) = plan_predictions(["gs://b/x/A.NII.GZ,gs://b/x/B.nii.gz"], "gs://b/masks/")
    assert planned.files == ("gs://b/x/A.NII.GZ", "gs://b/x/B.nii.gz")
    assert planned.mask == "gs://b/masks/A.nii.gz"


def test_masks_take_the_scans_integers_where_they_hold_the_labels() -> None:
    many = Description(name="many", channels=("CT",), labels={"background": 0, "last": 200})
    for name in ("uint8", "int16", "uint16", "int32", "int64"):
        assert mask_dtype(np.dtype(name), many) == np.dtype(name)
    for name in ("int8", "float32", "float64"):
        assert mask_dtype(np.dtype(name), many) == np.uint8
    assert mask_dtype(np.dtype("int8"), CLASSES) == np.int8


def test_unwritable_folder(tmp_path: Path) -> None:
    shape, affine = grid("RAS")
    scan = save(tmp_path / "a.nii.gz", phantom(shape, affine)[0], affine)
    with pytest.raises(VoxlaneError, match="cannot write here"):
        predict(predictor(), job(scan, "/proc/masks"), progress=False)


LARGE = """
import dataclasses, resource, sys
import nibabel, numpy as np
from tests.train.test_predict import plan_predictions, predict, predictor

folder = sys.argv[1]
voxels = np.ones((512, 512, 400), np.int16, order="F")
voxels[100:200, 200:330, 100:200] = 100
nibabel.save(nibabel.Nifti1Image(voxels, np.diag([0.8, 0.8, 2.0, 1.0])), f"{folder}/large.nii")
del voxels
segmenter = dataclasses.replace(predictor(spacing=(2.0, 0.8, 0.8), overlap=0.0, window_batch=1), patch=(128, 128, 128))
(job,) = plan_predictions([f"{folder}/large.nii"], f"{folder}/out")
done = predict(segmenter, job, progress=False)
print(done.volumes_ml["dim"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_large_scan_stays_within_the_stated_memory(tmp_path: Path) -> None:
    """400 x 512 x 512 voxels and three outputs, from file to mask, the interpreter and its libraries included."""
    repository = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(repository), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    volume_ml, peak_bytes = map(float, done.stdout.split())
    assert volume_ml == pytest.approx(100 * 130 * 100 * 0.8 * 0.8 * 2 / 1000)
    assert peak_bytes < 3.3e9


class LowSide(Bright):
    """`dim` in the half of the window with the smaller index along the last axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros_like(x).repeat(1, 3, 1, 1, 1)
        logits[:, 1, ..., : x.shape[-1] // 2] = 1
        return logits


@pytest.mark.parametrize("axes", ["RAS", "LPS", "SAR"])
def test_models_that_see_the_axes_of_files(axes: str, tmp_path: Path) -> None:
    affine = grid(axes)[1]
    image = np.arange(16**3).reshape(16, 16, 16) % 7 + 1
    plain = predictor(LowSide(), spacing=(1.0, 1.0, 1.0))
    stored = dataclasses.replace(plain, plan=dataclasses.replace(plain.plan, axes="stored"))
    affine[:3, :3] /= np.linalg.norm(affine[:3, :3], axis=0)  # 1 mm, so that nothing is resampled
    scan = save(tmp_path / "scan.nii", image, affine)
    predict(stored, job(scan, tmp_path / "out"))
    mask = np.asarray(nibabel.load(tmp_path / "out" / "scan.nii.gz").dataobj)
    assert (mask[:8] == 1).all(), "x of the file is the last axis that the network sees"
    assert (mask[8:] == 0).all()
    with pytest.raises(ConfigError, match="geometry: this model needs it"):
        stored.predict(image[None], (1.0, 1.0, 1.0))
