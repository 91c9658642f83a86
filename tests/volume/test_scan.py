"""Reading good and bad scans and labels in all formats, and writing masks."""

from __future__ import annotations

import contextlib
import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane.errors import ConfigError, NotFoundError, ScanError
from voxlane.volume.formats import NotVolumeError
from voxlane.volume.geometry import Geometry, describe_grid_difference
from voxlane.volume.scan import LabelValuesError, read_label, read_scan, strip_scan_suffix, write_mask

KITS_AFFINE = np.array([[0, 0, -0.8, 5], [0, -0.8, 0, 6], [-3, 0, 0, 7], [0, 0, 0, 1.0]])
"""An affine as in KiTS19: the first axis runs along the slices, downwards."""
REAL_DATA = Path(os.environ.get("VOXLANE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def encode_nifti(array: np.ndarray, affine: np.ndarray = KITS_AFFINE, kind: Any = nibabel.Nifti1Image) -> bytes:
    return bytes(kind(array, affine).to_bytes())


def _save_scan(folder: Path, body: bytes, name: str = "scan.nii.gz") -> str:
    (folder / name).write_bytes(gzip.compress(body, 1) if name.endswith(".gz") else body)
    return str(folder / name)


@pytest.fixture
def array() -> np.ndarray:
    return np.random.default_rng(0).integers(-1000, 1000, (4, 5, 6), np.int16)


@pytest.mark.parametrize("name", ["scan.nii", "scan.nii.gz"])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_nifti_is_read_along_anatomical_axes(tmp_path: Path, array: np.ndarray, name: str, kind: Any) -> None:
    scan = read_scan(_save_scan(tmp_path, encode_nifti(array, kind=kind), name))
    expected = nibabel.as_closest_canonical(nibabel.Nifti1Image(array, KITS_AFFINE))
    np.testing.assert_array_equal(scan.image[0], np.asarray(expected.dataobj).transpose(2, 1, 0))
    assert scan.image.dtype == scan.dtype == np.int16
    assert scan.image.flags.c_contiguous
    assert scan.geometry.shape == (4, 5, 6)
    np.testing.assert_allclose(scan.geometry.spacing, (3, 0.8, 0.8))


def test_scans_are_read_from_all_buckets(bucket: Bucket, array: np.ndarray, put: Callable[..., None]) -> None:
    put(bucket, {"a/scan.nii.gz": gzip.compress(encode_nifti(array))})
    scan = read_scan(f"{bucket.uri}/a/scan.nii.gz", bucket.config)
    np.testing.assert_array_equal(scan.geometry.from_canonical(scan.image[0]), array)


def test_compression_does_not_depend_on_the_name(tmp_path: Path, array: np.ndarray) -> None:
    (tmp_path / "a.nii.gz").write_bytes(encode_nifti(array))
    (tmp_path / "b.nii").write_bytes(gzip.compress(encode_nifti(array)))
    np.testing.assert_array_equal(read_scan(f"{tmp_path}/a.nii.gz").image, read_scan(f"{tmp_path}/b.nii").image)


def test_big_endian_files(tmp_path: Path, array: np.ndarray) -> None:
    header = nibabel.Nifti1Header(endianness=">")
    header.set_data_dtype(np.int16)
    swapped = nibabel.Nifti1Image(array, KITS_AFFINE, header)
    path = tmp_path / "big.nii"
    nibabel.save(swapped, path)
    assert path.read_bytes()[:4] == (348).to_bytes(4, "big")
    scan = read_scan(str(path))
    np.testing.assert_array_equal(scan.geometry.from_canonical(scan.image[0]), array)
    assert scan.image.dtype.isnative
    assert scan.dtype == np.int16


def test_slope_and_intercept_are_applied(tmp_path: Path, array: np.ndarray) -> None:
    body = bytearray(encode_nifti(array))
    body[112:120] = np.array([0.5, -1024], "<f4").tobytes()
    scan = read_scan(_save_scan(tmp_path, bytes(body)))
    assert scan.image.dtype == np.float32
    assert scan.dtype == np.int16
    np.testing.assert_allclose(scan.geometry.from_canonical(scan.image[0]), array * 0.5 - 1024)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint16, np.float32, np.float64])
