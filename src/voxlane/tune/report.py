"""Write what a search leaves: its page, TensorBoard events, the best config and the place of its checkpoints."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from voxlane import settings
from voxlane.errors import TuneError
from voxlane.pages.formatting import as_number, format_duration, format_number, format_value
from voxlane.pages.render import Tile, explain_wrong_content, render
from voxlane.redaction import redact_words
from voxlane.store import StoreConfig
from voxlane.temporary import temporary_folder
from voxlane.train.config import build_config, resolve_batch
from voxlane.train.run import Run
from voxlane.train.trainer import BEST
from voxlane.tune import charts
from voxlane.tune.importance import BEST_SHARE, MIN_TRIALS, importance, importance_range, scored_trials
from voxlane.tune.space import Space, set_dotted
from voxlane.tune.trials import Search, State, Trial
from voxlane.volume.prepared_dataset import Prepared

_EVENT_FILE = "events.out.tfevents.search"
"""TensorBoard reads any file with `tfevents` in its name; a constant name means that writing again replaces it."""
_UPLOADS = 16
_CLOSE_DICE = 0.005
"""One validation of a few dozen cases cannot distinguish two trials whose Dice differ by less."""
_STATES: tuple[State, ...] = ("done", "running", "stopped", "infeasible", "failed")
"""States in the order in which they are shown."""
_MEANINGS = {
    "done": "trained to its last epoch",
    "stopped": "stopped early: other trials did better at the same epoch",
    "infeasible": "a device or machine has too little memory for it",
    "failed": "it raised an error",
    "running": "not finished when this page was written",
}


def report(out: str, config: StoreConfig | None = None) -> str | None:
    """Write OUT/report.html and OUT/tensorboard from the record, also while the search is running.

    Returns the page's URI, or None if there is no search at `out`.
    """
    run = Run(out, config)
    if not run.store.exists(run.key("tune.json")):
        return None
    search = Search.from_json(bytes(run.store.get(run.key("tune.json"))), origin=run.file_uri("tune.json"))
    write_page(search, run)
    write_events(search, run)
    return run.file_uri("report.html")


def write_page(search: Search, run: Run) -> None:
    """Write OUT/report.html, also of a search that has not ended."""
    with explain_wrong_content(run.folder_uri):
        page = render_search_page(search)
    run.write_bytes("report.html", page.encode())


def publish(search: Search, run: Run, prepared: Prepared, space: Space) -> None:
    """Write all results; raise TuneError if no trial has a Dice."""
    write_page(search, run)
    best = search.best
    if best is None:
        reasons = [trial.reason for trial in search.trials if trial.reason and trial.state in ("failed", "infeasible")]
        reason = f": {reasons[0]}" if reasons else ""
        raise TuneError(f"none of {len(search.trials)} trials has a Dice{reason}", uri=run.folder_uri)
    write_events(search, run)
    head = f"# Trial {best.id} of {run.folder_uri}, mean Dice {best.dice:.4f}.\n"
    config = build_config(space.config_values(best.params))
    config = resolve_batch(config, prepared.plan, space.tune.workers_per_trial)
    body = yaml.safe_dump(settings.to_plain(config), sort_keys=False, default_flow_style=None)
    run.write_bytes("best.yaml", (head + body).encode())
    run.write_json("best.json", _describe_best(best, search, run, space.folds))


def _describe_best(best: Trial, search: Search, run: Run, folds: Sequence[int]) -> dict[str, Any]:
    """Return the content of best.json: the best trial's values and files, and the commands that use them."""
    runs = [best.run] if len(folds) == 1 else [f"{best.run}/fold_{fold}" for fold in folds]
    config = run.file_uri("best.yaml")
    return {
        "trial": best.id,
        "dice": best.dice,
        "epochs": best.epochs,
        "params": best.params,
        "run": best.run,
        "checkpoints": [f"{uri}/checkpoints/{BEST}.ckpt" for uri in runs],
        "config": config,
        "commands": {
            "evaluate": f"voxlane evaluate {best.run}",
            "predict": f"voxlane predict {best.run} SCAN -o masks",
            "train": f"voxlane train {search.data} --run RUN --config {config.removeprefix('file://')}",
        },
    }


