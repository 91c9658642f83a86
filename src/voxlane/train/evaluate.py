"""`evaluate`: predict every held-out case with a network that was not trained on it, and score the masks."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pydantic
from tqdm import tqdm

from voxlane import settings
from voxlane import uri as uris
from voxlane.errors import ConfigError, NotFoundError, RunError, ScanError
from voxlane.model import metrics
from voxlane.model.sliding_window import to_mask
from voxlane.settings import record
from voxlane.train import pictures
from voxlane.train.dataset_location import load_dataset
from voxlane.train.predictor import PredictConfig, Predictor, RunCheckpoint
from voxlane.train.run import Run, TrainedRun
from voxlane.volume.case_checks import count_values
from voxlane.volume.case_volumes import CacheLimits, Cases
from voxlane.volume.description import Description
from voxlane.volume.geometry import Geometry, align_axes
from voxlane.volume.prepared_dataset import Prepared, PreparedCase
from voxlane.volume.scan import read_label, write_mask

MAX_OVERLAYS = 40
"""Largest number of pictures to keep; with more cases, those of the worst cases are kept."""
_MAX_PENDING = 2
"""Largest number of cases that wait for their scores while the next one is predicted."""
_MEASURES = ("dice", "hd95_mm", "surface_dice", "volume_true_ml", "volume_predicted_ml")


@record
class EvaluateConfig:
    """The config of evaluation."""

    predict: PredictConfig = PredictConfig()
    space: Literal["scan", "prepared"] = "scan"
    """Grid to score in. scan: the scan's own grid, against its original label file. prepared: the plan's grid, against
    the resampled label, as MLPerf scores."""
    surface_tolerance_mm: float = pydantic.Field(default=1.0, gt=0)
    """Largest distance between surfaces that counts as a match, for surface Dice."""
    masks: bool = True
    """Write the predicted masks."""


@dataclass(frozen=True)
class EvaluationResult:
    """The scores of an evaluation."""

    summary: dict[str, Any]
    cases: list[dict[str, Any]]
    folder_uri: str


def evaluate(
    runs: Sequence[Run],
    out: Run | None = None,
    config: EvaluateConfig | None = None,
    *,
    data: str | None = None,
    progress: bool | None = None,
) -> EvaluationResult:
    """Predict and score the held-out cases of each run.

    One run is evaluated on its fold. Several runs, one per fold of one prepared dataset, are cross-validated: each case
    is predicted by the run that did not train on it. Writes summary.json, cases.csv, cases.json, overlays and masks
    below `out` (default: the first run), in `evaluation/validation` or `evaluation/cross-validation`, and removes
    overlays and masks of a previous evaluation that it did not overwrite. `data`: place of the dataset, if it was
    moved. The summary names the checkpoints that were scored.

    Memory: that of `Predictor`, plus mask and truth, a byte per voxel each, of up to three cases that wait for their
    scores.
    """
    config = config or EvaluateConfig()
    trained = [TrainedRun.load(run) for run in runs]
    prepared = load_dataset(runs[0], trained[0], data)
    check_folds(runs, trained, prepared)
    out = out or runs[0]
    name = f"evaluation/{'validation' if len(runs) == 1 else 'cross-validation'}"
    out.store.check_writable(out.key(f"{name}/summary.json"))
    files = ResultFiles(out, name)
    cases: list[dict[str, Any]] = []
    checkpoints: list[RunCheckpoint] = []
    pending: deque[tuple[dict[str, Any], Future[dict[str, metrics.Scores]]]] = deque()
    total = sum(len(trained_run.held_out_cases) for trained_run in trained)
    bar = tqdm(total=total, desc="evaluating", unit="case", disable=None if progress is None else not progress)

    def collect_next() -> None:
        case, scores = pending.popleft()
        cases.append({**case, **scores.result()})
        files.keep_worst(cases)
        bar.update()

    with bar, ThreadPoolExecutor(2) as pool:
        for run, trained_run in zip(runs, trained, strict=True):
            predictor = Predictor.load([run], config.predict)
            checkpoints += predictor.checkpoints
            predictions = _predict_cases(predictor, prepared, trained_run.held_out_cases, config, files)
            for case, mask, truth, spacing in predictions:
                task = mask, truth, spacing, prepared.description, config.surface_tolerance_mm
                scores = pool.submit(metrics.score_case, *task)
                pending.append(({"case": case, "fold": trained_run.fold}, scores))
                while len(pending) > _MAX_PENDING:
                    collect_next()
        while pending:
            collect_next()
    cases.sort(key=lambda case: str(case["case"]))
    targets = prepared.description.targets
    summary = {
        **metrics.summarise_cases([{t: c[t] for t in targets} for c in cases]),
        "space": config.space,
        "config": settings.to_plain(config),
        "runs": [run.folder_uri for run in runs],
        "checkpoints": [dataclasses.asdict(checkpoint) for checkpoint in checkpoints],
        "folds": sorted({trained_run.fold for trained_run in trained if trained_run.fold is not None}),
        "dataset_cases": len(prepared),
    }
    files.finish()
    out.write_json(f"{name}/cases.json", replace_nan(cases))
    out.write_bytes(f"{name}/cases.csv", format_csv(cases, prepared.description).encode())
    out.write_json(f"{name}/summary.json", replace_nan(summary))
    return EvaluationResult(summary, cases, out.file_uri(name))


def check_folds(runs: Sequence[Run], trained: Sequence[TrainedRun], prepared: Prepared) -> None:
    """Raise unless every case is scored once, by a run that trained on neither it nor another scan of its patient."""
    for run, trained_run in zip(runs, trained, strict=True):
        if trained_run.data_digest != trained[0].data_digest:
            raise ConfigError(
                f"this run was trained on another dataset than {runs[0].folder_uri}",
                uri=run.folder_uri,
                fix="Combine only folds of one prepared dataset",
            )
        if trained_run.fold is None or not trained_run.held_out_cases:
            raise RunError(
                "the run was trained on all cases, so none is left to score it on",
                uri=run.folder_uri,
                fix="Train with a fold held out, such as fold=0",
            )
    patients = dict(zip(prepared.ids, prepared.table.column("patient").to_pylist(), strict=True))
    scored: dict[str, Run] = {}
    for run, trained_run in zip(runs, trained, strict=True):
        if not set(trained_run.held_out_cases) | set(trained_run.training_cases) <= set(patients):
            raise run.damaged_error()
        training_patients = {patients[case] for case in trained_run.training_cases}
        for case in trained_run.held_out_cases:
            if patients[case] in training_patients:
                raise RunError(f"the run was trained on the patient of its held-out case {case}", uri=run.folder_uri)
            if case in scored:
                raise ConfigError(
                    f"this run and {scored[case].folder_uri} hold out the same cases, such as {case}",
                    uri=run.folder_uri,
                    fix="Give one run per fold",
                )
            scored[case] = run


@dataclass
class ResultFiles:
    """The masks and overlays of one evaluation."""

    out: Run
    folder: str
    """Folder of the evaluation in `out`."""
    written: set[str] = field(default_factory=set)
    """Keys of the files written so far."""
    pictures: dict[str, bytes] = field(default_factory=dict)
    """PNG of each case, in memory until the case's score decides whether to write it."""

    def write_mask(self, case: str, mask: npt.NDArray[np.uint8], geometry: Geometry) -> None:
        """Write the mask of a case."""
        file = f"{self.folder}/masks/{uris.quote(case)}.nii.gz"
        write_mask(self.out.file_uri(file), mask, geometry, config=self.out.config)
        self.written.add(self.out.key(file))

    def keep_worst(self, cases: Sequence[dict[str, Any]]) -> None:
        """Drop the pictures of the best of the scored `cases`, so that at most `MAX_OVERLAYS` remain."""
        scored = sorted((c for c in cases if c["case"] in self.pictures), key=case_dice)
        for case in scored[MAX_OVERLAYS:]:
            del self.pictures[str(case["case"])]

    def finish(self) -> None:
        """Write the remaining pictures, and remove files of a previous evaluation."""
        for case, png in self.pictures.items():
            file = f"{self.folder}/overlays/{uris.quote(case)}.png"
            self.out.write_bytes(file, png)
            self.written.add(self.out.key(file))
        for part in ("masks", "overlays"):
            pages = self.out.store.list_pages(self.out.key(f"{self.folder}/{part}/"))
            keys = [key for page in pages for key in page.column("path").to_pylist()]
            self.out.store.delete([key for key in keys if key not in self.written])


