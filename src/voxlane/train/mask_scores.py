"""Scores of masks that any tool wrote, against labels: no model is needed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pydantic
from tqdm import tqdm

from voxlane import settings
from voxlane import uri as uris
from voxlane.errors import BadCasesError, BucketNotFoundError, LayoutError, NotFoundError, ScanError
from voxlane.model import metrics
from voxlane.settings import record
from voxlane.store import StoreConfig
from voxlane.train.evaluate import EvaluationResult, format_csv, replace_nan
from voxlane.train.run import Run
from voxlane.volume.case_checks import CaseProblem, compare_grids, count_values, format_problems
from voxlane.volume.dataset_discovery import SourceCase
from voxlane.volume.description import Description
from voxlane.volume.geometry import align_axes
from voxlane.volume.pairing import pair_files
from voxlane.volume.scan import Spacing, read_label

_MAX_THREADS = 8
"""Each holds the mask and the label of a case."""


@record
class ScoreConfig:
    """The config of scoring masks."""

    labels: Mapping[str, int] = pydantic.Field(default_factory=dict)
    """Name and value of each class, such as {kidney: 1, tumour: 2}; masks may then hold no other values. Empty: every
    value above 0 that occurs is a class, named by its number."""
    regions: Mapping[str, tuple[int, ...]] = pydantic.Field(default_factory=dict)
    """Regions to score instead of the classes: name and label values of each, such as {WT: [1, 2, 4], ET: [4]}."""
    surface_tolerance_mm: float = pydantic.Field(default=1.0, gt=0)
    """Largest distance between surfaces that counts as a match, for surface Dice."""
    spacing: tuple[float, float, float] | None = None
    """Millimetres between voxels along z, y and x of files that store no spacing (.npy). null: 1 mm."""
    bad_cases: Literal["fail", "exclude"] = "fail"
    """Whether masks without a label, labels without a mask and files that cannot be compared fail the command, after
    all others were scored, or are only reported."""


@dataclass(frozen=True)
class _Scored:
    """The scores of one case by name of the target."""

    case: str
    scores: dict[str, metrics.Scores]
    problems: list[CaseProblem]


def score_masks(
    predictions: str,
    labels: str,
    config: ScoreConfig | None = None,
    store: StoreConfig | None = None,
    *,
    progress: bool | None = None,
) -> tuple[EvaluationResult, Description]:
    """Score the masks in the folder or file `predictions` against the labels of the same names, in the labels' grid.

    Return the scores and the description of the classes. The summary lists the cases that were not scored, and why,
    under `problems`. Raises LayoutError if no mask has a label.
    """
    config = config or ScoreConfig()
    named = _describe_classes(config)
    pairing = pair_files(predictions, labels, store)
    problems = [_problem(case, "missing-label", "the mask has no label") for case in pairing.without_label]
    problems += [_problem(case, "missing-image", "the label has no mask") for case in pairing.without_image]
    if not pairing.cases:
        raise LayoutError(
            f"no mask has a label of the same name\n{format_problems(problems)}\n",
            uri=predictions,
            fix="Give each mask the name of its label",
        )
    workers = min(_MAX_THREADS, os.cpu_count() or 1)
    task = partial(_score_case, config=config, named=named, store=store)
    with ThreadPoolExecutor(workers) as pool:
        bar = tqdm(pool.map(task, pairing.cases), "scoring", len(pairing.cases), unit="case", disable=_hidden(progress))
        scored = list(bar)
    for own in scored:
        problems += own.problems
    description = named or _describe_numbers(sorted({int(name) for own in scored for name in own.scores}))
    cases = [
        {"case": own.case, "fold": None, **_fill_targets(own.scores, description)}
        for own in scored
        if not any(problem.fatal for problem in own.problems)
    ]
    if not cases or description is None:
        text = "no case could be scored" if not cases else "no voxel is labelled in any mask or label"
        raise BadCasesError(f"{text}\n{format_problems(problems)}".rstrip(), uri=str(uris.parse(predictions)))
    summary = {
        **metrics.summarise_cases([{t: case[t] for t in description.targets} for case in cases]),
        "space": "scan",
        "config": settings.to_plain(config),
        "predictions": str(uris.parse(predictions)),
        "labels": str(uris.parse(labels)),
        "problems": [{"case": p.case, "severity": p.severity, "detail": p.detail} for p in problems],
    }
    return EvaluationResult(summary, cases, ""), description


def write_scores(result: EvaluationResult, description: Description, out: str, store: StoreConfig | None = None) -> str:
    """Write summary.json, cases.json and cases.csv below `out`, and return its URI."""
    folder = Run(out, store)
    folder.write_json("cases.json", replace_nan(result.cases))
    folder.write_bytes("cases.csv", format_csv(result.cases, description).encode())
    folder.write_json("summary.json", replace_nan(result.summary))
    return folder.folder_uri


def _hidden(progress: bool | None) -> bool | None:
    return None if progress is None else not progress


def _describe_classes(config: ScoreConfig) -> Description | None:
    """Return the classes that the config names, or None if it names none."""
    if not config.labels and not config.regions:
        return None
    labels = dict(config.labels)
    if not labels:
        values = sorted({value for own in config.regions.values() for value in own})
        labels = {f"label {value}": value for value in values}
    if 0 not in labels.values():
        labels = {"background": 0, **labels}
    return Description(name="masks", channels=("mask",), labels=labels, regions=config.regions)


def _describe_numbers(values: Sequence[int]) -> Description | None:
    """Return classes that are named by their values, or None without values."""
    if not values:
        return None
    return Description(
        name="masks", channels=("mask",), labels={"background": 0} | {str(value): value for value in values}
    )


def _score_case(
    case: SourceCase, *, config: ScoreConfig, named: Description | None, store: StoreConfig | None
) -> _Scored:
    """Read and score one pair. Runs in a thread; what is wrong with its files is a problem of the case."""
    problems: list[CaseProblem] = []
    if len(case.images) > 1:
        return _Scored(case.id, {}, [_problem(case.id, "channels", f"{len(case.images)} masks for one label")])
    try:
        mask, grid = read_label(case.images[0], store, spacing=config.spacing)
        label, label_grid = read_label(str(case.label), store, spacing=config.spacing)
    except (ScanError, NotFoundError) as error:
        if isinstance(error, BucketNotFoundError):
            raise
        return _Scored(case.id, {}, [_problem(case.id, "unreadable", str(error))])
    difference, is_too_large = compare_grids(grid, label_grid)
    if is_too_large:
        return _Scored(case.id, {}, [_problem(case.id, "affine", f"mask and label have different grids: {difference}")])
    if difference is not None:
        problems.append(CaseProblem(case.id, "affine", f"{difference}, less than half a voxel", fatal=False))
    mask = align_axes(mask, grid, label_grid)
    present = sorted(
        {*np.flatnonzero(count_values(mask)).tolist(), *np.flatnonzero(count_values(label)).tolist()} - {0}
    )
    unknown = set(present) - set(named.labels.values()) if named is not None and config.labels else set()
    if unknown:
        text = f"values {', '.join(map(str, sorted(unknown)))} are not in labels"
        return _Scored(case.id, {}, [_problem(case.id, "label-values", text)])
    spacing: Spacing = label_grid.spacing
    description = named or _describe_numbers(present)
    if description is None:
        return _Scored(case.id, {}, problems)
    return _Scored(
        case.id, metrics.score_case(mask, label, spacing, description, config.surface_tolerance_mm), problems
    )


def _fill_targets(scores: Mapping[str, metrics.Scores], description: Description | None) -> dict[str, metrics.Scores]:
    """Return the scores of every target, also of those that neither mask nor label of this case has."""
    absent = {**dict.fromkeys(metrics.AVERAGED_SCORES, math.nan), "volume_true_ml": 0.0, "volume_predicted_ml": 0.0}
    return {} if description is None else {target: scores.get(target, absent) for target in description.targets}


def _problem(case: str, kind: Any, detail: str) -> CaseProblem:
    return CaseProblem(case, kind, detail, fatal=True)
