"""A corpus of bad scans, labels and descriptions of datasets, built by code.

Each entry says what a command must do about it: fail with an error that contains a text, or succeed with a warning that
contains it. Nothing bad may pass in silence.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import nibabel
import numpy as np
import SimpleITK as sitk  # noqa: N813

from tests.volume import sample_data

Severity = Literal["error", "warning"]
SHAPE = (26, 24, 20)


@dataclass(frozen=True)
class BadScan:
    """A scan or label that is wrong or suspicious."""

    name: str
    severity: Severity
    text: str
    """Regular expression that the error or warning matches, in any case."""
    build: Callable[[Path], str]
    """Writes the scan below a folder and returns its path below it."""
    only_prepare: bool = False
    """Whether `predict` has nothing to say about it."""
    is_large: bool = False
    """Whether building or reading it takes seconds."""


@dataclass(frozen=True)
class BadSource:
    """A dataset whose description is wrong, or whose cases are suspicious together."""

    name: str
    severity: Severity
    text: str
    build: Callable[[Path], str]
    """Writes the dataset below a folder and returns the source's path below it."""
    options: list[str] = field(default_factory=list)


SCANS: list[BadScan] = []
LABELS: list[BadScan] = []
SOURCES: list[BadSource] = []


# -- NIfTI -------------------------------------------------------------------------------------------------------------


def make_image(seed: int = 0) -> np.ndarray:
    return sample_data.make_ct(seed, SHAPE)[0]


def make_label(seed: int = 0) -> np.ndarray:
    return sample_data.make_ct(seed, SHAPE)[1]


def to_nifti(array: np.ndarray, affine: np.ndarray = sample_data.AFFINE) -> bytearray:
    """Return an uncompressed NIfTI file whose header has a valid sform and qform."""
    image = nibabel.Nifti1Image(array, affine, dtype=array.dtype)
    image.header.set_xyzt_units("mm")
    image.set_sform(affine, code=1)
    image.set_qform(affine, code=1)
    return bytearray(image.to_bytes())


def edit(*changes: tuple[int, str, Any], array: np.ndarray | None = None) -> bytes:
    """Return a file with other values in its header: offset, struct format and value or values of each change."""
    body = to_nifti(make_image() if array is None else array)
    for offset, kind, value in changes:
        struct.pack_into(f"<{kind}", body, offset, *(value if isinstance(value, tuple) else (value,)))
    return bytes(body)


DIM, TYPE, BITS, PIXDIM, OFFSET, SLOPE, INTER, UNITS = 40, 70, 72, 80, 108, 112, 116, 123
QCODE, SCODE, QUATERN, SROW = 252, 254, 256, 280
NO_SFORM, NO_QFORM = (SCODE, "h", 0), (QCODE, "h", 0)
NAN, INF = float("nan"), float("inf")


def add_file(name: str, severity: Severity, text: str, body: bytes, suffix: str = ".nii", **options: Any) -> None:
    def build(folder: Path) -> str:
        (folder / f"bad{suffix}").write_bytes(body)
        return f"bad{suffix}"

    SCANS.append(BadScan(name, severity, text, build, **options))


def add_header(name: str, severity: Severity, text: str, *changes: tuple[int, str, Any]) -> None:
    add_file(name, severity, text, edit(*changes))


def add_array(name: str, severity: Severity, text: str, array: np.ndarray, **options: Any) -> None:
    add_file(name, severity, text, gzip.compress(bytes(to_nifti(array)), 1), ".nii.gz", **options)


