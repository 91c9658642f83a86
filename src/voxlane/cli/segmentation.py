"""`voxlane prepare`, `check`, `train`, `tune`, `evaluate`, `report` and `tensorboard`: from scans to a model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import pydantic

from voxlane import redaction
from voxlane.cli.config_options import (
    ConfiguredOptions,
    FieldsFileOptions,
    StoreFileOptions,
    StoreOptions,
    apply_overrides,
)
from voxlane.cli.signals import interrupted_by, open_in_browser, print_note
from voxlane.errors import (
    ConfigError,
    CredentialsError,
    PermissionDeniedError,
    ScanError,
    VoxlaneError,
)
from voxlane.settings import ARGUMENT, OVERRIDES, Flag, PathOrUri, build, read_file, record
from voxlane.sizes import format_bytes, format_plural

if TYPE_CHECKING:
    from voxlane.volume.prepared_dataset import Prepared

_Record = TypeVar("_Record")


# -- prepare -----------------------------------------------------------------------------------------------------------


@record
class PrepareCommand(FieldsFileOptions, ConfiguredOptions):
    """Check scans and write them as a dataset to train on.

    Read the scans and labels under SRC, check every case, and write each case to DST as a compressed, chunked Zarr v3
    volume, so that training can read only the parts it needs. As in nnU-Net, statistics of the dataset (its
    fingerprint) determine the plan: resampling, normalisation, patch size, batch size and network. Cases are prepared
    in parallel. Run the command again to continue after an interruption, or after SRC has changed: it keeps what is
    good, and checks bad cases again. DST/check.json holds what the checks found.

    SRC may be KiTS19 (case_00000/imaging.nii.gz), Medical Segmentation Decathlon (dataset.json), nnU-Net raw (imagesTr,
    labelsTr), BraTS folders of modalities, pairs of arrays (images/CASE_x.npy, labels/CASE_y.npy), or a .json or .csv
    list of images and labels.

    Examples:
      voxlane prepare gs://scans/kits19 gs://work/kits19
      voxlane prepare Task04_Hippocampus s3://work/hippocampus bad_cases=exclude
      voxlane prepare kits19 prepared recipe=mlperf-kits19
      voxlane prepare gs://scans/npy prepared description.channels=[CT] 'description.labels={background: 0, kidney: 1}'
      voxlane prepare brats prepared 'description.regions={WT: [1, 2, 4], TC: [1, 4], ET: [4]}'
    """

    config_class: ClassVar[str] = "voxlane.volume.prepare:PrepareConfig"

    src: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of the scans, or a .json or .csv list."""
    dst: Annotated[PathOrUri, ARGUMENT]
    """URI or folder for the prepared dataset."""
    recheck: bool = False
    """Check all cases again, also those that an earlier run found good. Bad cases are always checked again."""

    def _run(self) -> None:
        from voxlane.volume.case_checks import format_problems
        from voxlane.volume.prepare import PrepareConfig, prepare

        values, store_config = self.load(self.overrides)
        try:
            result = prepare(
                self.src,
                self.dst,
                build(PrepareConfig, values),
                store_config,
                progress=self.progress,
                recheck=self.recheck,
            )
        except KeyboardInterrupt as interrupt:
            interrupt.args = ("the same command continues",)
            raise
        if result.problems:
            print(format_problems(result.problems), file=sys.stderr)
        prepared, plan = result.prepared, result.prepared.plan
        if result.assumes_spacing:
            note = ".npy files store no spacing: 1 x 1 x 1 mm is assumed; description.spacing=[Z,Y,X] sets another"
            print(f"note: {note}", file=sys.stderr)
        left_out = len({problem.case for problem in result.problems if problem.fatal})
        more = f", {left_out} left out" if left_out else ""
        print(f"{prepared.description.name}: {len(prepared)} cases in {prepared.uri}{more}")
        if not result.cases_checked and not result.cases_written:
            print("nothing had to be done: every case was prepared already")
        else:
            print(f"checked {result.cases_checked} and wrote {format_plural(result.cases_written, 'case')}")
        spacing, patch = " x ".join(f"{mm:.3g}" for mm in plan.spacing), " x ".join(map(str, plan.patch))
        network = f"{plan.network.kind} with features {', '.join(map(str, plan.network.features))}"
        print(f"plan: {spacing} mm, patches of {patch}, batch {plan.batch}, {network}")
        print(f"next: voxlane train {self.dst} --run RUN")


