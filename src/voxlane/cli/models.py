"""`voxlane export` and `predict`: models that leave their runs, and masks of new scans."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from voxlane.cli.config_options import ConfiguredOptions, FieldsFileOptions, StoreOptions
from voxlane.errors import (
    BucketNotFoundError,
    ChangedError,
    ConfigError,
    DamagedError,
    NotFoundError,
    RunError,
    ScanError,
    UsageError,
)
from voxlane.settings import ARGUMENT, Flag, PathOrUri, build, record
from voxlane.sizes import format_plural

if TYPE_CHECKING:
    from voxlane.store import StoreConfig
    from voxlane.train.export import CollectedModel
    from voxlane.train.predictor import PredictConfig, PredictionJob, ScanPredictor
    from voxlane.volume.description import Description
    from voxlane.volume.scan_reader import ScanReader

_MAX_NAMED = 5
"""Largest number of failed scans that the last line names."""


# -- export ------------------------------------------------------------------------------------------------------------


@record
class ExportCommand(StoreOptions):
    """Write a trained model that needs neither its run nor its dataset.

    Write the networks of all RUNs as one model: weights, network description, plan, labels, scores and a model card,
    each file with its checksum. A RUN may be a run, the folder of the runs of all folds (train --folds all), or a model
    that was exported before. Folds and configurations of one dataset become one model, whose predictions are averaged.

    MODEL is a folder or bucket prefix, or one file if it ends in .zip. `voxlane predict MODEL` needs nothing else.

    Examples:
      voxlane export runs/cv models/hippocampus --licence CC-BY-4.0
      voxlane export gs://work/runs/a gs://work/models/kidney.zip --intended-use 'Research on CT of adults'
      voxlane export runs/lowres runs/fullres models/both
      voxlane export models/both models/both-onnx --format onnx
    """

    paths: Annotated[tuple[PathOrUri, ...], Flag(positional=True, metavar="RUN... MODEL")]
    """URIs or folders of the runs or models, and last that of the model to write."""
    format: Literal["voxlane", "onnx", "torch-export", "monai-bundle"] = "voxlane"
    """What to write. voxlane: a model for voxlane predict. onnx and torch-export: each network as a file, with all that
    must be done around it in inference.json. monai-bundle: a bundle that MONAI runs."""
    opset: int | None = None
    """Version of ONNX's operators, for --format onnx (default: torch's)."""
    checkpoint: Literal["last", "best"] = "last"
    """Checkpoint of each run. best: the one with the highest Dice in the validations while training."""
    name: str = ""
    """Name of the model (default: that of its dataset)."""
    intended_use: Annotated[str, Flag(metavar="TEXT")] = ""
    """What the model is meant for, and what not, for the model card."""
    licence: str = ""
    """Licence of the weights, such as Apache-2.0 or CC-BY-NC-4.0."""

    def _run(self) -> None:
        from voxlane.train.export import check_target, collect_model

        *sources, target = self.paths
        if not sources:
            raise UsageError("voxlane export: missing MODEL")
        config = self.store_config()
        check_target(target, sources)
        collected = collect_model(
            sources,
            config,
            checkpoint=self.checkpoint,
            name=self.name,
            intended_use=self.intended_use,
            licence=self.licence,
        )
        for note in collected.notes:
            print(f"note: {note}", file=sys.stderr)
        self._write(collected, target, config)
        members = collected.facts.members
        print(
            f"{collected.facts.name}: {format_plural(len(members), 'network')} ({', '.join(m.name for m in members)})"
        )
        for flag, value in (
            ("--licence", collected.facts.licence),
            ("--intended-use", collected.facts.intended_use),
        ):
            if not value:
                print(f"note: the model card states nothing for {flag}", file=sys.stderr)
        if self.format == "voxlane":
            print(f"next: voxlane predict {target} SCAN... -o MASKS")

    def _write(self, collected: CollectedModel, target: str, config: StoreConfig) -> None:
        """Write the model in the format that --format names."""
        if self.opset is not None and self.format != "onnx":
            raise ConfigError("--opset is for --format onnx", fix="Leave it out")
        if self.format == "voxlane":
            from voxlane.train.exported_model import save_model

            save_model(collected.facts, collected.load_weights, target, config)
        elif self.format == "monai-bundle":
            from voxlane.train.monai_bundle import export_bundle

            export_bundle(collected, target, config)
        else:
            from voxlane.train.graph_export import export_graphs

            export_graphs(collected, target, self.format, config, opset=self.opset)


# -- predict -----------------------------------------------------------------------------------------------------------


@record
class PredictCommand(FieldsFileOptions, ConfiguredOptions):
    """Segment new scans.

    Segment scans with an exported model (voxlane export), with a run's network, or with those of all its folds
    together, and write each mask as NIfTI in the scan's own grid. A SCAN is a NIfTI or .npy file, a folder with one
    DICOM series, or one file per channel, separated by commas. The mask of a .npy file has the spacing that the dataset
    was prepared with (description.spacing).

    A SCAN may also be a folder or bucket prefix with many scans, or a pattern such as 'gs://b/scans/*_0000.nii.gz', in
    which * matches slashes too. Files named CASE_0000, CASE_0001, ... are the channels of CASE, as in nnU-Net. A scan
    that cannot be segmented does not stop the others; the last line names it.

    Examples:
      voxlane predict models/hippocampus scan.nii.gz -o masks
      voxlane predict runs/first imagesTs -o masks --skip-existing
      voxlane predict gs://work/runs/cv dicom/patient1 -o gs://work/masks mirror=true
      voxlane predict runs/brats flair.nii.gz,t1.nii.gz,t1ce.nii.gz,t2.nii.gz -o masks
    """

    config_class: ClassVar[str] = "voxlane.train.predictor:PredictConfig"

    run: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of the exported model, of the run, or of the runs of all folds."""
    scans: Annotated[tuple[PathOrUri, ...], Flag(positional=True, metavar="SCAN")]
    """Scans to segment, or folders of scans."""
    out: Annotated[PathOrUri, Flag("-o")]
    """URI or folder for the masks."""
    skip_existing: bool = False
    """Leave out scans whose mask exists, whichever model wrote it. Without this flag, masks are replaced."""

    def _run(self) -> None:
        from voxlane.train.predictor import PredictConfig, plan_predictions
        from voxlane.train.scan_inputs import find_scans
        from voxlane.volume.scan_reader import ScanReader

        values, store_config = self.load(self.overrides)
        config = build(PredictConfig, values)
        description, load = _open_model(self.run, config, store_config)
        listing = find_scans(self.scans, len(description.channels), self.out, store_config)
        jobs = plan_predictions(listing.scans, self.out)
        if self.skip_existing:
            jobs, num_skipped = _drop_existing(jobs, self.out, store_config)
            listing.notes.append(f"{format_plural(num_skipped, 'scan')} left out, whose masks exist")
        for note in listing.notes:
            print(note, file=sys.stderr)
        if not jobs:
            return
        with ScanReader(config.scan_timeout_s) as reader:
            failed = self._predict_all(load(), jobs, store_config, reader)
        if failed:
            named = ", ".join(failed[:_MAX_NAMED]) + (", ..." if len(failed) > _MAX_NAMED else "")
            raise ScanError(f"{len(failed)} of {len(jobs)} scans could not be segmented: {named}")

    def _predict_all(
        self, predictor: ScanPredictor, jobs: list[PredictionJob], store_config: StoreConfig | None, reader: ScanReader
    ) -> list[str]:
        """Predict all scans and return those that failed; raise the error of a single scan."""
        from voxlane.train.predictor import RemainingTime, predict

        failed = []
        remaining = RemainingTime(len(jobs))
        for job in jobs:
            try:
                result = predict(predictor, job, store_config, progress=self.progress, read=reader.read)
            except (ScanError, NotFoundError, RunError, ChangedError, DamagedError) as error:
                if len(jobs) == 1 or isinstance(error, BucketNotFoundError):
                    raise
                # One bad scan of many must not cost the others their masks.
                print(f"voxlane: {error}", file=sys.stderr)
                failed.append(job.scan)
                remaining.finish_one()
                continue
            for warning in result.warnings:
                print(f"warning: {warning}", file=sys.stderr)
            volumes = ", ".join(f"{name} {ml:.1f} ml" for name, ml in result.volumes_ml.items())
            print(f"{result.mask}  {volumes}  ({result.seconds:.1f} s{remaining.finish_one()})", flush=True)
        return failed


