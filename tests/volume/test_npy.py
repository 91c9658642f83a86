"""Arrays in .npy files: reading them, finding pairs of them, and preparing a dataset from them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Bucket
from voxlane.errors import BadCasesError, ConfigError, LayoutError, ScanError
from voxlane.volume.dataset_discovery import discover
from voxlane.volume.formats import NotVolumeError
from voxlane.volume.prepare import PrepareConfig, prepare
from voxlane.volume.scan import LabelValuesError, read_label, read_scan, strip_scan_suffix, write_mask

DESCRIPTION = {"channels": ["CT"], "labels": {"background": 0, "kidney": 1}}


def encode(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def save(folder: Path, body: bytes, name: str = "a.npy") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return str(path)


@pytest.fixture
def array() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, (4, 5, 6)).astype(np.float32)


@pytest.mark.parametrize("convert", [np.asarray, np.asfortranarray, lambda a: a[None], lambda a: a.astype(">f4")])
def test_array_is_read_in_its_own_order(tmp_path: Path, array: np.ndarray, convert: Any) -> None:
    scan = read_scan(save(tmp_path, encode(convert(array))))
    np.testing.assert_array_equal(scan.image, array[None])
    assert scan.image.dtype == scan.dtype == np.float32
    assert scan.image.dtype.isnative
    assert scan.geometry.spacing == (1, 1, 1)
    assert scan.geometry.canonical_shape == (4, 5, 6)


@pytest.mark.parametrize("dtype", [np.int16, ">i2", np.float16, np.float64, np.uint8])
def test_number_types(tmp_path: Path, dtype: Any) -> None:
    values = np.arange(24).reshape(2, 3, 4)
    scan = read_scan(save(tmp_path, encode(values.astype(dtype))))
    np.testing.assert_array_equal(scan.image[0], values)


def test_spacing_comes_from_the_caller(tmp_path: Path, array: np.ndarray) -> None:
    scan = read_scan(save(tmp_path, encode(array)), spacing=(3.0, 2.0, 1.5))
    assert scan.geometry.spacing == (3.0, 2.0, 1.5)
    mask = (array > 0).astype(np.uint8)
    write_mask(tmp_path / "mask.nii.gz", mask, scan.geometry)
    label, geometry = read_label(str(tmp_path / "mask.nii.gz"))
    np.testing.assert_array_equal(label, mask)
    assert geometry == scan.geometry
    np.testing.assert_array_equal(np.asarray(geometry.affine), np.diag([1.5, 2.0, 3.0, 1.0]))


def test_label(tmp_path: Path) -> None:
    values = np.arange(24).reshape(1, 2, 3, 4) % 3
    for dtype in (np.uint8, np.int64, np.float32):
        label, _ = read_label(save(tmp_path, encode(values.astype(dtype))))
        assert label.dtype == np.uint8
        np.testing.assert_array_equal(label, values[0])
    label, _ = read_label(save(tmp_path, encode(values > 0)))
    np.testing.assert_array_equal(label, values[0] > 0)
    with pytest.raises(LabelValuesError, match="not integers"):
        read_label(save(tmp_path, encode(values + 0.5)))
    with pytest.raises(NotVolumeError, match="4D file of 2 volumes"):
        read_label(save(tmp_path, encode(np.zeros((2, 3, 3, 3), np.uint8))))


class Exploit:
    """An object whose unpickling leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    objects = np.empty((2, 2, 2), object)
    objects[:] = Exploit(trap)
    with pytest.raises(ScanError, match=r"a\.npy: the array holds Python objects.*Save it as numbers"):
        read_scan(save(tmp_path, encode(objects, allow_pickle=True)))
    with pytest.raises(ScanError, match=r"not a \.npy file"):
        read_scan(save(tmp_path, pickle.dumps(Exploit(trap))))
    assert not trap.exists()


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (b"", ScanError, "not a .npy file"),
        (b"\x93NUMPY\x01\x00", ScanError, "not a .npy file, or one with a damaged header"),
        (b"\x93NUMPY\x09\x00" + bytes(200), ScanError, "version 9.0 of the format is unknown"),
        (encode(np.ones((2, 3, 4)))[:-1], ScanError, "truncated: 2 x 3 x 4 values of float64 need 192 bytes, .* 191"),
        (encode(np.ones((2, 3, 4))) * 2, ScanError, "more than one array"),
        (encode(np.ones((3, 4))), NotVolumeError, r"an array of 2 axes: shape 3 x 4. Save it as \(Z, Y, X\)"),
        (encode(np.ones((1, 1, 2, 3, 4))), NotVolumeError, "an array of 5 axes"),
        (encode(np.float32(1)), NotVolumeError, "an array of 0 axes"),
        (encode(np.ones((1, 3, 4))), NotVolumeError, "a 2D image"),
        (encode(np.ones((0, 3, 4))), ScanError, "an empty array: shape 0 x 3 x 4"),
        (encode(np.ones((2, 3, 4), complex)), NotVolumeError, "the voxels are complex128 values"),
        (encode(np.zeros((2, 3, 4), [("a", "f4")])), NotVolumeError, "values. Use integers or floats"),
        (encode(np.array([["x"]])), NotVolumeError, "the voxels are <U1 values"),
        (
            encode(np.ones((2, 3, 4))).replace(b"(2, 3, 4)", b"(9**9,  )"),
            *(ScanError, "damaged header"),
        ),
    ],
)
def test_bad_files(tmp_path: Path, body: bytes, error: type[ScanError], message: str) -> None:
    uri = save(tmp_path, body)
    with pytest.raises(error, match=rf"a\.npy: .*{message}") as raised:
        read_scan(uri)
    assert type(raised.value) is error


