"""`prepare`: turn a bucket of scans into a prepared dataset, in parallel; interrupted runs can be resumed.

Preparation makes two passes over the cases. The first checks each case and takes its fingerprint; then a plan is made;
the second writes each case as a chunked volume. The result of each pass is recorded beside the dataset (`DST/work`),
under a name that contains the versions of the case's files and of the plan. So a run that was interrupted, or whose
source changed, repeats only what it must; so does a run that finds a volume changed. Cases that could not be used are
always checked again, because what was wrong may have passed. The dataset's header is written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pydantic

from voxlane import settings
from voxlane import uri as uris
from voxlane.errors import BadCasesError, ConfigError, PreparedError
from voxlane.settings import record
from voxlane.store import Store, StoreConfig
from voxlane.store.bucket import ignore_missing_object
from voxlane.store.lease import Lease, check_token
from voxlane.store.staging.sources import strip_quotes
from voxlane.volume import case_checks, fingerprint, normalise, planner, prepared_dataset
from voxlane.volume.case_checks import CaseProblem
from voxlane.volume.case_workers import CaseTask
from voxlane.volume.case_writer import write_case
from voxlane.volume.dataset_check import (
    CHECKS_VERSION,
    CheckConfig,
    DatasetCheck,
    check_case,
    collect_findings,
    is_settled,
    make_task,
    open_workers,
)
from voxlane.volume.dataset_discovery import SourceCase, SourceDataset, discover
from voxlane.volume.dataset_index import OBJECT_LISTS, VERSION, read_objects
from voxlane.volume.description import Description
from voxlane.volume.formats.npy import NPY_SUFFIX
from voxlane.volume.grid import MLPERF_RECIPE, compute_grid_affine, image_to_grid, label_to_grid, plan_grid
from voxlane.volume.plan import Plan, Resampling
from voxlane.volume.prepared_dataset import Prepared, PreparedCase, as_prefix, case_key
from voxlane.volume.resample import compute_new_shape
from voxlane.volume.scan_checks import check_growth
from voxlane.volume.split_files import load_groups, load_split
from voxlane.volume.splits import BALANCED, HASH, Split, assign_folds

CHECK_REPORT = "check.json"
"""Name of the report of the checks, beside the header of the prepared dataset."""
_FOREGROUND_VOXELS = 1000
"""Voxels per class and case that are stored to draw patches around."""


@record
class PrepareConfig(CheckConfig):
    """Settings of `prepare`."""

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
    """Number of folds for cross-validation; fewer if there are fewer patients. With recipe=mlperf-kits19, fold 0 is
    that benchmark's 42 cases."""
    split: str | None = None
    """Cases that each fold holds out. balanced: equal numbers of patients in each fold, and every class about equally
    often. hash: a hash of a patient's name determines its fold, so that added cases do not move others. Or the URI of a
    .json or .csv file that lists the split, such as nnU-Net's splits_final.json. null: balanced, or hash for a dataset
    that has such folds already."""
    groups: str | None = None
    """URI of a .json or .csv file that names the group of each case, such as its site. Cases of a group are in the same
    fold, as those of a patient always are. null: no groups."""


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


