"""The window of a stream grows only where that makes the stream faster."""

from __future__ import annotations

import statistics

import pytest

from voxlane.dataset.prefetch import WindowTuner

KIB, MIB = 1 << 10, 1 << 20


def run_stream(tuner: WindowTuner, *, size_bytes: int, latency_s: float, bytes_per_s: float, count: int) -> list[int]:
    """Take `count` samples from a stream that is limited by latency and by bandwidth; return the window, in samples,
    after each of them."""
    now_s, windows = 0.0, []
    for _ in range(count):
        in_flight = max(1, min(tuner.samples, tuner.bytes // size_bytes))
        now_s += max(latency_s / in_flight, size_bytes / bytes_per_s)
        tuner.count_taken(size_bytes, now_s)
        windows.append(max(1, min(tuner.samples, tuner.bytes // size_bytes)))
    return windows


def new_tuner(max_bytes: int = 256 * MIB, max_samples: int = 256) -> WindowTuner:
    return WindowTuner(max_bytes=max_bytes, max_samples=max_samples, now_s=0.0)


def test_latency_widens_the_window_to_its_limits() -> None:
    windows = run_stream(new_tuner(), size_bytes=100 * KIB, latency_s=0.1, bytes_per_s=1e12, count=2000)
    assert windows[0] == 16
    assert windows[-1] == 256
    assert windows == sorted(windows)
    windows = run_stream(new_tuner(), size_bytes=3 * MIB, latency_s=10.0, bytes_per_s=1e12, count=2000)
    assert windows[-1] == 256 // 3


def test_window_grows_until_the_bandwidth_is_used() -> None:
    # 5,000 samples per second at 10 ms need 50 in flight.
    windows = run_stream(new_tuner(), size_bytes=100 * KIB, latency_s=0.01, bytes_per_s=5000 * 100 * KIB, count=20_000)
    assert statistics.mode(windows[-5000:]) == 64
    assert max(windows) == 128  # on trial


def test_processor_bound_stream_stays_narrow_and_tries_again() -> None:
    windows = run_stream(new_tuner(), size_bytes=500 * KIB, latency_s=0.0, bytes_per_s=5e8, count=2000)
    assert set(windows) == {16, 32}
    assert windows.count(16) > 3 * windows.count(32)
    assert windows[-500:].count(32) > 0


@pytest.mark.parametrize(("max_bytes", "max_samples"), [(1, 256), (MIB, 256), (256 * MIB, 1), (20 * MIB, 20)])
def test_limits_hold_from_the_start(max_bytes: int, max_samples: int) -> None:
    tuner = new_tuner(max_bytes, max_samples)
    for taken in range(500):
        assert 1 <= tuner.bytes <= max_bytes
        assert 1 <= tuner.samples <= max_samples
        tuner.count_taken(100 * KIB, taken / 1000)
