"""Split points in the key space lie strictly inside the range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxlane.store.listing.split import disputed, just_before, midpoint, usable

KEYS = st.text(st.characters(min_codepoint=32, max_codepoint=0x10FFFF, exclude_categories=("Cs",)), max_size=12)


@given(KEYS, KEYS, st.sets(KEYS.filter(bool).map(lambda s: s[0]), min_size=1, max_size=40))
def test_split_point_is_strictly_between_the_ends(first: str, other: str, alphabet: set[str]) -> None:
    low, high = sorted((first, other))
    cut = midpoint(low, high, "", sorted(alphabet))
    assert cut is None or low < cut < high
    assert cut is None or usable(cut) == cut


@given(KEYS, KEYS, st.sets(KEYS.filter(bool).map(lambda s: s[0]), min_size=1, max_size=40))
def test_open_end_is_split_above_the_cursor(prefix: str, rest: str, alphabet: set[str]) -> None:
    cut = midpoint(prefix + rest, None, prefix, sorted(alphabet))
    assert cut is None or cut > prefix + rest


@pytest.mark.parametrize(("low", "high"), [("img", "img-"), ("a", "aa"), ("a", "a"), ("", "-"), ("x/", "x/-")])
def test_difficult_ranges_return(low: str, high: str) -> None:
    cut = midpoint(low, high, "", list("-agimx"))
    assert cut is None or low < cut < high


def test_middle_of_numbered_keys_is_near_their_middle() -> None:
    cut = midpoint("img-000000", "img-999999", "", list("-0123456789gim"))
    assert cut is not None
    assert "img-4" <= cut <= "img-6"


@pytest.mark.parametrize(
    ("key", "expected"), [("a/b", "a/b"), ("a//b", "a"), ("a/../b", "a"), ("a/", "a"), ("a\x01b", "a"), ("/", None)]
)
def test_usable_start_of_a_key(key: str, expected: str | None) -> None:
    assert usable(key) == expected


@given(KEYS)
def test_just_before_precedes_every_key_of_the_prefix(prefix: str) -> None:
    start = just_before(prefix)
    assert start is None or start < prefix


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        ("foo-1", "foo/x", True),
        ("foo/x", "foo.y", True),
        ("foo/x", "foo0", False),
        ("a", "a/b", False),
        ("a", "b", False),
    ],
)
def test_order_that_folder_sorting_servers_dispute(first: str, other: str, expected: bool) -> None:
    assert disputed(first, other) is disputed(other, first) is expected