def render_search_page(search: Search) -> str:
    """Return the page of a search. Pure: the same search gives the same page."""
    counts = Counter(trial.state for trial in search.trials)
    shares = importance(search)
    axes = sorted(charts.search_axes(search), key=lambda axis: -shares.get(axis.name, 0.0))
    next_steps = _next_steps(search)
    return render(
        "search.html.j2",
        title=search.name,
        tiles=_tiles(search, counts),
        footer=next_steps["out"],
        search=search,
        best=search.best,
        source=_describe_source(search),
        data=_local_path(search.data),
        counts=counts,
        states=[state for state in _STATES if counts[state]],
        meanings=_MEANINGS,
        charts=charts,
        scored_count=sum(trial.score is not None for trial in search.trials),
        close_trials=_count_close(search),
        close_dice=_CLOSE_DICE,
        reasons=list(dict.fromkeys(trial.reason for trial in search.trials if trial.reason))[:3],
        next_steps=next_steps,
        parallel_chart=charts.parallel_chart(search),
        rungs=_rungs(search),
        importance_chart=charts.importance_chart(shares, importance_range(search)),
        importance_trials=len(scored_trials(search)),
        best_share=BEST_SHARE,
        min_trials=MIN_TRIALS,
        field_charts=[(axis, chart) for axis in axes if (chart := charts.field_chart(search, axis))],
        rows=sorted(search.trials, key=lambda t: (math.inf if t.score is None else -t.score, t.number)),
        as_number=as_number,
        command_line=shlex.join(redact_words(list(map(str, search.command)))),
        nested_space=set_dotted({}, search.space),
        config={name: value for name, value in search.config.items() if value is not None},
    )


def _next_steps(search: Search) -> dict[str, Any]:
    """Return the URI of the search and the commands that use its best trial."""
    out = next((t.run.rpartition("/trials/")[0] for t in search.trials if "/trials/" in t.run), "")
    folder = _local_path(out)
    is_remote = "://" in folder
    config = f"{folder}/best.yaml" if folder and not is_remote else "best.yaml"
    train = ["voxlane", "train", _local_path(search.data), "--run", "RUN", "--folds", "all", "--config", config]
    run = shlex.quote(_local_path(search.best.run)) if search.best is not None else ""
    evaluate = f"voxlane evaluate {run}\nvoxlane predict {run} SCAN.nii.gz -o masks"
    return {"out": out, "is_remote": is_remote, "evaluate": evaluate, "train": shlex.join(train)}


def _describe_source(search: Search) -> str:
    """Describe where the configs came from."""
    has_grid = any("grid" in spec for spec in search.space.values())
    source = str(search.config.get("search") or ("grid" if has_grid else "optuna"))
    return {"optuna": "proposed by Optuna", "random": "drawn at random", "grid": "over the whole grid"}.get(
        source, source
    )


def _tiles(search: Search, counts: Counter[State]) -> list[Tile]:
    """Return the figures to see first."""
    best = search.best
    note = "no trial has reported" if best is None else f"trial {best.number}"
    others = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state] and state != "done")
    tiles = [
        Tile("Best mean Dice", format_number(best.score if best is not None else None, 3), note),
        Tile("Trials done", f"{counts['done']}", others or f"of {len(search.trials)}"),
    ]
    if trained := sum(t.epochs for t in search.trials):
        longest = _longest_epochs(search)
        stopped = [t.epochs for t in search.trials if t.state == "stopped"]
        all_epochs = trained + sum(max(longest - epochs, 0) for epochs in stopped)
        note = f"of {format_number(all_epochs, 0)} without stopping" if longest and stopped else "in all"
        tiles.append(Tile("Epochs trained", format_number(trained, 0), note))
    if search.makespan_s > 0:
        tiles.append(Tile("Time", format_duration(search.makespan_s), "from first start to last end"))
    if search.efficiency is not None:
        slots = f"of the time of {search.devices:g} slots used"
        tiles.append(Tile("Efficiency", f"{search.efficiency:.0%}", slots))
    return tiles


def _longest_epochs(search: Search) -> int:
    """Return the number of epochs of the longest trial that is done; 0 if none is."""
    return max((t.epochs for t in search.trials if t.state == "done"), default=0)


def _count_close(search: Search) -> int:
    """Return the number of trials whose Dice cannot be distinguished from the best."""
    best = search.best
    if best is None or best.dice is None:
        return 0
    others = [t.score for t in search.trials if t is not best and t.score is not None]
    return sum(best.dice - score < _CLOSE_DICE for score in others)


