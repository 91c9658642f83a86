"""`voxlane tune`: many trainings on a cluster, searching for the config that scores best."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from voxlane.cli.segmentation import Commands, _Fields, _parser, _said, _words
from voxlane.cli.store_options import add_store_options
from voxlane.errors import ConfigError

_TUNE = """\
Train many configs on DATA, several at once, and find the one with the best mean Dice on held-out cases. SPACE is a
config file as for `voxlane train`, some of whose values are distributions:

  preset: small
  optimizer:
    lr: {loguniform: [0.0001, 0.1]}     also uniform, quniform: [low, high, step]
    name: {choice: [sgd, adamw]}
  base_features: {logint: [4, 32]}      also int
  tune:
    trials: 20                          how it is searched: `voxlane tune --fields` lists all
    folds: [0, 1]

Optuna proposes, and trials that fall behind are stopped early (ASHA). With `grid: [..]` values every combination is
tried. A JSON config of DistMIS is understood as well. Everything is kept in OUT: each trial's run, tune.json,
best.yaml, best.json, report.html, TensorBoard's events. Runs on a Ray of its own on this machine, or on the cluster at
--address."""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = _parser(
        commands,
        "tune",
        help="search for the config that scores best, many trainings at once",
        description=_TUNE,
        epilog="examples:\n"
        "  voxlane tune space.yaml prepared --run searches/first\n"
        "  voxlane tune space.yaml gs://work/kits19 --run gs://work/searches/a --address auto tune.gpus_per_trial=0.5\n"
        "  voxlane tune space.yaml prepared --run searches/first --resume --trials 40\n"
        "  voxlane train prepared --run runs/best --config searches/first/best.yaml",
    )
    parser.add_argument("space", metavar="SPACE", help="YAML, JSON or TOML file of fields and distributions")
    parser.add_argument("data", metavar="DATA", help="URI or folder of the prepared dataset")
    parser.add_argument("overrides", metavar="field=value", nargs="*", default=[], help="fields over those of SPACE")
    parser.add_argument("--run", dest="run_uri", metavar="OUT", required=True, help="URI or folder for the search")
    parser.add_argument("--resume", action="store_true", help="go on: ended trials stay, others from their checkpoints")
    parser.add_argument("--auto-resume", action="store_true", help="go on if it was begun, begin it if not")
    parser.add_argument("--address", metavar="A", help="Ray cluster: host:port, or auto (default: one of our own)")
    parser.add_argument("--trials", metavar="N", type=int, help="as tune.trials=N")
    add_store_options(parser, "a YAML, JSON or TOML file whose `store` part holds StoreConfig fields for the bucket")
    parser.add_argument("--fields", action=_Fields, load=_load)
    parser.add_argument("--no-progress", action="store_true", help="print only the result")
    parser.set_defaults(run=_tune, rest="overrides")


def _load() -> Any:
    from voxlane.tune.space import TunePart

    return TunePart


def _tune(options: argparse.Namespace) -> int:
    from voxlane import settings
    from voxlane.cli.distmis import in_our_words
    from voxlane.tune.progress import table
    from voxlane.tune.runner import begun, tune

    (space, data), overrides = _words([options.space, options.data, *options.overrides], "SPACE", "DATA")
    values = in_our_words(settings.read_file(space), options, space, searching=True)
    said, store = _said(options, [])
    if said:
        raise ConfigError(f"{next(iter(said))}: --config holds only the store part here", fix="Write it into SPACE")
    for override in overrides:
        settings.set_dotted(values, override)
    if options.trials is not None:
        settings.set_dotted(values, f"tune.trials={options.trials}")
    resume = options.resume or (options.auto_resume and begun(options.run_uri, store))
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        search = tune(
            values,
            data,
            options.run_uri,
            store,
            resume=resume,
            address=options.address,
            command=["voxlane", *sys.argv[1:]],
            progress=False if options.no_progress else None,
            origin=space,
        )
    except KeyboardInterrupt:
        print("voxlane: interrupted; --resume goes on where the trials were", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(table(search))
    best = search.best
    assert best is not None  # or it would have been said
    where = options.run_uri.rstrip("/")
    print(f"best: trial {best.id}, dice {best.dice:.4f}: {best.run}")
    print(f"page: {where}/report.html")
    print(f"next: voxlane evaluate {best.run}")
    print(f"      voxlane train {data} --run RUN --config {where}/best.yaml")
    return 0


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt
