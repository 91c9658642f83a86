"""`prepare`: from a bucket of scans to a prepared dataset in a bucket; parallel, resumable, idempotent.

Two passes over the cases. The first checks each and takes its fingerprint; then a plan is made; the second writes each
as a chunked volume. What a case gave is kept beside the dataset (`DST/work`) under a name that holds the versions of
its files and of the plan, so that a run that was cut off, or whose source changed, repeats only what it must, as it
does where a volume is no longer what the note says. The header that makes the dataset one comes last.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
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
from voxlane.volume import check, fingerprint, normalise, planner
from voxlane.volume.case_writer import write_case
from voxlane.volume.check import Problem
from voxlane.volume.description import Description
from voxlane.volume.grid import MLPERF, grid_affine, image_to_grid, label_to_grid, plan_grid
from voxlane.volume.plan import Plan
from voxlane.volume.prepared import HEADER, VERSION, Prepared, PreparedCase, case_key, fold_of, folder, publish
from voxlane.volume.source import SourceCase, SourceDataset, discover

_FOREGROUND_VOXELS = 1000
"""Voxels kept a class and case, to draw patches around."""


@record
class PrepareConfig:
    """How scans are prepared."""

    layout: Literal["kits19", "msd", "nnunet", "brats", "list"] | None = None
    """What the source looks like; found out when left out."""
    description: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    """name, channels, labels or regions, where the source does not say them or says them wrong, such as
    description.regions={WT: [1,2,3], TC: [2,3], ET: [3]}."""
    recipe: Literal["auto", "mlperf-kits19"] = "auto"
    """auto: fingerprint and plan as nnU-Net makes them. mlperf-kits19: that benchmark's constants."""
    plan: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    """Fields of the plan to set by hand, such as plan.patch=[96,96,96] or plan.spacing=[3,1,1]; batch and network
    follow from these unless they are set too."""
    memory_gb: float = pydantic.Field(default=8.0, gt=0)
    """GPU memory that patch and network are planned for."""
    bad_cases: Literal["fail", "exclude"] = "fail"
    """What becomes of a dataset with cases that cannot be used."""
    folds: int = pydantic.Field(default=5, ge=2)
    """Parts for cross-validation; a patient's part is fixed by a hash of its name. With recipe=mlperf-kits19, fold 0 is
    that benchmark's 42 cases."""
    workers: int = pydantic.Field(default=0, ge=0)
    """Processes; 0 means one a core. Each takes 300 MB and, for its one case, 12 to 24 bytes a voxel and channel of the
    scan or of the plan's grid, whichever has more: a CT of 512 x 512 x 200 took 0.9 GB at its own spacing and 1.5 GB
    on a grid of twice as many voxels."""


@dataclass(frozen=True)
class Outcome:
    """What a preparation did."""

    prepared: Prepared
    problems: list[Problem]
    checked: int
    """Cases read and checked by this run; the others were known."""
    written: int
    """Cases written by this run."""


@dataclass(frozen=True)
class _Task:
    """One case, as a worker gets it."""

    case: SourceCase
    description: Description
    plan: Plan | None
    config: StoreConfig | None
    root: str
    """Where the dataset goes."""
    done: str
    """Key of the note that says it is done."""


