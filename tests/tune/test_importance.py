"""Importance: a planted cause comes first, few trials claim nothing, and Optuna's own study agrees."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.tune import made_search
from voxlane.tune.importance import MIN_TRIALS, importance, scored, spread
from voxlane.tune.trials import Search


def _caused_by(name: str, trials: int = 120) -> Search:
    """A search in which only one field decides the Dice."""
    made = made_search.search(trials)
    values = sorted({str(t.params[name]) for t in made.trials})

    def dice(value: object) -> float:
        return values.index(str(value)) / len(values)

    return replace(
        made,
        trials=[replace(t, state="done", dice=dice(t.params[name]) + t.number * 1e-6, why="") for t in made.trials],
    )


@pytest.mark.parametrize("name", ["optimizer.lr", "optimizer.name", "norm", "depth", "patch", "augment.strength"])
def test_what_decides_comes_first(name: str) -> None:
    found = importance(_caused_by(name))
    assert next(iter(found)) == name
    assert found[name] > 0.5
    assert sum(found.values()) == pytest.approx(1)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert set(found) == set(made_search.SPACE)


def test_few_trials_say_nothing() -> None:
    made = _caused_by("norm")
    assert importance(replace(made, trials=made.trials[: MIN_TRIALS - 1])) == {}
    assert importance(replace(made, trials=made.trials[:MIN_TRIALS])) != {}
    assert importance(replace(made, trials=[])) == {}
    assert spread(replace(made, trials=[])) == {}


def test_trials_without_a_dice_or_not_at_their_end_do_not_count() -> None:
    made = made_search.search()
    counted = scored(made)
    assert {t.state for t in counted} == {"done", "stopped"}
    odd = [replace(t, dice=math.nan) for t in made.trials]
    assert importance(replace(made, trials=odd)) == {}


def test_equal_dice_or_equal_fields_say_nothing() -> None:
    made = _caused_by("norm")
    assert importance(replace(made, trials=[replace(t, dice=0.5) for t in made.trials])) == {}
    fixed = {**made.trials[0].params}
    assert importance(replace(made, trials=[replace(t, params=fixed) for t in made.trials])) == {}


def test_one_field_is_all_there_is() -> None:
    made = _caused_by("norm")
    trials = [replace(t, params={"norm": t.params["norm"]}) for t in made.trials]
    assert importance(replace(made, space={"norm": made.space["norm"]}, trials=trials)) == {"norm": 1.0}


def test_values_of_mixed_kinds() -> None:
    made = _caused_by("norm")
    odd = [None, True, "a", [1, 2]]
    trials = [replace(t, params={**t.params, "odd": odd[t.number % 4]}) for t in made.trials]
    found = importance(replace(made, space={**made.space, "odd": {"choice": odd}}, trials=trials))
    assert next(iter(found)) == "norm"
    assert "odd" in found


def test_the_spread_holds_the_share_and_shrinks_with_trials() -> None:
    few, many = _caused_by("norm", 24), _caused_by("norm", 120)
    for made in (few, many):
        shares, ranges = importance(made), spread(made)
        assert all(low <= shares[name] <= high for name, (low, high) in ranges.items())
        assert spread(made) == ranges, "the same every time"
    wide = sum(high - low for low, high in spread(few).values())
    assert sum(high - low for low, high in spread(many).values()) < wide
