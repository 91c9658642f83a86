"""The record of a search, without a cluster: who is next, what is kept, and going on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tune.spaces import space
from voxlane.errors import ClusterError, ConfigError, TuneError
from voxlane.launch.cluster import Node
from voxlane.tune.config import TuneConfig
from voxlane.tune.ledger import Ledger
from voxlane.tune.room import room
from voxlane.tune.space import parse
from voxlane.tune.trial import Task, points, work
from voxlane.tune.trials import Search, Trial


class Kept:
    """A search that is written here."""

    def __init__(self, trials: int = 3, search: Search | None = None) -> None:
        self.writes: list[Search] = []
        self.ended: list[Trial] = []
        self.space = parse(space({"trials": trials, "search": "random"}))
        first = search or Search("s", "data", self.space.plain(), {}, [], "2026-01-01T00:00:00+00:00", 2)
        self.ledger = Ledger(first, self.space, "file:///s", self.writes.append, self.ended.append)

    def begin(self) -> int:
        trial = self.ledger.next()
        assert trial is not None
        self.ledger.started(trial.number)
        return trial.number


def test_trials_from_begin_to_end() -> None:
    kept = Kept()
    first, second = kept.begin(), kept.begin()
    kept.ledger.reported(first, 1, 0.3, "host")
    kept.ledger.reported(first, 2, 0.2, "host")
    kept.ledger.over(first, "done")
    kept.ledger.reported(second, 1, 0.1)
    kept.ledger.stopped(second, 4)
    third = kept.begin()
    assert kept.ledger.next() is None
    assert not kept.ledger.finished
    kept.ledger.over(third, "infeasible", "too little memory")
    assert kept.ledger.finished
    found = kept.writes[-1]
    assert [t.state for t in found.trials] == ["done", "stopped", "infeasible"]
    assert [t.dice for t in found.trials] == [0.3, 0.1, None]
    assert found.trials[0].curve == [(1, 0.3), (2, 0.2)]
    assert found.trials[0].node == "host"
    assert found.trials[1].why == "others did better than its 0.100 after 1 epochs"
    assert found.best == found.trials[0]
    assert [t.run for t in found.trials] == [f"file:///s/trials/000{n}" for n in range(3)]
    assert [t.number for t in kept.ended] == [0, 1, 2]
    assert Search.from_json(found.to_json()) == found


def test_the_end_of_a_trial_is_no_stop() -> None:
    kept = Kept()
    kept.ledger.reported(kept.begin(), 4, 0.3)
    kept.ledger.stopped(0, 4)
    assert kept.ended[0].state == "done"


def test_a_killed_search_goes_on_with_what_was_running() -> None:
    kept = Kept()
    kept.ledger.over(kept.begin(), "done")
    running = kept.begin()
    kept.ledger.reported(running, 2, 0.5)
    kept.ledger.flush(at_once=True)
    again = Kept(search=Search.from_json(kept.writes[-1].to_json()))
    trial = again.ledger.next()
    assert trial is not None
    assert (trial.number, trial.epochs, trial.curve) == (running, 2, [(2, 0.5)])
    again.ledger.started(running)
    again.ledger.reported(running, 2, 0.1)
    assert again.ledger.search.trials[1].curve == [(2, 0.5)], "what was reported before counts once"
    fresh = again.ledger.next()
    assert fresh is not None
    assert fresh.number == 2
    assert fresh.params == kept.ledger.next().params  # type: ignore[union-attr]


def test_more_trials_may_be_asked_for_later() -> None:
    kept = Kept(1)
    kept.ledger.over(kept.begin(), "done")
    assert kept.ledger.finished
    more = Kept(2, kept.writes[-1])
    assert more.begin() == 1


def test_a_lost_trial_is_begun_again_as_long_as_it_gets_on() -> None:
    kept = Kept(1)
    for epoch in range(1, 5):
        number = kept.begin()
        kept.ledger.reported(number, epoch, 0.1)
        kept.ledger.lost(number, "node gone")
    for _ in range(2):
        kept.ledger.lost(kept.begin(), "node gone")
    assert kept.ledger.finished
    assert kept.ended[0].state == "failed"
    assert kept.ended[0].why == "lost 3 times without a new epoch: node gone"
    assert kept.ended[0].epochs == 4


def test_no_more_is_begun_when_all_fail_alike() -> None:
    kept = Kept(9)
    for _ in range(3):
        kept.ledger.over(kept.begin(), "failed", "the disk is full")
    assert kept.ledger.hopeless == "the disk is full"
    assert kept.ledger.next() is None
    other = Kept(9)
    other.ledger.reported(other.begin(), 1, 0.2)
    other.ledger.over(0, "done")
    for _ in range(3):
        other.ledger.over(other.begin(), "failed", "the disk is full")
    assert not other.ledger.hopeless


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2}', '{"version": 1, "trials": [{}]}', '{"version": 1, "trials": 3}', "\0"],
)
def test_a_damaged_record_is_said(text: str) -> None:
    with pytest.raises(TuneError, match=r"OUT/tune\.json"):
        Search.from_json(text, origin="OUT/tune.json")


def test_a_record_with_an_unknown_state_is_refused() -> None:
    kept = Kept()
    kept.begin()
    values = json.loads(kept.writes[-1].to_json())
    values["trials"][0]["state"] = "odd"
    with pytest.raises(TuneError, match="state that no search writes"):
        Search.from_json(json.dumps(values))


def test_efficiency_is_the_share_of_devices_that_trials_held() -> None:
    def trial(number: int, started: float, ended: float) -> Trial:
        return Trial(str(number), number, {}, "done", started=started, ended=ended)

    search = Search("s", "d", {}, {}, [], "", 2, [trial(0, 0.5, 10.5), trial(1, 0.5, 5.5), trial(2, 5.5, 10.5)])
    assert search.efficiency == 1.0
    assert Search("s", "d", {}, {}, [], "", 2).efficiency is None


# -- room --------------------------------------------------------------------------------------------------------------

CPUS = [Node("a", "a", 4, 0), Node("b", "b", 3, 0)]
GPUS = [Node("a", "a", 8, 2), Node("b", "b", 8, 1)]


@pytest.mark.parametrize(
    ("nodes", "said", "trials", "cpus", "gpus"),
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
def test_trials_at_once(nodes: list[Node], said: dict[str, Any], trials: int, cpus: float, gpus: float) -> None:
    found = room(nodes, TuneConfig(**said))
    assert (found.trials, found.cpus, found.gpus) == (trials, cpus, gpus)


@pytest.mark.parametrize(
    ("nodes", "said", "message"),
    [
        (CPUS, {"cpus_per_trial": 5}, "a trial wants 5 CPU, the cluster has 7 CPU.*Give tune.cpus_per_trial=4"),
        (CPUS, {"gpus_per_trial": 1}, "the cluster has 7 CPU and 0 GPU.*Leave tune.gpus_per_trial"),
        (GPUS, {"gpus_per_trial": 3}, "Give tune.gpus_per_trial=2 or less"),
        (CPUS, {"workers_per_trial": 9}, "9 workers of 1 CPU each.*Give tune.workers_per_trial=7"),
    ],
)
def test_more_than_there_is(nodes: list[Node], said: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        room(nodes, TuneConfig(**said))


@pytest.mark.parametrize(
    ("said", "accelerator", "message"),
    [
        ({"gpus_per_trial": 0}, "gpu", "tune.gpus_per_trial: 0, and accelerator is gpu"),
        ({"gpus_per_trial": 1, "workers_per_trial": 2}, "auto", "1 do not give each of 2 workers a GPU"),
    ],
)
def test_gpus_that_make_no_sense(said: dict[str, Any], accelerator: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        room(GPUS, TuneConfig(**said), accelerator)


# -- folds -------------------------------------------------------------------------------------------------------------


def entries(*dice: float | None) -> list[dict[str, Any]]:
    return [{"epoch": epoch, "mean_dice": value} for epoch, value in enumerate(dice)]


def test_points_are_means_at_equal_epochs() -> None:
    histories = [entries(None, 0.2, 0.4, 0.6), entries(0.1, 0.4, 0.6)]
    assert list(points(histories)) == [(2, pytest.approx(0.3)), (3, 0.5)]
    assert list(points(histories, after=2)) == [(3, 0.5)]
    assert list(points([entries()])) == []


def test_folds_wait_for_each_other_at_every_rung(tmp_path: Any) -> None:
    done: list[tuple[str, int]] = []
    heard: list[tuple[int, float]] = []

    def fit(run: Any, until: int, watch: Any) -> None:
        done.append((run.where[-6:], until))
        run.write_json("history.json", entries(*[0.1 * (epoch + 1) for epoch in range(until)]))

    def report(epoch: int, dice: float) -> bool:
        heard.append((epoch, round(dice, 6)))
        return epoch >= 3

    task = Task(0, str(tmp_path), {}, (0, 1), (1, 3, 9))
    work(task, None, lambda run, said: run.write_json("run.json", said), fit, report)
    assert done == [("fold_0", 1), ("fold_1", 1), ("fold_0", 3), ("fold_1", 3)]
    assert heard == [(1, 0.1), (2, 0.2), (3, 0.3)]
