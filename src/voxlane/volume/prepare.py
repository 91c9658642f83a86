"""`prepare`: turn a bucket of scans into a prepared dataset, in parallel; interrupted runs can be resumed.

Preparation makes two passes over the cases. The first checks each case and takes its fingerprint; then a plan is made;
the second writes each case as a chunked volume. The result of each pass is recorded beside the dataset (`DST/work`),
under a name that contains the versions of the case's files and of the plan. So a run that was interrupted, or whose
source changed, repeats only what it must; so does a run that finds a volume changed. The dataset's header is written
last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pydantic
from tqdm import tqdm

from voxlane import settings
from voxlane import uri as uris
from voxlane.errors import BadCasesError, ConfigError, PreparedError
from voxlane.settings import record
from voxlane.store import Store, StoreConfig
from voxlane.store.staging.sources import strip_quotes
from voxlane.volume import case_checks, fingerprint, normalise, planner, prepared_dataset
from voxlane.volume.case_checks import CaseProblem
from voxlane.volume.case_writer import write_case
from voxlane.volume.dataset_discovery import SourceCase, SourceDataset, discover
from voxlane.volume.description import Description
from voxlane.volume.formats.npy import NPY_SUFFIX
from voxlane.volume.grid import MLPERF_RECIPE, compute_grid_affine, image_to_grid, label_to_grid, plan_grid
from voxlane.volume.plan import Plan
from voxlane.volume.prepared_dataset import VERSION, Prepared, PreparedCase, as_prefix, case_key

_CHECK_WORKERS_S = 5.0
"""Seconds without a result after which workers are checked."""
_FOREGROUND_VOXELS = 1000
"""Voxels per class and case that are stored to draw patches around."""


@record
class PrepareConfig:
    """Settings of `prepare`."""

    layout: Literal["kits19", "msd", "nnunet", "brats", "npy", "list"] | None = None
    """Layout of the source; detected by default."""
    description: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    """Name, channels, labels, regions or spacing that the source does not define or defines wrongly, such as
    description.regions={WT: [1,2,3], TC: [2,3], ET: [3]}."""
    recipe: Literal["auto", "mlperf-kits19"] = "auto"
    """auto: fingerprint and plan as in nnU-Net. mlperf-kits19: the constants of that benchmark."""
    plan: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    """Fields of the plan to override, such as plan.patch=[96,96,96] or plan.spacing=[3,1,1]; batch and network follow
    from these unless overridden too."""
    memory_gb: float = pydantic.Field(default=8.0, gt=0)
    """GPU memory for which patch and network are planned."""
    bad_cases: Literal["fail", "exclude"] = "fail"
    """Whether to fail or to exclude cases that cannot be used."""
    folds: int = pydantic.Field(default=5, ge=2)
    """Number of folds for cross-validation; a hash of a patient's name determines its fold. With recipe=mlperf-kits19,
    fold 0 is that benchmark's 42 cases."""
    workers: int = pydantic.Field(default=0, ge=0)
    """Number of processes; 0 means one per core. Each needs 300 MB and, for its case, 12 to 24 bytes per voxel and
    channel of the scan or of the plan's grid, whichever is larger: a CT of 512 x 512 x 200 took 0.9 GB at its own
    spacing and 1.5 GB on a grid of twice as many voxels."""


@dataclass(frozen=True)
class PrepareResult:
    """Result of `prepare`."""

    prepared: Prepared
    problems: list[CaseProblem]
    cases_checked: int
    """Number of cases that this run read and checked; the others had been checked before."""
    cases_written: int
    assumes_spacing: bool
    """Whether the spacing of files that store none was assumed to be 1 mm."""


@dataclass(frozen=True)
class _Task:
    """One case for a worker."""

    case: SourceCase
    description: Description
    plan: Plan | None
    config: StoreConfig | None
    root: str
    record_key: str
    """Key of the record that the case is done."""


_Work = Callable[[_Task], dict[str, Any]]


