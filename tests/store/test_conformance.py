"""The behaviour that all stores share, on every kind of server."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane import Store, errors, list_objects
from voxlane.store.direct import DirectStore
from voxlane.store.ranges import Span, coalesce

MIB = 1 << 20


def test_put_then_get_head_and_ranges(bucket: Bucket) -> None:
    store, key = bucket.store, bucket.key("a/b.bin")
    put_info = store.put(key, b"0123456789")
    assert bytes(store.get(key)) == b"0123456789"
    assert bytes(store.get(key, 2, 5)) == b"234"
    assert bytes(store.get(key, 7)) == b"789"
    assert bytes(store.get(key, 4, 4)) == b""
    info = store.head(key)
    assert (info.key, info.size) == (key, 10)
    assert info.etag == put_info.etag
    assert info.etag is not None


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)).map(sorted), max_size=8), st.integers(0, 300))
def test_coalesced_ranges_equal_slices(bucket: Bucket, spans: list[list[int]], max_gap_bytes: int) -> None:
    body = bytes(i % 251 for i in range(1000))
    store, key = bucket.store, bucket.key("ranges")
    store.put(key, body)
    plan = coalesce([Span(a, b) for a, b in spans], max_gap_bytes=max_gap_bytes)
    bodies = [bytes(store.get(key, group.start, group.stop)) for group in plan.groups]
    slices = [bodies[group][start : start + b - a] for (a, b), (group, start) in zip(spans, plan.places, strict=True)]
    assert slices == [body[a:b] for a, b in spans]


def test_get_into_equals_get(bucket: Bucket) -> None:
    body = bytes(i % 251 for i in range(700_000))
    store, key = bucket.store, bucket.key("k")
    etag = store.put(key, body).etag
    for start, stop in ((0, 700_000), (5, 6), (100, 600_001)):
        target = np.zeros(stop - start, np.uint8)
        store.get_into(key, start, target, etag=etag)
        assert target.tobytes() == body[start:stop] == bytes(store.get(key, start, stop))
    with pytest.raises(errors.RangeError, match="outside the object"):
        store.get_into(key, 699_999, np.zeros(2, np.uint8))
    with pytest.raises(errors.ChangedError):
        store.get_into(key, 0, np.zeros(2, np.uint8), etag='"another"')


def test_get_into_without_the_library_for_credentials_uses_the_engine(
    gcs: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def refuse(*args: Any, **options: Any) -> Any:
        tries.append(args)
        raise errors.MissingExtraError.of("gcs", "this request")

    monkeypatch.setattr(DirectStore, "get", refuse)
    gcs.store.put("k", bytes(range(200)))
    store = Store(gcs.uri, gcs.config)
    for _ in range(2):
        target = np.zeros(50, np.uint8)
        store.get_into("k", 10, target)
        assert target.tolist() == list(range(10, 60))
    assert len(tries) == 1


@pytest.mark.parametrize("size", [0, 1, 100_000, 3_000_000])
def test_get_bytes_equals_get(bucket: Bucket, size: int) -> None:
    body = np.random.default_rng(size).bytes(size)
    store, key = bucket.store, bucket.key("k")
    etag = store.put(key, body).etag
    before = store.counters.read()
    result = store.get_bytes(key, etag=etag)
    assert type(result) is bytes
    assert result == body
    after = store.counters.read()
    assert after.requests - before.requests == 1
    assert after.bytes_read - before.bytes_read == size
    assert bytes(store.get(key)) == result
    with pytest.raises(errors.ChangedError):
        store.get_bytes(key, etag='"another"')
    with pytest.raises(errors.NotFoundError):
        store.get_bytes(bucket.key("missing"))


def test_get_chunks_equals_get(bucket: Bucket) -> None:
    body = bytes(i % 251 for i in range(700_000))
    store, key = bucket.store, bucket.key("k")
    etag = store.put(key, body).etag
    for start, stop in ((0, 700_000), (5, 6), (100, 600_001)):
        received = bytearray()

        def take(offset: int, chunk: Any, start: int = start, received: bytearray = received) -> None:
            assert offset == start + len(received)
            received += bytes(chunk)

        assert store.get_chunks(key, start, stop, take, etag=etag) == len(body)
        assert received == body[start:stop]
    with pytest.raises(errors.RangeError, match="outside the object"):
        store.get_chunks(key, 699_999, 700_001, lambda *_: None)
    with pytest.raises(errors.ChangedError):
        store.get_chunks(key, 0, 2, lambda *_: None, etag='"another"')


@pytest.mark.parametrize("key", ["plain", "with space", "plus+percent%20", "unié/日本語", "a#b?c&d=e", "~tilde[1]"])
def test_any_key_round_trips(bucket: Bucket, key: str) -> None:
    store = bucket.store
    store.put(bucket.key(key), key.encode())
    assert bytes(store.get(bucket.key(key))) == key.encode()
    assert list_objects(bucket.uri, config=bucket.config, store=store).keys() == [bucket.key(key)]


def test_empty_object(bucket: Bucket) -> None:
    store = bucket.store
    store.put(bucket.key("empty"), b"")
    assert bytes(store.get(bucket.key("empty"))) == b""
    assert store.head(bucket.key("empty")).size == 0


def test_create_only_and_if_version_matches(bucket: Bucket) -> None:
    store, key = bucket.store, bucket.key("once")
    first = store.put(key, b"one", if_absent=True)
    with pytest.raises(errors.AlreadyExistsError, match="once"):
        store.put(key, b"two", if_absent=True)
    second = store.put(key, b"two", if_etag=first.etag)
    with pytest.raises(errors.ChangedError, match="once"):
        store.put(key, b"three", if_etag=first.etag)
    assert bytes(store.get(key)) == b"two"
    assert second.etag != first.etag


def test_get_of_another_version_fails(bucket: Bucket) -> None:
    store, key = bucket.store, bucket.key("pinned")
    etag = store.put(key, b"old content").etag
    assert bytes(store.get(key, etag=etag)) == b"old content"
    store.put(key, b"new")
    with pytest.raises(errors.ChangedError, match="pinned"):
        store.get(key, etag=etag)
    with pytest.raises(errors.ChangedError, match="pinned"):
        store.get(key, 0, 1, etag=etag)


def test_missing_object(bucket: Bucket) -> None:
    for call in (bucket.store.get, bucket.store.head):
        with pytest.raises(errors.NotFoundError, match="nothing-here"):
            call(bucket.key("nothing-here"))
    assert not bucket.store.exists(bucket.key("nothing-here"))


def test_copy_and_delete(bucket: Bucket) -> None:
    store = bucket.store
    store.put(bucket.key("from"), b"body")
    store.copy(bucket.key("from"), bucket.key("to"))
    assert bytes(store.get(bucket.key("to"))) == b"body"
    store.delete([bucket.key("from"), bucket.key("never-was")])
    assert list_objects(bucket.uri + "/", config=bucket.config, store=store).keys() == [bucket.key("to")]


def test_delete_prefix_is_a_plain_prefix(bucket: Bucket) -> None:
    store = bucket.store
    for name in ("foo/a", "foo/a1", "foo/ab/c", "foo/b"):
        store.put(bucket.key(name), b"x")
    assert store.delete_prefix(bucket.key("foo/a")) == 3
    assert list_objects(bucket.uri + "/", config=bucket.config, store=store).keys() == [bucket.key("foo/b")]


def test_list_prefix_is_a_plain_prefix(bucket: Bucket) -> None:
    store = bucket.store
    names = ["foo", "foo-1", "foo.txt", "foo1/x", "fooa", "fop", "fo", "é"]
    for name in names:
        store.put(bucket.key(name), b"x")
    listed_keys = list_objects(f"{bucket.uri}/foo", config=bucket.config, store=store).keys()
    assert listed_keys == sorted(bucket.key(n) for n in names if n.startswith("foo"))


@pytest.mark.parametrize("size", [0, 1, 5 * MIB, 11 * MIB + 3])
def test_writer_publishes_on_commit(bucket: Bucket, size: int) -> None:
    body = bytes(bytearray(range(256))) * (size // 256 + 1)
    body = body[:size]
    store = bucket.with_config(part_bytes=5 * MIB).store
    with store.open_writer(bucket.key("big")) as writer:
        for start in range(0, size, 1_000_003):
            writer.write(body[start : start + 1_000_003])
            if start > 6 * MIB:
                assert not store.exists(bucket.key("big"))
        assert writer.tell() == size
    assert bytes(store.get(bucket.key("big"))) == body


def test_writer_publishes_nothing_after_an_exception_or_unless_closed(bucket: Bucket) -> None:
    store = bucket.with_config(part_bytes=5 * MIB).store
    with pytest.raises(ZeroDivisionError), store.open_writer(bucket.key("half")) as writer:
        writer.write(bytes(11 * MIB))
        raise ZeroDivisionError
    dropped = store.open_writer(bucket.key("dropped"))
    dropped.write(bytes(11 * MIB))
    with pytest.warns(errors.DiscardedWarning, match="dropped: 11,534,336 bytes were discarded"):
        del dropped
    aborted = store.open_writer(bucket.key("aborted"))
    aborted.write(b"x")
    aborted.abort()
    aborted.close()
    assert list_objects(bucket.uri, config=bucket.config, store=store).keys() == []


def test_store_pickles_with_its_config(shared_bucket: Bucket) -> None:
    shared_bucket.store.put(shared_bucket.key("k"), b"v")
    copy: Store = pickle.loads(pickle.dumps(shared_bucket.store))
    assert copy.config == shared_bucket.config
    assert bytes(copy.get(shared_bucket.key("k"))) == b"v"


def test_memory_store_cannot_be_pickled(memory: Bucket) -> None:
    with pytest.raises(errors.ConfigError, match="cannot leave its process"):
        pickle.dumps(memory.store)


def test_requests_and_bytes_are_counted(bucket: Bucket) -> None:
    store = bucket.store
    store.put(bucket.key("a"), b"12345")
    store.get(bucket.key("a"))
    store.get(bucket.key("a"), 1, 3)
    store.head(bucket.key("a"))
    traffic = store.counters.read()
    assert traffic.by_kind["put"] == {"requests": 1, "retries": 0, "bytes_read": 0, "bytes_written": 5}
    assert traffic.by_kind["get"] == {"requests": 2, "retries": 0, "bytes_read": 7, "bytes_written": 0}
    assert traffic.by_kind["head"]["requests"] == 1
    assert (traffic.requests, traffic.bytes_read, traffic.retries) == (4, 7, 0)