def _add_damaged_files() -> None:
    good = bytes(to_nifti(make_image()))
    compressed = gzip.compress(good, 1)
    flipped = bytearray(compressed)
    flipped[len(flipped) // 2] ^= 0xFF
    no_magic, pair = bytearray(good), bytearray(good)
    no_magic[344:348], pair[344:348] = bytes(4), b"ni1\0"
    gz = ".nii.gz"
    add_file("empty file", "error", "the file is empty", b"", gz)
    add_file("half a gzip", "error", "truncated", compressed[: len(compressed) // 2], gz)
    add_file("five bytes of gzip", "error", "truncated", compressed[:5], gz)
    add_file("gzip without its last byte", "error", "truncated", compressed[:-1], gz)
    add_file("flipped byte in gzip", "error", "damaged|truncated", bytes(flipped), gz)
    add_file("wrong gzip checksum", "error", "damaged", compressed[:-8] + bytes(4) + compressed[-4:], gz)
    add_file("cut voxels", "error", "truncated", good[: len(good) // 2])
    add_file("one byte missing", "error", "truncated", good[:-1])
    add_file("cut header", "error", "truncated inside the header", good[:100])
    add_file("gzip of a cut file", "error", "truncated", gzip.compress(good[:4000]), gz)
    add_file("text", "error", "not a NIfTI file", b"hello, this is no scan" * 40, gz)
    add_file("web page", "error", "web page", b"<!DOCTYPE html><html>no access</html>", gz)
    add_file("LFS pointer", "error", "git lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:1", gz)
    add_file("zeros", "error", "not a NIfTI file", bytes(10_000))
    add_file("noise", "error", "not a NIfTI file", np.random.default_rng(0).bytes(10_000), gz)
    add_file("zip archive", "error", "not a NIfTI file", b"PK\3\4" + bytes(500), gz)
    add_file("no magic number", "error", "magic", bytes(no_magic))
    add_file("half a pair", "error", "pair", bytes(pair))
    add_file("trailing bytes", "warning", "1,000 bytes follow the voxels", good + bytes(1000))
    bomb = gzip.compress(good + bytes(1 << 28), 1)
    add_file("gzip that goes on after the voxels", "error", "bytes follow the voxels", bomb, gz)


def _add_headers() -> None:
    spacing = (PIXDIM, "3f")
    add_header("unknown data type", "error", "invalid NIfTI header", (TYPE, "h", 999))
    add_header("wrong bits", "warning", "bitpix is 8", (BITS, "h", 8))
    add_header("colours", "error", "colours|truncated", (TYPE, "h", 128), (BITS, "h", 24))
    add_header("zero spacing", "error", "spacing is 0 x 1 x 2", (*spacing, (0, 1, 2)), NO_SFORM)
    add_header("zero spacing without forms", "error", "spacing is 0", (*spacing, (0, 0, 0)), NO_SFORM, NO_QFORM)
    add_header("zero spacing beside an sform", "warning", "qform is singular", (*spacing, (0, 1, 2)))
    add_header("negative spacing", "warning", "spacing is negative", (*spacing, (1, -1, 2)), NO_SFORM)
    add_header("NaN spacing", "error", "spacing is nan", (*spacing, (NAN, 1, 2)), NO_SFORM)
    add_header("infinite spacing", "error", "spacing is inf", (*spacing, (INF, 1, 2)), NO_SFORM)
    add_header("tiny spacing", "error", "spacing is", (*spacing, (1e-6, 1e-6, 1e-6)), NO_SFORM)
    add_header("huge spacing", "error", "spacing is", (*spacing, (1e6, 1, 2)), NO_SFORM)
    add_header("spacing of 30 mm", "error", "spacing of 30 x 30 x 30", (*spacing, (30, 30, 30)), NO_SFORM)
    add_header("unusual spacing", "warning", "which is unusual", (*spacing, (0.02, 0.8, 1)), NO_SFORM)
    add_header("spacing unlike the sform", "warning", "spacing is 3 x 1 x 2", (*spacing, (3, 1, 2)), NO_QFORM)
    row = (SROW, "4f", (0, 0, 0, 0))
    add_header("singular sform", "error", "singular or not finite", row, NO_QFORM)
    add_header("singular sform beside a qform", "warning", "sform is singular", row)
    add_header("NaN sform", "warning", "sform is singular or not finite", (SROW, "4f", (NAN, 0, 0, 0)))
    add_header(
        "sform of tiny numbers",
        "error",
        "spacing is",
        (SROW, "12f", (*(1e-30, 0, 0, 0), *(0, 1e-30, 0, 0), *(0, 0, 1e-30, 0))),
        NO_QFORM,
    )
    add_header("sform unlike the qform", "warning", "sform and qform put voxels", (SROW + 12, "f", 40.0))
    add_header("mirrored sform", "warning", "sform and qform put voxels", (SROW, "4f", (1, 0, 0, 0)))
    add_header("sheared sform", "warning", "not perpendicular", (SROW, "4f", (-1, 0.5, 0, 0)), NO_QFORM)
    add_header("invalid quaternion", "error", "singular or not finite", (QUATERN, "3f", (3, 3, 3)), NO_SFORM)
    add_header("no orientation", "warning", "neither sform nor qform", NO_SFORM, NO_QFORM)
    add_header("NaN slope", "error", "scl_slope is nan", (SLOPE, "f", NAN))
    add_header("infinite slope", "error", "scl_slope is inf", (SLOPE, "f", INF))
    add_header("NaN intercept", "error", "scl_inter is nan", (SLOPE, "2f", (1.0, NAN)))
    add_header("negative slope", "warning", "scl_slope is negative", (SLOPE, "f", -1.0))
    add_header("huge slope", "error", "which no scanner measures|NaN or infinite", (SLOPE, "f", 1e30))
    add_header("NaN vox_offset", "error", "vox_offset is nan", (OFFSET, "f", NAN))
    add_header("infinite vox_offset", "error", "vox_offset is inf", (OFFSET, "f", INF))
    add_header("negative vox_offset", "error", "vox_offset is -1000", (OFFSET, "f", -1000.0))
    add_header("vox_offset inside the header", "error", "vox offset|vox_offset", (OFFSET, "f", 100.0))
    add_header("vox_offset after the file", "error", "truncated", (OFFSET, "f", 1e6))
    add_header("negative size", "error", "empty image|invalid", (DIM, "4h", (3, -26, 24, 20)))
    add_header("size of zero", "error", "empty image|invalid", (DIM, "4h", (3, 0, 24, 20)))
    add_header("size of terabytes", "error", "truncated|memory", (DIM, "4h", (3, 32767, 32767, 32767)))
    add_header("nine axes", "error", "invalid|axes|empty|D image", (DIM, "h", 9))
    add_header("one slice", "error", "2D image", (DIM, "4h", (3, 26, 480, 1)))
    add_header("five axes", "error", "5D image", (DIM, "6h", (5, 26, 24, 5, 2, 2)))
    add_header("lengths in metres", "error", "lengths in metres", (UNITS, "B", 1))
    add_header("lengths in micrometres", "error", "lengths in micrometres", (UNITS, "B", 3))


def _add_intensities() -> None:
    image = make_image().astype(np.float32)
    with_nan, with_inf = image.copy(), image.copy()
    with_nan[3, 3, 3], with_inf[4, 4, 4] = NAN, INF
    blank = make_image()
    blank[:, :, 4:] = 0
    add_array("constant image", "error", "every voxel is 7", np.full(SHAPE, 7, np.int16))
    add_array("image of zeros", "error", "every voxel is 0", np.zeros(SHAPE, np.uint8))
    add_array("one NaN", "error", "NaN or infinite", with_nan)
    add_array("one infinity", "error", "NaN or infinite", with_inf)
    add_array("all NaN", "error", "NaN or infinite", np.full(SHAPE, NAN, np.float32))
    add_array("uint64 above 2^60", "error", "which no scanner measures", make_image().astype(np.uint64) % 1000 + 2**61)
    add_array("int64 below -2^40", "error", "which no scanner measures", make_image().astype(np.int64) - 2**41)
    add_array("float64 beyond float32", "error", "NaN or infinite", image.astype(np.float64) * 1e300)
    add_array("floats of a wrong byte order", "error", "no scanner measures|NaN", image.byteswap().view(np.float32))
    add_array("integers that float32 rounds", "warning", "are rounded", make_image().astype(np.int32) + 2**25)
    add_array("blank slices", "warning", "slices have a single value", blank)
    add_array("two values", "warning", "this may be a label", (make_image() > 0).astype(np.uint8) * 5)
    add_array("complex numbers", "error", "complex64", image.astype(np.complex64))
    add_array("CT in other units", "warning", "expected Hounsfield units", make_image() + 1000, only_prepare=True)
    add_array("two channels", "error", "2 channels", np.stack([image, image + 1], -1))

    def build_bomb(folder: Path) -> str:
        header = edit((DIM, "4h", (3, 700, 700, 700)), (TYPE, "h", 2), (BITS, "h", 8))[:352]
        stream = zlib.compressobj(1, wbits=31)
        with (folder / "bad.nii.gz").open("wb") as file:
            file.write(stream.compress(header))
            for _ in range(70):
                file.write(stream.compress(bytes(4_900_000)))
            file.write(stream.flush())
        return "bad.nii.gz"

    text = "memory|every voxel is 0"
    SCANS.append(BadScan("small gzip of a huge scan", "error", text, build_bomb, is_large=True))


# -- other files -------------------------------------------------------------------------------------------------------


def to_npy(array: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def _add_npy() -> None:
    image = make_image().T
    good = to_npy(image)
    huge = good.replace(b"(20, 24, 26)", b"(999999999, 9999, 9999)"[:12])
    huge = good.replace(b"(20, 24, 26), }" + b" " * 12, b"(999999, 99999, 26), }     ")
    add_file("empty npy", "error", "not a .npy file", b"", ".npy")
    add_file("cut npy", "error", "truncated", good[:-100], ".npy")
    add_file("npy and more", "error", "more than one array", good + good, ".npy")
    add_file("npy of text", "error", "not a .npy file", b"1,2,3\n" * 100, ".npy")
    add_file("damaged npy header", "error", "damaged header", good[:8] + b"\xff\xff" + good[10:], ".npy")
    add_file("npy of an unknown version", "error", "not a .npy file", good[:6] + b"\x09" + good[7:], ".npy")
    add_file("npy that demands terabytes", "error", "truncated", huge, ".npy")
    add_file("npy of objects", "error", "Python objects", to_npy(np.array([[[{}]]], object), allow_pickle=True), ".npy")
    add_file("npy of one slice", "error", "2 axes", to_npy(image[0]), ".npy")
    add_file("npy of complex numbers", "error", "complex64", to_npy(image.astype(np.complex64)), ".npy")
    add_file("npy of text values", "error", "values", to_npy(np.full(SHAPE, "ab")), ".npy")
    add_file("npy without voxels", "error", "empty array", to_npy(np.zeros((0, 24, 26), np.int16)), ".npy")
    add_file("constant npy", "error", "every voxel is 3", to_npy(np.full_like(image, 3)), ".npy")
    add_file("npy with NaN", "error", "NaN", to_npy(np.where(image > 0, image, np.float32(NAN))), ".npy")
    add_file("npy of uint64", "error", "no scanner", to_npy(image.astype(np.uint64) % 99 + 2**62), ".npy")


def to_itk(suffix: str) -> bytes:
    """Return an uncompressed .nrrd or .mha file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        image = sitk.GetImageFromArray(make_image().T)
        image.SetSpacing((1.0, 1.0, 2.0))
        sitk.WriteImage(image, f"{folder}/a{suffix}")
        return Path(folder, f"a{suffix}").read_bytes()


def _add_itk() -> None:
    nrrd, mha = to_itk(".nrrd"), to_itk(".mha")
    directions = b"space directions: (1,0,0) (0,1,0) (0,0,2)\n"
    assert directions in nrrd
    without = nrrd.replace(directions, b"").replace(b"space: left-posterior-superior\n", b"")
    without = without.replace(b"space origin: (0,0,0)\n", b"")
    add_file("empty nrrd", "error", "empty", b"", ".nrrd")
    add_file("cut nrrd", "error", "unreadable", nrrd[:-500], ".nrrd")
    add_file("nrrd of text", "error", "unreadable", b"NRRD? no" * 50, ".nrrd")
    add_file(
        "nrrd that demands terabytes",
        "error",
        "memory|unreadable",
        nrrd.replace(b"sizes: 26 24 20", b"sizes: 99999 99999 999"),
        ".nrrd",
    )
    add_file(
        "nrrd with voxels elsewhere",
        "error",
        "in another file",
        nrrd.replace(b"encoding: raw\n", b"encoding: raw\ndata file: /etc/passwd\n"),
        ".nrrd",
    )
    add_file(
        "nrrd with a zero axis",
        "error",
        "is no axis",
        nrrd.replace(directions, directions.replace(b"(0,1,0)", b"(0,0,0)")),
        ".nrrd",
    )
    add_file(
        "nrrd with a NaN axis",
        "error",
        "is no axis",
        nrrd.replace(directions, directions.replace(b"(0,1,0)", b"(0,nan,0)")),
        ".nrrd",
    )
    add_file("nrrd without spacing", "warning", "no spacing", without, ".nrrd")
    add_file(
        "nrrd with zero spacing",
        "error",
        "spacing is 0",
        without.replace(b"endian", b"spacings: 0 1 2\nendian"),
        ".nrrd",
    )
    add_file(
        "nrrd without directions",
        "warning",
        "no directions",
        without.replace(b"endian", b"spacings: 1 1 2\nendian"),
        ".nrrd",
    )
    add_file("empty mha", "error", "empty", b"", ".mha")
    add_file("cut mha", "error", "unreadable", mha[:-500], ".mha")
    add_file(
        "mha with zero spacing",
        "error",
        "spacing is 0",
        mha.replace(b"ElementSpacing = 1 1 2", b"ElementSpacing = 0 0 0"),
        ".mha",
    )
    add_file(
        "mha with NaN spacing",
        "error",
        "spacing is nan",
        mha.replace(b"ElementSpacing = 1 1 2", b"ElementSpacing = nan 1 2"),
        ".mha",
    )
    add_file("mha without spacing", "warning", "no spacing", mha.replace(b"ElementSpacing = 1 1 2\n", b""), ".mha")
    add_file("mha with voxels elsewhere", "error", "in another file", mha.replace(b"= LOCAL", b"= /etc/passwd"), ".mha")
    add_file(
        "mha that demands terabytes",
        "error",
        "memory|unreadable",
        mha.replace(b"DimSize = 26 24 20", b"DimSize = 99999 99999 999"),
        ".mha",
    )


def write_series(folder: Path, count: int = 8, size: int = 24, **changes: Any) -> list[Path]:
    """Write a DICOM series of `count` slices, in the order of their positions. `changes` are tags, named
    `t0020_0013`, with values for each slice: a function of its number."""
    folder.mkdir(parents=True, exist_ok=True)
    volume = np.random.default_rng(4).integers(-500, 500, (count, size, size + 2), np.int16)
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    paths = []
    for z in range(count):
        image = sitk.GetImageFromArray(volume[z][None])
        image.SetSpacing((1.0, 1.0, 2.0))
        tags = {
            "0008|0060": "CT",
            "0020|000e": "1.2.3",
            "0020|000d": "1.2",
            "0020|0032": f"0\\0\\{2.0 * z}",
            "0020|0037": "1\\0\\0\\0\\1\\0",
            "0020|0013": str(z + 1),
            "0008|0018": f"1.2.3.{z}",
        }
        tags |= {name[1:].replace("_", "|"): make(z) for name, make in changes.items()}
        for tag, value in tags.items():
            image.SetMetaData(tag, value)
        paths.append(folder / f"IM{z:04d}.dcm")
        writer.SetFileName(str(paths[-1]))
        writer.Execute(image)
    return paths


def add_series(name: str, severity: Severity, text: str, change: Callable[[list[Path]], Any], **tags: Any) -> None:
    """Add a series whose files `change` alters; `count` and tags are those of `write_series`."""

    def build(folder: Path) -> str:
        change(write_series(folder / "series", **tags))
        return "series"

    SCANS.append(BadScan(name, severity, text, build))


def _retag(path: Path, old: bytes, new: bytes) -> None:
    body = path.read_bytes()
    assert old in body
    path.write_bytes(body.replace(old, new, 1))


def _add_dicom() -> None:
    def keep(paths: list[Path]) -> None:
        pass

    add_series("cut slice", "error", r"IM0003\.dcm is truncated", lambda p: os.truncate(p[3], 800))
    add_series(
        "slice without its last bytes",
        "error",
        r"IM0003\.dcm is truncated",
        lambda p: os.truncate(p[3], p[3].stat().st_size - 4),
    )
    add_series("slice cut in its header", "error", r"IM0003\.dcm is truncated", lambda p: os.truncate(p[3], 200))
    add_series("empty slice", "error", r"IM0003\.dcm is empty", lambda p: os.truncate(p[3], 0))
    add_series("empty last slice", "error", r"IM0007\.dcm is empty", lambda p: os.truncate(p[7], 0))
    add_series("slice of zeros", "error", r"IM0003\.dcm is not DICOM", lambda p: p[3].write_bytes(bytes(2000)))
    add_series(
        "slice that is a web page",
        "error",
        r"IM0003\.dcm is not DICOM",
        lambda p: p[3].write_bytes(b"<html>403</html>"),
    )
    add_series("missing slice", "error", r"1 missing slice:.*IM0002\.dcm and IM0004\.dcm", lambda p: p[3].unlink())
    add_series(
        "copied slice",
        "error",
        r"position of another slice .*IM0003",
        lambda p: (p[0].parent / "IM0003b.dcm").write_bytes(p[3].read_bytes()),
    )
    add_series(
        "unequal gaps",
        "error",
        "unevenly spaced",
        keep,
        t0020_0032=lambda z: f"0\\0\\{2.0 * z + (0.7 if z == 3 else 0)}",
    )
    add_series("two series", "error", "2 DICOM series", keep, t0020_000e=lambda z: f"1.2.{z % 2}")
    add_series("slices side by side", "error", "position of another slice", keep, t0020_0032=lambda z: f"{z}\\0\\0")
    add_series(
        "no positions",
        "error",
        "no position",
        lambda p: [_retag(q, b"\x20\x00\x32\x00", b"\x20\x00\x33\x00") for q in p],
    )
    add_series(
        "no pixel spacing",
        "error",
        "no pixel spacing",
        lambda p: [_retag(q, b"\x28\x00\x30\x00", b"\x28\x00\x31\x00") for q in p],
    )
    add_series(
        "zero pixel spacing", "error", "pixel spacing is '0", lambda p: [_retag(q, b"1\\1 ", b"0\\0 ") for q in p]
    )
    add_series("first slices missing", "warning", "first instance number is 4", lambda p: [q.unlink() for q in p[:3]])
    add_series(
        "every second slice missing",
        "warning",
        "instance numbers .* have no slice",
        lambda p: [q.unlink() for q in p[1::2]],
    )
    add_series("fewer images than announced", "warning", "announces 12 images", keep, t0020_1002=lambda z: "12")
    add_series(
        "a document between the slices",
        "warning",
        r"ignored: report\.pdf",
        lambda p: (p[0].parent / "report.pdf").write_bytes(b"%PDF-1.4"),
    )
    add_series("single slice", "error", "2D image", keep, count=1)
    add_series(
        "folder without images",
        "error",
        "no DICOM image|cannot be read",
        lambda p: [q.write_bytes(b"none" * 99) for q in p],
    )
    add_series("empty folder", "error", "no scan here|does not exist", lambda p: [q.unlink() for q in p])
    add_series(
        "pipe among the slices", "error", "not a regular file|no such file", lambda p: (p[3].unlink(), os.mkfifo(p[3]))
    )

    def add_structures(paths: list[Path]) -> None:
        body = paths[0].read_bytes().replace(b"1.2.840.10008.5.1.4.1.1.2\0", b"1.2.840.10008.5.1.4.1.1.66")
        (paths[0].parent / "structures.dcm").write_bytes(body[:500])

    def change_size(paths: list[Path]) -> None:
        other = write_series(paths[0].parent.parent / "other", size=20)
        paths[3].write_bytes(other[3].read_bytes())

    add_series("structures beside the slices", "warning", r"ignored: structures\.dcm", add_structures)
    add_series("slice of another size", "error", "different sizes", change_size)


def _add_special_files() -> None:
    def add(name: str, text: str, build: Callable[[Path], Any]) -> None:
        def build_named(folder: Path) -> str:
            build(folder / "bad.nii.gz")
            return "bad.nii.gz"

        SCANS.append(BadScan(name, "error", text, build_named))

    add("pipe", "not a regular file", os.mkfifo)
    add("link to a device", "not a regular file", lambda path: path.symlink_to("/dev/zero"))
    add("link to nothing", "exist|no such|not found", lambda path: path.symlink_to("/nowhere/at/all"))
    add("link to itself", "cannot be read", lambda path: path.symlink_to(path))
    add("folder named like a file", "no scan here|does not exist", lambda path: path.mkdir())
    add("missing file", "exist|no such|not found", lambda path: None)


# -- labels ------------------------------------------------------------------------------------------------------------


def add_label(name: str, severity: Severity, text: str, body: bytes) -> None:
    def build(folder: Path) -> str:
        (folder / "label.nii.gz").write_bytes(body)
        return "label.nii.gz"

    LABELS.append(BadScan(name, severity, text, build, only_prepare=True))


def _add_labels() -> None:
    label = make_label()
    shifted = sample_data.AFFINE.copy()
    shifted[0, 3] = 50
    seven, fraction, with_nan = label.copy(), label.astype(np.float32), label.astype(np.float32)
    seven[0, 0, 0], fraction[0, 0, 0], with_nan[0, 0, 0] = 7, 0.5, NAN
    for name, severity, text, body in (
        ("empty label", "error", "the file is empty", b""),
        ("cut label", "error", "truncated", gzip.compress(bytes(to_nifti(label)))[:100]),
        ("label with an unknown value", "error", "values 7", bytes(to_nifti(seven))),
        ("label of fractions", "error", "not integers", bytes(to_nifti(fraction))),
        ("label with NaN", "error", "not integers", bytes(to_nifti(with_nan))),
        ("negative label", "error", "range from", bytes(to_nifti(-label.astype(np.int16)))),
        ("label of uint64", "error", "range from", bytes(to_nifti(label.astype(np.uint64) + 2**61))),
        ("smaller label", "error", "shapes differ", bytes(to_nifti(label[:, :, :10]))),
        ("shifted label", "error", "origins differ", bytes(to_nifti(label, shifted))),
        ("label of two channels", "error", "4D", bytes(to_nifti(np.stack([label, label], -1)))),
        ("label of background", "warning", "only background", bytes(to_nifti(np.zeros_like(label)))),
        ("label of everything", "warning", "100% of the scan", bytes(to_nifti(np.ones_like(label)))),
        ("label with a NaN slope", "error", "scl_slope", edit((SLOPE, "f", NAN), array=label)),
        ("label with other forms", "warning", "sform and qform", edit((QUATERN + 12, "f", 40.0), array=label)),
    ):
        add_label(name, severity, text, body)  # type: ignore[arg-type]


# -- datasets ----------------------------------------------------------------------------------------------------------

DESCRIPTION = {"channels": ["CT"], "labels": {"background": 0, "kidney": 1, "tumour": 2}}


def write_dataset(folder: Path, image: str = "", label: str = "", num_good: int = 2) -> str:
    """Write a list of `num_good` good cases, and of one case with `image` or `label` if they are given. Return the
    name of the list."""
    objects, rows = {}, []
    for number in range(1, num_good + 1):
        objects[f"{number}.nii.gz"] = gzip.compress(bytes(to_nifti(make_image(number))), 1)
        objects[f"{number}-label.nii.gz"] = gzip.compress(bytes(to_nifti(make_label(number))), 1)
        rows.append({"image": f"{number}.nii.gz", "label": f"{number}-label.nii.gz", "id": f"good{number}"})
    if image or label:
        objects["0.nii.gz"] = gzip.compress(bytes(to_nifti(make_image())), 1)
        objects["0-label.nii.gz"] = gzip.compress(bytes(to_nifti(make_label())), 1)
        rows.append({"image": image or "0.nii.gz", "label": label or "0-label.nii.gz", "id": "bad"})
    objects["list.json"] = json.dumps({"description": DESCRIPTION, "cases": rows}).encode()
    sample_data.write_folder(folder, objects)
    return "list.json"


def add_document(name: str, text: str, body: bytes, file: str = "list.json", **options: Any) -> None:
    def build(folder: Path) -> str:
        write_dataset(folder)
        (folder / file).write_bytes(body)
        return "" if file == "dataset.json" else file

    SOURCES.append(BadSource(name, "error", text, build, **options))


def _add_documents() -> None:
    rows = [{"image": "1.nii.gz", "label": "1-label.nii.gz"}]

    def listed(cases: Any, description: Any = DESCRIPTION) -> bytes:
        return json.dumps({"description": description, "cases": cases}).encode()

    add_document("deeply nested list", "nested too deeply", b"[" * 100_000 + b"]" * 100_000)
    add_document("deeply nested objects", "nested too deeply", b'{"cases":' * 100_000 + b"1" + b"}" * 100_000)
    add_document("cut JSON", "invalid JSON", listed(rows)[:-20])
    add_document("empty JSON", "invalid JSON", b"")
    add_document("JSON of binary data", "UTF-8", b"\xff\xfe\x00\x80")
    add_document("number of thousands of digits", "invalid JSON", b'{"cases": ' + b"9" * 10_000 + b"}")
    add_document("no cases", "no list of cases", listed([]))
    add_document("case that is a number", "expected an object", listed([5]))
    add_document("image that is a number", "no image", listed([{"image": 5, "label": "x"}]))
    add_document("label that is a list", "label is not a path", listed([{"image": "1.nii.gz", "label": ["x"]}]))
    add_document("two cases with one id", "used by several cases", listed([{**rows[0], "id": "a"}] * 2))
    add_document("id with a newline", "not a valid case id", listed([{**rows[0], "id": "a\nb"}]))
    add_document("id that leaves the folder", "not a valid case id", listed([{**rows[0], "id": "../a"}]))
    add_document("description that is a list", "expected an object", listed(rows, ["CT"]))
    add_document("labels without background", "background", listed(rows, {**DESCRIPTION, "labels": {"kidney": 1}}))
    add_document("labels above 255", "0 to 255", listed(rows, {**DESCRIPTION, "labels": {"background": 0, "x": 999}}))
    add_document(
        "CSV with a NUL",
        "invalid CSV|UTF-8|no image|exist|NUL",
        b"image,label\n\0,\0\n",
        "list.csv",
        options=["description.channels=[CT]", "description.labels={background: 0, a: 1}"],
    )
    document = {"modality": {"0": "CT"}, "labels": {"0": "background", "1": "kidney"}}
    name = "dataset.json"
    add_document("dataset.json that is a list", "unknown dataset layout|neither", b"[1, 2]", name)
    add_document("dataset.json without a layout", "neither training", b'{"name": "x"}', name)
    add_document("dataset.json without cases", "no cases", json.dumps({**document, "training": []}).encode(), name)
    training = [{"image": "1.nii.gz", "label": 5}]
    add_document(
        "dataset.json with a label 5",
        "label is not a path",
        json.dumps({**document, "training": training}).encode(),
        name,
    )
    odd = {**document, "training": [{"image": "1.nii.gz"}], "modality": {"²": "CT"}}
    add_document("dataset.json with an odd channel", "no channels", json.dumps(odd).encode(), name)

    def build_pipe(folder: Path) -> str:
        os.mkfifo(folder / "list.json")
        return "list.json"

    def build_missing(folder: Path) -> str:
        return "nothing/here"

    def build_duplicate(folder: Path) -> str:
        write_dataset(folder, image="copy.nii.gz")
        (folder / "copy.nii.gz").write_bytes((folder / "1.nii.gz").read_bytes())
        return "list.json"

    def build_set(change: Callable[[np.ndarray], bytes]) -> Callable[[Path], str]:
        def build(folder: Path) -> str:
            write_dataset(folder, image="odd.nii.gz", num_good=6)
            (folder / "odd.nii.gz").write_bytes(change(make_image()))
            return "list.json"

        return build

    wide = sample_data.AFFINE @ np.diag([6.0, 6.0, 1.0, 1.0])

    def build_wide(folder: Path) -> str:
        write_dataset(folder, image="odd.nii.gz", label="odd-label.nii.gz", num_good=6)
        (folder / "odd.nii.gz").write_bytes(to_nifti(make_image(), wide))
        (folder / "odd-label.nii.gz").write_bytes(to_nifti(make_label(), wide))
        return "list.json"

    SOURCES.extend(
        [
            BadSource("list that is a pipe", "error", "not a regular file", build_pipe),
            BadSource("no source", "error", "no such", build_missing),
            BadSource("a scan that occurs twice", "warning", "the same scan as", build_duplicate),
            BadSource("spacing unlike the rest", "warning", "where the median is", build_wide),
            BadSource(
                "intensities unlike the rest",
                "warning",
                "a range of",
                build_set(lambda image: bytes(to_nifti((image * 0.001).astype(np.float32)))),
            ),
        ]
    )


_add_damaged_files()
_add_headers()
_add_intensities()
_add_npy()
_add_itk()
_add_dicom()
_add_special_files()
_add_labels()
_add_documents()
