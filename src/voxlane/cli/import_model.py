"""`voxlane import`: models that other programs trained."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from voxlane.cli.config_options import StoreOptions
from voxlane.settings import ARGUMENT, Flag, PathOrUri, record
from voxlane.sizes import format_plural


@record
class ImportCommand(StoreOptions):
    """Turn a model of nnU-Net into a model of voxlane.

    SRC is a results folder of nnU-Net v2, such as Dataset004_Hippocampus/nnUNetTrainer__nnUNetPlans__3d_fullres, with
    plans.json, dataset.json and fold_0, fold_1, ...: plain and residual-encoder U-Nets, 3d_fullres or 3d_lowres. The
    folds become the networks of one model, whose masks are those of nnU-Net: `voxlane predict MODEL` preprocesses,
    mirrors, averages and rounds as nnU-Net does. Checkpoints are read without running any code in them, and nothing of
    nnU-Net needs to be installed.

    MODEL is a folder or bucket prefix, or one file if it ends in .zip.

    Examples:
      voxlane import nnUNet_results/Dataset004_Hippocampus/nnUNetTrainer__nnUNetPlans__3d_fullres models/hippocampus
      voxlane import gs://work/nnunet/Dataset220_KiTS/nnUNetTrainer__nnUNetResEncUNetLPlans__3d_fullres kits.zip
      voxlane import RESULTS models/first --folds 0 --checkpoint best
      voxlane predict models/hippocampus scan.nii.gz -o masks
    """

    src: Annotated[PathOrUri, ARGUMENT]
    """URI or folder with the results of nnU-Net."""
    model: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of the model to write, or a .zip file."""
    folds: Annotated[str | None, Flag(metavar="LIST")] = None
    """Folds to import, such as 0,2, or all for the network that was trained on all cases (default: every numbered
    fold)."""
    checkpoint: Literal["final", "best"] = "final"
    """Checkpoint of each fold. final: the one that nnU-Net predicts with, unless it is told otherwise."""
    trust_trainer: bool = False
    """Accept a trainer that does not come with nnU-Net, for trainers that change only the training."""
    name: str = ""
    """Name of the model (default: that of its dataset and configuration)."""
    intended_use: Annotated[str, Flag(metavar="TEXT")] = ""
    """What the model is meant for, and what not, for the model card."""
    licence: str = ""
    """Licence of the weights, such as Apache-2.0 or CC-BY-NC-4.0."""

    def _run(self) -> None:
        import dataclasses

        from voxlane.train.exported_model import save_model
        from voxlane.train.imports.nnunet_folder import NnunetFolder, NnunetModel, parse_folds

        config = self.store_config()
        folds = parse_folds(self.folds)
        folder = NnunetFolder(self.src.rstrip("/"), config, folds, self.checkpoint, self.trust_trainer)
        source = NnunetModel.read(folder)
        facts = dataclasses.replace(
            source.facts, name=self.name or source.facts.name, intended_use=self.intended_use, licence=self.licence
        )
        model = save_model(facts, source.load_weights, self.model, config)
        members = model.facts.members
        print(f"{model.facts.name}: {format_plural(len(members), 'network')} ({', '.join(m.name for m in members)})")
        for flag, value in (("--licence", self.licence), ("--intended-use", self.intended_use)):
            if not value:
                print(f"note: the model card states nothing for {flag}", file=sys.stderr)
        print(f"next: voxlane predict {self.model} SCAN... -o MASKS")
