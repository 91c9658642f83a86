"""Effects of faults on clients, and decisions which requests meet them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from voxlane.testing import Emulator, Faults
from voxlane.testing.faults import NO_FAULT, FaultInjector

from .conftest import BUCKET, gcs_store, s3_store

SIZE = 400_000


def object_url(emulator: Emulator, key: str = "k") -> str:
    return f"{emulator.url}/{BUCKET}/{key}"


def read_raw_response(emulator: Emulator, key: str, stop_after: int = 1 << 30) -> tuple[bytes, bytes]:
    """Return headers and body of a GET as received until the server closes the connection or ``stop_after`` bytes."""
    received = b""
    with socket.create_connection(("127.0.0.1", int(emulator.url.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(f"GET /{BUCKET}/{key} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        with contextlib.suppress(ConnectionResetError):
            while len(received) < stop_after and (data := connection.recv(1 << 16)):
                received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


def test_fail_next_goes_through_the_statuses(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"1")
    emulator.set_faults(Faults(fail_next=3, error_statuses=(429, 503), kinds=("get",)))
    assert requests.head(object_url(emulator), timeout=60).status_code == 200
    assert [requests.get(object_url(emulator), timeout=60).status_code for _ in range(4)] == [429, 503, 429, 200]
    counters = emulator.counters()
    assert counters.injected == {"error": 3}
    assert counters.get.statuses == {429: 2, 503: 1, 200: 1}


def test_errors_have_the_format_of_the_dialect(emulator: Emulator) -> None:
    emulator.set_faults(Faults(error_rate=1.0, error_statuses=(503,)))
    assert "<Code>SlowDown</Code>" in requests.get(object_url(emulator), timeout=60).text
    response = requests.get(f"{emulator.url}/storage/v1/b/{BUCKET}/o/k", timeout=60)
    assert response.json()["error"]["code"] == response.status_code == 503


def test_injected_error_has_no_effect(emulator: Emulator) -> None:
    emulator.set_faults(Faults(fail_next=1, error_statuses=(500,)))
    assert requests.put(object_url(emulator), data=b"1", timeout=60).status_code == 500
    assert emulator.keys(BUCKET) == []


@pytest.mark.parametrize("make", [s3_store, gcs_store])
def test_obstore_retries_over_errors(emulator: Emulator, make: Any) -> None:
    store = make(emulator)
    emulator.set_faults(Faults(fail_next=2, error_statuses=(503, 500)))
    store.put("k", b"1")
    assert emulator.get(BUCKET, "k") == b"1"
    assert emulator.counters().put.requests == 3


def test_faults_can_be_filtered(emulator: Emulator) -> None:
    emulator.create_bucket("other")
    for bucket in (BUCKET, "other"):
        emulator.put_many(bucket, {"a/1": b"", "b/1": b""})
    emulator.set_faults(Faults(error_rate=1.0, key_prefix="a/", bucket=BUCKET, kinds=("get", "list")))

    def status(path: str) -> int:
        return requests.get(f"{emulator.url}/{path}", timeout=60).status_code

    assert status(f"{BUCKET}/a/1") == status(f"{BUCKET}?prefix=a/1") == 503
    assert status(f"{BUCKET}/b/1") == status("other/a/1") == status(BUCKET) == 200


def test_cut_drops_the_connection_inside_the_body(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", bytes(SIZE))
    emulator.set_faults(Faults(cut_rate=1.0))
    _, body = read_raw_response(emulator, "k")
    assert len(body) < SIZE
    with pytest.raises(requests.RequestException):
        _ = requests.get(object_url(emulator), timeout=60).content
    assert emulator.counters().injected == {"cut": 2}


def test_cut_write_has_taken_effect(emulator: Emulator) -> None:
    emulator.set_faults(Faults(cut_rate=1.0))
    with pytest.raises(requests.ConnectionError):
        requests.put(object_url(emulator), data=b"1", timeout=60)
    assert emulator.keys(BUCKET) == ["k"]


def test_truncate_ends_early_with_an_orderly_close(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", bytes(SIZE))
    emulator.put(BUCKET, "empty", b"")
    emulator.set_faults(Faults(truncate_rate=1.0))
    head, body = read_raw_response(emulator, "k")
    assert f"Content-Length: {SIZE}".encode() in head
    assert len(body) == SIZE // 2
    assert requests.get(object_url(emulator, "empty"), timeout=60).status_code == 200
    counters = emulator.counters()
    assert (counters.injected, counters.get.bytes_out) == ({"truncate": 1}, SIZE // 2)


def test_stall_sends_headers_and_then_waits(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"body")
    emulator.set_faults(Faults(stall_rate=1.0, stall_s=300.0))
    with requests.get(object_url(emulator), stream=True, timeout=(60, 3)) as response:
        assert response.status_code == 200
        with pytest.raises(requests.ConnectionError, match="timed out"):
            _ = response.content
    emulator.set_faults(Faults(stall_rate=1.0, stall_s=0.01))
    assert requests.get(object_url(emulator), timeout=60).content == b"body"


def test_requests_are_delayed_in_parallel(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"1")
    count = 8
    # Only a lower bound is asserted; the number of concurrent requests shows that they did not wait in turn.
    emulator.set_faults(Faults(latency_s=1))
    with ThreadPoolExecutor(count) as pool:
        responses = list(pool.map(lambda _: requests.get(object_url(emulator), timeout=60), range(count)))
    assert all(response.elapsed.total_seconds() >= 1 for response in responses)
    assert emulator.counters().max_concurrent > 1


def test_limited_bandwidth_keeps_the_content(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", bytes(SIZE))
    emulator.set_faults(Faults(bandwidth_bytes_per_s=2_000_000))
    response = requests.get(object_url(emulator), timeout=60)
    assert len(response.content) == SIZE
    assert emulator.counters().get.bytes_out == SIZE


def test_faults_can_be_cleared(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"1")
    emulator.set_faults(Faults(error_rate=1.0))
    emulator.clear_faults()
    assert requests.get(object_url(emulator), timeout=60).status_code == 200


def decide_all(faults: Faults, keys: list[str]) -> dict[str, list[Any]]:
    """Return the decisions for three requests of each key, in the order of ``keys``."""
    injector = FaultInjector(faults)
    decisions: dict[str, list[Any]] = {key: [] for key in keys}
    for key in [*keys, *keys, *keys]:
        decisions[key].append(injector.decide("get", "b", key, ""))
    return decisions


@given(st.integers(0, 2**32), st.lists(st.text(), min_size=1, unique=True))
def test_result_does_not_depend_on_arrival_order(seed: int, keys: list[str]) -> None:
    faults = Faults(seed=seed, error_rate=0.3, cut_rate=0.3, stall_rate=0.2, jitter_s=1.0)
    assert decide_all(faults, keys) == decide_all(faults, keys[::-1])


def test_decisions_match_the_rates() -> None:
    faults = Faults(error_rate=0.2, error_statuses=(429, 500), cut_rate=0.1, truncate_rate=0.1, stall_rate=0.1)
    all_decisions = [d for of_key in decide_all(faults, [str(i) for i in range(4000)]).values() for d in of_key]

    def fraction(chosen: list[bool]) -> float:
        return sum(chosen) / len(all_decisions)

    # The seed is fixed, so this either always holds or never.
    assert fraction([decision.error_status == 429 for decision in all_decisions]) == pytest.approx(0.1, abs=0.01)
    assert fraction([decision.cut for decision in all_decisions]) == pytest.approx(0.1, abs=0.01)
    assert fraction([decision.truncate for decision in all_decisions]) == pytest.approx(0.1, abs=0.01)
    assert fraction([decision.stall_s > 0 for decision in all_decisions]) == pytest.approx(0.1, abs=0.01)
    assert fraction([decision == NO_FAULT for decision in all_decisions]) == pytest.approx(0.5, abs=0.02)


def test_another_seed_gives_other_faults() -> None:
    keys = [str(i) for i in range(100)]
    assert decide_all(Faults(cut_rate=0.5, seed=1), keys) != decide_all(Faults(cut_rate=0.5, seed=2), keys)


@pytest.mark.parametrize(
    "invalid",
    [
        {"error_rate": 1.5},
        {"cut_rate": 0.6, "stall_rate": 0.6},
        {"latency_s": -1.0},
        {"kinds": ("read",)},
        {"error_statuses": ()},
        {"error_statuses": (200,)},
    ],
)
def test_errors_name_invalid_settings(invalid: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(invalid))):
        Faults(**invalid)


def test_settings_survive_json() -> None:
    faults = Faults(error_rate=0.5, error_statuses=(429, 500), kinds=("get", "part"), seed=7)
    assert Faults(**json.loads(json.dumps(dataclasses.asdict(faults)))) == faults