def _open_model(
    uri: str, config: PredictConfig, store_config: StoreConfig | None
) -> tuple[Description, Callable[[], ScanPredictor]]:
    """Return the description of an exported model or of runs, and a function that loads their networks."""
    from voxlane.train.ensemble import ModelPredictor
    from voxlane.train.exported_model import is_model, load_model

    if is_model(uri, store_config):
        model = load_model(uri, store_config)
        return model.facts.description, lambda: ModelPredictor.load(model, config)
    from voxlane.train.predictor import Predictor
    from voxlane.train.run import TrainedRun, find_runs

    runs = find_runs(uri, store_config)
    return TrainedRun.load(runs[0]).description, lambda: Predictor.load(runs, config)


def _drop_existing(
    jobs: list[PredictionJob], out: str, store_config: StoreConfig | None
) -> tuple[list[PredictionJob], int]:
    """Return the jobs whose mask does not exist, and the number of the others."""
    from voxlane.store import Store
    from voxlane.volume.prepared_dataset import as_prefix

    store, key = Store.locate(out, store_config)
    pages = store.list_pages(as_prefix(key))
    existing = {store.uri(key) for page in pages for key in page.column("path").to_pylist()}
    left = [job for job in jobs if job.mask not in existing]
    return left, len(jobs) - len(left)
