"""`evaluate`: every held-out case predicted by the network that never saw it, scored in the scan's own grid."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pydantic
from tqdm import tqdm

from voxlane import settings
from voxlane import uri as uris
from voxlane.errors import ConfigError, NotFoundError, RunError, ScanError
from voxlane.model import scores
from voxlane.model.windows import to_mask
from voxlane.settings import record
from voxlane.train import pictures
from voxlane.train.predict import value_counts
from voxlane.train.predictor import PredictConfig, Predictor
from voxlane.train.run import Run, Trained
from voxlane.volume.cases import Caching, Cases
from voxlane.volume.description import Description
from voxlane.volume.geometry import Geometry, along
from voxlane.volume.prepared import Prepared, PreparedCase
from voxlane.volume.scan import read_label, write_mask

OVERLAYS = 40
"""Pictures kept: of all cases up to so many, else of the worst."""
_WAITING = 2
"""Cases that wait for their scores while the next one is predicted."""
_MEASURES = ("dice", "hd95_mm", "surface_dice", "volume_true_ml", "volume_predicted_ml")


@record
class EvaluateConfig:
    """How a run is scored."""

    predict: PredictConfig = PredictConfig()
    space: Literal["scan", "prepared"] = "scan"
    """scan: in the scan's own grid, against the label file it came with. prepared: on the plan's grid, against the
    resampled label, as MLPerf scores."""
    surface_tolerance_mm: float = pydantic.Field(default=1.0, gt=0)
    """How far surfaces may lie apart and still count as one, for surface Dice."""
    masks: bool = True
    """Keep the predicted masks."""


@dataclass(frozen=True)
class Evaluation:
    """What came out."""

    summary: dict[str, Any]
    cases: list[dict[str, Any]]
    where: str
    """Folder of the result files."""


def evaluate(
    runs: Sequence[Run], out: Run | None = None, how: EvaluateConfig | None = None, *, progress: bool | None = None
) -> Evaluation:
    """Predict and score the held-out cases of each run.

    One run: its fold. Several, one a fold over one prepared dataset: cross-validation, each case predicted by the run
    that did not train on it. Writes summary.json, cases.csv, cases.json, overlays and masks below `out` (by default the
    run itself), in `evaluation/validation` or `evaluation/cross-validation`; overlays and masks of an evaluation before
    that this one did not write again are removed.

    Memory: that of `Predictor`, and mask and truth, a byte a voxel each, of up to three cases that wait for their
    scores.
    """
    how = how or EvaluateConfig()
    trained = [Trained.of(run) for run in runs]
    prepared = Prepared.load(trained[0].data_uri, runs[0].config)
    check_folds(runs, trained, prepared)
    out = out or runs[0]
    name = f"evaluation/{'validation' if len(runs) == 1 else 'cross-validation'}"
    out.store.check_writable(out.key(f"{name}/summary.json"))
    files = _Files(out, name, masks=how.masks)
    cases: list[dict[str, Any]] = []
    waiting: deque[Future[dict[str, Any]]] = deque()
    total = sum(len(one.held_out) for one in trained)
    bar = tqdm(total=total, desc="evaluating", unit="case", disable=None if progress is None else not progress)

    def take() -> None:
        cases.append(waiting.popleft().result())
        files.keep_worst(cases)
        bar.update()

    with bar, ThreadPoolExecutor(2) as pool:
        for run, one in zip(runs, trained, strict=True):
            predictor = Predictor.load([run], how.predict)
            for case, mask, truth, spacing in _predictions(predictor, prepared, one.held_out, how, files):
                entry = {"case": case, "fold": one.fold}
                waiting.append(pool.submit(_scored, entry, mask, truth, spacing, prepared.description, how))
                while len(waiting) > _WAITING:
                    take()
        while waiting:
            take()
    cases.sort(key=lambda case: str(case["case"]))
    targets = prepared.description.targets
    summary = {
        **scores.summary([{t: c[t] for t in targets} for c in cases]),
        "space": how.space,
        "config": settings.plain(how),
        "runs": [run.where for run in runs],
        "folds": sorted({one.fold for one in trained if one.fold is not None}),
        "dataset_cases": len(prepared),
    }
    files.finish()
    out.write_json(f"{name}/cases.json", _finite(cases))
    out.write(f"{name}/cases.csv", to_csv(cases, prepared.description).encode())
    out.write_json(f"{name}/summary.json", _finite(summary))
    return Evaluation(summary, cases, out.file_uri(name))


def check_folds(runs: Sequence[Run], trained: Sequence[Trained], prepared: Prepared) -> None:
    """Raise unless every case will be scored once, by a run that saw neither it nor another scan of its patient."""
    for run, one in zip(runs, trained, strict=True):
        if one.digest != trained[0].digest:
            raise ConfigError(
                f"this run was trained on another dataset than {runs[0].where}",
                uri=run.where,
                fix="Evaluate together the folds of one prepared dataset",
            )
        if one.fold is None or not one.held_out:
            raise RunError(
                "the run was trained on all cases: none is left to score it on",
                uri=run.where,
                fix="Train with a fold held out, such as fold=0",
            )
    if prepared.digest != trained[0].digest:
        raise RunError(
            f"the dataset {prepared.uri} was prepared anew after the run was begun",
            uri=runs[0].where,
            fix="Train again on what it holds now, or prepare it as it was",
        )
    patients = dict(zip(prepared.ids, prepared.table.column("patient").to_pylist(), strict=True))
    scored: dict[str, Run] = {}
    for run, one in zip(runs, trained, strict=True):
        if not set(one.held_out) | set(one.trained_on) <= set(patients):
            raise run.damaged()
        seen = {patients[case] for case in one.trained_on}
        for case in one.held_out:
            if patients[case] in seen:
                raise RunError(f"the run was trained on the patient of its held-out case {case}", uri=run.where)
            if case in scored:
                raise ConfigError(
                    f"this run and {scored[case].where} hold out the same cases, such as {case}",
                    uri=run.where,
                    fix="Evaluate one run a fold",
                )
            scored[case] = run


class _Files:
    """Masks and overlays of one evaluation."""

    def __init__(self, out: Run, name: str, *, masks: bool) -> None:
        self._out = out
        self._name = name
        self._masks = masks
        self._written: set[str] = set()
        self._pictures: dict[str, bytes] = {}

    def mask(self, case: str, mask: npt.NDArray[np.uint8], geometry: Geometry) -> None:
        """Write a mask, where masks are wanted."""
        if self._masks:
            file = f"{self._name}/masks/{uris.quote(case)}.nii.gz"
            write_mask(self._out.file_uri(file), mask, geometry, config=self._out.config)
            self._written.add(file)

    def picture(self, case: str, png: bytes) -> None:
        """Hold a picture until the case's score says whether it is kept."""
        self._pictures[case] = png

    def keep_worst(self, cases: Sequence[dict[str, Any]]) -> None:
        """Let go of the pictures of the best of the scored `cases`, down to `OVERLAYS` scored ones."""
        scored = sorted((c for c in cases if c["case"] in self._pictures), key=case_dice)
        for case in scored[OVERLAYS:]:
            del self._pictures[str(case["case"])]

    def finish(self) -> None:
        """Write the pictures that are left, and remove files of an evaluation before."""
        for case, png in self._pictures.items():
            file = f"{self._name}/overlays/{uris.quote(case)}.png"
            self._out.write(file, png)
            self._written.add(file)
        kept = {self._out.key(file) for file in self._written}
        for part in ("masks", "overlays"):
            pages = self._out.store.list_pages(self._out.key(f"{self._name}/{part}/"))
            self._out.store.delete(
                [key for page in pages for key in page.column("path").to_pylist() if key not in kept]
            )


