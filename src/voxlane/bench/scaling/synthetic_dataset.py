"""A synthetic dataset for benchmarks without data: bright balls in noise, prepared like any other dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PATCH = (64, 64, 64)
FEATURES = (32, 64, 128, 256, 320)
_SHAPE = (80, 88, 96)
_CASES = 12
_FOLDS = 3


def make_prepared(folder: Path) -> str:
    """Write scans into `folder`, prepare them there and return the URI of the dataset, which is always the same."""
    import nibabel

    from voxlane.volume.prepare import PrepareConfig, prepare

    rng = np.random.default_rng(0)
    scans = folder / "scans"
    scans.mkdir(parents=True)
    cases = []
    for number in range(_CASES):
        image, label = _make_balls(rng)
        names = {"image": f"case_{number:02}.nii.gz", "label": f"case_{number:02}-label.nii.gz"}
        for name, array in ((names["image"], image), (names["label"], label)):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), scans / name)
        cases.append({"id": f"case_{number:02}", **names})
    description = {"name": "Balls", "channels": ["CT"], "labels": {"background": 0, "ball": 1, "core": 2}}
    (scans / "list.json").write_text(json.dumps({"description": description, "cases": cases}))
    resolutions = len(FEATURES)
    network = {
        "features": FEATURES,
        "strides": [[1, 1, 1], *[[2, 2, 2]] * (resolutions - 1)],
        "kernels": [[3, 3, 3]] * resolutions,
    }
    config = PrepareConfig(
        folds=_FOLDS, workers=1, plan={"patch": PATCH, "batch": 2, "spacing": (1, 1, 1), "network": network}
    )
    return prepare(str(scans / "list.json"), str(folder / "prepared"), config, progress=False).prepared.uri


def _make_balls(rng: np.random.Generator) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8]]:
    """Return a scan in HU-like units with three balls, each with a bright core, and its label."""
    axes: Any = np.meshgrid(*(np.arange(n, dtype=np.float32) for n in _SHAPE), indexing="ij", sparse=True)
    label = np.zeros(_SHAPE, np.uint8)
    for _ in range(3):
        centre = [rng.uniform(16, n - 16) for n in _SHAPE]
        distance = sum((axis - at) ** 2 for axis, at in zip(axes, centre, strict=True))
        radius = rng.uniform(9, 14)
        label = np.maximum(label, (distance <= radius**2).astype(np.uint8) + (distance <= (radius / 2) ** 2))
    image = rng.normal(0, 60, _SHAPE) + np.array([0, 150, 300])[label]
    return image.astype(np.int16), label
