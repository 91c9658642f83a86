"""`voxlane tune`: many trainings on a cluster, searching for the config that scores best."""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar

from voxlane.cli.config_options import ConfiguredOptions, StoreFileOptions, apply_overrides
from voxlane.cli.segmentation import fill_unset
from voxlane.cli.signals import interrupted_by
from voxlane.errors import ConfigError
from voxlane.settings import ARGUMENT, OVERRIDES, Flag, PathOrUri, read_file, record


@record
class TuneOptions(ConfiguredOptions):
    """Options of `voxlane tune`."""

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


def tune_config(options: TuneOptions, store: StoreFileOptions) -> int:
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
    from voxlane.tune.progress import format_table
    from voxlane.tune.runner import search_exists, tune

    space, data = options.space, options.data
    values = read_file(space)
    if space.endswith(".json"):
        from voxlane.cli.distmis import translate_distmis

        values, launch = translate_distmis(values, space, searching=True)
        options = fill_unset(options, launch)
    other_fields, store_config = store.load()
    if other_fields:
        name = next(iter(other_fields))
        raise ConfigError(f"{name}: --config holds only the store part here", fix="Write it into SPACE")
    apply_overrides(values, options.overrides)
    if options.trials is not None:
        apply_overrides(values, [f"tune.trials={options.trials}"])
    resume = options.resume or (options.auto_resume and search_exists(options.run, store_config))
    try:
        with interrupted_by("SIGTERM"):
            search = tune(
                values,
                data,
                options.run,
                store_config,
                resume=resume,
                address=options.address,
                command=["voxlane", *sys.argv[1:]],
                progress=options.progress,
                origin=space,
            )
    except KeyboardInterrupt:
        print("voxlane: interrupted; --resume continues the trials", file=sys.stderr)
        return 130
    print(format_table(search))
    best = search.best
    assert best is not None  # `tune` raises where no trial succeeded
    out = options.run.rstrip("/")
    print(f"best: trial {best.id}, dice {best.dice:.4f}: {best.run}")
    print(f"page: {out}/report.html")
    print(f"next: voxlane evaluate {best.run}")
    print(f"      voxlane train {data} --run RUN --config {out}/best.yaml")
    return 0