def prepare(
    src: str,
    dst: str,
    options: PrepareConfig | None = None,
    config: StoreConfig | None = None,
    *,
    progress: bool | None = None,
) -> PrepareResult:
    """Prepare the scans under `src` as a dataset at `dst`.

    Raises BadCasesError with a table of the problems if cases cannot be used and are not to be excluded. `progress`
    forces progress bars on or off; by default they show on a terminal.
    """
    options = options or PrepareConfig()
    if str(uris.parse(src)).rstrip("/") == str(uris.parse(dst)).rstrip("/"):
        raise ConfigError("SRC and DST are the same", uri=dst, fix="Use another URI for the prepared dataset")
    source = discover(src, config, layout=options.layout, overrides=dict(options.description))
    store, prefix = Store(dst, config), as_prefix(uris.parse(dst).key)
    store.check_writable(prefix + prepared_dataset.HEADER)
    _check_destination(source, dst, config)
    recorded_keys = _list_keys(store, f"{prefix}work/")

    def make_tasks(stage: str, cases: Iterable[SourceCase], plan: Plan | None, *depends: Any) -> dict[str, _Task]:
        tasks = {}
        for case in cases:
            versions = [f"{file}@{source.etags.get(file, '')}" for file in (*case.images, case.label) if file]
            digest = hashlib.sha256(json.dumps([VERSION, [versions, *depends]], sort_keys=True).encode()).hexdigest()
            key = f"{prefix}work/{stage}/{uris.quote(case.id)}-{digest[:16]}.json"
            tasks[case.id] = _Task(case, source.description, plan, config, dst, key)
        return tasks

    with _Workers(options.workers, progress) as workers:
        description, spacing = settings.to_plain(source.description), _given_spacing(source)
        checks = make_tasks("check", source.cases, None, description["channels"], description["labels"], *spacing)
        results = _read_results(store, checks, recorded_keys)
        cases_checked = len(checks) - len(results)
        results |= workers.run(check_case, checks, results, store, "checking")
        problems = [CaseProblem(**problem) for name in sorted(results) for problem in results[name]["problems"]]
        bad = {problem.case for problem in problems if problem.fatal}
        _check_usable(bad, problems, source, options)
        good = [case for case in source.cases if case.id not in bad]
        merged = fingerprint.merge_cases(
            settings.build(fingerprint.CaseFingerprint, results[case.id]["fingerprint"]) for case in good
        )
        plan = _make_plan(source.description, merged, options)
        volume_fields = ("recipe", "spacing", "normalisation", "patch", "pad_to_patch")
        volume_settings = {name: settings.to_plain(plan)[name] for name in volume_fields}
        writes = make_tasks("write", good, plan, volume_settings, *spacing)
        stored = _list_volumes(store, prefix)
        volumes = {
            name: result
            for name, result in _read_results(store, writes, recorded_keys).items()
            if _is_current(result, stored.get(case_key(prefix, name), {}))
        }
        remaining = [name for name in writes if name not in volumes]
        if any(case_key(prefix, name) in stored for name in remaining):
            # While volumes are being overwritten, the dataset is neither the old nor the new one.
            store.delete(prefix + prepared_dataset.HEADER)
        volumes |= workers.run(write_prepared_case, writes, volumes, store, "preparing")
    prepared_dataset.publish_dataset(
        store,
        prefix,
        description=source.description,
        plan=plan,
        fingerprint=settings.to_plain(merged),
        source={"uri": source.root, "layout": source.layout, "excluded": [asdict(p) for p in problems if p.fatal]},
        folds=options.folds,
        cases=[
            PreparedCase(
                case.id,
                case.patient,
                _choose_fold(case, plan, options.folds),
                {"images": list(case.images), "label": case.label},
                volumes[case.id],
            )
            for case in good
        ],
    )
    prepared = Prepared.load(dst, config)
    return PrepareResult(prepared, problems, cases_checked, len(remaining), _assumes_spacing(source))


