"""Parallel listing against any set of keys: each key once, in order, also when the server sorts by folder."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane import list_objects
from voxlane.store import direct
from voxlane.store.listing.parallel import OutOfOrderError, ParallelLister
from voxlane.testing import Emulator

SEGMENT = st.text(
    st.characters(min_codepoint=1, max_codepoint=0x10FFFF, exclude_characters="/", exclude_categories=["Cs"]),
    max_size=6,
)
WILD = st.lists(SEGMENT, min_size=1, max_size=3).map("/".join).filter(bool)
NUMBERED = st.integers(0, 99_999).map(lambda i: f"train/case_{i:05d}/img.nii.gz")
NESTED = st.lists(st.sampled_from(["a", "a-", "a/a", "a.b", "img", "img-"]), min_size=1, max_size=4).map("".join)
PIECES = ["a", "b", "/", "//", ".", "..", "\t", "\n", "\x7f", "%2F", "+", " ", "é", "e\u0301", "\u2028", "😀", "0"]
HOSTILE = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
"""Keys that are paths nowhere: empty and dot segments, control characters, slashes at the ends."""
KEY_SETS = st.one_of(*(st.sets(k, max_size=200) for k in (WILD, NUMBERED, NESTED, HOSTILE)))


def paged(keys: set[str], page: int, order: Callable[[str], Any]) -> Callable[[str | None], Iterator[Any]]:
    """A server that lists `keys` in `order`, `page` at a time, from after any key."""
    ordered = sorted(keys, key=order)

    def pages(start: str | None) -> Iterator[Any]:
        rest = ordered if start is None else [k for k in ordered if order(k) > order(start)]
        for i in range(0, len(rest), page):
            yield pa.record_batch([pa.array(rest[i : i + page], pa.string())], names=["key"])

    return pages


def listed(keys: set[str], page: int, prefix: str, order: Callable[[str], Any] = str) -> list[str]:
    lister = ParallelLister(paged(keys, page, order), prefix, workers=8, on_keys=lambda n: None)
    return [k for batch in lister.run() for k in batch.column("key").to_pylist()]


@settings(deadline=None, max_examples=300)
@given(KEY_SETS, st.integers(1, 9), st.data())
def test_every_key_once_in_order(keys: set[str], page: int, data: st.DataObject) -> None:
    prefix = data.draw(st.sampled_from(["", *sorted({k[: len(k) // 2] for k in keys})]))
    assert listed(keys, page, prefix) == sorted(k for k in keys if k.startswith(prefix))


def by_folder(key: str) -> str:
    return key.replace("/", "\x00")


@settings(deadline=None, max_examples=300)
@given(KEY_SETS, st.integers(1, 9))
def test_server_that_sorts_by_folder_is_detected(keys: set[str], page: int) -> None:
    try:
        listed_keys = listed(keys, page, "", by_folder)
    except OutOfOrderError:
        return
    assert listed_keys == sorted(keys)


def test_large_uneven_key_space_needs_few_extra_requests() -> None:
    rng = random.Random(0)
    keys = {f"{'deep/' * 5}{rng.choice('ab')}/{rng.randrange(10**6):07d}.bin" for _ in range(20_000)}
    keys |= {f"other/{i}" for i in range(50)}
    requests = 0
    server = paged(keys, 100, str)

    def counted(start: str | None) -> Iterator[Any]:
        nonlocal requests
        for batch in server(start):
            requests += 1
            yield batch
        requests += 1

    lister = ParallelLister(counted, "", workers=16, on_keys=lambda n: None)
    listed_keys = [k for batch in lister.run() for k in batch.column("key").to_pylist()]
    assert listed_keys == sorted(keys)
    assert requests < 2 * len(keys) / 100


def test_failing_page_fails_the_listing() -> None:
    def pages(start: str | None) -> Iterator[Any]:
        yield from paged({f"{i:04d}" for i in range(1000)}, 10, str)(start)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        ParallelLister(pages, "", workers=4, on_keys=lambda n: None).run()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.sets(st.one_of(HOSTILE, NUMBERED, WILD), max_size=60),
    page=st.integers(1, 9),
    workers=st.sampled_from([1, 2, 8]),
    data=st.data(),
)
@pytest.mark.parametrize("dialect", ["gcs", "s3_emulator"])
def test_listing_a_server_equals_its_sorted_keys(
    dialect: str,
    request: pytest.FixtureRequest,
    emulator: Emulator,
    keys: set[str],
    page: int,
    workers: int,
    data: st.DataObject,
) -> None:
    bucket: Bucket = request.getfixturevalue(dialect)
    emulator.wipe()
    emulator.create_bucket("bkt")
    emulator.put_many("bkt", dict.fromkeys(keys, b"x"))
    prefix = data.draw(st.sampled_from(["", *sorted({k[: len(k) // 2] for k in keys} | keys)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "LIST_PAGE_KEYS", page)
        manifest = list_objects(f"{bucket.uri}/{prefix}", config=bucket.config, concurrency=workers)
    assert manifest.keys() == sorted(key for key in keys if key.startswith(prefix))