def test_integers_keep_their_type_and_floats_become_float32(tmp_path: Path, dtype: Any) -> None:
    scan = read_scan(_save_scan(tmp_path, encode_nifti(np.arange(60).reshape(3, 4, 5).astype(dtype))))
    assert scan.image.dtype == (np.float32 if np.dtype(dtype).kind == "f" else dtype)
    assert scan.dtype == dtype


def test_4d_files_have_channels_and_trailing_axes_of_one_are_dropped(tmp_path: Path) -> None:
    array = np.random.default_rng(1).normal(size=(4, 5, 6, 3)).astype(np.float32)
    scan = read_scan(_save_scan(tmp_path, encode_nifti(array)))
    assert scan.image.shape == (3, 4, 5, 6)
    np.testing.assert_array_equal(scan.geometry.from_canonical(scan.image[2]), array[..., 2])
    assert read_scan(_save_scan(tmp_path, encode_nifti(array[..., :1]))).image.shape == (1, 4, 5, 6)
    assert read_scan(_save_scan(tmp_path, encode_nifti(array[..., None, :1]))).image.shape == (1, 4, 5, 6)


BAD_SHAPES = [
    ((8, 9), "a 2D image: shape 8 x 9"),
    ((8, 9, 1), "a 2D image: shape 8 x 9 x 1"),
    ((1, 8, 9), "a 2D image"),
    ((2, 3, 4, 1, 3), "a 5D image: shape 2 x 3 x 4 x 1 x 3"),
]


@pytest.mark.parametrize(("shape", "message"), BAD_SHAPES)
def test_other_than_3d_is_rejected(tmp_path: Path, shape: tuple[int, ...], message: str) -> None:
    uri = _save_scan(tmp_path, encode_nifti(np.ones(shape, np.float32)))
    for read in (read_scan, read_label):
        with pytest.raises(NotVolumeError, match=message) as caught:
            read(uri)
        assert caught.value.uri == uri
        assert caught.value.fix


