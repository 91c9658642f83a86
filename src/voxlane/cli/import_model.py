"""`voxlane import`: models that nnU-Net trained, and datasets that it preprocessed."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from voxlane.cli.config_options import StoreOptions
from voxlane.settings import ARGUMENT, Flag, PathOrUri, record
from voxlane.sizes import format_plural

if TYPE_CHECKING:
    from voxlane.store import StoreConfig
    from voxlane.train.imports.nnunet_preprocessed import PreprocessedFolder


@record
class ImportCommand(StoreOptions):
    """Turn a model or a preprocessed dataset of nnU-Net into one of voxlane.

    A model: SRC is a results folder of nnU-Net v2, with plans.json, dataset.json and fold_0, fold_1, ...: plain and
    residual-encoder U-Nets, 3d_fullres or 3d_lowres. The folds become the networks of one model, whose masks are those
    of nnU-Net: `voxlane predict DST` preprocesses, mirrors, averages and rounds as nnU-Net does. DST is a folder or
    bucket prefix, or one file if it ends in .zip.

    A dataset: SRC is a folder of nnUNet_preprocessed, such as Dataset004_Hippocampus. DST becomes a dataset to train
    on, without resampling the scans again.

    Files are read without running any code in them, and nothing of nnU-Net needs to be installed.

    Examples:
      voxlane import nnUNet_results/Dataset004_Hippocampus/nnUNetTrainer__nnUNetPlans__3d_fullres models/hippocampus
      voxlane import gs://work/nnunet/Dataset220_KiTS/nnUNetTrainer__nnUNetResEncUNetLPlans__3d_fullres kits.zip
      voxlane import RESULTS models/first --folds 0 --checkpoint best
      voxlane import nnUNet_preprocessed/Dataset004_Hippocampus gs://work/hippocampus
    """

    src: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of nnU-Net."""
    dst: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of the model or dataset to write."""
    folds: Annotated[str | None, Flag(metavar="LIST")] = None
    """Folds of a model, such as 0,2, or all for the network that was trained on all cases (default: every numbered
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
    plans: str = "nnUNetPlans"
    """Plans that a dataset was preprocessed for."""
    configuration: str = "3d_fullres"
    """Configuration that a dataset was preprocessed for."""
    no_progress: bool = False
    """Show no progress bar."""

    def _run(self) -> None:
        from voxlane.train.imports.nnunet_preprocessed import PreprocessedFolder

        config = self.store_config()
        preprocessed = PreprocessedFolder(self.src.rstrip("/"), self.plans, self.configuration, config)
        if preprocessed.is_dataset:
            self._import_dataset(preprocessed, config)
        else:
            self._import_model(config)

    def _import_dataset(self, folder: PreprocessedFolder, config: StoreConfig | None) -> None:
        from voxlane.train.imports.nnunet_preprocessed import import_preprocessed

        prepared = import_preprocessed(folder, self.dst, config, progress=False if self.no_progress else None)
        print(f"{prepared.description.name}: {format_plural(len(prepared), 'case')} in {prepared.uri}")
        print(f"next: voxlane train {self.dst} --run RUN")

    def _import_model(self, config: StoreConfig | None) -> None:
        from voxlane.train.exported_model import save_model
        from voxlane.train.imports.nnunet_folder import NnunetFolder, NnunetModel, parse_folds

        folds = parse_folds(self.folds)
        source = NnunetModel.read(
            NnunetFolder(self.src.rstrip("/"), config, folds, self.checkpoint, self.trust_trainer)
        )
        facts = dataclasses.replace(
            source.facts, name=self.name or source.facts.name, intended_use=self.intended_use, licence=self.licence
        )
        model = save_model(facts, source.load_weights, self.dst, config)
        members = model.facts.members
        print(f"{model.facts.name}: {format_plural(len(members), 'network')} ({', '.join(m.name for m in members)})")
        for flag, value in (("--licence", self.licence), ("--intended-use", self.intended_use)):
            if not value:
                print(f"note: the model card states nothing for {flag}", file=sys.stderr)
        print(f"next: voxlane predict {self.dst} SCAN... -o MASKS")