def prepare(
    src: str,
    dst: str,
    options: PrepareConfig | None = None,
    config: StoreConfig | None = None,
    *,
    progress: bool | None = None,
    recheck: bool = False,
    isolate: bool = True,
) -> PrepareResult:
    """Prepare the scans under `src` as a dataset at `dst`.

    Raises BadCasesError with a table of the problems if cases cannot be used and are not to be excluded. `progress`
    forces progress bars on or off; by default they show on a terminal. Cases that earlier runs found good are not
    checked again, unless `recheck` is set; bad cases always are. `isolate=False` lets a single worker be this process,
    which has no limits of time and memory.
    """
    options = options or PrepareConfig()
    source = _open_source(src, dst, options, config)
    store, prefix = Store(dst, config), as_prefix(uris.parse(dst).key)
    store.check_writable(prefix + prepared_dataset.HEADER)
    existing = _check_destination(source, dst, config)
    groups = _load_groups(source, options, config)
    lease = Lease(store, prefix, "dataset")

    def make_tasks(stage: str, cases: Iterable[SourceCase], plan: Plan | None, *depends: Any) -> dict[str, CaseTask]:
        tasks = {}
        for case in cases:
            versions = [f"{file}@{source.etags.get(file, '')}" for file in (*case.images, case.label) if file]
            digest = hashlib.sha256(json.dumps([VERSION, [versions, *depends]], sort_keys=True).encode()).hexdigest()
            key = f"{prefix}work/{stage}/{uris.quote(case.id)}-{digest[:16]}.json"
            tasks[case.id] = make_task(
                source, case, config, plan=plan, root=dst, record_key=key, lease_token=lease.token
            )
        return tasks

    with lease, open_workers(options, progress, isolate=isolate, check_lease=lease.check) as workers:
        recorded_keys = _list_keys(store, f"{prefix}work/")
        description, spacing = settings.to_plain(source.description), _given_spacing(source)
        checks = make_tasks(
            "check", source.cases, None, CHECKS_VERSION, description["channels"], description["labels"], *spacing
        )
        earlier = _read_results(store, checks, recorded_keys)
        results = {} if recheck else {name: result for name, result in earlier.items() if is_settled(result)}
        cases_checked = len(checks) - len(results)
        results |= workers.run(check_case, checks, results, store, "checking")
        findings = collect_findings(source, results)
        _write_report(store, prefix, findings)
        findings, merged, plan = _make_plan_of_usable(findings, results, options, workers.case_memory_bytes)
        _write_report(store, prefix, findings)
        _check_usable(findings, options)
        assert plan is not None
        assert merged is not None
        problems, bad = findings.problems, findings.bad_cases
        good = [case for case in source.cases if case.id not in bad]
        writes = make_tasks("write", good, plan, _select_volume_settings(plan), *spacing)
        stored = _list_volumes(store, prefix)
        # A case whose content was found to differ from what an earlier run read is written again.
        differing = {name for name, result in earlier.items() if result["fingerprint"] != results[name]["fingerprint"]}
        written = _read_results(store, writes, recorded_keys)
        volumes = _select_current(written, differing, stored, prefix)
        split = _make_split(findings, good, groups, plan, existing, options, config)
        remaining = [name for name in writes if name not in volumes]
        if any(case_key(prefix, name) in stored for name in remaining):
            lease.check()
            # While volumes are being overwritten, the dataset is neither the old nor the new one.
            store.delete(prefix + prepared_dataset.HEADER)
        volumes |= workers.run(write_prepared_case, writes, volumes, store, "preparing")
        _check_written(volumes)
        lease.check()
        numbers = split.numbers
        prepared_dataset.publish_dataset(
            store,
            prefix,
            description=source.description,
            plan=plan,
            fingerprint=settings.to_plain(merged),
            source={"uri": source.root, "layout": source.layout, "excluded": [asdict(p) for p in problems if p.fatal]},
            folds=len(split.folds),
            split_record=split.to_record(),
            cases=[
                PreparedCase(
                    case.id,
                    case.patient,
                    numbers[case.id],
                    {"images": list(case.images), "label": case.label},
                    volumes[case.id],
                )
                for case in good
            ],
        )
    prepared = Prepared.load(dst, config)
    return PrepareResult(prepared, problems, cases_checked, len(remaining), _assumes_spacing(source))


def _open_source(src: str, dst: str, options: PrepareConfig, config: StoreConfig | None) -> SourceDataset:
    """Return the dataset to prepare, which cannot be its own destination."""
    if str(uris.parse(src)).rstrip("/") == str(uris.parse(dst)).rstrip("/"):
        raise ConfigError("SRC and DST are the same", uri=dst, fix="Use another URI for the prepared dataset")
    return discover(src, config, layout=options.layout, overrides=dict(options.description))


