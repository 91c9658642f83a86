"""Test proposals: reproducible, inside the space, and near good trials."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.tune.spaces import space
from voxlane.tune.proposals import Proposals
from voxlane.tune.space import parse_space
from voxlane.tune.trials import Trial


def trial(number: int, params: dict[str, Any], **fields: Any) -> Trial:
    return Trial(**{"id": f"{number:04d}", "number": number, "params": params, "state": "done", **fields})


FIELDS = {
    "patch": {"choice": [[16, 16, 16], [16, 32, 32]]},
    "base_features": {"logint": [2, 64]},
    "augment": {"strength": {"quniform": [0, 1, 0.25]}},
    "loader": {"in_flight": {"int": [1, 8]}},
    "deep_supervision": {"choice": [True, False]},
}


@pytest.mark.parametrize("search", ["optuna", "random"])
def test_proposals_lie_in_the_space(search: str) -> None:
    parsed = parse_space(space({"search": search, "seed": 3}, **FIELDS))
    proposals = Proposals(parsed)
    drawn = []
    for number in range(30):
        params = proposals.propose(number)
        drawn.append(params)
        proposals.add_result(trial(number, params, dice=number / 30, curve=[(1, number / 30)]))
    assert all(1e-4 <= d["optimizer.lr"] <= 0.1 for d in drawn)
    assert {type(d["base_features"]) for d in drawn} == {int}
    assert all(2 <= d["base_features"] <= 64 for d in drawn)
    assert {d["augment.strength"] for d in drawn} <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert {str(d["patch"]) for d in drawn} == {"[16, 16, 16]", "[16, 32, 32]"}
    assert {d["deep_supervision"] for d in drawn} == {True, False}


@pytest.mark.parametrize("search", ["optuna", "random", "grid"])
def test_killed_search_proposes_the_same(search: str) -> None:
    parsed = parse_space(space({"search": search, "trials": 30}, base_features={"choice": [2, 4]}))
    uninterrupted = Proposals(parsed)
    ended = []
    for number in range(14):
        params = uninterrupted.propose(number)
        dice = 1 - abs(params["optimizer.lr"] - 0.01)
        ended.append(trial(number, params, dice=dice, curve=[(1, dice)]))
        uninterrupted.add_result(ended[-1])
    assert Proposals(parsed, ended).propose(14) == uninterrupted.propose(14)


def test_optuna_proposes_near_good_trials() -> None:
    parsed = parse_space(space({"search": "optuna"}))
    proposals = Proposals(parsed)
    lrs = []
    for number in range(40):
        params = proposals.propose(number)
        lrs.append(params["optimizer.lr"])
        proposals.add_result(trial(number, params, dice=1 / (1 + abs(params["optimizer.lr"] - 0.05) * 50)))
    early, late = lrs[:10], lrs[25:]
    assert statistics.median(abs(lr - 0.05) for lr in late) < statistics.median(abs(lr - 0.05) for lr in early) / 2


def test_infeasible_trials_count_as_worst_and_failed_ones_not_at_all() -> None:
    parsed = parse_space(space({"search": "optuna"}, base_features={"logint": [2, 1024]}))
    after_infeasible, after_failed = [], []
    for state, late in (("infeasible", after_infeasible), ("failed", after_failed)):
        proposals = Proposals(parsed)
        for number in range(45):
            params = proposals.propose(number)
            if number >= 25:
                late.append(params["base_features"])
            if params["base_features"] > 100:
                proposals.add_result(trial(number, params, state=state, reason="no memory"))
            else:
                proposals.add_result(trial(number, params, dice=0.5))
    assert sum(f > 100 for f in after_infeasible) < sum(f > 100 for f in after_failed)


def test_stopped_trials_are_pruned() -> None:
    proposals = Proposals(parse_space(space({"search": "optuna"})))
    for number, state in enumerate(("done", "stopped")):
        proposals.add_result(trial(number, proposals.propose(number), state=state, dice=0.4, curve=[(1, 0.4)]))
    states = [t.state.name for t in proposals._study.trials if t.state.name != "FAIL"]
    assert states == ["COMPLETE", "PRUNED"]


def test_grid_repeats_its_combinations_with_new_draws() -> None:
    parsed = parse_space(space({"trials": 4}, base_features={"grid": [2, 4]}))
    proposed = [Proposals(parsed).propose(number) for number in range(4)]
    assert [a["base_features"] for a in proposed] == [2, 4, 2, 4]
    assert len({a["optimizer.lr"] for a in proposed}) == 4