def prepare(
    src: str,
    dst: str,
    how: PrepareConfig | None = None,
    config: StoreConfig | None = None,
    *,
    progress: bool | None = None,
) -> Outcome:
    """Prepare the scans under `src` into `dst`; see `PrepareConfig`.

    Raises BadCasesError, which holds the table of them, when cases cannot be used and were not to be left out.
    `progress` forces the bars on or off; by default they show on a terminal.
    """
    how = how or PrepareConfig()
    if str(uris.parse(src)).rstrip("/") == str(uris.parse(dst)).rstrip("/"):
        raise ConfigError("SRC and DST are the same", uri=dst, fix="Give the prepared dataset a place of its own")
    source = discover(src, config, layout=how.layout, describe=dict(how.description))
    store, prefix = Store(dst, config), folder(uris.parse(dst).key)
    store.check_writable(prefix + HEADER)
    _refuse_another(source, dst, config)
    notes = _Notes(store, prefix)
    with _Workers(how.workers, progress) as workers:
        said = settings.plain(source.description)
        checks = {
            case.id: _Task(
                case,
                source.description,
                None,
                config,
                dst,
                notes.key("check", case.id, _versions(source, case), said["channels"], said["labels"]),
            )
            for case in source.cases
        }
        found = notes.known(checks)
        checked = len(checks) - len(found)
        found |= workers.run(check_one, checks, found, notes, "checking")
        problems = [Problem(**p) for name in sorted(found) for p in found[name]["problems"]]
        bad = {p.case for p in problems if p.fatal}
        _refuse(bad, problems, source, how)
        good = [case for case in source.cases if case.id not in bad]
        taken = fingerprint.merge(
            [settings.build(fingerprint.CaseFingerprint, found[case.id]["fingerprint"]) for case in good]
        )
        plan = _plan(source.description, taken, how)
        writes = {
            case.id: _Task(
                case,
                source.description,
                plan,
                config,
                dst,
                notes.key("write", case.id, _versions(source, case), _decides(plan)),
            )
            for case in good
        }
        there = _Volumes(store, prefix)
        volumes = notes.known(writes, there.holds)
        todo = [name for name in writes if name not in volumes]
        if any(there.has(name) for name in todo):
            # Between the first volume that is written over and the last, the dataset is neither the old nor the new.
            store.delete(prefix + HEADER)
        volumes |= workers.run(write_one, writes, volumes, notes, "preparing")
    publish(
        store,
        prefix,
        description=source.description,
        plan=plan,
        fingerprint=settings.plain(taken),
        source={"uri": source.root, "layout": source.layout, "excluded": [asdict(p) for p in problems if p.fatal]},
        folds=how.folds,
        cases=[
            PreparedCase(
                case.id,
                case.patient,
                _fold(case, plan, how.folds),
                {"images": list(case.images), "label": case.label},
                volumes[case.id],
            )
            for case in good
        ],
    )
    return Outcome(Prepared.load(dst, config), problems, checked, len(todo))


def _fold(case: SourceCase, plan: Plan, folds: int) -> int:
    """A patient's fold; by MLPerf's recipe fold 0 is that benchmark's own held-out cases."""
    if plan.recipe != MLPERF:
        return fold_of(case.patient, folds)
    return 0 if case.id in planner.MLPERF_HELD_OUT else 1 + fold_of(case.patient, folds - 1)


def check_one(task: _Task) -> dict[str, Any]:
    """Read a case, say what is wrong with it and take its fingerprint. Runs in a worker."""
    scan, label, problems = check.load_case(task.case, task.description, task.config)
    taken = None
    if scan is not None and label is not None and not any(p.fatal for p in problems):
        seed = int.from_bytes(hashlib.sha256(task.case.id.encode()).digest()[:4], "big")
        taken = settings.plain(fingerprint.take(scan.image, label, scan.geometry.spacing, seed))
    return {"problems": [asdict(p) for p in problems], "fingerprint": taken}


def write_one(task: _Task) -> dict[str, Any]:
    """Read a case, bring it to the plan's grid and write its volume; returns where it is. Runs in a worker."""
    assert task.plan is not None
    scan, label, problems = check.load_case(task.case, task.description, task.config)
    if scan is None or label is None or any(p.fatal for p in problems):
        raise PreparedError(
            f"case {task.case.id} was good when it was checked and is not now: {problems[0].detail}",
            uri=task.case.images[0],
            fix="The source is changing: run voxlane prepare again when it is at rest",
        )
    geometry = scan.geometry
    grid = plan_grid(scan.image, geometry.spacing, task.plan)
    image = image_to_grid(scan.image, grid, task.plan)
    del scan  # so that it is not held while the next arrays are made
    codes, scale, offset = normalise.encode(image, task.plan.normalisation)
    del image
    prepared_label = label_to_grid(label, grid, task.plan)
    attributes = {
        "case": task.case.id,
        "grid": grid.to_dict(),
        "geometry": geometry.to_dict(),
        "affine": grid_affine(grid, geometry.canonical_affine, task.plan),
        "spacing": list(grid.spacing),
        "scale_factor": list(scale),
        "add_offset": list(offset),
    }
    store = Store(task.root, task.config)
    written = write_case(
        store,
        case_key(folder(uris.parse(task.root).key), task.case.id),
        image=codes,
        label=prepared_label,
        foreground=foreground_voxels(prepared_label, task.case.id),
        attributes=attributes,
        patch=task.plan.patch,
    )
    return {**written, **attributes}


