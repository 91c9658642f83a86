"""Small datasets for tests in every layout, as a mapping of object names to bytes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from tests.conftest import Bucket
from voxlane.volume.prepare import PrepareConfig, PrepareResult, prepare

Objects = dict[str, bytes]
AFFINE = np.diag([-1.0, -1.0, 2.0, 1.0])
"""The affine of scans whose first two axes run to the left and to the back, with voxels of 1 x 1 x 2 mm."""
PLAN: dict[str, Any] = {"patch": [16, 16, 16], "spacing": [2.0, 1.0, 1.0]}


def encode_nifti(array: np.ndarray, affine: np.ndarray = AFFINE) -> bytes:
    return gzip.compress(nibabel.Nifti1Image(array, affine).to_bytes(), 1, mtime=0)


def make_ct(seed: int, shape: tuple[int, int, int] = (26, 24, 20)) -> tuple[np.ndarray, np.ndarray]:
    """Return an image and a label (x, y, z): noise in Hounsfield units, an organ of label 1, and label 2 inside it."""
    random = np.random.default_rng(seed)
    label = np.zeros(shape, np.uint8)
    x, y, z = (int(random.integers(2, n // 3 + 1)) for n in shape)
    label[x : x + 10, y : y + 9, z : z + 7] = 1
    label[x + 3 : x + 6, y + 2 : y + 5, z + 2 : z + 4] = 2
    image = random.normal(-60, 25, shape) + 100.0 * (label == 1) + 160.0 * (label == 2)
    return image.astype(np.int16), label


def make_mr(seed: int, values: tuple[int, ...] = (1, 2), channels: int = 2) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the channels of a scan with a blank background, and a label with `values`."""
    random = np.random.default_rng(seed)
    shape = (24, 22, 20)
    label = np.zeros(shape, np.uint8)
    for index, value in enumerate(values):
        label[6 + 4 * index : 10 + 4 * index, 6:15, 6:14] = value
    brain = np.zeros(shape, bool)
    brain[3:-3, 2:-2, 3:-2] = True
    scale = random.uniform(50, 150)
    images = [
        (np.where(brain, random.normal(400 + 60 * c, 30, shape) + scale * label, 0)).astype(np.float32)
        for c in range(channels)
    ]
    return images, label


def make_kits19(cases: int = 6, first: int = 0) -> Objects:
    """Return cases in the KiTS19 layout. They differ in size, and some are smaller than the patch along an axis."""
    objects = {}
    for number in range(first, first + cases):
        image, label = make_ct(number, (26 + number, 24, 13 + number % 6))
        objects[f"case_{number:05d}/imaging.nii.gz"] = encode_nifti(image)
        objects[f"case_{number:05d}/segmentation.nii.gz"] = encode_nifti(label)
    return objects


def make_msd(cases: int = 3) -> Objects:
    """Return cases in the Decathlon layout with brain tumour labels and all channels in one 4D file."""
    objects = {}
    for number in range(cases):
        images, label = make_mr(number, (1, 2, 3), channels=2)
        objects[f"imagesTr/b_{number}.nii.gz"] = encode_nifti(np.stack(images, -1))
        objects[f"labelsTr/b_{number}.nii.gz"] = encode_nifti(label)
    document = {
        "name": "BRATS",
        "modality": {"0": "FLAIR", "1": "T1w"},
        "labels": {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"},
        "training": [{"image": f"./imagesTr/b_{n}.nii.gz", "label": f"./labelsTr/b_{n}.nii.gz"} for n in range(cases)],
    }
    return objects | {"dataset.json": json.dumps(document).encode()}


def make_nnunet(cases: int = 3) -> Objects:
    objects = {}
    for number in range(cases):
        images, label = make_mr(number)
        objects |= {f"imagesTr/p_{number}_{c:04d}.nii.gz": encode_nifti(image) for c, image in enumerate(images)}
        objects[f"labelsTr/p_{number}.nii.gz"] = encode_nifti(label)
    document = {
        "channel_names": {"0": "T2", "1": "ADC"},
        "labels": {"background": 0, "PZ": 1, "TZ": 2},
        "file_ending": ".nii.gz",
        "numTraining": cases,
    }
    return objects | {"dataset.json": json.dumps(document).encode()}


def make_brats(year: int, cases: int = 3) -> Objects:
    """Return folders of four modalities as in BraTS 2018 (enhancing tumour 4) or 2023 (enhancing tumour 3)."""
    objects = {}
    for number in range(cases):
        images, label = make_mr(number, (1, 2, 4) if year < 2023 else (1, 2, 3), channels=4)
        name = f"BraTS18_{number}_1" if year < 2023 else f"BraTS-GLI-{number // 2:05d}-{number % 2:03d}"
        files = ("_t1", "_t1ce", "_t2", "_flair") if year < 2023 else ("-t1n", "-t1c", "-t2w", "-t2f")
        objects |= {f"{name}/{name}{f}.nii.gz": encode_nifti(image) for f, image in zip(files, images, strict=True)}
        objects[f"{name}/{name}{files[0][0]}seg.nii.gz"] = encode_nifti(label)
    return objects


def make_listed_pairs(form: str) -> Objects:
    """Return KiTS19 files with a JSON or CSV list of them, which has ids and patients."""
    objects = {f"scans/{name}": body for name, body in make_kits19(3).items()}
    rows = [
        {
            "image": f"scans/case_{n:05d}/imaging.nii.gz",
            "label": f"scans/case_{n:05d}/segmentation.nii.gz",
            "id": f"visit {n}",
            "patient": f"p{n // 2}",
        }
        for n in range(3)
    ]
    if form == "csv":
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        return objects | {"list.csv": "\n".join(lines).encode()}
    description = {"channels": ["CT"], "labels": {"background": 0, "kidney": 1, "tumour": 2}}
    return objects | {"list.json": json.dumps({"description": description, "cases": rows}).encode()}


def write_folder(folder: Path, objects: Mapping[str, bytes]) -> str:
    """Write objects as files, and return the path of the folder."""
    for name, body in objects.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return str(folder)


def upload(bucket: Bucket, objects: Mapping[str, bytes], prefix: str = "") -> str:
    """Write objects to a bucket below `prefix`, and return their URI."""
    store = bucket.store
    for future in [store.submit(store.put, bucket.key(prefix + name), body) for name, body in objects.items()]:
        future.result()
    return f"{bucket.uri}/{prefix}".rstrip("/")


def prepare_config(**changes: Any) -> PrepareConfig:
    """Return a config that prepares small patches in this process."""
    values: dict[str, Any] = {"workers": 1, "plan": PLAN, "folds": 2}
    return PrepareConfig(**{**values, **changes})


def prepare_dataset(src: str, dst: str, config: Any = None, **changes: Any) -> PrepareResult:
    return prepare(src, dst, prepare_config(**changes), config, progress=False, isolate=False)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