def _select_current(
    written: Mapping[str, dict[str, Any]],
    differing: Collection[str],
    stored: Mapping[str, dict[str, tuple[int, str | None]]],
    prefix: str,
) -> dict[str, dict[str, Any]]:
    """Return the volumes that earlier runs have written, are still stored, and do not belong to `differing` cases."""
    return {
        name: result
        for name, result in written.items()
        if name not in differing and _is_current(result, stored.get(case_key(prefix, name), {}))
    }


def _given_spacing(source: SourceDataset) -> tuple[Any, ...]:
    """Return what identifies the spacing of files that store none; empty unless the description has it, so that the
    records of other datasets stay valid."""
    return () if source.description.spacing is None else (source.description.spacing,)


def _assumes_spacing(source: SourceDataset) -> bool:
    """Return whether there are files that store no spacing, and the description does not have it either."""
    has_npy = any(image.lower().endswith(NPY_SUFFIX) for case in source.cases for image in case.images)
    return has_npy and source.description.spacing is None


def _load_groups(source: SourceDataset, options: PrepareConfig, config: StoreConfig | None) -> dict[str, str]:
    """Return the group of each case, none without a file of groups. Raises for a mistake in that file or in the file of
    the split, before the scans are read."""
    patients = {case.id: case.patient for case in source.cases}
    groups = {} if options.groups is None else load_groups(options.groups, list(patients), config)
    if options.split not in (None, BALANCED, HASH):
        load_split(options.split, patients, groups=groups, config=config)
    return groups