# -- check -------------------------------------------------------------------------------------------------------------


@record
class CheckCommand(FieldsFileOptions, ConfiguredOptions):
    """Check scans and labels without preparing them.

    Read every case under SRC and report errors, which make a case unusable, and warnings, which deserve a look: damaged
    and missing files, incomplete DICOM series, impossible or contradictory geometry, useless intensities, labels that
    do not fit, scans that occur twice, and cases that differ from the rest. Each case is read in a process with limits
    of memory and time. The exit status is 1 if there is an error. `voxlane prepare` makes the same checks.

    Examples:
      voxlane check gs://scans/kits19
      voxlane check Task04_Hippocampus -o checked          writes checked/check.json and checked/check.html
      voxlane check gs://scans/kits19 --json case_timeout_s=60 case_memory_gb=4
    """

    config_class: ClassVar[str] = "voxlane.volume.dataset_check:CheckConfig"

    src: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of the scans, or a .json or .csv list."""
    out: Annotated[PathOrUri | None, Flag("-o")] = None
    """URI or folder for check.json and check.html."""
    json: bool = False
    """Print the report as JSON instead of a table."""

    def _run(self) -> None:
        from voxlane.train.dataset_report import write_check_report
        from voxlane.volume.case_checks import format_problems
        from voxlane.volume.dataset_check import CheckConfig, check

        values, store_config = self.load(self.overrides)
        findings = check(self.src, build(CheckConfig, values), store_config, progress=self.progress)
        report = findings.to_plain()
        errors = format_plural(report["errors"], "error")
        if self.json:
            print(json.dumps(report, indent=1))
        else:
            if findings.problems:
                print(format_problems(findings.problems))
            counts = f"{errors}, {format_plural(report['warnings'], 'warning')}"
            print(f"{report['name']}: {report['usable_cases']} of {report['cases']} cases can be used; {counts}")
        if self.out is not None:
            page_uri = write_check_report(report, self.out, store_config)
            print(f"report: {page_uri}", file=sys.stderr)
        if report["errors"]:
            raise ScanError(f"{errors} in {len(findings.bad_cases)} of {report['cases']} cases")


# -- train -------------------------------------------------------------------------------------------------------------


@record
class RayOptions:
    """Options of a run on a Ray cluster."""

    flag_group: ClassVar[str] = "On a Ray cluster"

    workers: int | None = None
    """Number of workers that share each batch, on the cluster at --address or on a local Ray that is started for the
    run. If a worker or machine is lost, its epoch is repeated. RUN/workers.json records which rank ran where."""
    nodes: int | None = None
    """Number of machines, with WORKERS/NODES workers on each."""
    min_workers: int | None = None
    """Smallest number of workers to start or continue with if fewer than --workers fit (default: all to start, 1 to
    continue)."""
    cpus_per_worker: float = 1.0
    """CPUs for each worker."""
    gpus_per_worker: float | None = None
    """GPUs for each worker (default: 1 if the cluster has GPUs)."""
    address: Annotated[str | None, Flag(metavar="HOST:PORT")] = None
    """Address of a running Ray cluster, or auto for the one that this machine belongs to."""


def _choose_trainer(options: RayOptions) -> Any:
    """Return the function that trains: in this process, or on a Ray cluster."""
    from voxlane.train.fit import train

    if options.workers is None and options.address is None:
        for name in ("nodes", "min_workers", "gpus_per_worker"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is for a Ray cluster", fix="Give --workers too")
        return train
    from voxlane.cluster.ray.elastic import train_on_ray

    arguments = {field.name: getattr(options, field.name) for field in dataclasses.fields(RayOptions)}
    arguments["workers"] = options.nodes or 1 if options.workers is None else options.workers
    return functools.partial(train_on_ray, **arguments)


@record
class TrainCommand(FieldsFileOptions, RayOptions, ConfiguredOptions):
    """Train a segmentation network on a prepared dataset.

    Train on patches streamed from DATA, which `voxlane prepare` wrote, and store everything in RUN: config, history,
    best and last checkpoints, TensorBoard events, and a report of how the time was spent. The dataset's plan sets the
    defaults; change them with config fields, as field=value or in a --config file:

      preset=small           for a laptop without a GPU; the default is nnU-Net's recipe
      fold=0                 hold out the cases of this fold (null: hold out none)
      epochs=50 steps_per_epoch=250 batch=2 patch=[128,128,128]
      optimizer.name=adamw optimizer.lr=0.001 augment.strength=0.5
      devices=4 precision=bfloat16 max_minutes=60 early_stop=10

    `voxlane train --fields` lists them all; with preset=NAME, it shows the defaults of that preset.

    Examples:
      voxlane train gs://work/kits19 --run gs://work/runs/first
      voxlane train prepared --run runs/small preset=small epochs=20
      voxlane train prepared --run runs/first --resume
      voxlane train prepared --run runs/cv --folds all          one run per fold: runs/cv/fold_0, ...
      voxlane train gs://work/kits19 --run gs://work/runs/wide --workers 8 --nodes 2 --address auto
    """

    config_class: ClassVar[str] = "voxlane.train.config:TrainConfig"
    presets: ClassVar[str] = "voxlane.train.config:PRESETS"

    data: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of the prepared dataset."""
    run: PathOrUri
    """URI or folder for the run."""
    resume: bool = False
    """Continue exactly from the run's last checkpoint."""
    auto_resume: bool = False
    """Start the run, or continue it if it exists; do nothing if it is done. For jobs that are restarted."""
    folds: Annotated[str | None, Flag(metavar="LIST")] = None
    """Folds to train, each as a run of its own in RUN/fold_N: all, or numbers such as 0,2."""

    def _run(self) -> None:
        with _explain_missing_secrets(self, "run.json"):
            self._train()

    def _train(self) -> None:
        from voxlane.train import ranks
        from voxlane.train.run import Run
        from voxlane.volume.prepared_dataset import Prepared

        file_values, options = self.read(), self
        if self.config and self.config.endswith(".json"):
            file_values, launch = translate_distmis(file_values, self.config)
            options = fill_unset(self, launch)
        train = _choose_trainer(options)
        config_values, store_config = self.load(self.overrides, file_values)
        targets = [(self.run, config_values)]
        if self.folds is not None:
            folds = _parse_folds(self.folds, Prepared.load(self.data, store_config))
            targets = [(f"{self.run.rstrip('/')}/fold_{fold}", {**config_values, "fold": fold}) for fold in folds]
        is_first_rank = ranks.read_rank_info().rank == 0
        resume_if_exists = self.auto_resume or (self.resume and self.folds is not None)
        for uri, values in targets:
            run = Run(uri, store_config)
            if resume_if_exists and run.is_done:
                if is_first_rank:
                    print(f"run: {uri} (done before)")
                continue
            try:
                report = train(
                    self.data,
                    uri,
                    values,
                    store_config,
                    resume=run.exists if resume_if_exists else self.resume,
                    command=["voxlane", *sys.argv[1:]],
                    progress=options.progress,
                )
            except KeyboardInterrupt as interrupt:
                interrupt.args = ("--resume continues from the last checkpoint",)
                raise
            if is_first_rank:
                print(_format_timing(report))
                print(f"run: {uri}")
        if is_first_rank:
            print(f"next: voxlane evaluate {self.run}")


