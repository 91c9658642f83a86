"""nnU-Net itself, for tests that compare with it: trained for a few steps on synthetic scans, and its own masks.

    python -m tests.train.nnunet_peer FOLDER

writes FOLDER/results/NAME (results folders of nnU-Net), FOLDER/scans/*.nii.gz and FOLDER/masks/NAME/*.npy, the masks
that nnU-Net predicts, along the axes of the files (z, y, x).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch

from tests.train.nnunet_folders import DATASET, make_plans

CASES, STEPS = 4, 25
AFFINES = {
    # File axes (x, y, z): as anatomical ones, mirrored as most scanners write, and sagittal slices.
    "plain": np.diag([1.0, 1.2, 1.5, 1]),
    "mirrored": np.diag([-0.9, -1.0, 1.3, 1]),
    "sagittal": np.array([[0, 0, 2.9, 5], [-0.8, 0, 0, 9], [0, -0.8, 0, 3], [0, 0, 0, 1]], float),
}


def make_case(number: int, shape: tuple[int, int, int] = (26, 30, 20)) -> tuple[np.ndarray, np.ndarray]:
    """Return a noisy scan with two bright balls, and its label, as (x, y, z)."""
    generator = np.random.default_rng(number)
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"))
    image = generator.normal(100, 25, shape)
    label = np.zeros(shape, np.uint8)
    for value, start in ((1, 0.3), (2, 0.7)):
        centre = [n * start + generator.uniform(-2, 2) for n in shape]
        ball = sum((axis - middle) ** 2 for axis, middle in zip(grid, centre, strict=True)) < 25
        image[ball] += 100 * value
        label[ball] = value
    image[:2] = 0  # an empty border, which nnU-Net crops
    return image.astype(np.int16), label


def train(root: Path, name: str, residual: bool, folds: tuple[int, ...], transpose: list[int]) -> None:
    """Preprocess the cases and train the folds."""
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    dataset, plans = f"Dataset00{7 + residual}_Blobs", make_plans(residual)
    backward = [transpose.index(axis) for axis in range(3)]
    plans |= {"dataset_name": dataset, "transpose_forward": transpose, "transpose_backward": backward}
    values = plans["configurations"]["3d_fullres"]
    values |= {"spacing": [1.4, 1.1, 1.0], "patch_size": [16, 24, 16], "data_identifier": "nnUNetPlans_3d_fullres"}
    document = DATASET | {"numTraining": CASES}
    folder = root / "preprocessed" / dataset
    (folder / "nnUNetPlans_3d_fullres").mkdir(parents=True)
    manager = PlansManager(plans)
    ids = [f"case_{number}" for number in range(CASES)]
    for case in ids:
        files = [str(root / "raw" / f"{case}_0000.nii.gz")], str(root / "raw" / f"{case}.nii.gz")
        target = str(folder / "nnUNetPlans_3d_fullres" / case)
        configuration = manager.get_configuration("3d_fullres")
        DefaultPreprocessor(verbose=False).run_case_save(target, *files, manager, configuration, document)
    for file, content in (("dataset.json", document), ("dataset_fingerprint.json", {})):
        (folder / file).write_text(json.dumps(content))
    (folder / "splits_final.json").write_text(json.dumps([{"train": ids[1:], "val": ids[:1]}] * len(folds)))
    for fold in folds:
        torch.manual_seed(fold)
        trainer = nnUNetTrainer(
            plans | {"continue_training": False}, "3d_fullres", fold, document, device=torch.device("cpu")
        )
        trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 1, STEPS, 1
        trainer.oversample_foreground_percent = 1.0
        trainer.run_training()
    trained = root / "trained" / dataset / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    (root / "results").mkdir(exist_ok=True)
    trained.rename(root / "results" / name)


def predict(root: Path, name: str, folds: tuple[int, ...]) -> None:
    """Write the masks that nnU-Net predicts with its defaults."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(device=torch.device("cpu"), perform_everything_on_device=False, allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(root / "results" / name), folds, "checkpoint_final.pth")
    reader: Any = predictor.plans_manager.image_reader_writer_class()
    (root / "masks" / name).mkdir(parents=True)
    for file in sorted((root / "scans").iterdir()):
        image, properties = reader.read_images([str(file)])
        mask = predictor.predict_single_npy_array(image, properties)
        np.save(root / "masks" / name / file.name.replace(".nii.gz", ".npy"), mask)


def main(root: Path) -> None:
    """Write everything."""
    for part in ("raw", "scans"):
        (root / part).mkdir(parents=True)
    for number in range(CASES):
        image, label = make_case(number)
        nibabel.save(nibabel.Nifti1Image(image, AFFINES["mirrored"]), root / "raw" / f"case_{number}_0000.nii.gz")
        nibabel.save(nibabel.Nifti1Image(label, AFFINES["mirrored"]), root / "raw" / f"case_{number}.nii.gz")
    for number, (name, affine) in enumerate(AFFINES.items()):
        image, _ = make_case(100 + number, (34, 28, 22))
        nibabel.save(nibabel.Nifti1Image(image, affine), root / "scans" / f"{name}.nii.gz")
    for name, residual, folds, transpose in (
        ("plain", False, (0, 1), [0, 1, 2]),
        ("residual", True, (0,), [2, 0, 1]),
    ):
        train(root, name, residual, folds, transpose)
        predict(root, name, folds)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    folders = {"nnUNet_raw": "raw", "nnUNet_preprocessed": "preprocessed", "nnUNet_results": "trained"}
    os.environ |= {name: str(target / folder) for name, folder in folders.items()}
    os.environ |= {"nnUNet_n_proc_DA": "0", "nnUNet_def_n_proc": "1", "nnUNet_compile": "0"}
    torch.set_num_threads(1)
    main(target)
