"""Whole objects that one thread reads many at a time: the same bytes, errors and counts as one by one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import Bucket
from tests.faults.proxy import Fault, FaultKind, FaultProxy
from voxlane import MapDataset, RetryConfig, Store, StoreConfig, errors
from voxlane.store.multiplexed import _Connections
from voxlane.testing import Emulator

SIZES = (0, 1, 15_000, 16_383, 16_384, 16_385, 100_000, 700_000)
"""Sizes around that of the memory in which a header arrives."""
LIMIT_S = 60.0
RETRY = RetryConfig(deadline_s=20.0, initial_delay_s=0.01, max_delay_s=0.2)
KEYS: dict[str, Any] = {"access_key_id": "k", "secret_access_key": "s"}


@pytest.fixture
def proxy(emulator: Emulator) -> Iterator[FaultProxy]:
    with FaultProxy(emulator.url) as proxy:
        yield proxy


def test_reads_what_get_bytes_reads(bucket: Bucket) -> None:
    store = bucket.store
    bodies = {bucket.key(f"data/{size}"): os.urandom(size) for size in SIZES}
    for key, body in bodies.items():
        store.put(key, body)
    infos = {key: store.head(key) for key in bodies}
    futures = {key: store.submit_whole(key, size=info.size, etag=info.etag) for key, info in infos.items()}
    assert {key: future.result(LIMIT_S) for key, future in futures.items()} == bodies
    assert {key: store.get_bytes(key, size=info.size, etag=info.etag) for key, info in infos.items()} == bodies


def test_many_threads_share_one_reader(gcs: Bucket, emulator: Emulator) -> None:
    contents = {f"data/{i:03d}": os.urandom(2000 + i) for i in range(300)}
    emulator.put_many("bkt", contents)
    store = gcs.store

    def read(key: str) -> bytes:
        return store.submit_whole(key, size=len(contents[key])).result(LIMIT_S)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(read, contents)) == list(contents.values())
    assert sum(thread.name == "voxlane-reads" for thread in threading.enumerate()) >= 1


def test_only_the_first_of_several_reads_wakes_the_loop() -> None:
    store = Store("gs://bkt", StoreConfig(endpoint="http://127.0.0.1:9", retry=RETRY))
    connections = _Connections(store.open_direct("a"), store.config, loop=None)  # type: ignore[arg-type]
    barrier, woken = threading.Barrier(8), []

    def take() -> None:
        barrier.wait(LIMIT_S)
        if connections.take(Future()):  # type: ignore[arg-type]
            woken.append(1)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert woken == [1]


def test_requests_and_bytes_are_counted_as_the_server_counts_them(gcs: Bucket, emulator: Emulator) -> None:
    emulator.put_many("bkt", {f"data/{i}": bytes(30_000) for i in range(50)})
    dataset = MapDataset(f"{gcs.uri}/data/", config=gcs.config)
    assert len(dataset) == 50
    emulator.reset_counters()
    assert [len(body) for body in dataset.__getitems__(list(range(50)))] == [30_000] * 50
    served, counted = emulator.counters().get, dataset.traffic().by_kind["get"]
    assert (counted["requests"], counted["bytes_read"]) == (served.requests, served.bytes_out) == (50, 50 * 30_000)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("kind", ["reset", "lost", "truncated", "corrupted", "short", "html", "429", "503", "stall"])
def test_a_passing_fault_is_healed(proxy: FaultProxy, emulator: Emulator, scheme: str, kind: FaultKind) -> None:
    body = os.urandom(50_000)
    emulator.put("bkt", "a", body)
    config = StoreConfig(endpoint=proxy.url, retry=RETRY, read_timeout_s=1.0, **(KEYS if scheme == "s3" else {}))
    store = Store(f"{scheme}://bkt", config)
    with proxy.inject(fault := Fault(kind, times=1)):
        assert store.submit_whole("a", size=len(body)).result(LIMIT_S) == body
    assert fault.met == 1
    assert store.counters.read().retries >= 1


def test_errors_are_those_of_get_bytes(gcs: Bucket) -> None:
    store = gcs.store
    store.put("a", b"first")
    old = store.head("a")
    store.put("a", b"other")
    with pytest.raises(errors.ChangedError, match="/a"):
        store.submit_whole("a", size=old.size, etag=old.etag).result(LIMIT_S)
    with pytest.raises(errors.ChangedError, match="/a"):
        store.submit_whole("a", size=4).result(LIMIT_S)
    with pytest.raises(errors.NotFoundError, match="/b"):
        store.submit_whole("b", size=5).result(LIMIT_S)


def test_server_that_is_gone_is_an_error(gcs: Bucket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = StoreConfig(endpoint=f"http://127.0.0.1:{port}", retry=RetryConfig(deadline_s=0.3, initial_delay_s=0.01))
    with pytest.raises(errors.UnavailableError, match="gs://bkt/a"):
        Store("gs://bkt", config).submit_whole("a", size=5).result(LIMIT_S)


def test_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    response = b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: "e"\r\nx-goog-generation: 1\r\n\r\nhello'
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = StoreConfig(endpoint=f"http://127.0.0.1:{server.getsockname()[1]}", retry=RETRY)
        store = Store("gs://bkt", config)

        def serve() -> None:
            first, _ = server.accept()
            first.recv(10_000)
            first.sendall(response)
            first.recv(10_000)  # the second request, which this connection does not answer
            first.close()
            second, _ = server.accept()
            with second:
                second.recv(10_000)
                second.sendall(response)

        thread = threading.Thread(target=serve)
        thread.start()
        assert store.submit_whole("a", size=5).result(LIMIT_S) == b"hello"
        assert store.submit_whole("a", size=5).result(LIMIT_S) == b"hello"
        thread.join(LIMIT_S)
    assert store.counters.read().retries == 0
