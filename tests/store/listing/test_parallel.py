"""Parallel listing against any set of keys: each key once, in order, also when the server sorts by folder."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from voxlane.store.listing.parallel import OutOfOrderError, ParallelLister

SEGMENT = st.text(st.characters(min_codepoint=33, max_codepoint=0x10FFFF, exclude_characters="/", exclude_categories=("Cs", "Cc")), min_size=1, max_size=6).filter(lambda s: s not in (".", ".."))  # noqa: E501  # fmt: skip
WILD = st.lists(SEGMENT, min_size=1, max_size=3).map("/".join)
NUMBERED = st.integers(0, 99_999).map(lambda i: f"train/case_{i:05d}/img.nii.gz")
NESTED = st.lists(st.sampled_from(["a", "a-", "a/a", "a.b", "img", "img-"]), min_size=1, max_size=4).map("".join)
KEY_SETS = st.one_of(*(st.sets(k, max_size=200) for k in (WILD, NUMBERED, NESTED))).map(
    lambda keys: {k for k in keys if not any(s in ("", ".", "..") for s in k.split("/"))}
)


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
