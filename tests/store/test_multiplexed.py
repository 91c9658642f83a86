"""Whole objects that one thread reads many at a time: the same bytes, errors and counts as one by one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.conftest import Bucket
from tests.faults.proxy import Fault, FaultKind, FaultProxy
from voxlane import MapDataset, RetryConfig, Store, StoreConfig, errors
from voxlane.store import bucket as bucket_module
from voxlane.store.multiplexed import _Connections
from voxlane.store.service_checksums import Crc32c
from voxlane.testing import Emulator, Faults

SIZES = (0, 1, 15_000, 16_383, 16_384, 16_385, 100_000, 700_000)
"""Sizes around that of the memory in which a header arrives."""
LIMIT_S = 60.0
RETRY = RetryConfig(deadline_s=20.0, initial_delay_s=0.01, max_delay_s=0.2)
KEYS: dict[str, Any] = {"access_key_id": "k", "secret_access_key": "s"}
RESPONSE = b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: "e"\r\nx-goog-generation: 1\r\n\r\nhello'


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


def test_server_with_room_for_one_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = Store("gs://bkt", StoreConfig(endpoint=f"http://127.0.0.1:{server.getsockname()[1]}", retry=RETRY))
        first = store.submit_whole("a", size=5)
        connection, _ = server.accept()
    with connection:  # the server refuses others
        connection.recv(10_000)
        connection.sendall(RESPONSE)
        assert first.result(LIMIT_S) == b"hello"
        futures = [store.submit_whole("a", size=5) for _ in range(50)]
        for _ in futures:
            connection.recv(10_000)
            connection.sendall(RESPONSE)
        assert [future.result(LIMIT_S) for future in futures] == [b"hello"] * 50
    assert store.counters.read().retries == 0


def test_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = StoreConfig(endpoint=f"http://127.0.0.1:{server.getsockname()[1]}", retry=RETRY)
        store = Store("gs://bkt", config)

        def serve() -> None:
            first, _ = server.accept()
            first.recv(10_000)
            first.sendall(RESPONSE)
            first.recv(10_000)  # the second request, which this connection does not answer
            first.close()
            second, _ = server.accept()
            with second:
                second.recv(10_000)
                second.sendall(RESPONSE)

        thread = threading.Thread(target=serve)
        thread.start()
        assert store.submit_whole("a", size=5).result(LIMIT_S) == b"hello"
        assert store.submit_whole("a", size=5).result(LIMIT_S) == b"hello"
        thread.join(LIMIT_S)
    assert store.counters.read().retries == 0


def test_reads_that_have_not_started_can_be_cancelled(gcs: Bucket, emulator: Emulator) -> None:
    emulator.put_many("bkt", {f"data/{i}": bytes(2000) for i in range(100)})
    emulator.set_faults(Faults(latency_s=0.2))
    store = Store(gcs.uri, replace(gcs.config, max_concurrency=2))
    futures = [store.submit_whole(f"data/{i}", size=2000) for i in range(100)]
    assert futures[0].result(LIMIT_S) == bytes(2000)
    assert sum(future.cancel() for future in futures) > 50
    done = [future.result(LIMIT_S) for future in futures if not future.cancelled()]
    assert store.submit_whole("data/0", size=2000).result(LIMIT_S) == bytes(2000)
    assert emulator.counters().get.requests == len(done) + 1


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:99999", "http://a..b", f"http://{'a' * 70}.b", "http://:80"])
def test_endpoint_that_no_request_can_reach_is_an_error(endpoint: str) -> None:
    with pytest.raises(errors.ConfigError, match="endpoint is not valid"):
        Store("gs://bkt", StoreConfig(endpoint=endpoint, retry=RETRY)).submit_whole("a", size=5).result(LIMIT_S)


def test_exception_of_a_credential_provider_is_raised_by_the_future(gcs: Bucket) -> None:
    def provide() -> Any:
        raise KeyError("my provider")

    store = Store(gcs.uri, replace(gcs.config, credential_provider=provide))
    future = store.submit_whole("a", size=5)
    with pytest.raises(KeyError, match="my provider"):
        future.result(LIMIT_S)


@pytest.mark.parametrize(
    ("scheme", "response"),
    [
        ("gs", b"HTTP/1.1 100 Continue\r\n\r\n" + RESPONSE),
        ("gs", RESPONSE + b"HTTP/1.1 200 OK\r\nContent-Length: 5"),
        ("gs", RESPONSE.replace(b"\r\n\r\n", b"\r\nx-a: " + b"a" * 20_000 + b"\r\n\r\n")),
        ("gs", RESPONSE.replace(b"\r\n\r\n", b"\r\nx-a: a" * 150 + b"\r\n\r\n")),
        ("gs", RESPONSE.replace(b"HTTP/1.1", b"HTTP/1.0")),
        ("gs", RESPONSE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")),
        ("s3", RESPONSE.replace(b"\r\n\r\n", b"\r\nx-amz-checksum-crc32: \xe9\r\n\r\n")),
        ("az", RESPONSE.replace(b"\r\n\r\n", b"\r\nContent-MD5: \xe9\r\n\r\n")),
    ],
    ids=["interim", "extra", "large", "many headers", "1.0", "close", "damaged crc", "damaged md5"],
)
def test_unusual_response_is_read(scheme: str, response: bytes) -> None:
    keys = {"gs": {}, "s3": KEYS, "az": {"account": "a", "account_key": "eA=="}}[scheme]
    with _answering(response) as port:
        store = Store(f"{scheme}://bkt", StoreConfig(endpoint=f"http://127.0.0.1:{port}", retry=RETRY, **keys))
        futures = [store.submit_whole("a", size=5) for _ in range(20)]
        assert [future.result(LIMIT_S) for future in futures] == [b"hello"] * 20


@pytest.mark.parametrize("response", [RESPONSE, RESPONSE + b"extra", RESPONSE.replace(b"1.1", b"1.0")])
def test_encrypted_connections(response: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = _make_certificate(tmp_path / "cert.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with _answering(response, context) as port:
        store = Store("gs://bkt", StoreConfig(endpoint=f"https://localhost:{port}", retry=RETRY))
        futures = [store.submit_whole("a", size=5) for _ in range(20)]
        assert [future.result(LIMIT_S) for future in futures] == [b"hello"] * 20
        assert store.counters.read().retries == 0 or response != RESPONSE


def test_certificate_that_nobody_signed_is_an_error(tmp_path: Path) -> None:
    retry = RetryConfig(deadline_s=0.3, initial_delay_s=0.01)
    with _answering(RESPONSE, _make_certificate(tmp_path / "cert.pem")) as port:
        store = Store("gs://bkt", StoreConfig(endpoint=f"https://localhost:{port}", retry=retry))
        with pytest.raises(errors.UnavailableError, match="certificate"):
            store.submit_whole("a", size=5).result(LIMIT_S)


@contextmanager
def _answering(response: bytes, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Run a server that answers every request with `response`, and yield its port."""

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:  # the client may close it
            stream = connection if context is None else context.wrap_socket(connection, server_side=True)
            with stream:
                while stream.recv(10_000):
                    stream.sendall(response)
                    if b"1.0" in response or b"close" in response:
                        return

    def accept() -> None:
        with suppress(OSError):  # the test has ended
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)


