"""A tiny prepared dataset and runs on it: bright balls in noise, which a network of two levels learns in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from voxlane.volume.prepare import PrepareConfig, prepare
from voxlane.volume.splits import fold_for_patient

FOLDS = 2
LABELS = {"background": 0, "ball": 1, "core": 2}
CONFIG: dict[str, Any] = {
    "epochs": 1,
    "steps_per_epoch": 2,
    "batch": 2,
    "augment": {"preset": "none"},
    "optimizer": {"name": "adamw", "lr": 0.01},
    "validation": {"every_epochs": 1, "max_cases": 1},
}
"""Config of the tiny runs."""
NETWORK = {
    "features": [4, 8],
    "strides": [[1, 1, 1], [2, 2, 2]],
    "kernels": [[3, 3, 3], [3, 3, 3]],
    "convs": 1,
}
PLAN: dict[str, Any] = {"patch": [16, 16, 16], "batch": 2, "network": NETWORK, "spacing": [1.5, 1, 1]}


def case_ids(count: int = 6) -> list[str]:
    """Return case names that are spread evenly over the folds."""
    by_fold = [[f"case_{i}" for i in range(100) if fold_for_patient(f"case_{i}", FOLDS) == f] for f in range(FOLDS)]
    return sorted(name for fold in by_fold for name in fold[: count // FOLDS])


def make_ball(shape: tuple[int, int, int], centre: tuple[float, ...], radius: float) -> Any:
    """Return a mask of the voxels inside a ball."""
    axes = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
    return sum((a - c) ** 2 for a, c in zip(axes, centre, strict=True)) <= radius**2


def make_case(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return an image of a ball with a bright core in noise, and its label."""
    shape = (26, 24, 22)
    centre = tuple(float(n / 2 + rng.uniform(-3, 3)) for n in shape)
    outer, inner = make_ball(shape, centre, 6), make_ball(shape, centre, 3)
    image = rng.normal(0, 20, shape) + 200 * outer + 300 * inner
    return image, outer.astype(np.uint8) + inner.astype(np.uint8)


def write_cases(folder: Path, names: list[str], seed: int = 0) -> Path:
    """Write scans (int16, HU-like), their labels and a list of them; return the path of the list."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for name in names:
        image, label = make_case(rng)
        affine = np.diag([1.0, 1.0, 1.5, 1.0])
        nibabel.save(nibabel.Nifti1Image(image.astype(np.int16), affine), folder / f"{name}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(label, affine), folder / f"{name}-label.nii.gz")
        entries.append({"image": f"{name}.nii.gz", "label": f"{name}-label.nii.gz", "id": name})
    description = {"name": "Balls", "channels": ["CT"], "labels": LABELS}
    (folder / "list.json").write_text(json.dumps({"description": description, "cases": entries}))
    return folder / "list.json"


def prepare_balls(folder: Path, names: list[str] | None = None) -> str:
    """Write a prepared dataset to `folder`; return its URI."""
    listed = write_cases(folder / "scans", names or case_ids())
    config = PrepareConfig(folds=FOLDS, workers=1, plan=PLAN)
    return prepare(str(listed), str(folder / "prepared"), config, progress=False).prepared.uri


def train_folds(folder: Path, data: str) -> Path:
    """Train one tiny run per fold on `data`, as `train --folds all` does; return their folder."""
    from voxlane.train.fit import train

    for fold in range(FOLDS):
        train(data, str(folder / f"fold_{fold}"), {**CONFIG, "fold": fold}, progress=False)
    return folder
