"""Transfers that heal: what passing faults do to reads, listings and uploads, and what lasting ones are blamed for."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Bucket
from tests.faults.proxy import Fault, FaultKind, FaultProxy
from voxlane import Checkpoint, MapDataset, RetryConfig, Store, StoreConfig, errors, list_objects
from voxlane.store.crc32c import combine, crc32c
from voxlane.store.service_checksums import find_service_checksum
from voxlane.testing import Emulator, Faults

MIB = 1 << 20
ALWAYS = 10**9
RETRY = RetryConfig(deadline_s=20.0, initial_delay_s=0.01, max_delay_s=0.2)


@pytest.fixture
def proxy(emulator: Emulator) -> Iterator[FaultProxy]:
    with FaultProxy(emulator.url) as proxy:
        yield proxy


@pytest.fixture(params=["gs", "s3"])
def store(request: pytest.FixtureRequest, proxy: FaultProxy) -> Store:
    """Return the emulator's bucket behind the proxy."""
    keys = {"access_key_id": "k", "secret_access_key": "s"} if request.param == "s3" else {}
    config = StoreConfig(endpoint=proxy.url, retry=RETRY, part_bytes=5 * MIB, **keys)
    return Store(f"{request.param}://bkt", config)


def _impatient(store: Store) -> Store:
    """Return the store with a short limit on silence and slowness."""
    return Store(store.root, replace(store.config, read_timeout_s=1.0))


def _with_retry(store: Store, **changes: Any) -> Store:
    return Store(store.root, replace(store.config, retry=replace(RETRY, **changes)))


# -- uploads -----------------------------------------------------------------------------------------------------------


def test_parts_are_sent_again_while_the_store_is_gone(store: Store, proxy: FaultProxy, emulator: Emulator) -> None:
    body = os.urandom(23 * MIB)
    with store.open_writer("a") as writer:
        writer.write(body[: 12 * MIB])
        while proxy.requests < 2:
            time.sleep(0.01)
        outage = proxy.refuse_for(1.5)
        writer.write(body[12 * MIB :])
    outage.join()
    assert emulator.get("bkt", "a") == body
    assert emulator.uploads("bkt") == []
    assert store.counters.read().retries > 0


def test_error_of_a_part_counts_its_attempts(store: Store, emulator: Emulator) -> None:
    emulator.set_faults(Faults(error_rate=1.0, kinds=("part",)))
    brief = _with_retry(store, deadline_s=4.0)
    writer = brief.open_writer("a")
    with pytest.raises(errors.UnavailableError, match=r"503 .*, (\d\d|[2-9]) attempts"), writer:
        for _ in range(100):
            writer.write(bytes(MIB))


def test_lost_response_to_the_completion_is_recognised(store: Store, proxy: FaultProxy, emulator: Emulator) -> None:
    body = os.urandom(11 * MIB)
    with proxy.inject(Fault("lost", times=1, method="POST", path="uploadId=")), store.open_writer("a") as writer:
        writer.write(body)
    assert emulator.get("bkt", "a") == body


def test_upload_that_lost_its_parts_says_so(store: Store, emulator: Emulator) -> None:
    with pytest.raises(errors.StoreError, match="unfinished upload no longer exists"), store.open_writer("a") as writer:
        writer.write(bytes(11 * MIB))
        while not emulator.uploads("bkt"):
            time.sleep(0.01)
        emulator.wipe()
        emulator.create_bucket("bkt")
        writer.write(bytes(100 * MIB))


# -- reads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3000, 2 * MIB, 13 * MIB])
@pytest.mark.parametrize("kind", ["corrupted", "short", "html", "trickle", "truncated"])
def test_samples_are_read_again(
    store: Store, proxy: FaultProxy, emulator: Emulator, kind: FaultKind, size: int
) -> None:
    body = os.urandom(size)
    emulator.put("bkt", "data/a", body)
    config = _impatient(store).config if kind == "trickle" else store.config
    dataset = MapDataset(f"{store.root}data/", config=config)
    assert len(dataset) == 1
    with proxy.inject(fault := Fault(kind)):
        assert dataset[0] == body
    assert fault.met == 2


def test_bytes_that_stay_wrong_are_blamed_after_several_reads(store: Store, proxy: FaultProxy) -> None:
    store.put("a", b"x" * 5000)
    with proxy.inject(Fault("corrupted", times=ALWAYS)):
        with pytest.raises(errors.DamagedError, match=r"/a: the bytes differ from the service's .* after 5 reads"):
            store.get("a")
        unchecked = Store(store.root, replace(store.config, verify="off"))
        assert bytes(unchecked.get("a")) != b"x" * 5000


def test_checkpoint_is_blamed_after_several_reads(store: Store, proxy: FaultProxy) -> None:
    checkpoint = Checkpoint(f"{store.root}run", store.config)
    state = {"weights": torch.arange(3_000_000)}
    checkpoint.save(state, "a.ckpt")
    with proxy.inject(Fault("corrupted", times=3)):
        assert torch.equal(checkpoint.load("a.ckpt")["weights"], state["weights"])
    with (
        proxy.inject(Fault("corrupted", times=ALWAYS, path="ckpt")),
        pytest.raises((errors.CorruptError, errors.DamagedError), match=r"after 5 reads"),
    ):
        checkpoint.load("a.ckpt")


