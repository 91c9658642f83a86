"""What matching requests share: a link's bandwidth and a rate of requests, in pure time and as clients meet them."""

from __future__ import annotations

import heapq
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from voxlane.testing import Emulator, Faults, synthetic
from voxlane.testing.faults import Link, Quota

from .conftest import BUCKET, gcs_store, s3_store


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def simulate_senders(link: Link, clock: Clock, sizes: list[int], piece: int, late_s: float = 0.0) -> list[float]:
    """Return when senders of `sizes` bytes finish, in seconds; a sender that waits wakes up `late_s` too late."""
    begin_s = clock.now_s
    ends = [0.0] * len(sizes)
    left = list(sizes)
    waiting: list[tuple[float, int, int]] = []
    order = 0
    for sender in range(len(sizes)):
        link.join()
        waiting.append((clock.now_s, order, sender))
        order += 1
    while waiting:
        woken_s, _, sender = heapq.heappop(waiting)
        clock.now_s = max(clock.now_s, woken_s)
        if not left[sender]:
            ends[sender] = clock.now_s - begin_s
            link.leave()
            continue
        size = min(piece, left[sender])
        left[sender] -= size
        wait_s = link.reserve(size)
        heapq.heappush(waiting, (clock.now_s + (wait_s + late_s if wait_s > 0 else 0.0), order, sender))
        order += 1
    return ends


@given(st.integers(1, 64), st.integers(1, 400))
def test_link_is_shared_equally(senders: int, megabytes_per_s: int) -> None:
    clock = Clock()
    rate, size, piece = megabytes_per_s * 1e6, 4_000_000, 64 << 10
    ends = simulate_senders(Link(rate, clock), clock, [size] * senders, piece)
    assert max(ends) == pytest.approx(senders * size / rate)
    assert max(ends) - min(ends) <= senders * piece / rate + 1e-6


def test_short_response_does_not_wait_for_long_ones() -> None:
    clock = Clock()
    piece = 64 << 10
    short, *long = simulate_senders(Link(1e6, clock), clock, [2 * piece, *[100 * piece] * 3], piece)
    assert short <= 8 * piece / 1e6 + 1e-6
    assert min(long) > 290 * piece / 1e6


def test_short_delays_are_compensated() -> None:
    clock = Clock()
    (end,) = simulate_senders(Link(100e6, clock), clock, [50_000_000], 64 << 10, late_s=0.0009)
    assert end == pytest.approx(0.5, rel=0.01)


def test_idle_time_of_a_link_is_lost() -> None:
    clock = Clock()
    link = Link(1e6, clock)
    simulate_senders(link, clock, [1_000_000], 1 << 16)
    clock.now_s += 60
    assert simulate_senders(link, clock, [1_000_000], 1 << 16) == [pytest.approx(1.0)]


def test_unused_quota_is_kept_for_one_second() -> None:
    clock = Clock()
    quota = Quota(10, clock)
    assert [quota.try_acquire() for _ in range(12)] == [True] * 10 + [False] * 2
    clock.now_s += 0.35
    assert [quota.try_acquire() for _ in range(4)] == [True] * 3 + [False]
    clock.now_s += 3600
    assert [quota.try_acquire() for _ in range(12)] == [True] * 10 + [False] * 2


def test_quota_below_one_request_per_second() -> None:
    clock = Clock()
    quota = Quota(0.25, clock)
    assert [quota.try_acquire(), quota.try_acquire()] == [True, False]
    clock.now_s += 4
    assert [quota.try_acquire(), quota.try_acquire()] == [True, False]


def test_responses_on_a_shared_link_are_complete(emulator: Emulator) -> None:
    size, count = 300_000, 12
    emulator.fill(BUCKET, count, key="k-{}", size_bytes=size)
    # Also with a limit per connection, below and above its share.
    for per_connection in (0.0, 4e6, 1e9):
        emulator.set_faults(Faults(total_bandwidth_bytes_per_s=20e6, bandwidth_bytes_per_s=per_connection))
        with ThreadPoolExecutor(count) as pool:
            responses = pool.map(
                lambda i: requests.get(f"{emulator.url}/{BUCKET}/k-{i}", timeout=60).content, range(count)
            )
        assert list(responses) == [synthetic(f"k-{i}", size) for i in range(count)]
    assert emulator.counters().get.bytes_out == 3 * count * size


