"""Test max-min fair sharing: closed forms, and equality with the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.simulator.reference import PlainSharing
from voxlane.bench.simulator.fair_sharing import FairSharing


def run(sharing: Any, joins: list[tuple[float, int, float, int]]) -> dict[int, float]:
    """Return the end time of each (time, node, size, streams)."""
    ended: dict[int, float] = {}
    left = sorted(enumerate(joins), key=lambda each: each[1][0])
    while left or sharing.next_end() < math.inf:
        at = min(left[0][1][0] if left else math.inf, sharing.next_end())
        ended |= dict.fromkeys(sharing.advance(at), at)
        while left and left[0][1][0] <= at:
            place, (_, node, size, streams) = left.pop(0)
            sharing.add(node, size, place, streams)
    return ended


def test_one_stream_runs_at_its_own_rate() -> None:
    assert run(FairSharing(1, stream_rate=10, node_rate=100), [(1.0, 0, 50, 1)]) == {0: pytest.approx(6.0)}


def test_full_link_is_shared_equally() -> None:
    ended = run(FairSharing(1, stream_rate=10, node_rate=20), [(0, 0, 10, 1), (0, 0, 10, 1), (0, 0, 30, 2)])
    # Four streams at 5 each until 2 s, then two at 10.
    assert ended == {0: pytest.approx(2.0), 1: pytest.approx(2.0), 2: pytest.approx(4.0)}


def test_bucket_is_shared_over_streams_but_a_full_link_takes_less() -> None:
    sharing = FairSharing(2, stream_rate=math.inf, node_rate=6, total_rate=10)
    sharing.add(0, 100, "many", 3)
    sharing.add(1, 100, "one")
    assert sharing.rate == pytest.approx(10)
    # Node 0's link is full, 2 a stream; node 1 gets the rest, 4, and ends first.
    assert sharing.next_end() == pytest.approx(25)


def test_no_limit_takes_no_time() -> None:
    ended = run(FairSharing(1, stream_rate=math.inf, node_rate=math.inf), [(3.0, 0, 1e6, 4)])
    assert ended == {0: pytest.approx(3.0, abs=1e-6)}


joins = st.lists(
    st.tuples(st.floats(0, 10), st.integers(0, 3), st.floats(0.1, 50), st.integers(1, 4)), min_size=1, max_size=12
)
rates = st.one_of(st.floats(0.5, 50), st.just(math.inf))


@settings(max_examples=100, deadline=None)
@given(joins, st.floats(0.5, 20), rates, rates)
def test_clocks_match_individual_streams(
    joins: list[tuple[float, int, float, int]], stream_rate: float, node_rate: float, total_rate: float
) -> None:
    rates = {"stream_rate": stream_rate, "node_rate": node_rate, "total_rate": total_rate}
    assert run(FairSharing(4, **rates), joins) == pytest.approx(run(PlainSharing(4, **rates), joins), abs=1e-6)
