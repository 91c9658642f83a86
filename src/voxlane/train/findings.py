"""What a run has written so far, read back from its folder. Only run.json must be there."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from voxlane.errors import ConfigError, NotFoundError, RunError
from voxlane.settings import build
from voxlane.store import Store, StoreConfig
from voxlane.train.run import runs_at
from voxlane.uri import parse, quote
from voxlane.volume.description import Description

WORST = 6
"""Cases shown with pictures, besides the typical one."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of the run."""

    name: str
    """validation: the held-out fold; cross-validation: every case by the fold that did not see it."""
    summary: Mapping[str, Any]
    cases: Sequence[Mapping[str, Any]] = ()
    overlays: Mapping[str, bytes] = field(default_factory=dict)
    """PNG of the cases that `shown` chooses, where there is one."""

    @property
    def targets(self) -> list[str]:
        """What was scored, in order."""
        return list(self.summary.get("targets") or {})


@dataclass(frozen=True)
class Findings:
    """All that is known of a run."""

    uri: str
    run: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]] = ()
    stall: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Sequence[Evaluation] = ()
    """The one over all folds first."""
    broken: Sequence[str] = ()
    """Names of files that are there but could not be read."""

    @functools.cached_property
    def description(self) -> Description | None:
        """Of the dataset, where run.json holds a valid one."""
        try:
            return build(Description, self.run.get("description") or {})
        except ConfigError:
            return None

    @property
    def best(self) -> tuple[int, float] | None:
        """Epoch and mean Dice of the best validation during training, if there was one."""
        scored = [(m, row) for row in self.history if math.isfinite(m := as_float(row.get("mean_dice")))]
        if not scored:
            return None
        dice, row = max(scored, key=lambda item: item[0])
        return int(as_float(row.get("epoch"))), dice


def read(run_uri: str, config: StoreConfig | None = None) -> Findings:
    """Read a run's files. RunError when no run is there; a file that is missing or damaged otherwise is left out, and
    named in `broken` if damaged."""
    place = parse(run_uri)
    store = Store(str(place), config)
    prefix = place.key.rstrip("/") + "/" if place.key else ""
    broken: list[str] = []
    uri = store.uri(prefix).rstrip("/")
    run = _json(store, prefix + "run.json", [], dict)
    if run is None:
        if store.exists(prefix + "run.json"):
            raise RunError("run.json is damaged", uri=uri, fix="Restore it, or train again into another folder")
        run = _all_folds(uri, config)
    names = [key[len(prefix) :] for page in store.list_pages(prefix) for key in page.column("path").to_pylist()]
    history = _json(store, prefix + "history.json", broken, list) or []
    evaluations = [
        _evaluation(store, prefix, name.split("/")[1], set(names), broken)
        for name in sorted(names)
        if name.count("/") == 2 and name.startswith("evaluation/") and name.endswith("/summary.json")
    ]
    return Findings(
        uri=uri,
        run=run,
        history=[row for row in history if isinstance(row, dict) and math.isfinite(as_float(row.get("epoch")))],
        stall=_json(store, prefix + "stall.json", broken, dict) or {},
        evaluations=sorted(
            (one for one in evaluations if one is not None), key=lambda one: (one.name != "cross-validation", one.name)
        ),
        broken=[name.removeprefix(prefix) for name in broken],
    )


def _all_folds(uri: str, config: StoreConfig | None) -> dict[str, Any]:
    """What the runs of several folds below `uri` have in common, as run.json would say it; RunError when none is."""
    runs = runs_at(uri, config)
    every = [run.facts() for run in runs]
    held = [case for facts in every for case in facts["cases"]["validation"]]
    names = [run.where.rpartition("/")[2] for run in runs]
    return {**every[0], "fold": None, "fold_runs": names, "cases": {"train": [], "validation": sorted(held)}}


def _evaluation(store: Store, prefix: str, name: str, names: set[str], broken: list[str]) -> Evaluation | None:
    folder = f"evaluation/{name}/"
    summary = _json(store, f"{prefix}{folder}summary.json", broken, dict)
    if summary is None:
        return None
    listed = _json(store, f"{prefix}{folder}cases.json", broken, list) or []
    cases = [case for case in listed if isinstance(case, dict) and "case" in case]
    bare = Evaluation(name, summary, cases)
    pictures: dict[str, Future[Any]] = {}
    for case, _ in shown(bare):
        key = f"{folder}overlays/{quote(str(case['case']))}.png"
        if key in names:
            pictures[str(case["case"])] = store.submit(store.get, prefix + key)
    return Evaluation(name, summary, cases, {case: bytes(body.result()) for case, body in pictures.items()})


def shown(evaluation: Evaluation) -> list[tuple[Mapping[str, Any], str]]:
    """The cases to look at, each with why: the worst ones, and the middle one of all."""
    ranked = sorted(
        (case for case in evaluation.cases if math.isfinite(mean_dice(case, evaluation.targets))),
        key=lambda case: (mean_dice(case, evaluation.targets), str(case["case"])),
    )
    chosen = [(case, "worst" if rank == 0 else "") for rank, case in enumerate(ranked[:WORST])]
    if len(ranked) > 2 * WORST:
        chosen.append((ranked[len(ranked) // 2], "median case"))
    elif len(ranked) > WORST:
        chosen.append((ranked[-1], "best"))
    return chosen


def mean_dice(case: Mapping[str, Any], targets: Sequence[str]) -> float:
    """A case's Dice over the targets it has; NaN when it has none."""
    values = [value for t in targets if math.isfinite(value := score(case, t, "dice"))]
    return sum(values) / len(values) if values else math.nan


def score(case: Mapping[str, Any], target: str, name: str) -> float:
    """One figure of one case; NaN where it was not scored."""
    scores = case.get(target)
    value = scores.get(name) if isinstance(scores, dict) else None
    return as_float(value)


def as_float(value: Any) -> float:
    """A JSON value as a number; NaN for what is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _json(store: Store, key: str, broken: list[str], kind: type[Any]) -> Any:
    """A file's content; None when it is not there, or when it is no `kind`, which is noted in `broken`."""
    try:
        value = json.loads(bytes(store.get(key)))
    except NotFoundError:
        return None
    except ValueError:
        broken.append(key)
        return None
    if not isinstance(value, kind):
        broken.append(key)
        return None
    return value