def _given_spacing(source: SourceDataset) -> tuple[Any, ...]:
    """Return what identifies the spacing of files that store none; empty unless the description has it, so that the
    records of other datasets stay valid."""
    return () if source.description.spacing is None else (source.description.spacing,)


def _assumes_spacing(source: SourceDataset) -> bool:
    """Return whether there are files that store no spacing, and the description does not have it either."""
    has_npy = any(image.lower().endswith(NPY_SUFFIX) for case in source.cases for image in case.images)
    return has_npy and source.description.spacing is None


def _choose_fold(case: SourceCase, plan: Plan, folds: int) -> int:
    """Return a case's fold; with MLPerf's recipe, fold 0 is that benchmark's held-out cases."""
    if plan.recipe != MLPERF_RECIPE:
        return prepared_dataset.fold_for_patient(case.patient, folds)
    return 0 if case.id in planner.MLPERF_HELD_OUT else 1 + prepared_dataset.fold_for_patient(case.patient, folds - 1)


def check_case(task: _Task) -> dict[str, Any]:
    """Read a case, report its problems and take its fingerprint. Runs in a worker."""
    scan, label, problems = case_checks.load_case(task.case, task.description, task.config)
    case_fingerprint = None
    if scan is not None and label is not None:
        seed = int.from_bytes(hashlib.sha256(task.case.id.encode()).digest()[:4], "big")
        measured = fingerprint.fingerprint_case(scan.image, label, scan.geometry.spacing, seed)
        case_fingerprint = settings.to_plain(measured)
    return {"problems": [asdict(p) for p in problems], "fingerprint": case_fingerprint}


def write_prepared_case(task: _Task) -> dict[str, Any]:
    """Read a case, resample it to the plan's grid, write its volume and return its metadata. Runs in a worker."""
    assert task.plan is not None
    scan, label, problems = case_checks.load_case(task.case, task.description, task.config)
    if scan is None or label is None:
        raise PreparedError(
            f"case {task.case.id} was usable when it was checked and is not any more: {problems[0].detail}",
            uri=task.case.images[0],
            fix="The source is changing: run voxlane prepare again once it no longer does",
        )
    geometry = scan.geometry
    grid = plan_grid(scan.image, geometry.spacing, task.plan)
    image = image_to_grid(scan.image, grid, task.plan)
    del scan  # to free its memory before the next arrays are allocated
    codes, scale, offset = normalise.encode(image, task.plan.normalisation)
    del image
    prepared_label = label_to_grid(label, grid, task.plan)
    attributes = {
        "case": task.case.id,
        "grid": asdict(grid),
        "geometry": asdict(geometry),
        "affine": compute_grid_affine(grid, geometry.canonical_affine, task.plan),
        "spacing": list(grid.spacing),
        "scale_factor": list(scale),
        "add_offset": list(offset),
    }
    metadata = write_case(
        Store(task.root, task.config),
        case_key(as_prefix(uris.parse(task.root).key), task.case.id),
        image=codes,
        label=prepared_label,
        foreground=foreground_voxels(prepared_label, task.case.id),
        attributes=attributes,
        patch=task.plan.patch,
    )
    return {**metadata, **attributes}