@contextlib.contextmanager
def _explain_missing_secrets(command: TrainCommand | TuneCommand, record_name: str) -> Iterator[None]:
    """Where a run or search that is resumed lacks credentials, say that it did not store those it was started with."""
    try:
        yield
    except (CredentialsError, PermissionDeniedError) as error:
        if not (command.resume or command.auto_resume):
            raise
        names: list[str] = []
        with contextlib.suppress(VoxlaneError, AttributeError, TypeError):  # the record may be what cannot be read
            from voxlane.train.run import Run

            names = redaction.name_redacted(
                Run(command.run, command.load(command.overrides)[1]).read_json(record_name)["command"]
            )
        origin = f"it was started with {', '.join(names)}" if names else "if it was started with keys, such as store.*"
        explained = type(error)(f"{error}. Secrets are not stored with {command.run}: {origin}, give them again")
        explained.uri = error.uri
        raise explained from None


def _parse_folds(text: str, prepared: Prepared) -> list[int]:
    """Return the folds that --folds names; all: those that hold cases."""
    existing = sorted(set(prepared.table.column("fold").to_pylist()))
    if text == "all":
        return existing
    try:
        folds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--folds {text}", fix="Give all, or numbers such as 0,2") from None
    if empty := set(folds) - set(existing):
        fix = f"Choose from {', '.join(map(str, existing))}"
        raise ConfigError(f"--folds {text}: fold {min(empty)} has no cases", fix=fix)
    if len(set(folds)) < len(folds):
        raise ConfigError(f"--folds {text}: a fold is listed twice", fix="List each fold once")
    return folds


