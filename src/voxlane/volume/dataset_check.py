"""`check`: examine every case of a dataset at its source, and compare the cases with each other.

`prepare` does the same before it makes a plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pydantic

from voxlane import settings
from voxlane.settings import record
from voxlane.store import StoreConfig
from voxlane.volume import fingerprint
from voxlane.volume.case_checks import CaseProblem, examine_case
from voxlane.volume.case_workers import CaseTask, CaseWorkers
from voxlane.volume.dataset_discovery import SourceDataset, discover
from voxlane.volume.outliers import CaseSummary, find_outliers, summarize_case

CHECKS_VERSION = 3
"""Version of the checks of a case; recorded results of another version are not used."""


@record
class CheckConfig:
    """Settings of `check`."""

    layout: Literal["kits19", "msd", "nnunet", "brats", "npy", "list"] | None = None
    """Layout of the source; detected by default."""
    description: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    """Name, channels, labels, regions or spacing that the source does not define or defines wrongly, such as
    description.regions={WT: [1,2,3], TC: [2,3], ET: [3]}."""
    workers: int = pydantic.Field(default=0, ge=0)
    """Number of processes; 0 means one per core. Each needs 300 MB and, for its case, 12 to 24 bytes per voxel and
    channel of the scan or of the plan's grid, whichever is larger: a CT of 512 x 512 x 200 took 0.9 GB at its own
    spacing and 1.5 GB on a grid of twice as many voxels."""
    case_memory_gb: float = pydantic.Field(default=0.0, ge=0)
    """Memory that one case may take; 0 means an equal part of the machine's free memory for each worker. A case that
    needs more is an error of that case."""
    case_timeout_s: float = pydantic.Field(default=1800.0, gt=0)
    """Seconds that checking or preparing one case may take. A case that takes longer is ended, and is an error."""


@dataclass(frozen=True)
class DatasetCheck:
    """The findings about a dataset."""

    source: SourceDataset
    problems: list[CaseProblem]
    """Errors and warnings by case; those of case "" concern the whole dataset."""
    summaries: Mapping[str, CaseSummary]
    """Measures of each case that can be used."""

    @property
    def bad_cases(self) -> set[str]:
        """Cases that cannot be used."""
        return {problem.case for problem in self.problems if problem.fatal}

    def to_plain(self) -> dict[str, Any]:
        """Return the report as data for JSON."""
        errors = sum(problem.fatal for problem in self.problems)
        return {
            "version": 1,
            "source": self.source.root,
            "layout": self.source.layout,
            "name": self.source.description.name,
            "cases": len(self.source.cases),
            "usable_cases": len(self.source.cases) - len(self.bad_cases),
            "errors": errors,
            "warnings": len(self.problems) - errors,
            "findings": [
                {
                    "case": problem.case,
                    "kind": problem.kind,
                    "severity": problem.severity,
                    "cause": "transient" if problem.transient else "permanent",
                    "detail": problem.detail,
                }
                for problem in self.problems
            ],
            "measures": {name: settings.to_plain(summary) for name, summary in sorted(self.summaries.items())},
        }


def check(
    src: str, options: CheckConfig | None = None, config: StoreConfig | None = None, *, progress: bool | None = None
) -> DatasetCheck:
    """Check the scans under `src`, each in a process with limits. Nothing is written. `progress` forces a progress bar
    on or off; by default it shows on a terminal."""
    options = options or CheckConfig()
    source = discover(src, config, layout=options.layout, overrides=dict(options.description))
    tasks = {case.id: make_task(source, case, config) for case in source.cases}
    with open_workers(options, progress) as workers:
        results = workers.run(check_case, tasks, {}, None, "checking")
    return collect_findings(source, results)


def make_task(source: SourceDataset, case: Any, config: StoreConfig | None, **fields: Any) -> CaseTask:
    """Return the task of checking a case; `fields` are those of preparing it."""
    listed = tuple(file for file in (*case.images, case.label) if file in source.etags)
    values = {"plan": None, "root": "", "record_key": "", "lease_token": "", **fields}
    return CaseTask(case=case, description=source.description, config=config, listed=listed, **values)


def open_workers(
    options: CheckConfig,
    progress: bool | None,
    *,
    isolate: bool = True,
    check_lease: Callable[[], None] = lambda: None,
) -> CaseWorkers:
    """Return the workers that `options` describe; `check_lease` raises when results may no longer be recorded."""
    return CaseWorkers(
        options.workers,
        int(options.case_memory_gb * 2**30),
        options.case_timeout_s,
        progress,
        isolate=isolate,
        check_lease=check_lease,
    )


def check_case(task: CaseTask) -> dict[str, Any]:
    """Read a case, report its problems, measure it and take its fingerprint. Runs in a worker."""
    loaded = examine_case(task.case, task.description, task.config, task.listed)
    summary = summarize_case(loaded)
    case_fingerprint = None
    if loaded.scan is not None and loaded.label is not None:
        seed = int.from_bytes(hashlib.sha256(task.case.id.encode()).digest()[:4], "big")
        measured = fingerprint.fingerprint_case(loaded.scan.image, loaded.label, loaded.scan.geometry.spacing, seed)
        case_fingerprint = settings.to_plain(measured)
    return {
        "problems": [asdict(problem) for problem in loaded.problems],
        "fingerprint": case_fingerprint,
        "summary": None if summary is None else settings.to_plain(summary),
    }


def collect_findings(source: SourceDataset, results: Mapping[str, Mapping[str, Any]]) -> DatasetCheck:
    """Combine the results of `check_case` for all cases of a dataset, and compare the cases with each other."""
    problems = [CaseProblem(**problem) for name in sorted(results) for problem in results[name]["problems"]]
    summaries = {
        name: settings.build(CaseSummary, result["summary"])
        for name, result in sorted(results.items())
        if result["summary"] is not None
    }
    problems += find_outliers(summaries, source.description)
    return DatasetCheck(source, sorted(problems, key=lambda problem: (problem.case, not problem.fatal)), summaries)


def is_settled(result: Mapping[str, Any]) -> bool:
    """Return whether a recorded result of `check_case` need not be checked again: the case can be used, and reading it
    went well. Whatever else was found may have passed."""
    return not any(problem["fatal"] or problem.get("transient") for problem in result["problems"])