def case_dice(case: Mapping[str, Any]) -> float:
    """A case's mean Dice over its scored targets; 1 where there was nothing to find and nothing was found."""
    found = [one["dice"] for one in case.values() if isinstance(one, dict) and not math.isnan(one["dice"])]
    return sum(found) / len(found) if found else 1.0


def _scored(
    entry: dict[str, Any],
    mask: npt.NDArray[np.uint8],
    truth: npt.NDArray[np.uint8],
    spacing: tuple[float, float, float],
    description: Description,
    how: EvaluateConfig,
) -> dict[str, Any]:
    scored = scores.score_case(mask, truth, spacing, description, surface_tolerance_mm=how.surface_tolerance_mm)
    return {**entry, **scored}


def _predictions(
    predictor: Predictor, prepared: Prepared, held_out: Sequence[str], how: EvaluateConfig, files: _Files
) -> Iterator[tuple[str, npt.NDArray[np.uint8], npt.NDArray[np.uint8], tuple[float, float, float]]]:
    """Case, mask, truth and spacing of every held-out case, in the space that is scored."""
    cases = Cases(prepared, Caching(ram_bytes=0))
    rows = {case: row for row, case in enumerate(prepared.ids)}
    for case in held_out:
        volume = cases.open(rows[case])
        geometry = Geometry.from_dict(volume.case.volume["geometry"])
        # Before the network's work, so that a label that is gone is said at once.
        truth = read_truth(volume.case, geometry, prepared) if how.space == "scan" else None
        image, label = volume.whole()
        outputs = predictor.outputs(image)
        on_grid = to_mask(outputs, predictor.description).numpy()
        files.picture(case, pictures.overlay_png(image[0].numpy(), label.numpy(), on_grid, volume.grid.spacing))
        del image
        if how.masks or truth is not None:
            in_scan = predictor.mask_in_scan(outputs, volume.grid)
            files.mask(case, in_scan, geometry)
        if truth is None:
            yield case, on_grid, label.numpy(), volume.grid.spacing
        else:
            yield case, in_scan, truth, geometry.spacing


