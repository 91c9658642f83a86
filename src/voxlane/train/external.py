"""Evaluation of a run on labelled scans that are not in its dataset, such as those of another hospital."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from voxlane import settings
from voxlane import uri as uris
from voxlane.errors import BadCasesError, ConfigError, LayoutError, RunError, ScanError
from voxlane.model import metrics
from voxlane.settings import record
from voxlane.store import StoreConfig
from voxlane.train import pictures
from voxlane.train.evaluate import EvaluateConfig, EvaluationResult, ResultFiles, format_csv, replace_nan
from voxlane.train.predictor import Predictor
from voxlane.train.run import Run, TrainedRun
from voxlane.volume.case_checks import CaseProblem, format_problems, load_case
from voxlane.volume.dataset_discovery import SourceCase, discover
from voxlane.volume.description import Description
from voxlane.volume.memory import available_bytes
from voxlane.volume.pairing import pair_files
from voxlane.volume.scan import Scan
from voxlane.volume.worker_process import WorkerCrashError, WorkerMemoryError, WorkerProcess, WorkerTimeoutError

_OWN_NAMES = ("validation", "cross-validation")
"""Evaluations of a run's held-out cases."""
_MAX_PENDING = 2
"""Largest number of cases that wait for their scores while the next one is predicted."""


@record
class ExternalConfig(EvaluateConfig):
    """The config of an evaluation with --images."""

    bad_cases: Literal["fail", "exclude"] = "fail"
    """Whether scans of --images without a label, labels without a scan and files that cannot be used fail the command,
    or are only reported and left out."""


@dataclass(frozen=True)
class ExternalSet:
    """Labelled scans to score a run on."""

    images: str
    labels: str | None
    cases: tuple[SourceCase, ...]
    problems: list[CaseProblem]
    """Scans without a label, and labels without a scan."""

    @property
    def name(self) -> str:
        """Name of the evaluation: the last folder of the images that is no layout's own."""
        parts = [part for part in uris.parse(self.images).key.split("/") if part]
        meaningful = [part for part in parts if part.lower() not in ("images", "imagestr", "imagests", "data")]
        return f"external-{(meaningful or parts or ['scans'])[-1].removesuffix('.json').removesuffix('.csv')}"


def find_external_set(
    images: str, labels: str | None, description: Description, config: StoreConfig | None = None
) -> ExternalSet:
    """Return the labelled scans of the folders `images` and `labels`, paired by name (`volume.pairing`); without
    `labels`, those of a dataset in a layout or list that `prepare` reads. Raises LayoutError if there are none, or if
    the source numbers the labels of `description` differently."""
    if labels is None:
        defaults = {"channels": description.channels, "labels": description.labels}
        source = discover(images, config, defaults=defaults)
        _check_labels(source.description, description, images)
        cases = tuple(case for case in source.cases if case.label is not None)
        problems = [_make_problem(case.id, "missing-label", "no label") for case in source.cases if case.label is None]
    else:
        pairing = pair_files(images, labels, config)
        cases = pairing.cases
        problems = [_make_problem(case, "missing-label", "the scan has no label") for case in pairing.without_label]
        problems += [_make_problem(case, "missing-image", "the label has no scan") for case in pairing.without_image]
    if not cases:
        raise LayoutError(
            f"no scan has a label\n{format_problems(problems)}\n",
            uri=images,
            fix="Give a label the name of its scan, or list the pairs in a .json or .csv file (--images LIST)",
        )
    return ExternalSet(str(uris.parse(images)), labels and str(uris.parse(labels)), cases, problems)


def evaluate_external(
    runs: Sequence[Run],
    external: ExternalSet,
    out: Run | None = None,
    config: ExternalConfig | None = None,
    *,
    name: str | None = None,
    progress: bool | None = None,
) -> EvaluationResult:
    """Predict and score labelled scans, each in its own grid, with the network of a run or those of all folds together.

    Writes summary.json, cases.csv, cases.json, overlays and masks below `out` (default: the first run), in
    `evaluation/NAME`. The summary lists the cases that were not scored under `problems`. Raises BadCasesError if a case
    lacks its scan or label, unless `config.bad_cases` is exclude; files that turn out to be unusable are for the caller
    to judge. Memory is that of `Predictor`, plus a label.
    """
    config = config or ExternalConfig()
    if config.space != "scan":
        raise ConfigError("space: scans of another dataset are scored in their own grid", fix="Leave space out")
    folder = f"evaluation/{_check_name(name or external.name)}"
    if external.problems and config.bad_cases == "fail":
        count = len(external.problems)
        raise BadCasesError(
            f"{count} scans and labels have no counterpart\n{format_problems(external.problems)}\n",
            uri=external.images,
            fix="Add them, or score the others with bad_cases=exclude",
        )
    out = out or runs[0]
    _check_destination(out, folder, external)
    out.store.check_writable(out.key(f"{folder}/summary.json"))
    trained = [TrainedRun.load(run) for run in runs]
    predictor = Predictor.load(runs, config.predict)
    files = ResultFiles(out, folder)
    cases, problems = _score_cases(predictor, external, runs[0].config, config, files, progress)
    if not cases:
        raise BadCasesError(f"no case could be scored\n{format_problems(problems)}", uri=external.images)
    all_problems = [*external.problems, *problems]
    training_cases = {case for own in trained for case in own.training_cases}
    targets = predictor.description.targets
    summary = {
        **metrics.summarise_cases([{t: c[t] for t in targets} for c in cases]),
        "space": config.space,
        "config": settings.to_plain(config),
        "checkpoints": [dataclasses.asdict(checkpoint) for checkpoint in predictor.checkpoints],
        "runs": [run.folder_uri for run in runs],
        "folds": sorted({own.fold for own in trained if own.fold is not None}),
        "dataset_cases": len(external.cases),
        "images": external.images,
        "labels": external.labels,
        "problems": [{"case": p.case, "severity": p.severity, "detail": p.detail} for p in all_problems],
        "named_as_training_cases": [case.id for case in external.cases if case.id in training_cases],
    }
    files.finish()
    out.write_json(f"{folder}/cases.json", replace_nan(cases))
    out.write_bytes(f"{folder}/cases.csv", format_csv(cases, predictor.description).encode())
    out.write_json(f"{folder}/summary.json", replace_nan(summary))
    return EvaluationResult(summary, cases, out.file_uri(folder))