def test_colours_and_complex_numbers_are_rejected(tmp_path: Path) -> None:
    colours = np.zeros((3, 4, 5), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    with pytest.raises(NotVolumeError, match="colours"):
        read_scan(_save_scan(tmp_path, encode_nifti(colours)))
    with pytest.raises(NotVolumeError, match="complex64"):
        read_scan(_save_scan(tmp_path, encode_nifti(np.zeros((3, 4, 5), np.complex64))))


def _make_damaged_files(good: bytes) -> dict[str, tuple[bytes, str]]:
    compressed = gzip.compress(good)
    flipped = bytearray(compressed)
    flipped[len(compressed) // 2] ^= 0xFF
    no_magic = bytearray(good)
    no_magic[344:348] = b"\0\0\0\0"
    pair_header = bytearray(good)
    pair_header[344:348] = b"ni1\0"
    bad_type = bytearray(good)
    bad_type[70:72] = (999).to_bytes(2, "little")
    return {
        "nothing in it": (b"", "the file is empty"),
        "cut gzip": (compressed[: len(compressed) // 2], "truncated: the compressed data ends early"),
        "cut gzip inside its header": (compressed[:5], "truncated"),
        "gzip with a wrong bit": (bytes(flipped), "damaged"),
        "cut inside the voxels": (
            good[:400],
            "4 x 5 x 6 voxels of int16 need 240 bytes, the file has 48",
        ),
        "cut inside the header": (good[:100], "truncated inside the header"),
        "gzip of a cut file": (gzip.compress(good[:400]), "truncated"),
        "text": (b"hello, this is not a scan" * 40, "not a NIfTI file"),
        "a web page": (b"<!DOCTYPE html><html>no access</html>", "It is a web page"),
        "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        "no magic": (bytes(no_magic), "lacks the NIfTI magic number"),
        "half a pair": (bytes(pair_header), "pair"),
        "unknown voxel type": (bytes(bad_type), "invalid NIfTI header"),
    }


@pytest.mark.parametrize("content", _make_damaged_files(encode_nifti(np.zeros((4, 5, 6), np.int16))))
def test_damaged_files_are_described(tmp_path: Path, array: np.ndarray, content: str) -> None:
    body, message = _make_damaged_files(encode_nifti(array))[content]
    (tmp_path / "scan.nii.gz").write_bytes(body)
    with pytest.raises(ScanError, match=message) as caught:
        read_scan(f"{tmp_path}/scan.nii.gz")
    assert str(tmp_path) in str(caught.value)
    assert caught.value.fix
    assert type(caught.value) is ScanError


def test_files_truncated_anywhere_are_rejected(tmp_path: Path, array: np.ndarray) -> None:
    compressed = gzip.compress(encode_nifti(array))
    for length in range(0, len(compressed), 7):
        (tmp_path / "cut.nii.gz").write_bytes(compressed[:length])
        with pytest.raises(ScanError):
            read_scan(f"{tmp_path}/cut.nii.gz")


def test_singular_sform_falls_back_to_qform(tmp_path: Path, array: np.ndarray) -> None:
    image = nibabel.Nifti1Image(array, np.diag([2, 2, 3, 1.0]))
    image.set_qform(np.diag([2, 2, 3, 1.0]), code=1)
    body = bytearray(image.to_bytes())
    body[280:296] = bytes(16)  # the first row of the sform
    scan = read_scan(_save_scan(tmp_path, bytes(body)))
    assert scan.geometry.spacing == (3, 2, 2)


def test_invalid_affine_is_rejected(tmp_path: Path, array: np.ndarray) -> None:
    body = bytearray(encode_nifti(array))
    body[80:92] = body[280:292] = np.full(3, np.nan, "<f4").tobytes()  # the spacing and the first row of the sform
    with pytest.raises(ScanError, match=r"the spacing is nan x nan x nan mm .*sform cannot be used.*sform or qform"):
        read_scan(_save_scan(tmp_path, bytes(body)))


def test_missing_files_and_unsupported_formats(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"scan\.nii\.gz"):
        read_scan(f"{tmp_path}/scan.nii.gz")
    with pytest.raises(NotFoundError, match="no such file or folder"):
        read_scan(f"{tmp_path}/nowhere")
    with pytest.raises(NotFoundError, match="neither a file nor a folder"):
        read_scan(str(tmp_path))
    with pytest.raises(ScanError, match=r"single \.dcm file.*folder of the whole series"):
        read_scan(f"{tmp_path}/0001.dcm")
    with pytest.raises(ScanError, match=r"single \.png file"):
        read_scan(f"{tmp_path}/a.png")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 351), st.integers(0, 255)), min_size=1, max_size=4))
def test_wrong_header_bytes_never_crash(fuzz_folder: Path, changes: list[tuple[int, int]]) -> None:
    body = bytearray(encode_nifti(np.ones((4, 5, 6), np.int16)))
    for offset, value in changes:
        body[offset] = value
    (fuzz_folder / "fuzz.nii").write_bytes(body)
    for read in (read_scan, read_label):
        with contextlib.suppress(ScanError):
            read(f"{fuzz_folder}/fuzz.nii")


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_labels_of_any_type_become_uint8(tmp_path: Path) -> None:
    label = np.random.default_rng(2).integers(0, 4, (4, 5, 6))
    for dtype in (np.uint8, np.int16, np.int32, np.float32, np.float64):
        values, geometry = read_label(_save_scan(tmp_path, encode_nifti(label.astype(dtype))))
        assert values.dtype == np.uint8
        np.testing.assert_array_equal(geometry.from_canonical(values), label)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.5, r"1 label voxels are not integers, such as 1\.5"),
        (np.nan, "such as nan"),
        (-1, "from -1 to 2"),
        (300, "from 0 to 300"),
    ],
)
def test_invalid_label_values_are_rejected(tmp_path: Path, value: float, message: str) -> None:
    label = (np.arange(60) % 3).reshape(3, 4, 5).astype(np.float32)
    label[0, 0, 0] = value
    with pytest.raises(LabelValuesError, match=message):
        read_label(_save_scan(tmp_path, encode_nifti(label)))


