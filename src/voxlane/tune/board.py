"""A search in TensorBoard: OUT/tensorboard holds one run a trial, with its fields (the HParams tab) and its curve."""

from __future__ import annotations

import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from voxlane.train.run import Run
from voxlane.tune.axes import number, text
from voxlane.tune.charts import until
from voxlane.tune.trials import Search, Trial

_NAME = "events.out.tfevents.search"
"""TensorBoard takes any name with `tfevents` in it; always the same, so that writing again leaves nothing double."""
_UPLOADS = 16


def write(search: Search, run: Run) -> None:
    """Write the event files of `search` below `run`, over those of before."""
    with tempfile.TemporaryDirectory(prefix="voxlane-board-") as folder:
        bodies = {f"tensorboard/{_NAME}": _events(Path(folder) / "search", [(_experiment(search), 0, None)])}
        for trial in search.trials:
            events = _trial_events(trial, search)
            bodies[f"tensorboard/{trial.id}/{_NAME}"] = _events(Path(folder) / str(trial.number), events)
    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(run.write, bodies, bodies.values()))


def _events(folder: Path, summaries: list[tuple[Any, int, float | None]]) -> bytes:
    """The bytes of an event file with these (summary, step, Unix seconds)."""
    from torch.utils.tensorboard import FileWriter

    writer = FileWriter(str(folder))
    for summary, step, moment in summaries:
        writer.add_summary(summary, step, walltime=moment)
    writer.close()
    (file,) = folder.iterdir()
    return file.read_bytes()


def _trial_events(trial: Trial, search: Search) -> list[tuple[Any, int, float | None]]:
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
    from torch.utils.tensorboard.summary import scalar

    end = trial.ended if trial.ended is not None else until(search)
    start = plugin_data_pb2.SessionStartInfo(model_uri=trial.run, start_time_secs=trial.started)
    for name, value in trial.params.items():
        known = _plain(value)
        kind = "bool_value" if isinstance(known, bool) else "string_value" if isinstance(known, str) else "number_value"
        setattr(start.hparams[name], kind, known)
    told = _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)
    point: Any = scalar  # PyTorch has no types for it
    events: list[tuple[Any, int, float | None]] = [(told, 0, trial.started)]
    for epoch, dice in trial.curve:
        if math.isfinite(dice):
            share = epoch / max(trial.epochs, 1)
            events.append((point("mean_dice", dice), epoch, trial.started + share * (end - trial.started)))
    if trial.dice is not None and math.isfinite(trial.dice):
        events.append((point("best_dice", trial.dice), trial.epochs, end))
    if trial.ended is not None:
        failed = trial.state in ("failed", "infeasible")
        status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
        ended = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=end)
        events.append((_summary(metadata.SESSION_END_INFO_TAG, session_end_info=ended), trial.epochs, end))
    return events


def _experiment(search: Search) -> Any:
    """What the HParams tab says of the search: its fields and the metric."""
    from tensorboard.plugins.hparams import api_pb2, metadata

    kinds = {bool: api_pb2.DATA_TYPE_BOOL, float: api_pb2.DATA_TYPE_FLOAT64, str: api_pb2.DATA_TYPE_STRING}
    fields = []
    for name in search.space:
        types = {type(_plain(trial.params.get(name))) for trial in search.trials}
        fields.append(api_pb2.HParamInfo(name=name, type=kinds[types.pop() if len(types) == 1 else str]))
    metric = api_pb2.MetricInfo(name=api_pb2.MetricName(tag="best_dice"), display_name="best mean Dice")
    known = api_pb2.Experiment(description=search.name, hparam_infos=fields, metric_infos=[metric])
    return _summary(metadata.EXPERIMENT_TAG, experiment=known)


def _summary(tag: str, **data: Any) -> Any:
    """HParams' data as a summary; TensorBoard's own function for it needs TensorFlow."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    content = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**data))
    return Summary(value=[Summary.Value(tag=tag, metadata=content, tensor=metadata.NULL_TENSOR)])


def _plain(value: Any) -> bool | float | str:
    """A value as HParams keeps it."""
    known = number(value)
    return value if isinstance(value, bool) else known if known is not None else text(value)