def _make_certificate(path: Path) -> ssl.SSLContext:
    """Write a certificate for localhost, which signs itself, and return the context of a server that has it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    today = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(today - timedelta(1)).not_valid_after(today + timedelta(1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    pem = serialization.Encoding.PEM
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(pem)
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(secret + certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    return context


def test_checksum_that_cannot_be_computed_is_an_error(gcs: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    gcs.store.put("a", b"hello")
    monkeypatch.setattr(Crc32c, "digest", lambda _: {}["no digest"])
    with pytest.raises(KeyError, match="no digest"):
        gcs.store.submit_whole("a", size=5).result(LIMIT_S)


def test_reads_go_on_without_the_thread(gcs: Bucket, emulator: Emulator) -> None:
    emulator.put_many("bkt", {f"data/{i}": bytes(2000) for i in range(20)})
    store = Store(gcs.uri, replace(gcs.config, max_concurrency=4))
    assert store.submit_whole("data/0", size=2000).result(LIMIT_S) == bytes(2000)
    reader = store._multiplexed
    assert reader is not None
    emulator.set_faults(Faults(latency_s=0.2))
    futures = [store.submit_whole(f"data/{i}", size=2000) for i in range(20)]
    reader._loop.call_soon_threadsafe(reader._loop.stop)
    assert [future.result(LIMIT_S) for future in futures] == [bytes(2000)] * 20
    futures = [store.submit_whole(f"data/{i}", size=2000) for i in range(20)]
    assert [future.result(LIMIT_S) for future in futures] == [bytes(2000)] * 20


AT_EXIT = """
import concurrent.futures.thread, sys, threading, time
from voxlane import Store, StoreConfig

def read():
    while not concurrent.futures.thread._shutdown:  # no thread can be started any more
        time.sleep(0.01)
    for _ in range(3):
        for store in stores:
            try:
                print(store.submit_whole("a", size=5).result(30))
            except RuntimeError:
                print("refused")

stores = [Store("gs://bkt", StoreConfig(endpoint=url)) for url in sys.argv[1:]]
assert stores[0].submit_whole("a", size=5).result(30) == b"hello"
threading.Thread(target=read).start()
"""


def test_thread_that_reads_at_exit_does_not_hang(gcs: Bucket, emulator: Emulator) -> None:
    emulator.put("bkt", "a", b"hello")
    by_name = emulator.url.replace("127.0.0.1", "localhost")  # a thread resolves names
    command = [sys.executable, "-W", "error", "-c", AT_EXIT, emulator.url, by_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("b'hello'\nrefused\n" * 3, "")


def test_forked_child_drops_the_reader_of_its_parent(gcs: Bucket, emulator: Emulator) -> None:
    emulator.put("bkt", "a", b"hello")
    store = gcs.store
    assert store.submit_whole("a", size=5).result(LIMIT_S) == b"hello"
    child = multiprocessing.get_context("fork").Process(target=_read_and_drop, args=([store],))
    child.start()
    child.join(LIMIT_S)
    assert child.exitcode == 0
    futures = [store.submit_whole("a", size=5) for _ in range(100)]
    assert [future.result(LIMIT_S) for future in futures] == [b"hello"] * 100


def _read_and_drop(stores: list[Store]) -> None:
    assert stores[0].submit_whole("a", size=5).result(LIMIT_S) == b"hello"
    stores[0]._multiplexed = None
    bucket_module._inherited.clear()
    gc.collect()


def test_collected_stores_leave_no_threads(gcs: Bucket) -> None:
    gcs.store.put("a", b"hello")

    def count() -> int:
        return sum(thread.name == "voxlane-reads" for thread in threading.enumerate())

    gc.collect()
    before = count()
    for _ in range(10):
        assert gcs.store.submit_whole("a", size=5).result(LIMIT_S) == b"hello"
    gc.collect()
    deadline = time.monotonic() + LIMIT_S
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert count() <= before