def test_4d_labels_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotVolumeError, match="4D file of 2 volumes"):
        read_label(_save_scan(tmp_path, encode_nifti(np.zeros((3, 4, 5, 2), np.uint8))))


SHEARED = np.array([[1, 0, 0.2, 0], [0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1.0]])


@pytest.mark.parametrize("affine", [KITS_AFFINE, np.diag([-1, 1, 2, 1.0]), SHEARED])
@pytest.mark.parametrize("name", ["mask.nii.gz", "mask.nii"])
def test_mask_has_the_grid_of_the_scan(tmp_path: Path, affine: np.ndarray, name: str) -> None:
    scan = read_scan(_save_scan(tmp_path, encode_nifti(np.zeros((4, 5, 6), np.int16), affine)))
    mask = np.random.default_rng(3).integers(0, 3, scan.image.shape[1:], np.uint8)
    write_mask(tmp_path / "out" / name, mask, scan.geometry)
    stored_mask = nibabel.load(tmp_path / "out" / name)
    assert stored_mask.shape == (4, 5, 6)
    assert stored_mask.get_data_dtype() == np.uint8
    np.testing.assert_allclose(stored_mask.affine, affine, atol=1e-6)
    assert stored_mask.header["sform_code"] == 1
    assert stored_mask.header["qform_code"] == (0 if affine is SHEARED else 1)
    read, geometry = read_label(f"{tmp_path}/out/{name}")
    np.testing.assert_array_equal(read, mask)
    assert describe_grid_difference(geometry, scan.geometry) is None


def test_mask_bytes_are_reproducible(gcs: Bucket) -> None:
    geometry = Geometry.of((4, 5, 6), KITS_AFFINE)
    mask = np.ones(geometry.canonical_shape, np.uint8)
    for name in ("a.nii.gz", "b.nii.gz"):
        write_mask(f"{gcs.uri}/{name}", mask, geometry, np.int16, gcs.config)
    assert bytes(gcs.store.get("a.nii.gz")) == bytes(gcs.store.get("b.nii.gz"))
    assert read_scan(f"{gcs.uri}/a.nii.gz", gcs.config).dtype == np.int16


def test_mask_of_wrong_shape_or_format_is_rejected(tmp_path: Path) -> None:
    geometry = Geometry.of((4, 5, 6), KITS_AFFINE)
    with pytest.raises(ConfigError, match="shape"):
        write_mask(tmp_path / "a.nii.gz", np.ones((4, 5, 7), np.uint8), geometry)
    with pytest.raises(ConfigError, match=r"\.nii\.gz or \.nii"):
        write_mask(tmp_path / "a.png", np.ones(geometry.canonical_shape, np.uint8), geometry)


@pytest.mark.parametrize("suffix", ["nrrd", "mha"])
def test_nrrd_and_mha_match_nifti(tmp_path: Path, gcs: Bucket, array: np.ndarray, suffix: str) -> None:
    expected = read_scan(_save_scan(tmp_path, encode_nifti(array)))
    sitk.WriteImage(sitk.ReadImage(str(tmp_path / "scan.nii.gz")), str(tmp_path / f"scan.{suffix}"))
    gcs.store.put(f"scan.{suffix}", (tmp_path / f"scan.{suffix}").read_bytes())
    for scan in (read_scan(f"{tmp_path}/scan.{suffix}"), read_scan(f"{gcs.uri}/scan.{suffix}", gcs.config)):
        np.testing.assert_array_equal(scan.image, expected.image)
        assert describe_grid_difference(scan.geometry, expected.geometry) is None
        assert scan.dtype == np.int16
    (tmp_path / f"cut.{suffix}").write_bytes((tmp_path / f"scan.{suffix}").read_bytes()[:90])
    with pytest.raises(ScanError, match="unreadable"):
        read_scan(f"{tmp_path}/cut.{suffix}")
    with pytest.raises(NotFoundError):
        read_scan(f"{tmp_path}/none.{suffix}")


