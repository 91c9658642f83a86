"""Test the event files of a search by reading them with TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tune import fake_search
from voxlane.train.run import Run
from voxlane.tune.report import write_events


def _read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def _read_hparams(events: Any) -> Any:
    from tensorboard.plugins.hparams import metadata

    contents = events.summary_metadata
    return {
        tag: metadata.parse_session_start_info_plugin_data(contents[tag].plugin_data.content)
        for tag in contents
        if tag == metadata.SESSION_START_INFO_TAG
    }


def test_every_trial_has_its_fields_and_curve(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    search = fake_search.search()
    write_events(search, Run(str(tmp_path)))
    assert search.best is not None
    for trial in (search.best, *fake_search.only(search, "infeasible").trials[:1]):
        events = _read(tmp_path / "tensorboard" / trial.id)
        curve = [(e.step, e.value) for e in events.Scalars("mean_dice")] if trial.curve else []
        assert [step for step, _ in curve] == [epoch for epoch, _ in trial.curve]
        assert [value for _, value in curve] == pytest.approx([dice for _, dice in trial.curve])
        hparams = _read_hparams(events)[metadata.SESSION_START_INFO_TAG].hparams
        assert set(hparams) == set(search.space)
        assert hparams["optimizer.lr"].number_value == trial.params["optimizer.lr"]
        assert hparams["optimizer.name"].string_value == trial.params["optimizer.name"]
        assert hparams["patch"].string_value == " × ".join(map(str, trial.params["patch"]))
        times = [e.wall_time for e in events.Scalars("mean_dice")] if trial.curve else []
        assert times == sorted(times)
    assert _read(tmp_path / "tensorboard" / search.best.id).Scalars("best_dice")[0].value == pytest.approx(
        search.best.dice
    )


def test_search_declares_its_fields_and_metric(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    search = fake_search.search()
    write_events(search, Run(str(tmp_path)))
    events = _read(tmp_path / "tensorboard")
    content = events.summary_metadata[metadata.EXPERIMENT_TAG].plugin_data.content
    experiment = metadata.parse_experiment_plugin_data(content)
    assert [info.name for info in experiment.hparam_infos] == list(search.space)
    assert [info.name.tag for info in experiment.metric_infos] == ["best_dice"]


def test_writing_again_replaces_files(tmp_path: Path) -> None:
    search = fake_search.search(4)
    write_events(search, Run(str(tmp_path)))
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*tfevents*"))
    write_events(search, Run(str(tmp_path)))
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*tfevents*")) == before
    assert len(before) == 5


def test_states_become_session_statuses(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import api_pb2, metadata

    search = fake_search.search()
    write_events(search, Run(str(tmp_path)))
    statuses = {"done": api_pb2.STATUS_SUCCESS, "stopped": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE}
    for state, status in {**statuses, "infeasible": api_pb2.STATUS_FAILURE, "running": None}.items():
        trial = fake_search.only(search, state).trials[0]
        contents = _read(tmp_path / "tensorboard" / trial.id).summary_metadata
        ended = contents.get(metadata.SESSION_END_INFO_TAG)
        written = metadata.parse_session_end_info_plugin_data(ended.plugin_data.content).status if ended else None
        assert written == status, state
