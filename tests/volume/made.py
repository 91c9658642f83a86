"""Small datasets for tests, in every layout, as names and bytes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from tests.conftest import Bucket
from voxlane.volume.prepare import Outcome, PrepareConfig, prepare

Objects = dict[str, bytes]
AFFINE = np.diag([-1.0, -1.0, 2.0, 1.0])
"""Of scans whose first two axes run to the left and to the back, in voxels of 1 x 1 x 2 mm."""
PLAN: dict[str, Any] = {"patch": [16, 16, 16], "spacing": [2.0, 1.0, 1.0]}


def nifti(array: np.ndarray, affine: np.ndarray = AFFINE) -> bytes:
    return gzip.compress(nibabel.Nifti1Image(array, affine).to_bytes(), 1, mtime=0)


def ct(seed: int, shape: tuple[int, int, int] = (26, 24, 20)) -> tuple[np.ndarray, np.ndarray]:
    """Noise in Hounsfield units with an organ of label 1 and a small one of label 2 in it; arrays (x, y, z)."""
    random = np.random.default_rng(seed)
    label = np.zeros(shape, np.uint8)
    x, y, z = (int(random.integers(2, n // 3 + 1)) for n in shape)
    label[x : x + 10, y : y + 9, z : z + 7] = 1
    label[x + 3 : x + 6, y + 2 : y + 5, z + 2 : z + 4] = 2
    image = random.normal(-60, 25, shape) + 100.0 * (label == 1) + 160.0 * (label == 2)
    return image.astype(np.int16), label


def mr(seed: int, values: tuple[int, ...] = (1, 2), channels: int = 2) -> tuple[list[np.ndarray], np.ndarray]:
    """Channels of a scan with blanked surroundings, and labels of these values."""
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


def kits(cases: int = 6, first: int = 0) -> Objects:
    """The KiTS19 layout; each case is of another size, one smaller than the patch along an axis."""
    made = {}
    for number in range(first, first + cases):
        image, label = ct(number, (26 + number, 24, 13 + number % 6))
        made[f"case_{number:05d}/imaging.nii.gz"] = nifti(image)
        made[f"case_{number:05d}/segmentation.nii.gz"] = nifti(label)
    return made


def msd(cases: int = 3) -> Objects:
    """The Decathlon's layout with brain tumour labels, channels in one 4D file."""
    made = {}
    for number in range(cases):
        images, label = mr(number, (1, 2, 3), channels=2)
        made[f"imagesTr/b_{number}.nii.gz"] = nifti(np.stack(images, -1))
        made[f"labelsTr/b_{number}.nii.gz"] = nifti(label)
    document = {
        "name": "BRATS",
        "modality": {"0": "FLAIR", "1": "T1w"},
        "labels": {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"},
        "training": [{"image": f"./imagesTr/b_{n}.nii.gz", "label": f"./labelsTr/b_{n}.nii.gz"} for n in range(cases)],
    }
    return made | {"dataset.json": json.dumps(document).encode()}


def nnunet(cases: int = 3) -> Objects:
    made = {}
    for number in range(cases):
        images, label = mr(number)
        made |= {f"imagesTr/p_{number}_{c:04d}.nii.gz": nifti(image) for c, image in enumerate(images)}
        made[f"labelsTr/p_{number}.nii.gz"] = nifti(label)
    document = {
        "channel_names": {"0": "T2", "1": "ADC"},
        "labels": {"background": 0, "PZ": 1, "TZ": 2},
        "file_ending": ".nii.gz",
        "numTraining": cases,
    }
    return made | {"dataset.json": json.dumps(document).encode()}


def brats(year: int, cases: int = 3) -> Objects:
    """Folders of four modalities as in BraTS 2018 (enhancing tumour 4) or 2023 (enhancing tumour 3)."""
    made = {}
    for number in range(cases):
        images, label = mr(number, (1, 2, 4) if year < 2023 else (1, 2, 3), channels=4)
        name = f"BraTS18_{number}_1" if year < 2023 else f"BraTS-GLI-{number // 2:05d}-{number % 2:03d}"
        files = ("_t1", "_t1ce", "_t2", "_flair") if year < 2023 else ("-t1n", "-t1c", "-t2w", "-t2f")
        made |= {f"{name}/{name}{f}.nii.gz": nifti(image) for f, image in zip(files, images, strict=True)}
        made[f"{name}/{name}{files[0][0]}seg.nii.gz"] = nifti(label)
    return made


def pairs(form: str) -> Objects:
    """A JSON or CSV list of the KiTS19 files, with ids and patients."""
    made = {f"scans/{name}": body for name, body in kits(3).items()}
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
        return made | {"list.csv": "\n".join(lines).encode()}
    description = {"channels": ["CT"], "labels": {"background": 0, "kidney": 1, "tumour": 2}}
    return made | {"list.json": json.dumps({"description": description, "cases": rows}).encode()}


def save(folder: Path, objects: Mapping[str, bytes]) -> str:
    """Write objects as files; the folder's path."""
    for name, body in objects.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return str(folder)


def put(bucket: Bucket, objects: Mapping[str, bytes], prefix: str = "") -> str:
    """Write objects to a bucket, below `prefix`; their URI."""
    store = bucket.store
    for future in [store.submit(store.put, bucket.key(prefix + name), body) for name, body in objects.items()]:
        future.result()
    return f"{bucket.uri}/{prefix}".rstrip("/")


def how(**changes: Any) -> PrepareConfig:
    """Prepared in this process, for small patches."""
    values: dict[str, Any] = {"workers": 1, "plan": PLAN, "folds": 2}
    return PrepareConfig(**{**values, **changes})


def prepared(src: str, dst: str, config: Any = None, **changes: Any) -> Outcome:
    return prepare(src, dst, how(**changes), config, progress=False)


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
