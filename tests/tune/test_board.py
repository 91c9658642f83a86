"""A search in TensorBoard, read back by TensorBoard itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tune import made_search
from voxlane.train.run import Run
from voxlane.tune import board


def _read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def _hparams(found: Any) -> Any:
    from tensorboard.plugins.hparams import metadata

    contents = found.summary_metadata
    return {
        tag: metadata.parse_session_start_info_plugin_data(contents[tag].plugin_data.content)
        for tag in contents
        if tag == metadata.SESSION_START_INFO_TAG
    }


def test_every_trial_has_its_fields_and_its_curve(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    search = made_search.search()
    board.write(search, Run(str(tmp_path)))
    assert search.best is not None
    for trial in (search.best, *made_search.only(search, "infeasible").trials[:1]):
        found = _read(tmp_path / "tensorboard" / trial.id)
        curve = [(e.step, e.value) for e in found.Scalars("mean_dice")] if trial.curve else []
        assert [step for step, _ in curve] == [epoch for epoch, _ in trial.curve]
        assert [value for _, value in curve] == pytest.approx([dice for _, dice in trial.curve])
        told = _hparams(found)[metadata.SESSION_START_INFO_TAG].hparams
        assert set(told) == set(search.space)
        assert told["optimizer.lr"].number_value == trial.params["optimizer.lr"]
        assert told["optimizer.name"].string_value == trial.params["optimizer.name"]
        assert told["patch"].string_value == " × ".join(map(str, trial.params["patch"]))
        times = [e.wall_time for e in found.Scalars("mean_dice")] if trial.curve else []
        assert times == sorted(times)
    assert _read(tmp_path / "tensorboard" / search.best.id).Scalars("best_dice")[0].value == pytest.approx(
        search.best.dice
    )


def test_the_search_declares_its_fields_and_metric(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    search = made_search.search()
    board.write(search, Run(str(tmp_path)))
    found = _read(tmp_path / "tensorboard")
    content = found.summary_metadata[metadata.EXPERIMENT_TAG].plugin_data.content
    experiment = metadata.parse_experiment_plugin_data(content)
    assert [info.name for info in experiment.hparam_infos] == list(search.space)
    assert [info.name.tag for info in experiment.metric_infos] == ["best_dice"]


def test_writing_again_leaves_nothing_double(tmp_path: Path) -> None:
    search = made_search.search(4)
    board.write(search, Run(str(tmp_path)))
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*tfevents*"))
    board.write(search, Run(str(tmp_path)))
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*tfevents*")) == before
    assert len(before) == 5


def test_states_end_as_what_they_are(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import api_pb2, metadata

    search = made_search.search()
    board.write(search, Run(str(tmp_path)))
    wanted = {"done": api_pb2.STATUS_SUCCESS, "stopped": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE}
    for state, status in {**wanted, "infeasible": api_pb2.STATUS_FAILURE, "running": None}.items():
        trial = made_search.only(search, state).trials[0]
        contents = _read(tmp_path / "tensorboard" / trial.id).summary_metadata
        ended = contents.get(metadata.SESSION_END_INFO_TAG)
        found = metadata.parse_session_end_info_plugin_data(ended.plugin_data.content).status if ended else None
        assert found == status, state