def dicom_series(
    folder: Path, volume: np.ndarray, *, step_mm: float = 2.5, uid: str = "1.2.3", start: int = 0, slope: str = "1"
) -> None:
    """Write `volume` (z, y, x) as one oblique series, with file names that do not follow the order of slices. `slope`
    replaces that in the headers of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    tilt = 0.3
    row, column = (1.0, 0.0, 0.0), (0.0, float(np.cos(tilt)), float(np.sin(tilt)))
    normal = np.cross(row, column)
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    for z in range(len(volume)):
        image = sitk.GetImageFromArray(volume[z][None])
        image.SetSpacing((0.7, 0.9, step_mm))
        position = np.array([-20.0, 10.0, 40.0]) + normal * step_mm * (z + start)
        tags = {
            "0008|0060": "CT",
            "0020|000e": uid,
            "0020|000d": "1.2",
            "0020|0032": "\\".join(f"{v:.6f}" for v in position),
            "0020|0037": "\\".join(f"{v:.6f}" for v in (*row, *column)),
            "0020|0013": str(z),
            "0028|1052": "-1024",
            "0028|1053": "1",
            "0008|0018": f"{uid}.{z + start}",
        }
        for tag, value in tags.items():
            image.SetMetaData(tag, value)
        path = folder / f"{(z * 7) % 101:03d}_{uid}.dcm"
        writer.SetFileName(str(path))
        writer.Execute(image)
        if slope != "1":
            element = b"\x28\x00\x53\x10"
            before, after = path.read_bytes().split(element + b"\x02\x00\x00\x001 ")
            value = slope.ljust(len(slope) + len(slope) % 2).encode()
            path.write_bytes(before + element + len(value).to_bytes(4, "little") + value + after)


@pytest.fixture
def volume() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 2000, (6, 8, 9), np.int16)


def test_dicom_series_in_a_folder_or_bucket(tmp_path: Path, gcs: Bucket, volume: np.ndarray) -> None:
    dicom_series(tmp_path / "ct", volume)
    (tmp_path / "ct" / "readme.txt").write_text("not a slice")
    # The files store the values without their intercept of -1024.
    assert (tmp_path / "ct" / "000_1.2.3.dcm").read_bytes().endswith((volume[0] + 1024).astype("<i2").tobytes())
    for path in (tmp_path / "ct").iterdir():
        gcs.store.put(f"ct/{path.name}", path.read_bytes())
    for scan in (read_scan(str(tmp_path / "ct")), read_scan(f"{gcs.uri}/ct", gcs.config)):
        assert scan.image.shape == (1, 6, 8, 9)
        np.testing.assert_allclose(scan.geometry.spacing, (2.5, 0.9, 0.7), atol=1e-5)
        file_array = scan.geometry.from_canonical(scan.image[0])
        np.testing.assert_array_equal(file_array.transpose(2, 1, 0), volume)
        np.testing.assert_allclose(np.asarray(scan.geometry.affine)[:3, 3], (20, -10, 40), atol=1e-5)
    # The series written as NIfTI by SimpleITK has the same grid.
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(tmp_path / "ct")))
    sitk.WriteImage(reader.Execute(), str(tmp_path / "same.nii.gz"))
    converted = read_scan(str(tmp_path / "same.nii.gz"))
    assert describe_grid_difference(converted.geometry, scan.geometry) is None
    np.testing.assert_array_equal(converted.image, scan.image)


def test_incomplete_or_ambiguous_series_is_rejected(tmp_path: Path, volume: np.ndarray) -> None:
    dicom_series(tmp_path / "gap", volume)
    (tmp_path / "gap" / "014_1.2.3.dcm").unlink()
    with pytest.raises(ScanError, match=r"1 missing slice: a gap of 5 mm where 2\.5 mm is usual \(after slice 2"):
        read_scan(f"{tmp_path}/gap")
    dicom_series(tmp_path / "two", volume)
    dicom_series(tmp_path / "two", volume, uid="4.5.6")
    with pytest.raises(ScanError, match=r"2 DICOM series in one folder: 1\.2\.3 \(6 files\), 4\.5\.6 \(6 files\)"):
        read_scan(f"{tmp_path}/two")
    dicom_series(tmp_path / "twice", volume)
    (tmp_path / "twice" / "copy.dcm").write_bytes((tmp_path / "twice" / "014_1.2.3.dcm").read_bytes())
    with pytest.raises(ScanError, match="1 of 7 slices have the position of another slice"):
        read_scan(f"{tmp_path}/twice")


@pytest.mark.parametrize("slope", ["0", "nan", "inf"])
def test_series_without_a_usable_scaling_is_rejected(tmp_path: Path, volume: np.ndarray, slope: str) -> None:
    dicom_series(tmp_path / "ct", volume, slope=slope)
    with pytest.raises(ScanError, match=rf"_1\.2\.3\.dcm: slope is '{slope}'"):
        read_scan(f"{tmp_path}/ct")


def test_uneven_and_single_slices_are_rejected(tmp_path: Path, volume: np.ndarray) -> None:
    dicom_series(tmp_path / "uneven", volume)
    (tmp_path / "uneven" / "035_1.2.3.dcm").unlink()
    dicom_series(tmp_path / "other", volume[:1], step_mm=2.9, start=5)
    (tmp_path / "other" / "000_1.2.3.dcm").rename(tmp_path / "uneven" / "035_1.2.3.dcm")
    with pytest.raises(ScanError, match=r"unevenly spaced slices: gaps from 2\.5 to 4\.5 mm"):
        read_scan(f"{tmp_path}/uneven")
    dicom_series(tmp_path / "one", volume[:1])
    with pytest.raises(NotVolumeError, match="a 2D image: shape 9 x 8 x 1"):
        read_scan(f"{tmp_path}/one")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.bin").write_bytes(b"nothing" * 100)
    with pytest.raises(ScanError, match=r"no DICOM image among 1 files \(a\.bin\)"):
        read_scan(f"{tmp_path}/none")


def test_reading_nifti_imports_nothing_heavy() -> None:
    code = (
        "import sys, voxlane.volume.scan, voxlane.volume.dataset_discovery, voxlane.volume.case_checks; "
        "assert not {'nibabel', 'SimpleITK', 'monai', 'scipy'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


def test_error_names_the_missing_extra(tmp_path: Path, volume: np.ndarray) -> None:
    dicom_series(tmp_path / "ct", volume)
    code = (
        "import sys; sys.modules['SimpleITK'] = None\n"
        "from voxlane.errors import MissingExtraError\n"
        "from voxlane.volume.scan import read_scan\n"
        f"try: read_scan({str(tmp_path / 'ct')!r})\n"
        "except MissingExtraError as error: print(error)"
    )
    process = subprocess.run([sys.executable, "-c", code], check=True, timeout=150, capture_output=True, text=True)
    assert "pip install 'voxlane[dicom]'" in process.stdout


def test_file_without_suffix_is_recognised_by_its_first_bytes(tmp_path: Path, volume: np.ndarray) -> None:
    dicom_series(tmp_path / "ct", volume[:2])
    (tmp_path / "ct" / "000_1.2.3.dcm").rename(tmp_path / "IM0001")
    with pytest.raises(ScanError, match="It is a DICOM file: use the folder of its series"):
        read_scan(f"{tmp_path}/IM0001")


def test_strip_scan_suffix() -> None:
    assert strip_scan_suffix("gs://b/a/case_1.nii.gz") == "case_1"
    assert strip_scan_suffix("x/Y.NII") == "Y"
    assert strip_scan_suffix("x/series/") == "series"


@pytest.mark.skipif(not (REAL_DATA / "Task04_Hippocampus").is_dir(), reason="the real data is not available")
def test_real_files_match_nibabel() -> None:
    paths = sorted((REAL_DATA / "Task04_Hippocampus" / "imagesTr").glob("*.nii.gz"))[:3]
    paths += [REAL_DATA / "ct" / "example_ct.nii.gz"]
    for path in paths:
        scan = read_scan(str(path))
        expected = nibabel.as_closest_canonical(nibabel.load(path))
        np.testing.assert_array_equal(scan.image[0], expected.get_fdata().transpose(2, 1, 0))
        np.testing.assert_allclose(scan.geometry.canonical_affine, expected.affine, atol=1e-5)
