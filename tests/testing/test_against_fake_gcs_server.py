"""The same requests of google-cloud-storage to the emulator and to fake-gcs-server have the same results.

Our own tests prove nothing about GCS; fake-gcs-server is independent. It differs from GCS in the following, which is
not compared:

- It does not implement preconditions of a compose, on its sources and its destination, nor batch deletes.
- A compose of a missing source fails with 500 instead of 404.
- With a delimiter and an offset inside a common prefix, it omits the prefix. The emulator lists it, because a key below
  it is in range; the documentation of GCS does not specify this.
- A composite is a plain object with an MD5 and without a componentCount.
- Etags, generations, dates and links are specific to a server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import storage

from voxlane import Store, StoreConfig, list_objects
from voxlane.testing import Emulator

from .conftest import close_gcs, gcs_client

# The library leaves the connection of a refused download open, to be closed when it is collected.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

BUCKET = "compared"
NAMES = ["a", "a b+c", "d/1", "d/e/2", "foo/bar", "img-", "img-1", "ünï", "\uffee", "𝄞"]

Steps = Callable[[storage.Bucket], Any]


@pytest.fixture
def run_on_both(emulator: Emulator, fake_gcs_url: str) -> Iterator[Callable[[Steps], Any]]:
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


def fill(bucket: storage.Bucket) -> storage.Bucket:
    for number, name in enumerate(NAMES):
        bucket.blob(name).upload_from_string(bytes([number]) * number, content_type="image/x")
    return bucket


def result_of(action: Callable[[], Any]) -> Any:
    """Return the result of an action, or the status it fails with."""
    try:
        return action()
    except exceptions.GoogleAPICallError as error:
        return error.code


def test_voxlane_lists_the_versions_that_it_reads(emulator: Emulator, fake_gcs_url: str) -> None:
    """Servers spell entity tags in different ways, but each of them alike in listings and in reads."""
    for url in (emulator.url, fake_gcs_url):
        client = gcs_client(url)
        bucket = fill(client.create_bucket(BUCKET))
        store = Store(f"gs://{BUCKET}", StoreConfig(endpoint=url))
        listed = list_objects(f"gs://{BUCKET}/", store=store)
        assert listed.keys() == sorted(NAMES)
        assert [bytes(store.get(entry.key, etag=entry.etag)) for entry in listed] == [
            bytes([NAMES.index(key)]) * NAMES.index(key) for key in listed.keys()
        ]
        bucket.delete(force=True)
        close_gcs(client)


def test_metadata(run_on_both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("k/ü")
        blob.metadata = {"mine": "value"}
        blob.upload_from_string(b"content", content_type="image/x")
        blob = bucket.get_blob("k/ü")
        assert blob is not None
        return blob.name, blob.size, blob.md5_hash, blob.crc32c, blob.content_type, blob.metadata

    assert run_on_both(steps)[:2] == ("k/ü", 7)


def test_listing_order_and_content(run_on_both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        rows = fill(bucket).list_blobs()
        return [(blob.name, blob.size, blob.md5_hash, blob.crc32c, blob.content_type) for blob in rows]

    assert [row[0] for row in run_on_both(steps)] == sorted(NAMES, key=str.encode)


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
def test_listing_options(run_on_both: Callable[[Steps], Any], options: dict[str, Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        rows = fill(bucket).list_blobs(**options)
        return [blob.name for blob in rows], sorted(rows.prefixes)

    names, _ = run_on_both(steps)  # compares the two servers
    assert names == sorted(names, key=str.encode)


def test_pages(run_on_both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        return [[blob.name for blob in page] for page in fill(bucket).list_blobs(page_size=4).pages]

    assert [len(page) for page in run_on_both(steps)] == [4, 4, 2]


@pytest.mark.parametrize(
    "span", [(0, 0), (2, 5), (5, None), (None, 3), (-4, None), (0, 99), (9, 9), (10, None), (50, 60)], ids=str
)
def test_ranges(run_on_both: Callable[[Steps], Any], span: tuple[int | None, int | None]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("k")
        blob.upload_from_string(b"0123456789")
        return result_of(lambda: blob.download_as_bytes(start=span[0], end=span[1], checksum=None))

    assert run_on_both(steps) is not None  # compares the two servers


def test_compose(run_on_both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        fill(bucket)
        target = bucket.blob("joined")
        target.content_type = "image/y"
        target.compose([bucket.blob(name) for name in ("d/e/2", "ünï", "a b+c")])
        target.reload()
        return target.download_as_bytes(), target.size, target.crc32c, target.content_type

    assert run_on_both(steps)[0] == bytes([3] * 3 + [7] * 7 + [1])


def test_too_many_sources(run_on_both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        bucket.blob("p").upload_from_string(b"1")
        return [result_of(lambda n=n: bucket.blob("t").compose([bucket.blob("p")] * n)) for n in (32, 33)]

    assert run_on_both(steps) == [None, 400]


def test_missing(run_on_both: Callable[[Steps], Any]) -> None:
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
        return [result_of(action) for action in actions]

    assert set(run_on_both(steps)) == {404, False}


def test_preconditions(run_on_both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("k")
        results = [result_of(lambda: blob.upload_from_string(b"1", if_generation_match=0))]
        results.append(result_of(lambda: blob.upload_from_string(b"2", if_generation_match=0)))
        results.append(result_of(lambda: blob.upload_from_string(b"3", if_generation_match=blob.generation)))
        results.append(result_of(lambda: blob.upload_from_string(b"4", if_generation_match=12345)))
        return [*results, blob.download_as_bytes()]

    assert run_on_both(steps) == [None, 412, None, 412, b"3"]


def test_copy_and_resumable(run_on_both: Callable[[Steps], Any]) -> None:
    data = os.urandom(3 * 262_144 + 1)

    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("big", chunk_size=262_144)
        blob.upload_from_string(data, content_type="image/x")
        copied = bucket.copy_blob(blob, bucket, "c/d")
        rewritten = bucket.blob("e").rewrite(blob)
        blob = bucket.get_blob("c/d")
        assert blob is not None
        same = copied.download_as_bytes() == data == bucket.blob("e").download_as_bytes()
        return same, rewritten, blob.size, blob.md5_hash, blob.crc32c, blob.content_type

    assert run_on_both(steps)[0] is True


def test_patch(run_on_both: Callable[[Steps], Any]) -> None:
    def steps(bucket: storage.Bucket) -> Any:
        blob = bucket.blob("k")
        blob.upload_from_string(b"1", content_type="image/x")
        blob.metadata = {"a": "1"}
        blob.patch()
        blob = bucket.get_blob("k")
        assert blob is not None
        return blob.metadata, blob.content_type, blob.download_as_bytes()

    run_on_both(steps)
