"""Comparison of two sets of scores, such as those of two runs, on the cases that both have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from voxlane import uri as uris
from voxlane.errors import RunError
from voxlane.model.metrics import AVERAGED_SCORES
from voxlane.model.statistics import compare_paired, describe_bootstrap
from voxlane.sizes import format_plural
from voxlane.store import StoreConfig
from voxlane.train.findings import find_stale_checkpoints, mean_dice, score
from voxlane.train.run import Run

_PREFERRED = ("cross-validation", "validation")
MEAN = "mean"
"""Name of the mean over targets in `Comparison.table`."""
_MIN_CASES = 6
"""Fewest cases whose differences can have p < 0.05 in Wilcoxon's test."""
_MAX_SHOWN = 5


@dataclass(frozen=True)
class ScoreSet:
    """The scores of one run or tool."""

    folder: Run
    """Folder of cases.json."""
    title: str
    cases: Mapping[str, Mapping[str, Any]]
    """Scores by case, as in cases.json."""
    summary: Mapping[str, Any]

    @property
    def targets(self) -> list[str]:
        """Return the scored targets, in order."""
        return list(
            dict.fromkeys(name for case in self.cases.values() for name in case if isinstance(case[name], dict))
        )


@dataclass(frozen=True)
class Comparison:
    """Two sets of scores, and how they differ."""

    first: ScoreSet
    second: ScoreSet
    cases: tuple[str, ...]
    """Cases that both scored, sorted."""
    targets: tuple[str, ...]
    """Targets that both scored."""
    table: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Results of `compare_paired` by target, including `MEAN`, and score."""
    notes: tuple[str, ...]
    """What makes the comparison less than it seems."""

    def values(self, case: str, target: str, name: str) -> tuple[float, float]:
        """Return a score of a case in both sets; NaN where it was not scored. For `MEAN`, the mean over the targets
        that were scored in both."""
        own = self.first.cases[case], self.second.cases[case]
        if target != MEAN:
            return score(own[0], target, name), score(own[1], target, name)
        both = [t for t in self.targets if all(math.isfinite(score(c, t, "dice")) for c in own)]
        return mean_dice(own[0], both), mean_dice(own[1], both)

    @property
    def ranked_cases(self) -> list[str]:
        """Return the cases by the size of the difference of their mean Dice, largest first."""

        def rank(case: str) -> tuple[bool, float, str]:
            a, b = self.values(case, MEAN, "dice")
            return math.isnan(b - a), -abs(b - a), case

        return sorted(self.cases, key=rank)

    def to_plain(self) -> dict[str, Any]:
        """Return the comparison as data for JSON; differences are B minus A."""
        return {
            "first": self.first.folder.folder_uri,
            "second": self.second.folder.folder_uri,
            "bootstrap": describe_bootstrap(),
            "test": "Wilcoxon signed-rank, two-sided",
            "targets": self.table,
            "notes": list(self.notes),
            "cases": [
                {"case": case}
                | {t: {name: _to_numbers(self.values(case, t, name)) for name in AVERAGED_SCORES} for t in self.targets}
                for case in self.cases
            ],
        }


def compare(first: str, second: str, config: StoreConfig | None = None, *, evaluation: str | None = None) -> Comparison:
    """Compare the scores of two evaluated runs, or of two folders with a cases.json.

    `evaluation`: which of the runs' evaluations; by default one that both have. Raises RunError if there are no scores,
    or no case or target that both have.
    """
    folders = _find_scores(first, config), _find_scores(second, config)
    names = _choose_evaluations(*folders, (first, second), evaluation)
    sets = [_read_scores(own[name], uri, name) for own, uri, name in zip(folders, (first, second), names, strict=True)]
    a, b = sets
    cases = tuple(sorted(a.cases.keys() & b.cases.keys()))
    targets = tuple(target for target in a.targets if target in b.targets)
    if not cases or not targets:
        kind, own, others = ("case", a.cases, b.cases) if not cases else ("target", a.targets, b.targets)
        raise RunError(
            f"no {kind} in common: A has {_shorten(own)}, B has {_shorten(others)}",
            uri=b.folder.folder_uri,
            fix="Compare runs that were scored on the same cases, such as those of one fold"
            if not cases
            else "Score masks with the names of the others: voxlane score ... 'labels={NAME: VALUE}'",
        )
    draft = Comparison(a, b, cases, targets, {}, ())
    table = {target: {name: _compare(draft, target, name) for name in AVERAGED_SCORES} for target in targets}
    table[MEAN] = {"dice": _compare(draft, MEAN, "dice")}
    notes = [*_find_stale_scores(sets, (first, second), names, config), *_find_caveats(draft, names)]
    return Comparison(a, b, cases, targets, table, tuple(notes))


def _compare(comparison: Comparison, target: str, name: str) -> dict[str, Any]:
    pairs = [comparison.values(case, target, name) for case in comparison.cases]
    scored = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    return compare_paired([a for a, _ in scored], [b for _, b in scored])


def _find_scores(uri: str, config: StoreConfig | None) -> dict[str, Run]:
    """Return the folders with a cases.json by the name of the evaluation; "" is the folder `uri` itself."""
    folder = Run(uri.removesuffix("/").removesuffix("/cases.json").removesuffix("/summary.json"), config)
    if folder.store.exists(folder.key("cases.json")):
        return {"": folder}
    prefix = folder.key("evaluation/")
    keys = [key for page in folder.store.list_pages(prefix) for key in page.column("path").to_pylist()]
    paths = [key.removeprefix(prefix).split("/") for key in keys]
    names = sorted(path[0] for path in paths if len(path) == 2 and path[1] == "cases.json")
    if not names:
        raise RunError(
            "no scores here", uri=folder.folder_uri, fix="Make them: voxlane evaluate RUN, or voxlane score -o FOLDER"
        )
    return {name: Run(folder.file_uri(f"evaluation/{name}"), config) for name in names}


def _choose_evaluations(
    first: Mapping[str, Run], second: Mapping[str, Run], run_uris: Sequence[str], evaluation: str | None
) -> tuple[str, str]:
    if evaluation is not None:
        for folders, uri in zip((first, second), run_uris, strict=True):
            if evaluation not in folders and "" not in folders:
                raise RunError(f"no evaluation {evaluation!r}", uri=uri, fix=f"Choose from: {', '.join(folders)}")
    common = [name for name in first if name in second]

    def choose(folders: Mapping[str, Run]) -> str:
        if "" in folders:
            return ""
        if evaluation is not None:
            return evaluation
        candidates = common or list(folders)
        return next((name for name in _PREFERRED if name in candidates), candidates[0])

    return choose(first), choose(second)


def _read_scores(folder: Run, uri: str, name: str) -> ScoreSet:
    rows = folder.read_json("cases.json")
    summary = folder.read_json("summary.json") or {}
    is_valid = isinstance(rows, list) and all(isinstance(row, dict) and "case" in row for row in rows)
    if not is_valid or not isinstance(summary, dict):
        raise RunError(
            "the file does not have the content that voxlane writes",
            uri=folder.file_uri("cases.json"),
            fix="Evaluate again",
        )
    parts = [part for part in uris.parse(uri).key.split("/") if part and part != "cases.json"]
    title = parts[-1] if parts else uri
    return ScoreSet(folder, title if not name else f"{title} ({name})", {str(r["case"]): r for r in rows}, summary)


def _find_stale_scores(
    sets: Sequence[ScoreSet], run_uris: Sequence[str], names: Sequence[str], config: StoreConfig | None
) -> Iterator[str]:
    """Say which scores of runs are not those of the runs' weights now."""
    for title, own, uri, name in zip("AB", sets, run_uris, names, strict=True):
        for checkpoint in find_stale_checkpoints(Run(uri, config), name, own.summary) if name else ():
            run = checkpoint.fold or "the run"
            trained = f"{run} has weights of step {checkpoint.newest_step:,} now"
            yield f"{title}'s scores are of step {checkpoint.step:,}, and {trained}: evaluate it again"


