"""`voxlane prepare`, `train`, `evaluate`, `predict`, `report`: from scans to a model and its masks."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from voxlane.cli.store_options import add_store_options
from voxlane.errors import BucketNotFoundError, ConfigError, NotFoundError, ScanError
from voxlane.sizes import written

if TYPE_CHECKING:
    from voxlane.store import StoreConfig
    from voxlane.volume.prepared import Prepared

_OVERRIDE = re.compile(r"^[A-Za-z_][\w.]*=")
Commands = argparse._SubParsersAction

_PREPARE = """\
Read the scans and labels under SRC, check every case, plan resampling, normalisation, patch, batch and network from
their fingerprint as nnU-Net does, and write each case to DST as a compressed, chunked Zarr v3 volume of which training
reads only the parts it needs. Parallel; run it again to go on after a stop, or to take in what changed.

SRC may be KiTS19 (case_00000/imaging.nii.gz), Medical Segmentation Decathlon (dataset.json), nnU-Net raw (imagesTr,
labelsTr), BraTS folders of modalities, or a .json or .csv list of images and labels."""

_TRAIN = """\
Train on patches streamed from DATA, which `voxlane prepare` wrote, and keep everything in RUN: config, history, best
and last checkpoints, TensorBoard events, and at the end a report of where the time went.
What is trained comes from the dataset's plan and from config fields, given as field=value or in a file:

  preset=small           for a laptop without a GPU; the default is nnU-Net's recipe
  fold=0                 the part of the cases that is held out (null: none)
  epochs=50 steps_per_epoch=250 batch=2 patch=[128,128,128]
  optimizer.name=adamw optimizer.lr=0.001 augment.strength=0.5
  devices=4 precision=bfloat16 max_minutes=60 early_stop=10

`voxlane train --fields` lists them all."""

_EVALUATE = """\
Predict the held-out cases of RUN by Gaussian sliding windows and score them against their labels, in each scan's own
grid: Dice, HD95, surface Dice, volumes. Writes summary.json, cases.csv, cases.json, masks and overlays below
RUN/evaluation. RUN may hold one run a fold (train --folds all): then every case is predicted by the fold that did not
see it."""

_PREDICT = """\
Segment scans with RUN's network, or with those of all its folds together, and write each mask in the scan's own grid,
as NIfTI. A SCAN is a NIfTI file, a folder of one DICOM series, or one file a channel joined by commas."""

_REPORT = """\
Write RUN/report.html, one self-contained page: what was trained on what, curves, accuracy by class and case, the worst
cases' overlays, where the time went, the exact command and config. RUN may be a search (voxlane tune), also one that is
still running: the best trial, every trial by its fields, which fields matter, when and where each ran."""


def add_parsers(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the five commands."""
    _add_prepare(commands)
    _add_train(commands)
    _add_evaluate(commands)
    _add_predict(commands)
    _add_report(commands)


class _Fields(argparse.Action):
    """Prints every field of a command's config and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, load: Any, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print every field, its default and what it does")
        self._load = load

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from voxlane.settings import help_text

        print(f"Fields of {parser.prog}, as field=value or in a --config file:\n{help_text(self._load())}")
        parser.exit()


def _parser(commands: Commands[argparse.ArgumentParser], name: str, **words: Any) -> argparse.ArgumentParser:
    return commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **words)


def _add_config(parser: argparse.ArgumentParser, load: Any) -> None:
    add_store_options(
        parser, "a YAML, JSON or TOML file of fields; its `store` part holds StoreConfig fields for the bucket"
    )
    parser.add_argument("--fields", action=_Fields, load=load)
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")


def read_config(path: str) -> dict[str, Any]:
    """The values of a config file, which may lie in a bucket, as a search's best.yaml does."""
    from voxlane import settings

    if "://" not in path:
        return settings.read_file(path)
    from voxlane import uri as uris
    from voxlane.store import Store

    with tempfile.NamedTemporaryFile(suffix=os.path.splitext(path)[1]) as copy:
        copy.write(bytes(Store(path).get(uris.parse(path).key)))
        copy.flush()
        return settings.read_file(copy.name)


def _said(
    options: argparse.Namespace, overrides: Sequence[str], values: dict[str, Any] | None = None
) -> tuple[dict[str, Any], StoreConfig]:
    """Config values of file and overrides, and how to reach buckets; `values` are those of the file where it has been
    read."""
    from voxlane import settings
    from voxlane.store import StoreConfig

    if values is None:
        values = read_config(options.config) if options.config else {}
    for override in overrides:
        settings.set_dotted(values, override)
    part = values.pop("store", None) or {}
    if not isinstance(part, dict):
        raise ConfigError(f"store: it holds fields, not {part!r}", fix="Write store.endpoint=URL, or such lines")
    store = StoreConfig.from_dict({str(name): value for name, value in part.items()})
    if options.endpoint:
        store = dataclasses.replace(store, endpoint=options.endpoint)
    if options.anonymous:
        store = dataclasses.replace(store, anonymous=True)
    return values, store