def test_slow_response_is_requested_again(store: Store, proxy: FaultProxy) -> None:
    store.put("a", bytes(50_000))
    target = np.ones(50_000, np.uint8)
    impatient = _impatient(store)
    with proxy.inject(Fault("trickle", times=1)):
        impatient.get_into("a", 0, target)
    assert not target.any()
    assert impatient.counters.read().retries >= 1


@pytest.mark.parametrize("kind", ["418"])
def test_errors_keep_the_code_of_the_service(store: Store, proxy: FaultProxy, kind: FaultKind) -> None:
    calls = (
        lambda: store.get("a"),
        lambda: store.put("a", b"x"),
        lambda: store.head("a"),
        lambda: list_objects(store.root, store=store),
    )
    for number, call in enumerate(calls):
        with proxy.inject(Fault(kind, times=1)), pytest.raises(errors.StoreError, match="418") as raised:
            call()
        assert number == 2 or "Teapot" in str(raised.value)  # the answer to a HEAD has no body


# -- listings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["html", "repeated page", "truncated", "trickle"])
def test_listing_is_requested_again(store: Store, proxy: FaultProxy, emulator: Emulator, kind: FaultKind) -> None:
    emulator.fill("bkt", count=4500)
    with proxy.inject(fault := Fault(kind)):
        listed = list_objects(store.root, store=_impatient(store) if kind == "trickle" else store)
    assert len(listed) == 4500
    assert fault.met == 2


@pytest.mark.parametrize("kind", ["html", "repeated page"])
def test_listing_without_progress_ends(store: Store, proxy: FaultProxy, emulator: Emulator, kind: FaultKind) -> None:
    emulator.fill("bkt", count=4500)
    brief = _with_retry(store, deadline_s=0.5)
    problem = "no progress|goes back|twice|not a complete listing|HTML page"
    with proxy.inject(Fault(kind, times=ALWAYS)), pytest.raises(errors.StoreError, match=problem):
        list_objects(store.root, store=brief, concurrency=1)


# -- checksums ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_checksums_of_parts_combine(parts: list[bytes]) -> None:
    body = b"".join(parts)
    assert combine((crc32c(part), len(part)) for part in parts) == crc32c(body) == google_crc32c.value(body)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-goog-hash": "md5=AAAA,crc32c=4waSgw=="}, "crc32c"),
        ({"x-amz-checksum-crc32": "y/Q5Jg=="}, "crc32"),
        ({"x-amz-checksum-crc64nvme": "AAAAAAAAAAA=", "x-amz-checksum-sha1": "AAAA"}, "crc64nvme"),
        ({"x-amz-checksum-sha256": "AAAA", "etag": '"' + "0" * 32 + '"'}, "sha256"),
        ({"x-amz-checksum-crc32": "y/Q5Jg==-2", "etag": '"' + "0" * 32 + '-2"'}, None),
        ({"x-amz-checksum-crc32c": "4waSgw==", "x-amz-checksum-type": "COMPOSITE"}, None),
        ({"etag": '"' + "0" * 32 + '"'}, "md5"),
        ({"etag": '"' + "0" * 32 + '"', "x-amz-server-side-encryption": "aws:kms"}, None),
    ],
)
def test_fastest_checksum_is_chosen(headers: dict[str, str], expected: str | None) -> None:
    checksum = find_service_checksum(headers, is_s3=True, is_range=False)
    assert (checksum and checksum.algorithm) == expected


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME"])
@pytest.mark.parametrize("size", [3 * MIB, 12 * MIB], ids=["whole", "in parts"])
def test_checksums_of_s3_are_compared(s3: Bucket, algorithm: Any, size: int) -> None:
    body = os.urandom(size)
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "testtest", "region_name": "us-east-1"}
    with contextlib.closing(boto3.client("s3", endpoint_url=s3.config.endpoint, **keys)) as client:
        client.put_object(Bucket=s3.store.bucket, Key="a", Body=body, ChecksumAlgorithm=algorithm)
    with FaultProxy(s3.config.endpoint or "") as proxy:
        # "crc" leaves out the MD5 in the etag, so that only the CRC can notice the fault.
        config = replace(s3.config, endpoint=proxy.url, retry=RETRY, part_bytes=5 * MIB, verify="crc")
        dataset = MapDataset(s3.uri, config=config)
        with proxy.inject(fault := Fault("corrupted", path="/a")):
            assert dataset[0] == body
        assert fault.met == 2


def test_whole_object_of_another_size_has_changed(s3: Bucket) -> None:
    s3.store.put("a", bytes(2 * MIB))
    target = np.empty(3 * MIB, np.uint8)
    with pytest.raises(errors.ChangedError, match=f"{3 * MIB} bytes"):
        s3.store.get_into("a", 0, target, is_whole=True)


def test_azure_is_checked_too(azure: Bucket) -> None:
    body = os.urandom(20_000)
    azure.store.put("a", body)
    with FaultProxy(azure.config.endpoint or "") as proxy:
        store = Store(azure.uri, replace(azure.config, endpoint=proxy.url))
        with proxy.inject(Fault("corrupted")):
            assert bytes(store.get("a")) == body
        assert store.counters.read().retries == 2
