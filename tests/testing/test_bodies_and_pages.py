"""The pure parts, against the obvious way of writing them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from voxlane.testing import synthetic
from voxlane.testing.bodies import PATTERN_BYTES, Blob, Body, Joined, Synthetic, content
from voxlane.testing.listing import decode_token, encode_token, end_of_prefix, plan_page, successor
from voxlane.testing.responses import decode_aws_chunked, parse_range

ALPHABET = "ab/-\u00fc\U0010ffff"
KEYS = st.lists(st.text(ALPHABET, min_size=1, max_size=6), unique=True)


@given(st.lists(st.binary(max_size=9), max_size=6), st.data())
def test_joined_bodies_slice_like_bytes(pieces: list[bytes], data: st.DataObject) -> None:
    body: Body = Joined([Joined(map(Blob, pieces[:3])), *map(Blob, pieces[3:])])
    whole = b"".join(pieces)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert body.size == len(whole)
    assert b"".join(body.slices(start, stop)) == whole[start:stop]


@given(st.text(), st.integers(0, 2 * PATTERN_BYTES + 3), st.integers(0, 5))
def test_synthetic_bodies_slice_like_bytes(key: str, start: int, length: int) -> None:
    size = 2 * PATTERN_BYTES + 8
    assert b"".join(Synthetic(key, size).slices(start, start + length)) == synthetic(key, size)[start : start + length]


def test_synthetic_bodies_do_not_change() -> None:
    # Benchmarks and other machines rely on these bytes.
    assert synthetic("img-00000000.bin", 8).hex() == "13ebe7c18381943d"
    assert content(Synthetic("k", 100)) == synthetic("k", 200)[:100]


def naive_listing(keys: list[str], prefix: str, delimiter: str, start: str, end: str | None) -> list[tuple[str, str]]:
    """(kind, name) of every key and rolled-up prefix, in order."""
    rows_listed: dict[tuple[str, str], None] = {}
    for key in sorted(keys, key=str.encode):
        if not key.startswith(prefix) or key < start or (end is not None and key >= end):
            continue
        index = key.find(delimiter, len(prefix)) if delimiter else -1
        rows_listed[("key", key) if index < 0 else ("prefix", key[: index + len(delimiter)])] = None
    return list(rows_listed)


@given(
    KEYS,
    st.text(ALPHABET, max_size=2),
    st.sampled_from(["", "/", "-", "ab"]),
    st.text(ALPHABET, max_size=2),
    st.none() | st.text(ALPHABET, max_size=2),
    st.integers(1, 4),
)
def test_pages_add_up(keys: list[str], prefix: str, delimiter: str, start: str, end: str | None, limit: int) -> None:
    ordered = sorted(keys)
    rows_listed: list[tuple[str, str]] = []
    resume: str | None = start
    while resume is not None:
        page = plan_page(ordered, prefix=prefix, delimiter=delimiter, start=resume, end=end, limit=limit)
        rows = sorted([(key, "key") for key in page.keys] + [(name, "prefix") for name in page.prefixes])
        assert len(rows) == limit or page.resume is None
        rows_listed.extend((kind, name) for name, kind in rows)
        resume = None if page.resume is None else decode_token(encode_token(page.resume))
    assert rows_listed == naive_listing(keys, prefix, delimiter, start, end)


@given(st.text(), st.text())
def test_successors_and_ends_of_prefixes(first: str, second: str) -> None:
    assert (second >= successor(first)) == (second > first)
    bound = end_of_prefix(first)
    if second.startswith(first):
        assert bound is None or second < bound
    elif second > first:
        assert bound is not None
        assert second >= bound


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
def test_ranges_select_like_slices(first: int, length: int, size: int) -> None:
    data = bytes(range(size))
    if first < size:
        span = parse_range(f"bytes={first}-{first + length}", size)
        assert span is not None
        assert data[span[0] : span[1]] == data[first : first + length + 1]
    span = parse_range(f"bytes=-{length + 1}", size)
    assert span is not None
    assert data[span[0] : span[1]] == data[-(length + 1) :]


def test_other_ranges_select_the_complete_object() -> None:
    for header in (None, "", "bytes=", "bytes=-", "items=0-1", "bytes=0-1,4-5", "bytes=5-2"):
        assert parse_range(header, 10) is None


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5))
def test_aws_chunked_bodies_are_decoded(pieces: list[bytes]) -> None:
    framed = b"".join(b"%x;chunk-signature=abc\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    assert decode_aws_chunked(framed + b"0\r\nx-amz-checksum-crc32:AAAA==\r\n\r\n") == b"".join(pieces)