def _find_caveats(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Return what a reader of the comparison must know."""
    a, b = comparison.first, comparison.second
    notes = []
    for title, own, other in (("A", a, b), ("B", b, a)):
        if only := sorted(own.cases.keys() - other.cases.keys()):
            notes.append(f"{format_plural(len(only), 'case')} only in {title}, not compared: {_shorten(only)}")
        if targets := [target for target in own.targets if target not in other.targets]:
            notes.append(f"targets only in {title}, not compared: {', '.join(targets)}")
    if all(names) and names[0] != names[1]:
        notes.append(f"A's {names[0]} is compared with B's {names[1]}")
    spaces = [own.summary.get("space") for own in (a, b)]
    if None not in spaces and spaces[0] != spaces[1]:
        notes.append(f"A was scored in {spaces[0]} space and B in {spaces[1]} space")
    differing = [case for case in comparison.cases if _truth_differs(comparison, case)]
    if differing:
        notes.append(f"the labels differ in {format_plural(len(differing), 'case')}: {_shorten(differing)}")
    if len(comparison.cases) < _MIN_CASES:
        text = f"with {format_plural(len(comparison.cases), 'case')}, Wilcoxon's p cannot be below 0.05"
        notes.append(f"{text}: {_MIN_CASES} are needed")
    return notes


def _truth_differs(comparison: Comparison, case: str) -> bool:
    """Return whether a case has another true volume of a target in each set, beyond the rounding of a header."""
    for target in comparison.targets:
        a, b = comparison.values(case, target, "volume_true_ml")
        if math.isfinite(a) and math.isfinite(b) and not math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6):
            return True
    return False


def format_comparison(comparison: Comparison) -> str:
    """Format the comparison as a table."""
    count = format_plural(len(comparison.cases), "case")
    lines = [f"A: {comparison.first.folder.folder_uri}", f"B: {comparison.second.folder.folder_uri}"]
    lines.append(f"{count} in common; differences are B minus A")
    heading = f"{'':<16}{'score':<14}{'A':>8}{'B':>8}{'B - A':>9}{'95% CI':>19}{'p':>9}{'higher':>8}{'lower':>7}"
    lines.append(heading)
    for target, rows in comparison.table.items():
        for name, row in rows.items():
            if not row["cases"]:
                lines.append(f"{target:<16}{name:<14}{'-':>8}")
                continue
            low, high = row["difference_ci95"] or (math.nan, math.nan)
            interval = "-" if math.isnan(low) else f"{low:+.3f} to {high:+.3f}"
            means = f"{row['first_mean']:>8.3f}{row['second_mean']:>8.3f}{row['difference']:>+9.3f}"
            counts = f"{format_p(row['p']):>9}{row['higher']:>8}{row['lower']:>7}"
            lines.append(f"{target:<16}{name:<14}{means}{interval:>19}{counts}")
    resamples = describe_bootstrap()["resamples"]
    lines.append(f"95% CI: percentile bootstrap of the mean difference, {resamples:,} resamples of the cases")
    lines.append("p: Wilcoxon signed-rank test, two-sided, not corrected for the number of rows")
    return "\n".join(lines)


def format_p(p: float | None) -> str:
    """Format a p-value; a dash if no case differs."""
    return "-" if p is None else "<0.0001" if p < 1e-4 else f"{p:.4f}"


def _to_numbers(values: tuple[float, float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _shorten(names: Any) -> str:
    ordered = list(names)
    more = f" and {len(ordered) - _MAX_SHOWN} more" if len(ordered) > _MAX_SHOWN else ""
    return ", ".join(ordered[:_MAX_SHOWN]) + more
