"""Test the record of a search, its capacity and the folds of a trial, without a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tune.spaces import space
from voxlane.cluster.ray.cluster import RayNode
from voxlane.errors import ClusterError, ConfigError, TuneError
from voxlane.tune.capacity import plan_capacity
from voxlane.tune.ledger import SearchLedger
from voxlane.tune.space import TuneConfig, parse_space
from voxlane.tune.task import TrialTask, mean_points, run_trial
from voxlane.tune.trials import Search, Trial


class Recorded:
    """A ledger with everything that it wrote."""

    def __init__(self, trials: int = 3, search: Search | None = None) -> None:
        self.writes: list[Search] = []
        self.ended: list[Trial] = []
        self.space = parse_space(space({"trials": trials, "search": "random"}))
        record = search or Search("s", "data", self.space.plain(), {}, [], "2026-01-01T00:00:00+00:00", 2)
        self.ledger = SearchLedger(record, self.space, "file:///s", self.writes.append, self.ended.append)

    def begin(self) -> int:
        trial = self.ledger.next_trial()
        assert trial is not None
        self.ledger.mark_started(trial.number)
        return trial.number


def test_trials_from_start_to_end() -> None:
    recorded = Recorded()
    first, second = recorded.begin(), recorded.begin()
    recorded.ledger.record_epochs(first, 1, 0.3, "host")
    recorded.ledger.record_epochs(first, 2, 0.2, "host")
    recorded.ledger.finish(first, "done")
    recorded.ledger.record_epochs(second, 1, 0.1)
    recorded.ledger.finish_stopped(second, 4)
    third = recorded.begin()
    assert recorded.ledger.next_trial() is None
    assert not recorded.ledger.finished
    recorded.ledger.finish(third, "infeasible", "too little memory")
    assert recorded.ledger.finished
    record = recorded.writes[-1]
    assert [t.state for t in record.trials] == ["done", "stopped", "infeasible"]
    assert [t.dice for t in record.trials] == [0.3, 0.1, None]
    assert record.trials[0].curve == [(1, 0.3), (2, 0.2)]
    assert record.trials[0].node == "host"
    assert record.trials[1].reason == "other trials did better than its 0.100 after 1 epochs"
    assert record.best == record.trials[0]
    assert [t.run for t in record.trials] == [f"file:///s/trials/000{n}" for n in range(3)]
    assert [t.number for t in recorded.ended] == [0, 1, 2]
    assert Search.from_json(record.to_json()) == record
    assert json.loads(record.to_json())["trials"][2]["why"] == "too little memory", "the name in tune.json"


def test_stop_after_the_last_epoch_is_done() -> None:
    recorded = Recorded()
    recorded.ledger.record_epochs(recorded.begin(), 4, 0.3)
    recorded.ledger.finish_stopped(0, 4)
    assert recorded.ended[0].state == "done"


def test_killed_search_restarts_running_trials() -> None:
    recorded = Recorded()
    recorded.ledger.finish(recorded.begin(), "done")
    running = recorded.begin()
    recorded.ledger.record_epochs(running, 2, 0.5)
    recorded.ledger.flush(at_once=True)
    again = Recorded(search=Search.from_json(recorded.writes[-1].to_json()))
    trial = again.ledger.next_trial()
    assert trial is not None
    assert (trial.number, trial.epochs, trial.curve) == (running, 2, [(2, 0.5)])
    again.ledger.mark_started(running)
    again.ledger.record_epochs(running, 2, 0.1)
    assert again.ledger.search.trials[1].curve == [(2, 0.5)], "epochs reported before count once"
    fresh = again.ledger.next_trial()
    assert fresh is not None
    assert fresh.number == 2
    assert fresh.params == recorded.ledger.next_trial().params  # type: ignore[union-attr]


def test_search_can_be_extended() -> None:
    recorded = Recorded(1)
    recorded.ledger.finish(recorded.begin(), "done")
    assert recorded.ledger.finished
    more = Recorded(2, recorded.writes[-1])
    assert more.begin() == 1


def test_lost_trial_restarts_as_long_as_it_makes_progress() -> None:
    recorded = Recorded(1)
    for epoch in range(1, 5):
        number = recorded.begin()
        recorded.ledger.record_epochs(number, epoch, 0.1)
        recorded.ledger.mark_lost(number, "node gone")
    for _ in range(2):
        recorded.ledger.mark_lost(recorded.begin(), "node gone")
    assert recorded.ledger.finished
    assert recorded.ended[0].state == "failed"
    assert recorded.ended[0].reason == "lost 3 times without a new epoch: node gone"
    assert recorded.ended[0].epochs == 4


def test_no_trial_starts_after_all_failed_for_one_reason() -> None:
    recorded = Recorded(9)
    for _ in range(3):
        recorded.ledger.finish(recorded.begin(), "failed", "the disk is full")
    assert recorded.ledger.common_failure == "the disk is full"
    assert recorded.ledger.next_trial() is None
    other = Recorded(9)
    other.ledger.record_epochs(other.begin(), 1, 0.2)
    other.ledger.finish(0, "done")
    for _ in range(3):
        other.ledger.finish(other.begin(), "failed", "the disk is full")
    assert not other.ledger.common_failure


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2}', '{"version": 1, "trials": [{}]}', '{"version": 1, "trials": 3}', "\0"],
)
def test_damaged_record_is_named(text: str) -> None:
    with pytest.raises(TuneError, match=r"OUT/tune\.json"):
        Search.from_json(text, origin="OUT/tune.json")


def test_unknown_state_is_refused() -> None:
    recorded = Recorded()
    recorded.begin()
    values = json.loads(recorded.writes[-1].to_json())
    values["trials"][0]["state"] = "odd"
    with pytest.raises(TuneError, match="unknown state"):
        Search.from_json(json.dumps(values))


def test_efficiency_is_the_used_share_of_devices() -> None:
    def trial(number: int, started: float, ended: float) -> Trial:
        return Trial(str(number), number, {}, "done", started=started, ended=ended)

    search = Search("s", "d", {}, {}, [], "", 2, [trial(0, 0.5, 10.5), trial(1, 0.5, 5.5), trial(2, 5.5, 10.5)])
    assert search.efficiency == 1.0
    assert Search("s", "d", {}, {}, [], "", 2).efficiency is None


# -- capacity ----------------------------------------------------------------------------------------------------------

CPUS = [RayNode("a", 4, 0), RayNode("b", 3, 0)]
GPUS = [RayNode("a", 8, 2), RayNode("b", 8, 1)]


@pytest.mark.parametrize(
    ("nodes", "settings", "trials", "cpus", "gpus"),
    [
        (CPUS, {}, 7, 1, 0),
        (CPUS, {"cpus_per_trial": 2}, 3, 2, 0),
        (CPUS, {"cpus_per_trial": 0.5}, 14, 0.5, 0),
        (CPUS, {"workers_per_trial": 3}, 2, 1, 0),
        (CPUS, {"max_concurrent": 2}, 2, 1, 0),
        (GPUS, {}, 3, 1, 1),
        (GPUS, {"gpus_per_trial": 0.5}, 6, 1, 0.5),
        (GPUS, {"gpus_per_trial": 0}, 16, 1, 0),
        (GPUS, {"workers_per_trial": 2}, 1, 1, 1),
    ],
)
def test_capacity(nodes: list[RayNode], settings: dict[str, Any], trials: int, cpus: float, gpus: float) -> None:
    capacity = plan_capacity(nodes, TuneConfig(**settings))
    assert (capacity.trials, capacity.cpus, capacity.gpus) == (trials, cpus, gpus)


@pytest.mark.parametrize(
    ("nodes", "settings", "message"),
    [
        (CPUS, {"cpus_per_trial": 5}, "a trial needs 5 CPU, but the cluster has 7 CPU.*Use tune.cpus_per_trial=4"),
        (CPUS, {"gpus_per_trial": 1}, "the cluster has 7 CPU and 0 GPU.*Remove tune.gpus_per_trial"),
        (GPUS, {"gpus_per_trial": 3}, "Use tune.gpus_per_trial=2 or less"),
        (CPUS, {"workers_per_trial": 9}, "9 workers of 1 CPU each.*Use tune.workers_per_trial=7"),
    ],
)
def test_trial_larger_than_the_cluster(nodes: list[RayNode], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        plan_capacity(nodes, TuneConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "accelerator", "message"),
    [
        ({"gpus_per_trial": 0}, "gpu", "tune.gpus_per_trial is 0, but accelerator is gpu"),
        ({"gpus_per_trial": 1, "workers_per_trial": 2}, "auto", "1 GPUs cannot be divided among 2 workers"),
    ],
)
def test_contradictory_gpus(settings: dict[str, Any], accelerator: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_capacity(GPUS, TuneConfig(**settings), accelerator)


# -- folds -------------------------------------------------------------------------------------------------------------


def entries(*dice: float | None) -> list[dict[str, Any]]:
    return [{"epoch": epoch, "mean_dice": value} for epoch, value in enumerate(dice)]


def test_points_are_means_at_equal_epochs() -> None:
    histories = [entries(None, 0.2, 0.4, 0.6), entries(0.1, 0.4, 0.6)]
    assert list(mean_points(histories)) == [(2, pytest.approx(0.3)), (3, 0.5)]
    assert list(mean_points(histories, after=2)) == [(3, 0.5)]
    assert list(mean_points([entries()])) == []


def test_folds_wait_for_each_other_at_every_rung(tmp_path: Any) -> None:
    trained: list[tuple[str, int]] = []
    reported: list[tuple[int, float]] = []

    def fit(run: Any, until: int, watch: Any) -> None:
        trained.append((run.folder_uri[-6:], until))
        run.write_json("history.json", entries(*[0.1 * (epoch + 1) for epoch in range(until)]))

    def report(epoch: int, dice: float) -> bool:
        reported.append((epoch, round(dice, 6)))
        return epoch >= 3

    task = TrialTask(0, str(tmp_path), {}, (0, 1), (1, 3, 9))
    run_trial(task, None, lambda run, values: run.write_json("run.json", values), fit, report)
    assert trained == [("fold_0", 1), ("fold_1", 1), ("fold_0", 3), ("fold_1", 3)]
    assert reported == [(1, 0.1), (2, 0.2), (3, 0.3)]