def _select_volume_settings(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that determine the prepared volumes."""
    fields: tuple[str, ...] = ("recipe", "spacing", "normalisation", "patch", "pad_to_patch")
    if plan.resampling != Resampling():  # otherwise the settings, and so the volumes, are those of older versions
        fields = (*fields, "resampling")
    return {name: settings.to_plain(plan)[name] for name in fields}


def _make_split(
    findings: DatasetCheck,
    cases: Iterable[SourceCase],
    groups: Mapping[str, str],
    plan: Plan,
    existing: Prepared | None,
    options: PrepareConfig,
    config: StoreConfig | None,
) -> Split:
    """Return the split of the usable cases; with MLPerf's recipe, fold 0 is that benchmark's held-out cases."""
    method, patients = options.split, {case.id: case.patient for case in cases}
    if method is None:
        method = existing.case_split.method if existing and existing.case_split.method == HASH else BALANCED
    own_groups = {case: groups[case] for case in patients if case in groups}
    if method not in (BALANCED, HASH):
        return load_split(method, patients, excluded=findings.bad_cases, groups=own_groups, config=config)
    if method == HASH and groups:
        raise ConfigError("groups: a hash of the patient's name cannot keep groups together", fix="Use split=balanced")
    return assign_folds(
        patients,
        options.folds,
        method=method,
        groups=own_groups,
        classes={name: summary.label_voxels.keys() - {0} for name, summary in findings.summaries.items()},
        test_cases=planner.MLPERF_HELD_OUT if plan.recipe == MLPERF_RECIPE else (),
    )


def write_prepared_case(task: CaseTask) -> dict[str, Any]:
    """Read a case, resample it to the plan's grid, write its volume and return its metadata. Runs in a worker."""
    assert task.plan is not None
    scan, label, problems = case_checks.load_case(task.case, task.description, task.config, task.listed)
    if scan is None or label is None:
        raise PreparedError(
            f"case {task.case.id} was usable when it was checked and is not any more: {problems[0].detail}",
            uri=task.case.images[0],
            fix="The source is changing, or reading it failed: run voxlane prepare again",
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
    store, prefix = Store(task.root, task.config), as_prefix(uris.parse(task.root).key)
    check_token(store, prefix, task.lease_token, "dataset")
    metadata = write_case(
        store,
        case_key(prefix, task.case.id),
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
    if changed.axes != "anatomical":
        raise ConfigError("plan.axes: a prepared dataset has anatomical axes", fix="Omit plan.axes")
    return changed


def _check_destination(source: SourceDataset, dst: str, config: StoreConfig | None) -> Prepared | None:
    """Return the dataset at `dst`, if there is one; raise if it is prepared from other scans, because runs may be using
    it."""
    try:
        existing = Prepared.load(dst, config)
    except PreparedError:
        return None  # no complete dataset
    if existing.source["uri"].rstrip("/") != source.root.rstrip("/"):
        raise PreparedError(
            f"DST already holds {existing.description.name}, prepared from {existing.source['uri']}",
            uri=existing.uri,
            fix="Choose another DST, or delete this one first",
        )
    return existing


def _make_plan_of_usable(
    findings: DatasetCheck, results: Mapping[str, Mapping[str, Any]], options: PrepareConfig, case_memory_bytes: int
) -> tuple[DatasetCheck, fingerprint.Fingerprint | None, Plan | None]:
    """Make the plan of all usable cases. Cases that are too large on its grid are not usable either; they are added to
    the findings, and the plan is made without them. Without a usable case, there is no plan."""
    while True:
        fingerprints = {
            name: settings.build(fingerprint.CaseFingerprint, result["fingerprint"])
            for name, result in results.items()
            if name not in findings.bad_cases
        }
        if not fingerprints:
            return findings, None, None
        merged = fingerprint.merge_cases(fingerprints.values())
        plan = _make_plan(findings.source.description, merged, options)
        too_large = []
        for name, case in fingerprints.items():
            grid_shape = compute_new_shape(
                case.shape, case.spacing, plan.spacing, truncate=plan.recipe == MLPERF_RECIPE
            )
            num_channels = len(findings.source.description.channels)
            text = check_growth(case.shape, grid_shape, case.spacing, num_channels, case_memory_bytes)
            if text is not None:
                too_large.append(CaseProblem(name, "memory", text, fatal=True))
        if not too_large:
            return findings, merged, plan
        findings = replace(
            findings, problems=sorted([*findings.problems, *too_large], key=lambda p: (p.case, not p.fatal))
        )


def _write_report(store: Store, prefix: str, findings: DatasetCheck) -> None:
    """Write the report of the checks, unless it is there already."""
    body = json.dumps(findings.to_plain(), indent=1).encode()
    with ignore_missing_object():
        if bytes(store.get(f"{prefix}{CHECK_REPORT}")) == body:
            return
    store.put(f"{prefix}{CHECK_REPORT}", body)


def _check_usable(findings: DatasetCheck, options: PrepareConfig) -> None:
    """Raise if cases are bad and are not to be excluded, or if all are bad."""
    bad, problems, num_cases = findings.bad_cases, findings.problems, len(findings.source.cases)
    all_bad = len(bad) == num_cases
    if not bad or (options.bad_cases == "exclude" and not all_bad):
        return
    summary = "no case can be used" if all_bad else f"{len(bad)} of {num_cases} cases cannot be used"
    advice = ["Correct them"]
    if all(problem.transient for problem in problems if problem.fatal):
        advice = ["Run the same command again, which checks bad cases anew: these problems may pass"]
    if any(p.fatal and p.kind in ("label-values", "channels") for p in problems):
        advice.append("describe their content with description.labels={...} or description.channels=[...]")
    if not all_bad:
        advice.append("exclude them with bad_cases=exclude")
    message = f"{summary}\n{case_checks.format_problems(problems)}\n{', or '.join(advice)}"
    raise BadCasesError(message, uri=findings.source.root)


def _check_written(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise if a case could not be written within its limits."""
    problems = [CaseProblem(**problem) for result in results.values() for problem in result.get("problems", ())]
    if problems:
        raise PreparedError(
            f"{len(problems)} cases were checked but could not be prepared\n{case_checks.format_problems(problems)}",
            fix="\nThe same command will resume with these cases",
        )


def _list_keys(store: Store, prefix: str) -> set[str]:
    return {key for page in store.list_pages(prefix) for key in page.column("path").to_pylist()}


def _read_results(store: Store, tasks: Mapping[str, CaseTask], recorded_keys: set[str]) -> dict[str, dict[str, Any]]:
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
    written = {o.key[1:]: (o.size, strip_quotes(o.etag)) for o in read_objects(result, "", OBJECT_LISTS)}
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