def test_names() -> None:
    assert strip_scan_suffix("b/case_1_x.npy") == "case_1_x"


# -- pairs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("images/c0_x.npy", "labels/c0_y.npy"),
        ("images/c0.npy", "labels/c0.npy"),
        ("imagesTr/c0.npy", "labelsTr/c0.npy"),
        ("c0_x.npy", "c0_y.npy"),
        ("data/c0_x.npy", "data/c0_y.npy"),
        ("kits/images/c0_x.npy", "kits/labels/c0_y.npy"),
    ],
)
def test_pairs_are_found(folder: Bucket, put: Any, image: str, label: str) -> None:
    put(folder, {image: b"1", label: b"1", "readme.txt": b""})
    source = discover(folder.uri, overrides=DESCRIPTION)
    assert source.layout == "npy"
    assert [(case.id, case.images, case.label) for case in source.cases] == [
        ("c0", (f"{folder.uri}/{image}",), f"{folder.uri}/{label}")
    ]


def test_cases_of_several_folders_and_missing_files(folder: Bucket, put: Any) -> None:
    names = ["train/images/a_x.npy", "train/labels/a_y.npy", "val/images/a_x.npy", "val/labels/a_y.npy"]
    put(folder, dict.fromkeys([*names, "val/images/b_x.npy", "val/labels/c_y.npy"], b""))
    cases = {case.id: case for case in discover(folder.uri, overrides=DESCRIPTION).cases}
    assert list(cases) == ["b", "c", "train_a", "val_a"]
    assert cases["b"].label is None
    assert cases["c"].images == (f"{folder.uri}/val/images/c_x.npy",)


