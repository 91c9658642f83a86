"""Read what a run has written so far. Only run.json must exist."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from voxlane.errors import ConfigError, RunError
from voxlane.pages.formatting import as_float, as_number
from voxlane.settings import build
from voxlane.store import StoreConfig
from voxlane.train.run import Run, describe_cut, find_runs
from voxlane.uri import quote
from voxlane.volume.description import Description

_SUMMARY = re.compile("(evaluation/[^/]*)/summary.json")
WORST_CASES = 6
"""Number of cases shown with pictures, besides the typical one."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of the run."""

    name: str
    """validation: the held-out fold; cross-validation: every case by the fold that did not train on it; other names:
    scans that are not in the dataset."""
    summary: Mapping[str, Any]
    """Content of summary.json."""
    cases: Sequence[Mapping[str, Any]] = ()
    """Content of cases.json."""
    overlays: Mapping[str, bytes] = field(default_factory=dict)
    """PNG of the `pictured_cases`, by name."""

    @property
    def targets(self) -> list[str]:
        """Return the scored targets, in order."""
        return list(self.summary.get("targets") or {})

    @property
    def title(self) -> str:
        """Return the heading of this evaluation."""
        if self.name == "validation":
            return "Held-out validation cases"
        folds = sorted({str(case["fold"]) for case in self.cases if case.get("fold") is not None})
        if self.name != "cross-validation" or not folds:
            return self.name
        return f"Cross-validation, fold{'s' if len(folds) > 1 else ''} {', '.join(folds)}"

    @property
    def ranked_cases(self) -> list[Mapping[str, Any]]:
        """Return the cases by mean Dice, worst first; those without a score come last."""

        def rank(case: Mapping[str, Any]) -> tuple[bool, float, str]:
            dice = mean_dice(case, self.targets)
            return math.isnan(dice), dice, str(case["case"])

        return sorted(self.cases, key=rank)

    @property
    def pictured_cases(self) -> list[tuple[Mapping[str, Any], str]]:
        """Return the cases to show with a picture, each with a tag: the worst ones, and the median or best one."""
        ranked = [case for case in self.ranked_cases if math.isfinite(mean_dice(case, self.targets))]
        chosen = [(case, "worst" if rank == 0 else "") for rank, case in enumerate(ranked[:WORST_CASES])]
        if len(ranked) > 2 * WORST_CASES:
            chosen.append((ranked[len(ranked) // 2], "median case"))
        elif len(ranked) > WORST_CASES:
            chosen.append((ranked[-1], "best"))
        return chosen

    def statistics(self, target: str, name: str) -> Mapping[str, Any]:
        """Return the statistics of one score of a target; empty if it has none."""
        statistics: Mapping[str, Any] = (self.summary["targets"].get(target) or {}).get(name) or {}
        return statistics


@dataclass(frozen=True)
class ScoredCheckpoint:
    """The weights that an evaluation scored, compared with the run's weights now."""

    fold: str
    """Name of the fold's run; empty if there is only one run."""
    step: int
    digest: str
    is_best: bool
    """Whether they were the best weights, not the last."""
    newest_step: int
    """Step of the run's best or last weights now."""

    @property
    def is_stale(self) -> bool:
        """Return whether the run has newer weights."""
        return self.newest_step > self.step


@dataclass(frozen=True)
class Findings:
    """Content of a run's files."""

    uri: str
    run: Mapping[str, Any]
    """Content of run.json."""
    history: Sequence[Mapping[str, Any]] = ()
    """Content of history.json, one entry per epoch."""
    stall: Mapping[str, Any] = field(default_factory=dict)
    """Content of stall.json."""
    done: Mapping[str, Any] = field(default_factory=dict)
    """Content of done.json."""
    fold_histories: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """History of the run of each fold, by its name, if there is one run per fold."""
    evaluations: Sequence[Evaluation] = ()
    """Evaluations, the one over all folds first, those of other scans last."""
    damaged_files: Sequence[str] = ()
    """Names of files that exist but could not be read."""

    @functools.cached_property
    def description(self) -> Description | None:
        """Return the dataset's description if run.json holds a valid one."""
        try:
            return build(Description, self.run.get("description") or {})
        except ConfigError:
            return None

    @property
    def best(self) -> tuple[int, float] | None:
        """Return epoch and mean Dice of the best validation during training, if there was one."""
        best = _find_best(self.history)
        return None if best is None else (int(as_float(best.get("epoch"))), as_float(best.get("mean_dice")))

    @property
    def cut(self) -> str:
        """Return how far the run came, if max_minutes ended it and it was not continued since."""
        steps = [as_number(self.done.get(name)) for name in ("max_minutes", "steps", "planned_steps")]
        is_current = bool(self.history) and None not in steps and self.history[-1].get("step") == steps[1]
        return describe_cut(self.done) if is_current else ""

    def scored_checkpoints(self, evaluation: Evaluation) -> list[ScoredCheckpoint]:
        """Return the weights that an evaluation scored; empty for those of earlier versions, which do not name them."""
        checkpoints = []
        for stored in evaluation.summary.get("checkpoints") or ():
            step = as_number(stored.get("step")) if isinstance(stored, dict) else None
            if step is None:
                continue
            fold = str(stored.get("run_uri")).rpartition("/")[2] if self.fold_histories else ""
            history = self.fold_histories.get(fold, ()) if fold else self.history
            is_best = stored.get("name") == "best"
            newest = _find_best(history) if is_best else None
            newest = newest or (history[-1] if history else {})
            newest_step = int(as_number(newest.get("step")) or step)
            digest = str(stored.get("digest", ""))
            checkpoints.append(ScoredCheckpoint(fold, int(step), digest, is_best, newest_step))
        return checkpoints


def read_findings(run_uri: str, config: StoreConfig | None = None) -> Findings:
    """Read a run's files; raise RunError if there is no run. Other files that are missing or damaged are left out; the
    damaged ones are listed in `damaged_files`."""
    run = Run(run_uri, config)
    prefix = run.key("")
    names = {key[len(prefix) :] for page in run.store.list_pages(prefix) for key in page.column("path").to_pylist()}
    damaged: list[str] = []

    def read(name: str, kind: type[Any]) -> Any:
        """Return a file's content; None if it does not exist or does not hold a `kind`."""
        if name not in names:
            return None
        try:
            content = run.read_json(name)
        except RunError:
            content = None
        if isinstance(content, kind):
            return content
        damaged.append(name)
        return None

    def read_evaluation(folder: str) -> Evaluation | None:
        summary = read(f"{folder}/summary.json", dict)
        if summary is None:
            return None
        cases = [case for case in read(f"{folder}/cases.json", list) or [] if isinstance(case, dict) and "case" in case]
        evaluation = Evaluation(folder.removeprefix("evaluation/"), summary, cases)
        pictured = [str(case["case"]) for case, _ in evaluation.pictured_cases]
        files = {case: f"{folder}/overlays/{quote(case)}.png" for case in pictured}
        bodies = {c: run.store.submit(run.store.get, run.key(file)) for c, file in files.items() if file in names}
        return replace(evaluation, overlays={case: bytes(body.result()) for case, body in bodies.items()})

    facts = read("run.json", dict)
    if damaged:
        fix = "Restore it, or train again into another folder"
        raise RunError("run.json is damaged", uri=run.folder_uri, fix=fix)
    history = _select_epochs(read("history.json", list) or [])
    folders = [match[1] for name in sorted(names) if (match := _SUMMARY.fullmatch(name))]
    evaluations = filter(None, map(read_evaluation, folders))
    return Findings(
        uri=run.folder_uri,
        run=_merge_folds(run.folder_uri, config) if facts is None else facts,
        history=history,
        done=read("done.json", dict) or {},
        fold_histories=_read_fold_histories(run_uri, config) if facts is None else {},
        evaluations=sorted(evaluations, key=lambda e: (e.name != "cross-validation", e.name != "validation", e.name)),
        stall=read("stall.json", dict) or {},
        damaged_files=damaged,
    )


def find_stale_checkpoints(run: Run, name: str, summary: Mapping[str, Any]) -> list[ScoredCheckpoint]:
    """Return the weights that the evaluation `name` of a run scored, and that are not the run's weights any more; none
    if `run` is only a folder of scores, or its history cannot be read."""
    findings = Findings(uri=run.folder_uri, run={})
    with contextlib.suppress(RunError):
        if run.exists:
            findings = replace(findings, history=_select_epochs(run.read_json("history.json") or []))
        else:
            findings = replace(findings, fold_histories=_read_fold_histories(run.uri, run.config))
    return [c for c in findings.scored_checkpoints(Evaluation(name, summary, [])) if c.is_stale]


def _select_epochs(history: Sequence[Any]) -> list[dict[str, Any]]:
    return [row for row in history if isinstance(row, dict) and math.isfinite(as_float(row.get("epoch")))]


def _read_fold_histories(uri: str, config: StoreConfig | None) -> dict[str, Sequence[Mapping[str, Any]]]:
    histories = {run.folder_uri.rpartition("/")[2]: run.read_json("history.json") for run in find_runs(uri, config)}
    return {name: _select_epochs(history) for name, history in histories.items() if isinstance(history, list)}


def _merge_folds(uri: str, config: StoreConfig | None) -> dict[str, Any]:
    """Return what the runs of several folds below `uri` have in common, in the form of run.json."""
    runs = find_runs(uri, config)
    facts = [run.read_facts() for run in runs]
    held_out = sorted(case for fold in facts for case in fold["cases"]["validation"])
    names = [run.folder_uri.rpartition("/")[2] for run in runs]
    return {**facts[0], "fold": None, "fold_runs": names, "cases": {"train": [], "validation": held_out}}


def _find_best(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the epoch with the best validation; None if there was none."""
    scored = [row for row in history if math.isfinite(as_float(row.get("mean_dice")))]
    return max(scored, key=lambda row: as_float(row.get("mean_dice")), default=None)


def mean_dice(case: Mapping[str, Any], targets: Sequence[str]) -> float:
    """Return a case's mean Dice over the targets that were scored; NaN if none was."""
    values = [value for t in targets if math.isfinite(value := score(case, t, "dice"))]
    return sum(values) / len(values) if values else math.nan


def score(case: Mapping[str, Any], target: str, name: str) -> float:
    """Return one score of one case; NaN if it was not scored."""
    scores = case.get(target)
    return as_float(scores.get(name) if isinstance(scores, dict) else None)