def _format_timing(report: dict[str, Any]) -> str:
    total = report["seconds"] or 1.0
    parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in report["shares"].items() if seconds > 0)
    repeated = f", {report['retries']:,} of them repeated" if report.get("retries") else ""
    return (
        f"{report['steps']:,} steps, {report['patches']:,} patches in {report['seconds']:.0f} s: {parts}\n"
        f"read {format_bytes(report['bytes_read'])} in {report['requests']:,} requests{repeated}\n{report['sentence']}"
    )


# -- tune --------------------------------------------------------------------------------------------------------------


@record
class TuneCommand(StoreFileOptions, ConfiguredOptions):
    """Search for the best config with many training runs at once.

    Train many configs on DATA, several at once, and find the one with the best mean Dice on held-out cases. SPACE is a
    config file as for `voxlane train` in which some values are distributions:

      preset: small
      optimizer:
        lr: {loguniform: [0.0001, 0.1]}     or uniform: [low, high], quniform: [low, high, step]
        name: {choice: [sgd, adamw]}
      base_features: {logint: [4, 32]}      or int: [low, high]
      tune:
        trials: 20                          a setting of the search; `voxlane tune --fields` lists them
        folds: [0, 1]

    Optuna proposes configs, and trials that fall behind are stopped early (ASHA). With `grid: [...]` values, every
    combination is tried. SPACE may also be a JSON config of DistMIS. Everything is stored in OUT: each trial's run,
    tune.json, best.yaml, best.json, report.html and TensorBoard events. The search runs on the Ray cluster at
    --address, or on a local Ray that is started for it.

    Examples:
      voxlane tune space.yaml prepared --run searches/first
      voxlane tune space.yaml gs://work/kits19 --run gs://work/searches/a --address auto tune.gpus_per_trial=0.5
      voxlane tune space.yaml prepared --run searches/first --resume --trials 40
      voxlane train prepared --run runs/best --config searches/first/best.yaml
    """

    config_class: ClassVar[str] = "voxlane.tune.space:TuneSection"

    space: Annotated[PathOrUri, ARGUMENT]
    """YAML, JSON or TOML file of fields and distributions."""
    data: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of the prepared dataset."""
    overrides: Annotated[tuple[str, ...], OVERRIDES] = ()
    """Fields that replace those of SPACE."""
    run: Annotated[PathOrUri, Flag(metavar="OUT")]
    """URI or folder for the search."""
    resume: bool = False
    """Continue a search: keep finished trials, and continue the others from their checkpoints."""
    auto_resume: bool = False
    """Start the search, or continue it if it exists."""
    address: Annotated[str | None, Flag(metavar="HOST:PORT")] = None
    """Address of a running Ray cluster, or auto for the one that this machine belongs to (default: a local Ray)."""
    trials: int | None = None
    """Number of trials; the same as tune.trials=N."""

    def _run(self) -> None:
        with _explain_missing_secrets(self, "tune.json"):
            self._search()

    def _search(self) -> None:
        from voxlane.tune.progress import format_table
        from voxlane.tune.runner import search_exists, tune

        values, options = read_file(self.space), self
        if self.space.endswith(".json"):
            values, launch = translate_distmis(values, self.space, searching=True)
            options = fill_unset(self, launch)
        other_fields, store_config = self.load()
        if other_fields:
            name = next(iter(other_fields))
            raise ConfigError(f"{name}: --config holds only the store part here", fix="Write it into SPACE")
        apply_overrides(values, self.overrides)
        if self.trials is not None:
            apply_overrides(values, [f"tune.trials={self.trials}"])
        resume = self.resume or (self.auto_resume and search_exists(self.run, store_config))
        try:
            search = tune(
                values,
                self.data,
                self.run,
                store_config,
                resume=resume,
                address=options.address,
                command=["voxlane", *sys.argv[1:]],
                progress=options.progress,
                origin=self.space,
            )
        except KeyboardInterrupt as interrupt:
            interrupt.args = ("--resume continues the trials",)
            raise
        print(format_table(search))
        best = search.best
        assert best is not None  # `tune` raises where no trial succeeded
        out = self.run.rstrip("/")
        print(f"best: trial {best.id}, dice {best.dice:.4f}: {best.run}")
        print(f"page: {out}/report.html")
        print(f"next: voxlane evaluate {best.run}")
        print(f"      voxlane train {self.data} --run RUN --config {out}/best.yaml")


# -- configs of DistMIS, in place of voxlane's own ---------------------------------------------------------------------


def translate_distmis(
    values: dict[str, Any], origin: str, *, searching: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config values of the JSON file `origin`, and options of the command that it sets. Where the file is a
    config of DistMIS, it is translated, and the translation is printed on stderr."""
    from voxlane.compat.distmis import is_distmis, translate
    from voxlane.train import ranks

    if not is_distmis(values):
        return values, {}
    translation = translate(values, searching=searching)
    rank = ranks.read_rank_info()
    options = translation.options if rank.world_size == 1 else {}  # else a launcher has started the ranks
    if rank.rank == 0:
        print(f"{origin}: a config of DistMIS, translated to", file=sys.stderr)
        print(f"  {_format_overrides(translation.fields)}", file=sys.stderr)
        if options:
            print(f"  {' '.join(_format_option(name, value) for name, value in options.items())}", file=sys.stderr)
        for note in translation.notes:
            print(f"  note: {note}", file=sys.stderr)
    return translation.fields, options


