"""Test the highest rates over windows."""

from __future__ import annotations

import pytest

from voxlane.bench.simulator.epoch import Windows


def test_best_and_worst_measuring_window() -> None:
    rates = Windows(60.0)
    rates.add_rate(0.0, 50.0, 12.0)
    rates.add_rate(50.0, 130.0, 6.0)
    assert rates.highest(130.0) == pytest.approx((50 * 12 + 10 * 6) / 60)
    # A window that begins x s before the peak has 60 - x s of it; the next one x - 10, and 6 a second besides. They are
    # equal at x = 70 / 3, and any other x has a higher one.
    assert rates.highest_at_worst(130.0) == pytest.approx((60 - 70 / 3) * 12 / 60, rel=0.02)


def test_run_shorter_than_a_window_gives_its_mean() -> None:
    rates = Windows(60.0)
    rates.add(1.0, 30.0)
    rates.add(9.0, 20.0)
    assert rates.highest(10.0) == rates.highest_at_worst(10.0) == pytest.approx(5.0)
    assert Windows(60.0).highest(0.0) == 0.0