def test_disconnected_client_frees_the_link(emulator: Emulator) -> None:
    emulator.fill(BUCKET, 1, key="long", size_bytes=1 << 40)
    emulator.put(BUCKET, "k", b"1")
    emulator.set_faults(Faults(total_bandwidth_bytes_per_s=10e6))
    with requests.get(f"{emulator.url}/{BUCKET}/long", stream=True, timeout=60) as response:
        assert response.raw.read(1000)
    assert requests.get(f"{emulator.url}/{BUCKET}/k", timeout=60).content == b"1"


def test_requests_above_the_rate_are_refused_in_the_format_of_the_dialect(emulator: Emulator) -> None:
    # The next token takes hours, so the refused request does not depend on the speed of the machine.
    faults = Faults(requests_per_s=0.0001)
    requests_by_dialect = {
        "s3": (f"{emulator.url}/{BUCKET}/k", {"Authorization": "AWS4-HMAC-SHA256 Credential=k/"}),
        "gcs": (f"{emulator.url}/{BUCKET}/k", {"Authorization": "Bearer t"}),
        "json": (f"{emulator.url}/storage/v1/b/{BUCKET}/o/k", {}),
    }
    emulator.put(BUCKET, "k", b"1")
    refused: dict[str, requests.Response] = {}
    for dialect, (url, headers) in requests_by_dialect.items():
        emulator.set_faults(faults)
        assert requests.get(url, headers=headers, timeout=60).status_code == 200
        refused[dialect] = requests.get(url, headers=headers, timeout=60)
    assert {dialect: response.status_code for dialect, response in refused.items()} == {
        "s3": 503,
        "gcs": 429,
        "json": 429,
    }
    assert "<Code>SlowDown</Code>" in refused["s3"].text
    assert "<Code>TooManyRequests</Code>" in refused["gcs"].text
    assert refused["json"].json()["error"]["errors"][0]["reason"] == "rateLimitExceeded"
    assert emulator.counters().injected == {"throttle": 3}


def test_refused_write_has_no_effect_and_other_kinds_are_not_limited(emulator: Emulator) -> None:
    emulator.set_faults(Faults(requests_per_s=0.0001, kinds=("put",)))
    url = f"{emulator.url}/{BUCKET}/"
    assert [requests.put(url + key, data=b"1", timeout=60).status_code for key in "ab"] == [200, 429]
    assert [requests.get(url + key, timeout=60).status_code for key in "aab"] == [200, 200, 404]


@pytest.mark.parametrize("make", [s3_store, gcs_store])
def test_obstore_copes_with_throttling(emulator: Emulator, make: Any) -> None:
    emulator.put(BUCKET, "k", b"1")
    emulator.set_faults(Faults(requests_per_s=20))
    # The default of ten attempts may not suffice.
    store = make(emulator, retry_config={"max_retries": 1000})
    with ThreadPoolExecutor(8) as pool:
        assert all(bytes(data) == b"1" for data in pool.map(lambda _: store.get("k").bytes(), range(40)))
    counters = emulator.counters()
    assert counters.injected.get("throttle", 0) == counters.get.requests - 40


def test_current_faults_can_be_read(emulator: Emulator) -> None:
    assert emulator.faults() == Faults()
    faults = Faults(latency_s=0.02, total_bandwidth_bytes_per_s=1e8, requests_per_s=500, kinds=("get",))
    emulator.set_faults(faults)
    assert emulator.faults() == faults
    emulator.clear_faults()
    with Emulator(latency_s=0.001) as other:
        assert other.faults() == Faults(latency_s=0.001)


@pytest.mark.parametrize("invalid", ["total_bandwidth_bytes_per_s", "requests_per_s", "bandwidth_bytes_per_s"])
def test_errors_name_invalid_limits(invalid: str) -> None:
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=invalid):
            Faults(**{invalid: value})
