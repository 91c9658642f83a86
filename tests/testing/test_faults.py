"""Faults as clients meet them, and how they are chosen."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from voxlane.testing import Emulator, Faults
from voxlane.testing.faults import UNHARMED, Dice

from .conftest import BUCKET, gcs_store, s3_store

SIZE = 400_000


def url_of(emulator: Emulator, key: str = "k") -> str:
    return f"{emulator.url}/{BUCKET}/{key}"


def raw_answer(emulator: Emulator, key: str, stop_after: int = 1 << 30) -> tuple[bytes, bytes]:
    """Headers and body bytes of a GET as they arrive, until the server closes or ``stop_after`` bytes."""
    received = b""
    with socket.create_connection(("127.0.0.1", int(emulator.url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall(f"GET /{BUCKET}/{key} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        with contextlib.suppress(ConnectionResetError):
            while len(received) < stop_after and (data := connection.recv(1 << 16)):
                received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


def test_fail_next_goes_through_the_statuses(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"1")
    emulator.set_faults(Faults(fail_next=3, error_statuses=(429, 503), kinds=("get",)))
    assert requests.head(url_of(emulator), timeout=10).status_code == 200
    assert [requests.get(url_of(emulator), timeout=10).status_code for _ in range(4)] == [429, 503, 429, 200]
    counters = emulator.counters()
    assert counters.injected == {"error": 3}
    assert counters.get.statuses == {429: 2, 503: 1, 200: 1}


def test_errors_speak_the_dialect(emulator: Emulator) -> None:
    emulator.set_faults(Faults(error_rate=1.0, error_statuses=(503,)))
    assert "<Code>SlowDown</Code>" in requests.get(url_of(emulator), timeout=10).text
    answer = requests.get(f"{emulator.url}/storage/v1/b/{BUCKET}/o/k", timeout=10)
    assert answer.json()["error"]["code"] == answer.status_code == 503


def test_an_injected_error_has_no_effect(emulator: Emulator) -> None:
    emulator.set_faults(Faults(fail_next=1, error_statuses=(500,)))
    assert requests.put(url_of(emulator), data=b"1", timeout=10).status_code == 500
    assert emulator.keys(BUCKET) == []


@pytest.mark.parametrize("make", [s3_store, gcs_store])
def test_obstore_retries_over_errors(emulator: Emulator, make: Any) -> None:
    store = make(emulator)
    emulator.set_faults(Faults(fail_next=2, error_statuses=(503, 500)))
    store.put("k", b"1")
    assert emulator.get(BUCKET, "k") == b"1"
    assert emulator.counters().put.requests == 3


def test_filters(emulator: Emulator) -> None:
    emulator.create_bucket("other")
    for bucket in (BUCKET, "other"):
        emulator.put_many(bucket, {"a/1": b"", "b/1": b""})
    emulator.set_faults(Faults(error_rate=1.0, key_prefix="a/", bucket=BUCKET, kinds=("get", "list")))

    def status(path: str) -> int:
        return requests.get(f"{emulator.url}/{path}", timeout=10).status_code

    assert status(f"{BUCKET}/a/1") == status(f"{BUCKET}?prefix=a/1") == 503
    assert status(f"{BUCKET}/b/1") == status("other/a/1") == status(BUCKET) == 200


def test_cut_drops_the_connection_inside_the_body(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", bytes(SIZE))
    emulator.set_faults(Faults(cut_rate=1.0))
    _, body = raw_answer(emulator, "k")
    assert len(body) < SIZE
    with pytest.raises(requests.RequestException):
        _ = requests.get(url_of(emulator), timeout=10).content
    assert emulator.counters().injected == {"cut": 2}


def test_a_cut_write_has_taken_effect(emulator: Emulator) -> None:
    emulator.set_faults(Faults(cut_rate=1.0))
    with pytest.raises(requests.ConnectionError):
        requests.put(url_of(emulator), data=b"1", timeout=10)
    assert emulator.keys(BUCKET) == ["k"]


def test_truncate_ends_early_and_in_order(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", bytes(SIZE))
    emulator.put(BUCKET, "empty", b"")
    emulator.set_faults(Faults(truncate_rate=1.0))
    head, body = raw_answer(emulator, "k")
    assert f"Content-Length: {SIZE}".encode() in head
    assert len(body) == SIZE // 2
    assert requests.get(url_of(emulator, "empty"), timeout=10).status_code == 200
    counters = emulator.counters()
    assert (counters.injected, counters.get.bytes_out) == ({"truncate": 1}, SIZE // 2)


def test_stall_sends_headers_and_then_waits(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"body")
    emulator.set_faults(Faults(stall_rate=1.0, stall_s=300.0))
    with requests.get(url_of(emulator), stream=True, timeout=(10, 0.5)) as answer:
        assert answer.status_code == 200
        with pytest.raises(requests.ConnectionError, match="timed out"):
            _ = answer.content
    emulator.set_faults(Faults(stall_rate=1.0, stall_s=0.01))
    assert requests.get(url_of(emulator), timeout=10).content == b"body"


def test_latency_is_waited_side_by_side(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"1")
    count = 8
    # Only a lower bound is asserted; how many waited together shows that they did not wait in turn.
    emulator.set_faults(Faults(latency_s=0.3))
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda _: requests.get(url_of(emulator), timeout=10), range(count)))
    assert all(answer.elapsed.total_seconds() >= 0.3 for answer in answers)
    assert emulator.counters().max_concurrent > 1


def test_bandwidth(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", bytes(SIZE))
    emulator.set_faults(Faults(bandwidth_bytes_per_s=2_000_000))
    answer = requests.get(url_of(emulator), timeout=10)
    assert len(answer.content) == SIZE
    assert emulator.counters().get.bytes_out == SIZE


def test_clearing_returns_to_the_start(emulator: Emulator) -> None:
    emulator.put(BUCKET, "k", b"1")
    emulator.set_faults(Faults(error_rate=1.0))
    emulator.clear_faults()
    assert requests.get(url_of(emulator), timeout=10).status_code == 200


def fates(faults: Faults, keys: list[str]) -> dict[str, list[Any]]:
    """Each key asked three times, in the order of ``keys``."""
    dice = Dice(faults)
    found: dict[str, list[Any]] = {key: [] for key in keys}
    for key in [*keys, *keys, *keys]:
        found[key].append(dice.roll("get", "b", key, ""))
    return found


@given(st.integers(0, 2**32), st.lists(st.text(), min_size=1, unique=True))
def test_the_order_of_arrival_does_not_matter(seed: int, keys: list[str]) -> None:
    faults = Faults(seed=seed, error_rate=0.3, cut_rate=0.3, stall_rate=0.2, jitter_s=1.0)
    assert fates(faults, keys) == fates(faults, keys[::-1])


def test_rates_are_met() -> None:
    faults = Faults(error_rate=0.2, error_statuses=(429, 500), cut_rate=0.1, truncate_rate=0.1, stall_rate=0.1)
    rolled = [fate for each in fates(faults, [str(i) for i in range(4000)]).values() for fate in each]

    def share(chosen: list[bool]) -> float:
        return sum(chosen) / len(rolled)

    # The seed is fixed, so this either always holds or never.
    assert share([fate.error_status == 429 for fate in rolled]) == pytest.approx(0.1, abs=0.01)
    assert share([fate.cut for fate in rolled]) == pytest.approx(0.1, abs=0.01)
    assert share([fate.truncate for fate in rolled]) == pytest.approx(0.1, abs=0.01)
    assert share([fate.stall_s > 0 for fate in rolled]) == pytest.approx(0.1, abs=0.01)
    assert share([fate == UNHARMED for fate in rolled]) == pytest.approx(0.5, abs=0.02)


def test_another_seed_gives_other_faults() -> None:
    keys = [str(i) for i in range(100)]
    assert fates(Faults(cut_rate=0.5, seed=1), keys) != fates(Faults(cut_rate=0.5, seed=2), keys)


@pytest.mark.parametrize(
    "bad",
    [
        {"error_rate": 1.5},
        {"cut_rate": 0.6, "stall_rate": 0.6},
        {"latency_s": -1.0},
        {"kinds": ("read",)},
        {"error_statuses": ()},
        {"error_statuses": (200,)},
    ],
)
def test_bad_settings_name_the_field(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Faults(**bad)


def test_settings_survive_json() -> None:
    faults = Faults(error_rate=0.5, error_statuses=(429, 500), kinds=("get", "part"), seed=7)
    assert Faults.from_json(faults.to_json()) == faults
