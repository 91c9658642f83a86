"""One page of a listing, planned over a sorted list of keys.

Keys are compared as Python strings, by code point, which is the order of their UTF-8 bytes.
"""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Page(NamedTuple):
    """Keys and rolled-up prefixes of one page, each ascending."""

    keys: Sequence[str]
    prefixes: Sequence[str]
    resume: str | None
    """Where the next page begins (inclusive); None when this is the last page."""
    last: str
    """The last key or prefix on this page, as V1 listings name it; "" on an empty page."""


def after(key: str) -> str:
    """The smallest string above ``key``."""
    return key + "\0"


def after_prefix(prefix: str) -> str | None:
    """The smallest string above every string that starts with ``prefix``; None when there is none."""
    while prefix:
        if prefix[-1] != "\U0010ffff":
            return prefix[:-1] + chr(ord(prefix[-1]) + 1)
        prefix = prefix[:-1]
    return None


def plan_page(keys: Sequence[str], *, prefix: str, delimiter: str, start: str, end: str | None, limit: int) -> Page:
    """The page of at most ``limit`` keys and prefixes in ``[start, end)`` that begin with ``prefix``."""
    low = bisect_left(keys, max(start, prefix))
    high = _cut(keys, after_prefix(prefix))
    if end is not None:
        high = min(high, bisect_left(keys, end))
    if limit <= 0 or low >= high:
        return Page((), (), None, "")
    if delimiter:
        return _rolled_up(keys, low, high, len(prefix), delimiter, limit)
    found = keys[low : min(high, low + limit)]
    return Page(found, (), after(found[-1]) if low + limit < high else None, found[-1])


def _cut(keys: Sequence[str], bound: str | None) -> int:
    return len(keys) if bound is None else bisect_left(keys, bound)


def _rolled_up(keys: Sequence[str], low: int, high: int, skip: int, delimiter: str, limit: int) -> Page:
    found: list[str] = []
    prefixes: list[str] = []
    last, resume = "", ""
    while low < high:
        if len(found) + len(prefixes) == limit:
            return Page(found, prefixes, resume, last)
        key = keys[low]
        place = key.find(delimiter, skip)
        if place < 0:
            found.append(key)
            last, resume = key, after(key)
            low += 1
            continue
        last = key[: place + len(delimiter)]
        prefixes.append(last)
        beyond = after_prefix(last)
        if beyond is None:
            break
        resume = beyond
        # Jump over everything below the prefix instead of walking it: a folder may hold a million keys.
        low = bisect_left(keys, beyond, low, high)
    return Page(found, prefixes, None, last)


def token_of(start: str) -> str:
    """An opaque page token for a listing that resumes at ``start``."""
    return base64.urlsafe_b64encode(start.encode("utf-8", "surrogatepass")).decode()


def start_of(token: str) -> str:
    """The inverse of :func:`token_of`; ValueError for a token that was never given out."""
    return base64.b64decode(token, altchars=b"-_", validate=True).decode("utf-8", "surrogatepass")