def _format_overrides(values: dict[str, Any], prefix: str = "") -> str:
    """Return nested values as the overrides that set them."""
    from voxlane.pages.formatting import format_value

    parts = []
    for name, value in values.items():
        if isinstance(value, dict) and not (len(value) == 1 and isinstance(next(iter(value.values())), list)):
            parts.append(_format_overrides(value, f"{prefix}{name}."))
        else:
            parts.append(f"{prefix}{name}={format_value(value)}")
    return " ".join(parts)


def _format_option(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"


def fill_unset(options: _Record, values: dict[str, Any]) -> _Record:
    """Return `options` with those of `values` that it has and that the command line did not set."""
    unset = {name: value for name, value in values.items() if getattr(options, name, 0) in (None, False)}
    return dataclasses.replace(options, **unset)  # type: ignore[type-var]


# -- evaluate ----------------------------------------------------------------------------------------------------------


@record
class EvaluateCommand(FieldsFileOptions, ConfiguredOptions):
    """Score a run on the cases it did not train on.

    Predict the held-out cases of RUN with Gaussian-weighted sliding windows and score them against their labels, in
    each scan's own grid: Dice, HD95, surface Dice, volumes. Write summary.json, cases.csv, cases.json, masks and
    overlays below RUN/evaluation. If RUN holds one run per fold (train --folds all), each case is predicted by the run
    that held it out.

    Examples:
      voxlane evaluate runs/first
      voxlane evaluate runs/cv predict.mirror=true
      voxlane evaluate runs/first space=prepared masks=false
    """

    config_class: ClassVar[str] = "voxlane.train.evaluate:EvaluateConfig"

    runs: Annotated[tuple[PathOrUri, ...], Flag(positional=True, metavar="RUN")]
    """URI or folder of the run, or of the runs of several folds."""
    out: Annotated[PathOrUri | None, Flag("-o")] = None
    """URI or folder for the results (default: the run's own)."""

    def _run(self) -> None:
        from voxlane.train.evaluate import EvaluateConfig, evaluate, format_table
        from voxlane.train.run import Run, TrainedRun, find_runs

        uris = self.runs
        values, store_config = self.load(self.overrides)
        config = build(EvaluateConfig, values)
        runs = [run for uri in uris for run in find_runs(uri, store_config)]
        out = Run(self.out or uris[0], store_config)
        result = evaluate(runs, out, config, progress=self.progress)
        print(format_table(result, TrainedRun.load(runs[0]).description))
        print(f"cases, masks and overlays: {result.folder_uri}")
        if out.exists or self.out is None:
            print(f"next: voxlane report {self.out or uris[0]}")


# -- report ------------------------------------------------------------------------------------------------------------


@record
class ReportCommand(StoreFileOptions):
    """Write one page about a run: curves, scores, overlays, timing.

    Write RUN/report.html, one self-contained page: dataset and model, curves, accuracy by class and case, overlays of
    the worst cases, how the time was spent, and the exact command and config. For a search (voxlane tune), even while
    it is running: the best trial, every trial with its fields, which fields matter, and when and where each trial ran.
    """

    run: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of the run, or of a search."""

    def _run(self) -> None:
        from voxlane.train.report import report
        from voxlane.tune.report import report as report_search

        config = self.store_config()
        print(report_search(self.run, config) or report(self.run, config))


# -- tensorboard -------------------------------------------------------------------------------------------------------


@record
class TensorboardCommand(StoreOptions):
    """Show a run in TensorBoard.

    Show the run's curves, and its validation cases as rows of ground truth, scan and prediction. The event files are
    copied from the bucket to a temporary folder as they grow. TensorBoard listens only on this machine's loopback
    address; Ctrl-C ends it.

    Examples:
      voxlane tensorboard gs://work/runs/a
      voxlane tensorboard s3://work/search --port 7000
    """

    uri: Annotated[PathOrUri, Flag(positional=True, metavar="RUN")]
    """URI or folder of a run, of a search with all its trials, or of many runs."""
    port: Annotated[int, pydantic.Field(ge=0, le=65535)] = 6006
    """First port to try; 0 picks a free one."""
    every: Annotated[float, pydantic.Field(ge=1, le=3600), Flag(metavar="SECONDS")] = 10.0
    """Seconds between reads of the bucket."""
    no_open: bool = False
    """Do not open a browser."""
    wait: bool = False
    """Wait for a run that does not exist yet."""

    def _run(self) -> None:
        from voxlane.train.tensorboard import serve

        def ready(url: str) -> None:
            print(f"TensorBoard of {self.uri}: {url}", flush=True)
            if not self.no_open:
                open_in_browser(url)

        with interrupted_by("SIGTERM"), contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the normal end
            serve(
                self.uri,
                self.store_config(),
                port=self.port,
                every_s=self.every,
                print_line=print_note,
                ready=ready,
                wait=self.wait,
            )
