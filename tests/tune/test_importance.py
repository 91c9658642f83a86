"""Test importance: a planted cause comes first, and few trials show nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.tune import fake_search
from voxlane.tune.importance import MIN_TRIALS, importance, importance_range, scored_trials
from voxlane.tune.trials import Search


def _caused_by(name: str, trials: int = 120) -> Search:
    """Return a search in which one field alone decides the Dice."""
    search = fake_search.search(trials)
    values = sorted({str(t.params[name]) for t in search.trials})

    def dice(value: object) -> float:
        return values.index(str(value)) / len(values)

    return replace(
        search,
        trials=[
            replace(t, state="done", dice=dice(t.params[name]) + t.number * 1e-6, reason="") for t in search.trials
        ],
    )


@pytest.mark.parametrize("name", ["optimizer.lr", "optimizer.name", "norm", "depth", "patch", "augment.strength"])
def test_deciding_field_comes_first(name: str) -> None:
    shares = importance(_caused_by(name))
    assert next(iter(shares)) == name
    assert shares[name] > 0.5
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert set(shares) == set(fake_search.SPACE)


def test_few_trials_show_nothing() -> None:
    search = _caused_by("norm")
    assert importance(replace(search, trials=search.trials[: MIN_TRIALS - 1])) == {}
    assert importance(replace(search, trials=search.trials[:MIN_TRIALS])) != {}
    assert importance(replace(search, trials=[])) == {}
    assert importance_range(replace(search, trials=[])) == {}


def test_only_ended_trials_with_a_dice_count() -> None:
    search = fake_search.search()
    counted = scored_trials(search)
    assert {t.state for t in counted} == {"done", "stopped"}
    odd = [replace(t, dice=math.nan) for t in search.trials]
    assert importance(replace(search, trials=odd)) == {}


def test_equal_dice_or_equal_fields_show_nothing() -> None:
    search = _caused_by("norm")
    assert importance(replace(search, trials=[replace(t, dice=0.5) for t in search.trials])) == {}
    fixed = {**search.trials[0].params}
    assert importance(replace(search, trials=[replace(t, params=fixed) for t in search.trials])) == {}


def test_single_field_has_all_importance() -> None:
    search = _caused_by("norm")
    trials = [replace(t, params={"norm": t.params["norm"]}) for t in search.trials]
    assert importance(replace(search, space={"norm": search.space["norm"]}, trials=trials)) == {"norm": 1.0}


def test_values_of_mixed_types() -> None:
    search = _caused_by("norm")
    odd = [None, True, "a", [1, 2]]
    trials = [replace(t, params={**t.params, "odd": odd[t.number % 4]}) for t in search.trials]
    shares = importance(replace(search, space={**search.space, "odd": {"choice": odd}}, trials=trials))
    assert next(iter(shares)) == "norm"
    assert "odd" in shares


def test_range_contains_the_share_and_shrinks_with_trials() -> None:
    few, many = _caused_by("norm", 24), _caused_by("norm", 120)
    for search in (few, many):
        shares, ranges = importance(search), importance_range(search)
        assert all(low <= shares[name] <= high for name, (low, high) in ranges.items())
        assert importance_range(search) == ranges, "the same every time"
    wide = sum(high - low for low, high in importance_range(few).values())
    assert sum(high - low for low, high in importance_range(many).values()) < wide