def read_truth(case: PreparedCase, geometry: Geometry, prepared: Prepared) -> npt.NDArray[np.uint8]:
    """The label file that a case came with, along the axes of its scan's `geometry`."""
    uri: str = case.source["label"]
    fix = "Put it back, or score against the prepared label: space=prepared"
    try:
        label, own = read_label(uri, prepared.config)
    except NotFoundError as error:
        if type(error) is not NotFoundError:
            raise
        raise RunError(f"the label of case {case.id} is gone", uri=uri, fix=fix) from None
    except ScanError as error:
        said = str(error).removeprefix(f"{error.uri}: ")
        raise RunError(f"the label of case {case.id} cannot be read now: {said}", uri=uri, fix=fix) from None
    label = along(label, own, geometry)
    unknown = set(np.flatnonzero(value_counts(label)).tolist()) - set(prepared.description.labels.values())
    if label.shape != geometry.canonical_shape or unknown:
        raise RunError(f"the label of case {case.id} is not the one that was prepared", uri=uri, fix=fix)
    return label


def to_csv(cases: Sequence[dict[str, Any]], description: Description) -> str:
    """One line a case: case, fold, and each measure of each target."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["case", "fold", *(f"{t}/{m}" for t in description.targets for m in _MEASURES)])
    for case in cases:
        values = [case[t][m] for t in description.targets for m in _MEASURES]
        shown = ["" if isinstance(v, float) and math.isnan(v) else f"{v:.6g}" for v in values]
        writer.writerow([case["case"], case["fold"], *shown])
    return buffer.getvalue()


def table(evaluation: Evaluation, description: Description) -> str:
    """The summary as people read it."""
    head = f"{'':<16}{'Dice':>8}{'± std':>8}{'median':>8}{'HD95 mm':>10}{'surface':>9}{'cases':>7}"
    lines = [head]
    for target in description.targets:
        found = evaluation.summary["targets"][target]
        dice, hd95, surface = (found[m] for m in ("dice", "hd95_mm", "surface_dice"))
        lines.append(
            f"{target:<16}{_number(dice['mean'], 8, 3)}{_number(dice['std'], 8, 3)}{_number(dice['median'], 8, 3)}"
            f"{_number(hd95['mean'], 10, 2)}{_number(surface['mean'], 9, 3)}{dice['count']:>7}"
        )
    lines.append(f"{'mean':<16}{_number(evaluation.summary['mean_dice'], 8, 3)}")
    return "\n".join(lines)


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def _finite(value: Any) -> Any:
    """NaN as null, which JSON has."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return json.loads(json.dumps(value, default=float))