def _score_cases(
    predictor: Predictor,
    external: ExternalSet,
    store: StoreConfig | None,
    config: ExternalConfig,
    files: ResultFiles,
    progress: bool | None,
) -> tuple[list[dict[str, Any]], list[CaseProblem]]:
    """Predict all cases; return the scores, sorted by case, and the problems of the files."""
    cases: list[dict[str, Any]] = []
    problems: list[CaseProblem] = []
    pending: deque[tuple[str, Future[dict[str, metrics.Scores]]]] = deque()
    bar = tqdm(
        total=len(external.cases), desc="evaluating", unit="case", disable=None if progress is None else not progress
    )

    def collect(max_pending: int) -> None:
        while len(pending) > max_pending:
            case, scores = pending.popleft()
            cases.append({"case": case, "fold": None, **scores.result()})
            files.keep_worst(cases)

    with bar, ThreadPoolExecutor(2) as pool:
        for loaded in _load_cases(external.cases, predictor.description, store, config):
            problems += loaded.problems
            if loaded.scan is not None and loaded.label is not None:
                spacing = loaded.scan.geometry.spacing
                try:
                    mask = _predict(predictor, loaded.scan, loaded.label, loaded.case, config, files)
                except ScanError as error:  # too large on the plan's grid
                    problems.append(_make_problem(loaded.case.id, "memory", str(error)))
                else:
                    task = mask, loaded.label, spacing, predictor.description, config.surface_tolerance_mm
                    pending.append((loaded.case.id, pool.submit(metrics.score_case, *task)))
            collect(_MAX_PENDING)
            bar.update()
        collect(0)
    return sorted(cases, key=lambda case: str(case["case"])), problems


@dataclass(frozen=True)
class _LoadedCase:
    case: SourceCase
    scan: Scan | None
    label: npt.NDArray[np.uint8] | None
    problems: list[CaseProblem]


def _load_cases(
    cases: Sequence[SourceCase], description: Description, store: StoreConfig | None, config: EvaluateConfig
) -> Iterator[_LoadedCase]:
    """Yield every case with the checks of `prepare`, read in a process that is ended if a file takes too much."""
    process = WorkerProcess(memory_bytes=available_bytes())
    try:
        for case in cases:
            try:
                scan, label, problems = process.call(
                    load_case, case, description, store, timeout_s=config.predict.scan_timeout_s
                )
            except (WorkerTimeoutError, WorkerCrashError, WorkerMemoryError) as error:
                scan = label = None
                problems = [_make_problem(case.id, "unreadable", f"reading was ended: {error}")]
            yield _LoadedCase(case, scan, label, problems)
    finally:
        process.close()


def _predict(
    predictor: Predictor,
    scan: Scan,
    label: npt.NDArray[np.uint8],
    case: SourceCase,
    config: ExternalConfig,
    files: ResultFiles,
) -> npt.NDArray[np.uint8]:
    """Return the mask of a scan, and write it and its picture."""
    mask = predictor.predict(scan.image, scan.geometry.spacing, geometry=scan.geometry, uri=case.images[0])
    files.pictures[case.id] = pictures.encode_png(pictures.draw_row(scan.image[0], label, mask, scan.geometry.spacing))
    if config.masks:
        files.write_mask(case.id, mask, scan.geometry)
    return mask


def _make_problem(case: str, kind: Any, detail: str) -> CaseProblem:
    return CaseProblem(case, kind, detail, fatal=True)


def _check_labels(source: Description, description: Description, uri: str) -> None:
    """Raise if a label of the run has another value at the source."""
    own = {name.lower(): value for name, value in description.labels.items()}
    for name, value in source.labels.items():
        if own.get(name.lower(), value) != value:
            raise LayoutError(
                f"label {name} is {value} here, but {own[name.lower()]} in the run's dataset",
                uri=uri,
                fix="Renumber the labels, or give folders with --images and --labels if only dataset.json is wrong",
            )


def _check_name(name: str) -> str:
    if name in _OWN_NAMES or not name.strip(".") or "/" in name:
        raise ConfigError(
            f"--name {name}: {', '.join(_OWN_NAMES)} are the run's own evaluations, and a name is one folder",
            fix="Use another name, such as external-site2",
        )
    return uris.quote(name)


def _check_destination(out: Run, folder: str, external: ExternalSet) -> None:
    """Raise if the folder holds the scores of other scans."""
    existing: Mapping[str, Any] = out.read_json(f"{folder}/summary.json") or {}
    if existing and (existing.get("images"), existing.get("labels")) != (external.images, external.labels):
        raise RunError(
            f"this evaluation holds the scores of {existing.get('images', 'other scans')}",
            uri=out.file_uri(folder),
            fix="Choose another --name for these scans",
        )
