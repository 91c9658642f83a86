"""Write a search for TensorBoard: OUT/tensorboard has one run per trial with its fields (HParams tab) and curve."""

from __future__ import annotations

import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from voxlane.pages.formatting import as_number, format_value
from voxlane.train.run import Run
from voxlane.tune.trials import Search, Trial

_NAME = "events.out.tfevents.search"
"""TensorBoard reads any file with `tfevents` in its name; a constant name means that writing again replaces it."""
_UPLOADS = 16


def write_events(search: Search, run: Run) -> None:
    """Write the event files of `search` below `run`, replacing earlier ones."""
    with tempfile.TemporaryDirectory(prefix="voxlane-board-") as folder:
        bodies = {f"tensorboard/{_NAME}": _events(Path(folder) / "search", [(_experiment(search), 0, None)])}
        for trial in search.trials:
            events = _trial_events(trial, search)
            bodies[f"tensorboard/{trial.id}/{_NAME}"] = _events(Path(folder) / str(trial.number), events)
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