def case_dice(case: Mapping[str, Any]) -> float:
    """Return a case's mean Dice over its scored targets; 1 if both truth and prediction are empty."""
    scores = [value["dice"] for value in case.values() if isinstance(value, dict) and not math.isnan(value["dice"])]
    return sum(scores) / len(scores) if scores else 1.0


def _predict_cases(
    predictor: Predictor, prepared: Prepared, case_ids: Sequence[str], config: EvaluateConfig, files: ResultFiles
) -> Iterator[tuple[str, npt.NDArray[np.uint8], npt.NDArray[np.uint8], tuple[float, float, float]]]:
    """Yield the id, mask, truth and spacing of every case, in the grid to score in."""
    cases = Cases(prepared, CacheLimits(ram_bytes=0))
    rows = {case: row for row, case in enumerate(prepared.ids)}
    for case in case_ids:
        volume = cases.open(rows[case])
        geometry = Geometry.from_dict(volume.case.volume["geometry"])
        # Before the prediction, so that a missing label is reported at once.
        truth = read_truth(volume.case, geometry, prepared) if config.space == "scan" else None
        image, label = volume.read_whole()
        outputs = predictor.predict_outputs(image)
        on_grid = to_mask(outputs, predictor.description).numpy()
        picture = pictures.draw_row(image[0].numpy(), label.numpy(), on_grid, volume.grid.spacing)
        files.pictures[case] = pictures.encode_png(picture)
        del image
        if config.masks or truth is not None:
            in_scan = predictor.mask_in_scan(outputs, volume.grid)
        if config.masks:
            files.write_mask(case, in_scan, geometry)
        if truth is None:
            yield case, on_grid, label.numpy(), volume.grid.spacing
        else:
            yield case, in_scan, truth, geometry.spacing