def foreground_voxels(label: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.int32]:
    """Rows (value, z, y, x): for each class of `label` up to 1,000 of its voxels, chosen at random by the case's
    name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    generator = np.random.Generator(np.random.Philox(seed=seed))
    rows = [np.empty((0, 4), np.int32)]
    flat = label.reshape(-1)
    for value in np.flatnonzero(np.bincount(flat, minlength=1)[1:]) + 1:
        voxels = np.flatnonzero(flat == value)
        if len(voxels) > _FOREGROUND_VOXELS:
            voxels = np.sort(generator.choice(voxels, _FOREGROUND_VOXELS, replace=False))
        places = np.stack(np.unravel_index(voxels, label.shape), axis=1).astype(np.int32)
        rows.append(np.concatenate([np.full((len(voxels), 1), value, np.int32), places], axis=1))
    return np.concatenate(rows)


def _plan(description: Description, taken: fingerprint.Fingerprint, how: PrepareConfig) -> Plan:
    if how.recipe == MLPERF:
        if len(description.channels) != 1:
            raise ConfigError(
                f"recipe: mlperf-kits19 is for one CT channel, this dataset has {len(description.channels)}",
                fix="Use recipe=auto",
            )
        plan = planner.mlperf_kits19()
    else:
        plan = planner.make_plan(description, taken, memory_gb=how.memory_gb)
    given = dict(how.plan)
    if not given:
        return plan
    changed = _changed(plan, given)
    network = given.get("network", {})
    if how.recipe != MLPERF and given.keys() & {"spacing", "patch"} and "strides" not in network:
        sizes: dict[str, Any] = {name: getattr(changed, name) for name in ("spacing", "patch") if name in given}
        plan = planner.make_plan(description, taken, memory_gb=how.memory_gb, **sizes)
        if "patch" in given and plan.patch != changed.patch:
            raise ConfigError(
                f"plan.patch: {list(changed.patch)} cannot be halved as often as the network does it",
                fix=f"Take {list(plan.patch)}",
            )
        changed = _changed(plan, given)
    if len(changed.normalisation) != len(description.channels):
        raise ConfigError(
            f"plan.normalisation: {len(changed.normalisation)} for {len(description.channels)} channels: "
            "this plan was made for another dataset"
        )
    return changed


def _changed(plan: Plan, given: Mapping[str, Any]) -> Plan:
    """`plan` with the given fields."""
    own = settings.plain(plan)
    if isinstance(network := given.get("network"), Mapping):
        given = {**given, "network": {**own["network"], **network}}
    try:
        changed = settings.build(Plan, {**own, **given})
    except ConfigError as error:
        raise ConfigError(f"plan.{error}") from None
    if changed.recipe != plan.recipe:
        raise ConfigError(
            f"plan.recipe: {changed.recipe!r} in a plan that is made by {plan.recipe!r}",
            fix=f"Set recipe={changed.recipe}, or leave plan.recipe out",
        )
    return changed


def _decides(plan: Plan) -> dict[str, Any]:
    """The part of a plan that the prepared volumes depend on."""
    own = settings.plain(plan)
    return {name: own[name] for name in ("recipe", "spacing", "normalisation", "patch", "pad_to_patch")}


def _refuse_another(source: SourceDataset, dst: str, config: StoreConfig | None) -> None:
    """Raise when `dst` holds what was prepared from other scans: runs may be using it."""
    try:
        there = Prepared.load(dst, config)
    except PreparedError:
        return  # nothing whole is there
    if there.source["uri"].rstrip("/") != source.root.rstrip("/"):
        raise PreparedError(
            f"{there.description.name}, prepared from {there.source['uri']}, is here",
            uri=there.uri,
            fix="Choose another DST, or delete this one first",
        )


def _refuse(bad: set[str], problems: list[Problem], source: SourceDataset, how: PrepareConfig) -> None:
    """Raise unless the good cases are enough."""
    if not bad:
        return
    if how.bad_cases == "fail" or len(bad) == len(source.cases):
        none = len(bad) == len(source.cases)
        what = "no case can be used" if none else f"{len(bad)} of {len(source.cases)} cases cannot be used"
        described = {"label-values", "channels"} & {p.kind for p in problems if p.fatal}
        advice = ["Mend them"]
        advice += ["say what they hold with description.labels={...} or description.channels=[...]"] * bool(described)
        advice += ["leave them out with bad_cases=exclude"] * (not none)
        raise BadCasesError(f"{what}\n{check.table(problems)}\n{', or '.join(advice)}", uri=source.root)


def _versions(source: SourceDataset, case: SourceCase) -> list[str]:
    """What must not change for a case's notes to hold."""
    files = [*case.images, *([case.label] if case.label else [])]
    return [f"{file}@{source.etags.get(file, '')}" for file in files]