# -- prepare -----------------------------------------------------------------------------------------------------------


def _load_prepare() -> Any:
    from voxlane.volume.prepare import PrepareConfig

    return PrepareConfig


def _add_prepare(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _parser(
        commands,
        "prepare",
        help="check scans, plan, and write them as chunked volumes to train on",
        description=_PREPARE,
        epilog="examples:\n"
        "  voxlane prepare gs://scans/kits19 gs://work/kits19\n"
        "  voxlane prepare Task04_Hippocampus s3://work/hippocampus bad_cases=exclude\n"
        "  voxlane prepare kits19 prepared recipe=mlperf-kits19\n"
        "  voxlane prepare brats prepared 'description.regions={WT: [1, 2, 4], TC: [1, 4], ET: [4]}'",
    )
    parser.add_argument("src", metavar="SRC", help="URI or folder of the scans, or a .json/.csv list")
    parser.add_argument("dst", metavar="DST", help="URI or folder for the prepared dataset")
    parser.add_argument(
        "overrides", metavar="field=value", nargs="*", default=[], help="config fields (--fields lists them)"
    )
    _add_config(parser, _load_prepare)
    parser.set_defaults(run=_prepare, rest="overrides")


def _prepare(options: argparse.Namespace) -> int:
    from voxlane import settings
    from voxlane.volume.check import table
    from voxlane.volume.prepare import PrepareConfig, prepare

    (src, dst), overrides = _words([options.src, options.dst, *options.overrides], "SRC", "DST")
    values, config = _said(options, overrides)
    how = settings.build(PrepareConfig, values)
    done = prepare(src, dst, how, config, progress=False if options.no_progress else None)
    if done.problems:
        print(table(done.problems), file=sys.stderr)
    prepared, plan = done.prepared, done.prepared.plan
    left_out = len({p.case for p in done.problems if p.fatal})
    print(
        f"{prepared.description.name}: {len(prepared)} cases in {prepared.uri}"
        + (f", {left_out} left out" * bool(left_out))
    )
    if not done.checked and not done.written:
        print("nothing had to be done: every case was prepared already")
    else:
        print(f"checked {done.checked} and wrote {done.written} cases")
    print(
        f"plan: {_mm(plan.spacing)} mm, patches of {_by(plan.patch)}, batch {plan.batch}, "
        f"{plan.network.kind} with features {', '.join(map(str, plan.network.features))}"
    )
    print(f"next: voxlane train {dst} --run RUN")
    return 0


# -- train -------------------------------------------------------------------------------------------------------------


def _load_train() -> Any:
    from voxlane.train.config import TrainConfig

    return TrainConfig


def _add_train(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _parser(
        commands,
        "train",
        help="train a segmentation network on a prepared dataset",
        description=_TRAIN,
        epilog="examples:\n"
        "  voxlane train gs://work/kits19 --run gs://work/runs/first\n"
        "  voxlane train prepared --run runs/small preset=small epochs=20\n"
        "  voxlane train prepared --run runs/first --resume\n"
        "  voxlane train prepared --run runs/cv --folds all          one run a fold: runs/cv/fold_0, ...\n"
        "  voxlane train gs://work/kits19 --run gs://work/runs/wide --workers 8 --nodes 2 --address auto",
    )
    parser.add_argument("data", metavar="DATA", help="URI or folder of the prepared dataset")
    parser.add_argument("overrides", metavar="field=value", nargs="*", default=[], help="config fields")
    parser.add_argument("--run", dest="run_uri", metavar="RUN", required=True, help="URI or folder for the run")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint, exactly")
    parser.add_argument(
        "--auto-resume",
        action="store_true",
        help="go on if the run was begun, start it if not, do nothing if it is done; for jobs that are started again",
    )
    parser.add_argument("--folds", metavar="LIST", help="all, or numbers such as 0,2: one run each, RUN/fold_N")
    _add_workers(parser)
    _add_config(parser, _load_train)
    parser.set_defaults(run=_train, rest="overrides")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "on a Ray cluster",
        "With --workers (or --address) the run is shared by that many workers, on machines of a cluster or on a local "
        "Ray that is started for it. A worker or machine that is lost costs the epoch it was in; the batch stays what "
        "it is on any number of workers. RUN/workers.json tells which rank ran where.",
    )
    group.add_argument("--workers", metavar="N", type=int, help="workers that share each batch")
    group.add_argument("--nodes", metavar="M", type=int, help="on exactly M machines, N/M workers on each")
    group.add_argument(
        "--min-workers",
        metavar="K",
        type=int,
        help="begin and go on with as few as K if no more fit (default: begin with N)",
    )
    group.add_argument("--cpus-per-worker", metavar="C", type=float, default=1.0, help="CPUs of each (default 1)")
    group.add_argument(
        "--gpus-per-worker", metavar="G", type=float, help="GPUs of each (default: 1 where the cluster has any)"
    )
    group.add_argument(
        "--address", metavar="HOST:PORT", help="a cluster that is there; auto: the one this machine belongs to"
    )


def _trainer(options: argparse.Namespace) -> Any:
    """What trains: here, or on a Ray cluster."""
    from voxlane.train.fit import train

    if options.workers is None and options.address is None:
        for name in ("nodes", "min_workers", "gpus_per_worker"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is for a Ray cluster", fix="Give --workers too")
        return train
    from voxlane.launch.elastic import train_on_ray

    return functools.partial(
        train_on_ray,
        workers=options.nodes or 1 if options.workers is None else options.workers,
        nodes=options.nodes,
        min_workers=options.min_workers,
        cpus_per_worker=options.cpus_per_worker,
        gpus_per_worker=options.gpus_per_worker,
        address=options.address,
    )


def _train(options: argparse.Namespace) -> int:
    from voxlane.cli.distmis import in_our_words
    from voxlane.train import ranks
    from voxlane.train.run import Run
    from voxlane.volume.prepared import Prepared

    values = read_config(options.config) if options.config else {}
    values = in_our_words(values, options, options.config)
    train = _trainer(options)
    (data,), overrides = _words([options.data, *options.overrides], "DATA")
    said, config = _said(options, overrides, values)
    targets = [(options.run_uri, said)]
    if options.folds is not None:
        folds = _folds(options.folds, Prepared.load(data, config))
        targets = [(f"{options.run_uri.rstrip('/')}/fold_{n}", {**said, "fold": n}) for n in folds]
    first = ranks.of_environment().rank == 0
    again = options.auto_resume or (options.resume and options.folds is not None)
    for uri, values in targets:
        run = Run(uri, config)
        if again and run.done:
            if first:
                print(f"run: {uri} (done before)")
            continue
        try:
            report = train(
                data,
                uri,
                values,
                config,
                resume=run.begun if again else options.resume,
                command=["voxlane", *sys.argv[1:]],
                progress=False if options.no_progress else None,
            )
        except KeyboardInterrupt:
            print("voxlane: interrupted; --resume goes on from the last checkpoint", file=sys.stderr)
            return 130
        if first:
            print(_stall_lines(report))
            print(f"run: {uri}")
    if first:
        print(f"next: voxlane evaluate {options.run_uri}")
    return 0


def _folds(text: str, prepared: Prepared) -> list[int]:
    """The folds that --folds names; all: those that hold cases."""
    held = sorted(set(prepared.table.column("fold").to_pylist()))
    if text == "all":
        return held
    try:
        folds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--folds {text}", fix="Give all, or numbers such as 0,2") from None
    unknown = [fold for fold in folds if fold not in held]
    if unknown or len(set(folds)) < len(folds):
        raise ConfigError(f"--folds {text}", fix=f"Give each once, of {','.join(map(str, held))}")
    return folds


def _stall_lines(report: dict[str, Any]) -> str:
    total = report["seconds"] or 1.0
    parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in report["shares"].items() if seconds > 0)
    return (
        f"{report['steps']:,} steps, {report['patches']:,} patches in {report['seconds']:.0f} s: {parts}\n"
        f"read {written(report['bytes_read'])} in {report['requests']:,} requests\n{report['sentence']}"
    )


# -- evaluate ----------------------------------------------------------------------------------------------------------


def _load_evaluate() -> Any:
    from voxlane.train.evaluate import EvaluateConfig

    return EvaluateConfig


def _add_evaluate(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _parser(
        commands,
        "evaluate",
        help="score a run on the cases it did not train on",
        description=_EVALUATE,
        epilog="examples:\n  voxlane evaluate runs/first\n  voxlane evaluate runs/cv predict.mirror=true\n"
        "  voxlane evaluate runs/first space=prepared masks=false",
    )
    parser.add_argument(
        "words", metavar="RUN", nargs="+", help="the run, or runs of several folds; field=value as well"
    )
    parser.add_argument("-o", "--out", metavar="URI", help="where the results go (default: the run itself)")
    _add_config(parser, _load_evaluate)
    parser.set_defaults(run=_evaluate, rest="words")


def _evaluate(options: argparse.Namespace) -> int:
    from voxlane import settings
    from voxlane.train.evaluate import EvaluateConfig, evaluate, table
    from voxlane.train.run import Run, Trained, runs_at

    uris, overrides = _words(options.words, "RUN", more=True)
    values, config = _said(options, overrides)
    how = settings.build(EvaluateConfig, values)
    runs = [run for uri in uris for run in runs_at(uri, config)]
    out = Run(options.out or uris[0], config)
    done = evaluate(runs, out, how, progress=False if options.no_progress else None)
    print(table(done, Trained.of(runs[0]).description))
    print(f"cases, masks and overlays: {done.where}")
    if out.begun or options.out is None:
        print(f"next: voxlane report {options.out or uris[0]}")
    return 0


# -- predict -----------------------------------------------------------------------------------------------------------


def _load_predict() -> Any:
    from voxlane.train.predictor import PredictConfig

    return PredictConfig


def _add_predict(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _parser(
        commands,
        "predict",
        help="segment new scans",
        description=_PREDICT,
        epilog="examples:\n  voxlane predict runs/first scan.nii.gz -o masks\n"
        "  voxlane predict gs://work/runs/cv dicom/patient1 -o gs://work/masks mirror=true\n"
        "  voxlane predict runs/brats flair.nii.gz,t1.nii.gz,t1ce.nii.gz,t2.nii.gz -o masks",
    )
    parser.add_argument("run_uri", metavar="RUN", help="the run, or the folder of its folds")
    parser.add_argument("words", metavar="SCAN", nargs="+", help="scans; field=value as well")
    parser.add_argument("-o", "--out", metavar="DIR", required=True, help="folder or URI for the masks")
    _add_config(parser, _load_predict)
    parser.set_defaults(run=_predict, rest="words")


def _predict(options: argparse.Namespace) -> int:
    from voxlane import settings
    from voxlane.train.predict import plan, predict
    from voxlane.train.predictor import PredictConfig, Predictor
    from voxlane.train.run import runs_at

    (run_uri, *scans), overrides = _words([options.run_uri, *options.words], "RUN", "SCAN", more=True)
    values, config = _said(options, overrides)
    how = settings.build(PredictConfig, values)
    jobs = plan(scans, options.out)
    predictor = Predictor.load(runs_at(run_uri, config), how)
    failed = 0
    for job in jobs:
        try:
            done = predict(predictor, job, config, progress=False if options.no_progress else None)
        except (ScanError, NotFoundError) as error:
            if len(jobs) == 1 or isinstance(error, BucketNotFoundError):
                raise
            # One bad scan of many must not cost the others their masks.
            print(f"voxlane: {error}", file=sys.stderr)
            failed += 1
            continue
        volumes = ", ".join(f"{name} {ml:.1f} ml" for name, ml in done.volumes_ml.items())
        print(f"{done.mask}  {volumes}  ({done.seconds:.1f} s)", flush=True)
    if failed:
        raise ScanError(f"{failed} of {len(jobs)} scans could not be segmented")
    return 0


# -- report ------------------------------------------------------------------------------------------------------------


def _add_report(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _parser(
        commands,
        "report",
        help="one page about a run: curves, scores, overlays, timing",
        description=_REPORT,
    )
    parser.add_argument("run_uri", metavar="RUN", help="the run")
    add_store_options(parser, "a YAML, JSON or TOML file whose `store` part holds StoreConfig fields for the bucket")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from voxlane.train.report import report
    from voxlane.tune.report import report as report_search

    _, config = _said(options, [])
    print(report_search(options.run_uri, config) or report(options.run_uri, config))
    return 0


# -- words -------------------------------------------------------------------------------------------------------------


def _words(words: Sequence[str], *names: str, more: bool = False) -> tuple[list[str], list[str]]:
    """The plain words, one for each of `names` and with `more` any number for the last, and the overrides between
    them."""
    plain = [word for word in words if not _OVERRIDE.match(word)]
    if len(plain) < len(names):
        raise ConfigError(f"no {names[len(plain)]} was given")
    if len(plain) > len(names) and not more:
        raise ConfigError(f"{plain[len(names)]!r} is no field=value", fix="Config fields are written like fold=0")
    return plain, [word for word in words if _OVERRIDE.match(word)]


def _mm(spacing: Sequence[float]) -> str:
    return " x ".join(f"{mm:.3g}" for mm in spacing)


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