def read_truth(case: PreparedCase, geometry: Geometry, prepared: Prepared) -> npt.NDArray[np.uint8]:
    """Read the original label file of a case, along the axes of its scan's `geometry`."""
    uri: str = case.source["label"]
    fix = "Restore it, or score against the prepared label with space=prepared"
    try:
        label, label_geometry = read_label(uri, prepared.config, spacing=prepared.description.spacing)
    except NotFoundError as error:
        if type(error) is not NotFoundError:
            raise
        raise RunError(f"the label of case {case.id} does not exist anymore", uri=uri, fix=fix) from None
    except ScanError as error:
        cause = str(error).removeprefix(f"{error.uri}: ")
        raise RunError(f"the label of case {case.id} cannot be read anymore: {cause}", uri=uri, fix=fix) from None
    label = align_axes(label, label_geometry, geometry)
    unknown = set(np.flatnonzero(count_values(label)).tolist()) - set(prepared.description.labels.values())
    if label.shape != geometry.canonical_shape or unknown:
        raise RunError(f"the label of case {case.id} has changed since it was prepared", uri=uri, fix=fix)
    return label


def format_csv(cases: Sequence[dict[str, Any]], description: Description) -> str:
    """Return a CSV table with a line per case: case, fold, and each measure of each target."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["case", "fold", *(f"{t}/{m}" for t in description.targets for m in _MEASURES)])
    for case in cases:
        values = [case[t][m] for t in description.targets for m in _MEASURES]
        shown = ["" if isinstance(v, float) and math.isnan(v) else f"{v:.6g}" for v in values]
        writer.writerow([case["case"], case["fold"], *shown])
    return buffer.getvalue()


def format_table(evaluation: EvaluationResult, description: Description) -> str:
    """Format the summary as a table."""
    heading = f"{'':<16}{'Dice':>8}{'95% CI':>16}{'± std':>8}{'median':>8}{'HD95 mm':>10}{'surface':>9}{'cases':>7}"
    lines = [heading]
    for target in description.targets:
        scores = evaluation.summary["targets"][target]
        dice, hd95, surface = (scores[m] for m in ("dice", "hd95_mm", "surface_dice"))
        values = (dice["std"], 8, 3), (dice["median"], 8, 3), (hd95["mean"], 10, 2), (surface["mean"], 9, 3)
        shown = "".join(_format_number(*value) for value in values)
        mean = f"{_format_number(dice['mean'], 8, 3)}{_format_interval(dice['mean_ci95'])}"
        lines.append(f"{target:<16}{mean}{shown}{dice['count']:>7}")
    mean_dice, interval = (evaluation.summary[name] for name in ("mean_dice", "mean_dice_ci95"))
    lines.append(f"{'mean':<16}{_format_number(mean_dice, 8, 3)}{_format_interval(interval)}")
    resamples = evaluation.summary["bootstrap"]["resamples"]
    lines.append(f"95% CI: percentile bootstrap of the mean, {resamples:,} resamples of the cases")
    for scored in evaluation.summary.get("checkpoints") or ():
        step = "" if scored["step"] is None else f" of step {scored['step']:,}"
        lines.append(f"scored: {scored['name']} weights{step} of {scored['run_uri']} (digest {scored['digest'][:12]})")
    return "\n".join(lines)


def _format_number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def _format_interval(interval: Sequence[float] | None) -> str:
    return f"{'-':>16}" if interval is None else f"{f'{interval[0]:.3f} to {interval[1]:.3f}':>16}"


def replace_nan(value: Any) -> Any:
    """Replace NaN and infinity by None, because JSON has neither."""
    return json.loads(json.dumps(value, default=float), parse_constant=lambda _: None)