class _Notes:
    """What is done already: small objects below `DST/work`, one a case and pass, named by what they depend on."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._folder = f"{prefix}work/"
        self._known: set[str] = set()
        for page in store.list_pages(self._folder):
            self._known.update(page.column("path").to_pylist())

    def key(self, stage: str, case: str, *depends: Any) -> str:
        """Where the note of a case is."""
        digest = hashlib.sha256(json.dumps([VERSION, depends], sort_keys=True).encode()).hexdigest()[:16]
        return f"{self._folder}{stage}/{uris.quote(case)}-{digest}.json"

    def known(
        self, tasks: Mapping[str, _Task], holds: Callable[[str, Any], bool] = lambda name, note: True
    ) -> dict[str, dict[str, Any]]:
        """The notes of the cases that are done, fetched together, as far as they still hold."""
        asked = {
            name: self._store.submit(self._store.get, task.done)
            for name, task in tasks.items()
            if task.done in self._known
        }
        found = {}
        for name, future in asked.items():
            try:
                note = json.loads(bytes(future.result()))
            except ValueError:  # damaged outside our hands: the case is done again
                continue
            if holds(name, note):
                found[name] = note
        return found

    def write(self, key: str, value: Any) -> None:
        """Note that a case is done."""
        self._store.put(key, json.dumps(value).encode())


class _Volumes:
    """The objects below `DST/cases` as they are now."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._prefix = prefix
        self._found: dict[str, dict[str, tuple[int, str]]] = {}
        root = f"{prefix}cases/"
        for page in store.list_pages(root):
            for key, size, etag in zip(*(page.column(c).to_pylist() for c in ("path", "size", "e_tag")), strict=True):
                case, _, name = key[len(root) :].partition("/")
                self._found.setdefault(root + case, {})[name] = size, _bare(etag)

    def has(self, case: str) -> bool:
        """Whether anything of a case is there."""
        return case_key(self._prefix, case) in self._found

    def holds(self, case: str, note: Any) -> bool:
        """Whether a case is there as its note says, every object in the version that was written."""
        objects = self._found.get(case_key(self._prefix, case), {})
        return "zarr.json" in objects and all(
            objects.get(name) == (size, _bare(etag)) for name, size, etag in note["objects"]
        )


def _bare(etag: str | None) -> str:
    return (etag or "").strip('"')


class _Workers:
    """Processes that work on cases; with one, the work is done here."""

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
        self,
        work: Callable[[_Task], dict[str, Any]],
        tasks: Mapping[str, _Task],
        known: Mapping[str, Any],
        notes: _Notes,
        what: str,
    ) -> dict[str, dict[str, Any]]:
        """What `work` gives for every case that is not known; each is noted as soon as it is done."""
        results = {}
        bar = tqdm(total=len(tasks), initial=len(known), desc=what, unit="case", disable=self._hidden())
        with bar:
            for name, result in self._results(work, {n: task for n, task in tasks.items() if n not in known}):
                notes.write(tasks[name].done, result)
                results[name] = result
                bar.update()
        return results

    def _hidden(self) -> bool | None:
        """As tqdm takes it: None shows a bar on a terminal only."""
        return None if self._progress is None else not self._progress

    def _results(
        self, work: Callable[[_Task], dict[str, Any]], tasks: Mapping[str, _Task]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._count == 1 or len(tasks) <= 1:
            for name, task in tasks.items():
                yield name, work(task)
            return
        if self._pool is None:
            # Not forked: what this process has opened would not survive that.
            self._pool = ProcessPoolExecutor(
                min(self._count, len(tasks)), multiprocessing.get_context("spawn"), _enter_worker
            )
        names: dict[Future[dict[str, Any]], str] = {}
        try:
            names.update((self._pool.submit(work, task), name) for name, task in tasks.items())
            for future in as_completed(names):
                yield names[future], future.result()
        except (BrokenProcessPool, BrokenPipeError):  # the latter when one dies before it has begun
            raise PreparedError(
                "a worker process was killed, most likely for want of memory",
                fix=f"Run the same command with fewer workers (workers={max(1, self._count // 2)}): it goes on",
            ) from None
        finally:
            for future in names:
                future.cancel()


def _enter_worker() -> None:
    """Each worker is one of many: no threads of its own."""
    import signal

    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which says so once
