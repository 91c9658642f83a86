"""Proposals: the same whenever they are asked for, and nearer to what did well."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.tune.spaces import space
from voxlane.tune.search import Proposals
from voxlane.tune.space import parse
from voxlane.tune.trials import Trial


def trial(number: int, params: dict[str, Any], **more: Any) -> Trial:
    return Trial(**{"id": f"{number:04d}", "number": number, "params": params, "state": "done", **more})


MANY = {
    "patch": {"choice": [[16, 16, 16], [16, 32, 32]]},
    "base_features": {"logint": [2, 64]},
    "augment": {"strength": {"quniform": [0, 1, 0.25]}},
    "loader": {"in_flight": {"int": [1, 8]}},
    "deep_supervision": {"choice": [True, False]},
}


@pytest.mark.parametrize("search", ["optuna", "random"])
def test_what_is_proposed_lies_in_the_space(search: str) -> None:
    found = parse(space({"search": search, "seed": 3}, **MANY))
    proposals = Proposals(found)
    drawn = []
    for number in range(30):
        params = proposals.ask(number)
        drawn.append(params)
        proposals.tell(trial(number, params, dice=number / 30, curve=[(1, number / 30)]))
    assert all(1e-4 <= d["optimizer.lr"] <= 0.1 for d in drawn)
    assert {type(d["base_features"]) for d in drawn} == {int}
    assert all(2 <= d["base_features"] <= 64 for d in drawn)
    assert {d["augment.strength"] for d in drawn} <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert {str(d["patch"]) for d in drawn} == {"[16, 16, 16]", "[16, 32, 32]"}
    assert {d["deep_supervision"] for d in drawn} == {True, False}


@pytest.mark.parametrize("search", ["optuna", "random", "grid"])
def test_a_killed_search_proposes_what_it_would_have(search: str) -> None:
    found = parse(space({"search": search, "trials": 30}, base_features={"choice": [2, 4]}))
    straight = Proposals(found)
    ended = []
    for number in range(14):
        params = straight.ask(number)
        dice = 1 - abs(params["optimizer.lr"] - 0.01)
        ended.append(trial(number, params, dice=dice, curve=[(1, dice)]))
        straight.tell(ended[-1])
    assert Proposals(found, ended).ask(14) == straight.ask(14)


def test_optuna_looks_where_it_was_good() -> None:
    found = parse(space({"search": "optuna"}))
    proposals = Proposals(found)
    lrs = []
    for number in range(40):
        params = proposals.ask(number)
        lrs.append(params["optimizer.lr"])
        proposals.tell(trial(number, params, dice=1 / (1 + abs(params["optimizer.lr"] - 0.05) * 50)))
    early, late = lrs[:10], lrs[25:]
    assert statistics.median(abs(lr - 0.05) for lr in late) < statistics.median(abs(lr - 0.05) for lr in early) / 2


def test_infeasible_counts_as_worst_and_failed_as_nothing() -> None:
    found = parse(space({"search": "optuna"}, base_features={"logint": [2, 1024]}))
    shunned, forgotten = [], []
    for state, late in (("infeasible", shunned), ("failed", forgotten)):
        proposals = Proposals(found)
        for number in range(45):
            params = proposals.ask(number)
            if number >= 25:
                late.append(params["base_features"])
            if params["base_features"] > 100:
                proposals.tell(trial(number, params, state=state, why="no memory"))
            else:
                proposals.tell(trial(number, params, dice=0.5))
    assert sum(f > 100 for f in shunned) < sum(f > 100 for f in forgotten)


def test_stopped_trials_are_told_with_how_far_they_came() -> None:
    proposals = Proposals(parse(space({"search": "optuna"})))
    for number, state in enumerate(("done", "stopped")):
        proposals.tell(trial(number, proposals.ask(number), state=state, dice=0.4, curve=[(1, 0.4)]))
    states = [t.state.name for t in proposals._study.trials if t.state.name != "FAIL"]
    assert states == ["COMPLETE", "PRUNED"]


def test_a_grid_goes_through_its_combinations_again_with_new_draws() -> None:
    found = parse(space({"trials": 4}, base_features={"grid": [2, 4]}))
    asked = [Proposals(found).ask(number) for number in range(4)]
    assert [a["base_features"] for a in asked] == [2, 4, 2, 4]
    assert len({a["optimizer.lr"] for a in asked}) == 4