def foreground_voxels(label: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.int32]:
    """Return rows (value, z, y, x) of up to 1,000 voxels per class of `label`, chosen at random with the case's name as
    the seed."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    generator = np.random.Generator(np.random.Philox(seed=seed))
    rows = [np.empty((0, 4), np.int32)]
    flat = label.reshape(-1)
    for value in np.flatnonzero(np.bincount(flat, minlength=1)[1:]) + 1:
        voxels = np.flatnonzero(flat == value)
        if len(voxels) > _FOREGROUND_VOXELS:
            voxels = np.sort(generator.choice(voxels, _FOREGROUND_VOXELS, replace=False))
        coordinates = np.stack(np.unravel_index(voxels, label.shape), axis=1).astype(np.int32)
        rows.append(np.concatenate([np.full((len(voxels), 1), value, np.int32), coordinates], axis=1))
    return np.concatenate(rows)


def _make_plan(description: Description, merged: fingerprint.Fingerprint, options: PrepareConfig) -> Plan:
    if options.recipe == MLPERF_RECIPE:
        if len(description.channels) != 1:
            raise ConfigError(
                f"recipe: mlperf-kits19 needs one CT channel, this dataset has {len(description.channels)} channels",
                fix="Use recipe=auto",
            )
        plan = planner.make_mlperf_plan()
    else:
        plan = planner.make_plan(description, merged, memory_gb=options.memory_gb)
    overrides = dict(options.plan)
    if not overrides:
        return plan
    changed = _override_plan(plan, overrides)
    network = overrides.get("network", {})
    if options.recipe != MLPERF_RECIPE and overrides.keys() & {"spacing", "patch"} and "strides" not in network:
        sizes: dict[str, Any] = {name: getattr(changed, name) for name in ("spacing", "patch") if name in overrides}
        plan = planner.make_plan(description, merged, memory_gb=options.memory_gb, **sizes)
        if "patch" in overrides and plan.patch != changed.patch:
            raise ConfigError(
                f"plan.patch: {list(changed.patch)} cannot be halved as often as the network needs",
                fix=f"Use {list(plan.patch)}",
            )
        changed = _override_plan(plan, overrides)
    if len(changed.normalisation) != len(description.channels):
        raise ConfigError(
            f"plan.normalisation: {len(changed.normalisation)} entries for {len(description.channels)} channels; "
            "this plan was made for another dataset"
        )
    return changed


def _override_plan(plan: Plan, overrides: Mapping[str, Any]) -> Plan:
    """Return `plan` with some fields replaced."""
    values = settings.to_plain(plan)
    if isinstance(network := overrides.get("network"), Mapping):
        overrides = {**overrides, "network": {**values["network"], **network}}
    try:
        changed = settings.build(Plan, {**values, **overrides})
    except ConfigError as error:
        raise ConfigError(f"plan.{error}") from None
    if changed.recipe != plan.recipe:
        raise ConfigError(
            f"plan.recipe: {changed.recipe!r} does not match recipe={plan.recipe}",
            fix=f"Set recipe={changed.recipe}, or omit plan.recipe",
        )
    return changed


def _check_destination(source: SourceDataset, dst: str, config: StoreConfig | None) -> None:
    """Raise if `dst` holds a dataset prepared from other scans, because runs may be using it."""
    try:
        existing = Prepared.load(dst, config)
    except PreparedError:
        return  # no complete dataset
    if existing.source["uri"].rstrip("/") != source.root.rstrip("/"):
        raise PreparedError(
            f"DST already holds {existing.description.name}, prepared from {existing.source['uri']}",
            uri=existing.uri,
            fix="Choose another DST, or delete this one first",
        )


def _check_usable(bad: set[str], problems: list[CaseProblem], source: SourceDataset, options: PrepareConfig) -> None:
    """Raise if cases are bad and are not to be excluded, or if all are bad."""
    all_bad = len(bad) == len(source.cases)
    if not bad or (options.bad_cases == "exclude" and not all_bad):
        return
    summary = "no case can be used" if all_bad else f"{len(bad)} of {len(source.cases)} cases cannot be used"
    advice = ["Correct them"]
    if any(p.fatal and p.kind in ("label-values", "channels") for p in problems):
        advice.append("describe their content with description.labels={...} or description.channels=[...]")
    if not all_bad:
        advice.append("exclude them with bad_cases=exclude")
    message = f"{summary}\n{case_checks.format_problems(problems)}\n{', or '.join(advice)}"
    raise BadCasesError(message, uri=source.root)


def _list_keys(store: Store, prefix: str) -> set[str]:
    return {key for page in store.list_pages(prefix) for key in page.column("path").to_pylist()}


def _read_results(store: Store, tasks: Mapping[str, _Task], recorded_keys: set[str]) -> dict[str, dict[str, Any]]:
    """Fetch the recorded results of the tasks, concurrently."""
    keys = {name: task.record_key for name, task in tasks.items() if task.record_key in recorded_keys}
    futures = {name: store.submit(store.get, key) for name, key in keys.items()}
    results = {}
    for name, future in futures.items():
        with contextlib.suppress(ValueError):  # a damaged record: the case is processed again
            results[name] = json.loads(bytes(future.result()))
    return results


def _is_current(result: Mapping[str, Any], objects: Mapping[str, tuple[int, str | None]]) -> bool:
    """Return whether the current objects of a case are those that were written with this result."""
    written = {file: (size, strip_quotes(etag)) for file, size, etag in result["objects"]}
    return "zarr.json" in objects and written.items() <= objects.items()


def _list_volumes(store: Store, prefix: str) -> dict[str, dict[str, tuple[int, str | None]]]:
    """Return size and version of the current objects below `DST/cases`, by the key of their case and their name."""
    root = f"{prefix}cases/"
    volumes: dict[str, dict[str, tuple[int, str | None]]] = {}
    for page in store.list_pages(root):
        for key, size, etag in zip(*(page.column(c).to_pylist() for c in ("path", "size", "e_tag")), strict=True):
            case, _, name = key[len(root) :].partition("/")
            volumes.setdefault(root + case, {})[name] = size, strip_quotes(etag)
    return volumes


class _Workers:
    """Worker processes for cases; a single worker is this process."""

    def __init__(self, count: int, progress: bool | None) -> None:
        self._count = count or os.cpu_count() or 1
        self._progress = progress
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(
        self, work: _Work, tasks: Mapping[str, _Task], known_results: Mapping[str, Any], store: Store, title: str
    ) -> dict[str, dict[str, Any]]:
        """Return the result of `work` for every case without a known result, and record each in `store` immediately."""
        results = {}
        disable = None if self._progress is None else not self._progress
        with tqdm(total=len(tasks), initial=len(known_results), desc=title, unit="case", disable=disable) as bar:
            for name, result in self._results(work, {n: task for n, task in tasks.items() if n not in known_results}):
                store.put(tasks[name].record_key, json.dumps(result).encode())
                results[name] = result
                bar.update()
        return results

    def _results(self, work: _Work, tasks: Mapping[str, _Task]) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._count == 1 or len(tasks) <= 1:
            for name, task in tasks.items():
                yield name, work(task)
            return
        if self._pool is None:
            # Spawned, not forked, because this process's connections would not survive a fork.
            self._pool = ProcessPoolExecutor(
                min(self._count, len(tasks)), multiprocessing.get_context("spawn"), _init_worker
            )
        try:
            names = {self._pool.submit(work, task): name for name, task in tasks.items()}
            running = set(names)
            while running:
                done, running = wait(running, timeout=_CHECK_WORKERS_S, return_when=FIRST_COMPLETED)
                for future in done:
                    yield names[future], future.result()
                if not done:
                    _break_stuck_pool(self._pool)
        except (BrokenProcessPool, BrokenPipeError):  # the latter if a worker dies during its start
            raise PreparedError(
                "a worker process was killed, most likely because memory ran out",
                fix=f"Run the same command with fewer workers (workers={max(1, self._count // 2)}); it will resume",
            ) from None


def _break_stuck_pool(pool: Any) -> None:
    """Let a pool notice a worker that was killed while it sent a result. The pool would wait for the rest of the result
    for ever, because it holds the other end of the pipe too (seen with CPython 3.11); it offers no public way out."""
    workers = list(pool._processes.values())
    if all(worker.is_alive() for worker in workers):
        return
    for worker in workers:
        worker.kill()
    pool._result_queue._writer.close()


def _init_worker() -> None:
    """Limit a worker to one thread, because there is one worker per core."""
    import signal

    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