def _rungs(search: Search) -> list[int]:
    """Return the epochs at which ASHA compared trials; the longest finished trial replaces settings left open."""
    longest = _longest_epochs(search)
    grace = as_number(search.config.get("grace_epochs")) or max(1, longest // 9)
    reduction = as_number(search.config.get("reduction")) or 0.0
    if search.config.get("scheduler") != "asha" or grace < 1 or reduction <= 1:
        return []
    return [math.ceil(grace * reduction**k) for k in range(20) if grace * reduction**k < longest]


def _local_path(uri: str) -> str:
    """Return a file URI as a path, and any other URI as it is."""
    return uri.removeprefix("file://")


# -- TensorBoard: one run per trial with its fields (HParams tab) and curve --------------------------------------------


def write_events(search: Search, run: Run) -> None:
    """Write the event files of `search` below `run`, replacing earlier ones."""
    with temporary_folder("board") as folder:
        bodies = {f"tensorboard/{_EVENT_FILE}": _events(Path(folder) / "search", [(_experiment(search), 0, None)])}
        for trial in search.trials:
            events = _trial_events(trial, search)
            bodies[f"tensorboard/{trial.id}/{_EVENT_FILE}"] = _events(Path(folder) / str(trial.number), events)
    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(run.write_bytes, bodies, bodies.values()))


def _events(folder: Path, summaries: list[tuple[Any, int, float | None]]) -> bytes:
    """Return the bytes of an event file with these (summary, step, Unix seconds)."""
    from torch.utils.tensorboard import FileWriter

    writer = FileWriter(str(folder))
    for summary, step, seconds in summaries:
        writer.add_summary(summary, step, walltime=seconds)
    writer.close()
    (file,) = folder.iterdir()
    return file.read_bytes()


def _trial_events(trial: Trial, search: Search) -> list[tuple[Any, int, float | None]]:
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
    from torch.utils.tensorboard.summary import scalar

    end = trial.end(search.last_time)
    start = plugin_data_pb2.SessionStartInfo(model_uri=trial.run, start_time_secs=trial.started)
    for name, value in trial.params.items():
        plain = _plain(value)
        kind = "bool_value" if isinstance(plain, bool) else "string_value" if isinstance(plain, str) else "number_value"
        setattr(start.hparams[name], kind, plain)
    start_summary = _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)
    point: Any = scalar  # PyTorch has no types for it
    events: list[tuple[Any, int, float | None]] = [(start_summary, 0, trial.started)]
    for epoch, dice in trial.curve:
        if math.isfinite(dice):
            share = epoch / max(trial.epochs, 1)
            events.append((point("mean_dice", dice), epoch, trial.started + share * (end - trial.started)))
    if trial.score is not None:
        events.append((point("best_dice", trial.score), trial.epochs, end))
    if trial.ended is not None:
        failed = trial.state in ("failed", "infeasible")
        status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
        ended = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=end)
        events.append((_summary(metadata.SESSION_END_INFO_TAG, session_end_info=ended), trial.epochs, end))
    return events


def _experiment(search: Search) -> Any:
    """Return the summary that declares the search's fields and metric to the HParams tab."""
    from tensorboard.plugins.hparams import api_pb2, metadata

    kinds = {bool: api_pb2.DATA_TYPE_BOOL, float: api_pb2.DATA_TYPE_FLOAT64, str: api_pb2.DATA_TYPE_STRING}
    fields = []
    for name in search.space:
        types = {type(_plain(trial.params.get(name))) for trial in search.trials}
        fields.append(api_pb2.HParamInfo(name=name, type=kinds[types.pop() if len(types) == 1 else str]))
    metric = api_pb2.MetricInfo(name=api_pb2.MetricName(tag="best_dice"), display_name="best mean Dice")
    experiment = api_pb2.Experiment(description=search.name, hparam_infos=fields, metric_infos=[metric])
    return _summary(metadata.EXPERIMENT_TAG, experiment=experiment)


def _summary(tag: str, **data: Any) -> Any:
    """Return HParams data as a summary; TensorBoard's own function for this needs TensorFlow."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    content = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**data))
    return Summary(value=[Summary.Value(tag=tag, metadata=content, tensor=metadata.NULL_TENSOR)])


def _plain(value: Any) -> bool | float | str:
    """Return a value as HParams stores it."""
    number = as_number(value)
    return value if isinstance(value, bool) else number if number is not None else format_value(value)