def test_description_is_required_and_names_must_differ(folder: Bucket, put: Any) -> None:
    put(folder, {"images/a_x.npy": b"", "labels/a_y.npy": b""})
    with pytest.raises(LayoutError, match=r"does not define channels and labels. Set them: description\.channels"):
        discover(folder.uri)
    with pytest.raises(LayoutError, match="does not define labels"):
        discover(folder.uri, overrides={"channels": ["CT"]})
    with pytest.raises(ConfigError, match=r"spacing\.0: expected a value greater than 0, got 0"):
        discover(folder.uri, overrides={**DESCRIPTION, "spacing": [0, 1, 1]})
    put(folder, {"images/a.npy": b""})
    with pytest.raises(LayoutError, match=r"images/a\.npy and images/a_x\.npy are the same case"):
        discover(folder.uri, overrides=DESCRIPTION)
    put(folder, {"other/a.npy": b""})
    with pytest.raises(LayoutError, match="no images"):
        discover(f"{folder.uri}/other", layout="npy", overrides=DESCRIPTION)


def make_cases(count: int = 4) -> dict[str, bytes]:
    """Return pairs as MLPerf's preprocessing writes them: normalised float32 and uint8, with a channel axis."""
    objects = {}
    for number in range(count):
        random = np.random.default_rng(number)
        label = np.zeros((1, 18, 20, 22 + number), np.uint8)
        label[0, 5:12, 6:14, 6:15] = 1
        image = random.normal(-1, 0.2, label.shape) + 2 * label
        objects[f"images/case_{number:05d}_x.npy"] = encode(image.astype(np.float32))
        objects[f"labels/case_{number:05d}_y.npy"] = encode(label)
    return objects


def test_prepared_volumes_keep_the_voxels(gcs: Bucket, put: Any) -> None:
    objects = make_cases()
    put(gcs, {f"raw/{name}": body for name, body in objects.items()})
    options = PrepareConfig(
        description={**DESCRIPTION, "spacing": [3, 2, 1]},
        plan={"patch": [16, 16, 16], "spacing": [3, 2, 1]},
        workers=1,
    )
    result = prepare(f"{gcs.uri}/raw", f"{gcs.uri}/prepared", options, gcs.config, progress=False)
    assert result.problems == []
    assert not result.assumes_spacing
    assert result.prepared.ids == [f"case_{number:05d}" for number in range(4)]
    assert result.prepared.description.spacing == (3, 2, 1)
    assert result.prepared.case(0).volume["spacing"] == [3, 2, 1]
    again = prepare(f"{gcs.uri}/raw", f"{gcs.uri}/prepared", options, gcs.config, progress=False)
    assert (again.cases_checked, again.cases_written) == (0, 0)
    # Another spacing is another content, and the default is reported.
    plan = {**options.plan, "spacing": [1, 1, 1]}
    changed = PrepareConfig(description=DESCRIPTION, plan=plan, workers=1)
    result = prepare(f"{gcs.uri}/raw", f"{gcs.uri}/prepared", changed, gcs.config, progress=False)
    assert result.assumes_spacing
    assert (result.cases_checked, result.cases_written) == (4, 4)


def test_problems_of_arrays_are_listed(folder: Bucket, put: Any) -> None:
    objects = make_cases(6)
    objects["images/case_00001_x.npy"] = objects["images/case_00001_x.npy"][:-5]
    objects["labels/case_00002_y.npy"] = encode(np.ones((1, 18, 20, 9), np.uint8))
    objects["images/case_00003_x.npy"] = encode(np.full((1, 18, 20, 25), np.nan, np.float32))
    objects["images/case_00004_x.npy"] = encode(np.zeros((18, 20, 26, 1), np.float32))  # channels last
    objects["labels/case_00005_y.npy"] = encode(np.full((1, 18, 20, 27), 7, np.uint8))
    put(folder, objects)
    with pytest.raises(BadCasesError) as raised:
        prepare(folder.uri, f"{folder.uri}-out", PrepareConfig(description=DESCRIPTION, workers=1), progress=False)
    table = str(raised.value)
    for text in (
        "case_00001  unreadable",
        "truncated",
        "case_00002  shape",
        "case_00003  nan",
        "case_00004",
        "case_00005  label-values",
    ):
        assert text in table
    assert "case_00000" not in table
